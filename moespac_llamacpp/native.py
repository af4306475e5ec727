"""The seam to llama.cpp: ctypes over llama-moe.h (patches/overlay) and the few ggml calls that it needs.

Everything that includes llama.cpp's memory or pointers stays in this file; the classes above it see Python values and numpy
arrays. ggml's functions are taken from the handle of llama_cpp's own libllama: loading libggml by its file name would map a
second copy with a registry of its own (llama_cpp/lib holds copies, not links).
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import llama_cpp
import numpy as np
from numpy.typing import NDArray

_lib = llama_cpp.llama_cpp._lib

COLD, UPLOADING, RESIDENT = 0, 1, 2  # enum llama_moe_expert_state

#: Experts of a row that may cross the link during a decode, at most (GGML_MOE_STREAM_MAX_STREAMED).
MAX_STREAMED = 8
MAX_PROMPT_SHARE = 16

#: Experts of a row that the look-ahead may bring (GGML_MOE_STREAM_MAX_AHEAD).
MAX_AHEAD = 8

#: Tokens of the widest batch that is computed in-stream (moe_stream::MAX_TOKENS), and in either execution unless told otherwise.
MAX_BATCH_TOKENS = 32

#: enum llama_moe_execution by name
EXECUTIONS = {"auto": 0, "portable": 1, "in-stream": 2}

# enum llama_moe_status
STATUS = {
    0: "OK",
    -1: "INVALID_ARGUMENT",
    -2: "NOT_ATTACHED",
    -3: "ALREADY_ATTACHED",
    -4: "NO_MOE_LAYERS",
    -5: "NO_DEVICE",
    -6: "NO_DEVICE_MEMORY",
    -7: "OUT_OF_RANGE",
    -8: "UNSUPPORTED",
    -9: "ALREADY_RESIDENT",
    -10: "NO_FREE_SLOT",
    -11: "NOT_RESIDENT",
    -12: "IN_FLIGHT",
    -13: "FAILED",
}


class MoeError(RuntimeError):
    """An error of the native layer: `status` is its name in enum llama_moe_status, the text its sentence."""

    def __init__(self, status: int | str, message: str) -> None:
        super().__init__(message)
        self.status = status if isinstance(status, str) else STATUS.get(status, str(status))


class Tensor(ctypes.Structure):
    """struct ggml_tensor (ggml.h of the pinned llama-cpp-python), for those who watch graphs through an eval callback."""

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


class _Params(ctypes.Structure):
    _fields_ = (
        ("device", ctypes.c_void_p),
        ("execution", ctypes.c_int32),
        ("pool_threads", ctypes.c_int32),
        ("timeout_ms", ctypes.c_int32),
        ("max_batch_tokens", ctypes.c_int32),
        ("stream_experts", ctypes.c_int32),
        ("look_ahead", ctypes.c_int32),
        ("own_kernels", ctypes.c_bool),
        ("cache_graphs", ctypes.c_bool),
        ("perf", ctypes.c_bool),
        ("whole_layers", ctypes.c_bool),
        ("prompt_lane", ctypes.c_bool),
        ("prompt_share", ctypes.c_int32),
    )


class _RowInfo(ctypes.Structure):
    _fields_ = (
        ("il", ctypes.c_int32),
        ("n_expert", ctypes.c_int32),
        ("n_expert_used", ctypes.c_int32),
        ("n_slots", ctypes.c_int32),
        ("expert_bytes", ctypes.c_int64),
        ("hybrid", ctypes.c_bool),
        ("in_stream", ctypes.c_bool),
        ("whole", ctypes.c_bool),
        ("streams", ctypes.c_bool),
        ("two_passes", ctypes.c_bool),
        ("pinned", ctypes.c_bool),
        ("fallback", ctypes.c_char_p),
        ("portable", ctypes.c_char_p),
        ("kernel", ctypes.c_char_p),
    )


class _PerfData(ctypes.Structure):
    _fields_ = (
        ("n_calls", ctypes.c_int64),
        ("n_tokens", ctypes.c_int64),
        ("n_hot_pairs", ctypes.c_int64),
        ("n_cold_pairs", ctypes.c_int64),
        ("n_hot_experts", ctypes.c_int64),
        ("n_cold_experts", ctypes.c_int64),
        ("n_loads", ctypes.c_int64),
        ("n_load_bytes", ctypes.c_int64),
        ("n_streamed_experts", ctypes.c_int64),
        ("n_ahead_experts", ctypes.c_int64),
        ("n_ahead_right", ctypes.c_int64),
        ("n_streamed_pairs", ctypes.c_int64),
        ("us_plan", ctypes.c_double),
        ("us_launch", ctypes.c_double),
        ("us_cold", ctypes.c_double),
        ("us_wait", ctypes.c_double),
        ("us_total", ctypes.c_double),
        ("us_stream", ctypes.c_double),
        ("us_hot", ctypes.c_double),
        ("us_rest", ctypes.c_double),
    )


class _Search(ctypes.Structure):
    _fields_ = (
        ("gap", ctypes.c_float),
        ("near", ctypes.c_float),
        ("edge", ctypes.c_float),
        ("n_near", ctypes.c_int32),
        ("best", ctypes.c_int32),
    )


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


_ROUTER_CALLBACK = ctypes.CFUNCTYPE(
    None,
    ctypes.c_void_p,
    ctypes.c_int32,
    ctypes.c_int32,
    ctypes.c_int32,
    ctypes.POINTER(ctypes.c_int32),
    ctypes.POINTER(ctypes.c_float),
)

_void_p, _int32, _int64, _size_t, _char_p = (
    ctypes.c_void_p,
    ctypes.c_int32,
    ctypes.c_int64,
    ctypes.c_size_t,
    ctypes.c_char_p,
)

# name: (result, arguments)
_PROTOTYPES: dict[str, tuple[Any, list[Any]]] = {
    "llama_moe_default_params": (_Params, []),
    "llama_moe_attach": (_int32, [_void_p, _Params]),
    "llama_moe_detach": (_int32, [_void_p]),
    "llama_moe_keep_graphs": (_int32, [_void_p, _int32]),
    "llama_moe_error": (_char_p, []),
    "llama_moe_n_rows": (_int32, [_void_p]),
    "llama_moe_n_expert": (_int32, [_void_p]),
    "llama_moe_row": (_int32, [_void_p, _int32, ctypes.POINTER(_RowInfo)]),
    "llama_moe_set_slots": (_int32, [_void_p, ctypes.POINTER(_int32)]),
    "llama_moe_set_execution": (_int32, [_void_p, _int32]),
    "llama_moe_failure": (_char_p, [_void_p]),
    "llama_moe_inject_pool_fault": (_int32, [_void_p, _int32, _int32]),
    "llama_moe_pool_threads": (_int32, [_void_p]),
    "llama_moe_set_streaming": (_int32, [_void_p, _int32, ctypes.c_bool]),
    "llama_moe_set_look_ahead": (_int32, [_void_p, _int32, ctypes.c_float]),
    "llama_moe_set_values": (_int32, [_void_p, ctypes.POINTER(ctypes.c_float)]),
    "llama_moe_device_bytes": (_int64, [_void_p]),
    "llama_moe_prompt_memory": (_int64, [_void_p]),
    "llama_moe_load": (_int32, [_void_p, _int32, _int32]),
    "llama_moe_evict": (_int32, [_void_p, _int32, _int32]),
    "llama_moe_load_many": (_int32, [_void_p, _int32, *[ctypes.POINTER(_int32)] * 3]),
    "llama_moe_evict_many": (_int32, [_void_p, _int32, *[ctypes.POINTER(_int32)] * 3]),
    "llama_moe_publish": (_int32, [_void_p]),
    "llama_moe_sync": (_int32, [_void_p]),
    "llama_moe_residency": (_int32, [_void_p, _int32, ctypes.POINTER(ctypes.c_uint8)]),
    "llama_moe_residency_table": (_int32, [_void_p, ctypes.POINTER(ctypes.c_uint8)]),
    "llama_moe_counts": (ctypes.POINTER(_int32), [_void_p]),
    "llama_moe_set_router_callback": (_int32, [_void_p, _ROUTER_CALLBACK, _void_p]),
    "llama_moe_choices": (_void_p, [_void_p, _int32, ctypes.POINTER(_int32), ctypes.POINTER(_int32)]),
    "llama_moe_perf": (_int32, [_void_p, _int32, ctypes.POINTER(_PerfData)]),
    "llama_moe_perf_reset": (_int32, [_void_p, ctypes.c_bool]),
    "llama_moe_graph_stats": (None, [_void_p, ctypes.POINTER(_int64), ctypes.POINTER(_int64)]),
    "llama_moe_prompt_bytes": (None, [_void_p, *[ctypes.POINTER(_int64)] * 4]),
    "llama_moe_host_bytes": (None, [_void_p, ctypes.POINTER(_int64), ctypes.POINTER(_int64)]),
    "llama_moe_likeliest": (_int32, [_void_p, _int32, _int32, ctypes.POINTER(_Search), _void_p, _int32]),
    "llama_moe_kernel_isa": (_char_p, []),
    "llama_moe_set_kernel_limit": (_int32, [_int32]),
    "ggml_backend_load_all": (None, []),
    "ggml_backend_dev_count": (_size_t, []),
    "ggml_backend_dev_get": (_void_p, [_size_t]),
    "ggml_backend_dev_name": (_char_p, [_void_p]),
    "ggml_backend_dev_description": (_char_p, [_void_p]),
    "ggml_backend_dev_type": (ctypes.c_int, [_void_p]),
    "ggml_backend_dev_memory": (None, [_void_p, ctypes.POINTER(_size_t), ctypes.POINTER(_size_t)]),
    "ggml_backend_dev_buffer_type": (_void_p, [_void_p]),
    "ggml_backend_dev_host_buffer_type": (_void_p, [_void_p]),
    "ggml_backend_dev_backend_reg": (_void_p, [_void_p]),
    "ggml_backend_reg_get_proc_address": (_void_p, [_void_p, _char_p]),
    "ggml_backend_buft_name": (_char_p, [_void_p]),
    "ggml_backend_buft_alloc_buffer": (_void_p, [_void_p, _size_t]),
    "ggml_backend_buffer_get_base": (_void_p, [_void_p]),
    "ggml_backend_buffer_free": (None, [_void_p]),
    "ggml_backend_tensor_alloc": (ctypes.c_int, [_void_p, _void_p, _void_p]),
    "ggml_backend_tensor_set": (None, [_void_p, _void_p, _size_t, _size_t]),
    "ggml_backend_tensor_copy": (None, [_void_p, _void_p]),
    "ggml_set_abort_callback": (_void_p, [_void_p]),
    "ggml_init": (_void_p, [_InitParams]),
    "ggml_free": (None, [_void_p]),
    "ggml_new_tensor_1d": (_void_p, [_void_p, ctypes.c_int, _int64]),
    "ggml_tensor_overhead": (_size_t, []),
}


def _bind(name: str) -> Any:
    function = getattr(_lib, name)
    function.restype, function.argtypes = _PROTOTYPES[name]
    return function


_f = {name: _bind(name) for name in _PROTOTYPES}


def _check(status: int) -> int:
    if status < 0:
        raise MoeError(status, _f["llama_moe_error"]().decode())
    return status


# ----------------------------------------------------------------------------------------------------------------------------
# devices


@dataclass(frozen=True)
class Device:
    """A ggml device. `pointer` is its ggml_backend_dev_t; `kind` one of cpu, gpu, igpu, accel."""

    pointer: int
    name: str
    description: str
    kind: str

    @property
    def memory(self) -> tuple[int, int]:
        """(free, total) bytes."""
        free, total = _size_t(), _size_t()
        _f["ggml_backend_dev_memory"](self.pointer, ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    @property
    def host_buffer_type(self) -> int | None:
        """Buffer type of page-locked host memory for this device, None if it has none."""
        return _f["ggml_backend_dev_host_buffer_type"](self.pointer) or None

    @property
    def in_stream(self) -> bool:
        """Does its backend have the operations of the in-stream execution? (The CPU only emulates them.)"""
        registry = _f["ggml_backend_dev_backend_reg"](self.pointer)
        return bool(registry and _f["ggml_backend_reg_get_proc_address"](registry, b"ggml_moe_stream"))

    @property
    def buffer_type(self) -> int:
        return int(_f["ggml_backend_dev_buffer_type"](self.pointer))

    @property
    def buffer_name(self) -> str:
        """How llama.cpp's log names the device's memory."""
        return str(_f["ggml_backend_buft_name"](self.buffer_type).decode())


_KINDS = {0: "cpu", 1: "gpu", 2: "igpu", 3: "accel"}  # enum ggml_backend_dev_type


def device_at(pointer: int) -> Device:
    """The device behind a ggml_backend_dev_t, registered with ggml or not."""
    return Device(
        pointer=pointer,
        name=_f["ggml_backend_dev_name"](pointer).decode(),
        description=_f["ggml_backend_dev_description"](pointer).decode(),
        kind=_KINDS.get(_f["ggml_backend_dev_type"](pointer), "other"),
    )


def devices() -> list[Device]:
    """All devices that ggml has registered, in its order."""
    llama_cpp.llama_backend_init()
    return [device_at(_f["ggml_backend_dev_get"](i)) for i in range(_f["ggml_backend_dev_count"]())]


def default_device() -> Device:
    """Where slots live unless told otherwise: the first GPU, else a second instance of the CPU backend."""
    found = devices()
    for kind in ("gpu", "igpu", "cpu"):
        for device in found:
            if device.kind == kind:
                return device
    raise MoeError(-5, "ggml has no device")


def cpu_device() -> Device:
    return next(d for d in devices() if d.kind == "cpu")


_ABORT_CALLBACK = ctypes.CFUNCTYPE(None, _char_p)
_on_abort: list[Any] = []  # ggml holds it until the end


def on_abort(tell: Callable[[str], None]) -> None:
    """Calls `tell` with ggml's reason (place in its source: message) before it aborts, as it does when a device fails."""
    _on_abort.append(_ABORT_CALLBACK(lambda message: tell(message.decode("utf-8", "replace"))))
    _f["ggml_set_abort_callback"](ctypes.cast(_on_abort[-1], _void_p))


