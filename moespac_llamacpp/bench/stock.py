"""Worker for the rival: llama.cpp as it is, driven through its plain C API. Runs under any interpreter with llama_cpp and numpy.

It imports nothing of moespac_llamacpp, so that an unpatched llama_cpp serves. Speculative decoding is the greedy loop of
llama.cpp's own example (draft one by one, verify in one decode, keep what agrees and one more, roll both caches back), as lean as
ours: no sampler, argmax by numpy.

A line of JSON with an "op" comes in, a line of JSON goes out; {"error": ...} instead of a result. Anything that llama.cpp prints
goes to stderr.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

if __name__ == "__main__":
    sys.path = [p for p in sys.path if os.path.abspath(p or ".") != os.path.dirname(os.path.abspath(__file__))]

import llama_cpp
import numpy as np

_lib = llama_cpp.llama_cpp._lib
EXPERT_TENSORS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps\."
LOAD_NONE, LOAD_MMAP = 0, 1  # enum llama_load_mode
_BUFFER = re.compile(r"(\S+)\s+(model|KV|compute|output|RS) buffer size\s*=\s*([\d.]+) MiB")

_DEBUG = 1  # enum ggml_log_level
N_OUTPUTS = 32  # logits that buffers are made for, as ours

_log: list[str] = []


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _keep_log(level: int, text: bytes, _: object) -> None:
    if level == _DEBUG:  # thousands of lines on a GPU: what is looked for would be lost
        return
    _log.append(text.decode("utf-8", "replace"))
    if len(_log) > 4000:
        del _log[:2000]


def buffers() -> dict[str, float]:
    """Bytes of the buffers that the log since the last call names: "CUDA0 KV" and the like. Compute buffers are named anew
    whenever they are planned anew; of the others there may be several."""
    found: dict[str, float] = {}
    for place, what, mib in _BUFFER.findall("".join(_log)):
        name = place + " " + what
        before = 0.0 if what == "compute" else found.get(name, 0.0)
        found[name] = before + float(mib) * 2**20
    del _log[:]
    return found


def _function(name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(_lib, name)
    function.restype, function.argtypes = result, list(arguments)  # type: ignore[attr-defined]
    return function


_dev_count = _function("ggml_backend_dev_count", ctypes.c_size_t)
_dev_get = _function("ggml_backend_dev_get", ctypes.c_void_p, ctypes.c_size_t)
_dev_name = _function("ggml_backend_dev_name", ctypes.c_char_p, ctypes.c_void_p)
_dev_description = _function("ggml_backend_dev_description", ctypes.c_char_p, ctypes.c_void_p)
_dev_type = _function("ggml_backend_dev_type", ctypes.c_int, ctypes.c_void_p)
_dev_buft = _function("ggml_backend_dev_buffer_type", ctypes.c_void_p, ctypes.c_void_p)
_dev_host_buft = _function("ggml_backend_dev_host_buffer_type", ctypes.c_void_p, ctypes.c_void_p)
_dev_memory = _function("ggml_backend_dev_memory", None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)


def devices() -> list[Any]:
    """(pointer, name, description, type) of each; type 0: CPU."""
    found = [_dev_get(i) for i in range(_dev_count())]
    return [(d, _dev_name(d).decode(), _dev_description(d).decode(), _dev_type(d)) for d in found]


def find_device(name: str | None) -> Any:
    """The named one, else the first GPU, else the CPU."""
    found = devices()
    for device in found:
        if device[1] == name or (name is None and device[3] in (1, 2)):
            return device
    if name is not None:
        raise RuntimeError(f"there is no device {name}: {', '.join(d[1] for d in found)}")
    return next(d for d in found if d[3] == 0)


def free_memory(device: Any) -> int:
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    _dev_memory(device[0], ctypes.byref(free), ctypes.byref(total))
    return free.value


class _Override(ctypes.Structure):
    _fields_ = [("pattern", ctypes.c_char_p), ("buft", ctypes.c_void_p)]


class Loaded:
    """A model with one context, all layers' dense parts on the GPU, experts where it was said."""

    def __init__(
        self, path: str, device: Any, memory: str, device_layers: Sequence[int], n_ctx: int, n_batch: int
    ) -> None:
        """memory: pinned, mmap or repacked, for experts of layers that are not in device_layers."""
        cpu = _dev_buft(next(d for d in devices() if d[3] == 0)[0])
        host = (_dev_host_buft(device[0]) or cpu) if memory == "pinned" else cpu
        rules = [(rf"blk\.{il}{EXPERT_TENSORS}", _dev_buft(device[0])) for il in device_layers]
        rules.append((EXPERT_TENSORS, host))
        table = (_Override * (len(rules) + 1))(*[_Override(p.encode(), b) for p, b in rules])
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = -1
        params.use_extra_bufts = memory == "repacked"
        params.no_host = memory == "repacked"
        params.load_mode = LOAD_MMAP if memory == "mmap" else LOAD_NONE
        params.tensor_buft_overrides = ctypes.cast(table, ctypes.c_void_p)
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), params)
        if not self.model:
            raise RuntimeError(f"{path}: cannot be loaded: {_reason()}")
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        fields = llama_cpp.llama_context_default_params()
        fields.n_ctx, fields.n_batch, fields.n_ubatch, fields.no_perf = n_ctx, n_batch, 512, True
        fields.n_outputs_max = N_OUTPUTS
        self.context = llama_cpp.llama_init_from_model(self.model, fields)
        if not self.context:
            raise RuntimeError(f"{path}: no context of {n_ctx} tokens: {_reason()}")
        self.n_ctx, self.n_batch = n_ctx, min(n_batch, llama_cpp.llama_n_batch(self.context))
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.batch = llama_cpp.llama_batch_init(n_batch, 0, 1)
        self.n_past = 0

    def close(self) -> None:
        llama_cpp.llama_batch_free(self.batch)
        llama_cpp.llama_free(self.context)
        llama_cpp.llama_model_free(self.model)

    def threads(self, n: int) -> None:
        """For single tokens and batches alike (-t and -tb)."""
        llama_cpp.llama_set_n_threads(self.context, n, n)

    def clear(self) -> None:
        llama_cpp.llama_memory_clear(self.memory, True)
        self.n_past = 0

    def rollback(self, n_past: int) -> None:
        if n_past < self.n_past and not llama_cpp.llama_memory_seq_rm(self.memory, 0, n_past, -1):
            raise RuntimeError("this model cannot roll back")
        self.n_past = n_past

    def decode(self, tokens: Sequence[int], all_logits: bool = False) -> Any:
        """Appends tokens; float32 logits, one row for each token or for the last alone."""
        if self.n_past + len(tokens) > self.n_ctx:
            raise RuntimeError(f"the context of {self.n_ctx} tokens is full")
        for i in range(0, len(tokens), self.n_batch):
            part = tokens[i : i + self.n_batch]
            if all_logits and len(part) > N_OUTPUTS:  # llama.cpp would end the process
                raise RuntimeError(f"logits of {len(part)} tokens at once: the context was made for {N_OUTPUTS}")
            n, batch = len(part), self.batch
            batch.n_tokens = n
            for j, token in enumerate(part):
                batch.token[j], batch.pos[j] = token, self.n_past + j
                batch.n_seq_id[j], batch.seq_id[j][0] = 1, 0
                batch.logits[j] = all_logits or j == n - 1
            code = llama_cpp.llama_decode(self.context, batch)
            if code != 0:
                raise RuntimeError(f"decoding {n} tokens failed with code {code}: {_reason()}")
            self.n_past += n
        logits = llama_cpp.llama_get_logits(self.context)
        return np.ctypeslib.as_array(logits, shape=(n if all_logits else 1, self.n_vocab))


