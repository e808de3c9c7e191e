"""``--random-seed``: builds, comparisons and reports of networks with random operators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
from support import draws
from support.cli import Cli, libraries, strict

TEXT = """g (float[4, 9000] x) => (float[4, 9000] y, float[4, 9000] u) {
    n = RandomNormalLike(x)  y = Add(x, n)  u = RandomUniform<shape = [4, 9000], low = -1.0>() }"""


@pytest.fixture(scope="module")
def noisy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("noisy") / "noisy.onnx"
    onnx.save(draws.model(TEXT), path)
    return path


@pytest.fixture
def built(cli: Cli, noisy: Path) -> Path:
    path = noisy.with_suffix(".engine")
    code, out, _ = cli("build", noisy, "--target", "reference", "--random-seed", 5, "-o", path)
    assert code == 0
    assert "from the model in NumPy (float64)" in out
    return path


def test_without_it_the_option_is_named(cli: Cli, noisy: Path) -> None:
    for command in ("build", "check"):
        code, _, err = cli(command, noisy, "--target", "reference")
        assert code == 4
        assert "with --random-seed N (random_seed=N)" in err
    assert "0 operators" not in cli("check", noisy, "--target", "reference", "--random-seed", 0).out
    assert "Range" in cli("inspect", noisy).out


@pytest.mark.slow
@libraries
@pytest.mark.slow
def test_other_libraries_run_the_same_draws(cli: Cli, noisy: Path, built: Path) -> None:
    short = ("--threads", 1, "--rounds", 3, "--duration", 0.06, "--against", "onnxruntime,openvino,reference", "--json")
    for argv in (("compare", noisy, "--target", "cpu", "--random-seed", 5), ("compare", built, "--model", noisy)):
        rows: dict[str, Any] = {row["name"]: row for row in strict(cli(*argv, *short, "-").out)["rows"]}
        openvino = rows.pop("openvino")
        assert openvino["error"] == "it keeps uint32 as int32, and cannot draw the random numbers of the engine"
        assert openvino["max_rel_err"] is None
        assert len(rows) == 3
        assert all(row["max_rel_err"] < 1e-6 for row in rows.values())


@pytest.mark.slow
def test_an_engine_looks_inside_with_its_draws(cli: Cli, noisy: Path, built: Path) -> None:
    argv = ("compare", built, "--model", noisy, "--against", "reference", "--rounds", 3, "--duration", 0.06, "--layers")
    code, out, _ = cli(*argv, "--max-error", "1e-4", "--bisect")
    assert code == 0
    assert "bisect: no node is beyond 0.0001" in out


@pytest.mark.slow
def test_a_model_and_its_engine_draw_the_same(cli: Cli, noisy: Path, built: Path) -> None:
    for pair in ((noisy, built), (built, noisy), (noisy, noisy)):
        found = strict(cli("diff", *pair, "--json").out)
        assert found["outputs"]["max_rel_err"] < 1e-6
