"""Parts of concatenations whose channels are no whole vectors: kernels that write whole ones must not write into the next part."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.net import Net
from support.on_gpu import checked_program
from support.simulated import TOLERANCE, feeds_of, lowered

from optdnn.ir.graph import Graph
from optdnn.ops.index import ConcatAttrs

WHOLE_VECTORS = ("gemm_sm90", "gemm_parts_sm90", "conv_sm90", "conv_parts_sm90")
"""Tactics whose launches may write eight channels at a time."""


def joined(rows: int, width: int, more: int, images: bool) -> Graph:
    """A product of ``width`` columns beside a constant, or beside another tensor, of ``more``."""
    n = Net()
    if images:
        x = n.op("Relu", n.conv(n.input(rows, 8, 1, 1), 64, 1, pads=0))
        parts, axis = (n.conv(x, width, 1, pads=0), n.op("Relu", n.input(rows, more, 1, 1, name="other"))), 1
    else:
        parts, axis = (n.op("MatMul", n.op("Relu", n.input(rows, 168)), n.random(168, width)), n.random(rows, more)), 1
    return n.done(n.op("Concat", *parts, attrs=ConcatAttrs(axis)))


CASES = [
    (rows, width, more, images)
    for rows in (1, 3)
    for width, more in ((5, 3), (5, 5), (12, 4))
    for images in (False, True)
]


def written(program: Any) -> dict[str, list[set[int]]]:
    """The elements of each buffer that each launch writes, with those of whole vectors."""
    found: dict[str, list[set[int]]] = {}
    for step in program.steps:
        buffers = (*step.inputs, *step.outputs)
        for operand, offset, shape, strides in step.params.get("writes", ()):
            shape = list(shape)
            if str(step.params.get("tactic", "")).split()[0] in WHOLE_VECTORS and step.params["op"]["kind"] != "Copy":
                shape[1] = -(-shape[1] // 8) * 8
            places = sum(
                np.arange(n).reshape(-1, *[1] * (len(shape) - k - 1)) * s
                for k, (n, s) in enumerate(zip(shape, strides, strict=True))
            )
            found.setdefault(program.buffers[buffers[operand]].name, []).append(
                set((np.asarray(places) + offset).ravel().tolist())
            )
    return found


@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16"])
@pytest.mark.parametrize(("rows", "width", "more", "images"), CASES)
def test_launches_that_write_whole_vectors_do_not_write_such_parts(
    rows: int, width: int, more: int, images: bool, precision: str
) -> None:
    for parts in written(lowered(joined(rows, width, more, images), precision, target="cuda:sm_90a")).values():
        assert sum(map(len, parts)) == len(set().union(*parts))


@pytest.mark.hopper
@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16"])
@pytest.mark.parametrize(("rows", "width", "more", "images"), CASES)
def test_parts_stay_whole_on_a_gpu(rows: int, width: int, more: int, images: bool, precision: str) -> None:
    graph = joined(rows, width, more, images)
    checked_program(lowered(graph, precision, target="cuda:sm_90a"), feeds_of(graph), TOLERANCE[precision])
