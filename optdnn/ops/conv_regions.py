"""Regions of a lowered program around a convolution; see :mod:`optdnn.ops.regions`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from optdnn.errors import ShapeError
from optdnn.ops.base import EXACT, MOVEMENT, PRODUCT_TOL, Attrs, Call, NestedAttrs, Result, Stage, attrs_dict
from optdnn.ops.checks import agree, agree_all, free, per_element, require_length, require_rank
from optdnn.ops.conv import ConvAttrs, ConvGeometry
from optdnn.ops.definition import OpDef
from optdnn.ops.fused import infer_stages
from optdnn.ops.held import held_attrs, infer_as, plain_held, region
from optdnn.ops.quantized import QuantizedConvAttrs, QuantizedMeanAttrs
from optdnn.ops.regions import without
from optdnn.ops.values import ceil_div
from optdnn.runtime.reference.conv_regions import prefixed
from optdnn.types import FP32, INT8, DType, TensorType


@dataclass(frozen=True)
class SpaceToDepthImageAttrs(Attrs):
    """Blocks of ``block`` x ``block`` pixels as channels, filled up to ``lanes``.

    The image is first multiplied by ``factors`` and shifted by ``shifts``, one per channel (empty: neither).
    """

    block: int
    lanes: int
    factors: tuple[float, ...] = ()
    shifts: tuple[float, ...] = ()


@dataclass(frozen=True)
class QuantizedBlocksAttrs(Attrs):
    """Like :class:`SpaceToDepthImageAttrs`, for an image divided by ``scale`` and stored in ``dtype`` around ``zero``.

    Rows have ``width`` blocks; the first ``before`` of them, like all elements outside of the image, are ``zero``.
    """

    block: int
    lanes: int
    before: int
    width: int
    scale: float
    dtype: DType = INT8
    zero: int = 0


@dataclass(frozen=True)
class BlocksToSpaceAttrs(Attrs):
    """The channels hold ``channels`` values for each pixel of a block of ``blocks`` pixels.

    The result has the spatial ``sizes`` that remain after ``crops`` are cut from the beginnings.
    """

    blocks: tuple[int, int]
    crops: tuple[int, int]
    sizes: tuple[int, ...]
    channels: int
    prologue: tuple[Stage, ...] = ()
    epilogue: tuple[Stage, ...] = ()


@dataclass(frozen=True)
class ConvBlocksAttrs(ConvAttrs):
    """The attributes of a convolution, and of :class:`BlocksToSpaceAttrs` for its channels."""

    blocks: tuple[int, int] = (1, 1)
    crops: tuple[int, int] = (0, 0)
    sizes: tuple[int, ...] = ()
    channels: int = 1


@dataclass(frozen=True)
class ImageConvAttrs(ConvGeometry):
    """A convolution's attributes for an image times ``factors`` plus ``shifts``, rounded to ``dtype``."""

    factors: tuple[float, ...] = ()
    shifts: tuple[float, ...] = ()
    dtype: str = "float16"
    prologue: tuple[Stage, ...] = ()
    epilogue: tuple[Stage, ...] = ()

    @property
    def conv(self) -> ConvAttrs:
        """The attributes of the convolution."""
        own = without(attrs_dict(self), "factors", "shifts", "dtype", "window", "begins", "size")
        return ConvAttrs(**own)


@dataclass(frozen=True)
class PooledImageConvAttrs(ImageConvAttrs):
    """Also max pooling: windows of ``window`` x ``window`` with stride 2; the first one starts ``begins`` before the image.

    ``size``: rows and columns of the result.
    """

    window: int = 2
    begins: tuple[int, int] = (0, 0)
    size: tuple[int, int] = (1, 1)


@dataclass(frozen=True)
class ConvSumAttrs(Attrs):
    """``sources``: strides, pads and dilations of each convolution. Stages read operands 4, 5, ... as 1, 2, ..."""

    sources: tuple[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]], ...]
    epilogue: tuple[Stage, ...] = ()


@dataclass(frozen=True)
class PairedConvAttrs(Attrs):
    """``sources``: strides, pads and dilations of each convolution of a sum.

    ``beside``: stages of the second sum; ``epilogue``: stages of the first sum, which read the second as operand 1.
    """

    sources: tuple[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]], ...]
    epilogue: tuple[Stage, ...]
    beside: tuple[Stage, ...]


@dataclass(frozen=True)
class GatedConvAttrs(ConvGeometry):
    """The geometry of two convolutions.

    ``beside``: stages of the second; ``epilogue``: stages of the first, which read the second as operand 1.
    """

    epilogue: tuple[Stage, ...] = ()
    beside: tuple[Stage, ...] = ()


