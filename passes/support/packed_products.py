"""Packs the constant weights of products that a plan puts in w4, w8 or w4a8: each MatMul and Gemm becomes a PackedMatMul.

In w4a8 the product may also round the rows that it multiplies, even if the model itself has packed weights. Everything else of the
operator (its data, its stages) is computed in the plan's float precision.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np

from optdnn.config import ROUNDED_ROWS
from optdnn.ir.constant_cache import ConstantCache
from optdnn.ir.graph import STRUCTURAL, Graph, Op, Value
from optdnn.ops.base import Stage
from optdnn.ops.packed_layout import PackedMatMulAttrs
from optdnn.passes.base import Fired, Moments, PassReport, Refused, node_names
from optdnn.passes.rules.split_prologue import split_prologue
from optdnn.passes.support.block_rounding import BLOCK, LARGEST, packed_floats
from optdnn.passes.support.compensated_rounding import compensated_floats
from optdnn.passes.support.facts import operand
from optdnn.passes.support.packed import PackedArrays
from optdnn.passes.support.precision import WEIGHTED, PrecisionPlan, asks_packed, key, no_rounded_rows
from optdnn.target_name import TargetName
from optdnn.types import BF16, FP16, FP32, Array, DType, dtype_name

BITS = {"w4": 4, "w8": 8, ROUNDED_ROWS: 4}
_WITH_FLOATS = {"uint4": "w4", "uint8": "w8"}
"""Code of packed weights -> the precision of a product of floats with these weights."""
LEAST = 4096
"""Weights with fewer elements stay floats: packing them gains nothing."""
_ARITY = 4
"""The number of operands of a PackedMatMul without those of its stages."""


@dataclass
class PackedProducts:
    """``packed``: op key -> precision of its packed weights. ``refused``: op key -> why its weights stay floats, or why it does not
    round rows."""

    packed: dict[str, str]
    refused: dict[str, str]


def pack_products(
    graph: Graph,
    plan: PrecisionPlan,
    report: PassReport,
    kept: ConstantCache,
    moments: Moments | None,
    target: str,
) -> PackedProducts:
    """Pack the weights of every product that ``plan`` puts in w4, w8 or w4a8.

    Weights are rounded to the nearest number. With ``moments``, they are rounded so that their errors compensate each other on the
    calibration data. In w4a8, products may round rows if ``target`` can. Refusals are also added to ``report``."""
    found = PackedProducts({}, {})
    asked = {op.id: plan.of(op) for op in graph.order() if op.kind not in STRUCTURAL and asks_packed(graph, plan, op)}
    packed_before = [i for i, p in asked.items() if p == ROUNDED_ROWS and graph.op(i).kind == "PackedMatMul"]
    for i in packed_before:
        _round_packed(graph, graph.op(i), plan, target, found, report)
        del asked[i]
    reasons = {i: why for i in asked if (why := why_not_packed(graph, graph.op(i))) is not None}
    able = asked.keys() - reasons.keys()
    reasons |= {i: why for i in able if (why := read_as_floats(graph, graph.op(i), able)) is not None}
    chosen = [i for i in asked if i not in reasons]
    for i, reason in reasons.items():
        op = graph.op(i)
        found.refused[key(op)] = reason
        report.refused.append(Refused(asked[i], node_names([op]), f"{op.kind} keeps floats: {reason}"))
    for i in chosen:
        if graph.op(i).attrs.prologue:
            split_prologue(graph, graph.op(i))
    for i, seen in _with_moments(graph, chosen, moments):
        op = graph.op(i)
        _pack(graph, op, BITS[asked[i]], _activations(op, plan), kept, seen)
        precision = asked[i]
        if precision == ROUNDED_ROWS and not _let_round(graph, graph.op(i), plan, target, found, report):
            precision = "w4"
        found.packed[key(op)] = precision
        report.fired.append(Fired(precision, node_names([op])))
    return found


def _round_packed(
    graph: Graph, op: Op, plan: PrecisionPlan, target: str, found: PackedProducts, report: PassReport
) -> None:
    """Carry out w4a8 for a product whose weights the model itself has packed."""
    if _let_round(graph, op, plan, target, found, report):
        found.packed[key(op)] = ROUNDED_ROWS
        report.fired.append(Fired(ROUNDED_ROWS, node_names([op])))
    elif op.attrs.code in _WITH_FLOATS:
        found.packed[key(op)] = _WITH_FLOATS[op.attrs.code]


def _let_round(
    graph: Graph, op: Op, plan: PrecisionPlan, target: str, found: PackedProducts, report: PassReport
) -> bool:
    """Let a PackedMatMul round the rows that it multiplies. If it must not, record the reason and return False."""
    reason = _why_not_rounded(op, plan, target)
    if reason is None:
        graph.set_op(replace(op, attrs=replace(op.attrs, rounded_rows=True)))
        return True
    found.refused[key(op)] = reason
    report.refused.append(Refused(ROUNDED_ROWS, node_names([op]), f"{op.kind} rounds no rows: {reason}"))
    return False


def _why_not_rounded(op: Op, plan: PrecisionPlan, target: str) -> str | None:
    """The reason why a PackedMatMul must not round the rows that it multiplies, or None."""
    if op.attrs.code != "uint4":
        return f"its packed weights are {op.attrs.code}, not uint4"
    dtype = _activations(op, plan)
    if TargetName.parse(target).on_gpu and dtype not in (FP16, BF16):
        return f"kernels round rows of 16-bit floats, not {dtype_name(dtype)}"
    return no_rounded_rows(target)


def _with_moments(graph: Graph, chosen: Sequence[int], moments: Moments | None) -> Iterator[tuple[int, Array | None]]:
    """The ids of ``chosen`` products, each with the second moments of its operand (None without calibration data)."""
    if moments is None:
        yield from ((i, None) for i in chosen)
        return
    readers: dict[Value, list[int]] = {}
    for i in chosen:
        readers.setdefault(operand(graph.op(i)), []).append(i)
    if readers:
        for value, seen in moments(graph.copy(), list(readers)):  # a copy: the caller changes the graph between values
            yield from ((i, seen) for i in readers[value])


def why_not_packed(graph: Graph, op: Op) -> str | None:
    """The reason why the weights of an op stay floats, or None."""
    if op.kind not in WEIGHTED:
        return f"{op.kind} has no form with packed weights"
    weights = graph.constant_value(op.input(1))
    if weights is None:
        return "its weights are not constant"
    if weights.ndim != 2:
        return f"its weights have {weights.ndim} axes, not 2"
    if weights.dtype not in (FP32, FP16, BF16):
        return f"its weights are {weights.dtype}"
    if weights.size < LEAST:
        return f"its weights are {weights.size} numbers: packing fewer than {LEAST} gains nothing"
    if op.kind == "Gemm" and (op.attrs.transA or op.attrs.alpha != 1.0 or op.attrs.beta != 1.0):
        return "a Gemm with alpha, beta or a transposed A has no form with packed weights"
    if not float(np.abs(weights).max()) <= LARGEST:
        return f"its weights are not finite, or larger than {LARGEST:g}"
    return None


def read_as_floats(graph: Graph, op: Op, able: set[int]) -> str | None:
    """The reason why packing would save no memory: an op outside of ``able`` reads the weights as floats. Else None."""
    weights = operand(op, 1)
    for use in graph.uses(weights):
        if use.op not in able or use.slot != 1:
            reader = graph.op(use.op)
            return f"{reader.name} ({reader.kind}) reads its weights as floats"
    return None


def _activations(op: Op, plan: PrecisionPlan) -> DType:
    """The dtype of a product's data after ``assign_precision``."""
    own = op.outputs[0].type.dtype
    return {"fp16": FP16, "bf16": BF16}.get(plan.base, own) if own == FP32 else own


