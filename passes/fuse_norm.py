"""Normalizations that exporters write out (layer, instance, RMS, group) become one op each.

Layer normalization: Ba, Kiros and Hinton (2016); TorchScript writes ReduceMean, Sub, Pow, ReduceMean, Add, Sqrt, Div, Mul,
Add, TensorFlow also ``x inv + (b - mean inv)`` with ``inv = g rsqrt(var + eps)``, Flax the variance as
``mean(x x) - mean(x)^2``. jax2onnx sets the deviations of a row of equal numbers to zero, which they are without rounding, and
takes the mean of their squares in float64. RMS normalization: Zhang and Sennrich (2019). Group normalization: Wu and He (2018);
both PyTorch exporters write it as Reshape, InstanceNormalization, Reshape, Mul, Add.

Patterns find the core. A scale and a shift after it are fused as well where they have the shape of the op's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.inference import known_shape
from optdnn.ir.patch import Patch
from optdnn.ops.base import Attrs
from optdnn.ops.norm import EpsilonAttrs, GroupNormAttrs, LayerNormAttrs
from optdnn.passes.base import Match, Miss, RulePass, rule
from optdnn.passes.support.facts import operand, producer, reshape_target, reshaped, shape_of, with_rank
from optdnn.passes.support.pattern import Pattern, Power, Scalar, Var, any_of, node, product, scalar, total
from optdnn.passes.support.pattern_rule import PatternRule, fused, used_outside
from optdnn.types import Array, Shape

# ---------------------------------------------------------------- scale and shift


@dataclass(frozen=True)
class NormParameters:
    """The scale and shift of a fused op: a value, a new constant, or None. ``result``: the value after them; ``ops``: their ops."""

    scale: Value | Array | None
    bias: Value | Array | None
    result: Value
    ops: frozenset[int] = frozenset()


Fits = Callable[[Graph, Value], "Value | Array | None"]
"""Function from a value to the operand of the op: the value itself, or a constant in the op's shape; None for other shapes."""


def trailing(dims: Shape) -> Fits:
    """Accepts values that vary only along the last axes, of these sizes."""

    def fits(graph: Graph, value: Value) -> Value | Array | None:
        array = graph.constant_value(value)
        if array is None:
            return value if graph.type(value).shape == dims else None
        lead = max(array.ndim - len(dims), 0)
        own = array.shape[lead:]
        varies = any(d != 1 for d in array.shape[:lead]) or not _static(dims)
        if varies or any(own[-k] not in (1, dims[-k]) for k in range(1, len(own) + 1)):
            return None
        return np.array(np.broadcast_to(array.reshape(own), dims))  # type: ignore[arg-type]

    return fits


def per_channel(rank: int, channels: int) -> Fits:
    """Accepts constants that vary only along axis 1 of a tensor of this rank."""

    def fits(graph: Graph, value: Value) -> Array | None:
        array = graph.constant_value(value)
        if array is None or array.ndim > rank:
            return None
        wide = with_rank(array, rank)
        if wide.size not in (1, channels) or wide.shape[1] != wide.size:
            return None
        return np.array(np.broadcast_to(wide.reshape(-1), (channels,)))

    return fits


def scale_and_shift(
    graph: Graph, value: Value, fits: Fits, scale: Value | Array | None = None, *, shift: bool = True
) -> NormParameters:
    """The scale (unless one is given) and shift of ``value``: a Mul, then an Add, each the only reader of the value before it."""
    found = NormParameters(scale, None, value)
    for kind, field in (("Mul", "scale"), ("Add", "bias")):
        if (kind == "Mul" and scale is not None) or (kind == "Add" and not shift):
            continue
        user = graph.sole_user(found.result)
        if user is None or user.kind != kind:
            continue
        (other,) = [v for v in user.inputs if v != found.result]
        if other is None or graph.type(user.value).shape != graph.type(found.result).shape:
            continue
        parameter = fits(graph, other)
        if parameter is not None:
            found = replace(found, **{field: parameter}, result=user.value, ops=found.ops | {user.id})
    return found


# ---------------------------------------------------------------- the fused op


