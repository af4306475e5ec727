"""The examples run, and the documents name what there is."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from commands import invoke
from moespac_llamacpp.cli import app
from pair import DRAFT, TARGET

REPO = Path(__file__).resolve().parent.parent
PAGES = [REPO / "README.md", *sorted((REPO / "docs").glob("*.md"))]


def example(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(REPO / "examples" / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_a_policy_of_ones_own_replays_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.npz"
    assert invoke("trace", str(trace), "The heron", "-n", "60", "-t", "1").exit_code == 0
    done = example("own_policy.py", str(trace))
    found = dict(re.findall(r"(\w+): ([\d.]+) % of pairs hit", done.stdout))
    assert set(found) == {"recent", "lru"} and 25 < float(found["recent"]) < 100, done.stderr


def test_a_policy_of_ones_own_has_thirty_lines() -> None:
    text = (REPO / "examples" / "own_policy.py").read_text()
    body = text.partition("class Recent")[2].partition("\ndef main")[0]
    assert len(body.strip().splitlines()) <= 30


def test_memory_is_planned_in_python() -> None:
    done = example("plan_memory.py", str(TARGET), str(DRAFT), "64M")  # also enough for a GPU
    assert done.returncode == 0 and re.search(r"\d+% of the experts have a slot", done.stdout), done.stderr
    done = example("plan_memory.py", str(TARGET), str(DRAFT), "10K")
    assert done.returncode == 1 and "without a single expert" in done.stderr and "Traceback" not in done.stderr


def test_answers_have_a_form() -> None:
    done = example("structured.py")
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and len(lines) == 2, done.stderr
    assert all(re.match(r"'.*' has -?\d+ meanings; \d+ tokens at", line) for line in lines)
    assert re.search(r"(\d+) of (\d+) prompt tokens reused", lines[1])[1] != "0"  # type: ignore[index]


# --- documents -------------------------------------------------------------------------------------------------------------


def commands() -> dict[str, Any]:
    return dict(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def options(command: Any) -> set[str]:
    return {name for parameter in command.params for name in parameter.opts if name.startswith("-")}


def test_every_command_that_a_page_names_is_there() -> None:
    for page in PAGES:
        for name in re.findall(r"\bmoespac ([a-z][a-z-]*)\b", page.read_text()):
            assert name in commands(), f"{page.name}: moespac {name}"


def test_every_option_is_explained_and_every_explanation_has_an_option() -> None:
    text = (REPO / "docs" / "options.md").read_text()
    explained = set(re.findall(r"^\| `(--[a-z-]+)", text, re.MULTILINE))
    there = set.union(*(options(command) for command in commands().values()))
    assert explained <= there, explained - there
    daily = ("generate", "chat", "serve", "plan", "models", "pull", "doctor", "plot", "inspect")
    named = {n for command in daily for n in options(commands()[command]) if n.startswith("--")} - {"--help"}
    mentioned = set(re.findall(r"`(--[a-z-]+)", text))
    assert {name for name in named - mentioned if "--" + name.removeprefix("--no-") not in mentioned} == set()


def links() -> Iterator[tuple[Path, str]]:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
            if "://" not in target:
                yield page, target


@pytest.mark.parametrize(("page", "target"), list(links()), ids=lambda value: getattr(value, "name", value))
def test_links_lead_somewhere(page: Path, target: str) -> None:
    assert (page.parent / target).exists()
