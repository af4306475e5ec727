"""What a plan will do on a machine whose rates are known: a guess from bytes, for people and for the choice of whole layers.

A token reads the dense weights and the experts that it is routed to: residents on the device, the others on the CPU at the same
time. A layer costs a fixed time on top. No drafting: what that gains depends on the text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moespac_llamacpp.plan import Block, Plan
from moespac_llamacpp.profile import Profile

#: Seconds of a layer beside its weights, H200, one token (docs/performance.md). Whole, on llama.cpp's own path: 3.55 ms with
#: everything in VRAM, less its bytes, by 48 layers.
WHOLE_SECONDS = 62e-6
#: In-stream, all experts resident but not whole: 4.08 ms instead.
JOIN_SECONDS = 11e-6
#: In-stream, if some expert is cold (with 76 % hits in 89 % of the layers): what is left of 7.9 ms with 25 % of the experts, less
#: bytes and the above.
COLD_SECONDS = 24e-6
#: Portable, whatever is cold: 105 µs between the ops and 21 for the start.
PORTABLE_SECONDS = 126e-6
#: Share of the experts with a slot, and the hits that replays of recorded routing gave, single tokens, policy moe-spac: the
#: lowest and highest of Qwen3-30B-A3B, Gemma-4-26B-A4B and gpt-oss-120b (docs/memory-plan.md).
SHARES = (0.0, 0.08, 0.17, 0.25, 0.5, 0.625, 0.75, 0.875, 0.95, 1.0)
LOW = (0.0, 0.45, 0.67, 0.776, 0.882, 0.914, 0.942, 0.972, 0.989, 1.0)
HIGH = (0.0, 0.50, 0.69, 0.792, 0.951, 0.968, 0.979, 0.990, 0.996, 1.0)
#: The same of the bundled pair without its drafts: models of few experts have less to choose from.
FEW, FEW_EXPERTS = (0.0, 0.28, 0.40, 0.54, 0.78, 0.861, 0.923, 0.968, 0.986, 1.0), 32

Hits = NDArray[np.float64]  # of each block, 0 … 1


@dataclass(frozen=True)
class Estimate:
    """Hit rates 0 … 1 and tokens a second: (lowest, highest)."""

    hits: tuple[float, float]
    tps: tuple[float, float]

    def describe(self) -> str:
        if self.hits[1] == 0:
            hits = "no hits"
        else:
            hits = f"{_span(*(f'{100 * share:.0f}' for share in self.hits))} % of the routed experts resident"
        return f"{hits}, {_span(*(f'{tps:.{0 if tps >= 10 else 1}f}' for tps in self.tps))} TPS without drafting"


def _span(low: str, high: str) -> str:
    return low if low == high else f"{low} to {high}"


def estimate(plan: Plan, profile: Profile, *, in_stream: bool) -> Estimate:
    """in_stream: the execution of the layers."""
    used = np.array([block.n_expert_used for block in plan.blocks], np.float64)
    both = hits_of(plan.blocks, plan.slots)
    tps = [1 / seconds_of_token(plan, profile, hits, in_stream=in_stream) for hits in both]
    low, high = (float(hits @ used / max(1.0, used.sum())) for hits in both)
    return Estimate((low, high), (min(tps), max(tps)))


def hits_of(blocks: Sequence[Block], slots: Sequence[int]) -> tuple[Hits, Hits]:
    """(lowest, highest) that is expected of each block."""
    n_expert = np.array([block.n_expert for block in blocks], np.float64)
    share = np.array(slots) / np.maximum(1, n_expert)
    few = n_expert.max(initial=0) <= FEW_EXPERTS
    low, high = (np.interp(share, SHARES, table) for table in ((FEW, FEW) if few else (LOW, HIGH)))
    return low, high


def seconds_of_token(plan: Plan, profile: Profile, hits: ArrayLike, *, in_stream: bool) -> float:
    """hits: of each block, or of all."""
    target = plan.target
    if plan.place.gpu:
        layers = seconds_of_layers(plan.blocks, plan.slots, hits, profile, in_stream=in_stream)
        return layers + target.weights / profile.device_read
    experts = sum(block.n_expert_used * block.expert_bytes for block in plan.blocks)
    n_layers = sum(block.n_expert > 0 for block in plan.blocks)
    fixed = WHOLE_SECONDS + JOIN_SECONDS + COLD_SECONDS if in_stream else PORTABLE_SECONDS
    return n_layers * fixed + (target.host_weights + experts) / profile.cpu_read  # both lanes read the same memory


def seconds_of_layers(
    blocks: Sequence[Block], slots: Sequence[int], hits: ArrayLike, profile: Profile, *, in_stream: bool
) -> float:
    """Of a token, on a GPU: all that the layers with experts cost beside dense weights."""
    n_expert = np.array([block.n_expert for block in blocks])
    used = np.array([block.n_expert_used for block in blocks], np.float64)
    n_bytes = used * np.array([block.expert_bytes for block in blocks], np.float64)
    hit, whole = np.broadcast_to(np.asarray(hits, np.float64), used.shape), np.array(slots) >= n_expert
    any_cold = 1 - hit**used
    hybrid = WHOLE_SECONDS + JOIN_SECONDS + COLD_SECONDS * any_cold if in_stream else PORTABLE_SECONDS
    weights = np.maximum(hit * n_bytes / profile.device_read, (1 - hit) * n_bytes / profile.cpu_read)
    return float((np.where(whole, WHOLE_SECONDS, hybrid) + weights)[n_expert > 0].sum())


def pace_of(blocks: Sequence[Block], profile: Profile, *, in_stream: bool) -> Callable[[Sequence[int]], list[float]]:
    """Slots of each block: seconds of the layers, with the lowest and the highest hits. For memory.slots_for_time."""

    def pace(slots: Sequence[int]) -> list[float]:
        return [seconds_of_layers(blocks, slots, h, profile, in_stream=in_stream) for h in hits_of(blocks, slots)]

    return pace
