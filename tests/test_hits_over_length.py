"""scripts/hits_over_length.py reads telemetry by stretches of a text."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from hits_over_length import replayed, rows_of


def test_stretches_double_and_the_rest_is_the_last(tmp_path: Path) -> None:
    lines = [{"t": 1.0, "kind": "prompt", "n_tokens": 0, "n_hot_pairs": 9, "n_cold_pairs": 9, "n_loads": 9}]
    for i in range(100):  # 200 tokens: 64, 64 more, 72
        hot = 3 if i < 32 else 1
        lines.append(
            {
                "t": 1.0 + 0.1 * (i + 1),
                "kind": "step",
                "n_tokens": 2,
                "n_hot_pairs": hot,
                "n_cold_pairs": 1,
                "n_loads": 4,
            }
        )
    file = tmp_path / "t.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = rows_of(file)
    assert [r[0] for r in rows] == [64, 128, 200]
    assert [r[1] for r in rows] == pytest.approx([75.0, 50.0, 50.0])
    assert [r[2] for r in rows] == pytest.approx([4.0] * 3)
    assert [r[3] for r in rows] == pytest.approx([20.0] * 3)


def test_the_stretches_of_a_trace_add_up(tmp_path: Path) -> None:
    """150 single tokens of two layers: 64, 64 and 22; an expert that is chosen always is a hit from its second stretch on."""
    ids = np.full((150, 2, 2), 9)
    ids[:, :, 1] = np.arange(150)[:, None] % 8
    file = tmp_path / "trace.npz"
    np.savez(file, experts=ids, n_expert=16, is_decode=np.ones(150, np.bool_))
    rows = replayed(file, "lru", 0.125)
    assert [r[0] for r in rows] == [64, 128, 150]
    assert rows[0][1] < rows[1][1] == pytest.approx(50.0) and all(0 < r[2] <= 1 and r[3] > 0 for r in rows)
