"""Operators of PyTorch that torch.export's translator to ONNX does not have, or would write inefficiently or wrongly.

It has no adaptive max pooling (CBAM), no test of all elements, and no products of all elements up to each one (NeRF). It unrolls
the steps of plain recurrent layers. It gives a Conv3d without a bias a bias of shape [C, 2], which only its own optimizer removes
again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

INT32, INT64, BOOL = 6, 7, 9
"""Types of ONNX."""


def translations(torch: Any) -> dict[Any, Callable[..., Any]]:
    """For ``custom_translation_table`` of ``torch.onnx.export``: operator of PyTorch -> function that writes it with onnxscript."""
    aten = torch.ops.aten
    return {
        aten.rnn_relu.input: _rnn_relu,
        aten.rnn_tanh.input: _rnn_tanh,
        aten.conv3d.default: _conv3d,
        aten.adaptive_max_pool2d.default: _adaptive_max_pool,
        aten.adaptive_max_pool3d.default: _adaptive_max_pool,
        aten._is_all_true.default: _is_all_true,
        aten.cumprod.default: _cumprod,
    }


def _opset() -> Any:
    """ONNX's operators as functions. onnxscript is imported only for an export."""
    from onnxscript import opset18  # type: ignore[import-not-found, unused-ignore]

    return opset18


def _adaptive_max_pool(x: Any, output_size: Sequence[int]) -> tuple[Any, Any]:
    """The largest elements of windows of equal sizes, and their indices in their image. ``x``: (N, C, sizes) or (C, sizes)."""
    op = _opset()

    axes = range(-len(output_size), 0)
    sizes, lead = [x.shape[a] for a in axes], len(x.shape) - len(output_size)
    if all(out == 1 for out in output_size):
        largest = op.ArgMax(op.Reshape(x, [0] * lead + [-1]), axis=-1, keepdims=1)
        return op.ReduceMax(x, list(axes), keepdims=1), op.Unsqueeze(largest, list(axes)[1:])
    if not all(isinstance(n, int) and n % out == 0 for n, out in zip(sizes, output_size, strict=True)):
        raise ValueError(f"adaptive max pooling of {sizes} to {list(output_size)} has windows of different sizes")
    window = [n // out for n, out in zip(sizes, output_size, strict=True)]
    y, indices = op.MaxPool(x if lead == 2 else op.Unsqueeze(x, [0]), kernel_shape=window, strides=window)
    indices = op.Mod(indices, math.prod(sizes))  # ONNX counts through all images
    return (y, indices) if lead == 2 else (op.Squeeze(y, [0]), op.Squeeze(indices, [0]))


def _is_all_true(x: Any) -> Any:
    op = _opset()

    return op.Cast(op.ReduceMin(op.Cast(x, to=INT32), keepdims=0), to=BOOL)


def _cumprod(x: Any, dim: int, dtype: int = -1) -> Any:
    """The products of all elements up to each one, along an axis of known size. Each step multiplies twice as many elements."""
    op = _opset()

    count = x.shape[dim] if len(x.shape) else 1
    if not isinstance(count, int):
        raise ValueError(f"a cumulative product along axis {dim} of {x.shape} needs an axis of known size")
    if dtype != -1:
        x = op.Cast(x, to=dtype)
    elif not x.dtype.is_floating_point():
        x = op.Cast(x, to=INT64)
    one, reach = op.CastLike(1.0, x), 1
    while reach < count:
        x, reach = op.Mul(x, op.Pad(x, [reach, -reach], one, [dim])), 2 * reach
    return x


def _conv3d(
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: Sequence[int] = (1, 1, 1),
    padding: Sequence[int] = (0, 0, 0),
    dilation: Sequence[int] = (1, 1, 1),
    groups: int = 1,
) -> Any:
    op = _opset()

    strides, pads, dilations = (list(v) * (3 // len(v)) for v in (stride, padding, dilation))
    return op.Conv(x, weight, bias, strides=strides, pads=pads * 2, dilations=dilations, group=groups)


def _rnn_relu(*operands: Any) -> tuple[Any, Any]:
    return _rnn("Relu", *operands)


def _rnn_tanh(*operands: Any) -> tuple[Any, Any]:
    return _rnn("Tanh", *operands)


def _rnn(
    activation: str,
    x: Any,
    hx: Any,
    params: Sequence[Any],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Any, Any]:
    """The layers of a ``torch.nn.RNN``, each an operator RNN. ``params``: W_ih, W_hh and their biases by layer and direction."""
    op = _opset()

    count, each = (2 if bidirectional else 1), (4 if has_biases else 2)
    hidden = params[1].shape[1]
    if batch_first:
        x = op.Transpose(x, perm=[1, 0, 2])
    finals = []
    for layer in range(num_layers):
        own = [params[(layer * count + d) * each :][:each] for d in range(count)]
        w, r = (_joined(op, [op.Unsqueeze(p[k], [0]) for p in own]) for k in range(2))
        biases = [op.Unsqueeze(op.Concat(p[2], p[3], axis=0), [0]) for p in own] if has_biases else []
        initial = op.Slice(hx, [layer * count], [(layer + 1) * count], [0])
        y, last = op.RNN(
            x, w, r, _joined(op, biases) if biases else None, None, initial, activations=[activation] * count,
            direction="bidirectional" if bidirectional else "forward", hidden_size=hidden,
        )  # fmt: skip
        finals.append(last)
        x = op.Reshape(op.Transpose(y, perm=[0, 2, 1, 3]), [0, 0, count * hidden])
    if batch_first:
        x = op.Transpose(x, perm=[1, 0, 2])
    return x, _joined(op, finals)


def _joined(op: Any, parts: Sequence[Any]) -> Any:
    """One tensor, along its first axis."""
    return parts[0] if len(parts) == 1 else op.Concat(*parts, axis=0)
