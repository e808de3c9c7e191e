"""ONNX nodes: unique names, evaluation order, attributes as plain values, and the check against ONNX's own schemas."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import networkx as nx
import onnx
import onnx.defs
import onnx.helper
from onnx import AttributeProto

from optdnn.errors import ModelError, RefusedNode
from optdnn.ir import onnx_protos
from optdnn.ops.base import Unsupported
from optdnn.types import Array


def unique_names(nodes: Sequence[onnx.NodeProto], prefix: str, taken: set[str]) -> list[str]:
    """A unique name for each node. ``taken`` holds the names given so far and is extended.

    The file's own name if there is one, otherwise ``Conv_12`` (operator and index); ``name#2`` for a repeated name.
    """
    own = {prefix + n.name for n in nodes if n.name}
    names = []
    for i, n in enumerate(nodes):
        wanted = prefix + (n.name or f"{n.op_type}_{i}")
        name, k = wanted, 2
        while name in taken or (name in own and (k > 2 or not n.name)):
            name, k = f"{wanted}#{k}", k + 1
        taken.add(name)
        names.append(name)
    return names


def describe(node: onnx.NodeProto, name: str) -> str:
    domain = f"{node.domain}." if node.domain else ""
    return f"{name} ({domain}{node.op_type})"


# ---------------------------------------------------------------- order


def in_order(
    nodes: Sequence[onnx.NodeProto],
    names: Sequence[str],
    defined: Collection[str],
    model: str,
    refused: Callable[[onnx.NodeProto, str, str], RefusedNode],
) -> Iterable[int]:
    """Indices of ``nodes`` such that each value is produced before it is read; the file's order if it is valid.

    ``defined``: names that exist before the first node. ``refused`` describes a node, by its name, with a reason. Raises ModelError
    for a value that nothing or more than one node produces, and for a cycle, naming its nodes.
    """
    producer: dict[str, int] = {}
    sorted_already = True
    for i, n in enumerate(nodes):
        if sorted_already:
            sorted_already = all(not x or x in producer or x in defined for x in reads(n))
        for out in n.output:
            if not out:
                continue
            if out in producer or out in defined:
                other = (
                    describe(nodes[producer[out]], names[producer[out]]) if out in producer else "an input or weight"
                )
                about = refused(n, names[i], f"produces {out!r}, as {other} does")
                raise ModelError(
                    f"{model}: value {out!r} is produced by {describe(n, names[i])} and by {other}", [about]
                )
            producer[out] = i
    if sorted_already:
        return range(len(nodes))
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(nodes)))
    for i, n in enumerate(nodes):
        for x in reads(n):
            if x in producer:
                graph.add_edge(producer[x], i)
            elif x and x not in defined:
                reason = f"reads {x!r}, which nothing produces"
                raise ModelError(f"{model}: {describe(n, names[i])} {reason}", [refused(n, names[i], reason)])
    try:
        return list(nx.lexicographical_topological_sort(graph))  # the file's order as far as possible
    except nx.NetworkXUnfeasible:
        cycle = [i for i, _ in nx.find_cycle(graph)]
        shown = " -> ".join(describe(nodes[i], names[i]) for i in [*cycle, cycle[0]])
        nodes_at_fault = [refused(nodes[i], names[i], "is part of a cycle") for i in cycle]
        raise ModelError(f"{model}: the nodes form a cycle: {shown}", nodes_at_fault) from None


def reads(node: onnx.NodeProto) -> Sequence[str]:
    """Names of the values that a node depends on: its operands, and the values that its subgraphs capture."""
    captured: list[str] = []
    for a in node.attribute:
        if a.type in (AttributeProto.GRAPH, AttributeProto.GRAPHS):
            for g in [a.g] if a.type == AttributeProto.GRAPH else a.graphs:
                captured.extend(_captures(g))
    return [*node.input, *captured] if captured else node.input


def _captures(graph: onnx.GraphProto) -> list[str]:
    inside = {v.name for v in graph.input} | {t.name for t in graph.initializer}
    inside |= {t.values.name for t in graph.sparse_initializer} | {o for n in graph.node for o in n.output}
    wanted = [x for n in graph.node for x in reads(n)] + [v.name for v in graph.output]
    return [x for x in dict.fromkeys(wanted) if x and x not in inside]


def live_nodes(nodes: Sequence[onnx.NodeProto], wanted: Sequence[str]) -> set[int]:
    """Indices of the nodes that the wanted values depend on."""
    producer = {out: i for i, n in enumerate(nodes) for out in n.output if out}
    live: set[int] = set()
    stack = list(wanted)
    while stack:
        i = producer.get(stack.pop())
        if i is not None and i not in live:
            live.add(i)
            stack.extend(reads(nodes[i]))
    return live


# ---------------------------------------------------------------- attributes


def attributes(
    node: onnx.NodeProto,
    bound: Mapping[str, tuple[int, Any]],
    tensor: Callable[[onnx.TensorProto], Array],
    sparse: Callable[[onnx.SparseTensorProto], Array],
) -> dict[str, tuple[int, Any]]:
    """Name -> (AttributeProto type, plain value).

    ``bound`` holds the attributes of the function call the node is inlined for: an attribute that refers to one of them
    takes its value, or is left off when the call does not give it. A graph stays a GraphProto. Raises Unsupported for
    types and for sequences of tensors or graphs as attributes, ModelError for text that is not UTF-8.
    """
    out: dict[str, tuple[int, Any]] = {}
    for a in node.attribute:
        if a.ref_attr_name:
            if a.ref_attr_name in bound:
                out[a.name] = bound[a.ref_attr_name]
            continue
        value: Any
        match a.type:
            case AttributeProto.STRING:
                value = _text(a.s, a.name)
            case AttributeProto.STRINGS:
                value = [_text(s, a.name) for s in a.strings]
            case AttributeProto.TENSOR:
                value = tensor(a.t)
            case AttributeProto.SPARSE_TENSOR:
                value = sparse(a.sparse_tensor)
            case kind if kind in _PLAIN:
                value = onnx.helper.get_attribute_value(a)
            case _:
                raise Unsupported(f"attribute {a.name!r} is of a type that is not supported")
        out[a.name] = (a.type, value)
    return out


_PLAIN = frozenset(
    {AttributeProto.INT, AttributeProto.INTS, AttributeProto.FLOAT, AttributeProto.FLOATS, AttributeProto.GRAPH}
)
"""Types of attributes with values that need no conversion."""


def _text(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise ModelError(f"attribute {name!r} is not valid UTF-8 text") from None


# ---------------------------------------------------------------- schemas


NO_SUCH_OPERATOR = "ONNX has no such operator"
ONCE_EXPERIMENTAL = frozenset({"MeanVarianceNormalization", "ThresholdedRelu"})
"""Operators that occur in files of opsets before their own: they were experimental then, without a schema."""
FUSED_EARLIER = {"LayerNormalization": 17}
"""Operators that ONNX Runtime's optimizers write into files of any opset, with their meaning at this opset."""


