"""Products in tf32 whose factors fit fp16 read them in fp16, at twice the rate and with half of the bytes.

tf32 and fp16 have the same 11 significant bits; fp16 has a smaller range. So nothing is lost where the range of the factors is
known to suffice for every input: rows that come from a normalization, directly or by way of other products, activations and
attention (:mod:`optdnn.passes.support.magnitudes`). In a transformer these are all rows of products. Sums, biases, residuals and
norms stay fp32. A result that only such products and attention read is stored in fp16: they would round it anyway.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from optdnn.ir.constant_cache import ConstantCache
from optdnn.ir.graph import Graph, Op, Output, Value
from optdnn.ops.base import Stage, renumbered
from optdnn.ops.binary import CastAttrs
from optdnn.passes.base import Fired, Pass, PassContext, PassReport, Refused, node_names
from optdnn.passes.support.facts import NORMS, VIEWS, is_pointwise, operand
from optdnn.passes.support.guards import Guards
from optdnn.passes.support.in_registers import in_registers
from optdnn.passes.support.magnitudes import magnitudes
from optdnn.passes.support.precision import key
from optdnn.passes.support.products import PRODUCTS
from optdnn.passes.support.rounded_constants import RoundedConstants
from optdnn.passes.support.stages import reads_tensor
from optdnn.target_name import HOPPER, TargetName
from optdnn.types import BF16, BOOL, FP16, FP32, Array, is_float, normalize_axis

MOST, LEAST = 6e4, 0.25
"""Bounds of rows. If no element can reach the second one, many may be below fp16's normal numbers, which begin at 2^-14."""
LEAST_WEIGHT = 2.0**-14
"""The least root mean square of a column of weights: smaller numbers of fp16 have fewer than 11 bits."""
UNIT = 8
"""Rows of 16-bit floats have a multiple of so many elements: 16 bytes."""
LOST_OF_MASK = 2.0**-9
"""The most that rounding may change a mask. Rounded queries and keys change scores of about 8 as much."""
MASKED = 32.0
"""Numbers of a mask that are so much less than the largest one of their row leave no weight, rounded or not."""
MOVES = VIEWS | {"DepthToSpace", "Gather", "Slice", "SpaceToDepth", "Split"}


class HalfFactors(Pass):
    """Runs after the assignment of precisions, which decides on tf32. Only on Hopper: its kernels have fp32 results."""

    name = "half_factors"

    def run(self, graph: Graph, context: PassContext, report: PassReport) -> None:
        found = [
            op for op in graph.of_kind(*PRODUCTS, "Attention") if op.attrs.factors == "tf32" and _is_fp32(graph, op)
        ]
        if not found or (TargetName.parse(context.target).arch or HOPPER) != HOPPER:
            return
        chosen = _Choice(graph).of(found, report)
        converted = _Rewrite(graph, chosen, context.kept).run()
        if context.precision_log is not None:
            context.precision_log.converted |= {key(graph.op(i)) for i in converted}
        report.fired += [Fired("half_factors", node_names([op])) for op in chosen.values()]


def _is_fp32(graph: Graph, op: Op) -> bool:
    return {graph.type(v).dtype for v in (*op.inputs[:2], op.value) if v is not None} == {FP32}