_TYPE_I8 = 24  # enum ggml_type
MAX_VIEWS = 64  # of native memory that are kept: one for each batch width in use


class Bytes:
    """Bytes of a device twice, and as many of host memory, to copy between them. Host memory: page-locked if that is to be had.

    MemoryError: one of the three cannot be allocated. Close it before the device goes."""

    def __init__(self, device: Device, n_bytes: int, *, pinned: bool = True) -> None:
        self.n_bytes = n_bytes
        self._buffers: list[int] = []
        self._context: int | None = _f["ggml_init"](_InitParams(4 * _f["ggml_tensor_overhead"](), None, True))
        try:
            host = device.host_buffer_type if pinned else None
            self._host = self._base(host or cpu_device().buffer_type)
            self._tensors = [self._tensor(device.buffer_type) for _ in range(2)]
        except MemoryError:
            self.close()
            raise

    def _base(self, buffer_type: int) -> int:
        buffer = _f["ggml_backend_buft_alloc_buffer"](buffer_type, self.n_bytes)
        if not buffer:
            raise MemoryError(f"{self.n_bytes} bytes cannot be allocated")
        self._buffers.append(buffer)
        base = int(_f["ggml_backend_buffer_get_base"](buffer))
        return base

    def _tensor(self, buffer_type: int) -> int:
        base = self._base(buffer_type)
        tensor = int(_f["ggml_new_tensor_1d"](self._context, _TYPE_I8, self.n_bytes))
        _f["ggml_backend_tensor_alloc"](self._buffers[-1], tensor, base)
        return tensor

    def upload(self) -> None:
        """Host to device; returns when it has arrived."""
        _f["ggml_backend_tensor_set"](self._tensors[0], self._host, 0, self.n_bytes)

    def copy(self) -> None:
        """Within the device: reads and writes n_bytes."""
        _f["ggml_backend_tensor_copy"](self._tensors[0], self._tensors[1])

    def close(self) -> None:
        while self._buffers:
            _f["ggml_backend_buffer_free"](self._buffers.pop())
        if self._context:
            _f["ggml_free"](self._context)
            self._context = None


