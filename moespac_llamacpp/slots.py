"""How the slots are split between the layers: slowly, by what a threshold over all layers would want. numpy only.

One threshold tau over all layers' utilities (MoE-SpAc, arXiv 2603.09983) wants more experts of some layers and fewer of others
than these have slots; what it wants beyond a layer's slots is clipped there. The paper does not say how slots are shared out
between layers: following the clipped demand is our own.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moespac_llamacpp.planning import Table

#: Steps between two looks at the split. A change copies the slots of the layers concerned and drops their lanes' graphs.
EVERY = 128
#: Layers that change at once, half of them giving and half taking.
MAX_ROWS = 4
#: Slots that a layer gains at once: what that loses of another layer's residents comes back as uploads.
MAX_GAIN = 8


class Demand:
    """How many experts of each row are among the hottest of all rows, as many as there are slots; a fading mean, float
    [n_rows]."""

    def __init__(self, n_rows: int, *, gain: float = 0.03) -> None:
        self.gain = gain
        self.n = 0
        self.mean = np.zeros(n_rows)

    def observe(self, score: Table, n_slots: NDArray[np.int32]) -> None:
        """score: one plan's utilities. Rows without slots take no part, nor those that have one for each expert."""
        rows = np.flatnonzero((n_slots > 0) & (n_slots < score.shape[1]))
        total = int(n_slots[rows].sum())
        flat = score[rows].ravel()
        if not 0 < total < len(flat):
            return
        tau = max(float(np.partition(flat, len(flat) - total)[len(flat) - total]), np.finfo(np.float64).tiny)
        wanted = np.zeros(len(n_slots))
        wanted[rows] = np.count_nonzero(score[rows] >= tau, axis=1)
        self.n += 1
        mean = self.mean + max(self.gain, 1 / self.n) * (wanted - self.mean)
        self.mean = mean  # a new array: another thread may be reading the old one


def resplit(
    n_slots: NDArray[np.int32],
    demand: NDArray[np.float64],
    expert_bytes: NDArray[np.int64],
    n_expert: NDArray[np.int32],
    *,
    max_rows: int = MAX_ROWS,
    least: float = 0.1,
) -> NDArray[np.int32] | None:
    """A split a little closer to the demand, None if it is close enough. All arrays [n_rows].

    Rows that want most beyond their slots take from those that use fewest of theirs, half of the way at once, at least one
    slot and at most MAX_GAIN. A row gives or takes only if the gap is above the share `least` of its slots and above one; it
    keeps one slot, and all of them if it has one for each expert: a layer that is whole is worth more than its slots elsewhere
    (memory.slots_for_time). The bytes of all slots never grow."""
    has = (n_slots > 0) & (n_slots < n_expert)
    gap = np.where(has, np.minimum(demand, n_expert) - n_slots, 0.0)
    edge = np.maximum(1.0, least * n_slots)
    takers = [int(r) for r in np.argsort(-gap, kind="stable") if gap[r] > edge[r]][: max_rows // 2]
    givers = [int(r) for r in np.argsort(gap, kind="stable") if gap[r] < -edge[r] and n_slots[r] > 1][: max_rows // 2]
    split = n_slots.copy()
    for taker, giver in zip(takers, givers, strict=False):
        one, other = int(expert_bytes[taker]), int(expert_bytes[giver])
        spare = min(int(-gap[giver]), int(n_slots[giver]) - 1)
        take = min(MAX_GAIN, max(1, int(min(gap[taker], spare * other / one) / 2)))
        give = -(-take * one // other)
        if give <= spare:
            split[giver] -= give
            split[taker] += take
    return None if (split == n_slots).all() else split
