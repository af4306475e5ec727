"""Where no token repeats, the memory of tokens says nothing: what moe-spac then knows of experts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moespac_llamacpp.planning import Batch
from moespac_llamacpp.policies import make
from moespac_llamacpp.popularity import Popularity, Prior
from moespac_llamacpp.simulate import Replay, Step
from moespac_llamacpp.simulate import replay as play
from moespac_llamacpp.synth.plan import Plan, make_plan
from moespac_llamacpp.synth.replay import verify_steps
from moespac_llamacpp.synth.shapes import SHAPES

N_LAYER = 8


@pytest.fixture(scope="module")
def plan() -> Plan:
    """As `moespac synth` plants Qwen3-30B-A3B's shape without a trace, 8 layers of it."""
    return make_plan(replace(SHAPES["qwen3-30b-a3b"], n_layer=N_LAYER), range(1000, 20_000), None, 1536)


def replayed(name: str, steps: list[Step], share: float) -> Replay:
    n_rows, n_expert = steps[0].batch.counts.shape
    landing = "same" if steps[1].batch.n_tokens > 1 else "next"
    return play(steps, make(name, n_rows, n_expert), round(share * n_expert), 20, landing=landing)


def test_no_token_of_the_steps_repeats_and_drafts_are_accepted_as_asked(plan: Plan) -> None:
    steps = verify_steps(plan, 3, 2000, acceptance=0.75)
    tokens = np.concatenate([s.batch.tokens for s in steps if s.batch.tokens is not None])
    accepted = np.concatenate([s.batch.accepted for s in steps[1:] if s.batch.accepted is not None])
    assert len(set(tokens.tolist())) == len(tokens)
    assert not steps[0].measured and steps[0].batch.n_tokens == 512
    assert abs(accepted.reshape(-1, 3)[:, 1].mean() - 0.75) < 0.03  # first guesses
    assert 2000 <= accepted.sum() < 2003


def test_a_chain_that_is_too_short_is_refused(plan: Plan) -> None:
    with pytest.raises(ValueError, match="the chain has 12666 words, 12703 are needed"):
        verify_steps(plan, 3, 200, first=11_988)


@pytest.mark.parametrize("width", [1, 3, 9])
@pytest.mark.parametrize("n_text", [200, 1000])
def test_moe_spac_is_within_2_percent_of_lfu_where_no_token_repeats(plan: Plan, width: int, n_text: int) -> None:
    """Of lfu's hits, from a cold start, at every share of the published tables."""
    steps = verify_steps(plan, width, n_text)
    for share in (0.08, 0.17, 0.25, 0.5):
        spac, lfu = replayed("moe-spac", steps, share), replayed("lfu", steps, share)
        assert spac.pair_hit > 0.98 * lfu.pair_hit and spac.expert_hit > 0.98 * lfu.expert_hit, (share, spac, lfu)


def observed(popularity: Popularity, uses: np.ndarray) -> None:
    for expert in uses:
        popularity.observe(Batch.from_ids(np.array([[[expert]]]), 16))


def test_recent_use_returns_to_use_since_the_start_where_experts_are_drawn_anew() -> None:
    """Every token draws by the same odds: all that recent use adds is chance."""
    rng = np.random.default_rng(4)
    odds = rng.dirichlet(np.full(16, 0.5))
    popularity, recent = Popularity(1, 16), Prior(1, 16)
    error: dict[str, float] = {"mean": 0.0, "recent": 0.0}
    for i, expert in enumerate(rng.choice(16, 600, p=odds)):
        observed(popularity, np.array([expert]))
        recent.observe(Batch.from_ids(np.array([[[expert]]]), 16))
        if i >= 200:
            error["mean"] += float(((popularity.mean() - odds) ** 2).sum())
            error["recent"] += float(((recent.mean() - odds) ** 2).sum())
    assert popularity.returns == 0.9
    assert error["mean"] < 0.5 * error["recent"]


def test_recent_use_is_kept_where_the_text_stays_with_its_experts() -> None:
    """Each expert's turn is long: what was used before says nothing of what is used now."""
    rng = np.random.default_rng(5)
    popularity = Popularity(1, 16)
    for turn in range(12):
        observed(popularity, 4 * (turn % 4) + rng.integers(0, 4, 60))
        if turn > 3:
            assert popularity.returns == 0


def test_a_seeded_popularity_starts_from_what_was_known() -> None:
    popularity = Popularity(1, 16)
    popularity.seed(np.full((1, 16), 1 / 16), 10.0)
    assert np.allclose(popularity.mean(), 1 / 16) and popularity.n[0] == 10


def test_what_no_row_saw_of_a_batch_changes_nothing() -> None:
    """Most models compute their last layer only for tokens with logits."""
    popularity = Popularity(2, 16)
    observed_ids = np.array([[[1], [2]], [[3], [16]]])  # the second row knows one of two tokens
    popularity.observe(Batch.from_ids(observed_ids, 16))
    before = popularity.mean()[1].copy()
    popularity.observe(Batch.from_ids(np.array([[[5], [16]]]), 16))
    assert popularity.ever.n.tolist() == [3, 1]
    np.testing.assert_allclose(popularity.mean()[1], before)
