"""A test for NaN of numbers that are never NaN."""

from __future__ import annotations

from typing import Any

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.passes.base import Match, Miss
from optdnn.passes.support.facts import operand, producer
from optdnn.passes.support.pattern import Var, node
from optdnn.passes.support.pattern_rule import pattern_rule


@pattern_rule("never_nan", node("Where", node("IsNaN", Var("tested"), name="test"), Var("other"), Var("kept")))
def never_nan(graph: Graph, root: Op, found: dict[str, Any]) -> Match | Miss | None:
    """PyTorch's ``where(isnan(p), 0, p)`` of a softmax ``p`` gives ``p`` if ``p`` or its scores were rounded to integers, which are
    finite.

    FuseAttention looks through this form, but not if a rounding stands between, as ONNX Runtime's quantizer leaves it."""
    softmax = producer(graph, found["tested"], {"Softmax"})
    if softmax is None and producer(graph, found["tested"], {"DequantizeLinear"}) is None:
        return None
    if not _finite(graph, found["tested"] if softmax is None else operand(softmax)):
        return Miss("what it tests may be NaN")
    if graph.type(found["kept"]) != root.outputs[0].type:
        return Miss("it broadcasts what it keeps")
    return Match((root,), lambda patch: found["kept"])


def _finite(graph: Graph, value: Value) -> bool:
    """Whether a value is dequantized from 8-bit integers by a finite constant scale."""
    op = producer(graph, value, {"DequantizeLinear"})
    if op is None or graph.type(operand(op)).dtype.name not in ("int8", "uint8"):
        return False
    scale = graph.constant_value(op.inputs[1])
    return scale is not None and bool((np.abs(scale.astype(np.float64)) * 255 <= np.finfo(np.float32).max).all())
