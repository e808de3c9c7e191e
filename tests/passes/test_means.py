"""sum_is_mean: a sum divided by the number of its terms is a mean. reduction_of_reduction: two reductions are one.
reduction_of_joined_axes: a reduction reads the axes that a Reshape has joined."""

from __future__ import annotations

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net, built
from support.simulated import kinds, lowered

from optdnn.dim import symbol
from optdnn.ir.graph import Value
from optdnn.ops.reduce import ReduceAttrs
from optdnn.passes.base import RulePass
from optdnn.passes.canonicalize import Canonicalize
from optdnn.passes.channel_norms import ChannelNorms
from optdnn.passes.rules.means import (
    reduction_of_joined_axes,
    reduction_of_reduction,
    sum_is_mean,
    variance_of_joined_axes,
)


class Means(RulePass):
    name = "means"
    rules = (sum_is_mean,)


class Nested(RulePass):
    name = "nested"
    rules = (reduction_of_reduction,)


class Joined(RulePass):
    name = "joined"
    rules = (reduction_of_joined_axes,)


MEANS, NESTED, JOINED = Means(), Nested(), Joined()


def total(n: Net, x: Value, *axes: int, keepdims: bool = True) -> Value:
    return n.op("ReduceSum", x, n.ints(*axes), attrs=ReduceAttrs(keepdims=keepdims))


@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize(("axes", "count"), [((1,), 6), ((-1, 1), 30), ((0, 1, 2), 120)])
def test_a_sum_divided_by_its_count(axes: tuple[int, ...], count: int, keepdims: bool) -> None:
    n = Net(np.float64)
    y = n.op("Div", total(n, n.input(4, 6, 5), *axes, keepdims=keepdims), n.const(np.float64(count)))
    check_pass(MEANS, n.done(y), changes=1, kinds={"ReduceMean": 1})


@pytest.mark.parametrize("kind", ["Div", "Mul"])
def test_a_sum_of_squares(kind: str) -> None:
    n = Net(np.float64)
    squares = n.op("ReduceSumSquare", n.input(4, 6, 5), n.ints(1), attrs=ReduceAttrs(keepdims=True))
    y = n.op(kind, squares, n.const(np.float64(6 if kind == "Div" else 1 / 6)))
    check_pass(MEANS, n.done(y), changes=1, kinds={"ReduceMean": 1, "Mul": 1})


def test_the_variance_of_keras_on_jax() -> None:
    """Two means, one of them a sum, and a sum of squares: all of it is one norm."""
    n = Net()
    x, axes = n.input(2, 6, 64), n.ints(2)
    of = ReduceAttrs(keepdims=True)
    mean = n.op("Div", n.op("ReduceSum", x, axes, attrs=of), 64.0)
    squares = n.op("ReduceSumSquare", n.op("Sub", x, mean), axes, attrs=of)
    root = n.op("Sqrt", n.op("Add", n.op("Div", squares, 64.0), 1e-3))
    factor = n.op("Mul", n.op("Div", 1.0, root), n.random(1, 1, 64))
    again = n.op("Neg", n.op("ReduceMean", x, axes, attrs=of))
    program = lowered(n.done(n.op("Add", n.op("Mul", x, factor), n.op("Mul", again, factor))))
    assert kinds(program) == ["Pointwise", "ActivatedNorm"]  # conversions to fp16, and from it in the norm's launch


@pytest.mark.parametrize("first", [False, True])
def test_a_sum_multiplied_by_the_reciprocal_of_its_count(first: bool) -> None:
    n = Net(np.float64)
    pair = [total(n, n.input(4, 6, 5), 1), n.const(np.full((1, 1, 5), 1 / 6))]
    check_pass(MEANS, n.done(n.op("Mul", *(pair[::-1] if first else pair))), changes=1, kinds={"ReduceMean": 1})


def test_a_sum_of_all_axes_of_a_symbolic_batch() -> None:
    n = Net(np.float64)
    y = n.op("Div", total(n, n.input(symbol("N", 1), 6, 5), 1), n.const(np.float64(6)))
    check_pass(MEANS, n.done(y), changes=1, kinds={"ReduceMean": 1})


def other_count(n: Net) -> Value:
    return n.op("Div", total(n, n.input(4, 6, 5), 1), n.const(np.float32(7)))


def some_counts(n: Net) -> Value:
    return n.op("Div", total(n, n.input(4, 6, 5), 1), n.const(np.array([6, 6, 6, 6, 5], np.float32)))