def _reason() -> str:
    lines = [line.strip() for line in _log if "error" in line.lower() or "failed" in line.lower()]
    return lines[0] if lines else "llama.cpp gave no reason"


def generate(target: Loaded, draft: Loaded | None, prompt: list[int], n_generate: int, n_draft: int) -> dict[str, Any]:
    """Greedy text after the prompt. seconds: from the first token on, which the prompt gives."""
    target.clear()
    start = time.perf_counter()
    tokens = [int(target.decode(prompt).argmax())]
    ttft = time.perf_counter() - start
    pending: list[int] = []
    if draft:
        draft.clear()
        draft.decode(prompt)
        pending = [tokens[0]]
    n_steps = n_drafted = n_accepted = n_tested = 0
    draft_seconds = verify_seconds = accept_seconds = 0.0
    begin = time.perf_counter()
    while len(tokens) < n_generate:
        t0 = time.perf_counter()
        guesses: list[int] = []
        for _ in range(min(n_draft, n_generate - len(tokens) - 1) if draft else 0):
            assert draft
            guesses.append(int(draft.decode(pending)[0].argmax()))
            pending = [guesses[-1]]
        t1 = time.perf_counter()
        logits = target.decode([tokens[-1], *guesses], all_logits=True)
        t2 = time.perf_counter()
        best = logits.argmax(axis=1).tolist()
        n = 0
        while n < len(guesses) and guesses[n] == best[n]:
            n += 1
        tokens += best[: n + 1]
        target.rollback(target.n_past - (len(guesses) - n))
        if draft:
            # the last guess was never decoded by the draft
            if guesses:
                draft.rollback(draft.n_past - max(0, len(guesses) - 1 - n))
                pending = ([guesses[-1]] if n == len(guesses) else []) + [best[n]]
            else:
                pending = [*pending, best[n]]
        t3 = time.perf_counter()
        n_steps += 1
        n_drafted += len(guesses)
        n_accepted += n
        n_tested += n + (n < len(guesses))
        draft_seconds += t1 - t0
        verify_seconds += t2 - t1
        accept_seconds += t3 - t2
    return {
        "tokens": tokens,
        "ttft": ttft,
        "seconds": time.perf_counter() - begin,
        "n_steps": n_steps,
        "n_drafted": n_drafted,
        "n_accepted": n_accepted,
        "n_tested": n_tested,
        "draft_seconds": draft_seconds,
        "verify_seconds": verify_seconds,
        "accept_seconds": accept_seconds,
    }


