"""scripts/compare_stock.py builds the rival with the builder's own means, then compares with it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import compare_stock


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that would run; none does."""
    found: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        found.append(command)
        return subprocess.CompletedProcess(command, 1 if "broken" in command else 0)

    monkeypatch.setattr(subprocess, "run", run)
    return found


def test_it_builds_the_rival_and_says_what_to_give(
    commands: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare_stock.main(["--backend", "cpu", "--venv", "somewhere"]) == 0
    (build,) = commands
    assert build[0] == sys.executable and Path(build[1]).name == "build_llama.py" and Path(build[1]).is_file()
    assert build[2:] == ["--stock", "--venv", "somewhere", "--backend", "cpu"]
    assert "--stock somewhere/bin/python" in capsys.readouterr().out


def test_what_follows_goes_to_the_comparison(commands: list[list[str]]) -> None:
    assert compare_stock.main(["--venv", "v", "--", "--pair", "p", "--backend"]) == 0
    assert commands[1][-7:] == ["bench", "compare", "--stock", "v/bin/python", "--pair", "p", "--backend"]


def test_without_a_rival_there_is_no_comparison(commands: list[list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    assert compare_stock.main(["--venv", "broken", "--", "--pair", "p"]) == 1
    assert len(commands) == 1 and "no rival" in capsys.readouterr().out
