"""Mutations of ONNX models, field by field. The parser accepts all of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from random import Random
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError, Message  # type: ignore[import-untyped]
from onnx import AttributeProto, helper, numpy_helper

from fuzz.trees import FLOATS, INTEGERS, mutated_bytes, number, text
from optdnn.ops.table import IMPORTERS

NAMES = ("x", "y", "w", "n", "", "loop", "é", "a/b", "x" * 200)
SIZES = (0, 1, 2, 3, 4, 5, 7, 8, 16, 64, 1 << 16, 1 << 31, 1 << 40, 1 << 62, -1, (1 << 63) - 1, -(1 << 63))
DIMS = (
    "n",
    "N",
    "n + 1",
    "2*n",
    "n//2",
    "n*n*n*n",
    "floor(n/0)",
    "x.0",
    "0",
    "-1",
    "(",
    "max(n, 3)",
    "\u202e",
    "n" * 130,
)
PLAIN = (1, 6, 7, 9, 10, 11)
"""Types that NumPy supports: float32, int32, int64, bool, float16, float64."""
TYPES = (*range(24), -1, 99, 1 << 30)


def mutated_model(data: bytes, rng: Random, donors: Sequence[bytes] = (), raw: float = 0.02) -> bytes:
    """A serialized model with one to four changes. Nodes may come from ``donors``. ``raw``: how often its bytes are changed."""
    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except DecodeError:
        return mutated_bytes(data, rng)
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 4))):
        if donors and rng.random() < 0.06:
            _splice(model, rng.choice(donors), rng)
        else:
            _change(model, rng)
    made = bytes(model.SerializeToString(deterministic=True))
    return mutated_bytes(made, rng) if rng.random() < raw else made


def _change(model: onnx.ModelProto, rng: Random) -> None:
    found = list[Message]()
    _messages(model, found, 0)
    wanted = rng.choice(
        ("NodeProto", "NodeProto", "AttributeProto", "TensorProto", "Dimension", "ValueInfoProto", "", "")
    )
    those = [m for m in found if wanted in ("", m.DESCRIPTOR.name)] or found
    message = those[rng.randrange(len(those))]
    special = _SPECIAL.get(message.DESCRIPTOR.name)
    if special is not None and rng.random() < 0.8:
        special(message, model, rng)
    else:
        _any_field(message, rng)


def _messages(message: Message, found: list[Message], depth: int) -> None:
    """The message and its parts, up to a limit."""
    found.append(message)
    if depth > 24 or len(found) > 400:
        return
    for field, value in message.ListFields():
        if field.message_type is not None:
            for child in [value] if isinstance(value, Message) else value:
                _messages(child, found, depth + 1)


def _any_field(message: Message, rng: Random) -> None:
    """One possible field of a message: cleared, copied or set."""
    field = rng.choice(message.DESCRIPTOR.fields)
    value = getattr(message, field.name)
    if rng.random() < 0.25:
        message.ClearField(field.name)
    elif hasattr(value, "extend"):
        _list_field(value, field, rng)
    elif field.message_type is not None:
        getattr(message, field.name).SetInParent()
    else:
        setattr(message, field.name, _scalar(value, field, rng))


def _list_field(values: Any, field: Any, rng: Random) -> None:
    if field.message_type is not None:
        if values and rng.random() < 0.6:
            values.add().CopyFrom(values[rng.randrange(len(values))])
        elif values and rng.random() < 0.7:
            del values[rng.randrange(len(values))]
        else:
            values.add()
    elif values and rng.random() < 0.6:
        at = rng.randrange(len(values))
        values[at] = _scalar(values[at], field, rng)
    else:
        values.append(
            _scalar("" if field.type == field.TYPE_STRING else b"" if field.type == field.TYPE_BYTES else 0, field, rng)
        )


def _scalar(old: Any, field: Any, rng: Random) -> Any:
    if field.type == field.TYPE_STRING:
        made = rng.choice(NAMES) if rng.random() < 0.5 or not isinstance(old, str) else text(old, rng)
        return made.encode("utf-8", "ignore").decode()
    if field.type == field.TYPE_BYTES:
        return mutated_bytes(bytes(old), rng) if old else rng.randbytes(rng.choice((1, 4, 8)))
    if field.type in (field.TYPE_FLOAT, field.TYPE_DOUBLE):
        return rng.choice(FLOATS[:-4] + FLOATS[-3:])
    if field.type == field.TYPE_ENUM:
        return rng.choice([v.number for v in field.enum_type.values])
    low, high = (0, (1 << 64) - 1) if field.type == field.TYPE_UINT64 else (-(1 << 63), (1 << 63) - 1)
    if field.type == field.TYPE_INT32:
        low, high = -(1 << 31), (1 << 31) - 1
    return min(max(number(int(old), rng), low), high)


# ---------------------------------------------------------------- what the kinds of messages mean


@cache
def _attributes() -> list[onnx.AttributeProto]:
    """An attribute of each name and type in the operators' schemas, with its default if there is one."""
    made = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        for name, a in schema.attributes.items():
            kind = getattr(a.type, "value", a.type)
            one = onnx.AttributeProto(name=name, type=int(kind))
            if a.default_value.name:
                one.CopyFrom(a.default_value)
            made[name, int(kind)] = one
    return list(made.values())


