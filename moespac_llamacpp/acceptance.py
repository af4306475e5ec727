"""Exact acceptance of drafted tokens: greedy, or rejection sampling that keeps the target's law.

The law is that of llama.cpp's own sampler chain (sampling.py), for the target and for the draft alike. Penalties and grammar
follow each position, since the sampler is told every token before the next position is looked at, and never a rejected one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moespac_llamacpp.sampling import END, Law, Sampler, Sampling

__all__ = ["END", "Law", "Sampler", "Sampling", "log_probability", "top_log_probabilities", "verify"]


def verify(
    sampler: Sampler, logits: NDArray[np.float32], drafts: Sequence[int], q: Sequence[Law] | None = None
) -> list[int]:
    """The tokens that follow: accepted drafts, and one that the target chose itself, END where the chain leaves it no choice.
    The sampler has accepted them all.

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
        # p(x) >= u q(x), without a division
        if sampler.rng.random() * (1.0 if q is None else q[i].of(draft)) < p.of(draft):
            sampler.accept(draft)
            tokens.append(draft)
            continue
        drawn_from = q[i] if q is not None else Law(np.array([draft], np.int32), np.ones(1))
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


def top_log_probabilities(logits: NDArray[np.float32], n: int) -> list[tuple[int, float]]:
    """(token, log-probability) of the n likeliest under the bare logits, likeliest first."""
    n = min(n, len(logits))
    if n <= 0:
        return []
    best = np.argpartition(logits, len(logits) - n)[len(logits) - n :]
    best = best[np.argsort(-logits[best], kind="stable")]
    offset = log_probability(logits, int(best[0])) - float(logits[best[0]])
    return [(int(token), float(logits[token]) + offset) for token in best]
