"""What is observed is what the routers chose: counts, router callback, traces; hybrid or not, over ubatches, for every family."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

from conftest import Attached
from families import FAMILIES, N_VOCAB, Family
from lowlevel import EXACT, Capture, Context, decode, make_context
from moespac_llamacpp import native, routing
from moespac_llamacpp.models import Model as PackageModel

MOE = pytest.mark.parametrize("family", [f for f in FAMILIES.values() if f.n_expert], ids=lambda f: f.name)
# what build_moe_ffn makes of the weights, the last one made first
WEIGHTS = ("ffn_moe_weights_scaled", "ffn_moe_weights_norm", "ffn_moe_weights_softmax", "ffn_moe_weights")
TOKENS = [int(t) for t in np.random.default_rng(3).integers(3, N_VOCAB, 200)]

Array = np.ndarray[Any, Any]
Choice = tuple[Array, Array]  # ids, weights, both [n_tokens, n_expert_used]


class Routed:
    """An attached context whose graph tells what its routers chose."""

    def __init__(self, attach: Callable[..., Attached], family: Family, **options: Any) -> None:
        self.capture = Capture("ffn_moe_topk", *WEIGHTS)
        attached = attach(family, cb=self.capture, n_threads=1, **options)
        self.ctx, self.experts, self.family = attached.ctx, attached.experts, family
        self.rows = self.experts.rows()
        self.n_past = 0

    def fill(self, share: float = 0.5) -> None:
        slots = [
            round(share * r.n_expert) if r.hybrid else 0 for r in map(self.experts.row, range(self.experts.n_rows))
        ]
        self.experts.set_slots(slots)
        for row, n in enumerate(slots):
            for expert in np.flatnonzero(self.experts.states(row) == native.COLD)[:n] if n else ():
                self.experts.load(row, int(expert))
        self.experts.sync()
        self.experts.publish()

    def decode(self, n: int, outputs: str = "all") -> None:
        self.capture.clear()
        decode(self.ctx, TOKENS[self.n_past : self.n_past + n], self.n_past, outputs=outputs)
        self.n_past += n

    def choice(self, row: native.Row) -> Choice:
        """What the graph of the last decode held, its ubatches one after the other."""
        second = row.row != row.il  # a second block of the layer comes after the first in each ubatch
        at = slice(int(second), None, self.family.blocks)
        ids = [a.reshape(-1, row.n_expert_used) for a in self.capture.tensors[f"ffn_moe_topk-{row.il}"][at]]
        name = next(n for n in WEIGHTS if f"{n}-{row.il}" in self.capture.tensors)
        weights = [a.reshape(-1, row.n_expert_used) for a in self.capture.tensors[f"{name}-{row.il}"][at]]
        # GroveMoE: two neighbouring experts share an adjugate one (models/grovemoe.cpp)
        return np.concatenate(ids) // (2 if second else 1), np.concatenate(weights)

    def check_counts(self) -> Array:
        counts = self.experts.counts()
        expected = np.zeros_like(counts)
        for row in self.rows:
            ids, _ = self.choice(row)
            expected[row.row] = np.bincount(ids.ravel(), minlength=self.experts.n_expert)
        assert (counts == expected).all(), (counts, expected)
        return counts


class Listener:
    """A router callback that keeps what it hears."""

    def __init__(self) -> None:
        self.heard: dict[int, list[Choice]] = {}

    def __call__(self, row: int, ids: Array, weights: Array) -> None:
        self.heard.setdefault(row, []).append((ids.copy(), weights.copy()))

    def check(self, routed: Routed) -> None:
        """Equal, bit for bit, to what the graph held; forgets it."""
        assert sorted(self.heard) == sorted(r.row for r in routed.rows)
        for row in routed.rows:
            ids, weights = (np.concatenate(parts) for parts in zip(*self.heard[row.row], strict=True))
            true_ids, true_weights = routed.choice(row)
            assert ids.dtype == np.int32 and weights.dtype == np.float32
            assert (ids == true_ids).all() and (weights == true_weights).all()
        self.heard.clear()


# --- counts -----------------------------------------------------------------------------------------------------------


@MOE
@pytest.mark.parametrize("n", [9, 40])
def test_choices_are_the_ids_of_every_token(attach: Callable[..., Attached], family: Family, n: int) -> None:
    """Hybrid (9 tokens) and upstream's path in several ubatches (40)."""
    routed = Routed(attach, family, n_ubatch=16)
    routed.fill()
    routed.decode(n)
    choices = np.concatenate(routed.experts.choices(), axis=1)
    assert choices.shape[:2] == (routed.experts.n_rows, n)
    for row in routed.rows:
        ids, _ = routed.choice(row)
        assert (choices[row.row, :, : row.n_expert_used] == ids).all()
    routed.decode(1)
    (last,) = routed.experts.choices()
    assert last.shape[1] == 1


