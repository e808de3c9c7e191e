"""Pointwise operators on joined parts are computed with each part, before the Concat.

Detectors join boxes and scores, and multiply, activate or convert the whole. Each part is computed in registers instead, and
written into the result once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.passes.base import Match, Miss, PassContext, Rule, rule
from optdnn.passes.support.facts import RESHAPES, bytes_of, is_pointwise, operand, producer, sliced
from optdnn.passes.support.parts import PARTS
from optdnn.passes.support.paths import repeated
from optdnn.types import normalize_axis

ALIGNED = 8
"""Parts whose size is a multiple of this many elements are read and written in place."""
MOST_PARTS = 4
LEAST_GATED = 1 << 20
"""Bytes of a gated result from which parts pay. H100: MambaOut-tiny at batch 8 545 -> 507 us; femto at batch 1, whose results have
less, 201.6 -> 203.5."""


class PointwiseOfParts(Rule):
    """An op of constants and a Concat of pointwise ops becomes an op of each part, which is fused with the part.

    One part may be another result: then the op is computed for this part instead of the whole."""

    name = "pointwise_of_parts"

    def __init__(self, joins: Callable[[Graph, Op], bool] = lambda graph, one: True):
        self.joins = joins
        """Whether a part and the op may become one op."""

    def match(self, graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
        if not context.on_gpu or not is_pointwise(op) or op.kind == "Pointwise" or op.outputs[0].known is not None:
            return None
        computed = [v for v in op.inputs if v is not None and graph.constant_value(v) is None]
        concat = graph.op(computed[0]) if len(computed) == 1 else None
        if concat is None or concat.kind != "Concat" or graph.type(concat.value).shape != op.outputs[0].type.shape:
            return None
        if graph.sole_user(concat.value) is None:
            return Miss(f"{concat.name} is read elsewhere")
        shape, parts = graph.type(concat.value).dims, [v for v in concat.inputs if v is not None]
        axis = normalize_axis(concat.attrs.axis, len(shape)) - len(shape)
        constants = [a for v in op.inputs if (a := graph.constant_value(v)) is not None]
        alike = all(a.size == 1 for a in constants)  # then each element is computed alike
        others = list(self._others(graph, parts, alike))
        if len(others) > 1:
            return Miss(f"more than one part of {concat.name} is not the result of a pointwise op for it alone")
        widths = [d for v in parts if isinstance(d := graph.type(v).dims[axis], int)]
        if len(widths) < len(parts):
            return Miss("the widths of its parts are not known")

        def build(patch: Patch) -> Value:
            ends, made = list(accumulate(widths)), []
            for part, width, end in zip(parts, widths, ends, strict=True):
                given = [_constant_part(graph, patch, v, axis, end - width, end) for v in op.inputs]
                view = producer(graph, part, RESHAPES, alone=True) if alike else None  # it moves behind the op
                own = part if view is None else operand(view)
                y = patch.add(op.kind, [own if v == concat.value else v for v in given], op.attrs)
                made.append(
                    y if view is None else patch.add(view.kind, [y, *view.inputs[1:]], view.attrs, src=view.src)
                )
            return patch.add("Concat", made, concat.attrs, src=concat.src)

        return Match((op, concat), build)

    def _others(self, graph: Graph, parts: Sequence[Value], views: bool) -> Iterator[Op]:
        """The parts that no pointwise op computes for them alone. Parts of parts count each (``views``: also of a Reshape)."""
        for part in parts:
            one = graph.op(part)
            alone = graph.sole_user(part) is not None
            if alone and (one.kind == "Concat" or (views and one.kind in RESHAPES)):
                inner = one.inputs if one.kind == "Concat" else one.inputs[:1]
                yield from self._others(graph, [v for v in inner if v is not None], views)
            elif not (alone and is_pointwise(one) and self.joins(graph, one)):
                yield one


@rule("gated_parts")
def gated_parts(graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
    """An op of a Concat and a gate is computed with each part and its part of the gate, if a part is a view of another tensor.

    The Concat would copy such a part. MambaOut (Yu and Wang, 2024) filters some channels, joins them with the others, and
    multiplies a gate."""
    t = op.outputs[0].type
    if not context.on_gpu or not is_pointwise(op) or op.kind == "Pointwise" or len(op.inputs) != 2 or not t.is_static:
        return None
    slot = next((k for k, v in enumerate(op.inputs) if v is not None and graph.op(v).kind == "Concat"), None)
    if slot is None or any(v is None or graph.type(v).shape != t.shape for v in op.inputs):
        return None
    concat, gate = graph.op(operand(op, slot)), operand(op, 1 - slot)
    parts = [v for v in concat.inputs if v is not None]
    if graph.constant_value(gate) is not None or not any(graph.op(v).kind in PARTS for v in parts):
        return None
    if graph.sole_user(concat.value) is None:
        return Miss(f"{concat.name} is read elsewhere")
    if context.counted(bytes_of(graph, op.value)) < LEAST_GATED:
        return Miss("a copy of its few elements takes no longer than launches for its parts")
    if any(is_pointwise(user) for user in graph.users(op.value)):
        return None  # one launch computes both
    axis = normalize_axis(concat.attrs.axis, len(t.dims))
    ends = list(accumulate(graph.type(v).static_shape[axis] for v in parts))
    if len(parts) > MOST_PARTS or any(end * math.prod(t.static_shape[axis + 1 :]) % ALIGNED for end in ends):
        return Miss(f"{concat.name} has many parts, or parts that kernels cannot write in place")
    chain = _unary_chain(graph, gate)

    def build(patch: Patch) -> Value:
        made = []
        for part, begin, end in zip(parts, [0, *ends], ends, strict=False):
            own = sliced(patch, operand(chain[-1]) if chain else gate, begin, end, axis)
            own = repeated(patch, own, chain)
            made.append(patch.add(op.kind, [part, own] if slot == 0 else [own, part], op.attrs))
        return patch.add("Concat", made, concat.attrs, src=concat.src)

    return Match((op, concat, *chain), build)


def _unary_chain(graph: Graph, value: Value) -> list[Op]:
    """The pointwise ops of one tensor and of constant numbers that compute ``value`` for it alone, the last one first."""
    chain: list[Op] = []
    while graph.sole_user(value) is not None:
        op = graph.op(value)
        numbers = [graph.constant_value(v) for v in op.inputs[1:] if v is not None]
        if op.kind == "Pointwise" or not is_pointwise(op) or not all(a is not None and a.size == 1 for a in numbers):
            break
        if graph.type(operand(op)).shape != op.outputs[0].type.shape:
            break
        chain.append(op)
        value = operand(op)
    return chain


def _constant_part(graph: Graph, patch: Patch, value: Value | None, axis: int, begin: int, end: int) -> Value | None:
    """The part of a constant operand that belongs to this part of the result. ``axis`` counts from the end."""
    array = None if value is None else graph.constant_value(value)
    if array is None or array.ndim < -axis or array.shape[axis] == 1:
        return value
    taken = np.take(array, range(begin, end), axis)
    return patch.constant(taken, "part")
