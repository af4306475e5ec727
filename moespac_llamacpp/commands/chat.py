"""moespac chat: a conversation in the terminal, or line by line in a script."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from json import dumps
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from moespac_llamacpp.chat import Chat, ContextFullError
from moespac_llamacpp.commands.options import LoadOptions, SamplingOptions, TemplateOptions, takes
from moespac_llamacpp.commands.session import PromptLine, session, tell

#: Lines that begin with a slash are commands, whatever follows it: a mistyped one shall not become a message.
COMMANDS = {"/clear": "forgets what was said", "/exit": "ends"}


class Stopped(Exception):
    """Ctrl-C while the prompt was read."""


class Interrupts:
    """Ctrl-C while an answer comes stops the answer, between two tokens or pieces of the prompt; a second one, or one at other
    times, interrupts."""

    def __init__(self) -> None:
        self.answering = self.pressed = False
        self.line = PromptLine()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.answering or self.pressed:
            raise KeyboardInterrupt
        self.pressed = True

    @contextmanager
    def caught(self) -> Iterator[None]:
        before = signal.signal(signal.SIGINT, self._handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def look(self, done: int, total: int) -> None:
        """Between the pieces of a prompt."""
        if self.pressed:
            self.line.clear()
            raise Stopped
        self.line.show(done, total)

    @contextmanager
    def answer(self) -> Iterator[None]:
        self.answering, self.pressed = True, False
        try:
            yield
        finally:
            self.answering = False


def read_line() -> str | None:
    """The next line of stdin, with line editing in a terminal; None at its end."""
    if sys.stdin.isatty() and sys.stdout.isatty():
        with suppress(ImportError):
            import readline  # noqa: F401 (input() uses it)
        try:
            return input("> ")
        except EOFError:
            typer.echo()
            return None
    line = sys.stdin.readline()
    return line.rstrip("\r\n") if line else None


def no_command(line: str) -> str:
    """The sentence for a line that begins with a slash and is none of COMMANDS."""
    known = ", ".join(f"{name} {what}" for name, what in COMMANDS.items())
    begins = line if len(line) <= 40 else line[:40] + "…"
    return f"{begins!r} is no command ({known}); with a space before the slash it is sent as a message"


def answer(
    chat: Chat, interrupts: Interrupts, line: str, max_tokens: int | None, stop: Sequence[str], json: bool
) -> bool:
    """Prints the answer to a line, and its status; False if there was no room for one, or if it failed."""
    said = b""
    failed: RuntimeError | None = None
    try:
        with interrupts.answer(), closing(chat.say(line, max_tokens, stop)) as pieces:
            for piece in pieces:
                said += piece
                if not json:
                    sys.stdout.buffer.write(piece)
                    sys.stdout.buffer.flush()
                if interrupts.pressed:
                    break
    except Stopped:
        pass
    except ContextFullError as error:
        if json:
            typer.echo(dumps({"error": str(error)}))
        typer.echo(f"moespac: {error} (/clear, or -c)", err=True)
        return False
    except RuntimeError as error:  # a decode failed: the next message reads the conversation anew
        failed = error
    finally:
        if said and not json:
            typer.echo()
    tell(chat.decoder.report.notices)
    if failed is not None:
        if json:
            typer.echo(dumps({"text": said.decode("utf-8", "replace"), "error": str(failed)}))
        typer.echo(f"moespac: the answer ends here: {failed}", err=True)
        return False
    if json:
        typer.echo(dumps({"text": said.decode("utf-8", "replace"), **chat.last.record()}))
        return True
    if chat.last.finish_reason == "interrupted":
        typer.echo("moespac: the answer was stopped", err=True)
    elif chat.full:
        n_ctx = chat.decoder.context.n_ctx
        typer.echo(f"moespac: the context of {n_ctx} tokens is full: the answer ends here (/clear, or -c)", err=True)
    elif chat.last.finish_reason == "length":
        typer.echo(f"moespac: the answer ends after {chat.last.n_generated} tokens, as -n says", err=True)
    typer.echo(f"[{chat.last.status()}]", err=True)
    return True


@takes(LoadOptions, SamplingOptions, TemplateOptions)
def chat_command(
    load: LoadOptions,
    sampling: SamplingOptions,
    template: TemplateOptions,
    name: Annotated[str | None, typer.Argument(help="A name of `moespac models`, instead of -m.")] = None,
    system_prompt: Annotated[
        str | None, typer.Option("--system-prompt", "-sys", help="What the model is told before the first message.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", "-n", min=1, help="Tokens per answer at most (default: no limit).")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="A line of JSON for each answer, instead of its text.")] = False,
) -> None:
    """Talk with a model: a line is a message; Ctrl-C stops an answer, /clear forgets, /exit or the end of input ends.

    A message that begins with a slash needs a space before it."""
    all_answered = True
    if name:
        load = replace(load, model=Path(name))
    with session(load, sampling) as decoder:
        chat = Chat(decoder, system_prompt, template.values())
        interrupts = Interrupts()
        decoder.on_prompt = interrupts.look
        if sys.stdin.isatty():
            typer.echo(
                f"{decoder.context.model.describe()}; /exit ends, /clear forgets, Ctrl-C stops an answer", err=True
            )
        with interrupts.caught():
            while True:
                try:
                    line = read_line()
                    if line is None or line.rstrip() == "/exit":
                        break
                    if line.rstrip() == "/clear":
                        chat.clear()
                        typer.echo("moespac: forgotten", err=True)
                    elif line.startswith("/"):
                        all_answered = False
                        if json:
                            typer.echo(dumps({"error": no_command(line)}))
                        typer.echo(f"moespac: {no_command(line)}", err=True)
                    elif line.strip():
                        message = line[1:] if line.startswith(" /") else line
                        all_answered &= answer(chat, interrupts, message, max_tokens, sampling.stop or (), json)
                except KeyboardInterrupt:
                    typer.echo("\nmoespac: /exit or Ctrl-D ends", err=True)
        total = chat.total
        answers = "1 answer" if total.n_turns == 1 else f"{total.n_turns} answers"
        typer.echo(f"{answers}: {total.status()}, {total.n_load_bytes / 2**20:.1f} MiB uploaded", err=True)
    if not all_answered and not sys.stdin.isatty():
        raise typer.Exit(1)
