"""The paper's suites become prompts, from files with their fields; both sides run them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("llama_cpp")

from moespac_llamacpp.bench.suites import SUITES, SuiteError, messages, read_rows
from moespac_llamacpp.cli import app
from pair import DRAFT, TARGET
from test_compare import rival  # noqa: F401 (a fixture)

ROWS = {
    "mmlu-pro": {"question": "Which is a bird?", "options": ["heron", "trout"], "answer": "A"},
    "mt-bench": {"prompt": ["Write a limerick.", "Now rhyme it."], "category": "writing"},
    "humaneval": {"task_id": "HumanEval/0", "prompt": "def add(a, b):\n"},
    "gsm8k": {"question": "How many legs have 3 herons?", "answer": "#### 6"},
    "alpaca": {"instruction": "Translate.", "input": "Reiher", "output": "heron"},
    "cnn-dm": {"article": "A heron was seen.", "highlights": "Heron."},
    "qa": {"question": "what eats a heron", "answer": ["fox"]},
}
SAID = {
    "mmlu-pro": "B. trout",
    "mt-bench": "limerick",
    "humaneval": "def add(a, b):",
    "gsm8k": "3 herons",
    "alpaca": "Translate.\n\nReiher",
    "cnn-dm": "A heron was seen.",
    "qa": "what eats a heron",
}


def write(path: Path, *rows: object) -> Path:
    path.write_text("\n".join(json.dumps(r) for r in rows) + "\n\n")
    return path


@pytest.mark.parametrize("name", SUITES)
def test_a_row_of_each_suite_becomes_a_message(name: str, tmp_path: Path) -> None:
    found = messages(name, 5, write(tmp_path / "rows.jsonl", ROWS[name]))
    assert len(found) == 1 and SAID[name] in found[0]


def test_the_same_rows_are_drawn_in_every_run(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", *({"question": f"q{i}"} for i in range(50)))
    first = messages("gsm8k", 5, path)
    assert first == messages("gsm8k", 5, path) and len(set(first)) == 5
    assert first != messages("gsm8k", 5, path, seed=1)


def test_parquet_is_read_or_says_what_it_needs(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        path.write_bytes(b"PAR1")
        with pytest.raises(SuiteError, match="pip install pyarrow"):
            list(read_rows(path))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([ROWS["gsm8k"]]), path)
        assert messages("gsm8k", 1, path) == [ROWS["gsm8k"]["question"]]


def test_bad_files_are_one_sentence(tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    for content, words in (
        ("{", "line 1 is not JSON"),
        ("[]", "line 1 is not an object"),
        ('{"a": 1}', "row 1"),
        ("", "no rows"),
    ):
        bad.write_text(content)
        with pytest.raises(SuiteError, match=words):
            messages("gsm8k", 1, bad)
    with pytest.raises(SuiteError, match="No such file"):
        messages("gsm8k", 1, tmp_path / "none.jsonl")
    with pytest.raises(SuiteError, match="there is no suite 'x'"):
        messages("x", 1)


def test_no_network_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(SuiteError, match=r"--rows gsm8k=FILE\.jsonl"):
        messages("gsm8k", 1)


def test_suites_run_on_both_sides(tmp_path: Path, rival: str) -> None:  # noqa: F811
    rows = write(tmp_path / "rows.jsonl", ROWS["gsm8k"], {"question": "What does heron mean?"})
    arguments = ["bench", "suites", "-m", str(TARGET), "-md", str(DRAFT), "--stock", rival, "-o", str(tmp_path / "out")]
    arguments += ["--suite", "gsm8k", "--rows", f"gsm8k={rows}", "-n", "12", "--draft-max", "3", "-t", "1", "-c", "128"]
    done = CliRunner().invoke(app, [*arguments, "--memory", "mmap"])
    assert done.exit_code == 0, done.output
    (run,) = json.loads((tmp_path / "out" / "suites.json").read_text())["suites"]
    assert len(run["settings"]) == 4 and all(s["tps"] > 0 for s in run["settings"])
    assert run["same_texts"][1] == 2
    drafted = [s for s in run["settings"] if s["runs"][0]["setting"]["draft"]]
    assert {s["runs"][0]["setting"]["side"] for s in drafted} == {"stock", "ours"}
    assert "| gsm8k | mean |" in done.output
