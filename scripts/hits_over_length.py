#!/usr/bin/env python3
"""Hits, moves and tokens per second over the length of a text, from the telemetry of one generation each, or of a trace.

    moespac generate "..." -n 2048 --telemetry lru.jsonl --policy lru …
    python scripts/hits_over_length.py moe-spac.jsonl lru.jsonl
    python scripts/hits_over_length.py trace.npz --policy moe-spac --policy lru --cache-share 0.25

A row holds the tokens since the row before: 1 … 64, 65 … 128, and so on in powers of two, then what is left. A trace is replayed:
the verify batches that it holds, else single tokens, at most 2 % of all experts moving in a step; the rate is that of the
portable execution on an H200 (hardware.PORTABLE)."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from moespac_llamacpp import policies, simulate
from moespac_llamacpp.hardware import PORTABLE

FIRST = 64

Rows = list[tuple[int, float, float, float]]


def rows_of(path: Path) -> Rows:
    """(tokens until here, hits in % of pairs, uploads per step, tokens per second) of each stretch."""
    rows, end = [], FIRST
    tokens = hot = pairs = loads = steps = 0
    n_before, t = 0, 0.0
    t_before: float | None = None
    for line in path.read_text().splitlines():
        step = json.loads(line)
        t = step["t"]
        t_before = t if t_before is None else t_before
        if step["kind"] != "step":
            continue
        tokens += step["n_tokens"]
        hot += step["n_hot_pairs"]
        pairs += step["n_hot_pairs"] + step["n_cold_pairs"]
        loads += step["n_loads"]
        steps += 1
        if tokens >= end:
            rows.append((tokens, 100 * hot / pairs, loads / steps, (tokens - n_before) / (t - t_before)))
            hot = pairs = loads = steps = 0
            n_before, t_before, end = tokens, t, 2 * end
    if steps and t_before is not None:
        rows.append((tokens, 100 * hot / pairs, loads / steps, (tokens - n_before) / (t - t_before)))
    return rows


def replayed(path: Path, policy: str, share: float) -> Rows:
    """The same of a trace. A stretch is the difference of two beginnings, whose replays are the same as far as both go."""
    try:
        steps = simulate.load(path)
    except ValueError:  # no verify batches
        steps = simulate.load(path, 1)
    n_rows, n_expert = steps[0].batch.counts.shape
    n_slots, cap = max(1, round(share * n_expert)), max(1, round(0.02 * n_rows * n_expert))
    single = all(s.batch.n_tokens == 1 for s in steps if s.measured)
    profile = simulate.profile_of(steps, policy)
    rows: Rows = []
    before = np.zeros(6)
    for end, n_tokens in _beginnings(steps):
        beginning = [s for s in steps[:end] if s.measured]
        r = simulate.replay(
            steps[:end],
            policies.make(policy, n_rows, n_expert, profile=profile),
            n_slots,
            cap,
            hardware=PORTABLE,  # as in docs/policies.md
            landing="next" if single else "same",
            resplit=True,
        )
        n_pairs = sum(int(s.batch.counts.sum()) for s in beginning)
        per_step = np.array([1.0, r.moves_per_step, r.predicted_ms])
        now = np.array([n_tokens, n_pairs, r.pair_hit * n_pairs, *(len(beginning) * per_step)])
        tokens, pairs, hits, n, moves, ms = now - before
        rows.append((n_tokens, hits / pairs, moves / n, 1e3 * tokens / ms))
        before = now
    return rows


def _beginnings(steps: Sequence[simulate.Step]) -> Iterator[tuple[int, int]]:
    """(steps, tokens that became text) where 64, 128, … tokens are reached, and at the end."""
    tokens, wanted = 0, FIRST
    last = max(i for i, step in enumerate(steps, start=1) if step.measured)
    for i, step in enumerate(steps, start=1):
        if step.measured:
            accepted = step.batch.accepted
            tokens += step.batch.n_tokens if accepted is None else int(accepted.sum())
        if step.measured and (tokens >= wanted or i == last):
            yield i, tokens
            wanted *= 2


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("files", type=Path, nargs="+", help="telemetry, or one trace (.npz)")
    parser.add_argument("--policy", action="append", choices=policies.NAMES, help="of a trace; repeatable")
    parser.add_argument("--cache-share", type=float, default=0.25, help="of a trace")
    args = parser.parse_args()
    if args.files[0].suffix == ".npz":
        tables = {name: replayed(args.files[0], name, args.cache_share) for name in args.policy or policies.NAMES}
    else:
        tables = {path.stem: rows_of(path) for path in args.files}
    print("| tokens until | " + " | ".join(f"{name}: hits %, uploads a step, TPS" for name in tables) + " |")
    print("|---" * (len(tables) + 1) + "|")
    for stretch in zip(*tables.values(), strict=False):
        cells = (f"{hits:.1f}, {loads:.1f}, {tps:.0f}" for _, hits, loads, tps in stretch)
        print(f"| {stretch[0][0]} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