@MOE
def test_counts_are_the_routers_choices_for_every_family(family: Family, attach: Callable[..., Attached]) -> None:
    """Single tokens and verify widths (hybrid), a prompt over several ubatches (upstream's path), and one whose last ubatch is
    small enough to run hybrid."""
    routed = Routed(attach, family, n_ubatch=16, experts={"max_batch_tokens": 8})
    routed.fill()
    for n in (1, 8, 3, 100, 1, 16, 9):
        routed.decode(n)
        counts = routed.check_counts()
        assert all(counts[r.row].sum() == n * r.n_expert_used for r in routed.rows)
    assert all(
        r.row in {x.row for x in routed.rows} or not counts[r.row].any()
        for r in map(routed.experts.row, range(len(counts)))
    )


def test_rows_of_dense_layers_count_nothing(attach: Callable[..., Attached]) -> None:
    routed = Routed(attach, FAMILIES["llama4"])
    routed.decode(9)
    counts = routed.check_counts()
    assert counts.shape == (4, 8)
    assert counts.sum(axis=1).tolist() == [0, 9, 0, 9]


@pytest.mark.parametrize("limit", [8, 32])
def test_counts_do_not_depend_on_residency(attach: Callable[..., Attached], limit: int) -> None:
    routed = Routed(attach, FAMILIES["qwen3moe"], experts={"max_batch_tokens": limit})
    for share in (0.0, 0.5, 1.0):
        routed.experts.set_slots([0, 0])
        routed.fill(share)
        for n in (1, 9, 33):
            routed.decode(n)
            routed.check_counts()


def test_the_last_layer_counts_only_tokens_with_an_output(attach: Callable[..., Attached]) -> None:
    """Upstream computes it for them alone, on both paths."""
    routed = Routed(attach, FAMILIES["qwen3moe"], n_ubatch=16, experts={"max_batch_tokens": 8})
    routed.fill()
    for n in (40, 5, 1, 37, 16):
        routed.decode(n, outputs="last")
        counts = routed.check_counts()
        assert counts.sum(axis=1).tolist() == [2 * n, 2]
    routed.decode(40)
    assert routed.check_counts().sum(axis=1).tolist() == [80, 80]


@pytest.mark.parametrize("n", [5, 40])
def test_a_decode_without_outputs_counts_nothing_in_the_last_layer(attach: Callable[..., Attached], n: int) -> None:
    """As for the first parts of a long prompt; what an earlier decode left in the device's log must not come back."""
    routed = Routed(attach, FAMILIES["qwen3moe"], experts={"max_batch_tokens": 8})
    routed.decode(n)
    assert routed.check_counts().sum(axis=1).tolist() == [2 * n, 2 * n]
    heard = Listener()
    decode_without_outputs(routed.ctx, TOKENS[:n], n)
    assert routed.experts.counts().sum(axis=1).tolist() == [2 * n, 0]
    routed.experts.set_router_callback(heard)
    decode_without_outputs(routed.ctx, TOKENS[:n], 2 * n)
    assert [len(ids) for ids, _ in heard.heard[0]] == [n]
    assert all((ids >= 0).all() for parts in heard.heard.values() for ids, _ in parts)


def decode_without_outputs(ctx: Context, tokens: list[int], pos0: int) -> None:
    batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, pos0 + i, 1, False
        batch.seq_id[i][0] = 0
    code = llama_cpp.llama_decode(ctx.ptr, batch)
    llama_cpp.llama_batch_free(batch)
    assert code == 0
    llama_cpp.llama_synchronize(ctx.ptr)


def test_counts_are_a_view_of_native_memory(attach: Callable[..., Attached]) -> None:
    routed = Routed(attach, FAMILIES["qwen3moe"])
    routed.decode(9)
    first = routed.experts.counts()
    before = first.copy()
    assert first.dtype == np.int32 and not first.flags.owndata
    routed.decode(33)
    second = routed.experts.counts()
    assert first.__array_interface__["data"] == second.__array_interface__["data"]
    assert (first == second).all() and (first != before).any()
    assert first.sum() == 2 * 2 * 33


