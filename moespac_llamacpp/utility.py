"""Utility of an expert: its expected frequency in the coming verify batch. Estimators with one interface.

The paper is MoE-SpAc (arXiv 2603.09983), the measurements behind the default are in docs/policies.md.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from moespac_llamacpp.planning import Batch, Table
from moespac_llamacpp.popularity import DECAY, Popularity

SEED_WEIGHT = 10.0  # tokens that a use known from before counts for: about half of what a prior with DECAY can hold
N_TOKENS_KEPT = 16_384
N_PAIRS_KEPT = 32_768


class Estimator(Protocol):
    """score: float64 [n_rows, n_expert]; scale: expected uses in the coming batch for a score of 1; width: tokens of the coming
    batch; hysteresis: what a swap must gain, in the score's unit; late: moves land after the batch that they are planned for."""

    def observe(self, batch: Batch) -> None: ...

    def expect(self, tokens: Sequence[int]) -> None: ...

    def score(self) -> Table: ...

    def scale(self) -> float: ...

    def width(self) -> int: ...

    def hysteresis(self, late: bool = False) -> float: ...


class Integer:
    """The paper's utility with fixed boundaries, U in 0 … K for each (layer, expert), f its frequency in the batch:

        U += 1 if f − U >= up;  U −= 1 if U − f >= down

    The defaults are the constants that the authors released (K = 5, up 5, down 1). U then rises only where five tokens
    of a batch chose an expert: below that it never leaves 0.
    """

    def __init__(self, n_rows: int, n_expert: int, *, k: int = 5, up: float = 5, down: float = 1) -> None:
        self.k, self.up, self.down = k, up, down
        self.utility = np.zeros((n_rows, n_expert))
        self._width = 1

    def observe(self, batch: Batch) -> None:
        f, u = batch.counts, self.utility
        self._width = batch.n_tokens
        self.utility = np.clip(u + (f - u >= self.up) - (u - f >= self.down), 0, self.k)

    def expect(self, tokens: Sequence[int]) -> None:
        pass

    def score(self) -> Table:
        return self.utility

    def scale(self) -> float:
        return 1.0

    def width(self) -> int:
        return self._width

    def hysteresis(self, late: bool = False) -> float:
        return 0.0


class Adaptive:
    """The paper's integer utility with boundaries that follow each expert's own recent frequency (mean m, mean deviation a):

        unit = max over the layer of m, / K              (what one level stands for)
        U += 1 if f − U·unit >  unit/2 + noise·a;  U −= 1 if f − U·unit < −(unit/2 + noise·a)

    so a noisy expert needs a larger move. The paper adapts to mean and spread; this form of the rule is ours. Equal levels are
    ordered by the running mean: without that an integer utility costs 1 to 8 points of hits (docs/policies.md). f is per token of
    the batch, so that widths can be mixed.
    """

    def __init__(self, n_rows: int, n_expert: int, *, k: int = 5, decay: float = DECAY, noise: float = 0.5) -> None:
        self.k, self.decay, self.noise = k, decay, noise
        self.mean, self.spread, self.utility = (np.zeros((n_rows, n_expert)) for _ in range(3))
        self._width = 1

    def observe(self, batch: Batch) -> None:
        seen = batch.n_seen[:, None]
        f = batch.counts / np.maximum(seen, 1)
        gain = 1 - self.decay**seen
        self._width = batch.n_tokens
        self.spread += gain * (abs(f - self.mean) - self.spread)
        self.mean += gain * (f - self.mean)
        unit = self.mean.max(axis=1, keepdims=True) / self.k + 1e-9
        gap = f - self.utility * unit
        edge = unit / 2 + self.noise * self.spread
        step = (gap > edge).astype(np.int8) - (gap < -edge)
        self.utility = np.clip(self.utility + step * (seen > 0), 0, self.k)

    def expect(self, tokens: Sequence[int]) -> None:
        pass

    def score(self) -> Table:
        top: Table = self.mean.max(axis=1, keepdims=True) + 1e-9
        return self.utility + 0.9 * self.mean / top

    def scale(self) -> float:
        return self._width * float(self.mean.max(initial=0.0)) / self.k

    def width(self) -> int:
        return self._width

    def hysteresis(self, late: bool = False) -> float:
        return 0.0


