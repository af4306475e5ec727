"""Moves keep their promises: uploads stay invisible until they have landed and been published, and nothing that goes wrong
with them changes a result.

All tests run on MOETEST, whose copies land only when their own instance synchronises and whose unwritten memory is NaN. Each
decode is compared with a plain context of the same model, and the pairs computed on the device are counted exactly: the routing
of the plain context, looked up in what should be published.

The four invariants of DESIGN 3.4 were broken on purpose, one mutation of moe-residency.cpp or llama-moe.cpp at a time; the
docstrings say which test saw which mutation ("Catches: …").
"""

from __future__ import annotations

import ctypes
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import llama_cpp
import numpy as np
import pytest

from conftest import Attached
from families import FAMILIES, N_VOCAB
from lowlevel import EXACT, LOAD_NONE, LOG_ERROR, Capture, Context, GgmlTensor, decode, log_lines, make_context
from moespac_llamacpp import native
from moespac_llamacpp.models import EXPERT_TENSORS
from moespac_llamacpp.native import COLD, RESIDENT, UPLOADING, MoeError, Perf
from test_native_device import TestDevice

TOLERANCE = 1e-3  # rounding gives 1e-5 in these F32 models, a wrong expert O(1), an unwritten slot NaN
WIDE = dataclasses.replace(FAMILIES["qwen3moe"], n_expert=16, n_used=4)


class Twin:
    """An attached context, and a plain one of the same model that is fed the same tokens and tells what is right.

    `published[row]`: the experts that should be computed on the device."""

    def __init__(self, attached: Attached, seed: int = 0) -> None:
        self.ctx, self.experts = attached.ctx, attached.experts
        self.plain = make_context(attached.model, cb=Capture("ffn_moe_topk"), n_threads=1, **EXACT)
        self.rows = [r.row for r in self.experts.rows()]
        self.published: dict[int, set[int]] = {row: set() for row in self.rows}
        self.rng = np.random.default_rng(seed)
        self.n_past = 0

    def tokens(self, n: int) -> list[int]:
        return [int(t) for t in self.rng.integers(3, N_VOCAB, n)]

    def expect(self, tokens: list[int]) -> tuple[np.ndarray, int]:
        """The plain context's logits, and the hot pairs that the attached one should count."""
        self.plain.capture.clear()
        logits = decode(self.plain, tokens, self.n_past)
        hot = 0
        for row in self.rows:
            (ids,) = self.plain.capture.tensors[f"ffn_moe_topk-{row}"]
            hot += int(np.isin(ids, list(self.published[row])).sum())
        return logits, hot

    def step(self, n: int = 9) -> Perf:
        """Decodes n random tokens on both; they must agree, and as many pairs be hot as should."""
        if self.n_past + n > 200:
            self.ctx.clear()
            self.plain.clear()
            self.n_past = 0
        tokens = self.tokens(n)
        expected, hot = self.expect(tokens)
        before = self.experts.perf_total()
        logits = decode(self.ctx, tokens, self.n_past)
        after = self.experts.perf_total()
        self.n_past += n
        assert np.isfinite(logits).all(), "something was read that had not been written"
        assert np.abs(logits - expected).max() < TOLERANCE
        perf = Perf(*(a - b for a, b in zip(vars(after).values(), vars(before).values(), strict=True)))
        if n <= 32:
            assert perf.n_hot_pairs == hot
            assert perf.n_hot_pairs + perf.n_cold_pairs == n * sum(r.n_expert_used for r in self.experts.rows())
        else:
            assert perf.n_calls == 0
        return perf

    def load(self, *experts: int, rows: list[int] | None = None) -> None:
        for row in self.rows if rows is None else rows:
            for expert in experts:
                self.experts.load(row, expert)

    def settle(self) -> int:
        """All uploads landed and published."""
        self.experts.sync()
        n = self.experts.publish()
        for row in self.rows:
            self.published[row] = {int(e) for e in np.flatnonzero(self.experts.states(row) == RESIDENT)}
        return n

    def fill(self, n_slots: int, *experts: int) -> None:
        self.experts.set_slots(self.slots(n_slots))
        self.load(*experts)
        self.settle()
        assert all(self.published[row] == set(experts) for row in self.rows)

    def slots(self, n: int) -> list[int]:
        return [n if row in self.rows else 0 for row in range(self.experts.n_rows)]

    def evict(self, *experts: int) -> None:
        for row in self.rows:
            for expert in experts:
                self.experts.evict(row, expert)
                self.published[row].discard(expert)

    def states(self, expert: int) -> list[int]:
        return [int(self.experts.states(row)[expert]) for row in self.rows]


