"""Convolutions and matrix products on the general tensor-core kernel (mma.sync fed by cp.async): every GPU from sm_80 on, and groups.

On Hopper it runs what Hopper's own kernel does not: convolutions of many narrow groups, strides beyond eight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from optdnn.ir.epilogue import Epilogue, plan_epilogue
from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder, TensorView, channels_last, map_dtype, products, up
from optdnn.kernels.conv import general_kernel as general
from optdnn.kernels.conv import maps as conv_maps
from optdnn.kernels.conv.fused import bias_row, conv_attrs, stage_operands
from optdnn.kernels.conv.hopper import HopperConv, bias_of, entering, finish, image, planar, with_pitch
from optdnn.kernels.conv.maps import Feed
from optdnn.kernels.conv.problem import Problem, Source, banded
from optdnn.kernels.gemm.hopper import HopperGemm
from optdnn.kernels.pointwise.pointwise import copy
from optdnn.kernels.tactic import DryRunConfigs, Offer
from optdnn.ops.requantize import Requantize
from optdnn.runtime.cuda.gpu_facts import GpuFacts, no_kernels, of_arch
from optdnn.runtime.cuda.launches.plan import TF32
from optdnn.types import FP32, INT32, Array, to_tf32


@lru_cache(maxsize=1024)
def _offers(problem: Problem, gpu: GpuFacts) -> tuple[Offer, ...]:
    """Every configuration, the best predicted first. Where K is shared, sums of floats depend on how. Hopper has clusters for that;
    there the model stays the older GPU's, which ``conv_bands.MARGIN`` was set by."""
    hopper, exact = gpu.hopper, problem.dtype in ("int8", "uint8")
    if hopper:
        gpu = of_arch("sm_80")
    found = [c for c in general.CONFIGS if general.refuse(problem, c) is None and not (hopper and c.split > 1)]
    offers = [Offer(c, general.estimate(problem, c, gpu), exact or c.split == 1) for c in found]
    return tuple(sorted(offers, key=lambda o: o.seconds or 0.0))


