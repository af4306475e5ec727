"""A chat as a person has it, in a pseudo-terminal, and its parts; what `inspect` says of files."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from families import cached_model
from moespac_llamacpp.acceptance import Sampling
from moespac_llamacpp.chat import Chat, ContextFullError, Turn
from moespac_llamacpp.commands.chat import Interrupts, answer
from moespac_llamacpp.decoder import Decoder
from moespac_llamacpp.draft import GgufDraft, common_prefix
from moespac_llamacpp.inspection import InspectError, inspect
from moespac_llamacpp.models import Context
from pair import DRAFT, TARGET, Pair, draft_context, target_context

HERON, RIVER = 'What does "heron" mean?', 'What does "river" mean?'
ENDLESS = ("--repeat-penalty", "0.5", "-c", "4096")  # greedy text that only repeats itself: 8 s of it


class Terminal:
    """`moespac chat` in a pseudo-terminal of its own, Ctrl-C included."""

    START = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); from moespac_llamacpp.cli import main; main()"

    def __init__(self, *arguments: str) -> None:
        self.fd, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", self.START, "chat", "-t", "1", *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env=os.environ | {"TERM": "dumb"},
        )
        os.close(slave)
        self.unread = ""

    def expect(self, pattern: str, timeout: float = 30) -> re.Match[str]:
        """Reads on until the pattern comes; what came up to its end counts as read."""
        end = time.monotonic() + timeout
        while (found := re.search(pattern, self.unread)) is None:
            assert time.monotonic() < end and self._read(), f"no {pattern!r} in {self.unread!r}"
        self.unread = self.unread[found.end() :]
        return found

    def _read(self) -> bool:
        """False at the end of output, or after some seconds without any."""
        try:
            ready, _, _ = select.select([self.fd], [], [], 20)
            data = os.read(self.fd, 65536) if ready else b""
        except OSError:  # Linux: nobody holds the other end
            return False
        self.unread += data.decode("utf-8", "replace").replace("\r\n", "\n")
        return bool(data)

    def send(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def press(self, key: str, pattern: str) -> None:
        """Presses until the pattern comes: a signal just before readline's select waits for the next key."""
        for _ in range(20):
            self.send(key)
            end = time.monotonic() + 1
            while time.monotonic() < end:
                if select.select([self.fd], [], [], 0.1)[0]:
                    self._read()
                if re.search(pattern, self.unread):
                    self.expect(pattern)
                    return
        raise AssertionError(f"no {pattern!r} in {self.unread!r}")

    def end(self) -> tuple[int, str]:
        """(exit code, the rest of the output) of a program that is about to end."""
        while self._read():
            pass
        return self.process.wait(20), self.unread

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.fd)


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def start(*arguments: str) -> Terminal:
        opened.append(Terminal(*arguments))
        opened[-1].expect("> ")
        return opened[-1]

    yield start
    for one in opened:
        one.close()


def moespac(*arguments: str, lines: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "moespac_llamacpp.cli", *arguments]
    return subprocess.run(command, input=lines, capture_output=True, text=True, timeout=120)


STATUS = (
    r"\[(\d+) tokens at [\d.]+ TPS, (\d+) of (\d+) prompt tokens reused, .*hit rate [\d.]+ %, ([\d.]+) MiB of .*\]\n"
)


# --- in a terminal ---------------------------------------------------------------------------------------------------------


def test_a_second_turn_reuses_the_first(terminal: Callable[..., Terminal]) -> None:
    chat = terminal("-n", "30", "-sys", "You are a dictionary.")
    chat.send(HERON + "\n")
    chat.expect(r"\nHeron has \d+ meanings?\.")
    first = chat.expect(STATUS)
    assert int(first[2]) == 0 and float(first[4]) > 1
    chat.expect("> ")
    chat.send(RIVER + "\n")
    chat.expect(r"\nRiver has \d+ meanings?\.")
    second = chat.expect(STATUS)
    # all of the first prompt and of its answer but the last token, which was never decoded
    assert int(second[2]) >= int(first[3]) + int(first[1]) - 1
    assert 0 < int(second[3]) - int(second[2]) < 24
    chat.expect("> ")
    chat.send("/clear\n")
    chat.expect("forgotten")
    chat.expect("> ")
    chat.send("/claer\n")
    chat.expect("'/claer' is no command")
    chat.expect("> ")
    chat.send(HERON + "\n")
    third = chat.expect(STATUS)
    assert third[3] == first[3] and 4 < int(third[2]) < int(third[3])
    chat.expect("> ")
    chat.send("\x04")
    code, rest = chat.end()
    assert code == 0 and re.search(r"3 answers: \d+ tokens at", rest)


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said(terminal: Callable[..., Terminal]) -> None:
    chat = terminal(*ENDLESS)
    chat.send(HERON + "\n")
    chat.expect(r"mean\?\n[^\n]{20}")
    chat.send("\x03")
    chat.expect("the answer was stopped")
    first = chat.expect(STATUS)
    assert 0 < int(first[1]) < 3000
    chat.expect("> ")
    chat.press("\x03", "/exit or Ctrl-D ends")  # at the prompt
    chat.expect("> ")
    chat.send(RIVER + "\n")
    chat.expect(r"mean\?\n[^\n]{20}")
    chat.send("\x03")
    chat.expect("the answer was stopped")
    second = chat.expect(STATUS)
    # a word may have been on its way when the answer stopped, but nearly all is there
    assert int(second[2]) >= int(first[3]) + int(first[1]) - 9
    chat.expect("> ")
    chat.send("/exit\n")
    code, rest = chat.end()
    assert code == 0 and "2 answers" in rest and "Traceback" not in rest


