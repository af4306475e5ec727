#!/usr/bin/env python3
"""Compare llama.cpp's token ids and logits with the PyTorch forward on the same text (exit 1 on a mismatch).

  python3 verify_gguf.py --ckpt DIR --tokenizer DIR/tokenizer.json --gguf DIR --dump ./dump_logits

dump_logits is dump_logits.cpp linked with libllama. --perturb first gives a checkpoint random norm weights,
so that a swapped or forgotten norm shows in a barely trained one too.
"""

import argparse
import subprocess
import sys
import tempfile

import numpy as np
import torch
from tokenizers import Tokenizer
from train_tiny_pair import load_pair, save_pair

TEXT = (
    '<|im_start|>user\nWhat does "heron" mean?<|im_end|>\n<|im_start|>assistant\nHeron (noun): grey or white wading bird '
    'with long neck and long legs.<|im_end|>\n<|endoftext|>def f(x, n=10):\n    """Return x**n; it\'s 1 for n == 0."""\n'
    "    for i in range(n):\n        x *= 2\n\n    return x\n\n\nIt was, he said, the 4th of July 1851 -- caf\u00e9 na\u00efve \u4f60\u597d!\n"
)


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--ckpt", required=True)
    ap.add_argument("--tokenizer", required=True)
    ap.add_argument("--gguf", help="folder with tiny-moe-f16.gguf and tiny-draft-f16.gguf")
    ap.add_argument("--dump", default="./dump_logits")
    ap.add_argument("--text", help="a text file instead of the built-in text")
    ap.add_argument("--kinds", nargs=2, default=("f16", "f16"), help="file suffix of target and draft")
    ap.add_argument("--perturb", metavar="DIR", help="write a perturbed checkpoint there and stop")
    args = ap.parse_args()
    pair = load_pair(args.ckpt)
    if args.perturb:
        torch.manual_seed(3)
        for model in pair:
            for p in model.parameters():
                if p.dim() == 1:
                    p.data *= torch.rand_like(p) + 0.5
        save_pair(args.perturb, *pair)
        return 0
    text = open(args.text, encoding="utf-8").read() if args.text else TEXT
    ids = Tokenizer.from_file(args.tokenizer).encode(text).ids[:512]
    bad = 0
    for model, name, kind in zip(pair, ("tiny-moe", "tiny-draft"), args.kinds):
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as t, tempfile.NamedTemporaryFile() as o:
            t.write(text)
            t.flush()
            subprocess.run(
                [args.dump, f"{args.gguf}/{name}-{kind}.gguf", t.name, o.name], check=True, stderr=subprocess.DEVNULL
            )
            raw = open(o.name, "rb").read()
        n, v = np.frombuffer(raw, np.int32, 2)
        got_ids = np.frombuffer(raw, np.int32, n, 8)
        got = np.frombuffer(raw, np.float32, n * v, 8 + 4 * n).reshape(n, v)
        if list(got_ids) != ids:
            print(name, "token ids differ")
            bad = 1
            continue
        with torch.no_grad():
            want = model(torch.tensor([ids]))[0].numpy()
        diff = np.abs(got - want).max(1)
        same = (got.argmax(1) == want.argmax(1)).mean()
        cos = (got * want).sum(1) / np.linalg.norm(got, axis=1) / np.linalg.norm(want, axis=1)
        print(
            f"{name}-{kind}: {n} tokens, ids equal, logits std {want.std():.3f}, |diff| median {np.median(diff):.4f} "
            f"max {diff.max():.4f}, cosine min {cos.min():.6f}, same greedy token {same:.3f}"
        )
        bad |= same < 0.97 or np.median(cos) < 0.999
    print("OK" if not bad else "MISMATCH")
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
