"""Texts longer than the context, and models whose memory forgets in its own way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import families
from lowlevel import EXACT
from moespac_llamacpp import Moespac
from moespac_llamacpp.acceptance import log_probability
from moespac_llamacpp.decoder import Decoder
from moespac_llamacpp.draft import GgufDraft, NgramDraft, NoDraft
from moespac_llamacpp.models import Context, Model
from moespac_llamacpp.sampling import Sampling
from pair import Pair, assert_same_text, draft_context, plain_greedy, target_context
from test_decoder import Script

N_CTX, N_LONG = 256, 420


@pytest.fixture
def context(pair: Pair) -> Iterator[Context]:
    with target_context(pair, n_ctx=N_CTX) as context:
        yield context


def endless(model: Model) -> dict[int, float]:
    """A bias under which no text ends by itself."""
    return {token: -np.inf for token in range(model.n_vocab) if model.ends(token)}


def shifted_logprobs(
    plain: Context, prompt: Sequence[int], tokens: Sequence[int], n_keep: int, part: float
) -> NDArray[np.float64]:
    """Log-probabilities of the tokens by upstream's plain decoding, one by one, with a shift whenever its context is full.

    part: of what follows the first n_keep, that goes."""
    plain.clear()
    row = plain.decode(prompt)[-1]
    found = []
    for token in tokens:
        found.append(log_probability(row, token))
        if plain.n_past == plain.n_ctx:
            assert plain.shift(n_keep, int((plain.n_past - n_keep) * part))
        row = plain.decode([token])[-1]
    return np.array(found)


@pytest.mark.parametrize(("name", "n_keep"), [("none", 0), ("ngram", -1), ("model", 5), ("small model", 0)])
def test_a_shift_is_upstreams_and_keeps_the_draft_in_step(pair: Pair, context: Context, name: str, n_keep: int) -> None:
    prompt = pair.target.tokenize("It is a truth universally acknowledged, that a young man")
    opened: list[Context] = []
    drafter: Any = NgramDraft() if name == "ngram" else NoDraft()
    if name.endswith("model"):
        opened.append(draft_context(pair, 256 if name == "model" else 64))
        drafter = GgufDraft(opened[0], pair.target, context_shift=True)
    decoder = Decoder(
        context,
        drafter=drafter,
        draft_max=4,
        draft_fixed=True,
        sampling=Sampling(temperature=0.8, seed=4, logit_bias=endless(pair.target)),
        context_shift=True,
        n_keep=n_keep,
    )
    tokens = list(decoder.generate(prompt, N_LONG, logprobs=True))
    report = decoder.report
    assert len(tokens) == N_LONG and report.finish_reason == "length" and report.notices == []
    assert report.n_shifts >= 1 and context.n_past == len(decoder._kv) <= N_CTX
    kept = len(prompt) if n_keep < 0 else n_keep
    with target_context(pair, n_ctx=N_CTX) as plain:
        right, wrong = (shifted_logprobs(plain, prompt, tokens, kept, part) for part in (0.5, 0.6))
    # only batch sizes make a difference; another shift makes one from the first on
    noise, other = (float(np.abs(by - report.logprobs).mean()) for by in (right, wrong))
    assert noise < (0.03 if name != "none" else 1e-6) and other > 0.01
    assert name != "none" or np.abs(wrong - report.logprobs)[: N_CTX - len(prompt)].max() < 1e-6
    if name.endswith("model"):
        assert report.n_accepted > 0.2 * report.n_drafted > 20
    if name == "model":  # it holds what the target holds, but for the last few tokens
        n = min(len(drafter._kv), len(decoder._kv)) - 5
        assert n > N_CTX // 4 and drafter._kv[:n] == decoder._kv[:n]
    decoder.close()
    for context in opened:
        context.close()


def test_what_saw_forgotten_tokens_is_not_reused(pair: Pair, context: Context) -> None:
    prompt = pair.target.tokenize("It is a truth universally acknowledged, that a young man")
    decoder = Decoder(context, context_shift=True, n_keep=4)
    list(decoder.generate(prompt, N_CTX))
    assert decoder.report.n_shifts == 1
    again = [*decoder._kv, 5]  # the very tokens that the context holds
    expected = None
    with target_context(pair, attach=False, n_ctx=N_CTX) as plain:
        expected = plain_greedy(plain, again, 5)
        tokens = list(decoder.generate(again, 5))
        assert decoder.report.n_reused == 4
        assert_same_text(plain, again, expected, tokens)
    list(decoder.generate([*again, *tokens], 1))  # and from then on all of it
    assert decoder.report.n_reused == len(again) + len(tokens) - 1


def test_without_being_asked_a_full_context_ends_the_text(pair: Pair, context: Context) -> None:
    prompt = pair.target.tokenize("It is a truth universally acknowledged, that a young man")
    decoder = Decoder(context)
    assert len(list(decoder.generate(prompt, N_LONG))) == N_CTX - len(prompt) + 1
    assert decoder.report.finish_reason == "length" and decoder.report.n_shifts == 0


def test_a_memory_that_cannot_shift_ends_the_text_with_a_sentence(root: Path) -> None:
    """Upstream would abort. (Mamba's state is one of all that was said, and shifts.)"""
    with Model(families.cached_model(root, "qwen35moe")) as model, Context(model, n_ctx=256, n_threads=1) as context:
        decoder = Decoder(context, context_shift=True, sampling=Sampling(logit_bias=endless(model)))
        for said in (1, 0):  # once
            n = len(list(decoder.generate([5, 6, 7], 400)))
            assert n == context.n_ctx - 3 + 1 and decoder.report.finish_reason == "length"
            sentence = "this model's memory cannot shift: the text ends where the context is full"
            assert decoder.report.notices == [sentence][:said]


@pytest.mark.parametrize("family", ["qwen35moe", "nemotron_h_moe"])
def test_recurrent_state_drafts_within_its_snapshots(root: Path, family: str) -> None:
    with (
        Model(families.cached_model(root, family)) as model,
        Context(model, n_ctx=256, n_threads=1, params={**EXACT, "n_rs_seq": 3}) as context,
        Context(model, n_ctx=256, n_threads=1, attach=False, params=EXACT) as plain,
    ):
        assert model.is_recurrent and context.n_snapshots == 3
        n_drafted = n_accepted = 0
        for prompt in ([5, 6, 7, 8, 9], [5, 6, 7, 10], [20, 21, 20, 21, 20]):
            expected = plain_greedy(plain, prompt, 40)
            for drafter in (Script(wrong=7), Script(prompt + expected), NgramDraft()):
                decoder = Decoder(context, drafter=drafter, draft_max=8, draft_fixed=True)
                assert decoder.length.draft_max == 3
                assert_same_text(plain, prompt, expected, list(decoder.generate(prompt, 40)))
                assert decoder.report.notices == []
                n_drafted += decoder.report.n_drafted
                n_accepted += decoder.report.n_accepted
                decoder.close()
        assert 5 < n_accepted < n_drafted - 20


def test_a_recurrent_model_gets_snapshots_for_its_drafts(root: Path) -> None:
    with Moespac(families.cached_model(root, "qwen35moe"), draft="ngram", n_ctx=256, n_threads=1, draft_max=4) as llm:
        assert llm.decoder.context.n_snapshots == 4 == llm.decoder.length.draft_max
        assert llm.notices == [n for n in llm.notices if "draft" not in n]
        assert len(list(llm.decoder.generate([5, 6, 7], 20))) <= 20
    with Moespac(families.cached_model(root, "qwen35moe"), draft="none", n_ctx=256, n_threads=1) as llm:
        assert llm.decoder.context.n_snapshots == 0


def test_log_probabilities_of_a_prompt_are_those_of_its_tokens(pair: Pair, context: Context) -> None:
    prompt = pair.target.tokenize("It is a truth universally acknowledged, that a young man")
    decoder = Decoder(context, sampling=Sampling())
    list(decoder.generate(prompt, 2))
    list(decoder.generate(prompt, 2, logprobs=True, n_top=3, prompt_logprobs=True))
    report = decoder.report
    assert report.n_reused == 0 and len(report.prompt_logprobs) == len(report.prompt_top_logprobs) == len(prompt) - 1
    assert len(report.logprobs) == len(report.top_logprobs) == 2
    with target_context(pair, attach=False, n_ctx=N_CTX) as plain:
        logits = plain.decode(prompt, all_logits=True).astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    for i, token in enumerate(prompt[1:]):
        assert report.prompt_logprobs[i] == pytest.approx(logprobs[i, token], abs=0.1)
        top = report.prompt_top_logprobs[i]
        assert [p for _, p in top] == sorted((p for _, p in top), reverse=True) and len(top) == 3
        assert top[0][1] == pytest.approx(logprobs[i].max(), abs=0.1)
    assert report.top_logprobs[0][0] == (report.tokens[0], pytest.approx(report.logprobs[0]))


def test_a_prompt_can_be_left_between_its_pieces(pair: Pair) -> None:
    prompt = pair.target.tokenize("and his own ways, " * 20)
    seen: list[tuple[int, int]] = []

    def leave(done: int, total: int) -> None:
        seen.append((done, total))
        if done >= 64:
            raise KeyboardInterrupt

    with target_context(pair, n_batch=32) as context:
        decoder = Decoder(context)
        decoder.on_prompt = leave
        with pytest.raises(KeyboardInterrupt):
            list(decoder.generate(prompt, 5))
        assert seen == [(0, len(prompt)), (32, len(prompt)), (64, len(prompt))]
        decoder.on_prompt = None
        seen.clear()
        decoder.on_prompt = lambda done, total: seen.append((done, total))
        assert len(list(decoder.generate(prompt, 5))) == 5
        assert decoder.report.n_reused == 64
        assert seen[0] == (0, len(prompt) - 64) and seen[-1] == (len(prompt) - 64,) * 2
