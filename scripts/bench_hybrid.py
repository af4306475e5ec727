#!/usr/bin/env python3
"""Time verify steps: hybrid layers against upstream's path, at the same VRAM, alternating in one process.

    python scripts/planted_model.py /dev/shm/planted.gguf TRACE.npz
    python scripts/bench_hybrid.py /dev/shm/planted.gguf --json bench.json

A step decodes n tokens and reads all logits. The tokens follow the chain of a planted model (planted_model.py), or count
through the vocabulary of another one. Contenders, each with a context of its own:

    upstream 0L     all experts in host memory, computed by the CPU
    upstream LL     the experts of the last L layers in VRAM: the fewest layers that take at least the bytes of a hybrid share
    detached        a context that was attached and is no more: must equal upstream 0L
    hybrid S sN     the same with up to N experts of a layer streamed in the middle of a decode, and as many by the look-ahead
                    (--stream; the first number is for `hybrid S` itself)
    hybrid S        the share S of each layer's experts in slots, moved between steps by the policy, as in generation; executed as
                    the device does it by itself (in-stream on CUDA)
    portable S      the same by the portable execution, if the device's own is another one (--portable names the shares)
    hybrid 0        no slots: the cold lane alone, against upstream 0L

`--memory` says how upstream's experts lie in host memory: `pinned` (page-locked, upstream's best for prompts; the only mode
with hybrid contenders), `mmap`, or `repacked`. One process per mode.

Before anything is timed, hybrid and upstream are compared: outputs of all MoE layers and logits, with a negative control (one
slot with another expert's weights must be found), and the replay of the trace. Exit code 2 when that fails.

Columns, per step: `step` = decode + policy and start of moves (what a generation pays), `decode` alone; µs per layer: `plan`
(splitting the pairs), `launch` (starting the device lane), `cold`, `wait` (for the device lane), `total`, and `gap`, the rest
of the step. They come from extra steps with the clocks on. GB/s: cold weights over launch + cold.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import gc
import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from moespac_llamacpp import models, native
from moespac_llamacpp.bench.settings import PLANTED_WRONG_GUESSES
from moespac_llamacpp.memory import slots_for_share
from moespac_llamacpp.policies import Decayed, Static
from moespac_llamacpp.residency import STREAM_EXPERTS, Residency, block_sizes

ROOT = Path(__file__).resolve().parent.parent
KV_LIMIT = (
    256  # positions after which a run starts again at 0: longer ones would change the attention's cost within a run
)
N_CTX = 1024
UNLIMITED = 1 << 30
LOAD_MMAP = 1  # enum llama_load_mode
CHECK_WIDTHS = (1, 4, 9)
CHECK_STEPS = 5

Floats = NDArray[np.float32]


# ----------------------------------------------------------------------------------------------------------------------------
# models and contexts


class PlacedModel(models.Model):
    """A model in one of upstream's placements: experts of the last layers on the device, the others in a kind of host memory."""

    def __init__(self, path: Path, memory: str, device: native.Device, device_layers: Sequence[int] = ()) -> None:
        self.path = path
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = -1
        params.use_extra_bufts = memory == "repacked"
        params.no_host = memory == "repacked"
        params.load_mode = LOAD_MMAP if memory == "mmap" else models.LOAD_NONE
        host = native.cpu_device().buffer_type
        if memory == "pinned":
            host = device.host_buffer_type or host
        rules = [(rf"blk\.{il}{models.EXPERT_TENSORS}", device.buffer_type) for il in device_layers]
        rules.append((models.EXPERT_TENSORS, host))
        table = (models._BuftOverride * (len(rules) + 1))(*(models._BuftOverride(p.encode(), b) for p, b in rules))
        params.tensor_buft_overrides = ctypes.cast(table, ctypes.c_void_p)
        self.pointer: Any = llama_cpp.llama_model_load_from_file(os.fsencode(path), params)
        if not self.pointer:
            raise models.LoadError(f"{path}: cannot be loaded: {models._reason()}")
        self.vocab: Any = llama_cpp.llama_model_get_vocab(self.pointer)
        self.n_vocab = int(llama_cpp.llama_vocab_n_tokens(self.vocab))
        self.n_layer = int(llama_cpp.llama_model_n_layer(self.pointer))
        self.n_ctx_train = int(llama_cpp.llama_model_n_ctx_train(self.pointer))


_tensor_get = llama_cpp.llama_cpp._lib.ggml_backend_tensor_get
_tensor_get.restype, _tensor_get.argtypes = None, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]


