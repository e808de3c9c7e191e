"""Views of a graph for other tools."""

from __future__ import annotations

import json
import re

import networkx as nx
import numpy as np

from optdnn.ir.graph import Graph
from optdnn.ir.view import dot, node_link
from optdnn.ops.table import OPDEFS
from optdnn.types import tensor


def small() -> Graph:
    graph = Graph('a "net"')
    x = graph.add_input("x", tensor(np.float32, 2, 3))
    c = graph.add_constant(np.ones(3, np.float32), "c")
    a = graph.add("Add", [x, c], names=["a"], src=["add1"])
    s = graph.add("Softmax", [a.value], OPDEFS["Softmax"].attrs(axis=0), names=["s"], src=["soft1"])
    graph.add_output(graph.add("Sub", [a.value, s.value], src=["sub1"]).value, "y")
    return graph


def test_node_link_data_is_json_and_comes_back():
    graph = small()
    data = json.loads(json.dumps(node_link(graph)))
    back = nx.node_link_graph(data, edges="links")
    assert back.number_of_nodes() == 6
    assert back.number_of_edges() == graph.nx.number_of_edges() == 6
    kinds = {n["kind"]: n for n in data["nodes"]}
    assert kinds["Softmax"]["attrs"] == " axis=0"
    assert kinds["Softmax"]["src"] == ["soft1"]
    assert kinds["Add"]["outputs"] == [{"name": "a", "type": "fp32[2, 3]"}]
    sub = kinds["Sub"]["id"]
    slots = {link["key"]: link["source"] for link in data["links"] if link["target"] == sub}
    assert slots == {0: kinds["Add"]["id"], 1: kinds["Softmax"]["id"]}


def test_dot():
    text = dot(small())
    assert text.startswith('digraph "a \\"net\\"" {')
    assert text.rstrip().endswith("}")
    assert len(re.findall(r"^  n\d+ \[label=", text, re.MULTILINE)) == 5  # constants are left out
    assert len(re.findall(r"->", text)) == 5
    assert 'label="Softmax\\nsoft1\\naxis=0"' in text
    assert 'label="fp32[2, 3]"' in text
    everything = dot(small(), constants=True)
    assert len(re.findall(r"^  n\d+ \[label=", everything, re.MULTILINE)) == 6
    assert len(re.findall(r"->", everything)) == 6
