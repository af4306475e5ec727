"""Measures the rates of a profile: a second or two, some hundred megabytes for a moment."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import closing
from datetime import date
from pathlib import Path

import numpy as np

from moespac_llamacpp import native
from moespac_llamacpp.machine import host_memory
from moespac_llamacpp.profile import Profile

#: More than the caches of any processor, and less than anybody misses.
_HOST_BYTES, _DEVICE_BYTES = 512 << 20, 128 << 20
_ROUNDS = 3


def measure(device: native.Device, n_threads: int) -> Profile:
    """MemoryError: not even the smallest buffers are to be had."""
    free, _ = device.memory
    n_device = min(_DEVICE_BYTES, free // 8) if free else _DEVICE_BYTES
    with closing(native.Bytes(device, n_device)) as memory:
        upload, copy = _best(memory.upload), _best(memory.copy)
    pageable = upload
    if device.host_buffer_type:
        with closing(native.Bytes(device, n_device, pinned=False)) as memory:
            pageable = _best(memory.upload)
    gpu = device.kind in ("gpu", "igpu")
    return Profile(
        device=f"{device.name} {device.description}",
        cpu=cpu_name(),
        threads=n_threads,
        cpu_read=cpu_read(n_threads),
        link=n_device / upload if gpu else 0.0,
        pageable=n_device / pageable if gpu else 0.0,
        device_read=2 * n_device / copy,  # a copy reads and writes
        measured=date.today().isoformat(),
    )


def cpu_read(n_threads: int) -> float:
    """Bytes a second that the threads read from memory together; numpy lets them run at the same time."""
    available, _ = host_memory()
    n = min(_HOST_BYTES, available // 4 if available else _HOST_BYTES) // 8
    data = np.ones(max(n, n_threads), np.uint64)
    parts = np.array_split(data, n_threads)

    def read() -> None:
        threads = [threading.Thread(target=np.bitwise_or.reduce, args=(part,)) for part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return data.nbytes / _best(read)


def _best(work: Callable[[], object]) -> float:
    """Seconds of the fastest round: what disturbs a copy only makes it slower."""
    work()
    times = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return max(min(times), 1e-9)


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return "CPU"
