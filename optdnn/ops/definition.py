"""The definition of an operator: one :class:`OpDef` holds all facts about it.

- ``infer`` gives output types and, for small integer tensors, output *values*, symbolic ones included.
- ``kernel`` is its NumPy meaning (in ``runtime.reference``).
- ``onnx`` maps each ONNX operator that imports as this kind to its import function; ``to_onnx`` writes it back.
- ``cost`` counts arithmetic, ``tol`` is the tolerance of comparisons.
- ``traits`` are the facts that passes ask for.

Conventions
-----------
* A kind is named as the ONNX operator of the newest opset ("Conv", "Softmax", "ReduceMean"), and its attributes and
  operands are that opset's. Older opsets are converted on import, so no pass ever sees an opset number.
* ``attrs`` is a frozen dataclass; its field names are the keyword arguments of the kind's NumPy kernel:
  ``kernel(*arrays, **asdict(attrs))`` returns a tuple of arrays.
* Missing optional operands are None.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from optdnn.ops.base import DEFAULT_TOL, NO_TRAITS, Attrs, Call, Cost, Infer, Result, Tol, Traits
from optdnn.ops.exchange import FromOnnx, ToOnnx, read_attrs, simple_import
from optdnn.runtime.reference.run import run_kernel
from optdnn.types import Array


@dataclass(frozen=True)
class OpDef:
    """All facts about one operator kind."""

    kind: str
    infer: Infer
    attrs: type[Attrs] = Attrs
    onnx: Mapping[str, FromOnnx] | FromOnnx | None = None
    """ONNX operators ("Conv", or "com.microsoft.FusedMatMul") that import through this kind.

    A function imports the operator of the same name. None: its operands carry over, and its attributes are the dataclass
    fields.
    """
    to_onnx: ToOnnx | None = None
    """None: a node of the same name; its attributes are the dataclass fields that are not None."""
    cost: Callable[[Call, Result], Cost] | None = None
    """None: one operation per output element."""
    tol: Tol = DEFAULT_TOL
    traits: Traits = NO_TRAITS
    arity: int | None = None
    """Number of the kind's own operand slots (for fusible kinds). The operands of fused stages follow."""

    @property
    def importers(self) -> Mapping[str, FromOnnx]:
        """The import functions by ONNX operator."""
        if isinstance(self.onnx, Mapping):
            return self.onnx
        return {self.kind: self.onnx or simple_import(self.kind, read_attrs(self.attrs))}

    def kernel(self, *operands: Array | None, **attrs: Any) -> tuple[Array, ...]:
        """The NumPy meaning: the kind's entry in the table of :mod:`optdnn.runtime.reference.table`."""
        return run_kernel(self.kind, operands, attrs)