@dataclass(frozen=True)
class Schema:
    """The rules of one operator at one opset. ``attributes``: name -> (type, required)."""

    attributes: Mapping[str, tuple[int, bool]]
    required_inputs: tuple[str, ...]
    """Names of the leading operands that are required."""
    inputs: tuple[int, int]
    max_outputs: int
    variadic_from: int | None
    """The first of any number of operands, which are all required."""
    types: tuple[str, ...] = ()
    """The type parameter ("T") of each operand, or its type."""


@lru_cache(maxsize=4096)
def schema(op_type: str, domain: str, opset: int) -> Schema | str | None:
    """The schema; a text saying why the operator does not exist at this opset; None for domains ONNX does not define."""
    if domain not in ("", "ai.onnx.ml"):
        return None
    found = onnx_protos.schema(op_type, domain, opset if domain else max(opset, FUSED_EARLIER.get(op_type, 0)))
    if found is None:
        schemas = onnx.defs.get_all_schemas_with_history()
        since = [s.since_version for s in schemas if (s.name, s.domain) == (op_type, domain)]
        known = since and not (domain == "" and op_type in ONCE_EXPERIMENTAL)
        return f"the operator came with opset {min(since)}" if known else NO_SUCH_OPERATOR
    if found.deprecated:
        return f"the operator was removed from ONNX in opset {found.since_version}"
    single = onnx.defs.OpSchema.FormalParameterOption.Single
    variadic = onnx.defs.OpSchema.FormalParameterOption.Variadic
    required = []
    for parameter in found.inputs:
        if parameter.option != single:
            break
        required.append(parameter.name)
    return Schema(
        {k: (int(a.type.value), a.required) for k, a in found.attributes.items()},
        tuple(required),
        (found.min_input, found.max_input),
        found.max_output,
        len(found.inputs) - 1 if found.inputs and found.inputs[-1].option == variadic else None,
        tuple(parameter.type_str for parameter in found.inputs),
    )


BREAKS_SCHEMA = (
    "the node is not valid ONNX at the model's opset (see onnx.checker): export the model again, or correct the node"
)


def check_node(node: onnx.NodeProto, attrs: Mapping[str, tuple[int, Any]], rules: Schema) -> None:
    """Raise ModelError if a node breaks its operator's schema (operand count, attribute names and types)."""
    if (fault := _schema_fault(node, attrs, rules)) is not None:
        raise ModelError(fault, hint=BREAKS_SCHEMA)


def _schema_fault(node: onnx.NodeProto, attrs: Mapping[str, tuple[int, Any]], rules: Schema) -> str | None:
    """How a node breaks its operator's schema, or None."""
    low, high = rules.inputs
    if not low <= len(node.input) <= high:
        wanted = f"{low}" if low == high else f"{low} to {high}" if high < 1 << 30 else f"at least {low}"
        return f"has {len(node.input)} operands, needs {wanted}"
    for i, parameter in enumerate(rules.required_inputs[: len(node.input)]):
        if not node.input[i]:
            return f"lacks its operand {parameter!r}"
    given = max((i + 1 for i, name in enumerate(node.input) if name), default=0)
    for i in range(given if rules.variadic_from is None else rules.variadic_from, given):
        if not node.input[i]:
            return f"lacks its operand {i}"
    if len(node.output) > rules.max_outputs:
        return f"has {len(node.output)} outputs, the operator has at most {rules.max_outputs}"
    for name, (kind, _) in attrs.items():
        known = rules.attributes.get(name)
        if known is None:
            return f"has the unknown attribute {name!r}"
        if known[0] != kind:
            names = {v: k for k, v in AttributeProto.AttributeType.items()}
            return f"attribute {name!r} is of type {names.get(kind, kind)}, must be {names[known[0]]}"
    for name, (_, needed) in rules.attributes.items():
        if needed and name not in attrs:
            return f"lacks its attribute {name!r}"
    return None


def variadic_outputs(op_type: str, domain: str, opset: int) -> bool:
    """Whether an operator's number of outputs has a meaning (Split); unused outputs are then kept."""
    rules = schema(op_type, domain, opset)
    return isinstance(rules, Schema) and rules.max_outputs >= 1 << 30
