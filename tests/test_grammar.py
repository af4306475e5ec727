"""Text under a grammar: always within it, by the law of llama.cpp's own sampler, drafted or not."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import llama_cpp
import numpy as np
import pytest
from typer.testing import CliRunner

from moespac_llamacpp import shortlist
from moespac_llamacpp.acceptance import Law, Sampler, Sampling, verify
from moespac_llamacpp.cli import app
from moespac_llamacpp.decoder import Decoder
from moespac_llamacpp.grammar import JSON_OBJECT, GrammarError, compile_grammar, from_json_schema, read_grammar
from moespac_llamacpp.models import Context
from pair import Pair, target_context
from test_acceptance import Upstream, chi_square
from test_chat import moespac
from test_decoder import Script, with_drafter

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer"},
        "kind": {"enum": ["a", "b"]},
    },
    "required": ["name", "age", "kind"],
}
HOT = Sampling(temperature=1.5, top_k=0, top_p=1, min_p=0, seed=3)


@pytest.fixture
def context(pair: Pair) -> Iterator[Context]:
    with target_context(pair) as context:
        yield context


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1, repeat_penalty=1.1, seed=1), HOT])
@pytest.mark.parametrize("name", ["none", "ngram", "model"])
def test_every_text_follows_the_schema(pair: Pair, context: Context, name: str, sampling: Sampling) -> None:
    opened: list[Context] = []
    drafter = with_drafter(name, pair, opened)
    decoder = Decoder(
        context, drafter=drafter, draft_max=4, draft_fixed=True, sampling=sampling, grammar=from_json_schema(SCHEMA)
    )
    n_accepted = n_rejected = 0
    for question in ("heron", "river", "stone"):
        prompt = pair.target.tokenize(pair.target.chat_prompt(f'What does "{question}" mean?'))
        value = json.loads(b"".join(decoder.stream(prompt, 200)))
        assert decoder.report.finish_reason == "stop"
        assert list(value) == ["name", "age", "kind"] and len(value["name"]) <= 12
        assert isinstance(value["age"], int) and value["kind"] in ("a", "b")
        n_accepted += decoder.report.n_accepted
        n_rejected += decoder.report.n_drafted - decoder.report.n_accepted
    assert name == "none" or n_rejected > 0
    assert name != "model" or n_accepted > 10
    decoder.close()
    for other in opened:
        other.close()


@pytest.mark.parametrize("n_groups", [4096, 256], ids=["all", "shortlist"])
def test_the_law_is_that_of_llama_cpps_chain_with_its_grammar(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, n_groups: int
) -> None:
    """In each state of the grammar; a shortlist that the grammar leaves too little of grows until it decides."""
    monkeypatch.setattr(shortlist, "N_GROUPS", n_groups)
    model = pair.target
    assert (model.n_vocab >= shortlist.MIN_GROUP * n_groups) == (n_groups == 256)
    sampling = Sampling(temperature=1, top_k=8, top_p=0.9, min_p=0.01, repeat_penalty=1.3, seed=0)
    rng = np.random.default_rng(5)
    full = llama_cpp.llama_sampler_init_grammar(model.vocab, from_json_schema(SCHEMA).encode(), b"root")
    theirs = Upstream(sampling, model.n_vocab, [full])
    with Sampler(sampling, model.n_vocab, grammar=compile_grammar(model, from_json_schema(SCHEMA))) as ours:
        ours.reset()
        text: list[int] = []
        while len(text) < 40:
            logits = (3 * rng.standard_normal(model.n_vocab)).astype(np.float32)
            left = theirs.left(logits)
            expected = np.array(list(left.values()))
            p = np.exp(expected - expected.max())
            law = ours.law(logits)
            assert dict(zip(law.ids.tolist(), law.p.tolist(), strict=True)) == pytest.approx(
                {t: q for t, q in zip(left, p / p.sum(), strict=True) if q > 0}
            )
            token = ours.draw(law)
            if model.ends(token):
                break
            text.append(token)
            ours.accept(token)
            theirs.accept(token)
        assert len(text) > 10
    theirs.close()


def test_drafting_keeps_the_law_under_a_grammar(pair: Pair) -> None:
    """Two tokens of a grammar of few words; drafts are drawn from a law of their own, under the same grammar."""
    model, rng = pair.target, np.random.default_rng(2)
    gbnf = 'root ::= ("a" | "b" | "ab" | "c") ("b" | "c" | "d")'
    target, draft = (rng.standard_normal((3, model.n_vocab)).astype(np.float32) for _ in range(2))
    sampling = Sampling(temperature=1, top_k=0, top_p=1, min_p=0, seed=9)
    with Sampler(sampling, model.n_vocab, grammar=compile_grammar(model, gbnf)) as sampler:
        law: dict[tuple[int, ...], float] = {(): 1.0}
        for i in range(2):
            longer = {}
            for text, p in law.items():
                sampler.reset()
                for token in text:
                    sampler.accept(token)
                at = sampler.law(target[i])
                longer |= {(*text, int(t)): p * float(q) for t, q in zip(at.ids, at.p, strict=True)}
            law = longer
        assert len(law) > 8
        seen: Counter[tuple[int, ...]] = Counter()
        n_accepted = 0
        for _ in range(1200):
            sampler.reset()
            fork, guesses, q = sampler.fork(), list[int](), list[Law]()
            for i in range(2):
                q.append(fork.law(draft[i]))
                guesses.append(fork.draw(q[-1]))
                fork.accept(guesses[-1])
            fork.close()
            tokens = verify(sampler, target, guesses, q)
            n_accepted += len(tokens) - 1
            if len(tokens) == 1:
                tokens += verify(sampler, target[1:2], [])
            seen[tuple(tokens[:2])] += 1
    assert 120 < n_accepted < 2280
    value, limit = chi_square(seen, law)
    assert value < limit


def test_drafts_that_break_the_grammar_are_rejected(pair: Pair, context: Context) -> None:
    """A token that the grammar does not allow must not even reach its sampler, which would end the process."""
    prompt = pair.target.tokenize("The heron")
    texts = []
    for sampling in (Sampling(), HOT):
        drafter = Script(wrong=pair.target.tokenize("zebra", bos=False)[0])
        decoder = Decoder(
            context, drafter=drafter, draft_max=3, draft_fixed=True, sampling=sampling, grammar='root ::= "yes" | "no"'
        )
        texts.append(b"".join(decoder.stream(prompt, 20)))
        assert decoder.report.n_drafted > 0 and decoder.report.n_accepted == 0
        decoder.close()
    assert set(texts) <= {b"yes", b"no"}


def test_a_new_text_starts_the_grammar_anew(pair: Pair, context: Context) -> None:
    decoder = Decoder(context, grammar='root ::= "yes"')
    prompt = pair.target.tokenize("The heron")
    for _ in range(3):
        assert b"".join(decoder.stream(prompt, 20)) == b"yes"
    decoder.sample_by(Sampling())
    assert b"".join(decoder.stream(prompt, 3)) != b"yes"
    decoder.close()


def test_any_json_is_an_object() -> None:
    strict = from_json_schema({"type": "string"})
    assert r"\x00-\x1F" in strict and "object" in JSON_OBJECT


@pytest.mark.parametrize(
    ("gbnf", "sentence"),
    [
        ("root ::= foo", "the grammar cannot be parsed: Undefined rule identifier 'foo'"),
        ('root ::= "a', "the grammar cannot be parsed: unexpected end of input"),
        ('word ::= "a"', "the grammar cannot be parsed: it needs a rule `root`, and no rule may start with itself"),
        (
            'root ::= root "a"',
            "the grammar cannot be parsed: it needs a rule `root`, and no rule may start with itself",
        ),
        (" \n", "the grammar is empty"),
        ('root ::= "a\0"', "the grammar has a zero byte"),
    ],
)
def test_a_bad_grammar_is_one_sentence(pair: Pair, capfd: pytest.CaptureFixture[str], gbnf: str, sentence: str) -> None:
    with pytest.raises(GrammarError) as error:
        compile_grammar(pair.target, gbnf)
    assert str(error.value) == sentence and capfd.readouterr().err == ""


def test_bad_schemas_and_files_are_one_sentence(tmp_path: Path) -> None:
    for schema, sentence in (
        ("{", "the JSON schema is not JSON: "),
        ('{"$ref": "#/x"}', "cannot be turned into a grammar: "),
    ):
        with pytest.raises(GrammarError, match=sentence):
            from_json_schema(schema)
    with pytest.raises(GrammarError, match=r"x\.gbnf: the grammar cannot be read: No such file"):
        read_grammar(tmp_path / "x.gbnf")


def test_the_options_are_llama_cpps(tmp_path: Path) -> None:
    file = tmp_path / "yes.gbnf"
    file.write_text('root ::= "yes"')
    short = ("generate", "The heron", "-t", "1", "-n", "60", "-c", "512")
    assert moespac(*short, "--grammar-file", str(file)).stdout == "yes\n"
    assert json.loads(moespac(*short, "-j", json.dumps(SCHEMA)).stdout)["kind"] in ("a", "b")
    done = moespac("chat", "--json", "-t", "1", "-c", "512", "--grammar", 'root ::= "no"', lines="hello\n")
    assert json.loads(done.stdout)["text"] == "no"
    for arguments, sentence in (
        (("--grammar", "root ::= x"), "the grammar cannot be parsed: Undefined rule identifier 'x'"),
        (
            ("--grammar", "x", "-j", "{}"),
            "--grammar, --grammar-file and --json-schema say what the text follows: give one",
        ),
    ):
        done = CliRunner().invoke(app, [*short, *arguments])
        assert done.exit_code == 1 and done.stdout == "" and f"moespac: {sentence}" in done.stderr
        assert "Traceback" not in done.stderr
