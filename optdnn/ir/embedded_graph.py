"""An optimized graph inside of an engine: plain data next to the program, so that the engine alone can be tuned again.

The graph's structure is a table in the program's ``meta``. Constants are not stored twice: if a step reads a view of a packed
weight with exactly the elements of a constant, the view replaces the constant. If a launch reads an fp32 constant in parts of
fp16, a correction of 2 bits per weight is a blob (:mod:`optdnn.ir.weights_in_parts`); if it reads one rounded to tf32, 16 bits
per weight. Only constants that no step reads in these forms (biases in another type, scattered stems) are separate blobs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from optdnn.errors import EngineError, InternalError, ShapeError
from optdnn.ir.graph import STRUCTURAL, ConstantAttrs, Graph, Op, Output, Value
from optdnn.ir.strips import contiguous, equal
from optdnn.ir.weights_in_parts import WeightInParts, corrected, correction, digest, view_of, weights_of
from optdnn.limits import FOLDED_BYTES
from optdnn.ops.base import Attrs, Known
from optdnn.ops.fused import plain_value, typed_attrs
from optdnn.ops.table import OPDEFS
from optdnn.runtime.program import Plain, Program
from optdnn.runtime.steps.attrs import attrs_from_plain, attrs_to_plain
from optdnn.types import DTYPES, FP32, Array, TensorType, dtype_name, to_tf32

KEY = "graph"
"""The key in the program's ``meta``."""
LARGE = 1 << 10
"""Constants of fewer bytes are stored as they are, without a search for a view."""
MOST_TIMES = 4
"""Most bytes of a graph's constants per byte of the blobs, apart from what constant folding may add: constants may share a blob."""


def hold(graph: Graph, program: Program) -> Program:
    """The program with its graph. A graph that cannot be stored (bodies of control flow, sizes that depend on data) is left out."""
    find = _Finder(program)
    try:
        table = _graph_to_plain(graph, find.place)
    except (InternalError, ShapeError):
        return program
    program.blobs = find.blobs
    program.meta[KEY] = table
    return program


def held(program: Program) -> Graph:
    """The graph of :func:`hold`. Raises EngineError if the program has none, or one that this version cannot read."""
    table = program.meta.get(KEY)
    if table is None:
        raise EngineError("the engine does not hold its graph", hint="build it again from its model")
    try:
        return _graph_from_plain(table, program)
    except (KeyError, TypeError, ValueError, IndexError, ArithmeticError, InternalError) as error:
        raise EngineError(
            f"the engine's graph is not one of this version of optdnn: {error}",
            hint="build the engine again from its model",
        ) from error


def released(program: Program) -> Graph | None:
    """The graph, which is taken out of the program with the blobs that it alone reads; None if the program has none."""
    if KEY not in program.meta:
        return None
    graph = held(program)
    del program.meta[KEY]
    numbers = [*(b.blob for b in program.buffers), *(k.cubin for k in program.kernels)]
    del program.blobs[
        1 + max((n for n in numbers if n is not None), default=-1) :
    ]  # a graph's own blobs are the last ones
    return graph


# ---------------------------------------------------------------- constants


