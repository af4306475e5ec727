"""Residency feeds a policy with what is known of a decode, and spends a step's moves over its drafts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest

from moespac_llamacpp import native, slots
from moespac_llamacpp.policies import Batch, Limits, Move, make
from moespac_llamacpp.residency import Residency


@dataclass
class FakeRow:
    row: int
    n_slots: int
    n_expert_used: int = 2
    n_expert: int = 16
    expert_bytes: int = 1000
    hybrid: bool = True


@dataclass
class FakeExperts:
    """Stands for native.Experts: two rows of 16 experts with 4 slots each.

    Moves land at once, or with `lands` False never; whoever calls evict, load, publish or set_slots while a decode is in flight
    fails the test, as the library would refuse it."""

    n_rows: int = 2
    n_expert: int = 16
    table: np.ndarray = field(default_factory=lambda: np.zeros((2, 16), np.uint8))
    last: np.ndarray = field(default_factory=lambda: np.zeros((2, 16), np.int32))
    slots: list[int] = field(default_factory=lambda: [4, 4])
    sizes: list[int] = field(default_factory=lambda: [1000, 1000])
    lands: bool = True
    in_flight: bool = False
    log: list[str] = field(default_factory=list)
    threads: set[str] = field(default_factory=set)  # who called what is refused in flight
    loaders: set[str] = field(default_factory=set)
    readers: set[str] = field(default_factory=set)  # of the states
    n_calls: int = 0  # of evict_many and load_many
    ids: np.ndarray = field(default_factory=lambda: np.zeros((2, 1, 2), np.int32))

    def _touched(self, what: str) -> None:
        assert not self.in_flight, f"{what} while a decode is in flight"
        self.log.append(what)
        self.threads.add(threading.current_thread().name)

    def rows(self) -> list[FakeRow]:
        return [FakeRow(i, n, expert_bytes=b) for i, (n, b) in enumerate(zip(self.slots, self.sizes, strict=True))]

    def counts(self) -> np.ndarray:
        return self.last

    def choices(self) -> list[np.ndarray]:
        return [self.ids]

    def states_table(self) -> np.ndarray:
        self.readers.add(threading.current_thread().name)
        return self.table.copy()  # allowed at any time

    def set_slots(self, wanted: np.ndarray) -> None:
        self._touched("set_slots")
        assert np.dot(wanted, self.sizes) <= np.dot([4, 4], self.sizes), "more bytes than at the start"
        self.slots = [int(n) for n in wanted]
        for row, n in enumerate(self.slots):
            self.table[row, np.flatnonzero(self.table[row])[n:]] = native.COLD

    def evict(self, row: int, expert: int) -> None:
        self._touched("evict")
        assert self.table[row, expert] != native.COLD
        self.table[row, expert] = native.COLD

    def load(self, row: int, expert: int) -> None:
        self.log.append("load")  # allowed at any time
        self.loaders.add(threading.current_thread().name)
        assert (self.table[row] != native.COLD).sum() < self.slots[row]
        self.table[row, expert] = native.RESIDENT if self.lands else native.UPLOADING

    def evict_many(self, places: native.Places) -> int:
        return self._many(places, self.evict)

    def load_many(self, places: native.Places) -> int:
        return self._many(places, self.load)

    def _many(self, places: native.Places, one: Callable[[int, int], None]) -> int:
        self.n_calls += 1
        places.refused = {}
        for i in range(places.n):
            try:
                one(*places[i])
            except native.MoeError as error:
                places.refused[i] = error.status
        return places.n - len(places.refused)

    def publish(self) -> int:
        self._touched("publish")
        return 0

    def set_streaming(self, max_experts: int) -> None:
        self._touched("set_streaming")

    def set_look_ahead(self, max_experts: int, *, wrong: float) -> None:
        self._touched("set_look_ahead")

    def set_values(self, values: np.ndarray) -> None:
        assert values.shape == self.table.shape

    def sync(self) -> None:
        self.log.append("sync")
        self.table[self.table == native.UPLOADING] = native.RESIDENT

    def perf(self, row: int) -> native.Perf:
        return native.Perf()


class Ear:
    """Plans nothing and keeps what it hears."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.allowed: list[int] = []

    def observe(self, batch: Batch) -> None:
        self.batches.append(batch)

    def expect(self, tokens: Sequence[int]) -> None:
        pass

    def plan(self, resident: np.ndarray, limits: Limits) -> list[Move]:
        self.allowed.append(limits.max_moves)
        return []


