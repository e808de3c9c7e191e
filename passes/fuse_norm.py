"""Normalizations that exporters write out: layer, instance, RMS and group normalization become one op each.

Layer normalization: Ba, Kiros and Hinton (2016); TorchScript writes ReduceMean, Sub, Pow, ReduceMean, Add, Sqrt, Div, Mul,
Add, TensorFlow also ``x inv + (b - mean inv)`` with ``inv = g rsqrt(var + eps)``, Flax the variance as
``mean(x x) - mean(x)^2``. RMS normalization: Zhang and Sennrich (2019). Group normalization: Wu and He (2018), which both
PyTorch exporters write as Reshape, InstanceNormalization, Reshape, Mul, Add.

The core is found by pattern; a scale and a shift that follow it are taken along when they are shaped like the op's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from optdnn.ir.graph import Graph, Op, Value, known_shape
from optdnn.ir.patch import Patch
from optdnn.ops.base import Attrs
from optdnn.ops.norm import EpsilonAttrs, GroupNormAttrs, LayerNormAttrs
from optdnn.passes.base import Match, Miss, PassContext, Rule, RulePass
from optdnn.passes.support.pattern import (
    Found,
    Pattern,
    PatternRule,
    Power,
    Scalar,
    Var,
    choice,
    closed,
    matched,
    node,
    product,
    scalar,
    total,
)
from optdnn.types import Array, Shape

# ---------------------------------------------------------------- scale and shift


@dataclass(frozen=True)
class NormParameters:
    """A scale and a shift that an op takes over: a Value, or the constant to make; None where there is none."""

    scale: Value | Array | None
    bias: Value | Array | None
    result: Value
    ops: frozenset[int]


Fits = Callable[[Graph, Value], "Value | Array | None"]
"""A value as operand of the op: itself, or a constant in the op's shape; None when it is shaped otherwise."""


def trailing(dims: Shape) -> Fits:
    """Fits what varies along the last axes, of these sizes, alone."""

    def fits(graph: Graph, value: Value) -> Value | Array | None:
        array = graph.constant_value(value)
        if array is not None:
            return _spread(array, dims)
        return value if graph.type(value).shape == dims else None

    return fits


def per_channel(rank: int, channels: int) -> Fits:
    """Fits constants that vary along axis 1 of a tensor of this rank alone."""

    def fits(graph: Graph, value: Value) -> Array | None:
        array = graph.constant_value(value)
        if array is None or array.ndim > rank:
            return None
        wide = array.reshape((1,) * (rank - array.ndim) + array.shape)
        if wide.size not in (1, channels) or wide.shape[1] != wide.size:
            return None
        return np.array(np.broadcast_to(wide.reshape(-1), (channels,)))

    return fits


def _spread(array: Array, dims: Shape) -> Array | None:
    """A constant broadcast to the (static) sizes of the last axes, None when it varies along others."""
    shape = array.shape
    lead = max(len(shape) - len(dims), 0)
    if any(d != 1 for d in shape[:lead]):
        return None
    own = array.reshape(shape[lead:])
    sizes = tuple(d for d in dims if isinstance(d, int))
    if len(sizes) != len(dims):
        return None
    if any(own.shape[-k] not in (1, sizes[-k]) for k in range(1, own.ndim + 1)):
        return None
    return np.array(np.broadcast_to(own, sizes))


def affine(
    graph: Graph, value: Value, fits: Fits, scale: Value | Array | None = None, *, shift: bool = True
) -> NormParameters:
    """The scale (unless one is given) and shift that ``value`` goes into, and into nothing else."""
    ops: set[int] = set()
    bias: Value | Array | None = None
    for kind in ("Mul", "Add"):
        if (kind == "Mul" and scale is not None) or (kind == "Add" and not shift):
            continue
        user = graph.sole_user(value)
        if user is None or user.kind != kind:
            continue
        (other,) = [v for v in user.inputs if v != value]
        if other is None or graph.type(user.value).shape != graph.type(value).shape:
            continue
        operand = fits(graph, other)
        if operand is None:
            continue
        if kind == "Mul":
            scale = operand
        else:
            bias = operand
        ops.add(user.id)
        value = user.value
    return NormParameters(scale, bias, value, frozenset(ops))


