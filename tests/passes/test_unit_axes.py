"""Convolutions and pools over sequences that exporters write as images of one row."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated

from optdnn.dim import symbol
from optdnn.ir.graph import Value
from optdnn.ops.conv import ConvAttrs, ConvTransposeAttrs
from optdnn.ops.pool import AveragePoolAttrs, MaxPoolAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.canonicalize import Canonicalize

CANON = Canonicalize()
ONE_ROW = ConvAttrs((1, 1), (0, 2, 0, 2), (1, 2))
TO_FIRST, TO_LAST = TransposeAttrs((0, 3, 1, 2)), TransposeAttrs((0, 2, 3, 1))


def conv(n: Net, x: Value, filters: int = 4, rows: int = 1, attrs: ConvAttrs = ONE_ROW) -> Value:
    channels = n.dims(x)[1]
    assert isinstance(channels, int)
    return n.op("Conv", x, n.random(filters, channels, rows, 3, scale=0.3), n.random(filters), attrs=attrs)


def test_a_convolution_over_one_row_is_one_over_a_sequence() -> None:
    n = Net()
    x = n.op("Unsqueeze", n.input(2, 3, 9), n.ints(2))
    y = n.op("Squeeze", conv(n, x), n.ints(2))
    graph, _ = check_pass(CANON, n.done(y), changes=1, kinds={"Conv": 1}, rules={"unit_axis": 1})
    (op,) = graph.of_kind("Conv")
    assert op.attrs == ConvAttrs((1,), (2, 2), (2,))
    assert graph.type(op.inputs[1]).static_shape == (4, 3, 3)


def test_the_axis_may_be_the_last_one_and_the_batch_symbolic() -> None:
    n = Net()
    x = n.op("Unsqueeze", n.input(symbol("batch"), 3, 9), n.ints(3))
    y = n.op("Conv", x, n.random(4, 3, 3, 1), None, attrs=ConvAttrs((2, 1), (1, 0, 1, 0), (1, 1)))
    y = n.op("Squeeze", y, n.ints(-1))
    graph, _ = check_pass(CANON, n.done(y), changes=1, kinds={"Conv": 1}, rules={"unit_axis": 1}, sizes={"batch": 2})
    assert graph.of_kind("Conv")[0].attrs == ConvAttrs((2,), (1, 1), (1,))


def test_channels_last_sequences_keep_one_transpose_on_each_side() -> None:
    """TensorFlow's Conv1D: Unsqueeze, Transpose, Conv, Transpose, Squeeze."""
    n = Net()
    x = n.op("Transpose", n.op("Unsqueeze", n.input(2, 9, 3), n.ints(1)), attrs=TO_FIRST)
    y = n.op("Squeeze", n.op("Transpose", conv(n, x), attrs=TO_LAST), n.ints(1))
    graph, _ = check_pass(CANON, n.done(y), changes=1, kinds={"Conv": 1, "Transpose": 2}, rules={"unit_axis": 1})
    assert [op.attrs.perm for op in graph.of_kind("Transpose")] == [(0, 2, 1), (0, 2, 1)]


POOLS: dict[str, Callable[[Net, Value], Value]] = {
    "max": lambda n, x: n.op("MaxPool", x, attrs=MaxPoolAttrs((1, 3), (1, 2), (0, 1, 0, 1), (1, 1))),
    "average": lambda n, x: n.op("AveragePool", x, attrs=AveragePoolAttrs((1, 3), (1, 2), (0, 1, 0, 1), (1, 1))),
    "transposed": lambda n, x: n.op(
        "ConvTranspose", x, n.random(3, 4, 1, 3), attrs=ConvTransposeAttrs((1, 2), (0, 1, 0, 1), (1, 1), (0, 1))
    ),
}


@pytest.mark.parametrize("kind", POOLS)
def test_pools_and_transposed_convolutions_too(kind: str) -> None:
    n = Net()
    y = n.op("Squeeze", POOLS[kind](n, n.op("Unsqueeze", n.input(2, 3, 9), n.ints(2))), n.ints(2))
    graph, _ = check_pass(CANON, n.done(y), changes=1, rules={"unit_axis": 1})
    assert not graph.of_kind("Squeeze")
    assert not graph.of_kind("Unsqueeze")
    assert all(op.outputs[0].type.rank == 3 for op in graph.ops() if op.kind.endswith(("Pool", "Transpose")))


