"""The one table of operator kinds, and of the ONNX operators that import through them."""

from __future__ import annotations

from optdnn.ops import (
    attention,
    binary,
    classic,
    collective,
    contrib,
    control,
    conv,
    conv_regions,
    create,
    custom,
    detect,
    experimental,
    farthest,
    fused,
    gather,
    gemm,
    index,
    layout,
    linear_attention,
    norm,
    norm_regions,
    normalized_attention,
    packed,
    pointwise_regions,
    pointwise_scan,
    pool,
    product_regions,
    quant,
    quantized,
    reduce,
    regions,
    resize,
    resized_peaks,
    rnn,
    sampled_sum,
    sampling,
    segment_sum,
    sequences,
    shape,
    signal,
    sinkhorn,
    softmax,
    sort,
    tensorrt,
    trees,
    unary,
)
from optdnn.ops import tf_ops as leftovers
from optdnn.ops.definition import OpDef
from optdnn.ops.exchange import FromOnnx

FAMILIES: dict[str, tuple[OpDef, ...]] = {
    "arithmetic, comparison, logic, casts": binary.DEFS,
    "convolution": conv.DEFS,
    "constants and identities": create.DEFS,
    "fused (our own)": (
        *(*fused.DEFS, *pointwise_scan.DEFS, *resized_peaks.DEFS),
        *(*farthest.DEFS, *sampled_sum.DEFS, *segment_sum.DEFS, *sinkhorn.DEFS, *normalized_attention.DEFS),
    ),
    "gather and scatter": gather.DEFS,
    "matrix products": gemm.DEFS,
    "slicing and joining": index.DEFS,
    "layout (our own)": layout.DEFS,
    "packed weights (our own)": packed.DEFS,
    "normalization": norm.DEFS,
    "pooling": pool.DEFS,
    "reductions": reduce.DEFS,
    "resizing": resize.DEFS,
    "recurrent layers": rnn.DEFS,
    "shapes": shape.DEFS,
    "softmax": softmax.DEFS,
    "functions and activations": unary.DEFS,
    "attention": (*attention.DEFS, *linear_attention.DEFS),
    "quantization": quant.DEFS,
    "8-bit arithmetic (our own)": quantized.DEFS,
    "selecting and ordering": sort.DEFS,
    "sampling of tokens (our own)": sampling.DEFS,
    "detection and sampling": detect.DEFS,
    "collectives of several GPUs": collective.DEFS,
    "signals and transforms": signal.DEFS,
    "control flow": control.DEFS,
    "decision trees": trees.DEFS,
    "custom (the user's)": custom.DEFS,
    "support vectors (our own)": classic.DEFS,
    "regions of lowered programs (our own)": (
        *regions.DEFS,
        *conv_regions.DEFS,
        *norm_regions.DEFS,
        *pointwise_regions.DEFS,
        *product_regions.DEFS,
    ),
}
"""Family -> its kinds."""

_DEFS: tuple[OpDef, ...] = tuple(d for family in FAMILIES.values() for d in family)

OPDEFS: dict[str, OpDef] = {d.kind: d for d in _DEFS}
"""Kind -> definition."""

_COMPOSED: tuple[dict[str, FromOnnx], ...] = (
    contrib.IMPORTERS,
    experimental.IMPORTERS,
    leftovers.IMPORTERS,
    tensorrt.IMPORTERS,
    classic.IMPORTERS,
    classic.REFUSALS,
    sequences.IMPORTERS,
)

IMPORTERS: dict[str, FromOnnx] = {op_type: fn for d in _DEFS for op_type, fn in d.importers.items()}
for _more in _COMPOSED:
    IMPORTERS.update(_more)
"""ONNX operator ("Conv"; other domains as "com.microsoft.FusedMatMul") -> its import function."""

if len(OPDEFS) != len(_DEFS) or len(IMPORTERS) != sum(map(len, _COMPOSED)) + sum(len(d.importers) for d in _DEFS):
    raise AssertionError("an operator kind or ONNX operator is defined twice")
