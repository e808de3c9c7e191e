"""Operators whose sizes depend on data: a GPU's program runs them on the CPU, and they stay in fp32.

Half precision is no faster on the CPU, and the copies to and from it would need conversions. These operators mostly compute
coordinates and scores. So arithmetic on only their results also stays in fp32: at 1,000 pixels, fp16 has steps of half a pixel.
"""

from __future__ import annotations

from optdnn.dim import Dim, Symbol
from optdnn.ir.graph import STRUCTURAL, Graph, Op
from optdnn.ops.table import OPDEFS
from optdnn.types import TensorType


def sized_by_data(graph: Graph) -> dict[int, str]:
    """Op id -> the reason to stay in fp32, for operators whose sizes depend on data and for arithmetic on only their results."""
    inputs = {s for d in graph.symbols().values() for s in d.symbols()}
    found: dict[int, str] = {}
    for op in graph.order():
        if op.kind in STRUCTURAL:
            continue
        read = [v for v in op.inputs if v is not None]
        types = [*(graph.type(v) for v in read), *(out.type for out in op.outputs)]
        if any(_depends(t, inputs) for t in types):
            found[op.id] = "its size depends on data, so it runs on the CPU"
            continue
        computed = [graph.op(v) for v in read if graph.known(v) is None]
        if computed and all(p.id in found for p in computed) and _carries(op):
            found[op.id] = "its operands are computed on the CPU, since their sizes depend on data"
    return found


def depends_on_data(graph: Graph, t: TensorType) -> bool:
    """Whether the size of a tensor of this type depends on data, not on the sizes of the network's inputs."""
    return not t.is_static and _depends(t, {s for d in graph.symbols().values() for s in d.symbols()})


def _depends(t: TensorType, inputs: set[Symbol]) -> bool:
    """Whether the shape has a symbol that is not in ``inputs``, or is unknown."""
    return t.shape is None or any(isinstance(d, Dim) and not d.symbols() <= inputs for d in t.shape)


def _carries(op: Op) -> bool:
    """Whether the op is pointwise or only moves elements."""
    traits = OPDEFS[op.kind].traits if op.kind in OPDEFS else None
    return traits is not None and (traits.pointwise or traits.movement)
