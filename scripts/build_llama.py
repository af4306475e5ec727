#!/usr/bin/env python3
"""Build llama-cpp-python with this project's patches and install it into the running Python's environment.

    python scripts/build_llama.py [--backend auto|cpu|cuda] [--venv DIR] [--stock] [--build-dir DIR]

The source distribution that patches/UPSTREAM pins is fetched by package name with your own pip settings (mirror,
proxy, cache), verified, unpacked and patched: each patch named in patches/series, then patches/overlay copied over
it. pip then builds and installs it as `VERSION+LOCAL`. Nothing happens when nothing changed.

Everything lives in the build directory (default `build/`, may be deleted at any time):

    download/           the verified source distribution (put the file there yourself to build without an index)
    pristine/           it, unpacked
    patched/source      the patched tree; patched/cmake-* the persistent CMake trees, one per set of flags
    stock/...           the same for `--stock`: upstream unpatched, built with the same flags, for parity tests
    logs/               one log per step and variant

Environment: CMAKE_ARGS reaches CMake exactly as llama-cpp-python's users know it, and so do CC, CXX, CFLAGS,
CXXFLAGS, CUDACXX and pip's own variables. ccache is used when it is on PATH.

Exit code 0: the wanted build is installed. 1: a step failed; one line says which, and where its log is.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import hashlib
import importlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent

#: Written into the installed package: which build this is. It leaves with the package, so it cannot outlive it.
BUILD_INFO = "llama_cpp/moespac_build.json"

#: Environment variables that change what the compiler makes.
COMPILER_VARIABLES = ("CC", "CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS", "CUDACXX", "CUDAFLAGS", "CMAKE_BUILD_TYPE")

#: Naming one of these in CMAKE_ARGS is a choice of device, on or off. BLAS and RPC only add to whatever is chosen.
DEVICE_BACKENDS = re.compile(r"GGML_(CUDA|HIP|MUSA|METAL|VULKAN|SYCL|OPENCL|CANN|WEBGPU|ZDNN|HEXAGON)\b")

#: Without a terminal, a long step reports this often (seconds).
REPORT_EVERY = 30.0


class BuildError(Exception):
    """A step failed. The text is one sentence that names the step, what failed and the log file if there is one."""

    def __init__(self, step: str, what: str, log: Path | None = None) -> None:
        super().__init__(f"step '{step}' failed: {what}" + (f" (log: {log})" if log else ""))


@contextlib.contextmanager
def step(name: str) -> Iterator[None]:
    """Turn the errors of file work (disk full, no permission, damaged archive) into one sentence naming the step."""
    try:
        yield
    except (OSError, tarfile.TarError, UnicodeDecodeError) as error:
        raise BuildError(name, str(error) or type(error).__name__) from error


def say(text: str) -> None:
    print(f"build_llama: {text}", flush=True)


# --- what to build -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Upstream:
    """The pinned source distribution, as written in patches/UPSTREAM."""

    package: str
    version: str
    sha256: str
    local: str

    @property
    def patched_version(self) -> str:
        return f"{self.version}+{self.local}"

    @property
    def stem(self) -> str:
        """Name of the archive without its ending, and of the one folder inside it."""
        return f"{self.package.replace('-', '_')}-{self.version}"

    def __str__(self) -> str:
        return f"{self.package} {self.version}"


def content_lines(path: Path) -> list[str]:
    """The lines of a small text file, without comments (`# ...`) and empty lines."""
    lines = (line.split("#", 1)[0].strip() for line in path.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line]


def read_upstream(path: Path) -> Upstream:
    with step("configuration"):
        pairs = (line.partition("=") for line in content_lines(path))
        values = {key.strip(): value.strip() for key, _, value in pairs}
    try:
        return Upstream(**values)
    except TypeError as error:
        raise BuildError("configuration", f"{path} needs exactly: package, version, sha256, local") from error


def read_series(patches_dir: Path) -> list[Path]:
    """The patches to apply, in order. Each must exist."""
    with step("configuration"):
        patches = [patches_dir / name for name in content_lines(patches_dir / "series")]
    for patch in patches:
        if not patch.is_file():
            raise BuildError("configuration", f"{patches_dir / 'series'} names {patch.name}, which does not exist")
    return patches


def overlay_files(patches_dir: Path) -> list[Path]:
    overlay = patches_dir / "overlay"
    return sorted(path for path in overlay.rglob("*") if path.is_file() and "__pycache__" not in path.parts)


@dataclass(frozen=True)
class Variant:
    """What is built: upstream with our patches, or upstream as it is (`stock`)."""

    name: str
    upstream: Upstream
    patches_dir: Path

    @property
    def is_stock(self) -> bool:
        return self.name == "stock"

    @property
    def version(self) -> str:
        return self.upstream.version if self.is_stock else self.upstream.patched_version

    def inputs(self) -> Iterator[tuple[str, bytes]]:
        """Name and content of every file that decides how the source tree looks."""
        yield "UPSTREAM", repr(self.upstream).encode()
        if self.is_stock:
            return
        for patch in read_series(self.patches_dir):
            yield f"patch {patch.name}", patch.read_bytes()
        for path in overlay_files(self.patches_dir):
            yield path.relative_to(self.patches_dir).as_posix(), path.read_bytes()


@dataclass(frozen=True)
class Layout:
    """Where things lie in the build directory. Both variants have the same relative paths, so ccache shares objects."""

    build_dir: Path
    variant: str

    @property
    def source(self) -> Path:
        return self.build_dir / self.variant / "source"

    def cmake(self, flags_key: str) -> Path:
        return self.build_dir / self.variant / f"cmake-{flags_key}"

    def log(self, name: str) -> Path:
        return self.build_dir / "logs" / f"{self.variant}-{name}.log"


# --- which backend -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Backend:
    """The chosen backend, the CMAKE_ARGS that ask for it, and why it was chosen."""

    name: str
    cmake_args: str
    reason: str
    nvcc: str | None = None


def find_nvcc(env: Mapping[str, str]) -> str | None:
    """The CUDA compiler: CUDACXX, then PATH, then CUDA_HOME and CUDA_PATH."""
    path = env.get("PATH")
    candidates = [env.get("CUDACXX", ""), "nvcc"]
    candidates += [str(Path(env[key], "bin", "nvcc")) for key in ("CUDA_HOME", "CUDA_PATH") if env.get(key)]
    return next((found for name in candidates if name and (found := shutil.which(name, path=path))), None)


def nvidia_device_found() -> bool:
    """Whether an NVIDIA driver reports a device, asked through nvidia-smi or else the driver library."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False)
        if listing.returncode == 0 and "GPU " in listing.stdout:
            return True
    with contextlib.suppress(OSError, AttributeError):
        cuda = ctypes.CDLL("libcuda.so.1")
        count = ctypes.c_int(0)
        return cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0
    return False


