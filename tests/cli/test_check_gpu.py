"""``check`` and ``build --strict`` on a network that a GPU cannot run whole."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
from support import fallback
from support.cli import Cli


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("three") / "three.onnx"
    onnx.save(fallback.three(), path)
    return path


def test_check_shows_before_the_build_what_runs_on_the_cpu(cli: Cli, three: Path) -> None:
    done = cli("check", three, "--target", "cuda:sm_90a")
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    for kind, name in (("Det", "det"), ("Unique", "unique"), ("Compress", "kept")):
        assert any(line.split()[:2] == [kind, name] for line in lines), kind
    assert "there is no kernel for Det" in done.out
    assert "2 of 6 operators run on cuda:sm_90a, 4 on the CPU: 3 copies of 152 bytes and 2 cuts" in done.out
    reported = json.loads(cli("check", three, "--target", "simulate", "--json").out)["host"]
    assert reported["coverage"] == {"operators": 6, "device": 2, "host": 4}
    assert reported["estimated_us"] > sum(c["us"] for c in reported["copies"]) > 0


@pytest.mark.parametrize("command", ["check", "build"])
def test_strict_names_all_unsupported_operators_with_their_nodes(cli: Cli, three: Path, command: str) -> None:
    done = cli(command, three, "--target", "cuda:sm_90a", "--strict")
    assert done.code == 4
    for text in ("det: Det: there is no kernel", "unique: Unique:", "kept: Compress:", "strict forbids"):
        assert text in done.err
    assert not three.with_suffix(".engine").exists()


def test_build_and_inspect_show_the_steps_on_the_cpu(cli: Cli, three: Path, tmp_path: Path) -> None:
    out = tmp_path / "three.engine"
    built = cli("build", three, "-o", out, "--target", "simulate")
    assert built.code == 0, built.err
    assert "4 on the CPU" in built.out
    shown = cli("inspect", out).out
    assert "to the CPU" in shown
    assert "Det" in shown
    assert "4 on the CPU" in shown
    steps = json.loads(cli("inspect", out, "--json").out)["steps"]
    assert [s["bytes"] for s in steps if s["executor"] == "copy"] == [144, 4, 4]
    profile = json.loads(cli("bench", out, "--profile", "--iterations", "3", "--json").out)["profile"]
    assert [p["executor"] for p in profile] == [s["executor"] for s in steps]


def test_a_network_that_fits_says_so(cli: Cli, model: Path) -> None:
    done = cli("check", model, "--target", "cuda:sm_90a", "--shape", "x=1x3x8x8", "--strict")
    assert done.code == 0, done.err
    assert "operators run on cuda:sm_90a" in done.out
    assert "on the CPU" not in done.out


@pytest.mark.parametrize("kind", ["MatMul", "Exp"])
def test_products_of_unknown_sizes_bring_a_hint(cli: Cli, tmp_path: Path, kind: str) -> None:
    nodes = [
        fallback.node("NonZero", "x", "at"),
        onnx.helper.make_node("Cast", ["at"], ["f"], name="f", to=onnx.TensorProto.FLOAT),
        fallback.node("Transpose", "f", "turned"),
        fallback.node(kind, "f turned" if kind == "MatMul" else "f", "y"),
    ]
    path = tmp_path / "unknown.onnx"
    onnx.save(fallback.model(nodes, [("x", fallback.F, [5, 7])], [("y", fallback.F, [None, None])]), path)
    done = cli("check", path, "--target", "cuda:sm_90a")
    assert done.code == 0, done.err
    assert ("two engines avoid it" in " ".join(done.out.split())) == (kind == "MatMul")


def test_ranges_are_checked_at_their_optimum_and_values_take_steps_off_the_cpu(cli: Cli, tmp_path: Path) -> None:
    nodes = [fallback.node("TopK", "x k", "y at"), fallback.node("Exp", "y", "z")]
    inputs = [("x", fallback.F, ["N", 7]), ("k", fallback.I64, [1])]
    onnx.save(fallback.model(nodes, inputs, [("z", fallback.F, ["N", "k"])]), tmp_path / "k.onnx")
    options = (tmp_path / "k.onnx", "--target", "simulate", "--shape", "x=1..4..8x7")
    plain = cli("check", *options)
    assert plain.code == 0, plain.err
    assert "0 of 2 operators run on simulate, 2 on the CPU" in plain.out
    assert "shape inputs: k; this check does not know their values. Each of their values gets its own plan" in plain.out
    assert "see the plan of one with --value k=…" in plain.out
    fixed = cli("check", *options, "--value", "k=3", "--strict")
    assert fixed.code == 0, fixed.err
    assert "all 2 operators run on simulate" in fixed.out
    for bad in ("k", "k=a", "=1"):
        refused = cli("check", *options, "--value", bad)
        assert refused.code == 2
        assert "is not NAME=1,2,3" in refused.err
    assert "--pin 'fp32' is not NODES=PRECISION" in cli("check", *options, "--pin", "fp32").err
