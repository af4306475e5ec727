"""The command line. The only place that talks to the terminal."""

from __future__ import annotations

import enum
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from json import dumps
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from moespac_llamacpp import __version__, native
from moespac_llamacpp._build import installed_version
from moespac_llamacpp.acceptance import Sampling
from moespac_llamacpp.chat import Chat, ContextFullError
from moespac_llamacpp.commands.engine import (
    EngineOptions,
    NoBalancerOption,
    NoFrequencyOption,
    NoHotSetOption,
    SyncMovesOption,
    open_residency,
)
from moespac_llamacpp.decoder import Decoder
from moespac_llamacpp.draft import Drafter, GgufDraft, NgramDraft, NoDraft
from moespac_llamacpp.inspection import InspectError, inspect
from moespac_llamacpp.memory import parse_bytes, slots_for_bytes, slots_for_share
from moespac_llamacpp.models import Context, LoadError, Model, capture_log
from moespac_llamacpp.policies import NAMES as POLICIES
from moespac_llamacpp.residency import block_sizes
from moespac_llamacpp.routing import Recorder

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)

DATA = Path(__file__).parent / "data"
TINY_MODEL = DATA / "tiny-moe-Q4_K_M.gguf"
TINY_DRAFT = DATA / "tiny-draft-Q8_0.gguf"
DEMO_PROMPTS = (
    ("chat", 'What does "heron" mean?'),
    ("text", "It is a truth universally acknowledged, that a"),
    ("text", "def read_config(path):\n"),
)

ModelOption = Annotated[
    Path, typer.Option("--model", "-m", help="GGUF file of the target model (default: the bundled one).")
]
ShareOption = Annotated[float, typer.Option("--cache-share", help="Share of each layer's experts with a slot, 0 to 1.")]
BudgetOption = Annotated[
    str | None, typer.Option("--expert-budget", help="VRAM for experts, such as 8G; instead of --cache-share.")
]
ContextOption = Annotated[int, typer.Option("--ctx", "-c", help="Context length in tokens, 0: as trained.")]
TokensOption = Annotated[int, typer.Option("--max-tokens", "-n", min=1, help="Tokens to generate at most.")]
ThreadsOption = Annotated[int | None, typer.Option("--threads", "-t", min=1, help="CPU threads (default: all cores).")]
DeviceOption = Annotated[str | None, typer.Option("--device", help="Name of the device for slots (see doctor).")]
PolicyOption = Annotated[str, typer.Option("--policy", help=f"Which experts move: {', '.join(POLICIES)}.")]
DraftModelOption = Annotated[
    Path | None, typer.Option("--draft-model", "-md", help="GGUF file of a draft model with the target's vocabulary.")
]
DraftMaxOption = Annotated[int, typer.Option("--draft-max", min=0, max=31, help="Tokens to draft a step at most.")]


class DraftKind(str, enum.Enum):
    model = "model"
    ngram = "ngram"
    none = "none"


DraftOption = Annotated[
    DraftKind | None, typer.Option("--draft", help="Who drafts (default: the draft model, if there is one).")
]
DraftFixedOption = Annotated[
    bool, typer.Option("--draft-fixed", help="Always draft --draft-max tokens, instead of as many as pay.")
]
DraftLayersOption = Annotated[
    int, typer.Option("--gpu-layers-draft", "-ngld", help="Layers of the draft model on the GPU, -1: all.")
]
TempOption = Annotated[float, typer.Option("--temp", min=0, help="Temperature, 0: greedy.")]
TopKOption = Annotated[int, typer.Option("--top-k", help="Sample from the k likeliest tokens, 0: all.")]
TopPOption = Annotated[float, typer.Option("--top-p", help="Sample from the likeliest tokens of this mass, 1: all.")]
MinPOption = Annotated[
    float, typer.Option("--min-p", help="Least probability, relative to the likeliest token's, 0: any.")
]
PenaltyOption = Annotated[float, typer.Option("--repeat-penalty", help="Penalty on recent tokens, 1: none.")]
SeedOption = Annotated[int | None, typer.Option("--seed", "-s", help="Seed of the sampler (default: random).")]
StopOption = Annotated[list[str] | None, typer.Option("--stop", help="End before this text; may be repeated.")]


