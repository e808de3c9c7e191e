"""``build --precision auto``, what ``inspect`` and ``explain`` show of it, and pins."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from support.cli import Cli
from support.needs import needs_libraries

import optdnn.lowering.cpu.partition as cpu
import optdnn.precision.cpu_target as cpu_target

needs_libraries()


@pytest.fixture(scope="module")
def calib(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("calib") / "data.npz"
    rng = np.random.default_rng(0)
    np.savez(path, x=rng.standard_normal((16, 3, 8, 8)).astype(np.float32), labels=rng.integers(0, 5, 16))
    return path


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure each engine once: these tests do not depend on the winner."""

    def once(runners: Mapping[str, Callable[[], object]], **options: Any) -> dict[str, float]:
        from optdnn.lowering.cpu.base import take_turns

        return take_turns(runners, rounds=1, turn_seconds=0.001)

    monkeypatch.setattr(cpu, "take_turns", once)
    turns = cpu_target.in_turns
    monkeypatch.setattr(cpu_target, "in_turns", lambda runners, **options: turns(runners, rounds=1, give_up_ratio=3.0))
    monkeypatch.setattr(cpu_target, "TURN_SECONDS", 0.001)


def build(cli: Cli, model: Path, calib: Path, out: Path, *more: object) -> Any:
    return cli(
        *("build", model, "-o", out, "--target", "cpu", "--threads", 1, "--precision", "auto", "--calib", calib),
        *("--metric", "cosine", "--max-drop", 0.1, *more),
    )


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_build_shows_and_keeps_how_it_chose(cli: Cli, model: Path, calib: Path, tmp_path: Path) -> None:
    out, report = tmp_path / "net.engine", tmp_path / "how.html"
    quickly = ("--tactics", "onnxruntime", "--candidates", "int8")
    result = build(cli, model, calib, out, "--precision-report", report, "--pin", "conv2=fp32", *quickly)
    assert result.code == 0, result.err
    assert "precision: the plans that were tried" in result.out
    assert "chosen" in result.out
    assert "cosine distance" in result.out  # the unit of the bound
    assert "8 samples to calibrate and search on, 8 others to verify by" in result.out
    text = report.read_text(encoding="utf-8")
    assert "<svg" in text
    assert "<script" not in text

    shown = cli("inspect", out)
    assert "pinned by --pin conv2=fp32" in shown.out
    facts = json.loads(cli("inspect", out, "--json").out)["auto"]
    assert facts["met"]
    row = next(c for c in facts["candidates"] if c["name"] == facts["chosen"])
    assert row["within"]
    assert {c["name"] for c in facts["candidates"]} >= {"fp32", "int8"}

    reported = cli("explain", out, "conv2")
    assert reported.code == 0
    assert "precision fp32: pinned by --pin conv2=fp32" in reported.out
    assert "fuse_conv_bn" in reported.out
    assert "runs in step 0" in reported.out
    assert "for the network as a whole" in reported.out
    (fact,) = json.loads(cli("explain", out, "conv1", "--json").out)
    assert fact["precision"]["account"]["us"]
    assert {"bn1"} <= {n for entry in fact["made"] for n in entry["with"]}


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_with_its_caches_a_build_repeats_to_the_byte(cli: Cli, model: Path, calib: Path, tmp_path: Path) -> None:
    caches = ("--timing-cache", tmp_path / "t.json", "--calib-cache", tmp_path / "c.json", "--tactics", "onnxruntime")
    for name in ("first", "second"):
        result = build(cli, model, calib, tmp_path / name, *caches)
        assert result.code == 0, result.err
    assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes()
    assert (tmp_path / "c.sensitivity.json").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_the_account_as_markdown_escapes_names(cli: Cli, calib: Path, tmp_path: Path) -> None:
    from support.onnxnet import HOSTILE, save_convnet

    hostile = save_convnet(tmp_path / "net.onnx", batch="N", names=HOSTILE)
    result = build(
        cli, hostile, calib, tmp_path / "e", "--precision-report", tmp_path / "how.md", "--tactics", "onnxruntime"
    )
    assert result.code == 0, result.err
    text = (tmp_path / "how.md").read_text(encoding="utf-8")
    assert text.startswith("# Automatic precision: net.onnx")
    assert "<script>" not in text
    assert "\x1b" not in text


