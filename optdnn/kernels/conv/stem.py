"""Convolutions of an image of few channels in one launch, which applies layout, cast and normalization on the way to
shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from optdnn.ir.epilogue import Epilogue, plan_epilogue
from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder, TensorView, has_tf32, map_dtype, up
from optdnn.kernels.conv import maps as conv_maps
from optdnn.kernels.conv import stem_cost as conv_stem_cost
from optdnn.kernels.conv import stem_kernel as stem
from optdnn.kernels.conv.fused import bias_row, conv_attrs, finish, result_place, stage_operands
from optdnn.kernels.conv.hopper import HopperConv, bias_of, has_computed_bias, image, planar, with_pitch
from optdnn.kernels.conv.problem import Source
from optdnn.kernels.conv.stem_input import channel_affine, pixel_source
from optdnn.kernels.gemm.hopper_matmul import swapped
from optdnn.kernels.tactic import Offer, Tactic, kernel_offers
from optdnn.ops.conv import of_one_channel
from optdnn.runtime.cuda.gpu_facts import GpuFacts, no_kernels
from optdnn.runtime.cuda.launches.plan import TF32
from optdnn.types import BF16, FP16, FP32, Array, DType, to_tf32

_Pair = tuple[int, int]


def stem_offers(problem: stem.Problem, gpu: GpuFacts) -> tuple[Offer, ...]:
    """The configurations, all of which sum in the same order."""
    return kernel_offers(conv_stem_cost, problem, gpu)


def no_operands(b: Builder, op: Op, dtypes: Sequence[DType] = (FP16, BF16)) -> str | None:
    """Why a stem kernel does not take the element type or the bias of a convolution, or None. ``dtypes``: its factors' types."""
    if op.outputs[0].type.dtype not in dtypes:
        return f"its factors are {' or '.join(d.name for d in dtypes)}, not {op.outputs[0].type.dtype.name}"
    if has_computed_bias(b, op):
        return "its bias is not constant"
    return None


def factor_type(op: Op) -> str:
    """The kernel's name for the element type of a convolution's factors."""
    dtype = op.outputs[0].type.dtype
    return "tfloat32" if dtype == FP32 and has_tf32(op) else map_dtype(dtype)


def no_tile(b: Builder, problem: stem.Problem) -> str | None:
    """Why a stem kernel cannot run the problem on the GPU, or None."""
    if (why := stem.no_kernel(problem)) is not None:
        return why
    return None if stem_offers(problem, b.gpu) else "no tile of the kernel fits it"