@dataclass(frozen=True)
class FusedNorm:
    """The op that replaces a match: kind, attributes, operand, scale and shift."""

    kind: str
    attrs: Attrs
    x: Value
    parameters: NormParameters
    channels: Shape
    """The shape of the op's own scale."""
    always_bias: bool = False
    positions: tuple[int, ...] | None = None
    """The sizes of the result's axes after the channels, for a Reshape; None: as in ``x``."""
    factor: float = 1.0
    """A factor of the scale."""

    def norm(self, patch: Patch, *parameters: Value) -> Value:
        """Add the op, with its scale and shift."""
        return patch.add(self.kind, [self.x, *parameters], self.attrs)

    def match(self, graph: Graph, core: frozenset[int]) -> Match | Miss:
        """The fusion of the ops of ``core`` with the scale and shift."""
        given = self.parameters
        dtype = graph.type(self.x).dtype

        def constant(patch: Patch, own: Value | Array | None, default: float, name: str, factor: float = 1.0) -> Value:
            if isinstance(own, Value):
                return own if factor == 1 else patch.add("Mul", [own, patch.constant(np.asarray(factor, dtype))])
            array = np.full([int(d) for d in self.channels], default, dtype) if own is None else own  # type: ignore[arg-type]
            scaled = array if factor == 1 else array.astype(np.float64) * factor
            return patch.constant(scaled.astype(dtype), f"{graph.output(given.result).name}.{name}")

        def build(patch: Patch) -> Value:
            parameters = [constant(patch, given.scale, 1.0, "scale", self.factor)]
            if given.bias is not None or self.always_bias:
                parameters.append(constant(patch, given.bias, 0.0, "bias"))
            y = self.norm(patch, *parameters)
            if self.positions is None:
                return y
            return reshaped(patch, y, (0, 0, *self.positions))

        ops, root = core | given.ops, graph.op(given.result)
        if self.positions is None:
            return fused(graph, ops, root, self.x, build)
        miss = used_outside(graph, sorted(ops), root.id)
        return miss or Match(tuple(graph.op(i) for i in sorted(ops)), build, root.value)


def reduced(graph: Graph, op: Op) -> tuple[int, ...] | Miss:
    """The axes of a reduction that keeps its dimensions, counted from the front."""
    dims = graph.type(operand(op)).dims
    rank = len(dims)
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
    found = sorted(a % rank for a in axes if isinstance(a, int))
    while len(found) > 1 and dims[found[0]] == 1 and found[1] != found[0] + 1:
        found = found[1:]  # the batch axis of one image: MeanVarianceNormalization reduces it as well
    return tuple(found)


# ---------------------------------------------------------------- patterns of layer, instance and RMS normalization

X, EPS, G, B = Var("x"), Var("epsilon"), Var("scale"), Var("bias")


def _mean(x: Pattern, name: str) -> Pattern:
    """tf2onnx writes the mean over the last of three axes as a global pool."""
    return node(frozenset({"ReduceMean", "GlobalAveragePool"}), x, name=name)


_MEAN = _mean(X, "mean")
_DEVIATIONS = node("Sub", X, _MEAN)
_EQUAL_NUMBERS = node("Equal", node("ReduceMin", X, name="least"), node("ReduceMax", X, name="greatest"))
_FINITE = node("Equal", node("Sub", _MEAN, _MEAN), Scalar(0.0))
CENTERED = any_of(
    _DEVIATIONS,
    node("Where", any_of(_EQUAL_NUMBERS, node("And", _EQUAL_NUMBERS, _FINITE)), Scalar(0.0), _DEVIATIONS),
)
_CENTERED_SQUARES = product(1.0, CENTERED, CENTERED)
_FAST = total(0.0, _mean(product(1.0, X, X), "variance"), product(-1.0, _MEAN, _MEAN))
VARIANCE = any_of(
    _mean(_CENTERED_SQUARES, "variance"),
    node("Cast", _mean(node("Cast", _CENTERED_SQUARES, name="widened"), "variance")),
    _FAST,  # Flax: mean of squares less square of the mean, kept from rounding below zero
    node("Max", _FAST, Scalar(0.0)),
    node("Relu", _FAST),
)
SQUARES = _mean(product(1.0, X, X), "variance")


def _factors(x: Pattern, variance: Pattern, *more: Pattern, sign: float = 1.0) -> Pattern:
    """``sign * x / sqrt(variance + epsilon) * more``. The variance may have Bessel's correction, ``n / (n - 1)``."""
    corrected = node("Add", product(Scalar(name="correction"), variance), EPS)
    return product(sign, x, Power(any_of(corrected, variance), -0.5), *more)


