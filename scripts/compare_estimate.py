#!/usr/bin/env python3
"""What the estimate says of runs that were measured: keeps what it needs, or prints the table of docs/memory-plan.md.

python scripts/compare_estimate.py --collect grid/comparison.json --out bench/results/measured-steps.json
python scripts/compare_estimate.py bench/results/measured-steps.json
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moespac_llamacpp.estimate import hits_of, seconds_of_step
from moespac_llamacpp.plan import Block, Footprint, Place, Plan, Wishes, make
from moespac_llamacpp.profile import Profile

#: Of the planted targets that were measured: layers with experts, experts, experts a token, bytes of an expert on the mean.
MODELS = {
    ("qwen3-30b-a3b", "Q4_K_M"): (48, 128, 8, 2_856_960),
    ("qwen3-30b-a3b", "BF16"): (24, 128, 8, 9_437_184),
    ("deepseek-v2-lite", "Q4_K_M"): (26, 64, 6, 5_725_578),
}
#: Threads that `bandwidths` lacks: what four read of what eight do, and six and seven of eight, link-and-memory.txt.
FEWER = {4: 57.8 / 106.4, 6: 0.77, 7: 0.89}
PLACE = Place("CUDA0", "", 1 << 40, 1 << 40, True, True, 1 << 40, 1 << 40)


@dataclass(frozen=True)
class Cell:
    """A run. Seconds are of a step; us: of a layer, by the device's clock, None without clocks."""

    session: str
    model: str
    stage: str
    policy: str
    share: float
    threads: int
    cpu_read: float
    link: float
    device_read: float
    drafted: int  # guesses at most
    acceptance: str
    n_steps: int
    n_tokens: float  # of a step
    kept: float  # of these
    hit_rate: float
    slot_bytes: int
    dense: int
    tps: float
    verify: float
    draft: float
    us: float | None

    @property
    def tokens_of_model(self) -> tuple[int, int, int, int]:
        name, quant = self.model.split(" ")
        return MODELS[name, quant]

    @property
    def plan(self) -> Plan:
        n_layers, n_expert, used, n_bytes = self.tokens_of_model
        blocks = [Block(n_expert, n_bytes, True, il, used) for il in range(n_layers)]
        target = Footprint(4096, 4096, weights=self.dense, expert_bytes=n_layers * n_expert * n_bytes)
        return make(PLACE, target, blocks, None, Wishes(expert_bytes=self.slot_bytes))

    @property
    def profile(self) -> Profile:
        return Profile(
            "CUDA0", "Xeon", self.threads, self.cpu_read, self.link, self.link, self.device_read, self.session
        )

    def expected(self, hits: float | None = None) -> list[float]:
        """Seconds of a verify step: with these hits, or with the lowest and highest that are expected."""
        plan = self.plan
        each = hits_of(plan.blocks, plan.slots) if hits is None else (hits,)
        return [seconds_of_step(plan, self.profile, h, in_stream=True, n_tokens=self.n_tokens) for h in each]

    def expected_tps(self, hits: float | None = None) -> list[float]:
        """What drafting took is taken as measured."""
        return [self.kept / (seconds + self.draft) for seconds in self.expected(hits)]


def collect(path: Path) -> Iterator[dict[str, Any]]:
    found = json.loads(path.read_text(encoding="utf-8"))
    pair, rates = found["pair"], found["bandwidths"]
    model = f"{pair['target']} {pair['quant']}"
    n_layers = MODELS[pair["target"], pair["quant"]][0]
    for run in found["runs"]:
        setting = run["setting"]
        if setting["side"] != "ours" or not run.get("n_steps") or run.get("n_generated", 0) < 2:
            continue
        n, us, threads = run["n_steps"], run["us"], setting["threads"]
        host = rates["host"].get(str(threads)) or rates["host"].get("16" if threads > 8 else "8", 0.0) * FEWER.get(
            threads, 1.0
        )
        yield {
            "session": found["machine"]["date"],
            "model": model,
            "stage": run["stage"],
            "policy": "sync-moves" if setting.get("sync_moves") else setting["policy"],
            "share": setting["share"],
            "threads": threads,
            "cpu_read": round(host),
            "link": round(rates["link"]),
            "device_read": round(rates["device"]),
            "drafted": setting["n_draft"] if run["n_drafted"] else 0,
            "acceptance": (setting["draft"] or "")[-2:] if run["n_drafted"] else "",
            "n_steps": n,
            "n_tokens": round(1 + run["n_drafted"] / n, 4),
            "kept": round((run["n_generated"] - 1) / n, 4),
            "hit_rate": round(run["hit_rate"], 4),
            "slot_bytes": run["slot_bytes"],
            "dense": run["vram"]["dense"],
            "tps": round(run["tps"], 2),
            "verify": round(run["verify_seconds"] / n, 6),
            "draft": round(run["draft_seconds"] / n, 6),
            "us": round((us["total"] + us["rest"]) / n / n_layers, 1) if us.get("total") else None,
        }


def read(path: Path) -> list[Cell]:
    return [Cell(**row) for row in json.loads(path.read_text(encoding="utf-8"))]


def table(cells: list[Cell]) -> Iterator[str]:
    yield "| budget | threads | draft | hits | expected | TPS | expected | with the measured hits | ratio |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for c in cells:
        low, high = (100 * float(h.mean()) for h in hits_of(c.plan.blocks, c.plan.slots))
        a, b = c.expected_tps()
        (same,) = c.expected_tps(c.hit_rate)
        draft = f"{c.acceptance} %, {c.drafted}" if c.drafted else "–"
        yield (
            f"| {100 * c.share:.0f} % | {c.threads} | {draft} | {100 * c.hit_rate:.0f} | {low:.0f}–{high:.0f} | {c.tps:.1f} | "
            f"{a:.0f}–{b:.0f} | {same:.1f} | {same / c.tps:.2f} |"
        )


def summary(name: str, ratios: list[float]) -> str:
    worst = max(ratios, key=lambda r: max(r, 1 / r))
    near = sum(1 / 1.2 <= r <= 1.2 for r in ratios)
    return f"{name}: median {statistics.median(ratios):.2f}, worst {worst:.2f}, within 20 %: {near} of {len(ratios)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--collect", action="store_true", help="from what `moespac bench compare` wrote")
    parser.add_argument("--out", type=Path, default=Path("bench/results/measured-steps.json"))
    args = parser.parse_args()
    if args.collect:
        rows = [row for path in args.files for row in collect(path)]
        args.out.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n", encoding="utf-8")
        return
    cells = [cell for path in args.files for cell in read(path)]
    grid = [c for c in cells if c.stage == "grid"]
    print("\n".join(table(grid)))
    for session in sorted({c.session for c in cells}):
        for of_grid in (True, False):
            some = [c for c in cells if c.session == session and (c.stage == "grid") == of_grid]
            if not some:
                continue
            print(f"\n{some[0].model}, {session}, {'grid' if of_grid else 'other runs'}, expected over measured")
            print(summary("  TPS, measured hits", [c.expected_tps(c.hit_rate)[0] / c.tps for c in some]))
            print(summary("  TPS, expected hits", [sum(c.expected_tps()) / 2 / c.tps for c in some]))
            print(summary("  verify step, measured hits", [c.expected(c.hit_rate)[0] / c.verify for c in some]))


if __name__ == "__main__":
    main()
