"""Custom operators on a GPU: the user's kernel with the user's launch. Without a kernel, the CPU runs the operator."""

from __future__ import annotations

from typing import Any

from optdnn.custom import CudaKernel, CudaLaunch, known
from optdnn.errors import OptdnnError, UnsupportedError
from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder, TensorView
from optdnn.kernels.launch import Parameters
from optdnn.kernels.pointwise.expressions import CPP
from optdnn.kernels.pointwise.pointwise import copied, copy
from optdnn.kernels.tactic import Tactic
from optdnn.ops.base import attrs_dict
from optdnn.types import TensorType


class Custom(Tactic):
    """The kernel of the operator's declaration."""

    name = "custom"
    row_invariant = False

    def refuse(self, b: Builder, op: Op) -> str | None:
        kernel = known(op.attrs.digest, op.attrs.name).cuda
        if kernel is None:
            return "it is declared without a CUDA kernel"
        inputs, outputs = _types(b, op)
        return kernel.refuse(inputs, outputs, dict(op.attrs.values)) if kernel.refuse is not None else None

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        kernel = known(op.attrs.digest, op.attrs.name).cuda
        assert kernel is not None
        inputs, outputs = _types(b, op)
        launch = _launch(kernel, op, inputs, outputs)
        reads = [None if v is None else _dense(b, op, b.operand(v)) for v in op.inputs]
        targets = [b.target(v) for v in op.values]
        writes = [
            t if t.dense else b.new(f"{op.outputs[k].name}.dense", t.dtype, t.shape) for k, t in enumerate(targets)
        ]
        placed = {f"x{i}": r for i, r in enumerate(reads) if r is not None} | {f"y{i}": w for i, w in enumerate(writes)}
        names = [f"x{i}" if r is not None else None for i, r in enumerate(reads)]
        parameters = Parameters().pointer(*names, *(f"y{i}" for i in range(len(writes))))
        for kind, value in launch.scalars:
            getattr(parameters, kind)(float(value) if kind == "f32" else int(value))
        types = [f"using X{i} = {CPP[r.dtype]};" for i, r in enumerate(reads) if r is not None]
        types += [f"using Y{i} = {CPP[w.dtype]};" for i, w in enumerate(writes)]
        text = "\n".join([*types, kernel.source, ""])
        made = parameters.generated(b.arch, text, kernel.function, launch.grid, launch.threads, shared=launch.shared)
        b.emit(op, made, placed, "Custom", attrs_dict(op.attrs), reads, writes)
        for staged, target in zip(writes, targets, strict=True):
            if staged is not target:
                copy(b, op, staged, target)


def _types(b: Builder, op: Op) -> tuple[list[TensorType], list[TensorType]]:
    return [b.graph.type(v) for v in op.inputs if v is not None], [o.type for o in op.outputs]


def _launch(kernel: CudaKernel, op: Op, inputs: list[TensorType], outputs: list[TensorType]) -> CudaLaunch:
    """The user's launch. Raises UnsupportedError if the user's function fails, or does not return a CudaLaunch."""
    try:
        found = kernel.launch(inputs, outputs, dict(op.attrs.values))
    except OptdnnError:
        raise
    except Exception as error:  # the user's own code
        raise UnsupportedError(f"launch of the custom operator {op.attrs.name} failed: {error}") from error
    if not isinstance(found, CudaLaunch) or any(k not in ("i32", "u32", "i64", "f32") for k, _ in found.scalars):
        raise UnsupportedError(
            f"launch of the custom operator {op.attrs.name} returned {found!r}, which is not a CudaLaunch"
        )
    return found


def _dense(b: Builder, op: Op, x: TensorView) -> TensorView:
    return x if x.dense else copied(b, op, x, "operand")
