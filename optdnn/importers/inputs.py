"""The inputs of an ONNX graph: declared types, symbols of unknown dimensions, and the shapes that the user gives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import onnx

from optdnn.dim import Dim, DimLike, evaluate, substitute, symbol
from optdnn.dim_text import expressions, lone, parse_dim
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

    A symbol gets the range that ``shapes`` gives it; a symbol with a given size is replaced by the size. A dimension that the model
    declares as arithmetic on other inputs' symbols (:mod:`optdnn.dim_text`) follows from these and needs no size. Raises UsageError
    if ``shapes`` names no input. Raises ShapeError if a given shape contradicts the declared one, if two shapes of one profile
    bind one symbol differently, or if the rank is unknown and not given.
    """
    names = [v.name for v in inputs]
    for n in shapes:
        if n not in names:
            several = "; give --shape once for each input" if "=" in n else ""
            hint = f"its inputs are {', '.join(map(repr, names))}{several}"
            raise UsageError(f"{model} has no input {n!r}", hint=hint)
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
    derived = expressions(d for dims in declared.values() for d in dims)
    for profile in getattr(shapes, "profiles", ()) or (shapes,):
        _check_derived(declared, derived, profile, _bind(declared, derived, profile, model), model)
    bound = _bind(declared, derived, shapes, model)
    for v in inputs:
        if v.name in reasons:
            yield v, reasons[v.name]
            continue
        shape = [d if isinstance(d, int) else _dimension(d, derived, bound) for d in declared[v.name]]
        dtype = element_type(v.type.tensor_type.elem_type)
        element_count([d for d in shape if isinstance(d, int)], dtype.itemsize, f"{model}: input {v.name!r}")
        yield v, TensorType(dtype, tuple(shape))


def _bind(
    declared: Mapping[str, Sequence[int | str]],
    derived: Mapping[str, Dim],
    shapes: Mapping[str, ShapeSpec],
    model: str,
) -> dict[str, Size]:
    """The size of each symbol that the given shapes bind; ``derived`` dimensions bind none."""
    bound: dict[str, tuple[Size, str]] = {}
    for name, dims in declared.items():
        given = shapes.get(name)
        where = f"{model}: input {name!r}"
        for axis, (d, size) in enumerate(zip(dims, given or (), strict=False)):
            if size is None or d in derived:
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
                    hint=f"{d} is fixed in the model: export it with this dimension dynamic, to give it a size",
                )
    return {d: size for d, (size, _) in bound.items()}


def _check_derived(
    declared: Mapping[str, Sequence[int | str]],
    derived: Mapping[str, Dim],
    shapes: Mapping[str, ShapeSpec],
    bound: Mapping[str, Size],
    model: str,
) -> None:
    """Raises ShapeError if a dimension that follows from others' symbols is given a different size, or cannot be computed."""
    for name, dims in declared.items():
        given = shapes.get(name) or (None,) * len(dims)
        for axis, (d, size) in enumerate(zip(dims, given, strict=True)):
            expression = derived.get(d) if isinstance(d, str) else None
            if expression is None:
                continue
            where = f"{model}: axis {axis} of input {name!r} is {expression}"
            names = sorted(s.name for s in expression.symbols())
            free = [n for n in names if n not in bound]
            if free and size is not None:
                raise ShapeError(
                    f"{where}, the shape given has {size} there, and none gives {', '.join(free)}",
                    hint=f"give {', '.join(free)} where it is a separate dimension; dimensions that follow need no size",
                )
            if free:
                continue
            sizes = ", ".join(f"{n} = {bound[n]}" for n in names)
            try:
                ends = {w: evaluate(expression, {n: _end(bound[n], w) for n in names}) for w in _ENDS}
            except ShapeError as error:
                raise ShapeError(f"{where}, which does not go with {sizes}: {error.message}") from error
            least = next((n for n in ends.values() if n < 0), None)
            if least is not None:
                raise ShapeError(f"{where}, which is {least} with {sizes}")
            wrong = None if size is None else next((w for w in _ENDS if _end(size, w) != ends[w]), None)
            if size is not None and wrong is not None:
                which = (
                    f" at the {_ENDS[wrong]}" if any(isinstance(x, DimRange) for x in (size, *bound.values())) else ""
                )
                raise ShapeError(
                    f"{where}: the shape given makes it {_end(size, wrong)}{which}, but it is {ends[wrong]} with {sizes}",
                    hint="leave it out (?): it follows from the others",
                )