def symbolic_count(n: Net) -> Value:
    return n.op("Div", total(n, n.input(symbol("N", 1), 6, 5), 0), n.const(np.float32(6)))


def divided_count(n: Net) -> Value:
    return n.op("Div", n.const(np.float32(6)), total(n, n.input(4, 6, 5), 1))


def wider_result(n: Net) -> Value:
    return n.op("Div", total(n, n.input(4, 6, 5), 1), n.const(np.full((4, 2, 5), 6, np.float32)))


@pytest.mark.parametrize("made", [other_count, some_counts, symbolic_count, divided_count, wider_result])
def test_other_divisions_stay(made: object) -> None:
    check_untouched(MEANS, built(made))  # type: ignore[operator]


def test_refused_where_the_sum_is_read_by_others() -> None:
    n = Net()
    s = total(n, n.input(4, 6, 5), 1)
    check_refused(MEANS, n.done(n.op("Div", s, n.const(np.float32(6))), n.op("Relu", s)), because="is used 2 times")


def test_standardized_series_are_one_norm() -> None:
    """As PatchTST writes it: sums over time, divided by the number of steps."""
    n = Net(np.float64)
    x, steps = n.input(2, 16, 3), n.const(np.full((1, 1, 3), 16.0))
    centered = n.op("Sub", x, n.op("Div", total(n, x, 1), steps))
    variance = n.op("Div", total(n, n.op("Mul", centered, centered), 1), steps)
    y = n.op("Div", centered, n.op("Sqrt", n.op("Add", variance, n.const(np.float64(1e-5)))))
    graph = n.done(y)
    means, _ = check_pass(Canonicalize(), graph, changes=2, rules={"sum_is_mean": 2})
    check_pass(ChannelNorms(), means, changes=1, kinds={"LayerNormalization": 1, "Transpose": 2})


def reduced(n: Net, x: Value, axes: tuple[int, ...], keepdims: bool = True, kind: str = "ReduceMean") -> Value:
    return n.op(kind, x, n.ints(*axes), attrs=ReduceAttrs(keepdims=keepdims))


@pytest.mark.parametrize("kind", ["ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin"])
@pytest.mark.parametrize(
    ("first", "second", "axes"),
    [
        (((1,), True), ((2,), True), (1, 2)),
        (((-1,), True), ((1, 2), True), (1, 2, 3)),
        (((3,), False), ((2,), False), (2, 3)),
        (((1, 2), False), ((0, 1), False), (0, 1, 2, 3)),
        (((2,), True), ((2, 3), False), (2, 3)),
    ],
)
def test_reductions_of_one_axis_after_another(kind: str, first: object, second: object, axes: tuple[int, ...]) -> None:
    n = Net(np.float64)
    y = reduced(n, reduced(n, n.input(2, 3, 4, 5), *first, kind), *second, kind)  # type: ignore[misc]
    graph, _ = check_pass(NESTED, n.done(y), changes=1, kinds={kind: 1})
    (op,) = graph.of_kind(kind)
    assert tuple(graph.constant_value(op.inputs[1])) == axes  # type: ignore[arg-type]


def test_reductions_of_a_symbolic_batch() -> None:
    n = Net(np.float64)
    y = reduced(n, reduced(n, n.input(symbol("N", 1), 6, 5), (2,)), (0, 1))
    check_pass(NESTED, n.done(y), changes=1, kinds={"ReduceMean": 1}, sizes={"N": 3})


def other_kind(n: Net) -> Value:
    return reduced(n, reduced(n, n.input(4, 6, 5), (1,)), (2,), kind="ReduceMax")


def dropped_later(n: Net) -> Value:
    return reduced(n, reduced(n, n.input(4, 6, 5), (1,)), (2,), False)


def kept_later(n: Net) -> Value:
    return reduced(n, reduced(n, n.input(4, 6, 5), (1,), False), (1,))


def of_integers(n: Net) -> Value:
    return reduced(n, reduced(n, n.input(4, 6, 5, dtype=np.int64), (1,)), (2,))


@pytest.mark.parametrize("made", [other_kind, dropped_later, kept_later, of_integers])
def test_other_reductions_stay(made: object) -> None:
    check_untouched(NESTED, built(made))  # type: ignore[operator]


def test_reductions_that_are_refused() -> None:
    n = Net()
    inner = reduced(n, n.input(4, 6, 5), (1,))
    check_refused(NESTED, n.done(reduced(n, inner, (2,)), n.op("Relu", inner)), because="is used 2 times")
    n = Net()
    y = reduced(n, reduced(n, n.input(4, 6, 5), (0,)), (2,))
    check_refused(NESTED, n.done(y), because="the reduced axes are not adjacent")