@dataclass(frozen=True)
class DraftOptions:
    """kind None: a model if there is one."""

    kind: DraftKind | None = None
    model: Path | None = None
    max: int = 8
    fixed: bool = False
    n_gpu_layers: int = -1


NO_DRAFT = DraftOptions(DraftKind.none)


def fail(message: object) -> typer.Exit:
    typer.echo(f"moespac: {message}", err=True)
    return typer.Exit(1)


@contextmanager
def progress(label: str) -> Iterator[Callable[[float], None]]:
    """A line on stderr that follows the fraction, only where somebody can see it."""
    if not sys.stderr.isatty():
        yield lambda fraction: None
        return
    shown = -1

    def report(fraction: float) -> None:
        nonlocal shown
        if int(100 * fraction) != shown:
            shown = int(100 * fraction)
            typer.echo(f"\r{label} {shown:3d} %", err=True, nl=False)

    yield report
    typer.echo("\r" + " " * (len(label) + 8) + "\r", err=True, nl=False)


def find_device(name: str | None) -> native.Device:
    if name is None:
        return native.default_device()
    for device in native.devices():
        if device.name.lower() == name.lower():
            return device
    raise fail(f"there is no device {name!r}; there are {', '.join(d.name for d in native.devices())}")


@contextmanager
def open_drafter(options: DraftOptions, context: Context) -> Iterator[Drafter]:
    """The drafter, with the model that it may need."""
    target = context.model
    kind, path = options.kind, options.model
    if path is None and kind is not DraftKind.ngram and target.path == TINY_MODEL:
        path = TINY_DRAFT
    if kind is None:
        kind = DraftKind.model if path else DraftKind.none
    if kind is DraftKind.ngram:
        yield NgramDraft()
    elif kind is DraftKind.none:
        yield NoDraft()
    elif path is None:
        raise fail("--draft model needs a draft model: give one with -md")
    else:
        with progress(f"loading {path.name}") as report:
            draft = Model(path, n_gpu_layers=options.n_gpu_layers, progress=report)
        n_ctx = min(context.n_ctx, draft.n_ctx_train) if draft.n_ctx_train else context.n_ctx
        with draft, Context(draft, n_ctx=n_ctx, n_threads=context.n_threads, attach=False) as own:
            yield GgufDraft(own, target)


@contextmanager
def session(
    model: Path,
    device_name: str | None,
    n_ctx: int,
    threads: int | None,
    share: float,
    budget: str | None,
    engine: EngineOptions,
    draft: DraftOptions = NO_DRAFT,
    sampling: Sampling | None = None,
) -> Iterator[Decoder]:
    """Model, context, slots and policy, as every generating command wants them."""
    device = find_device(device_name)
    try:
        with progress(f"loading {model.name}") as report:
            target = Model(model, experts_device=device, progress=report)
        with ExitStack() as stack:
            stack.enter_context(target)
            context = stack.enter_context(Context(target, n_ctx=n_ctx, n_threads=threads, device=device, perf=True))
            drafter = stack.enter_context(open_drafter(draft, context))
            assert context.experts is not None
            sizes = block_sizes(context.experts)
            slots = slots_for_bytes(sizes, parse_bytes(budget)) if budget is not None else slots_for_share(sizes, share)
            context.experts.set_slots(slots)
            residency = stack.enter_context(open_residency(context, engine, progress))
            warn_about(context.experts, device)
            decoder = Decoder(
                context, residency, drafter=drafter, draft_max=draft.max, draft_fixed=draft.fixed, sampling=sampling
            )
            stack.callback(decoder.close)
            yield decoder
    except typer.Exit:  # a RuntimeError that has been told already
        raise
    except (LoadError, native.MoeError, ValueError, RuntimeError) as error:
        raise fail(error) from error


