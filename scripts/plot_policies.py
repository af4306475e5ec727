#!/usr/bin/env python3
"""Draws bench/results/policies.json as docs/policies.svg, and prints the tables of docs/policies.md.

python scripts/plot_policies.py > tables.md
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]

#: policy: colour; what is not named here is in the tables only
SHOWN = {
    "moe-spac": "#c0392b",
    "decayed": "#2471a3",
    "lru": "#7d8a2e",
    "lfu": "#8e44ad",
    "moe-infinity": "#d68910",
    "hybrimoe": "#17a589",
    "fiddler": "#7f8c8d",
}
BOUND = "clairvoyant"
#: hindsight over the very text that is measured: no policy that could be used
HINDSIGHT = "static"

WIDTH, HEIGHT, LEFT, TOP, GAP = 250, 190, 46, 34, 26


def key(row: Row) -> tuple[Any, ...]:
    return row["trace"], row["batch_kind"], row["batch"], row["landing"]


def cells(rows: Sequence[Row]) -> dict[tuple[Any, ...], list[Row]]:
    """Rows of all policies by (trace, kind, batch, landing, share)."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault((*key(row), row["cache_share"]), []).append(row)
    return found


def text(x: float, y: float, words: str, size: int = 11, anchor: str = "middle", colour: str = "#222") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{colour}" '
        f'font-family="sans-serif">{words}</text>'
    )


def line(points: Sequence[tuple[float, float]], colour: str, width: float = 1.5, dash: str = "") -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"{dashes}/>'


def panel(rows: Sequence[Row], title: str, x0: float, y0: float) -> list[str]:
    """Pairs that hit (%) against the share of experts with a slot, a line for each policy."""
    shares = sorted({r["cache_share"] for r in rows})

    def at(share: float, hit: float) -> tuple[float, float]:
        return x0 + WIDTH * shares.index(share) / (len(shares) - 1), y0 + HEIGHT * (1 - hit / 100)

    out = [f'<rect x="{x0}" y="{y0}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#999"/>']
    out.append(text(x0 + WIDTH / 2, y0 - 8, title, 12))
    for hit in (0, 25, 50, 75, 100):
        y = at(shares[0], hit)[1]
        out += [line([(x0, y), (x0 + WIDTH, y)], "#ddd", 0.7), text(x0 - 6, y + 4, str(hit), 10, "end")]
    for share in shares:
        out.append(text(at(share, 0)[0], y0 + HEIGHT + 14, f"{100 * share:.0f} %", 10))
    bound = {r["cache_share"]: r["clairvoyant_pair_hit"] for r in rows}
    out.append(line([at(s, bound[s]) for s in shares], "#222", 1.0, "4 3"))
    for policy, colour in SHOWN.items():
        hits = {r["cache_share"]: r["pair_hit"] for r in rows if r["policy"] == policy}
        out.append(line([at(s, hits[s]) for s in shares], colour, 2.2 if policy == "moe-spac" else 1.3))
    return out


