"""Normalizations: BatchNormalization, InstanceNormalization, GroupNormalization, LayerNormalization, LRN, and the like."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from optdnn.errors import ShapeError
from optdnn.ops.base import Attrs, Call, Cost, Infer, Result, Tol, Unsupported
from optdnn.ops.checks import agree, elements, emit, floating, per_element, require_rank, required
from optdnn.ops.definition import OpDef
from optdnn.ops.exchange import Emit, Export, NodeSpec, Ref
from optdnn.types import (
    BF16,
    FP16,
    FP32,
    FP64,
    DType,
    Shape,
    TensorType,
    is_float,
    normalize_axis,
)


@dataclass(frozen=True)
class EpsilonAttrs(Attrs):
    """``epsilon`` is added to the variance."""

    epsilon: float = 1e-5


@dataclass(frozen=True)
class GroupNormAttrs(Attrs):
    """Statistics over each of ``num_groups`` groups of channels; scale and bias are per channel."""

    num_groups: int
    epsilon: float = 1e-5
    stash_type: DType = FP32


@dataclass(frozen=True)
class LayerNormAttrs(Attrs):
    """Statistics over the axes from ``axis`` on; ``stash_type`` is the type of the optional statistics outputs."""

    axis: int = -1
    epsilon: float = 1e-5
    stash_type: DType = FP32


@dataclass(frozen=True)
class DeviationNormAttrs(Attrs):
    """Statistics over the axes from ``axis`` on. ``epsilon`` is added to the variance, ``root_epsilon`` to its root.

    ``about_mean``: the variance is about the mean, else about 0. ``centered``: the mean is subtracted from the result, too."""

    axis: int = -1
    epsilon: float = 0.0
    root_epsilon: float = 0.0
    about_mean: bool = True
    centered: bool = True


@dataclass(frozen=True)
class LRNAttrs(Attrs):
    size: int
    alpha: float = 1e-4
    beta: float = 0.75
    bias: float = 1.0


@dataclass(frozen=True)
class LpNormAttrs(Attrs):
    """``epsilon``: the lower bound of the divisor (PyTorch's ``normalize``); ONNX has none."""

    axis: int = -1
    p: int = 2
    epsilon: float = 0.0


@dataclass(frozen=True)
class MeanVarianceAttrs(Attrs):
    axes: tuple[int, ...] = (0, 2, 3)


# ---------------------------------------------------------------- inference


def _input(call: Call, least: int = 1) -> TensorType:
    x = floating(call)
    if len(x.dims) < least:
        raise ShapeError(f"{call.kind} input {x} must have at least {least} dimensions")
    return x


def _infer_per_channel(*names: str, mixed: bool = False, least: int = 3) -> Infer:
    """Inference of x (N, C, *) with one value per channel in each further operand (of x's type unless ``mixed``)."""

    def infer(call: Call) -> Result:
        x = _input(call, least)
        for i, name in enumerate(names, 1):
            t = call.type(i)
            require_rank(t, 1, f"{call.kind} {name}")
            agree(t.dims[0], x.dims[1], f"{call.kind} {name} and the channels of {x} differ")
            if not is_float(t.dtype) or (t.dtype != x.dtype and not mixed):
                raise ShapeError(f"{call.kind} {name} is {t}, its input {x}")
        return Result((x,))

    return infer


def _infer_group(call: Call) -> Result:
    groups = call.attrs.num_groups
    x = _input(call, 2)
    if groups < 1:
        raise ShapeError(f"GroupNormalization num_groups is {groups}")
    agree(x.dims[1] % groups, 0, f"GroupNormalization: {groups} groups do not divide the channels of {x}")
    return _infer_per_channel("scale", "bias", least=2)(call)


def _check_affine(call: Call, x: TensorType, i: int, name: str) -> TensorType:
    t = call.type(i)
    what = f"{call.kind} {name} {t} does not broadcast to its input {x}"
    if len(t.dims) > len(x.dims):
        raise ShapeError(what)
    for size, target in zip(reversed(t.dims), reversed(x.dims), strict=False):
        if size != 1:
            agree(size, target, what)
    return t


def _check_affines(call: Call, x: TensorType) -> None:
    """The scale, and the bias if there is one, broadcast to x and have its type."""
    for i, name in ((1, "scale"), (2, "bias")):
        if (i == 1 or call.has(i)) and _check_affine(call, x, i, name).dtype != x.dtype:
            raise ShapeError(f"{call.kind} {name} is {call.type(i)}, its input {x}")


def _infer_layer(call: Call) -> Result:
    a: LayerNormAttrs = call.attrs
    x = _input(call)
    axis = normalize_axis(a.axis, len(x.dims), "LayerNormalization axis")
    _check_affines(call, x)
    ones: Shape = (1,) * (len(x.dims) - axis)
    statistics = TensorType(a.stash_type, (*x.dims[:axis], *ones))
    return Result((x, statistics, statistics)[: call.n_outputs])


def _infer_rms(call: Call) -> Result:
    x = _input(call)
    normalize_axis(call.attrs.axis, len(x.dims), "RMSNormalization axis")
    return Result((x.with_dtype(_check_affine(call, x, 1, "scale").dtype),))


def _infer_deviation(call: Call) -> Result:
    a: DeviationNormAttrs = call.attrs
    x = _input(call)
    normalize_axis(a.axis, len(x.dims), "DeviationNormalization axis")
    if a.centered and not a.about_mean:
        raise ShapeError("DeviationNormalization subtracts the mean, so its variance must be about the mean")
    if not (0 <= a.epsilon < np.inf and 0 <= a.root_epsilon < np.inf):
        raise ShapeError(f"DeviationNormalization epsilons are {a.epsilon} and {a.root_epsilon}")
    _check_affines(call, x)
    return Result((x,))


def _infer_lrn(call: Call) -> Result:
    if call.attrs.size < 1:
        raise ShapeError(f"LRN size is {call.attrs.size}")
    return Result((_input(call, 2),))


def _infer_lp(call: Call) -> Result:
    x = _input(call)
    normalize_axis(call.attrs.axis, len(x.dims), "LpNormalization axis")
    if call.attrs.p not in (1, 2):
        raise ShapeError(f"LpNormalization p is {call.attrs.p}; it must be 1 or 2")
    if not 0 <= call.attrs.epsilon < np.inf:
        raise ShapeError(f"LpNormalization epsilon is {call.attrs.epsilon}")
    return Result((x,))


def _infer_mean_variance(call: Call) -> Result:
    x = _input(call)
    for a in call.attrs.axes:
        normalize_axis(a, len(x.dims), "MeanVarianceNormalization axis")
    return Result((x,))


# ---------------------------------------------------------------- import


def _epsilon(node: NodeSpec) -> float:
    return float(node.get("epsilon", 1e-5))


def _stash(node: NodeSpec) -> DType:
    number = int(node.get("stash_type", 1))
    known = {1: FP32, 10: FP16, 11: FP64, 16: BF16}
    if number not in known:
        raise Unsupported(f"stash_type {number}; it must be a floating-point type")
    return known[number]


def _import_batch(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    if node.get("training_mode", 0):
        return _training(node, e)
    if any(node.outputs[1:]):
        raise Unsupported("its statistics outputs are used (training mode); export the model for inference")
    if node.opset < 9 and not node.get("spatial", 1):
        return _per_activation(node, e)
    return e.op("BatchNormalization", node.inputs, EpsilonAttrs(_epsilon(node)))


def _training(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    """training_mode=1 (opset 14): the batch's own statistics (population variance), and their update of the running statistics."""
    x, scale, bias, mean, var = node.inputs
    t, dtype = e.type(x), e.type(mean).dtype
    wide = x if t.dtype.itemsize >= FP32.itemsize else emit(e, "Cast", x, to=FP32)
    axes = np.array([i for i in range(len(t.dims)) if i != 1])
    kept = emit(e, "ReduceMean", wide, axes, keepdims=True)
    centered = emit(e, "Sub", wide, kept)
    spread = emit(e, "ReduceMean", emit(e, "Mul", centered, centered), axes, keepdims=False)
    batch = [emit(e, "Squeeze", kept, axes), spread]
    if e.type(wide).dtype != dtype:
        batch = [emit(e, "Cast", v, to=dtype) for v in batch]
    (y,) = e.op("BatchNormalization", [x, scale, bias, *batch], EpsilonAttrs(_epsilon(node)))
    momentum = float(node.get("momentum", 0.9))
    old, new = np.asarray(momentum, dtype), np.asarray(1 - momentum, dtype)
    running = [
        emit(e, "Add", emit(e, "Mul", r, old), emit(e, "Mul", b, new)) for r, b in zip((mean, var), batch, strict=True)
    ]
    return (y, *running)


def _per_activation(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    """spatial=0 of opsets 7 and 8: statistics (C, *) for each activation of a sample."""
    x, scale, bias, mean, var = node.inputs
    epsilon = np.asarray(_epsilon(node), e.type(var).dtype)
    factor = emit(e, "Div", scale, emit(e, "Sqrt", emit(e, "Add", var, epsilon)))
    return (emit(e, "Add", emit(e, "Mul", emit(e, "Sub", x, mean), factor), bias),)


def _import_group(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    groups = int(required(node, "num_groups"))
    x, scale, bias = node.inputs
    if node.opset < 21:  # one scale and bias per group
        channels = e.type(x).dims[1]
        if not isinstance(channels, int):
            raise Unsupported("a symbolic number of channels")
        if groups < 1 or channels % groups:
            raise ShapeError(f"GroupNormalization: {groups} groups do not divide {channels} channels")
        scale, bias = (_repeat(e, v, groups, channels // groups) for v in (scale, bias))
    return e.op("GroupNormalization", [x, scale, bias], GroupNormAttrs(groups, _epsilon(node), _stash(node)))


def _repeat(e: Emit, v: Ref, groups: int, times: int) -> Ref:
    """(G) to (G * times), each entry repeated."""
    require_rank(e.type(v), 1, "GroupNormalization scale and bias")
    agree(e.type(v).dims[0], groups, "GroupNormalization scale and bias have one entry per group below opset 21")
    value = e.value(v)
    if value is not None:
        return e.const(np.repeat(value, times))
    column = emit(e, "Unsqueeze", v, np.array([1]))
    wide = emit(e, "Expand", column, np.array([groups, times]))
    return emit(e, "Reshape", wide, np.array([groups * times]))


def _import_layer(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    attrs = LayerNormAttrs(int(node.get("axis", -1)), _epsilon(node), _stash(node))
    return e.op(node.op_type, node.inputs, attrs, outputs=len(node.outputs))


def _import_mean_variance(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    """MeanVarianceNormalization; before opset 9, when it was experimental, ``across_channels`` chose the axes."""
    if node.opset >= 9:
        return e.op(node.op_type, node.inputs, MeanVarianceAttrs(tuple(node.get("axes", (0, 2, 3)))))
    (x,) = node.inputs
    axes = (0, 1, 2, 3) if node.get("across_channels", 0) else (0, 2, 3)
    if node.get("normalize_variance", 1):
        return e.op(node.op_type, [x], MeanVarianceAttrs(axes))
    return (emit(e, "Sub", x, emit(e, "ReduceMean", x, np.array(axes), keepdims=True)),)


def _import_lp(node: NodeSpec, e: Emit) -> Sequence[Ref]:
    return e.op(node.op_type, node.inputs, LpNormAttrs(int(node.get("axis", -1)), int(node.get("p", 2))))


# ---------------------------------------------------------------- export


def _export_rms(a: LayerNormAttrs, inputs: Sequence[str], n_outputs: int, e: Export) -> Sequence[str]:
    """RMSNormalization, which is new in opset 23, as its arithmetic."""
    t, scale, x = e.type(inputs[0]), e.type(inputs[1]), inputs[0]
    rank, dtype = len(t.dims), t.dtype
    if t.dtype.itemsize < a.stash_type.itemsize:
        dtype = a.stash_type
        (x,) = e.node("Cast", [x], to=dtype)
    axes = e.const(np.arange(a.axis % rank, rank), "axes")
    (mean,) = e.node("ReduceMean", [e.node("Mul", [x, x])[0], axes], keepdims=1)
    (shifted,) = e.node("Add", [mean, e.const(np.asarray(a.epsilon).astype(dtype), "epsilon")])
    (y,) = e.node("Div", [x, e.node("Sqrt", [shifted])[0]])
    if dtype != scale.dtype:
        (y,) = e.node("Cast", [y], to=scale.dtype)
    return e.node("Mul", [y, inputs[1]])


def _export_deviation(a: DeviationNormAttrs, inputs: Sequence[str], n_outputs: int, e: Export) -> Sequence[str]:
    """DeviationNormalization, which ONNX lacks, as its arithmetic."""
    t, x = e.type(inputs[0]), inputs[0]
    axes = e.const(np.arange(a.axis % len(t.dims), len(t.dims)), "axes")
    deviations = x
    if a.about_mean:
        (deviations,) = e.node("Sub", [x, e.node("ReduceMean", [x, axes], keepdims=1)[0]])
    (spread,) = e.node("ReduceMean", [e.node("Mul", [deviations, deviations])[0], axes], keepdims=1)
    for value, root in ((a.epsilon, False), (a.root_epsilon, True)):
        if root:
            (spread,) = e.node("Sqrt", [spread])
        if value:
            (spread,) = e.node("Add", [spread, e.const(np.asarray(value).astype(t.dtype), "epsilon")])
    (y,) = e.node("Mul", [e.node("Div", [deviations if a.centered else x, spread])[0], inputs[1]])
    return e.node("Add", [y, inputs[2]]) if len(inputs) > 2 and inputs[2] else (y,)


def _export_lp(a: LpNormAttrs, inputs: Sequence[str], n_outputs: int, e: Export) -> Sequence[str]:
    """LpNormalization; with an epsilon, which ONNX's operator lacks, as its arithmetic."""
    if not a.epsilon:
        return e.node("LpNormalization", inputs, axis=a.axis, p=a.p)
    (length,) = e.node(f"ReduceL{a.p}", [inputs[0], e.const(np.array([a.axis]), "axes")], keepdims=1)
    least = e.const(np.asarray(a.epsilon).astype(e.type(inputs[0]).dtype), "epsilon")
    return e.node("Div", [inputs[0], e.node("Max", [length, least])[0]])


def _export_mean_variance(a: MeanVarianceAttrs, inputs: Sequence[str], n_outputs: int, e: Export) -> Sequence[str]:
    """MeanVarianceNormalization as its arithmetic, at least in fp32. ONNX's formula is the difference of two means, which gives NaN
    for pictures of one color: rounding errors make the variance negative."""
    x, dtype, axes = inputs[0], e.type(inputs[0]).dtype, e.const(np.array(a.axes, np.int64), "axes")
    narrow = dtype.itemsize < FP32.itemsize
    x = e.node("Cast", [x], to=FP32)[0] if narrow else x
    (deviations,) = e.node("Sub", [x, e.node("ReduceMean", [x, axes], keepdims=1)[0]])
    (variance,) = e.node("ReduceMean", [e.node("Mul", [deviations, deviations])[0], axes], keepdims=1)
    least = e.const(np.asarray(1e-9).astype(FP32 if narrow else dtype), "least")
    results = e.node("Div", [deviations, e.node("Add", [e.node("Sqrt", [variance])[0], least])[0]])
    return e.node("Cast", results, to=dtype) if narrow else results


_TOL = Tol(rtol=1e-5, atol=2e-6)

_norm = partial(OpDef, tol=_TOL)


def _cost_lrn(call: Call, result: Result) -> Cost:
    return Cost((2 * call.attrs.size + 4) * elements(call.type(0)))


DEFS: tuple[OpDef, ...] = (
    _norm(
        "BatchNormalization",
        _infer_per_channel("scale", "bias", "mean", "variance", mixed=True, least=2),
        EpsilonAttrs,
        _import_batch,
        cost=per_element(2),
    ),
    _norm("InstanceNormalization", _infer_per_channel("scale", "bias"), EpsilonAttrs, cost=per_element(8)),
    _norm("GroupNormalization", _infer_group, GroupNormAttrs, _import_group, cost=per_element(8)),
    _norm("LayerNormalization", _infer_layer, LayerNormAttrs, _import_layer, cost=per_element(8)),
    _norm("RMSNormalization", _infer_rms, LayerNormAttrs, _import_layer, _export_rms, per_element(4)),
    _norm(
        "DeviationNormalization",
        _infer_deviation,
        DeviationNormAttrs,
        to_onnx=_export_deviation,
        cost=per_element(8),
    ),
    _norm("LRN", _infer_lrn, LRNAttrs, cost=_cost_lrn),
    _norm("LpNormalization", _infer_lp, LpNormAttrs, _import_lp, _export_lp, per_element(3)),
    _norm(
        "MeanVarianceNormalization",
        _infer_mean_variance,
        MeanVarianceAttrs,
        _import_mean_variance,
        _export_mean_variance,
        per_element(6),
    ),
)