def warn_about(experts: native.Experts, device: native.Device) -> None:
    total, pinned = experts.host_bytes()
    if device.host_buffer_type and pinned < total:
        typer.echo(
            f"moespac: {(total - pinned) / 2**30:.1f} of {total / 2**30:.1f} GiB of experts are not page-locked: uploads run "
            "at a fraction of the link's speed (see `ulimit -l` and the memory that is free)",
            err=True,
        )
    for row in experts.rows():
        if not row.hybrid:
            typer.echo(f"moespac: layer {row.il} takes llama.cpp's own path: {row.fallback}", err=True)


def stream(decoder: Decoder, prompt: list[int], max_tokens: int, stop: Sequence[str] = ()) -> None:
    """Prints the text as it comes; bytes, since a character may span tokens."""
    for text in decoder.stream(prompt, max_tokens, stop=stop):
        sys.stdout.buffer.write(text)
        sys.stdout.buffer.flush()
    typer.echo()
    for notice in decoder.report.notices:
        typer.echo(f"moespac: {notice}", err=True)


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
    )


@app.command()
def demo(
    max_tokens: TokensOption = 60,
    cache_share: ShareOption = 0.25,
    threads: ThreadsOption = None,
    device: DeviceOption = None,
) -> None:
    """Generate with the bundled tiny MoE, part of its experts resident on a device and the rest on the CPU."""
    capture_log()
    draft = DraftOptions(DraftKind.model, TINY_DRAFT)
    with session(TINY_MODEL, device, 0, threads, cache_share, None, EngineOptions(hot_set=False), draft) as decoder:
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


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue, or with --chat the user's message.")],
    model: ModelOption = TINY_MODEL,
    max_tokens: TokensOption = 128,
    chat: Annotated[bool, typer.Option("--chat", help="Apply the model's chat template.")] = False,
    cache_share: ShareOption = 0.25,
    expert_budget: BudgetOption = None,
    ctx: ContextOption = 0,
    threads: ThreadsOption = None,
    device: DeviceOption = None,
    policy: PolicyOption = "moe-spac",
    no_frequency: NoFrequencyOption = False,
    no_balancer: NoBalancerOption = False,
    sync_moves: SyncMovesOption = False,
    no_hot_set: NoHotSetOption = False,
    draft_model: DraftModelOption = None,
    draft: DraftOption = None,
    draft_max: DraftMaxOption = 8,
    draft_fixed: DraftFixedOption = False,
    draft_gpu_layers: DraftLayersOption = -1,
    temp: TempOption = 0.0,
    top_k: TopKOption = 40,
    top_p: TopPOption = 0.95,
    min_p: MinPOption = 0.05,
    repeat_penalty: PenaltyOption = 1.0,
    seed: SeedOption = None,
    stop: StopOption = None,
) -> None:
    """Continue a prompt, greedily unless --temp is given."""
    capture_log()
    engine = EngineOptions(policy, not no_frequency, not no_balancer, sync_moves, not no_hot_set)
    drafting = DraftOptions(draft, draft_model, draft_max, draft_fixed, draft_gpu_layers)
    sampling = Sampling(temp, top_k, top_p, min_p, repeat_penalty, seed=None if seed is None or seed < 0 else seed)
    with session(model, device, ctx, threads, cache_share, expert_budget, engine, drafting, sampling) as decoder:
        target = decoder.context.model
        tokens = target.tokenize(target.chat_prompt(prompt) if chat else prompt)
        stream(decoder, tokens, max_tokens, stop or ())
        typer.echo(summary(decoder), err=True)


