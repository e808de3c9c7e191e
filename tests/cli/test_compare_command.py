"""The command ``compare``: tables, files, rivals, bounds and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from support.cli import Cli, libraries, strict
from support.onnxnet import convnet, save_convnet

import optdnn
from optdnn.cli.main import run

Facts = dict[str, Any]


@pytest.fixture(scope="module")
def raced(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Facts:
    """The report of one real race on given inputs."""
    folder = tmp_path_factory.mktemp("raced")
    np.save(folder / "x.npy", np.ones((3, 3, 8, 8), np.float32))
    argv = ["compare", model, "--target", "reference", "--against", "reference", "--rounds", 3, "--duration", 0.03]
    argv += ["--layers", "--input", f"x={folder / 'x.npy'}", "--json", folder / "raced.json"]
    assert run([str(a) for a in argv]) == 0
    found: Facts = strict((folder / "raced.json").read_text())
    return found


@pytest.mark.slow
@libraries
def test_compare_as_a_table_and_as_files(cli: Cli, model: Path, tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    files = {form: tmp_path / f"r.{form}" for form in ("html", "markdown", "json")}
    argv = [a for form, path in files.items() for a in (f"--{form}", path)]
    code, out, err = cli(
        *("compare", model, "--against", "onnxruntime,openvino", "--threads", 1, "--rounds", 3, "--duration", 0.06),
        *("--size", "N=2", "--layers", "--bisect", "--max-error", "1e-4", *argv),
    )
    assert code == 0
    assert sorted(err.splitlines()) == sorted(
        f"written: {p}" for p in files.values()
    )  # no progress where there is no terminal
    lines = out.splitlines()
    assert lines[0].split()[:4] == ["median", "ms", "p99", "ms"]
    assert "speedup over onnxruntime" in lines[0]
    assert [line.split()[0] for line in lines[1:4]] == ["optdnn", "onnxruntime", "openvino"]
    assert "errors: against the model in NumPy, float64" in out
    assert "bisect: no node is beyond 0.0001" in out
    assert "bn1 + conv1 + relu1" in out
    report = strict(files["json"].read_text())
    keys = {"name", "median_ms", "p99_ms", "throughput_per_s", "speedup", "max_abs_err", "max_rel_err"}
    for row in report["rows"]:
        assert keys <= set(row)
        assert 0 < row["max_rel_err"] < 1e-5 < report["input_difference"]
    assert (report["speedup_reference"], report["error_reference"]) == ("onnxruntime", "the model in NumPy, float64")
    assert report["threads"] == 1
    assert [f["threads"] for f in report["rows"][0]["facts"]["steps"]] == [1]
    assert report["inputs"] == {"x": {"dtype": "float32", "shape": [2, 3, 8, 8]}}
    assert report["command"].startswith("optdnn compare ")
    assert {"machine", "versions"} <= set(report)
    assert "<svg" in files["html"].read_text()
    assert "| optdnn |" in files["markdown"].read_text()


@pytest.mark.slow
def test_compare_engines_without_their_model(cli: Cli, engine: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.engine"
    other.write_bytes(engine.read_bytes())
    argv = ["compare", engine, "--against", other, "--rounds", 3, "--duration", 0.03, "--threads", 1, "--json", "-"]
    code, out, err = cli(*argv)
    assert (code, err) == (0, "")
    report = strict(out)
    assert [r["name"] for r in report["rows"]] == ["net.engine", "other.engine"]
    assert report["rows"][1]["max_abs_err"] == 0
    assert report["error_reference"] == "other.engine"
    assert report["model"] is None
    code, _, err = cli(*argv, "--layers")
    assert code == 2
    assert "--layers and --bisect need the ONNX model" in err
    code, _, err = cli("compare", engine, "--against", "reference")
    assert code == 2
    assert "reference needs the ONNX model" in err
    assert "--model FILE" in err


def test_engines_of_two_networks_are_not_raced(cli: Cli, engine: Path, tmp_path: Path) -> None:
    other = convnet()
    other.graph.input[0].name = other.graph.node[0].input[0] = "picture"
    optdnn.build(other, target="reference").save(tmp_path / "other.engine")
    for words, theirs, own in (
        ((tmp_path / "other.engine", engine), "x", "picture"),
        ((engine, tmp_path / "other.engine"), "picture", "x"),
    ):
        code, out, err = cli("compare", *words)
        assert (code, out) == (2, "")
        assert "is an engine of another network: its inputs are " in err
        assert {theirs, own} <= set(err.replace(",", " ").split())


@pytest.mark.slow
def test_compare_an_engine_with_its_model(cli: Cli, engine: Path, model: Path, tmp_path: Path) -> None:
    argv = ["compare", engine, "--against", "reference", "--rounds", 3, "--duration", 0.03, "--threads", 1]
    code, out, _ = cli(*argv, "--model", model, "--bisect", "--json", "-", "--size", "N=2")
    assert code == 0
    report = strict(out)
    assert report["bisect"]["first"] is None
    assert {d["value"] for d in report["layers"]} >= {"relu1_out", "y"}
    assert report["rows"][0]["max_rel_err"] < 1e-5
    other = save_convnet(tmp_path / "wider.onnx", batch="N", channels=4)
    code, _, err = cli(*argv, "--model", other, "--layers")
    assert code == 2
    assert "is not what" in err
    renamed = convnet(batch="N")
    renamed.graph.output[0].name = renamed.graph.node[-1].output[0] = "z"
    onnx.save(renamed, tmp_path / "renamed.onnx")
    code, _, err = cli(*argv, "--model", tmp_path / "renamed.onnx")
    assert code == 2
    assert "its outputs z, the engine has x and y" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--against", "tensorrt"],
            "--against 'tensorrt' is not one of onnxruntime, openvino, own, cudnn, onnxruntime-cuda, reference, and",
        ),
        (["--against", "onnxruntim:fp32"], "did you mean 'onnxruntime'?"),
        (["--against", "onnxruntime:bf16"], "onnxruntime has no precision bf16"),
        (["--against", ","], "there is nothing to compare with"),
        (["--against", "reference,reference"], "candidates need different names"),
        (["--against", "reference", "--baseline", "x"], "'x' is not one of the candidates optdnn, reference"),
        (["--against", "reference", "--error-reference", "x"], "'x' is not one of the candidates optdnn, reference"),
        (["--against", "reference", "--model", "m.onnx"], "--model is for an ENGINE"),
        (["--against", "reference", "--size", "M=2"], "no input has a dimension M; there are N"),
        (["--against", "reference", "--size", "N"], "--size 'N' is not NAME=N"),
    ],
)
def test_compare_refuses_wrong_options(cli: Cli, model: Path, options: list[str], message: str) -> None:
    code, out, err = cli("compare", model, "--target", "reference", "--rounds", 1, "--duration", 0.01, *options)
    assert (code, out) == (2, "")
    assert message in err


def test_compare_names_the_absent_library(cli: Cli, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optdnn.compare.rivals.find_spec", lambda name: None)
    for against in (["--against", "openvino"], []):
        code, _, err = cli("compare", model, *against)
        assert code == 8
        assert "pip install 'optdnn[cpu]'" in err


@pytest.mark.slow
@libraries
def test_by_default_the_installed_libraries_are_compared(
    cli: Cli, model: Path, raced: Facts, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = {"onnxruntime"}
    seen = []

    def compared(ctx: object, file: object, engine: object, rivals: list[str], *rest: object) -> tuple[Facts, None]:
        seen.append(rivals)
        return raced, None

    monkeypatch.setattr("optdnn.compare.rivals.find_spec", lambda name: name if name in there else None)
    monkeypatch.setattr("optdnn.cli.compare._compared", compared)
    assert cli("compare", model, "--target", "reference").code == 0
    there.add("openvino")
    assert cli("compare", model, "--target", "reference").code == 0
    assert seen == [["onnxruntime"], ["onnxruntime", "openvino"]]


def test_build_options_do_not_go_with_an_engine(cli: Cli, engine: Path) -> None:
    code, _, err = cli("compare", engine, "--against", engine, "--precision", "bf16")
    assert code == 2
    assert "--precision is for building a MODEL" in err


@pytest.mark.parametrize(
    ("bound", "message"),
    [(["--max-error", "0"], "not within 0"), (["--min-speedup", "1e6"], "times as fast as reference, not 1e+06")],
)
def test_a_bound_that_is_missed_is_exit_code_7(
    cli: Cli, model: Path, raced: Facts, bound: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("optdnn.cli.compare._compared", lambda *given: (raced, None))
    code, out, err = cli("compare", model, "--target", "reference", "--against", "reference", *bound)
    assert code == 7
    assert message in err
    assert "median ms" in out  # the result is shown nevertheless


def test_compare_given_inputs(cli: Cli, model: Path, raced: Facts, tmp_path: Path) -> None:
    assert (raced["inputs"]["x"]["shape"], raced["inputs_from"]) == ([3, 3, 8, 8], "files")
    argv = ["compare", model, "--target", "reference", "--against", "reference", "--rounds", 1, "--duration", 0.01]
    np.save(tmp_path / "x.npy", np.ones((3, 3, 9, 8), np.float32))
    code, out, err = cli(*argv, "--input", f"x={tmp_path / 'x.npy'}")
    assert (code, out) == (6, "")
    assert "axis 2 is 9 instead of 8" in err


@pytest.mark.slow
def test_a_rival_that_fails_is_a_row(cli: Cli, model: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.engine"
    bad.write_bytes(b"not an engine at all")
    argv = ["compare", model, "--target", "reference", "--against", bad, "--rounds", 1, "--duration", 0.01]
    code, out, _ = cli(*argv, "--json", tmp_path / "r.json")
    assert code == 0
    assert "EngineError: " in out
    row = strict((tmp_path / "r.json").read_text())["rows"][1]
    assert row["median_ms"] is None
    assert row["error"].startswith("EngineError: ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--torch", "nets:make"], "--torch is for comparisons on a GPU; the target is reference"),
        (["--torch-compile"], "--torch-compile needs --torch"),
        (["--against", "own"], "own is a rival on a GPU; the engine is for reference"),
    ],
)
def test_compare_refuses_rivals_of_a_gpu_elsewhere(cli: Cli, model: Path, options: list[str], message: str) -> None:
    code, _, err = cli("compare", model, "--target", "reference", "--rounds", 1, "--duration", 0.01, *options)
    assert code == 2
    assert message in err


def test_a_layer_of_a_divergence_is_one_line(
    cli: Cli, model: Path, raced: Facts, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = {**raced, "layers": [{**x, "node": "/a/very/long/name" * 20} for x in raced["layers"]]}
    monkeypatch.setattr("optdnn.cli.compare._compared", lambda *given: (long, None))
    for name, value in (("_force_terminal", True), ("_width", 80), ("_height", 25), ("_color_system", None)):
        monkeypatch.setattr(f"optdnn.cli.common.stdout.{name}", value)
    out = cli("compare", model, "--target", "reference", "--against", "reference", "--layers").out
    table = out[out.index("divergence, worst first") :].splitlines()[2:]
    assert len([line for line in table if line.strip()]) == len(raced["layers"])
    assert all("…" in line and len(line) <= 80 for line in table[: len(raced["layers"])])
