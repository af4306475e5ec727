"""The memory plan: what will live where, how many slots that leaves, and what to tell somebody whose models do not fit.

Integer arithmetic on sizes that footprint.py found; no llama.cpp. Who makes a plan has the device's free memory as it is now.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from moespac_llamacpp.memory import BlockSize, Pace, slots_for_bytes, slots_for_share, slots_for_time

#: Left free on a GPU unless --vram says otherwise: CUDA's own pools for prompts, graphs, and whoever draws the desktop.
RESERVE = 1 << 30
#: Share of the experts in slots where the "device" is the CPU: slots bring nothing there, but everything can be tried.
CPU_SHARE = 0.25


@dataclass(frozen=True)
class Footprint:
    """Bytes of one model with one context. Without a GPU all of it is host memory."""

    n_ctx: int
    n_ctx_train: int
    weights: int = 0  # on the device
    kv: int = 0
    compute: int = 0
    host_weights: int = 0  # without routed experts
    host_kv: int = 0
    host_compute: int = 0
    expert_bytes: int = 0  # of all routed experts; host memory
    lane: int = 0  # on the device: inputs and compute buffer of the lane of the resident experts
    prompts: int = 0  # of the lane: what prompts need unless every expert has a slot
    graphs: int = 0  # on the device: compute buffers of the graphs kept per batch width

    @property
    def device(self) -> int:
        """All on the device but slots."""
        return self.weights + self.kv + self.compute + self.lane + self.graphs

    @property
    def host(self) -> int:
        return self.host_weights + self.host_kv + self.host_compute + self.expert_bytes


@dataclass(frozen=True)
class Block(BlockSize):
    """A row of the plan. il: -1 if it is empty; fallback: why it takes llama.cpp's own path."""

    il: int = -1
    n_expert_used: int = 0
    fallback: str = ""


class PlanError(ValueError):
    """It does not fit; the text is the sentence for the user, with the numbers."""


@dataclass(frozen=True)
class Place:
    """Where slots live, and what is free now. Bytes. gpu False: the device is the CPU, its memory is the host's."""

    name: str
    description: str
    free: int
    total: int
    gpu: bool
    pinned: bool  # host memory can be page-locked for it
    host_free: int
    host_total: int


@dataclass(frozen=True)
class Wishes:
    """At most one of vram (all on the device), expert_bytes (slots), share (of the experts). None: what is free but RESERVE."""

    vram: int | None = None
    expert_bytes: int | None = None
    share: float | None = None

    def check(self) -> None:
        given = [n for n, v in (("--vram", self.vram), ("--expert-budget", self.expert_bytes), ("--cache-share", self.share))
                 if v is not None]  # fmt: skip
        if len(given) > 1:
            raise PlanError(f"{' and '.join(given)} say the same thing in two ways: give one of them")


