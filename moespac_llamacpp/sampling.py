"""The law of the next token: llama.cpp's own sampler chain, applied to logits; only the drawing is done here.

At a vocabulary of 151k the chain costs milliseconds where it sees every token. Top-k needs only the best few: see `shortlist`.
So does top-p, once it is known what all the others weigh together.
"""

from __future__ import annotations

import copy
import ctypes
import os
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import log
from types import TracebackType
from typing import TYPE_CHECKING, Any

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from moespac_llamacpp.native import Likeliest
from moespac_llamacpp.shortlist import Shortlist

if TYPE_CHECKING:
    from moespac_llamacpp.grammar import Grammar

#: What a law without any token draws: the grammar (or a bias) allows nothing here. It ends the text, like an end token.
END = -1


@dataclass(frozen=True)
class Sampling:
    """The knobs of the chain, with llama.cpp's meanings; the defaults sample greedily.

    Order: logit bias, penalties, grammar, top-k, typical-p, top-p, min-p, temperature (llama-cpp-python, `Llama._init_sampler`).
    Penalties look at prompt and answer (llama-server)."""

    temperature: float = 0.0  # 0 or less: greedy
    top_k: int = 40  # 0: off
    top_p: float = 0.95  # 1: off
    min_p: float = 0.05  # 0: off
    repeat_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    penalty_last_n: int = 64
    seed: int | None = None  # None: another one for each sampler
    typical_p: float = 1.0  # 1: off
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # added to the logits of these tokens

    def __post_init__(self) -> None:
        if self.penalty_last_n < 0:  # llama.cpp's sampler would silently switch the penalties off
            raise ValueError(f"penalty_last_n is a number of tokens, not {self.penalty_last_n}")

    @property
    def greedy(self) -> bool:
        return self.temperature <= 0

    @property
    def penalises(self) -> bool:
        """Does the law depend on the tokens before?"""
        changed = self.repeat_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0
        return changed and self.penalty_last_n != 0


@dataclass(frozen=True)
class Law:
    """A distribution over the tokens that the chain left: ids int32 [k], distinct; p float64 [k], summing to 1, or k = 0."""

    ids: NDArray[np.int32]
    p: NDArray[np.float64]

    def of(self, token: int) -> float:
        """Its probability, 0 if the chain removed it."""
        if len(self.ids) == 1:
            return float(self.p[0]) if self.ids[0] == token else 0.0
        found = (self.ids == token).nonzero()[0]
        return float(self.p[found[0]]) if len(found) else 0.0


_CERTAIN = np.ones(1)
_CERTAIN.flags.writeable = False
_NO_TOKENS = np.zeros(0, np.int64)
_NOTHING = Law(np.zeros(0, np.int32), np.zeros(0, np.float64))

#: llama_token_data
_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])

#: Among how many of the best tokens a nucleus is looked for, if not among all.
N_NUCLEUS = (64, 512)
#: A logit this far below what min-p leaves is not left by it, however it rounds.
SLACK = 1e-3