def kernel_isa() -> str:
    """The instruction set of our cold kernels on this machine: avx512-vnni, avx2 or none."""
    return str(_f["llama_moe_kernel_isa"]().decode())


def set_kernel_limit(level: int) -> int:
    """Caps it for contexts attached from now on: 0 none, 1 avx2, 2 avx512-vnni; returns the level in force."""
    return int(_f["llama_moe_set_kernel_limit"](level))


def keep_graphs(ctx: Any, max_tokens: int) -> None:
    """A llama_context to which no Experts are attached keeps a graph for each batch width up to max_tokens; 0: no longer.

    MoeError: Experts are attached, or another number than 0 to 512."""
    _check(_f["llama_moe_keep_graphs"](ctypes.cast(ctx, _void_p), max_tokens))


class Likeliest:
    """Finds the best tokens of a large vocabulary, with one look at its logits (llama_moe_likeliest).

    out: room for as many candidates as there are tokens, of llama_token_data's layout, C-contiguous; it is written to.
    near: this far below the largest logit a token is near it.
    After a search, edge: what all that were found reach; best: the likeliest; alone: no other of those found is near it."""

    def __init__(self, out: NDArray[Any], near: float = 0.0) -> None:
        self._out, self._n_out, self.address = out, len(out), int(out.ctypes.data)
        self._search = _Search(gap=np.inf, near=near)
        self._pointer = ctypes.byref(self._search)

    def find(self, logits: NDArray[np.float32], n: int) -> int:
        """How many candidates were written: at least n, ascending by id, all that reach the edge.

        0 where there is no cheap edge, or the logits are not float32 one after the other."""
        if logits.dtype != np.float32 or not logits.flags.c_contiguous:
            return 0
        at = logits.__array_interface__["data"][0]
        return int(_f["llama_moe_likeliest"](at, len(logits), n, self._pointer, self.address, self._n_out))

    @property
    def edge(self) -> float:
        return float(self._search.edge)

    @property
    def best(self) -> int:
        return int(self._search.best)

    @property
    def alone(self) -> bool:
        return bool(self._search.n_near == 1)


