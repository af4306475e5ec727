"""Models by name: the list, fetching from a hub on loopback, and what is said when something is in the way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hub import TOKEN, Hub, start_hub
from moespac_llamacpp.catalog import CatalogError, HubFile, bundled_catalog, find, read_catalog
from moespac_llamacpp.hubname import choose
from pair import DRAFT, TARGET

LINES = """
tiny   test/tiny-GGUF/tiny.gguf 0.024 test/tiny-GGUF/drafts/draft.gguf 0.004 MIT 1G  # a comment
split  test/split-GGUF/m-00001-of-00002.gguf ~0.1 - 0 Apache-2.0 1G
"""

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def hub() -> Iterator[Hub]:
    files = {"test/tiny-GGUF/tiny.gguf": TARGET.read_bytes(), "test/tiny-GGUF/drafts/draft.gguf": DRAFT.read_bytes()}
    files |= {f"test/split-GGUF/m-0000{i}-of-00002.gguf": bytes([i]) * 1000 for i in (1, 2)}
    with start_hub(files) as hub:
        yield hub


@pytest.fixture
def moespac(hub: Hub, tmp_path: Path) -> Run:
    """The command with this hub, a cache of its own and LINES as catalog."""
    (tmp_path / "models.txt").write_text(LINES)
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING", "http", "HTTP"))
    }
    own = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "MOESPAC_MODELS": str(tmp_path / "models.txt")}

    def run(*arguments: str, lines: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "moespac_llamacpp.cli", *arguments]
        env = kept | own | environment
        return subprocess.run(command, input=lines, env=env, capture_output=True, text=True, timeout=120)

    return run


def sentence(done: subprocess.CompletedProcess[str]) -> str:
    """The last line of a command that failed with nothing but a sentence."""
    assert done.returncode == 1 and done.stdout == "" and "Traceback" not in done.stderr, done.stderr
    return done.stderr.splitlines()[-1]


def test_a_pair_is_fetched_once_and_then_runs_by_its_name_without_the_network(moespac: Run, hub: Hub) -> None:
    assert "tiny is not fetched yet: `moespac pull tiny` (0.0 GB)" in sentence(moespac("chat", "tiny"))
    done = moespac("pull", "tiny")
    assert done.returncode == 0 and done.stderr.count("checksum: good") == 2, done.stderr
    target, draft = done.stdout.split()
    assert Path(target).read_bytes() == TARGET.read_bytes() and Path(draft).name == "draft.gguf"
    hub.requests.clear()
    again = moespac("pull", "tiny")
    assert again.returncode == 0 and again.stdout == done.stdout and again.stderr.count("there already") == 2
    assert not [request for request in hub.requests if request[0] == "GET"]
    spoken = moespac(
        "chat", "tiny", "-t", "1", "-n", "8", "--json", HF_HUB_OFFLINE="1", lines='What does "heron" mean?\n'
    )
    assert spoken.returncode == 0, spoken.stderr
    answer = json.loads(spoken.stdout)
    assert answer["text"].startswith("Heron has") and answer["n_drafted"] > 0
    planned = moespac("plan", "-m", "tiny", HF_HUB_OFFLINE="1")
    assert "tiny.gguf with draft.gguf" in planned.stdout
    listed = {record["name"]: record for record in json.loads(moespac("models", "--json", HF_HUB_OFFLINE="1").stdout)}
    assert listed["tiny"]["fetched"] and not listed["split"]["fetched"] and "qwen3-30b-a3b" in listed


def test_a_download_that_broke_off_goes_on_where_it_ended(moespac: Run, hub: Hub) -> None:
    hub.break_at = 15_000_000  # more than the piece that huggingface-hub writes at once
    done = moespac("pull", "test/tiny-GGUF/tiny.gguf")
    if done.returncode:  # some releases of it try again by themselves
        assert "gave no answer, or broke off" in sentence(done)
        done = moespac("pull", "test/tiny-GGUF/tiny.gguf")
    assert done.returncode == 0 and "checksum: good" in done.stderr, done.stderr
    starts = [at for method, _, at in hub.requests if method == "GET"]
    assert len(starts) == 2 and starts[0] == 0 and 0 < starts[1] <= 15_000_000
    assert Path(done.stdout.strip()).read_bytes() == TARGET.read_bytes()


def test_damage_is_found_and_the_file_is_fetched_anew(moespac: Run, hub: Hub) -> None:
    hub.damaged = True
    assert "m-00001-of-00002.gguf: its checksum is not what the hub says" in sentence(moespac("pull", "split"))
    hub.damaged = False
    done = moespac("pull", "split")
    blob = Path(done.stdout.strip()).resolve()
    assert done.returncode == 0 and blob.read_bytes() == b"\1" * 1000
    blob.write_bytes(b"\1" * 999 + b"\2")
    assert moespac("pull", "split").returncode == 0  # not looked at again
    assert "its checksum is not what the hub says" in sentence(moespac("pull", "split", "--verify"))


def test_all_parts_of_a_split_model_are_fetched(moespac: Run) -> None:
    done = moespac("pull", "split")
    assert done.returncode == 0 and "m-00002-of-00002.gguf (part 2 of 2)" in done.stderr
    first = Path(done.stdout.strip())
    assert first.name == "m-00001-of-00002.gguf"
    assert first.with_name("m-00002-of-00002.gguf").read_bytes() == b"\2" * 1000


def test_a_token_opens_a_gated_repository(moespac: Run, hub: Hub) -> None:
    hub.gated.add("test/split-GGUF")
    assert "its owner asks for your consent" in sentence(moespac("pull", "split"))
    assert moespac("pull", "split", HF_TOKEN=TOKEN).returncode == 0


@pytest.mark.parametrize(
    ("name", "environment", "words"),
    [
        ("test/none-GGUF/x.gguf", {}, "there is no such repository, or it is private"),
        ("test/tiny-GGUF/x.gguf", {}, "the repository has no such file"),
        ("test/tiny.gguf", {}, "'test/tiny.gguf' is not owner/repository/file.gguf"),
        ("tinny", {}, "there is no model 'tinny' in the list; there are tiny, split, qwen3-30b-a3b"),
        ("tiny", {"HF_HUB_OFFLINE": "1"}, "not fetched yet, and HF_HUB_OFFLINE forbids the network"),
        ("tiny", {"HF_ENDPOINT": "http://127.0.0.1:9"}, "the hub at http://127.0.0.1:9 gave no answer, or broke off"),
        ("tiny", {"MOESPAC_MODELS": "/nowhere.txt"}, "/nowhere.txt: the list of models cannot be read"),
    ],
)
def test_what_is_in_the_way_is_one_sentence(moespac: Run, name: str, environment: dict[str, str], words: str) -> None:
    assert words in sentence(moespac("pull", name, **environment))


def test_a_disk_without_room_is_told_before_the_first_byte(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moespac_llamacpp import fetch

    class Metadata:
        size = 10**18

    monkeypatch.setattr(fetch.constants, "HF_HUB_CACHE", str(tmp_path / "not" / "yet"))
    monkeypatch.setattr(fetch.hub, "get_hf_file_metadata", lambda url: Metadata)
    with pytest.raises(fetch.FetchError, match=r"1000000000\.0 GB are to be fetched, but the disk of .*not/yet has"):
        fetch.fetch(HubFile("test/tiny-GGUF", "tiny.gguf"), "tiny.gguf")


@pytest.mark.parametrize(
    ("number", "words"), [(28, "the disk of .* is full"), (13, "cannot be written"), (30, "cannot be wr")]
)
def test_a_disk_that_takes_no_more_is_told(monkeypatch: pytest.MonkeyPatch, number: int, words: str) -> None:
    from moespac_llamacpp import fetch

    def download(repo: str, name: str) -> str:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fetch, "_check_room", lambda repo, name: None)
    monkeypatch.setattr(fetch.hub, "hf_hub_download", download)
    with pytest.raises(fetch.FetchError, match=words):
        fetch.fetch(HubFile("test/tiny-GGUF", "tiny.gguf"), "tiny.gguf")


def test_a_list_says_what_this_machine_lacks() -> None:
    from moespac_llamacpp.commands.models import lacks
    from moespac_llamacpp.plan import Place

    entry = find(
        read_catalog(bundled_catalog()), "qwen3-30b-a3b-0.6b"
    )  # 19.2 GB, 18.6 of it the target; 8 GiB to start with
    rich = Place("GPU0", "a GPU", 24 << 30, 24 << 30, True, True, 60 * 10**9, 64 * 10**9)
    assert lacks(entry, rich, 10**12) == [] and lacks(entry, rich, None) == []
    assert lacks(entry, rich, 10 * 10**9) == ["9.2 GB more disk"]
    poor = replace(rich, host_total=16 * 10**9, total=8 << 30)
    assert lacks(entry, poor, None) == ["4.6 GB more memory", "1.1 GB more VRAM, or a smaller context"]
    assert lacks(entry, replace(poor, gpu=False), None) == ["4.6 GB more memory"]


# --- the list --------------------------------------------------------------------------------------------------------------


def test_the_bundled_list_is_sound() -> None:
    entries = read_catalog(bundled_catalog())
    assert len(entries) >= 8
    for entry in entries:
        assert entry.target_bytes > 10**10 and entry.vram >= 4 << 30
        assert (entry.draft is None) == (entry.draft_bytes == 0)
    assert find(entries, "GPT-OSS-120B").target.parts[2].endswith("-00003-of-00003.gguf")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("a b c", "line 2: 3 columns, but there are 7"),
        ("a o/r/f.gguf big - 0 MIT 8G", "'big' is not a size in GB"),
        ("a o/f.gguf 1 - 0 MIT 8G", "'o/f.gguf' is not owner/repository/file.gguf"),
        ("a o/r/f.gguf 1 - 0 MIT much", "'much' is not a size"),
        ("a/b o/r/f.gguf 1 - 0 MIT 8G", "'a/b' could be a file"),
        ("tiny o/r/f.gguf 1 - 0 MIT 8G\ntiny o/r/f.gguf 1 - 0 MIT 8G", "line 3: tiny is there twice"),
    ],
)
def test_a_line_that_is_wrong_is_named(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "models.txt"
    path.write_text("# mine\n" + line)
    with pytest.raises(CatalogError, match=words):
        read_catalog(path)


# --- as llama.cpp names them -----------------------------------------------------------------------------------------------


def test_a_repository_and_a_quant_name_a_file(moespac: Run, hub: Hub) -> None:
    target, draft = TARGET.read_bytes(), DRAFT.read_bytes()
    hub.files = {
        "own/moe-GGUF/moe-Q4_K_M.gguf": target,
        "own/moe-GGUF/moe-IQ2_M.gguf": b"GGUF",
        "own/d-GGUF/d-q8_0.gguf": draft,
    }
    short = ("generate", "The heron", "-n", "8", "-t", "1", "-c", "256")
    done = moespac(*short, "-hf", "own/moe-GGUF", "-hfd", "own/d-GGUF:Q8_0")
    assert done.returncode == 0 and "drafted tokens accepted" in done.stderr, done.stderr
    fetched = {name for method, name, _ in hub.requests if method == "GET" and name.endswith(".gguf")}
    assert fetched == {"own/moe-GGUF/moe-Q4_K_M.gguf", "own/d-GGUF/d-q8_0.gguf"}
    again = moespac(*short, "-hf", "own/moe-GGUF:q4_k_m", "--draft", "none", HF_HUB_OFFLINE="1")
    assert again.returncode == 0, again.stderr


def test_a_repository_that_lacks_it_is_one_sentence(moespac: Run, hub: Hub) -> None:
    hub.files = {"own/moe-GGUF/moe-IQ2_M.gguf": b"GGUF"}
    for name, words in (
        ("own/moe-GGUF:Q6_K", "own/moe-GGUF: it has no GGUF file of Q6_K; it has moe-IQ2_M.gguf"),
        ("own/other", "own/other: there is no such repository, or it is private"),
        ("moe", "'moe' is not owner/repository[:quant], nor owner/repository/file.gguf"),
    ):
        assert words in sentence(moespac("generate", "x", "-hf", name))
    assert "HF_HUB_OFFLINE forbids the network" in sentence(
        moespac("generate", "x", "-hf", "own/x", HF_HUB_OFFLINE="1")
    )


def test_the_first_part_of_a_split_model_stands_for_it() -> None:
    names = ["m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf", "mmproj-Q8_0.gguf", "a/m-Q4_K_M.gguf"]
    assert choose(names, "q8_0") == "m-Q8_0-00001-of-00002.gguf"
    assert choose(names, "Q4_K_M") == "a/m-Q4_K_M.gguf" == choose(names, "")
    assert choose(names, "Q2_K") is None
