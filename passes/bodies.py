"""The bodies of If, Loop and Scan are optimized as well: constants folded, equal values shared, dead code removed.

A body still computes the same from the same inputs, with results of the same types. Its inputs stay, since the operator around it
feeds them by position.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from optdnn.errors import OptdnnError
from optdnn.ir.body import GraphBody
from optdnn.ir.graph import STRUCTURAL, Graph
from optdnn.ir.verify import verify
from optdnn.passes.base import Fired, Pass, PassContext, PassReport, Refused, node_names
from optdnn.passes.canonicalize_arithmetic import CanonicalizeArithmetic
from optdnn.passes.cse import CommonSubexpressions
from optdnn.passes.dce import DeadCode
from optdnn.passes.fold_constants import FoldConstants
from optdnn.passes.pack_weights import PackWeights
from optdnn.runtime.reference.nested import CONSTANT_LIMIT

INSIDE: tuple[Pass, ...] = (
    *(DeadCode(), FoldConstants(), PackWeights()),
    *(CommonSubexpressions(), CanonicalizeArithmetic(), DeadCode()),
)
"""The passes that run on bodies."""


class OptimizeBodies(Pass):
    """Refused: bodies whose constants would outgrow what a body may hold, or whose results would change their types."""

    name = "optimize_bodies"

    def run(self, graph: Graph, context: PassContext, report: PassReport) -> None:
        for visited in graph.order():
            if visited.kind in STRUCTURAL or visited.id not in graph:
                continue
            op, changes, rewrites = graph.op(visited.id), dict[str, Any](), 0
            for f in fields(op.attrs):
                body = getattr(op.attrs, f.name)
                if not isinstance(body, GraphBody):
                    continue
                better, count, reason = optimized(body, context)
                if reason is not None:
                    report.refused.append(Refused(self.name, node_names([op]), reason))
                elif better is not None:
                    changes[f.name], rewrites = better, rewrites + count
            if changes:
                graph.set_op(replace(op, attrs=replace(op.attrs, **changes)))
                report.fired += [Fired(self.name, node_names([op]))] * rewrites


def optimized(body: GraphBody, context: PassContext) -> tuple[GraphBody | None, int, str | None]:
    """The body after the passes, the number of changes (None and 0 without any), and why it was left as it is."""
    inner = body.graph.copy()
    inner.share_symbols(body.graph)
    before = [str(t) for t in body.outputs]
    nested = OptimizeBodies()
    # An array in a body is an attribute: small, whatever else folding may do.
    own = replace(context, fold_limit_bytes=min(context.fold_limit_bytes, CONSTANT_LIMIT))
    try:
        changes = sum(p(inner, own).changes for p in (nested, *INSIDE))
        if not changes:
            return None, 0, None
        verify(inner)
    except OptdnnError as error:
        return None, 0, f"its body cannot be rewritten: {error.message}"
    if any(c.attrs.value.size > CONSTANT_LIMIT for c in inner.of_kind("Constant")):
        return None, 0, "its body would hold constants that are too large"
    result = GraphBody(inner)
    if [str(t) for t in result.outputs] != before:
        return None, 0, "the types of its results would change"
    return result, changes, None
