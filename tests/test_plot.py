"""What is drawn is what the records say; what they do not say is left out."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from commands import invoke
from moespac_llamacpp.inspection import inspect
from moespac_llamacpp.plot import PlotError, draw_contents, draw_telemetry, read_telemetry
from moespac_llamacpp.svg import INNER, LEFT, running_mean, shade
from pair import TARGET

SVG = "{http://www.w3.org/2000/svg}"


def record(**fields: object) -> str:
    return json.dumps(fields) + "\n"


def session(n: int = 40) -> str:
    lines = [record(kind="prompt", n_batch=100, decode_ms=50.0, resident={"0": "1100", "1": "0011"})]
    for i in range(n):
        resident = {"resident": {"0": "1100" if i < n // 2 else "1010", "1": "0011"}} if i % 10 == 0 else {}
        times = {"draft_ms": 5.0, "decode_ms": 20.0, "accept_ms": 2.5, "plan_ms": 2.5}
        pairs = {"n_hot_pairs": 30 + i, "n_cold_pairs": 70 - i, "n_loads": i % 5}
        lines.append(record(kind="step", n_tokens=3, **times, **pairs, **resident))
    return "".join(lines)


def polylines(svg: str) -> list[list[tuple[float, float]]]:
    """Of values: those that are no grid."""
    found = [e.attrib["points"] for e in ElementTree.fromstring(svg).iter(SVG + "polyline")]
    lines = [[(float(x), float(y)) for x, y in (p.split(",") for p in points.split())] for points in found]
    return [line for line in lines if len(line) > 2]


def test_steps_are_read_and_prompts_only_place(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(session())
    found = read_telemetry(path)
    assert found.tps.tolist() == [100.0] * 40
    assert found.hits.tolist() == [30.0 + i for i in range(40)] and found.moves.tolist() == [i % 5 for i in range(40)]
    assert found.n_snapshots == 5 and found.placement["0"].tolist() == [1.0, 0.6, 0.4, 0.0]


def test_the_lines_are_the_values_and_the_squares_the_placement(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(session())
    svg = draw_telemetry(read_telemetry(path), "a <session>")
    assert "a &lt;session&gt;" in svg
    lines = polylines(svg)
    assert len(lines) == 6  # values and their running mean, three times
    hits = lines[2]
    assert len(hits) == 40 and hits[0][0] == LEFT and hits[-1][0] == LEFT + INNER
    steps = np.diff([y for _, y in hits])
    assert np.allclose(steps, steps[0], atol=0.11) and steps[0] < 0  # y grows downwards
    fills = re.findall(r"<rect x='([\d.]+)' .* fill='(#\w+)'/>", svg)
    assert [fill for _, fill in fills[:4]] == [shade(1.0), shade(0.6), shade(0.4), shade(0.0)]


def test_records_of_other_names_and_gaps_are_drawn(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    other = [record(step=i, n_accepted=1, t_draft_ms=4, t_decode_ms=16, hits=1, misses=3) for i in range(5)]
    path.write_text("".join([*other, record(step=6), '{"step": 7, "n_acc']))
    found = read_telemetry(path)
    assert (
        found.tps[:5].tolist() == [100.0] * 5
        and found.hits[0] == 25.0
        and np.isnan(found.tps[5])
        and len(found.tps) == 6
    )
    assert not np.isfinite(found.moves).any() and found.placement == {}
    assert len(polylines(draw_telemetry(found, "x"))) == 4  # no moves


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no step to draw"),
        (record(kind="prompt"), "no step to draw"),
        (record(a=1), "no step to draw"),
        ("hello\n", "line 1: not a line of telemetry"),
        (record(step=1) + "x\n" + record(step=2), "line 2: not a line of telemetry"),
        ("[1]\n", "line 1: not a record of telemetry"),
    ],
)
def test_what_is_no_telemetry_is_told_with_its_line(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    with pytest.raises(PlotError, match=rf"{re.escape(str(path))}.*{words}"):
        read_telemetry(path)


def test_the_commands_draw(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(session())
    assert invoke("plot", str(path)).exit_code == 0
    ElementTree.parse(tmp_path / "t.svg")
    assert invoke("inspect", "--svg", str(tmp_path / "m.svg")).exit_code == 0
    ElementTree.parse(tmp_path / "m.svg")
    done = invoke("plot", str(path), "-o", str(tmp_path / "none" / "x.svg"))
    assert done.exit_code == 1 and "the drawing cannot be written: No such file or directory" in done.stderr
    done = invoke("plot", ".")
    assert done.exit_code == 1 and done.stderr == "moespac: .: cannot be read: Is a directory\n"
    done = invoke("plot", str(tmp_path / "none.jsonl"))
    assert done.exit_code == 1 and "none.jsonl: cannot be read: No such file or directory" in done.stderr


def test_a_model_is_drawn_to_scale() -> None:
    contents = inspect(TARGET)
    widths = [float(w) for w in re.findall(r"width='([\d.]+)' height='12.00'", draw_contents(contents))]
    per_layer = [a + b for a, b in zip(widths[:12:2], widths[1:12:2], strict=True)]
    sizes = [part.expert_bytes for part in contents.layers for _ in range(part.first, part.last + 1)]
    assert np.allclose(np.array(per_layer) / max(per_layer), np.array(sizes) / max(sizes), atol=1e-3)
    assert np.allclose(widths[0] / per_layer[0], contents.n_expert_used / contents.n_expert, atol=1e-3)
    assert np.isclose(widths[12] / (widths[12] + widths[13]), contents.dense_bytes / contents.total_bytes, atol=1e-3)


def test_a_running_mean_looks_back_only() -> None:
    assert running_mean(np.array([1.0, 2.0, 3.0, 4.0]), 2).tolist() == [1.0, 1.5, 2.5, 3.5]
    assert shade(0.0) == "#f2f2f2" and shade(1.0) == "#1f6f8b" and shade(7) == shade(1)
