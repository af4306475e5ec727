"""Mixture-of-Experts models larger than VRAM on llama.cpp: single experts placed while it runs.

Needs the patched llama-cpp-python that `scripts/build_llama.py` installs; an ImportError says so if another one is found.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moespac_llamacpp._build import is_command, require_patched

if TYPE_CHECKING:
    from moespac_llamacpp.api import Moespac

__all__ = ["Moespac", "__version__"]
__version__ = "0.1.0"

try:
    require_patched()
except ImportError as error:
    if is_command():  # its user wants the sentence, not where it was raised
        raise SystemExit(f"moespac: {error}") from None
    raise


def __getattr__(name: str) -> Any:
    """Moespac, when somebody asks for it: the policies alone need neither llama.cpp nor its types."""
    if name == "Moespac":
        from moespac_llamacpp.api import Moespac

        return Moespac
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
