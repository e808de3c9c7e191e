"""Dead code elimination: ops that no output of the network depends on are removed."""

from __future__ import annotations

from optdnn.ir.graph import STRUCTURAL, Graph
from optdnn.passes.base import Fired, Pass, PassContext, PassReport, node_names


class DeadCode(Pass):
    """Patches remove the ops that they replace; this pass removes the ops that were dead from the beginning.

    The network's inputs stay, used or not: they are part of its interface.
    """

    name = "dce"

    def run(self, graph: Graph, context: PassContext, report: PassReport) -> None:
        live: set[int] = set()
        stack = list(graph.outputs)
        while stack:
            i = stack.pop()
            if i not in live:
                live.add(i)
                stack.extend(v.op for v in graph.op(i).inputs if v is not None)
        for op in reversed(graph.order()):
            if op.id in live or op.kind == "Input":
                continue
            graph.remove(op.id)
            if op.kind not in STRUCTURAL:
                report.fired.append(Fired("dead", node_names([op])))
