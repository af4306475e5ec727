"""The hot set of a model, kept between runs: how much each expert was used of late, and which ones were resident."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moespac_llamacpp.planning import Table

_HEAD = 1 << 20  # of a GGUF file: its metadata, and for small vocabularies its tensors' names and shapes
_VERSION = 1


class HotSetError(Exception):
    """A file that holds no hot set of this model; the text is the sentence for the user."""


@dataclass(frozen=True)
class HotSet:
    """resident: bool [n_rows, n_expert]. use: expected use by a token, the same shape; None: the policy keeps no such thing."""

    resident: NDArray[np.bool_]
    use: Table | None = None

    def best(self, row: int, n: int, n_expert: int) -> list[int]:
        """The n experts of a row to start with, of n_expert that it has: most used first, then residents, then the rest."""
        use = self.resident[row, :n_expert].astype(np.float64) if self.use is None else self.use[row, :n_expert]
        order = np.lexsort((~self.resident[row, :n_expert], -use))
        return [int(e) for e in order[:n]]


def fingerprint(model: Path) -> str:
    """Names a GGUF file by its size and its first MiB, so that no gigabytes are read. OSError: it cannot be read."""
    with model.open("rb") as file:
        head = file.read(_HEAD)
    return hashlib.blake2b(head, digest_size=8, person=str(model.stat().st_size)[:16].encode()).hexdigest()


def path_for(folder: Path, model: Path) -> Path:
    """Where a model's hot set is kept. OSError: the model cannot be read."""
    return folder / "hot-sets" / f"{model.stem}-{fingerprint(model)}.npz"


def save(path: Path, hot: HotSet) -> None:
    """At once or not at all: nobody reads half a file. OSError: it cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.stem}.{os.getpid()}.part")
    arrays = {"version": np.int32(_VERSION), "resident": hot.resident}
    if hot.use is not None:
        arrays["use"] = hot.use.astype(np.float32)
    try:
        with part.open("wb") as file:
            np.savez_compressed(file, **arrays)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def load(path: Path, n_rows: int, n_expert: int) -> HotSet | None:
    """None: there is none yet. HotSetError: the file is broken, or of another model."""
    try:
        with np.load(path, allow_pickle=False) as z:
            version, resident = int(z["version"]), np.asarray(z["resident"], np.bool_)
            use = np.asarray(z["use"], np.float64) if "use" in z.files else None
    except FileNotFoundError:
        return None
    except Exception as error:  # zipfile, zlib and numpy raise whatever the damage leads to
        raise HotSetError(f"{path}: not a hot set that can be read ({error}); this run starts without it") from error
    shapes = {resident.shape, resident.shape if use is None else use.shape}
    if version != _VERSION or shapes != {(n_rows, n_expert)}:
        raise HotSetError(f"{path}: a hot set of another version or model; this run starts without it")
    if use is not None and not (np.isfinite(use).all() and (use >= 0).all()):
        raise HotSetError(f"{path}: a hot set with impossible numbers; this run starts without it")
    return HotSet(resident, use)
