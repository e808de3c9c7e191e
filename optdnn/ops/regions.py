"""Regions of a lowered program: kinds that one launch computes and that exist in no graph. They have no ONNX form.

A launch's operands are views: shape functions see the types of the views, and a launch rounds its results to the
types of its destinations. If a step's attributes have other names than the fields here, ``read`` and ``plain`` translate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from optdnn.errors import ShapeError
from optdnn.ops.attention import RotaryAttrs
from optdnn.ops.base import (
    EXACT,
    MOVEMENT,
    STEPS_TOL,
    Attrs,
    Call,
    Cost,
    NestedAttrs,
    Result,
    Tol,
    Traits,
    attrs_dict,
    same_type,
)
from optdnn.ops.checks import agree, elements, free, per_element, per_output, require_rank
from optdnn.ops.definition import OpDef
from optdnn.ops.held import (
    CACHED_ATTENTION,
    CHANNEL_ATTENTION,
    CHANNEL_RESULTS,
    CHANNEL_SUMS,
    FACTORED_ATTENTION,
    LINEAR_RESULTS,
    LINEAR_SUMS,
    PERIODIC_ATTENTION,
    ROUNDED_ATTENTION,
    held_attrs,
    infer_as,
    plain_held,
    region,
)
from optdnn.ops.rnn import RNNAttrs
from optdnn.runtime.reference.regions import GATES
from optdnn.types import FP32, INT8, INT32, DType, Shape, TensorType


@dataclass(frozen=True)
class FramesAttrs(Attrs):
    """Slice t of ``taps`` takes positions ``first + t * distance + i * step`` along ``axis``, for i in 0 .. ``count``.

    The slices form an axis of the result, before axis ``along``. Positions beyond the operand have the value ``fill``.
    """

    axis: int
    first: int
    distance: int
    step: int
    count: int
    taps: int
    along: int
    fill: float = 0


@dataclass(frozen=True)
class ZerosAttrs(Attrs):
    """The shape of the result."""

    shape: tuple[int, ...]


@dataclass(frozen=True)
class RecurrenceAttrs(NestedAttrs):
    """One direction of a layer of ``cell`` (LSTM, GRU or RNN), or all directions, with its attributes ``own``."""

    cell: str
    own: RNNAttrs

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> RecurrenceAttrs:
        own = held_attrs(given["cell"], without(given, "cell"))
        assert isinstance(own, RNNAttrs)
        return cls(given["cell"], own)

    def plain(self) -> dict[str, Any]:
        return {"cell": self.cell, **plain_held(self.cell, self.own)}


@dataclass(frozen=True)
class ResizedPictureAttrs(Attrs):
    """Images of integers resized to ``sizes`` (height, width) as by Resize, cropped to ``lengths`` pixels from ``starts`` on.

    Operand 1, if present, is added per channel."""

    sizes: tuple[int, int]
    starts: tuple[int, int]
    lengths: tuple[int, int]
    mode: str = "linear"
    coordinate_transformation_mode: str = "half_pixel"
    nearest_mode: str = "round_prefer_floor"
    cubic_coeff_a: float = -0.75
    exclude_outside: bool = False
    antialias: bool = False


@dataclass(frozen=True)
class StackedRNNAttrs(Attrs):
    """``layers`` of ``hidden`` cells, the first on ``inputs`` features; ``reverse``: from the end of the sequence."""

    cell: str
    layers: int
    hidden: int
    inputs: int
    reverse: bool = False


@dataclass(frozen=True)
class HeldAttrs(NestedAttrs):
    """The operator ``of`` with its attributes ``own``. A step holds them among its other fields, and their names as ``own``."""

    of: str
    own: Attrs

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Self:
        names = given["own"]
        own = held_attrs(given["of"], {name: given[name] for name in names})
        return cls(**without(given, "own", *names), own=own)

    def plain(self) -> dict[str, Any]:
        own = plain_held(self.of, self.own)
        return {"own": tuple(sorted(own)), **own, **without(attrs_dict(self), "own")}


@dataclass(frozen=True)
class QuantizedAttrs(HeldAttrs):
    """The operator ``of`` with its attributes ``own``, and the parameters that convert its result ``which`` to 8 bits ("Quantized")
    or fp16 ("Narrowed").

    The result is rounded to ``through``, multiplied by ``factor``, clipped, rounded and shifted by ``zero``. ``kept``: the result
    after rounding to ``through`` is a result, too. Results of ``of`` before it come first.
    """

    through: DType
    factor: float
    low: float = -128.0
    high: float = 127.0
    zero: int = 0
    narrow: DType = INT8
    kept: bool = False
    which: int = 0


@dataclass(frozen=True)
class RowMomentsAttrs(HeldAttrs):
    """The operator ``of`` with its attributes ``own``, and moments of each ``together`` channels of ``rows`` rows of its result.

    ``axis``: the axis of the channels; the others are the axes of the rows, in their order."""

    together: int
    axis: int = 1
    rows: int = 1


@dataclass(frozen=True)
class EdgePaddedAttrs(HeldAttrs):
    """The operator ``of`` with its attributes ``own``, on an operand whose edges are repeated along the spatial axes.

    ``edges``: the number of repetitions, begins, then ends.
    """

    edges: tuple[int, ...]


@dataclass(frozen=True)
class TurnedHeadsAttrs(HeldAttrs):
    """The operator ``of`` with its attributes ``own``. The first ``channels`` of its result's rows are heads of ``head`` features.

    The first ``turned`` of these rotate in pairs: a feature and the one ``turned / 2`` further, or ``interleaved`` neighbors.
    A position has the angles of ``parts`` heads, which take turns.
    """

    channels: int
    head: int
    turned: int
    interleaved: bool
    parts: int = 1


@dataclass(frozen=True)
class WeightsInPartsAttrs(HeldAttrs):
    """The operator ``of`` with its attributes ``own``. Each operand of ``at`` is a sum of two parts of 16 bits, times a factor for
    each of its rows. The second parts and the factors follow the operands, in the order of ``at``.

    The axis after the rows has ``counts`` channels, one count for each operand, padded to whole blocks. ``order``: the place in its
    block of each channel. ``scaled``: after the factors of each operand follow scales of its other axes."""

    at: tuple[int, ...]
    counts: tuple[int, ...]
    order: tuple[int, ...]
    scaled: bool = False


def without(given: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """All entries except the named ones."""
    return {name: value for name, value in given.items() if name not in names}


# ---------------------------------------------------------------- shapes


def _infer_copies(call: Call) -> Result:
    return Result(tuple(call.type(k) for k in range(len(call.types))))


def _infer_frames(call: Call) -> Result:
    a: FramesAttrs = call.attrs
    x = call.type(0)
    if not 0 <= a.axis < len(x.dims) or not 0 <= a.along <= len(x.dims):
        raise ShapeError(f"Frames along axis {a.axis} of {x}, stacked at {a.along}")
    dims = list(x.dims)
    dims[a.axis] = a.count
    dims.insert(a.along, a.taps)
    return Result((x.with_shape(dims),))


def _infer_zeros(call: Call) -> Result:
    return Result((TensorType(INT32, call.attrs.shape),))


def _infer_rotary_pair(call: Call) -> Result:
    x, cos, sin, y = call.types
    first, second = (infer_as(call, "RotaryEmbedding", call.attrs, (t, cos, sin)) for t in (x, y))
    return Result((*first.types, *second.types))


def _state_count(cell: str) -> int:
    return 2 if cell == "LSTM" else 1


def _infer_recurrence(call: Call) -> Result:
    a: RecurrenceAttrs = call.attrs
    gates, r = call.type(0), call.type(1)
    require_rank(gates, 3, "Recurrence gates")
    directions = r.dims[:-2]
    require_rank(r, 2 + len(directions[:1]), "Recurrence weights")
    width = r.dims[-2] if not directions else r.dims[-2] * directions[0]
    agree(gates.dims[2], width, f"Recurrence gates {gates} do not fit weights {r}")
    hidden = a.own.hidden_size
    agree(r.dims[-1], hidden, f"Recurrence weights {r} are not of the cells")
    length, batch, _ = gates.dims
    state = gates.with_shape((*directions, batch, hidden))
    return Result((gates.with_shape((length, *state.dims)), *[state] * _state_count(a.cell)))


def _infer_resized_picture(call: Call) -> Result:
    a: ResizedPictureAttrs = call.attrs
    x = call.type(0)
    require_rank(x, 4, "ResizedPicture")
    for start, length, size in zip(a.starts, a.lengths, a.sizes, strict=True):
        if start < 0 or length < 0 or start + length > size:
            raise ShapeError(f"ResizedPicture: {length} pixels from {start} on are not inside of {size}")
    return Result((TensorType(FP32, (*x.dims[:2], *a.lengths)),))


def _infer_stacked(call: Call) -> Result:
    a: StackedRNNAttrs = call.attrs
    x = call.type(0)
    require_rank(x, 3, "StackedRNN input")
    agree(x.dims[2], a.inputs, f"StackedRNN input {x} does not have the width of its weights")
    if a.cell not in GATES:
        raise ShapeError(f"StackedRNN of {a.cell} cells; there are {' and '.join(GATES)}")
    length, batch, _ = x.dims
    shapes: list[Shape] = [(length, batch, a.hidden), *[(a.layers, batch, a.hidden)] * _state_count(a.cell)]
    if a.layers > 1:
        shapes.append((a.layers - 1, length, batch, a.hidden))
    return Result(tuple(map(x.with_shape, shapes)))


def _infer_quantized(call: Call) -> Result:
    a: QuantizedAttrs = call.attrs
    *before, y = infer_as(call, a.of, a.own, call.types).types[: a.which + 1]
    narrow = y.with_dtype(a.narrow)
    return Result((*before, y.with_dtype(a.through), narrow) if a.kept else (*before, narrow))


def _infer_row_moments(call: Call) -> Result:
    a: RowMomentsAttrs = call.attrs
    (y,) = infer_as(call, a.of, a.own, call.types).types[:1]
    if not 0 < a.axis < len(y.dims):
        raise ShapeError(f"RowMoments of {y}: there are no channels along axis {a.axis}")
    channels = y.dims[a.axis]
    rows = math.prod(y.dims[: a.axis]) * math.prod(y.dims[a.axis + 1 :])
    agree(channels % a.together, 0, f"RowMoments of {y}: its rows are not whole groups of {a.together}")
    agree(rows % a.rows, 0, f"RowMoments of {y}: it has no whole groups of {a.rows} rows")
    return Result((y, TensorType(FP32, (channels // a.together, rows // a.rows, 2))))


def _infer_edge_padded(call: Call) -> Result:
    a: EdgePaddedAttrs = call.attrs
    x = call.type(0)
    half = len(x.dims) - 2
    if len(a.edges) != 2 * half or min(a.edges, default=0) < 0:
        raise ShapeError(f"EdgePadded of {x} by {a.edges}")
    dims = (*x.dims[:2], *(n + p + q for n, p, q in zip(x.dims[2:], a.edges[:half], a.edges[half:], strict=True)))
    return infer_as(call, a.of, a.own, (x.with_shape(dims), *call.types[1:]))


def _infer_turned_heads(call: Call) -> Result:
    a: TurnedHeadsAttrs = call.attrs
    *reads, angles = call.types
    (y,) = infer_as(call, a.of, a.own, reads).types[:1]
    assert angles is not None
    require_rank(angles, 4, "TurnedHeads angles")
    agree(
        angles.dims[1] * 16, a.turned * a.parts, f"TurnedHeads angles {angles} do not fit {a.turned * a.parts} features"
    )
    agree(y.dims[0] % angles.dims[0], 0, f"TurnedHeads of {y}: its rows do not cover all positions of {angles}")
    return Result((y,))


def _infer_weights_in_parts(call: Call) -> Result:
    a: WeightsInPartsAttrs = call.attrs
    each = 3 if a.scaled else 2
    reads = list(call.types[: len(call.types) - each * len(a.at)])
    for i, k in enumerate(a.at):
        axis, dims = len(call.type(len(reads) + each * i + 1).dims), list(call.type(k).dims)
        dims[axis] = a.counts[i]
        reads[k] = TensorType(FP32, tuple(dims))
    return Result(infer_as(call, a.of, a.own, reads).types)


# ---------------------------------------------------------------- definitions


def _cost_rotary_pair(call: Call, result: Result) -> Cost:
    return Cost(3 * sum(map(elements, result.types)))


DEFS: tuple[OpDef, ...] = (
    CACHED_ATTENTION,
    CHANNEL_ATTENTION,
    CHANNEL_RESULTS,
    CHANNEL_SUMS,
    region("Copies", _infer_copies, cost=free, tol=EXACT, traits=MOVEMENT),
    region("Copy", same_type, cost=free, tol=EXACT, traits=MOVEMENT),
    FACTORED_ATTENTION,
    LINEAR_RESULTS,
    LINEAR_SUMS,
    ROUNDED_ATTENTION,
    region("Frames", _infer_frames, FramesAttrs, cost=free, tol=EXACT, traits=MOVEMENT),
    region("MaskedSoftmax", same_type, cost=per_element(5)),
    PERIODIC_ATTENTION,
    region("Narrowed", _infer_quantized, QuantizedAttrs, tol=STEPS_TOL, traits=Traits(own_precision=True)),
    region("Quantized", _infer_quantized, QuantizedAttrs, traits=Traits(own_precision=True)),
    region("Recurrence", _infer_recurrence, RecurrenceAttrs, tol=STEPS_TOL),
    region("EdgePadded", _infer_edge_padded, EdgePaddedAttrs, tol=STEPS_TOL),
    region("RowMoments", _infer_row_moments, RowMomentsAttrs, tol=STEPS_TOL),
    region("ResizedPicture", _infer_resized_picture, ResizedPictureAttrs, cost=per_output(8), tol=Tol(1e-5, 1e-4)),
    region("RotaryPair", _infer_rotary_pair, RotaryAttrs, cost=_cost_rotary_pair),
    region("TurnedHeads", _infer_turned_heads, TurnedHeadsAttrs, tol=STEPS_TOL),
    region("StackedRNN", _infer_stacked, StackedRNNAttrs, tol=STEPS_TOL),
    region("WeightsInParts", _infer_weights_in_parts, WeightsInPartsAttrs, tol=STEPS_TOL),
    region("Zeros", _infer_zeros, ZerosAttrs, cost=free, tol=EXACT),
)
