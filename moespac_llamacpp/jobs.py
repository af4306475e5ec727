"""Jobs of an event loop, done by one thread, one after the other: a model generates one text at a time."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import closing, suppress
from typing import Any


class Cancelled(Exception):
    """Nobody waits for the running job any more."""


class Job:
    """A generator to be run elsewhere, and the queue in which its items arrive."""

    def __init__(self, start: Callable[[], Generator[Any, None, None]]) -> None:
        self.start = start
        self.cancelled = threading.Event()
        self._loop = asyncio.get_running_loop()
        self._items: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()

    def put(self, kind: str, item: Any = None) -> None:
        """From the thread; kind: item, error, end."""
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(self._items.put_nowait, (kind, item))

    async def get(self, timeout: float) -> tuple[str, Any]:
        """kind "nothing" if nothing came in so many seconds."""
        try:
            return await asyncio.wait_for(self._items.get(), timeout)
        except asyncio.TimeoutError:
            return "nothing", None


class Jobs:
    """The thread. Call `check` from within a job, often: it ends a job that was cancelled."""

    def __init__(self, on_end: Callable[[], None] = lambda: None) -> None:
        """on_end: called in the thread after each job."""
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._on_end = on_end
        self._running: Job | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="moespac-jobs", daemon=True)
        self._thread.start()

    @property
    def n_waiting(self) -> int:
        return self._queue.qsize()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def check(self) -> None:
        """Cancelled: nobody waits for this job any more."""
        if self._closing or (self._running is not None and self._running.cancelled.is_set()):
            raise Cancelled

    async def run(
        self, start: Callable[[], Generator[Any, None, None]], gone: Callable[[], Any], poll: float = 0.1
    ) -> AsyncGenerator[Any, None]:
        """The items of the generator that `start` gives, which runs when its turn comes. Raises what it raises.

        gone: awaited every `poll` seconds; True cancels the job, and ends this."""
        if self._closing:
            return
        job = Job(start)
        self._queue.put(job)
        loop = asyncio.get_running_loop()
        looked = loop.time()
        try:
            while True:
                kind, item = await job.get(poll)
                if kind == "item":
                    yield item
                elif kind == "error":
                    raise item
                elif kind == "end":
                    return
                if loop.time() - looked >= poll:
                    looked = loop.time()
                    if await gone():
                        return
        finally:
            job.cancelled.set()

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            if job.cancelled.is_set():
                continue
            self._running = job
            try:
                with closing(job.start()) as items:
                    for item in items:
                        job.put("item", item)
                        self.check()
                job.put("end")
            except Cancelled:
                job.put("end")
            except Exception as error:
                job.put("error", error)
            self._running = None
            self._on_end()

    def close(self) -> None:
        """Ends the running job with its next check, and the thread; those that wait get nothing. A second call does nothing."""
        self._closing = True
        self._queue.put(None)
        self._thread.join()
        with suppress(queue.Empty):
            while True:
                if (job := self._queue.get_nowait()) is not None:
                    job.put("end")
