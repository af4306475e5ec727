"""Planted pairs: files of the ordered shapes and types, which behave as planned when llama.cpp decodes them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from moespac_llamacpp.models import Model, capture_log
from moespac_llamacpp.synth import Order, Pair, RoomError, write_pair
from moespac_llamacpp.synth.check import check_pair, overlap
from moespac_llamacpp.synth.plan import BLOCK, Plan, fill_up, fit_trace, make_plan
from moespac_llamacpp.synth.shapes import SHAPES, tensors
from moespac_llamacpp.synth.vocabulary import byte_symbols, make_vocabulary
from moespac_llamacpp.synth.writer import check_room

ACCEPTANCES = (0.6, 0.9)


def quiet(_: str):
    return lambda fraction: None


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """80 tokens of 6 layers with 40 experts, 3 a token; the last one partly unrecorded."""
    path = tmp_path_factory.mktemp("trace") / "recorded.npz"
    rng = np.random.default_rng(3)
    experts = np.stack([[rng.permutation(40)[:3] for _ in range(6)] for _ in range(80)]).astype(np.uint8)
    experts[-1, :, 1:] = 255
    np.savez(path, experts=experts, n_expert=40, is_decode=np.arange(80) >= 10)
    return path


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, trace: Path) -> Pair:
    capture_log()
    order = Order("qwen3-30b-a3b", acceptances=ACCEPTANCES, trace=trace, tiny=True)
    return write_pair(order, tmp_path_factory.mktemp("pair"), quiet)


def test_a_real_decode_follows_the_plan(pair: Pair) -> None:
    findings = check_pair(pair, 1)
    assert not findings.failures
    assert findings.routing > 0.95 and findings.chain == 1.0
    assert set(findings.acceptance) == {"draft-tiny-qwen3-60", "draft-tiny-qwen3-90"}
    assert findings.words_repeated == 0 and findings.ngram_drafted == 0


def test_a_pair_that_is_not_as_planned_is_found(pair: Pair, tmp_path: Path) -> None:
    """The negative control: the plan of another seed must not fit."""
    for path in (pair.target, *pair.drafts):
        (tmp_path / path.name).symlink_to(path)
    plan = pair.plan()
    rng = np.random.default_rng(9)
    wrong = Plan(**(vars(plan) | {"base": rng.permutation(plan.base), "chain": np.roll(plan.chain, 7)}))
    wrong.save(tmp_path / "plan.npz")
    (tmp_path / "draft-tiny-qwen3-60.gguf").rename(tmp_path / "draft-tiny-qwen3-80.gguf")
    failures = check_pair(Pair(tmp_path), 1).failures
    assert any("choices" in f for f in failures) and any("acceptance" in f for f in failures)


def test_deepseek_pairs_behave_too_without_a_trace(tmp_path: Path) -> None:
    order = Order("deepseek-v2-lite", draft="qwen3-0.6b", draft_quant="Q4_K_M", tiny=True)
    findings = check_pair(write_pair(order, tmp_path, quiet), 1, n_tokens=160)
    assert not findings.failures


@pytest.mark.full
def test_true_widths_and_vocabulary_behave_as_planned(tmp_path: Path) -> None:
    """Two layers of the real shape: 128 experts, 8 a token, 151,936 words; 2 GB."""
    order = Order("qwen3-30b-a3b", draft="qwen3-0.6b", layers=2)
    findings = check_pair(write_pair(order, tmp_path, quiet), 2, n_tokens=160)
    assert not findings.failures and findings.chain == 1.0


def test_another_draft_joins_a_pair_of_the_same_plan_only(pair: Pair, trace: Path) -> None:
    order = Order("qwen3-30b-a3b", draft="qwen3-0.6b", acceptances=(0.5,), trace=trace, tiny=True, drafts_only=True)
    write_pair(order, pair.folder, quiet).draft(0.5, "tiny-qwen3").unlink()
    with pytest.raises(ValueError, match="other routing"):
        write_pair(replace(order, seed=4), pair.folder, quiet)


def test_text_of_words_has_a_token_for_each_word(pair: Pair) -> None:
    plan = pair.plan()
    words = [*plan.chain[-40:].tolist(), *plan.decoys[:40].tolist()]
    with Model(pair.target) as model:
        assert model.tokenize(make_vocabulary(model.n_vocab).text(words)) == words
        assert model.tokenize(pair.prompt_file.read_text()) == plan.chain[:512].tolist()
        other = "Any text, even ünï çode\n"
        assert b"".join(map(model.piece, model.tokenize(other))) == other.encode()


def test_the_file_has_the_ordered_tensors_and_types(pair: Pair) -> None:
    found = {t.name: t for t in gguf.GGUFReader(pair.target).tensors}
    ordered = list(tensors(SHAPES["tiny-qwen3moe"], "Q4_K_M"))
    assert set(found) == {t.name for t in ordered}
    for tensor in ordered:
        assert tuple(reversed(found[tensor.name].shape.tolist())) == tensor.shape
        assert found[tensor.name].tensor_type == tensor.type
        assert found[tensor.name].n_bytes == tensor.n_bytes


def test_full_shapes_have_the_published_sizes() -> None:
    """Parameters as the models' cards give them; the Q4_K_M of Qwen3-30B-A3B that is handed around has 18.56 GB."""
    parameters = {
        name: sum(math.prod(t.shape) for t in tensors(SHAPES[name], "Q4_K_M")) / 1e9
        for name in ("qwen3-30b-a3b", "deepseek-v2-lite", "qwen3-4b", "qwen3-0.6b")
    }
    assert parameters["qwen3-30b-a3b"] == pytest.approx(30.5, abs=0.1)
    assert parameters["deepseek-v2-lite"] == pytest.approx(15.7, abs=0.1)
    # tied embeddings are two tensors here
    assert parameters["qwen3-4b"] - 151936 * 2560 / 1e9 == pytest.approx(4.0, abs=0.1)
    assert parameters["qwen3-0.6b"] - 151936 * 1024 / 1e9 == pytest.approx(0.6, abs=0.05)
    assert sum(t.n_bytes for t in tensors(SHAPES["qwen3-30b-a3b"], "Q4_K_M")) == pytest.approx(18.55e9, rel=0.005)


