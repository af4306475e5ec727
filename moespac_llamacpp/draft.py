"""Drafters: who guesses the next tokens, and how many guesses are worth their time.

One protocol: `begin` with the text, then for each step `propose` and `accept` with what the target made of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import Protocol

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from moespac_llamacpp.models import Context, Model
from moespac_llamacpp.sampling import END, Law, Sampler

OnGuess = Callable[[int], object]

#: Batches of guessing have one token, or two when all guesses were accepted: for these a draft's context should keep graphs.
DRAFT_WIDTHS = 2

_UNUSED = 2  # LLAMA_TOKEN_ATTR_UNUSED: how padding is marked


class DraftError(ValueError):
    """This draft cannot serve this target; the text is the sentence for the user."""


class _DecodeFailed(Exception):
    """The draft's own decode failed."""


@dataclass(frozen=True)
class Draft:
    """Guesses for the next tokens. q: the law that each was drawn from, None where chance had no part in them."""

    tokens: list[int] = field(default_factory=list)
    q: list[Law] | None = None


class Drafter(Protocol):
    """notices: sentences for the user, each said once; who shows one removes it. n_evaluated: tokens decoded by the draft.
    takes_time: a proposal takes so long that experts can be uploaded meanwhile."""

    notices: list[str]
    n_evaluated: int
    takes_time: bool

    def begin(self, tokens: Sequence[int]) -> None:
        """A text starts: it may share a prefix with the last one."""

    def propose(self, n: int, sampler: Sampler | None = None, on_guess: OnGuess | None = None) -> Draft:
        """At most n guesses of what follows. sampler: draw them by this sampler, which is left as it was; None: greedily.

        on_guess: called with each guess after which more time passes, if the drafter takes time."""

    def accept(self, n_accepted: int, token: int) -> None:
        """The first n_accepted guesses stay, then `token` follows. Told after every step, also those without a draft."""

    def shift(self, n_keep: int, n_discard: int) -> None:
        """The target has forgotten n_discard tokens after the first n_keep, and goes on."""

    def close(self) -> None: ...


class NoDraft:
    """Never guesses."""

    takes_time = False

    def __init__(self) -> None:
        self.notices: list[str] = []
        self.n_evaluated = 0

    def begin(self, tokens: Sequence[int]) -> None: ...

    def propose(self, n: int, sampler: Sampler | None = None, on_guess: OnGuess | None = None) -> Draft:
        return Draft()

    def accept(self, n_accepted: int, token: int) -> None: ...

    def shift(self, n_keep: int, n_discard: int) -> None: ...

    def close(self) -> None: ...


