"""canonicalize: chains of reshapes, computed shapes, expands, and axes that are put back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net

from optdnn.dim import DimLike, symbol
from optdnn.ir.graph import Value
from optdnn.ops.index import ConcatAttrs
from optdnn.ops.reduce import ReduceAttrs
from optdnn.ops.shape import AxisAttrs, ReshapeAttrs
from optdnn.passes.canonicalize import Canonicalize

CANON = Canonicalize()


# ---------------------------------------------------------------- reshapes

Dims = tuple[DimLike, ...]


N, M = symbol("n"), symbol("m")


CHAINS: dict[str, tuple[Dims, Callable[[Net, Value], Value], tuple[int, ...]]] = {
    "Reshape, Reshape": (
        (2, 12),
        lambda n, x: n.op("Reshape", n.op("Reshape", x, n.ints(4, 6)), n.ints(3, -1)),
        (3, 8),
    ),
    "Unsqueeze, Flatten": (
        (N, 3, 4),
        lambda n, x: n.op("Flatten", n.op("Unsqueeze", x, n.ints(1)), attrs=AxisAttrs(1)),
        (0, 12),
    ),
    "Squeeze, Unsqueeze elsewhere": (
        (N, 1, 4, M),
        lambda n, x: n.op("Unsqueeze", n.op("Squeeze", x, n.ints(1)), n.ints(3)),
        (0, 4, -1, 1),
    ),
}


@pytest.mark.parametrize("case", CHAINS.values(), ids=CHAINS.keys())
def test_reshape_chain(case: tuple[Dims, Callable[[Net, Value], Value], tuple[int, ...]]) -> None:
    dims, make, target = case
    n = Net()
    y = make(n, n.input(*dims))
    if target == (0, 4, -1, 1):  # m has moved from axis 3 to axis 2 only if 4 stays: [n, 4, m, 1]
        assert n.dims(y) == (N, 4, M, 1)
    graph, _ = check_pass(
        CANON, n.done(y), changes=1, kinds={"Reshape": 1}, rules={"reshape_chain": 1}, sizes={"n": 2, "m": 3}
    )
    (op,) = graph.of_kind("Reshape")
    assert tuple(graph.constant_value(op.inputs[1])) == target


def test_a_reshape_chain_that_comes_back_vanishes() -> None:
    n = Net()
    x = n.op("Exp", n.input(N, 3, 4))
    y = n.op("Squeeze", n.op("Unsqueeze", x, n.ints(0)), n.ints(0))
    check_pass(CANON, n.done(y), changes=2, kinds={"Exp": 1}, rules={"reshape_chain": 1, "no_op": 1}, sizes={"n": 2})


def test_reshapes_around_a_pointwise_operator_vanish() -> None:
    n = Net()
    y = n.op("Max", n.op("Reshape", n.op("Exp", n.input(2, 1, 12)), n.ints(2, 12, 1)), np.float32(0.5))
    graph = n.done(n.op("Reshape", y, n.ints(2, 1, 12)))
    check_pass(CANON, graph, changes=1, kinds={"Exp": 1, "Max": 1}, rules={"reshapes_around": 1})


def test_reshapes_around_several_pointwise_operators_vanish() -> None:
    """VibeVoice's RMS norm of transposed channels: the reciprocal root of the mean square moves back behind them."""
    n = Net()
    y = n.op("Add", n.op("Reshape", n.op("Exp", n.input(2, 1, 12)), n.ints(2, 12, 1)), np.float32(0.5))
    y = n.op("Reciprocal", n.op("Sqrt", y))
    graph = n.done(n.op("Reshape", y, n.ints(2, 1, 12)))
    kinds = {"Exp": 1, "Add": 1, "Sqrt": 1, "Reciprocal": 1}
    check_pass(CANON, graph, changes=1, kinds=kinds, rules={"reshapes_around": 1})