class WatchedContext(models.Context):
    """A context whose graph is watched: `outputs` of the MoE layers of the last decode, and where the expert tensors lie."""

    def __init__(self, model: models.Model, n_threads: int) -> None:
        self.outputs: dict[str, Floats] = {}
        self.weights: dict[str, tuple[int, int]] = {}  # name: address, bytes of one expert
        self._watch: Any = llama_cpp.ggml_backend_sched_eval_callback(self._on_tensor)
        self.model = model
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.no_perf = 256, 64, 64, True
        params.n_threads = params.n_threads_batch = self.n_threads = n_threads
        params.cb_eval = self._watch
        self.pointer: Any = llama_cpp.llama_init_from_model(model.pointer, params)
        if not self.pointer:
            raise models.LoadError(f"{model.path}: no context: {models._reason()}")
        self.n_ctx, self.n_batch, self.n_outputs = 256, 64, 64
        self._batch: Any = llama_cpp.llama_batch_init(self.n_batch, 0, 1)
        self._memory: Any = llama_cpp.llama_get_memory(self.pointer)
        self.experts: native.Experts | None = None
        self.n_past = 0
        self._logits_at, self._views = 0, {}

    def _on_tensor(self, address: int, ask: bool, _: object) -> bool:
        tensor = native.Tensor.from_address(address)
        if ask:
            if tensor.src[0]:
                weight = native.Tensor.from_address(tensor.src[0])
                if b"_exps.weight" in weight.name:
                    self.weights[weight.name.decode()] = (weight.data, weight.nb[2])
            return bool(tensor.name.startswith(b"ffn_moe_out-"))
        out = np.empty((tensor.ne[1], tensor.ne[0]), np.float32)
        _tensor_get(address, out.ctypes.data, 0, out.nbytes)
        self.outputs[tensor.name.decode()] = out
        return True


def expert_layer_bytes(path: Path) -> list[int]:
    """Bytes of the experts of each layer of the GGUF."""
    import gguf

    sizes: dict[int, int] = {}
    for tensor in gguf.GGUFReader(path).tensors:
        if match := re.match(r"blk\.(\d+)" + models.EXPERT_TENSORS, tensor.name):
            sizes[int(match[1])] = sizes.get(int(match[1]), 0) + int(tensor.n_bytes)
    return [sizes.get(il, 0) for il in range(max(sizes, default=-1) + 1)]


def layers_for_bytes(layer_bytes: Sequence[int], wanted: float) -> list[int]:
    """The fewest last layers that take at least the wanted bytes (a little more than equal: in upstream's favour)."""
    chosen: list[int] = []
    while sum(layer_bytes[il] for il in chosen) < wanted and len(chosen) < len(layer_bytes):
        chosen.append(len(layer_bytes) - 1 - len(chosen))
    return sorted(chosen)


# ----------------------------------------------------------------------------------------------------------------------------
# stepping


@dataclass
class Contender:
    name: str
    context: models.Context
    residency: Residency | None = None
    expert_bytes: int = 0  # of experts in VRAM, lane buffers not included
    token: int = 0

    def step(self, n: int, chain: int) -> tuple[float, float]:
        """Decodes the next n tokens and moves experts; seconds of the decode and of the policy."""
        if self.context.n_past + n > KV_LIMIT and not self.context.rollback(0):
            self.context.clear()
        tokens = [(self.token + i) % chain for i in range(n)]
        self.token = (self.token + n) % chain
        start = time.perf_counter()
        self.context.decode(tokens, all_logits=True)
        decoded = time.perf_counter()
        if self.residency:
            self.residency.step()
        return decoded - start, time.perf_counter() - decoded

    def in_stream(self) -> bool:
        return bool(self.residency and any(r.in_stream for r in self.residency.experts.rows()))

    def settle(self) -> None:
        """Lets uploads land, so that they do not disturb whoever is timed next."""
        if self.residency:
            self.residency.join()  # its uploads start in a thread
            self.residency.experts.sync()

    def fill(self, n: int, chain: int, steps: int) -> None:
        """Moves without limit until the slots hold what the chain uses."""
        if self.residency:
            limit, self.residency.max_moves = self.residency.max_moves, UNLIMITED
            for _ in range(steps):
                self.step(n, chain)
                self.settle()
            self.residency.max_moves = limit
            self.residency.experts.publish()


@dataclass(frozen=True)
class Times:
    """Milliseconds."""

    median: float
    min: float
    p90: float
    n: int

    @staticmethod
    def of(seconds: Sequence[float]) -> Times:
        ms = np.asarray(seconds) * 1e3
        return Times(float(np.median(ms)), float(ms.min()), float(np.quantile(ms, 0.9)), len(ms))


