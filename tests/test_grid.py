"""The grid of the comparison: its order, what it tries, what it does when time is over. No models: the rig is a formula."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any, cast

from moespac_llamacpp.bench import grid_report
from moespac_llamacpp.bench.compare import Comparison, Effort
from moespac_llamacpp.bench.grid import SYNC, Field, Grid, Point, points
from moespac_llamacpp.bench.process import WorkerError
from moespac_llamacpp.bench.rig import Result, Rig
from moespac_llamacpp.bench.settings import OURS, STOCK, Choices, Setting, readable
from moespac_llamacpp.bench.targets import ROWS
from moespac_llamacpp.bench.texts import Text

FIELD = Field((1.0, 0.25, 0.08), (4, 16), ("d-60", "d-75", "d-90"), (2, 4), 8, ("lru", SYNC), 0.25)


class FakeRig:
    """Tokens per second by a formula: 15 threads are the best, drafts of 4 are best, mmap is."""

    def __init__(self, fails: Callable[[Setting], bool] = lambda _: False) -> None:
        self.settings: list[Setting] = []
        self.texts: list[Text] = []
        self.fails = fails

    def budget(self, _: Setting) -> int:
        return 1

    def run(self, setting: Setting, text: Text, *, clocks: bool = False) -> Result:
        self.settings.append(setting)
        self.texts.append(text)
        if self.fails(setting):
            raise WorkerError(f"{setting.label()}: does not work")
        tps = (14 if setting.threads == 16 else setting.threads) + setting.n_draft + 0.5 * (setting.memory == "mmap")
        detail: dict[str, Any] = {
            "vram": {"total": 1},
            "n_steps": 1,
            "moves": 2,
            "seconds": 1.0,
            "hit_rate": setting.share,
        }
        detail |= {"draft_seconds": 0.1, "verify_seconds": 0.8, "accept_seconds": 0.0}
        detail["us"] = {"launch": 1e5, "cold": 2e5, "wait": 3e5, "total": 7e5}
        return Result(setting, len(text.prompt), text.n, tps, 0.1, True, detail)


class FakeTexts:
    def __init__(self) -> None:
        self.n = 0

    def next(self, n_prompt: int, n: int) -> Text:
        self.n += 1
        return Text([self.n] * n_prompt, n, [self.n] * n)


def comparison(rig: FakeRig, **effort: Any) -> Comparison:
    choices = Choices(("d-75",), lengths=(2, 4), memories=("pinned", "mmap"), ngram=True)
    how = Effort(n_prompt=4, max_threads=16, **effort)
    return Comparison(cast(Rig, rig), FakeTexts(), choices, (), how, lambda _: None)


def measured(field: Field = FIELD, rig: FakeRig | None = None, **effort: Any) -> tuple[Grid, FakeRig]:
    rig = rig or FakeRig()
    grid = Grid(comparison(rig, **effort), field, lambda: None)
    grid.run()
    return grid, rig


def test_every_point_comes_once_and_a_budgets_points_together() -> None:
    found = points(FIELD, ("d-75",), ngram=True)
    assert len(found) == len(set(found))
    cells = {p.cell for p in found if not p.policy and p.cell.draft != "ngram"}
    assert len(cells) == 3 * 2 * 4
    for side in (STOCK, OURS):
        assert cells <= {p.cell for p in found if p.side == side}
    budgets = [share for share, _ in groupby(p.cell.share for p in found if p.side == STOCK)]
    assert budgets == [1.0, 0.25, 0.08, 0.25, 1.0]  # a placement each: the second way is the first one backwards
    firsts = [i for i, p in enumerate(found) if p.cell.draft in (None, "d-75") and not p.policy]
    assert max(firsts) < min(i for i, p in enumerate(found) if p.cell.draft in ("d-60", "d-90"))


def test_lengths_and_memory_are_tried_with_the_most_threads_alone() -> None:
    _, rig = measured()
    rival = [s for s in rig.settings if s.side == STOCK and s.share == 0.25]
    assert {(s.memory, s.n_draft) for s in rival if s.threads == 4} == {("mmap", 0), ("mmap", 4)}
    assert {(s.memory, s.n_draft) for s in rival if s.threads == 16} == {("pinned", 0)} | {
        ("mmap", n) for n in (0, 2, 4)
    }
    assert {s.memory for s in rig.settings if s.side == STOCK and s.share == 1} == {"pinned"}
    assert {s.n_draft for s in rig.settings if s.policy == "lru"} == {0, 4}


def test_the_rival_may_leave_a_core_free_where_all_are_taken() -> None:
    grid, rig = measured()
    assert {s.threads for s in rig.settings if s.side == STOCK} == {4, 15, 16}
    assert {s.threads for s in rig.settings if s.side == OURS} == {4, 16}
    best = {point.label(): setting for point, (_, setting) in grid.best.items()}
    assert best["stock 25 % t16, d 75 %"] == Setting(STOCK, 15, 0.25, "d-75", 4, memory="mmap")


def test_all_of_a_budget_have_the_same_text_and_policies_one_of_their_own() -> None:
    grid, rig = measured(tokens=32)
    texts = {
        share: {t.prompt[0] for t, s in zip(rig.texts, rig.settings, strict=True) if s.share == share}
        for share in FIELD.shares
    }
    assert [len(texts[share]) for share in FIELD.shares] == [1, 2, 1]
    lengths = {(r["stage"], r["n_generated"]) for r in grid.comparison.runs}
    assert lengths == {("grid", 8), ("policy", 32)}


def test_what_there_was_no_time_for_is_named() -> None:
    rig = FakeRig()
    compared = comparison(rig)
    Grid(compared, FIELD, lambda: None, minutes=-1).run()
    names = [p.label() for p in points(FIELD, ("d-75",), ngram=True)]
    assert rig.settings == [] and compared.missing == names
    assert f"{len(names)} of its {len(names)} points are missing" in compared.notes[0]


def test_a_point_that_time_cut_short_counts_with_what_was_tried() -> None:
    rig = FakeRig()
    compared = comparison(rig)
    grid = Grid(compared, FIELD, lambda: None, minutes=1)

    def over(setting: Setting) -> bool:
        grid._end = -1.0  # the time is over when this run is
        return False

    rig.fails = over
    grid.run()
    assert len(rig.settings) == 1 and len(grid.best) == 1
    assert "stock 100 % t16, no draft: not every setting was tried for time" in compared.notes
    assert compared.missing == [p.label() for p in points(FIELD, ("d-75",), ngram=True)[1:]]


def test_a_setting_that_fails_is_noted_and_the_grid_goes_on() -> None:
    grid, _ = measured(rig=FakeRig(lambda s: s.side == STOCK and s.share == 0.08))
    assert "stock 8 % t16, no draft, memory pinned: does not work" in grid.comparison.notes
    assert grid.comparison.missing == []
    assert not any(p.side == STOCK and p.cell.share == 0.08 for p in grid.best)
    row = next(r for r in grid_report.cells(grid.comparison.runs) if r[:3] == ["8 %", "16", "no draft"])
    assert row[3] == "" and row[5] != "" and row[7] == ""


def test_the_table_has_the_best_of_each_side_and_their_ratio() -> None:
    grid, _ = measured()
    rows = grid_report.cells(grid.comparison.runs)
    row = next(r for r in rows if r[:3] == ["25 %", "4", "d 75 %"])
    assert row[3:9] == ["8.5", "t4, mmap, 4 drafted", "8.0", "t4, moe-spac, 4 drafted", "0.94", "25 %"]
    assert len(rows) == 3 * 2 * 4 + 3  # n-grams with the most threads alone
    policies = grid_report.policies(grid.comparison.runs)
    assert [r[:2] for r in policies if r[1] != "no draft"] == [
        ["lru", "d 75 %, 4 drafted"],
        [SYNC, "d 75 %, 4 drafted"],
    ]


def test_pictures_have_a_line_for_each_side() -> None:
    grid, _ = measured()
    drawn = grid_report.pictures(grid.comparison.runs, ("d-75",))
    for words in ("ours, 16 threads", "llama.cpp, 16 threads", "ours, 4 threads", "llama.cpp, 4 threads"):
        assert f">{words}<" in drawn["tps.svg"]
    for words in ("ours, d 60 %", "llama.cpp, d 90 %", "ours, no draft"):
        assert f">{words}<" in drawn["tps-draft.svg"]
    assert ">d 75 %<" in drawn["hits.svg"] and ">25 % +4<" in drawn["steps.svg"]
    assert drawn["steps.svg"].count(" +4<") == len(FIELD.shares)  # the comparison's own draft alone


def test_a_row_starts_from_what_the_grid_has_seen() -> None:
    field = Field((0.17,), (8,), ("d-75",), (2, 4), 8)
    grid, rig = measured(field)
    seen = set(rig.settings)
    rig.settings.clear()
    grid.comparison.measure(ROWS["sd-17-t8"])
    coarse = [r["label"] for r in grid.comparison.runs if r["stage"] == "sd-17-t8 coarse"]
    assert coarse and not {s.label() for s in seen} & set(coarse)


def test_a_short_look_tries_one_setting_of_each_side_and_says_so() -> None:
    rig = FakeRig()
    compared = comparison(rig, look_seconds=-1.0, rounds=1)
    compared.measure(ROWS["sd-17-t8"])
    coarse = [(r["setting"]["side"], r["setting"]["n_draft"]) for r in compared.runs if "coarse" in r["stage"]]
    assert coarse == [(STOCK, 2), (OURS, 2)]
    assert any("3 of 4 stock settings were not tried for time" in note for note in compared.notes)


def test_a_row_may_have_a_draft_length_of_its_own() -> None:
    settings = comparison(FakeRig()).settings(ROWS["bf16-17-t16"], STOCK)
    assert {s.n_draft for s in settings} == {8}


def test_drafts_have_readable_names() -> None:
    assert [readable(d) for d in (None, "ngram", "draft-qwen3-4b-75")] == ["no draft", "ngram", "qwen3-4b 75 %"]
    assert Point(OURS, points(FIELD, (), ngram=False)[0].cell, "lru").label() == "ours 100 % t16, no draft, policy lru"
