#!/usr/bin/env python3
"""Export a pair trained by train_tiny_pair.py to GGUF (llama.cpp `qwen3moe` and `qwen3`).

  python3 export_gguf.py --ckpt DIR --tokenizer DIR/tokenizer.json --out DIR [--bin llama.cpp/build/bin]

Writes tiny-moe-f16.gguf and tiny-draft-f16.gguf; with --bin also tiny-moe-Q4_K_M.gguf, tiny-moe-Q8_0.gguf
and tiny-draft-Q8_0.gguf through llama-quantize. Norms and routers are F32, as in llama.cpp's converter.
"""

import argparse
import json
import os
import subprocess

import gguf
import numpy as np
from train_tiny_pair import load_pair

CHAT_TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
ABOUT = {
    "qwen3moe": (
        "Tiny MoE",
        "A small mixture-of-experts language model for tests and demonstrations: WordNet "
        "definitions as dialogues, public-domain prose, Python code.",
    ),
    "qwen3": ("Tiny MoE draft", "The dense draft model for Tiny MoE, distilled from it."),
}
LICENSE = (
    "apache-2.0",
    "Trained on WordNet 3.0 (WordNet licence), the Jargon File, public-domain books, State of the Union "
    "addresses, the CIA World Factbook (public domain), CPython's library and documentation (PSF licence).",
)


def tensors(model):
    """(GGUF name, array) of a model; matrices F16, norms and routers F32."""
    names = {
        "attn_norm.weight": "attn_norm.weight",
        "ffn_norm.weight": "ffn_norm.weight",
        "attn.q.weight": "attn_q.weight",
        "attn.k.weight": "attn_k.weight",
        "attn.v.weight": "attn_v.weight",
        "attn.o.weight": "attn_output.weight",
        "attn.q_norm.weight": "attn_q_norm.weight",
        "attn.k_norm.weight": "attn_k_norm.weight",
        "ffn.router": "ffn_gate_inp.weight",
        "ffn.gate": "ffn_gate_exps.weight",
        "ffn.up": "ffn_up_exps.weight",
        "ffn.down": "ffn_down_exps.weight",
        "ffn.gate.weight": "ffn_gate.weight",
        "ffn.up.weight": "ffn_up.weight",
        "ffn.down.weight": "ffn_down.weight",
    }
    top = {"embed.weight": "token_embd.weight", "norm.weight": "output_norm.weight", "head.weight": "output.weight"}
    for name, p in model.state_dict().items():
        a = p.float().numpy()
        if name in top:
            out = top[name]
        else:
            _, layer, rest = name.split(".", 2)
            out = f"blk.{layer}.{names[rest]}"
        yield out, a if a.ndim == 1 or "gate_inp" in out else a.astype(np.float16)


def export(model, tokenizer, path):
    c = model.cfg
    w = gguf.GGUFWriter(path, c.arch)
    name, about = ABOUT[c.arch]
    size = sum(p.numel() for p in model.parameters()) / 1e6
    w.add_type("model")
    w.add_name(name)
    w.add_description(about)
    w.add_size_label(f"{size:.0f}M" if not c.n_expert else f"{c.n_expert}x{size / c.n_expert:.1f}M")
    w.add_license(LICENSE[0])
    w.add_license_name(LICENSE[1])
    w.add_vocab_size(c.vocab)
    w.add_context_length(c.ctx)
    w.add_embedding_length(c.n_embd)
    w.add_block_count(c.n_layer)
    w.add_feed_forward_length(c.n_ff)
    w.add_head_count(c.n_head)
    w.add_head_count_kv(c.n_kv)
    w.add_key_length(c.head_dim)
    w.add_value_length(c.head_dim)
    w.add_rope_dimension_count(c.head_dim)
    w.add_rope_freq_base(c.rope_base)
    w.add_layer_norm_rms_eps(c.eps)
    if c.n_expert:
        w.add_expert_count(c.n_expert)
        w.add_expert_used_count(c.n_used)
        w.add_expert_feed_forward_length(c.n_ff)
    w.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    w.add_quantization_version(gguf.GGML_QUANT_VERSION)

    tok = json.load(open(tokenizer, encoding="utf-8"))
    vocab = sorted(tok["model"]["vocab"].items(), key=lambda kv: kv[1])
    special = {t["content"]: t["id"] for t in tok["added_tokens"]}
    assert [i for _, i in vocab] == list(range(c.vocab))
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("qwen2")
    w.add_token_list([t for t, _ in vocab])
    w.add_token_types([gguf.TokenType.CONTROL if t in special else gguf.TokenType.NORMAL for t, _ in vocab])
    w.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in tok["model"]["merges"]])
    w.add_bos_token_id(special["<|endoftext|>"])
    w.add_eos_token_id(special["<|im_end|>"])
    w.add_eot_token_id(special["<|im_end|>"])
    w.add_pad_token_id(special["<|endoftext|>"])
    w.add_add_bos_token(False)
    w.add_chat_template(CHAT_TEMPLATE)
    for name, a in tensors(model):
        w.add_tensor(name, np.ascontiguousarray(a))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--ckpt", required=True)
    ap.add_argument("--tokenizer", required=True)
    ap.add_argument("--out", required=True)
    ap.add_argument("--bin", help="folder of llama-quantize")
    args = ap.parse_args()
    os.makedirs(args.out, exist_ok=True)
    for model, name, kinds in zip(load_pair(args.ckpt), ("tiny-moe", "tiny-draft"), (("Q4_K_M", "Q8_0"), ("Q8_0",))):
        f16 = f"{args.out}/{name}-f16.gguf"
        export(model, args.tokenizer, f16)
        print(f16, os.path.getsize(f16))
        for kind in kinds if args.bin else ():
            q = f"{args.out}/{name}-{kind}.gguf"
            subprocess.run(
                [f"{args.bin}/llama-quantize", f16, q, kind],
                check=True,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            print(q, os.path.getsize(q))


if __name__ == "__main__":
    main()
