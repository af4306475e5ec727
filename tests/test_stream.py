"""The in-stream execution beyond its results (test_parity runs in either execution): the pool, the maps, failures, switching.

On the CPU the two operations are emulated, with the same pool, maps, flags and time-outs as on a GPU (src/moe-stream.cpp);
MOESPAC_TEST_DEVICE=CUDA0 runs the real ones.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

from conftest import Attached
from families import N_VOCAB
from lowlevel import EXACT, Context, decode, make_context
from moespac_llamacpp import native
from parity import in_stream, test_device

Array = np.ndarray[Any, Any]
N_POOL = 3
TIMEOUT_MS = 200


def tokens(n: int, seed: int = 0) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(3, N_VOCAB, n)]


def half_resident(experts: native.Experts) -> None:
    rows = [r for r in experts.rows() if r.hybrid]
    slots = [0] * experts.n_rows
    for r in rows:
        slots[r.row] = r.n_expert // 2
    experts.set_slots(slots)
    for r in rows:
        for expert in range(0, r.n_expert - 1, 2):
            experts.load(r.row, expert)
    experts.sync()
    experts.publish()


@pytest.fixture
def stream(attach: Callable[..., Attached]) -> Callable[..., Attached]:
    """attach(…) with in-stream execution and every second expert resident."""

    def make(family: str = "qwen3moe", **options: Any) -> Attached:
        experts = {"execution": "in-stream", "pool_threads": N_POOL, "timeout_ms": TIMEOUT_MS} | options.pop(
            "experts", {}
        )
        a = attach(family, experts=experts, **options)
        half_resident(a.experts)
        assert in_stream(a.experts)
        return a

    return make


@pytest.fixture
def plain(stream: Callable[..., Attached]) -> Iterator[Callable[[Attached, int], Array]]:
    """plain(attached, n): what upstream computes for tokens(n) with the same model."""
    made: list[Context] = []

    def logits(a: Attached, n: int) -> Array:
        made.append(make_context(a.model, **EXACT))
        return decode(made[-1], tokens(n))

    yield logits
    for ctx in made:
        ctx.close()


def run(a: Attached, n: int) -> Array:
    a.ctx.clear()
    return decode(a.ctx, tokens(n))


class Asked:
    """A batch of tokens for llama_decode, without waiting for the result; keeps what the batch points to."""

    def __init__(self, n: int, seed: int = 0) -> None:
        self.tokens = (llama_cpp.llama_token * n)(*tokens(n, seed))
        self.batch = llama_cpp.llama_batch_get_one(self.tokens, n)

    def decode(self, ctx: Context) -> int:
        return int(llama_cpp.llama_decode(ctx.ptr, self.batch))


def close(a: Array, b: Array) -> bool:
    """Up to rounding. On a GPU products of F32 are rounded more (TF32), and that may give single tokens other experts."""
    distance = np.linalg.norm(a - b, axis=1) / np.linalg.norm(b, axis=1)
    return bool(distance.max() < 1e-3 if test_device().kind == "cpu" else np.median(distance) < 3e-2)


# --- the contract, whatever executes it ----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3moe", "gpt-oss", "llama4", "grovemoe", "gemma4-scale", "glm4moe"])
def test_both_executions_count_the_same(stream: Callable[..., Attached], family: str) -> None:
    """Counts, choices, weights, hot and cold pairs, of the same batch."""
    a = stream(family)
    heard: list[tuple[int, Array, Array]] = []
    a.experts.set_router_callback(lambda row, ids, weights: heard.append((row, ids.copy(), weights.copy())))
    seen = []
    for execution in ("in-stream", "portable"):
        a.experts.set_execution(execution)
        assert in_stream(a.experts) == (execution == "in-stream")
        heard.clear()
        a.experts.reset_perf()
        logits = run(a, 9)
        perf = a.experts.perf_total()
        seen.append((logits, a.experts.counts().copy(), a.experts.choices()[0].copy(), list(heard), perf))
    (logits, counts, choices, callback, perf), other = seen
    assert np.isfinite(logits).all() and close(logits, other[0])
    if test_device().kind == "cpu":
        assert (counts == other[1]).all() and (choices == other[2]).all()
        assert [(row, ids.tolist()) for row, ids, _ in callback] == [(row, ids.tolist()) for row, ids, _ in other[3]]
        for (_, _, mine), (_, _, theirs) in zip(callback, other[3], strict=True):
            assert np.allclose(mine, theirs, rtol=1e-4)
        names = ("n_calls", "n_tokens", "n_hot_pairs", "n_cold_pairs", "n_hot_experts", "n_cold_experts")
        assert [getattr(perf, n) for n in names] == [getattr(other[4], n) for n in names]
    assert perf.n_hot_pairs > 0 and perf.n_cold_pairs > 0


def test_widths_up_to_32_are_computed_in_stream_and_wider_ones_not(stream: Callable[..., Attached]) -> None:
    a = stream(experts={"max_batch_tokens": 48})
    for n in (1, 8, 9, 17, 32, 33, 48):
        a.experts.reset_perf(times=True)
        run(a, n)
        perf = a.experts.perf_total()
        assert perf.n_hot_pairs > 0 and perf.n_cold_pairs > 0
        assert (perf.us_launch > 0) == (n > 32), "the portable execution alone launches a device lane"


def test_several_ubatches_of_one_decode_are_all_counted(stream: Callable[..., Attached]) -> None:
    a = stream(n_ubatch=16)
    logits = run(a, 40)
    counts = a.experts.counts().copy()
    assert [c.shape[1] for c in a.experts.choices()] == [16, 16, 8]
    assert counts.sum() == 40 * 2 * 2
    a.experts.set_execution("portable")
    assert close(logits, run(a, 40))


def test_moves_reach_the_map_before_the_next_decode(stream: Callable[..., Attached]) -> None:
    a = stream()
    for _ in range(3):
        for row in (0, 1):
            cold = np.flatnonzero(a.experts.states(row) == native.COLD)
            hot = np.flatnonzero(a.experts.states(row) == native.RESIDENT)
            a.experts.evict(row, int(hot[0]))
            a.experts.load(row, int(cold[-1]))
        a.experts.sync()
        a.experts.publish()
        a.experts.reset_perf()
        moved = run(a, 9)
        perf = a.experts.perf_total()
        counts, states = a.experts.counts().copy(), a.experts.states_table().copy()
        assert perf.n_hot_pairs == counts[states[:, : counts.shape[1]] == native.RESIDENT].sum()
        a.experts.set_execution("portable")
        assert close(moved, run(a, 9))
        a.experts.set_execution("in-stream")


def test_the_execution_changes_between_decodes_only(stream: Callable[..., Attached]) -> None:
    a = stream()
    assert Asked(1).decode(a.ctx) == 0
    with pytest.raises(native.MoeError, match="in flight") as error:
        a.experts.set_execution("portable")
    assert error.value.status == "IN_FLIGHT"
    llama_cpp.llama_synchronize(a.ctx.ptr)
    a.experts.set_execution("portable")


def test_what_cannot_run_in_stream_says_why(attach: Callable[..., Attached]) -> None:
    a = attach(experts={"execution": "portable"})
    assert {r.portable for r in a.experts.rows()} == {"the portable execution was asked for"}
    a.experts.set_execution("auto")
    if test_device().kind == "cpu":
        assert {r.portable for r in a.experts.rows()} == {"the CPU only emulates it"}
    with pytest.raises(ValueError, match="no execution 'fast' \\(there are auto, portable, in-stream\\)"):
        a.experts.set_execution("fast")
    with pytest.raises(native.MoeError, match="timeout_ms is 0, it must be at least 1"):
        attach(experts={"timeout_ms": 0})
    with pytest.raises(native.MoeError, match="pool_threads is -1, it must be from 0 to 512"):
        attach(experts={"pool_threads": -1})


# --- the pool ------------------------------------------------------------------------------------------------------------


def test_the_pool_sleeps_between_requests(stream: Callable[..., Attached]) -> None:
    a = stream()
    run(a, 4)
    time.sleep(0.1)  # threads look on for a moment
    before = resource.getrusage(resource.RUSAGE_SELF)
    time.sleep(0.5)
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.1
    assert np.isfinite(run(a, 4)).all(), "and wakes up again"


def test_a_context_takes_what_it_asks_for_and_the_last_one_ends_the_pool(stream: Callable[..., Attached]) -> None:
    def threads() -> int:
        names = [p.read_text().strip() for p in Path("/proc/self/task").glob("*/comm")]
        return names.count("moe-pool")

    def soon(n: int) -> bool:
        """A thread takes its name a moment after it has started."""
        end = time.monotonic() + 5
        while threads() != n and time.monotonic() < end:
            time.sleep(0.01)
        return threads() == n

    a = stream()
    assert a.experts.pool_threads() == N_POOL and soon(N_POOL)
    b = stream(experts={"pool_threads": N_POOL + 2})
    run(b, 2)
    assert a.experts.pool_threads() == b.experts.pool_threads() == N_POOL + 2 and soon(N_POOL + 2)
    run(a, 2)
    b.experts.detach()
    assert soon(N_POOL + 2)
    a.experts.set_execution("portable")
    assert soon(0) and a.experts.pool_threads() == 0


def test_more_threads_than_cores_are_slower_and_never_stuck(stream: Callable[..., Attached]) -> None:
    a = stream(experts={"pool_threads": 24, "timeout_ms": 60_000})
    expected = run(a, 9)
    for _ in range(10):
        assert np.array_equal(run(a, 9), expected), "threads own rows: their number changes nothing"
    assert a.experts.failure() == ""


def test_two_contexts_decode_at_once(stream: Callable[..., Attached]) -> None:
    """From two threads, one pool: each gets its own results."""
    both = [stream(experts={"timeout_ms": 60_000}), stream("gpt-oss", experts={"timeout_ms": 60_000})]
    expected = [[run(a, n) for n in (1, 9)] for a in both]
    wrong: list[str] = []

    def work(i: int) -> None:
        for _ in range(15):
            for n, logits in zip((1, 9), expected[i], strict=True):
                if not np.array_equal(run(both[i], n), logits):
                    wrong.append(f"context {i}, {n} tokens")

    workers = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    assert not wrong


# --- failures ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("thread", [0, 1, N_POOL - 1])
def test_a_thread_that_hangs_ends_the_decode_with_a_sentence(
    stream: Callable[..., Attached], plain: Callable[[Attached, int], Array], thread: int
) -> None:
    """The decode fails, its logits are NaN; the next ones take the portable execution until the thread is back."""
    a = stream()
    run(a, 9)
    a.experts.inject_pool_fault(thread, 6 * TIMEOUT_MS)
    logits = run(a, 9)
    assert "CPU threads did not" in a.experts.failure() and "the results of this decode are lost" in a.experts.failure()
    assert np.isnan(logits).all()

    a.ctx.clear()
    logits = run(a, 9)
    assert a.experts.failure() == "" and not in_stream(a.experts)
    assert {r.portable for r in a.experts.rows()} == {"a thread of the pool hangs"}
    assert close(logits, plain(a, 9))

    for _ in range(100):
        time.sleep(0.05)
        logits = run(a, 1)
        if in_stream(a.experts):
            break
    assert in_stream(a.experts), "the thread came back long ago"
    assert close(logits, plain(a, 1)) and close(run(a, 9), plain(a, 9))


def test_a_thread_that_dies_leaves_the_portable_execution(
    stream: Callable[..., Attached], plain: Callable[[Attached, int], Array]
) -> None:
    a = stream()
    run(a, 9)
    a.experts.inject_pool_fault(N_POOL - 1, -1)
    assert np.isnan(run(a, 9)).all() and a.experts.failure()
    for n in (9, 1, 9):
        assert close(run(a, n), plain(a, n)) and not in_stream(a.experts)


def test_nothing_builds_on_a_decode_that_failed(stream: Callable[..., Attached]) -> None:
    """As loops over a prompt's batches do, which wait for the last one only."""
    a = stream()
    run(a, 9)
    a.ctx.clear()
    a.experts.inject_pool_fault(1, 4 * TIMEOUT_MS)
    assert Asked(9).decode(a.ctx) == 0
    assert Asked(4).decode(a.ctx) != 0
    assert "CPU threads did not" in a.experts.failure()


