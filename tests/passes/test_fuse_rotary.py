"""fuse_rotary: each form in which exporters rotate queries and keys becomes one op; other arithmetic stays, with the reason."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx.parser
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.shared import needs_shared_graphs, shared_network

from optdnn.dim import symbol
from optdnn.importers.onnx import import_model
from optdnn.ops.index import ConcatAttrs, SplitAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.base import PassContext, run_pipeline
from optdnn.passes.fold_constants import FoldConstants
from optdnn.passes.fuse_rotary import FuseRotary
from optdnn.passes.pipelines import PIPELINE

ANGLES = np.random.default_rng(2).standard_normal((5, 2))
BOTH = np.concatenate([ANGLES, ANGLES], 1)
REPEATED = np.repeat(ANGLES, 2, 1)
ONE_TURN = np.repeat(ANGLES[:, :1], 2, 1)


def tensor(array: Any) -> str:
    return ", ".join(map(str, np.asarray(array).reshape(-1).tolist()))


SLICED = """a = Slice(x, zero, two, last)  b = Slice(x, two, end, last)"""
TURNED = "n = Neg(b)  r = Concat<axis=-1>(n, a)"
TABLES = "c = Cos(angles)  s = Sin(angles)"
SUM = "xc = Mul(x, c)  rs = Mul(r, s)  y = Add(xc, rs)"


def model(body: str, angles: Any = BOTH, shape: str = "[1,1,5,4]") -> str:
    return f"""<ir_version: 10, opset_import: ["" : 21]>
    rotary (float[2,3,5,4] x, float[2,5,2] turn, int64[2,5] at) => (float[2,3,5,4] y)
    <float{shape} angles = {{{tensor(angles)}}}, int64[1] zero = {{0}}, int64[1] one = {{1}}, int64[1] two = {{2}},
     int64[1] last = {{3}},
     int64[1] end = {{9223372036854775807}},
     int64 even = {{0}}, int64 odd = {{1}}, int64 final = {{-1}},
     float minus = {{-1}}, float half = {{0.5}}>
    {{ {body} }}"""


FORMS = {
    "llama": f"{SLICED} {TURNED} {TABLES} {SUM}",
    "chunked": f"a, b = Split<axis=-1, num_outputs=2>(x) {TURNED} {TABLES} {SUM}",
    "the other way round": f"""{SLICED} n = Mul(minus, b)  r = Concat<axis=3>(n, a) {TABLES} xc = Mul(c, x) rs = Mul(s, r)
        y = Add(rs, xc)""",
    "angles of an input": f"""{SLICED} {TURNED} w = Concat<axis=-1>(turn, turn) c0 = Cos(w) c1 = Mul(c0, half)
        c = Unsqueeze(c1, one) s0 = Sin(w) s1 = Mul(s0, half) s = Unsqueeze(s1, one) {SUM}""",
    "rows of a table": f"""{SLICED} {TURNED} four = Constant<value_ints=[5,4]>() t = Reshape(angles, four) g = Gather(t, at)
        w = Unsqueeze(g, one) c = Cos(w) s = Sin(w) {SUM}""",
    "elements of rows of halves": f"""rows = Constant<value_ints=[2,3,5,2,2]>() xr = Reshape(x, rows) a = Gather<axis=3>(xr, even)
        b = Gather<axis=3>(xr, odd) {TURNED} {TABLES} {SUM}""",
    "rows of halves": f"""rows = Constant<value_ints=[2,3,5,2,2]>() xr = Reshape(x, rows) three = Constant<value_ints=[3]>()
        ar, br = Split<axis=3, num_outputs=2>(xr) a = Squeeze(ar, three) b = Squeeze(br, three) {TURNED} {TABLES} {SUM}""",
}


STACKED = """o = Slice(x, one, end, last, two) e = Slice(x, zero, end, last, two) n = Neg(o) four = Constant<value_ints=[4]>()
    nu = Unsqueeze(n, four) eu = Unsqueeze(e, four) st = Concat<axis=-1>(nu, eu) full = Constant<value_ints=[2,3,5,4]>()
    r = Reshape(st, full)"""
PAIRS = """pairs = Constant<value_ints=[2,3,5,2,2]>() xp = Reshape(x, pairs) four = Constant<value_ints=[4]>()
    full = Constant<value_ints=[2,3,5,4]>()"""
UNBOUND = f"""{PAIRS} ep, op = Split<axis=-1, num_outputs=2>(xp) e = Squeeze(ep, four) o = Squeeze(op, four) n = Neg(o)
    nu = Unsqueeze(n, four) eu = Unsqueeze(e, four) st = Concat<axis=-1>(nu, eu) r = Reshape(st, full)"""
ELEMENTS = f"""{PAIRS} e = Gather<axis=4>(xp, even) o = Gather<axis=-1>(xp, odd) n = Neg(o)
    nu = Unsqueeze(n, four) eu = Unsqueeze(e, four) st = Concat<axis=-1>(nu, eu) r = Reshape(st, full)"""
NEIGHBORS = {
    "elements of pairs": f"{ELEMENTS} {TABLES} {SUM}",
    "elements from the end": f"{ELEMENTS} {TABLES} {SUM}".replace("odd)", "final)"),
    "unbound pairs": f"{UNBOUND} {TABLES} {SUM}",
    "slices of pairs": f"""{PAIRS} e = Slice(xp, zero, one, four) op = Slice(xp, one, two, four) o = Squeeze(op, four) n = Neg(o)
        nu = Unsqueeze(n, four) st = Concat<axis=-1>(nu, e) r = Reshape(st, full) {TABLES} {SUM}""",
    "parts of pairs": f"""{PAIRS} e, o = Split<axis=-1, num_outputs=2>(xp) n = Neg(o) st = Concat<axis=-1>(n, e)
        r = Reshape(st, full) {TABLES} {SUM}""",
    "roformer": f"{STACKED} {TABLES} {SUM}",
    "of an input": f"""{STACKED} pair = Unsqueeze(turn, last) w0 = Concat<axis=3>(pair, pair) size = Constant<value_ints=[2,5,4]>()
        w1 = Reshape(w0, size) w = Unsqueeze(w1, one) c = Cos(w) s = Sin(w) {SUM}""",
    "repeated": f"""{STACKED} pair = Unsqueeze(turn, last) to = Constant<value_ints=[2,5,2,2]>() w0 = Expand(pair, to)
        size = Constant<value_ints=[2,5,4]>() w1 = Reshape(w0, size) w = Unsqueeze(w1, one) c = Cos(w) s = Sin(w) {SUM}""",
}


def coordinates(w: str = "Concat<axis=2>(w1, w2)", halves: str = "Expand(pair, to)") -> str:
    """One part of the angles for each coordinate of a picture (Flux)."""
    return f"""{STACKED} t1, t2 = Split<axis=2, num_outputs=2>(turn) to = Constant<value_ints=[2,5,1,2]>()
        two3 = Constant<value_ints=[2,5,2]>()
        pair = Unsqueeze(t1, last) w0 = {halves} w1 = Reshape(w0, two3) v1 = Cos(w1)
        other = Unsqueeze(t2, last) v0 = Expand(other, to) w2 = Reshape(v0, two3)
        w3 = {w} w = Unsqueeze(w3, one) c = Cos(w) s = Sin(w) {SUM}"""


def test_neighbors_side_by_side() -> None:
    graph, _ = check_pass(FuseRotary(), model(coordinates()), changes=1)
    assert graph.of_kind("RotaryEmbedding")[0].attrs.interleaved


ROWS = """front, behind = Split<axis=1, num_outputs=2>(turn) joined = Concat<axis=1>(front, behind)
    h = Concat<axis=2>(joined, joined) w = Unsqueeze(h, one) c = Cos(w) s = Sin(w)"""
HALF_ROWS = ROWS.replace("joined = Concat<axis=1>(front, behind)\n    h = Concat<axis=2>(joined, joined)",
    "f = Concat<axis=2>(front, front) b = Concat<axis=2>(behind, behind) h = Concat<axis=1>(f, b)")  # fmt: skip


@pytest.mark.parametrize("rows", [ROWS, HALF_ROWS])
def test_halves_of_joined_rows(rows: str) -> None:
    body = f"{SLICED} {TURNED} {rows.replace('b = ', 'z = ').replace('(f, b)', '(f, z)')} {SUM}"
    check_pass(FuseRotary(), model(body), changes=1)


@pytest.mark.parametrize("name", NEIGHBORS)
def test_neighbors_that_turn_are_interleaved(name: str) -> None:
    graph, _ = check_pass(FuseRotary(), model(NEIGHBORS[name], REPEATED), changes=1)
    (op,) = graph.of_kind("RotaryEmbedding")
    assert op.attrs.interleaved
    assert not {"Neg", "Add"} & graph.kinds().keys()


@pytest.mark.parametrize("name", [*FORMS, *NEIGHBORS])
def test_no_earlier_pass_hides_a_rotation(name: str) -> None:
    form = model(FORMS[name]) if name in FORMS else model(NEIGHBORS[name], REPEATED)
    graph = import_model(onnx.parser.parse_model(form))
    run_pipeline(graph, PIPELINE(3, "cuda:sm_90a"), PassContext("cuda:sm_90a"), verify=True)
    assert graph.kinds()["RotaryEmbedding"] == 1
    assert not {"Neg", "Add"} & graph.kinds().keys()


def part(more: str = "g", split: bool = False) -> str:
    """Only the first two of four features are rotated."""
    cut = """f = Slice(x, zero, two, last) g = Slice(x, two, end, last)"""
    if split:
        cut = "f, g = Split<axis=-1, num_outputs=2>(x)"
    return f"""{cut} a = Slice(f, zero, one, last) b = Slice(f, one, end, last) {TURNED} {TABLES}
        fc = Mul(f, c) rs = Mul(r, s) t = Add(fc, rs) y = Concat<axis=-1>(t, {more})"""


@pytest.mark.parametrize("split", [False, True])
def test_features_that_are_not_rotated_stay(split: bool) -> None:
    graph, _ = check_pass(FuseRotary(), model(part(split=split), ONE_TURN, "[1,1,5,2]"), changes=2)
    (op,) = graph.of_kind("RotaryEmbedding")
    assert op.attrs.rotary_embedding_dim == 2
    assert not {"Concat", "Split"} & graph.kinds().keys()


@pytest.mark.parametrize("more", ["h", "f"])
def test_other_numbers_after_what_turns_are_no_rest_of_it(more: str) -> None:
    body = part(more=more).replace("fc =", "three = Constant<value_ints=[3]>() h = Slice(x, one, three, last) fc =")
    graph, _ = check_pass(FuseRotary(), model(body, ONE_TURN, "[1,1,5,2]"), changes=1)
    (op,) = graph.of_kind("RotaryEmbedding")
    assert op.attrs.rotary_embedding_dim == 0


@pytest.mark.parametrize("name", FORMS)
def test_exported_forms(name: str) -> None:
    graph, _ = check_pass(FuseRotary(), model(FORMS[name]), changes=1)
    kinds = graph.kinds()
    assert kinds["RotaryEmbedding"] == 1
    assert not {"Neg", "Add"} & kinds.keys()
    assert kinds.get("Concat", 0) == (name == "angles of an input")


BACK = f"{SLICED} n = Neg(a) r = Concat<axis=-1>(b, n) {TABLES} {SUM}"


def test_halves_that_turn_the_other_way_turn_by_negated_sines() -> None:
    graph, _ = check_pass(FuseRotary(), model(BACK), changes=1)
    (op,) = graph.of_kind("RotaryEmbedding")
    assert graph.op(op.inputs[2]).kind == "Neg"
    assert not {"Add", "Concat"} & graph.kinds().keys()


@pytest.mark.parametrize(("name", "shape"), [("heads first", "[1,5,4]"), ("positions first", "[5,1,4]")])
def test_heads_of_one_image_without_a_batch(name: str, shape: str) -> None:
    sizes = "[3,5,4]" if name == "heads first" else "[5,3,4]"
    body = (
        FORMS["llama"]
        .replace("c = Cos", "three = Constant<value_ints=[2]>() c = Cos")
        .replace("x, zero, two, last", "x, zero, two, three")
    )
    body = body.replace("x, two, end, last", "x, two, end, three")
    graph, _ = check_pass(FuseRotary(), model(body, shape=shape).replace("[2,3,5,4]", sizes), changes=1)
    (op,) = graph.of_kind("RotaryEmbedding")
    assert graph.type(op.value).dims == (1, 3, 5, 4)
    assert graph.kinds()["Reshape"] == 4, "the operand, the result, and the angles"
    assert graph.kinds().get("Transpose", 0) == (0 if name == "heads first" else 2)


def test_tables_without_a_batch() -> None:
    check_pass(FuseRotary(), model(FORMS["llama"], shape="[5,4]"), changes=1)


def positions_first(body: str) -> str:
    """x and y have their positions before their heads: (2, 5, 3, 4), as GPT-J rotates them."""
    return body.replace("[2,3,5,", "[2,5,3,")


POSITIONS_FIRST = {
    "halves": (model(FORMS["llama"], shape="[1,5,1,4]"), 1, 0),
    "tables without a batch": (model(FORMS["llama"], shape="[5,1,4]"), 1, 0),
    "neighbors": (model(NEIGHBORS["roformer"], REPEATED, "[1,5,1,4]"), 1, 0),
    "unbound pairs": (model(NEIGHBORS["unbound pairs"], REPEATED, "[1,5,1,4]"), 1, 0),
    "the first numbers": (model(part(), ONE_TURN, "[1,5,1,2]"), 2, 2),
    "rows of a table": (model(FORMS["rows of a table"].replace("Unsqueeze(g, one)", "Unsqueeze(g, two)")), 1, 0),
}


@pytest.mark.parametrize("name", POSITIONS_FIRST)
def test_positions_before_heads_turn_between_two_transposes(name: str) -> None:
    text, changes, size = POSITIONS_FIRST[name]
    graph, _ = check_pass(FuseRotary(), positions_first(text), changes=changes)
    (op,) = graph.of_kind("RotaryEmbedding")
    assert op.attrs.rotary_embedding_dim == size
    assert not {"Neg", "Add", "Concat"} & graph.kinds().keys()
    there, back = graph.op(op.inputs[0]), graph.users(op.value)[0]
    assert there.attrs.perm == back.attrs.perm == (0, 2, 1, 3)
    assert graph.op(there.inputs[0]).kind == "Input"


def test_a_transpose_after_the_rotation_cancels() -> None:
    body = FORMS["llama"].replace("y = Add", "t = Add") + " y = Transpose<perm=[0,2,1,3]>(t)"
    text = model(body, shape="[1,5,1,4]").replace("float[2,3,5,4] x", "float[2,5,3,4] x")
    graph, _ = check_pass(FuseRotary(), text, changes=2, rules={"rotary_embedding": 1, "transpose_chain": 1})
    assert graph.kinds()["Transpose"] == graph.kinds()["RotaryEmbedding"] == 1


def test_a_turned_part_between_transposes_that_is_used_elsewhere_stays() -> None:
    body = part().replace("y = Concat", "u = Concat") + " more = Neg(t) w = Concat<axis=-1>(more, g) y = Add(u, w)"
    text = positions_first(model(body, ONE_TURN, "[1,5,1,2]"))
    _, report = check_pass(FuseRotary(), text, changes=1)
    assert [r.reason for r in report.refused if "its rotated part is used elsewhere" in r.reason]


def test_a_turned_part_between_other_transposes_stays() -> None:
    n = Net()
    x, cos, sin = n.input(3, 5, 2, 4), *(n.input(2, 5, 1, name=name) for name in ("cos", "sin"))
    first, rest = (n.op("Slice", x, n.ints(a), n.ints(b), n.ints(3)) for a, b in ((0, 2), (2, 4)))
    turned = n.op("RotaryEmbedding", n.op("Transpose", first, attrs=TransposeAttrs((2, 0, 1, 3))), cos, sin)
    back = n.op("Transpose", turned, attrs=TransposeAttrs((1, 2, 0, 3)))
    check_untouched(FuseRotary(), n.done(n.op("Concat", back, rest, attrs=ConcatAttrs(3))))


def rows(first: str = "f = Slice(x, zero, two, positions)", joined: str = "f, t", axis: int = 2, of: str = "x") -> str:
    """Only the rows after the first two are rotated."""
    return f"""positions = Constant<value_ints=[2]>() {first} g = Slice({of}, two, end, positions)
        a = Slice(g, zero, two, last)  b = Slice(g, two, end, last) {TURNED} {TABLES}
        gc = Mul(g, c) rs = Mul(r, s) t = Add(gc, rs) y = Concat<axis={axis}>({joined})"""


BY_HEAD = np.random.default_rng(5).standard_normal((3, 5, 2))
BY_HEAD_TWICE = np.concatenate([BY_HEAD, BY_HEAD], 2)
HEADS_DIFFER = {
    "halves": (model(FORMS["llama"], BY_HEAD_TWICE, "[1,3,5,4]"), 1),
    "tables without a batch": (model(FORMS["llama"], BY_HEAD_TWICE, "[3,5,4]"), 1),
    "neighbors": (model(NEIGHBORS["roformer"], np.repeat(BY_HEAD, 2, 2), "[1,3,5,4]"), 1),
    "the first numbers": (model(part(), np.repeat(BY_HEAD[..., :1], 2, 2), "[1,3,5,2]"), 2),
    "rows in front": (model(rows(), BY_HEAD_TWICE[:, 2:], "[1,3,3,4]"), 2),
}


@pytest.mark.parametrize("name", HEADS_DIFFER)
def test_heads_of_different_angles_turn_as_images(name: str) -> None:
    text, changes = HEADS_DIFFER[name]
    graph, _ = check_pass(FuseRotary(), text, changes=changes)
    assert not {"Neg", "Add"} & graph.kinds().keys()
    (op,) = graph.of_kind("RotaryEmbedding")
    there, back = graph.op(op.inputs[0]), graph.users(op.value)[0]
    assert there.attrs.perm == back.attrs.perm == (1, 0, 2, 3)
    assert graph.op(there.inputs[0]).kind == "Input"
    assert [graph.type(v).dims[:2] for v in op.inputs[1:]] == [(3, 5)] * 2


def test_angles_that_differ_by_image_and_head_stay() -> None:
    both = np.random.default_rng(6).standard_normal((2, 3, 5, 2))
    text = model(FORMS["llama"], np.concatenate([both, both], 3), "[2,3,5,4]")
    check_refused(FuseRotary(), text, because="is not one angle per position")


BEHIND = BOTH[2:]
SPLIT_ROWS = rows("to = Constant<value_ints=[2,3]>() f, g = Split<axis=2>(x, to)").replace(
    "g = Slice(x, two, end, positions)", ""
)


@pytest.mark.parametrize("body", [rows(), rows(axis=-2), SPLIT_ROWS], ids=["slices", "counted from the end", "split"])
def test_rows_in_front_of_those_that_turn_turn_by_nothing(body: str) -> None:
    graph, _ = check_pass(
        FuseRotary(), model(body, BEHIND, "[1,1,3,4]"), changes=2, rules={"rotary_embedding": 1, "rotary_rows": 1}
    )
    (op,) = graph.of_kind("RotaryEmbedding")
    assert graph.op(op.inputs[0]).kind == "Input"
    FoldConstants()(graph)
    cos, sin = (graph.constant_value(v) for v in graph.of_kind("RotaryEmbedding")[0].inputs[1:])
    assert cos is not None
    assert sin is not None
    np.testing.assert_array_equal(cos[0, :2], np.ones((2, 2)))
    np.testing.assert_array_equal(sin[0, :2], np.zeros((2, 2)))
    assert cos.shape == sin.shape == (1, 5, 2)


LAST_ROWS = """positions = Constant<value_ints=[2]>() three = Constant<value_ints=[3]>() f = Slice(x, three, end, positions)
    g = Slice(x, zero, three, positions) a = Slice(g, zero, two, last)  b = Slice(g, two, end, last)
    {TURNED} {TABLES} gc = Mul(g, c) rs = Mul(r, s) t = Add(gc, rs) y = Concat<axis=2>(t, f)"""
LAST_ROWS = LAST_ROWS.format(TURNED=TURNED, TABLES=TABLES)


def test_rows_behind_those_that_turn_turn_by_nothing() -> None:
    rules = {"rotary_embedding": 1, "rotary_rows": 1}
    graph, _ = check_pass(FuseRotary(), model(LAST_ROWS, BEHIND, "[1,1,3,4]"), changes=2, rules=rules)
    FoldConstants()(graph)
    cos, sin = (graph.constant_value(v) for v in graph.of_kind("RotaryEmbedding")[0].inputs[1:])
    assert cos is not None
    assert sin is not None
    np.testing.assert_array_equal(cos[0, 3:], np.ones((2, 2)))
    np.testing.assert_array_equal(sin[0, 3:], np.zeros((2, 2)))
    assert cos.shape == sin.shape == (1, 5, 2)


def test_turned_first_rows_that_are_used_elsewhere_stay() -> None:
    n = Net()
    x = n.input(2, 3, 5, 4)
    first, rest = n.op("Split", x, n.ints(3, 2), attrs=SplitAttrs(2), outputs=2)
    turned = n.op("RotaryEmbedding", first, n.random(1, 3, 2), n.random(1, 3, 2))
    graph = n.done(n.op("Concat", turned, rest, attrs=ConcatAttrs(2)), n.op("Relu", turned))
    check_refused(FuseRotary(), graph, because="its rotated rows are used elsewhere", rule="rotary_rows")


OTHER_ROWS = {
    "a gap": rows("f = Slice(x, zero, one, positions)"),
    "another tensor": rows("z = Abs(x) f = Slice(z, zero, two, positions)"),
    "the other order": rows(joined="t, f"),
    "three parts": rows(joined="f, t, f"),
    "along the heads": rows("h = Slice(x, zero, one, one) f = Slice(h, two, end, positions)", axis=1),
}


@pytest.mark.parametrize("name", OTHER_ROWS)
def test_other_rows_stay(name: str) -> None:
    text = model(OTHER_ROWS[name], BEHIND, "[1,1,3,4]")
    size = {"a gap": "[2,3,4,4]", "three parts": "[2,3,7,4]", "along the heads": "[2,4,3,4]"}.get(name, "[2,3,5,4]")
    graph, _ = check_pass(FuseRotary(), text.replace("(float[2,3,5,4] y)", f"(float{size} y)"), changes=1)
    assert graph.kinds()["Concat"] == 1


UNEQUAL = {
    "computed": coordinates().replace("w1 = Reshape(w0, two3)", "i = Reshape(w0, two3) w1 = Add(i, turn)"),
    "apart": coordinates("Concat<axis=2>(w4, w2, w5)").replace(
        "w3 =", "w4, w5 = Split<axis=2, num_outputs=2>(w1) w3 ="
    ),
    "neighbors of halves": NEIGHBORS["roformer"],
    "any": FORMS["llama"],
}


@pytest.mark.parametrize("name", UNEQUAL)
def test_numbers_of_a_pair_may_have_angles_of_their_own(name: str) -> None:
    tables = BOTH if name == "neighbors of halves" else np.random.default_rng(5).standard_normal((5, 4))
    graph, _ = check_pass(FuseRotary(), model(UNEQUAL[name], tables), changes=1)
    (op,) = graph.of_kind("RotaryEmbedding")
    assert op.attrs.own_angles
    assert op.attrs.interleaved == (name != "any")
    assert [graph.type(v).dims[-1] for v in op.inputs[1:] if v is not None] == [4, 4]


REFUSED = {
    "is not one angle per position": model(FORMS["llama"], np.tile(BOTH, (6, 1)), "[2,3,5,4]"),
    r"c fp32\[2, 5, 3, 4\] is not one angle": positions_first(
        model(FORMS["llama"], np.repeat(np.tile(BOTH, (2, 1)), 3, 0), "[2,5,3,4]")
    ),
    "its cosines and sines differ by other axes": model(
        f"{SLICED} {TURNED} c = Cos(angles) w0 = Concat<axis=-1>(turn, turn) w1 = Unsqueeze(w0, one) s = Sin(w1) {SUM}",
        BY_HEAD_TWICE,
        "[1,3,5,4]",
    ),
}


@pytest.mark.parametrize("why", REFUSED)
def test_refused(why: str) -> None:
    check_refused(FuseRotary(), REFUSED[why], because=why)


def test_a_turned_part_that_is_used_elsewhere_stays() -> None:
    body = """f, g = Split<axis=-1, num_outputs=2>(x) c = Constant<value_floats=[0.6]>() s = Constant<value_floats=[0.8]>()
        to = Constant<value_ints=[1,5,1]>() cs = Expand(c, to) ss = Expand(s, to) t = RotaryEmbedding(f, cs, ss)
        whole = Concat<axis=-1>(t, g) again = Concat<axis=-1>(t, t) y = Add(whole, again)"""
    check_refused(FuseRotary(), model(body).replace('"" : 21', '"" : 23'), because="its rotated part is used elsewhere")


def test_turned_rows_that_are_used_elsewhere_stay() -> None:
    body = """positions = Constant<value_ints=[2]>() f = Slice(x, zero, two, positions) g = Slice(x, two, end, positions)
        c = Constant<value_floats=[0.6]>() s = Constant<value_floats=[0.8]>() to = Constant<value_ints=[1,3,2]>()
        cs = Expand(c, to) ss = Expand(s, to) t = RotaryEmbedding(g, cs, ss) whole = Concat<axis=2>(f, t)
        other = Neg(t) both = Concat<axis=2>(f, other) y = Add(whole, both)"""
    text = model(body).replace('"" : 21', '"" : 23')
    check_refused(FuseRotary(), text, because="its rotated rows are used elsewhere")


def test_caches_of_unknown_sizes_are_not_extended() -> None:
    n = Net()
    x, cos, sin = n.input(2, 3, 5, 4), *(n.input(symbol("b"), 3, 2, name=name) for name in ("cos", "sin"))
    first, rest = (n.op("Slice", x, n.ints(a), n.ints(b), n.ints(2)) for a, b in ((0, 2), (2, 5)))
    turned = n.op("RotaryEmbedding", rest, cos, sin)
    graph = n.done(n.op("Concat", first, turned, attrs=ConcatAttrs(2)))
    check_refused(FuseRotary(), graph, because="the size of cos .* is not known")


OTHERS = {
    "not negated": f"{SLICED} n = Abs(b)  r = Concat<axis=-1>(n, a) {TABLES} {SUM}",
    "first half negated": f"{SLICED} n = Neg(a)  r = Concat<axis=-1>(n, b) {TABLES} {SUM}",
    "thirds": f"a = Slice(x, zero, one, last)  b = Slice(x, one, end, last) {TURNED} {TABLES} {SUM}",
    "halves of pairs exchanged": f"{UNBOUND} {TABLES} {SUM}".replace("Neg(o)", "Neg(e)").replace(
        "Unsqueeze(e,", "Unsqueeze(o,"
    ),
    "elements of pairs exchanged": f"{ELEMENTS} {TABLES} {SUM}".replace("odd)", "even)").replace(
        "xp, even) o", "xp, odd) o"
    ),
    "one element twice": f"{ELEMENTS} {TABLES} {SUM}".replace("odd)", "even)"),
    "elements of another axis": f"{ELEMENTS} {TABLES} {SUM}".replace("axis=4", "axis=3").replace(
        "axis=-1>(xp", "axis=3>(xp"
    ),
    "elements of something else": f"z = Abs(xp) {ELEMENTS} {TABLES} {SUM}".replace("(xp, odd)", "(z, odd)")
    .replace("z = Abs(xp)", "", 1)
    .replace("e = Gather", "z = Abs(xp) e = Gather"),
    "pairs of something else": f"z = Abs(x) {UNBOUND} {TABLES} {SUM}".replace("Reshape(x,", "Reshape(z,"),
    "columns of pairs": f"{UNBOUND} {TABLES} {SUM}".replace(
        "xp = Reshape(x, pairs)", "xq = Reshape(x, pairs) xp = Transpose<perm=[0,1,2,4,3]>(xq)"
    ),
    "columns of rows of halves": FORMS["rows of halves"].replace("axis=3", "axis=4").replace("[3]", "[4]"),
    "rows of halves of something else": f"z = Abs(x) {FORMS['rows of halves']}".replace("Reshape(x,", "Reshape(z,"),
    "neighbors not negated": f"{STACKED} {TABLES} {SUM}".replace("Neg", "Abs"),
    "the first neighbor negated": f"{STACKED} {TABLES} {SUM}".replace("Neg(o)", "Neg(e)").replace(
        "Unsqueeze(e,", "Unsqueeze(o,"
    ),
    "halves of something else": f"z = Abs(x) a = Slice(z, zero, two, last)  b = Slice(z, two, end, last) {TURNED} {TABLES} {SUM}",
}


@pytest.mark.parametrize("name", OTHERS)
def test_no_rotation(name: str) -> None:
    check_untouched(FuseRotary(), model(OTHERS[name]))


@needs_shared_graphs
def test_one_node_per_rotation_in_llama(tmp_path: Any) -> None:
    """Two layers rotate queries and keys; their angles are computed once."""
    model = shared_network("llama.dyn", tmp_path)
    graph = import_model(model, shapes={v.name: (2, 24) for v in model.graph.input})
    run_pipeline(graph, PIPELINE(3, "cuda:sm_90a"), PassContext("cuda:sm_90a"), verify=True)
    kinds = graph.kinds()
    assert kinds["RotaryEmbedding"] == 4
    assert kinds["Attention"] == 2
    assert not {"Neg", "Concat", "Slice", "Pointwise"} & kinds.keys()
