"""Weights that would be subnormal in fp16: a power of two enlarges them, and a stage makes the result small again.

A LayerScale of 1e-5 that is folded into weights of 0.05 leaves 5e-7, and fp16 holds numbers of this size in steps of 6e-8. The
factor is exact, and kernels apply their stages to sums in fp32.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ops.base import Stage, renumbered
from optdnn.passes.support.linear import LINEAR
from optdnn.passes.support.stages import Slots
from optdnn.types import FP32, Array

SMALL, ENLARGED = 2.0**-12, 2.0**-3
"""Weights are enlarged if all are below SMALL: steps of subnormal numbers are then larger than other rounding errors. The
largest weight becomes at least half of ENLARGED, a usual size of weights."""
FIRST = 4096
"""Weights that are looked at first: nearly all products are ruled out by them."""
LARGEST = 2.0**15
"""Bound of an enlarged bias: fp16 ends at 65504."""
MOST = 24
"""Largest exponent: fp16 holds its inverse, 2^-24."""


def exponent(graph: Graph, op: Op) -> int:
    """The exponent of the power of two that multiplies a product's weights and bias in fp16; 0: they stay as they are."""
    slots = _slots(graph, op)
    if slots is None:
        return 0
    weights, *biases = (_constant(graph, op.inputs[slot]) for slot in slots)
    if weights is None or any(b is None for b in biases) or _largest(weights.reshape(-1)[:FIRST]) >= SMALL:
        return 0
    largest = _largest(weights)
    if not 0 < largest < SMALL:
        return 0
    fitting = int(np.floor(np.log2(ENLARGED / largest)))
    room = (int(np.floor(np.log2(LARGEST / size))) for b in biases if (size := _largest(b)) > 0)
    return max(0, min(MOST, fitting, *room))


def enlarged(graph: Graph, op: Op, exponent: int) -> tuple[Op, list[Value]]:
    """The product with weights and bias times ``2**exponent`` and a stage that multiplies by its inverse, and the new constants."""
    slots = Slots(op)
    made = {}
    for slot in _slots(graph, op) or ():
        value = op.inputs[slot]
        array = _constant(graph, value)
        assert value is not None
        assert array is not None
        made[slot] = graph.add_constant(np.ldexp(array, exponent), graph.output(value).name, graph.op(value).src)
    inverse = graph.add_constant(np.array(2.0**-exponent, FP32), f"{op.outputs[0].name}.factor", op.src)
    slots.operands = [made.get(i, v) for i, v in enumerate(slots.operands)]
    before = 1 if _adds_constant(graph, op) else 0
    stages = list(op.attrs.epilogue)
    stages = [*stages[:before], Stage("Mul", (~before, slots.slot(inverse))), *renumbered(stages[before:], 1)]
    attrs = replace(op.attrs, epilogue=tuple(stages))
    return replace(op, attrs=attrs, inputs=slots.inputs()), [*made.values(), inverse]


def _slots(graph: Graph, op: Op) -> list[int] | None:
    """The operands of a product that are enlarged together: its constant weights first, then its bias. None for other operators."""
    if op.kind not in LINEAR:
        return None
    weights = next((slot for slot in (1, 0) if _constant(graph, op.inputs[slot]) is not None), None)
    if weights is None or (weights == 0 and op.kind != "MatMul"):
        return None
    arity = op.definition.arity or 0
    bias = [2] if arity > 2 and op.input(2) is not None else []
    added = [a for a in op.attrs.epilogue[0].args if a is not None and a >= 0] if _adds_constant(graph, op) else []
    return [weights, *bias, *added]


def _adds_constant(graph: Graph, op: Op) -> bool:
    """Whether the first stage adds a constant, a bias, to the product, and no other stage reads either."""
    if not op.attrs.epilogue or op.attrs.epilogue[0].kind != "Add":
        return False
    first, *others = op.attrs.epilogue
    slots = [a for a in first.args if a is not None and a >= 0]
    again = any(a in (~0, *slots) for s in others for a in s.args)
    return len(slots) == 1 and not again and _constant(graph, op.inputs[slots[0]]) is not None


def _constant(graph: Graph, value: Value | None) -> Array | None:
    """The fp32 constant, or None."""
    found = graph.constant_value(value)
    return found if found is not None and found.dtype == FP32 else None


def _largest(array: Array | None) -> float:
    return float(np.abs(array).max(initial=0.0)) if array is not None else 0.0
