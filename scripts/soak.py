#!/usr/bin/env python3
"""Decode thousands of steps while experts move at random, and compare with upstream every 50 steps.

    python scripts/soak.py MODEL.gguf [--steps 2000] [--device NAME | --moetest]

Between all decodes random experts are loaded and evicted, uploads are published whether or not others are under way, and
now and then the slots of all layers are planned anew. Batches have 1 to 32 tokens; some have 64, which take upstream's path.

At a check both contexts forget everything and decode the same tokens in the same batches, the hybrid one with moves in
between. Rounding alone can make a router choose another expert, so two correct executions differ by a distribution: most
tokens a little, a few a lot. The tolerance is therefore taken from upstream itself: the same number of tokens decoded in
other batches, and on a GPU with all experts there, gives the median, the 90th percentile and the maximum of ‖a − b‖ / ‖b‖ of
its logits. A check fails when one of the three is more than `--factor` times upstream's largest in `--noise-groups` such
groups, or when a token's argmax differs and upstream's two candidates are further apart than the same factor times the
largest difference of a logit between upstream's own executions. The run fails too if hot or cold pairs were 0, or if a
check at the end, with the residents' weights exchanged on purpose (the negative control), passes.

Exit code 0: all checks passed. 1: one failed. Works on any device; `--moetest` takes the test device of tests/native, whose
copies land late and whose unwritten memory is NaN.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from moespac_llamacpp import models, native
from moespac_llamacpp.memory import slots_for_share
from moespac_llamacpp.residency import block_sizes

ROOT = Path(__file__).resolve().parent.parent
N_CTX = 512
CHECK_TOKENS = 96
FLOOR = 1e-5  # relative; upstream's own difference can be 0 where a model's routing is far from ties

Floats = NDArray[np.float32]


class Loaded(models.Model):
    """The model with its experts in host memory that can be written to (no mmap), or as upstream runs it all on the GPU."""

    def __init__(self, path: Path, experts_device: native.Device | None) -> None:
        """experts_device: where the slots will be, for page-locked host memory; None: everything on the GPU."""
        self.path = path
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = -1
        if experts_device:
            params.use_extra_bufts = False
            params.load_mode = models.LOAD_NONE
            buft = experts_device.host_buffer_type or native.cpu_device().buffer_type
            rules = models._BuftOverride(models.EXPERT_TENSORS.encode(), buft), models._BuftOverride(None, None)
            table = (models._BuftOverride * 2)(*rules)
            params.tensor_buft_overrides = ctypes.cast(table, ctypes.c_void_p)
        self.pointer: Any = llama_cpp.llama_model_load_from_file(os.fsencode(path), params)
        if not self.pointer:
            raise models.LoadError(f"{path}: cannot be loaded")
        self.vocab: Any = llama_cpp.llama_model_get_vocab(self.pointer)
        self.n_vocab = int(llama_cpp.llama_vocab_n_tokens(self.vocab))
        self.n_ctx_train = int(llama_cpp.llama_model_n_ctx_train(self.pointer))


# ----------------------------------------------------------------------------------------------------------------------------
# comparing


@dataclass
class Spread:
    """‖a − b‖ / ‖b‖ over the tokens of a group, and the largest difference of a single logit."""

    median: float = 0.0
    p90: float = 0.0
    max: float = 0.0
    logit: float = 0.0

    @staticmethod
    def of(a: Floats, b: Floats) -> Spread:
        with np.errstate(invalid="ignore", over="ignore"):
            ratios = np.linalg.norm(a - b, axis=1) / np.maximum(np.linalg.norm(b, axis=1), 1e-30)
            logit = float(np.abs(a - b).max())
        if not np.isfinite(ratios).all():
            return Spread(math.inf, math.inf, math.inf, math.inf)
        return Spread(float(np.median(ratios)), float(np.quantile(ratios, 0.9)), float(ratios.max()), logit)

    def larger(self, other: Spread) -> Spread:
        return Spread(*(max(a, b) for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))

    def beyond(self, noise: Spread, factor: float) -> list[str]:
        """What of this is larger than `factor` times the noise."""
        found = []
        for name in ("median", "p90", "max"):
            value, limit = getattr(self, name), max(FLOOR, factor * getattr(noise, name))
            if not value <= limit:
                found.append(f"{name} {value:.2e} > {limit:.2e}")
        return found

    def __str__(self) -> str:
        return f"median {self.median:.2e} p90 {self.p90:.2e} max {self.max:.2e}"


def clear_disagreements(a: Floats, b: Floats, tie: float) -> int:
    """Tokens whose argmax differs though b's two candidates are further apart than `tie`."""
    ia, ib = a.argmax(axis=1), b.argmax(axis=1)
    rows = np.arange(len(b))
    return int(((ia != ib) & (b[rows, ib] - b[rows, ia] > tie)).sum())


