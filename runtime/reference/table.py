"""The one table of NumPy kernels: kind -> kernel."""

from __future__ import annotations

from optdnn.runtime.reference import (
    attention,
    binary,
    conv,
    gemm,
    index,
    norm,
    pool,
    quant,
    reduce,
    resize,
    rnn,
    shape,
    softmax,
    unary,
)
from optdnn.runtime.reference.base import Kernel

KERNELS: dict[str, Kernel] = {
    **attention.KERNELS,
    **binary.KERNELS,
    **conv.KERNELS,
    **gemm.KERNELS,
    **index.KERNELS,
    **norm.KERNELS,
    **pool.KERNELS,
    **quant.KERNELS,
    **reduce.KERNELS,
    **resize.KERNELS,
    **rnn.KERNELS,
    **shape.KERNELS,
    **softmax.KERNELS,
    **unary.KERNELS,
}
