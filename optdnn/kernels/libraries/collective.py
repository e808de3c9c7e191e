"""The tactic of collectives: one call that NCCL runs, or one of our own kernels if it is measured to be faster.

The GPUs choose between them when an engine is loaded (:mod:`optdnn.runtime.cuda.collectives.communicator`).
"""

from __future__ import annotations

from typing import Any

from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder, TensorView, map_dtype, row_major
from optdnn.kernels.pointwise.pointwise import copied, copy
from optdnn.kernels.tactic import Tactic
from optdnn.runtime.cuda.collectives.peers import FLAGGED, ONE_SHOT, WORLDS
from optdnn.runtime.cuda.libraries.calls import Collective
from optdnn.types import BF16, FP16, FP32

START, LINK = 7e-6, 250e9
"""Seconds of a small sum by NCCL, and bytes per second of a large one (two H200s over NVLink: 25 MB in 100 us)."""
FLAGGED_START, FLAGGED_RATE = 2.2e-6, 140e9
"""The same for packets over peer memory: a sum of 64 KB takes 2.8 us on two GPUs, 3.9 us on four."""
ONE_SHOT_START, ONE_SHOT_RATE = 4.2e-6, 120e9
"""The same for the kernel with fences: 64 KB take 4.7 us on two GPUs, 5.2 us on four."""


def predicted_seconds(kind: str, nbytes: float, world: int) -> float:
    """Predicted seconds of an AllReduce or AllGather with a result of ``nbytes`` bytes, by the fastest kernel. The constants were measured
    on H200s; GPUs without NVLink are slower."""
    gather = kind == "AllGather"
    moved, part = (world - 1) / world * nbytes, nbytes / world if gather else nbytes
    found = [START + (1 if gather else 2) * moved / LINK]
    if world in WORLDS and part <= FLAGGED:
        found.append(FLAGGED_START + (world - 1) * part / FLAGGED_RATE)
    if world in WORLDS and part <= ONE_SHOT and not gather:
        found.append(ONE_SHOT_START + (world - 1) * part / ONE_SHOT_RATE)
    return min(found)


class Collect(Tactic):
    """AllReduce and AllGather of floats. A copy follows a gather along an axis other than the first."""

    name = "collective"

    def refuse(self, b: Builder, op: Op) -> str | None:
        t = op.outputs[0].type
        if t.dtype not in (FP16, BF16, FP32):
            return "it is for fp16, bf16 and fp32"
        return "it is empty" if 0 in t.static_shape else None

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        """See :class:`~optdnn.kernels.tactic.Tactic`."""
        x, target, world = b.operand(op.inputs[0]), b.target(op.value), op.attrs.world
        if not x.dense:
            x = copied(b, op, x, "dense")
        gather = op.kind == "AllGather"
        between = self._result(b, op, target, gather)
        operation = Collective(map_dtype(x.dtype), "gather" if gather else "reduce", x.size, world)
        if not gather:
            b.call(op, operation, {"x": x, "y": between}, op.kind, {"world": world}, [x], [between])
            if between is not target:
                copy(b, op, between, target)
            return
        parts = between.view((world, *x.shape), row_major((world, *x.shape)))
        meaning = x.view((1, *x.shape), row_major((1, *x.shape)))
        b.call(op, operation, {"x": x, "y": parts}, op.kind, {"world": world, "axis": 0}, [meaning], [parts])
        if between is not target:
            axis, strides = op.attrs.axis, list(target.strides)
            size = x.shape[axis]
            apart = target.view((world, *x.shape), (size * strides[axis], *strides))
            copy(b, op, parts, apart)

    @staticmethod
    def _result(b: Builder, op: Op, target: TensorView, gather: bool) -> TensorView:
        """The tensor that the call writes: the result itself if the ranks' parts follow one another in it, else a new buffer."""
        first = not gather or all(n == 1 for n in target.shape[: op.attrs.axis])
        return target if target.dense and first else b.new(f"{op.outputs[0].name}.parts", target.dtype, target.shape)
