"""Loops that only append to sequences of tensors: the sequences become results that the iterations stack.

All other values that an iteration takes from the previous one are counters. Values that follow from counters are known for each
iteration; the body looks them up by the iteration's number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, Protocol

import numpy as np
import onnx

from optdnn.errors import RunError
from optdnn.importers.emitter import Emitter, Weight
from optdnn.ir.body import GraphBody
from optdnn.ir.counters import counters, number_of_iterations, result
from optdnn.ir.graph import Graph, Value
from optdnn.ops.base import Body, Known
from optdnn.ops.exchange import Stacking
from optdnn.ops.gather import GatherAttrs
from optdnn.ops.sequences import TensorList
from optdnn.types import BOOL, INT64, Array, TensorType

_OWN = (TensorType(INT64, ()), TensorType(BOOL, ()))
"""The first inputs that a Loop feeds its body: the number of the iteration, and the condition."""


class LoopBody(Protocol):
    """The body of a Loop at its position in the model."""

    @property
    def proto(self) -> onnx.GraphProto: ...

    @property
    def seen(self) -> Mapping[str, Any]:
        """The values inside of the body that was built last, by name."""

    def build(self, types: Sequence[TensorType]) -> tuple[Body, list[Any]]: ...

    def variant(self, proto: onnx.GraphProto, tables: Mapping[str, Array]) -> LoopBody: ...


def stacking(body: LoopBody, operands: Sequence[Any], e: Emitter) -> Stacking | None:
    """See ``ops.exchange.Subgraph``. Raises Unsupported and ShapeError for a graph that cannot be a body."""
    lists = [k for k, v in enumerate(operands) if isinstance(v, TensorList)]
    plain = without_lists(body.proto, lists)
    carried = [v for v in operands[2:] if not isinstance(v, TensorList)]
    if plain is None or any(operands[k] for k in lists) or any(e.type(v).shape != () for v in carried):
        return None
    first = body.variant(plain, {})
    built, captured = first.build([*_OWN, *map(e.type, carried)])
    assert isinstance(built, GraphBody)
    values = [None if v is None else e.value(v) for v in (*operands[:2], *carried, *captured)]
    given = [known for v, known in zip(operands[:2], values, strict=False) if v is not None]
    if any(known is None or known.dtype == object for known in given):
        return None
    trips = _trips(built.graph, len(carried), values)
    tables = _tables(built.graph, first.seen, plain, len(carried), values, trips) if trips else None
    if trips is None or tables is None:
        return None
    last = [tables[v.name][-1] for v in plain.output[1 : 1 + len(carried)]]
    rest = _without_counters(plain, len(carried), tables)
    tables |= _gathered(rest, first.seen, built.graph, tables)
    again, captured = body.variant(rest, {x: tables[x] for x in sorted(_reads(rest) & set(tables))}).build(_OWN)
    return Stacking(again, captured, trips, last)


def without_lists(body: onnx.GraphProto, lists: Sequence[int]) -> onnx.GraphProto | None:
    """A copy of a Loop's body without its inputs at ``lists``: sequences to which the body only appends one tensor each.

    These tensors are its last outputs. None if the body uses one of these sequences in any other way. It may make sequences of its
    own (``chunk``), and read those from outside.
    """
    proto = onnx.GraphProto()
    proto.CopyFrom(body)
    for at in lists:
        held, grown = body.input[at].name, body.output[at - 1].name
        inserts = [n for n in body.node if n.op_type == "SequenceInsert" and list(n.output) == [grown]]
        if len(inserts) != 1 or len(inserts[0].input) != 2 or inserts[0].input[0] != held:
            return None
        proto.node.remove(inserts[0])
        proto.output.append(onnx.ValueInfoProto(name=inserts[0].input[1]))
    for at in sorted(lists, reverse=True):
        del proto.input[at], proto.output[at - 1]
    gone = {v.name for at in lists for v in (body.input[at], body.output[at - 1])}
    return None if _reads(proto) & gone else proto


def nodes_of(graph: onnx.GraphProto) -> int:
    """The number of a graph's nodes, including the nodes of its subgraphs."""
    return len(graph.node) + sum(nodes_of(a.g) for n in graph.node for a in n.attribute if a.HasField("g"))


def looked_up(e: Emitter, table: Array, iteration: Value) -> Any:
    """The row of a table for an iteration; a constant if all rows are equal."""
    return e.const(table[0]) if (table == table[0]).all() else e.op("Gather", [table, iteration], GatherAttrs(0))[0]