@contextmanager
def quiet_python() -> Iterator[None]:
    """No garbage collection while something is timed."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def set_threads(contenders: Sequence[Contender], n: int) -> None:
    for c in contenders:
        llama_cpp.llama_set_n_threads(c.context.pointer, n, n)


# ----------------------------------------------------------------------------------------------------------------------------
# correctness guard


def relative(a: Floats, b: Floats) -> float:
    """Largest ‖a − b‖ / ‖b‖ of the rows; infinite if anything is not a number."""
    with np.errstate(invalid="ignore", divide="ignore"):
        ratios = np.linalg.norm(a - b, axis=1) / np.maximum(np.linalg.norm(b, axis=1), 1e-30)
    return float(ratios.max()) if np.isfinite(ratios).all() else math.inf


def disagreements(a: Floats, b: Floats) -> tuple[int, int]:
    """(tokens whose argmax differs, those of them where b's two candidates are not nearly tied)."""
    wrong = clear = 0
    for row_a, row_b in zip(a, b, strict=True):
        ia, ib = int(row_a.argmax()), int(row_b.argmax())
        if ia != ib:
            wrong += 1
            clear += bool(row_b[ib] - row_b[ia] > 2 * np.abs(row_a - row_b).max())
    return wrong, clear


@dataclass
class Check:
    """What the comparison of one hybrid context with upstream found."""

    share: float
    logits: float = 0.0
    layers: float | None = None  # None: outputs of layers not compared
    first_layer: float | None = None  # equal inputs there
    n_tokens: int = 0
    argmax_differs: int = 0
    argmax_clear: int = 0
    hot_pairs: int = 0
    cold_pairs: int = 0
    replayed: float | None = None  # share of the trace's ids that the router chose, None without a trace
    negative_layer: float | None = None
    failures: list[str] = field(default_factory=list)


def compare_step(plain: models.Context, hybrid: models.Context, tokens: Sequence[int], check: Check) -> None:
    a = plain.decode(tokens, all_logits=True)
    b = hybrid.decode(tokens, all_logits=True)
    check.logits = max(check.logits, relative(b, a))
    wrong, clear = disagreements(b, a)
    check.n_tokens += len(tokens)
    check.argmax_differs += wrong
    check.argmax_clear += clear
    if isinstance(plain, WatchedContext) and isinstance(hybrid, WatchedContext):
        for name, out in plain.outputs.items():
            difference = relative(hybrid.outputs[name], out)
            check.layers = max(check.layers or 0.0, difference)
            if name == "ffn_moe_out-0":
                check.first_layer = max(check.first_layer or 0.0, difference)


def replayed(counts: NDArray[np.int32], wanted: NDArray[np.int16]) -> tuple[int, int]:
    """(ids of the trace that were chosen, ids of the trace) of one token; wanted: [layer, k]."""
    layer, rank = np.nonzero(wanted >= 0)
    return int((counts[layer, wanted[layer, rank]] > 0).sum()), len(layer)


def streaming(n: int) -> dict[str, Any]:
    """Residency's arguments: up to n experts of a layer streamed, and as many ahead, with guesses no better than real models'."""
    return {"stream_experts": n, "look_ahead": n, "wrong_guesses": PLANTED_WRONG_GUESSES}


def compare(
    plain: models.Context,
    hybrid: models.Context,
    share: float,
    chain: int,
    trace: NDArray[np.int16] | None,
    stream: int = 0,
) -> Check:
    """Decodes the same batches in both, with the residents changing in between."""
    experts = hybrid.experts
    assert experts is not None
    check = Check(share)
    found = total = 0
    for n in CHECK_WIDTHS:
        residency = Residency(
            experts, Decayed(experts.n_rows, experts.n_expert), max_moves=UNLIMITED, **streaming(stream)
        )
        plain.clear()
        hybrid.clear()
        experts.reset_perf()
        for i in range(CHECK_STEPS):
            tokens = [(i * n + j) % chain for j in range(n)]
            compare_step(plain, hybrid, tokens, check)
            if n == 1 and trace is not None:
                hit, ids = replayed(experts.counts(), trace[tokens[0]])
                found, total = found + hit, total + ids
            residency.step()
            residency.experts.sync()
            residency.publish()
        perf = experts.perf_total()
        check.hot_pairs += perf.n_hot_pairs
        check.cold_pairs += perf.n_cold_pairs
    check.replayed = found / total if total else None
    return check


def with_wrong_slot(plain: WatchedContext, hybrid: WatchedContext, chain: int) -> float:
    """Difference of the layer's output when a slot of layer 0 holds another expert's weights."""
    experts = hybrid.experts
    assert experts is not None
    tokens = [i % chain for i in range(9)]
    for context in (plain, hybrid):
        context.clear()
        context.decode(tokens, all_logits=True)
    row = next(r for r in experts.rows() if r.hybrid)
    used = experts.counts()[row.row] * (experts.states(row.row) == native.RESIDENT)
    expert = int(used.argmax())
    if not used[expert]:
        return math.nan
    reload_from(experts, plain, row, expert, (expert + 1) % row.n_expert)
    hybrid.clear()
    hybrid.decode(tokens, all_logits=True)
    name = f"ffn_moe_out-{row.il}"
    difference = relative(hybrid.outputs[name], plain.outputs[name])
    reload_from(experts, plain, row, expert, expert)
    return difference


def reload_from(experts: native.Experts, context: WatchedContext, row: native.Row, expert: int, other: int) -> None:
    """Uploads `expert` while its place in host memory holds the weights of `other`."""
    experts.evict(row.row, expert)
    experts.publish()
    parts = [place for name, place in context.weights.items() if name.startswith(f"blk.{row.il}.")]
    assert parts, "the graph shows no expert weights"
    saved = [ctypes.string_at(address + expert * size, size) for address, size in parts]
    for address, size in parts:
        ctypes.memmove(address + expert * size, address + other * size, size)
    experts.load(row.row, expert)
    experts.sync()
    experts.publish()
    for (address, size), data in zip(parts, saved, strict=True):
        ctypes.memmove(address + expert * size, data, size)


def judge(check: Check, args: argparse.Namespace) -> None:
    """Fills `failures`."""
    fails = check.failures
    if check.logits > args.logits_limit:
        fails.append(f"logits differ by {check.logits:.2e}, more than {args.logits_limit:.0e}")
    if check.layers is not None and check.layers > args.layer_limit:
        fails.append(f"MoE outputs differ by {check.layers:.2e}, more than {args.layer_limit:.0e}")
    if check.argmax_clear:
        fails.append(f"{check.argmax_clear} tokens have another argmax without a near tie")
    if check.share > 0 and not check.hot_pairs:
        fails.append("no pair was computed on the device")
    if check.share < 1 and not check.cold_pairs:
        fails.append("no pair was computed by the cold lane")
    if check.replayed is not None and check.replayed < 0.99:
        fails.append(f"only {check.replayed:.1%} of the trace's experts were chosen")
    if check.negative_layer is not None and not check.negative_layer > 2 * args.layer_limit:
        fails.append(f"a wrong slot was not found: it changed the layer's output by {check.negative_layer:.2e}")


def guard(bench: Bench) -> None:
    """Layer outputs on watched contexts with the negative control, then logits of every context that will be timed."""
    args = bench.args
    plain, hybrid = WatchedContext(bench.base, args.threads[0]), WatchedContext(bench.base, args.threads[0])
    with plain, hybrid:
        share = bench.main_share
        hybrid.experts = native.Experts(hybrid.pointer, bench.device)
        hybrid.experts.set_slots(slots_for_share(block_sizes(hybrid.experts), share))
        check = compare(plain, hybrid, share, bench.chain, bench.trace)
        check.negative_layer = with_wrong_slot(plain, hybrid, bench.chain)
    checks = [check]
    upstream = bench.named("upstream 0L").context
    for c in bench.contenders:
        if c.residency and c.context.experts:
            checks.append(
                compare(upstream, c.context, bench.shares[c.name], bench.chain, bench.trace, bench.streams[c.name])
            )
    for check in checks:
        judge(check, args)
        layers = (
            "" if check.layers is None else f"MoE outputs {check.layers:.1e} (layer 0: {check.first_layer or 0:.1e}), "
        )
        wrong = "" if check.negative_layer is None else f", wrong slot {check.negative_layer:.1e}"
        replay = "" if check.replayed is None else f", trace replayed {check.replayed:.1%}"
        print(
            f"check share {check.share:.2f}: {layers}logits {check.logits:.1e}, argmax differs {check.argmax_differs} of "
            f"{check.n_tokens}, pairs hot {check.hot_pairs} cold {check.cold_pairs}{replay}{wrong}: "
            f"{'; '.join(check.failures) or 'ok'}",
            flush=True,
        )
    bench.report["checks"] = [asdict(c) for c in checks]
    if any(c.failures for c in checks):
        bench.save()
        raise SystemExit(2)


# ----------------------------------------------------------------------------------------------------------------------------
# measurements


class Bench:
    """The contenders and the report."""

    def __init__(self, args: argparse.Namespace, stack: ExitStack) -> None:
        self.args = args
        self.stack = stack
        found = {d.name: d for d in native.devices()}
        if args.device and args.device not in found:
            raise SystemExit(f"bench_hybrid: there is no device {args.device}: {', '.join(found)}")
        self.device = found[args.device] if args.device else native.default_device()
        self.trace: NDArray[np.int16] | None = None
        path = Path(f"{args.model}.trace.npz")
        if path.exists():
            self.trace = np.load(path)["experts"]
        self.contenders: list[Contender] = []
        self.shares: dict[str, float] = {}
        self.streams: dict[str, int] = {}
        self.main_share = args.mixed_share
        self.layer_bytes = expert_layer_bytes(args.model)
        self.report: dict[str, Any] = {"machine": machine(self.device, args)}
        self.base = self.load()
        self.chain = len(self.trace) if self.trace is not None else min(128, self.base.n_vocab)
        self.report["model"] = {
            "path": str(args.model),
            "description": self.base.describe(),
            "expert_gb": sum(self.layer_bytes) / 1e9,
            "planted": self.trace is not None,
            "chain": self.chain,
        }

    def load(self, device_layers: Sequence[int] = ()) -> models.Model:
        start = time.perf_counter()
        model = self.stack.enter_context(PlacedModel(self.args.model, self.args.memory, self.device, device_layers))
        print(
            f"loaded, experts {self.args.memory}, {len(device_layers)} layers' experts on {self.device.name}: "
            f"{time.perf_counter() - start:.1f} s",
            flush=True,
        )
        return model

    def context(self, model: models.Model) -> models.Context:
        made = models.Context(
            model, n_ctx=N_CTX, n_batch=512, n_ubatch=512, n_threads=self.args.threads[0], attach=False
        )
        return self.stack.enter_context(made)

    def attached(
        self, share: float, *, cache_graphs: bool = True, execution: str = "auto", stream: int | None = None
    ) -> tuple[models.Context, Residency]:
        """A context with the share of each layer's experts in slots, and live moves."""
        context = self.context(self.base)
        experts = context.experts = native.Experts(
            context.pointer, self.device, execution=execution, cache_graphs=cache_graphs
        )
        for row in experts.rows():
            if not row.hybrid:
                raise SystemExit(f"bench_hybrid: row {row.row} does not run hybrid: {row.fallback}")
        experts.set_slots(slots_for_share(block_sizes(experts), share))
        policy = Decayed(experts.n_rows, experts.n_expert, decay=self.args.decay, hysteresis=self.args.hysteresis)
        n = self.args.stream[0] if stream is None else stream
        residency = Residency(experts, policy, max_moves=self.args.max_moves, **streaming(n))
        residency.fill()  # as for users: a layer whose slots hold all experts is whole
        return context, residency

    def add(self, contender: Contender) -> Contender:
        self.contenders.append(contender)
        return contender

    def named(self, name: str) -> Contender:
        return next(c for c in self.contenders if c.name == name)

    def save(self) -> None:
        if self.args.json:
            self.args.json.write_text(json.dumps(self.report, indent=1) + "\n")


def enter_contenders(bench: Bench) -> None:
    args = bench.args
    total = sum(bench.layer_bytes)
    bench.add(Contender("upstream 0L", bench.context(bench.base)))
    layers: set[int] = set()
    for share in args.upstream_shares:
        chosen = layers_for_bytes(bench.layer_bytes, share * total)
        if chosen and len(chosen) not in layers:
            layers.add(len(chosen))
            model = bench.load(chosen)
            size = sum(bench.layer_bytes[il] for il in chosen)
            bench.add(Contender(f"upstream {len(chosen)}L", bench.context(model), expert_bytes=size))
    if args.memory != "pinned":
        return
    wanted = [(share, "auto", f"hybrid {share:g}", args.stream[0]) for share in args.shares]
    wanted += [(s, "auto", f"hybrid {s:g} s{n}", n) for n in args.stream[1:] for s in args.shares if 0 < s < 1]
    wanted += [(share, "portable", f"portable {share:g}", 0) for share in args.portable]
    for share, execution, name, stream in wanted:
        context, residency = bench.attached(share, execution=execution, stream=stream)
        if execution == "portable" and not bench.named(f"hybrid {args.shares[0]:g}").in_stream():
            context.close()
            break  # the device's own is the portable one
        size = sum(r.n_slots * r.expert_bytes for r in residency.experts.rows())
        bench.shares[name], bench.streams[name] = share, stream
        contender = bench.add(Contender(name, context, residency, size))
        contender.fill(4, bench.chain, math.ceil(bench.chain / 4) if share else 0)
    context, residency = bench.attached(bench.main_share)
    Contender("", context, residency).fill(4, bench.chain, 4)
    residency.close()
    residency.experts.detach()
    context.experts = None
    bench.add(Contender("detached", context))


def describe_contenders(bench: Bench) -> None:
    rows = []
    for c in bench.contenders:
        row: dict[str, Any] = {"name": c.name, "expert_gb_device": c.expert_bytes / 1e9}
        if c.residency:
            experts = c.residency.experts
            host, pinned = experts.host_bytes()
            example = next(r for r in experts.rows())
            row |= {
                "device_gb_with_lane": experts.device_bytes() / 1e9,
                "slots": sum(r.n_slots for r in experts.rows()),
                "host_gb": host / 1e9,
                "pinned_gb": pinned / 1e9,
                "execution": "in-stream" if c.in_stream() else "portable",
                "pool_threads": experts.pool_threads(),
                "kernel": example.kernel,
                "expert_mb": example.expert_bytes / 1e6,
            }
        rows.append(row)
        print("  ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{v}" for k, v in row.items()))
    bench.report["contenders"] = rows


