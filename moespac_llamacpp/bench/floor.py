"""How fast a run could be at best: the bytes that it must read, over what the memories give, all used in parallel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moespac_llamacpp.bench.ledger import Weights


def floor_seconds(
    detail: Mapping[str, Any], weights: Weights, draft: Weights | None, bandwidths: Mapping[str, Any], threads: int
) -> float:
    """Least seconds for a run's generation, prompt not included.

    Each decode reads the dense weights and the distinct experts of its batch once: resident ones from the device's memory, cold
    ones either by the CPU from host memory or over the link, at the sum of both rates. Device and cold part run at the same time.
    A draft's decodes come before that, one for each guess, each reading the draft once. KV and activations are left out."""
    device = bandwidths["device"]
    hot = (detail["n_steps"] * weights.dense + detail["hot_bytes"]) / device
    cold = detail["cold_bytes"] / (bandwidths["host"][str(threads)] + bandwidths["link"])
    drafting = detail["n_drafted"] * draft.dense / device if draft else 0.0
    return float(drafting + max(hot, cold))
