"""The stream lane: during a decode cold experts cross the link into slots whose residents the batch does not use, when their
layer has chosen them, or before, when the look-ahead expects that.

On the CPU the device's part is emulated (src/moe-stream.cpp) with the same decisions, maps and victims."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import gguf
import llama_cpp
import numpy as np
import pytest

from conftest import Attached
from families import FAMILIES as BY_NAME
from lowlevel import EXACT, Capture, GgmlTensor, decode
from moespac_llamacpp import native
from moespac_llamacpp.decoder import Decoder
from moespac_llamacpp.draft import GgufDraft
from moespac_llamacpp.metering import Meter
from moespac_llamacpp.models import Context
from moespac_llamacpp.policies import make
from moespac_llamacpp.residency import Residency
from pair import N_CTX, PROMPTS, Pair, assert_same_text, plain_greedy, target_context
from parity import test_device
from test_stream import N_POOL, TIMEOUT_MS, Array, Asked, close, half_resident, tokens

FAMILIES = ("qwen3moe", "gpt-oss", "llama4", "grovemoe", "gemma4-scale", "glm4moe")


@pytest.fixture
def streaming(attach: Callable[..., Attached]) -> Callable[..., Attached]:
    """attach(…) in-stream, every second expert resident, up to `most` experts of a row streamed whatever the rates say, and up to
    `ahead` before."""

    def make(family: str = "qwen3moe", most: int = 2, ahead: int = 0, **options: Any) -> Attached:
        a = attach(family, experts={"execution": "in-stream", **options.pop("experts", {})}, **options)
        half_resident(a.experts)
        a.experts.set_streaming(most, always=True)
        a.experts.set_look_ahead(ahead)
        return a

    return make


def step(a: Attached, n: int, seed: int = 0) -> Array:
    a.ctx.clear()
    return decode(a.ctx, tokens(n, seed))


def residents(a: Attached) -> Array:
    return a.experts.states_table() == native.RESIDENT


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("n", [1, 3, 9])
@pytest.mark.parametrize("ahead", [0, 3])
def test_streamed_experts_give_the_same_results(
    streaming: Callable[..., Attached], family: str, n: int, ahead: int
) -> None:
    """With the lane and without, and when what it has left in the slots is hit later."""
    a = streaming(family)
    assert any(r.streams for r in a.experts.rows())
    n_streamed = n_ahead = 0
    for seed in range(4):
        a.experts.set_streaming(2, always=True)
        a.experts.set_look_ahead(ahead)
        a.experts.reset_perf()
        streamed = step(a, n, seed)
        n_streamed += a.experts.perf_total().n_streamed_experts
        n_ahead += a.experts.perf_total().n_ahead_experts
        a.experts.set_streaming(0)
        a.experts.set_look_ahead(0)
        again = step(a, n, seed)
        assert a.experts.perf_total().n_streamed_experts == 0 or n_streamed > 0
        a.experts.set_execution("portable")
        plain = step(a, n, seed)
        a.experts.set_execution("in-stream")
        assert np.isfinite(streamed).all() and close(streamed, plain) and close(again, plain)
    assert (n_streamed > 0 and (n_ahead > 0) == (ahead > 0)) or n == 9, (
        "many tokens may use all experts that have slots"
    )


# by family: the block's input, the router's bias, whether it is added to the score's sigmoid
ROUTERS = {
    "qwen3moe": ("ffn_norm", "", False),
    "gpt-oss": ("attn_post_norm", "ffn_gate_inp.bias", False),
    "glm4moe": ("post_attn_norm", "exp_probs_b.bias", True),
}


@pytest.mark.parametrize("family", ROUTERS)
def test_the_look_ahead_brings_what_the_next_router_would_choose(
    streaming: Callable[..., Attached], family: str
) -> None:
    """Given this row's input; those of highest score first, if they have no slot."""
    name, bias, sigmoid = ROUTERS[family]
    capture = Capture(name)
    a = streaming(family, most=0, ahead=1, cb=capture)
    weights = {
        t.name: np.array(t.data, np.float64) for t in gguf.GGUFReader(a.model.path).tensors if t.tensor_type == 0
    }
    rows = [r for r in a.experts.rows() if r.streams]
    pairs = list(itertools.pairwise(rows))
    n_ahead = n_right = 0
    for seed in range(6):
        before = residents(a)
        capture.clear()
        a.experts.reset_perf()
        step(a, 1, seed)
        after, used = residents(a), a.experts.counts() > 0
        expected = np.zeros_like(before)
        for this, behind in pairs:
            (x,) = capture.tensors[f"{name}-{this.row}"]
            scores = weights[f"blk.{behind.row}.ffn_gate_inp.weight"] @ x.reshape(-1)
            scores = 1 / (1 + np.exp(-scores)) if sigmoid else scores
            scores = scores + weights[f"blk.{behind.row}.{bias}"] if bias else scores
            likely = [e for e in np.argsort(-scores)[: behind.n_expert_used] if not before[behind.row, e]]
            expected[behind.row, likely[:1]] = True
        assert (after & ~before == expected).all()
        perf = a.experts.perf_total()
        assert perf.n_ahead_experts == expected.sum() and perf.n_ahead_right == (used & expected).sum()
        assert perf.n_streamed_experts == 0 and perf.n_streamed_pairs == a.experts.counts()[expected].sum()
        n_ahead += perf.n_ahead_experts
        n_right += perf.n_ahead_right
    assert n_ahead >= n_right > 0


