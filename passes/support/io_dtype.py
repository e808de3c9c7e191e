"""Gives the network's floating-point inputs and outputs another element type (``--io-dtype``), by casts."""

from __future__ import annotations

from dataclasses import replace

from optdnn.ir.graph import Graph
from optdnn.ops.binary import CastAttrs
from optdnn.types import DTYPES, is_float


def convert_ports(graph: Graph, io_dtype: str) -> None:
    """Give every floating-point input and output the dtype ``io_dtype`` ("fp32", "fp16", "bf16").

    The network inside keeps its types, and so do inputs that only set parameters of sampling. The casts have no ONNX node name,
    since the model has no nodes for them.
    """
    dtype = DTYPES[io_dtype]
    for i in graph.inputs:
        op = graph.op(i)
        (out,) = op.outputs
        if not is_float(out.type.dtype) or out.type.dtype == dtype:
            continue
        uses = graph.uses(op.value)
        if uses and all(graph.op(u.op).kind == "SampleToken" and u.slot for u in uses):
            continue
        graph.set_op(replace(op, outputs=(replace(out, type=out.type.with_dtype(dtype)),)))
        cast = graph.add("Cast", [op.value], CastAttrs(to=out.type.dtype), names=[f"{out.name}_cast"])
        for user_id in {u.op for u in uses}:
            user = graph.op(user_id)
            graph.set_op(replace(user, inputs=tuple(cast.value if v == op.value else v for v in user.inputs)))
    for i in graph.outputs:
        op = graph.op(i)
        source, (out,) = op.inputs[0], op.outputs
        if source is None or not is_float(out.type.dtype) or out.type.dtype == dtype:
            continue
        cast = graph.add("Cast", [source], CastAttrs(to=dtype), names=[f"{out.name}_cast"])
        graph.set_op(replace(op, inputs=(cast.value,), outputs=(replace(out, type=out.type.with_dtype(dtype)),)))
