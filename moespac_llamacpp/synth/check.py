"""Does a planted pair behave as ordered? A real decode against the plan; and what is easier or harder than in reality."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from moespac_llamacpp.draft import NgramDraft
from moespac_llamacpp.models import Context, Model
from moespac_llamacpp.synth.pair import Pair
from moespac_llamacpp.synth.plan import Plan

ROUTING_AT_LEAST = 0.95
ACCEPTANCE_WITHIN = 0.02
_WIDTH = 32  # tokens of a decode


@dataclass(frozen=True)
class Findings:
    """Shares from 0 to 1."""

    tokens: int
    routing: float  # of the planned experts, those that were chosen
    chain: float  # of the main chain's words, those that followed
    acceptance: dict[str, float]  # by name of the draft, which ends in the percentage that was asked for
    repeat_trace: float  # experts that the next token chooses again: in the trace token's routing,
    repeat_planted: float  # and in the chain
    early_gate: (
        float  # accuracy of all routers on the bare embedding: a stale gate has at least that (real models: 0.79-0.89)
    )
    table_seen: float  # of the experts of a word at its second occurrence, those that it had at the first
    words_repeated: float  # share of a text's words that were seen in it before
    ngram_drafted: int  # guesses that lookup in the text found

    @property
    def failures(self) -> list[str]:
        found = []
        if self.routing < ROUTING_AT_LEAST:
            found.append(f"only {self.routing:.1%} of the choices are as planned, {ROUTING_AT_LEAST:.0%} are needed")
        for name, measured in self.acceptance.items():
            if abs(asked(name) - measured) > ACCEPTANCE_WITHIN:
                found.append(f"the acceptance of {name} is {measured:.3f} instead of {asked(name)}")
        return found

    def describe(self) -> str:
        accepted = ", ".join(f"{name} {m:.3f}" for name, m in self.acceptance.items()) or "no draft"
        return "\n".join(
            (
                f"routing as planned: {self.routing:.1%} of the choices of {self.tokens} tokens",
                f"next word as planned: {self.chain:.1%}",
                f"acceptance: {accepted}",
                f"experts that the next token repeats: {self.repeat_planted:.1%}, in the trace {self.repeat_trace:.1%}",
                "easier than reality: "
                f"a gate that looks ahead is right in {self.early_gate:.1%} of its choices (real models 79 to 89 %); "
                f"a word seen before chooses the same experts in {self.table_seen:.1%}",
                "harder than reality: "
                f"{self.words_repeated:.1%} of the words of a text were seen in it before; "
                f"lookup of n-grams found {self.ngram_drafted} guesses",
            )
        )


def asked(draft: str) -> float:
    """The acceptance in a draft file's name."""
    return float(draft.rpartition("-")[2]) / 100


def overlap(got: NDArray[np.integer], wanted: NDArray[np.integer]) -> float:
    """Share of wanted ids that are among those got; both [..., k]."""
    return float((wanted[..., :, None] == got[..., None, :]).any(axis=-1).mean())


def check_pair(pair: Pair, n_threads: int, n_tokens: int = 480) -> Findings:
    """Decodes the pair's own words. LoadError: it cannot be loaded."""
    plan = pair.plan()
    text = plan.chain[: n_tokens + 1]
    with (
        Model(pair.target) as model,
        Context(model, n_ctx=n_tokens + _WIDTH, n_ubatch=_WIDTH, n_threads=n_threads) as context,
    ):
        assert context.experts is not None
        rows = [context.experts.rows()[i].row for i in range(len(plan.layers))]
        chosen, target_next = [], []
        for i in range(0, n_tokens, _WIDTH):
            target_next.append(context.decode(text[i : i + _WIDTH].tolist(), all_logits=True).argmax(axis=1))
            chosen.append(np.concatenate(context.experts.choices(), axis=1)[rows].swapaxes(0, 1))
        context.decode(text[:_WIDTH].tolist(), all_logits=True)
        again = np.concatenate(context.experts.choices(), axis=1)[rows].swapaxes(0, 1)
    follows = np.concatenate(target_next)
    planned = plan.experts(text[:n_tokens])
    acceptance = {
        path.stem: float((_guesses(path, text[:n_tokens], n_threads) == follows).mean()) for path in pair.drafts
    }
    return Findings(
        tokens=n_tokens,
        routing=overlap(np.concatenate(chosen), planned),
        chain=float((follows == text[1:]).mean()),
        acceptance=acceptance,
        repeat_trace=overlap(plan.base[1:], plan.base[:-1]),
        repeat_planted=overlap(planned[1:], planned[:-1]),
        early_gate=early_gate(pair.target, plan, text[:64]),
        table_seen=overlap(again, chosen[0]),
        words_repeated=1 - len(set(text.tolist())) / len(text),
        ngram_drafted=_ngram_guesses(text.tolist()),
    )


def _guesses(path: Path, text: NDArray[np.int32], n_threads: int) -> NDArray[np.int64]:
    with Model(path) as model, Context(model, n_ctx=len(text), n_threads=n_threads, attach=False) as context:
        parts = [text[i : i + _WIDTH].tolist() for i in range(0, len(text), _WIDTH)]
        return np.concatenate([context.decode(part, all_logits=True).argmax(axis=1) for part in parts])


def _ngram_guesses(text: list[int]) -> int:
    drafter = NgramDraft()
    drafter.begin(text[:1])
    found = 0
    for token in text[1:]:
        found += len(drafter.propose(4).tokens)
        drafter.accept(0, token)
    return found


def early_gate(path: Path, plan: Plan, tokens: NDArray[np.int32]) -> float:
    """How often the routers choose as planned on the token's embedding alone, before any layer."""
    tensors = {t.name: t for t in gguf.GGUFReader(path).tensors}
    table = tensors["token_embd.weight"]
    hidden = gguf.quants.dequantize(np.array(table.data[tokens]), table.tensor_type)
    hidden /= np.sqrt((hidden**2).mean(axis=1, keepdims=True))
    planned = plan.experts(tokens)
    k = planned.shape[2]
    right = [
        overlap(np.argsort(-(hidden @ tensors[f"blk.{il}.ffn_gate_inp.weight"].data.T), axis=1)[:, :k], planned[:, i])
        for i, il in enumerate(plan.layers)
    ]
    return float(np.mean(right))


def verify(pair: Pair, n_threads: int) -> Findings:
    """check_pair, with the findings added to the pair's about.json."""
    findings = check_pair(pair, n_threads)
    about = pair.about | {"verified": asdict(findings)}
    (pair.folder / "about.json").write_text(json.dumps(about, indent=1) + "\n")
    return findings
