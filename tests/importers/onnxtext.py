"""Small models from ONNX's text form, and the names of a graph's ops."""

from __future__ import annotations

import onnx
import onnx.parser

from optdnn.ir.graph import Graph


def model(text: str, opset: int = 17, functions: str = "", more_opsets: str = "") -> onnx.ModelProto:
    """A model from the text of one graph (and of its functions)."""
    header = f'<ir_version: 10, opset_import: ["" : {opset}{more_opsets}]>'
    return onnx.parser.parse_model(f"{header}\n{text}\n{functions}")


def sources(graph: Graph) -> list[tuple[str, str]]:
    """(kind, ONNX node name) of each computing op, in order."""
    return [(op.kind, op.name) for op in graph.order() if op.kind not in ("Input", "Output", "Constant")]


def constants(graph: Graph) -> list[str]:
    return sorted(op.outputs[0].name for op in graph.of_kind("Constant"))


def out_type(graph: Graph, i: int = 0) -> str:
    return str(graph.op(graph.outputs[i]).outputs[0].type)