def decode_split(
    context: models.Context, tokens: Sequence[int], widths: Sequence[int], between: Callable[[], None] | None = None
) -> Floats:
    """Logits of all tokens, decoded from an empty context in batches of these widths; `between` runs before each."""
    context.clear()
    out, at = [], 0
    for width in widths:
        if between:
            between()
        out.append(context.decode(tokens[at : at + width], all_logits=True).copy())
        at += width
    return np.concatenate(out)


def random_widths(rng: np.random.Generator, n: int, largest: int) -> list[int]:
    widths: list[int] = []
    while n > 0:
        widths.append(min(n, int(rng.integers(1, largest + 1))))
        n -= widths[-1]
    return widths


# ----------------------------------------------------------------------------------------------------------------------------
# random moves


@dataclass
class Mover:
    """Random moves of a context's experts; `done` counts them."""

    experts: native.Experts
    rng: np.random.Generator
    share: float
    replan_every: int
    done: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.rows = [r for r in self.experts.rows() if r.hybrid]

    def replan(self) -> None:
        """Another number of slots in each layer, on average the share; some layers get none, some all."""
        plan = np.zeros(self.experts.n_rows, np.int32)
        for r in self.rows:
            share = self.rng.choice(
                [0.0, 1.0, self.share, self.rng.uniform(0, 2 * self.share)], p=[0.05, 0.05, 0.3, 0.6]
            )
            plan[r.row] = round(min(1.0, float(share)) * r.n_expert)
        self.experts.set_slots(plan)
        self.done["plans"] += 1

    def plan_share(self) -> None:
        self.experts.set_slots(slots_for_share(block_sizes(self.experts), self.share))

    def fill(self) -> None:
        """Random residents in all slots."""
        for r in self.rows:
            self.load_some(r, r.n_expert)
        self.experts.sync()
        self.experts.publish()

    def load_some(self, row: native.Row, n: int) -> None:
        cold = np.flatnonzero(self.experts.states(row.row) == native.COLD)
        for expert in self.rng.permutation(cold)[:n]:
            try:
                self.experts.load(row.row, int(expert))
            except native.MoeError as error:
                if error.status != "NO_FREE_SLOT":
                    raise
                self.done["refused"] += 1
                return
            self.done["loads"] += 1

    def evict_some(self, row: native.Row, n: int) -> None:
        here = np.flatnonzero(
            self.experts.states(row.row) != native.COLD
        )  # residents, and uploads, which are withdrawn
        for expert in self.rng.permutation(here)[:n]:
            self.experts.evict(row.row, int(expert))
            self.done["evictions"] += 1

    def __call__(self) -> None:
        """Before each decode."""
        if self.rng.random() < 1 / self.replan_every:
            self.replan()
        for index in self.rng.permutation(len(self.rows))[: int(self.rng.integers(1, 1 + min(8, len(self.rows))))]:
            n = int(self.rng.integers(1, 5))
            self.evict_some(self.rows[index], n)
            self.load_some(self.rows[index], n + int(self.rng.integers(0, 3)))
        if self.rng.random() < 0.1:
            self.experts.sync()
        self.done["published"] += self.experts.publish()


