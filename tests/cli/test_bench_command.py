"""``bench``: sizes, concurrent calls, percentiles, layers; and ``build --bench``."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import onnx
import pytest
from support import small_models
from support.cli import Cli
from support.needs import needs_libraries

import optdnn
from optdnn.cli.bench import command as bench_command
from optdnn.cli.bench_tables import SHOWN_LAYERS, show_layers
from optdnn.cli.words import precision_text, runs_on

QUICK = ("--iterations", 3, "--warmup", 1)


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A network over batches and lengths, built for each CPU library."""
    needs_libraries()
    folder = tmp_path_factory.mktemp("bench")
    x = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["N", "L", 8])
    y = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)
    nodes = [
        onnx.helper.make_node("MatMul", ["x", "w"], ["a"], name="product"),
        onnx.helper.make_node("Softmax", ["a"], ["b"], name="softmax"),
        onnx.helper.make_node("ReduceMean", ["b"], ["y"], name="mean", axes=[1]),
    ]
    w = onnx.helper.make_tensor("w", onnx.TensorProto.FLOAT, [8, 8], [0.1 * (k % 7) for k in range(64)])
    graph = onnx.helper.make_graph(nodes, "lengths", [x], [y], [w])
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)]), folder / "m.onnx")
    found = {"model": folder / "m.onnx"}
    for library in ("openvino", "onnxruntime"):
        found[library] = folder / f"{library}.engine"
        optdnn.build(folder / "m.onnx", target="cpu", tactics=library, threads=1).save(found[library])
    return found


def test_it_measures_at_the_sizes_of_the_build(cli: Cli, on_cpu: dict[str, Path]) -> None:
    code, out, err = cli("bench", on_cpu["onnxruntime"], *QUICK)
    assert code == 0
    assert "inputs x [1, 32, 8] (N=1, L=32)" in out
    assert "random inputs (seed 0): x: fp32[1, 32, 8]" in err
    report = json.loads(cli("bench", on_cpu["onnxruntime"], *QUICK, "--json", "--size", "L=5").out)
    assert (report["sizes"], report["inputs"], report["outputs"]) == (
        {"N": 1, "L": 5},
        {"x": [1, 5, 8]},
        {"y": [1, 1, 8]},
    )


