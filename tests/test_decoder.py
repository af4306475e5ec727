"""Drafting changes the time, not the text; what is decoded, kept and forgotten is counted."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import families
from lowlevel import EXACT
from moespac_llamacpp import native
from moespac_llamacpp.acceptance import Sampler, Sampling
from moespac_llamacpp.decoder import Decoder, StopText
from moespac_llamacpp.draft import Draft, DraftError, GgufDraft, NgramDraft, NoDraft
from moespac_llamacpp.models import Context, Model
from moespac_llamacpp.policies import NAMES, make
from moespac_llamacpp.residency import Residency
from pair import (
    N_CTX,
    PROMPTS,
    TARGET,
    Pair,
    Shuffle,
    assert_same_text,
    draft_context,
    hundred_prompts,
    plain_greedy,
    target_context,
)
from test_acceptance import chi_square

DRAFTERS, SHARES = ("none", "ngram", "model"), (0.0, 0.17, 0.5)
MAY_MOVE = ("fiddler", "moe-spac-released")  # once, from the first tokens; where five tokens of a batch chose an expert
LONG = "and his own ways, " * 8  # the tiny target goes on with it for ever


@dataclass
class Script:
    """A drafter that guesses what it was told to: `text` by position, or always `wrong`."""

    text: Sequence[int] = ()
    wrong: int | None = None
    at: int = 0
    notices: list[str] = field(default_factory=list)
    n_evaluated: int = 0

    def begin(self, tokens: Sequence[int]) -> None:
        self.at = len(tokens)

    def propose(self, n: int, sampler: Sampler | None = None) -> Draft:
        return Draft([self.wrong] * n if self.wrong is not None else list(self.text[self.at : self.at + n]))

    def accept(self, n_accepted: int, token: int) -> None:
        self.at += n_accepted + 1

    def close(self) -> None: ...


@pytest.fixture(scope="module")
def plain(pair: Pair) -> Iterator[Context]:
    with target_context(pair, attach=False) as context:
        yield context


@pytest.fixture
def context(pair: Pair) -> Iterator[Context]:
    with target_context(pair) as context:
        yield context


@pytest.fixture(scope="module")
def texts(pair: Pair, plain: Context) -> list[tuple[list[int], list[int]]]:
    """(prompt, what plain decoding goes on with) of every prompt, 64 tokens."""
    prompts = [pair.target.tokenize(text) for text in PROMPTS]
    return [(prompt, plain_greedy(plain, prompt, 64)) for prompt in prompts]


@pytest.fixture(scope="module")
def hundred(pair: Pair, plain: Context) -> list[tuple[list[int], list[int]]]:
    """The same of 100 prompts, 256 tokens: made once for all long tests."""
    return [(prompt, plain_greedy(plain, prompt, 256)) for prompt in hundred_prompts(pair.target)]


@pytest.fixture(scope="module")
def sure(texts: list[tuple[list[int], list[int]]]) -> tuple[list[int], list[int]]:
    """The text in which the target is never in doubt: top-2 logits at least 0.18 apart for 40 tokens."""
    return texts[4][0], texts[4][1][:40]


def with_drafter(name: str, pair: Pair, stack: list[Context]) -> Any:
    if name == "model":
        stack.append(draft_context(pair))
        return GgufDraft(stack[-1], pair.target)
    return NgramDraft() if name == "ngram" else NoDraft()


def with_policy(name: str, context: Context, share: float) -> Residency:
    """As for users: slots for the share, filled, and a policy that moves what they hold while it generates."""
    experts = context.experts
    assert experts is not None
    rows = map(experts.row, range(experts.n_rows))
    experts.set_slots([round(share * row.n_expert) if row.hybrid else 0 for row in rows])
    residency = Residency(experts, make(name, experts.n_rows, experts.n_expert))
    residency.fill()
    return residency


def check_greedy(
    pair: Pair,
    plain: Context,
    cases: list[tuple[list[int], list[int]]],
    name: str,
    share: float,
    *,
    fixed: bool = True,
    n: int = 64,
    policy: str | None = None,
    execution: str = "auto",
) -> int:
    """Generates every text with the drafter, experts moving, and compares; how many are equal. policy None: they move at random.

    The tiny target is quantized and often in doubt: upstream alone, with the same drafts and no experts attached, parts from
    itself in 0 (none), 1 (n-gram) and 4 (model) of the 10 texts of 64 tokens. So ties are checked one by one, and their number is
    bounded (docs/same-text.md).
    """
    opened: list[Context] = []
    with target_context(pair, execution=execution) as context:
        moves = Shuffle(context.experts, share) if policy is None else with_policy(policy, context, share)
        drafter = with_drafter(name, pair, opened)
        decoder = Decoder(context, moves, drafter=drafter, draft_max=5, draft_fixed=fixed)
        n_same = n_accepted = n_rejected = 0
        for prompt, expected in cases:
            tokens = list(decoder.generate(prompt, n))
            report = decoder.report
            assert report.tokens == tokens and report.n_generated == len(tokens) and report.n_prompt == len(prompt)
            # every decoded token is the prompt's, the last one's of a step, or a draft
            assert report.n_evaluated == len(prompt) - report.n_reused + report.n_steps + report.n_drafted
            assert context.n_past == len(decoder._kv)
            assert (prompt + tokens)[: context.n_past] == decoder._kv[: len(prompt + tokens)]
            n_same += assert_same_text(plain, prompt, expected, tokens)
            n_accepted += report.n_accepted
            n_rejected += report.n_drafted - report.n_accepted
        decoder.close()
        if isinstance(moves, Residency):
            moves.close()
            assert (moves.n_moves > 0) == (share > 0 and policy != "static") or policy in MAY_MOVE
        else:
            assert (moves.n_moves > 100) == (share > 0)
        assert n_same >= 0.25 * len(cases)
        assert name == "none" or not fixed or min(n_accepted, n_rejected) > 2 * len(cases)
    for other in opened:
        other.close()
    return n_same


def upstream_drafted(pair: Pair, plain: Context, cases: list[tuple[list[int], list[int]]], name: str) -> int:
    """How many texts of 256 tokens are equal with the same drafts and nothing attached."""
    opened: list[Context] = []
    with target_context(pair, attach=False) as context:
        decoder = Decoder(context, drafter=with_drafter(name, pair, opened), draft_max=5, draft_fixed=True)
        texts = [(prompt, expected, list(decoder.generate(prompt, 256))) for prompt, expected in cases]
        decoder.close()
    for other in opened:
        other.close()
    return sum(assert_same_text(plain, *text) for text in texts)


@pytest.mark.parametrize("share", [0.0, 0.25])
@pytest.mark.parametrize("name", ["none", "ngram", "model"])
def test_greedy_text_is_that_of_plain_decoding(
    pair: Pair, plain: Context, texts: list[tuple[list[int], list[int]]], name: str, share: float
) -> None:
    check_greedy(pair, plain, texts, name, share)


@pytest.mark.parametrize("name, share", [("ngram", 0.25), ("model", 0.0)])
def test_greedy_text_with_ggmls_products_is_that_of_plain_decoding(
    pair: Pair, plain: Context, texts: list[tuple[list[int], list[int]]], name: str, share: float
) -> None:
    """Our kernels for cold experts round otherwise."""
    native.set_kernel_limit(0)
    try:
        check_greedy(pair, plain, texts, name, share)
    finally:
        native.set_kernel_limit(2)


def test_greedy_text_does_not_depend_on_the_draft_length(
    pair: Pair, plain: Context, texts: list[tuple[list[int], list[int]]]
) -> None:
    check_greedy(pair, plain, texts, "model", 0.25, fixed=False)


@pytest.mark.full
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("name", DRAFTERS)
def test_greedy_text_of_100_prompts(
    pair: Pair, plain: Context, hundred: list[tuple[list[int], list[int]]], name: str, share: float
) -> None:
    n_same = check_greedy(pair, plain, hundred, name, share, n=256)
    print(f"{name}, {100 * share:.0f} % in slots: {n_same} of 100 texts equal ", end="")


@pytest.mark.parametrize("policy", NAMES)
@pytest.mark.parametrize("name", DRAFTERS)
def test_greedy_text_is_that_of_plain_decoding_by_every_policy(
    pair: Pair, plain: Context, texts: list[tuple[list[int], list[int]]], name: str, policy: str
) -> None:
    """Every policy with every drafter and every share, every drafter with every share; all three together in the long tests."""
    at = NAMES.index(policy) + DRAFTERS.index(name)
    short = [(prompt, expected[:24]) for prompt, expected in texts[:5]]
    check_greedy(pair, plain, short, name, SHARES[at % len(SHARES)], policy=policy, n=24)


@pytest.mark.full
@pytest.mark.parametrize("policy", NAMES)
@pytest.mark.parametrize("share", [share for share in SHARES if share > 0])
@pytest.mark.parametrize("name", DRAFTERS)
def test_greedy_text_of_100_prompts_by_every_policy(
    pair: Pair, plain: Context, hundred: list[tuple[list[int], list[int]]], name: str, share: float, policy: str
) -> None:
    """Without slots (above) a policy has nothing to move. All of them take an hour and a half on two cores."""
    n_same = check_greedy(pair, plain, hundred, name, share, policy=policy, n=256)
    print(f"{policy}, {name}, {100 * share:.0f} % in slots: {n_same} of 100 texts equal ", end="")


@pytest.mark.full
@pytest.mark.parametrize("name", ["none", "ngram", "model"])
def test_upstream_parts_from_itself_where_its_batches_have_another_width(
    pair: Pair, plain: Context, hundred: list[tuple[list[int], list[int]]], name: str
) -> None:
    """The other direction: with nothing attached and the same drafts. What our texts are held to is what upstream keeps."""
    n_same = upstream_drafted(pair, plain, hundred, name)
    print(f"{name}, nothing attached: {n_same} of 100 texts equal ", end="")
    assert (n_same == 100) == (name == "none"), "without drafts every batch has one token"


def test_a_token_that_is_no_tie_is_found(pair: Pair, plain: Context, texts: list[tuple[list[int], list[int]]]) -> None:
    """What texts are held to: the second best token of the surest place is none that upstream might have taken."""
    prompt, expected = texts[4]
    plain.clear()
    logits = plain.decode([*prompt, *expected][:-1], all_logits=True)[len(prompt) - 1 :]
    best = np.sort(logits, axis=1)[:, -2:]
    at = int((best[:, 1] - best[:, 0]).argmax())
    wrong = [*expected[:at], int(np.argsort(logits[at])[-2]), *expected[at + 1 :]]
    with pytest.raises(pytest.fail.Exception, match=rf"token {at} is .* below the best"):
        assert_same_text(plain, prompt, expected, wrong)


def test_a_perfect_draft_takes_few_steps_and_a_wrong_one_all(
    context: Context, sure: tuple[list[int], list[int]]
) -> None:
    prompt, expected = sure
    n = len(expected)
    perfect = Decoder(context, drafter=Script(prompt + expected), draft_max=7, draft_fixed=True)
    assert list(perfect.generate(prompt, n)) == expected
    assert perfect.report.n_accepted == perfect.report.n_drafted
    assert perfect.report.n_steps == -(-(n - 1) // 8)  # the prompt yields the first token
    context.clear()
    wrong = Decoder(context, drafter=Script(wrong=7), draft_max=7, draft_fixed=True)
    assert 7 not in expected
    assert list(wrong.generate(prompt, n)) == expected
    assert wrong.report.n_accepted == 0 and wrong.report.n_steps == n - 1
    assert context.n_past == len(prompt) + n - 1


def test_a_draft_that_only_costs_time_is_switched_off_and_says_so_once(pair: Pair, context: Context) -> None:
    decoder = Decoder(context, drafter=Script(wrong=7), draft_max=8)
    prompt = pair.target.tokenize(LONG)
    notices = []
    for _ in range(2):
        list(decoder.generate(prompt, 150))
        notices += decoder.report.notices
    assert len(notices) == 1 and "drafting only costs time here (acceptance" in notices[0]
    assert decoder.report.n_drafted < 30


# --- what is kept between texts --------------------------------------------------------------------------------------------


def test_only_the_new_part_of_a_text_is_evaluated(pair: Pair, plain: Context, context: Context) -> None:
    first = pair.target.tokenize(PROMPTS[1])
    with draft_context(pair) as own:
        drafter = GgufDraft(own, pair.target)
        decoder = Decoder(context, drafter=drafter, draft_max=4, draft_fixed=True)
        answer = list(decoder.generate(first, 20))
        more = pair.target.tokenize(PROMPTS[5])[:6]
        second = [*first, *answer, *more]
        tokens = list(decoder.generate(second, 1))
        # the last token of the answer was never decoded
        assert decoder.report.n_reused == len(first) + len(answer) - 1
        assert decoder.report.n_evaluated == len(more) + 1
        assert decoder.report.n_draft_evaluated <= len(more) + 2
        assert_same_text(plain, second, plain_greedy(plain, second, 1), tokens)
        # another text with the same start; and the very same text
        third = [*second[:10], *more]
        expected = plain_greedy(plain, third, 12)
        for n_reused in (10, len(third) - 1):
            assert_same_text(plain, third, expected, list(decoder.generate(third, 12)))
            assert decoder.report.n_reused == n_reused


def test_a_generation_that_is_left_early_harms_no_later_one(
    context: Context, sure: tuple[list[int], list[int]]
) -> None:
    prompt, expected = sure[0], sure[1][:24]
    decoder = Decoder(context, drafter=Script(prompt + expected), draft_max=6, draft_fixed=True)
    for n in (1, 3, 9):
        generation = decoder.generate(prompt, 24)
        for _ in range(n):
            next(generation)
        generation.close()
        assert decoder.report.n_generated == n and decoder.report.tokens == expected[:n]
        assert list(decoder.generate(prompt, 24)) == expected
    context.clear()  # behind the decoder's back
    assert list(decoder.generate(prompt, 24)) == expected
    assert decoder.report.n_reused == 0


def test_long_prompts_go_in_batches(pair: Pair, plain: Context) -> None:
    prompt = pair.target.tokenize(LONG * 3)
    with target_context(pair, n_batch=64) as context:
        assert len(prompt) > 2 * context.n_batch
        decoder = Decoder(context, drafter=NgramDraft(), draft_max=5, draft_fixed=True)
        tokens = list(decoder.generate(prompt, 20))
    assert_same_text(plain, prompt, plain_greedy(plain, prompt, 20), tokens)


# --- the end ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["none", "ngram", "model"])
@pytest.mark.parametrize("left", [0, 1, 2, 11])
def test_a_full_context_ends_the_text_with_length(pair: Pair, name: str, left: int) -> None:
    opened: list[Context] = []
    with target_context(pair, n_ctx=256) as context, target_context(pair, attach=False, n_ctx=256) as plain:
        prompt = (pair.target.tokenize(LONG) * 8)[: 256 - left]
        expected = plain_greedy(plain, prompt, 100)
        assert len(expected) == left + 1
        decoder = Decoder(context, drafter=with_drafter(name, pair, opened), draft_max=5, draft_fixed=True)
        assert_same_text(plain, prompt, expected, list(decoder.generate(prompt, 100)))
        assert decoder.report.finish_reason == "length"
        with pytest.raises(ValueError, match="the prompt has 257 tokens, the context has room for 1 to 256"):
            next(decoder.generate([5] * 257, 1))
    for other in opened:
        other.close()


def test_generation_goes_on_where_the_drafts_context_ends(pair: Pair, plain: Context, context: Context) -> None:
    prompt = (pair.target.tokenize(LONG) * 8)[:240]
    expected = plain_greedy(plain, prompt, 60)
    with draft_context(pair, 256) as own:
        decoder = Decoder(context, drafter=GgufDraft(own, pair.target), draft_max=5, draft_fixed=True)
        assert_same_text(plain, prompt, expected, list(decoder.generate(prompt, 60)))
    assert decoder.report.n_generated == 60 and decoder.report.n_drafted > 0
    assert decoder.report.notices == [
        "the draft's context of 256 tokens is full: drafting ends here, generation goes on"
    ]


def test_the_end_token_ends_the_text_in_the_midst_of_a_draft(pair: Pair, context: Context, plain: Context) -> None:
    prompt = pair.target.tokenize(pair.target.chat_prompt('What does "heron" mean?'))
    expected = plain_greedy(plain, prompt, 300)
    if len(expected) == 300:
        pytest.skip("the tiny target does not end this text")
    end = next(t for t in range(pair.target.n_vocab) if pair.target.ends(t))
    decoder = Decoder(context, drafter=Script([*prompt, *expected, end, 8, 8, 8, 8]), draft_max=6, draft_fixed=True)
    assert_same_text(plain, prompt, expected, list(decoder.generate(prompt, 300)))
    assert decoder.report.finish_reason == "stop"


def test_max_tokens_are_not_exceeded(pair: Pair, context: Context) -> None:
    prompt = pair.target.tokenize(LONG)
    for n in (1, 2, 7):
        decoder = Decoder(context, drafter=NgramDraft(), draft_max=5, draft_fixed=True)
        assert len(list(decoder.generate(prompt, n))) == n
        assert decoder.report.finish_reason == "length"
        assert decoder.report.n_drafted < n


def test_stop_strings_may_span_tokens(
    pair: Pair, plain: Context, context: Context, sure: tuple[list[int], list[int]]
) -> None:
    prompt, expected = sure
    pieces = [pair.target.piece(token) for token in expected]
    text = b"".join(pieces).decode()
    border = len(b"".join(pieces[:20]))
    stop = text[border - 3 : border + 3]
    decoder = Decoder(context, drafter=NgramDraft(), draft_max=5, draft_fixed=True)
    chunks = list(decoder.stream(prompt, 40, stop=["never said", stop]))
    assert b"".join(chunks).decode() == text[: text.index(stop)]
    assert decoder.report.finish_reason == "stop"
    assert len(chunks) > 3  # it came while it was made
    assert b"".join(decoder.stream(prompt, 40, stop=["never said"])).decode() == text
    assert decoder.report.finish_reason == "length"


def test_what_may_become_a_stop_string_is_held_back() -> None:
    stopper = StopText(["END", "ä!"])
    assert stopper.feed(b"the E") == (b"the ", False)
    assert stopper.feed(b"N") == (b"", False)
    assert stopper.feed(b"E") == (b"EN", False)
    assert stopper.feed(b"N\xc3") == (b"EN", False)
    assert stopper.feed(b"\xa4?") == (b"\xc3\xa4?", False)
    assert stopper.feed(b"x\xc3\xa4! END") == (b"x", True)
    stopper.feed(b"EN")
    assert stopper.rest() == b"EN" and stopper.rest() == b""
    with pytest.raises(ValueError, match="must not be empty"):
        StopText([""])


# --- the law ---------------------------------------------------------------------------------------------------------------


def test_log_probabilities_are_the_targets_own(pair: Pair, plain: Context, context: Context) -> None:
    prompt = pair.target.tokenize(PROMPTS[0])
    decoder = Decoder(context, drafter=NgramDraft(), draft_max=4, draft_fixed=True)
    tokens = list(decoder.generate(prompt, 30, logprobs=True))
    plain.clear()
    logits = plain.decode(prompt + tokens, all_logits=True)[len(prompt) - 1 : -1].astype(np.float64)
    expected = (logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)))[np.arange(len(tokens)), tokens]
    assert len(decoder.report.logprobs) == len(tokens) and decoder.report.n_drafted > 0
    # within what batch sizes and kernels of quantized weights make of the logits
    assert np.abs(expected - decoder.report.logprobs).max() < 0.1
    assert max(decoder.report.logprobs) < 0


@pytest.mark.parametrize("name", ["ngram", "model"])
def test_sampled_text_follows_the_targets_law(pair: Pair, context: Context, plain: Context, name: str) -> None:
    """The first three tokens after a prompt, of two candidates each, the second and third by way of drafts."""
    sampling = Sampling(temperature=4, top_k=2, top_p=1, min_p=0, seed=3)
    prompt = pair.target.tokenize("and his own ways, and his own ways, and")
    law: dict[tuple[int, ...], float] = {(): 1.0}
    with Sampler(sampling, pair.target.n_vocab) as sampler:
        for _ in range(3):
            longer = {}
            for text, p in law.items():
                plain.clear()
                at = sampler.law(plain.decode([*prompt, *text])[-1])
                longer |= {(*text, int(t)): p * float(q) for t, q in zip(at.ids, at.p, strict=True)}
            law = longer
    opened: list[Context] = []
    decoder = Decoder(
        context, drafter=with_drafter(name, pair, opened), draft_max=2, draft_fixed=True, sampling=sampling
    )
    n_accepted = n_drafted = 0
    seen: Counter[tuple[int, ...]] = Counter()
    for _ in range(400):
        seen[tuple(list(decoder.generate(prompt, 4))[:3])] += 1
        n_drafted += decoder.report.n_drafted
        n_accepted += decoder.report.n_accepted
    assert n_drafted > 300 and 30 < n_accepted < n_drafted - 30
    value, limit = chi_square(seen, law)
    assert value < limit
    for other in opened:
        other.close()


def test_a_seed_repeats_the_text(pair: Pair, context: Context) -> None:
    prompt = pair.target.tokenize(PROMPTS[0])
    texts = []
    for seed in (1, 1, 2):
        context.clear()
        sampling = Sampling(temperature=0.9, repeat_penalty=1.1, seed=seed)
        decoder = Decoder(context, drafter=NgramDraft(), draft_fixed=True, sampling=sampling)
        texts.append(list(decoder.generate(prompt, 30)))
    assert texts[0] == texts[1] != texts[2]


# --- models that cannot roll back ------------------------------------------------------------------------------------------


def test_a_recurrent_target_is_refused_for_drafting_and_generates_without(root: Path) -> None:
    with (
        Model(families.cached_model(root, "qwen35moe")) as model,
        Context(model, n_ctx=256, n_threads=1) as context,
        Context(model, n_ctx=256, n_threads=1, attach=False) as plain,
    ):
        with pytest.raises(DraftError, match="recurrent state cannot roll back rejected drafts; generate without"):
            Decoder(context, drafter=NgramDraft())
        assert context.n_past == 0
        decoder = Decoder(context)
        for prompt, n_reused in (([5, 6, 7, 8, 9], 0), ([5, 6, 7, 10], 0), ([5, 6, 7, 10, 11], None)):
            expected = plain_greedy(plain, prompt, 12)
            assert_same_text(plain, prompt, expected, list(decoder.generate(prompt, 12)))
            assert n_reused is None or decoder.report.n_reused == n_reused


def test_a_target_that_fails_to_roll_back_is_read_anew_without_drafts(
    pair: Pair, plain: Context, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = pair.target.tokenize(PROMPTS[1])
    expected = plain_greedy(plain, prompt, 16)
    decoder = Decoder(context, drafter=Script(wrong=7), draft_max=3, draft_fixed=True)
    generation = decoder.generate(prompt, 16)
    tokens = [next(generation)]
    monkeypatch.setattr(context, "rollback", lambda n_past: False)
    tokens += generation
    assert_same_text(plain, prompt, expected, tokens)
    assert decoder.report.n_drafted == 3
    assert decoder.report.notices == ["this model could not roll back a rejected draft: drafting is off"]


# --- the command line ------------------------------------------------------------------------------------------------------


@pytest.fixture
def moespac() -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "moespac_llamacpp.cli", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    return run


def test_generate_takes_a_drafter_and_tells_its_acceptance(
    moespac: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    outs = []
    for kind in ("none", "model"):
        done = moespac("generate", PROMPTS[1], "-n", "40", "-t", "1", "--draft", kind, "--stop", "young")
        assert done.returncode == 0, done.stderr
        assert ("drafted tokens accepted" in done.stderr) == (kind == "model")
        outs.append(done.stdout)
    assert outs[0] == outs[1] and "young" not in outs[0]


def test_generate_refuses_a_draft_that_does_not_fit(
    moespac: Callable[..., subprocess.CompletedProcess[str]], root: Path
) -> None:
    done = moespac("generate", "x", "-md", str(families.cached_model(root, "qwen3moe")))
    assert done.returncode == 1 and done.stdout == ""
    assert "cannot draft for" in done.stderr and "Traceback" not in done.stderr


def test_a_missing_draft_model_is_one_sentence(
    moespac: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    copy = tmp_path / "copy.gguf"  # the bundled target itself has a draft
    copy.symlink_to(TARGET)
    done = moespac("generate", "x", "-m", str(copy), "--draft", "model")
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == "moespac: --draft model needs a draft model: give one with -md\n"


@pytest.mark.parametrize("fails", [False, True])
def test_a_policy_learns_from_every_batch_but_one_that_was_read_anew(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """The real Residency, fed by the decoder; a rollback that fails leaves the routing of another decode behind."""
    with target_context(pair) as context, draft_context(pair) as own:
        assert context.experts is not None
        slots = [8 if r.hybrid else 0 for r in map(context.experts.row, range(context.experts.n_rows))]
        context.experts.set_slots(slots)
        policy = make("moe-spac", context.experts.n_rows, context.experts.n_expert)
        residency = Residency(context.experts, policy)
        decoder = Decoder(context, residency, drafter=GgufDraft(own, pair.target), draft_max=4, draft_fixed=True)
        seen: list[int] = []
        observe = policy.observe
        monkeypatch.setattr(policy, "observe", lambda batch: (seen.append(batch.n_tokens), observe(batch)))
        if fails:
            monkeypatch.setattr(context, "rollback", lambda n_past: n_past == 0 and Context.rollback(context, 0))
        prompt = pair.target.tokenize(PROMPTS[0])
        tokens = list(decoder.generate(prompt, 40))
        residency.join()
        assert len(tokens) > 10 and seen[0] == min(len(prompt), 32)
        assert residency.n_moves > 0
        if not fails:
            assert sum(seen) == decoder.report.n_evaluated
        decoder.close()


@pytest.mark.parametrize("name", ["model", "ngram"])
@pytest.mark.parametrize("after", [1, 6])
def test_after_a_failed_decode_the_next_text_is_read_anew_by_target_and_draft(
    pair: Pair, name: str, after: int
) -> None:
    """In-stream, a CPU thread hangs; the decode fails after llama_decode has returned."""
    prompt = pair.target.tokenize(PROMPTS[0])
    with target_context(pair, attach=False) as plain:
        expected = plain_greedy(plain, prompt, 24)
        with target_context(pair, attach=False) as context, draft_context(pair) as own:
            context.experts = experts = native.Experts(
                context.pointer, execution="in-stream", pool_threads=2, timeout_ms=200
            )
            experts.set_slots([8 if r.hybrid else 0 for r in map(experts.row, range(experts.n_rows))])
            residency = Residency(experts, make("moe-spac", experts.n_rows, experts.n_expert))
            residency.fill()
            drafter = GgufDraft(own, pair.target) if name == "model" else NgramDraft()
            decoder = Decoder(context, residency, drafter=drafter, draft_max=3, draft_fixed=True)
            said = []
            with pytest.raises(
                RuntimeError, match=r"decoding \d+ tokens failed: the CPU threads did not .* is empty now"
            ):
                for token in decoder.generate(prompt, 24):
                    said.append(token)
                    if len(said) == after:
                        experts.inject_pool_fault(1, 800)
            assert decoder.report.tokens == said and decoder.report.finish_reason == ""
            assert context.n_past == 0 and decoder._kv == []
            if isinstance(drafter, GgufDraft):
                assert len(drafter._kv) == own.n_past
            tokens = list(decoder.generate(prompt, 24))
            assert decoder.report.n_reused == 0
            assert_same_text(plain, prompt, expected, tokens)
            if isinstance(drafter, GgufDraft):
                assert drafter._kv == (prompt + tokens)[: own.n_past]
            decoder.close()
            residency.close()


@pytest.mark.parametrize(("execution", "pieces"), [("in-stream", [32, 18]), ("portable", [50])])
def test_a_short_prompt_is_computed_on_both_sides_at_once(pair: Pair, execution: str, pieces: list[int]) -> None:
    """In-stream, in batches that layers with slots can share between device and CPU; longer ones in the prompt's own way."""
    prompt = (pair.target.tokenize(PROMPTS[1]) * 20)[:120]
    with (
        Context(pair.target, n_ctx=N_CTX, n_threads=1, execution=execution, params=EXACT) as context,
        target_context(pair, attach=False) as plain,
    ):
        assert context.experts is not None
        context.experts.set_slots([row.n_expert // 2 for row in context.experts.rows()])
        decoder = Decoder(context)
        for n, expected in ((50, pieces), (20, [20]), (100, [100])):
            seen: list[int] = []
            decoder.on_prompt = lambda done, total, seen=seen: seen.append(done)  # type: ignore[misc]
            context.clear()
            first = next(decoder.generate(prompt[:n], 1))
            assert np.diff(seen).tolist() == expected
            plain.clear()
            logits = plain.decode(prompt[:n])[-1]
            assert logits[first] > logits.max() - 0.2, "another token than upstream's, and not nearly as good"
        decoder.close()
