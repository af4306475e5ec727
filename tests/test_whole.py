"""Layers whose experts are all resident take upstream's path, with the slots as their weights: upstream's results, at any width.

On the CPU they are equal bit for bit: the same operations on the same weights. MOESPAC_TEST_DEVICE=CUDA0 compares with upstream's
path on the host, within what test_parity allows.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

from conftest import Attached
from families import FAMILIES, N_VOCAB, cached_model
from lowlevel import decode
from moespac_llamacpp import native
from parity import Pair, pair, test_device
from test_graphs import set_lora, write_lora
from test_parity import COVERED, tolerances

Array = np.ndarray[Any, Any]


def tokens(n: int, seed: int = 0) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(3, N_VOCAB, n)]


def compare(p: Pair, limit: float, widths: tuple[int, ...] = (1, 9, 32, 40)) -> None:
    for n in widths:
        d = p.compare(tokens(n))
        if test_device().kind == "cpu":
            assert d.logits == 0.0 and d.n_rerouted == 0, (n, d)
        else:
            assert d.logits <= limit, (n, d)
        n_pairs = int(p.experts.counts().sum())
        perf = p.experts.perf_total()
        assert (perf.n_hot_pairs, perf.n_cold_pairs) == (n_pairs, 0) and n_pairs > 0
        assert perf.hit_rate == 1.0


@pytest.mark.parametrize("types", [("F32", "F32"), ("Q4_K", "Q6_K")], ids="-".join)
@pytest.mark.parametrize("name", [f for f in COVERED if not FAMILIES[f].repeats])
def test_whole_layers_are_upstreams_own(root: Path, name: str, types: tuple[str, str]) -> None:
    path = cached_model(root, name, expert_type=types[0], down_type=types[1])
    limit = tolerances(path, name, types[0], test_device())[1]
    with pair(path, name) as p:
        p.fill(1.0)
        assert all(r.whole and r.hybrid and not r.in_stream and r.portable == "" for r in p.experts.rows())
        compare(p, limit)


@pytest.mark.parametrize("execution", ["portable", "in-stream"])
def test_a_layer_is_whole_as_long_as_every_expert_is_there(root: Path, execution: str) -> None:
    path = cached_model(root, "qwen3moe")
    limit = tolerances(path, "qwen3moe", "F32", test_device())[0]
    with pair(path, "qwen3moe", execution=execution) as p:
        p.fill(1.0)
        for _ in range(2):
            compare(p, 1.0, (9,))
            p.experts.evict(1, 3)
            first, second = p.experts.rows()
            assert first.whole and not second.whole and second.in_stream == (execution == "in-stream")
            d = p.compare(tokens(9))
            assert (
                d.logits <= max(limit, 2e-5)
                and p.experts.perf(1).n_cold_pairs > 0
                and p.experts.perf(0).n_cold_pairs == 0
            )
            p.experts.load(1, 3)
            p.experts.sync()
            assert not p.experts.row(1).whole, "it has not been published"
            p.experts.publish()
            assert p.experts.row(1).whole


def test_residents_of_another_split_keep_their_slots_and_the_layer_stays_hybrid(root: Path) -> None:
    with pair(cached_model(root, "qwen3moe"), "qwen3moe") as p:
        p.experts.set_slots([2, 2])
        for expert in (5, 6):
            p.experts.load(0, expert)
        p.experts.sync()
        p.experts.publish()
        p.experts.set_slots([8, 8])
        for expert in (0, 1, 2, 3, 4, 7):
            p.experts.load(0, expert)
        p.experts.sync()
        p.experts.publish()
        assert not p.experts.row(0).whole, "experts 5 and 6 lie in slots 0 and 1"
        d = p.compare(tokens(9))
        assert p.experts.perf(0).n_cold_pairs == 0 and d.op < 1e-2


def test_the_switch_keeps_layers_hybrid(root: Path) -> None:
    with pair(cached_model(root, "qwen3moe"), "qwen3moe", whole_layers=False) as p:
        p.fill(1.0)
        assert not any(r.whole for r in p.experts.rows())


def test_an_adapter_on_whole_layers_is_not_left_out(attach: Callable[..., Attached], tmp_path: Path) -> None:
    """It is found by the model's own tensors: the layer takes upstream's path on the host then."""
    path = write_lora(
        tmp_path / "lora.gguf", {"blk.1.ffn_up_exps.weight": (8, 256, 256), "blk.1.ffn_down_exps.weight": (8, 256, 256)}
    )
    logits: list[list[Array]] = []
    for resident in (False, True):
        a = attach()
        if resident:
            a.experts.set_slots([8, 8])
            for row in (0, 1):
                for expert in range(8):
                    a.experts.load(row, expert)
            a.experts.sync()
            a.experts.publish()
            assert all(r.whole for r in a.experts.rows())
        adapter = llama_cpp.llama_adapter_lora_init(a.model.ptr, str(path).encode())
        assert adapter
        logits.append([decode(a.ctx, tokens(9))])
        a.ctx.clear()
        set_lora(a.ctx, adapter)
        logits[-1].append(decode(a.ctx, tokens(9)))
        a.ctx.clear()
        set_lora(a.ctx)
        logits[-1].append(decode(a.ctx, tokens(9)))
    for without, with_slots in zip(*logits, strict=True):
        assert np.median(np.abs(without - with_slots).max(axis=1)) < 2e-2
    assert np.abs(logits[1][0] - logits[1][1]).max() > 0.1, "the adapter changes something"
    assert np.array_equal(logits[1][0], logits[1][2])


def test_routers_of_whole_layers_are_observed(root: Path) -> None:
    with pair(cached_model(root, "qwen3moe"), "qwen3moe") as p:
        p.fill(1.0)
        heard: list[tuple[int, int]] = []
        p.experts.set_router_callback(lambda row, ids, weights: heard.append((row, len(ids))))
        decode(p.hybrid, tokens(9))
        assert heard == [(0, 9), (1, 9)]
        assert p.experts.choices()[0].min() >= 0
        assert p.experts.states_table().min() == native.RESIDENT
