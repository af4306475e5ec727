#!/usr/bin/env python3
"""Replays a planted chain, in which no token repeats, through the policies as a live session would run them.

Unlike `moespac simulate`: a prompt of 512 tokens as one batch from a cold start, a plan with each token that a draft makes known
but the last (so they share the step's moves), and the stream lane: experts that cross the link in the middle of a decode
stay there, in place of the residents of least worth that the batch does not use.

    python scripts/replay_planted.py traces/qwen3-30b-a3b_top6.npz --out bench/results/unrepeated.json
    python scripts/replay_planted.py --table bench/results/unrepeated.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moespac_llamacpp import policies
from moespac_llamacpp.hardware import H200, Work
from moespac_llamacpp.planning import Batch, Limits, Move, Policy, Valued
from moespac_llamacpp.simulate import Step, Tally, carry_out
from moespac_llamacpp.synth.plan import Plan, make_plan
from moespac_llamacpp.synth.replay import verify_steps
from moespac_llamacpp.synth.shapes import SHAPES
from moespac_llamacpp.synth.vocabulary import make_vocabulary
from moespac_llamacpp.synth.weights import code_width

MODEL = "qwen3-30b-a3b"
POLICIES = tuple(n for n in policies.NAMES if n not in ("static", "fiddler", "moe-spac-released"))
SHARES, WIDTHS = (0.08, 0.17, 0.25, 0.50), (1, 3, 9)
#: accepted tokens: the text of the grid is 96, a long one is long for the chain's laps of 128
SHORT, LONG = 216, 2000
COLD = 25  # steps that count as the cold start


@dataclass(frozen=True)
class Row:
    """Hits in % of pairs and of distinct experts; the rest a step. cold_*: of the first COLD steps only."""

    policy: str
    width: int
    n_text: int
    cache_share: float
    max_moves: int
    n_steps: int
    pair_hit: float
    expert_hit: float
    moves: float
    streamed: float
    predicted_ms: float
    cold_pair_hit: float
    cold_moves: float


class Session:
    """A policy and its residents; a step at a time."""

    def __init__(self, policy: Policy, shape: tuple[int, int], n_slots: int, max_moves: int, *, late: bool) -> None:
        n_rows = shape[0]
        self.policy, self.late = policy, late
        self.max_moves = max_moves
        self.n_slots = np.full(n_rows, n_slots, np.int32)
        self.expert_bytes = np.full(n_rows, H200.expert_bytes, np.int64)
        self.resident = np.zeros(shape, np.bool_)
        self.resident[:, :n_slots] = True
        self.n_streamed = 0
        self._ahead: list[Move] = []

    def prompt(self, batch: Batch) -> None:
        self.policy.observe(batch)
        self._plan_ahead()

    def step(self, batch: Batch, *tallies: Tally) -> None:
        if self.late:
            moves = self._ahead
            carry_out(moves, self.resident, self._limits(self.max_moves))
        else:
            moves = self._staged(batch)
        present = self.resident.copy()
        if self.late and moves:
            present[[m.row for m in moves], [m.expert for m in moves]] = False
        for tally in tallies:
            tally.add(batch, present, self.n_slots, len(moves), H200, False)
        self._stream(batch, present)
        if self.late:
            self._plan_ahead()
        self.policy.observe(batch)

    def _limits(self, max_moves: int) -> Limits:
        return Limits(self.n_slots, max_moves, None, self.expert_bytes, self.late)

    def _plan_ahead(self) -> None:
        self._ahead = self.policy.plan(self.resident, self._limits(self.max_moves)) if self.late else []

    def _staged(self, batch: Batch) -> list[Move]:
        assert batch.tokens is not None
        moves: list[Move] = []
        for left, token in zip(range(batch.n_tokens - 1, 0, -1), batch.tokens.tolist(), strict=False):
            self.policy.expect([token])
            limits = self._limits((self.max_moves - len(moves)) // left)
            moves += (planned := self.policy.plan(self.resident, limits))
            carry_out(planned, self.resident, limits)
        return moves

    def _stream(self, batch: Batch, present: NDArray[np.bool_]) -> None:
        worth = self.policy.worth() if isinstance(self.policy, Valued) else None
        if worth is None:
            return
        used = batch.counts > 0
        found, hits = (used & present).sum(axis=1), np.where(present, batch.counts, 0).sum(axis=1)
        cold_pairs = batch.counts.sum(axis=1) - hits
        work = Work(batch.n_tokens, used.sum(axis=1) - found, cold_pairs, found, hits, self.n_slots - found)
        n_best = H200.streaming(work)[1]
        for row in np.flatnonzero(n_best).tolist():
            cold = np.flatnonzero(used[row] & ~present[row] & ~self.resident[row])
            cold = cold[np.argsort(-batch.counts[row, cold], kind="stable")][: n_best[row]]
            victims = np.flatnonzero(present[row] & ~used[row])
            victims = victims[np.argsort(worth[row, victims], kind="stable")][: len(cold)]
            self.resident[row, victims] = False
            self.resident[row, cold[: len(victims)]] = True
            self.n_streamed += len(victims)


def play(steps: Sequence[Step], name: str, share: float, max_moves: int, n_text: int) -> Row:
    n_rows, n_expert = steps[0].batch.counts.shape
    width = steps[1].batch.n_tokens
    policy = policies.make(name, n_rows, n_expert)
    session = Session(policy, (n_rows, n_expert), max(1, round(share * n_expert)), max_moves, late=width == 1)
    whole, cold = Tally(), Tally()
    for i, step in enumerate(steps):
        if not step.measured:
            session.prompt(step.batch)
        else:
            session.step(step.batch, *((whole, cold) if i <= COLD else (whole,)))
    result, start = whole.result(), cold.result()
    return Row(
        policy=name,
        width=width,
        n_text=n_text,
        cache_share=share,
        max_moves=max_moves,
        n_steps=result.n_steps,
        pair_hit=round(result.pair_hit, 2),
        expert_hit=round(result.expert_hit, 2),
        moves=round(result.moves_per_step, 2),
        streamed=round(session.n_streamed / result.n_steps, 2),
        predicted_ms=round(result.predicted_ms, 3),
        cold_pair_hit=round(start.pair_hit, 2),
        cold_moves=round(start.moves_per_step, 2),
    )


def planted(trace: Path) -> Plan:
    shape = SHAPES[MODEL]
    words = make_vocabulary(shape.n_vocab).words
    return make_plan(shape, words, trace, shape.n_embd - code_width(shape.n_embd))


def table(rows: Sequence[Row]) -> str:
    """Pairs % / moves + streamed a step / ms."""
    shares = sorted({r.cache_share for r in rows})
    lines = ["| policy | " + " | ".join(f"{100 * s:.0f} %" for s in shares) + " |", "|---" * (len(shares) + 1) + "|"]
    for name in dict.fromkeys(r.policy for r in rows):
        found = {r.cache_share: r for r in rows if r.policy == name}
        shown = (
            f"{r.pair_hit:.1f} / {r.moves:.0f} + {r.streamed:.0f} / {r.predicted_ms:.2f}"
            for r in (found[s] for s in shares)
        )
        lines.append(f"| {f'**{name}**' if name == 'moe-spac' else name} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def tables(rows: Sequence[Row]) -> str:
    """Of each width and length with the first cap, and the cold start by cap."""
    parts = []
    cap = rows[0].max_moves
    for width, n_text in dict.fromkeys((r.width, r.n_text) for r in rows):
        cell = [r for r in rows if (r.width, r.n_text, r.max_moves) == (width, n_text, cap)]
        parts.append(f"{width} tokens, {n_text} of text, at most {cap} moves\n\n{table(cell)}")
    lines = [
        f"| cap, policy | pairs % in steps 1 to {COLD} | moves | all steps: pairs % | moves | ms |",
        "|---" * 6 + "|",
    ]
    for r in rows:
        if (r.width, r.n_text, r.cache_share) == (3, SHORT, 0.25) and len({q.max_moves for q in rows}) > 1:
            numbers = (r.cold_pair_hit, r.cold_moves, r.pair_hit, r.moves)
            shown = " | ".join(f"{x:.1f}" for x in numbers)
            lines.append(f"| {r.max_moves}, {r.policy} | {shown} | {r.predicted_ms:.2f} |")
    return "\n\n".join([*parts, "\n".join(lines)])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("trace", type=Path, nargs="?", help="the routing trace that the chain is planted from")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path, help="print the tables of such a file instead")
    args = parser.parse_args()
    if args.table:
        print(tables([Row(**row) for row in json.loads(args.table.read_text(encoding="utf-8"))]))
        return 0
    if not args.trace:
        parser.error("say which trace the chain shall be planted from, or --table FILE")
    plan = planted(args.trace)
    n_experts = len(plan.layers) * plan.n_expert
    cap = round(0.02 * n_experts)
    rows: list[Row] = []
    for n_text in (SHORT, LONG):
        for width in WIDTHS:
            steps = verify_steps(plan, width, n_text)
            print(f"{width} tokens, {n_text} of text: {len(steps) - 1} steps", file=sys.stderr)
            for share in SHARES:
                rows += [play(steps, name, share, cap, n_text) for name in POLICIES]
    steps = verify_steps(plan, 3, SHORT)
    for more in (cap // 4, 2 * cap, 4 * cap, n_experts):
        rows += [play(steps, name, 0.25, more, SHORT) for name in ("moe-spac", "lfu", "decayed")]
    print(tables(rows))
    if args.out:
        lines = ",\n".join(json.dumps(asdict(row)) for row in rows)
        args.out.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
