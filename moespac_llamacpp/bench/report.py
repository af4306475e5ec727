"""The comparison on paper: JSON, a table, pictures, the rows' results."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from moespac_llamacpp.bench import grid_report, machine, plots, targets
from moespac_llamacpp.bench.compare import Comparison
from moespac_llamacpp.bench.steps import step_parts

TARGET_FIELDS = ("id", "what", "at_least", "aim", "measured", "unit")


def save(folder: Path, comparison: Comparison, about: Mapping[str, object], where: dict[str, Any]) -> None:
    """comparison.json, comparison.md, targets.json and the pictures. Cheap: called after every row."""
    folder.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {
        "machine": where,
        "pair": {"planted": True, **about},
        "choices": vars(comparison.choices) | {"cheap": comparison.cheap},
        "effort": vars(comparison.effort),
        "bandwidths": comparison.bandwidths,
        "rows": comparison.rows,
        "runs": comparison.runs,
        "models": comparison.rig.loaded(),
        "notes": comparison.notes,
        "missing": comparison.missing,
    }
    (folder / "comparison.json").write_text(json.dumps(record, indent=1) + "\n")
    (folder / "comparison.md").write_text(document(record))
    for name, picture in pictures(record["runs"], comparison.choices.drafts).items():
        (folder / name).write_text(picture)
    origin = {"machine": machine.short(where), "commit": where["commit"], "command": where["command"]}
    targets.save(folder / "targets.json", [{k: r[k] for k in TARGET_FIELDS} | origin for r in comparison.rows])


def document(record: Mapping[str, Any]) -> str:
    where, pair = record["machine"], record["pair"]
    rival = where["workers"]["stock"]
    lines = [
        "# Comparison with llama.cpp on a planted pair",
        "",
        f"Planted: {pair['target']} {pair['quant']}, {pair['layers']} layers, draft {pair['draft']} {pair['draft_quant']}; "
        f"random weights, routing from {pair['routing']}.",
        f"Machine: {machine.short(where)}, {where['memory_gb']} GB; commit {where['commit']}, {where['date']}.",
        f"Rival: llama-cpp-python {rival['llama_cpp']}"
        + (", our own build, not attached: llama.cpp's own path" if rival["patched"] else ", unpatched"),
        "",
        f"    {where['command']}",
        "",
        "## Rows",
        "",
        _table(
            ["id", "measured", "at least", "aim", "ours", "", "rival's best", "", "VRAM ours / rival, GB"],
            [_row(r) for r in record["rows"]],
        ),
        "",
    ]
    if cells := grid_report.cells(record["runs"]):
        lines += ["## Grid", "", GRID_SAID, "", _table(grid_report.CELLS, cells), ""]
    if policies := grid_report.policies(record["runs"]):
        lines += ["## Policies and ablations", "", grid_report.policies_said(record["runs"]), ""]
        lines += [_table(grid_report.POLICIES, policies), ""]
    if record["missing"]:
        lines += ["## Missing for time", "", *(f"- {point}" for point in record["missing"]), ""]
    if record["models"]:
        lines += ["## VRAM of each model, GB", "", VRAM_SAID, "", _table(*_vram(record["models"])), ""]
    if record["notes"]:
        lines += ["## Notes", "", *(f"- {note}" for note in record["notes"]), ""]
    return "\n".join(lines)


GRID_SAID = (
    "Coarse: one short run of each setting, and the best one counts. The draft is extra on both sides. Draft lengths and memory "
    "modes were tried with the most threads, and the best of them taken with fewer. TTFT and VRAM: llama.cpp's / ours."
)
VRAM_SAID = (
    "What llama.cpp says that it allocated on the device, and how much less the device then had free (0: a CPU does not tell). "
    "Slots come on top: `slot_bytes`, `device_bytes` and `device_reading` of each run of ours."
)


def _vram(models: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    rows = [
        [m["model"], *(f"{m[k] / 1e9:.3f}" for k in ("device_buffers", "device_reading")), f"{m['load_seconds']:.1f}"]
        for m in sorted(models, key=lambda m: str(m["model"]))
    ]
    return ["model", "llama.cpp", "device", "loading, s"], rows


def _row(r: Mapping[str, Any]) -> list[str]:
    ours = r["ours"]
    rival = max(r["rivals"], key=lambda c: float(c["median"]), default=None)
    return [
        r["id"],
        f"**{r['measured']:.2f}**",
        f"{r['at_least']:g}",
        f"{r['aim']:g}",
        ours["label"],
        f"{ours['median']:.1f} {r['rate_unit']}",
        rival["label"] if rival else "",
        f"{rival['median']:.1f}" if rival else "",
        " / ".join(f"{c['vram']['total'] / 1e9:.2f}" for c in (ours, rival) if c and c["vram"]),
    ]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows))


def pictures(runs: Sequence[Mapping[str, Any]], drafts: Sequence[str]) -> dict[str, str]:
    """SVG by file name, of what there is to see: of the grid, or else of the rows' runs. drafts: the comparison's own."""
    found = grid_report.pictures(runs, drafts)
    if found:
        return found
    measured = [r for r in runs if "tps" in r and r["n_generated"] > 1]
    speeds = {
        side: _best_by_share([r for r in measured if r["setting"]["side"] == name], "tps")
        for name, side in (("ours", "moespac"), ("stock", "llama.cpp"))
    }
    if any(speeds.values()):
        found["tps.svg"] = plots.lines("tokens per second, best setting of each side", "% of experts in VRAM", speeds)
    hits = {"best": _best_by_share([r for r in measured if "hit_rate" in r], "hit_rate", 100.0)}
    if hits["best"]:
        found["hits.svg"] = plots.lines("% of pairs on the device", "% of experts in VRAM", hits)
    clocked = [r for r in runs if r.get("us", {}).get("total")]
    if clocked:
        bars = {f"{100 * share:g} %": step_parts(r) for share, r in sorted(_best_runs(clocked).items())}
        found["steps.svg"] = plots.bars("ms per step", bars)
    return found


def _best_runs(runs: Sequence[Mapping[str, Any]]) -> dict[float, Mapping[str, Any]]:
    best: dict[float, Mapping[str, Any]] = {}
    for r in runs:
        share = float(r["setting"]["share"])
        if share not in best or r["tps"] > best[share]["tps"]:
            best[share] = r
    return best


def _best_by_share(runs: Sequence[Mapping[str, Any]], what: str, scale: float = 1.0) -> list[tuple[float, float]]:
    return sorted((100 * share, scale * float(r[what])) for share, r in _best_runs(runs).items())
