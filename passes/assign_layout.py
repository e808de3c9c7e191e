"""Values in channels-last order are chosen for the whole network at once, with conversions where the order changes.

Tensor cores read channels as the innermost axis: a convolution in plain order pays for two conversions inside the library. Other
operators run in either order, or exist in plain order only. The pass chooses an order for each op so that the total cost is
minimal. This is a minimum cut: ops in plain order are on the source's side, ops in channels-last order on the sink's side, and an
arc stands for each value that would be converted. One conversion serves all users that need it.

Axes stay in ONNX's logical order; only :attr:`TensorType.layout` changes. So this pass belongs to a target's pipeline, and no
later pass may rewrite by type only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from optdnn.errors import InternalError
from optdnn.ir.cut import minimum_cut
from optdnn.ir.graph import STRUCTURAL, Graph, Op, Use, Value
from optdnn.ops.conv import of_one_channel
from optdnn.ops.layout import LayoutAttrs
from optdnn.passes.base import Fired, Pass, PassContext, PassReport, Refused
from optdnn.passes.fuse_siblings import LAUNCH_BYTES
from optdnn.passes.support.facts import (
    RESHAPES,
    bytes_of,
    channels_from_last,
    channels_to_last,
    operand,
    reduction_axes,
    set_operand,
    shape_of,
    sizes_of,
)

CHANNELS_LAST = {3: "nwc", 4: "nhwc", 5: "ndhwc"}
"""Rank -> name of the channels-last layout."""

PREFER = frozenset({"Conv", "ConvTranspose", "QuantizedConv"})
"""Kinds that run on tensor cores, in channels-last order."""

EITHER = frozenset(
    {
        *("MaxPool", "AveragePool", "LpPool", "Resize"),
        *("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool", "QuantizedMean"),
        *("BatchNormalization", "InstanceNormalization", "GroupNormalization", "LRN", "Softmax", "LogSoftmax"),
        *("Concat", "Split", "Slice", "Pad", "Identity", "DepthToSpace", "SpaceToDepth", "GridSample", "RoiAlign"),
        *("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceL1", "ReduceL2", "ReduceSumSquare"),
    }
)
"""Kinds, besides the pointwise ones, that run in either order at the same cost; the result has the operand's order."""

ARG = frozenset({"ArgMax", "ArgMin"})
"""Kinds that read either order and have a result in plain order. Reductions that drop axes do the same."""

READ_AS_VIEWS = frozenset({"Attention", "LpNormalization"})
"""Kinds that read a Transpose as a view: they take any strides."""
SAMPLED = frozenset({"GridSample", "SampledSum"})
"""Kinds that read images with any strides."""

ONE_IMAGE = 3
"""Most operands of a SampledSum with one image: the image, the sampling positions, the weights."""
_ALL_OPERANDS = frozenset({"Concat"})
_PLAIN, _LAST = "plain", "channels last"
Side = object
"""A node of the cut: an op that may run in either order, the source (plain) or the sink (channels last)."""


@dataclass(frozen=True)
class Sides:
    """The order in which an op reads its operands, and the order of its results: one unknown, two unknowns, or fixed."""

    reads: Side
    writes: Side