@pytest.fixture
def device(moetest: TestDevice) -> native.Device:
    return native.device_at(moetest.device())


@pytest.fixture
def twin(device: native.Device, attach: Callable[..., Attached]) -> Iterator[Twin]:
    twin = Twin(attach(WIDE, device, n_threads=1))
    yield twin
    twin.plain.close()


@contextmanager
def held_upload(moetest: TestDevice) -> Iterator[Callable[[], None]]:
    """Uploads do not land before the block's end. The function waits until one is being copied."""

    def wait() -> None:
        deadline = time.monotonic() + 10
        while moetest.count().waiting_now == 0:
            assert time.monotonic() < deadline, "no upload has started"
            time.sleep(0.001)

    moetest.hold(True)
    try:
        yield wait
    finally:
        moetest.hold(False)


@contextmanager
def refused(status: str, match: str | None = None) -> Iterator[None]:
    with pytest.raises(MoeError, match=match) as error:
        yield
    assert error.value.status == status


def last_error() -> str:
    return next((text for level, text in reversed(log_lines) if level == LOG_ERROR and "moe:" in text), "")


def start_decode(ctx: Context, tokens: list[int], pos0: int = 0) -> int:
    """llama_decode alone: unlike lowlevel.decode it does not read logits, so the decode stays in flight. Returns its code."""
    batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, pos0 + i, 1, True
        batch.seq_id[i][0] = 0
    code = int(llama_cpp.llama_decode(ctx.ptr, batch))
    llama_cpp.llama_batch_free(batch)
    return code


def read_logits(ctx: Context, n: int) -> np.ndarray:
    logits = llama_cpp.llama_get_logits(ctx.ptr)
    return np.ctypeslib.as_array(logits, shape=(n, ctx.model.n_vocab)).copy()


# --- visibility: invariant 1 ------------------------------------------------------------------------------------------


def test_an_upload_is_invisible_until_it_landed_and_was_published(moetest: TestDevice, twin: Twin) -> None:
    """Catches: publish takes QUEUED and COPYING slots; a landing publishes by itself; load sets the map; an upload counts as
    landed before its instance was synchronised; sync does not wait."""
    twin.experts.set_slots(twin.slots(4))
    twin.step()
    with held_upload(moetest) as wait:
        twin.load(0, 1, 2, 3)
        wait()
        assert twin.experts.publish() == 0
        assert twin.states(0) == [UPLOADING] * 2 and twin.states(3) == [UPLOADING] * 2
        for n in (1, 9, 1, 33):
            twin.step(n)
    twin.experts.sync()
    assert twin.states(0) == [UPLOADING] * 2
    assert twin.step().n_hot_pairs == 0
    assert twin.settle() == 8
    assert twin.states(0) == [RESIDENT] * 2
    for n in (1, 9, 32, 33, 1):
        twin.step(n)
    assert twin.step(32).n_hot_pairs > 0
    assert twin.experts.publish() == 0


def test_a_published_slot_is_not_written(moetest: TestDevice, twin: Twin) -> None:
    """Catches: load takes PUBLISHED slots; load takes LANDED slots."""
    twin.experts.set_slots(twin.slots(2))
    twin.load(5)
    twin.experts.sync()
    twin.load(6)
    with refused("NO_FREE_SLOT"):
        twin.load(7)
    twin.settle()
    queued = moetest.count().sets_queued
    with refused("NO_FREE_SLOT"):
        twin.load(7)
    twin.experts.sync()
    assert moetest.count().sets_queued == queued
    assert twin.step(32).n_hot_pairs > 0


def test_the_map_drops_an_evicted_expert_before_its_slot_is_filled_anew(twin: Twin) -> None:
    """Catches: evict leaves slot_of; evict forgets to free the slot."""
    twin.fill(1, 3)
    twin.step(32)
    twin.evict(3)
    assert twin.states(3) == [COLD] * 2
    assert twin.step(32).n_hot_pairs == 0
    twin.load(9)
    assert twin.step(32).n_hot_pairs == 0
    twin.experts.sync()  # expert 9 now lies where 3 was
    assert twin.step(32).n_hot_pairs == 0
    twin.settle()
    assert twin.step(32).n_hot_pairs > 0


