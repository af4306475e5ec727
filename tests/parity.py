"""Compares hybrid MoE execution with upstream's own on the same model: one pair of contexts, one attached, one plain."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from families import FAMILIES, Family
from lowlevel import (
    LOAD_NONE,
    SELECTION_SCORES,
    Capture,
    Context,
    GgmlTensor,
    Model,
    decode,
    load_model,
    make_context,
    selection_gaps,
)
from moespac_llamacpp import native
from moespac_llamacpp.models import EXPERT_TENSORS

Array = np.ndarray[Any, Any]

# build_moe_ffn's result; some models give it another name afterwards
MOE_OUT = ("ffn_moe_out", "ffn_out", "ffn_adj_moe_out")
CAPTURED = (*MOE_OUT, "ffn_moe_topk", *SELECTION_SCORES)


def test_device() -> native.Device:
    """The device that parity is tested on: MOESPAC_TEST_DEVICE by name (CUDA0, …), else a second CPU backend instance."""
    name = os.environ.get("MOESPAC_TEST_DEVICE", "CPU")
    found = {d.name: d for d in native.devices()}
    assert name in found, f"MOESPAC_TEST_DEVICE={name}, but there are only {', '.join(found)}"
    return found[name]


def execution_on(device: native.Device) -> str:
    """The execution that tests take unless they name one: MOESPAC_TEST_EXECUTION, else the device's own (native.EXECUTIONS).

    A device that ggml does not have registered knows the portable one only."""
    registered = device.pointer in {d.pointer for d in native.devices()}
    return os.environ.get("MOESPAC_TEST_EXECUTION", "auto") if registered else "auto"


def in_stream(experts: native.Experts) -> bool:
    """Are hybrid rows computed in-stream? All are, in the tests' models, but for GroveMoE's second blocks on a GPU."""
    return any(r.in_stream for r in experts.rows())


test_device.__test__ = False  # type: ignore[attr-defined]  # a helper, whatever its name says to pytest


def host_experts(device: native.Device) -> dict[str, Any]:
    """Options of load_model: everything but the experts on the device, the experts in its page-locked host memory if it has
    such memory. Nothing special for a CPU device, nor for one that ggml does not have registered (llama.cpp cannot use it)."""
    if device.kind == "cpu" or device.pointer not in {d.pointer for d in native.devices()}:
        return {}
    host = device.host_buffer_type or native.cpu_device().buffer_type
    return {"overrides": [(EXPERT_TENSORS, host)], "n_gpu_layers": 99, "load_mode": LOAD_NONE}


def load_with_host_experts(path: Path, device: native.Device) -> Model:
    return load_model(path, **host_experts(device))


def relative(a: Array, b: Array) -> float:
    """Largest over the rows of |a - b| / |b| (L2 norms): one number for how far a is from b."""
    a, b = a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1])
    if a.size == 0:
        return 0.0
    distance = np.linalg.norm(a - b, axis=1) / np.maximum(np.linalg.norm(b, axis=1), 1e-30)
    return float(np.nan_to_num(distance, nan=np.inf).max())


@dataclass
class Difference:
    """Of one batch: `op` of the first MoE block, whose inputs are equal, and `logits` of the tokens whose experts are the same
    in all layers. `n_rerouted` others chose differently, all of them within `tie` of a tie: rounding decides there, and the
    logits differ by O(1). `tie`: gap between the last expert chosen and the first one left out, over the scores' spread."""

    op: float
    logits: float
    n_hot: int = 0
    n_cold: int = 0
    n_rerouted: int = 0
    tie: float = 0.0


def difference(a: Context, b: Context, tokens: Sequence[int], family: Family) -> Difference:
    """How far b is from a when both decode the tokens as one batch, from an empty context."""
    logits = []
    for ctx in (a, b):
        ctx.clear()
        ctx.capture.clear()
        logits.append(decode(ctx, tokens))
    same, tie = compare_routing(a.capture, b.capture, len(tokens), family)
    op = relative(first_block(b.capture), first_block(a.capture))
    return Difference(op, relative(logits[1][same], logits[0][same]), n_rerouted=int((~same).sum()), tie=tie)


def same_experts(a: Array, b: Array, n_tokens: int) -> Array:
    """bool [n_tokens]: the same set of experts, in whatever order."""
    equal: Array = (np.sort(a.reshape(n_tokens, -1)) == np.sort(b.reshape(n_tokens, -1))).all(axis=1)
    return equal


def compare_routing(a: Capture, b: Capture, n_tokens: int, family: Family) -> tuple[Array, float]:
    """(bool [n_tokens]: the same experts in all layers; the largest gap at which a token's first difference happened)."""
    same, tie = np.ones(n_tokens, np.bool_), 0.0
    for il in family.moe_layers:
        name = f"ffn_moe_topk-{il}"
        equal = np.ones(n_tokens, np.bool_)
        for x, y in zip(a.tensors[name], b.tensors[name], strict=True):
            equal &= same_experts(x, y, n_tokens)
        new = same & ~equal
        if new.any():
            scores = next(a.tensors[key][0] for s in SELECTION_SCORES if (key := f"{s}-{il}") in a.tensors)
            scores = scores.reshape(n_tokens, -1)
            spread = np.nanstd(np.where(np.isfinite(scores), scores, np.nan), axis=1)
            gaps = selection_gaps(a.tensors, il, family.n_used, family.groups) / spread
            tie = max(tie, float(gaps[new].max()))
        same &= equal
    return same, tie


