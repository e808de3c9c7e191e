"""Builds in int8 and fp8 of unusual models and data: other float types, numbers, no inputs, ranges of sizes, Q and DQ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import optdnn
from optdnn.calibration.plan_calibration import SharedCalibration
from optdnn.cli.main import run
from optdnn.errors import EngineError, InputError, RunError, UsageError
from optdnn.types import Array

RNG = np.random.default_rng(0)
ON_GPU = [("simulate", "int8"), ("simulate", "fp8")]
BUILDS = [("cpu", "int8"), *ON_GPU]


def random(*shape: int, dtype: Any = np.float32) -> Array:
    return RNG.standard_normal(shape).astype(dtype)


def model(nodes: list[onnx.NodeProto], inputs: list[Any], constants: dict[str, Array]) -> onnx.ModelProto:
    ins = [helper.make_tensor_value_info(*i) for i in inputs]
    out = helper.make_empty_tensor_value_info("z")
    graph = helper.make_graph(nodes, "g", ins, [out], [numpy_helper.from_array(v, k) for k, v in constants.items()])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return onnx.shape_inference.infer_shapes(made)


def conv(elements: int = TensorProto.FLOAT, dtype: Any = np.float32, shape: Any = (2, 3, 8, 8)) -> onnx.ModelProto:
    nodes = [helper.make_node("Conv", ["x", "w", "b"], ["y"], pads=[1] * 4), helper.make_node("Relu", ["y"], ["z"])]
    return model(nodes, [("x", elements, shape)], {"w": random(4, 3, 3, 3, dtype=dtype), "b": random(4, dtype=dtype)})


def runs(engine: optdnn.Engine) -> Any:
    return engine.meta["precision"]["runs"]


@pytest.mark.parametrize(("target", "precision"), BUILDS)
@pytest.mark.parametrize(("elements", "dtype"), [(TensorProto.FLOAT16, np.float16), (TensorProto.DOUBLE, np.float64)])
def test_operators_in_another_float_type_of_the_model_stay_so(
    target: str, precision: str, elements: int, dtype: Any
) -> None:
    data = [{"x": random(2, 3, 8, 8)} for _ in range(2)]
    engine = optdnn.build(conv(elements, dtype), target=target, precision=precision, calib=data)
    (reported,) = engine.meta["precision"]["differs"]
    assert reported["asked"] == precision
    name = {np.float16: "fp16", np.float64: "fp64"}[dtype]
    assert reported["reason"] == f"the model computes it in {name}, ranges are found for fp32: export the model in fp32"
    assert engine.run({"x": random(2, 3, 8, 8, dtype=dtype)})["z"].dtype == dtype


@pytest.mark.parametrize(("target", "precision"), BUILDS)
def test_an_input_that_is_one_number(target: str, precision: str) -> None:
    nodes = [helper.make_node("Mul", ["x", "s"], ["k"]), helper.make_node("MatMul", ["k", "w"], ["z"])]
    inputs = [("x", TensorProto.FLOAT, [2, 8]), ("s", TensorProto.FLOAT, [])]
    scaled = model(nodes, inputs, {"w": random(8, 16)})
    data: Any = [{"x": random(2, 8), "s": np.float32(k + 1)} for k in range(3)]
    assert runs(optdnn.build(scaled, target=target, precision=precision, calib=data)).keys() >= {precision}
    with pytest.raises(InputError, match="a number has no axis of samples"):
        optdnn.build(scaled, target=target, precision=precision, calib={"x": random(2, 8), "s": random(2)})


def test_pictures_are_not_for_a_number(tmp_path: Any) -> None:
    (tmp_path / "one.png").write_bytes(b"")
    nodes = [helper.make_node("Mul", ["s", "w"], ["k"]), helper.make_node("MatMul", ["k", "w"], ["z"])]
    with pytest.raises(InputError, match="takes no pictures"):
        optdnn.build(
            model(nodes, [("s", TensorProto.FLOAT, [])], {"w": random(8, 8)}),
            target="cpu",
            precision="int8",
            calib=tmp_path,
        )


@pytest.mark.parametrize(("target", "precision"), BUILDS)
def test_the_largest_pixel_before_a_convolution(target: str, precision: str) -> None:
    nodes = [
        helper.make_node("Conv", ["x", "v"], ["a"]),
        helper.make_node("ReduceMax", ["a"], ["b"], axes=[2, 3], keepdims=1),
        helper.make_node("Conv", ["b", "w"], ["z"]),
    ]
    made = model(nodes, [("x", TensorProto.FLOAT, [2, 3, 8, 8])], {"v": random(16, 3, 1, 1), "w": random(4, 16, 1, 1)})
    data = [{"x": random(2, 3, 8, 8)} for _ in range(4)]
    engine = optdnn.build(made, target=target, precision=precision, calib=data)
    if target == "simulate":
        assert runs(engine) == {precision: 2}
    exact = optdnn.build(made, target="reference").run(data[0])["z"]
    assert np.abs(engine.run(data[0])["z"] - exact).max() < 0.1 * np.abs(exact).max()


@pytest.mark.parametrize(("target", "precision"), BUILDS)
@pytest.mark.parametrize("data", [[{}], {}], ids=["feeds", "arrays"])
def test_a_network_without_inputs_has_nothing_to_calibrate(target: str, precision: str, data: Any) -> None:
    made = model([helper.make_node("Conv", ["x", "w"], ["z"])], [], {"x": random(1, 3, 8, 8), "w": random(4, 3, 1, 1)})
    with pytest.raises(UsageError, match="the network has no inputs: there is nothing to calibrate"):
        optdnn.build(made, target=target, precision=precision, calib=data)


@pytest.mark.parametrize(("target", "precision"), ON_GPU)
@pytest.mark.parametrize(
    "data", [[{"x": random(4, 3, 16, 8)}] * 2, {"x": random(12, 3, 16, 8)}], ids=["feeds", "arrays"]
)
def test_ranges_of_sizes_are_calibrated_at_the_first_optimum(target: str, precision: str, data: Any) -> None:
    shapes = [{"x": "1..4..8x3x8..16..32x8"}, {"x": "1x3x8x8"}]
    engine = optdnn.build(conv(shape=("N", 3, "H", 8)), target=target, precision=precision, calib=data, shapes=shapes)
    assert runs(engine) == {precision: 1}
    for size in ((4, 3, 16, 8), (1, 3, 8, 8)):
        assert engine.run({"x": random(*size)})["z"].shape == (size[0], 4, *size[2:])


@pytest.mark.parametrize(("target", "precision"), ON_GPU)
def test_other_sizes_run_by_the_same_ranges(target: str, precision: str, tmp_path: Path) -> None:
    """Also for a loaded engine: a plan for a further size gives the same rows as a plan of the build."""
    network = conv(shape=("N", 3, 8, 8))
    data = [{"x": random(4, 3, 8, 8)} for _ in range(2)]
    shapes = {"x": "1..4..8x3x8x8"}
    built = optdnn.build(network, target=target, precision=precision, calib=data, calibrator="minmax", shapes=shapes)
    built.save(tmp_path / "e")
    x = random(8, 3, 8, 8)
    wide = built.run({"x": x[:4]})["z"]
    for engine in (built, optdnn.load(tmp_path / "e")):
        for n in (1, 3):
            got = engine.run({"x": x[:n]})["z"]
            np.testing.assert_allclose(got, wide[:n], rtol=1e-5, atol=1e-6)
        assert engine.run({"x": x})["z"].shape == (8, 4, 8, 8)
    exact = optdnn.build(network, target="reference").run({"x": x[:3]})["z"]
    assert 1e-4 < np.abs(built.run({"x": x[:3]})["z"] - exact).max() < 0.1 * exact.max()  # it is quantized


@pytest.mark.parametrize(
    "text",
    [b"", b"[]", b"{}", b"[1]", b"\xff", b'[{"method": "mse"}]', b"[" * 100_000]
    + [
        b'[{"method":"m","samples":1,"ranges":%s,"seen":{},"channels":%s,"means":{}}]' % (ranges, channels)
        for ranges, channels in (
            (b'{"x": [0]}', b"{}"), (b'{"x": ["a", 1]}', b"{}"), (b"[]", b"{}"), (b"{}", b'{"x": 1}'),
            (b"{}", b'{"x": [[1]]}'), (b"{}", b'{"x": [NaN]}'), (b"{}", b'{"x": ["a"]}'),
        )
    ],
)  # fmt: skip
def test_a_calibration_that_no_build_wrote_is_refused(text: bytes) -> None:
    with pytest.raises(EngineError, match="the engine's calibration"):
        SharedCalibration.from_bytes(np.frombuffer(text, np.uint8))


def test_an_engine_that_makes_no_further_plans_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Pins refer to nodes, which an engine does not have."""
    onnx.save(conv(shape=("N", 3, 8, 8)), tmp_path / "m.onnx")
    np.savez(tmp_path / "calib.npz", x=random(8, 3, 8, 8))
    engine, reported = (
        tmp_path / "e",
        "none: the engine does not hold its model, and runs only at the sizes of its plans",
    )
    options = ("--target", "simulate", "--precision", "int8", "--calib", str(tmp_path / "calib.npz"))
    options = (*options, "--shape", "x=1..4..8x3x8x8", "-o", str(engine))
    for pins, shown in (((), False), (("--pin", "*=fp32"), True)):
        for command in (["build", str(tmp_path / "m.onnx"), *options, *pins], ["inspect", "--json", str(engine)]):
            assert run(command) == 0
            assert (reported in " ".join(capsys.readouterr().out.split())) == shown
    with pytest.raises(RunError, match="cannot make one: it does not hold its model"):
        optdnn.load(engine).run({"x": random(3, 3, 8, 8)})


