"""The few tokens of a large vocabulary whose logits are high enough to matter, without sorting or copying the others.

Tokens are taken in strided groups (neighbours in a vocabulary are often alike). The maxima of the groups are themselves logits: a
value that n of them reach is reached by at least n tokens, and only groups whose maximum reaches it need a closer look.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

N_GROUPS = 4096  # measured at 151,936 tokens: fewer make the look at groups dearer, more the maxima
MIN_GROUP = 4  # in smaller groups nothing is gained


class Shortlist:
    """For one model's logits, float32 [n_vocab]. Remembers how far below the best token the last edge was, as a first guess."""

    def __init__(self) -> None:
        self._gap = np.inf

    def edge(self, logits: NDArray[np.float32], n: int) -> float:
        """A value that at least n of the logits reach, not far below the n-th largest; −inf where there is no cheap one."""
        if len(logits) < MIN_GROUP * N_GROUPS or 4 * n > N_GROUPS:
            return -np.inf
        self._maxima = maxima = _groups(logits).max(axis=0)
        top = float(maxima.max())
        if not np.isfinite(top):  # NaN: not for us to judge
            return -np.inf
        edge = top - self._gap
        if not n <= np.count_nonzero(maxima >= edge) <= 2 * n:
            # a little more than asked for, so that the guess lasts
            edge = float(np.partition(maxima, N_GROUPS - n * 4 // 3 - 1)[N_GROUPS - n * 4 // 3 - 1])
            self._gap = top - edge if np.isfinite(edge) else np.inf
        return edge

    def reaching(self, logits: NDArray[np.float32], edge: float) -> NDArray[np.int64]:
        """Ids of the tokens whose logits reach the edge, ascending; `edge` was asked for these logits just before."""
        groups = np.flatnonzero(self._maxima >= edge)
        found = np.flatnonzero(np.take(_groups(logits), groups, axis=1) >= edge)
        rows, columns = np.divmod(found, len(groups))
        n_grouped = len(logits) // N_GROUPS * N_GROUPS
        rest = np.flatnonzero(logits[n_grouped:] >= edge)
        return np.concatenate((rows * N_GROUPS + groups[columns], rest + n_grouped))


def _groups(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """[tokens of a group, groups]: a view, without the few tokens at the end that fill no row."""
    n = len(logits) // N_GROUPS
    return logits[: n * N_GROUPS].reshape(n, N_GROUPS)