# ----------------------------------------------------------------------------------------------------------------------------
# the run


class Soak:
    def __init__(self, args: argparse.Namespace, stack: ExitStack) -> None:
        self.args = args
        self.rng = np.random.default_rng(args.seed)
        self.device = find_device(args)
        self.model = stack.enter_context(Loaded(args.model, self.device))
        self.plain = self.context(stack, self.model)
        self.hybrid = self.context(stack, self.model)
        self.experts = self.hybrid.experts = native.Experts(self.hybrid.pointer, self.device, execution=args.execution)
        if not any(r.hybrid for r in self.experts.rows()):
            raise SystemExit(f"soak: no layer runs hybrid: {self.experts.rows()[0].fallback}")
        self.experts.set_streaming(args.stream, always=True)
        self.experts.set_look_ahead(args.look_ahead)
        self.on_device: models.Context | None = None
        if self.device.kind == "gpu":
            self.on_device = self.context(stack, stack.enter_context(Loaded(args.model, None)))
        self.move = Mover(self.experts, self.rng, args.share, args.replan_every)
        trace = Path(f"{args.model}.trace.npz")  # a planted model: tokens beyond the chain have no embedding
        self.n_tokens = len(np.load(trace)["experts"]) if trace.exists() else self.model.n_vocab
        self.report: dict[str, Any] = {"checks": []}

    def context(self, stack: ExitStack, model: models.Model) -> models.Context:
        made = models.Context(
            model, n_ctx=N_CTX, n_batch=128, n_ubatch=128, n_outputs=128, n_threads=self.args.threads, attach=False
        )
        return stack.enter_context(made)

    def tokens(self, n: int) -> list[int]:
        return [int(t) for t in self.rng.integers(0, self.n_tokens, n)]

    def noise(self) -> Spread:
        """Upstream's largest difference from itself: other batches, and another device."""
        worst = Spread()
        for _ in range(self.args.noise_groups):
            tokens = self.tokens(CHECK_TOKENS)
            widths = random_widths(self.rng, CHECK_TOKENS, 32)
            reference = decode_split(self.plain, tokens, widths)
            other = decode_split(self.plain, tokens, random_widths(self.rng, CHECK_TOKENS, 32))
            worst = worst.larger(Spread.of(other, reference))
            if self.on_device:
                worst = worst.larger(Spread.of(decode_split(self.on_device, tokens, widths), reference))
        return worst

    def check(self, noise: Spread, step: int, between: Callable[[], None] | None) -> list[str]:
        """Sentences about what is wrong, none if nothing is; `between`: moves before each decode."""
        tokens, widths = self.tokens(CHECK_TOKENS), random_widths(self.rng, CHECK_TOKENS, 32)
        reference = decode_split(self.plain, tokens, widths)
        logits = decode_split(self.hybrid, tokens, widths, between)
        spread = Spread.of(logits, reference)
        wrong = spread.beyond(noise, self.args.factor)
        tie = self.args.factor * max(noise.logit, FLOOR * float(np.abs(reference).max()))
        clear = clear_disagreements(logits, reference, tie)
        if clear:
            wrong.append(f"{clear} of {CHECK_TOKENS} tokens have another argmax without a near tie")
        self.report["checks"].append({"step": step} | asdict(spread) | {"wrong": wrong})
        return wrong

    def walk(self, width: int = 0) -> None:
        """One decode of random tokens after random moves; 0: of a random width."""
        if not width:
            width = 64 if self.rng.random() < self.args.wide else int(self.rng.integers(1, 33))
        if self.hybrid.n_past + width > N_CTX:
            self.hybrid.clear()
        self.move()
        logits = self.hybrid.decode(self.tokens(width), all_logits=True)
        if not np.isfinite(logits).all():
            raise SystemExit("soak: FAILED: logits that are no numbers")

    def negative_control(self, noise: Spread) -> bool:
        """Is it noticed when all residents' weights are those of other experts?"""
        self.move.plan_share()
        for row in self.move.rows:
            self.move.evict_some(row, row.n_expert)
        self.experts.sync()
        self.experts.publish()
        restore = exchange_experts(self.plain, self.tokens(1))
        try:
            self.move.fill()
        finally:
            restore()
        found = bool(self.check(noise, -1, None))
        self.report["negative"] = self.report["checks"].pop()
        return found

    def sizes(self) -> dict[str, float]:
        free, total = self.device.memory
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return {
            "rss_mb": pages * os.sysconf("SC_PAGE_SIZE") / 1e6,
            "streamed": self.experts.perf_total().n_streamed_experts,
            "ahead": self.experts.perf_total().n_ahead_experts,
            "slots_and_lane_mb": self.experts.device_bytes() / 1e6,
            "device_used_mb": (total - free) / 1e6,
        }


