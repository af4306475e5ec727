"""The numbers in the tensors: random ones shared by all layers, and the planted embeddings, routers and output heads.

A target's embedding is a sum of orthogonal directions: one for the trace token that it replays, one each for its two atoms, and a
random code in directions of their own that says which word it is. A router's row is the sum of the directions that should
choose the expert. (The other way round, rows as sums of random embeddings, holds no more tokens than the embedding has
dimensions.) The output head's row of a word is the code of the word before it. A draft has only codes.

Everything is quantised by ggml's own quantiser.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import gguf
import llama_cpp
import numpy as np
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray

from moespac_llamacpp.synth.plan import BOOST, Ids, Plan, rank_values
from moespac_llamacpp.synth.shapes import Shape, Tensor

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

#: Root mean square of an embedding's entries: large beside the blocks' outputs (shapes.SMALL).
EMBEDDING_RMS = 256.0
CODE_WEIGHT = 1.5  # length of the code, where a direction has length 1
ROUTER_GAIN = 2.5  # router logit of signal 1: chosen experts get 2.5 to 15, others about 0
_CHUNK = 4096  # rows that a thread makes and quantises at a time

_quantize = llama_cpp.llama_cpp._lib.ggml_quantize_chunk
_quantize.restype = ctypes.c_size_t
_quantize.argtypes = [
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_int64,
    ctypes.c_int64,
    ctypes.c_int64,
    ctypes.c_void_p,
]


def n_threads() -> int:
    return len(os.sched_getaffinity(0))


def row_bytes(kind: Type, columns: int) -> int:
    block, size = gguf.GGML_QUANT_SIZES[kind]
    return columns // block * size


def quantize(rows: Floats, kind: Type, out: Bytes | None = None) -> Bytes:
    """uint8 [rows, bytes of a row] of float32 [rows, columns], by ggml's quantiser."""
    rows = np.ascontiguousarray(rows, np.float32)
    n, columns = rows.shape
    out = np.empty((n, row_bytes(kind, columns)), np.uint8) if out is None else out
    if kind == Type.F32:
        out[:] = rows.view(np.uint8)
    elif (written := _quantize(int(kind), rows.ctypes.data, out.ctypes.data, 0, n, columns, None)) != out.nbytes:
        raise RuntimeError(f"ggml quantised {n} rows to {kind.name} in {written} bytes instead of {out.nbytes}")
    return out


def quantize_rows(n: int, columns: int, kind: Type, make: Callable[[slice], Floats]) -> Bytes:
    """The same for n rows that `make` gives piece by piece, on all cores."""
    out = np.empty((n, row_bytes(kind, columns)), np.uint8)

    def part(start: int) -> None:
        rows = slice(start, min(start + _CHUNK, n))
        quantize(make(rows), kind, out[rows])

    with ThreadPoolExecutor(n_threads()) as pool:
        list(pool.map(part, range(0, n, _CHUNK)))
    return out


