"""Results of quantized products: one product for all that read the same data, and fp32 without a launch of its own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.index import SplitAttrs
from optdnn.passes.base import Match, Miss, rule
from optdnn.passes.fuse_siblings import LAUNCH_BYTES
from optdnn.passes.support.facts import bytes_of, integers, operand
from optdnn.types import FP32

_RESIDUAL = 3


@rule("quantized_siblings", {"QuantizedMatMul"})
def quantized_siblings(graph: Graph, op: Op) -> Match | Miss | None:
    """Products of the same data, with their weights side by side and a Split after them, whose parts are read in place."""
    x = operand(op)
    others = [u for u in graph.users(x) if u.kind == op.kind and u.inputs[0] == x and u is not op]
    if not others:
        return None
    members = [op, *(u for u in others if _key(u) == _key(op))]
    if len(members) == 1:
        return Miss("no other product of these data has the same stages and the same type")
    if any((reader := graph.sole_user(u.value)) is not None and reader.kind == "Concat" for u in members):
        return Miss("a Concat joins the results, and each is written to its place there")
    if any(u.input(_RESIDUAL) is not None for u in members):
        return Miss("it adds a tensor of its own")
    widths, unit = [u.outputs[0].type.static_shape[-1] for u in members], 16 // op.outputs[0].type.dtype.itemsize
    if any(width % unit for width in widths):
        return Miss("parts that do not begin at multiples of 16 bytes would have to be copied")
    arrays = [[a for u in members if (a := graph.constant_value(u.inputs[k])) is not None] for k in (1, 2)]
    name = f"{op.outputs[0].name}.siblings"

    def build(patch: Patch) -> None:
        joined = [
            patch.constant(np.concatenate(each), f"{name}.{k}")
            for k, each in zip(("weights", "scales"), arrays, strict=True)
        ]
        merged = patch.add(op.kind, [x, *joined, *op.inputs[3:]], op.attrs, name=name)
        axis = len(op.outputs[0].type.dims) - 1
        split = patch.add_op(
            "Split", [merged, integers(patch, widths, f"{name}.sizes")], SplitAttrs(axis),
            names=[u.outputs[0].name for u in members], outputs=len(members),
        )  # fmt: skip
        for k, member in enumerate(members):
            patch.replace(member.value, Value(split.id, k))

    return Match(tuple(members), build)


def _key(op: Op) -> tuple[object, ...]:
    """Products with equal keys differ only in their weights and the numbers of their channels."""
    return (op.attrs, op.inputs[4:])


@rule("wide_result", {"QuantizedMatMul"})
def wide_result(graph: Graph, op: Op) -> Match | Miss | None:
    """16-bit rows that become fp32 at once are stored as fp32. (Images are put in plain order by the launch that converts them.)"""
    cast = graph.sole_user(op.value)
    if cast is None or cast.kind != "Cast" or cast.attrs.to != FP32 or op.attrs.output_dtype.itemsize != 2:
        return None
    if op.input(_RESIDUAL) is not None:
        return Miss("what it adds is not fp32")
    if op.outputs[0].type.static_shape[-1] * FP32.itemsize % 16:
        return Miss("rows of fp32 that do not begin at multiples of 16 bytes would be copied")
    if bytes_of(graph, cast.value) > LAUNCH_BYTES:
        return Miss("fp32 results of this size are stored slower than a launch takes")
    attrs = replace(op.attrs, output_dtype=FP32)
    return Match((cast, op), lambda patch: patch.add(op.kind, op.inputs, attrs, name=cast.outputs[0].name))
