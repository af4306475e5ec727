"""The header of a GGUF file: its values and where each tensor lies. Reads no weights, needs no llama.cpp, and checks the size.

The format is that of ggml/docs/gguf.md: magic, version, counts, values, tensor infos, then the aligned data. Arrays of strings
(the vocabulary) are only counted, so that a file of 20 GB is looked at in a fraction of a second.
"""

from __future__ import annotations

import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf$")
_STRING, _ARRAY = 8, 9
#: by type number of gguf.md
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MAX_COUNT = 1 << 32  # of anything: more is damage

#: What people hold for a model, by how it starts.
_LOOKALIKES = {
    b"vers": "a Git LFS pointer, not the file itself: fetch it with `git lfs pull`",
    b"<!DO": "a web page that was saved in the model's place: download the file again",
    b"<!do": "a web page that was saved in the model's place: download the file again",
    b"<htm": "a web page that was saved in the model's place: download the file again",
    b"ggml": "a GGML file from before GGUF: get the model as GGUF",
    b"ggjt": "a GGML file from before GGUF: get the model as GGUF",
    b"PK\x03\x04": "a zip archive or PyTorch file: get the model as GGUF",
}


class InspectError(ValueError):
    """The file is no model that can be looked at; the text is the sentence for the user."""


@dataclass(frozen=True)
class TensorInfo:
    """shape as in ggml: the fastest dimension first. n_bytes: 0 where the type is newer than the gguf package."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    n_bytes: int


@dataclass(frozen=True)
class Header:
    """values: scalars, strings and arrays of numbers (numpy); of arrays of strings only the length."""

    path: Path
    values: dict[str, Any]
    tensors: list[TensorInfo]
    header_bytes: int

    def text(self, key: str, default: str = "") -> str:
        return str(self.values.get(key, default))

    def number(self, key: str) -> int:
        """An integer, 0 if there is none; the largest where a file has one for each layer."""
        value = self.values.get(key, 0)
        return int(np.max(value, initial=0)) if isinstance(value, np.ndarray) else int(value)

    @property
    def architecture(self) -> str:
        return self.text("general.architecture", "unknown")

    def own(self, key: str) -> int:
        """The number under the architecture's own name, such as qwen3moe.block_count."""
        return self.number(f"{self.architecture}.{key}")


