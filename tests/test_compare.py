"""The comparison: an honest ledger, fair candidates, rows that say what was measured, and the whole of it on a tiny pair."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

pytest.importorskip("llama_cpp")

import native_build
from moespac_llamacpp.bench import ledger, plots, targets
from moespac_llamacpp.bench.floor import floor_seconds
from moespac_llamacpp.bench.process import Process, WorkerError
from moespac_llamacpp.bench.rig import Rig, stock_command
from moespac_llamacpp.bench.settings import MAX_DRAFT, OURS, STOCK, Choices, Setting, candidates, near
from moespac_llamacpp.bench.steps import step_parts
from moespac_llamacpp.bench.texts import PlantedTexts
from moespac_llamacpp.cli import app
from moespac_llamacpp.models import N_OUTPUTS
from moespac_llamacpp.synth import Order, Pair, write_pair

STOCK_PYTHON = Path(__file__).resolve().parent.parent / "build" / "stock" / "venv" / "bin" / "python"
DRAFT = "draft-tiny-qwen3-75"


@pytest.fixture(scope="module")
def rival() -> str:
    path = Path(os.environ.get("MOESPAC_STOCK_PYTHON") or STOCK_PYTHON)

    def find() -> str:
        if not path.is_file():
            raise native_build.Unavailable(f"an unpatched build is needed, and {path} is missing: run `make stock`")
        return str(path)

    return native_build.or_skip(find)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    order = Order("qwen3-30b-a3b", acceptances=(0.75,), tiny=True)
    return write_pair(order, tmp_path_factory.mktemp("pair"), lambda _: lambda fraction: None)


# -- the whole comparison --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compared(pair: Pair, rival: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two rows and a small grid through the command line, on the CPU."""
    out = tmp_path_factory.mktemp("results")
    common = ["bench", "compare", "--pair", str(pair.folder), "--stock", rival, "-o", str(out)]
    common += ["--prompt", "24", "-n", "16", "--rounds", "1", "--ctx", "256", "--max-threads", "1", "--lengths", "3"]
    rows = CliRunner().invoke(
        app, [*common, "--rows", "sd-25-t16,verify-25-t16,ttft-2048,floor-25", "--memory", "pinned,repacked"]
    )
    assert rows.exit_code == 0, rows.output
    return out


def test_rows_are_measured_on_both_sides_with_the_planted_text(compared: Path) -> None:
    record = json.loads((compared / "comparison.json").read_text())
    rows = {r["id"]: r for r in record["rows"]}
    assert set(rows) == {"sd-25-t16", "verify-25-t16", "ttft-2048", "floor-25"}
    sd = rows["sd-25-t16"]
    assert sd["outputs_equal"] is True
    assert all(r["as_planted"] for r in record["runs"] if "as_planted" in r)
    assert sd["ours"]["setting"]["draft"] == DRAFT and sd["ours"]["setting"]["n_draft"] == 3
    assert {r["setting"]["side"] for r in sd["rivals"]} == {STOCK}
    assert sd["measured"] == pytest.approx(sd["ours"]["median"] / max(r["median"] for r in sd["rivals"]), abs=1e-3)
    assert 0 < rows["floor-25"]["measured"] < 1
    assert {r["label"] for r in record["runs"] if r["setting"]["side"] == STOCK and "repacked" in r["label"]}
    assert not record["machine"]["workers"]["stock"]["patched"]
    assert record["pair"]["planted"] is True


def test_acceptance_is_that_of_the_pair_on_both_sides(compared: Path) -> None:
    runs = json.loads((compared / "comparison.json").read_text())["runs"]
    drafted = [r for r in runs if r.get("n_drafted")]
    by_text = {(r["n_prompt"], r["stage"], r["n_drafted"], r["n_accepted"]) for r in drafted if "round" in r["stage"]}
    assert len(by_text) == 1  # the same text, the same guesses: both loops draft and accept alike
    assert {r["setting"]["side"] for r in drafted} == {STOCK, OURS}


def test_the_files_of_a_comparison_can_be_read(compared: Path) -> None:
    results = json.loads((compared / "targets.json").read_text())
    fields = {"id", "what", "at_least", "aim", "measured", "unit", "machine", "commit", "command"}
    assert all(set(r) == fields for r in results)
    assert "bench compare" in (compared / "comparison.md").read_text() or "moespac" in results[0]["command"]
    for name in ("tps.svg", "hits.svg", "steps.svg"):
        assert ElementTree.parse(compared / name).getroot().tag.endswith("svg")


