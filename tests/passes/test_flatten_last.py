"""flatten_last: a classifier reads channels-last images in place."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated, feeds_of, kinds

from optdnn.ir.evaluate import evaluate
from optdnn.ir.graph import Graph
from optdnn.ops.gemm import GemmAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.assign_layout import AssignLayout
from optdnn.passes.base import PassContext
from optdnn.passes.flatten_last import FlattenChannelsLast

CUDA = PassContext(target="cuda:sm_90a")


def classifier(
    *, channels: int = 16, product: str = "Gemm", by: str = "Flatten", size: int = 6, constant: bool = True, twice: bool = False,
    dtype: Any = np.float64,
) -> Graph:  # fmt: skip
    n = Net(dtype)
    x = n.conv(n.op("Relu", n.conv(n.input(2, 8, size, size), 16)), channels)
    width = channels * size * size
    flat = n.op("Flatten", x) if by == "Flatten" else n.op("Reshape", x, n.ints(0, -1))
    if not constant:
        y = n.op("MatMul", flat, n.input(width, 5, name="w"))
    elif product == "MatMul":
        y = n.matmul(flat, 5)
    else:
        y = n.gemm(flat, 5, trans_b=product == "Gemm of columns")
    return n.done(n.op("Relu", y), *([n.op("Relu", flat)] if twice else []))


def assigned(graph: Graph) -> Graph:
    AssignLayout()(graph, CUDA)
    return graph


@pytest.mark.parametrize("by", ["Flatten", "Reshape"])
@pytest.mark.parametrize("product", ["Gemm", "Gemm of columns", "MatMul"])
def test_the_matrix_is_turned_around_and_not_the_image(product: str, by: str) -> None:
    graph = assigned(classifier(product=product, by=by))
    before = graph.kinds()["Layout"]
    after, _ = check_pass(
        FlattenChannelsLast(), graph, changes=1, promoted_changes=0, context=CUDA
    )  # promoted, it has no layouts
    feeds = feeds_of(graph)
    for name, want in evaluate(graph, feeds).items():
        np.testing.assert_allclose(evaluate(after, feeds)[name], want, rtol=0, atol=1e-9 * np.abs(want).max())
    assert after.kinds().get("Layout", 0) == before - 1
    (turned,) = after.of_kind("Transpose")
    assert turned.attrs == TransposeAttrs((0, 2, 3, 1))
    assert after.type(turned.inputs[0]).layout == "nhwc"  # type: ignore[arg-type]
    assert not after.type(turned.value).layout  # its axes are in the order in which they lie


def test_refused() -> None:
    check_refused(
        FlattenChannelsLast(), assigned(classifier(constant=False)), because="not a constant matrix", context=CUDA
    )
    check_refused(
        FlattenChannelsLast(), assigned(classifier(channels=12)), because="12 channels are padded", context=CUDA
    )


def test_others_are_no_candidates() -> None:
    check_untouched(FlattenChannelsLast(), classifier(), context=CUDA)  # nothing is in channels-last order
    check_untouched(FlattenChannelsLast(), assigned(classifier(twice=True)), context=CUDA)
    n = Net(np.float64)
    pooled = n.op("GlobalAveragePool", n.conv(n.op("Relu", n.conv(n.input(2, 8, 6, 6), 16)), 16))
    check_untouched(FlattenChannelsLast(), assigned(n.done(n.gemm(n.op("Flatten", pooled), 5))), context=CUDA)
    n = Net(np.float64)
    x = n.conv(n.op("Relu", n.conv(n.input(2, 8, 6, 6), 16)), 16)
    flat = n.op("Reshape", x, n.ints(2, 16, 36))  # positions stay an axis
    check_untouched(FlattenChannelsLast(), assigned(n.done(n.matmul(flat, 5))), context=CUDA)
    n = Net(np.float64)
    flat = n.op("Flatten", n.conv(n.op("Relu", n.conv(n.input(4, 8, 2, 2), 16)), 16))
    y = n.op("Gemm", flat, n.random(4, 5), None, attrs=GemmAttrs(transA=1))
    check_untouched(FlattenChannelsLast(), assigned(n.done(y)), context=CUDA)


def test_no_launch_flattens() -> None:
    program = check_simulated(classifier(dtype=np.float32), "fp16")
    assert kinds(program).count("Copy") <= 1  # the input alone is brought into channels-last order