def test_a_failed_decode_leaves_no_old_counts(attach: Callable[..., Attached]) -> None:
    routed = Routed(attach, FAMILIES["qwen3moe"], n_ctx=256)
    routed.decode(9)
    with pytest.raises(RuntimeError):
        decode(routed.ctx, [N_VOCAB + 5], 9)  # refused before anything is computed
    routed.decode(4)
    routed.check_counts()


def test_a_warm_up_counts_nothing(attach: Callable[..., Attached]) -> None:
    """A warm-up computes all experts; a wide one must not report the choices of an earlier prompt."""
    routed = Routed(attach, FAMILIES["qwen3moe"], experts={"max_batch_tokens": 8})
    routed.decode(40)
    llama_cpp.llama_set_warmup(routed.ctx.ptr, True)
    decode(routed.ctx, TOKENS[100:140], 40)
    llama_cpp.llama_set_warmup(routed.ctx.ptr, False)
    assert not routed.experts.counts().any()


def test_choices_of_a_cropped_layer_stand_with_their_tokens(attach: Callable[..., Attached]) -> None:
    """Only the last token's logits are wanted: the last layer computes that one alone, and the others read as not computed."""
    for experts in ({}, {"max_batch_tokens": 2}):  # hybrid, upstream's path
        routed = Routed(attach, FAMILIES["qwen3moe"], experts=experts)
        routed.decode(4, outputs="last")
        (choices,) = routed.experts.choices()
        first, last = routed.rows
        assert (choices[first.row] >= 0).all()
        assert (choices[last.row, :3] == -1).all()
        ids, _ = routed.choice(last)
        assert (choices[last.row, 3] == ids[0]).all()


def test_a_warm_up_is_not_heard(attach: Callable[..., Attached]) -> None:
    routed = Routed(attach, FAMILIES["qwen3moe"])
    heard = Listener()
    routed.experts.set_router_callback(heard)
    llama_cpp.llama_set_warmup(routed.ctx.ptr, True)
    decode(routed.ctx, TOKENS[:2])
    llama_cpp.llama_set_warmup(routed.ctx.ptr, False)
    assert not heard.heard
    routed.experts.set_router_callback(None)


@pytest.mark.parametrize(("n_seq_max", "n_ubatch"), [(3, 64), (5, 2)])
def test_a_number_of_sequences_that_does_not_divide_the_ubatch(
    attach: Callable[..., Attached], n_seq_max: int, n_ubatch: int
) -> None:
    """A reserve rounds the ubatch up to a multiple of the sequences; the device's log must hold that."""
    routed = Routed(attach, FAMILIES["qwen3moe"], n_seq_max=n_seq_max, n_ubatch=n_ubatch, kv_unified=True)
    routed.decode(9)
    routed.check_counts()


# --- router callback --------------------------------------------------------------------------------------------------


@MOE
def test_the_router_callback_hears_ids_and_weights_as_they_are(family: Family, attach: Callable[..., Attached]) -> None:
    routed = Routed(attach, family, n_ubatch=16, experts={"max_batch_tokens": 8})
    routed.fill()
    heard = Listener()
    routed.experts.set_router_callback(heard)
    for n in (1, 8, 50, 9, 1):
        routed.decode(n)
        routed.experts.raise_callback_error()
        heard.check(routed)
        routed.check_counts()


def test_the_router_callback_hears_cropped_layers(attach: Callable[..., Attached]) -> None:
    routed = Routed(attach, FAMILIES["qwen3moe"], n_ubatch=16, experts={"max_batch_tokens": 8})
    heard = Listener()
    routed.experts.set_router_callback(heard)
    for n in (1, 8, 50):
        routed.decode(n, outputs="last")
        assert sum(len(ids) for ids, _ in heard.heard[0]) == n
        assert sum(len(ids) for ids, _ in heard.heard[1]) == 1
        heard.check(routed)


def test_the_router_callback_can_come_and_go(attach: Callable[..., Attached]) -> None:
    routed = Routed(attach, FAMILIES["qwen3moe"], n_ubatch=16, experts={"max_batch_tokens": 8})
    routed.fill()
    heard, other = Listener(), Listener()
    for n in (1, 9, 20):
        routed.decode(n)
        routed.experts.set_router_callback(heard)
        for m in (n, 1, 4, 20):
            routed.decode(m)
            heard.check(routed)
        routed.experts.set_router_callback(other)
        routed.decode(5)
        other.check(routed)
        routed.experts.set_router_callback(None)
        routed.decode(5)
        routed.check_counts()
        assert not heard.heard and not other.heard


