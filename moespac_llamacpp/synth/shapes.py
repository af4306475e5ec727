"""True shapes and weight types of the models that `synth` imitates, tensor by tensor.

Shapes: the models' published config.json. Types: what llama.cpp's quantiser chooses (src/llama-quant.cpp of the pinned
llama-cpp-python, llama_tensor_get_type_impl and tensor_type_fallback).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import gguf
from gguf import GGMLQuantizationType as Type

QUANTS = ("Q4_K_M", "Q8_0", "BF16")


@dataclass(frozen=True)
class Shape:
    """Hyperparameters. A model without experts has n_expert 0; MLA attention has kv_lora_rank above 0."""

    name: str
    arch: str
    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    head_dim: int  # of keys and values; with MLA of the values
    n_ff: int
    n_vocab: int
    rope_base: float = 1e6
    n_expert: int = 0
    n_expert_used: int = 0
    n_ff_exp: int = 0
    n_shared: int = 0  # shared experts, of n_ff_exp each
    n_dense: int = 0  # leading layers without experts
    norm_topk: bool = True
    kv_lora_rank: int = 0
    n_rot: int = 0  # MLA: rotated part of a key
    n_nope: int = 0  # MLA: the other part

    @property
    def moe_layers(self) -> range:
        return range(self.n_dense, self.n_layer) if self.n_expert else range(0)


SHAPES = {
    s.name: s
    for s in (
        Shape(
            "qwen3-30b-a3b",
            "qwen3moe",
            n_layer=48,
            n_embd=2048,
            n_head=32,
            n_head_kv=4,
            head_dim=128,
            n_ff=6144,
            n_vocab=151936,
            n_expert=128,
            n_expert_used=8,
            n_ff_exp=768,
        ),
        Shape(
            "deepseek-v2-lite",
            "deepseek2",
            n_layer=27,
            n_embd=2048,
            n_head=16,
            n_head_kv=1,
            head_dim=128,
            n_ff=10944,
            n_vocab=102400,
            rope_base=1e4,
            n_expert=64,
            n_expert_used=6,
            n_ff_exp=1408,
            n_shared=2,
            n_dense=1,
            norm_topk=False,
            kv_lora_rank=512,
            n_rot=64,
            n_nope=128,
        ),
        Shape("qwen3-4b", "qwen3", 36, 2560, 32, 8, 128, 9728, 151936),
        Shape("qwen3-0.6b", "qwen3", 28, 1024, 16, 8, 128, 3072, 151936),
        Shape(
            "tiny-qwen3moe",
            "qwen3moe",
            n_layer=4,
            n_embd=512,
            n_head=4,
            n_head_kv=2,
            head_dim=128,
            n_ff=512,
            n_vocab=4096,
            n_expert=32,
            n_expert_used=4,
            n_ff_exp=256,
        ),
        Shape(
            "tiny-deepseek2",
            "deepseek2",
            n_layer=27,  # by this number llama.cpp knows the models without q_lora_rank
            n_embd=256,
            n_head=4,
            n_head_kv=1,
            head_dim=64,
            n_ff=352,
            n_vocab=4096,
            rope_base=1e4,
            n_expert=16,
            n_expert_used=3,
            n_ff_exp=96,
            n_shared=1,
            n_dense=1,
            norm_topk=False,
            kv_lora_rank=256,
            n_rot=32,
            n_nope=64,
        ),
        Shape("tiny-qwen3", "qwen3", 2, 256, 2, 1, 128, 512, 4096),
    )
}

#: What --tiny puts in the place of a model.
TINY = {
    "qwen3-30b-a3b": "tiny-qwen3moe",
    "deepseek-v2-lite": "tiny-deepseek2",
    "qwen3-4b": "tiny-qwen3",
    "qwen3-0.6b": "tiny-qwen3",
}


@dataclass(frozen=True)
class Tensor:
    """One tensor of the file. shape: as numpy has it, columns last. kind: embedding, output, router, ones or random.

    gain: standard deviation of a random tensor times the square root of its columns."""

    name: str
    shape: tuple[int, ...]
    type: Type
    kind: str = "random"
    gain: float = 1.0
    layer: int = -1

    @property
    def n_bytes(self) -> int:
        block, size = gguf.GGML_QUANT_SIZES[self.type]
        return math.prod(self.shape) // block * size

    @property
    def of_experts(self) -> bool:
        return "_exps." in self.name


def more_bits(i: int, n: int) -> bool:
    """Which of n layers Q4_K_M gives more bits (llama-quant.cpp, use_more_bits)."""
    return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2


_FALLBACK = {Type.Q4_K: Type.Q5_0, Type.Q6_K: Type.Q8_0}


def _fit(kind: Type, columns: int) -> Type:
    """The type, or what the quantiser falls back to where rows are no multiple of its block."""
    if columns % gguf.GGML_QUANT_SIZES[kind][0] == 0:
        return kind
    kind = _FALLBACK.get(kind, Type.F16)
    return kind if columns % gguf.GGML_QUANT_SIZES[kind][0] == 0 else Type.F16


def _type_of(role: str, il: int, shape: Shape, quant: str, columns: int) -> Type:
    if quant == "BF16":
        return Type.BF16
    if quant == "Q8_0":
        return _fit(Type.Q8_0, columns)
    more = role in ("attn_v", "ffn_down") and more_bits(il, shape.n_layer)
    return _fit(Type.Q6_K if more or role == "output" else Type.Q4_K, columns)


#: Outputs of attention and experts, small beside the embedding in the residual stream, so that routers still see it. The same
#: random matrices serve all layers, so their outputs add up.
SMALL = 0.05


def tensors(shape: Shape, quant: str) -> Iterator[Tensor]:
    """All tensors in the file's order. A small model's tied embeddings become two tensors of the type that the tied one has:
    on the device nothing changes, since llama.cpp keeps token embeddings in host memory and copies them there for the output."""
    embd = shape.n_embd
    tied = not shape.n_expert
    head = _type_of("output", 0, shape, quant, embd)
    yield Tensor(
        "token_embd.weight",
        (shape.n_vocab, embd),
        head if tied else _type_of("token_embd", 0, shape, quant, embd),
        "embedding",
    )
    yield Tensor("output_norm.weight", (embd,), Type.F32, "ones")
    yield Tensor("output.weight", (shape.n_vocab, embd), head, "output")
    for il in range(shape.n_layer):
        yield from _attention(shape, il, quant)
        yield from _feed_forward(shape, il, quant)


def _add(
    shape: Shape, il: int, quant: str, name: str, dims: tuple[int, ...], role: str = "", gain: float = 1.0
) -> Tensor:
    kind = _type_of(role or name, il, shape, quant, dims[-1])
    return Tensor(f"blk.{il}.{name}.weight", dims, kind, gain=gain, layer=il)


def _ones(il: int, name: str, width: int) -> Tensor:
    return Tensor(f"blk.{il}.{name}.weight", (width,), Type.F32, "ones", layer=il)


def _attention(shape: Shape, il: int, quant: str) -> Iterator[Tensor]:
    embd, heads = shape.n_embd, shape.n_head
    yield _ones(il, "attn_norm", embd)
    yield _ones(il, "ffn_norm", embd)
    if shape.kv_lora_rank:
        rank = shape.kv_lora_rank
        yield _ones(il, "attn_kv_a_norm", rank)
        yield _add(shape, il, quant, "attn_q", (heads * (shape.n_nope + shape.n_rot), embd))
        yield _add(shape, il, quant, "attn_kv_a_mqa", (rank + shape.n_rot, embd))
        yield _add(shape, il, quant, "attn_k_b", (heads, rank, shape.n_nope))
        yield _add(shape, il, quant, "attn_v_b", (heads, shape.head_dim, rank))
    else:
        yield _ones(il, "attn_q_norm", shape.head_dim)
        yield _ones(il, "attn_k_norm", shape.head_dim)
        yield _add(shape, il, quant, "attn_q", (heads * shape.head_dim, embd))
        yield _add(shape, il, quant, "attn_k", (shape.n_head_kv * shape.head_dim, embd))
        yield _add(shape, il, quant, "attn_v", (shape.n_head_kv * shape.head_dim, embd))
    yield _add(shape, il, quant, "attn_output", (embd, heads * shape.head_dim), gain=SMALL)


def _feed_forward(shape: Shape, il: int, quant: str) -> Iterator[Tensor]:
    embd = shape.n_embd
    if il not in shape.moe_layers:
        yield _add(shape, il, quant, "ffn_gate", (shape.n_ff, embd))
        yield _add(shape, il, quant, "ffn_up", (shape.n_ff, embd))
        yield _add(shape, il, quant, "ffn_down", (embd, shape.n_ff), gain=SMALL)
        return
    n, ff = shape.n_expert, shape.n_ff_exp
    yield Tensor(f"blk.{il}.ffn_gate_inp.weight", (n, embd), Type.F32, "router", layer=il)
    yield _add(shape, il, quant, "ffn_gate_exps", (n, ff, embd))
    yield _add(shape, il, quant, "ffn_up_exps", (n, ff, embd))
    yield _add(shape, il, quant, "ffn_down_exps", (n, embd, ff), "ffn_down", SMALL)
    if shape.n_shared:
        yield _add(shape, il, quant, "ffn_gate_shexp", (shape.n_shared * ff, embd))
        yield _add(shape, il, quant, "ffn_up_shexp", (shape.n_shared * ff, embd))
        yield _add(shape, il, quant, "ffn_down_shexp", (embd, shape.n_shared * ff), "ffn_down", SMALL)


def add_metadata(writer: gguf.GGUFWriter, shape: Shape, quant: str) -> None:
    writer.add_name(f"planted {shape.name} {quant}")
    writer.add_description("random weights with planted behaviour: for timing only")
    writer.add_block_count(shape.n_layer)
    writer.add_context_length(32768)
    writer.add_embedding_length(shape.n_embd)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_head)
    writer.add_head_count_kv(shape.n_head_kv)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(shape.n_vocab)
    if shape.kv_lora_rank:
        writer.add_kv_lora_rank(shape.kv_lora_rank)
        writer.add_key_length(shape.kv_lora_rank + shape.n_rot)
        writer.add_value_length(shape.kv_lora_rank)
        writer.add_key_length_mla(shape.n_nope + shape.n_rot)
        writer.add_value_length_mla(shape.head_dim)
        writer.add_rope_dimension_count(shape.n_rot)
    else:
        writer.add_key_length(shape.head_dim)
        writer.add_value_length(shape.head_dim)
    if shape.n_expert:
        writer.add_expert_count(shape.n_expert)
        writer.add_expert_used_count(shape.n_expert_used)
        writer.add_expert_feed_forward_length(shape.n_ff_exp)
        if shape.arch == "deepseek2":
            writer.add_leading_dense_block_count(shape.n_dense)
            writer.add_expert_shared_count(shape.n_shared)
            writer.add_expert_weights_scale(1.0)
            writer.add_expert_weights_norm(shape.norm_topk)
            writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX)