_ENDS = {"min": "minimum", "opt": "optimum", "max": "maximum"}


def _end(size: Size, which: str) -> int:
    return size if isinstance(size, int) else int(getattr(size, which))


def _dimension(text: str, derived: Mapping[str, Dim], bound: Mapping[str, Size]) -> DimLike:
    if text not in derived:
        return _symbol(text, bound.get(text))
    symbols = derived[text].symbols()
    return substitute(derived[text], {s.name: _symbol(s.name, bound.get(s.name)) for s in symbols})


def _symbol(name: str, size: Size | None) -> DimLike:
    if isinstance(size, int):
        return size
    return symbol(name) if size is None else symbol(name, size.min, size.max)


def profiles_of(inputs: Mapping[str, Sequence[DimLike]], shapes: Mapping[str, ShapeSpec]) -> tuple[Profile, ...]:
    """The profiles of ``shapes`` as ranges of the symbols of the imported inputs.

    A symbol without a range in a profile may have any size in this profile. Dimensions that follow from symbols have no range.
    """
    found = []
    for profile in getattr(shapes, "profiles", ()):
        ranges: dict[str, DimRange] = {}
        for name, dims in inputs.items():
            for d, size in zip(dims, profile.get(name, ()), strict=False):
                symbol_name = lone(d)
                if symbol_name is not None and size is not None:
                    ranges[symbol_name] = size if isinstance(size, DimRange) else DimRange(size, size, size)
        found.append(ranges)
    return tuple(found)


def refusal(t: onnx.TypeProto, *, untyped: bool = False) -> str | None:
    """Why values of this type are not supported, or None. ``untyped``: the element type may be left out."""
    kind = t.WhichOneof("value")
    if untyped and kind in (None, "tensor_type") and not t.tensor_type.elem_type:
        return None
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
            dims.append(_symbol_name(d, v.name, i))
    if given is not None and len(given) != len(dims):
        raise ShapeError(f"{where} is {_show(dims)}, the shape given is {_show(given)}: they differ in rank")
    return dims


def _show(dims: Sequence[int | str | DimRange | None] | None) -> str:
    return "[" + ", ".join("?" if d is None else str(d) for d in dims or ()) + "]"


def known_type(t: onnx.TypeProto, name: str, symbols: Mapping[str, DimLike]) -> TensorType | None:
    """The type that a model declares for an inner value or an output, or None if it does not give element type and rank.

    ``symbols``: the symbols of the inputs, with their ranges.
    """
    if refusal(t) is not None or not t.tensor_type.HasField("shape"):
        return None
    dims: list[DimLike] = [
        d.dim_value if d.HasField("dim_value") and d.dim_value >= 0 else _named(_symbol_name(d, name, i), symbols)
        for i, d in enumerate(t.tensor_type.shape.dim)
    ]
    return TensorType(element_type(t.tensor_type.elem_type), tuple(dims))


def _symbol_name(d: onnx.TensorShapeProto.Dimension, name: str, axis: int) -> str:
    """The name of an unknown size. "?" (paddle2onnx) stands for any size, so axes that have it are not equal."""
    return f"{name}.{axis}" if d.dim_param in ("", "?") else str(d.dim_param)


def _named(text: str, symbols: Mapping[str, DimLike]) -> DimLike:
    """A dimension of an inner value: arithmetic if all of its symbols belong to inputs, otherwise a symbol."""
    if text in symbols:
        return symbols[text]
    expression = parse_dim(text)
    if expression is None or not all(s.name in symbols for s in expression.symbols()):
        return symbol(text)
    return substitute(expression, symbols)
