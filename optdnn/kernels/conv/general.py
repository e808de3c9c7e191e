"""Convolutions and matrix products on the general tensor-core kernel (mma.sync fed by cp.async): every GPU from sm_80 on, and groups.

On Hopper it runs only convolutions that Hopper's own kernel cannot: many narrow groups, and strides beyond eight. Hopper's kernel
multiplies wider groups in bands of 64 channels, with zeros between groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from optdnn.ir.epilogue import plan_epilogue
from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder, TensorView, channels_last, map_dtype, products, up
from optdnn.kernels.conv import general_kernel as general
from optdnn.kernels.conv import hopper_launch
from optdnn.kernels.conv import maps as conv_maps
from optdnn.kernels.conv.fused import (
    Convolution,
    ConvolutionKernel,
    bias_row,
    conv_attrs,
    stage_operands,
)
from optdnn.kernels.conv.hopper import (
    HopperConv,
    bias_of,
    blocks_of,
    entering,
    has_computed_bias,
    image,
    on_images,
    planar,
    with_pitch,
)
from optdnn.kernels.conv.maps import Feed
from optdnn.kernels.conv.problem import Problem, Source, banded
from optdnn.kernels.gemm.hopper import MatrixProduct, product_refusal
from optdnn.kernels.pointwise.pointwise import copied
from optdnn.kernels.tactic import Offer, ProblemTactic, best_first, costlier
from optdnn.ops.requantize import Requantize
from optdnn.runtime.cuda.gpu_facts import GpuFacts, no_kernels, of_arch
from optdnn.runtime.cuda.launches.plan import TF32
from optdnn.types import FP32, INT32, Array, to_tf32


@lru_cache(maxsize=1024)
def ranked(problem: Problem, gpu: GpuFacts) -> tuple[Offer, ...]:
    """Every configuration, the best predicted first. If blocks share K, the order of float sums depends on their
    number. On Hopper, where clusters share K, this kernel does not. The model there is that of sm_80."""
    hopper, exact = gpu.hopper, problem.dtype in ("int8", "uint8")
    if hopper:
        gpu = of_arch("sm_80")
    found = [c for c in general.CONFIGS if general.refuse(problem, c) is None and not (hopper and c.split > 1)]
    offers = [Offer(c, general.estimate(problem, c, gpu), exact or c.split == 1) for c in found]
    return best_first(offers)


class GeneralTactic(ProblemTactic):
    """A tactic on the general kernel."""

    def offers(self, problem: Problem, gpu: GpuFacts) -> Sequence[Offer]:
        return ranked(problem, gpu)


class GeneralKernel(GeneralTactic, ConvolutionKernel):
    """Convolutions of floats on channels-last images."""

    def problem_of(self, b: Builder, op: Op, c: Convolution) -> Problem:
        groups = c.feed.bands
        return Problem(
            c.out.shape[0], up(c.out.shape[1], 8 * groups), (source_of(c.feed),), (("bias",), *c.ep.rendered), products(b, op),
            map_dtype(c.out.dtype), bands=groups,
        )  # fmt: skip

    def launch(self, b: Builder, op: Op, c: Convolution, problem: Problem, config: general.GeneralConfig) -> None:
        feed, bias = c.feed, bias_row(b, op, c.bias, up(c.out.shape[1], 4))
        meaning = ("Conv", conv_attrs(feed.geometry, feed.bands, c.ep.stages), stage_operands(b, c.ep, c.residual))
        launch(b, op, problem, feed, bias, c.out, c.residual, meaning, config)


def launch(
    b: Builder, op: Op, problem: Problem, feed: Feed, channel: TensorView, out: TensorView, residual: TensorView | None,
    meaning: tuple[str, dict[str, Any], Sequence[TensorView | None]], config: general.GeneralConfig,
    requantize: Requantize | None = None, more: Mapping[str, TensorView] | None = None,
) -> None:  # fmt: skip
    """Add one launch on channels-last NCHW tensors. ``channel``: per-channel operand of the epilogue; ``meaning``:
    kind, attributes, and the operands after pixels, weights and ``channel``; ``more``: other
    operands of the launch."""
    channels, own = out.shape[1], conv_maps.pitch_of(out)
    assert own is not None
    operands = {"pixels": feed.x, "channel": channel, "output": out, **(more or {})}
    kind, attrs, tail = meaning
    if residual is not None:
        if conv_maps.pitch_of(residual) != own:
            made = copied(b, op, residual, "residual", channels_last(residual.shape, own))
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
    read = [feed.seen, logical, constants, *tail]
    b.emit(op, described, operands, kind, attrs, read, [out], scratch=scratch, kept=kept)


def source_of(feed: Feed) -> Source:
    """The kernel's source: the feed's pixels at their pitch in memory."""
    if feed.overlapped is not None:
        return feed.overlapped
    pitch = conv_maps.pitch_of(feed.x)
    assert pitch is not None
    return replace(feed.source, pitch=pitch)


def refusal(b: Builder, op: Op) -> str | None:
    """Why the kernel does not support the architecture or the element type, or None."""
    if (why := no_kernels(b.arch)) is not None:
        return why
    if products(b, op) not in ("float16", "bfloat16", "tfloat32"):
        return f"the kernel takes 16-bit floats, or tf32 where that was requested, not {products(b, op)}"
    return None


def constants_refusal(b: Builder, op: Op) -> str | None:
    """Why the weights or the bias of a convolution cannot be constants of a launch, or None."""
    weight = b.graph.constant_value(op.inputs[1])
    if weight is None or weight.ndim not in (3, 4) or 0 in weight.shape or 0 in op.outputs[0].type.static_shape:
        return "its weights are not constant, or not of one or two spatial axes"
    return "its bias is not constant" if has_computed_bias(b, op) else None


def together(arch: str, groups: int, weight: Array) -> int:
    """Number of neighboring groups to multiply as one, with zeros between them: the one with the fewest steps in which
    groups begin at multiples of 16 bytes. 1 on Hopper if single groups begin there, since Hopper's own kernel joins
    groups faster."""
    (channels, inside), item = weight.shape[:2], weight.dtype.itemsize
    fit = [n for n in range(1, groups + 1) if groups % n == 0 and (n == groups or n * inside * item % 16 == 0)]
    if arch.startswith("sm_90") and fit[0] == 1:
        return 1

    def steps(n: int) -> int:
        return int(groups // n * -(-n * channels // groups // 64) * -(-n * inside * item // general.ROW))

    return min(fit, key=steps)


class GeneralConv(GeneralKernel):
    """Convolutions of 16-bit floats and of tf32 over one or two spatial axes, grouped or not."""

    name = "conv_sm80"

    def refuse(self, b: Builder, op: Op) -> str | None:
        if (why := refusal(b, op)) is not None:
            return why
        if (why := constants_refusal(b, op)) is not None:
            return why
        a, weight = op.attrs, b.weights(op)
        if a.group == 1 and HopperConv().refuse(b, op) is None:
            return "Hopper's own kernel runs it"
        if a.group > 1 and b.arch.startswith("sm_90") and together(b.arch, a.group, weight) > 1:
            return f"groups of {weight.shape[1]} channels do not begin at multiples of 16 bytes: Hopper's own kernel takes several"
        return None

    def convolution(self, b: Builder, op: Op) -> Convolution:
        a, weight = op.attrs, b.weights(op)
        ep, feed, n = plan_epilogue(b.graph, op, channel_axis=1), None, together(b.arch, a.group, weight)
        if n == a.group:  # one group, or all groups as one
            feed = blocks_of(b, op, *planar(banded(weight, n, n) if n > 1 else weight, a))
        if feed is None:
            x = with_pitch(b, op, image(entering(b, op)))
            feed = Feed(x, *planar(weight, a), bands=a.group // n, together=n)
        return on_images(b, op, (feed,), ep.added_to(bias_of(b, op)), ep, added=False)


class GeneralGemm(GeneralKernel, MatrixProduct):
    """MatMul and Gemm of 16-bit floats and of tf32 whose second operand is a constant matrix, before Hopper."""

    name = "gemm_sm80"

    def refuse(self, b: Builder, op: Op) -> str | None:
        if (why := refusal(b, op)) is not None:
            return why
        if b.arch.startswith("sm_90"):
            return "Hopper's own kernel runs it"
        return product_refusal(b, op)


# ---------------------------------------------------------------- groups on Hopper's kernels

TILE = 64
"""Channels of wgmma's M, and of a step of K."""