# ---------------------------------------------------------------- what a match becomes


@dataclass(frozen=True)
class Norm:
    """The op that replaces a match: kind, attributes, operand, scale and shift."""

    kind: str
    attrs: Attrs
    x: Value
    affine: NormParameters
    channels: Shape
    """The shape of the op's own scale."""
    always_bias: bool = False


class NormRule(Rule):
    """Writes the op that a match's :class:`Norm` describes."""

    def rewrite(self, graph: Graph, match: Match, context: PassContext) -> Patch:
        norm: Norm = match.data
        patch = Patch(graph, match.ops)
        dtype = graph.type(norm.x).dtype

        def operand(given: Value | Array | None, default: float, name: str) -> Value:
            if isinstance(given, Value):
                return given
            array = np.full([int(d) for d in norm.channels], default, dtype) if given is None else given  # type: ignore[arg-type]
            return patch.constant(array.astype(dtype), f"{graph.output(norm.affine.result).name}.{name}")

        inputs = [norm.x, operand(norm.affine.scale, 1.0, "scale")]
        if norm.affine.bias is not None or norm.always_bias:
            inputs.append(operand(norm.affine.bias, 0.0, "bias"))
        patch.replace(norm.affine.result, patch.add(norm.kind, inputs, norm.attrs))
        return patch


def reduced(graph: Graph, op: Op) -> tuple[int, ...] | Miss:
    """The axes of a reduction that keeps its dimensions, counted from the front."""
    rank = graph.type(_operand(op)).rank
    if rank is None:
        return Miss("the rank of the operand is unknown")
    if op.kind == "GlobalAveragePool":
        return tuple(range(2, rank))
    given = op.input(1)
    axes = () if given is None else known_shape(graph.known(given))
    if axes is None or any(not isinstance(a, int) for a in axes):
        return Miss("the axes are not constant")
    if not op.attrs.keepdims:
        return Miss(f"{op.name} drops the reduced axes")
    if not len(axes):
        return () if op.attrs.noop_with_empty_axes else tuple(range(rank))
    return tuple(sorted(a % rank for a in axes if isinstance(a, int)))


def _operand(op: Op) -> Value:
    value = op.inputs[0]
    assert value is not None
    return value


# ---------------------------------------------------------------- patterns of layer, instance and RMS normalization

X, EPS, G, B = Var("x"), Var("epsilon"), Var("scale"), Var("bias")


def _mean(x: Pattern, name: str) -> Pattern:
    """tf2onnx writes the mean over the last of three axes as a global pool."""
    return choice(node("ReduceMean", x, name=name), node("GlobalAveragePool", x, name=name))


_MEAN = _mean(X, "mean")
_CENTRED = node("Sub", X, _MEAN)
_FAST = total(0.0, _mean(product(1.0, X, X), "variance"), product(-1.0, _MEAN, _MEAN))
_VARIANCE = choice(
    _mean(product(1.0, _CENTRED, _CENTRED), "variance"),
    _FAST,  # Flax: mean of squares less square of the mean, kept from rounding below zero
    node("Max", _FAST, Scalar(0.0)),
    node("Relu", _FAST),
)
_SQUARES = _mean(product(1.0, X, X), "variance")


def _factors(x: Pattern, variance: Pattern, *more: Pattern, sign: float = 1.0) -> Pattern:
    """``sign * x / sqrt(variance + epsilon) * more``. A misplaced epsilon is matched too, so that it can be explained."""
    root = choice(node("Add", variance, EPS), variance)
    outside = node("Add", product(1.0, Power(variance, 0.5)), Var("outer_epsilon"))
    return choice(
        product(sign, x, Power(root, -0.5), *more),
        product(sign, x, Power(outside, -1.0), *more),
    )


