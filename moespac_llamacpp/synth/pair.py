"""A planted pair as files: target.gguf, draft-qwen3-4b-75.gguf for an acceptance of 75 %, plan.npz, about.json."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from moespac_llamacpp.synth.plan import Plan, make_plan
from moespac_llamacpp.synth.shapes import SHAPES, TINY, Shape, Tensor, tensors
from moespac_llamacpp.synth.vocabulary import Vocabulary, make_vocabulary
from moespac_llamacpp.synth.weights import DraftWeights, Floats, Random, TargetWeights, code_width, quantize_rows
from moespac_llamacpp.synth.writer import Progress, check_room, write_gguf

PROMPT_WORDS = 512


@dataclass(frozen=True)
class Order:
    """What to write. acceptances: one draft file for each. layers: fewer than the model has; None: all."""

    target: str
    quant: str = "Q4_K_M"
    draft: str | None = "qwen3-4b"
    draft_quant: str = "Q8_0"
    acceptances: tuple[float, ...] = (0.75,)
    trace: Path | None = None
    tiny: bool = False
    layers: int | None = None
    seed: int = 0
    drafts_only: bool = False  # another draft for a pair that is there: the same target, trace, layers and seed

    def shapes(self) -> tuple[Shape, Shape | None]:
        """ValueError: no such model, or it cannot play this part."""
        target, draft = _shape(self.target, self.tiny), _shape(self.draft, self.tiny) if self.draft else None
        if not target.n_expert:
            raise ValueError(f"{self.target} has no experts: it can only be a draft")
        if draft and draft.n_expert:
            raise ValueError(f"{self.draft} cannot be a draft here: it has experts")
        if self.layers is not None:
            if not target.n_dense < self.layers <= target.n_layer:
                raise ValueError(f"--layers is {self.layers}, it must be from {target.n_dense + 1} to {target.n_layer}")
            if target.arch == "deepseek2" and self.layers not in (26, 27):
                raise ValueError("DeepSeek-V2-Lite keeps 26 or 27 layers: llama.cpp knows it by that number")
            target = replace(target, n_layer=self.layers)
        for acceptance in self.acceptances:
            if not 0 <= acceptance <= 1:
                raise ValueError(f"an acceptance of {acceptance} was asked for: it is a share from 0 to 1")
        # the draft speaks the target's language
        return target, replace(draft, n_vocab=target.n_vocab) if draft else None


def _shape(name: str, tiny: bool) -> Shape:
    if name not in TINY:
        raise ValueError(f"there is no model {name!r} to imitate; there are {', '.join(TINY)}")
    return SHAPES[TINY[name] if tiny else name]


@dataclass(frozen=True)
class Pair:
    """The files of a planted pair."""

    folder: Path

    @property
    def target(self) -> Path:
        return self.folder / "target.gguf"

    def draft(self, acceptance: float, name: str) -> Path:
        return self.folder / f"draft-{name}-{100 * acceptance:g}.gguf"

    @property
    def drafts(self) -> list[Path]:
        return sorted(self.folder.glob("draft-*.gguf"))

    @property
    def prompt_file(self) -> Path:
        """The first words of the chain, as a prompt for other programs."""
        return self.folder / "prompt.txt"

    @property
    def plan_file(self) -> Path:
        return self.folder / "plan.npz"

    def plan(self) -> Plan:
        return Plan.load(self.plan_file)

    @property
    def about(self) -> dict[str, object]:
        """What was ordered, and what verification found. ValueError: there is no pair in the folder."""
        try:
            return dict(json.loads((self.folder / "about.json").read_text()))
        except (OSError, ValueError) as error:
            raise ValueError(f"{self.folder}: there is no pair that `moespac synth` wrote") from error


def _check_same(pair: Pair, plan: Plan) -> None:
    """ValueError: the pair was written from another plan."""
    there = pair.plan()
    if not all(np.array_equal(getattr(there, name), value) for name, value in vars(plan).items()):
        raise ValueError(
            f"{pair.folder}: its target was made for other routing: give the same model, --trace and --seed"
        )


class _Planted(Protocol):
    def embedding(self, part: slice) -> Floats: ...
    def output(self, part: slice) -> Floats: ...


def write_pair(order: Order, folder: Path, label: Callable[[str], Progress]) -> Pair:
    """Writes the files. label: called with each file's name, gives what its progress (0 … 1) is told to.

    RoomError: not enough disk or memory; ValueError: what was ordered cannot be made."""
    target, draft = order.shapes()
    vocabulary = make_vocabulary(target.n_vocab)
    plan = make_plan(target, vocabulary.words, order.trace, target.n_embd - code_width(target.n_embd), order.seed)
    folder.mkdir(parents=True, exist_ok=True)
    target_tensors = list(tensors(target, order.quant))
    draft_tensors = list(tensors(draft, order.draft_quant)) if draft else []
    n_bytes = 0 if order.drafts_only else sum(t.n_bytes for t in target_tensors)
    n_bytes += len(order.acceptances) * sum(t.n_bytes for t in draft_tensors)
    largest: dict[tuple[int, ...], int] = {t.shape: t.n_bytes for t in target_tensors}
    check_room(folder, n_bytes, 3 * sum(largest.values()) + (1 << 28))
    pair = Pair(folder)
    if order.drafts_only:
        _check_same(pair, plan)
    else:
        weights = TargetWeights(target, plan, order.seed)
        _write(
            pair.target,
            target,
            order.quant,
            vocabulary,
            target_tensors,
            weights,
            label(pair.target.name),
            weights.router,
        )
    if draft:
        for acceptance in order.acceptances:
            path = pair.draft(acceptance, draft.name)
            own = DraftWeights(draft, plan, plan.misses(acceptance, order.seed + 1), order.seed)
            _write(path, draft, order.draft_quant, vocabulary, draft_tensors, own, label(path.name))
    if order.drafts_only:
        return pair
    plan.save(pair.plan_file)
    pair.prompt_file.write_text(vocabulary.text(plan.chain[:PROMPT_WORDS].tolist()))
    about = {
        "target": target.name,
        "quant": order.quant,
        "layers": target.n_layer,
        "draft": draft.name if draft else None,
        "draft_quant": order.draft_quant,
        "acceptances": order.acceptances,
        "routing": plan.routing,
        "seed": order.seed,
    }
    (folder / "about.json").write_text(json.dumps(about, indent=1) + "\n")
    return pair


def _write(
    path: Path,
    shape: Shape,
    quant: str,
    vocabulary: Vocabulary,
    parts: Sequence[Tensor],
    planted: _Planted,
    progress: Progress,
    router: Callable[[int], Floats] | None = None,
) -> None:
    random = Random()

    def data(tensor: Tensor) -> NDArray[np.uint8]:
        if tensor.kind == "ones":
            return np.ones(tensor.shape, np.float32).view(np.uint8)
        if tensor.kind == "router":
            assert router is not None
            return router(tensor.layer - shape.n_dense).view(np.uint8)
        if tensor.kind in ("embedding", "output"):
            make = planted.embedding if tensor.kind == "embedding" else planted.output
            return quantize_rows(tensor.shape[0], tensor.shape[1], tensor.type, make)
        return random(tensor)

    write_gguf(path, shape, quant, vocabulary, parts, data, progress)
