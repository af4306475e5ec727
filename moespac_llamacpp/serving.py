"""OpenAI's HTTP interface to one Moespac: completions and chats, streamed if asked for, one after the other.

Needs fastapi, which the extra `serve` installs. The application runs under any ASGI server; `moespac serve` takes uvicorn.
"""

from __future__ import annotations

import json
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException as StarletteHTTPException

from moespac_llamacpp import formats, metrics
from moespac_llamacpp.api import Moespac
from moespac_llamacpp.decoder import PromptError
from moespac_llamacpp.jobs import Jobs


class _Body(BaseModel):
    """What both kinds of requests may say. None: the server's default. Other fields are ignored, such as OpenAI's `user`."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = None
    min_p: float | None = Field(None, ge=0, le=1)
    typical_p: float | None = None
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repeat_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    grammar: str | None = None
    n: int | None = None

    def arguments(self) -> dict[str, Any]:
        """For Moespac. ValueError: more than one answer is wanted."""
        if self.n not in (None, 1):
            raise ValueError(f"n is {self.n}: one answer at a time is generated")
        given = self.model_dump(exclude={"n", "stream_options", "max_completion_tokens"}, exclude_none=True)
        return given


class CompletionBody(_Body):
    prompt: str | list[int] | list[str]
    echo: bool = False
    suffix: str | None = None
    logprobs: int | None = None

    def arguments(self) -> dict[str, Any]:
        given = super().arguments()
        if isinstance(self.prompt, list) and self.prompt and isinstance(self.prompt[0], str):
            if len(self.prompt) > 1:
                raise ValueError(f"there are {len(self.prompt)} prompts: send them one at a time")
            given["prompt"] = self.prompt[0]
        return given


class ChatBody(_Body):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    functions: list[dict[str, Any]] | None = None
    function_call: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0)
    chat_template_kwargs: dict[str, Any] | None = None

    def arguments(self) -> dict[str, Any]:
        given = super().arguments()
        if self.max_completion_tokens is not None:
            given["max_tokens"] = self.max_completion_tokens
        return given


class Server:
    """A Moespac, the thread that uses it, and what is counted."""

    def __init__(
        self, llm: Moespac, name: str, defaults: Mapping[str, Any], template: Mapping[str, Any], api_key: str | None
    ) -> None:
        self.llm, self.name, self.defaults, self.template, self.api_key = llm, name, defaults, template, api_key
        self.created = int(time.time())
        self.requests: Counter[tuple[str, str]] = Counter()  # by endpoint and outcome
        self.stats = llm.stats  # as of the last request: the thread alone may ask the model
        self.jobs = Jobs(self._ended)
        llm.on_step = self.jobs.check

    def _ended(self) -> None:
        self.stats = self.llm.stats

    def allows(self, request: Request) -> bool:
        if self.api_key is None:
            return True
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        return secrets.compare_digest(given.encode(), self.api_key.encode())

    async def answer(self, request: Request, body: CompletionBody | ChatBody, call: Callable[..., Any]) -> Response:
        """The response to a request, or the start of its stream; errors before the first token have a status of their own."""
        kind = request.url.path
        try:
            arguments = {**self.defaults, **body.arguments(), "model": self.name}
            if isinstance(body, ChatBody):
                arguments["chat_template_kwargs"] = {**self.template, **(body.chat_template_kwargs or {})}
            usage = bool((body.stream_options or {}).get("include_usage"))
            items = self.jobs.run(lambda: self._items(call, arguments, usage), request.is_disconnected)
            first = await anext(items, None)
        except (ValueError, TypeError) as error:
            self.requests[kind, "refused"] += 1
            code = "context_length_exceeded" if isinstance(error, PromptError) else None
            return failure(400, str(error), "invalid_request_error", code)
        except Exception as error:  # the server goes on
            self.requests[kind, "failed"] += 1
            return failure(500, f"{type(error).__name__}: {error}", "server_error")
        if first is None:  # the client has gone
            self.requests[kind, "aborted"] += 1
            return Response(status_code=499)
        if body.stream:
            return StreamingResponse(self._events(kind, first, items), media_type="text/event-stream")
        self.requests[kind, "done"] += 1
        return JSONResponse(first)

    def _items(self, call: Callable[..., Any], arguments: dict[str, Any], usage: bool) -> Generator[Any, None, None]:
        """In the thread: the whole answer, or its chunks."""
        made = call(**arguments)
        if not arguments.get("stream"):
            yield made
            return
        last: dict[str, Any] = {}
        try:
            for last in made:
                yield last
        finally:
            made.close()
        if usage:
            yield {**last, "choices": [], "usage": formats.usage(self.llm.decoder.report)}

    async def _events(self, kind: str, first: Any, items: AsyncGenerator[Any, None]) -> AsyncIterator[str]:
        """Server-sent events."""
        outcome = "aborted"
        try:
            yield f"data: {json.dumps(first)}\n\n"
            async for item in items:
                yield f"data: {json.dumps(item)}\n\n"
            yield "data: [DONE]\n\n"
            outcome = "done"
        except Exception as error:
            outcome = "failed"
            yield f"data: {json.dumps(error_object(f'{type(error).__name__}: {error}', 'server_error'))}\n\n"
        finally:
            self.requests[kind, outcome] += 1
            await items.aclose()


def error_object(message: str, kind: str, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def failure(status: int, message: str, kind: str, code: str | None = None) -> JSONResponse:
    return JSONResponse(error_object(message, kind, code), status_code=status)


def create_app(
    llm: Moespac,
    *,
    name: str | None = None,
    defaults: Mapping[str, Any] | None = None,
    template: Mapping[str, Any] | None = None,
    api_key: str | None = None,
) -> FastAPI:
    """The application; the caller owns `llm` and leaves it alone meanwhile.

    name: of the model, in answers. defaults: arguments of Moespac.create_completion for what requests leave open. template:
    values for the chat template. api_key: what requests have to bring, but for /health."""
    server = Server(llm, name or llm.options.model.stem, defaults or {}, template or {}, api_key)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        server.jobs.close()

    app = FastAPI(title="moespac", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.server = server

    # A dependency, not a middleware: behind one, a request does not learn that its client has gone.
    async def authorised(request: Request) -> None:
        if not server.allows(request):
            raise HTTPException(401)

    keyed = [Depends(authorised)]

    @app.exception_handler(401)
    async def unauthorised(request: Request, error: HTTPException) -> Response:
        return failure(401, "the API key is missing or wrong", "invalid_request_error", "invalid_api_key")

    @app.exception_handler(
        StarletteHTTPException
    )  # of the router: no such path, no such method, a body that is not text
    async def unknown(request: Request, error: StarletteHTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}"
        return failure(error.status_code, message, "invalid_request_error")

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        where = ", ".join(f"{'.'.join(map(str, e['loc'][1:])) or 'body'}: {e['msg']}" for e in error.errors())
        server.requests[request.url.path, "refused"] += 1
        return failure(400, f"the request is not understood: {where}", "invalid_request_error")

    @app.post("/v1/completions", dependencies=keyed)
    async def completions(request: Request, body: CompletionBody) -> Response:
        return await server.answer(request, body, llm.create_completion)

    @app.post("/v1/chat/completions", dependencies=keyed)
    async def chat_completions(request: Request, body: ChatBody) -> Response:
        return await server.answer(request, body, llm.create_chat_completion)

    @app.get("/v1/models", dependencies=keyed)
    async def models() -> Response:
        entry = {"id": server.name, "object": "model", "created": server.created, "owned_by": "moespac"}
        return JSONResponse({"object": "list", "data": [entry]})

    @app.get("/health")
    async def health() -> Response:
        alive = server.jobs.alive
        return JSONResponse({"status": "ok" if alive else "the worker has ended"}, status_code=200 if alive else 503)

    @app.get("/metrics", dependencies=keyed)
    async def show_metrics() -> Response:
        text = metrics.text(server.stats, server.requests, server.jobs.n_waiting)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    return app
