"""Each command: what it prints where, its files, its exit codes."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from support import small_models
from support.cli import Cli
from support.onnxnet import convnet, save_convnet

import optdnn
from optdnn.cli.main import COMMANDS, run
from optdnn.errors import EXIT_CODES, EngineError

Facts = dict[str, Any]
ROOT = Path(__file__).parents[2]
libraries = pytest.mark.usefixtures("_libraries")


@pytest.fixture
def _libraries() -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("openvino")


def strict(text: str) -> Any:
    """JSON as the standard has it: no NaN, no Infinity."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


# ---------------------------------------------------------------- the group


def test_help_lists_every_command_and_exit_code(cli: Cli) -> None:
    code, out, err = cli("--help")
    assert (code, err) == (0, "")
    for name, line in COMMANDS.items():
        assert name in out
        assert line.split(":")[0][:40] in out
    for number in EXIT_CODES:
        assert f"\n  {number} " in out


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_has_help(cli: Cli, name: str) -> None:
    code, out, err = cli(name, "--help")
    assert (code, err) == (0, "")
    assert f"Usage: optdnn {name}" in out


def test_version(cli: Cli) -> None:
    assert cli("--version")[:2] == (0, f"optdnn, version {optdnn.__version__}\n")


@pytest.mark.parametrize(
    "argv", [["nothing"], ["build"], ["build", "--nothing"], ["run", "a", "b"], ["build", "m.onnx", "-O", "7"]]
)
def test_usage_errors(cli: Cli, argv: list[str]) -> None:
    code, out, err = cli(*argv)
    assert (code, out) == (2, "")
    assert "Error:" in err


def test_help_is_quick_and_loads_nothing_heavy() -> None:
    program = """
import sys, time
start = time.process_time()
from optdnn.cli.main import run
run(["--help"])
print(time.process_time() - start, [m for m in ("numpy", "onnx", "networkx", "rich", "onnxruntime") if m in sys.modules])
"""
    runs = [
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
        for _ in range(2)
    ]
    seconds, _, loaded = runs[0].stdout.splitlines()[-1].partition(" ")
    assert loaded == "[]"
    assert min(float(r.stdout.splitlines()[-1].split()[0]) for r in runs) < 0.4
    assert float(seconds) > 0


# ---------------------------------------------------------------- build


