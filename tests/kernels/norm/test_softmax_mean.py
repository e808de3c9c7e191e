"""Means of constants, weighted by a softmax of short rows: one launch of a softmax and a product."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.host import needs_compiler
from support.net import Net
from support.on_gpu import checked_launches
from support.on_processor import compare_steps
from support.simulated import check_simulated, feeds_of, kinds, lowered, refusals
from support.sweep import turns

from optdnn.ir.graph import Graph
from optdnn.ops.shape import TransposeAttrs
from optdnn.ops.softmax import SoftmaxAttrs


def means(size: int = 16, *, turned: bool = True, columns: int = 1, axis: int = -1, offset: int = 0) -> Graph:
    """Four distributions of ``size`` bins per position, and the mean bin of each."""
    n = Net()
    x = n.matmul(n.input(2, 7, 24), offset + 4 * size)
    if offset:
        x = n.op("Slice", x, n.ints(offset), n.ints(offset + 4 * size), n.ints(2))
    x = n.op("Reshape", x, n.ints(2, 7, 4, size))
    if turned:
        x = n.op("Transpose", x, attrs=TransposeAttrs((0, 2, 1, 3)))
    y = n.op("Softmax", n.op("Relu", x) if axis != -1 else x, attrs=SoftmaxAttrs(axis))
    return n.done(n.op("MatMul", y, n.random(size, columns)))


def gemm(**attrs: Any) -> Graph:
    """A Gemm with one column behind a softmax of rows."""
    n = Net()
    square = 1 if attrs.get("trans_b") else 16
    return n.done(n.gemm(n.op("Softmax", n.input(16, square), attrs=SoftmaxAttrs(-1)), 1, **attrs))


CASES = {
    "rows of positions": means(turned=False),
    "sides apart": means(),
    "17 bins": means(17),
    "12 bins, in the middle of rows": means(12, offset=6),
    "64 bins": means(64),
}


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("name", CASES)
def test_a_softmax_and_a_product_in_one_launch(name: str, precision: str) -> None:
    program = check_simulated(CASES[name], precision)
    assert "SoftmaxMean" in kinds(program)
    assert "Softmax" not in kinds(program)


@needs_compiler
@pytest.mark.parametrize(("name", "precision"), turns(CASES, "fp16", "fp32"))
def test_the_kernel_on_the_processor(name: str, precision: str, tmp_path: Path) -> None:
    graph = CASES[name]
    program = lowered(graph, precision)
    assert compare_steps(program, feeds_of(graph), 4e-3 if precision == "fp16" else 1e-5, tmp_path) >= 1


def test_rows_of_large_numbers() -> None:
    n = Net()
    x = n.op("Add", n.input(3, 5, 16), n.const(np.array(1000.0)))  # e^x is infinite
    program = check_simulated(
        n.done(n.op("MatMul", n.op("Softmax", x, attrs=SoftmaxAttrs(-1)), n.random(16, 1))), "fp32"
    )
    assert kinds(program)[-1] == "SoftmaxMean"


@pytest.mark.parametrize(
    ("graph", "because"),
    [
        (lambda: means(65), "a thread cannot hold a row of 65 elements"),
        (lambda: means(columns=2), "it is no product with one constant vector, without stages"),
        (lambda: means(axis=1), "the softmax is not along the last axis"),
        (gemm, "the product is also scaled, transposed or added to"),
        (lambda: gemm(bias=False, trans_b=True), "the product is also scaled, transposed or added to"),
    ],
)
def test_other_products_are_refused(graph: Any, because: str) -> None:
    program = lowered(graph(), "fp16")
    assert "SoftmaxMean" not in kinds(program)
    assert because in refusals(program, "softmax_mean")


def test_a_softmax_with_other_readers_is_refused() -> None:
    n = Net()
    y = n.op("Softmax", n.input(2, 6, 16), attrs=SoftmaxAttrs(-1))
    program = lowered(n.done(n.op("MatMul", y, n.random(16, 1)), y), "fp16")
    assert "the softmax has other readers" in refusals(program, "softmax_mean")


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp16", "fp32"])
@pytest.mark.parametrize("name", CASES)
def test_every_launch_agrees_with_its_meaning(name: str, precision: str) -> None:
    checked_launches(CASES[name], precision)