def test_misses_are_exact_in_every_block(pair: Pair) -> None:
    plan = pair.plan()
    for acceptance in (0.6, 0.75, 0.9):
        wrong = plan.misses(acceptance)[: len(plan.chain) // BLOCK * BLOCK].reshape(-1, BLOCK).sum(axis=1)
        assert set(wrong.tolist()) == {round((1 - acceptance) * BLOCK)}


def test_laps_differ_but_stay_near_the_trace(pair: Pair) -> None:
    plan = pair.plan()
    n = 70  # tokens of the trace that were generated
    laps = [plan.chain[i * n : (i + 1) * n] for i in range(2)]
    chosen = [plan.experts(lap) for lap in laps]
    same = [overlap(c, plan.base[plan.base_of[lap]]) for c, lap in zip(chosen, laps, strict=True)]
    assert all(0.8 < s < 0.97 for s in same)
    assert overlap(*chosen) < min(same)


def test_the_next_lap_is_of_another_variant() -> None:
    shape = replace(SHAPES["tiny-qwen3moe"], n_vocab=20000)
    plan = make_plan(shape, range(400, 19000), None, 1500)
    n = 128
    variants = plan.base_of[plan.chain[: 20 * n : n]] // n
    assert len(set(variants.tolist())) > 2 and (np.diff(variants) != 0).all()
    first, other = plan.base[:n], plan.base[n : 2 * n]
    assert 0.6 < overlap(first, other) < 0.95
    assert all(len(set(row)) == shape.n_expert_used for row in other.reshape(-1, shape.n_expert_used).tolist())


def test_a_trace_is_fitted_to_the_models_layers_experts_and_k(trace: Path) -> None:
    ids, said = fit_trace(trace, SHAPES["tiny-qwen3moe"], np.random.default_rng(0))
    assert ids.shape == (70, 4, 4) and ids.min() >= 0 and ids.max() < 32
    assert all(len(set(row)) == 4 for row in ids.reshape(-1, 4).tolist())
    assert "spread over 4" in said and "modulo 32" in said and "from 3 to 4" in said


def test_filling_up_keeps_what_is_there_in_its_order() -> None:
    ids = np.array([[[5, 2, -1]], [[1, 1, 3]]], np.int16)
    filled = fill_up(ids, 8, 4, np.random.default_rng(0))
    assert filled[0, 0, :2].tolist() == [5, 2] and filled[1, 0, :2].tolist() == [1, 3]


def test_vocabularies_have_the_size_that_was_asked_for() -> None:
    for n in (2048, 102400, 151936):
        vocabulary = make_vocabulary(n)
        assert len(vocabulary.tokens) == len(set(vocabulary.tokens)) == n == len(vocabulary.types)
    with pytest.raises(ValueError, match="cannot be made of words"):
        make_vocabulary(10**6)
    assert len(set(byte_symbols())) == 256


def test_bad_orders_are_refused_in_a_sentence(tmp_path: Path) -> None:
    junk = tmp_path / "junk.npz"
    junk.write_bytes(b"no")
    shape = SHAPES["tiny-qwen3moe"]
    for order, words in (
        (Order("gpt-9"), "no model 'gpt-9'"),
        (Order("qwen3-4b"), "has no experts"),
        (Order("qwen3-30b-a3b", draft="deepseek-v2-lite"), "cannot be a draft"),
        (Order("qwen3-30b-a3b", layers=99), "from 1 to 48"),
        (Order("qwen3-30b-a3b", acceptances=(75,)), "from 0 to 1"),
    ):
        with pytest.raises(ValueError, match=words):
            order.shapes()
    with pytest.raises(ValueError, match="junk"):
        make_plan(shape, range(500, 4000), junk, 384)
    with pytest.raises(ValueError, match="not the plan"):
        Plan.load(junk)
    with pytest.raises(RoomError, match="GB are free there"):
        check_room(tmp_path, 1 << 60, 0)
    with pytest.raises(RoomError, match="memory"):
        check_room(tmp_path, 1, 1 << 60)


def test_a_failed_write_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("moespac_llamacpp.synth.writer.os.pwrite", full)
    with pytest.raises(OSError, match="No space"):
        write_pair(Order("qwen3-30b-a3b", tiny=True), tmp_path, quiet)
    assert not list(tmp_path.glob("*.gguf*"))
