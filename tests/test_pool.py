"""The pool of CPU threads by itself: no data race, no lost request, and hung threads do not hang those who wait for them."""

from __future__ import annotations

import subprocess

import pytest

from native_build import BuildError, build_pool_test, find_source, or_skip


@pytest.mark.parametrize("sanitize", [False, True], ids=["plain", "thread sanitizer"])
def test_the_pool_serves_clients_that_come_and_go(sanitize: bool) -> None:
    try:
        program = or_skip(build_pool_test, or_skip(find_source), sanitize)
    except BuildError as error:
        if not sanitize:
            raise
        pytest.skip(f"the compiler has no thread sanitizer: {str(error).splitlines()[-1]}")
    done = subprocess.run([program, "2"], capture_output=True, text=True, timeout=300, check=False)
    if sanitize and "FATAL: ThreadSanitizer" in done.stderr:
        pytest.skip(f"the thread sanitizer does not run here: {done.stderr.splitlines()[0]}")
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert done.stdout.count("ok ") == 8, "the checks did not run"