class AssignLayout(Pass):
    """Runs only for GPUs, and only on graphs without layouts."""

    name = "assign_layout"

    def run(self, graph: Graph, context: PassContext, report: PassReport) -> None:
        if not context.on_gpu or any(o.type.layout for op in graph.ops() for o in op.outputs):
            return
        sides = {op.id: _sides(graph, op) for op in graph.order()}
        if not any(op.kind in PREFER and sides[op.id].reads is not _PLAIN for op in graph.ops()):
            return
        # With row_invariant, only bytes count, which grow alike with the batch.
        launch = 0 if context.row_invariant else LAUNCH_BYTES
        _, last = minimum_cut(_arcs(graph, sides, launch), _PLAIN, _LAST)
        chosen = {i: Sides(s.reads in last, s.writes in last) for i, s in sides.items()}
        wanted = _conversions(graph, chosen)
        for op in graph.order():
            self._assign(graph, op, sides[op.id], chosen[op.id], report)
        for value, to_last, uses in wanted:
            self._convert(graph, value, to_last, uses, sides, report)

    @staticmethod
    def _assign(graph: Graph, op: Op, side: Sides, chosen: Sides, report: PassReport) -> None:
        nodes = tuple(sorted(op.src)) or (op.outputs[0].name,)
        if chosen.writes:
            outputs = tuple(replace(o, type=replace(o.type, layout=_name(o.type.rank))) for o in op.outputs)
            graph.set_op(replace(op, outputs=outputs))
        if chosen.writes or chosen.reads:
            report.fired.append(Fired("channels_last", nodes))
        elif op.kind in PREFER and side.reads is not _PLAIN:
            reason = "converting its operand and result would cost as much as channels-last order gains"
            report.refused.append(Refused("channels_last", nodes, reason))
        elif op.kind in PREFER:
            report.refused.append(Refused("channels_last", nodes, f"its result has {_rank(op)} axes, not 3 to 5"))

    @staticmethod
    def _convert(
        graph: Graph, value: Value, to_last: bool, uses: list[Use], sides: dict[int, Sides], report: PassReport
    ) -> None:
        t, users = graph.type(value), [graph.op(u.op) for u in uses]
        src: frozenset[str] = frozenset().union(*(u.src for u in users)) or graph.op(value).src
        layout = _name(t.rank) if to_last else ""
        name = f"{graph.output(value).name}.{layout or 'plain'}"
        new = graph.add("Layout", [value], LayoutAttrs(layout), names=[name], src=src)
        for use in uses:
            set_operand(graph, use, new.value)
        nodes = tuple(sorted(src)) or (graph.output(value).name,)
        if _is_view(graph, value):
            report.fired.append(Fired("view", nodes))
            return
        report.fired.append(Fired("convert", nodes))
        forcing = graph.op(value) if to_last else min(users, key=lambda u: sides[u.id].reads is not _PLAIN)
        fixed = (sides[forcing.id].writes if to_last else sides[forcing.id].reads) is _PLAIN
        report.refused.append(
            Refused("convert", nodes, f"{_why(forcing, fixed)}: {bytes_of(graph, value) / 1e6:.2f} MB")
        )


def _why(op: Op, fixed: bool) -> str:
    if op.kind in ("Input", "Output"):
        return f"{op.outputs[0].name} is an {op.kind.lower()} of the network, which has ONNX's order"
    return f"{op.kind} has no channels-last form" if fixed else f"{op.kind} costs less in plain order"


def _rank(op: Op) -> int:
    return op.outputs[0].type.rank or 0


def _name(rank: int | None) -> str:
    if rank not in CHANNELS_LAST:
        raise InternalError(f"there is no channels-last order of {rank} axes")
    return CHANNELS_LAST[rank]


# ---------------------------------------------------------------- the orders of each op


def _sides(graph: Graph, op: Op) -> Sides:
    """Which orders an op can read and write."""
    if op.kind in STRUCTURAL:
        return Sides(_PLAIN, _PLAIN)
    own: Side = op.id
    if op.kind == "Transpose":
        to_last, from_last = _permutations(op)
        if to_last and from_last:  # with three axes the permutations are equal: one side stays plain
            to_last = not (from_last := _feeds_convolution(graph, op))
        return Sides(own if to_last or _turns_positions(op) else _PLAIN, own if from_last else _PLAIN)
    if op.kind == "Conv" and (weight := shape_of(graph, operand(op, 1))) is not None and of_one_channel(weight):
        return Sides(
            _PLAIN, _PLAIN
        )  # it does not run on tensor cores: padding its channel would only cost memory traffic
    first, rank = op.input(0), op.outputs[0].type.rank
    pointwise = op.definition.traits.pointwise
    free = first is not None and (pointwise or op.kind in PREFER or op.kind in EITHER)
    ranked = rank in CHANNELS_LAST and all(o.type.rank == rank for o in op.outputs)
    if _drops_axes(graph, op):
        reads = own if graph.type(operand(op)).rank in CHANNELS_LAST else _PLAIN
        return Sides(reads, (op.id, "result") if _keeps_channels(graph, op) else _PLAIN)
    if _keeps_positions(graph, op):
        return Sides(own, own)
    indices = op.kind == "MaxPool" and len(op.outputs) > 1  # indices count elements in plain order
    return Sides(own, own) if free and ranked and not indices else Sides(_PLAIN, _PLAIN)


def _drops_axes(graph: Graph, op: Op) -> bool:
    """Whether ``op`` reads one tensor in either order, and its result has other axes, in plain order."""
    if op.input(0) is None:
        return False
    return (
        op.kind in ARG
        or op.kind == "DynamicRange"
        or (op.kind == "SampledSum" and len(op.inputs) <= ONE_IMAGE)
        or (op.kind in EITHER and op.kind.startswith("Reduce") and graph.type(operand(op)).rank != _rank(op))
    )