def choose_backend(
    requested: str,
    env: Mapping[str, str],
    compiler: Callable[[Mapping[str, str]], str | None] = find_nvcc,
    device: Callable[[], bool] = nvidia_device_found,
) -> Backend:
    """Choose CPU or CUDA. A device backend named in CMAKE_ARGS is the user's own choice and is never touched."""
    cmake_args = env.get("CMAKE_ARGS", "")
    named = DEVICE_BACKENDS.search(cmake_args)
    if named and requested != "auto":
        raise BuildError("configuration", f"--backend {requested} and {named[0]} in CMAKE_ARGS: give only one of them")
    if named:
        return Backend("as CMAKE_ARGS says", cmake_args, f"CMAKE_ARGS names {named[0]}")
    if requested == "cpu":
        return Backend("cpu", cmake_args, "asked for by --backend")
    nvcc = compiler(env)
    if requested == "cuda" and nvcc is None:
        raise BuildError("configuration", "--backend cuda, but no nvcc on PATH, in CUDACXX, CUDA_HOME or CUDA_PATH")
    if nvcc is None:
        return Backend("cpu", cmake_args, "no CUDA compiler found")
    if requested == "auto" and not device():
        return Backend("cpu", cmake_args, f"CUDA compiler {nvcc} found, but no NVIDIA driver with a device")
    reason = "asked for by --backend" if requested == "cuda" else f"CUDA compiler {nvcc} and an NVIDIA device found"
    return Backend("cuda", f"{cmake_args} -DGGML_CUDA=on".strip(), reason, nvcc)


# --- has anything changed ------------------------------------------------------------------------------------------


def digest(parts: Iterable[tuple[str, bytes]]) -> str:
    """One hash over named parts; the lengths keep neighbours apart."""
    total = hashlib.sha256()
    for name, data in parts:
        total.update(f"{name} {len(data)}\n".encode())
        total.update(data)
    return total.hexdigest()


