"""Packed weights that no GPU kernel multiplies as they are become floats at run time, in front of an ordinary product.

They stay packed in the engine and in the GPU's memory. Kernels multiply packed weights by 16-bit floats; networks in fp32, and
weights of rare types, take this way. It costs a launch that writes the floats, and reading them. Rows that may be rounded are not.

Kernels do not read fp4. Twice such a number is a small integer, so fp4 weights become 8-bit integers with half of their scales.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.base import Stage
from optdnn.ops.gemm import GemmAttrs, MatMulAttrs
from optdnn.ops.packed_layout import PackedGatherAttrs, PackedMatMulAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.base import Match, Miss, PassContext, RulePass, rule
from optdnn.passes.support.facts import operand
from optdnn.target_name import TargetName
from optdnn.types import BF16, DTYPES, FP16, Array, bits_of, dtype_name

KERNEL_CODES = frozenset({"uint2", "uint4", "uint8", "fp8_e4m3"})
"""Types of numbers that kernels read packed."""
_FIRST_FP8 = 89
"""The first architecture that converts floats of 8 bits."""


def why_unpacked(graph: Graph, op: Op, target: str) -> str | None:
    """Why no kernel multiplies the weights of a PackedMatMul as they are, or None."""
    a, x, arch = op.attrs, graph.type(operand(op)), TargetName.parse(target).arch
    if x.dtype not in (FP16, BF16):
        return f"kernels multiply packed weights by 16-bit floats, not {dtype_name(x.dtype)}"
    if len(x.dims) < 2:
        return "it is not a product of rows"
    if a.code not in KERNEL_CODES:
        return f"no kernel reads packed {a.code}"
    if a.code == "fp8_e4m3" and int("".join(c for c in arch if c.isdigit()) or _FIRST_FP8) < _FIRST_FP8:
        return f"{arch} has no conversion of 8-bit floats"
    if a.K < 16:
        return f"its rows have only {a.K} numbers"
    if any(v is not None and graph.constant_value(v) is None for v in op.inputs[1:4]):
        return "its weights are not constant"
    zeros = graph.constant_value(op.input(3))
    if zeros is not None and zeros.dtype == np.uint8 and zeros.size and int(zeros.max()) >> bits_of(DTYPES[a.code]):
        return f"its zero points are no numbers of type {a.code}"
    return None


_DOUBLES = np.array([0, 1, 2, 3, 4, 6, 8, 12])
"""Twice the numbers of fp4 (e2m1) without their signs, in the order of their codes."""


@rule("fp4_as_integers", {"PackedMatMul"})
def fp4_as_integers(graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
    if not context.on_gpu or op.attrs.code != "fp4_e2m1":
        return None
    attrs = replace(op.attrs, code="uint8", block_rows=1)
    if why_unpacked(graph, replace(op, attrs=attrs), context.target) is not None:
        return None  # the other rule says why
    scales = graph.constant_value(op.inputs[2])
    assert scales is not None
    if ((half := scales * scales.dtype.type(0.5)) * 2 != scales).any():
        return None  # a scale is too small: the other rule takes the product
    return Match((op,), lambda patch: _widened(graph, op, attrs, half, patch))


def _widened(graph: Graph, op: Op, attrs: PackedMatMulAttrs, scales: Array, patch: Patch) -> Value:
    packed = graph.constant_value(op.inputs[1])
    assert packed is not None
    rows, blocks = packed.shape[0], scales.shape[1]
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(rows, blocks, -1)[:, :, : attrs.block_size]
    numbers = np.where(codes & 8, 128 - _DOUBLES[codes & 7], 128 + _DOUBLES[codes & 7]).astype(np.uint8)
    scales = np.repeat(scales, op.attrs.block_rows, axis=0)[:rows]
    names = [graph.output(operand(op, i)).name for i in (1, 2)]
    constants = [patch.constant(a, n) for a, n in zip((numbers.reshape(rows, -1), scales), names, strict=True)]
    return patch.add("PackedMatMul", [op.inputs[0], *constants, *op.inputs[3:]], attrs)


@rule("unpack_weights", {"PackedMatMul"})
def unpack_weights(graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
    if not context.on_gpu or why_unpacked(graph, op, context.target) is None:
        return None
    if op.attrs.prologue or not all(graph.type(v).is_static for v in op.inputs[1:3] if v is not None):
        return Miss("it holds stages before the product, or weights of unknown sizes")
    return Match((op,), lambda patch: _unpacked(graph, op, patch))


def _unpacked(graph: Graph, op: Op, patch: Patch) -> Value:
    x, weights = operand(op), operand(op, 1)
    rows, dtype, a = graph.type(weights).static_shape[0], graph.type(x).dtype, op.attrs
    scales, zeros = (_per_row(graph, v, rows, a.block_rows, patch) for v in (operand(op, 2), op.input(3)))
    every = patch.constant(np.arange(rows, dtype=np.int32), "rows")
    floats = patch.add(
        "PackedGather", [weights, every, scales, zeros], PackedGatherAttrs(a.code, a.K, a.block_size, dtype)
    )
    more = op.inputs[4:]
    if len(graph.type(x).dims) == 2:
        gemm = GemmAttrs(transB=True, epilogue=_moved(a.epilogue, -1), factors=a.factors)
        return patch.add("Gemm", [x, floats, None, *more], gemm)
    turned = patch.add("Transpose", [floats], TransposeAttrs((1, 0)))
    matmul = MatMulAttrs(epilogue=_moved(a.epilogue, -2), factors=a.factors)
    return patch.add("MatMul", [x, turned, *more], matmul)


def _moved(stages: tuple[Stage, ...], by: int) -> tuple[Stage, ...]:
    """Stages whose operands lie ``by`` slots further on: a product of floats has fewer operands of its own."""

    def slot(arg: int | None) -> Any:
        return arg + by if arg is not None and arg >= 0 else arg

    return tuple(replace(s, args=tuple(map(slot, s.args))) for s in stages)


def _per_row(graph: Graph, value: Value | None, rows: int, block_rows: int, patch: Patch) -> Value | None:
    """Scales or zero points with an entry for each row."""
    if value is None or block_rows == 1:
        return value
    given = graph.constant_value(value)
    assert given is not None, "only rows of constants may share scales"
    return patch.constant(np.repeat(given, block_rows, axis=0)[:rows], graph.output(value).name)


class UnpackWeights(RulePass):
    """Ordinary products with weights that are made floats at run time; weights of fp4 as integers of 8 bits."""

    name = "unpack_weights"
    rules = (fp4_as_integers, unpack_weights)
