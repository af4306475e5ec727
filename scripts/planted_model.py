#!/usr/bin/env python3
"""Write a *planted* GGUF: true shapes and quant types of Qwen3-30B-A3B Q4_K_M, random weights, routing of a recorded trace.

    python scripts/planted_model.py OUT.gguf TRACE.npz [--tiny] [--layers N] [--chain N] [--moe-scale X]

Planting makes the routing of a real model happen without its weights. Token t of a chain (ids 0 … chain-1) has a random
embedding of large norm, and every block's output is small, so the residual stays near the embedding in all layers. The
router row of an expert is the sum of the embeddings of the tokens that the trace sends to it. So a token names its
experts, in any batch and at any position: decode ids t, t+1, … (modulo the chain) and the trace is replayed.

It is for timing only: the text is noise, and some things are easier than in a real model (a stale gate is always right,
and so is what a token chose before). Say "planted" wherever such a number stands.

The experts per token are the trace's (6 for qwen3-30b-a3b_top6.npz; the model's own are 8). Ids that the trace lacks
(255) are left to the router's noise. Writes OUT.gguf and OUT.gguf.trace.npz: `experts`, int16 [chain, layer, k], -1 where
the trace has none. 19 GB full size (about 14 s into memory on 16 cores), 50 MB with --tiny.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, replace
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as QuantType
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
BLOCK = 256  # weights in a block of Q4_K (144 bytes) or Q6_K (210 bytes)
MISSING = -1


@dataclass(frozen=True)
class Shape:
    n_layer: int
    n_expert: int
    n_embd: int
    n_ff_exp: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_vocab: int
    chain: int


QWEN3_30B_A3B = Shape(
    n_layer=48,
    n_expert=128,
    n_embd=2048,
    n_ff_exp=768,
    n_head=32,
    n_head_kv=4,
    head_dim=128,
    n_vocab=151936,
    chain=128,
)
TINY = Shape(
    n_layer=6,
    n_expert=32,
    n_embd=512,
    n_ff_exp=256,
    n_head=4,
    n_head_kv=2,
    head_dim=128,
    n_vocab=2048,
    chain=64,
)


def chain_experts(trace: Path, shape: Shape) -> NDArray[np.int16]:
    """The experts of the chain's tokens, int16 [chain, layer, k], MISSING where the trace has none.

    Generated tokens if the trace has enough of them, else from its first token on. ValueError: the trace is too short."""
    with np.load(trace) as file:
        experts = file["experts"]
        missing = np.iinfo(experts.dtype).max
        if "is_decode" in file and file["is_decode"].sum() >= shape.chain:
            experts = experts[file["is_decode"].astype(bool)]
    if experts.shape[0] < shape.chain or experts.shape[1] < shape.n_layer:
        raise ValueError(
            f"{trace} has {experts.shape[0]} tokens of {experts.shape[1]} layers, {shape.chain} of {shape.n_layer} are needed"
        )
    experts = experts[: shape.chain, : shape.n_layer].astype(np.int16)
    experts[experts == missing] = MISSING
    return fold(experts, shape.n_expert)


def fold(experts: NDArray[np.int16], n_expert: int) -> NDArray[np.int16]:
    """Ids modulo n_expert, moved on where two of one token would coincide."""
    if experts.max() < n_expert:
        return experts
    if experts.shape[2] > n_expert:
        raise ValueError(f"{experts.shape[2]} experts a token cannot be folded onto {n_expert}")
    folded = np.full_like(experts, MISSING)
    for token, layer in np.ndindex(experts.shape[:2]):
        taken: set[int] = set()
        for rank, expert in enumerate(experts[token, layer]):
            if expert == MISSING:
                continue
            e = int(expert) % n_expert
            while e in taken:
                e = (e + 1) % n_expert
            taken.add(e)
            folded[token, layer, rank] = e
    return folded


def random_q4_k(rng: np.random.Generator, rows: int, cols: int, scale: float = 1.0) -> Bytes:
    """Random blocks [rows, bytes of a row]: 2 F16 scales, 12 bytes of 6-bit scales and minima, 128 of nibbles."""
    blocks = rng.integers(0, 256, (rows * cols // BLOCK, 144), dtype=np.uint8)
    blocks[:, 0:2] = _f16(0.002 * scale)
    blocks[:, 2:4] = _f16(0.015 * scale)
    return blocks.reshape(rows, -1)


def random_q6_k(rng: np.random.Generator, rows: int, cols: int, scale: float = 1.0) -> Bytes:
    """Random blocks [rows, bytes of a row]: 192 bytes of quants, 16 scales, an F16 scale."""
    blocks = rng.integers(0, 256, (rows * cols // BLOCK, 210), dtype=np.uint8)
    blocks[:, 192:208] = rng.integers(1, 20, (len(blocks), 16), dtype=np.uint8)
    blocks[:, 208:210] = _f16(0.0003 * scale)
    return blocks.reshape(rows, -1)


def _f16(value: float) -> Bytes:
    return np.full(1, value, np.float16).view(np.uint8)


def experts_of(matrix: Bytes, n_expert: int, step: int) -> Bytes:
    """Different experts from one random matrix, by rotating its rows: making 17 GB of random numbers would take minutes."""
    return np.stack([np.roll(matrix, step * i, axis=0) for i in range(n_expert)])


def router(experts: NDArray[np.int16], embeddings: NDArray[np.float32], n_expert: int) -> NDArray[np.float32]:
    """Router matrix of one layer, [n_expert, n_embd]: logit 4 for a token's experts, about 0 for the others.

    experts: [chain, k]; embeddings: [chain, n_embd] of norm 1."""
    chosen = np.zeros((n_expert, len(embeddings)), np.float32)
    token, rank = np.nonzero(experts != MISSING)
    chosen[experts[token, rank], token] = 1.0
    gain = np.float32(4 / np.sqrt(embeddings.shape[1]))
    return np.asarray((chosen @ embeddings) * gain, np.float32)


def down_is_q6(il: int, n_layer: int) -> bool:
    """Q4_K_M's rule for the down matrices (llama-quant.cpp, use_more_bits)."""
    return il < n_layer // 8 or il >= 7 * n_layer // 8 or (il - n_layer // 8) % 3 == 2


