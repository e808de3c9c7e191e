"""Made-up inputs for the checks and the timing of candidates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from optdnn.errors import RunError
from optdnn.ir.evaluate import evaluate, random_feeds
from optdnn.ir.graph import Graph, Op, Value
from optdnn.lowering.cpu.typical_sizes import typical_sizes
from optdnn.runtime.contexts.feeds import fractions
from optdnn.types import Array, is_float, is_int

_INDEXED = ("Gather", "GatherElements", "GatherND", "ScatterElements", "ScatterND")
"""Operators whose operand 1 holds positions."""
_KEEPS = frozenset(
    {
        "Add", "Cast", "Concat", "Expand", "Gather", "Mul", "Reshape", "Slice", "Split", "Squeeze", "Sub", "Transpose", "Unsqueeze",
    }
)  # fmt: skip
"""Operators that pass positions on, or compute others from them."""
_BOUNDS = frozenset({"Clip", "Max", "Min", "Sigmoid"})
"""Operators after which floats have known bounds."""
_MOST = 64
"""The most operators before a position that are looked at."""


def made_up_inputs(graph: Graph) -> tuple[Mapping[str, Array] | None, str]:
    """Inputs that the reference accepts; None if none are found, with the reason.

    Integers and short float inputs may be axes, sizes, pads, positions or scales, for which many values are invalid: a library
    may then return an error or crash the process. So the reference checks them first, and such inputs are 1 if that is valid,
    otherwise 0. Some networks use pixels as positions (in the table of a histogram); they get floats from 0 to 1.
    """
    feeds = random_feeds(graph, seed=1, sizes=typical_sizes(graph))
    pixels = _positions_of_floats(graph)
    if not pixels and not any(is_int(a.dtype) or a.ndim < 2 for a in feeds.values()):
        return feeds, ""
    reason = ""
    for data in (feeds, fractions(feeds)) if pixels else (feeds,):
        for tried in _filled(data):
            try:
                _fits(graph, evaluate(graph, tried, _no_zero_divisors))
                return tried, ""
            except RunError as error:
                reason = error.message
    return None, reason


def _filled(feeds: Mapping[str, Array]) -> Iterator[dict[str, Array]]:
    """The inputs with several numbers in place of integers and short float inputs."""
    for control, other in ((1, None), (0, None), (1, 0), (0, 0), (None, None)):
        tried = dict(feeds)
        for name, array in feeds.items():
            integer = is_int(array.dtype)
            fill = other if array.ndim > 1 else control if integer or control is None else 1
            if fill is not None and (integer or array.ndim < 2):
                tried[name] = np.full_like(array, fill)
        yield tried


def _fits(graph: Graph, outputs: Mapping[str, Array]) -> None:
    """Raise RunError if outputs have other sizes than the model declares: their sizes depend on the values of inputs."""
    for i in graph.outputs:
        out = graph.op(i).outputs[0]
        if out.type.is_static and outputs[out.name].shape != tuple(out.type.static_shape):
            raise RunError(f"output {out.name!r} would be of another size, {list(outputs[out.name].shape)}")


def _positions_of_floats(graph: Graph) -> bool:
    """Whether floats without known bounds are rounded to positions."""
    return any(_from_floats(graph, op) for op in graph.of_kind(*_INDEXED))


def _from_floats(graph: Graph, op: Op) -> bool:
    waiting, seen = [op.inputs[1]], set[Value]()
    while waiting and len(seen) < _MOST:
        value = waiting.pop()
        if value is None or value in seen:
            continue
        seen.add(value)
        made = graph.op(value)
        kinds = (
            {made.kind} if made.kind != "Pointwise" else {s.kind for s in (*made.attrs.prologue, *made.attrs.epilogue)}
        )
        if kinds & _BOUNDS or not (made.kind == "Pointwise" or made.kind in _KEEPS):
            continue
        floats = [v for v in made.inputs if v is not None and is_float(graph.type(v).dtype)]
        if "Cast" in kinds and any(graph.op(v).kind not in (*_BOUNDS, "Constant") for v in floats):
            return True
        waiting += [v for v in made.inputs if v not in floats]
    return False


def _no_zero_divisors(op: Op, operands: list[Array | None]) -> list[Array | None]:
    """Raise RunError where integers are divided by zero: ONNX does not define the result, and libraries may crash there."""
    divisor = operands[1] if op.kind in ("Div", "Mod") else None
    if divisor is not None and is_int(divisor.dtype) and not divisor.all():
        raise RunError("integers are divided by zero")
    return operands
