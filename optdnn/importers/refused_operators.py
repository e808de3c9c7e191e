"""Why operators of other tools are refused, and what to do instead."""

from __future__ import annotations

_QONNX = (
    "it is QONNX's own operator, of any number of bits: export with Brevitas' export_onnx_qcdq, which writes QuantizeLinear, Clip "
    "and DequantizeLinear, or convert the file with qonnx.transformation.qonnx_to_qcdq.QuantToQCDQ"
)
_QUARK = (
    "it is AMD Quark's own operator, for formats that ONNX does not quantize to (BFP16, MX, 16-bit floats): choose a configuration "
    "with QuantizeLinear (XINT8, A8W8, A16W8, INT8_TRANSFORMER_DEFAULT), or build the model that is not quantized in bf16 or fp16"
)
_TENSORRT = (
    "it is TensorRT's own operator: of these, optdnn imports QuantizeLinear and DequantizeLinear to fp8, int8 and int4; NVFP4 and "
    "MXFP8 find scales at run time: quantize to fp8 or int8 instead (FP8_DEFAULT_CFG or INT8_DEFAULT_CFG of ModelOpt)"
)
_GENERATES = (
    "the loop that generates text is inside of the operator: export the decoder itself, and generate with optdnn.Generator "
    "(docs/guide/generation.md)"
)
_PACKED_ROWS = (
    "it is for rows without padding (ONNX Runtime's packing mode), whose number depends on the data: give the model from before "
    "convert_to_packing_mode; its mask may mark the padding"
)
_ORDERED = (
    "its integers are in an order of cuBLASLt: quantize the model with QuantizeLinear and DequantizeLinear "
    "(quantize_static of ONNX Runtime, QuantFormat.QDQ)"
)
UNKNOWN_CUSTOM = "the custom operator is unknown"
REFUSED_DOMAINS = {
    "com.microsoft.nchwc": "ONNX Runtime wrote the file for its own kernels of this CPU: give the model that it optimized, or save "
    "with ORT_ENABLE_EXTENDED",
    **dict.fromkeys(("qonnx.custom_op.general", "finn.custom_op.general", "onnx.brevitas"), _QONNX),
    "com.amd.quark": _QUARK,
    "trt": _TENSORRT,
    "ai.onnx.contrib": "it is an operator of onnxruntime-extensions, which read text, sound and picture files: do that before the "
    "network, and build the part that computes tensors",
}
"""Domain -> why its operators are refused, and what to do."""
REFUSED_OPERATORS = {
    **dict.fromkeys(("BeamSearch", "GreedySearch", "Sampling", "WhisperBeamSearch"), _GENERATES),
    **dict.fromkeys(("PackedAttention", "PackedMultiHeadAttention", "RemovePadding", "RestorePadding"), _PACKED_ROWS),
    **dict.fromkeys(
        (
            "QOrderedAttention",
            "QOrderedGelu",
            "QOrderedLayerNormalization",
            "QOrderedLongformerAttention",
            "QOrderedMatMul",
        ),
        _ORDERED,
    ),
    "EPContext": "it holds a network that another execution provider has compiled: give the model from before "
    "(ep.context_enable=0)",
    "Tokenizer": "text is not computed: run the tokenizer before the network",
}
"""Operator of ONNX Runtime's domain -> why it is refused, and what to do."""


def why_unknown(domain: str, kind: str) -> str:
    """Why an operator that optdnn does not know is refused."""
    named = REFUSED_OPERATORS.get(kind) if domain == "com.microsoft" else None
    return named or REFUSED_DOMAINS.get(domain, UNKNOWN_CUSTOM)