class NormPatternRule(PatternRule, NormRule):
    """A normalization found by pattern: checks what the pattern leaves open, and chooses the kind."""

    def accept(self, graph: Graph, root: Op, found: Found) -> Match | Miss | None:
        x: Value = found.bound["x"]
        axes: tuple[int, ...] | None = None
        for name in ("variance", "mean"):
            if name in found.bound:
                these = reduced(graph, found.bound[name])
                if isinstance(these, Miss):
                    return these
                if axes is not None and these != axes:
                    return Miss(f"the mean runs over axes {these}, the variance over {axes}")
                axes = these
        assert axes is not None
        if "outer_epsilon" in found.bound:
            return Miss("epsilon is added to the deviation, not to the variance")
        epsilon = scalar(graph, found.bound["epsilon"]) if "epsilon" in found.bound else 0.0
        if epsilon is None:
            return Miss("epsilon is not a scalar")
        if epsilon < 0:
            return Miss(f"epsilon is negative: {epsilon:g}")
        options = self.options(graph, x, root.value, axes, epsilon, found)
        if isinstance(options, Miss):
            return options
        if not options:
            return None
        best = max(options, key=lambda n: len(n.affine.ops))
        ops = found.ops | best.affine.ops
        return closed(graph, ops, best.affine.result.op, x) or matched(graph, ops, best)

    def options(
        self, graph: Graph, x: Value, root: Value, axes: tuple[int, ...], epsilon: float, found: Found
    ) -> list[Norm] | Miss:
        """The ops the match may become, the preferred first; none when its own scale or shift has another shape."""
        raise NotImplementedError


def _taken(graph: Graph, root: Value, fits: Fits, found: Found, shift: bool = True) -> NormParameters | None:
    """The scale and shift within the match and after it; None when those within do not fit."""
    own: dict[str, Any] = {}
    for name in ("scale", "bias"):
        if name in found.bound:
            own[name] = fits(graph, found.bound[name])
            if own[name] is None:
                return None
    if "bias" in own:
        return NormParameters(own.get("scale"), own["bias"], root, frozenset())
    return affine(graph, root, fits, own.get("scale"), shift=shift)


def _static(dims: Shape) -> bool:
    return all(isinstance(d, int) for d in dims)


class LayerNorm(NormPatternRule):
    """``(x - mean) / sqrt(var + epsilon) * g + b``: LayerNormalization over the last axes, or InstanceNormalization."""

    name = "layer_norm"
    patterns = (
        _factors(_CENTRED, _VARIANCE),
        _factors(_CENTRED, _VARIANCE, G),
        total(0.0, _factors(X, _VARIANCE, G), _factors(_MEAN, _VARIANCE, G, sign=-1.0), B),
        total(0.0, _factors(X, _VARIANCE), _factors(_MEAN, _VARIANCE, sign=-1.0), B),
        total(0.0, _factors(X, _VARIANCE, G), _factors(_MEAN, _VARIANCE, G, sign=-1.0)),
        total(0.0, _factors(X, _VARIANCE), _factors(_MEAN, _VARIANCE, sign=-1.0)),
    )

    def options(
        self, graph: Graph, x: Value, root: Value, axes: tuple[int, ...], epsilon: float, found: Found
    ) -> list[Norm] | Miss:
        dims = graph.type(x).dims
        rank = len(dims)
        last, spatial = tuple(range(rank - len(axes), rank)), tuple(range(2, rank))
        if not axes or axes not in (last, spatial):
            return Miss(f"axes are not the last ones: {axes} of {rank}")
        norms: list[Norm] = []
        own = dims[rank - len(axes) :]
        if _static(own):
            taken = _taken(graph, root, trailing(own), found)
            if taken is not None:
                norms.append(Norm("LayerNormalization", LayerNormAttrs(-len(axes), epsilon), x, taken, own))
        if axes == spatial and isinstance(dims[1], int):
            taken = _taken(graph, root, per_channel(rank, dims[1]), found)
            if taken is not None:
                norm = Norm("InstanceNormalization", EpsilonAttrs(epsilon), x, taken, (dims[1],), always_bias=True)
                norms.insert(0 if len(axes) > 1 else len(norms), norm)
        if not norms and not _static(own):
            return Miss("the size of the normalized axes is not known")
        return norms


