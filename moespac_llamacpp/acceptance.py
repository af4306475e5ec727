"""Exact acceptance of drafted tokens: greedy, or rejection sampling that keeps the target's law.

The law is that of llama.cpp's own sampler chain: the chain turns logits into the candidates that it leaves with their
probabilities, for the target and for the draft alike, and only the drawing is done here. Penalties follow each position, since
the chain is told every token before the next position is looked at.
"""

from __future__ import annotations

import copy
import ctypes
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import llama_cpp
import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Sampling:
    """The knobs of the chain, with llama.cpp's meanings; the defaults sample greedily.

    Order: penalties, top-k, top-p, min-p, temperature (llama-cpp-python, `Llama._init_sampler`). Penalties look at prompt and
    answer (llama-server)."""

    temperature: float = 0.0  # 0 or less: greedy
    top_k: int = 40  # 0: off
    top_p: float = 0.95  # 1: off
    min_p: float = 0.05  # 0: off
    repeat_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    penalty_last_n: int = 64
    seed: int | None = None  # None: another one for each sampler

    def __post_init__(self) -> None:
        if self.penalty_last_n < 0:  # llama.cpp's sampler would silently switch the penalties off
            raise ValueError(f"penalty_last_n is a number of tokens, not {self.penalty_last_n}")

    @property
    def greedy(self) -> bool:
        return self.temperature <= 0

    @property
    def penalises(self) -> bool:
        """Does the law depend on the tokens before?"""
        changed = self.repeat_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0
        return changed and self.penalty_last_n != 0


@dataclass(frozen=True)
class Law:
    """A distribution over the tokens that the chain left: ids int32 [k], distinct; p float64 [k], summing to 1."""

    ids: NDArray[np.int32]
    p: NDArray[np.float64]

    def of(self, token: int) -> float:
        """Its probability, 0 if the chain removed it."""
        found = np.flatnonzero(self.ids == token)
        return float(self.p[found[0]]) if len(found) else 0.0


#: llama_token_data
_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])


