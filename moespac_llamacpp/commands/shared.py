"""What several commands need of the terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer

from moespac_llamacpp import engine, native
from moespac_llamacpp.machine import reason


def fail(message: object) -> typer.Exit:
    """Says it as a sentence; to be raised."""
    typer.echo(f"moespac: {reason(message) if isinstance(message, OSError) else message}", err=True)
    return typer.Exit(1)


def tell_abort(reason: str) -> None:
    """The last words of a process that ggml aborts. Written at once: nothing is flushed afterwards."""
    place, _, message = reason.partition(": ")
    name = os.path.basename(place) or "ggml"
    text = (
        f"\nmoespac: llama.cpp gave up and ends the process ({name}: {' '.join(message.split())}): the text above is complete up "
        "to here; if a GPU was full, run it again with less --vram; `moespac doctor` shows whether it is still there\n"
    )
    os.write(2, text.encode())


@contextmanager
def progress(label: str) -> Iterator[Callable[[float], None]]:
    """A line on stderr that follows the fraction, only where somebody can see it."""
    if not sys.stderr.isatty():
        yield lambda fraction: None
        return
    shown = -1

    def report(fraction: float) -> None:
        nonlocal shown
        if int(100 * fraction) != shown:
            shown = int(100 * fraction)
            typer.echo(f"\r{label} {shown:3d} %", err=True, nl=False)

    yield report
    typer.echo("\r" + " " * (len(label) + 8) + "\r", err=True, nl=False)


def find_device(name: str | None) -> native.Device:
    """typer.Exit after a sentence: there is no such device."""
    try:
        return engine.find_device(name)
    except ValueError as error:
        raise fail(error) from error
