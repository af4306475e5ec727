"""Whatever is wrong with what a user gives is one sentence: the file, what is wrong with it, what to do."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest

from commands import invoke
from moespac_llamacpp.header import InspectError, read_header, read_parts
from native_build import build_rpc, find_source, or_skip
from pair import DRAFT, TARGET
from parity import test_device

HERE = Path(__file__).parent


def sentence(*arguments: str) -> str:
    """What a command says that fails, having said nothing else."""
    done = invoke(*arguments)
    assert done.exit_code == 1 and done.stdout == "", done.output
    assert done.stderr.startswith("moespac: ") and done.stderr.count("\n") == 1, done.stderr
    return done.stderr.removeprefix("moespac: ").rstrip()


@pytest.fixture
def written(tmp_path: Path) -> Callable[[bytes], Path]:
    def write(data: bytes, name: str = "model.gguf") -> Path:
        (tmp_path / name).write_bytes(data)
        return tmp_path / name

    return write


# --- files that are no models ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "words"),
    [
        (b"", r"not a GGUF file (it is empty)"),
        (b"hello world", r"not a GGUF file (it starts with b'hell')"),
        (b"version https://git-lfs", "not a GGUF file (a Git LFS pointer, not the file itself: fetch it with `git lfs pull`)"),
        (b"<!DOCTYPE html>", "not a GGUF file (a web page that was saved in the model's place: download the file again)"),
        (b"ggjt\x01", "not a GGUF file (a GGML file from before GGUF: get the model as GGUF)"),
        (b"GGUF\x00\x00\x00\x03", "a big-endian GGUF file: convert it on this machine"),
        (b"GGUF\x63\x00\x00\x00", "GGUF version 99, but 2 and 3 are read: get the model anew"),
        (b"GGUF\x03\x00\x00\x00", "a damaged GGUF file: its header is longer than its 8 bytes: download it again"),
        (b"GGUF\x03\x00\x00\x00" + b"\xff" * 40, "a damaged GGUF file: a length of 18446744073709551615 at byte 8"),
    ],
)  # fmt: skip
def test_what_is_no_gguf_is_told_by_what_it_is(written: Callable[[bytes], Path], start: bytes, words: str) -> None:
    path = written(start)
    for command in (["generate", "x", "-m"], ["plan", "-m"], ["inspect", "-m"], ["doctor", "--no-measure", "-m"]):
        done = invoke(*command, str(path))
        assert done.exit_code == 1 and f"moespac: {path}: {words}" in done.stderr.splitlines()[-1], done.output


def test_a_truncated_file_is_told_with_the_byte(written: Callable[[bytes], Path]) -> None:
    whole = TARGET.read_bytes()
    path = written(whole[:-1])
    last = f"truncated at byte {len(whole) - 1} of {len(whole)}"
    assert sentence("generate", "x", "-m", path).startswith(f"{path}: a damaged GGUF file: {last} (")
    half = sentence("generate", "x", "-m", written(whole[: len(whole) // 2]))
    assert f"truncated at byte {len(whole) // 2} of {len(whole)}" in half and half.endswith("download it again")


def test_no_header_brings_the_reader_down(written: Callable[[bytes], Path]) -> None:
    """Any byte of the header may be wrong: it is read, or refused with the sentence."""
    whole = TARGET.read_bytes()[:60_000]
    n_refused = 0
    for at in range(4, 2000, 9):
        damaged = bytearray(whole)
        damaged[at] ^= 0xFF
        with pytest.raises(InspectError, match=r"model\.gguf: .*: (download it again|get the model anew|convert it)"):
            read_header(written(bytes(damaged)))
        n_refused += 1
    assert n_refused > 200


def test_files_that_cannot_be_read_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sentence("generate", "x", "-m", tmp_path / "none.gguf") == f"{tmp_path}/none.gguf: there is no such file"
    assert "cannot be read: Is a directory" in sentence("generate", "x", "-m", tmp_path)
    assert "neither a file nor a known model: there is no model 'qwen9'" in sentence("chat", "qwen9")

    def refuse(*_: Any, **__: Any) -> None:  # as root nothing is forbidden
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    assert (
        sentence("generate", "x") == f"{TARGET}: cannot be read: you have no permission (`chmod +r`, or ask its owner)"
    )


# --- models that do not do -------------------------------------------------------------------------------------------------


def test_a_dense_model_is_told_what_it_is_good_for() -> None:
    assert sentence("generate", "x", "-m", DRAFT) == (
        f"{DRAFT}: a dense model: it has no experts to place; as a draft give it with -md"
    )


def test_an_architecture_that_llama_cpp_does_not_know_is_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "new.gguf", "brandnew")
    writer.add_block_count(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    said = sentence("generate", "x", "-m", tmp_path / "new.gguf")
    assert re.fullmatch(
        rf"{re.escape(str(tmp_path))}/new\.gguf: the llama\.cpp in llama-cpp-python [\d.]+ does not know the architecture "
        "'brandnew': a newer release may",
        said,
    )


def test_a_draft_with_another_tokenizer_is_told_with_the_token(root: Path) -> None:
    from families import cached_model

    other = cached_model(root, "qwen3")
    assert re.match(
        rf"{re.escape(str(other))} cannot draft for .*{TARGET.name}: ", sentence("generate", "x", "-md", str(other))
    )


# --- split models ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The bundled model in three parts."""
    folder = tmp_path_factory.mktemp("split")
    reader = gguf.GGUFReader(TARGET)
    writer = gguf.GGUFWriter(folder / "m.gguf", "qwen3moe", split_max_tensors=len(reader.tensors) // 3 + 1)
    for field in reader.fields.values():
        if not field.name.startswith(("GGUF.", "general.architecture")):
            writer.add_key_value(field.name, field.contents(), field.types[0], field.types[-1])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    parts = sorted(folder.glob("*.gguf"))
    assert len(parts) == 3
    return parts


@pytest.fixture
def parts(split: list[Path], tmp_path: Path) -> list[Path]:
    """Links to them, to be renamed and removed."""
    return [Path(os.path.realpath(tmp_path)) / p.name for p in split if not (tmp_path / p.name).symlink_to(p)]


def test_a_split_model_runs_as_one(parts: list[Path]) -> None:
    # without moves, whose time would decide between tokens that are nearly as likely
    still = ["--draft", "none", "--policy", "static", "--no-hot-set"]
    prompt = ["generate", "The heron stood in", "-n", "12", "-t", "1", *still, "-m"]
    whole, split = (invoke(*prompt, str(path)) for path in (TARGET, parts[0]))
    assert split.exit_code == 0 and split.stdout == whole.stdout != "", split.stderr


def test_a_missing_part_is_named(parts: list[Path]) -> None:
    parts[1].unlink()
    said = sentence("generate", "x", "-m", parts[0])
    assert said == f"{parts[1]}: there is no such file, but it is part 2 of 3: download it too"


def test_another_part_than_the_first_names_the_first(parts: list[Path]) -> None:
    assert sentence("generate", "x", "-m", parts[2]) == f"{parts[2]}: part 3 of 3: give the first, {parts[0].name}"


def test_renamed_parts_are_told(parts: list[Path]) -> None:
    renamed = parts[0].rename(parts[0].with_name("mine.gguf"))
    assert "part 1 of 3, but its name does not end in -00001-of-00003.gguf: name all parts" in sentence(
        "generate", "x", "-m", renamed
    )
    renamed.rename(parts[0])
    parts[2].unlink()
    parts[2].symlink_to(parts[1].resolve())
    assert f"{parts[2]}: named as part 3 of 3, but it is another one: download it again" in sentence(
        "generate", "x", "-m", parts[0]
    )


def test_joined_parts_are_told(parts: list[Path], tmp_path: Path) -> None:
    joined = tmp_path / "joined-00001-of-00003.gguf"
    joined.write_bytes(b"".join(p.read_bytes() for p in parts))
    said = sentence("generate", "x", "-m", joined)
    assert said.startswith(f"{joined}: part 1 of 3 with ") and "parts that were joined into one file" in said


def test_parts_of_different_models_are_told(parts: list[Path], split: list[Path]) -> None:
    headers = read_parts(split[0])
    assert sum(len(h.tensors) for h in headers) == headers[0].number("split.tensors.count")
    from test_chat import write_part

    parts[1].unlink()
    write_part(parts[1], {"blk.0.attn_q.weight": (4, 4)}, 1, 3)
    assert f"{parts[0]}: its 3 parts have " in sentence("generate", "x", "-m", parts[0])


# --- options and sizes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--policy", "best"], "there is no policy 'best'; there are static, lru"),
        (["--device", "GPU7"], "there is no device 'GPU7'; there are "),
        (["--draft", "model", "-m", "{other}"], "--draft model needs a draft model: give one with -md"),
    ],
)
def test_what_an_option_cannot_be_is_one_sentence(parts: list[Path], arguments: list[str], words: str) -> None:
    assert words in sentence("generate", "--device", "CPU", "x", *(a.format(other=parts[0]) for a in arguments))


