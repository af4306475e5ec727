"""Where the time of a step goes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def step_parts(run: Mapping[str, Any]) -> dict[str, float]:
    """Where the time of a step goes, ms. From a run with clocks on.

    Portable execution: starting the device lane, the cold lane, waiting for the device, as the CPU sees them. In-stream, which
    has us["hot"]: the hot lane and the wait for the CPU, as the device sees them; the cold lane runs beside both."""
    n, us = max(1, run["n_steps"]), run["us"]
    in_stream = us.get("hot", 0) > 0
    ms = {
        "draft": 1e3 * run["draft_seconds"],
        "device lane": us["hot" if in_stream else "launch"] / 1e3,
        "cold": 0.0 if in_stream else us["cold"] / 1e3,
        "wait": us["wait"] / 1e3,
        "rest of verify": 1e3 * run["verify_seconds"] - us["total"] / 1e3,
        "accept": 1e3 * run["accept_seconds"],
        "moves, policy": 1e3 * (run["seconds"] - run["draft_seconds"] - run["verify_seconds"] - run["accept_seconds"]),
    }
    return {name: max(0.0, value) / n for name, value in ms.items()}
