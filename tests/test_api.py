"""Moespac for programs: the calls, types and formats of llama_cpp.Llama, the model's own law, nothing left behind."""

from __future__ import annotations

import gc
import inspect
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import gguf
import llama_cpp
import pytest
from gguf.scripts.gguf_new_metadata import MetadataDetails, copy_with_new_metadata
from typer.testing import CliRunner

from hub import Hub, start_hub
from moespac_llamacpp import Moespac, native
from moespac_llamacpp.api import Piece
from moespac_llamacpp.cli import app
from moespac_llamacpp.commands.options import Execution
from moespac_llamacpp.decoder import PromptError, Report
from moespac_llamacpp.formats import Head
from moespac_llamacpp.grammar import GrammarError
from moespac_llamacpp.models import LoadError
from moespac_llamacpp.tools import Demand, demand, read_calls
from pair import DRAFT, PROMPTS, TARGET
from test_chat import HERON, RIVER

QUESTION = [{"role": "user", "content": HERON}]
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string", "maxLength": 8}},
            "required": ["word"],
        },
    },
}
SURE = PROMPTS[
    4
]  # the model is never in doubt how this goes on: no likely tokens are closer than upstream's own rounding
SMALL: dict[str, Any] = {"n_ctx": 512, "n_threads": 1, "cache_share": 0.25}


@pytest.fixture(scope="module")
def llm() -> Iterator[Moespac]:
    with Moespac(TARGET, draft_model=DRAFT, **SMALL) as llm:
        yield llm


@pytest.fixture(scope="module")
def llama() -> Iterator[Any]:
    """llama-cpp-python's own class with the same model."""
    with closing(
        llama_cpp.Llama(str(TARGET), n_ctx=512, n_threads=1, n_threads_batch=1, logits_all=True, verbose=False)
    ) as llama:
        yield llama


def same_shape(ours: Any, theirs: Any, path: str = "") -> None:
    """The same keys and types all the way down; lists by their first items."""
    if isinstance(theirs, dict) and not path.endswith("top_logprobs/"):
        assert isinstance(ours, dict) and set(ours) == set(theirs), path
        for key in theirs:
            same_shape(ours[key], theirs[key], f"{path}{key}/")
    elif isinstance(theirs, list):
        assert isinstance(ours, list) and bool(ours) == bool(theirs), path
        if theirs:
            same_shape(ours[0], theirs[0], path)
    elif theirs is not None:  # where there is nothing there, there may be something here: bytes of tokens
        assert isinstance(ours, float if "float" in type(theirs).__name__ else type(theirs)), path


# --- as llama-cpp-python ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["create_completion", "create_chat_completion", "__call__"])
def test_signatures_are_llama_cpp_pythons(name: str) -> None:
    ours = inspect.signature(getattr(Moespac, name)).parameters
    theirs = inspect.signature(getattr(llama_cpp.Llama, name)).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    for parameter in theirs.values():
        default = ours[parameter.name].default
        assert default == parameter.default or (default is None and parameter.default == []), parameter.name
    assert set(ours) - set(theirs) <= {"chat_template_kwargs"}


def test_a_completion_is_what_llama_cpp_python_gives(llm: Moespac, llama: Any) -> None:
    prompt = SURE
    for extra in ({}, {"logprobs": 3}, {"logprobs": 2, "echo": True}, {"echo": True}):
        options: dict[str, Any] = {"max_tokens": 8, "temperature": 0, **extra}
        ours, theirs = llm.create_completion(prompt, **options), llama.create_completion(prompt, **options)
        same_shape(ours, theirs)
        a, b = ours["choices"][0], theirs["choices"][0]
        assert (a["text"], a["finish_reason"], ours["usage"]) == (b["text"], b["finish_reason"], theirs["usage"])
        if "logprobs" in extra:
            a, b = a["logprobs"], b["logprobs"]
            if "echo" in extra:  # theirs are those of the token after, and one is missing
                n = len(b["tokens"])
                assert a["tokens"][:n] == b["tokens"] and a["text_offset"][:n] == b["text_offset"]
                assert a["token_logprobs"][0] is None and a["top_logprobs"][0] is None
                assert "".join(a["tokens"]) == ours["choices"][0]["text"]
                continue
            assert (a["tokens"], a["text_offset"]) == (b["tokens"], b["text_offset"])
            assert a["token_logprobs"] == pytest.approx([float(p) for p in b["token_logprobs"]], abs=0.1)
            for mine, other in zip(a["top_logprobs"], b["top_logprobs"], strict=True):
                assert len(mine) == len(other) and max(mine.values()) == pytest.approx(
                    float(max(other.values())), abs=0.1
                )


