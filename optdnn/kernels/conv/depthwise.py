"""Tactics of depthwise convolutions of channels-last images, sequences and volumes of floats; the means of their results."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from optdnn.ir.epilogue import Epilogue, plan_epilogue
from optdnn.ir.graph import Graph, Op
from optdnn.kernels.builder import Builder, TensorView, channels_last, map_dtype
from optdnn.kernels.conv import depthwise_bands_kernel as bands
from optdnn.kernels.conv import depthwise_kernel as depthwise
from optdnn.kernels.conv import depthwise_tma_kernel as tma
from optdnn.kernels.conv import maps as conv_maps
from optdnn.kernels.conv.depthwise_images import (
    Walked,
    as_launched,
    columns_of,
    depth_of,
    gap_of,
    image_of,
    joined,
    misplaced,
    of_images,
    taps_of,
    unit_of,
    walk,
)
from optdnn.kernels.conv.fused import bias_row, conv_attrs, finish, result_place, stage_operands
from optdnn.kernels.conv.hopper import bias_of, has_computed_bias
from optdnn.kernels.conv.hopper_launch import channel_row
from optdnn.kernels.conv.problem import Source
from optdnn.kernels.gemm.gemv_pair import adds_sums
from optdnn.kernels.launch import Launch
from optdnn.kernels.pointwise.pointwise import copied_later
from optdnn.kernels.quantized.quantized_store import QuantizedStore
from optdnn.kernels.tactic import MANY, Offer, ProblemTactic, Region, Tactic
from optdnn.ops.base import attrs_dict
from optdnn.runtime.cuda.gpu_facts import GpuFacts, no_kernels
from optdnn.types import BF16, FP16, FP32

Config = depthwise.Config | tma.Config | bands.Config
"""A tile of one of the three kernels: with loads by threads, with loads by TMA, or on tensor cores."""


@lru_cache(maxsize=1024)
def _offers(problem: depthwise.Problem, gpu: GpuFacts) -> tuple[Offer, ...]:
    """All kernels' configurations, the best predicted first.

    Tensor cores sum a row of taps at once; all other configurations sum tap after tap, unless threads share the frames of a volume. If
    there are configurations on tensor cores, they serve every batch size, else all others do. A squeeze sums each tile first, so that its order of summation depends
    on the configuration, and only one configuration serves every batch size."""
    found = ranked(problem, gpu)
    if not problem.squeeze:
        on_tensor_cores = any(isinstance(c, bands.Config) for _, c in found)
        return tuple(Offer(c, seconds, _order(c) == ("bands" if on_tensor_cores else "taps")) for seconds, c in found)
    ((_, many),) = ranked(replace(problem, batch=MANY), gpu)[:1] or ((0.0, None),)
    return with_invariant(found, many, lambda c: family(c).estimate(problem, c, gpu))


def _order(config: Config) -> str:
    """The order in which a configuration sums the products of a result."""
    if isinstance(config, bands.Config):
        return "bands"
    return "frames" if isinstance(config, depthwise.Config) and config.sharers > 1 else "taps"


def with_invariant(found: Sequence[tuple[float, Any]], many: Any, seconds: Callable[[Any], float]) -> tuple[Offer, ...]:
    """The ranked configurations with ``many``, which is the only one that serves every batch size."""
    if many is not None and all(c != many for _, c in found):
        found = sorted([*found, (seconds(many), many)], key=lambda item: item[0])
    return tuple(Offer(c, seconds, c == many) for seconds, c in found)


def family(config: Config) -> Any:
    """The module of the kernel that a configuration belongs to."""
    kinds = {tma.Config: tma, bands.Config: bands}
    return kinds.get(type(config), depthwise)


@lru_cache(maxsize=1024)
def ranked(problem: depthwise.Problem, gpu: GpuFacts) -> tuple[tuple[float, Config], ...]:
    """All kernels' configurations with their predicted seconds, the best first. GPUs before Hopper have no TMA and get
    only those of the first kernel. Cached: launches that compute a convolution with its neighbors compare themselves with it."""
    configs: list[Config] = [
        *depthwise.candidates(problem, gpu), *tma.candidates(problem, gpu), *bands.candidates(problem, gpu)
    ]  # fmt: skip
    return tuple(sorted(((family(c).estimate(problem, c, gpu), c) for c in configs), key=lambda item: item[0]))


def relu_before(op: Op) -> bool:
    """Whether the prologue of a convolution is a ReLU, which the kernels apply to the pixels that they load."""
    return [stage.kind for stage in op.attrs.prologue] == ["Relu"]


class MakesMeans(Tactic):
    """A convolution whose kernel also computes the means of its result."""

    @abstractmethod
    def pool(self, b: Builder, op: Op) -> Op | None:
        """The operator that takes the means, if the kernel can compute them; None if there is none, or its place does not suit."""

    def region(self, b: Builder, op: Op) -> Region:
        """The convolution, and the means of its result."""
        pool = self.pool(b, op)
        return Region(op) if pool is None else Region(op, after=(pool,))

    def place(self, b: Builder, op: Op) -> None:
        """Place the result, and its means without gaps."""
        super().place(b, op)
        if (pool := self.pool(b, op)) is not None:
            b.target(pool.value, _of_vectors(pool))


class DepthwiseTactic(MakesMeans, ProblemTactic):
    """A tactic on the depthwise kernels."""

    means: ClassVar[str]
    """The kind of the operator that takes the means."""

    def offers(self, problem: depthwise.Problem, gpu: GpuFacts) -> Sequence[Offer]:
        return _offers(problem, gpu)

    def neighbors(self, graph: Graph, op: Op) -> Sequence[Op]:
        """The operators that take the means of the result."""
        return self.pools(graph, op)

    def pools(self, graph: Graph, op: Op) -> Sequence[Op]:
        """The operators that take the means of a depthwise convolution's result."""
        weight = graph.constant_value(op.inputs[1])
        if weight is None or weight.ndim not in (4, 5) or weight.shape[1] != 1:
            return ()
        return [user for user in graph.users(op.value) if user.kind == self.means]