def test_spoilt_guesses_are_wrong(streaming: Callable[..., Attached]) -> None:
    """A model that is easy to foresee is measured as if it were not."""
    a = streaming(most=0, ahead=2)
    right = []
    for wrong in (0.0, 1.0):
        a.experts.set_look_ahead(2, wrong=wrong)
        a.experts.reset_perf()
        for seed in range(40):
            step(a, 1, seed)
        perf = a.experts.perf_total()
        right.append(perf.n_ahead_right / perf.n_ahead_experts)
    (row, *_) = a.experts.rows()
    assert right[0] > 1.5 * right[1] and right[1] < 2 * row.n_expert_used / row.n_expert


def test_what_was_streamed_is_resident_and_what_made_room_is_not(streaming: Callable[..., Attached]) -> None:
    a = streaming()
    for seed in range(6):
        before = residents(a)
        a.experts.reset_perf()
        step(a, 1, seed)
        after, used = residents(a), a.experts.counts() > 0
        n_streamed = a.experts.perf_total().n_streamed_experts
        arrived, left = after & ~before, before & ~after
        assert arrived.sum() == left.sum() == n_streamed
        assert (used[arrived]).all(), "only what the batch needs crosses the link"
        assert not used[left].any(), "no expert of the batch leaves"
        assert (arrived.sum(axis=1) == np.minimum(2, (used & ~before).sum(axis=1))).all()
        a.experts.reset_perf()
        step(a, 1, seed)  # the same batch once more: what was streamed is hit
        perf = a.experts.perf_total()
        assert perf.n_hot_experts == (used & after).sum()


def test_what_was_streamed_is_counted(streaming: Callable[..., Attached]) -> None:
    """Its pairs missed a slot, and the CPU did not compute them."""
    a = streaming()
    most = 0
    for seed in range(8):
        before = residents(a)
        a.experts.reset_perf()
        step(a, 1 + seed % 3, seed)
        perf, counts, arrived = a.experts.perf_total(), a.experts.counts(), residents(a) & ~before
        assert perf.n_streamed_experts == arrived.sum()
        assert perf.n_streamed_pairs == counts[arrived].sum()
        assert perf.n_cold_pairs == counts[~before].sum() >= perf.n_streamed_pairs
        most = max(most, perf.n_streamed_pairs - perf.n_streamed_experts)
    assert most > 0, "no streamed expert had two tokens"


