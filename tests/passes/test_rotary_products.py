"""rotary_products: rotary embeddings written as products of complex numbers become one op; other products stay."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched

from optdnn.passes.base import RulePass
from optdnn.passes.canonicalize import Canonicalize
from optdnn.passes.fuse_rotary import FuseRotary
from optdnn.passes.rules.concats import interleaved_parts

ANGLES = np.random.default_rng(2).standard_normal((5, 2))


def model(body: str, angles: Any = ANGLES, shape: str = "[1,1,5,2]", x: str = "[2,3,5,4]", more: str = "") -> str:
    numbers = ", ".join(map(str, np.asarray(angles).reshape(-1).tolist()))
    return f"""<ir_version: 10, opset_import: ["" : 21]>
    rotary (float{x} x{more}) => (float y)
    <float{shape} angles = {{{numbers}}}, int64[1] zero = {{0}}, int64[1] one = {{1}}, int64[1] two = {{2}}, int64[1] last = {{-1}},
     int64[1] end = {{9223372036854775807}}, int64[5] pairs = {{2,3,5,2,2}}, int64 even = {{0}}, int64 odd = {{1}},
     int64[1] three = {{3}}, int64[4] full = {{2,3,5,4}}>
    {{ c = Cos(angles) s = Sin(angles) {body} }}"""


HALVES = "a = Slice(x, zero, two, last) b = Slice(x, two, end, last)"
SPLIT = "a, b = Split<axis=-1, num_outputs=2>(x)"
STEPS = "a = Slice(x, zero, end, last, two) b = Slice(x, one, end, last, two)"
UNBOUND = (
    """xp = Reshape(x, pairs) ap, bp = Split<axis=-1, num_outputs=2>(xp) a = Squeeze(ap, last) b = Squeeze(bp, last)"""
)
ELEMENTS = "xp = Reshape(x, pairs) a = Gather<axis=4>(xp, even) b = Gather<axis=4>(xp, odd)"
GATHERED = "a = Gather<axis=3>(xp, even) b = Gather<axis=-2>(xp, odd)"
DIVIDED = "ar, br = Split<axis=3, num_outputs=2>(xp) a = Squeeze(ar, three) b = Squeeze(br, three)"
ROWS = f"xp = Reshape(x, pairs) {GATHERED}"
PRODUCTS = "ac = Mul(a, c) bs = Mul(b, s) bc = Mul(b, c) as = Mul(a, s) re = Sub(ac, bs) im = Add(bc, as)"
OTHER_ORDER = "ac = Mul(c, a) bs = Mul(b, s) bc = Mul(b, c) as = Mul(s, a) re = Sub(ac, bs) im = Add(as, bc)"
JOINED = "y = Concat<axis=-1>(re, im)"
STACKED = "ru = Unsqueeze(re, last) iu = Unsqueeze(im, last) st = Concat<axis=-1>(ru, iu) y = Reshape(st, full)"
WIDE = PRODUCTS.replace(", c)", ", cu)").replace(", s)", ", su)")
COMPLEX = f"""xp = Reshape(x, pairs) a, b = Split<axis=-1, num_outputs=2>(xp) {WIDE}
    st = Concat<axis=-1>(re, im) y = Reshape(st, full)"""
COMPLEX = f"cu = Unsqueeze(c, last) su = Unsqueeze(s, last) {COMPLEX}"

FORMS = {
    "halves": (f"{HALVES} {PRODUCTS} {JOINED}", False),
    "split": (f"{SPLIT} {OTHER_ORDER} {JOINED}", False),
    "steps": (f"{STEPS} {PRODUCTS} {STACKED}", True),
    "unbound pairs": (f"{UNBOUND} {OTHER_ORDER} {STACKED}", True),
    "complex": (COMPLEX, True),
    "steps to halves": (f"{STEPS} {PRODUCTS} {JOINED}", True),
    "rows of halves": (f"{ROWS} {PRODUCTS} {JOINED}", False),
    "parts of rows of halves": (f"{ROWS} {PRODUCTS} {JOINED}".replace(GATHERED, DIVIDED), False),
    "elements of pairs": (f"{ELEMENTS} {PRODUCTS} {STACKED}", True),
    "unbound pairs to halves": (f"{UNBOUND} {OTHER_ORDER} {JOINED}", True),
}


@pytest.mark.parametrize("name", FORMS)
def test_exported_forms(name: str) -> None:
    body, interleaved = FORMS[name]
    graph, _ = check_pass(FuseRotary(), model(body), changes=1)
    (op,) = graph.of_kind("RotaryEmbedding")
    assert op.attrs.interleaved == interleaved
    assert not {"Sub", "Mul", "Add", "Concat"} & graph.kinds().keys()
    assert ("Transpose" in graph.kinds()) == name.endswith("to halves")


def part(*, more: str = "") -> str:
    """GLM rotates the first features of each head as pairs."""
    turned = f"{ELEMENTS} {PRODUCTS} {STACKED}".replace("(x,", "(f,").replace("y = Reshape", "t = Reshape")
    body = f"four = Constant<value_ints=[4]>() f = Slice(x, zero, four, last) g = Slice(x, four, end, last) {turned}"
    return model(f"{body} y = Concat<axis=-1>(t, g) {more}", x="[2,3,5,8]")


def test_features_that_are_not_rotated_stay() -> None:
    graph, _ = check_pass(FuseRotary(), part(), changes=2, rules={"rotary_products": 1, "partial_rotary_embedding": 1})
    (op,) = graph.of_kind("RotaryEmbedding")
    assert (op.attrs.interleaved, op.attrs.rotary_embedding_dim) == (True, 4)
    assert "Concat" not in graph.kinds()


def test_rotated_features_that_are_used_elsewhere_stay_apart() -> None:
    text = part(more="z = Abs(st)").replace("(float y)", "(float y, float z)")
    check_pass(FuseRotary(), text, changes=1, rules={"rotary_products": 1})


@pytest.mark.parametrize("name", ["halves", "steps to halves"])
def test_features_that_change_places_and_are_joined_with_others(name: str) -> None:
    """Multi-head latent attention (DeepSeek-V2, 2024): a Concat joins rotated features with others."""
    text = model(FORMS[name][0].replace("y = Concat", "z = Concat") + " y = Concat<axis=-1>(x, z)")
    if name == "halves":
        check_pass(FuseRotary(), text, changes=1)
    else:
        check_refused(FuseRotary(), text, because="its features change places")


@pytest.mark.parametrize(("angles", "shape"), [(ANGLES, "[5,2]"), (np.tile(ANGLES, (2, 1)), "[2,1,5,2]")])
def test_tables_of_other_ranks(angles: Any, shape: str) -> None:
    graph, _ = check_pass(FuseRotary(), model(FORMS["halves"][0], angles, shape), changes=1)
    assert len(graph.of_kind("RotaryEmbedding")) == 1


def test_heads_of_different_angles_turn_as_images() -> None:
    turn = np.random.default_rng(5).standard_normal((3, 5, 2))
    graph, _ = check_pass(FuseRotary(), model(FORMS["halves"][0], turn, "[1,3,5,2]"), changes=1)
    (op,) = graph.of_kind("RotaryEmbedding")
    assert graph.op(op.inputs[0]).attrs.perm == graph.users(op.value)[0].attrs.perm == (1, 0, 2, 3)


@pytest.mark.parametrize("name", ["halves", "steps", "steps to halves"])
def test_positions_before_heads(name: str) -> None:
    body = FORMS[name][0].replace("full", "heads")
    text = model(body, shape="[5,1,2]", x="[2,5,3,4]").replace(
        "int64[4] full = {2,3,5,4}", "int64[4] heads = {2,5,3,4}"
    )
    graph, _ = check_pass(FuseRotary(), text, changes=1)
    assert graph.kinds()["RotaryEmbedding"] == 1


class Interleaved(RulePass):
    name = "interleaved"
    rules = (interleaved_parts,)


ASSIGNED = """aT = Transpose<perm=[3,1,2,0]>(re) bT = Transpose<perm=[3,1,2,0]>(im) ru = Unsqueeze(aT, one) iu = Unsqueeze(bT, one)
    st = Concat<axis=1>(ru, iu) four = Constant<value_ints=[4,3,5,2]>() m = Reshape(st, four) y = Transpose<perm=[3,1,2,0]>(m)"""


def test_assignments_to_even_and_odd_numbers() -> None:
    """As Wan writes them, after their scatters have become a Concat."""
    text = model(f"{UNBOUND} {PRODUCTS} {ASSIGNED}")
    graph, _ = check_pass(Interleaved(), text, changes=1)
    Canonicalize()(graph)
    graph, _ = check_pass(FuseRotary(), graph, changes=1)
    assert graph.kinds()["RotaryEmbedding"] == 1


THREE = ASSIGNED.replace("(ru, iu)", "(ru, iu, ru)").replace("[4,3,5,2]", "[6,3,5,2]")
IN_FRONT = ASSIGNED.replace("T, one)", "T, zero)").replace("Concat<axis=1>", "Concat<axis=0>")
ACROSS = ASSIGNED.replace("[4,3,5,2]", "[2,6,5,2]")


@pytest.mark.parametrize("body", [THREE, IN_FRONT, ACROSS])
def test_other_assignments_keep_their_transposes(body: str) -> None:
    check_untouched(Interleaved(), model(f"{UNBOUND} {PRODUCTS} {body}"))


REFUSED = {
    "does not have four axes": model(FORMS["halves"][0], x="[3,5,4]", shape="[5,2]"),
    "is not one angle per position": model(FORMS["halves"][0], np.tile(ANGLES, (6, 1)), "[2,3,5,2]"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_refused(why: str) -> None:
    check_refused(FuseRotary(), REFUSED[why], because=why)


@pytest.mark.parametrize(
    ("x", "angles", "shape"),
    [("[1,3,5,4]", np.tile(ANGLES, (2, 1)), "[2,1,5,2]"), ("[2,3,5,2]", ANGLES, "[5,2]")],
)
def test_angles_that_repeat_the_features_are_refused(x: str, angles: Any, shape: str) -> None:
    """One image is rotated by the angles of two, or one feature by several angles."""
    because = "the results have the shape .*, their parts"
    check_refused(FuseRotary(), model(FORMS["steps to halves"][0], angles, shape, x), because=because)


def test_no_positions() -> None:
    check_untouched(FuseRotary(), model(FORMS["halves"][0], x="[2,3,0,4]", shape="[1,1,1,2]", angles=ANGLES[:1]))


@pytest.mark.parametrize(
    "body",
    [
        FORMS["halves"][0].replace("Sub(ac, bs)", "Sub(bs, ac)"),
        FORMS["halves"][0].replace("axis=-1>(re, im)", "axis=2>(re, im)"),
        FORMS["halves"][0].replace("(re, im)", "(im, re)"),
        FORMS["halves"][0]
        .replace("Slice(x, zero, two, last)", "Slice(z, zero, two, last)")
        .replace("a = ", "z = Abs(x) a = ", 1),
        FORMS["rows of halves"][0].replace("odd)", "even)"),
        FORMS["rows of halves"][0].replace("axis=-2", "axis=4"),
        FORMS["steps"][0].replace("Slice(x, one, end, last, two)", "Slice(x, zero, end, last, two)"),
    ],
)
def test_no_rotation(body: str) -> None:
    check_untouched(FuseRotary(), model(body))