@pytest.mark.parametrize("other", ["users", "vector", "axes"])
def test_reshapes_around_several_operators_of_which_one_is_other_stay(other: str) -> None:
    """The first of two has another reader, or reads a vector or a number with more axes."""
    n = Net()
    x = n.op("Reshape", n.op("Exp", n.input(2, 1, 12)), n.ints(2, 12, 1))
    more = {"vector": np.ones((12, 1), np.float32), "axes": np.ones((1, 1, 1, 1), np.float32)}
    y = n.op("Max", x, more.get(other, np.float32(0.5)))
    outputs = [n.op("Reshape", n.op("Sqrt", y), n.ints(2, 1, 12)), *([n.op("Neg", y)] if other == "users" else [])]
    check_untouched(CANON, n.done(*outputs))


@pytest.mark.parametrize("other", [np.ones((12, 1), np.float32), np.ones((1, 1, 1, 1), np.float32), "users"])
def test_reshapes_around_other_operators_stay(other: Any) -> None:
    """A vector would move with the axes, a number with more axes adds axes, and other readers need the axes."""
    n = Net()
    x = n.op("Reshape", n.op("Exp", n.input(2, 1, 12)), n.ints(2, 12, 1))
    y = n.op("Max", x, np.float32(0.5) if isinstance(other, str) else other)
    more = [n.op("Neg", y)] if isinstance(other, str) else []
    check_untouched(CANON, n.done(n.op("Reshape", y, n.ints(2, 1, 12)), *more))


@pytest.mark.parametrize("kind", ["LayerNormalization", "Softmax"])
def test_reshapes_around_an_operator_on_rows_vanish(kind: str) -> None:
    """ONNX defines LayerNormalization on flat rows; TensorFlow computes softmax on them."""
    n = Net()
    flat = n.op("Reshape", n.op("Exp", n.input(2, 5, 8)), n.ints(10, 8))
    more = [n.random(8), n.random(8)] if kind == "LayerNormalization" else []
    graph = n.done(n.op("Reshape", n.op("Mul", n.op(kind, flat, *more), np.float32(0.5)), n.ints(2, 5, 8)))
    kinds = {"Exp": 1, kind: 1, "Mul": 1}
    check_pass(CANON, graph, changes=1, kinds=kinds, rules={"reshapes_around": 1})


@pytest.mark.parametrize("rows", [(2, 40), (20, 4)])
def test_reshapes_that_change_rows_stay(rows: tuple[int, ...]) -> None:
    n = Net()
    y = n.op("Softmax", n.op("Reshape", n.op("Exp", n.input(2, 5, 8)), n.ints(*rows)))
    check_untouched(CANON, n.done(n.op("Reshape", y, n.ints(2, 5, 8))))


def test_reshapes_between_products_of_flat_rows_stay_for_these() -> None:
    """GPT-2's activation, as torch.export writes it: the products take rows of three axes, and their Reshapes vanish together."""
    n = Net()
    weights = n.rng.standard_normal((2, 8, 8)).astype(np.float32)
    rows = n.op("Gemm", n.op("Exp", n.input(12, 8)), weights[0])
    active = n.op("Tanh", n.op("Reshape", rows, n.ints(3, 4, 8)))
    graph = n.done(n.op("Gemm", n.op("Reshape", active, n.ints(12, 8)), weights[1]))
    check_refused(CANON, graph, because="a product of flat rows is next to it", rule="reshapes_around")


def test_a_reshape_that_others_use_stays_for_them() -> None:
    n = Net()
    a = n.op("Reshape", n.input(2, 12), n.ints(4, 6))
    check_pass(CANON, n.done(n.op("Exp", a), n.op("Reshape", a, n.ints(24))), changes=1, kinds={"Exp": 1, "Reshape": 2})


def test_a_chain_that_moves_two_symbols_is_refused() -> None:
    n = Net()
    x = n.input(N, M, 1)
    y = n.op("Unsqueeze", n.op("Squeeze", x, n.ints(2)), n.ints(0))
    check_refused(CANON, n.done(y), because="more than one symbolic dimension", rule="reshape_chain")


