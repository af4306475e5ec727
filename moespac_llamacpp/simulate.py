"""Replays a routing trace through a policy: what it would hit, move and cost. numpy only, no model.

    python -m moespac_llamacpp.simulate TRACE --policy moe-spac --cache-share 0.25 --batch 4

Two kinds of trace: with `step` and `accepted` (verify batches as they were decoded, see `load`), and plain sequences of
tokens, which are cut into batches of n consecutive ones. Predicted times come from a model of one machine (hardware.py),
not from a run; experts that cross the link in mid-decode take their time there, but their place only by the policy's moves.

When moves land (`Landing`), as residency.py does it:

- "same": a draft model guesses the batch's tokens, the policy hears them, plans, and its moves arrive before the batch.
- "next": no time passes between two batches. A plan is made while the batch before is decoded, so it knows all batches but
that one;
  its victims leave before the batch, and what it uploads arrives after it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from moespac_llamacpp import policies, slots
from moespac_llamacpp.hardware import H200, Hardware, Work
from moespac_llamacpp.planning import Batch, Limits, Policy, Table, plan_moves
from moespac_llamacpp.spac import MoeSpac

Landing = Literal["same", "next"]


def read_hardware(path: Path) -> Hardware:
    """A profile from a JSON file with the fields of Hardware; those with a default may be missing. ValueError with the sentence
    for the user."""
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a JSON file: {error}") from error
    names = [f.name for f in fields(Hardware)]
    needed = {f.name for f in fields(Hardware) if f.default is MISSING}
    if not isinstance(given, dict) or not needed <= set(given) <= set(names):
        raise ValueError(f"{path}: a hardware profile has exactly these fields: {', '.join(names)}")
    for name in set(given) - {"name"}:
        value = given[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise ValueError(f"{path}: {name} is {value!r}, it must be a number, 0 or more")
    if not given["expert_bytes"] or not given["link_bytes"]:
        raise ValueError(f"{path}: expert_bytes and link_bytes must be above 0")
    whole = {name: int(given[name]) for name in ("expert_bytes", "streams") if name in given}
    return Hardware(**{**given, "name": str(given["name"]), **whole})


@dataclass(frozen=True)
class Step:
    """One batch of a trace; `measured` False: it is observed and may cause moves, but is not counted (prompts)."""

    batch: Batch
    measured: bool


@dataclass(frozen=True)
class Result:
    """Hit rates in %, moves and bytes per step; predicted_ms is the mean over the measured steps."""

    policy: str
    landing: Landing
    cache_share: float
    batch: int
    max_moves: int
    n_steps: int
    pair_hit: float
    expert_hit: float
    moves_per_step: float
    bytes_per_step: float
    predicted_ms: float
    clairvoyant_pair_hit: float


#: How much a use counts for that lies a step further ahead.
FORESIGHT = (0.0, 0.35, 0.5, 0.65)


class Clairvoyant:
    """Knows all batches to come, and keeps the experts with the most uses in them, uses fading by `fade` a step; fade 0 looks at
    the next batch only. With enough moves that is the best for a step; under a cap, looking further ahead is better."""

    def __init__(self, steps: Sequence[Step], fade: float) -> None:
        self._ahead: list[Table] = []  # by step, from the last to the one that comes next
        table: Table = np.zeros(steps[0].batch.counts.shape)
        for step in reversed(steps):
            table = step.batch.counts + fade * table
            self._ahead.append(table)

    def observe(self, batch: Batch) -> None:
        self._ahead.pop()

    def expect(self, tokens: Sequence[int]) -> None:
        pass

    def plan(self, resident: NDArray[np.bool_], limits: Limits) -> list[policies.Move]:
        return plan_moves(self._ahead[-1], resident, limits.n_slots, limits.max_moves, 0.0)


def clairvoyant_hit(steps: Sequence[Step], n_slots: int, max_moves: int) -> float:
    """Pairs that hit, %, of the best of the clairvoyants (FORESIGHT), with moves in time. None that was tried is better; that
    none could be is proven only where moves are not capped."""
    return max(replay(steps, Clairvoyant(steps, fade), n_slots, max_moves).pair_hit for fade in FORESIGHT)


def _arrays(path: Path) -> dict[str, NDArray[Any]]:
    """All arrays of a .npz file. ValueError: it is none."""
    try:
        with np.load(path) as z:
            return {name: z[name] for name in z.files}
    except (ValueError, TypeError, AttributeError, EOFError, BadZipFile) as error:  # whatever numpy takes it for
        raise ValueError(f"{path}: not a file that `moespac trace` wrote") from error


def load(path: Path, batch: int | None = None, *, limit: int | None = None) -> list[Step]:
    """Steps of a `.npz` trace: the arrays of routing.py; of these experts and n_expert are needed, and is_prompt stands for not
    is_decode. Optional: position (in the context; 0 starts a sequence), and for verify batches step, accepted, draft_len.

    batch None: the verify batches that the trace holds (`step`, `accepted`); ValueError if it holds none. batch n: n
    consecutive tokens of the text (rejected drafts are left out, as if all of n drafts had been accepted). Prompts are
    cut to the same width. limit: the first so many rows only. ValueError for what is no trace."""
    data = {name: array[:limit] if array.ndim else array for name, array in _arrays(path).items()}
    if not {"experts", "n_expert"} <= data.keys():
        raise ValueError(f"{path} is no routing trace: it lacks the arrays experts and n_expert")
    n_expert = int(data["n_expert"])
    ids = data["experts"]
    n = len(ids)
    prompt = data["is_prompt"] if "is_prompt" in data else ~data["is_decode"].astype(bool)
    starts = data["position"] == 0 if "position" in data else np.arange(n) == 0
    tokens = data.get("token")
    accepted = data["accepted"] if "accepted" in data else np.ones(n, np.bool_)
    if batch is None:
        if "step" not in data:
            raise ValueError(f"{path} holds no verify batches: say how many tokens a batch shall have")
        group, width = data["step"], int(data["draft_len"]) + 1
    else:
        if batch < 1:
            raise ValueError(f"a batch has at least one token, not {batch}")
        if not accepted.all():
            kept = np.flatnonzero(accepted)
            ids, prompt, starts, n = ids[kept], prompt[kept], starts[kept], len(kept)
            tokens = None if tokens is None else tokens[kept]
        # a batch does not cross from a prompt to its answer, nor into the next sequence
        new = np.r_[False, prompt[1:] != prompt[:-1]] | starts
        accepted, group, width = np.ones(n, np.bool_), np.cumsum(new), batch
    return list(_cut(ids, n_expert, group, width, tokens, accepted, starts, prompt))


def _cut(
    ids: NDArray[np.unsignedinteger],
    n_expert: int,
    group: NDArray[np.int32],
    width: int,
    tokens: NDArray[np.int32] | None,
    accepted: NDArray[np.bool_],
    starts: NDArray[np.bool_],
    prompt: NDArray[np.bool_],
) -> Iterator[Step]:
    edges = np.flatnonzero(np.diff(group)) + 1
    for begin, end in zip(np.r_[0, edges].tolist(), np.r_[edges, len(group)].tolist(), strict=True):
        for i in range(begin, end, width):
            j = min(i + width, end)
            batch = Batch.from_ids(
                ids[i:j],
                n_expert,
                tokens=None if tokens is None else tokens[i:j],
                accepted=accepted[i:j],
                starts=bool(starts[i]),
            )
            yield Step(batch, not prompt[i])


@dataclass(frozen=True)
class Replay:
    """What a policy did over the measured steps. Hit rates in %."""

    n_steps: int
    pair_hit: float
    expert_hit: float
    moves_per_step: float
    predicted_ms: float


def replay(
    steps: Sequence[Step],
    policy: Policy,
    n_slots: int,
    max_moves: int,
    *,
    hardware: Hardware = H200,
    window: float | None = None,
    sync_moves: bool = False,
    landing: Landing = "same",
    resplit: bool = False,
) -> Replay:
    """Every row that the target computed counts, rejected drafts too. Starts with the first n_slots experts of each layer.

    window: seconds of idle link a step, for policies that ask. sync_moves: steps wait for their moves, which so arrive in time.
    resplit: slots follow the demand of policies that tell it, as live.
    RuntimeError for a plan that cannot be carried out."""
    n_rows, n_expert = steps[0].batch.counts.shape
    expert_bytes = np.full(n_rows, hardware.expert_bytes, np.int64)
    late = landing == "next" and not sync_moves
    limits = Limits(np.full(n_rows, n_slots, np.int32), max_moves, window, expert_bytes, late)
    resident = np.zeros((n_rows, n_expert), np.bool_)
    resident[:, :n_slots] = True
    ahead: list[policies.Move] = []  # planned while the last batch was decoded
    tally = Tally()
    for n, step in enumerate(steps, start=1):
        batch = step.batch
        if late:
            moves = ahead
        else:
            if batch.tokens is not None:  # as live: no time passes between the last guess and the decode
                policy.expect(batch.tokens[:-1].tolist())
            moves = policy.plan(resident, limits)
        carry_out(moves, resident, limits)
        present = resident
        if late and moves:
            present = resident.copy()
            present[[m.row for m in moves], [m.expert for m in moves]] = False
        if step.measured:
            tally.add(batch, present, limits.n_slots, len(moves), hardware, sync_moves)
        if resplit and n % slots.EVERY == 0 and isinstance(policy, MoeSpac):
            limits = follow_demand(policy, resident, limits, n)
        if late:
            ahead = policy.plan(resident, limits)
        policy.observe(batch)
    return tally.result()


@dataclass
class Tally:
    """Sums over the measured steps."""

    n_steps: int = 0
    n_moves: int = 0
    pairs: int = 0
    pair_hits: int = 0
    experts: int = 0
    expert_hits: int = 0
    ms: float = 0.0

    def add(
        self,
        batch: Batch,
        present: NDArray[np.bool_],
        n_slots: NDArray[np.int32],
        n_moves: int,
        hardware: Hardware,
        sync: bool,
    ) -> None:
        used = batch.counts > 0
        row_pairs, row_hits = batch.counts.sum(axis=1), np.where(present, batch.counts, 0).sum(axis=1)
        row_used, row_found = used.sum(axis=1), (used & present).sum(axis=1)
        self.n_steps += 1
        self.n_moves += n_moves
        self.pairs += int(row_pairs.sum())
        self.pair_hits += int(row_hits.sum())
        self.experts += int(row_used.sum())
        self.expert_hits += int(row_found.sum())
        cold_experts, cold_pairs, free = row_used - row_found, row_pairs - row_hits, n_slots - row_found
        work = Work(batch.n_tokens, cold_experts, cold_pairs, row_found, row_hits, free)
        self.ms += hardware.step_ms(work, n_moves, sync_moves=sync)

    def result(self) -> Replay:
        n = self.n_steps
        if not n:
            raise ValueError("the trace has no generated tokens to measure")
        pair_hit, expert_hit = 100 * self.pair_hits / self.pairs, 100 * self.expert_hits / self.experts
        return Replay(n, pair_hit, expert_hit, self.n_moves / n, self.ms / n)


def follow_demand(policy: MoeSpac, resident: NDArray[np.bool_], limits: Limits, seed: int) -> Limits:
    """Another split of the slots, as Residency would make it. Rows that shrink lose residents: any, since the library keeps
    those in the slots that remain."""
    demand = policy.demand()
    assert limits.expert_bytes is not None
    n_expert = np.full(len(resident), resident.shape[1], np.int32)
    split = None if demand is None else slots.resplit(limits.n_slots, demand, limits.expert_bytes, n_expert)
    if split is None:
        return limits
    rng = np.random.default_rng(seed)
    for row in np.flatnonzero(split < limits.n_slots).tolist():
        held = rng.permutation(np.flatnonzero(resident[row]))
        resident[row, held[split[row] :]] = False
    return replace(limits, n_slots=split)


def carry_out(moves: Sequence[policies.Move], resident: NDArray[np.bool_], limits: Limits) -> None:
    """Applies moves to `resident`; RuntimeError where one breaks the contract."""
    if len(moves) > limits.max_moves:
        raise RuntimeError(f"{len(moves)} moves planned where {limits.max_moves} are allowed")
    for m in moves:
        if m.victim is not None and not resident[m.row, m.victim]:
            raise RuntimeError(f"row {m.row}: victim {m.victim} is not resident")
        if resident[m.row, m.expert]:
            raise RuntimeError(f"row {m.row}: expert {m.expert} is resident already")
        if m.victim is not None:
            resident[m.row, m.victim] = False
        resident[m.row, m.expert] = True
        if resident[m.row].sum() > limits.n_slots[m.row]:
            raise RuntimeError(f"row {m.row}: more residents than its {limits.n_slots[m.row]} slots")


def profile_of(steps: Sequence[Step], name: str) -> NDArray[np.float64] | None:
    """static knows the whole trace by hindsight (the best that popularity could know); fiddler its prompts, if there are
    enough."""
    if name == "static":
        return _sum([s.batch for s in steps if s.measured])
    if name == "fiddler":
        prompts = [s.batch for s in steps if not s.measured]
        if sum(b.n_tokens for b in prompts) >= 1000:
            return _sum(prompts)
    return None


def _sum(batches: Sequence[Batch]) -> NDArray[np.float64]:
    total = np.zeros(batches[0].counts.shape)
    for batch in batches:
        total += batch.counts
    return total


def simulate(
    steps: Sequence[Step],
    names: Sequence[str],
    cache_share: float,
    max_moves: int | None = None,
    *,
    hardware: Hardware = H200,
    window: float | None = None,
    sync_moves: bool = False,
    landing: Landing | None = None,
    resplit: bool = True,
    frequency: bool = True,
    balanced: bool = True,
) -> list[Result]:
    """All named policies, and the clairvoyant, at the same cache share and cap of moves (None: 2 % of all experts a step).

    cache_share above 0 to 1. landing None: as live, "next" for single tokens, "same" for batches, which a draft model made.
    frequency, balanced False: without these parts of moe-spac, where a policy has them.
    ValueError: a cache share outside, a name that no policy has."""
    if not 0 < cache_share <= 1:
        raise ValueError(f"the cache share is {cache_share}, it must be above 0 and at most 1")
    n_rows, n_expert = steps[0].batch.counts.shape
    n_slots = max(1, round(cache_share * n_expert))
    cap = max(1, round(0.02 * n_rows * n_expert)) if max_moves is None else max_moves
    made = [(n, policy_for(n, steps, frequency=frequency, balanced=balanced)) for n in names]
    bound = clairvoyant_hit(steps, n_slots, cap)
    width = max(s.batch.n_tokens for s in steps if s.measured)
    landing = landing or ("next" if width == 1 else "same")
    results = []
    for name, policy in made:
        r = replay(
            steps,
            policy,
            n_slots,
            cap,
            hardware=hardware,
            window=window,
            sync_moves=sync_moves,
            landing=landing,
            resplit=resplit,
        )
        results.append(
            Result(
                policy=name,
                landing=landing,
                cache_share=cache_share,
                batch=width,
                max_moves=cap,
                n_steps=r.n_steps,
                pair_hit=r.pair_hit,
                expert_hit=r.expert_hit,
                moves_per_step=r.moves_per_step,
                bytes_per_step=r.moves_per_step * hardware.expert_bytes,
                predicted_ms=r.predicted_ms,
                clairvoyant_pair_hit=bound,
            )
        )
    return results


def policy_for(name: str, steps: Sequence[Step], *, frequency: bool = True, balanced: bool = True) -> Policy:
    """A policy by its name, with the profile that it gets in replays. frequency, balanced False: where it has them."""
    n_rows, n_expert = steps[0].batch.counts.shape
    profile = profile_of(steps, name)
    return policies.make(
        name,
        n_rows,
        n_expert,
        profile=profile,
        frequency=frequency or name != "moe-spac",
        balanced=balanced or not name.startswith("moe-spac"),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="moespac simulate", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("trace", type=Path, help="a routing trace (.npz), as `moespac trace` writes it")
    parser.add_argument("--policy", action="append", choices=policies.NAMES, help="repeatable (default: all)")
    parser.add_argument("--cache-share", type=float, default=0.25, help="share of each layer's experts with a slot")
    parser.add_argument("--batch", type=int, help="tokens per batch (default: the verify batches of the trace, else 1)")
    parser.add_argument("--max-moves", type=int, help="moves per step over all layers (default: 2 %% of all experts)")
    parser.add_argument("--limit", type=int, help="only the first so many rows of the trace")
    parser.add_argument(
        "--landing",
        choices=get_args(Landing),
        help="when moves land: before the batch that they were planned for, or after it (default: as live, next for single "
        "tokens, same for batches, which a draft model has guessed)",
    )
    parser.add_argument(
        "--profile", type=Path, help="JSON file with the machine's times (default: an H200 with 16 cores)"
    )
    parser.add_argument(
        "--window-ms", type=float, help="idle time of the link in a step, for moe-spac (default: no limit)"
    )
    parser.add_argument(
        "--no-frequency", action="store_true", help="ablation: moe-spac counts used or not, not how often"
    )
    parser.add_argument("--no-balancer", action="store_true", help="ablation: moe-spac without a threshold")
    parser.add_argument("--sync-moves", action="store_true", help="ablation: each step waits for its moves")
    parser.add_argument("--no-resplit", action="store_true", help="layers keep their slots")
    parser.add_argument("--json", action="store_true", help="one JSON object per policy")
    args = parser.parse_args(arguments)
    try:
        batch = 1 if args.batch is None and "step" not in _arrays(args.trace) else args.batch
        steps = load(args.trace, batch, limit=args.limit)
        names = args.policy or policies.NAMES
        hardware = H200 if args.profile is None else read_hardware(args.profile)
        results = simulate(
            steps,
            names,
            args.cache_share,
            args.max_moves,
            hardware=hardware,
            window=None if args.window_ms is None else args.window_ms / 1e3,
            sync_moves=args.sync_moves,
            landing=args.landing,
            resplit=not args.no_resplit,
            frequency=not args.no_frequency,
            balanced=not args.no_balancer,
        )
    except OSError as error:
        print(f"moespac simulate: {error.filename or args.trace}: cannot be read: {error.strerror}", file=sys.stderr)
        return 1
    except ValueError as error:
        print(f"moespac simulate: {error}", file=sys.stderr)
        return 1
    if args.json:
        for r in results:
            print(json.dumps(asdict(r)))
        return 0
    first = results[0]
    print(
        f"{args.trace.name}: {first.n_steps} steps of up to {first.batch} tokens, {100 * first.cache_share:.0f} % of the experts "
        f"have a slot, at most {first.max_moves} moves a step, which land "
        f"{'before' if first.landing == 'same' else 'after'} the batch that they were planned for\n"
        f"clairvoyant: {first.clairvoyant_pair_hit:.1f} % of pairs. Predicted for: {hardware.name}\n"
    )
    print(f"{'policy':<22} {'pairs %':>8} {'experts %':>9} {'moves':>7} {'MB':>7} {'ms':>7}")
    for r in results:
        print(
            f"{r.policy:<22} {r.pair_hit:8.1f} {r.expert_hit:9.1f} {r.moves_per_step:7.1f} "
            f"{r.bytes_per_step / 1e6:7.0f} {r.predicted_ms:7.2f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
