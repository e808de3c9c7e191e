"""Shape arithmetic that the importer should have folded."""

from __future__ import annotations

import numpy as np

from optdnn.ir.graph import Graph
from optdnn.ops.base import KNOWN_LIMIT
from optdnn.types import is_float


def unknown_shape_arithmetic(graph: Graph) -> list[str]:
    """Small integers that depend only on shapes and constants, and are not known nevertheless."""
    reads_data: set[int] = set()
    missing = []
    for op in graph.order():
        if op.kind in ("Constant", "Output"):
            continue
        operands = {v.op for v in op.inputs if v is not None}
        if op.kind == "Input" or (operands & reads_data and not op.definition.traits.shape_only):
            reads_data.add(op.id)
            continue
        for out in op.outputs:
            small = out.type.is_static and np.prod(out.type.static_shape, dtype=np.int64) <= KNOWN_LIMIT
            if small and not is_float(out.type.dtype) and out.known is None:
                missing.append(f"{op.kind} {op.name}")
    return missing