def test_a_withdrawn_uploads_slot_is_free_only_when_it_has_landed(moetest: TestDevice, twin: Twin) -> None:
    """Catches: evict frees a COPYING slot at once; load takes WITHDRAWN slots; a WITHDRAWN slot becomes LANDED, or is never
    freed."""
    twin.experts.set_slots([1, 0])
    with held_upload(moetest) as wait:
        twin.experts.load(0, 3)
        wait()
        twin.experts.evict(0, 3)
        assert twin.states(3)[0] == COLD
        with refused("NO_FREE_SLOT"):
            twin.experts.load(0, 4)
        with refused("NO_FREE_SLOT"):
            twin.experts.load(0, 3)
        with refused("NOT_RESIDENT"):
            twin.experts.evict(0, 3)
        twin.step()
    assert twin.settle() == 0
    assert twin.experts.perf(0).n_loads == 0
    assert twin.step(32).n_hot_pairs == 0
    twin.experts.load(0, 4)
    assert twin.settle() == 1
    assert twin.published == {0: {4}, 1: set()}
    assert twin.step(32).n_hot_pairs > 0


def test_a_queued_upload_is_withdrawn_without_a_copy(moetest: TestDevice, twin: Twin) -> None:
    """Catches: evict leaves the job of a QUEUED slot in the queue."""
    twin.experts.set_slots([3, 0])
    with held_upload(moetest) as wait:
        twin.experts.load(0, 0)
        wait()
        twin.experts.load(0, 1)
        twin.experts.load(0, 2)
        twin.experts.evict(0, 1)
        twin.experts.evict(0, 2)
        twin.experts.load(0, 7)  # takes the slot that 1 had
    assert twin.settle() == 2
    assert twin.published[0] == {0, 7}
    assert twin.experts.perf(0).n_loads == 2
    assert moetest.count().sets_queued == 2 * 3
    assert twin.step(32).n_hot_pairs > 0


def test_the_same_expert_can_return(moetest: TestDevice, twin: Twin) -> None:
    twin.fill(2, 3, 4)
    for _ in range(3):
        twin.evict(3)
        twin.step()
        twin.load(3)
        twin.step()
        assert twin.settle() == 2
        twin.step(32)
    with held_upload(moetest) as wait:
        twin.evict(4)
        twin.load(4)
        wait()
        twin.evict(4)
    twin.settle()
    twin.load(4)
    assert twin.settle() == 2
    assert twin.step(32).n_hot_pairs > 0


def test_landed_uploads_can_be_withdrawn(twin: Twin) -> None:
    """Catches: evict does not free a LANDED slot."""
    twin.experts.set_slots(twin.slots(1))
    twin.load(3)
    twin.experts.sync()
    twin.evict(3)
    assert twin.experts.publish() == 0
    assert twin.step(32).n_hot_pairs == 0
    twin.load(4)
    twin.settle()
    assert twin.step(32).n_hot_pairs > 0


# --- the batch in flight: invariant 2 ---------------------------------------------------------------------------------


def test_the_map_does_not_change_while_a_decode_is_in_flight(twin: Twin) -> None:
    """Catches: evict, publish or set_slots without the check of in_flight."""
    twin.fill(4, 0, 1, 2)
    twin.load(3)
    twin.experts.sync()
    tokens = twin.tokens(9)
    expected, _ = twin.expect(tokens)
    assert start_decode(twin.ctx, tokens, twin.n_past) == 0
    for call in (
        lambda: twin.experts.evict(0, 0),
        lambda: twin.experts.publish(),
        lambda: twin.experts.set_slots(twin.slots(2)),
        lambda: twin.experts.set_router_callback(lambda *_: None),
    ):
        with refused("IN_FLIGHT", "llama_synchronize"):
            call()
    with refused("NO_FREE_SLOT"):
        twin.experts.load(0, 4)  # load is allowed, there is just no room
    twin.experts.sync()
    assert twin.states(0) == [RESIDENT] * 2 and twin.states(3) == [UPLOADING] * 2
    assert np.abs(read_logits(twin.ctx, 9) - expected).max() < TOLERANCE  # reading logits synchronises
    twin.n_past += 9
    twin.evict(0)
    assert twin.settle() == 2
    twin.experts.set_slots(twin.slots(6))
    assert twin.step(32).n_hot_pairs > 0


def test_many_moves_in_one_call_are_those_of_single_calls(twin: Twin) -> None:
    twin.fill(4, 0, 1, 2, 3)
    leave = native.Places([(row, expert) for row in twin.rows for expert in (1, 3)])
    assert twin.experts.evict_many(leave) == 4 and leave.refused == {}
    assert twin.states(1) == twin.states(3) == [COLD, COLD]
    come = native.Places([(row, expert) for row in twin.rows for expert in (8, 9)])
    assert twin.experts.load_many(come) == 4 and come.refused == {}
    assert twin.states(8) == twin.states(9) == [UPLOADING, UPLOADING]
    assert twin.settle() == 4
    assert all(twin.published[row] == {0, 2, 8, 9} for row in twin.rows)
    twin.step()
    assert twin.experts.load_many(nothing := native.Places([])) == 0 == twin.experts.evict_many(nothing)


