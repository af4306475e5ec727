"""What is expected of a step is near what was measured, and the model of a layer counts as it says."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
import pytest

from moespac_llamacpp.estimate import hits_of, seconds_of_layers
from moespac_llamacpp.hardware import H200, Hardware, Work
from moespac_llamacpp.plan import Block
from moespac_llamacpp.profile import Profile
from moespac_llamacpp.residency import STREAM_EXPERTS

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO / "scripts"))
from compare_estimate import Cell, read  # noqa: E402

#: Written by scripts/compare_estimate.py from runs on an H200; docs/memory-plan.md says which.
CELLS = read(REPO / "bench" / "results" / "measured-steps.json")
GRID = [cell for cell in CELLS if cell.stage == "grid"]
#: The estimate's constants are from the grid's session; these are others, and other models.
ELSEWHERE = sorted({(cell.model, cell.session) for cell in CELLS} - {(cell.model, cell.session) for cell in GRID})


def ratios(cells: list[Cell]) -> list[float]:
    """TPS, expected with the hits that were measured over measured."""
    return [cell.expected_tps(cell.hit_rate)[0] / cell.tps for cell in cells]


def near(ratio: float) -> bool:
    return 1 / 1.2 < ratio < 1.2


def test_the_cells_of_the_grid_are_met() -> None:
    found = ratios(GRID)
    assert len(found) == 71 and 0.95 < median(found) < 1.06
    far = {(c.share, c.threads, c.acceptance) for c, r in zip(GRID, found, strict=True) if not near(r)}
    # those that docs/memory-plan.md names: slower than the same setting in another run, or four threads that read unevenly
    assert far <= {(0.25, 16, ""), (0.17, 16, ""), (0.08, 16, ""), (0.08, 4, ""), (0.08, 16, "60")}
    assert max(found) < 1.5 and min(found) > 0.9


@pytest.mark.parametrize(("model", "session"), ELSEWHERE)
def test_sessions_and_models_that_nothing_was_fitted_to_are_met(model: str, session: str) -> None:
    found = ratios([cell for cell in CELLS if (cell.model, cell.session) == (model, session)])
    assert 0.85 < median(found) < 1.1 and sum(map(near, found)) >= 0.95 * len(found)


def test_each_policy_is_met_by_its_hits_alone() -> None:
    """From 23 to 79 % at the same budget; static streams nothing into its slots, which costs it here."""
    cells = [cell for cell in CELLS if cell.stage == "policy" and cell.policy != "static"]
    assert len(cells) >= 12 and all(map(near, ratios(cells)))
    (static,) = (cell for cell in CELLS if cell.stage == "policy" and cell.policy == "static")
    assert static.tps / max(cell.tps for cell in cells) < 0.6
    assert static.expected_tps(static.hit_rate)[0] / max(c.expected_tps(c.hit_rate)[0] for c in cells) < 0.8


def test_hits_of_single_tokens_lie_in_the_expected_span() -> None:
    cells = [cell for cell in GRID if not cell.drafted]
    assert len(cells) == 20
    for cell in cells:
        low, high = (float(hits.mean()) for hits in hits_of(cell.plan.blocks, cell.plan.slots))
        assert low - 0.01 <= cell.hit_rate <= high


def test_the_figures_are_those_of_the_comparison() -> None:
    """Those of the session whose comparison is committed. A rate counts the tokens after the first."""
    found = json.loads((REPO / "docs/results/2026-11-30-h200/comparison.json").read_text(encoding="utf-8"))
    runs = [r for r in found["runs"] if r["setting"]["side"] == "ours" and r.get("n_steps")]
    kept = [cell for cell in CELLS if cell.session == found["machine"]["date"]]
    assert kept
    for cell in kept:
        (run,) = (r for r in runs if r["stage"] == cell.stage and abs(r["tps"] - cell.tps) < 0.006)
        assert run["hit_rate"] == pytest.approx(cell.hit_rate, abs=1e-4)
        assert run["verify_seconds"] / run["n_steps"] == pytest.approx(cell.verify, abs=1e-6)
        assert cell.kept / cell.tps == pytest.approx(run["seconds"] / run["n_steps"], rel=1e-3)


# --- the model of a layer --------------------------------------------------------------------------------------------------

ROUND = Hardware(
    name="round numbers",
    expert_bytes=1_000_000,
    link_bytes=50e9,  # an expert takes 20 µs
    between=40,
    between_token=10,
    launch=0,
    launch_token=0,
    cpu_expert=40,
    cpu_pair=5,
    device=10,
    device_pair=0,
    device_token=3,
    device_expert=1,
    request=30,
    streams=8,
    beside=1.5,
    join=12,
    step=1000,
    step_token=100,
)


def of(n_tokens: int, cold: float, cold_pairs: float, hot: float, free: float) -> Work:
    one = np.ones(1)
    return Work(n_tokens, one * cold, one * cold_pairs, one * hot, one * hot, one * free)


@pytest.mark.parametrize(
    ("work", "us"),
    [
        (of(1, 0, 0, 8, 8), 10 + 8),  # nothing is cold
        (of(3, 0, 0, 8, 8), 10 + 2 * 3 + 8),
        (of(1, 1, 1, 7, 9), 17 + 20),  # over the link; the pool takes 30 + 45
        (of(1, 1, 1, 7, 0), 75),  # no slot is free of the batch: the pool
        (
            of(1, 4, 4, 4, 9),
            14 + 4 * 20,
        ),  # all four; with three, the pool takes 30 + 1.5 · 45 more than 14 + 60, but 97.5
        (of(1, 4, 4, 4, 2), 30 + 1.5 * 2 * 45),  # two, since no more are free; the link's 54 are over sooner
        (
            of(3, 4, 8, 4, 1),
            30 + 4 * 40 + 8 * 5,
        ),  # one more slot is free, but the pool would be slower beside a busy link
        (of(3, 4, 8, 4, 3), 30 + 1.5 * (40 + 2 * 5)),  # three, over after 80; the pool reads the fourth
    ],
)
def test_a_layer_takes_what_is_counted_by_hand(work: Work, us: float) -> None:
    assert ROUND.experts_us(work)[0] == pytest.approx(us)


def test_a_step_is_its_layers_and_what_is_around_them() -> None:
    work = Work(3, *(np.zeros(4) for _ in range(2)), *(np.full(4, 8.0) for _ in range(3)))
    assert ROUND.step_ms(work, 0) == pytest.approx((4 * (60 + 24) + 1200) / 1e3)
    assert ROUND.step_ms(work, 100) == pytest.approx(2.0)  # the link's
    assert ROUND.step_ms(work, 100, sync_moves=True) == pytest.approx(2.0 + 1.536)
    assert ROUND.whole_us(work)[0] == pytest.approx(60 + 24 - 12)


def test_streaming_never_makes_a_layer_slower() -> None:
    """It is chosen only where it ends the layer sooner; and more free slots, threads or link never hurt."""
    rng = np.random.default_rng(0)
    cold, hot, free = rng.integers(0, 20, 500), rng.integers(0, 20, 500), rng.integers(0, 12, 500)
    work = Work(4, cold, cold * 1.3, hot, hot * 1.5, free)
    with_lane = H200.experts_us(work)
    assert (with_lane <= replace(H200, streams=0).experts_us(work)).all()
    assert (with_lane >= replace(H200, link_bytes=2 * H200.link_bytes).experts_us(work)).all()
    assert (with_lane >= H200.experts_us(replace(work, free=work.free + 1))).all()
    assert (with_lane < replace(H200, streams=0).experts_us(work)).any()


def test_as_many_experts_may_stream_as_live() -> None:
    assert H200.streams == STREAM_EXPERTS


def test_a_machine_without_a_link_streams_nothing() -> None:
    blocks = [Block(128, 2_857_000, True, il, 8) for il in range(48)]
    rates = Profile("", "", 16, cpu_read=40e9, link=0.0, pageable=0.0, device_read=4e12, measured="")
    without = seconds_of_layers(blocks, [32] * 48, 0.7, rates, in_stream=True)
    with_link = seconds_of_layers(blocks, [32] * 48, 0.7, replace(rates, link=48e9), in_stream=True)
    assert with_link < 0.8 * without
