"""Every error is a code with a sentence that names the number or thing at fault; none of them aborts, none leaves a trace.

FAILED (an exception inside attach or detach) cannot be provoked from outside; a lane that fails in a decode is in test_moves.py.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import Attached
from families import FAMILIES, cached_model
from lowlevel import EXACT, decode, load_model, make_context
from moespac_llamacpp import native
from moespac_llamacpp.native import Experts, MoeError
from test_native_device import TestDevice

REPO = Path(__file__).resolve().parent.parent
HEADER = REPO / "patches" / "overlay" / "vendor" / "llama.cpp" / "include" / "llama-moe.h"
TOKENS = [5, 6, 7, 8, 9]
PROVOKED: set[str] = set()


@contextmanager
def refused(status: str, match: str) -> Iterator[None]:
    with pytest.raises(MoeError, match=match) as error:
        yield
    assert error.value.status == status
    PROVOKED.add(status)


@pytest.fixture
def device(moetest: TestDevice) -> native.Device:
    return native.device_at(moetest.device())


@pytest.fixture
def attached(device: native.Device, attach: Callable[..., Attached]) -> Attached:
    return attach("qwen3moe", device)


# --- the header and its Python side -----------------------------------------------------------------------------------


def test_python_knows_every_code_and_function_of_the_header() -> None:
    text = HEADER.read_text()

    def values(enum: str) -> dict[str, int]:
        body = re.search(rf"enum {enum} \{{(.*?)\}};", text, re.DOTALL)
        assert body
        return {name: int(value) for name, value in re.findall(r"LLAMA_MOE_(\w+)\s*=\s*(-?\d+),", body[1])}

    assert {value: name for name, value in values("llama_moe_status").items()} == native.STATUS
    executions = {name.lower().replace("_", "-"): value for name, value in values("llama_moe_execution").items()}
    assert executions == native.EXECUTIONS
    assert values("llama_moe_expert_state") == {
        "COLD": native.COLD,
        "UPLOADING": native.UPLOADING,
        "RESIDENT": native.RESIDENT,
    }
    assert set(re.findall(r"\b(llama_moe_\w+)\s*\(", text)) - {"llama_moe_router_callback"} == {
        name for name in native._PROTOTYPES if name.startswith("llama_moe_")
    }


@pytest.mark.parametrize(
    ("struct", "mirror"),
    [
        ("llama_moe_params", native._Params),
        ("llama_moe_row_info", native._RowInfo),
        ("llama_moe_perf_data", native._PerfData),
    ],
)
def test_python_mirrors_the_structs_of_the_header(struct: str, mirror: type[ctypes.Structure]) -> None:
    body = re.search(rf"struct {struct} \{{(.*?)\}};", HEADER.read_text(), re.DOTALL)
    assert body
    kinds = {"int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64, "bool": ctypes.c_bool, "double": ctypes.c_double}
    kinds |= {"const char *": ctypes.c_char_p, "ggml_backend_dev_t": ctypes.c_void_p}  # type: ignore[dict-item]
    fields = re.findall(r"^\s+(const char \*|\w+)\s+(\w+);", body.group(1), re.MULTILINE)
    assert [(name, kinds[kind]) for kind, name in fields] == list(mirror._fields_)


# --- attach -----------------------------------------------------------------------------------------------------------


def test_what_is_not_attached_says_so(attached: Attached) -> None:
    experts = attached.experts
    experts.detach()
    calls: list[Callable[[], Any]] = [
        lambda: experts.row(0), lambda: experts.rows(), lambda: experts.set_slots([1, 1]), lambda: experts.load(0, 0),
        lambda: experts.evict(0, 0), experts.publish, experts.sync, lambda: experts.states(0), experts.counts,
        lambda: experts.set_router_callback(None), lambda: experts.set_router_callback(lambda *_: None),
        lambda: experts.perf(0), experts.reset_perf,
    ]  # fmt: skip
    for call in calls:
        with refused("NOT_ATTACHED", "^no per-expert residency is attached to this context$"):
            call()
    assert experts.device_bytes() == 0
    assert experts.host_bytes() == (0, 0)
    assert experts.graph_stats() == (0, 0)
    experts.detach()
    assert np.isfinite(decode(attached.ctx, TOKENS)).all()


def test_attaching_twice_is_refused(attached: Attached, device: native.Device) -> None:
    attached.experts.set_slots([2, 2])
    with refused("ALREADY_ATTACHED", "attached to this context already"):
        Experts(attached.ctx.ptr, device)
    assert [r.n_slots for r in attached.experts.rows()] == [2, 2]  # the first one goes on
    decode(attached.ctx, TOKENS)


def test_a_dense_model_is_refused(moetest: TestDevice, device: native.Device, root: Path) -> None:
    before = moetest.count()
    with load_model(cached_model(root, "qwen3")) as model, make_context(model, **EXACT) as ctx:
        expected = decode(ctx, TOKENS)
        with refused("NO_MOE_LAYERS", "^the model has no MoE layers$"):
            Experts(ctx.ptr, device)
        after = moetest.count()
        assert (after.alloc_now, after.instances_now) == (before.alloc_now, before.instances_now)
        ctx.clear()
        assert (decode(ctx, TOKENS) == expected).all()


@pytest.mark.parametrize("n", [0, -1, 513, 1 << 30])
def test_a_batch_limit_out_of_range_is_refused(attached: Attached, device: native.Device, n: int) -> None:
    attached.experts.detach()
    with refused("INVALID_ARGUMENT", f"max_batch_tokens is {n}, it must be from 1 to 512"):
        Experts(attached.ctx.ptr, device, max_batch_tokens=n)


@pytest.mark.parametrize("n", [1, 512])
def test_a_batch_limit_at_the_edge_is_taken(attached: Attached, device: native.Device, n: int) -> None:
    attached.experts.detach()
    experts = Experts(attached.ctx.ptr, device, max_batch_tokens=n)
    experts.set_slots([8, 8])
    for row in (0, 1):
        for expert in range(8):
            experts.load(row, expert)
    experts.sync()
    experts.publish()
    for width in (1, 2, 100):
        attached.ctx.clear()
        before = experts.perf(0).n_tokens
        assert np.isfinite(decode(attached.ctx, [5] * width)).all()
        assert experts.perf(0).n_tokens - before == (width if width <= n else 0)


def test_no_context_is_refused() -> None:
    with refused("INVALID_ARGUMENT", "^the context is NULL$"):
        Experts(None)
    assert native._f["llama_moe_n_rows"](None) == 0


def test_a_device_without_memory_for_the_lane_is_refused(
    moetest: TestDevice, device: native.Device, attached: Attached
) -> None:
    attached.experts.detach()
    before = moetest.count()
    for room in (0, 4096, 20_000):
        moetest.set_fail_alloc_after(before.alloc_now + room)
        with refused("NO_DEVICE_MEMORY", r"no memory for the device lane's (inputs|compute buffer)"):
            Experts(attached.ctx.ptr, device)
        after = moetest.count()
        assert (after.alloc_now, after.instances_now) == (before.alloc_now, before.instances_now)
        attached.ctx.clear()
        assert np.isfinite(decode(attached.ctx, TOKENS)).all()
    moetest.set_fail_alloc_after(-1)
    assert len(Experts(attached.ctx.ptr, device).rows()) == 2


def test_a_device_that_cannot_be_opened_is_refused(attached: Attached) -> None:
    broken = BrokenDevice()
    attached.experts.detach()
    with refused("NO_DEVICE", "^the device BROKEN could not be opened$"):
        Experts(attached.ctx.ptr, native.device_at(broken.pointer))
    assert np.isfinite(decode(attached.ctx, TOKENS)).all()


class BrokenDevice:
    """A ggml_backend_device (ggml/src/ggml-backend-impl.h 176) whose init_backend gives nothing."""

    def __init__(self) -> None:
        self.name = ctypes.create_string_buffer(b"BROKEN")
        text = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda _: ctypes.addressof(self.name))
        kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(lambda _: 1)
        open_ = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(lambda *_: None)
        functions: list[Any] = [text, text, None, kind, None, open_] + [None] * 9
        self.keep = functions
        words = [ctypes.cast(f, ctypes.c_void_p).value if f else None for f in functions] + [None, None]
        self.struct = (ctypes.c_void_p * len(words))(*words)
        self.pointer = ctypes.addressof(self.struct)


# --- rows and experts -------------------------------------------------------------------------------------------------


def test_rows_out_of_range_are_refused(attached: Attached) -> None:
    experts = attached.experts
    experts.set_slots([2, 2])
    for row in (-1, 2, 1 << 30, -(1 << 31)):
        with refused("OUT_OF_RANGE", rf"there is no row {row} \(there are 2\)"):
            experts.row(row)
        for call in (
            lambda row=row: experts.load(row, 0),
            lambda row=row: experts.evict(row, 0),
            lambda row=row: experts.states(row),
        ):
            with refused("OUT_OF_RANGE", rf"row {row} has no experts \(there are 2 rows\)"):
                call()
        with refused("OUT_OF_RANGE", f"row {row} has no experts"):
            experts.perf(row)


def test_dense_layers_have_rows_without_experts(device: native.Device, attach: Callable[..., Attached]) -> None:
    experts = attach("llama4", device).experts
    assert [r.row for r in experts.rows()] == [1, 3]
    assert (experts.row(0).il, experts.row(0).n_expert, experts.row(0).hybrid, experts.row(0).fallback) == (
        -1,
        0,
        False,
        "",
    )
    with refused("OUT_OF_RANGE", r"row 0 has no experts \(there are 4 rows\)"):
        experts.load(0, 0)
    with refused("INVALID_ARGUMENT", "row 2: it has no experts, but 3 slots were asked for"):
        experts.set_slots([0, 4, 3, 4])
    assert all(r.n_slots == 0 for r in experts.rows())  # refused as a whole


def test_experts_out_of_range_are_refused(attached: Attached) -> None:
    attached.experts.set_slots([8, 8])
    for expert in (-1, 8, 1 << 30):
        for call in (attached.experts.load, attached.experts.evict):
            with refused("OUT_OF_RANGE", f"row 1 has experts 0 to 7, not {expert}"):
                call(1, expert)


def test_slots_out_of_range_are_refused_as_a_whole(attached: Attached) -> None:
    experts = attached.experts
    experts.set_slots([2, 2])
    with refused("INVALID_ARGUMENT", "row 1: -1 slots were asked for"):
        experts.set_slots([4, -1])
    with refused("INVALID_ARGUMENT", "row 1: 9 slots were asked for, but there are only 8 experts"):
        experts.set_slots([4, 9])
    assert [r.n_slots for r in experts.rows()] == [2, 2]
    for wrong in ([1], [1, 1, 1], [[1, 1]], []):
        with pytest.raises(ValueError, match=r"n_slots has shape .*, it must be \(2,\)"):
            experts.set_slots(wrong)  # type: ignore[arg-type]


def test_a_row_on_upstreams_path_says_why(device: native.Device, attach: Callable[..., Attached]) -> None:
    attached = attach("nemotron_h_moe", device)
    experts, word = attached.experts, FAMILIES["nemotron_h_moe"].fallback
    (row, *_) = [r.row for r in experts.rows()]
    assert not experts.row(row).hybrid and word in experts.row(row).fallback
    for call in (lambda: experts.load(row, 0), lambda: experts.evict(row, 0), lambda: experts.states(row)):
        with refused("UNSUPPORTED", f"row {row} takes llama.cpp's own path: .*{word}"):
            call()
    slots = [0] * experts.n_rows
    slots[row] = 1
    with refused("UNSUPPORTED", f"row {row}: .*{word}"):
        experts.set_slots(slots)
    experts.set_slots([0] * experts.n_rows)
    assert experts.publish() == 0
    assert np.isfinite(decode(attached.ctx, TOKENS)).all()


def test_moves_that_make_no_sense_are_refused(moetest: TestDevice, attached: Attached) -> None:
    experts = attached.experts
    with refused("NO_FREE_SLOT", "no free slot for expert 3 of row 1: all 0 are taken"):
        experts.load(1, 3)
    experts.set_slots([2, 2])
    with refused("NOT_RESIDENT", "expert 3 of row 1 is not resident"):
        experts.evict(1, 3)
    moetest.hold(True)
    experts.load(1, 3)
    with refused("ALREADY_RESIDENT", "expert 3 of row 1 is resident or on its way already"):
        experts.load(1, 3)
    moetest.hold(False)
    experts.sync()
    experts.publish()
    with refused("ALREADY_RESIDENT", "expert 3 of row 1 is resident or on its way already"):
        experts.load(1, 3)
    experts.load(1, 4)
    with refused("NO_FREE_SLOT", "no free slot for expert 5 of row 1: all 2 are taken"):
        experts.load(1, 5)
    experts.load(0, 5)  # another row's slots
    experts.evict(1, 3)
    with refused("NOT_RESIDENT", "expert 3 of row 1 is not resident"):
        experts.evict(1, 3)


def test_a_full_device_is_told_with_numbers(moetest: TestDevice, attached: Attached) -> None:
    moetest.set_fail_alloc_after(moetest.count().alloc_now)
    size = attached.experts.row(1).expert_bytes
    with refused("NO_DEVICE_MEMORY", rf"no memory on MOETEST for 3 slots of row 1 \({3 * size} bytes\)"):
        attached.experts.set_slots([0, 3])


def test_a_decode_in_flight_is_told(attached: Attached) -> None:
    import llama_cpp

    tokens = (llama_cpp.llama_token * 5)(*TOKENS)  # the batch does not keep it alive
    batch = llama_cpp.llama_batch_get_one(tokens, 5)
    assert llama_cpp.llama_decode(attached.ctx.ptr, batch) == 0
    with refused("IN_FLIGHT", r"a decode is in flight: call llama_synchronize \(or read its logits\) first"):
        attached.experts.publish()
    llama_cpp.llama_synchronize(attached.ctx.ptr)
    attached.experts.publish()


def test_the_last_error_belongs_to_its_thread(attached: Attached) -> None:
    with pytest.raises(MoeError, match="there is no row 7"):
        attached.experts.row(7)
    seen: list[str] = []

    def other() -> None:
        seen.append(native._f["llama_moe_error"]().decode())
        with pytest.raises(MoeError, match="there is no row 8"):
            attached.experts.row(8)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen == [""]
    assert "there is no row 7" in native._f["llama_moe_error"]().decode()


def test_all_codes_were_provoked() -> None:
    """Last in this file: what the tests above have seen, where all of them ran."""
    if len(PROVOKED) < 5 or "PYTEST_XDIST_WORKER" in os.environ:
        pytest.skip("the other tests of this file did not run in this process")
    assert set(native.STATUS.values()) - PROVOKED == {"OK", "FAILED"}


# --- an unpatched llama-cpp-python ------------------------------------------------------------------------------------


def import_with(folder: Path, version: str | None, source: str) -> subprocess.CompletedProcess[str]:
    """`import moespac_llamacpp` where llama_cpp is a package of this source, and its distribution has this version."""
    (folder / "llama_cpp").mkdir()
    (folder / "llama_cpp" / "__init__.py").write_text(source)
    info = folder / f"llama_cpp_python-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: llama-cpp-python\nVersion: {version}\n")
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(REPO)])}
    return subprocess.run(
        [sys.executable, "-c", "import moespac_llamacpp; print('imported')"],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )


LOADED = "import types\nllama_cpp = types.SimpleNamespace(_lib=types.SimpleNamespace({}))\n"


def test_an_unpatched_build_is_told_in_one_sentence(tmp_path: Path) -> None:
    done = import_with(tmp_path, "0.3.36", LOADED.format(""))
    assert done.returncode == 1
    assert done.stderr.strip().split("\n")[-1] == (
        "ImportError: moespac_llamacpp needs its patched build of llama-cpp-python, but 0.3.36 is installed, which is unpatched: "
        "run `python scripts/build_llama.py` in the project's folder, which replaces it."
    )
    assert "AttributeError" not in done.stderr


def test_a_build_that_does_not_load_is_told_in_one_sentence(tmp_path: Path) -> None:
    done = import_with(tmp_path, "0.3.36", "raise ImportError('libcuda.so.1: cannot open shared object file')")
    assert done.returncode == 1
    last = done.stderr.strip().split("\n")[-1]
    assert last.startswith(
        "ImportError: moespac_llamacpp needs its patched build of llama-cpp-python, and none can be imported"
    )
    assert "libcuda.so.1" in last and "scripts/build_llama.py" in last


@pytest.mark.parametrize("error", ["RuntimeError('Failed to load shared library')", "FileNotFoundError('libllama.so')"])
def test_a_library_that_does_not_load_is_told_in_one_sentence(tmp_path: Path, error: str) -> None:
    """What llama_cpp/_ctypes_extensions.py raises."""
    done = import_with(tmp_path, "0.3.36", f"raise {error}")
    assert done.stderr.strip().split("\n")[-1].startswith("ImportError: moespac_llamacpp needs its patched build")


def test_the_patched_version_is_enough(tmp_path: Path) -> None:
    done = import_with(tmp_path, "0.3.36+moespac.1", "raise RuntimeError('not to be imported yet')")
    assert done.stdout.strip() == "imported", done.stderr


def test_a_build_made_by_hand_is_recognised_by_its_entry_points(tmp_path: Path) -> None:
    done = import_with(tmp_path, "0.3.36", LOADED.format("llama_moe_attach=None"))
    assert done.stdout.strip() == "imported", done.stderr
