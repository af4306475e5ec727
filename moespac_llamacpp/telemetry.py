"""One record a step as a line of JSON, for whoever wants to see what a generation does while it runs.

A record costs some calls into the native layer for each MoE layer: it is for looking, not for the fastest run.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from moespac_llamacpp import native

#: Records between two that say which experts are resident.
PLACEMENT_EVERY = 16


class TelemetryError(OSError):
    """The file cannot be written; the text is the sentence for the user."""


@dataclass
class Step:
    """What a decode of the target did. Times in milliseconds, 0 where there was nothing to do."""

    kind: str  # "prompt": a piece of a prompt; "step": the last token and a draft
    n_past: int  # tokens in the context after it
    n_batch: int  # tokens that were decoded
    n_drafted: int = 0
    n_accepted: int = 0
    n_tokens: int = 0  # that the text gained
    draft_ms: float = 0.0  # drafting, and starting moves meanwhile
    decode_ms: float = 0.0
    accept_ms: float = 0.0  # acceptance and rollback
    plan_ms: float = 0.0  # telling the policy what was decoded


class Telemetry:
    """Writes the records of one context to a file, each flushed, appended to what is there.

    A record is a Step with `t` (seconds since the start), what the experts did since the last one (NAMES, as in native.Perf),
    and in every 16th `resident`: for each MoE layer a string of 0 and 1, one digit per expert.
    """

    NAMES = (
        *("n_hot_pairs", "n_cold_pairs", "n_hot_experts", "n_cold_experts"),
        *("n_streamed_experts", "n_ahead_experts", "n_ahead_right", "n_loads", "n_load_bytes"),
    )

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """TelemetryError: the file cannot be written."""
        self.path = Path(path)
        try:
            self._file = self.path.open("ab", buffering=0)
        except OSError as error:
            raise TelemetryError(f"{self.path}: telemetry cannot be written: {error.strerror}") from error
        self._start = time.perf_counter()
        self._n_records = 0
        self._perf, self._n_resets = native.Perf(), 0

    def record(self, step: Step, experts: native.Experts | None) -> None:
        """TelemetryError: the disk is full."""
        values: dict[str, object] = {"t": round(time.perf_counter() - self._start, 6), **asdict(step)}
        for name, value in values.items():
            if name.endswith("_ms"):
                values[name] = round(float(value), 4)  # type: ignore[arg-type]
        if experts:
            values |= self._moves(experts)
            if self._n_records % PLACEMENT_EVERY == 0:
                values["resident"] = placement(experts)
        self._n_records += 1
        try:
            self._file.write(json.dumps(values).encode() + b"\n")
        except OSError as error:
            raise TelemetryError(f"{self.path}: telemetry cannot be written: {error.strerror}") from error

    def _moves(self, experts: native.Experts) -> dict[str, int]:
        now, before = experts.perf_total(), self._perf
        if self._n_resets != experts.n_perf_resets:
            before = native.Perf()
        self._perf, self._n_resets = now, experts.n_perf_resets
        return {name: getattr(now, name) - getattr(before, name) for name in self.NAMES}

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Telemetry:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def placement(experts: native.Experts) -> dict[str, str]:
    """Layer index: a digit per expert, 1 for residents. A layer's second block is named il.row."""
    table = experts.states_table() == native.RESIDENT
    seen: dict[str, str] = {}
    for row in experts.rows():
        name = str(row.il) if str(row.il) not in seen else f"{row.il}.{row.row}"
        seen[name] = "".join("01"[resident] for resident in table[row.row, : row.n_expert].tolist())
    return seen
