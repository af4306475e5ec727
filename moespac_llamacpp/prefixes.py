"""Which tokens of a vocabulary a grammar may allow, without asking it about each: 151k questions take 30 to 50 ms.

A grammar reads a token from left to right. If it does not allow the token `{`, it allows none that starts with `{`. So it is
asked about the tokens of one byte, and where such a token is allowed about those of two bytes that start with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

#: bool [n]: which of the token ids, int64 [n], are allowed
Ask = Callable[[NDArray[np.int64]], NDArray[np.bool_]]


class Prefixes:
    """The tokens in the order of their bytes: those that start alike are neighbours."""

    def __init__(self, pieces: Sequence[bytes], ends: Sequence[int]) -> None:
        """pieces: of each token, as the grammar reads it; b"" for tokens that it never allows. ends: tokens that end a text, of
        which the grammar decides otherwise."""
        self._ends = np.array(sorted(ends), np.int64)
        without = set(ends)
        order = sorted((t for t in range(len(pieces)) if pieces[t] and t not in without), key=pieces.__getitem__)
        self._order = np.array(order, np.int64)
        ones = np.array([pieces[t][0] for t in order], np.int64)
        twos = np.array([pieces[t][1] + 1 if len(pieces[t]) > 1 else 0 for t in order], np.int64)
        self._one_start = _starts(ones)
        self._two_start = _starts(ones * 257 + twos)
        self._parent = np.searchsorted(self._one_start, self._two_start, side="right") - 1
        self._length = np.diff(np.append(self._two_start, len(order)))
        # A group can be asked for if its first token is what all of it starts with, and nothing else.
        self._one_probe = np.array([len(pieces[order[i]]) == 1 for i in self._one_start], np.bool_)
        self._two_probe = np.array([len(pieces[order[i]]) <= 2 for i in self._two_start], np.bool_)

    def may_follow(self, ask: Ask) -> NDArray[np.int64]:
        """Ids of all tokens that are allowed, and of some that are not."""
        ones = self._asked(np.ones(len(self._one_start), np.bool_), self._one_start, self._one_probe, ask)
        twos = self._asked(ones[self._parent], self._two_start, self._two_probe, ask)
        return np.concatenate((self._order[np.repeat(twos, self._length)], self._ends))

    def _asked(
        self, open_: NDArray[np.bool_], start: NDArray[np.int64], probe: NDArray[np.bool_], ask: Ask
    ) -> NDArray[np.bool_]:
        """Which of the open groups stay open."""
        asked = np.flatnonzero(open_ & probe)
        if len(asked):
            open_[asked] = ask(self._order[start[asked]])
        return open_


def _starts(keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where runs of equal keys start."""
    return np.flatnonzero(np.concatenate(([True], keys[1:] != keys[:-1]))) if len(keys) else np.zeros(0, np.int64)
