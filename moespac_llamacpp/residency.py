"""Runs a policy against the native layer: observe a decode, plan, start moves, publish what has landed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moespac_llamacpp import native
from moespac_llamacpp.memory import BlockSize
from moespac_llamacpp.policies import Batch, Limits, Policy


def block_sizes(experts: native.Experts) -> list[BlockSize]:
    """What the memory plan needs, one entry for each of the n_rows rows."""
    rows = {r.row: r for r in experts.rows()}
    empty = BlockSize(n_expert=0, expert_bytes=0, hybrid=False)
    return [
        BlockSize(rows[i].n_expert, rows[i].expert_bytes, rows[i].hybrid) if i in rows else empty
        for i in range(experts.n_rows)
    ]


#: A policy sees at most so many tokens at once.
OBSERVED_TOKENS = 32


class Residency:
    """Moves experts as a policy asks, between decodes, with the last one synchronised.

    Who knows the tokens calls `observe` after a decode, `plan` before the next one, `expect` with each token that becomes known
    while a draft goes on, and `publish` right before the decode. `step` is all of it for who only decodes. max_moves is for
    one plan and what is expected after it together."""

    def __init__(self, experts: native.Experts, policy: Policy, *, max_moves: int = 60) -> None:
        self.experts = experts
        self.policy = policy
        self.max_moves = max_moves
        self.n_slots: NDArray[np.int32] = np.zeros(experts.n_rows, np.int32)
        self.n_used = np.ones(experts.n_rows, np.int32)  # experts per token of each row
        for row in experts.rows():
            self.n_slots[row.row] = row.n_slots
            self.n_used[row.row] = max(1, row.n_expert_used)
        self.n_moves = 0
        self._plans_left = 0
        self._moves_left = 0

    def resident(self) -> NDArray[np.bool_]:
        """bool [n_rows, n_expert]: resident or on the way."""
        resident: NDArray[np.bool_] = self.experts.states_table() != native.COLD
        return resident

    def last_batch(
        self,
        tokens: Sequence[int] | None = None,
        accepted: Sequence[bool] | None = None,
        choices: NDArray[np.int32] | None = None,
        starts: bool = False,
    ) -> Batch:
        """The last decode as policies see it. choices: int32 [n_rows, n_tokens, k], negative: not recorded; None: counts only.

        ValueError: tokens or accepted have another length than choices."""
        if choices is not None:
            ids = choices.swapaxes(0, 1)
            return Batch.from_ids(ids, self.experts.n_expert, tokens=tokens, accepted=accepted, starts=starts)
        counts = self.experts.counts()
        return Batch(
            counts,
            len(tokens) if tokens is not None else int((counts.sum(axis=1) // self.n_used).max(initial=0)),
            None if tokens is None else np.asarray(tokens, np.int32),
            None if accepted is None else np.asarray(accepted, np.bool_),
            starts=starts,
        )

    def step(self) -> int:
        """Observes the last decode by its counts and starts moves; returns how many. What has landed becomes visible."""
        self.policy.observe(self.last_batch())
        return self.plan()

    def observe(self, tokens: Sequence[int], accepted: Sequence[bool] | None = None, *, starts: bool = False) -> None:
        """Tells the policy of the decode of these tokens, with the experts that each of them chose.

        A prompt comes to it in pieces of the size of verify batches: policies fade by the batch, and as one batch a long prompt
        would outweigh all that is generated after it."""
        choices = np.concatenate(self.experts.choices(), axis=1)
        for i in range(0, len(tokens), OBSERVED_TOKENS):
            part = slice(i, i + OBSERVED_TOKENS)
            taken = None if accepted is None else accepted[part]
            self.policy.observe(self.last_batch(tokens[part], taken, choices[:, part], starts and i == 0))

    def plan(self, n_expect: int = 0) -> int:
        """Starts a step's moves from what was observed. n_expect: starts none, but lets so many calls of `expect` share them.

        Expect tokens only if time passes before their decode: what lands after it was planned for the wrong batch."""
        self._plans_left, self._moves_left = max(1, n_expect), self.max_moves
        return 0 if n_expect else self._move()

    def publish(self) -> int:
        """Makes what has landed visible; to be called right before a decode. Never waits."""
        return self.experts.publish()

    def expect(self, tokens: Sequence[int]) -> int:
        """Tokens that the next decode will have, in order, the last accepted one first; starts moves and returns how many."""
        self.policy.expect(tokens)
        return self._move()

    def _move(self) -> int:
        allowed = self._moves_left // max(1, self._plans_left)
        self._plans_left -= 1
        moves = self.policy.plan(self.resident(), Limits(self.n_slots, allowed))
        self._moves_left -= len(moves)
        n_started = 0
        for move in moves:
            if move.victim is not None:
                self.experts.evict(move.row, move.victim)
            try:
                self.experts.load(move.row, move.expert)
                n_started += 1
            except native.MoeError as error:
                if error.status == "FAILED":  # the device lane takes no more uploads; generation goes on without it
                    self.max_moves = self._moves_left = 0
                    break
                # a withdrawn upload holds its slot until it has landed: the next plan will ask again
                if error.status != "NO_FREE_SLOT":
                    raise
        self.experts.publish()
        self.n_moves += n_started
        return n_started
