"""Operator attributes as plain data, so that a step can carry them through an engine file.

Attributes are frozen dataclass fields: None, bool, int, float, str, dtypes, small arrays, fused stages and tuples of
these. In plain form a tuple is a list, and every dict is a tag: ``{"dtype": name}``, ``{"array": [dtype, shape, values]}``,
``{"stage": [kind, args, attrs]}``, and ``{"graph": [inputs, constants, ops, outputs, shapes]}`` for a body of If, Loop or Scan
(without ``shapes`` in older engines).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from optdnn.errors import EngineError, InternalError
from optdnn.runtime.program import Plain
from optdnn.runtime.reference.nested import CONSTANT_LIMIT, PlainGraph, PlainOp
from optdnn.runtime.reference.run import PlainStage
from optdnn.runtime.reference.table import KINDS
from optdnn.types import DTYPES, dtype_name

ARRAY_LIMIT = CONSTANT_LIMIT
"""The most elements of an array attribute; a larger array is an operand."""


def attrs_to_plain(attrs: Mapping[str, Any]) -> dict[str, Plain]:
    """Attributes (of a kernel, as keyword arguments) in plain form. Raises InternalError for a value without one."""
    return {name: _to_plain(value, name) for name, value in attrs.items()}


def attrs_from_plain(plain: Any) -> dict[str, Any]:
    """The inverse of :func:`attrs_to_plain`. Raises EngineError for data it cannot have produced."""
    if not isinstance(plain, dict):
        raise EngineError("a step's attributes are not a table")
    return {name: _from_plain(value, name) for name, value in plain.items()}


def check_kind(kind: str) -> None:
    """Raises EngineError for an operator without a NumPy kernel."""
    if kind not in KINDS:
        raise EngineError(
            f"the engine uses operator {kind!r}, which this version of optdnn has no NumPy kernel for",
            hint="upgrade optdnn, or rebuild the engine with this version",
        )


def _to_plain(value: Any, name: str) -> Plain:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.dtype):
        return {"dtype": dtype_name(value)}
    if isinstance(value, np.generic):
        value = np.asarray(value)
    if isinstance(value, np.ndarray):
        if value.size > ARRAY_LIMIT or value.dtype.kind == "c":
            raise InternalError(f"attribute {name!r} is an array of {value.size} {value.dtype}; make it an operand")
        return {"array": [dtype_name(value.dtype), list(value.shape), [_number(x) for x in value.reshape(-1)]]}
    if isinstance(value, PlainStage):
        return {"stage": [value.kind, _to_plain(tuple(value.args), name), attrs_to_plain(value.attrs)]}
    if isinstance(value, PlainGraph):
        ops = [
            [op.kind, _to_plain(op.inputs, name), [dtype_name(d) for d in op.dtypes], attrs_to_plain(op.attrs)]
            for op in value.ops
        ]
        constants = [_to_plain(c, name) for c in value.constants]
        shapes = [None if shape is None else list(shape) for shape in value.shapes]
        return {"graph": [value.inputs, constants, ops, list(value.outputs), shapes]}
    if isinstance(value, (tuple, list)):
        return [_to_plain(x, name) for x in value]
    raise InternalError(f"attribute {name!r} is a {type(value).__name__}, which an engine cannot hold")


def _number(x: Any) -> bool | int | float:
    if x.dtype.kind == "b":
        return bool(x)
    return int(x) if x.dtype.kind in "iu" else float(x)


def _from_plain(value: Plain, name: str) -> Any:
    match value:
        case None | bool() | int() | float() | str():
            return value
        case list():
            return tuple(_from_plain(x, name) for x in value)
        case {"dtype": str(dtype)} if len(value) == 1 and dtype in DTYPES:
            return DTYPES[dtype]
        case {"stage": [str(kind), list(args), dict(attrs)]} if len(value) == 1:
            if all(a is None or type(a) is int for a in args):
                return PlainStage(kind, tuple(args), attrs_from_plain(attrs))
        case {"array": [str(dtype), list(shape), list(values)]} if len(value) == 1 and dtype in DTYPES:
            fits = all(type(d) is int and d >= 0 for d in shape) and all(isinstance(x, (int, float)) for x in values)
            if fits and len(values) <= ARRAY_LIMIT:
                try:
                    return np.array(values, DTYPES[dtype]).reshape(shape)
                except (ValueError, OverflowError):
                    pass
        case {"graph": [int(inputs), list(constants), list(ops), list(outputs), *rest]} if len(value) == 1:
            graph = _graph_from_plain(inputs, constants, ops, outputs, rest, name)
            if graph is not None:
                return graph
    raise EngineError(f"attribute {name!r} of a step is malformed")


def _graph_from_plain(
    inputs: int, constants: list[Any], ops: list[Any], outputs: list[Any], rest: list[Any], name: str
) -> PlainGraph | None:
    """A nested graph, or None if the data is not one."""
    arrays = [_from_plain(c, name) for c in constants]
    nodes = []
    for op in ops:
        match op:
            case [str(kind), list(read), list(dtypes), dict(attrs)] if all(d in DTYPES for d in dtypes):
                if not all(i is None or type(i) is int for i in read):
                    return None
                nodes.append(PlainOp(kind, attrs_from_plain(attrs), tuple(read), tuple(DTYPES[d] for d in dtypes)))
            case _:
                return None
    if not all(isinstance(a, np.ndarray) for a in arrays) or not all(type(i) is int for i in outputs):
        return None
    shapes = rest[0] if rest else []
    if len(rest) > 1 or not isinstance(shapes, list) or not all(map(_is_shape, shapes)):
        return None
    typed = tuple(None if shape is None else tuple(shape) for shape in shapes)
    graph = PlainGraph(inputs, tuple(arrays), tuple(nodes), tuple(outputs), typed)
    return graph if graph.valid() and all(op.kind in KINDS for op in nodes) else None


def _is_shape(shape: Any) -> bool:
    """Whether data is a shape in plain form: sizes, and texts for symbolic sizes."""
    if shape is None:
        return True
    return isinstance(shape, list) and all(type(d) is str or (type(d) is int and d >= 0) for d in shape)
