"""A record for each decode, written at once; what it says adds up to what was done."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moespac_llamacpp import native
from moespac_llamacpp.cli import app
from moespac_llamacpp.decoder import Decoder
from moespac_llamacpp.draft import NgramDraft
from moespac_llamacpp.models import Context
from moespac_llamacpp.plot import read_telemetry
from moespac_llamacpp.telemetry import PLACEMENT_EVERY, Step, Telemetry, TelemetryError, placement
from pair import Pair, Shuffle, target_context
from test_decoder import LONG


@pytest.fixture
def context(pair: Pair) -> Iterator[Context]:
    with target_context(pair, n_batch=64) as context:
        yield context


def test_records_add_up_and_are_there_at_once(pair: Pair, context: Context, tmp_path: Path) -> None:
    file = tmp_path / "telemetry.jsonl"
    assert context.experts is not None
    prompt = pair.target.tokenize(LONG * 2)
    with Telemetry(file) as telemetry:
        moves = Shuffle(context.experts, 0.25)
        context.experts.reset_perf()
        decoder = Decoder(context, moves, drafter=NgramDraft(), draft_max=4, draft_fixed=True, telemetry=telemetry)
        n_seen = 0
        for _ in decoder.generate(prompt, 90):
            lines = file.read_text().splitlines()
            assert len(lines) >= n_seen and json.loads(lines[-1])["n_past"] == context.n_past
            n_seen = len(lines)
        report, perf = decoder.report, context.experts.perf_total()
        decoder.close()
    records = [json.loads(line) for line in file.read_text().splitlines()]
    prompts, steps = ([r for r in records if r["kind"] == kind] for kind in ("prompt", "step"))
    assert [r["n_batch"] for r in prompts] == [64, len(prompt) - 64] and len(prompt) > 64
    assert len(steps) == report.n_steps > 10
    assert sum(r["n_drafted"] for r in steps) == report.n_drafted
    assert sum(r["n_accepted"] for r in steps) == report.n_accepted > 0
    assert sum(r["n_tokens"] for r in steps) == report.n_generated - 1  # the first one is the prompt's
    assert sum(r["n_batch"] for r in records) == report.n_evaluated
    assert sum(r["decode_ms"] for r in steps) == pytest.approx(1000 * report.verify_seconds, rel=0.01)
    for name in ("n_hot_pairs", "n_cold_pairs", "n_loads", "n_load_bytes"):
        assert sum(r[name] for r in records) == getattr(perf, name) > 0
    assert [i for i, r in enumerate(records) if "resident" in r] == list(range(0, len(records), PLACEMENT_EVERY))
    seen = read_telemetry(file)  # as `moespac plot` reads it
    assert len(seen.tps) == len(steps) and (seen.tps > 0).all() and seen.n_snapshots == len(range(0, len(records), 16))


def test_a_token_that_ends_the_text_is_not_gained(pair: Pair, context: Context, tmp_path: Path) -> None:
    file = tmp_path / "telemetry.jsonl"
    with Telemetry(file) as telemetry:
        decoder = Decoder(context, grammar='root ::= "heron"', telemetry=telemetry)
        tokens = list(decoder.generate(pair.target.tokenize(LONG), 20))
        decoder.close()
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert decoder.report.finish_reason == "stop"
    assert sum(r["n_tokens"] for r in records) == len(tokens) - 1


def test_a_placement_has_a_digit_for_each_expert(context: Context) -> None:
    experts = context.experts
    assert experts is not None
    Shuffle(experts, 0.25)
    shown = placement(experts)
    assert list(shown) == [str(row.il) for row in experts.rows()]
    for row in experts.rows():
        digits = [int(state == native.RESIDENT) for state in experts.states(row.row)]
        assert shown[str(row.il)] == "".join(map(str, digits)) and sum(digits) == 8


def test_counters_that_were_set_to_zero_are_no_negative_moves(context: Context, tmp_path: Path) -> None:
    assert context.experts is not None
    with Telemetry(tmp_path / "t.jsonl") as telemetry:
        for _ in range(2):
            context.experts.reset_perf()
            context.decode([5, 6, 7])
            telemetry.record(Step("step", context.n_past, 3), context.experts)
    records = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    assert records[0]["n_cold_pairs"] == records[1]["n_cold_pairs"] > 0


def test_a_second_run_appends(tmp_path: Path) -> None:
    for _ in range(2):
        with Telemetry(tmp_path / "t.jsonl") as telemetry:
            telemetry.record(Step("step", 1, 1), None)
    assert len((tmp_path / "t.jsonl").read_text().splitlines()) == 2


def test_a_file_that_cannot_be_written_is_told_before_anything_is_loaded(tmp_path: Path) -> None:
    wrong = tmp_path / "missing" / "t.jsonl"
    with pytest.raises(TelemetryError, match="telemetry cannot be written: No such file or directory"):
        Telemetry(wrong)
    # the model does not exist either, and would be told otherwise
    done = CliRunner().invoke(app, ["generate", "x", "-m", str(tmp_path / "m.gguf"), "--telemetry", str(wrong)])
    assert done.exit_code == 1
    assert done.stderr == f"moespac: {wrong}: telemetry cannot be written: No such file or directory\n"
    full = Path("/dev/full")
    if full.exists():
        with Telemetry(full) as telemetry, pytest.raises(TelemetryError, match=r"/dev/full: .*: No space left"):
            telemetry.record(Step("step", 1, 1), None)


def test_the_option_writes_and_plot_draws(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    arguments = ["generate", "The heron", "-n", "30", "-t", "1", "-c", "512", "--telemetry", str(file)]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    done = CliRunner().invoke(app, ["plot", str(file), "-o", str(tmp_path / "t.svg")])
    assert done.exit_code == 0 and "<svg" in (tmp_path / "t.svg").read_text()
