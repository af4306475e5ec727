"""Plain helpers over llama_cpp's ctypes API: load a model, make a context, decode token ids, capture graph tensors.

Example:
    with load_model(path) as model, make_context(model, cb=Capture("ffn_moe_topk")) as ctx:
        logits = decode(ctx, [5, 6, 7])                  # float32 [3, n_vocab]
        experts = ctx.capture.tensors["ffn_moe_topk-0"]  # one array per execution, here int32 [3, n_used]
"""

from __future__ import annotations

import ctypes
import os
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import llama_cpp
import numpy as np

Array = np.ndarray[Any, Any]

# llama_load_mode and llama_flash_attn_type (include/llama.h)
LOAD_NONE, LOAD_MMAP = 0, 1
FLASH_ATTN_AUTO, FLASH_ATTN_OFF, FLASH_ATTN_ON = -1, 0, 1
# Context parameters under which upstream's CPU results depend least on the batch split: about 5e-6 in the logits of the
# tiny F32 models, where flash attention (on by default, with K and V cast to F16) gives 2e-3. GELU stays at 1e-3, since
# ggml-cpu looks it up in an F16 table.
EXACT: dict[str, Any] = {"type_k": 0, "type_v": 0, "flash_attn_type": FLASH_ATTN_OFF}
# the scores that build_moe_ffn selects by, the last one it made first
SELECTION_SCORES = ("ffn_moe_probs_masked", "ffn_moe_probs_biased", "ffn_moe_probs")
# ggml_log_level (ggml.h); llama_cpp/_logger.py still maps the older numbers, one lower for each
LOG_DEBUG, LOG_INFO, LOG_WARN, LOG_ERROR = 1, 2, 3, 4
NUMPY_TYPES: dict[int, Any] = {0: np.float32, 1: np.float16, 24: np.int8, 25: np.int16, 26: np.int32, 27: np.int64}

_lib_dir = Path(llama_cpp.__file__).parent / "lib"
_ggml_base = ctypes.CDLL(str(next(p for p in sorted(_lib_dir.glob("*ggml-base*")))))
_ggml_base.ggml_nbytes.restype = ctypes.c_size_t
_ggml_base.ggml_nbytes.argtypes = [ctypes.c_void_p]
_ggml_base.ggml_backend_tensor_get.restype = None
_ggml_base.ggml_backend_tensor_get.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]

# llama.cpp's log of this process, newest last: tests read it instead of stderr
log_lines: deque[tuple[int, str]] = deque(maxlen=2000)


def _keep_log(level: int, text: bytes, user_data: object) -> None:
    log_lines.append((level, text.decode("utf-8", "replace").rstrip("\n")))


_log_callback = llama_cpp.llama_log_callback(_keep_log)


def keep_log() -> None:
    """llama.cpp's log goes to log_lines from now on."""
    llama_cpp.llama_log_set(_log_callback, ctypes.c_void_p(0))


keep_log()


def errors(n: int = 5) -> str:
    """The last error lines of the log, for messages."""
    return "\n".join([text for level, text in log_lines if level == LOG_ERROR][-n:])


class GgmlTensor(ctypes.Structure):
    """struct ggml_tensor (ggml/include/ggml.h 685), as far as tests need it."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
        ("op", ctypes.c_int),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * 10),
        ("view_src", ctypes.c_void_p),
        ("view_offs", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
        ("name", ctypes.c_char * 64),
        ("extra", ctypes.c_void_p),
    )


def read_tensor(tensor: int) -> Array:
    """A copy of a tensor on any backend, read by its strides (ffn_moe_topk is a view of the whole argsort).

    Shape: ne reversed, without the leading ones (at least one dimension)."""
    t = GgmlTensor.from_address(tensor)
    if t.type not in NUMPY_TYPES:
        raise TypeError(f"{t.name.decode()}: ggml type {t.type} has no numpy type")
    raw = np.empty(_ggml_base.ggml_nbytes(tensor), np.uint8)
    _ggml_base.ggml_backend_tensor_get(tensor, raw.ctypes.data, 0, raw.nbytes)
    shape, strides = tuple(t.ne)[::-1], tuple(t.nb)[::-1]
    array: Array = np.ndarray(shape, NUMPY_TYPES[t.type], raw, 0, strides).copy()
    while array.ndim > 1 and array.shape[0] == 1:
        array = array[0]
    return array


class Capture:
    """Collects the tensors named in `names`, in order of execution. "ffn_moe_topk" takes ffn_moe_topk-0, -1, …, but not
    what is derived from them ("ffn_moe_topk-0 (copy)")."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.tensors: dict[str, list[Array]] = defaultdict(list)
        self.failure: Exception | None = None  # an exception must not cross the C frames

    def __call__(self, tensor: int, ask: bool, user_data: object = None) -> bool:
        name = GgmlTensor.from_address(tensor).name.decode()
        base, _, layer = name.rpartition("-")
        wanted = name in self.names or (layer.isdigit() and base in self.names)
        if wanted and not ask:
            try:
                self.tensors[name].append(read_tensor(tensor))
            except Exception as e:
                self.failure = e
        return wanted if ask else True

    def clear(self) -> None:
        self.tensors.clear()


