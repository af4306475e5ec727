"""moespac generate: a prompt and what follows it."""

from __future__ import annotations

from typing import Annotated

import typer

from moespac_llamacpp.commands.options import LoadOptions, SamplingOptions, TemplateOptions, takes
from moespac_llamacpp.commands.session import session, stream, summary


@takes(LoadOptions, SamplingOptions, TemplateOptions)
def generate_command(
    load: LoadOptions,
    sampling: SamplingOptions,
    template: TemplateOptions,
    prompt: Annotated[str, typer.Argument(help="The text to continue, or with --chat the user's message.")],
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", min=1, help="Tokens to generate at most.")] = 128,
    chat: Annotated[bool, typer.Option("--chat", help="Apply the model's chat template.")] = False,
) -> None:
    """Continue a prompt, greedily unless --temp is given."""
    with session(load, sampling) as decoder:
        target = decoder.context.model
        text = target.chat_prompt(prompt, **template.values()) if chat else prompt
        stream(decoder, target.tokenize(text), max_tokens, sampling.stop or ())
        typer.echo(summary(decoder), err=True)
