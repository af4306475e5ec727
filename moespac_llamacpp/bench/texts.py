"""What is generated: pieces of a planted chain, or prompts of one's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from moespac_llamacpp.synth.plan import Plan


@dataclass(frozen=True)
class Text:
    """A prompt, how many tokens to generate, and what they must be (None: not known)."""

    prompt: list[int]
    n: int
    follows: list[int] | None = None


class Texts(Protocol):
    def next(self, n_prompt: int, n: int) -> Text:
        """A text that nothing was measured on before, as long as there are any."""


class PlantedTexts:
    """Pieces of a pair's chain, one after the other."""

    def __init__(self, plan: Plan) -> None:
        self.chain = plan.chain
        self._at = 0

    def next(self, n_prompt: int, n: int) -> Text:
        if self._at + n_prompt + n > len(self.chain):
            self._at = 0
        piece = self.chain[self._at : self._at + n_prompt + n].tolist()
        self._at += n_prompt + n
        return Text(piece[:n_prompt], n, piece[n_prompt:])


class Prompts:
    """Prompts in turn, their ends where they are longer than n_prompt."""

    def __init__(self, prompts: Sequence[list[int]]) -> None:
        self.prompts = list(prompts)
        self._at = 0

    def next(self, n_prompt: int, n: int) -> Text:
        prompt = self.prompts[self._at % len(self.prompts)]
        self._at += 1
        return Text(prompt[-n_prompt:], n)
