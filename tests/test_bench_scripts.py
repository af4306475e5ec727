"""The scripts behind the figures in the documentation run to their end; what they measure is not judged here."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from moespac_llamacpp.policies import make
from moespac_llamacpp.simulate import Tally
from moespac_llamacpp.synth.plan import make_plan
from moespac_llamacpp.synth.replay import verify_steps
from moespac_llamacpp.synth.shapes import SHAPES

REPO = Path(__file__).resolve().parent.parent
N_LAYER, N_USED, N_TOKENS = 6, 6, 64


def script(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(REPO / "scripts" / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_single_steps_of_a_planted_model_are_checked_and_timed(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    ids = np.stack([[rng.permutation(32)[:N_USED] for _ in range(N_LAYER)] for _ in range(N_TOKENS)]).astype(np.int16)
    np.savez(tmp_path / "trace.npz", experts=ids, n_expert=32)
    model, found = tmp_path / "planted.gguf", tmp_path / "bench.json"
    made = script("planted_model.py", str(model), str(tmp_path / "trace.npz"), "--tiny")
    assert made.returncode == 0, made.stderr
    short = "--threads 1 --rounds 1 --run 2 --warm 2 --clocked 2 --cap 1 --widths 2 --mixed , --prompt 0 --stream 8"
    what = "--shares 0.25,1 --upstream-shares 1 --portable ,"
    done = script("bench_hybrid.py", str(model), "--device", "CPU", *short.split(), *what.split(), "--json", str(found))
    assert done.returncode == 0, done.stderr
    report = json.loads(found.read_text())
    steps = {row["contender"]: row["step_ms"]["median"] for row in report["results"]}
    assert set(steps) == {"upstream 0L", f"upstream {N_LAYER}L", "hybrid 0.25", "hybrid 1", "detached"}
    assert min(steps.values()) > 0
    wide = script("bench_hybrid.py", str(model), "--widths", "2,33")
    assert wide.returncode == 2 and "a step has 1 to 32 tokens, with logits of all, not 33" in wide.stderr
    assert len(report["checks"]) == 3 and not any(check["failures"] for check in report["checks"])


def test_what_python_adds_between_two_decodes_is_measured(tmp_path: Path) -> None:
    short = ["--steps", "10", "--moves", "5", "--drafts", "3 n-gram guesses", "--folder", str(tmp_path)]
    done = script("bench_between.py", "--json", *short)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [row["chain"] for row in rows] == ["greedy", "sampled", "penalties"]
    assert all(row["ms"] > 0 and 3 < row["moved"] <= 5 for row in rows)  # the first step has no plan to follow


def test_who_asks_for_help_gets_no_measurement() -> None:
    done = script("bench_sampling.py", "--help")
    assert done.returncode == 0 and done.stdout.startswith("usage:") and "µs" not in done.stdout


def test_a_comparison_of_some_policies_replaces_only_their_rows(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    ids = rng.permuted(np.tile(np.arange(16, dtype=np.uint8), (24, 2, 1)), axis=2)[:, :, :2]
    trace, out = tmp_path / "trace.npz", tmp_path / "policies.json"
    np.savez(trace, experts=ids, n_expert=16, is_decode=np.arange(24) >= 4)
    command = [str(trace), "--out", str(out), "--what", "policies", "--processes", "1"]
    assert script("bench_policies.py", *command).returncode == 0
    whole = json.loads(out.read_text())
    spoilt = [row | {"pair_hit": -1.0} if row["policy"] in ("lru", "lfu") else row for row in whole]
    out.write_text(json.dumps(spoilt))
    assert script("bench_policies.py", *command, "--policy", "lfu").returncode == 0
    after = json.loads(out.read_text())
    assert [row for row in after if row["policy"] != "lru"] == [row for row in whole if row["policy"] != "lru"]
    assert all(row["pair_hit"] == -1 for row in after if row["policy"] == "lru")


def test_a_planted_chain_replays_as_a_session_runs_it() -> None:
    """Moves within the cap, streamed experts among the residents, never more of them than slots."""
    sys.path.insert(0, str(REPO / "scripts"))
    planted: Any = importlib.import_module("replay_planted")
    plan = make_plan(replace(SHAPES["qwen3-30b-a3b"], n_layer=4), range(1000, 9000), None, 1024)
    steps = verify_steps(plan, 3, 60)
    session = planted.Session(make("moe-spac", 4, 128), (4, 128), 32, 10, late=False)
    session.prompt(steps[0].batch)
    for step in steps[1:]:
        tally = Tally()
        session.step(step.batch, tally)
        assert tally.n_moves <= 10
        assert (session.resident.sum(axis=1) <= 32).all()
    assert session.n_streamed > 0
