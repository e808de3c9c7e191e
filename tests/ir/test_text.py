"""The text form: readable, complete, and parsed back to the same graph."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx.parser
import pytest

from optdnn.dim import dim_max, dim_min, floordiv, mod, symbol
from optdnn.errors import ModelError
from optdnn.importers.onnx import import_model
from optdnn.ir.evaluate import evaluate, random_feeds
from optdnn.ir.graph import Graph
from optdnn.ir.text import constants_by_digest, from_text, to_text
from optdnn.ir.text_reader import Reader
from optdnn.ir.verify import verify
from optdnn.ops.base import Stage
from optdnn.ops.conv import ConvAttrs
from optdnn.ops.table import OPDEFS
from optdnn.types import DTYPES, FP32, TensorType, tensor


def round_trip(graph: Graph) -> str:
    text = to_text(graph)
    back = from_text(text, constants_by_digest(graph))
    verify(back)
    assert to_text(back) == text
    return text


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


def test_what_it_looks_like():
    lines = round_trip(fused()).splitlines()
    (digest,) = constants_by_digest(fused())
    assert lines == [
        'graph "net of two"',
        "symbol N 1..8",
        "input x: fp32[N, 3, 6, 6]",
        'input "odd name": fp32["batch size", 2*"batch size" - 1]',
        "input z: fp32[N, 4, 4, 4]",
        f"const w: fp32[4, 3, 3, 3] = sha256:{digest}",
        "const b: fp32[4] = [0.0, -0.5, inf, 9.999999747378752e-06] <- Constant_3",
        "const top: fp32[] = [6.0]",
        "c: fp32[N, 4, 4, 4] = Conv(x, w, b, z, top) strides=(1, 1) pads=(0, 0, 0, 0) dilations=(1, 1) "
        'epilogue=[Add(%0, $3), Clip(%1, _, $4), LeakyRelu(%2) alpha=0.5] <- /layer/Conv, "bias add:1"',
        '"two words": fp32[N, 2, 4, 4], second: fp32[N, 2, 4, 4] = Split(c) axis=1 num_outputs=2 <- s',
        'output y = "two words"',
        'output "odd name"',
    ]


def test_a_parsed_graph_computes_the_same():
    graph = fused()
    back = from_text(to_text(graph), constants_by_digest(graph))
    feeds = random_feeds(graph, sizes={"batch size": 1})
    for name, array in evaluate(graph, feeds).items():
        assert np.array_equal(evaluate(back, feeds)[name], array)
    assert [op.src for op in back.of_kind("Conv")] == [frozenset({"/layer/Conv", "bias add:1"})]
    assert (
        back.op(back.inputs[0]).outputs[0].type == graph.op(graph.inputs[0]).outputs[0].type
    )  # the symbol's range too


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


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_constants_of_every_type(name):
    graph = Graph("g")
    array = np.array([0, 1, 1, 0]).astype(DTYPES[name])
    graph.add_output(graph.add_constant(array, "c"), "y")
    back = from_text(to_text(graph), constants_by_digest(graph))
    got = back.of_kind("Constant")[0].attrs.value
    assert got.dtype == array.dtype
    assert got.tobytes() == array.tobytes()
    round_trip(graph)


@pytest.mark.parametrize("value", [0.1, -0.0, np.inf, -np.inf, np.nan, 1e-45, 3.4e38])
def test_floats_are_exact(value):
    graph = Graph("g")
    graph.add_output(graph.add_constant(np.array([value], np.float32), "c"), "y")
    got = from_text(to_text(graph)).of_kind("Constant")[0].attrs.value
    assert got.tobytes() == np.array([value], np.float32).tobytes() or np.isnan(value)
    assert np.array_equal(np.isnan(got), [np.isnan(value)])


def test_equal_arrays_have_one_digest_and_others_another():
    a = np.arange(100, dtype=np.float32)
    graphs = []
    for array in (a, a.copy(), a.reshape(10, 10), a.view(np.int32), a + 1, a.astype(ml_dtypes.bfloat16)):
        graph = Graph("g")
        graph.add_output(graph.add_constant(array, "c"), "y")
        graphs.append(next(iter(constants_by_digest(graph))))
    assert graphs[0] == graphs[1]
    assert len(set(graphs)) == 5


N, H = symbol("N"), symbol("h.0")


@pytest.mark.parametrize(
    ("dim", "text"),
    [
        (7, "7"),
        (N, "N"),
        (2 * N * H - 3 * N + 1, None),
        (-1 * N + 4, None),
        (N * N, "N*N"),
        (floordiv(N + 1, 2), "((N + 1) // (2))"),
        (mod(N, 3) * 2, None),
        (dim_min(N, dim_max(H, 4)), None),
        (floordiv(dim_min(N, 512) * H, N + 1) + 3, None),
        (symbol("a b") + symbol("//"), '"//" + "a b"'),
    ],
)
def test_dimensions(dim, text):
    graph = Graph("g")
    graph.add_output(graph.add_input("x", TensorType(FP32, (dim,))), "x")
    printed = round_trip(graph).splitlines()[1]
    assert text is None or printed == f"input x: fp32[{text}]"
    reader = Reader({})
    reader.rest = printed.removeprefix("input x: ")
    assert reader.type().shape == (dim,)


def test_types_may_be_left_out_and_a_printed_type_may_say_more():
    text = """
    # written by hand
    graph g
    input x: fp32[N, M]
    s: int64[2] = Shape(x)
    r = Reshape(x, s)
    p: fp32[A, 4] = NonZeroLike(r)
    """
    with pytest.raises(ModelError, match="line 7: unknown kind 'NonZeroLike'"):
        from_text(text)
    graph = from_text(text.replace("NonZeroLike", "Relu") + "output y = p\n")
    assert str(graph.op(graph.outputs[0]).outputs[0].type) == "fp32[A, 4]"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("y = Relu(q)", "'q' is not defined before it is used"),
        ("y = Relu(x", "expected a comma before ''"),
        ("y = Relu(x) alpha=1.0", "Relu has no attribute 'alpha'"),
        ("y = Elu(x) alpha=", "expected a value"),
        ("y = Elu(x) alpha=maybe", "unknown value 'maybe'"),
        ("y: int32[2] = Relu(x)", r"'y' is written as int32\[2\], but is fp32\[2\]"),
        ("y: fp32[3] = Relu(x)", r"'y' is written as fp32\[3\], but is fp32\[2\]"),
        ("y: fp32[2, 1] = Relu(x)", r"'y' is written as fp32\[2, 1\], but is fp32\[2\]"),
        ("y: float[2] = Relu(x)", "unknown element type 'float'"),
        ("x = Relu(x)", "'x' is defined twice"),
        ("y = Relu(x) <- a b", "unexpected 'b'"),
        ("const c: fp32[2] = [1.0]", "has 1 values"),
        ("const c: fp32[2] = sha256:00", "digest 00"),
        ("const c: fp32[20] = sha256:abcd", r"is fp32\[20\], the array given is float32\[3\]"),
        ("y = Conv(x)", "Conv"),
        ("y = Pointwise(x) epilogue=[Add(%0, 3)]", r"expected an operand \(\$k\) or register \(%k\)"),
        ("y = Pointwise(x) epilogue=[Nope(%0)]", "unknown kind 'Nope'"),
        ("a, b = Relu(x)", "Relu has 1 outputs, 2 are used"),
        ("output y", "'y' is not defined"),
        ("y - Relu(x)", "expected '='"),
    ],
)
def test_what_does_not_parse_names_its_line(line, message):
    with pytest.raises(ModelError, match=f"line 3: .*{message}"):
        from_text(f"graph g\ninput x: fp32[2]\n{line}\n", {"abcd": np.zeros(3, np.float32)})


def test_every_kind_with_default_attributes_prints():
    """Attributes of all kinds that can be made without arguments survive the trip."""
    reader = Reader({})
    tried = 0
    for kind, definition in OPDEFS.items():
        try:
            attrs = definition.attrs()
        except TypeError:
            continue  # needs arguments
        reader.rest = ""
        assert reader.attrs(kind) == attrs
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
    text = round_trip(import_model(m))
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


def test_bodies_come_back() -> None:
    graph = import_model(onnx.parser.parse_model(NESTED))
    text = round_trip(graph)
    assert text.count("\nbody ") == 4
    inner, outer = text.index("p: fp32"), text.index("kept: fp32")
    assert inner < outer  # what is inside of a body comes before it
    feeds = random_feeds(graph, sizes={"N": 2}) | {"n": np.array(3)}
    back = from_text(text, constants_by_digest(graph))
    for name, want in evaluate(graph, feeds).items():
        np.testing.assert_array_equal(evaluate(back, feeds)[name], want)


def test_a_body_that_two_ops_share_is_written_once() -> None:
    text = NESTED.replace(
        "else_branch = e () => (float[N, 3] v) {v = Neg(x)}", "else_branch = t () => (float[N, 3] u) {u = Mul(x, w)}"
    )
    assert round_trip(import_model(onnx.parser.parse_model(text))).count("\nbody ") == 3


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("input x: fp32[2]\n}", "line 2: there is no body that could end here"),
        ("body b {\ninput x: fp32[2]\noutput x", "body 'b' does not end"),
        ("body b {\n}\nbody b {", "line 3: body 'b' is defined twice"),
        ("body b", r"line 1: expected '\{'"),
        ("input n: int64[]\ny = Loop(n, _) body=@b carried=0", "line 2: body 'b' is not defined before it is used"),
    ],
)
def test_malformed_bodies(lines: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        from_text(f'graph "g"\n{lines}'.removeprefix('graph "g"\n'))