class RMSNorm(NormPatternRule):
    """``x / sqrt(mean(x^2) + epsilon) * g`` over the last axes."""

    name = "rms_norm"
    patterns = (_factors(X, _SQUARES), _factors(X, _SQUARES, G))

    def options(
        self, graph: Graph, x: Value, root: Value, axes: tuple[int, ...], epsilon: float, found: Found
    ) -> list[Norm] | Miss:
        dims = graph.type(x).dims
        rank = len(dims)
        if not axes or axes != tuple(range(rank - len(axes), rank)):
            return Miss(f"axes are not the last ones: {axes} of {rank}")
        own = dims[rank - len(axes) :]
        if not _static(own):
            return Miss("the size of the normalized axes is not known")
        taken = _taken(graph, root, trailing(own), found, shift=False)
        attrs = LayerNormAttrs(-len(axes), epsilon)
        return [] if taken is None else [Norm("RMSNormalization", attrs, x, taken, own)]


# ---------------------------------------------------------------- group normalization


class GroupNorm(NormRule):
    """Reshape to (N, groups, …), an instance or plain layer normalization, Reshape back, scale and shift by channel."""

    name = "group_norm"
    kinds = frozenset({"InstanceNormalization", "LayerNormalization"})

    def match(self, graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
        split = graph.op(_operand(op))
        merge = graph.sole_user(op.value)
        if split.kind != "Reshape" or merge is None or merge.kind != "Reshape" or len(op.outputs) != 1:
            return None
        x = _operand(split)
        dims, grouped = graph.type(x).shape, split.outputs[0].type.shape
        if dims is None or grouped is None or len(dims) < 3 or len(grouped) < 3:
            return None
        channels, groups = dims[1], grouped[1]
        if not isinstance(channels, int) or not isinstance(groups, int) or channels % groups or dims[0] != grouped[0]:
            return None
        if merge.outputs[0].type.shape != dims:
            return Miss(f"the Reshape after it gives {merge.outputs[0].type}, not the shape {graph.type(x)} back")
        scale, bias = self._own(graph, op, groups)
        if scale is None or bias is None:
            return Miss("its own scale and shift are not constants for each group")
        taken = affine(graph, merge.value, per_channel(len(dims), channels))
        assert not isinstance(taken.scale, Value)
        assert not isinstance(taken.bias, Value)
        outer = np.ones(channels) if taken.scale is None else taken.scale.astype(np.float64)
        shift = np.zeros(channels) if taken.bias is None else taken.bias.astype(np.float64)
        each = channels // groups
        taken = NormParameters(
            outer * np.repeat(scale, each), outer * np.repeat(bias, each) + shift, taken.result, taken.ops
        )
        ops = frozenset({split.id, op.id, merge.id}) | taken.ops
        attrs = GroupNormAttrs(groups, op.attrs.epsilon)
        norm = Norm("GroupNormalization", attrs, x, taken, (channels,), always_bias=True)
        return closed(graph, ops, taken.result.op, x) or matched(graph, ops, norm)

    @staticmethod
    def _own(graph: Graph, op: Op, groups: int) -> tuple[Array | None, Array | None]:
        """Scale and shift of the inner op for each group, in float64; None where they are anything else."""
        scale = graph.constant_value(op.input(1))
        bias = graph.constant_value(op.input(2)) if op.input(2) is not None else np.zeros(1)
        if scale is None or bias is None:
            return None, None
        if op.kind == "LayerNormalization":
            rank = len(graph.type(_operand(op)).dims)
            if op.attrs.axis % rank != 2 or np.ptp(scale) or np.ptp(bias):
                return None, None
            scale, bias = scale.reshape(-1)[:1], bias.reshape(-1)[:1]
        wide = [np.broadcast_to(a.astype(np.float64).reshape(-1), (groups,)) for a in (scale, bias)]
        return wide[0], wide[1]


class FuseNorm(RulePass):
    """Sinks first, so that TensorFlow's form is seen from its last addition."""

    name = "fuse_norm"
    rules = (LayerNorm(), RMSNorm(), GroupNorm())
    sinks_first = True
