"""How many experts should be hot: the threshold tau of MoE-SpAc (arXiv 2603.09983, the heterogeneous workload balancer).

Each step the paper splits work between CPU and device by a threshold on utility: experts with U >= tau are resident.
With h[u] the number of experts of utility u (over all layers) and `unit` the uses that one level stands for, the work of
a split is

    T_cpu(tau)    = Σ_{0<u<tau}  h[u] · (cpu_expert + u·unit·cpu_pair)
    T_device(tau) = Σ_{u>=tau}   h[u] · (device_expert + u·unit·device_pair)        (u = 0: nobody uses it, no work)

and tau minimises |T_cpu − T_device| subject to

    moves(tau) · expert_bytes / link <= window,   moves(tau) = Σ_{u>=tau} missing[u]
    residents(tau) = Σ_{u>=tau} h[u] <= slots

T_cpu grows with tau and T_device falls, so D = T_cpu − T_device has one root; D(tau) is a running sum over bins, minus all of
T_device(0): the root is where the running sum passes it. Both constraints are lower bounds on tau. With K + 1 bins all
of this takes constant time, whatever the number of experts.

Our own part: the pair of an affine cost per expert and per pair (a cold expert costs its bytes once, however many tokens
share it).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from moespac_llamacpp.planning import Table

Bound = Literal["balance", "slots", "link"]


@dataclass
class Rates:
    """Seconds of work. Start values are measured at start-up; `track_*` follows what running shows (EWMA of the ratio).

    The defaults are the H200 figures of docs/performance.md (see simulate.H200): start values only."""

    cpu_expert: float = 27.0e-6
    cpu_pair: float = 2.3e-6
    device_expert: float = 0.0
    device_pair: float = 2.1e-6
    link_bytes: float = 46e9  # bytes a second
    gain: float = 0.1

    def track_cpu(self, seconds: float, n_expert: int, n_pairs: int) -> None:
        """The cold lane took `seconds` for this many cold experts and pairs."""
        scale = self._scale(seconds, n_expert * self.cpu_expert + n_pairs * self.cpu_pair)
        self.cpu_expert *= scale
        self.cpu_pair *= scale

    def track_device(self, seconds: float, n_expert: int, n_pairs: int) -> None:
        scale = self._scale(seconds, n_expert * self.device_expert + n_pairs * self.device_pair)
        self.device_expert *= scale
        self.device_pair *= scale

    def track_link(self, seconds: float, n_bytes: int) -> None:
        if seconds > 0 and n_bytes > 0:
            self.link_bytes += self.gain * (n_bytes / seconds - self.link_bytes)

    def _scale(self, measured: float, predicted: float) -> float:
        if measured <= 0 or predicted <= 0:
            return 1.0
        return 1 + self.gain * (measured / predicted - 1)


@dataclass(frozen=True)
class Split:
    """tau in 0 … K+1, and what fixed it: the balance of the two sides, the slots, or the link's window."""

    tau: int
    bound: Bound
    n_moves: int  # that the link's window has room for


def levels(score: Table, unit: float, k: int) -> NDArray[np.int64]:
    """Score in expected uses -> level 0 … K, a level being `unit` uses; whatever is used at all has at least level 1."""
    level = np.ceil(score / unit - 1e-9)
    return np.minimum(np.maximum(level, 0), k).astype(np.int64)


def histogram(
    level: NDArray[np.int64], resident: NDArray[np.bool_], k: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(experts, missing experts) of each level, int64 [K+1]."""
    both = np.bincount((level + (k + 1) * resident).ravel(), minlength=2 * (k + 1)).reshape(2, k + 1)
    return both.sum(axis=0), both[0]


def balance(
    experts: NDArray[np.int64],
    missing: NDArray[np.int64],
    rates: Rates,
    *,
    unit: float,
    n_slots: int,
    expert_bytes: int,
    window: float | None,
) -> Split:
    """tau for a histogram. window: seconds of idle link, None: not bounded by the link."""
    k = len(experts) - 1
    u = np.arange(k + 1)
    used = np.where(u > 0, experts, 0)
    cpu = used * (rates.cpu_expert + u * unit * rates.cpu_pair)
    device = used * (rates.device_expert + u * unit * rates.device_pair)
    # D(tau) = Σ_{u<tau} (cpu + device) − Σ device: non-decreasing in tau = 0 … K+1; the first tau with D >= 0, or the
    # one before
    running = np.concatenate([[0.0], np.cumsum(cpu + device)]) - device.sum()
    root = min(int(np.searchsorted(running, 0.0)), k + 1)
    if root > 0 and -running[root - 1] <= abs(running[root]):
        root = int(
            np.searchsorted(running, running[root - 1])
        )  # the lowest tau of equal value: empty bins cost nothing
    n_moves = 1 << 30 if window is None else max(0, int(window * rates.link_bytes / expert_bytes))
    by_slots = _lowest(experts, n_slots)
    by_link = _lowest(missing, n_moves)
    tau = max(root, by_slots, by_link)
    bound: Bound = "balance" if tau == root else "slots" if tau == by_slots else "link"
    return Split(tau, bound, n_moves)


def _lowest(bins: NDArray[np.int64], limit: int) -> int:
    """The lowest tau for which Σ_{u>=tau} bins[u] <= limit."""
    above = np.concatenate([np.cumsum(bins[::-1])[::-1], [0]])
    return int(np.argmax(above <= limit))
