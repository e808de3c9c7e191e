"""The command ``build``: the engine and its report, dumps, passes, emitted models, timing caches."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from support.cli import Cli, libraries, strict
from support.onnxnet import convnet, save_convnet

import optdnn
from optdnn.cli.summary import _nodes
from optdnn.errors import EngineError


@libraries
def test_build_writes_an_engine_and_its_report(cli: Cli, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "net.engine"
    code, text, err = cli("build", model, "-o", out, "--threads", 1)
    assert (code, err) == (0, "")
    reported = dict(line.split(maxsplit=1) for line in text.splitlines() if line[:1] not in ("", " "))
    assert list(reported) == [
        "model",
        "inputs",
        "outputs",
        "engine",
        "precision",
        "runs",
        "error",
        "speed",
        "time",
        "next",
    ]
    assert reported["inputs"].startswith("x: fp32[N, 3, 8, 8]; measured at N=1")
    assert reported["engine"].startswith(f"{out} (")
    assert "fuse_conv_bn" not in text, "-v shows passes"
    assert float(reported["error"].split()[0]) < 1e-5
    assert "it beat " in reported["speed"]
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


def test_the_time_of_a_build_has_all_of_its_parts(
    cli: Cli, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(*args: Any) -> Any:
        time.sleep(0.5)
        return {"not_measured": "a test"}

    monkeypatch.setattr("optdnn.cli.build._error", slow)
    text = cli("build", model, "-o", tmp_path / "a.engine", "--target", "reference").out
    spent = next(line for line in text.splitlines() if line.startswith("time"))
    assert "check 0.5" in spent
    assert float(spent.split()[1]) >= 0.5
    assert strict(cli("build", model, "-o", tmp_path / "a.engine", "--json").out)["seconds"]["check"] >= 0.5


def test_the_next_commands_can_be_pasted(cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "a folder"
    folder.mkdir()
    model = save_convnet(folder / "net.onnx")
    text = cli("build", model, "--target", "reference").out
    said = next(line for line in text.splitlines() if line.startswith("next"))
    assert shlex.split(said)[1:4] == ["optdnn", "bench", f"{folder / 'net.engine'},"]
    assert shlex.split(said)[-1] == str(model)


@pytest.mark.parametrize(
    ("batch", "what"), [("2", "optdnn retune "), ("1..2..4", "this build again, which tunes it, ")]
)
def test_an_engine_for_another_machine_says_how_it_is_tuned_there(
    cli: Cli, model: Path, tmp_path: Path, batch: str, what: str
) -> None:
    options = ("--target", "cuda:sm_90a", "--no-cubins", "--shape", f"x={batch}x3x8x8")
    text = cli("build", model, "-o", tmp_path / "a.engine", *options).out
    said = next(line for line in text.splitlines() if line.startswith("next"))
    assert f"--simulate, or {what}" in said
    assert said.rstrip().endswith("on the machine with the GPU")


def test_sizes_that_the_model_does_not_take_get_advice(cli: Cli, tmp_path: Path) -> None:
    """A table of 4 positions, and a range of sizes beyond it. The build says so at once, as for GPUs; see test_plan_sizes.py."""
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        net (int64[N] x) => (float[N] y) <float[4] table = {1.0, 2.0, 3.0, 4.0}, int64 zero = {0}, int64 one = {1}> {
            shape = Shape(x) size = Squeeze(shape) places = Range(zero, size, one) rows = Gather(table, places)
            f = Cast<to = 1>(x) y = Add(rows, f) }""")
    onnx.save(model, tmp_path / "net.onnx")
    code, _, err = cli("build", tmp_path / "net.onnx", "--target", "reference", "--shape", "x=1..8..16")
    assert code == 3
    assert "profile 0, at x=8: " in err
    assert "hint: the model takes --shape x=1..1..4" in err