@dataclass
class Pair:
    plain: Context
    hybrid: Context
    experts: native.Experts
    family: Family
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(1))

    def fill(self, share: float) -> None:
        """Slots for this share of each block's experts, filled with experts drawn at random."""
        rows = self.experts.rows()
        slots = [0] * self.experts.n_rows
        self.experts.set_slots(slots)
        for r in rows:
            slots[r.row] = max(1, round(share * r.n_expert)) if share > 0 and r.hybrid else 0
        self.experts.set_slots(slots)
        for r in rows:
            for expert in self.rng.permutation(r.n_expert)[: slots[r.row]]:
                self.experts.load(r.row, int(expert))
        self.experts.sync()
        self.experts.publish()

    def compare(self, tokens: Sequence[int]) -> Difference:
        """Decodes the tokens as one batch in both, from an empty context."""
        self.experts.reset_perf()
        d = difference(self.plain, self.hybrid, tokens, self.family)
        perf = self.experts.perf_total()
        d.n_hot, d.n_cold = perf.n_hot_pairs, perf.n_cold_pairs
        return d

    def upstream_noise(self, tokens: Sequence[int]) -> float:
        """How much the plain context's own logits depend on the batch size: as one batch, in halves, and one by one. Of the
        tokens whose experts do not depend on it."""
        whole, whole_ids = self.decode_in(tokens, len(tokens))
        noise = 0.0
        for width in {1, max(1, len(tokens) // 2)} if len(tokens) > 1 else set():
            parts, ids = self.decode_in(tokens, width)
            same = same_experts(ids, whole_ids, len(tokens))
            noise = max(noise, relative(parts[same], whole[same]))
        return noise

    def decode_in(self, tokens: Sequence[int], width: int) -> tuple[Array, Array]:
        """The plain context's logits in batches of this width, and all experts of each token, [n_tokens, blocks * n_used]."""
        self.plain.clear()
        logits, ids = [], []
        for i in range(0, len(tokens), width):
            self.plain.capture.clear()
            part = tokens[i : i + width]
            logits.append(decode(self.plain, part, i))
            # sorted per block, so that the set counts and not the order
            choices = [
                np.sort(x.reshape(len(part), -1)) + 1000 * j
                for j, name in enumerate(sorted(n for n in self.plain.capture.tensors if n.startswith("ffn_moe_topk")))
                for x in self.plain.capture.tensors[name]
            ]
            ids.append(np.concatenate(choices, axis=1))
        return np.concatenate(logits), np.concatenate(ids)


def first_block(capture: Capture) -> Array:
    """Output of the MoE block that ran first in the last decode."""
    found = [arrays[0] for name, arrays in capture.tensors.items() if name.startswith(MOE_OUT)]
    assert found, "no MoE output was captured"
    return found[0]


@contextmanager
def pair(path: Path, family: str | Family, device: native.Device | None = None, **options: Any) -> Iterator[Pair]:
    """Plain and attached context of one model file; options go to native.Experts."""
    family = FAMILIES[family] if isinstance(family, str) else family
    device = device or test_device()
    with (
        load_with_host_experts(path, device) as model,
        make_context(model, cb=Capture(*CAPTURED)) as plain,
        make_context(model, cb=Capture(*CAPTURED)) as hybrid,
    ):
        experts = native.Experts(hybrid.ptr, device, **{"execution": execution_on(device), **options})
        try:
            yield Pair(plain, hybrid, experts, family)
        finally:
            experts.detach()


class WeightsOf:
    """An eval callback that notes the address of the experts' down matrices of a layer: [n_expert][bytes]."""

    def __init__(self, il: int) -> None:
        self.name = f"ffn_moe_down-{il}"
        self.data = 0
        self.expert_bytes = 0

    def __call__(self, tensor: int, ask: bool, user_data: object = None) -> bool:
        t = GgmlTensor.from_address(tensor)
        if ask and t.name.decode() == self.name and t.src[0]:
            weights = GgmlTensor.from_address(t.src[0])
            self.data, self.expert_bytes = weights.data, weights.nb[2]
        return not ask

    def read(self, expert: int) -> bytes:
        return ctypes.string_at(self.data + expert * self.expert_bytes, self.expert_bytes)

    def write(self, expert: int, content: bytes) -> None:
        ctypes.memmove(self.data + expert * self.expert_bytes, content, len(content))


def down_weights(model: Model, il: int) -> WeightsOf:
    """Where a layer's down matrices lie in host memory (the model must not be mapped read-only: load_mode NONE)."""
    weights = WeightsOf(il)
    with make_context(model, cb=weights) as ctx:
        decode(ctx, [5])
    assert weights.data, f"layer {il} has no experts on the host"
    return weights


def synchronize(ctx: Context) -> None:
    llama_cpp.llama_synchronize(ctx.ptr)
