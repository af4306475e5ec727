"""The policy of MoE-SpAc (arXiv 2603.09983): a utility estimator, a balancer, one order for prefetch and eviction."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moespac_llamacpp import balancer
from moespac_llamacpp.planning import Batch, Limits, Move, Table, plan_moves, within
from moespac_llamacpp.slots import Demand
from moespac_llamacpp.utility import SEED_WEIGHT, Estimator, TokenMemory

LEVELS = 8
#: Where moves are late, a victim is missed by one batch before anything is gained: its place must be worth a batch more, out
#: of the tokens for which a score is likely to hold (half of what the prior remembers). Without it the public traces' batches
#: of 4 and 8 take up to 3.2 % more predicted time than LFU, which moves less; with it 0.7 % at most. 8, 15 and 22 were tried
#: too.
LATE_HORIZON = 11.0
DEMAND_EVERY = 4  # plans: what tau wants of each layer changes slowly, and costs a sort over all experts


class MoeSpac:
    """Swaps the best missing expert for the worst resident by one utility, so that a marginal expert does not bounce.

    The paper keeps a multi-level queue for prefetches and a red-black tree for victims; here one sort of the few that
    could move gives the same order. The balancer bounds the moves by the link's window and, where the device would be
    the slower side, bars experts below tau from entering. The bounds by slots and by link hold exactly, expert by
    expert, not by whole levels of utility: whatever fits of tau's own level is taken, best first.
    """

    def __init__(self, estimator: Estimator, *, rates: balancer.Rates | None = None, balanced: bool = True) -> None:
        """balanced False: the ablation without a balancer (tau fixed at 0: whatever the slots hold)."""
        self.estimator = estimator
        self.rates = rates or balancer.Rates()
        self.balanced = balanced
        self.split: balancer.Split | None = None  # of the last plan
        self._demand: Demand | None = None
        self._n_plans = 0
        self._score: Table | None = None  # of the last plan

    def observe(self, batch: Batch) -> None:
        self.estimator.observe(batch)

    def expect(self, tokens: Sequence[int]) -> None:
        self.estimator.expect(tokens)

    def plan(self, resident: NDArray[np.bool_], limits: Limits) -> list[Move]:
        estimator = self.estimator
        if isinstance(estimator, TokenMemory) and len(limits.n_slots):
            estimator.n_slots = max(1, int(limits.n_slots.max()))
        self._score = score = estimator.score()
        self._n_plans += 1
        if self._n_plans % DEMAND_EVERY == 0:
            self._demand = self._demand or Demand(len(score))
            self._demand.observe(score, limits.n_slots)
        n_bytes = np.inf
        if self.balanced:
            score, n_bytes = self._balance(score, resident, limits)
        if limits.late:
            score = np.where(resident, (1 + estimator.width() / LATE_HORIZON) * score, score)
        moves = plan_moves(score, resident, limits.n_slots, limits.max_moves, estimator.hysteresis(limits.late))
        return moves if limits.expert_bytes is None else within(moves, limits.expert_bytes, n_bytes)

    def _balance(self, score: Table, resident: NDArray[np.bool_], limits: Limits) -> tuple[Table, float]:
        """The score with what shall not enter at 0, and the bytes that may move."""
        peak = float(score.max(initial=0.0))
        if peak <= 0:
            return score, np.inf
        # a level of the histogram is an eighth of the hottest expert's utility
        level = balancer.levels(score, peak / LEVELS, LEVELS)
        has_slots = limits.n_slots > 0
        rows: NDArray[np.bool_] | slice = slice(None) if has_slots.all() else has_slots  # a mask copies
        expert_bytes = np.zeros(len(score), np.int64) if limits.expert_bytes is None else limits.expert_bytes
        experts, sums, missing_bytes = balancer.histogram(
            level[rows], score[rows], resident[rows], expert_bytes[rows], LEVELS
        )
        self.split = split = balancer.balance(
            experts,
            sums * self.estimator.scale(),
            missing_bytes,
            self.rates,
            n_tokens=self.estimator.width(),
            n_slots=int(limits.n_slots.sum()),
            window=None if limits.expert_bytes is None else limits.window,
        )
        if split.bound == "balance":
            score = np.where(~resident & (level < split.tau), 0.0, score)
        return score, split.n_bytes

    def demand(self) -> NDArray[np.float64] | None:
        """[n_rows]: how many experts of each layer tau would make resident if slots could go anywhere; None: not known yet."""
        return None if self._demand is None else self._demand.mean

    def worth(self) -> Table | None:
        return self._score

    def use(self) -> Table | None:
        """Expected use of each expert by a token, to start another run from; None: the estimator keeps no such thing."""
        return self.estimator.prior.mean() if isinstance(self.estimator, TokenMemory) else None

    def seed(self, use: Table) -> None:
        if isinstance(self.estimator, TokenMemory):
            self.estimator.prior.seed(use, SEED_WEIGHT)