def add_metadata(writer: gguf.GGUFWriter, shape: Shape, n_expert_used: int) -> None:
    writer.add_block_count(shape.n_layer)
    writer.add_context_length(32768)
    writer.add_embedding_length(shape.n_embd)
    writer.add_feed_forward_length(3 * shape.n_embd)
    writer.add_head_count(shape.n_head)
    writer.add_head_count_kv(shape.n_head_kv)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_expert_count(shape.n_expert)
    writer.add_expert_used_count(n_expert_used)
    writer.add_expert_feed_forward_length(shape.n_ff_exp)
    writer.add_vocab_size(shape.n_vocab)
    writer.add_tokenizer_model("none")


class Weights:
    """The random matrices, made once and shared by all layers."""

    def __init__(self, shape: Shape, rng: np.random.Generator, moe_scale: float) -> None:
        embd, ff, heads = shape.n_embd, shape.n_ff_exp, shape.n_head * shape.head_dim
        kv = shape.n_head_kv * shape.head_dim
        unit = rng.standard_normal((shape.chain, embd), dtype=np.float32)
        unit /= np.linalg.norm(unit, axis=1, keepdims=True)
        self.unit_embeddings: NDArray[np.float32] = unit
        self.embeddings = np.zeros((shape.n_vocab, embd), np.float16)
        self.embeddings[: shape.chain] = unit * (64 * np.sqrt(embd))
        self.output = random_q6_k(rng, shape.n_vocab, embd)
        # small outputs keep the residual near the embedding
        self.gate = experts_of(random_q4_k(rng, ff, embd, 0.1), shape.n_expert, 7)
        self.up = experts_of(random_q4_k(rng, ff, embd, 0.1), shape.n_expert, 5)
        self.down_q4 = experts_of(random_q4_k(rng, embd, ff, 0.01 * moe_scale), shape.n_expert, 7)
        self.down_q6 = experts_of(random_q6_k(rng, embd, ff, 0.073 * moe_scale), shape.n_expert, 7)
        self.q = random_q4_k(rng, heads, embd)
        self.k = random_q4_k(rng, kv, embd)
        self.v = random_q6_k(rng, kv, embd, 0.1)
        self.attn_output = random_q4_k(rng, embd, heads, 0.01)