@pytest.fixture
def crowded(streaming: Callable[..., Attached]) -> Callable[..., Attached]:
    """streaming(…), and the batches have had so little room that layers are computed in two passes."""

    def make(family: str = "qwen3moe", n: int = 9, **options: Any) -> Attached:
        a = streaming(family, most=native.MAX_STREAMED, **options)
        assert not any(r.two_passes for r in a.experts.rows())
        for seed in range(8):
            step(a, n, seed)
        assert all(r.two_passes == r.streams for r in a.experts.rows()), "no batch had too little room"
        return a

    return make


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("n", [4, 9, 32])
def test_two_passes_give_the_same_results(crowded: Callable[..., Attached], family: str, n: int) -> None:
    a = crowded(family, 16)
    for seed in range(3):
        a.experts.reset_perf()
        before = residents(a)
        late = step(a, n, seed)
        after, used = residents(a), a.experts.counts() > 0
        perf = a.experts.perf_total()
        assert perf.n_streamed_experts == (after & ~before).sum() == (before & ~after).sum()
        assert used[after & ~before].all() and perf.n_cold_pairs == a.experts.counts()[~before].sum()
        a.experts.set_execution("portable")
        assert np.isfinite(late).all() and close(late, step(a, n, seed))
        a.experts.set_execution("in-stream")
        a.experts.set_streaming(native.MAX_STREAMED, always=True)
        for _ in range(4):
            step(a, 16, seed)


def test_the_second_pass_takes_slots_that_the_first_has_used(crowded: Callable[..., Attached]) -> None:
    a = crowded()
    n_used = 0
    for seed in range(8):
        before = residents(a)
        step(a, 9, seed)
        left = before & ~residents(a)
        n_used += int((left & (a.experts.counts() > 0)).sum())
    assert n_used > 0


def test_the_look_ahead_goes_on_in_two_passes(crowded: Callable[..., Attached]) -> None:
    a = crowded(n=16, ahead=2)
    a.experts.reset_perf()
    for seed in range(6):
        late = step(a, 4, seed)
    assert a.experts.perf_total().n_ahead_experts > 0
    a.experts.set_execution("portable")
    assert close(late, step(a, 4, 5))


class Passes:
    """An eval callback that notes whether a graph has a second pass."""

    two = False

    def __call__(self, tensor: int, ask: bool, user_data: object = None) -> bool:
        self.two |= GgmlTensor.from_address(tensor).name.startswith(b"moe_bring")
        return False

    def of(self, a: Attached, n: int) -> bool:
        self.two = False
        step(a, n)
        return self.two


def test_wide_batches_begin_with_two_passes_and_take_one_where_there_is_room(
    streaming: Callable[..., Attached],
) -> None:
    passes = Passes()
    a = streaming(most=0, cb=passes)
    assert not passes.of(a, 9)
    a.experts.set_streaming(1)
    assert not passes.of(a, 7) and not any(r.two_passes for r in a.experts.rows())
    assert passes.of(a, 8) and passes.of(a, 9)
    assert all(r.two_passes == r.streams for r in a.experts.rows()) and any(r.streams for r in a.experts.rows())
    # slots for all that the batch uses, and for one that it does not
    used = a.experts.counts() > 0
    assert not used.all(axis=1).any()
    a.experts.set_slots([int(used[r.row].sum()) + 1 for r in a.experts.rows()])
    for row, here in enumerate(a.experts.states_table() == native.RESIDENT):
        spare = np.flatnonzero(~used[row])[0]
        for expert in np.flatnonzero(here & ~used[row] & (np.arange(len(here)) != spare)).tolist():
            a.experts.evict(row, expert)
        for expert in np.flatnonzero(~here & (used[row] | (np.arange(len(here)) == spare))).tolist():
            a.experts.load(row, expert)
    a.experts.sync()
    a.experts.publish()
    step(a, 8)
    two = step(a, 9)
    n_built = a.experts.graph_stats()[1]
    for _ in range(40):
        step(a, 9)
    assert not passes.of(a, 9) and passes.of(a, 8), "each width for itself"
    assert a.experts.graph_stats()[1] == n_built + 1, "the graphs of other widths are kept"
    assert close(two, step(a, 9))


def test_prompts_say_nothing_of_the_passes_of_other_batches(streaming: Callable[..., Attached]) -> None:
    passes = Passes()
    a = streaming(most=0, cb=passes)
    a.experts.set_streaming(1)
    assert passes.of(a, 9)
    for _ in range(40):
        step(a, 48)  # not in-stream
    assert passes.of(a, 9)