@dataclass(frozen=True)
class SeparableConvAttrs(NestedAttrs):
    """Two convolutions. The first reads the first ``operands`` operands; its result is rounded to ``through``."""

    first: ConvAttrs
    second: ConvAttrs
    through: str
    operands: int = 3

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> SeparableConvAttrs:
        first, second = (held_attrs("Conv", prefixed(given, prefix)) for prefix in ("first_", "second_"))
        assert isinstance(first, ConvAttrs)
        assert isinstance(second, ConvAttrs)
        return cls(first, second, given["through"], given["operands"])

    def plain(self) -> dict[str, Any]:
        first = {f"first_{name}": value for name, value in plain_held("Conv", self.first).items()}
        second = {f"second_{name}": value for name, value in plain_held("Conv", self.second).items()}
        return {**first, **second, "through": self.through, "operands": self.operands}


@dataclass(frozen=True)
class ChainedQuantizedAttrs(NestedAttrs):
    """Two QuantizedConv: the first one reads ``operands`` operands, the second one its result. ``kept``: the first result is
    also an output."""

    first: QuantizedConvAttrs
    second: QuantizedConvAttrs
    kept: bool
    operands: int = 3

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> ChainedQuantizedAttrs:
        first, second = (QuantizedConvAttrs(**prefixed(given, prefix)) for prefix in ("first_", "second_"))
        return cls(first, second, given["kept"], given["operands"])

    def plain(self) -> dict[str, Any]:
        first, second = (attrs_dict(x) for x in (self.first, self.second))
        made = {f"first_{k}": v for k, v in first.items()} | {f"second_{k}": v for k, v in second.items()}
        return {**made, "kept": self.kept, "operands": self.operands}


@dataclass(frozen=True)
class ExcitationGateAttrs(SeparableConvAttrs):
    """Two products on the means of images, which are read as the sums of their tiles. ``pixels``: the pixels of an image."""

    pixels: int = 1

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> ExcitationGateAttrs:
        convs = SeparableConvAttrs.read(given)
        return cls(convs.first, convs.second, convs.through, convs.operands, given["pixels"])

    def plain(self) -> dict[str, Any]:
        return {**super().plain(), "pixels": self.pixels}


@dataclass(frozen=True)
class ConvSqueezeAttrs(NestedAttrs):
    """The convolution ``of`` (a kind) with its attributes ``conv``, and the sums of tiles of ``tile`` pixels along each axis.

    ``tile`` (): the means of whole images instead. ``mean``: how to compute the means of 8-bit results from sums.
    """

    of: str
    conv: Attrs
    tile: tuple[int, ...] = ()
    mean: QuantizedMeanAttrs | None = None

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> ConvSqueezeAttrs:
        conv = held_attrs(given["of"], {name: given[name] for name in given["conv"]})
        return cls(given["of"], conv, given["tile"], _mean(given))

    def plain(self) -> dict[str, Any]:
        conv = plain_held(self.of, self.conv)
        return {"conv": tuple(sorted(conv)), **conv, "tile": self.tile, "of": self.of, **_plain_mean(self.mean)}


@dataclass(frozen=True)
class SqueezeFinishAttrs(NestedAttrs):
    """The number of an image's ``pixels``; ``mean`` as for :class:`ConvSqueezeAttrs`."""

    pixels: int
    mean: QuantizedMeanAttrs | None = None

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> SqueezeFinishAttrs:
        return cls(given["pixels"], _mean(given))

    def plain(self) -> dict[str, Any]:
        return {"pixels": self.pixels, **_plain_mean(self.mean)}


def _mean(given: Mapping[str, Any]) -> QuantizedMeanAttrs | None:
    values = prefixed(given, "mean_")
    return QuantizedMeanAttrs(**values) if values else None


def _plain_mean(mean: QuantizedMeanAttrs | None) -> dict[str, Any]:
    return {} if mean is None else {f"mean_{name}": value for name, value in attrs_dict(mean).items()}


# ---------------------------------------------------------------- shapes