def test_of_many_moves_the_refused_are_named_and_the_others_done(twin: Twin) -> None:
    twin.fill(4, 0, 1, 2)
    come = native.Places([(0, 2), (0, 5), (0, 6), (99, 0), (1, 16), (1, 5)])
    assert twin.experts.load_many(come) == 2
    assert come.refused == {0: "ALREADY_RESIDENT", 2: "NO_FREE_SLOT", 3: "OUT_OF_RANGE", 4: "OUT_OF_RANGE"}
    assert [come[i] for i in come.refused] == [(0, 2), (0, 6), (99, 0), (1, 16)]
    assert native._f["llama_moe_error"]().decode() == "expert 2 of row 0 is resident or on its way already"
    leave = native.Places([(0, 9), (1, 0), (1, 0)])
    assert twin.experts.evict_many(leave) == 1
    assert leave.refused == {0: "NOT_RESIDENT", 2: "NOT_RESIDENT"}
    twin.settle()
    assert twin.published == {0: {0, 1, 2, 5}, 1: {1, 2, 5}}
    twin.step()


def test_many_moves_need_a_list_and_something_attached(twin: Twin) -> None:
    status = (ctypes.c_int32 * 1)()
    for name in ("llama_moe_load_many", "llama_moe_evict_many"):
        assert native._f[name](twin.experts._ctx, 1, None, None, status) == -1
        assert native._f[name](twin.experts._ctx, -1, status, status, None) == -1
        assert native._f[name](twin.experts._ctx, 1, status, (ctypes.c_int32 * 1)(7), None) == 0  # no statuses wanted
    twin.experts.detach()
    for call in (twin.experts.load_many, twin.experts.evict_many):
        with refused("NOT_ATTACHED"):
            call(native.Places([(0, 0)]))


def test_the_map_does_not_change_inside_the_graph(device: native.Device, attach: Callable[..., Attached]) -> None:
    """The same from the eval callback, between two layers. Catches: as above."""
    seen: list[str] = []
    tables: list[list[int]] = []

    def meddle(tensor: int, ask: bool, _: Any) -> bool:
        wanted = GgmlTensor.from_address(tensor).name == b"ffn_moe_topk-1"
        if wanted and not ask:
            several = native.Places([(1, 0), (1, 1)])
            for call in (
                lambda: experts.evict(1, 0),
                lambda: experts.evict_many(several),
                experts.publish,
                lambda: experts.set_slots([0, 0]),
            ):
                try:
                    call()
                    seen.append("done")
                except MoeError as error:
                    seen.append(error.status)
            experts.load(1, 5)
            tables.append(experts.states_table()[1, [0, 5, 6]].tolist())
            experts.load_many(native.Places([(1, 6)]))
        return wanted if ask else True

    attached = attach(WIDE, device, cb=meddle, n_threads=1)
    experts = attached.experts
    twin = Twin(attached)
    twin.fill(8, 0, 1, 2, 3)
    assert twin.step().n_hot_pairs > 0
    assert seen == ["IN_FLIGHT"] * 4
    assert tables == [[RESIDENT, UPLOADING, COLD]]
    assert twin.states(5) == twin.states(6) == [COLD, UPLOADING]
    twin.plain.close()


def test_uploads_started_during_a_decode_land_beside_it(moetest: TestDevice, twin: Twin) -> None:
    """load and sync are allowed from another thread while a decode runs."""
    twin.fill(8, 0, 1)
    moetest.set_delay_us(300)
    stop = threading.Event()
    failures: list[BaseException] = []

    def upload() -> None:
        try:
            for expert in range(2, 8):
                for row in twin.rows:
                    twin.experts.load(row, expert)
                twin.experts.sync()
            stop.set()
        except BaseException as error:
            failures.append(error)
            stop.set()

    thread = threading.Thread(target=upload)
    thread.start()
    while not stop.is_set():
        twin.step()
    thread.join()
    assert not failures
    assert twin.settle() == 12
    assert twin.step(32).n_hot_pairs > 0


# --- host memory keeps every expert: invariant 3 ----------------------------------------------------------------------


def test_an_eviction_copies_nothing_and_loses_nothing(moetest: TestDevice, twin: Twin) -> None:
    """Catches: evict reads the slot back (any copy is counted)."""
    twin.fill(16, *range(16))
    assert twin.step(32).n_cold_pairs == 0
    before = moetest.count()
    twin.evict(*range(16))
    after = moetest.count()
    for name in ("sets_queued", "gets_queued", "sync_sets", "sync_gets", "bytes_sync", "graphs"):
        assert getattr(after, name) == getattr(before, name), name
    assert twin.step(32).n_hot_pairs == 0
    twin.load(*range(8, 16))
    twin.settle()
    assert twin.step(32).n_hot_pairs > 0


