"""Positions in images and tables: their arithmetic stays in fp32, because at 1,000 pixels fp16 has steps of half a pixel.

A network computes positions from its inputs, from integers and from the predictions of a layer. Only the layer rounds to fp16.

Positions in tables are integers that a network rounds from floats: cells of a grid (Instant-NGP), gathered pixels, buckets. The
operators that compute these floats stay in fp32. So do their distances from the integers: they are interpolation weights.
"""

from __future__ import annotations

from collections.abc import Iterator

from optdnn.ir.graph import STRUCTURAL, Graph, Op, Value
from optdnn.passes.support.facts import is_pointwise, shape_of
from optdnn.types import is_float

SAMPLES = frozenset({"GridSample", "MaxRoiPool", "RoiAlign", "SampledSum"})
"""Kinds that sample images: operand 1 holds positions, and so does every second operand after it (each follows an image)."""
CARRIES = frozenset({"AffineGrid", "CumSum", "ReduceSum"})
"""Kinds that compute positions from positions, besides pointwise ops, ops that only move elements and products of short rows."""
INDEXED = frozenset({"Gather", "GatherElements", "GatherND", "ScatterElements", "ScatterND"})
"""Kinds whose operand 1 holds positions in a table."""
ROUNDS = frozenset({"Ceil", "Floor", "Mod", "Round"})
SHORT = 4
"""Most elements of a row in a product that transforms positions: homogeneous coordinates."""


def coordinates(graph: Graph) -> dict[int, str]:
    """Op id -> the reason to stay fp32, for operators that compute positions in images or tables."""
    found: dict[int, str] = {}
    for op in graph.of_kind(*SAMPLES):
        name = op.outputs[0].name
        for positions in op.inputs[1::2]:
            for i in _chain(graph, positions):
                found.setdefault(i, f"it computes positions that {op.kind} {name} reads")
    return found | _moved(graph, found) | _indices(graph)


def _moved(graph: Graph, found: dict[int, str]) -> dict[int, str]:
    """As :func:`coordinates`, for sums that move positions, and for distances from positions.

    RAFT (Teed and Deng, 2020) computes its flow as a moved position minus the pixel's position. The flow is small, and fp16 would
    round the position by a large fraction of a pixel."""
    moved: dict[int, str] = {}
    for op in graph.order() if found else ():
        if op.id in found or not is_pointwise(op) or not kinds_of(op) & {"Add", "Sub"}:
            continue
        positions = [v for v in op.inputs if v is not None and (v.op in found or v.op in moved)]
        if any(graph.type(v).shape == op.outputs[0].type.shape for v in positions if is_float(graph.type(v).dtype)):
            moved[op.id] = "it moves sampling positions of an image, or computes distances from them"
    return moved


def kinds_of(op: Op) -> set[str]:
    """The kind of an operator, or the kinds of the stages of a Pointwise."""
    return {op.kind} if op.kind != "Pointwise" else {s.kind for s in op.attrs.epilogue}


def _indices(graph: Graph) -> dict[int, str]:
    """As :func:`coordinates`, for operators that compute positions in tables, and distances from such positions."""
    found: dict[int, str] = {}
    floats: set[Value] = set()
    for producer, reader in _roundings(graph):
        reason = f"it computes positions that {reader.kind} {reader.outputs[0].name} reads"
        found.setdefault(producer.id, reason)
        for v in producer.inputs:
            if v is not None and is_float(graph.type(v).dtype):
                floats.add(v)
                found.update(dict.fromkeys(_chain(graph, v), reason))
    floats |= {
        v
        for i in found
        for v in (graph.op(i).value, *graph.op(i).inputs)
        if v is not None and is_float(graph.type(v).dtype)
    }
    for op in graph.ops() if found else ():
        if op.id not in found and _is_distance(graph, op, floats):
            found[op.id] = "it computes distances from positions in a table"
    return found


def _roundings(graph: Graph) -> Iterator[tuple[Op, Op]]:
    """The operators that round floats to positions in tables, each with an operator that reads these positions."""
    seen = set[int]()
    for reader in graph.of_kind(*INDEXED):
        wanted = [reader.inputs[1]]
        while wanted:
            value = wanted.pop()
            op = None if value is None else graph.op(value)
            if op is None or op.id in seen or op.kind in STRUCTURAL or is_float(op.outputs[0].type.dtype):
                continue
            seen.add(op.id)
            if is_pointwise(op) and any(v is not None and is_float(graph.type(v).dtype) for v in op.inputs):
                yield op, reader
            if is_pointwise(op) or op.definition.traits.movement:
                wanted += op.inputs


def _is_distance(graph: Graph, op: Op, floats: set[Value]) -> bool:
    """Whether ``op`` computes a difference between a value of ``floats`` and its rounded form, an integer or another such value."""
    if not is_pointwise(op) or not is_float(op.outputs[0].type.dtype):
        return False
    kinds = kinds_of(op)
    read = [v for v in op.inputs if v is not None and graph.constant_value(v) is None]
    positions = [v for v in read if v in floats]
    integers = [v for v in read if not is_float(graph.type(v).dtype)]
    return bool("Sub" in kinds and positions and (kinds & ROUNDS or len(positions) + len(integers) > 1))


def _chain(graph: Graph, positions: Value | None) -> list[int]:
    """The operators that compute positions, except operators that only move a layer's prediction."""
    seen, wanted = dict[int, Op](), [positions]
    while wanted:
        value = wanted.pop()
        op = None if value is None else graph.op(value)
        if op is not None and op.id not in seen and _computes_positions(graph, op):
            seen[op.id] = op
            wanted += op.inputs
    kept: list[int] = []
    for op in graph.order():
        if op.id in seen and not (op.definition.traits.movement and not _reads_fp32(graph, op, kept)):
            kept.append(op.id)
    return kept


def _reads_fp32(graph: Graph, op: Op, kept: list[int]) -> bool:
    """Whether an operand is an input of the network, or the result of an operator that stays in fp32 (``kept``)."""
    return any(v is not None and (v.op in kept or graph.op(v).kind == "Input") for v in op.inputs)


def _computes_positions(graph: Graph, op: Op) -> bool:
    """Whether the result of ``op`` is a position if its operands are positions."""
    if op.kind in STRUCTURAL or not is_float(op.outputs[0].type.dtype):
        return False
    if op.kind == "MatMul":
        row = (shape_of(graph, op.inputs[0]) or (None,))[-1]
        return isinstance(row, int) and row <= SHORT
    return is_pointwise(op) or op.definition.traits.movement or op.kind in CARRIES
