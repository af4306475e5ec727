"""The memory plan says what is then allocated, spends no more than it may, and tells with numbers what does not fit."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import lowlevel
import parity
from moespac_llamacpp import Moespac, native
from moespac_llamacpp.commands.options import Execution, LoadOptions
from moespac_llamacpp.commands.session import session
from moespac_llamacpp.draft import DraftError
from moespac_llamacpp.footprint import weights
from moespac_llamacpp.header import read_header
from moespac_llamacpp.machine import host_memory
from moespac_llamacpp.models import Context, LoadError, Model, recorded_log
from moespac_llamacpp.plan import RESERVE, Block, Footprint, Place, PlanError, Wishes, make
from moespac_llamacpp.planner import PROMPTS, Pair, place_of, plan_pair
from moespac_llamacpp.profile import Profile
from native_build import build_rpc, find_source, or_skip
from pair import DRAFT, TARGET, target_context
from pair import Pair as LoadedPair
from rpc_device import start_server
from test_chat import moespac

MIB, GIB = 1 << 20, 1 << 30
GPU = Place("GPU0", "a GPU", 12 * GIB, 16 * GIB, True, True, 40 * GIB, 64 * GIB)
CPU = Place("CPU", "a CPU", 40 * GIB, 64 * GIB, False, False, 40 * GIB, 64 * GIB)
TARGET_SIZE = Footprint(
    8192, 40960, weights=GIB, kv=GIB, compute=GIB // 2, host_weights=GIB // 4, expert_bytes=16 * GIB
)
DRAFT_SIZE = Footprint(8192, 40960, weights=GIB, kv=GIB // 2, compute=GIB // 4, host_weights=GIB // 8)
#: of a GPU whose CPU is not so slow that cold experts decide
FAST = Profile("GPU", "a CPU", 8, cpu_read=50e9, link=20e9, pageable=5e9, device_read=500e9, measured="")
BLOCKS = [Block(128, 2 * MIB, True, il, 8) for il in range(48)]
#: of what a buffer is rounded up to, and llama.cpp's log down to
TOLERANCE = 0.02 * MIB
Q8_0 = 8  # enum ggml_type


# --- arithmetic ------------------------------------------------------------------------------------------------------------


def test_all_that_is_free_but_the_reserve_is_used() -> None:
    plan = make(GPU, TARGET_SIZE, BLOCKS, DRAFT_SIZE)
    room = 12 * GIB - RESERVE - TARGET_SIZE.device - DRAFT_SIZE.device
    assert plan.usable == 12 * GIB - RESERVE
    assert room - 2 * MIB < plan.slot_bytes <= room and plan.device_bytes <= plan.usable
    assert max(plan.slots) - min(plan.slots) <= 1


def test_vram_is_for_everything_and_the_other_wishes_for_experts() -> None:
    fixed = TARGET_SIZE.device + DRAFT_SIZE.device
    assert make(GPU, TARGET_SIZE, BLOCKS, DRAFT_SIZE, Wishes(vram=8 * GIB)).slot_bytes <= 8 * GIB - fixed
    assert make(GPU, TARGET_SIZE, BLOCKS, None, Wishes(expert_bytes=GIB)).slot_bytes == GIB // (2 * MIB) * 2 * MIB
    assert make(GPU, TARGET_SIZE, BLOCKS, None, Wishes(share=0.25)).slots == [32] * 48
    with pytest.raises(PlanError, match="--vram and --cache-share say the same thing in two ways: give one of them"):
        make(GPU, TARGET_SIZE, BLOCKS, None, Wishes(vram=GIB, share=0.1))


def test_where_every_expert_has_a_slot_prompts_need_no_memory_of_their_own() -> None:
    target = replace(TARGET_SIZE, lane=GIB, prompts=GIB - MIB)
    everything = 48 * 128 * 2 * MIB
    fits = replace(GPU, free=RESERVE + target.device - target.prompts + everything, total=64 * GIB)
    for place, wishes in ((fits, Wishes()), (replace(fits, free=fits.free - RESERVE), Wishes(share=1.0))):
        plan = make(place, target, BLOCKS, None, wishes)
        assert plan.slots == [128] * 48 and plan.target.lane == MIB
        assert plan.device_bytes == plan.usable
    less = make(replace(fits, free=fits.free - 1), target, BLOCKS)
    assert less.target.lane == GIB and less.slot_bytes <= everything - target.prompts


def test_without_a_gpu_a_quarter_has_slots() -> None:
    assert make(CPU, replace(TARGET_SIZE, weights=0, kv=0, compute=0), BLOCKS).slots == [32] * 48


@pytest.mark.parametrize(
    ("place", "draft", "wishes", "sentence"),
    [
        (GPU, None, Wishes(vram=14 * GIB), r"--vram 14\.00 GiB is more than the 12\.00 GiB of 16\.00 GiB that are free on GPU0"),
        (GPU, None, Wishes(vram=2 * GIB), r"needs 2\.50 GiB on the device .*KV of 8192 tokens 1\.00 GiB.*more than the 2\.00"),
        (GPU, DRAFT_SIZE, Wishes(vram=4 * GIB), r"the draft needs 1\.75 GiB .*the target leaves 1\.50 GiB .*-ngld 0"),
        (GPU, None, Wishes(share=1.0), r"12\.00 GiB of expert slots .* but 9\.50 GiB of 12\.00 GiB on GPU0 are left"),
        (replace(GPU, host_free=8 * GIB), None, Wishes(), r"16\.25 GiB of host memory are needed \(experts 16\.00 GiB\), "
         r"but 8\.00 GiB of 64\.00 GiB are available"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_told_with_its_numbers(
    place: Place, draft: Footprint | None, wishes: Wishes, sentence: str
) -> None:
    with pytest.raises(PlanError, match=sentence):
        make(place, TARGET_SIZE, BLOCKS, draft, wishes)


def test_experts_that_are_mapped_from_the_file_need_no_memory_of_their_own() -> None:
    poor = replace(GPU, pinned=False, host_free=GIB)
    assert make(poor, TARGET_SIZE, BLOCKS).n_slots > 0


def test_less_than_a_slot_per_layer_is_told_and_works() -> None:
    some = make(GPU, TARGET_SIZE, BLOCKS, None, Wishes(vram=TARGET_SIZE.device + 10 * 2 * MIB))
    assert sorted(some.slots) == [0] * 38 + [1] * 10
    assert some.notes == ["38 of 48 layers have no slot: the CPU computes all their experts"]
    none = make(GPU, TARGET_SIZE, BLOCKS, None, Wishes(vram=TARGET_SIZE.device))
    assert none.n_slots == 0 and none.notes == ["there is no room for expert slots: the CPU computes all experts"]
    for wishes in (Wishes(share=0.0), Wishes(expert_bytes=0)):
        asked = make(GPU, TARGET_SIZE, BLOCKS, None, wishes)
        assert asked.n_slots == 0 and asked.notes == []


def test_the_numbers_of_a_plan_add_up_for_people() -> None:
    text = make(GPU, TARGET_SIZE, BLOCKS, DRAFT_SIZE).describe().partition("\n")[2]
    *parts, total = (
        float(m[1]) * (GIB if m[2] == "GiB" else MIB)
        for m in re.finditer(r"^  .{34} +([\d.]+) ([GM]iB)", text.partition("in host memory")[0], re.MULTILINE)
    )
    assert len(parts) == 7 and abs(sum(parts) - total) < 0.03 * GIB


def test_a_containers_limit_counts_and_its_page_cache_does_not(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal:       64000 kB\nMemFree: 1 kB\nMemAvailable:   32000 kB\n")
    assert host_memory(tmp_path) == (32000 << 10, 64000 << 10)
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    for name, text in (("max", "20000000"), ("current", "9000000"), ("stat", "anon 5\ninactive_file 4000000\n")):
        (group / f"memory.{name}").write_text(text)
    assert host_memory(tmp_path) == (15_000_000, 20_000_000)
    (group / "memory.max").write_text("max\n")
    assert host_memory(tmp_path) == (32000 << 10, 64000 << 10)
    assert host_memory(tmp_path / "nothing") == (0, 0)


# --- against what is allocated ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("execution", "vram"), [("auto", 4), ("in-stream", 12), ("in-stream", 16)])
def test_the_slots_are_those_of_the_plan_and_take_what_it_says(execution: str, vram: int) -> None:
    """In-stream, prompts take memory beside the slots: the less, the fewer these are."""
    device = native.cpu_device()
    load = LoadOptions(
        TARGET,
        threads=1,
        device="CPU",
        vram=f"{vram}M",
        draft_model=DRAFT,
        draft_max=4,
        draft_fixed=True,
        execution=Execution(execution),
    )
    with session(load) as decoder:
        plan = plan_pair(Pair(TARGET, DRAFT, draft_max=4, execution=execution), device, Wishes(vram=vram * MIB))
        if execution == "in-stream":
            assert plan.prompt_share > 1
            assert 0 < plan.target.prompts <= 1.5 * PROMPTS * plan.slot_bytes, "pieces are of 32 rows at least"
        assert decoder.context.experts is not None
        rows = decoder.context.experts.rows()
        assert [row.n_slots for row in rows] == plan.slots and 0 < plan.n_slots < plan.n_experts
        assert decoder.context.n_ctx == plan.target.n_ctx == 512
        assert abs(decoder.context.experts.device_bytes() - plan.device_bytes) < TOLERANCE
        list(decoder.generate(decoder.context.model.tokenize("The heron"), 20))
        assert decoder.report.n_generated == 20


@pytest.mark.parametrize("wishes", [Wishes(share=0.1), Wishes(expert_bytes=MIB)], ids=["share", "bytes"])
def test_prompts_keep_their_memory_where_no_slot_would_gain_by_it(wishes: Wishes) -> None:
    plan = plan_pair(Pair(TARGET, execution="in-stream"), native.cpu_device(), wishes)
    assert plan.target.prompts > PROMPTS * plan.slot_bytes and plan.prompt_share == 0


def buffers(lines: list[str], name: str) -> int:
    """Bytes of all buffers of this name that llama.cpp's log tells of; compute buffers are reserved anew, the last counts."""
    sizes = {"model": 0.0, "KV": 0.0, "compute": 0.0}
    for line in lines:
        if found := re.search(rf"{re.escape(name)} (model|KV|compute) buffer size =\s*([\d.]+) MiB", line):
            sizes[found[1]] = float(found[2])
    return int(MIB * sum(sizes.values()))