@dataclass
class Bench:
    """Residencies whose threads end with the test."""

    made: list[Residency] = field(default_factory=list)

    def __call__(self, policy: Any, **options: Any) -> tuple[Residency, FakeExperts]:
        experts = FakeExperts()
        self.made.append(Residency(cast(native.Experts, experts), policy, **options))
        return self.made[-1], experts


@pytest.fixture
def residency_of() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    for residency in bench.made:
        residency.close()
        residency.close()


def decode(residency: Residency, experts: FakeExperts, rng: np.random.Generator, n: int = 1) -> None:
    """A decode of n random tokens, with the policy's thread running meanwhile, and its observation."""
    residency.publish()
    experts.in_flight = True
    time.sleep(0.001)
    experts.ids = np.stack([[rng.choice(16, 2, replace=False) for _ in range(n)] for _ in range(2)]).astype(np.int32)
    experts.in_flight = False
    residency.observe(rng.integers(0, 8, n).tolist())


def test_counts_alone_tell_how_many_tokens_were_decoded(residency_of: Bench) -> None:
    residency, experts = residency_of(ear := Ear())
    experts.last[0, :4] = 3  # 12 pairs, two experts a token
    experts.last[1, :2] = 1  # a last layer that saw one token only
    residency.step()
    residency.join()
    assert ear.batches[0].n_tokens == 6 and ear.batches[0].ids is None
    assert ear.batches[0].n_seen.tolist() == [6, 1]


def test_choices_of_the_last_decode_become_ids_by_token(residency_of: Bench) -> None:
    residency, experts = residency_of(ear := Ear())
    experts.ids = np.array([[[0, 1], [2, 3], [4, 5]], [[6, 7], [8, 9], [-1, -1]]], np.int32)  # [row, token, k]
    residency.observe([7, 8, 9], [True, True, False])
    experts.ids[:] = 15  # the next decode overwrites them
    residency.join()
    (batch,) = ear.batches
    assert batch.ids is not None and batch.ids.shape == (3, 2, 2) and batch.ids[1].tolist() == [[2, 3], [8, 9]]
    assert batch.counts[1].sum() == 4 and batch.last_accepted == 8


def test_a_prompt_of_several_ubatches_is_one_batch(residency_of: Bench) -> None:
    residency, experts = residency_of(ear := Ear())
    choices = np.zeros((2, 70, 2), np.int32)
    experts.choices = lambda: [choices[:, :50], choices[:, 50:]]  # type: ignore[method-assign]
    residency.observe(list(range(70)), starts=True)
    residency.join()
    assert [(b.n_tokens, b.starts) for b in ear.batches] == [(70, True)]


@pytest.mark.parametrize("overlap", [True, False])
def test_a_steps_moves_are_shared_out_over_its_drafts(residency_of: Bench, overlap: bool) -> None:
    residency, _ = residency_of(ear := Ear(), max_moves=10, overlap=overlap)
    residency.plan(n_expect=4)
    for token in range(4):
        residency.expect([token])
    residency.publish()
    assert ear.allowed == [2, 3, 5, 10]  # what is not used is left to the next
    residency.step()
    residency.join()
    assert ear.allowed[-1] == 10


