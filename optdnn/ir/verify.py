"""Structural invariants of a graph; run after every pass in tests and under ``--debug``."""

from __future__ import annotations

from optdnn.errors import InternalError, ShapeError
from optdnn.ir.graph import STRUCTURAL, Graph
from optdnn.ops.table import OPDEFS


def verify(graph: Graph) -> None:
    """Raise InternalError at the first broken invariant.

    - There is no cycle, and each edge mirrors an operand.
    - Kinds exist, and attributes are of the kind's class. Operands exist. Value names are unique.
    - Stored types equal the types that inference gives for the operands, or are sharper.
    - Inputs and outputs are listed once each. Computing ops are reachable from an output, or have a use.
    """
    order = graph.order()
    names: dict[str, str] = {}
    for op in order:
        edges = {(u, k): port for u, _, k, port in graph.nx.in_edges(op.id, keys=True, data="port")}
        wanted = {(v.op, slot): v.port for slot, v in enumerate(op.inputs) if v is not None}
        if edges != wanted:
            raise InternalError(f"edges of {op.kind} {op.name!r} do not mirror its operands: {edges} != {wanted}")
        if op.kind == "Output":
            continue
        for out in op.outputs:
            if out.name in names:
                raise InternalError(f"two values are named {out.name!r}: {names[out.name]} and {op.kind} {op.name!r}")
            names[out.name] = f"{op.kind} {op.name!r}"
        if op.kind in STRUCTURAL:
            continue
        definition = OPDEFS.get(op.kind)
        if definition is None:
            raise InternalError(f"{op.name!r} has the unknown kind {op.kind}")
        if type(op.attrs) is not definition.attrs:
            raise InternalError(f"{op.kind} {op.name!r} has attributes of class {type(op.attrs).__name__}")
        _check_types(graph, op.id)
    listed = [*graph.inputs, *graph.outputs]
    structural = [op.id for op in order if op.kind in ("Input", "Output")]
    if sorted(listed) != sorted(structural):
        raise InternalError("the lists of inputs and outputs do not match the Input and Output ops")


def _check_types(graph: Graph, op_id: int) -> None:
    op = graph.op(op_id)
    try:
        result = graph.infer(op)
    except ShapeError as error:
        raise InternalError(f"{op.kind} {op.name!r} does not infer any more: {error.message}") from error
    for out, inferred in zip(op.outputs, result.types, strict=False):
        if not out.type.agrees(inferred):
            raise InternalError(f"{op.kind} {op.name!r}: {out.name!r} is stored as {out.type}, inferred as {inferred}")