def test_an_upload_moves_one_expert(moetest: TestDevice, twin: Twin) -> None:
    twin.experts.set_slots([4, 0])
    before = moetest.count()
    twin.experts.load(0, 3)
    twin.settle()
    size = twin.experts.row(0).expert_bytes
    assert size == 3 * 256 * 256 * 4
    assert moetest.count().bytes_set_landed - before.bytes_set_landed == size
    assert moetest.count().bytes_sync == before.bytes_sync
    assert (twin.experts.perf(0).n_loads, twin.experts.perf(0).n_load_bytes) == (1, size)


# --- moves refused: invariant 4 ---------------------------------------------------------------------------------------


def test_a_full_device_only_costs_speed(moetest: TestDevice, twin: Twin) -> None:
    """Catches: resize drops the old slots before it has new ones."""
    moetest.set_fail_alloc_after(moetest.count().alloc_now)
    with refused("NO_DEVICE_MEMORY", r"no memory on MOETEST for 4 slots of row \d \(\d+ bytes\)"):
        twin.experts.set_slots(twin.slots(4))
    assert [r.n_slots for r in twin.experts.rows()] == [0, 0]
    with refused("NO_FREE_SLOT", "all 0 are taken"):
        twin.load(0)
    for n in (1, 9, 33):
        assert twin.step(n).n_hot_pairs == 0
    moetest.set_fail_alloc_after(-1)
    twin.fill(4, 0, 1)
    moetest.set_fail_alloc_after(moetest.count().alloc_now)
    with refused("NO_DEVICE_MEMORY"):
        twin.experts.set_slots(twin.slots(8))
    assert [r.n_slots for r in twin.experts.rows()] == [4, 4]
    assert twin.states(0) == [RESIDENT] * 2
    assert twin.step(32).n_hot_pairs > 0
    twin.load(2)
    twin.settle()
    twin.step()


def test_rows_that_fit_get_their_slots_when_others_do_not(moetest: TestDevice, twin: Twin) -> None:
    twin.fill(2, 0, 1)
    size = twin.experts.row(0).expert_bytes
    # row 1 gives its two slots first; then there is room for row 0's four new ones beside its old two
    moetest.set_fail_alloc_after(moetest.count().alloc_now + 2 * size + 4096)
    twin.experts.set_slots([4, 0])
    twin.published[1] = set()
    assert [r.n_slots for r in twin.experts.rows()] == [4, 0]
    assert twin.step(32).n_hot_pairs > 0
    moetest.set_fail_alloc_after(moetest.count().alloc_now + 2 * size + 4096)
    with refused("NO_DEVICE_MEMORY", "for 16 slots of row 0"):
        twin.experts.set_slots([16, 2])
    assert [r.n_slots for r in twin.experts.rows()] == [4, 2]
    twin.experts.load(1, 5)
    twin.settle()
    assert twin.published == {0: {0, 1}, 1: {5}}
    assert twin.step(32).n_hot_pairs > 0


def test_generation_goes_on_when_every_load_is_refused(twin: Twin) -> None:
    twin.fill(1, 3)
    for step in range(4):
        for expert in range(16):
            if expert != 3:
                with refused("NO_FREE_SLOT"):
                    twin.load(expert)
        twin.experts.publish()
        twin.step((1, 9, 1, 33)[step])


def test_slots_shrink_where_there_is_no_room_for_both(moetest: TestDevice, twin: Twin) -> None:
    """A full device is the normal state: the old memory goes first, and the residents come back as uploads."""
    twin.fill(4, 0, 1, 2, 3)
    twin.step()
    moetest.set_fail_alloc_after(moetest.count().alloc_now)
    twin.experts.set_slots(twin.slots(3))
    for row in twin.rows:
        states = twin.experts.states(row)
        assert states[3] == COLD and (states[:3] != COLD).all()
        twin.published[row] = set()
    twin.experts.sync()
    twin.experts.publish()
    for row in twin.rows:
        twin.published[row] = {0, 1, 2}
    assert twin.step(32).n_hot_pairs > 0
    moetest.set_fail_alloc_after(-1)


