#!/usr/bin/env python3
"""Replays routing traces through every policy and writes bench/results/policies.json; the ablation goes to ablation.json.

python scripts/bench_policies.py traces/*.npz
python scripts/bench_policies.py traces/*.npz --policy moe-spac --policy moe-spac-no-frequency   # after a change of these
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from moespac_llamacpp import policies, simulate
from moespac_llamacpp.balancer import Rates
from moespac_llamacpp.hardware import PORTABLE, Hardware
from moespac_llamacpp.planning import Policy
from moespac_llamacpp.simulate import Landing, Replay, Step
from moespac_llamacpp.spac import MoeSpac
from moespac_llamacpp.utility import TokenMemory

LIMIT = (
    12_000  # rows of a trace that are cut into consecutive batches: enough for a tenth of a point, and minutes saved
)
SHARES = (0.08, 0.17, 0.25, 0.50)
BATCHES = (1, 2, 4, 8)

#: What-if: the H200's machine with a link of PCIe 3.0 x16 as it is commonly measured. Nothing else of it is known.
SLOW_LINK = replace(PORTABLE, name="as the H200, but a link of 12 GB/s (assumed)", link_bytes=12e9)
#: What-if: a device that takes ten times as long for a pair, as a small integrated GPU might.
SLOW_DEVICE = replace(
    PORTABLE, name="as the H200, but a device ten times slower (assumed)", device=60.0, device_pair=21.0
)

Rows = list[dict[str, object]]


@dataclass(frozen=True)
class Job:
    """batch 0: the verify batches of the trace. ablation: the parts of moe-spac, instead of all policies."""

    trace: Path
    batch: int
    cap: float  # share of all experts that may move in a step
    landing: Landing
    ablation: bool = False
    names: tuple[str, ...] = policies.NAMES

    @property
    def steps(self) -> list[Step]:
        return simulate.load(self.trace, self.batch or None, limit=LIMIT if self.batch else None)

    def labels(self, steps: Sequence[Step], share: float) -> dict[str, object]:
        n_rows, n_expert = steps[0].batch.counts.shape
        return {
            "trace": self.trace.stem,
            "cache_share": share,
            "batch": max(s.batch.n_tokens for s in steps if s.measured),
            "batch_kind": "verify" if self.batch == 0 else "consecutive",
            "landing": self.landing,
            "max_moves": max(1, round(self.cap * n_rows * n_expert)),
        }


def run(job: Job) -> Rows:
    steps = job.steps
    return ablation(job, steps) if job.ablation else comparison(job, steps)


def comparison(job: Job, steps: Sequence[Step]) -> Rows:
    rows: Rows = []
    for share in SHARES:
        labels = job.labels(steps, share)
        cap = int(str(labels["max_moves"]))
        n_slots = max(1, round(share * steps[0].batch.counts.shape[1]))
        whole = job.names == policies.NAMES  # else the bound is known from before
        bound = {"clairvoyant_pair_hit": round(simulate.clairvoyant_hit(steps, n_slots, cap), 2)} if whole else {}
        for name in job.names:
            policy = simulate.policy_for(name, steps)
            played = simulate.replay(steps, policy, n_slots, cap, hardware=PORTABLE, landing=job.landing, resplit=True)
            rows.append(labels | {"policy": name} | figures(played) | bound)
    return rows


def merged(old: Rows, new: Rows) -> Rows:
    """The old rows, those of the same cell and policy replaced. ValueError: there is none of the same."""
    place = {cell_of(row): i for i, row in enumerate(old)}
    rows = list(old)
    for row in new:
        if cell_of(row) not in place:
            raise ValueError(f"no row to replace for {row['trace']}, {row['policy']}: run it for all policies")
        rows[place[cell_of(row)]] = rows[place[cell_of(row)]] | row
    return rows


def cell_of(row: dict[str, object]) -> tuple[object, ...]:
    return tuple(row[name] for name in ("trace", "cache_share", "batch", "batch_kind", "landing", "policy"))


def figures(r: Replay) -> dict[str, object]:
    return {
        "pair_hit": round(r.pair_hit, 2),
        "expert_hit": round(r.expert_hit, 2),
        "moves_per_step": round(r.moves_per_step, 2),
        "predicted_ms": round(r.predicted_ms, 3),
        "n_steps": r.n_steps,
    }


def ablation(job: Job, steps: Sequence[Step]) -> Rows:
    """moe-spac without each of its parts, on the measured machine and on two assumed ones, where the balancer has work."""
    n_rows, n_expert = steps[0].batch.counts.shape
    rows: Rows = []
    for share in SHARES:
        labels = job.labels(steps, share)
        n_slots, cap = max(1, round(share * n_expert)), int(str(labels["max_moves"]))
        silent = [replace(s, batch=replace(s.batch, tokens=None)) for s in steps]
        for hardware in (PORTABLE, SLOW_LINK, SLOW_DEVICE):

            def play(
                policy: MoeSpac,
                *,
                steps: Sequence[Step] = steps,
                hardware: Hardware = hardware,
                n_slots: int = n_slots,
                cap: int = cap,
                **options: bool,
            ) -> Replay:
                policy.rates = rates_of(hardware)
                window = window_of(steps, n_slots, hardware)
                return simulate.replay(
                    steps, policy, n_slots, cap, hardware=hardware, window=window, landing=job.landing, **options
                )

            full = play(MoeSpac(TokenMemory(n_rows, n_expert)), resplit=True)
            parts: dict[str, Replay] = {
                "full": full,
                "no-frequency": equal_moves(
                    lambda gain: play(
                        MoeSpac(
                            TokenMemory(
                                n_rows, n_expert, frequency=False, swap_gain=gain, prior_gain=gain, late_gain=5 * gain
                            )
                        ),
                        resplit=True,
                    ),
                    full.moves_per_step,
                ),
                "no-balancer": play(MoeSpac(TokenMemory(n_rows, n_expert), balanced=False), resplit=True),
                "sync-moves": play(MoeSpac(TokenMemory(n_rows, n_expert)), resplit=True, sync_moves=True),
                "no-resplit": play(MoeSpac(TokenMemory(n_rows, n_expert))),
            }
            if steps[0].batch.tokens is not None:
                parts["no-tokens"] = play(MoeSpac(TokenMemory(n_rows, n_expert)), resplit=True, steps=silent)
            for name, result in parts.items():
                rows.append(labels | {"hardware": hardware.name, "without": name} | figures(result))
    return rows


def rates_of(hardware: Hardware) -> Rates:
    """What the balancer would have measured on that machine."""
    return Rates(
        cpu_expert=hardware.cpu_expert * 1e-6,
        cpu_pair=hardware.cpu_pair * 1e-6,
        device_call=hardware.device * 1e-6,
        device_pair=hardware.device_pair * 1e-6,
        link_bytes=hardware.link_bytes,
    )


def window_of(steps: Sequence[Step], n_slots: int, hardware: Hardware) -> float:
    """Seconds in which the link is idle: half of a decode, as live, here that of a fixed placement."""
    fixed: Policy = policies.make("static", *steps[0].batch.counts.shape)
    return simulate.replay(steps, fixed, n_slots, 0, hardware=hardware).predicted_ms / 2e3


def equal_moves(play: Callable[[float], Replay], wanted: float) -> Replay:
    """The replay whose hysteresis makes as many moves as wanted, as nearly as seven halvings find."""
    low, high = 0.0, 1.0
    best = play(low)
    if best.moves_per_step <= wanted:
        return best
    for _ in range(7):
        middle = (low + high) / 2
        result = play(middle)
        if abs(result.moves_per_step - wanted) < abs(best.moves_per_step - wanted):
            best = result
        low, high = (middle, high) if result.moves_per_step > wanted else (low, middle)
    return best


def jobs(trace: Path, cap: float, names: tuple[str, ...] = policies.NAMES) -> list[Job]:
    """Moves land as live: in time for batches that a draft model guessed; and for all widths as where no time passes (n-gram
    lookup, or no draft)."""
    with np.load(trace) as z:
        verify = [0] if "step" in z.files else []
    found = [Job(trace, batch, cap, "same", names=names) for batch in [*verify, *BATCHES] if batch != 1]
    found += [Job(trace, batch, cap, "next", names=names) for batch in [*verify, *BATCHES]]
    # the text of the tiny pair's two traces is nearly the same: its consecutive batches once
    found = [job for job in found if job.batch == 0 or "tiny-pair_sd8" not in trace.stem]
    batch = verify[0] if verify else 4
    return [*found, Job(trace, batch, cap, "same", ablation=True)]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--cap", type=float, default=0.02, help="share of all experts that may move in a step")
    parser.add_argument("--out", type=Path, default=Path("bench/results/policies.json"))
    parser.add_argument("--ablation-out", type=Path, default=Path("bench/results/ablation.json"))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--policy", action="append", choices=policies.NAMES, help="only these: other rows of --out stay as they are"
    )
    parser.add_argument("--what", choices=("policies", "ablation", "both"), default="both")
    args = parser.parse_args()
    old: Rows = json.loads(args.out.read_text(encoding="utf-8")) if args.policy else []
    results: dict[bool, Rows] = {False: [], True: []}
    names = tuple(args.policy or policies.NAMES)
    todo = [job for trace in args.traces for job in jobs(trace, args.cap, names)]
    if args.what != "both":
        todo = [job for job in todo if job.ablation == (args.what == "ablation")]
    with ProcessPoolExecutor(args.processes) as pool:
        for n, (job, rows) in enumerate(zip(todo, pool.map(run, todo), strict=True), start=1):
            results[job.ablation] += rows
            if job.ablation:
                write(args.ablation_out, results[True])
            else:
                write(args.out, merged(old, results[False]) if args.policy else results[False])
            what = "ablation" if job.ablation else "policies"
            batch = job.batch or "as verified"
            print(
                f"{n} of {len(todo)}: {job.trace.stem}, batch {batch}, {job.landing}, {what}: {len(rows)} rows",
                file=sys.stderr,
            )
    return 0


def write(path: Path, rows: Rows) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("[\n" + ",\n".join(json.dumps(r) for r in rows) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
