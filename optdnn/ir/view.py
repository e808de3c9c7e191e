"""A graph for other tools: node-link JSON (networkx) and Graphviz DOT."""

from __future__ import annotations

import json
from typing import Any

import networkx as nx

from optdnn.ir.graph import Graph
from optdnn.ir.text import attrs_text


def node_link(graph: Graph) -> dict[str, Any]:
    """The graph as JSON-like data in networkx's node-link form (``networkx.node_link_graph(data, edges="links")``).

    A node holds its kind, name, attributes as text, output names and types, and ONNX provenance; a link holds the operand
    slot (its key) and the producer's port.
    """
    plain = nx.MultiDiGraph(name=graph.name)
    for op in graph.order():
        plain.add_node(
            op.id,
            kind=op.kind,
            name=op.name,
            attrs="" if op.kind == "Constant" else attrs_text(op.attrs),
            outputs=[{"name": o.name, "type": str(o.type)} for o in op.outputs],
            src=sorted(op.src),
        )
    for producer, user, slot, port in graph.nx.edges(keys=True, data="port"):
        plain.add_edge(producer, user, key=slot, port=port)
    data: dict[str, Any] = nx.node_link_data(plain, edges="links")
    return data


def dot(graph: Graph, *, constants: bool = False) -> str:
    """Graphviz text: one box per op, an edge per use with the tensor's type; constants only when asked for."""
    shown = [op for op in graph.order() if constants or op.kind != "Constant"]
    ids = {op.id for op in shown}
    lines = [f"digraph {_quoted(graph.name)} {{", "  node [shape=box, fontname=monospace];"]
    for op in shown:
        structural = op.kind in ("Input", "Output", "Constant")
        label = f"{op.kind}\n{op.name}" + ("" if structural else attrs_text(op.attrs).replace(" ", "\n"))
        style = ", style=rounded" if structural else ""
        lines.append(f"  n{op.id} [label={_quoted(label)}{style}];")
    for op in shown:
        for value in op.inputs:
            if value is not None and value.op in ids:
                lines.append(f"  n{value.op} -> n{op.id} [label={_quoted(str(graph.type(value)))}];")
    return "\n".join([*lines, "}"]) + "\n"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
