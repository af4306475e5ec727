"""Makes the memory plan of a pair of files before anything large is loaded: well under a second."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from moespac_llamacpp import native
from moespac_llamacpp.draft import check_vocabulary
from moespac_llamacpp.footprint import Meter
from moespac_llamacpp.machine import host_memory
from moespac_llamacpp.plan import RESERVE, Footprint, Place, Plan, Wishes, make

#: A context that nobody asked for is halved down to this, until it and all else but slots take half of the device.
LEAST_CONTEXT = 4096


@dataclass(frozen=True)
class Pair:
    """What is to be loaded. n_ctx: 0 for as long as trained, less where that would take the slots' room."""

    target: Path
    draft: Path | None = None
    draft_gpu_layers: int = -1
    n_ctx: int = 0
    draft_max: int = 8


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


def plan_pair(pair: Pair, device: native.Device, wishes: Wishes | None = None, place: Place | None = None) -> Plan:
    """place: what is free, if not what the machine says now.

    LoadError, DraftError: a file cannot be loaded, the target is dense, the vocabularies differ. PlanError: it does not fit."""
    wishes = wishes or Wishes()
    wishes.check()
    place = place or place_of(device)
    with closing(Meter(pair.target, device)) as target:
        if pair.draft is None:
            return _plan(pair, target, None, place, wishes)
        with closing(Meter(pair.draft, device, n_gpu_layers=pair.draft_gpu_layers)) as draft:
            check_vocabulary(target.model, draft.model)
            return _plan(pair, target, draft, place, wishes)


def _plan(pair: Pair, target: Meter, draft: Meter | None, place: Place, wishes: Wishes) -> Plan:
    n_ctx = pair.n_ctx or target.model.n_ctx_train
    room = wishes.vram or max(0, place.free - RESERVE)
    while True:
        found, blocks = target.target(n_ctx, pair.draft_max if draft else 0)
        other = draft.context(min(n_ctx, draft.model.n_ctx_train or n_ctx)) if draft else None
        if pair.n_ctx or n_ctx // 2 < LEAST_CONTEXT or 2 * _without_experts(place, found, other) <= room:
            break
        n_ctx //= 2
    plan = make(place, found, blocks, other, wishes)
    if n_ctx < (pair.n_ctx or target.model.n_ctx_train):
        trained = target.model.n_ctx_train
        note = f"the context is {n_ctx} of the {trained} tokens that it was trained for, to leave room for experts (-c chooses)"
        plan = replace(plan, notes=[*plan.notes, note])
    return plan


def _without_experts(place: Place, target: Footprint, draft: Footprint | None) -> int:
    if place.gpu:
        return target.device + (draft.device if draft else 0)
    return target.host_kv + target.host_compute + (draft.host_kv + draft.host_compute if draft else 0)