class NormRule(PatternRule):
    """Base of the rules for normalizations: checks the axes and epsilon of a match, and chooses the op."""

    kind: str
    """The op over the last axes."""
    centered: bool
    """Whether the mean is subtracted. Then there may be a shift, and the op may be an InstanceNormalization."""

    def accept(self, graph: Graph, root: Op, found: dict[str, Any], ops: frozenset[int]) -> Match | Miss | None:
        axes: tuple[int, ...] | None = None
        for name in ("variance", "mean", "least", "greatest"):
            if name in found:
                these = reduced(graph, found[name])
                if isinstance(these, Miss):
                    return these
                if axes is not None and these != axes:
                    return Miss(f"the {name} runs over axes {these}, the variance over {axes}")
                axes = these
        assert axes is not None
        if "widened" in found and found["widened"].outputs[0].type.dtype != np.float64:
            return Miss(f"the squares are converted to {found['widened'].outputs[0].type.dtype}")
        epsilon, correction = (
            scalar(graph, found["epsilon"]) if "epsilon" in found else 0.0,
            found.get("correction", 1.0),
        )
        if epsilon is None:
            return Miss("epsilon is not a scalar")
        if epsilon < 0:
            return Miss(f"epsilon is negative: {epsilon:g}")
        if not 0 < correction < np.inf:
            return Miss(f"the variance is multiplied by {correction:g}")
        options = self.options(graph, root.value, axes, epsilon / correction, found)
        if isinstance(options, Miss):
            return options
        if not options:
            return None
        best = max(options, key=lambda n: len(n.parameters.ops))
        return replace(best, factor=correction**-0.5).match(graph, ops)

    def options(
        self, graph: Graph, root: Value, axes: tuple[int, ...], epsilon: float, found: dict[str, Any]
    ) -> list[FusedNorm] | Miss:
        """The ops that a match may become, the preferred one first; empty if the match's own scale or shift does not fit."""
        x: Value = found["x"]
        dims = graph.type(x).dims
        rank = len(dims)
        last, spatial = tuple(range(rank - len(axes), rank)), tuple(range(2, rank))
        instance = self.centered and axes == spatial
        if not axes or not (axes == last or instance):
            return Miss(f"axes are not the last ones: {axes} of {rank}")
        norms: list[FusedNorm] = []
        own = dims[rank - len(axes) :]
        if _static(own):
            given = norm_parameters(graph, root, trailing(own), found, shift=self.centered)
            if not self.centered and axes == spatial and len(axes) > 1 and (given is None or given.scale is None):
                return Miss(
                    "it normalizes each channel of an image, where separate arithmetic needs no change of the image's order"
                )
            if given is not None:
                norms.append(FusedNorm(self.kind, LayerNormAttrs(-len(axes), epsilon), x, given, own))
        if instance and isinstance(dims[1], int):
            given = norm_parameters(graph, root, per_channel(rank, dims[1]), found)
            if given is not None:
                norm = FusedNorm("InstanceNormalization", EpsilonAttrs(epsilon), x, given, (dims[1],), True)
                norms.insert(0 if len(axes) > 1 else len(norms), norm)
        if self.centered and rank > 2 and axes == tuple(range(1, rank)) and isinstance(dims[1], int):
            given = norm_parameters(graph, root, per_channel(rank, dims[1]), found)
            if given is not None and (given.scale is not None or given.bias is not None):
                attrs = GroupNormAttrs(1, epsilon)
                norms.insert(0, FusedNorm("GroupNormalization", attrs, x, given, (dims[1],), always_bias=True))
        if not norms and not _static(own):
            return Miss("the size of the normalized axes is not known")
        return norms


def norm_parameters(
    graph: Graph, root: Value, fits: Fits, found: dict[str, Any], shift: bool = True
) -> NormParameters | None:
    """The scale and shift within the match and after it; None if those within the match do not fit."""
    own: dict[str, Any] = {name: fits(graph, found[name]) for name in ("scale", "bias") if name in found}
    if any(parameter is None for parameter in own.values()):
        return None
    if "bias" in own:
        return NormParameters(own.get("scale"), own["bias"], root)
    return scale_and_shift(graph, root, fits, own.get("scale"), shift=shift)


def _static(dims: Shape) -> bool:
    return all(isinstance(d, int) for d in dims)


class LayerNorm(NormRule):
    """``(x - mean) / sqrt(var + epsilon) * g + b``: LayerNormalization over the last axes, or InstanceNormalization."""

    name, kind, centered = "layer_norm", "LayerNormalization", True
    patterns = (
        _factors(CENTERED, VARIANCE),
        _factors(CENTERED, VARIANCE, G),
        total(0.0, _factors(X, VARIANCE, G), _factors(_MEAN, VARIANCE, G, sign=-1.0), B),
        total(0.0, _factors(X, VARIANCE), _factors(_MEAN, VARIANCE, sign=-1.0), B),
        total(0.0, _factors(X, VARIANCE, G), _factors(_MEAN, VARIANCE, G, sign=-1.0)),
        total(0.0, _factors(X, VARIANCE), _factors(_MEAN, VARIANCE, sign=-1.0)),
    )


class RMSNorm(NormRule):
    """``x / sqrt(mean(x^2) + epsilon) * g`` over the last axes."""

    name, kind, centered = "rms_norm", "RMSNormalization", False
    patterns = (_factors(X, SQUARES), _factors(X, SQUARES, G))