class _Choice:
    """Which products and attentions read fp16."""

    def __init__(self, graph: Graph):
        self.graph, self.bounds = graph, magnitudes(graph)
        self.chosen: dict[int, Op] = {}

    def of(self, found: list[Op], report: PassReport) -> dict[int, Op]:
        """Op id -> op. Refusals are added to the report."""
        reasons = {op.id: self._unfit(op) for op in found}
        self.chosen = {op.id: op for op in found if reasons[op.id] is None}
        before = -1
        while before != len(self.chosen):  # each choice rests on others
            before = len(self.chosen)
            for op in [*self.chosen.values()]:
                if (why := self._alone(op)) is not None:
                    reasons[op.id] = why
                    del self.chosen[op.id]
        refused = [(op, why) for op in found if (why := reasons[op.id]) is not None]
        report.refused += [Refused("half_factors", node_names([op]), why) for op, why in refused]
        return self.chosen

    def _unfit(self, op: Op) -> str | None:
        """Why the factors of an op do not fit fp16, or None."""
        for slot in _rows(self.graph, op):
            v = operand(op, slot)
            bound, name = self.bounds.get(v), self.graph.output(v).name
            if bound is None:
                return f"{name} has no known bound: fp16 ends at 65504"
            if not LEAST <= bound.most <= MOST:
                return f"{name} is known to be at most {bound.most:.3g}: fp16 is exact for bounds from {LEAST} to {MOST:.0f}"
        return _unfit_attention(self.graph, op) if op.kind == "Attention" else _unfit_product(self.graph, op)

    def _alone(self, op: Op) -> str | None:
        """Why an operand would be converted, or the result rounded, by an operator of its own; or None."""
        for slot in _rows(self.graph, op):
            path = _path(self.graph, operand(op, slot))
            made, name = self.graph.op(path[-1]), self.graph.output(path[-1]).name
            if made.kind not in NORMS and not is_pointwise(made) and made.id not in self.chosen:
                return f"{name} comes from a {made.kind}, which does not store fp16"
            if any(v is not None and self.graph.type(v).dtype == BF16 for v in made.inputs):
                return f"{name} comes from bf16, which its launch does not convert to fp16"
            if made.kind in NORMS and not _of_rows(self.graph, made):
                return f"{name} is normalized along several axes, by a launch that stores fp32"
            if made.kind in PRODUCTS and _reads_rows(self.graph, made) and gate(self.graph, made) is None:
                return f"the launch that makes {name} reads rows of fp32, and stores the same type"
            moved = path[:-1] if made.kind in NORMS else path  # a norm can store both
            if (wide := next((x for x in _parts(self.graph, moved) if not self._narrow(x)), None)) is not None:
                return f"{self.graph.output(wide).name} is read as fp32, too"
        if op.kind == "Attention":
            return None if self._narrow(op.value) else "its result is read as fp32"
        return self._half_of_unit(op)

    def _half_of_unit(self, op: Op) -> str | None:
        """Why only one product of a gated unit, or its result, would be fp16; or None. One launch of one type computes both."""
        user = self.graph.sole_user(op.value)
        last = user if user is not None and op in _factors(self.graph, user) else op
        first = next(_factors(self.graph, last), None)
        if first is None:
            return None
        if (
            first != gate(self.graph, last)
            or first.id not in self.chosen
            or last.id not in self.chosen
            or not self._narrow(last.value)
        ):
            return f"one launch computes it and the other product of the gated unit, whose result {last.outputs[0].name} is fp32"
        bound = self.bounds.get(first.value)
        return None if bound is not None and bound.most <= MOST else f"{first.outputs[0].name} may exceed fp16"

    def _narrow(self, value: Value) -> bool:
        """Whether all readers of a value read fp16."""
        uses = self.graph.uses(value)
        return bool(uses) and all(self._reads_half(self.graph.op(use.op), use.slot) for use in uses)

    def _reads_half(self, user: Op, slot: int) -> bool:
        if user.id in self.chosen:
            return slot in _rows(self.graph, user)
        return user.kind in MOVES and slot == 0 and all(self._narrow(v) for v in user.values)


def _rows(graph: Graph, op: Op) -> tuple[int, ...]:
    """The slots of the factors that are not constant: queries, keys and values, or the rows of a product."""
    if op.kind == "Attention":
        return 0, 1, 2
    return (1,) if op.kind == "MatMul" and graph.constant_value(op.inputs[0]) is not None else (0,)


def gate(graph: Graph, op: Op) -> Op | None:
    """The other product of the same rows that the last stage of a product multiplies by (a gated linear unit), or None."""
    return next(_factors(graph, op, last=True), None)