def launch(
    b: Builder,
    op: Op,
    problem: Problem,
    feed: Feed,
    channel: TensorView,
    out: TensorView,
    residual: TensorView | None,
    meaning: tuple[str, dict[str, Any], Sequence[TensorView | None]],
    config: general.GeneralConfig | None,
    requantize: Requantize | None = None,
    reads: TensorView | None = None,
) -> str:
    """One launch on channels-last NCHW tensors. ``channel``: what each output channel brings to the epilogue; ``meaning``: kind,
    attributes, and the operands after those; ``reads``: what it takes ``feed``'s image for, where that is not the image itself.
    Returns the configuration's name."""
    offers, channels = _offers(problem, b.gpu), out.shape[1]
    b.offer(offers)
    config = config or offers[0].config
    assert config is not None
    own = conv_maps.pitch_of(out)
    assert own is not None
    operands = {"pixels": feed.x, "channel": channel, "output": out}
    kind, attrs, tail = meaning
    if residual is not None:
        if conv_maps.pitch_of(residual) != own:
            strides = channels_last(residual.shape, own)
            made = b.new(f"{op.outputs[0].name}.residual", residual.dtype, residual.shape, strides)
            copy(b, op, residual, made)
            tail = [made if p is residual else p for p in tail]
            residual = made
        operands["residual"] = residual
    weight = feed.weight
    if problem.dtype == "tfloat32":
        weight, attrs = to_tf32(weight), {**attrs, TF32: (0, 1)}
    packed = operands["weights"] = b.constant(general.pack_weights(weight), f"{op.outputs[0].name}.weights")
    lanes, (o, i, r, s) = packed.shape[2], weight.shape
    logical = packed.view((o, i, r, s), (r * s * lanes, 1, s * lanes, lanes))
    scratch: list[TensorView] = []
    kept: list[TensorView] = []
    if config.split > 1:
        partial, arrived = general.workspace(problem, config, channels)
        scratch.append(b.new(f"{op.outputs[0].name}.partial", FP32, (partial // 4,)))
        kept.append(b.new(f"{op.outputs[0].name}.arrived", INT32, (arrived // 4,)))
        operands |= {"partial": scratch[0], "arrived": kept[0]}
    row = feed.x.strides[2] if feed.x.shape[2] > 1 else 0
    described = general.launch(
        problem, config, b.gpu, channels=channels, inside=i, pitch=own, row=row, requantize=requantize
    )
    constants = channel.view((channels, *channel.shape[1:]), channel.strides)
    read = [feed.x if reads is None else reads, logical, constants, *tail]
    b.emit(op, described, operands, kind, attrs, read, [out], scratch=scratch, kept=kept)
    return str(config)


def emit_general(
    b: Builder,
    op: Op,
    x: TensorView,
    weight: Array,
    geometry: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]],
    groups: int,
    bias: Array | None,
    ep: Epilogue,
    residual: TensorView | None,
    out: TensorView,
    config: general.GeneralConfig | None,
) -> str:
    """A convolution of floats; ``geometry``: strides, pads, dilations. Returns the configuration's name."""
    strides, pads, dilations = geometry
    feed = Feed(x, weight, strides, pads, dilations, bands=groups)  # type: ignore[arg-type]
    channels, factors = out.shape[1], products(b, op)
    wide = up(channels, 8 * groups)
    problem = Problem(
        out.shape[0], wide, (source_of(feed),), (("bias",), *ep.rendered), factors, map_dtype(out.dtype), bands=groups
    )
    meaning = ("Conv", conv_attrs(geometry, groups, ep.stages), stage_operands(b, ep, residual))
    return launch(b, op, problem, feed, bias_row(b, op, bias, up(channels, 4)), out, residual, meaning, config)


def source_of(feed: Feed) -> Source:
    """What the kernel walks: the feed's pixels, at the distance at which they lie."""
    if feed.overlapped is not None:
        return feed.overlapped
    pitch = conv_maps.pitch_of(feed.x)
    assert pitch is not None
    return replace(feed.source, pitch=pitch)


def refusal(b: Builder, op: Op) -> str | None:
    """Why the kernel is not for this architecture, or this element type."""
    if (why := no_kernels(b.arch)) is not None:
        return why
    if products(b, op) not in ("float16", "bfloat16", "tfloat32"):
        return f"its operands are 16-bit floats, or of fp32, tf32 where that was asked for, not {products(b, op)}"
    return None


def together(arch: str, groups: int, weight: Array) -> int:
    """How many neighbouring groups are best multiplied as one, with zeros between them: what fills tiles and begins at multiples of
    16 bytes. On Hopper, whose own kernel does that better, none where that can be."""
    (channels, inside), item = weight.shape[:2], weight.dtype.itemsize
    fit = [n for n in range(1, groups + 1) if groups % n == 0 and (n == groups or n * inside * item % 16 == 0)]
    if arch.startswith("sm_90") and fit[0] == 1:
        return 1

    def steps(n: int) -> int:
        return int(groups // n * -(-n * channels // groups // 64) * -(-n * inside * item // general.ROW))

    return min(fit, key=steps)


class GeneralConv(DryRunConfigs):
    """Convolutions of 16-bit floats and of tf32 over one or two spatial axes, grouped or not."""

    name = "conv_sm80"

    def refuse(self, b: Builder, op: Op) -> str | None:
        if (why := refusal(b, op)) is not None:
            return why
        a, weight = op.attrs, b.graph.constant_value(op.inputs[1])
        if weight is None or weight.ndim not in (3, 4) or 0 in weight.shape or 0 in op.outputs[0].type.static_shape:
            return "its weights are not constant, or not of one or two spatial axes"
        if op.input(2) is not None and bias_of(b, op) is None:
            return "its bias is not constant"
        if a.group == 1 and HopperConv().refuse(b, op) is None:
            return "Hopper's own kernel runs it"
        if a.group > 1 and b.arch.startswith("sm_90") and together(b.arch, a.group, weight) > 1:
            return f"groups of {weight.shape[1]} channels do not begin at multiples of 16 bytes: Hopper's own kernel takes several"
        return None

    def emit(self, b: Builder, op: Op, config: Any = None) -> str:
        a, weight = op.attrs, b.graph.constant_value(op.inputs[1])
        assert weight is not None
        ep = plan_epilogue(b.graph, op, channel_axis=1)
        bias, groups, whole = ep.added_to(bias_of(b, op)), a.group, weight
        if groups > 1 and (n := together(b.arch, groups, weight)) > 1:
            whole, groups = banded(weight, groups, n), groups // n
        weight, strides, pads, dilations = planar(whole, a)
        stem = HopperConv.stem(b, op, weight, strides, pads, dilations) if groups == 1 else None
        if stem is not None:
            x, weight, strides, pads, dilations = stem.x, stem.weight, stem.strides, stem.pads, stem.dilations
        else:
            x = with_pitch(b, op, image(entering(b, op)))
        target = b.target(op.value)
        out = image(target)
        residual = with_pitch(b, op, image(b.operand(ep.residual))) if ep.residual is not None else None
        between = target
        if ep.rest or conv_maps.pitch_of(out) is None:
            between = b.new(
                f"{op.outputs[0].name}.conv",
                target.dtype,
                target.shape,
                channels_last(target.shape, up(out.shape[1], 8)),
            )
        geometry = (tuple(strides), tuple(pads), tuple(dilations))
        used = emit_general(b, op, x, weight, geometry, groups, bias, ep, residual, image(between), config)
        finish(b, op, ep, between, target)
        return used


class GeneralGemm(HopperGemm):
    """MatMul and Gemm of 16-bit floats and of tf32 whose second operand is a constant matrix, before Hopper."""

    name = "gemm_sm80"

    def refuse(self, b: Builder, op: Op) -> str | None:
        if (why := refusal(b, op)) is not None:
            return why
        if b.arch.startswith("sm_90"):
            return "Hopper's own kernel runs it"
        return self._unsuitable(b, op)

    def read(self, name: str) -> Any:
        """Names do not tell."""
        return None

    @staticmethod
    def _launch(
        b: Builder, op: Op, x: TensorView, weight: Array, bias: Array | None, ep: Epilogue, residual: TensorView | None, out: TensorView,
        config: Any,
    ) -> str:  # fmt: skip
        return emit_general(b, op, x, weight, ((1, 1), (0, 0, 0, 0), (1, 1)), 1, bias, ep, residual, out, config)