@pytest.mark.parametrize("n", [1, 9])
def test_a_failing_device_ends_the_decode_with_a_sentence_and_the_next_runs_on_the_cpu(
    moetest: TestDevice, device: native.Device, twin: Twin, n: int
) -> None:
    twin.fill(16, *range(16))
    twin.step(9)
    log_lines.clear()
    moetest.set_fail_graph(1)
    tokens = twin.tokens(n)
    with pytest.raises(RuntimeError, match=r"llama_decode returned -3: (?s:.*)MOETEST failed.*on the CPU"):
        decode(twin.ctx, tokens, twin.n_past)
    assert "the device lane on MOETEST failed" in last_error()
    for row in twin.rows:
        twin.published[row] = set()  # still in the slots, but nothing is computed there any more
    for width in (n, 1, 9, 33, 32):
        assert twin.step(width).n_hot_pairs == 0
    # and whoever asks is told, instead of moving experts that nobody computes
    twin.evict(3)
    for row in twin.rows:
        with pytest.raises(native.MoeError, match="the device lane failed") as failed:
            twin.experts.load(row, 3)
        assert failed.value.status == "FAILED"
        assert not twin.experts.row(row).hybrid and "the device lane failed" in twin.experts.row(row).fallback
    twin.step()
    twin.experts.detach()
    twin.experts = native.Experts(twin.ctx.ptr, device)
    twin.fill(4, 0, 1, 2, 3)
    assert twin.step(32).n_hot_pairs > 0


def test_an_aborted_decode_leaves_the_context_usable(twin: Twin) -> None:
    """llama.cpp's abort callback ends a decode between two nodes."""
    twin.fill(8, 0, 1, 2, 3)
    for allowed in (0, 3, 15, 25):
        left = [allowed]

        def abort(_: Any, left: list[int] = left) -> bool:
            left[0] -= 1
            return left[0] < 0

        callback = llama_cpp.ggml_abort_callback(abort)
        llama_cpp.llama_set_abort_callback(twin.ctx.ptr, callback, None)
        tokens = twin.tokens(9)
        assert start_decode(twin.ctx, tokens, twin.n_past) == 2
        llama_cpp.llama_set_abort_callback(twin.ctx.ptr, llama_cpp.ggml_abort_callback(0), None)
        llama_cpp.llama_synchronize(twin.ctx.ptr)
        assert twin.experts.publish() == 0
        twin.ctx.rollback(twin.n_past)
        for n in (9, 1):
            twin.step(n)


def test_a_failure_in_a_late_ubatch_or_layer_leaves_the_context_usable(
    moetest: TestDevice, device: native.Device, attach: Callable[..., Attached]
) -> None:
    twin = Twin(attach(WIDE, device, n_ubatch=8, n_threads=1))
    twin.fill(16, *range(16))
    moetest.set_fail_graph(4)  # second ubatch, second layer
    with pytest.raises(RuntimeError, match="llama_decode returned -3"):
        decode(twin.ctx, twin.tokens(24))
    assert twin.ctx.rollback(0)
    for row in twin.rows:
        twin.published[row] = set()
    twin.step(24)
    twin.step(1)
    twin.plain.close()


# --- slots come and go ------------------------------------------------------------------------------------------------


def test_residents_stay_in_slots_that_remain(twin: Twin) -> None:
    """Catches: resize does not copy the slots; keeps map entries of slots that went; leaves the lane graphs of the old slots."""
    twin.fill(4, 10, 11, 12, 13)
    for n_slots, stay in (
        (8, {10, 11, 12, 13}),
        (3, {10, 11, 12}),
        (3, {10, 11, 12}),
        (16, {10, 11, 12}),
        (1, {10}),
        (0, set()),
    ):
        twin.experts.set_slots(twin.slots(n_slots))
        assert [r.n_slots for r in twin.experts.rows()] == [n_slots] * 2
        twin.published = {row: set(stay) for row in twin.rows}
        for row in twin.rows:
            assert set(np.flatnonzero(twin.experts.states(row)).tolist()) == stay
        for n in (1, 9, 32):
            twin.step(n)
        if n_slots == 16:
            twin.load(*range(10), 13, 14, 15)
            twin.settle()
            assert twin.step(32).n_cold_pairs == 0


def test_slots_change_with_uploads_under_way(moetest: TestDevice, twin: Twin) -> None:
    """set_slots waits for uploads and keeps them where their slot stays. Catches: resize without waiting."""
    twin.fill(3, 0)
    for n_slots, stay in ((6, {1, 2}), (2, {3})):
        for row in twin.rows:
            twin.published[row] &= {0}
        with held_upload(moetest) as wait:
            twin.load(*stay, *(() if n_slots == 6 else (4, 5)))
            wait()
            threading.Timer(0.1, moetest.hold, (False,)).start()
            start = time.perf_counter()
            twin.experts.set_slots(twin.slots(n_slots))
            assert time.perf_counter() - start > 0.05
        assert all(set(np.flatnonzero(twin.experts.states(row) == RESIDENT).tolist()) == {0} for row in twin.rows)
        assert twin.step(32).n_hot_pairs > 0
        if n_slots == 6:
            assert twin.settle() == 4
            assert all(p == {0, 1, 2} for p in twin.published.values())
            twin.evict(1, 2)
        else:
            assert twin.settle() == 2
            assert all(p == {0, 3} for p in twin.published.values())
        twin.step(32)