def _infer_space_to_depth(call: Call) -> Result:
    a: SpaceToDepthImageAttrs = call.attrs
    x = call.type(0)
    require_rank(x, 4, "SpaceToDepthImage input")
    n, channels, *sizes = x.dims
    if isinstance(channels, int) and channels * a.block**2 > a.lanes:
        raise ShapeError(
            f"SpaceToDepthImage: blocks of {a.block} x {a.block} pixels of {x} take more than {a.lanes} lanes"
        )
    for name, numbers in (("factors", a.factors), ("shifts", a.shifts)):
        if numbers:
            agree(len(numbers), channels, f"SpaceToDepthImage {name} do not fit the channels of {x}")
    return Result((TensorType(FP32, (n, a.lanes, *(ceil_div(d, a.block) for d in sizes))),))


def _infer_quantized_blocks(call: Call) -> Result:
    a: QuantizedBlocksAttrs = call.attrs
    x = call.type(0)
    require_rank(x, 4, "QuantizedBlocks input")
    n, _, height, _ = x.dims
    return Result((TensorType(a.dtype, (n, a.lanes, ceil_div(height, a.block), a.width)),))


def _placed(call: Call, made: TensorType, a: BlocksToSpaceAttrs | ConvBlocksAttrs) -> TensorType:
    """Blocks of pixels at their positions in the image."""
    require_rank(made, 4, f"{call.kind} blocks")
    agree(made.dims[1], a.blocks[0] * a.blocks[1] * a.channels, f"{call.kind}: lanes of {made} and the blocks differ")
    if len(a.sizes) not in (1, 2):
        raise ShapeError(f"{call.kind} sizes {a.sizes}; there must be one or two")
    return made.with_shape((made.dims[0], a.channels, *a.sizes))


def _infer_blocks_to_space(call: Call) -> Result:
    placed = _placed(call, call.type(0), call.attrs)
    return Result((infer_stages(call.attrs.epilogue, placed, call.types),))


def _conv_part(a: ConvBlocksAttrs) -> ConvAttrs:
    """The attributes of the convolution alone."""
    return ConvAttrs(**without(attrs_dict(a), "blocks", "crops", "sizes", "channels"))


def _infer_conv_blocks(call: Call) -> Result:
    (made,) = infer_as(call, "Conv", _conv_part(call.attrs), call.types).types
    return Result((_placed(call, made, call.attrs),))


def _infer_image_conv(call: Call) -> Result:
    x = call.type(0).with_dtype(call.type(1).dtype)
    return infer_as(call, "Conv", call.attrs.conv, (x, *call.types[1:]))


def _infer_pooled_image(call: Call) -> Result:
    (y,) = _infer_image_conv(call).types
    require_rank(y, 4, "PooledImageConv result")
    return Result((y.with_shape((*y.dims[:2], *call.attrs.size)),))


def _infer_conv_sum(call: Call) -> Result:
    a: ConvSumAttrs = call.attrs
    require_length(a.sources, 2, "ConvSum sources")
    first, second = (
        infer_as(call, "Conv", ConvAttrs(*source), call.types[2 * k : 2 * k + 2]).types[0]
        for k, source in enumerate(a.sources)
    )
    agree_all(first.dims, second.dims, f"ConvSum adds {first} and {second}")
    return Result((infer_stages(a.epilogue, first, (first, *call.types[4:])),))


def _infer_paired_conv(call: Call) -> Result:
    a: PairedConvAttrs = call.attrs
    require_length(call.types, 2 + 3 * len(a.sources), "PairedConv operands")
    slots, results = (0, 1, 2, *range(5, len(call.types))), []
    for k, source in enumerate(a.sources):
        x, *both = (call.type(i) for i in slots[3 * k : 3 * k + 3])
        require_rank(both[0], 5, "PairedConv weights")
        agree_all(both[0].dims, both[1].dims, f"PairedConv weights {both[0]} and {both[1]} differ")
        eights, eight, *rest = both[0].dims
        weight = both[0].with_shape((eights * eight, *rest))
        results.append(infer_as(call, "Conv", ConvAttrs(*source), (x, weight)).types[0])
    for other in results[1:]:
        agree_all(results[0].dims, other.dims, f"PairedConv adds {results[0]} and {other}")
    return Result((results[0],))


def _infer_gated_conv(call: Call) -> Result:
    require_length(call.types, 6, "GatedConv operands")
    geometry = ConvAttrs(**without(attrs_dict(call.attrs), "epilogue", "beside"))
    first, second = (infer_as(call, "Conv", geometry, call.types[k : k + 3]).types[0] for k in (0, 3))
    agree_all(first.dims, second.dims, f"GatedConv combines {first} and {second}")
    return Result((first,))


