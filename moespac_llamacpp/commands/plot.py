"""moespac plot and moespac inspect: pictures of a session and of a model file."""

from __future__ import annotations

from json import dumps
from pathlib import Path
from typing import Annotated

import typer

from moespac_llamacpp.commands.models import resolve
from moespac_llamacpp.commands.shared import fail
from moespac_llamacpp.engine import TINY_MODEL
from moespac_llamacpp.inspection import InspectError, inspect
from moespac_llamacpp.plot import PlotError, draw_contents, draw_telemetry, read_telemetry


def plot_command(
    telemetry: Annotated[Path, typer.Argument(help="A file that --telemetry wrote.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The SVG file (default: beside it, .svg).")] = None,
) -> None:
    """Draw a session: tokens a second, hits, uploads, and where the experts lived."""
    try:
        drawing = draw_telemetry(read_telemetry(telemetry), telemetry.name)
        write(out or telemetry.with_suffix(".svg"), drawing)
    except PlotError as error:
        raise fail(error) from error


def inspect_command(
    model: Annotated[
        Path,
        typer.Option(
            "--model",
            "-m",
            help="GGUF file to look at, or name (see models; default: the bundled one).",
            show_default=False,
        ),
    ] = TINY_MODEL,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    svg: Annotated[Path | None, typer.Option("--svg", help="Also draw the bytes into this file.")] = None,
) -> None:
    """What a GGUF file holds: experts, bytes, weight types. Loads no weights."""
    try:
        contents = inspect(resolve(model).target)
    except InspectError as error:
        raise fail(error) from error
    typer.echo(dumps(contents.record(), indent=1) if json else contents.describe())
    if svg:
        write(svg, draw_contents(contents))


def write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise fail(f"{path}: the drawing cannot be written: {error.strerror}") from error
    typer.echo(path, err=True)
