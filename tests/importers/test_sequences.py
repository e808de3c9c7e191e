"""Sequences of tensors are selected from, concatenated and split while a model is imported. No operator of the graph holds one."""

from __future__ import annotations

import numpy as np
import pytest
from onnx.reference import ReferenceEvaluator
from onnxtext import model, sources

import optdnn
from optdnn.errors import ModelError, ShapeError, UnsupportedError
from optdnn.importers.onnx import import_model
from optdnn.ops import sequence_loops

X = np.arange(2 * 6 * 3, dtype=np.float32).reshape(2, 6, 3)


def agrees(text: str, opset: int = 17) -> list[str]:
    """The kinds of the graph of a model. On ``X``, it must compute the results of ONNX's reference."""
    proto = model(text, opset)
    want = ReferenceEvaluator(proto).run(None, {"x": X})
    found = optdnn.build(proto, target="reference").run({"x": X})
    for port, expected in zip(proto.graph.output, want, strict=True):
        np.testing.assert_array_equal(found[port.name], expected)
        assert found[port.name].dtype == expected.dtype
    return [kind for kind, _ in sources(import_model(proto))]


def test_a_split_list_is_picked_from_by_position() -> None:
    text = """g (float[2,6,3] x) => (float[2,6,1] y, float[2,6,1] z) <int64 a = {0}, int64 last = {-1}, int64 n = {1}> {
        s = SplitToSequence<axis = -1>(x, n)  p = SequenceAt(s, a)  q = SequenceAt(s, last)  y = Relu(p)  z = Neg(q) }"""
    assert agrees(text) == ["Split", "Relu", "Neg"]


@pytest.mark.parametrize(
    ("attributes", "operand", "parts"),
    [("axis = 1", ", m", 2), ("axis = 1", ", sizes", 3), ("axis = 1, keepdims = 0", "", 6), ("axis = 1", "", 6)],
)
def test_forms_of_a_split(attributes: str, operand: str, parts: int) -> None:
    text = f"""g (float[2,6,3] x) => (float[a,b,c] y, int64 n) <int64 m = {{4}}, int64[3] sizes = {{1, 3, 2}}, int64 at = {{1}}> {{
        s = SplitToSequence<{attributes}>(x{operand})  p = SequenceAt(s, at)  y = Relu(p)  n = SequenceLength(s) }}"""
    if "keepdims" in attributes:
        text = text.replace("[a,b,c] y", "[a,b] y")
    proto = model(text)
    assert ReferenceEvaluator(proto).run(None, {"x": X})[1] == parts
    assert agrees(text).count("Split") == 1


def test_lists_that_grow_and_shrink() -> None:
    text = """g (float[2,6,3] x) => (float[10,6,3] y) <int64 one = {1}, int64 back = {-1}> {
        r = Relu(x)  n = Neg(x)  a = Abs(x)  empty = SequenceEmpty<dtype = 1>()
        s = SequenceConstruct(x, r)  t = SequenceInsert(s, n, one)  u = SequenceInsert(t, a, back)  v = SequenceInsert(u, r)
        w = SequenceErase(v, one)  k = SequenceErase(w)  e = SequenceInsert(empty, a)  b = Identity(x)
        j = ConcatFromSequence<axis = 0>(k)  l = ConcatFromSequence<axis = 0>(e)  y = Concat<axis = 0>(j, l, b) }"""
    assert agrees(text) == ["Relu", "Neg", "Abs", "Identity", "Concat", "Concat", "Concat"]


@pytest.mark.parametrize("target", ["reference", "simulate"])
def test_a_size_may_divide_the_axis_whatever_it_is(target: str) -> None:
    """RAFT: ``torch.cat([a, b]).chunk(2)`` of images, with any number of them."""
    text = """g (float[N,3] x) => (float[N,3] y, int64 n) <int64 k = {1}, int64 zero = {0}> {
        b = Concat<axis = 0>(x, x, x)  shape = Shape(x)  size = Gather(shape, zero)
        s = SplitToSequence<axis = 0>(b, size)  p = SequenceAt(s, k)  y = Relu(p)  n = SequenceLength(s) }"""
    engine = optdnn.build(model(text, 17), target=target, precision="fp32", shapes={"x": (optdnn.DimRange(1, 2, 4), 3)})
    for rows in (1, 2, 4):
        x = np.random.default_rng(rows).standard_normal((rows, 3)).astype(np.float32)
        got = engine.run({"x": x})
        np.testing.assert_array_equal(got["y"], np.maximum(x, 0))
        assert got["n"] == 3