def measure_width(bench: Bench, threads: int, n: int) -> list[dict[str, Any]]:
    """One row per contender for batches of n tokens."""
    args, chain = bench.args, bench.chain
    decode: dict[str, list[float]] = {c.name: [] for c in bench.contenders}
    policy: dict[str, list[float]] = {c.name: [] for c in bench.contenders}
    for c in bench.contenders:
        for _ in range(args.warm if c.residency else 3):
            c.step(n, chain)
        c.settle()
        if c.residency:
            c.residency.experts.reset_perf()
    with quiet_python():
        for _ in range(args.rounds):
            for c in bench.contenders:
                if sum(decode[c.name]) > args.cap:
                    continue
                for i in range(args.run + 1):
                    times = c.step(n, chain)
                    if i > 0:  # the first one finds caches and clocks as the one before left them
                        decode[c.name].append(times[0])
                        policy[c.name].append(times[1])
                c.settle()
    rows = []
    for c in bench.contenders:
        step = [a + b for a, b in zip(decode[c.name], policy[c.name], strict=True)]
        row: dict[str, Any] = {
            "threads": threads,
            "n": n,
            "contender": c.name,
            "step_ms": asdict(Times.of(step)),
            "decode_ms": asdict(Times.of(decode[c.name])),
            "policy_ms": asdict(Times.of(policy[c.name])),
        }
        if c.residency:
            row |= activity(c.residency.experts, len(step) * (args.run + 1) // args.run)
            row |= layer_times(c, n, chain, args.clocked)
        rows.append(row)
    return rows


def activity(experts: native.Experts, steps: int) -> dict[str, Any]:
    perf = experts.perf_total()
    return {
        "hit_rate": perf.hit_rate,
        "hot_experts_per_layer": perf.n_hot_experts / max(1, perf.n_calls),
        "cold_experts_per_layer": perf.n_cold_experts / max(1, perf.n_calls),
        "uploads_per_step": perf.n_loads / steps,
        "upload_mb_per_step": perf.n_load_bytes / 1e6 / steps,
        "streamed_per_layer": perf.n_streamed_experts / max(1, perf.n_calls),
        "ahead_per_layer": perf.n_ahead_experts / max(1, perf.n_calls),
        "ahead_right": perf.n_ahead_right / max(1, perf.n_ahead_experts),
    }


def layer_times(c: Contender, n: int, chain: int, steps: int) -> dict[str, Any]:
    """µs per layer and bandwidth of the cold lane, from steps of their own: the clocks cost a little."""
    assert c.residency is not None
    experts = c.residency.experts
    experts.reset_perf(times=True)
    decode = [c.step(n, chain)[0] for _ in range(steps)]
    c.settle()
    perfs = {r.row: (r, experts.perf(r.row)) for r in experts.rows()}
    experts.reset_perf(times=False)
    total = sum((p for _, p in perfs.values()), native.Perf())
    calls = max(1, total.n_calls)
    cold = [(p.n_cold_experts - p.n_streamed_experts - p.n_ahead_right, r.expert_bytes) for r, p in perfs.values()]
    cold_bytes = sum(n * size for n, size in cold)
    cold_us = total.us_launch + total.us_cold
    names = ("us_plan", "us_launch", "us_cold", "us_wait", "us_stream", "us_hot", "us_rest", "us_total")
    return {
        "layer_us": {name[3:]: getattr(total, name) / calls for name in names}
        | {"gap": (sum(decode) * 1e6 - total.us_total) / calls},
        "cold_gb_s": cold_bytes / 1e3 / cold_us if cold_us and total.n_cold_pairs else 0.0,
        "layers_us": [
            {"row": row} | {name[3:]: getattr(p, name) / max(1, p.n_calls) for name in names}
            for row, (_, p) in perfs.items()
        ],
    }


def measure_mixed(bench: Bench, threads: int) -> list[dict[str, Any]]:
    """What a change of the batch width costs, with graphs cached and not, and upstream: ms of one width alone and in turn."""
    args = bench.args
    candidates = [Contender("upstream", bench.named("upstream 0L").context)]
    for cached in (True, False):
        context, residency = bench.attached(bench.main_share, cache_graphs=cached, stream=0)
        candidate = Contender(
            f"hybrid {bench.main_share:g}, graphs {'cached' if cached else 'not cached'}", context, residency
        )
        candidate.fill(max(args.mixed), bench.chain, 8)
        residency.policy = Static()
        candidates.append(candidate)
    set_threads(candidates, threads)

    def same_tokens(c: Contender, n: int) -> float:
        c.token = 0
        if not c.context.rollback(0):
            c.context.clear()
        return c.step(n, bench.chain)[0]

    rows = []
    for c in candidates:
        experts = c.context.experts
        alone = {n: [same_tokens(c, n) for _ in range(args.mixed_rounds + 3)][3:] for n in args.mixed}
        before = experts.graph_stats() if experts else None
        mixed: dict[int, list[float]] = {n: [] for n in args.mixed}
        with quiet_python():
            for i in range(args.mixed_rounds + 3):
                for n in args.mixed:
                    seconds = same_tokens(c, n)
                    if i >= 3:
                        mixed[n].append(seconds)
        after = experts.graph_stats() if experts else None
        reused, built = (after[0] - before[0], after[1] - before[1]) if after and before else (None, None)
        for n in args.mixed:
            a, m = Times.of(alone[n]), Times.of(mixed[n])
            rows.append(
                {
                    "threads": threads,
                    "contender": c.name,
                    "n": n,
                    "alone_ms": asdict(a),
                    "mixed_ms": asdict(m),
                    "extra_ms": m.median - a.median,
                    "graphs_reused": reused,  # of all widths together
                    "graphs_built": built,
                }
            )
    for c in candidates[1:]:
        c.context.close()
    return rows


def measure_prompt(bench: Bench, threads: int) -> list[dict[str, Any]]:
    """A prompt of 512 tokens attached, detached and plain: the difference is what the router log costs."""
    names = ["upstream 0L", "detached", f"hybrid {bench.main_share:g}"]
    contenders = [c for c in bench.contenders if c.name in names]
    tokens = [i % bench.chain for i in range(bench.args.prompt)]
    seconds: dict[str, list[float]] = {c.name: [] for c in contenders}
    with quiet_python():
        for i in range(bench.args.prompt_rounds + 1):
            for c in contenders:
                c.context.clear()
                start = time.perf_counter()
                c.context.decode(tokens)
                if i > 0:
                    seconds[c.name].append(time.perf_counter() - start)
    for c in contenders:
        c.context.clear()
    return [
        {"threads": threads, "contender": name, "tokens": len(tokens), "ms": asdict(Times.of(s))}
        for name, s in seconds.items()
    ]


# ----------------------------------------------------------------------------------------------------------------------------
# report


def machine(device: native.Device, args: argparse.Namespace) -> dict[str, Any]:
    cpu = ""
    if (info := Path("/proc/cpuinfo")).exists():
        cpu = next(
            (line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line), ""
        )
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(sys.argv),
        "commit": args.commit or output("git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"),
        "cpu": cpu or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9,
        "device": f"{device.name}: {device.description}",
        "driver": output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "llama_cpp_python": llama_cpp.__version__,
        "moespac_llamacpp": version("moespac-llamacpp"),
        "cold_kernels": native.kernel_isa(),
        "settings": {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()},
    }