def test_a_context_that_the_memory_cannot_hold_is_told_with_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moespac_llamacpp.planner.host_memory", lambda: (1 << 29, 1 << 30))
    said = sentence("generate", "--device", "CPU", "x", "-c", "200192")
    assert re.match(
        r"[\d.]+ [GM]iB of host memory are needed \(KV of 200192 tokens 586\.50 MiB, buffers .*512\.00 MiB of 1\.00",
        said,
    )


@pytest.mark.parametrize(
    "arguments",
    [["-n", "0"], ["-c", "-1"], ["--temp", "-1"], ["--top-p", "2"], ["--min-p", "-0.1"], ["--draft", "guess"],
     ["--draft-max", "99"], ["-t", "0"], ["--top-k", "-1"]],
)  # fmt: skip
def test_values_out_of_range_are_told_with_the_range(arguments: list[str]) -> None:
    done = invoke("generate", "x", *arguments)
    said = re.sub(r"[│\s]+", " ", done.stderr)
    assert done.exit_code == 2 and "Invalid value for" in said and arguments[0] in said
    assert re.search(r"should be (less|greater) than|is not in the range|is not one of", said), said


def test_a_context_longer_than_trained_is_a_warning() -> None:
    done = invoke("generate", "The heron", "-c", "1024", "-n", "4", "-t", "1")
    assert done.exit_code == 0 and done.stdout.strip()
    assert "the context of 1024 tokens is longer than the 512 that the model was trained for" in done.stderr


