"""Data movement along axes: Concat, Split, Slice, Pad, Tile, DepthToSpace, SpaceToDepth, and the running sums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from optdnn.dim import Dim, DimLike, bounds, dim_max, dim_min, floordiv, mod
from optdnn.errors import ShapeError, UnsupportedError
from optdnn.ops.base import Attrs, Call, Result, promote_types
from optdnn.ops.checks import emit
from optdnn.ops.definition import OpDef
from optdnn.ops.exchange import Emit, Export, NodeSpec, Ref, normalized_axis
from optdnn.ops.shape import define_free, known_axes, target_dims
from optdnn.ops.values import ceil_div, concrete_ints, moved, require, require_ints, static_ints, with_values
from optdnn.types import TensorType, is_float, is_int, normalize_axis, show_shape


@dataclass(frozen=True)
class ConcatAttrs(Attrs):
    axis: int = 0


@dataclass(frozen=True)
class SplitAttrs(Attrs):
    """``num_outputs``: the number of equal parts (the last may be smaller); None if operand 1 gives the sizes."""

    axis: int = 0
    num_outputs: int | None = None


@dataclass(frozen=True)
class PadAttrs(Attrs):
    """``mode`` is "constant", "reflect", "edge" or "wrap"."""

    mode: str = "constant"


@dataclass(frozen=True)
class BlockAttrs(Attrs):
    """``mode`` is "DCR" (depth, column, row) or "CRD"."""

    blocksize: int = 1
    mode: str = "DCR"


@dataclass(frozen=True)
class CumulativeAttrs(Attrs):
    exclusive: bool = False
    reverse: bool = False


# ---------------------------------------------------------------- Concat and Split


def _infer_concat(call: Call) -> Result:
    types = [t for t in call.types if t is not None]
    require(bool(types), call, "an operand")
    dtype = promote_types(types, "Concat")
    shapes = [t.shape for t in types if t.shape is not None]
    if len(shapes) != len(types):
        rank = next((len(s) for s in shapes), None)
        return Result((TensorType(dtype, None if rank is None else tuple(call.fresh("concat") for _ in range(rank))),))
    axis = normalize_axis(call.attrs.axis, len(shapes[0]))
    dims = list(shapes[0])
    for s in shapes[1:]:
        if len(s) != len(dims):
            raise ShapeError(f"Concat of tensors of different rank: {', '.join(map(str, types))}")
        for i, d in enumerate(s):
            if i == axis:
                dims[i] = dims[i] + d
            elif isinstance(dims[i], Dim):
                dims[i] = d if isinstance(d, int) else dims[i]
            elif isinstance(d, int) and d != dims[i]:
                raise ShapeError(f"Concat along axis {axis} of {', '.join(map(str, types))}: axis {i} differs")
    return Result((TensorType(dtype, tuple(dims)),))


def _infer_split(call: Call) -> Result:
    x, n = call.type(0), call.n_outputs
    if x.shape is None:
        return Result((x,) * n)
    axis = normalize_axis(call.attrs.axis, len(x.shape))
    dim = x.shape[axis]
    sizes: Sequence[DimLike] | None
    if call.has(1):
        sizes = target_dims(call, 1, "split", n)
        if sizes is None:
            sizes = [call.fresh("split") for _ in range(n)]
        total: DimLike = 0
        for s in sizes:
            total = total + s
        low, high = bounds(total - dim)
        if call.value(1) is not None and (low > 0 or high < 0):
            raise ShapeError(f"Split sizes {show_shape(sizes)} do not add up to {dim}, axis {axis} of {x}")
    else:
        parts = call.attrs.num_outputs
        require(parts is not None, call, "sizes or num_outputs", x)
        if parts != n:
            raise ShapeError(f"Split of {x} gives {parts} parts, and has {n} outputs")
        chunk = ceil_div(dim, parts)
        exact = mod(dim, parts) == 0
        sizes = [chunk if exact else dim_max(0, dim_min(chunk, dim - i * chunk)) for i in range(parts)]
    if len(sizes) != n:
        raise ShapeError(f"Split of {x} gives {len(sizes)} parts, and has {n} outputs")
    return Result(tuple(x.with_shape([*x.shape[:axis], s, *x.shape[axis + 1 :]]) for s in sizes))


def _import_concat(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    return e.op("Concat", node.inputs, ConcatAttrs(normalized_axis(node, e, 1)))


def _import_split(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    """Split; sizes were an attribute before opset 13, and ``num_outputs`` is implied by the outputs before opset 18."""
    n, x = len(node.outputs), node.input(0)
    axis, sizes = normalized_axis(node, e, 0), node.input(1)
    if node.opset < 13 and node.ints("split"):
        sizes = np.asarray(node.ints("split"), dtype=np.int64)
    if sizes is not None:
        return e.op("Split", [x, sizes], SplitAttrs(axis), outputs=n)
    return e.op("Split", [x], SplitAttrs(axis, int(node.get("num_outputs", n))), outputs=n)


# ---------------------------------------------------------------- Slice


def _infer_slice(call: Call) -> Result:
    x = call.type(0)
    starts, ends = target_dims(call, 1, "slice"), target_dims(call, 2, "slice")
    if x.shape is None or starts is None or ends is None:
        return Result((x if x.shape is None else x.with_shape([call.fresh("slice", d) for d in x.shape]),))
    rank, count = len(x.shape), len(starts)
    axes: list[int] | None = list(range(count)) if not call.has(3) else known_axes(call, 3, rank)
    steps: tuple[int, ...] | None = (1,) * count if not call.has(4) else concrete_ints(call, 4)
    if axes is None:
        return Result((x.with_shape([call.fresh("slice", d) for d in x.shape]),))
    if len(ends) != count or len(axes) != count or (steps is not None and len(steps) != count) or count > rank:
        raise ShapeError(f"Slice of {x}: starts, ends, axes and steps differ in length")
    dims = list(x.shape)
    for i, axis in enumerate(axes):
        size: DimLike | None = None
        if steps is not None and call.value(1) is not None and call.value(2) is not None:
            size = sliced(dims[axis], starts[i], ends[i], steps[i])
        dims[axis] = call.fresh("slice", dims[axis]) if size is None else size
    return Result((x.with_shape(dims),))


def sliced(dim: DimLike, start: DimLike, end: DimLike, step: int) -> DimLike | None:
    """The number of elements of ``start:end:step`` on ``dim``; None if the sign of a bound depends on symbols."""
    if step == 0:
        raise ShapeError("Slice with a step of zero")
    first, last = _from_front(start, dim), _from_front(end, dim)
    if first is None or last is None:
        return None
    if step > 0:
        first, last = dim_max(first, 0), dim_min(last, dim)
        return dim_max(0, ceil_div(last - first, step))
    first, last = dim_min(first, dim - 1), dim_max(last, -1)
    return dim_max(0, ceil_div(first - last, -step))


def _from_front(position: DimLike, dim: DimLike) -> DimLike | None:
    low, high = bounds(position)
    if low >= 0:
        return position
    return position + dim if high < 0 else None


def _import_slice(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    """Slice; starts, ends and axes were attributes before opset 10. tf2onnx writes a number of rank 0 for a single one."""
    if node.opset >= 10:
        listed = [
            v if v is None or e.type(v).rank != 0 else emit(e, "Reshape", v, np.array([1])) for v in node.inputs[1:]
        ]
        return e.op("Slice", [node.input(0), *listed])
    operands = [node.ints(name) for name in ("starts", "ends", "axes")]
    return e.op("Slice", [node.input(0), *(np.asarray(v, dtype=np.int64) for v in operands if v is not None)])


# ---------------------------------------------------------------- Pad and Tile


def _infer_pad(call: Call) -> Result:
    x, pads = call.type(0), target_dims(call, 1, "pad")
    require(call.attrs.mode in ("constant", "reflect", "edge", "wrap"), call, f"a known mode, not {call.attrs.mode!r}")
    if call.has(2):
        value = call.type(2)
        promote_types((x, value), "Pad")
    if x.shape is None:
        return Result((x,))
    axes = list(range(len(x.shape))) if not call.has(3) else known_axes(call, 3, len(x.shape))
    if axes is None or pads is None:
        return Result((x.with_shape([call.fresh("pad") for _ in x.shape]),))
    if len(pads) != 2 * len(axes):
        raise ShapeError(f"Pad of {x} has {len(pads)} pads for {len(axes)} axes")
    dims = list(x.shape)
    for i, axis in enumerate(axes):
        before, after = pads[i], pads[i + len(axes)]
        dims[axis] = dims[axis] + before + after if call.value(1) is not None else call.fresh("pad")
        if bounds(dims[axis])[1] < 0:
            raise ShapeError(f"Pad by ({before}, {after}) leaves nothing of axis {axis} of {x}")
        cropped = x.shape[axis] + dim_min(before, 0) + dim_min(after, 0)
        if call.value(1) is not None and bounds(cropped)[1] < 0:
            raise ShapeError(f"Pad by ({before}, {after}) takes more than there is of axis {axis} of {x}")
    return Result((x.with_shape(dims),))


def _import_pad(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    """Pad; pads and value were attributes before opset 11. Known axes (opset 18) are resolved into pads of all axes."""
    mode, x = node.get("mode", "constant"), node.input(0)
    t = e.type(x)
    if node.opset < 11:
        pads = np.asarray(node.ints("pads"), dtype=np.int64)
        value = float(node.get("value", 0.0))
        operands: list[Any] = [x, pads]
        if mode == "constant" and value != 0.0:
            operands.append(np.asarray(value, dtype=t.dtype))
        return e.op("Pad", operands, PadAttrs(mode))
    operands = list(node.inputs)
    axes, given = static_ints(e, node.input(3)), static_ints(e, node.input(1))
    if axes is not None and given is not None and t.rank is not None and len(given) == 2 * len(axes):
        full = np.zeros(2 * t.rank, dtype=np.int64)
        for i, a in enumerate(normalize_axis(a, t.rank) for a in axes):
            full[a], full[a + t.rank] = given[i], given[i + len(axes)]
        operands = [x, full, node.input(2)]
    while operands[-1] is None:
        operands.pop()
    return e.op("Pad", operands, PadAttrs(mode))


def _infer_tile(call: Call) -> Result:
    x, repeats = call.type(0), target_dims(call, 1, "tile")
    if x.shape is None:
        return Result((x,))
    if repeats is None or call.value(1) is None:
        return Result((x.with_shape([call.fresh("tile") for _ in x.shape]),))
    if len(repeats) != len(x.shape):
        raise ShapeError(f"Tile of {x} has {len(repeats)} repeats")
    if any(bounds(r)[1] < 0 for r in repeats):
        raise ShapeError(f"Tile of {x} has negative repeats, {show_shape(repeats)}")
    return Result((x.with_shape([d * r for d, r in zip(x.shape, repeats, strict=True)]),))


# ---------------------------------------------------------------- blocks and running sums


def _infer_blocks(call: Call) -> Result:
    x, b = call.type(0), call.attrs.blocksize
    require(x.shape is None or len(x.shape) == 4, call, "a tensor of rank 4", x)
    require(b > 0 and call.attrs.mode in ("DCR", "CRD"), call, "a positive blocksize and mode DCR or CRD")
    if x.shape is None:
        return Result((x.with_shape([call.fresh("blocks") for _ in range(4)]),))
    n, c, h, w = x.shape
    if call.kind == "DepthToSpace":
        parts = [(c, b * b)]
        dims = (n, floordiv(c, b * b), h * b, w * b)
    else:
        parts = [(h, b), (w, b)]
        dims = (n, c * (b * b), floordiv(h, b), floordiv(w, b))
    for d, by in parts:
        if isinstance(d, int) and d % by:
            raise ShapeError(f"{call.kind} of {x}: {d} is not a multiple of {by}")
    return Result((x.with_shape(dims),))


def _export_space_to_depth(attrs: BlockAttrs, inputs: Sequence[str], n_outputs: int, e: Export) -> Sequence[str]:
    """``mode`` is new in opset 28: CRD is DCR followed by a permutation of the channels."""
    blocks = e.node("SpaceToDepth", inputs, blocksize=attrs.blocksize)
    if attrs.mode == "DCR":
        return blocks
    channels = e.type(inputs[0]).dims[1]
    if isinstance(channels, Dim):
        raise UnsupportedError(f"SpaceToDepth of {channels} channels in CRD mode cannot be written")
    order = np.arange(channels * attrs.blocksize**2).reshape(attrs.blocksize**2, channels).T.reshape(-1)
    return e.node("Gather", [*blocks, e.const(order.astype(np.int64))], axis=1)


def _infer_cumulative(call: Call) -> Result:
    x, axis = call.type(0), call.type(1)
    require(is_float(x.dtype) or is_int(x.dtype), call, "a numeric operand", x)
    require_ints(call, 1)
    require(axis.size == 1, call, "an axis of one element", axis)
    if x.shape is not None:
        known_axes(call, 1, len(x.shape))
    return Result((x,))


# ---------------------------------------------------------------- the table


def _define_cumulative(kind: str) -> OpDef:
    return OpDef(kind, with_values(_infer_cumulative, moved(0)), CumulativeAttrs)


DEFS: tuple[OpDef, ...] = (
    define_free("Concat", _infer_concat, ConcatAttrs, symbolic=moved(), onnx=_import_concat),
    define_free("Split", _infer_split, SplitAttrs, symbolic=moved(0), onnx=_import_split),
    define_free("Slice", _infer_slice, symbolic=moved(0), onnx=_import_slice),
    define_free("Pad", _infer_pad, PadAttrs, symbolic=moved(0, 2), onnx=_import_pad),
    define_free("Tile", _infer_tile, symbolic=moved(0)),
    define_free("DepthToSpace", _infer_blocks, BlockAttrs),
    define_free("SpaceToDepth", _infer_blocks, BlockAttrs, to_onnx=_export_space_to_depth),
    _define_cumulative("CumSum"),
    _define_cumulative("CumProd"),
)