def version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def output(*command: str) -> str:
    if not shutil.which(command[0]):
        return ""
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    return done.stdout.strip() if done.returncode == 0 else ""


def print_rows(rows: Sequence[dict[str, Any]]) -> None:
    head = (
        f"{'thr':>3} {'n':>3} {'contender':<14} {'step':>8} {'min':>8} {'p90':>8} {'decode':>8} {'policy':>6} | "
        f"{'hits':>5} {'hot':>5} {'cold':>5} {'strm':>5} {'up':>5} {'MB':>6} | "
        f"{'plan':>5} {'launch':>6} {'cold':>6} {'hot':>6} {'wait':>6} {'rest':>6} {'total':>6} {'gap':>6} {'GB/s':>5}"
    )
    print(head)
    for r in rows:
        step = r["step_ms"]
        line = (
            f"{r['threads']:>3} {r['n']:>3} {r['contender']:<14} {step['median']:8.2f} {step['min']:8.2f} {step['p90']:8.2f} "
            f"{r['decode_ms']['median']:8.2f} {r['policy_ms']['median']:6.2f} |"
        )
        if "hit_rate" in r:
            us = r["layer_us"]
            line += (
                f" {r['hit_rate']:5.3f} {r['hot_experts_per_layer']:5.1f} {r['cold_experts_per_layer']:5.1f} "
                f"{r['streamed_per_layer']:5.2f} "
                f"{r['uploads_per_step']:5.1f} {r['upload_mb_per_step']:6.1f} | {us['plan']:5.1f} {us['launch']:6.1f} "
                f"{us['cold']:6.1f} {us['hot']:6.1f} {us['wait']:6.1f} {us['rest']:6.1f} {us['total']:6.1f} {us['gap']:6.1f} "
                f"{r['cold_gb_s']:5.1f}"
            )
        print(line)
    sys.stdout.flush()


