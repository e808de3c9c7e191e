"""ONNX in, :class:`~optdnn.ir.graph.Graph` out.

Everything that is not supported is reported in one :class:`~optdnn.errors.UnsupportedError`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count

import onnx

from optdnn.custom import CustomOp
from optdnn.errors import ModelError, UnsupportedError, UsageError, machine_errors, warn
from optdnn.importers.functions import check_calls
from optdnn.importers.graph_importer import GraphImporter
from optdnn.importers.inputs import graph_inputs, profiles_of, refusal
from optdnn.importers.model import Model, Source, description, open_model
from optdnn.importers.nodes import NO_SUCH_OPERATOR
from optdnn.importers.refused_operators import UNKNOWN_CUSTOM
from optdnn.importers.scope import UNKNOWN, Scope
from optdnn.importers.subgraph import Place
from optdnn.importers.tensors import element_type
from optdnn.ir.graph import Graph
from optdnn.ops.custom import importer_of
from optdnn.ops.exchange import FromOnnx
from optdnn.ops.sequences import TensorList
from optdnn.ops.table import IMPORTERS
from optdnn.ranges import ShapeSpec
from optdnn.types import TensorType, dtype_name

MOST_CLASSES = 5
"""The most classes that a message names."""


class MixedTypes(UserWarning):
    """Nodes have weights of another float type than their data, which ONNX does not allow: the weights are rounded to the data's
    type."""


class UncheckedValues(UserWarning):
    """Nodes that end a run with an error for some values, where an engine returns a result."""


class MapsAsMatrix(UserWarning):
    """Outputs that are lists of maps (of ZipMap) in the model become matrices with a column for each class."""


def import_model(
    source: Source | Model,
    *,
    shapes: Mapping[str, ShapeSpec] | None = None,
    custom_ops: Sequence[CustomOp] = (),
) -> Graph:
    """Import an ONNX model, given as a path, as the file's bytes, as a ModelProto, or already opened.

    ``shapes`` gives dimensions to inputs by name (None leaves a dimension unchanged). A size or a range (:mod:`optdnn.ranges`)
    that it gives to a symbol holds for all uses of the symbol.
    Named dimensions become symbols of that name, unnamed ones are called ``<input>.<axis>``. An initializer that is also
    listed as an input is a constant: the default that the model gives it is final.

    Raises UsageError (no such file or input), ModelError (not valid ONNX), ShapeError (shapes contradict), and one
    UnsupportedError that lists every node that cannot be imported. Warns of :class:`MixedTypes`,
    :class:`UncheckedValues` and :class:`MapsAsMatrix`.
    """
    with machine_errors("the model", ModelError):
        model = source if isinstance(source, Model) else open_model(source)
        return _import(GraphImporter(model, custom_importers(custom_ops)), shapes or {})


def custom_importers(custom_ops: Sequence[CustomOp]) -> dict[str, FromOnnx]:
    """Operator -> import function of the user's own operators. Raises UsageError for a name of an ONNX or optdnn operator."""
    if taken := sorted(op.name for op in custom_ops if op.name in IMPORTERS or op.name.startswith("ai.onnx.")):
        raise UsageError(f"the custom operator {taken[0]} has a name that is taken", hint="use your own domain")
    return {op.name: importer_of(op) for op in custom_ops}


