"""Inputs with values given to the build: they become constants, so sizes that depend on them are known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from optdnn.errors import UsageError
from optdnn.importers.model import Model, Source, open_model
from optdnn.importers.tensors import element_type
from optdnn.ir.graph import Graph, Use, Value
from optdnn.ops.base import Unsupported
from optdnn.types import Array, dtype_name

SMALL = 64
"""The most elements of an input that holds sizes."""

SIZES: Mapping[str, frozenset[int]] = {
    **dict.fromkeys(("Reshape", "Expand", "Tile", "TopK", "OneHot", "Squeeze", "Unsqueeze", "Split", "AffineGrid"), frozenset({1})),
    **{f"Reduce{k}": frozenset({1}) for k in (
        "Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "SumSquare", "LogSum", "LogSumExp")},
    "Slice": frozenset({1, 2, 3, 4}), "Pad": frozenset({1, 3}), "Resize": frozenset({1, 2, 3}), "Range": frozenset({0, 1, 2}),
    "ConstantOfShape": frozenset({0}), "Col2Im": frozenset({1, 2}), "DFT": frozenset({1, 2}), "STFT": frozenset({1, 3}),
    "MelWeightMatrix": frozenset({0, 1}), "MaxUnpool": frozenset({2}), "CumSum": frozenset({1}), "CumProd": frozenset({1}),
    "Trilu": frozenset({1}), "Loop": frozenset({0, 1}), "If": frozenset({0}),
}  # fmt: skip
"""Kind -> the operand slots that hold sizes, axes, positions or counts, not data."""


def with_values(source: Source | Model, values: Mapping[str, Any]) -> Model:
    """The model with some inputs turned into initializers.

    Raises UsageError for a name that is not an input, and for a value that does not fit the input's type.
    """
    model = source if isinstance(source, Model) else open_model(source)
    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    ports = {v.name: v for v in proto.graph.input}
    for name, given in values.items():
        port = ports.get(name)
        if port is None:
            raise UsageError(
                f"{model.name} has no input {name!r} to give a value",
                hint=f"its inputs are {', '.join(map(repr, ports))}",
            )
        array = _fitting(port, given)
        proto.graph.input.remove(port)
        old = [t for t in proto.graph.initializer if t.name == name]  # a default, which the value replaces
        for t in old:
            proto.graph.initializer.remove(t)
        proto.graph.initializer.append(numpy_helper.from_array(array, name))
    return replace(model, proto=proto)


def _fitting(port: onnx.ValueInfoProto, given: Any) -> Array:
    """The value in the input's element type and declared shape."""
    t = port.type.tensor_type
    try:
        dtype = element_type(t.elem_type)
    except Unsupported as error:
        raise UsageError(f"input {port.name!r} cannot have a value: {error}") from error
    exact = np.asarray(given)
    fits = exact.dtype == dtype
    if not fits and exact.dtype.kind in "biuf":
        fits = bool((exact.astype(dtype).astype(np.float64) == exact.astype(np.float64)).all())
    array = exact.astype(dtype) if fits else exact
    if not fits:
        raise UsageError(f"{given!r} is not a value of {dtype_name(dtype)} for input {port.name!r}")
    if t.HasField("shape"):
        dims = [d.dim_value if d.HasField("dim_value") else None for d in t.shape.dim]
        if (len(dims) == 1 and not array.ndim) or (not dims and array.size == 1):
            array = array.reshape([1] * len(dims))
        if len(dims) != array.ndim or any(d is not None and d != n for d, n in zip(dims, array.shape, strict=True)):
            declared = ", ".join(
                d.dim_param or (str(d.dim_value) if d.HasField("dim_value") else "?") for d in t.shape.dim
            )
            raise UsageError(f"the value of input {port.name!r} has shape {list(array.shape)}, the input [{declared}]")
    return array


def size_inputs(graph: Graph) -> list[str]:
    """Names of the small inputs that hold only sizes, axes or positions: a value for these helps most."""
    decided: dict[Value, bool] = {}

    def says_sizes(value: Value) -> bool:
        if value not in decided:
            decided[value] = False  # the graph has no cycles; each value is examined once
            t, uses = graph.type(value), graph.uses(value)
            small = t.is_static and int(np.prod(t.static_shape)) <= SMALL and len(t.static_shape) <= 1
            decided[value] = small and bool(uses) and all(map(one, uses))
        return decided[value]

    def one(use: Use) -> bool:
        op = graph.op(use.op)
        if use.slot in SIZES.get(op.kind, ()):
            return True
        return bool(op.outputs) and op.kind != "Output" and all(
            says_sizes(v) for v in op.values if graph.uses(v))  # fmt: skip

    return [graph.op(i).outputs[0].name for i in graph.inputs if says_sizes(graph.op(i).value)]