def cpu_features() -> str:
    """What `-march=native` means here: objects made for another CPU must be reused neither by us nor by ccache."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith(("flags", "Features")):
                return line
    return f"{platform.machine()} {platform.processor()}"


def flags_key(backend: Backend, env: Mapping[str, str]) -> str:
    """Names the CMake tree: one for each set of flags, since CMake's cache keeps an option dropped from CMAKE_ARGS."""
    parts = {name: env.get(name, "") for name in COMPILER_VARIABLES}
    parts |= {"CMAKE_ARGS": backend.cmake_args, "cpu": cpu_features()}
    return digest((name, value.encode()) for name, value in parts.items())[:10]


def stamp_of(variant: Variant, backend: Backend, env: Mapping[str, str]) -> str:
    """Changes when anything that decides the result changes: sources, flags, interpreter, or this script."""
    with step("configuration"):
        parts = [
            ("script", Path(__file__).read_bytes()),
            ("variant", variant.name.encode()),
            ("flags", flags_key(backend, env).encode()),
            ("python", sys.version.encode()),
            *variant.inputs(),
        ]
    return digest(parts)


def installed_stamp(variant: Variant) -> str | None:
    """The stamp of the build in this environment, or None if it is not ours or not of the wanted version."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        found = metadata.distribution(variant.upstream.package)
        if found.version == variant.version:
            return stamp_in(site_of(found))
    return None


def site_of(found: metadata.Distribution) -> Path:
    """The folder that holds an installed distribution's packages."""
    return Path(str(found.locate_file("")))


def stamp_in(tree: Path) -> str | None:
    """The stamp in a source tree or an installed package, or None."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return str(json.loads((tree / BUILD_INFO).read_text(encoding="utf-8"))["stamp"])
    return None


# --- running commands ----------------------------------------------------------------------------------------------


class Progress:
    """One line that says that a long step is alive: rewritten on a terminal, else repeated every REPORT_EVERY s."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.start = time.monotonic()
        self.last = self.start
        self.terminal = sys.stdout.isatty()

    def elapsed(self) -> str:
        minutes, seconds = divmod(int(time.monotonic() - self.start), 60)
        return f"{minutes}:{seconds:02d}"

    def update(self, log: Path) -> None:
        now = time.monotonic()
        if now - self.last < (1.0 if self.terminal else REPORT_EVERY):
            return
        self.last = now
        text = f"{self.label} {self.elapsed()} {ninja_progress(log)}".rstrip()
        if self.terminal:
            print(f"\r\033[Kbuild_llama: {text}", end="", flush=True)
        else:
            say(text)

    def close(self) -> None:
        if self.terminal:
            print("\r\033[K", end="", flush=True)


def ninja_progress(log: Path) -> str:
    """The last `[n/m]` that ninja wrote into the log, or nothing."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 100_000))
        found = re.findall(rb"^\s*(\[\d+/\d+\])", file.read(), re.MULTILINE)
    return found[-1].decode() if found else ""


def first_error(log: Path) -> str:
    """The line of a log that most likely says what went wrong: the first error, else the last line."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if re.search(r"(?i)\berror\b ?(:|at\b|in\b)|\bNo module named\b", line):
            # CMake names the place on one line and says what is wrong on the next.
            return (f"{line} {following}" if line.startswith("CMake Error") else line)[:300]
    return lines[-1][:300] if lines else "no output"


def run(command: list[str], log: Path, label: str, env: Mapping[str, str], cwd: Path | None = None) -> bool:
    """Run a command with its output in `log`, showing progress. Its whole process group ends with us."""
    log.parent.mkdir(parents=True, exist_ok=True)
    progress = Progress(label)
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=env, cwd=cwd,
            start_new_session=True,
        )  # fmt: skip
        try:
            while process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=0.2)
                progress.update(log)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            process.wait()
            raise
        finally:
            progress.close()
    return process.returncode == 0


# --- the source tree -----------------------------------------------------------------------------------------------


def sha256_of(path: Path) -> str:
    total = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            total.update(block)
    return total.hexdigest()


def verify(archive: Path, upstream: Upstream) -> None:
    found = sha256_of(archive)
    if found != upstream.sha256:
        raise BuildError("verify", f"{archive} has sha256 {found}, but UPSTREAM pins {upstream.sha256} for {upstream}")


