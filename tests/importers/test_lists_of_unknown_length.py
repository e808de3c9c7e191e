"""Sequences whose length follows from a size of an input: loops over their elements become loops that stack tensors."""

from __future__ import annotations

import numpy as np
import pytest
from onnx.reference import ReferenceEvaluator
from onnxtext import model

import optdnn
from optdnn.errors import UnsupportedError
from optdnn.importers.onnx import import_model

X = np.arange(2 * 6 * 3, dtype=np.float32).reshape(2, 6, 3)


APPENDS = """g (float[N,3,4] x) => ({shape} y, float[3,4] p, int64 n) <int64 zero = {{0}}, int64[1] one = {{1}}, bool on = {{1}},
        int64 at = {{-1}}, float[3,4] start = {{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}}> {{
    empty = SequenceEmpty<dtype = 1>()  sizes = Shape(x)  trips = Gather(sizes, zero)
    s, last = Loop<body = b (int64 i, bool go, seq(float[3,4]) held, float[3,4] sum)
            => (bool c, seq(float[3,4]) more, float[3,4] next) {{
        row = Gather(x, i)  next = Add(sum, row)  more = SequenceInsert(held, {row})  c = Identity(go)
    }}>(trips, on, empty, start)
    y = {end}  p = SequenceAt(s, at)  n = SequenceLength(s) }}"""


@pytest.mark.parametrize(("axis", "new_axis"), [(0, 1), (1, 1), (-1, 1), (0, 0), (1, 0), (-1, 0)])
def test_a_loop_whose_iterations_follow_from_a_size_stacks_appended_tensors(axis: int, new_axis: int) -> None:
    """PyTorch scripts ``for i in range(len(x)): rows.append(...)`` like this. The length of the list is not known at import."""
    end = f"ConcatFromSequence<axis = {axis}, new_axis = {new_axis}>(s)"
    proto = model(APPENDS.format(shape="float[a,b,c]" if new_axis else "float[a,b]", end=end, row="next"), 17)
    engine = optdnn.build(proto, target="reference")
    for size in (1, 2, 5):
        x = np.random.default_rng(size).standard_normal((size, 3, 4)).astype(np.float32)
        want = ReferenceEvaluator(proto).run(None, {"x": x})
        for port, expected in zip(proto.graph.output, want, strict=True):
            np.testing.assert_array_equal(engine.run({"x": x})[port.name], expected)


def test_an_iteration_may_make_lists_of_its_own() -> None:
    """PyTorch scripts ``chunk`` in the cell of a recurrent network like this."""
    text = APPENDS.format(shape="float[a,b,c]", end="ConcatFromSequence<axis = 0, new_axis = 1>(s)", row="next")
    own = """halves = SplitToSequence<axis = 1>(row, two)  first = SequenceAt(halves, zero)  second = SequenceAt(halves, at)
        turned = SequenceConstruct(second, first)  cell = ConcatFromSequence<axis = 1>(turned)  next = Add(sum, cell)"""
    proto = model(text.replace("next = Add(sum, row)", own).replace("int64 at =", "int64 two = {2}, int64 at ="), 17)
    engine = optdnn.build(proto, target="reference")
    for size in (1, 2, 5):
        x = np.random.default_rng(size).standard_normal((size, 3, 4)).astype(np.float32)
        np.testing.assert_array_equal(
            engine.run({"x": x})["y"], np.cumsum(np.roll(x, 2, axis=2), axis=0, dtype=np.float32)
        )


MAPPED = """g (float[N,M,3] x) => (float{shape} y, float{part} p, int64 n)
        <int64 unit = {{1}}, int64 at = {{-1}}, float[3] c = {{1, 2, 3}}> {{
    s = SplitToSequence<axis = {axis}{more}>(x{unit})
    t = SequenceMap<body = b (float{part} a) => (float{part} o) {{
        e = Mul(a, c)  m = ReduceMax<keepdims = 1>(e)  o = Div(e, m) }}>(s)
    y = ConcatFromSequence<axis = {axis}, new_axis = {new}>(t)  p = SequenceAt(s, at)  n = SequenceLength(t) }}"""