def suits(b: Builder, op: Op, pool: Op) -> bool:
    """Whether the means have the result's type (8-bit ones: int8 or uint8), and their place has no gaps."""
    place, out = b.reserved.get(pool.value), pool.outputs[0].type
    same = out.dtype == op.outputs[0].type.dtype or pool.kind == "QuantizedMean"
    return same and (place is None or place.is_like(_of_vectors(pool)))


def _of_vectors(pool: Op) -> tuple[int, ...]:
    """Strides of means without gaps."""
    _, channels, *ones = pool.outputs[0].type.static_shape
    return (channels, 1, *(1 for _ in ones))


class TiledDepthwise(DepthwiseTactic):
    """Depthwise convolutions of floats: channels-last images, sequences and volumes, which may be some channels of larger ones."""

    name = "depthwise_tiles"
    means = "GlobalAveragePool"
    kind: ClassVar[str] = "Conv"
    """The kind of the launch's meaning."""

    def refuse(self, b: Builder, op: Op) -> str | None:
        weight, a = b.graph.constant_value(op.inputs[1]), op.attrs
        if (why := no_kernels(b.arch)) is not None:
            return why
        if weight is None or weight.ndim not in (3, 4, 5) or weight.shape[1] != 1 or a.group != weight.shape[0]:
            return "it is not a depthwise convolution over one to three axes with constant weights"
        if op.outputs[0].type.dtype not in (FP16, BF16, FP32):
            return f"it is for floats of 16 and 32 bits, not {op.outputs[0].type.dtype.name}"
        if (channels := weight.shape[0] * columns_of(b, op)) % 4:
            return f"its {channels} channels are not a multiple of 4"
        if has_computed_bias(b, op):
            return "its bias is not constant"
        if a.prologue and not relu_before(op):
            return "its prologue is more than a ReLU"
        if (why := misplaced(*self._places(b, op))) is not None:
            return why
        if (wide := taps_of(weight)[-1]) > depthwise.MAX_TAPS:
            return f"a row of its filter has {wide} taps, more than {depthwise.MAX_TAPS}"
        return None if self.configs(b, op) else "no tile of the kernel fits it"

    def stages(self, b: Builder, op: Op) -> Epilogue:
        """The epilogue, as the kernels take it: those of 16-bit floats have stages with per-channel operands."""
        halves = op.outputs[0].type.dtype.itemsize == 2 and columns_of(b, op) == 1
        return plan_epilogue(b.graph, op, channel_axis=1, allow_numbers=halves)

    def pool(self, b: Builder, op: Op) -> Op | None:
        """The global average pool (squeeze-and-excitation)."""
        if self.stages(b, op).rest or columns_of(b, op) > 1:
            return None
        return next((user for user in self.pools(b.graph, op) if suits(b, op, user)), None)

    def place(self, b: Builder, op: Op) -> None:
        """Place the result, in the image's memory order if its columns are channels."""
        b.target(op.value, self._strides(op, columns_of(b, op)))
        super().place(b, op)

    @staticmethod
    def _strides(op: Op, columns: int) -> tuple[int, ...] | None:
        """Strides of the result; None: those of its layout."""
        return None if columns == 1 else joined(op.outputs[0].type.static_shape)

    def _places(self, b: Builder, op: Op) -> tuple[TensorView, TensorView, int]:
        """The tensors that the kernel reads and writes, the latter perhaps still to be made, and :func:`columns_of`."""
        columns, ep = columns_of(b, op), self.stages(b, op)
        strides = self._strides(op, columns)
        out = result_place(b, op, ep, b.result(op.value, strides), True, strides=strides)
        return b.source(op.inputs[0]), out, columns

    def problem(self, b: Builder, op: Op) -> depthwise.Problem:
        (*deep, high, wide), (read, made, columns) = taps_of(b.weights(op)), self._places(b, op)
        x, out = image_of(read, columns), image_of(made, columns)
        ep, found = self.stages(b, op), self.walked(b, op)
        depth = depth_of(read, made, deep[0] if deep else 1, found)
        _, channels, *size = x.shape
        strides, pads, dilations = of_images(found)
        source = Source(size[0], size[1], channels, (high, wide), strides, pads, dilations, depth=depth)
        dtype, pool = map_dtype(op.outputs[0].type.dtype), self.pool(b, op)
        unit = unit_of(x, out, gaps=(gap_of(read), gap_of(made)))
        added = self.residual(b, op, unit, columns)
        images = (x, out, added and image_of(added, columns))
        reads, writes, adds = ((v and conv_maps.image_places(v, unit)) or (0, 0) for v in images)
        return depthwise.Problem(
            out.shape[0], source, (("bias",), *ep.rendered), dtype, pool is not None, pitches=(reads[0], writes[0], adds[0]),
            images_apart=(reads[1], writes[1], adds[1]), gaps=(gap_of(read), gap_of(made), gap_of(added)), unit=unit, relu=relu_before(op),
            summed=pool is not None and adds_sums(b, pool), band=self.band(b, op),
        )  # fmt: skip

    def residual(self, b: Builder, op: Op, unit: int, columns: int) -> TensorView | None:
        """The residual as the kernel reads it: in place if its pixels begin at multiples of ``unit`` elements, else a copy, still to be
        made."""
        if (value := self.stages(b, op).residual) is None:
            return None
        x = b.seen(value)
        image, in_rows = image_of(x, columns), columns == 1 or (x.strides[1], x.strides[3]) == (columns, 1)
        if in_rows and not gap_of(x) % unit and conv_maps.image_places(image, unit) is not None:
            return x
        strides = channels_last(x.shape, x.shape[1]) if columns == 1 else joined(x.shape)
        return copied_later(b, op, x, "residual", strides)

    @staticmethod
    def band(b: Builder, op: Op) -> int:
        """Rows of the filter that the kernel adds at a time; 0: all."""
        (*_, high, wide) = taps_of(b.weights(op))
        return depthwise.rows_at_a_time((high, wide), op.outputs[0].type.dtype.itemsize)

    def walked(self, b: Builder, op: Op) -> Walked:
        """Strides, pads and dilations, as of :func:`walk`."""
        return walk(op.attrs)

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        problem, (_, out, columns) = self.problem(b, op), self._places(b, op)
        ep, target, between = self.stages(b, op), b.target(op.value), b.made(out)
        operands = {**self.reads(b, op, columns), "output": as_launched(between, columns)}
        if (added := self.residual(b, op, problem.unit, columns)) is not None:
            operands["residual"] = as_launched(b.made(added), columns)
        kind, attrs, reads = self.meaning(b, op, ep, operands, columns)
        operands["bias"] = channel_row(b, op, ep.added_to(bias_of(b, op)), ep, out.shape[1], operands["bias"])
        made = family(config).launch(problem, config, b.gpu)
        squeezed = self.pool(b, op)
        if squeezed is None:
            b.emit(self.covers(b, op), made, operands, kind, attrs, reads, [operands["output"]])
        else:
            emit_with_means(b, self.covers(b, op), squeezed, problem, config, made, operands, attrs, reads, of=kind)
        finish(b, op, ep, between, target)

    def more_attrs(self, b: Builder, op: Op) -> dict[str, Any]:
        """Attributes of the meaning besides those of a Conv."""
        return {}

    def covers(self, b: Builder, op: Op) -> Op:
        """The operator, with the nodes of all operators that the launch computes."""
        return op

    def reads(self, b: Builder, op: Op, columns: int = 1) -> dict[str, TensorView]:
        """The operands of a convolution, by their names in the launch."""
        x, weight = as_launched(b.made(b.source(op.inputs[0])), columns), b.weights(op).repeat(columns, 0)
        band = self.band(b, op)
        packed = b.constant(
            depthwise.pack_weights(weight.reshape(*weight.shape[:2], *taps_of(weight)), band),
            f"{op.outputs[0].name}.weights",
        )
        added = self.stages(b, op).added_to(bias_of(b, op))
        bias = bias_row(b, op, None if added is None else added.repeat(columns), len(weight))
        return {"input": x, "weights": packed, "bias": bias}

    def filtered(self, b: Builder, op: Op, operands: Mapping[str, TensorView], columns: int = 1) -> list[TensorView]:
        """Image, weights and bias of a convolution, as the launch's meaning reads them."""
        channels, taps, band = b.weights(op).shape[0] * columns, taps_of(b.weights(op)), self.band(b, op)
        held = (*taps[:-2], depthwise.rows_held(taps[-2], band), taps[-1])
        strides = (math.prod(held[i + 1 :]) * channels for i in range(len(taps)))
        logical = operands["weights"].view((channels, 1, *taps), (1, 0, *strides))
        return [operands["input"], logical, operands["bias"]]

    def meaning(
        self, b: Builder, op: Op, ep: Epilogue, operands: dict[str, TensorView], columns: int
    ) -> tuple[str, dict[str, Any], list[TensorView | None]]:
        """The meaning of the launch: kind, attributes and the tensors that it reads."""
        attrs = conv_attrs(self.walked(b, op), len(b.weights(op)) * columns, ep.stages, op.attrs.prologue)
        return (
            self.kind,
            attrs | self.more_attrs(b, op),
            [*self.filtered(b, op, operands, columns), *stage_operands(b, ep, operands.get("residual"))],
        )