# --- in a pipe -------------------------------------------------------------------------------------------------------------


def test_a_script_gets_a_record_for_each_line() -> None:
    share = ("--cache-share", "0.25")  # a GPU would take all experts
    done = moespac("chat", "--json", "-t", "1", "-n", "20", *share, lines=f"{HERON}\n\n{RIVER}\n")
    assert done.returncode == 0, done.stderr
    first, second = map(json.loads, done.stdout.splitlines())
    assert first["text"].startswith("Heron has") and second["text"].startswith("River has")
    assert first["n_reused"] == 0 and second["n_reused"] >= first["n_prompt"] + first["n_generated"] - 1
    assert first["finish_reason"] == "length" and first["resident_bytes"] > 0 and 0 < first["hit_rate"] < 1


def test_a_full_context_is_one_sentence_and_fails_in_a_script() -> None:
    done = moespac(
        "chat", "-c", "256", "--repeat-penalty", "0.5", "-t", "1", lines=f"{HERON}\n{RIVER}\n/clear\n/exit\n"
    )
    assert done.returncode == 1
    assert "the context of 256 tokens is full: the answer ends here (/clear, or -c)" in done.stderr
    assert "the context of 256 tokens is full: with this message the conversation has" in done.stderr
    assert "forgotten" in done.stderr and "Traceback" not in done.stderr and "1 answer:" in done.stderr


def test_a_mistyped_command_is_one_sentence_and_no_message() -> None:
    """It costs no answer and leaves nothing in the conversation; a space before the slash makes it a message."""
    lines = f"{HERON}\n/hlep\n{RIVER}\n /clear\n"
    done = moespac("chat", "--json", "-t", "1", "-n", "4", lines=lines)
    first, refused, second, sent = map(json.loads, done.stdout.splitlines())
    sentence = (
        "'/hlep' is no command (/clear forgets what was said, /exit ends); "
        "with a space before the slash it is sent as a message"
    )
    assert refused == {"error": sentence} and f"moespac: {sentence}\n" in done.stderr
    said = first["n_prompt"] + first["n_generated"]
    assert second["n_reused"] >= said - 1 and second["n_prompt"] < said + 24  # that of one message
    assert sent["n_generated"] > 0 and sent["n_reused"] >= second["n_prompt"] and "forgotten" not in done.stderr
    assert done.returncode == 1 and "3 answers:" in done.stderr


# --- the history -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def context(pair: Pair) -> Iterator[Context]:
    with target_context(pair) as context:
        yield context


def test_messages_are_rendered_in_the_models_template(pair: Pair) -> None:
    messages = [{"role": r, "content": c} for r, c in (("system", "Be short."), ("user", "a"), ("assistant", "b"))]
    text = pair.target.chat_prompt([*messages, {"role": "user", "content": "c"}])  # type: ignore[list-item]
    assert text == (
        "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\na<|im_end|>\n"
        "<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
    )
    assert pair.target.chat_prompt("c") == "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
    with pytest.raises(ValueError, match="its chat template fails for these messages: "):
        pair.target.chat_prompt([{"role": "user"}])  # type: ignore[list-item]


def test_an_answers_own_tokens_stay_in_the_text(pair: Pair, context: Context) -> None:
    with draft_context(pair) as other:
        chat = Chat(Decoder(context, drafter=GgufDraft(other, pair.target)), "Be short.")
        first = b"".join(chat.say(HERON, 24)).decode()
        own = list(chat.decoder.report.tokens)
        n_prompt = chat.last.n_prompt
        n_before = other.n_past
        second = b"".join(chat.say(RIVER, 24)).decode()
    assert chat.last.n_reused >= n_prompt + len(own) - 1 and n_before > 0
    assert [m["content"] for m in chat.messages] == ["Be short.", HERON, first, RIVER, second]
    # the tokens are those of the text, whatever has been joined
    text, tokens = chat._render("x")
    assert b"".join(map(pair.target.piece, tokens)) == b"".join(map(pair.target.piece, pair.target.tokenize(text)))
    assert tokens[n_prompt : n_prompt + len(own)] == own
    assert chat.total.n_turns == 2 and chat.total.n_generated == 48
    chat.clear()
    assert [m["role"] for m in chat.messages] == ["system"]


