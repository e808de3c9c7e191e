"""Cut a graph into regions, and take one region out as a separate graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from optdnn.ir.graph import STRUCTURAL, Graph, Op, Value


@dataclass(frozen=True)
class Region:
    """A convex set of ops of one class, in topological order, with the values that cross its border."""

    label: str
    ops: tuple[Op, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]


def regions(graph: Graph, classify: Callable[[Op], str]) -> list[Region]:
    """Partition the computing ops into few convex regions, in an order in which they can run.

    An op's level is the largest level of its producers, plus one if the class changes on the way; the ops of one level
    and class form a region. No path leaves a region and returns, because levels never decrease along an edge.
    """
    level: dict[int, int] = {}
    label: dict[int, str] = {}
    groups: dict[tuple[int, str], list[Op]] = {}
    for op in graph.order():
        if op.kind in STRUCTURAL:
            continue
        label[op.id] = classify(op)
        level[op.id] = max(
            (level[v.op] + (label[v.op] != label[op.id]) for v in op.inputs if v is not None and v.op in level),
            default=0,
        )
        groups.setdefault((level[op.id], label[op.id]), []).append(op)
    found = []
    for (_, name), ops in sorted(groups.items(), key=lambda item: item[0]):
        inside = {op.id for op in ops}
        inputs: dict[Value, None] = {}
        outputs: dict[Value, None] = {}
        for op in ops:
            for v in op.inputs:
                if v is not None and v.op not in inside and graph.op(v).kind != "Constant":
                    inputs[v] = None
            for value in op.values:
                if any(use.op not in inside for use in graph.uses(value)):
                    outputs[value] = None
        found.append(Region(name, tuple(ops), tuple(inputs), tuple(outputs)))
    return found


def extract(graph: Graph, region: Region) -> Graph:
    """The region as a separate graph. Values keep their names and types; border values become inputs and outputs."""
    out = Graph(graph.name)
    mapping: dict[Value, Value] = {}
    for value in region.inputs:
        mapping[value] = out.add_input(graph.output(value).name, graph.type(value))
    for op in region.ops:
        inputs: list[Value | None] = []
        for v in op.inputs:
            if v is not None and v not in mapping:
                constant = graph.op(v)
                mapping[v] = out.add_constant(constant.attrs.value, constant.outputs[0].name, constant.src)
            inputs.append(None if v is None else mapping[v])
        # The types are the graph's own: the graph may know more than the region, such as the elements of a border value.
        outputs = tuple(replace(o, name=out.fresh_name(o.name)) for o in op.outputs)
        new = out.insert(Op(out.new_id(), op.kind, op.attrs, tuple(inputs), outputs, op.src))
        mapping.update(zip(op.values, new.values, strict=True))
    for value in region.outputs:
        out.add_output(mapping[value], graph.output(value).name)
    return out


def whole(graph: Graph) -> Region:
    """The region of all computing ops."""
    found = regions(graph, lambda op: "all")
    return found[0] if found else Region("all", (), (), ())


def single(graph: Graph, op: Op) -> Graph:
    """One op as a separate graph, constants included."""
    inputs: Sequence[Value] = tuple(
        dict.fromkeys(v for v in op.inputs if v is not None and graph.op(v).kind != "Constant")
    )
    ports = tuple(op.values)
    used = tuple(v for v in ports if graph.uses(v)) or ports[:1]
    return extract(graph, Region("single", (op,), tuple(inputs), used))