@pytest.mark.parametrize("target", ["reference", "simulate"])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("form", ["unit", "kept", "dropped"])
def test_a_split_along_an_axis_of_unknown_size_is_mapped(target: str, axis: int, form: str) -> None:
    """Each part has one element along the axis, which keepdims=0 removes."""
    kept = form != "dropped"
    part, whole = ("[a,b,3]" if kept else "[a,3]"), "[N,M,3]"
    text = MAPPED.format(
        shape=whole,
        part=part,
        axis=axis,
        more="" if kept else ", keepdims = 0",
        unit=", unit" if form == "unit" else "",
        new=int(not kept),
    )
    proto, ranged = model(text, 17), optdnn.DimRange(1, 2, 5)
    engine = optdnn.build(proto, target=target, shapes={"x": (ranged, ranged, 3)}, precision="fp32")
    for size in ((1, 2), (5, 3)):
        x = np.random.default_rng(size[0]).uniform(1, 2, (*size, 3)).astype(np.float32)
        scaled = x * np.array([1, 2, 3], np.float32)
        got = engine.run({"x": x})
        np.testing.assert_allclose(got["y"], scaled / scaled.max((1 - axis, 2), keepdims=True), rtol=1e-6)
        np.testing.assert_array_equal(got["p"], x.take([-1] if kept else -1, axis))
        assert got["n"] == size[axis]


UNBOUND = """g (float[{shape}] x) => (float[b,a,3] y) <int64 one = {{1}}, bool on = {{1}}> {{
    s = SplitToSequence<axis = 1, keepdims = 0>(x, one)  n = SequenceLength(s)  empty = SequenceEmpty<dtype = 1>()
    t = Loop<body = b (int64 i, bool go, seq(float[a,3]) held) => (bool c, seq(float[a,3]) more) {{
        row = SequenceAt(s, i)  r = Relu(row)  more = SequenceInsert(held, r)  c = Identity(go) }}>(n, on, empty)
    y = ConcatFromSequence<axis = 0, new_axis = 1>(t) }}"""


@pytest.mark.parametrize("shape", ["2,6,3", "N,M,3"])
@pytest.mark.parametrize("target", ["reference", "simulate"])
def test_a_scripted_loop_over_unbind(shape: str, target: str) -> None:
    """PyTorch writes a size of 1 with keepdims=0, which removes the axis in ONNX Runtime."""
    shapes = {"x": (optdnn.DimRange(1, 2, 4), optdnn.DimRange(1, 3, 6), 3)} if "N" in shape else {}
    engine = optdnn.build(model(UNBOUND.format(shape=shape), 17), target=target, shapes=shapes, precision="fp32")
    np.testing.assert_array_equal(engine.run({"x": X - 10})["y"], np.maximum(X - 10, 0).transpose(1, 0, 2))


def test_a_loop_reads_the_parts_of_a_split_along_an_axis_of_unknown_size() -> None:
    """PyTorch scripts ``for row in x`` like this."""
    text = """g (float[N,3,4] x, float[3,4] start) => (float[3,4] y) <bool on = {1}> {
        s = SplitToSequence<axis = 0, keepdims = 0>(x)  n = SequenceLength(s)
        y = Loop<body = b (int64 i, bool go, float[3,4] sum) => (bool c, float[3,4] next) {
            row = SequenceAt(s, i)  r = Relu(row)  next = Add(sum, r)  c = Identity(go) }>(n, on, start) }"""
    proto = model(text, 17)
    engine = optdnn.build(proto, target="reference")
    for size in (1, 4):
        x = np.random.default_rng(size).standard_normal((size, 3, 4)).astype(np.float32)
        got = engine.run({"x": x, "start": x[0]})["y"]
        np.testing.assert_allclose(got, x[0] + np.maximum(x, 0).sum(0), rtol=1e-6)


@pytest.mark.parametrize(
    ("row", "end", "why"),
    [
        ("part", "ConcatFromSequence<axis = 0>(s)", "a constant number of iterations"),
        ("next", "ConcatFromSequence<axis = 0>(t)", "the number of tensors in its sequence is not known"),
    ],
)
def test_lists_of_unknown_length_that_are_refused(row: str, end: str, why: str) -> None:
    """Tensors of different shapes, and operators that need the length."""
    text = APPENDS.format(shape="float[a,b]", end=end, row=row)
    text = text.replace("next = Add", "to = Unsqueeze(i, one)  part = Slice(row, one, to, one)  next = Add")
    text = text.replace("    y = ", "    t = SequenceErase(s)  y = ")
    with pytest.raises(UnsupportedError, match=why):
        import_model(model(text.replace("Unsqueeze(i, one)", "Reshape(i, one)"), 17))
