"""The command as a shell meets it: closed and full outputs, other encodings, Ctrl-C, help in 80 columns."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest

from commands import invoke
from moespac_llamacpp.machine import cache_folder
from moespac_llamacpp.models import Model
from moespac_llamacpp.simulate import main as simulate
from pair import TARGET

MOESPAC = f"{sys.executable} -m moespac_llamacpp.cli"
GENERATE = f"{MOESPAC} generate -t 1 -n 40 --draft none --no-hot-set hello"


def shell(line: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    command = ["bash", "-c", line]
    return subprocess.run(command, capture_output=True, env=os.environ | environment, timeout=120)


@pytest.mark.parametrize(
    "line", [f"{GENERATE} | head -c 3", f"{GENERATE} >&-", f"{GENERATE} 2>&-", f"{MOESPAC} models | head -1"]
)
def test_an_output_that_nobody_reads_is_no_error(line: str) -> None:
    said = shell(line).stderr.decode()
    assert "moespac:" not in said and "Error" not in said and "Exception" not in said


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("command", [GENERATE, f"{MOESPAC} models"])
def test_an_output_that_is_full_is_one_sentence(command: str) -> None:
    done = shell(f"{command} >/dev/full")
    assert done.returncode == 1 and done.stderr == b"moespac: No space left on device\n"


def test_a_terminal_without_unicode_gets_its_help_and_its_text() -> None:
    done = shell(f"{MOESPAC} generate --help", PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and b"--telemetry" in done.stdout
    done = shell(f"printf 'caf\\xe9\\n' | {MOESPAC} chat -t 1 -n 3 --no-hot-set --json")
    assert done.returncode == 0 and done.stdout.startswith(b'{"text": '), done.stderr


def test_what_is_not_unicode_is_one_sentence() -> None:
    done = shell(f"{MOESPAC} generate $'caf\\xe9'")
    assert done.returncode == 1 and done.stderr == b"moespac: the text is not Unicode at position 3: give it as UTF-8\n"
    done = invoke("generate", "")
    assert done.exit_code == 1 and done.stderr == "moespac: the prompt is empty\n"


def test_help_shows_every_word_in_80_columns() -> None:
    for command in ("generate", "chat", "serve", "plan"):
        shown = invoke(command, "--help").stdout
        assert "moe-spac-no-balancer" in shown.replace("\n", "").replace(" ", "")
        assert max(map(len, shown.splitlines())) <= 80
    commands = invoke("--help").stdout.split("Commands:")[1].strip().splitlines()
    assert len(commands) == 14 and not any(line.endswith("...") for line in commands)


def test_the_versions_are_told() -> None:
    assert invoke("--version").stdout == (
        f"moespac_llamacpp {version('moespac-llamacpp')}, llama-cpp-python {version('llama-cpp-python')}\n"
    )


def test_ctrl_c_while_a_model_is_loaded_ends_the_loading() -> None:
    def press(fraction: float) -> None:
        if not pressed.is_set():
            pressed.set()
            signal.raise_signal(signal.SIGINT)

    pressed = threading.Event()
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        Model(TARGET, progress=press)
    assert pressed.is_set() and signal.getsignal(signal.SIGINT) is before


def test_a_user_without_a_home_can_generate_and_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nowhere)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    with pytest.raises(FileNotFoundError):
        cache_folder({})
    assert invoke("plan").exit_code == 0
    done = invoke("generate", "-t", "1", "-n", "2", "hello")
    assert done.exit_code == 0 and done.stderr.endswith(
        "moespac: the hot set was not kept for the next run: this user has no home folder: set HOME or XDG_CACHE_HOME\n"
    )
    done = invoke("doctor")
    assert "PROBLEM: the profile cannot be kept: this user has no home folder" in done.stdout


def test_what_is_no_trace_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, data in (("text", b"hello"), ("empty", b""), ("zip", b"PK\x03\x04 cut")):
        (tmp_path / name).write_bytes(data)
        assert simulate([str(tmp_path / name)]) == 1
        assert (
            capsys.readouterr().err == f"moespac simulate: {tmp_path / name}: not a file that `moespac trace` wrote\n"
        )
    np.save(tmp_path / "array.npy", np.zeros(3))
    assert simulate([str(tmp_path / "array.npy")]) == 1
    assert "not a file that `moespac trace` wrote" in capsys.readouterr().err
    assert simulate([str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"moespac simulate: {tmp_path}: cannot be read: Is a directory\n"
    done = invoke("trace", str(tmp_path), "hello")
    assert done.exit_code == 1 and re.fullmatch(r"moespac: .*: a folder: name the file to write\n", done.stderr)


def test_ctrl_c_while_python_imports_ends_without_a_traceback() -> None:
    start = "import sys; sys.modules['typer'] = type('T', (), {'__getattr__': lambda *_: signal.raise_signal(2)})(); "
    done = shell(f'{sys.executable} -c "import signal; {start}from moespac_llamacpp.__main__ import main; main()"')
    assert done.returncode == 130 and done.stderr == b""
    done = shell(f"{sys.executable} -m moespac_llamacpp --version")
    assert done.stdout.startswith(b"moespac_llamacpp ")