def _keeps_channels(graph: Graph, op: Op) -> bool:
    """Whether a reduction drops positions alone. Its kernels store results in either order, whatever they read."""
    axes = reduction_axes(graph, op) if op.kind in EITHER and op.kind.startswith("Reduce") else None
    return bool(axes) and min(axes or ()) > 1 and _rank(op) in CHANNELS_LAST


def _keeps_positions(graph: Graph, op: Op) -> bool:
    """Whether a Reshape divides or joins axes of positions alone: it is a view in either order."""
    if op.kind not in RESHAPES:
        return False
    before, after = shape_of(graph, operand(op)), shape_of(graph, op.value)
    if before is None or after is None or len(before) not in CHANNELS_LAST or len(after) not in CHANNELS_LAST:
        return False
    return before[:2] == after[:2]


def _feeds_convolution(graph: Graph, op: Op) -> bool:
    """Whether a kind that prefers channels-last order reads the result, directly or after pointwise operators."""
    users, seen = list(graph.users(op.value)), set[int]()
    while users:
        user = users.pop()
        if user.kind in PREFER:
            return True
        if user.id in seen or user.kind in STRUCTURAL:
            continue
        seen.add(user.id)
        if user.definition.traits.pointwise or _keeps_channels(graph, user) or _keeps_positions(graph, user):
            users += graph.users(user.value)
    return False


def _permutations(op: Op) -> tuple[bool, bool]:
    """Whether a Transpose puts channels last (on a channels-last value it moves nothing), or back to the second axis."""
    perm, rank = tuple(op.attrs.perm or ()), op.outputs[0].type.rank
    if rank not in CHANNELS_LAST or len(perm) != rank:
        return False, False
    return perm == channels_to_last(rank), perm == channels_from_last(rank)


def _turns_positions(op: Op) -> bool:
    """Whether a Transpose puts channels last and exchanges positions: it copies, from either order."""
    perm, rank = tuple(op.attrs.perm or ()), op.outputs[0].type.rank
    return rank in CHANNELS_LAST and perm[:1] == (0,) and perm[-1] == 1 and perm != channels_to_last(rank)


def _follows(graph: Graph, op: Op, slot: int) -> bool:
    """Whether an op that can run in either order reads this operand in its own order; otherwise it reads plain order."""
    value = op.inputs[slot]
    if slot == 0 and (_drops_axes(graph, op) or _keeps_positions(graph, op)):
        return True
    if value is None or graph.type(value).rank != _rank(op):
        return False
    arity = op.definition.arity
    if op.definition.traits.pointwise or op.kind in _ALL_OPERANDS or slot == 0:
        return True
    return arity is not None and slot >= arity  # an operand of a fused stage


def _uses(graph: Graph, sides: dict[int, Sides]) -> Iterator[tuple[Value, list[tuple[Use, Side]]]]:
    """Every computed value that may be in either order, with the order in which each use reads it."""
    for op in graph.order():
        if op.kind in ("Constant", "Output"):  # constants are stored in the order that their users read
            continue
        for port, out in enumerate(op.outputs):
            if out.type.rank not in CHANNELS_LAST:
                continue
            value = Value(op.id, port)
            found: list[tuple[Use, Side]] = []
            for use in graph.uses(value):
                user = graph.op(use.op)
                if _takes_windows(graph, use):
                    continue  # it reads both orders, and a plain one would be turned later
                free = user.kind not in STRUCTURAL and (user.kind == "Transpose" or _follows(graph, user, use.slot))
                found.append((use, sides[user.id].reads if free else _PLAIN))
            yield value, found


def _turns_matrices(graph: Graph, use: Use) -> bool:
    """Whether a product of two computed tensors reads a sequence. It reads channels-last order in place, as turned matrices."""
    op = graph.op(use.op)
    if op.kind != "MatMul" or use.slot > 1 or graph.type(operand(op, use.slot)).rank != 3:
        return False
    return graph.constant_value(operand(op, 1 - use.slot)) is None


