"""The file of the Hugging Face hub that a short name means: owner/repository[:quant], as llama.cpp's -hf takes it."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import constants, list_repo_files
from huggingface_hub.errors import OfflineModeIsEnabled, RepositoryNotFoundError

from moespac_llamacpp.catalog import HubFile
from moespac_llamacpp.fetch import FetchError

#: What llama.cpp looks for first where no quant is named
DEFAULT_QUANT = "Q4_K_M"


def find(name: str) -> HubFile:
    """The cache is asked first, so that what was fetched once needs no network.

    FetchError: no such repository or file, no network. ValueError: not a name of this form."""
    if name.endswith(".gguf"):
        return HubFile.parse(name)
    repo, _, quant = name.partition(":")
    if repo.count("/") != 1 or not all(repo.split("/")):
        raise ValueError(f"{name!r} is not owner/repository[:quant], nor owner/repository/file.gguf")
    if found := choose(_cached(repo), quant or DEFAULT_QUANT):
        return HubFile(repo, found)
    names = _listed(repo)
    if found := choose(names, quant or DEFAULT_QUANT) or choose(names, quant):
        return HubFile(repo, found)
    what = f"file of {quant}" if quant else "file"
    raise FetchError(f"{repo}: it has no GGUF {what}; it has {', '.join(names) or 'none at all'}")


def match(repo: str, pattern: str) -> HubFile:
    """The one model of the repository whose file's name matches the pattern (*, ?, [set]); a split model counts once.

    FetchError: none or several, and as `find`."""
    if not any(character in pattern for character in "*?["):
        return HubFile(repo, pattern)
    names = _listed(repo)
    models = sorted({HubFile(repo, name).parts[0] for name in names if fnmatch.fnmatch(name, pattern)})
    if len(models) != 1:
        matching = (
            f"{len(models)} models match {pattern!r}: {', '.join(models)}" if models else f"no file matches {pattern!r}"
        )
        raise FetchError(f"{repo}: {matching}; it has {', '.join(names) or 'no GGUF files'}")
    return HubFile(repo, models[0])


def choose(names: Sequence[str], quant: str) -> str | None:
    """The first file, of a split model the first part, whose name has the quant. (mmproj: the image part of another program.)"""
    for name in sorted(names):
        if HubFile("", name).parts[0] == name and quant.lower() in name.lower() and "mmproj" not in name.lower():
            return name
    return None


def _cached(repo: str) -> list[str]:
    snapshots = Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}" / "snapshots"
    return sorted({str(Path(*path.relative_to(snapshots).parts[1:])) for path in snapshots.glob("*/**/*.gguf")})


def _listed(repo: str) -> list[str]:
    try:
        return sorted(name for name in list_repo_files(repo) if name.endswith(".gguf"))
    except RepositoryNotFoundError as error:
        raise FetchError(
            f"{repo}: there is no such repository, or it is private and HF_TOKEN does not open it"
        ) from error
    except OfflineModeIsEnabled as error:
        raise FetchError(f"{repo}: not fetched yet, and HF_HUB_OFFLINE forbids the network: unset it") from error
    except Exception as error:  # whatever the HTTP library of this release of huggingface-hub raises
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise FetchError(f"{repo}: the hub at {constants.ENDPOINT} gave no answer ({reason})") from error
