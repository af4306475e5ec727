"""What is planted: which token follows which, what the draft believes, and which experts every token chooses.

Words of the vocabulary form two chains. The *main* chain is the text: each word is followed by the next. Where the draft is
to be wrong, it believes in a word of the *decoy* chain instead, and goes on there until it is corrected; decoys have routing of
their own. No word occurs twice in the main chain, so a measured text is never one that was seen before.

Routing replays a trace lap by lap, perturbed. Each lap is of a *variant* of the trace, in which some experts of each layer have
changed places, so that frequencies drift. And a token chooses what its trace token chose, in which one or two experts a layer are
replaced, by the *atom* of its lap and by one of its own. An atom names, for some layers, an expert drawn from the layer's own
frequencies, which every token of the atom chooses in place of its lowest-ranked one.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from moespac_llamacpp.synth.shapes import Shape

Ids = NDArray[np.int32]
#: Of the experts per layer, about so many are replaced by an atom of each kind.
PERTURB = 0.05
#: Share of a layer's experts that change places in a variant, so that laps differ as much as the two halves of the trace of
#: Qwen3-30B-A3B do (docs/comparison.md); and how many variants there are, room permitting.
DRIFT, N_VARIANT = 0.1, 6
#: The draft is wrong at exact shares of so many words, so that short texts have the acceptance that was asked for.
BLOCK = 20
MAIN_SHARE = 2 / 3


@dataclass(frozen=True)
class Plan:
    """chain, decoys: word ids in order, each a cycle. base: int16 [n_base, layer, k] in rank order, what the tokens of the trace
    and of its variants choose.
    boost: int16 [n_atom, layer], an expert or -1. Of each token of the vocabulary, int32 [n_vocab]: base_of, lap_atom,
    own_atom."""

    chain: Ids
    decoys: Ids
    base: NDArray[np.int16]
    boost: NDArray[np.int16]
    base_of: Ids
    lap_atom: Ids
    own_atom: Ids
    layers: Ids  # index of each MoE layer
    n_expert: int
    routing: str  # where it comes from, in words

    def experts(self, tokens: Ids) -> NDArray[np.int16]:
        """The experts of each token, int16 [n, layer, k]: boosted ones first, then the trace token's by rank."""
        base = self.base[self.base_of[tokens]]
        k = base.shape[2]
        score = np.zeros((*base.shape[:2], self.n_expert), np.float32)
        np.put_along_axis(score, base.astype(np.int64), rank_values(k)[None, None], axis=2)
        for atoms in (self.lap_atom, self.own_atom):
            boost = self.boost[atoms[tokens]].astype(np.int64)
            row, layer = np.nonzero(boost >= 0)
            score[row, layer, boost[row, layer]] += BOOST
        return np.asarray(np.argsort(-score, axis=2, kind="stable")[:, :, :k], np.int16)

    def misses(self, acceptance: float, seed: int = 1) -> NDArray[np.bool_]:
        """bool [len(chain)]: after which words of the chain the draft is wrong; the same share of every BLOCK words."""
        rng = np.random.default_rng(seed)
        n_block = -(-len(self.chain) // BLOCK)
        wrong = (1 - acceptance) * BLOCK
        count = np.floor(wrong * np.arange(1, n_block + 1) + 0.5) - np.floor(wrong * np.arange(n_block) + 0.5)
        order = np.argsort(rng.random((n_block, BLOCK)), axis=1)
        return np.asarray((order < count[:, None]).ravel()[: len(self.chain)])

    def save(self, path: Path) -> None:
        np.savez_compressed(path, **vars(self))

    @staticmethod
    def load(path: Path) -> Plan:
        """ValueError with one sentence if it is not a plan."""
        try:
            with np.load(path) as file:
                values = {name: file[name] for name in Plan.__dataclass_fields__}
        except (OSError, KeyError, ValueError) as error:
            raise ValueError(
                f"{path}: not the plan of a planted pair ({error}): write one with moespac synth"
            ) from error
        return Plan(**(values | {"n_expert": int(values["n_expert"]), "routing": str(values["routing"])}))


BOOST = 4.0  # router signal of a boosted expert, above every rank's


def rank_values(k: int) -> NDArray[np.float32]:
    """Router signal of a trace token's experts by rank, from 2 down to 1; others have 0."""
    return np.linspace(2, 1, k, dtype=np.float32)


def frequencies(base: NDArray[np.int16], n_expert: int) -> NDArray[np.float64]:
    """How often each expert is chosen, float64 [layer, n_expert], rows sum to 1; a little for those never chosen."""
    counts = np.stack([np.bincount(layer[layer >= 0], minlength=n_expert) for layer in base.swapaxes(0, 1)]) + 0.05
    return np.asarray(counts / counts.sum(axis=1, keepdims=True))


def fit_trace(path: Path, shape: Shape, rng: np.random.Generator) -> tuple[NDArray[np.int16], str]:
    """A trace in the model's layers, experts and k: int16 [token, layer, k], and how it was made to fit.

    Generated tokens where it has at least 64 of them. ValueError: not a trace."""
    try:
        with np.load(path) as file:
            experts = file["experts"]
            n_from = int(file["n_expert"])
            decoded = file["is_decode"].astype(bool) if "is_decode" in file else np.ones(len(experts), bool)
    except OSError as error:
        raise ValueError(f"{path}: the routing trace cannot be read: {error.strerror or error}") from error
    except (KeyError, ValueError, TypeError, EOFError, BadZipFile) as error:  # whatever numpy takes it for
        raise ValueError(f"{path}: not a routing trace: moespac trace writes one") from error
    if experts.ndim != 3 or len(experts) < 2:
        raise ValueError(f"{path}: not a routing trace: experts has shape {experts.shape}")
    missing = np.iinfo(experts.dtype).max
    if decoded.sum() >= 64:
        experts = experts[decoded]
    n_layer = len(shape.moe_layers)
    source = np.round(np.linspace(0, experts.shape[1] - 1, n_layer)).astype(int)
    ids = np.where(experts == missing, -1, experts.astype(np.int16) % shape.n_expert)[:, source].astype(np.int16)
    said = f"trace {path.name}"
    if experts.shape[1] != n_layer:
        said += f", its {experts.shape[1]} layers spread over {n_layer}"
    if n_from > shape.n_expert:
        said += f", ids modulo {shape.n_expert}"
    if experts.shape[2] < shape.n_expert_used:
        said += (
            f", filled up from {experts.shape[2]} to {shape.n_expert_used} experts a token by draws from the layer's"
        )
        said += " frequencies"
    return fill_up(ids, shape.n_expert, shape.n_expert_used, rng), said


def fill_up(ids: NDArray[np.int16], n_expert: int, k: int, rng: np.random.Generator) -> NDArray[np.int16]:
    """k distinct experts of each token and layer: its own first (-1 and repeats left out), then draws by the frequencies."""
    chance = np.log(frequencies(ids, n_expert)) + rng.gumbel(size=(*ids.shape[:2], n_expert))
    for rank in reversed(range(ids.shape[2])):
        row, layer = np.nonzero(ids[:, :, rank] >= 0)
        chance[row, layer, ids[row, layer, rank]] = 1e6 - rank
    return np.asarray(np.argsort(-chance, axis=2, kind="stable")[:, :, :k], np.int16)


def synthetic_trace(shape: Shape, rng: np.random.Generator, n: int = 128) -> tuple[NDArray[np.int16], str]:
    """A trace of n tokens without a recording: popularity 1 / (rank + 8) in each layer, 40 % of a token's experts kept by
    the next (what Qwen3-30B-A3B shows is 38 to 45 %)."""
    layers, k = len(shape.moe_layers), shape.n_expert_used
    popular = np.log(1 / (8.0 + np.arange(shape.n_expert)))
    weight = np.stack([rng.permutation(popular) for _ in range(layers)])
    base = np.empty((n, layers, k), np.int16)
    for i in range(n):
        chance = weight + rng.gumbel(size=weight.shape)
        if i:
            kept = np.where(rng.random((layers, k)) < 0.35, base[i - 1], -1)
            layer, rank = np.nonzero(kept >= 0)
            chance[layer, kept[layer, rank]] += 1e3
        base[i] = np.argsort(-chance, axis=1)[:, :k]
        base[i] = rng.permuted(base[i], axis=1)
    return base, "synthetic: popularity 1/(rank + 8) in each layer, 40 % of a token's experts kept by the next"


def make_plan(shape: Shape, words: range, trace: Path | None, n_direction: int, seed: int = 0) -> Plan:
    """n_direction: how many base tokens and atoms the embedding has room for (weights.py). ValueError: no trace, or too few."""
    rng = np.random.default_rng(seed)
    base, routing = fit_trace(trace, shape, rng) if trace else synthetic_trace(shape, rng)
    lap = min(len(base), 256, n_direction // 2)
    base = base[:lap]
    n_variant = max(1, min(N_VARIANT, n_direction // 2 // lap))
    base = np.concatenate([base, *(_drifted(base, shape.n_expert, rng) for _ in range(n_variant - 1))])
    n_atom = n_direction - len(base)
    boost = _atoms(base, shape.n_expert, n_atom, rng)
    order = np.array(words, np.int32)
    n_main = int(len(order) * MAIN_SHARE)
    n_vocab = shape.n_vocab
    place = np.maximum(np.arange(n_vocab) - words.start, 0)
    n_lap = n_vocab // lap + 1
    variant = np.cumsum(rng.integers(1, max(2, n_variant), n_lap)) % n_variant  # never the same one twice in a row
    lap_atom = rng.integers(0, n_atom // 4, n_lap)[place // lap]
    return Plan(
        chain=order[:n_main],
        decoys=order[n_main:],
        base=base,
        boost=boost,
        base_of=np.asarray(variant[place // lap] * lap + place % lap, np.int32),
        lap_atom=np.asarray(lap_atom, np.int32),
        own_atom=rng.integers(n_atom // 4, n_atom, n_vocab, dtype=np.int32),
        layers=np.array(shape.moe_layers, np.int32),
        n_expert=shape.n_expert,
        routing=routing,
    )


def _drifted(base: NDArray[np.int16], n_expert: int, rng: np.random.Generator) -> NDArray[np.int16]:
    """The same routing with DRIFT of each layer's experts in each other's places."""
    places = np.tile(np.arange(n_expert, dtype=np.int16), (base.shape[1], 1))
    n = round(DRIFT * n_expert)
    for layer in places:
        chosen = rng.permutation(n_expert)[:n]
        layer[chosen] = np.roll(chosen, 1)
    return np.asarray(np.take_along_axis(places[None], base.astype(np.int64), axis=2), np.int16)


def _atoms(base: NDArray[np.int16], n_expert: int, n_atom: int, rng: np.random.Generator) -> NDArray[np.int16]:
    """int16 [n_atom, layer]: a drawn expert with the probability that replaces PERTURB of the choices, else -1."""
    n_layer, k = base.shape[1:]
    chance = np.log(frequencies(base, n_expert)) + rng.gumbel(size=(n_atom, n_layer, n_expert))
    drawn = chance.argmax(axis=2)
    return np.asarray(np.where(rng.random((n_atom, n_layer)) < PERTURB * k * 1.15, drawn, -1), np.int16)
