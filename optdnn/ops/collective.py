"""``AllReduce`` and ``AllGather``: exchanges between the ranks of a tensor-parallel network.

A *rank* is one of the ``world`` copies of a network that run together, one per GPU. All ranks run the same operators on the
same shapes, each with its own part of the weights. Every rank gets the same result from a collective.

    AllReduce(x) -> the sum over all ranks of x, added in the order of the ranks
    AllGather(x) -> the x of all ranks side by side along ``axis``, in the order of the ranks

Models contain them as ONNX Runtime's ``com.microsoft.AllReduce`` and ``AllGather``, or as TensorRT's ``DistCollective``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from optdnn.errors import ShapeError
from optdnn.ops.base import MOVEMENT, Attrs, Call, Cost, Result, Unsupported, same_type
from optdnn.ops.checks import elements, floating, free, needs
from optdnn.ops.definition import OpDef
from optdnn.ops.exchange import Emit, Export, NodeSpec, Ref
from optdnn.types import normalize_axis

WORLD_LIMIT = 64
"""Most ranks."""
COLLECTIVES = ("AllReduce", "AllGather")
"""The kinds that every rank must run in the same order."""


@dataclass(frozen=True)
class AllReduceAttrs(Attrs):
    """``world``: the number of ranks."""

    world: int


@dataclass(frozen=True)
class AllGatherAttrs(Attrs):
    """``axis``: the axis along which the parts are concatenated, counted from the front; ``world``: the number of ranks."""

    world: int
    axis: int = 0


def _reduced(call: Call) -> Result:
    floating(call)
    return same_type(call)


def _gathered(call: Call) -> Result:
    x, a = call.type(0), call.attrs
    if x.shape is None:
        return Result((x,))
    if not 0 <= a.axis < len(x.dims):
        raise ShapeError(f"AllGather along axis {a.axis} of {x}")
    dims = list(x.dims)
    dims[a.axis] = dims[a.axis] * a.world
    return Result((x.with_shape(tuple(dims)),))


def _world(node: NodeSpec, name: str) -> int:
    world = int(node.get(name, 1))
    if not 1 <= world <= WORLD_LIMIT:
        raise ShapeError(f"{node.op_type} has {name} {world}; it must be 1 to {WORLD_LIMIT}")
    return world


def _reduce(node: NodeSpec, e: Emit, world: int) -> Sequence[Ref]:
    return e.op("AllReduce", node.inputs[:1], AllReduceAttrs(world)) if world > 1 else node.inputs[:1]


def _gather(node: NodeSpec, e: Emit, world: int, axis: int) -> Sequence[Ref]:
    (x,) = needs(node, 0)
    rank = e.type(x).rank
    if rank is None:
        raise Unsupported("an operand of unknown rank")
    return e.op("AllGather", (x,), AllGatherAttrs(world, normalize_axis(axis, rank))) if world > 1 else (x,)


def _import_reduce(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    return _reduce(node, e, _world(node, "group_size"))


def _import_gather(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    return _gather(node, e, _world(node, "group_size"), int(node.get("axis", 0)))


def _import_collective(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    """TensorRT's DistCollective: sums and gathers of all ranks."""
    operation, reduction = (str(node.get(name, "")).upper() for name in ("collective_operation", "reduce_op"))
    if len(node.ints("groups", ()) or ()):
        raise Unsupported("groups of some ranks; collectives are of all ranks")
    world = _world(node, "nb_rank" if "nb_rank" in node.attrs else "group_size")
    if operation == "ALL_REDUCE" and reduction == "SUM":
        return _reduce(node, e, world)
    if operation == "ALL_GATHER":
        return _gather(node, e, world, 0)
    raise Unsupported(
        f"collective_operation {operation} with reduce_op {reduction}; ALL_REDUCE with SUM and ALL_GATHER are"
    )


def _export(kind: str) -> Any:
    def to_onnx(attrs: Any, inputs: Sequence[str], n_outputs: int, e: Export) -> Sequence[str]:
        more = {"axis": attrs.axis} if kind == "AllGather" else {}
        return e.node(kind, inputs, domain="com.microsoft", group_size=attrs.world, **more)

    return to_onnx


DEFS: tuple[OpDef, ...] = (
    OpDef(
        "AllReduce",
        _reduced,
        AllReduceAttrs,
        {"com.microsoft.AllReduce": _import_reduce, "DistCollective": _import_collective},
        _export("AllReduce"),
        cost=lambda call, result: Cost((call.attrs.world - 1) * elements(call.type(0))),
    ),
    OpDef(
        "AllGather",
        _gathered,
        AllGatherAttrs,
        {"com.microsoft.AllGather": _import_gather},
        _export("AllGather"),
        cost=free,
        traits=MOVEMENT,
    ),
)
