"""How often an expert is used, whatever the token: recent use, use since the start, and what of both to expect.

The prior of every policy that counts; that of the token memory (utility.py) is `Popularity`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from moespac_llamacpp.planning import Batch, Table

DECAY = (
    0.955  # per decoded row, half-life 15 rows: best or within a point of it on all traces, whatever the batch width
)


class Prior:
    """Counts of all decoded rows, fading by `decay` per token; decay 1 is LFU. `mean` is the expected use per token.

    The tokens of a batch fade one by one, so that it does not matter how a text was cut into batches. Each row fades by the
    tokens whose choices are known for it. Where only counts are known, the tokens of a batch share their mean weight."""

    def __init__(self, n_rows: int, n_expert: int, decay: float = DECAY) -> None:
        self.decay = decay
        self.counts = np.zeros((n_rows, n_expert))
        self.n = np.zeros(n_rows)  # weight of all tokens of a row

    def observe(self, batch: Batch) -> None:
        seen = batch.n_seen
        fade = self.decay**seen
        total = (1 - fade) / (1 - self.decay) if self.decay < 1 else seen.astype(np.float64)
        if batch.n_tokens == 1 or self.decay == 1:
            self._add(batch.counts, total, fade)
        elif batch.ids is None:
            self._add(batch.counts * (total / np.maximum(seen, 1))[:, None], total, fade)
        else:
            self._add(self._weighted(batch.ids), total, fade)

    def observe_use(self, batch: Batch) -> None:
        """As binary signals: an expert was used by the batch or not, whatever the number of its tokens."""
        seen = batch.n_seen
        self._add(np.minimum(batch.counts, 1), (seen > 0).astype(np.float64), self.decay**seen)

    def _add(self, counts: NDArray[Any], total: NDArray[Any], fade: NDArray[Any]) -> None:
        self.counts *= fade[:, None]
        self.counts += counts
        self.n *= fade
        self.n += total

    def _weighted(self, ids: NDArray[np.signedinteger[Any]]) -> Table:
        """Counts of the ids, a token weighing decay^(known tokens after it)."""
        n_rows, n_expert = self.counts.shape
        known = ids[:, :, 0] < n_expert
        after = known[::-1].cumsum(axis=0)[::-1] - known
        weight = np.broadcast_to((self.decay**after)[:, :, None], ids.shape)
        place = ids + (n_expert + 1) * np.arange(n_rows)[:, None]
        use: NDArray[Any] = np.bincount(place.ravel(), weight.ravel(), n_rows * (n_expert + 1))
        return use.reshape(n_rows, -1)[:, :n_expert]

    def mean(self) -> Table:
        return self.counts / np.maximum(self.n, 1e-9)[:, None]

    def counts_of(self, n: float) -> Table:
        """The counts if n tokens were known of each row: rows of which less is known become comparable."""
        return self.counts * (n / np.maximum(self.n, 1e-9))[:, None]

    def seed(self, mean: Table, n: float) -> None:
        """Starts from a known mean use, as if from n tokens (in their faded weight)."""
        self.counts = n * np.asarray(mean, np.float64)
        self.n = np.full(len(mean), n)


class Popularity:
    """Expected use by a token of which nothing is known: an expert's recent use, drawn back to its use since the start.

        p = m + λ·(M − m)        m: mean use, fading by `decay` a token; M: mean use by all tokens so far

    m follows what the text is about, but knows some twenty tokens, so that for most experts it is a handful of uses and chance. M
    knows all tokens, and says how much the layer's router likes an expert whatever the text is about. Which of them says more of
    what comes differs from model to model: in the traces of docs/policies.md λ goes from 0 to 0.9. So λ is measured, as the
    memory of tokens measures itself: for each of RETURNS, what its best experts (as many as there are slots) hit among the
    tokens of the next PERIOD. A fading mean over about 100 tokens, less its standard error, says which hit most. Hits
    decide, not squared errors, because what matters is the order of experts near the edge of the slots; a least-squares λ
    follows the few that every token uses, which have their slots anyway. Unless another hits MARGIN of the pairs more, λ is 0.
    The paper has no such term; it is shrinkage to a long-run mean, as is usual where many small samples are estimated together.
    """

    RETURNS = (0.0, 0.3, 0.6, 0.9)
    PERIOD = 8, 2  # tokens and batches at least: experts stay for a while, and judging takes a fifth of a millisecond
    FADE, MARGIN = 0.99, 0.002

    def __init__(self, n_rows: int, n_expert: int, decay: float = DECAY) -> None:
        self.recent, self.ever = Prior(n_rows, n_expert, decay), Prior(n_rows, n_expert, 1.0)
        self.returns = 0.0  # λ
        self.n_slots = max(1, n_expert // 4)  # for how many experts a row is judged
        #: fading mean of (hits − hits with λ = 0) / pairs, less its standard error if in truth there were no difference: one
        #: period that chance made good decides nothing
        self.advantage = np.zeros(len(self.RETURNS))
        self._sum, self._squares, self._weight = np.zeros_like(self.advantage), np.zeros_like(self.advantage), 0.0
        self._best: NDArray[np.intp] | None = None  # by each λ when the period began: places in the flat table
        self._uses = np.zeros((n_rows, n_expert))  # in the period
        self._period = 0, 0
        self._mean: Table | None = None  # p, until more is observed

    @property
    def n(self) -> NDArray[np.float64]:
        """[n_rows]: the weight of the tokens that recent use knows."""
        return self.recent.n

    def observe(self, batch: Batch) -> None:
        self._judge(batch.counts, batch.n_tokens)
        self.recent.observe(batch)
        self.ever.observe(batch)

    def observe_use(self, batch: Batch) -> None:
        """As binary signals, see Prior."""
        self._judge(np.minimum(batch.counts, 1), batch.n_tokens)
        self.recent.observe_use(batch)
        self.ever.observe_use(batch)

    def mean(self) -> Table:
        """p, [n_rows, n_expert]; not to be written to."""
        if self._mean is None:
            recent = self.recent.mean()
            self._mean = recent + self.returns * (self.ever.mean() - recent) if self.returns else recent
        return self._mean

    def counts_of(self, n: float) -> Table:
        """Expected uses by n tokens."""
        return n * self.mean()

    def seed(self, mean: Table, n: float) -> None:
        """Starts from a known mean use, as if from n tokens."""
        self.recent.seed(mean, n)
        self.ever.seed(mean, n)
        self._mean = None

    def _judge(self, counts: NDArray[Any], n_tokens: int) -> None:
        """Before anything learns from the batch."""
        self._mean = None
        if self._best is None:
            if not self.recent.n.any():
                return
            self._best = self._best_experts()
            self._uses[:] = 0
            self._period = 0, 0
        self._uses += counts
        self._period = self._period[0] + n_tokens, self._period[1] + 1
        if self._period[0] < self.PERIOD[0] or self._period[1] < self.PERIOD[1]:
            return
        hits = self._uses.take(self._best).sum(axis=1)
        fade = self.FADE ** self._period[0]
        gain = (hits - hits[0]) / max(self._uses.sum(), 1)
        self._sum, self._squares = fade * self._sum + gain, fade**2 * self._squares + gain**2
        self._weight = fade * self._weight + 1
        self.advantage = (self._sum - np.sqrt(self._squares)) / self._weight
        best = int(np.argmax(self.advantage))
        self.returns = self.RETURNS[best] if self.advantage[best] > self.MARGIN else 0.0
        self._best = None

    def _best_experts(self) -> NDArray[np.intp]:
        """[RETURNS, n_rows · n_slots]"""
        n_rows, n_expert = self._uses.shape
        n = min(self.n_slots, n_expert)
        recent = self.recent.mean()
        gap = self.ever.mean() - recent
        best = [np.argpartition(-(recent + r * gap), n - 1, axis=1)[:, :n] for r in self.RETURNS]
        return np.reshape(np.stack(best) + n_expert * np.arange(n_rows)[:, None], (len(self.RETURNS), -1))