@pytest.mark.parametrize("n_gpu_layers", [-1, 1, 0])
def test_a_device_with_memory_of_its_own_gets_what_the_plan_says(n_gpu_layers: int) -> None:
    """ggml's RPC device stands for a GPU: weights, KV and buffers of target and draft go there."""
    with start_server(or_skip(build_rpc, or_skip(find_source))) as pointer:
        device = native.device_at(pointer)
        place = replace(place_of(device), free=100 * MIB)
        plan = plan_pair(Pair(TARGET, DRAFT, n_gpu_layers, draft_max=4), device, Wishes(vram=30 * MIB), place)
        assert plan.draft is not None
        target, draft = plan.target, plan.draft
        with (
            recorded_log() as lines,
            Model(TARGET, experts_device=device) as model,
            Context(model, n_ctx=target.n_ctx, device=device) as context,
        ):
            taken = buffers(lines, device.buffer_name)
            assert abs(taken - target.weights - target.kv - target.compute) < 3 * TOLERANCE
            assert context.experts is not None
            assert context.experts.device_bytes() == target.lane
            for width in [*range(1, 6), *range(22, 33)]:  # verify batches of a draft of 4, and the widest short prompts
                context.clear()
                context.decode([5] * width)
            graphs = context.experts.device_bytes() - target.lane
            assert 0.8 * target.graphs < graphs <= target.graphs + 16 * TOLERANCE
            context.experts.set_slots(plan.slots)
            assert abs(context.experts.device_bytes() - target.lane - graphs - plan.slot_bytes) < TOLERANCE
        with (
            recorded_log() as lines,
            Model(DRAFT, experts_device=device, n_gpu_layers=n_gpu_layers) as model,
            Context(model, n_ctx=draft.n_ctx, attach=False),
        ):
            assert abs(buffers(lines, device.buffer_name) - draft.device + draft.graphs) < 3 * TOLERANCE
        assert 0 <= draft.graphs <= 2 * draft.compute and (draft.graphs > 0) == (n_gpu_layers != 0)
        assert plan.device_bytes <= 30 * MIB


