"""Where weights are not quantized the text is plain decoding's, with at most 2 of 100 exceptions (docs/same-text.md)."""

from __future__ import annotations

from collections.abc import Iterator

import gguf
import numpy as np
import pytest

from moespac_llamacpp import native
from moespac_llamacpp.models import Context, Model
from pair import DRAFT, PROMPTS, TARGET, Pair, hundred_prompts, plain_greedy, target_context
from test_decoder import DRAFTERS, check_greedy, upstream_drafted
from unquantized import write_f32

Texts = list[tuple[list[int], list[int]]]

EQUAL = 0.98  # of the texts, from the first token to the last
CASES = [(name, 0.17, execution) for name in DRAFTERS for execution in ("portable", "in-stream")]

only_on_a_cpu = pytest.mark.skipif(
    native.default_device().kind != "cpu", reason="the texts were counted on CPUs: a GPU's F32 products are others"
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """The bundled pair, the target's weights as F32."""
    path = write_f32(TARGET, tmp_path_factory.mktemp("f32") / "tiny-moe-F32.gguf")
    with Model(path) as target, Model(DRAFT) as draft:
        yield Pair(target, draft)


@pytest.fixture(scope="module")
def plain(pair: Pair) -> Iterator[Context]:
    with target_context(pair, attach=False) as context:
        yield context


@pytest.fixture(scope="module")
def texts(pair: Pair, plain: Context) -> Texts:
    """(prompt, what plain decoding goes on with), 64 tokens."""
    prompts = [pair.target.tokenize(text) for text in PROMPTS]
    return [(prompt, plain_greedy(plain, prompt, 64)) for prompt in prompts]


@pytest.fixture(scope="module")
def hundred(pair: Pair, plain: Context) -> Texts:
    return [(prompt, plain_greedy(plain, prompt, 256)) for prompt in hundred_prompts(pair.target)]


def test_the_unquantized_target_holds_the_same_values(pair: Pair) -> None:
    ours, bundled = gguf.GGUFReader(pair.target.path), gguf.GGUFReader(TARGET)
    assert {tensor.tensor_type for tensor in ours.tensors} == {gguf.GGMLQuantizationType.F32}
    for copy, tensor in zip(ours.tensors, bundled.tensors, strict=True):
        assert copy.name == tensor.name and (copy.shape == tensor.shape).all()
        assert np.array_equal(copy.data, gguf.quants.dequantize(tensor.data, tensor.tensor_type))
    changed = {"general.file_type", "GGUF.kv_count"}
    for name in bundled.fields.keys() - changed:
        assert ours.fields[name].contents() == bundled.fields[name].contents(), name


@only_on_a_cpu
@pytest.mark.parametrize("name, share, execution", CASES)
def test_unquantized_text_is_that_of_plain_decoding(
    pair: Pair, plain: Context, texts: Texts, name: str, share: float, execution: str
) -> None:
    n_same = check_greedy(pair, plain, texts, name, share, execution=execution)
    assert n_same >= EQUAL * len(texts)


@only_on_a_cpu
@pytest.mark.full
@pytest.mark.parametrize("name, share, execution", [*CASES, ("none", 0.0, "portable"), ("model", 0.5, "portable")])
def test_at_most_2_of_100_unquantized_texts_differ(
    pair: Pair, plain: Context, hundred: Texts, name: str, share: float, execution: str
) -> None:
    n_same = check_greedy(pair, plain, hundred, name, share, n=256, execution=execution)
    print(f"F32, {name}, {100 * share:.0f} % in slots, {execution}: {n_same} of 100 texts equal ", end="")
    assert n_same >= EQUAL * len(hundred)


@only_on_a_cpu
@pytest.mark.full
@pytest.mark.parametrize("name", DRAFTERS)
def test_upstreams_unquantized_texts_do_not_depend_on_drafts(
    pair: Pair, plain: Context, hundred: Texts, name: str
) -> None:
    n_same = upstream_drafted(pair, plain, hundred, name)
    print(f"F32, {name}, nothing attached: {n_same} of 100 texts equal ", end="")
    assert n_same >= EQUAL * len(hundred)
