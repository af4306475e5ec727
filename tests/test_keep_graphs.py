"""A draft's context keeps a graph for each of its batch widths, although nothing is attached to it."""

from __future__ import annotations

from collections.abc import Iterator

import llama_cpp
import numpy as np
import pytest

from moespac_llamacpp import native
from moespac_llamacpp.models import Context
from pair import N_CTX, Pair


@pytest.fixture
def contexts(pair: Pair) -> Iterator[tuple[Context, Context]]:
    """Of the draft: one that keeps the graphs of one and two tokens, and one that does not."""
    with (
        Context(pair.draft, n_ctx=N_CTX, n_threads=1, attach=False, keep_graphs=2) as keeps,
        Context(pair.draft, n_ctx=N_CTX, n_threads=1, attach=False) as plain,
    ):
        yield keeps, plain


def reused(context: Context) -> int:
    return int(llama_cpp.llama_perf_context(context.pointer).n_reused)


def test_changing_widths_find_their_graphs_and_give_the_same(pair: Pair, contexts: tuple[Context, Context]) -> None:
    keeps, plain = contexts
    rng = np.random.default_rng(0)
    text = pair.draft.tokenize("The heron stood in the river and")
    assert np.array_equal(keeps.decode(text), plain.decode(text))
    counts = []
    for i in range(24):
        tokens = rng.integers(10, 4000, 1 + i % 2).tolist()
        before = reused(keeps), reused(plain)
        assert np.array_equal(keeps.decode(tokens), plain.decode(tokens))
        counts.append((reused(keeps) - before[0], reused(plain) - before[1]))
        if i % 5 == 4:
            for context in contexts:
                assert context.rollback(context.n_past - 2)
    assert all(kept == 1 and made == 0 for kept, made in counts[2:]), counts


def test_prompts_and_shifts_in_between_stay_right(contexts: tuple[Context, Context]) -> None:
    keeps, plain = contexts
    rng = np.random.default_rng(1)
    for n in (40, 1, 2, 70, 2, 1, 3, 1):
        tokens = rng.integers(10, 4000, n).tolist()
        assert np.array_equal(keeps.decode(tokens), plain.decode(tokens))
    assert keeps.shift(4, 30) and plain.shift(4, 30)
    for n in (1, 2, 1):
        tokens = rng.integers(10, 4000, n).tolist()
        assert np.array_equal(keeps.decode(tokens), plain.decode(tokens))


def test_it_is_no_attachment(pair: Pair, contexts: tuple[Context, Context]) -> None:
    """Its context is upstream's again when it ends, and experts can be attached to a target's all the same."""
    keeps, _ = contexts
    with pytest.raises(native.MoeError, match="no MoE layers"):
        native.Experts(keeps.pointer)
    native.keep_graphs(keeps.pointer, 2)
    keeps.decode([10, 11])
    native.keep_graphs(keeps.pointer, 0)
    keeps.decode([10])
    with pytest.raises(native.MoeError, match="up to 513 tokens shall be kept, it must be from 0 to 512"):
        native.keep_graphs(keeps.pointer, 513)
    with Context(pair.target, n_ctx=N_CTX, n_threads=1, attach=False, keep_graphs=2) as target:
        target.decode([10, 11])
        experts = native.Experts(target.pointer)
        with pytest.raises(native.MoeError, match="it keeps graphs already"):
            native.keep_graphs(target.pointer, 2)
        target.decode([12])
        experts.detach()
