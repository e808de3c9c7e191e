"""Attributes and tensors as ONNX protobufs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import onnx
import onnx.defs
import onnx.helper
from onnx import AttributeProto, TensorProto

from optdnn.errors import InternalError
from optdnn.ops.base import Unsupported
from optdnn.ops.exchange import onnx_number
from optdnn.types import Array, bits_of, packed


@lru_cache(maxsize=4096)
def schema(op_type: str, domain: str, opset: int) -> Any:
    """ONNX's schema of an operator (``onnx.defs.OpSchema``; its stubs lack half of it), or None if there is none."""
    try:
        return onnx.defs.get_schema(op_type, max_inclusive_version=opset, domain=domain)
    except onnx.defs.SchemaError:
        return None


def node_attributes(
    op_type: str, domain: str, opset: int, attrs: Mapping[str, Any], operands: int
) -> list[AttributeProto]:
    """Attributes in the types of the operator's schema at ``opset``; None is left out.

    An attribute that this opset does not know is left out if it has the default of the newest opset: it then has no
    effect. Raises Unsupported for any other, and for an operator or a number of operands that the opset does not know.
    """
    known = schema(op_type, domain, opset)
    if known is None and domain == "":
        raise Unsupported(f"there is no {op_type} in it")
    if known is not None and known.deprecated:
        raise Unsupported(f"{op_type} was removed from it")
    if known is not None and operands > known.max_input:
        raise Unsupported(f"{op_type} has only {known.max_input} operands there")
    out = []
    for name, value in attrs.items():
        if value is None:
            continue
        kind = None
        if known is not None:
            declared = known.attributes.get(name)
            if declared is None:
                if _is_default(op_type, domain, name, value):
                    continue
                raise Unsupported(f"attribute {name}={value!r} of {op_type} does not exist in it")
            kind = int(declared.type.value)
        out.append(_attribute(name, value, kind))
    return out


def _is_default(op_type: str, domain: str, name: str, value: Any) -> bool:
    if name == "dilations" and all(v == 1 for v in value):  # schemas give this default only in words
        return True
    newest = schema(op_type, domain, onnx.defs.onnx_opset_version())
    declared = None if newest is None else newest.attributes.get(name)
    if declared is None or not declared.default_value.name:
        return False
    default = onnx.helper.get_attribute_value(declared.default_value)
    if isinstance(default, bytes):
        default = default.decode()
    plain = int(value) if isinstance(value, (bool, np.bool_)) else list(value) if isinstance(value, tuple) else value
    return bool(plain == default)


_CONVERTED: dict[int, Callable[[Any], Any]] = {
    AttributeProto.INT: int,
    AttributeProto.FLOAT: float,
    AttributeProto.STRING: str,
    AttributeProto.TENSOR: lambda array: tensor_proto(array, ""),
    AttributeProto.GRAPH: lambda graph: graph,
    AttributeProto.INTS: lambda values: [int(v) for v in values],
    AttributeProto.FLOATS: lambda values: [float(v) for v in values],
    AttributeProto.STRINGS: lambda values: [str(v) for v in values],
}
"""Type of an attribute -> conversion of its value for ``onnx.helper.make_attribute``."""


def _attribute(name: str, value: Any, kind: int | None) -> AttributeProto:
    """``kind``: the attribute's type in the schema; None if there is no schema."""
    if isinstance(value, np.dtype):
        value = onnx_number(value)
    if kind is None and isinstance(value, (bool, np.ndarray)):
        kind = AttributeProto.INT if isinstance(value, bool) else AttributeProto.TENSOR
    if kind is None:
        return onnx.helper.make_attribute(name, value)
    if kind not in _CONVERTED:
        raise InternalError(f"attribute {name!r} of type {kind} cannot be written")
    return onnx.helper.make_attribute(name, _CONVERTED[kind](value), attr_type=kind)


def tensor_proto(array: Array, name: str) -> TensorProto:
    """An array as a TensorProto with raw data."""
    t = TensorProto(name=name, data_type=onnx_number(array.dtype), dims=array.shape)
    t.raw_data = little_endian(array).tobytes()
    return t


def little_endian(array: Array) -> Array:
    """The array's bytes in the file's order, flat."""
    if bits_of(array.dtype) < 8:
        return packed(array)
    flat = np.ascontiguousarray(array).reshape(-1)
    if sys.byteorder == "big" and array.dtype.itemsize > 1:
        part = array.dtype.itemsize // (2 if array.dtype.kind == "c" else 1)
        return np.ascontiguousarray(flat.view(np.uint8).reshape(-1, part)[:, ::-1]).reshape(-1)
    return flat.view(np.uint8)