def test_streaming_from_the_start_and_after_another_execution_begins_with_two_passes(
    attach: Callable[..., Attached],
) -> None:
    passes = Passes()
    a = attach("qwen3moe", cb=passes, experts={"execution": "in-stream", "stream_experts": 1})
    half_resident(a.experts)
    assert passes.of(a, 9)
    a.experts.set_execution("portable")
    assert not passes.of(a, 9)
    a.experts.set_execution("in-stream")
    assert passes.of(a, 9)


def left_for_least_value(a: Attached, values: Array, seed: int) -> int:
    """How many residents made room in a step: each the one of least value in its row."""
    before = residents(a)
    step(a, 1, seed)
    used, left = a.experts.counts() > 0, before & ~residents(a)
    for row in np.flatnonzero(left.any(axis=1)):
        lowest = np.flatnonzero(before[row])[np.argmin(values[row][before[row]])]
        assert left[row].nonzero()[0].tolist() == [lowest] and not used[row, lowest]
    return int(left.sum())


def test_residents_of_least_value_make_room(streaming: Callable[..., Attached]) -> None:
    a = streaming(most=1)
    values = np.random.default_rng(1).random((a.experts.n_rows, a.experts.n_expert))
    for seed in range(4):
        a.experts.set_values(values)
        left_for_least_value(a, values, seed)


def test_values_outlive_a_change_of_execution(streaming: Callable[..., Attached]) -> None:
    """Those set in-stream, and those set while the portable execution has no use for them."""
    a = streaming(most=1)
    rng = np.random.default_rng(1)
    for while_portable in (False, True, False, True):
        values = rng.random((a.experts.n_rows, a.experts.n_expert)).astype(np.float32)
        if not while_portable:
            a.experts.set_values(values)
        a.experts.set_execution("portable")
        if while_portable:
            a.experts.set_values(values)
        given = values.copy()
        values[:] = 0  # the caller's array is the caller's
        a.experts.set_execution("in-stream")
        assert sum(left_for_least_value(a, given, seed) for seed in range(4)) > 0


def test_without_values_those_used_longest_ago_make_room(streaming: Callable[..., Attached]) -> None:
    a = streaming(most=1)
    last = np.zeros((a.experts.n_rows, a.experts.n_expert), int)
    for time in range(1, 12):
        before = residents(a)
        step(a, 1, time)
        used, left = a.experts.counts() > 0, before & ~residents(a)
        for row in np.flatnonzero(left.any(axis=1)):
            (gone,) = left[row].nonzero()[0]
            assert last[row, gone] == last[row][before[row]].min()
        last[used] = time


def test_an_upload_of_what_is_streamed_meanwhile_is_withdrawn(streaming: Callable[..., Attached]) -> None:
    """Two slots never hold the same expert."""
    a = streaming(most=native.MAX_STREAMED)
    step(a, 1, 3)
    used = a.experts.counts() > 0
    a.experts.set_streaming(0)
    rows = [r for r in a.experts.rows() if r.streams]
    for r in rows:
        for expert in np.flatnonzero(used[r.row]):
            a.experts.evict(r.row, int(expert))
    a.experts.set_streaming(1, always=True)
    wanted = {r.row: int(np.flatnonzero(used[r.row])[0]) for r in rows}
    for row, expert in wanted.items():
        a.experts.load(row, expert)  # lands, but nobody publishes it
    a.experts.sync()
    step(a, 1, 3)
    for row, expert in wanted.items():
        assert a.experts.states(row)[expert] == native.RESIDENT
        a.experts.evict(row, expert)
        assert a.experts.states(row)[expert] == native.COLD, "a second slot held it too"
    n_slots = {r.row: r.n_slots for r in rows}
    for r in rows:  # every slot can still be used
        free = n_slots[r.row] - int((a.experts.states(r.row) != native.COLD).sum())
        cold = np.flatnonzero(a.experts.states(r.row) == native.COLD)
        for expert in cold[:free]:
            a.experts.load(r.row, int(expert))
        with pytest.raises(native.MoeError) as error:
            a.experts.load(r.row, int(cold[free]))
        assert error.value.status == "NO_FREE_SLOT"
    a.experts.sync()


