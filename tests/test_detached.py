"""Detached or never attached, the patched library computes what upstream computes: the same graphs, node by node, and the same
logits, bit for bit, as an unpatched build of the same machine and flags.

That build's interpreter is MOESPAC_STOCK_PYTHON, else the one that `make stock` makes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dump_decodes
import native_build
from families import FAMILIES, N_VOCAB, cached_model

HERE = Path(__file__).parent
STOCK = HERE.parent / "build" / "stock" / "venv" / "bin" / "python"
NAMES = [name for name, family in FAMILIES.items() if family.n_expert] + ["qwen3"]
QUANTISED: dict[str, dict[str, Any]] = {
    "quantised": {"expert_type": ("Q4_K", "Q5_K"), "down_type": ("Q6_K", "Q4_K"), "dense_type": "Q8_0"},
    "repacked": {"expert_type": "Q4_0", "dense_type": "Q4_0"},  # loaded as upstream does by default
}


def find_stock_python() -> Path:
    path = Path(os.environ.get("MOESPAC_STOCK_PYTHON") or STOCK)
    if not path.exists():
        raise native_build.Unavailable(
            f"an unpatched build is needed, and {path} is missing: run `make stock`, or set MOESPAC_STOCK_PYTHON"
        )
    return path


def dump(python: Path, mode: str, models: Mapping[str, Path], folder: Path, search: list[str]) -> dict[str, np.ndarray]:
    out = folder / f"{mode}-{len(search)}.npz"
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | (
        {"PYTHONPATH": os.pathsep.join(search)} if search else {}
    )
    command = [str(python), str(HERE / "dump_decodes.py"), str(out), mode, *map(str, models.values())]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    with np.load(out) as file:
        return dict(file)


@pytest.fixture(scope="module")
def models(root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("detached")
    paths = {name: folder / f"{name}.gguf" for name in [*NAMES, *QUANTISED]}
    for name, path in paths.items():
        family, options = ("mixtral", QUANTISED[name]) if name in QUANTISED else (name, {})
        path.symlink_to(cached_model(root, family, **options))
    return paths


@pytest.fixture(scope="module")
def stock(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    python = native_build.or_skip(find_stock_python)
    result = dump(python, "plain", models, tmp_path_factory.mktemp("stock"), [])
    assert not result["patched"], f"{python} has a patched build: it cannot tell what upstream computes"
    return result


@pytest.fixture(scope="module", params=["plain", "detached"])
def ours(
    request: pytest.FixtureRequest, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, np.ndarray]:
    result = dump(
        Path(sys.executable), request.param, models, tmp_path_factory.mktemp(request.param), [p for p in sys.path if p]
    )
    assert result["patched"]
    return result


@pytest.mark.parametrize("name", [*NAMES, *QUANTISED])
def test_logits_are_upstreams_bit_for_bit(name: str, stock: dict[str, np.ndarray], ours: dict[str, np.ndarray]) -> None:
    n = sum(n for n, _ in dump_decodes.BATCHES)
    for kind in ("logits", "nodes_logits"):
        expected = stock[f"{name}/{kind}"]
        assert expected.shape == (n, N_VOCAB) and np.isfinite(expected).all() and expected.std() > 0.5
        assert (ours[f"{name}/{kind}"].view(np.uint32) == expected.view(np.uint32)).all()


@pytest.mark.parametrize("name", [*NAMES, *QUANTISED])
def test_graphs_are_upstreams_node_by_node(
    name: str, stock: dict[str, np.ndarray], ours: dict[str, np.ndarray]
) -> None:
    expected = stock[f"{name}/nodes"].tolist()
    assert sum("ffn_moe_topk" in node for node in expected) > 0 or name == "qwen3"
    assert sum(node.startswith("---") for node in expected) == len(dump_decodes.BATCHES)
    assert len(expected) > 100
    assert ours[f"{name}/nodes"].tolist() == expected
