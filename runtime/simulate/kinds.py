"""Operators that only lowered programs have: what kernels do beside ONNX's own operators, in NumPy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from optdnn.runtime.reference.run import run_kernel
from optdnn.types import Array


def _copy(operands: Sequence[Array | None], attrs: Mapping[str, Any]) -> Sequence[Array]:
    """Operand 0, rearranged and rounded by the views alone."""
    (x,) = operands
    assert x is not None
    return (x,)


def _space_to_depth(operands: Sequence[Array | None], attrs: Mapping[str, Any]) -> Sequence[Array]:
    """NCHW image -> [n, lanes, ceil(h / block), ceil(w / block)]: lane (dy * block + dx) * channels + c, zero-filled."""
    (x,), block, lanes = operands, attrs["block"], attrs["lanes"]
    assert x is not None
    n, c, h, w = x.shape
    high, wide = -(-h // block), -(-w // block)
    padded = np.zeros((n, c, high * block, wide * block), np.float32)
    padded[:, :, :h, :w] = x
    tiles = (
        padded.reshape(n, c, high, block, wide, block)
        .transpose(0, 3, 5, 1, 2, 4)
        .reshape(n, block * block * c, high, wide)
    )
    out = np.zeros((n, lanes, high, wide), np.float32)
    out[:, : block * block * c] = tiles
    return (out,)


def _conv_sum(operands: Sequence[Array | None], attrs: Mapping[str, Any]) -> Sequence[Array]:
    """The convolutions of operands (0, 1) and (2, 3), added, then the epilogue. ``sources``: their strides, pads, dilations."""
    x0, w0, x1, w1, *rest = operands
    first, second = attrs["sources"]
    names = ("strides", "pads", "dilations")
    common = {"group": 1, "auto_pad": "NOTSET"}
    wide = [None if a is None else a.astype(np.float32) for a in (x1, w1)]
    (other,) = run_kernel("Conv", wide, {**dict(zip(names, second, strict=True)), **common})
    own = {**dict(zip(names, first, strict=True)), **common}
    stages = attrs["epilogue"]
    (total,) = run_kernel("Conv", [None if a is None else a.astype(np.float32) for a in (x0, w0)], own)
    total = total + other
    operands32 = [None if a is None else a.astype(np.float32) for a in (total, *rest)]
    return run_kernel("Pointwise", operands32, {"epilogue": stages, "arity": 1})


OWN: dict[str, Callable[[Sequence[Array | None], Mapping[str, Any]], Sequence[Array]]] = {
    "Copy": _copy,
    "SpaceToDepthImage": _space_to_depth,
    "ConvSum": _conv_sum,
}
"""Kind -> its meaning, beside those of the reference kernels."""