def test_a_profile_comes_before_the_sizes_of_the_build(cli: Cli, on_cpu: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "ranges.engine"
    shapes = {"x": "1..4..8x1..7..64x8"}
    optdnn.build(on_cpu["model"], target="cpu", tactics="onnxruntime", threads=1, shapes=shapes).save(path)
    assert json.loads(cli("bench", path, *QUICK, "--json").out)["sizes"] == {"N": 4, "L": 7}


@pytest.mark.parametrize("library", ["openvino", "onnxruntime"])
def test_layers_of_a_cpu_library(cli: Cli, on_cpu: dict[str, Path], library: str) -> None:
    report = json.loads(cli("bench", on_cpu[library], *QUICK, "--size", "N=64", "--profile", "--json").out)
    (step,), layers = report["profile"], report["layers"]
    named = {n for x in layers for n in ("product", "softmax", "mean") if n in x["name"]}
    assert "product" in named
    assert len(named) > 1
    assert all(x["kind"] for x in layers)
    assert sum(x["median_ms"] for x in layers) == pytest.approx(step["median_ms"], rel=1e-3)
    assert [x["median_ms"] for x in layers] == sorted((x["median_ms"] for x in layers), reverse=True)
    assert "layers, by the library's counters" in cli("bench", on_cpu[library], *QUICK, "--profile").out


def test_many_layers_are_summed_up(capsys: pytest.CaptureFixture[str]) -> None:
    layer = {"step": 0, "name": "n", "kind": "k", "median_ms": 1.0, "share": 0.01}
    show_layers([layer] * (SHOWN_LAYERS + 5))
    assert "and 5 more, 5.0% together" in capsys.readouterr().out


def test_several_calls_at_once(cli: Cli, engine: Path) -> None:
    argv = ("bench", engine, *QUICK, "--streams", 2, "--instances", 3)
    code, out, _ = cli(*argv)
    assert code == 0
    assert "at once: 3 instances with 2 streams each" in out
    report = json.loads(cli(*argv, "--json").out)
    assert report["concurrency"] == {"instances": 3, "streams": 2}
    assert report["iterations"] == 3 * 2 * 3
    assert report["throughput_per_s"] > 0


def test_instances_share_the_cores(cli: Cli, on_cpu: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optdnn.runtime.measuring.machine.usable_cores", lambda: 6)
    argv = ("bench", on_cpu["onnxruntime"], *QUICK, "--json")
    for more, threads in (((), 1), (("--instances", 2), 3), (("--instances", 2, "--threads", 2), 2)):
        assert json.loads(cli(*argv, *more).out)["facts"][0]["threads"] == threads


def test_requested_percentiles(cli: Cli, engine: Path) -> None:
    latency = json.loads(cli("bench", engine, *QUICK, "--percentile", 99.9, "--percentile", 10, "--json").out)[
        "latency_ms"
    ]
    assert list(latency)[-2:] == ["p99.9", "p10"]
    assert latency["min"] <= latency["p10"] <= latency["median"] <= latency["p99.9"] <= latency["max"]
    assert cli("bench", engine, "--percentile", 101).code == 2


def test_build_and_bench_in_one(cli: Cli, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optdnn.cli.build.BENCH_SECONDS", 0.02)
    argv = ("build", model, "-o", tmp_path / "e", "--target", "reference", "--bench")
    out = cli(*argv).out
    assert "ms a run (" in out
    assert "inputs x [1, 3, 8, 8]" in out
    found = json.loads(cli(*argv, "--json").out)["bench"]
    assert found["latency_ms"]["median"] > 0


def test_an_engine_for_elsewhere_cannot_be_measured(cli: Cli, model: Path, tmp_path: Path) -> None:
    argv = ["build", model, "-o", tmp_path / "e", "--target", "cuda:sm_90a", "--no-cubins", "--tactics", "heuristic"]
    argv += ["--shape", "x=1x3x8x8"]
    code, out, _ = cli(*argv)
    assert code == 0
    assert "not measured: cuda:sm_90a does not run here" in out
    assert "not measured (the cost model chose)" in out  # and no advice to measure here
    assert f"optdnn run {tmp_path / 'e'} --simulate" in out
    code, _, err = cli(*argv, "--bench")
    assert code == 6
    assert "is written, but cannot be measured" in err


def test_the_precision_of_a_model_with_q_and_dq(cli: Cli, tmp_path: Path) -> None:
    path = small_models.save(small_models.quantized(), tmp_path)
    text = "int8 (Q/DQ of the model), fp32 elsewhere"
    assert f"precision  {text}" in cli("build", path, "--target", "simulate").out
    engine = path.with_suffix(".engine")
    assert f"precision {text}" in cli("bench", engine, *QUICK).out
    assert json.loads(cli("inspect", engine, "--json").out)["precision_text"] == text


def test_the_words_for_a_precision() -> None:
    quantized = {"passes": [{"kinds_before": {"QuantizeLinear": 2, "Conv": 1}}]}
    assert precision_text("fp32", {}) == "fp32"
    assert precision_text("int8+fp16", quantized) == "int8+fp16"
    assert precision_text("fp32", quantized) == "fp32 (the Q/DQ of the model stay)"
    assert precision_text("fp16", {**quantized, "precision": {"runs": {"fp8": 3}}}).startswith(
        "fp8 (Q/DQ of the model)"
    )
    integers = {"passes": [{"kinds_before": {"ConvInteger": 1}}]}
    assert precision_text("fp32", integers) == "int8 (Q/DQ of the model), fp32 elsewhere"


def test_bench_has_no_build_options() -> None:
    assert "--precision" not in {o for p in bench_command.params for o in p.opts}


def test_the_kernels_of_an_engine_add_up() -> None:
    tactics = ["a 1", "a 2", "b", "c", "d", "e", "f"]
    steps = [SimpleNamespace(executor="cuda", params={"tactic": name}) for name in tactics]
    said = runs_on(SimpleNamespace(meta={}, steps=steps))
    assert said == "7 GPU kernels (2 a, 1 b, 1 c, 1 d, 2 others)"
