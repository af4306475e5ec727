"""Answers in the shapes of llama-cpp-python (llama_types), which are OpenAI's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from llama_cpp.llama_types import (
    ChatCompletionLogprobs,
    CompletionLogprobs,
    CompletionUsage,
    CreateChatCompletionResponse,
    CreateChatCompletionStreamResponse,
    CreateCompletionResponse,
)

from moespac_llamacpp.decoder import Report, Top
from moespac_llamacpp.models import Model


@dataclass(frozen=True)
class Head:
    """What all parts of an answer share."""

    id: str
    created: int  # seconds since 1970
    model: str


def text_of(model: Model, token: int) -> str:
    return model.piece(token).decode("utf-8", "ignore")


def usage(report: Report) -> CompletionUsage:
    n, m = report.n_prompt, report.n_generated
    return {"prompt_tokens": n, "completion_tokens": m, "total_tokens": n + m}


def completion(
    head: Head, text: str, logprobs: CompletionLogprobs | None = None, finish_reason: Any = None
) -> CreateCompletionResponse:
    """Without usage: also a chunk of a stream."""
    return {
        "id": f"cmpl-{head.id}",
        "object": "text_completion",
        "created": head.created,
        "model": head.model,
        "choices": [{"text": text, "index": 0, "logprobs": logprobs, "finish_reason": finish_reason}],
    }


def completion_logprobs(
    model: Model, tokens: Sequence[int], logprobs: Sequence[float | None], tops: Sequence[Top | None], offset: int
) -> CompletionLogprobs:
    """offset: characters before the first token. A token's own log-probability is always among its top ones."""
    texts, offsets, top_dicts = [], [], []
    for token, logprob, top in zip(tokens, logprobs, tops, strict=True):
        texts.append(text_of(model, token))
        offsets.append(offset)
        offset += len(texts[-1])
        top_dicts.append(None if top is None else _top_dict(model, top) | {texts[-1]: logprob})
    return {
        "tokens": texts,
        "text_offset": offsets,
        "token_logprobs": list(logprobs),
        "top_logprobs": top_dicts,  # type: ignore[typeddict-item]
    }


def _top_dict(model: Model, top: Top) -> dict[str, float | None]:
    """By text: of tokens with the same text, as parts of a character have it, the likeliest counts."""
    found: dict[str, float | None] = {}
    for token, logprob in top:
        found.setdefault(text_of(model, token), logprob)
    return found


def chat_logprobs(
    model: Model, tokens: Sequence[int], logprobs: Sequence[float], tops: Sequence[Top]
) -> ChatCompletionLogprobs:
    def entry(token: int, logprob: float) -> dict[str, Any]:
        raw = model.piece(token)
        return {"token": raw.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(raw)}

    content: list[Any] = [
        entry(token, logprob) | {"top_logprobs": [entry(*one) for one in top]}
        for token, logprob, top in zip(tokens, logprobs, tops, strict=True)
    ]
    return {"content": content, "refusal": None}


def chat_completion(
    head: Head,
    report: Report,
    content: str | None,
    calls: Sequence[dict[str, Any]],
    logprobs: ChatCompletionLogprobs | None,
) -> CreateChatCompletionResponse:
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = list(calls)
    return {
        "id": f"chatcmpl-{head.id}",
        "object": "chat.completion",
        "created": head.created,
        "model": head.model,
        "choices": [
            {
                "index": 0,
                "message": message,  # type: ignore[typeddict-item]
                "logprobs": logprobs,
                "finish_reason": "tool_calls" if calls else report.finish_reason,
            }
        ],
        "usage": usage(report),
    }


def chat_chunk(
    head: Head, delta: dict[str, Any], logprobs: ChatCompletionLogprobs | None = None, finish_reason: Any = None
) -> CreateChatCompletionStreamResponse:
    return {
        "id": f"chatcmpl-{head.id}",
        "object": "chat.completion.chunk",
        "created": head.created,
        "model": head.model,
        "choices": [
            {
                "index": 0,
                "delta": delta,  # type: ignore[typeddict-item]
                "logprobs": logprobs,
                "finish_reason": finish_reason,
            }
        ],
    }


def call_deltas(calls: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """A delta for each tool call, whole: a client puts the parts together all the same."""
    for i, one in enumerate(calls):
        yield {"tool_calls": [{"index": i, **one}]}
