"""The comparison itself: a coarse look at every setting, then the best ones of both sides in turn.

Every run starts cold on text that was not measured on before; in a round all sides get the same text. What is said of a row is
the ratio of medians over the rounds: ours against the better of the rival's two best settings."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

from moespac_llamacpp.bench.floor import floor_seconds
from moespac_llamacpp.bench.process import WorkerError
from moespac_llamacpp.bench.rig import Result, Rig
from moespac_llamacpp.bench.settings import OURS, STOCK, Choices, Setting, candidates, near
from moespac_llamacpp.bench.targets import AR, BEST, FLOOR, ROWS, SD, TTFT, VERIFY, Row
from moespac_llamacpp.bench.texts import Text, Texts

Say = Callable[[str], None]
VERIFY_WIDTH = 9
N_RIVALS = 2


class OutOfTimeError(RuntimeError):
    """The minutes that were given are over."""


@dataclass(frozen=True)
class Effort:
    """How much is measured. minutes: nothing is started after them (None: no limit). look_seconds: of a row's first look at a
    side; after them no further setting is tried, and what was not is noted."""

    coarse_tokens: int = 64
    tokens: int = 128
    rounds: int = 3
    verify_steps: int = 16
    n_prompt: int | None = None  # in place of a row's own
    max_threads: int = 1 << 10
    minutes: float | None = None
    look_seconds: float | None = None


@dataclass
class Ranked:
    """A setting with what it reached: tokens per second, or the reciprocal of seconds."""

    setting: Setting
    rates: list[float] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return median(self.rates) if self.rates else 0.0


class Comparison:
    """All that was measured so far, and the way to measure more."""

    def __init__(
        self, rig: Rig, texts: Texts, choices: Choices, cheap: Sequence[str], effort: Effort, say: Say
    ) -> None:
        """cheap: stems of further drafts for rows in which a draft is paid out of the share."""
        self.rig, self.texts, self.choices, self.cheap = rig, texts, choices, tuple(cheap)
        self.effort, self.say = effort, say
        self.runs: list[dict[str, Any]] = []
        self.rows: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self.missing: list[str] = []  # points of the grid that there was no time for
        self.bandwidths: dict[str, Any] = {}
        self._coarse: dict[tuple[Setting, str], float] = {}  # by setting and unit
        self._best: dict[str, Ranked] = {}  # ours, by row
        self._end = None if effort.minutes is None else time.monotonic() + 60 * effort.minutes

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)
            self.say(text)

    def check_time(self) -> None:
        if self._end is not None and time.monotonic() > self._end:
            raise OutOfTimeError(f"the {self.effort.minutes:g} minutes are over")

    def _threads(self, wanted: int) -> int:
        if wanted > self.effort.max_threads:
            self.note(f"-t {self.effort.max_threads} instead of {wanted}, on both sides")
        return min(wanted, self.effort.max_threads)

    def _prompt(self, row: Row) -> int:
        return self.effort.n_prompt or row.n_prompt

    # -- single runs ---------------------------------------------------------------------------------------------------------

    def run(
        self, setting: Setting, text: Text, stage: str, *, clocks: bool = False, cell: dict[str, Any] | None = None
    ) -> Result:
        """cell: of the grid, for the record. In the record `took` has seconds with all that the run waited for, as loading."""
        begin = time.monotonic()
        result = self.rig.run(setting, text, clocks=clocks)
        record = {"stage": stage, **result.record(), "took": round(time.monotonic() - begin, 3)}
        self.runs.append(record | ({"cell": cell} if cell else {}))
        if result.as_planted is False:
            self.note(f"{setting.label()}: the text is not the planted one")
        return result

    def looked(self, setting: Setting, result: Result) -> None:
        """What another run of it reached serves as its coarse look."""
        self._coarse.setdefault((_measured_alike(setting), "TPS"), result.tps)

    def _rate(self, row: Row, setting: Setting, text: Text, stage: str) -> tuple[float, Result | None]:
        """What counts for a row, larger is better."""
        if row.kind == VERIFY:
            answer = self.rig.steps(setting, text, VERIFY_WIDTH)
            record = {"stage": stage, "setting": asdict(setting), "label": setting.label(), "width": VERIFY_WIDTH}
            self.runs.append(record | answer)
            return 1 / median(answer["seconds"]), None
        result = self.run(setting, text, stage)
        return (1 / result.ttft if row.kind == TTFT else result.tps), result

    def _text(self, row: Row, coarse: bool) -> Text:
        if row.kind == TTFT:
            n = 1
        elif row.kind == VERIFY:
            n = VERIFY_WIDTH * self.effort.verify_steps
        else:
            n = self.effort.coarse_tokens if coarse else self.effort.tokens
        return self.texts.next(self._prompt(row), n)

    # -- a row ---------------------------------------------------------------------------------------------------------------

    def settings(self, row: Row, side: str) -> list[Setting]:
        threads = self._threads(row.threads)
        choices = replace(self.choices, lengths=row.lengths or self.choices.lengths)
        if row.kind == BEST:
            choices = replace(choices, drafts=(*choices.drafts, *self.cheap))
        if row.kind == TTFT:
            choices = replace(choices, memories=("pinned",))
        if row.share >= 1:  # no expert stays in host memory
            choices = replace(choices, memories=("pinned",))
        drafting, plain = row.kind in (SD, BEST), row.kind != SD
        found = candidates(
            side,
            threads,
            row.share,
            choices,
            plain=plain,
            drafting=drafting,
            draft_extra=row.draft_extra or row.kind == SD,
        )
        return [s for s in found if self.rig.budget(s) >= 0]

    def look(
        self, row: Row, settings: Iterable[Setting], *, optional: bool = False, until: float = math.inf
    ) -> list[Ranked]:
        """One short run of each setting, best first; those that were looked at before are not run again.

        until: of time.monotonic(); after that only the first setting is run, unless all of it is optional.
        OutOfTimeError: not even one was, and it is not optional."""
        ranked: list[Ranked] = []
        settings = list(settings)
        text = self._text(row, coarse=True)
        for i, setting in enumerate(settings):
            key = (_measured_alike(setting), unit_of(row))
            if key not in self._coarse:
                try:
                    self.check_time()
                    if time.monotonic() > until and (ranked or optional):
                        raise OutOfTimeError("the look has taken its time")
                    self._coarse[key] = self._rate(row, setting, text, f"{row.id} coarse")[0]
                except OutOfTimeError:
                    if not ranked and not optional:
                        raise
                    left = f"{len(settings) - i} of {len(settings)} {setting.side} settings"
                    self.note(f"{row.id}: {left} were not tried for time")
                    break
                except WorkerError as error:
                    self.note(str(error))
                    continue
                self.say(
                    f"{row.id}  {i + 1}/{len(settings)}  {setting.label()}: {self._coarse[key]:.2f} {unit_of(row)}"
                )
            ranked.append(Ranked(setting, [self._coarse[key]]))
        return sorted(ranked, key=lambda r: -r.rate)

    def _look_at(self, row: Row, side: str) -> list[Ranked]:
        """Every setting of a side, then the best one with fewer threads. If that must be short, each length in every memory comes
        before the next length."""
        limit, settings = self.effort.look_seconds, self.settings(row, side)
        until = math.inf if limit is None else time.monotonic() + limit
        if limit is not None:
            settings.sort(key=lambda s: s.n_draft)
        ranked = self.look(row, settings, until=until)
        if ranked and row.kind != TTFT:
            first = ranked[0].setting
            fewer = [replace(first, threads=n) for n in reversed(near(first.threads))]
            ranked += self.look(row, fewer, optional=True, until=until)
        return sorted(ranked, key=lambda r: -r.rate)

    def measure(self, row: Row) -> dict[str, Any]:
        """The row's record. WorkerError: one of the sides has no setting that works; OutOfTimeError."""
        if row.kind == FLOOR:
            return self._measure_floor(row)
        sides = {side: self._look_at(row, side) for side in (STOCK, OURS)}
        for side, ranked in sides.items():
            if not ranked:
                raise WorkerError(f"{row.id}: no setting of {side} works")
        ours = Ranked(sides[OURS][0].setting)
        rivals = [Ranked(r.setting) for r in sides[STOCK][:N_RIVALS]]
        self._rounds(row, [ours, *rivals])
        best_rival = max(rivals, key=lambda r: r.rate)
        self._best[row.id] = ours
        return self._record(row, ours.rate / best_rival.rate, ours, rivals)

    def _rounds(self, row: Row, contenders: Sequence[Ranked]) -> None:
        for i in range(self.effort.rounds):
            if i > 0:
                try:
                    self.check_time()
                except OutOfTimeError:
                    self.note(f"{row.id}: {i} of {self.effort.rounds} rounds for time")
                    return
            text = self._text(row, coarse=False)
            turn = i % len(contenders)
            for contender in (*contenders[turn:], *contenders[:turn]):
                rate, result = self._rate(row, contender.setting, text, f"{row.id} round {i + 1}")
                contender.rates.append(rate)
                if result:
                    contender.results.append(result)

    def _record(self, row: Row, measured: float, ours: Ranked, rivals: Sequence[Ranked]) -> dict[str, Any]:
        outputs = [r.as_planted for c in (ours, *rivals) for r in c.results]
        self._compare_vram(row, ours, rivals)
        record = {
            **{"id": row.id, "what": row.what, "at_least": row.at_least, "aim": row.aim},
            "measured": round(measured, 3),
            "unit": "ratio",
            "rate_unit": unit_of(row),
            "ours": _contender(ours),
            "rivals": [_contender(r) for r in rivals],
            "outputs_equal": all(outputs) if outputs else None,
        }
        self.rows.append(record)
        contenders = "; ".join(f"{c.setting.label()} {c.rate:.2f}" for c in (ours, *rivals))
        self.say(f"{row.id}: {measured:.2f} (at least {row.at_least:g}, aim {row.aim:g})  {contenders}")
        return record

    def _compare_vram(self, row: Row, ours: Ranked, rivals: Sequence[Ranked]) -> None:
        """A note where ours had more of it than the best rival."""
        best = max(rivals, key=lambda r: r.rate, default=None)
        if best and best.results and ours.results:
            more = ours.results[-1].detail["vram"]["total"] - best.results[-1].detail["vram"]["total"]
            if more > 0:
                self.note(f"{row.id}: ours had {more / 1e9:.3f} GB more VRAM than the rival")

    def _measure_floor(self, row: Row) -> dict[str, Any]:
        source = next((r for r in ("sd-25-t16", "best-25-t16") if r in self._best), None)
        if source is None:
            self.measure(ROWS["sd-25-t16"])
            source = "sd-25-t16"
        ours = self._best[source]
        self.ensure_bandwidths([ours.setting.threads])
        shares = [self.floor_share(result) for result in ours.results]
        return self._record(row, median(shares), ours, [])

    def ensure_bandwidths(self, threads: list[int]) -> None:
        missing = [n for n in threads if str(n) not in self.bandwidths.get("host", {})]
        if missing:
            new = self.rig.bandwidths(missing)
            self.bandwidths = new | {"host": self.bandwidths.get("host", {}) | new["host"]}

    def floor_share(self, result: Result) -> float:
        """Floor over achieved, 1 at best."""
        draft = self.rig.draft_weights(result.setting.draft)
        least = floor_seconds(result.detail, self.rig.weights, draft, self.bandwidths, result.setting.threads)
        return least / float(result.detail["seconds"])

    def clocked(self, row: Row) -> None:
        """One run of the row's best setting with the layers' clocks on, for the picture of a step."""
        if row.id in self._best and row.kind in (SD, BEST, AR):
            self.run(self._best[row.id].setting, self._text(row, coarse=False), "clocked", clocks=True)


def unit_of(row: Row) -> str:
    return {VERIFY: "steps/s", TTFT: "prompts/s"}.get(row.kind, "TPS")


def _measured_alike(setting: Setting) -> Setting:
    """Without a draft it does not matter who would pay for one."""
    return setting if setting.draft else replace(setting, draft_extra=True)


def _contender(ranked: Ranked) -> dict[str, Any]:
    last = ranked.results[-1].detail if ranked.results else {}
    return {
        "setting": asdict(ranked.setting),
        "label": ranked.setting.label(),
        "median": ranked.rate,
        "rates": ranked.rates,
        "vram": last.get("vram"),
        "hit_rate": last.get("hit_rate"),
        "accepted": last["n_accepted"] / last["n_drafted"] if last.get("n_drafted") else None,
    }