def test_a_chat_completion_is_what_llama_cpp_python_gives(llm: Moespac, llama: Any) -> None:
    options: dict[str, Any] = {"max_tokens": 9, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    question = [{"role": "user", "content": 'What does "walk" mean?'}]  # the model is never in doubt here
    ours, theirs = llm.create_chat_completion(question, **options), llama.create_chat_completion(question, **options)
    same_shape(ours, theirs)
    a, b = ours["choices"][0], theirs["choices"][0]
    assert a["message"] == b["message"] and a["finish_reason"] == b["finish_reason"] == "length"
    mine, other = ([token["token"] for token in choice["logprobs"]["content"]] for choice in (a, b))
    assert mine == other and len(mine) == 9
    for chunks in (
        llm.create_chat_completion(question, stream=True, **options),
        llama.create_chat_completion(question, stream=True, **options),
    ):
        chunks = list(chunks)
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant"} and chunks[-1]["choices"][0]["delta"] == {}
        assert chunks[-1]["choices"][0]["finish_reason"] == "length" and chunks[1]["object"] == "chat.completion.chunk"
        assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == a["message"]["content"]
        assert {len(c["choices"][0]["logprobs"]["content"]) for c in chunks[1:-1]} == {1}


def test_a_stream_is_the_whole_in_pieces(llm: Moespac) -> None:
    options: dict[str, Any] = {"max_tokens": 30, "temperature": 0, "logprobs": 1, "stop": ["zebra", "?!"]}
    whole = llm.create_completion(SURE, **options)
    chunks = list(llm.create_completion(SURE, stream=True, **options))
    assert len(chunks) > 10 and len({chunk["id"] for chunk in chunks}) == 1
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
    for key, values in whole["choices"][0]["logprobs"].items():
        assert [type(v) for p in parts for v in p[key]] == [type(v) for v in values]
        if key in ("tokens", "text_offset"):
            assert [v for p in parts for v in p[key]] == values
    assert [c["choices"][0]["finish_reason"] for c in chunks[-2:]] == [None, whole["choices"][0]["finish_reason"]]


def test_log_probabilities_end_with_the_text(llm: Moespac) -> None:
    """Tokens of a stop string, or held back for one, are not in the text."""
    free = llm.create_completion(SURE, max_tokens=12, temperature=0, logprobs=0)["choices"][0]
    tokens = free["logprobs"]["tokens"]
    stop = tokens[5] + tokens[6]
    cut = llm.create_completion(SURE, max_tokens=12, temperature=0, logprobs=0, stop=stop)["choices"][0]
    n = free["text"].index(stop)
    assert cut["text"] == free["text"][:n] and cut["finish_reason"] == "stop"
    assert "".join(cut["logprobs"]["tokens"]) == cut["text"]
    assert cut["logprobs"]["token_logprobs"] == pytest.approx(
        free["logprobs"]["token_logprobs"][: len(cut["logprobs"]["tokens"])], abs=0.1
    )


def test_tokens_and_text_go_in_and_out(llm: Moespac, llama: Any) -> None:
    assert llm.tokenize(b"The heron<|im_end|>", special=True) == llama.tokenize(b"The heron<|im_end|>", special=True)
    tokens = llm.tokenize(SURE.encode())
    assert llm.detokenize(tokens) == SURE.encode()
    texts = [llm.create_completion(p, max_tokens=5, temperature=0)["choices"][0]["text"] for p in (SURE, tokens)]
    assert texts[0] == texts[1] == llm(SURE, max_tokens=5, temperature=0)["choices"][0]["text"]


def test_a_bias_a_seed_and_a_grammar_are_obeyed(llm: Moespac) -> None:
    token = llm.tokenize(b" zebra", add_bos=False)[0]
    said = llm.create_completion("The heron", max_tokens=3, temperature=0, logit_bias={str(token): 100})
    assert said["choices"][0]["text"] == llm.detokenize([token]).decode() * 3
    grammar = llama_cpp.LlamaGrammar.from_string('root ::= "yes" | "no"')
    assert llm.create_completion("The heron", grammar=grammar)["choices"][0]["text"] in ("yes", "no")
    assert llm.generate("The heron", grammar='root ::= "yes"') == "yes"
    assert json.loads(llm.generate("The heron", json_schema={"enum": [17]})) == 17


def test_what_has_no_law_is_refused_in_one_sentence(llm: Moespac) -> None:
    for name, value in {
        "mirostat_mode": 2,
        "logits_processor": [len],
        "stopping_criteria": [len],
        "suffix": "x",
    }.items():
        with pytest.raises(ValueError, match=f"^{name} is not supported: drafted tokens are accepted by the law"):
            llm.create_completion("x", **{name: value})
    with pytest.raises(ValueError, match="a message has a part of type 'image_url': this is a model of text alone"):
        llm.create_chat_completion([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}])
    with pytest.raises(PromptError, match="the prompt has 600 tokens, the context has room for 1 to 512"):
        llm.create_completion([5] * 600)
    with pytest.raises(ValueError, match="a text follows a grammar or a JSON schema, not both"):
        llm.generate("x", grammar="x", json_schema={})
    with pytest.raises(GrammarError, match="Undefined rule identifier 'x'"):
        llm.generate("x", grammar="root ::= x")
    assert llm.generate("The heron", 3)  # none of it did harm


