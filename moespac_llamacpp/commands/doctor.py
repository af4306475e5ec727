"""moespac doctor: what this installation and this machine are, how fast they are, what is wrong and how to mend it."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from moespac_llamacpp import __version__, native
from moespac_llamacpp._build import LOCAL_VERSION, installed_version
from moespac_llamacpp.commands.models import resolve
from moespac_llamacpp.commands.shared import fail, find_device
from moespac_llamacpp.machine import cache_folder, host_memory, reason
from moespac_llamacpp.models import Context, LoadError, Model, capture_log
from moespac_llamacpp.profile import Profile, save
from moespac_llamacpp.rates import measure

#: Page-locked copies are at least so much faster than others, where pages were locked (two to four times is usual).
PAGEABLE_RATIO = 1.2
_GIB = 1 << 30

Problem = Callable[[str, str], None]


def doctor_command(
    model: Annotated[Path | None, typer.Option("--model", "-m", help="Also look at this GGUF file, or name.")] = None,
    device: Annotated[
        str | None, typer.Option("--device", help="The device to measure (default: where slots go).")
    ] = None,
    threads: Annotated[int | None, typer.Option("--threads", "-t", min=1, help="CPU threads (default: all).")] = None,
    measured: Annotated[bool, typer.Option("--measure/--no-measure", help="Measure the rates, and keep them.")] = True,
) -> None:
    """Versions, devices, rates; with a model, which of its layers run hybrid. Exit code 1 if something is wrong."""
    capture_log()
    problems: list[str] = []

    def problem(what: str, mend: str) -> None:
        problems.append(what)
        typer.echo(f"PROBLEM: {what}: {mend}")

    where = find_device(device)
    tell_versions(problem)
    tell_devices(where, problem)
    tell_memory(problem)
    if measured:
        tell_rates(where, threads or len(os.sched_getaffinity(0)), problem)
    if model is not None:
        tell_model(resolve(model).target, where)
    typer.echo(f"{len(problems)} problem{'s' * (len(problems) != 1)}" if problems else "all is well")
    raise typer.Exit(1 if problems else 0)


def tell_versions(problem: Problem) -> None:
    version = installed_version()
    typer.echo(f"moespac_llamacpp {__version__}, llama-cpp-python {version or 'built by hand'} (patched)")
    typer.echo(f"Python {platform.python_version()}, numpy {metadata.version('numpy')}, {platform.platform()}")
    if version and not version.partition("+")[2].startswith(LOCAL_VERSION):
        problem(
            f"llama-cpp-python {version} is not what scripts/build_llama.py installs, though its library is patched",
            "run `python scripts/build_llama.py` again",
        )
    kernels = native.kernel_isa()
    typer.echo(f"cold kernels: {kernels} (other weight types through ggml's own)")
    if kernels == "none" and platform.machine() == "x86_64":
        problem(
            "this processor has no AVX2", "expect slow experts on the CPU; there is no remedy but another processor"
        )


def tell_devices(where: native.Device, problem: Problem) -> None:
    found = native.devices()
    for device in found:
        free, total = device.memory
        locked = "page-locked host memory" if device.host_buffer_type else "no page-locked host memory"
        typer.echo(
            f"device {device.name} ({device.kind}): {device.description}, "
            f"{free / _GIB:.1f} of {total / _GIB:.1f} GiB free, {locked}"
        )
    typer.echo(f"slots go to {where.name}")
    gpus = [device for device in found if device.kind in ("gpu", "igpu")]
    if not gpus and shutil.which("nvidia-smi"):
        problem(
            "there is an NVIDIA driver, but this build has no GPU",
            'build it for CUDA: `CMAKE_ARGS="-DGGML_CUDA=on" python scripts/build_llama.py --backend cuda` (needs nvcc)',
        )
    for device in gpus:
        free, total = device.memory
        if total and free < total // 2:
            problem(
                f"{(total - free) / _GIB:.1f} GiB of {device.name} are taken by others", "`nvidia-smi` shows by whom"
            )


def tell_memory(problem: Problem) -> None:
    available, total = host_memory()
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft / (1 << 20):.0f} MiB"
    typer.echo(
        f"host memory: {available / _GIB:.1f} of {total / _GIB:.1f} GiB available; locked memory (ulimit -l): {limit}, "
        "which binds mlock, not the GPU driver's own page-locking"
    )
    if total and available < total // 4:
        problem("less than a quarter of the host memory is available", "close programs: experts need to stay in memory")


def tell_rates(where: native.Device, threads: int, problem: Problem) -> None:
    start = time.perf_counter()
    try:
        profile = measure(where, threads)
    except MemoryError as error:
        problem(f"the rates of {where.name} cannot be measured: {error}", "free memory on it, and run this again")
        return
    typer.echo(f"measured in {time.perf_counter() - start:.1f} s: {profile.describe()}")
    judge_rates(where, profile, problem)
    try:
        typer.echo(f"profile: {save(profile, cache_folder(os.environ))}")
    except OSError as error:
        problem(
            f"the profile cannot be kept: {reason(error)}",
            "mend the permissions, or set XDG_CACHE_HOME to another folder",
        )


def judge_rates(where: native.Device, profile: Profile, problem: Problem) -> None:
    """A page-locked copy that is no faster than a pageable one was not page-locked: upstream falls back without a word."""
    if where.host_buffer_type and profile.link < PAGEABLE_RATIO * profile.pageable:
        problem(
            f"page-locked memory is no faster than other memory ({profile.link / 1e9:.1f} and {profile.pageable / 1e9:.1f} GB/s)",
            "the driver may refuse to lock pages: see the memory that is free, a container's or WSL's limits, and "
            "GGML_CUDA_NO_PINNED, which must not be set",
        )


def tell_model(path: Path, where: native.Device) -> None:
    """Loads the model. typer.Exit if that fails."""
    try:
        start = time.perf_counter()
        with Model(path, experts_device=where) as target, Context(target, n_ctx=512, device=where) as context:
            assert context.experts is not None
            total, pinned = context.experts.host_bytes()
            typer.echo(
                f"{path.name}: {target.describe()}, loaded in {time.perf_counter() - start:.1f} s; experts "
                f"{total / _GIB:.2f} GiB in host memory, {pinned / _GIB:.2f} GiB of it page-locked"
            )
            for row in context.experts.rows():
                execution = "in-stream" if row.in_stream else f"portable ({row.portable})"
                how = (
                    f"hybrid, {execution}, kernels {row.kernel}"
                    if row.hybrid
                    else f"llama.cpp's own path: {row.fallback}"
                )
                typer.echo(
                    f"  layer {row.il}: {row.n_expert} experts of {row.expert_bytes / 2**20:.2f} MiB, "
                    f"{row.n_expert_used} used; {how}"
                )
    except (LoadError, native.MoeError) as error:
        raise fail(error) from error
