"""Quantized products of the same data become one product, and their results are stored as fp32 if a Cast to fp32 reads them."""

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
    """Products of the same data become one product with concatenated weights, and a Split, whose parts are read in place."""
    x = operand(op)
    others = [u for u in graph.users(x) if u.kind == op.kind and u.inputs[0] == x and u is not op]
    if not others:
        return None
    members = [op, *(u for u in others if _key(u) == _key(op))]
    if len(members) == 1:
        return Miss("no other product of this data has the same stages and the same type")
    if any((reader := graph.sole_user(u.value)) is not None and reader.kind == "Concat" for u in members):
        return Miss("a Concat joins the results, and each product writes directly into the Concat's result")
    if any(u.input(_RESIDUAL) is not None for u in members):
        return Miss("one of the products adds a tensor of its own")
    widths, unit = [u.outputs[0].type.static_shape[-1] for u in members], 16 // op.outputs[0].type.dtype.itemsize
    if any(width % unit for width in widths):
        return Miss("its parts do not begin at multiples of 16 bytes, and would have to be copied")
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
    """A key for products: products with equal keys differ only in their weights and numbers of channels."""
    return (op.attrs, op.inputs[4:])


@rule("wide_result", {"QuantizedMatMul"})
def wide_result(graph: Graph, op: Op) -> Match | Miss | None:
    """A product stores fp32 if a Cast to fp32 is the only reader of its 16-bit rows.

    Images are not concerned: the launch that converts them also puts them in plain order."""
    cast = graph.sole_user(op.value)
    if cast is None or cast.kind != "Cast" or cast.attrs.to != FP32 or op.attrs.output_dtype.itemsize != 2:
        return None
    if op.input(_RESIDUAL) is not None:
        return Miss("the tensor that it adds is not fp32")
    if op.outputs[0].type.static_shape[-1] * FP32.itemsize % 16:
        return Miss("rows of fp32 do not begin at multiples of 16 bytes, and would be copied")
    if bytes_of(graph, cast.value) > LAUNCH_BYTES:
        return Miss("storing fp32 results of this size would take longer than a launch for the Cast")
    attrs = replace(op.attrs, output_dtype=FP32)
    return Match((cast, op), lambda patch: patch.add(op.kind, op.inputs, attrs, name=cast.outputs[0].name))