def test_content_in_parts_is_text(llm: Moespac) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": RIVER[:6]}, {"type": "text", "text": RIVER[6:]}]}]
    assert llm.generate(parts, 8) == llm.generate([{"role": "user", "content": RIVER}], 8) != ""


def test_more_threads_than_cores_are_told() -> None:
    n = len(os.sched_getaffinity(0))
    sentence = f"{n + 1} threads share {n} cores: they wait for one another at every operation, give at most {n} (-t)"
    for given, told in (
        ({"n_threads": n + 1}, [sentence]),
        ({"n_threads": n}, []),
        ({"n_threads_batch": n + 1}, [sentence]),
    ):
        with Moespac(n_ctx=256, **given) as llm:
            assert llm.notices == told


# --- tools and formats -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def talkative(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Moespac]:
    """The same model with a template that shows tools, and thinks unless it is told not to."""
    template = (
        "{% if tools %}tools: {% for tool in tools %}{{ tool.function.name }} {% endfor %}{% endif %}"
        "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
        "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}assistant:"
    )
    path = tmp_path_factory.mktemp("model") / "talkative.gguf"
    reader = gguf.GGUFReader(TARGET)
    writer = gguf.GGUFWriter(path, "qwen3moe")
    details = MetadataDetails(gguf.GGUFValueType.STRING, template)
    copy_with_new_metadata(reader, writer, {gguf.Keys.Tokenizer.CHAT_TEMPLATE: details}, [])
    with Moespac(path, draft="none", **SMALL) as llm:
        yield llm


def test_the_template_sees_tools_and_values(talkative: Moespac) -> None:
    seen = []
    for values in ({}, {"tools": [TOOL]}, {"chat_template_kwargs": {"enable_thinking": False}}):
        answer = talkative.create_chat_completion(QUESTION, max_tokens=1, **values)
        tokens = talkative.decoder._kv[: answer["usage"]["prompt_tokens"]]
        seen.append(talkative.detokenize(tokens).decode())
    plain = f"user: {HERON}\nassistant:"
    assert seen == [plain, f"tools: look_up {plain}", plain.replace("assistant", "<think></think>assistant")]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look_up"}}])
