"""Both sides on one machine: their processes, the models that they hold, the text that is left to measure on."""

from __future__ import annotations

import os
import sys
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from moespac_llamacpp.bench import ledger, stock
from moespac_llamacpp.bench.process import Process, WorkerError
from moespac_llamacpp.bench.settings import OURS, STOCK, Setting
from moespac_llamacpp.bench.texts import Text

MAX_DRAFT_CONTEXTS = 4
PATCHED = "patched"


@dataclass
class Result:
    """One run. tps: generated tokens after the first, which the prompt gives, per second."""

    setting: Setting
    n_prompt: int
    n_generated: int
    tps: float
    ttft: float
    as_planted: bool | None  # the text is the chain; None where none is planted
    detail: dict[str, Any] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        detail = {k: v for k, v in self.detail.items() if k != "tokens"}
        own = {k: v for k, v in vars(self).items() if k not in ("setting", "detail")}
        return {"setting": asdict(self.setting), "label": self.setting.label(), **own, **detail}


def stock_command(where: str) -> tuple[list[str], dict[str, str]]:
    """Command and environment of the rival's worker.

    where: an interpreter, a folder to put on PYTHONPATH (with an unpatched llama_cpp in it), or "patched": our own build without
    attaching, which takes llama.cpp's own path. ValueError: neither."""
    script = str(Path(stock.__file__))
    if where == PATCHED:
        return [sys.executable, script], {}
    path = Path(where)
    if path.is_dir() and (path / "llama_cpp").is_dir():
        return [sys.executable, script], {"PYTHONPATH": str(path)}
    if path.is_file() and os.access(path, os.X_OK):
        return [str(path), script], {"PYTHONPATH": ""}
    raise ValueError(
        f"{where}: neither an interpreter nor a folder with llama_cpp: build the rival with scripts/compare_stock.py, which "
        f"says what to give, or give {PATCHED!r} for this build's own unpatched path"
    )