class _TokenArray(ctypes.Structure):
    """llama_token_data_array, with the address as a number: a typed pointer costs microseconds to make."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("size", ctypes.c_size_t),
        ("selected", ctypes.c_int64),
        ("sorted", ctypes.c_bool),
    )


class Sampler:
    """A sampler chain of llama.cpp with its state, and the generator that draws. Not for two threads."""

    def __init__(
        self,
        sampling: Sampling,
        n_vocab: int,
        *,
        rng: np.random.Generator | None = None,
        grammar: Grammar | None = None,
    ) -> None:
        """rng: shared with another sampler; None: its own, from the seed. grammar: its sampler is owned from now on."""
        self.sampling = sampling
        self.n_vocab = n_vocab
        seed = int.from_bytes(os.urandom(8), "little") if sampling.seed is None else sampling.seed & (2**64 - 1)
        self.rng = rng or np.random.default_rng(seed)
        self._candidates = np.zeros(n_vocab, _CANDIDATE)
        self._shortlist = Shortlist()
        self._dense = np.zeros(n_vocab, np.float64)  # zero between calls
        self._biased = frozenset(t for t in sampling.logit_bias if 0 <= t < n_vocab)
        self._recent: deque[int] = deque(maxlen=sampling.penalty_last_n)  # as the penalties remember it
        self._head = _chain(self._adjusting())
        self._tail, self._end = _chain(self._choosing()), _chain(self._ending())
        self._grammar: Any = grammar.sampler if grammar else None
        self._prefixes = grammar.prefixes if grammar else None
        self._owns_tail = True
        #: the law is the bare argmax: no chain needed
        self.plain = sampling.greedy and not sampling.penalises and not self._biased and grammar is None
        self._excludes = grammar is not None or bool(self._biased)  # some tokens altogether
        # How many of the best tokens decide; 0: all.
        self._n_best = 1 if sampling.greedy else max(0, sampling.top_k)
        #: top-p is the first to choose, of all tokens
        self._weighs = not self._n_best and sampling.typical_p >= 1 and sampling.top_p < 1 and grammar is None
        # A token below min-p's share of the best one's probability is not left, and the best one is: where no other is near it,
        # it is the law, whatever top-k, top-p and the temperature are.
        stays = not sampling.greedy and 0 < sampling.min_p <= 1 and sampling.typical_p >= 1
        self._near = SLACK - log(sampling.min_p) if stays else np.inf
        self._likeliest = Likeliest(self._candidates, self._near)
        self._array = _TokenArray()
        self._array_pointer = ctypes.cast(ctypes.byref(self._array), llama_cpp.llama_token_data_array_p)

    def _adjusting(self) -> Iterable[Any]:
        """Samplers that change the logits of a few tokens."""
        s = self.sampling
        if self._biased:
            bias = (llama_cpp.llama_logit_bias * len(self._biased))()
            for entry, token in zip(bias, self._biased, strict=True):
                entry.token, entry.bias = token, float(s.logit_bias[token])
            yield llama_cpp.llama_sampler_init_logit_bias(self.n_vocab, len(bias), bias)
        if s.penalises:
            yield llama_cpp.llama_sampler_init_penalties(
                self.n_vocab, s.penalty_last_n, s.repeat_penalty, s.frequency_penalty, s.presence_penalty
            )

    def _choosing(self) -> Iterable[Any]:
        """Samplers that leave some tokens out; they have no state."""
        s = self.sampling
        if s.greedy:
            return
        if s.top_k > 0:
            yield llama_cpp.llama_sampler_init_top_k(s.top_k)
        if s.typical_p < 1:
            yield llama_cpp.llama_sampler_init_typical(s.typical_p, 1)
        if s.top_p < 1:
            yield llama_cpp.llama_sampler_init_top_p(s.top_p, 1)
        yield from self._ending()

    def _ending(self) -> Iterable[Any]:
        """Those of them that come after top-p."""
        if self.sampling.min_p > 0:
            yield llama_cpp.llama_sampler_init_min_p(self.sampling.min_p, 1)
        yield llama_cpp.llama_sampler_init_temp(self.sampling.temperature)

    def close(self) -> None:
        for part in (self._head, self._grammar, *((self._tail, self._end) if self._owns_tail else ())):
            if part:
                llama_cpp.llama_sampler_free(part)
        self._head = self._grammar = self._tail = self._end = None

    def __enter__(self) -> Sampler:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def fork(self) -> Sampler:
        """A sampler in the same state that draws from the same generator: for a draft, which may be rejected. Close it."""
        other = copy.copy(self)
        other._owns_tail = False
        other._recent = self._recent.copy()
        other._head = llama_cpp.llama_sampler_clone(self._head)
        other._grammar = llama_cpp.llama_sampler_clone(self._grammar) if self._grammar else None
        return other

    def reset(self, tokens: Sequence[int] = ()) -> None:
        """Starts an answer after these tokens: penalties look back at them, a grammar starts anew."""
        self._recent.clear()
        llama_cpp.llama_sampler_reset(self._head)
        if self._grammar:
            llama_cpp.llama_sampler_reset(self._grammar)
        if self.sampling.penalises:
            for token in tokens[-self.sampling.penalty_last_n :]:
                self._remember(token)

    def accept(self, token: int) -> None:
        """The text goes on with this token, which the law of this place allows."""
        if token == END:
            return
        if self.sampling.penalises:
            self._remember(token)
        if self._grammar:  # a token that the grammar does not allow would end the process
            llama_cpp.llama_sampler_accept(self._grammar, token)

    def _remember(self, token: int) -> None:
        self._recent.append(token)
        llama_cpp.llama_sampler_accept(self._head, token)

    def law(self, logits: NDArray[np.float32]) -> Law:
        """The law of the next token given its logits, float32 [n_vocab] (fewer: the first tokens only, as a draft's may be)."""
        if self.plain:
            return Law(np.array([logits.argmax()], np.int32), np.ones(1))
        nucleus = self._nucleus(logits) if self._weighs else None
        if nucleus is not None:
            return _softmax(self._apply(self._end, nucleus))
        left = self._shortlisted(logits) if self._n_best and not self._excludes else self._adjusted(logits)
        if isinstance(left, Law):
            return left
        if not len(left):
            return _NOTHING
        if self.sampling.greedy:
            return Law(left["id"][left["logit"].argmax()].reshape(1), np.ones(1))
        return _softmax(self._apply(self._tail, left))

    def _nucleus(self, logits: NDArray[np.float32]) -> NDArray[Any] | None:
        """What top-p leaves of all tokens, likeliest first, found among the best few; None where they are not all there.

        Sums are float64 here; llama.cpp's are float32, added one after the other, so that at 151k tokens the probability at which
        it cuts is off by some 1e-5: the last token of a nucleus may be there and not here, or the other way round."""
        s, changed = self.sampling, self._changed(len(logits))
        for n in (1,) if s.min_p > 0 else N_NUCLEUS:
            edge = self._shortlist.edge(logits, n + len(changed))
            if s.min_p > 0:  # what min-p will leave out need not be found
                edge += log(s.min_p) - SLACK
            if edge == -np.inf:
                return None
            found = self._candidates_from(logits, edge, changed)
            if len(changed):
                self._apply(self._head, found)
            order = np.argsort(-found["logit"], kind="stable")
            values = found["logit"].take(order).astype(np.float64)
            top = float(values[0])
            n_sure = int(np.count_nonzero(values >= edge))  # no other token comes between these
            if not n_sure or top == np.inf:
                continue
            sums = np.exp(values - top).cumsum()
            most = self._shortlist.most_below(logits, edge, top)
            share = float(np.float32(s.top_p))
            low, high = sums.searchsorted([share * sums[-1], share * (sums[-1] + most)]) + 1
            if low < high:  # now it matters what the others weigh
                low = sums.searchsorted(share * (sums[-1] + self._shortlist.mass_without(logits, found["id"], top))) + 1
            if low <= n_sure or s.min_p > 0:
                return found.take(order[: min(low, n_sure)])
        return None

    def _adjusted(self, logits: NDArray[np.float32]) -> NDArray[Any]:
        """Candidates with bias, penalties and grammar applied, those that are excluded left out.

        All that the rest of the chain could choose from are there, not all there are."""
        changed = self._changed(len(logits))
        n = self._n_best + len(changed)
        while True:
            edge = self._edge(logits, n)
            candidates = self._candidates_from(logits, edge, changed)
            if len(changed):
                self._apply(self._head, candidates)
            if not self._excludes:  # enough, see `_shortlisted`
                return candidates
            if self._grammar:
                self._apply(self._grammar, candidates)
            # Tokens below the edge are as the model left them: they cannot be among the best if enough reach it still.
            if edge == -np.inf or not self._n_best or np.count_nonzero(candidates["logit"] >= edge) >= self._n_best:
                return candidates[candidates["logit"] > -np.inf]
            n = n * 8 if self._prefixes is None else len(logits)

    def _shortlisted(self, logits: NDArray[np.float32]) -> NDArray[Any] | Law:
        """As `_adjusted` where nothing is excluded: n tokens are enough then, whatever becomes of those that changed. The law
        itself where that is clear already."""
        changed, search = self._changed(len(logits)), self._likeliest
        n = search.find(logits, self._n_best + len(changed))
        if not n:
            return self._adjusted(logits)
        if not len(changed):
            return Law(np.array([search.best], np.int32), _CERTAIN) if search.alone else self._candidates[:n]
        low = changed[logits[changed] < search.edge]
        added = self._candidates[n : n + len(low)]
        added["id"], added["logit"] = low, logits[low]
        candidates = self._candidates[: n + len(low)]
        self._apply(self._head, candidates)
        logit = candidates["logit"]
        best = logit.argmax()
        if self._near < np.inf and np.count_nonzero(logit >= logit[best] - self._near) == 1:
            return Law(candidates["id"][best : best + 1].copy(), _CERTAIN)
        return candidates

    def _changed(self, n_vocab: int) -> NDArray[np.int64]:
        """Tokens whose logits the bias or the penalties will change, each once."""
        if not self._recent and not self._biased:
            return _NO_TOKENS
        tokens = np.array(list(self._biased.union(self._recent)), np.int64)
        return tokens[tokens < n_vocab]

    def _edge(self, logits: NDArray[np.float32], n: int) -> float:
        """No token below it can be chosen if enough of the n above it stay."""
        s = self.sampling
        if self._n_best:
            return self._shortlist.edge(logits, n)
        if s.min_p > 0 and s.top_p >= 1 and s.typical_p >= 1 and not self._grammar:
            # min-p alone: a share of the best token's probability, and of n + 1 tokens one is as the model left it
            return self._shortlist.edge(logits, n + 1) + log(s.min_p) - SLACK
        return -np.inf

    def _candidates_from(self, logits: NDArray[np.float32], edge: float, changed: NDArray[np.int64]) -> NDArray[Any]:
        """Candidates whose logits reach the edge, and all whose logits will change; without an edge all that can be chosen."""
        if edge > -np.inf:
            ids, values = self._shortlist.reaching(logits, edge)
            if len(changed):
                low = changed[logits[changed] < edge]
                ids, values = np.concatenate((ids, low)), np.concatenate((values, logits[low]))
        elif self._prefixes is not None:
            ids = np.sort(self._prefixes.may_follow(self._allowed))
            ids = ids[: np.searchsorted(ids, len(logits))]
            values = logits[ids]
        else:
            candidates = self._candidates[: len(logits)]
            candidates["id"], candidates["logit"] = np.arange(len(logits)), logits
            return candidates
        candidates = self._candidates[: len(ids)]
        candidates["id"], candidates["logit"] = ids, values
        return candidates

    def _allowed(self, tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of the tokens the grammar allows."""
        candidates = np.zeros(len(tokens), _CANDIDATE)
        candidates["id"] = tokens
        return np.asarray(self._apply(self._grammar, candidates)["logit"] > -np.inf)

    def _apply(self, sampler: Any, candidates: NDArray[Any]) -> NDArray[Any]:
        """What the sampler leaves of the candidates, which it changes and may sort."""
        array = self._array
        # to ask numpy for an address takes longer than some samplers
        address = self._likeliest.address if candidates.base is self._candidates else candidates.ctypes.data
        array.data, array.size, array.selected, array.sorted = address, len(candidates), -1, False
        llama_cpp.llama_sampler_apply(sampler, self._array_pointer)
        if array.data == address:
            return candidates[: array.size]
        # a sampler may put its own memory there (llama.h)
        raw = (ctypes.c_uint8 * (array.size * _CANDIDATE.itemsize)).from_address(array.data)
        return np.ctypeslib.as_array(raw).view(_CANDIDATE)

    def draw(self, law: Law) -> int:
        """A token from the law, END if it has none."""
        if len(law.ids) <= 1:
            return int(law.ids[0]) if len(law.ids) else END
        cumulative = law.p.cumsum()
        at = int(cumulative.searchsorted(self.rng.random() * cumulative[-1], side="right"))
        return int(law.ids[min(at, len(law.ids) - 1)])

    def residual(self, p: Law, q: Law) -> Law:
        """The law proportional to max(0, p − q): what a rejection leaves; p itself where rounding leaves nothing."""
        self._dense[q.ids] = q.p
        rest = np.maximum(p.p - self._dense[p.ids], 0)
        self._dense[q.ids] = 0
        total = rest.sum()
        return Law(p.ids, rest / total) if total > 0 else p


def _chain(parts: Iterable[Any]) -> Any:
    chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
    for part in parts:
        llama_cpp.llama_sampler_chain_add(chain, part)
    return chain


def _softmax(left: NDArray[Any]) -> Law:
    """llama.cpp keeps p from before the temperature: its last sampler, dist, takes the softmax of what is left, as here."""
    logits = left["logit"]
    if len(logits) == 1 and logits[0] > -np.inf:
        return Law(left["id"].copy(), np.ones(1))
    p = np.exp((logits - logits.max()).astype(np.float64))
    p /= p.sum()
    likely = p > 0
    return Law(left["id"][likely], p[likely])
