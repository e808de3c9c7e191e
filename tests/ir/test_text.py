"""The text form: readable, exact, and the same for equal graphs."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import onnx.parser
import pytest

from optdnn.dim import floordiv, symbol
from optdnn.importers.onnx import import_model
from optdnn.ir.graph import Graph
from optdnn.ir.text import attrs_text, to_text
from optdnn.ops.base import Stage
from optdnn.ops.conv import ConvAttrs
from optdnn.ops.table import OPDEFS
from optdnn.types import DTYPES, FP32, TensorType, is_int, tensor


def fused() -> Graph:
    graph = Graph("net of two")
    x = graph.add_input("x", TensorType(FP32, (symbol("N", 1, 8), 3, 6, 6)))
    odd = graph.add_input("odd name", TensorType(FP32, (symbol("batch size"), 2 * symbol("batch size") - 1)))
    z = graph.add_input("z", TensorType(FP32, (symbol("N", 1, 8), 4, 4, 4)))
    w = graph.add_constant(np.random.default_rng(0).standard_normal((4, 3, 3, 3)).astype(np.float32), "w")
    b = graph.add_constant(np.array([0, -0.5, np.inf, 1e-5], np.float32), "b", ["Constant_3"])
    top = graph.add_constant(np.array(6, np.float32), "top")
    stages = (
        Stage("Add", (~0, 3)),
        Stage("Clip", (~1, None, 4)),
        Stage("LeakyRelu", (~2,), OPDEFS["LeakyRelu"].attrs(alpha=0.5)),
    )
    attrs = ConvAttrs(strides=(1, 1), pads=(0, 0, 0, 0), dilations=(1, 1), epilogue=stages)
    c = graph.add("Conv", [x, w, b, z, top], attrs, names=["c"], src=["/layer/Conv", "bias add:1"])
    split = OPDEFS["Split"].attrs(axis=1, num_outputs=2)
    pair = graph.add("Split", [c.value], split, names=["two words", "second"], outputs=2, src=["s"])
    graph.add_output(pair.value, "y")
    graph.add_output(odd, "odd name")
    return graph


def test_the_form_of_the_result():
    assert re.sub("sha256:[0-9a-f]{16}", "sha256:DIGEST", to_text(fused())).splitlines() == [
        'graph "net of two"',
        "symbol N 1..8",
        "input x: fp32[N, 3, 6, 6]",
        'input "odd name": fp32[batch size, 2*batch size - 1]',
        "input z: fp32[N, 4, 4, 4]",
        "const w: fp32[4, 3, 3, 3] = sha256:DIGEST",
        "const b: fp32[4] = [0.0, -0.5, inf, 9.999999747378752e-06] <- Constant_3",
        "const top: fp32[] = [6.0]",
        "c: fp32[N, 4, 4, 4] = Conv(x, w, b, z, top) strides=(1, 1) pads=(0, 0, 0, 0) dilations=(1, 1) "
        'epilogue=[Add(%0, $3), Clip(%1, _, $4), LeakyRelu(%2) alpha=0.5] <- /layer/Conv, "bias add:1"',
        '"two words": fp32[N, 2, 4, 4], second: fp32[N, 2, 4, 4] = Split(c) axis=1 num_outputs=2 <- s',
        'output y = "two words"',
        'output "odd name"',
    ]


def test_the_text_does_not_depend_on_ids_or_insertion_order():
    def build(backwards: bool) -> Graph:
        graph = Graph("g")
        x = graph.add_input("x", tensor(np.float32, 2))
        parts = {}
        for kind in ["Exp", "Abs"] if backwards else ["Abs", "Exp"]:
            parts[kind] = graph.add(kind, [x], names=[kind.lower()]).value
        graph.add_output(graph.add("Add", [parts["Abs"], parts["Exp"]], names=["s"]).value, "y")
        return graph

    assert to_text(build(True)) == to_text(build(False))


def constant_line(array: np.ndarray) -> str:
    graph = Graph("g")
    graph.add_output(graph.add_constant(array, "c"), "y")
    return to_text(graph).splitlines()[1]


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_constants_of_every_type(name):
    array = np.array([0, 1, 1, 0]).astype(DTYPES[name])
    kind = array.dtype.kind
    shown = {"b": "[false, true, true, false]", "c": "sha256:"}.get(kind) or (
        "[0, 1, 1, 0]" if is_int(array.dtype) else f"[{', '.join(str(float(x)) for x in array)}]"
    )
    assert constant_line(array).startswith(f"const c: {name}[4] = {shown}")


@pytest.mark.parametrize("value", [0.1, -0.0, np.inf, -np.inf, np.nan, 1e-45, 3.4e38])
def test_floats_are_exact(value):
    array = np.array([value], np.float32)
    shown = constant_line(array).partition("[1] = [")[2].removesuffix("]")
    assert np.array(float(shown), np.float32).tobytes() == array.tobytes() or np.isnan(value)
    assert np.isnan(float(shown)) == np.isnan(value)


def test_equal_arrays_have_one_digest_and_others_another():
    a = np.arange(100, dtype=np.float32)
    arrays = (a, a.copy(), a.reshape(10, 10), a.view(np.int32), a + 1, a.astype(ml_dtypes.bfloat16))
    digests = [constant_line(array).partition("sha256:")[2] for array in arrays]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 5


N = symbol("N")


@pytest.mark.parametrize(
    ("dim", "text"),
    [(7, "7"), (N, "N"), (N * N, "N*N"), (-1 * N + 4, "-N + 4"), (floordiv(N + 1, 2), "(N + 1)//2")],
)
def test_dimensions(dim, text):
    graph = Graph("g")
    graph.add_output(graph.add_input("x", TensorType(FP32, (dim,))), "x")
    assert to_text(graph).splitlines()[1] == f"input x: fp32[{text}]"


def test_default_attributes_are_left_out():
    tried = 0
    for definition in OPDEFS.values():
        try:
            attrs = definition.attrs()
        except TypeError:
            continue  # needs arguments
        assert attrs_text(attrs) == ""
        tried += 1
    assert tried > 80


def test_an_imported_model():
    m = onnx.parser.parse_model(
        """<ir_version: 9, opset_import: ["" : 18]>
        g (float[N, 4, 4] x, float16[3] h) => (float[N, M] y, float[3] k, int64[D] i, float[N, 4] r)
        <int64[1] minus = {-1}, int64 zero = {0}, int64[1] ax = {0}, int64[1] two = {2}, int64[2] pads = {0, 1}> {
          shape = Shape(x)  n = Gather(shape, zero)  nn = Unsqueeze(n, ax)  s = Concat<axis = 0>(nn, minus)
          f = Reshape(x, s)  y = HardSigmoid<alpha = 0.25>(f)  k = Cast<to = 1>(h)
          i = Pad<mode = "constant">(shape, pads)  r = ReduceLogSumExp<keepdims = 0>(x, two) }"""
    )
    text = to_text(import_model(m))
    assert "Cast(h)" in text
    assert 'mode="constant"' not in text  # it is the default
    assert "ReduceLogSumExp(x, two) keepdims=false" in text


# ---------------------------------------------------------------- bodies

NESTED = """
<ir_version: 10, opset_import: ["" : 21]>
g (float[N, 3] x, bool c, int64 n) => (float[N, 3] y, float[t, N, 3] all) <float[3] w = {1, 2, 3}> {
    a = If(c) <then_branch = t () => (float[N, 3] u) {u = Mul(x, w)}, else_branch = e () => (float[N, 3] v) {v = Neg(x)}>
    y, all = Loop(n, , a) <body = b (int64 i, bool going, float[N, 3] s) => (bool on, float[N, 3] r, float[N, 3] kept) {
        on = Identity(going)
        r = Loop(i, , s) <body = d (int64 j, bool more, float[N, 3] q) => (bool still, float[N, 3] p)
            {still = Identity(more)  p = Add(q, x)}>
        kept = Mul(r, s)
    }>
}
"""


def test_bodies_come_before_their_operators() -> None:
    text = to_text(import_model(onnx.parser.parse_model(NESTED)))
    assert text.count("\nbody ") == 4
    inner, outer = text.index("p: fp32"), text.index("kept: fp32")
    assert inner < outer  # values inside of a body come before it
    for digest in re.findall(r"=@(\w+)", text):
        assert f"body {digest} {{\n" in text


def test_a_body_that_two_ops_share_is_written_once() -> None:
    text = NESTED.replace(
        "else_branch = e () => (float[N, 3] v) {v = Neg(x)}", "else_branch = t () => (float[N, 3] u) {u = Mul(x, w)}"
    )
    assert to_text(import_model(onnx.parser.parse_model(text))).count("\nbody ") == 3