@pytest.mark.parametrize("ahead", [0, 2])
def test_several_ubatches_of_one_decode_stream_one_after_the_other(
    streaming: Callable[..., Attached], ahead: int
) -> None:
    a = streaming(n_ubatch=4, ahead=ahead)
    for seed in range(3):
        before = residents(a)
        a.experts.reset_perf()
        streamed = step(a, 12, seed)
        assert residents(a).sum() == before.sum()
        perf = a.experts.perf_total()
        assert perf.n_streamed_experts + perf.n_ahead_experts >= (residents(a) & ~before).sum() > 0
        a.experts.set_streaming(0)
        a.experts.set_look_ahead(0)
        assert close(streamed, step(a, 12, seed))
        a.experts.set_streaming(2, always=True)
        a.experts.set_look_ahead(ahead)


@pytest.mark.parametrize("ahead", [0, 2])
def test_moves_and_streaming_go_together(streaming: Callable[..., Attached], ahead: int) -> None:
    """Evictions, uploads and other numbers of slots between decodes that stream: always what the portable execution computes."""
    a = streaming(ahead=ahead)
    rng = np.random.default_rng(5)
    for seed in range(12):
        for row in (0, 1):
            states = a.experts.states(row)
            a.experts.evict(row, int(rng.choice(np.flatnonzero(states == native.RESIDENT))))
            a.experts.load(row, int(rng.choice(np.flatnonzero(states == native.COLD))))
        if seed % 4 == 3:
            slots = [r.n_slots for r in a.experts.rows()]
            a.experts.set_slots([n - 1 if seed % 8 == 3 else n + 1 for n in slots])
        if seed % 3:
            a.experts.sync()
        a.experts.publish()
        streamed = step(a, 1 + seed % 9, seed)
        a.experts.set_execution("portable")
        assert close(streamed, step(a, 1 + seed % 9, seed))
        a.experts.set_execution("in-stream")


def test_a_deep_model_streams_between_moves_too(streaming: Callable[..., Attached]) -> None:
    """From eight layers on a device chooses who makes room while it still works; what has left since, or was used, stays out."""
    a = streaming(replace(BY_NAME["qwen3moe"], n_layer=10), ahead=2)
    rng = np.random.default_rng(8)
    n_streamed = 0
    for seed in range(16):
        if seed % 2:
            for row in range(10):
                states = a.experts.states(row)
                a.experts.evict(row, int(rng.choice(np.flatnonzero(states == native.RESIDENT))))
                a.experts.load(row, int(rng.choice(np.flatnonzero(states == native.COLD))))
        if seed % 4 == 2:
            a.experts.set_values(rng.random((a.experts.n_rows, a.experts.n_expert)))
        a.experts.sync()
        a.experts.publish()
        before = residents(a)
        a.experts.reset_perf()
        streamed = step(a, 1 + seed % 3, seed)
        n_streamed += a.experts.perf_total().n_streamed_experts
        assert residents(a).sum() == before.sum()
        if seed % 4 == 3:  # another execution forgets who was chosen
            a.experts.set_execution("portable")
            assert close(streamed, step(a, 1 + seed % 3, seed))
            a.experts.set_execution("in-stream")
    assert n_streamed > 0


def test_switched_off_nothing_is_streamed(streaming: Callable[..., Attached]) -> None:
    a = streaming()
    a.experts.set_streaming(0)
    before = residents(a)
    for seed in range(4):
        step(a, 5, seed)
    assert (residents(a) == before).all() and a.experts.perf_total().n_streamed_experts == 0


def test_a_row_with_a_slot_for_every_expert_does_not_stream(streaming: Callable[..., Attached]) -> None:
    """There each expert has the slot of its number, so that the slots can become the row's weights."""
    a = streaming()
    a.experts.set_slots([r.n_expert for r in a.experts.rows()])
    assert not any(r.streams for r in a.experts.rows())
    before = residents(a)
    step(a, 9)
    assert (residents(a) == before).all()


