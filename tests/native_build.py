"""Compiles the native test pieces on demand, against the llama.cpp that the tests run on.

Three targets: ``libmoe_test_device.so`` (:func:`build_test_device`), ``test_moe_kernels``
(:func:`build_kernel_test`), ``libmoe_rpc.so`` (:func:`build_rpc`). Each takes ``source``, the unpacked tree of
the patched source distribution (headers), and links the libraries installed in ``llama_cpp/lib`` of the running
interpreter, with an rpath there. Results are cached by a hash of everything that goes in: compiler, flags,
sources, headers and the library directory.

No compiler, no source tree, or no llama_cpp raises :class:`Unavailable` with one sentence; :func:`or_skip` turns
it into a pytest skip, or a failure where ``MOESPAC_REQUIRE_NATIVE`` is set (as in CI). Code that does not compile
raises :class:`BuildError` with the compiler's output.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TypeVar

HERE = Path(__file__).resolve().parent
REPO = HERE.parent
NATIVE = HERE / "native"
BUILD = REPO / "build" / "native-tests"
FLAGS = ("-std=c++17", "-O2", "-g1", "-fPIC", "-Wall", "-Wextra", "-pthread")
COMPILE_SECONDS = 600  # ggml-rpc.cpp takes some 20 s; the bound is for a stuck compiler

T = TypeVar("T")


class Unavailable(RuntimeError):
    """This machine lacks something that the native tests need; the message names it."""


class BuildError(RuntimeError):
    """The compiler refused; the message holds its output."""


def or_skip(build: Callable[..., T], *args: object, **kwargs: object) -> T:
    """``build(*args, **kwargs)``, where :class:`Unavailable` skips the test (fails it if MOESPAC_REQUIRE_NATIVE)."""
    import pytest

    try:
        return build(*args, **kwargs)
    except Unavailable as error:
        if os.environ.get("MOESPAC_REQUIRE_NATIVE"):
            pytest.fail(str(error), pytrace=False)
        pytest.skip(str(error))


def find_compiler() -> list[str]:
    """Command of the C++ compiler: ``$CXX`` (may hold arguments), else c++, g++ or clang++."""
    if os.environ.get("CXX"):
        command = shlex.split(os.environ["CXX"])
        if shutil.which(command[0]):
            return command
        raise Unavailable(f"native tests need a C++17 compiler, and CXX={os.environ['CXX']!r} is not on PATH")
    for name in ("c++", "g++", "clang++"):
        if path := shutil.which(name):
            return [path]
    raise Unavailable("native tests need a C++17 compiler (set CXX, or install g++ or clang++)")


def find_source() -> Path:
    """Unpacked source tree: ``$MOESPAC_SOURCE``, else what ``scripts/build_llama.py --print-source`` says."""
    if os.environ.get("MOESPAC_SOURCE"):
        return check_source(Path(os.environ["MOESPAC_SOURCE"]))
    script = REPO / "scripts" / "build_llama.py"
    if not script.exists():
        raise Unavailable("native tests need the llama.cpp source tree (set MOESPAC_SOURCE)")
    done = subprocess.run([sys.executable, str(script), "--print-source"], capture_output=True, text=True, timeout=600)
    lines = done.stdout.split("\n")
    path = next((line.strip() for line in reversed(lines) if line.strip()), "")
    if done.returncode != 0 or not path:
        raise Unavailable(f"native tests need the llama.cpp source tree: {done.stderr.strip() or 'no path printed'}")
    return check_source(Path(path))


def check_source(source: Path) -> Path:
    if not (llama_of(source) / "ggml" / "src" / "ggml-backend-impl.h").exists():
        raise Unavailable(f"native tests need the llama.cpp source tree, and {source} is not one")
    return source


def llama_of(source: Path) -> Path:
    """llama.cpp inside a tree of llama-cpp-python; a bare llama.cpp tree is taken too."""
    nested = source / "vendor" / "llama.cpp"
    return nested if nested.exists() else source


def find_libraries() -> Path:
    """Directory of libllama and libggml of the running interpreter's llama_cpp (which is not imported)."""
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        raise Unavailable("native tests need llama_cpp installed in this interpreter")
    lib = Path(spec.origin).resolve().parent / "lib"
    if not any(lib.glob("libggml-base*")):
        raise Unavailable(f"native tests need shared libraries of ggml, and {lib} has none (static build?)")
    return lib


def build_test_device(source: Path, build_dir: Path = BUILD) -> Path:
    """libmoe_test_device.so; its functions are at the end of native/test_device.cpp."""
    return _build(source, build_dir, _shared("libmoe_test_device"), [NATIVE / "test_device.cpp"])


