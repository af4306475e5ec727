"""The command line. The only place that talks to the terminal."""

from __future__ import annotations

import enum
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from json import dumps
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from moespac_llamacpp import native
from moespac_llamacpp.acceptance import Sampling
from moespac_llamacpp.chat import Chat, ContextFullError
from moespac_llamacpp.commands.doctor import doctor_command
from moespac_llamacpp.commands.models import Resolved, models_command, pull_command, resolve
from moespac_llamacpp.commands.plan import plan_command
from moespac_llamacpp.commands.plot import inspect_command, plot_command
from moespac_llamacpp.commands.shared import fail, find_device, progress, tell_abort
from moespac_llamacpp.decoder import Decoder
from moespac_llamacpp.draft import Drafter, GgufDraft, NgramDraft, NoDraft
from moespac_llamacpp.memory import parse_bytes
from moespac_llamacpp.models import Context, LoadError, Model, capture_log
from moespac_llamacpp.plan import Plan, Wishes
from moespac_llamacpp.planner import Pair, plan_pair
from moespac_llamacpp.policies import NAMES as POLICIES
from moespac_llamacpp.policies import make as make_policy
from moespac_llamacpp.residency import Residency
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
    Path, typer.Option("--model", "-m", help="GGUF file or name (see models) of the target (default: the bundled one).")
]
ShareOption = Annotated[
    float | None, typer.Option("--cache-share", help="Share of each layer's experts with a slot, 0 to 1.")
]
BudgetOption = Annotated[
    str | None, typer.Option("--expert-budget", help="VRAM for experts, such as 8G; instead of --cache-share.")
]
VramOption = Annotated[
    str | None, typer.Option("--vram", help="VRAM for everything, such as 8G (default: what is free but 1G).")
]
ContextOption = Annotated[int, typer.Option("--ctx", "-c", min=0, help="Context length in tokens, 0: as trained.")]
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
TopKOption = Annotated[int, typer.Option("--top-k", min=0, help="Sample from the k likeliest tokens, 0: all.")]
TopPOption = Annotated[
    float, typer.Option("--top-p", min=0, max=1, help="Sample from the likeliest tokens of this mass, 1: all.")
]
MinPOption = Annotated[
    float, typer.Option("--min-p", min=0, max=1, help="Least probability, relative to the likeliest token's, 0: any.")
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


def settle_draft(options: DraftOptions, given: Resolved) -> DraftOptions:
    """The options with the kind that they mean, and a model only if it drafts."""
    kind, path = options.kind, options.model or given.draft
    if path is None and given.target == TINY_MODEL:
        path = TINY_DRAFT
    if kind is None:
        kind = DraftKind.model if path else DraftKind.ngram if given.named else DraftKind.none
    if kind is not DraftKind.model:
        return replace(options, kind=kind, model=None)
    if path is None:
        raise fail("--draft model needs a draft model: give one with -md")
    return replace(options, kind=kind, model=path)


@contextmanager
def open_drafter(options: DraftOptions, context: Context, device: native.Device) -> Iterator[Drafter]:
    """The drafter that settled options name, with the model that it may need."""
    target, path = context.model, options.model
    if options.kind is DraftKind.ngram:
        yield NgramDraft()
    elif path is None:
        yield NoDraft()
    else:
        with progress(f"loading {path.name}") as report:
            draft = Model(path, experts_device=device, n_gpu_layers=options.n_gpu_layers, progress=report)
        n_ctx = min(context.n_ctx, draft.n_ctx_train) if draft.n_ctx_train else context.n_ctx
        with draft, Context(draft, n_ctx=n_ctx, n_threads=context.n_threads, attach=False) as own:
            yield GgufDraft(own, target)


@contextmanager
def session(
    model: Path,
    device_name: str | None,
    n_ctx: int,
    threads: int | None,
    share: float | None,
    budget: str | None,
    policy: str,
    draft: DraftOptions = NO_DRAFT,
    sampling: Sampling | None = None,
    vram: str | None = None,
) -> Iterator[Decoder]:
    """Model, context, slots and policy, as every generating command wants them; all sizes are those of the memory plan."""
    device = find_device(device_name)
    if policy not in POLICIES:
        raise fail(f"there is no policy {policy!r}; there are {', '.join(POLICIES)}")
    given = resolve(model)
    model, draft = given.target, settle_draft(draft, given)
    try:
        plan = make_plan(model, draft, device, n_ctx, Wishes(size_of(vram), size_of(budget), share))
        n_ctx = plan.target.n_ctx
        with progress(f"loading {model.name}") as report:
            target = Model(model, experts_device=device, progress=report)
        with ExitStack() as stack:
            stack.enter_context(target)
            context = stack.enter_context(Context(target, n_ctx=n_ctx, n_threads=threads, device=device))
            drafter = stack.enter_context(open_drafter(draft, context, device))
            assert context.experts is not None
            context.experts.set_slots(plan.slots)
            residency = Residency(
                context.experts, make_policy(policy, context.experts.n_rows, context.experts.n_expert)
            )
            fill(residency)
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


def size_of(text: str | None) -> int | None:
    return None if text is None else parse_bytes(text)


def make_plan(model: Path, draft: DraftOptions, device: native.Device, n_ctx: int, wishes: Wishes) -> Plan:
    """Says on stderr what the user should know of it."""
    plan = plan_pair(Pair(model, draft.model, draft.n_gpu_layers, n_ctx, draft.max), device, wishes)
    for note in plan.notes:
        typer.echo(f"moespac: {note}", err=True)
    return plan


def fill(residency: Residency) -> None:
    """The first experts of each layer, so that no slot is empty before anything is known."""
    with progress("uploading experts") as report:
        for i, row in enumerate(residency.n_slots):
            for expert in range(row):
                residency.experts.load(i, expert)
            report(i / len(residency.n_slots))
        residency.experts.sync()
        residency.experts.publish()


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
    with session(TINY_MODEL, device, 0, threads, cache_share, None, "moe-spac", draft) as decoder:
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
    cache_share: ShareOption = None,
    expert_budget: BudgetOption = None,
    vram: VramOption = None,
    ctx: ContextOption = 0,
    threads: ThreadsOption = None,
    device: DeviceOption = None,
    policy: PolicyOption = "moe-spac",
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
    drafting = DraftOptions(draft, draft_model, draft_max, draft_fixed, draft_gpu_layers)
    sampling = Sampling(temp, top_k, top_p, min_p, repeat_penalty, seed=None if seed is None or seed < 0 else seed)
    with session(model, device, ctx, threads, cache_share, expert_budget, policy, drafting, sampling, vram) as decoder:
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
    name: Annotated[str | None, typer.Argument(help="A name of `moespac models`, instead of -m.")] = None,
    model: ModelOption = TINY_MODEL,
    system_prompt: Annotated[
        str | None, typer.Option("--system-prompt", "-sys", help="What the model is told before the first message.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", "-n", min=1, help="Tokens per answer at most (default: no limit).")
    ] = None,
    cache_share: ShareOption = None,
    expert_budget: BudgetOption = None,
    vram: VramOption = None,
    ctx: ContextOption = 0,
    threads: ThreadsOption = None,
    device: DeviceOption = None,
    policy: PolicyOption = "moe-spac",
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
    drafting = DraftOptions(draft, draft_model, draft_max, draft_fixed, draft_gpu_layers)
    sampling = Sampling(temp, top_k, top_p, min_p, repeat_penalty, seed=None if seed is None or seed < 0 else seed)
    all_answered = True
    with session(
        Path(name) if name else model,
        device,
        ctx,
        threads,
        cache_share,
        expert_budget,
        policy,
        drafting,
        sampling,
        vram,
    ) as decoder:
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
    with session(model, None, ctx, threads, 0.0, None, "static") as decoder:
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


app.command("models")(models_command)
app.command("pull")(pull_command)
app.command("plan")(plan_command)
app.command("doctor")(doctor_command)
app.command("inspect")(inspect_command)
app.command("plot")(plot_command)


def main() -> None:
    native.on_abort(tell_abort)
    app()


if __name__ == "__main__":
    main()