def test_rows_may_have_different_slots(twin: Twin) -> None:
    twin.experts.set_slots([0, 5])
    with refused("NO_FREE_SLOT"):
        twin.experts.load(0, 0)
    for expert in range(5):
        twin.experts.load(1, expert)
    twin.settle()
    assert twin.published == {0: set(), 1: set(range(5))}
    assert twin.step(32).n_hot_pairs > 0
    assert (twin.experts.perf(0).n_hot_pairs, twin.experts.perf(1).n_hot_pairs > 0) == (0, True)


def test_device_bytes_are_what_the_device_has_given(
    moetest: TestDevice, device: native.Device, attach: Callable[..., Attached]
) -> None:
    before = moetest.count().alloc_now
    experts = attach(WIDE, device).experts
    lane = experts.device_bytes()
    assert lane == moetest.count().alloc_now - before
    experts.set_slots([3, 5])
    assert experts.device_bytes() == moetest.count().alloc_now - before
    assert experts.device_bytes() - lane >= 8 * experts.row(0).expert_bytes
    experts.set_slots([0, 0])
    assert experts.device_bytes() == lane
    experts.detach()
    assert moetest.count().alloc_now == before


# --- pinning ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("works", [True, False])
def test_pinning_that_did_not_happen_is_told(
    moetest: TestDevice, device: native.Device, attach: Callable[..., Attached], works: bool
) -> None:
    """As a CUDA host buffer does, MOETEST's silently becomes pageable where pinning fails."""
    moetest.set_fail_pin(not works)
    host = device.host_buffer_type
    assert host
    twin = Twin(attach(WIDE, device, n_threads=1, load={"overrides": [(EXPERT_TENSORS, host)], "load_mode": LOAD_NONE}))
    moetest.set_fail_pin(False)
    assert [r.pinned for r in twin.experts.rows()] == [works, works]
    assert all(r.hybrid for r in twin.experts.rows())
    total = sum(r.n_expert * r.expert_bytes for r in twin.experts.rows())
    assert twin.experts.host_bytes() == (total, total if works else 0)
    before = moetest.count()
    twin.fill(4, 0, 1, 2, 3)
    after = moetest.count()
    queued = after.bytes_set_queued - before.bytes_set_queued
    assert after.bytes_set_pinned - before.bytes_set_pinned == (queued if works else 0)
    assert queued == 8 * twin.experts.row(0).expert_bytes
    for n in (1, 9, 32, 33):
        twin.step(n)
    twin.plain.close()


def test_experts_in_mapped_files_are_not_pinned(twin: Twin) -> None:
    assert not any(r.pinned for r in twin.experts.rows())
    assert twin.experts.host_bytes()[1] == 0


# --- many moves -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n_threads", "limit"), [(1, 600), (2, 100)])
def test_random_moves_never_change_a_result(moetest: TestDevice, twin: Twin, n_threads: int, limit: int) -> None:
    """Moves in random order with decodes in between, uploads taking their time. Catches: most of the mutations."""
    llama_cpp.llama_set_n_threads(twin.ctx.ptr, n_threads, n_threads)
    rng = np.random.default_rng(n_threads)
    n_slots, n_moves, hot, withdrawn = [6, 6], 0, 0, 0
    twin.experts.set_slots(n_slots)
    moetest.set_delay_us(200)
    uploading: dict[int, set[int]] = {row: set() for row in twin.rows}

    def check() -> None:
        for row in twin.rows:
            states = twin.experts.states(row)
            assert set(np.flatnonzero(states == RESIDENT).tolist()) == twin.published[row]
            assert set(np.flatnonzero(states == UPLOADING).tolist()) == uploading[row]

    def publish() -> None:
        n = twin.experts.publish()
        for row in twin.rows:
            new = set(np.flatnonzero(twin.experts.states(row) == RESIDENT).tolist()) - twin.published[row]
            assert new <= uploading[row]
            twin.published[row] |= new
            uploading[row] -= new
            n -= len(new)
        assert n == 0

    while n_moves < limit:
        row, expert = int(rng.integers(2)), int(rng.integers(16))
        here = twin.published[row] | uploading[row]
        what = rng.choice(
            ["load", "evict", "publish", "decode", "sync", "slots"], p=[0.44, 0.27, 0.14, 0.12, 0.02, 0.01]
        )
        if what == "load":
            n_moves += 1
            try:
                twin.experts.load(row, expert)
                assert expert not in here and len(here) < n_slots[row]
                uploading[row].add(expert)
            except MoeError as error:
                assert error.status == ("ALREADY_RESIDENT" if expert in here else "NO_FREE_SLOT")
                if error.status == "NO_FREE_SLOT" and len(here) < n_slots[row]:
                    withdrawn += 1  # an upload that was withdrawn has not landed yet
        elif what == "evict":
            n_moves += 1
            expert = int(rng.choice(sorted(here))) if here else expert
            try:
                twin.experts.evict(row, expert)
                assert expert in here
                twin.published[row].discard(expert)
                uploading[row].discard(expert)
            except MoeError as error:
                assert error.status == "NOT_RESIDENT" and not here
        elif what == "publish":
            publish()
        elif what == "sync":
            twin.experts.sync()
        elif what == "slots":
            n_slots = [int(n) for n in rng.integers(5, 9, 2)]
            twin.experts.set_slots(n_slots)
            for r in twin.rows:
                states = twin.experts.states(r)
                twin.published[r] &= set(np.flatnonzero(states == RESIDENT).tolist())
                uploading[r] &= set(np.flatnonzero(states == UPLOADING).tolist())
        else:
            hot += twin.step(int(rng.choice([1, 1, 2, 4, 9, 17, 33]))).n_hot_pairs
        check()
    assert hot > 0
    assert moetest.count().hold_timeouts == 0


