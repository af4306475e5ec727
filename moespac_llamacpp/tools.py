"""Tools in chats: what a request may ask for, the grammar that it then needs, and the calls that an answer holds.

Which way a model writes a call is its own. Here `<tool_call>{"name": …, "arguments": …}</tool_call>` is read (Hermes, Qwen); an
answer in another form stays text. Calls that the request demands are constrained by a grammar, and do not depend on a form.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moespac_llamacpp.grammar import JSON_OBJECT, GrammarError, from_json_schema

START, END = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class Demand:
    """What the answer has to be. forced: the tool whose arguments it is. any_call: it is a call, {"name": …, "arguments": …}.
    listens: calls in it are to be found."""

    grammar: str | None = None
    forced: str | None = None
    any_call: bool = False
    listens: bool = False


def demand(
    tools: Sequence[Mapping[str, Any]] | None, choice: object, response_format: Mapping[str, Any] | None
) -> Demand:
    """ValueError: a tool that is not there, or an unknown format."""
    for tool in tools or ():
        if not isinstance(tool.get("function"), Mapping) or not isinstance(tool["function"].get("name"), str):
            raise ValueError('a tool is {"type": "function", "function": {"name": …, "parameters": …}}')
    if not tools and choice not in (None, "none", "auto"):
        raise ValueError("tool_choice asks for a tool, but there are no tools")
    if isinstance(choice, Mapping):
        function = choice.get("function")
        name = str(function.get("name") if isinstance(function, Mapping) else None)
        return Demand(from_json_schema(_parameters(_find(tools or (), name))), forced=name)
    if choice == "required":
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": tool["function"]["name"]}, "arguments": _parameters(tool)},
                "required": ["name", "arguments"],
            }
            for tool in tools or ()
        ]
        return Demand(from_json_schema({"oneOf": calls}), any_call=True)
    if choice not in (None, "none", "auto"):
        raise ValueError(f"tool_choice is none, auto, required or a function's name, not {choice!r}")
    return Demand(format_grammar(response_format), listens=bool(tools) and choice != "none")


def _find(tools: Sequence[Mapping[str, Any]], name: str) -> Mapping[str, Any]:
    for tool in tools:
        if tool["function"]["name"] == name:
            return tool
    raise ValueError(
        f"tool_choice asks for {name!r}, but the tools are {', '.join(t['function']['name'] for t in tools)}"
    )


def _parameters(tool: Mapping[str, Any]) -> dict[str, Any]:
    return dict(tool["function"].get("parameters") or {"type": "object"})


def format_grammar(response_format: Mapping[str, Any] | None) -> str | None:
    """GBNF of a response_format: {"type": "text"}, {"type": "json_object"[, "schema": …]}, or OpenAI's
    {"type": "json_schema", "json_schema": {"schema": …}}. ValueError: another type, or a schema that cannot be used."""
    kind = response_format.get("type", "text") if response_format else "text"
    if kind == "text":
        return None
    assert response_format is not None
    schema = response_format.get("schema")
    if kind == "json_object":
        return from_json_schema(schema) if schema else JSON_OBJECT
    if kind == "json_schema":
        schema = (response_format.get("json_schema") or {}).get("schema", schema)
        if schema is None:
            raise GrammarError("response_format json_schema needs a schema")
        return from_json_schema(schema)
    raise ValueError(f"response_format is text, json_object or json_schema, not {kind!r}")


def call(name: str, arguments: str) -> dict[str, Any]:
    """A tool call as OpenAI's clients read it. arguments: JSON."""
    return {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def read_calls(text: str, wanted: Demand) -> tuple[str | None, list[dict[str, Any]]]:
    """(the answer's text without its calls, the calls). What is no complete call stays text."""
    before, after, calls = split_calls(text, wanted)
    return (before + after).strip() or None if calls else before + after, calls


def split_calls(text: str, wanted: Demand) -> tuple[str, str, list[dict[str, Any]]]:
    """(the text before the first call, all text after it that is no call, the calls)."""
    if wanted.forced is not None:
        return "", "", [call(wanted.forced, text)]
    if wanted.any_call:
        parsed = _parse(text)
        return ("", "", [parsed]) if parsed else ("", text, [])
    if not wanted.listens or START not in text:
        return text, "", []
    before, *rest = text.split(START)
    after, calls = "", list[dict[str, Any]]()
    for i, part in enumerate(rest):
        body, _, between = part.partition(END)
        parsed = _parse(body)
        if parsed is None:
            return before, after + START + START.join(rest[i:]), calls
        calls.append(parsed)
        if not between.isspace():
            after += between
    return before, after, calls


def _parse(body: str) -> dict[str, Any] | None:
    try:
        value = json.loads(body)
        return call(str(value["name"]), json.dumps(value.get("arguments", {}), ensure_ascii=False))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
