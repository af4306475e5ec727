"""The simulator counts right, keeps policies to the contract, and reads both kinds of trace."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from moespac_llamacpp import simulate
from moespac_llamacpp.hardware import PORTABLE, Hardware, Work
from moespac_llamacpp.policies import NAMES, Batch, Decayed, Limits, Move, Static, make
from moespac_llamacpp.simulate import Clairvoyant, Step, load, replay

PLAIN = Hardware(
    name="round numbers",
    expert_bytes=1000,
    link_bytes=1e6,  # a move takes 1 ms
    between=100,
    between_token=10,
    launch=0,
    launch_token=0,
    cpu_expert=50,
    cpu_pair=5,
    device=20,
    device_pair=1,
)


class Script:
    """Makes the moves that it was told, one list a step; keeps what it heard."""

    def __init__(self, *plans: list[Move]) -> None:
        self.plans = list(plans)
        self.heard: list[tuple[str, object]] = []

    def observe(self, batch: Batch) -> None:
        self.heard.append(("observe", batch.n_tokens))

    def expect(self, tokens: Sequence[int]) -> None:
        self.heard.append(("expect", list(tokens)))

    def plan(self, resident: np.ndarray, limits: Limits) -> list[Move]:
        return self.plans.pop(0)


def steps_of(*batches: list[list[int]], tokens: bool = False) -> list[Step]:
    """One row of 8 experts; each batch a list of tokens, each token a list of its experts."""
    return [
        Step(Batch.from_ids(np.array(b)[:, None, :], 8, tokens=list(range(len(b))) if tokens else None), True)
        for b in batches
    ]


def test_a_hand_made_trace_gives_the_hits_moves_and_times_counted_by_hand() -> None:
    # experts 0 and 1 are resident; step 1: pairs 0 1 1 2 -> 3 of 4 hit, 2 of 3 experts; then 2 for 0: step 2: pairs 2 3 -> 1 of 2
    steps = steps_of([[0, 1], [1, 2]], [[2, 3]])
    result = replay(steps, Script([], [Move(0, 2, 0, 1.0)]), 2, 9, hardware=PLAIN)
    assert result.n_steps == 2
    assert result.pair_hit == pytest.approx(100 * 4 / 6) and result.expert_hit == pytest.approx(100 * 3 / 5)
    assert result.moves_per_step == 0.5
    first = 110 + max(1 * 50 + 1 * 5, 20 + 3)
    assert result.predicted_ms == pytest.approx((first / 1e3 + 1.0) / 2)  # the second waits for the link: 1 ms a move
    waits = replay(steps, Script([], [Move(0, 2, 0, 1.0)]), 2, 9, hardware=PLAIN, sync_moves=True)
    assert waits.predicted_ms == pytest.approx((first / 1e3 + 1.0 + (100 + 55) / 1e3) / 2)


def test_prompts_are_observed_but_not_measured() -> None:
    prompt, answer = steps_of([[0, 1]], [[4, 5]])
    script = Script([], [])
    result = replay([Step(prompt.batch, False), answer], script, 2, 9, hardware=PLAIN)
    assert result.n_steps == 1 and result.pair_hit == 0
    assert script.heard == [("observe", 1), ("observe", 1)]


def test_a_policy_hears_the_drafted_tokens_before_the_batch() -> None:
    script = Script([], [])
    replay(steps_of([[0, 1], [2, 3]], [[0, 1]], tokens=True), script, 2, 9)
    assert script.heard == [("expect", [0]), ("observe", 2), ("expect", []), ("observe", 1)], (
        "not the last one, as live"
    )


@pytest.mark.parametrize(
    ("moves", "complaint"),
    [
        ([Move(0, 5, None, 1.0)], "more residents than its 2 slots"),
        ([Move(0, 5, 7, 1.0)], "victim 7 is not resident"),
        ([Move(0, 1, 0, 1.0)], "expert 1 is resident already"),
        ([Move(0, 5, 0, 1.0), Move(0, 6, 1, 1.0)], "2 moves planned where 1 are allowed"),
    ],
)
def test_a_plan_that_cannot_be_carried_out_is_an_error(moves: list[Move], complaint: str) -> None:
    with pytest.raises(RuntimeError, match=complaint):
        replay(steps_of([[0, 1]]), Script(moves), 2, 1)


def chain(
    n_sessions: int = 6, length: int = 60, n_rows: int = 3, n_expert: int = 32, k: int = 2
) -> dict[str, np.ndarray]:
    """Verify batches of four tokens of a made-up language: a token names its experts in every layer (four times of five)."""
    rng = np.random.default_rng(0)
    of_token = np.stack([[rng.choice(n_expert, k, replace=False) for _ in range(n_rows)] for _ in range(64)])
    rows: dict[str, list[object]] = {
        name: [] for name in ("experts", "token", "position", "step", "accepted", "is_prompt")
    }
    step = 0
    for _ in range(n_sessions):
        position, token = 0, int(rng.integers(64))
        while position < length:
            step += 1
            n_kept = int(rng.integers(1, 5))
            for i in range(4):
                noise = np.array([rng.choice(n_expert, k, replace=False) for _ in range(n_rows)])
                rows["experts"].append(of_token[token] if rng.random() < 0.8 else noise)
                rows["token"].append(token)
                rows["position"].append(position + i)
                rows["step"].append(step)
                rows["accepted"].append(i < n_kept)
                rows["is_prompt"].append(position < 8)
                token = (3 * token + int(rng.integers(4))) % 64
            position += n_kept
    arrays = {name: np.array(values) for name, values in rows.items()}
    return arrays | {
        "experts": arrays["experts"].astype(np.uint8),
        "n_expert": np.int32(n_expert),
        "draft_len": np.int32(3),
    }


@pytest.fixture(scope="module")
def verify_trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "verify.npz"
    np.savez(path, **chain())  # type: ignore[arg-type]
    return path


@pytest.fixture(scope="module")
def plain_trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `moespac trace` writes it, without tokens."""
    arrays = chain()
    path = tmp_path_factory.mktemp("trace") / "plain.npz"
    np.savez(path, experts=arrays["experts"], is_decode=np.arange(len(arrays["token"])) >= 10, n_expert=np.int32(32))
    return path


