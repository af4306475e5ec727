"""scripts/build_llama.py, without compiling: a tiny source distribution stands in for upstream's."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import build_llama as bl

FILES = {
    "llama_cpp/__init__.py": 'from .llama import *\n\n__version__ = "9.9"\n',
    "vendor/llama.cpp/src/graph.cpp": "int one;\nint two;\nint three;\n",
    "vendor/llama.cpp/src/other.cpp": "int other;\n",
}
GIT_FILE = "vendor/llama.cpp/.git"
PATCH = """\
diff --git a/vendor/llama.cpp/src/graph.cpp b/vendor/llama.cpp/src/graph.cpp
--- a/vendor/llama.cpp/src/graph.cpp
+++ b/vendor/llama.cpp/src/graph.cpp
@@ -1,3 +1,4 @@
 int one;
+int hook;
 int two;
 int three;
"""
GRAPH = "vendor/llama.cpp/src/graph.cpp"
CPU = bl.Backend("cpu", "", "a test")


class Project:
    """A patches folder, a build folder with the tiny source distribution downloaded, and the steps on both."""

    def __init__(self, root: Path, patched: str = "patched") -> None:
        self.patches = root / "patches"
        self.layout = bl.Layout(root / "build", patched)
        archive = root / "build" / "download" / "llama_cpp_python-9.9.tar.gz"
        tree = root / "llama_cpp_python-9.9"
        for name, text in FILES.items():
            write(tree / name, text)
            os.utime(tree / name, (500, 500))
        write(tree / GIT_FILE, "gitdir: ../../.git/modules/vendor/llama.cpp\n")
        archive.parent.mkdir(parents=True)
        with tarfile.open(archive, "w:gz") as tar:
            tar.add(tree, tree.name)
        self.upstream = bl.Upstream("llama-cpp-python", "9.9", bl.sha256_of(archive), "moespac.1")
        write(self.patches / "series", "# a comment\n\n0001-hook.patch  # the call site\n")
        write(self.patches / "0001-hook.patch", PATCH)
        write(self.patches / "overlay/vendor/llama.cpp/src/moe.cpp", "int moe;\n")

    @property
    def variant(self) -> bl.Variant:
        return bl.Variant(self.layout.variant, self.upstream, self.patches)

    def stamp(self, backend: bl.Backend = CPU, **env: str) -> str:
        return bl.stamp_of(self.variant, backend, env)

    def prepare(self) -> list[str]:
        env = dict(os.environ)
        archive = bl.fetch(self.upstream, self.layout, env)
        pristine = bl.unpack(archive, self.upstream, self.layout.build_dir)
        return bl.prepare_tree(pristine, self.variant, CPU, self.stamp(), self.layout, env)

    def source(self, name: str) -> Path:
        return self.layout.source / name


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


# --- the pinned version and the series


def test_the_repository_pins_one_version_everywhere() -> None:
    upstream = bl.read_upstream(bl.ROOT / "patches" / "UPSTREAM")
    assert len(upstream.sha256) == 64
    assert f'"{upstream.package}=={upstream.version}"' in (bl.ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_upstream_file_that_lacks_a_key_is_named(tmp_path: Path) -> None:
    write(tmp_path / "UPSTREAM", "package = llama-cpp-python\nversion = 9.9\n")
    with pytest.raises(bl.BuildError, match=r"step 'configuration' failed: .*UPSTREAM needs exactly"):
        bl.read_upstream(tmp_path / "UPSTREAM")


def test_series_gives_patches_in_order_without_comments(project: Project) -> None:
    write(project.patches / "0002-more.patch", "")
    write(project.patches / "series", "# first\n0002-more.patch\n\n  0001-hook.patch # why\n#0003-off.patch\n")
    assert [path.name for path in bl.read_series(project.patches)] == ["0002-more.patch", "0001-hook.patch"]


def test_series_that_names_a_missing_patch_says_which(project: Project) -> None:
    write(project.patches / "series", "0007-lost.patch\n")
    with pytest.raises(bl.BuildError, match=r"series names 0007-lost\.patch, which does not exist"):
        bl.read_series(project.patches)


def test_missing_series_is_an_error_and_not_an_empty_one(project: Project) -> None:
    (project.patches / "series").unlink()
    with pytest.raises(bl.BuildError, match=r"step 'configuration' failed: .*series"):
        project.stamp()


# --- the source tree


@pytest.mark.parametrize("tool", ["git", "patch"])
def test_tree_has_patches_overlay_and_version(project: Project, tool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if tool == "patch":
        monkeypatch.setattr(bl.shutil, "which", lambda name, path=None: None)
    project.prepare()
    assert "int hook;" in project.source(GRAPH).read_text()
    assert project.source("vendor/llama.cpp/src/moe.cpp").read_text() == "int moe;\n"
    assert project.source("llama_cpp/__init__.py").read_text().endswith('__version__ = "9.9+moespac.1"\n')
    assert json.loads(project.source(bl.BUILD_INFO).read_text())["stamp"] == project.stamp()
    assert not project.source(GIT_FILE).exists()


def test_patches_apply_inside_another_git_repository(project: Project, tmp_path: Path) -> None:
    """There `git apply` skips every file without a word unless it is kept from seeing the repository."""
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    project.prepare()
    assert "int hook;" in project.source(GRAPH).read_text()


def test_stock_tree_is_upstream_as_it_is(tmp_path: Path) -> None:
    project = Project(tmp_path, "stock")
    project.prepare()
    for name, text in FILES.items():
        assert project.source(name).read_text() == text
    assert not project.source("vendor/llama.cpp/src/moe.cpp").exists()
    assert project.variant.version == "9.9"


def test_only_changed_files_are_rewritten(project: Project) -> None:
    project.prepare()
    for path in project.layout.source.rglob("*"):
        os.utime(path, (1000, 1000))
    assert project.prepare() == []
    write(project.patches / "overlay/vendor/llama.cpp/src/moe.cpp", "int moe = 2;\n")
    assert set(project.prepare()) == {"vendor/llama.cpp/src/moe.cpp", bl.BUILD_INFO}
    assert project.source(GRAPH).stat().st_mtime == 1000


def test_dropped_patch_and_overlay_file_leave_the_tree_with_a_new_time(project: Project) -> None:
    """Ninja compares times: a file that goes back to upstream's content must not get upstream's old time."""
    project.prepare()
    os.utime(project.source(GRAPH), (1000, 1000))
    write(project.patches / "series", "")
    (project.patches / "overlay/vendor/llama.cpp/src/moe.cpp").unlink()
    project.prepare()
    assert project.source(GRAPH).read_text() == FILES[GRAPH]
    assert project.source(GRAPH).stat().st_mtime > 1000
    assert not project.source("vendor/llama.cpp/src/moe.cpp").exists()


def test_libraries_of_an_earlier_build_are_not_packed_again(project: Project) -> None:
    project.prepare()
    write(project.source("llama_cpp/lib/libggml-cuda.so"), "stale")
    project.source("llama_cpp/lib/libggml-cuda.so.0").symlink_to("libggml-cuda.so")
    project.prepare()
    assert not project.source("llama_cpp/lib").exists()


# --- failures


@pytest.mark.parametrize("tool", ["git", "patch"])
def test_patch_that_does_not_apply_is_named(project: Project, tool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if tool == "patch":
        monkeypatch.setattr(bl.shutil, "which", lambda name, path=None: None)
    write(project.patches / "0001-hook.patch", PATCH.replace("int two", "int zwei"))
    with pytest.raises(bl.BuildError) as failure:
        project.prepare()
    text = str(failure.value)
    assert text.startswith("step 'patch' failed: 0001-hook.patch does not apply to llama-cpp-python 9.9: ")
    assert "\n" not in text
    log = project.layout.log("patch-0001-hook")
    assert f"(log: {log})" in text
    assert log.read_text()


def test_other_sha256_names_both_sums_and_the_file(project: Project) -> None:
    found = project.upstream.sha256
    project.upstream = dataclasses.replace(project.upstream, sha256="0" * 64)
    with pytest.raises(bl.BuildError, match=rf"step 'verify' failed: .*9\.9\.tar\.gz has sha256 {found}, .* 0{{64}}"):
        project.prepare()


def test_upstream_without_the_expected_version_line_is_an_error(project: Project) -> None:
    project.upstream = dataclasses.replace(project.upstream, local="moespac.1")
    write(project.patches / "overlay/llama_cpp/__init__.py", "nothing = 0\n")
    with pytest.raises(bl.BuildError, match=r"step 'version' failed: .*llama-cpp-python 9\.9"):
        project.prepare()


def test_command_line_ends_with_one_sentence_and_code_1(tmp_path: Path) -> None:
    write(tmp_path / "UPSTREAM", "version = 9.9\n")
    command = [sys.executable, bl.__file__, "--patches", str(tmp_path), "--build-dir", str(tmp_path / "build")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr.startswith("build_llama: step 'configuration' failed: ")
    assert len(ended.stderr.splitlines()) == 1


def test_failed_command_reports_the_first_error_of_its_log(tmp_path: Path) -> None:
    lines = ["[1/2] g++ -Werror=x a.cpp", "a.cpp:3:1: error: no such thing", "ERROR: Failed building wheel"]
    log = tmp_path / "x.log"
    script = f"print(*{lines}, sep=chr(10)); exit(1)"
    assert not bl.run([sys.executable, "-c", script], log, "x", dict(os.environ))
    assert bl.first_error(log) == "a.cpp:3:1: error: no such thing"
    assert bl.ninja_progress(log) == "[1/2]"
    write(log, "-- Configuring\nCMake Error at CMakeLists.txt:3 (project):\n  No CMAKE_CXX_COMPILER could be found.\n")
    assert bl.first_error(log).endswith("(project): No CMAKE_CXX_COMPILER could be found.")


# --- the stamp


def test_stamp_is_the_same_when_nothing_changed(project: Project) -> None:
    assert project.stamp(CMAKE_ARGS="-DX=1") == project.stamp(CMAKE_ARGS="-DX=1")
    before = project.stamp()
    write(project.patches / "README.md", "not an input\n")
    assert project.stamp() == before


def test_stamp_changes_with_everything_that_decides_the_build(project: Project) -> None:
    stamps = [project.stamp()]
    write(project.patches / "overlay/vendor/llama.cpp/src/moe.cpp", "int moe = 3;\n")
    stamps.append(project.stamp())
    write(project.patches / "overlay/vendor/llama.cpp/src/new.cpp", "")
    stamps.append(project.stamp())
    write(project.patches / "0001-hook.patch", PATCH.replace("hook", "crook"))
    stamps.append(project.stamp())
    write(project.patches / "series", "")
    stamps.append(project.stamp())
    stamps.append(project.stamp(CFLAGS="-O1"))
    stamps.append(project.stamp(dataclasses.replace(CPU, cmake_args="-DGGML_CUDA=on")))
    project.upstream = dataclasses.replace(project.upstream, local="moespac.2")
    stamps.append(project.stamp())
    assert len(set(stamps)) == len(stamps)


def test_stock_stamp_does_not_depend_on_the_patches(tmp_path: Path) -> None:
    project = Project(tmp_path, "stock")
    before = project.stamp()
    write(project.patches / "overlay/vendor/llama.cpp/src/moe.cpp", "int moe = 3;\n")
    assert project.stamp() == before


@pytest.mark.parametrize(
    ("version", "stamp", "expected"),
    [("9.9+moespac.1", "abc", "abc"), ("9.9", "abc", None), ("9.9+moespac.1", None, None)],
)
def test_installed_build_counts_only_with_its_version_and_stamp(
    project: Project, monkeypatch: pytest.MonkeyPatch, version: str, stamp: str | None, expected: str | None
) -> None:
    site = project.layout.build_dir
    write(site / "llama_cpp_python-9.9.dist-info/METADATA", f"Name: llama-cpp-python\nVersion: {version}\n")
    if stamp:
        write(site / bl.BUILD_INFO, json.dumps({"stamp": stamp}))
    monkeypatch.syspath_prepend(site)
    assert bl.installed_stamp(project.variant) == expected


def test_nothing_runs_when_the_build_is_installed(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    project.prepare()
    monkeypatch.setattr(bl, "installed_stamp", lambda variant: project.stamp())
    monkeypatch.setattr(bl, "fetch", lambda *_: pytest.fail("fetched again"))
    bl.build(project.variant, CPU, project.layout, {})


def test_deleted_build_directory_brings_back_the_source_but_compiles_nothing(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bl, "installed_stamp", lambda variant: project.stamp())
    monkeypatch.setattr(bl, "install", lambda *_: pytest.fail("installed again"))
    bl.build(project.variant, CPU, project.layout, {})
    assert "int hook;" in project.source(GRAPH).read_text()


def test_installed_build_that_does_not_load_is_not_up_to_date(
    project: Project, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    site = tmp_path / "site"
    write(site / "llama_cpp_python-9.9.dist-info/METADATA", "Name: llama-cpp-python\nVersion: 9.9+moespac.1\n")
    write(site / "llama_cpp/__init__.py", "raise OSError('libx.so: undefined symbol: moe')\n")
    write(site / bl.BUILD_INFO, json.dumps({"stamp": "abc"}))
    monkeypatch.syspath_prepend(site)
    assert bl.installed_stamp(project.variant) == "abc"
    with pytest.raises(
        bl.BuildError, match=r"step 'check' failed: .* does not load: OSError: libx\.so: undefined symbol"
    ):
        bl.check(project.variant, "abc", project.layout, dict(os.environ) | {"PYTHONPATH": str(site)})
    assert bl.installed_stamp(project.variant) is None


# --- the backend


def choose(requested: str = "auto", nvcc: str | None = None, device: bool = False, **env: str) -> bl.Backend:
    return bl.choose_backend(requested, env, compiler=lambda _: nvcc, device=lambda: device)


def test_cuda_needs_a_compiler_and_a_device() -> None:
    assert choose().name == "cpu"
    assert choose(device=True).name == "cpu"
    only_compiler = choose(nvcc="/x/nvcc")
    assert only_compiler.name == "cpu"
    assert "no NVIDIA driver" in only_compiler.reason
    both = choose(nvcc="/x/nvcc", device=True)
    assert (both.name, both.cmake_args, both.nvcc) == ("cuda", "-DGGML_CUDA=on", "/x/nvcc")


def test_backend_option_wins_over_what_is_found() -> None:
    assert choose("cpu", nvcc="/x/nvcc", device=True).cmake_args == ""
    assert choose("cuda", nvcc="/x/nvcc").cmake_args == "-DGGML_CUDA=on"
    with pytest.raises(bl.BuildError, match="no nvcc"):
        choose("cuda")


@pytest.mark.parametrize("given", ["-DGGML_VULKAN=1  -DX='a b'", "-DGGML_CUDA=off", "-DGGML_METAL:BOOL=ON"])
def test_cmake_args_that_name_a_device_backend_pass_untouched(given: str) -> None:
    assert choose(nvcc="/x/nvcc", device=True, CMAKE_ARGS=given).cmake_args == given
    with pytest.raises(bl.BuildError, match="give only one"):
        choose("cpu", CMAKE_ARGS=given)


def test_other_cmake_args_are_kept_as_they_are(project: Project) -> None:
    given = "-DGGML_RPC=on  -DGGML_CUDA_GRAPHS=off -DCMAKE_CXX_FLAGS='-g -O1'"
    assert choose(CMAKE_ARGS=given).cmake_args == given
    cuda = choose(nvcc="/x/nvcc", device=True, CMAKE_ARGS=given)
    assert cuda.cmake_args == f"{given} -DGGML_CUDA=on"
    env = bl.build_environment(cuda, project.layout, {"CMAKE_ARGS": given, "PATH": "", "PIP_NO_INDEX": "1"})
    assert env["CMAKE_ARGS"] == cuda.cmake_args
    assert env["PIP_NO_INDEX"] == "1"
    assert "CMAKE_ARGS" not in bl.build_environment(CPU, project.layout, {"PATH": ""})


def test_nvcc_is_found_on_path_and_through_cuda_home(tmp_path: Path) -> None:
    nvcc = tmp_path / "bin" / "nvcc"
    write(nvcc, "#!/bin/sh\n")
    nvcc.chmod(0o755)
    assert bl.find_nvcc({"PATH": str(nvcc.parent)}) == str(nvcc)
    assert bl.find_nvcc({"PATH": "", "CUDA_HOME": str(tmp_path)}) == str(nvcc)
    assert bl.find_nvcc({"PATH": "", "CUDACXX": str(nvcc)}) == str(nvcc)
    assert bl.find_nvcc({"PATH": ""}) is None


def test_ccache_is_used_only_when_present_and_never_over_the_users_own(project: Project, tmp_path: Path) -> None:
    assert "CMAKE_CXX_COMPILER_LAUNCHER" not in bl.build_environment(CPU, project.layout, {"PATH": ""})
    write(tmp_path / "bin/ccache", "#!/bin/sh\n")
    (tmp_path / "bin/ccache").chmod(0o755)
    mine = {"PATH": str(tmp_path / "bin"), "CMAKE_C_COMPILER_LAUNCHER": "sccache"}
    env = bl.build_environment(CPU, project.layout, mine)
    assert env["CMAKE_CXX_COMPILER_LAUNCHER"] == "ccache"
    assert env["CMAKE_C_COMPILER_LAUNCHER"] == "sccache"
    assert env["CCACHE_BASEDIR"] == str(project.layout.build_dir)


def test_each_set_of_flags_has_its_own_cmake_tree() -> None:
    """CMake's cache would keep GGML_CUDA after it was dropped from CMAKE_ARGS."""
    cuda = dataclasses.replace(CPU, cmake_args="-DGGML_CUDA=on")
    assert len({bl.flags_key(CPU, {}), bl.flags_key(cuda, {}), bl.flags_key(CPU, {"CXX": "clang++"})}) == 3
