"""Helpers of import functions that rewrite another domain's operators as ONNX's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from optdnn.ops.base import Unsupported
from optdnn.ops.checks import emit
from optdnn.ops.exchange import Emit, FromOnnx, NodeSpec, Ref
from optdnn.types import INT64, Array

MICROSOFT = "com.microsoft."
MODERN = 21
"""The ONNX opset of the rewritten operators."""


def as_standard(kind: str, node: NodeSpec, e: Emit, **changes: Any) -> Sequence[Ref]:
    """Import a node as ONNX's own operator ``kind``, with these fields changed."""
    return e.importer(kind)(replace(node, **{"op_type": kind, "domain": "", "opset": MODERN, **changes}), e)


def standard(name: str) -> FromOnnx:
    """The import function of ONNX's own operator of this name."""

    def from_onnx(node: NodeSpec, e: Emit) -> Sequence[Ref]:
        return as_standard(name, node, e)

    return from_onnx


def typed_as(e: Emit, like: Ref, values: Any) -> Array:
    """``values`` in the element type of ``like``."""
    return np.asarray(values, e.type(like).dtype)


def refuse_operands(node: NodeSpec, **names: int) -> None:
    """Raises Unsupported if one of these operands (name and slot) is given."""
    for name, i in names.items():
        if node.input(i) is not None:
            raise Unsupported(f"the operand {name}")


def refuse_attributes(node: NodeSpec, *names: str) -> None:
    """Raises Unsupported if one of these attributes is set."""
    for name in names:
        if node.get(name, 0):
            raise Unsupported(f"{name}={node.get(name)}")


def count(e: Emit, length: Ref) -> Ref:
    """0, 1, ... below ``length``, a tensor of one element."""
    known = e.value(length)
    if known is not None and isinstance(known.reshape(-1)[0], int | np.integer):
        return e.const(np.arange(int(known.reshape(-1)[0])))
    end = emit(e, "Reshape", emit(e, "Cast", length, to=INT64), np.array([], np.int64))
    return emit(e, "Range", np.asarray(0), end, np.asarray(1))
