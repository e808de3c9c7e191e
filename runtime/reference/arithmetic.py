"""The arithmetic of each kind that consists of matrix products, which tensor cores compute; and the kinds without arithmetic.

Both the operators' definitions and the measurements of a loaded engine use these functions. A multiply-add counts as two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

Shape: TypeAlias = Sequence[float]
Products: TypeAlias = Callable[[Sequence[Shape], Shape, Mapping[str, Any]], float]
"""``products(shapes of the operands, shape of result 0, attributes)``; an absent operand has the shape ()."""


def _conv(weights: int, per_result: int = 1) -> Products:
    """A convolution. ``weights``: their slot; ``per_result``: the number of results that the kernel computes per stored result."""
    return lambda shapes, out, attrs: 2 * per_result * math.prod(out) * math.prod(shapes[weights][1:])


def _quantized_conv(shapes: Sequence[Shape], out: Shape, attrs: Mapping[str, Any]) -> float:
    """Weights of six axes are channels in three axes (:func:`optdnn.runtime.reference.quantized.unpermuted`), then a filter."""
    weights = shapes[1]
    return 2 * math.prod(out) * math.prod(weights[3:] if len(weights) == 6 else weights[1:])


def _conv_sum(shapes: Sequence[Shape], out: Shape, attrs: Mapping[str, Any]) -> float:
    return 2 * math.prod(out) * (math.prod(shapes[1][1:]) + math.prod(shapes[3][1:]))


def _paired_conv(shapes: Sequence[Shape], out: Shape, attrs: Mapping[str, Any]) -> float:
    return 4 * math.prod(out) * sum(math.prod(shape[2:]) for shape in (shapes[1], *shapes[6::3]))


def _separable_conv(shapes: Sequence[Shape], out: Shape, attrs: Mapping[str, Any]) -> float:
    """Without the first part, which is small and, if it is depthwise, not a matrix product."""
    return 2 * math.prod(out) * math.prod(shapes[attrs["operands"]][1:])


def _chained_conv(shapes: Sequence[Shape], out: Shape, attrs: Mapping[str, Any]) -> float:
    """Two convolutions of the same pixels."""
    return 2 * out[0] * math.prod(out[2:]) * (math.prod(shapes[1]) + math.prod(shapes[attrs["operands"]]))


def _chained_quantized(shapes: Sequence[Shape], out: Shape, attrs: Mapping[str, Any]) -> float:
    """Like :func:`_chained_conv`, with weights whose channels are viewed as three axes."""
    middle, channels = shapes[2][0], shapes[attrs["operands"] + 1][0]
    return float(2 * out[0] * math.prod(out[2:]) * middle * (shapes[0][1] + channels))


def _conv_transpose(shapes: Sequence[Shape], out: Shape, attrs: Mapping[str, Any]) -> float:
    return 2 * math.prod(shapes[0]) * math.prod(shapes[1][1:])


def _matmul(shapes: Sequence[Shape], out: Shape, attrs: Mapping[str, Any]) -> float:
    return 2 * math.prod(out) * (shapes[0][-1] if shapes[0] else 1)


def _paired_product(shapes: Sequence[Shape], out: Shape, attrs: Mapping[str, Any]) -> float:
    return 2 * _matmul(shapes, out, attrs)


def _row_product(shapes: Sequence[Shape], out: Shape, attrs: Mapping[str, Any]) -> float:
    return _matmul(shapes, out, attrs) * (2 if len(shapes) > 4 and shapes[4] else 1)


def _packed_row_product(shapes: Sequence[Shape], out: Shape, attrs: Mapping[str, Any]) -> float:
    return _matmul(shapes, out, attrs) * (2 if len(shapes) > 6 and shapes[6] else 1)


def _gemm(shapes: Sequence[Shape], out: Shape, attrs: Mapping[str, Any]) -> float:
    return 2 * math.prod(out) * shapes[0][0 if attrs.get("transA") else 1]


def _attention(shapes: Sequence[Shape], out: Shape, attrs: Mapping[str, Any]) -> float:
    """Query times keys, then probabilities times values."""
    (batch, heads, rows, size), keys, width = shapes[0], shapes[1][2], shapes[2][3]
    if len(shapes) > 4 and shapes[4]:
        keys += shapes[4][2]
    return 2 * batch * heads * rows * keys * (size + width)


def _between_channels(shape: Shape) -> float:
    """A matrix of channels times channels and tokens."""
    batch, heads, channels, tokens = shape
    return 2 * batch * heads * channels * channels * tokens


def _linear_attention(shapes: Sequence[Shape], out: Shape, attrs: Mapping[str, Any]) -> float:
    """A matrix of features for the keys and values, times the queries."""
    (batch, heads, rows, size), keys, width = shapes[0], shapes[1][2], shapes[2][3]
    return 2 * batch * heads * (rows + keys) * size * width


def _cached_attention(shapes: Sequence[Shape], out: Shape, attrs: Mapping[str, Any]) -> float:
    return _attention((shapes[0], *shapes[7:9]), out, attrs)


def _recurrent_layer(shapes: Sequence[Shape], out: Shape, attrs: Mapping[str, Any]) -> float:
    length, batch = shapes[0][:2]
    return 2 * length * batch * sum(math.prod(w) for w in shapes[1:3] if w)


def _recurrence(shapes: Sequence[Shape], out: Shape, attrs: Mapping[str, Any]) -> float:
    length, batch = shapes[0][:2]
    return 2 * length * batch * math.prod(shapes[1])


def _stacked_rnn(shapes: Sequence[Shape], out: Shape, attrs: Mapping[str, Any]) -> float:
    length, batch, inputs = shapes[0]
    hidden: int = attrs["hidden"]
    layers: int = attrs["layers"]
    rows = hidden * {"GRU": 3, "LSTM": 4}[attrs["cell"]]
    return 2 * length * batch * rows * (inputs + hidden + (layers - 1) * 2 * hidden)


def _quantized(shapes: Sequence[Shape], out: Shape, attrs: Mapping[str, Any]) -> float:
    return products_of(attrs["of"], shapes, out, attrs)


def _normed_product(shapes: Sequence[Shape], out: Shape, attrs: Mapping[str, Any]) -> float:
    return 2 * math.prod(out) * shapes[0][1] * (2 if len(shapes) > 5 else 1)


PRODUCTS: dict[str, Products] = {
    "Attention": _attention,
    "CachedAttention": _cached_attention,
    "ChainedConv": _chained_conv,
    "ChainedQuantized": _chained_quantized,
    "ChannelAttention": _attention,
    "ChannelResults": lambda shapes, out, attrs: _between_channels(shapes[1]),
    "ChannelSums": lambda shapes, out, attrs: _between_channels(shapes[0]),
    "Conv": _conv(1),
    "ConvBlocks": _conv(1),
    "ConvInteger": _conv(1),
    "ConvSqueeze": _quantized_conv,
    "ConvSum": _conv_sum,
    "ConvTranspose": _conv_transpose,
    "EdgePadded": _quantized,
    "ExcitationGate": _separable_conv,
    "FactoredAttention": _attention,
    "GRU": _recurrent_layer,
    "Gemm": _gemm,
    "ImageConv": _conv(1),
    "LSTM": _recurrent_layer,
    "LinearResults": lambda shapes, out, attrs: _between_channels((*shapes[1][:2], *shapes[1][:1:-1])),
    "LinearSums": lambda shapes, out, attrs: _between_channels((*shapes[0][:2], *shapes[0][:1:-1])),
    "MatMul": _matmul,
    "MatMulInteger": _matmul,
    "MeanProduct": _conv(1),
    "NormedProduct": _normed_product,
    "NormalizedLinearAttention": _linear_attention,
    "NormedResidual": lambda shapes, out, attrs: 2 * math.prod(out) * shapes[0][1],
    "PackedRowProduct": _packed_row_product,
    "PairedConv": _paired_conv,
    "PairedProduct": _paired_product,
    "PackedMatMul": _matmul,
    "PeriodicAttention": _attention,
    "PooledConv": _conv(1, per_result=4),
    "PooledImageConv": _conv(1, per_result=4),
    "QLinearConv": _conv(3),
    "QLinearMatMul": _matmul,
    "Narrowed": _quantized,
    "Quantized": _quantized,
    "QuantizedConv": _quantized_conv,
    "QuantizedMatMul": _matmul,
    "RNN": _recurrent_layer,
    "RoundedAttention": _attention,
    "Recurrence": _recurrence,
    "RowMoments": _quantized,
    "RowProduct": _row_product,
    "SelectedProduct": _matmul,
    "SeparableConv": _separable_conv,
    "StackedRNN": _stacked_rnn,
    "TiledPackedMatMul": _matmul,
    "TurnedHeads": lambda shapes, out, attrs: products_of(attrs["of"], shapes[:-1], out, attrs),
    "WeightsInParts": lambda shapes, out, attrs: products_of(
        attrs["of"], shapes[: len(shapes) - (3 if attrs["scaled"] else 2) * len(attrs["at"])], out, attrs
    ),
}


def products_of(kind: str, shapes: Sequence[Shape], out: Shape, attrs: Mapping[str, Any]) -> float:
    """Operations of an operator's matrix products; 0 for other kinds."""
    return PRODUCTS[kind](shapes, out, attrs) if kind in PRODUCTS else 0


MOVES = frozenset({
    *("BlocksToSpace", "Copies", "Copy", "Frames", "Gather", "GatherElements", "GatherND", "Pad", "SpaceToDepthImage", "Zeros"),
})  # fmt: skip
"""Kinds of launches that compute nothing."""
