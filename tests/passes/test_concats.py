"""Concats of all parts of a Split, and operators that move in front of a Concat of convolutions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated

from optdnn.dim import symbol
from optdnn.ir.graph import Graph, Value
from optdnn.ops.index import ConcatAttrs, SplitAttrs
from optdnn.ops.norm import EpsilonAttrs
from optdnn.passes.base import RulePass
from optdnn.passes.canonicalize import Canonicalize
from optdnn.passes.fuse_conv_bn import FuseConvBn
from optdnn.passes.rules.concats import activation_of_parts, bn_of_parts


class Parts(RulePass):
    name = "parts"
    rules = (bn_of_parts, activation_of_parts)


def mixed(n: Net, *, axis: int = 1) -> tuple[Value, tuple[Value, ...]]:
    """Two convolutions of different kernels side by side."""
    x = n.input(2, 6, 7, 5)
    parts = (n.conv(x, 4, 3), n.conv(x, 4 if axis != 1 else 8, 5, pads=2))
    return n.op("Concat", *parts, attrs=ConcatAttrs(axis)), parts


def normalized(n: Net, x: Value, channels: int, mean: Any = None) -> Value:
    mean = n.random(channels) if mean is None else mean
    own = (n.positive(channels), n.random(channels), mean, n.positive(channels))
    return n.op("BatchNormalization", x, *own, attrs=EpsilonAttrs(1e-3))


def test_a_normalization_and_an_activation_of_all_parts_become_the_convolutions_own() -> None:
    n = Net(np.float64)
    graph = n.done(n.op("Relu", normalized(n, mixed(n)[0], 12)))
    rules = {"bn_of_parts": 1, "conv_bn": 2, "activation_of_parts": 1}
    check_pass(FuseConvBn(), graph, changes=4, rules=rules, kinds={"Conv": 2, "Relu": 2, "Concat": 1})


@pytest.mark.parametrize(("kind", "numbers"), [("Swish", ()), ("Clip", (0.0, 6.0))])
def test_activations_with_numbers(kind: str, numbers: tuple[float, ...]) -> None:
    n = Net(np.float64)
    graph = n.done(n.op(kind, mixed(n)[0], *numbers))
    check_pass(Parts(), graph, changes=1, kinds={"Conv": 2, kind: 2, "Concat": 1})


def network(n: Net) -> Graph:
    return n.done(n.conv(n.op("Relu", normalized(n, mixed(n)[0], 12)), 8))


def test_on_a_gpu_the_convolutions_compute_it() -> None:
    program = check_simulated(network(Net()), "fp16")
    assert "Pointwise" not in [s.params["op"]["kind"] for s in program.steps][1:-1]


def test_refused() -> None:
    n = Net(np.float64)
    joined, parts = mixed(n)
    check_refused(Parts(), n.done(n.op("Relu", joined), n.op("Exp", parts[0])), because="or are read elsewhere")
    n = Net(np.float64)
    wide = n.op("Concat", n.conv(n.input(2, 6, 7, 5), 4), n.input(2, 3, 7, 5, name="y"), attrs=ConcatAttrs(1))
    check_refused(Parts(), n.done(n.op("Relu", wide)), because="operands that are not results of convolutions")
    n = Net(np.float64)
    slopes = n.op("PRelu", mixed(n)[0], n.random(12, 1, 1))
    check_refused(Parts(), n.done(slopes), because="more than scalars")
    n = Net(np.float64)
    y = normalized(n, mixed(n)[0], 12, n.input(12, name="mean"))
    check_refused(Parts(), n.done(y), because="statistics or the widths of the parts are not constant")


def test_others_are_no_candidates() -> None:
    n = Net(np.float64)
    check_untouched(Parts(), n.done(n.op("Relu", mixed(n, axis=2)[0])))  # rows of one image after another
    n = Net(np.float64)
    joined, _ = mixed(n)
    check_untouched(Parts(), n.done(n.op("Relu", joined), n.op("Exp", joined)))  # read as it is, too
    n = Net(np.float64)
    inputs = (n.input(2, 3, 4, name=name) for name in "xy")
    check_untouched(Parts(), n.done(n.op("Relu", n.op("Concat", *inputs, attrs=ConcatAttrs(1)))))


def split_and_joined(n: Net, order: tuple[int, ...] = (0, 1), axis: int = 1) -> Graph:
    """A stage as in YOLOv8: a Concat of both halves of a convolution and of a convolution of the second half."""
    halves = n.op("Split", n.conv(n.input(2, 6, 8, 4), 16), n.ints(8, 8), outputs=2, attrs=SplitAttrs(1))
    more = n.conv(halves[1], 8, 3, pads=1)
    return n.done(n.conv(n.op("Concat", *(halves[k] for k in order), more, attrs=ConcatAttrs(axis)), 8))


def test_all_parts_of_a_split_are_the_whole() -> None:
    graph = split_and_joined(Net(np.float64))
    done, _ = check_pass(Canonicalize(), graph, changes=1, rules={"concat_of_split": 1})
    assert len(done.of_kind("Concat")[0].inputs) == 2


def split_and_stacked(axis: int = 1, *, cut: int = 1, order: tuple[int, ...] = (0, 1, 2)) -> Graph:
    """Equal parts of (2, 12, 4), or of (2, 4, 12) along axis 2, that a stack joins along a new axis."""
    n = Net(np.float64)
    x = n.op("Exp", n.input(*((2, 12, 4) if cut == 1 else (2, 4, 12))))
    parts = n.op("Split", x, n.ints(4, 4, 4), outputs=3, attrs=SplitAttrs(cut))
    taken = [n.op("Unsqueeze", parts[k], n.ints(axis)) for k in order]
    return n.done(n.op("Sin", n.op("Concat", *taken, attrs=ConcatAttrs(axis))))


@pytest.mark.parametrize("graph", [split_and_stacked(), split_and_stacked(2, cut=2)])
def test_a_stack_of_all_parts_is_a_view(graph: Graph) -> None:
    """The results of a mixture's experts, or its gates."""
    done, _ = check_pass(Canonicalize(), graph, changes=1, rules={"stack_of_split": 1})
    assert done.kinds() == {"Exp": 1, "Reshape": 1, "Sin": 1}


