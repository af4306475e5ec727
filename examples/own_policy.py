"""A policy of your own: keep the experts that were chosen most in the last passes. Replays a trace through it and through others.

moespac trace trace.npz "Once upon a time"
python examples/own_policy.py trace.npz
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moespac_llamacpp.planning import Batch, Limits, Move, plan_moves
from moespac_llamacpp.policies import Lru, Policy
from moespac_llamacpp.simulate import load, replay


class Recent:
    """Scores an expert by how many tokens chose it in the last `n` passes."""

    def __init__(self, n: int = 20) -> None:
        self.counts: deque[NDArray[np.int32]] = deque(maxlen=n)

    def observe(self, batch: Batch) -> None:
        self.counts.append(batch.counts.copy())

    def expect(self, tokens: Sequence[int]) -> None:
        pass  # it knows nothing of what tokens choose

    def plan(self, resident: NDArray[np.bool_], limits: Limits) -> list[Move]:
        if not self.counts:
            return []
        score = np.sum(self.counts, axis=0).astype(np.float64)
        return plan_moves(score, resident, limits.n_slots, limits.max_moves, hysteresis=0.5)


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit("usage: python examples/own_policy.py trace.npz (which `moespac trace` writes)")
    steps = load(Path(sys.argv[1]), 1)
    n_rows, n_expert = steps[0].batch.counts.shape
    candidates: list[tuple[str, Policy]] = [("recent", Recent()), ("lru", Lru(n_rows, n_expert))]
    for name, policy in candidates:
        result = replay(steps, policy, n_expert // 4, 4)
        print(f"{name}: {result.pair_hit:.1f} % of pairs hit, {result.moves_per_step:.1f} moves a step")


if __name__ == "__main__":
    main()