def test_readers_that_keep_the_axis_refuse() -> None:
    n = Net()
    y = conv(n, n.op("Unsqueeze", n.input(2, 3, 9), n.ints(2)))
    check_refused(
        CANON, n.done(n.op("Exp", y), n.op("Squeeze", y, n.ints(2))), because="not all readers remove the axis"
    )


def test_windows_with_padding_along_the_axis_refuse() -> None:
    n = Net()
    attrs = ConvAttrs((1, 1), (1, 1, 1, 1), (1, 1))
    y = conv(n, n.op("Unsqueeze", n.input(2, 3, 9), n.ints(2)), rows=3, attrs=attrs)
    check_refused(CANON, n.done(n.op("Squeeze", y, n.ints(2))), because="hold padding")


def test_computed_weights_refuse() -> None:
    n = Net()
    x = n.op("Unsqueeze", n.input(2, 3, 9), n.ints(2))
    y = n.op("Conv", x, n.input(4, 3, 1, 3, name="w"), None, attrs=ONE_ROW)
    check_refused(CANON, n.done(n.op("Squeeze", y, n.ints(2))), because="its weights are not constant")


def test_images_of_one_row_stay_images() -> None:
    """The views would stand between two images."""
    n = Net()
    y = conv(n, n.input(2, 3, 1, 9))
    check_untouched(CANON, n.done(n.op("Squeeze", y, n.ints(2))))


def test_a_residual_block_of_sequences_takes_no_launch_for_its_views() -> None:
    n = Net()

    def over_sequence(x: Value) -> Value:
        return n.op("Squeeze", conv(n, n.op("Unsqueeze", x, n.ints(2)), 32), n.ints(2))

    x = n.input(2, 32, 64)
    y = n.op("Add", over_sequence(n.op("Relu", over_sequence(x))), x)
    y = over_sequence(y)
    program = check_simulated(n.done(y))
    assert sum(step.executor == "cuda" for step in program.steps) <= 5  # conversions at both ends, three convolutions


@pytest.mark.parametrize("kind", ["MaxPool", "AveragePool"])
def test_a_pool_over_all_axes_of_an_image(kind: str) -> None:
    """JAX's reduce_window: batch and channels are axes of the windows, too."""
    n = Net()
    x = n.op("Unsqueeze", n.input(2, 9, 8, 4), n.ints(0, 1))
    window = ((1, 3, 3, 1), (1, 2, 2, 1), (0, 1, 0, 0, 0, 1, 1, 0), (1, 1, 1, 1))
    attrs = MaxPoolAttrs(*window) if kind == "MaxPool" else AveragePoolAttrs(*window)
    y = n.op("Squeeze", n.op(kind, x, attrs=attrs), n.ints(0, 1))
    graph, _ = check_pass(CANON, n.done(y), changes=1, rules={"unit_windows": 1})
    (op,) = graph.of_kind(kind)
    assert (op.attrs.kernel_shape, op.attrs.strides, op.attrs.pads) == ((3, 3), (2, 2), (1, 0, 1, 1))


def test_a_pool_of_empty_images() -> None:
    n = Net()
    attrs = MaxPoolAttrs((2, 1, 2, 1), (1, 1, 1, 1), (0,) * 8, (1,) * 4)
    y = n.op("MaxPool", n.input(0, 3, 3, 0, 4, 5), attrs=attrs)
    check_pass(CANON, n.done(y), changes=1, rules={"unit_windows": 1}, depends_on_input=False)


def test_pools_over_many_axes_with_large_windows_refuse() -> None:
    n = Net()
    window = ((2, 2, 2, 2), (1, 1, 1, 1), (0,) * 8, (1, 1, 1, 1))
    because = "hold several elements along 4 axes"
    check_refused(
        CANON, n.done(n.op("MaxPool", n.input(1, 2, 3, 3, 3, 3), attrs=MaxPoolAttrs(*window))), because=because
    )
    n = Net()
    x = n.input(symbol("b"), 2, 3, 3, 3, 3)
    y = n.op("MaxPool", x, attrs=MaxPoolAttrs((1, 2, 2, 1), *window[1:]))
    check_refused(CANON, n.done(y), because="the sizes of its axes are not known")
