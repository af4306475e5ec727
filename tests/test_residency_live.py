"""Residency with the real library: what it measures, what it moves, and that the text is the target's whatever it does."""

from __future__ import annotations

import numpy as np
import pytest

from moespac_llamacpp import native, residency, slots
from moespac_llamacpp.balancer import Rates
from moespac_llamacpp.decoder import Decoder
from moespac_llamacpp.draft import GgufDraft, NgramDraft
from moespac_llamacpp.models import Context
from moespac_llamacpp.policies import Batch, make
from moespac_llamacpp.residency import Residency
from moespac_llamacpp.spac import MoeSpac
from pair import PROMPTS, Pair, assert_same_text, draft_context, plain_greedy, target_context

N_TOKENS = 60


def residency_for(context: Context, name: str = "moe-spac", n_slots: int = 8, **options: bool) -> Residency:
    experts = context.experts
    assert experts is not None
    experts.reset_perf(times=True)
    experts.set_slots([n_slots if r.hybrid else 0 for r in map(experts.row, range(experts.n_rows))])
    made = Residency(experts, make(name, experts.n_rows, experts.n_expert), **options)
    made.fill()
    return made


def test_rates_and_windows_are_measured_while_it_generates(pair: Pair) -> None:
    with target_context(pair) as context, draft_context(pair) as own:
        live = residency_for(context)
        filled = live.rates.link_bytes
        decoder = Decoder(context, live, drafter=GgufDraft(own, pair.target), draft_max=4, draft_fixed=True)
        list(decoder.generate(pair.target.tokenize(PROMPTS[0]), 2 * N_TOKENS))
        live.join()
        start, rates = Rates(), live.rates
        assert filled not in (0, start.link_bytes)
        assert rates.cpu_expert != start.cpu_expert and rates.cpu_pair != start.cpu_pair
        assert 0 < rates.cpu_expert < 1e-3 and 0 <= rates.cpu_pair < 1e-3
        report = decoder.report
        assert live.window.decode_seconds is not None and live.window.draft_seconds is not None
        assert live.window.decode_seconds < report.seconds and live.window.draft_seconds < report.draft_seconds
        assert live.n_moves > 0 and live.worker_seconds > 0
        policy = live.policy
        assert isinstance(policy, MoeSpac) and policy.split is not None and np.isfinite(policy.split.n_bytes)
        decoder.close()
        live.close()


@pytest.mark.parametrize("drafter", ["model", "ngram", "none"])
def test_the_text_is_the_targets_while_slots_and_experts_move(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, drafter: str
) -> None:
    """Layers' slots are re-planned every few steps by a demand that swings, in all three ways of drafting."""
    monkeypatch.setattr(slots, "EVERY", 5)
    rng = np.random.default_rng(0)
    prompt = pair.target.tokenize(PROMPTS[2])
    with target_context(pair, attach=False) as plain:
        expected = plain_greedy(plain, prompt, N_TOKENS)
        with target_context(pair) as context, draft_context(pair) as own:
            live = residency_for(context)
            experts = live.experts
            budget = int(live.n_slots @ live.expert_bytes)
            policy = live.policy
            assert isinstance(policy, MoeSpac)
            monkeypatch.setattr(policy, "demand", lambda: rng.uniform(0, 16, experts.n_rows))
            set_slots = experts.set_slots

            def watched(wanted: np.ndarray) -> None:
                set_slots(wanted)
                assert sum(r.n_slots * r.expert_bytes for r in experts.rows()) <= budget

            monkeypatch.setattr(experts, "set_slots", watched)
            made = {"model": GgufDraft(own, pair.target), "ngram": NgramDraft(), "none": None}[drafter]
            decoder = Decoder(context, live, drafter=made, draft_max=4, draft_fixed=True)
            tokens = list(decoder.generate(prompt, N_TOKENS))
            assert live.n_resplits > 1 and live.n_moves > 0
            assert live.n_slots.tolist() == [experts.row(i).n_slots for i in range(experts.n_rows)]
            decoder.close()
            live.close()
        assert_same_text(plain, prompt, expected, tokens)


@pytest.mark.parametrize("sync_moves", [True, False])
def test_nothing_is_on_the_way_at_a_decode_only_if_moves_are_synchronous(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, sync_moves: bool
) -> None:
    with target_context(pair) as context:
        live = residency_for(context, "lru", sync_moves=sync_moves)
        decode = context.decode
        waiting: list[int] = []

        def watched(tokens: list[int], *, all_logits: bool = False) -> np.ndarray:
            waiting.append(int((live.experts.states_table() == native.UPLOADING).sum()))
            return decode(tokens, all_logits=all_logits)

        monkeypatch.setattr(context, "decode", watched)
        decoder = Decoder(context, live)
        list(decoder.generate(pair.target.tokenize(PROMPTS[0]), 20))
        assert live.n_moves > 0
        if sync_moves:
            assert not any(waiting) and live.worker_seconds == 0
        else:
            assert live.worker_seconds > 0
        decoder.close()
        live.close()


def test_a_policy_that_fails_ends_the_generation_with_its_own_error(pair: Pair) -> None:
    with target_context(pair) as context:
        live = residency_for(context)

        def broken(batch: Batch) -> None:
            raise ArithmeticError("the policy is broken")

        live.policy.observe = broken  # type: ignore[method-assign]
        decoder = Decoder(context, live)
        with pytest.raises(ArithmeticError, match="the policy is broken"):
            list(decoder.generate(pair.target.tokenize(PROMPTS[0]), 20))
        decoder.close()
        live.close()


def test_slots_are_filled_with_progress_and_only_what_is_missing_is_uploaded(pair: Pair) -> None:
    with target_context(pair) as context:
        live = residency_for(context)
        table = live.experts.states_table()
        hybrid = live.n_slots > 0
        assert (table[hybrid, :8] == native.RESIDENT).all() and not table[:, 8:].any()
        loads = live.experts.perf_total().n_loads
        seen: list[float] = []
        live.fill(residency.HotSet(np.roll(table == native.RESIDENT, 2, axis=1)), seen.append)
        assert seen == sorted(seen) and seen[-1] == 1.0
        assert live.experts.perf_total().n_loads - loads == 2 * hybrid.sum()
        assert (live.experts.states_table()[hybrid, 2:10] == native.RESIDENT).all()
        live.close()
