"""What llama.cpp allocates for a model and a context, found without allocating it.

Weights are added up from the header by upstream's rules of placement (llama-model-loader.cpp: input tensors in host memory, the
rest of an offloaded layer on the device, experts where we put them). KV caches and compute buffers depend on the graph: upstream
plans them itself for a model that is loaded dry (`no_alloc`), and its log has the sizes, rounded to 0.01 MiB.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from moespac_llamacpp import native
from moespac_llamacpp.draft import DRAFT_WIDTHS
from moespac_llamacpp.header import Header, read_parts
from moespac_llamacpp.models import EXPERT_TENSORS, Context, Model, recorded_log
from moespac_llamacpp.plan import Block, Footprint
from moespac_llamacpp.residency import block_sizes

_MIB = 1 << 20
_LAYER = re.compile(r"blk\.(\d+)\.")
_EXPERTS = re.compile(EXPERT_TENSORS)
#: LLM_TENSOR_LAYER_INPUT of llama-arch.cpp: rows are looked up, in host memory
_INPUT = re.compile(r"(token_embd|position_embd|token_types|per_layer_token_embd)\.")
_CACHE = re.compile(r"[:,] size =\s*([\d.]+) MiB\b")  # not the "KV buffer size", which is 0 in a dry run
_CACHE_LAYER = re.compile(r"layer\s+\d+: dev = (\S+)")
_COMPUTE = re.compile(r"sched_reserve:\s+(\S+) compute buffer size =\s*([\d.]+) MiB")
#: So many graphs of batches up to native.MAX_BATCH_TOKENS are kept, one for each width (moe-graphs.h)
MAX_WIDTHS = 16


def weights(
    parts: Sequence[Header], n_gpu_layers: int, on_gpu: bool, elsewhere: Sequence[tuple[str, bool]] = ()
) -> tuple[int, int, int]:
    """(device, host without experts, experts in host memory): bytes of a model's tensors.

    n_gpu_layers: -1 for all, the output included. elsewhere: (pattern, on the device) of tensors that are sent elsewhere, the
    first that fits counts."""
    n_layer = parts[0].own("block_count")
    # llama.cpp leaves out the last layers of models that can predict several tokens
    n_loaded = n_layer - parts[0].own("nextn_predict_layers")
    n_gpu = (n_layer + 1 if n_gpu_layers < 0 else min(n_gpu_layers, n_layer + 1)) if on_gpu else 0
    first = n_layer + 1 - n_gpu  # upstream offloads from the end; the output counts as the last layer
    rules = [(re.compile(pattern), there) for pattern, there in elsewhere]
    tensors = [tensor for part in parts for tensor in part.tensors]
    device = host = experts = 0
    for tensor in tensors:
        layer, sent = _LAYER.match(tensor.name), [there for rule, there in rules if rule.search(tensor.name)]
        if layer and int(layer[1]) >= n_loaded:
            continue
        if _EXPERTS.search(tensor.name) and not any(sent[:1]):
            experts += tensor.n_bytes
        elif sent:
            device, host = (device + tensor.n_bytes, host) if sent[0] else (device, host + tensor.n_bytes)
        elif _INPUT.match(tensor.name) or (int(layer[1]) if layer else n_layer) < first:
            host += tensor.n_bytes
        else:
            device += tensor.n_bytes
    if n_gpu and not any(tensor.name == "output.weight" for tensor in tensors):
        # the embedding serves as output too, and is there twice
        device += sum(tensor.n_bytes for tensor in tensors if tensor.name == "token_embd.weight")
    return device, host, experts


class Meter:
    """A dry model whose contexts can be measured. Owns the model; close it. options: how its contexts are made."""

    def __init__(
        self, path: Path, device: native.Device, *, n_gpu_layers: int = -1, overrides: Sequence[tuple[str, int]] = ()
    ) -> None:
        """LoadError as models.Model."""
        self.device = device
        self.options: dict[str, Any] = {}
        self.on_gpu = device.kind in ("gpu", "igpu")
        with recorded_log():
            self.model = Model(path, experts_device=device, n_gpu_layers=n_gpu_layers, overrides=overrides, dry=True)
        elsewhere = [(pattern, self.on_gpu and to == device.buffer_type) for pattern, to in overrides]
        self._weights = weights(read_parts(path), n_gpu_layers, self.on_gpu, elsewhere)

    def close(self) -> None:
        self.model.close()

    def context(self, n_ctx: int) -> Footprint:
        """The model with a plain context."""
        with recorded_log() as lines, Context(self.model, n_ctx=n_ctx, attach=False, **self.options) as context:
            return self._footprint(context.n_ctx, lines)

    def draft(self, n_ctx: int) -> Footprint:
        """The model as a draft, whose context keeps the graphs that guessing needs."""
        widths = range(1, DRAFT_WIDTHS + 1)
        graphs = sum(self._width(n_ctx, n, attach=False) for n in widths) if self.on_gpu else 0
        return replace(self.context(n_ctx), graphs=graphs)

    def target(self, n_ctx: int, draft_max: int) -> tuple[Footprint, list[Block]]:
        """The model with experts attached, and its rows. draft_max: verify batches have 1 to draft_max + 1 tokens.

        LoadError: a dense model, or no memory even for what a few kilobytes of lane need."""
        with recorded_log() as lines, Context(self.model, n_ctx=n_ctx, device=self.device, **self.options) as context:
            assert context.experts is not None
            found, lane = self._footprint(context.n_ctx, lines), context.experts.device_bytes()
            prompts = context.experts.prompt_memory()
            blocks = _blocks(context.experts)
        return replace(
            found, lane=lane, prompts=prompts, graphs=self._graphs(n_ctx, draft_max) if self.on_gpu else 0
        ), blocks

    def _graphs(self, n_ctx: int, draft_max: int) -> int:
        """The most that graphs take: one for each width of a verify batch, between whose ends sizes grow evenly, and all others
        that are kept as for the widest short prompt."""
        n_verify = min(draft_max + 1, MAX_WIDTHS)
        narrow, wide, widest = (self._width(n_ctx, n) for n in (1, draft_max + 1, native.MAX_BATCH_TOKENS))
        return n_verify * (narrow + wide) // 2 + (MAX_WIDTHS - n_verify) * widest

    def _width(self, n_ctx: int, n_tokens: int, attach: bool = True) -> int:
        """Compute buffer on the device of a graph for n_tokens."""
        options = self.options | {"n_batch": n_tokens, "n_ubatch": n_tokens, "attach": attach}
        with recorded_log() as lines, Context(self.model, n_ctx=n_ctx, device=self.device, **options) as context:
            return self._footprint(context.n_ctx, lines).compute

    def _footprint(self, n_ctx: int, lines: Sequence[str]) -> Footprint:
        name = self.device.buffer_name
        caches = int(_MIB * sum(float(m[1]) for line in lines if (m := _CACHE.search(line))))
        where = [m[1] for line in lines if (m := _CACHE_LAYER.search(line))]
        share = where.count(self.device.name) / max(1, len(where)) if self.on_gpu else 0.0
        compute: dict[str, int] = {}
        for line in lines:
            if "sched_reserve: reserving ..." in line:
                compute = {}  # attaching reserves anew
            elif m := _COMPUTE.search(line):
                compute[m[1]] = int(_MIB * float(m[2]))
        on_device = compute.get(name, 0) if self.on_gpu else 0
        device, host, experts = self._weights
        return Footprint(
            n_ctx=n_ctx,
            n_ctx_train=self.model.n_ctx_train,
            weights=device,
            kv=int(share * caches),
            compute=on_device,
            host_weights=host,
            host_kv=caches - int(share * caches),
            host_compute=sum(compute.values()) - on_device,
            expert_bytes=experts,
        )


def fallbacks(path: Path, device: native.Device) -> dict[int, str]:
    """Why a layer with experts takes llama.cpp's own path, by its index; those that run hybrid are not there. Loads no weights.

    LoadError as models.Model and models.Context."""
    with closing(Meter(path, device)) as meter:
        _, blocks = meter.target(256, 0)  # any length will do
    return {block.il: block.fallback for block in blocks if block.n_expert and not block.hybrid}


def _blocks(experts: native.Experts) -> list[Block]:
    rows = {row.row: row for row in experts.rows()}
    return [
        Block(size.n_expert, size.expert_bytes, size.hybrid, rows[i].il, rows[i].n_expert_used, rows[i].fallback)
        if i in rows
        else Block(0, 0, False)
        for i, size in enumerate(block_sizes(experts))
    ]
