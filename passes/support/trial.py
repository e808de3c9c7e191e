"""A trial run of a network in NumPy, on generated inputs: how large its values are.

Values with a proven bound (:mod:`optdnn.passes.support.magnitudes`) need no run. The others are computed, which takes up to a few
seconds. If all rows of a batch are too much work (``TRIAL_FLOPS``, ``TRIAL_ELEMENTS``), the first ones are run. If one row is, the
network is not tried, and the report of the build says so.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

import numpy as np

from optdnn.errors import OptdnnError, RunError
from optdnn.ir.evaluate import random_feeds, values
from optdnn.ir.graph import STRUCTURAL, Graph, Op, Value
from optdnn.ops.base import Call, Result
from optdnn.ops.fused import flops
from optdnn.passes.support.magnitudes import magnitudes
from optdnn.passes.support.overflows import MARGIN
from optdnn.passes.support.precision_report import FP16_LARGEST
from optdnn.types import FP32, Array

TRIAL_FLOPS = 2e10
TRIAL_ELEMENTS = 2e8
"""At most this many operations, and elements of all results together, are tried."""
PRODUCTS = frozenset({"Attention", "Gemm", "MatMul"})
PRODUCT_FLOPS = 2.5
"""NumPy computes this many operations of a matrix product in the time of one operation of another operator."""
NOT_TRIED = frozenset({"Custom", "If", "Loop", "Scan"})
"""Kinds whose cost is not known."""


def largest_values(graph: Graph) -> Mapping[Value, float] | None:
    """The largest finite magnitude of each fp32 value that is read, for generated inputs, or its bound if that is within fp16's
    range; None if the network is not tried."""
    if not all(o.type.is_static for op in graph.ops() for o in op.outputs):
        return None
    if sum(math.prod(graph.op(i).outputs[0].type.static_shape) for i in graph.inputs) > TRIAL_ELEMENTS:
        return None
    feeds = random_feeds(graph, seed=1)
    found = _proven(graph, feeds)
    unknown = [v for v in _values(graph) if v not in found]
    needed = _ancestors(graph, unknown)
    share = _share(graph, needed)
    rows = next((len(a) for a in feeds.values() if a.ndim), 1)
    some = rows if share >= 1.0 else int(rows * share)
    if some == 0:
        return None
    if some < rows:
        if any(a.shape[:1] != (rows,) for a in feeds.values()):
            return None
        feeds = {name: a[:some] for name, a in feeds.items()}
    last = [v for v in unknown if not any(use.op in needed for use in graph.uses(v))]

    def note(v: Value, a: Array) -> None:
        if not a.size and 0 not in graph.type(v).static_shape:
            raise RunError(f"{graph.output(v).name} has none of its elements in the first rows")
        found[v] = _largest(a)

    def look(op: Op, operands: list[Array | None]) -> list[Array | None]:
        for v, a in zip(op.inputs, operands, strict=True):
            if v is not None and a is not None and a.dtype == FP32 and v not in found:
                note(v, a)
        return operands if some == rows else _of_rows(op, operands, rows, some)

    try:
        for v, a in zip(last, values(graph if some == rows else _resized(graph, some), feeds, last, look), strict=True):
            note(v, a)
    except OptdnnError:  # generated numbers are not always valid (positions, lengths), nor are some rows
        return None
    return found


def _values(graph: Graph) -> Iterator[Value]:
    """The fp32 values that are read."""
    for op in graph.ops():
        yield from (v for v in op.values if graph.type(v).dtype == FP32 and graph.use_count(v))


def _proven(graph: Graph, feeds: Mapping[str, Array]) -> dict[Value, float]:
    """The bounds of the fp32 values that are proven to be within fp16's range."""
    bounds = magnitudes(graph, feeds)
    known = {v: bound.most for v in _values(graph) if (bound := bounds.get(v)) is not None}
    return {v: most for v, most in known.items() if most * MARGIN <= FP16_LARGEST}


def _ancestors(graph: Graph, wanted: Collection[Value]) -> set[int]:
    """The ops that compute these values."""
    found = {v.op for v in wanted}
    for op in reversed(graph.order()):
        if op.id in found:
            found.update(v.op for v in op.inputs if v is not None)
    return found


def _share(graph: Graph, needed: Collection[int]) -> float:
    """The share of the work of these ops that is within the limits; 0 if the work is not known."""
    work = elements = 1.0
    for op in map(graph.op, needed):
        if op.kind in NOT_TRIED:
            return 0.0
        if op.kind in STRUCTURAL:
            continue
        types = [o.type for o in op.outputs]
        operands, known = graph.known_of(op.inputs)
        call = Call(op.kind, op.attrs, tuple(operands), tuple(known), len(op.outputs), graph.fresh_symbol)
        work += flops(op.definition, call, Result(tuple(types))) / (PRODUCT_FLOPS if op.kind in PRODUCTS else 1.0)
        elements += sum(math.prod(t.static_shape) for t in types)
    return min(TRIAL_FLOPS / work, TRIAL_ELEMENTS / elements)


def _resized(graph: Graph, rows: int) -> Graph:
    """A copy whose inputs have this many rows. The types of other values are not changed."""
    copy = graph.copy()
    for i in copy.inputs:
        op = copy.op(i)
        port = op.outputs[0]
        copy.set_op(replace(op, outputs=(replace(port, type=port.type.with_shape((rows, *port.type.dims[1:]))),)))
    return copy


def _of_rows(op: Op, operands: list[Array | None], rows: int, some: int) -> list[Array | None]:
    """The operands for the first rows of a batch: the sizes of a Reshape begin with their number."""
    sizes = operands[1] if op.kind == "Reshape" else None
    if sizes is None or not sizes.size or sizes[0] != rows:
        return operands
    return [operands[0], np.array([some, *sizes[1:]], sizes.dtype)]


def _largest(a: Array) -> float:
    """The largest finite magnitude."""
    size = np.abs(a)
    return float(np.max(size, where=np.isfinite(size), initial=0.0))
