"""Pairs of models by name: models.txt, a line each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moespac_llamacpp.header import SHARD
from moespac_llamacpp.memory import parse_bytes

_COLUMNS = "name, target, size, draft, size, licence, vram"


class CatalogError(ValueError):
    """The list cannot be read, or has no such pair; the text is the sentence for the user."""


@dataclass(frozen=True)
class HubFile:
    """A model on the hub: repository (owner/name) and the file in it, of a split model the first part."""

    repo: str
    name: str

    @staticmethod
    def parse(text: str) -> HubFile:
        owner, _, rest = text.partition("/")
        repo, _, name = rest.partition("/")
        if not (owner and repo and name.endswith(".gguf")):
            raise ValueError(f"{text!r} is not owner/repository/file.gguf")
        return HubFile(f"{owner}/{repo}", name)

    @property
    def parts(self) -> list[str]:
        """The names of all files: one, or every part of a split model."""
        found = SHARD.match(self.name)
        if found is None:
            return [self.name]
        return [f"{found[1]}-{i + 1:05d}-of-{found[3]}.gguf" for i in range(int(found[3]))]

    def __str__(self) -> str:
        return f"{self.repo}/{self.name}"


@dataclass(frozen=True)
class Entry:
    """Sizes in bytes, of all parts; approximate: to two digits or so. vram: bytes to start with."""

    name: str
    target: HubFile
    target_bytes: int
    draft: HubFile | None
    draft_bytes: int
    licence: str
    vram: int
    approximate: bool

    @property
    def bytes(self) -> int:
        return self.target_bytes + self.draft_bytes

    @property
    def gigabytes(self) -> str:
        return f"{'~' if self.approximate else ''}{self.bytes / 1e9:.1f} GB"


def read_catalog(path: Path) -> list[Entry]:
    """CatalogError names the line that is wrong."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CatalogError(
            f"{path}: the list of models cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from error
    entries: list[Entry] = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            entries.append(_entry(words))
        except ValueError as error:
            raise CatalogError(f"{path}, line {number}: {error}") from error
        if entries[-1].name in [e.name for e in entries[:-1]]:
            raise CatalogError(f"{path}, line {number}: {entries[-1].name} is there twice")
    return entries


def _entry(words: Sequence[str]) -> Entry:
    if len(words) != 7:
        raise ValueError(f"{len(words)} columns, but there are 7: {_COLUMNS}")
    name, target, target_size, draft, draft_size, licence, vram = words
    if "/" in name or name.endswith(".gguf"):
        raise ValueError(f"{name!r} could be a file: a name has no / and does not end in .gguf")
    sizes = []
    for text in (target_size, draft_size):
        try:
            sizes.append(round(float(text.removeprefix("~")) * 1e9))
        except ValueError:
            raise ValueError(f"{text!r} is not a size in GB, such as 18.6 or ~18") from None
    return Entry(
        name,
        HubFile.parse(target),
        sizes[0],
        None if draft == "-" else HubFile.parse(draft),
        sizes[1],
        licence,
        parse_bytes(vram),
        "~" in target_size + draft_size,
    )


def bundled_catalog() -> Path:
    """models.txt."""
    return Path(__file__).parent / "data" / "models.txt"


def find(entries: Sequence[Entry], name: str) -> Entry:
    """CatalogError with the names that there are."""
    for entry in entries:
        if entry.name == name.lower():
            return entry
    raise CatalogError(f"there is no model {name!r} in the list; there are {', '.join(e.name for e in entries)}")
