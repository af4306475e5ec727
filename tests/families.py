"""Tiny random GGUF models, one per MoE architecture family, for parity tests.

Each model has the tensors and metadata that upstream's `src/models/<arch>.cpp` asks for, and weights scaled so that the
residual stream stays O(1), the logits spread over a few units and different tokens choose different experts. A tensor's
values depend only on its name and the seed: the same family in two quant types holds the same weights, and a merged
gate_up tensor holds the rows of the separate ones.

    path = write_model("tiny.gguf", "qwen3moe", expert_type="Q4_K", down_type="Q6_K")
    split = dataclasses.replace(FAMILIES["gemma4"], merged=False)      # variants: any field of a Family
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as GGMLType

N_VOCAB = 128
N_CTX = 512
HEAD = 64  # size of an attention head in every family
N_FF_DENSE = 256
EPS = 1e-5

SOFTMAX, SIGMOID = 1, 2  # llama_expert_gating_func_type

# src/llama-quant.cpp 405-417: what llama.cpp stores when a row is no multiple of the block
ROW_FALLBACK = {
    **dict.fromkeys(("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_XS"), "IQ4_NL"),
    **dict.fromkeys(("Q2_K", "Q3_K", "TQ1_0", "TQ2_0"), "Q4_0"),
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
}

Array = np.ndarray[Any, Any]
Types = str | Sequence[str]  # one type, or one per MoE layer (cycled)


@dataclass(frozen=True)
class Family:
    """One architecture family. `hybrid` says that its MoE layers are expected to run hybrid; if not, `fallback` is a
    word that the logged reason should contain (empty for a model without experts)."""

    name: str
    arch: str
    build: Callable[[ModelWriter], None]
    gate: str = "silu"
    merged: bool = False
    bias: bool = False
    n_expert: int = 8
    n_used: int = 2
    n_layer: int = 2
    moe_layers: tuple[int, ...] = (0, 1)
    hybrid: bool = True
    fallback: str = ""
    blocks: int = 1  # calls of build_moe_ffn per MoE layer
    groups: tuple[int, int] = (1, 1)  # expert groups, groups used
    down_scale: bool = False  # per-expert scale on down (ffn_down_exps.scale)
    repeats: bool = False  # a token may choose an expert twice: wrong in upstream's batched CUDA kernels
    recurrent: bool = False


# --- quantising through ggml ------------------------------------------------------------------------------------------


@cache
def ggml_base() -> ctypes.CDLL:
    """libggml-base as shipped with the installed llama_cpp (found without importing it)."""
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("llama_cpp is not installed")
    lib_dir = Path(next(iter(spec.submodule_search_locations))) / "lib"
    path = next((p for p in sorted(lib_dir.glob("*ggml-base*")) if p.suffix in (".so", ".dylib", ".dll")), None)
    if path is None:
        raise FileNotFoundError(f"no ggml-base library in {lib_dir}")
    lib = ctypes.CDLL(str(path))
    lib.ggml_quantize_chunk.restype = ctypes.c_size_t
    lib.ggml_quantize_chunk.argtypes = [
        ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p,
    ]  # fmt: skip
    lib.ggml_quantize_requires_imatrix.restype = ctypes.c_bool
    lib.ggml_quantize_requires_imatrix.argtypes = [ctypes.c_int]
    return lib


def row_type(name: str, n_per_row: int) -> GGMLType:
    """The type that llama.cpp would store for rows of this length: `name`, or its fallback.

    Raises ValueError when no type is defined (as llama-quant.cpp throws)."""
    wanted = GGMLType[name]
    if n_per_row % gguf.GGML_QUANT_SIZES[wanted][0] == 0:
        return wanted
    if name not in ROW_FALLBACK:
        raise ValueError(f"rows of {n_per_row} cannot be {name}")
    smaller = GGMLType[ROW_FALLBACK[name]]
    return smaller if n_per_row % gguf.GGML_QUANT_SIZES[smaller][0] == 0 else GGMLType.F16


def quantize(values: Array, kind: GGMLType) -> Array:
    """float32 [..., n] -> uint8 [..., bytes per row] by ggml's quantiser, with a flat importance where it needs one."""
    rows = np.ascontiguousarray(values, np.float32).reshape(-1, values.shape[-1])
    n_rows, n = rows.shape
    block, size = gguf.GGML_QUANT_SIZES[kind]
    out = np.empty((n_rows, n // block * size), np.uint8)
    lib = ggml_base()
    flat = np.ones(n, np.float32) if lib.ggml_quantize_requires_imatrix(int(kind)) else None
    written = lib.ggml_quantize_chunk(
        int(kind), rows.ctypes.data, out.ctypes.data, 0, n_rows, n, None if flat is None else flat.ctypes.data
    )
    if written != out.nbytes:
        raise RuntimeError(f"ggml_quantize_chunk({kind.name}) wrote {written} bytes of {out.nbytes}")
    return out.reshape(*values.shape[:-1], -1)


# --- writing ----------------------------------------------------------------------------------------------------------


class ModelWriter:
    """Adds tensors by name, with values drawn from (seed, name). Shapes are numpy's: [rows, cols], cols contiguous."""

    def __init__(
        self, path: Path, family: Family, expert_type: Types, down_type: Types | None, dense_type: str,
        n_ff_exp: int, n_embd: int, seed: int,
    ) -> None:  # fmt: skip
        self.family = family
        self.n_embd, self.n_ff_exp = n_embd, n_ff_exp
        self.n_head, self.n_head_kv = n_embd // HEAD, max(1, n_embd // HEAD // 2)
        self._expert_type = expert_type
        self._down_type = expert_type if down_type is None else down_type
        self._dense_type = dense_type
        self._seed = seed
        self.out = gguf.GGUFWriter(path, family.arch)

    def kv(self, **values: bool | int | float | str | Sequence[Any]) -> None:
        """Metadata under the architecture's name; `__` in a key stands for a dot."""
        for key, value in values.items():
            name = f"{self.family.arch}.{key.replace('__', '.')}"
            if isinstance(value, bool):
                self.out.add_bool(name, value)
            elif isinstance(value, int):
                self.out.add_uint32(name, value)
            elif isinstance(value, float):
                self.out.add_float32(name, value)
            elif isinstance(value, str):
                self.out.add_string(name, value)
            else:
                self.out.add_array(name, list(value))

    def normal(self, name: str, *shape: int) -> Array:
        rng = np.random.default_rng([self._seed, zlib.crc32(name.encode())])
        return rng.standard_normal(shape, np.float32)

    def add(self, name: str, values: Array, kind: str = "F32") -> None:
        ggml_type = row_type(kind, values.shape[-1])
        self.out.add_tensor(name, quantize(values, ggml_type), raw_dtype=ggml_type)

    def norm(self, name: str, n: int, mean: float = 1.0) -> None:
        self.add(name, mean * (1 + 0.1 * self.normal(name, n)))

    def vector(self, name: str, *shape: int, std: float = 0.1, mean: float = 0.0) -> None:
        self.add(name, mean + std * self.normal(name, *shape))

    def matrix(self, name: str, rows: int, cols: int, *, gain: float = 1.0, stack: int = 0) -> None:
        """A dense matrix that turns an input of RMS 1 into an output of RMS `gain`; `stack` > 0: that many of them."""
        shape = (stack, rows, cols) if stack else (rows, cols)
        self.add(name, self.normal(name, *shape) * np.float32(gain / np.sqrt(cols)), self._dense_type)

    def expert_values(self, name: str, n: int, rows: int, cols: int, gain: float) -> Array:
        values = self.normal(name, n, rows, cols)
        values *= gain / np.sqrt(cols)
        return values

    def type_at(self, types: Types, il: int) -> str:
        return types if isinstance(types, str) else types[self.family.moe_layers.index(il) % len(types)]

    def moe(self, il: int, *, hidden: float = 1.0, down: float = 2.0, router: float = 1.5, gated: bool = True) -> None:
        """Router (F32) and routed experts of layer `il`; the keywords are gains (router: spread of its logits)."""
        f, p = self.family, f"blk.{il}."
        n, d, ff = f.n_expert, self.n_embd, self.n_ff_exp
        self.vector(p + "ffn_gate_inp.weight", n, d, std=router / np.sqrt(d))
        self.expert_matrices(il, "exps", n, ff, hidden=hidden, down=down, gated=gated)
        if f.bias:
            self.vector(p + "ffn_gate_inp.bias", n, std=0.5)
            self.vector(p + "ffn_gate_exps.bias", n, ff, std=0.5)
            self.vector(p + "ffn_up_exps.bias", n, ff, std=0.5)
            self.vector(p + "ffn_down_exps.bias", n, d, std=0.2)
        if f.down_scale:
            self.add(p + "ffn_down_exps.scale", np.exp(0.5 * self.normal(p + "ffn_down_exps.scale", n)))

    def expert_matrices(
        self, il: int, suffix: str, n: int, ff: int, *, hidden: float, down: float, gated: bool = True
    ) -> None:
        p, d = f"blk.{il}.ffn_", self.n_embd
        kind, down_kind = self.type_at(self._expert_type, il), self.type_at(self._down_type, il)
        up = self.expert_values(f"{p}up_{suffix}", n, ff, d, hidden)
        gate = self.expert_values(f"{p}gate_{suffix}", n, ff, d, hidden) if gated else None
        if gate is not None and self.family.merged:
            self.add(f"{p}gate_up_{suffix}.weight", np.concatenate([gate, up], axis=1), kind)
        else:
            if gate is not None:
                self.add(f"{p}gate_{suffix}.weight", gate, kind)
            self.add(f"{p}up_{suffix}.weight", up, kind)
        self.add(f"{p}down_{suffix}.weight", self.expert_values(f"{p}down_{suffix}", n, d, ff, down), down_kind)

    def ffn(self, il: int, n_ff: int, *, suffix: str = "", gated: bool = True, down: float = 1.0) -> None:
        """A dense FFN, or with suffix `_shexp` the shared expert."""
        p = f"blk.{il}.ffn_"
        if gated:
            self.matrix(f"{p}gate{suffix}.weight", n_ff, self.n_embd)
        self.matrix(f"{p}up{suffix}.weight", n_ff, self.n_embd)
        self.matrix(f"{p}down{suffix}.weight", self.n_embd, n_ff, gain=down)

    def attention(self, il: int, *, bias: bool = False, qk_norm: float = 0.0, q_parts: int = 1) -> None:
        """attn_norm, q, k, v, output. `qk_norm`: mean of the q and k norms (0: none); `q_parts` 2: q and its gate."""
        p, d = f"blk.{il}.attn_", self.n_embd
        n_q, n_kv = self.n_head * HEAD, self.n_head_kv * HEAD
        self.norm(p + "norm.weight", d)
        for name, rows in (("q", n_q * q_parts), ("k", n_kv), ("v", n_kv)):
            self.matrix(f"{p}{name}.weight", rows, d)
            if bias:
                self.vector(f"{p}{name}.bias", rows)
        self.matrix(p + "output.weight", d, n_q)
        if qk_norm:
            self.norm(p + "q_norm.weight", HEAD, qk_norm)
            self.norm(p + "k_norm.weight", HEAD, qk_norm)

    def start(self, *, embd_std: float = 1.0, output_gain: float = 2.0) -> None:
        """Vocabulary, the metadata that every architecture has, embeddings and head."""
        f, d = self.family, self.n_embd
        add_vocab(self.out)
        self.kv(
            vocab_size=N_VOCAB, context_length=N_CTX, embedding_length=d, block_count=f.n_layer,
            attention__head_count=self.n_head, attention__key_length=HEAD, attention__value_length=HEAD,
            attention__layer_norm_rms_epsilon=EPS, rope__freq_base=10000.0,
        )  # fmt: skip
        if f.n_expert:
            self.kv(expert_count=f.n_expert, expert_used_count=f.n_used, expert_feed_forward_length=self.n_ff_exp)
        self.vector("token_embd.weight", N_VOCAB, d, std=embd_std)
        self.norm("output_norm.weight", d)
        self.matrix("output.weight", N_VOCAB, d, gain=output_gain)


def add_vocab(out: gguf.GGUFWriter) -> None:
    """A SentencePiece vocabulary of 128 tokens that can spell ASCII (anything else has no byte token and throws)."""
    words = ["▁", "▁the", "▁a", "▁of", "▁and", "▁to", "▁in", "▁is", "ing", "ed", "er", "th", "an", "on", "re", "at"]
    words += ["st", "en", "or", "it", "al", "ar", "es", "is", "ou", "le", "nd", "ly", "ion"]
    byte_tokens = [f"<0x{b:02X}>" for b in (0x0A, *range(0x20, 0x7F))]
    tokens = ["<unk>", "<s>", "</s>", *byte_tokens, *words]
    kinds = [gguf.TokenType.UNKNOWN, *[gguf.TokenType.CONTROL] * 2]
    kinds += [gguf.TokenType.BYTE] * len(byte_tokens) + [gguf.TokenType.NORMAL] * len(words)
    assert len(tokens) == len(kinds) == N_VOCAB, len(tokens)
    out.add_tokenizer_model("llama")
    out.add_token_list(tokens)
    out.add_token_scores([0.0] * 3 + [-float(i) for i in range(N_VOCAB - 3)])
    out.add_token_types([int(k) for k in kinds])
    out.add_bos_token_id(1)
    out.add_eos_token_id(2)
    out.add_unk_token_id(0)


# --- the families -----------------------------------------------------------------------------------------------------


def build_qwen2moe(w: ModelWriter) -> None:
    # expert weights are not renormalised (models/qwen2moe.cpp 146): a larger down gain makes up for it
    w.start()
    w.kv(attention__head_count_kv=w.n_head_kv, feed_forward_length=N_FF_DENSE, expert_shared_feed_forward_length=128)
    for il in range(w.family.n_layer):
        w.attention(il, bias=True)
        w.norm(f"blk.{il}.ffn_norm.weight", w.n_embd)
        w.moe(il, down=4.0)
        w.vector(f"blk.{il}.ffn_gate_inp_shexp.weight", w.n_embd, std=1 / np.sqrt(w.n_embd))
        w.ffn(il, 128, suffix="_shexp")


def build_qwen3moe(w: ModelWriter) -> None:
    w.start()
    w.kv(attention__head_count_kv=w.n_head_kv, feed_forward_length=N_FF_DENSE)
    for il in range(w.family.n_layer):
        w.attention(il, qk_norm=1.0)
        w.norm(f"blk.{il}.ffn_norm.weight", w.n_embd)
        w.moe(il)


def build_qwen3(w: ModelWriter) -> None:
    w.start()
    w.kv(attention__head_count_kv=w.n_head_kv, feed_forward_length=N_FF_DENSE)
    for il in range(w.family.n_layer):
        w.attention(il, qk_norm=1.0)
        w.norm(f"blk.{il}.ffn_norm.weight", w.n_embd)
        w.ffn(il, N_FF_DENSE)


def build_qwen35moe(w: ModelWriter) -> None:
    # layer 0 is a gated delta net, layer 1 attention (full_attention_interval 2)
    state, n_k, n_v, conv = 32, 2, 4, 4
    key_dim, value_dim, d = state * n_k, state * n_v, w.n_embd
    w.start()
    w.kv(
        attention__head_count_kv=w.n_head_kv, feed_forward_length=N_FF_DENSE, expert_shared_feed_forward_length=128,
        rope__dimension_count=32, rope__dimension_sections=[6, 5, 5, 0], full_attention_interval=2,
        ssm__conv_kernel=conv, ssm__inner_size=value_dim, ssm__state_size=state, ssm__time_step_rank=n_v,
        ssm__group_count=n_k,
    )  # fmt: skip
    for il in range(w.family.n_layer):
        p = f"blk.{il}."
        if il % 2:
            w.attention(il, qk_norm=1.0, q_parts=2)
        else:
            w.norm(p + "attn_norm.weight", d)
            w.matrix(p + "attn_qkv.weight", key_dim * 2 + value_dim, d)
            w.matrix(p + "attn_gate.weight", value_dim, d)
            w.vector(p + "ssm_conv1d.weight", key_dim * 2 + value_dim, conv, std=0.5)
            w.vector(p + "ssm_dt.bias", n_v)
            w.add(p + "ssm_a", -np.exp(0.3 * w.normal(p + "ssm_a", n_v)))
            w.matrix(p + "ssm_beta.weight", n_v, d)
            w.matrix(p + "ssm_alpha.weight", n_v, d)
            w.norm(p + "ssm_norm.weight", state)
            w.matrix(p + "ssm_out.weight", d, value_dim)
        w.norm(p + "post_attention_norm.weight", d)
        w.moe(il)
        w.vector(p + "ffn_gate_inp_shexp.weight", d, std=1 / np.sqrt(d))
        w.ffn(il, 128, suffix="_shexp")


def build_mixtral(w: ModelWriter) -> None:
    # arch llama takes the expert size from feed_forward_length (models/llama.cpp 77)
    w.start()
    w.kv(attention__head_count_kv=w.n_head_kv, feed_forward_length=w.n_ff_exp, rope__dimension_count=HEAD)
    for il in range(w.family.n_layer):
        w.attention(il)
        w.norm(f"blk.{il}.ffn_norm.weight", w.n_embd)
        w.moe(il)


def mla_attention(w: ModelWriter, il: int, q_lora: int, kv_lora: int, n_rot: int, nope: int) -> None:
    p, d, n_head = f"blk.{il}.attn_", w.n_embd, w.n_head
    w.norm(p + "norm.weight", d)
    if q_lora:
        w.matrix(p + "q_a.weight", q_lora, d)
        w.norm(p + "q_a_norm.weight", q_lora)
        w.matrix(p + "q_b.weight", n_head * (nope + n_rot), q_lora)
    else:
        w.matrix(p + "q.weight", n_head * (nope + n_rot), d)
    w.matrix(p + "kv_a_mqa.weight", kv_lora + n_rot, d)
    w.norm(p + "kv_a_norm.weight", kv_lora)
    # k_b is stored transposed, so its fan-in is its number of rows
    w.matrix(p + "k_b.weight", kv_lora, nope, gain=np.sqrt(nope / kv_lora), stack=n_head)
    w.matrix(p + "v_b.weight", HEAD, kv_lora, stack=n_head)
    w.matrix(p + "output.weight", d, n_head * HEAD)


def build_deepseek2(w: ModelWriter, *, v3: bool) -> None:
    # V2 as V2-Lite: plain q (q_lora_rank 0), softmax, weights as they are.
    # V3: q through a low rank, sigmoid, selection bias, expert groups, weights normalised and scaled.
    f = w.family
    q_lora, kv_lora, n_rot, nope = (64 if v3 else 0), 64, 32, 32
    w.start()
    w.kv(
        attention__head_count_kv=1, feed_forward_length=N_FF_DENSE, leading_dense_block_count=1,
        attention__q_lora_rank=q_lora, attention__kv_lora_rank=kv_lora,
        attention__key_length_mla=nope + n_rot, attention__value_length_mla=HEAD, rope__dimension_count=n_rot,
        expert_shared_count=1 if v3 else 2, expert_weights_scale=2.5 if v3 else 1.0, expert_weights_norm=v3,
        expert_gating_func=SIGMOID if v3 else SOFTMAX,
    )  # fmt: skip
    # under MLA the cache holds one compressed head: these two replace what start() wrote
    replace_kv(w, "attention.key_length", kv_lora + n_rot)
    replace_kv(w, "attention.value_length", kv_lora)
    if v3:
        w.kv(expert_group_count=f.groups[0], expert_group_used_count=f.groups[1])
    for il in range(f.n_layer):
        mla_attention(w, il, q_lora, kv_lora, n_rot, nope)
        w.norm(f"blk.{il}.ffn_norm.weight", w.n_embd)
        if il not in f.moe_layers:
            w.ffn(il, N_FF_DENSE)
            continue
        w.moe(il, down=1.0 if v3 else 4.0)
        if v3:
            w.vector(f"blk.{il}.exp_probs_b.bias", f.n_expert, std=0.1)
        w.ffn(il, w.n_ff_exp * (1 if v3 else 2), suffix="_shexp")


def replace_kv(w: ModelWriter, key: str, value: int) -> None:
    w.out.kv_data[0][f"{w.family.arch}.{key}"].value = value


def build_deepseek_v2(w: ModelWriter) -> None:
    build_deepseek2(w, v3=False)


def build_deepseek_v3(w: ModelWriter) -> None:
    build_deepseek2(w, v3=True)


def build_glm4moe(w: ModelWriter) -> None:
    f = w.family
    w.start()
    w.kv(
        attention__head_count_kv=w.n_head_kv, feed_forward_length=N_FF_DENSE, leading_dense_block_count=1,
        rope__dimension_count=HEAD // 2, expert_shared_count=1, expert_weights_scale=1.5, expert_weights_norm=True,
        expert_gating_func=SIGMOID,
    )  # fmt: skip
    for il in range(f.n_layer):
        w.attention(il, bias=True, qk_norm=1.0)
        w.norm(f"blk.{il}.post_attention_norm.weight", w.n_embd)
        if il not in f.moe_layers:
            w.ffn(il, N_FF_DENSE)
            continue
        w.moe(il)
        w.vector(f"blk.{il}.exp_probs_b.bias", f.n_expert, std=0.1)
        w.ffn(il, w.n_ff_exp, suffix="_shexp")


def build_gpt_oss(w: ModelWriter) -> None:
    # hidden gain 3: some gates pass the limit of 7 that SWIGLU_OAI clamps at
    w.start()
    w.kv(
        attention__head_count_kv=w.n_head_kv, feed_forward_length=N_FF_DENSE, attention__sliding_window=128,
        rope__dimension_count=HEAD,
    )  # fmt: skip
    for il in range(w.family.n_layer):
        p = f"blk.{il}."
        w.attention(il, bias=True)
        w.vector(p + "attn_output.bias", w.n_embd)
        w.vector(p + "attn_sinks.weight", w.n_head, std=1.0)
        w.norm(p + "post_attention_norm.weight", w.n_embd)
        w.moe(il, hidden=3.0, down=0.2)


def build_gemma4(w: ModelWriter) -> None:
    # Attention scale is 1: q and k norms carry it. Embeddings are scaled by sqrt(n_embd). Even layers slide.
    # Real files carry ffn_down_exps.scale (conversion/gemma.py 803): that is family gemma4-scale.
    d = w.n_embd
    w.start(embd_std=1 / np.sqrt(d))
    w.kv(
        attention__head_count_kv=w.n_head_kv, feed_forward_length=N_FF_DENSE, attention__sliding_window=128,
        attention__sliding_window_pattern=[il % 2 == 0 for il in range(w.family.n_layer)],
        attention__key_length_swa=HEAD, attention__value_length_swa=HEAD, attention__shared_kv_layers=0,
        embedding_length_per_layer_input=0, rope__freq_base_swa=10000.0, final_logit_softcapping=30.0,
    )  # fmt: skip
    # proportional rope: the second half of the frequencies does not turn
    w.add("rope_freqs.weight", np.array([1.0] * (HEAD // 4) + [1e30] * (HEAD // 4), np.float32))
    for il in range(w.family.n_layer):
        p = f"blk.{il}."
        w.attention(il, qk_norm=HEAD**-0.25)
        w.norm(p + "post_attention_norm.weight", d, 0.7)
        w.norm(p + "ffn_norm.weight", d)
        w.ffn(il, N_FF_DENSE)
        w.norm(p + "post_ffw_norm_1.weight", d, 0.7)
        w.norm(p + "pre_ffw_norm_2.weight", d)
        # the router sees rms_norm(x) / sqrt(n_embd) * scale
        w.norm(p + "ffn_gate_inp.scale", d, float(np.sqrt(d)))
        w.moe(il)
        w.norm(p + "post_ffw_norm_2.weight", d)
        w.norm(p + "post_ffw_norm.weight", d, 0.9)
        w.add(p + "layer_output_scale.weight", np.array([0.9], np.float32))


def build_llama4(w: ModelWriter) -> None:
    # Maverick's interleaving (a dense layer, an MoE layer); four layers, since layer 3 is the one without rope
    f = w.family
    w.start()
    w.kv(
        attention__head_count_kv=w.n_head_kv, feed_forward_length=N_FF_DENSE, interleave_moe_layer_step=2,
        rope__dimension_count=HEAD,
    )  # fmt: skip
    for il in range(f.n_layer):
        w.attention(il)
        w.norm(f"blk.{il}.ffn_norm.weight", w.n_embd)
        if il not in f.moe_layers:
            w.ffn(il, N_FF_DENSE)
            continue
        w.moe(il)
        w.ffn(il, w.n_ff_exp, suffix="_shexp")


def build_grovemoe(w: ModelWriter) -> None:
    # the adjugate experts take the routed experts' output (models/grovemoe.cpp 149), and their ids may repeat in a row
    f = w.family
    w.start()
    w.kv(
        attention__head_count_kv=w.n_head_kv, feed_forward_length=N_FF_DENSE,
        expert_chunk_feed_forward_length=w.n_ff_exp, expert_group_scale=0.5, experts_per_group=2,
    )  # fmt: skip
    for il in range(f.n_layer):
        w.attention(il, qk_norm=1.0)
        w.norm(f"blk.{il}.ffn_norm.weight", w.n_embd)
        w.moe(il)
        w.expert_matrices(il, "chexps", f.n_expert // 2, w.n_ff_exp, hidden=1.5, down=2.0)


def build_smallthinker(w: ModelWriter) -> None:
    # the router sees the layer's input, before attention
    w.start()
    w.kv(
        attention__head_count_kv=w.n_head_kv, feed_forward_length=N_FF_DENSE, expert_gating_func=SIGMOID,
        rope__dimension_count=HEAD,
    )  # fmt: skip
    for il in range(w.family.n_layer):
        w.attention(il)
        w.norm(f"blk.{il}.ffn_norm.weight", w.n_embd)
        w.moe(il, down=1.5)


def build_nemotron_h_moe(w: ModelWriter) -> None:
    # layer 0 is Mamba-2, 1 attention, 2 and 3 experts without a gate: the kind of a layer is read from two arrays
    f, d = w.family, w.n_embd
    d_inner, state, n_ssm_head, groups, conv = 256, 32, 4, 2, 4
    conv_dim = d_inner + 2 * groups * state
    w.start()
    w.kv(
        attention__head_count_kv=[0, w.n_head_kv, 0, 0], feed_forward_length=[0, 0, N_FF_DENSE, N_FF_DENSE],
        attention__layer_norm_epsilon=EPS, expert_shared_feed_forward_length=128, expert_shared_count=1,
        expert_weights_norm=True, expert_weights_scale=1.5, ssm__conv_kernel=conv, ssm__inner_size=d_inner,
        ssm__state_size=state, ssm__time_step_rank=n_ssm_head, ssm__group_count=groups,
    )  # fmt: skip
    for il in range(f.n_layer):
        p = f"blk.{il}."
        if il == 1:
            w.attention(il)
            continue
        w.norm(p + "attn_norm.weight", d)
        if il == 0:
            w.matrix(p + "ssm_in.weight", 2 * d_inner + 2 * groups * state + n_ssm_head, d)
            w.vector(p + "ssm_conv1d.weight", conv_dim, conv, std=0.5)
            w.vector(p + "ssm_conv1d.bias", conv_dim)
            w.vector(p + "ssm_dt.bias", n_ssm_head)
            w.add(p + "ssm_a", -np.exp(0.3 * w.normal(p + "ssm_a", n_ssm_head, 1)))
            w.vector(p + "ssm_d", n_ssm_head, 1, mean=1.0)
            w.add(p + "ssm_norm.weight", 1 + 0.1 * w.normal(p + "ssm_norm.weight", groups, d_inner // groups))
            w.matrix(p + "ssm_out.weight", d, d_inner)
            continue
        w.moe(il, down=0.8, gated=False)
        w.vector(p + "exp_probs_b.bias", f.n_expert, std=0.1)
        w.ffn(il, 128, suffix="_shexp", gated=False, down=0.5)


FAMILIES: dict[str, Family] = {
    f.name: f
    for f in (
        Family("qwen2moe", "qwen2moe", build_qwen2moe),
        Family("qwen3moe", "qwen3moe", build_qwen3moe),
        Family("qwen35moe", "qwen35moe", build_qwen35moe, recurrent=True),
        Family("mixtral", "llama", build_mixtral),
        Family("deepseek2-v2", "deepseek2", build_deepseek_v2, n_used=3, n_layer=3, moe_layers=(1, 2)),
        Family("deepseek2-v3", "deepseek2", build_deepseek_v3, n_expert=16, n_used=4, moe_layers=(1,),
               groups=(4, 2)),
        Family("glm4moe", "glm4moe", build_glm4moe, n_layer=3, moe_layers=(1, 2)),
        Family("gpt-oss", "gpt-oss", build_gpt_oss, gate="swiglu_oai", bias=True),
        Family("gemma4", "gemma4", build_gemma4, gate="gelu", merged=True),
        Family("gemma4-scale", "gemma4", build_gemma4, gate="gelu", merged=True, down_scale=True),
        Family("llama4", "llama4", build_llama4, n_used=1, n_layer=4, moe_layers=(1, 3)),
        Family("grovemoe", "grovemoe", build_grovemoe, n_used=3, blocks=2, repeats=True),
        Family("smallthinker", "smallthinker", build_smallthinker, gate="relu"),
        Family("nemotron_h_moe", "nemotron_h_moe", build_nemotron_h_moe, gate="relu_sqr", n_layer=4, moe_layers=(2, 3),
               hybrid=False, fallback="gate", recurrent=True),
        Family("qwen3", "qwen3", build_qwen3, gate="", n_expert=0, n_used=0, moe_layers=(), hybrid=False),
    )
}  # fmt: skip


def write_model(
    path: str | os.PathLike[str], family: Family | str, expert_type: Types = "F32", down_type: Types | None = None,
    n_ff_exp: int = 256, seed: int = 0, dense_type: str = "F32", n_embd: int = 256,
) -> Path:  # fmt: skip
    """Writes one model and returns its path.

    expert_type, down_type: ggml type names of the routed experts (down_type: of their down matrices, default the same),
    or a sequence that is cycled over the MoE layers. Rows that are no multiple of the type's block get the type that
    llama-quant.cpp falls back to. dense_type: all other matrices but the router and the embeddings, which are F32.
    n_embd: a multiple of 128."""
    path = Path(path)
    family = FAMILIES[family] if isinstance(family, str) else family
    w = ModelWriter(path, family, expert_type, down_type, dense_type, n_ff_exp, n_embd, seed)
    family.build(w)
    w.out.write_header_to_file()
    w.out.write_kv_data_to_file()
    w.out.write_tensors_to_file(progress=False)
    w.out.close()
    return path


def cached_model(root: Path, family: Family | str, **options: Any) -> Path:
    """write_model under a name made of everything that distinguishes the model; written once."""
    family = FAMILIES[family] if isinstance(family, str) else family
    key = repr((family.name, family.merged, family.bias, family.n_expert, family.n_used, family.n_layer))
    key += repr((family.down_scale, sorted(options.items())))
    path = root / f"{family.name}-{zlib.crc32(key.encode()):08x}.gguf"
    if not path.exists():
        part = path.with_suffix(f".{os.getpid()}.part")
        write_model(part, family, **options).replace(path)
    return path
