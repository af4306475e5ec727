"""A change of batch width costs no new graph, and a kept graph is never a wrong one."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
import pytest

from conftest import Attached
from families import FAMILIES, N_VOCAB, cached_model
from lowlevel import EXACT, Context, decode, load_model, make_context
from moespac_llamacpp import native
from parity import in_stream, test_device

# on a GPU upstream's own kernels for other widths differ by more
TOLERANCE = (
    1e-3 if test_device().kind == "cpu" else 5e-2
)  # rounding gives 1e-5 in these F32 models; a stale graph reads another width's, or freed, memory
WIDTHS = range(1, 10)  # a draft of up to 8 and the last token

Array = np.ndarray[Any, Any]


class Twin:
    """An attached context, half of its experts resident, and a plain one that is fed the same tokens."""

    def __init__(
        self,
        attach: Callable[..., Attached],
        family: str = "qwen3moe",
        *,
        experts: dict[str, Any] | None = None,
        **options: Any,
    ):
        options = {"n_threads": 1, "n_ctx": 512} | options
        attached = attach(family, experts=experts, **options)
        self.ctx, self.experts = attached.ctx, attached.experts
        self.plain = make_context(attached.model, **(EXACT | options))
        self.rng = np.random.default_rng(5)
        self.n_past = 0
        self.fill()

    def fill(self) -> None:
        rows = [self.experts.row(i) for i in range(self.experts.n_rows)]
        self.experts.set_slots([r.n_expert // 2 if r.hybrid else 0 for r in rows])
        for r in rows:
            for expert in range(0, r.n_expert - 1, 2) if r.hybrid else ():
                self.experts.load(r.row, expert)
        self.experts.sync()
        self.experts.publish()

    @property
    def built(self) -> int:
        return self.experts.graph_stats()[1]

    @property
    def reused(self) -> int:
        return self.experts.graph_stats()[0]

    def step(self, n: int, outputs: str = "all") -> Array:
        tokens = [int(t) for t in self.rng.integers(3, N_VOCAB, n)]
        expected = decode(self.plain, tokens, self.n_past, outputs=outputs)
        logits = decode(self.ctx, tokens, self.n_past, outputs=outputs)
        self.n_past += n
        # on a GPU rounding may give a token other experts: then most of the others must agree
        largest = np.abs(logits - expected).max(axis=1)
        assert (largest.max() if test_device().kind == "cpu" else np.median(largest)) < TOLERANCE
        return logits

    def both(self, change: Callable[[Context], Any]) -> None:
        for ctx in (self.ctx, self.plain):
            change(ctx)

    def clear(self) -> None:
        self.both(Context.clear)
        self.n_past = 0

    def close(self) -> None:
        self.plain.close()


@pytest.fixture
def twin(attach: Callable[..., Attached]) -> Iterator[Twin]:
    twin = Twin(attach)
    yield twin
    twin.close()


def test_mixed_widths_build_no_new_graph_once_each_was_seen(twin: Twin) -> None:
    for n in WIDTHS:
        twin.step(n)
    built, reused = twin.built, twin.reused
    widths = [int(n) for n in twin.rng.integers(1, 10, 24)]
    for n in widths:
        twin.step(n)
    assert twin.n_past < 256  # the graph depends on the size of the KV cache in use, in steps of 256
    assert (twin.built, twin.reused) == (built, reused + len(widths))


def test_moves_build_no_new_graph(twin: Twin) -> None:
    for n in (1, 4, 9):
        twin.step(n)
    built = twin.built
    for expert in (1, 3, 5):
        for row in (0, 1):
            twin.experts.evict(row, expert - 1)
            twin.experts.load(row, expert)
        twin.experts.sync()
        assert twin.experts.publish() == 2
        for n in (9, 1, 4):
            twin.step(n)
    assert twin.built == built
    # in-stream, the slots are tensors of the context's graphs: each width's is built once more
    per_change = 3 if in_stream(twin.experts) else 0
    for i, slots in enumerate(([8, 8], [2, 3], [0, 0], [4, 4])):
        twin.experts.set_slots(slots)
        for n in (4, 1, 9, 9, 4, 1):
            twin.step(n)
        assert twin.built == built + (i + 1) * per_change


def test_without_the_cache_each_change_of_width_builds_one(attach: Callable[..., Attached]) -> None:
    cached, plain = Twin(attach), Twin(attach, experts={"cache_graphs": False})
    widths = [1, 4, 1, 9, 4, 1, 1, 4]
    logits: list[list[Array]] = [[], []]
    for parts, twin in zip(logits, (cached, plain), strict=True):
        for n in (1, 4, 9):
            twin.step(n)
        built = twin.built
        parts += [twin.step(n) for n in widths]
        assert twin.built - built == (0 if twin is cached else 7)
        twin.close()
    assert all((a == b).all() for a, b in zip(*logits, strict=True))


def test_prompts_in_between_do_not_cost_the_verify_widths_their_graphs(twin: Twin) -> None:
    for n in (1, 5, 40):
        twin.step(n)
    built = twin.built
    for n in (40, 1, 40, 5, 40, 40, 5, 1):
        twin.step(n)
    own = 4 if twin.experts.prompt_bytes()[1] else 0  # a prompt that is staged has a graph of its own (moe-prompt.h)
    assert twin.built == built + own


def test_more_widths_than_are_kept_stay_right(twin: Twin) -> None:
    for n in [*range(1, 25), *range(24, 0, -1), 1, 24, 2, 23]:
        if twin.n_past + n > 250:
            twin.clear()
        twin.step(n)


def test_a_rollback_between_widths_is_seen_by_kept_graphs(twin: Twin) -> None:
    """As after a verify batch whose tail was rejected."""
    for n in WIDTHS:
        twin.step(n)
    built = twin.built
    for n in (9, 1, 9, 4, 9, 9, 2):
        twin.step(n)
        keep = twin.n_past - n // 2
        twin.both(lambda ctx, keep=keep: ctx.rollback(keep))
        twin.n_past = keep
    assert twin.built == built


def test_a_context_shift_is_seen_by_kept_graphs(twin: Twin) -> None:
    """seq_add rotates the cached keys before the next decode: a graph of its own, on the context's own scheduler."""

    def shift(ctx: Context) -> None:
        assert llama_cpp.llama_memory_can_shift(ctx.memory)
        assert llama_cpp.llama_memory_seq_rm(ctx.memory, 0, 4, 12)
        llama_cpp.llama_memory_seq_add(ctx.memory, 0, 12, -1, -8)

    for n in (*WIDTHS, 40):
        twin.step(n)
    for n in (1, 9, 40, 4):
        twin.step(n)
        built = twin.built
        twin.both(shift)
        twin.n_past -= 8
        for m in (n, 1, 9, 4):
            twin.step(m)
        assert twin.built - built == (1 if n == 40 else 0)  # the shift takes the place of the context's own graph


