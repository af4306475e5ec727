"""What Python costs between two decodes, at the vocabulary of Qwen3 where that matters. Prints three tables.

    python scripts/bench_sampling.py

Logits are random with the tail of a real model's: one clear favourite among some hundred plausible tokens. A step has 3 drafts
that are all accepted, so that all 4 positions are looked at. For grammars the bundled model's vocabulary is filled up with random
strings to the same size; the text so far is given, and which tokens may follow is up to the grammar, not to the logits: that is
the worst case, as a model that knows JSON has the right token among its first few.

The last table is the time from the end of one decode to the start of the next, on the bundled pair with its small vocabulary:
drafting without a draft model, acceptance, and all that is noted, moved and planned in this thread. It is measured while it
happens, with caches that are full of weights.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import gguf
import llama_cpp
import numpy as np

from moespac_llamacpp.acceptance import Law, Sampler, Sampling, log_probability, verify
from moespac_llamacpp.decoder import Decoder
from moespac_llamacpp.draft import NgramDraft
from moespac_llamacpp.engine import TINY_MODEL
from moespac_llamacpp.grammar import compile_grammar, from_json_schema
from moespac_llamacpp.models import Context, Model, capture_log
from moespac_llamacpp.policies import make
from moespac_llamacpp.residency import Residency

N_VOCAB = 151_936

CHAINS = {
    "greedy": Sampling(),
    "greedy, penalties": Sampling(repeat_penalty=1.1, presence_penalty=0.5),
    "top-k 40, top-p, min-p": Sampling(temperature=0.8),
    "top-k 40, top-p, min-p, penalties": Sampling(temperature=0.8, repeat_penalty=1.1, presence_penalty=0.5),
    "top-k off, min-p 0.05": Sampling(temperature=0.8, top_k=0, top_p=1),
    "top-k off, top-p 0.95": Sampling(temperature=0.8, top_k=0, min_p=0),
}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
STATES = {
    "at the start": "",
    "in a string": '{"name": "abc',
    "after a string": '{"name": "abc"',
    "in a number": '{"name": "a", "age": 1',
}


def median_of(call: Callable[[], object], n: int = 200) -> float:
    """Seconds."""
    times = []
    for _ in range(n):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return float(np.median(times))


class Vocabulary(Model):
    """A model of nothing but a vocabulary."""

    def __init__(self, path: Path) -> None:
        params = llama_cpp.llama_model_default_params()
        params.vocab_only = True
        self.path = path
        self.pointer = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        self.vocab = llama_cpp.llama_model_get_vocab(self.pointer)
        self.n_vocab = int(llama_cpp.llama_vocab_n_tokens(self.vocab))


def write_vocabulary(path: Path) -> None:
    """The bundled model's, and random words of 2 to 8 characters, half of them after a space."""
    rng, fields = np.random.default_rng(0), gguf.GGUFReader(TINY_MODEL).fields
    tokens, types = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "token_type"))
    characters, known = list('abcdefghijklmnopqrstuvwxyz0123456789,.:"{}[]()-_'), set(tokens)
    while len(tokens) < N_VOCAB:
        word = "".join(rng.choice(characters, rng.integers(2, 9)))
        word = "Ġ" + word if rng.random() < 0.5 else word
        if word not in known:
            known.add(word)
            tokens.append(word)
    writer = gguf.GGUFWriter(path, "qwen3moe")
    for name, field in fields.items():
        if not name.startswith(("GGUF.", "general.architecture", "tokenizer.")):
            writer.add_key_value(name, field.contents(), field.types[0])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(fields["tokenizer.ggml.pre"].contents())
    writer.add_token_list(tokens)
    writer.add_token_types(types + [1] * (N_VOCAB - len(types)))
    writer.add_token_merges(fields["tokenizer.ggml.merges"].contents())
    writer.add_eos_token_id(fields["tokenizer.ggml.eos_token_id"].contents())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def chains() -> None:
    rng = np.random.default_rng(0)
    logits = (2 * rng.standard_normal((4, N_VOCAB)) + 3 * (rng.random((4, N_VOCAB)) < 1e-3)).astype(np.float32)
    favourites = rng.integers(0, N_VOCAB, 4)
    logits[np.arange(4), favourites] = 25
    unsure = (2 * rng.standard_normal(N_VOCAB) + 12 * (rng.random(N_VOCAB) < 1e-3)).astype(np.float32)
    text = rng.integers(0, N_VOCAB, 100).tolist()
    drafts = favourites[:3].tolist()
    print(f"{'chain':36s} {'law, µs':>9s} {'unsure, µs':>11s} {'step of 4, ms':>14s}")
    for name, sampling in CHAINS.items():
        with Sampler(sampling, N_VOCAB) as sampler:
            sampler.reset(text)
            q = None if sampling.greedy else [Law(np.array([t], np.int32), np.ones(1)) for t in drafts]
            step = median_of(lambda sampler=sampler, q=q: verify(sampler, logits, drafts, q))  # type: ignore[misc]
            law, wide = (median_of(lambda sampler=sampler, row=row: sampler.law(row)) for row in (logits[0], unsure))  # type: ignore[misc]
        print(f"{name:36s} {1e6 * law:9.0f} {1e6 * wide:11.0f} {1e3 * step:14.3f}")
    print(f"{'log-probability of a token':36s} {1e6 * median_of(lambda: log_probability(logits[0], 5)):9.0f}")


