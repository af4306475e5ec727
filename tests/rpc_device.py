"""ggml's RPC backend on loopback: a device with memory of its own, in another process, without a GPU.

::

    with start_server(library) as device:   # ggml_backend_dev_t as int
        ...                                  # two or more backend instances, buffers, graphs

``library`` is :func:`native_build.build_rpc`. The server computes on ggml's CPU device, listens on 127.0.0.1 only,
and ends with the context, with this process (its standard input closes), or after ``seconds``.

What differs from a GPU (upstream 0.3.36, ggml/src/ggml-rpc/ggml-rpc.cpp):

- all instances of one endpoint share one connection and so one queue (``get_dispatcher``): an upload delays a graph;
- ``set_tensor_async`` copies its source at once, so it shows neither pinning nor a source changed too early;
- the device has no host buffer type, and ``supports_op`` says yes to everything;
- the server does not survive a graph that fails, and the client aborts the process when the server is gone. Free
  every buffer and backend *before* leaving the context; freeing one later aborts;
- freeing any buffer makes the server forget its last graph, which the client does not know: the same graph (by
  ``cgraph->uid``, so only graphs of ggml's scheduler) computed before and after aborts the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

HOST = "127.0.0.1"
START_SECONDS = 30.0
CPU = 0  # GGML_BACKEND_DEVICE_TYPE_CPU


@contextlib.contextmanager
def start_server(library: Path, threads: int = 1, seconds: int = 600) -> Iterator[int]:
    """A server in a child process; yields its device (``ggml_backend_dev_t``) in this process.

    ``seconds`` bounds the child's life. Raises RuntimeError with the child's output if it does not come up.
    """
    port = _free_port()
    command = [sys.executable, __file__, str(library), str(port), str(threads), str(seconds)]
    with tempfile.TemporaryFile() as log:  # a pipe that nobody reads could fill and block the server
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log)
        try:
            if not _accepts(child, port):
                log.seek(0)
                raise RuntimeError(f"RPC server did not start: {log.read().decode(errors='replace')[-2000:]}")
            yield device_at(library, f"{HOST}:{port}")
        finally:
            assert child.stdin is not None
            child.stdin.close()
            try:
                child.wait(timeout=10)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def device_at(library: Path, endpoint: str) -> int:
    """The first device of a running server; not registered, so llama.cpp does not use it by itself."""
    rpc = ctypes.CDLL(str(library))
    rpc.ggml_backend_rpc_add_server.restype = ctypes.c_void_p
    rpc.ggml_backend_rpc_add_server.argtypes = [ctypes.c_char_p]
    rpc.ggml_backend_reg_dev_get.restype = ctypes.c_void_p
    rpc.ggml_backend_reg_dev_get.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    registry = rpc.ggml_backend_rpc_add_server(endpoint.encode())
    device = rpc.ggml_backend_reg_dev_get(registry, 0) if registry else None
    if not device:
        raise RuntimeError(f"RPC server at {endpoint} offers no device")
    return int(device)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _accepts(child: subprocess.Popen[bytes], port: int) -> bool:
    """Waits until the server accepts. It drops a connection that says nothing and waits for the next one."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and child.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection((HOST, port), timeout=1):
            return True
        time.sleep(0.05)
    return False


def _serve(library: str, port: int, threads: int, seconds: int) -> None:
    """The child: serves the CPU device until standard input closes or ``seconds`` have passed."""

    def watch() -> None:
        sys.stdin.buffer.read()
        os._exit(0)

    def expire() -> None:
        time.sleep(seconds)
        os._exit(0)

    for target in (watch, expire):
        threading.Thread(target=target, daemon=True).start()
    rpc = ctypes.CDLL(library)
    rpc.ggml_backend_dev_by_type.restype = ctypes.c_void_p
    devices = (ctypes.c_void_p * 1)(rpc.ggml_backend_dev_by_type(CPU))
    rpc.ggml_backend_rpc_start_server.restype = None
    rpc.ggml_backend_rpc_start_server.argtypes = [
        ctypes.c_char_p,
        ctypes.c_char_p,
        ctypes.c_size_t,
        ctypes.c_size_t,
        ctypes.POINTER(ctypes.c_void_p),
    ]
    rpc.ggml_backend_rpc_start_server(f"{HOST}:{port}".encode(), None, threads, 1, devices)
    sys.exit(1)  # it returns only when it could not listen


if __name__ == "__main__":
    _serve(sys.argv[1], *map(int, sys.argv[2:5]))
