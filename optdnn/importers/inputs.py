"""The inputs of an ONNX graph: declared types, symbols of unknown dimensions, and the shapes that the user gives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import onnx

from optdnn.dim import DimLike, symbol
from optdnn.errors import ModelError, ShapeError, UsageError
from optdnn.importers.tensors import element_count, element_type
from optdnn.ops.base import Unsupported
from optdnn.ranges import DimRange, Profile, ShapeSpec
from optdnn.types import TensorType

Size: TypeAlias = int | DimRange


def graph_inputs(
    inputs: Sequence[onnx.ValueInfoProto], shapes: Mapping[str, ShapeSpec], model: str
) -> Iterator[tuple[onnx.ValueInfoProto, TensorType | str]]:
    """Each input with its type, or with the reason why its type is not supported.

    A symbol that ``shapes`` gives a range has it; one that it binds is replaced by its size. Raises UsageError when
    ``shapes`` names no input, ShapeError where a given shape contradicts the declared one or two shapes of one profile
    bind one symbol differently, and where the rank is unknown and not given.
    """
    names = [v.name for v in inputs]
    for n in shapes:
        if n not in names:
            raise UsageError(f"{model} has no input {n!r}", hint=f"its inputs are {', '.join(map(repr, names))}")
    declared: dict[str, list[int | str]] = {}
    reasons: dict[str, str] = {}
    for v in inputs:
        where = f"{model}: input {v.name!r}"
        if not v.name or v.name in declared or v.name in reasons:
            raise ModelError(f"{where} {'is declared twice' if v.name else 'has no name'}")
        reason = refusal(v.type)
        if reason is not None:
            reasons[v.name] = reason
            continue
        declared[v.name] = _declared(v, shapes.get(v.name), where)
    for profile in getattr(shapes, "profiles", ()) or (shapes,):
        _bind(declared, profile, model)
    bound = _bind(declared, shapes, model)
    for v in inputs:
        if v.name in reasons:
            yield v, reasons[v.name]
            continue
        shape = [d if isinstance(d, int) else _symbol(d, bound.get(d)) for d in declared[v.name]]
        dtype = element_type(v.type.tensor_type.elem_type)
        element_count([d for d in shape if isinstance(d, int)], dtype.itemsize, f"{model}: input {v.name!r}")
        yield v, TensorType(dtype, tuple(shape))


def _bind(declared: Mapping[str, Sequence[int | str]], shapes: Mapping[str, ShapeSpec], model: str) -> dict[str, Size]:
    """What the given shapes bind each symbol to."""
    bound: dict[str, tuple[Size, str]] = {}
    for name, dims in declared.items():
        given = shapes.get(name)
        where = f"{model}: input {name!r}"
        for axis, (d, size) in enumerate(zip(dims, given or (), strict=False)):
            if size is None:
                continue
            if isinstance(d, str):
                value, other = bound.setdefault(d, (size, name))
                if value != size:
                    raise ShapeError(
                        f"{where} is {_show(dims)}, the shape given is {_show(given)}: it sets {d} to {size}, "
                        f"but the shape given for {other!r} sets it to {value}"
                    )
            elif d != size:
                raise ShapeError(
                    f"{where} is {_show(dims)}, the shape given is {_show(given)}: they differ in axis {axis}",
                    hint=f"only symbolic dimensions can be given; {d} is fixed in the model",
                )
    return {d: size for d, (size, _) in bound.items()}


def _symbol(name: str, size: Size | None) -> DimLike:
    if isinstance(size, int):
        return size
    return symbol(name) if size is None else symbol(name, size.min, size.max)


def profiles_of(inputs: Mapping[str, Sequence[DimLike]], shapes: Mapping[str, ShapeSpec]) -> tuple[Profile, ...]:
    """The profiles of ``shapes`` as ranges of symbols: what the imported inputs' symbolic dimensions are there.

    A symbol that a profile does not speak of may have any size in it.
    """
    found = []
    for profile in getattr(shapes, "profiles", ()):
        ranges: dict[str, DimRange] = {}
        for name, dims in inputs.items():
            for d, size in zip(dims, profile.get(name, ()), strict=False):
                if not isinstance(d, int) and size is not None:
                    ranges[str(d)] = size if isinstance(size, DimRange) else DimRange(size, size, size)
        found.append(ranges)
    return tuple(found)


def refusal(t: onnx.TypeProto) -> str | None:
    """Why values of this type are not supported, or None."""
    kind = t.WhichOneof("value")
    if kind != "tensor_type":
        return f"values of type {(kind or 'undefined').removesuffix('_type')} are not supported"
    try:
        element_type(t.tensor_type.elem_type)
    except Unsupported as error:
        return str(error)
    return None


def _declared(v: onnx.ValueInfoProto, given: ShapeSpec | None, where: str) -> list[int | str]:
    """Dimensions as integers and symbol names. Old exporters write -1 for an unknown one."""
    t = v.type.tensor_type
    if any(isinstance(d, int) and d < 0 for d in given or ()):
        raise ShapeError(f"{where}: the shape given, {_show(given)}, has a negative dimension")
    if not t.HasField("shape"):
        if given is None:
            raise ShapeError(f"{where} has no shape", hint=f"give it with --shape {v.name}=…")
        return [f"{v.name}.{i}" for i in range(len(given))]
    dims: list[int | str] = []
    for i, d in enumerate(t.shape.dim):
        if d.HasField("dim_value") and d.dim_value >= 0:
            dims.append(d.dim_value)
        elif d.HasField("dim_value") and d.dim_value < -1:
            raise ModelError(f"{where} has the negative dimension {d.dim_value}")
        else:
            dims.append(d.dim_param or f"{v.name}.{i}")
    if given is not None and len(given) != len(dims):
        raise ShapeError(f"{where} is {_show(dims)}, the shape given is {_show(given)}: they differ in rank")
    return dims


def _show(dims: Sequence[int | str | DimRange | None] | None) -> str:
    return "[" + ", ".join("?" if d is None else str(d) for d in dims or ()) + "]"


def known_type(t: onnx.TypeProto, name: str, symbols: Mapping[str, DimLike]) -> TensorType | None:
    """The type that a model declares for an inner value or an output, or None where it does not give element type and rank.

    ``symbols``: those that the inputs have, with their ranges.
    """
    if refusal(t) is not None or not t.tensor_type.HasField("shape"):
        return None
    dims: list[DimLike] = [
        d.dim_value
        if d.HasField("dim_value") and d.dim_value >= 0
        else symbols[d.dim_param]
        if d.dim_param in symbols
        else symbol(d.dim_param or f"{name}.{i}")
        for i, d in enumerate(t.tensor_type.shape.dim)
    ]
    return TensorType(element_type(t.tensor_type.elem_type), tuple(dims))
