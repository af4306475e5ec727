"""What the doctor says of a machine, what it keeps, and what is expected of a plan by it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from moespac_llamacpp import native
from moespac_llamacpp.commands import doctor
from moespac_llamacpp.estimate import estimate, pace_of, seconds_of_step
from moespac_llamacpp.machine import cache_folder
from moespac_llamacpp.memory import slots_for_bytes, slots_for_time
from moespac_llamacpp.plan import Block, Footprint, Place, Wishes, make
from moespac_llamacpp.profile import Profile, known, load, path_of, save
from pair import TARGET
from test_errors import LOADED, REPO

GIB = 1 << 30
H200 = Profile(
    "CUDA0 H200", "Xeon", 16, cpu_read=100e9, link=46e9, pageable=12e9, device_read=4e12, measured="2026-11-29"
)


def run(*arguments: str, cache: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "moespac_llamacpp.cli", *arguments]
    env = os.environ | {"XDG_CACHE_HOME": cache}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)


def test_the_doctor_measures_keeps_and_the_plan_uses_it(tmp_path: Path) -> None:
    before = run("plan", "-m", str(TARGET), "--device", "CPU", cache=str(tmp_path))
    assert "expected: run `moespac doctor` once" in before.stdout
    done = run("doctor", "--device", "CPU", "-m", str(TARGET), cache=str(tmp_path))
    assert done.returncode in (0, 1) and "(patched)" in done.stdout and "ulimit -l" in done.stdout, done.stderr
    assert "layer 5: 32 experts" in done.stdout and "hybrid, portable (the CPU only emulates it)" in done.stdout
    (path,) = (tmp_path / "moespac").iterdir()
    kept = json.loads(path.read_text())
    assert kept["cpu_read"] > 1e8 and kept["device_read"] > 1e8 and kept["link"] == 0  # there is no link to the CPU
    after = run("plan", "-m", str(TARGET), "--device", "CPU", cache=str(tmp_path))
    assert "% of the routed experts resident" in after.stdout and "TPS without drafting" in after.stdout


def test_a_problem_is_told_with_its_remedy_and_in_the_exit_code() -> None:
    done = run("doctor", "--device", "CPU", "-t", "1", cache="/proc/none")
    assert done.returncode == 1
    assert (
        "PROBLEM: the profile cannot be kept" in done.stdout and "set XDG_CACHE_HOME to another folder" in done.stdout
    )
    assert done.stdout.splitlines()[-1].endswith(("1 problem", "problems"))


def said(check: object, *arguments: object) -> list[str]:
    problems: list[str] = []
    check(*arguments, lambda what, mend: problems.append(what))  # type: ignore[operator]
    return problems


def test_memory_that_was_not_page_locked_is_found() -> None:
    class Gpu:
        host_buffer_type = 1

    assert said(doctor.judge_rates, Gpu, H200) == []
    (problem,) = said(doctor.judge_rates, Gpu, replace(H200, link=12.5e9))
    assert problem == "page-locked memory is no faster than other memory (12.5 and 12.0 GB/s)"


def test_a_driver_without_a_build_for_it_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = native.devices()
    monkeypatch.setattr(native, "devices", lambda: [device for device in found if device.kind == "cpu"])
    assert said(doctor.tell_devices, native.cpu_device()) == ["there is an NVIDIA driver, but this build has no GPU"]


def test_a_library_of_unknown_origin_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "installed_version", lambda: "0.3.36")
    (problem,) = said(doctor.tell_versions)
    assert problem.startswith("llama-cpp-python 0.3.36 is not what scripts/build_llama.py installs")


def test_the_command_tells_of_an_unpatched_build_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "llama_cpp").mkdir()
    (tmp_path / "llama_cpp" / "__init__.py").write_text(LOADED.format(""))
    (tmp_path / "llama_cpp_python-0.3.36.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: llama-cpp-python\nVersion: 0.3.36\n"
    (tmp_path / "llama_cpp_python-0.3.36.dist-info" / "METADATA").write_text(metadata)
    command = tmp_path / "moespac"  # as pip writes it
    command.write_text("from moespac_llamacpp.cli import main\nmain()\n")
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(REPO)])}
    done = subprocess.run([sys.executable, command, "doctor"], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stdout == "" and done.stderr.count("\n") == 1
    assert done.stderr.startswith(
        "moespac: moespac_llamacpp needs its patched build of llama-cpp-python, but 0.3.36 is"
    )


# --- profile and estimate --------------------------------------------------------------------------------------------------


def test_a_profile_is_kept_by_device_and_a_broken_one_is_as_none(tmp_path: Path) -> None:
    assert load(tmp_path / "none", H200.device) is None
    path = save(H200, tmp_path / "new")
    assert path == path_of(tmp_path / "new", H200.device) and list(path.parent.iterdir()) == [path]
    assert load(path.parent, H200.device) == H200 and load(path.parent, "CUDA1 H200") is None
    whole = path.read_text()
    numbers = whole.replace("100000000000.0", "0"), whole.replace("4000000000000.0", '"x"')
    for text in ("", "{", "[]", "{}", *numbers):
        path.write_text(text)
        assert load(path.parent, H200.device) is None


def test_fewer_threads_are_expected_to_read_less_and_more_of_them_no_more(tmp_path: Path) -> None:
    home = {"XDG_CACHE_HOME": str(tmp_path)}
    save(H200, cache_folder(home))
    assert known(H200.device, home) == known(H200.device, home, 16) == known(H200.device, home, 99) == H200
    eight = known(H200.device, home, 8)
    assert eight and eight.threads == 8
    assert eight.cpu_read / H200.cpu_read == pytest.approx(84.3 / 139.3, abs=0.02)  # the grid's `bandwidths`


def test_the_cache_folder_follows_the_standard() -> None:
    assert cache_folder({"XDG_CACHE_HOME": "/x"}) == Path("/x/moespac")
    assert cache_folder({"XDG_CACHE_HOME": "relative"}) == cache_folder({}) == Path.home() / ".cache" / "moespac"


PLACE = Place("CUDA0", "H200", 100 * GIB, 140 * GIB, True, True, 100 * GIB, 128 * GIB)
BLOCKS = [Block(128, 2_700_000, True, il, 6) for il in range(48)]
QWEN = Footprint(4096, 40960, weights=900_000_000, host_weights=300_000_000, expert_bytes=48 * 128 * 2_700_000)


def test_the_estimate_is_near_what_was_measured() -> None:
    """docs/performance.md: 8.2 ms a token with a quarter of the experts (88 % hits there), 13.6 without slots."""
    quarter = estimate(make(PLACE, QWEN, BLOCKS, None, Wishes(share=0.25)), H200, in_stream=False)
    assert quarter.hits == pytest.approx((0.735, 0.792)) and quarter.describe().startswith("74 to 79 % of the ")
    assert replace(quarter, hits=(0.54, 0.54), tps=(8.04, 8.04)).describe().startswith("54 % of the routed experts res")
    assert 1 / 0.0082 * 0.85 < quarter.tps[0] <= quarter.tps[1] < 1 / 0.0082 * 1.15
    none = estimate(make(PLACE, QWEN, BLOCKS, None, Wishes(share=0.0)), H200, in_stream=False)
    assert none.hits == (0, 0) and none.tps[0] == none.tps[1] and 1 / 0.0136 * 0.85 < none.tps[0] < 1 / 0.0136 * 1.15
    assert none.describe().startswith("no hits, ")


def test_the_estimate_in_stream_is_near_what_was_measured() -> None:
    """docs/performance.md, another session than the estimate was made from: 129 TPS with a quarter of the experts (77 % hits
    there), 8 experts a token, 16 threads that read 129 GB/s; and 260 with all of them, of the grid."""
    blocks = [Block(128, 2_857_000, True, il, 8) for il in range(48)]
    for share, hit, tps in ((0.25, 0.77, 129.1), (1.0, 1.0, 260.2)):
        plan = make(PLACE, QWEN, blocks, None, Wishes(share=share))
        seconds = seconds_of_step(plan, replace(H200, cpu_read=129e9, link=48.4e9), hit, in_stream=True)
        assert 0.8 * tps < 1 / seconds < 1.2 * tps


def test_more_slots_are_never_expected_to_be_slower() -> None:
    speeds = [
        estimate(make(PLACE, QWEN, BLOCKS, None, Wishes(share=s / 20)), H200, in_stream=True).tps for s in range(21)
    ]
    # but for the last few experts, which the idle CPU could have taken
    assert all(a[0] <= 1.01 * b[0] and a[1] <= 1.01 * b[1] for a, b in pairwise(speeds))
    few = [replace(block, n_expert=32) for block in BLOCKS]
    assert estimate(make(PLACE, QWEN, few, None, Wishes(share=0.25)), H200, in_stream=True).hits[0] == pytest.approx(
        0.54
    )


# --- layers that are whole -------------------------------------------------------------------------------------------------

EIGHT = [Block(128, 2_857_000, True, il, 8) for il in range(48)]
LAPTOP = replace(H200, cpu_read=40e9, device_read=400e9)


@pytest.mark.parametrize("in_stream", [True, False], ids=["in-stream", "portable"])
@pytest.mark.parametrize("profile", [H200, LAPTOP], ids=["H200", "laptop"])
def test_whole_layers_are_never_expected_to_be_slower(profile: Profile, in_stream: bool) -> None:
    """By neither guess of the hits; and all that is there for slots is used."""
    pace, total = pace_of(EIGHT, profile, in_stream=in_stream), sum(b.n_expert * b.expert_bytes for b in EIGHT)
    seconds, n_whole = [], []
    for percent in range(0, 101, 5):
        budget = percent * total // 100
        slots, even = slots_for_time(EIGHT, budget, pace), slots_for_bytes(EIGHT, budget)
        assert sum(slots) == sum(even) and sum(slots) * EIGHT[0].expert_bytes <= budget
        assert all(a <= b for a, b in zip(pace(slots), pace(even), strict=True))
        others = [n for n in slots if n < 128]
        assert not others or max(others) - min(others) <= 1
        seconds.append(sum(pace(slots)))
        n_whole.append(slots.count(128))
    assert all(a >= b for a, b in pairwise(seconds)), "more bytes are not expected to be slower"
    scarce = 11 if in_stream else 6  # up to 50 %, 25 %: two waits for the device weigh more than a cold expert
    assert n_whole[:scarce] == [0] * scarce, "where experts are scarce they are shared out"
    assert n_whole[19] > 40 and n_whole[20] == 48


def test_whole_layers_save_what_was_measured() -> None:
    """docs/performance.md, everything resident: 0.87 of llama.cpp before layers could be whole, 0.99 since."""
    plan = make(PLACE, QWEN, EIGHT, None, Wishes(share=1.0))
    assert plan.n_whole == 48
    not_whole = replace(plan, slots=[127] * 48)
    whole, others = (seconds_of_step(p, H200, 1.0, in_stream=True) for p in (plan, not_whole))
    assert whole / others == pytest.approx(0.87 / 0.99, abs=0.03)


def test_the_plan_has_whole_layers_where_that_is_expected_to_be_faster() -> None:
    pace = pace_of(EIGHT, H200, in_stream=True)
    total = sum(b.n_expert * b.expert_bytes for b in EIGHT)
    plan = make(PLACE, QWEN, EIGHT, None, Wishes(expert_bytes=total * 9 // 10), pace)
    assert 30 < plan.n_whole < 48 and plan.record()["n_whole"] == plan.n_whole
    assert f"{plan.n_whole} of 48 layers whole, 66 to 67 in each of {48 - plan.n_whole} others" in plan.describe()
    for wishes in (Wishes(expert_bytes=total // 4), Wishes(share=0.9)):  # too few; or each layer's share was asked for
        assert make(PLACE, QWEN, EIGHT, None, wishes, pace) == make(PLACE, QWEN, EIGHT, None, wishes)
    everything = make(PLACE, QWEN, EIGHT, None, Wishes(), pace)
    assert everything.n_whole == 48 and "100 %), 48 of 48 layers whole\n" in everything.describe()