class _Finder:
    """Looks for constants among the views of constants that steps read."""

    def __init__(self, program: Program):
        self.blobs = list(program.blobs)
        self._views: dict[tuple[str, int], dict[tuple[Any, ...], Array]] = {}
        self._parts: dict[int, list[tuple[int, int, WeightInParts]]] = {}
        for number, step in enumerate(program.steps):
            for operand, weight in weights_of(step, program, self.blobs):
                self._parts.setdefault(weight.size, []).append((number, operand, weight))
            operands = (*step.inputs, *step.outputs)
            for view in step.params.get("reads", ()):
                if view is None:
                    continue
                operand, offset, shape, strides = view
                blob = program.buffers[operands[operand]].blob
                if blob is not None and 0 not in shape and min(strides, default=0) >= 0:
                    array = view_of(self.blobs[blob], offset, shape, strides)
                    key = (dtype_name(array.dtype), array.size)
                    self._views.setdefault(key, {})[blob, offset, tuple(shape), tuple(strides)] = array

    def place(self, array: Array) -> Plain:
        """The place of a constant: that of a blob or view (:meth:`_seen`), or a table (:meth:`_in_parts`, :meth:`_rounded`)."""
        if array.nbytes >= LARGE and (found := self._seen(array)) is not None:
            return found
        for number, blob in enumerate(self.blobs):
            same = blob.dtype == array.dtype and blob.shape == array.shape
            if same and np.array_equal(_bytes(blob), _bytes(array)):
                return [number, 0, None]
        if array.nbytes >= LARGE and array.dtype == FP32 and (near := self._in_parts(array) or self._rounded(array)):
            return near
        return [self._add(np.ascontiguousarray(array).reshape(array.shape)), 0, None]

    def _seen(self, array: Array) -> list[Plain] | None:
        """The view with exactly these elements: [blob, offset, strides] (elements), and its shape if that is another one. None if
        there is none."""
        for (blob, offset, _, strides), found in self._views.get((dtype_name(array.dtype), array.size), {}).items():
            for axes in _orders(found.shape, array.shape):
                view = found.transpose(axes).squeeze()
                if _equal(view, array.reshape(view.shape)):
                    long = [strides[a] for a in axes if found.shape[a] != 1]
                    return [blob, offset, *_spread(array.shape, view.shape, long)]
        return None

    def _rounded(self, array: Array) -> Plain:
        """The view of the constant rounded to tf32, the blob with the units in the last place that it lacks, and the constant's
        digest. None if there is no such view."""
        rounded = to_tf32(array)
        if (view := self._seen(rounded)) is None:
            return None
        low = (_bits(array) - _bits(rounded)).astype(np.int16)
        return {"rounded": view, "low": self._add(low), "sha256": digest(array)}

    def _in_parts(self, array: Array) -> Plain:
        """The launch that reads the constant in parts of fp16: its step and operand, whether this is the transposed constant, the
        blob with the correction, and the constant's digest. None if there is no such launch."""
        for step, operand, weight in self._parts.get(array.size, ()):
            for axes in _orders(weight.shape, array.shape):
                long = [a for a in axes if weight.shape[a] != 1]
                transposed = long != sorted(long)
                turned = (contiguous(array.squeeze().T) if transposed else array).reshape(weight.shape)
                if _correction(turned[:1], weight.begin()) is None or (found := _correction(turned, weight)) is None:
                    continue
                held = {"step": step, "operand": operand, "transposed": transposed, "correction": self._add(found)}
                return {**held, "sha256": digest(array)}
        return None

    def _add(self, blob: Array) -> int:
        self.blobs.append(blob)
        return len(self.blobs) - 1


def _correction(array: Array, weight: WeightInParts) -> Array | None:
    """The correction of the weights, or None if they are not these weights: then it is longer than the weights themselves."""
    found = correction(array, weight)
    return found if found.nbytes < array.nbytes else None


def _orders(view: Sequence[int], shape: Sequence[int]) -> list[tuple[int, ...]]:
    """Orders of the view's axes that may give the shape, ignoring axes of length 1: the given order, or transposed.

    In the given order the axes may be split or joined: the rows of both directions of a recurrent layer are one axis of the view.
    Transposed, several axes of the view may be one axis of the shape: the rows of one of two matrices that alternate in blocks."""
    wanted = [n for n in shape if n != 1]
    long = [i for i, n in enumerate(view) if n != 1]
    short = [i for i, n in enumerate(view) if n == 1]
    turns = range(len(long)) if len(wanted) == 2 else range(1)
    orders = ([*long[k:], *long[:k]] for k in turns)
    return [(*short, *o) for o in orders if o == long or _splits([view[i] for i in o], wanted)]


