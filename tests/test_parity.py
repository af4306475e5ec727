"""Hybrid layers compute what upstream computes: every family, weight type, batch width and cache share.

The first MoE block of a model gets equal inputs in both executions, so its output is compared tightly; logits are compared
with upstream's own dependence on the batch size. A fallback cannot pass: each case asserts that hybrid layers, hot pairs and
cold pairs occurred. MOESPAC_TEST_DEVICE=CUDA0 runs the same on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from families import FAMILIES, cached_model
from lowlevel import Capture, load_model, make_context
from moespac_llamacpp import native
from parity import CAPTURED, Pair, decode, difference, down_weights, load_with_host_experts, pair, test_device

WIDTHS = (1, 4, 9, 17, 32)
SHARES = (0.0, 0.17, 0.5, 1.0)
COVERED = [f.name for f in FAMILIES.values() if f.hybrid]

# (gate and up, down, n_ff_exp); rows of 96 and 352 are no multiple of 256: K-quants become 32-wide types there
TYPES = [
    ("F32", "F32", 256),
    ("F16", "F16", 256),
    ("BF16", "BF16", 256),
    ("Q8_0", "Q8_0", 96),
    ("Q4_0", "Q4_0", 256),
    ("Q5_1", "Q5_0", 256),
    ("Q4_K", "Q6_K", 256),
    ("Q4_K", "Q4_K", 352),
    ("Q5_K", "Q5_K", 256),
    ("Q6_K", "Q8_0", 96),
    ("Q2_K", "Q3_K", 256),
    ("IQ4_XS", "IQ4_NL", 256),
    ("IQ3_S", "IQ4_XS", 256),
    ("MXFP4", "MXFP4", 96),
]
# CI: every family in F32 and in the commonest mix, every type in one family
CASES = [(f, *t) for f in COVERED for t in (TYPES[0], TYPES[6])] + [
    ("qwen3moe", *t) for t in TYPES if t not in (TYPES[0], TYPES[6])
]
CASES += [("gpt-oss", "MXFP4", "MXFP4", 256), ("deepseek2-v2", "Q4_K", "Q4_K", 352)]
ALL_CASES = [(f, *t) for f in COVERED for t in TYPES]


def case_id(case: tuple[str, str, str, int]) -> str:
    return "-".join(map(str, case))


def tokens(n: int, seed: int = 0) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(3, 120, n)]


def tolerances(path: Path, name: str, expert_type: str, device: native.Device) -> tuple[float, float]:
    """For the first block's output and for the logits.

    F32 on the CPU: only the order of addition differs. Other types round activations, and a last bit may flip a rounding. On a
    device, twice upstream's own difference between its CPU and its device path is the measure, and what one flipped last bit of
    an activation in BF16 makes of 256 (1.2e-4): where upstream rounds alike on both sides, it differs by next to nothing."""
    if device.kind == "cpu":
        return (
            (1e-5, 2e-5) if expert_type == "F32" else (5e-3, 1e-2)
        )  # one flipped last bit in a row of 96 is up to 4e-3
    with (
        load_with_host_experts(path, device) as on_host,
        load_model(path, n_gpu_layers=99) as on_device,
        make_context(on_host, cb=Capture(*CAPTURED)) as a,
        make_context(on_device, cb=Capture(*CAPTURED)) as b,
    ):
        family = FAMILIES[name]
        widths = [n for n in WIDTHS if n <= 4] if family.repeats else WIDTHS  # wider ones are wrong on the device
        own = [difference(a, b, tokens(n, seed), family) for n in widths for seed in range(3)]
    least = 1e-5 if expert_type == "F32" else 1e-4
    return 2 * max(d.op for d in own) + least, 2 * max(d.logits for d in own) + least


def check(root: Path, name: str, expert_type: str, down_type: str, n_ff: int) -> None:
    path = cached_model(root, name, expert_type=expert_type, down_type=down_type, n_ff_exp=n_ff)
    device = test_device()
    op_limit, logit_limit = tolerances(path, name, expert_type, device)
    tie_limit = 1e-3 if device.kind == "cpu" else 0.3
    # whole layers would take upstream's path at share 1 (test_whole.py)
    with pair(path, name, device, whole_layers=False) as p:
        rows = p.experts.rows()
        assert len(rows) == len(p.family.moe_layers) * p.family.blocks
        assert all(r.hybrid for r in rows), [r.fallback for r in rows]
        # From 32 tokens on, upstream computes host experts on a GPU (op_offload): there it is no reference for repeated ids.
        widths = [n for n in WIDTHS if n < 32] if p.family.repeats and device.kind != "cpu" else WIDTHS
        logit_limit = max(logit_limit, *(2 * p.upstream_noise(tokens(n)) for n in widths))
        ops = []
        for share in SHARES:
            p.fill(share)
            n_hot = n_cold = n_rerouted = 0
            for n in widths:
                d = p.compare(tokens(n))
                n_hot, n_cold, n_rerouted = n_hot + d.n_hot, n_cold + d.n_cold, n_rerouted + d.n_rerouted
                ops.append(d.op)
                assert d.tie <= tie_limit, f"share {share}, {n} tokens: other experts {d.tie:.1e} away from a tie"
                assert d.op <= op_limit, (
                    f"share {share}, {n} tokens: first block differs by {d.op:.1e} > {op_limit:.1e}"
                )
                assert d.logits <= logit_limit, (
                    f"share {share}, {n} tokens: logits differ by {d.logits:.1e} > {logit_limit:.1e}"
                )
            assert n_rerouted <= sum(WIDTHS) // 8, (share, n_rerouted)
            assert (n_hot > 0) == (share > 0) and (n_cold > 0) == (share < 1), (share, n_hot, n_cold)
        p.fill(0.5)
        if any(r.streams for r in p.experts.rows()):  # in-stream: whatever finds room crosses the link in the decode
            p.experts.set_streaming(native.MAX_STREAMED, always=True)
            p.experts.set_look_ahead(native.MAX_AHEAD)
            for n in widths:
                d = p.compare(tokens(n))
                assert d.op <= op_limit and d.logits <= logit_limit, f"streamed, {n} tokens: {d}"
            p.experts.set_streaming(0)
            p.experts.set_look_ahead(0)
        if device.kind == "cpu":  # flips are rare: most batches differ by the order of addition alone
            assert np.median(ops) < 1e-5, ops


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_hybrid_layers_compute_what_upstream_computes(root: Path, case: tuple[str, str, str, int]) -> None:
    check(root, *case)


@pytest.mark.full
@pytest.mark.parametrize("case", [c for c in ALL_CASES if c not in CASES], ids=case_id)
def test_hybrid_layers_compute_what_upstream_computes_full(root: Path, case: tuple[str, str, str, int]) -> None:
    check(root, *case)


@pytest.fixture
def mixed(root: Path) -> Iterator[Pair]:
    path = cached_model(root, "qwen3moe", expert_type=("Q4_K", "Q5_K"), down_type=("Q6_K", "Q4_K"))
    with pair(path, "qwen3moe") as p:
        yield p


def test_layers_may_have_different_types(mixed: Pair) -> None:
    mixed.fill(0.5)
    d = mixed.compare(tokens(9))
    assert (
        d.n_hot > 0
        and d.n_cold > 0
        and d.logits < tolerances(mixed.plain.model.path, "qwen3moe", "Q4_K", test_device())[1]
    ), d
    assert len({r.expert_bytes for r in mixed.experts.rows()}) == 2


def test_one_wrong_slot_is_noticed(root: Path) -> None:
    """The negative control: one slot holds another expert's down matrix."""
    path = cached_model(root, "qwen3moe", expert_type="Q4_K", down_type="Q6_K")
    device = test_device()
    with load_model(path, load_mode=0) if device.kind == "cpu" else load_with_host_experts(path, device) as model:
        weights = down_weights(model, 0)
        with make_context(model, cb=Capture(*CAPTURED)) as plain, make_context(model, cb=Capture(*CAPTURED)) as ctx:
            experts = native.Experts(ctx.ptr, device)
            p = Pair(plain, ctx, experts, FAMILIES["qwen3moe"])
            p.fill(1.0)
            assert p.compare(tokens(32)).op < tolerances(path, "qwen3moe", "Q4_K", device)[0]
            used = int(np.argmax(experts.counts()[0]))
            right, wrong = weights.read(used), weights.read((used + 1) % 8)
            experts.evict(0, used)
            weights.write(used, wrong)
            experts.load(0, used)
            experts.sync()
            experts.publish()
            weights.write(used, right)
            d = p.compare(tokens(32))
            assert d.n_cold == 0 and d.op > 0.1, d
            experts.detach()


