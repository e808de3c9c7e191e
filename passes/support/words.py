"""Plain words for what each rule did: one clause per rule, for reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

RULES: Mapping[str, str] = {
    # folding and clean-up
    "dead": "operators that no output needs removed",
    "fold_constants": "operators on constants computed once",
    "optimize_bodies": "bodies of control flow optimized",
    "same_constant": "equal constants kept once",
    "same_op": "equal computations kept once",
    "no_op": "operators without effect removed",
    "idempotent": "repeated operators without further effect removed",
    "unused_indices": "unread indices of MaxPool left out",
    "unroll_loop": "Loops of known length unrolled",
    "unroll_scan": "Scans of known length unrolled",
    "known_branch": "Ifs with a known condition replaced by their branch",
    # arithmetic
    "constant_last": "operands put in order",
    "sum_is_add": "Sums written as additions",
    "reciprocal": "reciprocals merged with divisions",
    "negation": "negations merged with additions",
    "power": "powers written as products and roots",
    "bound_is_clip": "Max and Min by a number written as Clip",
    "merge_clips": "Relu and Clip in a row merged",
    "sub_is_add": "subtractions of constants written as additions",
    "div_is_mul": "divisions by constants written as products",
    "merge_constants": "constants of operators in a row merged",
    "scale_first": "scales moved before shifts",
    "hoist_scale": "scales moved into the weights of a matrix product",
    "gemm_scalars": "alpha and beta of Gemm moved into weights and bias",
    "select_is_where": "selections by a mask written as Where",
    # shapes and layout
    "constant_target": "computed shapes replaced by known ones",
    "input_target": "shapes of inner values taken from the inputs",
    "reshape_chain": "Reshapes in a row merged",
    "transpose_chain": "Transposes in a row merged",
    "transpose_is_reshape": "Transposes of axes of size 1 written as Reshape",
    "gemm_transpose": "Transposes merged into matrix products",
    "sink_transpose": "Transposes moved past other operators",
    "flatten_last": "Flattens merged into the matrix product behind them",
    "hoist_view": "Reshapes moved before matrix products",
    "add_before_reshape": "biases moved before Reshapes",
    "image_to_tokens": "conversions from images to tokens removed",
    "tokens_to_image": "conversions from tokens to images removed",
    "activate_image": "activations of tokens moved to the image",
    "patch_rows": "patch embeddings written as matrix products",
    "channels_last": "operators given channels last",
    "view": "changes of layout that move nothing",
    "convert": "changes of layout inserted",
    # convolutions
    "pad_conv": "Pads merged into convolutions",
    "pad_pool": "Pads merged into pools",
    "activation_before_pool": "activations moved before pools",
    "spatial_reduction": "reductions over images written as global pools",
    "conv3d_to_conv2d": "3-d convolutions written as 2-d ones",
    "transpose3d_to_transpose2d": "3-d transposed convolutions written as 2-d ones",
    "conv_bn": "BatchNormalizations folded into the convolution or product before them",
    "conv_scale_shift": "scales and shifts folded into the weights and bias before them",
    "bn_conv": "BatchNormalizations folded into the convolution or product behind them",
    "scale_shift_conv": "scales and shifts folded into the weights and bias behind them",
    "bn_scale_shift": "BatchNormalizations written as scale and shift",
    "scale_shift_bn": "scales and shifts written as one operator",
    # fusions
    "einsum_to_matmul": "Einsums written as matrix products",
    "gelu": "Gelus recognized",
    "gelu_tanh": "Gelus (by tanh) recognized",
    "swish": "Swishes recognized",
    "hard_sigmoid": "HardSigmoids recognized",
    "hard_swish": "HardSwishes recognized",
    "mish": "Mishes recognized",
    "softmax": "Softmaxes recognized",
    "log_softmax": "LogSoftmaxes recognized",
    "normalized_softmax": "normalizations of a Softmax's result left out",
    "layer_norm": "layer and instance normalizations recognized",
    "rms_norm": "RMS normalizations recognized",
    "group_norm": "group normalizations recognized",
    "attention": "attentions fused into one operator",
    "values_first": "attentions with values first put in the usual order",
    "rotary_embedding": "rotary embeddings recognized",
    "partial_rotary_embedding": "partial rotary embeddings recognized",
    "masked_rows": "operators on selected rows computed for all rows, and chosen by the mask",
    "l2_norm": "normalizations by the Euclidean norm recognized",
    "rotary_rows": "rotary embeddings extended to rows that do not turn",
    "siblings": "products of one operand merged into one",
    "pointwise": "pointwise operators fused into one kernel",
    "epilogue_add": "additions fused into the kernel before them",
    "epilogue_scale": "scales fused into the kernel before them",
    "epilogue_activation": "activations fused into the kernel before them",
    "prologue_scale_shift": "scales and shifts fused into the kernel behind them",
    "prologue_gate": "gates fused into the convolution behind them",
    # precision
    "cross_layer": "pairs of layers equalized for quantization",
    "smooth": "activations smoothed for quantization",
    "saturate": "values held inside the range of fp16",
    "cast": "conversions between precisions inserted",
    "int8": "operators quantized to int8",
    "fp8": "operators quantized to fp8",
    "requantize_same": "pairs of DequantizeLinear and QuantizeLinear removed",
    "qlinear_to_qdq": "QLinear operators written with Q and DQ",
    "on_integers": "operators moved onto the integers",
    "transpose_integers": "quantized weights transposed once",
    "recentre": "integers centered on zero",
    "quantized_product": "products computed on integers",
    "quantized_mean": "pools computed on integers",
    "quantize_stages": "QuantizeLinears fused with the operators before them",
    "dequantize_stages": "DequantizeLinears fused into one kernel",
}
"""Rule -> a clause in the plural."""


def in_words(rules: Iterable[str]) -> list[str]:
    """A line for each rule by its number of rewrites, the most frequent first: "53 × BatchNormalizations folded …".

    ``rules``: the name of the rule of each rewrite."""
    return [f"{n} × {RULES.get(rule, rule)}" for rule, n in Counter(rules).most_common()]