class _Cursor:
    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def take(self, kind: str) -> Any:
        value = struct.unpack_from("<" + kind, self.data, self.at)[0]
        self.at += struct.calcsize("<" + kind)
        return value

    def count(self) -> int:
        n = int(self.take("Q"))
        if n > _MAX_COUNT:
            raise ValueError(f"a length of {n} at byte {self.at - 8}")
        return n

    def string(self) -> str:
        n = self.count()
        raw = self.data[self.at : self.at + n]
        if len(raw) < n:
            raise struct.error("past the end")
        self.at += n
        return raw.decode("utf-8", "replace")

    def skip_strings(self, n: int) -> None:
        data, at, unpack = self.data, self.at, struct.Struct("<Q").unpack_from
        for _ in range(n):
            at += 8 + unpack(data, at)[0]
        self.at = at

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.take(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise ValueError(f"a value of type {kind} at byte {self.at}")
        element, n = self.take("I"), self.count()
        if element == _STRING:
            self.skip_strings(n)
            return n
        if element not in _SCALARS:
            raise ValueError(f"an array of type {element} at byte {self.at}")
        array = np.frombuffer(self.data, np.dtype(_SCALARS[element]).newbyteorder("<"), n, self.at).copy()
        self.at += array.nbytes
        return array


def read_header(path: Path) -> Header:
    """InspectError: the file is missing, not readable, not GGUF, damaged, truncated, or several shards in one."""
    try:
        with path.open("rb") as file:
            magic = file.read(4)
            if magic != b"GGUF":
                what = _LOOKALIKES.get(magic, f"it starts with {magic!r}") if magic else "it is empty"
                raise InspectError(f"{path}: not a GGUF file ({what})")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(path, _Cursor(data), len(data))
    except FileNotFoundError as error:
        raise InspectError(f"{path}: there is no such file") from error
    except PermissionError as error:
        raise InspectError(f"{path}: cannot be read: you have no permission (`chmod +r`, or ask its owner)") from error
    except OSError as error:
        raise InspectError(f"{path}: cannot be read: {error.strerror or error}") from error


def _parse(path: Path, cursor: _Cursor, size: int) -> Header:
    try:
        cursor.at = 4
        version = cursor.take("I")
        if version & 0xFFFF == 0:
            raise InspectError(f"{path}: a big-endian GGUF file: convert it on this machine")
        if version not in (2, 3):
            raise InspectError(f"{path}: GGUF version {version}, but 2 and 3 are read: get the model anew")
        n_tensors, n_values = cursor.count(), cursor.count()
        values: dict[str, Any] = {}
        for _ in range(n_values):
            key = cursor.string()
            values[key] = cursor.value(cursor.take("I"))
        infos = [_tensor(cursor) for _ in range(n_tensors)]
    except InspectError:
        raise
    except struct.error as error:
        raise InspectError(
            f"{path}: a damaged GGUF file: its header is longer than its {size} bytes: download it again"
        ) from error
    except (ValueError, OverflowError) as error:
        raise InspectError(f"{path}: a damaged GGUF file: {error}: download it again") from error
    alignment = int(values.get("general.alignment", 32)) or 32
    header = Header(path, values, [info for info, _ in infos], cursor.at)
    _check_size(header, infos, -(-cursor.at // alignment) * alignment, alignment, size)
    return header


def _tensor(cursor: _Cursor) -> tuple[TensorInfo, int]:
    """A tensor and its offset in the data."""
    name = cursor.string()
    shape = tuple(cursor.count() for _ in range(min(cursor.take("I"), 8)))
    kind, offset = cursor.take("I"), int(cursor.take("Q"))
    try:
        quant = gguf.GGMLQuantizationType(kind)
        per_block, block_bytes = gguf.GGML_QUANT_SIZES[quant]
    except (ValueError, KeyError):  # newer than the gguf package: llama.cpp may know it
        return TensorInfo(name, shape, f"type {kind}", 0), offset
    n_values = int(np.prod([int(n) for n in shape], dtype=object)) if shape else 1
    return TensorInfo(name, shape, quant.name, n_values // per_block * block_bytes), offset


def _check_size(header: Header, infos: list[tuple[TensorInfo, int]], start: int, alignment: int, size: int) -> None:
    end, last = start, ""
    for info, offset in infos:
        if start + offset + info.n_bytes > end:
            end, last = start + offset + info.n_bytes, info.name
    if size < end:
        raise InspectError(
            f"{header.path}: a damaged GGUF file: truncated at byte {size} of {end} ({last} ends there): download it again"
        )
    rest = size - -(-end // alignment) * alignment
    if rest > 0 and header.number("split.count") > 1:
        raise InspectError(
            f"{header.path}: part {header.number('split.no') + 1} of {header.number('split.count')} with {rest} bytes after its "
            "end: parts that were joined into one file; keep them as they were downloaded and give the first"
        )


def read_parts(path: Path) -> list[Header]:
    """The headers of all files of a model: one, or all shards of a split one, of which `path` must be the first.

    InspectError: as read_header, of any part; a part is missing, has another name, or belongs elsewhere."""
    first = read_header(path)
    count, number = first.number("split.count"), first.number("split.no")
    if count <= 1:
        return [first]
    name = SHARD.match(path.name)
    if name is None or int(name[3]) != count:
        raise InspectError(
            f"{path}: part {number + 1} of {count}, but its name does not end in -00001-of-{count:05d}.gguf"
            ": name all parts as they were downloaded"
        )
    paths = [path.with_name(f"{name[1]}-{i + 1:05d}-of-{count:05d}.gguf") for i in range(count)]
    if number != 0:
        raise InspectError(f"{path}: part {number + 1} of {count}: give the first, {paths[0].name}")
    parts = [first]
    for i, part in enumerate(paths[1:], 1):
        if not part.exists():
            raise InspectError(f"{part}: there is no such file, but it is part {i + 1} of {count}: download it too")
        parts.append(read_header(part))
        if (parts[i].number("split.no"), parts[i].number("split.count")) != (i, count):
            raise InspectError(f"{part}: named as part {i + 1} of {count}, but it is another one: download it again")
    expected, found = first.number("split.tensors.count"), sum(len(p.tensors) for p in parts)
    if expected and expected != found:
        raise InspectError(f"{path}: its {count} parts have {found} of {expected} tensors: parts of different models")
    return parts
