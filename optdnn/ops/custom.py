"""The kind "Custom": a user's own operator (:func:`optdnn.custom_op`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from optdnn.custom import CustomOp, known, plain
from optdnn.errors import OptdnnError, ShapeError, UnsupportedError
from optdnn.ops.base import STEPS_TOL, Attrs, Call, Result, Traits, Unsupported
from optdnn.ops.definition import OpDef
from optdnn.ops.exchange import Emit, Export, FromOnnx, NodeSpec, Ref
from optdnn.types import TensorType


@dataclass(frozen=True)
class CustomAttrs(Attrs):
    """The name of the operator, and the values of its attributes as pairs."""

    name: str
    digest: str
    values: tuple[tuple[str, Any], ...] = ()


def _infer(call: Call) -> Result:
    a: CustomAttrs = call.attrs
    try:
        found = known(a.digest, a.name).infer(list(call.types), dict(a.values))
    except OptdnnError:
        raise
    except Exception as error:  # the user's own code
        raise ShapeError(f"infer of the custom operator {a.name} failed: {type(error).__name__}: {error}") from error
    types = tuple(found) if isinstance(found, (tuple, list)) else (found,)
    if not all(isinstance(t, TensorType) for t in types):
        raise ShapeError(f"infer of the custom operator {a.name} must give TensorTypes, not {found!r}")
    return Result(types[: call.n_outputs])


def _to_onnx(attrs: Any, inputs: Sequence[str], outputs: int, e: Export) -> Sequence[str]:
    raise UnsupportedError(f"{attrs.name} is a custom operator: no library has it")


def importer_of(op: CustomOp) -> FromOnnx:
    """The import function of a custom operator's nodes."""

    def from_onnx(node: NodeSpec, e: Emit) -> Sequence[Ref]:
        unknown = sorted(set(node.attrs) - set(op.attributes))
        if unknown:
            raise Unsupported(f"the custom operator has no attribute {unknown[0]!r}")
        values = {**op.attributes, **node.attrs}
        for key, value in values.items():
            if not plain(value):
                raise Unsupported(f"attribute {key!r} of the custom operator is not a number, text or list of them")
        pairs = tuple((k, tuple(v) if isinstance(v, list) else v) for k, v in sorted(values.items()))
        attrs = CustomAttrs(op.name, op.digest, pairs)
        return e.op("Custom", node.inputs, attrs, outputs=max(1, len(node.outputs)))

    return from_onnx


DEFS = (
    OpDef(
        "Custom",
        _infer,
        CustomAttrs,
        {},
        _to_onnx,
        tol=STEPS_TOL,
        traits=Traits(own_precision=True),
    ),
)