def test_what_a_callback_raises_reaches_the_caller(attach: Callable[..., Attached]) -> None:
    routed = Routed(attach, FAMILIES["qwen3moe"])

    def broken(row: int, ids: Array, weights: Array) -> None:
        raise ZeroDivisionError(f"row {row}")

    routed.experts.set_router_callback(broken)
    routed.decode(4)
    with pytest.raises(ZeroDivisionError, match=r"row \d"):
        routed.experts.raise_callback_error()
    routed.experts.raise_callback_error()  # told once
    routed.experts.set_router_callback(None)
    routed.decode(4)
    routed.experts.raise_callback_error()
    routed.check_counts()


def test_the_callback_hears_decodes_that_were_not_synchronised_one_by_one(attach: Callable[..., Attached]) -> None:
    """As a prompt in several batches is decoded: logits are read after the last one."""
    routed = Routed(attach, FAMILIES["qwen3moe"])
    heard = Listener()
    routed.experts.set_router_callback(heard)
    tokens = (llama_cpp.llama_token * 9)(*TOKENS[:9])  # the batch does not keep it alive
    batch = llama_cpp.llama_batch_get_one(tokens, 9)
    for _ in range(2):
        assert llama_cpp.llama_decode(routed.ctx.ptr, batch) == 0
    llama_cpp.llama_synchronize(routed.ctx.ptr)
    assert sum(len(ids) for ids, _ in heard.heard[0]) == 18


# --- traces -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3moe", "deepseek2-v2", "grovemoe"])
def test_a_recorded_trace_survives_its_file(name: str, attach: Callable[..., Attached], tmp_path: Path) -> None:
    """One row per token, prompts and generated tokens alike; dense layers are left out."""
    routed = Routed(attach, FAMILIES[name], n_ubatch=16, experts={"max_batch_tokens": 8})
    routed.fill()
    recorder = routing.Recorder(routed.experts)
    truth: dict[int, list[Choice]] = {r.row: [] for r in routed.rows}
    at = 0
    for n in (40, 1, 1, 5):
        routed.decode(n)
        recorder.decoded(TOKENS[at : at + n], is_decode=at > 0)
        at += n
        for row in routed.rows:
            truth[row.row].append(routed.choice(row))
    trace = recorder.trace()
    recorder.close()
    trace.save(tmp_path / "trace.npz")
    with np.load(tmp_path / "trace.npz") as file:
        assert sorted(file.files) == ["experts", "is_decode", "n_expert", "rows", "token", "weights"]
        k = max(r.n_expert_used for r in routed.rows)
        assert file["experts"].dtype == np.uint8 and file["experts"].shape == (47, len(routed.rows), k)
        assert file["weights"].dtype == np.float32 and file["weights"].shape == file["experts"].shape
        assert file["is_decode"].dtype == np.bool_ and file["is_decode"].tolist() == [False] * 40 + [True] * 7
        assert file["token"].tolist() == TOKENS[:47]
        assert file["rows"].tolist() == [r.row for r in routed.rows]
        assert file["n_expert"].shape == () and int(file["n_expert"]) == max(r.n_expert for r in routed.rows)
        for i, row in enumerate(routed.rows):
            ids, weights = (np.concatenate(parts) for parts in zip(*truth[row.row], strict=True))
            assert (file["experts"][:, i, : row.n_expert_used] == ids).all()
            assert (file["weights"][:, i, : row.n_expert_used] == weights).all()


def test_a_recorder_stops_when_closed_and_tells_missing_tokens(attach: Callable[..., Attached]) -> None:
    routed = Routed(attach, FAMILIES["qwen3moe"])
    recorder = routing.Recorder(routed.experts)
    routed.decode(3)
    with pytest.raises(RuntimeError, match="3 tokens were routed, but 0"):
        recorder.trace()
    recorder.decoded(TOKENS[:3], is_decode=False)
    recorder.close()
    routed.decode(3)
    assert len(recorder.trace().token) == 3


