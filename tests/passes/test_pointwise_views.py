"""fuse_pointwise: Reshapes between pointwise ops, and before reductions, move out of the way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated, kinds

from optdnn.ir.graph import Graph
from optdnn.ops.reduce import ReduceAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.base import PassContext, run_pipeline
from optdnn.passes.fuse_pointwise import FusePointwise
from optdnn.passes.support.open_stages import MAX_STAGES

UNARY = ("Sin", "Tanh", "Neg")
ON_GPU = PassContext(target="cuda:sm_90a")


def masked(shape: tuple[int, ...] = (2, 1, 1, 8), *, read: str = "", second: bool = False) -> Graph:
    """A mask of integers that is converted, gets axes, and selects.

    ``read``: the kind of a further reader of its view, or "mask": the mask is an output. ``second``: it is
    compared with a second mask."""
    n = Net()
    limit = n.input(2, 8, name="limit") if second else n.const(0.5)
    mask = n.op("Greater", n.input(2, 8, name="mask"), limit)
    view = n.op("Reshape", mask, n.ints(*shape))
    chosen = n.op("Where", view, n.input(*shape, name="scores"), n.const(-10.0))
    more = [n.op("Not", n.op("Transpose", view, attrs=TransposeAttrs((3, 1, 2, 0))))] if read == "Transpose" else []
    return n.done(chosen, *([mask] if read == "mask" else more))


def test_a_reshape_between_two_ops_moves_in_front_of_the_first() -> None:
    rules = {"view_before": 1, "pointwise": 1}
    graph, _ = check_pass(FusePointwise(), masked(), changes=2, rules=rules, context=ON_GPU)
    assert graph.kinds() == {"Pointwise": 1, "Reshape": 1}
    (view,) = graph.of_kind("Reshape")
    assert graph.op(view.inputs[0]).kind == "Input"  # type: ignore[arg-type]


def test_two_views_in_a_row_are_one() -> None:
    """The variance of a whole sample gets its axes back one by one (PointMLP: Ma et al., 2022)."""
    n = Net(np.float64)
    variance = n.op("Mul", n.input(2, name="variance"), n.const(1.5))
    view = n.op("Unsqueeze", n.op("Reshape", variance, n.ints(2, 1)), n.ints(2, 3))
    graph = n.done(n.op("Div", n.input(2, 3, 4, 5), n.op("Exp", view)))
    rules = {"reshape_chain": 1, "view_before": 1, "pointwise": 2}
    done, _ = check_pass(FusePointwise(), graph, changes=4, rules=rules, context=ON_GPU)
    assert done.kinds() == {"Pointwise": 1, "Reshape": 1}


@pytest.mark.parametrize("graph", [masked(read="Transpose"), masked(read="mask")], ids=["a view", "an output"])
def test_a_reshape_stays_if_others_read_the_values_around_it(graph: Graph) -> None:
    check_untouched(FusePointwise(), graph, context=ON_GPU)


def test_a_reshape_that_splits_axes_stays_after_an_op_of_two_tensors() -> None:
    graph = masked((2, 2, 4), second=True)
    check_refused(FusePointwise(), graph, because="reads more than one tensor", context=ON_GPU)


def test_a_reshape_to_fewer_axes_than_a_number_has_stays() -> None:
    n = Net()
    mask = n.op("Greater", n.input(3, 2, 4, name="mask"), n.const(np.full((1, 1, 1), 0.5, np.float32)))
    chosen = n.op("Where", n.op("Reshape", mask, n.ints(4, 6)), n.input(4, 6, name="scores"), n.const(-10.0))
    check_refused(FusePointwise(), n.done(chosen), because="has more axes than the result", context=ON_GPU)


def potentials(
    to: tuple[int, ...] = (2, 1, 6), *, shape: tuple[int, ...] = (2, 6), scores: tuple[int, ...] = (2, 5, 6),
    axis: int | None = None,
) -> Graph:  # fmt: skip
    """A step of Sinkhorn's algorithm in logarithms: constants (``shape``) less sums (2, 6), given an axis, and added to scores."""
    n = Net()
    less = n.op(
        "Sub", n.random(*shape), n.op("ReduceLogSumExp", n.input(2, 6, 4), n.ints(2), attrs=ReduceAttrs(keepdims=False))
    )
    view = n.op("Reshape", less, n.ints(*to)) if axis is None else n.op("Unsqueeze", less, n.ints(axis))
    y = n.op("Add", view, n.input(*scores, name="scores"))
    return n.done(n.op("ReduceLogSumExp", y, n.ints(2), attrs=ReduceAttrs(keepdims=False)))