def groups_together(groups: int, channels: int, inside: int = 0, aligned: int = 1) -> int:
    """Number of neighboring groups that form a band. A group has ``channels`` results and reads ``inside`` channels.
    The band has the fewest groups that fill tiles and read a multiple of ``aligned`` channels, or all groups."""
    whole = (n for n in range(1, groups) if groups % n == 0 and n * channels % TILE == n * inside % aligned == 0)
    return next(whole, groups)


class BandedConv(hopper_launch.HopperKernel):
    """Convolutions of several groups over one or two spatial axes. Neighboring groups form a band with zeros between them. Tensor
    cores multiply the zeros faster than other kernels avoid them. An Inf or NaN of one group reaches the others of its band."""

    name = "conv_bands_sm90"

    def together(self, op: Op, weight: Array) -> int:
        """Number of neighboring groups that form a band."""
        return groups_together(op.attrs.group, weight.shape[0] // op.attrs.group)

    def refuse(self, b: Builder, op: Op) -> str | None:
        if (why := constants_refusal(b, op)) is not None:
            return why
        a, weight = op.attrs, b.weights(op)
        if a.group == 1:
            return "it has one group"
        together = self.together(op, weight)
        read, aligned = together * weight.shape[1], 16 // op.outputs[0].type.dtype.itemsize
        if together < a.group and read % aligned:
            return f"a band of {read} channels is not a multiple of the 16 bytes that TMA addresses"
        geometry = (weight.shape[2:], a.strides, a.pads, a.dilations)
        return hopper_launch.refuse(b.arch, products(b, op), [geometry], parts=self.parts)

    def defer(self, b: Builder, op: Op) -> str | None:
        """If the kernel without zeros is predicted to be faster, it goes first until both are measured."""
        other = GeneralConv()
        return None if b.row_invariant or other.refuse(b, op) is not None else costlier(b, op, self, other)

    def convolution(self, b: Builder, op: Op) -> Convolution:
        a, weight = op.attrs, b.weights(op)
        ep, n = plan_epilogue(b.graph, op, channel_axis=1), self.together(op, weight)
        x = with_pitch(b, op, image(entering(b, op)))
        feed = Feed(x, *planar(weight, a), bands=a.group // n, together=n)
        return on_images(b, op, (feed,), ep.added_to(bias_of(b, op)), ep)