def test_the_plan_follows_what_llama_cpp_is_told() -> None:
    """Types of the KV cache, batches, layers left to the CPU, tensors sent elsewhere."""
    with start_server(or_skip(build_rpc, or_skip(find_source))) as pointer:
        device = native.device_at(pointer)
        place = replace(place_of(device), free=100 * MIB)
        told: dict[str, dict[str, Any]] = {
            "plain": {},
            "q8_0": {"context": {"type_k": Q8_0, "type_v": Q8_0, "flash_attn_type": 1}},
            "small": {"n_batch": 64, "n_ubatch": 64},
            "layers": {"gpu_layers": 3},
            "elsewhere": {"overrides": [(r"blk\.[01]\.ffn_.*_exps", device.buffer_type)]},
        }
        plans = {
            name: plan_pair(Pair(TARGET, **options), device, Wishes(vram=60 * MIB), place)
            for name, options in told.items()
        }
        for name, options in told.items():
            target = plans[name].target
            model_options = {"n_gpu_layers": options.get("gpu_layers", -1), "overrides": options.get("overrides", ())}
            batches = {key: options[key] for key in ("n_batch", "n_ubatch") if key in options}
            with (
                recorded_log() as lines,
                Model(TARGET, experts_device=device, **model_options) as model,
                Context(model, n_ctx=512, device=device, params=options.get("context"), **batches),
            ):
                taken = buffers(lines, device.buffer_name)
            assert abs(taken - target.weights - target.kv - target.compute) < 3 * TOLERANCE, name
        plain = plans["plain"].target
        assert plans["q8_0"].target.kv < 0.6 * plain.kv and plans["small"].target.compute < 0.5 * plain.compute
        assert 0 < plans["layers"].target.kv < plain.kv and plans["layers"].target.host_kv > 0
        elsewhere = plans["elsewhere"]
        assert (
            elsewhere.target.expert_bytes < 0.7 * plain.expert_bytes
            and elsewhere.slots[:2] == [0, 0] < elsewhere.slots[2:4]
        )