def test_an_unsqueeze_moves_like_a_reshape() -> None:
    graph, _ = check_pass(FusePointwise(), potentials(axis=1), changes=2, context=ON_GPU)
    assert graph.kinds() == {"ReduceLogSumExp": 2, "Unsqueeze": 1, "Pointwise": 1}


@pytest.mark.parametrize(("shape", "of_constant"), [((2, 6), (2, 1, 6)), ((6,), (1, 1, 6)), ((2, 1), (2, 1, 1))])
def test_constants_get_the_axes_of_a_reshape_that_moves(shape: tuple[int, ...], of_constant: tuple[int, ...]) -> None:
    rules = {"view_before": 1, "pointwise": 1}
    graph, _ = check_pass(FusePointwise(), potentials(shape=shape), changes=2, rules=rules, context=ON_GPU)
    assert graph.kinds() == {"ReduceLogSumExp": 2, "Reshape": 1, "Pointwise": 1}
    (fused,) = graph.of_kind("Pointwise")
    found = [graph.constant_value(v) for v in fused.inputs]
    assert [x.shape for x in found if x is not None] == [of_constant]


def test_a_reshape_that_joins_axes_stays_after_an_op_of_constants() -> None:
    graph = potentials((12,), scores=(2, 5, 12))
    check_refused(FusePointwise(), graph, because="which reads constants, joins axes", context=ON_GPU)


def test_the_reduction_after_it_computes_both() -> None:
    program = check_simulated(potentials(), "fp16", target="cuda:sm_90a")
    assert kinds(program).count("Pointwise") == 2  # the casts of the network's input and output
    assert kinds(program).count("ReduceLogSumExp") == 2


def test_reshapes_stay_on_the_cpu() -> None:
    check_untouched(FusePointwise(), masked())


def weighted(to: tuple[int, ...] = (3, 4, 8), *, reader: str = "ReduceSum", second: bool = False) -> Graph:
    """The results of three tokens' four experts (12, 8), multiplied by a weight each, and added for each token. ``second``: the
    product is read elsewhere, too."""
    n = Net(np.float64)
    y = n.op("Mul", n.input(12, 8), n.input(12, 1, name="weights"))
    view = n.op("Reshape", y, n.ints(*to))
    more = [n.op("Transpose", y)] if second else []
    return n.done(n.op(reader, view, *([n.ints(1)] if "Reduce" in reader else [])), *more)


def test_a_reshape_between_an_op_and_a_reduction_moves_in_front_of_both() -> None:
    """Mixtures of experts. The launch of the sum then computes the product, too."""
    graph, _ = check_pass(
        FusePointwise(), weighted(), changes=1, rules={"view_before_reduction": 1}, context=ON_GPU,
        kinds={"Reshape": 2, "Pointwise": 1, "ReduceSum": 1},
    )  # fmt: skip
    (op,) = graph.of_kind("Pointwise")
    assert sorted(graph.type(v).dims for v in op.inputs if v is not None) == [(3, 4, 1), (3, 4, 8)]
    program = check_simulated(weighted(), "fp16")
    assert kinds(program).count("ReduceSum") == len([k for k in kinds(program) if k != "Copies"])


@pytest.mark.parametrize("axes", [1, 3])
def test_a_number_with_more_axes_than_the_reduction_s_operand(axes: int) -> None:
    n = Net(np.float64)
    y = n.op("Mul", n.input(1, 12, 8), n.const(np.full((1,) * axes, 0.5)))
    graph = n.done(n.op("ReduceSum", n.op("Reshape", y, n.ints(12, 8)), n.ints(1)))
    done, _ = check_pass(FusePointwise(), graph, changes=1, rules={"view_before_reduction": 1}, context=ON_GPU)
    assert done.kinds()["Reshape"] == (2 if axes == 3 else 1)


