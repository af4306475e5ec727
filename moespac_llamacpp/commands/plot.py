"""moespac plot and moespac inspect: pictures of a session and of a model file."""

from __future__ import annotations

from json import dumps
from pathlib import Path
from typing import Annotated

import typer

from moespac_llamacpp import native
from moespac_llamacpp.commands.models import resolve
from moespac_llamacpp.commands.shared import fail
from moespac_llamacpp.engine import TINY_MODEL
from moespac_llamacpp.footprint import fallbacks
from moespac_llamacpp.inspection import InspectError, inspect
from moespac_llamacpp.models import LoadError
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
    """What a GGUF file holds: experts, bytes, weight types, and which layers run hybrid. Loads no weights."""
    path = resolve(model).target
    try:
        contents = inspect(path)
    except InspectError as error:
        raise fail(error) from error
    try:
        own_path, problem = fallbacks(path, native.cpu_device()), ""
    except LoadError as error:  # what the header says is worth knowing all the same
        own_path, problem = {}, str(error)
    if json:
        typer.echo(dumps(contents.record() | {"own_path": own_path, "problem": problem}, indent=1))
    else:
        typer.echo(contents.describe())
        typer.echo(problem or _hybrid(contents.n_expert_layer, own_path))
    if svg:
        write(svg, draw_contents(contents))


def _hybrid(n_layer: int, own_path: dict[int, str]) -> str:
    """n_layer: those with experts."""
    if not own_path:
        return "hybrid: every layer with experts can have some on the GPU and the others on the CPU"
    lines = [
        f"hybrid: {n_layer - len(own_path)} of {n_layer} layers with experts; the others take llama.cpp's own path"
    ]
    for why in dict.fromkeys(own_path.values()):
        layers = [str(il) for il, reason in own_path.items() if reason == why]
        lines.append(f"  layer{'s' if len(layers) > 1 else ''} {', '.join(layers)}: {why}")
    return "\n".join(lines)


def write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise fail(f"{path}: the drawing cannot be written: {error.strerror}") from error
    typer.echo(path, err=True)
