"""Each command: what it prints and where, its files and exit codes."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import TensorProto, helper
from support import small_models
from support.cli import Cli, strict
from support.onnxnet import convnet, save_convnet
from support.processor import assert_quick

import optdnn
from optdnn.build_facts import MOST_DESCRIPTION
from optdnn.cli.main import COMMANDS
from optdnn.errors import EXIT_CODES

Facts = dict[str, Any]
ROOT = Path(__file__).parents[2]

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

    def measured() -> float:
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
        seconds, _, loaded = done.stdout.splitlines()[-1].partition(" ")
        assert loaded == "[]"
        return float(seconds)

    assert_quick(measured, 0.4)


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
        assert err == f"random inputs (seed {seed}): x: fp32[2, 3, 8, 8]\n"
        results.append(np.load(tmp_path / "y.npz")["y"])
    assert results[0].shape == (2, 5)
    np.testing.assert_array_equal(results[0], results[1])
    assert not np.array_equal(results[0], results[2])


def test_piped_tables_have_no_padding(cli: Cli, model: Path, engine: Path) -> None:
    for words in (("inspect", engine), ("inspect", model), ("run", engine), ("check", model, "--target", "reference")):
        out = cli(*words).out
        assert out
        assert [line for line in out.splitlines() if line != line.rstrip()] == []


def test_run_takes_an_array_without_a_name_for_the_only_input(cli: Cli, engine: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((4, 3, 8, 8), np.float32))
    code, out, err = cli("run", engine, "--input", tmp_path / "x.npy")
    assert (code, err) == (0, "")
    assert "[4, 5]" in out
    code, _, err = cli("run", engine, "--input", tmp_path / "x.npy", "--size", "N=9")
    assert code == 2
    assert err == "error: --size N=9: input 'x' has N = 4\n  hint: leave --size out\n"


def test_random_inputs_that_a_network_does_not_take(cli: Cli, tmp_path: Path) -> None:
    network = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        net (float[N, 8] x, int64[M] at) => (float[M, 8] y) { y = Gather(x, at) }""")
    optdnn.build(network, target="reference").save(tmp_path / "e")
    code, _, err = cli("run", tmp_path / "e", "--size", "N=1", "--size", "M=32")
    assert code == 6
    assert "hint: the random inputs (x, at) may not fit the network: give --input NAME=FILE" in err


def test_run_names_a_wrong_input_and_nothing_else(cli: Cli, engine: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((4, 3, 8, 8), np.float32))
    code, _, err = cli("run", engine, "--input", f"z={tmp_path / 'x.npy'}")
    assert code == 6
    assert "input 'z'" in err
    assert "random" not in err


def test_run_gives_scripts_the_outputs_as_json(cli: Cli, engine: Path, tmp_path: Path) -> None:
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
    assert "random inputs (seed 0): x: fp32[1, 3, 8, 8]" in err
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
    assert facts["later_plans"] == "when first seen, with the tactics of the nearest plan or predicted faster ones"
    assert "profiles: n=1..2..4" in cli("inspect", tmp_path / "e").out
    assert "[2, 5]" in cli("run", tmp_path / "e").out  # random inputs have the sizes of the optimum


def test_inspect_shows_what_a_model_says_about_itself(cli: Cli, tmp_path: Path) -> None:
    model = convnet()
    model.producer_name, model.model_version = "a tool", 7
    model.metadata_props.add(key="names", value="cat, dog" + "!" * 300)
    onnx.save(model, tmp_path / "m.onnx")
    assert cli("build", tmp_path / "m.onnx", "--target", "reference", "-o", tmp_path / "e").code == 0
    want = {"producer_name": "a tool", "version": 7, "custom_metadata_map": {"names": "cat, dog" + "!" * 300}}
    assert strict(cli("inspect", tmp_path / "m.onnx", "--json").out)["description"] == want
    assert strict(cli("inspect", tmp_path / "e", "--json").out)["model"]["description"] == want
    for file in ("m.onnx", "e"):
        lines = cli("inspect", tmp_path / file).out.splitlines()
        assert {"producer name: a tool", "version: 7", "names: cat, dog" + "!" * 192 + " …"} <= set(lines)


def test_metadata_that_a_header_cannot_hold_is_left_out(cli: Cli, tmp_path: Path) -> None:
    model = convnet()
    model.metadata_props.add(key="weights", value="x" * MOST_DESCRIPTION)
    onnx.save(model, tmp_path / "m.onnx")
    code, _, err = cli("build", tmp_path / "m.onnx", "--target", "reference", "-o", tmp_path / "e")
    assert (code, "warning: the engine leaves the model's metadata out" in err) == (0, True)
    assert "description" not in strict(cli("inspect", tmp_path / "e", "--json").out)["model"]