def test_an_only_number_gets_the_axes_of_the_reduction_s_operand() -> None:
    n = Net(np.float64)
    graph = n.done(n.op("ReduceMin", n.op("Reshape", n.op("Tanh", n.input(1)), n.ints(1, 1)), n.ints(0)))
    done, _ = check_pass(FusePointwise(), graph, changes=1, rules={"view_before_reduction": 1}, context=ON_GPU)
    assert [op.outputs[0].type.shape for op in done.of_kind("Pointwise")] == [(1, 1)]


@pytest.mark.parametrize("options", [{"reader": "Softmax"}, {"second": True}])
def test_a_reshape_before_other_readers_stays(options: dict[str, Any]) -> None:
    check_untouched(FusePointwise(), weighted(**options), context=ON_GPU)


def test_a_reshape_that_joins_axes_before_a_reduction_stays() -> None:
    graph = weighted((4, 24))
    check_refused(FusePointwise(), graph, because="joins axes", rule="view_before_reduction", context=ON_GPU)


def test_a_reshape_before_a_reduction_stays_on_the_cpu() -> None:
    check_untouched(FusePointwise(), weighted())


def chunks(
    after: tuple[int, ...] = (3, 8, 4), other: tuple[int, ...] = (3, 8, 4), *, reader: str = "", before: int = 0
) -> Graph:
    """Chunks (3, 2, 4, 4) of two tensors are multiplied, and become ``after``; another tensor is added.

    ``reader``: the kind of an op after them. ``before``: the number of further ops before them."""
    n = Net(np.float64)
    x = n.op("Mul", n.matmul(n.input(3, 2, 4, 4), 4), n.input(3, 2, 4, 1, name="decay"))
    for k in range(before):
        x = n.op(UNARY[k % 3], x)
    y = n.op("Add", n.op("Reshape", x, n.ints(*after)), n.input(*other, name="other"))
    return n.done(n.op(reader, y) if reader else y)


@pytest.mark.parametrize(
    ("other", "finer"),
    [
        ((3, 8, 4), (3, 2, 4, 4)),
        ((8, 1), (1, 2, 4, 1)),
        ((4,), (1, 1, 1, 4)),
        ((3, 1, 4), (3, 1, 1, 4)),
        ((1,), (1, 1, 1, 1)),
    ],
)
def test_a_reshape_that_merges_axes_moves_behind_the_second_op(other: tuple[int, ...], finer: tuple[int, ...]) -> None:
    graph, _ = check_pass(
        FusePointwise(), chunks(other=other), changes=2, rules={"view_after": 1, "pointwise": 1}, context=ON_GPU
    )
    (op,) = graph.of_kind("Pointwise")
    assert [s.kind for s in op.attrs.epilogue] == ["Mul", "Add"]
    assert graph.type(op.inputs[2]).shape == finer  # type: ignore[arg-type]


def test_axes_of_one_element_do_not_matter() -> None:
    graph = chunks((1, 3, 8, 1, 4), (1, 3, 8, 1, 4))
    check_pass(FusePointwise(), graph, changes=2, rules={"view_after": 1, "pointwise": 1}, context=ON_GPU)


@pytest.mark.parametrize(
    "graph",
    [chunks((6, 2, 8), (6, 2, 8)), chunks((3, 2, 2, 2, 4), (3, 2, 2, 2, 4)), chunks((3, 8, 4), (5, 3, 8, 4))],
    ids=["other groups", "an axis is split", "it is repeated"],
)
def test_other_reshapes_between_ops_stay(graph: Graph) -> None:
    found, _ = check_pass(FusePointwise(), graph, changes=0, context=ON_GPU)
    assert {"Mul", "Add"} <= found.kinds().keys()


def test_an_op_that_a_later_launch_computes_stays_with_it() -> None:
    check_refused(FusePointwise(), chunks(reader="Softmax"), because="the launch after Add", context=ON_GPU)


def test_ops_with_too_many_stages_stay_apart() -> None:
    graph = chunks(before=MAX_STAGES - 1)
    run_pipeline(graph, [FusePointwise()])  # on the CPU, where views stay
    check_refused(FusePointwise(), graph, because="too many stages", context=ON_GPU)
