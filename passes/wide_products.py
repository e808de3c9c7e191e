"""Products of 16-bit floats whose results are converted to fp32 store fp32 at once.

Networks that were trained in fp32 have fp32 outputs, so at 16 bits a conversion follows their last product. Kernels sum in fp32. As
the last stage of the product's epilogue, the conversion costs no launch, and nothing is rounded in between. If a kernel cannot
store fp32, the conversion stays a separate launch.
"""

from __future__ import annotations

import math

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.base import Stage
from optdnn.passes.base import Match, Miss, PassContext, RulePass, rule
from optdnn.passes.support.facts import operand, sizes_of
from optdnn.passes.support.paths import path_from
from optdnn.passes.support.stages import with_stages
from optdnn.types import BF16, FP16, FP32

_UNIT = 8
"""Columns that a kernel on tensor cores stores at a time."""


@rule("wide_product", {"Gemm", "MatMul"})
def wide_product(graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
    """A product of 16-bit rows with a constant matrix that only a Cast to fp32 reads, directly or after Reshapes."""
    views = path_from(graph, op.value, {"Reshape"})
    cast = graph.sole_user((views[-1] if views else op).value)
    if cast is None or cast.kind != "Cast" or cast.attrs.to != FP32 or op.outputs[0].type.dtype not in (FP16, BF16):
        return None
    weight = graph.constant_value(op.inputs[1])
    if weight is None or weight.ndim != 2 or op.attrs.prologue:
        return None
    if op.outputs[0].type.dims[-1] % _UNIT != 0 and (context.row_invariant or not _one_row(graph, op)):
        return Miss(f"its number of columns is not a multiple of {_UNIT}, and the fp32 rows would be copied")
    reads = [v for v in op.inputs[op.definition.arity or 0 :] if v is not None and graph.constant_value(v) is None]
    if reads:
        return Miss(f"its stages read {graph.output(reads[0]).name}, which is not fp32")
    stage = Stage("Cast", (~len(op.attrs.epilogue),), cast.attrs)

    def build(patch: Patch) -> Value:
        made = patch.add(op.kind, op.inputs, with_stages(op.attrs, epilogue=[stage]))
        for view in views:
            made = patch.add("Reshape", [made, *view.inputs[1:]], view.attrs)
        return made

    return Match((op, *views, cast), build, cast.value)


def _one_row(graph: Graph, op: Op) -> bool:
    """Whether a kernel of single rows (``gemv``) can run the product: it stores any number of columns.
    With ``row_invariant``, it runs none: other batch sizes have several rows."""
    before = sizes_of(graph, operand(op))
    return before is not None and math.prod(before[:-1]) == 1 and before[-1] % _UNIT == 0


class WideProducts(RulePass):
    """Runs after the assignment of precisions, which adds the conversions, and after all passes that look for products."""

    name = "wide_products"
    rules = (wide_product,)
