"""Operators of PyTorch that torch.export's translator to ONNX would write inefficiently, or wrongly.

It unrolls the steps of plain recurrent layers. It gives a Conv3d without a bias a bias of shape [C, 2], which only its own
optimizer removes again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


def translations(torch: Any) -> dict[Any, Callable[..., Any]]:
    """For ``custom_translation_table`` of ``torch.onnx.export``: operator of PyTorch -> function that writes it with onnxscript."""
    aten = torch.ops.aten
    return {aten.rnn_relu.input: _rnn_relu, aten.rnn_tanh.input: _rnn_tanh, aten.conv3d.default: _conv3d}


def _conv3d(
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: Sequence[int] = (1, 1, 1),
    padding: Sequence[int] = (0, 0, 0),
    dilation: Sequence[int] = (1, 1, 1),
    groups: int = 1,
) -> Any:
    from onnxscript import opset18 as op  # type: ignore[import-not-found, unused-ignore]

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
    from onnxscript import opset18 as op  # type: ignore[import-not-found, unused-ignore]

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
