"""What every policy sees and says, and the one planner that turns scores into moves. numpy only: runs live and in
`simulate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.float64]  # [n_rows, n_expert]


@dataclass(frozen=True)
class Move:
    """Upload `expert` of `row`; `victim` leaves first, None if a slot is free."""

    row: int
    expert: int
    victim: int | None
    gain: float


@dataclass(frozen=True)
class Batch:
    """One decode. `ids`, `tokens`, `accepted` are None where they are not known: then counts are all there is.

    counts   int32 [n_rows, n_expert]   how many tokens chose each expert; rejected drafts count, they were computed too
    n_tokens                            tokens that were decoded
    tokens   int32 [n_tokens]
    accepted bool  [n_tokens]           the token became part of the text (None: all did)
    ids      int   [n_tokens, n_rows, k] in router rank order; negative or >= n_expert: not recorded
    starts                              the context was empty before this batch: a new sequence begins
    """

    counts: NDArray[np.int32]
    n_tokens: int
    tokens: NDArray[np.int32] | None = None
    accepted: NDArray[np.bool_] | None = None
    ids: NDArray[np.signedinteger[Any]] | None = None
    starts: bool = False

    @staticmethod
    def from_ids(
        ids: NDArray[np.integer[Any]],
        n_expert: int,
        *,
        tokens: Sequence[int] | NDArray[np.int32] | None = None,
        accepted: Sequence[bool] | NDArray[np.bool_] | None = None,
        starts: bool = False,
    ) -> Batch:
        """ids as above. ValueError: tokens or accepted have another length than ids."""
        n_tokens, n_rows, _ = ids.shape
        for name, array in (("tokens", tokens), ("accepted", accepted)):
            if array is not None and len(array) != n_tokens:
                raise ValueError(f"{len(array)} {name} for {n_tokens} decoded tokens")
        wide = np.asarray(ids, np.int64)
        wide = np.where((wide < 0) | (wide >= n_expert), n_expert, wide)
        place = wide + (n_expert + 1) * np.arange(n_rows)[:, None]
        counts = np.bincount(place.ravel(), minlength=n_rows * (n_expert + 1)).reshape(n_rows, -1)[:, :n_expert]
        return Batch(
            counts.astype(np.int32),
            n_tokens,
            None if tokens is None else np.asarray(tokens, np.int32),
            None if accepted is None else np.asarray(accepted, np.bool_),
            wide,
            starts,
        )

    @property
    def last_accepted(self) -> int | None:
        """The last token that became part of the text; None if that is not known."""
        if self.tokens is None or not len(self.tokens):
            return None
        if self.accepted is None:
            return int(self.tokens[-1])
        kept = self.tokens[self.accepted]
        return int(kept[-1]) if len(kept) else None


@dataclass(frozen=True)
class Limits:
    """What a plan must keep to. n_slots: int32 [n_rows]; window: seconds in which the link is idle, None: not known."""

    n_slots: NDArray[np.int32]
    max_moves: int
    window: float | None = None


class Policy(Protocol):
    """Once per step: `observe` the decode, `plan`; each drafted token may be told by `expect`, with a
    new plan."""

    def observe(self, batch: Batch) -> None:
        """A decode has ended. Forgets what was expected of it."""

    def expect(self, tokens: Sequence[int]) -> None:
        """More tokens of the coming batch, in order, the last accepted one first. Policies may ignore them."""

    def plan(self, resident: NDArray[np.bool_], limits: Limits) -> list[Move]:
        """Moves in order of their gain; changes nothing. resident: bool [n_rows, n_expert], uploads under way included."""


def plan_moves(
    score: Table, resident: NDArray[np.bool_], n_slots: NDArray[np.int32], max_moves: int, hysteresis: float
) -> list[Move]:
    """The best missing experts for free slots and for the worst residents, largest gain over all rows first.

    An expert takes a free slot if its score is positive (the gain is the score), and a resident's place if it scores more than
    `hysteresis` above it. Ties go to the lower row and expert. No loop over experts.
    """
    n_free = np.maximum(n_slots - resident.sum(axis=1), 0)
    worst = np.where(resident, score, np.inf).min(axis=1)
    limit = np.where(n_free > 0, 0.0, worst + hysteresis)
    limit[n_slots <= 0] = np.inf
    could = ~resident & (score > limit[:, None])
    m = min(int(could.sum(axis=1).max(initial=0)), max_moves)  # no row can make more moves than this
    if m <= 0:
        return []
    # whole rows sorted at once: faster than sorting only those that could move
    into = np.argsort(np.where(could, -score, np.inf), axis=1, kind="stable")[:, :m]
    out = np.argsort(np.where(resident, score, np.inf), axis=1, kind="stable")
    in_score = np.take_along_axis(np.where(could, score, -np.inf), into, axis=1)
    # the i-th incoming expert of a row takes a free slot, or the place of victim i - n_free
    swap = np.arange(m) - n_free[:, None]
    free = swap < 0
    victim = np.take_along_axis(out, np.where(free, 0, swap), axis=1)
    # no such victim: an infinite score, so no gain
    out_score = np.take_along_axis(np.where(resident, score, np.inf), victim, axis=1)
    gain = in_score - np.where(free, 0.0, out_score)
    row, rank = np.nonzero(np.where(free, gain > 0, gain > hysteresis))
    won = gain[row, rank]
    if len(won) > max_moves:  # sort only what can be among the first
        top = np.flatnonzero(won >= np.partition(won, -max_moves)[-max_moves])
        row, rank, won = row[top], rank[top], won[top]
    best = np.argsort(-won, kind="stable")[:max_moves]
    row, rank = row[best], rank[best]
    victims = np.where(free[row, rank], -1, victim[row, rank]).tolist()
    return [
        Move(r, e, v if v >= 0 else None, g)
        for r, e, v, g in zip(row.tolist(), into[row, rank].tolist(), victims, won[best].tolist(), strict=True)
    ]
