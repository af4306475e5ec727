"""Drafting leaves the law of sampled text as it is: the probabilities are llama.cpp's, the acceptance is exact."""

from __future__ import annotations

import ctypes
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import llama_cpp
import numpy as np
import pytest

from moespac_llamacpp import native
from moespac_llamacpp.acceptance import END, Law, Sampler, Sampling, log_probability, top_log_probabilities, verify
from moespac_llamacpp.shortlist import Shortlist

N_VOCAB = 16
CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])  # llama_token_data
CHAINS = {
    "temperature": Sampling(temperature=0.9, top_k=0, top_p=1, min_p=0),
    "all": Sampling(temperature=1.4, top_k=9, top_p=0.95, min_p=0.04),
    "penalties": Sampling(
        temperature=1.1, top_k=9, repeat_penalty=1.5, frequency_penalty=0.4, presence_penalty=0.3, penalty_last_n=8
    ),
}


def critical(n_free: int, z: float = 3.72) -> float:
    """The chi-square that chance exceeds in 1 of 10,000 cases (Wilson and Hilferty 1931)."""
    return n_free * (1 - 2 / (9 * n_free) + z * (2 / (9 * n_free)) ** 0.5) ** 3


def chi_square(seen: Counter[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> tuple[float, float]:
    """(chi-square, its critical value); texts that are too rare for the test count as one."""
    n = seen.total()
    assert set(seen) <= set(law), "a text came that the law excludes"
    assert abs(sum(law.values()) - 1) < 1e-9
    often = [text for text, p in law.items() if n * p >= 8]
    expected = [n * law[text] for text in often]
    observed = [seen[text] for text in often]
    if n - sum(expected) >= 8:
        expected.append(n - sum(expected))
        observed.append(n - sum(observed))
    value = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
    return value, critical(len(expected) - 1)


class World:
    """A target and a draft whose logits depend on the last token alone: the exact law of a text can be summed up."""

    def __init__(self, sampling: Sampling) -> None:
        rng = np.random.default_rng(11)
        self.target = (2 * rng.standard_normal((N_VOCAB, N_VOCAB))).astype(np.float32)
        self.draft = (self.target + 1.2 * rng.standard_normal((N_VOCAB, N_VOCAB))).astype(np.float32)
        self.sampler = Sampler(sampling, N_VOCAB)
        self.prompt = [3, 5, 3]

    def law(self, n: int) -> dict[tuple[int, ...], float]:
        """Probability of each text of n tokens after the prompt, without any draft."""
        texts = {(): 1.0}
        for _ in range(n):
            longer = {}
            for text, p in texts.items():
                so_far = [*self.prompt, *text]
                self.sampler.reset(so_far)
                law = self.sampler.law(self.target[so_far[-1]])
                longer |= {(*text, int(t)): p * float(q) for t, q in zip(law.ids, law.p, strict=True)}
            texts = longer
        return texts

    def sampled(self, n: int, accept: Callable[..., list[int]], n_drafts: int, drawn: bool) -> tuple[int, ...]:
        """A text of n tokens, with a draft in each step: drawn from its law, or its likeliest tokens."""
        text: list[int] = []
        self.sampler.reset(self.prompt)
        while len(text) < n:
            last = ([*self.prompt, *text])[-1]
            guesses: list[int] = []
            q: list[Law] = []
            fork = self.sampler.fork()
            for _ in range(n_drafts):
                logits = self.draft[guesses[-1] if guesses else last]
                law = fork.law(logits)
                guesses.append(fork.draw(law) if drawn else int(logits.argmax()))
                fork.accept(guesses[-1])
                q.append(law)
            fork.close()
            rows = self.target[[last, *guesses]]
            text += accept(self.sampler, rows, guesses, q if drawn else None)
        return tuple(text[:n])


def naive(sampler: Sampler, logits: np.ndarray, drafts: Sequence[int], q: Sequence[Law] | None = None) -> list[int]:
    """A draft stays if a sample of the target equals it; if none does, the target is sampled once more. (To keep the sample that
    was compared would be exact.)"""
    tokens: list[int] = []
    for i, draft in enumerate(drafts):
        if sampler.draw(sampler.law(logits[i])) != draft:
            break
        sampler.accept(draft)
        tokens.append(draft)
    tokens.append(sampler.draw(sampler.law(logits[len(tokens)])))
    sampler.accept(tokens[-1])
    return tokens


@pytest.fixture(params=CHAINS)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    world = World(replace(CHAINS[request.param], seed=5))
    yield world
    world.sampler.close()


def histogram(texts: Iterable[tuple[int, ...]]) -> Counter[tuple[int, ...]]:
    return Counter(texts)


@pytest.mark.parametrize("drawn", [True, False], ids=["drawn", "point-mass"])
def test_drafting_keeps_the_targets_law(world: World, drawn: bool) -> None:
    law = world.law(2)
    seen = histogram(world.sampled(2, verify, 2, drawn) for _ in range(5000))
    value, limit = chi_square(seen, law)
    assert value < limit


def test_the_law_test_notices_accept_if_equal(world: World) -> None:
    law = world.law(2)
    for drawn in (True, False):
        value, limit = chi_square(histogram(world.sampled(2, naive, 2, drawn) for _ in range(4000)), law)
        assert value > limit


def test_a_draft_that_knows_the_law_is_always_accepted(world: World) -> None:
    world.draft = world.target
    world.sampler.reset(world.prompt)
    for _ in range(200):
        fork = world.sampler.fork()
        law = fork.law(world.draft[3])
        guess = fork.draw(law)
        fork.close()
        assert verify(world.sampler, world.target[[3, guess]], [guess], [law])[0] == guess


def test_acceptance_is_the_overlap_of_the_two_laws() -> None:
    """Leviathan et al. 2023, theorem 3.5: the chance of acceptance is the sum of min(p, q)."""
    world = World(replace(CHAINS["all"], seed=1))
    p, q = world.sampler.law(world.target[3]), world.sampler.law(world.draft[3])
    overlap = sum(min(p.of(t), q.of(t)) for t in range(N_VOCAB))
    n, stayed = 4000, 0
    for _ in range(n):
        guess = world.sampler.draw(q)
        stayed += len(verify(world.sampler, world.target[[3, guess]], [guess], [q])) == 2
    assert abs(stayed / n - overlap) < 4 * (overlap * (1 - overlap) / n) ** 0.5


class Upstream:
    """llama.cpp's chain as one piece, put together here, over all tokens. more: samplers after the penalties."""

    def __init__(self, s: Sampling, n_vocab: int, more: Sequence[object] = ()) -> None:
        init = llama_cpp.llama_sampler_init_penalties
        parts = [init(n_vocab, s.penalty_last_n, s.repeat_penalty, s.frequency_penalty, s.presence_penalty)]
        if s.logit_bias:
            bias = (llama_cpp.llama_logit_bias * len(s.logit_bias))(*s.logit_bias.items())
            parts.insert(0, llama_cpp.llama_sampler_init_logit_bias(n_vocab, len(bias), bias))
        parts += more
        if not s.greedy:
            parts += [
                llama_cpp.llama_sampler_init_top_k(s.top_k),
                llama_cpp.llama_sampler_init_typical(s.typical_p, 1),
                llama_cpp.llama_sampler_init_top_p(s.top_p, 1),
                llama_cpp.llama_sampler_init_min_p(s.min_p, 1),
                llama_cpp.llama_sampler_init_temp(s.temperature),
            ]
        self.chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
        for part in parts:
            llama_cpp.llama_sampler_chain_add(self.chain, part)

    def accept(self, token: int) -> None:
        llama_cpp.llama_sampler_accept(self.chain, token)

    def apply(self, logits: np.ndarray) -> llama_cpp.llama_token_data_array:
        data = (llama_cpp.llama_token_data * len(logits))()
        view = np.frombuffer(data, [("id", np.int32), ("logit", np.float32), ("p", np.float32)])
        view["id"], view["logit"] = np.arange(len(logits)), logits
        array = llama_cpp.llama_token_data_array(data, len(logits), -1, False)
        llama_cpp.llama_sampler_apply(self.chain, ctypes.byref(array))
        return array

    def left(self, logits: np.ndarray) -> dict[int, float]:
        """Logit by token of what the chain leaves."""
        array = self.apply(logits)
        return {int(array.data[i].id): float(array.data[i].logit) for i in range(array.size)}

    def close(self) -> None:
        llama_cpp.llama_sampler_free(self.chain)


@pytest.mark.parametrize("name", CHAINS)
def test_the_law_is_that_of_llama_cpps_own_chain(name: str) -> None:
    """The same chain with upstream's last sampler, dist, at its end: its samples follow our probabilities."""
    sampling = replace(CHAINS[name], seed=2)
    logits = World(sampling).target[3]
    text = [3, 5, 3, 3]
    theirs = Upstream(sampling, N_VOCAB)
    llama_cpp.llama_sampler_chain_add(theirs.chain, llama_cpp.llama_sampler_init_dist(7))
    for token in text:
        theirs.accept(token)
    with Sampler(sampling, N_VOCAB) as ours:
        ours.reset(text)
        law = ours.law(logits)
    seen: Counter[tuple[int, ...]] = Counter()
    for _ in range(2500):
        array = theirs.apply(logits)
        seen[(int(array.data[array.selected].id),)] += 1
    theirs.close()
    value, limit = chi_square(seen, {(int(t),): float(p) for t, p in zip(law.ids, law.p, strict=True)})
    assert value < limit


#: The chains of a large vocabulary; in all but the last a shortlist of tokens decides, unless the law is too flat.
LARGE = {
    "top-k": Sampling(temperature=0.8),
    "bare top-k": Sampling(temperature=2, top_k=100, top_p=1, min_p=0),
    "penalties": Sampling(temperature=0.8, repeat_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.4),
    "rewards": Sampling(temperature=0.8, repeat_penalty=0.5, frequency_penalty=-2),
    "greedy penalties": Sampling(repeat_penalty=3, presence_penalty=2),
    "long penalties": Sampling(temperature=1, repeat_penalty=1.8, penalty_last_n=600),
    "bias": Sampling(temperature=1, logit_bias={7: 30.0, 8: -np.inf, 9: 3.0, 29_999: 25.0}),
    "min-p": Sampling(temperature=1, top_k=0, top_p=1, min_p=0.001, repeat_penalty=1.2),
    "typical": Sampling(temperature=1, top_k=60, typical_p=0.7, top_p=1, min_p=0),
    "top-p": Sampling(temperature=1, top_k=0, top_p=0.9, min_p=0),
    "top-p, min-p": Sampling(temperature=1, top_k=0, top_p=0.97, min_p=0.02),
    "top-p, penalties": Sampling(
        temperature=0.8, top_k=0, top_p=0.6, min_p=0, repeat_penalty=1.3, presence_penalty=0.4
    ),
    "top-p, bias": Sampling(temperature=1, top_k=0, top_p=0.8, min_p=0, logit_bias={7: 30.0, 8: -np.inf, 29_999: 29.0}),
    "all": Sampling(temperature=1, top_k=0, top_p=1, min_p=0),
}


@pytest.mark.parametrize("name", LARGE)
def test_a_shortlist_of_a_large_vocabulary_has_the_same_law(name: str) -> None:
    """Bit for bit what the chain leaves of all tokens, with penalties on the very likeliest of them."""
    n_vocab, sampling = 30_011, LARGE[name]
    rng = np.random.default_rng(4)
    theirs = Upstream(sampling, n_vocab)
    with Sampler(sampling, n_vocab) as ours:
        logits = rng.standard_normal(n_vocab).astype(np.float32)
        text = [*np.argsort(logits)[-90:].tolist(), *rng.integers(0, n_vocab, 5).tolist()]
        ours.reset(text)
        for token in text:
            theirs.accept(token)
        for scale in (0.3, 1, 4, 12):
            left = theirs.left(scale * logits)
            law = ours.law(scale * logits)
            if sampling.greedy:
                assert law.ids.tolist() == [max(left, key=left.__getitem__)]
                continue
            found = np.array(list(left.values()), np.float32)
            p = np.exp((found - found.max()).astype(np.float64))
            expected = dict(zip(left, (p / p.sum()).tolist(), strict=True))
            assert dict(zip(law.ids.tolist(), law.p.tolist(), strict=True)) == {
                t: q for t, q in expected.items() if q > 0
            }
            text.append(int(law.ids[0]))
            ours.accept(text[-1])
            theirs.accept(text[-1])
    theirs.close()


def test_a_shortlist_has_enough_tokens_and_not_many_more() -> None:
    rng = np.random.default_rng(0)
    for n_vocab, n in ((151_936, 104), (151_937, 1), (32_000, 300), (16_384, 40)):
        shortlist = Shortlist()
        for scale in (1, 1, 1.1, 3, 0.01, 1):  # guesses from the last logits that hold, and that do not
            logits = (scale * rng.standard_normal(n_vocab)).astype(np.float32)
            edge = shortlist.edge(logits, n)
            ids, values = shortlist.reaching(logits, edge)
            assert ids.tolist() == np.flatnonzero(logits >= edge).tolist() and (values == logits[ids]).all()
            assert n <= len(ids) < 4 * n + 8
    for logits, n in ((np.zeros(9000, np.float32), 40), (np.zeros(200_000, np.float32), 2000)):
        assert Shortlist().edge(logits, n) == -np.inf
    ties = np.zeros(100_000, np.float32)
    assert len(shortlist.reaching(ties, shortlist.edge(ties, 40))[0]) == len(ties)
    ties[5:] = -np.inf
    assert shortlist.edge(ties, 40) == -np.inf


def test_the_likeliest_tokens_are_found_with_one_look() -> None:
    rng = np.random.default_rng(0)
    for n_vocab, n in ((151_936, 104), (151_937, 1), (32_000, 300), (16_384, 40)):
        out = np.zeros(n_vocab, CANDIDATE)
        search = native.Likeliest(out, near=1.0)
        for scale in (1, 1, 1.1, 3, 0.01, 1):  # guesses from the last logits that hold, and that do not
            logits = (scale * rng.standard_normal(n_vocab)).astype(np.float32)
            found = out[: search.find(logits, n)]
            assert n <= len(found) < 4 * n + 8
            assert found["id"].tolist() == np.flatnonzero(logits >= np.float32(search.edge)).tolist()
            assert (found["logit"] == logits[found["id"]]).all() and not found["p"].any()
            assert search.best == logits.argmax()
            assert search.alone == (np.count_nonzero(found["logit"] >= logits.max() - np.float32(1)) == 1)
        logits[-1] = 50  # behind the last full row
        n_found = search.find(logits, n)
        assert search.best == n_vocab - 1 == out["id"][n_found - 1] and search.alone


def test_where_one_look_is_not_enough_nothing_is_found() -> None:
    search = native.Likeliest(np.zeros(100_000, CANDIDATE))
    for n_vocab, n in ((9000, 40), (100_000, 2000), (100_000, 0)):
        assert search.find(np.zeros(n_vocab, np.float32), n) == 0
    ties = np.zeros(100_000, np.float32)
    assert search.find(ties, 40) == len(ties)
    assert native.Likeliest(np.zeros(99_999, CANDIDATE)).find(ties, 40) == 0  # no room for all of them
    for place in (5, 99_999):
        for odd in (np.nan, np.inf):
            broken = ties.copy()
            broken[place] = odd
            assert search.find(broken, 40) == 0
    ties[5:] = -np.inf
    assert search.find(ties, 40) == 0
    assert search.find(np.zeros(100_000)[::2], 40) == 0 == search.find(np.zeros(200_000, np.float32)[::2], 40)


@pytest.mark.parametrize("penalties", [0, 64])
def test_a_law_of_one_token_is_the_chains(penalties: int) -> None:
    """The second best token just above and just below min-p, and rival and favourite penalised or not."""
    sampling = Sampling(temperature=0.8, min_p=0.05, top_p=0.999, repeat_penalty=1.2, penalty_last_n=penalties)
    n_vocab, rng = 20_000, np.random.default_rng(3)
    theirs = Upstream(sampling, n_vocab)
    n_alone = 0
    with Sampler(sampling, n_vocab) as ours:
        for step in range(40):
            logits = rng.standard_normal(n_vocab).astype(np.float32)
            best, rival = rng.choice(n_vocab, 2, replace=False).tolist()
            logits[best], logits[rival] = 12, 12 + np.log(0.05) + rng.choice([-0.5, -0.01, 0.0, 0.01, 0.5])
            if step % 2:
                for token in (best, rival)[: step % 3]:
                    ours.accept(token)
                    theirs.accept(token)
            left, law = theirs.left(logits), ours.law(logits)
            assert set(law.ids.tolist()) == {t for t, value in left.items() if value > -np.inf}
            assert law.of(int(law.ids[0])) == law.p[0] and law.of(-7) == 0
            n_alone += len(law.ids) == 1
    assert 10 < n_alone < 30
    theirs.close()


def nucleus(logits: np.ndarray, top_p: float) -> set[int]:
    """By its definition, in double precision."""
    order = np.argsort(-logits, kind="stable")
    p = np.exp(logits[order].astype(np.float64) - float(logits.max()))
    return set(order[: int((p.cumsum() < np.float32(top_p) * p.sum()).sum()) + 1].tolist())


def test_a_nucleus_is_found_among_the_best_of_a_large_vocabulary() -> None:
    """Small ones, some for which it matters what all other tokens weigh, one that needs a second look, and one that is too large.
    Compared with the definition, and with llama.cpp's, which may differ in the last token."""
    rng = np.random.default_rng(8)
    base = rng.standard_normal(151_936).astype(np.float32)
    favourites = rng.integers(0, len(base), 300)
    laws = ((1, 30, 0.1), (1, 30, 0.95), (2, 14, 0.95), (2, 11, 0.7), (2, 12, 0.999), (1.5, 13, 0.5))
    for scale, lift, top_p in laws:
        logits = np.float32(scale) * base
        logits[favourites] += np.float32(lift) - np.linspace(0, 4, len(favourites), dtype=np.float32)
        sampling = Sampling(temperature=1, top_k=0, top_p=top_p, min_p=0)
        theirs = Upstream(sampling, len(logits))
        left = set(theirs.left(logits))
        theirs.close()
        expected = nucleus(logits, top_p)
        with Sampler(sampling, len(logits)) as sampler:
            assert (sampler._nucleus(logits) is None) == (len(expected) > 512)
            law = set(sampler.law(logits).ids.tolist())
        if len(expected) > 512:  # llama.cpp decides
            assert law == left
        else:
            assert law == expected and len(left ^ law) <= 1


def test_what_a_nucleus_leaves_out_is_weighed() -> None:
    rng = np.random.default_rng(9)
    for n_vocab, scale in ((151_936, 2), (32_001, 0.5), (20_000, 6)):
        logits = (scale * rng.standard_normal(n_vocab)).astype(np.float32)
        shortlist, top = Shortlist(), float(logits.max())
        edge = shortlist.edge(logits, 50)
        ids, _ = shortlist.reaching(logits, edge)
        p = np.exp(logits.astype(np.float64) - top)
        p[ids] = 0
        assert shortlist.mass_without(logits, ids, top) == pytest.approx(p.sum(), rel=1e-5)
        assert p.sum() <= shortlist.most_below(logits, edge, top) * (1 + 1e-6)


def test_greedy_takes_the_targets_argmax() -> None:
    logits = np.random.default_rng(0).standard_normal((4, N_VOCAB)).astype(np.float32)
    best = logits.argmax(axis=1).tolist()
    other = (best[1] + 1) % N_VOCAB
    with Sampler(Sampling(), N_VOCAB) as sampler:
        assert verify(sampler, logits, best[:3]) == best
        assert verify(sampler, logits, [best[0], other, best[2]]) == best[:2]
        assert verify(sampler, logits[:1], []) == best[:1]


def test_greedy_penalties_follow_each_position() -> None:
    """Two tokens of nearly equal logits: with a penalty on what was said they alternate, drafted or not."""
    logits = np.zeros((5, N_VOCAB), np.float32)
    logits[:, 4], logits[:, 9] = 5.0, 4.9
    sampling = Sampling(presence_penalty=1.0, penalty_last_n=1)
    with Sampler(sampling, N_VOCAB) as sampler:
        sampler.reset([4])
        assert verify(sampler, logits, [9, 4, 9, 4]) == [9, 4, 9, 4, 9]
        sampler.reset([4])
        assert verify(sampler, logits, [9, 9, 9, 9]) == [9, 4]
        assert verify(sampler, logits[:1], []) == [9]


def test_a_fork_leaves_its_sampler_as_it_was() -> None:
    sampling = replace(CHAINS["penalties"], seed=0)
    logits = World(sampling).target[3]
    with Sampler(sampling, N_VOCAB) as sampler:
        sampler.reset([1, 2])
        before = sampler.law(logits)
        fork = sampler.fork()
        fork.accept(3)
        changed = fork.law(logits)
        fork.close()
        after = sampler.law(logits)
    assert np.array_equal(before.ids, after.ids) and np.array_equal(before.p, after.p)
    assert not (np.array_equal(before.ids, changed.ids) and np.array_equal(before.p, changed.p))


def test_a_draft_of_a_smaller_vocabulary_never_guesses_beyond_it() -> None:
    with Sampler(CHAINS["temperature"], N_VOCAB) as sampler:
        law = sampler.law(np.zeros(N_VOCAB - 4, np.float32))
        assert sorted(law.ids) == list(range(N_VOCAB - 4))
        assert len(sampler.law(np.zeros(N_VOCAB, np.float32)).ids) == N_VOCAB


def test_the_same_seed_draws_the_same() -> None:
    texts = []
    for _ in range(2):
        world = World(replace(CHAINS["all"], seed=77))
        texts.append([world.sampled(3, verify, 2, True) for _ in range(20)])
    assert texts[0] == texts[1]


def test_log_probabilities_are_those_of_the_bare_logits() -> None:
    logits = (5 * np.random.default_rng(3).standard_normal(1000)).astype(np.float32)
    exact = np.exp(logits.astype(np.float64))
    exact /= exact.sum()
    for token in (0, 7, int(logits.argmax())):
        assert abs(log_probability(logits, token) - np.log(exact[token])) < 1e-5
    best = top_log_probabilities(logits, 5)
    assert [token for token, _ in best] == np.argsort(-exact)[:5].tolist()
    assert np.allclose([p for _, p in best], np.log(np.sort(exact)[::-1][:5]), atol=1e-5)
    assert len(top_log_probabilities(logits, 2000)) == 1000 and top_log_probabilities(logits, 0) == []


def test_where_nothing_is_allowed_the_text_ends() -> None:
    sampling = Sampling(temperature=1, logit_bias=dict.fromkeys(range(N_VOCAB), -np.inf))
    with Sampler(sampling, N_VOCAB) as sampler:
        logits = np.zeros((3, N_VOCAB), np.float32)
        assert len(sampler.law(logits[0]).ids) == 0
        assert verify(sampler, logits, [3, 4]) == [END]


@pytest.mark.full
def test_greedy_acceptance_takes_little_of_a_step() -> None:
    """Vocabulary of Qwen3, a draft of 3: at most 5 % of a step of 5 ms."""
    logits = np.random.default_rng(0).standard_normal((4, 151_936)).astype(np.float32)
    drafts = logits.argmax(axis=1).tolist()[:3]
    with Sampler(Sampling(), logits.shape[1]) as sampler:
        times = []
        for _ in range(200):
            start = time.perf_counter()
            verify(sampler, logits, drafts)
            times.append(time.perf_counter() - start)
    assert np.median(times) < 0.25e-3