def build_kernel_test(source: Path, build_dir: Path = BUILD) -> Path:
    """Executable of native/test_moe_kernels.cpp and the tree's src/moe-kernels.cpp."""
    kernels = llama_of(source) / "src" / "moe-kernels.cpp"
    if not kernels.exists():
        raise Unavailable(f"test of the cold kernels needs the patched source tree, and {kernels} is missing")
    # -O3 as libllama has it, and no -march: the kernels choose their instruction set at run time.
    files = [NATIVE / "test_moe_kernels.cpp", kernels]
    return _build(source, build_dir, "test_moe_kernels", files, flags=("-O3",), ggml_only=False)


def build_pool_test(source: Path, sanitize: bool, build_dir: Path = BUILD) -> Path:
    """Executable of native/test_moe_pool.cpp and the tree's src/moe-pool.cpp; sanitize: it finds data races."""
    src = llama_of(source) / "src"
    files = [NATIVE / "test_moe_pool.cpp", src / "moe-pool.cpp", src / "moe-barrier.cpp"]
    if not files[1].exists():
        raise Unavailable(f"test of the pool needs the patched source tree, and {files[1]} is missing")
    flags = ("-O1", "-g", "-pthread", *(("-fsanitize=thread",) if sanitize else ()))
    return _build(source, build_dir, "test_moe_pool" + "_tsan" * sanitize, files, flags=flags)


def build_rpc(source: Path, build_dir: Path = BUILD) -> Path:
    """ggml's RPC backend as a library of its own: upstream installs have it only if built with GGML_RPC."""
    rpc = llama_of(source) / "ggml" / "src" / "ggml-rpc"
    flags = ("-DGGML_BACKEND_SHARED", "-DGGML_BACKEND_BUILD", "-w")  # upstream's warnings are not ours
    return _build(source, build_dir, _shared("libmoe_rpc"), [rpc / "ggml-rpc.cpp", rpc / "transport.cpp"], flags=flags)


def _shared(stem: str) -> str:
    return stem + (".dylib" if platform.system() == "Darwin" else ".so")


def _build(
    source: Path,
    build_dir: Path,
    name: str,
    files: Sequence[Path],
    flags: Sequence[str] = (),
    ggml_only: bool = True,
) -> Path:
    """Compiled ``name`` from ``files``, from the cache where nothing changed."""
    compiler, llama, lib = find_compiler(), llama_of(source), find_libraries()
    headers = [llama / "ggml" / "include", llama / "ggml" / "src", llama / "include", llama / "src"]
    command = [*compiler, *FLAGS, *flags, *(f"-I{directory}" for directory in headers), *map(str, files)]
    if "." in name:
        command += ["-shared", "-fvisibility=hidden"]
    if platform.system() == "Linux":
        command += ["-Wl,--no-as-needed"]  # tests look up ggml's functions through these libraries
    command += [*_libraries(lib, ggml_only), f"-Wl,-rpath,{lib}"]

    key = hashlib.sha256()
    for part in (_version(tuple(compiler)), *command, _headers_hash(tuple(headers))):
        key.update(part.encode() + b"\0")
    for file in files:
        key.update(file.read_bytes())
    target = build_dir / key.hexdigest()[:16] / name
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        # Rename at the end: parallel test processes may build the same target, and one may be killed.
        partial = target.with_name(f"{name}.{os.getpid()}")
        _run([*command, "-o", str(partial)], name)
        partial.replace(target)
    return target


def _run(command: Sequence[str], name: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS)
    if done.returncode != 0:
        raise BuildError(f"{name} does not build:\n{shlex.join(command)}\n{done.stderr[-8000:]}")


def _libraries(lib: Path, ggml_only: bool) -> list[str]:
    """Paths to link; the result then asks for their sonames (libggml.so.0), as libllama itself does.

    A wheel holds copies, not links: libggml.so and libggml.so.0 are two libraries to the loader. llama_cpp loads
    libllama.so by path, so a *shared* library of ours must not need libllama.so.0: it would get a second one.
    """
    stems = ["libggml-base", "libggml"] + ([] if ggml_only else ["libggml-cpu", "libllama"])
    found = []
    for stem in stems:
        names = [path for pattern in (".so", ".so.*", ".dylib") for path in sorted(lib.glob(stem + pattern))]
        if not names:
            raise Unavailable(f"native tests need {stem} as a shared library in {lib}")
        found.append(str(names[0]))
    return found


@cache
def _version(compiler: tuple[str, ...]) -> str:
    return subprocess.run([*compiler, "--version"], capture_output=True, text=True, timeout=60).stdout


@cache
def _headers_hash(directories: tuple[Path, ...]) -> str:
    digest = hashlib.sha256()
    for directory in directories:
        for path in sorted(directory.glob("*.h")):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


if __name__ == "__main__":  # prints the paths of what can be built; handy in a shell
    tree = find_source()
    for make in (build_test_device, build_rpc, build_kernel_test):
        try:
            print(make(tree))
        except Unavailable as why:
            print(f"{make.__name__}: {why}")