def test_a_forgotten_shift_would_be_seen(twin: Twin) -> None:
    """Negative control for the test above."""
    twin.step(40)
    for ctx in (twin.ctx, twin.plain):
        llama_cpp.llama_memory_seq_rm(ctx.memory, 0, 4, 12)
    llama_cpp.llama_memory_seq_add(twin.ctx.memory, 0, 12, -1, -8)
    shifted, unshifted = decode(twin.ctx, [7, 8, 9], 32), decode(twin.plain, [7, 8, 9], 40)
    assert np.abs(shifted - unshifted).max() > 10 * TOLERANCE


def test_a_growing_context_rebuilds_and_stays_right(twin: Twin) -> None:
    for n in (1, 4, 40, 40, 40, 40, 40, 40):
        twin.step(n)
    assert twin.n_past == 245
    built = twin.built
    for n in (1, 4, 1, 4, 1):  # up to 256
        twin.step(n)
    assert twin.built == built
    for n in (1, 4, 1, 4, 1, 4):
        twin.step(n)
    assert twin.built == built + 2  # each width once
    twin.clear()
    for n in (1, 4, 1, 4):
        twin.step(n)
    assert twin.built == built + 4


def test_asking_for_fewer_logits_is_seen_by_kept_graphs(twin: Twin) -> None:
    for n in (1, 4, 9):
        for outputs in ("all", "last", "last", "all"):
            twin.step(n, outputs)


