"""From options to a decoder that generates: device, models, contexts, slots, policy, drafter, opened in this order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from moespac_llamacpp import native
from moespac_llamacpp.decoder import Decoder
from moespac_llamacpp.draft import Drafter, GgufDraft, NgramDraft, NoDraft
from moespac_llamacpp.memory import parse_bytes, slots_for_bytes, slots_for_share
from moespac_llamacpp.models import Context, Model
from moespac_llamacpp.options import context_fields, tensor_overrides
from moespac_llamacpp.policies import make as make_policy
from moespac_llamacpp.residency import Residency, block_sizes
from moespac_llamacpp.sampling import Sampling
from moespac_llamacpp.telemetry import Telemetry

DATA = Path(__file__).parent / "data"
TINY_MODEL = DATA / "tiny-moe-Q4_K_M.gguf"
TINY_DRAFT = DATA / "tiny-draft-Q8_0.gguf"

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
    n_ctx: int = 0  # 0: as trained
    n_batch: int = 2048
    n_ubatch: int = 512
    n_threads: int | None = None  # None: all cores
    n_threads_batch: int | None = None  # for more than one token at a time; None: n_threads
    n_gpu_layers: int = -1  # layers whose tensors, without the experts, go to the GPU; -1: all
    n_gpu_layers_draft: int = -1
    device: str | None = None  # of the slots; None: the first GPU, else the CPU once more
    cache_share: float = 0.25  # of each layer's experts with a slot
    expert_budget: str | int | None = None  # bytes for slots, such as "8G"; instead of cache_share
    policy: str = "moe-spac"
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


def open_decoder(options: Options, stack: ExitStack, progress: Progress = silent) -> tuple[Decoder, list[str]]:
    """(a decoder, sentences for the user). Everything is closed with the stack.

    LoadError, MoeError, TelemetryError, ValueError: the text is the sentence for the user."""
    telemetry = stack.enter_context(Telemetry(options.telemetry)) if options.telemetry else None
    device = find_device(options.device)
    overrides = tensor_overrides(options.override_tensor)
    fields = context_fields(options.flash_attn, options.cache_type_k, options.cache_type_v)
    if options.n_threads_batch:
        fields["n_threads_batch"] = options.n_threads_batch
    kind = draft_kind(options)
    with progress(f"loading {options.model.name}") as report:
        target = Model(
            options.model,
            experts_device=device,
            n_gpu_layers=options.n_gpu_layers,
            overrides=overrides,
            progress=report,
        )
    stack.enter_context(target)
    if kind != "none" and target.is_recurrent:
        fields["n_rs_seq"] = options.draft_max  # so many tokens can be taken back, where the architecture can at all
    context = Context(
        target,
        n_ctx=options.n_ctx,
        n_batch=options.n_batch,
        n_ubatch=options.n_ubatch,
        n_threads=options.n_threads,
        device=device,
        params=fields,
    )
    stack.enter_context(context)
    notices = []
    if kind != "none" and not context.can_roll_back:
        notices.append(f"{target.path}: its recurrent state cannot roll back rejected drafts: it generates without a draft")
        kind = "none"
    drafter = _open_drafter(options, kind, context, stack, progress)
    residency = _place(options, context, progress)
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
    return decoder, [*notices, *warnings(residency.experts, device)]


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


def _open_drafter(options: Options, kind: str, context: Context, stack: ExitStack, progress: Progress) -> Drafter:
    if kind == "ngram":
        return NgramDraft()
    if kind == "none":
        return NoDraft()
    path = draft_path(options)
    assert path is not None
    with progress(f"loading {path.name}") as report:
        draft = Model(path, n_gpu_layers=options.n_gpu_layers_draft, progress=report)
    stack.enter_context(draft)
    n_ctx = min(context.n_ctx, draft.n_ctx_train) if draft.n_ctx_train else context.n_ctx
    fields = {"n_rs_seq": options.draft_max} if draft.is_recurrent else {}
    own = Context(draft, n_ctx=n_ctx, n_threads=context.n_threads, attach=False, params=fields)
    stack.enter_context(own)
    return GgufDraft(own, context.model, context_shift=options.context_shift)


def _place(options: Options, context: Context, progress: Progress) -> Residency:
    """Slots as the budget says, filled with the first experts of each layer: none is empty before anything is known."""
    experts = context.experts
    assert experts is not None
    sizes, budget = block_sizes(experts), options.expert_budget
    if budget is None:
        slots = slots_for_share(sizes, options.cache_share)
    else:
        slots = slots_for_bytes(sizes, parse_bytes(budget) if isinstance(budget, str) else budget)
    experts.set_slots(slots)
    residency = Residency(experts, make_policy(options.policy, experts.n_rows, experts.n_expert))
    with progress("uploading experts") as report:
        for i, n in enumerate(residency.n_slots):
            for expert in range(n):
                experts.load(i, expert)
            report(i / len(residency.n_slots))
        experts.sync()
        experts.publish()
    return residency


def warnings(experts: native.Experts, device: native.Device) -> Sequence[str]:
    """What makes it slower than it could be."""
    found = []
    total, pinned = experts.host_bytes()
    if device.host_buffer_type and pinned < total:
        found.append(
            f"{(total - pinned) / 2**30:.1f} of {total / 2**30:.1f} GiB of experts are not page-locked: uploads run "
            "at a fraction of the link's speed (see `ulimit -l` and the memory that is free)"
        )
    for row in experts.rows():
        if not row.hybrid:
            found.append(f"layer {row.il} takes llama.cpp's own path: {row.fallback}")
    return found