class Random:
    """Random matrices, each made once: layers share them, and a tensor's experts are one matrix with its rows rotated."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self._made: dict[tuple[tuple[int, ...], Type, float, str], Bytes] = {}

    def __call__(self, tensor: Tensor) -> Bytes:
        role = tensor.name.split(".")[2] if tensor.layer >= 0 else tensor.name
        key = (tensor.shape, tensor.type, tensor.gain, role)
        if key not in self._made:
            self._made[key] = self._make(tensor, len(self._made))
        return self._made[key]

    def _make(self, tensor: Tensor, index: int) -> Bytes:
        *heads, rows, columns = tensor.shape
        scale = np.float32(tensor.gain / np.sqrt(columns))

        def make(part: slice) -> Floats:
            rng = np.random.default_rng((self.seed, index, part.start))
            rows = rng.standard_normal((part.stop - part.start, columns), dtype=np.float32)
            return np.asarray(rows * scale, np.float32)

        matrix = quantize_rows(rows, columns, tensor.type, make)
        if not heads:
            return matrix
        return np.stack([np.roll(matrix, 7 * i, axis=0) for i in range(heads[0])])


def codes(n: int, width: int, seed: int) -> NDArray[np.int8]:
    """Random +-1 codes, int8 [n, width]: two of them agree by about half."""
    raw = np.random.default_rng(seed).integers(0, 256, (n, -(-width // 8)), dtype=np.uint8)
    return (2 * np.unpackbits(raw, axis=1)[:, :width].astype(np.int8) - 1).astype(np.int8)


def code_width(n_embd: int) -> int:
    """Directions of a target's embedding that its code takes; the others are for routing."""
    return min(256, n_embd // 4)


class TargetWeights:
    """The planted tensors of a target."""

    def __init__(self, shape: Shape, plan: Plan, seed: int = 0) -> None:
        self.plan = plan
        embd = shape.n_embd
        width = code_width(embd)
        noise = np.random.default_rng((seed, 1)).standard_normal((embd, embd), dtype=np.float32)
        directions = np.linalg.qr(noise)[0].T
        self.code_directions: Floats = directions[:width] * np.float32(CODE_WEIGHT / np.sqrt(width))
        self.base = directions[width : width + len(plan.base)]
        self.atoms = directions[width + len(plan.base) :][: len(plan.boost)]
        self.codes = codes(shape.n_vocab, width, seed)
        self.scale = np.float32(EMBEDDING_RMS * np.sqrt(embd / (3 + CODE_WEIGHT**2)))
        self.before = predecessors(shape.n_vocab, successors(plan))

    def embedding(self, part: slice) -> Floats:
        plan = self.plan
        rows = self.codes[part].astype(np.float32) @ self.code_directions
        rows += self.base[plan.base_of[part]]
        rows += self.atoms[plan.lap_atom[part]]
        rows += self.atoms[plan.own_atom[part]]
        return np.asarray(rows * self.scale, np.float32)

    def output(self, part: slice) -> Floats:
        return np.asarray(sum_of_codes(self.codes, self.before[part]) @ self.code_directions, np.float32)

    def router(self, index: int) -> Floats:
        """[n_expert, n_embd] of the index-th MoE layer. Its input has the norm of sqrt(n_embd)."""
        plan, k = self.plan, self.plan.base.shape[2]
        signal = np.zeros((len(plan.base), plan.n_expert), np.float32)
        np.put_along_axis(signal, plan.base[:, index].astype(np.int64), rank_values(k)[None], axis=1)
        rows = signal.T @ self.base
        boosted = np.flatnonzero(plan.boost[:, index] >= 0)
        np.add.at(rows, plan.boost[boosted, index], BOOST * self.atoms[boosted])
        return np.asarray(rows * (ROUTER_GAIN * np.sqrt(3 + CODE_WEIGHT**2) / np.sqrt(rows.shape[1])), np.float32)


class DraftWeights:
    """The planted tensors of a draft that is wrong after the given words of the chain."""

    def __init__(self, shape: Shape, plan: Plan, misses: NDArray[np.bool_], seed: int = 0) -> None:
        self.codes = codes(shape.n_vocab, shape.n_embd, seed + 1)
        self.scale = np.float32(EMBEDDING_RMS)
        self.before = predecessors(shape.n_vocab, successors(plan, misses))

    def embedding(self, part: slice) -> Floats:
        return np.asarray(self.codes[part] * self.scale, np.float32)

    def output(self, part: slice) -> Floats:
        return np.asarray(sum_of_codes(self.codes, self.before[part]) / np.float32(self.codes.shape[1]), np.float32)


def successors(plan: Plan, misses: NDArray[np.bool_] | None = None) -> tuple[Ids, Ids]:
    """(words, what follows each of them), both chains; with misses, what the draft believes: a decoy, another for each miss."""
    follows = np.roll(plan.chain, -1)
    if misses is not None and misses.any():
        wrong = np.flatnonzero(misses)
        follows = follows.copy()
        follows[wrong] = plan.decoys[(np.arange(len(wrong)) * len(plan.decoys)) // len(wrong)]
    return np.concatenate([plan.chain, plan.decoys]), np.concatenate([follows, np.roll(plan.decoys, -1)])


def predecessors(n_vocab: int, following: tuple[Ids, Ids]) -> Ids:
    """Before which words each token is expected, int32 [n_vocab, as many as there are at most], -1: fewer."""
    words, follows = following
    order = np.argsort(follows, kind="stable")
    counts = np.bincount(follows, minlength=n_vocab)
    nth = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    before = np.full((n_vocab, int(counts.max())), -1, np.int32)
    before[follows[order], nth] = words[order]
    return before


def sum_of_codes(all_codes: NDArray[np.int8], before: Ids) -> Floats:
    """float32 [len(before), width]: the sums of the codes of each row's words; -1: none."""
    rows = np.zeros((len(before), all_codes.shape[1]), np.float32)
    for column in before.T:
        there = np.flatnonzero(column >= 0)
        rows[there] += all_codes[column[there]]
    return rows
