"""Decodes fixed batches and writes down what came out: logits, and every node of every graph. Run by test_detached.py under two
interpreters, so it needs no more than llama_cpp and numpy.

    python dump_decodes.py OUT.npz plain|detached MODEL...

detached: a context computes hybrid for a while, then lets go of the feature, before it is looked at. Arrays in OUT, for each
model: `NAME/logits` float32 [n, n_vocab]; `NAME/nodes` one string per node; `patched`: has this build our entry points?
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

import lowlevel

N_CTX, N_UBATCH = 256, 16
TOKENS = np.random.default_rng(11).integers(3, 128, 128).tolist()
# (tokens, where the context is rolled back to before; -1: cleared)
BATCHES = ((40, -1), (1, 40), (9, 41), (1, 50), (9, -1), (9, 9), (4, 18), (32, 22), (1, 54))


class Nodes:
    """An eval callback that asks for no data, only writes down each node: name, operation, type, shape."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __call__(self, tensor: int, ask: bool, _: Any = None) -> bool:
        t = lowlevel.GgmlTensor.from_address(tensor)
        self.seen.append(f"{t.name.decode()} op{t.op} type{t.type} {list(t.ne)}")
        return False


def decode_all(ctx: lowlevel.Context, nodes: Nodes | None = None) -> np.ndarray:
    parts = []
    for n, start in BATCHES:
        if start < 0:
            ctx.clear()
        at = max(start, 0)
        if nodes:
            nodes.seen.append(f"--- {n} tokens at {at}")
        parts.append(lowlevel.decode(ctx, TOKENS[at : at + n], at))
    return np.concatenate(parts)


def use_and_let_go(ctx: lowlevel.Context) -> None:
    from moespac_llamacpp import native

    try:
        experts = native.Experts(ctx.ptr)
    except native.MoeError as error:  # a dense model: the attempt must leave no trace either
        assert error.status == "NO_MOE_LAYERS"
        return
    rows = [experts.row(i) for i in range(experts.n_rows)]
    experts.set_slots([r.n_expert // 2 if r.hybrid else 0 for r in rows])
    for r in rows:
        for expert in range(r.n_expert // 2) if r.hybrid else ():
            experts.load(r.row, expert)
    experts.sync()
    experts.publish()
    decode_all(ctx)
    assert experts.perf_total().n_hot_pairs > 0 or not any(r.hybrid for r in rows)
    experts.detach()


def main(out: str, mode: str, paths: list[str]) -> None:
    result: dict[str, Any] = {"patched": hasattr(llama_cpp.llama_cpp._lib, "llama_moe_attach")}
    for path in paths:
        nodes = Nodes()
        repacked = "repacked" in Path(path).name  # as upstream loads by default
        with lowlevel.load_model(path, use_extra_bufts=repacked) as model:
            for callback in (None, nodes):
                with lowlevel.make_context(model, N_CTX, n_threads=1, n_ubatch=N_UBATCH, cb=callback) as ctx:
                    if mode == "detached":
                        use_and_let_go(ctx)
                        nodes.seen.clear()
                    logits = decode_all(ctx, callback)
                result[f"{Path(path).stem}/{'nodes_logits' if callback else 'logits'}"] = logits
        result[f"{Path(path).stem}/nodes"] = np.array(nodes.seen)
    np.savez(out, **result)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
