"""`moespac` and `python -m moespac_llamacpp`: the command line, quiet also if Ctrl-C comes while Python still imports it."""

from __future__ import annotations

import sys


def main() -> None:
    try:
        from moespac_llamacpp.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