def fetch(upstream: Upstream, layout: Layout, env: Mapping[str, str]) -> Path:
    """The verified source distribution, downloaded by pip unless it is there already."""
    folder = layout.build_dir / "download"
    archive = folder / f"{upstream.stem}.tar.gz"
    if archive.is_file():
        verify(archive, upstream)
        return archive
    say(f"fetching {upstream}")
    folder.mkdir(parents=True, exist_ok=True)
    log = layout.log("download")
    with tempfile.TemporaryDirectory(dir=folder) as fresh:
        command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps"]
        command += ["--no-binary", upstream.package, "--dest", fresh, f"{upstream.package}=={upstream.version}"]
        downloaded = Path(fresh, archive.name)
        if not run(command, log, "downloading", env) or not downloaded.is_file():
            raise BuildError("download", f"pip could not fetch the source of {upstream}: {first_error(log)}", log)
        verify(downloaded, upstream)
        downloaded.replace(archive)
    return archive


def unpack(archive: Path, upstream: Upstream, build_dir: Path) -> Path:
    """The unpacked source as upstream made it. Nothing is ever built in it or written to it."""
    pristine = build_dir / "pristine" / f"{upstream.stem}-{upstream.sha256[:8]}"
    if pristine.is_dir():
        return pristine
    pristine.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=pristine.parent) as fresh, tarfile.open(archive) as tar:
        if hasattr(tarfile, "data_filter"):
            tar.extractall(fresh, filter="data")
        else:  # an early Python 3.10; the archive's sha256 is pinned
            tar.extractall(fresh)
        Path(fresh, upstream.stem).replace(pristine)
    return pristine


def outside_git(build_dir: Path, env: Mapping[str, str]) -> dict[str, str]:
    """An environment in which git does not see the repository around the build directory.

    Otherwise `git apply` skips files without a word, and ggml takes our HEAD for its own commit and is compiled anew
    after each of our commits.
    """
    pointing = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX")  # set inside a git hook
    hidden = {name: value for name, value in env.items() if name not in pointing}
    return hidden | {"GIT_CEILING_DIRECTORIES": str(build_dir)}


def apply_patch(patch: Path, tree: Path, upstream: Upstream, log: Path, env: Mapping[str, str]) -> None:
    """Apply one patch exactly: lines may have moved, but no context line may differ."""
    if shutil.which("git", path=env.get("PATH")):
        command = ["git", "-c", "core.autocrlf=false", "apply", "-p1", "--whitespace=nowarn", str(patch)]
    else:
        command = ["patch", "-p1", "--batch", "--forward", "--fuzz=0", "--no-backup-if-mismatch", "-i", str(patch)]
    try:
        applied = run(command, log, f"applying {patch.name}", env, cwd=tree)
    except FileNotFoundError as error:
        raise BuildError("patch", "neither git nor patch is installed") from error
    if not applied:
        raise BuildError("patch", f"{patch.name} does not apply to {upstream}: {first_error(log)}", log)


def set_version(tree: Path, upstream: Upstream) -> None:
    path = tree / "llama_cpp" / "__init__.py"
    old, new = (f'__version__ = "{version}"' for version in (upstream.version, upstream.patched_version))
    text = path.read_text(encoding="utf-8")
    if text.count(old) != 1:
        raise BuildError("version", f"llama_cpp/__init__.py of {upstream} does not have the line {old}")
    path.write_text(text.replace(old, new), encoding="utf-8")


def write_build_info(tree: Path, variant: Variant, backend: Backend, stamp: str) -> None:
    info = {
        "stamp": stamp,
        "version": variant.version,
        "variant": variant.name,
        "backend": backend.name,
        "cmake_args": backend.cmake_args,
    }
    (tree / BUILD_INFO).write_text(json.dumps(info, indent=2) + "\n", encoding="utf-8")


def sync_tree(wanted: Path, target: Path) -> list[str]:
    """Make `target` equal to `wanted`, writing only what differs; returns the names written or removed.

    Files that are equal keep their time, so that ninja rebuilds little. Written files get the present time, also
    when they go back to upstream's content: an older time would make ninja keep the object of the patched one.
    What upstream's CMake installed into llama_cpp/lib is removed, or the next wheel would pack it again.
    """
    files = {path.relative_to(wanted): path for path in wanted.rglob("*") if path.is_file()}
    changed = []
    for path in sorted(target.rglob("*"), reverse=True):  # what a folder holds comes before the folder
        name = path.relative_to(target)
        if path.is_dir() and not path.is_symlink():
            if not (wanted / name).is_dir():
                path.rmdir()
        elif name not in files:
            path.unlink()
            changed.append(name.as_posix())
    for name, path in sorted(files.items()):
        if not same_content(path, target / name):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target / name)
            changed.append(name.as_posix())
    return changed


