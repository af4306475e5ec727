"""Routing traces: which experts the routers chose, token by token. Recording from a context, and the `.npz` files.

| array | shape, type | meaning |
|---|---|---|
| experts | [step, layer, k] uint8 (uint16 over 255 experts) | expert ids in router rank order, the type's maximum: not recorded |
| weights | [step, layer, k] float32 | routing weights as applied |
| is_decode | [step] bool | False: prompt token, True: generated token |
| token | [step] int32 | the token that was decoded |
| rows | [layer] int32 | the MoE row (layer index) behind each entry of `layer`: dense layers are left out |
| n_expert | scalar | experts per layer (the largest) |
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moespac_llamacpp import native


@dataclass(frozen=True)
class Trace:
    experts: NDArray[np.unsignedinteger]
    weights: NDArray[np.float32]
    is_decode: NDArray[np.bool_]
    token: NDArray[np.int32]
    rows: NDArray[np.int32]
    n_expert: int

    def save(self, path: Path) -> None:
        np.savez_compressed(
            path,
            experts=self.experts,
            weights=self.weights,
            is_decode=self.is_decode,
            token=self.token,
            rows=self.rows,
            n_expert=np.int32(self.n_expert),
        )


class Recorder:
    """Records every decode of a context until `close`; `decoded` tells it the tokens of each decode.

    Ask for the logits of all tokens: most models compute their last layer only for tokens with logits."""

    def __init__(self, experts: native.Experts) -> None:
        self.experts = experts
        self.info = experts.rows()
        self.k = max(r.n_expert_used for r in self.info)
        self.index = {r.row: i for i, r in enumerate(self.info)}
        wide = max(r.n_expert for r in self.info) > 255
        self.dtype: type[np.unsignedinteger] = np.uint16 if wide else np.uint8
        self._ids: list[NDArray[np.unsignedinteger]] = []
        self._weights: list[NDArray[np.float32]] = []
        self._token: list[int] = []
        self._is_decode: list[bool] = []
        experts.set_router_callback(self._on_row)

    def _on_row(self, row: int, ids: NDArray[np.int32], weights: NDArray[np.float32]) -> None:
        n, k = ids.shape
        if row == self.info[0].row:  # the rows of one ubatch come in order: the first one opens it
            shape = (n, len(self.info), self.k)
            self._ids.append(np.full(shape, np.iinfo(self.dtype).max, self.dtype))
            self._weights.append(np.zeros(shape, np.float32))
        if n != len(self._ids[-1]):
            raise ValueError(
                f"row {row} saw {n} tokens, the first row {len(self._ids[-1])}: ask for the logits of all tokens"
            )
        self._ids[-1][:, self.index[row], :k] = ids
        self._weights[-1][:, self.index[row], :k] = weights

    def decoded(self, tokens: list[int], *, is_decode: bool) -> None:
        """To be called after each (synchronised) decode with its tokens."""
        self.experts.raise_callback_error()
        self._token += tokens
        self._is_decode += [is_decode] * len(tokens)

    def trace(self) -> Trace:
        shape = (0, len(self.info), self.k)
        ids = np.concatenate([np.empty(shape, self.dtype), *self._ids])
        if len(ids) != len(self._token):
            raise RuntimeError(f"{len(ids)} tokens were routed, but {len(self._token)} were reported as decoded")
        return Trace(
            experts=ids,
            weights=np.concatenate([np.empty(shape, np.float32), *self._weights]),
            is_decode=np.array(self._is_decode, np.bool_),
            token=np.array(self._token, np.int32),
            rows=np.array([r.row for r in self.info], np.int32),
            n_expert=max(r.n_expert for r in self.info),
        )

    def close(self) -> None:
        self.experts.set_router_callback(None)
