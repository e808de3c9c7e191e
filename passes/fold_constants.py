"""Ops whose results are known when the network is built become constants.

An op is folded if all operands are constants, or if inference already knows its value. (A shape computation over static
dimensions, ``Shape -> Gather -> Concat -> Reshape``, leaves a Reshape by a constant.) Arithmetic runs in float64 and is rounded
once, at the end of a chain of folded ops. A Cast of the model rounds in between. An op that is not continuous (a cast to
integers, a comparison) is computed in the network's own types. Otherwise a value on the edge, as in T5's buckets of distances,
could fall to the other side because it was computed more exactly.
"""

from __future__ import annotations

import numpy as np

from optdnn.errors import RunError
from optdnn.ir.evaluate import promoted_attrs
from optdnn.ir.graph import STRUCTURAL, Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.fused import plain_attrs
from optdnn.passes.base import Fired, Pass, PassContext, PassReport, Refused, node_names
from optdnn.passes.integers import holds_integers
from optdnn.passes.support.facts import bytes_of
from optdnn.passes.support.folding_budget import MOST_TRIPS, FoldingBudget
from optdnn.passes.support.packed import Packable, packable
from optdnn.runtime.reference.run import run_kernel
from optdnn.types import DTYPES, FP64, Array, is_float


class FoldConstants(Pass):
    """One sweep in topological order; the shapes that folding an op reveals reach the ops after it.

    These are not folded:

    - Results over ``PassContext.fold_limit_bytes`` that are larger than their operands: a filled or expanded tensor is cheaper to
      compute than to store.
    - Positions of random numbers over ``DRAWN_LIMIT``.
    - Weights that can stay packed.
    - Ops that reject their operands: an index out of range stays a failure at run time.
    - The DequantizeLinear of constant weights whose user reads another DequantizeLinear: it marks the weights as integers.
    """

    name = "fold_constants"

    def run(self, graph: Graph, context: PassContext, report: PassReport) -> None:
        exact: dict[Value, Array] = {}
        """Unrounded float64 values of the constants of this run."""
        budget = FoldingBudget()
        own: dict[Value, Array] = {}
        """The same constants computed in the network's own types, rounded after each op. Only small constants."""
        for visited in graph.order():
            if visited.kind in STRUCTURAL or visited.id not in graph:
                continue
            op = graph.op(visited.id)
            known = _inferred(op)
            constant = all(v is None or graph.op(v).kind == "Constant" for v in op.inputs)
            if not constant and all(v is None for v in known):
                continue
            reason = _refusal(graph, op, context) or budget.refusal(graph, op)
            values: list[Array | None] = known
            if reason is None and constant:
                try:
                    values = list(_decided(graph, op, own) or _compute(graph, op, exact))
                except RunError as error:
                    reason = f"it cannot be evaluated: {error.message}"
            if reason is not None:
                report.refused.append(Refused(self.name, node_names([op]), reason))
                continue
            rounded = _in_own_types(graph, op, own) if constant else None
            made = self._replace(graph, op, values, exact, report)
            own.update({new: rounded[i] for i, new in made.items() if rounded is not None and new in exact})

    def _replace(
        self, graph: Graph, op: Op, values: list[Array | None], exact: dict[Value, Array], report: PassReport
    ) -> dict[int, Value]:
        """Replace an op's results by constants. Returns output number -> constant."""
        patch, made = Patch(graph, [op]), dict[int, Value]()
        for i, value in enumerate(values):
            if value is None or not graph.uses(Value(op.id, i)):
                continue
            dtype = op.outputs[i].type.dtype
            new = patch.constant(value.astype(dtype), op.outputs[i].name)
            patch.replace(Value(op.id, i), new)
            if value.dtype == FP64 != dtype:
                exact[new] = value
            made[i] = new
        if made:
            patch.apply()
            report.fired.append(Fired(self.name, node_names([op])))
            for v in [v for v in op.inputs if v in exact and v.op not in graph]:
                exact.pop(v, None)
        return made


DECIDES = frozenset(
    {
        *("Floor", "Ceil", "Round", "Sign", "Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"),
        *("ArgMax", "ArgMin", "TopK"),
    }
)
"""Kinds that are not continuous. A Cast to integers is not either, see :func:`_decided`."""
DRAWN_LIMIT = 1 << 16
"""Most bytes of positions (uint32, as :mod:`optdnn.importers.draw_nodes` makes them) whose random numbers become constants."""
OWN_LIMIT = 1 << 20
"""Most elements of a result that is also computed in the network's own types."""