def test_what_cannot_be_asked_for_is_refused(streaming: Callable[..., Attached]) -> None:
    a = streaming()
    for n in (-1, native.MAX_AHEAD + 1):
        with pytest.raises(native.MoeError, match=f"bring {n} experts of a row, it must be from 0 to 8"):
            a.experts.set_look_ahead(n)
    with pytest.raises(native.MoeError, match=r"share of 1.5.* must be from 0 to 1"):
        a.experts.set_look_ahead(1, wrong=1.5)
    for n in (-1, native.MAX_STREAMED + 1):
        with pytest.raises(native.MoeError, match=f"{n} experts of a row shall be streamed, it must be from 0 to 8"):
            a.experts.set_streaming(n)
    with pytest.raises(ValueError, match="values have shape"):
        a.experts.set_values(np.zeros((1, 1)))
    assert Asked(1).decode(a.ctx) == 0
    with pytest.raises(native.MoeError, match="in flight"):
        a.experts.set_streaming(0)
    with pytest.raises(native.MoeError, match="in flight"):
        a.experts.set_look_ahead(0)
    a.experts.set_values(np.zeros((a.experts.n_rows, a.experts.n_expert)))  # may come from another thread
    llama_cpp.llama_synchronize(a.ctx.ptr)


@pytest.mark.parametrize("policy", ["moe-spac", "lru"])
def test_greedy_text_is_the_targets(pair: Pair, policy: str) -> None:
    """With a draft model, a policy that moves experts in its own thread, and a lane that streams all it may."""
    with (
        Context(pair.target, n_ctx=N_CTX, n_threads=1, execution="in-stream", params=EXACT) as context,
        Context(pair.draft, n_ctx=N_CTX, n_threads=1, attach=False, keep_graphs=2) as draft,
        target_context(pair, attach=False) as plain,
    ):
        experts = context.experts
        assert experts is not None
        experts.set_slots([round(0.25 * row.n_expert) for row in experts.rows()])
        residency = Residency(experts, make(policy, experts.n_rows, experts.n_expert))
        residency.fill()
        experts.set_streaming(native.MAX_STREAMED, always=True)
        experts.set_look_ahead(2)
        experts.reset_perf()
        decoder = Decoder(context, residency, drafter=GgufDraft(draft, pair.target), draft_max=4)
        for prompt in PROMPTS[:3]:
            text = pair.target.tokenize(prompt)
            tokens = list(decoder.generate(text, 48))
            assert_same_text(plain, text, plain_greedy(plain, text, 48), tokens)
        decoder.close()
        residency.close()
        perf = experts.perf_total()
        assert perf.n_streamed_experts > 100 and perf.n_ahead_experts > 100 and residency.n_moves > 10


@pytest.mark.parametrize("node", ["moe_publish-0", "moe_bring-0", "moe_bring-1", "moe_join-1"])
def test_two_passes_that_were_broken_off_leave_no_wrong_resident(crowded: Callable[..., Attached], node: str) -> None:
    callback = StopAt()
    a = crowded(cb=callback)
    for seed in range(4):
        a.experts.set_streaming(native.MAX_STREAMED, always=True)
        for other in range(8):
            step(a, 9, other)
        assert any(r.two_passes for r in a.experts.rows())
        callback.name = node
        a.ctx.clear()
        assert Asked(9, seed).decode(a.ctx) == 0
        llama_cpp.llama_synchronize(a.ctx.ptr)
        callback.name = ""
        check_residents(a)
        half_resident(a.experts)


def afresh(a: Attached, most: int = 2, ahead: int = 0) -> None:
    a.experts.set_slots([0] * a.experts.n_rows)
    half_resident(a.experts)
    a.experts.set_streaming(most, always=True)
    a.experts.set_look_ahead(ahead)


class StopAt:
    """An eval callback that ends a graph behind the node of that name."""

    name = ""

    def __call__(self, tensor: int, ask: bool, user_data: object = None) -> bool:
        at = GgmlTensor.from_address(tensor).name.decode() == self.name
        return at if ask else not at


