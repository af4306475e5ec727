"""How many experts should be hot: the threshold tau of MoE-SpAc (arXiv 2603.09983, the heterogeneous workload balancer).

Each step the paper splits work between CPU and device by a threshold on utility: experts with U >= tau are resident. With h[u]
the number of experts of utility level u (over all layers), w[u] the uses by the coming batch that are expected of them
together, and p[u] the chance that one of them is used at all, the work of a split is

    T_cpu(tau)    = Σ_{0<u<tau}  h[u]·p[u]·cpu_expert    + w[u]·cpu_pair
    T_device(tau) = Σ_{u>=tau}   h[u]·p[u]·device_expert + w[u]·device_pair        (u = 0: nobody uses it, no work)

    p[u] = 1 − (1 − w[u] / (h[u]·n))^n        for a batch of n tokens, as if they chose independently

and tau minimises |T_cpu − T_device| subject to

    Σ_{u>=tau} missing_bytes[u] / link <= window        (each missing expert with the bytes of its layer)
    residents(tau) = Σ_{u>=tau} h[u] <= slots

T_cpu grows with tau and T_device falls, so D = T_cpu − T_device has one root; D(tau) is a running sum over bins, minus all of
T_device(0): the root is where the running sum passes it. Both constraints are lower bounds on tau. With K + 1 bins all
of this takes constant time, whatever the number of experts.

Our own part: an affine cost for each side (a cold expert costs its bytes once, however many tokens share it), and that costs are
followed while running. What a device call costs whatever it computes (`device_call`) is left out of the balance: the layer's
lane is launched anyway, so keeping an expert out would not save it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from moespac_llamacpp.planning import Table

Bound = Literal["balance", "slots", "link"]
Column = NDArray[Any]  # one number for each sample

TINY = 1e-10  # seconds; a cost of nothing could never rise in proportion


@dataclass
class Rates:
    """Seconds of work. Start values are replaced by what running shows: `track_*` (EWMA by `gain`).

    The defaults are the H200 figures of docs/performance.md (see hardware.PORTABLE): start values only."""

    cpu_expert: float = 27.0e-6
    cpu_pair: float = 2.3e-6
    device_call: float = 32.0e-6  # of one layer
    device_expert: float = 0.0
    device_pair: float = 2.1e-6
    link_bytes: float = 46e9  # bytes a second
    gain: float = 0.1

    def track_cpu(self, seconds: Column, n_expert: Column, n_pairs: Column) -> None:
        """Cold lanes took `seconds`, one entry for each sample, for this many cold experts and pairs."""
        work = np.stack([n_expert, n_pairs], axis=1)
        self.cpu_expert, self.cpu_pair = follow([self.cpu_expert, self.cpu_pair], work, seconds, self.gain)

    def track_device(self, seconds: Column, n_calls: Column, n_expert: Column, n_pairs: Column) -> None:
        work = np.stack([n_calls, n_expert, n_pairs], axis=1)
        known = [self.device_call, self.device_expert, self.device_pair]
        self.device_call, self.device_expert, self.device_pair = follow(known, work, seconds, self.gain)

    def track_link(self, seconds: float, n_bytes: float) -> None:
        if seconds > 0 and n_bytes > 0:
            self.link_bytes += self.gain * (n_bytes / seconds - self.link_bytes)


def follow(costs: Sequence[float], work: Table, seconds: Column, gain: float) -> list[float]:
    """Unit costs moved towards those that explain the measured seconds ≈ work · costs, work: [n_samples, n_costs].

    Least squares with a pull to the old costs that makes a single cost move by `gain` of the way, and several in proportion
    to what they are where the samples cannot tell them apart (one token: as many pairs as experts). Never negative."""
    old = np.maximum(np.asarray(costs, np.float64), TINY)
    measured = seconds > 0
    work, seconds = np.asarray(work, np.float64)[measured], np.asarray(seconds, np.float64)[measured]
    pull = (1 - gain) / gain * (work.T @ (work @ old)) / old
    active = pull > 0
    if not active.any():
        return list(costs)
    work = work[:, active]
    left = work.T @ work + np.diag(pull[active])
    new = old.copy()
    new[active] = np.linalg.solve(left, work.T @ seconds + pull[active] * old[active])
    return [float(x) for x in np.maximum(new, 0.0)]


@dataclass(frozen=True)
class Split:
    """tau in 0 … K+1, and what fixed it: the balance of the two sides, the slots, or the link's window."""

    tau: int
    bound: Bound
    n_bytes: float  # that the link's window has room for


def levels(score: Table, unit: float, k: int) -> NDArray[np.int64]:
    """Score in expected uses -> level 0 … K, a level being `unit` uses; whatever is used at all has at least level 1."""
    level = np.ceil(score / unit - 1e-9)
    return np.minimum(np.maximum(level, 0), k).astype(np.int64)


def histogram(
    level: NDArray[np.int64], score: Table, resident: NDArray[np.bool_], expert_bytes: NDArray[np.int64], k: int
) -> tuple[Column, Column, Column]:
    """(experts, their scores together, bytes of the missing ones) of each level, [K+1]. expert_bytes: [n_rows]."""
    flat = level.ravel()
    n_bytes = np.where(resident, 0, expert_bytes[:, None]).ravel()
    experts = np.bincount(flat, minlength=k + 1)
    return experts, np.bincount(flat, score.ravel(), k + 1), np.bincount(flat, n_bytes, k + 1)


def balance(
    experts: NDArray[np.int64],
    uses: NDArray[np.float64],
    missing_bytes: NDArray[np.float64],
    rates: Rates,
    *,
    n_tokens: int,
    n_slots: int,
    window: float | None,
) -> Split:
    """tau for a histogram [K+1]. uses: expected of each level together. n_tokens: of the coming batch. window: seconds of idle
    link, None: not bounded by the link."""
    k = len(experts) - 1
    chance = 1 - (1 - np.minimum(uses / np.maximum(experts * n_tokens, 1), 1.0)) ** n_tokens
    distinct = experts * chance
    cpu = distinct * rates.cpu_expert + uses * rates.cpu_pair
    device = distinct * rates.device_expert + uses * rates.device_pair
    # D(tau) = Σ_{u<tau} (cpu + device) − Σ device: non-decreasing in tau = 0 … K+1; the first tau with D >= 0, or the
    # one before
    running = np.concatenate([[0.0], np.cumsum(cpu + device)]) - device.sum()
    root = min(int(np.searchsorted(running, 0.0)), k + 1)
    if root > 0 and -running[root - 1] <= abs(running[root]):
        root = int(
            np.searchsorted(running, running[root - 1])
        )  # the lowest tau of equal value: empty bins cost nothing
    n_bytes = np.inf if window is None else max(0.0, window * rates.link_bytes)
    by_slots = _lowest(experts, n_slots)
    by_link = _lowest(missing_bytes, n_bytes)
    tau = max(root, by_slots, by_link)
    bound: Bound = "balance" if tau == root else "slots" if tau == by_slots else "link"
    return Split(tau, bound, n_bytes)


def _lowest(bins: NDArray[Any], limit: float) -> int:
    """The lowest tau for which Σ_{u>=tau} bins[u] <= limit."""
    above = np.concatenate([np.cumsum(bins[::-1])[::-1], [0]])
    return int(np.argmax(above <= limit))