class Model:
    """A loaded model; `ptr` is its llama_model pointer."""

    def __init__(self, ptr: Any, path: Path, keep: tuple[Any, ...]) -> None:
        self.ptr, self.path, self._keep = ptr, path, keep
        self.n_vocab = int(llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(ptr)))
        self.n_layer = int(llama_cpp.llama_model_n_layer(ptr))
        self.n_embd = int(llama_cpp.llama_model_n_embd(ptr))

    def close(self) -> None:
        if self.ptr:
            llama_cpp.llama_model_free(self.ptr)
            self.ptr = None

    def __enter__(self) -> Model:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class Context:
    """A context; `ptr` is its llama_context pointer, `capture` the object given as `cb`."""

    def __init__(self, ptr: Any, model: Model, capture: Any, keep: tuple[Any, ...]) -> None:
        self.ptr, self.model, self.capture, self._keep = ptr, model, capture, keep
        self.memory = llama_cpp.llama_get_memory(ptr)

    def clear(self) -> None:
        """Forgets all tokens."""
        llama_cpp.llama_memory_clear(self.memory, True)

    def rollback(self, n_past: int, seq: int = 0) -> bool:
        """Forgets the positions from n_past on; False when this cache cannot."""
        return bool(llama_cpp.llama_memory_seq_rm(self.memory, seq, n_past, -1))

    def close(self) -> None:
        if self.ptr:
            llama_cpp.llama_free(self.ptr)
            self.ptr = None

    def __enter__(self) -> Context:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class _BuftOverride(ctypes.Structure):
    _fields_ = (("pattern", ctypes.c_char_p), ("buft", ctypes.c_void_p))


def _set_fields(params: Any, values: dict[str, Any]) -> None:
    known = {field[0] for field in params._fields_}
    for key, value in values.items():
        if key not in known:  # ctypes would take a misspelled field without a word
            raise TypeError(f"{type(params).__name__} has no field {key!r}")
        setattr(params, key, value)


def load_model(
    path: str | os.PathLike[str], overrides: Sequence[tuple[str, int]] | None = None, **params: Any
) -> Model:
    """Loads a model with no layer on a device; RuntimeError with the logged reason when it fails.

    overrides: pairs of tensor name regex and buffer type pointer; params: any field of llama_model_params. Repacked CPU
    weights are off unless asked for (use_extra_bufts=True): they change the layout of the expert tensors, and results
    (logits of Q4_K by up to 5e-2)."""
    p = llama_cpp.llama_model_default_params()
    _set_fields(p, {"n_gpu_layers": 0, "use_extra_bufts": False} | params)
    table = None
    if overrides:
        rows = [_BuftOverride(pattern.encode(), buft) for pattern, buft in overrides]
        table = (_BuftOverride * (len(rows) + 1))(*rows, _BuftOverride(None, None))
        p.tensor_buft_overrides = ctypes.cast(table, ctypes.c_void_p)
    ptr = llama_cpp.llama_model_load_from_file(os.fsencode(path), p)
    if not ptr:
        raise RuntimeError(f"{path}: {errors()}")
    return Model(ptr, Path(path), (table, params))