def test_verify_batches_come_as_they_were_decoded(verify_trace: Path) -> None:
    arrays, steps = chain(), load(verify_trace)
    assert sum(s.batch.n_tokens for s in steps) == len(arrays["token"])
    assert all(s.batch.n_tokens == 4 and s.batch.tokens is not None for s in steps)
    assert [s.batch.starts for s in steps].count(True) == 6
    assert 0 < sum(s.measured for s in steps) < len(steps)


def test_consecutive_batches_leave_rejected_drafts_out_and_do_not_mix_sequences(verify_trace: Path) -> None:
    arrays, steps = chain(), load(verify_trace, 2)
    assert sum(s.batch.n_tokens for s in steps) == arrays["accepted"].sum()
    text = np.concatenate([s.batch.tokens for s in steps if s.batch.tokens is not None])
    assert (text == arrays["token"][arrays["accepted"]]).all()
    assert max(s.batch.n_tokens for s in steps) == 2
    assert [s.batch.starts for s in steps].count(True) == 6


def test_a_trace_without_tokens_is_cut_into_batches(plain_trace: Path) -> None:
    steps = load(plain_trace, 4)
    assert [s.batch.n_tokens for s in steps[:3]] == [4, 4, 2]  # the prompt's ten
    assert [s.measured for s in steps[:4]] == [False, False, False, True]
    assert all(s.batch.tokens is None for s in steps)
    with pytest.raises(ValueError, match="holds no verify batches"):
        load(plain_trace)


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "other.npz", x=np.zeros(3))
    with pytest.raises(ValueError, match="no routing trace"):
        load(tmp_path / "other.npz", 1)
    assert simulate.main([str(tmp_path / "other.npz")]) == 1
    assert simulate.main([str(tmp_path / "missing.npz")]) == 1


@pytest.mark.parametrize("max_moves", [1, 4, 1000])
def test_every_policy_replays_within_the_contract_and_nobody_beats_the_clairvoyant(
    verify_trace: Path, max_moves: int
) -> None:
    steps = load(verify_trace)
    for result in simulate.simulate(steps, NAMES, 0.25, max_moves):
        assert 0 <= result.pair_hit <= result.clairvoyant_pair_hit <= 100, result.policy
        assert result.n_steps == sum(s.measured for s in steps)


