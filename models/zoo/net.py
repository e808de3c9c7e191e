"""The layers of torchvision's modules: how the weights of each are drawn, and its effect on the probe.

Weights follow He et al., "Delving Deep into Rectifiers", 2015 (before a ReLU) or Glorot & Bengio, 2010 (elsewhere).
Running statistics of BatchNormalization lie near those of the probe (:mod:`optdnn.models.zoo.probe`) but not on them;
scales and shifts vary from channel to channel. Biases take out the probe's mean, as trained ones do: else a deep
plain network maps every input to nearly the same output.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from optdnn.errors import UsageError
from optdnn.models.zoo import probe
from optdnn.models.zoo.builder import Dims, GraphBuilder, Init, Label, Value
from optdnn.types import Array

Pair = int | tuple[int, int]

HE = 2.0
"""Gain before a ReLU: half of the second moment is cut."""

# Scales of BatchNormalization, lowest and highest.
PLAIN = (0.7, 1.3)
# At the end of a residual branch. If branches are as strong as the path that they are added to, a random network of fifty
# layers is chaotic: one picture's activations outgrow the next one's tenfold. (Goyal et al., "Accurate, Large Minibatch
# SGD", 2017, start these scales from zero for this reason.)
BRANCH = (0.2, 0.6)
# Before SiLU. Below about 2, it amplifies large signals by more than small ones, so fifty layers of it are chaotic, too.
BEFORE_SILU = (1.5, 3.0)


def pair(value: Pair) -> tuple[int, int]:
    return value if isinstance(value, tuple) else (value, value)


def normal(std: float) -> Init:
    """Independent normal weights, drawn in float32."""
    return lambda rng, shape: rng.standard_normal(shape, dtype=np.float32) * np.float32(std)


def centered(std: float) -> Init:
    """Normal weights, each output's with a sum of zero where it has 16 input channels or more.

    Inputs past an activation are mostly positive. A filter whose sum is not zero turns their common mean into an offset.
    Running statistics remove it only for the average picture, so from layer to layer pictures drift apart in scale.
    (Qiao et al., "Weight Standardization", 2019, center trained filters, too.)
    """

    def init(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
        weight = normal(std)(rng, shape)
        axes = tuple(range(1, len(shape)))
        return weight - weight.mean(axes, keepdims=True) if shape[1] >= 16 else weight

    return init


def uniform(low: float, high: float) -> Init:
    return lambda rng, shape: rng.uniform(low, high, shape)


def on_probe(function: Callable[..., Any], *values: Value) -> Array | None:
    """``function`` of the probes of the values; None if one has no probe."""
    probes = [v.probe for v in values if v.probe is not None]
    return np.asarray(function(*probes)) if len(probes) == len(values) else None


def is_small(x: Value) -> bool:
    """Whether the probe's maps are smaller than the real ones."""
    return x.probe is not None and x.probe.shape[2] < x.extent(2)


