"""A graph inside of an operator's attributes: a branch of If, the body of a Loop or Scan."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from functools import cached_property
from typing import TypeVar

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.text import to_text
from optdnn.ops.base import Body, attrs_dict
from optdnn.ops.fused import plain_attrs
from optdnn.runtime.reference.nested import PlainGraph, PlainOp, TextShape
from optdnn.types import Array, DType, TensorType

T = TypeVar("T")


class GraphBody(Body):
    """An inner graph. It must not be changed any more; a body is equal only to itself."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self.inputs: tuple[TensorType, ...] = tuple(graph.op(i).outputs[0].type for i in graph.inputs)
        self.outputs: tuple[TensorType, ...] = tuple(graph.op(i).outputs[0].type for i in graph.outputs)

    @cached_property
    def plain(self) -> PlainGraph:
        graph, register = self.graph, {Value(i): k for k, i in enumerate(self.graph.inputs)}
        constants: list[Array] = []
        for op in graph.order():
            if op.kind == "Constant":
                register[op.value] = len(register)
                constants.append(op.attrs.value)
        ops = []
        for op in graph.order():
            if op.kind in ("Input", "Constant", "Output"):
                continue
            read = tuple(None if v is None else register[v] for v in op.inputs)
            dtypes = tuple(o.type.dtype for o in op.outputs)
            ops.append(PlainOp(op.kind, plain_attrs(op.definition, op.attrs), read, dtypes))
            for value in op.values:
                register[value] = len(register)
        sources = [graph.op(i).inputs[0] for i in graph.outputs]
        outputs = tuple(register[v] for v in sources if v)
        shapes = tuple(_text(t) for t in (*self.inputs, *self.outputs))
        return PlainGraph(len(graph.inputs), tuple(constants), tuple(ops), outputs, shapes)

    @cached_property
    def digest(self) -> str:
        """First 64 bits of the SHA-256 of the body's text form."""
        return hashlib.sha256(to_text(self.graph).encode()).hexdigest()[:16]

    def __repr__(self) -> str:
        return f"body of {len(self.graph)} ops, {self.digest}"


def _text(t: TensorType) -> TextShape:
    return None if t.shape is None else tuple(d if isinstance(d, int) else str(d) for d in t.shape)


def custom_digests(graph: Graph) -> set[str]:
    """The digests of the user's own operators in a graph and in the bodies inside of it."""
    found: set[str] = set()
    for op in graph.ops():
        if op.kind == "Custom":
            found.add(op.attrs.digest)
        for f in fields(op.attrs):
            value = getattr(op.attrs, f.name)
            if isinstance(value, GraphBody):
                found |= custom_digests(value.graph)
    return found


def bodies(op: Op) -> list[GraphBody]:
    """The bodies of an If, Loop or Scan."""
    return [v for v in attrs_dict(op.attrs).values() if isinstance(v, GraphBody)]


def with_dtypes(attrs: T, change: Callable[[DType], DType], inner: Callable[[GraphBody], GraphBody]) -> T:
    """Attributes in which ``change`` replaces each dtype, in fields, arrays and stages, and ``inner`` each body."""
    if not is_dataclass(attrs) or isinstance(attrs, type):
        return attrs
    changes: dict[str, object] = {}
    for f in fields(attrs):
        v = getattr(attrs, f.name)
        if isinstance(v, np.dtype):
            made: object = change(v)
        elif isinstance(v, np.ndarray):
            made = v if change(v.dtype) == v.dtype else v.astype(change(v.dtype))
        elif isinstance(v, GraphBody):
            made = inner(v)
        elif isinstance(v, tuple) and any(is_dataclass(x) for x in v):
            made = tuple(with_dtypes(x, change, inner) for x in v)
        else:
            made = with_dtypes(v, change, inner)
        if made is not v:
            changes[f.name] = made
    return replace(attrs, **changes) if changes else attrs
