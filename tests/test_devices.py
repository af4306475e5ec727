"""The device lane uses only ggml's public backend API: it runs on devices with memory of their own that are not CUDA."""

from __future__ import annotations

from pathlib import Path

import pytest

from families import cached_model
from moespac_llamacpp import native
from native_build import build_rpc, find_source, or_skip
from parity import Pair, pair
from rpc_device import start_server

TOKENS = [5, 17, 90, 33, 71, 8, 64, 102, 29]


def exercise(p: Pair) -> None:
    """Compare at all widths, move everything, compare again."""
    for share in (0.5, 1.0, 0.17):
        p.fill(share)
        n_hot = 0
        for n in (1, 4, 9):
            d = p.compare(TOKENS[:n])
            n_hot += d.n_hot
            assert d.op < 1e-3 and d.logits < 1e-2, (share, n, d)
        assert n_hot > 0, share


@pytest.mark.parametrize("family", ["qwen3moe", "gpt-oss", "gemma4"])
def test_experts_can_live_on_a_remote_device(tmp_path: Path, family: str) -> None:
    library = or_skip(build_rpc, or_skip(find_source))
    path = cached_model(tmp_path, family, expert_type="Q4_K", down_type="Q6_K")
    with start_server(library) as device, pair(path, family, native.device_at(device)) as p:
        exercise(p)
