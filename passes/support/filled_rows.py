"""Pads that fill up rows, whose number depends on data, to a known number."""

from __future__ import annotations

import numpy as np

from optdnn.dim import Dim, bounds
from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.index import PadAttrs
from optdnn.passes.support.facts import operand
from optdnn.passes.support.rows import Rows, zero


def fills_up(graph: Graph, op: Op) -> bool:
    """Whether ``op`` is a Pad at the end of an axis whose size depends on data, up to a known size."""
    known, rank = graph.known(op.input(1)), len(op.outputs[0].type.dims)
    if op.attrs.mode != "constant" or not op.outputs[0].type.is_static or op.input(3) is not None or known is None:
        return False
    pads, dims = known.reshape(-1).tolist(), graph.type(operand(op)).dims
    moved = [k for k in range(rank) if isinstance(dims[k], Dim)]
    return len(moved) == 1 and all(bounds(p)[0] >= 0 if k == rank + moved[0] else p == 0 for k, p in enumerate(pads))


def filled_up(patch: Patch, pad: Op, value: Value, size: Value, rows: Rows) -> Value:
    """The result of a Pad: elements of ``value`` before ``size`` along the rows' axis, and the Pad's value after them."""
    t, wanted = patch.type(value), pad.outputs[0].type.dims[rows.axis]
    there = t.dims[rows.axis]
    assert isinstance(wanted, int)
    assert isinstance(there, int)
    filler = pad.input(2)
    if filler is None:
        filler = zero(patch, t.dtype)
    dims = [1] * len(t.dims)
    dims[rows.axis] = wanted
    places = patch.constant(np.arange(wanted).reshape(dims), "places")
    missing = wanted - there
    if missing:
        pads = np.zeros(2 * len(dims), np.int64)
        pads[len(dims) + rows.axis] = missing
        value = patch.add("Pad", [value, patch.constant(pads, "pads")], PadAttrs(), src=pad.src)
    return patch.add("Where", [patch.add("Less", [places, size], src=pad.src), value, filler], src=pad.src)
