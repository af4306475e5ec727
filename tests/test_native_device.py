"""The devices that other tests rely on keep their promises: MOETEST (native/test_device.cpp), and ggml's RPC device.

A test of asynchronous moves is worth as much as its device: were copies to land at once, or unwritten memory to read
as zero, a broken invariant would pass.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Iterator
from ctypes import POINTER, byref, c_bool, c_char_p, c_int, c_int64, c_size_t, c_uint8, c_void_p
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import native_build
import rpc_device

F32, I32, Q8_0 = 0, 26, 8  # enum ggml_type
CPU = 0  # enum ggml_backend_dev_type
GPU = 1
SUCCESS, FAILED = 0, -1  # enum ggml_status
COUNTERS = """sets_queued sets_landed gets_queued gets_landed bytes_set_queued bytes_set_landed bytes_get_landed
    bytes_set_pinned sync_sets sync_gets bytes_sync graphs graphs_failed dropped stray bad_ids hold_timeouts
    alloc_failed pin_failed alloc_now alloc_peak pinned_now queued_now instances_now waiting_now""".split()


class Counters(ctypes.Structure):
    """moe_test_counters_t of native/test_device.cpp."""

    _fields_ = [(name, ctypes.c_uint64) for name in COUNTERS]


class InitParams(ctypes.Structure):
    """ggml_init_params."""

    _fields_ = [("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool)]


P = c_void_p
SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "ggml_init": (P, [InitParams]),
    "ggml_free": (None, [P]),
    "ggml_new_tensor_1d": (P, [P, c_int, c_int64]),
    "ggml_new_tensor_2d": (P, [P, c_int, c_int64, c_int64]),
    "ggml_new_tensor_3d": (P, [P, c_int, c_int64, c_int64, c_int64]),
    "ggml_nbytes": (c_size_t, [P]),
    "ggml_add": (P, [P, P, P]),
    "ggml_mul_mat_id": (P, [P, P, P, P]),
    "ggml_new_graph": (P, [P]),
    "ggml_build_forward_expand": (None, [P, P]),
    "ggml_backend_alloc_ctx_tensors_from_buft": (P, [P, P]),
    "ggml_backend_buft_alloc_buffer": (P, [P, c_size_t]),
    "ggml_backend_buft_name": (c_char_p, [P]),
    "ggml_backend_buft_is_host": (c_bool, [P]),
    "ggml_backend_buffer_free": (None, [P]),
    "ggml_backend_buffer_clear": (None, [P, c_uint8]),
    "ggml_backend_buffer_get_base": (P, [P]),
    "ggml_backend_buffer_get_type": (P, [P]),
    "ggml_backend_cpu_buffer_type": (P, []),
    "ggml_backend_dev_by_name": (P, [c_char_p]),
    "ggml_backend_dev_by_type": (P, [c_int]),
    "ggml_backend_dev_type": (c_int, [P]),
    "ggml_backend_dev_init": (P, [P, c_char_p]),
    "ggml_backend_dev_memory": (None, [P, POINTER(c_size_t), POINTER(c_size_t)]),
    "ggml_backend_dev_buffer_type": (P, [P]),
    "ggml_backend_dev_host_buffer_type": (P, [P]),
    "ggml_backend_dev_supports_buft": (c_bool, [P, P]),
    "ggml_backend_free": (None, [P]),
    "ggml_backend_synchronize": (None, [P]),
    "ggml_backend_graph_compute": (c_int, [P, P]),
    "ggml_backend_graph_compute_async": (c_int, [P, P]),
    "ggml_backend_tensor_set": (None, [P, P, c_size_t, c_size_t]),
    "ggml_backend_tensor_get": (None, [P, P, c_size_t, c_size_t]),
    "ggml_backend_tensor_set_async": (None, [P, P, P, c_size_t, c_size_t]),
    "ggml_backend_tensor_get_async": (None, [P, P, P, c_size_t, c_size_t]),
}
SWITCHES: dict[str, tuple[Any, list[Any]]] = {
    "moe_test_device": (P, []),
    "moe_test_set_fail_alloc_after": (None, [c_int64]),
    "moe_test_set_fail_graph": (None, [c_int]),
    "moe_test_set_fail_pin": (None, [c_bool]),
    "moe_test_set_memory": (None, [c_size_t, c_size_t]),
    "moe_test_hold": (None, [c_bool]),
    "moe_test_set_delay_us": (None, [c_int]),
    "moe_test_set_defer_graphs": (None, [c_bool]),
    "moe_test_counters": (None, [POINTER(Counters)]),
    "moe_test_reset": (None, []),
}


class Ggml:
    """ggml's functions without their prefix, taken through a library of ours.

    Not by loading ``llama_cpp/lib/libggml.so``: a wheel holds copies, not links, so beside the ``libggml.so.0`` that
    libllama has loaded that would be a second ggml in this process, with a registry of its own.
    """

    def __init__(self, library: Path) -> None:
        self.bind(ctypes.CDLL(str(library)), SIGNATURES, "ggml_")

    def bind(self, handle: ctypes.CDLL, signatures: dict[str, tuple[Any, list[Any]]], prefix: str) -> None:
        for name, (result, arguments) in signatures.items():
            function = getattr(handle, name)
            function.restype, function.argtypes = result, arguments
            setattr(self, name.removeprefix(prefix), function)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


class TestDevice(Ggml):
    """Ggml, and the switches of the test device without ``moe_test_``."""

    __test__ = False

    def __init__(self, library: Path) -> None:
        super().__init__(library)
        self.bind(ctypes.CDLL(str(library)), SWITCHES, "moe_test_")

    def count(self) -> Counters:
        out = Counters()
        self.counters(byref(out))
        return out


class World:
    """One context, its buffer on ``device`` and any number of backend instances; frees all of them."""

    def __init__(self, g: Ggml, device: int) -> None:
        self.g, self.device = g, device
        self.context = g.init(InitParams(1 << 20, None, True))
        self.buffer: int | None = None
        self.instances: list[int] = []

    def allocate(self) -> int:
        buft = self.g.backend_dev_buffer_type(self.device)
        self.buffer = int(self.g.backend_alloc_ctx_tensors_from_buft(self.context, buft))
        return self.buffer

    def instance(self) -> int:
        backend = int(self.g.backend_dev_init(self.device, None))
        self.instances.append(backend)
        return backend

    def vector(self, n: int) -> int:
        return int(self.g.new_tensor_1d(self.context, F32, n))

    def graph(self, result: int) -> int:
        graph = int(self.g.new_graph(self.context))
        self.g.build_forward_expand(graph, result)
        return graph

    def write(self, tensor: int, data: np.ndarray, offset: int = 0) -> None:
        data = np.ascontiguousarray(data)
        self.g.backend_tensor_set(tensor, data.ctypes.data, offset, data.nbytes)

    def read(self, tensor: int, dtype: type = np.float32) -> np.ndarray:
        out = np.zeros(self.g.nbytes(tensor) // np.dtype(dtype).itemsize, dtype)
        self.g.backend_tensor_get(tensor, out.ctypes.data, 0, out.nbytes)
        return out

    def upload(self, backend: int, tensor: int, data: np.ndarray, offset: int = 0) -> None:
        """``data`` must live until it has landed."""
        self.g.backend_tensor_set_async(backend, tensor, data.ctypes.data, offset, data.nbytes)

    def close(self) -> None:
        for backend in self.instances:
            self.g.backend_free(backend)
        if self.buffer:
            self.g.backend_buffer_free(self.buffer)
        self.g.free(self.context)


@pytest.fixture(scope="module")
def source() -> Path:
    native_build.or_skip(native_build.find_libraries)
    return native_build.or_skip(native_build.find_source)


@pytest.fixture(scope="module")
def library(source: Path) -> TestDevice:
    return TestDevice(native_build.or_skip(native_build.build_test_device, source))


@pytest.fixture
def g(library: TestDevice) -> Iterator[TestDevice]:
    library.reset()
    before = library.count()
    yield library
    library.reset()
    after = library.count()
    for gauge in ("alloc_now", "pinned_now", "queued_now", "instances_now", "waiting_now"):
        assert getattr(after, gauge) == getattr(before, gauge), f"{gauge} leaked"


@pytest.fixture
def world(g: TestDevice) -> Iterator[World]:
    with contextlib.closing(World(g, g.device())) as world:
        yield world


@pytest.fixture(scope="module")
def rpc(source: Path) -> Iterator[tuple[Ggml, int]]:
    path = native_build.or_skip(native_build.build_rpc, source)
    with rpc_device.start_server(path, seconds=120) as device:
        yield Ggml(path), device


def test_device_is_discrete_and_not_registered(g: TestDevice) -> None:
    device = g.device()
    assert g.backend_dev_type(device) == GPU
    assert g.backend_dev_by_name(b"MOETEST") is None
    own = g.backend_dev_buffer_type(device)
    assert g.backend_buft_name(own) == b"MOETEST"
    assert not g.backend_buft_is_host(own)
    assert g.backend_dev_supports_buft(device, own)
    assert not g.backend_dev_supports_buft(device, g.backend_cpu_buffer_type())
    assert not g.backend_dev_supports_buft(device, g.backend_dev_host_buffer_type(device))


def test_unwritten_memory_is_nan_even_after_clear(g: TestDevice, world: World) -> None:
    tensor = world.vector(1000)
    world.allocate()
    assert np.isnan(world.read(tensor)).all()
    world.write(tensor, np.ones(1000, np.float32))
    assert (world.read(tensor) == 1).all()
    g.backend_buffer_clear(world.buffer, 0)
    assert np.isnan(world.read(tensor)).all()
    g.backend_buffer_clear(world.buffer, 1)
    assert (world.read(tensor, np.uint8) == 1).all()


def test_upload_lands_at_synchronise_of_its_own_instance_only(g: TestDevice, world: World) -> None:
    tensor = world.vector(64)
    world.allocate()
    mine, other = world.instance(), world.instance()
    data = np.arange(32, dtype=np.float32)
    world.upload(mine, tensor, data, offset=128)
    g.backend_synchronize(other)
    assert np.isnan(world.read(tensor)).all()
    assert (g.count().sets_queued, g.count().sets_landed, g.count().queued_now) == (1, 0, 1)
    g.backend_synchronize(mine)
    read = world.read(tensor)
    assert np.isnan(read[:32]).all() and (read[32:] == data).all()
    assert (g.count().sets_landed, g.count().bytes_set_landed, g.count().queued_now) == (1, 128, 0)


def test_upload_reads_its_source_when_it_lands(g: TestDevice, world: World) -> None:
    tensor = world.vector(4)
    world.allocate()
    backend = world.instance()
    data = np.zeros(4, np.float32)
    world.upload(backend, tensor, data)
    data[:] = 7
    g.backend_synchronize(backend)
    assert (world.read(tensor) == 7).all()


def test_jobs_land_in_order_and_downloads_wait_too(g: TestDevice, world: World) -> None:
    tensor = world.vector(4)
    world.allocate()
    backend = world.instance()
    one, two, seen = np.ones(4, np.float32), np.full(4, 2, np.float32), np.zeros(4, np.float32)
    world.upload(backend, tensor, one)
    g.backend_tensor_get_async(backend, tensor, seen.ctypes.data, 0, seen.nbytes)
    world.upload(backend, tensor, two)
    assert (seen == 0).all()
    g.backend_synchronize(backend)
    assert (seen == 1).all()
    assert (world.read(tensor) == 2).all()


def test_synchronous_copies_do_not_wait_for_queued_ones(g: TestDevice, world: World) -> None:
    tensor = world.vector(4)
    world.allocate()
    backend = world.instance()
    late = np.full(4, 2, np.float32)
    world.upload(backend, tensor, late)
    world.write(tensor, np.ones(4, np.float32))
    assert (world.read(tensor) == 1).all()
    g.backend_synchronize(backend)
    assert (world.read(tensor) == 2).all()


def sum_world(world: World) -> tuple[int, int, int, int]:
    """a, b, a + b, graph; 8 floats each."""
    a, b = world.vector(8), world.vector(8)
    total = world.g.add(world.context, a, b)
    graph = world.graph(total)
    world.allocate()
    return a, b, total, graph


def test_graph_lands_its_own_uploads_and_no_others(g: TestDevice, world: World) -> None:
    a, b, total, graph = sum_world(world)
    compute, copy = world.instance(), world.instance()
    ones, twos = np.ones(8, np.float32), np.full(8, 2, np.float32)
    world.upload(compute, a, ones)
    world.upload(copy, b, twos)
    assert g.backend_graph_compute(compute, graph) == SUCCESS
    assert np.isnan(world.read(total)).all()  # b is still poison
    g.backend_synchronize(copy)
    assert g.backend_graph_compute(compute, graph) == SUCCESS
    assert (world.read(total) == 3).all()
    assert g.count().graphs == 2


def test_deferred_graph_shows_a_missing_synchronise(g: TestDevice, world: World) -> None:
    a, b, total, graph = sum_world(world)
    backend = world.instance()
    world.write(a, np.ones(8, np.float32))
    world.write(b, np.ones(8, np.float32))
    g.set_defer_graphs(True)
    assert g.backend_graph_compute_async(backend, graph) == SUCCESS
    assert np.isnan(world.read(total)).all()
    g.backend_synchronize(backend)
    assert (world.read(total) == 2).all()


def test_nth_graph_fails_once(g: TestDevice, world: World) -> None:
    *_, graph = sum_world(world)
    backend = world.instance()
    g.set_fail_graph(2)
    statuses = [g.backend_graph_compute(backend, graph) for _ in range(3)]
    assert statuses == [SUCCESS, FAILED, SUCCESS]
    assert (g.count().graphs, g.count().graphs_failed) == (2, 1)


def test_allocation_beyond_the_limit_fails(g: TestDevice) -> None:
    buft = g.backend_dev_buffer_type(g.device())
    now = g.count().alloc_now
    g.set_fail_alloc_after(now + 1000)
    first = g.backend_buft_alloc_buffer(buft, 600)
    assert first
    assert g.backend_buft_alloc_buffer(buft, 600) is None
    assert g.count().alloc_failed == 1
    g.backend_buffer_free(first)
    second = g.backend_buft_alloc_buffer(buft, 600)
    assert second
    g.backend_buffer_free(second)
    assert g.count().alloc_peak == now + 600


def test_memory_report_follows_allocations_or_the_switch(g: TestDevice) -> None:
    def report() -> tuple[int, int]:
        free, total = c_size_t(), c_size_t()
        g.backend_dev_memory(g.device(), byref(free), byref(total))
        return free.value, total.value

    free, total = report()
    buffer = g.backend_buft_alloc_buffer(g.backend_dev_buffer_type(g.device()), 4096)
    assert report() == (free - 4096, total)
    g.backend_buffer_free(buffer)
    g.set_memory(5000, 300)
    assert report() == (300, 5000)


def test_failed_pinning_is_silent_but_visible_in_the_buffer_type(g: TestDevice) -> None:
    host = g.backend_dev_host_buffer_type(g.device())
    assert g.backend_buft_name(host) == b"MOETEST_Host"
    assert g.backend_buft_is_host(host)
    pinned = g.backend_buft_alloc_buffer(host, 256)
    g.set_fail_pin(True)
    pageable = g.backend_buft_alloc_buffer(host, 256)
    assert g.backend_buffer_get_type(pinned) == host
    assert g.backend_buffer_get_type(pageable) == g.backend_cpu_buffer_type()
    assert (g.count().pin_failed, g.count().pinned_now) == (1, 256)
    g.backend_buffer_free(pinned)
    g.backend_buffer_free(pageable)


def test_uploads_from_pinned_memory_are_told_apart(g: TestDevice, world: World) -> None:
    tensor = world.vector(64)
    world.allocate()
    backend = world.instance()
    pinned = g.backend_buft_alloc_buffer(g.backend_dev_host_buffer_type(g.device()), 256)
    pageable = np.ones(32, np.float32)
    world.upload(backend, tensor, pageable)
    g.backend_tensor_set_async(backend, tensor, g.backend_buffer_get_base(pinned) + 64, 128, 64)
    g.backend_synchronize(backend)
    assert (g.count().bytes_set_queued, g.count().bytes_set_pinned) == (192, 64)
    g.backend_buffer_free(pinned)


def test_hold_keeps_an_upload_in_flight_while_another_instance_computes(g: TestDevice, world: World) -> None:
    a, b, total, graph = sum_world(world)
    compute, copy = world.instance(), world.instance()
    ones = np.ones(8, np.float32)
    world.write(a, ones)
    world.write(b, ones)
    late = np.full(8, 5, np.float32)
    world.upload(copy, b, late)
    g.hold(True)
    waiter = threading.Thread(target=g.backend_synchronize, args=(copy,))  # ctypes lets go of the GIL
    waiter.start()
    deadline = time.monotonic() + 10
    while g.count().waiting_now == 0 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert g.count().waiting_now == 1
    assert g.backend_graph_compute(compute, graph) == SUCCESS
    assert (world.read(total) == 2).all()
    g.hold(False)
    waiter.join(timeout=10)
    assert not waiter.is_alive()
    assert (world.read(b) == 5).all()
    assert g.count().hold_timeouts == 0


def test_delay_makes_uploads_take_time(g: TestDevice, world: World) -> None:
    tensor = world.vector(4)
    world.allocate()
    backend = world.instance()
    data = np.ones(4, np.float32)
    world.upload(backend, tensor, data)
    g.set_delay_us(20_000)
    start = time.perf_counter()
    g.backend_synchronize(backend)
    assert time.perf_counter() - start >= 0.02
    start = time.perf_counter()
    g.backend_synchronize(backend)  # nothing to land
    assert time.perf_counter() - start < 0.02


def test_upload_into_freed_memory_is_counted_and_not_done(g: TestDevice, world: World) -> None:
    tensor = world.vector(4)
    buffer = world.allocate()
    backend = world.instance()
    data = np.ones(4, np.float32)
    world.upload(backend, tensor, data)
    g.backend_buffer_free(buffer)
    world.buffer = None
    g.backend_synchronize(backend)
    assert (g.count().stray, g.count().sets_landed) == (1, 0)


def test_upload_from_freed_pinned_memory_is_counted_and_not_done(g: TestDevice, world: World) -> None:
    tensor = world.vector(4)
    world.allocate()
    backend = world.instance()
    pinned = g.backend_buft_alloc_buffer(g.backend_dev_host_buffer_type(g.device()), 256)
    g.backend_tensor_set_async(backend, tensor, g.backend_buffer_get_base(pinned), 0, 16)
    g.backend_buffer_free(pinned)
    g.backend_synchronize(backend)
    assert (g.count().stray, g.count().sets_landed) == (1, 0)


def test_freed_instance_drops_its_queue(g: TestDevice, world: World) -> None:
    tensor = world.vector(4)
    world.allocate()
    backend = world.instance()
    data = np.ones(4, np.float32)
    world.upload(backend, tensor, data)
    world.instances.remove(backend)
    g.backend_free(backend)
    assert (g.count().dropped, g.count().queued_now) == (1, 0)
    assert np.isnan(world.read(tensor)).all()


N_IN, N_OUT, N_EXPERT, N_USED, N_TOKEN = 64, 32, 6, 3, 4


def expert_weights(kind: int) -> tuple[np.ndarray, np.ndarray]:
    """Per expert: bytes as stored, and the values that they stand for."""
    rng = np.random.default_rng(1)
    values = rng.standard_normal((N_EXPERT, N_OUT, N_IN)).astype(np.float32)
    if kind == F32:
        return values.reshape(N_EXPERT, -1).view(np.uint8), values
    blocks = values.reshape(-1, 32)  # block_q8_0: f16 scale, 32 int8
    scale = (np.abs(blocks).max(axis=1, keepdims=True) / 127).astype(np.float16)
    quants = np.round(blocks / scale.astype(np.float32)).clip(-127, 127).astype(np.int8)
    stored = np.concatenate([scale.view(np.uint8), quants.view(np.uint8)], axis=1)
    return stored.reshape(N_EXPERT, -1), (quants * scale.astype(np.float32)).reshape(values.shape)


def run_mul_mat_id(g: Ggml, device: int, kind: int, skip: int = -1) -> tuple[np.ndarray, np.ndarray]:
    """Result ``[N_TOKEN, N_USED, N_OUT]`` on ``device`` with experts uploaded one by one by a second instance
    (all but ``skip``), and numpy's."""
    stored, values = expert_weights(kind)
    rng = np.random.default_rng(2)
    x = rng.standard_normal((N_TOKEN, N_IN)).astype(np.float32)
    ids = np.array([rng.permutation(N_EXPERT)[:N_USED] for _ in range(N_TOKEN)], np.int32)
    ids[0, 0] = N_EXPERT - 1 if N_EXPERT - 1 not in ids[0] else ids[0, 0]
    with contextlib.closing(World(g, device)) as world:
        weights = g.new_tensor_3d(world.context, kind, N_IN, N_OUT, N_EXPERT)
        t_x = g.new_tensor_3d(world.context, F32, N_IN, 1, N_TOKEN)
        t_ids = g.new_tensor_2d(world.context, I32, N_USED, N_TOKEN)
        result = g.mul_mat_id(world.context, weights, t_x, t_ids)
        graph = world.graph(result)
        world.allocate()
        compute, copy = world.instance(), world.instance()
        for e in range(N_EXPERT):
            if e == skip:
                continue
            if e % 2:  # both ways of moving an expert
                world.write(weights, stored[e], e * stored.shape[1])
            else:
                world.upload(copy, weights, stored[e], e * stored.shape[1])
        g.backend_synchronize(copy)
        world.upload(compute, t_x, x)
        world.upload(compute, t_ids, ids)
        out = np.zeros((N_TOKEN, N_USED, N_OUT), np.float32)
        assert g.backend_graph_compute_async(compute, graph) == SUCCESS
        g.backend_tensor_get_async(compute, result, out.ctypes.data, 0, out.nbytes)
        g.backend_synchronize(compute)
    expected = np.einsum("tuoi,ti->tuo", values[ids].astype(np.float64), x)
    if skip >= 0:
        expected[ids == skip] = np.nan
    return out, expected


