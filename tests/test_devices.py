"""The device lane uses only ggml's public backend API: it runs on devices with memory of their own that are not CUDA."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from families import cached_model
from moespac_llamacpp import native
from native_build import build_rpc, find_source, or_skip
from pair import DRAFT
from parity import Pair, pair
from rpc_device import start_server

TOKENS = [5, 17, 90, 33, 71, 8, 64, 102, 29]


def exercise(p: Pair) -> None:
    """Compare at all widths, move everything, compare again."""
    for share in (0.5, 1.0, 0.17):
        p.fill(share)
        n_hot = 0
        for n in (1, 4, 9):
            d = p.compare(TOKENS[:n])
            n_hot += d.n_hot
            assert d.op < 1e-3 and d.logits < 1e-2, (share, n, d)
        assert n_hot > 0, share


@pytest.mark.parametrize("family", ["qwen3moe", "gpt-oss", "gemma4"])
def test_experts_can_live_on_a_remote_device(tmp_path: Path, family: str) -> None:
    library = or_skip(build_rpc, or_skip(find_source))
    path = cached_model(tmp_path, family, expert_type="Q4_K", down_type="Q6_K")
    with start_server(library) as device, pair(path, family, native.device_at(device)) as p:
        exercise(p)


#: A GPU that llama.cpp would take by itself, and that ends the process when it is asked for anything: its server has gone.
DEAD_GPU = """
import ctypes, sys
from llama_cpp.llama_cpp import _lib as ggml
from rpc_device import start_server
from moespac_llamacpp import cli, native
with start_server(sys.argv.pop(1)) as pointer:
    gpu = native.device_at(pointer)
    sys.argv = [argument.replace("GPU", gpu.buffer_name) for argument in sys.argv]
ggml.ggml_backend_device_register(ctypes.c_void_p(pointer))
assert gpu.kind == "gpu" and native.default_device() == gpu
cli.main()
"""


def with_a_dead_gpu(*arguments: str) -> subprocess.CompletedProcess[str]:
    library = or_skip(build_rpc, or_skip(find_source))
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent)])
    env = os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}  # it is to be the only GPU
    command = [sys.executable, "-c", DEAD_GPU, str(library), *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)


def test_who_asks_for_the_cpu_uses_nothing_of_the_gpu() -> None:
    """Neither weights of target and draft, nor KV, nor buffers, nor operations of a long prompt."""
    text = ["generate", "The heron stood in the river and " * 12, "-n", "20", "-t", "1", "-md", str(DRAFT)]
    assert with_a_dead_gpu(*text).returncode != 0, "the GPU was not dead"
    cpu = ["--device", "CPU"]
    done = with_a_dead_gpu(*text, *cpu)
    assert done.returncode == 0 and len(done.stdout) > 20, done.stderr
    assert "own path" not in done.stderr and "20 tokens" in done.stderr
    done = with_a_dead_gpu("plan", *cpu, "--json")
    plan = json.loads(done.stdout)
    assert (
        plan["target"]["weights"] == plan["target"]["kv"] == plan["target"]["compute"] == plan["draft"]["weights"] == 0
    )
    assert plan["target"]["host_kv"] > 0


def test_tensors_are_sent_to_the_device_that_is_used_or_to_the_cpu() -> None:
    done = with_a_dead_gpu("generate", "The heron", "--device", "CPU", "-ot", "attn_.*=GPU")
    assert done.returncode == 1 and done.stdout == "" and done.stderr.count("\n") == 1
    assert "there is no buffer type 'RPC" in done.stderr and "for tensors; there are CPU" in done.stderr
