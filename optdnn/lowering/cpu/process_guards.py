"""Operators that end or hang the process in ONNX Runtime (1.32) on some operands; a guard keeps such operands from them.

* GRU and LSTM of a batch of 0, and GRU of 0 steps: ``terminate called without an active exception``. Such a batch is common: text
  recognition after a detector that found nothing.
* ConvTranspose of a volume without depth or height: a segmentation fault.
* Conv with a filter without elements (a computed one, as in trackers): it does not end.
* The least integer divided by -1: an arithmetic trap of the processor, in OpenVINO, too.

On a tensor without elements, an If takes a branch that makes the same results in another way. Where a divisor is -1, the operand is
divided by 1 and negated.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
from onnx import GraphProto, NodeProto, helper, numpy_helper

from optdnn.dim import bounds
from optdnn.ir.body import bodies
from optdnn.ir.graph import Graph, Op
from optdnn.lowering.cpu.loops import graphs_of, replace_nodes

_RECURRENT = ("GRU", "LSTM")
_TESTED = {"GRU": 0, "LSTM": 0, "ConvTranspose": 0, "Conv": 1}
"""Operator -> its operand that must have elements."""
_EMPTY = "a call without elements would run it on onnxruntime, which then ends the process, or hangs; sizes from 1 on avoid that"
_TRAP = "the least integer divided by -1 ends the process"


def need_guards(graph: Graph) -> dict[int, str]:
    """Op id -> reason, for the operators of a graph that need a guard."""
    found = {op.id: _TRAP for op in graph.of_kind("Div") if _may_trap(graph, op)}
    return found | {op.id: _EMPTY for op in graph.of_kind(*_TESTED) if _fails_empty(graph, op)}


def _may_trap(graph: Graph, op: Op) -> bool:
    """Whether a division is of signed integers, and its divisor may be -1."""
    if op.outputs[0].type.dtype.kind != "i":
        return False
    divisor = graph.known(op.input(1))
    return divisor is None or any(low <= -1 <= high for low, high in map(bounds, divisor.reshape(-1).tolist()))


def _fails_empty(graph: Graph, op: Op) -> bool:
    """Whether sequences may have no steps or no batch, volumes no size, or filters no size."""
    value = op.input(_TESTED[op.kind])
    assert value is not None
    given = graph.type(value).shape
    if given is None:
        return True
    if op.kind == "ConvTranspose" and len(given) != 5:
        return False
    return any(bounds(d)[0] <= 0 for d in (given if op.kind in _RECURRENT else given[2:]))


def guard(model: onnx.ModelProto, graph: Graph) -> None:
    """Guard the operators of the model (opset 15 to 21) of a graph, in place."""
    safe = set(_safe(graph))
    taken = {name for part in graphs_of(model.graph) for node in part.node for name in (*node.output, node.name)}
    fresh = (name for k in range(1 << 30) if (name := f"guard_{k}") not in taken)
    for part in reversed(list(graphs_of(model.graph))):  # inner graphs first: outer graphs get copies of nodes
        nodes: list[NodeProto] = []
        for node in part.node:
            if node.op_type not in _GUARDS or node.output[0] in safe:
                nodes.append(node)
            else:
                nodes += _GUARDS[node.op_type](node, fresh)
        if len(nodes) > len(part.node):
            replace_nodes(part, nodes)


def _safe(graph: Graph) -> Iterator[str]:
    """Names of the first results of the operators that need no guard, also in bodies."""
    unsafe = need_guards(graph)
    for op in graph.ops():
        if op.kind in _GUARDS and op.id not in unsafe:
            yield op.outputs[0].name
        for body in bodies(op):
            yield from _safe(body.graph)


def unguarded(model: onnx.ModelProto, graph: Graph) -> dict[str, str]:
    """Node -> reason, for the operators of a model (imported: ``graph``) that need a guard and have none."""
    guarded = set(_guarded(model.graph))
    return {name: why for name, why in _named(graph) if name not in guarded}


def _named(graph: Graph) -> Iterator[tuple[str, str]]:
    """Name and reason of each operator that needs a guard, also in bodies."""
    for i, why in need_guards(graph).items():
        yield min(graph.op(i).src, default=graph.op(i).name), why
    for op in graph.ops():
        for body in bodies(op):
            yield from _named(body.graph)


def _guarded(graph: GraphProto, prefix: str = "") -> Iterator[str]:
    """The names of the nodes behind guards, as the importer gives them."""
    made = {name: node for node in graph.node for name in node.output}
    numbers = {t.name: t for t in graph.initializer}

    def operands(name: str, kind: str) -> list[str]:
        """The operands of the node of this kind that makes a value; else none."""
        return list(made[name].input) if name in made and made[name].op_type == kind else []

    def is_number(name: str, value: int) -> bool:
        node = made.get(next(iter(operands(name, "CastLike")), name))
        tensor = numbers.get(name) if node is None else node.attribute[0].t if node.op_type == "Constant" else None
        return tensor is not None and tensor.raw_data == np.array(value, np.int64).tobytes()

    for node in graph.node:
        inside = {a.name: a.g for a in node.attribute if a.HasField("g")}
        for name, inner in inside.items():
            yield from _guarded(inner, f"{prefix}{node.name}/")
            flag = operands(node.input[0], "Equal") if name == "else_branch" else []
            tested = operands(flag[0], "Size") if len(flag) == 2 and is_number(flag[1], 0) else []
            for behind in inner.node:
                slot = _TESTED.get(behind.op_type)
                if slot is not None and tested == [behind.input[slot]]:
                    yield f"{prefix}{node.name}/{behind.name}"
        if node.op_type == "Div" and len(chosen := operands(node.input[1], "Where")) == 3:
            flag, one, divisor = operands(chosen[0], "Equal"), *chosen[1:]
            if flag[:1] == [divisor] and is_number(flag[1], -1) and is_number(one, 1):
                yield prefix + node.name


class _Nodes:
    """Nodes that are being made."""

    def __init__(self, fresh: Iterator[str]):
        self.made: list[NodeProto] = []
        self._fresh = fresh

    def add(self, kind: str, *inputs: str, result: str = "", **attrs: Any) -> str:
        """A node; returns the name of its result."""
        name = result or next(self._fresh)
        self.made.append(helper.make_node(kind, inputs, [name], name, **attrs))
        return name

    def constant(self, value: object) -> str:
        """An int64 constant; returns its name."""
        return self.add("Constant", value=numpy_helper.from_array(np.asarray(value, np.int64)))


def _branched(node: NodeProto, fresh: Iterator[str]) -> list[NodeProto]:
    """The node in the branch of an If that is taken if the tested operand has elements."""
    body = NodeProto()
    body.CopyFrom(node)
    del body.output[:]
    body.output.extend(next(fresh) if name else "" for name in node.output)
    empty, before = _Nodes(fresh), _Nodes(fresh)
    results = (_zeros if node.op_type in _RECURRENT else _of_zeros)(node, empty)
    none = before.add("Equal", before.add("Size", node.input[_TESTED[node.op_type]]), before.constant(0))
    kept = [k for k, name in enumerate(node.output) if name]
    chosen = helper.make_node(
        "If", [none], [node.output[k] for k in kept], f"{node.name}/if_empty",
        then_branch=helper.make_graph(empty.made, "empty", [], [onnx.ValueInfoProto(name=results[k]) for k in kept]),
        else_branch=helper.make_graph([body], "elements", [], [onnx.ValueInfoProto(name=body.output[k]) for k in kept]),
    )  # fmt: skip
    return [*before.made, chosen]


def _zeros(node: NodeProto, nodes: _Nodes) -> list[str]:
    """The results of a GRU or LSTM without steps or without a batch: zeros, also as last states, like those of RNN."""
    attrs = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    batch_first = attrs.get("layout", 0)
    steps, batch = (nodes.add("Shape", node.input[0], start=k, end=k + 1) for k in ((1, 0) if batch_first else (0, 1)))
    directions, hidden = (nodes.add("Shape", node.input[2], start=k, end=k + 1) for k in (0, 2))
    zero = nodes.add("CastLike", nodes.constant(0), node.input[0])
    states = (batch, directions, hidden) if batch_first else (directions, batch, hidden)
    every = (batch, steps, directions, hidden) if batch_first else (steps, directions, batch, hidden)
    shapes = [every, *[states] * (len(node.output) - 1)]
    return [nodes.add("Expand", zero, nodes.add("Concat", *sizes, axis=0)) for sizes in shapes]


def _of_zeros(node: NodeProto, nodes: _Nodes) -> list[str]:
    """The result of a convolution of an empty volume, or by an empty filter: that of zeros which are longer by one along each axis,
    without what the longer axis adds."""
    attrs = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    operands, slot, rank = list(node.input), _TESTED[node.op_type], len(attrs["strides"])
    longer = nodes.add("Add", nodes.add("Shape", operands[slot]), nodes.constant([0, 0, *[1] * rank]))
    operands[slot] = nodes.add("Expand", nodes.add("CastLike", nodes.constant(0), operands[slot]), longer)
    if node.op_type == "Conv":
        if "pads" in attrs:  # a longer filter reads as much more
            read = zip(attrs["pads"][rank:], attrs["dilations"], strict=True)
            attrs["pads"] = [*attrs["pads"][:rank], *(n + step for n, step in read)]
        return [nodes.add("Conv", *operands, **attrs)]
    result = nodes.add("ConvTranspose", *operands, **attrs)
    if not attrs.get("output_shape"):
        ends, axes = [-s for s in attrs["strides"]], range(2, rank + 2)
        result = nodes.add("Slice", result, nodes.constant([0] * rank), nodes.constant(ends), nodes.constant([*axes]))
    return [result]


def _convolved(node: NodeProto, fresh: Iterator[str]) -> list[NodeProto]:
    """As :func:`_branched`. Transposed convolutions of images need no guard, and filters whose size is known have elements."""
    attrs = {a.name: a.ints for a in node.attribute}
    needed = "kernel_shape" not in attrs if node.op_type == "Conv" else len(attrs["strides"]) == 3
    return _branched(node, fresh) if needed else [node]


def _divided(node: NodeProto, fresh: Iterator[str]) -> list[NodeProto]:
    nodes, (x, divisor) = _Nodes(fresh), node.input
    one, minus = (nodes.add("CastLike", nodes.constant(n), x) for n in (1, -1))
    flag = nodes.add("Equal", divisor, minus)
    quotient = nodes.add("Div", x, nodes.add("Where", flag, one, divisor))
    nodes.add("Where", flag, nodes.add("Neg", x), quotient, result=node.output[0])
    return nodes.made


_GUARDS = {"GRU": _branched, "LSTM": _branched, "ConvTranspose": _convolved, "Conv": _convolved, "Div": _divided}