def same_content(one: Path, other: Path) -> bool:
    return other.is_file() and one.stat().st_size == other.stat().st_size and one.read_bytes() == other.read_bytes()


def prepare_tree(
    pristine: Path, variant: Variant, backend: Backend, stamp: str, layout: Layout, env: Mapping[str, str]
) -> list[str]:
    """Bring `layout.source` up to date from the pristine source; returns the files that changed."""
    layout.source.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=layout.source.parent) as scratch:
        tree = Path(scratch, "source")
        # Upstream ships its .git: with it, ggml's idea of its commit would depend on the state of git's index.
        shutil.copytree(pristine, tree, ignore=shutil.ignore_patterns(".git"))
        if not variant.is_stock:
            hidden = outside_git(layout.build_dir, env)
            for patch in read_series(variant.patches_dir):
                apply_patch(patch, tree, variant.upstream, layout.log(f"patch-{patch.stem}"), hidden)
            overlay = variant.patches_dir / "overlay"
            for path in overlay_files(variant.patches_dir):
                place = tree / path.relative_to(overlay)
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, place)
            set_version(tree, variant.upstream)
        write_build_info(tree, variant, backend, stamp)
        return sync_tree(tree, layout.source)


# --- build and install ---------------------------------------------------------------------------------------------


def build_environment(backend: Backend, layout: Layout, env: Mapping[str, str]) -> dict[str, str]:
    """The caller's environment, with the backend's CMAKE_ARGS and, if it is installed, ccache."""
    result = outside_git(layout.build_dir, env)
    if backend.cmake_args:
        result["CMAKE_ARGS"] = backend.cmake_args
    if backend.nvcc:
        result.setdefault("CUDACXX", backend.nvcc)
    if shutil.which("ccache", path=env.get("PATH")):
        for language in ("C", "CXX", "CUDA"):
            result.setdefault(f"CMAKE_{language}_COMPILER_LAUNCHER", "ccache")
        cpu = layout.build_dir / "cpu-features.txt"
        cpu.write_text(cpu_features(), encoding="utf-8")
        result.setdefault("CCACHE_BASEDIR", str(layout.build_dir))
        result.setdefault("CCACHE_NOHASHDIR", "1")
        result.setdefault("CCACHE_EXTRAFILES", str(cpu))  # ccache takes -march=native literally
    return result


def skip_common(layout: Layout) -> str:
    """A CMake definition that leaves out llama.cpp's `common` library: 40 % of the compile time, and nothing installed uses it.

    llama-cpp-python forces the option on in the cache; a plain variable, set when its project begins, wins over that."""
    script = layout.build_dir / "without-common.cmake"
    text = "set(LLAMA_BUILD_COMMON OFF)\n"
    if not script.is_file() or script.read_text(encoding="utf-8") != text:
        script.write_text(text, encoding="utf-8")
    return f"cmake.define.CMAKE_PROJECT_llama_cpp_INCLUDE={script}"


def install(variant: Variant, backend: Backend, layout: Layout, env: Mapping[str, str]) -> None:
    """Let pip build the tree, in a CMake tree that persists, and install it here."""
    command = [sys.executable, "-m", "pip", "install", "-v", "--disable-pip-version-check"]
    command += [f"--config-settings=build-dir={layout.cmake(flags_key(backend, env))}"]
    if "CMAKE_PROJECT_llama_cpp_INCLUDE" not in backend.cmake_args:
        command += [f"--config-settings={skip_common(layout)}"]
    if "CMAKE_GENERATOR" not in env:
        command += ["--config-settings=ninja.make-fallback=false"]  # ninja then comes by pip if it is missing
    log = layout.log("install")
    say(f"building {variant.upstream.package} {variant.version}; log: {log}")
    if not run([*command, str(layout.source)], log, "building", build_environment(backend, layout, env)):
        raise BuildError(
            "install", f"pip install of {variant.upstream.package} {variant.version}: {first_error(log)}", log
        )


