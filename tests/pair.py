"""The bundled tiny pair for tests of drafting: models once a session, plain decoding to compare with, moves at random."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import moespac_llamacpp
from lowlevel import EXACT
from moespac_llamacpp import native
from moespac_llamacpp.models import Context, Model

DATA = Path(moespac_llamacpp.__file__).parent / "data"
TARGET, DRAFT = DATA / "tiny-moe-Q4_K_M.gguf", DATA / "tiny-draft-Q8_0.gguf"
N_CTX = 512
PROMPTS = (
    "The heron stood in the river and",
    "It is a truth universally acknowledged, that a",
    "def read_config(path):\n",
    "In the morning the old man went down to the harbour. In the morning the old man",
    "import os\nimport sys\n\nclass Reader:\n    def __init__(self",
    "She looked at the letter, and she said",
    "There were three of them in the carriage:",
    "for i in range(10):\n    print(",
    "The meaning of the word is",
    "Chapter 2\n\nOn the next day",
)


@dataclass
class Pair:
    target: Model
    draft: Model


class Shuffle:
    """Stands in for Residency: between decodes experts come and go at random, half of them while they are still on the way."""

    def __init__(self, experts: native.Experts, share: float, seed: int = 0) -> None:
        self.experts = experts
        self.rng = np.random.default_rng(seed)
        self.n_moves = 0
        slots = np.zeros(experts.n_rows, np.int32)
        self.rows = [r for r in experts.rows() if r.hybrid]
        for row in self.rows:
            slots[row.row] = round(share * row.n_expert)
        experts.set_slots(slots)
        for row in self.rows:
            for expert in range(slots[row.row]):
                experts.load(row.row, expert)
        experts.sync()
        experts.publish()

    def observe(self, tokens: Sequence[int], accepted: Sequence[bool] | None = None, *, starts: bool = False) -> None:
        pass

    def plan(self, n_expect: int = 0) -> int:
        return self.step()

    def expect(self, tokens: Sequence[int]) -> int:
        return 0

    def rest(self) -> None:
        """It has no thread."""

    def publish(self) -> int:
        return self.experts.publish()

    def step(self) -> int:
        for row in self.rows:
            states = self.experts.states(row.row)
            residents, cold = np.flatnonzero(states == native.RESIDENT), np.flatnonzero(states == native.COLD)
            if len(residents) and len(cold):
                self.experts.evict(row.row, int(self.rng.choice(residents)))
                self.experts.load(row.row, int(self.rng.choice(cold)))
                self.n_moves += 1
        if self.rng.random() < 0.5:
            self.experts.sync()
        self.experts.publish()
        return 0


def hundred_prompts(target: Model) -> list[list[int]]:
    """Each of PROMPTS, 1 to 10 tokens of noise, and each of PROMPTS again."""
    rng = np.random.default_rng(0)
    sources = [target.tokenize(text) for text in PROMPTS]
    return [[*sources[i % 10], *rng.integers(10, 4000, 1 + i // 10).tolist(), *sources[i // 10]] for i in range(100)]


def target_context(
    pair: Pair, *, attach: bool = True, n_ctx: int = N_CTX, n_batch: int = 512, execution: str = "auto"
) -> Context:
    """With upstream's most exact attention: what remains of batch sizes is in the quantized weights' products."""
    options = {"n_ctx": n_ctx, "n_batch": n_batch, "n_outputs": n_batch, "n_threads": 1}
    return Context(pair.target, attach=attach, execution=execution, params=EXACT, **options)


def draft_context(pair: Pair, n_ctx: int = N_CTX) -> Context:
    return Context(pair.draft, n_ctx=n_ctx, n_threads=1, attach=False)


def plain_greedy(context: Context, prompt: Sequence[int], n: int) -> list[int]:
    """Upstream's plain decoding, token by token; `context` has nothing attached."""
    context.clear()
    token = int(context.decode(prompt)[-1].argmax())
    tokens: list[int] = []
    while not context.model.ends(token):
        tokens.append(token)
        if len(tokens) == n or context.n_past == context.n_ctx:
            break
        token = int(context.decode([token])[-1].argmax())
    return tokens


def assert_same_text(plain: Context, prompt: Sequence[int], expected: list[int], tokens: list[int]) -> bool:
    """True if equal. Else every token must be one that upstream itself might have taken after the text before it: no further from
    the best one than the distance of two likely tokens differs between upstream's batch sizes, in this very text."""
    if tokens == expected:
        return True
    assert abs(len(tokens) - len(expected)) == 0 or tokens[: len(expected)] != expected[: len(tokens)], "one ends early"
    text = [*prompt, *tokens][:-1]
    single = _all_logits(plain, text, 1)
    chosen = single[len(prompt) - 1 :][np.arange(len(tokens)), tokens]
    missing = single[len(prompt) - 1 :].max(axis=1) - chosen
    at = int(missing.argmax())
    likely = np.argsort(single, axis=1)[:, -10:]
    by_width, noise = [_distances(single, likely)], 0.0
    for width in (len(text), 9, 4, 2):  # each can only add to the difference: the quickest first
        by_width.append(_distances(_all_logits(plain, text, width), likely))
        noise = float(np.ptp(by_width, axis=0).max())
        if missing[at] <= noise:
            return False
    pytest.fail(f"token {at} is {missing[at]:.2g} below the best, upstream's own difference is {noise:.2g}")


def _distances(logits: NDArray[np.float32], likely: NDArray[np.intp]) -> NDArray[np.float32]:
    """Of each two of the likely tokens, [n_tokens, n_likely, n_likely]."""
    values = np.take_along_axis(logits, likely, 1)
    return np.asarray(values[:, :, None] - values[:, None, :], np.float32)


def _all_logits(context: Context, text: Sequence[int], width: int) -> NDArray[np.float32]:
    context.clear()
    chunks = [text[i : i + width] for i in range(0, len(text), width)]
    return np.concatenate([context.decode(chunk, all_logits=True).copy() for chunk in chunks])
