#!/usr/bin/env python3
"""What Python adds between two decodes of a large model: 48 layers of 128 experts, a vocabulary of 151,936, experts on the move.

From the end of one llama_decode of the target to the start of the next, medians in ms: acceptance, the draft's bookkeeping, and
all that is noted, moved and planned in this thread. A random model of that many layers and experts, but narrow ones (85 MB,
written once), runs through the real library, so caches are full of weights afterwards and two threads want Python's lock; its
decodes take as long as those of a large model on a fast GPU, or longer. Planted are the logits, which are copied to their place
before a decode ends (one clear favourite among some hundred plausible tokens, by which the text repeats and all guesses are
accepted), and how many experts move: the policy plans as always, and random swaps are made instead of its own. A draft model is
stood in for by sleeping 2 ms a guess, which leaves the lock free as a decode does and is not counted.

    python scripts/bench_between.py
    python scripts/bench_between.py --against OTHER_CHECKOUT --rounds 5     # both in turns, the medians of their medians
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from moespac_llamacpp.acceptance import Sampler, Sampling
from moespac_llamacpp.decoder import Decoder
from moespac_llamacpp.draft import Draft, Drafter, NgramDraft
from moespac_llamacpp.memory import slots_for_share
from moespac_llamacpp.models import Context, Model, capture_log
from moespac_llamacpp.planning import Limits, Move
from moespac_llamacpp.policies import make
from moespac_llamacpp.residency import Residency, block_sizes
from moespac_llamacpp.spac import MoeSpac

planning: Any = importlib.import_module("bench_planning")  # beside this file
ROOT = Path(__file__).resolve().parent.parent
N_VOCAB = 151_936
PERIOD = 48  # tokens after which the text repeats
GUESS_SECONDS = 2e-3
CHAINS = {
    "greedy": Sampling(),
    "sampled": Sampling(temperature=0.8, seed=1),  # top-k 40, top-p 0.95, min-p 0.05
    "penalties": Sampling(temperature=0.8, seed=1, repeat_penalty=1.1, presence_penalty=0.5),
}
MOVES = (0, 25, 60)


class Planted(Context):
    """The favourite after position p is text[(p + 1) % PERIOD]."""

    def plant(self, text: Sequence[int]) -> None:
        rng, shape = np.random.default_rng(0), (PERIOD, N_VOCAB)
        table = 2 * rng.standard_normal(shape, np.float32) + 3 * (rng.random(shape, np.float32) < 1e-3)
        table[np.arange(PERIOD), np.roll(text, -1)] = 25
        self.table, self.rows = table.astype(np.float32), np.zeros((PERIOD, N_VOCAB), np.float32)

    def put(self, n: int) -> None:
        """What the decode of n tokens is to tell: of the prompt, the last only."""
        last = self.n_past + n - 1
        for i in range(n if self.n_past else 1):
            self.rows[i] = self.table[(self.n_past + i if self.n_past else last) % PERIOD]

    def _view(self, logits: object, n: int) -> NDArray[np.float32]:
        return self.rows[:n]


class Restless(MoeSpac):
    """Plans as always; n_moves random swaps in all are what comes of it, in rows that are full."""

    n_moves = 0

    def plan(self, resident: NDArray[np.bool_], limits: Limits) -> list[Move]:
        super().plan(resident, limits)
        rng, n = self.rng, min(limits.max_moves, self.n_moves)
        full = np.flatnonzero(np.count_nonzero(resident, axis=1) >= limits.n_slots)
        moves, taken = [], resident.copy()
        for row in rng.choice(full, n, replace=n > len(full)).tolist() if n and len(full) else []:
            out, new = rng.choice(np.flatnonzero(resident[row] & taken[row])), rng.choice(np.flatnonzero(~taken[row]))
            taken[row, out], taken[row, new] = False, True
            moves.append(Move(row, int(new), int(out), 1.0))
        return moves

    def rest_of(self, n_moves: int) -> None:
        self.n_moves, self.rng = n_moves, np.random.default_rng(0)


class SleepingDraft(NgramDraft):
    """Takes the time of a draft model for each guess."""

    takes_time = True
    slept = 0.0

    def propose(self, n: int, sampler: Sampler | None = None, on_guess: Callable[[int], object] | None = None) -> Draft:
        draft = super().propose(n)
        for i, token in enumerate(draft.tokens):
            start = time.perf_counter()
            time.sleep(GUESS_SECONDS)
            self.slept += time.perf_counter() - start
            if on_guess and i + 1 < len(draft.tokens):
                on_guess(token)
        return draft


DRAFTS: dict[str, tuple[type[NgramDraft] | None, int]] = {
    "no draft": (None, 0),
    "3 n-gram guesses": (NgramDraft, 3),
    "8 n-gram guesses": (NgramDraft, 8),
    "3 guesses of a model": (SleepingDraft, 3),
    "8 guesses of a model": (SleepingDraft, 8),
}


@contextmanager
def timed(context: Planted, slept: Callable[[], float]) -> Iterator[list[float]]:
    """Seconds between the decodes in the block."""
    real, found, last = llama_cpp.llama_decode, [], [0.0, 0.0]

    def decode(pointer: object, batch: object) -> int:
        found.append(time.perf_counter() - last[0] - (slept() - last[1]))
        code = int(real(pointer, batch))
        context.put(batch.n_tokens)  # type: ignore[attr-defined]
        last[1] = slept()
        last[0] = time.perf_counter()
        return code

    llama_cpp.llama_decode = decode
    try:
        yield found
    finally:
        llama_cpp.llama_decode = real


def gap(model: Model, draft: str, n_moves: int, sampling: Sampling, n_steps: int) -> tuple[float, float]:
    """(seconds, moves a step): the median of the steps of one text."""
    kind, n_drafts = DRAFTS[draft]
    n_vocab = model.n_vocab
    text = np.random.default_rng(1).permutation(np.arange(3, min(n_vocab, 200)))[:PERIOD].tolist()
    n_tokens = n_steps * (n_drafts + 1)
    context = Planted(model, n_ctx=n_tokens + 4 * PERIOD, n_threads=1)
    with context:
        context.plant(text)
        model.n_vocab = N_VOCAB
        experts = context.experts
        assert experts is not None
        experts.set_slots(slots_for_share(block_sizes(experts), planning.SHARE))
        policy = make("moe-spac", experts.n_rows, experts.n_expert)
        policy.__class__ = Restless
        assert isinstance(policy, Restless)
        policy.rest_of(n_moves)
        residency = Residency(experts, policy, max_moves=n_moves)
        residency.fill()
        drafter: Drafter | None = kind() if kind else None
        decoder = Decoder(context, residency, drafter=drafter, draft_max=n_drafts, draft_fixed=True, sampling=sampling)
        with timed(context, lambda: getattr(drafter, "slept", 0.0)) as found:
            moved = residency.n_moves
            tokens = list(decoder.generate(text * 2, n_tokens))
        assert tokens == (text * (n_tokens // PERIOD + 1))[:n_tokens], "the text is not the planted one"
        residency.join()
        decoder.close()
        residency.close()
        moved = residency.n_moves - moved
        model.n_vocab = n_vocab
    return float(np.median(found[len(found) // 5 :])), moved / len(found)


def measure(folder: Path, n_steps: int, moves: Sequence[int], drafts: Sequence[str]) -> list[dict[str, Any]]:
    capture_log()
    rows: list[dict[str, Any]] = []
    with Model(planning.write_model(folder)) as model:
        for draft in drafts:
            for n_moves in moves:
                for chain, sampling in CHAINS.items():
                    seconds, moved = gap(model, draft, n_moves, sampling, n_steps)
                    rows.append({"draft": draft, "moves": n_moves, "chain": chain, "ms": 1e3 * seconds, "moved": moved})
    return rows


def elsewhere(checkout: Path, arguments: Sequence[str]) -> list[dict[str, Any]]:
    """What another checkout's package measures, by this script."""
    paths = [str(checkout), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    command = [sys.executable, str(Path(__file__).resolve()), "--json", *arguments]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, stdout=subprocess.PIPE)
    if done.returncode:
        sys.exit(f"{checkout}: the measurement failed")
    return list(json.loads(done.stdout))


