"""Mixture-of-Experts models larger than VRAM on llama.cpp: single experts placed while it runs.

Needs the patched llama-cpp-python that `scripts/build_llama.py` installs; an ImportError says so if another one is found.
"""

from __future__ import annotations

from moespac_llamacpp._build import is_command, require_patched

__version__ = "0.1.0"

try:
    require_patched()
except ImportError as error:
    if is_command():  # its user wants the sentence, not where it was raised
        raise SystemExit(f"moespac: {error}") from None
    raise
