"""Mixtures such as int8+fp16: each product runs in the precision for which the cost model predicts the shorter time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import optdnn
from optdnn.cli.words import precision_text
from optdnn.config import BuildOptions
from optdnn.importers.onnx import import_model
from optdnn.ir.graph import Graph
from optdnn.passes.assign_precision import AssignPrecision
from optdnn.passes.base import PassContext
from optdnn.passes.support.precision import PrecisionPlan
from optdnn.passes.support.ranges import Calibration, Range
from optdnn.precision.mixture import EIGHT, FLOAT, Blocks, Mixture, offers_choice
from optdnn.report.explanation import Explanations
from optdnn.runtime.cuda.gpu_facts import named
from optdnn.runtime.cuda.measuring.expected import STEP_TIMES
from optdnn.runtime.engine import Engine
from optdnn.types import Array, tensor

WIDE_THEN_NARROW = ((256, 3), (16, 1), (16, 3), (16, 3), (16, 3))
"""Channels and filter sizes of convolutions: the first is faster in int8, the others load short rows and are faster in fp16."""


def network(layers: tuple[tuple[int, int], ...], channels: int, size: int, seed: int = 0) -> onnx.ModelProto:
    """Convolutions (channels, filter size) with Relu; 0 channels: depthwise. Node k is ``c{k}``."""
    rng = np.random.default_rng(seed)
    nodes, weights, value, width = [], [], "x", channels
    for k, (out, filter_size) in enumerate(layers):
        group, out = (width, width) if out == 0 else (1, out)
        shape = (out, width // group, filter_size, filter_size)
        array = rng.standard_normal(shape, np.float32) / np.float32(np.sqrt(np.prod(shape[1:]) / 2))
        weights.append(numpy_helper.from_array(array, f"w{k}"))
        pads = [filter_size // 2] * 4
        nodes.append(helper.make_node("Conv", [value, f"w{k}"], [f"y{k}"], name=f"c{k}", pads=pads, group=group))
        nodes.append(helper.make_node("Relu", [f"y{k}"], [f"r{k}"], name=f"relu{k}"))
        value, width = f"r{k}", out
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, channels, size, size])
    y = helper.make_tensor_value_info(value, TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "net", [x], [y], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def image(channels: int, size: int) -> dict[str, Array]:
    return {"x": np.random.default_rng(1).standard_normal((1, channels, size, size), np.float32)}


def built(model: onnx.ModelProto, data: dict[str, Array], **options: Any) -> Engine:
    asked = {"target": "simulate", "precision": "int8+fp16", "calib": data}
    return optdnn.build(model, **{**asked, **options})


def nodes_in(engine: Engine, precision: str) -> set[str]:
    """The convolutions that run in a precision."""
    told: Any = engine.program.meta["precision"]
    places = told.get(
        "nodes", {precision: [n for s in engine.program.steps for n in s.src]} if precision in told["runs"] else {}
    )
    return {n for n in places.get(precision, ()) if n.startswith("c")}


@pytest.mark.slow
def test_each_product_runs_in_the_precision_that_is_predicted_to_be_faster() -> None:
    model, data = network(WIDE_THEN_NARROW, 256, 40), image(256, 40)
    engine = built(model, data)
    assert nodes_in(engine, "int8") == {"c0"}
    assert nodes_in(engine, "fp16") == {"c1", "c2", "c3", "c4"}
    found: Any = engine.program.meta["mixture"]
    assert found["asked"] == "int8+fp16"
    times = found["predicted_us"]
    assert times["int8+fp16"] < min(times["int8"], times["fp16"])
    told: Any = engine.program.meta["precision"]
    assert told["plan"]["in_base"] == ["r1", "r2", "r3", "r4"]
    assert set(found["nodes"]) == {f"{kind}{k}" for kind in ("c", "relu") for k in range(1, 5)}
    why = Explanations(engine.program, {}).of_precision("c1")
    assert why["node"] == "fp16"
    assert "predicted to take" in why["reason"]
    exact = optdnn.build(model, target="reference").run(data)
    (want,), (got,) = exact.values(), engine.run(data).values()
    assert np.abs(got - want).max() < 0.05 * np.abs(want).max()


@pytest.mark.slow
def test_a_network_that_is_slower_in_eight_bits_is_built_in_the_other_precision() -> None:
    model, data = network(((0, 3), (64, 1), (0, 3), (64, 1)), 64, 28), image(64, 28)
    engine = built(model, data)
    assert engine.program.precision == "fp16"
    found: Any = engine.program.meta["mixture"]
    assert found["predicted_us"]["fp16"] < found["predicted_us"]["int8"]
    assert "nodes" not in found
    assert precision_text("fp16", engine.program.meta) == "fp16 (int8+fp16 is not predicted to be faster)"
    alone = optdnn.build(model, target="simulate", precision="fp16")
    assert [s.params.get("tactic") for s in engine.program.steps] == [
        s.params.get("tactic") for s in alone.program.steps
    ]
    engine.refit(model=model, calib=data)
    assert engine.program.precision == "fp16"
    assert engine.meta["mixture"] == found


@pytest.mark.parametrize(("eight", "alone"), [(98.0, True), (96.0, False)])
def test_eight_bits_need_a_clear_gain(eight: float, alone: bool) -> None:
    options = BuildOptions(target="cuda:sm_90a", precision="int8+fp16", calib=image(8, 8))
    assert Mixture(options, named("h200"), 100.0, times={"int8": eight}).all_in_base is alone
    assert not Mixture(options, named("h200"), None, times={"int8": eight}).all_in_base


@pytest.mark.slow
def test_products_that_gain_are_all_in_eight_bits() -> None:
    engine = built(network(((512, 3), (512, 3)), 512, 14), image(512, 14))
    assert nodes_in(engine, "int8") == {"c0", "c1"}
    assert not nodes_in(engine, "fp16")


def test_a_network_without_products_has_nothing_to_choose() -> None:
    text = '<ir_version: 8, opset_import: ["" : 17]> g (float[4,64] x) => (float[4,64] y) { y = Tanh(x) }'
    engine = built(onnx.parser.parse_model(text), {"x": np.random.default_rng(1).random((4, 64), np.float32)})
    assert engine.program.precision == "fp16"


def chain() -> Graph:
    """Three operators in a row, of the nodes ``c0``, ``c1`` and ``c2``."""
    graph = Graph("chain")
    value = graph.add_input("x", tensor(np.float32, 4, 8))
    for k in range(3):
        value = graph.add("Tanh", [value], names=[f"y{k}"], src=[f"c{k}"]).value
    graph.add_output(value, "y")
    return graph


def program(*us: float) -> Any:
    """A program whose launch k computes node ``ck`` in ``us[k]`` microseconds."""
    steps = [SimpleNamespace(src=frozenset({f"c{k}"})) for k in range(len(us))]
    return SimpleNamespace(steps=steps, meta={STEP_TIMES: {"steps": [[one, None, "predicted"] for one in us]}})


@pytest.mark.parametrize(
    ("middle", "floats"),
    [
        (3.0, set()),  # a gain of 1 us in fp16 is less than the launch that quantizes its result
        (4.0, {"c1"}),
    ],
)
def test_a_value_between_float_and_eight_bits_costs_a_launch(middle: float, floats: set[str]) -> None:
    graph = chain()
    blocks = Blocks(graph, program(1.0, middle, 1.0), program(5.0, 2.0, 5.0))
    assert blocks.floats(named("h200")) == floats


def test_operators_of_one_launch_are_one_block() -> None:
    graph = chain()
    joint = program(1.0, 1.0)
    joint.steps[0].src = frozenset({"c0", "c1"})
    joint.steps[1].src = frozenset({"c2"})
    blocks = Blocks(graph, program(1.0, 2.0, 1.0), joint)
    first, second, third = (blocks.of(op) for op in graph.order() if op.kind == "Tanh")
    assert first == second != third
    assert blocks.times[EIGHT][first] == 3.0
    assert blocks.times[FLOAT][first] == 1.0


@pytest.mark.slow
def test_pins_stay() -> None:
    model, data = network(WIDE_THEN_NARROW, 256, 40), image(256, 40)
    engine = built(model, data, precision_map={"c2": "int8", "c0": "fp16"})
    assert "c2" in nodes_in(engine, "int8")
    assert "c0" in nodes_in(engine, "fp16")


@pytest.mark.parametrize(
    ("options", "free"),
    [
        ({}, True),
        ({"precision": "fp8+bf16"}, True),
        ({"precision": "int8"}, False),
        ({"precision": "w8+fp16"}, False),
        ({"calib": None}, False),
        ({"strict_precision": True}, False),
        ({"stop_after": "fuse_norm"}, False),
    ],
)
def test_when_there_is_a_choice(options: dict[str, Any], free: bool) -> None:
    asked = {"target": "cuda:sm_90a", "precision": "int8+fp16", "calib": image(8, 8), **options}
    assert offers_choice(BuildOptions(**asked)) is free


def test_strict_precision_quantizes_every_product() -> None:
    engine = built(network(((0, 3), (64, 1)), 64, 28), image(64, 28), strict_precision=True)
    assert nodes_in(engine, "int8") == {"c0", "c1"}
    assert "mixture" not in engine.program.meta


@pytest.mark.slow
def test_new_weights_keep_the_choice() -> None:
    model, other = (network(WIDE_THEN_NARROW, 256, 40, seed) for seed in (0, 7))
    data = image(256, 40)
    engine = built(model, data)
    engine.refit(model=other, calib=data)
    assert nodes_in(engine, "int8") == {"c0"}
    assert "c1" in engine.meta["mixture"]["nodes"]
    (want,), (got,) = (e.run(data).values() for e in (optdnn.build(other, target="reference"), engine))
    assert np.abs(got - want).max() < 0.05 * np.abs(want).max()


def test_operators_in_the_float_precision_are_not_named() -> None:
    """What protects fp16 asks whether the plan names an operator."""
    plan = PrecisionPlan("int8", base="fp16", in_base=frozenset({"y0"}))
    graph = import_model(network(((16, 1),), 16, 4))
    conv = next(op for op in graph.ops() if op.kind == "Conv")
    assert plan.of(conv) == "fp16"
    assert not plan.named(conv)
    assert PrecisionPlan.from_json(plan.to_json()) == plan
    ranges = Calibration("minmax", {"x": Range(-1.0, 1.0)})
    AssignPrecision()(graph, PassContext(target="cuda:sm_90a", plan=plan, calibration=ranges))
    assert "QuantizeLinear" not in graph.kinds()


@pytest.mark.slow
def test_a_launch_on_eight_bits_names_its_own_nodes() -> None:
    engine = built(network(((512, 3), (512, 3)), 512, 14), image(512, 14))
    products = [set(s.src) for s in engine.program.steps if str(s.params.get("tactic", "")).startswith("conv_")]
    assert products == [{"c0", "relu0"}, {"c1", "relu1"}]