def _takes_windows(graph: Graph, use: Use) -> bool:
    """Whether a use takes windows of images by constant indices, and their channels are then moved to the last axis."""
    op, axis = graph.op(use.op), 1
    if op.kind != "Gather" or use.slot != 0:
        return False
    while op.kind in ("Gather", "Reshape"):
        shape, dims = sizes_of(graph, operand(op)), sizes_of(graph, op.value)
        if shape is None or dims is None or 0 in shape:
            return False
        if op.kind == "Gather" and (graph.constant_value(op.inputs[1]) is None or op.attrs.axis <= axis):
            return False
        if op.kind == "Reshape":  # the innermost part of the channels
            after = math.prod(shape[axis + 1 :])
            inner = (i for i, n in enumerate(dims) if n != 1 and math.prod(dims[i + 1 :]) == after)
            if (found := next(inner, None)) is None or shape[axis] % dims[found]:
                return False
            axis = found
        users = graph.users(op.value)
        if len(users) != 1:
            return False
        op = users[0]
    return op.kind == "Transpose" and (op.attrs.perm or (axis + 1,))[-1] == axis


# ---------------------------------------------------------------- costs


def _is_view(graph: Graph, value: Value) -> bool:
    """Whether both orders are the same in memory: one channel, or one position."""
    dims = graph.type(value).dims
    return dims[1] == 1 or all(d == 1 for d in dims[2:])


def _takes_view(graph: Graph, op: Op) -> bool:
    """Whether an op reads the result of a Transpose as a view, itself or through a Reshape that only divides axes (heads and rows
    of deformable attention at batch 1)."""
    if op.kind in READ_AS_VIEWS:
        return True
    before, after = sizes_of(graph, operand(op)), sizes_of(graph, op.value)
    if op.kind not in RESHAPES or before is None or after is None or not _divides(before, after):
        return False
    return all(user.kind in SAMPLED for user in graph.users(op.value))


def _divides(before: Sequence[int], after: Sequence[int]) -> bool:
    """Whether a Reshape joins no axes: any strides of its operand give strides of its result."""
    rest = [n for n in after if n != 1]
    for size in before:
        part = 1
        while part < size and rest:
            part *= rest.pop(0)
        if part != size:
            return False
    return not rest


def _conversion(graph: Graph, value: Value, launch: int) -> int:
    """The cost of a conversion. At one position, it only breaks ties: an operator has the order of its neighbors, a quantization
    that of the operator before it, whose launch may compute it. One channel is free: plain images of it have no gaps."""
    if _is_view(graph, value):
        return 0 if graph.type(value).dims[1] == 1 else graph.type(value).dtype.itemsize
    return 2 * bytes_of(graph, value) + launch


def _arcs(graph: Graph, sides: dict[int, Sides], launch: int) -> Iterator[tuple[object, object, float]]:
    """The arcs of the cut, their capacities in bytes moved (a launch counts as ``launch``)."""
    for op in graph.order():
        own, first = sides[op.id], op.input(0)
        if first is None or own.reads is _PLAIN is own.writes:
            continue
        if op.kind in PREFER:
            moved = bytes_of(graph, first) + bytes_of(graph, op.value)
            yield own.reads, _LAST, 2 * moved + 2 * launch
        elif op.kind == "GroupNormalization":
            # In plain order, its general kernel is slower by several launches.
            yield own.reads, _LAST, launch or bytes_of(graph, first)
        elif (
            op.kind == "Transpose"
            and not _turns_positions(op)
            and not all(_takes_view(graph, user) for user in graph.users(op.value))
        ):
            yield (own.writes if own.reads is _PLAIN else own.reads), _LAST, _conversion(graph, first, launch)
    for value, uses in _uses(graph, sides):
        writes, cost = sides[value.op].writes, _conversion(graph, value, launch)
        others = [side for use, side in uses if side is not writes and not _turns_matrices(graph, use)]
        if not cost or not others:
            continue
        # Paid once if the value is plain and any user wants it channels last, and the other way round.
        yield writes, (value, "to last"), cost
        yield (value, "to plain"), writes, cost
        for side in others:
            yield (value, "to last"), side, math.inf
            yield side, (value, "to plain"), math.inf


def _conversions(graph: Graph, chosen: dict[int, Sides]) -> list[tuple[Value, bool, list[Use]]]:
    """The values to convert, whether to channels-last order or to plain order, and the uses that read the converted value."""
    found: list[tuple[Value, bool, list[Use]]] = []
    for value, uses in _uses(graph, chosen):
        here = chosen[value.op].writes is True
        there = [use for use, side in uses if (side is True) != here]
        if there:
            found.append((value, not here, there))
    return found
