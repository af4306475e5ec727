"""The whole field, once and coarsely: budgets by thread counts by drafts, each side at its best; then policies and ablations.

In a cell of the field each side is tried at several settings, and counts with the best: draft lengths, and memory modes of the
rival. To be short, that is done with the most threads alone; with fewer threads the best of it is taken. Points are visited so
that the rival loads few placements: all that a budget needs one after the other, and the second way through the budgets goes
backwards. Threads and drafts change without loading a target."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

from moespac_llamacpp.bench.compare import Comparison, OutOfTimeError
from moespac_llamacpp.bench.process import WorkerError
from moespac_llamacpp.bench.settings import OURS, STOCK, Setting, readable
from moespac_llamacpp.bench.texts import Text

GRID, POLICY = "grid", "policy"
NGRAM, NGRAM_MAX = "ngram", 4
SYNC = "sync-moves"  # an ablation that is no policy of its own
SAVE_SECONDS = 20.0


@dataclass(frozen=True)
class Field:
    """What is spanned. drafts: those of the comparison come with every budget, others after all budgets. lengths: of drafts.
    tokens: to generate in a cell. policies: names, or SYNC, tried at policy_share with the most threads."""

    shares: tuple[float, ...]
    threads: tuple[int, ...]
    drafts: tuple[str, ...] = ()
    lengths: tuple[int, ...] = (2, 4)
    tokens: int = 64
    policies: tuple[str, ...] = ()
    policy_share: float = 0.25


@dataclass(frozen=True)
class Cell:
    share: float
    threads: int
    draft: str | None = None


@dataclass(frozen=True)
class Point:
    """One side of a cell, or a policy there."""

    side: str
    cell: Cell
    policy: str = ""

    def label(self) -> str:
        cell = self.cell
        what = f"{self.side} {100 * cell.share:g} % t{cell.threads}, {readable(cell.draft)}"
        return f"{what}, policy {self.policy}" if self.policy else what


def points(field: Field, own: Sequence[str], ngram: bool) -> list[Point]:
    """In order of their worth. own: drafts that come with every budget."""
    threads = sorted(set(field.threads), reverse=True)
    others = [d for d in field.drafts if d not in own]
    found: list[Point] = []
    for share in field.shares:
        cells = [Cell(share, t, draft) for t in threads for draft in (None, *own)]
        found += [Point(side, cell) for side in (STOCK, OURS) for cell in cells]
        if ngram:
            found.append(Point(OURS, Cell(share, threads[0], NGRAM)))
    found += [Point(OURS, Cell(field.policy_share, threads[0], d), p) for d in own for p in field.policies]
    for share in reversed(field.shares):
        cells = [Cell(share, t, draft) for t in threads for draft in others]
        found += [Point(side, cell) for cell in cells for side in (STOCK, OURS)]
    found += [Point(OURS, Cell(field.policy_share, threads[0]), p) for p in field.policies]
    return found


class Grid:
    """best: rate and setting of each point of the field so far."""

    def __init__(
        self, comparison: Comparison, field: Field, save: Callable[[], None], minutes: float | None = None
    ) -> None:
        """save: called now and then. minutes: no point is started after them (None: the comparison's own end holds)."""
        most = comparison.effort.max_threads
        self.field = replace(field, threads=tuple(dict.fromkeys(min(t, most) for t in field.threads)))
        self.comparison, self._save = comparison, save
        self.best: dict[Point, tuple[float, Setting]] = {}
        self._texts: dict[tuple[float, str], Text] = {}
        self._end = None if minutes is None else time.monotonic() + 60 * minutes

    def run(self) -> None:
        choices = self.comparison.choices
        todo = points(self.field, choices.drafts, choices.ngram)
        saved = time.monotonic()
        for i, point in enumerate(todo):
            try:
                self._measure(point, f"grid {i + 1}/{len(todo)}")
            except OutOfTimeError:
                missing = [p.label() for p in todo[i:]]
                self.comparison.missing = missing
                self.comparison.note(f"the grid ended for time, {len(missing)} of its {len(todo)} points are missing")
                break
            if time.monotonic() - saved > SAVE_SECONDS:
                self._save()
                saved = time.monotonic()
        self._save()

    def _measure(self, point: Point, where: str) -> None:
        """OutOfTimeError: not one setting of the point was tried."""
        text = self._text(point)
        try:
            for setting in self._settings(point):
                self._try(point, setting, text, where)
            if point.side == STOCK and point in self.best and self._takes_all_cores(point):
                # a core for who launches: in the rival's favour, ours leaves some free by itself
                best = self.best[point][1]
                self._try(point, replace(best, threads=best.threads - 1), text, where)
        except OutOfTimeError:
            if point not in self.best:
                raise
            self.comparison.note(f"{point.label()}: not every setting was tried for time")

    def _try(self, point: Point, setting: Setting, text: Text, where: str) -> None:
        if self._end is not None and time.monotonic() > self._end:
            raise OutOfTimeError("the grid's minutes are over")
        self.comparison.check_time()
        cell = asdict(point.cell) | ({"policy": point.policy} if point.policy else {})
        try:
            result = self.comparison.run(
                setting, text, POLICY if point.policy else GRID, clocks=setting.side == OURS, cell=cell
            )
        except WorkerError as error:
            self.comparison.note(str(error))
            return
        if not point.policy:
            self.comparison.looked(setting, result)
        if point not in self.best or result.tps > self.best[point][0]:
            self.best[point] = result.tps, setting
        self.comparison.say(f"{where}  {setting.label()}: {result.tps:.2f} TPS, TTFT {1e3 * result.ttft:.0f} ms")

    def _text(self, point: Point) -> Text:
        """The same for all that is compared with each other."""
        kind = POLICY if point.policy else GRID
        key = point.cell.share, kind
        if key not in self._texts:
            effort = self.comparison.effort
            n = effort.tokens if point.policy else self.field.tokens
            self._texts[key] = self.comparison.texts.next(effort.n_prompt or 512, n)
        return self._texts[key]

    # -- settings of a point ---------------------------------------------------------------------------------------------------

    def _settings(self, point: Point) -> list[Setting]:
        cell = point.cell
        if point.policy:
            return [self._policy(point)]
        if cell.draft == NGRAM:
            return [replace(b, draft=NGRAM, n_draft=NGRAM_MAX, fixed=False) for b in self._bases(point)]
        if cell.draft is None:
            return self._bases(point)
        return [replace(b, draft=cell.draft, n_draft=n) for b in self._bases(point) for n in self._lengths(point)]

    def _bases(self, point: Point) -> list[Setting]:
        """Without a draft. The memory (ours: policy) that was best without one in this budget, if that is known."""
        side, cell, choices = point.side, point.cell, self.comparison.choices
        base = Setting(side, cell.threads, cell.share)
        known = self.best.get(Point(side, replace(cell, threads=self._most, draft=None)))
        if known:
            return [replace(base, memory=known[1].memory, policy=known[1].policy)]
        if side == OURS:
            return [replace(base, policy=p) for p in choices.policies]
        # with no expert in host memory it makes no difference
        return [replace(base, memory=m) for m in (choices.memories[:1] if cell.share >= 1 else choices.memories)]

    def _lengths(self, point: Point) -> tuple[int, ...]:
        known = self.best.get(Point(point.side, replace(point.cell, threads=self._most)))
        return (known[1].n_draft,) if known else self.field.lengths

    def _policy(self, point: Point) -> Setting:
        base = Setting(OURS, point.cell.threads, point.cell.share, point.cell.draft)
        if base.draft:
            base = replace(base, n_draft=self._lengths(replace(point, policy=""))[0])
        return replace(base, sync_moves=True) if point.policy == SYNC else replace(base, policy=point.policy)

    @property
    def _most(self) -> int:
        return max(self.field.threads)

    def _takes_all_cores(self, point: Point) -> bool:
        return 1 < point.cell.threads == self.comparison.effort.max_threads
