"""A conversation with one decoder: its messages, their text in the model's template, and what each answer cost.

An answer's own tokens stay in the text of the next turn, so that the KV of all that was said before is used again; text that the
template changes afterwards (trimmed, without its reasoning) is tokenized anew, and reused as far as it is the same.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from moespac_llamacpp import native
from moespac_llamacpp.decoder import Decoder, Report
from moespac_llamacpp.models import Message, Model


class ContextFullError(ValueError):
    """The conversation does not fit the context; the text is the sentence for the user."""


@dataclass(frozen=True)
class Turn:
    """What one answer, or several together, did and cost. Times in seconds."""

    n_turns: int = 0
    n_prompt: int = 0
    n_reused: int = 0  # tokens of the prompt whose KV was there already
    n_generated: int = 0
    n_drafted: int = 0
    n_accepted: int = 0
    n_hot_pairs: int = 0
    n_cold_pairs: int = 0
    n_loads: int = 0
    n_streamed_experts: int = 0
    n_ahead_experts: int = 0
    n_load_bytes: int = 0
    resident_bytes: int = 0  # at the end
    prompt_seconds: float = 0.0
    seconds: float = 0.0
    finish_reason: str = ""  # "stop", "length", or "interrupted"

    def __add__(self, other: Turn) -> Turn:
        """Sums; what is true of an end is the later one's."""
        kept: dict[str, Any] = {"resident_bytes": other.resident_bytes, "finish_reason": other.finish_reason}
        mine, theirs = vars(self), vars(other)
        return Turn(**{name: kept[name] if name in kept else mine[name] + theirs[name] for name in mine})

    @property
    def tps(self) -> float:
        return self.n_generated / self.seconds if self.seconds > 0 else 0.0

    @property
    def acceptance(self) -> float:
        return self.n_accepted / max(1, self.n_drafted)

    @property
    def hit_rate(self) -> float:
        return self.n_hot_pairs / max(1, self.n_hot_pairs + self.n_cold_pairs)

    def record(self) -> dict[str, object]:
        """For JSON."""
        shares = {"tps": self.tps, "acceptance": self.acceptance, "hit_rate": self.hit_rate}
        return vars(self) | {name: round(value, 4) for name, value in shares.items()}

    def status(self) -> str:
        """One line for the terminal."""
        drafts = f"{100 * self.acceptance:.0f} % of {self.n_drafted} drafts accepted, " if self.n_drafted else ""
        return (
            f"{self.n_generated} tokens at {self.tps:.1f} TPS, {self.n_reused} of {self.n_prompt} prompt tokens reused, "
            f"{drafts}hit rate {100 * self.hit_rate:.1f} %, {self.resident_bytes / 2**20:.1f} MiB of experts resident"
        )


class Spoken:
    """The last text and its answer, with the tokens that they were made of: another tokenization would lose their KV."""

    def __init__(self) -> None:
        self._text = ""  # "" if there is none
        self._tokens: list[int] = []

    def tokenize(self, model: Model, text: str) -> list[int]:
        """The text's tokens; as far as it repeats what was said, the very same ones."""
        if self._text and text.startswith(self._text):
            return self._tokens + model.tokenize(text[len(self._text) :], bos=False)
        return model.tokenize(text)

    def keep(self, model: Model, text: str, prompt: list[int], answer: str, tokens: list[int]) -> None:
        """`answer` was made of `tokens` after the text, whose tokens are `prompt`."""
        spoken = [model.piece(token) for token in tokens]
        self.clear()
        if model.splices and all(spoken) and b"".join(spoken) == answer.encode():
            self._text, self._tokens = text + answer, prompt + tokens

    def clear(self) -> None:
        self._text, self._tokens = "", []


class Chat:
    """Messages and the decoder that answers them. After each `say`, `last` is what it did and `total` what all did together."""

    def __init__(
        self, decoder: Decoder, system: str | None = None, template: Mapping[str, object] | None = None
    ) -> None:
        """template: values that the model's template may look at. ValueError: it takes no system message."""
        self.decoder = decoder
        self.system = system
        self.template = dict(template or {})
        self.messages: list[Message] = []
        self.last = Turn()
        self.total = Turn()
        self._spoken = Spoken()
        self.clear()
        self._render("Hello")  # a template that refuses the system message does so before the first question

    def clear(self) -> None:
        """Forgets all but the system message."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []
        self._spoken.clear()

    def _render(self, user: str) -> tuple[str, list[int]]:
        """The whole text up to the answer, and its tokens."""
        model = self.decoder.context.model
        text = model.chat_prompt([*self.messages, {"role": "user", "content": user}], **self.template)
        return text, self._spoken.tokenize(model, text)

    def say(self, user: str, max_tokens: int | None = None, stop: Sequence[str] = ()) -> Generator[bytes, None, None]:
        """Yields the answer as it comes; bytes, since a character may span tokens. Close it to stop the answer.

        What was said by then stays in the history; a question without any answer is withdrawn when it was stopped or failed.
        max_tokens: None for as many as the context holds. ContextFullError: no room for an answer; nothing has changed."""
        context = self.decoder.context
        text, prompt = self._render(user)
        if len(prompt) >= context.n_ctx:
            raise ContextFullError(
                f"the context of {context.n_ctx} tokens is full: with this message the conversation has {len(prompt)}"
            )
        if context.experts:
            context.experts.reset_perf()
        self.decoder.report = Report(n_prompt=len(prompt))  # also where it fails before it starts
        said = b""
        try:
            pieces = self.decoder.stream(prompt, max_tokens or context.n_ctx, stop=stop)
            with closing(pieces):
                for piece in pieces:
                    said += piece
                    yield piece
        finally:
            self._keep(user, text, prompt, said)

    def _keep(self, user: str, text: str, prompt: list[int], said: bytes) -> None:
        report, model = self.decoder.report, self.decoder.context.model
        self.last = turn_of(self.decoder)
        self.total += self.last
        if not said and not report.finish_reason:
            return
        answer = said.decode("utf-8", "ignore")  # a stopped answer may end within a character
        self.messages += [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]
        self._spoken.keep(model, text, prompt, answer, report.tokens)

    @property
    def full(self) -> bool:
        """Did the last answer end because the context was full?"""
        return self.last.finish_reason == "length" and self.decoder.context.n_past >= self.decoder.context.n_ctx


def turn_of(decoder: Decoder) -> Turn:
    """What the decoder's last generation did, if the experts' counters were set to zero before it."""
    report, experts = decoder.report, decoder.context.experts
    perf = experts.perf_total() if experts else native.Perf()
    return Turn(
        n_turns=1,
        n_prompt=report.n_prompt,
        n_reused=report.n_reused,
        n_generated=report.n_generated,
        n_drafted=report.n_drafted,
        n_accepted=report.n_accepted,
        n_hot_pairs=perf.n_hot_pairs,
        n_cold_pairs=perf.n_cold_pairs,
        n_loads=perf.n_loads,
        n_streamed_experts=perf.n_streamed_experts,
        n_ahead_experts=perf.n_ahead_experts,
        n_load_bytes=perf.n_load_bytes,
        resident_bytes=resident_bytes(experts) if experts else 0,
        prompt_seconds=report.prompt_seconds,
        seconds=report.seconds,
        finish_reason=report.finish_reason or "interrupted",
    )


def resident_bytes(experts: native.Experts) -> int:
    """Bytes of the experts that are on the device now."""
    n_resident = (experts.states_table() == native.RESIDENT).sum(axis=1)
    return sum(int(n_resident[row.row]) * row.expert_bytes for row in experts.rows())
