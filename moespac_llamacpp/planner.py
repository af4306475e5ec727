"""Makes the memory plan of a pair of files before anything large is loaded: well under a second."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from moespac_llamacpp import native
from moespac_llamacpp.draft import check_vocabulary
from moespac_llamacpp.estimate import pace_of
from moespac_llamacpp.footprint import Meter
from moespac_llamacpp.machine import host_memory
from moespac_llamacpp.plan import RESERVE, Footprint, Place, Plan, PlanError, Wishes, make
from moespac_llamacpp.profile import Profile

#: A context that nobody asked for is halved, down to this, until it and all else but slots take no more than this of the device.
LEAST_CONTEXT, MOST_WITHOUT_EXPERTS = 4096, 1 / 3
#: Where slots get what is left, what prompts gather on the device takes at most about this part of what slots take: where there
#: are few, each counts, and prompts have to do with less memory, at some cost of their time (docs/performance.md).
PROMPTS = 1 / 8


@dataclass(frozen=True)
class Pair:
    """What is to be loaded, and how. n_ctx: 0 for as long as trained, less where that would take the slots' room.

    draft_max: 0 if nobody drafts. overrides: as models.Model takes them; execution and context: as `execution` and `params` of
    models.Context; all these, and the batches, are the target's. The draft has llama.cpp's defaults."""

    target: Path
    draft: Path | None = None
    draft_gpu_layers: int = -1
    n_ctx: int = 0
    draft_max: int = 8
    gpu_layers: int = -1
    n_batch: int = 2048
    n_ubatch: int = 512
    overrides: Sequence[tuple[str, int]] = ()
    execution: str = "auto"
    context: Mapping[str, Any] = field(default_factory=dict)


def place_of(device: native.Device) -> Place:
    gpu = device.kind in ("gpu", "igpu")
    host_free, host_total = host_memory()
    free, total = device.memory if gpu or not host_total else (host_free, host_total)
    return Place(
        name=device.name,
        description=device.description,
        free=free,
        total=total,
        gpu=gpu,
        pinned=device.host_buffer_type is not None,
        host_free=host_free,
        host_total=host_total,
    )


def plan_pair(
    pair: Pair,
    device: native.Device,
    wishes: Wishes | None = None,
    place: Place | None = None,
    profile: Profile | None = None,
) -> Plan:
    """place: what is free, if not what the machine says now. profile: the machine's rates, to choose layers that are whole.

    LoadError, DraftError: a file cannot be loaded, the target is dense, the vocabularies differ. PlanError: it does not fit."""
    wishes = wishes or Wishes()
    wishes.check()
    place = place or place_of(device)
    with closing(_target(pair, device)) as target:
        if pair.draft is None:
            return _plan(pair, target, None, place, wishes, profile)
        with closing(Meter(pair.draft, device, n_gpu_layers=pair.draft_gpu_layers)) as draft:
            check_vocabulary(target.model, draft.model)
            return _plan(pair, target, draft, place, wishes, profile)


def runs_in_stream(device: native.Device, execution: str) -> bool:
    """Is that the execution of layers that can have it?"""
    return device.in_stream and execution != "portable"


def _target(pair: Pair, device: native.Device) -> Meter:
    meter = Meter(pair.target, device, n_gpu_layers=pair.gpu_layers, overrides=pair.overrides)
    meter.options = {"n_batch": pair.n_batch, "n_ubatch": pair.n_ubatch, "params": dict(pair.context)}
    meter.options["execution"] = pair.execution
    if pair.draft_max and meter.model.is_recurrent:
        meter.options["params"].setdefault("n_rs_seq", pair.draft_max)  # snapshots, to take rejected drafts back
    return meter


def _plan(
    pair: Pair, target: Meter, draft: Meter | None, place: Place, wishes: Wishes, profile: Profile | None
) -> Plan:
    trained = target.model.n_ctx_train
    n_ctx = pair.n_ctx or _context(target, draft, place, wishes)
    found, blocks = target.target(n_ctx, pair.draft_max)
    in_stream = runs_in_stream(target.device, pair.execution)
    pace = pace_of(blocks, profile, in_stream=in_stream) if profile and place.gpu else None
    other = _draft_context(draft, n_ctx)
    share = 0
    try:
        plan = make(place, found, blocks, other, wishes, pace)
        slots_get_the_rest = wishes.share is None and wishes.expert_bytes is None
        if slots_get_the_rest and plan.target.prompts > PROMPTS * plan.slot_bytes:
            share = _prompt_share(plan)
    except PlanError:
        if not found.prompts:
            raise
        share = native.MAX_PROMPT_SHARE
    if share:
        target.options["prompt_share"] = share
        found, blocks = target.target(n_ctx, pair.draft_max)
        plan = replace(make(place, found, blocks, other, wishes, pace), prompt_share=share)
    if pair.n_ctx and found.n_ctx != pair.n_ctx:
        note = f"the context has {found.n_ctx} tokens, not the {pair.n_ctx} that were asked for: llama.cpp rounds it up"
        plan = replace(plan, notes=[*plan.notes, note])
    if not pair.n_ctx and n_ctx < trained:
        note = f"the context is {n_ctx} of the {trained} tokens that it was trained for, to leave room for experts (-c chooses)"
        plan = replace(plan, notes=[*plan.notes, note])
    return plan


def _prompt_share(plan: Plan) -> int:
    """What leaves about as much for prompts as PROMPTS says, out of what they and the slots have together."""
    layer = max(block.n_expert * block.expert_bytes for block in plan.blocks if block.hybrid)
    wanted = PROMPTS / (1 + PROMPTS) * (plan.slot_bytes + plan.target.prompts)
    return min(native.MAX_PROMPT_SHARE, max(1, math.ceil(layer / wanted)))


def _context(target: Meter, draft: Meter | None, place: Place, wishes: Wishes) -> int:
    """How long a context is that nobody asked for."""
    n_ctx = target.model.n_ctx_train
    room = max(0, place.free - RESERVE) if wishes.vram is None else wishes.vram
    while n_ctx // 2 >= LEAST_CONTEXT:
        taken = _without_experts(place, target.context(n_ctx), _draft_context(draft, n_ctx))
        if taken <= MOST_WITHOUT_EXPERTS * room:
            break
        n_ctx //= 2
    return n_ctx


def _draft_context(draft: Meter | None, n_ctx: int) -> Footprint | None:
    """The draft with the target's context, or as long as it was trained for."""
    return draft.draft(min(n_ctx, draft.model.n_ctx_train or n_ctx)) if draft else None


def _without_experts(place: Place, target: Footprint, draft: Footprint | None) -> int:
    if place.gpu:
        return target.device + (draft.device if draft else 0)
    return target.host_kv + target.host_compute + (draft.host_kv + draft.host_compute if draft else 0)