def test_layers_that_predict_several_tokens_are_not_loaded_and_not_counted() -> None:
    """GLM-4.5 and others bring them along, with experts of their own."""
    header = read_header(TARGET)
    last = [tensor.n_bytes for tensor in header.tensors if tensor.name.startswith("blk.5.")]
    mtp = replace(header, values=header.values | {"qwen3moe.nextn_predict_layers": 1})
    for on_gpu in (False, True):
        assert sum(weights([header], -1, on_gpu)) - sum(weights([mtp], -1, on_gpu)) == sum(last) > 0


def test_a_context_that_nobody_asked_for_leaves_room_for_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moespac_llamacpp.planner.LEAST_CONTEXT", 256)
    small = replace(place_of(native.cpu_device()), free=RESERVE + 20 * MIB)
    assert plan_pair(Pair(TARGET), native.cpu_device(), place=small).target.n_ctx == 256
    plan = plan_pair(Pair(TARGET, n_ctx=512), native.cpu_device(), place=small)
    assert plan.target.n_ctx == 512 and not plan.notes


def test_a_context_that_llama_cpp_rounds_up_is_told() -> None:
    plan = plan_pair(Pair(TARGET, n_ctx=5), native.cpu_device())
    assert plan.target.n_ctx == 256
    assert plan.notes == ["the context has 256 tokens, not the 5 that were asked for: llama.cpp rounds it up"]