@cache
def _operators() -> list[str]:
    return sorted(IMPORTERS)


def _values(model: onnx.ModelProto) -> list[str]:
    graph = model.graph
    named = [v.name for v in (*graph.input, *graph.initializer)] + [name for n in graph.node for name in n.output]
    return [*filter(_is_text, named), ""]


def _is_text(name: Any) -> bool:
    """Protobuf returns bytes for a name that is no UTF-8, and accepts none."""
    return isinstance(name, str)


def _node(node: Any, model: onnx.ModelProto, rng: Random) -> None:
    how = rng.randrange(9)
    if how == 0:
        domain, _, node.op_type = rng.choice(_operators()).rpartition(".")
        node.domain = domain
    elif how in (1, 2) and node.input:
        node.input[rng.randrange(len(node.input))] = rng.choice(_values(model))
    elif how == 3:
        node.input.append(rng.choice(_values(model)))
    elif how == 4 and node.input:
        del node.input[rng.randrange(len(node.input))]
    elif how == 5:
        node.output.append(rng.choice(("extra", "y", "")))
    elif how == 6:
        node.attribute.add().CopyFrom(rng.choice(_attributes()))
    elif how == 7 and len(node.output) > 1:
        del node.output[rng.randrange(len(node.output))]
    else:
        node.op_type = rng.choice(_operators()).rpartition(".")[2]


def _attribute(a: Any, model: onnx.ModelProto, rng: Random) -> None:
    if a.type == AttributeProto.INT:
        a.i = _fit(number(a.i, rng))
    elif a.type == AttributeProto.FLOAT:
        a.f = rng.choice(FLOATS)
    elif a.type == AttributeProto.INTS:
        values = [number(v, rng) if rng.random() < 0.5 else v for v in a.ints] or [0]
        values = values[: rng.randrange(len(values) + 1)] if rng.random() < 0.2 else values
        values = values + values[-1:] if rng.random() < 0.2 else values
        a.ClearField("ints")
        a.ints.extend(map(_fit, values))
    elif a.type == AttributeProto.STRING:
        a.s = text(a.s.decode("utf-8", "replace"), rng).encode("utf-8", "surrogatepass")
    else:
        _any_field(a, rng)


def _fit(value: int) -> int:
    return min(max(value, -(1 << 63)), (1 << 63) - 1)


def _tensor(t: Any, model: onnx.ModelProto, rng: Random) -> None:
    how, name = rng.randrange(7), t.name if _is_text(t.name) else ""
    if how == 0 and t.dims:
        t.dims[rng.randrange(len(t.dims))] = rng.choice(SIZES)
    elif how == 1:
        t.data_type = rng.choice(TYPES)
    elif how == 2 and t.raw_data:
        t.raw_data = mutated_bytes(t.raw_data, rng)
    elif how == 3:
        t.dims.append(rng.choice((0, 1, 1, 2)))
    elif how == 4:
        t.data_location = rng.choice((0, 1))
        for key in ("location", "offset", "length"):
            t.external_data.add(key=key, value=rng.choice(("x", "0", "-1", "../x", "1e9", "/dev/zero")))
    else:
        dtype = rng.choice(
            (np.float32, np.float16, np.int64, np.int64, np.int32, np.int8, np.uint8, np.bool_, np.float64)
        )
        shapes = (
            (),
            (0,),
            (1,),
            (2,),
            (3,),
            (4,),
            (1, 1),
            (2, 3),
            (1, 3, 1, 1),
            tuple(d for d in t.dims if 0 <= d < 64),
        )
        shape = rng.choice(shapes)
        count = int(np.prod(shape)) if len(shape) < 6 else 0
        numbers = [number(rng.choice((0, 1, 2, 5)), rng) for _ in range(count)] if count < 5000 else []
        with np.errstate(all="ignore"):
            array = np.array([_fit(v) for v in numbers], np.int64).astype(dtype)
        if array.size == int(np.prod(shape)):
            t.CopyFrom(numpy_helper.from_array(array.reshape(shape), name))


