"""moespac serve: the pair behind OpenAI's HTTP interface."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from moespac_llamacpp.commands.options import LoadOptions, SamplingOptions, TemplateOptions, takes
from moespac_llamacpp.commands.session import settle, tell, told
from moespac_llamacpp.commands.shared import fail, progress

LOOPBACK = ("127.0.0.1", "localhost", "::1")
#: Seconds that connections get to end after Ctrl-C.
GRACE = 3


@takes(LoadOptions, SamplingOptions, TemplateOptions)
def serve_command(
    load: LoadOptions,
    sampling: SamplingOptions,
    template: TemplateOptions,
    name: Annotated[str | None, typer.Argument(help="A name of `moespac models`, instead of -m.")] = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port to listen on, 0: any free one.")] = 8080,
    api_key: Annotated[
        str | None, typer.Option("--api-key", envvar="MOESPAC_API_KEY", help="Key that requests have to bring.")
    ] = None,
    alias: Annotated[str | None, typer.Option("--alias", "-a", help="Name of the model in answers.")] = None,
) -> None:
    """Serve completions and chats over HTTP as OpenAI's clients expect, one at a time; sampling options are the defaults."""
    try:
        import uvicorn

        from moespac_llamacpp.serving import create_app
    except ImportError as error:
        raise fail(f"serving needs more packages ({error}): pip install fastapi uvicorn") from error
    from moespac_llamacpp.api import Moespac

    with told():
        listener = _listen(host, port)
        defaults, values = _defaults(sampling), template.values()
        options = settle(replace(load, model=Path(name)) if name else load)
        given = {field.name: getattr(options, field.name) for field in fields(options)}
        with Moespac(given.pop("model"), progress=progress, **given) as llm:
            tell(llm.notices)
            n_told = len(llm.notices)
            if host not in LOOPBACK and api_key is None:
                tell([f"{host} can be reached by others, and there is no --api-key: whoever reaches it may use it"])
            app = create_app(llm, name=alias, defaults=defaults, template=values, api_key=api_key)
            at = listener.getsockname()
            typer.echo(f"moespac: serving {llm.model_path} at http://{host}:{at[1]}/v1", err=True)
            config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=GRACE)
            with suppress(KeyboardInterrupt):  # the usual end
                _server(config, app.state.server.jobs.close).run(sockets=[listener])
        tell(llm.notices[n_told:])


def _server(config: Any, before_shutdown: Callable[[], None]) -> Any:
    """A uvicorn.Server that first ends what its connections wait for: they close by themselves then."""
    import uvicorn

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            before_shutdown()
            await super().shutdown(sockets)

    return Server(config)


def _listen(host: str, port: int) -> socket.socket:
    """Before anything is loaded. typer.Exit: the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        if (error.errno or 0) < 0:  # of the look-up of the name
            raise fail(f"cannot listen on {host}: not a name or an address of this machine") from error
        raise fail(
            f"cannot listen on {host}, port {port}: {os.strerror(error.errno or 0)}: choose another --port"
        ) from error


def _defaults(sampling: SamplingOptions) -> dict[str, Any]:
    """Arguments for what requests leave open."""
    chosen = sampling.sampling()
    names = (
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repeat_penalty",
        "frequency_penalty",
        "presence_penalty",
        "seed",
    )
    return {name: getattr(chosen, name) for name in names} | {"grammar": sampling.gbnf(), "stop": sampling.stop}