def exchange_experts(context: models.Context, token: list[int]) -> Callable[[], None]:
    """Rotates the experts of all layers by one in host memory; returns what puts them back."""
    places = expert_places(context, token)
    saved = [(address, ctypes.string_at(address, size * n)) for address, size, n in places]
    for (address, size, _), (_, data) in zip(places, saved, strict=True):
        ctypes.memmove(address, data[size:] + data[:size], len(data))

    def restore() -> None:
        for address, data in saved:
            ctypes.memmove(address, data, len(data))

    return restore


def expert_places(context: models.Context, token: list[int]) -> list[tuple[int, int, int]]:
    """(address, bytes of an expert, experts) of the experts' weights, seen while a watched context decodes a token."""
    places: dict[bytes, tuple[int, int, int]] = {}

    def on_tensor(address: int, ask: bool, _: object) -> bool:
        source = native.Tensor.from_address(address).src[0]
        if source:
            weight = native.Tensor.from_address(source)
            if b"_exps.weight" in weight.name:
                places[weight.name] = (weight.data, weight.nb[2], weight.ne[2])
        return False

    watch = llama_cpp.ggml_backend_sched_eval_callback(on_tensor)
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = params.n_batch = 64
    params.cb_eval = watch
    pointer = llama_cpp.llama_init_from_model(context.model.pointer, params)
    batch = llama_cpp.llama_batch_get_one((llama_cpp.llama_token * 1)(*token), 1)
    llama_cpp.llama_decode(pointer, batch)
    llama_cpp.llama_synchronize(pointer)
    llama_cpp.llama_free(pointer)
    return list(places.values())


def find_device(args: argparse.Namespace) -> native.Device:
    if args.moetest:
        sys.path.insert(0, str(ROOT / "tests"))
        import native_build  # type: ignore[import-not-found, unused-ignore, import-untyped]

        library = ctypes.CDLL(str(native_build.build_test_device(native_build.find_source())))
        library.moe_test_device.restype = ctypes.c_void_p
        return native.device_at(library.moe_test_device())
    if not args.device:
        return native.default_device()
    found = {d.name: d for d in native.devices()}
    if args.device not in found:
        raise SystemExit(f"soak: there is no device {args.device}: {', '.join(found)}")
    return found[args.device]