def test_inspect_a_model_and_an_engine(cli: Cli, model: Path, engine: Path) -> None:
    facts = strict(cli("inspect", model, "--json").out)
    assert (facts["kind"], facts["nodes"], facts["critical_path"]) == ("model", 10, 10)  # the network is a chain
    assert facts["inputs"] == ["x: fp32[N, 3, 8, 8]"]
    facts = strict(cli("inspect", engine, "--json").out)
    assert (facts["kind"], facts["target"], len(facts["steps"])) == ("engine", "reference", 5)
    for file in (model, engine):
        code, out, err = cli("inspect", file)
        assert (code, err) == (0, "")
        assert str(file) in out  # on one line, even if it is long
        assert "Conv" in out


def test_a_pass_that_did_something_is_not_listed_as_idle(cli: Cli, tmp_path: Path) -> None:
    """The pass runs twice, and the second run changes nothing."""
    text = '<ir_version: 10, opset_import: ["": 18]> net (float[1,3,8,8] x) => (float[1,3] y) <int64[2] a = {2, 3}>'
    net = onnx.parser.parse_model(text + " { y = ReduceMean<keepdims = 0>(x, a) }")
    onnx.save(net, tmp_path / "m.onnx")
    assert cli("build", tmp_path / "m.onnx", "-o", tmp_path / "e", "--target", "reference").code == 0
    for out in (
        cli("inspect", tmp_path / "e").out,
        cli("build", tmp_path / "m.onnx", "-v", "--target", "reference").out,
    ):
        idle = next(line for line in out.splitlines() if line.startswith("found nothing to do"))
        assert "canonicalize_arithmetic" in out
        assert "canonicalize_arithmetic" not in idle


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


@pytest.mark.parametrize(("target", "gpu"), [("reference", False), ("simulate", True)])
def test_inspect_shows_facts_in_words(cli: Cli, model: Path, tmp_path: Path, target: str, gpu: bool) -> None:
    optdnn.build(model, target=target, shapes={"x": (2, 3, 8, 8)}).save(tmp_path / "a.engine")
    shown = {line.split("  ")[0] for line in cli("inspect", tmp_path / "a.engine").out.splitlines()}
    assert {"target", "precision", "weights bytes"} <= shown
    assert ("retunable" in shown, "arena bytes" in shown) == (gpu, gpu)


@pytest.mark.parametrize("compiles", [True, False])
def test_env_says_that_builds_need_no_gpu(cli: Cli, compiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optdnn.runtime.cuda.usable.why_not", lambda: "no NVIDIA GPU or no driver")
    monkeypatch.setattr("optdnn.runtime.cuda.usable.compiles", lambda: compiles)
    text = strict(cli("env", "--json").out)["targets"]["cuda"]
    more = "; builds for a named GPU work: --target cuda:sm_90a" if compiles else ""
    assert text == "not usable: no NVIDIA GPU or no driver" + more


def test_env(cli: Cli) -> None:
    facts = strict(cli("env", "--json").out)
    assert facts["targets"]["reference"] == "usable"
    assert facts["versions"]["optdnn"] == optdnn.__version__
    assert facts["machine"]["cpu"] in cli("env").out


# ---------------------------------------------------------------- as a program


def program(*argv: object, **options: Any) -> subprocess.CompletedProcess[str]:
    code = "from optdnn.cli.main import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, argv)], capture_output=True, text=True, cwd=ROOT, timeout=120, **options
    )


@pytest.mark.slow
def test_as_a_program(model: Path, engine: Path, tmp_path: Path) -> None:
    done = program("build", model, "-o", tmp_path / "e", "--target", "reference")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    done = program("run", tmp_path / "absent.engine")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr


def test_debug_shows_tracebacks_at_any_place_of_the_command_line(cli: Cli, tmp_path: Path) -> None:
    for argv in (["run", tmp_path / "absent.engine", "--debug"], ["--debug", "run", tmp_path / "absent.engine"]):
        code, _, err = cli(*argv)
        assert code == 2
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


# ---------------------------------------------------------------- layers, nodes and sizes in output


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
    assert cli("explain", path.with_suffix(".engine")).out == out, "without a node, all"
    assert len(strict(cli("explain", path.with_suffix(".engine"), "*", "--json").out)) == len(listed)


@pytest.mark.nvrtc
def test_tactics_that_cannot_run_a_node_are_listed_on_request(cli: Cli, tmp_path: Path) -> None:
    path = small_models.save(small_models.residual(), tmp_path)
    assert cli("build", path, "--target", "cuda:h200", "--precision", "fp16").code == 0
    engine = path.with_suffix(".engine")
    (fact,) = strict(cli("explain", engine, "Conv_0", "--json").out)
    refused = max((t["refused"] for t in fact["tactics"]), key=len)
    assert len(refused) > 1
    short = cli("explain", engine, "Conv_0").out
    assert f"{len(refused)} other tactics cannot run it (--tactics: why)" in short
    assert refused[0]["reason"] not in short
    long = cli("explain", engine, "Conv_0", "--tactics").out
    assert all(f"not {r['tactic']}:" in long for r in refused)


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
