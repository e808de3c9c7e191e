"""Two successive products of few vectors in one launch: the gate of squeeze-and-excitation, or a small perceptron.

The launch is emitted at the second one. The cost model (:meth:`VectorPair.defer`) predicts, or the autotuner measures, whether two
launches are faster.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, ClassVar

import numpy as np

from optdnn.ir.epilogue import Epilogue, plan_epilogue
from optdnn.ir.graph import Graph, Op
from optdnn.kernels.builder import Builder, TensorView, channels_last, map_dtype, up
from optdnn.kernels.conv import hopper_launch
from optdnn.kernels.conv import maps as conv_maps
from optdnn.kernels.conv import problem as conv_problem
from optdnn.kernels.conv.fused import bias_row, conv_attrs
from optdnn.kernels.conv.hopper import bias_of
from optdnn.kernels.conv.pair import ONE_PIXEL, ConvPair, Kind, scalars
from optdnn.kernels.conv.problem import Source
from optdnn.kernels.gemm import gemv_pair_kernel as pair
from optdnn.kernels.gemm.hopper import MatrixProduct, product_refusal, rows_of
from optdnn.kernels.gemm.normed import NormedGemm
from optdnn.kernels.gemm.paired import multiplier
from optdnn.kernels.gemm.row_norms import PRODUCTS
from optdnn.kernels.pointwise.pointwise import copied
from optdnn.kernels.ranking import two_are_better
from optdnn.kernels.tactic import Offer, kernel_offers
from optdnn.runtime.cuda.gpu_facts import GpuFacts, fitted
from optdnn.types import Array

GAIN = 0.6
"""One launch must be predicted to take at most this fraction of the time of two. Two convolutions of one pixel take about 0.6 of their
prediction, since the second one hardly waits for the first."""
VIEWS = frozenset({"Reshape", "Transpose", "Layout", "Squeeze", "Unsqueeze"})
"""Kinds that only move axes, or add and remove axes of size 1, where the means of volumes become vectors."""


@lru_cache(maxsize=1024)
def _apart(problem: pair.Problem, gpu: GpuFacts) -> float:
    """Predicted seconds of two launches."""
    sizes = ((problem.depth, problem.hidden, problem.between), (problem.hidden, problem.channels, problem.epilogue))
    made = (
        conv_problem.Problem(problem.images, up(out, 8), (Source(1, 1, up(depth, 8)),), stages, problem.dtype)
        for depth, out, stages in sizes
    )
    return sum(min((o.predicted for o in hopper_launch.ranked(p, gpu)), default=1.0) for p in made)


class VectorPair(ConvPair):
    """Two products of vectors of 16-bit floats with constant matrices, on Hopper."""

    name = "gemv_pair_sm90"
    needs = "clusters"
    axis: ClassVar[int]
    """The axis of the channels."""
    wide = True
    row_invariant: ClassVar[bool] = False
    """Other numbers of images take other configurations or tactics, which sum in another order."""

    @staticmethod
    @abstractmethod
    def factors(b: Builder, op: Op) -> tuple[Array, Array | None]:
        """The matrix (channels, depth), and the row that is added."""

    @staticmethod
    @abstractmethod
    def vectors(x: TensorView) -> TensorView | None:
        """A tensor as NCHW of images of one pixel; None if its vectors are not contiguous."""

    def unfit(self, b: Builder, op: Op, first: Op) -> str | None:
        if self.vectors(b.result(op.value)) is None:
            return "the channels of its result are not contiguous"
        if any(ep.rest or ep.residual is not None for ep in self.epilogues(b, first, op)):
            return "what follows one of the products is more than an activation"
        if not kernel_offers(pair, self.problem(b, op), b.gpu):
            return pair.refuse(
                self.problem(b, op), pair.Config(pair.CLUSTERS[-1], cluster=True), shared=b.gpu.shared_per_block
            )
        return None

    def defer(self, b: Builder, op: Op) -> str | None:
        """Unmeasured, the cost model decides. If sums of tiles are to be added up, a further launch would take at least as long as
        this one does for them."""
        problem, gpu = replace(self.problem(b, op), pixels=0, tiles=0), fitted(b.gpu)
        return two_are_better(kernel_offers(pair, problem, gpu)[0].predicted, _apart(problem, gpu), GAIN)

    def epilogues(self, b: Builder, first: Op, op: Op) -> tuple[Epilogue, Epilogue]:
        """The stages after each product."""
        return (
            plan_epilogue(b.graph, first, channel_axis=self.axis, allow_residual=False),
            plan_epilogue(b.graph, op, channel_axis=self.axis, allow_residual=False, allow_wide=True),
        )

    def source(self, b: Builder, op: Op) -> TensorView:
        """The launch's input: one vector per image, in place or as a copy."""
        given = b.operand(self.first(b.graph, op).inputs[0])
        x = self.vectors(given)
        if x is not None and x.offset % 8 == 0 and _pitch(x) % 8 == 0:
            return x
        copy = copied(b, op, given, "vectors", channels_last(given.shape, given.shape[1]) if self.axis == 1 else None)
        found = self.vectors(copy)
        assert found is not None
        return found

    def problem(self, b: Builder, op: Op) -> pair.Problem:
        """The kernel's problem. If a convolution may store the sums of tiles, their number is a guess until it is planned."""
        first, out = self.first(b.graph, op), op.outputs[0].type
        types = b.graph.type(first.inputs[0]), first.outputs[0].type, out  # type: ignore[arg-type]
        depth, hidden, channels = (t.static_shape[self.axis] for t in types)
        between, ep = self.epilogues(b, first, op)
        stages = (("bias",), *between.rendered), (("bias",), *ep.rendered)
        images = math.prod(out.static_shape) // channels
        pool = _means(b.graph, first)
        tiles = 0 if pool is None else _likely_tiles(b.graph, pool, images)
        pixels = _pixels(b.graph, pool) if pool is not None and tiles else 0
        dtype, result = map_dtype(first.outputs[0].type.dtype), map_dtype(out.dtype)
        return pair.Problem(images, depth, hidden, channels, stages[0], stages[1], dtype, pixels, tiles, result)

    def configs(self, b: Builder, op: Op) -> Sequence[Offer]:
        """The configurations. Each one sums in the same order for any number of images."""
        return kernel_offers(pair, self.problem(b, op), b.gpu)

    def summed(
        self, b: Builder, op: Op, problem: pair.Problem, config: pair.Config
    ) -> tuple[TensorView, pair.Problem] | None:
        """The sums of tiles from which the launch computes the means, and its problem; None if there are no sums, or the kernel
        cannot take them."""
        pool = _means(b.graph, self.first(b.graph, op))
        found = None if pool is None else b.sums.get(pool.value)
        if pool is None or found is None:
            return None
        whole = replace(problem, pixels=_pixels(b.graph, pool), tiles=found.shape[1])
        return None if pair.refuse(whole, config, shared=b.gpu.shared_per_block) is not None else (found, whole)

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        first, problem = self.first(b.graph, op), self.problem(b, op)
        summed, out = self.summed(b, op, problem, config), self.vectors(b.target(op.value))
        assert out is not None
        x, problem = summed or (self.source(b, op), replace(problem, pixels=0, tiles=0))
        operands = {"x": x, "output": out}
        reads: list[TensorView | None] = [x]
        attrs: dict[str, Any] = {"through": problem.dtype}
        for name, product, stages in zip(("first", "second"), (first, op), self.epilogues(b, first, op), strict=True):
            weight, added = self.factors(b, product)
            (rows, depth), columns = weight.shape, up(weight.shape[1], 8)
            dense = b.kept.once(("gemv_pair", columns), [weight], partial(_filled, weight, columns))
            operands[name] = b.constant(dense, f"{product.outputs[0].name}.weights")
            bias = operands[f"{name}_bias"] = bias_row(b, product, stages.added_to(added), rows)
            if name == "second":
                attrs["operands"] = len(reads)
            reads += [operands[name].view((rows, depth, 1, 1), (columns, 1, 1, 1)), bias.view((rows,), (1,))]
            reads += scalars(b, stages)
            held = conv_attrs(conv_maps.POINTWISE, 1, stages.stages)
            attrs |= {f"{name}_{k}": v for k, v in held.items()}
        kind, pitch = "SeparableConv", _pitch(x)
        if summed is not None:
            kind, pitch, attrs["pixels"] = "ExcitationGate", problem.depth, problem.pixels
        made = pair.launch(problem, config, b.gpu, pitch, _pitch(out))
        b.emit(replace(op, src=self.region(b, op).src), made, operands, kind, attrs, reads, [out])


