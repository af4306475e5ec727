#!/usr/bin/env python3
"""Hits, moves and tokens per second over the length of a text, from the telemetry of one generation each.

    moespac generate "..." -n 2048 --telemetry lru.jsonl --policy lru …
    python scripts/hits_over_length.py moe-spac.jsonl lru.jsonl

A row holds the tokens since the row before: 1 … 64, 65 … 128, and so on in powers of two, then what is left."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

FIRST = 64


def rows_of(path: Path) -> list[tuple[int, float, float, float]]:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("telemetry", type=Path, nargs="+")
    files = parser.parse_args().telemetry
    tables = [rows_of(path) for path in files]
    print("| tokens until | " + " | ".join(f"{p.stem}: hits %, uploads a step, TPS" for p in files) + " |")
    print("|---" * (len(files) + 1) + "|")
    for stretch in zip(*tables, strict=False):
        cells = (f"{hits:.1f}, {loads:.1f}, {tps:.0f}" for _, hits, loads, tps in stretch)
        print(f"| {stretch[0][0]} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