def test_made_up_inputs_that_do_not_run_get_advice(cli: Cli, tmp_path: Path) -> None:
    """Shape inference cannot know that made-up sizes do not fit."""
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        net (float[N] x, int64[2] sizes) => (float[A, B] y) { y = Reshape(x, sizes) }""")
    onnx.save(model, tmp_path / "net.onnx")
    code, out, _ = cli("build", tmp_path / "net.onnx", "--target", "reference", "--shape", "x=1..8..16")
    assert code == 0
    assert "do the sizes of --shape fit the model?" in out
    given = ("--shape", "x=1..8..16", "--value", "sizes=-1,1")
    assert "do the sizes" not in cli("build", tmp_path / "net.onnx", "--target", "reference", *given).out


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
    assert meta["operators"]["Relu"] == 2  # epilogues are fused by later passes
    assert "BatchNormalization" not in meta["operators"]


def test_an_unknown_pass_is_refused_with_a_list_of_all_passes(cli: Cli, model: Path, tmp_path: Path) -> None:
    code, out, err = cli("build", model, "-o", tmp_path / "e", "--target", "reference", "--stop-after", "fuse_all")
    assert (code, out) == (2, "")
    assert "there is no pass 'fuse_all' at -O3" in err
    assert "fuse_conv_bn" in err
    assert not list(tmp_path.iterdir())
    err = cli("build", model, "-o", tmp_path / "e", "--target", "reference", "--stop-after", "fuse_conv").err
    assert "did you mean 'fuse_conv_bn'?" in err


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


@libraries
def test_int8_shows_how_far_the_outputs_moved(cli: Cli, model: Path, tmp_path: Path) -> None:
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


def test_the_error_of_integer_outputs(cli: Cli, tmp_path: Path) -> None:
    """They have no root mean square; the rounding of fp16 moves some of them by a step."""
    node = helper.make_node("QuantizeLinear", ["x", "s"], ["y"])
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT16, [64, 512])
    y = helper.make_tensor_value_info("y", TensorProto.UINT8, [64, 512])
    scale = numpy_helper.from_array(np.array(0.0173, np.float16), "s")
    graph = helper.make_graph([node], "integers", [x], [y], [scale])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.save(model, tmp_path / "m.onnx")
    code, out, err = cli("build", tmp_path / "m.onnx", "--target", "simulate", "--json", tmp_path / "r.json")
    assert (code, "internal error" in err) == (0, False)
    assert "of the largest output" in out
    assert "outputs moved" not in out
    error = strict((tmp_path / "r.json").read_text())["error"]
    assert error["rms_rel_err"] is None
    assert error["max_rel_err"] > 1e-3


def test_a_warning_is_shown_once(cli: Cli, tmp_path: Path) -> None:
    """A build opens the model several times, and each import warns."""
    maps = helper.make_node("ZipMap", ["x"], ["y"], domain="ai.onnx.ml", classlabels_int64s=[0, 1])
    ports = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [3, 2])], [onnx.ValueInfoProto(name="y")]
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    onnx.save(
        helper.make_model(helper.make_graph([maps], "maps", *ports), opset_imports=imports), tmp_path / "maps.onnx"
    )
    for _ in range(2):
        code, _, err = cli("build", tmp_path / "maps.onnx", "--target", "reference")
        assert (code, err.count("warning:")) == (0, 1)


def test_the_node_of_the_operators_own_kind_is_named_first() -> None:
    row = {"kind": "Conv", "nodes": ["/Add", "/Constant", "/Div", "/dw/Conv"], "op": "y"}
    assert _nodes(row) == "/dw/Conv, /Add, /Div and 1 more"
    assert _nodes({**row, "nodes": []}) == "y"


def test_weights_with_nan_are_named(cli: Cli, tmp_path: Path) -> None:
    text = """
    <ir_version: 10, opset_import: ["": 21]>
    net (float[2] x) => (float[2] y) <float[2] fine = {1, 2}, float[2] scale = {1, 2}> {
        scaled = Mul(x, scale)
        y = Add(scaled, fine)
    }
    """
    model = onnx.parser.parse_model(text)
    model.graph.initializer[1].CopyFrom(numpy_helper.from_array(np.float32([1, np.nan]), "scale"))
    path = tmp_path / "nan.onnx"
    onnx.save(model, path)
    built = cli("build", path, "--target", "reference")
    assert "the model itself gives NaN in y, on random inputs, seed 0; weights with NaN: scale" in built.out
