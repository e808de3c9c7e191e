"""The network that an engine runs, as a graph: operators, the values between them, and the time of each.

Steps of kernels are operators as they are. A step of a CPU library holds its own network, whose operators are shown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from optdnn.errors import EngineError
from optdnn.runtime.cpu.layers import operator_of
from optdnn.runtime.cuda.measuring.expected import MEASURED, PREDICTED
from optdnn.runtime.program import Program, Step
from optdnn.types import dtype_name

LIBRARIES = ("openvino", "onnxruntime")
"""Executors whose steps hold an ONNX model."""
RUN = "run"
SOURCES = {
    RUN: "measured in a run",
    MEASURED: "measured in tuning",
    PREDICTED: "predicted by the cost model",
}
"""Source of a time -> its name in a report."""
STAGES = 4
"""Most stages in the label of a fused operator."""
JOIN = " + "


@dataclass
class Node:
    """One operator, or a port of the network (``role`` "input" or "output").

    ``us`` are microseconds of a run and ``share`` their part of it; ``roofline`` is the least time of the work over ``us``. They
    are None where nothing is known. ``source`` is one of :data:`SOURCES`. ``error`` is the largest relative error of its results,
    "not finite" where one is not.
    """

    role: str
    label: str
    src: tuple[str, ...]
    step: int | None = None
    executor: str = ""
    tactic: str = ""
    result: str = ""
    lane: int | None = None
    us: float | None = None
    share: float | None = None
    roofline: float | None = None
    source: str = ""
    precision: str = ""
    error: float | str | None = None

    @property
    def name(self) -> str:
        return JOIN.join(self.src)


@dataclass
class Network:
    """Operators in an order in which they may run, and pairs of their numbers for the values between them."""

    nodes: list[Node] = field(default_factory=list)
    edges: dict[tuple[int, int], None] = field(default_factory=dict)

    def add(self, node: Node, reads: Iterable[int]) -> int:
        """The number of a node that reads the results of others."""
        number = len(self.nodes)
        self.nodes.append(node)
        self.edges |= {(other, number): None for other in reads if other != number}
        return number

    def operators(self) -> list[tuple[int, Node]]:
        return [(k, n) for k, n in enumerate(self.nodes) if n.role == "operator"]

    def by_onnx_node(self) -> dict[str, list[int]]:
        """ONNX node -> the operators that compute it."""
        found: dict[str, list[int]] = {}
        for k, node in self.operators():
            for name in node.src:
                found.setdefault(name, []).append(k)
        return found


def network_of(program: Program) -> Network:
    """The network of a program: of its first plan, and of rank 0. Raises EngineError where a library's model is not ONNX."""
    net = Network()
    writers: dict[int, list[int]] = {}
    for spec, buffer in program.inputs:
        node = Node("input", spec.name, (), result=str(spec).removeprefix(f"{spec.name}: "))
        writers[buffer] = [net.add(node, ())]
    for k, step in enumerate(program.steps):
        if step.executor in LIBRARIES and "model" in step.params:
            _add_library_step(net, program, k, writers)
            continue
        reads = [w for b in step.inputs for w in writers.get(b, ())]
        number = net.add(_operator(program, k), reads)
        for buffer in step.outputs:
            if buffer >= 0:
                writers.setdefault(buffer, []).append(number)
    for spec, buffer in program.outputs:
        net.add(Node("output", spec.name, (), result=str(spec).removeprefix(f"{spec.name}: ")), writers.get(buffer, ()))
    return net


# ---------------------------------------------------------------- a step that is one operator


def _operator(program: Program, k: int) -> Node:
    step = program.steps[k]
    tactic = step.params.get("tactic")
    return Node(
        "operator",
        label_of(step),
        step.src,
        k,
        step.executor,
        tactic if isinstance(tactic, str) else "",
        ", ".join(dict.fromkeys(_results(program, step))),
        program.lanes[k].lane if program.lanes else None,
    )


def label_of(step: Step) -> str:
    """The kind of operator that a step runs, with the stages that are fused into it."""
    if step.executor == "copy":
        return f"copy to the {'CPU' if step.params['to'] == 'host' else 'GPU'}"
    op: Any = step.params.get("op") or {}
    attrs: Any = op.get("attrs") or step.params.get("attrs") or {}
    kind = str(step.params.get("kind") or op.get("kind") or step.executor)
    if kind == "WeightsInParts":
        kind = str(attrs["of"])
    stages = [
        *([] if kind == "Pointwise" else [kind]),
        *(str(s["stage"][0]) for s in attrs.get("epilogue") or () if isinstance(s, Mapping) and "stage" in s),
    ]
    if not stages:
        return kind
    return JOIN.join(stages[:STAGES]) + (" …" if len(stages) > STAGES else "")


