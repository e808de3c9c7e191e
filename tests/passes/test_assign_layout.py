"""assign_layout: operators in channels-last order, conversions and their reasons, and the choice is the cheapest one."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from support.check import check_pass
from support.net import Net
from support.quantized_nets import QNet, folded
from support.simulated import check_simulated

from optdnn.dim import symbol
from optdnn.ir.cut import minimum_cut
from optdnn.ir.graph import Graph, Value
from optdnn.ops.base import Stage
from optdnn.ops.conv import ConvAttrs
from optdnn.ops.detect import GridSampleAttrs
from optdnn.ops.gather import GatherAttrs
from optdnn.ops.index import ConcatAttrs, PadAttrs, SplitAttrs
from optdnn.ops.norm import GroupNormAttrs, LayerNormAttrs
from optdnn.ops.pool import MaxPoolAttrs
from optdnn.ops.reduce import ArgAttrs, ReduceAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.assign_layout import AssignLayout, _divides
from optdnn.passes.base import PassContext, PassReport
from optdnn.passes.support.facts import operand

CUDA = PassContext(target="cuda:sm_90a")
LAYOUT = AssignLayout()


def assign(graph: Graph, *, last: int, convert: int, view: int = 0) -> tuple[Graph, PassReport]:
    """Run the pass, and check the numbers of ops in channels-last order, of conversions, and of conversions that move nothing."""
    rules = {k: v for k, v in (("channels_last", last), ("convert", convert), ("view", view)) if v}
    after, report = check_pass(LAYOUT, graph, changes=last + convert + view, rules=rules, context=CUDA)
    assert after.kinds().get("Layout", 0) == convert + view
    consistent(after)
    return after, report


def consistent(graph: Graph) -> None:
    """A Conv reads and writes one order; tensors joined pointwise or in a Concat have one order; inputs, outputs are plain."""
    for op in graph.ops():
        read = {graph.type(v).layout for v in op.inputs if v is not None and graph.op(v).kind != "Constant"}
        written = {o.type.layout for o in op.outputs}
        if op.kind in ("Input", "Output", "Flatten", "Gemm", "MatMul", "LayerNormalization"):
            assert read | written <= {""}, op
        elif op.kind == "Reshape":
            assert bool(read - {""}) == bool(written - {""}), op
        elif op.kind not in ("Constant", "Layout", "Transpose", "ArgMax") and op.outputs[0].type.rank == 4:
            assert len(read | written) == 1, op


def reasons(report: PassReport) -> list[str]:
    return [r.reason for r in report.refused]


def flatten(n: Net, x: Value, width: int) -> Value:
    return n.gemm(n.op("Flatten", n.op("GlobalAveragePool", x)), width)


def residual(n: Net, x: Value, channels: int) -> Value:
    inner = n.op("Relu", n.conv(x, channels))
    stages = (Stage("Add", (-1, 3)), Stage("Relu", (-2,)))
    w = n.random(channels, channels, 3, 3, scale=0.1)
    return n.op("Conv", inner, w, None, x, attrs=ConvAttrs((1, 1), (1, 1, 1, 1), (1, 1), epilogue=stages))


def test_a_residual_network_is_converted_at_its_borders_alone() -> None:
    n = Net(np.float64)
    x = n.max_pool(n.conv(n.input(1, 3, 16, 16), 8))
    y = flatten(n, residual(n, residual(n, x, 8), 8), 10)
    # Input -> Conv, MaxPool, 2 x (Conv, Relu, Conv), GlobalAveragePool -> (1 x 1 positions: a view) -> Flatten, Gemm
    graph, report = assign(n.done(y), last=9, convert=1, view=1)
    assert [op.outputs[0].type.layout for op in graph.of_kind("Conv")] == ["nhwc"] * 5
    assert [op.outputs[0].type.layout for op in graph.of_kind("Flatten", "Gemm")] == ["", ""]
    assert reasons(report) == ["x is an input of the network, which has ONNX's order: 0.01 MB"]


def test_one_conversion_serves_all_branches() -> None:
    n = Net(np.float64)
    x = n.op("Flatten", n.input(1, 4, 8, 8))
    x = n.op("Reshape", x, n.ints(1, 4, 8, 8))
    y = n.op(
        "Concat", n.conv(x, 4, 1, pads=0), n.conv(x, 4), n.op("Relu", n.conv(x, 4, 5, pads=2)), attrs=ConcatAttrs(1)
    )
    _, report = assign(n.done(n.conv(y, 4)), last=6, convert=2)
    assert [r.split(":")[0] for r in reasons(report)] == [
        "Reshape has no channels-last form",
        "y0 is an output of the network, which has ONNX's order",
    ]


def test_operators_without_a_channels_last_form_force_conversions() -> None:
    n = Net(np.float64)
    x = n.conv(n.conv(n.input(1, 4, 8, 8), 8), 8)
    x = n.op("Reshape", x, n.ints(1, 16, 4, 8))  # mixes channels and positions: plain order only
    y = n.conv(n.conv(x, 8), 8)
    _, report = assign(n.done(y), last=4, convert=4)
    assert sum("Reshape has no channels-last form: 0.00 MB" in r for r in reasons(report)) == 2


def test_a_lone_convolution_stays_in_plain_order() -> None:
    n = Net(np.float64)
    _, report = check_pass(LAYOUT, n.done(n.conv(n.input(1, 4, 8, 8), 4)), changes=0, context=CUDA)
    assert reasons(report) == ["converting its operand and result would cost as much as channels-last order gains"]


def test_channels_last_code_of_convnext_moves_nothing() -> None:
    n = Net(np.float64)
    x = n.conv(n.input(1, 4, 8, 8), 8)
    inner = n.op("Transpose", n.conv(x, 8, group=8), attrs=TransposeAttrs((0, 2, 3, 1)))
    inner = n.op("LayerNormalization", inner, n.random(8), attrs=LayerNormAttrs())
    inner = n.op("Transpose", n.matmul(inner, 8), attrs=TransposeAttrs((0, 3, 1, 2)))
    y = n.op("Add", x, inner)
    graph, _ = assign(n.done(flatten(n, n.conv(y, 4), 3)), last=7, convert=1, view=1)
    to_last, from_last = graph.of_kind("Transpose")
    assert graph.type(to_last.inputs[0]).layout == "nhwc"  # type: ignore[arg-type]
    assert to_last.outputs[0].type.layout == ""
    assert graph.type(from_last.inputs[0]).layout == ""  # type: ignore[arg-type]
    assert from_last.outputs[0].type.layout == "nhwc"


def test_transposes_around_a_convolution_of_sequences_move_nothing() -> None:
    """With three axes, the same permutation moves channels last and back."""
    n = Net(np.float64)
    x = n.op("Transpose", n.op("Relu", n.input(1, 40, 8)), attrs=TransposeAttrs((0, 2, 1)))
    y = n.op("Transpose", n.conv(x, 8), attrs=TransposeAttrs((0, 2, 1)))
    graph, _ = assign(n.done(n.matmul(y, 4)), last=3, convert=0)
    first, second = graph.of_kind("Transpose")
    assert (graph.type(first.inputs[0]).layout, first.outputs[0].type.layout) == ("", "nwc")  # type: ignore[arg-type]
    assert (graph.type(second.inputs[0]).layout, second.outputs[0].type.layout) == ("nwc", "")  # type: ignore[arg-type]


def test_another_transpose_is_plain() -> None:
    n = Net(np.float64)
    x = n.op("Transpose", n.conv(n.conv(n.input(1, 4, 8, 8), 4), 4), attrs=TransposeAttrs((0, 1, 3, 2)))
    _, report = assign(n.done(x), last=2, convert=2)
    assert any("Transpose has no channels-last form" in r for r in reasons(report))


def test_a_group_norm_between_rows_is_channels_last() -> None:
    """Its kernels read channels last, and the Transpose that exchanges positions reads either order."""
    n = Net(np.float64)
    x = n.op("Transpose", n.op("Tanh", n.input(1, 6, 5, 8)), attrs=TransposeAttrs((0, 3, 1, 2)))
    y = n.op("Relu", n.op("GroupNormalization", x, n.random(8), n.random(8), attrs=GroupNormAttrs(1)))
    rows = n.op("Transpose", y, attrs=TransposeAttrs((0, 3, 2, 1)))
    graph, _ = assign(n.done(rows, n.conv(n.input(1, 4, 8, 8, name="image"), 4)), last=4, convert=0)
    assert {graph.type(operand(op)).layout for op in graph.of_kind("GroupNormalization")} == {"nhwc"}


def test_a_gate_of_one_position_is_a_view() -> None:
    n = Net(np.float64)
    x = n.conv(n.input(1, 4, 8, 8), 8)
    gate = n.op("Reshape", n.gemm(n.op("Flatten", n.op("GlobalAveragePool", x)), 8), n.ints(1, 8, 1, 1))
    y = flatten(n, n.conv(n.op("Mul", x, n.op("Sigmoid", gate)), 4), 3)
    assign(n.done(y), last=5, convert=1, view=3)


def test_a_reduction_that_keeps_its_axes_is_in_either_order() -> None:
    n = Net(np.float64)
    x = n.conv(n.conv(n.input(1, 4, 8, 8), 8), 8)
    x = n.op("ReduceMean", x, n.ints(2, 3), attrs=ReduceAttrs(keepdims=True))
    assign(n.done(n.op("Flatten", x)), last=3, convert=1, view=1)


@pytest.mark.parametrize("axes", [(2, 3), (3,)])
def test_a_reduction_that_drops_its_axes_reads_channels_last_and_writes_plain(axes: tuple[int, ...]) -> None:
    n = Net(np.float64)
    x = n.conv(n.conv(n.input(1, 4, 8, 8), 8), 8)
    x = n.op("ReduceMax", x, n.ints(*axes), attrs=ReduceAttrs(keepdims=False))
    after, _ = assign(n.done(x), last=3, convert=1)
    (op,) = (op for op in after.ops() if op.kind == "ReduceMax")
    assert (after.type(op.inputs[0]).layout, op.outputs[0].type.layout) == ("nhwc", "")


def test_a_reduction_of_positions_writes_the_order_that_is_read() -> None:
    n = Net(np.float64)
    x = n.conv(n.conv(n.input(1, 4, 8, 8), 8), 8)
    x = n.op("ReduceMax", x, n.ints(3), attrs=ReduceAttrs(keepdims=False))
    after, _ = assign(n.done(n.conv(x, 8)), last=4, convert=2)
    (op,) = (op for op in after.ops() if op.kind == "ReduceMax")
    assert (after.type(op.inputs[0]).layout, op.outputs[0].type.layout) == ("nhwc", "nwc")


def test_positions_are_divided_in_either_order() -> None:
    n = Net(np.float64)
    x = n.op("Reshape", n.conv(n.conv(n.input(1, 4, 20), 8), 8), n.ints(1, 8, 4, 5))
    assign(n.done(n.conv(n.op("Relu", x), 8)), last=5, convert=2)


def test_products_read_sequences_in_either_order() -> None:
    """Distances of points (DGCNN): the second factor is a view of the sequence, not converted."""
    n = Net()
    x = n.conv(n.conv(n.input(1, 8, 16), 8), 8)
    turned = n.op("Transpose", x, attrs=TransposeAttrs((0, 2, 1)))
    program = check_simulated(n.done(n.op("MatMul", turned, x)), "fp16", tolerance=0.02)
    (product,) = (s.params for s in program.steps if s.params["op"]["kind"] == "MatMul")
    first, second = product["reads"][:2]
    assert first[:2] == second[:2]  # the same place in memory
    assert first[3][1:] == second[3][:0:-1]  # one is the other one turned


@pytest.mark.parametrize("keepdims", [True, False])
def test_places_of_the_largest_channels_are_plain(keepdims: bool) -> None:
    n = Net(np.float64)
    x = n.conv(n.conv(n.input(1, 4, 8, 8), 8), 8)
    assign(n.done(n.op("ArgMax", x, attrs=ArgAttrs(1, keepdims))), last=3, convert=1)


def test_indices_of_a_pool_count_in_plain_order() -> None:
    n = Net(np.float64)
    x = n.conv(n.conv(n.input(1, 4, 8, 8), 8), 8)
    attrs = MaxPoolAttrs((2, 2), (2, 2), (0, 0, 0, 0), (1, 1), indices=True)
    pooled, indices = n.op("MaxPool", x, attrs=attrs, outputs=2)
    _, report = assign(n.done(pooled, indices), last=2, convert=2)
    assert any("MaxPool has no channels-last form" in r for r in reasons(report))


@pytest.mark.parametrize(("rank", "name"), [(3, "nwc"), (5, "ndhwc")])
def test_other_ranks(rank: int, name: str) -> None:
    n = Net(np.float64)
    x = n.conv(n.conv(n.input(1, 4, *(6,) * (rank - 2)), 8), 8)
    graph, _ = assign(n.done(x), last=2, convert=2)
    assert {op.outputs[0].type.layout for op in graph.of_kind("Conv")} == {name}


def test_four_spatial_axes_have_no_channels_last_form() -> None:
    n = Net(np.float64)
    x = n.conv(n.conv(n.input(1, 2, 3, 3, 3, 3), 2), 2)
    flat = n.op("Reshape", x, n.ints(1, 2, 9, 9))
    _, report = assign(n.done(n.conv(n.conv(flat, 2), 2)), last=2, convert=2)
    assert reasons(report)[:2] == ["its result has 6 axes, not 3 to 5"] * 2


def test_a_symbolic_batch() -> None:
    n = Net(np.float64)
    y = flatten(n, n.conv(n.conv(n.input(symbol("N"), 3, 8, 8), 8), 8), 4)
    assign(n.done(y), last=3, convert=1, view=1)


@pytest.mark.parametrize("target", ["cpu", "reference", ""])
def test_other_targets_keep_logical_order(target: str) -> None:
    n = Net(np.float64)
    graph = n.done(n.conv(n.conv(n.input(1, 4, 8, 8), 8), 8))
    _, report = check_pass(LAYOUT, graph, changes=0, context=PassContext(target=target))
    assert report.refused == []


def test_a_network_without_convolutions_is_left_alone() -> None:
    n = Net(np.float64)
    _, report = check_pass(LAYOUT, n.done(n.max_pool(n.input(1, 4, 8, 8))), changes=0, context=CUDA)
    assert report.refused == []


def test_minimum_cut_is_the_least_of_all() -> None:
    rng = np.random.default_rng(3)
    for _ in range(20):
        nodes = list("abcde")
        arcs: list[tuple[Any, Any, float]] = []
        for a, b in itertools.permutations(["s", *nodes, "t"], 2):
            if b != "s" and a != "t" and rng.random() < 0.4:
                arcs.append((a, b, float(rng.integers(1, 9)) if rng.random() < 0.9 or (a, b) == ("s", "t") else np.inf))
        costs = {}
        for chosen in itertools.product([False, True], repeat=len(nodes)):
            far = {"t", *itertools.compress(nodes, chosen)}
            costs[frozenset(far)] = sum(c for a, b, c in arcs if a not in far and b in far)
        best = min(costs.values())
        if np.isinf(best):
            continue
        value, far = minimum_cut(arcs, "s", "t")
        assert value == best
        assert costs[frozenset(far)] == best
        assert len(far) == min(len(f) for f, c in costs.items() if c == best)


def heads(n: Net, *readers: str) -> Graph:
    """Two transposed parts of tokens (N, L, 1, C), which these kinds read, and a convolution elsewhere."""
    tokens = n.op("MatMul", n.input(1, 256, 1, 32, name="t"), n.const(np.ones((32, 32), np.float32)))
    parts = n.op("Split", tokens, n.ints(16, 16), attrs=SplitAttrs(3), outputs=2)
    moved = [n.op("Transpose", part, attrs=TransposeAttrs((0, 2, 3, 1))) for part in parts]
    image = n.op("Relu", n.conv(n.op("Relu", n.conv(n.input(1, 16, 32, 32), 64)), 64))
    return n.done(*(n.op(kind, x) for kind, x in zip(readers, moved, strict=True)), flatten(n, image, 8))


def test_transposes_that_are_read_as_views_stay() -> None:
    assign(heads(Net(), "LpNormalization", "LpNormalization"), last=5, convert=1, view=1)


def test_other_transposes_are_saved() -> None:
    assign(heads(Net(), "Relu", "Relu"), last=8, convert=2, view=1)


@pytest.mark.parametrize(
    ("split", "perm", "either"),
    [
        ((2, 2, 4, 3, 2, 3, 2), (0, 1, 4, 6, 3, 5, 2), True),  # heads of 4 channels, last
        ((2, 8, 3, 2, 3, 2), (0, 2, 4, 3, 5, 1), True),  # all channels last
        ((2, 2, 4, 3, 2, 3, 2), (0, 1, 2, 4, 6, 3, 5), False),  # channels before the positions
        ((2, 2, 4, 3, 2, 3, 2), (0, 2, 4, 6, 3, 5, 1), False),  # the outer part of the channels last
    ],
)
def test_windows_whose_channels_are_moved_last_are_read_from_either_order(
    split: tuple[int, ...], perm: tuple[int, ...], either: bool
) -> None:
    n = Net()
    x = n.op("Pad", n.conv(n.input(2, 8, 3, 3), 8), n.ints(0, 0, 1, 1, 0, 0, 0, 0), attrs=PadAttrs("constant"))
    for axis in (2, 4):
        places = n.const(np.arange(3)[:, None] + np.arange(2), np.int64)
        x = n.op("Gather", x, places, attrs=GatherAttrs(axis))
    turned = n.op("Transpose", n.op("Reshape", x, n.ints(*split)), attrs=TransposeAttrs(perm))
    assign(n.done(turned), last=2 * either, convert=int(either))


@pytest.mark.parametrize(("batch", "given"), [(symbol("b"), -1), (0, 0)])
def test_windows_of_unknown_or_no_size_are_read_in_plain_order(batch: Any, given: int) -> None:
    n = Net()
    x = n.op("Relu", n.input(batch, 8, 3, 3))
    x = n.op("Gather", x, n.const(np.arange(2)[:, None] + np.arange(2), np.int64), attrs=GatherAttrs(2))
    x = n.op("Reshape", x, n.ints(given, 8, 4, 3))
    graph = n.done(n.op("Transpose", x, attrs=TransposeAttrs((0, 2, 3, 1))), n.conv(n.input(2, 8, 3, 3, name="z"), 8))
    assert LAYOUT(graph, CUDA).changes == 0


def sampled_tokens(batch: int) -> Graph:
    """Deformable attention over three levels: tokens of each become heads, which are sampled."""
    n = Net()
    y = n.conv(n.input(batch, 8, 6, 10), 32)
    tokens = n.op("Transpose", n.op("Reshape", y, n.ints(batch, 32, 60)), attrs=TransposeAttrs((0, 2, 1)))
    sizes = ((5, 6), (4, 5), (2, 5))
    levels = n.op("Split", n.matmul(tokens, 64), n.ints(30, 20, 10), attrs=SplitAttrs(1), outputs=3)
    places = n.input(4 * batch, 5, 7, 2, name="places")
    results = []
    for level, size in zip(levels, sizes, strict=True):
        values = n.op("Transpose", level, attrs=TransposeAttrs((0, 2, 1)))
        heads = n.op("Reshape", values, n.ints(4 * batch, 16, *size))
        results.append(n.op("GridSample", heads, places, attrs=GridSampleAttrs()))
    return n.done(*results)


def test_heads_that_are_sampled_are_views_of_tokens_at_batch_1() -> None:
    after, _ = assign(sampled_tokens(1), last=3, convert=1)
    assert not [op for op in after.ops() if op.kind == "Layout" and after.op(operand(op)).kind == "MatMul"]
    program = check_simulated(sampled_tokens(1), "fp16")
    tactics = [s.params["tactic"] for s in program.steps if s.params["op"]["kind"] == "GridSample"]
    assert tactics == ["sampled_channels"] * 3


def test_a_reshape_that_joins_samples_and_heads_needs_their_order() -> None:
    after, _ = assign(sampled_tokens(2), last=7, convert=2)
    assert [op for op in after.ops() if op.kind == "Layout" and after.op(operand(op)).kind == "MatMul"]


@pytest.mark.parametrize(
    ("before", "after", "divides"),
    [
        ((1, 64, 60), (4, 16, 6, 10), True),
        ((2, 64, 60), (8, 16, 6, 10), False),
        ((1, 64, 60), (4, 16, 60, 1), True),
        ((1, 64, 60), (64, 1, 60), True),
        ((1, 64, 60), (1, 3840), False),
        ((1, 6, 4), (1, 4, 6), False),
    ],
)
def test_reshapes_that_only_divide_axes(before: tuple[int, ...], after: tuple[int, ...], divides: bool) -> None:
    assert _divides(before, after) == divides


@pytest.mark.parametrize("flat", [False, True])
def test_operators_on_one_position_have_the_order_of_their_neighbors(flat: bool) -> None:
    """Both orders are the same in memory, but a view between a mean and its quantization would keep them apart."""
    n = QNet()
    mean = n.op("GlobalAveragePool", n.qconv(n.fake(n.input(2, 16, 8, 8), 0.03), 32))
    if flat:
        graph = n.done(n.qgemm(n.dq(n.op("Reshape", n.q(mean, 0.01), n.ints(2, 32)), 0.01), 16))
    else:
        graph = n.done(n.qconv(n.fake(mean, 0.01), 16, 1))
    graph, _ = folded(graph)
    LAYOUT(graph, CUDA)
    (store,) = (op for op in graph.of_kind("Pointwise") if graph.type(op.value).dims[2:] == (1, 1))
    assert graph.op(store.inputs[0]).kind == "GlobalAveragePool"  # type: ignore[arg-type]
    assert store.outputs[0].type.layout == "nhwc"
