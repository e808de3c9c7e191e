"""Bad input at the command line: each gives a typed error in one message and its exit code, and no partial file stays."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from support.cli import Cli
from support.onnxnet import convnet, save_convnet

MODEL, UNSUPPORTED, ENGINE, RUN, OUTPUT, USAGE = 3, 4, 5, 6, 9, 2
Attrs = dict[str, Any]
Shape = list[int | str]


def network(
    nodes: list[onnx.NodeProto],
    shape: Shape | None = None,
    weights: list[onnx.TensorProto] | None = None,
    opset: int = 17,
    outputs: list[str] | None = None,
) -> onnx.ModelProto:
    """An unchecked model: input "x", output "y"."""
    ports = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in outputs or ["y"]]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, shape or [2, 3])
    graph = helper.make_graph(nodes, "bad", [x], ports, weights or [])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)


def node(op: str, inputs: str, outputs: str, name: str = "", **attrs: Any) -> onnx.NodeProto:
    return helper.make_node(op, inputs.split(), outputs.split(), name=name or op.lower(), **attrs)


@pytest.fixture
def fails(cli: Cli, tmp_path: Path) -> Callable[..., str]:
    """A function that builds, checks and inspects a model. All three must fail in the same way. It returns the message."""

    def build(model: onnx.ModelProto | bytes, code: int, *options: str) -> str:
        path = tmp_path / "bad.onnx"
        path.write_bytes(model if isinstance(model, bytes) else model.SerializeToString())
        before = sorted(p.name for p in tmp_path.rglob("*"))
        result = cli("build", path, "--target", "reference", *options)
        assert (result.code, result.out) == (code, ""), result
        assert result.err.startswith("error: ")
        assert sorted(p.name for p in tmp_path.rglob("*")) == before
        if not options:
            for other in ("check", "inspect"):
                assert cli(other, path)[:2] == (code, "")
        return result.err

    return build


# ---------------------------------------------------------------- model files


def test_no_such_model(cli: Cli, tmp_path: Path) -> None:
    for command in ("build", "check", "inspect", "compare"):
        code, out, err = cli(command, tmp_path / "absent.onnx")
        assert (code, out) == (USAGE, ""), command
        assert "absent.onnx" in err
    assert cli("build", tmp_path).code == USAGE  # a folder


@pytest.mark.parametrize("content", [b"", b"\0" * 100, b"PK\x03\x04 not a model", b"\xff" * 64, b"hello " * 1000])
def test_files_that_are_no_model(fails: Callable[..., str], content: bytes) -> None:
    assert "bad.onnx" in fails(content, MODEL)


def test_truncated_models(cli: Cli, tmp_path: Path) -> None:
    whole = convnet().SerializeToString()
    path = tmp_path / "cut.onnx"
    for n in np.linspace(0, len(whole) - 1, 40, dtype=int):
        path.write_bytes(whole[:n])
        code, out, err = cli("check", path, "--target", "reference")
        assert (code, out) == (MODEL, ""), n
        assert err.startswith("error: ")


@pytest.mark.slow
def test_flipped_bits_in_a_model_never_surprise(cli: Cli, tmp_path: Path) -> None:
    """A flipped bit may leave a valid model (it may be in a weight or a name). Anything else must be a typed error."""
    whole = convnet(channels=1).SerializeToString()
    rng = np.random.default_rng(0)
    path = tmp_path / "flipped.onnx"
    codes = []
    for at, bit in zip(rng.integers(0, len(whole), 300), rng.integers(0, 8, 300), strict=True):
        data = bytearray(whole)
        data[at] ^= 1 << bit
        path.write_bytes(data)
        code, _, err = cli("check", path, "--target", "reference")
        assert code in (0, USAGE, MODEL, UNSUPPORTED), (at, bit, err)
        codes.append(code)
    assert {0, MODEL, UNSUPPORTED} <= set(codes)


def test_a_cyclic_graph(fails: Callable[..., str]) -> None:
    model = network([node("Add", "x b", "a", "first"), node("Relu", "a", "b", "second"), node("Neg", "b", "y")])
    err = fails(model, MODEL)
    assert "cycle" in err
    assert "first" in err
    assert "second" in err


def test_all_unsupported_operators_are_in_one_message(fails: Callable[..., str]) -> None:
    nodes = [
        node("Frobnicate", "x", "a", "one"),
        node("NonMaxSuppression_", "a", "b", "two"),
        helper.make_node("Special", ["b"], ["c"], name="three", domain="com.example"),
        node("Relu", "c", "y", "four"),
    ]
    model = network(nodes)
    model.opset_import.append(helper.make_opsetid("com.example", 3))
    err = fails(model, UNSUPPORTED)
    assert "one: Frobnicate (opset 17)" in err
    assert "two: NonMaxSuppression_ (opset 17)" in err
    assert "three: com.example.Special (opset 3)" in err
    assert "four" not in err


@pytest.mark.parametrize("opset", [0, 999])
def test_unknown_opsets(fails: Callable[..., str], opset: int) -> None:
    assert str(opset) in fails(network([node("Relu", "x", "y")], opset=opset), UNSUPPORTED)


def test_shapes_that_contradict(fails: Callable[..., str]) -> None:
    weight = numpy_helper.from_array(np.zeros((4, 4), np.float32), "w")
    err = fails(network([node("MatMul", "x w", "y", "product")], [2, 3], [weight]), MODEL)
    assert "product" in err
    assert "MatMul" in err


@pytest.mark.parametrize(
    ("nodes", "weights"),
    [
        ([node("Expand", "x huge", "y", "grow")], [np.array([1 << 40, 1 << 20], np.int64)]),
        ([node("ConstantOfShape", "huge", "a", "fill"), node("Add", "a x", "y")], [np.array([1 << 50], np.int64)]),
        ([node("Tile", "x huge", "y", "tile")], [np.array([1 << 31, 1 << 31], np.int64)]),
        ([node("Pad", "x huge", "y", "pad")], [np.array([0, 0, 1 << 40, 1 << 40], np.int64)]),
    ],
)
def test_huge_results(fails: Callable[..., str], nodes: list[onnx.NodeProto], weights: list[Any]) -> None:
    err = fails(network(nodes, [1, 1], [numpy_helper.from_array(w, "huge") for w in weights]), MODEL)
    assert nodes[0].name in err
    assert "GiB" in err


def test_huge_declared_dimensions(fails: Callable[..., str], cli: Cli, tmp_path: Path) -> None:
    assert "GiB" in fails(network([node("Relu", "x", "y")], [1 << 40, 1 << 20]), MODEL)
    huge = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[1 << 40], raw_data=b"\0" * 16)
    assert "'w'" in fails(network([node("Add", "x w", "y")], weights=[huge]), MODEL)
    negative = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[-1], raw_data=b"")
    assert "'w'" in fails(network([node("Add", "x w", "y")], weights=[negative]), MODEL)
    symbolic = tmp_path / "symbolic.onnx"
    onnx.save(network([node("Relu", "x", "y")], ["N", 3]), symbolic)
    code, _, err = cli("build", symbolic, "--target", "reference", "--shape", f"x={1 << 45}x3")
    assert code == MODEL
    assert "GiB" in err


# ---------------------------------------------------------------- external data


@pytest.fixture
def external(tmp_path: Path) -> Callable[..., Path]:
    """A model in a separate folder, with its weight in the file ``location``."""

    def make(location: str, **entries: object) -> Path:
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        w = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[2, 3], data_location=TensorProto.EXTERNAL)
        for key, value in {"location": location, **entries}.items():
            w.external_data.add(key=key, value=str(value))
        path = folder / "m.onnx"
        path.write_bytes(network([node("Add", "x w", "y")], weights=[w]).SerializeToString())
        return path

    (tmp_path / "outside.bin").write_bytes(np.ones((2, 3), np.float32).tobytes())
    return make


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("absent.bin", "cannot be read"),
        ("../outside.bin", "leads out of the model's folder"),
        ("inside/../../outside.bin", "leads out of the model's folder"),
        ("ABSOLUTE", "is not a relative path"),
        ("link.bin", "is a link out of the model's folder"),
        ("folder/outside.bin", "is a link out of the model's folder"),
        ("/dev/zero", "is not a relative path"),
        ("fifo", "is not a regular file"),
    ],
)
def test_external_data_that_is_missing_or_outside(
    cli: Cli, external: Callable[..., Path], tmp_path: Path, location: str, message: str
) -> None:
    model = external(str(tmp_path / "outside.bin") if location == "ABSOLUTE" else location)
    (model.parent / "link.bin").symlink_to(tmp_path / "outside.bin")
    (model.parent / "folder").symlink_to(tmp_path)
    os.mkfifo(model.parent / "fifo")
    for command in ("build", "check", "inspect"):
        code, out, err = cli(command, model)
        assert (code, out) == (MODEL, "")
        assert message in err
        assert "'w'" in err
    assert not (model.parent / "m.engine").exists()


def test_external_data_of_another_size(cli: Cli, external: Callable[..., Path]) -> None:
    model = external("w.bin")
    (model.parent / "w.bin").write_bytes(b"\0" * 23)
    code, _, err = cli("check", model)
    assert code == MODEL
    assert "wants bytes 0 to 24 of 'w.bin', which has 23" in err
    code, _, err = cli("check", external("w.bin", length=20))
    assert code == MODEL
    code, _, err = cli("check", external("w.bin", offset=-8))
    assert code == MODEL
    (model.parent / "w.bin").write_bytes(b"\0" * 24)
    assert cli("check", external("w.bin")).code == 0


# ---------------------------------------------------------------- outputs


@pytest.mark.parametrize("place", ["nowhere/out", "file/out", "/proc/optdnn-out", "/dev/full"])
def test_an_unwritable_output_is_reported_before_the_work(
    cli: Cli, model: Path, engine: Path, tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    out = tmp_path / place
    before = sorted(p.name for p in tmp_path.rglob("*"))
    code, text, err = cli("run", engine, "--output", out)
    assert (code, text) == (OUTPUT, "")
    assert "random inputs" not in err

    def work(*args: object, **options: object) -> None:
        raise AssertionError("the work has begun")

    monkeypatch.setattr("optdnn.compiler.import_model", work)
    monkeypatch.setattr("optdnn.compare.subject.import_model", work)
    for argv in (
        ["build", model, "-o", out],
        ["build", model, "-o", tmp_path / "e", "--emit-onnx", out],
        ["build", model, "-o", tmp_path / "e", "--timing-cache", out],
        ["compare", model, "--against", "reference", "--markdown", out],
        ["compare", model, "--against", "reference", f"--json={out}"],
    ):
        code, text, err = cli(*argv)
        assert (code, text) == (OUTPUT, ""), argv
        assert str(out) in err
    assert sorted(p.name for p in tmp_path.rglob("*")) == before


def test_a_dump_folder_that_cannot_be_written(cli: Cli, model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code, _, err = cli("build", model, "-o", tmp_path / "e", "--target", "reference", "--dump", tmp_path / "file" / "x")
    assert code == OUTPUT
    assert "dump folder" in err
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_build_that_fails_leaves_the_old_engine(cli: Cli, tmp_path: Path) -> None:
    model = save_convnet(tmp_path / "m.onnx")
    assert cli("build", model, "--target", "reference").code == 0
    old = (tmp_path / "m.engine").read_bytes()
    model.write_bytes(b"no model any more")
    assert cli("build", model, "--target", "reference").code == MODEL
    assert (tmp_path / "m.engine").read_bytes() == old
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.engine", "m.engine.report.json", "m.onnx"]


def test_an_engine_is_not_built_again(cli: Cli, engine: Path) -> None:
    before = engine.read_bytes()
    for command in ("build", "check"):
        code, out, err = cli(command, engine)
        assert (code, out) == (USAGE, "")
        assert "is an engine already" in err
    assert engine.read_bytes() == before


def test_the_model_is_never_overwritten(cli: Cli, tmp_path: Path) -> None:
    model = save_convnet(tmp_path / "m.engine")
    before = model.read_bytes()
    for argv in ([], ["-o", tmp_path / "other", "--emit-onnx", model], ["-o", tmp_path / "." / "m.engine"]):
        code, _, err = cli("build", model, *argv)
        assert code == USAGE
        assert "would overwrite" in err
        assert "the file of MODEL" in err
    assert model.read_bytes() == before


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("build m.onnx --html m.onnx", "--html would overwrite m.onnx, the file of MODEL"),
        ("build m.onnx --lock ./m.onnx", "--lock would overwrite m.onnx, the file of MODEL"),
        ("build m.onnx -o e.json --json e.json", "--json would overwrite e.json, the file of --output"),
        ("build m.onnx -o n.engine --emit-onnx n.engine", "would overwrite n.engine, the file of --"),
        ("build m.onnx --html m.engine", "the engine would overwrite m.engine, the file of --html"),
        ("build m.onnx -o d.npz --calib d.npz", "--output would overwrite d.npz, the file of --calib"),
        (
            "build m.onnx --lock t.json --timing-cache t.json",
            "--lock would overwrite t.json, the file of --timing-cache",
        ),
        ("run e.json --input x=d.npz -o d.npz", "--output would overwrite d.npz, the file of --input"),
        ("bench e.json --html e.json", "--html would overwrite e.json, the file of ENGINE"),
        ("inspect e.json --json e.json", "--json would overwrite e.json, the file of MODEL|ENGINE"),
        ("compare m.onnx --markdown m.onnx", "--markdown would overwrite m.onnx, the file of MODEL|ENGINE"),
        ("diff e.json m.onnx --html m.onnx", "--html would overwrite m.onnx, the file of B"),
        ("refit e.json m.onnx -o m.onnx", "--output would overwrite m.onnx, the file of MODEL"),
        ("profile e.json -o e.json", "--output would overwrite e.json, the file of ENGINE"),
    ],
)
def test_no_file_of_a_command_is_overwritten(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("m.onnx", "m.engine", "e.json", "d.npz", "t.json"):
        Path(name).write_text(name)
    code, _, err = cli(*argv.split())
    assert code == USAGE
    assert message in err
    assert all(path.read_text() == path.name for path in tmp_path.iterdir())


def test_refit_may_replace_its_engine(cli: Cli, tmp_path: Path) -> None:
    model, engine = save_convnet(tmp_path / "m.onnx"), tmp_path / "m.engine"
    assert cli("build", model, "--target", "reference").code == 0
    assert cli("refit", engine, model, "-o", engine).code == 0


# ---------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--shape", "x"], "--shape 'x' is not NAME=1x3x224x224"),
        (["--shape", "x="], "is not NAME="),
        (["--shape", "=1x3"], "is not NAME="),
        (["--shape", "x=1x-3x8x8"], "is not NAME="),
        (["--shape", "x=1,3,8,8"], "is not NAME="),
        (["--shape", "x=1x3x8x8", "--shape", "x=1x3x8x8"], "the same shape twice"),
        (["--shape", "x=4..2..8x3x8x8"], "minimum 4, optimum 2 and maximum 8 are not in this order"),
        (["--shape", "x=1x3x8x8..4x3x8x8..2x3x8x8"], "axis 0: minimum 1, optimum 4 and maximum 2"),
        (["--shape", "x=1..2x3x8x8"], "the shape '1..2x3x8x8' cannot be read: '1..2' is neither"),
        (["--shape", "image=1x3x8x8"], "'image'"),
        (["--shape", "x=1x3x8x8,mask=1x8"], "give --shape once for each input"),
        (["--target", "tpu"], "target 'tpu' is not one of auto, cpu, reference"),
        (["--precision", "fp64"], "precision 'fp64' is not one of"),
        (["--io-dtype", "int8"], "io-dtype 'int8' is not one of"),
        (["--tactics", "magic"], "tactics 'magic' is not one of"),
        (["--threads", "0"], "threads"),
        (["--workspace", "0"], "workspace"),
        (["--opt-level", "4"], "4"),
        (["--stop-after", "nothing"], "there is no pass 'nothing'"),
        (["--timing-cache", "CACHE"], "is not a timing cache"),
    ],
)
def test_options_that_cannot_be(cli: Cli, model: Path, tmp_path: Path, options: list[str], message: str) -> None:
    (tmp_path / "cache").write_text(json.dumps({"format": "something else"}))
    options = [str(tmp_path / "cache") if o == "CACHE" else o for o in options]
    code, out, err = cli("build", model, "-o", tmp_path / "e", "--target", "reference", *options)
    assert (code, out) == (USAGE, "")
    assert message in err
    assert [p.name for p in tmp_path.iterdir()] == ["cache"]


@pytest.mark.parametrize(
    ("shape", "message"),
    [("x=1x3x8", "rank"), ("x=1x3x9x8", "8"), ("x=1x3x8x8x1", "rank"), ("x=scalar", "rank")],
)
def test_shapes_that_do_not_fit_the_model(cli: Cli, model: Path, tmp_path: Path, shape: str, message: str) -> None:
    code, out, err = cli("build", model, "-o", tmp_path / "e", "--shape", shape)
    assert (code, out) in ((USAGE, ""), (MODEL, ""))
    assert message in err
    assert "x" in err


def test_names_of_a_model_do_not_command_the_terminal(cli: Cli, tmp_path: Path) -> None:
    bad = network([node("Frob\x1b[31mnicate", "x", "y", "evil\x1b]0;title\x07[bold]name")])
    (tmp_path / "m.onnx").write_bytes(bad.SerializeToString())
    code, _, err = cli("check", tmp_path / "m.onnx")
    assert code == UNSUPPORTED
    assert "\x1b" not in err
    assert "\\x1b]0;title" in err
    good = convnet(names={"conv1": "conv\x1b[31m:smile:[/nothing]"})
    (tmp_path / "m.onnx").write_bytes(good.SerializeToString())
    code, out, _ = cli("build", tmp_path / "m.onnx", "--target", "reference", "-v")
    assert code == 0
    assert "conv\\x1b[31m:smile:[/nothing]" in out


# ---------------------------------------------------------------- pipes and devices


@pytest.mark.parametrize("special", ["pipe", "/dev/zero"])
def test_pipes_and_devices(cli: Cli, engine: Path, model: Path, tmp_path: Path, special: str) -> None:
    """Opening a pipe without a writer would never end, nor would reading such a device."""
    os.mkfifo(tmp_path / "pipe")
    file = tmp_path / special
    build = ["build", model, "--target", "simulate"]
    for argv in (
        *([command, file] for command in ("build", "check", "inspect", "compare", "run", "bench", "verify", "retune")),
        ["explain", file, "node"],
        ["diff", file, engine],
        ["diff", engine, file],
        ["refit", engine, file, "-o", tmp_path / "out"],
        ["verify", engine, "--model", file],
        ["run", engine, "--input", f"x={file}"],
        [*build, "--precision", "int8", "--calib", file],
        [*build, "--precision", "auto", "--calib", file, "--labels", file],
        [*build, "--config", file],
        [*build, "--timing-cache", file],
        [*build, "--lock", file],
        [*build, "--preprocess", f"x={file}"],
    ):
        code, out, err = cli(*argv)
        assert (code in (USAGE, MODEL, ENGINE, RUN, OUTPUT), out) == (True, ""), argv
        assert str(file) in err
        assert "not a regular file" in err, argv
