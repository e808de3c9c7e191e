"""Fourier transforms and adaptive pools become products with constant matrices, and transforms of frames become convolutions.

A DFT of n numbers is a product with a matrix of cosines and sines. Tensor cores compute it faster than a GPU sums it element by
element, and up to some thousand points the matrix is small. A complex signal takes two rows of the matrix per number (real and
imaginary part), a complex spectrum two columns. If only one part of the spectrum is read, the other part has no columns. An axis
with many elements after it is multiplied from the left, so that two consecutive transforms need no copies between them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from optdnn.dim import DimLike
from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.conv import ConvAttrs
from optdnn.ops.gemm import MatMulAttrs
from optdnn.ops.index import ConcatAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.base import Match, Miss, PassContext, Rule, RulePass, rule
from optdnn.passes.rules.frames import frames_are_blocks
from optdnn.passes.rules.gathered_sums import gathered_sums
from optdnn.passes.support.facts import ints, is_filled, operand, reshape_target, reshaped, same_shape, scalar, sliced
from optdnn.passes.support.paths import path_from, path_to
from optdnn.passes.support.views import transposed
from optdnn.types import Array, Shape, normalize_axis

MOST = 1 << 24
"""Most elements of a matrix: a one-sided transform of 4,096 real numbers, or a transform of 2,048 complex ones."""
LEAST = 1 << 16
"""Fewest multiplications of a product. Smaller transforms stay sums in float64, which are more precise."""
LEAST_AFTER = 16
"""If at least this many elements follow the axis, the matrix multiplies from the left."""
WIDE = frozenset({"fp32", "tf32", "fp64"})
"""Precisions with slower products, above all of a constant first factor."""
IMAGE = 5
"""The rank of an image's signal: batch, channels, two axes of positions, and the parts of a number."""


@dataclass(frozen=True)
class Transform:
    """A DFT of period ``length`` along ``axis``: ``taken`` numbers of the operand become ``bins`` numbers."""

    axis: int
    taken: int
    length: int
    bins: int
    inverse: bool
    onesided: bool

    def matrix(self, complex_input: bool, parts: Sequence[int]) -> Array:
        """The matrix (taken, 1 or 2, bins, parts) in float64. ``parts``: 0 for the real, 1 for the imaginary part of results."""
        angle = 2 * np.pi / self.length * (np.outer(np.arange(self.taken), np.arange(self.bins)) % self.length)
        cos, sin = np.cos(angle), np.sin(angle) if self.inverse else -np.sin(angle)
        if self.inverse:
            weight = np.full((self.taken, 1), 1 / self.length)
            if self.onesided:  # each bin but the first and the middle one occurs twice in the full spectrum
                j = np.arange(self.taken)
                weight[(j > 0) & (2 * j != self.length)] *= 2
            cos, sin = cos * weight, sin * weight
        rows = [[cos, sin], [-sin, cos]][: 1 + complex_input]
        return np.stack([np.stack([row[p] for p in parts], axis=-1) for row in rows], axis=1)


class TransformRule(Rule):
    """A rule of transforms. ``channels_last``: images of the network are likely to have their channels last in memory."""

    kinds = frozenset({"DFT"})

    def __init__(self, channels_last: bool = False) -> None:
        self.channels_last = channels_last


