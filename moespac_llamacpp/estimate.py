"""What a plan will do on a machine whose rates are known: a guess for people, and for the choice of whole layers.

A step's time is hardware.py's, with as many cold experts a layer as the expected hits leave; they differ from layer to layer and
step to step as draws do, since the mean of the slower of two lanes is more than the slower of the means. What a draft takes is
not known here: `seconds_of_step` is that of a decode of n tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moespac_llamacpp import hardware
from moespac_llamacpp.hardware import Hardware, Work
from moespac_llamacpp.plan import Block, Plan
from moespac_llamacpp.profile import Profile

#: n tokens that follow one another choose k · n ** DISTINCT experts, and their cold pairs fall upon cold pairs · n ** -TOGETHER:
#: planted Qwen3-30B-A3B, 2.8 to 9 tokens (k = 8: 17.2 with three, 22.5 with 4.6; k = 6: 25.4 with nine).
DISTINCT, TOGETHER = 0.67, 0.17
#: Share of the experts with a slot, and the pairs that hit with moe-spac, single tokens (docs/memory-plan.md). Lowest: what a
#: planted Qwen3-30B-A3B hit in the first 32 tokens after a prompt of 512, cold start, with a quarter of its choices drawn at
#: random (measured with 8, 15, 23 and 48 % of the experts); from 50 % on, the lowest replay of recorded routing. Highest: the
#: best of the replays, of Qwen3-30B-A3B, Gemma-4-26B-A4B and gpt-oss-120b.
SHARES = (0.0, 0.08, 0.17, 0.25, 0.5, 0.625, 0.75, 0.875, 0.95, 1.0)
LOW = (0.0, 0.41, 0.62, 0.735, 0.882, 0.914, 0.942, 0.972, 0.989, 1.0)
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
    tps = [1 / seconds_of_step(plan, profile, hits, in_stream=in_stream) for hits in both]
    low, high = (float(hits @ used / max(1.0, used.sum())) for hits in both)
    return Estimate((low, high), (min(tps), max(tps)))


def hits_of(blocks: Sequence[Block], slots: Sequence[int]) -> tuple[Hits, Hits]:
    """(lowest, highest) that is expected of each block."""
    n_expert = np.array([block.n_expert for block in blocks], np.float64)
    share = np.array(slots) / np.maximum(1, n_expert)
    few = n_expert.max(initial=0) <= FEW_EXPERTS
    low, high = (np.interp(share, SHARES, table) for table in ((FEW, FEW) if few else (LOW, HIGH)))
    return low, high


def seconds_of_step(plan: Plan, profile: Profile, hits: ArrayLike, *, in_stream: bool, n_tokens: float = 1) -> float:
    """Of a decode of n_tokens. hits: of the pairs of each block, or of all."""
    target, machine = plan.target, _hardware(profile, 1, in_stream)
    if plan.place.gpu:
        layers = seconds_of_layers(plan.blocks, plan.slots, hits, profile, in_stream=in_stream, n_tokens=n_tokens)
        return layers + machine.step_us(n_tokens) / 1e6 + target.weights / profile.device_read
    experts = sum(_distinct(block, n_tokens) * block.expert_bytes for block in plan.blocks)
    n_layers = sum(block.n_expert > 0 for block in plan.blocks)
    fixed = (n_layers * machine.rest_us(n_tokens) + machine.step_us(n_tokens)) / 1e6
    return fixed + (target.host_weights + experts) / profile.cpu_read  # both lanes read the same memory


def seconds_of_layers(
    blocks: Sequence[Block],
    slots: Sequence[int],
    hits: ArrayLike,
    profile: Profile,
    *,
    in_stream: bool,
    n_tokens: float = 1,
) -> float:
    """On a GPU: all that the layers with experts cost beside dense weights."""
    of_each = np.broadcast_to(np.asarray(hits, np.float64), len(blocks)).tolist()
    alike = Counter(
        (b.n_expert, b.n_expert_used, b.expert_bytes, n, hit)
        for b, n, hit in zip(blocks, slots, of_each, strict=True)
        if b.n_expert > 0
    )
    us = 0.0
    for (n_expert, used, n_bytes, n, hit), times in alike.items():
        block = Block(n_expert, n_bytes, True, n_expert_used=used)
        if n >= n_expert:  # llama.cpp's own path in either execution
            us += times * _us_of_whole(_hardware(profile, n_bytes, in_stream=True), block, n_tokens)
        else:
            us += times * _us_of_layer(_hardware(profile, n_bytes, in_stream), block, n, hit, n_tokens)
    return us / 1e6


def _us_of_whole(machine: Hardware, block: Block, n_tokens: float) -> float:
    none = np.zeros(1)
    pairs = np.full(1, block.n_expert_used * n_tokens)
    work = Work(n_tokens, none, none, np.full(1, _distinct(block, n_tokens)), pairs, none)
    return float(machine.whole_us(work)[0])


def _us_of_layer(machine: Hardware, block: Block, n_slots: int, hit: float, n_tokens: float) -> float:
    """The mean over how many of its experts are cold, each with the same odds."""
    distinct, pairs = _distinct(block, n_tokens), block.n_expert_used * n_tokens
    together: float = n_tokens**-TOGETHER
    cold = min(distinct, pairs * (1 - hit) * together)
    n = max(1, round(distinct))
    counts = np.arange(n + 1.0)
    cold_pairs = counts * (pairs * (1 - hit) / max(cold, 1e-9))
    hot = np.maximum(distinct - counts, 0)
    work = Work(n_tokens, counts, cold_pairs, hot, np.maximum(pairs - cold_pairs, 0), n_slots - hot)
    return machine.rest_us(n_tokens) + float(_odds(n, min(1.0, cold / n)) @ machine.experts_us(work))


def _odds(n: int, p: float) -> Hits:
    """Of 0 … n of n draws. float64 [n + 1]"""
    odds = np.ones(1)
    for _ in range(n):
        odds = np.convolve(odds, [1 - p, p])
    return odds


def _distinct(block: Block, n_tokens: float) -> float:
    """Experts of a layer that n_tokens choose."""
    chosen: float = block.n_expert_used * n_tokens**DISTINCT
    return min(float(block.n_expert), chosen)


def _hardware(profile: Profile, expert_bytes: int, in_stream: bool) -> Hardware:
    make = hardware.in_stream if in_stream else hardware.portable
    rates = {"cpu_read": profile.cpu_read, "link": profile.link, "device_read": profile.device_read}
    return make(profile.device, expert_bytes, **rates)


def pace_of(blocks: Sequence[Block], profile: Profile, *, in_stream: bool) -> Callable[[Sequence[int]], list[float]]:
    """Slots of each block: seconds of the layers, with the lowest and the highest hits. For memory.slots_for_time."""

    def pace(slots: Sequence[int]) -> list[float]:
        return [seconds_of_layers(blocks, slots, h, profile, in_stream=in_stream) for h in hits_of(blocks, slots)]

    return pace