# ----------------------------------------------------------------------------------------------------------------------------
# residency


@dataclass(frozen=True)
class Row:
    """One MoE block (llama_moe_row_info): the row of a layer's first block is its index, second blocks come after all layers.

    `whole`: all experts are resident, and it takes llama.cpp's own path with the slots as weights. `fallback` says why the block
    takes that path with the weights on the host, "" if it runs hybrid; `portable` why a hybrid block is not computed
    in-stream, "" if it is; `streams`: its experts can cross the link during a decode (Experts.set_streaming);
    `two_passes`: and, for batches as wide as the last one, also into slots that the batch uses, when it has used them."""

    row: int
    il: int
    n_expert: int
    n_expert_used: int
    n_slots: int
    expert_bytes: int
    hybrid: bool
    in_stream: bool
    whole: bool
    streams: bool
    two_passes: bool
    pinned: bool
    fallback: str
    portable: str
    kernel: str


@dataclass(frozen=True)
class Perf:
    """Sums since the last reset (llama_moe_perf_data, which says what each time is in either execution). Times in µs, 0 unless
    they are taken."""

    n_calls: int = 0
    n_tokens: int = 0
    n_hot_pairs: int = 0
    n_cold_pairs: int = 0
    n_hot_experts: int = 0
    n_cold_experts: int = 0
    n_loads: int = 0
    n_load_bytes: int = 0
    n_streamed_experts: int = 0
    n_ahead_experts: int = 0
    n_ahead_right: int = 0
    n_streamed_pairs: int = 0
    us_plan: float = 0.0
    us_launch: float = 0.0
    us_cold: float = 0.0
    us_wait: float = 0.0
    us_total: float = 0.0
    us_stream: float = 0.0
    us_hot: float = 0.0
    us_rest: float = 0.0

    def __add__(self, other: Perf) -> Perf:
        return Perf(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))

    @property
    def hit_rate(self) -> float:
        """Share of the (token, expert) pairs that were computed on the device, 0 … 1."""
        return self.n_hot_pairs / max(1, self.n_hot_pairs + self.n_cold_pairs)


