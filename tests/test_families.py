"""The tiny models of families.py are fit for parity tests: healthy, diverse in routing, and what their family says."""

from __future__ import annotations

import ctypes
import dataclasses
from pathlib import Path

import gguf
import numpy as np
import pytest

llama_cpp = pytest.importorskip("llama_cpp")

from families import FAMILIES, N_VOCAB, Family, cached_model, row_type  # noqa: E402
from lowlevel import (  # noqa: E402
    EXACT,
    SELECTION_SCORES,
    Array,
    Capture,
    decode,
    decode_split,
    load_model,
    make_context,
    selection_gaps,
)

EVERY = pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
MOE = pytest.mark.parametrize("family", [f for f in FAMILIES.values() if f.n_expert], ids=lambda f: f.name)
TOKENS = np.random.default_rng(1).integers(3, N_VOCAB, 32).tolist()
# IQ1 and IQ2 work too, but ggml needs up to 10 s to make their tables
QUANT_TYPES = "F16 BF16 Q8_0 Q4_0 Q5_0 Q2_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS IQ3_S MXFP4".split()
ACTIVATION = {
    "silu": "ffn_moe_swiglu",
    "gelu": "ffn_moe_geglu",
    "swiglu_oai": "ffn_moe_swiglu_oai",
    "relu": "ffn_moe_reglu",
    "relu_sqr": "ffn_moe_relu_sqr",
}


def run(path: Path, n_tokens: int = 32, capture: Capture | None = None) -> Array:
    with load_model(path) as model, make_context(model, n_threads=1, cb=capture, **EXACT) as ctx:
        return decode(ctx, TOKENS[:n_tokens])


@EVERY
def test_every_family_decodes_with_healthy_logits(family: Family, root: Path) -> None:
    logits = run(cached_model(root, family), 9)
    assert logits.shape == (9, N_VOCAB)
    assert np.isfinite(logits).all()
    assert 1 < logits.std() < 5
    assert len(set(logits.argmax(axis=1).tolist())) > 3


@MOE
def test_a_family_computes_what_it_declares(family: Family, root: Path) -> None:
    bias = ("ffn_moe_gate_biased", "ffn_moe_up_biased", "ffn_moe_down_biased")
    capture = Capture(*ACTIVATION.values(), *bias, "ffn_moe_gate_up", "ffn_moe_down_scaled", "l_out")
    run(cached_model(root, family), 4, capture)
    seen = {name.rpartition("-")[0] for name in capture.tensors}
    assert ACTIVATION[family.gate] in seen
    assert not seen & (set(ACTIVATION.values()) - {ACTIVATION[family.gate]})
    assert ("ffn_moe_gate_up" in seen) == family.merged
    assert ("ffn_moe_down_scaled" in seen) == family.down_scale
    assert seen >= set(bias) if family.bias else not seen & set(bias)
    for il in range(family.n_layer):
        calls = len(capture.tensors.get(f"{ACTIVATION[family.gate]}-{il}", []))
        assert calls == (family.blocks if il in family.moe_layers else 0)
    streams = [float(np.sqrt(np.mean(a[0] ** 2))) for n, a in capture.tensors.items() if n.startswith("l_out")]
    assert streams and all(0.5 < rms < 5 for rms in streams), streams


