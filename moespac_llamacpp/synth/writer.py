"""Writes a GGUF file with all cores: header and tensor table by gguf's writer, tensors by positional writes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from moespac_llamacpp.machine import host_memory
from moespac_llamacpp.synth.shapes import Shape, Tensor, add_metadata
from moespac_llamacpp.synth.vocabulary import Vocabulary
from moespac_llamacpp.synth.weights import n_threads

Progress = Callable[[float], None]
_ALIGN = gguf.GGUF_DEFAULT_ALIGNMENT
_PIECE = 64 << 20


class RoomError(RuntimeError):
    """There is not enough disk or memory; the text is the sentence for the user."""


def check_room(folder: Path, n_bytes: int, memory: int) -> None:
    """RoomError unless the folder takes n_bytes more and `memory` bytes are free, where files in memory count too."""
    free = shutil.disk_usage(folder).free
    if free < n_bytes:
        raise RoomError(
            f"{folder}: the files need {n_bytes / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free there: give another -o"
        )
    available, total = host_memory()
    if _in_memory(folder):
        memory += n_bytes
    if total and available < memory:
        raise RoomError(
            f"writing needs {memory / 1e9:.1f} GB of memory, and {available / 1e9:.1f} GB are available: "
            f"write fewer --layers{', or not into a memory file system' if _in_memory(folder) else ''}"
        )


def _in_memory(folder: Path) -> bool:
    mounts = Path("/proc/mounts")
    if not mounts.exists():
        return False
    fields = [line.split()[1:3] for line in mounts.read_text().splitlines()]
    inside = [(len(at), kind) for at, kind in fields if folder.resolve().is_relative_to(at)]
    return bool(inside) and max(inside)[1] == "tmpfs"


def write_gguf(
    path: Path,
    shape: Shape,
    quant: str,
    vocabulary: Vocabulary,
    tensors: Sequence[Tensor],
    data: Callable[[Tensor], NDArray[np.uint8]],
    progress: Progress,
) -> None:
    """Writes the file under a temporary name first, so that `path` is never half a model. data: a tensor's bytes."""
    partial = path.with_name(path.name + ".partial")
    try:
        header = _write_header(partial, shape, quant, vocabulary, tensors)
        _write_tensors(partial, header, tensors, data, progress)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _write_header(path: Path, shape: Shape, quant: str, vocabulary: Vocabulary, tensors: Sequence[Tensor]) -> int:
    """Everything before the tensors' data; returns where that starts."""
    writer = gguf.GGUFWriter(path, shape.arch)
    add_metadata(writer, shape, quant)
    vocabulary.add_to(writer)
    for tensor in tensors:
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.n_bytes, raw_dtype=tensor.type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    return _aligned(path.stat().st_size)


def _aligned(n: int) -> int:
    return -(-n // _ALIGN) * _ALIGN


def _write_tensors(
    path: Path,
    start: int,
    tensors: Sequence[Tensor],
    data: Callable[[Tensor], NDArray[np.uint8]],
    progress: Progress,
) -> None:
    total = sum(_aligned(t.n_bytes) for t in tensors)
    with path.open("r+b") as file, ThreadPoolExecutor(n_threads()) as pool:
        file.truncate(start + total)
        done = 0
        pending: set[Future[int]] = set()
        for at, piece in _pieces(start, tensors, data):
            pending.add(pool.submit(_write_at, file.fileno(), piece, at))
            if len(pending) < 2 * n_threads():
                continue
            finished, pending = wait(pending, return_when=FIRST_COMPLETED)
            done += sum(f.result() for f in finished)
            progress(done / total)
        for future in pending:
            future.result()
        progress(1.0)


def _pieces(
    start: int, tensors: Sequence[Tensor], data: Callable[[Tensor], NDArray[np.uint8]]
) -> Iterator[tuple[int, memoryview]]:
    at = start
    for tensor in tensors:
        raw = memoryview(np.ascontiguousarray(data(tensor)).reshape(-1).view(np.uint8))  # type: ignore[arg-type]
        if len(raw) != tensor.n_bytes:
            raise RuntimeError(f"{tensor.name} has {len(raw)} bytes instead of {tensor.n_bytes}")
        for i in range(0, len(raw), _PIECE):
            yield at + i, raw[i : i + _PIECE]
        at += _aligned(tensor.n_bytes)


def _write_at(file: int, piece: memoryview, at: int) -> int:
    written = 0
    while written < len(piece):
        written += os.pwrite(file, piece[written:], at + written)
    return written
