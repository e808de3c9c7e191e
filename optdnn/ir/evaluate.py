"""Evaluate a graph in NumPy, op by op: the oracle that passes and targets are held against."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from optdnn.errors import InputError
from optdnn.ir.graph import Graph, Op, Output, Value
from optdnn.ops.fused import plain_attrs
from optdnn.runtime.reference.run import run_kernel
from optdnn.types import FP64, Array, is_float

T = TypeVar("T")


def evaluate(graph: Graph, feeds: Mapping[str, Array]) -> dict[str, Array]:
    """Outputs by name, in order. ``feeds`` maps each input's name to an array. Raises InputError for a missing input."""
    return {
        graph.op(i).outputs[0].name: v for i, v in zip(graph.outputs, values(graph, feeds, graph.outputs), strict=True)
    }


def values(graph: Graph, feeds: Mapping[str, Array], wanted: Sequence[int]) -> list[Array]:
    """First output of each op in ``wanted`` (op ids)."""
    results: dict[Value, Array] = {}
    left = {op.id: _fanout(graph, op) for op in graph.ops()}
    keep = set(wanted)
    for op in graph.order():
        if op.kind == "Input":
            name = op.outputs[0].name
            if name not in feeds:
                raise InputError(f"input {name!r} is missing")
            results[op.value] = np.asarray(feeds[name])
        elif op.kind == "Constant":
            results[op.value] = op.attrs.value
        elif op.kind == "Output":
            source = op.inputs[0]
            assert source is not None
            results[op.value] = results[source]
        else:
            operands = [None if v is None else results[v] for v in op.inputs]
            dtypes = [o.type.dtype for o in op.outputs]
            for i, array in enumerate(run_kernel(op.kind, operands, plain_attrs(op.kind, op.attrs), dtypes)):
                results[Value(op.id, i)] = array
        for producer in {v.op for v in op.inputs if v is not None}:
            left[producer] -= 1
            if not left[producer] and producer not in keep:
                for i in range(len(graph.op(producer).outputs)):
                    results.pop(Value(producer, i), None)
    return [results[Value(i, 0)] for i in wanted]


def _fanout(graph: Graph, op: Op) -> int:
    return len(set(graph.nx.successors(op.id)))


def promote(graph: Graph) -> Graph:
    """A copy in float64: inputs, constants and casts to a narrower float are promoted, so exact passes compare to 1e-9."""
    out = Graph(graph.name)
    mapping: dict[Value, Value] = {}
    for op in graph.order():
        inputs = [None if v is None else mapping[v] for v in op.inputs]
        if op.kind == "Input":
            t = op.outputs[0].type
            mapping[op.value] = out.add_input(op.outputs[0].name, t.with_dtype(FP64) if is_float(t.dtype) else t)
        elif op.kind == "Constant":
            array = op.attrs.value
            mapping[op.value] = out.add_constant(
                array.astype(np.float64) if is_float(array.dtype) else array, op.outputs[0].name, op.src
            )
        elif op.kind == "Output":
            assert inputs[0] is not None
            out.add_output(inputs[0], op.outputs[0].name)
        else:
            attrs = promoted_attrs(op.attrs)
            names = [o.name for o in op.outputs]
            new = out.add(op.kind, inputs, attrs, names=names, outputs=len(op.outputs), src=op.src)
            for i in range(len(op.outputs)):
                mapping[Value(op.id, i)] = Value(new.id, i)
    return _in_order(graph, out)


def promoted_attrs(attrs: T) -> T:
    """Attributes with every floating dtype field (Cast.to and the like) set to float64, stages included."""
    from dataclasses import fields, is_dataclass, replace

    if not is_dataclass(attrs) or isinstance(attrs, type):
        return attrs
    changes: dict[str, object] = {}
    for f in fields(attrs):
        v = getattr(attrs, f.name)
        if isinstance(v, np.dtype) and is_float(v):
            changes[f.name] = FP64
        elif isinstance(v, np.ndarray) and is_float(v.dtype):
            changes[f.name] = v.astype(np.float64)
        elif is_dataclass(v):
            changes[f.name] = promoted_attrs(v)
        elif isinstance(v, tuple) and any(is_dataclass(x) for x in v):
            changes[f.name] = tuple(promoted_attrs(x) for x in v)
    return replace(attrs, **changes) if changes else attrs


def _in_order(graph: Graph, out: Graph) -> Graph:
    """Inputs and outputs in the order of ``graph``."""

    def name(g: Graph, i: int) -> Output:
        return g.op(i).outputs[0]

    for attribute in ("inputs", "outputs"):
        position = {name(graph, i).name: k for k, i in enumerate(getattr(graph, attribute))}
        getattr(out, attribute).sort(key=lambda i: position[name(out, i).name])
    return out


def random_feeds(graph: Graph, seed: int = 0, sizes: Mapping[str, int] | None = None) -> dict[str, Array]:
    """Seeded inputs for a graph: normal floats, small non-negative integers, booleans; symbols from ``sizes`` (else 2)."""
    from optdnn.dim import evaluate as evaluate_dim

    rng = np.random.default_rng(seed)
    names: Iterable[str] = graph.symbols()
    given = {**dict.fromkeys(names, 2), **(sizes or {})}
    feeds: dict[str, Array] = {}
    for i in graph.inputs:
        out = graph.op(i).outputs[0]
        shape = tuple(evaluate_dim(d, given) for d in out.type.dims)
        if is_float(out.type.dtype):
            feeds[out.name] = rng.standard_normal(shape).astype(out.type.dtype)
        elif out.type.dtype.kind == "b":
            feeds[out.name] = rng.integers(0, 2, shape).astype(bool)
        else:
            feeds[out.name] = rng.integers(0, 8, shape).astype(out.type.dtype)
    return feeds
