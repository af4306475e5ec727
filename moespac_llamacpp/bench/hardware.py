"""What this machine's memories give: host memory read by n threads, the link, the device's memory. For the floor."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import llama_cpp
import numpy as np

from moespac_llamacpp import native

_lib = llama_cpp.llama_cpp._lib
_HOST_BYTES = 256 << 20  # read by each thread in turn; far beyond its share of the caches
_DEVICE_BYTES = 1 << 30
_PIECE = 1 << 20  # about a matrix of an expert


def _function(name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(_lib, name)
    function.restype, function.argtypes = result, list(arguments)  # type: ignore[attr-defined]
    return function


_alloc = _function("ggml_backend_buft_alloc_buffer", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_free = _function("ggml_backend_buffer_free", None, ctypes.c_void_p)
_clear = _function("ggml_backend_buffer_clear", None, ctypes.c_void_p, ctypes.c_uint8)
_base = _function("ggml_backend_buffer_get_base", ctypes.c_void_p, ctypes.c_void_p)
_init = _function("ggml_backend_dev_init", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)
_done = _function("ggml_backend_free", None, ctypes.c_void_p)
_sync = _function("ggml_backend_synchronize", None, ctypes.c_void_p)
_set_async = _function(
    "ggml_backend_tensor_set_async",
    None,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_size_t,
)


def _best(work: Callable[[], float], seconds: float) -> float:
    """The largest of the rates that `work` gives while the time lasts, at least two of them."""
    end, rates = time.perf_counter() + seconds, [work(), work()]
    while time.perf_counter() < end:
        rates.append(work())
    return max(rates)


def host_read(n_threads: int, seconds: float) -> float:
    """Bytes per second that n threads read together from host memory."""
    parts = [np.ones(_HOST_BYTES // 8, np.int64) for _ in range(n_threads)]
    with ThreadPoolExecutor(n_threads) as pool:

        def work() -> float:
            start = time.perf_counter()
            list(pool.map(np.max, parts))
            return n_threads * _HOST_BYTES / (time.perf_counter() - start)

        return _best(work, seconds)


def device_write(device: native.Device, seconds: float) -> float:
    """Bytes per second of clearing device memory: a lower bound of what kernels read."""
    buffer = _alloc(device.buffer_type, _DEVICE_BYTES)
    if not buffer:
        return 0.0

    def work() -> float:
        start = time.perf_counter()
        _clear(buffer, 0)
        return _DEVICE_BYTES / (time.perf_counter() - start)

    try:
        return _best(work, seconds)
    finally:
        _free(buffer)


def link(device: native.Device, seconds: float) -> float:
    """Bytes per second from host memory (page-locked where there is such) to the device, in pieces of an expert's matrix."""
    host = _alloc(device.host_buffer_type or native.cpu_device().buffer_type, _HOST_BYTES)
    place = _alloc(device.buffer_type, _HOST_BYTES)
    backend = _init(device.pointer, None)
    if not host or not place or not backend:
        return 0.0
    tensor = native.Tensor()
    tensor.buffer, tensor.data = place, _base(place)
    tensor.ne[:] = (_HOST_BYTES, 1, 1, 1)
    tensor.nb[:] = (1, _HOST_BYTES, _HOST_BYTES, _HOST_BYTES)
    tensor.type = 24  # GGML_TYPE_I8
    source = _base(host)

    def work() -> float:
        start = time.perf_counter()
        for at in range(0, _HOST_BYTES, _PIECE):
            _set_async(backend, ctypes.addressof(tensor), source + at, at, _PIECE)
        _sync(backend)
        return _HOST_BYTES / (time.perf_counter() - start)

    try:
        return _best(work, seconds)
    finally:
        _done(backend)
        _free(place)
        _free(host)


def measure(device: native.Device, threads: Sequence[int], seconds: float) -> dict[str, Any]:
    """Bytes per second: `host` by number of threads, `link`, `device`."""
    return {
        "host": {str(n): host_read(n, seconds) for n in threads},
        "link": link(device, seconds),
        "device": device_write(device, seconds),
    }
