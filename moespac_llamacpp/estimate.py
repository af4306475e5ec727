"""What a plan will do on a machine whose rates are known. A guess from bytes, for people; nothing else depends on it.

A token reads the dense weights and the experts that it is routed to: residents on the device, the others on the CPU at the same
time. A layer costs a fixed time on top. No drafting: what that gains depends on the text.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moespac_llamacpp.plan import Plan
from moespac_llamacpp.profile import Profile

#: Seconds of a layer beside its weights, H200 (docs/performance.md). Portable: 105 µs between the ops and 21 for the start.
#: In-stream: what is left of 7.9 ms a token with 25 % of the experts and 76 % hits, less its bytes at the machine's rates.
LAYER_SECONDS, LAYER_SECONDS_IN_STREAM = 126e-6, 95e-6
#: Share of the experts with a slot, and the hits that replays of recorded routing gave, single tokens, policy moe-spac: the
#: lowest and highest of Qwen3-30B-A3B, Gemma-4-26B-A4B and gpt-oss-120b (bench/results/policies.json).
SHARES = (0.0, 0.08, 0.17, 0.25, 0.5, 1.0)
LOW, HIGH = (0.0, 0.48, 0.71, 0.80, 0.90, 1.0), (0.0, 0.55, 0.73, 0.83, 0.96, 1.0)
#: The same of the bundled pair without its drafts: models of few experts have less to choose from.
FEW, FEW_EXPERTS = (0.0, 0.29, 0.42, 0.56, 0.79, 1.0), 32


@dataclass(frozen=True)
class Estimate:
    """Hit rates 0 … 1 and tokens a second: (lowest, highest)."""

    hits: tuple[float, float]
    tps: tuple[float, float]

    def describe(self) -> str:
        if self.hits[1] == 0:
            hits = "no hits"
        else:
            hits = f"{100 * self.hits[0]:.0f} to {100 * self.hits[1]:.0f} % of the routed experts resident"
        low, high = (f"{tps:.{0 if tps >= 10 else 1}f}" for tps in self.tps)
        return f"{hits}, {low if low == high else f'{low} to {high}'} TPS without drafting"


def estimate(plan: Plan, profile: Profile, *, in_stream: bool) -> Estimate:
    """in_stream: the execution of the layers."""
    few = max((block.n_expert for block in plan.blocks), default=0) <= FEW_EXPERTS
    hits = tuple(float(np.interp(plan.share, SHARES, table)) for table in (FEW if few else LOW, HIGH))
    tps = [1 / seconds_of_token(plan, profile, hit, in_stream=in_stream) for hit in hits]
    return Estimate((hits[0], hits[1]), (min(tps), max(tps)))


def seconds_of_token(plan: Plan, profile: Profile, hit: float, *, in_stream: bool) -> float:
    target, gpu = plan.target, plan.place.gpu
    n_layers = sum(block.n_expert > 0 for block in plan.blocks)
    experts = sum(block.n_expert_used * block.expert_bytes for block in plan.blocks)
    fixed = n_layers * (LAYER_SECONDS_IN_STREAM if in_stream else LAYER_SECONDS)
    if not gpu:  # both lanes read the same memory
        return fixed + (target.host_weights + experts) / profile.cpu_read
    hot, cold = hit * experts / profile.device_read, (1 - hit) * experts / profile.cpu_read
    return fixed + target.weights / profile.device_read + max(hot, cold)
