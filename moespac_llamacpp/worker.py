"""One thread that works off small jobs in order, while the caller waits in a C library (which releases the GIL)."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

T = TypeVar("T")
U = TypeVar("U")


class Job(Generic[T]):
    """A call and, once it ran, its result. A job that failed hands its exception to whoever asks first."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._running = threading.Lock()  # held until the job is done: the cheapest thing that can be waited for
        self._running.acquire()
        self._result: T
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._result = self._call()
        except BaseException as error:
            self.error = error
        finally:
            self._running.release()

    def wait(self) -> None:
        with self._running:
            pass

    def result(self) -> T:
        """Waits for it. What the job raised is raised here."""
        self.wait()
        if self.error is not None:
            raise self.error
        return self._result


class Worker:
    """Runs jobs one after the other. The thread starts with the first one and ends with `close`, or when the worker is dropped.

    seconds: how long the jobs have taken so far."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._queue: SimpleQueue[Sequence[Job[Any]] | None] = SimpleQueue()
        self._open: list[Job[Any]] = []  # jobs that nobody has looked at since they were submitted
        self._thread: threading.Thread | None = None
        self._stop = weakref.finalize(self, self._queue.put, None)

    def submit(self, call: Callable[[], T]) -> Job[T]:
        """RuntimeError: it is closed, so that nobody would ever run the job."""
        job = Job(call)
        self._give((job,))
        return job

    def submit_both(self, first: Callable[[], T], second: Callable[[], U]) -> tuple[Job[T], Job[U]]:
        """Two jobs, for which the thread is woken once: that takes longer than all the rest. RuntimeError: as `submit`."""
        jobs = Job(first), Job(second)
        self._give(jobs)
        return jobs

    def _give(self, jobs: Sequence[Job[Any]]) -> None:
        if not self._stop.alive:
            raise RuntimeError("the planner's thread has been closed")
        if self._thread is None:
            own = weakref.ref(self)
            self._thread = threading.Thread(target=_work, args=(self._queue, own), name="moespac-planner", daemon=True)
            self._thread.start()
        self._open += jobs
        self._queue.put(jobs)

    def wait(self) -> None:
        """Waits for all jobs; raises nothing."""
        if self._open:
            self._open[-1].wait()

    def join(self) -> None:
        """Waits for all jobs; raises what the first one that failed had raised, once."""
        self.wait()
        self.check()

    def check(self) -> None:
        """As join, without waiting: only for what has ended already."""
        while self._open and not self._open[0]._running.locked():
            error = self._open.pop(0).error
            if error is not None:
                raise error

    def close(self) -> None:
        """Drops no job: those that were submitted still run. Their errors are lost. May be called twice."""
        self._stop()
        if self._thread is not None:
            self._thread.join()
        self._open.clear()


def _work(queue: SimpleQueue[Sequence[Job[Any]] | None], owner: weakref.ref[Worker]) -> None:
    while (jobs := queue.get()) is not None:
        start = time.perf_counter()
        for job in jobs:
            job.run()
        if (worker := owner()) is not None:
            worker.seconds += time.perf_counter() - start
        del job, jobs, worker
