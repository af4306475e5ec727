"""The prompt lane: batches over the hybrid width are upstream's own products, with weights from slots and from host memory.

On the CPU results are equal bit for bit: the same operations on the same weights, and whatever the lane did not bring for an
ubatch is spoilt there, so that a copy that comes too late or not at all shows. MOESPAC_TEST_DEVICE=CUDA0 compares with upstream's
path, which streams the experts from the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

from conftest import Attached
from families import FAMILIES, N_VOCAB, cached_model
from lowlevel import LOAD_NONE, Capture, Context, GgmlTensor, decode, load_model, log_lines, make_context
from moespac_llamacpp import native
from parity import CAPTURED, Pair, down_weights, first_block, load_with_host_experts, relative, test_device
from test_graphs import set_lora, write_lora
from test_parity import COVERED

Array = np.ndarray[Any, Any]

SHARES = (0.0, 0.3, 0.9)
# tokens of an ubatch: prompts; no ubatch is left with so few tokens that it runs hybrid
PROMPTS = {40: (33, 80, 200), 100: (33, 64, 200)}
TYPES = [("F32", "F32"), ("Q4_K", "Q6_K")]
# CI: every family in the commonest mix; in one also what is rounded or packed otherwise
CASES = [(f, *TYPES[1]) for f in COVERED]
CASES += [("qwen3moe", *t) for t in (TYPES[0], ("BF16", "BF16"), ("IQ4_XS", "Q8_0"))] + [("gpt-oss", "MXFP4", "MXFP4")]
# GroveMoE's tokens choose experts twice, which upstream's batched CUDA kernels get wrong on either path
ON_GPU = [c for c in CASES if not FAMILIES[c[0]].repeats]


def tokens(n: int, seed: int = 0) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(3, N_VOCAB, n)]


@contextmanager
def lane(path: Path, family: str, n_ubatch: int = 100, **options: Any) -> Iterator[Pair]:
    """A plain context and an attached one, in-stream; options go to native.Experts. Short ubatches with weights in one piece."""
    with (
        load_with_host_experts(path, test_device()) as model,
        make_context(model, cb=Capture(*CAPTURED), n_ubatch=n_ubatch, n_threads=1) as plain,
        make_context(model, cb=Capture(*CAPTURED), n_ubatch=n_ubatch, n_threads=1) as ctx,
    ):
        experts = native.Experts(
            ctx.ptr, test_device(), **{"execution": "in-stream", "prompt_share": 1 if n_ubatch == 40 else 4, **options}
        )
        try:
            yield Pair(plain, ctx, experts, FAMILIES[family])
        finally:
            experts.detach()


def compare(p: Pair, prompt: Sequence[int]) -> None:
    """Logits, choices and outputs of all MoE blocks, in all ubatches."""
    logits = []
    for ctx in (p.plain, p.hybrid):
        ctx.clear()
        ctx.capture.clear()
        logits.append(decode(ctx, prompt))
    assert np.isfinite(logits[1]).all()
    plain, ours = p.plain.capture.tensors, p.hybrid.capture.tensors
    outputs = [name for name in plain if name in ours]
    assert len(outputs) >= 2 * len(p.family.moe_layers)
    if test_device().kind == "cpu":
        assert np.array_equal(logits[0], logits[1])
        for name in outputs:
            assert all(np.array_equal(a, b) for a, b in zip(plain[name], ours[name], strict=True)), name
    else:  # a token near a tie may take other experts
        distance = np.linalg.norm(logits[1] - logits[0], axis=1) / np.linalg.norm(logits[0], axis=1)
        assert np.median(distance) < 3e-2
        assert relative(first_block(p.hybrid.capture), first_block(p.plain.capture)) < 1e-2
    n_counted = len(prompt) * p.family.n_used * len(p.family.moe_layers)
    assert p.experts.counts().sum() >= n_counted


def copied(p: Pair, prompt: Sequence[int]) -> Array:
    """int64 [4]: bytes from slots, over the link, of these ahead, of these in vain, that a prompt moves."""
    before = np.array(p.experts.prompt_bytes())
    p.hybrid.clear()
    decode(p.hybrid, prompt)
    return np.array(p.experts.prompt_bytes()) - before


@pytest.mark.parametrize("case", CASES if test_device().kind == "cpu" else ON_GPU, ids="-".join)
def test_prompts_are_what_upstream_computes(root: Path, case: tuple[str, str, str]) -> None:
    path = cached_model(root, case[0], expert_type=case[1], down_type=case[2])
    for n_ubatch, prompts in PROMPTS.items():
        with lane(path, case[0], n_ubatch) as p:
            for share in SHARES:
                p.fill(share)
                before = p.experts.prompt_bytes()
                for n in prompts:
                    compare(p, tokens(n))
                local, link, _, _ = np.subtract(p.experts.prompt_bytes(), before)
                assert link > 0 and (local > 0) == (share > 0)


@pytest.mark.parametrize("pieces", [1, 4])  # of a weight
@pytest.mark.parametrize("n_ubatch", PROMPTS)
def test_prompts_that_nobody_watches_are_the_same(root: Path, n_ubatch: int, pieces: int) -> None:
    """Without an eval callback the host runs ahead of the device as far as it may."""
    path = cached_model(root, "qwen3moe", expert_type="Q4_K", down_type="Q6_K")
    with (
        load_with_host_experts(path, test_device()) as model,
        make_context(model, n_ubatch=n_ubatch, n_threads=1) as plain,
        make_context(model, n_ubatch=n_ubatch, n_threads=1) as ctx,
    ):
        experts = native.Experts(ctx.ptr, test_device(), execution="in-stream", prompt_share=pieces)
        p = Pair(plain, ctx, experts, FAMILIES["qwen3moe"])
        for share in SHARES:
            p.fill(share)
            for seed in range(4):
                prompt = tokens(200, seed)
                plain.clear()
                ctx.clear()
                expected, logits = decode(plain, prompt), decode(ctx, prompt)
                if test_device().kind == "cpu":
                    assert np.array_equal(logits, expected)
                distance = np.linalg.norm(logits - expected, axis=1) / np.linalg.norm(expected, axis=1)
                assert np.median(distance) < 3e-2
                again = [decode(ctx, prompt) for _ in range(3) if not ctx.clear()]
                assert all(np.array_equal(logits, a) for a in again), "a race would not always end alike"
        experts.detach()


def test_layers_of_different_types_share_the_memory(root: Path) -> None:
    path = cached_model(root, "qwen3moe", expert_type=("Q4_K", "F32"), down_type=("Q6_K", "Q4_0"), n_ff_exp=352)
    for n_ubatch, prompts in PROMPTS.items():
        with lane(path, "qwen3moe", n_ubatch) as p:
            p.fill(0.5)
            for n in (*prompts, *reversed(prompts)):
                compare(p, tokens(n, seed=n))


def test_residents_come_from_their_slots(root: Path) -> None:
    """The negative control: a slot that holds another expert's weights changes the result, but not on upstream's path."""
    path = cached_model(root, "qwen3moe", expert_type="Q4_K", down_type="Q6_K")
    device = test_device()
    with (
        load_model(path, load_mode=LOAD_NONE) if device.kind == "cpu" else load_with_host_experts(path, device) as model
    ):
        weights = down_weights(model, 0)
        right, wrong = weights.read(3), weights.read(4)
        logits = []
        for options in ({}, {"prompt_lane": False}):
            with make_context(model, n_threads=1) as ctx:
                experts = native.Experts(ctx.ptr, device, execution="in-stream", **options)
                expected = [decode(ctx, tokens(n)) for n in (33, 64) if not ctx.clear()]
                experts.set_slots([1, 0])
                weights.write(3, wrong)
                experts.load(0, 3)
                experts.sync()
                experts.publish()
                weights.write(3, right)
                ctx.clear()
                got = [decode(ctx, tokens(n)) for n in (33, 64) if not ctx.clear()]
                logits.append([relative(a, b) for a, b in zip(got, expected, strict=True)])
                experts.detach()
        assert min(logits[0]) > 0.1, logits
        assert max(logits[1]) == 0.0 if device.kind == "cpu" else max(logits[1]) < 0.1, logits


def in_use(p: Pair) -> tuple[int, int]:
    """Bytes of the last prompt's experts, of its one ubatch: (residents, others)."""
    counts, states = p.experts.counts(), p.experts.states_table()
    hot = sum(
        int(((counts[r.row] > 0) & (states[r.row] == native.RESIDENT)).sum()) * r.expert_bytes for r in p.experts.rows()
    )
    all_ = sum(int((counts[r.row] > 0).sum()) * r.expert_bytes for r in p.experts.rows())
    return hot, all_ - hot