def add_layer(writer: gguf.GGUFWriter, il: int, shape: Shape, weights: Weights, experts: NDArray[np.int16]) -> None:
    def add(name: str, tensor: NDArray[np.float32] | Bytes, kind: QuantType | None = None) -> None:
        writer.add_tensor(f"blk.{il}.{name}.weight", tensor, raw_dtype=kind)

    for name, width in (
        ("attn_norm", shape.n_embd),
        ("ffn_norm", shape.n_embd),
        ("attn_q_norm", shape.head_dim),
        ("attn_k_norm", shape.head_dim),
    ):
        add(name, np.ones(width, np.float32))
    add("attn_q", weights.q, QuantType.Q4_K)
    add("attn_k", weights.k, QuantType.Q4_K)
    add("attn_v", weights.v, QuantType.Q6_K)
    add("attn_output", weights.attn_output, QuantType.Q4_K)
    add("ffn_gate_inp", router(experts[:, il], weights.unit_embeddings, shape.n_expert))
    add("ffn_gate_exps", weights.gate, QuantType.Q4_K)
    add("ffn_up_exps", weights.up, QuantType.Q4_K)
    if down_is_q6(il, shape.n_layer):
        add("ffn_down_exps", weights.down_q6, QuantType.Q6_K)
    else:
        add("ffn_down_exps", weights.down_q4, QuantType.Q4_K)


def write_planted(out: Path, trace: Path, shape: Shape, *, moe_scale: float = 1.0, seed: int = 0) -> NDArray[np.int16]:
    """Writes `out` and `out`.trace.npz; returns the planted experts, int16 [chain, layer, k]."""
    experts = chain_experts(trace, shape)
    weights = Weights(shape, np.random.default_rng(seed), moe_scale)
    writer = gguf.GGUFWriter(out, "qwen3moe")
    add_metadata(writer, shape, experts.shape[2])
    writer.add_tensor("token_embd.weight", weights.embeddings)
    writer.add_tensor("output.weight", weights.output, raw_dtype=QuantType.Q6_K)
    writer.add_tensor("output_norm.weight", np.ones(shape.n_embd, np.float32))
    for il in range(shape.n_layer):
        add_layer(writer, il, shape, weights, experts)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file(progress=False)
    writer.close()
    np.savez_compressed(f"{out}.trace.npz", experts=experts)
    return experts


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path, help="GGUF to write")
    parser.add_argument(
        "trace", type=Path, help="routing trace (.npz with experts [step, layer, k] and is_decode [step])"
    )
    parser.add_argument("--tiny", action="store_true", help="the same structure at 50 MB, for tests and rehearsals")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--chain", type=int, help="tokens of the trace that are replayed")
    parser.add_argument("--moe-scale", type=float, default=1.0, help="factor on the experts' outputs (default 1)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    shape = TINY if args.tiny else QWEN3_30B_A3B
    shape = replace(shape, n_layer=args.layers or shape.n_layer, chain=args.chain or shape.chain)
    start = time.perf_counter()
    try:
        experts = write_planted(args.out, args.trace, shape, moe_scale=args.moe_scale, seed=args.seed)
    except (ValueError, OSError) as error:
        raise SystemExit(f"planted_model: {error}") from error
    print(
        f"{args.out}: {args.out.stat().st_size / 1e9:.2f} GB, {shape.n_layer} layers of {shape.n_expert} experts, "
        f"{experts.shape[2]} a token, chain of {shape.chain}, {(experts == MISSING).sum()} ids missing in the trace, "
        f"{time.perf_counter() - start:.1f} s"
    )


if __name__ == "__main__":
    main()