class Sampler:
    """A sampler chain of llama.cpp with its state, and the generator that draws. Not for two threads."""

    def __init__(self, sampling: Sampling, n_vocab: int, *, rng: np.random.Generator | None = None) -> None:
        """rng: shared with another sampler; None: its own, from the seed."""
        self.sampling = sampling
        self.n_vocab = n_vocab
        seed = int.from_bytes(os.urandom(8), "little") if sampling.seed is None else sampling.seed & (2**64 - 1)
        self.rng = rng or np.random.default_rng(seed)
        self._ids = np.arange(n_vocab, dtype=np.int32)
        self._candidates = np.zeros(n_vocab, _CANDIDATE)
        self._dense = np.zeros(n_vocab, np.float64)  # zero between calls
        self._chain: Any = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
        for part in self._parts():
            llama_cpp.llama_sampler_chain_add(self._chain, part)
        self._owned = True
        #: the law is the bare argmax: no chain needed
        self.plain = sampling.greedy and not sampling.penalises

    def _parts(self) -> Iterable[Any]:
        s = self.sampling
        if s.penalises:
            yield llama_cpp.llama_sampler_init_penalties(
                self.n_vocab, s.penalty_last_n, s.repeat_penalty, s.frequency_penalty, s.presence_penalty
            )
        if s.greedy:
            return
        if s.top_k > 0:
            yield llama_cpp.llama_sampler_init_top_k(s.top_k)
        if s.top_p < 1:
            yield llama_cpp.llama_sampler_init_top_p(s.top_p, 1)
        if s.min_p > 0:
            yield llama_cpp.llama_sampler_init_min_p(s.min_p, 1)
        yield llama_cpp.llama_sampler_init_temp(s.temperature)

    def close(self) -> None:
        if self._chain and self._owned:
            llama_cpp.llama_sampler_free(self._chain)
        self._chain = None

    def __enter__(self) -> Sampler:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def fork(self) -> Sampler:
        """A sampler in the same state that draws from the same generator: for a draft, which may be rejected. Close it."""
        # Without penalties the chain has no state, and the fork is another handle on it.
        other = copy.copy(self)
        other._owned = self.sampling.penalises
        if other._owned:
            other._chain = llama_cpp.llama_sampler_clone(self._chain)
        return other

    def reset(self, tokens: Sequence[int] = ()) -> None:
        """Forgets all tokens but these."""
        llama_cpp.llama_sampler_reset(self._chain)
        if self.sampling.penalises:
            for token in tokens[-self.sampling.penalty_last_n :]:
                self.accept(token)

    def accept(self, token: int) -> None:
        """The text goes on with this token."""
        if self.sampling.penalises:
            llama_cpp.llama_sampler_accept(self._chain, token)

    def law(self, logits: NDArray[np.float32]) -> Law:
        """The law of the next token given its logits, float32 [n_vocab] (fewer: the first tokens only, as a draft's may be)."""
        if self.plain:
            return Law(np.array([logits.argmax()], np.int32), np.ones(1))
        # Candidates are sorted in place, so that ids have to be set anew each time.
        candidates = self._candidates[: len(logits)]
        candidates["id"], candidates["logit"] = self._ids[: len(logits)], logits
        array = llama_cpp.llama_token_data_array(
            ctypes.cast(candidates.ctypes.data, llama_cpp.llama_token_data_p), len(candidates), -1, False
        )
        llama_cpp.llama_sampler_apply(self._chain, ctypes.byref(array))
        left = candidates[: array.size]
        address = ctypes.cast(array.data, ctypes.c_void_p).value
        if address != candidates.ctypes.data:  # a sampler may put its own memory there (llama.h)
            assert address is not None
            raw = (ctypes.c_uint8 * (array.size * _CANDIDATE.itemsize)).from_address(address)
            left = np.ctypeslib.as_array(raw).view(_CANDIDATE)
        if self.sampling.greedy:
            best = left["id"][left["logit"].argmax()]
            return Law(np.array([best], np.int32), np.ones(1))
        # llama.cpp keeps p from before the temperature: its last sampler, dist, takes the softmax of what is left, as here
        p = np.exp((left["logit"] - left["logit"].max()).astype(np.float64))
        p /= p.sum()
        return Law(left["id"].copy(), p)

    def draw(self, law: Law) -> int:
        """A token from the law."""
        if len(law.ids) == 1:
            return int(law.ids[0])
        cumulative = law.p.cumsum()
        at = int(cumulative.searchsorted(self.rng.random() * cumulative[-1], side="right"))
        return int(law.ids[min(at, len(law.ids) - 1)])

    def residual(self, p: Law, q: Law) -> Law:
        """The law proportional to max(0, p − q): what a rejection leaves; p itself where rounding leaves nothing."""
        self._dense[q.ids] = q.p
        rest = np.maximum(p.p - self._dense[p.ids], 0)
        self._dense[q.ids] = 0
        total = rest.sum()
        return Law(p.ids, rest / total) if total > 0 else p


def verify(
    sampler: Sampler, logits: NDArray[np.float32], drafts: Sequence[int], q: Sequence[Law] | None = None
) -> list[int]:
    """The tokens that follow: accepted drafts, and one that the target chose itself. The sampler has accepted them all.

    logits: float32 [n_drafts + 1, n_vocab], of the token before the drafts and of each draft. q: the law that each draft was
    drawn from, None where the drafts were no matter of chance (greedy, n-gram). Rejection sampling of Leviathan et al., "Fast
    Inference from Transformers via Speculative Decoding" (2023, arXiv 2211.17192), section 2.3: a draft x stays with
    probability min(1, p(x) / q(x)), otherwise the token comes from max(0, p − q), normalised. Greedy is the case where p is
    one token.
    """
    tokens: list[int] = []
    if sampler.plain:
        best = logits[: len(drafts) + 1].argmax(axis=1).tolist()
        for i, token in enumerate(best):
            tokens.append(token)
            if i < len(drafts) and token != drafts[i]:
                break
        return tokens
    for i, draft in enumerate(drafts):
        p = sampler.law(logits[i])
        drawn_from = q[i] if q is not None else Law(np.array([draft], np.int32), np.ones(1))
        # p(x) >= u q(x), without a division
        if sampler.rng.random() * drawn_from.of(draft) < p.of(draft):
            sampler.accept(draft)
            tokens.append(draft)
            continue
        tokens.append(sampler.draw(sampler.residual(p, drawn_from)))
        sampler.accept(tokens[-1])
        return tokens
    tokens.append(sampler.draw(sampler.law(logits[len(drafts)])))
    sampler.accept(tokens[-1])
    return tokens


def log_probability(logits: NDArray[np.float32], token: int) -> float:
    """Natural log of the token's probability under the bare logits, float32 [n_vocab], before any sampler."""
    top = float(logits.max())
    return float(logits[token]) - top - float(np.log(np.exp(logits - np.float32(top)).sum(dtype=np.float64)))
