"""reduced_stack: reductions over the axis along which tensors were stacked become arithmetic of these tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated

from optdnn.dim import symbol
from optdnn.ir.evaluate import evaluate
from optdnn.ir.graph import Graph, Value
from optdnn.ops.index import ConcatAttrs
from optdnn.ops.reduce import ReduceAttrs
from optdnn.ops.softmax import SoftmaxAttrs
from optdnn.passes.base import PassContext, RulePass
from optdnn.passes.canonicalize_arithmetic import CanonicalizeArithmetic
from optdnn.passes.rules.stacks import reduced_stack


class Stacks(RulePass):
    name = "stacks"
    rules = (reduced_stack,)


STACKS = Stacks()
CUDA = PassContext(target="cuda:sm_90a")


def stacked(n: Net, *parts: Value, axis: int = 1) -> Value:
    wide = [n.op("Unsqueeze", part, n.ints(axis)) for part in parts]
    return n.op("Concat", *wide, attrs=ConcatAttrs(axis))


def inputs(n: Net, count: int, *shape: Any) -> list[Value]:
    return [n.input(*shape, name=f"x{i}") for i in range(count)]


@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize(
    ("kind", "left"),
    [
        ("ReduceSum", {"Add": 2}),
        ("ReduceMean", {"Add": 2, "Mul": 1}),
        ("ReduceMax", {"Max": 2}),
        ("ReduceMin", {"Min": 2}),
        ("ReduceProd", {"Mul": 2}),
    ],
)
def test_a_reduction_over_the_new_axis(kind: str, left: dict[str, int], keepdims: bool) -> None:
    n = Net(np.float64)
    y = n.op(kind, stacked(n, *inputs(n, 3, 2, 4, 5)), n.ints(1), attrs=ReduceAttrs(keepdims=keepdims))
    kinds = {"Unsqueeze": 3, "Reshape": 4 if keepdims else 3, **left}
    check_pass(STACKS, n.done(y), changes=1, kinds=kinds)


@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("negated", [False, True])
def test_logarithms_of_sums_of_exponentials(negated: bool, keepdims: bool) -> None:
    n = Net(np.float64)
    stack = stacked(n, *inputs(n, 3, 2, 4, 5))
    stack = n.op("Neg", stack) if negated else stack
    y = n.op("ReduceLogSumExp", stack, n.ints(1), attrs=ReduceAttrs(keepdims=keepdims))
    kinds = {"Unsqueeze": 3, "Reshape": 4 if keepdims else 3, "Max": 2, "IsInf": 1, "Where": 1}
    kinds |= {"Sub": 3, "Exp": 3, "Add": 3, "Log": 1, **({"Neg": 3} if negated else {})}
    check_pass(STACKS, n.done(y), changes=1, kinds=kinds, context=CUDA)


def test_a_negated_and_scaled_stack() -> None:
    n = Net(np.float64)
    stack = n.op("Mul", n.op("Neg", stacked(n, *inputs(n, 3, 2, 4))), n.const(2.0))
    y = n.op("ReduceLogSumExp", stack, n.ints(1), attrs=ReduceAttrs(keepdims=False))
    after, _ = check_pass(STACKS, n.done(y), changes=1, context=CUDA)
    assert after.kinds()["Neg"] == after.kinds()["Mul"] == 3
    assert {"Concat", "ReduceLogSumExp"}.isdisjoint(after.kinds())


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_infinite_terms_have_the_results_of_the_reduction(dtype: Any) -> None:
    inf, nan = np.inf, np.nan
    values = np.array([[-inf, -inf, inf, -inf, nan, 0, -6e4], [-inf, 3, 2, inf, 1, -inf, -6e4]], dtype)

    def graph() -> Graph:
        n = Net(dtype)
        y = stacked(n, *inputs(n, 2, 7), axis=0)
        return n.done(n.op("ReduceLogSumExp", y, n.ints(0), attrs=ReduceAttrs(keepdims=False)))

    want, changed = graph(), graph()
    assert STACKS(changed, CUDA).changes == 1
    feeds = {"x0": values[0], "x1": values[1]}
    (expected,), (found,) = (evaluate(g, feeds).values() for g in (want, changed))
    np.testing.assert_array_equal(found, expected)


def test_a_step_of_a_recursion_is_one_launch() -> None:
    n = Net()
    a, b, c, scores = (n.input(7, 11, name=k) for k in "abcs")
    y = n.op("ReduceLogSumExp", stacked(n, a, b, c, axis=0), n.ints(0), attrs=ReduceAttrs(keepdims=False))
    program = check_simulated(n.done(n.op("Add", y, scores)), "fp32")
    assert [s.params["op"]["kind"] for s in program.steps] == ["Pointwise"]


@pytest.mark.parametrize("batch", [2, symbol("N", 1)])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("shape", [(3, 4, 1), (1, 4, 5), (4, 5), (), (2, 2, 3, 4, 1)])
def test_weights_are_one_for_each_part_or_for_all(shape: tuple[int, ...], first: bool, batch: Any) -> None:
    n = Net(np.float64)
    stack, weights = stacked(n, *inputs(n, 3, batch, 4, 5)), n.input(*shape, name="w")
    product = n.op("Mul", *((weights, stack) if first else (stack, weights)))
    graph = n.done(n.op("ReduceSum", product, n.ints(-3), attrs=ReduceAttrs(keepdims=False)))
    done, _ = check_pass(STACKS, graph, changes=1, sizes={"N": 2} if batch != 2 else None)
    assert {"Concat", "ReduceSum"}.isdisjoint(done.kinds())
    assert done.kinds()["Add"] == 2


def selective(n: Net) -> Graph:
    """A selective kernel: two convolutions, weighted by a softmax of the mean of their sum."""
    x = n.input(1, 8, 6, 6)
    stack = stacked(n, n.conv(x, 16, 3, pads=(1,) * 4), n.conv(x, 16, 3, pads=(1,) * 4))
    total = n.op("ReduceSum", stack, n.ints(1), attrs=ReduceAttrs(keepdims=False))
    scores = n.op("Reshape", n.conv(n.op("GlobalAveragePool", total), 32), n.ints(1, 2, 16, 1, 1))
    weighted = n.op("Mul", stack, n.op("Softmax", scores, attrs=SoftmaxAttrs(1)))
    return n.done(n.conv(n.op("ReduceSum", weighted, n.ints(1), attrs=ReduceAttrs(keepdims=False)), 8))


def test_selective_kernels_are_not_copied() -> None:
    done, _ = check_pass(STACKS, selective(Net(np.float64)), changes=2)
    CanonicalizeArithmetic()(done)
    assert {"Concat", "ReduceSum", "Unsqueeze"}.isdisjoint(done.kinds())
    program = check_simulated(selective(Net()), "fp16")
    kinds = [s.params["op"]["kind"] for s in program.steps]
    assert "ReduceSum" not in kinds
    assert kinds.count("Copy") <= 2  # into and out of the layout of convolutions


def test_refused() -> None:
    n = Net(np.float64)
    y = n.op("ReduceSum", stacked(n, *inputs(n, 9, 2, 3)), n.ints(1), attrs=ReduceAttrs())
    check_refused(STACKS, n.done(y), because="9 tensors are stacked")
    n = Net(np.int64)
    y = n.op("ReduceMean", stacked(n, *inputs(n, 2, 2, 3)), n.ints(1), attrs=ReduceAttrs())
    check_refused(STACKS, n.done(y), because="mean of integers is rounded")
    n = Net(np.float64)
    y = n.op("ReduceLogSumExp", stacked(n, *inputs(n, 2, 2, 3)), n.ints(1), attrs=ReduceAttrs())
    check_refused(STACKS, n.done(y), because="only on GPUs")
    n = Net(np.int64)
    y = n.op("ReduceLogSumExp", stacked(n, *inputs(n, 2, 2, 3)), n.ints(1), attrs=ReduceAttrs())
    check_refused(STACKS, n.done(y), because="integers have no exponential")
    n = Net(np.float64)
    product = n.op("Mul", stacked(n, *inputs(n, 2, 2, 3)), n.input(symbol("n"), 3, name="w"))
    y = n.op("ReduceSum", product, n.ints(1), attrs=ReduceAttrs())
    check_refused(STACKS, n.done(y), because="neither one tensor nor one tensor for each")
    n = Net(np.float64)
    y = n.op("ReduceSum", stacked(n, *inputs(n, 2, 3, symbol("a"), symbol("b"))), n.ints(1), attrs=ReduceAttrs())
    check_refused(STACKS, n.done(y), because="no constant target can express a shape")


def test_others_are_no_candidates() -> None:
    n = Net(np.float64)
    check_untouched(STACKS, n.done(n.op("ReduceSum", stacked(n, *inputs(n, 2, 2, 3)), n.ints(2))))  # another axis
    n = Net(np.float64)
    longer = n.op("Concat", *inputs(n, 2, 2, 3), attrs=ConcatAttrs(1))
    check_untouched(STACKS, n.done(n.op("ReduceSum", longer, n.ints(1))))  # parts of several elements
    n = Net(np.float64)
    check_untouched(STACKS, n.done(n.op("ReduceSum", stacked(n, *inputs(n, 2, 2, 3)), n.ints(1, 2))))


def sums(
    kind: str = "ReduceSum", joined: str = "Add", *, axes: Sequence[int] = (1, 1), sizes: Sequence[int] = (6, 6),
    used: bool = False, rows: object = 4,
) -> Graph:  # fmt: skip
    n = Net(np.float64)
    terms = [n.op("Tanh", n.input(rows, size, name=f"x{k}")) for k, size in enumerate(sizes)]
    totals = [
        n.op(kind, t, n.ints(axis), attrs=ReduceAttrs(keepdims=True)) for t, axis in zip(terms, axes, strict=True)
    ]
    return n.done(n.op(joined, *totals), *([n.op("Exp", totals[0])] if used else []))


@pytest.mark.parametrize("kind", ["ReduceSum", "ReduceMean"])
@pytest.mark.parametrize("joined", ["Add", "Sub"])
def test_a_sum_of_sums_is_one_sum(kind: str, joined: str) -> None:
    done, _ = check_pass(CanonicalizeArithmetic(), sums(kind, joined), changes=1, rules={"sum_of_sums": 1})
    assert done.kinds() == {"Tanh": 2, joined: 1, kind: 1}


def test_many_sums_are_one_sum() -> None:
    n = Net(np.float64)
    totals = [
        n.op("ReduceSum", n.input(4, 6, name=f"x{k}"), n.ints(1), attrs=ReduceAttrs(keepdims=False)) for k in range(4)
    ]
    whole = n.op("Add", n.op("Add", totals[0], totals[1]), n.op("Add", totals[2], totals[3]))
    check_pass(CanonicalizeArithmetic(), n.done(whole), changes=3, kinds={"Add": 3, "ReduceSum": 1})


@pytest.mark.parametrize(
    "graph",
    [
        sums(axes=(1, 0), sizes=(4, 4)),
        sums(sizes=(6, 5)),
        sums(used=True),
        sums("ReduceMax"),
        sums(joined="Mul"),
        sums(rows=symbol("N")),
    ],
    ids=["other axes", "other sizes", "a sum is read elsewhere", "maxima", "a product", "an unknown size"],
)
def test_other_sums_of_reductions_stay(graph: Graph) -> None:
    check_untouched(CanonicalizeArithmetic(), graph)


def test_sums_over_large_tensors_stay() -> None:
    graph = sums(rows=1 << 18)
    report = CanonicalizeArithmetic()(graph)
    assert report.changes == 0
    assert ["written and read again" in miss.reason for miss in report.refused] == [True]
