"""Each rank computes a part of the batch, with all weights: no collectives, but nothing is gained for a batch of one.

What every output needs of the network's inputs is followed backwards, from its first axis, by the rules of tensor parallelism
(:mod:`optdnn.passes.support.partition`). That proves that rows of the batch do not depend on one another.
"""

from __future__ import annotations

from optdnn.ir.graph import STRUCTURAL, Graph
from optdnn.passes.base import Fired, PassContext, PassReport, Refused, node_names
from optdnn.passes.support.facts import operand
from optdnn.passes.support.tensor_parts import Part, Whole
from optdnn.passes.tensor_parallel import Block, TensorParallel


class BatchParallel(TensorParallel):
    """The part of the batch of rank ``rank`` of ``world``."""

    name = "batch_parallel"
    axis_kind = "rows of the batch"

    def run(self, graph: Graph, context: PassContext, report: PassReport) -> None:
        place = {op.id: k for k, op in enumerate(graph.order())}
        outputs = [graph.op(i) for i in graph.outputs]
        try:
            block = self._batch(graph, place)
        except Whole as why:
            report.refused.append(Refused("split_batch", node_names(outputs), str(why)))
            return
        self._apply(graph, [block], [], place)
        report.fired.append(Fired("split_batch", node_names(outputs)))

    def _batch(self, graph: Graph, place: dict[int, int]) -> Block:
        block, pending = Block(None), list[tuple[int, int]]()
        for output in (graph.op(i) for i in graph.outputs):
            value = operand(output)
            dims = graph.type(value).dims
            if not dims or not isinstance(dims[0], int):
                raise Whole(f"output {output.name!r} has no batch of a known size")
            block.parts[value] = Part(0, self._chunk(dims[0]))
            maker = graph.op(value)
            if maker.kind in STRUCTURAL:
                raise Whole(f"output {output.name!r} is computed by nothing")
            pending.append((-place[maker.id], maker.id))
        pending = sorted(set(pending))
        self._follow(graph, block, pending, place, {}, set())
        for reader, slot, _ in self._readers(graph, block):
            raise Whole(f"{reader.kind} {reader.name!r} reads {graph.output(operand(reader, slot)).name!r} whole")
        if not any(graph.op(value).kind == "Input" for value in block.parts):
            raise Whole("no input has the rows of the batch")
        return block
