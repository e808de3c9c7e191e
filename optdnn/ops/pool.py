"""Pooling: MaxPool, AveragePool, LpPool and their global forms, MaxUnpool."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from optdnn.dim import DimLike
from optdnn.errors import ShapeError
from optdnn.limits import WINDOW
from optdnn.ops.base import EXACT, Attrs, Call, Cost, Result, Traits, Unsupported
from optdnn.ops.checks import agree_all, elements, extent, needs, per_element, require_length, require_rank, required
from optdnn.ops.definition import OpDef
from optdnn.ops.exchange import Emit, Export, FromOnnx, NodeSpec, Ref, read_attrs
from optdnn.ops.window import Window, check_window, read_window
from optdnn.runtime.reference.window import output_sizes
from optdnn.types import INT8, INT64, UINT8, TensorType, is_float


@dataclass(frozen=True)
class PoolAttrs(Attrs):
    """Attributes of all pools; ``pads`` are begins then ends, and ``auto_pad`` is as in ``ConvAttrs``."""

    kernel_shape: tuple[int, ...]
    strides: tuple[int, ...]
    pads: tuple[int, ...]
    dilations: tuple[int, ...]
    ceil_mode: bool = False
    auto_pad: str = "NOTSET"


@dataclass(frozen=True)
class MaxPoolAttrs(PoolAttrs):
    """``indices``: there is a second output, in ``storage_order`` (0 row-major, 1 column-major)."""

    storage_order: int = 0
    indices: bool = False


@dataclass(frozen=True)
class AveragePoolAttrs(PoolAttrs):
    count_include_pad: bool = False


@dataclass(frozen=True)
class LpPoolAttrs(PoolAttrs):
    p: int = 2


@dataclass(frozen=True)
class GlobalLpPoolAttrs(Attrs):
    p: int = 2


@dataclass(frozen=True)
class MaxUnpoolAttrs(Attrs):
    kernel_shape: tuple[int, ...]
    strides: tuple[int, ...]
    pads: tuple[int, ...]


def _input(call: Call, integers: bool = False) -> TensorType:
    x = call.type(0)
    if len(x.dims) < 2:
        raise ShapeError(f"{call.kind} input {x} must have a batch and a channel axis")
    if not is_float(x.dtype) and not (integers and x.dtype in (INT8, UINT8)):
        raise ShapeError(f"{call.kind} input is {x}; that element type is not allowed")
    return x


def _infer_pool(call: Call) -> Result:
    a: PoolAttrs = call.attrs
    x = _input(call, integers=call.kind == "MaxPool")
    n, c, *spatial = x.dims
    require_length(a.kernel_shape, len(spatial), f"{call.kind} kernel_shape")
    check_window(call.kind, len(spatial), a.strides, a.pads, a.dilations)
    if isinstance(a, LpPoolAttrs) and a.p < 1:
        raise ShapeError(f"{call.kind} has the norm {a.p}")
    if math.prod(a.kernel_shape) > WINDOW.value:  # NumPy handles each of its positions separately
        raise ShapeError(f"{call.kind} has a window of {list(a.kernel_shape)}", hint=WINDOW.hint)
    sizes = output_sizes(a.auto_pad, a.pads, spatial, a.kernel_shape, a.strides, a.dilations, a.ceil_mode)
    y = x.with_shape((n, c, *sizes))
    if isinstance(a, MaxPoolAttrs) and a.indices:
        return Result((y, y.with_dtype(INT64)))
    return Result((y,))


def _infer_global(call: Call) -> Result:
    x = _input(call, integers=call.kind == "GlobalMaxPool")
    return Result((x.with_shape((*x.dims[:2], *(1,) * (len(x.dims) - 2))),))


def _infer_unpool(call: Call) -> Result:
    a: MaxUnpoolAttrs = call.attrs
    x, indices = _input(call), call.type(1)
    rank = len(x.dims) - 2
    require_length(a.kernel_shape, rank, "MaxUnpool kernel_shape")
    check_window("MaxUnpool", rank, a.strides, a.pads, (1,) * rank)
    require_rank(indices, rank + 2, "MaxUnpool indices")
    if indices.dtype != INT64:
        raise ShapeError(f"MaxUnpool indices are {indices}; they must be int64")
    agree_all(x.dims, indices.dims, f"MaxUnpool input {x} and indices {indices} have different shapes")
    sizes: list[DimLike] = [
        (x.dims[2 + i] - 1) * a.strides[i] + a.kernel_shape[i] - a.pads[i] - a.pads[rank + i] for i in range(rank)
    ]
    shape: tuple[DimLike, ...] = (*x.dims[:2], *sizes)
    if call.has(2):
        given = call.ints(2)
        if given is None:
            shape = tuple(call.fresh("unpooled") for _ in shape)
        else:
            require_length(given, rank + 2, "MaxUnpool output_shape")
            for g, s in zip(given, shape, strict=True):
                if isinstance(g, int) and isinstance(s, int) and g < s:
                    raise ShapeError(f"MaxUnpool output_shape {list(given)} is smaller than {list(shape)}")
            shape = given
    return Result((x.with_shape(shape),))


def _window(node: NodeSpec, e: Emit) -> tuple[tuple[int, ...], Window, bool]:
    (x,) = needs(node, 0)
    kernel = tuple(int(k) for k in required(node, "kernel_shape"))
    spatial = e.type(x).dims[2:]
    require_length(kernel, len(spatial), f"{node.op_type} kernel_shape")
    if min(kernel, default=1) < 1:
        raise ShapeError(f"{node.op_type} kernel_shape {kernel} must be positive")
    win = read_window(node, len(kernel), spatial, kernel)
    # Under auto_pad, rounding up and down give the same sizes.
    ceil = bool(node.get("ceil_mode", 0)) and str(node.get("auto_pad", "NOTSET")) in ("NOTSET", "")
    return kernel, win, ceil


def _import_pool(attrs: type[PoolAttrs]) -> FromOnnx:
    def from_onnx(node: NodeSpec, e: Emit) -> Sequence[Ref]:
        kernel, win, ceil = _window(node, e)
        if ceil:
            kernel = _within_input(kernel, win, e.type(needs(node, 0)[0]).dims[2:])
        window = {**vars(win), "kernel_shape": kernel, "ceil_mode": ceil}
        indices = attrs is MaxPoolAttrs and len(node.outputs) > 1 and bool(node.outputs[1])
        a = read_attrs(attrs)(replace(node, attrs={**node.attrs, **window, "indices": indices}))
        return e.op(node.op_type, node.inputs, a, outputs=1 + indices)

    return from_onnx


def _within_input(kernel: tuple[int, ...], win: Window, spatial: Sequence[DimLike]) -> tuple[int, ...]:
    """The kernel without positions behind the padded input, along axes with one window that is larger. They add nothing to it.

    Rounding up allows such windows: in Hugging Face's EfficientNet, a pool as large as the number of channels is a global one.
    """
    rank, found = len(kernel), list(kernel)
    for i, size in enumerate(spatial):
        if isinstance(size, int) and win.dilations[i] == 1:
            padded = size + win.pads[i] + win.pads[rank + i]
            if padded > 0 and 0 < kernel[i] - padded < win.strides[i]:
                found[i] = padded
    return tuple(found)


def _import_unpool(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    kernel, win, _ = _window(node, e)
    return e.op("MaxUnpool", node.inputs, MaxUnpoolAttrs(kernel, win.strides, win.pads))


def _without_dropped_windows(attrs: PoolAttrs, x: TensorType) -> PoolAttrs:
    """``attrs`` rounding down, with the end pads that give the same windows, if rounding up drops a window.

    Below opset 22, ONNX's own shape inference counts such a window, although no implementation computes one.
    """
    if not attrs.ceil_mode or attrs.auto_pad != "NOTSET" or not x.is_static:
        return attrs
    rank, ends, dropped = len(attrs.kernel_shape), [], False
    geometry = zip(x.static_shape[2:], attrs.kernel_shape, attrs.strides, attrs.dilations, strict=True)
    for i, (size, kernel, stride, dilation) in enumerate(geometry):
        begin, end = attrs.pads[i], attrs.pads[rank + i]
        span = (kernel - 1) * dilation + 1
        counted = -(-(size + begin + end - span) // stride) + 1
        kept = min(counted, -(-(size + begin) // stride))
        dropped = dropped or kept != counted
        ends.append(max(0, (kept - 1) * stride + span - size - begin))
    grown = any(new > old for new, old in zip(ends, attrs.pads[rank:], strict=True))
    if not dropped or (grown and getattr(attrs, "count_include_pad", False)):  # more padding would count
        return attrs
    return replace(attrs, ceil_mode=False, pads=(*attrs.pads[:rank], *ends))


def _export_pool(attrs: PoolAttrs, inputs: Sequence[str], n_outputs: int, e: Export) -> Sequence[str]:
    kind = type(attrs).__name__.removesuffix("Attrs")
    attrs = _without_dropped_windows(attrs, e.type(inputs[0]))
    if attrs.auto_pad != "NOTSET" and any(d != 1 for d in attrs.dilations):
        raise Unsupported(
            "auto_pad with dilations and sizes that are not known: implementations disagree on the padding"
        )
    values = {f.name: getattr(attrs, f.name) for f in fields(attrs)}
    values.pop("indices", None)
    values["ceil_mode"] = int(attrs.ceil_mode)
    values.pop("pads" if attrs.auto_pad != "NOTSET" else "auto_pad")
    # Left out if they have no effect: ONNX Runtime turns a quantized AveragePool into an operator without dilations.
    if all(d == 1 for d in attrs.dilations):
        del values["dilations"]
    return e.node(kind, inputs, n_outputs, **values)


def _cost_pool(call: Call, result: Result) -> Cost:
    return Cost(elements(result.types[0]) * (extent(*call.attrs.kernel_shape) + (call.kind != "MaxPool")))


DEFS: tuple[OpDef, ...] = (
    OpDef(
        "MaxPool",
        _infer_pool,
        MaxPoolAttrs,
        _import_pool(MaxPoolAttrs),
        _export_pool,
        cost=_cost_pool,
        tol=EXACT,
        traits=Traits(monotone=True),
    ),
    OpDef(
        "AveragePool",
        _infer_pool,
        AveragePoolAttrs,
        _import_pool(AveragePoolAttrs),
        _export_pool,
        cost=_cost_pool,
    ),
    OpDef(
        "LpPool",
        _infer_pool,
        LpPoolAttrs,
        _import_pool(LpPoolAttrs),
        _export_pool,
        cost=lambda call, result: Cost(elements(result.types[0]) * (2 * extent(*call.attrs.kernel_shape) + 1)),
    ),
    OpDef("GlobalMaxPool", _infer_global, cost=per_element(1), tol=EXACT, traits=Traits(monotone=True)),
    OpDef("GlobalAveragePool", _infer_global, cost=per_element(1)),
    OpDef("GlobalLpPool", _infer_global, GlobalLpPoolAttrs, cost=per_element(2)),
    OpDef("MaxUnpool", _infer_unpool, MaxUnpoolAttrs, _import_unpool, cost=per_element(0), tol=EXACT),
)
