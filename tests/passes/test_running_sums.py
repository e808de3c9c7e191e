"""Differences of running sums stay in fp32; other running sums do not."""

from __future__ import annotations

import pytest
from support.check import from_text

from optdnn.passes.assign_precision import AssignPrecision
from optdnn.passes.base import PassContext
from optdnn.passes.support.running_sums import differences
from optdnn.types import FP32

HEAD = '<ir_version: 9, opset_import: ["": 17]>\n'
SEGMENTS = (
    HEAD
    + """g (float[99,8] x, int64[9] ends) => (float[8,8] y, float[99,8] z)
<int64 zero = {0}, int64[1] first = {0}, int64[1] second = {1}, int64[1] eighth = {8}, int64[1] ninth = {9}>
{ c = CumSum(x, zero) e = Gather(c, ends) a = Slice(e, second, ninth) b = Slice(e, first, eighth) d = Sub(a, b) y = Relu(d)
z = Identity(c) }"""
)
ONE = (
    HEAD
    + "g (float[9,8] x) => (float[9,8] y) <int64 zero = {0}, float one = {1}> { c = CumSum(x, zero) y = Sub(c, one) }"
)
OTHER = HEAD + "g (float[9,8] x) => (float[9,8] y) <int64 zero = {0}> { c = CumSum(x, zero) r = Relu(x) y = Sub(c, r) }"
INTEGERS = (
    HEAD
    + """g (int64[9] x) => (int64[8] y)
<int64 zero = {0}, int64[1] first = {0}, int64[1] second = {1}, int64[1] eighth = {8}, int64[1] ninth = {9}>
{ c = CumSum(x, zero) a = Slice(c, second, ninth) b = Slice(c, first, eighth) y = Sub(a, b) }"""
)


@pytest.mark.parametrize(
    ("text", "kept"),
    [(SEGMENTS, {"c", "e", "a", "b", "d"}), (ONE, set()), (OTHER, set()), (INTEGERS, set())],
    ids=["sums over segments", "a number is subtracted", "another tensor is subtracted", "integers"],
)
def test_operators_that_compute_differences(text: str, kept: set[str]) -> None:
    graph = from_text(text)
    assert {graph.op(i).outputs[0].name for i in differences(graph)} == kept


def test_they_stay_in_fp32() -> None:
    graph = from_text(SEGMENTS)
    AssignPrecision()(graph, PassContext(target="cuda:sm_90a", precision="fp16"))
    (total,) = graph.of_kind("CumSum")
    assert total.outputs[0].type.dtype == FP32