def test_loading_makes_whole_what_the_plan_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the CPU for a GPU, and rates of one: most of the budget for six layers, some of which become whole."""
    device = native.cpu_device()
    place = replace(place_of(device), gpu=True, free=GIB, total=GIB)
    monkeypatch.setattr("moespac_llamacpp.planner.place_of", lambda device: place)
    monkeypatch.setattr("moespac_llamacpp.engine.known", lambda device, environment, threads: FAST)
    budget = plan_pair(Pair(TARGET, n_ctx=256), device, Wishes(share=0.9)).slot_bytes
    plan = plan_pair(Pair(TARGET, n_ctx=256), device, Wishes(expert_bytes=budget), profile=FAST)
    assert 0 < plan.n_whole < 6 and plan.slot_bytes <= budget
    with Moespac(TARGET, device="CPU", draft="none", n_ctx=256, n_threads=1, expert_budget=budget) as llm:
        experts = llm.decoder.context.experts
        assert experts
        assert [row.n_slots for row in experts.rows()] == plan.slots
        assert [row.whole for row in experts.rows()] == [n == 32 for n in plan.slots]
        text = llm.generate("The heron stood in the river and", max_tokens=40)
        assert [row.whole for row in experts.rows()] == [n == 32 for n in plan.slots]
    with Moespac(TARGET, device="CPU", draft="none", n_ctx=256, n_threads=1, cache_share=0.25) as llm:
        assert llm.generate("The heron stood in the river and", max_tokens=40) == text


# --- the command -----------------------------------------------------------------------------------------------------------


def test_the_command_plan() -> None:
    there = ["--device", "CPU", "--vram", "4M"]  # a GPU needs more for the lane of its prompts
    done = moespac("plan", "-m", str(TARGET), "-md", str(DRAFT), *there, "--json")
    plan = json.loads(done.stdout)
    assert done.returncode == 0 and plan["device_bytes"] <= 4 * MIB and plan["n_slots"] == sum(plan["slots"]) > 0
    assert plan["target"]["expert_bytes"] > 20 * MIB and plan["draft"]["n_ctx"] == 512
    done = moespac("plan", "-md", str(DRAFT), *there)
    assert f"{plan['n_slots']} of 192 experts" in done.stdout and "all experts" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--vram", "9999G"], "--vram 9999.00 GiB is more than the "),
        (["--vram", "10K"], "needs 0.41 MiB on the device without a single expert"),
        (["--vram", "lots"], "'lots' is not a size"),
        (["--cache-share", "2"], "the cache share is 2.0, it must be from 0 to 1"),
        (["--vram", "1M", "--expert-budget", "1M"], "--vram and --expert-budget say the same thing in two ways"),
    ],
)
def test_too_much_fails_before_anything_is_loaded(arguments: list[str], sentence: str) -> None:
    done = moespac("generate", "--device", "CPU", "The heron", *arguments)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("moespac: ") and sentence in done.stderr and done.stderr.count("\n") == 1


def hollow(path: Path, n_expert: int = 128, n_ff: int = 768) -> Path:
    """A model of Qwen3-30B-A3B's shape, 17 GB, but with the bundled vocabulary, and with a hole in the file for the weights."""
    n_embd, source = 2048, gguf.GGUFReader(TARGET)
    own = {"block_count": 48, "embedding_length": n_embd, "context_length": 40960, "rope.dimension_count": 128,
           "attention.head_count": 32, "attention.head_count_kv": 4, "attention.key_length": 128,
           "attention.value_length": 128, "expert_count": n_expert, "expert_used_count": 8,
           "expert_feed_forward_length": n_ff}  # fmt: skip
    writer = gguf.GGUFWriter(path, "qwen3moe")
    for field in source.fields.values():
        if not field.name.startswith(("GGUF.", "general.architecture")):
            value = own.get(field.name.removeprefix("qwen3moe."), field.contents())
            writer.add_key_value(field.name, value, field.types[0], field.types[-1])
    per_layer = {"attn_norm": (n_embd,), "ffn_norm": (n_embd,), "attn_q_norm": (128,), "attn_k_norm": (128,),
                 "attn_q": (4096, n_embd), "attn_k": (512, n_embd), "attn_v": (512, n_embd), "attn_output": (n_embd, 4096),
                 "ffn_gate_inp": (n_expert, n_embd), "ffn_gate_exps": (n_expert, n_ff, n_embd),
                 "ffn_up_exps": (n_expert, n_ff, n_embd), "ffn_down_exps": (n_expert, n_embd, n_ff)}  # fmt: skip
    n_vocab = len(source.fields["tokenizer.ggml.tokens"].data)
    shapes = {"token_embd": (n_vocab, n_embd), "output": (n_vocab, n_embd), "output_norm": (n_embd,)}
    shapes |= {f"blk.{il}.{name}": shape for il in range(48) for name, shape in per_layer.items()}
    total = 0
    for name, shape in shapes.items():
        exact = len(shape) == 1 or "gate_inp" in name
        kind = gguf.GGMLQuantizationType.F32 if exact else gguf.GGMLQuantizationType.Q4_K
        stored = gguf.quant_shape_to_byte_shape(shape, kind)
        dtype, n_bytes = np.dtype(np.float32 if exact else np.uint8), int(np.prod(stored))
        writer.add_tensor_info(f"{name}.weight", shape if exact else stored, dtype, n_bytes, raw_dtype=kind)
        total += -(-n_bytes // 32) * 32
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    os.truncate(path, -(-path.stat().st_size // 32) * 32 + total)
    return path


def test_a_model_of_true_size_is_planned_without_reading_it(tmp_path: Path) -> None:
    """Which is why too much fails at once: its weights are a hole in the file, and nobody notices."""
    path = hollow(tmp_path / "large.gguf")
    assert path.stat().st_size > 15e9 and path.stat().st_blocks * 512 < 5e6
    plan = plan_pair(Pair(path, n_ctx=8192), native.cpu_device(), Wishes(share=0.25))
    assert plan.target.expert_bytes == 48 * 128 * 3 * 768 * 2048 // 256 * 144
    assert plan.slots == [32] * 48 and plan.target.host_kv == 8192 * 48 * 2 * 4 * 128 * 2
    with start_server(or_skip(build_rpc, or_skip(find_source))) as pointer:
        device = native.device_at(pointer)
        place = replace(place_of(device), free=8 * GIB, total=8 * GIB)
        small = plan_pair(Pair(path), device, None, place)
        assert small.target.n_ctx == 10240 and 0.3 < small.share < 0.4 and small.device_bytes <= 7 * GIB
        with pytest.raises(PlanError, match=r"needs 4\.4\d GiB on the device without .*KV of 40960 tokens 3\.75 GiB"):
            plan_pair(Pair(path, n_ctx=40960), device, Wishes(vram=4 * GIB), place)


def test_a_gpu_gets_what_the_plan_says() -> None:
    """On the GPU that MOESPAC_TEST_DEVICE names: the device's own reading, whose allocator rounds up and adds pools."""
    device = parity.test_device()
    if device.kind not in ("gpu", "igpu"):
        pytest.skip("MOESPAC_TEST_DEVICE names no GPU")
    load = LoadOptions(
        TARGET, threads=1, device=device.name, vram="40M", draft_model=DRAFT, draft_max=4, draft_fixed=True
    )
    with session(load) as warm:
        list(warm.generate(warm.context.model.tokenize("The heron"), 20))  # what CUDA takes once
    before, _ = device.memory
    with session(load) as decoder:
        plan = plan_pair(Pair(TARGET, DRAFT, draft_max=4), device, Wishes(vram=40 * MIB))
        list(decoder.generate(decoder.context.model.tokenize("The heron"), 20))
        taken = before - device.memory[0]
    print(f"planned {plan.device_bytes / MIB:.1f} MiB, taken {taken / MIB:.1f} MiB")
    assert taken < plan.device_bytes + RESERVE
    assert taken > plan.device_bytes - plan.target.graphs - 16 * MIB


def test_files_that_cannot_be_a_pair_are_told_before_loading(tmp_path: Path) -> None:
    from families import cached_model

    other = cached_model(tmp_path, "qwen3")  # another vocabulary, and no experts
    with pytest.raises(DraftError, match="cannot draft for"):
        plan_pair(Pair(TARGET, other), native.cpu_device())
    with pytest.raises(LoadError, match="a dense model: it has no experts to place"):
        plan_pair(Pair(DRAFT), native.cpu_device())


def test_recorded_logs_nest_and_leave_the_log_as_it_was(pair: LoadedPair) -> None:
    lowlevel.log_lines.clear()
    with recorded_log() as outer:
        with recorded_log() as inner, target_context(pair):
            pass
        with recorded_log() as empty:
            pass
    assert inner and outer == inner and empty == [] and not lowlevel.log_lines
    with target_context(pair):
        pass
    assert lowlevel.log_lines and outer == inner