class History:
    """The ids that a key's last `depth` rows chose, for at most `cap` keys: the one not used for longest goes first.

    Takes cap · depth · n_rows · k bytes (ids in one byte up to 255 experts, else two), touched as it fills, and some 150 bytes
    for each key in the table of places."""

    def __init__(self, n_rows: int, n_expert: int, k: int, *, cap: int, depth: int = 2) -> None:
        self.cap, self.depth = cap, depth
        self.none = n_expert
        self.ids = np.empty((cap, depth, n_rows, k), np.uint8 if n_expert < 256 else np.uint16)
        self.seen = np.zeros(cap, np.int64)
        self.place: OrderedDict[int, int] = OrderedDict()

    def find(self, key: int) -> int:
        """Where the key's ids are, −1 if it is not known."""
        return self.place.get(key, -1)

    def add(self, key: int, ids: NDArray[np.signedinteger[Any]]) -> None:
        """ids [n_rows, k]"""
        at = self.place.get(key)
        if at is None:
            at = len(self.place) if len(self.place) < self.cap else self.place.popitem(last=False)[1]
            self.place[key] = at
            self.ids[at] = self.none
            self.seen[at] = 0
        else:
            self.place.move_to_end(key)
        self.ids[at, self.seen[at] % self.depth] = ids
        self.seen[at] += 1

    def n(self, at: int) -> int:
        return min(int(self.seen[at]), self.depth)


def _pair(before: int, token: int) -> int:
    """A key for two tokens, the first −1 where there is none. A table of tuples takes 259 bytes an entry instead of 148."""
    return (before + 1) << 32 | token