def show(kinds: dict[str, list[list[dict[str, Any]]]]) -> None:
    """kinds: the rows of each round."""
    print(
        f"{'between decodes, ms':22s} {'moves':>5s}  " + " ".join(f"{c + ' ' + k:>16s}" for c in CHAINS for k in kinds)
    )
    first = next(iter(kinds.values()))[0]
    for draft, n_moves in dict.fromkeys((row["draft"], row["moves"]) for row in first):
        cells, moved = [], 0.0
        for chain in CHAINS:
            for rounds in kinds.values():
                same = [
                    r
                    for rows in rounds
                    for r in rows
                    if (r["draft"], r["moves"], r["chain"]) == (draft, n_moves, chain)
                ]
                cells.append(f"{float(np.median([r['ms'] for r in same])):16.3f}")
                moved = float(np.median([r["moved"] for r in same]))
        print(f"{draft!s:22s} {moved:5.0f}  " + " ".join(cells))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--moves", type=int, nargs="*", default=MOVES, help="experts that move in a step")
    parser.add_argument("--drafts", nargs="*", choices=DRAFTS, default=list(DRAFTS))
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where the model is kept")
    parser.add_argument("--against", type=Path, help="another checkout, with its native library found as usual")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    args = parser.parse_args(arguments)
    if args.json:
        print(json.dumps(measure(args.folder, args.steps, args.moves, args.drafts)))
        return 0
    same = ["--steps", str(args.steps), "--folder", str(args.folder), "--moves", *map(str, args.moves)]
    same += ["--drafts", *args.drafts]
    checkouts = {"": ROOT} if args.against is None else {"before": args.against, "now": ROOT}
    kinds: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in checkouts}
    print(planning.machine(), flush=True)
    for _ in range(args.rounds):
        for name, checkout in checkouts.items():
            kinds[name].append(elsewhere(checkout, same))
    show(kinds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
