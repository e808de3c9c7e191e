"""The first convolution of an 8-bit network, the quantization of its image and the max pool behind it, in one launch.

Small integers, and sums of their products, are exact in Hopper's kernel for 16-bit floats (:mod:`optdnn.kernels.conv.stem_pool_sm90_kernel`).
The launch is emitted at the convolution; the pool finds its result placed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from optdnn.ir.graph import Graph, Op
from optdnn.kernels.builder import Builder, channels_last, map_dtype, unmade, up
from optdnn.kernels.conv import maps as conv_maps
from optdnn.kernels.conv import stem_kernel as stem
from optdnn.kernels.conv import stem_pool_kernel as pooled
from optdnn.kernels.conv import stem_pool_sm90_kernel as sm90
from optdnn.kernels.conv.hopper import planar
from optdnn.kernels.conv.pooled import max_pool_behind
from optdnn.kernels.conv.problem import Source
from optdnn.kernels.conv.stem_cost import LAUNCH
from optdnn.kernels.conv.stem_kernel import KINDS
from optdnn.kernels.conv.stem_pool import squares, wgmma_offers
from optdnn.kernels.pool.max_pool import predicted
from optdnn.kernels.pool.window import pads_of
from optdnn.kernels.quantized import hopper
from optdnn.kernels.ranking import two_are_better
from optdnn.kernels.tactic import Offer, Region, Tactic
from optdnn.ops.base import attrs_dict
from optdnn.ops.requantize import QuantParams
from optdnn.types import DTYPES

INTEGERS = ("int8", "uint8")
BLOCKS = 1.25e12
"""Bytes in a second that the launch which quantizes an image to blocks of pixels moves: 52 us for 128 images of ResNet-50 on an H200."""
GAIN = 0.85
"""One launch has to promise at most this fraction of what three take: its prediction is not fitted to timings of its own."""


class QuantizedPooledStem(Tactic):
    """Where the image is quantized around 0, and the sole reader is a max pool of windows of 2 x 2 or 3 x 3 with a stride of 2."""

    name = "conv_stem_pool_8bit"

    def refuse(self, b: Builder, op: Op) -> str | None:
        pool = max_pool_behind(b.graph, op)
        if pool is None:
            return "no max pool is the only reader of the result"
        if not squares(pool):
            return "the pool after it has other windows than 2 x 2 or 3 x 3, with a stride of 2, or gives indices"
        if (why := hopper.refusal(b, op)) is not None:
            return why
        if hopper.quantized_image(b, op.inputs[0]) is None:  # type: ignore[arg-type]
            return "it reads no float image that is quantized around 0"
        if b.weights(op).ndim != 4 or op.attrs.group != 1 or op.input(3) is not None:
            return "it is no ungrouped convolution over two axes to whose result nothing is added"
        if op.outputs[0].type.dtype.name not in INTEGERS:
            return "its results are not 8-bit integers"
        if conv_maps.pitch_of(b.result(pool.value)) is None:
            return "the pool's result does not lie in channels-last order"
        problem = self._problem(b, op)
        if (why := sm90.no_kernel(problem, b.arch)) is not None:
            return why
        if not wgmma_offers(problem, b.gpu):
            return "no tile of the kernel fits it"
        return self._slower(b, op, problem)

    def _slower(self, b: Builder, op: Op, problem: pooled.Problem) -> str | None:
        """Why three launches are better, as far as the cost models know, or None."""
        one = min(o.seconds or 0.0 for o in wgmma_offers(problem, b.gpu))
        return two_are_better(one, self._apart(b, op, problem), GAIN)

    def _apart(self, b: Builder, op: Op, problem: pooled.Problem) -> float:
        """Predicted seconds of launches that quantize the image, multiply, and pool."""
        conv, pool, alone = problem.conv, self._pool(b, op), hopper.HopperQuantizedConv()
        if alone.refuse(b, op) is not None:
            return np.inf
        x, out = (
            unmade(t.dtype, t.static_shape, channels_last(t.static_shape, up(t.static_shape[1], 16)))
            for t in (op.outputs[0].type, pool.outputs[0].type)
        )
        pixels = conv.batch * conv.source.height * conv.source.width
        blocks = LAUNCH + pixels * (conv.source.channels * KINDS[conv.image][1] + 4) / BLOCKS
        multiplied = min((o.seconds or 0.0 for o in alone.configs(b, op)), default=np.inf)
        return blocks + multiplied + predicted(x, out, pool.attrs.kernel_shape, pool.attrs.strides, b.gpu)

    def neighbours(self, graph: Graph, op: Op) -> Sequence[Op]:
        """The pool after it."""
        pool = max_pool_behind(graph, op)
        return [] if pool is None else [pool]

    def region(self, b: Builder, op: Op) -> Region:
        """The convolution and the pool."""
        return Region(op, after=(self._pool(b, op),))

    def place(self, b: Builder, op: Op) -> None:
        """The pool's result; the convolution's own is not stored."""
        b.target(self._pool(b, op).value)

    def configs(self, b: Builder, op: Op) -> Sequence[Offer]:
        return wgmma_offers(self._problem(b, op), b.gpu)

    @staticmethod
    def _pool(b: Builder, op: Op) -> Op:
        pool = max_pool_behind(b.graph, op)
        assert pool is not None
        return pool

    def _problem(self, b: Builder, op: Op) -> pooled.Problem:
        pool, found = self._pool(b, op), hopper.quantized_image(b, op.inputs[0])  # type: ignore[arg-type]
        assert found is not None
        x = b.source(found[0])
        n, c, h, w = x.shape
        weight, strides, pads, dilations = planar(b.weights(op), op.attrs)
        conv = stem.Problem(
            n, Source(h, w, c, weight.shape[2:], strides, pads, dilations), up(len(weight), 8), x.strides,  # type: ignore[arg-type]
            map_dtype(x.dtype), x.offset % 16, tuple(op.attrs.stages),
        )  # fmt: skip
        top, left = pads_of(pool, op.outputs[0].type.static_shape, pool.attrs.kernel_shape)[:2]
        size = pool.outputs[0].type.static_shape[2:]
        made = pooled.Problem(conv, pool.attrs.kernel_shape[0], top, left, (size[0], size[1]), quantized=True)
        return sm90.of(made)

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        pool, problem, found = self._pool(b, op), self._problem(b, op), hopper.quantized_image(b, op.inputs[0])  # type: ignore[arg-type]
        assert found is not None
        value, scale, dtype = found
        x, out, weight = b.made(b.source(value)), b.target(pool.value), b.weights(op)
        packed = stem.pack_weights(problem.conv, weight.astype(np.float16))
        weights = b.constant(packed, f"{op.outputs[0].name}.weights")
        pairs = hopper.channel_pairs(b, op)
        steps, at = stem.weight_view(problem.conv)
        reads = [x, weights.view(weight.shape, steps, at), pairs.view((len(weight), 2), (2, 1))]
        attrs = {k: v for k, v in attrs_dict(op.attrs).items() if k != "group"} | {"input_zero": 0}
        attrs |= {"scale": scale, "dtype": DTYPES[dtype], "window": problem.window}
        attrs |= {"begins": (problem.top, problem.left), "size": problem.size}
        pitch = conv_maps.pitch_of(out) or problem.conv.channels
        numbers = (QuantParams(dtype, scale), hopper.numbers_of(op, None))
        made = sm90.launch(problem, config, b.gpu, pitch, numbers=numbers)
        operands = {"image": x, "weights": weights, "bias": pairs, "output": out}
        b.emit(replace(op, src=op.src | pool.src), made, operands, "PooledQuantizedImage", attrs, reads, [out])