@pytest.mark.parametrize("overlap", [True, False])
def test_a_step_with_drafts_makes_no_more_moves_than_it_may(residency_of: Bench, overlap: bool) -> None:
    rng = np.random.default_rng(0)
    residency, experts = residency_of(make("moe-spac", 2, 16), max_moves=3, overlap=overlap)
    for _ in range(40):
        before = residency.n_moves
        residency.plan(n_expect=3)
        for token in rng.integers(0, 8, 3):
            residency.expect([int(token)])
        decode(residency, experts, rng, 4)
        assert residency.n_moves - before <= 3
        assert ((experts.table == native.RESIDENT).sum(axis=1) <= 4).all()
    assert residency.n_moves > 40


def test_without_a_draft_the_thread_does_nothing_that_a_decode_in_flight_forbids(residency_of: Bench) -> None:
    rng = np.random.default_rng(0)
    residency, experts = residency_of(make("moe-spac", 2, 16), max_moves=3)
    for _ in range(40):
        residency.plan()
        decode(residency, experts, rng)
    residency.join()
    assert residency.n_moves > 20 and residency.worker_seconds > 0
    assert experts.threads == {threading.current_thread().name}
    assert experts.loaders == experts.readers == {"moespac-planner"}


def test_a_step_calls_the_library_once_to_evict_and_once_to_load(residency_of: Bench) -> None:
    rng = np.random.default_rng(0)
    residency, experts = residency_of(make("lru", 2, 16), max_moves=8)
    several = 0
    for _ in range(20):
        before, moved = experts.n_calls, residency.n_moves
        residency.plan()
        decode(residency, experts, rng, 3)
        residency.join()
        assert experts.n_calls - before <= 2
        several += residency.n_moves - moved > 2
    assert several > 5


@pytest.mark.parametrize("name", ["evict", "load"])
def test_a_move_that_is_refused_for_a_reason_that_no_plan_foresees_is_an_error(residency_of: Bench, name: str) -> None:
    residency, experts = residency_of(make("lru", 2, 16), max_moves=8, overlap=False)

    def refuse(row: int, expert: int) -> None:
        raise native.MoeError(-7, "no such row")

    setattr(experts, name, refuse)
    rng = np.random.default_rng(0)
    with pytest.raises(native.MoeError, match=rf"expert \d+ of row [01] cannot be {name}\w*: OUT_OF_RANGE") as error:
        for _ in range(10):
            residency.plan()
            decode(residency, experts, rng, 3)
    assert error.value.status == "OUT_OF_RANGE"


def test_with_a_draft_the_thread_starts_the_moves_before_the_decode(residency_of: Bench) -> None:
    rng = np.random.default_rng(0)
    residency, experts = residency_of(make("moe-spac", 2, 16), max_moves=3)
    for _ in range(10):
        experts.log.clear()
        residency.plan(n_expect=1)
        residency.expect([1])
        decode(residency, experts, rng, 2)
        assert experts.log[-1] == "publish"  # nothing came after it
    assert "moespac-planner" in experts.threads & experts.loaders


def test_overlapped_planning_is_the_inline_plan_one_batch_later(residency_of: Bench) -> None:
    """No draft: the moves that start after decode t are those that an inline plan would have started after decode t − 1."""
    tables: dict[bool, list[np.ndarray]] = {}
    for overlap in (True, False):
        rng = np.random.default_rng(0)
        residency, experts = residency_of(make("lru", 2, 16), max_moves=8, overlap=overlap)
        tables[overlap] = []
        for _ in range(20):
            residency.plan()
            decode(residency, experts, rng)
            residency.join()
            tables[overlap].append(residency.experts.states_table())
    for late, soon in zip(tables[True][1:], tables[False], strict=False):
        assert (late == soon).all()


@pytest.mark.parametrize("when", ["observe", "plan", "expect"])
def test_what_fails_in_the_thread_is_the_exception_of_the_step(residency_of: Bench, when: str) -> None:
    class Broken(Ear):
        def observe(self, batch: Batch) -> None:
            if when == "observe":
                raise ArithmeticError("observe")

        def expect(self, tokens: Sequence[int]) -> None:
            if when == "expect":
                raise ArithmeticError("expect")

        def plan(self, resident: np.ndarray, limits: Limits) -> list[Move]:
            if when == "plan":
                raise ArithmeticError("plan")
            return []

    rng = np.random.default_rng(0)
    residency, experts = residency_of(Broken())
    with pytest.raises(ArithmeticError, match=when):
        for _ in range(2):
            residency.plan(n_expect=int(when == "expect"))
            if when == "expect":
                residency.expect([1])
            decode(residency, experts, rng)
        residency.plan()


