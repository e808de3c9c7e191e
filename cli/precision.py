"""The text about automatic precision that ``build`` and ``inspect`` print."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from optdnn.cli.common import stdout, table


def show_auto(auto: Mapping[str, Any], *, nodes: bool) -> None:
    """The plans, the front as a plot, the question and its data, and (``nodes``) every node with its reason."""
    from optdnn.report import precision as told

    heads = told.columns(auto)
    right = list(range(2, len(heads) - 1))
    stdout.print(table("\nprecision: the plans that were tried", heads, told.rows(auto), right=right))
    stdout.print()
    for line in told.text_plot(auto):
        stdout.print(line)
    for line in told.sentences(auto):
        stdout.print(line)
    if nodes:
        rows = told.node_rows(auto["nodes"])
        stdout.print(table("\nnodes", ["ONNX nodes", "operator", "precision", "because"], rows))