def test_padding_repeats_a_published_pair(root: Path) -> None:
    """Few hot pairs in a batch are padded up to a bucket; a single resident expert must serve as padding (traps 1, 2)."""
    path = cached_model(root, "qwen3moe")
    limit = tolerances(path, "qwen3moe", "F32", test_device())[0]
    with pair(path, "qwen3moe") as p:
        slots = np.zeros(p.experts.n_rows, np.int32)
        slots[0] = 1
        p.experts.set_slots(slots)
        p.plain.clear()
        p.hybrid.clear()
        decode(p.hybrid, tokens(9))
        p.experts.load(0, int(np.argmax(p.experts.counts()[0])))
        p.experts.sync()
        p.experts.publish()
        for n in (1, 9, 32):
            assert p.compare(tokens(n)).op < limit
        assert p.experts.perf(0).n_hot_pairs > 0


def test_results_do_not_depend_on_chance(root: Path) -> None:
    """Threads own output rows: the same batch gives the same bits, however the work was shared out."""
    with pair(cached_model(root, "qwen3moe", expert_type="Q4_K"), "qwen3moe") as p:
        p.fill(0.5)
        results = []
        for _ in range(5):
            p.hybrid.clear()
            results.append(decode(p.hybrid, tokens(17)))
        assert all(np.array_equal(results[0], r) for r in results[1:])


