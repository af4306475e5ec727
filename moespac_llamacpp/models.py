"""GGUF models and contexts for hybrid MoE execution: experts in host memory, the rest on the device.

The classes own llama.cpp's objects and free them in the right order. Errors are LoadError with one sentence: which file, what
is wrong, and llama.cpp's own reason from its log.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, TypedDict

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from moespac_llamacpp import native
from moespac_llamacpp.header import InspectError, read_parts
from moespac_llamacpp.prefixes import Prefixes

#: The tensors of routed experts and their biases, as upstream's --cpu-moe names them.
EXPERT_TENSORS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps\."

_VOCAB_BPE = 2  # enum llama_vocab_type
WARM_UP_DECODES = 3  # CUDA captures a graph when it comes for the third time
#: Tokens of a batch whose logits can be had. llama.cpp's own limit is n_batch, and it makes its buffers for a prompt's worth: 0.3
#: GB for 512 tokens and 151,936 words.
N_OUTPUTS = 32
LOAD_AUTO, LOAD_NONE = -1, 0  # enum llama_load_mode
_LOG_DEBUG, _LOG_ERROR, _LOG_CONT = 1, 4, 5  # enum ggml_log_level

_log: deque[tuple[int, str]] = deque(maxlen=400)
_records: list[list[str]] = []


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _keep_log(level: int, text: bytes, _: object) -> None:
    line = text.decode("utf-8", "replace").rstrip()
    if level != _LOG_DEBUG:  # thousands while loading: they would push the reason of a failure out
        _log.append((level, line))
    for record in _records:
        record.append(line)


def capture_log() -> None:
    """Keeps llama.cpp's log for error messages instead of printing it."""
    llama_cpp.llama_log_set(_keep_log, ctypes.c_void_p(0))


@contextmanager
def recorded_log() -> Iterator[list[str]]:
    """The lines that llama.cpp logs meanwhile, debug lines too; what was done with its log before goes on afterwards."""
    callback, data = llama_cpp.llama_log_callback(), ctypes.c_void_p()
    llama_cpp.llama_log_get(ctypes.byref(callback), ctypes.byref(data))
    lines: list[str] = []
    _records.append(lines)
    capture_log()
    try:
        yield lines
    finally:
        _records[:] = [record for record in _records if record is not lines]  # others may hold the same lines
        llama_cpp.llama_log_set(callback, data)


def _reason() -> str:
    errors = [text for level, text in _log if level == _LOG_ERROR and text]
    return errors[0] if errors else "llama.cpp gave no reason"


def _load_failure() -> str:
    """The rest of the sentence for a file whose header is sound, but which llama.cpp does not load."""
    reason = _reason()
    if unknown := re.search(r"unknown model architecture: '([^']*)'", reason):
        return (
            f"the llama.cpp in llama-cpp-python {llama_cpp.__version__.partition('+')[0]} does not know the architecture "
            f"{unknown[1]!r}: a newer release may"
        )
    if re.search(r"unable to allocate|failed to allocate|out of memory", reason):
        return f"no memory for it: {reason}: give it less (`moespac plan` shows the numbers), or close what uses the memory"
    return f"cannot be loaded: {reason}"


class LoadError(RuntimeError):
    """A model or context could not be made; the text is the sentence for the user."""


class Message(TypedDict):
    """A message of a chat. role: system, user or assistant."""

    role: str
    content: str


#: More than one text or device at a time is refused in these words.
ONE_SEQUENCE = "one text at a time is generated with a model: requests wait for each other, and n_parallel is 1"
ONE_DEVICE = "a model runs on one device and the CPU, not on several: choose the device with `device`"


@contextmanager
def _interrupts_noted() -> Iterator[Callable[[], bool]]:
    """Was Ctrl-C pressed? ctypes swallows what is raised in a callback, so Python's own handler would only spoil the loading.
    Where the program has a handler of its own, or in another thread, everything stays as it is."""
    pressed = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        pressed = True

    ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if ours:
        signal.signal(signal.SIGINT, note)
    try:
        yield lambda: pressed
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)


