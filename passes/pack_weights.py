"""Dequantized constant weights of products and tables stay packed: DequantizeLinear, Transpose, MatMul become one PackedMatMul.

Weights of 8 and fewer bits take part, with a scale per tensor, per channel, or per block of the axis that is summed. All readers of
the weights must be such products (MatMul, Gemm) or tables' rows (Gather); otherwise they become floats, as other constants do.
A product whose data are quantized, too, is left for integer arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.packed_layout import PackedGatherAttrs, PackedMatMulAttrs
from optdnn.passes.base import Match, Miss, PassContext, RulePass, rule
from optdnn.passes.support.facts import operand
from optdnn.passes.support.packed import PackedArrays, Reader, pack, packable


@rule("pack_weights", {"DequantizeLinear"})
def pack_weights(graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
    found = packable(graph, op)
    if found is None or isinstance(found, Miss):
        return found
    weights, scale = (graph.constant_value(operand(op, i)) for i in (0, 1))
    assert weights is not None
    assert scale is not None
    arrays = pack(op, found, weights, scale, graph.constant_value(op.input(2)), context.kept)
    covered = dict.fromkeys(o for reader in found.readers for o in (reader.op, *reader.path))
    return Match((op, *covered), lambda patch: _rewrite(graph, op, found.readers, arrays, patch))


def _rewrite(graph: Graph, op: Op, readers: Sequence[Reader], arrays: PackedArrays, patch: Patch) -> None:
    name = graph.output(operand(op)).name
    constants = [
        None if a is None else patch.constant(a, f"{name}/{what}")
        for a, what in ((arrays.weights, "packed"), (arrays.scales, "scales"), (arrays.zeros, "zeros"))
    ]
    for reader in readers:
        src = frozenset().union(op.src, reader.op.src, *(o.src for o in reader.path))
        patch.replace(reader.op.value, _read(op, reader, arrays, constants, patch, src))


def _read(
    op: Op,
    reader: Reader,
    arrays: PackedArrays,
    constants: Sequence[Value | None],
    patch: Patch,
    src: frozenset[str],
) -> Value:
    if reader.kind == "PackedGather":
        dtype = op.outputs[0].type.dtype
        rows = PackedGatherAttrs(arrays.code, arrays.K, arrays.block_size, dtype)
        return patch.add("PackedGather", [constants[0], reader.op.inputs[1], *constants[1:]], rows, src=src)
    attrs = PackedMatMulAttrs(arrays.code, arrays.K, arrays.block_size, arrays.block_rows)
    y = patch.add("PackedMatMul", [reader.op.inputs[0], *constants], attrs, src=src)
    bias = reader.op.input(2)
    return y if bias is None else patch.add("Add", [y, bias], src=src)


class PackWeights(RulePass):
    """Products with, and rows of, weights that stay packed."""

    name = "pack_weights"
    rules = (pack_weights,)
