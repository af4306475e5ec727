"""The seven suites that MoE-SpAc is measured on (arXiv 2603.09983), as prompts: from Hugging Face, or from a file.

Rows come from the Parquet files that Hugging Face keeps of every public data set (its branch refs/convert/parquet), which needs
pyarrow, or from a .jsonl file with the same fields."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONVERTED = "refs/convert/parquet"
Row = Mapping[str, Any]


class SuiteError(RuntimeError):
    """A suite cannot be had; the text is the sentence for the user."""


@dataclass(frozen=True)
class Suite:
    """Where a suite's rows are, and how one becomes a user's message."""

    name: str
    repo: str
    config: str
    split: str
    message: Callable[[Row], str]


def _mmlu_pro(row: Row) -> str:
    options = "\n".join(f"{chr(ord('A') + i)}. {option}" for i, option in enumerate(row["options"]))
    return f"{row['question']}\n\n{options}\n\nThink step by step, then name the letter of the right answer."


def _alpaca(row: Row) -> str:
    return f"{row['instruction']}\n\n{row['input']}" if row.get("input") else str(row["instruction"])


SUITES = {
    suite.name: suite
    for suite in (
        Suite("mmlu-pro", "TIGER-Lab/MMLU-Pro", "default", "test", _mmlu_pro),
        Suite("mt-bench", "HuggingFaceH4/mt_bench_prompts", "default", "train", lambda row: str(row["prompt"][0])),
        Suite(
            "humaneval",
            "openai/openai_humaneval",
            "openai_humaneval",
            "test",
            lambda row: f"Complete this Python function:\n\n{row['prompt']}",
        ),
        Suite("gsm8k", "openai/gsm8k", "main", "test", lambda row: str(row["question"])),
        Suite("alpaca", "tatsu-lab/alpaca", "default", "train", _alpaca),
        Suite(
            "cnn-dm",
            "abisee/cnn_dailymail",
            "3.0.0",
            "test",
            lambda row: f"Summarize this article:\n\n{row['article']}",
        ),
        Suite("qa", "google-research-datasets/nq_open", "nq_open", "validation", lambda row: str(row["question"])),
    )
}


def messages(name: str, n: int, file: Path | None = None, seed: int = 0) -> list[str]:
    """n messages of a suite, drawn by the seed, the same ones in every run.

    SuiteError: there is no such suite, or no way to its rows."""
    if name not in SUITES:
        raise SuiteError(f"there is no suite {name!r}; there are {', '.join(SUITES)}")
    suite = SUITES[name]
    path = file or _fetch(suite)
    found = []
    for i, row in enumerate(read_rows(path)):
        try:
            found.append(suite.message(row))
        except (KeyError, TypeError, IndexError) as error:
            raise SuiteError(f"{path}: row {i + 1} is none of {name}: {error!r} is missing in it") from error
    if not found:
        raise SuiteError(f"{path}: no rows")
    return random.Random(seed).sample(found, min(n, len(found)))


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a .jsonl or .parquet file."""
    try:
        if path.suffix == ".parquet":
            yield from _parquet(path)
        else:
            with path.open(encoding="utf-8") as file:
                yield from _jsonl(path, file)
    except OSError as error:
        raise SuiteError(f"{path}: {error.strerror or error}") from error


def _jsonl(path: Path, lines: Iterable[str]) -> Iterator[Row]:
    for i, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise SuiteError(f"{path}: line {i + 1} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise SuiteError(f"{path}: line {i + 1} is not an object")
        yield row


def _parquet(path: Path) -> Iterator[Row]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise SuiteError(
            f"{path.name} is Parquet, which needs pyarrow: pip install pyarrow, or give the rows as a .jsonl file"
        ) from error
    for batch in pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=256):
        yield from batch.to_pylist()


def _fetch(suite: Suite) -> Path:
    """The first Parquet file of the suite's split, through huggingface_hub and its cache."""
    from huggingface_hub import HfApi, hf_hub_download

    try:
        files = HfApi().list_repo_files(suite.repo, repo_type="dataset", revision=CONVERTED)
        inside = sorted(f for f in files if f.startswith(f"{suite.config}/{suite.split}/") and f.endswith(".parquet"))
        if not inside:
            raise SuiteError(f"{suite.repo}: no Parquet file of {suite.config}/{suite.split} there")
        return Path(hf_hub_download(suite.repo, inside[0], repo_type="dataset", revision=CONVERTED))
    except SuiteError:
        raise
    except Exception as error:  # whatever a network may do
        raise SuiteError(
            f"{suite.name} could not be fetched from Hugging Face ({suite.repo}): {type(error).__name__}; without a network "
            f"give its rows as a file: --rows {suite.name}=FILE.jsonl"
        ) from error