def test_drafted_tokens_are_worth_more_than_history_where_tokens_name_experts(verify_trace: Path) -> None:
    by_name = {r.policy: r for r in simulate.simulate(load(verify_trace), ("moe-spac", "decayed", "lru"), 0.25, 1000)}
    best_history = max(by_name["decayed"].pair_hit, by_name["lru"].pair_hit)
    assert by_name["moe-spac"].pair_hit > best_history + 10


def test_the_clairvoyant_serves_the_coming_batch() -> None:
    steps = steps_of([[4, 5]], [[6, 7]], [[0, 1]])
    assert replay(steps, Clairvoyant(steps, 0.0), 2, 9).pair_hit == 100
    assert replay(steps, Static(), 2, 9).pair_hit == pytest.approx(100 / 3)


def test_a_clairvoyant_with_few_moves_looks_further_ahead() -> None:
    """One move a step: who looks at the next batch only fetches what is used once, and never what is used from then on."""
    steps = steps_of(*([[4 + i % 3, 7]] for i in range(12)))
    near, far = (replay(steps, Clairvoyant(steps, fade), 2, 1).pair_hit for fade in (0.0, 0.5))
    assert near < far <= simulate.clairvoyant_hit(steps, 2, 1)


def test_moves_are_capped_and_bytes_follow(verify_trace: Path) -> None:
    (result,) = simulate.simulate(load(verify_trace), ("lru",), 0.25, 2)
    assert 0 < result.moves_per_step <= 2
    assert result.bytes_per_step == result.moves_per_step * simulate.H200.expert_bytes
    assert result.predicted_ms > 0


def test_a_cache_share_outside_0_to_1_is_refused(verify_trace: Path) -> None:
    for share in (0.0, 1.5):
        with pytest.raises(ValueError, match="cache share"):
            simulate.simulate(load(verify_trace), ("lru",), share)


def test_the_profile_gives_the_step_times_that_were_measured() -> None:
    """docs/performance.md, planted Qwen3-30B-A3B with k = 6: within 15 %."""
    ones = np.ones(48)

    def ms(n: int, experts: float, hit_pairs: float) -> float:
        """`experts` distinct ones a layer and 6 n pairs, of which the share hit_pairs hits."""
        cold = 6 * n * (1 - hit_pairs)
        hot = 6 * n - cold
        return PORTABLE.step_ms(Work(n, ones * experts, ones * cold, ones * hot, ones * hot, ones), 0)

    assert ms(1, 6, 0) == pytest.approx(13.6, rel=0.15)
    assert ms(8, 3.93 * 6, 0) == pytest.approx(45.8, rel=0.15)
    assert ms(1, 0.72, 0.88) == pytest.approx(8.2, rel=0.15)
    assert ms(9, 5, 0.86) == pytest.approx(21.1, rel=0.15)
    assert ms(9, 0, 1) == pytest.approx(19, rel=0.15)


def test_the_same_policy_object_runs_on_without_tokens(plain_trace: Path) -> None:
    steps = load(plain_trace, 4)
    a = replay(steps, make("moe-spac", 3, 32), 8, 50)
    b = replay(steps, Decayed(3, 32, hysteresis=0.1), 8, 50)
    assert a.pair_hit > b.pair_hit  # the prior alone, with the same hysteresis: it knows use since the start too


