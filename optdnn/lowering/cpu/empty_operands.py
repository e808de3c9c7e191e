"""Operators that end the process if ONNX Runtime (1.32) runs them on a tensor without elements run only on tensors with elements.

* GRU and LSTM of a batch of 0, and GRU of 0 steps: ``terminate called without an active exception``. Such a batch is common: text
  recognition after a detector that found nothing.
* ConvTranspose of a volume without depth or height: a segmentation fault.

The operator becomes a branch of an If. The other branch makes the same results from nodes that run on no tensor without elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, helper, numpy_helper

from optdnn.dim import bounds
from optdnn.lowering.cpu.loops import graphs_of
from optdnn.types import TensorType

RECURRENT = ("GRU", "LSTM")
VOLUME = 5
"""Rank of a tensor of volumes."""


def guard_empty(model: onnx.ModelProto, types: Mapping[str, TensorType]) -> None:
    """Put these operators of a model (opset 15 to 21) into branches, in place, unless their operand always has elements.

    ``types``: the types of tensors by name, as far as they are known."""
    taken = {name for graph in graphs_of(model.graph) for node in graph.node for name in (*node.output, node.name)}
    fresh = (name for k in range(1 << 30) if (name := f"if_empty_{k}") not in taken)
    for graph in reversed(list(graphs_of(model.graph))):  # inner graphs first: outer graphs get copies of nodes
        if not any(_ends_process(node, types) for node in graph.node):
            continue
        nodes = [
            made for node in graph.node for made in (_guarded(node, fresh) if _ends_process(node, types) else [node])
        ]
        del graph.node[:]
        graph.node.extend(nodes)


def _ends_process(node: NodeProto, types: Mapping[str, TensorType]) -> bool:
    return may_end_process(node.op_type, types.get(node.input[0]) if node.input else None)


def may_end_process(kind: str, given: TensorType | None) -> bool:
    """Whether an operator is one of these, and its first operand, of type ``given`` (None: unknown), may have no elements."""
    if kind not in (*RECURRENT, "ConvTranspose"):
        return False
    if given is None or given.shape is None:
        return True
    return (kind in RECURRENT or len(given.shape) == VOLUME) and any(bounds(d)[0] <= 0 for d in given.shape)


def _guarded(node: NodeProto, fresh: Iterator[str]) -> list[NodeProto]:
    """The node in the branch of an If that is taken if its first operand has elements."""
    body = NodeProto()
    body.CopyFrom(node)
    del body.output[:]
    body.output.extend(next(fresh) if name else "" for name in node.output)
    empty = _Branch(fresh)
    results = (_zeros if node.op_type in RECURRENT else _of_zeros)(node, empty)
    before = _Branch(fresh)
    size = before.add("Size", node.input[0])
    none = before.add("Equal", size, before.constant(0))
    kept = [k for k, name in enumerate(node.output) if name]
    chosen = helper.make_node(
        "If", [none], [node.output[k] for k in kept], f"{node.name}/if_empty",
        then_branch=helper.make_graph(empty.nodes, "empty", [], [onnx.ValueInfoProto(name=results[k]) for k in kept]),
        else_branch=helper.make_graph([body], "elements", [], [onnx.ValueInfoProto(name=body.output[k]) for k in kept]),
    )  # fmt: skip
    return [*before.nodes, chosen]


class _Branch:
    """Nodes that are being made."""

    def __init__(self, fresh: Iterator[str]):
        self.nodes: list[NodeProto] = []
        self._fresh = fresh

    def add(self, kind: str, *inputs: str, **attrs: Any) -> str:
        """A node; returns the name of its result."""
        result = next(self._fresh)
        self.nodes.append(helper.make_node(kind, inputs, [result], result, **attrs))
        return result

    def constant(self, value: object) -> str:
        """An int64 constant; returns its name."""
        name = next(self._fresh)
        tensor = numpy_helper.from_array(np.asarray(value, np.int64))
        self.nodes.append(helper.make_node("Constant", [], [name], name, value=tensor))
        return name


def _zeros(node: NodeProto, branch: _Branch) -> list[str]:
    """The results of a GRU or LSTM without steps or without a batch: zeros, also as last states, like those of RNN."""
    attrs = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    batch_first = attrs.get("layout", 0)
    steps, batch = (branch.add("Shape", node.input[0], start=k, end=k + 1) for k in ((1, 0) if batch_first else (0, 1)))
    directions, hidden = (branch.add("Shape", node.input[2], start=k, end=k + 1) for k in (0, 2))
    zero = branch.add("CastLike", branch.constant(0), node.input[0])
    states = (batch, directions, hidden) if batch_first else (directions, batch, hidden)
    every = (batch, steps, directions, hidden) if batch_first else (steps, directions, batch, hidden)
    shapes = [every, *[states] * (len(node.output) - 1)]
    return [branch.add("Expand", zero, branch.add("Concat", *sizes, axis=0)) for sizes in shapes]


def _of_zeros(node: NodeProto, branch: _Branch) -> list[str]:
    """The result of a transposed convolution of an empty volume: that of a volume of zeros that is longer by one along each axis,
    without the end that the longer axis adds."""
    attrs = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    longer = branch.add("Pad", node.input[0], branch.constant([0] * 7 + [1] * 3))
    result = branch.add(node.op_type, longer, *node.input[1:], **attrs)
    if not attrs.get("output_shape"):
        ends = branch.constant([-s for s in attrs.get("strides", (1, 1, 1))])
        result = branch.add("Slice", result, branch.constant([0] * 3), ends, branch.constant([2, 3, 4]))
    return [result]
