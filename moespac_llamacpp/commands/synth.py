"""moespac synth: write a planted pair."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from moespac_llamacpp.commands.shared import fail
from moespac_llamacpp.models import LoadError, capture_log
from moespac_llamacpp.synth import Order, Pair, RoomError, write_pair
from moespac_llamacpp.synth.check import verify
from moespac_llamacpp.synth.shapes import QUANTS, TINY
from moespac_llamacpp.synth.weights import n_threads
from moespac_llamacpp.synth.writer import Progress

NAMES = ", ".join(TINY)


def synth_command(
    name: Annotated[str, typer.Argument(help=f"The target to imitate: {NAMES}.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for target.gguf, the drafts and plan.npz.")],
    quant: Annotated[str, typer.Option("--quant", help=f"Weight types of the target: {', '.join(QUANTS)}.")] = "Q4_K_M",
    draft: Annotated[str, typer.Option("--draft", help="The draft to imitate, or none.")] = "qwen3-4b",
    draft_quant: Annotated[str, typer.Option("--draft-quant", help="Weight types of the draft.")] = "Q8_0",
    acceptance: Annotated[
        str,
        typer.Option("--acceptance", "-a", help="Share of guesses that are right; several: one draft file for each."),
    ] = "0.75",
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Routing to replay (see moespac trace); default: synthetic, skewed.")
    ] = None,
    layers: Annotated[int | None, typer.Option("--layers", help="Fewer layers than the model has.")] = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="The same structure in some 40 MB.")] = False,
    drafts_only: Annotated[
        bool, typer.Option("--drafts-only", help="Another draft for the pair in -o; all else as when that was written.")
    ] = False,
    check: Annotated[bool, typer.Option("--verify", help="Then decode the pair and compare with the plan.")] = False,
    seed: Annotated[int, typer.Option("--seed", "-s")] = 0,
) -> None:
    """Write a planted pair: true shapes and weight types, random weights, text, routing and acceptance as ordered."""
    start = time.perf_counter()
    for kind in (quant, draft_quant):
        if kind not in QUANTS:
            raise fail(f"there are no weight types {kind!r} here; there are {', '.join(QUANTS)}")
    try:
        order = Order(
            target=name,
            quant=quant,
            draft=None if draft == "none" else draft,
            draft_quant=draft_quant,
            acceptances=tuple(float(a) for a in acceptance.split(",")),
            trace=trace,
            tiny=tiny,
            layers=layers,
            seed=seed,
            drafts_only=drafts_only,
        )
        pair = write_pair(order, out, _progress)
    except (ValueError, OSError, RoomError) as error:
        raise fail(error) from error
    n_bytes = sum(path.stat().st_size for path in (pair.target, *pair.drafts))
    typer.echo(
        f"{out}: {n_bytes / 1e9:.2f} GB in {time.perf_counter() - start:.1f} s; routing: {pair.about['routing']}"
    )
    if check:
        _verify(pair)


def _verify(pair: Pair) -> None:
    capture_log()
    try:
        findings = verify(pair, n_threads())
    except LoadError as error:
        raise fail(error) from error
    typer.echo(findings.describe())
    if findings.failures:
        raise fail(f"{pair.folder}: not as planted: {'; '.join(findings.failures)}")


def _progress(label: str) -> Progress:
    shown = -1

    def report(fraction: float) -> None:
        nonlocal shown
        percent = int(100 * fraction)
        if percent != shown and (percent % 10 == 0 or typer.get_text_stream("stderr").isatty()):
            shown = percent
            end = "\n" if percent == 100 else ""
            typer.echo(f"\rwriting {label} {'#' * (percent // 5):<20} {percent:3d} %{end}", err=True, nl=False)

    return report