def check_residents(a: Attached, n: int = 9) -> None:
    """What is called resident lies in its slot: the portable execution computes the same from host memory alone."""
    a.experts.set_streaming(0)
    a.experts.set_look_ahead(0)
    logits = [step(a, n, seed) for seed in (100, 101)]
    slots = [r.n_slots for r in a.experts.rows()]
    a.experts.set_slots([0] * a.experts.n_rows)
    assert all(close(x, step(a, n, seed)) for x, seed in zip(logits, (100, 101), strict=True))
    a.experts.set_slots(slots)


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("node", ["moe_publish-0", "moe_publish-1", "moe_join-1"])
def test_a_decode_that_was_broken_off_leaves_no_wrong_resident(
    streaming: Callable[..., Attached], node: str, ahead: int
) -> None:
    """Between publish and join a slot holds an expert that the map does not name yet; the look-ahead's layer may never begin."""
    callback = StopAt()
    a = streaming(cb=callback)
    for seed in range(4):
        afresh(a, ahead=ahead)
        before = residents(a)
        callback.name = node
        a.ctx.clear()
        assert Asked(1, seed).decode(a.ctx) == 0
        llama_cpp.llama_synchronize(a.ctx.ptr)
        callback.name = ""
        assert ahead or not (residents(a) & ~before & (a.experts.counts() == 0)).any()
        check_residents(a)


@pytest.mark.parametrize("ahead", [0, 2])
def test_an_aborted_decode_leaves_no_wrong_resident(streaming: Callable[..., Attached], ahead: int) -> None:
    """Wherever it ends."""
    a = streaming(n_threads=1)
    left = 0

    def ask(_: object) -> bool:
        nonlocal left
        left -= 1
        return left < 0

    abort = llama_cpp.ggml_abort_callback(ask)
    for n_nodes in range(1, 200):
        afresh(a, ahead=ahead)
        left = n_nodes
        llama_cpp.llama_set_abort_callback(a.ctx.ptr, abort, None)
        a.ctx.clear()
        code = Asked(1, n_nodes).decode(a.ctx)
        llama_cpp.llama_synchronize(a.ctx.ptr)
        llama_cpp.llama_set_abort_callback(a.ctx.ptr, llama_cpp.ggml_abort_callback(), None)
        check_residents(a)
        if code == 0:
            break
    assert test_device().kind != "cpu" or n_nodes > 10


def test_a_decode_that_the_pool_fails_leaves_no_wrong_resident(streaming: Callable[..., Attached]) -> None:
    """What crosses the link does not need the pool; the decodes that follow take the portable execution."""
    a = streaming(experts={"pool_threads": N_POOL, "timeout_ms": TIMEOUT_MS})
    before = residents(a)
    a.experts.inject_pool_fault(1, 4 * TIMEOUT_MS)
    assert np.isnan(step(a, 9)).all() and a.experts.failure()
    assert (residents(a) != before).any()
    step(a, 9)
    assert not any(r.in_stream for r in a.experts.rows())
    check_residents(a)


@pytest.mark.parametrize("ahead", [0, native.MAX_AHEAD])
@pytest.mark.parametrize("most", [32, 64])
def test_wide_ubatches_find_what_narrow_ones_before_them_streamed(
    streaming: Callable[..., Attached], most: int, ahead: int
) -> None:
    """Two sequences of different length: 2 · 3 tokens in-stream, then 57 as a prompt or in the portable execution."""
    a = streaming(n_ubatch=100, n_seq_max=2, kv_unified=False, experts={"max_batch_tokens": most})
    for seed in range(3):
        afresh(a, native.MAX_STREAMED, ahead)
        before = residents(a)
        streamed = decode_two(a, seed)
        assert [n.shape[1] for n in a.experts.choices()] == [6, 57]
        assert (residents(a) != before).any()
        a.experts.set_streaming(0)
        a.experts.set_look_ahead(0)
        assert close(streamed, decode_two(a, seed))


def test_only_pairs_of_batches_in_stream_count_as_streamed(streaming: Callable[..., Attached]) -> None:
    """A prompt's narrow rest is computed in-stream; its wide ubatches choose the same experts in another way."""
    a = streaming(n_ubatch=64, most=native.MAX_STREAMED)
    n_streamed = 0
    for seed in range(4):
        afresh(a, native.MAX_STREAMED)
        before = residents(a)
        a.experts.reset_perf()
        step(a, 64 + 3, seed)
        wide, narrow = a.experts.choices()
        assert wide.shape[1] == 64 and narrow.shape[1] == 3
        arrived, perf = residents(a) & ~before, a.experts.perf_total()
        pairs = [arrived[row][e[e >= 0]].sum() for row, e in enumerate(narrow)]
        assert perf.n_streamed_pairs == sum(pairs) <= perf.n_cold_pairs
        n_streamed += perf.n_streamed_pairs
    assert n_streamed > 0


