"""The threshold: the closed form against brute force, and the bounds."""

from __future__ import annotations

import numpy as np
import pytest

from moespac_llamacpp.balancer import Rates, Split, balance, histogram, levels
from moespac_llamacpp.planning import Batch, Limits
from moespac_llamacpp.spac import MoeSpac
from moespac_llamacpp.utility import Integer

BYTES = 2_700_000


def brute_force(
    experts: np.ndarray, missing: np.ndarray, rates: Rates, unit: float, n_slots: int, window: float | None
) -> int:
    """The lowest legal tau in 0 … K+1 with the least |T_cpu − T_device|."""
    k = len(experts) - 1
    best, found = np.inf, k + 1
    for tau in range(k + 2):
        if experts[tau:].sum() > n_slots:
            continue
        if window is not None and missing[tau:].sum() > int(window * rates.link_bytes / BYTES):
            continue
        cpu = sum(experts[u] * (rates.cpu_expert + u * unit * rates.cpu_pair) for u in range(1, tau))
        device = sum(
            experts[u] * (rates.device_expert + u * unit * rates.device_pair) for u in range(max(1, tau), k + 1)
        )
        if abs(cpu - device) < best - 1e-15:
            best, found = abs(cpu - device), tau
    return found


def test_tau_is_brute_forces_over_random_histograms() -> None:
    rng = np.random.default_rng(0)
    bounds = set()
    for _ in range(3000):
        k = int(rng.integers(1, 12))
        experts = rng.integers(0, 60, k + 1) * (rng.random(k + 1) < 0.8)
        missing = rng.integers(0, experts + 1)
        rates = Rates(*(rng.uniform(0, 30e-6, 4)), link_bytes=float(rng.uniform(1e9, 60e9)))
        unit = float(rng.uniform(0.1, 2))
        n_slots = int(rng.integers(0, 2 * experts.sum() + 2))
        window = None if rng.random() < 0.3 else float(rng.uniform(0, 0.02))
        split = balance(experts, missing, rates, unit=unit, n_slots=n_slots, expert_bytes=BYTES, window=window)
        assert split.tau == brute_force(experts, missing, rates, unit, n_slots, window)
        bounds.add(split.bound)
    assert bounds == {"balance", "slots", "link"}


def split_of(experts: list[int], missing: list[int], rates: Rates, **limits: float | None) -> Split:
    given = {"unit": 1.0, "n_slots": 10_000, "expert_bytes": BYTES, "window": None} | limits
    return balance(np.array(experts), np.array(missing), rates, **given)  # type: ignore[arg-type]


def test_a_fast_device_takes_what_is_used_and_a_fast_cpu_keeps_it() -> None:
    fast_device = Rates(cpu_expert=1.0, cpu_pair=0.0, device_expert=1e-9, device_pair=0.0)
    assert split_of([90, 10, 10], [90, 10, 10], fast_device).tau <= 1
    fast_cpu = Rates(cpu_expert=1e-9, cpu_pair=0.0, device_expert=1.0, device_pair=0.0)
    assert split_of([90, 10, 10], [90, 10, 10], fast_cpu).tau == 3


def test_equal_sides_share_the_work() -> None:
    equal = Rates(cpu_expert=1.0, cpu_pair=0.0, device_expert=1.0, device_pair=0.0)
    assert split_of([5, 10, 10], [0, 0, 0], equal) == Split(2, "balance", 1 << 30)


def test_slots_and_the_links_window_raise_tau() -> None:
    rates = Rates(cpu_expert=1.0, cpu_pair=0.0, device_expert=1e-9, device_pair=0.0)
    assert split_of([90, 10, 10], [0, 0, 0], rates, n_slots=15) == Split(2, "slots", 1 << 30)
    window = 12 * BYTES / rates.link_bytes + 1e-9
    assert split_of([90, 10, 10], [90, 8, 9], rates, window=window) == Split(2, "link", 12)
    assert split_of([90, 10, 10], [90, 8, 9], rates, window=0.0) == Split(3, "link", 0)


def test_levels_and_histogram() -> None:
    level = levels(np.array([[0.0, 0.1, 1.0, 9.0]]), unit=0.5, k=4)
    assert level.tolist() == [[0, 1, 2, 4]]
    experts, missing = histogram(level, np.array([[False, True, False, False]]), 4)
    assert experts.tolist() == [1, 1, 1, 0, 1] and missing.tolist() == [1, 0, 1, 0, 1]


def test_rates_follow_what_is_measured() -> None:
    rates = Rates(cpu_expert=10e-6, cpu_pair=1e-6, device_expert=0.0, device_pair=2e-6, link_bytes=40e9)
    for _ in range(100):
        rates.track_cpu(2 * (5 * 10e-6 + 20 * 1e-6), 5, 20)
        rates.track_device(20 * 1e-6, 3, 20)
        rates.track_link(1e-3, 20_000_000)
    assert rates.cpu_expert == pytest.approx(20e-6, rel=1e-3) and rates.cpu_pair == pytest.approx(2e-6, rel=1e-3)
    assert rates.device_pair == pytest.approx(1e-6, rel=1e-3)
    assert rates.link_bytes == pytest.approx(20e9, rel=1e-3)


def test_a_measurement_of_nothing_changes_nothing() -> None:
    rates = Rates()
    rates.track_cpu(0.0, 0, 0)
    rates.track_device(1e-3, 0, 0)
    rates.track_link(0.0, 0)
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
    one = 1.5 * BYTES / rates.link_bytes
    assert len(policy_with(rates).plan(resident, Limits(n_slots, 9, window=one))) == 1
    assert policy_with(rates).plan(resident, Limits(n_slots, 9, window=0.0)) == []
