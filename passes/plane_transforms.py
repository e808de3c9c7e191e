"""Two transforms over the axes of a small plane become one product.

A two-dimensional DFT of up to 16 x 16 numbers, as transforms of patches have it (FFTformer: Kong et al., 2023), is linear: one
matrix holds the products of both matrices of cosines and sines. It multiplies more numbers than two products do, but reads and
writes the signal once, and nothing is copied between two products. In 16 bits, tensor cores compute it faster than memory delivers
the signal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.gemm import MatMulAttrs
from optdnn.passes.base import Match, Miss, PassContext, Rule, RulePass
from optdnn.passes.support.facts import operand, reshape_target, reshaped, sliced
from optdnn.passes.support.views import transposed
from optdnn.passes.transform_products import (
    IMAGE,
    LEAST,
    LEAST_AFTER,
    WIDE,
    Transform,
    TransformRule,
    count_of_parts,
    factor,
    has_images,
    readers_of_parts,
    scales,
    signal_in_order,
    source,
    transform_of,
)
from optdnn.types import Array, Shape

POINTS = 256
"""Most numbers of a plane: with more, multiplying takes longer than reading and writing."""


class PlaneToMatmul(TransformRule):
    """A DFT of a DFT over the axis before or after becomes a product. Refuses planes of more than ``POINTS`` numbers, of unknown
    sizes, and with a few numbers after each point."""

    name = "plane_to_matmul"

    def match(self, graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
        before, between = scales(graph, op)
        second = graph.sole_user((between[-1] if between else op).value)
        if second is None or second.kind != "DFT":
            return None
        pair = transform_of(graph, op), transform_of(graph, second)
        for found in pair:
            if isinstance(found, Miss):
                return found
        first, last = (t for t in pair if isinstance(t, Transform))
        if abs(first.axis - last.axis) != 1:
            return Miss("its axes are not neighbors")
        after = scales(graph, second)[1]
        x = source(graph, operand(before[-1] if before else op))
        plane = _Plane(graph.type(x).dims, first, last, self.channels_last)
        end = after[-1] if after else second
        readers = readers_of_parts(graph, end)
        parts = sorted({p for _, p in readers}) or list(range(count_of_parts(second.outputs[0].type.dims)))
        if (why := plane.refusal(len(parts))) is not None:
            return Miss(why)
        matrix = factor(graph, [*before, *between, *after]) * plane.matrix(parts)
        targets = [reshape_target((*plane.results[:-1], 1), r.outputs[0].type.dims) for r, _ in readers]
        packed, unpacked = plane.packed(), plane.unpacked(len(parts))
        # Unknown sizes keep their axes, so a Reshape copies them.
        assert packed is not None
        assert unpacked is not None

        def build(patch: Patch) -> Value | None:
            spectrum = reshaped(patch, _product(patch, plane, x, matrix, packed), unpacked)
            back = tuple(plane.order.index(i) for i in range(len(plane.order)))
            if not readers:
                return transposed(patch, spectrum, back)
            for (reader, part), target in zip(readers, targets, strict=True):
                at = parts.index(part)
                one = spectrum if len(parts) == 1 else sliced(patch, spectrum, at, at + 1, len(plane.lead))
                assert target is not None
                patch.replace(reader.value, reshaped(patch, transposed(patch, one, back), target))
            return None

        return Match((op, second, *before, *between, *after, *(r for r, _ in readers)), build, end.value)


@dataclass(frozen=True)
class _Plane:
    """A signal of shape ``dims``, whose last axis holds the parts of numbers, and its transforms ``first`` and ``last``."""

    dims: Shape
    first: Transform
    last: Transform
    channels_last: bool

    @property
    def axis(self) -> int:
        """The first axis of the plane."""
        return min(self.first.axis, self.last.axis)

    @property
    def by_axis(self) -> tuple[Transform, Transform]:
        one, two = sorted((self.first, self.last), key=lambda t: t.axis)
        return one, two

    @property
    def is_image(self) -> bool:
        """Whether the plane is that of an image (B, C, H, W, parts) with its channels last."""
        channels = self.dims[1] if self.channels_last and len(self.dims) == IMAGE and self.axis == 2 else 0
        return isinstance(channels, int) and channels >= LEAST_AFTER and channels % 8 == 0

    @property
    def lead(self) -> tuple[int, ...]:
        return (0,) if self.is_image else tuple(range(self.axis))

    @property
    def behind(self) -> tuple[int, ...]:
        return (1,) if self.is_image else tuple(range(self.axis + 2, len(self.dims) - 1))

    @property
    def order(self) -> tuple[int, ...]:
        """The order of the axes in memory: the parts are blocks before the plane."""
        return (*self.lead, len(self.dims) - 1, self.axis, self.axis + 1, *self.behind)

    @property
    def results(self) -> Shape:
        """The shape of the spectrum; its last size is that of the signal."""
        sizes = list(self.dims)
        for t in (self.first, self.last):
            sizes[t.axis] = t.bins
        return tuple(sizes)

    def refusal(self, parts: int) -> str | None:
        points = math.prod(t.taken for t in self.by_axis)
        if max(points, math.prod(t.bins for t in self.by_axis)) > POINTS:
            return f"its plane has more than {POINTS} points"
        columns = math.prod(self.dims[i] for i in self.behind)
        if self.behind and not (isinstance(columns, int) and columns >= LEAST_AFTER):
            return "few numbers follow each point of its plane"
        work = (
            points
            * math.prod(t.bins for t in self.by_axis)
            * parts
            * columns
            * math.prod(self.dims[i] for i in self.lead)
        )
        return "it has too few multiplications for a product to pay" if isinstance(work, int) and work < LEAST else None

    def matrix(self, parts: Sequence[int]) -> Array:
        """The matrix (parts, points, parts, points) in float64, points in the order of the axes."""
        first = self.first.matrix(count_of_parts(self.dims) == 2, (0, 1))
        both: Array = np.einsum("apbq,cqdr->pacrbd", first, self.last.matrix(True, parts))
        both = both if self.first.axis == self.axis else both.transpose(0, 2, 1, 3, 5, 4)
        return both.reshape(math.prod(both.shape[:3]), -1)

    def packed(self) -> tuple[int, ...] | None:
        taken = list(self.dims)
        for t in self.by_axis:
            taken[t.axis] = t.taken
        return self._rows(tuple(taken))

    def unpacked(self, parts: int) -> tuple[int, ...] | None:
        sizes = (*self.results[:-1], parts)
        rows = self._shape_of_rows(sizes)
        return reshape_target(rows, tuple(sizes[i] for i in self.order))

    def _rows(self, sizes: Shape) -> tuple[int, ...] | None:
        return reshape_target(tuple(sizes[i] for i in self.order), self._shape_of_rows(sizes))

    def _shape_of_rows(self, sizes: Shape) -> Shape:
        points = math.prod(sizes[i] for i in (self.axis, self.axis + 1))
        columns = (math.prod(sizes[i] for i in self.behind),) if self.behind else ()
        return (*(sizes[i] for i in self.lead), points * sizes[-1], *columns)


def _product(patch: Patch, plane: _Plane, x: Value, matrix: Array, packed: tuple[int, ...]) -> Value:
    """The product of the signal's rows (or columns) and the matrix."""
    signal = signal_in_order(patch, x, plane.order)
    real = len(patch.type(signal).dims) < len(plane.order)
    for at, t in enumerate(plane.by_axis, len(plane.lead) + (not real)):
        if plane.dims[t.axis] != t.taken:
            signal = sliced(patch, signal, 0, t.taken, at)
    rows = reshaped(patch, signal, packed)
    flat = np.ascontiguousarray(matrix.T if plane.behind else matrix).astype(patch.type(rows).dtype)
    constant = patch.constant(flat, "dft.matrix")
    return patch.add("MatMul", [constant, rows] if plane.behind else [rows, constant], MatMulAttrs(factors="float"))


class PlaneTransforms(RulePass):
    """Runs before `transform_products`, which takes the transforms that are left."""

    name = "plane_transforms"
    rules = (PlaneToMatmul(),)

    def rules_for(self, graph: Graph, context: PassContext) -> Sequence[Rule]:
        """None in fp32 and tf32, whose products are slower than memory."""
        return () if context.precision in WIDE else (PlaneToMatmul(has_images(graph)),)
