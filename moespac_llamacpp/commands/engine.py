"""The options of the placement engine that every generating command has, and what they make."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Annotated

import typer

from moespac_llamacpp import hotset
from moespac_llamacpp.commands.shared import reason
from moespac_llamacpp.machine import cache_folder
from moespac_llamacpp.models import Context
from moespac_llamacpp.policies import make
from moespac_llamacpp.residency import Residency

NoFrequencyOption = Annotated[
    bool, typer.Option("--no-frequency", help="Ablation: experts count as used or not, not how often.")
]
NoBalancerOption = Annotated[
    bool, typer.Option("--no-balancer", help="Ablation: no threshold, whatever the slots hold moves.")
]
SyncMovesOption = Annotated[bool, typer.Option("--sync-moves", help="Ablation: each step waits for its uploads.")]
NoHotSetOption = Annotated[
    bool, typer.Option("--no-hot-set", help="Do not start with the experts that the last run left, nor leave any.")
]

Progress = Callable[[str], AbstractContextManager[Callable[[float], None]]]


@dataclass(frozen=True)
class EngineOptions:
    """hot_set: start with what the last run of this model left, and leave it for the next one. The rest: see policies.make and
    Residency."""

    policy: str = "moe-spac"
    frequency: bool = True
    balancer: bool = True
    sync_moves: bool = False
    hot_set: bool = True


@contextmanager
def open_residency(context: Context, options: EngineOptions, progress: Progress) -> Iterator[Residency]:
    """Slots filled and a policy at work, for a context whose slots are set; at a good end the hot set is left.

    ValueError: an option that does not fit the policy."""
    experts = context.experts
    assert experts is not None
    policy = make(
        options.policy, experts.n_rows, experts.n_expert, frequency=options.frequency, balanced=options.balancer
    )
    residency = Residency(experts, policy, sync_moves=options.sync_moves)
    try:
        keep = options.hot_set and bool(residency.n_slots.any())
        hot = _last_run(context) if keep else None
        with progress("uploading experts") as report:
            residency.fill(hot, report)
        try:
            yield residency
        except KeyboardInterrupt:  # a good end too
            if keep:
                _leave(context, residency)
            raise
        if keep:
            _leave(context, residency)
    finally:
        residency.close()


def _last_run(context: Context) -> hotset.HotSet | None:
    experts = context.experts
    assert experts is not None
    try:
        return hotset.load(
            hotset.path_for(cache_folder(os.environ), context.model.path), experts.n_rows, experts.n_expert
        )
    except FileNotFoundError:  # no home folder; said when the run ends
        return None
    except (hotset.HotSetError, OSError) as error:
        typer.echo(f"moespac: {reason(error) if isinstance(error, OSError) else error}", err=True)
        return None


def _leave(context: Context, residency: Residency) -> None:
    try:
        hotset.save(hotset.path_for(cache_folder(os.environ), context.model.path), residency.hot_set())
    except OSError as error:
        typer.echo(f"moespac: the hot set was not kept for the next run: {reason(error)}", err=True)