def test_a_stack_of_columns_without_views() -> None:
    n = Net(np.float64)
    gates = n.op("Split", n.op("Exp", n.input(3, 1, 2)), n.ints(1, 1), outputs=2, attrs=SplitAttrs(2))
    graph = n.done(n.op("Sin", n.op("Concat", *gates, attrs=ConcatAttrs(1))))
    check_pass(Canonicalize(), graph, changes=1, kinds={"Exp": 1, "Reshape": 1, "Sin": 1})


@pytest.mark.parametrize(
    "graph",
    [
        split_and_stacked(2),
        split_and_stacked(order=(1, 0, 2)),
        split_and_stacked(order=(0, 1)),
        split_and_stacked(order=(0, 1, 2, 0)),
    ],
)
def test_stacks_of_other_parts_stay(graph: Graph) -> None:
    report = Canonicalize()(graph)
    assert "stack_of_split" not in {f.rule for f in report.fired}


def sliced_and_joined(n: Net, bounds: tuple[tuple[int, int], ...] = ((0, 8), (8, 16)), axis: int = 1) -> Graph:
    """The same with Slices, as exporters write `chunk`."""
    x = n.conv(n.input(2, 6, 8, 16), 16)
    halves = [n.op("Slice", x, n.ints(begin), n.ints(end), n.ints(axis)) for begin, end in bounds]
    more = n.conv(x, 8, 3, pads=1) if axis == 1 else n.conv(x, 16, 3, pads=1)
    return n.done(n.conv(n.op("Concat", *halves, more, attrs=ConcatAttrs(axis)), 8))


@pytest.mark.parametrize("bounds", [((0, 8), (8, 16)), ((0, 4), (4, 12), (12, 16)), ((0, 8), (8, 16), (0, 8))])
def test_all_slices_are_the_whole(bounds: tuple[tuple[int, int], ...]) -> None:
    graph = sliced_and_joined(Net(np.float64), bounds)
    done, _ = check_pass(Canonicalize(), graph, changes=1, rules={"concat_of_split": 1})
    left = len(bounds) - [end for _, end in bounds].index(16)
    assert len(done.of_kind("Concat")[0].inputs) == 1 + left
    assert done.op(done.of_kind("Concat")[0].inputs[0]).kind == "Conv"  # type: ignore[arg-type]


