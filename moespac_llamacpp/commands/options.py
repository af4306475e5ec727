"""Options that several commands share: dataclasses whose fields typer reads, and a decorator that gives them to a command."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from moespac_llamacpp.engine import TINY_MODEL
from moespac_llamacpp.grammar import from_json_schema, read_grammar
from moespac_llamacpp.native import MAX_AHEAD, MAX_STREAMED
from moespac_llamacpp.policies import NAMES as POLICIES
from moespac_llamacpp.residency import LOOK_AHEAD, STREAM_EXPERTS
from moespac_llamacpp.sampling import Sampling


class DraftKind(str, enum.Enum):
    model = "model"
    ngram = "ngram"
    none = "none"


class Execution(str, enum.Enum):
    auto = "auto"
    portable = "portable"
    in_stream = "in-stream"


class Switch(str, enum.Enum):
    on = "on"
    off = "off"
    auto = "auto"


ModelOption = Annotated[
    Path,
    typer.Option(
        "--model",
        "-m",
        help="GGUF file or name (see models) of the target (default: the bundled one).",
        show_default=False,
    ),
]


@dataclass(frozen=True)
class LoadOptions:
    """What is loaded and where, as llama.cpp's users name it."""

    model: ModelOption = TINY_MODEL
    hf_repo: Annotated[
        str | None,
        typer.Option(
            "--hf-repo",
            "-hf",
            help="owner/repository[:quant] on the Hugging Face hub, instead of -m; fetched if need be.",
        ),
    ] = None
    hf_repo_draft: Annotated[
        str | None, typer.Option("--hf-repo-draft", "-hfd", help="The same for the draft model, instead of -md.")
    ] = None
    ctx: Annotated[
        int,
        typer.Option(
            "--ctx", "-c", min=0, help="Context length in tokens, 0: as trained, or less to leave room for experts."
        ),
    ] = 0
    batch: Annotated[int, typer.Option("--batch-size", "-b", min=1, help="Tokens of a prompt handed over at once.")] = (
        2048
    )
    ubatch: Annotated[int, typer.Option("--ubatch-size", "-ub", min=1, help="Tokens of a prompt computed at once.")] = (
        512
    )
    threads: Annotated[int | None, typer.Option("--threads", "-t", min=1, help="CPU threads (default: all cores).")] = (
        None
    )
    threads_batch: Annotated[
        int | None,
        typer.Option("--threads-batch", "-tb", min=1, help="CPU threads for several tokens (default: as -t)."),
    ] = None
    device: Annotated[str | None, typer.Option("--device", help="Name of the device for slots (see doctor).")] = None
    execution: Annotated[
        Execution, typer.Option("--execution", help="How layers are computed whose experts are in two places.")
    ] = Execution.auto
    gpu_layers: Annotated[
        int, typer.Option("--gpu-layers", "-ngl", help="Layers, without their experts, on the GPU, -1: all.")
    ] = -1
    cache_share: Annotated[
        float | None, typer.Option("--cache-share", help="Share of each layer's experts with a slot, 0 to 1.")
    ] = None
    expert_budget: Annotated[
        str | None, typer.Option("--expert-budget", help="VRAM for experts, such as 8G; instead of --cache-share.")
    ] = None
    vram: Annotated[
        str | None, typer.Option("--vram", help="VRAM for everything, such as 8G (default: what is free but 1G).")
    ] = None
    flash_attn: Annotated[Switch | None, typer.Option("--flash-attn", "-fa", help="Flash attention.")] = None
    cache_type_k: Annotated[
        str | None, typer.Option("--cache-type-k", "-ctk", help="Type of the K cache: f16, bf16, q8_0, q4_0, …")
    ] = None
    cache_type_v: Annotated[str | None, typer.Option("--cache-type-v", "-ctv", help="Type of the V cache.")] = None
    override_tensor: Annotated[
        list[str] | None,
        typer.Option(
            "--override-tensor", "-ot", help="<pattern>=<buffer type>: tensors that go elsewhere; may be repeated."
        ),
    ] = None
    policy: Annotated[str, typer.Option("--policy", help=f"Which experts move: {', '.join(POLICIES)}.")] = "moe-spac"
    no_frequency: Annotated[
        bool, typer.Option("--no-frequency", help="Ablation: experts count as used or not, not how often.")
    ] = False
    no_balancer: Annotated[
        bool, typer.Option("--no-balancer", help="Ablation: no threshold, whatever the slots hold moves.")
    ] = False
    sync_moves: Annotated[bool, typer.Option("--sync-moves", help="Ablation: each step waits for its uploads.")] = False
    stream_experts: Annotated[
        int,
        typer.Option(
            "--stream-experts",
            min=0,
            max=MAX_STREAMED,
            help="Experts of a layer that may cross the link in the middle of a step.",
        ),
    ] = STREAM_EXPERTS
    look_ahead: Annotated[
        int,
        typer.Option(
            "--look-ahead",
            min=0,
            max=MAX_AHEAD,
            help="Experts of a layer that may cross the link while the layer before it is computed.",
        ),
    ] = LOOK_AHEAD
    no_hot_set: Annotated[
        bool,
        typer.Option("--no-hot-set", help="Do not start with the experts that the last run left, nor leave any."),
    ] = False
    draft_model: Annotated[
        Path | None,
        typer.Option("--draft-model", "-md", help="GGUF file of a draft model with the target's vocabulary."),
    ] = None
    draft: Annotated[
        DraftKind | None, typer.Option("--draft", help="Who drafts (default: the draft model, if there is one).")
    ] = None
    draft_max: Annotated[int, typer.Option("--draft-max", min=0, max=31, help="Tokens to draft a step at most.")] = 8
    draft_fixed: Annotated[
        bool, typer.Option("--draft-fixed", help="Always draft --draft-max tokens, instead of as many as pay.")
    ] = False
    draft_gpu_layers: Annotated[
        int, typer.Option("--gpu-layers-draft", "-ngld", help="Layers of the draft model on the GPU, -1: all.")
    ] = -1
    context_shift: Annotated[
        bool, typer.Option("--context-shift", help="A full context forgets half of its text and goes on.")
    ] = False
    keep: Annotated[
        int, typer.Option("--keep", min=-1, help="Tokens that --context-shift never forgets, -1: the prompt.")
    ] = 0
    telemetry: Annotated[
        Path | None, typer.Option("--telemetry", help="Append a line of JSON for each step to this file.")
    ] = None


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are chosen."""

    temp: Annotated[float, typer.Option("--temp", min=0, help="Temperature, 0: greedy.")] = 0.0
    top_k: Annotated[int, typer.Option("--top-k", min=0, help="Sample from the k likeliest tokens, 0: all.")] = 40
    top_p: Annotated[
        float, typer.Option("--top-p", min=0, max=1, help="Sample from the likeliest tokens of this mass, 1: all.")
    ] = 0.95
    min_p: Annotated[
        float,
        typer.Option("--min-p", min=0, max=1, help="Least probability, relative to the likeliest token's, 0: any."),
    ] = 0.05
    repeat_penalty: Annotated[float, typer.Option("--repeat-penalty", help="Penalty on recent tokens, 1: none.")] = 1.0
    presence_penalty: Annotated[
        float, typer.Option("--presence-penalty", help="Taken off the logits of recent tokens, 0: none.")
    ] = 0.0
    frequency_penalty: Annotated[
        float, typer.Option("--frequency-penalty", help="The same for each time that a token came, 0: none.")
    ] = 0.0
    seed: Annotated[int | None, typer.Option("--seed", "-s", help="Seed of the sampler (default: random).")] = None
    stop: Annotated[list[str] | None, typer.Option("--stop", help="End before this text; may be repeated.")] = None
    grammar: Annotated[str | None, typer.Option("--grammar", help="GBNF that the text follows.")] = None
    grammar_file: Annotated[Path | None, typer.Option("--grammar-file", help="A file with such a grammar.")] = None
    json_schema: Annotated[
        str | None, typer.Option("--json-schema", "-j", help='JSON schema that the text follows; "{}" for any JSON.')
    ] = None

    def sampling(self) -> Sampling:
        seed = None if self.seed is None or self.seed < 0 else self.seed
        return Sampling(
            self.temp, self.top_k, self.top_p, self.min_p, self.repeat_penalty, self.frequency_penalty,
            self.presence_penalty, seed=seed,
        )  # fmt: skip

    def gbnf(self) -> str | None:
        """The grammar, None if there is none. GrammarError: it cannot be read, or there are several."""
        given = [value for value in (self.grammar, self.grammar_file, self.json_schema) if value is not None]
        if len(given) > 1:
            raise ValueError("--grammar, --grammar-file and --json-schema say what the text follows: give one of them")
        if self.json_schema is not None:
            return from_json_schema(self.json_schema)
        return read_grammar(self.grammar_file) if self.grammar_file is not None else self.grammar


@dataclass(frozen=True)
class TemplateOptions:
    """What the chat template is told."""

    jinja: Annotated[
        bool,
        typer.Option(
            "--jinja/--no-jinja", help="Accepted for llama.cpp's sake: the GGUF's own template is always used."
        ),
    ] = True
    reasoning: Annotated[
        Switch,
        typer.Option("--reasoning", "-rea", help="Does the model think before it answers? auto: its template decides."),
    ] = Switch.auto
    template_kwargs: Annotated[
        str | None,
        typer.Option("--chat-template-kwargs", help='More values for the template, as JSON: {"name": value}.'),
    ] = None

    def values(self) -> dict[str, Any]:
        """ValueError: not a JSON object."""
        import json

        try:
            values = json.loads(self.template_kwargs or "{}")
        except ValueError as error:
            raise ValueError(f"--chat-template-kwargs is not JSON: {error}") from error
        if not isinstance(values, dict):
            raise ValueError("--chat-template-kwargs is a JSON object")
        if self.reasoning is not Switch.auto:
            values["enable_thinking"] = self.reasoning is Switch.on
        return values


def takes(*groups: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The command's first parameters are objects of these dataclasses; typer sees their fields as options of its own."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(function, eval_str=True).parameters.values())[len(groups) :]
        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own]
        for group in groups:
            hints = get_type_hints(group, include_extras=True)
            parameters += [
                inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=hints[f.name])
                for f in fields(group)
            ]

        def command(**values: Any) -> None:
            made = [group(**{f.name: values.pop(f.name) for f in fields(group)}) for group in groups]
            function(*made, **values)

        command.__name__, command.__doc__ = function.__name__, function.__doc__
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        return command

    return decorate