@pytest.mark.parametrize("limit", [0, 1, 2])
def test_every_instruction_set_gives_the_same_results(root: Path, limit: int) -> None:
    best = native.set_kernel_limit(2)
    try:
        level = native.set_kernel_limit(limit)
        if level != limit:
            pytest.skip(f"this CPU has no more than level {level} of 2")
        for types in (("Q4_K", "Q6_K"), ("Q5_K", "Q8_0"), ("Q4_0", "Q4_0")):
            with pair(cached_model(root, "qwen3moe", expert_type=types[0], down_type=types[1]), "qwen3moe") as p:
                p.fill(0.0)
                kernels = {r.kernel for r in p.experts.rows()}
                assert (kernels == {"ggml vec_dot, ggml vec_dot"}) == (limit == 0), kernels
                for n in (1, 4, 9):
                    d = p.compare(tokens(n))
                    assert d.n_cold > 0 and d.op < 1e-3, (types, n, d)
    finally:
        native.set_kernel_limit(best)


@pytest.mark.parametrize("name", [f.name for f in FAMILIES.values() if f.fallback])
def test_what_is_not_covered_falls_back_with_a_reason(root: Path, name: str) -> None:
    with pair(cached_model(root, name), name) as p:
        rows = p.experts.rows()
        assert rows and not any(r.hybrid for r in rows)
        assert all(p.family.fallback in r.fallback for r in rows), [r.fallback for r in rows]
        assert p.compare(tokens(9)).logits == 0.0
        assert p.experts.counts().sum() > 0, "routers are observed all the same"
        with pytest.raises(native.MoeError) as error:
            p.experts.load(rows[0].row, 0)
        assert error.value.status == "UNSUPPORTED"


def test_larger_batches_take_upstreams_path(root: Path) -> None:
    with pair(cached_model(root, "qwen3moe"), "qwen3moe") as p:
        p.fill(0.5)
        d = p.compare(tokens(33))
        assert d.n_hot == d.n_cold == 0 and d.logits == 0.0
        assert p.experts.counts().sum() == 33 * 2 * 2
        p.experts.detach()
    with pair(cached_model(root, "qwen3moe"), "qwen3moe", max_batch_tokens=64) as p:
        p.fill(0.5)
        d = p.compare(tokens(64))
        limit = tolerances(p.plain.model.path, "qwen3moe", "F32", test_device())[0]
        assert d.n_hot > 0 and d.n_cold > 0 and d.op < limit, d


def test_nothing_resident_costs_no_correctness(root: Path) -> None:
    """Slots that nothing was loaded into are never read (the test device's hold NaN; here they hold zeros)."""
    with pair(cached_model(root, "qwen3moe"), "qwen3moe") as p:
        p.experts.set_slots([4] * p.experts.n_rows)
        d = p.compare(tokens(9))
        assert d.n_hot == 0 and d.op < 1e-5