class GemvPair(VectorPair):
    """Two 1x1 convolutions of one pixel per image."""

    kinds = ONE_PIXEL, ONE_PIXEL
    axis = 1

    @staticmethod
    def factors(b: Builder, op: Op) -> tuple[Array, Array | None]:
        return b.weights(op)[:, :, 0, 0], bias_of(b, op)

    @staticmethod
    def vectors(x: TensorView) -> TensorView | None:
        return x if x.strides[1] == 1 else None


def _is_row_product(graph: Graph, op: Op) -> bool:
    if op.kind not in PRODUCTS or not op.outputs[0].type.is_static:
        return False
    weight = graph.constant_value(op.inputs[1])
    return weight is not None and weight.ndim == 2


ROW_PRODUCT = Kind("matrix product", _is_row_product)


class GemvPairRows(VectorPair):
    """Two MatMuls or Gemms of rows."""

    kinds = ROW_PRODUCT, ROW_PRODUCT
    axis = -1

    def unfit(self, b: Builder, op: Op, first: Op) -> str | None:
        for product in (first, op):
            if (why := product_refusal(b, product)) is not None:
                return f"{product.name}: {why}"
            if multiplier(b.graph, product) is not None:
                return f"another product of the same rows multiplies {product.name}"
        why = super().unfit(b, op, first)
        if why is None and NormedGemm().refuse(b, first) is None:
            return "the norm before it takes no launch of its own"
        return why

    @staticmethod
    def factors(b: Builder, op: Op) -> tuple[Array, Array | None]:
        return MatrixProduct.factors(b, op)

    @staticmethod
    def vectors(x: TensorView) -> TensorView | None:
        return rows_of(x, aligned=False)


