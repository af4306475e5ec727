"""How many slots each MoE block gets. Integer arithmetic only: no ctypes, no llama_cpp."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

#: Slots of each block: what is expected of them, in seconds, by one or more guesses.
Pace = Callable[[Sequence[int]], Sequence[float]]


@dataclass(frozen=True)
class BlockSize:
    """What the plan needs to know of a row: `expert_bytes` is what one slot takes; `hybrid` False: it cannot have slots."""

    n_expert: int
    expert_bytes: int
    hybrid: bool


def slots_for_share(blocks: Sequence[BlockSize], share: float) -> list[int]:
    """The same share of every block's experts, rounded to whole slots (at least one unless the share is 0).

    share: 0 … 1. ValueError outside."""
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"the cache share is {share}, it must be from 0 to 1")
    return [max(1, round(share * b.n_expert)) if b.hybrid and share > 0 else 0 for b in blocks]


def slots_for_bytes(blocks: Sequence[BlockSize], budget: int) -> list[int]:
    """The most even split of `budget` bytes: one slot for each block in turn, as long as the next one fits.

    Blocks whose experts are larger than what is left are passed over. ValueError for a negative budget."""
    if budget < 0:
        raise ValueError(f"the expert budget is {budget} bytes, it cannot be negative")
    slots = [0] * len(blocks)
    while True:
        # blocks that still have experts without a slot, and room for one
        open_blocks = [
            i for i, b in enumerate(blocks) if b.hybrid and slots[i] < b.n_expert and 0 < b.expert_bytes <= budget
        ]
        if not open_blocks:
            return slots
        # as many whole rounds as fit; then, where not even one does, one turn that gives as far as it goes
        round_bytes = sum(blocks[i].expert_bytes for i in open_blocks)
        rounds = max(1, min(budget // round_bytes, *(blocks[i].n_expert - slots[i] for i in open_blocks)))
        for i in open_blocks:
            if rounds * blocks[i].expert_bytes <= budget:
                slots[i] += rounds
                budget -= rounds * blocks[i].expert_bytes


def slots_for_time(blocks: Sequence[BlockSize], budget: int, pace: Pace) -> list[int]:
    """The fastest split of `budget` bytes in which some blocks are whole (a slot for each expert) and the others share the rest
    evenly. Never slower than the even split, by any guess of `pace`; blocks of the fewest bytes become whole first.

    ValueError for a negative budget."""
    best = slots_for_bytes(blocks, budget)
    even = least = list(pace(best))
    others = list(blocks)
    whole = [0] * len(blocks)
    for i in sorted(range(len(blocks)), key=lambda i: blocks[i].n_expert * blocks[i].expert_bytes):
        block = blocks[i]
        if not block.hybrid or block.expert_bytes <= 0:
            continue
        budget -= block.n_expert * block.expert_bytes
        if budget < 0:
            break
        others[i], whole[i] = BlockSize(block.n_expert, block.expert_bytes, hybrid=False), block.n_expert
        split = [w + n for w, n in zip(whole, slots_for_bytes(others, budget), strict=True)]
        seconds = list(pace(split))
        if sum(seconds) < sum(least) and all(a <= b for a, b in zip(seconds, even, strict=True)):
            best, least = split, seconds
    return best


def parse_bytes(text: str) -> int:
    """ "8G", "512M", "1.5G" or plain bytes; units are powers of 1024. ValueError with the sentence for the user."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    number, unit = (text[:-1], text[-1].upper()) if text and text[-1].upper() in units else (text, "")
    try:
        value = float(number) * units.get(unit, 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1 << 62:
        raise ValueError(f"{text!r} is not a size: give bytes or a number with K, M or G, such as 8G")
    return int(value)
