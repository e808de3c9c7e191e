"""Sampling added to a language model: an output of logits becomes the next token of each sequence."""

from __future__ import annotations

from dataclasses import replace

import onnx
from onnx import helper

from optdnn.errors import UsageError, did_you_mean
from optdnn.importers.model import Model, Source, open_model
from optdnn.ops.sampling import DOMAIN, SETTINGS
from optdnn.runtime.contexts.sampled import PREFIX, ROW, TOKEN
from optdnn.types import ONNX_TYPES

_NAMES = {dtype: number for number, dtype in ONNX_TYPES.items()}


def with_sampling(source: Source | Model, logits: str) -> Model:
    """The model with the operator SampleToken after its output ``logits``, [batch, vocabulary] or [batch, length, vocabulary].

    The output is replaced by ``next_token`` [batch, 1]. The model gets one more input for each setting of the operator
    (``sample.temperature``, and so on), [batch], and for logits of three axes ``sample.row`` [batch]: the row of each sequence
    that counts. Raises UsageError if there is no such output, or if it cannot hold logits.
    """
    model = source if isinstance(source, Model) else open_model(source)
    proto = onnx.ModelProto()
    proto.CopyFrom(model.proto)
    graph = proto.graph
    ports = {v.name: v for v in graph.output}
    port = ports.get(logits)
    if port is None:
        known = ", ".join(map(repr, ports))
        hint = did_you_mean(logits, ports) or f"its outputs are {known}"
        raise UsageError(f"{model.name} has no output {logits!r} to sample from", hint=hint)
    rank = _rank(port)
    taken = {v.name for v in (*graph.input, *graph.output, *graph.initializer)}
    if again := sorted(n for n in taken if n.startswith(PREFIX) or n == TOKEN):
        raise UsageError(f"{model.name} has {again[0]!r} already: it samples by itself")
    batch = _batch(graph, port)
    rows = logits
    if rank == 3:
        graph.input.append(helper.make_tensor_value_info(ROW, onnx.TensorProto.INT64, [batch]))
        axis = helper.make_tensor(f"{PREFIX}axis", onnx.TensorProto.INT64, [1], [1])
        graph.initializer.append(axis)
        graph.node.append(helper.make_node("Unsqueeze", [ROW, axis.name], [f"{PREFIX}index"], f"{PREFIX}index"))
        rows = f"{PREFIX}logits"
        graph.node.append(helper.make_node("GatherND", [logits, f"{PREFIX}index"], [rows], rows, batch_dims=1))
    for name, dtype in SETTINGS.items():
        graph.input.append(helper.make_tensor_value_info(f"{PREFIX}{name}", _NAMES[dtype], [batch]))
    operands = [rows, *(f"{PREFIX}{name}" for name in SETTINGS)]
    graph.node.append(helper.make_node("SampleToken", operands, [TOKEN], f"{PREFIX}token", domain=DOMAIN))
    place = [v.name for v in graph.output].index(logits)
    outputs = [*graph.output]
    outputs[place] = helper.make_tensor_value_info(TOKEN, onnx.TensorProto.INT64, [batch, 1])
    del graph.output[:]
    graph.output.extend(outputs)
    if DOMAIN not in model.opsets:
        proto.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    return replace(model, proto=proto, opsets={**model.opsets, DOMAIN: 1})


def _rank(port: onnx.ValueInfoProto) -> int:
    t = port.type.tensor_type
    rank = len(t.shape.dim) if t.HasField("shape") else None
    if rank not in (2, 3):
        shown = "an unknown number of" if rank is None else rank
        raise UsageError(
            f"output {port.name!r} has {shown} axes",
            hint="logits are [batch, vocabulary] or [batch, length, vocabulary]",
        )
    return rank


def _batch(graph: onnx.GraphProto, port: onnx.ValueInfoProto) -> int | str | None:
    """The first dimension of the logits, in the form of an input's dimension."""
    first = port.type.tensor_type.shape.dim[0]
    symbols = {d.dim_param for v in graph.input for d in v.type.tensor_type.shape.dim}
    if first.HasField("dim_value"):
        return int(first.dim_value)
    if first.dim_param in symbols:
        return str(first.dim_param)
    shapes = [v.type.tensor_type.shape.dim for v in graph.input]
    leading = next((dims[0] for dims in shapes if dims), None)
    if leading is None:
        return None
    return int(leading.dim_value) if leading.HasField("dim_value") else str(leading.dim_param) or None
