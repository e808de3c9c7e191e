"""Convolutions whose weights are computed become products of matrices.

Hypernetworks compute their filters, and so do trackers that look for one picture in another. (The filters of StyleGAN are constant
by now: ``modulated_weights`` runs before.) Fast kernels of convolutions need constant filters, which are packed in the build; the
general kernel uses one thread per result. As a product of the filters with the pixels under each tap, a convolution of computed
filters runs on tensor cores.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.gemm import MatMulAttrs
from optdnn.ops.index import ConcatAttrs, PadAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.base import Match, Miss, PassContext, RulePass, rule
from optdnn.passes.support.facts import depends_on_inputs, integers, operand, reshaped, sizes_of

TAPS = 64
"""Most taps of a filter: each is a copy of the pixels."""
WHOLE = 8
"""Columns of the product are padded to a multiple of this, as tensor cores need."""
LEAST = 1 << 20
"""Fewest multiplications for which the product pays for its launches."""


@rule("conv_of_computed_weights", {"Conv"})
def conv_of_computed_weights(graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
    """A Conv of any rank, with or without a bias; its groups have several channels."""
    a = op.attrs
    if a.prologue or a.epilogue or a.auto_pad != "NOTSET" or not depends_on_inputs(graph, operand(op, 1)):
        return None
    x, w, results = (sizes_of(graph, value) for value in (operand(op), operand(op, 1), op.value))
    if x is None or w is None or results is None or 0 in (*x, *w, *results):
        return None
    kernel, positions = w[2:], list(results[2:])
    filters, channels, taps = w[0] // a.group, w[1], math.prod(kernel)
    if taps > TAPS:
        return Miss(f"its filters have {taps} taps, more than {TAPS}")
    if filters == 1 or channels == 1:
        return Miss(
            "its filters are computed, but a group has a single filter or channel, so that it is no product of matrices"
        )
    if context.counted(x[0] * math.prod(w) * math.prod(positions)) < LEAST:
        return None
    whole = [*positions[:-1], positions[-1] + (-positions[-1] % WHOLE if math.prod(positions) % WHOLE else 0)]

    def build(patch: Patch) -> Value:
        columns = _columns(patch, operand(op), (x[0] * a.group, channels, *x[2:]), op, whole, whole[-1] - positions[-1])
        rows = reshaped(patch, operand(op, 1), (a.group, filters, channels, taps))
        rows = patch.add("Transpose", [rows], TransposeAttrs((0, 1, 3, 2)))
        rows = reshaped(patch, rows, (1, a.group, filters, taps * channels))
        # Kernels of batched products cannot repeat an operand, so it is copied. Filters are small compared with the columns.
        if x[0] > 1:
            rows = patch.add("Expand", [rows, integers(patch, [x[0], 1, 1, 1], "pictures")])
        columns = reshaped(patch, columns, (x[0], a.group, taps * channels, math.prod(whole)))
        y = patch.add("MatMul", [rows, columns], MatMulAttrs())
        y = reshaped(patch, y, (x[0], w[0], *whole))
        if whole != positions:
            y = _sliced(patch, y, [0], positions[-1:], [len(whole) + 1], [1])
        bias = op.input(2)
        if bias is None:
            return y
        return patch.add("Add", [y, reshaped(patch, bias, (1, w[0], *(1 for _ in positions)))])

    return Match((op,), build)


def _columns(patch: Patch, x: Value, shape: Sequence[int], op: Op, positions: Sequence[int], more: int) -> Value:
    """The pixels under each tap: (groups of all images, taps * channels, *places).

    ``positions``: the sizes of the result, with ``more`` padding positions at the end of the last axis."""
    a, rank = op.attrs, len(positions)
    x = reshaped(patch, x, tuple(shape))
    after = [*a.pads[rank:-1], a.pads[-1] + more * a.strides[-1]]
    x = _padded(patch, x, [0, 0, *a.pads[:rank]], [0, 0, *after])
    parts = []
    for tap in itertools.product(*map(range, patch.graph.type(operand(op, 1)).static_shape[2:])):
        starts = [t * d for t, d in zip(tap, a.dilations, strict=True)]
        ends = [s + (n - 1) * by + 1 for s, n, by in zip(starts, positions, a.strides, strict=True)]
        parts.append(_sliced(patch, x, starts, ends, range(2, rank + 2), a.strides))
    return parts[0] if len(parts) == 1 else patch.add("Concat", parts, ConcatAttrs(axis=1))


def _padded(patch: Patch, x: Value, before: Sequence[int], after: Sequence[int]) -> Value:
    if not any((*before, *after)):
        return x
    return patch.add("Pad", [x, integers(patch, [*before, *after], "pads")], PadAttrs())


def _sliced(
    patch: Patch, x: Value, starts: Sequence[int], ends: Sequence[int], axes: Sequence[int], steps: Sequence[int]
) -> Value:
    lists = (integers(patch, list(n), "taps") for n in (starts, ends, axes, steps))
    return patch.add("Slice", [x, *lists])


class ComputedWeights(RulePass):
    name = "computed_weights"
    rules = (conv_of_computed_weights,)