class _BuftOverride(ctypes.Structure):
    _fields_ = (("pattern", ctypes.c_char_p), ("buft", ctypes.c_void_p))


class Model:
    """A GGUF file, loaded. `pointer` is the llama_model."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        experts_device: native.Device | None = None,
        n_gpu_layers: int = -1,
        overrides: Sequence[tuple[str, int]] = (),
        progress: Callable[[float], None] | None = None,
        dry: bool = False,
    ) -> None:
        """Loads `path` with its experts in host memory, page-locked for `experts_device` if that has such memory.

        n_gpu_layers: layers whose other tensors go to the GPU, -1 for all (meaningless without one).
        A GPU as experts_device is the only one that is used; with another device none is, whatever n_gpu_layers says.
        overrides: (regular expression, buffer type) of tensors that go elsewhere; they come before the rule for experts.
        progress: called with 0 … 1 while tensors are read.
        dry: reads and allocates no weights; contexts of such a model tell their sizes, but decode nothing.
        LoadError: the file is missing, unreadable, damaged, or of an unknown architecture.
        """
        self.path = Path(path)
        try:  # before llama.cpp does: it is quicker, and tells which byte of which file
            read_parts(self.path)
        except InspectError as error:
            raise LoadError(str(error)) from error
        device = experts_device or native.default_device()
        # Plain memory: a repacked expert can neither be uploaded slice by slice nor read by vec_dot. With mmap the loader would
        # silently replace page-locked memory by the mapping.
        host = device.host_buffer_type
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = n_gpu_layers
        params.use_extra_bufts = False
        params.load_mode = LOAD_NONE if host or dry else LOAD_AUTO
        params.no_alloc = dry
        # An empty list is not the same as none: without one llama.cpp takes every GPU that there is.
        devices = (ctypes.c_void_p * 2)(device.pointer if device.kind in ("gpu", "igpu") else None, None)
        params.devices = ctypes.cast(devices, ctypes.c_void_p)
        buft = host or native.cpu_device().buffer_type
        rules = [*overrides, (EXPERT_TENSORS, buft)]
        table = (_BuftOverride * (len(rules) + 1))(*[_BuftOverride(pattern.encode(), to) for pattern, to in rules])
        params.tensor_buft_overrides = ctypes.cast(table, ctypes.c_void_p)

        @llama_cpp.llama_progress_callback  # type: ignore[untyped-decorator]
        def report(fraction: float, _: object) -> bool:
            if progress:
                progress(fraction)
            return not interrupted()

        params.progress_callback = report
        _log.clear()
        with _interrupts_noted() as interrupted:
            self.pointer: Any = llama_cpp.llama_model_load_from_file(os.fsencode(self.path), params)
        if interrupted():
            self.close()
            raise KeyboardInterrupt
        if not self.pointer:
            raise LoadError(f"{self.path}: {_load_failure()}")
        self.vocab: Any = llama_cpp.llama_model_get_vocab(self.pointer)
        self.n_vocab = int(llama_cpp.llama_vocab_n_tokens(self.vocab))
        self.n_layer = int(llama_cpp.llama_model_n_layer(self.pointer))
        self.n_ctx_train = int(llama_cpp.llama_model_n_ctx_train(self.pointer))

    def close(self) -> None:
        if self.pointer:
            llama_cpp.llama_model_free(self.pointer)
            self.pointer = None

    def __enter__(self) -> Model:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def describe(self) -> str:
        text = ctypes.create_string_buffer(256)
        llama_cpp.llama_model_desc(self.pointer, text, len(text))
        return text.value.decode("utf-8", "replace")

    def tokenize(self, text: str, *, special: bool = True, bos: bool = True) -> list[int]:
        """Token ids of the text; `special`: special tokens in it are recognised; `bos`: with the model's BOS if it wants one."""
        try:
            raw = text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"the text is not Unicode at position {error.start}: give it as UTF-8") from error
        tokens = (llama_cpp.llama_token * (len(raw) + 2))()
        n = llama_cpp.llama_tokenize(self.vocab, raw, len(raw), tokens, len(tokens), bos, special)
        if n < 0:
            raise ValueError(f"{self.path}: the text needs {-n} tokens, more than its {len(raw)} bytes")
        return list(tokens[:n])

    def piece(self, token: int) -> bytes:
        """The token's bytes, b"" for control tokens."""
        return self._piece(token, special=False)

    def _piece(self, token: int, *, special: bool) -> bytes:
        buffer = ctypes.create_string_buffer(64)
        n = llama_cpp.llama_token_to_piece(self.vocab, token, buffer, len(buffer), 0, special)
        if n < 0:
            buffer = ctypes.create_string_buffer(-n)
            n = llama_cpp.llama_token_to_piece(self.vocab, token, buffer, len(buffer), 0, special)
        return buffer.raw[:n]

    @cached_property
    def prefixes(self) -> Prefixes:
        """The vocabulary as a grammar reads it; made once, in a fraction of a second."""
        return Prefixes(
            [self._piece(token, special=True) for token in range(self.n_vocab)],
            [token for token in range(self.n_vocab) if self.ends(token)],
        )

    def ends(self, token: int) -> bool:
        """Does the token end the text or the turn?"""
        return bool(llama_cpp.llama_vocab_is_eog(self.vocab, token))

    @property
    def is_recurrent(self) -> bool:
        """Has it layers with recurrent state, which forgets single tokens only by way of snapshots?"""
        return bool(llama_cpp.llama_model_is_recurrent(self.pointer) or llama_cpp.llama_model_is_hybrid(self.pointer))

    @property
    def splices(self) -> bool:
        """May the tokens of two texts be joined? Other tokenizers than BPE put a space before what they are given."""
        return int(llama_cpp.llama_vocab_type(self.vocab)) == _VOCAB_BPE

    def chat_prompt(self, messages: str | Sequence[Message], **values: Any) -> str:
        """Messages in the model's chat template, up to where the answer starts; a str is the user's only message.

        values: what else the template may look at, such as tools or enable_thinking. The bare messages, a line each, if the file
        has no template. ValueError: the template refuses them."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        if self._formatter is None:
            return "\n".join(message["content"] for message in messages)
        try:
            return str(self._formatter(messages=list(messages), **values).prompt)
        except Exception as error:  # a template is a program: it may fail in any way
            raise ValueError(f"{self.path}: its chat template fails for these messages: {error}") from error

    @cached_property
    def _formatter(self) -> Any:
        """The chat template, compiled; None if the file has none."""
        raw = llama_cpp.llama_model_chat_template(self.pointer, None)
        if not raw:
            return None
        from llama_cpp.llama_chat_format import Jinja2ChatFormatter

        eos = llama_cpp.llama_vocab_eos(self.vocab)
        eos_text = llama_cpp.llama_vocab_get_text(self.vocab, eos).decode("utf-8", "replace") if eos >= 0 else ""
        try:  # without BOS: `tokenize` adds it
            return Jinja2ChatFormatter(template=raw.decode(), eos_token=eos_text, bos_token="")
        except Exception as error:
            raise ValueError(f"{self.path}: its chat template cannot be read: {error}") from error


class Context:
    """A context of a model, with per-expert residency attached unless `attach` is False. Single sequence."""

    def __init__(
        self,
        model: Model,
        *,
        n_ctx: int = 0,
        n_batch: int = 2048,
        n_ubatch: int = 512,
        n_outputs: int = N_OUTPUTS,
        n_threads: int | None = None,
        device: native.Device | None = None,
        attach: bool = True,
        execution: str = "auto",
        perf: bool = False,
        prompt_share: int = 0,
        keep_graphs: int = 0,
        params: Mapping[str, Any] | None = None,
    ) -> None:
        """n_ctx: 0 for the trained length. n_threads: for single tokens and batches alike, None for the cores there are.
        execution: of the layers with experts, a name of native.EXECUTIONS. keep_graphs: without `attach`, up to which batch width
        a graph is kept for each (attached contexts keep theirs). params: further fields of llama_context_params, such
        as type_k, type_v, flash_attn_type.

        LoadError: no memory, the model has no MoE layers, or none that has this execution (with `attach`). ValueError: there is
        no such execution."""
        native.check_execution(execution)
        self.model = model
        fields = llama_cpp.llama_context_default_params()
        fields.n_ctx = n_ctx
        fields.n_batch = n_batch
        fields.n_ubatch = n_ubatch
        fields.n_outputs_max = n_outputs
        fields.no_perf = True
        threads = n_threads or len(os.sched_getaffinity(0))
        fields.n_threads = fields.n_threads_batch = threads
        for name, value in (params or {}).items():
            getattr(fields, name)  # ctypes would take a misspelled field without a word
            setattr(fields, name, value)
        self.n_threads = threads
        _log.clear()
        self.pointer: Any = llama_cpp.llama_init_from_model(model.pointer, fields)
        if not self.pointer:
            raise LoadError(f"{model.path}: no context of {n_ctx or model.n_ctx_train} tokens: {_reason()}")
        self.n_ctx = int(llama_cpp.llama_n_ctx(self.pointer))
        self.n_batch = int(llama_cpp.llama_n_batch(self.pointer))
        self.n_outputs = int(fields.n_outputs_max) or self.n_batch  # as llama.cpp reads 0
        self._batch: Any = llama_cpp.llama_batch_init(self.n_batch, 0, 1)
        self._memory: Any = llama_cpp.llama_get_memory(self.pointer)
        self.experts: native.Experts | None = None
        self.n_past = 0
        self._logits_at, self._views = 0, dict[int, NDArray[np.float32]]()
        if keep_graphs and not attach:
            native.keep_graphs(self.pointer, keep_graphs)
        if attach:
            try:
                self.experts = native.Experts(
                    self.pointer, device, execution=execution, perf=perf, prompt_share=prompt_share
                )
            except native.MoeError as error:
                self.close()
                dense = "a dense model: it has no experts to place; as a draft give it with -md"
                raise LoadError(f"{model.path}: {dense if error.status == 'NO_MOE_LAYERS' else error}") from error

    def close(self) -> None:
        if self.pointer:
            if self.experts:
                self.experts.detach()
                self.experts = None
            llama_cpp.llama_batch_free(self._batch)
            llama_cpp.llama_free(self.pointer)
            self.pointer = None

    def __enter__(self) -> Context:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def decode(self, tokens: Sequence[int], *, all_logits: bool = False) -> NDArray[np.float32]:
        """Appends tokens (at most n_batch) and returns logits: float32 [n_tokens, n_vocab] (at most n_outputs tokens), or
        [1, n_vocab] of the last.

        A view of llama.cpp's memory, valid until the next decode. RuntimeError when the decode fails."""
        n = len(tokens)
        if n == 0 or n > self.n_batch:
            raise ValueError(f"a batch has 1 to {self.n_batch} tokens, not {n}")
        if all_logits and n > self.n_outputs:
            raise ValueError(f"logits of {n} tokens at once: the context was made for {self.n_outputs}")
        if self.n_past + n > self.n_ctx:
            raise ValueError(f"the context of {self.n_ctx} tokens is full: {self.n_past} used, {n} more wanted")
        batch = self._batch
        batch.n_tokens = n
        # each look at a field makes a pointer
        token_at, pos_at, n_seq_at, seq_at, wanted_at = (
            batch.token,
            batch.pos,
            batch.n_seq_id,
            batch.seq_id,
            batch.logits,
        )
        for i, token in enumerate(tokens):
            token_at[i], pos_at[i], wanted_at[i] = token, self.n_past + i, all_logits or i == n - 1
            n_seq_at[i] = 1
            seq_at[i][0] = 0
        _log.clear()
        code = llama_cpp.llama_decode(self.pointer, batch)
        if code != 0:
            llama_cpp.llama_synchronize(self.pointer)
            # The ubatches before the one that failed are in the cache; if a layer failed in one of them, see below.
            failure = self.experts.failure() if self.experts else ""
            if failure or not self.rollback(self.n_past):
                self.clear()
            raise RuntimeError(f"decoding {n} tokens failed with code {code}: {failure or _reason()}")
        self.n_past += n
        logits = llama_cpp.llama_get_logits(self.pointer)
        if self.experts and (failure := self.experts.failure()):
            self.clear()  # what the failed layers wrote into the cache must not be read, not even masked
            raise RuntimeError(f"decoding {n} tokens failed: {failure}. The context is empty now")
        return self._view(logits, n if all_logits else 1)

    def _view(self, logits: Any, n: int) -> NDArray[np.float32]:
        """The first n rows of the logits. To make a view takes 25 µs after a decode, and the address hardly ever changes."""
        address = ctypes.cast(logits, ctypes.c_void_p).value
        assert address is not None
        if address != self._logits_at:
            self._logits_at, self._views = address, {}
        view = self._views.get(n)
        if view is None:
            view = self._views[n] = np.ctypeslib.as_array(logits, shape=(n, self.model.n_vocab))
        return view

    def warm_up(self, widths: Sequence[int], seconds: float, progress: Callable[[float], None] | None = None) -> None:
        """Decodes batches of these numbers of tokens a few times and forgets them: their graphs exist then, and are captured.

        Otherwise the first steps of a text make them, which takes as long as several steps and is mistaken for what these widths
        cost. Starts no further batch after so many seconds. progress: called with 0 … 1."""
        token = max(0, int(llama_cpp.llama_vocab_bos(self.model.vocab)))
        start = time.perf_counter()
        for i, n in enumerate(widths):
            for _ in range(WARM_UP_DECODES):
                if time.perf_counter() - start > seconds:
                    break
                self.clear()
                self.decode([token] * n, all_logits=True)
            if progress:
                progress((i + 1) / len(widths))
        self.clear()
        if self.experts:
            self.experts.reset_perf()

    @property
    def max_guesses(self) -> int:
        """So many drafted tokens fit in a batch behind the last token, with logits of all."""
        return min(self.n_batch, self.n_outputs) - 1

    @property
    def can_roll_back(self) -> bool:
        """Can single tokens be forgotten? Recurrent state cannot, unless snapshots of it are kept."""
        return not self.model.is_recurrent or self.n_snapshots > 0

    @property
    def n_snapshots(self) -> int:
        """How many tokens recurrent state can go back (n_rs_seq)."""
        return int(llama_cpp.llama_n_rs_seq(self.pointer))

    def rollback(self, n_past: int) -> bool:
        """Forgets the tokens from position n_past on; False if this model's memory cannot."""
        if not llama_cpp.llama_memory_seq_rm(self._memory, 0, n_past, -1):
            return False
        self.n_past = n_past
        return True

    @property
    def can_shift(self) -> bool:
        """Can tokens in the midst be forgotten? Upstream aborts where this is not asked first."""
        return bool(llama_cpp.llama_memory_can_shift(self._memory))

    def shift(self, n_keep: int, n_discard: int) -> bool:
        """Forgets n_discard tokens after the first n_keep and moves the later ones up; False if this model's memory cannot.

        What stays has seen what goes: it is not what evaluating the shorter text would give."""
        if not self.can_shift or not llama_cpp.llama_memory_seq_rm(self._memory, 0, n_keep, n_keep + n_discard):
            return False
        llama_cpp.llama_memory_seq_add(self._memory, 0, n_keep + n_discard, self.n_past, -n_discard)
        self.n_past -= n_discard
        return True

    def clear(self) -> None:
        llama_cpp.llama_memory_clear(self._memory, True)
        self.n_past = 0