@pytest.mark.parametrize("axis", [2, 3])
def test_all_slices_along_another_axis(axis: int) -> None:
    bounds = ((0, 3), (3, 8 * (axis - 1)))
    check_pass(
        Canonicalize(), sliced_and_joined(Net(np.float64), bounds, axis), changes=1, rules={"concat_of_split": 1}
    )


@pytest.mark.parametrize(
    "bounds", [((8, 16), (0, 8)), ((0, 8),), ((0, 7), (8, 16)), ((0, 8), (7, 16)), ((1, 8), (8, 16))]
)
def test_slices_with_gaps_or_in_another_order_stay(bounds: tuple[tuple[int, int], ...]) -> None:
    check_untouched(Canonicalize(), sliced_and_joined(Net(np.float64), bounds))


@pytest.mark.parametrize("graph", [split_and_joined, sliced_and_joined])
def test_the_whole_is_written_in_place(graph: Callable[[Net], Graph]) -> None:
    program = check_simulated(graph(Net()), "fp16")
    kinds = [s.params["op"]["kind"] for s in program.steps if "op" in s.params]
    assert kinds.count("Concat") == 0


@pytest.mark.parametrize("order", [(1, 0), (0,), (1,), (0, 0, 1)[:2]])
def test_some_parts_or_another_order_stay(order: tuple[int, ...]) -> None:
    check_untouched(Canonicalize(), split_and_joined(Net(np.float64), order))


def test_parts_joined_along_another_axis_stay() -> None:
    check_untouched(Canonicalize(), split_and_joined(Net(np.float64), axis=2))


@pytest.mark.parametrize(("widths", "left"), [((3, 0), 0), ((0, 3, 5), 2), ((0, 3, 0), 0)])
def test_parts_of_no_elements_are_left_out(widths: tuple[int, ...], left: int) -> None:
    n = Net(np.float64)
    parts = [n.op("Relu", n.input(2, width, 6, name=f"x{k}")) for k, width in enumerate(widths)]
    graph = n.done(n.op("Exp", n.op("Concat", *parts, attrs=ConcatAttrs(-2))))
    done, _ = check_pass(Canonicalize(), graph, changes=1, rules={"empty_parts": 1})
    assert [len(op.inputs) for op in done.of_kind("Concat")] == ([left] if left else [])


def test_a_concat_of_no_elements_stays() -> None:
    n = Net(np.float64)
    parts = [n.op("Relu", n.input(2, 0, 6, name=f"x{k}")) for k in range(2)]
    check_untouched(Canonicalize(), n.done(n.op("Concat", *parts, attrs=ConcatAttrs(1))))


def joined_and_cut(begin: int, end: int, step: int = 1, axis: int = 1, *, read: bool = False) -> Graph:
    n = Net(np.float64)
    parts = [n.op("Relu", n.input(2, width, 6, name=f"x{width}")) for width in (3, 5)]
    joined = n.op("Concat", *parts, attrs=ConcatAttrs(1))
    numbers = (np.array([v]) for v in (begin, end, axis, step))
    return n.done(n.op("Slice", joined, *numbers), *([n.op("Exp", joined)] if read else []))


@pytest.mark.parametrize(("begin", "end"), [(0, 3), (3, 8), (3, 1 << 40), (-5, 8)])
def test_a_slice_that_takes_one_part_is_this_part(begin: int, end: int) -> None:
    done, _ = check_pass(Canonicalize(), joined_and_cut(begin, end), changes=1, rules={"part_of_concat": 1})
    assert "Slice" not in done.kinds()


