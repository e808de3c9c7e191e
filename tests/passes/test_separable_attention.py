"""Separable attention: parts of channels are aligned to vectors, and weighted pixels are rows of a product."""

from __future__ import annotations

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated

from optdnn.ir.graph import Value
from optdnn.ops.index import SplitAttrs
from optdnn.ops.reduce import ReduceAttrs
from optdnn.ops.softmax import SoftmaxAttrs
from optdnn.passes.separable_attention import SeparableAttention


def split(n: Net, x: Value, *widths: int, bias: bool = True, group: int = 1) -> list[Value]:
    y = n.conv(x, sum(widths), 1, pads=0, bias=bias, group=group)
    found: list[Value] = n.op("Split", y, n.ints(*widths), attrs=SplitAttrs(1), outputs=len(widths))
    return found


@pytest.mark.parametrize("bias", [True, False])
def test_a_channel_of_scores_comes_last(bias: bool) -> None:
    n = Net(np.float64)
    query, key, value = split(n, n.input(2, 8, 4, 6), 1, 16, 24, bias=bias)
    graph = n.done(query, key, n.op("Relu", value))
    after, _ = check_pass(SeparableAttention(), graph, changes=1, kinds={"Conv": 1, "Relu": 1, "Split": 1})
    (op,) = after.of_kind("Split")
    assert [out.type.dims[1] for out in op.outputs] == [16, 24, 1]


def test_parts_without_sizes_get_sizes() -> None:
    n = Net(np.float64)
    y = n.conv(n.input(2, 8, 4, 6), 26, 1, pads=0)
    graph = n.done(*n.op("Split", y, attrs=SplitAttrs(1, num_outputs=3), outputs=3))
    after, _ = check_pass(SeparableAttention(), graph, changes=1)
    (op,) = after.of_kind("Split")
    assert [out.type.dims[1] for out in op.outputs] == [8, 9, 9]
    assert op.attrs.num_outputs is None  # with sizes, a number of parts would be no valid ONNX


@pytest.mark.parametrize("widths", [(16, 24, 1), (16, 8), (1, 3, 4), (8, 1, 3)])
def test_parts_that_no_order_helps_stay(widths: tuple[int, ...]) -> None:
    n = Net(np.float64)
    check_untouched(SeparableAttention(), n.done(*split(n, n.input(2, 8, 4, 6), *widths)))


def test_positions_and_other_tensors_stay() -> None:
    n = Net(np.float64)
    y = n.conv(n.input(2, 8, 4, 17), 16, 1, pads=0)
    check_untouched(SeparableAttention(), n.done(*n.op("Split", y, n.ints(1, 16), attrs=SplitAttrs(3), outputs=2)))
    n = Net(np.float64)
    y = n.op("Split", n.input(2, 17, 4, 6), n.ints(1, 16), attrs=SplitAttrs(1), outputs=2)
    check_untouched(SeparableAttention(), n.done(*y))


def test_channels_that_others_read_stay() -> None:
    n = Net(np.float64)
    y = n.conv(n.input(2, 8, 4, 6), 17, 1, pads=0)
    parts = n.op("Split", y, n.ints(1, 16), attrs=SplitAttrs(1), outputs=2)
    check_refused(SeparableAttention(), n.done(*parts, n.op("Relu", y)), because="has other readers, stages or groups")
    n = Net(np.float64)
    parts = split(n, n.input(2, 20, 4, 6), 4, 16, group=4)
    check_refused(SeparableAttention(), n.done(*parts), because="has other readers, stages or groups")
    n = Net(np.float64)
    y = n.conv(n.input(2, 8, 4, 6), 17, 1, pads=0)
    conv = n.graph.op(y)
    y = n.op("Conv", conv.inputs[0], n.input(17, 8, 1, 1, name="w"), attrs=conv.attrs)
    parts = n.op("Split", y, n.ints(1, 16), attrs=SplitAttrs(1), outputs=2)
    check_refused(SeparableAttention(), n.done(*parts), because="are not constant")


def test_separable_attention_on_a_gpu() -> None:
    n = Net(np.float16)
    query, key, value = split(n, n.conv(n.input(2, 8, 4, 32), 32, 1, pads=0), 1, 32, 32)
    weighted = n.op("Mul", key, n.op("Softmax", query, attrs=SoftmaxAttrs(-1)))
    y = n.op("Mul", n.op("Relu", value), n.op("ReduceSum", weighted, n.ints(-1), attrs=ReduceAttrs()))
    program = check_simulated(n.done(n.conv(y, 32, 1, pads=0)))
    tactics = [str(s.params["tactic"]).split()[0] for s in program.steps]
    assert tactics.count("reduce_staged") == 1


def pooled_context(n: Net, x: Value, *, axes: int = 4, weights: tuple[int, ...] = (2, 1, 24, 1)) -> Value:
    """Pixels of an image, weighted and added up, as GCNet writes it."""
    rows = n.op("Reshape", x, n.ints(*((2, 1, 16, 24) if axes == 4 else (2, 16, 24))))
    y = n.op("MatMul", rows, n.op("Softmax", n.input(*weights, name="w"), attrs=SoftmaxAttrs(-2)))
    return n.op("Reshape", y, n.ints(2, 16, 1, 1))  # type: ignore[no-any-return]


@pytest.mark.parametrize(("axes", "weights"), [(4, (2, 1, 24, 1)), (3, (2, 24, 1))])
def test_weighted_pixels_are_rows_of_a_product(axes: int, weights: tuple[int, ...]) -> None:
    n = Net(np.float64)
    image = n.op("Relu", n.conv(n.input(2, 8, 4, 6), 16, 1, pads=0))
    graph, _ = check_pass(
        SeparableAttention(),
        n.done(pooled_context(n, image, axes=axes, weights=weights)),
        changes=1,
        rules={"summed_pixels": 1},
    )
    (product,) = graph.of_kind("MatMul")
    assert graph.type(product.value).dims[-2:] == (1, 16)


def test_weighted_pixels_take_no_copies() -> None:
    n = Net()
    image = n.op("Relu", n.conv(n.input(2, 8, 4, 6), 16, 1, pads=0))
    shift = n.conv(pooled_context(n, image), 16, 1, pads=0)
    program = check_simulated(n.done(n.conv(n.op("Add", image, shift), 8, 1, pads=0)), "fp16")
    names = [s.params["op"]["kind"] for s in program.steps]
    assert "Copy" not in names[names.index("Softmax") : -2]


def test_other_sums_of_pixels_stay() -> None:
    n = Net(np.float64)
    graph = n.done(pooled_context(n, n.op("Reshape", n.input(2, 384), n.ints(2, 16, 4, 6))))
    check_refused(SeparableAttention(), graph, because="not computed by an operator on images", rule="summed_pixels")
    n = Net(np.float64)
    image = n.conv(n.input(2, 8, 4, 6), 16, 1, pads=0)
    check_untouched(
        SeparableAttention(), n.done(n.op("MatMul", n.op("Reshape", image, n.ints(2, 1, 16, 24)), n.random(24, 3)))
    )
