"""The attributes of control flow, and bodies with types that hold in every iteration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from optdnn.dim import Dim, DimLike
from optdnn.errors import ShapeError
from optdnn.ops.base import Attrs, Body
from optdnn.ops.exchange import NodeSpec, Ref, Subgraph
from optdnn.types import TensorType


@dataclass(frozen=True)
class IfAttrs(Attrs):
    """Operands: the condition, the ``then_captured`` outer values of the then branch, and the outer values of the else branch."""

    then_branch: Body
    else_branch: Body
    then_captured: int


@dataclass(frozen=True)
class LoopAttrs(Attrs):
    """Operands: trip count, condition, ``carried`` initial values, captured values. Results: final values, scan outputs."""

    body: Body
    carried: int


@dataclass(frozen=True)
class ScanAttrs(Attrs):
    """Operands: ``states`` initial states, scanned inputs, captured values. A direction of 1 is backwards."""

    body: Body
    states: int
    scan_input_axes: tuple[int, ...]
    scan_input_directions: tuple[int, ...]
    scan_output_axes: tuple[int, ...]
    scan_output_directions: tuple[int, ...]


def symbols(types: Sequence[TensorType | None]) -> set[str]:
    found: set[str] = set()
    for t in types:
        for d in (t.shape or ()) if t is not None else ():
            if isinstance(d, Dim):
                found.update(s.name for s in d.symbols())
    return found


def subgraph(node: NodeSpec, name: str) -> Subgraph:
    found: Subgraph = node.attrs[name]
    return found


def build_body(
    graph: Subgraph,
    before: Sequence[TensorType],
    state: Sequence[TensorType],
    after: Sequence[TensorType],
    first: int,
    *,
    keeps_shapes: bool = False,
) -> tuple[Body, list[Ref]]:
    """The body for state types that hold in every iteration: a size that an iteration changes becomes a symbol.

    The body's inputs are ``before``, the state, ``after``; its state outputs begin at ``first``. Raises ShapeError if an
    iteration changes a type, or (with ``keeps_shapes``) a shape.
    """
    types, varying = list(state), set[Dim]()
    while True:  # each round but the last turns a size into a symbol or a shape into an unknown one
        body, captured = graph.build([*before, *types, *after])
        made = body.outputs[first : first + len(types)]
        for t, m in zip(types, made, strict=False):
            if keeps_shapes and not t.agrees(m):
                raise ShapeError(f"a carried value begins as {t}, and the body turns it into {m}")
        wider = [_wider(t, m, graph, varying) for t, m in zip(types, made, strict=False)]
        if wider == types[: len(wider)]:
            return body, captured
        types[: len(wider)] = wider


def _wider(t: TensorType, made: TensorType, graph: Subgraph, varying: set[Dim]) -> TensorType:
    if t.dtype != made.dtype:
        raise ShapeError(f"a carried value begins as {t}, and the body turns it into {made}")
    if t.shape is None or made.shape is None or len(t.shape) != len(made.shape):
        return t.with_shape(None)
    dims: list[DimLike] = []
    for d, m in zip(t.shape, made.shape, strict=True):
        if d != m and d not in varying:
            d = graph.fresh()
            varying.add(d)
        dims.append(d)
    return t.with_shape(dims)
