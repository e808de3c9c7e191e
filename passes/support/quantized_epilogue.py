"""The epilogue of a product of 8-bit values: one of its stages may read a number of each channel."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from optdnn.ir.epilogue import AFFINE, Epilogue, plan_epilogue
from optdnn.ir.graph import Graph, Op
from optdnn.types import Array


def quantized_epilogue(
    graph: Graph, op: Op, axis: int, *, residual: bool = True, numbers: bool
) -> tuple[Epilogue, Array | None]:
    """The epilogue of ``op`` with channels along ``axis``, and what one stage reads of each channel (None: no stage does).

    The stage ``channel_mul`` multiplies by the number, ``channel_add`` adds it, ``prelu`` multiplies numbers below 0 by it.
    ``numbers``: whether the kernel has room for it."""
    ep = plan_epilogue(graph, op, channel_axis=axis, allow_residual=residual, allow_numbers=numbers)
    found = None if not ep.numbers else _of_channels(ep)
    if found is None and ep.numbers:
        ep = plan_epilogue(graph, op, channel_axis=axis, allow_residual=residual)
    return (ep, None) if found is None else (replace(ep, numbers=(), rendered=found[0]), found[1])


def _of_channels(ep: Epilogue) -> tuple[list[tuple[str | float, ...]], Array] | None:
    """The stages with those of 8-bit kernels, and the number of each channel; None if a stage needs two of them."""
    if ("prelu",) in ep.rendered:
        return list(ep.rendered), ep.numbers[0]
    if (AFFINE,) not in ep.rendered:
        return None
    factor, shift = ep.numbers
    if np.any(shift) and np.any(factor != 1.0):
        return None
    stage, numbers = ("channel_add", shift) if np.any(shift) else ("channel_mul", factor)
    return [(stage,) if s == (AFFINE,) else s for s in ep.rendered], numbers
