"""The placement policies of other systems, in this engine: a miss is computed on the CPU, and moves happen between decodes.

Each keeps what decides *which* experts are resident. What their engines do about a miss (wait for it, or not) is not
rebuilt, so a comparison with them is one of policies, not of systems.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moespac_llamacpp.planning import Batch, Limits, Move, Table, plan_moves


class Recency:
    """When each expert was last used, in decodes; the fraction orders the uses within a decode. `last`: [n_rows, n_expert]."""

    def __init__(self, n_rows: int, n_expert: int) -> None:
        self.last = np.zeros((n_rows, n_expert))
        self.now = 0

    def observe(self, batch: Batch) -> None:
        self.now += 1
        n = batch.n_tokens + 1
        if batch.ids is None:  # only counts: the more tokens chose it, the later the last of them is likely to be
            within = batch.counts / n
        else:
            n_rows, n_expert = self.last.shape
            wide = np.zeros((n_rows, n_expert + 1))
            k = batch.ids.shape[2]
            when = (np.arange(1, batch.n_tokens + 1)[:, None, None] - np.arange(k) / 64) / n
            np.maximum.at(wide, (np.arange(n_rows)[None, :, None], batch.ids), when)
            within = wide[:, :n_expert]
        self.last = np.where(batch.counts > 0, self.now + within, self.last)


class ByRecency:
    """What all policies by the last use have in common."""

    def __init__(self, n_rows: int, n_expert: int) -> None:
        self.recency = Recency(n_rows, n_expert)

    def observe(self, batch: Batch) -> None:
        self.recency.observe(batch)

    def expect(self, tokens: Sequence[int]) -> None:
        pass

    def worth(self) -> Table:
        return self.recency.last


class Fiddler:
    """Popularity: the experts that were used most on calibration data, placed once. Fiddler (arXiv 2402.07033).

    Simplified: it also chooses per batch between computing a cold expert on the CPU and copying its weights; here it is always
    the CPU. profile: [n_rows, n_expert] counts of calibration data; without it the first `calibration` tokens that it sees.
    """

    def __init__(
        self, n_rows: int, n_expert: int, profile: NDArray[np.float64] | None = None, *, calibration: int = 32
    ) -> None:
        self.left = calibration if profile is None else 0
        self.popularity: Table = np.zeros((n_rows, n_expert)) if profile is None else np.asarray(profile, np.float64)

    def observe(self, batch: Batch) -> None:
        if self.left > 0:
            self.popularity = self.popularity + batch.counts
            self.left -= batch.n_tokens

    def expect(self, tokens: Sequence[int]) -> None:
        pass

    def plan(self, resident: NDArray[np.bool_], limits: Limits) -> list[Move]:
        if self.left > 0:
            return []
        return plan_moves(self.popularity, resident, limits.n_slots, limits.max_moves, 0.0)


class MixtralOffload(ByRecency):
    """Least recently used per layer, loaded on demand. Eliseev & Mazur, 'Fast Inference of Mixture-of-Experts Language Models
    with Offloading' (arXiv 2312.17238).

    Only experts that the last batch wanted and missed may enter, in place of those unused for longest. Simplified: they come
    after the batch, not in the middle of it, and under a cap of moves the longest unused are replaced first in any layer; its
    speculative loading (the next layer's gate on this layer's input) needs the model.
    """

    def plan(self, resident: NDArray[np.bool_], limits: Limits) -> list[Move]:
        last = self.recency.last
        wanted = last >= self.recency.now
        score = np.where(resident | wanted, last, 0.0)
        return plan_moves(score, resident, limits.n_slots, limits.max_moves, 0.0)


class MoeInfinity:
    """Activation-aware, by sequence. MoE-Infinity (arXiv 2401.14361).

    The sequence's activation matrix (counts per layer and expert) is matched by cosine with those of earlier sequences;
    the score is the use that the running sequence and its match name together, the match weighing like `weight` tokens.
    Simplified: the most recent `kept` sequences stand for its collection of representative ones, and the match is made once a
    batch. Left out are the weighting by a layer's distance from the one in execution, since all layers are planned between two
    decodes, and the factor of overall frequency that the authors' public code multiplies into its eviction score.
    """

    def __init__(self, n_rows: int, n_expert: int, *, kept: int = 32, weight: float = 16.0) -> None:
        self.current = np.zeros((n_rows, n_expert))
        self.n = 0
        self.kept, self.weight = kept, weight
        self.past = np.zeros((0, n_rows * n_expert))  # use per token of each kept sequence

    def observe(self, batch: Batch) -> None:
        if batch.starts and self.n:
            self.past = np.vstack([self.past, self.current.reshape(1, -1) / self.n])[-self.kept :]
            self.current, self.n = np.zeros_like(self.current), 0
        self.current = self.current + batch.counts
        self.n += batch.n_tokens

    def expect(self, tokens: Sequence[int]) -> None:
        pass

    def plan(self, resident: NDArray[np.bool_], limits: Limits) -> list[Move]:
        return plan_moves(self.worth(), resident, limits.n_slots, limits.max_moves, 0.0)

    def worth(self) -> Table:
        score = self.current
        if len(self.past):
            norm = np.linalg.norm(self.past, axis=1) + 1e-9
            match = self.past[int(np.argmax(self.past @ self.current.ravel() / norm))]
            score = score + self.weight * match.reshape(score.shape)
        return score


class HybriMoe:
    """Score-based: 'minus recent score' of HybriMoE (arXiv 2504.05897), S = α·TopP(s) + (1 − α)·S, s the router's scores.

    Simplified: s is an expert's share of the batch's tokens (router scores are not observed, so that only the model's own k
    experts of a token score at all, where p of the paper may be larger), and α is per token so that the memory does not depend
    on the batch's width; its value, 0.1, is ours. Its prefetch by the gate and its simulation of the schedule within a layer
    are left out.
    """

    def __init__(self, n_rows: int, n_expert: int, *, alpha: float = 0.1) -> None:
        self.alpha = alpha
        self.value = np.zeros((n_rows, n_expert))

    def observe(self, batch: Batch) -> None:
        new = 1 - (1 - self.alpha) ** batch.n_tokens
        self.value = new * batch.counts / max(1, batch.n_tokens) + (1 - new) * self.value

    def expect(self, tokens: Sequence[int]) -> None:
        pass

    def plan(self, resident: NDArray[np.bool_], limits: Limits) -> list[Move]:
        return plan_moves(self.value, resident, limits.n_slots, limits.max_moves, 0.0)

    def worth(self) -> Table:
        return self.value
