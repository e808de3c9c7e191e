"""Likely ranges of the sizes that a model leaves open, as values of ``--shape``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from shlex import quote
from typing import Any

from optdnn.dim import Dim, DimLike
from optdnn.dim_text import lone
from optdnn.errors import UsageError
from optdnn.ir.graph import Graph
from optdnn.lowering.cpu.typical_sizes import tied_sizes, typical_sizes

LIKELY = ((1, 8, 32), (1, 128, 512))
"""Ranges of a batch (the first axis), and of any other dimension: positions of a sequence."""


def suggest_shapes(graph: Graph) -> list[str]:
    """Values of --shape that give each free symbolic dimension a range that the network accepts; empty if all sizes are known.

    Little is known about an image's height and width. Their range begins at the smallest power of two at which every tensor of the
    network has elements. A size that must equal another one gets its range.
    """
    if graph.profiles:
        return []
    typical, tied = typical_sizes(graph), tied_sizes(graph)
    inputs = {out.name: out.type.shape or () for out in (graph.op(i).outputs[0] for i in graph.inputs)}
    ranges = {
        str(d): _range(str(d), axis, dims, typical)
        for dims in inputs.values()
        for axis, d in reversed(list(enumerate(dims)))
        if not isinstance(d, int)
    }

    def text(d: DimLike) -> str:
        same = tied.get(str(d), d)
        return str(same) if isinstance(same, int) else ranges.get(str(same), ranges[str(d)])

    return [
        f"{name}={'x'.join(text(d) if isinstance(d, Dim) else str(d) for d in dims)}"
        for name, dims in inputs.items()
        if any(isinstance(d, Dim) for d in dims)
    ]


def sizes_needed(graph: Graph, target: str) -> UsageError:
    """The error for a GPU engine whose input sizes are unknown, with a range that may fit."""
    hint = "give each of them a size or a range"
    if suggested := suggest_shapes(graph):
        options = " ".join(f"--shape {quote(s)}" for s in suggested)
        hint = f"a range that may fit: {options} (in Python: shapes={_in_python(suggested)})"
    return UsageError(
        f"an engine for {target} needs sizes, or ranges of them (MIN..OPT..MAX); not fixed are {_symbols(graph)}",
        hint=hint,
    )


def _range(name: str, axis: int, dims: Any, typical: Mapping[str, int]) -> str:
    if name not in typical:
        return "?"  # it follows from others
    if axis == 0:
        low, likely, high = LIKELY[0]
    elif len(dims) >= 4 and axis >= 2 and not isinstance(dims[-1], int):  # an image, and not a cache of heads
        least = typical[name]
        low, likely, high = least, max(least, 224), max(2 * least, 512)
    else:
        low, likely, high = LIKELY[1]
        if typical[name] > 32:  # with 32, some tensor has no elements
            low, likely, high = typical[name], 2 * typical[name], 4 * typical[name]
    return f"{low}..{likely}..{high}"


def _symbols(graph: Graph) -> str:
    dims = (d for i in graph.inputs for d in graph.op(i).outputs[0].type.shape or ())
    return ", ".join(dict.fromkeys(name for d in dims if (name := lone(d)) is not None))


def _in_python(suggested: Sequence[str]) -> str:
    """The first suggestion as a dictionary, and dots for the others."""
    name, _, dims = suggested[0].rpartition("=")
    return f"{{{name!r}: {dims!r}{', …' if len(suggested) > 1 else ''}}}"
