"""Operators of TensorRT's domain that NVIDIA ModelOpt writes for quantized networks, as ONNX's own.

Those that find the scales of blocks at run time (NVFP4, MXFP8) are refused with the other operators of the domain.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from onnx import TensorProto

from optdnn.ops.checks import needs
from optdnn.ops.exchange import Emit, FromOnnx, NodeSpec, Ref
from optdnn.ops.restate import as_standard, standard

DOMAIN = "trt."


def _to_fp8(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    """x and scale to fp8 (E4M3); a zero point, which is always 0, may be missing."""
    inputs = tuple(needs(node, 0, 1))
    return as_standard(
        "QuantizeLinear", node, e, inputs=inputs, attrs={"output_dtype": np.int64(TensorProto.FLOAT8E4M3FN)}
    )


IMPORTERS: dict[str, FromOnnx] = {
    **{DOMAIN + name: standard(name) for name in ("QuantizeLinear", "DequantizeLinear")},
    DOMAIN + "TRT_FP8QuantizeLinear": _to_fp8,
    DOMAIN + "TRT_FP8DequantizeLinear": standard("DequantizeLinear"),
    DOMAIN + "TRT_INT4DequantizeLinear": standard("DequantizeLinear"),
}