def explicit(own: bool = True, more: bool = False) -> onnx.ModelProto:
    """A convolution between Q and DQ (``own``), and one without them after it (``more``)."""
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "zero"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "zero"], ["d"]),
        helper.make_node("DequantizeLinear", ["w", "s"], ["v"]),
        helper.make_node("Conv", ["d" if own else "x", "v"], ["y" if more else "z"]),
    ]
    nodes = nodes if own else nodes[2:]
    if more:
        nodes.append(helper.make_node("Conv", ["y", "u"], ["z"], name="last"))
    constants = {
        "w": RNG.integers(-9, 9, (16, 16, 1, 1)).astype(np.int8), "u": random(16, 16, 1, 1),
        "s": np.array(0.05, np.float32), "zero": np.array(3, np.int8),
    }  # fmt: skip
    return model(nodes, [("x", TensorProto.FLOAT, [1, 16, 8, 8])], constants)


@pytest.mark.parametrize("target", ["cpu", "simulate"])
def test_a_network_with_q_and_dq_needs_no_data(target: str) -> None:
    engine = optdnn.build(explicit(), target=target, precision="int8")
    assert target == "cpu" or runs(engine) == {"int8": 1}  # on the CPU, the faster library decides
    engine = optdnn.build(explicit(more=True), target=target, precision="int8")
    (reported,) = (r for r in engine.meta["precision"]["differs"] if r["nodes"] == ["last"])
    assert reported["reason"] == "the model does not quantize it, and there is no calibration data"
    x = random(1, 16, 8, 8)
    assert np.isfinite(engine.run({"x": x})["z"]).all()