@pytest.mark.parametrize("kind", [F32, Q8_0], ids=["F32", "Q8_0"])
def test_experts_uploaded_one_by_one_compute_as_on_the_cpu(g: TestDevice, kind: int) -> None:
    out, expected = run_mul_mat_id(g, g.device(), kind)
    cpu, _ = run_mul_mat_id(g, g.backend_dev_by_type(CPU), kind)
    assert (out == cpu).all()
    assert np.abs(out - expected).max() < (1e-4 if kind == F32 else 0.3)  # Q8_0 rounds the activations as well


@pytest.mark.parametrize("kind", [F32, Q8_0], ids=["F32", "Q8_0"])
def test_expert_that_was_not_uploaded_gives_nan_and_no_other_does(g: TestDevice, kind: int) -> None:
    out, expected = run_mul_mat_id(g, g.device(), kind, skip=2)
    missing = np.isnan(expected)
    assert missing.any() and not missing.all()
    assert (np.isnan(out) == missing).all()


def test_bad_ids_are_refused(g: TestDevice, world: World) -> None:
    weights = g.new_tensor_3d(world.context, F32, N_IN, N_OUT, N_EXPERT)
    x = g.new_tensor_3d(world.context, F32, N_IN, 1, 1)
    ids = g.new_tensor_2d(world.context, I32, 2, 1)
    graph = world.graph(g.mul_mat_id(world.context, weights, x, ids))
    world.allocate()
    backend = world.instance()
    assert g.backend_graph_compute(backend, graph) == FAILED  # unwritten ids are -1
    world.write(ids, np.array([0, N_EXPERT], np.int32))
    assert g.backend_graph_compute(backend, graph) == FAILED
    world.write(ids, np.array([0, N_EXPERT - 1], np.int32))
    assert g.backend_graph_compute(backend, graph) == SUCCESS
    assert (g.count().bad_ids, g.count().graphs_failed) == (2, 2)


@pytest.mark.parametrize("kind", [F32, Q8_0], ids=["F32", "Q8_0"])
def test_rpc_computes_experts_uploaded_one_by_one(rpc: tuple[Ggml, int], kind: int) -> None:
    g, device = rpc
    assert g.backend_dev_type(device) == GPU
    assert not g.backend_buft_is_host(g.backend_dev_buffer_type(device))
    for _ in range(2):  # the connection closes with the last buffer and backend, and opens anew
        out, expected = run_mul_mat_id(g, device, kind)
        cpu, _ = run_mul_mat_id(g, g.backend_dev_by_type(CPU), kind)
        assert (out == cpu).all()
        assert np.abs(out - expected).max() < (1e-4 if kind == F32 else 0.3)


def test_rpc_reports_a_full_device(rpc: tuple[Ggml, int]) -> None:
    g, device = rpc
    assert g.backend_buft_alloc_buffer(g.backend_dev_buffer_type(device), 1 << 60) is None
