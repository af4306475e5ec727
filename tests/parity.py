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
from lowlevel import LOAD_NONE, Capture, Context, GgmlTensor, Model, decode, load_model, make_context
from moespac_llamacpp import native
from moespac_llamacpp.models import EXPERT_TENSORS

Array = np.ndarray[Any, Any]

# build_moe_ffn's result; some models give it another name afterwards
MOE_OUT = ("ffn_moe_out", "ffn_out", "ffn_adj_moe_out")


def test_device() -> native.Device:
    """The device that parity is tested on: MOESPAC_TEST_DEVICE by name (CUDA0, …), else a second CPU backend instance."""
    name = os.environ.get("MOESPAC_TEST_DEVICE", "CPU")
    found = {d.name: d for d in native.devices()}
    assert name in found, f"MOESPAC_TEST_DEVICE={name}, but there are only {', '.join(found)}"
    return found[name]


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
    """Of one batch: `op` of the first MoE block, whose inputs are equal, and `logits`."""

    op: float
    logits: float
    n_hot: int
    n_cold: int


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
        outputs: list[Array] = []
        logits: list[Array] = []
        self.experts.reset_perf()
        for ctx in (self.plain, self.hybrid):
            ctx.clear()
            ctx.capture.clear()
            logits.append(decode(ctx, tokens))
            outputs.append(first_block(ctx.capture))
        perf = self.experts.perf_total()
        return Difference(
            relative(outputs[1], outputs[0]), relative(logits[1], logits[0]), perf.n_hot_pairs, perf.n_cold_pairs
        )

    def upstream_noise(self, tokens: Sequence[int]) -> float:
        """How much the plain context's own logits depend on the batch size: as one batch, in halves, and one by one."""
        self.plain.clear()
        whole = decode(self.plain, tokens)
        noise = 0.0
        for width in {1, max(1, len(tokens) // 2)} if len(tokens) > 1 else set():
            self.plain.clear()
            parts = [decode(self.plain, tokens[i : i + width], i) for i in range(0, len(tokens), width)]
            noise = max(noise, relative(np.concatenate(parts), whole))
        return noise


def first_block(capture: Capture) -> Array:
    """Output of the MoE block that ran first in the last decode."""
    assert capture.tensors, "no MoE output was captured"
    return next(iter(capture.tensors.values()))[0]


@contextmanager
def pair(path: Path, family: str | Family, device: native.Device | None = None, **options: Any) -> Iterator[Pair]:
    """Plain and attached context of one model file; options go to native.Experts."""
    family = FAMILIES[family] if isinstance(family, str) else family
    device = device or test_device()
    with (
        load_with_host_experts(path, device) as model,
        make_context(model, cb=Capture(*MOE_OUT)) as plain,
        make_context(model, cb=Capture(*MOE_OUT)) as hybrid,
    ):
        experts = native.Experts(hybrid.ptr, device, **options)
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