@MOE
def test_routers_choose_diverse_experts(family: Family, root: Path) -> None:
    capture = Capture("ffn_moe_topk")
    run(cached_model(root, family), 32, capture)
    assert sorted(capture.tensors) == [f"ffn_moe_topk-{il}" for il in family.moe_layers]
    for blocks in capture.tensors.values():
        assert len(blocks) == family.blocks
        ids = blocks[0]
        assert ids.shape == (32, family.n_used)
        assert ids.min() >= 0 and ids.max() < family.n_expert
        assert all(len(set(row)) == family.n_used for row in ids.tolist())
        assert len(np.unique(ids)) >= family.n_expert // 2
        assert len({tuple(sorted(row)) for row in ids.tolist()}) >= min(8, family.n_expert // 2)


@MOE
def test_selection_gaps_are_those_of_the_chosen_experts(family: Family, root: Path) -> None:
    capture = Capture(*SELECTION_SCORES, "ffn_moe_topk")
    run(cached_model(root, family), 32, capture)
    for il in family.moe_layers:
        gaps = selection_gaps(capture.tensors, il, family.n_used, family.groups)
        assert gaps.shape == (32,) and (gaps >= 0).all() and np.median(gaps) > 1e-2
        scores = next(capture.tensors[k][0] for n in SELECTION_SCORES if (k := f"{n}-{il}") in capture.tensors)
        best = np.sort(np.argsort(-scores, axis=1)[:, : family.n_used], axis=1)
        assert (best == np.sort(capture.tensors[f"ffn_moe_topk-{il}"][0], axis=1)).all()


@EVERY
def test_logits_do_not_depend_on_the_batch_split(family: Family, root: Path) -> None:
    tolerance = 5e-3 if family.gate == "gelu" else 1e-4  # ggml-cpu's GELU is a table of F16
    with load_model(cached_model(root, family)) as model, make_context(model, n_threads=1, **EXACT) as ctx:
        whole = decode(ctx, TOKENS)
        ctx.clear()
        again = decode(ctx, TOKENS)
        ctx.clear()
        single = decode_split(ctx, TOKENS, [1] * 32)
        ctx.clear()
        mixed = decode_split(ctx, TOKENS, [9, 4, 1, 17, 1])
        ctx.clear()
        last = decode(ctx, TOKENS, outputs="last")
    assert (whole == again).all()
    assert np.abs(whole - single).max() < tolerance
    assert np.abs(whole - mixed).max() < tolerance
    assert np.abs(whole[-1:] - last).max() < tolerance


@pytest.mark.parametrize("name", ["gemma4", "qwen35moe", "deepseek2-v3"])
def test_merged_and_separate_gate_up_hold_the_same_weights(name: str, root: Path) -> None:
    logits = [
        run(cached_model(root, dataclasses.replace(FAMILIES[name], merged=merged), expert_type="Q4_0"))
        for merged in (False, True)
    ]
    assert (logits[0] == logits[1]).all()


@pytest.mark.parametrize("expert_type", QUANT_TYPES)
@pytest.mark.parametrize("n_ff_exp", [256, 96])
def test_quant_types_and_their_row_fallback(expert_type: str, n_ff_exp: int, root: Path) -> None:
    path = cached_model(root, "qwen3moe", expert_type=expert_type, n_ff_exp=n_ff_exp)
    types = {t.name: t.tensor_type for t in gguf.GGUFReader(path).tensors}
    assert types["blk.0.ffn_up_exps.weight"] == gguf.GGMLQuantizationType[expert_type]
    assert types["blk.1.ffn_down_exps.weight"] == row_type(expert_type, n_ff_exp)
    logits = run(path, 9)
    assert np.isfinite(logits).all() and logits.std() > 1


def test_types_can_differ_between_layers_and_matrices(root: Path) -> None:
    path = cached_model(
        root, "mixtral", expert_type=("Q4_K", "Q5_K"), down_type=("Q6_K", "Q4_K"), dense_type="F16", n_embd=512
    )
    types = {t.name: t.tensor_type.name for t in gguf.GGUFReader(path).tensors}
    assert [types[f"blk.{il}.ffn_gate_exps.weight"] for il in (0, 1)] == ["Q4_K", "Q5_K"]
    assert [types[f"blk.{il}.ffn_down_exps.weight"] for il in (0, 1)] == ["Q6_K", "Q4_K"]
    assert types["blk.0.attn_q.weight"] == "F16" and types["blk.0.ffn_gate_inp.weight"] == "F32"
    assert np.isfinite(run(path, 9)).all()


def test_an_undefined_row_fallback_is_refused() -> None:
    assert row_type("Q4_K", 352) == gguf.GGMLQuantizationType.Q5_0
    assert row_type("Q6_K", 40) == gguf.GGMLQuantizationType.F16
    with pytest.raises(ValueError, match="NVFP4"):
        row_type("NVFP4", 96)


def test_the_vocabulary_spells_ascii(root: Path) -> None:
    text = b"the answer is 42\n"
    with load_model(cached_model(root, "qwen3")) as model:
        vocab = llama_cpp.llama_model_get_vocab(model.ptr)
        ids = (ctypes.c_int32 * 64)()
        n = llama_cpp.llama_tokenize(vocab, text, len(text), ids, 64, False, False)
        out = ctypes.create_string_buffer(64)
        length = llama_cpp.llama_detokenize(vocab, ids, n, out, 64, True, False)
    assert 0 < n < len(text) + 1 and 0 not in ids[:n]
    assert out.raw[:length].strip() == text.strip()


def test_errors_are_told(root: Path) -> None:
    bad = root / "bad.gguf"
    bad.write_bytes(b"GGUF but no more")
    with pytest.raises(RuntimeError, match=r"bad\.gguf: .*\w"):
        load_model(bad)
    with load_model(cached_model(root, "qwen3")) as model, pytest.raises(TypeError, match="n_thread_typo"):
        make_context(model, n_thread_typo=1)
