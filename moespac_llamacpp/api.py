"""One class for programs: a model pair, loaded, with the calls of llama_cpp.Llama.

with Moespac("target.gguf", draft_model="draft.gguf", expert_budget="8G") as llm:
    print(llm.generate("Once upon a time", max_tokens=100))
"""

from __future__ import annotations

import codecs
import os
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from llama_cpp.llama_grammar import LlamaGrammar
from llama_cpp.llama_types import (
    ChatCompletionRequestMessage,
    CreateChatCompletionResponse,
    CreateChatCompletionStreamResponse,
    CreateCompletionResponse,
    CreateCompletionStreamResponse,
)

from moespac_llamacpp import formats
from moespac_llamacpp.chat import Spoken, Turn, turn_of
from moespac_llamacpp.decoder import Decoder, Report, StopText
from moespac_llamacpp.engine import TINY_MODEL, Options, Progress, find_device, open_decoder, silent
from moespac_llamacpp.grammar import from_json_schema
from moespac_llamacpp.models import ONE_DEVICE, ONE_SEQUENCE, capture_log
from moespac_llamacpp.sampling import Sampling
from moespac_llamacpp.tools import START, Demand, demand, read_calls, split_calls

_REFUSED = {
    **dict.fromkeys(("n_parallel", "n_seq_max", "parallel"), ONE_SEQUENCE),
    **dict.fromkeys(("tensor_split", "split_mode", "main_gpu"), ONE_DEVICE),
}

Grammar = str | LlamaGrammar | None
Messages = Sequence[ChatCompletionRequestMessage] | Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Stats:
    """What a Moespac has done. `last` and `total` have rates, counts and times (chat.Turn)."""

    last: Turn
    total: Turn
    n_past: int  # tokens in the context
    n_ctx: int
    device_bytes: int  # of slots and buffers for experts


@dataclass(frozen=True)
class Piece:
    """Text that is certain, and the tokens first … last − 1 of the report that it is made of."""

    text: str
    first: int
    last: int
    report: Report


class _Watch:
    """Somebody who may end a text. Apart from Moespac, since what the decoder holds would keep that alive."""

    def __init__(self) -> None:
        self.on_step: Callable[[], None] | None = None

    def look(self) -> None:
        if self.on_step:
            self.on_step()