def test_a_size_that_need_not_divide_the_axis() -> None:
    text = """g (float[N,3] x, float[M,3] z) => (float[K,3] y) <int64 k = {1}, int64 zero = {0}> {
        b = Concat<axis = 0>(x, z)  shape = Shape(x)  size = Gather(shape, zero)
        s = SplitToSequence<axis = 0>(b, size)  y = SequenceAt(s, k) }"""
    with pytest.raises(UnsupportedError, match="sizes that it splits into have to be constants"):
        import_model(model(text, 17))


@pytest.mark.parametrize(("axis", "shape"), [(0, "2,2,6,3"), (-1, "2,6,3,2"), (2, "2,6,2,3")])
def test_a_list_is_stacked(axis: int, shape: str) -> None:
    text = f"""g (float[2,6,3] x) => (float[{shape}] y) {{
        n = Neg(x)  s = SequenceConstruct(x, n)  y = ConcatFromSequence<axis = {axis}, new_axis = 1>(s) }}"""
    assert agrees(text) == ["Neg", "Unsqueeze", "Unsqueeze", "Concat"]


def test_a_list_is_mapped() -> None:
    """PyTorch writes ``column_stack`` with it. A second list is read in step with the first one, a tensor at each position."""
    text = """g (float[2,6,3] x) => (float[4,6,3] y, float[4,6,3] z) {
        n = Neg(x)  a = Abs(x)  s = SequenceConstruct(x, n)  t = SequenceConstruct(a, x)
        p, q = SequenceMap<body = b (float[2,6,3] i, float[2,6,3] j, float[2,6,3] k) => (float[2,6,3] u, float[2,6,3] v) {
            u = Sub(i, j)  v = Max(i, k) }>(s, t, a)
        y = ConcatFromSequence<axis = 0>(p)  z = ConcatFromSequence<axis = 0>(q) }"""
    proto, x = model(text), X - 17
    found = optdnn.build(proto, target="reference").run({"x": x})
    np.testing.assert_array_equal(found["y"], np.concatenate([x - abs(x), -x - x]))
    np.testing.assert_array_equal(found["z"], np.concatenate([abs(x), abs(x)]))
    assert sorted(kind for kind, _ in sources(import_model(proto))) == sorted(
        ["Abs", "Neg", *["Sub", "Max", "Concat"] * 2]
    )


def test_a_subgraph_reads_a_list_from_outside() -> None:
    text = """g (float[2,6,3] x, bool c) => (float[2,6,3] y) <int64 one = {1}> {
        n = Neg(x)  s = SequenceConstruct(x, n)
        y = If(c) <then_branch = a () => (float[2,6,3] p) { p = SequenceAt(s, one) },
                   else_branch = b () => (float[2,6,3] q) { q = Relu(x) }> }"""
    proto = model(text)
    engine = optdnn.build(proto, target="reference")
    for c in (True, False):
        want = ReferenceEvaluator(proto).run(None, {"x": X, "c": np.array(c)})
        np.testing.assert_array_equal(engine.run({"x": X, "c": np.array(c)})["y"], want[0])


