"""Drafters guess within their means, keep in step with the text, and refuse a target that they do not fit."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("llama_cpp")

import families
from moespac_llamacpp.acceptance import Sampler, Sampling
from moespac_llamacpp.decoder import Decoder
from moespac_llamacpp.draft import (
    DraftError,
    DraftLength,
    GgufDraft,
    NgramDraft,
    NoDraft,
    check_vocabulary,
    common_prefix,
)
from moespac_llamacpp.models import Context, Model
from pair import DRAFT, PROMPTS, Pair, assert_same_text, draft_context, plain_greedy, target_context


@pytest.fixture
def gguf_draft(pair: Pair) -> Iterator[GgufDraft]:
    with draft_context(pair) as context:
        yield GgufDraft(context, pair.target)


# --- n-grams ---------------------------------------------------------------------------------------------------------------


def test_ngrams_go_on_as_the_text_did_the_last_time() -> None:
    draft = NgramDraft(n_max=3, n_min=2)
    draft.begin([1, 2, 3, 4, 9, 2, 3, 5, 8, 2, 3])
    assert draft.propose(3).tokens == [5, 8, 2]
    draft.accept(0, 4)  # "2 3 4": the longer match wins over a later one of "3 4"
    assert draft.propose(2).tokens == [9, 2]
    draft.accept(2, 3)
    assert draft._text[-4:] == [4, 9, 2, 3]
    assert NoDraft().propose(4).tokens == []


def test_ngrams_repeat_a_period_beyond_the_end_of_the_text() -> None:
    draft = NgramDraft()
    draft.begin([7, 1, 2, 3, 1, 2, 3])
    assert draft.propose(8).tokens == [1, 2, 3, 1, 2, 3, 1, 2]


def test_ngrams_know_nothing_of_an_earlier_text() -> None:
    draft = NgramDraft()
    draft.begin([1, 2, 3, 4])
    draft.begin([5, 6, 1, 2])
    assert draft.propose(2).tokens == []
    draft.begin([5, 6, 1, 2, 9, 6, 1, 2])  # the same text, longer
    assert draft.propose(2).tokens == [9, 6]


@pytest.mark.parametrize("seed", range(3))
def test_ngram_lookup_is_the_search_that_it_stands_for(seed: int) -> None:
    rng = np.random.default_rng(seed)
    text = rng.integers(0, 3, 60).tolist()
    draft = NgramDraft(n_max=4, n_min=2)
    draft.begin(text[:20])
    for token in text[20:]:
        expected: list[int] = []
        for n in (4, 3, 2):
            known = draft._text
            starts = [i for i in range(len(known) - n) if known[i : i + n] == known[-n:]]
            if starts:
                at, grown = starts[-1] + n, list(known)
                for i in range(5):
                    grown.append(grown[at + i])
                expected = grown[len(known) :]
                break
        assert draft.propose(5).tokens == expected
        draft.accept(0, token)


def test_ngrams_of_an_endless_text_take_no_endless_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NgramDraft, "N_KEPT", 100)
    draft = NgramDraft()
    draft.begin([1, 2, 3])
    for i in range(1000):
        draft.accept(0, 10 + i % 40)
        assert len(draft._text) <= 100 and len(draft._next) <= 3 * 100
    assert draft.propose(2).tokens == [10, 11]


# --- a draft model ---------------------------------------------------------------------------------------------------------


def test_a_draft_model_guesses_as_if_it_had_read_the_text_anew(pair: Pair, gguf_draft: GgufDraft) -> None:
    """Whatever was accepted and rolled back before."""
    rng = np.random.default_rng(1)
    text = pair.target.tokenize(PROMPTS[0])
    gguf_draft.begin(text)
    with draft_context(pair) as fresh:
        for _ in range(12):
            n = int(rng.integers(0, 6))
            guesses = gguf_draft.propose(n).tokens
            assert len(guesses) == n or pair.target.ends(guesses[-1])
            fresh.clear()
            expected = []
            logits = fresh.decode(text)
            for _ in guesses:
                expected.append(int(logits[-1].argmax()))
                logits = fresh.decode(expected[-1:])
            assert guesses == expected
            stay = int(rng.integers(0, len(guesses) + 1))
            token = int(rng.integers(10, 4000))
            gguf_draft.accept(stay, token)
            text += [*guesses[:stay], token]
            assert gguf_draft._kv + gguf_draft._pending == text
            assert gguf_draft.context.n_past == len(gguf_draft._kv)


def test_a_draft_records_the_law_that_it_drew_from(pair: Pair, gguf_draft: GgufDraft) -> None:
    """After the target's chain, with penalties on what it has guessed itself; the target's own chain is left as it was."""
    text = pair.target.tokenize(PROMPTS[0])
    sampling = Sampling(temperature=1.2, repeat_penalty=1.6, seed=4)
    with Sampler(sampling, pair.target.n_vocab) as sampler, Sampler(sampling, pair.target.n_vocab) as other:
        sampler.reset(text)
        gguf_draft.begin(text)
        draft = gguf_draft.propose(8, sampler)
        assert draft.q is not None and len(draft.q) == len(draft.tokens) > 4
        with draft_context(pair) as fresh:
            logits = fresh.decode(text)
            for i, law in enumerate(draft.q):
                other.reset([*text, *draft.tokens[:i]])
                expected = other.law(logits[-1])
                assert law.of(draft.tokens[i]) > 0
                ids = np.union1d(law.ids, expected.ids).tolist()
                assert max(abs(law.of(t) - expected.of(t)) for t in ids) < 1e-3
                logits = fresh.decode(draft.tokens[i : i + 1])
        other.reset(text)
        flat = np.zeros(pair.target.n_vocab, np.float32)
        assert np.array_equal(np.sort(sampler.law(flat).ids), np.sort(other.law(flat).ids))


def test_a_draft_model_keeps_what_two_texts_share(pair: Pair, gguf_draft: GgufDraft) -> None:
    text = pair.target.tokenize(PROMPTS[1])
    gguf_draft.begin(text)
    gguf_draft.propose(3)
    before = gguf_draft.n_evaluated
    gguf_draft.begin([*text[:-2], 100, 101, 102, 103])
    gguf_draft.propose(1)
    assert gguf_draft.n_evaluated - before == 4


def test_a_full_draft_context_ends_drafting_and_says_so_once(pair: Pair) -> None:
    with draft_context(pair, 256) as context:
        draft = GgufDraft(context, pair.target)
        draft.begin([5] * 250)
        n_guessed = 0
        for _ in range(6):
            n = len(draft.propose(3).tokens)
            draft.accept(n, 5)
            n_guessed += n
            assert context.n_past <= 256
        assert 0 < n_guessed <= 8
        assert [n for n in draft.notices if "context of 256 tokens is full" in n] == draft.notices
        assert len(draft.notices) == 1
        draft.begin([5] * 300)
        assert draft.propose(3).tokens == []
        draft.begin([5] * 20)  # a shorter text: there is room again
        assert len(draft.propose(3).tokens) == 3


def test_no_vocabulary_differs_from_itself(pair: Pair) -> None:
    check_vocabulary(pair.target, pair.draft)


def test_a_vocabulary_mismatch_names_the_first_token_that_differs(pair: Pair, tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    raw = DRAFT.read_bytes()
    entry = b"\x03\0\0\0\0\0\0\0ion"  # token 300
    assert raw.count(entry) == 1
    path.write_bytes(raw.replace(entry, b"\x03\0\0\0\0\0\0\0iom"))
    with Model(path) as draft, Context(draft, n_ctx=256, attach=False) as context:
        with pytest.raises(DraftError, match="token 300 is 'iom' in the draft and 'ion' in the target"):
            GgufDraft(context, pair.target)
        assert context.n_past == 0


def test_padding_is_no_mismatch(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gguf

    path = tmp_path / "padded.gguf"
    shutil.copy(DRAFT, path)
    reader = gguf.GGUFReader(path, "r+")
    kinds = reader.fields["tokenizer.ggml.token_type"]
    for i in kinds.data[-96:]:
        kinds.parts[i][0] = int(gguf.TokenType.UNUSED)
    reader.data.flush()
    del reader, kinds
    with Model(path) as padded, Model(DRAFT) as shorter:
        shorter.n_vocab = padded.n_vocab - 96
        check_vocabulary(padded, shorter)
        check_vocabulary(shorter, padded)
        shorter.n_vocab -= 1
        with pytest.raises(DraftError, match=f"token {shorter.n_vocab} is missing in the draft and '"):
            check_vocabulary(padded, shorter)


def test_a_draft_with_another_tokenizer_is_refused(pair: Pair, root: Path) -> None:
    with (
        Model(families.cached_model(root, "qwen3moe")) as draft,
        pytest.raises(DraftError, match="their tokenizers are of different types"),
    ):
        check_vocabulary(pair.target, draft)


def test_a_draft_that_cannot_roll_back_is_refused(root: Path) -> None:
    with (
        Model(families.cached_model(root, "qwen35moe")) as model,
        Context(model, n_ctx=256, attach=False) as context,
        pytest.raises(DraftError, match="cannot roll back, so it cannot draft"),
    ):
        GgufDraft(context, model)


# --- how many --------------------------------------------------------------------------------------------------------------


def run(length: DraftLength, rate: float, token: float, guess: float, n: int = 400, seed: int = 0) -> list[int]:
    """Lengths chosen where a step takes 1 + token × guesses, a guess `guess`, and each stays at `rate`."""
    rng = np.random.default_rng(seed)
    chosen = []
    for _ in range(n):
        k = length.choose()
        stay = int((rng.random(k) < rate).cumprod().sum())
        length.observe(k, stay, guess * k, (1 + token * k) * rng.uniform(0.95, 1.05))
        chosen.append(k)
    return chosen


def best(rate: float, token: float, guess: float, draft_max: int) -> int:
    """The length of the highest rate of tokens, from the true numbers."""
    return max(range(draft_max + 1), key=lambda n: sum(rate**i for i in range(n + 1)) / (1 + (token + guess) * n))


@pytest.mark.parametrize("rate, token, guess", [(0.9, 0.05, 0.02), (0.6, 0.1, 0.1), (0.75, 0.3, 0.05), (0.2, 0.5, 0.1)])
def test_the_length_follows_acceptance_and_cost(rate: float, token: float, guess: float) -> None:
    length = DraftLength(8)
    chosen = run(length, rate, token, guess)[200:]
    assert abs(float(np.median(chosen)) - best(rate, token, guess, 8)) <= 1
    assert length.off == (best(rate, token, guess, 8) == 0)


def test_a_text_begins_with_a_short_draft_and_goes_on_with_what_pays() -> None:
    dear = run(DraftLength(8), rate=0.75, token=0.4, guess=0.5, n=24)
    assert dear[:4] == [2, 2, 0, 0] or dear[:4] == [0, 0, 2, 2]
    assert dear[4:] == [0] * 20, "where a draft costs more than it brings, nothing else is tried in the first steps"
    cheap = run(DraftLength(8), rate=0.9, token=0.02, guess=0.02, n=24)
    assert np.mean(cheap[6:]) > 5
    assert set(run(DraftLength(1), rate=0.9, token=0.02, guess=0.02, n=24)[4:]) == {1}


def test_a_draft_that_does_not_pay_is_tried_less_and_less() -> None:
    chosen = run(DraftLength(8), rate=0.1, token=0.8, guess=0.2, n=800)
    assert sum(n > 0 for n in chosen[20:]) <= 0.03 * len(chosen)
    assert any(chosen[20:])


def test_drafting_comes_back_when_it_pays_again() -> None:
    length = DraftLength(8)
    run(length, rate=0.05, token=0.3, guess=0.1)
    assert length.off
    run(length, rate=0.95, token=0.05, guess=0.01, n=3000)
    assert not length.off


def test_a_fixed_length_stays() -> None:
    assert set(run(DraftLength(5, fixed=True), rate=0.0, token=1.0, guess=1.0)) == {5}
    assert set(run(DraftLength(0), rate=0.9, token=0.0, guess=0.0)) == {0}


def test_common_prefix() -> None:
    assert common_prefix([1, 2, 3], [1, 2, 4, 5]) == 2
    assert common_prefix([], [1]) == 0 and common_prefix([1, 2], [1, 2]) == 2


@pytest.mark.parametrize("at", [0, 1, 4, 6])
def test_a_draft_whose_decode_fails_ends_the_drafting_and_not_the_text(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    prompt = pair.target.tokenize(PROMPTS[0])
    with target_context(pair) as context, draft_context(pair) as own, target_context(pair, attach=False) as plain:
        left = [at]

        def failing(tokens: Sequence[int], *, all_logits: bool = False) -> Any:
            left[0] -= 1
            if left[0] == -1:
                own.clear()
                raise RuntimeError("decoding 1 tokens failed with code -3: no memory")
            return Context.decode(own, tokens, all_logits=all_logits)

        monkeypatch.setattr(own, "decode", failing)
        decoder = Decoder(context, drafter=GgufDraft(own, pair.target), draft_max=3, draft_fixed=True)
        expected = plain_greedy(plain, prompt, 20)
        for _ in range(2):
            assert_same_text(plain, prompt, expected, list(decoder.generate(prompt, 20)))
            if left[0] <= -1 and decoder.report.notices:
                assert decoder.report.notices == [
                    "the draft failed (decoding 1 tokens failed with code -3: no memory): drafting ends here, generation goes on"
                ]
        assert left[0] < -1 and decoder.report.n_accepted > 0, "the next text has a draft again"
        decoder.close()
