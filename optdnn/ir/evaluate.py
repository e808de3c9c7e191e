"""Evaluate a graph in NumPy, op by op: the oracle for passes and targets."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from optdnn.dim import Dim
from optdnn.dim import evaluate as evaluate_dim
from optdnn.errors import InputError, RunError, ShapeError
from optdnn.ir.body import GraphBody, with_dtypes
from optdnn.ir.graph import Graph, Op, Output, Value
from optdnn.ops.fused import plain_attrs
from optdnn.ops.table import OPDEFS
from optdnn.runtime.reference.run import run_kernel
from optdnn.types import FP64, Array, DType, is_float, random_array

T = TypeVar("T")


Read = Callable[[Op, list[Array | None]], list[Array | None]]
"""A function that changes the operands of an op."""


def evaluate(graph: Graph, feeds: Mapping[str, Array], read: Read | None = None) -> dict[str, Array]:
    """Outputs by name, in order. ``feeds`` maps each input's name to an array of its dtype and shape; ``read`` may change the
    operands of an op.

    Raises InputError for an input that is missing, unknown, or of another dtype or shape (equal symbols must have equal
    sizes), and RunError if a kernel refuses its operands' values.
    """
    names = {graph.op(i).outputs[0].name for i in graph.inputs}
    if unknown := sorted(feeds.keys() - names):
        raise InputError(
            f"there is no input {unknown[0]!r}", hint=f"the inputs are {', '.join(sorted(map(repr, names)))}"
        )
    sources = [graph.op(i).inputs[0] for i in graph.outputs]
    arrays = values(graph, feeds, [v for v in sources if v is not None], read)
    return {graph.op(i).outputs[0].name: array for i, array in zip(graph.outputs, arrays, strict=True)}


def values(graph: Graph, feeds: Mapping[str, Array], wanted: Sequence[Value], read: Read | None = None) -> list[Array]:
    """Any values of the graph. Only their ancestors are computed, and each array is dropped after its last use."""
    needed, uses = _needed(graph, wanted)
    results: dict[Value, Array] = {}
    sizes: dict[str, tuple[int, str]] = {}
    for op in graph.order():
        if op.id not in needed or op.kind == "Output":
            continue
        if op.kind == "Input":
            results[op.value] = _checked(op.outputs[0], feeds, sizes)
        elif op.kind == "Constant":
            results[op.value] = op.attrs.value
        else:
            operands = [None if v is None else results[v] for v in op.inputs]
            if read is not None:
                operands = read(op, operands)
            dtypes = [o.type.dtype for o in op.outputs]
            made = run_kernel(op.kind, operands, plain_attrs(op.definition, op.attrs), dtypes)
            count = (
                len(made) if op.kind == "Split" else min(len(made), len(op.outputs))
            )  # norms may give more than are read
            if count != len(op.outputs):
                raise RunError(f"{op.kind} {op.name!r} gives {count} results, it has {len(op.outputs)} outputs")
            for i, array in enumerate(made):
                if uses.get(Value(op.id, i)):
                    results[Value(op.id, i)] = array
        for v in {v for v in op.inputs if v is not None}:
            uses[v] -= 1
            if not uses[v]:
                del results[v]
    return [results[v] for v in wanted]


def groups(
    graph: Graph, wanted: Sequence[Value], feeds: Mapping[str, Array], limit: int, copies: int = 0
) -> list[list[Value]]:
    """The values in consecutive groups of about ``limit`` bytes, including ``copies`` float64 copies of each value.

    A value whose size depends on data counts as 0 bytes.
    """
    sizes: dict[str, int] = {}
    for out in (graph.op(i).outputs[0] for i in graph.inputs):
        shape = zip(out.type.shape or (), feeds[out.name].shape, strict=False)
        sizes |= {str(d): n for d, n in shape if isinstance(d, Dim)}
    found: list[list[Value]] = []
    total = 0
    for v in wanted:
        t = graph.type(v)
        try:
            count = math.prod(d if isinstance(d, int) else evaluate_dim(d, sizes) for d in t.shape or ())
        except ShapeError:
            count = 0
        total += count * (t.dtype.itemsize + 8 * copies)
        if not found or total > limit:
            found.append([])
            total = count * (t.dtype.itemsize + 8 * copies)
        found[-1].append(v)
    return found


def _needed(graph: Graph, wanted: Sequence[Value]) -> tuple[set[int], dict[Value, int]]:
    """The ops that ``wanted`` depends on, and the number of reads of each value by these ops and by ``wanted``."""
    needed: set[int] = set()
    uses: dict[Value, int] = {}
    for v in wanted:
        uses[v] = uses.get(v, 0) + 1
    stack = [v.op for v in wanted]
    while stack:
        op_id = stack.pop()
        if op_id not in needed:
            needed.add(op_id)
            for v in {v for v in graph.op(op_id).inputs if v is not None}:
                uses[v] = uses.get(v, 0) + 1
                stack.append(v.op)
    return needed, uses


def _checked(declared: Output, feeds: Mapping[str, Array], sizes: dict[str, tuple[int, str]]) -> Array:
    """The array given for an input. ``sizes``: symbol -> its size, and the input that set it."""
    if declared.name not in feeds:
        raise InputError(f"input {declared.name!r} is missing")
    array, t = np.asarray(feeds[declared.name]), declared.type
    what = f"input {declared.name!r} is {t}"
    if array.dtype != t.dtype:
        raise InputError(f"{what}, the array given is {array.dtype}")
    if t.shape is None:
        return array
    if array.ndim != len(t.shape):
        raise InputError(f"{what}, the array given has shape {list(array.shape)}")
    for size, d in zip(array.shape, t.shape, strict=True):
        if isinstance(d, int) and d != size:
            raise InputError(f"{what}, the array given has shape {list(array.shape)}")
        if isinstance(d, Dim):
            bound, by = sizes.setdefault(str(d), (size, declared.name))
            if bound != size:
                raise InputError(f"{what}, and {d} is {size} in it but {bound} in input {by!r}")
    return array


def promote(graph: Graph) -> Graph:
    """A copy in float64: inputs, constants and casts to a narrower float are promoted, so exact passes compare to 1e-9."""
    out = Graph(graph.name)
    mapping: dict[Value, Value] = {}
    for i in graph.inputs:
        port = graph.op(i).outputs[0]
        promoted = port.type.with_dtype(FP64) if is_float(port.type.dtype) else port.type
        mapping[Value(i)] = out.add_input(port.name, promoted)
    for op in graph.order():
        if op.kind in ("Input", "Output"):
            continue
        inputs = [None if v is None else mapping[v] for v in op.inputs]
        if op.kind == "Constant":
            array = op.attrs.value
            mapping[op.value] = out.add_constant(
                array.astype(np.float64) if is_float(array.dtype) else array, op.outputs[0].name, op.src
            )
        elif op.definition.traits.own_precision:
            _in_own_precision(out, graph, op, inputs, mapping)
        else:
            attrs = promoted_attrs(op.attrs)
            names = [o.name for o in op.outputs]
            new = out.add(op.kind, inputs, attrs, names=names, outputs=len(op.outputs), src=op.src)
            mapping.update(zip(op.values, new.values, strict=True))
    for op in map(graph.op, graph.outputs):
        (source,) = op.inputs
        assert source is not None
        out.add_output(mapping[source], op.outputs[0].name)
    return out


def promoted_feeds(feeds: Mapping[str, Array]) -> dict[str, Array]:
    """Inputs for a promoted graph: floats in float64, the rest as it is."""
    return {n: a.astype(np.float64) if is_float(a.dtype) else a for n, a in feeds.items()}


def _in_own_precision(
    out: Graph, graph: Graph, op: Op, inputs: Sequence[Value | None], mapping: dict[Value, Value]
) -> None:
    """Add an op to a promoted graph in its original types, between casts."""

    def cast(value: Value, dtype: DType) -> Value:
        if out.type(value).dtype == dtype:
            return value
        return out.add("Cast", [value], OPDEFS["Cast"].attrs(to=dtype), src=op.src).value  # type: ignore[call-arg]

    own = [
        None if new is None or old is None else cast(new, graph.type(old).dtype)
        for new, old in zip(inputs, op.inputs, strict=True)
    ]
    names = [o.name for o in op.outputs]
    made = out.add(op.kind, own, op.attrs, names=names, outputs=len(op.outputs), src=op.src)
    for i, o in enumerate(op.outputs):
        value = Value(made.id, i)
        mapping[Value(op.id, i)] = cast(value, FP64) if is_float(o.type.dtype) else value


def promoted_attrs(attrs: T) -> T:
    """Attributes with every floating dtype field (Cast.to and the like) set to float64, stages included."""
    return with_dtypes(attrs, lambda t: FP64 if is_float(t) else t, lambda body: GraphBody(promote(body.graph)))


def random_feeds(graph: Graph, seed: int = 0, sizes: Mapping[str, int] | None = None) -> dict[str, Array]:
    """Seeded inputs for a graph (:func:`optdnn.types.random_array`).

    Symbols have their sizes from ``sizes``, otherwise 2.
    """
    rng = np.random.default_rng(seed)
    names: Iterable[str] = graph.symbols()
    given = {**dict.fromkeys(names, 2), **(sizes or {})}
    feeds: dict[str, Array] = {}
    for i in graph.inputs:
        out = graph.op(i).outputs[0]
        shape = tuple(evaluate_dim(d, given) for d in out.type.dims)
        feeds[out.name] = random_array(rng, out.type.dtype, shape)
    return feeds