def test_an_aborted_decode_leaves_the_threads_as_they_were(stream: Callable[..., Attached]) -> None:
    a = stream(n_threads=3)
    expected = run(a, 4)
    abort = llama_cpp.ggml_abort_callback(lambda _: True)
    llama_cpp.llama_set_abort_callback(a.ctx.ptr, abort, None)
    a.ctx.clear()
    code = Asked(4).decode(a.ctx)
    if test_device().kind == "cpu":
        assert code == 2
    started = time.monotonic()
    llama_cpp.llama_synchronize(a.ctx.ptr)
    assert time.monotonic() - started < 5, "nobody waits for what was never launched"
    llama_cpp.llama_set_abort_callback(a.ctx.ptr, llama_cpp.ggml_abort_callback(), None)
    assert llama_cpp.llama_n_threads(a.ctx.ptr) == llama_cpp.llama_n_threads_batch(a.ctx.ptr) == 3
    assert close(run(a, 4), expected)


def test_a_context_is_freed_while_a_thread_hangs(stream: Callable[..., Attached]) -> None:
    a, b = stream(), stream()
    run(b, 4)
    a.experts.inject_pool_fault(1, 8 * TIMEOUT_MS)
    run(a, 4)
    assert a.experts.failure()
    a.experts.detach()
    assert np.isfinite(run(b, 4)).all(), "the other context goes on"