@pytest.mark.parametrize(
    ("family", "unified"),
    [("qwen3moe", True), ("qwen3moe", False), ("qwen35moe", True), ("qwen35moe", False)],
)
def test_sequences_share_a_width(root: Path, family: str, unified: bool) -> None:
    """The same number of tokens, split over sequences in different ways. In a child process: it must not abort this one."""
    path = cached_model(root, family)
    code = f"from pathlib import Path; import test_graphs; test_graphs.decode_sequences(Path({str(path)!r}), {unified})"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]


def decode_sequences(path: Path, unified: bool) -> None:
    options = EXACT | {"n_seq_max": 4, "kv_unified": unified, "n_threads": 1}
    past, rng = [0] * 4, np.random.default_rng(5)
    with load_model(path) as model, make_context(model, **options) as plain, make_context(model, **options) as ctx:
        experts = native.Experts(ctx.ptr)
        for seqs in (
            [0, 0, 0, 0],
            [1, 1, 1, 1],
            [2],
            [3, 3],
            [0, 1, 2, 3],
            [0],
            [0, 0, 0, 0],
            [1, 2],
            [3, 3],
            [0, 1, 2, 3],
        ):
            tokens = rng.integers(3, N_VOCAB, len(seqs)).tolist()
            logits = []
            for c in (plain, ctx):
                batch = llama_cpp.llama_batch_init(len(seqs), 0, 1)
                batch.n_tokens = len(seqs)
                for i, seq in enumerate(seqs):
                    batch.token[i], batch.pos[i], batch.n_seq_id[i] = tokens[i], past[seq] + seqs[:i].count(seq), 1
                    batch.seq_id[i][0], batch.logits[i] = seq, True
                assert llama_cpp.llama_decode(c.ptr, batch) == 0
                llama_cpp.llama_batch_free(batch)
                raw = llama_cpp.llama_get_logits(c.ptr)
                logits.append(np.ctypeslib.as_array(raw, shape=(len(seqs), N_VOCAB)).copy())
            for seq in seqs:
                past[seq] += 1
            assert np.abs(logits[0] - logits[1]).max() < TOLERANCE
            assert experts.counts().sum() == 2 * 2 * len(seqs)


def test_a_warm_up_does_not_poison_kept_graphs(twin: Twin) -> None:
    """It computes all experts (n_expert_used = n_expert) on upstream's path; afterwards hybrid again. (The plain context is not
    warmed up: upstream itself takes a warm-up's graph for the next decode of the same width.)"""
    for n in (1, 4):
        twin.step(n)
    for _ in range(2):
        calls = twin.experts.perf_total().n_calls
        llama_cpp.llama_set_warmup(twin.ctx.ptr, True)
        for n in (4, 1, 40, 4):
            warm = decode(twin.ctx, [5] * n, twin.n_past)
            twin.ctx.rollback(twin.n_past)
        assert twin.experts.perf_total().n_calls == calls
        llama_cpp.llama_set_warmup(twin.ctx.ptr, False)
        cold = decode(twin.ctx, [5] * 4, twin.n_past)
        twin.ctx.rollback(twin.n_past)
        assert np.abs(warm - cold).max() > 10 * TOLERANCE
        for n in (4, 4, 1, 1, 9, 40, 1):
            twin.step(n)
        assert twin.experts.perf_total().n_calls == calls + 2 * (1 + 6)  # two layers; the 40 took upstream's path


def test_attaching_in_warm_up_mode_finds_the_experts_used(attach: Callable[..., Attached], twin: Twin) -> None:
    twin.experts.detach()
    llama_cpp.llama_set_warmup(twin.ctx.ptr, True)
    twin.experts = native.Experts(twin.ctx.ptr)
    assert [r.n_expert_used for r in twin.experts.rows()] == [2, 2]
    llama_cpp.llama_set_warmup(twin.ctx.ptr, False)
    twin.fill()
    for n in (1, 9):
        twin.step(n)
    assert twin.experts.perf_total().n_hot_pairs > 0


def test_kept_graphs_go_with_the_feature(twin: Twin) -> None:
    for _ in range(2):
        for n in (1, 4, 40, 9):
            twin.step(n)
        twin.experts.detach()
        for n in (1, 4, 40, 9):
            twin.step(n)
        twin.experts = native.Experts(twin.ctx.ptr)
        twin.fill()