class TokenMemory:
    """The default: a prior, and the experts that each token and each pair (previous token, token) chose the last two times.

    For each token of the coming batch, with p the prior (popularity.py), Σ and n the sum and number of remembered choices:

        r = (Σ₁ + α·p) / (n₁ + α)                  token;   α = 1
        r = (Σ₂ + β·r) / (n₂ + β)  if n₂ > 0       pair;    β = 0.5
        r = 0.7·r + 0.3·p

    and the score is the sum over the tokens, and 2·p for those that come after them: guesses not made yet, and the batch's
    successor, of which nothing else is known. An expert stays longer than for a batch, so an upload that gains little now may be
    worth it for what comes; where no token was seen before, that is all there is to gain. All of it is linear in Σ₁, Σ₂ and p,
    so one weighted count of ids gives the score. Without drafted tokens (or without ids, where only counts are known) the
    score is p times the tokens that the prior's recent use knows.

    It measures itself: for each row, the hits that the best experts by the memory's score would have had among the tokens just
    observed (every fourth batch, JUDGED), against those by the prior; where a fading mean of the difference is not above
    `margin` of the pairs, the row falls back to the prior until it is. Numbers: on the tiny pair at 25 % 69.3 % of pairs
    where decayed counts have 57.5 (docs/policies.md).
    """

    ALPHA, BETA, MIX = 1.0, 0.5, 0.3
    AHEAD = 2  # tokens after those that are known; 1 and 4 are as good, 8 cost half a point where tokens are known
    JUDGED = 4  # one batch of so many: a fifth of what observing costs otherwise

    def __init__(
        self,
        n_rows: int,
        n_expert: int,
        *,
        decay: float = DECAY,
        swap_gain: float | None = None,
        prior_gain: float = 0.1,
        late_gain: float = 0.5,
        margin: float = 0.01,
        n_tokens: int = N_TOKENS_KEPT,
        n_pairs: int = N_PAIRS_KEPT,
        frequency: bool = True,
    ) -> None:
        """Hysteresis: swap_gain in expected uses (0.1), where tokens are known; where not, in fading counts prior_gain, or
        late_gain for moves that land after the batch that they are planned for. (0.5 instead of 0.1 saves a third of the moves,
        and costs up to 2 % of predicted step time where they land in time.)

        frequency False: the ablation in which an expert is used or not, once a batch; its swap_gain (0.05 of a chance) makes
        about as many moves, see docs/policies.md."""
        self.prior = Popularity(n_rows, n_expert, decay)
        self.swap_gain = (0.1 if frequency else 0.05) if swap_gain is None else swap_gain
        self.prior_gain, self.late_gain = prior_gain, late_gain
        self.margin, self.frequency = margin, frequency
        self.shape = n_rows, n_expert
        self.caps = n_tokens, n_pairs
        self.n_slots = max(1, n_expert // 4)  # for how many experts a row is judged; the policy keeps it up to date
        self.advantage = np.zeros(n_rows)  # fading mean of (memory's hits − prior's hits) / pairs
        self._judged = 0.0
        self._n_batches = 0
        self.tokens: History | None = None
        self.pairs: History | None = None
        self.expected: list[int] = []
        self.before = -1
        self._width = 0
        self._k = 0
        self._known: Table | None = None  # uses by the expected tokens as the memory has it, before any fall-back

    def expect(self, tokens: Sequence[int]) -> None:
        self.expected += [int(t) for t in tokens]
        self._known = None

    def observe(self, batch: Batch) -> None:
        if self._uses_memory():
            self._n_batches += 1
            if self._n_batches % self.JUDGED == 0:
                self._judge(batch)
        self.prior.n_slots = self.n_slots
        if self.frequency:
            self.prior.observe(batch)
        else:
            self.prior.observe_use(batch)
        if batch.ids is not None and batch.tokens is not None:
            self._learn(batch, batch.ids, batch.tokens.tolist())
        last = batch.last_accepted
        if last is not None:
            self.before = last
        self._width = batch.n_tokens
        self.expected, self._known = [], None

    def score(self) -> Table:
        if not self._uses_memory():
            return self.prior.counts_of(float(self.prior.n.max(initial=0.0)))
        known = np.where(self.falls_back()[:, None], self._uses_by_prior(), self._uses_by_memory())
        return self._finish(known + self.AHEAD * self._per_token())

    def scale(self) -> float:
        if self._uses_memory():
            return len(self.expected) / (len(self.expected) + self.AHEAD)
        return self._width / max(float(self.prior.n.max(initial=0.0)), 1e-9)

    def hysteresis(self, late: bool = False) -> float:
        """`swap_gain` expected uses with known tokens; without, `prior_gain` fading counts, none for batches of one token, or
        `late_gain` for moves that are late."""
        if self._uses_memory():
            return self.swap_gain
        if late:
            return self.late_gain
        return self.prior_gain if self._width > 1 else 0.0

    def width(self) -> int:
        return len(self.expected) if self._uses_memory() else max(1, self._width)

    def falls_back(self) -> NDArray[np.bool_]:
        """[n_rows]: the memory is known to be no better than the prior here."""
        return (self.advantage <= self.margin) & (self._judged > 0.25)

    def nbytes(self) -> int:
        return sum(h.ids.nbytes for h in (self.tokens, self.pairs) if h is not None)

    def _uses_memory(self) -> bool:
        return bool(self.expected) and self.tokens is not None

    def _uses_by_prior(self) -> Table:
        return len(self.expected) * self._per_token()

    def _per_token(self) -> Table:
        """p: expected use by one token. Of binary signals, what makes use by a whole batch as likely as seen."""
        mean = self.prior.mean()
        if self.frequency:
            return mean
        unused: Table = np.maximum(1 - mean, 1e-3) ** (1 / max(1, self._width))
        return 1 - unused

    def _finish(self, uses: Table) -> Table:
        """Expected uses; for binary signals the chance of any."""
        return uses if self.frequency else 1 - np.exp(-uses)

    def _uses_by_memory(self) -> Table:
        if self._known is not None:
            return self._known
        assert self.tokens is not None and self.pairs is not None
        n_rows, n_expert = self.shape
        parts, weights, on_prior, before = [], [], 0.0, self.before
        for token in self.expected:
            on_prior += self.MIX
            rest = 1 - self.MIX
            for table, key, alpha in ((self.pairs, _pair(before, token), self.BETA), (self.tokens, token, self.ALPHA)):
                at = table.find(key)
                if at >= 0:
                    n = table.n(at)
                    parts.append(table.ids[at])
                    weights.append(rest / (n + alpha))
                    rest *= alpha / (n + alpha)
            on_prior += rest
            before = token
        score = on_prior * self._per_token()
        if parts:
            ids = np.stack(parts)  # [n, depth, n_rows, k]; unfilled places hold n_expert, a column that is cut off
            place = ids + (n_expert + 1) * np.arange(n_rows)[:, None]
            use = np.bincount(place.ravel(), np.repeat(weights, place[0].size), n_rows * (n_expert + 1))
            score += use.reshape(n_rows, -1)[:, :n_expert]
        self._known = score
        return score

    def _judge(self, batch: Batch) -> None:
        n = min(self.n_slots, batch.counts.shape[1])
        pairs = np.maximum(batch.counts.sum(axis=1), 1)
        hits = []
        for score in (self._uses_by_memory(), self._uses_by_prior()):
            top = np.argpartition(-score, n - 1, axis=1)[:, :n]
            hits.append(np.take_along_axis(batch.counts, top, axis=1).sum(axis=1) / pairs)
        fade = 0.99 ** (self.JUDGED * batch.n_tokens)
        self.advantage = fade * self.advantage + (1 - fade) * (hits[0] - hits[1])
        self._judged = fade * self._judged + (1 - fade)

    def _learn(self, batch: Batch, ids: NDArray[np.signedinteger[Any]], tokens: list[int]) -> None:
        n_rows, n_expert = self.shape
        if self.tokens is None or ids.shape[2] > self._k:
            self._k = ids.shape[2]
            self.tokens, self.pairs = (History(n_rows, n_expert, self._k, cap=cap) for cap in self.caps)
        assert self.pairs is not None
        before = -1 if batch.starts else self.before
        for token, row in zip(tokens, ids, strict=True):
            self.tokens.add(token, row)
            self.pairs.add(_pair(before, token), row)
            before = token