def emit_with_means(
    b: Builder, op: Op, pool: Op, problem: depthwise.Problem, config: Config, launch: Launch,
    operands: dict[str, TensorView], attrs: dict[str, Any], reads: list[TensorView | None], mean: QuantizedStore | None = None,
    *, of: str = "",
) -> None:  # fmt: skip
    """Add a convolution that also sums its result. ``mean``: how 8-bit means are computed from sums; ``of``: as of
    :func:`emit_squeezed`."""
    _, tiles_x, tiles_y = family(config).tiles(problem, config)
    volumes, (_, frames) = problem.source.depth is not None, problem.averaged
    size = (1, *config.tile) if volumes else config.tile
    tile = Tile(family(config).squeeze_mode(problem, config), size, frames * tiles_x * tiles_y)
    second = depthwise.launch_squeeze(problem, tiles_x * tiles_y, b.gpu, mean)
    emit_squeezed(b, op, pool, tile, (launch, second), operands, attrs, reads, mean, of=of)


@dataclass(frozen=True)
class Tile:
    """The squeeze of a launch: means of whole images (``mode`` 2), or sums of ``count`` tiles per image or volume, of ``size``
    (``mode`` 1)."""

    mode: int
    size: tuple[int, ...]
    count: int


def emit_squeezed(
    b: Builder, op: Op, pool: Op, tile: Tile, launches: tuple[Launch, Launch], operands: dict[str, TensorView],
    attrs: dict[str, Any], reads: Sequence[TensorView | None], mean: QuantizedStore | None = None, *, of: str = "",
) -> None:  # fmt: skip
    """Add a convolution that also sums its result, and a second launch that adds up the sums of tiles, if it sums
    tiles. ``of``: the kind with these ``attrs``; "": the operator's."""
    (n, channels, *size), out = op.outputs[0].type.static_shape, operands["output"]
    means = b.target(pool.value)
    covers = replace(op, src=op.src | pool.src)
    own = {} if mean is None else {f"mean_{name}": value for name, value in attrs_dict(pool.attrs).items()}
    attrs = {
        "conv": tuple(sorted(attrs)),
        **attrs,
        "tile": tile.size if tile.mode == 1 else (),
        "of": of or op.kind,
        **own,
    }
    if tile.mode == 2:
        b.emit(covers, launches[0], {**operands, "means": means}, "ConvSqueeze", attrs, reads, [out, means])
        return
    sums = b.new(f"{pool.outputs[0].name}.sums", np.dtype(np.float32), (n, tile.count, channels))
    b.emit(covers, launches[0], {**operands, "sums": sums}, "ConvSqueeze", attrs, reads, [out, sums])
    if mean is None:
        b.sums[pool.value] = sums  # for a gate; with it, the second launch goes if nothing else reads the means
    pixels = {"pixels": math.prod(size), **own}
    vectors = means.view((n, channels, 1, 1), (means.strides[0], 1, 1, 1))
    b.emit(pool, launches[1], {"sums": sums, "means": means}, "SqueezeFinish", pixels, [sums], [vectors])