def test_the_ledger_counts_what_llama_cpp_allocates(compared: Path, pair: Pair) -> None:
    record = json.loads((compared / "comparison.json").read_text())
    weights = ledger.Weights.of(pair.target)
    for run in record["runs"]:
        if "vram" not in run:
            continue
        vram = run["vram"]
        assert vram["total"] == sum(vram[k] for k in ("dense", "kv", "compute", "experts", "draft"))
        assert vram["dense"] == weights.dense and vram["kv"] > 0 and vram["compute"] > 0
        budget = ledger.expert_budget(
            weights, run["setting"]["share"], vram["draft"], bool(run["setting"]["draft_extra"])
        )
        if run["setting"]["side"] == STOCK:
            assert vram["experts"] == budget
        else:
            assert run["slot_bytes"] <= budget


def test_a_grid_has_every_point_of_its_field(pair: Pair, rival: str, tmp_path: Path) -> None:
    arguments = ["bench", "compare", "--pair", str(pair.folder), "--stock", rival, "-o", str(tmp_path)]
    arguments += [
        "--budgets",
        "25,100",
        "-t",
        "1",
        "--grid-lengths",
        "2,3",
        "--memory",
        "mmap",
        "--only-grid",
        "--ngram",
    ]
    arguments += ["--prompt", "16", "-n", "8", "--ctx", "64", "--policies", "lru", "--rounds", "1", "--lengths", "2"]
    arguments += ["--max-threads", "1", "--execution", "in-stream", "--grid-policies", "moe-spac,sync-moves"]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    record = json.loads((tmp_path / "comparison.json").read_text())
    cells = {(r["setting"]["side"], *r["cell"].values()) for r in record["runs"] if r["stage"] == "grid"}
    assert cells == {(s, x, 1, d) for s in (STOCK, OURS) for x in (0.25, 1.0) for d in (None, DRAFT)} | {
        (OURS, x, 1, "ngram") for x in (0.25, 1.0)
    }
    assert {r["setting"]["n_draft"] for r in record["runs"] if r["setting"]["draft"] == DRAFT} == {2, 3}
    policies = [(r["cell"]["policy"], r["setting"]["draft"]) for r in record["runs"] if r["stage"] == "policy"]
    assert policies == [(p, d) for d in (DRAFT, None) for p in ("moe-spac", "sync-moves")]
    assert [r["setting"]["sync_moves"] for r in record["runs"] if r["stage"] == "policy"] == [False, True] * 2
    ours = [r for r in record["runs"] if r["stage"] == "grid" and r["setting"]["side"] == OURS]
    assert {(r["in_stream"], r["whole"]) for r in ours if r["setting"]["share"] < 1} == {(True, False)}
    assert {(r["in_stream"], r["whole"]) for r in ours if r["setting"]["share"] == 1} == {(False, True)}
    assert all(r["took"] >= r["seconds"] for r in record["runs"])
    assert record["missing"] == []
    for name in ("tps.svg", "tps-draft.svg", "hits.svg", "steps.svg"):
        assert ElementTree.parse(tmp_path / name).getroot().tag.endswith("svg")
    table = (tmp_path / "comparison.md").read_text()
    assert "| 25 % | 1 | tiny-qwen3 75 % |" in table and "| sync-moves | no draft |" in table


# -- its parts -------------------------------------------------------------------------------------------------------------------


def test_budgets_are_whole_layers_the_same_bytes_for_all_sides() -> None:
    weights = ledger.Weights(10, (0, 5, 5, 7))
    assert weights.experts == 17
    assert weights.last_layers(0) == []
    assert weights.last_layers(1) == weights.last_layers(9) == [3]
    assert weights.last_layers(10) == weights.last_layers(14) == [2, 3]
    assert weights.last_layers(10**9) == [1, 2, 3]
    assert [ledger.expert_budget(weights, share, 0, True) for share in (0, 0.1, 0.5, 0.6, 1)] == [0, 7, 7, 12, 17]


def test_a_draft_is_paid_out_of_the_share_unless_it_is_extra() -> None:
    weights = ledger.Weights(10, (10,) * 10)
    assert ledger.expert_budget(weights, 0.5, 20, draft_is_extra=True) == 50
    assert ledger.expert_budget(weights, 0.5, 20, draft_is_extra=False) == 30
    assert ledger.expert_budget(weights, 0.1, 20, draft_is_extra=False) < 0