@pytest.mark.parametrize(
    ("begin", "end", "left"), [(0, 8, (3, 5)), (3, 14, (5, 6)), (3, 12, None), (1, 8, None), (8, 3, None)]
)
def test_a_slice_that_takes_several_parts_joins_these(begin: int, end: int, left: tuple[int, ...] | None) -> None:
    """Bark's fine model adds the embeddings of the first codebooks of a stack of all of them."""
    n = Net(np.float64)
    parts = [n.op("Relu", n.input(2, width, 6, name=f"x{width}")) for width in (3, 5, 6)]
    joined = n.op("Concat", *parts, attrs=ConcatAttrs(1))
    graph = n.done(n.op("Exp", n.op("Slice", joined, n.ints(begin), n.ints(end), n.ints(1))))
    if left is None:
        check_untouched(Canonicalize(), graph)
        return
    done, _ = check_pass(Canonicalize(), graph, changes=1, rules={"part_of_concat": 1})
    (op,) = done.of_kind("Concat")
    assert tuple(done.type(v).dims[1] for v in op.inputs if v is not None) == left


def heads(*cuts: tuple[int, int]) -> Graph:
    """Heads that are joined, and that several slices take apart."""
    n = Net(np.float64)
    parts = [n.op("Relu", n.input(2, width, 6, name=f"x{width}")) for width in (3, 5, 6)]
    joined = n.op("Concat", *parts, attrs=ConcatAttrs(1))
    return n.done(*(n.op("Exp", n.op("Slice", joined, n.ints(a), n.ints(b), n.ints(1))) for a, b in cuts))


@pytest.mark.parametrize("cuts", [((0, 3), (3, 8), (8, 14)), ((8, 14), (-14, -11)), ((3, 8), (3, 8))])
def test_slices_that_take_the_parts_of_one_concatenation(cuts: tuple[tuple[int, int], ...]) -> None:
    """CenterNet joins its heads, and its decoder takes them apart."""
    done, _ = check_pass(Canonicalize(), heads(*cuts), changes=len(cuts), rules={"part_of_concat": len(cuts)})
    assert not {"Slice", "Concat"} & done.kinds().keys()


@pytest.mark.parametrize("cuts", [((0, 3), (3, 9)), ((0, 3), (0, 8)), ((0, 8), (3, 14))])
def test_a_concatenation_stays_for_another_slice(cuts: tuple[tuple[int, int], ...]) -> None:
    check_untouched(Canonicalize(), heads(*cuts))


@pytest.mark.parametrize("cut", [(0, 4), (1, 3), (2, 8), (3, 8, 2), (0, 3, 1, 2)])
def test_other_slices_of_a_concatenation_stay(cut: tuple[int, ...]) -> None:
    check_untouched(Canonicalize(), joined_and_cut(*cut))


def test_a_concatenation_that_is_read_elsewhere_stays() -> None:
    check_untouched(Canonicalize(), joined_and_cut(0, 3, read=True))


def joined_and_split(sizes: tuple[int, ...], axis: int = 1, *, read: bool = False) -> Graph:
    n = Net(np.float64)
    parts = [n.op("Relu", n.input(2, width, 8, name=f"x{width}")) for width in (3, 5)]
    joined = n.op("Concat", *parts, attrs=ConcatAttrs(-2))
    halves = n.op("Split", joined, n.ints(*sizes), outputs=len(sizes), attrs=SplitAttrs(axis))
    return n.done(*(n.op("Tanh", v) for v in halves[::-1]), *([n.op("Exp", joined)] if read else []))


def test_a_split_into_the_parts_is_these_parts() -> None:
    done, _ = check_pass(Canonicalize(), joined_and_split((3, 5)), changes=1, rules={"split_of_concat": 1})
    assert not {"Split", "Concat"} & done.kinds().keys()


@pytest.mark.parametrize(
    ("sizes", "axis", "read"),
    [((5, 3), 1, False), ((4, 4), 1, False), ((3, 5), 2, False), ((3, 2, 3), 1, False), ((3, 5), 1, True)],
)
def test_other_splits_of_a_concatenation_stay(sizes: tuple[int, ...], axis: int, read: bool) -> None:
    check_untouched(Canonicalize(), joined_and_split(sizes, axis, read=read))