def test_a_pin_that_matches_nothing_names_similar_nodes(cli: Cli, model: Path, calib: Path, tmp_path: Path) -> None:
    result = build(cli, model, calib, tmp_path / "e", "--pin", "cnv2=fp32")
    assert result.code == 2
    assert "'conv2'" in result.err
    assert not (tmp_path / "e").exists()
    other = cli("build", model, "-o", tmp_path / "e", "--target", "cpu", "--pin", "zzz*=fp32")
    assert other.code == 2
    assert "not one of the model's node names" in other.err


@pytest.mark.usefixtures("quick")
def test_a_metric_that_raises_leaves_nothing_behind(
    cli: Cli, model: Path, calib: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_metric_b.py").write_text("def f(outputs, labels):\n    raise KeyError('boxes')\n")
    monkeypatch.chdir(tmp_path)
    result = build(cli, model, calib, tmp_path / "e", "--metric", "my_metric_b:f")
    assert result.code == 6
    assert "my_metric_b:f raised KeyError" in result.err
    assert not (tmp_path / "e").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_a_bound_that_cannot_be_met_names_the_closest_plan_and_writes_nothing(
    cli: Cli, model: Path, calib: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "calls = [0]\ndef f(outputs, labels):\n    calls[0] -= 1\n    return calls[0]\n"  # worse from call to call
    (tmp_path / "my_metric_c.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    result = build(cli, model, calib, tmp_path / "e", "--metric", "my_metric_c:f", "--tactics", "onnxruntime")
    assert result.code == 7
    assert "the closest is" in result.err
    assert "--max-drop" in result.err
    assert not list(tmp_path.glob("e*"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--precision", "auto"), "needs data"),
        (("--max-drop", "1"), "is for precision auto"),
        (("--candidates", "bf16"), "is for precision auto"),
        (("--precision", "auto", "--calib", "CALIB", "--candidates", "bf16,fp12"), "candidate 'fp12' is not one of"),
        (("--precision", "auto", "--calib", "CALIB", "--candidates", "fp16"), "fp16 is for GPUs"),
        (("--precision-report", "how.html"), "precision auto"),
        (("--precision", "auto", "--calib", "CALIB", "--metric", "f1"), "not one of top1"),
        (("--precision", "auto", "--calib", "CALIB", "--metric", "mse"), "no usual bound"),
        (("--precision", "auto", "--calib", "CALIB", "--precision-report", "how.txt"), "neither .html nor .md"),
    ],
)
def test_usage(cli: Cli, model: Path, calib: Path, tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    given = [str(calib) if o == "CALIB" else o for o in options]
    result = cli("build", model, "-o", tmp_path / "e", "--target", "cpu", *given)
    assert result.code == 2
    assert message in result.err
    assert not (tmp_path / "e").exists()


def test_explain_of_an_unknown_node_or_a_file_that_is_no_engine(cli: Cli, model: Path, engine: Path) -> None:
    result = cli("explain", engine, "conv9")
    assert result.code == 2
    assert "did you mean 'conv" in result.err
    assert cli("explain", model, "conv1").code == 2
    reported = cli("explain", engine, "bn*")
    assert reported.out.count("fuse_conv_bn") == 2
    assert "precision: the engine's, fp32" in reported.out


def test_inspect_lists_names_of_nodes(cli: Cli, model: Path) -> None:
    assert "conv2" in cli("inspect", model, "--nodes").out


def test_explain_shows_each_nodes_precision_without_auto(cli: Cli, model: Path, calib: Path, tmp_path: Path) -> None:
    names = [n.name for n in onnx.load(model).graph.node if n.op_type in ("Conv", "Gemm")]
    out = tmp_path / "mixed.engine"
    options = ("--target", "simulate", "--precision", "int8+fp16", "--calib", calib, "--shape", "x=4x3x8x8")
    built = cli("build", model, "-o", out, *options, "--strict-precision", "--pin", f"{names[0]}=fp32")
    assert built.code == 0, built.err
    pinned, asked = cli("explain", out, names[0]), cli("explain", out, names[-1])
    assert (pinned.code, asked.code) == (0, 0), pinned.err + asked.err
    assert "\n  precision fp32: pinned\n" in pinned.out
    assert "\n  precision int8: as asked of the whole network\n" in asked.out
    assert "\n  tactic " in asked.out
    plain = json.loads(cli("explain", out, names[0], "--json").out)
    assert (plain[0]["precision"]["node"], plain[0]["precision"]["reason"]) == ("fp32", "pinned")
