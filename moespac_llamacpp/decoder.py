"""Greedy generation with one context: prompt, then token by token, moving experts in between."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from moespac_llamacpp.models import Context
from moespac_llamacpp.residency import Residency


@dataclass
class Report:
    """What a generation did. Times in seconds."""

    n_prompt: int = 0
    n_generated: int = 0
    prompt_seconds: float = 0.0
    seconds: float = 0.0
    finish_reason: str = ""  # "stop": the model ended it; "length": max_tokens or the context
    tokens: list[int] = field(default_factory=list)

    @property
    def tps(self) -> float:
        """Generated tokens per second after the prompt."""
        return self.n_generated / self.seconds if self.seconds > 0 else 0.0


class Decoder:
    """Generates with `context`; `residency` moves experts between decodes (None: they stay where they are).

    all_logits: ask for the logits of every prompt token. Most models compute their last layer only for tokens with logits, so
    whoever observes routers (a trace) wants them all.
    """

    def __init__(self, context: Context, residency: Residency | None = None, *, all_logits: bool = False) -> None:
        self.context = context
        self.residency = residency
        self.all_logits = all_logits
        self.report = Report()

    def generate(self, prompt: Sequence[int], max_tokens: int) -> Iterator[int]:
        """Yields tokens greedily after the prompt, which is appended to the context; `self.report` is this run's.

        ValueError: the prompt is empty or does not fit into what is left of the context."""
        context, report = self.context, Report(n_prompt=len(prompt))
        self.report = report
        left = context.n_ctx - context.n_past
        if not prompt or len(prompt) > left:
            raise ValueError(f"the prompt has {len(prompt)} tokens, the context has room for 1 to {left}")
        start = time.perf_counter()
        for i in range(0, len(prompt), context.n_batch):
            logits = context.decode(prompt[i : i + context.n_batch], all_logits=self.all_logits)
        token = int(logits[-1].argmax())
        if self.residency:
            self.residency.step()
        report.prompt_seconds = time.perf_counter() - start
        start = time.perf_counter()
        try:
            while True:
                if context.model.ends(token):
                    report.finish_reason = "stop"
                    return
                report.tokens.append(token)
                report.n_generated += 1
                yield token
                if report.n_generated >= max_tokens or context.n_past >= context.n_ctx:
                    report.finish_reason = "length"
                    return
                token = int(context.decode([token])[-1].argmax())
                if self.residency:
                    self.residency.step()
        finally:
            report.seconds = time.perf_counter() - start