def check(variant: Variant, stamp: str, layout: Layout, env: Mapping[str, str]) -> None:
    """The environment holds the build that was just made, and its libraries load."""
    importlib.invalidate_caches()
    if installed_stamp(variant) != stamp:
        raise BuildError("check", f"pip ended well, but Python does not see {variant.version}", layout.log("install"))
    log = layout.log("check")
    if not run([sys.executable, "-c", "import llama_cpp"], log, "loading", env, cwd=layout.build_dir):
        (site_of(metadata.distribution(variant.upstream.package)) / BUILD_INFO).unlink()  # not "up to date" next time
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["no output"]
        raise BuildError("check", f"the installed {variant.version} does not load: {lines[-1]}", log)


@contextlib.contextmanager
def only_one(build_dir: Path) -> Iterator[None]:
    """Let one build at a time use the build directory; a second one waits."""
    import fcntl

    build_dir.mkdir(parents=True, exist_ok=True)
    with (build_dir / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another build uses this build directory; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def build(variant: Variant, backend: Backend, layout: Layout, env: Mapping[str, str]) -> None:
    """All steps, unless the environment has this very build already; the source tree is brought back if it is gone."""
    stamp = stamp_of(variant, backend, env)
    title = f"{variant.upstream.package} {variant.version}"
    installed = installed_stamp(variant) == stamp
    if installed and stamp_in(layout.source) == stamp:
        say(f"{title} ({backend.name}) is installed and up to date")
        return
    say(f"backend: {backend.name} ({backend.reason}); to override: --backend cpu|cuda, or CMAKE_ARGS")
    start = time.monotonic()
    with step("download"):
        archive = fetch(variant.upstream, layout, env)
    with step("unpack"):
        pristine = unpack(archive, variant.upstream, layout.build_dir)
    with step("patch"):
        changed = prepare_tree(pristine, variant, backend, stamp, layout, env)
        say(f"{layout.source}: {len(changed)} files changed")
    if installed:
        return
    with step("install"):
        install(variant, backend, layout, env)
        check(variant, stamp, layout, env)
    say(f"installed {title} ({backend.name}) in {time.monotonic() - start:.0f} s")


# --- command line --------------------------------------------------------------------------------------------------


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--backend", choices=("auto", "cpu", "cuda"), default="auto",
        help="auto takes CUDA when a CUDA compiler and a device are found; CMAKE_ARGS that name a backend win",
    )  # fmt: skip
    parser.add_argument("--stock", action="store_true", help="build upstream unpatched (use with --venv)")
    parser.add_argument("--venv", type=Path, metavar="DIR", help="install into this venv; it is made if missing")
    parser.add_argument("--build-dir", type=Path, metavar="DIR", default=ROOT / "build", help="default: build/")
    parser.add_argument("--patches", type=Path, metavar="DIR", default=ROOT / "patches", help="default: patches/")
    parser.add_argument("--print-source", action="store_true", help="print where the built source tree lies, and stop")
    return parser.parse_args(arguments)


def run_in_venv(options: argparse.Namespace) -> int:
    """Start this script again with the venv's own Python, so that `here` always means the running environment."""
    python = options.venv / "bin" / "python"
    if not python.exists():
        say(f"making the virtual environment {options.venv}")
        made = subprocess.run([sys.executable, "-m", "venv", str(options.venv)], check=False)
        if made.returncode != 0:
            raise BuildError("venv", f"python -m venv {options.venv} ended with {made.returncode}")
    command = [str(python), __file__, "--backend", options.backend, "--build-dir", str(options.build_dir)]
    command += ["--patches", str(options.patches)] + ["--stock"] * options.stock
    return subprocess.run(command, check=False).returncode


def print_source(layout: Layout) -> None:
    if not (layout.source / BUILD_INFO).is_file():
        raise BuildError("print-source", f"{layout.source} does not exist yet: run this script without --print-source")
    print(layout.source)


def terminated(*_: object) -> NoReturn:
    raise SystemExit(143)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    options.build_dir, options.patches = options.build_dir.resolve(), options.patches.resolve()
    layout = Layout(options.build_dir, "stock" if options.stock else "patched")
    env = dict(os.environ)
    try:
        if options.print_source:
            print_source(layout)
        elif options.venv and options.venv.resolve() != Path(sys.prefix).resolve():
            return run_in_venv(options)
        else:
            upstream = read_upstream(options.patches / "UPSTREAM")
            variant = Variant(layout.variant, upstream, options.patches)
            backend = choose_backend(options.backend, env)
            with only_one(options.build_dir):
                build(variant, backend, layout, env)
    except BuildError as error:
        print(f"build_llama: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("build_llama: interrupted; run it again to go on where it stopped", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, terminated)  # so that a started compiler ends with us
    sys.exit(main())