def window(
    extent: int | str, kernel: int, stride: int, padding: int, dilation: int = 1, ceil: bool = False
) -> int | str:
    """Output extent of a sliding window (ONNX Conv-11, MaxPool-12); a symbolic extent may only be kept or cut by the
    stride."""
    if isinstance(extent, str):
        raise UsageError(f"the extent {extent} of a picture must be a number")
    span = extent + 2 * padding - dilation * (kernel - 1) - 1
    if span < 0:
        raise UsageError(
            f"a window of {kernel} does not fit into an extent of {extent}", hint="take a larger image size"
        )
    out = (-(-span // stride) if ceil else span // stride) + 1
    # In ceil mode a last window that would lie entirely in the padding is dropped, as the exporter's framework does.
    return out - 1 if ceil and (out - 1) * stride >= extent + padding else out


class Net(GraphBuilder):
    """A :class:`GraphBuilder` with layers. ``name`` of each is its module's label, None for a functional call."""

    # -- convolutions and matrix products ----------------------------------------------------------------------------

    def conv(
        self, x: Value, channels: int, kernel: Pair, *, stride: int = 1, padding: Pair = 0, groups: int = 1, dilation: int = 1,
        bias: bool = False, gain: float = HE, spread: float | None = None, name: Label | None,
    ) -> Value:  # fmt: skip
        """2-d convolution, NCHW, weight (channels, in / groups, kh, kw), normal with variance gain / fan-in.

        ``spread``, where given, is the standard deviation that the outputs shall have on the probe.
        """
        (kh, kw), (ph, pw) = pair(kernel), pair(padding)
        inside = x.channels // groups
        spatial = (window(x.shape[2], kh, stride, ph, dilation), window(x.shape[3], kw, stride, pw, dilation))

        def function(p: Array, weight: Array) -> Array:
            return probe.conv(p, weight, stride, (ph, pw), groups, dilation, small=is_small(x))

        with self.scope(name):
            w, y = self._weight((channels, inside, kh, kw), gain / (inside * kh * kw), function, x, spread)
            inputs: list[Value | str] = [x, w]
            if bias:
                b, y = self._bias(channels, y)
                inputs.append(b)
            return self.node(
                "Conv", inputs, (x.shape[0], channels, *spatial), probe=y, dilations=[dilation] * 2, group=groups,
                kernel_shape=[kh, kw], pads=[ph, pw, ph, pw], strides=[stride] * 2,
            )  # fmt: skip

    def conv_transpose(self, x: Value, channels: int, kernel: int, *, stride: int, name: Label | None) -> Value:
        """Transposed convolution without overlap between windows (``kernel == stride``), with a bias."""
        if kernel != stride:
            raise UsageError(f"conv_transpose needs kernel == stride, not {kernel} and {stride}")
        with self.scope(name):
            w, y = self._weight((x.channels, channels, kernel, kernel), 1.0 / x.channels, probe.conv_transpose, x)
            b, y = self._bias(channels, y)
            shape = (x.shape[0], channels, x.extent(2) * stride, x.extent(3) * stride)
            return self.node(
                "ConvTranspose", [x, w, b], shape, probe=y, dilations=[1, 1], group=1, kernel_shape=[kernel] * 2,
                pads=[0] * 4, strides=[stride] * 2,
            )  # fmt: skip

    def linear(
        self, x: Value, features: int, *, gain: float = 1.0, spread: float | None = None, name: Label | None
    ) -> Value:
        """Gemm with transB on (batch, in), weight (features, in) normal with variance gain / in; ``spread`` as in
        :meth:`conv`."""
        with self.scope(name):
            w, y = self._weight((features, x.channels), gain / x.channels, probe.linear, x, spread)
            b, y = self._bias(features, y)
            return self.node("Gemm", [x, w, b], (x.shape[0], features), probe=y, alpha=1.0, beta=1.0, transB=1)

    def _weight(
        self,
        shape: tuple[int, ...],
        variance: float,
        function: Callable[[Array, Array], Array],
        x: Value,
        spread: float | None = None,
    ) -> tuple[str, Array | None]:
        """A normal weight, and the result of the layer ``function`` with this weight on the probe."""
        key, weight = self.draw("weight", shape, centered(math.sqrt(variance)))
        y = on_probe(lambda p: function(p, weight), x)
        if y is not None and spread is not None:
            factor = probe.settle(spread / np.sqrt(probe.statistics(y)[1].mean()))
            weight, y = weight * np.float32(factor), y * factor
        return self.weight(key, weight), y

    def dense(
        self, x: Value, features: int, *, name: Label | None, weight: str = "weight", bias: str = "bias"
    ) -> Value:
        """A linear layer on (…, in) as MatMul with the transposed weight, then Add with the bias as *first* operand."""
        inputs = x.extent(-1)
        with self.scope(name):
            key, array = self.draw(weight, (features, inputs), normal(math.sqrt(2.0 / (inputs + features))))
            b, _ = self.param(bias, (features,), normal(0.05))
            y = self.node("MatMul", [x, self.weight(f"{key}.T", array.T)], (*x.shape[:-1], features))
            return self.node("Add", [b, y], y.shape)

    def _bias(self, size: int, y: Array | None) -> tuple[str, Array | None]:
        """A bias that takes out most of the mean of ``y``, and ``y`` with it."""
        if y is None:
            return self.param("bias", (size,), normal(0.05))[0], None
        mean, var = probe.statistics(y)
        name, bias = self.param(
            "bias", (size,), lambda rng, shape: 0.1 * np.sqrt(var) * rng.standard_normal(shape) - mean
        )
        return name, y + bias.reshape(size, *[1] * (y.ndim - 2))

    # -- normalization -----------------------------------------------------------------------------------------------

    def batch_norm(
        self,
        x: Value,
        *,
        eps: float = 1e-5,
        momentum: float = 0.9,
        scales: tuple[float, float] = PLAIN,
        name: Label | None,
    ) -> Value:
        """BatchNormalization in inference form over axis 1, its scales drawn from the interval ``scales``."""
        shape = (x.channels,)
        m, v = (np.zeros(shape), np.ones(shape)) if x.probe is None else probe.statistics(x.probe)
        with self.scope(name):
            parameters = [
                self.param("weight", shape, uniform(*scales)),
                self.param("bias", shape, normal(0.2)),
                self.param("running_mean", shape, lambda rng, s: m + 0.1 * np.sqrt(v) * rng.standard_normal(s)),
                self.param("running_var", shape, lambda rng, s: v * np.exp(0.2 * rng.standard_normal(s))),
            ]
            y = on_probe(lambda p: probe.batch_norm(p, [array for _, array in parameters], eps), x)
            names = [key for key, _ in parameters]
            return self.node("BatchNormalization", [x, *names], x.shape, probe=y, epsilon=eps, momentum=momentum)

    def unit(
        self,
        x: Value,
        channels: int,
        kernel: Pair,
        names: tuple[Label, Label, Label | None],
        act: Callable[..., Value] | None = None,
        *,
        stride: int = 1,
        padding: Pair | None = None,
        groups: int = 1,
        gain: float = HE,
        eps: float = 1e-5,
        momentum: float = 0.9,
        scales: tuple[float, float] = PLAIN,
    ) -> Value:
        """Convolution, BatchNormalization and ``act`` (a method such as :meth:`relu`), under these three names.

        The padding keeps the size at stride 1 unless it is given.
        """
        if padding is None:
            assert isinstance(kernel, int)
            padding = kernel // 2
        y = self.conv(x, channels, kernel, stride=stride, padding=padding, groups=groups, gain=gain, name=names[0])
        y = self.batch_norm(y, eps=eps, momentum=momentum, scales=scales, name=names[1])
        return y if act is None else act(y, name=names[2])

    def layer_norm(self, x: Value, *, eps: float, decomposed: bool, name: Label | None) -> Value:
        """Over the last axis: one LayerNormalization (opset 17), or the nine nodes that exporters write below it."""
        size = x.extent(-1)
        row = (*x.shape[:-1], 1)
        with self.scope(name):
            scale, _ = self.param("weight", (size,), uniform(0.7, 1.3))
            shift, _ = self.param("bias", (size,), normal(0.1))
            if not decomposed and self.opset >= 17:
                return self.node("LayerNormalization", [x, scale, shift], x.shape, axis=-1, epsilon=eps)
            centered = self.node("Sub", [x, self._mean_last(x)], x.shape)
            square = self.node("Pow", [centered, self.const(2.0, np.float32)], x.shape)
            var = self.node("Add", [self._mean_last(square), self.const(eps, np.float32)], row)
            y = self.node("Div", [centered, self.node("Sqrt", [var], row)], x.shape)
            return self.node("Add", [self.node("Mul", [y, scale], x.shape), shift], x.shape)

    def _mean_last(self, x: Value) -> Value:
        row = (*x.shape[:-1], 1)
        if self.opset >= 18:
            return self.node("ReduceMean", [x, self.const([-1])], row, keepdims=1)
        return self.node("ReduceMean", [x], row, axes=[-1], keepdims=1)

    # -- activations -------------------------------------------------------------------------------------------------

    def relu(self, x: Value, *, name: Label | None) -> Value:
        return self._activation("Relu", lambda p: np.maximum(p, 0.0), x, name)

    def sigmoid(self, x: Value, *, name: Label | None) -> Value:
        return self._activation("Sigmoid", probe.sigmoid, x, name)

    def tanh(self, x: Value, *, name: Label | None) -> Value:
        return self._activation("Tanh", np.tanh, x, name)

    def _activation(self, op_type: str, function: Callable[[Array], Array], x: Value, name: Label | None) -> Value:
        with self.scope(name):
            return self.node(op_type, [x], x.shape, probe=on_probe(function, x))

    def relu6(self, x: Value, *, name: Label | None) -> Value:
        """Clip between constants 0 and 6."""
        with self.scope(name):
            bounds = [self.const(0.0, np.float32), self.const(6.0, np.float32)]
            return self.node("Clip", [x, *bounds], x.shape, probe=on_probe(lambda p: np.clip(p, 0.0, 6.0), x))

    def silu(self, x: Value, *, name: Label | None) -> Value:
        """x * Sigmoid(x), two nodes."""
        with self.scope(name):
            gate = self.node("Sigmoid", [x], x.shape)
            return self.node("Mul", [x, gate], x.shape, probe=on_probe(lambda p: p * probe.sigmoid(p), x))

    def gelu(self, x: Value, *, decomposed: bool, name: Label | None) -> Value:
        """The exact GELU: one Gelu (opset 20), or 0.5 x (1 + Erf(x / sqrt 2)) in the exporter's order."""
        with self.scope(name):
            if not decomposed and self.opset >= 20:
                return self.node("Gelu", [x], x.shape, approximate="none")
            erf = self.node("Erf", [self.node("Div", [x, self.const(math.sqrt(2.0), np.float32)], x.shape)], x.shape)
            gate = self.node("Add", [erf, self.const(1.0, np.float32)], x.shape)
            y = self.node("Mul", [x, gate], x.shape)
            return self.node("Mul", [y, self.const(0.5, np.float32)], x.shape)

    # -- pooling, joining, reshaping ---------------------------------------------------------------------------------

    def max_pool(
        self, x: Value, kernel: int, *, stride: int, padding: int = 0, ceil: bool = False, name: Label | None
    ) -> Value:
        y = on_probe(lambda p: probe.max_pool(p, kernel, stride, padding, ceil), x)
        return self._pool("MaxPool", x, y, name, kernel, stride, padding, ceil, dilations=[1, 1])

    def avg_pool(self, x: Value, kernel: int, *, stride: int, padding: int = 0, name: Label | None) -> Value:
        """AveragePool that counts the padding, as torch's default does."""
        y = on_probe(lambda p: probe.avg_pool(p, kernel, stride, padding, small=is_small(x)), x)
        return self._pool("AveragePool", x, y, name, kernel, stride, padding, False, count_include_pad=1)

    def _pool(
        self, op_type: str, x: Value, y: Array | None, name: Label | None, kernel: int, stride: int, padding: int, ceil: bool,
        **attrs: Any,
    ) -> Value:  # fmt: skip
        with self.scope(name):
            spatial = tuple(window(d, kernel, stride, padding, ceil=ceil) for d in x.shape[2:])
            return self.node(
                op_type, [x], (*x.shape[:2], *spatial), probe=y, ceil_mode=int(ceil), kernel_shape=[kernel] * 2,
                pads=[padding] * 4, strides=[stride] * 2, **attrs,
            )  # fmt: skip

    def global_avg_pool(self, x: Value, *, name: Label | None) -> Value:
        with self.scope(name):
            y = on_probe(lambda p: p.mean((2, 3), keepdims=True), x)
            return self.node("GlobalAveragePool", [x], (*x.shape[:2], 1, 1), probe=y)

    def flatten(self, x: Value) -> Value:
        """(batch, channels, height, width) to (batch, features)."""
        height, width = x.extent(2), x.extent(3)
        y = on_probe(lambda p: probe.stretch(p, height, width).reshape(len(p), -1), x)
        return self.node("Flatten", [x], (x.shape[0], x.channels * height * width), probe=y, axis=1)

    def concat(self, parts: Sequence[Value], axis: int = 1) -> Value:
        shape = list(parts[0].shape)
        shape[axis] = sum(p.extent(axis) for p in parts)
        y = on_probe(lambda *p: np.concatenate(p, axis), *parts)
        return self.node("Concat", list(parts), tuple(shape), probe=y, axis=axis)

    def add(self, x: Value, y: Value) -> Value:
        """Residual addition of two tensors of one shape."""
        return self.node("Add", [x, y], x.shape, probe=on_probe(np.add, x, y))

    def scale(self, gate: Value, x: Value) -> Value:
        """``gate * x`` with a gate (batch, channels, 1, 1): squeeze-and-excitation."""
        return self.node("Mul", [gate, x], x.shape, probe=on_probe(np.multiply, gate, x))

    def binary(self, op_type: str, x: Value, constant: Any) -> Value:
        """A pointwise operator with a scalar constant as its second operand."""
        return self.node(op_type, [x, self.const(constant, np.float32)], x.shape)

    def slice(self, x: Value, axis: int, start: int, stop: int, step: int = 1) -> Value:
        """Slice one axis, from ``start`` to ``stop`` (both within it) by ``step``."""
        shape: Dims = tuple(-(-(stop - start) // step) if i == axis else d for i, d in enumerate(x.shape))
        bounds = [self.const([v]) for v in (start, stop, axis, step)]
        return self.node("Slice", [x, *bounds], shape)

    def every_other(self, x: Value, axis: int, start: int) -> Value:
        """Every second row or column of a map of even extent, from ``start`` on."""
        pick = (slice(None),) * axis + (slice(start, None, 2),)
        return replace(self.slice(x, axis, start, x.extent(axis), 2), probe=on_probe(lambda p: p[pick], x))


def make_divisible(channels: float) -> int:
    """Round a scaled channel count to a multiple of 8, never below 90 % of it (Howard et al., MobileNet,
    2017)."""
    rounded = max(8, int(channels + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * channels else rounded


def scaled(channels: int, width: float) -> int:
    """``channels`` itself at ``width`` 1, else scaled and rounded to a multiple of 8."""
    return channels if width == 1.0 else make_divisible(channels * width)


def repeats(blocks: int, depth: float) -> int:
    """A stage's block count at ``depth``, at least one (Tan & Le, EfficientNet, 2019: rounded up)."""
    return max(1, math.ceil(blocks * depth))