class Moespac:
    """A target model, its draft and its placement of experts. One text at a time: calls from several threads take turns, and a
    stream that was left for another call raises RuntimeError. Close it, or use it in a `with`."""

    def __init__(
        self,
        model_path: str | os.PathLike[str] = TINY_MODEL,
        *,
        draft_model: str | os.PathLike[str] | None = None,
        progress: Progress = silent,
        verbose: bool = False,
        **options: Any,
    ) -> None:
        """options: the fields of engine.Options, such as n_ctx, expert_budget, draft_max, context_shift, flash_attn, telemetry.
        verbose: let llama.cpp print its log.

        LoadError, MoeError, ValueError: one sentence with what is wrong and where. TypeError: an option that does not exist."""
        for name in options:
            if name in _REFUSED:
                raise ValueError(f"{name}: {_REFUSED[name]}")
        if not verbose:
            capture_log()
        telemetry = options.pop("telemetry", None)
        self.options = Options(
            model=Path(model_path),
            draft_model=None if draft_model is None else Path(draft_model),
            telemetry=None if telemetry is None else Path(telemetry),
            **options,
        )
        stack = ExitStack()
        with stack:
            self.decoder, notices = open_decoder(self.options, find_device(self.options.device), stack, progress)
            #: closes everything once, at the latest when the program ends
            self._close = weakref.finalize(self, stack.pop_all().close)
        self.notices: list[str] = notices  # sentences for the user, new ones at the end, also when it is closed
        self._watch = watch = _Watch()
        self.decoder.on_prompt = lambda done, total: watch.look()
        self.verbose = verbose
        self.model_path = str(self.options.model)
        self._lock = threading.RLock()
        self._spoken = Spoken()
        self._last, self._total = Turn(), Turn()

    @classmethod
    def from_pretrained(
        cls,
        repo_id: str,
        filename: str,
        *,
        draft_repo_id: str | None = None,
        draft_filename: str | None = None,
        **options: Any,
    ) -> Moespac:
        """Files of the Hugging Face hub, fetched unless they are in its cache; of a split model the first part names all. A name
        may have wildcards, if they match one model.

        FetchError: a file cannot be had; else as the constructor."""
        if (draft_repo_id is None) != (draft_filename is None):
            raise ValueError("a draft needs both draft_repo_id and draft_filename")
        if draft_repo_id is not None and draft_filename is not None:
            options["draft_model"] = _fetch(draft_repo_id, draft_filename)
        return cls(_fetch(repo_id, filename), **options)

    def close(self) -> None:
        """Frees everything. A second call does nothing; streams that are left raise RuntimeError."""
        with self._lock:
            self._close()

    @property
    def closed(self) -> bool:
        return not self._close.alive

    def __enter__(self) -> Moespac:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    @property
    def on_step(self) -> Callable[[], None] | None:
        """Called before each token and between the pieces of a prompt; what it raises ends the text."""
        return self._watch.on_step

    @on_step.setter
    def on_step(self, call: Callable[[], None] | None) -> None:
        self._watch.on_step = call

    def _open(self) -> Decoder:
        if self.closed:
            raise ValueError(f"{self.model_path}: this model is closed")
        return self.decoder

    # --- text ----------------------------------------------------------------------------------------------------------------

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> list[int]:
        """As llama_cpp.Llama."""
        return self._open().context.model.tokenize(text.decode("utf-8", "ignore"), special=special, bos=add_bos)

    def detokenize(self, tokens: Sequence[int]) -> bytes:
        """As llama_cpp.Llama."""
        model = self._open().context.model
        return b"".join(model.piece(token) for token in tokens)

    def generate(self, prompt: str | Sequence[int] | Messages, max_tokens: int | None = None, **sampling: Any) -> str:
        """The text that follows a prompt (text or tokens), or the answer to messages. sampling: as `stream`."""
        return "".join(self.stream(prompt, max_tokens, **sampling))

    def stream(
        self,
        prompt: str | Sequence[int] | Messages,
        max_tokens: int | None = None,
        *,
        stop: str | Sequence[str] | None = None,
        grammar: Grammar = None,
        json_schema: str | dict[str, Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **sampling: Any,
    ) -> Generator[str, None, None]:
        """`generate`, as it comes. Greedy unless a temperature is given.

        max_tokens: None for as many as the context holds. grammar: GBNF, or json_schema instead. sampling: fields of Sampling.
        ValueError: a prompt that does not fit, a grammar that cannot be parsed."""
        if grammar is not None and json_schema is not None:
            raise ValueError("a text follows a grammar or a JSON schema, not both")
        if json_schema is not None:
            grammar = from_json_schema(json_schema)
        text, tokens = self._prompt(prompt, chat_template_kwargs or {})
        pieces = self._pieces(text, tokens, max_tokens, stop, Sampling(**sampling), grammar)
        with closing(pieces):
            for piece in pieces:
                if piece.text:
                    yield piece.text

    def _prompt(self, prompt: str | Sequence[Any], values: Mapping[str, Any]) -> tuple[str, list[int]]:
        """(the prompt's text, "" if tokens were given; its tokens)."""
        model = self._open().context.model
        if isinstance(prompt, str):
            text = prompt
        else:
            parts: list[Any] = list(prompt)
            if not parts or not isinstance(parts[0], Mapping):
                return "", [int(token) for token in parts]
            text = model.chat_prompt(_plain_messages(parts), **values)
        return text, self._spoken.tokenize(model, text)

    def _pieces(
        self,
        text: str,
        prompt: list[int],
        max_tokens: int | None,
        stop: str | Sequence[str] | None,
        sampling: Sampling,
        grammar: Grammar,
        *,
        n_top: int | None = None,
        prompt_logprobs: bool = False,
    ) -> Generator[Piece, None, None]:
        """Generates; the last piece has the end of the report, and maybe no text. n_top: with log-probabilities, and those of so
        many of the likeliest tokens."""
        stopper = StopText([stop] if isinstance(stop, str) else stop or [])
        characters = codecs.getincrementaldecoder("utf-8")("ignore")
        said, stopped = b"", False  # what is certain
        starts, n_done = [0], 0  # where tokens start in it; how many tokens pieces have had
        self._watch.look()
        with self._lock:  # from the law to the first token, or another thread could set another law between them
            decoder = self._open()
            model, experts = decoder.context.model, decoder.context.experts
            decoder.sample_by(sampling, _gbnf(grammar))
            if experts:
                experts.reset_perf()
            tokens = decoder.generate(
                prompt, max_tokens or 0, logprobs=n_top is not None, n_top=n_top or 0, prompt_logprobs=prompt_logprobs
            )
            token = next(tokens, None)
            report = decoder.report
        try:
            while token is not None and not stopped:
                raw = model.piece(token)
                starts.append(starts[-1] + len(raw))
                sure, stopped = stopper.feed(raw)
                said += sure
                if stopped:
                    report.finish_reason = "stop"
                elif piece := characters.decode(sure):
                    yield Piece(piece, n_done, len(starts) - 1, report)
                    n_done = len(starts) - 1
                if not stopped:
                    self._watch.look()
                    with self._lock:  # a whole step, if another thread wants to start a text
                        token = next(tokens, None)
            last = report.n_generated
            if stopped:  # tokens of a stop string are not in the text
                last = max(n_done, sum(start < len(said) for start in starts[:-1]))
            else:
                sure = stopper.rest()
                said += sure
            yield Piece(characters.decode(sure, final=True), n_done, last, report)
        finally:
            with self._lock:
                tokens.close()
                if not self.closed and decoder.report is report:
                    self._finish(decoder, text, prompt, said)

    def _finish(self, decoder: Decoder, text: str, prompt: list[int], said: bytes) -> None:
        self._last = turn_of(decoder)
        self._total += self._last
        self.notices += decoder.report.notices
        if text:
            self._spoken.keep(
                decoder.context.model, text, prompt, said.decode("utf-8", "ignore"), decoder.report.tokens
            )

    @property
    def stats(self) -> Stats:
        context = self._open().context
        device_bytes = context.experts.device_bytes() if context.experts else 0
        return Stats(self._last, self._total, context.n_past, context.n_ctx, device_bytes)

    # --- llama_cpp.Llama -----------------------------------------------------------------------------------------------------

    def create_completion(
        self,
        prompt: str | list[int],
        suffix: str | None = None,
        max_tokens: int | None = 16,
        temperature: float = 0.8,
        top_p: float = 0.95,
        min_p: float = 0.05,
        typical_p: float = 1.0,
        logprobs: int | None = None,
        echo: bool = False,
        stop: str | list[str] | None = None,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        repeat_penalty: float = 1.0,
        top_k: int = 40,
        stream: bool = False,
        seed: int | None = None,
        tfs_z: float = 1.0,
        mirostat_mode: int = 0,
        mirostat_tau: float = 5.0,
        mirostat_eta: float = 0.1,
        model: str | None = None,
        stopping_criteria: Any = None,
        logits_processor: Any = None,
        grammar: Grammar = None,
        logit_bias: Mapping[int, float] | None = None,
    ) -> CreateCompletionResponse | Iterator[CreateCompletionStreamResponse]:
        """The text after a prompt, as llama_cpp.Llama gives it. max_tokens None or ≤ 0: until the context is full.

        mirostat, Python callbacks and infilling have no law that drafts could be accepted by: ValueError. tfs_z, mirostat_tau and
        mirostat_eta have no effect, as upstream."""
        _refuse(mirostat_mode=mirostat_mode, logits_processor=logits_processor)
        _refuse(stopping_criteria=stopping_criteria, suffix=suffix)
        sampling = Sampling(
            temperature, top_k, top_p, min_p, repeat_penalty, frequency_penalty, presence_penalty,
            seed=_seed(seed), typical_p=typical_p, logit_bias=_bias(logit_bias),
        )  # fmt: skip
        text, tokens = self._prompt(prompt, {})
        if echo and not text:
            text = self.detokenize(tokens).decode("utf-8", "ignore")
        head = formats.Head(str(uuid.uuid4()), int(time.time()), model or self.model_path)
        log_prompt = echo and logprobs is not None
        pieces = self._pieces(
            text, tokens, max_tokens, stop, sampling, grammar, n_top=logprobs, prompt_logprobs=log_prompt
        )
        chunks = self._completion(head, text, tokens, pieces, echo, logprobs is not None)
        if stream:
            return chunks
        return self._whole(head, list(chunks))

    __call__ = create_completion

    def _completion(
        self,
        head: formats.Head,
        text: str,
        prompt: list[int],
        pieces: Generator[Piece, None, None],
        echo: bool,
        logs: bool,
    ) -> Generator[CreateCompletionResponse, None, None]:
        """Chunks: the prompt if it is wanted, a piece each, and the end, with usage."""
        model, offset = self._open().context.model, len(text)
        with closing(pieces):
            for piece in pieces:
                report = piece.report
                if echo:
                    echo = False
                    # nothing comes before the first token, so it has no probability
                    values, tops = [None, *report.prompt_logprobs], [None, *report.prompt_top_logprobs]
                    logprobs = formats.completion_logprobs(model, prompt, values, tops, 0) if logs else None
                    yield formats.completion(head, text, logprobs)
                if not piece.text and piece.first == piece.last:
                    continue
                at = slice(piece.first, piece.last)
                logprobs = None
                if logs:
                    logprobs = formats.completion_logprobs(
                        model, report.tokens[at], report.logprobs[at], report.top_logprobs[at], offset
                    )
                offset += len(piece.text)
                yield formats.completion(head, piece.text, logprobs)
        end = formats.completion(head, "", finish_reason=report.finish_reason)
        end["usage"] = formats.usage(report)
        yield end

    def _whole(self, head: formats.Head, chunks: list[CreateCompletionResponse]) -> CreateCompletionResponse:
        """The chunks put together."""
        choices = [chunk["choices"][0] for chunk in chunks]
        parts = [choice["logprobs"] for choice in choices if choice["logprobs"] is not None]
        logprobs: Any = None
        if parts:
            names = ("tokens", "text_offset", "token_logprobs", "top_logprobs")
            logprobs = {name: [value for part in parts for value in part[name]] for name in names}  # type: ignore[literal-required]
        text = "".join(choice["text"] for choice in choices)
        whole = formats.completion(head, text, logprobs, choices[-1]["finish_reason"])
        whole["usage"] = chunks[-1]["usage"]
        return whole

    def create_chat_completion(
        self,
        messages: Messages,
        functions: Sequence[Mapping[str, Any]] | None = None,
        function_call: Any = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: Any = None,
        temperature: float = 0.2,
        top_p: float = 0.95,
        top_k: int = 40,
        min_p: float = 0.05,
        typical_p: float = 1.0,
        stream: bool = False,
        stop: str | list[str] | None = None,
        seed: int | None = None,
        response_format: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        repeat_penalty: float = 1.0,
        tfs_z: float = 1.0,
        mirostat_mode: int = 0,
        mirostat_tau: float = 5.0,
        mirostat_eta: float = 0.1,
        model: str | None = None,
        logits_processor: Any = None,
        grammar: Grammar = None,
        logit_bias: Mapping[int, float] | None = None,
        logprobs: bool | None = None,
        top_logprobs: int | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> CreateChatCompletionResponse | Iterator[CreateChatCompletionStreamResponse]:
        """The answer to messages, as llama_cpp.Llama.create_chat_completion gives it, in the GGUF's own template.

        tools reach the template; tool_choice {"type": "function", …} and "required" constrain the answer to a call, with "auto"
        calls are found in it (tools.py). chat_template_kwargs: values that the template may look at, such as enable_thinking."""
        _refuse(mirostat_mode=mirostat_mode, logits_processor=logits_processor)
        if not messages:
            raise ValueError("there are no messages")
        if functions is not None:  # the older names
            tools = [{"type": "function", "function": function} for function in functions]
            named = isinstance(function_call, Mapping)
            tool_choice = {"type": "function", "function": function_call} if named else function_call
        wanted = demand(tools, tool_choice, response_format)
        values = dict(chat_template_kwargs or {})
        if tools:
            values |= {"tools": list(tools), "tool_choice": tool_choice}
        sampling = Sampling(
            temperature, top_k, top_p, min_p, repeat_penalty, frequency_penalty, presence_penalty,
            seed=_seed(seed), typical_p=typical_p, logit_bias=_bias(logit_bias),
        )  # fmt: skip
        text, tokens = self._prompt(list(messages), values)
        head = formats.Head(str(uuid.uuid4()), int(time.time()), model or self.model_path)
        logs = (top_logprobs or 0) if logprobs else None
        pieces = self._pieces(text, tokens, max_tokens, stop, sampling, wanted.grammar or grammar, n_top=logs)
        if stream:
            return self._chat_chunks(head, pieces, wanted, logs is not None)
        with closing(pieces):
            parts = list(pieces)
        end = parts[-1]
        content, calls = read_calls("".join(part.text for part in parts), wanted)
        log = self._chat_logs(end.report, 0, end.last) if logs is not None else None
        return formats.chat_completion(head, end.report, content, calls, log)

    def _chat_chunks(
        self, head: formats.Head, pieces: Generator[Piece, None, None], wanted: Demand, logs: bool
    ) -> Generator[CreateChatCompletionStreamResponse, None, None]:
        """The role with the first token; text as it comes; from where a tool call starts, the calls at the end."""
        finder = StopText([START] if wanted.listens else [])
        in_call = wanted.forced is not None or wanted.any_call
        text, started = "", False
        with closing(pieces):
            for piece in pieces:
                if not started:
                    started = True
                    yield formats.chat_chunk(head, {"role": "assistant"})
                text += piece.text
                log = self._chat_logs(piece.report, piece.first, piece.last) if logs else None
                sure, found = (b"", False) if in_call else finder.feed(piece.text.encode())
                in_call |= found
                if sure or (log is not None and piece.first < piece.last):
                    yield formats.chat_chunk(head, {"content": sure.decode()}, log)
        calls: list[dict[str, Any]] = []
        if in_call:
            _, after, calls = split_calls(text, wanted)
            if after:  # before the calls: to many clients these are the end
                yield formats.chat_chunk(head, {"content": after})
            for delta in formats.call_deltas(calls):
                yield formats.chat_chunk(head, delta)
        elif rest := finder.rest():
            yield formats.chat_chunk(head, {"content": rest.decode()})
        reason = "tool_calls" if calls else piece.report.finish_reason
        yield formats.chat_chunk(head, {}, finish_reason=reason)

    def _chat_logs(self, report: Report, first: int, last: int) -> Any:
        at = slice(first, last)
        return formats.chat_logprobs(
            self._open().context.model, report.tokens[at], report.logprobs[at], report.top_logprobs[at]
        )


def _fetch(repo_id: str, filename: str) -> Path:
    from moespac_llamacpp.fetch import fetch
    from moespac_llamacpp.hubname import match

    file = match(repo_id, filename)
    first, *_ = [fetch(file, name) for name in file.parts]
    return first


def _gbnf(grammar: Grammar) -> str | None:
    return grammar if grammar is None or isinstance(grammar, str) else str(grammar._grammar)


def _seed(seed: int | None) -> int | None:
    """llama.cpp takes a negative seed for a random one."""
    return None if seed is None or seed < 0 else seed


def _bias(logit_bias: Mapping[Any, float] | None) -> dict[int, float]:
    return {int(token): float(bias) for token, bias in (logit_bias or {}).items()}


def _refuse(**given: object) -> None:
    for name, value in given.items():
        if value:
            raise ValueError(
                f"{name} is not supported: drafted tokens are accepted by the law of a fixed sampler chain"
            )


def _plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Messages whose contents are text: templates of text models take nothing else. ValueError: an image or the like."""
    plain = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            kinds = {part.get("type") for part in content} - {"text"}
            if kinds:
                raise ValueError(f"a message has a part of type {kinds.pop()!r}: this is a model of text alone")
            content = "".join(str(part.get("text", "")) for part in content)
        plain.append({**message, "content": content if content is not None else ""})
    return plain