def print_ratios(bench: Bench, rows: Sequence[dict[str, Any]]) -> None:
    """How many times faster each contender is than upstream with the next larger number of bytes in VRAM."""
    median = {r["contender"]: r["step_ms"]["median"] for r in rows}
    parts = []
    upstream = [c for c in bench.contenders if c.name.startswith("upstream")]
    for c in bench.contenders:
        if c.name.startswith("upstream"):
            continue
        larger = [u for u in upstream if u.expert_bytes >= c.expert_bytes]
        if larger:
            rival = min(larger, key=lambda u: u.expert_bytes)
            parts.append(f"{c.name} {median[rival.name] / median[c.name]:.2f}x of {rival.name}")
    if parts:
        print("    faster: " + ", ".join(parts), flush=True)


def print_mixed(rows: Sequence[dict[str, Any]]) -> None:
    for r in rows:
        print(
            f"{r['threads']:>3} {r['n']:>3} {r['contender']:<32} alone {r['alone_ms']['median']:8.2f} "
            f"in turn {r['mixed_ms']['median']:8.2f} extra {r['extra_ms']:+7.2f} ms"
            + (
                f"  graphs reused {r['graphs_reused']} built {r['graphs_built']}"
                if r["graphs_built"] is not None
                else ""
            )
        )