class StemConv(Tactic):
    """A network's first convolution. It reads the image in any memory order and element type."""

    name = "conv_stem"
    dtypes: ClassVar[tuple[DType, ...]] = (FP16, BF16, FP32)
    """The types of its factors."""
    move: ClassVar[str] = "a change of layout"
    """How the image is moved for Hopper's own kernel."""

    def refuse(self, b: Builder, op: Op) -> str | None:
        if (why := no_kernels(b.arch)) is not None:
            return why
        weight = b.graph.constant_value(op.inputs[1])
        if weight is None or weight.ndim not in (3, 4) or op.attrs.group != 1:
            return "it is not an ungrouped convolution over one or two axes with constant weights"
        if weight.shape[1] > stem.CHANNELS:
            return f"it is for images of up to {stem.CHANNELS} channels, not {weight.shape[1]}"
        if (why := no_operands(b, op, self.dtypes)) is not None:
            return why
        if 0 in weight.shape:
            return "it has no channels"
        if of_one_channel(weight.shape):
            return "its one filter of one channel would leave most of a tile empty"
        if channel_affine(b, op) is None:
            return "its prologue is more than a factor and an addend per channel"
        return no_tile(b, self._problem(b, op))

    def defer(self, b: Builder, op: Op) -> str | None:
        """If Hopper's own kernel after a move of the image is predicted to be faster, it goes first until both are measured.
        With ``row_invariant``, it never does: it sums in another order."""
        if b.row_invariant:
            return None
        other = HopperConv()
        offers = other.configs(b, op) if other.refuse(b, op) is None else ()
        if not offers:
            return None
        own = stem_offers(self._problem(b, op), b.gpu)[0].predicted
        theirs = offers[0].predicted + self._moving_seconds(b, op)
        if own <= theirs:
            return None
        return f"it is predicted to take {own * 1e6:.1f} us, {self.move} and {other.name} {theirs * 1e6:.1f}"

    def _moving_seconds(self, b: Builder, op: Op) -> float:
        """Predicted seconds of the :attr:`move` that Hopper's own kernel needs."""
        return conv_stem_cost.layout_seconds(self._problem(b, op))

    def _column(self, b: Builder, op: Op) -> bool:
        """Whether image and filters are one pixel wide: a sequence. A tile is a part of a row, so a column becomes a row."""
        x, weight = (b.graph.type(v).static_shape for v in op.inputs[:2])  # type: ignore[arg-type]
        return len(x) == 4 and x[3] == weight[3] == 1 < weight[2] and not any(op.attrs.pads[1::2])

    def _turned(self, b: Builder, op: Op, x: TensorView) -> TensorView:
        """A feature map as NCHW; a column as a row."""
        return swapped(x) if self._column(b, op) else image(x)

    def _geometry(self, b: Builder, op: Op, weight: Array) -> tuple[Array, _Pair, tuple[int, int, int, int], _Pair]:
        """Weights, strides, pads and dilations over two axes; of a row for a column."""
        weight, strides, pads, dilations = planar(weight, op.attrs)
        if not self._column(b, op):
            return weight, strides, pads, dilations
        top, left, bottom, right = pads
        return weight.swapaxes(2, 3), strides[::-1], (left, top, right, bottom), dilations[::-1]

    def _source(self, b: Builder, op: Op) -> TensorView:
        return self._turned(b, op, b.source(pixel_source(b, op.inputs[0])))

    def _problem(self, b: Builder, op: Op) -> stem.Problem:
        weight, strides, pads, dilations = self._geometry(b, op, b.weights(op))
        x, affine = self._source(b, op), channel_affine(b, op)
        n, c, h, w = x.shape
        stages = (("bias",), *plan_epilogue(b.graph, op, channel_axis=1).rendered)
        normalize = affine is not None and bool(affine.factors or affine.shifts)
        return stem.Problem(
            n, Source(h, w, c, weight.shape[2:], strides, pads, dilations), up(weight.shape[0], 8), x.strides,  # type: ignore[arg-type]
            map_dtype(x.dtype), x.offset % 16, stages, factor_type(op), normalize,
        )  # fmt: skip

    def configs(self, b: Builder, op: Op) -> Sequence[Offer]:
        return stem_offers(self._problem(b, op), b.gpu)

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        problem, ep, target = self._problem(b, op), plan_epilogue(b.graph, op, channel_axis=1), b.target(op.value)
        wide = problem.channels
        between = b.made(result_place(b, op, ep, target, conv_maps.storable_whole(b, image(target)), wide))
        out = self._turned(b, op, between)
        residual = None
        if ep.residual is not None:
            residual = b.made(with_pitch(b, op, self._turned(b, op, b.operand(ep.residual)), added=True))
        operands, attrs, reads = self._described(b, op, problem, ep)
        operands["output"] = out
        if residual is not None:
            operands["residual"] = residual
        made = stem.launch(
            problem, config, b.gpu, conv_maps.pitch_of(out) or wide,
            (conv_maps.pitch_of(residual) or 0) if residual is not None else 0, (attrs["factors"], attrs["shifts"]),
        )  # fmt: skip
        reads += stage_operands(b, ep, residual)
        b.emit(op, made, operands, "ImageConv", attrs, reads, [self._written(b, op, out)])
        finish(b, op, ep, between, target)

    def _described(
        self, b: Builder, op: Op, problem: stem.Problem, ep: Epilogue
    ) -> tuple[dict[str, TensorView], dict[str, Any], list[TensorView | None]]:
        """The image and the constants by operand name, the attributes of the meaning, and the tensors that the meaning reads."""
        weight: Array | None = b.graph.constant_value(op.inputs[1])
        affine = channel_affine(b, op)
        assert weight is not None
        assert affine is not None
        weight, *geometry = self._geometry(b, op, weight)
        x = b.made(self._source(b, op))
        rounded = to_tf32(weight) if problem.dtype == "tfloat32" else weight
        packed = b.constant(stem.pack_weights(problem, rounded), f"{op.outputs[0].name}.weights")
        bias = bias_row(b, op, ep.added_to(bias_of(b, op)), problem.channels)
        steps, at = stem.weight_view(problem)
        attrs = {"factors": affine.factors, "shifts": affine.shifts, "dtype": problem.dtype}
        attrs |= {TF32: (1,)} if problem.dtype == "tfloat32" else {}
        attrs |= conv_attrs(self._meant(b, op, tuple(geometry)), 1, ep.stages)
        shape = self._weight_shape(b, op, weight)
        reads: list[TensorView | None] = [x, packed.view(shape, steps, at), bias.view((len(weight),), (1,))]
        return {"image": x, "weights": packed, "bias": bias}, attrs, reads

    def _meant(self, b: Builder, op: Op, geometry: Any) -> Any:
        """Strides, pads and dilations in the launch's meaning."""
        return geometry

    def _weight_shape(self, b: Builder, op: Op, weight: Array) -> tuple[int, ...]:
        """The shape of the weights in the launch's meaning."""
        return weight.shape

    def _written(self, b: Builder, op: Op, out: TensorView) -> TensorView:
        """The result in the launch's meaning."""
        return out
