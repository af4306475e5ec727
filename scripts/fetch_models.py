"""Fetches the models of models.txt that are named, as `moespac pull` does; without a name it lists them.

python scripts/fetch_models.py [NAME ...]
"""

from __future__ import annotations

import sys

import typer

from moespac_llamacpp.commands.models import models_command, pull_command
from moespac_llamacpp.models import capture_log


def main() -> None:
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(__doc__)
        return
    capture_log()
    try:
        if not sys.argv[1:]:
            models_command()
        for name in sys.argv[1:]:
            pull_command(name)
    except typer.Exit as end:
        raise SystemExit(end.exit_code) from None


if __name__ == "__main__":
    main()
