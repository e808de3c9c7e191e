"""dynamic_quantization: dynamically quantized data get the form of other quantized networks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.check import check_refused, check_untouched, from_text

from optdnn.ir.evaluate import evaluate
from optdnn.ir.graph import Graph
from optdnn.ir.verify import verify
from optdnn.passes.base import PassReport
from optdnn.passes.dynamic_quantization import DynamicQuantization

HEAD = '<ir_version: 9, opset_import: ["": 17]>\n'
PRODUCT = (
    HEAD
    + """g (float[4,6] x) => (float[4,5] y) <WEIGHTS, STEP>
{ q, s, z = DynamicQuantizeLinear(x) p = MatMulInteger(q, w, z, zero) f = Cast<to = 1>(p) t = Mul(s, step) y = Mul(f, t) }"""
)
CONV = (
    HEAD
    + """g (float[2,4,6,5] x) => (float[2,4,a,b] y) <WEIGHTS, STEP>
{ q, s, z = DynamicQuantizeLinear(x) p = ConvInteger<ATTRS>(q, w, z, zero) f = Cast<to = 1>(p) t = Mul(step, s) y = Mul(t, f) }"""
)
PAIR = (
    HEAD
    + """g (float[2,4,6] x, float[2,6,5] u) => (float[2,4,5] y)
{ q, s, z = DynamicQuantizeLinear(x) r, t, v = DynamicQuantizeLinear(u) p = MatMulInteger(q, r, z, v) f = Cast<to = 1>(p)
  both = Mul(SCALES) y = Mul(f, both) }"""
)
ONE = "float step = {0.03125}"
EACH = "float[5] step = {0.5,0.25,1.0,0.125,2.0}"


def weights(dtype: str, *shape: int, zero: str = "0", most: int = 256) -> str:
    low, high = (0, most) if dtype == "uint8" else (-128, 128)
    drawn = np.random.default_rng(3).integers(low, high, shape).reshape(-1)
    points = zero.split(",")
    of_columns = f"[{len(points)}]" if len(points) > 1 else ""
    listed = ",".join(map(str, drawn))
    return f"{dtype}[{','.join(map(str, shape))}] w = {{{listed}}}, {dtype}{of_columns} zero = {{{zero}}}"


def network(text: str, given: str = "", step: str = ONE, attrs: str = "pads = [0,0,0,0]") -> str:
    return text.replace("WEIGHTS", given or weights("int8", 6, 5)).replace("STEP", step).replace("ATTRS", attrs)


def rewritten(text: str) -> tuple[Graph, PassReport]:
    """The graph after the pass: it keeps the results, changes nothing more, and loses no node's name.

    Its sums are of floats before they are folded, so results may differ by their rounding.
    """
    graph = from_text(text)
    copy = graph.copy()
    report = DynamicQuantization()(copy)
    verify(copy)
    assert DynamicQuantization()(copy.copy()).changes == 0
    assert frozenset().union(*(op.src for op in graph.ops())) == frozenset().union(*(op.src for op in copy.ops()))
    rng = np.random.default_rng(1)
    feeds: dict[str, Any] = {}
    for i in graph.inputs:
        out = graph.op(i).outputs[0]
        feeds[out.name] = rng.standard_normal(out.type.static_shape).astype(np.float32) + np.float32(0.5)
    want, got = evaluate(graph, feeds), evaluate(copy, feeds)
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-5, atol=1e-6 * np.abs(want[name]).max())
    return copy, report


def fired(report: PassReport) -> list[str]:
    return sorted(f.rule for f in report.fired)


@pytest.mark.parametrize(
    ("given", "step"),
    [
        (weights("int8", 6, 5), ONE),
        (weights("int8", 6, 5), EACH),
        (weights("uint8", 6, 5, zero="128"), EACH),
        (weights("uint8", 6, 5, zero="60", most=128), ONE),
        (weights("uint8", 6, 5, zero="60,61,62,63,64", most=128), EACH),
    ],
    ids=["int8", "per column", "uint8 around 128", "a smaller range", "zero points per column"],
)
def test_products(given: str, step: str) -> None:
    graph, report = rewritten(network(PRODUCT, given, step))
    assert fired(report) == ["dynamic_product", "dynamic_range"]
    assert graph.kinds() == {"DequantizeLinear": 2, "DynamicRange": 1, "MatMul": 1, "QuantizeLinear": 1}
    (product,) = graph.of_kind("MatMul")
    data, other = (graph.op(v) for v in product.inputs if v is not None)
    (made,) = graph.of_kind("DynamicRange")
    assert [v.op for v in data.inputs[1:] if v is not None] == [made.id, made.id]
    stored = graph.constant_value(other.inputs[0])
    assert stored is not None
    assert stored.dtype == np.int8
    assert other.input(2) is None, "weights are stored minus their zero points"


@pytest.mark.parametrize("attrs", ["pads = [1,1,1,1]", "strides = [2,1]", 'auto_pad = "SAME_UPPER"'])
def test_convolutions(attrs: str) -> None:
    graph, report = rewritten(network(CONV, weights("int8", 4, 4, 3, 3), ONE, attrs))
    assert fired(report) == ["dynamic_product", "dynamic_range"]
    assert graph.kinds()["Conv"] == 1


def test_groups_and_scales_of_channels() -> None:
    step = "float[4,1,1] step = {0.5,0.25,1.0,0.125}"
    graph, _ = rewritten(network(CONV, weights("int8", 4, 1, 3, 3), step, "group = 4"))
    (conv,) = graph.of_kind("Conv")
    assert conv.attrs.group == 4


@pytest.mark.parametrize("scales", ["s, t", "t, s"])
def test_two_computed_operands_have_their_own_scales(scales: str) -> None:
    graph, report = rewritten(PAIR.replace("SCALES", scales))
    assert fired(report) == ["dynamic_product", "dynamic_range", "dynamic_range"]
    (product,) = graph.of_kind("MatMul")
    for value in product.inputs:
        dequantize = graph.op(value)  # type: ignore[arg-type]
        rounded = graph.op(dequantize.inputs[0])  # type: ignore[arg-type]
        assert dequantize.inputs[1:] == rounded.inputs[1:]


def test_all_results_of_a_quantization_are_kept() -> None:
    text = HEAD + "g (float[4,6] x) => (uint8[4,6] q, float s, uint8 z) { q, s, z = DynamicQuantizeLinear(x) }"
    graph, report = rewritten(text)
    assert fired(report) == ["dynamic_range"]
    assert [graph.op(i).outputs[0].name for i in graph.outputs] == ["q", "s", "z"]


def test_the_zero_point_of_data_that_are_never_negative_is_0() -> None:
    text = network(CONV, weights("int8", 4, 4, 3, 3), ONE, "pads = [1,1,1,1]")
    text = text.replace("{ q, s, z = DynamicQuantizeLinear(x)", "{ h = Relu(x) q, s, z = DynamicQuantizeLinear(h)")
    graph, _ = rewritten(text)
    (rounded,) = graph.of_kind("QuantizeLinear")
    (data,) = (op for op in graph.of_kind("DequantizeLinear") if op.inputs[0] == rounded.value)
    for op in (rounded, data):
        zero = graph.constant_value(op.inputs[2])
        assert zero is not None
        assert (zero.dtype, zero.tolist()) == (np.uint8, 0)


LARGE = weights("uint8", 6, 5, zero="60")
PER_ROW = network(PRODUCT, weights("int8", 6, 5) + ", uint8[4] rows = {1,2,3,4}").replace("w, z,", "w, rows,")
INTEGERS = network(PRODUCT).replace("Cast<to = 1>(p)", "Cast<to = 1>(i)").replace("f = ", "i = Abs(p) f = ")
COMPUTED = network(PRODUCT, "int8 zero = {0}").replace("float[4,6] x", "float[4,6] x, int8[6,5] w")
COLUMNS = COMPUTED.replace(ONE, EACH)
STEPS = network(PRODUCT, step="float one = {1.0}").replace("float[4,6] x", "float[4,6] x, float[5] step")
ROWS = PAIR.replace("SCALES", "k, t").replace("float[2,6,5] u", "float[2,6,5] u, float[4,1] k")
STACKED = PAIR.replace("float[2,6,5] u", "float[3] u").replace(
    "p = MatMulInteger(q, r, z, v)", "p = MatMulInteger(q, w, z)"
)
STACKED = STACKED.replace("=> (float[2,4,5] y)", f"=> (float[2,4,5] y) <{weights('int8', 2, 6, 5)}>").replace(
    "SCALES", "s, t"
)


@pytest.mark.parametrize(
    ("text", "because"),
    [
        (network(PRODUCT, LARGE), "exceed 8 bits"),
        (PER_ROW, "its data have a zero point per row"),
        (INTEGERS, "its sums are read as integers"),
        (network(PRODUCT).replace("t = Mul(s, step)", "t = Add(s, step)"), "by the product of two scales"),
        (network(PRODUCT).replace("y = Mul(f, t)", "y = Add(f, t)"), "its sums are not scaled"),
        (COLUMNS, "has scales or zero points per column"),
        (STEPS, "of its weights is not constant"),
        (ROWS, "its data have a scale per row"),
        (STACKED, "its weights have 3 axes"),
        (network(PRODUCT).replace("[4,", "[n,"), "its size is not fixed"),
        (
            network(CONV, "int8 zero = {0}").replace("float[2,4,6,5] x", "float[2,4,6,5] x, int8[4,4,3,3] w"),
            "weights are computed",
        ),
    ],
)
def test_refusals(text: str, because: str) -> None:
    graph = from_text(text)
    report = DynamicQuantization()(graph)
    assert because in " ".join(r.reason for r in report.refused)
    assert {"MatMulInteger", "ConvInteger"} & graph.kinds().keys()


@pytest.mark.parametrize(("size", "because"), [("n", "its size is not fixed"), ("0", "it has no elements")])
def test_ranges_that_stay(size: str, because: str) -> None:
    text = (
        f"{HEAD}g (float[{size},6] x) => (uint8[{size},6] q, float s, uint8 z) {{ q, s, z = DynamicQuantizeLinear(x) }}"
    )
    check_refused(DynamicQuantization(), text, because=because, rule="dynamic_range")


def test_other_products_are_no_candidates() -> None:
    check_untouched(
        DynamicQuantization(), HEAD + "g (float[4,6] x, float[6,5] w) => (float[4,5] y) { y = MatMul(x, w) }"
    )