GATES = (GemvPair(), GemvPairRows())


def _means(graph: Graph, first: Op) -> Op | None:
    """The global average pool whose means ``first`` reads, of volumes through the views of their vectors; None if it reads others."""
    pool = graph.op(first.inputs[0])  # type: ignore[arg-type]
    while _keeps_vectors(graph, pool):
        pool = graph.op(pool.inputs[0])  # type: ignore[arg-type]
    return pool if pool.kind == "GlobalAveragePool" else None


def _keeps_vectors(graph: Graph, op: Op) -> bool:
    """Whether an operator only adds, removes or moves axes of size 1."""
    if op.kind not in VIEWS or not op.outputs[0].type.is_static or op.inputs[0] is None:
        return False
    before, after = graph.type(op.inputs[0]).static_shape, op.outputs[0].type.static_shape
    if [n for n in before if n > 1] != [n for n in after if n > 1]:
        return False
    perm = (op.attrs.perm or range(len(before))[::-1]) if op.kind == "Transpose" else ()
    moved = [axis for axis in perm if before[axis] > 1]
    return moved == sorted(moved)


def _pixels(graph: Graph, pool: Op) -> int:
    """Pixels of an image that is averaged."""
    return math.prod(graph.type(pool.inputs[0]).static_shape[2:])  # type: ignore[arg-type]


def _filled(weight: Array, columns: int) -> Array:
    """The matrix, padded with zeros to so many columns."""
    made = np.zeros((len(weight), columns), weight.dtype)
    made[:, : weight.shape[1]] = weight
    return made


def adds_sums(b: Builder, pool: Op) -> bool:
    """Whether only a gate reads the means of a convolution's result, and its launch computes them from the sums of tiles."""
    first = None if pool.value in b.reserved else b.graph.sole_user(pool.value)
    while first is not None and _keeps_vectors(b.graph, first):
        first = b.graph.sole_user(first.value)
    op = None if first is None else b.graph.sole_user(first.value)
    if first is None or op is None:
        return False
    return any(g.find_first(b.graph, op) == first and g.refuse(b, op) is None and g.defer(b, op) is None for g in GATES)


def _likely_tiles(graph: Graph, pool: Op, images: int) -> int:
    """The likely number of tiles whose sums a convolution stores, of an image that is averaged. 0: it stores means.

    Tiles of a grouped convolution have about 32 pixels. Those of a depthwise convolution have 6 to 64, as many as give a GPU about
    220 blocks of 64 channels."""
    source = graph.op(pool.inputs[0])  # type: ignore[arg-type]
    if source.kind != "Conv" or source.attrs.group == 1:
        return 0
    channels, pixels = source.outputs[0].type.static_shape[1], _pixels(graph, pool)
    each = 32.0 if source.attrs.group < channels else min(64.0, max(6.0, pixels * channels * images / (220 * 64)))
    tiles = round(pixels / each)
    return tiles if tiles > 1 else 0


def _pitch(x: TensorView) -> int:
    """Elements from an image's vector to the next."""
    return x.strides[0] if x.shape[0] > 1 else x.shape[1]
