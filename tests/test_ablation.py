"""Each part of moe-spac can be switched off, in Python and on the command line."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from moespac_llamacpp.policies import NAMES, make
from moespac_llamacpp.spac import MoeSpac
from moespac_llamacpp.utility import TokenMemory


def moespac(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "moespac_llamacpp.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_a_switch_and_the_policy_of_its_name_are_the_same() -> None:
    for switched, named in (
        (make("moe-spac", 2, 16, frequency=False), make("moe-spac-no-frequency", 2, 16)),
        (make("moe-spac", 2, 16, balanced=False), make("moe-spac-no-balancer", 2, 16)),
    ):
        assert isinstance(switched, MoeSpac) and isinstance(named, MoeSpac)
        assert isinstance(switched.estimator, TokenMemory) and isinstance(named.estimator, TokenMemory)
        assert (switched.balanced, switched.estimator.frequency) == (named.balanced, named.estimator.frequency)
        assert not (switched.balanced and switched.estimator.frequency)


@pytest.mark.parametrize("name", [n for n in NAMES if not n.startswith("moe-spac")])
def test_a_policy_without_the_part_refuses_to_switch_it_off(name: str) -> None:
    with pytest.raises(ValueError, match="frequency can be switched off for moe-spac only"):
        make(name, 2, 16, frequency=False, profile=np.ones((2, 16)))
    with pytest.raises(ValueError, match=f"{name} has no balancer"):
        make(name, 2, 16, balanced=False, profile=np.ones((2, 16)))


def test_generate_runs_with_all_parts_switched_off() -> None:
    done = moespac(
        "generate", "The heron", "-n", "12", "--no-frequency", "--no-balancer", "--sync-moves", "--no-hot-set"
    )
    assert done.returncode == 0, done.stderr
    assert "12 tokens at" in done.stderr


def test_a_switch_that_does_not_fit_the_policy_is_one_sentence() -> None:
    done = moespac("generate", "The heron", "-n", "2", "--policy", "lru", "--no-balancer")
    assert done.returncode == 1 and done.stderr == "moespac: lru has no balancer that could be switched off\n"