def _import(importer: GraphImporter, shapes: Mapping[str, ShapeSpec]) -> Graph:
    graph, proto, name = importer.graph, importer.model.proto.graph, importer.model.name
    check_calls(importer.model)
    scope: Scope = {}
    importer.weights(proto, scope)
    free = [v for v in proto.input if v.name not in scope]
    for v, found in graph_inputs(free, shapes, name):
        if isinstance(found, str):
            importer.refuse(v.name, "graph input", "", found)
            scope[v.name] = UNKNOWN
        else:
            scope[v.name] = graph.add_input(v.name, found)
    ports = [graph.op(i).outputs[0] for i in graph.inputs]
    graph.description = description(importer.model.proto)
    graph.profiles = profiles_of({p.name: p.type.shape or () for p in ports}, shapes)
    zipped = {v: node for node in proto.node if node.op_type == "ZipMap" for v in node.output}
    for v in proto.output:
        if v.name not in zipped and (reason := refusal(v.type, untyped=True)):
            importer.refuse(v.name, "graph output", "", reason)
    importer.nodes(proto.node, Place(scope, importer.model.opsets, {}), [v.name for v in proto.output])
    if importer.unsupported:
        count = len(importer.unsupported)
        raise UnsupportedError(
            f"{name} holds {count} thing{'s' * (count != 1)} that optdnn does not support:",
            importer.unsupported,
            hint=_advice(importer),
        )
    _warn(importer, zipped)
    names = _output_names([v.name for v in proto.output])
    for v, own in zip(proto.output, names, strict=True):
        ref = scope.get(v.name)
        if ref is None:
            raise ModelError(f"{name}: output {v.name!r} is produced by no node")
        if isinstance(ref, TensorList):
            raise ModelError(
                f"{name}: output {v.name!r} is a sequence of tensors", hint="make its tensors separate outputs"
            )
        _check_output(v, graph.add_output(importer.enter(ref), own).outputs[0].type, name)
    if not proto.output:
        raise ModelError(f"{name} has no outputs", hint="the file is truncated or corrupt")
    return graph


def _advice(importer: GraphImporter) -> str | None:
    """What to do about the operators that were refused."""
    reasons = {node.reason for node in importer.unsupported}
    if UNKNOWN_CUSTOM in reasons:
        return "declare custom operators in Python: optdnn.build(..., custom_ops=[optdnn.custom_op(...)])"
    if NO_SUCH_OPERATOR in reasons and importer.model.proto.producer_name == "tf2onnx":
        return (
            "tf2onnx could not convert these operators of TensorFlow, and warned about them. Keras 3 exports the same model in "
            "another way where KERAS_BACKEND is torch: model.export(FILE, format='onnx')"
        )
    return None


def _warn(importer: GraphImporter, zipped: Mapping[str, onnx.NodeProto]) -> None:
    """Warn about the differences between the graph and the model. ``zipped``: the results of ZipMaps and their nodes."""
    name = importer.model.name
    if importer.mixed:
        (node, types), more = next(iter(importer.mixed.items())), len(importer.mixed) - 1
        others = {0: "", 1: ", and so has 1 other node"}.get(more, f", and so have {more} other nodes")
        text = f"{name}: {node} has {types}{others}. ONNX does not allow that; the weights are rounded"
        warn(text, MixedTypes)
    for node, what in importer.lenient.items():
        warn(f"{name}: {node} {what}", UncheckedValues)
    for v in importer.model.proto.graph.output:
        if v.name in zipped:
            found = f"a matrix with a column for {_classes(zipped[v.name])}"
            text = f"{name}: output {v.name!r} is {found}; ZipMap makes maps of its rows"
            warn(text, MapsAsMatrix)


def _classes(zip_map: onnx.NodeProto) -> str:
    """The classes of a ZipMap in the order of the columns, shortened."""
    found = [x for a in zip_map.attribute for x in (*a.ints, *(s.decode(errors="replace") for s in a.strings))]
    shown = ", ".join(map(str, found[:MOST_CLASSES]))
    return f"each of the {len(found)} classes {shown}{', ...' if len(found) > MOST_CLASSES else ''}"


def _output_names(listed: Sequence[str]) -> list[str]:
    """A name for each output: its own, or, if exporters list a value again, its name with the next free number (``y.2``)."""
    names: list[str] = []
    for name in listed:
        numbered = (f"{name}.{k}" for k in count(2))
        names.append(name if name not in names else next(n for n in numbered if n not in names and n not in listed))
    return names


def _check_output(v: onnx.ValueInfoProto, actual: TensorType, model: str) -> None:
    code = v.type.tensor_type.elem_type
    if code and element_type(code) != actual.dtype:
        raise ModelError(
            f"{model}: output {v.name!r} is declared as {dtype_name(element_type(code))}, "
            f"but its node computes {dtype_name(actual.dtype)}"
        )
