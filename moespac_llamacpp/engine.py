"""From options to a decoder that generates: device, models, contexts, slots, policy, drafter, opened in this order."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moespac_llamacpp import hotset, native
from moespac_llamacpp.decoder import Decoder
from moespac_llamacpp.draft import DRAFT_WIDTHS, Drafter, DraftLength, GgufDraft, NgramDraft, NoDraft
from moespac_llamacpp.machine import cache_folder, crowded, reason
from moespac_llamacpp.memory import parse_bytes
from moespac_llamacpp.models import Context, Model
from moespac_llamacpp.options import context_fields, tensor_overrides
from moespac_llamacpp.plan import Plan, Wishes
from moespac_llamacpp.planner import Pair, plan_pair
from moespac_llamacpp.policies import NAMES as POLICIES
from moespac_llamacpp.policies import make
from moespac_llamacpp.profile import known
from moespac_llamacpp.residency import LOOK_AHEAD, STREAM_EXPERTS, Residency
from moespac_llamacpp.sampling import Sampling
from moespac_llamacpp.telemetry import Telemetry

DATA = Path(__file__).parent / "data"
TINY_MODEL = DATA / "tiny-moe-Q4_K_M.gguf"
TINY_DRAFT = DATA / "tiny-draft-Q8_0.gguf"
#: At most so long is spent on graphs before the first text, on a GPU.
WARM_UP_SECONDS = 2.0

#: Shows how far something long has come: called with a label, gives a context and in it a function of 0 … 1.
Progress = Callable[[str], AbstractContextManager[Callable[[float], None]]]


@contextmanager
def silent(label: str) -> Iterator[Callable[[float], None]]:
    yield lambda fraction: None


@dataclass(frozen=True)
class Options:
    """What is loaded, and where. Names and defaults are those of llama.cpp where it has them."""

    model: Path = TINY_MODEL
    draft_model: Path | None = None
    draft: str | None = None  # "model", "ngram" or "none"; None: the draft model if there is one
    draft_max: int = 8
    draft_fixed: bool = False
    n_ctx: int = 0  # 0: as trained, or less where that would take the slots' room
    n_batch: int = 2048
    n_ubatch: int = 512
    n_threads: int | None = None  # None: all cores
    n_threads_batch: int | None = None  # for more than one token at a time; None: n_threads
    n_gpu_layers: int = -1  # layers whose tensors, without the experts, go to the GPU; -1: all
    n_gpu_layers_draft: int = -1
    device: str | None = None  # of the slots; None: the first GPU, else the CPU once more
    execution: str = "auto"  # of the layers with experts: a name of native.EXECUTIONS
    cache_share: float | None = None  # of each layer's experts with a slot
    expert_budget: str | int | None = None  # bytes for slots, such as "8G"; instead of cache_share
    vram: str | int | None = (
        None  # bytes for everything on the device, instead of both; None: what is free, but a reserve
    )
    policy: str = "moe-spac"
    frequency: bool = True  # this and the next two: switches of the policy (policies.make, Residency)
    balancer: bool = True
    sync_moves: bool = False
    stream_experts: int = STREAM_EXPERTS  # of a layer, may cross the link in the middle of a decode; 0: none
    look_ahead: int = LOOK_AHEAD  # and before the layer begins
    hot_set: bool = False  # start with the experts that the last run left, and leave them for the next one
    flash_attn: str | None = None  # on, off, auto
    cache_type_k: str | None = None
    cache_type_v: str | None = None
    override_tensor: tuple[str, ...] = ()  # "<pattern>=<buffer type>"
    context_shift: bool = False
    n_keep: int = 0
    telemetry: Path | None = None
    sampling: Sampling = field(default_factory=Sampling)
    grammar: str | None = None


def find_device(name: str | None) -> native.Device:
    """ValueError: there is no such device."""
    if name is None:
        return native.default_device()
    devices = native.devices()
    for device in devices:
        if device.name.lower() == name.lower():
            return device
    raise ValueError(f"there is no device {name!r}; there are {', '.join(d.name for d in devices)}")


def open_decoder(
    options: Options, device: native.Device, stack: ExitStack, progress: Progress = silent
) -> tuple[Decoder, list[str]]:
    """(a decoder, sentences for the user; closing may add some). All sizes are those of the memory plan. The stack closes all.

    LoadError, MoeError, TelemetryError, ValueError: the text is the sentence for the user."""
    if options.policy not in POLICIES:
        raise ValueError(f"there is no policy {options.policy!r}; there are {', '.join(POLICIES)}")
    if not 0 <= options.stream_experts <= native.MAX_STREAMED:
        raise ValueError(
            f"{options.stream_experts} experts of a layer cannot be streamed, only 0 to {native.MAX_STREAMED}"
        )
    if not 0 <= options.look_ahead <= native.MAX_AHEAD:
        raise ValueError(f"{options.look_ahead} experts of a layer cannot come ahead, only 0 to {native.MAX_AHEAD}")
    telemetry = stack.enter_context(Telemetry(options.telemetry)) if options.telemetry else None
    kind = draft_kind(options)
    plan = plan_of(options, device)
    with progress(f"loading {options.model.name}") as report:
        target = Model(
            options.model,
            experts_device=device,
            n_gpu_layers=options.n_gpu_layers,
            overrides=tensor_overrides(options.override_tensor, device),
            progress=report,
        )
    stack.enter_context(target)
    fields = context_fields(options.flash_attn, options.cache_type_k, options.cache_type_v)
    if kind != "none" and target.is_recurrent:
        fields["n_rs_seq"] = options.draft_max  # so many tokens can be taken back, where the architecture can at all
    context = stack.enter_context(_context(options, target, plan, device, fields))
    notices = [*plan.notes, *crowded(options.n_threads, options.n_threads_batch)]
    if kind != "none" and not context.can_roll_back:
        notices.append(
            f"{target.path}: its recurrent state cannot roll back rejected drafts: it generates without a draft"
        )
        kind = "none"
    drafter = _open_drafter(options, kind, context, device, stack, progress)
    assert context.experts is not None
    context.experts.set_slots(plan.slots)
    notices += warnings(context.experts, device, options.execution)
    residency = stack.enter_context(open_residency(context, options, notices, progress))
    if device.kind != "cpu":
        n_draft = min(options.draft_max, context.max_guesses) if kind != "none" else 0
        with progress("making graphs") as report, residency.undisturbed():
            context.warm_up(widths_to_come(n_draft, options.draft_fixed), WARM_UP_SECONDS, report)
    decoder = Decoder(
        context,
        residency,
        drafter=drafter,
        draft_max=options.draft_max,
        draft_fixed=options.draft_fixed,
        sampling=options.sampling,
        grammar=options.grammar,
        context_shift=options.context_shift,
        n_keep=options.n_keep,
        telemetry=telemetry,
    )
    stack.callback(decoder.close)
    return decoder, notices


@contextmanager
def open_residency(
    context: Context, options: Options, notices: list[str], progress: Progress = silent
) -> Iterator[Residency]:
    """Slots filled and a policy at work, for a context whose slots are set; at a good end the hot set is left.

    notices: sentences for the user are added to it, also at the end. ValueError: an option that does not fit the policy."""
    experts = context.experts
    assert experts is not None
    policy = make(
        options.policy, experts.n_rows, experts.n_expert, frequency=options.frequency, balanced=options.balancer
    )
    residency = Residency(
        experts,
        policy,
        sync_moves=options.sync_moves,
        stream_experts=options.stream_experts,
        look_ahead=options.look_ahead,
    )
    try:
        keep = options.hot_set and bool(residency.n_slots.any())
        hot = _last_run(context, notices) if keep else None
        with progress("uploading experts") as report:
            residency.fill(hot, report)
        experts.reset_perf()  # these uploads are no part of what is generated
        try:
            yield residency
        except KeyboardInterrupt:  # a good end too
            if keep:
                _leave(context, residency, notices)
            raise
        if keep:
            _leave(context, residency, notices)
    finally:
        residency.close()


def _last_run(context: Context, notices: list[str]) -> hotset.HotSet | None:
    experts = context.experts
    assert experts is not None
    try:
        path = hotset.path_for(cache_folder(os.environ), context.model.path)
        return hotset.load(path, experts.n_rows, experts.n_expert)
    except FileNotFoundError:  # no home folder; said when the run ends
        return None
    except OSError as error:
        notices.append(reason(error))
        return None
    except hotset.HotSetError as error:
        notices.append(str(error))
        return None


def _leave(context: Context, residency: Residency, notices: list[str]) -> None:
    try:
        hotset.save(hotset.path_for(cache_folder(os.environ), context.model.path), residency.hot_set())
    except OSError as error:
        notices.append(f"the hot set was not kept for the next run: {reason(error)}")


def widths_to_come(n_draft: int, fixed: bool) -> list[int]:
    """Tokens of the batches of a text with up to n_draft guesses, in the order in which they come."""
    if fixed:
        return list(dict.fromkeys([1, n_draft + 1]))
    return list(dict.fromkeys([1, min(DraftLength.FIRST, n_draft) + 1, *range(2, n_draft + 2)]))


def plan_of(options: Options, device: native.Device) -> Plan:
    """What `open_decoder` loads, and where. LoadError, MoeError, ValueError (a PlanError if it does not fit)."""
    native.check_execution(options.execution)  # before anything is read
    kind = draft_kind(options)
    pair = Pair(
        options.model,
        draft_path(options) if kind == "model" else None,
        options.n_gpu_layers_draft,
        options.n_ctx,
        options.draft_max if kind != "none" else 0,
        gpu_layers=options.n_gpu_layers,
        n_batch=options.n_batch,
        n_ubatch=options.n_ubatch,
        overrides=tensor_overrides(options.override_tensor, device),
        execution=options.execution,
        context=context_fields(options.flash_attn, options.cache_type_k, options.cache_type_v),
    )
    wishes = Wishes(size_of(options.vram), size_of(options.expert_budget), options.cache_share)
    profile = known(f"{device.name} {device.description}", os.environ, options.n_threads)
    return plan_pair(pair, device, wishes, profile=profile)


def size_of(size: str | int | None) -> int | None:
    """ValueError: not a size."""
    return parse_bytes(size) if isinstance(size, str) else size


def _context(options: Options, target: Model, plan: Plan, device: native.Device, fields: dict[str, Any]) -> Context:
    if options.n_threads_batch:
        fields["n_threads_batch"] = options.n_threads_batch
    return Context(
        target,
        n_ctx=plan.target.n_ctx,
        n_batch=options.n_batch,
        n_ubatch=options.n_ubatch,
        n_threads=options.n_threads,
        device=device,
        execution=options.execution,
        perf=True,
        prompt_share=plan.prompt_share,
        params=fields,
    )


def draft_kind(options: Options) -> str:
    """ "model", "ngram" or "none". ValueError: something else, or a draft model is wanted and not named."""
    if options.draft not in (None, "model", "ngram", "none"):
        raise ValueError(f"the draft is model, ngram or none, not {options.draft!r}")
    kind = options.draft or ("model" if draft_path(options) else "none")
    if kind == "model" and draft_path(options) is None:
        raise ValueError("--draft model needs a draft model: give one with -md")
    return kind


def draft_path(options: Options) -> Path | None:
    """The bundled target brings its draft along."""
    if options.draft_model is None and options.draft != "ngram" and options.model == TINY_MODEL:
        return TINY_DRAFT
    return options.draft_model


def _open_drafter(
    options: Options, kind: str, context: Context, device: native.Device, stack: ExitStack, progress: Progress
) -> Drafter:
    if kind == "ngram":
        return NgramDraft()
    if kind == "none":
        return NoDraft()
    path = draft_path(options)
    assert path is not None
    with progress(f"loading {path.name}") as report:
        draft = Model(path, experts_device=device, n_gpu_layers=options.n_gpu_layers_draft, progress=report)
    stack.enter_context(draft)
    n_ctx = min(context.n_ctx, draft.n_ctx_train) if draft.n_ctx_train else context.n_ctx
    fields = {"n_rs_seq": options.draft_max} if draft.is_recurrent else {}
    own = Context(
        draft, n_ctx=n_ctx, n_threads=context.n_threads, attach=False, keep_graphs=DRAFT_WIDTHS, params=fields
    )
    stack.enter_context(own)
    return GgufDraft(own, context.model, context_shift=options.context_shift)


def warnings(experts: native.Experts, device: native.Device, execution: str = "auto") -> Sequence[str]:
    """What makes it slower than it could be. execution: the one that was asked for."""
    found = []
    total, pinned = experts.host_bytes()
    if device.host_buffer_type and pinned < total:
        found.append(
            f"{(total - pinned) / 2**30:.1f} of {total / 2**30:.1f} GiB of experts are not page-locked: uploads run "
            "at a fraction of the link's speed (`moespac doctor` says why)"
        )
    for row in experts.rows():
        if not row.hybrid:
            found.append(f"layer {row.il} takes llama.cpp's own path: {row.fallback}")
        elif execution == "in-stream" and not row.in_stream:
            found.append(f"layer {row.il} is not computed in-stream: {row.portable}")
    return found