def _pack(graph: Graph, op: Op, bits: int, dtype: DType, kept: ConstantCache, seen: Array | None) -> None:
    """Replace a product by a PackedMatMul. ``seen``: the second moments of its operand, or None."""
    weights = graph.constant_value(op.input(1))
    assert weights is not None
    arrays = _packed(weights, bool(op.kind == "Gemm" and op.attrs.transB), bits, dtype, kept, seen)
    name, src = graph.output(operand(op, 1)).name, graph.op(operand(op, 1)).src
    constants = [
        graph.add_constant(array, f"{name}/{what}", src)
        for array, what in ((arrays.weights, "packed"), (arrays.scales, "scales"), (arrays.zeros, "zeros"))
        if array is not None
    ]
    stages, more = _stages(op)
    attrs = PackedMatMulAttrs(arrays.code, arrays.K, arrays.block_size, epilogue=stages)
    old = operand(op, 1)
    graph.set_op(replace(op, kind="PackedMatMul", attrs=attrs, inputs=(op.inputs[0], *constants, *more)))
    graph.remove_dead([old.op])


def _packed(
    weights: Array, across: bool, bits: int, dtype: DType, kept: ConstantCache, seen: Array | None
) -> PackedArrays:
    """Packed weights from ``weights``: [N, K] if ``across``, else [K, N]. Without moments ``seen``, all plans share the result."""
    rows = weights if across else weights.T
    if seen is not None:
        return compensated_floats(rows, seen, bits, dtype)
    make = cache(partial(packed_floats, rows, bits, dtype))

    def stored(name: str) -> Array:
        array: Array = kept.once(
            ("packed floats", name, bits, across, dtype.name), [weights], lambda: getattr(make(), name)
        )
        return array

    K = weights.shape[1 if across else 0]
    return PackedArrays(stored("weights"), stored("scales"), stored("zeros"), f"uint{bits}", K, min(BLOCK, K))


def _stages(op: Op) -> tuple[tuple[Stage, ...], Sequence[Value | None]]:
    """The epilogue of the packed product, in which a Gemm's bias is the first stage, and the operands of the stages."""
    arity = op.definition.arity or 0
    stages, bias = op.attrs.epilogue, op.input(2) if op.kind == "Gemm" else None
    if bias is None:
        return _shifted(stages, _ARITY - arity, 0), op.inputs[arity:]
    first = Stage("Add", (-1, _ARITY))
    return (first, *_shifted(stages, _ARITY + 1 - arity, 1)), (bias, *op.inputs[arity:])


def _shifted(stages: Sequence[Stage], operands: int, registers: int) -> tuple[Stage, ...]:
    """Stages with their operand slots and registers shifted."""

    def slot(a: int | None) -> int | None:
        return a if a is None else a + operands if a >= 0 else a - registers

    return tuple(replace(s, args=tuple(map(slot, s.args))) for s in stages)
