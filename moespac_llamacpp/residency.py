"""Runs a policy against the native layer: observe a decode, plan, start moves, publish what has landed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moespac_llamacpp import native
from moespac_llamacpp.memory import BlockSize
from moespac_llamacpp.policies import Policy


def block_sizes(experts: native.Experts) -> list[BlockSize]:
    """What the memory plan needs, one entry for each of the n_rows rows."""
    rows = {r.row: r for r in experts.rows()}
    empty = BlockSize(n_expert=0, expert_bytes=0, hybrid=False)
    return [
        BlockSize(rows[i].n_expert, rows[i].expert_bytes, rows[i].hybrid) if i in rows else empty
        for i in range(experts.n_rows)
    ]


class Residency:
    """Moves experts as a policy asks. Call `step` between decodes, with the last one synchronised."""

    def __init__(self, experts: native.Experts, policy: Policy, *, max_moves: int = 60) -> None:
        self.experts = experts
        self.policy = policy
        self.max_moves = max_moves
        self.n_slots: NDArray[np.int32] = np.zeros(experts.n_rows, np.int32)
        for row in experts.rows():
            self.n_slots[row.row] = row.n_slots
        self.n_moves = 0

    def resident(self) -> NDArray[np.bool_]:
        """bool [n_rows, n_expert]: resident or on the way."""
        table: NDArray[np.bool_] = self.experts.states_table() != native.COLD
        return table

    def step(self, *, wait: bool = False) -> int:
        """Observes the last decode and starts moves; returns how many. Uploads that have landed become visible.

        wait: let all uploads land and become visible first (start-up, tests)."""
        self.policy.observe(self.experts.counts())
        moves = self.policy.plan(self.resident(), self.n_slots, self.max_moves)
        for move in moves:
            if move.victim is not None:
                self.experts.evict(move.row, move.victim)
            try:
                self.experts.load(move.row, move.expert)
            except native.MoeError as error:
                # a withdrawn upload holds its slot until it has landed: the next plan will ask again
                if error.status != "NO_FREE_SLOT":
                    raise
        if wait:
            self.experts.sync()
        self.experts.publish()
        self.n_moves += len(moves)
        return len(moves)
