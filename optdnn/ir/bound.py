"""A graph of symbolic sizes at given sizes, so that passes rewrite it once for all sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace

from optdnn.errors import InternalError, ShapeError
from optdnn.ir.graph import Graph, Op, Output
from optdnn.ops.base import KNOWN_LIMIT, Body


def bound(graph: Graph, shapes: Mapping[str, tuple[int, ...]]) -> Graph:
    """A copy of the graph for inputs of these shapes (by name); all other types and the known values are inferred again.

    The graph must have no layouts and no bodies (:func:`has_bodies`). Raises ShapeError if sizes contradict, InternalError
    for an input without a shape.
    """
    made = graph.copy()
    made.profiles = ()
    for op in made.order():
        if op.kind != "Constant":
            try:
                made.set_op(replace(op, outputs=_outputs(made, op, shapes)))
            except ShapeError as error:
                raise ShapeError(f"{op.name} ({op.kind}): {error.message}", hint=error.hint) from error
    return made


def has_bodies(graph: Graph) -> bool:
    """Whether an operator holds graphs of its own."""
    return any(isinstance(getattr(op.attrs, f.name), Body) for op in graph.ops() for f in fields(op.attrs))


def _outputs(graph: Graph, op: Op, shapes: Mapping[str, tuple[int, ...]]) -> tuple[Output, ...]:
    if op.kind == "Input":
        (out,) = op.outputs
        if out.name not in shapes:
            raise InternalError(f"input {out.name!r} has no shape")
        return (replace(out, type=replace(out.type, shape=tuple(shapes[out.name]))),)
    found = graph.infer(op)
    values = found.values or (None,) * len(op.outputs)
    return tuple(
        Output(o.name, replace(o.type, shape=t.shape), v if v is not None and v.size <= KNOWN_LIMIT else None)
        for o, t, v in zip(op.outputs, found.types, values, strict=False)
    )
