"""Operators that converters leave in a network although ONNX does not define them, as compositions of ONNX's.

tf2onnx writes an operator that it cannot convert under its own name (with a warning): ``Erfc``, from Keras's exact GELU, and
``TFL_GELU``, the same in a TFLite file.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from optdnn.ops.checks import emit, needs
from optdnn.ops.exchange import Emit, FromOnnx, NodeSpec, Ref


def _erfc(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    """``1 - erf(x)``: accurate enough for a GELU, because a small number is added to a large one."""
    (x,) = needs(node, 0)
    return (emit(e, "Sub", np.asarray(1, e.type(x).dtype), emit(e, "Erf", x)),)


def _gelu(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    return (emit(e, "Gelu", *needs(node, 0), approximate="tanh" if node.get("approximate") else "none"),)


IMPORTERS: dict[str, FromOnnx] = {"Erfc": _erfc, "TFL_GELU": _gelu}