def computed_target(n: Net, x: Value, *dims: int) -> Value:
    """Reshape to [size of axis 0, *dims], as PyTorch exports ``x.view(x.shape[0], …)``."""
    batch = n.op("Gather", n.op("Shape", x), n.ints(0))
    return n.op("Reshape", x, n.op("Concat", batch, n.ints(*dims), attrs=ConcatAttrs(0)))


def test_shape_arithmetic_over_a_symbolic_batch_disappears() -> None:
    n = Net()
    gone = ["Shape_1", "Gather_2", "Concat_3"]
    graph, _ = check_pass(
        CANON,
        n.done(computed_target(n, n.input(N, 3, 4), 12)),
        changes=1,
        kinds={"Reshape": 1},
        rules={"constant_target": 1},
        sizes={"n": 2},
    )
    (op,) = graph.of_kind("Reshape")
    assert tuple(graph.constant_value(op.inputs[1])) == (0, 12)
    assert op.src == {"Reshape_4", *gone}


def test_an_expand_to_a_symbolic_shape() -> None:
    n = Net()
    x, y = n.input(N, 1, 4), n.input(N, 3, 4, name="y")
    target = n.op("Concat", n.op("Gather", n.op("Shape", y), n.ints(0)), n.ints(3, 4), attrs=ConcatAttrs(0))
    graph, _ = check_pass(CANON, n.done(n.op("Expand", x, target)), changes=1, kinds={"Expand": 1}, sizes={"n": 2})
    assert tuple(graph.constant_value(graph.of_kind("Expand")[0].inputs[1])) == (1, 3, 4)


@pytest.mark.parametrize("batch", [2, N])
@pytest.mark.parametrize("kind", ["Mul", "Max", "Less"])
def test_an_expand_is_left_to_an_operator_that_broadcasts(kind: str, batch: DimLike) -> None:
    n = Net()
    x, gate = n.input(batch, 4, 5, 6), n.input(1, 4, 1, 1, name="gate")
    wide = n.op("Expand", gate, n.op("Shape", x) if batch == N else n.ints(2, 4, 5, 6))
    rules = {"redundant_expand": 1}
    check_pass(CANON, n.done(n.op(kind, wide, x)), changes=1, kinds={kind: 1}, rules=rules, sizes={"n": 2})


def test_the_first_of_two_expands_is_left_to_the_operator() -> None:
    n = Net()
    rows, columns = (n.op("Expand", n.input(*s), n.ints(2, 3, 4)) for s in ((2, 1, 4), (3, 1)))
    check_pass(CANON, n.done(n.op("Add", rows, columns)), changes=2, kinds={"Add": 1})
    n = Net()
    row = n.op("Expand", n.input(1, 4), n.ints(3, 4))
    check_refused(CANON, n.done(n.op("Less", row, 0.5)), because="no other operand has the sizes")


def test_an_operator_on_constants_runs_before_their_expand() -> None:
    n = Net()
    wide = n.op("Expand", n.const(np.arange(4.0).reshape(4, 1)), n.ints(2, 4, 5))
    rules = {"redundant_expand": 1}
    graph = n.done(n.op("Add", wide, 0.5))
    check_pass(CANON, graph, changes=1, kinds={"Add": 1, "Expand": 1}, rules=rules, depends_on_input=False)


@pytest.mark.parametrize("equal", [True, False])
def test_constants_with_equal_elements_are_computed_once(equal: bool) -> None:
    """A mask that hides nothing: ``Where(mask, 0, -inf)`` is one element, which an Expand repeats."""
    n = Net()
    mask = np.ones((1, 1, 6, 6), bool)
    mask[..., 2, 3] = equal
    y = n.op("Where", n.const(mask, bool), 0.0, -1e9)
    kinds = {"Where": 1, "Expand": 1} if equal else {"Where": 1}
    graph, _ = check_pass(CANON, n.done(y), changes=int(equal), kinds=kinds, depends_on_input=False)
    shape = (1, 1, 1, 1) if equal else (1, 1, 6, 6)
    assert graph.type(graph.of_kind("Where")[0].value).shape == shape


