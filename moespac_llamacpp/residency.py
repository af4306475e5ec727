"""Runs a policy against the native layer: observe a decode, plan, start moves, publish what has landed.

Where the work is done. Observing and planning take half a millisecond for 48 layers of 128 experts, so they run in a thread
of their own (worker.py) while the caller waits in the library:

- While a draft model guesses, the thread observes the last decode, plans with each token that becomes known and starts the
  moves. The target's context is idle then, and `publish` waits for the thread before it is used again.
- Without a draft that takes time, the thread observes and plans while the target decodes. `plan`, after the decode, evicts
  the victims of that plan; the thread starts its uploads while the next decode runs (the library allows `load` then, and to
  ask for the states, and nothing else that concerns moves). So what one batch taught starts one batch later than it could.

A step waits for the caller's part only: copying the choices, one call that evicts, one that publishes, one that wakes the
thread. Whatever else there is to be done, down to the lists for the library, is the thread's.

Jobs are handed over right before the caller enters the library for long, not before: until then the two threads would fight for
Python's lock, which every short call into the library gives away.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from moespac_llamacpp import native, slots
from moespac_llamacpp.balancer import Rates
from moespac_llamacpp.hotset import HotSet
from moespac_llamacpp.memory import BlockSize
from moespac_llamacpp.metering import EVERY as METER_EVERY
from moespac_llamacpp.metering import Meter
from moespac_llamacpp.planning import Valued, Warm, within
from moespac_llamacpp.policies import Batch, Limits, Move, Policy
from moespac_llamacpp.spac import MoeSpac
from moespac_llamacpp.window import LinkWindow
from moespac_llamacpp.worker import Job, Worker

#: Experts of a layer that a decode may stream, see native.Experts.set_streaming.
STREAM_EXPERTS = 8
#: Experts of a layer that may be brought before it begins, see native.Experts.set_look_ahead.
LOOK_AHEAD = 8
#: Less than this says nothing of a link's rate.
MEASURABLE_BYTES = 1 << 20


@dataclass(frozen=True)
class Swaps:
    """The moves of a plan, as the library takes them: made where the plan was made. n_bytes: what they upload."""

    moves: list[Move]
    victims: native.Places
    wanted: native.Places
    n_bytes: int


def block_sizes(experts: native.Experts) -> list[BlockSize]:
    """What the memory plan needs, one entry for each of the n_rows rows."""
    rows = {r.row: r for r in experts.rows()}
    empty = BlockSize(n_expert=0, expert_bytes=0, hybrid=False)
    return [
        BlockSize(rows[i].n_expert, rows[i].expert_bytes, rows[i].hybrid) if i in rows else empty
        for i in range(experts.n_rows)
    ]


class Residency:
    """Moves experts as a policy asks.

    Who knows the tokens calls `observe` after a decode, `plan` before the next one, `expect` with each token that becomes known
    while a draft goes on, and `publish` right before the decode. `step` is all of it for who only decodes.
    `rest` comes after a step that ended in between. `close` ends the thread; call it before the context is freed. What fails in
    the thread is raised by the next call.

    n_moves: uploads started. caller_seconds, worker_seconds: what it all took in the caller's thread (waiting for the other one
    included), and in the other one."""

    def __init__(
        self,
        experts: native.Experts,
        policy: Policy,
        *,
        max_moves: int | None = None,
        overlap: bool = True,
        sync_moves: bool = False,
        resplit: bool = True,
        stream_experts: int = STREAM_EXPERTS,
        look_ahead: int = LOOK_AHEAD,
        wrong_guesses: float = 0.0,
    ) -> None:
        """max_moves: for one plan and what is expected after it together; None: what the link has time for (window.py).
        overlap False: all of it in the caller's thread, the moves of a plan started at once. sync_moves: the ablation without
        asynchrony, in which the step waits for its moves (and nothing overlaps). resplit False: layers keep their slots.
        stream_experts: so many experts of a layer may cross the link in the middle of a decode, where the execution can do that
        and the policy says which residents make room (planning.Valued). look_ahead: and so many while the layer before is
        computed; wrong_guesses: for measurements (native.Experts.set_look_ahead)."""
        self.experts = experts
        self.policy = policy
        self.max_moves = max_moves
        self.sync_moves = sync_moves
        self.overlap = overlap and not sync_moves
        self.resplit = resplit
        self.n_moves = 0
        self.n_resplits = 0
        self.caller_seconds = 0.0
        rows = experts.rows()
        self.n_slots = np.zeros(experts.n_rows, np.int32)
        self.n_expert = np.zeros(experts.n_rows, np.int32)
        self.n_used = np.ones(experts.n_rows, np.int32)  # experts per token of each row
        self.expert_bytes = np.ones(experts.n_rows, np.int64)
        for row in rows:
            self.n_slots[row.row] = row.n_slots
            self.n_expert[row.row] = row.n_expert
            self.n_used[row.row] = max(1, row.n_expert_used)
            self.expert_bytes[row.row] = max(1, row.expert_bytes)
        self._bytes_of: list[int] = self.expert_bytes.tolist()
        self._largest = float(self.expert_bytes.max())
        self._slots_are(self.n_slots)
        self.rates = policy.rates if isinstance(policy, MoeSpac) else Rates()
        self.window = LinkWindow(self.rates)
        self._meter = Meter(experts)
        self._worker = Worker()
        self._jobs: list[Callable[[], None]] = []  # not handed over yet
        self._asked = False  # a plan shall be made while the target decodes
        self._ahead: Job[Swaps] | None = None  # the plan that was made while it did
        self._nothing = self._swaps([])
        self._to_load = self._nothing  # the uploads to be started while it does
        self._loading: Job[None] | None = None
        self._before: tuple[NDArray[np.uint8], Limits] | None = None  # what the plan to be made starts from
        self._drafting = False
        self._plans_left = 0
        self._moves_left: int = 0
        self._bytes_left = 0.0
        self._n_plans = 0
        self._complete = False
        valued = isinstance(policy, Valued)
        self.stream_experts = stream_experts if valued else 0
        self.look_ahead = look_ahead if valued else 0
        self.wrong_guesses = wrong_guesses
        self._stream(True)

    @property
    def complete(self) -> bool:
        """Is every expert resident? Then there is nothing to observe and nothing to plan, and a step costs nothing."""
        if not self._complete and self._room_for_all:
            here = self.experts.states_table() == native.RESIDENT
            self._complete = int(here.sum()) == int(self.n_expert.sum())
        return self._complete

    @property
    def worker_seconds(self) -> float:
        return self._worker.seconds

    def fill(self, hot: HotSet | None = None, progress: Callable[[float], None] | None = None) -> None:
        """Uploads what the slots start with and waits for it: the hot set, or without one the first experts of each layer.

        The policy starts from the hot set too, where it can. Measures the link. progress: called with 0 … 1."""
        if hot is not None and hot.use is not None and isinstance(self.policy, Warm):
            self.policy.seed(hot.use)
        total = max(1, int(self.n_slots @ self.expert_bytes))
        done, n_bytes, start, here = 0, 0, time.perf_counter(), self.experts.states_table() != native.COLD
        for row in np.flatnonzero(self.n_slots).tolist():
            n, n_expert = int(self.n_slots[row]), int(self.n_expert[row])
            wanted = set(range(n) if hot is None else hot.best(row, n, n_expert))
            present = set(np.flatnonzero(here[row]).tolist())
            for expert in sorted(present - wanted):
                self.experts.evict(row, expert)
            for expert in sorted(wanted - present):
                self.experts.load(row, expert)
                n_bytes += int(self.expert_bytes[row])
            self.experts.sync()  # row by row, so that the progress is that of the uploads
            done += n * int(self.expert_bytes[row])
            if progress:
                progress(done / total)
        self.experts.publish()
        if n_bytes >= MEASURABLE_BYTES:
            self.rates.link_bytes = n_bytes / (time.perf_counter() - start)

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Decodes in it leave the residents as they are."""
        self._stream(False)
        try:
            yield
        finally:
            self._stream(True)

    def _stream(self, on: bool) -> None:
        self.experts.set_streaming(self.stream_experts if on else 0)
        self.experts.set_look_ahead(self.look_ahead if on else 0, wrong=self.wrong_guesses)

    def hot_set(self) -> HotSet:
        """What another run may start with."""
        self.join()
        use = self.policy.use() if isinstance(self.policy, Warm) else None
        return HotSet(self.experts.states_table() != native.COLD, use)

    def step(self) -> None:
        """Observes the last decode by its counts and starts moves. What has landed becomes visible."""
        if self.complete:
            return
        start = time.perf_counter()
        self.window.decoded()
        batch = self._counted()
        self._later(lambda: self.policy.observe(batch))
        self.caller_seconds += time.perf_counter() - start
        self.plan()
        self.publish()

    def observe(self, tokens: Sequence[int], accepted: Sequence[bool] | None = None, *, starts: bool = False) -> None:
        """Tells the policy of the decode of these tokens, with the experts that each of them chose.

        ValueError, raised by a later call: tokens or accepted have another length than the decode."""
        if self.complete:
            return
        start = time.perf_counter()
        self.window.decoded()
        if self._loading is not None:
            self._loading.wait()  # ended long ago; from here the thread does nothing with the context
        self._hand_over()  # of a prompt in several pieces, one at most is kept
        parts = self.experts.choices()  # copied: the next decode overwrites them
        choices = parts[0].copy() if len(parts) == 1 else np.concatenate(parts, axis=1)
        n_expert = self.experts.n_expert
        self._later(
            lambda: self.policy.observe(
                Batch.from_ids(choices.swapaxes(0, 1), n_expert, tokens=tokens, accepted=accepted, starts=starts)
            )
        )
        self.caller_seconds += time.perf_counter() - start

    def plan(self, n_expect: int = 0) -> None:
        """Starts a step's moves. n_expect: starts none, but lets so many calls of `expect` share them.

        Expect tokens only if time passes before their decode: what lands after it was planned for the wrong batch."""
        if self.complete:
            return
        start = time.perf_counter()
        if self._drafting:
            self._worker.join()  # a draft that was interrupted
        if self._loading is not None:
            self._loading.wait()  # ended long ago, unless the decode was not observed
        planned, self._ahead, self._asked = self._ahead, None, False
        self._drafting = n_expect > 0
        if planned is None or self._drafting:  # a newer plan is about to be made
            self._worker.check()
            swaps = self._nothing
        else:
            self._worker.join()  # ended long ago
            swaps = planned.result()
            self._evict(swaps)
        self._look_around()
        self.window.planned()
        if self._drafting:
            self._share_out(n_expect)
        elif self.overlap:
            self._asked, self._to_load = True, swaps
        else:
            self._look()
            self._start(self._planned(swaps))
        self.caller_seconds += time.perf_counter() - start

    def expect(self, tokens: Sequence[int]) -> None:
        """Tokens that the next decode will have, in order, the last accepted one first; starts moves."""
        if self.complete:
            return
        start = time.perf_counter()
        self._later(lambda: self._expect(tokens))
        self._hand_over()
        self.caller_seconds += time.perf_counter() - start

    def publish(self) -> int:
        """Makes what has landed visible, returns how many; to be called right before a decode. Waits for no upload, unless
        `sync_moves`."""
        if self.complete and not self._jobs and not self._asked and not self._drafting:
            return 0
        start = time.perf_counter()
        if self._drafting:
            self._worker.join()  # its moves have started: nobody but the decode uses the context from here
            self.window.drafted()
            self._drafting = False
        if self.sync_moves:
            self.experts.sync()
        n = self.experts.publish()
        self.window.decodes()
        if self._asked:
            self._asked, jobs, swaps = False, self._jobs, self._to_load
            self._jobs = []
            self._loading, self._ahead = self._worker.submit_both(
                partial(self._begin, swaps), partial(self._go_on, jobs, swaps)
            )
        self.caller_seconds += time.perf_counter() - start
        return n

    def rest(self) -> None:
        """Waits until the thread does nothing with the context, wherever the step ended. Raises nothing."""
        self._worker.wait()
        self.window.ended()

    def join(self) -> None:
        """Waits until the policy has heard and planned everything; raises what failed there."""
        self._hand_over()
        self._worker.join()

    def close(self) -> None:
        """May be called twice."""
        self._worker.close()

    def _later(self, call: Callable[[], None]) -> None:
        if self.overlap:
            self._jobs.append(call)
        else:
            call()

    def _hand_over(self) -> None:
        self._worker.check()
        for job in self._jobs:
            self._worker.submit(job)
        self._jobs.clear()

    def _counted(self) -> Batch:
        """The last decode where only counts are known."""
        counts = self.experts.counts().copy()
        seen = counts.sum(axis=1) // self.n_used
        return Batch(counts, int(seen.max(initial=0)), seen=seen)

    def _look_around(self) -> None:
        """Every few steps, between two decodes: what the layers' work costs now, and whose slots are too few."""
        self._n_plans += 1
        if self._n_plans % METER_EVERY == 0:
            sample = self._meter.sample()
            self._later(lambda: sample.track(self.rates))
        if self.resplit and self._n_plans % slots.EVERY == 0 and isinstance(self.policy, MoeSpac):
            demand = self.policy.demand()
            if demand is not None:
                self._follow_demand(demand)

    def _follow_demand(self, demand: NDArray[np.float64]) -> None:
        split = slots.resplit(self.n_slots, demand, self.expert_bytes, self.n_expert)
        if split is None:
            return
        try:
            # what shrinks first: never more bytes than there were
            self.experts.set_slots(np.minimum(self.n_slots, split))
            self.experts.set_slots(split)
            self.n_resplits += 1
        except native.MoeError as error:
            if error.status != "NO_DEVICE_MEMORY":
                raise
            self.resplit = False  # another user of the device took what had been freed
        after = self.n_slots.copy()
        for row in self.experts.rows():
            after[row.row] = row.n_slots
        self._slots_are(after)

    def _slots_are(self, n_slots: NDArray[np.int32]) -> None:
        self.n_slots = n_slots
        self._room_for_all = bool((n_slots >= self.n_expert).all())

    def _share_out(self, n_plans: int) -> None:
        """What the coming step may move, for so many plans together. Less than an expert is saved for the next step."""
        saved = min(max(0.0, self._bytes_left), self._largest)
        self._plans_left = n_plans
        self._moves_left, n_bytes = self.window.budget(self._drafting)
        self._bytes_left = n_bytes + saved
        if self.max_moves is not None:
            self._moves_left, self._bytes_left = self.max_moves, np.inf

    def _limits(self) -> Limits:
        """The next plan's share of the step's moves."""
        n = max(1, self._plans_left)
        self._plans_left -= 1
        seconds = None if self._bytes_left == np.inf else self._bytes_left / n / self.rates.link_bytes
        late = not self._drafting and not self.sync_moves
        return Limits(self.n_slots, self._moves_left // n, seconds, self.expert_bytes, late)

    def _expect(self, tokens: Sequence[int]) -> None:
        self.policy.expect(tokens)
        self._before = self.experts.states_table(), self._limits()
        self._start(self._planned(self._nothing))

    def _look(self) -> None:
        """What is where, and what the plan to be made may move."""
        self._share_out(1)
        self._before = self.experts.states_table(), self._limits()

    def _begin(self, swaps: Swaps) -> None:
        """The thread's first job during a decode, for which the caller waits before it does anything else."""
        self._look()
        self._load(swaps)

    def _go_on(self, jobs: list[Callable[[], None]], started: Swaps) -> Swaps:
        """Its second: hears of the last decode, and plans."""
        for job in jobs:
            job()
        return self._planned(started)

    def _planned(self, started: Swaps) -> Swaps:
        """A plan by what `_before` holds, as it was before the uploads of `started`."""
        assert self._before is not None
        states, limits = self._before
        for move in started.moves:
            states[move.row, move.expert] = native.UPLOADING
        self.window.on_the_way(float(np.count_nonzero(states == native.UPLOADING, axis=1) @ self.expert_bytes))
        resident = states != native.COLD
        moves = self.policy.plan(resident, limits)
        worth = self.policy.worth() if isinstance(self.policy, Valued) else None
        if worth is not None:
            self.experts.set_values(worth)
        if limits.window is not None:  # also for policies that know nothing of a link
            moves = within(moves, self.expert_bytes, limits.window * self.rates.link_bytes)
        return self._swaps(moves)

    def _swaps(self, moves: list[Move]) -> Swaps:
        return Swaps(
            moves,
            native.Places([(m.row, m.victim) for m in moves if m.victim is not None]),
            native.Places([(m.row, m.expert) for m in moves]),
            sum([self._bytes_of[m.row] for m in moves]),
        )

    def _start(self, swaps: Swaps) -> None:
        self._evict(swaps)
        self._load(swaps)

    def _evict(self, swaps: Swaps) -> None:
        """Makes room; not while a decode is in flight."""
        if swaps.victims.n and self.experts.evict_many(swaps.victims) < swaps.victims.n:
            # planned before it was known that its own upload had found no slot: there is nothing to evict
            _only(swaps.victims, "evicted", "NOT_RESIDENT")
        self._moves_left -= len(swaps.moves)
        self._bytes_left -= swaps.n_bytes

    def _load(self, swaps: Swaps) -> None:
        """Starts the uploads; also while a decode is in flight."""
        wanted, n_bytes = swaps.wanted, swaps.n_bytes
        if not wanted.n:
            return
        n_done = self.experts.load_many(wanted)
        self.n_moves += n_done
        if n_done < wanted.n:
            n_bytes -= sum([self._bytes_of[wanted[i][0]] for i in wanted.refused])
            # a withdrawn upload holds its slot until it has landed: the next plan will ask again; and whoever else moves
            # experts may have loaded this one since it was planned
            _only(wanted, "loaded", "NO_FREE_SLOT", "ALREADY_RESIDENT", "FAILED")
            if "FAILED" in wanted.refused.values():  # the device lane takes no more; generation goes on without it
                self.max_moves = self._moves_left = 0
        self.window.started(n_bytes)


def _only(places: native.Places, what: str, *expected: str) -> None:
    """MoeError: one of the places was refused for another reason than these."""
    for i, status in places.refused.items():
        if status not in expected:
            row, expert = places[i]
            raise native.MoeError(status, f"expert {expert} of row {row} cannot be {what}: {status}")
