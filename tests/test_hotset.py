"""The hot set outlives a run, whole or not at all, and a broken one costs one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from moespac_llamacpp import hotset, native
from moespac_llamacpp.decoder import Decoder
from moespac_llamacpp.engine import Options, open_residency
from moespac_llamacpp.hotset import HotSet, HotSetError
from moespac_llamacpp.machine import cache_folder
from moespac_llamacpp.models import Context
from pair import PROMPTS, TARGET, Pair, target_context

SHAPE = (3, 8)


def some(seed: int = 0) -> HotSet:
    rng = np.random.default_rng(seed)
    return HotSet(rng.random(SHAPE) < 0.3, rng.random(SHAPE))


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "down.npz"
    hot = some()
    hotset.save(path, hot)
    found = hotset.load(path, *SHAPE)
    assert found is not None and found.use is not None and hot.use is not None
    assert (found.resident == hot.resident).all()
    np.testing.assert_allclose(found.use, hot.use, rtol=1e-6)
    hotset.save(path, HotSet(hot.resident))
    found = hotset.load(path, *SHAPE)
    assert found is not None and found.use is None
    assert hotset.load(tmp_path / "none.npz", *SHAPE) is None


@pytest.mark.parametrize(
    "damage", ["cut", "empty", "text", "shape", "keys", "negative", "nan", "pickle", "version", "array", "many"]
)
def test_a_broken_file_is_told_by_name(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "hot.npz"
    hot = some()
    assert hot.use is not None
    hotset.save(path, hot)
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-40])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "text":
        path.write_text("not an archive")
    elif damage == "shape":
        hotset.save(path, HotSet(hot.resident[:2], hot.use[:2]))
    elif damage == "keys":
        np.savez(path, resident=hot.resident)
    elif damage == "negative":
        hotset.save(path, HotSet(hot.resident, -hot.use))
    elif damage == "nan":
        hotset.save(path, HotSet(hot.resident, hot.use * np.nan))
    elif damage == "pickle":
        np.savez(path, version=np.int32(1), resident=np.array([object()]))
    elif damage == "version":
        np.savez(path, version=np.int32(99), resident=hot.resident)
    elif damage == "array":
        with path.open("wb") as file:
            np.save(file, hot.resident)
    elif damage == "many":
        np.savez(path, version=np.arange(3), resident=hot.resident)
    with pytest.raises(HotSetError, match=r"hot\.npz: .*"):
        hotset.load(path, *SHAPE)


def test_wherever_a_file_is_damaged_it_is_refused_or_read(tmp_path: Path) -> None:
    path = tmp_path / "hot.npz"
    hotset.save(path, some())
    whole = path.read_bytes()
    rng, n_refused = np.random.default_rng(0), 0
    for at in rng.permutation(len(whole))[:200].tolist():
        damaged = bytearray(whole)
        damaged[at] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        try:
            hotset.load(path, *SHAPE)
        except HotSetError:
            n_refused += 1
    assert n_refused > 100


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "hot.npz"
    hotset.save(path, some())
    before = path.read_bytes()

    def full(file: object, **arrays: object) -> None:
        file.write(b"half")  # type: ignore[attr-defined]
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez_compressed", full)
    with pytest.raises(OSError, match="No space left"):
        hotset.save(path, some(1))
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["hot.npz"]


def test_slots_start_with_the_most_used_then_with_residents() -> None:
    resident = np.zeros((1, 6), np.bool_)
    resident[0, [1, 4]] = True
    hot = HotSet(resident, np.array([[0.0, 0.0, 0.5, 0.2, 0.0, 0.9]]))
    assert hot.best(0, 5, 6) == [5, 2, 3, 1, 4]
    assert hot.best(0, 5, 5) == [2, 3, 1, 4, 0]  # this layer has no expert 5
    assert HotSet(resident).best(0, 3, 6) == [1, 4, 0]


def test_models_of_equal_names_are_told_apart(tmp_path: Path) -> None:
    paths = [tmp_path / name / "model.gguf" for name in "abc"]
    for path, content in zip(paths, (b"x" * 100, b"x" * 101, b"y" * 100), strict=True):
        path.parent.mkdir()
        path.write_bytes(content)
    assert len({hotset.path_for(tmp_path, p) for p in paths}) == 3
    assert hotset.path_for(tmp_path, paths[0]).name.startswith("model-")


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return cache_folder(os.environ)


def run(context: Context, options: Options, n_tokens: int) -> list[set[int]]:
    """The experts that a run starts with, by row; then it generates."""
    assert context.experts is not None
    context.experts.set_slots([8 if r.hybrid else 0 for r in map(context.experts.row, range(context.experts.n_rows))])
    with open_residency(context, options, []) as residency:
        table = context.experts.states_table()
        if n_tokens:
            decoder = Decoder(context, residency)
            list(decoder.generate(context.model.tokenize(PROMPTS[0]), n_tokens))
            decoder.close()
    context.clear()
    return [set(np.flatnonzero(row == native.RESIDENT).tolist()) for row in table]


def test_a_run_starts_with_what_the_last_one_left(pair: Pair, own_cache: Path) -> None:
    first_eight = set(range(8))
    with target_context(pair) as context:
        assert run(context, Options(hot_set=True), 30)[0] == first_eight
    with target_context(pair) as context:
        second = run(context, Options(), 0)
        assert second[0] == first_eight
        third = run(context, Options(hot_set=True), 0)
        assert third[0] != first_eight and all(len(row) == 8 for row in third)
        use = hotset.load(hotset.path_for(own_cache, TARGET), len(third), 32)
        assert use is not None and use.use is not None
        assert third[0] == set(np.argsort(-use.use[0], kind="stable")[:8].tolist())


def test_without_hot_sets_nothing_is_kept(pair: Pair, own_cache: Path) -> None:
    with target_context(pair) as context:
        run(context, Options(), 5)
    assert not own_cache.exists()


def test_a_policy_starts_from_the_hot_set_too(pair: Pair, own_cache: Path) -> None:
    with target_context(pair) as context:
        run(context, Options(hot_set=True), 30)
        assert context.experts is not None
        before = hotset.load(hotset.path_for(own_cache, TARGET), context.experts.n_rows, context.experts.n_expert)
        run(context, Options(hot_set=True), 0)
        after = hotset.load(hotset.path_for(own_cache, TARGET), context.experts.n_rows, context.experts.n_expert)
    assert before is not None and before.use is not None and after is not None and after.use is not None
    np.testing.assert_allclose(after.use, before.use, rtol=1e-5)


def test_a_broken_hot_set_is_one_line_and_the_run_goes_on(own_cache: Path) -> None:
    path = hotset.path_for(own_cache, TARGET)
    path.parent.mkdir(parents=True)
    path.write_text("no archive")
    command = [sys.executable, "-m", "moespac_llamacpp.cli", "generate", "The heron", "-n", "3", "--draft", "none"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout
    assert [line for line in done.stderr.splitlines() if "hot set" in line] == [
        line for line in done.stderr.splitlines() if str(path) in line
    ]
    assert done.stderr.count(str(path)) == 1
    assert hotset.load(path, 6, 32) is not None  # this run's own is whole again


def test_a_hot_set_that_cannot_be_kept_is_one_line_at_the_end(own_cache: Path) -> None:
    own_cache.parent.mkdir(parents=True, exist_ok=True)
    own_cache.write_text("a file where the folder would be")
    command = [sys.executable, "-m", "moespac_llamacpp.cli", "generate", "The heron", "-n", "3", "--draft", "none"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout
    assert done.stderr.splitlines()[-1].startswith("moespac: the hot set was not kept for the next run: ")


def test_what_the_slots_start_with_is_not_counted_as_uploads_of_the_text() -> None:
    command = [sys.executable, "-m", "moespac_llamacpp.cli", "generate", "The heron", "-n", "3", "--policy", "static"]
    done = subprocess.run([*command, "--draft", "none"], capture_output=True, text=True, timeout=120)
    assert done.stderr.splitlines()[-1].endswith("; 0 uploads, 0.0 MiB")