class Rig:
    """Workers are started at once; models are loaded when a setting needs them, the rival's least recently used ones dropped.

    execution: of ours, a name of native.EXECUTIONS. wrong_guesses: of its look-ahead (native.Experts.set_look_ahead)."""

    def __init__(
        self,
        target: Path,
        drafts: Mapping[str, Path],
        rival: str,
        logs: Path,
        *,
        device: str | None = None,
        execution: str = "auto",
        wrong_guesses: float = 0.0,
        n_ctx: int = 2560,
        n_batch: int = 2048,
        keep: int = 3,
        say: Any = print,
    ) -> None:
        self.target, self.draft_files = target, dict(drafts)
        self.n_ctx, self.n_batch, self.keep, self.say = n_ctx, n_batch, keep, say
        self.weights = ledger.Weights.of(target)
        self._draft_weights: dict[str, ledger.Weights] = {}
        self.draft_bytes: dict[str, int] = {}
        self._drafts: dict[str, OrderedDict[str, None]] = {STOCK: OrderedDict(), OURS: OrderedDict()}
        self._stock: OrderedDict[tuple[str, int], str] = OrderedDict()
        self._buffers: dict[str, dict[str, float]] = {}
        self._device_bytes: dict[str, int] = {}
        self._load_seconds: dict[str, float] = {}  # the last time; without warming up
        self._device, self._execution, self._logs = device, execution, logs
        self._wrong_guesses = wrong_guesses
        self._commands = {
            STOCK: stock_command(rival),
            OURS: ([sys.executable, "-m", "moespac_llamacpp.bench.ours"], dict[str, str]()),
        }
        self._processes: dict[str, Process] = {}
        self.hello: dict[str, dict[str, Any]] = {}
        self._ours_loaded = False
        try:
            for side in (STOCK, OURS):
                self._start(side)
            for side in (STOCK, OURS):
                self._greet(side)
            if self.hello[STOCK]["patched"] != (rival == PATCHED):
                raise ValueError(f"{rival}: its llama_cpp is patched: the rival must be llama.cpp as it is")
            self.device = str(self.hello[OURS]["device"])
        except BaseException:
            self.close()
            raise

    def _process(self, side: str) -> Process:
        """The side's worker; a new one, with nothing loaded, if the last one ended (ggml aborts on some errors of a device)."""
        if not self._processes[side].alive:
            self._start(side)
            self._greet(side)
        return self._processes[side]

    def _start(self, side: str) -> None:
        command, env = self._commands[side]
        self._processes[side] = Process(side, command, self._logs / f"{side}.log", env)
        self._processes[side].ask("hello", device=self._device)

    def _greet(self, side: str) -> None:
        """Takes the answer to "hello". Loading, in contrast, is never done by both at a time: the device's readings would mix."""
        self.hello[side] = self._processes[side].answer("hello")
        self._drafts[side].clear()
        if side == OURS:
            self._ours_loaded = False
        else:
            self._stock.clear()

    def close(self) -> None:
        for process in self._processes.values():
            process.close()

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------------------------------------

    def draft_cost(self, draft: str | None) -> int:
        """Bytes that a draft takes on the device."""
        if draft is None or draft == "ngram":
            return 0
        if draft not in self.draft_bytes:
            self._load_draft(OURS, draft)
        return self.draft_bytes[draft]

    def draft_weights(self, draft: str | None) -> ledger.Weights | None:
        return self._draft_weights.get(draft) if draft else None

    def budget(self, setting: Setting) -> int:
        """Bytes for experts in VRAM; negative if the draft alone takes more than the share."""
        return ledger.expert_budget(self.weights, setting.share, self.draft_cost(setting.draft), setting.draft_extra)

    def run(self, setting: Setting, text: Text, *, clocks: bool = False) -> Result:
        """WorkerError: it failed, or does not fit."""
        budget = self.budget(setting)
        if budget < 0:
            raise WorkerError(f"{setting.label()}: the draft takes more than the whole share")
        process = self._process(setting.side)
        if setting.draft and setting.draft != "ngram":
            self._load_draft(setting.side, setting.draft)
        common: dict[str, Any] = {
            "threads": setting.threads,
            "prompt": text.prompt,
            "n_generate": text.n,
            "n_draft": setting.n_draft,
            "draft": setting.draft,
        }
        if setting.side == STOCK:
            layers = self.weights.last_layers(budget)
            name = self._load_stock(setting.memory, layers)
            answer = process.call("run", target=name, **common)
            experts, buffers = sum(self.weights.layers[il] for il in layers), self._buffers[name]
            answer["layers"] = len(layers)
        else:
            self._load_ours()
            own: dict[str, Any] = {"expert_bytes": budget, "policy": setting.policy, "max_moves": setting.max_moves}
            own |= {"fixed": setting.fixed, "sync_moves": setting.sync_moves}
            answer = process.call("run", clocks=clocks, **common, **own)
            self._buffers[OURS].update({b: s for b, s in answer["buffers"].items() if b.endswith(" compute")})
            experts, buffers = answer["device_bytes"], self._buffers[OURS]
        entry = ledger.entry(self.weights, buffers, self.device, experts, self.draft_cost(setting.draft))
        answer["vram"] = asdict(entry) | {"total": entry.total}
        tokens = answer["tokens"]
        return Result(
            setting,
            len(text.prompt),
            len(tokens),
            (len(tokens) - 1) / answer["seconds"] if len(tokens) > 1 else 0.0,
            answer["ttft"],
            None if text.follows is None else tokens == text.follows,
            answer,
        )

    def steps(self, setting: Setting, text: Text, width: int) -> dict[str, Any]:
        """Decodes of `width` tokens each, without a draft."""
        assert text.follows is not None
        common: dict[str, Any] = {
            "threads": setting.threads,
            "prompt": text.prompt,
            "text": text.follows,
            "width": width,
        }
        process = self._process(setting.side)
        if setting.side == STOCK:
            name = self._load_stock(setting.memory, self.weights.last_layers(self.budget(setting)))
            return process.call("steps", target=name, **common)
        self._load_ours()
        own: dict[str, Any] = {
            "expert_bytes": self.budget(setting),
            "policy": setting.policy,
            "max_moves": setting.max_moves,
        }
        return process.call("steps", **common, **own)

    def tokenize(self, messages: Sequence[str]) -> list[list[int]]:
        """User's messages in the target's chat template, as tokens."""
        self._load_ours()
        return list(self._process(OURS).call("tokenize", messages=list(messages))["tokens"])

    def bandwidths(self, threads: list[int], seconds: float = 0.5) -> dict[str, Any]:
        return self._process(OURS).call("bandwidths", threads=threads, seconds=seconds)

    def loaded(self) -> list[dict[str, Any]]:
        """What each model made llama.cpp allocate, and what the device itself says that it took (0 on a CPU)."""
        is_cpu = self.hello["ours"]["is_cpu"]
        return [
            {
                "model": name,
                "device_buffers": sum(size for b, size in buffers.items() if ledger.on_device(b, self.device)),
                "device_reading": 0 if is_cpu else self._device_bytes[name],
                "load_seconds": self._load_seconds[name],
                "buffers": buffers,
            }
            for name, buffers in self._buffers.items()
        ]

    # ------------------------------------------------------------------------------------------------------------------------

    def _took(self, name: str, answer: dict[str, Any]) -> None:
        self._buffers[name], self._device_bytes[name] = answer["buffers"], int(answer["device_bytes"])
        self._load_seconds[name] = float(answer["seconds"])

    def _load_ours(self) -> None:
        if self._ours_loaded:
            return
        self.say(f"loading {self.target.name} for ours")
        path, size = str(self.target), {"n_ctx": self.n_ctx, "n_batch": self.n_batch}
        how: dict[str, Any] = {"execution": self._execution, "wrong_guesses": self._wrong_guesses}
        answer = self._process(OURS).call("load", path=path, **how, **size)
        for il, _, _, hybrid, fallback in answer["rows"]:
            if not hybrid:
                self.say(f"layer {il} takes llama.cpp's own path: {fallback}")
        self._took(OURS, answer)
        self._ours_loaded = True

    def _load_stock(self, memory: str, layers: list[int]) -> str:
        key = (memory, len(layers))
        if key in self._stock:
            self._stock.move_to_end(key)
            return self._stock[key]
        while len(self._stock) >= self.keep:
            self._process(STOCK).call("unload", name=self._stock.popitem(last=False)[1])
        name = f"stock {memory} {len(layers)}"
        self.say(f"loading {self.target.name} for stock: {memory}, experts of {len(layers)} layers in VRAM")
        placement: dict[str, Any] = {"memory": memory, "device_layers": layers}
        path = str(self.target)
        self._took(
            name,
            self._process(STOCK).call(
                "load", name=name, path=path, n_ctx=self.n_ctx, n_batch=self.n_batch, **placement
            ),
        )
        self._stock[key] = name
        return name

    def _load_draft(self, side: str, draft: str) -> None:
        held = self._drafts[side]
        if draft in held:
            held.move_to_end(draft)
            return
        process = self._process(side)
        if len(held) >= MAX_DRAFT_CONTEXTS:
            oldest = held.popitem(last=False)[0]
            process.call("unload" if side == STOCK else "unload_draft", name=oldest)
        arguments: dict[str, Any] = {
            "name": draft,
            "path": str(self.draft_files[draft]),
            "n_ctx": self.n_ctx,
            "n_batch": self.n_batch,
        }
        if side == STOCK:
            answer = process.call("load", memory="mmap", device_layers=[], **arguments)
        else:
            answer = process.call("load_draft", **arguments)
        held[draft] = None
        if draft not in self._draft_weights:
            self._draft_weights[draft] = ledger.Weights.of(self.draft_files[draft])
        # both sides pay the same for the same draft
        self.draft_bytes.setdefault(
            draft, ledger.draft_bytes(self._draft_weights[draft], answer["buffers"], self.device)
        )
        self._took(f"{side} {draft}", answer)
