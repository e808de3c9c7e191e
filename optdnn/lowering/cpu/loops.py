"""Loops that ONNX Runtime would run forever end with an error, as they do in NumPy.

A Loop without a trip count (only its condition ends it), or with a trip count from data, gets the largest trip count that the NumPy
kernel allows. A further carried value says whether the loop would have continued. If so, a Gather after the loop reads
outside of its operand: it is the only ONNX operator that can fail by data, and its name states the reason. OpenVINO raises no such
errors, so it does not get such loops (:mod:`optdnn.lowering.cpu.unsafe`). A model read from a file has these bounds, or is refused
(:func:`unbounded`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import onnx
from onnx import GraphProto, NodeProto, helper, numpy_helper

from optdnn.ir.body import bodies
from optdnn.ir.graph import Graph, Op
from optdnn.limits import LOOP_TRIPS


def endless(graph: Graph) -> list[Op]:
    """The ops of a graph that are, or contain in their bodies, a Loop whose trip count no constant bounds."""
    return [op for op in graph.order() if _may_not_end(graph, op)]


def _may_not_end(graph: Graph, op: Op) -> bool:
    if op.kind == "Loop":
        trips = _known_trips(graph, op)
        if trips is None or trips > LOOP_TRIPS.value:
            return True
    return any(endless(body.graph) for body in bodies(op))


def too_often(graph: Graph) -> list[Op]:
    """The ops of a graph with nested loops that run more iterations in total than NumPy allows: each loop has a bound, but
    their product may take years."""
    return [
        op
        for op in graph.order()
        if any(_trips(b.graph) for b in bodies(op)) and _trips_of(graph, op) > LOOP_TRIPS.value
    ]


def _trips(graph: Graph) -> int:
    """The most iterations of the loops of a graph."""
    return sum(_trips_of(graph, op) for op in graph.ops())


def _trips_of(graph: Graph, op: Op) -> int:
    inside = sum(_trips(body.graph) for body in bodies(op))
    if op.kind == "Loop":
        trips = _known_trips(graph, op)
        return min(LOOP_TRIPS.value if trips is None else trips, LOOP_TRIPS.value) * (1 + inside)
    return inside


def _known_trips(graph: Graph, op: Op) -> int | None:
    trips = op.input(0)
    known = None if trips is None else graph.known(trips)
    return None if known is None or known.dtype == object else int(known.reshape(-1)[0])


def bound_loops(model: onnx.ModelProto) -> None:
    """Give every Loop of a model (opset 11 to 21) a bound, in place."""
    taken = {name for graph in graphs_of(model.graph) for node in graph.node for name in (*node.output, node.name)}
    fresh = (name for k in range(1 << 30) if (name := f"loop_bound_{k}") not in taken)
    for graph in reversed(list(graphs_of(model.graph))):  # inner graphs first: outer graphs get copies of nodes
        if not any(node.op_type == "Loop" for node in graph.node):
            continue
        constants = {t.name: t for t in graph.initializer}
        nodes = [made for node in graph.node for made in _bounded(node, constants, fresh)]
        del graph.node[:]
        graph.node.extend(nodes)


def unbounded(model: onnx.ModelProto) -> list[str]:
    """The names of the Loops of a model that have no bound although :func:`bound_loops` would have given them one."""
    found = []
    for graph in graphs_of(model.graph):
        limited = {t.name for t in graph.initializer if _limits(t)}
        for node in graph.node:
            values = [a.t for a in node.attribute if a.name == "value"]
            if (node.op_type == "Constant" and values and _limits(values[0])) or (
                node.op_type == "Min" and not limited.isdisjoint(node.input)
            ):
                limited.update(node.output)
            if node.op_type == "Loop" and not (node.input and node.input[0] in limited):
                found.append(node.name)
    return found


def _limits(t: onnx.TensorProto) -> bool:
    """Whether a constant is a trip count within the limit."""
    size = int(np.prod(t.dims, dtype=np.int64))
    return (
        t.data_type == onnx.TensorProto.INT64
        and t.data_location != onnx.TensorProto.EXTERNAL
        and size == 1
        and len(t.raw_data) == 8
        and int(numpy_helper.to_array(t).reshape(-1)[0]) <= LOOP_TRIPS.value
    )


def graphs_of(graph: GraphProto) -> Iterator[GraphProto]:
    """A graph and the graphs inside of its nodes."""
    yield graph
    for node in graph.node:
        for a in node.attribute:
            if a.HasField("g"):
                yield from graphs_of(a.g)


def replace_nodes(graph: GraphProto, nodes: Iterable[NodeProto]) -> None:
    """Give a graph these nodes. Its own may be among them: they are copied first."""
    copies = [NodeProto.FromString(n.SerializeToString()) for n in nodes]
    del graph.node[:]
    graph.node.extend(copies)


def _bounded(node: NodeProto, constants: dict[str, onnx.TensorProto], fresh: Iterator[str]) -> Iterable[NodeProto]:
    if node.op_type != "Loop" or not node.output:
        return [node]
    trips, limit = node.input[0], LOOP_TRIPS.value
    if trips in constants and int(numpy_helper.to_array(constants[trips]).reshape(-1)[0]) <= limit:
        return [node]
    before: list[NodeProto] = []
    after: list[NodeProto] = []

    def constant(value: object) -> str:
        name = next(fresh)
        before.append(helper.make_node("Constant", [], [name], name, value=numpy_helper.from_array(np.asarray(value))))
        return name

    def emit(into: list[NodeProto], kind: str, *inputs: str, name: str = "", **attrs: int) -> str:
        result = next(fresh)
        into.append(helper.make_node(kind, inputs, [result], name or result, **attrs))  # type: ignore[arg-type]
        return result

    most = constant(np.array(limit, np.int64))
    body = next(a.g for a in node.attribute if a.name == "body")
    carried = len(body.input) - 2
    # A further carried value: the condition after the last iteration.
    before_name, after_name = next(fresh), next(fresh)
    body.node.append(helper.make_node("Identity", [body.output[0].name], [after_name], after_name))
    body.input.append(helper.make_tensor_value_info(before_name, onnx.TensorProto.BOOL, []))
    scans = list(body.output)[1 + carried :]
    del body.output[1 + carried :]
    body.output.append(helper.make_tensor_value_info(after_name, onnx.TensorProto.BOOL, []))
    body.output.extend(scans)
    operands = [*node.input, *[""] * (2 - len(node.input))]
    goes_on = next(fresh)
    outputs = list(node.output)
    first, renamed = outputs[0], next(fresh)
    outputs[0] = renamed
    while len(outputs) < carried:
        outputs.append("")
    outputs.insert(carried, goes_on)
    flat = constant(np.array([], np.int64))
    wanted = emit(before, "Reshape", trips, flat) if trips else most
    operands[0] = emit(before, "Min", wanted, most) if trips else most
    start = operands[1] or constant(np.array(True))
    operands.insert(2 + carried, emit(before, "Reshape", start, flat))
    made = NodeProto()
    made.CopyFrom(node)
    del made.input[:], made.output[:]
    made.input.extend(operands)
    made.output.extend(outputs)
    endless = goes_on
    if trips:
        endless = emit(after, "And", goes_on, emit(after, "Greater", wanted, most))
    index = emit(after, "Cast", endless, to=onnx.TensorProto.INT64)
    why = f"{node.name or 'the loop'} has run {limit} times; its condition does not end it"
    zero = emit(after, "Gather", constant(np.zeros(1, np.int64)), index, name=why)
    shape = emit(after, "Add", emit(after, "Shape", renamed), zero)
    after.append(helper.make_node("Reshape", [renamed, shape], [first], f"{first}/bounded", allowzero=1))
    return [*before, made, *after]