class NgramDraft:
    """Guesses that the text goes on as it did after the last place with the same few tokens; longer matches first.

    Prompt lookup decoding (Saxena 2023), with an index instead of a search: a step costs the same in a long text. Of a text that
    goes on and on, with a context that is shifted, at least the last half of N_KEPT tokens is known; each takes 370 bytes."""

    takes_time = False
    N_KEPT = 1 << 17

    def __init__(self, n_max: int = 4, n_min: int = 2) -> None:
        if not 1 <= n_min <= n_max:
            raise ValueError(f"an n-gram has at least one token, and n_min <= n_max, not {n_min} and {n_max}")
        self.sizes = range(n_max, n_min - 1, -1)
        self.notices: list[str] = []
        self.n_evaluated = 0
        self._text: list[int] = []
        self._next: dict[tuple[int, ...], int] = {}  # n-gram: where the text went on after its last occurrence
        self._guesses: list[int] = []

    def begin(self, tokens: Sequence[int]) -> None:
        new = list(tokens)
        if self._text != new[: len(self._text)]:
            self._text, self._next = [], {}
        for token in new[len(self._text) :]:
            self._append(token)

    def _append(self, token: int) -> None:
        at = len(self._text)
        for n in self.sizes:
            if n <= at:
                self._next[tuple(self._text[at - n :])] = at
        self._text.append(token)

    def propose(self, n: int, sampler: Sampler | None = None, on_guess: OnGuess | None = None) -> Draft:
        text, self._guesses = self._text, []
        for size in self.sizes:
            at = self._next.get(tuple(text[-size:])) if size <= len(text) else None
            if at is None:
                continue
            for i in range(at, at + n):  # a match close to the end goes on in its own guesses: a period repeats
                self._guesses.append(text[i] if i < len(text) else self._guesses[i - len(text)])
            break
        return Draft(list(self._guesses))

    def accept(self, n_accepted: int, token: int) -> None:
        for guess in self._guesses[:n_accepted]:
            self._append(guess)
        self._append(token)
        self._guesses = []
        if len(self._text) > self.N_KEPT:
            self.begin(self._text[self.N_KEPT // 2 :])

    def shift(self, n_keep: int, n_discard: int) -> None:
        """Nothing to do: what was said remains a place to look things up."""

    def close(self) -> None: ...


class GgufDraft:
    """A smaller model with the target's vocabulary, in a context of its own; the KV of a common prefix is kept.

    context: of the draft model, without experts attached; the caller owns it. Where it runs is up to its model."""

    takes_time = True

    def __init__(self, context: Context, target: Model, *, context_shift: bool = False) -> None:
        """context_shift: where the draft's context is full before the target's, it forgets half of it instead of ending.

        DraftError: the vocabularies differ, or the draft cannot roll back."""
        check_vocabulary(target, context.model)
        if not context.can_roll_back:
            raise DraftError(f"{context.model.path}: a model with recurrent state cannot roll back, so it cannot draft")
        self.context = context
        self.context_shift = context_shift
        self.notices: list[str] = []
        self.n_evaluated = 0
        # Tokens beyond the smaller vocabulary are padding: no law has to know them.
        self.n_vocab = min(target.n_vocab, context.model.n_vocab)
        self._kv: list[int] = []  # what the draft's context holds
        self._pending: list[int] = []  # the text's tokens that it does not hold yet
        self._guesses: list[int] = []
        self._ended = False
        self._told: set[str] = set()

    def begin(self, tokens: Sequence[int]) -> None:
        self._ended = False
        self._guesses = []
        keep = common_prefix(self._kv[: self.context.n_past], tokens)
        keep = min(keep, len(tokens) - 1)  # the last token's logits are needed
        self._roll_back(max(0, keep))
        self._pending = list(tokens[len(self._kv) :])
        # All but the last token now, in the prompt's time: the first guess then costs what a guess costs.
        if self._room() > 1 and all(token < self.context.model.n_vocab for token in self._pending):
            try:
                self._decode(self._pending[:-1])
                self._pending = self._pending[-1:]
            except _DecodeFailed as error:
                self._fail(error)

    def _room(self) -> int:
        """How many guesses the context still has room for."""
        return self.context.n_ctx - len(self._kv) - len(self._pending) + 1

    def _roll_back(self, n: int) -> None:
        """Keeps the first n tokens; where the model cannot after all, decodes them again with the next guess."""
        kept = self._kv[:n]
        if self.context.rollback(n):
            self._kv = kept
            return
        self.context.clear()
        self._kv, self._pending = [], kept + self._pending

    def _decode(self, tokens: Sequence[int]) -> None:
        for i in range(0, len(tokens), self.context.n_batch):
            self._logits(tokens[i : i + self.context.n_batch])

    def _logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Of the last token, [1, n_vocab]."""
        try:
            logits = self.context.decode(tokens)
        except RuntimeError as error:
            raise _DecodeFailed(str(error)) from error
        self._kv += tokens
        self.n_evaluated += len(tokens)
        return logits

    def _may_draft(self, n: int) -> int:
        if n < 1 or self._ended or not self._pending:
            return 0
        if self._room() < 1 and self.context_shift:
            self.shift(0, len(self._kv) // 2)
        n = min(n, self._room())
        if n < 1:
            self._end(
                f"the draft's context of {self.context.n_ctx} tokens is full: drafting ends here, generation goes on"
            )
        elif any(token >= self.context.model.n_vocab for token in self._pending):
            self._end("the text has a token that the draft's vocabulary lacks: drafting ends here, generation goes on")
            n = 0
        return max(0, n)

    def _end(self, notice: str) -> None:
        self._ended = True
        if notice not in self._told:
            self._told.add(notice)
            self.notices.append(notice)

    def _fail(self, error: _DecodeFailed) -> None:
        self._end(f"the draft failed ({error}): drafting ends here, generation goes on")
        self.context.clear()  # it may hold less than before
        self._kv, self._pending = [], []

    def propose(self, n: int, sampler: Sampler | None = None, on_guess: OnGuess | None = None) -> Draft:
        self._guesses = []
        n = self._may_draft(n)
        if n == 0:
            return Draft()
        q: list[Law] | None = None if sampler is None else []
        own = sampler.fork() if sampler is not None else None
        try:
            self._decode(self._pending[:-DRAFT_WIDTHS])
            tokens = self._pending[-DRAFT_WIDTHS:]
            self._pending = []
            for i in range(n):
                if i > 0 and on_guess:
                    on_guess(tokens[-1])
                logits = self._logits(tokens)[-1, : self.n_vocab]
                if own is None or q is None:
                    token = int(logits.argmax())
                else:
                    law = own.law(logits)
                    token = own.draw(law)
                    if token == END:
                        if self._guesses:  # `accept` counts on it that the last guess was never decoded
                            self._roll_back(len(self._kv) - 1)
                        break
                    own.accept(token)
                    q.append(law)
                self._guesses.append(token)
                tokens = [token]
                if self.context.model.ends(token):
                    break
        except _DecodeFailed as error:  # the guesses so far are as good as any; the last of them was not decoded
            self._fail(error)
        finally:
            if own is not None:
                own.close()
        return Draft(list(self._guesses), q)

    def accept(self, n_accepted: int, token: int) -> None:
        if self._ended:
            return
        accepted = self._guesses[:n_accepted]
        if self._guesses:
            # the last guess was never decoded; of the others, the rejected ones are forgotten
            held = min(n_accepted, len(self._guesses) - 1)
            n_rejected = len(self._guesses) - 1 - held
            if n_rejected:
                self._roll_back(len(self._kv) - n_rejected)
            accepted = accepted[held:]
        self._pending += [*accepted, token]
        self._guesses = []

    def shift(self, n_keep: int, n_discard: int) -> None:
        n_discard = min(n_discard, len(self._kv) - n_keep)
        if n_discard < 1:
            return
        kept = self._kv[:n_keep] + self._kv[n_keep + n_discard :]
        if self.context.shift(n_keep, n_discard):
            self._kv = kept
            return
        self.context.clear()
        self._kv, self._pending = [], kept + self._pending

    def close(self) -> None: ...


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens the two start with in common."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(np.asarray(a[:n], np.int64) != np.asarray(b[:n], np.int64))
    return int(differ[0]) if len(differ) else n


def check_vocabulary(target: Model, draft: Model) -> None:
    """DraftError with the first token that differs. Padding, at the end or in the midst of one of the two, is no difference."""
    refusal = f"{draft.path} cannot draft for {target.path}"
    types = [llama_cpp.llama_vocab_type(m.vocab) for m in (target, draft)]
    if types[0] != types[1]:
        raise DraftError(f"{refusal}: their tokenizers are of different types ({types[1]} and {types[0]})")
    for token in range(max(target.n_vocab, draft.n_vocab)):
        texts = [_token_text(m, token) for m in (draft, target)]
        if texts[0] == texts[1] or any(_is_padding(m, token) for m in (draft, target)):
            continue
        shown = ["missing" if text is None else repr(text.decode("utf-8", "replace")) for text in texts]
        raise DraftError(f"{refusal}: token {token} is {shown[0]} in the draft and {shown[1]} in the target")


def _token_text(model: Model, token: int) -> bytes | None:
    return llama_cpp.llama_vocab_get_text(model.vocab, token) if token < model.n_vocab else None


def _is_padding(model: Model, token: int) -> bool:
    return token < model.n_vocab and bool(llama_cpp.llama_vocab_get_attr(model.vocab, token) & _UNUSED)


# ----------------------------------------------------------------------------------------------------------------------------
# how many guesses


class DraftLength:
    """How many tokens to draft, from measured acceptance and measured times.

    With each guess accepted at rate a, n guesses yield (1 − a^(n+1)) / (1 − a) tokens (Leviathan et al. 2023, equation 1) in
    the time of verifying n + 1 tokens and drafting n. The n of the most tokens per second is taken, 0 included. Times are
    medians of the last few steps of each length (of two the lower: the first may have made the graph), between lengths
    interpolated and beyond the longest drawn on in a straight line.
    A text begins with a short draft and with none; a length that seems best and was never taken is tried at once. So the first 64
    tokens reach 93 to 98 % of the best fixed length's rate where they had 78 to 91 % when each text began with draft_max guesses
    (simulated with times of an H200 and of a slower machine; only where any draft pays, 98 instead of 100 %). Now and then the
    length of 0, one less and one more than the best that was not tried for longest is tried, at growing intervals while drafting
    does not pay.
    """

    WINDOW = 7  # steps of each length that a median looks at
    FADE, FADE_OFF = (
        0.97,
        0.85,
    )  # of acceptance, per step with a draft: some 30 steps are remembered, 6 where few are tried
    FIRST = 2  # guesses to begin with
    WARM = 2  # steps of each length at the beginning, and of a try
    PROBE, PROBE_MAX = (
        24,
        192,
    )  # steps between tries of another length; doubled up to the maximum while the best length is 0

    def __init__(self, draft_max: int, *, fixed: bool = False) -> None:
        self.draft_max = draft_max
        self.fixed = fixed
        self.off = False  # drafting costs more than it gains
        self._verify: dict[int, deque[float]] = {}  # by number of guesses
        self._median: dict[int, float] = {}  # of these
        self._draft: deque[float] = deque(maxlen=self.WINDOW)  # seconds for a guess
        self._accepted, self._tested = 0.7, 1.0  # a weak prior
        first = (0, min(self.FIRST, draft_max))
        self._queue = (
            [] if fixed or draft_max == 0 else [n for n in first for _ in range(self.WARM)]
        )  # taken from the end
        self._steps = 0
        self._last_try: dict[int, int] = {}  # by length, the step
        self._since = 0
        self._interval = self.PROBE
        self._best = draft_max
        self._lengths = np.arange(draft_max + 1)

    @property
    def acceptance(self) -> float:
        """The rate at which a guess that was looked at stays."""
        return self._accepted / self._tested

    @property
    def settled(self) -> bool:
        """Has it seen more than the first steps of a text?"""
        return self._steps >= self.PROBE

    def choose(self) -> int:
        """The number of guesses for the coming step."""
        if self.fixed or self.draft_max == 0:
            return self.draft_max
        if self._queue:
            return self._queue.pop()
        self._since += 1
        if self._since < self._interval:
            return self._best
        self._since = 0
        self._interval = min(2 * self._interval, self.PROBE_MAX) if self.off else self.PROBE
        near = {0, self._best - 1, self._best + 1} & set(range(self.draft_max + 1)) - {self._best}
        other = min(sorted(near), key=lambda n: self._last_try.get(n, -1))
        self._queue = [other] * self.WARM
        return self._queue.pop()

    def observe(self, n_drafted: int, n_accepted: int, draft_seconds: float, verify_seconds: float) -> None:
        """What a step did. verify_seconds: from the decode to the accepted tokens."""
        if self.fixed or self.draft_max == 0:
            return
        self._steps += 1
        self._last_try[n_drafted] = self._steps
        times = self._verify.setdefault(n_drafted, deque(maxlen=self.WINDOW))
        times.append(verify_seconds)
        self._median[n_drafted] = median_low(times)
        if n_drafted:
            self._draft.append(draft_seconds / n_drafted)
            fade = self.FADE_OFF if self.off else self.FADE
            self._accepted = fade * self._accepted + n_accepted
            self._tested = fade * self._tested + n_accepted + (n_accepted < n_drafted)
        if not self._queue and 0 in self._verify and self._draft:
            self._best = int(self.speeds().argmax())
            self.off = self._best == 0
            if self._best not in self._median:
                self._queue = [self._best] * self.WARM

    def speeds(self) -> NDArray[np.float64]:
        """Expected tokens per second with 0, 1, … draft_max guesses, float64."""
        a = min(self.acceptance, 0.999)
        known = sorted(self._median)
        times = [self._median[n] for n in known]
        verify = np.interp(self._lengths, known, times)
        if len(known) > 1:
            slope = max(0.0, (times[-1] - times[-2]) / (known[-1] - known[-2]))
            verify += slope * np.maximum(0, self._lengths - known[-1])
        tokens = (1 - a ** (self._lengths + 1)) / (1 - a)
        return np.asarray(tokens / (verify + self._lengths * median_low(self._draft)), np.float64)