def check_execution(name: str) -> int:
    """The number of an execution. ValueError: there is none of this name."""
    if name not in EXECUTIONS:
        raise ValueError(f"there is no execution {name!r} (there are {', '.join(EXECUTIONS)})")
    return EXECUTIONS[name]


class Places:
    """A list of experts for Experts.load_many and evict_many, as the library takes it; one thread's at a time.

    refused: what the last call did not do, a name in enum llama_moe_status by position."""

    def __init__(self, places: Sequence[tuple[int, int]]) -> None:
        """places: (row, expert)."""
        self.n = len(places)
        self.refused: dict[int, str] = {}
        kind = _int32 * self.n
        self._rows, self._experts = kind(*[row for row, _ in places]), kind(*[expert for _, expert in places])
        self._status = kind()

    def __getitem__(self, i: int) -> tuple[int, int]:
        return self._rows[i], self._experts[i]

    def give(self, function: Any, ctx: Any) -> int:
        """How many were done. MoeError: none was tried."""
        n_done = _check(function(ctx, self.n, self._rows, self._experts, self._status))
        self.refused = {}
        if n_done < self.n:
            self.refused = {i: STATUS.get(s, str(s)) for i, s in enumerate(self._status) if s}
        return n_done


#: By context: native code holds them until they are unset, whatever happens to the Experts object.
_callbacks: dict[int | None, Any] = {}

RouterCallback = Callable[[int, NDArray[np.int32], NDArray[np.float32]], None]