def plot(rows: Sequence[Row]) -> str:
    """Verify batches of the tiny pair, and batches of 4 of the public traces; moves land in time."""
    wanted = [k for k in dict.fromkeys(map(key, rows)) if k[3] == "same" and (k[1] == "verify" or k[2] == 4)]
    wanted = [k for k in wanted if k[1] == "verify" or not str(k[0]).startswith("tiny")]
    body: list[str] = []
    for i, wanted_key in enumerate(wanted):
        x, y = float(LEFT + (i % 3) * (WIDTH + GAP + LEFT)), float(TOP + (i // 3) * (HEIGHT + TOP + GAP))
        title = f"{wanted_key[0]}, {wanted_key[2]} tokens"
        body += panel([r for r in rows if key(r) == wanted_key], title, x, y)
    n_rows = -(-len(wanted) // 3)
    x, y = LEFT + 2 * (WIDTH + GAP + LEFT) + 20.0, TOP + (n_rows - 1) * (HEIGHT + TOP + GAP) + 20.0
    for policy, colour in [*SHOWN.items(), (BOUND, "#222")]:
        body += [line([(x, y - 4), (x + 24, y - 4)], colour, 2, "4 3" if policy == BOUND else "")]
        body += [text(x + 32, y, policy, 12, "start")]
        y += 20
    width, height = 3 * (WIDTH + GAP + LEFT), n_rows * (HEIGHT + TOP + GAP) + 10
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
    return "\n".join([head, f'<rect width="{width}" height="{height}" fill="#fff"/>', *body, "</svg>"]) + "\n"


def table(rows: Sequence[Row]) -> str:
    shares = sorted({r["cache_share"] for r in rows})
    lines = ["| policy | " + " | ".join(f"{100 * s:.0f} %" for s in shares) + " |", "|---" * (len(shares) + 1) + "|"]
    for policy in dict.fromkeys(r["policy"] for r in rows):
        found = {r["cache_share"]: r for r in rows if r["policy"] == policy}
        name = f"**{policy}**" if policy == "moe-spac" else policy
        shown = (
            f"{r['pair_hit']:.1f} / {r['expert_hit']:.1f} / {r['moves_per_step']:.1f} / {r['predicted_ms']:.2f}"
            for r in (found[s] for s in shares)
        )
        lines.append(f"| {name} | " + " | ".join(shown) + " |")
    bound = {r["cache_share"]: r["clairvoyant_pair_hit"] for r in rows}
    lines.append("| clairvoyant, pairs | " + " | ".join(f"{bound[s]:.1f}" for s in shares) + " |")
    return "\n".join(lines)


def behind(rows: Sequence[Row]) -> list[tuple[float, str]]:
    """How far (%) moe-spac's predicted time is behind the best other policy's in each cell, the worst first; its variants and
    hindsight do not count."""
    found = []
    for (trace, kind, batch, landing, share), cell in cells(rows).items():
        mine = next(r for r in cell if r["policy"] == "moe-spac")
        others = [r for r in cell if r["policy"] not in ("moe-spac", HINDSIGHT)]
        others = [r for r in others if not r["policy"].startswith("moe-spac")]
        best = min(others, key=lambda r: float(r["predicted_ms"]))
        gap = 100 * (mine["predicted_ms"] / best["predicted_ms"] - 1)
        found.append((gap, f"{trace}, {kind} {batch}, {landing}, {100 * share:.0f} %: {best['policy']}"))
    return sorted(found, reverse=True)


def ablation_table(rows: Sequence[Row], share: float) -> str:
    lines = ["| trace | machine | " + " | ".join(dict.fromkeys(r["without"] for r in rows)) + " |"]
    names = list(dict.fromkeys(r["without"] for r in rows))
    lines.append("|---" * (len(names) + 2) + "|")
    for trace, hardware in dict.fromkeys((r["trace"], r["hardware"]) for r in rows):
        found = {
            r["without"]: r for r in rows if (r["trace"], r["hardware"], r["cache_share"]) == (trace, hardware, share)
        }
        shown = (
            f"{found[n]['pair_hit']:.1f} / {found[n]['moves_per_step']:.1f} / {found[n]['predicted_ms']:.2f}"
            if n in found
            else "–"
            for n in names
        )
        lines.append(f"| {trace} | {hardware} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--results", type=Path, default=Path("bench/results"))
    parser.add_argument("--out", type=Path, default=Path("docs/policies.svg"))
    args = parser.parse_args()
    rows: list[Row] = json.loads((args.results / "policies.json").read_text(encoding="utf-8"))
    args.out.write_text(plot(rows), encoding="utf-8")
    for wanted in dict.fromkeys(map(key, rows)):
        print(f"\n## {wanted[0]}, {wanted[1]}, {wanted[2]} tokens, {wanted[3]}\n")
        print(table([r for r in rows if key(r) == wanted]))
    gaps = behind(rows)
    print(f"\nbehind the best: {sum(g > 1 for g, _ in gaps)} of {len(gaps)} cells by more than 1 %\n")
    for gap, where in gaps:
        print(f"{gap:6.2f} % {where}")
    parts: list[Row] = json.loads((args.results / "ablation.json").read_text(encoding="utf-8"))
    for share in sorted({r["cache_share"] for r in parts}):
        print(f"\nablation at {100 * share:.0f} %\n")
        print(ablation_table(parts, share))
    return 0


if __name__ == "__main__":
    sys.exit(main())
