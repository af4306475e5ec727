#!/usr/bin/env python3
"""Build the rival, llama.cpp of the same source without patches, and compare with it.

    python scripts/compare_stock.py                                  # only build; says what to give to --stock
    python scripts/compare_stock.py -- --pair DIR --rows sd-25-t16   # then: moespac bench compare --stock ... --pair DIR ...

The build is that of scripts/build_llama.py --stock, with the same flags as ours (CMAKE_ARGS), in build/stock/venv. What comes
after `--` goes to `moespac bench compare` as it is.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / "build" / "stock" / "venv"


def main(arguments: list[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    own, rest = (given[: given.index("--")], given[given.index("--") + 1 :]) if "--" in given else (given, [])
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--backend", choices=("auto", "cpu", "cuda"), default="auto", help="as for build_llama.py")
    parser.add_argument("--venv", type=Path, default=VENV, help="where the rival lives (default: build/stock/venv)")
    options = parser.parse_args(own)
    build = [sys.executable, str(ROOT / "scripts" / "build_llama.py"), "--stock"]
    code = subprocess.run([*build, "--venv", str(options.venv), "--backend", options.backend], check=False).returncode
    python = options.venv / "bin" / "python"
    if code != 0 or not rest:
        print(
            f"compare_stock: give --stock {python} to moespac bench compare" if code == 0 else "compare_stock: no rival"
        )
        return code
    command = [sys.executable, "-m", "moespac_llamacpp.cli", "bench", "compare", "--stock", str(python), *rest]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