def test_a_call_that_is_demanded_comes(llm: Moespac, choice: Any) -> None:
    answer = llm.create_chat_completion(QUESTION, tools=[TOOL], tool_choice=choice)["choices"][0]
    assert answer["finish_reason"] == "tool_calls" and answer["message"]["content"] is None
    call = answer["message"]["tool_calls"][0]
    assert call["type"] == "function" and call["function"]["name"] == "look_up"
    assert set(json.loads(call["function"]["arguments"])) == {"word"}
    chunks = list(llm.create_chat_completion(QUESTION, tools=[TOOL], tool_choice=choice, stream=True))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert not any(delta.get("content") for delta in deltas)
    (streamed,) = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert streamed["index"] == 0 and set(json.loads(streamed["function"]["arguments"])) == {"word"}
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    older = llm.create_chat_completion(
        QUESTION,
        functions=[TOOL["function"]],
        function_call="required" if choice == "required" else {"name": "look_up"},
    )
    assert older["choices"][0]["finish_reason"] == "tool_calls"


def test_calls_are_found_in_an_answer(llm: Moespac) -> None:
    """The tiny model writes none by itself: a grammar makes it."""
    written = r'root ::= "Let me see.\n<tool_call>\n{\"name\": \"look_up\", \"arguments\": {\"word\": \"heron\"}}\n</tool_call>"'
    whole = llm.create_chat_completion(QUESTION, tools=[TOOL], grammar=written)["choices"][0]
    assert whole["message"]["content"] == "Let me see." and whole["finish_reason"] == "tool_calls"
    assert whole["message"]["tool_calls"][0]["function"] == {"name": "look_up", "arguments": '{"word": "heron"}'}
    chunks = list(llm.create_chat_completion(QUESTION, tools=[TOOL], grammar=written, stream=True))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content") or "" for delta in deltas) == "Let me see.\n"
    assert [d["tool_calls"][0]["function"]["name"] for d in deltas if "tool_calls" in d] == ["look_up"]
    for wrong in (written.replace("{", ""), written[: written.index("heron")] + '"'):
        text = llm.generate(QUESTION, grammar=wrong)
        broken = list(llm.create_chat_completion(QUESTION, tools=[TOOL], grammar=wrong, stream=True))
        assert "".join(c["choices"][0]["delta"].get("content") or "" for c in broken) == text
        assert broken[-1]["choices"][0]["finish_reason"] == "stop"
        assert (
            llm.create_chat_completion(QUESTION, tools=[TOOL], grammar=wrong)["choices"][0]["message"]["content"]
            == text
        )


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ('{"name": "look", "arguments": {"at": "a <tool_call> th', Demand(any_call=True)),  # cut off
        ("So <tool_call>is what it writes", Demand(listens=True)),
        ("So é<tool_", Demand(listens=True)),
    ],
)
def test_a_stream_loses_nothing_of_what_is_no_call(llm: Moespac, text: str, wanted: Demand) -> None:
    report = Report(finish_reason="length")
    pieces = (Piece(text[i : i + 3], 0, 0, report) for i in range(0, len(text), 3))
    chunks = llm._chat_chunks(Head("id", 0, "tiny"), cast(Any, pieces), wanted, False)
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == text


@pytest.mark.parametrize(
    ("after", "kept"),
    [
        ("\nThat is all.\n", "\nThat is all.\n"),
        ("\n\n", ""),
        ("\n<tool_call>is what it writes", "<tool_call>is what it writes"),
        ('\nand <tool_call>{"name": "g"}</tool_call> too', "\nand  too"),
    ],
)
def test_a_stream_keeps_the_text_after_a_call(llm: Moespac, after: str, kept: str) -> None:
    """The same text and calls as in one piece, and the text first: to many clients calls are the end."""
    text = 'Well.\n<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>' + after
    report = Report(finish_reason="stop")
    pieces = (Piece(text[i : i + 3], 0, 0, report) for i in range(0, len(text), 3))
    chunks = list(llm._chat_chunks(Head("id", 0, "tiny"), cast(Any, pieces), Demand(listens=True), False))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    content = "".join(delta.get("content") or "" for delta in deltas)
    assert content == "Well.\n" + kept
    whole, calls = read_calls(text, Demand(listens=True))
    assert content.strip() == whole
    at = [i for i, delta in enumerate(deltas) if "tool_calls" in delta]
    assert [deltas[i]["tool_calls"][0]["function"] for i in at] == [one["function"] for one in calls]
    assert not any(delta.get("content") for delta in deltas[at[0] :])
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_several_calls_and_what_is_none() -> None:
    listens = Demand(listens=True)
    one = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
    text, calls = read_calls(f"{one}\n{one}", listens)
    assert text is None and [c["function"]["arguments"] for c in calls] == ['{"x": 1}'] * 2
    assert len({c["id"] for c in calls}) == 2
    assert read_calls(one, Demand()) == (one, [])
    assert read_calls("<tool_call>{no JSON", listens) == ("<tool_call>{no JSON", [])
    assert read_calls("[1]", Demand(any_call=True)) == ("[1]", [])