class Experts:
    """Per-expert residency of one llama_context, attached on construction.

    ctx: the llama_context pointer of llama_cpp. It belongs to one thread at a time; between a decode and its synchronisation
    (reading logits synchronises) evict, publish, set_slots and set_execution raise MoeError IN_FLIGHT.
    execution: a name of EXECUTIONS; "auto" is in-stream on devices that have it (CUDA), else portable.
    pool_threads: in-stream, how many threads compute the cold experts; 0: the context's n_threads, less the cores that must stay
    free. timeout_ms: in-stream, a layer's CPU part that takes longer has failed (see `failure`).
    whole_layers: a row whose experts are all resident takes llama.cpp's own path, with the slots as its weights.
    stream_experts: see `set_streaming`. look_ahead: see `set_look_ahead`.
    prompt_lane: in-stream, batches over max_batch_tokens take what is resident from the slots, and the rest over the link
    meanwhile, at the price of device memory; else llama.cpp's own path copies all that they use. prompt_share: that memory is
    1/prompt_share of the experts of the largest layer, 1 to 16; 0: chosen.
    """

    def __init__(
        self,
        ctx: Any,
        device: Device | None = None,
        *,
        execution: str = "auto",
        pool_threads: int = 0,
        timeout_ms: int = 10_000,
        max_batch_tokens: int = MAX_BATCH_TOKENS,
        stream_experts: int = 0,
        look_ahead: int = 0,
        own_kernels: bool = True,
        cache_graphs: bool = True,
        perf: bool = False,
        whole_layers: bool = True,
        prompt_lane: bool = True,
        prompt_share: int = 0,
    ) -> None:
        params = _f["llama_moe_default_params"]()
        params.device = device.pointer if device else None
        params.execution = check_execution(execution)
        params.pool_threads = pool_threads
        params.timeout_ms = timeout_ms
        params.max_batch_tokens = max_batch_tokens
        params.stream_experts = stream_experts
        params.look_ahead = look_ahead
        params.own_kernels = own_kernels
        params.cache_graphs = cache_graphs
        params.perf = perf
        params.whole_layers = whole_layers
        params.prompt_lane = prompt_lane
        params.prompt_share = prompt_share
        self._ctx = ctypes.cast(ctx, _void_p)
        self._callback_error: BaseException | None = None
        self._takes_times = perf
        self.n_perf_resets = 0  # whoever takes differences of counters has to know
        _check(_f["llama_moe_attach"](self._ctx, params))
        self.n_rows = int(_f["llama_moe_n_rows"](self._ctx))
        self.n_expert = int(_f["llama_moe_n_expert"](self._ctx))
        self._states = ctypes.c_uint8 * (self.n_rows * self.n_expert)
        self._values: NDArray[np.float32] | None = None  # [n_rows, n_expert], as last set
        self._values_lock = threading.Lock()  # another thread may set them while the execution changes
        self._views: dict[tuple[int, int, int], NDArray[np.int32]] = {}
        self._n_tokens, self._n_used = _int32(), _int32()
        self._sizes = ctypes.byref(self._n_tokens), ctypes.byref(self._n_used)

    def detach(self) -> None:
        """Frees the slots; the context is plain llama.cpp again. A no-op when detached. Call it before the context is freed."""
        _check(_f["llama_moe_detach"](self._ctx))
        _callbacks.pop(self._ctx.value, None)

    def row(self, row: int) -> Row:
        info = _RowInfo()
        _check(_f["llama_moe_row"](self._ctx, row, ctypes.byref(info)))
        return Row(
            row=row,
            il=info.il,
            n_expert=info.n_expert,
            n_expert_used=info.n_expert_used,
            n_slots=info.n_slots,
            expert_bytes=info.expert_bytes,
            hybrid=info.hybrid,
            in_stream=info.in_stream,
            whole=info.whole,
            streams=info.streams,
            two_passes=info.two_passes,
            pinned=info.pinned,
            fallback=(info.fallback or b"").decode(),
            portable=(info.portable or b"").decode(),
            kernel=(info.kernel or b"").decode(),
        )

    def rows(self) -> list[Row]:
        """All rows that have experts."""
        return [r for r in map(self.row, range(self.n_rows)) if r.il >= 0 or r.n_expert > 0]

    def set_slots(self, n_slots: Sequence[int] | NDArray[Any]) -> None:
        """n_slots[n_rows]: slots of each row; 0 for rows without experts and for those on llama.cpp's path.

        Residents in slots that remain stay. MoeError NO_DEVICE_MEMORY: the rows that fitted have their slots."""
        wanted = np.ascontiguousarray(n_slots, dtype=np.int32)
        if wanted.shape != (self.n_rows,):
            raise ValueError(f"n_slots has shape {wanted.shape}, it must be ({self.n_rows},)")
        _check(_f["llama_moe_set_slots"](self._ctx, wanted.ctypes.data_as(ctypes.POINTER(_int32))))

    def set_execution(self, execution: str) -> None:
        """Changes how hybrid layers are executed, between two decodes; graphs are built anew, all that was set is kept.

        MoeError UNSUPPORTED: "in-stream" was asked for, and no layer can."""
        with self._values_lock:
            _check(_f["llama_moe_set_execution"](self._ctx, check_execution(execution)))
            self._give_values()  # the library keeps them in what the in-stream execution is made of

    def set_streaming(self, max_experts: int, *, always: bool = False) -> None:
        """In-stream: during a decode up to max_experts (0 to MAX_STREAMED) cold experts of a row cross the link into slots whose
        residents the batch does not use, and stay there. How many pays follows from measured rates; `always`: it is not asked.
        Not while a decode is in flight. MoeError INVALID_ARGUMENT: another number."""
        _check(_f["llama_moe_set_streaming"](self._ctx, max_experts, always))

    def set_look_ahead(self, max_experts: int, *, wrong: float = 0.0) -> None:
        """In-stream: while a row is computed, up to max_experts (0 to MAX_AHEAD) experts cross the link that the next row is
        going to choose as far as its own router says, given this row's input (a stale gate). As many as arrive in time, by
        measured rates; none while too many guesses are wrong. They take the same slots as streamed ones.
        wrong: this share of the guesses is replaced by random ones, for measurements with models that are easier to foresee than
        real ones. Not while a decode is in flight. MoeError INVALID_ARGUMENT: another number or share."""
        _check(_f["llama_moe_set_look_ahead"](self._ctx, max_experts, wrong))

    def set_values(self, values: NDArray[Any]) -> None:
        """[n_rows, n_expert]: when experts cross the link, residents of least value make room; of equal values, those that were
        used longest ago. From any thread; counts from the next decode on. ValueError: another shape."""
        table = np.array(values, np.float32, order="C")  # a copy: it may be given again
        if table.shape != (self.n_rows, self.n_expert):
            raise ValueError(f"values have shape {table.shape}, it must be ({self.n_rows}, {self.n_expert})")
        with self._values_lock:
            self._values = table
            self._give_values()

    def _give_values(self) -> None:
        if self._values is not None:
            pointer = self._values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
            _check(_f["llama_moe_set_values"](self._ctx, pointer))

    def failure(self) -> str:
        """Why the last decode failed after llama_decode had returned, "" if it did not. Waits for the decode.

        Its logits are NaN then, and the KV cache must be cleared with its data before the context is used again."""
        return str(_f["llama_moe_failure"](self._ctx).decode())

    def pool_threads(self) -> int:
        """Threads of the process's pool behind the in-stream execution; 0: this context does not use it."""
        return int(_f["llama_moe_pool_threads"](self._ctx))

    def inject_pool_fault(self, thread: int, sleep_ms: int) -> None:
        """For tests: a thread of the pool sleeps that long in its next request; sleep_ms < 0: it ends for good."""
        _check(_f["llama_moe_inject_pool_fault"](self._ctx, thread, sleep_ms))

    def device_bytes(self) -> int:
        """Bytes that slots and lane buffers take on the device."""
        return int(_f["llama_moe_device_bytes"](self._ctx))

    def prompt_memory(self) -> int:
        """Of the device bytes, what prompts need as long as not every expert has a slot."""
        return int(_f["llama_moe_prompt_memory"](self._ctx))

    def host_bytes(self) -> tuple[int, int]:
        """(bytes of all experts in host memory, bytes of these that are page-locked)."""
        total, pinned = _int64(), _int64()
        _f["llama_moe_host_bytes"](self._ctx, ctypes.byref(total), ctypes.byref(pinned))
        return total.value, pinned.value

    def load(self, row: int, expert: int) -> None:
        """Starts the upload of an expert into a free slot; it counts as resident after a publish that follows its landing."""
        _check(_f["llama_moe_load"](self._ctx, row, expert))

    def evict(self, row: int, expert: int) -> None:
        """Drops a resident, or withdraws an upload."""
        _check(_f["llama_moe_evict"](self._ctx, row, expert))

    def load_many(self, places: Places) -> int:
        """`load` for each, in one call; returns how many were started. What was refused is in `places.refused`, and does not
        keep the others from being done. MoeError: nothing is attached."""
        return places.give(_f["llama_moe_load_many"], self._ctx)

    def evict_many(self, places: Places) -> int:
        """`evict` for each, as `load_many`. MoeError: nothing is attached, or IN_FLIGHT."""
        return places.give(_f["llama_moe_evict_many"], self._ctx)

    def publish(self) -> int:
        """Makes the uploads that have landed visible; returns how many. Never waits."""
        return _check(_f["llama_moe_publish"](self._ctx))

    def sync(self) -> None:
        """Waits until all started uploads have landed."""
        _check(_f["llama_moe_sync"](self._ctx))

    def states(self, row: int) -> NDArray[np.uint8]:
        """COLD, UPLOADING or RESIDENT for each expert of the row, uint8 [n_expert of the row]."""
        states = np.zeros(self.n_expert, np.uint8)
        _check(_f["llama_moe_residency"](self._ctx, row, states.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))))
        return states[: self.row(row).n_expert]

    def states_table(self) -> NDArray[np.uint8]:
        """The states of all rows at once, uint8 [n_rows, n_expert]; COLD where a row has no such expert or no slots.

        Also while a decode is in flight, from any thread."""
        table = self._states()  # numpy's way to tell an address takes longer than the call
        _check(_f["llama_moe_residency_table"](self._ctx, table))
        return np.frombuffer(memoryview(table), np.uint8).reshape(self.n_rows, self.n_expert)

    def counts(self) -> NDArray[np.int32]:
        """How many tokens of the last decode chose each expert, int32 [n_rows, n_expert], summed over its ubatches.

        A view of native memory: its numbers change with the next decode. Waits for a decode in flight."""
        pointer = _f["llama_moe_counts"](self._ctx)
        if not pointer:
            raise MoeError(-2, _f["llama_moe_error"]().decode())
        return np.ctypeslib.as_array(pointer, shape=(self.n_rows, self.n_expert))

    def choices(self) -> list[NDArray[np.int32]]:
        """Experts that each token of the last decode chose, per ubatch int32 [n_rows, n_tokens, n_expert_used].

        In router rank order; -1: not computed (rows without experts, or tokens that the model's last layer leaves out). Views
        of native memory, valid until the next decode. Waits for a decode in flight."""
        found: list[NDArray[np.int32]] = []
        while address := _f["llama_moe_choices"](self._ctx, len(found), *self._sizes):
            found.append(self._choices_at(address, self._n_tokens.value, self._n_used.value))
        if not found and not _f["llama_moe_n_rows"](self._ctx):
            raise MoeError(-2, "no per-expert residency is attached to this context")
        return found

    def _choices_at(self, address: int, n_tokens: int, n_used: int) -> NDArray[np.int32]:
        """A view. To make one takes 25 µs after a decode, and addresses hardly ever change."""
        key = address, n_tokens, n_used
        view = self._views.get(key)
        if view is None:
            if len(self._views) >= MAX_VIEWS:
                self._views.clear()
            pointer = ctypes.cast(address, ctypes.POINTER(_int32))
            view = self._views[key] = np.ctypeslib.as_array(pointer, shape=(self.n_rows, n_tokens, n_used))
        return view

    def set_router_callback(self, callback: RouterCallback | None) -> None:
        """callback(row, ids, weights) for every row and ubatch once a decode is synchronised, in the caller's thread.

        ids int32, weights float32, both [n_tokens, n_expert_used] and valid during the call only. None ends it. What the
        callback raises is kept and raised by `raise_callback_error`: it cannot pass through C."""
        if callback is None:
            _check(_f["llama_moe_set_router_callback"](self._ctx, _ROUTER_CALLBACK(), None))
            _callbacks.pop(self._ctx.value, None)
            return

        def forward(_: Any, row: int, n_tokens: int, n_used: int, ids: Any, weights: Any) -> None:
            try:
                shape = (n_tokens, n_used)
                callback(row, np.ctypeslib.as_array(ids, shape=shape), np.ctypeslib.as_array(weights, shape=shape))
            except BaseException as error:
                self._callback_error = self._callback_error or error

        native = _ROUTER_CALLBACK(forward)
        _check(_f["llama_moe_set_router_callback"](self._ctx, native, None))
        _callbacks[self._ctx.value] = native

    def raise_callback_error(self) -> None:
        error, self._callback_error = self._callback_error, None
        if error is not None:
            raise error

    def perf(self, row: int) -> Perf:
        data = _PerfData()
        _check(_f["llama_moe_perf"](self._ctx, row, ctypes.byref(data)))
        return Perf(*(getattr(data, name) for name, _ in _PerfData._fields_))

    def perf_total(self) -> Perf:
        """Sum over the rows."""
        return sum((self.perf(r.row) for r in self.rows()), Perf())

    def reset_perf(self, times: bool | None = None) -> None:
        """Counters to zero; `times`: take times from now on, or not; None: as before."""
        self._takes_times = self._takes_times if times is None else times
        _check(_f["llama_moe_perf_reset"](self._ctx, self._takes_times))
        self.n_perf_resets += 1

    def prompt_bytes(self) -> tuple[int, int, int, int]:
        """Bytes that the prompt lane has copied: (from slots, from host memory, of these before their layer's choice was known,
        of these last what it did not choose)."""
        n = [_int64() for _ in range(4)]
        _f["llama_moe_prompt_bytes"](self._ctx, *map(ctypes.byref, n))
        return n[0].value, n[1].value, n[2].value, n[3].value

    def graph_stats(self) -> tuple[int, int]:
        """(decodes that found their graph ready, decodes that built one) since attach."""
        reused, built = _int64(), _int64()
        _f["llama_moe_graph_stats"](self._ctx, ctypes.byref(reused), ctypes.byref(built))
        return reused.value, built.value
