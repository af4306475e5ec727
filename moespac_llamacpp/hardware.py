"""How long a step takes on a machine: one model, for the estimate of a plan and for the simulator. numpy only.

A layer is its rest (attention, norms, router), and then the device's resident experts beside the CPU's cold ones. In-stream,
some of the cold experts cross the link first: as many as end the layer soonest, which is what the device itself decides by
(`pick_streamed` in moe-stream.cu), and never more than slots are free of the batch's own experts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Column = NDArray[np.float64]  # [n_rows], or anything that broadcasts


@dataclass(frozen=True)
class Work:
    """What a decode of n_tokens asks of its layers. Experts are distinct ones, pairs are of a token and an expert.

    free: slots whose residents the batch does not use; streamed experts land there."""

    n_tokens: float
    cold_experts: Column
    cold_pairs: Column
    hot_experts: Column
    hot_pairs: Column
    free: Column


@dataclass(frozen=True)
class Hardware:
    """Times in microseconds per layer, for experts of expert_bytes. A decode of n tokens takes, for each layer,

        between + launch + max(cold lane, device)
        cold lane: request + cold experts · cpu_expert + cold pairs · cpu_pair, if any expert is cold
        device:    device + (n - 1) · device_token + hot experts · device_expert + hot pairs · device_pair

    (between and launch grow by their *_token for each token after the first). With `streams` above 0 up to so many cold
    experts cross the link before the device's lane begins, and the cold lane's reading takes `beside` times as long; as
    many as end the layer soonest. A whole layer takes between + device - join. A step takes `step` on top of its layers,
    step_token more for each token after the first, and never less than its moves take on the link."""

    name: str
    expert_bytes: int
    link_bytes: float  # a second
    between: float
    between_token: float
    launch: float
    launch_token: float
    cpu_expert: float
    cpu_pair: float
    device: float
    device_pair: float
    device_token: float = 0.0
    device_expert: float = 0.0
    request: float = 0.0
    streams: int = 0
    beside: float = 1.0
    join: float = 0.0
    step: float = 0.0
    step_token: float = 0.0

    def device_us(self, work: Work) -> Column:
        fixed = self.device + (work.n_tokens - 1) * self.device_token
        return fixed + work.hot_experts * self.device_expert + work.hot_pairs * self.device_pair

    def experts_us(self, work: Work) -> Column:
        """Of the routed experts of each layer, both lanes side by side."""
        return self.streaming(work)[0]

    def streaming(self, work: Work) -> tuple[Column, NDArray[np.int64]]:
        """experts_us, and how many experts of each layer cross the link for it."""
        device, cold = self.device_us(work), np.asarray(work.cold_experts, np.float64)
        read = cold * self.cpu_expert + work.cold_pairs * self.cpu_pair
        best = np.where(cold > 0, np.maximum(device, self.request + read), device)
        n_best = np.zeros(best.shape, np.int64)
        link = 1e6 * self.expert_bytes / self.link_bytes
        for n in range(1, self.streams + 1):
            left = np.maximum(cold - n, 0)
            pool = np.where(left > 0, self.request + self.beside * read * left / np.maximum(cold, 1e-9), 0)
            us = np.maximum(device + n * link, pool)
            better = (n <= cold) & (n <= work.free) & (us < best)
            best, n_best = np.where(better, us, best), np.where(better, n, n_best)
        return best, n_best

    def whole_us(self, work: Work) -> Column:
        """Of whole layers, with their rest. llama.cpp's own path: only of what `in_stream` makes."""
        return self.rest_us(work.n_tokens) - self.join + self.device_us(work)

    def rest_us(self, n_tokens: float) -> float:
        return self.between + self.launch + (n_tokens - 1) * (self.between_token + self.launch_token)

    def step_us(self, n_tokens: float) -> float:
        return self.step + (n_tokens - 1) * self.step_token

    def step_ms(self, work: Work, n_moves: int, *, sync_moves: bool = False) -> float:
        """sync_moves: the ablation in which a step waits for its moves."""
        experts = self.experts_us(work)
        compute = (
            len(experts) * self.rest_us(work.n_tokens) + float(experts.sum()) + self.step_us(work.n_tokens)
        ) / 1e3
        link = 1e3 * n_moves * self.expert_bytes / self.link_bytes
        return compute + link if sync_moves else max(compute, link)


#: One H200 and 16 cores, the portable execution, a planted Qwen3-30B-A3B Q4_K_M (docs/performance.md): `between`, `launch` from
#: its per-layer times at n = 1 and 9; the CPU's from the runs without slots (13.6 ms at n = 1, 45.8 at 8: 2.7 MB at 100
#: GB/s, and 2.3 µs a pair); the device's from the runs with all experts resident (8.2 ms at n = 1, 19 at 9); the link 46
#: GB/s (pinned copies). Checked against 25 % resident (n = 1, 8, 9: 8.2, 20.3, 21.1 ms measured): within 12 %, on the low side.
PORTABLE = Hardware(
    name="H200, 16 cores, Qwen3-30B-A3B Q4_K_M, portable execution",
    expert_bytes=2_700_000,
    link_bytes=46e9,
    between=105.0,
    between_token=13.4,
    launch=21.0,
    launch_token=2.1,
    cpu_expert=27.0,
    cpu_pair=2.3,
    device=32.0,
    device_pair=2.1,
)