@pytest.mark.parametrize("made", [conv(), explicit(own=False)], ids=["floats", "weights alone"])
def test_any_other_network_needs_data(made: onnx.ModelProto) -> None:
    with pytest.raises(UsageError, match="precision int8 needs calibration data"):
        optdnn.build(made, target="cpu", precision="int8")
    with pytest.raises(UsageError, match="precision int8 needs calibration data"):
        optdnn.build(made, target="cpu", precision_map={"*": "int8"})


@pytest.mark.parametrize(
    ("target", "precision", "shape"),
    [*((*BUILDS[1], shape) for shape in ((), (1,), (1, 1))), (*BUILDS[0], ()), (*BUILDS[2], (1,))],
)
def test_a_bias_of_one_number_for_all_columns(target: str, precision: str, shape: Any) -> None:
    constants = {"w": random(8, 16), "b": np.full(shape, 0.7, np.float32)}
    made = model([helper.make_node("Gemm", ["x", "w", "b"], ["z"])], [("x", TensorProto.FLOAT, [4, 8])], constants)
    data = [{"x": random(4, 8)} for _ in range(4)]
    engine = optdnn.build(made, target=target, precision=precision, calib=data)
    exact = optdnn.build(made, target="reference").run(data[0])["z"]
    assert np.abs(engine.run(data[0])["z"] - exact).max() < 0.1 * np.abs(exact).max()


@pytest.mark.parametrize("elements", [TensorProto.FLOAT16, TensorProto.DOUBLE])
def test_quantized_values_may_come_from_another_float_type(elements: int) -> None:
    dtype = helper.tensor_dtype_to_np_dtype(elements)
    nodes = [
        helper.make_node("Cast", ["x"], ["c"], to=elements),
        helper.make_node("Mul", ["c", "k"], ["m"]),
        helper.make_node("Cast", ["m"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("Add", ["f", "one"], ["g"]),
        helper.make_node("QuantizeLinear", ["g", "s", "zero"], ["z"]),
    ]
    constants = {
        "k": random(8, dtype=dtype),
        "one": np.ones(8, np.float32),
        "s": np.array(0.05, np.float32),
        "zero": np.array(3, np.uint8),
    }
    made = model(nodes, [("x", TensorProto.FLOAT, [4, 8])], constants)
    x = random(4, 8)
    exact = optdnn.build(made, target="reference").run({"x": x})["z"]
    for precision in ("fp32", "fp16"):
        got = optdnn.build(made, target="simulate", precision=precision).run({"x": x})["z"]
        assert np.abs(got.astype(int) - exact).max() <= 1