@dataclass(frozen=True)
class Plan:
    """Sizes in bytes. slots: of each row, in the order of blocks; usable: what may be used on the device."""

    place: Place
    usable: int
    target: Footprint
    draft: Footprint | None
    blocks: list[Block]
    slots: list[int]
    notes: list[str]
    prompt_share: int = 0  # see native.Experts

    @property
    def slot_bytes(self) -> int:
        return _bytes(self.slots, self.blocks)

    @property
    def device_bytes(self) -> int:
        """Everything on the device. Where that is the CPU: the slots and their lane."""
        return _fixed(self.target, self.draft) + self.slot_bytes

    @property
    def host_bytes(self) -> int:
        return self.target.host + (self.draft.host if self.draft else 0)

    @property
    def n_slots(self) -> int:
        return sum(self.slots)

    @property
    def n_whole(self) -> int:
        """Layers with a slot for each expert: once they are resident, such a layer is llama.cpp's own."""
        return sum(b.hybrid and n >= b.n_expert for n, b in zip(self.slots, self.blocks, strict=True))

    @property
    def n_experts(self) -> int:
        return sum(block.n_expert for block in self.blocks)

    @property
    def share(self) -> float:
        """Of all experts, 0 … 1."""
        return self.n_slots / max(1, self.n_experts)

    def record(self) -> dict[str, Any]:
        """For JSON."""
        sums = {
            name: getattr(self, name)
            for name in ("slot_bytes", "device_bytes", "host_bytes", "n_slots", "n_experts", "n_whole")
        }
        return asdict(self) | sums | {"share": round(self.share, 4)}

    def describe(self) -> str:
        """Lines for the terminal."""
        place, target, draft = self.place, self.target, self.draft
        lines = [f"on {place.name} ({place.description}): {size(place.free)} of {size(place.total)} free, "
                 f"{size(self.usable)} to be used"]  # fmt: skip
        lines += _device_lines(target, draft)
        lines.append(f"  {'expert slots':34s} {size(self.slot_bytes):>10s}  {self._slots_text()}")
        lines.append(
            f"  {'together':34s} {size(self.device_bytes):>10s}  {size(self.usable - self.device_bytes)} unused"
        )
        locked = "page-locked" if place.pinned else "not page-locked" if place.gpu else "mapped from the file"
        host = target.host - target.expert_bytes
        lines.append(f"in host memory ({size(place.host_free)} of {size(place.host_total)} available):")
        lines.append(f"  {'all experts':34s} {size(target.expert_bytes):>10s}  {locked}")
        lines.append(f"  {'other weights, buffers':34s} {size(host):>10s}")
        if draft and draft.host:
            lines.append(f"  {'draft':34s} {size(draft.host):>10s}")
        return "\n".join(lines + [f"note: {note}" for note in self.notes + self._facts()])

    def _facts(self) -> list[str]:
        """Notes of what cannot be helped, for those who ask for the plan."""
        place, facts = self.place, []
        if not place.gpu:
            facts.append(f"{place.name} is no GPU: slots only copy experts within host memory, and make nothing faster")
        elif not place.pinned:
            facts.append(f"{place.name} has no page-locked host memory: uploads run at a fraction of the link's speed")
        reasons = [block.fallback for block in self.blocks if block.fallback]
        return facts + [f"{reasons.count(r)} layers take llama.cpp's own path: {r}" for r in sorted(set(reasons))]

    def _slots_text(self) -> str:
        hybrid = [(n, block) for n, block in zip(self.slots, self.blocks, strict=True) if block.hybrid]
        counts = sorted({n for n, block in hybrid if n < block.n_expert})
        n_others = len(hybrid) - self.n_whole
        each = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}" if counts else "0"
        parts = [f"{self.n_whole} of {len(hybrid)} layers whole"] if self.n_whole else []
        if n_others or not hybrid:
            parts.append(f"{each} in each of {n_others} {'others' if parts else 'layers'}")
        return f"{self.n_slots} of {self.n_experts} experts ({100 * self.share:.0f} %), {', '.join(parts)}"


def size(n: int) -> str:
    """Bytes for people."""
    return f"{n / 2**30:.2f} GiB" if abs(n) >= 2**30 else f"{n / 2**20:.2f} MiB"


def _device_lines(target: Footprint, draft: Footprint | None) -> list[str]:
    rows = [
        ("dense weights", target.weights),
        (f"KV of {target.n_ctx} tokens", target.kv),
        ("compute buffers", target.compute),
        ("lane of the resident experts", target.lane),
        ("graphs per batch width", target.graphs),
    ]
    if draft:
        rows += [
            ("draft: weights", draft.weights),
            (f"draft: KV of {draft.n_ctx} tokens", draft.kv),
            ("draft: compute buffers", draft.compute),
            ("draft: graphs per batch width", draft.graphs),
        ]
    return [f"  {name:34s} {size(n):>10s}" for name, n in rows if n]


def _bytes(slots: Sequence[int], blocks: Sequence[Block]) -> int:
    return sum(n * block.expert_bytes for n, block in zip(slots, blocks, strict=True))


def _fixed(target: Footprint, draft: Footprint | None) -> int:
    return target.device + (draft.device if draft else 0)