def test_after_a_draft_that_was_interrupted_the_thread_leaves_the_context_alone(residency_of: Bench) -> None:
    class Slow(Ear):
        def plan(self, resident: np.ndarray, limits: Limits) -> list[Move]:
            time.sleep(0.02)
            return [Move(0, int(np.flatnonzero(~resident[0])[0]), None, 1.0)] if limits.max_moves else []

    residency, experts = residency_of(Slow(), max_moves=3)
    residency.plan(n_expect=2)
    residency.expect([1])
    residency.expect([2])
    residency.rest()  # the draft failed here
    experts.in_flight = True  # the next text's prompt
    experts.loaders.clear()
    time.sleep(0.06)
    experts.in_flight = False
    assert not experts.loaders
    residency.observe([3])
    residency.plan()
    residency.publish()


def test_the_time_after_a_decode_that_failed_is_not_the_decodes(residency_of: Bench) -> None:
    residency, experts = residency_of(Ear())
    residency.plan()
    residency.publish()
    residency.rest()  # the decode failed
    time.sleep(0.05)
    residency.observe([1])  # the next text's prompt
    assert residency.window.decode_seconds is None
    residency.plan()
    decode(residency, experts, np.random.default_rng(0))
    assert residency.window.decode_seconds is not None


def test_a_closed_planner_says_so_instead_of_waiting_for_ever(residency_of: Bench) -> None:
    residency, experts = residency_of(Ear())
    decode(residency, experts, np.random.default_rng(0))
    residency.close()
    with pytest.raises(RuntimeError, match="has been closed"):
        residency.hot_set()


def test_a_failed_device_lane_ends_the_moves_but_not_the_generation(residency_of: Bench) -> None:
    residency, experts = residency_of(make("lru", 2, 16), max_moves=4)

    def refuse(row: int, expert: int) -> None:
        raise native.MoeError(-13, "the device lane failed")

    experts.load = refuse  # type: ignore[method-assign]
    experts.last[:, :4] = 1
    for _ in range(3):
        residency.step()
    assert residency.n_moves == 0 and residency.max_moves == 0


@pytest.mark.parametrize("status", [-10, -9])
@pytest.mark.parametrize("overlap", [True, False])
def test_uploads_that_find_no_slot_cost_nothing_but_the_move(residency_of: Bench, overlap: bool, status: int) -> None:
    """A withdrawn upload holds its slot until it has landed, and the plan that was made meanwhile takes it for resident; or the
    library itself has streamed the expert in since the plan."""
    rng = np.random.default_rng(0)
    residency, experts = residency_of(make("lru", 2, 16), max_moves=8, overlap=overlap)
    load, evict = experts.load, experts.evict

    def full(row: int, expert: int) -> None:
        if rng.random() < 0.5:
            raise native.MoeError(status, "no free slot, or resident already")
        load(row, expert)

    def missing(row: int, expert: int) -> None:
        if experts.table[row, expert] == native.COLD:
            raise native.MoeError(-11, "not resident")
        evict(row, expert)

    experts.load, experts.evict = full, missing  # type: ignore[method-assign]
    for _ in range(40):
        residency.plan()
        decode(residency, experts, rng)
        residency.join()
        assert ((experts.table != native.COLD).sum(axis=1) <= 4).all()
    assert residency.n_moves > 20