def test_an_answer_that_would_be_tokenized_otherwise_is_reused_as_it_was_said(pair: Pair, context: Context) -> None:
    """Sampled at random, words come in other pieces than the tokenizer's."""
    chat = Chat(Decoder(context, sampling=Sampling(temperature=5, top_k=0, top_p=1, min_p=0.0001, seed=4)))
    n_anew = 0
    for _ in range(4):
        chat.clear()
        answer = chat.say(HERON, 40)
        for _ in range(30):
            next(answer, b"")
        answer.close()
        said = chat.last.n_prompt + len(chat.decoder.report.tokens)
        text, tokens = chat._render(RIVER)
        if not chat._spoken._text:  # it ended within a character
            continue
        n_anew += common_prefix(pair.target.tokenize(text), tokens) < said
        list(chat.say(RIVER, 1))
        assert chat.last.n_reused >= said - 1
    assert n_anew > 0


def test_a_stopped_answer_is_kept_and_a_question_without_one_is_not(context: Context) -> None:
    chat = Chat(Decoder(context))
    answer = chat.say(HERON, 60)
    said = b"".join(next(answer) for _ in range(5))
    answer.close()
    assert chat.last.finish_reason == "interrupted"
    assert [m["content"] for m in chat.messages] == [HERON, said.decode()]
    with pytest.raises(ValueError, match="stop string"):
        list(chat.say(RIVER, 60, stop=[""]))
    assert len(chat.messages) == 2 and chat.last.n_generated == 0