def warm_up(decode: Callable[[list[int]], Any], n_ctx: int) -> None:
    """A prompt and batches of common widths into an empty context: pages, kernels and graphs that a first run would wait for."""
    widths = (512, 1, 1, 2, 3, 4, 5, 7, 9)
    for i, n in enumerate(w for w in widths if w < n_ctx // 2):
        decode([100 + (17 * i + j) % 900 for j in range(n)])


class Worker:
    """The operations; state between them: the device, models by name."""

    def __init__(self) -> None:
        self.models: dict[str, Loaded] = {}
        self.device: Any = None

    def hello(self, device: str | None) -> dict[str, Any]:
        self.device = find_device(device)
        return {
            "llama_cpp": llama_cpp.__version__,
            "patched": hasattr(_lib, "llama_moe_attach"),
            "device": self.device[1],
            "description": self.device[2],
            "is_cpu": self.device[3] == 0,
        }

    def load(
        self, name: str, path: str, memory: str, device_layers: list[int], n_ctx: int, n_batch: int
    ) -> dict[str, Any]:
        del _log[:]
        free = free_memory(self.device)
        start = time.perf_counter()
        self.models[name] = Loaded(path, self.device, memory, device_layers, n_ctx, n_batch)
        seconds = time.perf_counter() - start
        answer = {"seconds": seconds, "buffers": buffers(), "device_bytes": free - free_memory(self.device)}
        warm_up(self.models[name].decode, n_ctx)
        return answer

    def unload(self, name: str) -> dict[str, Any]:
        self.models.pop(name).close()
        return {}

    def run(
        self, target: str, draft: str | None, threads: int, prompt: list[int], n_generate: int, n_draft: int
    ) -> dict[str, Any]:
        models = [self.models[n] for n in (target, draft) if n]
        for model in models:
            model.threads(threads)
        gc.collect()
        gc.disable()
        try:
            return generate(models[0], models[1] if draft else None, prompt, n_generate, n_draft)
        finally:
            gc.enable()

    def steps(self, target: str, threads: int, prompt: list[int], text: list[int], width: int) -> dict[str, Any]:
        """Seconds of each decode of `width` tokens of the text, which follows the prompt."""
        model = self.models[target]
        model.threads(threads)
        model.clear()
        model.decode(prompt)
        seconds = []
        for i in range(0, len(text) - width + 1, width):
            start = time.perf_counter()
            model.decode(text[i : i + width], all_logits=True)
            seconds.append(time.perf_counter() - start)
        return {"seconds": seconds}

    def close(self) -> None:
        for model in self.models.values():
            model.close()
        self.models.clear()


def serve(worker: Any) -> None:
    """Answers lines of stdin until it ends or {"op": "quit"} comes."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        operation = request.pop("op")
        if operation == "quit":
            break
        try:
            answer = getattr(worker, operation)(**request)
        except Exception as error:
            answer = {"error": str(error) or type(error).__name__}
        out.write(json.dumps(answer) + "\n")
        out.flush()
    worker.close()


def main() -> None:
    llama_cpp.llama_log_set(_keep_log, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    serve(Worker())


if __name__ == "__main__":
    main()
