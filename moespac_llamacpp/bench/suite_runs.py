"""Tokens per second on the paper's suites, with a target and a draft of one's own, both sides in turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean
from typing import Any

from moespac_llamacpp.bench.process import WorkerError
from moespac_llamacpp.bench.rig import Result, Rig
from moespac_llamacpp.bench.settings import OURS, STOCK, Setting
from moespac_llamacpp.bench.texts import Prompts


@dataclass
class SuiteRun:
    """One suite: results of each setting, prompt by prompt."""

    suite: str
    results: dict[Setting, list[Result]] = field(default_factory=dict)

    def tps(self, setting: Setting) -> float:
        """All tokens over all the time that they took."""
        results = [r for r in self.results.get(setting, []) if r.n_generated > 1]
        seconds = sum(float(r.detail["seconds"]) for r in results)
        return sum(r.n_generated - 1 for r in results) / seconds if seconds else 0.0

    def same_texts(self) -> tuple[int, int]:
        """(prompts whose text is the same in all settings, prompts). Where two tokens nearly tie, texts may part."""
        columns = list(zip(*self.results.values(), strict=False))
        return sum(all(r.detail["tokens"] == c[0].detail["tokens"] for r in c) for c in columns), len(columns)


def settings(
    threads: int, share: float, draft: str | None, n_draft: int, memories: Sequence[str], policies: Sequence[str]
) -> list[Setting]:
    """The rival in each memory mode and ours with each policy, without and with the draft, which is extra on both sides."""
    plain = [Setting(STOCK, threads, share, memory=m) for m in memories]
    plain += [Setting(OURS, threads, share, policy=p) for p in policies]
    drafting = [replace(s, draft=draft, n_draft=n_draft) for s in plain] if draft else []
    return [*plain, *drafting]


def run_suite(
    rig: Rig,
    suite: str,
    messages: Sequence[str],
    wanted: Sequence[Setting],
    n_tokens: int,
    say: Callable[[str], None],
) -> SuiteRun:
    """Every setting on every prompt, prompt by prompt. A setting that fails is left out of the suite from then on."""
    run, failed = SuiteRun(suite), set[Setting]()
    texts = Prompts(rig.tokenize(messages))
    for i in range(len(messages)):
        text = texts.next(max(1, rig.n_ctx - n_tokens - 1), n_tokens)
        for setting in wanted:
            if setting in failed:
                continue
            try:
                result = rig.run(setting, text)
            except WorkerError as error:
                say(f"{suite}: {error}")
                failed.add(setting)
                run.results.pop(setting, None)
                continue
            run.results.setdefault(setting, []).append(result)
        say(f"{suite}: {i + 1} of {len(messages)} prompts")
    return run


def table(runs: Sequence[SuiteRun], wanted: Sequence[Setting]) -> str:
    """TPS in the paper's form: a row for each setting, a column for each suite, and their mean."""
    names = [run.suite for run in runs]
    lines = [f"| TPS | {' | '.join([*names, 'mean'])} |", "|" + " --- |" * (len(names) + 2)]
    for setting in wanted:
        values = [run.tps(setting) for run in runs]
        cells = [f"{v:.2f}" if v else "" for v in [*values, mean(values)]]
        lines.append(f"| {setting.label()} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def record(runs: Sequence[SuiteRun], machine: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "machine": dict(machine),
        "suites": [
            {
                "suite": run.suite,
                "same_texts": run.same_texts(),
                "settings": [{"tps": run.tps(s), "runs": [r.record() for r in rs]} for s, rs in run.results.items()],
            }
            for run in runs
        ],
    }
