"""Padding of 8-bit images by their zero point: ``conv_edges.cuh``.

Copies fill taps outside of an image with zeros. So accumulators begin with the zero point times the weights of the taps outside. Pixels
with the same taps outside have the same value.
"""

from __future__ import annotations

import numpy as np

from optdnn.kernels.builder import Builder, TensorView
from optdnn.kernels.conv.problem import Problem
from optdnn.kernels.launch import Parameters
from optdnn.types import Array

EDGES = ("edge_kinds", "edge_sums")
"""Operands of a problem that is padded by a zero point."""


def taps_inside(size: int, out: int, taps: int, stride: int, before: int, dilation: int) -> Array:
    """Whether each tap of a filter along one axis reads an element: bool ``[out, taps]``."""
    at = np.arange(out)[:, None] * stride - before + np.arange(taps)[None] * dilation
    return np.asarray((at >= 0) & (at < size))


def edges(problem: Problem, weight: Array, zero: int) -> tuple[Array, Array]:
    """The kind of each pixel of an image (uint16 ``[height, width]``; kind 0: no tap lies outside), and what the taps outside add to
    the sums of each other kind (int32 ``[kinds - 1, channels of the problem]``).

    ``weight``: OIHW, 8-bit integers, I of one group; ``zero``: the zero point."""
    source = problem.sources[0]
    inside = [
        taps_inside(size, out, *walk)
        for size, out, *walk in zip(
            (source.height, source.width), problem.out_size, source.kernel, source.stride, source.padding, source.dilation,
            strict=False,
        )
    ]  # fmt: skip
    found, of_axis = zip(*(np.unique(axis, axis=0, return_inverse=True) for axis in inside), strict=True)
    outside = ~(found[0][:, None, :, None] & found[1][None, :, None, :]).reshape(-1, *source.kernel)
    whole = ~outside.any(axis=(1, 2))
    number = np.where(whole, 0, np.cumsum(~whole))
    pair = of_axis[0].reshape(-1, 1) * len(found[1]) + of_axis[1].reshape(1, -1)
    sums = np.einsum("khw,ohw->ko", outside[~whole].astype(np.int64), weight.astype(np.int64).sum(axis=1)) * zero
    padded = np.zeros((len(sums), problem.channels), np.int32)
    padded[:, : len(weight)] = sums
    return number[pair].astype(np.uint16), padded


def edge_operands(b: Builder, name: str, problem: Problem, weight: Array, zero: int) -> dict[str, TensorView]:
    """The operands of :data:`EDGES`; none if the problem is not padded by a zero point. The other arguments are those of
    :func:`edges`."""
    if not problem.edged:
        return {}
    kinds, sums = edges(problem, weight, zero)
    return dict(
        zip(EDGES, (b.constant(kinds, f"{name}.edge_kinds"), b.constant(sums, f"{name}.edge_sums")), strict=True)
    )


def put_edges(parameters: Parameters, problem: Problem) -> None:
    """Append ``Edges`` of ``conv_edges.cuh`` to a parameter block, if the problem is padded by a zero point."""
    if problem.edged:
        parameters.pointer(*EDGES).i32(problem.channels, 0)  # and the padding of the struct