# ---------------------------------------------------------------- group normalization


@rule("group_norm", {"InstanceNormalization", "LayerNormalization"})
def group_norm(graph: Graph, op: Op) -> Match | Miss | None:
    """Reshape to (N, groups, …), an instance or plain layer normalization, Reshape back, scale and shift by channel.

    The Reshape back may give the image's positions one axis, as a sequence: the normalization is the same. If all channels are one
    group, the Reshape may give any shape."""
    split = producer(graph, op.inputs[0], {"Reshape"})
    merge = graph.sole_user(op.value)
    if split is None or merge is None or merge.kind != "Reshape" or len(op.outputs) != 1:
        return None
    x = _before_groups(graph, split, merge)
    dims, grouped = shape_of(graph, x), split.outputs[0].type.shape
    if dims is None or grouped is None or len(dims) < 3 or len(grouped) < 3:
        return None
    channels, groups = dims[1], grouped[1]
    if not isinstance(channels, int) or not isinstance(groups, int) or channels % groups or dims[0] != grouped[0]:
        return None
    merged = merge.outputs[0].type.shape
    own = _own_parameters(graph, op, groups)
    if own is None:
        return Miss("its own scale and shift are not constants for each group")
    scale, bias = (np.repeat(a, channels // groups) for a in own)
    if merged is None or len(merged) < 3 or merged[:2] != dims[:2] or not (merged == dims or _static(merged[2:])):
        whole = op.kind == "InstanceNormalization" and groups == 1 and merged is not None
        target = reshape_target(dims, merged) if whole and merged is not None else None
        if target is None:
            return Miss(f"the Reshape after it gives {merge.outputs[0].type}, not the shape {graph.type(x)} back")
        attrs = GroupNormAttrs(groups, op.attrs.epsilon)
        return Match((merge, op, split), partial(_of_groups, x, attrs, (scale, bias), target))
    given = scale_and_shift(graph, merge.value, per_channel(len(merged), channels))
    assert not isinstance(given.scale, Value)
    assert not isinstance(given.bias, Value)
    outer = np.ones(channels) if given.scale is None else given.scale.astype(np.float64)
    shift = np.zeros(channels) if given.bias is None else given.bias.astype(np.float64)
    given = replace(given, scale=outer * scale, bias=outer * bias + shift)
    attrs = GroupNormAttrs(groups, op.attrs.epsilon)
    positions = None if merged == dims else tuple(int(d) for d in merged[2:])  # type: ignore[arg-type]
    norm = FusedNorm("GroupNormalization", attrs, x, given, (channels,), always_bias=True, positions=positions)
    return norm.match(graph, frozenset({split.id, op.id, merge.id}))


def _before_groups(graph: Graph, split: Op, merge: Op) -> Value:
    """The tensor that ``split`` divides into groups: its operand, or another reader's view of it in the shape of the Reshape back.

    Images that are views of a video (AnimateDiff) become groups by one Reshape, since two Reshapes in a row are one."""
    x, shape = operand(split), merge.outputs[0].type.shape
    if shape is None or shape_of(graph, x) == shape:
        return x
    views = (u.value for u in graph.users(x) if u.kind == "Reshape" and u.id != split.id)
    return next((v for v in views if shape_of(graph, v) == shape), x)


def _of_groups(
    x: Value, attrs: GroupNormAttrs, parameters: tuple[Array, Array], target: tuple[int, ...], patch: Patch
) -> Value:
    """The normalization alone, in the shape of the Reshape after it."""
    given = [patch.constant(p.astype(patch.type(x).dtype), "groups") for p in parameters]
    return reshaped(patch, patch.add("GroupNormalization", [x, *given], attrs), target)


def _own_parameters(graph: Graph, op: Op, groups: int) -> tuple[Array, Array] | None:
    """Scale and shift of the inner op for each group, in float64; None if they vary within a group."""
    scale = graph.constant_value(op.input(1))
    bias = graph.constant_value(op.input(2)) if op.input(2) is not None else np.zeros(1)
    if scale is None or bias is None:
        return None
    if op.kind == "LayerNormalization":
        rank = len(graph.type(operand(op)).dims)
        if op.attrs.axis % rank != 2 or np.ptp(scale) or np.ptp(bias):
            return None
        scale, bias = scale.reshape(-1)[:1], bias.reshape(-1)[:1]
    wide = [np.broadcast_to(a.astype(np.float64).reshape(-1), (groups,)) for a in (scale, bias)]
    return wide[0], wide[1]


class FuseNorm(RulePass):
    """The ops nearest to the outputs first, so that TensorFlow's form is matched from its last addition."""

    name = "fuse_norm"
    rules = (LayerNorm(), RMSNorm(), group_norm)
    sinks_first = True