@pytest.mark.parametrize("axis", [1, -2])
def test_a_stack_that_is_merged_with_the_next_axis_is_a_concatenation(axis: int) -> None:
    """The halves that a rotary embedding of KerasHub exchanges."""
    n = Net()
    parts = [n.op("Unsqueeze", n.input(2, 3, 4, name=name), n.ints(axis)) for name in "ab"]
    stack = n.op("Concat", *parts, attrs=ConcatAttrs(axis))
    shape = (2, 6, 4) if axis == 1 else (2, 3, 8)
    done, _ = check_pass(
        Canonicalize(), n.done(n.op("Reshape", stack, n.ints(*shape))), changes=5, kinds={"Concat": 1},
        rules={"merged_stack": 1, "reshape_chain": 2, "no_op": 2},
    )  # fmt: skip
    assert done.type(done.of_kind("Concat")[0].value).shape == shape


def test_other_stacks_stay() -> None:
    """Neighbors are interleaved along the last axis, the axis before the new one is merged, or the stack has another reader."""
    n = Net()
    parts = [n.op("Unsqueeze", n.input(2, 3, 4, name=name), n.ints(-1)) for name in "ab"]
    check_untouched(
        Canonicalize(), n.done(n.op("Reshape", n.op("Concat", *parts, attrs=ConcatAttrs(3)), n.ints(2, 3, 8)))
    )
    n = Net()
    parts = [n.op("Unsqueeze", n.input(2, 3, 4, name=name), n.ints(1)) for name in "ab"]
    stack = n.op("Concat", *parts, attrs=ConcatAttrs(1))
    check_untouched(Canonicalize(), n.done(n.op("Reshape", stack, n.ints(4, 3, 4))))
    n = Net()
    parts = [n.op("Unsqueeze", n.input(2, 3, 4, name=name), n.ints(1)) for name in "ab"]
    stack = n.op("Concat", *parts, attrs=ConcatAttrs(1))
    check_untouched(Canonicalize(), n.done(n.op("Reshape", stack, n.ints(2, 6, 4)), n.op("Exp", stack)))


def turned(
    axis: int, onto: int, sizes: tuple[int, ...] = (2, 2, 2), *, order: tuple[int, ...] = (), readers: int = 1
) -> Graph:
    """Parts of a (4, 6, 6) tensor along ``axis`` that are joined along ``onto``."""
    n = Net(np.float64)
    x = n.op("Exp", n.input(4, 6, 6))
    parts = n.op("Split", x, n.ints(*sizes), outputs=len(sizes), attrs=SplitAttrs(axis))
    joined = n.op("Concat", *(parts[k] for k in order or range(len(sizes))), attrs=ConcatAttrs(onto))
    return n.done(n.op("Neg", joined), *(n.op("Abs", parts[0]) for _ in range(readers - 1)))


@pytest.mark.parametrize(("axis", "onto"), [(2, 0), (0, 2), (1, 2), (-1, 1)])
def test_equal_parts_joined_along_another_axis_are_a_view(axis: int, onto: int) -> None:
    kinds = {"Exp": 1, "Neg": 1, "Reshape": 2, "Transpose": 1}
    sizes = (2, 2) if axis == 0 else (2, 2, 2)
    check_pass(Canonicalize(), turned(axis, onto, sizes), changes=1, rules={"turned_parts": 1}, kinds=kinds)


@pytest.mark.parametrize(
    "graph",
    [turned(2, 0, order=(1, 0, 2)), turned(2, 0, order=(0, 1)), turned(2, 0, readers=2)],
    ids=["another order", "some of them", "read alone"],
)
def test_other_parts_joined_along_another_axis_stay(graph: Graph) -> None:
    check_untouched(Canonicalize(), graph)


def test_parts_of_a_tensor_of_unknown_size_stay() -> None:
    """A network that was traced with one batch size: only the sizes of the parts are known."""
    n = Net(np.float64)
    parts = n.op("Split", n.op("Exp", n.input(4 * symbol("b"), 6, 6)), n.ints(2, 2), outputs=2, attrs=SplitAttrs(0))
    check_untouched(Canonicalize(), n.done(n.op("Neg", n.op("Concat", *parts, attrs=ConcatAttrs(2)))))
