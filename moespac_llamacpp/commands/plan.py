"""moespac plan: what will live where, before anything is loaded."""

from __future__ import annotations

import os
from dataclasses import asdict
from json import dumps
from typing import Annotated

import typer

from moespac_llamacpp.commands.options import LoadOptions, takes
from moespac_llamacpp.commands.session import settle, told
from moespac_llamacpp.commands.shared import find_device
from moespac_llamacpp.engine import draft_kind, draft_path, plan_of
from moespac_llamacpp.estimate import estimate
from moespac_llamacpp.models import capture_log
from moespac_llamacpp.planner import runs_in_stream
from moespac_llamacpp.profile import known


@takes(LoadOptions)
def plan_command(
    load: LoadOptions,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """What will live where, and how many experts find a place, with the options of generate and chat. Loads nothing."""
    capture_log()
    device = find_device(load.device)
    with told():
        options = settle(load)
        plan = plan_of(options, device)
        drafter = draft_path(options) if draft_kind(options) == "model" else None
    profile = known(f"{device.name} {device.description}", os.environ, options.n_threads)
    in_stream = runs_in_stream(device, options.execution)
    expected = estimate(plan, profile, in_stream=in_stream) if profile else None
    if json:
        typer.echo(dumps(plan.record() | {"expected": asdict(expected) if expected else None}, indent=1))
        return
    drafted = f" with {drafter.name}" if drafter else ""
    typer.echo(f"{options.model.name}{drafted}, context of {plan.target.n_ctx} tokens")
    typer.echo(plan.describe())
    if expected:
        typer.echo(f"expected: {expected.describe()}, by this machine's profile")
    else:
        typer.echo("expected: run `moespac doctor` once to have it measured")