# --- several contexts -------------------------------------------------------------------------------------------------


def test_two_contexts_of_a_model_keep_their_own_residents(
    device: native.Device, attach: Callable[..., Attached]
) -> None:
    first = Twin(attach(WIDE, device, n_threads=1), 0)
    second = Twin(attach(WIDE, device, n_threads=1, model=first.ctx.model), 1)
    first.fill(4, 0, 1, 2, 3)
    second.fill(6, 10, 11, 12)
    for n in (1, 9, 4, 32, 1):
        first.step(n)
        second.step(n)
    first.evict(0)
    second.load(0)
    second.settle()
    for n in (9, 1):
        first.step(n)
        second.step(n)
    first.experts.detach()
    assert second.step(32).n_hot_pairs > 0
    tokens = first.tokens(9)
    expected, _ = first.expect(tokens)
    assert np.abs(decode(first.ctx, tokens, first.n_past) - expected).max() < TOLERANCE
    first.plain.close()
    second.plain.close()


@pytest.mark.parametrize("detach", [True, False])
@pytest.mark.parametrize("newest_first", [True, False])
def test_contexts_can_be_freed_in_any_order(
    moetest: TestDevice, device: native.Device, attach: Callable[..., Attached], detach: bool, newest_first: bool
) -> None:
    """Detached before or not, with uploads under way."""
    first = Twin(attach(WIDE, device, n_threads=1), 0)
    second = Twin(attach(WIDE, device, n_threads=1, model=first.ctx.model), 1)
    moetest.set_delay_us(2000)
    for twin in (first, second):
        twin.fill(4, 0, 1)
        twin.step()
        twin.load(2, 3)
    gone, left = (second, first) if newest_first else (first, second)
    if detach:
        gone.experts.detach()
    gone.ctx.close()
    left.step()
    left.settle()
    assert left.step(32).n_hot_pairs > 0
    first.plain.close()
    second.plain.close()


def test_attach_after_detach_starts_empty(moetest: TestDevice, device: native.Device, twin: Twin) -> None:
    before = moetest.count().instances_now
    for _ in range(3):
        twin.fill(4, 0, 1)
        assert twin.step(32).n_hot_pairs > 0
        twin.load(2)  # under way while detaching
        twin.experts.detach()
        twin.experts.detach()  # a no-op
        assert moetest.count().instances_now == before - 2
        tokens = twin.tokens(9)
        expected, _ = twin.expect(tokens)
        assert np.abs(decode(twin.ctx, tokens, twin.n_past) - expected).max() < TOLERANCE
        twin.n_past += 9
        twin.experts = native.Experts(twin.ctx.ptr, device)
        assert [r.n_slots for r in twin.experts.rows()] == [0, 0]
        twin.published = {row: set() for row in twin.rows}
        assert twin.step(9).n_hot_pairs == 0


def test_detaching_waits_for_the_decode_in_flight(twin: Twin) -> None:
    twin.fill(4, 0, 1)
    tokens = twin.tokens(9)
    expected, _ = twin.expect(tokens)
    assert start_decode(twin.ctx, tokens) == 0
    twin.experts.detach()
    assert np.abs(read_logits(twin.ctx, 9) - expected).max() < TOLERANCE
