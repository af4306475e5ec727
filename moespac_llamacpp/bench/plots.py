"""A small SVG writer: lines over a number, stacked bars."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 60, 150, 40, 50
COLOURS = ("#1f6fb4", "#d95f02", "#1b9e77", "#7570b3", "#e7298a", "#8c6d31", "#666666")


def lines(title: str, x_label: str, series: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """A line for each series of (x, y), both from 0."""
    points = [p for line in series.values() for p in line]
    right, top = _round_up(max(x for x, _ in points)), _round_up(max(y for _, y in points))
    parts = [*_frame(title, top), *_x_ticks(right, x_label)]
    for i, (name, line) in enumerate(series.items()):
        at = [(_x(x / right), _y(y / top)) for x, y in line]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{_colour(i)}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{_colour(i)}"/>' for x, y in at]
        parts.append(_legend(i, name))
    return _document(parts)


def bars(title: str, stacks: Mapping[str, Mapping[str, float]]) -> str:
    """A bar for each stack of named parts."""
    top = _round_up(max(sum(stack.values()) for stack in stacks.values()))
    names = list(dict.fromkeys(name for stack in stacks.values() for name in stack))
    parts = _frame(title, top)
    step = (WIDTH - LEFT - RIGHT) / len(stacks)
    for i, (label, stack) in enumerate(stacks.items()):
        x, height = LEFT + step * (i + 0.2), 0.0
        for name, value in stack.items():
            y = _y((height + value) / top)
            size = _y(height / top) - y
            colour = _colour(names.index(name))
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{step * 0.6:.1f}" height="{size:.1f}" fill="{colour}"/>'
            )
            height += value
        parts.append(_text(x + step * 0.3, HEIGHT - BOTTOM + 16, label, "middle"))
    return _document([*parts, *(_legend(i, name) for i, name in enumerate(names))])


def _x(share: float) -> float:
    return LEFT + share * (WIDTH - LEFT - RIGHT)


def _y(share: float) -> float:
    return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def _round_up(value: float) -> float:
    """The next of 1, 2, 5 times a power of ten."""
    if value <= 0:
        return 1.0
    unit = 10.0 ** math.floor(math.log10(value))
    return next(unit * m for m in (1, 2, 5, 10) if value <= unit * m * (1 + 1e-9))


def _frame(title: str, top: float) -> list[str]:
    parts = [_text(WIDTH / 2, 20, title, "middle")]
    for i in range(6):
        y = _y(i / 5)
        parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(_text(LEFT - 6, y + 4, f"{top * i / 5:g}", "end"))
    return parts


def _x_ticks(right: float, label: str) -> list[str]:
    ticks = [_text(_x(i / 5), HEIGHT - BOTTOM + 16, f"{right * i / 5:g}", "middle") for i in range(6)]
    return [*ticks, _text(_x(0.5), HEIGHT - 12, label, "middle")]


def _colour(i: int) -> str:
    return COLOURS[i % len(COLOURS)]


def _legend(i: int, name: str) -> str:
    y = TOP + 18 * i
    box = f'<rect x="{WIDTH - RIGHT + 14}" y="{y}" width="10" height="10" fill="{_colour(i)}"/>'
    return box + _text(WIDTH - RIGHT + 30, y + 9, name, "start")


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _document(parts: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
    )
    return "\n".join([head, *parts, "</svg>"]) + "\n"