def make(
    place: Place,
    target: Footprint,
    blocks: Sequence[Block],
    draft: Footprint | None = None,
    wishes: Wishes | None = None,
    pace: Pace | None = None,
) -> Plan:
    """pace: what is expected of slots, to choose layers that are whole; None: all layers get the same. A wished share is each
    layer's in any case.

    PlanError: the models do not fit, on the device or in host memory; or wishes that contradict each other."""
    wishes = wishes or Wishes()
    wishes.check()
    usable = _usable(place, wishes)
    _check_host(place, target, draft)
    _check_device(place, usable, target, draft)
    every = [block.n_expert if block.hybrid else 0 for block in blocks]
    with_every = replace(target, lane=target.lane - target.prompts, prompts=0)
    room = usable - _fixed(target, draft)
    on_cpu = wishes.vram is None and wishes.expert_bytes is None and not place.gpu
    if wishes.share is not None:
        slots = slots_for_share(blocks, wishes.share)
    elif on_cpu:
        slots = slots_for_share(blocks, CPU_SHARE)
    else:
        n_bytes = room if wishes.expert_bytes is None else wishes.expert_bytes
        if wishes.expert_bytes is None and _bytes(every, blocks) <= usable - _fixed(with_every, draft):
            n_bytes = max(n_bytes, _bytes(every, blocks))
        slots = slots_for_bytes(blocks, n_bytes) if pace is None else slots_for_time(blocks, n_bytes, pace)
    if slots == every:
        target, room = with_every, usable - _fixed(with_every, draft)
    plan = Plan(place, usable, target, draft, list(blocks), slots, _notes(target, blocks, slots, wishes))
    if plan.slot_bytes > room:
        raise PlanError(
            f"{size(plan.slot_bytes)} of expert slots are wished for, but {size(max(0, room))} of {size(usable)} on {place.name} "
            f"are left after {size(_fixed(target, draft))} for all else: give less, or a shorter context (-c)"
        )
    return plan


def _usable(place: Place, wishes: Wishes) -> int:
    if wishes.vram is not None:
        if wishes.vram > place.free:
            raise PlanError(
                f"--vram {size(wishes.vram)} is more than the {size(place.free)} of {size(place.total)} that are free on "
                f"{place.name}: give less, or close what uses it"
            )
        return wishes.vram
    if not place.gpu or wishes.share is not None or wishes.expert_bytes is not None:
        return place.free  # whoever names the slots has thought of the rest
    return max(0, place.free - RESERVE)


def _check_host(place: Place, target: Footprint, draft: Footprint | None) -> None:
    needed = target.host + (draft.host if draft else 0)
    parts = f"experts {size(target.expert_bytes)}"
    if not place.pinned:  # weights are mapped from the file: the kernel can drop and read them again, slowly
        needed -= target.expert_bytes + target.host_weights + (draft.host_weights if draft else 0)
        parts = f"KV of {target.n_ctx} tokens {size(target.host_kv)}, buffers {size(target.host_compute)}"
    if place.host_total and needed > place.host_free:
        raise PlanError(
            f"{size(needed)} of host memory are needed ({parts}), but {size(place.host_free)} of {size(place.host_total)} are "
            "available: close other programs, take a smaller quantisation, or shorten the context (-c)"
        )


def _check_device(place: Place, usable: int, target: Footprint, draft: Footprint | None) -> None:
    parts = f"weights {size(target.weights)}, KV of {target.n_ctx} tokens {size(target.kv)}, buffers " + size(
        target.compute + target.lane + target.graphs
    )
    of = f"{size(usable)} that may be used on {place.name} ({size(place.free)} free)"
    if target.device > usable:
        raise PlanError(
            f"the model needs {size(target.device)} on the device without a single expert ({parts}), more than the {of}: "
            "shorten the context (-c), or give more --vram"
        )
    if draft and _fixed(target, draft) > usable:
        raise PlanError(
            f"the draft needs {size(draft.device)} on the device (weights {size(draft.weights)}, KV of {draft.n_ctx} tokens "
            f"{size(draft.kv)}, buffers {size(draft.compute + draft.graphs)}), but the target leaves "
            f"{size(usable - target.device)} of the {of}: "
            "take a smaller draft, keep it on the CPU (-ngld 0), or shorten the context (-c)"
        )


def _notes(target: Footprint, blocks: Sequence[Block], slots: Sequence[int], wishes: Wishes) -> list[str]:
    notes = []
    hybrid = [i for i, block in enumerate(blocks) if block.hybrid]
    empty = sum(slots[i] == 0 for i in hybrid)
    if 0 in (wishes.share, wishes.expert_bytes):
        pass  # as it was asked for
    elif empty == len(hybrid) and hybrid:
        notes.append("there is no room for expert slots: the CPU computes all experts")
    elif empty:
        notes.append(f"{empty} of {len(hybrid)} layers have no slot: the CPU computes all their experts")
    if target.n_ctx_train and target.n_ctx > max(target.n_ctx_train, 256):
        notes.append(
            f"the context of {target.n_ctx} tokens is longer than the {target.n_ctx_train} that the model was trained for: text "
            "beyond them may be poor"
        )
    return notes
