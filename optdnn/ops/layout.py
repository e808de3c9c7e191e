"""The kind Layout: a change of only the physical order, which a target's pipeline puts between ops of different layouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from optdnn.ops.base import EXACT, MOVEMENT, Attrs, Call, Result
from optdnn.ops.checks import free
from optdnn.ops.definition import OpDef
from optdnn.ops.exchange import Export


@dataclass(frozen=True)
class LayoutAttrs(Attrs):
    """``layout``: the physical order of the result, as in :class:`~optdnn.types.TensorType` ("" is plain order)."""

    layout: str = ""


def _infer(call: Call) -> Result:
    return Result((replace(call.type(0), layout=call.attrs.layout),), (call.value(0),))


def _export(attrs: Any, inputs: Sequence[str], n_outputs: int, e: Export) -> Sequence[str]:
    """ONNX has only logical tensors, so the op disappears."""
    return e.node("Identity", inputs)


DEFS: tuple[OpDef, ...] = (
    OpDef(
        "Layout",
        _infer,
        LayoutAttrs,
        {},
        _export,
        cost=free,
        tol=EXACT,
        traits=MOVEMENT,
    ),
)
