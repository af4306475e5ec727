"""Graphs are made before the first text, and nothing of that is left in the context."""

from __future__ import annotations

import numpy as np
import pytest

from moespac_llamacpp.engine import widths_to_come
from moespac_llamacpp.models import Context
from pair import Pair

TEXT = [5, 17, 99, 23, 64, 11, 8]


def logits_of(context: Context) -> list[np.ndarray]:
    """As verify batches: the logits of all tokens."""
    return [context.decode(part, all_logits=True).copy() for part in (TEXT[:3], TEXT[3:4], TEXT[4:])]


def test_a_warm_context_builds_no_graph_and_remembers_nothing(pair: Pair) -> None:
    with Context(pair.target, n_ctx=256, n_threads=1) as cold, Context(pair.target, n_ctx=256, n_threads=1) as warm:
        assert warm.experts is not None
        heard: list[float] = []
        warm.warm_up([1, 3], 60.0, heard.append)
        assert heard == [0.5, 1.0]
        assert warm.n_past == 0 and warm.experts.perf_total().n_calls == 0
        built = warm.experts.graph_stats()[1]
        for a, b in zip(logits_of(warm), logits_of(cold), strict=True):
            assert np.array_equal(a, b)
        assert warm.experts.graph_stats()[1] == built


def test_a_warm_up_ends_when_its_time_is_over(pair: Pair) -> None:
    with Context(pair.target, n_ctx=256, n_threads=1) as context:
        assert context.experts is not None
        context.warm_up([1, 2, 3], 0.0)
        assert context.experts.graph_stats() == (0, 0)


def test_the_widths_that_come_first_come_first() -> None:
    assert widths_to_come(0, False) == [1]
    assert widths_to_come(8, True) == [1, 9]
    assert widths_to_come(8, False)[:2] == [1, 3]
    assert sorted(widths_to_come(8, False)) == list(range(1, 10))


def test_as_many_guesses_as_a_batch_has_logits_for_can_be_warmed_up(pair: Pair) -> None:
    for options, most in (({}, 31), ({"n_batch": 8}, 7), ({"params": {"n_outputs_max": 0, "n_batch": 40}}, 39)):
        with Context(pair.target, n_ctx=256, n_threads=1, attach=False, **options) as context:
            assert context.max_guesses == most
            context.warm_up(widths_to_come(context.max_guesses, True), 60.0)
            with pytest.raises(ValueError, match=f"{most + 2} tokens at once|not {most + 2}"):
                context.decode([5] * (most + 2), all_logits=True)
