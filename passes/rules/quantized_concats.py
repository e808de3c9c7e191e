"""A Concat that is quantized joins quantized parts: the launches that compute the parts store 8 bits in its result.

Tools for TensorRT quantize what convolutions read, and so a Concat's result, but not its parts. Float parts of a product or of a
pointwise operator are rounded in their launches. Parts that are dequantized with the same scale need no launch at all.
"""

from __future__ import annotations

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.passes.base import Match, Miss, rule
from optdnn.passes.support.facts import is_pointwise, operand, producer
from optdnn.passes.support.quantized_values import is_dequantized, same_scale

_PRODUCTS = frozenset({"Conv", "Gemm", "MatMul"})
MOST_LAUNCHES = 1
"""Parts that need a launch of their own: as many as the one that quantizes the whole."""


@rule("quantize_parts", {"QuantizeLinear"})
def quantize_parts(graph: Graph, op: Op) -> Match | Miss | None:
    """The QuantizeLinear of a Concat is moved to its parts."""
    concat = producer(graph, op.inputs[0], {"Concat"})
    if concat is None or all(is_dequantized(graph, part) for part in concat.inputs):
        return None  # on_integers
    if graph.users(concat.value) != [op]:
        return Miss(f"the float result of {concat.name} has another reader")
    if graph.type(operand(op, 1)).dims not in ((), (1,)) or op.attrs.block_size:
        return Miss("it has a scale per channel")
    parts = [operand(concat, k) for k in range(len(concat.inputs))]
    launches = [part for part in parts if not _free(graph, op, part, concat)]
    if len(launches) > MOST_LAUNCHES:
        names = ", ".join(graph.output(part).name for part in launches)
        return Miss(f"the parts {names} of {concat.name} would be quantized in launches of their own")

    def build(patch: Patch) -> Value:
        return patch.add(concat.kind, [_quantized(graph, patch, op, part) for part in parts], concat.attrs)

    return Match((op, concat), build)


def _quantized(graph: Graph, patch: Patch, op: Op, part: Value) -> Value:
    """The integers of a part, with the scale and zero point of ``op``."""
    return _stored(graph, op, part) or patch.add(
        "QuantizeLinear", [part, *op.inputs[1:]], op.attrs, name=f"{graph.output(part).name}/quantized"
    )


def _stored(graph: Graph, op: Op, part: Value) -> Value | None:
    """The integers that a part is dequantized from, if they have the scale and zero point of ``op``."""
    before = graph.op(part)
    if before.kind != "DequantizeLinear" or graph.type(operand(before)).dtype != op.outputs[0].type.dtype:
        return None
    return operand(before) if same_scale(graph, before, op) else None


def _free(graph: Graph, op: Op, part: Value, concat: Op) -> bool:
    """Whether no launch is needed to quantize a part."""
    if _stored(graph, op, part) is not None:
        return True
    made = graph.op(part)
    if graph.users(part) != [concat] or len(made.outputs) > 1:
        return False
    if made.kind == "MaxPool":  # it compares integers
        return _stored(graph, op, operand(made)) is not None
    return is_pointwise(made) or (made.kind in _PRODUCTS and all(is_dequantized(graph, v) for v in made.inputs[:2]))
