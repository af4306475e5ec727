"""The cold lane's products against ggml's own, at every instruction set that this CPU has."""

from __future__ import annotations

import subprocess

from native_build import build_kernel_test, find_source, or_skip


def test_own_kernels_agree_with_ggmls_vec_dot() -> None:
    program = or_skip(build_kernel_test, or_skip(find_source))
    done = subprocess.run([program], capture_output=True, text=True, timeout=300, check=False)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, [line for line in lines if "FAILED" in line] or done.stderr
    assert sum("ok" in line for line in lines) > 20, "the checks did not run"
