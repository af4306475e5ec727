"""Generation with one context: the prompt, then step by step accept, move experts, draft, verify, roll back.

A step without a draft is a plain decode of one token. The KV of what a prompt shares with the text before it is kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from moespac_llamacpp.acceptance import END, Sampler, Sampling, log_probability, top_log_probabilities, verify
from moespac_llamacpp.draft import Draft, Drafter, DraftError, DraftLength, NoDraft, common_prefix
from moespac_llamacpp.grammar import compile_grammar
from moespac_llamacpp.models import Context
from moespac_llamacpp.native import MAX_BATCH_TOKENS
from moespac_llamacpp.residency import Residency
from moespac_llamacpp.telemetry import Step, Telemetry

#: Why a generation that was left for another one cannot go on
ABANDONED = "this text cannot go on: another one was started with the model since, or it was closed"

#: Up to so many tokens a prompt is quicker in such pieces than at once: 64 took 75 ms instead of 112, 128 took 164 instead of 138
#: (planted Qwen3-30B-A3B with 25 % of its experts in slots, H200 and 16 cores).
SHORT_PROMPT = 64

#: (token, log-probability) of the likeliest tokens of a place, likeliest first
Top = list[tuple[int, float]]


class PromptError(ValueError):
    """The prompt is empty or does not fit the context; the text is the sentence for the user."""


@dataclass
class Report:
    """What a generation did. Times in seconds."""

    n_prompt: int = 0
    n_reused: int = 0  # tokens of the prompt whose KV was there already
    n_evaluated: int = 0  # tokens that the target decoded: the rest of the prompt, accepted and rejected ones
    n_draft_evaluated: int = 0  # tokens that the draft model decoded
    n_generated: int = 0
    n_steps: int = 0  # decodes after the prompt
    n_drafted: int = 0
    n_accepted: int = 0
    n_shifts: int = 0  # times that the full context forgot half of its text
    prompt_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0  # the target's decodes after the prompt
    accept_seconds: float = 0.0  # acceptance and rollback
    seconds: float = 0.0  # all since the prompt, what the caller does with the tokens included
    finish_reason: str = ""  # "stop": the model or a stop string ended it; "length": max_tokens or the context
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # of `tokens`, natural, the target's own; if asked for
    top_logprobs: list[Top] = field(default_factory=list)  # of the places of `tokens`; if asked for
    prompt_logprobs: list[float] = field(default_factory=list)  # of the prompt's tokens but the first; if asked for
    prompt_top_logprobs: list[Top] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)  # sentences for the user, each said once per decoder

    @property
    def tps(self) -> float:
        """Generated tokens per second after the prompt."""
        return self.n_generated / self.seconds if self.seconds > 0 else 0.0

    @property
    def acceptance(self) -> float:
        """Share of the drafted tokens that stayed, 0 … 1."""
        return self.n_accepted / max(1, self.n_drafted)


class StopText:
    """Finds stop strings in bytes that come in pieces; holds back what may become one."""

    def __init__(self, stop: Sequence[str]) -> None:
        if not all(stop):
            raise ValueError("a stop string must not be empty")
        self.stop = [s.encode() for s in stop]
        self._held = b""

    def feed(self, piece: bytes) -> tuple[bytes, bool]:
        """(bytes that are certain to come before any stop string, whether one is complete)."""
        text = self._held + piece
        found = [at for at in (text.find(s) for s in self.stop) if at >= 0]
        if found:
            self._held = b""
            return text[: min(found)], True
        n = max((self._overlap(text, s) for s in self.stop), default=0)
        self._held = text[len(text) - n :]
        return text[: len(text) - n], False

    def rest(self) -> bytes:
        """What is still held back when the text ends otherwise."""
        held, self._held = self._held, b""
        return held

    @staticmethod
    def _overlap(text: bytes, stop: bytes) -> int:
        """Length of the longest end of the text that starts the stop string."""
        return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


class Decoder:
    """Generates with `context`, which it must have for itself; `residency` moves experts between decodes (None: they stay).

    drafter: guesses tokens, up to `draft_max` a step; how many is measured while it runs, unless `draft_fixed`. With a seed
    but without `draft_fixed`, text that is sampled follows the target's law but depends on times: a fixed length repeats it.
    sampling, grammar: of the texts to come, until `sample_by` changes them.
    context_shift: a full context forgets half of what follows its first n_keep tokens (-1: the prompt) and goes on, where the
    model's memory can; otherwise the text ends there.
    telemetry: gets a record of each decode.
    all_logits: ask for the logits of every prompt token. Most models compute their last layer only for tokens with logits, so
    whoever observes routers (a trace) wants them all.
    """

    def __init__(
        self,
        context: Context,
        residency: Residency | None = None,
        *,
        drafter: Drafter | None = None,
        draft_max: int = 8,
        draft_fixed: bool = False,
        sampling: Sampling | None = None,
        grammar: str | None = None,
        context_shift: bool = False,
        n_keep: int = 0,
        telemetry: Telemetry | None = None,
        all_logits: bool = False,
    ) -> None:
        """DraftError: the target cannot roll back, so that nothing can be drafted for it. GrammarError: of `sample_by`."""
        self.context = context
        self.residency = residency
        self.all_logits = all_logits
        self.drafter: Drafter = drafter or NoDraft()
        drafts = not isinstance(self.drafter, NoDraft)
        if drafts and not context.can_roll_back:
            raise DraftError(
                f"{context.model.path}: a model with recurrent state cannot roll back rejected drafts; generate without a draft"
            )
        if draft_max < 0:
            raise ValueError(f"draft_max is a number of tokens, not {draft_max}")
        limit = min(draft_max, context.max_guesses, context.n_snapshots or draft_max)
        self.length = DraftLength(limit if drafts else 0, fixed=draft_fixed)
        self.context_shift = context_shift
        self.n_keep = n_keep
        self.telemetry = telemetry
        #: called before each piece of a prompt, and after the last, with (tokens done, of how many); may raise to end it
        self.on_prompt: Callable[[int, int], object] | None = None
        self._run = 0  # the generation that the context belongs to
        self._sampled_by: tuple[Sampling, str | None] = (Sampling(), None)
        self.sampler = Sampler(Sampling(), context.model.n_vocab)
        self.sample_by(sampling or Sampling(), grammar)
        self.report = Report()
        self._kv: list[int] = []  # the tokens whose KV the context holds
        self._n_own = context.n_ctx  # so many of them at most have seen only the tokens before them in _kv (`_shift`)
        self._n_keep = 0
        self._want_logs, self._n_top = False, 0
        self._said_off = self._said_no_shift = False

    def close(self) -> None:
        """Frees the sampler; context and drafter are the caller's. A generation under way ends with its next token."""
        self._run += 1
        self.sampler.close()

    def sample_by(self, sampling: Sampling, grammar: str | None = None) -> None:
        """Sets the law of the texts to come. grammar: GBNF that they must follow. GrammarError: it cannot be parsed."""
        model = self.context.model
        self._run += 1  # no text under way may go on by another law
        if (sampling, grammar) == self._sampled_by and grammar is None and sampling.seed is None:
            return
        compiled = compile_grammar(model, grammar) if grammar is not None else None
        self.sampler.close()
        self.sampler = Sampler(sampling, model.n_vocab, grammar=compiled)
        self._sampled_by = (sampling, grammar)

    def generate(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        logprobs: bool = False,
        n_top: int = 0,
        prompt_logprobs: bool = False,
    ) -> Generator[int, None, None]:
        """Yields the tokens after the prompt, which is the whole text so far; `self.report` is this run's.

        logprobs: record the tokens' log-probabilities, and the n_top likeliest of each place. prompt_logprobs: those of the
        prompt's tokens too, for which all of it is evaluated.
        ValueError: the prompt is empty; PromptError: it is longer than the context.
        RuntimeError: another text has been started meanwhile."""
        context, report = self.context, Report(n_prompt=len(prompt))
        self.report = report
        self._run = run = self._run + 1
        self._want_logs, self._n_top = logprobs, n_top
        if not prompt:
            raise ValueError("the prompt is empty")
        if len(prompt) > context.n_ctx:
            raise PromptError(f"the prompt has {len(prompt)} tokens, the context has room for 1 to {context.n_ctx}")
        if max_tokens <= 0:  # as llama-cpp-python: until the context is full
            max_tokens = context.n_ctx
        self._n_keep = len(prompt) if self.n_keep < 0 else self.n_keep
        before = self.drafter.n_evaluated
        start = time.perf_counter()
        logits = self._prompt(prompt, prompt_logprobs)
        self.sampler.reset(prompt)
        tokens = verify(self.sampler, logits[-1:], [])
        self._log(logits[-1:], tokens)
        if self.length.draft_max:
            self.drafter.begin(prompt)
            self.drafter.accept(0, tokens[0])
        report.prompt_seconds = time.perf_counter() - start
        start = time.perf_counter()
        try:
            while True:
                for token in tokens:
                    if token == END or context.model.ends(token):
                        report.finish_reason = "stop"
                        return
                    report.tokens.append(token)
                    report.n_generated += 1
                    yield token
                    if self._run != run:
                        raise RuntimeError(ABANDONED)
                    if report.n_generated >= max_tokens:
                        report.finish_reason = "length"
                        return
                if context.n_past >= context.n_ctx and not self._shift():
                    report.finish_reason = "length"
                    return
                tokens = self._step(tokens[-1], max_tokens - report.n_generated)
        finally:
            if self.residency:
                self.residency.rest()  # a step that failed, or was interrupted, may have left moves to be started
            report.seconds = time.perf_counter() - start
            report.n_draft_evaluated = self.drafter.n_evaluated - before
            del report.logprobs[len(report.tokens) :], report.top_logprobs[len(report.tokens) :]

    def stream(
        self, prompt: Sequence[int], max_tokens: int, *, stop: Sequence[str] = (), logprobs: bool = False
    ) -> Generator[bytes, None, None]:
        """Yields the text as it comes, up to the first of the stop strings, which may span tokens."""
        stopper = StopText(stop)
        with closing(self.generate(prompt, max_tokens, logprobs=logprobs)) as tokens:
            for token in tokens:
                text, stopped = stopper.feed(self.context.model.piece(token))
                if text:
                    yield text
                if stopped:
                    self.report.finish_reason = "stop"
                    return
        if rest := stopper.rest():
            yield rest

    def _prompt(self, prompt: Sequence[int], log_all: bool) -> NDArray[np.float32]:
        """Evaluates what the context does not hold yet; logits of the last token in the last row."""
        held = self._kv[: min(self.context.n_past, self._n_own)]
        keep = 0 if log_all else min(common_prefix(held, prompt), len(prompt) - 1)  # the last token's logits are needed
        # also where nothing is to be forgotten: an interrupted decode may have left cells behind
        if not self._roll_back(keep):
            keep = 0
        self.report.n_reused = keep
        size = self._piece(len(prompt) - keep, all_logits=self.all_logits or log_all)
        for i in range(keep, len(prompt), size):
            self._show(i - keep, len(prompt) - keep)
            chunk = prompt[i : i + size]
            start = time.perf_counter()
            logits = self._decode(chunk, all_logits=self.all_logits or log_all)
            decoded = time.perf_counter()
            if log_all:
                self._log_prompt(logits, prompt[i + 1 : i + 1 + len(chunk)])
            if self.residency:
                self.residency.observe(chunk, starts=i == 0)
            if self.telemetry:
                step = Step("prompt", self.context.n_past, len(chunk), decode_ms=1000 * (decoded - start))
                step.plan_ms = 1000 * (time.perf_counter() - decoded)
                self.telemetry.record(step, self.context.experts)
        self._show(len(prompt) - keep, len(prompt) - keep)
        return logits

    def _piece(self, n: int, *, all_logits: bool) -> int:
        """Tokens of a batch in which n tokens of a prompt are evaluated."""
        experts, most = self.context.experts, self.context.n_batch
        if all_logits:
            most = min(most, self.context.n_outputs)
        if experts and MAX_BATCH_TOKENS < n <= SHORT_PROMPT and any(row.in_stream for row in experts.rows()):
            return min(most, MAX_BATCH_TOKENS)
        return most

    def _show(self, done: int, total: int) -> None:
        """RuntimeError: who was shown it has closed the decoder, or started another text."""
        run = self._run
        if self.on_prompt:
            self.on_prompt(done, total)
        if self._run != run:
            raise RuntimeError(ABANDONED)

    def _decode(self, tokens: Sequence[int], *, all_logits: bool) -> NDArray[np.float32]:
        try:
            logits = self.context.decode(tokens, all_logits=all_logits)
        except RuntimeError:  # what the context holds now is not known
            self._forget()
            raise
        self._kv += tokens
        self.report.n_evaluated += len(tokens)
        return logits

    def _roll_back(self, n_past: int) -> bool:
        """Keeps the first n_past tokens; where the model cannot, forgets all."""
        if not self.context.rollback(n_past):
            self._forget()
            return False
        del self._kv[n_past:]
        if n_past <= self._n_own:
            self._n_own = self.context.n_ctx
        return True

    def _forget(self) -> None:
        self.context.clear()
        self._kv, self._n_own = [], self.context.n_ctx

    def _shift(self) -> bool:
        """Makes room in a full context, if that was asked for and can be done."""
        if not self.context_shift:
            return False
        n_keep = min(self._n_keep, self.context.n_past - 4)  # a few tokens at least are to go
        n_discard = (self.context.n_past - n_keep) // 2
        if n_keep < 0 or not self.context.shift(n_keep, n_discard):
            if not self._said_no_shift:
                self._said_no_shift = True
                self.report.notices.append("this model's memory cannot shift: the text ends where the context is full")
            return False
        del self._kv[n_keep : n_keep + n_discard]
        # What comes after has seen what is gone: later prompts may not take it for their own.
        self._n_own = min(self._n_own, n_keep)
        self.drafter.shift(n_keep, n_discard)
        self.report.n_shifts += 1
        return True

    def _step(self, token: int, n_wanted: int) -> list[int]:
        """Decodes the last token with a draft after it; the tokens that follow, at most n_wanted."""
        context, drafter, report = self.context, self.drafter, self.report
        room = min(n_wanted, context.n_ctx - context.n_past) - 1
        n = min(self.length.choose(), room)
        start = time.perf_counter()
        draft = self._draft(token, n)
        drafted = time.perf_counter()
        batch = [token, *draft.tokens]
        if self.residency:
            self.residency.publish()
        logits = self._decode(batch, all_logits=True)
        decoded = time.perf_counter()
        tokens = verify(self.sampler, logits, draft.tokens, draft.q)
        n_accepted = len(tokens) - 1
        self._log(logits, tokens)
        observed = n_accepted == len(draft.tokens) or self._reject(len(draft.tokens) - n_accepted)
        if self.length.draft_max:
            drafter.accept(n_accepted, tokens[-1])
        accepted = time.perf_counter()
        report.n_steps += 1
        report.n_drafted += len(draft.tokens)
        report.n_accepted += n_accepted
        report.draft_seconds += drafted - start
        report.verify_seconds += decoded - drafted
        report.accept_seconds += accepted - decoded
        self.length.observe(len(draft.tokens), n_accepted, drafted - start, accepted - drafted)
        self._notice()
        if self.residency and observed:
            self.residency.observe(batch, [i <= n_accepted for i in range(len(batch))])
        if self.telemetry:
            step = Step("step", context.n_past, len(batch), len(draft.tokens), n_accepted, self._n_gained(tokens))
            times = (drafted - start, decoded - drafted, accepted - decoded, time.perf_counter() - accepted)
            step.draft_ms, step.decode_ms, step.accept_ms, step.plan_ms = (1000 * seconds for seconds in times)
            self.telemetry.record(step, context.experts)
        return tokens

    def _draft(self, token: int, n: int) -> Draft:
        """Up to n guesses after the token; moves start with each token that becomes known, while the draft takes its time."""
        residency, drafter = self.residency, self.drafter
        sampler = None if self.sampler.plain else self.sampler
        if residency is None or not drafter.takes_time or n < 1:
            if residency:
                residency.plan()
            return drafter.propose(n, sampler) if n > 0 else Draft()
        residency.plan(n_expect=n)  # the last token, and all guesses but the last
        residency.expect([token])
        return drafter.propose(n, sampler, on_guess=lambda guess: residency.expect([guess]))

    def _reject(self, n: int) -> bool:
        """Forgets the last n tokens; False if what stays had to be decoded again, so that the batch's routing is gone."""
        kept = self._kv[: len(self._kv) - n]
        if self._roll_back(len(kept)):
            return True
        # can_roll_back said otherwise: correct, once more from the start, and never again
        self.report.notices.append("this model could not roll back a rejected draft: drafting is off")
        self.length = DraftLength(0)
        size = self._piece(len(kept), all_logits=self.all_logits)
        for i in range(0, len(kept), size):
            self._decode(kept[i : i + size], all_logits=self.all_logits)
        return False

    def _log(self, logits: NDArray[np.float32], tokens: Sequence[int]) -> None:
        """Records log-probabilities where they are wanted, while the logits are there."""
        if not self._want_logs:
            return
        for row, token in zip(logits, tokens, strict=False):
            if token != END:
                self.report.logprobs.append(log_probability(row, token))
                self.report.top_logprobs.append(top_log_probabilities(row, self._n_top))

    def _log_prompt(self, logits: NDArray[np.float32], following: Sequence[int]) -> None:
        for row, token in zip(logits, following, strict=False):
            self.report.prompt_logprobs.append(log_probability(row, token))
            self.report.prompt_top_logprobs.append(top_log_probabilities(row, self._n_top))

    def _n_gained(self, tokens: Sequence[int]) -> int:
        """How many of the tokens become text: those before one that ends it."""
        ends = (i for i, token in enumerate(tokens) if token == END or self.context.model.ends(token))
        return next(ends, len(tokens))

    def _notice(self) -> None:
        self.report.notices += self.drafter.notices
        self.drafter.notices.clear()
        if self.length.off and self.length.settled and not self._said_off:
            self._said_off = True
            self.report.notices.append(
                f"drafting only costs time here (acceptance {100 * self.length.acceptance:.0f} %): it is off, and tried "
                "again now and then"
            )