def test_a_response_format_is_kept(llm: Moespac) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    for wanted in (
        {"type": "json_object", "schema": schema},
        {"type": "json_schema", "json_schema": {"name": "count", "schema": schema}},
    ):
        said = llm.create_chat_completion(QUESTION, response_format=wanted)["choices"][0]["message"]["content"]
        assert isinstance(json.loads(said)["n"], int)
    said = llm.create_chat_completion(QUESTION, response_format={"type": "json_object"}, max_tokens=20)
    assert said["choices"][0]["message"]["content"].startswith("{")
    plain = llm.create_chat_completion(QUESTION, response_format={"type": "text"}, max_tokens=5, temperature=0)
    assert plain["choices"][0]["message"]["content"].startswith("Heron")


def test_wishes_that_cannot_be_met_are_one_sentence() -> None:
    named = {"type": "function", "function": {"name": "other"}}
    for arguments, sentence in (
        (([TOOL], named, None), "tool_choice asks for 'other', but the tools are look_up"),
        ((None, "required", None), "tool_choice asks for a tool, but there are no tools"),
        (([TOOL], "sometimes", None), "tool_choice is none, auto, required or a function's name, not 'sometimes'"),
        (([{"name": "f"}], "auto", None), 'a tool is {"type": "function", "function": {"name": …, "parameters": …}}'),
        (([TOOL], {"function": "f"}, None), "tool_choice asks for 'None', but the tools are look_up"),
        ((None, None, {"type": "xml"}), "response_format is text, json_object or json_schema, not 'xml'"),
        ((None, None, {"type": "json_schema"}), "response_format json_schema needs a schema"),
    ):
        with pytest.raises(ValueError, match="^" + re.escape(sentence)):
            demand(*arguments)  # type: ignore[arg-type]


# --- one model, many texts -------------------------------------------------------------------------------------------------


def test_only_what_is_new_is_evaluated_between_requests(llm: Moespac) -> None:
    answer = llm.create_chat_completion(QUESTION, max_tokens=20, temperature=0.8, seed=5)
    first = llm.stats.last
    said = answer["choices"][0]["message"]
    llm.create_chat_completion([*QUESTION, said, {"role": "user", "content": RIVER}], max_tokens=5)
    second = llm.stats.last
    assert second.n_reused >= first.n_prompt + first.n_generated - 1
    assert second.n_prompt - second.n_reused < 24
    assert llm.stats.total.n_turns > 2 and llm.stats.n_past <= llm.stats.n_ctx == 512
    assert llm.stats.device_bytes >= llm.stats.last.resident_bytes > 0


def test_a_stream_that_was_left_for_another_text_ends_with_a_sentence(llm: Moespac) -> None:
    left = llm.stream("The heron stood in the river and", 50)
    before = next(left)
    other = llm.generate(SURE, 10)
    with pytest.raises(RuntimeError, match="this text cannot go on: another one was started"):
        next(left)
    assert before and other == llm.generate(SURE, 10)
    left = llm.stream("The heron", 50, grammar='root ::= "a"+')
    next(left)
    with closing(left):
        assert "a" not in llm.generate("1, 2,", 3, logit_bias=dict.fromkeys(llm.tokenize(b"a", add_bos=False), -100))


def test_threads_take_turns(llm: Moespac) -> None:
    """A text that starts ends the others; nobody gets a text by another one's grammar."""
    words = ("heron " * 4, "river " * 4, "stone " * 4)
    texts: list[tuple[str, str]] = []
    refused: list[str] = []

    def ask(words: str) -> None:
        for _ in range(8):
            try:
                texts.append((words, llm.generate("The", grammar=f'root ::= "{words}"')))
            except RuntimeError as error:
                refused.append(str(error))

    threads = [threading.Thread(target=ask, args=(word,)) for word in words]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) + len(refused) == 24 and texts
    assert all(wanted == got for wanted, got in texts)
    assert all("cannot go on" in sentence for sentence in refused)
    assert llm.generate("The", grammar='root ::= "end"') == "end"


