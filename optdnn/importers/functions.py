"""ONNX functions: the definitions of ONNX's own operators, attribute defaults, references to a call's attributes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import onnx
import onnx.helper

from optdnn.errors import ModelError
from optdnn.importers.model import FunctionKey, Model, domain_of
from optdnn.ir.onnx_protos import schema
from optdnn.limits import FUNCTION_NESTING, INLINED_NODES
from optdnn.ops.exchange import onnx_number
from optdnn.types import TensorType


def check_calls(model: Model) -> None:
    """Raise ModelError if inlining the calls of a model's functions gives too many nodes: functions that call one another twice
    grow exponentially. Recursive calls are left to the import, which names them."""
    if not model.functions:
        return
    totals: dict[FunctionKey, int] = {}
    opened: set[FunctionKey] = set()
    stack = list(_calls(model.proto.graph.node, model))
    while stack:
        key = stack[-1]
        callees = list(_calls(model.functions[key].node, model))
        waiting = [c for c in callees if c not in totals and c not in opened]
        opened.add(key)
        if key not in totals and waiting:
            stack.extend(waiting)
            continue
        stack.pop()
        totals[key] = len(model.functions[key].node) + sum(totals.get(c, 0) for c in callees)
    total = sum(totals[c] for c in _calls(model.proto.graph.node, model))
    if total > INLINED_NODES.value:
        raise ModelError(f"{model.name} has {total} nodes once its functions are inlined", hint=INLINED_NODES.hint)


def too_deep() -> str:
    """The message for calls that are nested too deeply."""
    return f"functions call one another more than {FUNCTION_NESTING.value} deep (recursion?)"


def _calls(nodes: Sequence[onnx.NodeProto], model: Model) -> Iterator[FunctionKey]:
    """The functions that nodes call, also from subgraphs."""
    left = list(nodes)
    while left:
        node = left.pop()
        key = (domain_of(node.domain), node.op_type, node.overload)
        if key in model.functions:
            yield key
        for a in node.attribute:
            left.extend(a.g.node)


def definition(
    node: onnx.NodeProto, domain: str, opset: int, types: Sequence[TensorType | None] | None
) -> onnx.FunctionProto | None:
    """ONNX's own function that defines the operator at this opset, or None.

    ``types`` are the operands' types (None: absent), which some definitions depend on; None if they are unknown.
    """
    found = schema(node.op_type, domain, opset)
    if found is None:
        return None
    data = b""
    if found.has_function:
        versions = [v for v in found.function_opset_versions if v <= opset]
        if versions:
            data = found.get_function_with_opset_version(max(versions))
    elif found.has_context_dependent_function and types is not None:
        versions = [v for v in found.context_dependent_function_opset_versions if v <= opset]
        if versions:
            protos = [onnx.TypeProto() if t is None else _type_proto(t) for t in types]
            data = found.get_context_dependent_function_with_opset_version(
                max(versions), node.SerializeToString(), [p.SerializeToString() for p in protos]
            )
    if not data:
        return None
    body = onnx.FunctionProto()
    body.ParseFromString(data)
    return body


def default_attributes(function: onnx.FunctionProto) -> onnx.NodeProto:
    """A node that holds the attribute defaults of a function."""
    node = onnx.NodeProto()
    node.attribute.extend(function.attribute_proto)
    return node


def resolved(node: onnx.NodeProto, attrs: Mapping[str, tuple[int, Any]]) -> onnx.NodeProto:
    """``node`` with references to attributes of a call replaced by their values."""
    if not any(a.ref_attr_name for a in node.attribute):
        return node
    plain = onnx.NodeProto()
    plain.CopyFrom(node)
    del plain.attribute[:]
    plain.attribute.extend(onnx.helper.make_attribute(k, v, attr_type=t) for k, (t, v) in attrs.items())
    return plain


@lru_cache(maxsize=1024)
def schema_defaults(op_type: str, domain: str, opset: int) -> Mapping[str, tuple[int, Any]]:
    """The attribute defaults that ONNX's schema declares."""
    found = schema(op_type, domain, opset)
    out: dict[str, tuple[int, Any]] = {}
    for name, a in found.attributes.items():
        if a.default_value.name:
            out[name] = (a.default_value.type, onnx.helper.get_attribute_value(a.default_value))
            if isinstance(out[name][1], bytes):
                out[name] = (a.default_value.type, out[name][1].decode())
    return out


def _type_proto(t: TensorType) -> onnx.TypeProto:
    shape = None if t.shape is None else [d if isinstance(d, int) else str(d) for d in t.shape]
    return onnx.helper.make_tensor_type_proto(onnx_number(t.dtype), shape)
