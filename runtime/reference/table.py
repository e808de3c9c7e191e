"""The table of NumPy kernels: kind -> kernel. Composed kinds are in a separate table."""

from __future__ import annotations

from optdnn.runtime.reference import (
    attention,
    binary,
    collective,
    control,
    conv,
    conv_regions,
    custom,
    detect,
    gemm,
    grid_sample,
    index,
    norm,
    norm_regions,
    packed,
    pointwise_scan,
    pool,
    quant,
    quantized,
    reduce,
    regions,
    resize,
    rnn,
    sampled_sum,
    sampling,
    segment_sum,
    shape,
    signal,
    softmax,
    sort,
    trees,
    unary,
    vectors,
)
from optdnn.runtime.reference.base import ComposedKernel, Kernel

KERNELS: dict[str, Kernel] = {
    **attention.KERNELS,
    **binary.KERNELS,
    **collective.KERNELS,
    **conv.KERNELS,
    **conv_regions.KERNELS,
    **norm_regions.KERNELS,
    **custom.KERNELS,
    **detect.KERNELS,
    **gemm.KERNELS,
    **grid_sample.KERNELS,
    **index.KERNELS,
    **norm.KERNELS,
    **packed.KERNELS,
    **pool.KERNELS,
    **quant.KERNELS,
    **quantized.KERNELS,
    **reduce.KERNELS,
    **regions.KERNELS,
    **resize.KERNELS,
    **rnn.KERNELS,
    **sampled_sum.KERNELS,
    **sampling.KERNELS,
    **shape.KERNELS,
    **signal.KERNELS,
    **softmax.KERNELS,
    **sort.KERNELS,
    **trees.KERNELS,
    **unary.KERNELS,
    **vectors.KERNELS,
}

COMPOSED: dict[str, ComposedKernel] = {
    **control.COMPOSED,
    **conv_regions.COMPOSED,
    **norm_regions.COMPOSED,
    **pointwise_scan.COMPOSED,
    **regions.COMPOSED,
    **segment_sum.COMPOSED,
}

KINDS = frozenset({*KERNELS, *COMPOSED})
"""Every kind that :func:`optdnn.runtime.reference.run.run_kernel` evaluates."""