def test_two_models_in_one_process(llm: Moespac) -> None:
    with Moespac(TARGET, draft="ngram", **(SMALL | {"cache_share": 0.5})) as other:
        streams = [m.stream("The heron stood in the river and", 20) for m in (llm, other)]
        for a, b in zip(*streams, strict=False):
            assert a and b
        assert other.stats.device_bytes > llm.stats.device_bytes
        assert other.decoder.report.n_generated > 15 < llm.decoder.report.n_generated
    assert llm.generate("The heron", 3)


def test_closing_twice_is_safe_and_what_is_closed_says_so() -> None:
    llm = Moespac(TARGET, draft="none", **SMALL)
    stream = llm.stream("The heron", 50)
    assert next(stream)
    llm.close()
    llm.close()
    assert llm.closed
    for call in (
        lambda: llm.generate("x"),
        lambda: llm.stats,
        lambda: llm.tokenize(b"x"),
        lambda: llm.create_completion("x"),
    ):
        with pytest.raises(ValueError, match=r"tiny-moe-Q4_K_M\.gguf: this model is closed"):
            call()
    with pytest.raises(
        RuntimeError, match="cannot go on: another one was started with the model since, or it was closed"
    ):
        next(stream)


@pytest.mark.parametrize("n_calls", [2, 3])
def test_a_model_can_be_closed_while_it_reads_a_prompt(n_calls: int) -> None:
    """From within: on_step is called before the prompt, before its only piece, and after it."""
    with Moespac(TARGET, draft="none", n_ctx=256, cache_share=0.25) as llm:
        calls = iter(range(1, 10))

        def close() -> None:
            if next(calls) == n_calls:
                llm.close()

        llm.on_step = close
        with pytest.raises(RuntimeError, match="this text cannot go on"):
            llm.generate("The heron", max_tokens=4)
        assert llm.closed


def test_a_model_that_nobody_closed_is_freed() -> None:
    llm = Moespac(TARGET, draft="none", **SMALL)
    context = llm.decoder.context
    assert context.pointer
    del llm
    gc.collect()
    assert context.pointer is None
    script = "from moespac_llamacpp import Moespac; print(Moespac(n_ctx=256, n_threads=1).generate('The heron', 3))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stderr == "" and len(done.stdout) > 3


def test_several_sequences_and_devices_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="n_parallel: one text at a time is generated with a model"):
        Moespac(TARGET, n_parallel=2)
    with pytest.raises(ValueError, match="tensor_split: a model runs on one device and the CPU"):
        Moespac(TARGET, tensor_split=[0.5, 0.5])
    with pytest.raises(TypeError, match="unexpected keyword argument 'n_contexts'"):
        Moespac(TARGET, n_contexts=512)
    with pytest.raises(ValueError, match=r"there is no device 'GPU7'; there are .*CPU"):
        Moespac(TARGET, device="GPU7")
    with pytest.raises(LoadError, match=r"missing\.gguf: there is no such file"):
        Moespac(tmp_path / "missing.gguf")
    for options, sentence in (
        ({"cache_type_k": "q3"}, "the type of the K cache takes f32, f16, .*, not 'q3'"),
        ({"flash_attn": "maybe"}, "flash attention takes on, off, auto, not 'maybe'"),
        ({"override_tensor": ("x",)}, "a tensor override is <pattern>=<buffer type>, not 'x'"),
        ({"override_tensor": ("x=GPU7",)}, "there is no buffer type 'GPU7' for tensors; there are .*CPU"),
        ({"draft": "best"}, "the draft is model, ngram or none, not 'best'"),
        ({"policy": "best"}, "there is no policy 'best'"),
    ):
        with pytest.raises(ValueError, match=sentence):
            Moespac(TARGET, **options)


