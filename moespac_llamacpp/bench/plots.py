"""The comparison's pictures: lines over a number, stacked bars."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from moespac_llamacpp.svg import FAINT, INNER, LEFT, Drawing

HEIGHT = 260
PLOT = INNER - 170  # the rest is for names
COLOURS = ("#1f6f8b", "#c9a227", "#7a9e3f", "#8a5a9e", "#b5533c", "#a9cbd6", "#777777", "#c98fb0")


def lines(title: str, x_label: str, series: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """A line for each series of (x, y), both from 0, as SVG."""
    points = [p for line in series.values() for p in line]
    right, top = _round_up(max(x for x, _ in points)), _round_up(max(y for _, y in points))
    drawing, base = _frame(title, top)
    for i in range(6):
        drawing.text(LEFT + PLOT * i / 5, base + 18, f"{right * i / 5:g}", "middle")
    drawing.text(LEFT + PLOT / 2, base + 38, x_label, "middle")
    for i, (name, line) in enumerate(series.items()):
        xs = [LEFT + PLOT * x / right for x, _ in line]
        ys = [base - HEIGHT * y / top for _, y in line]
        drawing.path(xs, ys, COLOURS[i % len(COLOURS)], 2)
        for x, y in zip(xs, ys, strict=True):
            drawing.rect(x - 3, y - 3, 6, 6, COLOURS[i % len(COLOURS)])
        _name(drawing, i, name)
    return drawing.svg()


def bars(title: str, stacks: Mapping[str, Mapping[str, float]]) -> str:
    """A bar for each stack of named parts, as SVG."""
    top = _round_up(max(sum(stack.values()) for stack in stacks.values()))
    names = list(dict.fromkeys(name for stack in stacks.values() for name in stack))
    drawing, base = _frame(title, top)
    step = PLOT / len(stacks)
    for i, (label, stack) in enumerate(stacks.items()):
        y = base
        for name, value in stack.items():
            height = HEIGHT * value / top
            y -= height
            drawing.rect(LEFT + step * (i + 0.2), y, step * 0.6, height, COLOURS[names.index(name) % len(COLOURS)])
        drawing.text(LEFT + step * (i + 0.5), base + 18, label, "middle")
    for i, name in enumerate(names):
        _name(drawing, i, name)
    return drawing.svg()


def _frame(title: str, top: float) -> tuple[Drawing, float]:
    """A drawing with the axis of y, and where its zero is."""
    drawing = Drawing(title)
    base = drawing.y + HEIGHT
    for i in range(6):
        y = base - HEIGHT * i / 5
        drawing.path([LEFT, LEFT + PLOT], [y, y], FAINT, 1)
        drawing.text(LEFT - 8, y + 4, f"{top * i / 5:g}", "end")
    drawing.y = base + 50
    return drawing, base


def _name(drawing: Drawing, i: int, name: str) -> None:
    drawing.rect(LEFT + PLOT + 24, 48 + 20 * i, 10, 10, COLOURS[i % len(COLOURS)])
    drawing.text(LEFT + PLOT + 40, 57 + 20 * i, name)


def _round_up(value: float) -> float:
    """The next of 1, 2, 5 times a power of ten."""
    if value <= 0:
        return 1.0
    unit = 10.0 ** math.floor(math.log10(value))
    return next(unit * m for m in (1, 2, 5, 10) if value <= unit * m * (1 + 1e-9))