def _results(program: Program, step: Step) -> Iterable[str]:
    """The types of a step's results; a kernel's own shapes, where its buffers are flat."""
    operands = (*step.inputs, *step.outputs)
    views: Any = step.params.get("writes")
    if isinstance(views, list):
        for view in views:
            if view is not None:
                yield f"{dtype_name(program.buffers[operands[view[0]]].dtype)}{list(view[2])}"
        return
    for b in step.outputs:
        if b >= 0:
            buffer = program.buffers[b]
            shape = "" if buffer.shape is None else f"[{', '.join(map(str, buffer.shape))}]"
            yield f"{dtype_name(buffer.dtype)}{shape}"


# ---------------------------------------------------------------- a step that is a library's model


def _add_library_step(net: Network, program: Program, k: int, writers: dict[int, list[int]]) -> None:
    """The operators of a library's model; the nodes of an operator with stages are one operator here."""
    step = program.steps[k]
    graph = _parsed(bytes(program.blobs[int(step.params["model"])])).graph
    made = {name: w for name, b in zip(step.params["inputs"], step.inputs, strict=True) for w in writers.get(b, ())[:1]}
    groups: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        if node.op_type != "Constant":
            groups.setdefault(operator_of(node.name, groups), []).append(node)
    for name, nodes in groups.items():
        label = JOIN.join(n.op_type for n in nodes[:STAGES]) + (" …" if len(nodes) > STAGES else "")
        own = {o for n in nodes for o in n.output}
        reads = [made[i] for n in nodes for i in n.input if i in made and i not in own]
        number = net.add(Node("operator", label, tuple(name.split(JOIN)), k, step.executor), reads)
        made |= dict.fromkeys(own, number)
    for name, buffer in zip(step.params["outputs"], step.outputs, strict=True):
        if name in made and buffer >= 0:
            writers[buffer] = [made[name]]


def _parsed(data: bytes) -> onnx.ModelProto:
    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(data)
    except DecodeError as error:
        raise EngineError(f"the model of a library in the engine is not ONNX: {error}") from error
    return proto


# ---------------------------------------------------------------- facts of the operators


def add_times(net: Network, steps: Sequence[Mapping[str, Any]], layers: Sequence[Mapping[str, Any]] = ()) -> None:
    """Give the operators their times: ``steps`` are rows of a profile, ``layers`` those that CPU libraries count."""
    by_step = {s["step"]: s for s in steps}
    alone = _steps_of_one_operator(net)
    for _, node in net.operators():
        row = by_step.get(node.step)
        if row is None or node.step not in alone:
            continue
        node.us = row["us"] if "us" in row else 1e3 * row["median_ms"]
        node.share, node.roofline = row["share"], row.get("roofline")
        node.source = row.get("source", RUN)
        node.tactic = node.tactic or str(row.get("tactic") or "")
    of_step = {(n.step, name): n for _, n in net.operators() if n.step not in alone for name in (n.name, *n.src)}
    for layer in layers:
        found = of_step.get((layer["step"], layer["name"])) or _first_operator_of(of_step, layer)
        if found is not None:
            found.us = (found.us or 0.0) + 1e3 * layer["median_ms"]
            found.share = (found.share or 0.0) + layer["share"]
            found.tactic, found.source = layer["kind"], RUN


def _steps_of_one_operator(net: Network) -> set[int | None]:
    """The steps that are one operator."""
    counts = Counter(node.step for _, node in net.operators())
    return {step for step, n in counts.items() if n == 1}


def _first_operator_of(of_step: Mapping[tuple[int | None, str], Node], layer: Mapping[str, Any]) -> Node | None:
    """The operator of the first node of a layer that a library made of several."""
    names = str(layer["name"]).split(JOIN)
    return next((n for name in names if (n := of_step.get((layer["step"], name))) is not None), None)


def add_errors(net: Network, layers: Sequence[Mapping[str, Any]], error_of: Callable[[Any], float | None]) -> None:
    """Give the operators the errors of the values that they share with the model."""
    by_name = net.by_onnx_node()
    for layer in layers:
        names = set(str(layer["node"]).split(JOIN))
        for node in (net.nodes[k] for k in by_name.get(next(iter(names)), ())):
            if names <= set(node.src):
                error = error_of(layer)
                if error is None or isinstance(node.error, str):
                    node.error = "not finite"
                else:
                    node.error = max(node.error or 0.0, error)