def test_a_prompt_longer_than_the_context_is_told_with_both_lengths() -> None:
    said = sentence("generate", "heron " * 400, "-c", "256")
    assert re.search(r"the prompt has \d{3,} tokens, the context has room for 1 to 256", said)


# --- a device that is lost -------------------------------------------------------------------------------------------------

LOST = """
import os, signal, sys
from rpc_device import start_server
from moespac_llamacpp import cli, models, native
from moespac_llamacpp.commands import session
import rpc_device
servers = []
start = rpc_device.subprocess.Popen
rpc_device.subprocess.Popen = lambda *a, **k: servers.append(start(*a, **k)) or servers[-1]
decode, n = models.Context.decode, 0
def counted(self, *a, **k):
    global n
    n += 1
    if n == 8:
        servers[0].kill()
        servers[0].wait()
    return decode(self, *a, **k)
models.Context.decode = counted
with start_server(sys.argv.pop(1)) as pointer:
    session.find_device = lambda name: native.device_at(pointer)
    cli.main()
"""


def test_a_device_lost_in_the_middle_leaves_the_text_and_a_sentence() -> None:
    """The server of ggml's RPC device is killed while it computes: llama.cpp aborts the process, as it does for CUDA errors."""
    library = or_skip(build_rpc, or_skip(find_source))
    arguments = ["generate", "The heron stood in the", "-n", "40", "-t", "1", "--draft", "none", "--vram", "40M"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent)])}
    done = subprocess.run(
        [sys.executable, "-c", LOST, str(library), *arguments], env=env, capture_output=True, timeout=120
    )
    whole = invoke(*arguments[:-2], "--device", "CPU")  # which the server's device is
    said = done.stderr.decode()
    assert done.returncode == -signal.SIGABRT, said
    assert len(done.stdout) > 10 and whole.stdout_bytes.startswith(done.stdout), (done.stdout, whole.stdout)
    assert "moespac: llama.cpp gave up and ends the process (ggml-rpc.cpp:" in said
    assert "the text above is complete up to here; if a GPU was full" in said and "Traceback" not in said


GPU_FAILS = """
import ctypes, sys
from moespac_llamacpp import cli, models
# A kernel that writes to address 0: whatever this process asks of the GPU afterwards fails.
PTX = b".version 7.0\\n.target sm_70\\n.address_size 64\\n.visible .entry f() {.reg .u64 %a; .reg .u32 %b; mov.u64 %a, 0; " \\
      b"mov.u32 %b, 1; st.global.u32 [%a], %b; ret;}\\0"
cuda = ctypes.CDLL("libcuda.so.1")
def call(name, *a):
    assert getattr(cuda, name)(*a) == 0, name
def fail():
    context, module, kernel, p = (ctypes.c_void_p() for _ in range(4))
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
    call("cuCtxSetCurrent", context)
    call("cuModuleLoadData", ctypes.byref(module), PTX)
    call("cuModuleGetFunction", ctypes.byref(kernel), module, b"f")
    call("cuLaunchKernel", kernel, 1, 1, 1, 1, 1, 1, 0, p, p, p)
decode, n = models.Context.decode, 0
def counted(self, *a, **k):
    global n
    n += 1
    if n == 8:
        fail()
    return decode(self, *a, **k)
models.Context.decode = counted
cli.main()
"""


def test_a_gpu_that_fails_in_the_middle_leaves_the_text_and_a_sentence() -> None:
    """As above, by a CUDA error: on the GPU that MOESPAC_TEST_DEVICE names."""
    device = test_device()
    if not device.name.startswith("CUDA"):
        pytest.skip("MOESPAC_TEST_DEVICE names no CUDA device")
    arguments = ["generate", "The heron stood in the", "-n", "40", "-t", "1", "--draft", "none", "--policy", "static"]
    arguments += ["--device", device.name]
    done = subprocess.run([sys.executable, "-c", GPU_FAILS, *arguments], capture_output=True, timeout=120)
    whole = invoke(*arguments)
    said = done.stderr.decode()
    assert done.returncode == -signal.SIGABRT, said
    assert len(done.stdout) > 10 and whole.stdout_bytes.startswith(done.stdout), (done.stdout, whole.stdout)
    assert "moespac: llama.cpp gave up and ends the process (" in said and "Traceback" not in said
    assert "the text above is complete up to here" in said