def test_sync_moves_waits_for_the_uploads_before_the_decode(residency_of: Bench) -> None:
    rng = np.random.default_rng(0)
    residency, experts = residency_of(make("lru", 2, 16), max_moves=8, sync_moves=True)
    experts.lands = False
    for _ in range(5):
        residency.plan()
        decode(residency, experts, rng)
        assert not (experts.table == native.UPLOADING).any()
        assert experts.log[-1] == "publish"
    assert residency.n_moves > 5 and residency.worker_seconds == 0


def test_moves_are_bounded_by_the_bytes_that_the_link_has_time_for(residency_of: Bench) -> None:
    """No cap given: the window is half of the decode time, and what is less than an expert is saved for the next step."""
    rng = np.random.default_rng(0)
    policy = make("lru", 2, 16)  # a policy that knows nothing of a link
    residency, experts = residency_of(policy)
    experts.sizes = [1000, 1000]
    before = 0
    for step in range(60):
        residency.window.decode_seconds = 1e-3
        residency.rates.link_bytes = 2.6e6  # 1.3 experts a step
        if step == 20:
            before = residency.n_moves
        residency.plan()
        residency.publish()
        experts.last = rng.multinomial(4, np.full(16, 1 / 16), 2).astype(np.int32)
        batch = residency._counted()
        residency._later(lambda batch=batch: policy.observe(batch))
        residency.join()
    assert 45 <= residency.n_moves - before <= 53  # 40 steps of 1.3


def test_a_busy_link_tells_its_rate_and_an_idle_one_does_not(residency_of: Bench) -> None:
    residency, _ = residency_of(Ear())
    window, rates = residency.window, residency.rates
    rates.link_bytes = 1.0
    window.started(0)
    window.on_the_way(0)
    assert rates.link_bytes == 1.0
    for _ in range(80):
        window.started(10_000)
        time.sleep(0.002)
        window.on_the_way(6_000)  # of what is queued all but 6,000 have landed
    assert rates.link_bytes == pytest.approx(10_000 / 0.002, rel=0.4)


def test_the_split_of_the_slots_follows_what_tau_wants_and_keeps_the_budget(
    residency_of: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 0 uses two experts, row 1 spreads over ten: slots wander, fewer but larger ones; the stand-in checks the bytes."""
    monkeypatch.setattr(slots, "EVERY", 8)
    rng = np.random.default_rng(0)
    residency, experts = residency_of(make("moe-spac", 2, 16), max_moves=8)
    residency.expert_bytes[:] = experts.sizes = [1000, 1500]
    for _ in range(200):
        residency.plan()
        residency.publish()
        wide = [rng.choice(10, 2, replace=False) for _ in range(4)]
        experts.ids = np.stack([[[0, 1]] * 4, wide]).astype(np.int32)
        residency.observe([1, 2, 3, 4])
    assert residency.n_resplits > 0
    assert residency.n_slots.tolist() == experts.slots == [2, 5]


def test_a_device_that_has_no_room_for_another_split_keeps_what_it_has(
    residency_of: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    residency, experts = residency_of(make("moe-spac", 2, 16))
    given = experts.set_slots

    def full(wanted: np.ndarray) -> None:
        given(np.minimum(wanted, experts.slots))
        if (wanted > experts.slots).any():
            raise native.MoeError(-6, "no memory")

    experts.set_slots = full  # type: ignore[method-assign]
    residency._follow_demand(np.array([1.0, 9.0]))
    assert residency.n_slots.tolist() == experts.slots == [3, 4] and not residency.resplit


def test_where_everything_is_resident_a_step_asks_the_policy_nothing(residency_of: Bench) -> None:
    residency, experts = residency_of(Ear())
    residency._slots_are(np.full(2, 16, np.int32))
    assert not residency.complete
    experts.table[:] = native.RESIDENT
    experts.table[1, 3] = native.UPLOADING
    assert not residency.complete
    experts.table[:] = native.RESIDENT
    assert residency.complete
    experts.log.clear()
    residency.observe([1])
    residency.plan(2)
    residency.expect([2])
    assert residency.publish() == 0
    residency.step()
    residency.join()
    assert experts.log == [] and residency.caller_seconds == 0.0