def _splits(parts: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether the axes of ``parts``, all longer than 1, are those of the shape, each whole or split into several."""
    rest = list(parts)
    for n in shape:
        while n > 1 and rest and n % rest[0] == 0:
            n //= rest.pop(0)
        if n != 1:
            return False
    return not rest


def _spread(shape: Sequence[int], parts: Sequence[int], strides: Sequence[int]) -> list[Plain]:
    """Strides of the shape, or of its parts and their shape, given the lengths of parts above 1 and their strides."""
    if [n for n in shape if n != 1] != list(parts):
        return [list(strides), list(parts)]
    left = iter(strides)
    return [[next(left) if n != 1 else 0 for n in shape]]


def _equal(a: Array, b: Array) -> bool:
    first = (0,) * (a.ndim - 1)
    return np.array_equal(_bits(a[first]), _bits(b[first])) and equal(_bits(a), _bits(b))


def _bits(a: Array) -> Array:
    """The elements as integers: equal NaNs compare equal, and zeros of different sign do not."""
    return a.view({1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[a.dtype.itemsize])


def _bytes(a: Array) -> Array:
    return np.ascontiguousarray(a).reshape(-1).view(np.uint8)


# ---------------------------------------------------------------- the graph


def _graph_to_plain(graph: Graph, place: Callable[[Array], Plain]) -> dict[str, Plain]:
    rows: list[Plain] = []
    for op in graph.order():
        outputs = [
            [o.name, dtype_name(o.type.dtype), list(o.type.static_shape), o.type.layout, _known_to_plain(o.known)]
            for o in op.outputs
        ]
        attrs = place(op.attrs.value) if op.kind == "Constant" else _attrs_to_plain(op.attrs)
        inputs = [None if v is None else [v.op, v.port] for v in op.inputs]
        rows.append([op.id, op.kind, attrs, inputs, outputs, sorted(op.src)])
    return {"name": graph.name, "ops": rows, "inputs": list(graph.inputs), "outputs": list(graph.outputs)}


def _known_to_plain(known: Known | None) -> Plain:
    if known is None:
        return None
    if known.dtype == object:
        raise InternalError("a symbolic value cannot be kept")
    return attrs_to_plain({"known": known})["known"]


def _graph_from_plain(table: Mapping[str, Any], program: Program) -> Graph:
    _check_size(table, program)
    graph = Graph(table["name"])
    for number, kind, attrs, inputs, outputs, src in table["ops"]:
        outs = []
        for name, dtype, shape, layout, known in outputs:
            value = None if known is None else attrs_from_plain({"known": known})["known"]
            outs.append(Output(name, TensorType(DTYPES[dtype], tuple(shape), layout), value))
            graph._names.add(name)
        values = tuple(None if v is None else Value(*v) for v in inputs)
        made: Any = _constant(attrs, outs[0].type, program) if kind == "Constant" else _attrs_from_plain(kind, attrs)
        graph.insert(Op(number, kind, made, values, tuple(outs), frozenset(src)))
    graph.inputs, graph.outputs = list(table["inputs"]), list(table["outputs"])
    graph._ids = itertools.count(1 + max((row[0] for row in table["ops"]), default=-1))
    graph._order = [row[0] for row in table["ops"]]  # the order is stored, too: steps follow it
    return graph


def _size(shape: Sequence[int]) -> int:
    """The number of elements. Raises ValueError for more axes than NumPy has: their product alone could take long."""
    if len(shape) > 64:
        raise ValueError(f"a constant has {len(shape)} axes")
    return math.prod(shape)


def _check_size(table: Mapping[str, Any], program: Program) -> None:
    """Raises ValueError if the constants need far more memory than the blobs: views may repeat elements."""
    types = (row[4][0] for row in table["ops"] if row[1] == "Constant")
    needed = sum(max(0, _size(shape)) * DTYPES[dtype].itemsize for _, dtype, shape, *_ in types)
    if needed > MOST_TIMES * sum(blob.nbytes for blob in program.blobs) + FOLDED_BYTES.value:
        raise ValueError(f"its constants have {needed} bytes, far more than its weights ({FOLDED_BYTES.hint})")


def _constant(place: Any, type: TensorType, program: Program) -> ConstantAttrs:
    shape = type.static_shape
    if isinstance(place, Mapping):
        array = (_from_rounded if "rounded" in place else _from_parts)(place, shape, program)
        if digest(array) != place["sha256"]:
            raise ValueError("what a launch reads of a weight, and its correction, do not give the weight")
    else:
        array = _from_view(place, shape, program)
    if array.shape != shape or array.dtype != type.dtype:
        raise ValueError(f"a constant is {array.dtype}{list(array.shape)}, not {type}")
    return ConstantAttrs(np.ascontiguousarray(array).reshape(shape))


def _from_view(place: Sequence[Any], shape: tuple[int, ...], program: Program) -> Array:
    """The inverse of :meth:`_Finder._seen`. A place without strides is a whole blob."""
    number, offset, strides, *split = place
    blob = program.blobs[number]
    (parts,) = split or [shape]
    if _size(parts) != _size(shape):
        raise ValueError(f"a constant of {shape} is a view of {parts}")
    array = blob if strides is None else view_of(blob, offset, parts, strides)
    return contiguous(array).reshape(shape) if split else array


def _from_rounded(place: Mapping[str, Any], shape: tuple[int, ...], program: Program) -> Array:
    """The inverse of :meth:`_Finder._rounded`."""
    rounded, low = contiguous(_from_view(place["rounded"], shape, program)), program.blobs[place["low"]]
    if rounded.dtype != FP32 or low.dtype != np.int16 or low.shape != shape:
        raise ValueError(f"a weight of {shape} is rounded from {low.dtype}{list(low.shape)}")
    exact: Array = (_bits(rounded) + low.astype(np.uint32)).view(FP32)
    return exact


def _from_parts(place: Mapping[str, Any], shape: tuple[int, ...], program: Program) -> Array:
    """The inverse of :meth:`_Finder._in_parts`."""
    weight = dict(weights_of(program.steps[place["step"]], program, program.blobs))[place["operand"]]
    exact = corrected(weight, program.blobs[place["correction"]])
    if place["transposed"]:
        exact = contiguous(exact.reshape([n for n in reversed(shape) if n != 1]).T)
    return exact.reshape(shape)


def _attrs_to_plain(attrs: Any) -> dict[str, Plain]:
    if not is_dataclass(attrs):
        raise InternalError(f"attributes of type {type(attrs).__name__} cannot be kept")
    return attrs_to_plain({f.name: plain_value(getattr(attrs, f.name)) for f in fields(attrs)})


def _attrs_from_plain(kind: str, plain: Any) -> Attrs:
    given = attrs_from_plain(plain)
    return Attrs() if kind in STRUCTURAL else typed_attrs(OPDEFS[kind], given)
