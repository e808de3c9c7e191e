"""Opening an ONNX model: bytes to a checked ModelProto, the opsets it imports, its functions."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import onnx
import onnx.defs
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from optdnn.errors import ModelError, UnsupportedError, UsageError
from optdnn.importers.external_data import ExternalData
from optdnn.regular_file import open_regular
from optdnn.runtime.file.kinds import kind_of

OLDEST_OPSET = 1
_FIRST_IR_WITH_OPSETS = 3
"""Models of older IR versions name no opset: they are of opset 1."""
NEWEST_OPSET: int = onnx.defs.onnx_opset_version()

Source: TypeAlias = str | Path | bytes | onnx.ModelProto
FunctionKey: TypeAlias = tuple[str, str, str]
"""Domain, name and overload of a model-local function."""


@dataclass(frozen=True)
class Model:
    """A parsed model. ``name`` is its name in messages; ``opsets`` maps each imported domain to its version."""

    proto: onnx.ModelProto
    name: str
    external: ExternalData
    opsets: dict[str, int]
    functions: dict[FunctionKey, onnx.FunctionProto]


def open_model(source: Source, source_name: str | None = None) -> Model:
    """Parse ``source`` (a path, the file's bytes, or a ModelProto) and check its frame.

    Raises UsageError when there is no such file, ModelError when it is not ONNX, UnsupportedError for its opset.
    """
    folder: Path | None = None
    if isinstance(source, onnx.ModelProto):
        name, data = source_name or source.graph.name or "model", b""
        proto = source
    else:
        if isinstance(source, (bytes, bytearray, memoryview)):
            name, data = source_name or "model", bytes(source)
        else:
            if not isinstance(source, (str, os.PathLike)):
                raise UsageError(f"a model is a path, its bytes or a ModelProto, not {type(source).__name__}")
            path = Path(source)
            name, folder, data = source_name or str(path), path.parent, _read(path)
        proto = onnx.ModelProto()
        try:
            proto.ParseFromString(data)
        except DecodeError as error:
            raise _no_model(name, data, str(error)) from error
    if data == b"" and not isinstance(source, onnx.ModelProto):
        raise ModelError(f"{name} is empty")
    if not proto.ir_version or not proto.HasField("graph"):
        raise _no_model(name, data, f"it has no {'graph' if proto.ir_version else 'IR version'}")
    if not all(isinstance(text, str) for text in _texts(proto)):  # protobuf returns bytes where decoding fails
        raise ModelError(
            f"{name} is not an ONNX model: it has a name that is not UTF-8 text",
            hint="the file is corrupt",
        )
    opsets = read_opsets(proto.opset_import, name)
    if not opsets and proto.ir_version < _FIRST_IR_WITH_OPSETS:
        opsets = {"": 1}
    functions: dict[FunctionKey, onnx.FunctionProto] = {}
    for f in proto.functions:
        key = (domain_of(f.domain), f.name, f.overload)
        if key in functions:
            raise ModelError(f"{name}: function {f.domain}.{f.name} is defined twice")
        functions[key] = f
    return Model(proto, name, ExternalData(folder, name), opsets, functions)


def _no_model(name: str, data: bytes, why: str) -> ModelError:
    kind = kind_of(data)
    if kind is not None:
        return ModelError(f"{name} is {kind[0]}, not an ONNX model", hint=kind[1])
    return ModelError(
        f"{name} is not an ONNX model: {why}", hint="the file is truncated, corrupt, or of another format"
    )


def _texts(proto: onnx.ModelProto) -> Iterator[object]:
    """Every name of a model that the importer reads. Descriptions may be other text: see :func:`description`."""
    for imported in (proto.opset_import, *(f.opset_import for f in proto.functions)):
        for entry in imported:
            yield entry.domain
    for f in proto.functions:
        yield from (f.name, f.domain, f.overload, *f.input, *f.output)
        yield from _texts_of_nodes(f.node)
    yield from _texts_of_graph(proto.graph)


def _texts_of_graph(graph: onnx.GraphProto) -> Iterator[object]:
    yield graph.name
    for value in (*graph.input, *graph.output, *graph.value_info):
        yield value.name
        for d in value.type.tensor_type.shape.dim:
            yield d.dim_param
    for t in (*graph.initializer, *(s.values for s in graph.sparse_initializer)):
        yield t.name
        for item in t.external_data:
            yield item.key
            yield item.value
    yield from _texts_of_nodes(graph.node)


def _texts_of_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[object]:
    for node in nodes:
        yield from (node.name, node.op_type, node.domain, node.overload, *node.input, *node.output)
        for a in node.attribute:
            yield a.name
            yield a.ref_attr_name
            if a.HasField("g"):
                yield from _texts_of_graph(a.g)


def _read(path: Path) -> bytes:
    try:
        with open(path, "rb", opener=open_regular) as file:
            return file.read()
    except FileNotFoundError:
        raise UsageError(f"there is no file {path}") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error


def domain_of(domain: str) -> str:
    """The domain's canonical name: "" and "ai.onnx" are the same."""
    return "" if domain == "ai.onnx" else domain


def read_opsets(imports: object, name: str) -> dict[str, int]:
    """Domain -> version. Raises UnsupportedError unless the default domain's version is one that optdnn reads."""
    opsets: dict[str, int] = {}
    for entry in imports:  # type: ignore[attr-defined]
        domain, version = domain_of(entry.domain), int(entry.version)
        if opsets.setdefault(domain, version) != version:
            raise ModelError(
                f"{name} imports domain {domain or 'ai.onnx'!r} at versions {opsets[domain]} and {version}"
            )
    version = opsets.get("", NEWEST_OPSET)
    if not OLDEST_OPSET <= version <= NEWEST_OPSET:
        raise UnsupportedError(
            f"{name} uses ONNX opset {version}; opsets {OLDEST_OPSET} to {NEWEST_OPSET} are supported",
            hint="install a newer onnx package, or export at an older opset",
        )
    return opsets


def description(proto: onnx.ModelProto) -> dict[str, Any]:
    """What a model says about itself: the fields of onnxruntime's ``ModelMetadata``, without empty ones. ``custom_metadata_map``
    holds its ``metadata_props``. Text that is not UTF-8 is read as far as it is."""
    found = {
        "producer_name": _text(proto.producer_name),
        "description": _text(proto.doc_string),
        "domain": _text(proto.domain),
        "graph_description": _text(proto.graph.doc_string),
        "version": proto.model_version,
        "custom_metadata_map": {_text(entry.key): _text(entry.value) for entry in proto.metadata_props},
    }
    return {name: value for name, value in found.items() if value}


def _text(field: str | bytes) -> str:
    """A field of text. Protobuf gives its bytes if they are not UTF-8."""
    return field if isinstance(field, str) else field.decode(errors="replace")