def _factors(graph: Graph, op: Op, *, last: bool = False) -> Iterator[Op]:
    """The other products of the same rows that the stages of a product multiply by. ``last``: only its last stage counts."""
    stages = op.attrs.epilogue if op.kind in PRODUCTS else ()
    for stage in stages[-1:] if last else stages:
        for slot in stage.args if stage.kind == "Mul" else ():
            other = graph.op(operand(op, slot)) if slot is not None and slot >= 0 else op
            alike = other != op and other.kind in PRODUCTS and other.inputs[0] == op.inputs[0]
            if alike and graph.sole_user(other.value) == op:
                yield other


def _reads_rows(graph: Graph, op: Op) -> bool:
    """Whether a product adds or multiplies by a tensor of its result's shape, or by constant rows that differ."""
    slots = {a for stage in op.attrs.epilogue for a in stage.args if a is not None and a >= 0}
    given = [graph.constant_value(op.input(a)) for a in slots | ({2} if op.kind == "Gemm" else set())]
    rows = any(c is not None and c.ndim > 1 and 1 < c.shape[-1] < c.size for c in given)
    return rows or reads_tensor(graph, op)


def _of_rows(graph: Graph, norm: Op) -> bool:
    """Whether a normalization is one of rows along the last axis."""
    rank = graph.type(norm.value).rank
    return rank is not None and normalize_axis(norm.attrs.axis, rank) == rank - 1


def _path(graph: Graph, value: Value) -> list[Value]:
    """``value``, and the values before it whose elements views move."""
    path = [value]
    while graph.op(path[-1]).kind in MOVES:
        path.append(operand(graph.op(path[-1])))
    return path


def _parts(graph: Graph, path: Sequence[Value]) -> list[Value]:
    """These values, and the other results of the views that make them: a view has one type."""
    return [y for x in path for y in (graph.op(x).values if graph.op(x).kind in MOVES else (x,))]


def _unfit_product(graph: Graph, op: Op) -> str | None:
    first = _rows(graph, op) == (1,)  # the constant matrix is the first factor
    weight = graph.constant_value(op.inputs[0 if first else 1])
    if weight is None or weight.ndim != 2:
        return "none of its factors is a constant matrix"
    a = op.attrs
    if a.prologue or (op.kind == "Gemm" and (a.alpha != 1.0 or a.beta != 1.0 or a.transA)):
        return "it has a prologue or a factor, or its rows are transposed"
    transposed = first or (op.kind == "Gemm" and a.transB)
    columns, depth = weight.shape if transposed else weight.shape[::-1]
    sizes = graph.type(op.value).dims[-1:] if first else (columns, depth)
    if any(not isinstance(size, int) or size % UNIT for size in sizes):
        return f"its {' or '.join(map(str, sizes))} elements in a row are not a multiple of {UNIT}"
    lengths = np.sqrt(np.einsum("ij,ij->i" if transposed else "ij,ij->j", weight, weight))
    if not lengths.max(initial=0.0) <= MOST:
        return f"its weights are not within {MOST:.0f}"
    if ((lengths > 0) & (lengths < LEAST_WEIGHT * np.sqrt(depth))).any():
        return "fp16 rounds some of its weights more than tf32 does"
    return None


def _unfit_attention(graph: Graph, op: Op) -> str | None:
    if len([v for v in op.inputs if v is not None]) > 4 or len(op.outputs) > 1:
        return "it has a cache, or gives scores"
    widths = [graph.type(operand(op, slot)).dims[-1] for slot in range(3)]
    if any(not isinstance(width, int) or width % UNIT for width in widths):
        return f"its heads do not have a multiple of {UNIT} features"
    mask = op.input(3)
    if mask is None or graph.type(mask).dtype == BOOL:
        return None
    array = graph.constant_value(mask)
    if array is None:
        return "its mask is computed in fp32"
    within = op.attrs.is_causal or max(op.attrs.left_window_size, op.attrs.right_window_size) >= 0
    least = -np.inf if within else array.max(axis=-1, keepdims=True) - MASKED  # the largest one may be cut off
    near = array[np.isfinite(array) & (array >= least)]
    with np.errstate(over="ignore"):
        lost = np.abs(near.astype(FP16) - near).max(initial=0.0)
    return None if lost <= LOST_OF_MASK else "fp16 rounds its mask too much"


