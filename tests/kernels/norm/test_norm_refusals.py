"""Refusals of the tactics of norms, with their reasons."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.net import Net
from support.simulated import check_not_taken, lowered

from optdnn.ir.graph import Value
from optdnn.kernels.norm import rows_kernel as rows
from optdnn.ops.base import Stage
from optdnn.ops.fused import PointwiseAttrs
from optdnn.ops.norm import GroupNormAttrs, LayerNormAttrs, LpNormAttrs
from optdnn.ops.reduce import ReduceAttrs
from optdnn.ops.softmax import SoftmaxAttrs
from optdnn.types import FP16, FP32, FP64


def layer_norm(n: Net, x: Value) -> Value:
    width: Any = n.dims(x)[-1]
    return n.op("LayerNormalization", x, n.positive(width), n.random(width), attrs=LayerNormAttrs(-1, 1e-3))


def group_norm(n: Net, x: Value) -> Value:
    channels: Any = n.dims(x)[1]
    return n.op("GroupNormalization", x, n.positive(channels), n.random(channels), attrs=GroupNormAttrs(4))


def rows_of(n: Net, *shape: int, name: str = "x") -> Value:
    return n.op("Softmax", n.input(*shape, name=name))


def normed_part(n: Net) -> Value:
    """Rows that begin between multiples of 16 bytes."""
    return layer_norm(n, n.sliced(rows_of(n, 2, 6, 100), 3, 51, 2))


def apart_in_front_of_a_product(n: Net) -> list[Value]:
    return [n.matmul(n.transposed(layer_norm(n, n.sliced(rows_of(n, 3, 20, 96), 8, 56, 2)), 0, 2, 1), 24)]


def norm_of_a_sum_turned(n: Net, across: bool = False) -> list[Value]:
    """An output of the network is transposed, and the norm writes it so."""
    other = n.transposed(rows_of(n, 3, 48, 24, name="y"), 0, 2, 1) if across else rows_of(n, 3, 24, 48, name="y")
    total = n.op("Add", rows_of(n, 3, 24, 48), other)
    return [n.transposed(layer_norm(n, total), 0, 2, 1), n.op("Tanh", total)]


def modulated(n: Net, y: Value, images: int) -> list[Value]:
    factor, shift = (rows_of(n, images, 1, 48, name=name) for name in "fs")
    stages = Stage("Mul", (-1, 1)), Stage("Add", (-2, 2))
    return [n.matmul(n.op("Pointwise", y, factor, shift, attrs=PointwiseAttrs(epilogue=stages)), 16)]


def added(n: Net, y: Value, images: int = 2) -> Value:
    return n.op("Add", y, rows_of(n, images, 6, 48, name="r"))


def one_image(n: Net) -> Value:
    return layer_norm(n, rows_of(n, 1, 6, 48))


def of_two_types(n: Net, width: int) -> list[Value]:
    """The fp32 norm gives the type of its scale."""
    x = n.input(2, 6, width, dtype=np.float32)
    return [n.op("RMSNormalization", x, n.positive(width), attrs=LayerNormAttrs(-1, 1e-3))]


def half_of_channels(n: Net) -> list[Value]:
    x = n.conv(n.input(2, 8, 5, 6), 32)
    other = n.sliced(n.conv(x, 64), 4, 36, 1)
    return [n.conv(n.op("Relu", n.op("Add", group_norm(n, n.conv(x, 32)), other)), 8)]


def of_no_elements(n: Net) -> list[Value]:
    """The statistics, which have no reader, would have elements."""
    x = n.input(3, 0)
    return [n.op("LayerNormalization", x, n.positive(0), attrs=LayerNormAttrs(-1, 1e-3), outputs=3)[0]]


def scale_of_one_axis(n: Net) -> list[Value]:
    return [n.op("LayerNormalization", n.input(3, 4, 8), n.positive(4, 1), attrs=LayerNormAttrs(1, 1e-3))]


def many_rows(n: Net) -> list[Value]:
    return [n.op("LpNormalization", n.input(1 << 27, 32), attrs=LpNormAttrs(-1, 2, 1e-12))]


@pytest.mark.parametrize(
    ("build", "dtype", "tactic", "because"),
    [
        (apart_in_front_of_a_product, FP32, "norm_across", "its rows are not contiguous and aligned"),
        (
            lambda n: norm_of_a_sum_turned(n, across=True),
            FP16,
            "add_norm_across",
            "its results are not in contiguous rows",
        ),
        (norm_of_a_sum_turned, FP16, "add_norm", "its results are not contiguous and aligned, or types differ"),
        (
            lambda n: [n.transposed(rows_of(n, 3, 20, 48), 0, 2, 1)],
            FP16,
            "rows_once",
            "of its result do not have a constant pitch",
        ),
        (lambda n: modulated(n, one_image(n), 2), FP32, "rows_modulated", "the normalized rows are repeated"),
        (lambda n: modulated(n, normed_part(n), 2), FP32, "rows_modulated", "its rows do not have a constant pitch"),
        (lambda n: [added(n, one_image(n))], FP32, "norm_add", "the normalized rows are repeated"),
        (lambda n: [added(n, normed_part(n))], FP32, "norm_add", "its rows do not have a constant pitch"),
        (
            lambda n: [layer_norm(n, added(n, one_image(n)))],
            FP32,
            "norm_add_norm",
            "the normalized rows are repeated",
        ),
        (lambda n: of_two_types(n, 48), FP16, "rows_once", "its operand and its result have different types"),
        (lambda n: of_two_types(n, 64), FP16, "short_rows", "its operand and its result have different types"),
        (half_of_channels, FP32, "group_norm_add", "its images do not consist of aligned vectors of channels"),
        (lambda n: [group_norm(n, n.input(2, 32))], FP32, "group_norm", "it has no positions"),
        (lambda n: [group_norm(n, n.input(2, 32, 4, 4))], FP64, "group_norm", "it is for 16-bit floats and fp32"),
        (of_no_elements, FP32, "row_tiles", "it has no rows"),
        (of_no_elements, FP32, "rows_grid", "it has no elements"),
        (scale_of_one_axis, FP32, "row_tiles", "its scale and bias do not have the shape of a row"),
        (many_rows, FP32, "short_rows", "more elements than the kernel can count"),
    ],
)
def test_networks_whose_norms_are_refused(
    build: Callable[[Net], list[Value]], dtype: Any, tactic: str, because: str
) -> None:
    n = Net(np.dtype(dtype))
    precision = "fp16" if dtype == FP32 else "fp32"
    check_not_taken(n.done(*build(n)), tactic, because, precision=precision, no_cubins=True)


def test_a_launch_has_a_result() -> None:
    problem, config = rows.Problem("layer_norm", 8, 64, wide=False), rows.Config(8, 1, 8, 128)
    assert rows.refuse(problem, config) == "there is no result"


def test_a_softmax_of_a_scalar_is_left_to_the_cpu() -> None:
    n = Net()
    total = n.op("ReduceSum", n.input(3), n.ints(0), attrs=ReduceAttrs(keepdims=False))
    program = lowered(n.done(n.op("LogSoftmax", total, attrs=SoftmaxAttrs(0))))
    assert [step.params["kind"] for step in program.steps if step.executor == "host"] == ["LogSoftmax"]
    host: Any = program.meta["host"]
    assert "rows: a scalar has no rows" in host["operators"][0]["why"]
