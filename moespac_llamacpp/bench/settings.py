"""What can be set on either side, and which settings a comparison tries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

STOCK, OURS = "stock", "ours"
MAX_DRAFT = 31  # both sides' contexts are made for the logits of 32 tokens
MEMORIES = ("pinned", "mmap", "repacked")

#: A planted model's routers are foreseen nearly always; those of real models, by the layer before, in 79 to 89 % of the choices
#: (docs/comparison.md). So in comparisons of planted models so large a share of the look-ahead's guesses is spoilt.
PLANTED_WRONG_GUESSES = 0.2


@dataclass(frozen=True)
class Setting:
    """One way to generate. draft: a file's stem, "ngram", or None. draft_extra: the draft's bytes are not taken from the share.
    memory: of the experts that stay in host memory (ours: always pinned). fixed: always n_draft guesses."""

    side: str
    threads: int
    share: float
    draft: str | None = None
    n_draft: int = 0
    draft_extra: bool = True
    memory: str = "pinned"
    fixed: bool = True
    policy: str = "moe-spac"
    max_moves: int | None = None  # uploads a step; None: as users have it
    sync_moves: bool = False  # the ablation in which a step waits for its uploads

    def label(self) -> str:
        drafting = "no draft" if self.draft is None else f"{self.draft} {'' if self.fixed else 'up to '}{self.n_draft}"
        how = f"memory {self.memory}" if self.side == STOCK else f"policy {self.policy}"
        if self.sync_moves:
            how += ", sync moves"
        return f"{self.side} {100 * self.share:g} % t{self.threads}, {drafting}, {how}"


@dataclass(frozen=True)
class Choices:
    """What is tried. drafts: stems of draft files. lengths: of fixed drafts; upto: bound of ours when it chooses itself."""

    drafts: tuple[str, ...]
    lengths: tuple[int, ...] = (2, 3, 4, 6, 8)
    upto: int = 8
    memories: tuple[str, ...] = MEMORIES
    policies: tuple[str, ...] = ("moe-spac",)
    ngram: bool = False
    extra: tuple[Setting, ...] = field(default=())


def readable(draft: str | None) -> str:
    """Of a planted draft's stem: "draft-qwen3-4b-75" is "qwen3-4b 75 %"."""
    if draft is None:
        return "no draft"
    name, _, percent = draft.removeprefix("draft-").rpartition("-")
    return f"{name} {percent} %" if name else draft


def near(threads: int) -> list[int]:
    """Thread counts that may be better than all: one core for who launches, or fewer that fight for memory."""
    return sorted({max(1, threads - 1), max(1, 3 * threads // 4)} - {threads})


def with_draft(base: Setting, drafts: Sequence[str], lengths: Sequence[int]) -> list[Setting]:
    return [replace(base, draft=draft, n_draft=n) for draft in drafts for n in lengths]


def candidates(
    side: str, threads: int, share: float, choices: Choices, *, plain: bool, drafting: bool, draft_extra: bool
) -> list[Setting]:
    """All settings of a side. plain: without a draft; drafting: with one of at least 2 tokens."""
    found: list[Setting] = []
    bases = (
        [Setting(side, threads, share, draft_extra=draft_extra, memory=m) for m in choices.memories]
        if side == STOCK
        else [Setting(side, threads, share, draft_extra=draft_extra, policy=p) for p in choices.policies]
    )
    for base in bases:
        if plain:
            found.append(base)
        if drafting:
            found += with_draft(base, choices.drafts, [n for n in choices.lengths if n >= 2])
        # left to itself, ours may choose not to draft at all
        if plain and drafting and side == OURS:
            found += [replace(s, fixed=False) for s in with_draft(base, choices.drafts, [choices.upto])]
        if plain and side == OURS and choices.ngram:
            found.append(replace(base, draft="ngram", n_draft=choices.upto, fixed=False))
    return found
