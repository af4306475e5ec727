"""The command line. The only place that talks to the terminal, with commands/."""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from moespac_llamacpp import native
from moespac_llamacpp.commands.bench import bench
from moespac_llamacpp.commands.chat import chat_command
from moespac_llamacpp.commands.doctor import doctor_command
from moespac_llamacpp.commands.generate import generate_command
from moespac_llamacpp.commands.models import models_command, pull_command
from moespac_llamacpp.commands.options import DraftKind, LoadOptions, ModelOption
from moespac_llamacpp.commands.plan import plan_command
from moespac_llamacpp.commands.plot import inspect_command, plot_command
from moespac_llamacpp.commands.serve import serve_command
from moespac_llamacpp.commands.session import resident_map, session, stream, summary
from moespac_llamacpp.commands.shared import fail, find_device, tell_abort
from moespac_llamacpp.commands.synth import synth_command
from moespac_llamacpp.engine import TINY_MODEL
from moespac_llamacpp.routing import Recorder

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,  # its tables cut long words off in 80 columns
    pretty_exceptions_enable=False,
    help="Runs Mixture-of-Experts models whose experts do not fit in VRAM. `moespac COMMAND --help` says more.",
)


def tell_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"moespac_llamacpp {version('moespac-llamacpp')}, llama-cpp-python {version('llama-cpp-python')}")
        raise typer.Exit


@app.callback()
def every_command(
    version: Annotated[
        bool, typer.Option("--version", callback=tell_version, is_eager=True, help="Show the versions and exit.")
    ] = False,
) -> None:
    pass


DEMO_PROMPTS = (
    ("chat", 'What does "heron" mean?'),
    ("text", "It is a truth universally acknowledged, that a"),
    ("text", "def read_config(path):\n"),
)

TokensOption = Annotated[int, typer.Option("--max-tokens", "-n", min=1, help="Tokens to generate at most.")]
ThreadsOption = Annotated[int | None, typer.Option("--threads", "-t", min=1, help="CPU threads (default: all cores).")]


@app.command(short_help="See the bundled tiny model at work.")
def demo(
    max_tokens: TokensOption = 60,
    cache_share: Annotated[
        float, typer.Option("--cache-share", help="Share of each layer's experts with a slot, 0 to 1.")
    ] = 0.25,
    threads: ThreadsOption = None,
    device: Annotated[str | None, typer.Option("--device", help="Name of the device for slots (see doctor).")] = None,
) -> None:
    """Generate with the bundled tiny MoE, part of its experts resident on a device and the rest on the CPU."""
    load = LoadOptions(threads=threads, device=device, cache_share=cache_share, no_hot_set=True)
    with session(load) as decoder:
        assert decoder.residency is not None
        experts = decoder.residency.experts
        where = find_device(device)
        typer.echo(f"{decoder.context.model.describe()}: {decoder.context.model.path.name}")
        typer.echo(
            f"slots on {where.name} ({where.description}): {sum(r.n_slots for r in experts.rows())} of "
            f"{sum(r.n_expert for r in experts.rows())} experts; cold kernels {experts.rows()[0].kernel}; "
            f"{decoder.context.n_threads} threads"
        )
        for kind, text in DEMO_PROMPTS:
            model = decoder.context.model
            experts.reset_perf()
            typer.echo(f"\n--- {text.strip()}")
            stream(decoder, model.tokenize(model.chat_prompt(text) if kind == "chat" else text), max_tokens)
            typer.echo(f"--- {summary(decoder)}; resident now (# of each layer's experts):")
            typer.echo(resident_map(decoder))


@app.command(short_help="Record which experts the routers choose.")
def trace(
    out: Annotated[Path, typer.Argument(help="The .npz file to write.")],
    prompt: Annotated[str, typer.Argument(help="The text to continue.")],
    model: ModelOption = TINY_MODEL,
    max_tokens: TokensOption = 128,
    ctx: Annotated[int, typer.Option("--ctx", "-c", min=0, help="Context length in tokens, 0: as trained.")] = 0,
    threads: ThreadsOption = None,
) -> None:
    """Record which experts the routers choose while a prompt is continued."""
    if out.is_dir():
        raise fail(f"{out}: a folder: name the file to write")
    if not out.parent.is_dir():
        raise fail(f"{out.parent}: there is no such folder")
    load = LoadOptions(model, ctx=ctx, threads=threads, cache_share=0.0, policy="static", draft=DraftKind.none)
    with session(load) as decoder:
        assert decoder.context.experts is not None
        decoder.all_logits = True
        recorder = Recorder(decoder.context.experts)
        tokens = decoder.context.model.tokenize(prompt)
        n_past = decoder.context.n_past
        for _ in decoder.generate(tokens, max_tokens):
            # what was decoded since the last token came: the prompt, or the token before
            new = (tokens + decoder.report.tokens)[n_past : decoder.context.n_past]
            recorder.decoded(new, is_decode=n_past > 0)
            n_past = decoder.context.n_past
        rest = (tokens + decoder.report.tokens)[n_past : decoder.context.n_past]
        recorder.decoded(rest, is_decode=True)
        result = recorder.trace()
        recorder.close()
    try:
        result.save(out)
    except OSError as error:
        raise fail(f"{out}: {error.strerror}") from error
    typer.echo(f"{out}: {len(result.token)} tokens, {len(result.rows)} layers, {result.n_expert} experts")


@app.command(
    short_help="Replay such a recording through the policies.",
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def simulate(context: typer.Context) -> None:
    """Replay a routing trace through the policies: hits, moves, predicted time (`moespac simulate --help`)."""
    from moespac_llamacpp.simulate import main as run

    raise typer.Exit(run(context.args))


app.command("generate", short_help="Continue a prompt.")(generate_command)
app.command("chat", short_help="Talk with a model.")(chat_command)
app.command("serve", short_help="Answer OpenAI's clients over HTTP.")(serve_command)
app.command("models", short_help="The models that have a name.")(models_command)
app.command("pull", short_help="Fetch a model and its draft.")(pull_command)
app.command("plan", short_help="What will live where; loads nothing.")(plan_command)
app.command("doctor", short_help="Is everything right? Measures the machine, too.")(doctor_command)
app.command("inspect", short_help="What a GGUF file holds.")(inspect_command)
app.command("plot", short_help="Draw a session that --telemetry recorded.")(plot_command)
app.command("synth", short_help="Write a planted pair of models, to time with.")(synth_command)
app.add_typer(bench, name="bench")


def main() -> None:
    mend_streams()
    native.on_abort(tell_abort)
    try:
        app()
    except OSError as error:  # where no command expected it: above all an output that cannot be written
        fail(error)
        os._exit(1)  # what is still in a buffer would fail again


def mend_streams() -> None:
    """A stream that the caller closed leads nowhere; characters that a terminal's encoding lacks are replaced, not fatal."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 (as long as the process)
        elif name != "stderr":
            stream.reconfigure(errors="replace")


if __name__ == "__main__":
    main()
