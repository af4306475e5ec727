"""What a GGUF file holds, from its header: experts, bytes, weight types. Reads no weights and needs no llama.cpp."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from moespac_llamacpp.header import Header, InspectError, read_parts

__all__ = ["Contents", "InspectError", "Layers", "inspect"]

_EXPERTS = re.compile(r"blk\.(\d+)\.ffn_(gate_up|up|down|gate)_(?:ch)?exps\.(weight|bias)$")


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


def inspect(path: Path) -> Contents:
    """InspectError: not a GGUF file, damaged, a part of a split one that is not the first, or a dense model."""
    parts = read_parts(path)
    layers = _expert_layers(parts)
    if not layers:
        raise InspectError(_no_experts(parts[0]))
    first = parts[0]
    expert_bytes = sum(part.n_expert * part.expert_bytes * (part.last - part.first + 1) for part in layers)
    total_bytes = sum(tensor.n_bytes for part in parts for tensor in part.tensors)
    return Contents(
        path=str(path),
        name=first.text("general.name"),
        architecture=first.architecture,
        n_layer=first.own("block_count"),
        n_expert_layer=sum(part.last - part.first + 1 for part in layers),
        n_expert=first.own("expert_count") or max(part.n_expert for part in layers),
        n_expert_used=first.own("expert_used_count"),
        n_shared=first.own("expert_shared_count"),
        expert_bytes=expert_bytes,
        dense_bytes=total_bytes - expert_bytes,
        total_bytes=total_bytes,
        layers=layers,
        shards=[part.path.name for part in parts] if len(parts) > 1 else [],
    )


def _no_experts(first: Header) -> str:
    n_layer, n_expert = first.own("block_count"), first.own("expert_count")
    if n_expert:
        return f"{first.path}: its {n_expert} experts are not in one tensor per layer: the file is too old, or no model"
    return f"{first.path}: a dense model ({first.architecture}, {n_layer} layers): it has no experts to place"


def _expert_layers(parts: list[Header]) -> list[Layers]:
    """Layers with experts in their order, those alike as one."""
    types: dict[int, dict[str, str]] = {}
    counts: dict[int, int] = {}
    sizes: dict[int, int] = {}
    for tensor in (tensor for part in parts for tensor in part.tensors):
        found = _EXPERTS.match(tensor.name)
        if found is None:
            continue
        layer = int(found[1])
        sizes[layer] = sizes.get(layer, 0) + tensor.n_bytes
        if found[3] == "weight":
            counts[layer] = tensor.shape[-1]
            types.setdefault(layer, {})[found[2]] = tensor.type_name
    layers: list[Layers] = []
    for layer in sorted(types):
        matrices: dict[str, str] = {m: types[layer][m] for m in ("gate", "up", "gate_up", "down") if m in types[layer]}
        new = Layers(layer, layer, counts[layer], sizes[layer] // counts[layer], matrices)
        if layers and layers[-1] == Layers(layers[-1].first, layer - 1, new.n_expert, new.expert_bytes, new.types):
            layers[-1] = Layers(layers[-1].first, layer, new.n_expert, new.expert_bytes, new.types)
        else:
            layers.append(new)
    return layers
