"""Every policy asks only for moves that can be made and are worth making."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from moespac_llamacpp.policies import NAMES, Batch, Decayed, Limits, Move, Policy, Static, make

N_ROWS, N_EXPERT = 5, 16


def counts_of(**rows: dict[int, int]) -> Batch:
    """counts_of(r2={7: 3}): a batch of one token of which only counts are known; expert 7 of row 2 was chosen three times."""
    counts = np.zeros((N_ROWS, N_EXPERT), np.int32)
    for name, row in rows.items():
        for expert, n in row.items():
            counts[int(name[1:]), expert] = n
    return Batch(counts, 1)


def nobody() -> np.ndarray:
    return np.zeros((N_ROWS, N_EXPERT), np.bool_)


def slots(n: int) -> np.ndarray:
    return np.full(N_ROWS, n, np.int32)


def apply(moves: list[Move], resident: np.ndarray) -> None:
    for move in moves:
        if move.victim is not None:
            assert resident[move.row, move.victim], "the victim is not resident"
            resident[move.row, move.victim] = False
        assert not resident[move.row, move.expert], "the expert is resident already"
        resident[move.row, move.expert] = True


def random_batch(rng: np.random.Generator, popular: np.ndarray, what: str) -> Batch:
    """what: which of a batch is known: 'counts', 'ids' or 'tokens'."""
    n, k = int(rng.integers(1, 10)), 3
    ids = np.stack([[rng.choice(N_EXPERT, k, replace=False, p=p) for p in popular] for _ in range(n)])
    accepted = np.arange(n) < rng.integers(1, n + 1)
    tokens = rng.integers(0, 20, n)
    full = Batch.from_ids(ids, N_EXPERT, tokens=tokens, accepted=accepted, starts=bool(rng.random() < 0.1))
    if what == "tokens":
        return full
    return Batch.from_ids(ids, N_EXPERT) if what == "ids" else Batch(full.counts, n)


Run = tuple[Policy, np.ndarray, Limits]


def random_runs(name: str, n_runs: int = 6, n_steps: int = 25) -> Iterator[Run]:
    """(policy that has observed, resident, limits), while the moves are carried out by whoever asks."""
    for seed in range(n_runs):
        rng = np.random.default_rng(seed)
        n_slots = rng.integers(0, N_EXPERT + 1, N_ROWS).astype(np.int32)
        resident = nobody()
        popular = rng.dirichlet(np.full(N_EXPERT, 0.3), N_ROWS) * 0.9 + 0.1 / N_EXPERT
        policy = make(name, N_ROWS, N_EXPERT, profile=popular if name in ("static", "fiddler") else None)
        for _ in range(n_steps):
            policy.observe(random_batch(rng, popular, ("counts", "ids", "tokens")[seed % 3]))
            yield policy, resident, Limits(n_slots, int(rng.integers(0, 12)))
            if seed % 2:
                policy.expect(rng.integers(0, 20, 3).tolist())
                yield policy, resident, Limits(n_slots, int(rng.integers(0, 12)), window=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_can_be_carried_out_and_never_exceeds_slots_or_cap(name: str) -> None:
    n_moves = 0
    for policy, resident, limits in random_runs(name):
        moves = policy.plan(resident, limits)
        assert len(moves) <= limits.max_moves
        assert not {(m.row, m.expert) for m in moves} & {(m.row, m.victim) for m in moves}
        assert [m.gain for m in moves] == sorted((m.gain for m in moves), reverse=True)
        apply(moves, resident)
        assert (resident.sum(axis=1) <= limits.n_slots).all()
        n_moves += len(moves)
    # the released constants hardly ever rise in batches of up to nine random tokens
    assert n_moves > (0 if name == "moe-spac-released" else 30)


@pytest.mark.parametrize("name", NAMES)
def test_the_same_batches_give_the_same_plan_and_planning_changes_nothing(name: str) -> None:
    for (a, resident_a, limits), (b, resident_b, _) in zip(random_runs(name, 3), random_runs(name, 3), strict=True):
        before = resident_a.copy()
        moves = a.plan(resident_a, limits)
        assert moves == b.plan(resident_b, limits) == a.plan(resident_a, limits)
        assert (resident_a == before).all()
        apply(moves, resident_a)
        apply(moves, resident_b)


def test_a_policy_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(ValueError, match="no policy 'magic'; there are static, lru"):
        make("magic", N_ROWS, N_EXPERT)


def test_nobody_is_evicted_for_less_than_the_hysteresis() -> None:
    n_swaps = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        policy = Decayed(N_ROWS, N_EXPERT, decay=float(rng.uniform(0.5, 1)), hysteresis=float(rng.uniform(0, 3)))
        n_slots = rng.integers(0, N_EXPERT + 1, N_ROWS).astype(np.int32)
        resident = nobody()
        popular = rng.dirichlet(np.full(N_EXPERT, 0.3), N_ROWS)
        for _ in range(30):
            counts = np.stack([rng.multinomial(int(rng.integers(1, 20)), p) for p in popular]).astype(np.int32)
            policy.observe(Batch(counts, 1))
            moves = policy.plan(resident, Limits(n_slots, int(rng.integers(0, 12))))
            for move in moves:
                if move.victim is not None:
                    gain = policy.score[move.row, move.expert] - policy.score[move.row, move.victim]
                    assert gain == move.gain > policy.hysteresis
                    n_swaps += 1
                else:
                    assert resident[move.row].sum() < n_slots[move.row]
                    assert move.gain == policy.score[move.row, move.expert] > 0
            apply(moves, resident)
    assert n_swaps > 50


def test_lru_takes_the_later_token_then_the_better_rank() -> None:
    policy = make("lru", 1, 8)
    policy.observe(Batch.from_ids(np.array([[[0, 1]], [[2, 3]]]), 8))
    moves = policy.plan(np.zeros((1, 8), np.bool_), Limits(np.array([4], np.int32), 9))
    assert [m.expert for m in moves] == [2, 3, 0, 1]


def test_moe_infinity_recalls_the_sequence_that_was_like_this_one() -> None:
    policy = make("moe-infinity", 1, 8)
    for first, then in ((0, 4), (1, 5), (2, 6)):
        policy.observe(Batch.from_ids(np.array([[[first]]]), 8, starts=True))
        policy.observe(Batch.from_ids(np.array([[[then]]]), 8))
    policy.observe(Batch.from_ids(np.array([[[1]]]), 8, starts=True))
    moves = policy.plan(np.zeros((1, 8), np.bool_), Limits(np.array([2], np.int32), 9))
    assert [m.expert for m in moves] == [1, 5]


def test_planning_48_layers_of_128_experts_takes_no_millisecond(capsys: pytest.CaptureFixture[str]) -> None:
    """Prints the times; asserts ten times the promise, since the machine is shared."""
    rng = np.random.default_rng(0)
    popular = rng.dirichlet(np.full(128, 0.3), 48)
    policy = make("moe-spac", 48, 128)
    resident = np.zeros((48, 128), np.bool_)
    resident[:, :32] = True
    limits = Limits(np.full(48, 32, np.int32), 60, window=4e-3)
    times: dict[str, list[float]] = {"observe": [], "plan": [], "expect and plan": []}

    def timed(name: str, call: Callable[[], object]) -> object:
        start = time.perf_counter()
        result = call()
        times[name].append(time.perf_counter() - start)
        return result

    for _ in range(60):
        ids = np.stack([rng.choice(128, (48, 8)) for _ in range(9)])
        ids[:, :, 0] = popular.argmax(axis=1)
        batch = Batch.from_ids(ids, 128, tokens=rng.integers(0, 40, 9))
        timed("observe", lambda batch=batch: policy.observe(batch))
        apply(timed("plan", lambda: policy.plan(resident, limits)), resident)
        tokens = rng.integers(0, 40, 9).tolist()
        moves = timed(
            "expect and plan", lambda tokens=tokens: (policy.expect(tokens), policy.plan(resident, limits))[1]
        )
        apply(moves, resident)
    with capsys.disabled():
        print("\n" + ", ".join(f"{name} {1e3 * np.median(t):.2f} ms" for name, t in times.items()), end=" ")
    assert np.median(times["plan"]) < 0.01 and np.median(times["expect and plan"]) < 0.01


def test_free_slots_take_the_most_frequent_experts() -> None:
    policy = Decayed(N_ROWS, N_EXPERT)
    policy.observe(counts_of(r1={3: 5, 4: 1, 9: 7}, r2={0: 2}))
    moves = policy.plan(nobody(), Limits(slots(2), 60))
    assert [(m.row, m.expert, m.victim) for m in moves] == [(1, 9, None), (1, 3, None), (2, 0, None)]
    assert policy.plan(nobody(), Limits(slots(2), 1)) == moves[:1]
    assert policy.plan(nobody(), Limits(slots(0), 60)) == []


def test_an_expert_that_nobody_chose_is_not_loaded() -> None:
    policy = Decayed(N_ROWS, N_EXPERT)
    assert policy.plan(nobody(), Limits(slots(4), 60)) == []


def test_the_least_frequent_resident_leaves_first() -> None:
    policy = Decayed(N_ROWS, N_EXPERT, hysteresis=1.5)
    resident = nobody()
    resident[0, [1, 2]] = True
    policy.observe(counts_of(r0={1: 3, 2: 1, 5: 9, 6: 2}))
    (move,) = policy.plan(resident, Limits(slots(2), 60))
    assert (move.row, move.expert, move.victim, move.gain) == (0, 5, 2, 8.0)


@pytest.mark.parametrize(("count", "moves"), [(2, 0), (3, 1)])
def test_a_swap_must_gain_more_than_the_hysteresis(count: int, moves: int) -> None:
    policy = Decayed(N_ROWS, N_EXPERT, hysteresis=1.0)
    resident = nobody()
    resident[0, 1] = True
    policy.observe(counts_of(r0={1: 1, 5: count}))
    assert len(policy.plan(resident, Limits(slots(1), 60))) == moves


def test_what_was_frequent_long_ago_fades() -> None:
    policy = Decayed(N_ROWS, N_EXPERT, decay=0.5, hysteresis=0.0)
    policy.observe(counts_of(r0={1: 8}))
    for _ in range(3):
        policy.observe(counts_of(r0={2: 1}))
    assert policy.score[0, 1] == 1.0 and policy.score[0, 2] == 1.75
    resident = nobody()
    resident[0, 1] = True
    assert [(m.expert, m.victim) for m in policy.plan(resident, Limits(slots(1), 60))] == [(2, 1)]


def test_static_keeps_what_is_resident() -> None:
    policy = Static()
    policy.observe(counts_of(r0={1: 100}))
    assert policy.plan(nobody(), Limits(slots(4), 60)) == []