def only_used_resident(a: Attached, n: int, seed: int) -> Array:
    """Slots for just what the batch chooses: every guess but these experts displaces one of them. [n_rows, n_expert]"""
    step(a, n, seed)
    used: Array = a.experts.counts() > 0
    a.experts.set_slots([0] * a.experts.n_rows)
    a.experts.set_slots([int(n) for n in used.sum(axis=1)])
    for row, expert in np.argwhere(used):
        a.experts.load(int(row), int(expert))
    a.experts.sync()
    a.experts.publish()
    return used


@pytest.mark.parametrize("most", [0, 2])
def test_an_expert_that_a_wrong_guess_has_displaced_is_a_miss(streaming: Callable[..., Attached], most: int) -> None:
    """Whether the pool computes it then, or it crosses the link once more."""
    a = streaming()
    used = only_used_resident(a, 1, 7)
    a.experts.set_streaming(most, always=True)
    a.experts.set_look_ahead(2, wrong=1.0)
    a.experts.reset_perf()
    meter = Meter(a.experts)
    before = residents(a)
    assert (before == used).all()
    step(a, 1, 7)
    after, perf, sample = residents(a), a.experts.perf_total(), meter.sample()
    n_wrong = perf.n_ahead_experts - perf.n_ahead_right
    assert perf.n_ahead_right == 0 < n_wrong
    assert perf.n_cold_experts == perf.n_cold_pairs == n_wrong, "each guess has displaced an expert that was needed"
    assert perf.n_hot_pairs == used.sum() - n_wrong
    assert perf.n_streamed_experts == perf.n_streamed_pairs <= perf.n_cold_pairs
    if most == 0:
        assert (before & ~after).sum() == n_wrong and perf.n_streamed_experts == 0
    else:
        assert perf.n_streamed_experts > 0
    assert (sample.cold_experts >= 0).all() and (sample.cold_pairs >= 0).all()
    assert sample.cold_experts.sum() == n_wrong - perf.n_streamed_experts


def test_no_layer_is_said_to_have_computed_less_than_nothing(streaming: Callable[..., Attached]) -> None:
    """Also where several ubatches of a decode drive out and bring back experts that were resident before and after it."""
    a = streaming(n_ubatch=1)
    only_used_resident(a, 3, 7)
    a.experts.set_streaming(native.MAX_STREAMED, always=True)
    a.experts.set_look_ahead(2, wrong=1.0)
    a.experts.reset_perf()
    meter = Meter(a.experts)
    step(a, 3, 7)
    perf, sample = a.experts.perf_total(), meter.sample()
    assert perf.n_streamed_experts > perf.n_cold_experts, "nothing that the counters cannot tell has happened"
    assert (sample.cold_experts >= 0).all() and (sample.cold_pairs >= 0).all()


def test_another_execution_and_back_changes_no_setting(streaming: Callable[..., Attached]) -> None:
    a = streaming(most=1, ahead=1)
    a.experts.set_execution("portable")
    a.experts.set_execution("in-stream")
    step(a, 1, 1)
    assert a.experts.perf_total().n_streamed_experts > 0 < a.experts.perf_total().n_ahead_experts
    a.experts.set_execution("portable")
    a.experts.set_streaming(0)
    a.experts.set_look_ahead(0)
    a.experts.set_execution("in-stream")
    a.experts.reset_perf()
    step(a, 1, 2)
    assert a.experts.perf_total().n_streamed_experts == 0 == a.experts.perf_total().n_ahead_experts


def decode_two(a: Attached, seed: int) -> Array:
    """3 tokens of one sequence and 60 of another in one batch."""
    a.ctx.clear()
    ids = tokens(63, seed)
    batch = llama_cpp.llama_batch_init(len(ids), 0, 1)
    try:
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i], batch.logits[i] = token, i if i < 3 else i - 3, True
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, int(i >= 3)
        assert llama_cpp.llama_decode(a.ctx.ptr, batch) == 0
    finally:
        llama_cpp.llama_batch_free(batch)
    logits = llama_cpp.llama_get_logits(a.ctx.ptr)
    result: Array = np.ctypeslib.as_array(logits, shape=(len(ids), a.model.n_vocab)).copy()
    return result