def numbers(kind: Any) -> Any:
    return lambda text: [kind(x) for x in text.split(",") if x]


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    p.add_argument("model", type=Path)
    p.add_argument("--memory", choices=("pinned", "mmap", "repacked"), default="pinned")
    p.add_argument("--device", help="ggml device of slots and layers (default: the first GPU, else the CPU)")
    p.add_argument("--threads", type=numbers(int), default=[16, 8], help="CPU threads, default 16,8")
    p.add_argument(
        "--widths", type=numbers(int), default=[1, 4, 5, 8, 9, 16], help="tokens per step, default 1,4,5,8,9,16"
    )
    p.add_argument("--shares", type=numbers(float), default=[0.0, 0.17, 0.25, 0.5, 1.0], help="hybrid contenders")
    p.add_argument("--portable", type=numbers(float), default=[0.25], help="shares of the portable contenders")
    p.add_argument(
        "--upstream-shares",
        type=numbers(float),
        default=[0.17, 0.25],
        help="shares that upstream matches by whole layers",
    )
    p.add_argument("--rounds", type=int, default=4, help="turns of each contender per width")
    p.add_argument("--run", type=int, default=8, help="timed steps per turn, after one that is not")
    p.add_argument("--warm", type=int, default=16, help="steps of a hybrid contender before the first turn of a width")
    p.add_argument("--clocked", type=int, default=12, help="steps with the layers' clocks on")
    p.add_argument(
        "--cap", type=float, default=6.0, help="seconds per contender and width, then it sits out the other rounds"
    )
    p.add_argument("--max-moves", type=int, default=60, help="uploads started per step")
    p.add_argument("--decay", type=float, default=0.955, help="fading of the counts per decoded token")
    p.add_argument("--hysteresis", type=float, default=0.5)
    p.add_argument(
        "--stream",
        type=numbers(int),
        default=[STREAM_EXPERTS, 0],
        help="experts of a layer that may be streamed during a decode, and ahead; further numbers: contenders of their own",
    )
    p.add_argument(
        "--mixed", type=numbers(int), default=[1, 5, 3, 9], help="widths that alternate; empty: leave that out"
    )
    p.add_argument("--mixed-rounds", type=int, default=12)
    p.add_argument(
        "--mixed-share", type=float, default=0.25, help="share of the alternating widths, the prompt and the check"
    )
    p.add_argument("--prompt", type=int, default=512, help="tokens of the prompt; 0: leave that out")
    p.add_argument("--prompt-rounds", type=int, default=5)
    p.add_argument("--logits-limit", type=float, default=1e-2, help="largest relative difference of logits")
    p.add_argument(
        "--layer-limit", type=float, default=5e-2, help="largest relative difference of a MoE layer's output"
    )
    p.add_argument("--json", type=Path, help="where to write the numbers; written after each thread count")
    p.add_argument("--commit", default="", help="recorded in place of what git says")
    args = p.parse_args()
    if wide := [n for n in (*args.widths, *args.mixed) if not 1 <= n <= models.N_OUTPUTS]:
        p.error(f"a step has 1 to {models.N_OUTPUTS} tokens, with logits of all, not {wide[0]}")
    return args


def main() -> None:
    args = arguments()
    models.capture_log()
    with ExitStack() as stack:
        bench = Bench(args, stack)
        for key, value in bench.report["machine"].items():
            print(f"{key}: {value}")
        enter_contenders(bench)
        describe_contenders(bench)
        if args.memory == "pinned":
            guard(bench)
        for name in ("results", "mixed", "prompt"):
            bench.report[name] = []
        for threads in args.threads:
            set_threads(bench.contenders, threads)
            for n in args.widths:
                rows = measure_width(bench, threads, n)
                print_rows(rows)
                print_ratios(bench, rows)
                bench.report["results"] += rows
                bench.save()
            if args.prompt:
                rows = measure_prompt(bench, threads)
                bench.report["prompt"] += rows
                for r in rows:
                    ms = r["ms"]
                    print(
                        f"{threads:>3} prompt of {r['tokens']}: {r['contender']:<14} {ms['median']:8.1f} ms (min {ms['min']:.1f})"
                    )
            if args.mixed and args.memory == "pinned":
                rows = measure_mixed(bench, threads)
                bench.report["mixed"] += rows
                print_mixed(rows)
            bench.save()


if __name__ == "__main__":
    main()