def run(soak: Soak) -> list[str]:
    """All steps; sentences about failures."""
    args, report = soak.args, soak.report
    noise = soak.noise()
    report["noise"] = asdict(noise)
    print(f"upstream's own difference: {noise}; tolerated: {args.factor:g} times that", flush=True)
    soak.move.plan_share()
    soak.move.fill()
    for width in [*range(1, 33), 64]:  # a graph per width: what grows after this is a leak
        soak.walk(width)
    report["start"] = soak.sizes()
    soak.experts.reset_perf()
    failures: list[str] = []
    start = time.perf_counter()
    step = 0
    for step in range(1, args.steps + 1):
        soak.walk()
        if step % args.check_every == 0:
            wrong = soak.check(noise, step, soak.move)
            failures += [f"step {step}: {w}" for w in wrong]
            if step % (10 * args.check_every) == 0 or wrong:
                sizes = ", ".join(f"{name} {size:.0f}" for name, size in soak.sizes().items())
                seconds = time.perf_counter() - start
                print(f"step {step}: {'; '.join(wrong) or 'ok'} ({seconds:.0f} s; {sizes})", flush=True)
        if args.seconds and time.perf_counter() - start > args.seconds:
            print(f"stopped after {args.seconds:g} s", flush=True)
            break
    perf = soak.experts.perf_total()
    soak.experts.sync()
    soak.experts.publish()
    soak.move.plan_share()
    report["end"] = soak.sizes()
    report["steps"] = step
    report["seconds"] = time.perf_counter() - start
    report["moves"] = dict(soak.move.done)
    report["pairs"] = {"hot": perf.n_hot_pairs, "cold": perf.n_cold_pairs, "hit_rate": perf.hit_rate}
    if not perf.n_hot_pairs or not perf.n_cold_pairs:
        failures.append(f"{perf.n_hot_pairs} hot and {perf.n_cold_pairs} cold pairs: one lane did nothing")
    if not report["checks"]:
        failures.append("no check was made")
    if args.negative and not soak.negative_control(noise):
        failures.append("exchanged experts were not noticed (negative control)")
    return failures


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    p.add_argument("model", type=Path)
    p.add_argument("--steps", type=int, default=2000)
    p.add_argument("--check-every", type=int, default=50)
    p.add_argument("--seconds", type=float, default=0, help="stop earlier (0: never)")
    p.add_argument("--share", type=float, default=0.25, help="share of the experts in slots, on average")
    p.add_argument("--replan-every", type=int, default=40, help="decodes between new slot counts, on average")
    p.add_argument("--wide", type=float, default=0.04, help="share of batches of 64 tokens")
    p.add_argument("--factor", type=float, default=2.0, help="tolerance over upstream's own difference")
    p.add_argument(
        "--noise-groups", type=int, default=16, help=f"groups of {CHECK_TOKENS} tokens that tell upstream's own"
    )
    p.add_argument("--device", help="ggml device of the slots (default: the first GPU, else the CPU)")
    p.add_argument("--moetest", action="store_true", help="the test device of tests/native (built on demand)")
    p.add_argument("--execution", choices=tuple(native.EXECUTIONS), default="auto", help="of the hybrid layers")
    p.add_argument(
        "--stream",
        type=int,
        default=native.MAX_STREAMED,
        help="in-stream: experts of a layer that every decode streams, 0: none",
    )
    p.add_argument("--look-ahead", type=int, default=2, help="in-stream: and those that come before the layer begins")
    p.add_argument("--threads", type=int, help="CPU threads (default: the cores there are)")
    p.add_argument("--no-negative", dest="negative", action="store_false", help="leave the negative control out")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--json", type=Path, help="where to write the numbers")
    return p.parse_args()


def main() -> None:
    args = arguments()
    models.capture_log()
    with ExitStack() as stack:
        soak = Soak(args, stack)
        print(
            f"{args.model} on {soak.device.name} ({soak.device.description}), {soak.hybrid.n_threads} threads",
            flush=True,
        )
        failures = run(soak)
        report = soak.report
        report["failures"] = failures
        if args.json:
            args.json.write_text(json.dumps(report, indent=1) + "\n")
        worst = Spread()
        for c in report["checks"]:
            worst = worst.larger(Spread(c["median"], c["p90"], c["max"], c["logit"]))
        print(
            f"{report['steps']} steps in {report['seconds']:.0f} s, {len(report['checks'])} checks, largest difference: {worst}"
        )
        print(f"moves {report['moves']}, pairs {report['pairs']}")
        for key in report["start"]:
            print(f"{key}: {report['start'][key]:.1f} at the start, {report['end'][key]:.1f} at the end")
        for failure in failures:
            print(f"FAILED: {failure}")
    raise SystemExit(1 if failures else 0)


if __name__ == "__main__":
    main()
