"""moespac bench: this project against llama.cpp, on a planted pair or on the suites of the paper."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from moespac_llamacpp.bench import machine, report, suite_runs
from moespac_llamacpp.bench.compare import Comparison, Effort, OutOfTimeError
from moespac_llamacpp.bench.grid import SYNC, Field, Grid
from moespac_llamacpp.bench.process import WorkerError
from moespac_llamacpp.bench.rig import Rig, stock_command
from moespac_llamacpp.bench.settings import MAX_DRAFT, MEMORIES, PLANTED_WRONG_GUESSES, Choices
from moespac_llamacpp.bench.suites import SUITES, SuiteError, messages
from moespac_llamacpp.bench.targets import QUICK, Row, choose
from moespac_llamacpp.bench.texts import PlantedTexts
from moespac_llamacpp.commands.options import Execution
from moespac_llamacpp.commands.shared import fail
from moespac_llamacpp.policies import NAMES as POLICIES
from moespac_llamacpp.synth.pair import Pair

N = TypeVar("N", int, float)

bench = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Measure this project against llama.cpp.")


def _numbers(option: str, text: str, number: type[N]) -> list[N]:
    """ValueError: not numbers with commas."""
    try:
        return [number(word) for word in _words(text)]
    except ValueError as error:
        raise ValueError(f"{option} takes numbers with commas, not {text!r}") from error


def _lengths(option: str, text: str) -> tuple[int, ...]:
    """ValueError: not lengths of drafts with commas."""
    lengths = tuple(_numbers(option, text, int))
    for n in lengths:
        if not 0 < n <= MAX_DRAFT:
            raise ValueError(f"{option} takes lengths of drafts from 1 to {MAX_DRAFT}, not {n}")
    return lengths


def _known(option: str, text: str, names: Sequence[str]) -> tuple[str, ...]:
    """ValueError: one of the words is not among the names."""
    for word in _words(text):
        if word not in names:
            raise ValueError(f"{option} takes {', '.join(names)}, not {word!r}")
    return _words(text)


def _words(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.split(",") if word)


@bench.command()
def compare(
    pair: Annotated[Path, typer.Option("--pair", help="Folder that moespac synth wrote.")],
    stock: Annotated[
        str,
        typer.Option(
            "--stock",
            help="The rival: an interpreter whose llama_cpp is unpatched (scripts/compare_stock.py makes one), a folder with "
            "such a llama_cpp, or 'patched' for this build's own unattached path.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the results.")] = Path("bench/results"),
    rows: Annotated[
        str, typer.Option("--rows", help="Target rows, by id with commas; default: the grid, then all.")
    ] = "",
    grid: Annotated[bool, typer.Option("--grid", help="The grid before the named rows, too.")] = False,
    only_grid: Annotated[bool, typer.Option("--only-grid", help="No rows.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help=f"The rows {', '.join(QUICK)} in about 8 minutes.")] = False,
    minutes: Annotated[float | None, typer.Option("--minutes", help="Start nothing after so many.")] = None,
    grid_minutes: Annotated[
        float | None,
        typer.Option("--grid-minutes", help="The grid starts nothing after so many; what is missing is named."),
    ] = None,
    look: Annotated[
        float | None, typer.Option("--look", help="Seconds of a row's first look at either side's settings.")
    ] = None,
    budgets: Annotated[
        str, typer.Option("--budgets", help="Of the grid: % of expert bytes in VRAM.")
    ] = "8,17,25,50,100",
    threads: Annotated[str, typer.Option("--threads", "-t", help="Of the grid; rows have their own.")] = "4,8,16",
    max_threads: Annotated[
        int | None, typer.Option("--max-threads", help="No run takes more (default: the cores that there are).")
    ] = None,
    draft: Annotated[
        str, typer.Option("--draft", help="Drafts for the rows, by file stem; default: those of 75 %.")
    ] = "",
    cheap_draft: Annotated[
        str, typer.Option("--cheap-draft", help="Further drafts where a draft is paid out of the experts' share.")
    ] = "",
    lengths: Annotated[
        str | None, typer.Option("--lengths", help="Draft lengths (default 2,3,4,6,8; quick 2,4).")
    ] = None,
    grid_lengths: Annotated[
        str, typer.Option("--grid-lengths", help="Draft lengths of the grid, tried with the most threads.")
    ] = "2,4,8",
    grid_tokens: Annotated[int, typer.Option("--grid-tokens", help="Tokens to generate in the grid, at most -n.")] = 64,
    grid_policies: Annotated[
        str,
        typer.Option("--grid-policies", help="Policies and ablations of the grid: all, none, or names with commas."),
    ] = "all",
    policy_budget: Annotated[float, typer.Option("--policy-budget", help="Theirs, in % of expert bytes.")] = 25.0,
    memory: Annotated[
        str | None,
        typer.Option("--memory", help=f"The rival's host memory: {', '.join(MEMORIES)} (quick: the first two)."),
    ] = None,
    policies: Annotated[str, typer.Option("--policies", help="Policies of ours that are tried.")] = "moe-spac",
    ngram: Annotated[bool, typer.Option("--ngram", help="Try lookup in the text as a drafter too.")] = False,
    device: Annotated[
        str | None, typer.Option("--device", help="ggml device (default: the first GPU, else the CPU).")
    ] = None,
    execution: Annotated[Execution, typer.Option("--execution", help="Of this project's side.")] = Execution.auto,
    prompt: Annotated[
        int | None, typer.Option("--prompt", help="Tokens of a prompt, in place of the rows' own.")
    ] = None,
    tokens: Annotated[int | None, typer.Option("--tokens", "-n", help="Tokens to generate in a round.")] = None,
    rounds: Annotated[int, typer.Option("--rounds", help="Rounds of the best settings in turn.")] = 3,
    ctx: Annotated[int, typer.Option("--ctx", "-c", help="Context length of all models.")] = 2560,
    keep: Annotated[int, typer.Option("--keep", help="Placements of the rival that are held in memory at a time.")] = 4,
    commit: Annotated[str, typer.Option("--commit", help="Recorded in place of what git says.")] = "",
) -> None:
    """Time both sides in turn at the same VRAM, each at its best setting; write JSON, table, pictures and targets.json."""
    files = Pair(pair)
    try:
        about = files.about
        chosen = [] if only_grid else choose(QUICK if quick and not rows else _words(rows), about)
        stems = [p.stem for p in files.drafts]
        about["drafts"] = stems
        drafts = _words(draft) or tuple(s for s in stems if s.endswith("-75"))
        _check_drafts((*drafts, *_words(cheap_draft)), stems, pair)
        default_lengths, default_memory = ("2,4", "pinned,mmap") if quick else ("2,3,4,6,8", ",".join(MEMORIES))
        choices = Choices(
            drafts,
            lengths=_lengths("--lengths", lengths or default_lengths),
            memories=_known("--memory", memory or default_memory, MEMORIES),
            policies=_known("--policies", policies, POLICIES),
            ngram=ngram,
        )
        field = Field(
            shares=tuple(n / 100 for n in _numbers("--budgets", budgets, float)),
            threads=tuple(_numbers("--threads", threads, int)),
            drafts=tuple(stems),
            lengths=_lengths("--grid-lengths", grid_lengths),
            tokens=min(grid_tokens, tokens or grid_tokens),
            policies=_grid_policies(grid_policies),
            policy_share=policy_budget / 100,
        )
        effort = Effort(
            coarse_tokens=min(64, tokens or 64),
            tokens=tokens or (96 if quick else 128),
            rounds=rounds,
            verify_steps=min(16, max(4, (tokens or 128) // 8)),
            n_prompt=prompt,
            max_threads=max_threads or machine.n_cores(),
            minutes=minutes if minutes is not None or not quick else 8.0,
            look_seconds=look,
        )
        out.mkdir(parents=True, exist_ok=True)
        there = {p.stem: p for p in files.drafts}
        how: dict[str, Any] = {"device": device, "execution": execution.value, "n_ctx": ctx, "keep": keep}
        how["wrong_guesses"] = PLANTED_WRONG_GUESSES
        with Rig(files.target, there, stock, out, say=_say, **how) as rig:
            comparison = Comparison(rig, PlantedTexts(files.plan()), choices, _words(cheap_draft), effort, _say)
            where = machine.describe(rig.hello, commit)
            _say(machine.short(where))

            def save() -> None:
                report.save(out, comparison, about, where)

            if grid or only_grid or not (rows or quick):
                Grid(comparison, field, save, grid_minutes).run()
            _measure(comparison, chosen, save)
    except (ValueError, OSError, WorkerError, OutOfTimeError) as error:
        raise fail(error) from error
    typer.echo((out / "comparison.md").read_text())


def _grid_policies(text: str) -> tuple[str, ...]:
    """ValueError: there is none of this name."""
    names = (*POLICIES, SYNC)
    if text in ("all", "none"):
        return names if text == "all" else ()
    return _known("--grid-policies", text, names)


def _measure(comparison: Comparison, rows: list[Row], save: Callable[[], None]) -> None:
    for row in rows:
        try:
            comparison.measure(row)
            comparison.clocked(row)
            comparison.ensure_bandwidths([min(row.threads, comparison.effort.max_threads)])
        except OutOfTimeError as error:
            comparison.note(f"{row.id} and what follows it were left out: {error}")
            break
        except WorkerError as error:
            comparison.note(f"{row.id} was left out: {error}")
        finally:
            save()


def _check_drafts(names: tuple[str, ...], stems: list[str], pair: Path) -> None:
    for name in names:
        if name not in stems:
            raise ValueError(f"{pair}: there is no draft {name}; there are {', '.join(stems) or 'none'}")


def _say(text: str) -> None:
    typer.echo(text, err=True)


@bench.command()
def suites(
    model: Annotated[Path, typer.Option("--model", "-m", help="GGUF file of the target model.")],
    stock: Annotated[str, typer.Option("--stock", help="The rival, as for compare.")],
    draft_model: Annotated[Path | None, typer.Option("--draft-model", "-md", help="GGUF file of the draft.")] = None,
    suite: Annotated[str, typer.Option("--suite", help=f"With commas: {', '.join(SUITES)}.")] = ",".join(SUITES),
    rows: Annotated[
        list[str] | None, typer.Option("--rows", help="A suite's rows from a file: gsm8k=FILE.jsonl; may be repeated.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the results.")] = Path("suites"),
    cache_share: Annotated[float, typer.Option("--cache-share", help="Share of expert bytes in VRAM, 0 to 1.")] = 0.17,
    draft_max: Annotated[int, typer.Option("--draft-max", help="Tokens to draft a step.", min=1, max=MAX_DRAFT)] = 8,
    prompts: Annotated[int, typer.Option("--prompts", help="Prompts of each suite.", min=1)] = 8,
    tokens: Annotated[int, typer.Option("--tokens", "-n", help="Tokens to generate.", min=2)] = 256,
    threads: Annotated[int | None, typer.Option("--threads", "-t", help="CPU threads (default: all cores).")] = None,
    memory: Annotated[str, typer.Option("--memory", help="The rival's host memory, with commas.")] = "pinned,mmap",
    policies: Annotated[str, typer.Option("--policies", help="Policies of ours.")] = "moe-spac",
    device: Annotated[str | None, typer.Option("--device", help="ggml device.")] = None,
    execution: Annotated[Execution, typer.Option("--execution", help="Of this project's side.")] = Execution.auto,
    ctx: Annotated[int, typer.Option("--ctx", "-c", help="Context length.")] = 4096,
) -> None:
    """Tokens per second on the suites of the paper, with models of your own, both sides in turn."""
    try:
        stock_command(stock)
        for file in (model, draft_model):
            if file and not file.is_file():
                raise ValueError(f"{file}: there is no such file")
        files = dict(word.partition("=")[::2] for word in rows or ())
        chosen = {s: messages(s, prompts, Path(files[s]) if s in files else None) for s in _words(suite)}
        drafts = {draft_model.stem: draft_model} if draft_model else {}
        wanted = suite_runs.settings(
            threads or machine.n_cores(),
            cache_share,
            draft_model.stem if draft_model else None,
            draft_max,
            _known("--memory", memory, MEMORIES),
            _known("--policies", policies, POLICIES),
        )
        out.mkdir(parents=True, exist_ok=True)
        runs: list[suite_runs.SuiteRun] = []
        how: dict[str, Any] = {"device": device, "execution": execution.value, "n_ctx": ctx}
        with Rig(model, drafts, stock, out, say=_say, **how) as rig:
            where = machine.describe(rig.hello)
            for name, texts in chosen.items():
                runs.append(suite_runs.run_suite(rig, name, texts, wanted, tokens, _say))
                (out / "suites.json").write_text(json.dumps(suite_runs.record(runs, where), indent=1) + "\n")
                (out / "suites.md").write_text(suite_runs.table(runs, wanted))
    except (ValueError, OSError, WorkerError, SuiteError) as error:
        raise fail(error) from error
    typer.echo((out / "suites.md").read_text())