def test_only_the_devices_own_buffers_count() -> None:
    buffers = {"CUDA0 KV": 8.0, "CUDA0 compute": 4.0, "CUDA_Host compute": 100.0, "CUDA0 model": 50.0, "CPU KV": 9.0}
    entry = ledger.entry(ledger.Weights(10, (5,)), buffers, "CUDA0", experts=5, draft=2)
    assert (entry.kv, entry.compute, entry.total) == (8, 4, 10 + 8 + 4 + 5 + 2)
    assert ledger.draft_bytes(ledger.Weights(30, ()), buffers, "CUDA0") == 30 + 8 + 4


def test_both_sides_draft_at_least_two_tokens_where_the_row_says_so() -> None:
    choices = Choices(("a",), lengths=(1, 2, 4), memories=("pinned", "mmap"))
    for side in (STOCK, OURS):
        found = candidates(side, 8, 0.25, choices, plain=False, drafting=True, draft_extra=True)
        assert found and all(s.draft == "a" and s.n_draft >= 2 and s.fixed for s in found)
    rival = candidates(STOCK, 8, 0.25, choices, plain=True, drafting=True, draft_extra=False)
    assert {(s.memory, s.n_draft) for s in rival} == {(m, n) for m in ("pinned", "mmap") for n in (0, 2, 4)}
    ours = candidates(OURS, 8, 0.25, choices, plain=True, drafting=True, draft_extra=False)
    assert any(not s.fixed for s in ours) and any(s.draft is None for s in ours)
    two = candidates(STOCK, 8, 0.25, replace(choices, drafts=("a", "b")), plain=False, drafting=True, draft_extra=True)
    assert {(s.draft, s.n_draft) for s in two} == {(d, n) for d in ("a", "b") for n in (2, 4)}


@pytest.mark.parametrize("length", [0, MAX_DRAFT + 1])
def test_drafts_for_which_no_context_is_made_are_refused(pair: Pair, length: int) -> None:
    """More logits than a context was made for end llama.cpp's process."""
    assert MAX_DRAFT + 1 == N_OUTPUTS
    for option in ("--lengths", "--grid-lengths"):
        arguments = ["bench", "compare", "--pair", str(pair.folder), "--stock", sys.executable, option, f"2,{length}"]
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 1
        assert f"{option} takes lengths of drafts from 1 to {MAX_DRAFT}, not {length}" in done.stderr


def test_fewer_threads_are_tried_too() -> None:
    assert near(16) == [12, 15] and near(2) == [1] and near(1) == []


def test_rows_know_their_pair() -> None:
    qwen = {"target": "tiny-qwen3moe", "quant": "Q4_K_M"}
    deepseek = {"target": "deepseek-v2-lite", "quant": "Q4_K_M"}
    assert [r.id for r in targets.choose((), deepseek)] == ["dsv2lite-25-t16"]
    assert "sd-17-t8" in {r.id for r in targets.choose((), qwen)}
    with pytest.raises(ValueError, match="no row 'x'"):
        targets.choose(["x"], qwen)
    with pytest.raises(ValueError, match="needs a pair of deepseek-v2-lite"):
        targets.choose(["dsv2lite-25-t16"], qwen)


def test_results_of_other_rows_stay(tmp_path: Path) -> None:
    path = tmp_path / "targets.json"
    targets.save(path, [{"id": "full", "measured": 1}, {"id": "half", "measured": 2}])
    targets.save(path, [{"id": "sd-25-t16", "measured": 3}, {"id": "half", "measured": 4}])
    assert [(r["id"], r["measured"]) for r in json.loads(path.read_text())] == [
        ("sd-25-t16", 3),
        ("full", 1),
        ("half", 4),
    ]


def test_the_floor_uses_all_memories_at_once() -> None:
    bandwidths = {"device": 100.0, "link": 10.0, "host": {"8": 10.0}}
    detail = {"n_steps": 2, "hot_bytes": 100, "cold_bytes": 400, "n_drafted": 3}
    weights, draft = ledger.Weights(50, (1,)), ledger.Weights(200, ())
    # cold: 400 / 20 = 20 s, longer than the device's (2 * 50 + 100) / 100; the draft before it: 3 * 200 / 100
    assert floor_seconds(detail, weights, draft, bandwidths, 8) == pytest.approx(26.0)
    assert floor_seconds(detail | {"cold_bytes": 0}, weights, None, bandwidths, 8) == pytest.approx(2.0)


