"""Grammars that the answer must follow: GBNF, or a JSON schema turned into GBNF by llama-cpp-python."""

from __future__ import annotations

import json
import os
import re
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llama_cpp
from llama_cpp import llama_grammar

from moespac_llamacpp.models import Model
from moespac_llamacpp.prefixes import Prefixes


class GrammarError(ValueError):
    """A grammar or schema that cannot be used; the text is the sentence for the user."""


@dataclass(frozen=True)
class Grammar:
    """sampler: a llama_sampler that leaves the tokens which go on with the grammar's `root`; Sampler frees it. prefixes: None
    where the grammar asks for tokens, not for their text."""

    sampler: Any
    prefixes: Prefixes | None


#: What is in a grammar beside its rules: strings, sets of characters, comments
_TEXT = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*')


def compile_grammar(model: Model, gbnf: str) -> Grammar:
    """For Sampler.

    GrammarError: llama.cpp cannot parse it."""
    if not gbnf.strip():  # llama.cpp takes an empty grammar for none
        raise GrammarError("the grammar is empty")
    if "\0" in gbnf:
        raise GrammarError("the grammar has a zero byte")
    sampler, complaint = _stderr_of(lambda: llama_cpp.llama_sampler_init_grammar(model.vocab, gbnf.encode(), b"root"))
    if sampler and complaint:  # of somebody else, in another thread
        os.write(2, complaint.encode())
    if not sampler:
        reason = complaint.partition("error parsing grammar: ")[2].strip().partition("\n")[0]
        reason = reason or "it needs a rule `root`, and no rule may start with itself"
        raise GrammarError(f"the grammar cannot be parsed: {reason[:120]}")
    names_tokens = re.search("[<!]", _TEXT.sub("", gbnf))
    return Grammar(sampler, None if names_tokens else model.prefixes)


_stderr_lock = threading.Lock()


def _stderr_of(call: Callable[[], Any]) -> tuple[Any, str]:
    """(the call's result, what C wrote to stderr meanwhile): where llama.cpp's parser says what is wrong, and nowhere else."""
    with _stderr_lock, tempfile.TemporaryFile() as file:
        before = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            result = call()
        finally:
            os.dup2(before, 2)
            os.close(before)
        file.seek(0)
        return result, file.read().decode("utf-8", "replace")


def _strict(gbnf: str) -> str:
    """llama-cpp-python's rules for strings let line breaks and the like through, which JSON does not."""
    return gbnf.replace(r'[^"\\]', r'[^"\\\x00-\x1F\x7F]')


#: GBNF of any JSON object.
JSON_OBJECT = str(llama_grammar.JSON_GBNF)


def from_json_schema(schema: str | dict[str, Any]) -> str:
    """GBNF of the texts that are JSON values of the schema. GrammarError: not JSON, or a schema that has no GBNF."""
    text = schema if isinstance(schema, str) else json.dumps(schema)
    try:
        read = json.loads(text)
    except ValueError as error:
        raise GrammarError(f"the JSON schema is not JSON: {error}") from error
    if not isinstance(read, dict):
        raise GrammarError('the JSON schema is not an object, such as {"type": "array"}')
    try:
        return _strict(llama_grammar.json_schema_to_gbnf(text))
    except Exception as error:  # the converter raises whatever its lookups raise
        raise GrammarError(
            f"the JSON schema cannot be turned into a grammar: {type(error).__name__}: {error}"
        ) from error


def read_grammar(path: Path) -> str:
    """The file's text. GrammarError: it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise GrammarError(f"{path}: the grammar cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise GrammarError(f"{path}: the grammar is not UTF-8 text") from error
