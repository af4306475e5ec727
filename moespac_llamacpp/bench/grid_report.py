"""The grid on paper: a table of cells, one of policies, and the pictures. From the runs of comparison.json."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from moespac_llamacpp.bench import plots
from moespac_llamacpp.bench.settings import OURS, STOCK, readable
from moespac_llamacpp.bench.steps import step_parts

Run = Mapping[str, Any]
Key = tuple[float, int, str | None]  # share, threads, draft

CELLS = ["budget", "threads", "draft", "llama.cpp TPS", "how", "ours TPS", "how", "ratio", "hits", "TTFT ms", "VRAM GB"]
POLICIES = ["policy", "draft", "TPS", "hits", "uploads a step", "ms a step"]
SHARES = "% of experts in VRAM"


def best(runs: Iterable[Run]) -> dict[tuple[str, Key], Run]:
    """The fastest run of each side and cell."""
    found: dict[tuple[str, Key], Run] = {}
    for run in runs:
        if run["stage"] != "grid":
            continue
        cell = run["cell"]
        key = run["setting"]["side"], (cell["share"], cell["threads"], cell["draft"])
        if key not in found or run["tps"] > found[key]["tps"]:
            found[key] = run
    return found


def cells(runs: Iterable[Run]) -> list[list[str]]:
    """Rows under CELLS. In TTFT and VRAM: llama.cpp's / ours."""
    found = best(runs)
    keys = sorted({key for _, key in found}, key=lambda k: (k[0], -k[1], k[2] or ""))
    return [_cell(key, found.get((STOCK, key)), found.get((OURS, key))) for key in keys]


def _cell(key: Key, rival: Run | None, ours: Run | None) -> list[str]:
    share, threads, draft = key
    both = [r for r in (rival, ours) if r]
    return [
        f"{100 * share:g} %",
        str(threads),
        readable(draft),
        *(f for r in (rival, ours) for f in ((f"{r['tps']:.1f}", _how(r)) if r else ("", ""))),
        f"{ours['tps'] / rival['tps']:.2f}" if rival and ours and rival["tps"] else "",
        f"{100 * ours['hit_rate']:.0f} %" if ours else "",
        " / ".join(f"{1e3 * r['ttft']:.0f}" for r in both),
        " / ".join(f"{r['vram']['total'] / 1e9:.2f}" for r in both),
    ]


def _how(run: Run) -> str:
    s = run["setting"]
    words = [f"t{s['threads']}", s["memory"] if s["side"] == STOCK else s["policy"]]
    return ", ".join([*words, f"{s['n_draft']} drafted"] if s["draft"] else words)


def policies(runs: Iterable[Run]) -> list[list[str]]:
    """Rows under POLICIES, the fastest of each draft first."""
    found = [r for r in runs if r["stage"] == "policy"]
    found.sort(key=lambda r: (r["setting"]["draft"] is None, -r["tps"]))
    return [
        [
            r["cell"]["policy"],
            readable(r["setting"]["draft"]) + (f", {r['setting']['n_draft']} drafted" if r["setting"]["draft"] else ""),
            f"{r['tps']:.1f}",
            f"{100 * r['hit_rate']:.1f} %",
            f"{r['moves'] / max(1, r['n_steps']):.1f}",
            f"{1e3 * r['seconds'] / max(1, r['n_steps']):.2f}",
        ]
        for r in found
    ]


def policies_said(runs: Sequence[Run]) -> str:
    run = next(r for r in runs if r["stage"] == "policy")
    return (
        f"{100 * run['setting']['share']:g} % of the experts, {run['setting']['threads']} threads, one run of "
        f"{run['n_generated']} tokens each, the same text for all, each from a cold start."
    )


def pictures(runs: Sequence[Run], own: Sequence[str]) -> dict[str, str]:
    """SVG by file name; nothing without a grid. own: drafts that are in the lines of the best, and in the bars of steps."""
    found = best(runs)
    if not found:
        return {}
    counts = sorted({threads for _, (_, threads, _) in found}, reverse=True)
    # looking up n-grams is a second run without a draft here: it would be a second try of ours
    drafts = sorted({draft for _, (_, _, draft) in found if draft != "ngram"}, key=lambda d: d or "")
    first = [d for d in drafts if d is None or d in own]
    names = ((OURS, "ours"), (STOCK, "llama.cpp"))
    speeds = {f"{name}, {t} threads": _line(found, side, t, first, "tps") for t in counts for side, name in names}
    by_draft = {
        f"{name}, {readable(d)}": _line(found, side, counts[0], [d], "tps") for d in drafts for side, name in names
    }
    hits = {readable(d): _line(found, OURS, counts[0], [d], "hit_rate", 100.0) for d in drafts}
    steps = {
        f"{100 * share:g} %" + (f" +{run['setting']['n_draft']}" if draft else ""): step_parts(run)
        for draft in first
        for (side, (share, t, d)), run in sorted(found.items(), key=lambda item: item[0][1][0])
        if side == OURS and t == counts[0] and d == draft
    }
    drawn = {
        "tps.svg": plots.lines(
            f"tokens per second, the best of {', '.join(map(readable, first))}", SHARES, _there(speeds)
        ),
        "tps-draft.svg": plots.lines(f"tokens per second by draft, {counts[0]} threads", SHARES, _there(by_draft)),
    }
    if any(hits.values()):
        drawn["hits.svg"] = plots.lines(f"% of pairs on the device, {counts[0]} threads", SHARES, _there(hits))
    if steps:
        drawn["steps.svg"] = plots.bars(f"ms per step of ours, {counts[0]} threads; +n: with n drafted", steps)
    return drawn


def _there(series: Mapping[str, list[tuple[float, float]]]) -> dict[str, list[tuple[float, float]]]:
    return {name: line for name, line in series.items() if line}


def _line(
    found: Mapping[tuple[str, Key], Run],
    side: str,
    threads: int,
    drafts: Sequence[str | None],
    what: str,
    scale: float = 1,
) -> list[tuple[float, float]]:
    """(% of experts, value of the fastest run of these drafts) for each budget."""
    shares = sorted({share for s, (share, t, d) in found if s == side and t == threads and d in drafts})
    line = []
    for share in shares:
        here = [found[side, (share, threads, d)] for d in drafts if (side, (share, threads, d)) in found]
        line.append((100 * share, scale * float(max(here, key=lambda r: float(r["tps"]))[what])))
    return line
