"""A few drawings as SVG text: lines over steps, a heat map, bars. No library, no script in the file; it opens in any browser."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np
from numpy.typing import NDArray

WIDTH, LEFT, RIGHT = 860, 70, 20
INNER = WIDTH - LEFT - RIGHT
INK, FAINT, LINE, PALE = "#222222", "#d8d8d8", "#1f6f8b", "#a9cbd6"
_FONT = "font-family='sans-serif' font-size='12'"


class Drawing:
    """Parts below each other; `y` is where the next one starts."""

    def __init__(self, title: str) -> None:
        self.y = 44
        self._parts = [f"<text x='{LEFT}' y='26' font-size='15' fill='{INK}'>{escape(title)}</text>"]

    def text(self, x: float, y: float, text: str, anchor: str = "start") -> None:
        self._parts.append(f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}' fill='{INK}'>{escape(text)}</text>")

    def rect(self, x: float, y: float, width: float, height: float, fill: str) -> None:
        self._parts.append(f"<rect x='{x:.2f}' y='{y:.2f}' width='{width:.2f}' height='{height:.2f}' fill='{fill}'/>")

    def path(self, xs: Sequence[float], ys: Sequence[float], stroke: str, width: float) -> None:
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys, strict=True))
        self._parts.append(f"<polyline points='{points}' fill='none' stroke='{stroke}' stroke-width='{width}'/>")

    def lines(self, title: str, values: NDArray[np.float64], height: int = 120) -> None:
        """values over their index, as they are and as a running mean; NaN: not known, left out."""
        known = np.flatnonzero(np.isfinite(values))
        top = _round_up(float(values[known].max(initial=0.0)))
        base = self.y + 22 + height
        self.text(LEFT, self.y + 12, title)
        for share in (0.0, 0.5, 1.0):
            y = base - share * height
            self.path([LEFT, LEFT + INNER], [y, y], FAINT, 1)
            self.text(LEFT - 8, y + 4, f"{share * top:.4g}", "end")
        if len(known):
            xs = LEFT + INNER * known / max(1, len(values) - 1)
            window = max(1, len(known) // 40)
            for series, stroke, width in ((values[known], PALE, 1.0), (running_mean(values[known], window), LINE, 2.0)):
                self.path(xs.tolist(), (base - height * series / top).tolist(), stroke, width)
        self.y = base + 14

    def steps(self, n: int) -> None:
        """The axis below the lines."""
        self.text(LEFT, self.y + 4, "step 1")
        self.text(LEFT + INNER, self.y + 4, f"step {n}", "end")
        self.y += 26

    def heat(self, title: str, names: Sequence[str], table: NDArray[np.float64]) -> None:
        """table: [row, column] of 0 … 1, NaN where there is nothing."""
        n_rows, n_columns = table.shape
        cell = min(14.0, max(3.0, 480 / n_rows))
        self.text(LEFT, self.y + 12, title)
        self.y += 20
        every = -int(-14 // cell)  # names that would overlap are left out
        for row in range(n_rows):
            y = self.y + row * cell
            if row % every == 0:
                self.text(LEFT - 8, y + cell / 2 + 4, names[row], "end")
            for column in np.flatnonzero(np.isfinite(table[row])).tolist():
                x = LEFT + INNER * column / n_columns
                self.rect(x, y, INNER / n_columns + 0.05, cell + 0.05, shade(float(table[row, column])))
        self.y = int(self.y + n_rows * cell + 24)

    def bars(self, title: str, rows: Sequence[tuple[str, Sequence[float], str]], legend: Sequence[str]) -> None:
        """rows: (name, lengths of the parts of one bar, words at its end)."""
        colours = (LINE, PALE, "#c9a227")
        self.text(LEFT, self.y + 12, title)
        for i, word in enumerate(legend):
            self.rect(LEFT + 150 * i, self.y + 22, 10, 10, colours[i])
            self.text(LEFT + 150 * i + 16, self.y + 31, word)
        self.y += 44
        longest = max((sum(parts) for _, parts, _ in rows), default=0) or 1
        for name, parts, words in rows:
            x = float(LEFT)
            for part, colour in zip(parts, colours, strict=False):
                self.rect(x, self.y, 0.72 * INNER * part / longest, 12, colour)
                x += 0.72 * INNER * part / longest
            self.text(LEFT - 8, self.y + 10, name, "end")
            self.text(x + 6, self.y + 10, words)
            self.y += 16
        self.y += 12

    def svg(self) -> str:
        body = "\n".join(self._parts)
        return (
            f"<svg xmlns='http://www.w3.org/2000/svg' width='{WIDTH}' height='{self.y}' viewBox='0 0 {WIDTH} {self.y}' {_FONT}>\n"
            f"<rect width='{WIDTH}' height='{self.y}' fill='#ffffff'/>\n{body}\n</svg>\n"
        )


def running_mean(values: NDArray[np.float64], window: int) -> NDArray[np.float64]:
    """Of the last `window` values, fewer at the start."""
    sums = np.cumsum(np.concatenate([[0.0], values]))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - window)
    return np.asarray((sums[ends] - sums[starts]) / (ends - starts), np.float64)


def shade(value: float) -> str:
    """From nearly white (0) to LINE (1)."""
    low, high = (0xF2, 0xF2, 0xF2), (0x1F, 0x6F, 0x8B)
    value = min(1.0, max(0.0, value))
    return "#" + "".join(f"{round(a + (b - a) * value):02x}" for a, b in zip(low, high, strict=True))


def _round_up(value: float) -> float:
    """The next of 1, 2, 5 times a power of ten; 1 for 0."""
    if value <= 0:
        return 1.0
    power = 10.0 ** np.floor(np.log10(value))
    return float(next(m * power for m in (1, 2, 5, 10) if m * power >= value * 0.999))