def test_a_step_is_the_sum_of_its_parts() -> None:
    run: dict[str, Any] = {
        "n_steps": 10,
        "draft_seconds": 0.1,
        "verify_seconds": 0.3,
        "accept_seconds": 0.05,
        "seconds": 0.5,
    }
    run["us"] = {"launch": 2e4, "cold": 1e5, "wait": 3e4, "total": 1.5e5}
    parts = step_parts(run)
    assert sum(parts.values()) == pytest.approx(50.0)
    assert parts["cold"] == pytest.approx(10.0) and parts["moves, policy"] == pytest.approx(5.0)
    run["us"] = {"launch": 0, "cold": 1e5, "wait": 9e4, "total": 1.5e5, "hot": 6e4, "rest": 1e5}
    parts = step_parts(run)
    assert sum(parts.values()) == pytest.approx(50.0)
    assert parts["device lane"] == pytest.approx(6.0) and parts["cold"] == 0


def test_pictures_are_well_formed_whatever_the_names() -> None:
    line = plots.lines("a < b", "x & y", {"<one>": [(0, 0), (25, 3.0)], "two": []})
    bar = plots.bars("ms", {"25 %": {"cold": 1.0, "wait": 0.0}, "50 %": {"cold": 0.5}})
    for picture in (line, bar):
        ElementTree.fromstring(picture)
    assert bar.count("<rect") == 1 + 3 + 2  # background, parts, legend


# -- what goes wrong -------------------------------------------------------------------------------------------------------------


def test_a_patched_rival_is_refused(pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the rival must be"):
        Rig(pair.target, {}, sys.executable, tmp_path)


def test_a_rival_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="compare_stock"):
        stock_command("/nowhere/python")


def test_a_worker_that_dies_or_fails_says_so(tmp_path: Path) -> None:
    dying = Process("dying", [sys.executable, "-c", "import sys; sys.stdin.readline(); sys.exit(3)"], tmp_path / "log")
    with dying:
        for _ in range(2):  # asked again it does not wait for an answer that cannot come
            with pytest.raises(WorkerError, match="dying: ended during run with code 3"):
                dying.call("run", limit=60)
    slow = Process("slow", [sys.executable, "-c", "import time; time.sleep(60)"], tmp_path / "log")
    with slow, pytest.raises(WorkerError, match="longer than 0 s"):
        slow.call("run", limit=0.2)


def test_a_setting_that_cannot_be_made_is_an_error_of_its_own(pair: Pair, rival: str, tmp_path: Path) -> None:
    texts = PlantedTexts(pair.plan())
    drafts = {p.stem: p for p in pair.drafts}
    with Rig(pair.target, drafts, rival, tmp_path, n_ctx=64, say=lambda _: None) as rig:
        text = texts.next(8, 8)
        with pytest.raises(WorkerError, match="more than the whole share"):
            rig.run(Setting(OURS, 1, 0.01, DRAFT, 2, draft_extra=False), text)
        with pytest.raises(WorkerError, match="stock: run"):
            rig.run(Setting(STOCK, 1, 0.25), texts.next(100, 8))
        assert rig.run(Setting(STOCK, 1, 0.25), text).as_planted
        worker = rig._process(STOCK)._process
        worker.kill()  # what an abort in ggml amounts to
        worker.wait()
        assert rig.run(Setting(STOCK, 1, 0.25), text).as_planted


def test_bad_options_are_one_sentence(pair: Pair, tmp_path: Path) -> None:
    base = ["bench", "compare", "--pair", str(pair.folder), "--stock", "/nowhere", "-o", str(tmp_path)]
    for more, words in (
        (["--rows", "sd-1"], "no row 'sd-1'"),
        (["--draft", "gpt"], "there is no draft gpt"),
        (["--memory", "swap"], "--memory takes pinned, mmap, repacked, not 'swap'"),
        (["--policies", "best"], "--policies takes static, lru"),
        (["--budgets", "8,x"], "--budgets takes numbers with commas, not '8,x'"),
        (["--pair", str(tmp_path)], f"{tmp_path}: there is no pair that `moespac synth` wrote"),
        ([], "neither an interpreter"),
    ):
        result = CliRunner().invoke(app, [*base, *more])
        assert result.exit_code == 1 and words in result.output
    suites = ["bench", "suites", "-m", str(tmp_path / "none.gguf"), "--stock"]
    for stock, words in (("/nowhere", "neither an interpreter"), ("patched", "none.gguf: there is no such file")):
        result = CliRunner().invoke(app, [*suites, stock])
        assert result.exit_code == 1 and words in result.output
