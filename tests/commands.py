"""The command line within the test's own process: quicker than another one, and it can be patched."""

from __future__ import annotations

from typer.testing import CliRunner, Result

from moespac_llamacpp.cli import app
from moespac_llamacpp.models import recorded_log


def invoke(*arguments: object) -> Result:
    """`moespac ARGUMENTS`; afterwards llama.cpp's log goes where it went before."""
    with recorded_log():
        return CliRunner().invoke(app, [str(a) for a in arguments])
