"""Normalizations: BatchNormalization, InstanceNormalization, GroupNormalization, LayerNormalization, LRN, and the like."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from optdnn.errors import ShapeError
from optdnn.ops.base import Attrs, Call, Emit, Infer, NodeSpec, OpDef, Ref, Result, Tol, Traits, Unsupported
from optdnn.ops.checks import agree, no_outputs_beyond, per_element, require_rank
from optdnn.runtime.reference.norm import KERNELS
from optdnn.types import TensorType, is_float


@dataclass(frozen=True)
class EpsilonAttrs(Attrs):
    """``epsilon`` is added to the variance."""

    epsilon: float = 1e-5


def _input(call: Call, least: int = 1) -> TensorType:
    x = call.type(0)
    if not is_float(x.dtype):
        raise ShapeError(f"{call.kind} of {x}; it must be floating-point")
    if len(x.dims) < least:
        raise ShapeError(f"{call.kind} input {x} must have at least {least} dimensions")
    return x


def _infer_per_channel(names: Sequence[str]) -> Infer:
    def infer(call: Call) -> Result:
        x = _input(call, 2 if call.kind == "BatchNormalization" else 3)
        for i, name in enumerate(names, 1):
            require_rank(call.type(i), 1, f"{call.kind} {name}")
            agree(call.type(i).dims[0], x.dims[1], f"{call.kind} {name} and the channels of {x} differ")
        return Result((x,))

    return infer


def _import_batch(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    if node.get("training_mode", 0):
        raise Unsupported("training_mode=1; export the model for inference")
    no_outputs_beyond(node, 1, "its statistics outputs are used (training mode); export the model for inference")
    if node.opset < 9 and not node.get("spatial", 1):
        raise Unsupported("spatial=0 (statistics for each activation)")
    return e.op("BatchNormalization", node.inputs, EpsilonAttrs(float(node.get("epsilon", 1e-5))))


def _import_instance(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    return e.op("InstanceNormalization", node.inputs, EpsilonAttrs(float(node.get("epsilon", 1e-5))))


_TOL = Tol(rtol=1e-5, atol=2e-6)
_RISKY = Traits(fp16_risky=True)

DEFS: tuple[OpDef, ...] = (
    OpDef(
        kind="BatchNormalization",
        infer=_infer_per_channel(("scale", "bias", "mean", "variance")),
        kernel=KERNELS["BatchNormalization"],
        attrs=EpsilonAttrs,
        onnx={"BatchNormalization": _import_batch},
        cost=per_element(2),
        tol=_TOL,
        traits=_RISKY,
    ),
    OpDef(
        kind="InstanceNormalization",
        infer=_infer_per_channel(("scale", "bias")),
        kernel=KERNELS["InstanceNormalization"],
        attrs=EpsilonAttrs,
        onnx={"InstanceNormalization": _import_instance},
        cost=per_element(7),
        tol=_TOL,
        traits=_RISKY,
    ),
)