def test_expands_to_an_unknown_rank_stay() -> None:
    n = Net()
    wide = n.op("Expand", n.input(4), n.input(M, name="sizes", dtype=np.int64))
    check_refused(CANON, n.done(n.op("Mul", n.input(3, 4, name="x"), wide)), because="a rank is unknown")


def test_a_computed_target_stays_where_a_copied_size_may_be_0() -> None:
    """Pairs of steps: one step has none, and [1, -1, 0] would then have no meaning."""
    n = Net()
    x = n.input(N, 4, 2 * symbol("pairs", 0, 4))
    half = n.op("Slice", x, n.ints(0), n.ints(2**40), n.ints(2), n.ints(2))
    sizes = n.op("Shape", half)
    rows = n.op("Mul", n.op("Gather", sizes, n.ints(0)), n.ints(4))
    target = n.op("Concat", n.ints(1), rows, n.op("Gather", sizes, n.ints(2)), attrs=ConcatAttrs(0))
    graph = n.done(n.op("Reshape", half, target))
    check_refused(CANON, graph, because="no constant target", rule="constant_target")


def test_targets_that_a_constant_cannot_express_are_refused() -> None:
    n = Net()
    x = n.input(N, 3, M)
    dims = n.op("Shape", x)
    swapped = n.op("Gather", dims, n.ints(2, 0, 1))
    check_refused(CANON, n.done(n.op("Reshape", x, swapped)), because="no constant target", rule="constant_target")
    n = Net()
    grown = n.op("Expand", n.input(1, 4), n.op("Shape", n.input(N, 4, name="y")))
    check_refused(CANON, n.done(grown), because="no constant target")


@pytest.mark.parametrize("kind", ["Reshape", "Expand"])
def test_sizes_of_inner_values_are_read_from_the_inputs(kind: str) -> None:
    """Nothing reads the inner value's shape any more, so it may be fused."""
    n = Net()
    inner = n.op("Exp", n.input(N, M, 6))
    if kind == "Reshape":  # to (2 N, 3, M)
        length = n.op("Gather", n.op("Shape", inner), n.ints(1))
        y = n.op("Reshape", inner, n.op("Concat", n.ints(-1, 3), length, attrs=ConcatAttrs(0)))
    else:
        row = n.op("Expand", n.input(1, 6, name="row"), n.op("Shape", inner))
        y = n.op("Concat", inner, row, attrs=ConcatAttrs(0))
    rules = {"input_target": 1}
    graph, _ = check_pass(CANON, n.done(y), changes=1, rules=rules, sizes={"n": 2, "m": 4})
    assert {graph.op(op.inputs[0]).kind for op in graph.of_kind("Shape")} == {"Input"}


def test_sizes_of_inputs_that_may_be_0_are_sizes_and_stand_beside_no_rest() -> None:
    e = symbol("e", 0, 8)
    n = Net()
    inner = n.op("Exp", n.input(N, M, e))
    swapped = n.op("Gather", n.op("Shape", inner), n.ints(2, 0, 1))
    graph, _ = check_pass(
        CANON,
        n.done(n.op("Reshape", inner, swapped, attrs=ReshapeAttrs(allowzero=True))),
        changes=1,
        rules={"input_target": 1},
        sizes={"n": 2, "m": 4, "e": 3},
    )
    assert graph.of_kind("Reshape")[0].attrs.allowzero

    n = Net()
    inner = n.op("Exp", n.input(N, M, e))
    sizes = n.op("Shape", inner)
    rows = n.op("Mul", n.op("Gather", sizes, n.ints(0)), n.op("Gather", sizes, n.ints(1)))
    target = n.op("Concat", n.op("Gather", sizes, n.ints(2)), rows, attrs=ConcatAttrs(0))
    graph = n.done(n.op("Reshape", inner, target, attrs=ReshapeAttrs(allowzero=True)))
    check_refused(CANON, graph, because="no input of the network has the sizes", rule="input_target")


