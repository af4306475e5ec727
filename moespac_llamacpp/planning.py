"""What every policy sees and says, and the one planner that turns scores into moves. numpy only: runs live and in
`simulate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.float64]  # [n_rows, n_expert]


class Move(NamedTuple):
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
    seen     int   [n_rows]             of how many tokens the choices are known: most models compute their last layer only
                                        for tokens with logits (None: of all that were decoded, where a row has counts)
    """

    counts: NDArray[np.int32]
    n_tokens: int
    tokens: NDArray[np.int32] | None = None
    accepted: NDArray[np.bool_] | None = None
    ids: NDArray[np.signedinteger[Any]] | None = None
    starts: bool = False
    seen: NDArray[np.signedinteger[Any]] | None = None

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
            (wide[:, :, 0] < n_expert).sum(axis=0),
        )

    @cached_property
    def n_seen(self) -> NDArray[np.signedinteger[Any]]:
        """[n_rows]: `seen`, or what can be told of it."""
        return np.where(self.counts.any(axis=1), self.n_tokens, 0) if self.seen is None else self.seen

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
    """What a plan must keep to.

    n_slots      int32 [n_rows]
    max_moves    over all rows together
    window       seconds in which the link is idle until the plan must have landed, None: not known
    expert_bytes int64 [n_rows], what one upload moves, None: not known
    late         victims leave before the coming batch, and what is uploaded arrives after it
    """

    n_slots: NDArray[np.int32]
    max_moves: int
    window: float | None = None
    expert_bytes: NDArray[np.int64] | None = None
    late: bool = False


class Policy(Protocol):
    """Once per step: `observe` the decode, `plan`; each drafted token may be told by `expect`, with a
    new plan."""

    def observe(self, batch: Batch) -> None:
        """A decode has ended. Forgets what was expected of it."""

    def expect(self, tokens: Sequence[int]) -> None:
        """More tokens of the coming batch, in order, the last accepted one first. Policies may ignore them."""

    def plan(self, resident: NDArray[np.bool_], limits: Limits) -> list[Move]:
        """Moves in order of their gain; changes nothing. resident: bool [n_rows, n_expert], uploads under way included."""


@runtime_checkable
class Warm(Protocol):
    """A policy that can say what it has learned of each expert, and start from that."""

    def use(self) -> Table | None:
        """Expected use by a token, [n_rows, n_expert]; None: it keeps no such thing after all."""

    def seed(self, use: Table) -> None:
        """Starts from such a table."""


@runtime_checkable
class Valued(Protocol):
    """A policy that lets decodes stream experts into slots (native.Experts.set_streaming): it says which residents to keep."""

    def worth(self) -> Table | None:
        """[n_rows, n_expert], in any unit: residents of least worth make room. None: nothing is known yet."""


def within(moves: list[Move], expert_bytes: NDArray[np.int64], n_bytes: float) -> list[Move]:
    """The first moves that take no more than n_bytes together. expert_bytes: [n_rows]."""
    if not moves:
        return moves
    total = np.cumsum(expert_bytes[[m.row for m in moves]])
    return moves[: int(np.searchsorted(total, n_bytes, side="right"))]


def _ranked(at: NDArray[np.intp], key: Table, n_rows: int, n_expert: int) -> tuple[NDArray[np.intp], ...]:
    """(place in the table, row, rank within the row): each row in ascending order of key, ties by expert.

    at: ascending places in the flat table, key: of each of them."""
    at = at[np.argsort(key, kind="stable")]
    row = at // n_expert
    order = np.argsort(row.astype(np.int16), kind="stable")  # by radix: cheap, and it keeps the keys' order
    at, row = at[order], row[order]
    first = np.searchsorted(row, np.arange(n_rows))
    return at, row, np.arange(len(at)) - first[row]


def plan_moves(
    score: Table, resident: NDArray[np.bool_], n_slots: NDArray[np.int32], max_moves: int, hysteresis: float
) -> list[Move]:
    """The best missing experts for free slots and for the worst residents, largest gain over all rows first.

    An expert takes a free slot if its score is positive (the gain is the score), and a resident's place if it scores more than
    `hysteresis` above it. Ties go to the lower row and expert. No loop over experts, and only what could move is sorted:
    where that are many, the 4 · max_moves (at least 256) with the most to gain against the worst resident of their row.
    n_rows < 2**15.
    """
    if max_moves <= 0:
        return []
    n_rows, n_expert = score.shape
    n_free = np.maximum(n_slots - np.count_nonzero(resident, axis=1), 0)
    limit = np.min(score, axis=1, where=resident, initial=np.inf) + hysteresis
    limit[n_free > 0] = 0.0
    limit[n_slots <= 0] = np.inf
    could = score > limit[:, None]
    could &= ~resident
    flat = score.ravel()
    at = np.flatnonzero(could)
    if not len(at):
        return []
    if len(at) > (cap := max(256, 4 * max_moves)):
        most = flat[at] - limit[at // n_expert]
        at = at[most >= np.partition(most, len(at) - cap)[len(at) - cap]]
    at, row, rank = _ranked(at, -flat[at], n_rows, n_expert)
    # the i-th best of a row takes a free slot, or the place of victim i − n_free
    best = np.full(n_rows, -np.inf)
    best[row[rank == 0]] = flat[at[rank == 0]]
    leaves = score < (best - hysteresis)[:, None]
    leaves &= resident
    out = np.flatnonzero(leaves)
    out, out_row, _ = _ranked(out, flat[out], n_rows, n_expert)
    n_out = np.bincount(out_row, minlength=n_rows)
    place = rank - n_free[row]  # negative: a free slot
    possible = place < n_out[row]
    at, row, place = at[possible], row[possible], place[possible]
    swap = place >= 0
    victim = np.full(len(at), -1)
    victim[swap] = out[(np.cumsum(n_out) - n_out)[row[swap]] + place[swap]]
    gain = flat[at]
    gain[swap] -= flat[victim[swap]]
    won = np.flatnonzero(gain > np.where(swap, hysteresis, 0.0))
    if len(won) > max_moves:
        edge = np.partition(gain[won], len(won) - max_moves)[len(won) - max_moves]
        won = won[gain[won] >= edge]
    won = won[np.argsort(-gain[won], kind="stable")[:max_moves]]
    at, victim = at[won], victim[won]
    experts, victims = (at % n_expert).tolist(), np.where(victim < 0, -1, victim % n_expert).tolist()
    return [
        Move(r, e, v if v >= 0 else None, g)
        for r, e, v, g in zip(row[won].tolist(), experts, victims, gain[won].tolist(), strict=True)
    ]
