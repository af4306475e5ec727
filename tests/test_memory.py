"""The memory plan spends no byte more than it was given, and splits the rest evenly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from moespac_llamacpp.memory import BlockSize, parse_bytes, slots_for_bytes, slots_for_share, slots_for_time

MIB = 1 << 20
DENSE = BlockSize(n_expert=0, expert_bytes=0, hybrid=False)
FALLBACK = BlockSize(n_expert=64, expert_bytes=MIB, hybrid=False)


def moe(n_expert: int = 64, expert_bytes: int = MIB) -> BlockSize:
    return BlockSize(n_expert, expert_bytes, hybrid=True)


def spent(blocks: list[BlockSize], slots: list[int]) -> int:
    return sum(n * b.expert_bytes for n, b in zip(slots, blocks, strict=True))


def test_a_share_is_the_same_part_of_every_block() -> None:
    blocks = [DENSE, moe(64), moe(128), FALLBACK]
    assert slots_for_share(blocks, 0.25) == [0, 16, 32, 0]
    assert slots_for_share(blocks, 0.0) == [0, 0, 0, 0]
    assert slots_for_share(blocks, 1.0) == [0, 64, 128, 0]


def test_a_small_share_is_at_least_one_slot() -> None:
    assert slots_for_share([moe(8), moe(512)], 0.001) == [1, 1]


@pytest.mark.parametrize("share", [-0.01, 1.01, float("nan"), float("inf"), 25])
def test_a_share_outside_0_to_1_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match=r"cache share is .* from 0 to 1"):
        slots_for_share([moe()], share)


def test_bytes_are_split_evenly() -> None:
    assert slots_for_bytes([moe(), DENSE, moe(), moe()], 30 * MIB) == [10, 0, 10, 10]
    assert slots_for_bytes([moe(), moe(), moe()], 31 * MIB) == [11, 10, 10]
    assert slots_for_bytes([moe(), moe(), moe()], 32 * MIB - 1) == [11, 10, 10]
    assert slots_for_bytes([FALLBACK, DENSE], 100 * MIB) == [0, 0]
    assert slots_for_bytes([], 5) == []
    assert slots_for_bytes([moe()], 0) == [0]


def test_what_a_small_block_cannot_use_goes_to_the_others() -> None:
    assert slots_for_bytes([moe(4), moe(64), moe(64)], 44 * MIB) == [4, 20, 20]
    assert slots_for_bytes([moe(4), moe(8)], 1 << 40) == [4, 8]


def test_a_budget_is_never_exceeded_and_the_split_stays_even() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        blocks = [moe(int(rng.integers(1, 65)), int(rng.integers(80, 121))) for _ in range(int(rng.integers(1, 9)))]
        budget = int(rng.integers(0, 30_000))
        slots = slots_for_bytes(blocks, budget)
        left = budget - spent(blocks, slots)
        assert left >= 0
        open_slots = [n for n, b in zip(slots, blocks, strict=True) if n < b.n_expert]
        if open_slots:
            # one for the last turn, one more for what that leaves: less than two of the smallest experts
            assert max(slots) - min(open_slots) <= 2
            assert left < min(b.expert_bytes for n, b in zip(slots, blocks, strict=True) if n < b.n_expert)
        assert all(0 <= n <= b.n_expert for n, b in zip(slots, blocks, strict=True))
        assert slots == slots_for_bytes(blocks, budget)


def test_blocks_become_whole_only_where_no_guess_is_slower() -> None:
    """Random blocks, budgets and guesses: a cold share, to some power, against what a block saves that is whole."""
    rng = np.random.default_rng(1)
    n_gained = 0
    for _ in range(300):
        blocks = [moe(int(rng.integers(1, 65)), int(rng.integers(80, 121))) for _ in range(int(rng.integers(1, 9)))]
        blocks += [DENSE, FALLBACK]
        budget = int(rng.uniform(0, 1.1) * sum(b.n_expert * b.expert_bytes for b in blocks[:-2]))
        powers, saving = rng.uniform(1, 3, 2), rng.uniform(0, 0.3)

        def pace(
            slots: list[int], blocks: list[BlockSize] = blocks, powers: Any = powers, s: float = saving
        ) -> list[float]:
            cold = np.array([1 - n / max(1, b.n_expert) for n, b in zip(slots, blocks, strict=True)])
            return [float((cold**power - s * (cold == 0)).sum()) for power in powers]

        slots, even = slots_for_time(blocks, budget, pace), slots_for_bytes(blocks, budget)
        assert all(a <= b for a, b in zip(pace(slots), pace(even), strict=True))
        assert all(0 <= n <= b.n_expert and (b.hybrid or n == 0) for n, b in zip(slots, blocks, strict=True))
        left = budget - spent(blocks, slots)
        rest = [b.expert_bytes for n, b in zip(slots, blocks, strict=True) if b.hybrid and n < b.n_expert]
        assert 0 <= left < min(rest, default=1 << 40), "what another slot would fit into is lost"
        n_gained += slots != even
    assert 50 < n_gained < 250


def test_with_enough_for_all_every_block_is_whole() -> None:
    blocks = [moe(8), DENSE, moe(4, 2 * MIB), FALLBACK]
    assert slots_for_time(blocks, 16 * MIB, lambda slots: [0.0]) == [8, 0, 4, 0]
    assert slots_for_time(blocks, 0, lambda slots: [0.0]) == [0, 0, 0, 0]
    # the smaller one first, of which others keep what is left
    blocks = [moe(8), moe(4), moe(8)]
    assert slots_for_time(blocks, 10 * MIB, lambda slots: [-float(slots[1] == 4)]) == [3, 4, 3]


def test_a_block_whose_experts_do_not_fit_is_passed_over() -> None:
    assert slots_for_bytes([moe(8, 100 * MIB), moe(8, MIB)], 50 * MIB) == [0, 8]


def test_a_negative_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="-1 bytes, it cannot be negative"):
        slots_for_bytes([moe()], -1)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("1024", 1024),
        ("8G", 8 << 30),
        ("8g", 8 << 30),
        ("512M", 512 << 20),
        ("1.5G", 3 << 29),
        ("64k", 65536),
        (".5K", 512),
    ],
)
def test_sizes_are_read(text: str, value: int) -> None:
    assert parse_bytes(text) == value


@pytest.mark.parametrize(
    "text", ["", "G", "-1", "-1G", "8GB", "8 Gi", "lots", "nan", "inf", "nanG", "1e300G", "0x10", "1,5G"]
)
def test_what_is_no_size_is_told_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a size: .* such as 8G"):
        parse_bytes(text)