@pytest.mark.parametrize("share", [0.0, 0.5, 0.9])
def test_only_experts_in_use_are_copied_and_residents_do_not_cross_the_link(root: Path, share: float) -> None:
    with lane(cached_model(root, "qwen3moe"), "qwen3moe") as p:
        p.fill(share)
        for prompt in ([7] * 33, tokens(64)):
            p.experts.set_execution("portable")
            p.experts.set_execution("in-stream")  # nothing is expected of the next prompt
            local, link, ahead, in_vain = copied(p, prompt)
            assert (local, link) == in_use(p) and ahead == in_vain == 0
        assert link > 0


@pytest.mark.parametrize("share", [1, 2, 4])
def test_what_the_last_ubatch_used_most_is_sent_ahead(root: Path, share: int) -> None:
    """To all layers but the first, half of what is not resident, as far as memory goes; what is expected wrongly costs its bytes
    and is not read."""
    with lane(cached_model(root, "qwen3moe"), "qwen3moe", prompt_share=share) as p:
        p.fill(0.0)
        first = copied(p, tokens(100))
        again = copied(p, tokens(100))
        n_used = int((p.experts.counts()[1] > 0).sum())
        assert tuple(again) == (0, first[1], (n_used + 1) // 2 * p.experts.row(1).expert_bytes // share, 0)
        other = copied(p, [7] * 100)
        assert other[3] > 0 and other[1] - other[3] == in_use(p)[1], "all that was used, and what was expected in vain"
        copied(p, tokens(100))
        assert copied(p, tokens(33))[2] == 0, "a much shorter prompt may need much less"


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_each_ubatch_gets_what_it_chose_whatever_was_expected(root: Path, share: float) -> None:
    """Ubatches of one token over and over choose few experts, each others than the one before."""
    with lane(cached_model(root, "qwen3moe"), "qwen3moe", n_ubatch=40) as p:
        p.fill(share)
        prompt = [token for token in (7, 90, 31, 56, 7) for _ in range(40)]
        decode(p.hybrid, prompt)
        chosen = [{int(e) for e in ubatch[0].ravel()} for ubatch in p.experts.choices()]
        assert any(a - b and b - a for a, b in pairwise(chosen)), chosen
        compare(p, prompt)


class Order:
    """An eval callback that notes the graph's nodes: (address, name, inputs). It can break the graph off at one."""

    def __init__(self) -> None:
        self.nodes: list[tuple[int, str, list[int]]] = []
        self.stop_at = ""

    def __call__(self, tensor: int, ask: bool, user_data: object = None) -> bool:
        t = GgmlTensor.from_address(tensor)
        name = t.name.decode()
        if ask:
            self.nodes.append((tensor, name, [src for src in t.src if src]))
            return name == self.stop_at
        return name != self.stop_at

    def staged(self) -> list[str]:
        return [name for _, name, _ in self.nodes if name.startswith("moe_stage")]


@contextmanager
def watched(root: Path, family: str = "qwen3moe", **options: Any) -> Iterator[tuple[Context, native.Experts, Order]]:
    order = Order()
    device = test_device()
    with (
        load_with_host_experts(cached_model(root, family), device) as model,
        make_context(model, cb=order, n_threads=1) as ctx,
    ):
        experts = native.Experts(ctx.ptr, device, **{"execution": "in-stream", **options})
        yield ctx, experts, order
        experts.detach()


@pytest.mark.parametrize(
    ("family", "share", "pieces"),
    # a weight of 256 rows in four pieces; two thirds of a layer's bytes in one tensor make two where one third makes one
    [("qwen3moe", 1, 3), ("qwen3moe", 4, 12), ("gpt-oss", 1, 6), ("gpt-oss", 4, 15), ("gemma4-scale", 1, 3)],
)
def test_each_product_stands_alone_between_stage_and_release(root: Path, family: str, share: int, pieces: int) -> None:
    """That is what the events around it rely on."""
    with watched(root, family, prompt_share=share) as (ctx, _, order):
        decode(ctx, tokens(64))
        stages = [i for i, node in enumerate(order.nodes) if node[1].startswith("moe_stage")]
        assert len(stages) == pieces * len(FAMILIES[family].moe_layers)
        for i in stages:
            stage, product, release = order.nodes[i : i + 3]
            assert stage[0] in product[2], "its weights are what was staged"
            assert release[1] == stage[1].replace("stage", "release") and release[2] == [stage[0], product[0]]


def test_narrow_batches_stay_hybrid_and_cropped_layers_are_staged(root: Path) -> None:
    with watched(root) as (ctx, experts, order):
        for n in (1, 32):
            order.nodes.clear()
            decode(ctx, tokens(n))
            assert not order.staged()
            ctx.clear()
        decode(ctx, tokens(64), outputs="last")
        assert {name.split("-")[1].split(".")[0] for name in order.staged()} == {"0", "1"}
        counts = experts.counts()
        assert counts[0].sum() == 64 * 2 and counts[1].sum() == 2


@pytest.mark.parametrize(
    "options", [{"prompt_lane": False}, {"execution": "portable"}, {"max_batch_tokens": 512}], ids=str
)
def test_without_it_nothing_is_staged(root: Path, options: dict[str, Any]) -> None:
    with watched(root, **options) as (ctx, experts, order):
        experts.set_slots([4, 4])
        decode(ctx, tokens(64))
        assert order.nodes and not order.staged()
        assert experts.prompt_bytes() == (0, 0, 0, 0)


def test_whole_layers_need_no_staging(root: Path) -> None:
    with watched(root) as (ctx, experts, order):

        def staged(slots: list[int]) -> set[str]:
            experts.set_slots(slots)
            for row, expert in product((0, 1), range(8)):
                if expert < slots[row] and experts.states(row)[expert] == native.COLD:
                    experts.load(row, expert)
            experts.sync()
            experts.publish()
            order.nodes.clear()
            ctx.clear()
            decode(ctx, tokens(64))
            return {name.split("-")[1].split(".")[0] for name in order.staged()}

        assert staged([8, 7]) == {"1"}
        slot = experts.row(1).expert_bytes
        before, memory = experts.device_bytes(), experts.prompt_memory()
        assert staged([8, 8]) == set()
        assert experts.device_bytes() <= before + slot - memory < before + slot, "with a slot for each expert it goes"
        built = experts.graph_stats()[1]
        ctx.clear()
        decode(ctx, tokens(64))
        assert experts.graph_stats()[1] == built, "and then their graphs are kept"
        assert staged([8, 7]) == {"1"}


def test_an_adapter_is_not_left_out_of_prompts(attach: Callable[..., Attached], tmp_path: Path) -> None:
    path = write_lora(tmp_path / "lora.gguf", {"blk.1.ffn_up_exps.weight": (8, 256, 256)})
    logits: list[list[Array]] = []
    for options in ({}, {"prompt_lane": False}):
        a = attach(experts={"execution": "in-stream", **options})
        a.experts.set_slots([4, 4])
        adapter = llama_cpp.llama_adapter_lora_init(a.model.ptr, str(path).encode())
        assert adapter
        logits.append([])
        for adapters in ((), (adapter,), ()):
            a.ctx.clear()
            set_lora(a.ctx, *adapters)
            logits[-1].append(decode(a.ctx, tokens(64)))
    for ours, upstreams in zip(*logits, strict=True):
        assert np.median(np.abs(ours - upstreams).max(axis=1)) <= (0.0 if test_device().kind == "cpu" else 2e-2)
    assert np.abs(logits[0][0] - logits[0][1]).max() > 0.1, "the adapter changes something"


def test_slots_and_executions_may_change_between_prompts(root: Path) -> None:
    with lane(cached_model(root, "qwen3moe"), "qwen3moe", n_ubatch=40) as p:
        for share in (0.3, 0.9, 0.0, 0.5):
            p.fill(share)
            compare(p, tokens(80))
            compare(p, tokens(33))
        for execution in ("portable", "in-stream"):
            p.experts.set_execution(execution)
            compare(p, tokens(80))
        for row in (0, 1):
            hot = np.flatnonzero(p.experts.states(row) == native.RESIDENT)
            cold = np.flatnonzero(p.experts.states(row) == native.COLD)
            p.experts.evict(row, int(hot[0]))
            p.experts.load(row, int(cold[0]))
        p.experts.sync()
        compare(p, tokens(80))
        p.experts.publish()
        compare(p, tokens(80))


def test_the_same_prompt_again_is_no_captured_graph(root: Path) -> None:
    """A CUDA graph would repeat the copies of an earlier residency. Equal graphs in a row are what makes CUDA capture one."""
    with lane(cached_model(root, "qwen3moe", expert_type="Q4_K", down_type="Q6_K"), "qwen3moe") as p:
        p.fill(0.5)
        prompt = tokens(64)
        for _ in range(4):
            local, link, _, _ = copied(p, prompt)
            assert (local, link) == in_use(p)
        for row in (0, 1):
            hot = np.flatnonzero(p.experts.states(row) == native.RESIDENT)
            for expert in hot:
                p.experts.evict(row, int(expert))
        before = p.experts.graph_stats()
        local, link, _, _ = copied(p, prompt)
        assert (local, link) == in_use(p) and local == 0
        compare(p, prompt)
        assert p.experts.graph_stats() == (before[0], before[1] + 2)


def test_prompts_and_short_batches_alternate(root: Path) -> None:
    """The graphs kept per width stay what they were."""
    with lane(cached_model(root, "qwen3moe"), "qwen3moe", n_ubatch=40) as p:
        p.fill(0.5)
        short = []
        for _ in range(3):
            compare(p, tokens(80))
            p.hybrid.clear()
            short.append(decode(p.hybrid, tokens(9)))
        built = p.experts.graph_stats()[1]
        decode(p.hybrid, tokens(9), 9)
        assert p.experts.graph_stats()[1] == built, "the graph of 9 tokens outlived the prompts"
        assert all(np.array_equal(short[0], s) for s in short[1:]) or test_device().kind != "cpu"


@pytest.mark.parametrize("node", ["moe_stage-0.1", "moe_release-0.0", "moe_release-1.2"])
def test_a_prompt_that_was_broken_off_leaves_nothing_behind(root: Path, node: str) -> None:
    with watched(root) as (ctx, experts, order):
        expected = decode(ctx, tokens(64))
        experts.set_slots([4, 4])
        for stop_at in ("", node, ""):
            ctx.clear()
            order.stop_at = stop_at
            logits = decode(ctx, tokens(64))
        assert np.array_equal(logits, expected) or test_device().kind != "cpu"
        assert relative(logits, expected) < 0.5


@pytest.mark.parametrize("share", [1, 2, 4])
def test_its_memory_is_a_share_of_the_largest_layers_and_counted(root: Path, share: int) -> None:
    path = cached_model(root, "qwen3moe", expert_type=("Q4_K", "F32"), down_type=("F32", "Q4_K"))
    taken = []
    for options in ({"prompt_share": share}, {"prompt_lane": False}, {"n_ubatch": 32}):
        with lane(path, "qwen3moe", **options) as p:
            taken.append(p.experts.device_bytes())
            assert (p.experts.prompt_memory() > 0) == ("prompt_share" in options)
            if "prompt_share" in options:
                memory = p.experts.prompt_memory()
                largest = max(row.expert_bytes * row.n_expert for row in p.experts.rows())
    assert memory == taken[0] - taken[1]
    assert memory <= largest * 1.2 / share, "pieces are of whole rows, in steps of 32"
    assert taken[2] <= taken[1], "where no ubatch is over the hybrid width there is no lane"


def test_a_layer_that_cannot_says_why(root: Path) -> None:
    if test_device().kind == "cpu":
        pytest.skip("on the CPU all memory serves")
    log_lines.clear()
    with (
        load_model(
            cached_model(root, "qwen3moe"), n_gpu_layers=99, overrides=[("exps", native.cpu_device().buffer_type)]
        ) as model,
        make_context(model) as ctx,
    ):
        experts = native.Experts(ctx.ptr, test_device(), execution="in-stream")
        assert any("layer 0: the experts' host memory is not page-locked" in text for _, text in log_lines)
        experts.set_slots([4, 4])
        assert np.isfinite(decode(ctx, tokens(64))).all() and experts.prompt_bytes() == (0, 0, 0, 0)
        experts.detach()