def flattened(n: Net, shape: tuple[int, ...], axes: tuple[int, ...], keepdims: bool, kind: str = "ReduceMax") -> Value:
    """A reduction of an image [2, 3, 4, 5] that a Reshape has given another shape."""
    return reduced(n, n.op("Reshape", n.input(2, 3, 4, 5), n.ints(*shape)), axes, keepdims, kind=kind)


@pytest.mark.parametrize(
    "kind", ["ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2"]
)
@pytest.mark.parametrize(
    ("shape", "axes", "keepdims", "among", "views"),
    [
        ((2, 3, 20), (2,), False, (2, 3), 0),  # x.flatten(2).amax(-1)
        ((2, 3, 20), (-1,), True, (2, 3), 1),
        ((2, 12, 5), (1,), False, (1, 2), 0),
        ((6, 4, 5), (1, 2), False, (2, 3), 1),  # the kept axes stay joined
        ((120,), (0,), False, (0, 1, 2, 3), 0),
        ((2, 3, 4, 5, 1), (3,), False, (3,), 1),
    ],
)
def test_a_reduction_of_joined_axes(
    kind: str, shape: tuple[int, ...], axes: tuple[int, ...], keepdims: bool, among: tuple[int, ...], views: int
) -> None:
    n = Net(np.float64)
    graph, _ = check_pass(
        JOINED,
        n.done(flattened(n, shape, axes, keepdims, kind)),
        changes=1,
        kinds={kind: 1} | ({"Reshape": views} if views else {}),
    )
    (op,) = graph.of_kind(kind)
    assert tuple(graph.constant_value(op.inputs[1])) == among  # type: ignore[arg-type]


def test_reductions_of_views_that_stay() -> None:
    n = Net()
    rows = n.op("Reshape", n.input(2, 3, 20), n.ints(2, 60))
    check_refused(JOINED, n.done(reduced(n, rows, (1,)), n.op("Relu", rows)), because="is read elsewhere")
    check_refused(JOINED, built(flattened, (2, 6, 10), (2,), False), because="splits a reduced axis, or joins it")
    check_refused(JOINED, built(flattened, (2, 3, 2, 10), (3,), False), because="splits a reduced axis, or joins it")


class _Both(RulePass):
    name = "both"
    rules = (variance_of_joined_axes, reduction_of_joined_axes)


BOTH = _Both()


def of_pixels(n: Net, *, keepdims: bool = False, split: bool = False) -> tuple[Value, Value, Value]:
    """The variance, the deviations and the mean of each channel, of joined pixels (AdaIN)."""
    x = n.input(2, 3, 4, 5)
    rows = n.op("Reshape", x, n.ints(2, 6, 10) if split else n.ints(2, 3, 20))
    center = reduced(n, rows, (2,), True)
    d = n.op("Sub", rows, center)
    return reduced(n, n.op("Mul", d, d), (2,), keepdims), d, center


@pytest.mark.parametrize("keepdims", [False, True])
def test_a_variance_of_joined_axes(keepdims: bool) -> None:
    n = Net(np.float64)
    y, _, center = of_pixels(n, keepdims=keepdims)
    rules = {"variance_of_joined_axes": 1, "reduction_of_joined_axes": 1}
    graph, _ = check_pass(BOTH, n.done(y, center), changes=2, rules=rules)
    for op in graph.of_kind("ReduceMean"):
        assert tuple(graph.constant_value(op.inputs[1])) == (2, 3)  # type: ignore[arg-type]


def test_variances_that_stay() -> None:
    n = Net()
    y, d, _ = of_pixels(n)
    check_refused(BOTH, n.done(y, n.op("Exp", d)), because="the result of Sub_3 is read elsewhere")
    n = Net()
    y, _, _ = of_pixels(n, split=True)
    check_refused(BOTH, n.done(y), because="splits a reduced axis, or joins it", rule="variance_of_joined_axes")


def test_several_reductions_of_one_view() -> None:
    n = Net(np.float64)
    rows = n.op("Reshape", n.input(2, 3, 4, 5), n.ints(2, 3, 20))
    both = [reduced(n, rows, (2,), False, kind) for kind in ("ReduceMean", "ReduceMax")]
    rules = {"reduction_of_joined_axes": 2}
    check_pass(JOINED, n.done(*both), changes=2, kinds={"ReduceMean": 1, "ReduceMax": 1}, rules=rules)
