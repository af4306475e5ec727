"""Policies ask only for moves that can be made and are worth making."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from moespac_llamacpp.policies import Decayed, Move, Static

N_ROWS, N_EXPERT = 5, 16


def counts_of(**rows: dict[int, int]) -> np.ndarray:
    """counts_of(r2={7: 3}): expert 7 of row 2 was chosen three times."""
    counts = np.zeros((N_ROWS, N_EXPERT), np.int32)
    for name, row in rows.items():
        for expert, n in row.items():
            counts[int(name[1:]), expert] = n
    return counts


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


def random_runs(n_runs: int = 20, n_steps: int = 30) -> Iterator[tuple[Decayed, np.ndarray, np.ndarray, int]]:
    """(policy after observing, resident, n_slots, max_moves), while the moves are carried out."""
    for seed in range(n_runs):
        rng = np.random.default_rng(seed)
        policy = Decayed(N_ROWS, N_EXPERT, decay=float(rng.uniform(0.5, 1)), hysteresis=float(rng.uniform(0, 3)))
        n_slots = rng.integers(0, N_EXPERT + 1, N_ROWS).astype(np.int32)
        resident = nobody()
        popular = rng.dirichlet(np.full(N_EXPERT, 0.3), N_ROWS)
        for _ in range(n_steps):
            policy.observe(np.stack([rng.multinomial(int(rng.integers(1, 20)), p) for p in popular]).astype(np.int32))
            yield policy, resident, n_slots, int(rng.integers(0, 12))


def test_a_plan_can_be_carried_out_and_never_exceeds_the_slots() -> None:
    n_moves = n_swaps = 0
    for policy, resident, n_slots, max_moves in random_runs():
        moves = policy.plan(resident, n_slots, max_moves)
        assert len(moves) <= max_moves
        apply(moves, resident)
        assert (resident.sum(axis=1) <= n_slots).all()
        n_moves += len(moves)
        n_swaps += sum(m.victim is not None for m in moves)
    assert n_moves > 500 and n_swaps > 50


def test_nobody_is_evicted_for_less_than_the_hysteresis() -> None:
    n_swaps = 0
    for policy, resident, n_slots, max_moves in random_runs():
        moves = policy.plan(resident, n_slots, max_moves)
        for move in moves:
            if move.victim is not None:
                gain = policy.score[move.row, move.expert] - policy.score[move.row, move.victim]
                assert gain == move.gain > policy.hysteresis
                n_swaps += 1
            else:
                assert resident[move.row].sum() < n_slots[move.row]
                assert move.gain == policy.score[move.row, move.expert] > 0
        assert [m.gain for m in moves] == sorted((m.gain for m in moves), reverse=True)
        apply(moves, resident)
    assert n_swaps > 50


def test_the_same_counts_give_the_same_plan() -> None:
    first, second = random_runs(5), random_runs(5)
    for (a, resident_a, n_slots, limit), (b, resident_b, _, _) in zip(first, second, strict=True):
        before = resident_a.copy()
        moves = a.plan(resident_a, n_slots, limit)
        assert moves == b.plan(resident_b, n_slots, limit) == a.plan(resident_a, n_slots, limit)
        assert (resident_a == before).all()  # planning changes nothing
        apply(moves, resident_a)
        apply(moves, resident_b)


def test_free_slots_take_the_most_frequent_experts() -> None:
    policy = Decayed(N_ROWS, N_EXPERT)
    policy.observe(counts_of(r1={3: 5, 4: 1, 9: 7}, r2={0: 2}))
    moves = policy.plan(nobody(), slots(2), 60)
    assert [(m.row, m.expert, m.victim) for m in moves] == [(1, 9, None), (1, 3, None), (2, 0, None)]
    assert policy.plan(nobody(), slots(2), 1) == moves[:1]
    assert policy.plan(nobody(), slots(0), 60) == []


def test_an_expert_that_nobody_chose_is_not_loaded() -> None:
    policy = Decayed(N_ROWS, N_EXPERT)
    assert policy.plan(nobody(), slots(4), 60) == []


def test_the_least_frequent_resident_leaves_first() -> None:
    policy = Decayed(N_ROWS, N_EXPERT, hysteresis=1.5)
    resident = nobody()
    resident[0, [1, 2]] = True
    policy.observe(counts_of(r0={1: 3, 2: 1, 5: 9, 6: 2}))
    (move,) = policy.plan(resident, slots(2), 60)
    assert (move.row, move.expert, move.victim, move.gain) == (0, 5, 2, 8.0)


@pytest.mark.parametrize(("count", "moves"), [(2, 0), (3, 1)])
def test_a_swap_must_gain_more_than_the_hysteresis(count: int, moves: int) -> None:
    policy = Decayed(N_ROWS, N_EXPERT, hysteresis=1.0)
    resident = nobody()
    resident[0, 1] = True
    policy.observe(counts_of(r0={1: 1, 5: count}))
    assert len(policy.plan(resident, slots(1), 60)) == moves


def test_what_was_frequent_long_ago_fades() -> None:
    policy = Decayed(N_ROWS, N_EXPERT, decay=0.5, hysteresis=0.0)
    policy.observe(counts_of(r0={1: 8}))
    for _ in range(3):
        policy.observe(counts_of(r0={2: 1}))
    assert policy.score[0, 1] == 1.0 and policy.score[0, 2] == 1.75
    resident = nobody()
    resident[0, 1] = True
    assert [(m.expert, m.victim) for m in policy.plan(resident, slots(1), 60)] == [(2, 1)]


def test_static_keeps_what_is_resident() -> None:
    policy = Static()
    policy.observe(counts_of(r0={1: 100}))
    assert policy.plan(nobody(), slots(4), 60) == []