def test_many_experts_take_a_wider_type(attach: Callable[..., Attached]) -> None:
    family = dataclasses.replace(FAMILIES["qwen3moe"], n_expert=260)
    routed = Routed(attach, family, model={"n_ff_exp": 32, "n_embd": 128})
    recorder = routing.Recorder(routed.experts)
    routed.decode(20)
    recorder.decoded(TOKENS[:20], is_decode=False)
    trace = recorder.trace()
    assert trace.experts.dtype == np.uint16
    assert (trace.experts[:, 0] == routed.choice(routed.rows[0])[0]).all()


@pytest.mark.parametrize("n_out", [1, 3])
def test_a_recorder_refuses_a_cropped_layer(attach: Callable[..., Attached], n_out: int) -> None:
    """The last layer chose nothing for tokens without an output: a trace must not claim that it did."""
    routed = Routed(attach, FAMILIES["qwen3moe"])
    recorder = routing.Recorder(routed.experts)
    decode_tail(routed, 20, n_out)
    with pytest.raises(
        ValueError, match=f"row 1 saw {n_out} tokens, the first row 20: ask for the logits of all tokens"
    ):
        recorder.decoded(TOKENS[:20], is_decode=False)


def decode_tail(routed: Routed, n: int, n_out: int) -> None:
    """The last n_out tokens have an output."""
    routed.capture.clear()
    batch = llama_cpp.llama_batch_init(n, 0, 1)
    batch.n_tokens = n
    for i in range(n):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = TOKENS[i], i, 1, i >= n - n_out
        batch.seq_id[i][0] = 0
    assert llama_cpp.llama_decode(routed.ctx.ptr, batch) == 0
    llama_cpp.llama_batch_free(batch)
    llama_cpp.llama_synchronize(routed.ctx.ptr)


@pytest.fixture(scope="module")
def trace_file(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("trace") / "tiny.npz"
    command = [
        sys.executable,
        "-m",
        "moespac_llamacpp.cli",
        "trace",
        str(out),
        "The heron stood in the river and",
        "-n",
        "12",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return out, done.stdout


def test_moespac_trace_writes_the_format_of_the_routing_traces(trace_file: tuple[Path, str]) -> None:
    path, said = trace_file
    with np.load(path) as file:
        experts, weights, is_decode = file["experts"], file["weights"], file["is_decode"]
        assert int(file["n_expert"]) == 32
        assert experts.dtype == np.uint8 and experts.shape[1:] == (6, 4)
        assert weights.dtype == np.float32 and weights.shape == experts.shape
        assert is_decode.dtype == np.bool_ and is_decode.shape == experts.shape[:1]
        assert file["token"].shape == is_decode.shape
    n_prompt = int((~is_decode).sum())
    assert n_prompt >= 5 and not is_decode[:n_prompt].any() and is_decode[n_prompt:].all()
    assert 1 <= len(experts) - n_prompt <= 12
    assert f"{len(experts)} tokens, 6 layers, 32 experts" in said
    assert (experts < 32).all()
    assert all(len(set(choice)) == 4 for choice in experts.reshape(-1, 4).tolist())
    assert np.allclose(weights.sum(axis=2), 1, atol=1e-3)
    assert (np.diff(weights, axis=2) <= 0).all()  # in rank order


def test_moespac_trace_tells_what_a_plain_context_chooses(trace_file: tuple[Path, str]) -> None:
    from moespac_llamacpp.cli import TINY_MODEL

    with np.load(trace_file[0]) as file:
        tokens, experts = file["token"].tolist(), file["experts"]
    capture = Capture("ffn_moe_topk")
    with PackageModel(TINY_MODEL) as model:
        low = Attached.__new__(Attached)  # only a holder for make_context
        low.ptr, low.path, low.n_vocab = model.pointer, model.path, model.n_vocab  # type: ignore[attr-defined]
        with make_context(low, cb=capture, **EXACT) as ctx:  # type: ignore[arg-type]
            decode(ctx, tokens)
    plain = np.stack([capture.tensors[f"ffn_moe_topk-{il}"][0] for il in range(6)], axis=1)
    same = (np.sort(plain, axis=2) == np.sort(experts, axis=2)).all(axis=2)
    assert same.mean() > 0.95  # the rest is rounding: other widths, flash attention


def test_moespac_trace_names_a_folder_that_is_not_there(tmp_path: Path) -> None:
    out = tmp_path / "no" / "such.npz"
    command = [sys.executable, "-m", "moespac_llamacpp.cli", "trace", str(out), "x"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.strip() == f"moespac: {out.parent}: there is no such folder"
