"""Is the installed llama-cpp-python the patched one?"""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

#: The first word of the local version that scripts/build_llama.py gives its build: 0.3.36+moespac.1
LOCAL_VERSION = "moespac"


def installed_version() -> str | None:
    """Version of the installed llama-cpp-python, None if there is no such distribution."""
    try:
        return metadata.version("llama-cpp-python")
    except metadata.PackageNotFoundError:
        return None


def is_command() -> bool:
    """Is this process the command `moespac`, not somebody's own program?"""
    return Path(sys.argv[0]).name == "moespac"


def require_patched() -> None:
    """ImportError with one sentence unless llama-cpp-python is the patched build.

    The version tells in the usual case, without loading the library. Libraries that were built by hand have no such
    version: then the library itself is asked for our entry points.
    """
    version = installed_version()
    if version is not None and version.partition("+")[2].startswith(LOCAL_VERSION):
        return
    try:
        import llama_cpp

        patched = hasattr(llama_cpp.llama_cpp._lib, "llama_moe_attach")
    except (
        ImportError,
        OSError,
        RuntimeError,
    ) as error:  # llama_cpp raises the others for a library that does not load
        raise ImportError(
            "moespac_llamacpp needs its patched build of llama-cpp-python, and none can be imported "
            f"({error}): run `python scripts/build_llama.py` in the project's folder."
        ) from error
    if not patched:
        raise ImportError(
            f"moespac_llamacpp needs its patched build of llama-cpp-python, but {version or 'another build'} is installed, "
            "which is unpatched: run `python scripts/build_llama.py` in the project's folder, which replaces it."
        )
