"""Values that follow from the sizes of a network's inputs."""

from __future__ import annotations

from optdnn.ir.graph import Graph, Value

_MOST_OPERATORS = 256


def follows_from_sizes(graph: Graph, value: Value) -> bool:
    """Whether a value is computed from constants and sizes alone: at given sizes it is a constant, like positions of pixels.

    False for a value that takes more than 256 operators."""
    waiting, seen = [value], {value}
    while waiting:
        op = graph.op(waiting.pop())
        if op.kind in ("Constant", "Shape", "Size"):
            continue
        operands = [v for v in op.inputs if v is not None]
        if not operands or len(seen) > _MOST_OPERATORS:  # an input, or random numbers
            return False
        waiting += dict.fromkeys(v for v in operands if v not in seen)
        seen.update(operands)
    return True
