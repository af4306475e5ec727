"""The rows that a comparison is judged by: what each measures, and what is wanted."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SD, BEST, AR, VERIFY, TTFT, FLOOR = "draft", "best", "plain", "verify", "ttft", "floor"

QWEN, QWEN_BF16, DEEPSEEK = ("qwen3-30b-a3b", "Q4_K_M"), ("qwen3-30b-a3b", "BF16"), ("deepseek-v2-lite", "Q4_K_M")
_TINY = {"tiny-qwen3moe": "qwen3-30b-a3b", "tiny-deepseek2": "deepseek-v2-lite"}


@dataclass(frozen=True)
class Row:
    """kind: SD: both sides draft at least 2 tokens, the draft is extra; BEST: any setting, a draft is paid out of the share;
    AR: no draft; VERIFY: decodes of 9 tokens; TTFT: prompts; FLOOR: ours against what the bytes must take. lengths: of drafts,
    in place of those that the comparison tries."""

    id: str
    what: str
    at_least: float
    aim: float
    kind: str
    share: float
    threads: int = 16
    pair: tuple[str, str] = QWEN
    draft_extra: bool = False
    n_prompt: int = 512
    lengths: tuple[int, ...] = ()

    def fits(self, about: Mapping[str, object]) -> bool:
        """Is it about this pair?"""
        target = str(about["target"])
        return self.pair == (_TINY.get(target, target), about["quant"])


_SD = "TPS against llama.cpp with the same draft, each at its best draft length >= 2"
_BEST = "TPS against the best llama.cpp setting of any kind"

ROWS = {
    row.id: row
    for row in (
        Row("sd-25-t16", f"{_SD}, 25 %, 16 threads", 2.0, 2.8, SD, 0.25),
        Row("best-25-t16", f"{_BEST}, 25 %, 16 threads", 2.2, 3.2, BEST, 0.25),
        Row("ar-25-t16", "TPS without a draft on either side, 25 %, 16 threads", 2.3, 3.4, AR, 0.25),
        Row("verify-25-t16", "one verify step of 9 tokens, 25 %, 16 threads", 3.5, 5.0, VERIFY, 0.25),
        Row("full", "everything resident, against llama.cpp all in VRAM", 0.87, 1.0, BEST, 1.0, draft_extra=True),
        Row("half", "50 %, best against best", 2.0, 3.0, BEST, 0.5),
        Row("sd-17-t16", f"{_SD}, 17 %, 16 threads", 1.7, 2.4, SD, 0.17),
        Row("sd-17-t8", f"{_SD}, 17 %, 8 threads", 2.0, 2.8, SD, 0.17, 8),
        Row("sd-25-t8", f"{_SD}, 25 %, 8 threads", 2.3, 3.2, SD, 0.25, 8),
        Row("best-25-t8", f"{_BEST}, 25 %, 8 threads", 2.6, 4.0, BEST, 0.25, 8),
        Row("ttft-2048", "TTFT of a prompt of 2,048 tokens, against llama.cpp from pinned memory", 1.0, 1.3, TTFT, 0.25,
            n_prompt=2048),
        Row("floor-25", "achieved / floor (bytes over measured bandwidths), 25 %, 16 threads", 0.5, 0.75, FLOOR, 0.25),
        Row("dsv2lite-25-t16", "DeepSeek-V2-Lite, 25 %, against llama.cpp with draft, 16 threads", 1.7, 2.6, SD, 0.25,
            pair=DEEPSEEK),
        Row("bf16-17-t16", "BF16, 17 %, draft 8, against llama.cpp with draft, 24 of 48 layers on both sides", 1.7, 2.6, SD,
            0.17, pair=QWEN_BF16, lengths=(8,)),
    )
}  # fmt: skip

#: The most valuable ones, in order, for a short run.
QUICK = ("sd-25-t16", "best-25-t16", "ar-25-t16", "verify-25-t16", "full", "half")


def choose(names: Sequence[str], about: Mapping[str, object]) -> list[Row]:
    """The named rows, or all that are about this pair. ValueError: no such row, or about another pair."""
    if not names:
        return [row for row in ROWS.values() if row.fits(about)]
    for name in names:
        if name not in ROWS:
            raise ValueError(f"there is no row {name!r}; there are {', '.join(ROWS)}")
        if not ROWS[name].fits(about):
            pair = ROWS[name].pair
            this = f"{about['target']} {about['quant']}"
            raise ValueError(f"row {name} needs a pair of {pair[0]} {pair[1]}, this one is {this}")
    return [ROWS[name] for name in names]


def save(path: Path, results: Sequence[Mapping[str, Any]]) -> None:
    """Writes the rows' results; those of other rows that the file has stay."""
    there = {r["id"]: r for r in json.loads(path.read_text())} if path.exists() else {}
    there |= {r["id"]: dict(r) for r in results}
    ordered = [there[name] for name in ROWS if name in there]
    path.write_text(json.dumps(ordered, indent=1) + "\n")
