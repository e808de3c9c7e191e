"""Convolutions and matrix products on the general tensor-core kernel (mma.sync fed by cp.async): every GPU from sm_80 on, and groups.

On Hopper it runs convolutions of many narrow groups.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from optdnn.ir.graph import Op
from optdnn.ops.fused import plain_stages
from optdnn.runtime.cuda import conv_general as general
from optdnn.runtime.cuda import conv_problem
from optdnn.tactics.cuda import conv_maps
from optdnn.tactics.cuda.builder import Block, Builder, KernelSpec, Placed, channels_last, map_dtype, up
from optdnn.tactics.cuda.conv import HopperConv, bias_of, entering, finish, image, planar
from optdnn.tactics.cuda.epilogue import RESIDUAL, Epilogue, plan_epilogue
from optdnn.tactics.cuda.gemm import HopperGemm
from optdnn.tactics.cuda.pointwise import copy
from optdnn.tactics.cuda.stem import emit_space_to_depth
from optdnn.tactics.cuda.tactic import Offer, Rehearsed
from optdnn.types import BF16, FP16, Array

ARCHS = ("sm_80", "sm_86", "sm_87", "sm_89", "sm_90a", "sm_90")
"""Architectures that the kernel is compiled for in tests."""


@lru_cache(maxsize=1024)
def _offers(problem: conv_problem.Problem, groups: int) -> tuple[Offer, ...]:
    found = [c for c in general.CONFIGS if general.refuse(problem, c, groups) is None]
    offers = [Offer(c, general.estimate(problem, c, groups)) for c in found]
    return tuple(sorted(offers, key=lambda o: o.seconds or 0.0))


def emit_general(
    b: Builder,
    op: Op,
    x: Placed,
    weight: Array,
    geometry: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]],
    groups: int,
    bias: Array | None,
    ep: Epilogue,
    residual: Placed | None,
    out: Placed,
    config: general.GeneralConfig | None,
) -> str:
    """One launch on channels-last NCHW tensors; ``geometry``: strides, pads, dilations. Returns the configuration's name."""
    strides, pads, dilations = geometry
    (n, c, h, w), channels = x.shape, out.shape[1]
    source = conv_problem.Source(h, w, c, weight.shape[2:], strides, pads, dilations)  # type: ignore[arg-type]
    stages = (("bias",), *ep.rendered)
    problem = conv_problem.Problem(n, up(channels, 8 * groups), (source,), stages, map_dtype(x.dtype))
    offers = _offers(problem, groups)
    b.offer(offers)
    config = config or offers[0].config
    assert config is not None
    pitch, own = conv_maps.pitch_of(x), conv_maps.pitch_of(out)
    assert pitch is not None
    assert own is not None
    if residual is not None and conv_maps.pitch_of(residual) != own:
        made = b.new(
            f"{op.outputs[0].name}.residual", residual.dtype, residual.shape, channels_last(residual.shape, own)
        )
        copy(b, op, residual, made)
        residual = made
    vector = np.zeros(up(channels, 2), np.float32)
    if bias is not None:
        vector[:channels] = bias
    packed = b.constant(general.pack_weights(weight), f"{op.outputs[0].name}.weights")
    vector_at = b.constant(vector, f"{op.outputs[0].name}.bias")
    out_h, out_w = out.shape[2:]
    block = Block().pointer(x).pointer(packed).pointer(residual).pointer(vector_at).pointer(out)
    block.i32(own, pitch, channels // groups, c // groups, h, w, out_h, out_w, n * out_h * out_w)
    block.i32(*weight.shape[2:], *strides, *pads[:2], *dilations)
    block.data.extend(bytes(-len(block.data) % 8))
    lanes, (o, i, r, s) = packed.shape[2], weight.shape
    logical = packed.view((o, i, r, s), (r * s * lanes, 1, s * lanes, lanes))
    constants = [b.constant(a, "scalar") for a in ep.constants]
    tail = [residual, *constants] if residual is not None or constants else []
    attrs = {
        "strides": strides, "pads": pads, "dilations": dilations, "group": groups, "auto_pad": "NOTSET",
        "prologue": (), "epilogue": plain_stages(ep.stages), "arity": RESIDUAL,
    }  # fmt: skip
    grid = (-(-(n * out_h * out_w) // config.bm), -(-(channels // groups) // config.bn), groups)
    spec = KernelSpec(general.recipe(problem, config, b.arch), "conv_sm80")
    reads = [x, logical, vector_at.view((channels,), (1,)), *tail]
    b.emit(op, spec, grid, config.threads, block, "Conv", attrs, reads, [out], shared=general.shared_bytes(config))
    return str(config)


def refusal(b: Builder, op: Op) -> str | None:
    """Why the kernel is not for this architecture, or this element type."""
    if b.arch not in ARCHS:
        return f"it is compiled for {', '.join(ARCHS)}, not {b.arch}"
    if op.outputs[0].type.dtype not in (FP16, BF16):
        return f"its operands are 16-bit floats, not {op.outputs[0].type.dtype.name}"
    return None


class GeneralConv(Rehearsed):
    """Convolutions of 16-bit floats over one or two spatial axes, grouped or not."""

    name = "conv_sm80"

    def refuse(self, b: Builder, op: Op) -> str | None:
        if (why := refusal(b, op)) is not None:
            return why
        a, weight = op.attrs, b.graph.constant_value(op.inputs[1])
        if weight is None or weight.ndim not in (3, 4) or 0 in weight.shape or 0 in op.outputs[0].type.static_shape:
            return "its weights are not constant, or not of one or two spatial axes"
        if op.input(2) is not None and bias_of(b, op) is None:
            return "its bias is not constant"
        if a.group == 1 and b.arch.startswith("sm_90"):
            return "Hopper's own kernel runs it"
        if a.group > 1 and (weight.shape[1] % 8 or weight.shape[0] // a.group % 2):
            return f"16-byte copies need multiples of 8 channels a group, not {weight.shape[1]}"
        return "it has an odd number of channels" if weight.shape[0] % 2 else None

    def emit(self, b: Builder, op: Op, config: Any = None) -> str:
        a, weight = op.attrs, b.graph.constant_value(op.inputs[1])
        assert weight is not None
        ep = plan_epilogue(b.graph, op, channel_axis=1)
        bias = ep.added_to(bias_of(b, op))
        weight, strides, pads, dilations = planar(weight, a)
        stem = HopperConv.stem(b, op, weight, strides, pads, dilations) if a.group == 1 else None
        if stem is not None:
            x, weight, strides, pads, dilations = stem.x, stem.weight, stem.strides, stem.pads, stem.dilations
        else:
            x = self._sixteens(b, op, image(entering(b, op)), a.group)
            if x.shape[1] > weight.shape[1] * a.group:
                wide = np.zeros((weight.shape[0], x.shape[1], *weight.shape[2:]), weight.dtype)
                wide[:, : weight.shape[1]] = weight
                weight = wide
        target = b.target(op.value)
        out = image(target)
        residual = self._aligned(b, op, image(b.operand(ep.residual))) if ep.residual is not None else None
        between = target
        if ep.rest or conv_maps.pitch_of(out) is None:
            between = b.new(
                f"{op.outputs[0].name}.conv",
                target.dtype,
                target.shape,
                channels_last(target.shape, up(out.shape[1], 8)),
            )
        geometry = (tuple(strides), tuple(pads), tuple(dilations))
        used = emit_general(b, op, x, weight, geometry, a.group, bias, ep, residual, image(between), config)
        finish(b, op, ep, between, target)
        return used

    @staticmethod
    def _aligned(b: Builder, op: Op, x: Placed) -> Placed:
        if conv_maps.pitch_of(x) is not None:
            return x
        made = b.new(f"{op.outputs[0].name}.nhwc", x.dtype, x.shape, channels_last(x.shape, up(x.shape[1], 8)))
        copy(b, op, x, made)
        return made

    def _sixteens(self, b: Builder, op: Op, x: Placed, groups: int) -> Placed:
        """The image with pixels that begin at 16 bytes; channels that do not come in eights are filled up with zeros, since the
        kernel reads them."""
        if x.shape[1] % 8 == 0:
            return self._aligned(b, op, x)
        n, c, h, w = x.shape
        shape = (n, up(c, 16), h, w)
        made = b.new(f"{op.outputs[0].name}.blocks", x.dtype, shape, channels_last(shape, shape[1]))
        emit_space_to_depth(b, op, x, made, 1)
        return made


class GeneralGemm(HopperGemm):
    """MatMul and Gemm of 16-bit floats whose second operand is a constant matrix, before Hopper."""

    name = "gemm_sm80"

    def refuse(self, b: Builder, op: Op) -> str | None:
        if (why := refusal(b, op)) is not None:
            return why
        if b.arch.startswith("sm_90"):
            return "Hopper's own kernel runs it"
        if (why := self._unsuitable(b, op)) is not None:
            return why
        weight = b.graph.constant_value(op.inputs[1])
        assert weight is not None
        columns, depth = weight.shape if op.kind == "Gemm" and op.attrs.transB else weight.shape[::-1]
        return "its rows do not come in eights, or its columns are odd" if depth % 8 or columns % 2 else None

    @staticmethod
    def _launch(
        b: Builder, op: Op, x: Placed, weight: Array, bias: Array | None, ep: Epilogue, residual: Placed | None, out: Placed,
        config: Any,
    ) -> str:  # fmt: skip
        return emit_general(b, op, x, weight, ((1, 1), (0, 0, 0, 0), (1, 1)), 1, bias, ep, residual, out, config)