def test_llama_cpps_options_reach_it() -> None:
    with Moespac(TARGET, draft="none", flash_attn="on", cache_type_k="q8_0", cache_type_v="q8_0", **SMALL) as small:
        assert len(small.generate("The heron stood", 10)) > 10
    with pytest.raises(LoadError, match=r"no context of 512 tokens: .*V cache"):
        Moespac(TARGET, draft="none", flash_attn="off", cache_type_v="q8_0", **SMALL)
    with Moespac(
        TARGET, draft="none", override_tensor=(r"attn_.*=CPU,output=CPU",), n_threads_batch=1, **SMALL
    ) as moved:
        assert len(moved.generate("The heron stood", 10)) > 10


def test_the_command_line_takes_them_by_llama_cpps_names() -> None:
    given = (
        "-c 512 -t 1 -tb 1 -b 256 -ub 128 -ngl 99 -ngld 99 -fa on -ctk q8_0 -ctv q8_0 -ot attn_.*=CPU --jinja -rea off"
    )
    done = CliRunner().invoke(app, ["generate", HERON, "--chat", "-n", "8", *given.split()])
    assert done.exit_code == 0 and done.stdout.startswith("Heron"), done.stderr
    for option, value, sentence in (
        ("-ctk", "q3", "the type of the K cache takes f32, f16, bf16, q8_0"),
        ("-ot", "x=GPU7", "there is no buffer type 'GPU7' for tensors; there are "),
        ("--chat-template-kwargs", "[1]", "--chat-template-kwargs is a JSON object"),
    ):
        done = CliRunner().invoke(app, ["generate", "x", "-t", "1", "--chat", option, value])
        assert done.exit_code == 1 and done.stdout == "" and f"moespac: {sentence}" in done.stderr


@pytest.mark.parametrize("execution", ["portable", "in-stream"])
def test_either_execution_can_be_chosen(execution: str) -> None:
    with Moespac(execution=execution, n_ctx=256, cache_share=0.5, draft="none") as llm:
        experts = llm.decoder.context.experts
        assert experts is not None
        assert {row.in_stream for row in experts.rows()} == {execution == "in-stream"}
        assert llm.generate("The heron", max_tokens=4)
    command = [
        sys.executable,
        "-m",
        "moespac_llamacpp.cli",
        "generate",
        "The heron",
        "-n",
        "3",
        "--execution",
        execution,
    ]
    assert subprocess.run(command, capture_output=True, timeout=120).returncode == 0


def test_an_execution_that_does_not_exist_is_told_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no execution 'fast' \(there are auto, portable, in-stream\)"):
        Moespac(tmp_path / "none.gguf", execution="fast")


def test_the_command_line_knows_every_execution() -> None:
    assert [choice.value for choice in Execution] == list(native.EXECUTIONS)


def test_a_model_of_the_hub_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"test/tiny-GGUF/tiny.gguf": TARGET.read_bytes(), "test/draft-GGUF/draft.gguf": DRAFT.read_bytes()}
    with start_hub(files) as hub:
        assert isinstance(hub, Hub)
        script = (
            "from moespac_llamacpp import Moespac\n"
            "with Moespac.from_pretrained('test/tiny-GGUF', '*ny.gguf', draft_repo_id='test/draft-GGUF', "
            "draft_filename='draft.gguf', n_ctx=256, n_threads=1) as llm:\n"
            "    print(llm.generate('The heron', 5), llm.decoder.length.draft_max)\n"
            "try:\n"
            "    Moespac.from_pretrained('test/tiny-GGUF', 'other.gguf')\n"
            "except Exception as error:\n"
            "    print(type(error).__name__, error)\n"
        )
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path))
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.strip().rsplit("\n", 1)
    assert first.endswith(" 8")
    assert second == "FetchError test/tiny-GGUF/other.gguf: the repository has no such file"


def test_a_step_can_be_stopped_from_within(llm: Moespac) -> None:
    seen: list[str] = []

    def stop() -> None:
        if len(seen) == 5:
            raise KeyboardInterrupt

    llm.on_step = stop
    try:
        with pytest.raises(KeyboardInterrupt):
            for piece in llm.stream("The heron stood in the river and", 50):
                seen.append(piece)
    finally:
        llm.on_step = None
    assert len(seen) == 5 and llm.stats.last.finish_reason == "interrupted"
    assert llm.generate("The heron", 3)