class DftToMatmul(TransformRule):
    """A DFT becomes a product. Refuses unknown lengths and axes, matrices of more than ``MOST`` elements, and small transforms."""

    name = "dft_to_matmul"

    def match(self, graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
        return _dft_to_matmul(graph, op, self.channels_last)


def _dft_to_matmul(graph: Graph, op: Op, channels_last: bool) -> Match | Miss:
    found = transform_of(graph, op)
    if isinstance(found, Miss):
        return found
    before, after = scales(graph, op)
    scale = factor(graph, [*before, *after])
    end = after[-1] if after else op
    x = source(graph, operand(before[-1] if before else op))
    dims, last = graph.type(x).dims, len(graph.type(x).dims) - 1
    readers = readers_of_parts(graph, end)
    parts = sorted({p for _, p in readers}) or list(range(count_of_parts(op.outputs[0].type.dims)))
    taken_parts = count_of_parts(dims)
    size = found.taken * taken_parts * found.bins * len(parts)
    if size > MOST:
        return Miss(f"its matrix would have {size} elements, more than {MOST}")
    work = size * math.prod(d for i, d in enumerate(dims[:last]) if i != found.axis)
    if isinstance(work, int) and work < LEAST:
        return Miss(f"it has only {work} multiplications, too few for a product to pay")
    lead, behind = _around(dims, found.axis, channels_last)
    walk = _walk(graph, x, end, found.axis, lead, behind, bool(readers), size)
    sizes = list(dims)
    sizes[found.axis], sizes[last] = found.bins, len(parts)
    columns = math.prod(dims[i] for i in walk.behind)
    rows = (*(dims[i] for i in walk.lead), found.taken * taken_parts, *((columns,) if walk.behind else ()))
    taken = [found.taken if i == found.axis else d for i, d in enumerate(dims)]
    packed = reshape_target(tuple(taken[i] for i in walk.before), rows)
    results = (*rows[: len(walk.lead)], found.bins * len(parts), *rows[len(walk.lead) + 1 :])
    unpacked = reshape_target(results, tuple(sizes[i] for i in walk.after))
    targets = [reshape_target((*sizes[:-1], 1), r.outputs[0].type.dims) for r, _ in readers]
    if packed is None or unpacked is None or None in targets:
        return Miss("more than one of its sizes is not known")
    real = _targets_of_real(results, tuple(sizes), walk) if len(parts) == 1 and not readers else None

    def build(patch: Patch) -> Value | None:
        signal = signal_in_order(patch, x, walk.before)
        if dims[found.axis] != found.taken:
            signal = sliced(patch, signal, 0, found.taken, walk.before.index(found.axis))
        matrix = scale * found.matrix(taken_parts == 2, parts)
        product = _product(patch, reshaped(patch, signal, packed), matrix, walk)
        if real is not None:
            return reshaped(patch, transposed(patch, reshaped(patch, product, real[0]), walk.back_of_real), real[1])
        spectrum = reshaped(patch, product, unpacked)
        if not readers:
            return transposed(patch, spectrum, walk.back)
        at = walk.after.index(last)
        for (reader, part), target in zip(readers, targets, strict=True):
            one = spectrum if len(parts) == 1 else sliced(patch, spectrum, part, part + 1, at)
            assert target is not None
            patch.replace(reader.value, reshaped(patch, transposed(patch, one, walk.back), target))
        return None

    return Match((op, *before, *after, *(r for r, _ in readers)), build, end.value)


def transform_of(graph: Graph, op: Op) -> Transform | Miss:
    """The parameters of a DFT, or the reason why they are not known."""
    dims, a = graph.type(operand(op)).dims, op.attrs
    at = ints(graph, op.input(2))
    if op.input(2) is not None and not at:
        return Miss("its axis is not known")
    axis = normalize_axis(at[0] if at else a.axis, len(dims))
    given, points = ints(graph, op.input(1)), dims[axis]
    if not isinstance(points, int) or (op.input(1) is not None and not given):
        return Miss("its length is not known")
    spectrum = a.inverse and a.onesided  # of a real signal
    length = given[0] if given else 2 * (points - 1) if spectrum else points
    if length < 1 or 0 in dims:
        return Miss("it has no elements")
    taken = min(points, length // 2 + 1 if spectrum else length)
    bins = length // 2 + 1 if a.onesided and not a.inverse else length
    return Transform(axis, taken, length, bins, a.inverse, a.onesided)


def has_images(graph: Graph) -> bool:
    """Whether the network has convolutions of images (B, C, H, W)."""
    return any(op.kind == "Conv" and len(op.outputs[0].type.dims) == IMAGE - 1 for op in graph.ops())


def count_of_parts(dims: Shape) -> int:
    """The number of parts of a value: 2 if it is complex, 1 if it is real."""
    return 2 if dims[-1] == 2 else 1


def source(graph: Graph, x: Value) -> Value:
    """The real part of ``x`` if its imaginary part is 0; else ``x``."""
    joined = _joined(graph, x)
    return operand(joined) if joined is not None and is_filled(graph.known(joined.inputs[1]), 0) else x


def scales(graph: Graph, op: Op) -> tuple[list[Op], list[Op]]:
    """The ops before and after a DFT that multiply or divide by a number, nearest first; each has one reader."""
    scaled = partial(_scaled, graph)
    return path_to(graph, operand(op), scaled, alone=True), path_from(graph, op.value, scaled)


def factor(graph: Graph, ops: Sequence[Op]) -> float:
    """The number by which all these ops multiply; the DFT's matrix absorbs it."""
    scale = 1.0
    for one in ops:
        number = scalar(graph, one.inputs[1])
        assert number is not None
        scale = scale * number if one.kind == "Mul" else scale / number
    return scale


def _scaled(graph: Graph, op: Op) -> bool:
    """Whether an op multiplies or divides operand 0 by a number other than 0."""
    return op.kind in ("Mul", "Div") and (scalar(graph, op.inputs[1]) or 0.0) != 0.0 and same_shape(graph, op)


# ---------------------------------------------------------------- readers


def readers_of_parts(graph: Graph, op: Op) -> list[tuple[Op, int]]:
    """The readers of a spectrum, each with the part that it takes; empty if one of them takes more than one part."""
    if op.outputs[0].type.dims[-1] != 2:
        return []
    found = [(graph.op(use.op), _part(graph, graph.op(use.op))) for use in graph.uses(op.value)]
    return (
        [(reader, part) for reader, part in found if part is not None] if all(p is not None for _, p in found) else []
    )


def _part(graph: Graph, reader: Op) -> int | None:
    """0 if a Slice or Gather takes the real part, 1 for the imaginary part, None for other operators."""
    if reader.kind not in ("Slice", "Gather"):
        return None
    last = len(graph.type(operand(reader)).dims) - 1
    if reader.kind == "Gather":
        at = ints(graph, reader.input(1))
        own = normalize_axis(reader.attrs.axis, last + 1) == last
        return at[0] % 2 if own and at is not None and len(at) == 1 else None
    starts, ends, axes, steps = (ints(graph, reader.input(i)) for i in range(1, 5))
    if starts is None or ends is None or axes is None or len(axes) != 1 or steps not in (None, (1,)):
        return None
    taken = range(2)[starts[0] : ends[0]]
    return taken[0] if normalize_axis(axes[0], last + 1) == last and len(taken) == 1 else None


# ---------------------------------------------------------------- orders of axes


@dataclass(frozen=True)
class Walk:
    """Orders of the axes: ``before`` for the signal that enters the product, ``after`` for the spectrum.

    The axis and the parts come between ``lead`` and ``behind``. If ``behind`` is empty, the matrix is the second factor."""

    lead: tuple[int, ...]
    behind: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]

    @property
    def back(self) -> tuple[int, ...]:
        """The permutation from the spectrum's order to that of the DFT."""
        return tuple(self.after.index(i) for i in range(len(self.after)))

    @property
    def back_of_real(self) -> tuple[int, ...]:
        """The permutation for a result of real numbers, without the axis of parts. No other operator has such an axis of one
        element: a Transpose of the others merges with those of the network."""
        after = without_parts(self.after)
        return tuple(after.index(i) for i in range(len(after)))


def without_parts(order: tuple[int, ...]) -> tuple[int, ...]:
    """An order of the axes without the last one."""
    return tuple(i for i in order if i != len(order) - 1)


def _targets_of_real(results: Shape, sizes: Shape, walk: Walk) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Targets that give the product's result the axes of real numbers, in the order of ``walk``, and then the last axis of 1."""
    apart = reshape_target(results, tuple(sizes[i] for i in without_parts(walk.after)))
    whole = reshape_target(sizes[:-1], sizes)
    return None if apart is None or whole is None else (apart, whole)


def _walk(
    graph: Graph, x: Value, end: Op, axis: int, lead: tuple[int, ...], behind: tuple[int, ...], by_parts: bool, matrix: int
) -> Walk:  # fmt: skip
    """The orders for a signal ``x``, a spectrum computed by ``end``, and a matrix of ``matrix`` elements.

    A matrix on the left is repeated for each element of ``lead``, up to ``MOST`` elements in all."""
    dims = graph.type(x).dims
    last = len(dims) - 1
    size: DimLike = math.prod(dims[i] for i in behind)
    repeated = matrix * math.prod(dims[i] for i in lead)
    if (isinstance(size, int) and size < LEAST_AFTER) or (isinstance(repeated, int) and repeated > MOST):
        lead, behind = lead + behind, ()
    pairs = ((axis, last), (last, axis))
    first = pairs[dims[last] != 1 and _comes_by_parts(graph, x, axis)]  # a single part has no order
    second = pairs[end.outputs[0].type.dims[last] != 1 and (by_parts or _goes_by_parts(graph, end, axis, bool(behind)))]
    return Walk(lead, behind, (*lead, *first, *behind), (*lead, *second, *behind))


def _around(dims: Shape, axis: int, channels_last: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The axes before and after ``axis``.

    In a signal (B, C, H, W, parts) with its channels last, C is the last of the columns that the matrix multiplies from the left:
    nothing changes its order, and a number of frequencies that is no multiple of 8 needs no padding."""
    channels = dims[1] if channels_last and len(dims) == IMAGE and axis in (2, 3) else 0
    behind = tuple(range(axis + 1, len(dims) - 1))
    if isinstance(channels, int) and channels >= LEAST_AFTER and channels % 8 == 0:
        return (0, *range(2, axis)), (*behind, 1)
    return tuple(range(axis)), behind


def _comes_by_parts(graph: Graph, x: Value, axis: int) -> bool:
    """Whether real and imaginary parts of the signal are the outer axis in memory: another transform's result, or a Concat."""
    made = graph.op(x)
    if made.kind == "Transpose":
        perm = made.attrs.perm or tuple(reversed(range(len(graph.type(x).dims))))
        return bool(perm[-1] < perm[axis])
    return _joined(graph, x) is not None


def _joined(graph: Graph, x: Value) -> Op | None:
    """The Concat of a real and an imaginary part."""
    made, last = graph.op(x), len(graph.type(x).dims) - 1
    joins = made.kind == "Concat" and len(made.inputs) == 2 and normalize_axis(made.attrs.axis, last + 1) == last
    return made if joins and graph.type(x).dims[-1] == 2 else None


def _goes_by_parts(graph: Graph, end: Op, axis: int, from_left: bool) -> bool:
    """Whether the parts of the spectrum should be the outer axis, because the next transform reads them so."""
    reader = graph.sole_user(end.value)
    if reader is None or reader.kind != "DFT":
        return from_left
    at = ints(graph, reader.input(2))
    return normalize_axis(at[0] if at else reader.attrs.axis, len(reader.outputs[0].type.dims)) < axis


# ---------------------------------------------------------------- building


def signal_in_order(patch: Patch, x: Value, order: tuple[int, ...]) -> Value:
    """``x`` with its axes in this order; real numbers lose the axis of parts. A Concat of two parts is built in this order, instead
    of being transposed."""
    joined, dims = _joined(patch.graph, x), patch.type(x).dims
    numbers = reshape_target(dims, dims[:-1]) if dims[-1] == 1 else None
    if numbers is not None:
        return transposed(patch, reshaped(patch, x, numbers), without_parts(order))
    if joined is None:
        return transposed(patch, x, order)
    parts = [transposed(patch, operand(joined, i), order) for i in range(2)]
    return patch.add("Concat", parts, ConcatAttrs(order.index(len(order) - 1)))


def _product(patch: Patch, rows: Value, matrix: Array, walk: Walk) -> Value:
    """``rows`` (…, taken x parts[, behind]) times the matrix of (taken, parts, bins, parts)."""
    if walk.before.index(len(walk.before) - 1) < len(walk.lead) + 1:
        matrix = matrix.transpose(1, 0, 2, 3)
    if walk.after.index(len(walk.after) - 1) < len(walk.lead) + 1:
        matrix = matrix.transpose(0, 1, 3, 2)
    flat = matrix.reshape(math.prod(matrix.shape[:2]), -1)
    flat = np.ascontiguousarray(flat.T if walk.behind else flat).astype(patch.type(rows).dtype)
    factor = patch.constant(flat, "dft.matrix")
    return patch.add("MatMul", [factor, rows] if walk.behind else [rows, factor], MatMulAttrs(factors="float"))


# ---------------------------------------------------------------- frames


@rule("stft_to_conv", {"STFT"})
def stft_to_conv(graph: Graph, op: Op) -> Match | Miss | None:
    """An STFT becomes a convolution over blocks of samples. The block size divides frame length and step, and is the number of
    channels."""
    x = operand(op)
    dims, (_, frames, bins, _) = graph.type(x).dims, op.outputs[0].type.dims
    step, given = ints(graph, op.input(1)), ints(graph, op.input(3))
    window = graph.constant_value(op.input(2))
    if not step or (op.input(2) is not None and window is None) or (op.input(3) is not None and not given):
        return Miss("its window, its frames' length or their distance is not known")
    if not isinstance(frames, int) or not isinstance(bins, int) or not isinstance(dims[1], int):
        return Miss("its number of samples is not known")
    if frames < 1 or dims[0] == 0:
        return Miss("it has no elements")
    if len(dims) == 3 and dims[2] != 1:
        return Miss("its signal is complex")
    length = given[0] if given else len(window) if window is not None else 0
    if 2 * bins * length > MOST:
        return Miss(f"its filters would have {2 * bins * length} elements, more than {MOST}")
    block = math.gcd(step[0], length)
    used = (frames - 1) * step[0] + length
    blocks = reshape_target((dims[0], used), (dims[0], used // block, block))
    spectrum = reshape_target((dims[0], frames, 2 * bins), (dims[0], frames, 2, bins))
    assert blocks is not None
    assert spectrum is not None
    filters = Transform(1, length, length, bins, False, True).matrix(False, (0, 1))[:, 0]  # length, bins, parts
    filters = filters if window is None else filters * window.astype(filters.dtype)[:, None, None]
    weight = filters.transpose(2, 1, 0).reshape(2 * bins, length // block, block).transpose(0, 2, 1)
    attrs = ConvAttrs((step[0] // block,), (0, 0), (1,), 1, factors="float")

    def build(patch: Patch) -> Value:
        signal = x if dims[1] == used else sliced(patch, x, 0, used, 1)
        image = patch.add("Transpose", [reshaped(patch, signal, blocks)], TransposeAttrs((0, 2, 1)))
        constant = patch.constant(np.ascontiguousarray(weight).astype(graph.type(x).dtype), "stft.filters")
        rows = patch.add("Transpose", [patch.add("Conv", [image, constant], attrs)], TransposeAttrs((0, 2, 1)))
        return patch.add("Transpose", [reshaped(patch, rows, spectrum)], TransposeAttrs((0, 1, 3, 2)))

    return Match((op,), build)


class TransformProducts(RulePass):
    """Runs before all passes that look for products. Not on the CPU: NumPy's fast transform is as fast, and more precise."""

    name = "transform_products"
    rules = (DftToMatmul(), stft_to_conv, frames_are_blocks, gathered_sums)

    def rules_for(self, graph: Graph, context: PassContext) -> Sequence[Rule]:
        """In 16 bits, a network with convolutions of images keeps channels last. Products of fp32 and tf32 with a constant first
        factor do not run on the best kernels."""
        last = has_images(graph) and context.precision not in WIDE
        return (DftToMatmul(channels_last=True), *self.rules[1:]) if last else self.rules