@pytest.mark.parametrize(
    ("body", "because"),
    [
        (
            "n = Constant<value_int = 4>()  s = SplitToSequence<axis = 1>(x, n)  y = SequenceAt(s, k)",
            "the position in a sequence has to be a constant",
        ),
        ("s = SplitToSequence<axis = 1>(x, k)  y = SequenceAt(s, m)", "sizes that it splits into have to be constants"),
        ("s = SequenceConstruct(x)  y = Relu(s)", "takes a sequence of tensors"),
        ("o = Optional()  y = OptionalGetElement(o)", "without an element is not a tensor"),
        (
            "s = SequenceConstruct(x)  t = SequenceMap<body = b (float[2,6,3] i) => (seq(float[2,6,3]) u) {"
            " u = SequenceConstruct(i) }>(s)  y = SequenceAt(t, m)",
            "its body yields a sequence of tensors",
        ),
        (
            "n = Constant<value_int = 1>()  s = SplitToSequence<axis = 0>(v, n)"
            "  t = SequenceMap<body = b (float[1,1] i) => (float[1,1] u) { a = Neg(i)  u = Abs(a) }>(s)  y = SequenceAt(t, m)",
            "its body is repeated 3000 times, which makes too many nodes",
        ),
        (
            "b = Relu(x)  s = SplitToSequence<axis = 0>(w, m)  y = SequenceAt(s, m)",
            "it makes 5000 tensors, at most 4096",
        ),
        (
            "s = If(c) <then_branch = a () => (seq(float[2,6,3]) p) { p = SequenceConstruct(x) },"
            " else_branch = b () => (seq(float[2,6,3]) q) { q = SequenceConstruct(x) }>  y = SequenceAt(s, m)",
            "yields a sequence of tensors",
        ),
    ],
)
def test_refusals_by_name(body: str, because: str) -> None:
    given = "float[2,6,3] x, int64 k, bool c, float[5000,1] w, float[3000,1] v"
    text = f"g ({given}) => (float[a,b,d] y) <int64 m = {{1}}> {{ {body} }}"
    with pytest.raises(UnsupportedError, match=because):
        import_model(model(text))


@pytest.mark.parametrize(
    ("body", "because"),
    [
        ("s = SequenceConstruct(x)  y = SequenceAt(s, m)", "position 1 is outside of a sequence of 1 tensors"),
        (
            "s = SequenceConstruct(x)  t = SequenceErase(s)  y = ConcatFromSequence<axis = 0>(t)",
            "the sequence is empty",
        ),
        ("y = SequenceAt(x, m)", "its first operand is not a sequence"),
        (
            "s = SequenceConstruct(x)  t = SequenceMap<body = b (float[2,6,3] i, float[2,6,3] j) => (float[2,6,3] u) {"
            " u = Add(i, j) }>(s)  y = SequenceAt(t, m)",
            "its body takes 2 values, 1 are fed",
        ),
        (
            "s = SequenceConstruct(x)  r = SequenceConstruct(x, x)"
            "  t = SequenceMap<body = b (float[2,6,3] i, float[2,6,3] j) => (float[2,6,3] u) {"
            " u = Add(i, j) }>(s, r)  y = SequenceAt(t, m)",
            "it maps sequences of 1 and of 2 tensors",
        ),
        ("s = SequenceEmpty()  t = SequenceErase(s)  y = ConcatFromSequence<axis = 0>(t)", "nothing is erased"),
        ("s = SplitToSequence(x, none)  y = SequenceAt(s, m)", "cannot be split into parts of 0"),
        ("s = SequenceConstruct(x)  y = ConcatFromSequence(s)", "axis"),
    ],
)
def test_impossible_operands_are_an_error_with_the_node(body: str, because: str) -> None:
    text = f"g (float[2,6,3] x) => (float[a,b,d] y) <int64 m = {{1}}, int64 none = {{0}}> {{ {body} }}"
    with pytest.raises((ShapeError, ModelError), match=because):
        import_model(model(text))


def test_an_output_that_is_a_list_is_refused() -> None:
    proto = model("g (float[2] x) => (float[2] y) { y = SequenceConstruct(x) }")
    proto.graph.output[0].ClearField("type")
    with pytest.raises(ModelError, match="output 'y' is a sequence of tensors"):
        import_model(proto)


def test_a_position_may_be_computed_from_a_length() -> None:
    text = """g (float[2,6,3] x) => (float[2,6,3] y) {
        n = Neg(x)  s = SequenceConstruct(x, n)  l = SequenceLength(s)  one = Constant<value_int = 1>()
        k = Sub(l, one)  y = SequenceAt(s, k) }"""
    assert agrees(text) == ["Neg", "Sub"]


