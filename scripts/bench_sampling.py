"""What acceptance costs between two decodes: µs a position and ms a step, at the vocabulary of Qwen3. Prints a table.

    python scripts/bench_sampling.py [N_VOCAB]

Logits are random with the tail of a real model's: one clear favourite among some hundred plausible tokens. A step has 3 drafts
that are all accepted, so that all 4 positions are looked at.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import numpy as np

from moespac_llamacpp.acceptance import Law, Sampler, Sampling, log_probability, verify

CHAINS = {
    "greedy": Sampling(),
    "greedy, penalties": Sampling(repeat_penalty=1.1, presence_penalty=0.5),
    "top-k 40, top-p, min-p": Sampling(temperature=0.8),
    "top-k 40, top-p, min-p, penalties": Sampling(temperature=0.8, repeat_penalty=1.1, presence_penalty=0.5),
    "top-k off, min-p 0.05": Sampling(temperature=0.8, top_k=0, top_p=1),
    "top-k off, top-p 0.95": Sampling(temperature=0.8, top_k=0, min_p=0),
}


def median_of(call: Callable[[], object], n: int = 200) -> float:
    """Seconds."""
    times = []
    for _ in range(n):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def main() -> None:
    n_vocab = int(sys.argv[1]) if len(sys.argv) > 1 else 151_936
    rng = np.random.default_rng(0)
    logits = (2 * rng.standard_normal((4, n_vocab)) + 3 * (rng.random((4, n_vocab)) < 1e-3)).astype(np.float32)
    favourites = rng.integers(0, n_vocab, 4)
    logits[np.arange(4), favourites] = 25
    text = rng.integers(0, n_vocab, 100).tolist()
    drafts = favourites[:3].tolist()
    print(f"vocabulary {n_vocab}; medians")
    print(f"{'chain':36s} {'law, µs':>9s} {'step of 4, ms':>14s}")
    for name, sampling in CHAINS.items():
        with Sampler(sampling, n_vocab) as sampler:
            sampler.reset(text)
            n = 20 if sampling.top_k == 0 and sampling.top_p < 1 else 200
            law = median_of(lambda sampler=sampler: sampler.law(logits[0]), n)  # type: ignore[misc]
            q = None if sampling.greedy else [Law(np.array([t], np.int32), np.ones(1)) for t in drafts]
            step = median_of(lambda sampler=sampler, q=q: verify(sampler, logits, drafts, q), n)  # type: ignore[misc]
        print(f"{name:36s} {1e6 * law:9.0f} {1e3 * step:14.3f}")
    print(f"{'log-probability of a token':36s} {1e6 * median_of(lambda: log_probability(logits[0], 5)):9.0f}")


if __name__ == "__main__":
    main()