def _trips(body: Graph, carried: int, values: Sequence[Known | None]) -> int | None:
    """How often a Loop runs its body, if that depends on counters only.

    ``values``: the known values of the Loop's operands: trip count, condition, carried values, captured ones.
    """
    most, first = (None if v is None else v.reshape(-1)[0] for v in values[:2])
    if first is not None and not first:
        return 0
    needed = counters(body, carried, [result(body, 0)])
    found = None if needed is None else needed.iterations(lambda place: values[place])
    return None if found is None else number_of_iterations(found, None if most is None else int(most))


def _tables(
    body: Graph,
    seen: Mapping[str, Any],
    proto: onnx.GraphProto,
    carried: int,
    values: Sequence[Known | None],
    trips: int,
) -> dict[str, Array] | None:
    """The values inside of a body that follow from counters, for each iteration; None if a carried value does not follow."""
    own = {v.name for v in (*proto.input[2:], *proto.output[1 : 1 + carried])}
    names = [x for x in dict.fromkeys([*sorted(own), *(x for n in proto.node for x in n.output)]) if x in seen]

    def known(place: int) -> Known | None:
        return values[place]

    followed = []
    for x in names:
        needed = counters(body, carried, [seen[x]]) if isinstance(seen[x], Value) else None
        if needed is not None and needed.iterations(known) is not None:
            followed.append(x)
    needed = counters(body, carried, [seen[x] for x in followed])
    found = None if needed is None or not own <= {*followed} else needed.iterations(known)
    if found is None:
        return None
    try:
        rows = list(islice(found, trips))
    except RunError:
        return None
    columns = zip(followed, zip(*rows, strict=True), strict=True)
    return {x: np.stack(column) for x, column in columns if len({v.shape for v in column}) == 1}


def _without_counters(body: onnx.GraphProto, carried: int, tables: Mapping[str, Array]) -> onnx.GraphProto:
    """A copy of a body without its carried values, without the nodes whose results are known, and without a condition."""
    proto = onnx.GraphProto()
    proto.CopyFrom(body)
    del proto.input[2:], proto.output[1 : 1 + carried], proto.node[:]
    proto.node.extend(n for n in body.node if not {x for x in n.output if x} <= set(tables))
    proto.output[0].name = proto.input[1].name
    return proto


def _gathered(
    proto: onnx.GraphProto, seen: Mapping[str, Any], body: Graph, tables: Mapping[str, Array]
) -> dict[str, Array]:
    """Make each Slice with known bounds and the same length in all iterations a Gather. Returns the tables of their indices.

    A Slice between bounds that are looked up would have an unknown size.
    """
    indices = {}
    for n in proto.node:
        source, axis = (seen.get(n.input[0]), _axis(n, seen, body)) if n.op_type == "Slice" else (None, None)
        if axis is None or not isinstance(source, Value) or not {*n.input[1:3]} <= set(tables):
            continue
        dims, starts, ends = body.type(source).shape, tables[n.input[1]], tables[n.input[2]]
        if dims is None or not isinstance(size := dims[axis], int) or starts.shape[1:] != (1,):
            continue
        rows = [range(size)[start:end] for start, end in zip(starts[:, 0].tolist(), ends[:, 0].tolist(), strict=True)]
        if len({len(row) for row in rows}) == 1:
            indices[name := f"{n.output[0]}.indices"] = np.array(rows, np.int64)
            n.op_type, n.input[:] = "Gather", [n.input[0], name]
            n.attribute.append(onnx.helper.make_attribute("axis", axis))
    return indices


def _axis(node: onnx.NodeProto, seen: Mapping[str, Any], body: Graph) -> int | None:
    """The axis of a Slice along one axis with step 1; None if it has others, or if they are not known."""
    found: list[int | None] = []
    for name, default in zip([*node.input[3:], "", ""], (0, 1), strict=False):
        if not name:
            found.append(default)
            continue
        ref = seen.get(name)
        known = ref.array if isinstance(ref, Weight) else body.constant_value(ref) if isinstance(ref, Value) else None
        found.append(int(known[0]) if known is not None and known.shape == (1,) else None)
    axis, step = found
    return axis if step == 1 else None


def _reads(graph: onnx.GraphProto) -> set[str]:
    """The values that a graph's nodes and the nodes of its subgraphs read, and its outputs."""
    found = {x for n in graph.node for x in n.input} | {v.name for v in graph.output}
    return found.union(*(_reads(a.g) for n in graph.node for a in n.attribute if a.HasField("g")))
