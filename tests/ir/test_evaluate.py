"""The oracle: evaluation, its checks of inputs, promotion to float64, random inputs."""

from __future__ import annotations

import numpy as np
import pytest

from optdnn.dim import symbol
from optdnn.errors import InputError, RunError
from optdnn.ir import evaluate as module
from optdnn.ir.evaluate import evaluate, promote, promoted_attrs, random_feeds, values
from optdnn.ir.graph import Graph, Value
from optdnn.ir.verify import verify
from optdnn.ops.base import Stage
from optdnn.ops.fused import PointwiseAttrs
from optdnn.ops.index import SplitAttrs
from optdnn.ops.table import OPDEFS
from optdnn.types import BF16, BOOL, FP16, FP32, FP64, INT32, INT64, TensorType, tensor


def two_inputs() -> Graph:
    graph = Graph()
    x = graph.add_input("x", TensorType(FP32, (symbol("N"), 3)))
    z = graph.add_input("z", TensorType(FP32, (symbol("N"), 1)))
    add = graph.add("Add", [x, z], names=["sum"])
    graph.add_output(graph.add("Relu", [add.value]).value, "y")
    graph.add_output(add.value, "s")
    graph.add_output(x, "x")
    return graph


def test_outputs_come_by_name_in_order():
    x, z = np.array([[1, -5, 2]], np.float32), np.array([[1]], np.float32)
    out = evaluate(two_inputs(), {"z": z, "x": x})
    assert list(out) == ["y", "s", "x"]
    assert out["y"].tolist() == [[2, 0, 3]]
    assert out["s"].tolist() == [[2, -4, 3]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": None}, "input 'x' is missing"),
        ({"q": np.zeros(1)}, "there is no input 'q'"),
        ({"x": np.zeros((2, 3))}, r"input 'x' is fp32\[N, 3\], the array given is float64"),
        ({"x": np.zeros((2, 4), np.float32)}, r"input 'x' is fp32\[N, 3\], the array given has shape \[2, 4\]"),
        ({"x": np.zeros((2, 3, 1), np.float32)}, r"has shape \[2, 3, 1\]"),
        ({"z": np.zeros((5, 1), np.float32)}, r"N is 5 in it but 2 in input 'x'"),
    ],
)
def test_inputs_that_do_not_fit(change, message):
    feeds = {"x": np.zeros((2, 3), np.float32), "z": np.zeros((2, 1), np.float32), **change}
    with pytest.raises(InputError, match=message):
        evaluate(two_inputs(), {k: v for k, v in feeds.items() if v is not None})


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([4], "Split 'parts' gives 1 results, it has 2 outputs"),
        ([1, 1, 2], "Split 'parts' gives 3 results, it has 2 outputs"),
        ([5, -1], r"a size of \[5, -1\] is negative"),
        ([1, 2], "do not add up to 4"),
    ],
)
def test_sizes_that_an_input_gives(sizes, message):
    graph = Graph()
    x, s = graph.add_input("x", tensor(FP32, 4)), graph.add_input("s", TensorType(INT64, (symbol("P"),)))
    parts = graph.add("Split", [x, s], SplitAttrs(0), outputs=2, names=["parts", "rest"])
    for port in range(2):
        graph.add_output(Value(parts.id, port), f"y{port}")
    with pytest.raises(RunError, match=message):
        evaluate(graph, {"x": np.ones(4, np.float32), "s": np.array(sizes)})


def test_only_wanted_values_are_computed_and_arrays_are_dropped(monkeypatch):
    graph = two_inputs()
    ran: list[str] = []
    original = module.run_kernel
    monkeypatch.setattr(module, "run_kernel", lambda kind, *rest: ran.append(kind) or original(kind, *rest))
    feeds = random_feeds(graph)
    (add,) = graph.of_kind("Add")
    (got,) = values(graph, feeds, [add.value])
    assert ran == ["Add"]
    assert np.array_equal(got, feeds["x"] + feeds["z"])
    again = values(graph, feeds, [add.value, add.value, Value(graph.inputs[0])])
    assert np.array_equal(again[0], again[1])
    assert np.array_equal(again[2], feeds["x"])


def test_promotion_reaches_inputs_constants_attributes_and_stages():
    graph = Graph()
    x = graph.add_input("x", tensor(FP16, 2))
    i = graph.add_input("i", tensor(INT32, 2))
    cast = graph.add("Cast", [x], OPDEFS["Cast"].attrs(to=BF16)).value
    whole = graph.add("Cast", [i], OPDEFS["Cast"].attrs(to=BF16)).value
    c = graph.add_constant(np.array([1, 2], BF16), "c")
    body = (Stage("Add", (~0, 1)), Stage("Cast", (~1,), OPDEFS["Cast"].attrs(to=FP32)))
    fused = graph.add("Pointwise", [cast, c], PointwiseAttrs(epilogue=body)).value
    graph.add_output(graph.add("Cast", [whole], OPDEFS["Cast"].attrs(to=BOOL)).value, "b")
    graph.add_output(fused, "y")
    high = promote(graph)
    verify(high)
    types = {op.outputs[0].name: op.outputs[0].type.dtype for op in high.ops()}
    assert (types["x"], types["i"], types["c"], types["y"], types["b"]) == (FP64, INT32, FP64, FP64, BOOL)
    assert [high.op(k).outputs[0].name for k in high.inputs] == ["x", "i"]
    assert [high.op(k).outputs[0].name for k in high.outputs] == ["b", "y"]
    third = 1 / 3  # no narrower type has this number
    assert evaluate(high, {"x": np.array([third, 1]), "i": np.array([0, 7], np.int32)})["y"][0] == 1 + third
    assert graph.op(graph.inputs[0]).outputs[0].type.dtype == FP16  # a copy


def test_promoted_attributes():
    cast = OPDEFS["Cast"].attrs
    assert promoted_attrs(cast(to=FP16)).to == FP64
    assert promoted_attrs(cast(to=INT32)).to == INT32
    assert promoted_attrs(3) == 3


def test_random_feeds_are_seeded_and_typed():
    graph = Graph()
    graph.add_input("f", TensorType(BF16, (symbol("N"), 2 * symbol("N"))))
    graph.add_input("i", tensor(INT32, 50))
    graph.add_input("b", tensor(BOOL, 50))
    a, b = random_feeds(graph, 1), random_feeds(graph, 1)
    assert all(np.array_equal(a[k], b[k]) for k in a)
    assert not np.array_equal(a["i"], random_feeds(graph, 2)["i"])
    assert a["f"].shape == (2, 4)
    assert random_feeds(graph, sizes={"N": 3})["f"].shape == (3, 6)
    assert [a[k].dtype for k in "fib"] == [BF16, INT32, BOOL]
    assert a["i"].min() >= 0