# ---------------------------------------------------------------- the rewrite


class _Rewrite:
    """Lets the chosen ops read fp16, and store fp16 what only they read."""

    def __init__(self, graph: Graph, chosen: Mapping[int, Op], kept: ConstantCache):
        self.graph, self.chosen, self.constants = graph, chosen, RoundedConstants(kept)
        self.gates = {op.id: other.value for op in chosen.values() if (other := gate(graph, op)) is not None}
        """Product -> the result of the other product of its gated unit."""
        self.half = {*self.gates.values()}
        """The values that become fp16."""
        for op in chosen.values():
            for slot in _rows(graph, op):
                self.half.update(_parts(graph, _path(graph, operand(op, slot))))
        self.casts: dict[Value, Value] = {}
        """The result of a norm or a pointwise op -> the same in fp16."""

    def run(self) -> set[int]:
        """Returns the ids of the pointwise ops that compute in fp32 and store fp16."""
        stored = {}
        for op in self.graph.order():
            if op.id in self.chosen:
                inputs = list(op.inputs)
                for slot in _rows(self.graph, op):
                    inputs[slot] = self.casts.get(operand(op, slot), operand(op, slot))
                self.graph.set_op(self._attention(op, inputs) if op.kind == "Attention" else self._product(op, inputs))
            elif self.half.isdisjoint(op.values):
                continue
            elif op.kind in MOVES:
                inputs = [self.casts.get(operand(op), operand(op)), *op.inputs[1:]]
                self.graph.set_op(replace(op, inputs=tuple(inputs), outputs=tuple(map(_narrowed, op.outputs))))
            else:
                name, stored[op.id] = f"{op.outputs[0].name}.float16", ""
                cast = self.graph.add("Cast", [op.value], CastAttrs(FP16), names=[name], src=op.src)
                self.casts[op.value] = cast.value
        return in_registers(self.graph, Guards(stored))

    def _attention(self, op: Op, inputs: list[Value | None]) -> Op:
        mask = None if len(inputs) < 4 else self.graph.constant_value(inputs[3])
        if mask is not None and is_float(mask.dtype):
            inputs[3] = self._constant(inputs[3], mask)
        attrs = replace(op.attrs, factors="fp16")
        return replace(op, inputs=tuple(inputs), attrs=attrs, outputs=(_narrowed(op.outputs[0]),))

    def _product(self, op: Op, inputs: list[Value | None]) -> Op:
        (rows,) = _rows(self.graph, op)
        weight = self.graph.constant_value(inputs[1 - rows])
        assert weight is not None
        inputs[1 - rows] = self._constant(inputs[1 - rows], weight)
        stages, bias = [Stage("Cast", (-1,), CastAttrs(FP32))], op.input(2) if op.kind == "Gemm" else None
        if bias is not None:
            inputs[2] = None
            inputs += [None] * ((op.definition.arity or 0) - len(inputs)) + [bias]
            stages.append(Stage("Add", (-2, len(inputs) - 1)))
        by, other = len(stages), self.gates.get(op.id)
        own = renumbered(op.attrs.epilogue, by)
        if other is not None:  # the last stage multiplies two numbers of fp16
            own[-1:] = [Stage("Cast", (-by - len(own),), CastAttrs(FP16)), *renumbered(own[-1:], 1)]
        elif op.value in self.half:
            own.append(Stage("Cast", (-1 - by - len(own),), CastAttrs(FP16)))
        out = _narrowed(op.outputs[0]) if op.value in self.half else op.outputs[0]
        attrs = replace(op.attrs, factors="fp16", epilogue=(*stages, *own))
        return replace(op, inputs=tuple(inputs), attrs=attrs, outputs=(out,))

    def _constant(self, value: Value | None, array: Array) -> Value:
        assert value is not None
        rounded = self.constants.rounded(array, FP16)[1]  # weights fit; the least numbers of a mask saturate
        return self.graph.add_constant(rounded, f"{self.graph.output(value).name}.float16")


def _narrowed(out: Output) -> Output:
    return Output(out.name, out.type.with_dtype(FP16), out.known)
