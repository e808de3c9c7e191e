"""Products of a few rows with packed weights on Hopper, whose multiprocessors read one stream of weights each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, ClassVar

from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder
from optdnn.kernels.launch import Launch
from optdnn.kernels.packed import gemv_kernel as gemv
from optdnn.kernels.packed import stream_kernel as stream
from optdnn.kernels.packed.gemv import PackedGemv
from optdnn.kernels.packed.problem import Problem
from optdnn.kernels.packed.product import PackedProduct, costlier, described, refusal
from optdnn.kernels.packed.wgmma import PackedWgmma
from optdnn.kernels.tactic import Offer
from optdnn.runtime.cuda.gpu_facts import GpuFacts


@lru_cache(maxsize=1024)
def _offers(problem: Problem, gpu: GpuFacts) -> tuple[Offer, ...]:
    return tuple(Offer(c, stream.estimate(problem, c, gpu)) for c in stream.candidates(problem, gpu))


class PackedStream(PackedProduct):
    """PackedMatMul of one to sixteen rows of 16-bit floats."""

    name = "packed_stream"
    row_invariant: ClassVar[bool] = False
    """More rows go to another tactic, or share K in another way."""

    def refuse(self, b: Builder, op: Op) -> str | None:
        if not b.gpu.hopper:
            return f"it needs Hopper's bulk copies (sm_90a), not {b.arch}"
        if (why := refusal(b, op)) is not None:
            return why
        rows = math.prod(op.outputs[0].type.static_shape[:-1])
        if rows > stream.MAX_ROWS:
            return f"it is for up to {stream.MAX_ROWS} rows, not {rows}"
        return None if _offers(described(b, op), b.gpu) else "its rows do not fit shared memory"

    def defer(self, b: Builder, op: Op) -> str | None:
        """The other kernel may be predicted to be faster: on an H200 it was for one row, and for more than eight."""
        rows = math.prod(op.outputs[0].type.static_shape[:-1])
        return costlier(b, op, self, PackedGemv() if rows <= gemv.MAX_ROWS else PackedWgmma())

    def offers(self, problem: Problem, gpu: GpuFacts) -> Sequence[Offer]:
        return _offers(problem, gpu)

    def workspace(self, problem: Problem, config: Any) -> tuple[int, int]:
        return stream.workspace(problem, config)

    def planned(self, b: Builder, problem: Problem, config: Any, x_pitch: int, out_pitch: int) -> Launch:
        return stream.launch(problem, config, b.gpu, x_pitch, out_pitch)
