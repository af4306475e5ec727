"""A chat may go on for hours: neither host nor device memory grows with the steps.

MOESPAC_TEST_DEVICE=CUDA0 measures it on a GPU, by the device's own reading too."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest

from moespac_llamacpp.chat import Chat
from moespac_llamacpp.commands.options import LoadOptions
from moespac_llamacpp.commands.session import session
from pair import DRAFT, TARGET
from parity import test_device

#: Longer than 32 tokens, so that no question makes a graph of its own width.
QUESTION = (
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of a wife. "
    * 2
)
WIDTHS = range(1, 6)
MIB = 1 << 20


def host_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class _Mallinfo(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks "
                     "keepcost".split())  # fmt: skip


def in_use() -> float:
    """MiB that the C library's malloc has given away; 0 where it does not tell (glibc before 2.33). It tells what was
    allocated from what was touched for the first time: the policy's memory is allocated at once and filled by and by."""
    tell = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if tell is None:
        return 0.0
    tell.restype = _Mallinfo
    info = tell()
    return float(info.uordblks + info.hblkhd) / MIB


def grown(n_steps: int) -> tuple[float, int, int]:
    """(MiB of host memory, bytes on the device, steps). Host: from a third of the steps on; device: from the start.

    What the policy remembers is allocated in the first steps, and slots may move between layers within the first budget. With
    -s a line for each tenth of the steps shows whether it levels off."""
    device = test_device()
    load = LoadOptions(TARGET, ctx=512, threads=1, device=device.name, cache_share=0.25, draft_model=DRAFT, draft_max=4)
    steps = turn = tenths = before = free = 0
    with session(load) as decoder:
        experts = decoder.context.experts
        assert experts is not None and decoder.residency is not None
        for width in WIDTHS:  # each has a graph that is kept
            decoder.context.decode([5] * width)
        on_device = experts.device_bytes()
        chat = Chat(decoder)
        while steps < n_steps:
            for _ in chat.say(f"{turn}: {QUESTION}", 120):
                pass
            turn += 1
            steps += chat.decoder.report.n_steps
            if chat.decoder.context.n_past > 300:
                chat.clear()
            if not before and steps > n_steps // 3:
                before, free = host_bytes(), device.memory[0]
            if steps * 10 // n_steps > tenths:
                tenths = steps * 10 // n_steps
                print(
                    f"\n{steps:6} steps: {host_bytes() / MIB:.2f} MiB resident, {in_use():.2f} allocated,"
                    f" {experts.device_bytes() / MIB:.2f} on the device, {decoder.residency.n_resplits} splits",
                    end="",
                )
        taken = experts.device_bytes() - on_device
        if device.kind == "gpu":  # graphs and pools of the backend as well
            taken = max(taken, free - device.memory[0])
        print(
            f"\n{steps} steps on {device.name}: {(host_bytes() - before) / MIB:.2f} MiB of host memory, {taken} bytes there",
            end="",
        )
        return (host_bytes() - before) / MIB, taken, steps


def test_memory_does_not_grow_in_a_long_chat() -> None:
    """Short: a leak of two kilobytes a step would show."""
    host, device, steps = grown(2400)
    assert host < 2.5 and device <= 0, (host, device, steps)


@pytest.mark.full
def test_memory_does_not_grow_in_ten_thousand_steps() -> None:
    host, device, steps = grown(10_000)
    assert host < 3 and device <= 0, (host, device, steps)
