"""Global average pooling and the fully connected layer behind it in one launch: how classifiers of images end, at batch 1."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from optdnn.ir.graph import Op
from optdnn.ops.fused import plain_stages
from optdnn.runtime.cuda import gemv, pool_gemv
from optdnn.runtime.cuda.conv_cost import h200
from optdnn.tactics.cuda import neighbours
from optdnn.tactics.cuda.builder import Builder, Placed, map_dtype, products
from optdnn.tactics.cuda.described import emit_description
from optdnn.tactics.cuda.epilogue import RESIDUAL, Epilogue, plan_epilogue
from optdnn.tactics.cuda.gemm import HopperGemm
from optdnn.tactics.cuda.neighbours import mean_before
from optdnn.tactics.cuda.tactic import Offer

POOLING = 1.5e-6
"""Seconds that a global pool of a few images takes in a chain (H200: 1.5 us of 7 x 7 x 1024 and 7 x 7 x 1280)."""


@lru_cache(maxsize=256)
def _offers(problem: pool_gemv.Problem) -> tuple[Offer, ...]:
    found = pool_gemv.candidates(problem, h200())
    return tuple(Offer(c, pool_gemv.estimate(problem, c, h200()), row_invariant=False) for c in found)


class PoolGemv(HopperGemm):
    """MatMul and Gemm with a constant matrix of the means of one or two channels-last images in 16-bit floats. Its launch is emitted at
    the product and reads the image; the pool's own, which nothing reads then, is dropped."""

    name = "pool_gemv"
    row_invariant: ClassVar[bool] = False
    """More images are another tactic's, which adds in another order."""
    takes_along: ClassVar[bool] = True

    def refuse(self, b: Builder, op: Op) -> str | None:
        if not neighbours.TAKE_MEANS:
            return "it has not been measured to be faster than two launches"
        pool = mean_before(b.graph, op)
        if pool is None:
            return "its rows are not the means of images, read by it alone"
        if not b.arch.startswith("sm_90"):
            return f"it needs Hopper's clusters (sm_90a), not {b.arch}"
        if products(b, op) not in ("float16", "bfloat16"):
            return f"its operands are 16-bit floats, not {products(b, op)}"
        if (why := self._unsuitable(b, op)) is not None:
            return why
        assert pool.inputs[0] is not None
        producer = b.graph.op(pool.inputs[0])
        if producer.kind == "Conv" and producer.attrs.group > 1:
            return "the depthwise convolution before it sums its results on their way"
        x = b.place.get(pool.inputs[0])
        if x is None or not _rows_of_pixels(x):
            return "its image does not lie in channels-last order, in eights"
        ep = plan_epilogue(b.graph, op, channel_axis=-1)
        if ep.rest or ep.residual is not None:
            return "something else than constants is added to its result"
        problem = _problem(op, x, ep)
        if not 1 <= problem.images <= pool_gemv.MAX_IMAGES:
            return f"it is for up to {pool_gemv.MAX_IMAGES} images, not {problem.images}"
        offers = _offers(problem)
        if not offers:
            return "no configuration of its kernel fits"
        together = offers[0].seconds or 0.0
        product = gemv.Problem(problem.images, problem.columns, problem.channels)
        apart = gemv.estimate(product, gemv.candidates(product, h200())[0], h200())
        if together >= apart + POOLING:
            return f"{together * 1e6:.1f} us are predicted for both, {apart * 1e6:.1f} for the product and {POOLING * 1e6:.1f} for the pool"
        return None

    def emit(self, b: Builder, op: Op, config: Any = None) -> str:
        pool = mean_before(b.graph, op)
        assert pool is not None
        assert pool.inputs[0] is not None
        x, out = b.operand(pool.inputs[0]), b.target(op.value)
        weight, bias = self.factors(b, op)
        ep = plan_epilogue(b.graph, op, channel_axis=-1)
        bias = ep.added_to(bias)
        problem = _problem(op, x, ep)
        offers = _offers(problem)
        b.offer(offers)
        config = config or offers[0].config
        vector = np.zeros(problem.columns, np.float32)
        if bias is not None:
            vector[:] = bias
        dense = b.kept.once("rows", [weight], lambda: np.ascontiguousarray(weight))
        weights, row = (
            b.constant(dense, f"{op.outputs[0].name}.weights"),
            b.constant(vector, f"{op.outputs[0].name}.bias"),
        )
        columns, channels = problem.columns, problem.channels
        logical = weights.view((columns, channels, 1, 1), (channels, 1, 1, 1))
        constants = [b.constant(a, "scalar") for a in ep.constants]
        tail = [None, *constants] if constants else []
        attrs = {
            "strides": (1, 1), "pads": (0, 0, 0, 0), "dilations": (1, 1), "group": 1, "auto_pad": "NOTSET",
            "prologue": (), "epilogue": plain_stages(ep.stages), "arity": RESIDUAL,
        }  # fmt: skip
        pitch = out.strides[0] if problem.images > 1 else columns
        result = out.view((problem.images, columns, 1, 1), (pitch, 1, 1, 1))
        emit_description(
            b, replace(op, src=op.src | pool.src), pool_gemv.recipe(problem, config, b.arch),
            pool_gemv.describe(problem, config, x.strides[0], _pixel_pitch(x), pitch),
            {"x": x, "weights": weights, "bias": row, "output": result},
            kind="MeanProduct", attrs=attrs, reads=[x, logical, row, *tail], writes=[result],
        )  # fmt: skip
        return str(config)


def _problem(op: Op, x: Placed, ep: Epilogue) -> pool_gemv.Problem:
    n, c, h, w = x.shape
    stages = (("bias",), *ep.rendered)
    return pool_gemv.Problem(n, h * w, c, op.outputs[0].type.static_shape[-1], stages, map_dtype(x.dtype))


def _rows_of_pixels(x: Placed) -> bool:
    """Whether an image is rows of channels at one pitch, which 16-byte loads can read."""
    if len(x.shape) != 4:
        return False
    (n, c, h, w), (sn, sc, sh, _) = x.shape, x.strides
    pitch = _pixel_pitch(x)
    one = c == 1 or sc == 1
    return one and (h == 1 or sh == w * pitch) and not any(v % 8 for v in (c, pitch, sn if n > 1 else 0, x.offset))


def _pixel_pitch(x: Placed) -> int:
    """Elements from a pixel to the next (any, where there is one)."""
    return x.strides[3] if x.shape[3] > 1 else x.strides[2] if x.shape[2] > 1 else x.shape[1]
