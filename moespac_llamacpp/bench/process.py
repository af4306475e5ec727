"""A worker in a process of its own: one request, one answer, a time limit, and its log where it can be read."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any


class WorkerError(RuntimeError):
    """A worker failed; the text is its sentence, or where its log is."""


class Process:
    """close() ends it, gently first."""

    def __init__(self, name: str, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> None:
        self.name = name
        self.log = log
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, env={**os.environ, **(env or {})}
            )
        self._lines: queue.Queue[bytes] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(b"")

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def call(self, operation: str, *, limit: float = 600.0, **arguments: Any) -> dict[str, Any]:
        """WorkerError: the operation failed, took longer than `limit` seconds, or the process ended."""
        self.ask(operation, **arguments)
        return self.answer(operation, limit=limit)

    def ask(self, operation: str, **arguments: Any) -> None:
        """Starts an operation; nothing else may be asked before its answer was taken."""
        assert self._process.stdin
        # a process that has ended says so when the answer is taken
        with suppress(OSError):
            self._process.stdin.write(json.dumps({"op": operation, **arguments}).encode() + b"\n")
            self._process.stdin.flush()

    def answer(self, operation: str, *, limit: float = 600.0) -> dict[str, Any]:
        """Of what was asked last. WorkerError as for call."""
        try:
            line = self._lines.get(timeout=limit)
        except queue.Empty:
            self._process.kill()
            self._process.wait()
            raise WorkerError(f"{self.name}: {operation} took longer than {limit:.0f} s (log: {self.log})") from None
        if not line:
            self._lines.put(b"")  # for whoever asks again
            raise WorkerError(
                f"{self.name}: ended during {operation} with code {self._process.wait()} (log: {self.log})"
            )
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WorkerError(f"{self.name}: {operation}: {answer['error']}")
        return answer

    def close(self) -> None:
        if self._process.poll() is None:
            assert self._process.stdin
            try:
                self._process.stdin.write(b'{"op": "quit"}\n')
                self._process.stdin.close()
                self._process.wait(timeout=60)
            except (OSError, subprocess.TimeoutExpired):
                self._process.kill()
                self._process.wait()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