def test_a_context_is_freed_in_mid_decode(stream: Callable[..., Attached]) -> None:
    a = stream()
    for i in range(5):
        ctx = make_context(a.model)
        experts = native.Experts(ctx.ptr, test_device(), execution="in-stream", pool_threads=N_POOL)
        half_resident(experts)
        assert Asked(4, i).decode(ctx) == 0
        ctx.close()  # frees all that is attached
    assert np.isfinite(run(a, 4)).all()


def test_python_hears_of_a_failed_decode(pair: Any) -> None:
    """models.Context raises, empties itself and goes on."""
    from moespac_llamacpp import models

    with models.Context(pair.target, n_ctx=256, attach=False) as ctx:
        ctx.experts = native.Experts(
            ctx.pointer, test_device(), execution="in-stream", pool_threads=2, timeout_ms=TIMEOUT_MS
        )
        half_resident(ctx.experts)
        expected = ctx.decode(tokens(5)).copy()
        ctx.experts.inject_pool_fault(1, 4 * TIMEOUT_MS)
        with pytest.raises(
            RuntimeError, match=r"decoding 3 tokens failed: the CPU threads did not .*The context is empty now"
        ):
            ctx.decode(tokens(3))
        assert ctx.n_past == 0
        assert close(ctx.decode(tokens(5)), expected)


def test_a_process_ends_while_the_pool_works(root: Path) -> None:
    """Nobody detaches: the interpreter exits with a context alive."""
    script = """
import sys; sys.path[:0] = sys.argv[1].split(":")
import families, lowlevel, parity
from pathlib import Path
from moespac_llamacpp import native
model = parity.load_with_host_experts(families.cached_model(Path(sys.argv[2]), "qwen3moe"), parity.test_device())
ctx = lowlevel.make_context(model)
experts = native.Experts(ctx.ptr, parity.test_device(), execution="in-stream", pool_threads=2)
print(lowlevel.decode(ctx, [5, 6, 7]).shape)
"""
    path = ":".join(p for p in sys.path if p)
    done = subprocess.run([sys.executable, "-c", script, path, str(root)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.startswith("(3, "), done.stderr[-2000:]
