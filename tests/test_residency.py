"""Residency feeds a policy with what is known of a decode, and spends a step's moves over its drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from moespac_llamacpp import native
from moespac_llamacpp.policies import Batch, Limits, Move, make
from moespac_llamacpp.residency import Residency


@dataclass
class FakeRow:
    row: int
    n_slots: int
    n_expert_used: int


@dataclass
class FakeExperts:
    """Stands for native.Experts: two rows of 16 experts, moves land at once."""

    n_rows: int = 2
    n_expert: int = 16
    table: np.ndarray = field(default_factory=lambda: np.zeros((2, 16), np.uint8))
    last: np.ndarray = field(default_factory=lambda: np.zeros((2, 16), np.int32))
    published: int = 0

    def rows(self) -> list[FakeRow]:
        return [FakeRow(0, 4, 2), FakeRow(1, 4, 2)]

    def counts(self) -> np.ndarray:
        return self.last

    def states_table(self) -> np.ndarray:
        return self.table

    def evict(self, row: int, expert: int) -> None:
        assert self.table[row, expert] == native.RESIDENT
        self.table[row, expert] = native.COLD

    def load(self, row: int, expert: int) -> None:
        assert (self.table[row] == native.RESIDENT).sum() < 4
        self.table[row, expert] = native.RESIDENT

    def publish(self) -> int:
        self.published += 1
        return 0

    def sync(self) -> None:
        pass


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


def residency_of(policy: Any, **options: int) -> tuple[Residency, FakeExperts]:
    experts = FakeExperts()
    return Residency(cast(native.Experts, experts), policy, **options), experts


def test_counts_alone_tell_how_many_tokens_were_decoded() -> None:
    residency, experts = residency_of(ear := Ear())
    experts.last[:, :4] = 3  # 12 pairs, two experts a token
    residency.step()
    assert ear.batches[0].n_tokens == 6 and ear.batches[0].ids is None


def test_choices_of_the_last_decode_become_ids_by_token() -> None:
    residency, experts = residency_of(ear := Ear())
    choices = np.array([[[0, 1], [2, 3], [4, 5]], [[6, 7], [8, 9], [-1, -1]]], np.int32)  # [row, token, k]
    experts.choices = lambda: [choices]  # type: ignore[attr-defined]
    residency.observe([7, 8, 9], [True, True, False])
    (batch,) = ear.batches
    assert batch.ids is not None and batch.ids.shape == (3, 2, 2) and batch.ids[1].tolist() == [[2, 3], [8, 9]]
    assert batch.counts[1].sum() == 4 and batch.last_accepted == 8


def test_a_steps_moves_are_shared_out_over_its_drafts() -> None:
    residency, _ = residency_of(ear := Ear(), max_moves=10)
    residency.plan(n_expect=4)
    assert ear.allowed == []
    for token in range(4):
        residency.expect([token])
    assert ear.allowed == [2, 3, 5, 10]  # what is not used is left to the next
    residency.step()
    assert ear.allowed[-1] == 10


def test_a_step_with_drafts_makes_no_more_moves_than_it_may() -> None:
    rng = np.random.default_rng(0)
    residency, experts = residency_of(make("moe-spac", 2, 16), max_moves=3)
    for _ in range(40):
        tokens = rng.integers(0, 8, 4)
        choices = np.stack([[rng.choice(16, 2, replace=False) for _ in range(4)] for _ in range(2)]).astype(np.int32)
        experts.choices = lambda choices=choices: [choices]  # type: ignore[attr-defined,misc]
        residency.observe(tokens.tolist())
        moves = residency.plan(n_expect=3)
        moves += sum(residency.expect([int(t)]) for t in rng.integers(0, 8, 3))
        assert moves <= 3
        assert ((experts.table == native.RESIDENT).sum(axis=1) <= 4).all()
    assert residency.n_moves > 40


def test_a_long_prompt_is_observed_in_pieces_of_the_size_of_verify_batches() -> None:
    residency, experts = residency_of(ear := Ear())
    choices = np.zeros((2, 70, 2), np.int32)
    experts.choices = lambda: [choices[:, :50], choices[:, 50:]]  # type: ignore[attr-defined]
    residency.observe(list(range(70)), starts=True)
    assert [b.n_tokens for b in ear.batches] == [32, 32, 6]
    assert [b.starts for b in ear.batches] == [True, False, False]
    assert [int(b.tokens[0]) for b in ear.batches if b.tokens is not None] == [0, 32, 64]


def test_a_failed_device_lane_ends_the_moves_but_not_the_generation() -> None:
    residency, experts = residency_of(make("lru", 2, 16), max_moves=4)

    def refuse(row: int, expert: int) -> None:
        raise native.MoeError(-13, "the device lane failed")

    experts.load = refuse  # type: ignore[method-assign]
    experts.last[:, :4] = 1
    for _ in range(3):
        assert residency.step() == 0
    assert residency.n_moves == 0 and residency.max_moves == 0
