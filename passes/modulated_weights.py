"""Per-channel factors of a convolution's weights become factors of its input and of its result.

StyleGAN's modulated convolutions (Karras et al., 2020) multiply constant filters by a factor per input channel, which is computed
from the style, and divide each filter by its norm. ``conv(x, w * s * d)`` is ``conv(x * s, w) * d``, with a factor ``s`` per input
channel and ``d`` per output channel. So the filters are constants again. Such networks write a batch as groups, one for each image;
it becomes a batch again. Transposed convolutions are the same, also if their filters are scaled in the order of a convolution and
then transposed. The norms need no computed filters either: the sums of ``(w * s) ** 2`` are a product of ``s ** 2`` with the sums
of ``w ** 2``, which are constant.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.gemm import MatMulAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.base import Match, Miss, RulePass, rule
from optdnn.passes.support.facts import depends_on_inputs, ints, operand, producer, reshaped, sizes_of, with_rank

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class _Factor:
    """A factor of the weights. ``turned``: its axes of filters and channels are exchanged by a Transpose before the convolution."""

    value: Value
    divides: bool = False
    turned: bool = False

    def seen(self, graph: Graph, view: Sizes) -> Sizes | None:
        """Its sizes along (images, filters, channels, taps), for weights with the sizes ``view``; None if it has other axes."""
        return _seen(graph, self.value, _exchanged(view) if self.turned else view)


def _exchanged(view: Sizes) -> Sizes:
    return (view[0], view[2], view[1], *view[3:])


@rule("modulated_weights", {"Conv", "ConvTranspose"})
def modulated_weights(graph: Graph, op: Op) -> Match | Miss | None:
    """A convolution whose weights are the product of one constant and of factors per input or output channel."""
    a = op.attrs
    if a.prologue or a.epilogue or not depends_on_inputs(graph, operand(op, 1)):
        return None
    x, w, y = (sizes_of(graph, v) for v in (operand(op), operand(op, 1), op.value))
    if x is None or w is None or y is None:
        return None
    pictures = a.group  # each has its own filters
    if pictures > 1 and x[0] > 1:
        return Miss("its filters are computed, and it has groups, but they are not the images of a batch")
    view = (pictures, w[0] // pictures, *w[1:])
    transposed = op.kind == "ConvTranspose"  # its filters are [input channels, output channels, taps]
    filters: list[_Factor] = []
    before: list[_Factor] = []
    after: list[_Factor] = []
    for factor in _factors(graph, _Factor(operand(op, 1)), view):
        shape = factor.seen(graph, view)
        if shape is not None and _of_channels(shape):
            of_results = (shape[2] == 1) != (transposed != factor.turned)
            (after if of_results else before).append(factor)
        elif (
            factor.divides
            or depends_on_inputs(graph, factor.value)
            or shape != (1, *(_exchanged(view) if factor.turned else view)[1:])
        ):
            return Miss("its filters are computed, and not only by factors per channel")
        else:
            filters.append(factor)
    if len(filters) != 1:
        return Miss(f"its filters are products of {len(filters)} full tensors, not of one constant")
    images = (pictures, view[1 if transposed else 2]) if pictures > 1 else x[:2]

    def build(patch: Patch) -> Value:
        pixels = operand(op) if pictures == 1 else reshaped(patch, operand(op), (*images, *x[2:]))
        pixels = _scaled(patch, pixels, before)
        result = patch.add(op.kind, [pixels, _weights(patch, filters[0], view)], replace(a, group=1))
        result = _scaled(patch, result, after)
        if pictures > 1:
            result = reshaped(patch, result, y)
        if op.input(2) is None:
            return result
        return patch.add("Add", [result, reshaped(patch, operand(op, 2), (1, y[1], *(1 for _ in y[2:])))])

    return Match((op,), build)


def _weights(patch: Patch, filters: _Factor, view: Sizes) -> Value:
    """The constant filters, in the order that the convolution reads."""
    if not filters.turned:
        return reshaped(patch, filters.value, view[1:])
    own = reshaped(patch, filters.value, _exchanged(view)[1:])
    return patch.add("Transpose", [own], TransposeAttrs((1, 0, *range(2, len(view) - 1))))


def _factors(graph: Graph, factor: _Factor, view: Sizes) -> Iterator[_Factor]:
    """The factors of the product ``factor``."""
    shape = factor.seen(graph, view)
    whole = shape is not None and not _of_channels(shape)
    op = producer(graph, factor.value, {"Reshape", "Mul", "Div", "Transpose"}) if whole else None
    inner = None if op is None else replace(factor, value=operand(op))
    if op is None or inner is None:
        yield factor
    elif op.kind == "Transpose":
        inner = replace(inner, turned=not factor.turned)
        exchange = _exchange(op, view)
        yield from _factors(graph, inner, view) if exchange else (factor,)
    elif op.kind == "Reshape":
        yield from _factors(graph, inner, view) if inner.seen(graph, view) == shape else (factor,)
    else:
        yield from _factors(graph, inner, view)
        yield from _factors(graph, _Factor(operand(op, 1), factor.divides != (op.kind == "Div"), factor.turned), view)


def _exchange(op: Op, view: Sizes) -> bool:
    """Whether a Transpose exchanges the axes of filters and channels."""
    axes = (*range(len(view)),)
    if len(op.attrs.perm) == len(view):
        return tuple(op.attrs.perm) == _exchanged(axes)
    return view[0] == 1 and tuple(op.attrs.perm) == (1, 0, *axes[2:-1])


def _seen(graph: Graph, value: Value, view: Sizes) -> Sizes | None:
    """The sizes of ``value`` along the axes of ``view`` (images, filters, channels, taps); None if it has other axes."""
    shape = sizes_of(graph, value)
    if shape is None:
        return None
    if shape == (view[0] * view[1], *view[2:]):
        return view
    shape = (*(1 for _ in range(len(view) - len(shape))), *shape)
    fits = len(shape) == len(view) and all(n in (1, of) for n, of in zip(shape, view, strict=True))
    return shape if fits else None


def _of_channels(shape: Sizes) -> bool:
    """Whether a factor has one number for each input channel, or for each output channel."""
    return all(n == 1 for n in shape[3:]) and 1 in shape[1:3]


def _scaled(patch: Patch, x: Value, factors: Sequence[_Factor]) -> Value:
    """``x`` multiplied or divided by each factor. A factor has a number per channel, or per image and channel."""
    rank = len(patch.type(x).static_shape)
    for factor in factors:
        sizes = patch.type(factor.value).static_shape
        rows = sizes[0] if len(sizes) == rank + 1 else 1
        by = reshaped(patch, factor.value, (rows, math.prod(sizes) // rows, *(1 for _ in range(rank - 2))))
        x = patch.add("Div" if factor.divides else "Mul", [x, by])
    return x


@rule("norms_of_filters", {"ReduceSum"})
def norms_of_filters(graph: Graph, op: Op) -> Match | Miss | None:
    """``sum((w * s) ** 2)`` with w constant, and s varying along one summed axis, is ``s ** 2`` times a constant matrix."""
    square = producer(graph, op.inputs[0], {"Mul"})
    scaled = (
        None if square is None or square.inputs[0] != square.inputs[1] else producer(graph, square.inputs[0], {"Mul"})
    )
    if square is None or scaled is None:
        return None
    slot = 0 if graph.constant_value(operand(scaled)) is not None else 1
    filters, factor = graph.constant_value(operand(scaled, slot)), operand(scaled, 1 - slot)
    sizes, factors, axes = sizes_of(graph, scaled.value), sizes_of(graph, factor), ints(graph, op.input(1))
    if filters is None or sizes is None or factors is None or axes is None:
        return None
    rank = len(sizes)
    filters, factors = with_rank(filters, rank), (1,) * (rank - len(factors)) + factors
    summed = {a % rank for a in axes}
    kept = [k for k in range(1, rank) if k not in summed]
    inner = [k for k in range(1, rank) if factors[k] != 1]
    if len(kept) != 1 or len(inner) != 1 or 0 in summed or inner[0] not in summed or filters.shape != (1, *sizes[1:]):
        return Miss("its factors do not vary along exactly one summed axis of constant filters")
    others = tuple(k for k in range(rank) if k not in (kept[0], inner[0]))
    sums = np.sum(filters.astype(np.float64) ** 2, others)
    sums = sums.T if inner[0] > kept[0] else sums
    unit = 2.0 ** math.ceil(math.log2(sums.max())) if sums.max() > 0 else 1.0  # so that no sum is too small for 16 bits

    def build(patch: Patch) -> Value:
        style = reshaped(patch, factor, (sizes[0] if factors[0] > 1 else 1, sizes[inner[0]]), scaled.src)
        matrix = patch.constant((sums / unit).astype(filters.dtype), "squares")
        total = patch.add("MatMul", [patch.add("Mul", [style, style]), matrix], MatMulAttrs())
        total = patch.add("Mul", [total, patch.constant(np.array(unit, filters.dtype), "unit")])
        return reshaped(patch, total, op.outputs[0].type.static_shape)

    return Match((op, square, scaled), build)


class ModulatedWeights(RulePass):
    name = "modulated_weights"
    rules = (modulated_weights, norms_of_filters)
