from moespac_llamacpp.commands.options import *


def serve_command():
    pass
