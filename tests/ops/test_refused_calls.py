"""Operands and attributes that no shape function, and no importer, takes: each with its reason."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from contribnode import one
from known import infer
from onenode import normal

from optdnn.errors import OptdnnError, ShapeError
from optdnn.importers.onnx import import_model
from optdnn.ir.evaluate import evaluate
from optdnn.ops.attention import AttentionAttrs
from optdnn.ops.base import Attrs
from optdnn.ops.collective import AllGatherAttrs
from optdnn.ops.conv import ConvAttrs
from optdnn.ops.linear_attention import LinearAttentionAttrs
from optdnn.ops.packed_layout import PackedMatMulAttrs
from optdnn.ops.pool import LpPoolAttrs, MaxPoolAttrs
from optdnn.ops.quant import QuantizeAttrs
from optdnn.ops.quantized import QuantizedConvAttrs
from optdnn.ops.trees import TreeEnsembleAttrs
from optdnn.types import FP32, INT8, INT32, UINT8, tensor

HEADS = tensor(FP32, 1, 2, 3, 4)
BYTES = PackedMatMulAttrs("uint4", 32, 32)
PACKED = (tensor(UINT8, 8, 16), tensor(FP32, 8, 1))
ATTENTION, LINEAR = (
    AttentionAttrs(),
    LinearAttentionAttrs(q_num_heads=1, kv_num_heads=1, scale=1.0, update_rule="linear"),
)
ROWS = tensor(FP32, 1, 3, 4)

CALLS: dict[str, tuple[str, list[Any], Attrs | None, int]] = {
    "it must be floating-point": ("Attention", [tensor(INT32, 1, 2, 3, 4)] * 3, ATTENTION, 1),
    "attn_mask is .*; it must have 1 to 4 dimensions": (
        "Attention",
        [HEADS] * 3 + [tensor(FP32, 1, 1, 1, 3, 3)],
        ATTENTION,
        1,
    ),
    "weights .* must have at least 3 dimensions": ("Conv", [HEADS, tensor(FP32, 3, 2)], ConvAttrs((), (), ()), 1),
    "GridSample of": ("GridSample", [tensor(FP32, 1, 2), tensor(FP32, 1, 2)], None, 1),
    "AffineGrid theta is": ("AffineGrid", [tensor(INT32, 1, 2, 3), tensor(INT32, 4)], None, 1),
    "gives 3 parts, and has 2 outputs": ("Split", [tensor(FP32, 6), np.array([2, 2, 2])], None, 2),
    "LinearAttention past_state of": ("LinearAttention", [ROWS, ROWS, ROWS, tensor(INT32, 1, 1, 4, 4)], LINEAR, 1),
    "has K=0 and block_rows=1; both must be positive": (
        "PackedMatMul",
        [ROWS, *PACKED],
        PackedMatMulAttrs("uint4", 0, 32),
        1,
    ),
    "PackedMatMul of .*; it must be floating-point": ("PackedMatMul", [tensor(INT32, 3, 32), *PACKED], BYTES, 1),
    "PackedMatMul of a scalar": ("PackedMatMul", [tensor(FP32), *PACKED], BYTES, 1),
    "has the norm 0": ("LpPool", [HEADS], LpPoolAttrs((2, 2), (1, 1), (0,) * 4, (1, 1), p=0), 1),
    "has a window of": ("MaxPool", [HEADS], MaxPoolAttrs((1 << 12, 1 << 12), (1, 1), (0,) * 4, (1, 1)), 1),
    "axis 4 is out of range": ("QuantizeLinear", [HEADS, tensor(FP32, 2)], QuantizeAttrs(UINT8, axis=4), 1),
    "zero point is .*, its output": (
        "QuantizeLinear",
        [HEADS, tensor(FP32), tensor(INT8)],
        QuantizeAttrs(output_dtype=UINT8),
        1,
    ),
    "both must be of 8 bits": ("QuantizedConv", [HEADS, HEADS, ROWS], QuantizedConvAttrs(), 1),
    "it must have 2 or 3 dimensions": ("STFT", [tensor(FP32, 8), np.array(2)], None, 1),
    "it must have at least 2 dimensions": ("Det", [tensor(FP32, 8)], None, 1),
    "takes a matrix of features": ("TreeEnsemble", [tensor(FP32, 8)] * 12, TreeEnsembleAttrs(), 1),
    "AllGather along axis 4": ("AllGather", [HEADS], AllGatherAttrs(2, 4), 1),
}


@pytest.mark.parametrize("because", CALLS)
def test_operands_that_no_shape_function_takes(because: str) -> None:
    kind, operands, attrs, outputs = CALLS[because]
    with pytest.raises(ShapeError, match=because):
        infer(kind, *operands, attrs=attrs, outputs=outputs)


X = normal(1, 2, 8)
Q = normal(1, 2, 2, 4)
IDS = np.zeros((1, 2), np.int64)
CACHE = normal(5, 2)
PLACES = [np.zeros(1, np.int32), np.array([2], np.int32)]
GROUPS = {"num_heads": 2, "kv_num_heads": 2}
ROUTED, W1, W2 = normal(3, 4), normal(2, 6, 4), normal(2, 4, 6)
LOGITS = normal(3, 2)
NBITS = [normal(2, 32), np.zeros((8, 1, 16), np.uint8), normal(8)]
SIZES = {"K": 32, "N": 8, "block_size": 32}

MICROSOFT: dict[str, tuple[str, list[Any], dict[str, Any]]] = {
    "the output qk": ("MultiHeadAttention", [X, X, X], {"num_heads": 2, "n": 4}),
    "bias with packed query, key and value": ("MultiHeadAttention", [normal(1, 2, 2, 3, 4), None, None, X[0, 0]], {"num_heads": 2}),
    "3 packed tensors are due": ("MultiHeadAttention", [normal(1, 2, 2, 2, 4)], {"num_heads": 2}),
    "a query": ("MultiHeadAttention", [Q, Q, Q], {"num_heads": 2}),
    "past_sequence_length and cache": ("MultiHeadAttention", [X, X, X, *[None] * 5, PLACES[1]], {"num_heads": 2}),
    "scale=2.0": ("RotaryEmbedding", [X, IDS, CACHE, CACHE], {"scale": 2.0}),
    "RotaryEmbedding needs num_heads": ("RotaryEmbedding", [X, IDS, CACHE, CACHE], {"rotary_embedding_dim": 4}),
    "the operand attention_bias": (
        "GroupQueryAttention", [X, X, X, None, None, *PLACES, None, None, None, X], {**GROUPS},
    ),
    "needs cos_cache and sin_cache": ("GroupQueryAttention", [X, X, X, None, None, *PLACES], {**GROUPS, "do_rotary": 1}),
    "q_norm_weight without k_norm_weight": (
        "GroupQueryAttention", [X, X, X, None, None, *PLACES, *[None] * 7, X[0, 0, :4]], {**GROUPS},
    ),
    "a key without a value": ("GroupQueryAttention", [X, X, None, None, None, *PLACES], {**GROUPS}),
    "do not fit biases": ("MoE", [ROUTED, LOGITS, W1, normal(2, 5), W2], {"k": 1}),
    "a swiglu that is not fused needs layer 3": ("MoE", [ROUTED, LOGITS, W1, None, W2], {"k": 1, "activation_type": "swiglu"}),
    "swiglu_fusion=3": ("MoE", [ROUTED, LOGITS, W1, None, W2], {"k": 1, "activation_type": "swiglu", "swiglu_fusion": 3}),
    "does not hold the two halves": (
        "MoE", [ROUTED, LOGITS, W1[:, :5], None, W2], {"k": 1, "activation_type": "swiglu", "swiglu_fusion": 1},
    ),
    "weights of experts that are not constant": ("MoE", [ROUTED, LOGITS, W1, None, W2], {"k": 1, "fed": 3}),
    "needs the weights of layers 1 and 2": ("MoE", [ROUTED, LOGITS, None, None, W2], {"k": 1}),
    "K=0 and N=8; both must be positive": ("MatMulNBits", NBITS, {**SIZES, "K": 0}),
    "packed weights are uint8": ("MatMulNBits", [NBITS[0], normal(8, 1, 16), NBITS[2]], SIZES),
    "zero points that are not constant": ("MatMulNBits", [NBITS[0], *NBITS[1:], np.zeros(8, np.uint8)], {**SIZES, "fed": 4}),
    "the operand g_idx, which is computed": ("MatMulNBits", [*NBITS, None, np.zeros(32, np.int32)], {**SIZES, "fed": 5}),
    "an input of 2 dimensions": ("CausalConvWithState", [X[0], normal(2, 1, 3)], {"n": 2}),
    "MRotaryEmbedding needs num_heads": (
        "MRotaryEmbedding", [X[:, :, :3], np.zeros((3, 1, 2), np.int64), CACHE, CACHE], {"mrope_section": [1, 1, 0]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("because", MICROSOFT)
def test_nodes_of_microsoft_that_no_importer_takes(because: str) -> None:
    op, operands, attrs = MICROSOFT[because]
    with pytest.raises(OptdnnError, match=because):
        import_model(one(op, operands, **attrs)[0])


LEARNED: dict[str, tuple[str, list[Any], dict[str, Any]]] = {
    "LinearRegressor takes rows of features": ("LinearRegressor", [X], {"coefficients": [1.0] * 8}),
    "3 coefficients do not fit 2 outputs": ("LinearRegressor", [X[0]], {"coefficients": [1.0] * 3, "targets": 2}),
    "3 scores for 2 labels": (
        "LinearClassifier", [X[0]], {"coefficients": [1.0] * 24, "intercepts": [0.0] * 3, "classlabels_ints": [1, 2]},
    ),
    "inputdimensions says 3 columns": ("FeatureVectorizer", [X[0]], {"inputdimensions": [3]}),
    "norm=L3": ("Normalizer", [X[0]], {"norm": "L3"}),
    "Imputer has no values": ("Imputer", [X[0]], {"replaced_value_float": 1.0}),
    "2 keys for 1 values": ("LabelEncoder", [X[0]], {"keys_floats": [1.0, 2.0], "values_floats": [1.0]}),
    "its keys are int64": ("LabelEncoder", [X[0]], {"keys_int64s": [1], "values_floats": [1.0]}),
    "labels that are text": ("LabelEncoder", [X[0]], {"values_floats": [1.0]}),
    "categories that are text": ("OneHotEncoder", [X[0]], {"cats_strings": ["a"]}),
    "kernel_type=COSINE": (
        "SVMRegressor", [X[0]],
        {"coefficients": [1.0], "rho": [0.0], "support_vectors": [1.0] * 8, "n_supports": 1, "kernel_type": "COSINE"},
    ),
}  # fmt: skip


def learned(op: str, operands: list[Any], **attrs: Any) -> tuple[onnx.ModelProto, dict[str, Any]]:
    """A model of one node of ai.onnx.ml, and its feeds."""
    model, feeds = one(op, operands, domain="ai.onnx.ml", **attrs)
    model.opset_import.append(onnx.helper.make_opsetid("ai.onnx.ml", 2))
    return model, feeds


@pytest.mark.parametrize("because", LEARNED)
def test_nodes_of_classic_learning_that_no_importer_takes(because: str) -> None:
    op, operands, attrs = LEARNED[because]
    with pytest.raises(OptdnnError, match=because):
        import_model(learned(op, operands, **attrs)[0])


def test_features_in_one_row() -> None:
    operands = [normal(3, 4), np.arange(3)]
    model, feeds = learned("FeatureVectorizer", operands, fed=2, inputdimensions=[4, 1])
    (y,) = evaluate(import_model(model), feeds).values()
    assert np.array_equal(y, np.column_stack(operands).astype(np.float32))