def test_the_command_prints_a_table_or_json(plain_trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate.main([str(plain_trace), "--policy", "lru", "--policy", "decayed", "--batch", "2"]) == 0
    out = capsys.readouterr().out
    assert "clairvoyant" in out and "\nlru" in out and "\ndecayed" in out
    assert simulate.main([str(plain_trace), "--policy", "lru", "--json", "--max-moves", "3"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["policy"] == "lru" and row["max_moves"] == 3 and row["batch"] == 1
    assert simulate.main([str(plain_trace), "--cache-share", "2"]) == 1
    assert "cache share" in capsys.readouterr().err


def test_policies_import_neither_ctypes_nor_llama_cpp() -> None:
    """The objects must run where no native library is."""
    package = Path(simulate.__file__).parent
    for name in ("planning", "utility", "balancer", "spac", "rivals", "policies", "hardware", "simulate"):
        lines = (package / f"{name}.py").read_text(encoding="utf-8").splitlines()
        imports = [line.split()[1] for line in lines if line.lstrip().startswith(("import ", "from "))]
        assert not [
            i for i in imports if i.split(".")[0] in ("ctypes", "llama_cpp") or i.endswith((".native", ".models"))
        ], name


def test_moves_that_land_next_leave_a_gap_and_know_one_batch_less() -> None:
    """Experts 0 and 1 are resident. Planned while a batch is decoded: victims leave before the next, uploads arrive after it."""
    steps = steps_of([[0, 1]], [[0, 1]], [[2, 1]], [[2, 1]])
    plans = [[], [Move(0, 2, 0, 1.0)], [], []]
    late = replay(steps, Script(*plans), 2, 9, hardware=PLAIN, landing="next")
    # the second plan is made while batch 2 is decoded: 0 leaves before batch 3, where 2 is not there yet
    assert late.pair_hit == pytest.approx(100 * (2 + 2 + 1 + 2) / 8)
    same = replay(steps, Script([], [], [Move(0, 2, 0, 1.0)], []), 2, 9, hardware=PLAIN)
    assert same.pair_hit == 100


def test_moves_that_land_next_hear_no_tokens_and_plan_before_they_observe() -> None:
    class Ear(Script):
        def plan(self, resident: np.ndarray, limits: Limits) -> list[Move]:
            self.heard.append(("plan", limits.late))
            return []

    ear = Ear()
    replay(steps_of([[0, 1]], [[2, 3]], tokens=True), ear, 2, 9, landing="next")
    assert ear.heard == [("plan", True), ("observe", 1)] * 2
    sync = Ear()
    replay(steps_of([[0, 1]], tokens=True), sync, 2, 9, landing="next", sync_moves=True)  # waited for: in time
    assert sync.heard == [("expect", []), ("plan", False), ("observe", 1)]


def test_by_default_moves_land_as_live(verify_trace: Path, plain_trace: Path) -> None:
    """Next where a batch is a token that nobody drafted, same where a draft model had to guess."""
    assert simulate.simulate(load(plain_trace, 1), ("lru",), 0.25)[0].landing == "next"
    assert simulate.simulate(load(plain_trace, 4), ("lru",), 0.25)[0].landing == "same"
    assert simulate.simulate(load(verify_trace), ("lru",), 0.25)[0].landing == "same"
    assert simulate.simulate(load(verify_trace), ("lru",), 0.25, landing="next")[0].landing == "next"


def test_a_profile_is_read_from_a_file_and_changes_the_times(
    plain_trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(dataclasses.asdict(PLAIN)))
    assert simulate.read_hardware(path) == PLAIN
    times = []
    for options in ([], ["--profile", str(path)]):
        assert simulate.main([str(plain_trace), "--policy", "lru", "--json", *options]) == 0
        times.append(json.loads(capsys.readouterr().out)["predicted_ms"])
    assert times[0] != times[1]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"cpu_pair": -1}, "cpu_pair is -1, it must be a number"),
        ({"cpu_pair": "fast"}, "cpu_pair is 'fast'"),
        ({"link_bytes": 0}, "must be above 0"),
        ({"speed": 9}, "exactly these fields"),
        ("[]", "exactly these fields"),
        ("{", "not a JSON file"),
    ],
)
def test_a_profile_that_is_none_is_refused_in_one_sentence(
    plain_trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: object, complaint: str
) -> None:
    path = tmp_path / "mine.json"
    text = change if isinstance(change, str) else json.dumps(dataclasses.asdict(PLAIN) | change)  # type: ignore[operator]
    path.write_text(text)
    assert simulate.main([str(plain_trace), "--profile", str(path)]) == 1
    error = capsys.readouterr().err
    assert complaint in error and str(path) in error and error.count("\n") == 1


def test_the_switches_of_the_ablation_switch_something(verify_trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def row(*options: str) -> dict[str, object]:
        assert simulate.main([str(verify_trace), "--policy", "moe-spac", "--json", *options]) == 0
        return dict(json.loads(capsys.readouterr().out))

    full = row()
    assert row("--no-frequency")["pair_hit"] != full["pair_hit"]
    assert row("--sync-moves")["predicted_ms"] > full["predicted_ms"]  # type: ignore[operator]
    narrow = row("--window-ms", "0.06")
    assert narrow["moves_per_step"] < full["moves_per_step"]  # type: ignore[operator]
    assert row("--window-ms", "0.06", "--no-balancer")["moves_per_step"] > narrow["moves_per_step"]  # type: ignore[operator]
