"""Reads the native layer's counters now and then, and keeps the balancer's rates at what they show."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moespac_llamacpp import native
from moespac_llamacpp.balancer import Rates

#: Steps between two readings: one costs a call into the library for each layer.
EVERY = 16
#: The device was what a layer waited for if that took more than this share of the cold lane's time.
WAITED = 0.1


@dataclass(frozen=True)
class Sample:
    """What the layers did since the last reading, cold on the CPU and hot on the device.

    All arrays [n hybrid rows]; times in seconds, 0 where nobody takes them."""

    n_calls: NDArray[np.float64]
    cold_experts: NDArray[np.float64]
    cold_pairs: NDArray[np.float64]
    hot_experts: NDArray[np.float64]
    hot_pairs: NDArray[np.float64]
    launch: NDArray[np.float64]
    cold: NDArray[np.float64]
    wait: NDArray[np.float64]
    hot: NDArray[np.float64]

    def track(self, rates: Rates) -> None:
        """In-stream, the device tells its time (`hot`). Portable, it is known where the CPU waited for it: from its launch to the
        end of that wait."""
        on_cpu = (self.cold_experts > 0) & (self.cold > 0)
        if on_cpu.any():
            rates.track_cpu(self.cold[on_cpu], self.cold_experts[on_cpu], self.cold_pairs[on_cpu])
        told = self.hot > 0
        on_device = (self.hot_pairs > 0) & (told | (self.wait > WAITED * self.cold))
        if on_device.any():
            rates.track_device(
                np.where(told, self.hot, self.launch + self.cold + self.wait)[on_device],
                self.n_calls[on_device],
                self.hot_experts[on_device],
                self.hot_pairs[on_device],
            )


class Meter:
    """Readings of one context. To be used between decodes."""

    FIELDS = (
        "n_calls",
        "n_cold_experts",
        "n_cold_pairs",
        "n_hot_experts",
        "n_hot_pairs",
        "n_streamed_experts",
        "n_ahead_right",
        "n_streamed_pairs",
        "us_launch",
        "us_cold",
        "us_wait",
        "us_hot",
    )

    def __init__(self, experts: native.Experts) -> None:
        self.experts = experts
        self.rows = [r.row for r in experts.rows() if r.hybrid]
        self._last: NDArray[np.float64] | None = None

    def _read(self) -> NDArray[np.float64]:
        perf = [self.experts.perf(row) for row in self.rows]
        return np.array([[getattr(p, f) for f in self.FIELDS] for p in perf], np.float64).reshape(-1, len(self.FIELDS))

    def sample(self) -> Sample:
        """Since the last reading, or since the counters were set to zero."""
        now = self._read()
        last = np.zeros_like(now) if self._last is None else self._last
        delta = (now - np.where((now < last).any(axis=1, keepdims=True), 0.0, last)).T
        self._last = now
        calls, cold, cold_pairs, hot, hot_pairs, in_time, ahead, streamed_pairs = delta[:8]
        streamed = in_time + ahead  # missed its slot, but it was the device that computed it
        # of several ubatches in one decode an expert may have crossed the link that is not known to have been missing
        on_cpu = (np.maximum(cold - streamed, 0.0), np.maximum(cold_pairs - streamed_pairs, 0.0))
        work = (calls, *on_cpu, hot + streamed, hot_pairs + streamed_pairs)
        return Sample(*work, *(delta[8:] * 1e-6))