class Interrupts:
    """Ctrl-C while an answer comes stops the answer, between two tokens; a second one, or one at other times, interrupts."""

    def __init__(self) -> None:
        self.answering = self.pressed = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.answering or self.pressed:
            raise KeyboardInterrupt
        self.pressed = True

    @contextmanager
    def caught(self) -> Iterator[None]:
        before = signal.signal(signal.SIGINT, self._handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    @contextmanager
    def answer(self) -> Iterator[None]:
        self.answering, self.pressed = True, False
        try:
            yield
        finally:
            self.answering = False


def read_line() -> str | None:
    """The next line of stdin, with line editing in a terminal; None at its end."""
    if sys.stdin.isatty() and sys.stdout.isatty():
        with suppress(ImportError):
            import readline  # noqa: F401 (input() uses it)
        try:
            return input("> ")
        except EOFError:
            typer.echo()
            return None
    line = sys.stdin.readline()
    return line.rstrip("\r\n") if line else None


def answer(
    chat: Chat, interrupts: Interrupts, line: str, max_tokens: int | None, stop: Sequence[str], json: bool
) -> bool:
    """Prints the answer to a line, and its status; False if there was no room for one."""
    said = b""
    try:
        with interrupts.answer(), closing(chat.say(line, max_tokens, stop)) as pieces:
            for piece in pieces:
                said += piece
                if not json:
                    sys.stdout.buffer.write(piece)
                    sys.stdout.buffer.flush()
                if interrupts.pressed:
                    break
    except ContextFullError as error:
        if json:
            typer.echo(dumps({"error": str(error)}))
        typer.echo(f"moespac: {error} (/clear, or -c)", err=True)
        return False
    finally:
        if said and not json:
            typer.echo()
    for notice in chat.decoder.report.notices:
        typer.echo(f"moespac: {notice}", err=True)
    if json:
        typer.echo(dumps({"text": said.decode("utf-8", "replace"), **chat.last.record()}))
        return True
    if chat.last.finish_reason == "interrupted":
        typer.echo("moespac: the answer was stopped", err=True)
    elif chat.full:
        n_ctx = chat.decoder.context.n_ctx
        typer.echo(f"moespac: the context of {n_ctx} tokens is full: the answer ends here (/clear, or -c)", err=True)
    elif chat.last.finish_reason == "length":
        typer.echo(f"moespac: the answer ends after {chat.last.n_generated} tokens, as -n says", err=True)
    typer.echo(f"[{chat.last.status()}]", err=True)
    return True


@app.command("chat")
def chat_command(
    model: ModelOption = TINY_MODEL,
    system_prompt: Annotated[
        str | None, typer.Option("--system-prompt", "-sys", help="What the model is told before the first message.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", "-n", min=1, help="Tokens per answer at most (default: no limit).")
    ] = None,
    cache_share: ShareOption = 0.25,
    expert_budget: BudgetOption = None,
    ctx: ContextOption = 0,
    threads: ThreadsOption = None,
    device: DeviceOption = None,
    policy: PolicyOption = "moe-spac",
    no_frequency: NoFrequencyOption = False,
    no_balancer: NoBalancerOption = False,
    sync_moves: SyncMovesOption = False,
    no_hot_set: NoHotSetOption = False,
    draft_model: DraftModelOption = None,
    draft: DraftOption = None,
    draft_max: DraftMaxOption = 8,
    draft_fixed: DraftFixedOption = False,
    draft_gpu_layers: DraftLayersOption = -1,
    temp: TempOption = 0.0,
    top_k: TopKOption = 40,
    top_p: TopPOption = 0.95,
    min_p: MinPOption = 0.05,
    repeat_penalty: PenaltyOption = 1.0,
    seed: SeedOption = None,
    stop: StopOption = None,
    json: Annotated[bool, typer.Option("--json", help="A line of JSON for each answer, instead of its text.")] = False,
) -> None:
    """Talk with a model: a line is a message; Ctrl-C stops an answer, /clear forgets, /exit or the end of input ends."""
    capture_log()
    engine = EngineOptions(policy, not no_frequency, not no_balancer, sync_moves, not no_hot_set)
    drafting = DraftOptions(draft, draft_model, draft_max, draft_fixed, draft_gpu_layers)
    sampling = Sampling(temp, top_k, top_p, min_p, repeat_penalty, seed=None if seed is None or seed < 0 else seed)
    all_answered = True
    with session(model, device, ctx, threads, cache_share, expert_budget, engine, drafting, sampling) as decoder:
        chat = Chat(decoder, system_prompt)
        interrupts = Interrupts()
        if sys.stdin.isatty():
            typer.echo(
                f"{decoder.context.model.describe()}; /exit ends, /clear forgets, Ctrl-C stops an answer", err=True
            )
        with interrupts.caught():
            while True:
                try:
                    line = read_line()
                    if line is None or line.strip() == "/exit":
                        break
                    if line.strip() == "/clear":
                        chat.clear()
                        typer.echo("moespac: forgotten", err=True)
                    elif line.strip():
                        all_answered &= answer(chat, interrupts, line, max_tokens, stop or (), json)
                except KeyboardInterrupt:
                    typer.echo("\nmoespac: /exit or Ctrl-D ends", err=True)
        total = chat.total
        answers = "1 answer" if total.n_turns == 1 else f"{total.n_turns} answers"
        typer.echo(f"{answers}: {total.status()}, {total.n_load_bytes / 2**20:.1f} MiB uploaded", err=True)
    if not all_answered and not sys.stdin.isatty():
        raise typer.Exit(1)


@app.command("inspect")
def inspect_command(
    model: Annotated[Path, typer.Option("--model", "-m", help="GGUF file to look at.")] = TINY_MODEL,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """What a GGUF file holds: experts, bytes, weight types. Loads no weights."""
    try:
        contents = inspect(model)
    except InspectError as error:
        raise fail(error) from error
    typer.echo(dumps(contents.record(), indent=1) if json else contents.describe())


@app.command()
def trace(
    out: Annotated[Path, typer.Argument(help="The .npz file to write.")],
    prompt: Annotated[str, typer.Argument(help="The text to continue.")],
    model: ModelOption = TINY_MODEL,
    max_tokens: TokensOption = 128,
    ctx: ContextOption = 0,
    threads: ThreadsOption = None,
) -> None:
    """Record which experts the routers choose while a prompt is continued."""
    capture_log()
    if not out.parent.is_dir():
        raise fail(f"{out.parent}: there is no such folder")
    with session(model, None, ctx, threads, 0.0, None, EngineOptions("static")) as decoder:
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


@app.command(add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def simulate(context: typer.Context) -> None:
    """Replay a routing trace through the policies: hits, moves, predicted time (`moespac simulate --help`)."""
    from moespac_llamacpp.simulate import main as run

    raise typer.Exit(run(context.args))


@app.command()
def doctor(
    model: Annotated[Path | None, typer.Option("--model", "-m", help="Also look at this GGUF file.")] = None,
) -> None:
    """Versions, devices, kernels; with a model, which of its layers run hybrid."""
    capture_log()
    typer.echo(f"moespac_llamacpp {__version__}, llama-cpp-python {installed_version() or 'built by hand'} (patched)")
    typer.echo(f"cold kernels: {native.kernel_isa()} (other weight types through ggml's own)")
    for device in native.devices():
        free, total = device.memory
        locked = "page-locked host memory" if device.host_buffer_type else "no page-locked host memory"
        typer.echo(
            f"device {device.name} ({device.kind}): {device.description}, "
            f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free, {locked}"
        )
    typer.echo(f"slots go to {native.default_device().name} unless --device says otherwise")
    if model is None:
        return
    try:
        start = time.perf_counter()
        with Model(model) as target, Context(target, n_ctx=512) as context:
            assert context.experts is not None
            total, pinned = context.experts.host_bytes()
            typer.echo(
                f"{model.name}: {target.describe()}, loaded in {time.perf_counter() - start:.1f} s; experts "
                f"{total / 2**30:.2f} GiB in host memory, {pinned / 2**30:.2f} GiB of it page-locked"
            )
            for row in context.experts.rows():
                how = f"hybrid, kernels {row.kernel}" if row.hybrid else f"llama.cpp's own path: {row.fallback}"
                typer.echo(
                    f"  layer {row.il}: {row.n_expert} experts of {row.expert_bytes / 2**20:.2f} MiB, "
                    f"{row.n_expert_used} used; {how}"
                )
    except (LoadError, native.MoeError) as error:
        raise fail(error) from error


def main() -> None:
    app()


if __name__ == "__main__":
    main()