SUMS = """g (float[2,6,3] x{inputs}) => (float[a,3] y, float[n,2,3] z)
        <int64[1] zero = {{0}}, int64[1] one = {{1}}, int64 most = {{{most}}},
        int64 begin = {{0}}, int64 end = {{{end}}}, bool on = {{{on}}}> {{
    empty = SequenceEmpty<dtype = 1>()
    s, k, z = Loop<body = b (int64 i, bool go, seq(float[2,3]) held, int64 at)
            => (bool c, seq(float[2,3]) more, int64 next, float[2,3] row) {{
        j = Unsqueeze(at, zero)  e = Add(j, one)  cut = Slice(x, j, e, one)  row = Squeeze(cut, one)
        more = SequenceInsert(held, row)  f = Squeeze(one, zero)  next = Add(at, f)  c = Less(next, {until})
    }}>({trips}, on, empty, begin)
    y = ConcatFromSequence<axis = 0>(s) }}"""


def sums(trips: str = "most", until: str = "end", most: int = 9, end: int = 4, on: int = 1, inputs: str = "") -> str:
    return SUMS.format(trips=trips, until=until, most=most, end=end, on=on, inputs=inputs)


@pytest.mark.parametrize(("trips", "most", "rows"), [("most", 3, 3), ("most", 9, 4), ("", 0, 4)])
def test_a_loop_that_carries_a_list_is_written_out(trips: str, most: int, rows: int) -> None:
    """A number of iterations, a condition, or both end the loop. Its other results are stacked."""
    found = optdnn.build(model(sums(trips, most=most), 18), target="reference").run({"x": X})
    np.testing.assert_array_equal(found["z"], X.transpose(1, 0, 2)[:rows])
    np.testing.assert_array_equal(found["y"], X.transpose(1, 0, 2)[:rows].reshape(-1, 3))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            sums(trips="n", inputs=", int64 n").replace("(e = Add", "(e = Add").replace("row)  f", "row, at)  f"),
            "a constant number",
        ),
        (sums(until="n", inputs=", int64 n"), "a condition that is known"),
        (sums(on=0), "results of no iteration"),
    ],
)
def test_loops_that_carry_a_list_and_are_refused(text: str, why: str) -> None:
    with pytest.raises(UnsupportedError, match=why):
        import_model(model(text, 18))


def test_a_loop_of_too_many_iterations_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence_loops, "MOST_REPEATED", 3)
    with pytest.raises(UnsupportedError, match="more than 3 iterations"):
        import_model(model(sums(), 18))


