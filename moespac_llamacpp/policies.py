"""Which experts should be resident: the interface, the plain policies, and all of them by name.

numpy only: the same objects run live and in the simulator. The interface and the planner are in planning.py, the rivals'
policies in rivals.py, MoE-SpAc's in spac.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moespac_llamacpp.planning import Batch, Limits, Move, Policy, Table, plan_moves
from moespac_llamacpp.popularity import DECAY, Prior
from moespac_llamacpp.rivals import ByRecency, Fiddler, HybriMoe, MixtralOffload, MoeInfinity
from moespac_llamacpp.spac import MoeSpac
from moespac_llamacpp.utility import SEED_WEIGHT, Adaptive, Integer, TokenMemory

__all__ = ["NAMES", "Batch", "Decayed", "Lfu", "Limits", "Lru", "Move", "Policy", "Static", "make"]


@dataclass(frozen=True)
class Options:
    """What `make` may be told, see there."""

    profile: NDArray[np.float64] | None = None
    frequency: bool = True
    balanced: bool = True


class Static:
    """Places a profile once, best experts first, and keeps it; without a profile it keeps what is resident.

    profile: [n_rows, n_expert], how often each expert is used."""

    def __init__(self, profile: NDArray[np.float64] | None = None) -> None:
        self.profile: Table | None = None if profile is None else np.asarray(profile, np.float64)

    def observe(self, batch: Batch) -> None:
        pass

    def expect(self, tokens: Sequence[int]) -> None:
        pass

    def plan(self, resident: NDArray[np.bool_], limits: Limits) -> list[Move]:
        if self.profile is None:
            return []
        return plan_moves(self.profile, resident, limits.n_slots, limits.max_moves, 0.0)


class Lru(ByRecency):
    """The experts that were used last, per layer. Within a batch the later token counts as later, then the better router
    rank."""

    def plan(self, resident: NDArray[np.bool_], limits: Limits) -> list[Move]:
        return plan_moves(self.recency.last, resident, limits.n_slots, limits.max_moves, 0.0)


class Decayed:
    """Decayed frequency: counts of all decoded tokens, rejected drafts too, fading by `decay` per token.

    A swap must gain more than `hysteresis` fading counts. 0.955 (half-life 15 tokens) was within a point of the best history
    policy on all traces but one cell; hysteresis 0.5 saves a quarter of the moves for 0.1 to 0.2 points of hits.
    """

    def __init__(self, n_rows: int, n_expert: int, *, decay: float = DECAY, hysteresis: float = 0.5) -> None:
        self.prior = Prior(n_rows, n_expert, decay)
        self.hysteresis = hysteresis

    @property
    def score(self) -> Table:
        return self.prior.counts

    def observe(self, batch: Batch) -> None:
        self.prior.observe(batch)

    def expect(self, tokens: Sequence[int]) -> None:
        pass

    def plan(self, resident: NDArray[np.bool_], limits: Limits) -> list[Move]:
        return plan_moves(self.score, resident, limits.n_slots, limits.max_moves, self.hysteresis)

    def worth(self) -> Table:
        return self.score

    def use(self) -> Table:
        return self.prior.mean()

    def seed(self, use: Table) -> None:
        self.prior.seed(use, SEED_WEIGHT)


class Lfu(Decayed):
    """Plain counts since the start."""

    def __init__(self, n_rows: int, n_expert: int) -> None:
        super().__init__(n_rows, n_expert, decay=1.0, hysteresis=0.0)


#: name: (n_rows, n_expert, options) -> policy
_MAKERS: dict[str, Callable[[int, int, Options], Policy]] = {
    "static": lambda r, e, o: Static(o.profile),
    "lru": lambda r, e, o: Lru(r, e),
    "lfu": lambda r, e, o: Lfu(r, e),
    "decayed": lambda r, e, o: Decayed(r, e, hysteresis=0.0),
    "moe-spac": lambda r, e, o: MoeSpac(TokenMemory(r, e, frequency=o.frequency), balanced=o.balanced),
    "moe-spac-adaptive": lambda r, e, o: MoeSpac(Adaptive(r, e), balanced=o.balanced),
    "moe-spac-released": lambda r, e, o: MoeSpac(Integer(r, e), balanced=o.balanced),
    "moe-spac-no-frequency": lambda r, e, o: MoeSpac(TokenMemory(r, e, frequency=False), balanced=o.balanced),
    "moe-spac-no-balancer": lambda r, e, o: MoeSpac(TokenMemory(r, e, frequency=o.frequency), balanced=False),
    "fiddler": lambda r, e, o: Fiddler(r, e, o.profile),
    "mixtral-offload": lambda r, e, o: MixtralOffload(r, e),
    "moe-infinity": lambda r, e, o: MoeInfinity(r, e),
    "hybrimoe": lambda r, e, o: HybriMoe(r, e),
}
NAMES = tuple(_MAKERS)


def make(
    name: str,
    n_rows: int,
    n_expert: int,
    *,
    profile: NDArray[np.float64] | None = None,
    frequency: bool = True,
    balanced: bool = True,
) -> Policy:
    """A policy by its name (NAMES). profile: for static and fiddler. frequency, balanced False: ablations of moe-spac.

    ValueError: no such policy (with those that there are), or one that has no such part to switch off."""
    if name not in _MAKERS:
        raise ValueError(f"there is no policy {name!r}; there are {', '.join(NAMES)}")
    if not frequency and name not in ("moe-spac", "moe-spac-no-frequency", "moe-spac-no-balancer"):
        raise ValueError(f"frequency can be switched off for moe-spac only, not for {name}")
    if not balanced and not name.startswith("moe-spac"):
        raise ValueError(f"{name} has no balancer that could be switched off")
    return _MAKERS[name](n_rows, n_expert, Options(profile, frequency, balanced))
