"""The HTTP interface as OpenAI's client sees it, and what happens to requests of clients that come in numbers and go away."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from moespac_llamacpp import Moespac
from pair import DRAFT, TARGET
from test_chat import HERON, RIVER

MISSING = "not installed: pip install -e '.[dev]'"
pytest.importorskip("fastapi", reason=f"fastapi is {MISSING}")
uvicorn = pytest.importorskip("uvicorn", reason=f"uvicorn is {MISSING}")
httpx = pytest.importorskip("httpx", reason=f"httpx is {MISSING}")
openai = pytest.importorskip("openai", reason=f"openai is {MISSING}")

QUESTION: Any = [{"role": "user", "content": HERON}]
SMALL: dict[str, Any] = {"n_ctx": 512, "n_threads": 1, "cache_share": 0.25}
ENDLESS: dict[str, Any] = {"max_tokens": 3900, "grammar": 'root ::= "heron " root'}  # many seconds, without an end


@contextmanager
def serving(llm: Moespac, **options: Any) -> Iterator[str]:
    """A real server on a free port; its address."""
    from moespac_llamacpp.serving import create_app

    app = create_app(llm, **options)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            app.state.server.jobs.close()
            server.should_exit = True
            thread.join()


@pytest.fixture(scope="module")
def llm() -> Iterator[Moespac]:
    with Moespac(TARGET, draft_model=DRAFT, draft_fixed=True, **(SMALL | {"n_ctx": 4096})) as llm:
        yield llm


@pytest.fixture(scope="module")
def url(llm: Moespac) -> Iterator[str]:
    with serving(llm, name="tiny", defaults={"temperature": 0.0}) as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def metrics(url: str) -> dict[str, float]:
    """All of them, in the format that Prometheus reads."""
    found = {}
    for line in httpx.get(f"{url}/metrics").text.splitlines():
        if not re.fullmatch(r"# (HELP|TYPE) moespac_[a-z_]+ .+", line):
            name, value = re.fullmatch(
                r'(moespac_[a-z_]+(?:\{[a-z]+="[^"]*"(?:,[a-z]+="[^"]*")*\})?) (\S+)', line
            ).groups()  # type: ignore[union-attr]
            found[name] = float(value)
    return found


def outcomes(url: str, endpoint: str) -> dict[str, int]:
    wanted = re.compile(rf'moespac_requests_total\{{endpoint="{endpoint}",outcome="(\w+)"\}}')
    return {m[1]: int(value) for name, value in metrics(url).items() if (m := wanted.fullmatch(name))}


# --- OpenAI's client -------------------------------------------------------------------------------------------------------


def test_openais_client_chats(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    answer = client.chat.completions.create(model="any", messages=QUESTION, max_tokens=9, logprobs=True, top_logprobs=2)
    choice = answer.choices[0]
    assert choice.message.content and choice.message.content.startswith("Heron") and choice.finish_reason == "length"
    assert answer.model == "tiny" and answer.usage and answer.usage.completion_tokens == 9
    assert choice.logprobs and choice.logprobs.content and len(choice.logprobs.content) == 9
    assert all(len(token.top_logprobs) == 2 and token.logprob < 0 for token in choice.logprobs.content)
    chunks = list(
        client.chat.completions.create(
            model="tiny",
            messages=QUESTION,
            max_completion_tokens=9,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert len(chunks) > 8 and chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]).startswith("Heron")
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == [] and chunks[-1].usage and chunks[-1].usage.completion_tokens == 9


def test_openais_client_completes(client: Any) -> None:
    whole = client.completions.create(model="tiny", prompt="The heron", max_tokens=6, logprobs=1, stop=["zebra"])
    assert whole.choices[0].text and whole.choices[0].logprobs and len(whole.choices[0].logprobs.tokens or []) == 6
    for prompt in (["The heron"], [5, 6, 7]):
        assert client.completions.create(model="tiny", prompt=prompt, max_tokens=3).choices[0].text
    chunks = client.completions.create(model="tiny", prompt="The heron", max_tokens=6, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks)


def test_openais_client_gets_structure_and_calls(client: Any) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "count", "schema": schema}}
    answer = client.chat.completions.create(model="tiny", messages=QUESTION, response_format=wanted)
    assert isinstance(json.loads(answer.choices[0].message.content or "")["n"], int)
    tool: Any = {"type": "function", "function": {"name": "count", "parameters": schema}}
    called = client.chat.completions.create(model="tiny", messages=QUESTION, tools=[tool], tool_choice="required")
    assert called.choices[0].finish_reason == "tool_calls"
    (call,) = called.choices[0].message.tool_calls or []
    assert call.function.name == "count" and isinstance(json.loads(call.function.arguments)["n"], int)  # type: ignore[union-attr]


def test_refusals_are_openais_errors(client: Any, url: str) -> None:
    for extra, sentence in (
        ({"n": 2}, "n is 2: one answer at a time is generated"),
        ({"extra_body": {"grammar": "root ::= x"}}, "the grammar cannot be parsed: Undefined rule identifier 'x'"),
        ({"response_format": {"type": "xml"}}, "response_format is text, json_object or json_schema, not 'xml'"),
        ({"temperature": -1}, "the request is not understood: temperature"),
    ):
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match=re.escape(sentence)) as error:
                client.chat.completions.create(model="tiny", messages=QUESTION, stream=stream, **extra)
            assert error.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError, match="the prompt has 5000 tokens, the context has room") as error:
        client.completions.create(model="tiny", prompt=[5] * 5000)
    assert error.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="there are 2 prompts: send them one at a time"):
        client.completions.create(model="tiny", prompt=["a", "b"])
    assert httpx.post(f"{url}/v1/chat/completions", content=b"{").status_code == 400
    for path, body, status, words in (
        ("completions", b'{"prompt": "\xff"}', 400, "parsing the body"),
        ("completions", b'{"prompt": ""}', 400, "the prompt is empty"),
        ("completions", b'{"prompt": "a \\ud83d"}', 400, "the text is not Unicode at position 2"),
        ("chat/completions", b'{"messages": []}', 400, "there are no messages"),
        ("completions", b"[]", 400, "body: Input should be a valid dictionary"),
        ("embeddings", b"{}", 404, "POST /v1/embeddings: Not Found"),
    ):
        answer = httpx.post(f"{url}/v1/{path}", content=body, headers={"content-type": "application/json"})
        assert answer.status_code == status and words in answer.json()["error"]["message"], answer.text
        assert answer.json()["error"]["code"] is None
    assert httpx.get(f"{url}/v1/completions").json()["error"]["message"] == "GET /v1/completions: Method Not Allowed"
    assert client.completions.create(model="tiny", prompt="The heron", max_tokens=2).choices[0].text


def test_a_failure_is_told_and_the_server_goes_on(client: Any, llm: Moespac, monkeypatch: pytest.MonkeyPatch) -> None:
    context, left = llm.decoder.context, [3]

    def failing(tokens: list[int], *, all_logits: bool = False) -> Any:
        left[0] -= 1
        if left[0] <= 0:
            raise RuntimeError("decoding 1 tokens failed with code -3: no memory")
        return type(context).decode(context, tokens, all_logits=all_logits)

    monkeypatch.setattr(context, "decode", failing)
    for stream in (True, False):
        left[0] = 3 if stream else 1
        with pytest.raises(openai.APIError, match="RuntimeError: decoding 1 tokens failed with code -3: no memory"):
            list(client.completions.create(model="tiny", prompt="The heron", max_tokens=20, stream=stream))
    monkeypatch.undo()
    assert client.completions.create(model="tiny", prompt="The heron", max_tokens=20).choices[0].text


def test_a_second_turn_reuses_the_first(client: Any, url: str) -> None:
    first = client.chat.completions.create(model="tiny", messages=QUESTION, max_tokens=20)
    before = metrics(url)
    said = {"role": "assistant", "content": first.choices[0].message.content}
    client.chat.completions.create(
        model="tiny", messages=[*QUESTION, said, {"role": "user", "content": RIVER}], max_tokens=5
    )
    after = metrics(url)
    new = {
        name: after[name] - before[name]
        for name in ("moespac_prompt_tokens_total", "moespac_prompt_tokens_reused_total")
    }
    assert first.usage
    assert new["moespac_prompt_tokens_reused_total"] >= first.usage.total_tokens - 1
    assert new["moespac_prompt_tokens_total"] - new["moespac_prompt_tokens_reused_total"] < 24


def test_metrics_tell_what_was_done(client: Any, url: str) -> None:
    before = metrics(url)
    client.completions.create(model="tiny", prompt="and his own ways, and his own ways, and", max_tokens=30)
    after = metrics(url)
    assert after["moespac_generated_tokens_total"] - before["moespac_generated_tokens_total"] == 30
    for name in ("drafted_tokens", "accepted_tokens", "hot_pairs", "cold_pairs", "generation_seconds"):
        assert after[f"moespac_{name}_total"] > before[f"moespac_{name}_total"] >= 0
    assert after["moespac_resident_expert_bytes"] > 1e6 and after["moespac_context_size_tokens"] == 4096
    assert httpx.get(f"{url}/health").json() == {"status": "ok"}


# --- many clients, and such that go away -----------------------------------------------------------------------------------


def wait_until(true: Any) -> None:
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end, "it did not happen within 20 s"
        time.sleep(0.05)


def test_eight_clients_of_which_some_abort(url: str) -> None:
    """Each of those that stay gets its own text; those that go, in the midst of a stream, before its first token or while they
    wait for a whole answer, cost no more than what was generated by then."""
    before, counted = outcomes(url, "/v1/completions"), metrics(url)
    answers: dict[int, str] = {}
    failures: list[str] = []

    def stay(number: int) -> None:
        text = f"client {number} is served"
        body = {
            "prompt": f"Client {number}:",
            "max_tokens": 60,
            "grammar": f'root ::= "{text}"',
            "stream": number % 2 == 0,
        }
        try:
            reply = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
            lines = [line[6:] for line in reply.text.splitlines() if line.startswith("data: {")]
            chunks = [json.loads(line) for line in lines] if body["stream"] else [reply.json()]
            answers[number] = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        except Exception as error:
            failures.append(f"client {number}: {error!r}")

    def leave(number: int, stream: bool, patience: float) -> None:
        body = {"prompt": f"Client {number}:", "stream": stream, **ENDLESS}
        try:
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=patience) as reply:
                for _ in reply.iter_lines():
                    return
        except httpx.TimeoutException:
            pass

    threads = [threading.Thread(target=stay, args=(number,)) for number in range(4)]
    ways = ((True, 60), (True, 60), (False, 0.4), (True, 0.05))
    threads += [threading.Thread(target=leave, args=(4 + i, *way)) for i, way in enumerate(ways)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == [] and answers == {number: f"client {number} is served" for number in range(4)}
    wait_until(lambda: outcomes(url, "/v1/completions").get("aborted", 0) >= before.get("aborted", 0) + 4)
    after = outcomes(url, "/v1/completions")
    assert after["aborted"] == before.get("aborted", 0) + 4 and after["done"] == before.get("done", 0) + 4
    assert after.get("failed", 0) == before.get("failed", 0)
    wait_until(lambda: metrics(url)["moespac_requests_waiting"] == 0)
    httpx.post(f"{url}/v1/completions", json={"prompt": "The heron", "max_tokens": 1})  # comes after the last of them
    generated = metrics(url)["moespac_generated_tokens_total"] - counted["moespac_generated_tokens_total"]
    assert generated < 2000, generated


def test_a_stream_that_nobody_reads_any_more_ends_soon(url: str) -> None:
    counted = metrics(url)
    with httpx.stream("POST", f"{url}/v1/completions", json={"prompt": "x", "stream": True, **ENDLESS}) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        for _ in reply.iter_lines():
            break
    wait_until(lambda: metrics(url)["moespac_generated_tokens_total"] > counted["moespac_generated_tokens_total"])
    generated = metrics(url)["moespac_generated_tokens_total"] - counted["moespac_generated_tokens_total"]
    assert 0 < generated < 2000


# --- access, and the command -----------------------------------------------------------------------------------------------


def test_a_key_opens_all_but_health() -> None:
    with (
        Moespac(TARGET, draft="none", **SMALL) as llm,
        serving(llm, api_key="sesame") as url,
    ):
        assert httpx.get(f"{url}/health").status_code == 200
        for path in ("/v1/models", "/metrics"):
            for key, status in ((None, 401), ("wrong", 401), ("sesame", 200)):
                headers = {"Authorization": f"Bearer {key}"} if key else {}
                assert httpx.get(f"{url}{path}", headers=headers).status_code == status
        stranger = openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0)
        with stranger, pytest.raises(openai.AuthenticationError, match="the API key is missing or wrong"):
            stranger.completions.create(model="tiny", prompt="x")
        with openai.OpenAI(base_url=f"{url}/v1", api_key="sesame") as client:
            assert client.completions.create(model="tiny", prompt="The heron", max_tokens=3).choices[0].text


def serve(*arguments: str, before: str = "") -> subprocess.Popen[str]:
    script = f"{before}\nfrom moespac_llamacpp.cli import main; main()"
    command = [sys.executable, "-c", script, "serve", "-t", "1", "-c", "512", "--port", "0", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_the_command_serves_until_it_is_interrupted() -> None:
    process = serve("--alias", "mine", "--temp", "0", "--grammar", 'root ::= "yes"')
    try:
        assert process.stderr
        found = None
        while not found:
            line = process.stderr.readline()
            assert line, "it ended"
            found = re.search(r"serving .*tiny-moe-Q4_K_M\.gguf at (http://127\.0\.0\.1:\d+)/v1", line)
        reply = httpx.post(f"{found[1]}/v1/completions", json={"prompt": "The heron"}, timeout=30).json()
        assert reply["model"] == "mine" and reply["choices"][0]["text"] == "yes"  # as the options say
        with httpx.stream(
            "POST", f"{found[1]}/v1/completions", json={"prompt": "x", "stream": True, **ENDLESS}
        ) as reply:
            lines = reply.iter_lines()
            assert next(lines).startswith("data: ")
            process.send_signal(signal.SIGINT)  # an answer under way ends, and keeps nobody
            assert len(list(lines)) < 1000
        _, rest = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 0 and "Traceback" not in rest


def test_what_keeps_it_from_serving_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        _, said = (process := serve("--port", str(port))).communicate(timeout=30)
        assert process.returncode == 1
        assert (
            said == f"moespac: cannot listen on 127.0.0.1, port {port}: Address already in use: choose another --port\n"
        )
    _, said = (process := serve("--host", "no-such-host.invalid")).communicate(timeout=30)
    assert said == "moespac: cannot listen on no-such-host.invalid: not a name or an address of this machine\n"
    _, said = (process := serve(before="import sys; sys.modules['fastapi'] = None")).communicate(timeout=30)
    assert process.returncode == 1 and said.startswith("moespac: serving needs more packages (")
    assert said.endswith("pip install fastapi uvicorn\n")
