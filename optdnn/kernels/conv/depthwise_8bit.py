"""Depthwise convolutions of 8-bit integers."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np

from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder, TensorView, channels_last, map_dtype
from optdnn.kernels.conv import depthwise_kernel as depthwise
from optdnn.kernels.conv.depthwise import DepthwiseTactic, emit_with_means, family, suits
from optdnn.kernels.conv.depthwise_images import read_densely
from optdnn.kernels.conv.depthwise_problem import MAX_PIXELS
from optdnn.kernels.conv.problem import Source
from optdnn.kernels.pointwise.pointwise import copy
from optdnn.kernels.quantized.hopper import DATA_SCALE, refusal
from optdnn.kernels.quantized.quantized_store import QuantizedStore
from optdnn.ops.base import attrs_dict
from optdnn.ops.requantize import Requantize, byte_bias, pad_channels
from optdnn.runtime.cuda.gpu_facts import no_kernels


class Int8Depthwise(DepthwiseTactic):
    """Depthwise convolutions of int8 or uint8 images. Products and sums are exact in fp32; the epilogue is that of other
    8-bit convolutions. Images that are not channels-last are copied."""

    name = "depthwise_8bit"
    means = "QuantizedMean"

    def refuse(self, b: Builder, op: Op) -> str | None:
        if (why := refusal(b, op) or no_kernels(b.arch)) is not None:
            return why
        weight = b.weights(op)
        if weight.ndim != 4 or weight.shape[1] != 1 or op.attrs.group != weight.shape[0] or op.attrs.group == 1:
            return "it is not a depthwise convolution of images"
        if weight.dtype != np.int8:
            return f"it is for int8 weights, not {weight.dtype.name}"
        if op.input(DATA_SCALE) is not None:
            return "the scale of its data is computed"
        if weight.shape[0] % 16:
            return "its number of channels is not a multiple of 16"
        return None if self.configs(b, op) else "no tile of the kernel fits it"

    def pool(self, b: Builder, op: Op) -> Op | None:
        """The mean with the zero point of the result, if there are few enough pixels for exact sums."""
        if math.prod(op.outputs[0].type.static_shape[2:]) > MAX_PIXELS:
            return None
        users = (user for user in self.pools(b.graph, op) if user.attrs.input_zero == op.attrs.zero)
        return next((user for user in users if suits(b, op, user)), None)

    def problem(self, b: Builder, op: Op) -> depthwise.Problem:
        weight, a = b.weights(op), op.attrs
        x = b.graph.type(op.inputs[0])  # type: ignore[arg-type]
        n, c, h, w = x.static_shape
        source = Source(h, w, c, weight.shape[2:], a.strides, a.pads, a.dilations)
        second = map_dtype(b.graph.type(op.inputs[3]).dtype) if op.input(3) is not None else ""  # type: ignore[arg-type]
        dtypes = map_dtype(x.dtype), map_dtype(op.outputs[0].type.dtype)
        return depthwise.Problem(
            n,
            source,
            tuple(a.stages),
            dtypes[0],
            self.pool(b, op) is not None,
            dtypes[1],
            second,
            a.zero != 0,
            a.input_zero,
        )

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        a, problem = op.attrs, self.problem(b, op)
        weight, channel = b.weights(op), b.graph.constant_value(op.inputs[2])
        assert channel is not None
        x, out = read_densely(b, op, b.operand(op.inputs[0]), "image"), b.target(op.value)
        dense = channels_last(out.shape, out.shape[1])
        lies = out.is_like(dense) and out.byte_offset % 16 == 0
        target = out if lies else b.new(f"{op.outputs[0].name}.conv", out.dtype, out.shape, dense)
        half = ml_dtypes.bfloat16 if problem.out_dtype == "bfloat16" else np.float16  # both hold an int8 exactly
        packed = b.constant(depthwise.pack_weights(weight).astype(half), f"{op.outputs[0].name}.weights")
        pairs = b.constant(pad_channels(channel)[: len(channel)], f"{op.outputs[0].name}.scales")
        operands = {"input": x, "output": target, "weights": packed, "bias": pairs}
        channels, taps_w = weight.shape[0], weight.shape[3]
        reads: list[TensorView | None] = [x, packed.view(weight.shape, (1, 0, taps_w * channels, channels)), pairs]
        if op.input(3) is not None:
            operands["residual"] = read_densely(b, op, b.operand(op.inputs[3]), "residual")
            reads.append(operands["residual"])
        offset = byte_bias(problem.residual_dtype) + a.residual_zero
        requantize = Requantize(a.residual_scale, offset, a.low, a.high, a.zero)
        pool = self.pool(b, op)
        if pool is not None:
            m = pool.attrs
            mean = QuantizedStore(m.factor, m.low, m.high, m.zero)
            made = family(config).launch(problem, config, b.gpu, requantize, mean)
            emit_with_means(b, op, pool, problem, config, made, operands, attrs_dict(a), reads, mean)
        else:
            made = family(config).launch(problem, config, b.gpu, requantize)
            b.emit(op, made, operands, "QuantizedConv", attrs_dict(a), reads, [target])
        if not lies:
            copy(b, op, target, out)