@libraries
def test_build_writes_an_engine_and_its_report(cli: Cli, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "net.engine"
    code, text, err = cli("build", model, "-o", out, "--threads", 1)
    assert (code, err) == (0, "")
    told = dict(line.split(maxsplit=1) for line in text.splitlines() if line[:1] not in ("", " "))
    assert list(told) == ["model", "inputs", "outputs", "engine", "precision", "runs", "error", "speed", "time", "next"]
    assert told["inputs"].startswith("x: fp32[N, 3, 8, 8]; measured at N=1")
    assert told["engine"].startswith(f"{out} (")
    assert "fuse_conv_bn" not in text, "passes are told by -v"
    assert float(told["error"].split()[0]) < 1e-5
    assert "it beat " in told["speed"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["net.engine", "net.engine.report.json"]
    report = strict((tmp_path / "net.engine.report.json").read_text())
    assert {"passes", "tactics", "seconds", "machine", "versions", "executed"} <= set(report)
    fused = next(p for p in report["passes"] if p["name"] == "fuse_conv_bn")
    assert [f["nodes"] for f in fused["fired"]] == [["bn1", "conv1"], ["bn2", "conv2"]]
    x = np.ones((2, 3, 8, 8), np.float32)
    np.testing.assert_allclose(optdnn.load(out)(x), optdnn.build(model, target="reference")(x), rtol=1e-4, atol=1e-5)


def test_run_says_whether_the_code_in_a_file_is_trusted(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def load(path: Path, **options: Any) -> Any:
        seen.append(options["trust_cubins"])
        raise EngineError("seen")

    monkeypatch.setattr(optdnn, "load", load)
    (tmp_path / "e.engine").write_bytes(b"")
    for command in ("run", "verify"):
        for more in ((), ("--trust-cubins",)):
            assert cli(command, str(tmp_path / "e.engine"), *more).code == EngineError.exit_code
    assert seen == [False, True] * 2


def test_the_engine_goes_beside_the_model(cli: Cli, tmp_path: Path) -> None:
    model = save_convnet(tmp_path / "net.onnx")
    assert cli("build", model, "--target", "reference").code == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["net.engine", "net.engine.report.json", "net.onnx"]


def test_build_as_json(cli: Cli, model: Path, tmp_path: Path) -> None:
    code, text, err = cli("build", model, "-o", tmp_path / "e", "--target", "reference", "--json")
    assert (code, err) == (0, "")
    facts = strict(text)
    assert facts["engine"] == str(tmp_path / "e")
    assert facts["options"]["target"] == "reference"
    assert facts["operators"] == {"Conv": 2, "Flatten": 1, "Gemm": 1, "GlobalAveragePool": 1}


def test_verbose_names_fusions_and_refusals(cli: Cli, tmp_path: Path) -> None:
    proto = convnet()
    proto.graph.output.append(helper.make_tensor_value_info("conv1_out", TensorProto.FLOAT, [1, 8, 8, 8]))
    onnx.save(proto, tmp_path / "m.onnx")
    text = cli("build", tmp_path / "m.onnx", "--target", "reference", "-v").out
    assert "  fuse_conv_bn/conv_bn: bn2 + conv2\n" in text
    assert "  fuse_conv_bn/conv_bn not at conv1: the result of conv1 is an output of the network\n" in text


def test_dumps_are_numbered_and_stop_after_stops(cli: Cli, model: Path, tmp_path: Path) -> None:
    argv = ["build", model, "-o", tmp_path / "e", "--target", "reference", "--dump", tmp_path / "dumps" / "here"]
    assert cli(*argv, "--stop-after", "fuse_conv_bn").code == 0
    names = sorted(p.name for p in (tmp_path / "dumps" / "here").iterdir())
    assert names[0] == "00-import.txt"
    assert names[-1].endswith("-fuse_conv_bn.txt")
    assert [int(n[:2]) for n in names] == list(range(len(names)))
    assert "BatchNormalization" in (tmp_path / "dumps" / "here" / names[0]).read_text()
    assert "BatchNormalization" not in (tmp_path / "dumps" / "here" / names[-1]).read_text()
    meta = optdnn.load(tmp_path / "e").meta
    assert meta["operators"]["Relu"] == 2  # epilogues come later
    assert "BatchNormalization" not in meta["operators"]


def test_an_unknown_pass_is_named_with_all_that_exist(cli: Cli, model: Path, tmp_path: Path) -> None:
    code, out, err = cli("build", model, "-o", tmp_path / "e", "--target", "reference", "--stop-after", "fuse_all")
    assert (code, out) == (2, "")
    assert "there is no pass 'fuse_all' at -O3" in err
    assert "fuse_conv_bn" in err
    assert not list(tmp_path.iterdir())


@libraries
def test_the_emitted_model_runs_in_onnxruntime(cli: Cli, model: Path, tmp_path: Path) -> None:
    import onnxruntime

    out = tmp_path / "optimized.onnx"
    assert cli("build", model, "-o", tmp_path / "e", "--target", "reference", "--emit-onnx", out).code == 0
    assert "BatchNormalization" not in [n.op_type for n in onnx.load(out).graph.node]
    x = np.random.default_rng(0).standard_normal((3, 3, 8, 8)).astype(np.float32)
    sessions = [onnxruntime.InferenceSession(f, providers=["CPUExecutionProvider"]) for f in (model, out)]
    want, got = (s.run(["y"], {"x": x})[0] for s in sessions)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@libraries
def test_the_same_timing_cache_gives_the_same_bytes(cli: Cli, model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "times.json"
    for name in "ab":
        argv = ["build", model, "-o", tmp_path / name, "--timing-cache", cache, "--threads", 1]
        assert cli(*argv, "--no-check").code == 0
    a, b = ((tmp_path / n).read_bytes() for n in "ab")
    assert a == b
    tactics = strict((tmp_path / "b.report.json").read_text())["tactics"]
    assert all(t.get("cached") for t in tactics if "median_ms" in t)
    assert strict(cache.read_text())["format"] == "optdnn-timing-cache"
    argv = ["build", model, "-o", tmp_path / "d", "--timing-cache", cache, "--threads", 1, "--no-check"]
    assert cli(*argv, "-O", 1, "--tactics", "onnxruntime").code == 0
    assert (tmp_path / "d").read_bytes() != a


@libraries
def test_a_pinned_library_and_converted_borders(cli: Cli, model: Path, tmp_path: Path) -> None:
    argv = ["build", model, "-o", tmp_path / "e", "--threads", "1", "--io-dtype", "fp16", "--shape", "x=2x3x8x8"]
    for library in ("openvino", "onnxruntime"):
        assert cli(*argv, "--tactics", library).code == 0
        engine = optdnn.load(tmp_path / "e")
        assert engine.meta["tactic"]["library"] == library
        assert [str(s) for s in engine.inputs] == ["x: fp16[2, 3, 8, 8]"]


# ---------------------------------------------------------------- run


def test_run_on_given_inputs_writes_the_outputs(cli: Cli, engine: Path, tmp_path: Path) -> None:
    x = np.random.default_rng(1).standard_normal((4, 3, 8, 8)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    np.savez(tmp_path / "x.npz", x=x)
    want = optdnn.load(engine)(x)
    for given in (f"x={tmp_path / 'x.npy'}", tmp_path / "x.npz", f"x={tmp_path / 'x.npz'}"):
        code, out, err = cli("run", engine, "--input", given, "--output", tmp_path / "result")
        assert (code, err) == (0, "")
        assert "[4, 5]" in out
        np.testing.assert_array_equal(np.load(tmp_path / "result")["y"], want)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["result", "x.npy", "x.npz"]


def test_run_says_where_inputs_are_random(cli: Cli, engine: Path, tmp_path: Path) -> None:
    results = []
    for seed in (0, 0, 1):
        code, _, err = cli("run", engine, "--seed", seed, "--size", "N=2", "--output", tmp_path / "y.npz")
        assert code == 0
        assert err == f"random inputs (seed {seed}): x: fp32[N, 3, 8, 8]\n"
        results.append(np.load(tmp_path / "y.npz")["y"])
    assert results[0].shape == (2, 5)
    np.testing.assert_array_equal(results[0], results[1])
    assert not np.array_equal(results[0], results[2])


def test_run_tells_scripts_what_came_out(cli: Cli, engine: Path, tmp_path: Path) -> None:
    x = np.random.default_rng(1).standard_normal((4, 3, 8, 8)).astype(np.float32)
    for given, finite in ((x, True), (np.full_like(x, np.nan), False)):
        np.save(tmp_path / "x.npy", given)
        code, out, err = cli("run", engine, "--input", f"x={tmp_path / 'x.npy'}", "--json")
        assert (code, err) == (0, "")
        found, want = strict(out), optdnn.load(engine)(given)
        assert found["random_inputs"] == []
        y = found["outputs"]["y"]
        assert (y["dtype"], y["shape"]) == ("fp32", [4, 5])
        assert y["mean"] == (pytest.approx(float(want.mean()), rel=1e-5) if finite else None)
    code, out, err = cli("run", engine, "--json", "--size", "N=2")
    assert strict(out)["random_inputs"] == ["x"]
    assert "random inputs" in err


def test_bfloat16_arrays_survive_files(cli: Cli, model: Path, tmp_path: Path) -> None:
    assert cli("build", model, "-o", tmp_path / "e", "--target", "reference", "--io-dtype", "bf16").code == 0
    x = np.ones((1, 3, 8, 8), ml_dtypes.bfloat16)
    np.save(tmp_path / "x.npy", x)
    assert cli("run", tmp_path / "e", "--input", f"x={tmp_path / 'x.npy'}", "--output", tmp_path / "y.npz").code == 0
    y = np.load(tmp_path / "y.npz")["y"].view(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(y, optdnn.load(tmp_path / "e")(x))


def test_an_output_may_have_any_name(cli: Cli, tmp_path: Path) -> None:
    nodes = [helper.make_node("Relu", ["x"], ["file"]), helper.make_node("Neg", ["x"], ["a/b [red]:c"])]
    ports = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [2]) for n in ("x", "file", "a/b [red]:c")]
    graph = helper.make_graph(nodes, "g", ports[:1], ports[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), tmp_path / "m.onnx")
    assert cli("build", tmp_path / "m.onnx", "--target", "reference").code == 0
    code, out, _ = cli("run", tmp_path / "m.engine", "--output", tmp_path / "y.npz")
    assert code == 0
    assert "a/b [red]:c" in out
    assert np.load(tmp_path / "y.npz").files == ["file", "a/b [red]:c"]


# ---------------------------------------------------------------- bench


def test_bench_as_a_table(cli: Cli, engine: Path) -> None:
    code, out, err = cli("bench", engine, "--iterations", 20, "--warmup", 1, "--profile")
    assert code == 0
    assert "random inputs: x fp32[1, 3, 8, 8]" in err
    assert "inputs x [1, 3, 8, 8] (N=1)" in out
    assert "median" in out
    assert "conv1" in out


def test_bench_as_json_keeps_the_contract(cli: Cli, engine: Path) -> None:
    report = strict(cli("bench", engine, "--iterations", 5, "--size", "N=2", "--json").out)
    assert list(report["latency_ms"]) == ["min", "mean", "median", "p90", "p95", "p99", "max"]
    assert {"throughput_per_s", "target", "precision", "machine", "versions"} <= set(report)
    assert (report["target"], report["precision"], report["iterations"]) == ("reference", "fp32", 5)
    assert report["inputs"] == {"x": [2, 3, 8, 8]}


# ---------------------------------------------------------------- inspect, check, env


def test_inspect_an_engine_for_ranges_of_shapes(cli: Cli, tmp_path: Path) -> None:
    save_convnet(tmp_path / "m.onnx", batch="n")
    shape = "x=1..2..4x3x8x8"
    code, _, err = cli("build", tmp_path / "m.onnx", "--target", "simulate", "--shape", shape, "-o", tmp_path / "e")
    assert (code, err) == (0, "")
    facts = strict(cli("inspect", tmp_path / "e", "--json").out)
    assert facts["inputs"] == ["x: fp32[n, 3, 8, 8]"]
    assert facts["profiles"] == ["n=1..2..4"]
    assert facts["plans"] == [{"inputs": ["x: fp32[2, 3, 8, 8]"], "chosen_by": "the cost model"}]
    assert facts["later_plans"] == "when first seen, with the tactics of the nearest plan where these still stand"
    assert "profiles: n=1..2..4" in cli("inspect", tmp_path / "e").out
    assert "[2, 5]" in cli("run", tmp_path / "e").out  # random inputs are of the optimum


def test_inspect_a_model_and_an_engine(cli: Cli, model: Path, engine: Path) -> None:
    facts = strict(cli("inspect", model, "--json").out)
    assert (facts["kind"], facts["nodes"]) == ("model", 10)
    assert facts["inputs"] == ["x: fp32[N, 3, 8, 8]"]
    facts = strict(cli("inspect", engine, "--json").out)
    assert (facts["kind"], facts["target"], len(facts["steps"])) == ("engine", "reference", 5)
    for file in (model, engine):
        code, out, err = cli("inspect", file)
        assert (code, err) == (0, "")
        assert str(file) in out  # on one line, however long
        assert "Conv" in out


def test_check_says_what_a_build_would_do(cli: Cli, model: Path) -> None:
    facts = strict(cli("check", model, "--target", "reference", "--json").out)
    assert facts["supported"] is True
    assert facts["operators_before"]["BatchNormalization"] == 2
    assert "BatchNormalization" not in facts["operators_after"]
    assert "supported on reference; 10 operators become 5" in cli("check", model, "--target", "reference").out


@pytest.mark.parametrize(
    ("there", "text"),
    [
        ({"cudnn", "cublaslt"}, "usable: our kernels, cudnn, cublaslt"),
        ({"cublaslt"}, "usable: our kernels, cublaslt (no cudnn: pip install 'optdnn[cuda-libs]')"),
        (set(), "usable: our kernels (no cudnn and cublaslt: pip install 'optdnn[cuda-libs]')"),
    ],
)
def test_env_names_the_libraries_of_the_gpu(
    cli: Cli, there: set[str], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("optdnn.runtime.cuda.usable.why_not", lambda: None)
    monkeypatch.setattr("optdnn.runtime.cuda.libraries.find.present", lambda name: name in there)
    assert strict(cli("env", "--json").out)["targets"]["cuda"] == text


def test_env(cli: Cli) -> None:
    facts = strict(cli("env", "--json").out)
    assert facts["targets"]["reference"] == "usable"
    assert facts["versions"]["optdnn"] == optdnn.__version__
    assert facts["machine"]["cpu"] in cli("env").out


# ---------------------------------------------------------------- compare


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
    assert cli(*argv, "--layers").code == 2
    code, _, err = cli("compare", engine, "--against", "reference")
    assert code == 2
    assert "reference needs the ONNX model" in err
    assert "--model FILE" in err


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
            "--against 'tensorrt' is neither onnxruntime, openvino, own, cudnn, onnxruntime-cuda, reference nor an",
        ),
        (["--against", "onnxruntime:bf16"], "onnxruntime cannot be asked for bf16"),
        (["--against", ","], "there is nothing to compare with"),
        (["--against", "reference,reference"], "candidates need different names"),
        (["--against", "reference", "--baseline", "x"], "the reference 'x' is not one of optdnn, reference"),
        (["--against", "reference", "--error-reference", "x"], "the reference 'x' is not one of optdnn, reference"),
        (["--against", "reference", "--model", "m.onnx"], "--model goes with an ENGINE"),
        (["--against", "reference", "--size", "M=2"], "no input has a dimension M; there are N"),
        (["--against", "reference", "--size", "N"], "--size 'N' is not NAME=N"),
    ],
)
def test_compare_refuses_what_cannot_be(cli: Cli, model: Path, options: list[str], message: str) -> None:
    code, out, err = cli("compare", model, "--target", "reference", "--rounds", 1, "--duration", 0.01, *options)
    assert (code, out) == (2, "")
    assert message in err


def test_compare_names_the_absent_library(cli: Cli, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optdnn.compare.comparison.find_spec", lambda name: None)
    for against in (["--against", "openvino"], []):
        code, _, err = cli("compare", model, *against)
        assert code == 8
        assert "pip install 'optdnn[cpu]'" in err


@libraries
def test_by_default_the_installed_libraries_are_compared(
    cli: Cli, model: Path, raced: Facts, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = {"onnxruntime"}
    seen = []

    def compared(ctx: object, file: object, engine: object, rivals: list[str], *rest: object) -> Facts:
        seen.append(rivals)
        return raced

    monkeypatch.setattr("optdnn.compare.comparison.find_spec", lambda name: name if name in there else None)
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
    monkeypatch.setattr("optdnn.cli.compare._compared", lambda *given: raced)
    code, out, err = cli("compare", model, "--target", "reference", "--against", "reference", *bound)
    assert code == 7
    assert message in err
    assert "median ms" in out  # the result is shown all the same


def test_compare_given_inputs(cli: Cli, model: Path, raced: Facts, tmp_path: Path) -> None:
    assert (raced["inputs"]["x"]["shape"], raced["inputs_from"]) == ([3, 3, 8, 8], "files")
    argv = ["compare", model, "--target", "reference", "--against", "reference", "--rounds", 1, "--duration", 0.01]
    np.save(tmp_path / "x.npy", np.ones((3, 3, 9, 8), np.float32))
    code, out, err = cli(*argv, "--input", f"x={tmp_path / 'x.npy'}")
    assert (code, out) == (6, "")
    assert "axis 2 is 9 instead of 8" in err


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


# ---------------------------------------------------------------- as a program


def program(*argv: object, **options: Any) -> subprocess.CompletedProcess[str]:
    code = "from optdnn.cli.main import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, argv)], capture_output=True, text=True, cwd=ROOT, timeout=120, **options
    )


def test_as_a_program(model: Path, engine: Path, tmp_path: Path) -> None:
    done = program("build", model, "-o", tmp_path / "e", "--target", "reference")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    done = program("run", tmp_path / "absent.engine")
    assert (done.returncode, done.stdout) == (5, "")
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr


def test_debug_shows_tracebacks_wherever_it_stands(cli: Cli, tmp_path: Path) -> None:
    for argv in (["run", tmp_path / "absent.engine", "--debug"], ["--debug", "run", tmp_path / "absent.engine"]):
        code, _, err = cli(*argv)
        assert code == 5
        assert "Traceback" in err
    assert "there is no engine file --debug" in cli("run", "--", "--debug").err


def test_a_reader_that_goes_away_is_no_error(engine: Path) -> None:
    code = "from optdnn.cli.main import main; main()"
    command = f"'{sys.executable}' -c '{code}' inspect '{engine}' --json | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT, check=True)
    assert (done.stdout, done.stderr) == ("0\n", "")


def test_an_interrupt_is_exit_code_130(cli: Cli, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("optdnn.compiler.import_model", interrupt)
    code, out, err = cli("build", model)
    assert (code, out, err.strip()) == (130, "", "interrupted")


def test_a_defect_says_so(cli: Cli, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> None:
        raise ZeroDivisionError("\x1b[31mhalves of nothing")

    monkeypatch.setattr("optdnn.compiler.import_model", fail)
    code, out, err = cli("build", model)
    assert (code, out) == (70, "")
    assert "internal error: ZeroDivisionError: \\x1b[31mhalves of nothing" in err
    with pytest.raises(ZeroDivisionError):
        cli("--debug", "build", model)


def test_running_out_of_memory_is_a_runtime_failure(cli: Cli, engine: Path) -> None:
    code, _, err = cli("run", engine, "--size", f"N={10**12}")
    assert code == 6
    assert "out of memory" in err


def test_figures_are_plain_numbers(cli: Cli, engine: Path) -> None:
    report = strict(cli("bench", engine, "--iterations", 3, "--json").out)
    assert all(math.isfinite(v) for v in report["latency_ms"].values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--torch", "nets:make"], "--torch is for comparisons on a GPU; the target is reference"),
        (["--torch-compile"], "--torch-compile goes with --torch"),
        (["--against", "own"], "own is a rival on a GPU; the engine is for reference"),
    ],
)
def test_compare_refuses_rivals_of_a_gpu_elsewhere(cli: Cli, model: Path, options: list[str], message: str) -> None:
    code, _, err = cli("compare", model, "--target", "reference", "--rounds", 1, "--duration", 0.01, *options)
    assert code == 2
    assert message in err


# ---------------------------------------------------------------- what is told of layers, nodes and sizes


def test_a_layer_of_a_divergence_is_one_line(
    cli: Cli, model: Path, raced: Facts, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = {**raced, "layers": [{**x, "node": "/a/very/long/name" * 20} for x in raced["layers"]]}
    monkeypatch.setattr("optdnn.cli.compare._compared", lambda *given: long)
    for name, value in (("_force_terminal", True), ("_width", 80), ("_height", 25), ("_color_system", None)):
        monkeypatch.setattr(f"optdnn.cli.common.stdout.{name}", value)
    out = cli("compare", model, "--target", "reference", "--against", "reference", "--layers").out
    table = out[out.index("divergence, worst first") :].splitlines()[2:]
    assert len([line for line in table if line.strip()]) == len(raced["layers"])
    assert all("…" in line and len(line) <= 80 for line in table[: len(raced["layers"])])


def test_a_pattern_that_fits_many_nodes_lists_them(cli: Cli, tmp_path: Path) -> None:
    path = small_models.save(small_models.attention(), tmp_path)
    assert cli("build", path, "--target", "reference").code == 0
    names = [n for _, n in strict(cli("inspect", path, "--nodes", "--json").out)["names"] if n]
    assert len(names) > 8
    code, out, err = cli("explain", path.with_suffix(".engine"), "*")
    assert (code, err) == (0, "")
    listed = [line.split()[0] for line in out.splitlines()[3:]]
    assert set(names) <= set(listed)
    assert "name one of them" in out
    assert len(strict(cli("explain", path.with_suffix(".engine"), "*", "--json").out)) == len(listed)


def test_check_suggests_sizes(cli: Cli, model: Path) -> None:
    suggested = "x=1..8..32x3x8x8"
    code, out, _ = cli("check", model, "--target", "reference")
    assert code == 0
    assert f"--shape {suggested}" in out
    code, _, err = cli("check", model, "--target", "simulate")
    assert code == 2
    assert f"--shape {suggested}" in err
    taken = cli("check", model, "--target", "simulate", "--shape", suggested)
    assert taken.code == 0, taken.err
    assert "sizes that are not fixed" not in taken.out


def test_suggested_sizes_leave_something_of_every_tensor(cli: Cli, tmp_path: Path) -> None:
    nodes = [helper.make_node("Conv", ["x", "w"], ["y"], strides=[20, 20])]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 1, "H", "W"])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    w = helper.make_tensor("w", TensorProto.FLOAT, [1, 1, 100, 40], [0.1] * 4000)
    made = helper.make_graph(nodes, "wide", [x], [y], [w])
    onnx.save(helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)]), tmp_path / "m.onnx")
    (suggested,) = strict(cli("check", tmp_path / "m.onnx", "--target", "reference", "--json").out)["suggested_shapes"]
    assert suggested == "x=1..8..32x1x128..224..512x128..224..512"
    assert cli("check", tmp_path / "m.onnx", "--target", "simulate", "--shape", suggested).code == 0


@libraries
def test_int8_tells_how_far_the_outputs_moved(cli: Cli, model: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "c.npz", x=rng.standard_normal((16, 3, 8, 8)).astype(np.float32))
    argv = ["build", model, "-o", tmp_path / "e", "--target", "cpu", "--threads", 1, "--tactics", "onnxruntime"]
    argv += ["--precision", "int8", "--calib", tmp_path / "c.npz"]
    code, out, _ = cli(*argv, "--json", tmp_path / "r.json")
    assert code == 0
    assert "outputs moved by " in out
    assert "on the first batch of the calibration data" in out
    error = strict((tmp_path / "r.json").read_text())["error"]
    assert 1e-5 < error["rms_rel_err"] < 0.3
    assert 0 <= error["same_top"] <= 1
    assert error["max_rel_err"] < error["input_difference"]
