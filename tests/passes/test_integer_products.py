"""integer_product: MatMulInteger and ConvInteger with constant weights become products on tensor cores."""

from __future__ import annotations

import numpy as np
import pytest
from support.check import from_text

from optdnn.ir.evaluate import evaluate
from optdnn.ir.graph import Graph
from optdnn.ir.verify import verify
from optdnn.passes.base import PassContext, PassReport
from optdnn.passes.fold_quantized import FoldQuantized
from optdnn.passes.rules.integer_products import ONES

HEAD = '<ir_version: 9, opset_import: ["": 17]>\n'
PRODUCT = (
    HEAD
    + """g (float[4,6] x) => (float[4,5] y) <WEIGHTS>
{ q, s, z = DynamicQuantizeLinear(x) p = MatMulInteger(q, w, z, zero) f = Cast<to = 1>(p) y = Mul(f, s) }"""
)
CONV = (
    HEAD
    + """g (float[2,4,6,5] x) => (float[2,4,a,b] y) <WEIGHTS>
{ q, s, z = DynamicQuantizeLinear(x) p = ConvInteger<ATTRS>(q, w, z, zero) f = Cast<to = 1>(p) y = Mul(f, s) }"""
)


def weights(dtype: str, *shape: int, zero: str = "0", seed: int = 0) -> str:
    low, high = (0, 256) if dtype == "uint8" else (-128, 128)
    drawn = np.random.default_rng(seed).integers(low, high, shape).reshape(-1)
    points = zero.split(",")
    of_columns = f"[{len(points)}]" if len(points) > 1 else ""
    listed = ",".join(map(str, drawn))
    return f"{dtype}[{','.join(map(str, shape))}] w = {{{listed}}}, {dtype}{of_columns} zero = {{{zero}}}"


def folded(text: str) -> tuple[Graph, PassReport]:
    """The graph after the pass, checked against the graph before it."""
    graph = from_text(text)
    copy = graph.copy()
    report = FoldQuantized()(copy, PassContext(target="cuda:sm_90a"))
    verify(copy)
    size = graph.op(graph.inputs[0]).outputs[0].type.static_shape
    feeds = {"x": np.random.default_rng(1).standard_normal(size).astype(np.float32) + np.float32(0.5)}
    np.testing.assert_array_equal(evaluate(copy, feeds)["y"], evaluate(graph, feeds)["y"])
    return copy, report


@pytest.mark.parametrize(
    ("given", "columns"),
    [
        (weights("int8", 6, 5), 5),
        (weights("int8", 6, 5, zero="1,-2,3,4,0"), 5 + ONES),
        (weights("uint8", 6, 5, zero="128"), 5),
        (weights("uint8", 6, 5, zero="120"), 5 + ONES),
    ],
    ids=["int8", "int8 with zero points", "uint8 around 128", "uint8"],
)
def test_products(given: str, columns: int) -> None:
    graph, _ = folded(PRODUCT.replace("WEIGHTS", given))
    (product,) = graph.of_kind("QuantizedMatMul")
    assert product.outputs[0].type.static_shape == (4, columns)
    assert "MatMulInteger" not in graph.kinds()


@pytest.mark.parametrize("zero", ["0", "3", "1,-2,3,4"])
@pytest.mark.parametrize(
    "attrs", ["pads = [1,1,1,1]", "pads = [0,0,0,0]", "pads = [2,0,1,1], strides = [2,1]", 'auto_pad = "SAME_UPPER"']
)
def test_convolutions(attrs: str, zero: str) -> None:
    text = CONV.replace("WEIGHTS", weights("int8", 4, 4, 3, 3, zero=zero)).replace("ATTRS", attrs)
    graph, _ = folded(text)
    (product,) = graph.of_kind("QuantizedConv")
    assert product.outputs[0].type.static_shape[1] == (4 if zero == "0" else 4 + ONES)


def test_groups() -> None:
    text = CONV.replace("WEIGHTS", weights("int8", 4, 1, 3, 3)).replace("ATTRS", "group = 4, pads = [1,1,1,1]")
    assert folded(text)[0].kinds()["QuantizedConv"] == 1


def test_a_zero_point_of_0_takes_nothing_away() -> None:
    text = PRODUCT.replace("WEIGHTS", weights("int8", 6, 5) + ", uint8 none = {0}").replace(
        "w, z, zero", "w, none, zero"
    )
    graph, _ = folded(text)
    assert graph.kinds()["QuantizedMatMul"] == 1
    assert "Sub" not in {s.kind for op in graph.of_kind("Pointwise") for s in op.attrs.epilogue} | graph.kinds().keys()


GROUPS = CONV.replace("ATTRS", "group = 4").replace("WEIGHTS", weights("int8", 4, 1, 3, 3, zero="3"))
COMPUTED = PRODUCT.replace("WEIGHTS", "int8 zero = {0}").replace("float[4,6] x", "float[4,6] x, int8[6,5] w")
PER_ROW = PRODUCT.replace("WEIGHTS", weights("int8", 6, 5) + ", uint8[4] rows = {1,2,3,4}").replace("w, z,", "w, rows,")
INTEGERS = (
    PRODUCT.replace("WEIGHTS", weights("int8", 6, 5))
    .replace("Cast<to = 1>(p)", "Cast<to = 1>(i)")
    .replace("f = ", "i = Abs(p) f = ")
)


@pytest.mark.parametrize(
    ("text", "because"),
    [
        (GROUPS, "its weights have zero points and groups"),
        (COMPUTED, "its weights are not constant"),
        (PER_ROW, "its data have a zero point per row"),
        (INTEGERS, "its sums are read as integers"),
        (PRODUCT.replace("WEIGHTS", weights("int8", 6, 5)).replace("[4,", "[n,"), "its size is not fixed"),
    ],
)
def test_refusals(text: str, because: str) -> None:
    graph = from_text(text)
    report = FoldQuantized()(graph, PassContext(target="cuda:sm_90a"))
    assert because in " ".join(r.reason for r in report.refused)
    assert {"MatMulInteger", "ConvInteger"} & graph.kinds().keys()


def test_other_targets_keep_them() -> None:
    graph = from_text(PRODUCT.replace("WEIGHTS", weights("int8", 6, 5)))
    assert FoldQuantized()(graph, PassContext(target="cpu")).changes == 0