def grammars() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vocabulary.gguf"
        write_vocabulary(path)
        model = Vocabulary(path)
        start = time.perf_counter()
        assert model.prefixes
        print(f"\nJSON schema; prefixes of the vocabulary made once in {time.perf_counter() - start:.2f} s")
        logits = (2 * np.random.default_rng(0).standard_normal(N_VOCAB)).astype(np.float32)
        print(f"{'law, µs':16s} {'greedy':>9s} {'top-k 40':>9s} {'top-k off':>9s}")
        for state, text in STATES.items():
            times = []
            for sampling in (Sampling(), Sampling(temperature=0.8), Sampling(temperature=0.8, top_k=0)):
                grammar = compile_grammar(model, from_json_schema(SCHEMA))
                with Sampler(sampling, N_VOCAB, grammar=grammar) as sampler:
                    sampler.reset()
                    for token in model.tokenize(text, bos=False):
                        sampler.accept(token)
                    times.append(median_of(lambda sampler=sampler: sampler.law(logits), 30))  # type: ignore[misc]
            print(f"{state:16s} " + " ".join(f"{1e6 * t:9.0f}" for t in times))
        model.close()


def gaps() -> None:
    """The target computes with one thread: the policy's has a core of its own where there are two."""
    print(f"\n{'between decodes, ms':36s} {'greedy':>9s} {'sampled':>9s}")
    with Model(TINY_MODEL) as model:
        for share in (None, 0.25):
            for n_drafts in (0, 3):
                times = [_gap(model, share, n_drafts, s) for s in (Sampling(), Sampling(temperature=0.8, seed=1))]
                name = "no slots" if share is None else f"moe-spac, {100 * share:.0f} % in slots"
                name += f", {n_drafts} guesses" if n_drafts else ", no draft"
                print(f"{name:36s} " + " ".join(f"{1e3 * t:9.3f}" for t in times))


def _gap(model: Model, share: float | None, n_drafts: int, sampling: Sampling) -> float:
    """Seconds, the median of two texts of 400 tokens."""
    real, ends, found = llama_cpp.llama_decode, [0.0], []

    def decode(*arguments: object) -> int:
        found.append(time.perf_counter() - ends[0])
        code = int(real(*arguments))
        ends[0] = time.perf_counter()
        return code

    residency = None
    with Context(model, n_ctx=1024, n_threads=1) as context:
        if share is not None:
            experts = context.experts
            assert experts
            experts.set_slots([round(share * experts.row(r).n_expert) for r in range(experts.n_rows)])
            residency = Residency(experts, make("moe-spac", experts.n_rows, experts.n_expert))
            residency.fill()
        drafter = NgramDraft() if n_drafts else None
        decoder = Decoder(context, residency, drafter=drafter, draft_max=n_drafts, draft_fixed=True, sampling=sampling)
        llama_cpp.llama_decode = decode
        try:
            for text in ("In the morning the old man went down to the harbour. In the morning", "The heron stood and"):
                list(decoder.generate(model.tokenize(text), 400))
        finally:
            llama_cpp.llama_decode = real
        decoder.close()
        if residency:
            residency.close()
    return float(np.median(found))


def main() -> None:
    about = (__doc__ or "").split("\n\n")
    argparse.ArgumentParser(description=about[0], epilog=" ".join(about[2].split())).parse_args()
    capture_log()
    print(f"vocabulary {N_VOCAB}; medians")
    chains()
    grammars()
    gaps()


if __name__ == "__main__":
    main()
