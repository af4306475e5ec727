"""Draws a session's telemetry: speed, hits and moves over its steps, and where experts lived.

One JSON object a line and step. Fields are taken where they are there; what is missing is left out of the drawing:

| drawn | fields (the first that a record has) |
|---|---|
| tokens | n_tokens, else n_accepted + 1 |
| time | the sum of draft_ms, decode_ms, accept_ms, plan_ms (also as t_draft_ms, …) |
| hits | hits or n_hot_pairs; misses or n_cold_pairs |
| moves | moves or n_loads |
| placement | resident: by layer a string of 0 and 1, or a list of them, one digit per expert |
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moespac_llamacpp.inspection import Contents
from moespac_llamacpp.plan import size
from moespac_llamacpp.svg import Drawing

_TIMES = ("draft_ms", "decode_ms", "accept_ms", "plan_ms")


class PlotError(ValueError):
    """The file is no telemetry; the text is the sentence for the user."""


@dataclass(frozen=True)
class Telemetry:
    """Arrays [n_steps], NaN where a record does not say. placement: by layer, the share of the snapshots [n_expert]."""

    tps: NDArray[np.float64]
    hits: NDArray[np.float64]  # %
    moves: NDArray[np.float64]
    placement: dict[str, NDArray[np.float64]]
    n_snapshots: int


def read_telemetry(path: Path) -> Telemetry:
    """PlotError: no such file, not telemetry, or without a step. A last line that was cut short is left out."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise PlotError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or 'not text'}") from error
    records: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except ValueError as error:
            if number == len(lines) and records:  # the process ended while it wrote
                break
            raise PlotError(f"{path}, line {number}: not a line of telemetry (JSON)") from error
        if not isinstance(record, dict):
            raise PlotError(f"{path}, line {number}: not a record of telemetry")
        records.append(record)
    steps = [record for record in records if record.get("kind", "step") == "step"]
    if np.isnan([_tps(step) for step in steps]).all():
        raise PlotError(f"{path}: no step to draw: was anything generated with --telemetry?")
    snapshots = [r["resident"] for r in records if isinstance(r.get("resident"), (dict, list))]
    return Telemetry(
        tps=np.array([_tps(step) for step in steps]),
        hits=np.array([_hits(step) for step in steps]),
        moves=np.array([_first(step, "moves", "n_loads") for step in steps]),
        placement=_placement(snapshots),
        n_snapshots=len(snapshots),
    )


def _first(record: dict[str, Any], *names: str) -> float:
    for name in names:
        if isinstance(value := record.get(name), (int, float)):
            return float(value)
    return float("nan")


def _tps(step: dict[str, Any]) -> float:
    tokens = _first(step, "n_tokens")
    if np.isnan(tokens):
        tokens = _first(step, "n_accepted") + 1
    ms = float(np.nansum([_first(step, name, f"t_{name}") for name in _TIMES]))
    return 1e3 * tokens / ms if ms > 0 else float("nan")


def _hits(step: dict[str, Any]) -> float:
    hot, cold = _first(step, "hits", "n_hot_pairs"), _first(step, "misses", "n_cold_pairs")
    return 100 * hot / (hot + cold) if hot + cold > 0 else float("nan")


def _placement(snapshots: Sequence[dict[str, Any] | list[Any]]) -> dict[str, NDArray[np.float64]]:
    """The share of the snapshots in which each expert was resident. Counts instead of digits have no places: left out."""
    seen: dict[str, list[NDArray[np.float64]]] = {}
    for snapshot in snapshots:
        rows = snapshot.items() if isinstance(snapshot, dict) else enumerate(snapshot)
        for layer, row in rows:
            if isinstance(row, (str, list)) and len(row):
                seen.setdefault(str(layer), []).append(np.array([float(digit) for digit in row]))
    return {layer: np.mean(rows, axis=0) for layer, rows in seen.items() if len({len(row) for row in rows}) == 1}


def draw_telemetry(telemetry: Telemetry, title: str) -> str:
    """SVG."""
    drawing = Drawing(title)
    for name, values in (
        ("tokens per second", telemetry.tps),
        ("hits, % of (token, expert) pairs", telemetry.hits),
        ("uploads a step", telemetry.moves),
    ):
        if np.isfinite(values).any():
            drawing.lines(name, values)
    drawing.steps(len(telemetry.tps))
    if telemetry.placement:
        n_expert = max(len(row) for row in telemetry.placement.values())
        table = np.full((len(telemetry.placement), n_expert), np.nan)
        for i, row in enumerate(telemetry.placement.values()):
            table[i, : len(row)] = row
        drawing.heat(
            f"layers × experts: dark was always resident, light never ({telemetry.n_snapshots} snapshots)",
            list(telemetry.placement),
            table,
        )
    return drawing.svg()


def draw_contents(contents: Contents) -> str:
    """SVG of a model's bytes: each layer's experts, and all the rest."""
    drawing = Drawing(f"{Path(contents.path).name}: {size(contents.total_bytes)}")
    rows = []
    for part in contents.layers:
        for layer in range(part.first, part.last + 1):
            used = contents.n_expert_used * part.expert_bytes
            rest = part.n_expert * part.expert_bytes - used
            rows.append((str(layer), (used, rest), f"{part.n_expert} × {size(part.expert_bytes)}"))
    drawing.bars("bytes of each layer's experts", rows, ("read for a token", "the others"))
    whole = (contents.dense_bytes, contents.expert_bytes)
    words = f"{size(whole[0])} dense, {size(whole[1])} experts"
    drawing.bars("the whole model", [("", whole, words)], ("dense", "experts"))
    return drawing.svg()
