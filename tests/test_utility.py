"""Utility estimators: what can rise, what the token memory learns, forgets and admits about itself."""

from __future__ import annotations

import numpy as np
import pytest

from moespac_llamacpp.planning import Batch
from moespac_llamacpp.popularity import Prior
from moespac_llamacpp.utility import Adaptive, History, Integer, TokenMemory, _pair


def batch_of(*experts: int, tokens: list[int] | None = None, n_expert: int = 16, starts: bool = False) -> Batch:
    """One row, one expert per token."""
    return Batch.from_ids(np.array(experts).reshape(-1, 1, 1), n_expert, tokens=tokens, starts=starts)


def test_counts_follow_from_the_ids() -> None:
    ids = np.array([[[0, 3], [2, 1]], [[3, -1], [2, 200]]])
    batch = Batch.from_ids(ids, 4, tokens=[7, 8], accepted=[True, False])
    assert batch.counts.tolist() == [[1, 0, 0, 2], [0, 1, 2, 0]]
    assert batch.n_tokens == 2 and batch.last_accepted == 7


def test_a_batch_whose_parts_differ_in_length_is_refused() -> None:
    with pytest.raises(ValueError, match="3 tokens for 2 decoded tokens"):
        batch_of(1, 2, tokens=[1, 2, 3])


