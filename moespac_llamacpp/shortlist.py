"""The few tokens of a large vocabulary whose logits are high enough to matter, without sorting or copying the others.

Tokens are taken in strided groups (neighbours in a vocabulary are often alike). The maxima of the groups are themselves logits: a
value that n of them reach is reached by at least n tokens, and only groups whose maximum reaches it need a closer look.

For grammars, logit bias and top-p without top-k. Where top-k decides alone, the library does the same in one call
(native.Likeliest): right after a decode, when no cache holds any of this, each call of numpy costs several times what it costs
in a loop.
"""

from __future__ import annotations

from math import exp, isfinite

import numpy as np
from numpy.typing import NDArray

N_GROUPS = 4096  # measured at 151,936 tokens: fewer make the look at groups dearer, more the maxima
MIN_GROUP = 4  # in smaller groups nothing is gained


class Shortlist:
    """For one model's logits, float32 [n_vocab]. Remembers how far below the best token the last edge was, as a first guess."""

    def __init__(self) -> None:
        self._gap = np.inf
        self._firsts = np.zeros((0, 1), np.int64)  # [tokens of a group, 1]: ids of the first group's
        self._all = np.zeros(0, np.float32)  # room for a calculation with every token

    def edge(self, logits: NDArray[np.float32], n: int) -> float:
        """A value that at least n of the logits reach, not far below the n-th largest; −inf where there is no cheap one."""
        if len(logits) < MIN_GROUP * N_GROUPS or 4 * n > N_GROUPS:
            return -np.inf
        self._maxima = maxima = np.maximum.reduce(_groups(logits), axis=0)
        top = float(maxima.max())
        if not isfinite(top):  # NaN: not for us to judge
            return -np.inf
        edge = top - self._gap
        groups = (maxima >= edge).nonzero()[0]
        if not n <= len(groups) <= 2 * n:
            # a little more than asked for, so that the guess lasts
            edge = float(np.partition(maxima, N_GROUPS - n * 4 // 3 - 1)[N_GROUPS - n * 4 // 3 - 1])
            self._gap = top - edge if isfinite(edge) else np.inf
            groups = (maxima >= edge).nonzero()[0]
        self._edge, self._groups = edge, groups
        return edge

    def reaching(self, logits: NDArray[np.float32], edge: float) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Tokens whose logits reach the edge, ascending, and the logits; an edge was asked for these logits just before."""
        n = len(logits) // N_GROUPS
        if len(self._firsts) != n:
            self._firsts = np.arange(0, n * N_GROUPS, N_GROUPS)[:, None]
        groups = self._groups if edge == self._edge else (self._maxima >= edge).nonzero()[0]
        ids = (self._firsts + groups).ravel()
        values = logits.take(ids)
        reach = (values >= edge).nonzero()[0]
        ids, values = ids.take(reach), values.take(reach)
        rest = (logits[n * N_GROUPS :] >= edge).nonzero()[0]
        if len(rest):
            rest += n * N_GROUPS
            ids, values = np.concatenate((ids, rest)), np.concatenate((values, logits.take(rest)))
        return ids, values

    def most_below(self, logits: NDArray[np.float32], edge: float, top: float) -> float:
        """At least the sum of exp(logit − top) of all tokens below the edge, which was asked for just before; a quick look."""
        bounds = np.exp(np.minimum(self._maxima, edge) - top)
        n = len(logits) // N_GROUPS
        return n * float(bounds.sum(dtype=np.float64)) + (len(logits) - n * N_GROUPS) * exp(edge - top)

    def mass_without(self, logits: NDArray[np.float32], ids: NDArray[np.integer], top: float) -> float:
        """The sum of exp(logit − top) of all tokens but these, none of which is above the top; to 7 digits."""
        if len(self._all) < len(logits):
            self._all = np.empty(len(logits), np.float32)
        all_ = self._all[: len(logits)]
        np.subtract(logits, np.float32(top), out=all_)
        all_[ids] = -np.inf
        return float(np.exp(all_, out=all_).sum())  # numpy sums in pairs: the error does not grow with the vocabulary


def _groups(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """[tokens of a group, groups]: a view, without the few tokens at the end that fill no row."""
    n = len(logits) // N_GROUPS
    return logits[: n * N_GROUPS].reshape(n, N_GROUPS)
