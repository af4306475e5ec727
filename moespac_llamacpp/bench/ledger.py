"""One VRAM ledger for all sides, in integer bytes: dense weights, KV, buffers, the draft, and what is left for experts.

No llama_cpp here. Sizes of weights come from the files; KV and buffers from what llama.cpp says when it makes them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from moespac_llamacpp.header import read_parts

_EXPERTS = re.compile(r"blk\.(\d+)\.ffn_(up|down|gate|gate_up)_(ch|)exps\.")


@dataclass(frozen=True)
class Weights:
    """Bytes of a file. dense: what goes to the device besides experts (token embeddings stay in host memory, unless they are the
    output as well: then the device has a copy). layers: of the experts of each layer, 0 where it has none."""

    dense: int
    layers: tuple[int, ...]

    @property
    def experts(self) -> int:
        return sum(self.layers)

    @staticmethod
    def of(path: Path) -> Weights:
        """InspectError (a ValueError): not a model."""
        dense = 0
        layers: dict[int, int] = {}
        tensors = [tensor for part in read_parts(path) for tensor in part.tensors]
        tied = all(tensor.name != "output.weight" for tensor in tensors)
        for tensor in tensors:
            if match := _EXPERTS.match(tensor.name):
                il = int(match[1])
                layers[il] = layers.get(il, 0) + tensor.n_bytes
            elif tied or tensor.name != "token_embd.weight":
                dense += tensor.n_bytes
        return Weights(dense, tuple(layers.get(il, 0) for il in range(max(layers, default=-1) + 1)))

    def last_layers(self, n_bytes: int) -> list[int]:
        """The last layers whose experts come nearest to so many bytes; of two numbers as near, the larger; at least one."""
        chosen: list[int] = []
        left = n_bytes
        for il in reversed([il for il, size in enumerate(self.layers) if size]):
            if left <= 0 or (chosen and 2 * left < self.layers[il]):
                break
            chosen.append(il)
            left -= self.layers[il]
        return sorted(chosen)


def draft_bytes(weights: Weights, buffers: Mapping[str, float], device: str) -> int:
    """What a draft takes on the device: weights, KV, compute buffers. buffers: as stock.buffers gives them."""
    own = sum(size for name, size in buffers.items() if on_device(name, device) and not name.endswith(" model"))
    return weights.dense + int(own)


def on_device(buffer: str, device: str) -> bool:
    """Does a buffer of this name ("CUDA0 KV") lie on the device? Page-locked host memory ("CUDA_Host") does not."""
    return buffer.split(" ")[0] == device


def expert_budget(weights: Weights, share: float, draft: int, draft_is_extra: bool) -> int:
    """Bytes for experts: what whole layers take that come nearest to the share, so that all sides can use the same. A draft is
    either extra or paid for out of the share. Negative: it does not fit."""
    wanted = round(share * weights.experts) - (0 if draft_is_extra else draft)
    return sum(weights.layers[il] for il in weights.last_layers(wanted)) if wanted >= 0 else wanted


@dataclass(frozen=True)
class Entry:
    """What one side keeps on the device in one setting, bytes."""

    dense: int
    kv: int
    compute: int
    experts: int  # whole layers, or slots with their lane buffers
    draft: int

    @property
    def total(self) -> int:
        return self.dense + self.kv + self.compute + self.experts + self.draft


def entry(weights: Weights, buffers: Mapping[str, float], device: str, experts: int, draft: int) -> Entry:
    def of(*kinds: str) -> int:
        found: Sequence[float] = [
            size for name, size in buffers.items() if on_device(name, device) and name.split(" ")[1] in kinds
        ]
        return int(sum(found))

    return Entry(weights.dense, of("KV", "RS"), of("compute", "output"), experts, draft)