def test_the_prior_does_not_care_how_a_text_was_cut_into_batches() -> None:
    """A prompt of 600 tokens as one batch, or in pieces, or token by token."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 16, (600, 3, 2))
    ids[:590, 2] = -1  # a last layer that was computed for the last ten tokens only
    means = []
    for width in (600, 32, 7, 1):
        prior = Prior(3, 16)
        for i in range(0, 600, width):
            prior.observe(Batch.from_ids(ids[i : i + width], 16))
        means.append(prior.mean())
    for mean in means[1:]:
        np.testing.assert_allclose(mean, means[0], rtol=1e-12)
    recent = np.bincount(ids[590:, 2].ravel(), minlength=16) > 0
    assert (means[0][2] > 0).tolist() == recent.tolist()
    assert means[0].sum(axis=1) == pytest.approx([2.0, 2.0, 2.0])  # two experts a token, also in the last layer


def test_the_prior_of_counts_alone_fades_by_the_token_too() -> None:
    wide, narrow = Prior(1, 4, 0.5), Prior(1, 4, 0.5)
    wide.observe(Batch(np.array([[4, 0, 0, 0]], np.int32), 4))
    for _ in range(4):
        narrow.observe(Batch(np.array([[1, 0, 0, 0]], np.int32), 1))
    np.testing.assert_allclose(wide.counts, narrow.counts)
    wide.observe(Batch(np.array([[0, 0, 0, 0]], np.int32), 4))  # nothing known of these
    np.testing.assert_allclose(wide.counts, narrow.counts)
    assert wide.mean()[0, 0] == pytest.approx(1.0)


def test_a_seeded_prior_starts_from_what_was_known() -> None:
    prior = Prior(1, 4)
    prior.seed(np.array([[0.5, 0.25, 0.0, 0.0]]), 10.0)
    assert prior.mean()[0].tolist() == [0.5, 0.25, 0.0, 0.0]
    for _ in range(100):
        prior.observe(batch_of(3, n_expert=4))
    assert prior.mean()[0, 0] < 0.01


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_the_released_constants_cannot_rise_below_five_tokens_a_batch(n: int) -> None:
    released, adaptive = Integer(1, 16), Adaptive(1, 16)
    for _ in range(50):
        released.observe(batch_of(*[3] * n))
        adaptive.observe(batch_of(*[3] * n))
    assert released.score()[0, 3] == 0
    assert adaptive.utility[0, 3] == adaptive.k


def test_the_released_constants_rise_by_one_from_five_tokens_and_fall_one_by_one() -> None:
    released = Integer(1, 16)
    released.observe(batch_of(*[3] * 5))
    assert released.score()[0, 3] == 1
    released.observe(batch_of(*[3] * 5))
    assert released.score()[0, 3] == 1  # 5 − 1 is below the boundary
    released.observe(batch_of(*[3] * 6))
    assert released.score()[0, 3] == 2
    for expected in (1, 0, 0):
        released.observe(batch_of(9))
        assert released.score()[0, 3] == expected


def test_an_adaptive_utility_stays_in_bounds_and_falls_when_the_expert_is_left() -> None:
    adaptive = Adaptive(1, 16)
    rng = np.random.default_rng(0)
    for _ in range(200):
        adaptive.observe(batch_of(*rng.integers(0, 16, 4)))
        assert adaptive.utility.min() >= 0 and adaptive.utility.max() <= adaptive.k
    for _ in range(60):
        adaptive.observe(batch_of(3, 3))
    for _ in range(100):
        adaptive.observe(batch_of(5, 5))
    assert adaptive.utility[0, 3] == 0 and adaptive.utility[0, 5] == adaptive.k


def slow_score(history: list[tuple[int, int, int]], prior: np.ndarray, before: int, tokens: list[int]) -> np.ndarray:
    """The formula of TokenMemory row by row; history: (previous, token, expert) of every row seen, one expert each."""
    total = np.zeros_like(prior)
    for token in tokens:
        one = [e for _, t, e in history if t == token][-2:]
        two = [e for q, t, e in history if (q, t) == (before, token)][-2:]
        r = prior
        if one:
            r = (np.eye(len(prior))[one].sum(axis=0) + prior) / (len(one) + 1)
        if two:
            r = (np.eye(len(prior))[two].sum(axis=0) + 0.5 * r) / (len(two) + 0.5)
        total = total + 0.7 * r + 0.3 * prior
        before = token
    return total + 2 * prior


def test_the_memorys_score_is_the_formulas() -> None:
    rng = np.random.default_rng(1)
    memory = TokenMemory(1, 16, margin=-2.0)  # never falls back
    history: list[tuple[int, int, int]] = []
    before = -1
    for _ in range(40):
        tokens, experts = rng.integers(0, 6, 3).tolist(), rng.integers(0, 16, 3).tolist()
        memory.expect(tokens[:1])
        memory.expect(tokens[1:])
        if history:
            expected = slow_score(history, memory.prior.mean()[0], before, tokens)
            np.testing.assert_allclose(memory.score()[0], expected, atol=1e-12)
        memory.observe(batch_of(*experts, tokens=tokens))
        for token, expert in zip(tokens, experts, strict=True):
            history.append((before, token, expert))
            before = token


def test_a_token_names_its_experts_the_second_time() -> None:
    memory = TokenMemory(1, 64)
    for token in range(1, 40):
        memory.observe(batch_of(token + 5, tokens=[token], n_expert=64))
    memory.expect([2])
    assert memory.score()[0].argmax() == 7
    memory.observe(batch_of(7, tokens=[2], n_expert=64))
    memory.expect([1, 3])
    assert set(np.argsort(memory.score()[0])[-2:]) == {6, 8}


def test_the_pair_overrules_the_token() -> None:
    memory = TokenMemory(1, 16, margin=-2.0)
    for _ in range(3):  # token 2 chooses expert 4 after token 0, and expert 5 after token 1
        memory.observe(batch_of(0, 4, 1, 5, tokens=[0, 2, 1, 2]))
    memory.observe(batch_of(0, tokens=[0]))
    memory.expect([2])
    assert memory.score()[0].argmax() == 4


def test_what_follows_a_rejected_draft_is_a_pair_of_the_last_accepted_token() -> None:
    memory = TokenMemory(1, 16)
    ids = np.array([0, 1, 2]).reshape(-1, 1, 1)
    memory.observe(Batch.from_ids(ids, 16, tokens=[10, 11, 12], accepted=[True, False, False]))
    assert memory.before == 10


def test_without_tokens_or_ids_the_score_is_the_priors() -> None:
    memory = TokenMemory(2, 16)
    counts = np.zeros((2, 16), np.int32)
    counts[:, 3] = 2
    memory.observe(Batch(counts, 2))
    memory.expect([1, 2])
    assert (memory.score() == memory.prior.recent.counts).all() and memory.nbytes() == 0


def test_the_memory_is_capped_and_the_oldest_goes_first() -> None:
    memory = TokenMemory(1, 16, n_tokens=4, n_pairs=3)
    for token in range(10):
        memory.observe(batch_of(token, tokens=[token]))
    assert memory.tokens is not None and memory.pairs is not None
    assert list(memory.tokens.place) == [6, 7, 8, 9]
    assert [memory.pairs.find(_pair(a, a + 1)) >= 0 for a in range(5, 9)] == [False, True, True, True]
    assert len(memory.pairs.place) == 3
    assert memory.nbytes() == (4 + 3) * 2


def test_a_key_in_use_outlives_one_that_is_not() -> None:
    history = History(1, 16, 1, cap=2)
    for key in (7, 8, 7, 9):
        history.add(key, np.array([[1]]))
    assert history.find(8) == -1 and history.find(7) >= 0
    assert history.n(history.find(7)) == 2 and history.n(history.find(9)) == 1


def test_the_default_memory_of_a_48_layer_model_is_what_the_docs_say() -> None:
    memory = TokenMemory(48, 128)
    memory.observe(Batch.from_ids(np.zeros((1, 48, 8), np.int64), 128, tokens=[1]))
    assert memory.nbytes() == (16_384 + 32_768) * 768 == 36 << 20


def noise(informative: bool) -> TokenMemory:
    """60 batches of 4 tokens; experts follow the token, or popularity only."""
    rng = np.random.default_rng(2)
    memory = TokenMemory(1, 16)
    memory.n_slots = 4
    popular = np.array([0.2] * 4 + [0.2 / 12] * 12)
    for _ in range(60):
        tokens = rng.integers(0, 16, 4)
        experts = tokens if informative else rng.choice(16, 4, p=popular)
        memory.expect(tokens.tolist())
        memory.observe(batch_of(*experts, tokens=tokens.tolist()))
    return memory


def test_a_memory_that_names_no_better_than_the_prior_is_not_used() -> None:
    memory = noise(informative=False)
    assert memory.falls_back().all() and memory.advantage[0] <= 0.01
    memory.expect([1, 2])
    np.testing.assert_allclose(memory.score(), (2 + memory.AHEAD) * memory.prior.mean())


def test_a_memory_that_earns_its_moves_is_used() -> None:
    memory = noise(informative=True)
    assert not memory.falls_back().any() and memory.advantage[0] > 0.3


def test_a_row_that_fell_back_returns_when_the_memory_is_good_again() -> None:
    memory = noise(informative=False)
    rng = np.random.default_rng(3)
    for _ in range(100):
        tokens = rng.integers(0, 16, 4)
        memory.expect(tokens.tolist())
        memory.observe(batch_of(*tokens, tokens=tokens.tolist()))
    assert not memory.falls_back().any()


def test_binary_signals_tell_used_from_unused_but_not_how_often() -> None:
    often, once = (TokenMemory(1, 16, frequency=False) for _ in range(2))
    often.observe(batch_of(3, 3, 3, 5, tokens=[1, 2, 3, 4]))
    once.observe(batch_of(3, 5, 5, 5, tokens=[1, 2, 3, 4]))
    assert often.score().tolist() == once.score().tolist()
    often.expect([1, 2, 9, 9])
    assert often.score().min() >= 0 and often.score().max() <= 1
