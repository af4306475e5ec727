"""What acceptance costs between two decodes: µs a position and ms a step, at the vocabulary of Qwen3. Prints two tables.

    python scripts/bench_sampling.py

Logits are random with the tail of a real model's: one clear favourite among some hundred plausible tokens. A step has 3 drafts
that are all accepted, so that all 4 positions are looked at. For grammars the bundled model's vocabulary is filled up with random
strings to the same size; the text so far is given, and which tokens may follow is up to the grammar, not to the logits: that is
the worst case, as a model that knows JSON has the right token among its first few.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import gguf
import llama_cpp
import numpy as np

from moespac_llamacpp.acceptance import Law, Sampler, Sampling, log_probability, verify
from moespac_llamacpp.engine import TINY_MODEL
from moespac_llamacpp.grammar import compile_grammar, from_json_schema
from moespac_llamacpp.models import Model, capture_log

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
    text = rng.integers(0, N_VOCAB, 100).tolist()
    drafts = favourites[:3].tolist()
    print(f"{'chain':36s} {'law, µs':>9s} {'step of 4, ms':>14s}")
    for name, sampling in CHAINS.items():
        with Sampler(sampling, N_VOCAB) as sampler:
            sampler.reset(text)
            n = 20 if sampling.top_k == 0 and sampling.top_p < 1 else 200
            q = None if sampling.greedy else [Law(np.array([t], np.int32), np.ones(1)) for t in drafts]
            law = median_of(lambda sampler=sampler: sampler.law(logits[0]), n)  # type: ignore[misc]
            step = median_of(lambda sampler=sampler, q=q: verify(sampler, logits, drafts, q), n)  # type: ignore[misc]
        print(f"{name:36s} {1e6 * law:9.0f} {1e3 * step:14.3f}")
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


def main() -> None:
    capture_log()
    print(f"vocabulary {N_VOCAB}; medians")
    chains()
    grammars()


if __name__ == "__main__":
    main()
