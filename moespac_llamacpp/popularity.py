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
    """Expected use by a token of which nothing is known: its expert's recent use, drawn back to the use since the start.

        p = m + λ·(M − m)        m: mean use, fading by `decay` a token; M: mean use by all tokens so far

    m follows what the text is about, but of an expert that is used now and then it knows a few tokens; M says how much the
    layer's router likes the expert whatever the text is about, and knows all of them. How far recent use returns to M differs
    from model to model (in the traces of docs/policies.md 0 to 45 %), so λ is measured: the least-squares coefficient of
    what each batch used beyond m on M − m, both as they were before the batch, over all layers together:

        λ = (S − σ) / Q, kept in 0 … 1      S = Σ (c − n·m)·(M − m),  Q = Σ n·(M − m)²

    with c the counts of a batch of n tokens, and all sums fading over about 100 tokens. σ is the standard error of S by the
    batches' residuals: only what is certain of a return counts, and where M says nothing p is m alone. The paper has no such
    term; this is shrinkage to a long-run mean, as is usual where many small samples are estimated together.
    """

    FADE = 0.99

    def __init__(self, n_rows: int, n_expert: int, decay: float = DECAY) -> None:
        self.recent, self.ever = Prior(n_rows, n_expert, decay), Prior(n_rows, n_expert, 1.0)
        self.returns = 0.0  # λ
        self._s = self._q = self._variance = 0.0  # S, Q, σ²
        self._mean: Table | None = None  # p, until more is observed

    @property
    def n(self) -> NDArray[np.float64]:
        """[n_rows]: the weight of the tokens that recent use knows."""
        return self.recent.n

    def observe(self, batch: Batch) -> None:
        self._measure(batch.counts, batch.n_seen, batch.n_tokens)
        self.recent.observe(batch)
        self.ever.observe(batch)

    def observe_use(self, batch: Batch) -> None:
        """As binary signals, see Prior."""
        self._measure(np.minimum(batch.counts, 1), np.minimum(batch.n_seen, 1), batch.n_tokens)
        self.recent.observe_use(batch)
        self.ever.observe_use(batch)

    def mean(self) -> Table:
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

    def _measure(self, counts: NDArray[Any], seen: NDArray[Any], n_tokens: int) -> None:
        """How far this batch went from recent use to use since the start; both know nothing of it yet."""
        self._mean = None
        if not self.recent.n.any():
            return
        recent = self.recent.mean()
        gap = self.ever.mean() - recent
        expected = seen[:, None] * gap
        s = float(np.vdot(counts, gap) - np.vdot(expected, recent))
        q = float(np.vdot(expected, gap))
        fade = self.FADE**n_tokens
        self._s, self._q = fade * self._s + s, fade * self._q + q
        if self._q <= 0:
            return
        residual = s - self._s / self._q * q
        self._variance = fade**2 * self._variance + residual**2
        self.returns = min(1.0, max(0.0, (self._s - self._variance**0.5) / self._q))
