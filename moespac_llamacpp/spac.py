"""The policy of MoE-SpAc (arXiv 2603.09983): a utility estimator, a balancer, one order for prefetch and eviction."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moespac_llamacpp import balancer
from moespac_llamacpp.planning import Batch, Limits, Move, plan_moves
from moespac_llamacpp.utility import Estimator, TokenMemory

LEVELS = 8


class MoeSpac:
    """Swaps the best missing expert for the worst resident by one utility, so that a marginal expert does not bounce.

    The paper keeps a multi-level queue for prefetches and a red-black tree for victims; here one sort of the few that
    could move gives the same order. The balancer bounds the moves by the link's window and, where the device would be
    the slower side, bars experts below tau from entering. The bounds by slots and by link hold exactly, expert by
    expert, not by whole levels of utility: whatever fits of tau's own level is taken, best first.
    """

    def __init__(
        self,
        estimator: Estimator,
        *,
        rates: balancer.Rates | None = None,
        expert_bytes: int = 2_700_000,
        balanced: bool = True,
    ) -> None:
        """balanced False: the ablation without a balancer (tau fixed at 0: whatever the slots hold)."""
        self.estimator = estimator
        self.rates = rates or balancer.Rates()
        self.expert_bytes = expert_bytes
        self.balanced = balanced
        self.split: balancer.Split | None = None  # of the last plan

    def observe(self, batch: Batch) -> None:
        self.estimator.observe(batch)

    def expect(self, tokens: Sequence[int]) -> None:
        self.estimator.expect(tokens)

    def plan(self, resident: NDArray[np.bool_], limits: Limits) -> list[Move]:
        estimator = self.estimator
        if isinstance(estimator, TokenMemory) and len(limits.n_slots):
            estimator.n_slots = max(1, int(limits.n_slots.max()))
        score = estimator.score()
        max_moves = limits.max_moves
        if self.balanced and (peak := float(score.max(initial=0.0))) > 0:
            # a level of the histogram is an eighth of the hottest expert's utility
            level = balancer.levels(score, peak / LEVELS, LEVELS)
            has_slots = limits.n_slots > 0
            experts, missing = balancer.histogram(level[has_slots], resident[has_slots], LEVELS)
            self.split = split = balancer.balance(
                experts,
                missing,
                self.rates,
                unit=peak * estimator.scale() / LEVELS,
                n_slots=int(limits.n_slots.sum()),
                expert_bytes=self.expert_bytes,
                window=limits.window,
            )
            max_moves = min(max_moves, split.n_moves)
            if split.bound == "balance":
                score = np.where(~resident & (level < split.tau), 0.0, score)
        return plan_moves(score, resident, limits.n_slots, max_moves, estimator.hysteresis())
