"""What a GGUF file holds, from its header: experts, bytes, weight types. Reads no weights and needs no llama.cpp."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import gguf

_EXPERTS = re.compile(r"blk\.(\d+)\.ffn_(gate_up|up|down|gate)_(?:ch)?exps\.(weight|bias)$")
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf$")


class InspectError(ValueError):
    """The file is no MoE model that can be looked at; the text is the sentence for the user."""


@dataclass(frozen=True)
class Layers:
    """Consecutive layers whose experts are alike."""

    first: int
    last: int
    n_expert: int
    expert_bytes: int
    types: dict[str, str]  # of each matrix: gate, up, down, or gate_up


@dataclass(frozen=True)
class Contents:
    """Bytes are those of tensors: dense is all that is not a routed expert, shared experts among it."""

    path: str
    name: str
    architecture: str
    n_layer: int
    n_expert_layer: int
    n_expert: int
    n_expert_used: int
    n_shared: int
    expert_bytes: int
    dense_bytes: int
    total_bytes: int
    layers: list[Layers] = field(default_factory=list)
    shards: list[str] = field(default_factory=list)  # file names, empty if it is not split

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def describe(self) -> str:
        """Lines for the terminal."""
        shared = f" and {self.n_shared} shared" if self.n_shared else ""
        lines = [
            f"{Path(self.path).name}: {self.name or 'no name'}, architecture {self.architecture}",
            f"{self.n_layer} layers, {self.n_expert_layer} with experts; {self.n_expert} experts, {self.n_expert_used} used "
            f"for a token{shared}",
            f"experts {_size(self.expert_bytes)} + dense {_size(self.dense_bytes)} = {_size(self.total_bytes)}",
        ]
        for part in self.layers:
            where = f"layer {part.first}" if part.first == part.last else f"layers {part.first}-{part.last}"
            types = ", ".join(f"{matrix} {name}" for matrix, name in part.types.items())
            lines.append(f"  {where}: {part.n_expert} experts of {_size(part.expert_bytes)}; {types}")
        if self.shards:
            lines.append(f"in {len(self.shards)} files: {self.shards[0]} … {self.shards[-1]}")
        return "\n".join(lines)


def _size(n: int) -> str:
    return f"{n / 2**30:.2f} GiB" if n >= 2**30 else f"{n / 2**20:.2f} MiB"


def _read(path: Path) -> gguf.GGUFReader:
    try:
        with path.open("rb") as file:
            magic = file.read(4)
        if magic != b"GGUF":
            raise InspectError(f"{path}: not a GGUF file (it starts with {magic!r})")
        return gguf.GGUFReader(path)
    except FileNotFoundError as error:
        raise InspectError(f"{path}: there is no such file") from error
    except OSError as error:
        raise InspectError(f"{path}: cannot be read: {error.strerror or error}") from error
    except InspectError:
        raise
    except (
        ValueError,
        LookupError,
        TypeError,
        OverflowError,
    ) as error:  # whatever a damaged header leads the reader to
        raise InspectError(f"{path}: a damaged GGUF file: {error}") from error


def _value(reader: gguf.GGUFReader, key: str, default: Any) -> Any:
    found = reader.get_field(key)
    return default if found is None else found.contents()


def _number(reader: gguf.GGUFReader, key: str) -> int:
    """An integer; the largest where a file has one for each layer."""
    value = _value(reader, key, 0)
    return int(max(value, default=0) if isinstance(value, list) else value)


def _shards(path: Path, first: gguf.GGUFReader) -> list[Path]:
    """All files of a split model, [] if it is not split."""
    count, number = _number(first, "split.count"), _number(first, "split.no")
    if count <= 1:
        return []
    name = _SHARD.match(path.name)
    if name is None or int(name[3]) != count:
        raise InspectError(
            f"{path}: part {number + 1} of {count}, but its name does not end in -00001-of-{count:05d}.gguf"
        )
    paths = [path.with_name(f"{name[1]}-{i + 1:05d}-of-{count:05d}.gguf") for i in range(count)]
    if number != 0:
        raise InspectError(f"{path}: part {number + 1} of {count}: give the first, {paths[0].name}")
    return paths


def inspect(path: Path) -> Contents:
    """InspectError: not a GGUF file, damaged, a part of a split one that is not the first, or a dense model."""
    first = _read(path)
    shards = _shards(path, first)
    architecture = str(_value(first, "general.architecture", "unknown"))
    n_layer = _number(first, f"{architecture}.block_count")
    n_expert = _number(first, f"{architecture}.expert_count")
    expert_bytes = total_bytes = 0
    types: dict[int, dict[str, str]] = {}
    counts: dict[int, int] = {}
    sizes: dict[int, int] = {}
    for reader in [first, *map(_read, shards[1:])]:
        for tensor in reader.tensors:
            n_bytes = int(tensor.n_bytes)
            total_bytes += n_bytes
            found = _EXPERTS.match(tensor.name)
            if found is None:
                continue
            layer = int(found[1])
            expert_bytes += n_bytes
            sizes[layer] = sizes.get(layer, 0) + n_bytes
            if found[3] == "weight":
                counts[layer] = int(tensor.shape[-1])
                types.setdefault(layer, {})[found[2]] = tensor.tensor_type.name
    if not types:
        if n_expert:
            raise InspectError(
                f"{path}: its {n_expert} experts are not in one tensor per layer: the file is too old, or no model"
            )
        raise InspectError(f"{path}: a dense model ({architecture}, {n_layer} layers): it has no experts to place")
    layers: list[Layers] = []
    for layer in sorted(types):
        matrices: dict[str, str] = {m: types[layer][m] for m in ("gate", "up", "gate_up", "down") if m in types[layer]}
        new = Layers(layer, layer, counts[layer], sizes[layer] // counts[layer], matrices)
        if layers and layers[-1] == Layers(layers[-1].first, layer - 1, new.n_expert, new.expert_bytes, new.types):
            layers[-1] = Layers(layers[-1].first, layer, new.n_expert, new.expert_bytes, new.types)
        else:
            layers.append(new)
    return Contents(
        path=str(path),
        name=str(_value(first, "general.name", "")),
        architecture=architecture,
        n_layer=n_layer,
        n_expert_layer=len(types),
        n_expert=n_expert or max(counts.values()),
        n_expert_used=_number(first, f"{architecture}.expert_used_count"),
        n_shared=_number(first, f"{architecture}.expert_shared_count"),
        expert_bytes=expert_bytes,
        dense_bytes=total_bytes - expert_bytes,
        total_bytes=total_bytes,
        layers=layers,
        shards=[p.name for p in shards],
    )
