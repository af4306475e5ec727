#!/usr/bin/env python3
"""What observing, planning and starting moves adds to a step, with 48 layers of 128 experts and 8 a token.

A random model of that many layers and experts, but narrow ones (85 MB, written once), runs through the real library, so the
calls into it, the waiting for threads and the fight for Python's lock are real; its decodes are faster than a large model's. A
draft model is stood in for by sleeping, which leaves the lock free as a decode does. In the caller's thread: what the step
waits for. In the worker: what happens meanwhile.

    python scripts/bench_planning.py --out bench/results/planning.json
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moespac_llamacpp.memory import slots_for_share
from moespac_llamacpp.models import Context, Model, capture_log
from moespac_llamacpp.policies import make
from moespac_llamacpp.residency import Residency, block_sizes

ROOT = Path(__file__).parent.parent
N_LAYER, N_EXPERT, N_USED = 48, 128, 8
SHARE, MAX_MOVES = 0.25, 60
N_TEXT = 64  # tokens of the text that repeats, so that the memory has something to say


@dataclass(frozen=True)
class Mode:
    """n_guesses tokens are drafted in guess_ms each; 0: nobody drafts, or no time passes."""

    name: str
    n_tokens: int
    guess_ms: float = 0.0


MODES = (Mode("no draft", 1), Mode("n-gram draft", 9), Mode("draft model, 2 ms a guess", 9, 2.0))


@dataclass(frozen=True)
class Row:
    """Medians over the steps, µs. caller: added to the step; worker: in the other thread; decode: the library's time."""

    mode: str
    n_tokens: int
    overlap: bool
    caller_us: float
    worker_us: float
    decode_us: float
    moves: float
    n_steps: int


def write_model(folder: Path) -> Path:
    sys.path.insert(0, str(ROOT / "tests"))
    families: Any = importlib.import_module("families")
    family = dataclasses.replace(
        families.FAMILIES["qwen3moe"],
        n_layer=N_LAYER,
        moe_layers=tuple(range(N_LAYER)),
        n_expert=N_EXPERT,
        n_used=N_USED,
    )
    return Path(families.cached_model(folder, family, expert_type="Q4_0", n_ff_exp=64, n_embd=128))


def measure(model: Model, mode: Mode, overlap: bool, n_steps: int, n_threads: int) -> Row:
    rng = np.random.default_rng(0)
    text = rng.integers(0, model.n_vocab, N_TEXT).tolist()
    with Context(model, n_ctx=512, n_threads=n_threads) as context:
        experts = context.experts
        assert experts is not None
        experts.set_slots(slots_for_share(block_sizes(experts), SHARE))
        residency = Residency(
            experts, make("moe-spac", experts.n_rows, experts.n_expert), max_moves=MAX_MOVES, overlap=overlap
        )
        taken: dict[str, list[float]] = {name: [] for name in ("caller", "worker", "decode", "moves")}
        for step in range(n_steps + n_steps // 4):
            before = residency.caller_seconds, residency.worker_seconds, residency.n_moves
            tokens = [text[(step + i) % N_TEXT] for i in range(mode.n_tokens)]
            if mode.guess_ms:
                residency.plan(n_expect=mode.n_tokens - 1)
                for token in tokens[:-1]:
                    residency.expect([token])
                    time.sleep(mode.guess_ms / 1e3)
            else:
                residency.plan()
            if context.n_past + mode.n_tokens > context.n_ctx:
                context.clear()
            residency.publish()
            start = time.perf_counter()
            context.decode(tokens, all_logits=True)
            decode = time.perf_counter() - start
            residency.observe(tokens)
            caller = residency.caller_seconds - before[0]
            residency.join()  # outside of what is measured, so that the worker's time belongs to this step
            after = caller, residency.worker_seconds - before[1], decode, residency.n_moves - before[2]
            if step >= n_steps // 4:
                for values, value in zip(taken.values(), after, strict=True):
                    values.append(value)
        residency.close()
    us = {name: 1e6 * float(np.median(values)) for name, values in taken.items()}
    moves = float(np.mean(taken["moves"]))
    caller, worker, decode = (round(us[name], 1) for name in ("caller", "worker", "decode"))
    return Row(mode.name, mode.n_tokens, overlap, caller, worker, decode, round(moves, 1), n_steps)


def machine() -> str:
    name = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    return f"{name}, {os.cpu_count()} cores, Python {platform.python_version()}, numpy {np.__version__}"


def commit() -> str:
    """What git says of this checkout, "" where there is none."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where the model is kept")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)
    capture_log()
    load = round(os.getloadavg()[0], 2)  # before this run: processes that others wanted to run, mean of a minute
    rows: list[Row] = []
    with Model(write_model(args.folder)) as model:
        print(
            f"{'mode':<28} {'n':>2} {'overlap':>7} {'caller µs':>10} {'worker µs':>10} {'decode µs':>10} {'moves':>6}"
        )
        for mode in MODES:
            for overlap in (False, True):
                row = measure(model, mode, overlap, args.steps, args.threads)
                rows.append(row)
                print(
                    f"{row.mode:<28} {row.n_tokens:>2} {row.overlap!s:>7} {row.caller_us:10.0f} {row.worker_us:10.0f} "
                    f"{row.decode_us:10.0f} {row.moves:6.1f}",
                    flush=True,
                )
    if args.out:
        result: dict[str, Any] = {
            "machine": machine(),
            "commit": commit(),
            "load": load,
            "command": "python scripts/bench_planning.py " + f"--steps {args.steps} --threads {args.threads}",
            "model": f"{N_LAYER} layers, {N_EXPERT} experts, {N_USED} a token, {SHARE:g} of them with a slot, random",
            "rows": [asdict(r) for r in rows],
        }
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