def test_an_answer_that_failed_is_one_sentence_and_the_conversation_goes_on(
    context: Context, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    chat, left = Chat(Decoder(context)), [3]

    def failing(tokens: list[int], *, all_logits: bool = False) -> Any:
        left[0] -= 1
        if left[0] <= 0:
            context.clear()
            raise RuntimeError("decoding 1 tokens failed: the CPU threads hang. The context is empty now")
        return Context.decode(context, tokens, all_logits=all_logits)

    monkeypatch.setattr(context, "decode", failing)
    assert not answer(chat, Interrupts(), HERON, 20, (), json=False)
    shown = capfdbinary.readouterr()
    assert shown.err.decode() == (
        "moespac: the answer ends here: decoding 1 tokens failed: the CPU threads hang. The context is empty now\n"
    )
    assert [m["content"] for m in chat.messages] == [HERON, shown.out.decode().rstrip("\n")] and chat.messages[1][
        "content"
    ]
    monkeypatch.undo()
    assert answer(chat, Interrupts(), RIVER, 5, (), json=True)
    assert json.loads(capfdbinary.readouterr().out)["n_reused"] == 0
    assert len(chat.messages) == 4


def test_a_conversation_that_does_not_fit_changes_nothing(context: Context) -> None:
    chat = Chat(Decoder(context))
    list(chat.say(HERON, 5))
    before, last = list(chat.messages), chat.last
    with pytest.raises(ContextFullError, match=f"the context of {context.n_ctx} tokens is full: with this message"):
        list(chat.say("river " * context.n_ctx))
    assert chat.messages == before and chat.last is last


def test_turns_add_up() -> None:
    a = Turn(
        n_turns=1, n_generated=10, seconds=1, n_hot_pairs=1, n_cold_pairs=1, resident_bytes=5, finish_reason="stop"
    )
    b = Turn(n_turns=1, n_generated=30, seconds=1, n_hot_pairs=2, resident_bytes=7, finish_reason="length")
    both = a + b
    assert (both.n_turns, both.tps, both.hit_rate, both.resident_bytes, both.finish_reason) == (
        2,
        20,
        0.75,
        7,
        "length",
    )
    assert "drafts" not in both.status() and "hit rate 75.0 %" in both.status()


# --- inspect ---------------------------------------------------------------------------------------------------------------


def test_inspect_of_the_bundled_model() -> None:
    found = inspect(TARGET)
    assert (found.architecture, found.n_layer, found.n_expert_layer) == ("qwen3moe", 6, 6)
    assert (found.n_expert, found.n_expert_used, found.shards) == (32, 4, [])
    reader = gguf.GGUFReader(TARGET)
    assert found.total_bytes == sum(int(t.n_bytes) for t in reader.tensors)
    assert found.expert_bytes == sum(int(t.n_bytes) for t in reader.tensors if "_exps" in t.name)
    assert found.dense_bytes == found.total_bytes - found.expert_bytes > 0
    assert [(part.first, part.last) for part in found.layers] == [(0, 1), (2, 2), (3, 4), (5, 5)]
    assert [part.types["down"] for part in found.layers] == ["Q4_K", "Q6_K", "Q4_K", "Q6_K"]
    assert sum(32 * p.expert_bytes * (p.last - p.first + 1) for p in found.layers) == found.expert_bytes


def test_the_command_inspect() -> None:
    done = moespac("inspect")
    assert done.returncode == 0 and "layers 0-1: 32 experts of 0.11 MiB; gate Q4_K, up Q4_K, down Q4_K" in done.stdout
    done = moespac("inspect", "--json", "-m", str(TARGET))
    assert json.loads(done.stdout) == inspect(TARGET).record() | {"own_path": {}, "problem": ""}
    assert "hybrid: every layer with experts" in moespac("inspect").stdout
    done = moespac("inspect", "-m", str(DRAFT))
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == f"moespac: {DRAFT}: a dense model (qwen3, 3 layers): it has no experts to place\n"


def test_inspect_tells_which_layers_do_not_run_hybrid_and_why(tmp_path: Path) -> None:
    path = cached_model(tmp_path, "nemotron_h_moe")
    done = moespac("inspect", "-m", str(path))
    why = re.search(r"hybrid: 0 of 2 layers with experts; .* own path\n  layers 2, 3: (.*)\n", done.stdout)
    assert why and "gate" in why[1], done.stdout
    record = json.loads(moespac("inspect", "-m", str(path), "--json").stdout)
    assert record["own_path"] == {"2": why[1], "3": why[1]} and not record["problem"]


def test_inspect_of_what_is_no_model(tmp_path: Path) -> None:
    text, missing = tmp_path / "text.gguf", tmp_path / "missing.gguf"
    text.write_text("hello")
    for path, sentence in (
        (text, "not a GGUF file"),
        (missing, "there is no such file"),
        (tmp_path, "cannot be read: Is a directory"),
    ):
        with pytest.raises(InspectError, match=re.escape(str(path)) + ": " + sentence):
            inspect(path)
    whole = TARGET.read_bytes()
    damaged = tmp_path / "damaged.gguf"
    for size in (4, 20, 1000, 50_000, len(whole) // 2):
        damaged.write_bytes(whole[:size])
        with pytest.raises(InspectError, match="a damaged GGUF file"):
            inspect(damaged)


def write_part(path: Path, tensors: dict[str, tuple[int, ...]], number: int, count: int) -> Path:
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_uint16("split.no", number)
    writer.add_uint16("split.count", count)
    if number == 0:
        writer.add_block_count(2)
        writer.add_expert_count(4)
        writer.add_expert_used_count(2)
    for name, shape in tensors.items():
        writer.add_tensor(name, np.zeros(shape, np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_inspect_of_a_split_model(tmp_path: Path) -> None:
    block = {f"blk.{{}}.ffn_{m}_exps.weight": (4, 8, 16) for m in ("gate", "up", "down")}
    parts = [
        write_part(tmp_path / f"m-{i + 1:05d}-of-00002.gguf", {k.format(i): v for k, v in block.items()}, i, 2)
        for i in range(2)
    ]
    found = inspect(parts[0])
    assert found.shards == [p.name for p in parts]
    assert found.expert_bytes == found.total_bytes == 2 * 3 * 4 * 8 * 16 * 2
    assert [(p.first, p.last, p.n_expert, p.types["up"]) for p in found.layers] == [(0, 1, 4, "F16")]
    with pytest.raises(InspectError, match=r"part 2 of 2: give the first, m-00001-of-00002\.gguf"):
        inspect(parts[1])
    renamed = parts[0].rename(tmp_path / "m.gguf")
    with pytest.raises(InspectError, match=r"part 1 of 2, but its name does not end in -00001-of-00002\.gguf"):
        inspect(renamed)
    renamed.rename(parts[0])
    parts[1].unlink()
    with pytest.raises(InspectError, match=r"m-00002-of-00002\.gguf: there is no such file"):
        inspect(parts[0])


def test_ctrl_c_stops_the_reading_of_a_prompt(terminal: Callable[..., Terminal]) -> None:
    """A prompt of many pieces shows how far it is; nothing of it stays in the history."""
    chat = terminal("-b", "1", "-ub", "1", "-c", "8192", "-n", "8", "--draft", "none")
    chat.send("heron river " * 340 + "\n")  # as long as a terminal's line may be
    chat.expect(r"reading the prompt +\d+ %")
    chat.send("\x03")
    chat.expect("the answer was stopped")
    assert int(chat.expect(STATUS)[1]) == 0
    chat.expect("> ")
    chat.send(HERON + "\n")
    second = chat.expect(STATUS)
    assert int(second[3]) < 40
    chat.send("/exit\n")
    assert chat.end()[0] == 0
