#!/usr/bin/env python3
"""Replays routing traces through every policy and writes bench/results/policies.json.

python scripts/bench_policies.py ../shared/routing-traces/*.npz
"""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moespac_llamacpp import policies, simulate

LIMIT = (
    12_000  # rows of a trace that are cut into consecutive batches: enough for a tenth of a point, and minutes saved
)
SHARES = (0.08, 0.17, 0.25, 0.50)
BATCHES = (1, 2, 4, 8)


@dataclass(frozen=True)
class Job:
    """batch 0: the verify batches of the trace."""

    trace: Path
    batch: int
    cap: float  # share of all experts that may move in a step


def run(job: Job) -> list[dict[str, object]]:
    steps = simulate.load(job.trace, job.batch or None, limit=LIMIT if job.batch else None)
    n_rows, n_expert = steps[0].batch.counts.shape
    cap = max(1, round(job.cap * n_rows * n_expert))
    rows: list[dict[str, object]] = []
    for share in SHARES:
        for r in simulate.simulate(steps, policies.NAMES, share, cap):
            rows.append(
                {
                    "trace": job.trace.stem,
                    "cache_share": share,
                    "batch": r.batch,
                    "batch_kind": "verify" if job.batch == 0 else "consecutive",
                    "max_moves": cap,
                    "policy": r.policy,
                    "pair_hit": round(r.pair_hit, 2),
                    "expert_hit": round(r.expert_hit, 2),
                    "clairvoyant_pair_hit": round(r.clairvoyant_pair_hit, 2),
                    "moves_per_step": round(r.moves_per_step, 2),
                    "predicted_ms": round(r.predicted_ms, 3),
                    "n_steps": r.n_steps,
                }
            )
    return rows


def jobs(trace: Path, cap: float) -> list[Job]:
    with np.load(trace) as z:
        verify = [0] if "step" in z.files else []
    return [Job(trace, batch, cap) for batch in [*verify, *BATCHES]]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--cap", type=float, default=0.02, help="share of all experts that may move in a step")
    parser.add_argument("--out", type=Path, default=Path("bench/results/policies.json"))
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    rows: list[dict[str, object]] = []
    todo = [job for trace in args.traces for job in jobs(trace, args.cap)]
    # the text of the tiny pair's two traces is nearly the same: its consecutive batches once
    todo = [job for job in todo if job.batch == 0 or "tiny-pair_sd8" not in job.trace.stem]
    with ProcessPoolExecutor(args.processes) as pool:
        for job, result in zip(todo, pool.map(run, todo), strict=True):
            rows += result
            write(args.out, rows)
            print(f"{job.trace.stem}, batch {job.batch or 'as verified'}: {len(result)} rows", file=sys.stderr)
    return 0


def write(path: Path, rows: list[dict[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("[\n" + ",\n".join(json.dumps(r) for r in rows) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