@pytest.mark.parametrize(("trips", "most", "rows"), [("most", 3, 3), ("most", 9, 4), ("", 0, 4)])
def test_a_list_that_only_grows_is_stacked(trips: str, most: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decisions of a counter are looked up by the number of the iteration."""
    monkeypatch.setattr(sequence_loops, "MOST_WRITTEN_OUT", 0)
    proto = model(sums(trips, most=most), 18)
    graph = import_model(proto)
    (loop,) = graph.of_kind("Loop")
    assert loop.attrs.carried == 0
    assert "Add" not in loop.attrs.body.graph.kinds()
    assert loop.outputs[0].type.shape == (rows, 2, 3)
    found = optdnn.build(proto, target="reference").run({"x": X})
    np.testing.assert_array_equal(found["z"], X.transpose(1, 0, 2)[:rows])
    np.testing.assert_array_equal(found["y"], X.transpose(1, 0, 2)[:rows].reshape(-1, 3))


SLICED = """g (float[2,6,3] x) => (float[a,3] y) <int64[1] zero = {{0}}, int64[1] one = {{1}}, int64[1] back = {{-1}},
        int64 most = {{5}}, int64 begin = {{0}}, bool on = {{1}}> {{
    empty = SequenceEmpty<dtype = 1>()
    s, last = Loop<body = b (int64 i, bool go, seq(float[2,3]) held, int64 at) => (bool c, seq(float[2,3]) more, int64 next) {{
        f = Squeeze(one, zero)  next = Add(at, f)  c = Identity(go)  j = Unsqueeze(at, zero)  e = Add(j, one)  d = Sub(back, j)
        cut = Slice({bounds})  r = {row}  more = SequenceInsert(held, r) }}>(most, on, empty, begin)
    y = ConcatFromSequence<axis = 0>(s) }}"""


@pytest.mark.parametrize(
    ("bounds", "row", "gathered"),
    [
        ("x, j, e, one", "Squeeze(cut, one)", True),
        ("x, j, e, one, one", "Squeeze(cut, one)", True),
        ("x, d, j, back, back", "ReduceSum<keepdims = 0>(cut, back)", False),
        ("x, zero, e, one", "ReduceSum<keepdims = 0>(cut, one)", False),
    ],
    ids=["a row", "a row and a step", "backward", "lengths"],
)
def test_slices_of_one_length_are_gathered(
    bounds: str, row: str, gathered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Slice whose step is not 1, or whose length depends on the iteration, stays."""
    monkeypatch.setattr(sequence_loops, "MOST_WRITTEN_OUT", 0)
    text = SLICED.format(bounds=bounds, row=row)
    (loop,) = import_model(model(text, 18)).of_kind("Loop")
    assert ("Slice" in loop.attrs.body.graph.kinds()) is not gathered
    agrees(text, 18)


def test_the_limit_decides_whether_a_list_is_stacked() -> None:
    long = sums(trips="", end=6).replace("float[2,6,3] x", "float[2,200,3] x").replace("end = {6}", "end = {200}")
    assert import_model(model(long, 18)).kinds()["Loop"] == 1
    assert "Loop" not in import_model(model(sums(trips=""), 18)).kinds()


GROWN = """g (float[2,6,3] x) => (float[a,3] y, int64 last)
        <int64[1] zero = {{0}}, int64[1] one = {{1}}, int64 most = {{5}}, int64 begin = {{0}}, bool on = {{1}}> {{
    empty = SequenceEmpty<dtype = 1>()  n = Squeeze(one, zero)  head = Gather<axis = 1>(x, begin)  full = SequenceConstruct(head)
    s, last, t = Loop<body = b (int64 i, bool go, seq(float[2,3]) held, int64 at, float[2,3] seen)
            => (bool c, seq(float[2,3]) more, int64 next, float[2,3] kept) {{
        f = Squeeze(one, zero)  next = Add(at, f)  c = Identity(go)  {row}
    }}>(most, on, {first}, begin, head)
    y = ConcatFromSequence<axis = 0>(s) }}"""
LENGTH = "l = SequenceLength(held)  m = Cast<to = 1>(l)  r = Add(row, m)  "
CUT = "j = Unsqueeze(at, zero)  e = Add(j, one)  cut = Slice(x, j, e, one)  row = Squeeze(cut, one)  "


@pytest.mark.parametrize(
    ("row", "first"),
    [
        (CUT + "more = SequenceInsert(held, row)  kept = Add(seen, row)", "empty"),
        (CUT + LENGTH + "more = SequenceInsert(held, r)  kept = Identity(head)", "empty"),
        (CUT + "more = SequenceInsert(held, row)  kept = Identity(head)", "full"),
    ],
    ids=["a carried tensor", "the list's length", "a list of one tensor"],
)  # fmt: skip
def test_other_loops_are_written_out(row: str, first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence_loops, "MOST_WRITTEN_OUT", 0)
    assert "Loop" not in agrees(GROWN.format(row=row, first=first), 18)


def test_a_long_loop_that_carries_a_tensor_is_stacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script of PyTorch that appends the state of each step."""
    monkeypatch.setattr(sequence_loops, "MOST_UNROLLED", 20)
    row = CUT + "r = Add(row, seen)  more = SequenceInsert(held, r)  kept = Tanh(r)"
    found = agrees(GROWN.format(row=row, first="empty"), 18)
    assert "Loop" in found
    monkeypatch.setattr(sequence_loops, "MOST_UNROLLED", 100)
    assert "Loop" not in agrees(GROWN.format(row=row, first="empty"), 18)


def test_a_long_loop_whose_rows_differ_is_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence_loops, "MOST_UNROLLED", 0)
    row = "e = Unsqueeze(next, zero)  row = Slice(x, zero, e, one)  more = SequenceInsert(held, row)  kept = Tanh(seen)"
    text = GROWN.format(row=row, first="empty").replace("seq(float[2,3])", "seq(float[2,n,3])")
    assert "Loop" not in agrees(text.replace("[a,3] y", "[2,a,3] y").replace("<axis = 0>(s)", "<axis = 1>(s)"), 18)


def test_a_list_that_grows_in_front_is_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence_loops, "MOST_WRITTEN_OUT", 0)
    text = GROWN.format(row=CUT + "more = SequenceInsert(held, row, begin)  kept = Identity(head)", first="empty")
    proto = model(text, 18)
    assert "Loop" not in import_model(proto).kinds()
    found = optdnn.build(proto, target="reference").run({"x": X})["y"]
    np.testing.assert_array_equal(found, X.transpose(1, 0, 2)[4::-1].reshape(-1, 3))


def test_rows_of_different_sizes_are_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence_loops, "MOST_WRITTEN_OUT", 0)
    text = """g (float[2,6,3] x) => (float[2,a,3] y) <int64[1] zero = {0}, int64[1] one = {1}, int64 most = {5}, bool on = {1}> {
        empty = SequenceEmpty<dtype = 1>()
        s = Loop<body = b (int64 i, bool go, seq(float[2,n,3]) held) => (bool c, seq(float[2,n,3]) more) {
            e = Unsqueeze(i, zero)  f = Add(e, one)  cut = Slice(x, zero, f, one)  more = SequenceInsert(held, cut)
            c = Identity(go) }>(most, on, empty)
        y = ConcatFromSequence<axis = 1>(s) }"""
    assert "Loop" not in agrees(text, 18)


def test_numbers_in_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence_loops, "MOST_WRITTEN_OUT", 0)
    text = """g (float[2,6,3] x) => (float[5] y) <int64 most = {5}, bool on = {1}> {
        empty = SequenceEmpty<dtype = 1>()  v = ReduceSum<keepdims = 0>(x)
        s = Loop<body = b (int64 i, bool go, seq(float) held) => (bool c, seq(float) more) {
            f = Cast<to = 1>(i)  p = Mul(f, v)  more = SequenceInsert(held, p)  c = Identity(go) }>(most, on, empty)
        y = ConcatFromSequence<axis = 0, new_axis = 1>(s) }"""
    assert "Loop" in agrees(text, 18)


def test_a_body_that_only_constants_decide_is_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator that must know an operand when it is imported. The failed attempt is not reported."""
    monkeypatch.setattr(sequence_loops, "MOST_WRITTEN_OUT", 0)
    text = """g (float[2,6,3] x) => (float[4,6,3] y) <int64 most = {2}, bool on = {1}, int64[2] axes = {0, 1}> {
        empty = SequenceEmpty<dtype = 1>()
        s = Loop<body = b (int64 i, bool go, seq(float[2,6,3]) held) => (bool c, seq(float[2,6,3]) more) {
            a = Gather(axes, i)  p = CumSum(x, a)  more = SequenceInsert(held, p)  c = Identity(go) }>(most, on, empty)
        y = ConcatFromSequence<axis = 0>(s) }"""
    proto = model(text, 18)
    want = ReferenceEvaluator(proto).run(None, {"x": X})[0]
    np.testing.assert_array_equal(optdnn.build(proto, target="reference").run({"x": X})["y"], want)


@pytest.mark.parametrize("target", ["reference", "cpu", "simulate"])
def test_tensors_of_one_shape_are_picked_by_a_computed_position(target: str) -> None:
    text = """g (float[2,6,3] x, int64 k) => (float[2,2,3] y) <int64 two = {2}> {
        s = SplitToSequence<axis = 1>(x, two)  y = SequenceAt(s, k) }"""
    engine = optdnn.build(model(text), target=target)
    for k in (0, 2, -1):
        want = ReferenceEvaluator(model(text)).run(None, {"x": X, "k": np.array(k)})[0]
        np.testing.assert_array_equal(engine.run({"x": X, "k": np.array(k)})["y"], want)


def test_an_optional_value_is_its_element() -> None:
    text = """g (float[2,6,3] x) => (float[2,6,3] y, float[4,6,3] z, bool some, bool none) {
        o = Optional(x)  e = OptionalGetElement(o)  y = Relu(e)  some = OptionalHasElement(o)  none = OptionalHasElement()
        s = SequenceConstruct(x, y)  p = Optional(s)  t = OptionalGetElement(p)  z = ConcatFromSequence<axis = 0>(t) }"""
    found = optdnn.build(model(text, 18), target="reference").run({"x": X})
    np.testing.assert_array_equal(found["y"], np.maximum(X, 0))
    np.testing.assert_array_equal(found["z"], np.concatenate([X, found["y"]]))
    assert (found["some"], found["none"]) == (True, False)
