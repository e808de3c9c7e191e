"""The one table of NumPy kernels: kind -> kernel."""

from __future__ import annotations

from optdnn.runtime.reference import (
    attention,
    binary,
    control,
    conv,
    detect,
    gemm,
    grid_sample,
    index,
    norm,
    pool,
    quant,
    quantized,
    reduce,
    resize,
    rnn,
    shape,
    signal,
    softmax,
    sort,
    trees,
    unary,
    vectors,
)
from optdnn.runtime.reference.base import Kernel

KERNELS: dict[str, Kernel] = {
    **attention.KERNELS,
    **binary.KERNELS,
    **control.KERNELS,
    **conv.KERNELS,
    **detect.KERNELS,
    **gemm.KERNELS,
    **grid_sample.KERNELS,
    **index.KERNELS,
    **norm.KERNELS,
    **pool.KERNELS,
    **quant.KERNELS,
    **quantized.KERNELS,
    **reduce.KERNELS,
    **resize.KERNELS,
    **rnn.KERNELS,
    **shape.KERNELS,
    **signal.KERNELS,
    **softmax.KERNELS,
    **sort.KERNELS,
    **trees.KERNELS,
    **unary.KERNELS,
    **vectors.KERNELS,
}
