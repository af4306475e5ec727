"""Fixtures that several test files share: a cache of tiny models, the test device, attached contexts.

Libraries are imported inside the fixtures: the tests of the build run without llama_cpp.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import native_build
from test_native_device import TestDevice

if TYPE_CHECKING:
    from lowlevel import Context, Model
    from moespac_llamacpp.native import Device, Experts
    from pair import Pair

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job: tests that press Ctrl-C need it
    signal.signal(signal.SIGINT, signal.default_int_handler)

GAUGES = ("alloc_now", "pinned_now", "queued_now", "instances_now", "waiting_now")


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The user's own cache is left alone: hot sets of the tests are kept here."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


@pytest.fixture(autouse=True)
def log_for_tests() -> Iterator[None]:
    """Commands keep llama.cpp's log for themselves; the tests after them read it in lowlevel.log_lines again."""
    yield
    if lowlevel := sys.modules.get("lowlevel"):
        lowlevel.keep_log()


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where families.cached_model keeps the models of this session."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def moetest_library() -> TestDevice:
    native_build.or_skip(native_build.find_libraries)
    source = native_build.or_skip(native_build.find_source)
    return TestDevice(native_build.or_skip(native_build.build_test_device, source))


@pytest.fixture
def moetest(moetest_library: TestDevice) -> Iterator[TestDevice]:
    """The MOETEST device with all switches off. A test that leaves memory, backends or jobs behind fails, and so does one
    whose jobs hit freed memory. Ask for it before `attach`, so that contexts are gone when it looks."""
    moetest_library.reset()
    before = moetest_library.count()
    yield moetest_library
    stray = moetest_library.count().stray
    moetest_library.reset()
    after = moetest_library.count()
    assert stray == 0, "a copy wrote to, or read from, memory that had been freed"
    for gauge in GAUGES:
        assert getattr(after, gauge) == getattr(before, gauge), f"{gauge} leaked"


@dataclass
class Attached:
    model: Model
    ctx: Context
    experts: Experts


@pytest.fixture
def attach(root: Path) -> Iterator[Callable[..., Attached]]:
    """attach(family, device, ...): a fresh model and context, with Experts on the device (None: parity.test_device()).

    model: options of families.cached_model, or a lowlevel.Model to share; load: of lowlevel.load_model; experts: of
    Experts; all others go to lowlevel.make_context. Everything is freed after the test, the newest first."""
    import families
    import lowlevel
    import parity
    from moespac_llamacpp.native import Experts

    with contextlib.ExitStack() as stack:

        def make(
            family: Any = "qwen3moe",
            device: Device | None = None,
            *,
            model: Model | dict[str, Any] | None = None,
            load: dict[str, Any] | None = None,
            experts: dict[str, Any] | None = None,
            **context: Any,
        ) -> Attached:
            if not isinstance(model, lowlevel.Model):
                path = families.cached_model(root, family, **(model or {}))
                where = parity.host_experts(device or parity.test_device())
                model = stack.enter_context(lowlevel.load_model(path, **(where | (load or {}))))
            ctx = stack.enter_context(lowlevel.make_context(model, **(lowlevel.EXACT | context)))
            where_slots = device or parity.test_device()
            options = {"execution": parity.execution_on(where_slots), **(experts or {})}
            return Attached(model, ctx, Experts(ctx.ptr, where_slots, **options))

        yield make


@pytest.fixture(scope="session")
def pair() -> Iterator[Pair]:
    """The bundled target and draft."""
    from moespac_llamacpp.models import Model
    from pair import DRAFT, TARGET, Pair

    with Model(TARGET) as target, Model(DRAFT) as draft:
        yield Pair(target, draft)
