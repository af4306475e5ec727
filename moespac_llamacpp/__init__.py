"""Mixture-of-Experts models larger than VRAM on llama.cpp: single experts placed while it runs.

Needs the patched llama-cpp-python that `scripts/build_llama.py` installs; an ImportError says so if another one is found.
"""

from __future__ import annotations

from moespac_llamacpp._build import require_patched

__version__ = "0.1.0"

require_patched()
