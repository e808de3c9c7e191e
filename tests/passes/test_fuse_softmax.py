"""fuse_softmax: softmax and log-softmax from their written-out forms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net

from optdnn.ir.graph import Graph, Value
from optdnn.ops.reduce import ReduceAttrs
from optdnn.ops.softmax import SoftmaxAttrs
from optdnn.ops.sort import TopKAttrs
from optdnn.passes.fuse_softmax import FuseSoftmax


def shifted(n: Net, x: Value, *axes: int) -> Value:
    return n.op("Sub", x, n.op("ReduceMax", x, n.ints(*axes), attrs=ReduceAttrs()))


def summed(n: Net, x: Value, *axes: int) -> Value:
    return n.op("ReduceSum", x, n.ints(*axes), attrs=ReduceAttrs())


@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.parametrize("stable", [True, False])
@pytest.mark.parametrize("reciprocal", [True, False])
def test_softmax(axis: int, stable: bool, reciprocal: bool) -> None:
    n = Net(np.float64)
    x = n.input(2, 3, 4)
    e = n.op("Exp", shifted(n, x, axis) if stable else x)
    s = summed(n, e, axis)
    y = n.op("Mul", n.op("Reciprocal", s), e) if reciprocal else n.op("Div", e, s)
    graph, _ = check_pass(FuseSoftmax(), n.done(y), changes=1, kinds={"Softmax": 1})
    assert graph.of_kind("Softmax")[0].attrs == SoftmaxAttrs(axis % 3)


def test_the_maximum_may_be_over_everything() -> None:
    n = Net(np.float64)
    x = n.input(2, 3)
    e = n.op("Exp", n.op("Sub", x, n.op("ReduceMax", x, attrs=ReduceAttrs())))
    check_pass(FuseSoftmax(), n.done(n.op("Div", e, summed(n, e, 1))), changes=1, kinds={"Softmax": 1})


def test_a_maximum_over_another_axis_stays() -> None:
    n = Net(np.float64)
    e = n.op("Exp", shifted(n, n.input(2, 3), 0))
    kinds = {"ReduceMax": 1, "Softmax": 1, "Sub": 1}
    check_pass(FuseSoftmax(), n.done(n.op("Div", e, summed(n, e, 1))), changes=1, kinds=kinds)


def test_two_axes_are_refused() -> None:
    n = Net(np.float64)
    e = n.op("Exp", n.input(2, 3, 4))
    check_refused(
        FuseSoftmax(), n.done(n.op("Div", e, summed(n, e, 1, 2))), because=r"one axis, the sum runs over \(1, 2\)"
    )


def test_dropped_axes_are_refused() -> None:
    n = Net(np.float64)
    e = n.op("Exp", n.input(3, 3))
    s = n.op("ReduceSum", e, n.ints(1), attrs=ReduceAttrs(keepdims=False))
    check_refused(FuseSoftmax(), n.done(n.op("Div", e, s)), because="drops the reduced axes")


def test_a_used_sum_is_refused() -> None:
    n = Net(np.float64)
    e = n.op("Exp", n.input(2, 3))
    s = summed(n, e, 1)
    check_refused(
        FuseSoftmax(),
        n.done(n.op("Div", e, s), n.op("Neg", s)),
        because="an inner value is used elsewhere: ReduceSum_2",
    )


def test_a_quotient_of_two_different_exponentials_is_no_softmax() -> None:
    n = Net(np.float64)
    x = n.input(2, 3)
    check_untouched(FuseSoftmax(), n.done(n.op("Div", n.op("Exp", shifted(n, x, 1)), summed(n, n.op("Exp", x), 1))))


def log_of_softmax(n: Net, x: Value) -> Value:
    return n.op("Log", n.op("Softmax", x, attrs=SoftmaxAttrs(1)))


def stable_log(n: Net, x: Value) -> Value:
    d = shifted(n, x, 1)
    return n.op("Sub", d, n.op("Log", summed(n, n.op("Exp", d), 1)))


def minus_logsumexp(n: Net, x: Value) -> Value:
    m = n.op("ReduceMax", x, n.ints(1), attrs=ReduceAttrs())
    lse = n.op("Add", m, n.op("Log", summed(n, n.op("Exp", n.op("Sub", x, m)), 1)))
    return n.op("Sub", x, lse)


def plain_log(n: Net, x: Value) -> Value:
    return n.op("Sub", x, n.op("Log", summed(n, n.op("Exp", x), 1)))


def reduce_log_sum(n: Net, x: Value) -> Value:
    return n.op("Sub", x, n.op("ReduceLogSum", n.op("Exp", x), n.ints(1), attrs=ReduceAttrs()))


def reduce_log_sum_exp(n: Net, x: Value) -> Value:
    return n.op("Sub", x, n.op("ReduceLogSumExp", x, n.ints(1), attrs=ReduceAttrs()))


@pytest.mark.parametrize(
    "form", [log_of_softmax, stable_log, minus_logsumexp, plain_log, reduce_log_sum, reduce_log_sum_exp]
)
def test_log_softmax(form: object) -> None:
    n = Net(np.float64)
    y = form(n, n.input(2, 3, 4))  # type: ignore[operator]
    graph, _ = check_pass(FuseSoftmax(), n.done(y), changes=1, kinds={"LogSoftmax": 1})
    assert graph.of_kind("LogSoftmax")[0].attrs == SoftmaxAttrs(1)


def test_log_of_a_written_out_softmax_takes_two_steps() -> None:
    n = Net(np.float64)
    e = n.op("Exp", n.input(2, 3))
    check_pass(FuseSoftmax(), n.done(n.op("Log", n.op("Div", e, summed(n, e, 1)))), changes=2, kinds={"LogSoftmax": 1})


def test_log_of_a_softmax_used_elsewhere_is_refused() -> None:
    n = Net(np.float64)
    s = n.op("Softmax", n.input(2, 3), attrs=SoftmaxAttrs(1))
    check_refused(FuseSoftmax(), n.done(n.op("Log", s), n.op("Neg", s)), because="an inner value is used elsewhere")


def test_the_difference_to_another_sum_is_no_log_softmax() -> None:
    n = Net(np.float64)
    x = n.input(2, 3)
    check_untouched(
        FuseSoftmax(), n.done(n.op("Sub", n.input(2, 3, name="z"), n.op("Log", summed(n, n.op("Exp", x), 1))))
    )


def normalized(
    n: Net, guarded: bool, axis: int = 1, kind: str = "ReduceL1", zero: float = 0.0, one: float = 1.0
) -> Value:
    """A softmax along the last axis, divided by its norm along ``axis``."""
    s = n.op("Softmax", n.input(2, 3), attrs=SoftmaxAttrs(-1))
    norm = n.op(kind, s, n.ints(axis), attrs=ReduceAttrs())
    return n.op("Div", s, n.op("Where", n.op("Equal", norm, zero), one, norm) if guarded else norm)


@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("kind", ["ReduceSum", "ReduceL1"])
def test_a_softmax_is_normalized_already(guarded: bool, kind: str) -> None:
    n = Net(np.float64)
    graph = n.done(normalized(n, guarded, kind=kind))
    check_pass(FuseSoftmax(), graph, changes=1, kinds={"Softmax": 1}, rules={"normalized_softmax": 1})


def test_a_softmax_along_another_axis_is_not() -> None:
    n = Net(np.float64)
    check_refused(
        FuseSoftmax(), n.done(normalized(n, False, axis=0)), because=r"along axis 1, the sum runs over \(0,\)"
    )


@pytest.mark.parametrize("other", [{"kind": "ReduceL2"}, {"kind": "ReduceMax"}, {"zero": 1.0}, {"one": 2.0}])
def test_other_divisors_of_a_softmax_stay(other: dict[str, Any]) -> None:
    n = Net(np.float64)
    check_untouched(FuseSoftmax(), n.done(normalized(n, "kind" not in other, **other)))


def router(
    n: Net, *, kind: str = "ReduceSum", over: int = -1, along: int = -1, largest: bool = True, more: str = "",
    numbers: bool = True,
) -> Graph:  # fmt: skip
    """The weights of the chosen experts, and their ``numbers`` (Mixtral). ``more`` has other readers."""
    s = n.op("Softmax", n.op("Relu", n.input(3, 6)), attrs=SoftmaxAttrs(1))
    found = n.op("TopK", s, n.ints(2), attrs=TopKAttrs(along, largest), outputs=1 + numbers)
    best, *places = found if numbers else (found,)
    weights = n.op("Div", best, n.op(kind, best, n.ints(over), attrs=ReduceAttrs()))
    return n.done(weights, *places, *([n.op("Sqrt", {"best": best, "softmax": s}[more])] if more else []))


@pytest.mark.parametrize("kind", ["ReduceSum", "ReduceL1"])
@pytest.mark.parametrize("largest", [True, False])
def test_weights_of_chosen_experts(kind: str, largest: bool) -> None:
    graph = router(Net(np.float64), kind=kind, largest=largest)
    kinds = {"Relu": 1, "Softmax": 1, "TopK": 1}
    check_pass(FuseSoftmax(), graph, changes=1, kinds=kinds, rules={"softmax_of_best": 1})


def test_weights_without_the_numbers_of_the_experts() -> None:
    graph = router(Net(np.float64), numbers=False)
    check_pass(FuseSoftmax(), graph, changes=1, rules={"softmax_of_best": 1})


def test_a_softmax_with_another_reader_stays_beside_that_of_the_chosen_experts() -> None:
    graph = router(Net(np.float64), more="softmax")
    kinds = {"Relu": 1, "Softmax": 2, "Sqrt": 1, "TopK": 1}
    check_pass(FuseSoftmax(), graph, changes=1, kinds=kinds, rules={"softmax_of_best": 1})


@pytest.mark.parametrize(
    ("options", "because"),
    [
        ({"over": 0}, r"the selection along 1, the sum over \(0,\)"),
        ({"along": 0}, r"the selection along 0, the sum over \(1,\)"),
        ({"more": "best"}, "others also read the values of"),
    ],
)
def test_other_weights_of_experts_stay(options: dict[str, Any], because: str) -> None:
    check_refused(FuseSoftmax(), router(Net(np.float64), **options), because=because, rule="softmax_of_best")


def test_weights_with_another_norm_stay() -> None:
    check_untouched(FuseSoftmax(), router(Net(np.float64), kind="ReduceL2"))


@pytest.mark.parametrize("kind", ["Softmax", "LogSoftmax"])
@pytest.mark.parametrize("scale", ["", "Mul", "Div"])
@pytest.mark.parametrize("axis", [-1, 1])
def test_a_shift_of_whole_rows_changes_nothing(kind: str, scale: str, axis: int) -> None:
    """LayoutLMv3 divides scores, subtracts their maximum, and multiplies them again before the softmax."""
    n = Net(np.float64)
    y = shifted(n, n.input(2, 3, 4), axis)
    y = n.op(scale, y, 3.0) if scale else y
    y = n.op(kind, y, attrs=SoftmaxAttrs(axis))
    kinds = {kind: 1, **({scale: 1} if scale else {})}
    check_pass(FuseSoftmax(), n.done(y), changes=1, kinds=kinds, rules={"shifted_softmax": 1})


@pytest.mark.parametrize("shape", [(3, 1), (2, 1, 1), (1,)])
def test_a_number_added_to_each_row_changes_nothing(shape: tuple[int, ...]) -> None:
    n = Net(np.float64)
    y = n.op("Softmax", n.op("Add", n.input(*shape, name="r"), n.input(2, 3, 4)), attrs=SoftmaxAttrs(2))
    check_pass(FuseSoftmax(), n.done(y), changes=1, kinds={"Softmax": 1})


@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 1, 4)])
def test_numbers_for_each_column_stay(shape: tuple[int, ...]) -> None:
    n = Net(np.float64)
    x = n.input(2, 3, 4)
    check_untouched(
        FuseSoftmax(), n.done(n.op("Softmax", n.op("Add", x, n.input(*shape, name="r")), attrs=SoftmaxAttrs(2)))
    )


@pytest.mark.parametrize("scale", ["Mul", ""])
def test_scores_subtracted_from_their_maximum_are_negated(scale: str) -> None:
    """Attention between channels, as DANet writes it."""
    n = Net(np.float64)
    x = n.input(2, 3, 4)
    y = n.op("Sub", n.op("ReduceMax", x, n.ints(2), attrs=ReduceAttrs()), x)
    y = n.op("Softmax", n.op(scale, y, 3.0) if scale else y, attrs=SoftmaxAttrs(2))
    kinds = {"Neg": 1, "Softmax": 1, **({scale: 1} if scale else {})}
    check_pass(FuseSoftmax(), n.done(y), changes=1, kinds=kinds, rules={"shifted_softmax": 1})


def test_other_shifts_stay() -> None:
    """Another reader of the scores, factors that are not a number."""
    n = Net(np.float64)
    scores = shifted(n, n.input(2, 3, 4), 2)
    check_untouched(FuseSoftmax(), n.done(n.op("Softmax", scores, attrs=SoftmaxAttrs(2)), scores))
    n = Net(np.float64)
    scores = n.op("Mul", shifted(n, n.input(2, 3, 4), 2), n.input(2, 3, 4, name="by"))
    check_untouched(FuseSoftmax(), n.done(n.op("Softmax", scores, attrs=SoftmaxAttrs(2))))


LOWEST = float(np.finfo(np.float32).min)


def floored(
    mask: Any, *, floor: float = LOWEST, split: bool = True, kind: str = "Softmax", swapped: bool = False
) -> Graph:
    """Scores of XGLM: the mask added, the sum kept above the lowest number, heads and batch one axis."""
    n = Net()
    x = n.op(
        "Add",
        n.input(2, 3, 4, 4),
        n.const(np.asarray(mask, np.float32)) if mask is not None else n.input(4, 4, name="m"),
    )
    x = n.op("Max", *((floor, x) if swapped else (x, floor)))
    if split:
        x = n.op("Reshape", x, n.ints(6, 4, 4))
    return n.done(n.op(kind, x, attrs=SoftmaxAttrs(-1)))


CAUSAL = np.where(np.tri(4) > 0, 0, LOWEST)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("swapped", [False, True])
def test_a_floor_of_masked_scores(split: bool, swapped: bool) -> None:
    graph = floored(CAUSAL, split=split, swapped=swapped)
    done, _ = check_pass(FuseSoftmax(), graph, changes=1, rules={"floored_softmax": 1})
    assert "Max" not in done.kinds()


def test_floors_that_matter() -> None:
    check_refused(FuseSoftmax(), floored(None), because="not a constant with a number for each")
    check_refused(FuseSoftmax(), floored(np.zeros((4, 1))), because="not a constant with a number for each")
    hidden = CAUSAL.copy()
    hidden[0] = LOWEST
    check_refused(FuseSoftmax(), floored(hidden), because="may hide a whole row")
    for graph in (floored(CAUSAL, floor=-1.0), floored(CAUSAL, kind="LogSoftmax")):
        check_untouched(FuseSoftmax(), graph)