# --- LoRA -------------------------------------------------------------------------------------------------------------


def write_lora(path: Path, tensors: dict[str, tuple[int, int, int]], seed: int = 0) -> Path:
    """A LoRA adapter of rank 4: name -> (stack, rows, cols) of the tensor that it changes, stack 0 for a plain matrix."""
    rng = np.random.default_rng(seed)
    out = gguf.GGUFWriter(path, "qwen3moe")
    out.add_type("adapter")
    out.add_string("adapter.type", "lora")
    out.add_float32("adapter.lora.alpha", 4.0)
    for name, (stack, rows, cols) in tensors.items():
        lead = (stack,) if stack else ()
        out.add_tensor(f"{name}.lora_a", rng.standard_normal((*lead, 4, cols), np.float32) / np.float32(np.sqrt(cols)))
        out.add_tensor(f"{name}.lora_b", rng.standard_normal((*lead, rows, 4), np.float32))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file(progress=False)
    out.close()
    return path


def set_lora(ctx: Context, *adapters: Any) -> None:
    pointers = (ctypes.POINTER(ctypes.c_void_p) * max(1, len(adapters)))(*adapters)
    scales = (ctypes.c_float * max(1, len(adapters)))(*[1.0] * len(adapters))
    assert llama_cpp.llama_set_adapters_lora(ctx.ptr, pointers, len(adapters), scales) == 0  # type: ignore[arg-type]


@pytest.mark.parametrize("what", ["experts", "attention", "router"])
def test_an_adapter_is_never_left_out(twin: Twin, tmp_path: Path, what: str) -> None:
    """On the experts of a layer: that layer takes upstream's path and says why. Elsewhere: hybrid as before."""
    assert FAMILIES["qwen3moe"].n_expert == 8
    tensors = {
        "experts": {"blk.1.ffn_up_exps.weight": (8, 256, 256), "blk.1.ffn_down_exps.weight": (8, 256, 256)},
        "attention": {"blk.0.attn_q.weight": (0, 256, 256)},
        "router": {"blk.1.ffn_gate_inp.weight": (0, 8, 256)},
    }[what]
    path = write_lora(tmp_path / "lora.gguf", tensors)
    adapter = llama_cpp.llama_adapter_lora_init(twin.ctx.model.ptr, str(path).encode())
    assert adapter
    for n in (1, 9, 40):
        twin.step(n)
    for _ in range(2):
        plain = twin.step(9)
        twin.both(lambda ctx: (ctx.rollback(twin.n_past - 9), set_lora(ctx, adapter)))
        twin.n_past -= 9
        twin.rng = np.random.default_rng(7)
        changed = twin.step(9)
        assert np.abs(plain - changed).max() > 10 * TOLERANCE
        before = [twin.experts.perf(row).n_calls for row in (0, 1)]
        for n in (1, 9, 40):
            twin.step(n)
        calls = [twin.experts.perf(row).n_calls - b for row, b in zip((0, 1), before, strict=True)]
        rows = twin.experts.rows()
        if what == "experts":
            assert calls == [2, 0]
            assert [r.hybrid for r in rows] == [True, False]
            assert rows[0].fallback == "" and "LoRA" in rows[1].fallback
        else:
            assert calls == [2, 2]
            assert all(r.hybrid for r in rows)
        assert twin.experts.counts().sum(axis=1).tolist() == [80, 80]
        twin.both(set_lora)
        for n in (1, 9, 40):
            twin.step(n)
        assert all(r.hybrid and r.fallback == "" for r in twin.experts.rows())
        twin.step(1)
        assert twin.experts.perf(1).n_calls > before[1]
    twin.experts.detach()
    twin.close()
    twin.ctx.close()
    llama_cpp.llama_adapter_lora_free(adapter)


def test_the_graph_counters_do_not_depend_on_upstreams(twin: Twin) -> None:
    for _ in range(3):
        twin.step(4)
    before = (twin.reused, twin.built)
    llama_cpp.llama_perf_context_reset(twin.ctx.ptr)
    twin.step(4)
    assert (twin.reused, twin.built) == (before[0] + 1, before[1])
