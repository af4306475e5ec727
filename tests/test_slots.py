"""Slots go to the layers that need them, slowly, and never take more bytes than they had."""

from __future__ import annotations

import numpy as np
import pytest

from moespac_llamacpp import simulate, slots
from moespac_llamacpp.planning import Batch
from moespac_llamacpp.policies import make
from moespac_llamacpp.simulate import Step, replay
from moespac_llamacpp.slots import MAX_GAIN, MAX_ROWS, Demand, resplit


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_a_split_keeps_the_budget_and_wanders_to_the_demand() -> None:
    rng = np.random.default_rng(0)
    n_changes = 0
    for _ in range(300):
        n_rows = int(rng.integers(2, 10))
        n_expert = rng.integers(4, 65, n_rows).astype(np.int32)
        split = (n_expert * rng.uniform(0, 1, n_rows)).astype(np.int32)
        sizes = rng.integers(50, 150, n_rows)
        demand = rng.uniform(0, n_expert)
        budget = int(split @ sizes)
        for _ in range(200):
            after = resplit(split, demand, sizes, n_expert)
            if after is None:
                break
            assert after @ sizes <= budget
            assert (after <= n_expert).all() and ((after > 0) == (split > 0)).all()
            changed = np.flatnonzero(after != split)
            assert 2 <= len(changed) <= MAX_ROWS
            assert (after - split).max() <= MAX_GAIN
            for row in changed:  # towards the demand; a row may be rounded past it by less than a slot
                assert np.sign(after[row] - split[row]) == np.sign(demand[row] - split[row])
                assert abs(after[row] - demand[row]) <= abs(split[row] - demand[row]) + 1
            split = after
            n_changes += 1
        else:
            pytest.fail("it never settles")
    assert n_changes > 300


def test_small_gaps_and_rows_without_slots_are_left_alone() -> None:
    sizes, n_expert = ints(10, 10, 10), ints(64, 64, 64)
    assert resplit(ints(20, 20, 20), np.array([21.5, 18.5, 20.0]), sizes, n_expert) is None
    assert resplit(ints(0, 20, 20), np.array([60.0, 20.0, 20.0]), sizes, n_expert) is None
    assert resplit(ints(1, 20, 20), np.array([0.0, 30.0, 20.0]), sizes, n_expert) is None  # the last slot is kept
    assert (
        resplit(ints(64, 20, 20), np.array([10.0, 40.0, 20.0]), sizes, n_expert) is None
    )  # a layer that is whole stays so


def test_demand_is_what_one_threshold_over_all_layers_would_want() -> None:
    demand = Demand(2)
    score = np.array([[9.0, 8.0, 7.0, 0.0], [6.0, 1.0, 0.0, 0.0]])
    demand.observe(score, ints(2, 2))
    assert demand.mean.tolist() == [3, 1]
    demand.observe(np.zeros((2, 4)), ints(2, 2))  # nothing is used: nothing is wanted
    assert demand.mean.tolist() == [1.5, 0.5]
    mean = demand.mean
    demand.observe(score, ints(0, 3))  # a row without slots takes no part
    assert demand.mean is not mean and mean.tolist() == [1.5, 0.5]
    whole = Demand(3)
    whole.observe(np.vstack([np.full(4, 99.0), score]), ints(4, 2, 2))  # nor does one that is whole
    assert whole.mean.tolist() == [0, 3, 1]


def skewed(n_steps: int = 600) -> list[Step]:
    """Row 0 always uses the same two of 16 experts, row 1 any of 12."""
    rng = np.random.default_rng(0)
    rows = [[[[0, 1], rng.choice(12, 2, replace=False)]] for _ in range(n_steps)]
    return [Step(Batch.from_ids(np.array(ids), 16), True) for ids in rows]


def test_the_simulators_slots_go_where_they_are_needed_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "EVERY", 16)
    totals: list[np.ndarray] = []
    carry_out = simulate.carry_out
    monkeypatch.setattr(
        simulate,
        "carry_out",
        lambda moves, resident, limits: (carry_out(moves, resident, limits), totals.append(limits.n_slots)),
    )
    fixed = replay(skewed(), make("moe-spac", 2, 16), 6, 8)
    assert {n.tolist() == [6, 6] for n in totals} == {True}
    totals.clear()
    moved = replay(skewed(), make("moe-spac", 2, 16), 6, 8, resplit=True)
    assert all(n.sum() <= 12 for n in totals)
    assert totals[-1][1] >= 9 and totals[-1][0] >= 2
    assert moved.pair_hit > fixed.pair_hit + 5
