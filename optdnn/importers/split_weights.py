"""A model without its weights, and the weights as arrays: an engine holds its model in this form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import onnx

from optdnn.errors import EngineError, ModelError
from optdnn.importers.external_data import ExternalData
from optdnn.importers.model import Model, Source, open_model
from optdnn.importers.tensors import to_array
from optdnn.ops.base import Unsupported
from optdnn.types import Array, bits_of, packed_bytes

SMALL = 1024
"""Initializers of up to this many bytes stay in the model."""
_FIELDS = ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data", "string_data")


def split_weights(source: Source | Model) -> tuple[bytes, dict[str, Array]]:
    """The serialized model without large initializers, and these by name. The two replace the original completely."""
    model = source if isinstance(source, Model) else open_model(source)
    held = onnx.ModelProto()
    held.CopyFrom(model.proto)
    weights: dict[str, Array] = {}
    for t in held.graph.initializer:
        try:
            array = to_array(t, model.external, model.name)
        except Unsupported:
            continue  # the import reports it where it is used
        if array.nbytes > SMALL and bits_of(array.dtype) >= 8:
            weights[t.name] = array
            for field in (*_FIELDS, "external_data"):
                t.ClearField(field)
            t.data_location = onnx.TensorProto.EXTERNAL
            t.external_data.add(key="location", value=t.name)
    for t in _tensors(held):
        if t.data_location == onnx.TensorProto.EXTERNAL and t.name not in weights:
            entries = {e.key: e.value for e in t.external_data}
            raw = model.external.read(t.name, entries, _nbytes(t))
            t.ClearField("external_data")
            t.ClearField("data_location")
            t.raw_data = raw.tobytes()
    return held.SerializeToString(deterministic=True), weights


def put_together(data: bytes, weights: Mapping[str, Array], name: str) -> Model:
    """The model that :func:`split_weights` split; the weights are not copied. Raises EngineError for broken data."""
    try:
        model = open_model(data, name)
    except ModelError as error:
        raise EngineError(f"the model in the engine cannot be read: {error.message}") from error
    return Model(model.proto, model.name, _Held(weights, name), model.opsets, model.functions)


class _Held(ExternalData):
    """External data in the form of arrays in memory; a location is a name."""

    def __init__(self, weights: Mapping[str, Array], model: str):
        super().__init__(None, model)
        self._weights = weights

    def read(self, tensor: str, entries: Mapping[str, str], nbytes: int) -> Array:
        array = self._weights.get(entries.get("location", ""))
        if array is None or array.nbytes != nbytes:
            raise EngineError(f"the model in the engine lacks its weight {tensor!r}")
        return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _nbytes(t: onnx.TensorProto) -> int:
    return packed_bytes(onnx.helper.tensor_dtype_to_np_dtype(t.data_type), int(np.prod(t.dims, dtype=np.int64)))


def _tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Every tensor of a model: in initializers and attributes, also of subgraphs and functions."""
    yield from _of_graph(model.graph)
    for f in model.functions:
        for node in f.node:
            yield from _of_node(node)


def _of_graph(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    for s in graph.sparse_initializer:
        yield s.values
        yield s.indices
    for node in graph.node:
        yield from _of_node(node)


def _of_node(node: onnx.NodeProto) -> Iterator[onnx.TensorProto]:
    for a in node.attribute:
        if a.HasField("t"):
            yield a.t
        yield from a.tensors
        for g in ([a.g] if a.HasField("g") else []) + list(a.graphs):
            yield from _of_graph(g)
