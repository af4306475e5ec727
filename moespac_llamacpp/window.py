"""How much may travel in a step: the link's measured rate, and the measured time in which the link is idle."""

from __future__ import annotations

import time

from moespac_llamacpp.balancer import Rates

#: Share of a decode in which uploads may travel. They read the host memory that the cold lane reads, so not all of it: the
#: link of docs/performance.md takes 46 of the 100 GB/s that the cold lane can use.
DECODE_SHARE = 0.5
#: Moves of a step as long as no decode was measured.
START_MOVES = 60
#: Shorter stretches of a busy link tell nothing of its rate.
MIN_SECONDS = 1e-3


class LinkWindow:
    """Told of the events of a step by Residency, in this order: planned, drafted, decodes, decoded; times in seconds."""

    GAIN = 0.2

    def __init__(self, rates: Rates) -> None:
        self.rates = rates
        self.draft_seconds: float | None = None  # fading means
        self.decode_seconds: float | None = None
        self._planned_at: float | None = None
        self._decodes_at: float | None = None
        self._busy_since: float | None = None  # the link has had work since then
        self._on_the_way = 0.0  # bytes

    def budget(self, drafting: bool) -> tuple[int, float]:
        """(moves, bytes) that the coming step may start."""
        if self.decode_seconds is None:
            return START_MOVES, float("inf")
        seconds = DECODE_SHARE * self.decode_seconds
        if drafting and self.draft_seconds is not None:
            seconds += self.draft_seconds
        return 1 << 30, seconds * self.rates.link_bytes

    def planned(self) -> None:
        self._planned_at = time.perf_counter()

    def drafted(self) -> None:
        """A draft model has guessed since the plan."""
        if self._planned_at is not None:
            self.draft_seconds = self._follow(self.draft_seconds, time.perf_counter() - self._planned_at)

    def decodes(self) -> None:
        self._decodes_at = time.perf_counter()

    def decoded(self) -> None:
        """Prompts are decoded without `decodes`: they are another kind of batch and do not count."""
        if self._decodes_at is not None:
            self.decode_seconds = self._follow(self.decode_seconds, time.perf_counter() - self._decodes_at)
            self._decodes_at = None

    def ended(self) -> None:
        """The step ended in between: how long its decode took is not known, and what follows is not that decode."""
        self._decodes_at = None

    def _follow(self, mean: float | None, seconds: float) -> float:
        return seconds if mean is None else mean + self.GAIN * (seconds - mean)

    def started(self, n_bytes: float) -> None:
        """Uploads were queued."""
        if n_bytes > 0:
            if self._busy_since is None:
                self._busy_since = time.perf_counter()
            self._on_the_way += n_bytes

    def on_the_way(self, n_bytes: float) -> None:
        """So much has not landed yet. Where the link was busy all the time, that tells its rate."""
        now = time.perf_counter()
        if n_bytes <= 0:
            self._busy_since, self._on_the_way = None, 0.0
        elif self._busy_since is not None and now - self._busy_since > MIN_SECONDS:
            self.rates.track_link(now - self._busy_since, self._on_the_way - n_bytes)
            self._busy_since, self._on_the_way = now, n_bytes
