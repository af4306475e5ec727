"""Fetches files from the Hugging Face hub into its cache, with huggingface-hub: that resumes, and knows HF_HOME, HF_TOKEN,
HF_ENDPOINT and HF_HUB_OFFLINE. What is added: the room on the disk, the checksum, and errors that say what to do.
"""

from __future__ import annotations

import errno
import hashlib
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import huggingface_hub as hub
from huggingface_hub import constants
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from moespac_llamacpp.catalog import HubFile

_SHA256 = re.compile(r"[0-9a-f]{64}")
_PIECE = 1 << 24

Report = Callable[[float], None]


class FetchError(RuntimeError):
    """A file could not be fetched; the text is the sentence for the user."""


def local(file: HubFile) -> Path | None:
    """The first file of a model of which all parts are in the cache, None if one is missing. Never uses the network."""
    paths = [hub.try_to_load_from_cache(file.repo, name) for name in file.parts]
    return Path(str(paths[0])) if all(isinstance(path, str) for path in paths) else None


def fetch(file: HubFile, name: str) -> Path:
    """The path of one part, after it was downloaded, or went on from where an earlier download ended. FetchError."""
    what = f"{file.repo}/{name}"
    try:
        _check_room(file.repo, name)
        return Path(hub.hf_hub_download(file.repo, name))
    except FetchError:
        raise
    except GatedRepoError as error:
        raise FetchError(
            f"{what}: its owner asks for your consent: accept the terms on the repository's page, then set HF_TOKEN or run "
            "`hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise FetchError(
            f"{what}: there is no such repository, or it is private and HF_TOKEN does not open it"
        ) from error
    except LocalEntryNotFoundError as error:  # an EntryNotFoundError too
        if constants.HF_HUB_OFFLINE:
            raise _offline(what) from error
        raise _unreachable(what, error.__cause__ or error) from error
    except EntryNotFoundError as error:
        raise FetchError(f"{what}: the repository has no such file") from error
    except OfflineModeIsEnabled as error:
        raise _offline(what) from error
    except OSError as error:
        raise _disk_error(what, error) or _unreachable(what, error) from error
    except Exception as error:  # whatever the HTTP library of this release of huggingface-hub raises
        raise _unreachable(what, error) from error


def _offline(what: str) -> FetchError:
    return FetchError(f"{what}: not fetched yet, and HF_HUB_OFFLINE forbids the network: unset it")


def _unreachable(what: str, error: BaseException) -> FetchError:
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    return FetchError(
        f"{what}: the hub at {constants.ENDPOINT} gave no answer, or broke off ({reason}): what came so far is kept, so "
        "run it again when the network is back"
    )


def _disk_error(what: str, error: OSError) -> FetchError | None:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return FetchError(
            f"{what}: the disk of {constants.HF_HUB_CACHE} is full: free some, or set HF_HOME to another one"
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return FetchError(
            f"{what}: {constants.HF_HUB_CACHE} cannot be written: mend its permissions, or set HF_HOME elsewhere"
        )
    return None


def free_disk() -> int:
    """Bytes that are free where the hub's cache is, or will be."""
    folder = Path(constants.HF_HUB_CACHE)
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _check_room(repo: str, name: str) -> None:
    """Before the first byte, as a download of 20 GB that ends at 19 helps nobody."""
    if isinstance(hub.try_to_load_from_cache(repo, name), str) or constants.HF_HUB_OFFLINE:
        return
    size = hub.get_hf_file_metadata(hub.hf_hub_url(repo, name)).size or 0
    blobs = Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}" / "blobs"
    there = max((path.stat().st_size for path in blobs.glob("*.incomplete")), default=0) if blobs.is_dir() else 0
    free = free_disk()
    if size - there > free:
        raise FetchError(
            f"{repo}/{name}: {size / 1e9:.1f} GB are to be fetched, but the disk of {constants.HF_HUB_CACHE} has "
            f"{free / 1e9:.1f} GB left: free some, or set HF_HOME to another disk"
        )


def verify(path: Path, report: Report) -> bool:
    """Is a file in the cache what the hub said? False if it keeps no SHA-256 of it (small files). report: told 0 … 1.

    FetchError: it is not; then it is deleted, so that the next run fetches it anew."""
    blob = path.resolve()
    if not _SHA256.fullmatch(blob.name):  # the cache names large files by their SHA-256
        return False
    digest, size, done = hashlib.sha256(), max(1, blob.stat().st_size), 0
    with blob.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
            done += len(piece)
            report(done / size)
    if digest.hexdigest() != blob.name:
        path.unlink()
        blob.unlink(missing_ok=True)
        raise FetchError(
            f"{path.name}: its checksum is not what the hub says: it was damaged, and is deleted now; run it again"
        )
    return True
