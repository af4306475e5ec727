"""The threshold: the closed form against brute force, and the bounds."""

from __future__ import annotations

import numpy as np
import pytest

from moespac_llamacpp.balancer import Rates, Split, balance, histogram, levels
from moespac_llamacpp.metering import Sample
from moespac_llamacpp.planning import Batch, Limits
from moespac_llamacpp.spac import MoeSpac
from moespac_llamacpp.utility import Integer

BYTES = 2_700_000


def brute_force(
    experts: np.ndarray, uses: np.ndarray, missing: np.ndarray, rates: Rates, n: int, n_slots: int, window: float | None
) -> int:
    """The lowest legal tau in 0 … K+1 with the least |T_cpu − T_device|."""
    k = len(experts) - 1
    best, found = np.inf, k + 1
    for tau in range(k + 2):
        if experts[tau:].sum() > n_slots:
            continue
        if window is not None and missing[tau:].sum() > window * rates.link_bytes:
            continue
        cpu = device = 0.0
        for u in range(k + 1):
            if experts[u]:
                distinct = experts[u] * (1 - (1 - min(1.0, uses[u] / experts[u] / n)) ** n)
                if u < tau:
                    cpu += distinct * rates.cpu_expert + uses[u] * rates.cpu_pair
                else:
                    device += distinct * rates.device_expert + uses[u] * rates.device_pair
        if abs(cpu - device) < best - 1e-15:
            best, found = abs(cpu - device), tau
    return found


def test_tau_is_brute_forces_over_random_histograms() -> None:
    rng = np.random.default_rng(0)
    bounds = set()
    for _ in range(3000):
        k, n = int(rng.integers(1, 12)), int(rng.integers(1, 10))
        experts = rng.integers(0, 60, k + 1) * (rng.random(k + 1) < 0.8)
        uses = experts * np.sort(rng.uniform(0, n, k + 1))
        uses[0] = 0
        missing = BYTES * rng.integers(0, experts + 1).astype(float)
        rates = Rates(*(rng.uniform(0, 30e-6, 5)), link_bytes=float(rng.uniform(1e9, 60e9)))
        n_slots = int(rng.integers(0, 2 * experts.sum() + 2))
        window = None if rng.random() < 0.3 else float(rng.uniform(0, 0.02))
        split = balance(experts, uses, missing, rates, n_tokens=n, n_slots=n_slots, window=window)
        assert split.tau == brute_force(experts, uses, missing, rates, n, n_slots, window)
        bounds.add(split.bound)
    assert bounds == {"balance", "slots", "link"}


def split_of(experts: list[int], missing: list[int], rates: Rates, **limits: float | None) -> Split:
    """Level u stands for u uses of each expert by a batch of 8 tokens."""
    given = {"n_tokens": 8, "n_slots": 10_000, "window": None} | limits
    uses = np.array(experts) * np.arange(len(experts))
    return balance(np.array(experts), uses, BYTES * np.array(missing), rates, **given)  # type: ignore[arg-type]


def rates_of(cpu_expert: float, device_expert: float, **others: float) -> Rates:
    return Rates(cpu_expert=cpu_expert, cpu_pair=0.0, device_expert=device_expert, device_pair=0.0, **others)


def test_a_fast_device_takes_what_is_used_and_a_fast_cpu_keeps_it() -> None:
    assert split_of([90, 10, 10], [90, 10, 10], rates_of(1.0, 1e-9)).tau <= 1
    assert split_of([90, 10, 10], [90, 10, 10], rates_of(1e-9, 1.0)).tau == 3


def test_equal_sides_share_the_work() -> None:
    assert split_of([5, 10, 10], [0, 0, 0], rates_of(1.0, 1.0)) == Split(2, "balance", np.inf)


def test_slots_and_the_links_window_raise_tau() -> None:
    rates = rates_of(1.0, 1e-9)
    assert split_of([90, 10, 10], [0, 0, 0], rates, n_slots=15) == Split(2, "slots", np.inf)
    window = 12.5 * BYTES / rates.link_bytes
    assert split_of([90, 10, 10], [90, 8, 9], rates, window=window) == Split(2, "link", pytest.approx(12.5 * BYTES))
    assert split_of([90, 10, 10], [90, 8, 9], rates, window=0.0) == Split(3, "link", 0)


def test_what_a_call_costs_anyway_keeps_nobody_out() -> None:
    slow, fast = rates_of(1.0, 1.0, device_call=100.0), rates_of(1.0, 1.0, device_call=0.0)
    assert split_of([5, 10, 10], [0, 0, 0], slow) == split_of([5, 10, 10], [0, 0, 0], fast)


def test_levels_and_histogram() -> None:
    score = np.array([[0.0, 0.1, 1.0, 9.0], [0.5, 0.0, 0.0, 0.0]])
    level = levels(score, unit=0.5, k=4)
    assert level.tolist() == [[0, 1, 2, 4], [1, 0, 0, 0]]
    resident = np.array([[False, True, False, False], [False, True, False, False]])
    experts, sums, missing = histogram(level, score, resident, np.array([10, 1000]), 4)
    assert experts.tolist() == [4, 2, 1, 0, 1] and sums.tolist() == [0.0, 0.6, 1.0, 0.0, 9.0]
    assert missing.tolist() == [2010, 1000, 10, 0, 10]  # each with the bytes of its layer