def test_sizes_that_no_input_has_are_refused() -> None:
    n = Net()
    x = n.input(N, M, 6)
    twice = n.op("Concat", x, x, attrs=ConcatAttrs(1))
    dims = n.op("Gather", n.op("Shape", twice), n.ints(1))
    y = n.op("Reshape", twice, n.op("Concat", n.ints(3, -1), dims, attrs=ConcatAttrs(0)))
    check_refused(CANON, n.done(y), because="no input of the network has the sizes", rule="input_target")


def test_targets_that_depend_on_data_are_refused() -> None:
    n = Net()
    y = n.op("Reshape", n.input(2, 12), n.input(2, name="shape", dtype=np.int64))
    check_refused(CANON, n.done(y), because="depends on data")


# ---------------------------------------------------------------- reductions


@pytest.mark.parametrize("kind", ["ReduceMax", "ReduceMean", "ReduceL2"])
@pytest.mark.parametrize("reshape", [True, False])
def test_a_reduction_keeps_the_axis_that_is_put_back(kind: str, reshape: bool) -> None:
    n = Net()
    y = n.op(kind, n.input(symbol("n"), 3, 4, 5), n.ints(-3), attrs=ReduceAttrs(keepdims=False))
    put_back = n.op("Reshape", y, n.ints(-1, 1, 4, 5)) if reshape else n.op("Unsqueeze", y, n.ints(1))
    check_pass(CANON, n.done(put_back), changes=1, kinds={kind: 1}, rules={"kept_axes": 1}, sizes={"n": 2})


def test_a_reduction_keeps_the_axis_that_is_put_back_after_arithmetic_with_scalars() -> None:
    n = Net()
    y = n.op("ReduceMean", n.input(symbol("n"), 3, 4), n.ints(-1), attrs=ReduceAttrs(keepdims=False))
    y = n.op("Sqrt", n.op("Sub", 1.5, n.op("Div", n.op("Mul", y, 4.0), 3.0)))
    after = n.done(n.op("Unsqueeze", y, n.ints(2)))
    kinds = {"ReduceMean": 1, "Mul": 1, "Div": 1, "Sub": 1, "Sqrt": 1}
    check_pass(CANON, after, changes=1, kinds=kinds, rules={"kept_axes": 1}, sizes={"n": 2})
    n = Net()
    y = n.op("ReduceMean", n.input(2, 3, 4), n.ints(-1), attrs=ReduceAttrs(keepdims=False))
    check_untouched(
        CANON, n.done(n.op("Unsqueeze", n.op("Mul", y, n.random(3)), n.ints(2)))
    )  # the vector has no place for the axis


def test_reductions_whose_axis_goes_elsewhere_stay() -> None:
    n = Net()
    y = n.op("ReduceMean", n.input(2, 3, 4, 5), n.ints(1), attrs=ReduceAttrs(keepdims=False))
    check_untouched(CANON, n.done(n.op("Unsqueeze", y, n.ints(3))))
    n = Net()
    y = n.op("ReduceMean", n.input(2, 3, 4, 5), attrs=ReduceAttrs(keepdims=False))
    check_untouched(CANON, n.done(n.op("Unsqueeze", y, n.ints(0))))


def test_a_reduction_that_others_read_drops_its_axes() -> None:
    n = Net()
    y = n.op("ReduceMean", n.input(2, 3, 4, 5), n.ints(1), attrs=ReduceAttrs(keepdims=False))
    check_refused(CANON, n.done(n.op("Unsqueeze", y, n.ints(1)), n.op("Exp", y)), because="is used 2 times")
