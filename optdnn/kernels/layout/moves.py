"""Launches of moves: a copy of one tensor, or one launch that joins small tensors in another."""

from __future__ import annotations

import math
from collections.abc import Sequence

from optdnn.kernels.builder import Builder, Move, TensorView
from optdnn.kernels.index.index_kernel import coordinates, emit_index_kernel
from optdnn.kernels.pointwise.expressions import CPP
from optdnn.kernels.pointwise.pointwise import copy

MOST_ELEMENTS = 1 << 16
"""Most elements that one launch joins: one or two blocks per multiprocessor, with one element per thread."""
MOST_PARTS = 16
"""Most tensors that one launch joins: their sizes and strides are its parameters."""


def joinable(parts: Sequence[TensorView]) -> bool:
    """Whether one launch may join all of these tensors."""
    same = all(x.dtype == parts[0].dtype for x in parts) and parts[0].dtype in CPP
    return same and len(parts) <= MOST_PARTS and sum(math.prod(x.shape) for x in parts) <= MOST_ELEMENTS


def emit_move(b: Builder, move: Move) -> None:
    """Add the launch of a move."""
    op, out, axis = move.op, move.target, move.axis
    if len(move.sources) == 1:
        copy(b, op, move.sources[0], out)
        return
    rank, at, cases = len(out.shape), 0, []
    for k, x in enumerate(move.sources):
        inside = coordinates(rank, {axis: f"o{axis} - {at}"})
        at += x.shape[axis]
        cases.append(f"if (o{axis} < {at}) p.y[place] = p.x{k}[at_x{k}({inside})];")
    lines = f"const i64 place = at_y({coordinates(rank)});\n        " + "\n        else ".join(cases)
    tensors = {f"x{k}": x for k, x in enumerate(move.sources)}
    emit_index_kernel(
        b, op, out.shape, tensors, {"y": out}, lines, reads=move.sources, meaning=("Concat", {"axis": axis})
    )