def _decided(graph: Graph, op: Op, own: dict[Value, Array]) -> tuple[Array, ...] | None:
    """The results of an op that is not continuous, from operands in the network's own types; None for other ops."""
    jumps = op.kind in DECIDES or (op.kind == "Cast" and not is_float(op.attrs.to))
    return _in_own_types(graph, op, own) if jumps and any(v in own for v in op.inputs if v is not None) else None


def _in_own_types(graph: Graph, op: Op, own: dict[Value, Array]) -> tuple[Array, ...] | None:
    """The results in the network's own types; None if they are large, or if no operand and no result is a float."""
    types = [o.type for o in op.outputs]
    small = all(t.is_static and np.prod(t.static_shape, dtype=np.int64) <= OWN_LIMIT for t in types)
    read = [graph.type(v) for v in op.inputs if v is not None]
    if not small or not any(is_float(t.dtype) for t in (*read, *types)):
        return None
    operands = [None if v is None else own.get(v, graph.op(v).attrs.value) for v in op.inputs]
    return run_kernel(
        op.kind, operands, plain_attrs(op.definition, op.attrs), [t.dtype for t in types], most_trips=MOST_TRIPS
    )


def _inferred(op: Op) -> list[Array | None]:
    """The value of each output, if inference knows it and it has no symbols."""
    return [o.known if o.known is not None and o.known.dtype != object else None for o in op.outputs]


def _refusal(graph: Graph, op: Op, context: PassContext) -> str | None:
    if op.kind == "DequantizeLinear" and holds_integers(graph, op):
        return "it holds the integer weights of a quantized operator"
    if op.kind == "DequantizeLinear" and isinstance(packable(graph, op), Packable):
        return "its weights stay packed"
    if not all(o.type.is_static for o in op.outputs):
        return None
    nbytes = sum(bytes_of(graph, v) for v in op.values)
    read = sum(bytes_of(graph, v) for v in op.inputs if v is not None and graph.type(v).is_static)
    if nbytes > max(read, DRAWN_LIMIT) and op.outputs[0].type.dtype == DTYPES["uint32"]:
        return "random numbers of these positions are cheaper to compute than to store"
    if nbytes > context.fold_limit_bytes and nbytes > read:
        return f"its result of {nbytes / 1e6:.1f} MB is over the bound of {context.fold_limit_bytes / 1e6:.1f} MB for folding"
    return None


def _compute(graph: Graph, op: Op, exact: dict[Value, Array]) -> tuple[Array, ...]:
    """The outputs; floating ones in float64, not yet rounded (a Cast rounds to the type it names).

    An op that only moves data moves it in its own type: that is exact, and large weights are not widened for it.
    """
    if op.definition.traits.own_precision:
        own = [None if v is None else _own(graph, v, exact) for v in op.inputs]
        return run_kernel(
            op.kind,
            own,
            plain_attrs(op.definition, op.attrs),
            [o.type.dtype for o in op.outputs],
            most_trips=MOST_TRIPS,
        )
    moves = op.definition.traits.movement and not any(v in exact for v in op.inputs if v is not None)
    operands: list[Array | None] = []
    for v in op.inputs:
        value = None if v is None else exact.get(v, graph.op(v).attrs.value)
        widen = value is not None and is_float(value.dtype) and not moves
        operands.append(value.astype(FP64) if value is not None and widen else value)
    attrs = op.attrs if moves else promoted_attrs(op.attrs)
    dtypes = [FP64 if is_float(o.type.dtype) and not moves else o.type.dtype for o in op.outputs]
    results = run_kernel(op.kind, operands, plain_attrs(op.definition, attrs), dtypes, most_trips=MOST_TRIPS)
    if op.kind == "Cast":
        results = tuple(r.astype(op.attrs.to) for r in results)
    return results


def _own(graph: Graph, value: Value, exact: dict[Value, Array]) -> Array:
    """A constant in its own type, from its unrounded value where there is one."""
    array: Array = exact.get(value, graph.op(value).attrs.value)
    return array.astype(graph.type(value).dtype, copy=False)