def make_context(
    model: Model,
    n_ctx: int = 256,
    n_threads: int = 2,
    cb: Callable[[int, bool, Any], bool] | None = None,
    **params: Any,
) -> Context:
    """A context; `cb(tensor, ask, user_data)` is the scheduler's eval callback (see Capture); `params`: any field of
    llama_context_params, such as n_ubatch, type_k, flash_attn_type. Batches of more than one token run with
    n_threads_batch (llama-context.cpp 1464), so it is set to n_threads too."""
    p = llama_cpp.llama_context_default_params()
    _set_fields(p, {"n_ctx": n_ctx, "n_threads": n_threads, "n_threads_batch": n_threads, "no_perf": True} | params)
    eval_callback = llama_cpp.ggml_backend_sched_eval_callback(cb) if cb else None
    if eval_callback:
        p.cb_eval = eval_callback
    ptr = llama_cpp.llama_init_from_model(model.ptr, p)
    if not ptr:
        raise RuntimeError(f"no context for {model.path}: {errors()}")
    return Context(ptr, model, cb, (eval_callback, params))


def decode(ctx: Context, tokens: Sequence[int], pos0: int = 0, seq: int = 0, outputs: str = "all") -> Array:
    """Decodes token ids as one batch at positions pos0, pos0 + 1, … and returns a copy of their logits, float32
    [n_tokens, n_vocab]; outputs="last": [1, n_vocab]. RuntimeError when llama_decode fails."""
    n = len(tokens)
    batch = llama_cpp.llama_batch_init(n, 0, 1)
    try:
        batch.n_tokens = n
        for i, token in enumerate(tokens):
            batch.token[i] = int(token)
            batch.pos[i] = pos0 + i
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = seq
            batch.logits[i] = outputs == "all" or i == n - 1
        code = llama_cpp.llama_decode(ctx.ptr, batch)
    finally:
        llama_cpp.llama_batch_free(batch)
    if code != 0:
        raise RuntimeError(f"llama_decode returned {code}: {errors()}")
    if isinstance(ctx.capture, Capture) and ctx.capture.failure:
        raise ctx.capture.failure
    n_out = n if outputs == "all" else 1
    logits = llama_cpp.llama_get_logits(ctx.ptr)
    result: Array = np.ctypeslib.as_array(logits, shape=(n_out, ctx.model.n_vocab)).copy()
    return result


def decode_split(ctx: Context, tokens: Sequence[int], widths: Sequence[int], pos0: int = 0) -> Array:
    """Decodes the tokens in batches of the given widths, one after the other; logits of all of them."""
    assert sum(widths) == len(tokens), (widths, len(tokens))
    parts, at = [], 0
    for width in widths:
        parts.append(decode(ctx, tokens[at : at + width], pos0 + at))
        at += width
    return np.concatenate(parts)


def selection_gaps(tensors: dict[str, list[Array]], il: int, n_used: int, groups: tuple[int, int] = (1, 1)) -> Array:
    """How far each token of layer `il` was from choosing another expert: score of the last expert chosen minus that of
    the first one left out, float32 [n_tokens] (or the same for expert groups, given as (n_group, n_group_used), where
    that is closer). Needs SELECTION_SCORES captured; reads the first block of the first decode since Capture.clear().

    Where the gap is within rounding noise, two correct executions may choose differently, and the logits of that token
    then differ by O(1): leave such tokens out of a comparison."""
    scores = next(tensors[key][0] for name in SELECTION_SCORES if (key := f"{name}-{il}") in tensors)
    scores = scores.reshape(-1, scores.shape[-1])  # a single token has no dimension of its own
    ordered = -np.sort(-scores, axis=1)
    gaps: Array = ordered[:, n_used - 1] - ordered[:, n_used]
    n_group, n_group_used = groups
    if n_group > 1:
        biased = tensors[f"ffn_moe_probs_biased-{il}"][0].reshape(len(scores), n_group, -1)
        totals = -np.sort(-np.sort(biased, axis=2)[:, :, -2:].sum(axis=2), axis=1)
        gaps = np.minimum(gaps, totals[:, n_group_used - 1] - totals[:, n_group_used])
    return gaps