def test_a_cost_per_expert_and_one_per_pair_are_found_apart() -> None:
    rng = np.random.default_rng(0)
    rates = Rates()
    for _ in range(200):
        experts = rng.integers(1, 20, 48)
        pairs = experts * rng.integers(1, 6, 48)
        noise = rng.uniform(0.9, 1.1, 48)
        rates.track_cpu(noise * (40e-6 * experts + 5e-6 * pairs), experts, pairs)
        calls = np.full(48, 16)
        rates.track_device(noise * (20e-6 * calls + 1e-6 * experts + 3e-6 * pairs), calls, experts, pairs)
    assert rates.cpu_expert == pytest.approx(40e-6, rel=0.1) and rates.cpu_pair == pytest.approx(5e-6, rel=0.2)
    assert rates.device_call == pytest.approx(20e-6, rel=0.1) and rates.device_pair == pytest.approx(3e-6, rel=0.2)


def test_costs_that_samples_cannot_tell_apart_keep_their_ratio() -> None:
    rates = Rates(cpu_expert=10e-6, cpu_pair=1e-6, link_bytes=40e9)
    for _ in range(100):
        rates.track_cpu(np.array([2 * (5 * 10e-6 + 20 * 1e-6)]), np.array([5]), np.array([20]))
        rates.track_link(1e-3, 20_000_000)
    assert rates.cpu_expert == pytest.approx(20e-6, rel=1e-3) and rates.cpu_pair == pytest.approx(2e-6, rel=1e-3)
    assert rates.link_bytes == pytest.approx(20e9, rel=1e-3)


def test_a_measurement_of_nothing_changes_nothing() -> None:
    rates, none = Rates(), np.zeros(3)
    rates.track_cpu(none, none, none)
    rates.track_cpu(none[:0], none[:0], none[:0])
    rates.track_device(none, np.ones(3), none, none)
    rates.track_link(0.0, 0)
    assert rates == Rates()


def perf(**values: float) -> Sample:
    """One layer; what is not given is 0."""
    names = ("n_calls", "cold_experts", "cold_pairs", "hot_experts", "hot_pairs", "launch", "cold", "wait", "hot")
    return Sample(*(np.array([values.get(name, 0.0)]) for name in names))


def test_the_device_is_timed_only_where_the_cpu_waited_for_it() -> None:
    rates = Rates()
    hidden = {"n_calls": 16.0, "hot_experts": 80.0, "hot_pairs": 80.0, "cold_experts": 40.0, "cold_pairs": 40.0}
    perf(**hidden, launch=1e-3, cold=5e-3, wait=1e-5).track(rates)
    start = Rates()
    assert (rates.device_call, rates.device_pair) == (start.device_call, start.device_pair)
    assert rates.cpu_expert > start.cpu_expert
    for _ in range(100):
        perf(**hidden, launch=1e-3, cold=1e-3, wait=2e-3).track(rates)
    device = 16 * rates.device_call + 80 * (rates.device_expert + rates.device_pair)
    assert device == pytest.approx(4e-3, rel=1e-2)


def test_a_device_that_tells_its_time_is_believed() -> None:
    """In-stream the device waits for the CPU: that is none of its own time."""
    rates = Rates()
    for _ in range(100):
        perf(
            n_calls=16, hot_experts=80, hot_pairs=80, cold_experts=40, cold_pairs=40, cold=5e-3, wait=4e-3, hot=1e-3
        ).track(rates)
    device = 16 * rates.device_call + 80 * (rates.device_expert + rates.device_pair)
    assert device == pytest.approx(1e-3, rel=1e-2)


def test_times_that_nobody_takes_change_no_rate() -> None:
    rates = Rates()
    perf(n_calls=16, hot_experts=80, hot_pairs=80, cold_experts=40, cold_pairs=40).track(rates)
    assert rates == Rates()


def policy_with(rates: Rates, *, balanced: bool = True) -> MoeSpac:
    policy = MoeSpac(Integer(1, 8, up=1, down=1), rates=rates, balanced=balanced)
    for experts in ([0, 1, 2, 3], [0, 1, 0, 1], [0, 0, 0, 1]):
        policy.observe(Batch.from_ids(np.array(experts).reshape(-1, 1, 1), 8))
    return policy


def test_a_slow_device_is_given_less_and_the_ablation_ignores_that() -> None:
    slow = Rates(cpu_expert=1e-9, cpu_pair=0.0, device_expert=1.0, device_pair=0.0)
    resident, limits = np.zeros((1, 8), np.bool_), Limits(np.array([4], np.int32), 9)
    assert policy_with(slow).plan(resident, limits) == []
    assert len(policy_with(slow, balanced=False).plan(resident, limits)) > 0
    assert len(policy_with(Rates()).plan(resident, limits)) > 0


def test_the_window_of_the_link_bounds_the_moves() -> None:
    resident = np.zeros((1, 8), np.bool_)
    n_slots = np.array([4], np.int32)
    rates = Rates(device_pair=1e-9)

    def n_moves(window: float) -> int:
        limits = Limits(n_slots, 9, window=window, expert_bytes=np.array([BYTES]))
        return len(policy_with(rates).plan(resident, limits))

    assert n_moves(1.5 * BYTES / rates.link_bytes) == 1
    assert n_moves(0.0) == 0
    assert n_moves(1.0) > 1