def _dimension(d: Any, model: onnx.ModelProto, rng: Random) -> None:
    if rng.random() < 0.6:
        d.dim_value = rng.choice(SIZES)
    else:
        d.dim_param = rng.choice(DIMS)


def _port(v: Any, model: onnx.ModelProto, rng: Random) -> None:
    if rng.random() < 0.2:
        v.name = rng.choice(_values(model))
        return
    rank = rng.choice((0, 1, 2, 3, 4, 5, 70))
    shape = [rng.choice((*SIZES[:9], *DIMS)) for _ in range(rank)]
    name = v.name if _is_text(v.name) else ""
    made = helper.make_tensor_value_info(name, rng.choice((1, 1, 1, 6, 7, 9, 10, 11, 16, 3, 2)), shape)
    v.CopyFrom(made)


def _graph(graph: Any, model: onnx.ModelProto, rng: Random) -> None:
    how = rng.randrange(7)
    if how == 0 and graph.node:
        graph.node.add().CopyFrom(rng.choice(graph.node))
    elif how == 1 and graph.node:
        del graph.node[rng.randrange(len(graph.node))]
    elif how == 2:
        graph.output.add(name=rng.choice(_values(model)))
    elif how == 3 and graph.input:
        del graph.input[rng.randrange(len(graph.input))]
    elif how == 4:
        value, name = _fit(rng.choice(INTEGERS)), rng.choice(_values(model))
        graph.initializer.append(numpy_helper.from_array(np.array([value], np.int64), name))
    elif how == 5 and graph.input:
        _make_constant(graph, rng)
    else:
        _any_field(graph, rng)


def _make_constant(graph: Any, rng: Random) -> None:
    """An input becomes a constant."""
    v = graph.input.pop(rng.randrange(len(graph.input)))
    dims = [d.dim_value if 0 < d.dim_value < 9 else 2 for d in v.type.tensor_type.shape.dim][:5]
    element = v.type.tensor_type.elem_type
    dtype = helper.tensor_dtype_to_np_dtype(element) if element in PLAIN else np.float32
    array = np.full(dims, rng.choice((0, 1, 2, 3)), dtype)
    graph.initializer.append(numpy_helper.from_array(array, v.name if _is_text(v.name) else ""))


def _opset(entry: Any, model: onnx.ModelProto, rng: Random) -> None:
    entry.version = rng.randrange(1, onnx.defs.onnx_opset_version() + 2)


_SPECIAL = {
    "NodeProto": _node,
    "AttributeProto": _attribute,
    "TensorProto": _tensor,
    "Dimension": _dimension,
    "ValueInfoProto": _port,
    "GraphProto": _graph,
    "OperatorSetIdProto": _opset,
}


def _splice(model: onnx.ModelProto, donor: bytes, rng: Random) -> None:
    """Insert another model's nodes and constants before this one's, and let one of its nodes read one of their results."""
    other = onnx.ModelProto.FromString(donor)
    kept = list(model.graph.node)
    values = _values(other)
    taken = set(_values(model))
    del model.graph.node[:]
    model.graph.node.extend(other.graph.node)
    model.graph.node.extend(kept)
    model.graph.initializer.extend(t for t in other.graph.initializer if t.name not in taken)
    model.graph.input.extend(v for v in other.graph.input if v.name not in taken)
    node = rng.choice(model.graph.node) if model.graph.node else None
    if node is not None and node.input:
        node.input[0] = rng.choice(values)
