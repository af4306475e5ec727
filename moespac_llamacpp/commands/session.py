"""What generating commands share: a decoder opened from the options, the text as it comes, a summary."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import typer

from moespac_llamacpp import native
from moespac_llamacpp.commands.models import Resolved, pull, resolve
from moespac_llamacpp.commands.options import DraftKind, LoadOptions, SamplingOptions
from moespac_llamacpp.commands.shared import fail, find_device, progress
from moespac_llamacpp.decoder import Decoder
from moespac_llamacpp.engine import Options, open_decoder
from moespac_llamacpp.models import capture_log


def settle(load: LoadOptions) -> Options:
    """The options with the files that a model's name stands for. typer.Exit after a sentence: they are not there."""
    given = Resolved(from_hub(load.hf_repo)) if load.hf_repo else resolve(load.model)
    if load.hf_repo_draft:
        load = replace(load, draft_model=from_hub(load.hf_repo_draft))
    draft = load.draft
    if draft is None and given.named and not (load.draft_model or given.draft):
        draft = DraftKind.ngram
    return Options(
        model=given.target,
        draft_model=load.draft_model or given.draft,
        draft=draft.value if draft else None,
        draft_max=load.draft_max,
        draft_fixed=load.draft_fixed,
        n_ctx=load.ctx,
        n_batch=load.batch,
        n_ubatch=load.ubatch,
        n_threads=load.threads,
        n_threads_batch=load.threads_batch,
        n_gpu_layers=load.gpu_layers,
        n_gpu_layers_draft=load.draft_gpu_layers,
        device=load.device,
        execution=load.execution.value,
        cache_share=load.cache_share,
        expert_budget=load.expert_budget,
        vram=load.vram,
        policy=load.policy,
        frequency=not load.no_frequency,
        balancer=not load.no_balancer,
        sync_moves=load.sync_moves,
        stream_experts=load.stream_experts,
        look_ahead=load.look_ahead,
        hot_set=not load.no_hot_set,
        flash_attn=load.flash_attn.value if load.flash_attn else None,
        cache_type_k=load.cache_type_k,
        cache_type_v=load.cache_type_v,
        override_tensor=tuple(load.override_tensor or ()),
        context_shift=load.context_shift,
        n_keep=load.keep,
        telemetry=load.telemetry,
    )


def from_hub(name: str) -> Path:
    """The local path of what -hf names. typer.Exit after a sentence: it cannot be had."""
    from moespac_llamacpp.fetch import FetchError, local
    from moespac_llamacpp.hubname import find

    try:
        file = find(name)
    except (FetchError, ValueError) as error:
        raise fail(error) from error
    return local(file) or pull(file)


@contextmanager
def told() -> Iterator[None]:
    """Ends the command with a sentence where something fails that the user can understand."""
    try:
        yield
    except (typer.Exit, BrokenPipeError):  # told already; nobody reads on, and typer ends without a word
        raise
    except (ValueError, RuntimeError, OSError) as error:  # LoadError, MoeError and all the others among them
        raise fail(error) from error


@contextmanager
def session(load: LoadOptions, sampling: SamplingOptions | None = None) -> Iterator[Decoder]:
    """A decoder for the command. Failures, also those of the command, end it with a sentence."""
    capture_log()
    device = find_device(load.device)
    late: list[str] = []
    with told(), ExitStack() as stack:
        options = settle(load)
        if sampling:
            options = replace(options, sampling=sampling.sampling(), grammar=sampling.gbnf())
        stack.callback(lambda: tell(late))
        decoder, notices = open_decoder(options, device, stack, progress)
        tell(notices)
        notices.clear()
        late = notices  # what closing has to say
        decoder.on_prompt = PromptLine().show
        yield decoder


def tell(notices: Sequence[str]) -> None:
    for notice in notices:
        typer.echo(f"moespac: {notice}", err=True)


class PromptLine:
    """How far a prompt of several pieces is: a line on stderr, only where somebody can see it."""

    def __init__(self) -> None:
        self._shown = False

    def show(self, done: int, total: int) -> None:
        if 0 < done < total and sys.stderr.isatty():
            self._shown = True
            typer.echo(f"\rreading the prompt {100 * done // total:3d} %", err=True, nl=False)
        elif done == total:
            self.clear()

    def clear(self) -> None:
        if self._shown:
            self._shown = False
            typer.echo("\r" + " " * 24 + "\r", err=True, nl=False)


def stream(decoder: Decoder, prompt: list[int], max_tokens: int, stop: Sequence[str] = ()) -> None:
    """Prints the text as it comes; bytes, since a character may span tokens."""
    for text in decoder.stream(prompt, max_tokens, stop=stop):
        sys.stdout.buffer.write(text)
        sys.stdout.buffer.flush()
    typer.echo()
    tell(decoder.report.notices)


def resident_map(decoder: Decoder) -> str:
    """One line per layer, one character per expert: # resident, . cold."""
    assert decoder.residency is not None
    experts = decoder.residency.experts
    lines = []
    for row in experts.rows():
        if row.hybrid:
            marks = "".join("#" if s == native.RESIDENT else "." for s in experts.states(row.row))
            lines.append(f"  layer {row.il:3d}  {marks}")
    return "\n".join(lines)


def summary(decoder: Decoder) -> str:
    assert decoder.residency is not None
    report, perf = decoder.report, decoder.residency.experts.perf_total()
    drafted = f"{report.n_accepted} of {report.n_drafted} drafted tokens accepted ({100 * report.acceptance:.0f} %); "
    return (
        f"{report.n_generated} tokens at {report.tps:.1f} TPS, "
        f"prompt of {report.n_prompt} in {1000 * report.prompt_seconds:.0f} ms; "
        f"{drafted if decoder.length.draft_max else ''}"
        f"hit rate {100 * perf.hit_rate:.1f} % of {perf.n_hot_pairs + perf.n_cold_pairs} pairs; "
        f"{perf.n_loads} uploads, {perf.n_load_bytes / 2**20:.1f} MiB"
        + (f", {perf.n_streamed_experts} experts streamed" if perf.n_streamed_experts else "")
        + (f", {perf.n_ahead_experts} ahead of their layer" if perf.n_ahead_experts else "")
    )