def _infer_pooled(call: Call) -> Result:
    (y,) = infer_as(call, "Conv", call.attrs, call.types).types
    require_rank(y, 4, "PooledConv result")
    n, c, h, w = y.dims
    return Result((y.with_shape((n, c, h // 2, w // 2)),))


def _infer_mean_product(call: Call) -> Result:
    x = call.type(0)
    require_rank(x, 4, "MeanProduct input")
    return infer_as(call, "Conv", call.attrs, (x.with_shape((*x.dims[:2], 1, 1)), *call.types[1:]))


def _infer_chained(call: Call, kind: str = "Conv") -> Result:
    """The results of both convolutions."""
    a: SeparableConvAttrs | ChainedQuantizedAttrs = call.attrs
    between = infer_as(call, kind, a.first, call.types[: a.operands]).types
    return Result((*between, *infer_as(call, kind, a.second, (*between, *call.types[a.operands :])).types))


def _infer_separable(call: Call) -> Result:
    return Result(_infer_chained(call).types[1:])


def _infer_chained_quantized(call: Call) -> Result:
    types = _infer_chained(call, "QuantizedConv").types
    return Result(types if call.attrs.kept else types[1:])


def _infer_excitation_gate(call: Call) -> Result:
    x = call.type(0)
    require_rank(x, 3, "ExcitationGate input")
    vectors = TensorType(call.type(1).dtype, (x.dims[0], x.dims[2], 1, 1))
    return _infer_separable(replace(call, types=(vectors, *call.types[1:])))


def _infer_conv_squeeze(call: Call) -> Result:
    a: ConvSqueezeAttrs = call.attrs
    (y,) = infer_as(call, a.of, a.conv, call.types).types
    n, c, *size = y.dims
    if not a.tile:
        dtype = y.dtype if a.mean is None else a.mean.output_dtype
        return Result((y, TensorType(dtype, (n, c, *(1 for _ in size)))))
    require_length(a.tile, len(size), "ConvSqueeze tile")
    tiles = math.prod(ceil_div(n, of_tile) for n, of_tile in zip(size, a.tile, strict=True))
    return Result((y, TensorType(FP32, (n, tiles, c))))


def _infer_squeeze_finish(call: Call) -> Result:
    a: SqueezeFinishAttrs = call.attrs
    sums = call.type(0)
    require_rank(sums, 3, "SqueezeFinish sums")
    n, _, c = sums.dims
    return Result((TensorType(sums.dtype if a.mean is None else a.mean.output_dtype, (n, c, 1, 1)),))


# ---------------------------------------------------------------- definitions


DEFS: tuple[OpDef, ...] = (
    region("BlocksToSpace", _infer_blocks_to_space, BlocksToSpaceAttrs, cost=free, tol=EXACT, traits=MOVEMENT, arity=1),
    region("ChainedConv", _infer_chained, SeparableConvAttrs, tol=PRODUCT_TOL),
    region("ChainedQuantized", _infer_chained_quantized, ChainedQuantizedAttrs, tol=EXACT),
    region("ConvBlocks", _infer_conv_blocks, ConvBlocksAttrs, tol=PRODUCT_TOL, arity=3),
    region("ConvSqueeze", _infer_conv_squeeze, ConvSqueezeAttrs, tol=PRODUCT_TOL),
    region("ConvSum", _infer_conv_sum, ConvSumAttrs, tol=PRODUCT_TOL),
    region("GatedConv", _infer_gated_conv, GatedConvAttrs, tol=PRODUCT_TOL, arity=6),
    region("ImageConv", _infer_image_conv, ImageConvAttrs, tol=PRODUCT_TOL, arity=3),
    region("ExcitationGate", _infer_excitation_gate, ExcitationGateAttrs, tol=PRODUCT_TOL),
    region("MeanProduct", _infer_mean_product, ConvAttrs, tol=PRODUCT_TOL, arity=3),
    region("PairedConv", _infer_paired_conv, PairedConvAttrs, tol=PRODUCT_TOL),
    region("PooledConv", _infer_pooled, ConvAttrs, tol=PRODUCT_TOL, arity=3),
    region("PooledImageConv", _infer_pooled_image, PooledImageConvAttrs, tol=PRODUCT_TOL, arity=3),
    region("QuantizedBlocks", _infer_quantized_blocks, QuantizedBlocksAttrs, tol=EXACT),
    region("SeparableConv", _infer_separable, SeparableConvAttrs, tol=PRODUCT_TOL),
    region("SpaceToDepthImage", _infer_space_to_depth, SpaceToDepthImageAttrs, cost=free, traits=MOVEMENT),
    region("SqueezeFinish", _infer_squeeze_finish, SqueezeFinishAttrs, cost=per_element(1)),
)