# In-stream, with the stream lane. From the 78 clocked runs of the grid's session (docs/memory-plan.md: H200, 16 cores, planted
# Qwen3-30B-A3B Q4_K_M; budgets of 8 to 50 %, 4 to 16 threads, 1 to 5 tokens a step), least squares of relative errors.

#: µs of a layer beside its experts, less what its dense weights take: 43.8 with one token, 57 with three, 76 with 4.6.
REST, REST_TOKEN = 41.0, 7.3
#: µs of publish and the kernels of the resident experts, of each further token, and of each expert beside its bytes
#: (together 1.19: the kernels of one expert, 2.9 MB, read at half of what a copy moves). All runs within 15 %.
HOT, HOT_TOKEN, HOT_EXPERT = 16.2, 5.2, 0.55
#: µs until the pool has begun and the device knows that it has ended. Fitted together with the next three; moe-stream.cpp
#: counts 12, publish takes 5.5 (docs/results/2026-11-30-h200/clocks.txt), waking and the activations' way are the rest.
REQUEST = 30.0
#: Share of what all threads read that the pool reads of weights: it leaves a core or two idle (docs/performance.md), its
#: kernels reach 90 % (docs/kernels.md), and expert after expert is no long stream. The run with a fixed placement and no
#: link traffic, 13 cold experts a layer, gives 0.7 by itself.
POOL_SHARE = 0.7
#: Of the pool's time for a further token of the same expert, of that for the first (AGAIN in moe-stream.cpp).
AGAIN = 0.08
#: The pool takes so much longer while experts cross the link: 106 GB/s become 85, 134 become 113 (link-and-memory.txt).
BESIDE = 1.2
#: Share of the link's rate that is left for streaming: kernels reach 42 to 47 of 48 to 51 GB/s, and uploads travel too.
LINK_SHARE = 0.85
#: Experts that a layer may stream (native.Experts.set_streaming as Residency calls it).
STREAMS = 8
#: µs that a whole layer saves: no publish, no join. 3.9 ms a token where all are, 4.5 expected of as many hits in slots.
JOIN = 12.0
#: µs of a step outside its layers: output, logits to the host, sampling, policy. 1.1 ms in runs of one token and 32
#: tokens of text, 1.9 and 2.6 with 3 and 4.6; 1.2 with three in those of 96 tokens, where fewer graphs are new.
STEP, STEP_TOKEN = 1150.0, 350.0


def in_stream(
    name: str, expert_bytes: int, *, cpu_read: float, link: float, device_read: float, streams: int = STREAMS
) -> Hardware:
    """Of a machine whose rates (bytes a second, as a profile has them) are known. link 0: nothing is streamed."""
    first = 1e6 * expert_bytes / (POOL_SHARE * cpu_read)
    return Hardware(
        name=name,
        expert_bytes=expert_bytes,
        link_bytes=LINK_SHARE * link if link else float("inf"),
        between=REST,
        between_token=REST_TOKEN,
        launch=0.0,
        launch_token=0.0,
        cpu_expert=(1 - AGAIN) * first,
        cpu_pair=AGAIN * first,
        device=HOT,
        device_pair=0.0,
        device_token=HOT_TOKEN,
        device_expert=HOT_EXPERT + 1e6 * expert_bytes / device_read,
        request=REQUEST,
        streams=streams if link else 0,
        beside=BESIDE,
        join=JOIN,
        step=STEP,
        step_token=STEP_TOKEN,
    )


def portable(name: str, expert_bytes: int, *, cpu_read: float, link: float, device_read: float) -> Hardware:
    """The same of the portable execution: PORTABLE, whose CPU read 100 GB/s and whose device 4 TB/s, scaled by bytes. It
    counts what is outside layers as a part of its 48."""
    first = 1e6 * expert_bytes / cpu_read
    read = 1e6 * PORTABLE.expert_bytes / 4e12
    return Hardware(
        name=name,
        expert_bytes=expert_bytes,
        link_bytes=link or float("inf"),
        between=PORTABLE.between - STEP / 48,
        between_token=PORTABLE.between_token,
        launch=PORTABLE.launch,
        launch_token=PORTABLE.launch_token,
        cpu_expert=first,
        cpu_pair=first * PORTABLE.cpu_pair / PORTABLE.cpu_expert,
        device=PORTABLE.device,
        device_pair=PORTABLE.device_pair - read,
        device_expert=1e6 * expert_bytes / device_read,
        step=STEP,
    )


#: The machine and model of the grid, for the simulator: 16 threads, rates as that run measured them (`bandwidths`), and what
#: 0.82 GB of dense weights take of each layer.
H200 = replace(
    in_stream(
        "H200, 16 cores, Qwen3-30B-A3B Q4_K_M, in-stream",
        2_857_000,
        cpu_read=139e9,
        link=48.4e9,
        device_read=4.46e12,
    ),
    between=REST + 1e6 * 0.82e9 / 4.46e12 / 48,
)
