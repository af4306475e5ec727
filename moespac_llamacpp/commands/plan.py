"""moespac plan: what will live where, before anything is loaded."""

from __future__ import annotations

import os
from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import Annotated

import typer

from moespac_llamacpp import native
from moespac_llamacpp.commands.models import resolve
from moespac_llamacpp.commands.shared import fail, find_device
from moespac_llamacpp.estimate import estimate
from moespac_llamacpp.machine import cache_folder
from moespac_llamacpp.memory import parse_bytes
from moespac_llamacpp.models import LoadError, capture_log
from moespac_llamacpp.plan import Wishes
from moespac_llamacpp.planner import Pair, plan_pair
from moespac_llamacpp.profile import load


def plan_command(
    model: Annotated[Path, typer.Option("--model", "-m", help="GGUF file or name (see models) of the target.")],
    draft_model: Annotated[Path | None, typer.Option("--draft-model", "-md", help="GGUF file of the draft.")] = None,
    ctx: Annotated[int, typer.Option("--ctx", "-c", min=0, help="Context length in tokens, 0: as trained.")] = 0,
    vram: Annotated[str | None, typer.Option("--vram", help="VRAM for everything, such as 8G.")] = None,
    expert_budget: Annotated[str | None, typer.Option("--expert-budget", help="VRAM for experts.")] = None,
    cache_share: Annotated[
        float | None, typer.Option("--cache-share", help="Share of the experts with a slot.")
    ] = None,
    draft_max: Annotated[int, typer.Option("--draft-max", min=0, max=31, help="Tokens to draft a step at most.")] = 8,
    draft_gpu_layers: Annotated[
        int, typer.Option("--gpu-layers-draft", "-ngld", help="Layers of the draft on the GPU, -1: all.")
    ] = -1,
    device: Annotated[str | None, typer.Option("--device", help="Name of the device for slots (see doctor).")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """What will live where, and how many experts find a place. Loads nothing; takes under a second."""
    capture_log()
    where = find_device(device)
    given = resolve(model)
    model, draft_model = given.target, draft_model or given.draft
    try:
        total, experts = (None if text is None else parse_bytes(text) for text in (vram, expert_budget))
        wishes = Wishes(total, experts, cache_share)
        plan = plan_pair(Pair(model, draft_model, draft_gpu_layers, ctx, draft_max), where, wishes)
    except (LoadError, native.MoeError, ValueError) as error:
        raise fail(error) from error
    profile = load(cache_folder(os.environ), f"{where.name} {where.description}")
    expected = estimate(plan, profile) if profile else None
    if json:
        typer.echo(dumps(plan.record() | {"expected": asdict(expected) if expected else None}, indent=1))
        return
    drafted = f" with {draft_model.name}" if draft_model else ""
    typer.echo(f"{model.name}{drafted}, context of {plan.target.n_ctx} tokens")
    typer.echo(plan.describe())
    told = (
        f"{expected.describe()}, by this machine's profile"
        if expected
        else "run `moespac doctor` once to have it measured"
    )
    typer.echo(f"expected: {told}")
