"""GGUF files of the Hugging Face hub, by repository and file name, through huggingface_hub with its cache, token and settings."""

from __future__ import annotations

import fnmatch
import re
from pathlib import Path

_SPLIT = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


class HubError(RuntimeError):
    """A file could not be had; the text is the sentence for the user."""


def fetch(repo_id: str, filename: str, *, revision: str | None = None, cache_dir: str | None = None) -> Path:
    """The local path of the file, downloaded if the cache lacks it; of a split model all parts, and the path of the first.

    filename: may have wildcards, as llama-cpp-python's `from_pretrained` takes them, if one model matches.
    HubError: no such repository or file, several, no network, no disk space."""
    try:
        import huggingface_hub
    except ImportError as error:
        raise HubError("huggingface_hub is not installed: pip install huggingface-hub") from error
    try:
        name = _resolve(repo_id, filename, revision) if any(c in filename for c in "*?[") else filename
        paths = [
            huggingface_hub.hf_hub_download(repo_id, part, revision=revision, cache_dir=cache_dir) for part in parts(name)
        ]
    except HubError:
        raise
    except Exception as error:  # of huggingface_hub, of the network and of the disk, all with one cause for the user
        reason = " ".join(str(error).split())
        raise HubError(f"{filename} of {repo_id} cannot be had: {type(error).__name__}: {reason[:300]}") from error
    return Path(paths[0])


def _resolve(repo_id: str, pattern: str, revision: str | None) -> str:
    import huggingface_hub

    names = [n for n in huggingface_hub.list_repo_files(repo_id, revision=revision) if n.endswith(".gguf")]
    found = [n for n in names if fnmatch.fnmatch(n, pattern)]
    models = sorted({parts(n)[0] for n in found})
    if len(models) != 1:
        what = f"{len(models)} models match {pattern!r}: {', '.join(models)}" if models else f"no file matches {pattern!r}"
        raise HubError(f"{repo_id}: {what}; it has {', '.join(names) or 'no GGUF files'}")
    return models[0]


def parts(name: str) -> list[str]:
    """All files of a model, the first one first: itself, or the parts of the split model that it belongs to."""
    found = _SPLIT.search(name)
    if not found:
        return [name]
    stem, count = name[: found.start()], int(found[2])
    return [f"{stem}-{i:05d}-of-{count:05d}.gguf" for i in range(1, count + 1)]
