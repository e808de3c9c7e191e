"""Regions of a lowered program around a normalization; see :mod:`optdnn.ops.regions`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

from optdnn.ops.attention import RotaryAttrs
from optdnn.ops.base import STEPS_TOL, Attrs, Call, Cost, NestedAttrs, Result, Stage, attrs_dict
from optdnn.ops.checks import agree, agree_all, elements, per_element, require_rank
from optdnn.ops.definition import OpDef
from optdnn.ops.fused import infer_stages, plain_value, stages_flops
from optdnn.ops.held import held_attrs, infer_as, plain_held, region
from optdnn.ops.regions import without
from optdnn.runtime.reference.conv_regions import prefixed
from optdnn.types import FP32, TensorType


@dataclass(frozen=True)
class HeldNormAttrs(NestedAttrs):
    """The normalization ``norm`` (a kind) with its attributes ``own``. A step holds these among the other fields."""

    norm: str
    own: Attrs

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Self:
        names = {f.name for f in fields(cls)} - {"own"}
        own = held_attrs(given["norm"], without(given, *names, "arity"))
        return cls(**{name: given[name] for name in names & given.keys()}, own=own)

    def plain(self) -> dict[str, Any]:
        others = {name: plain_value(value) for name, value in without(attrs_dict(self), "norm", "own").items()}
        return {"norm": self.norm, **plain_held(self.norm, self.own), **others}


FIRST = "first_"
"""Prefix of the names of the first norm's attributes."""


@dataclass(frozen=True)
class NormAddNormAttrs(NestedAttrs):
    """The normalization ``norm`` (a kind) with its attributes ``own``; ``first``: the norm of the rows before the addition."""

    norm: str
    own: Attrs
    first: HeldNormAttrs

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> NormAddNormAttrs:
        last = HeldNormAttrs.read({name: value for name, value in given.items() if not name.startswith(FIRST)})
        return cls(last.norm, last.own, HeldNormAttrs.read(prefixed(given, FIRST)))

    def plain(self) -> dict[str, Any]:
        first = {FIRST + name: value for name, value in self.first.plain().items()}
        return {**HeldNormAttrs(self.norm, self.own).plain(), **first}


@dataclass(frozen=True)
class ActivatedNormAttrs(HeldNormAttrs):
    """A normalization or softmax, the stages before it and the stages after it. Stages read operands from slot 4 on."""

    epilogue: tuple[Stage, ...]
    prologue: tuple[Stage, ...] = ()

    def plain(self) -> dict[str, Any]:
        made = {**super().plain(), "arity": 3}
        return made if self.prologue else without(made, "prologue")


@dataclass(frozen=True)
class NormPairAttrs(HeldNormAttrs):
    """Two normalizations with the same attributes. ``after`` follow the first, ``others`` the second.

    Each has its operands: its input, its scale and bias, and from slot 4 on the operands of its stages. The first has ``count``
    operands.
    """

    count: int
    after: tuple[Stage, ...] = ()
    others: tuple[Stage, ...] = ()


@dataclass(frozen=True)
class RotaryNormPairAttrs(Attrs):
    """The normalization ``norm`` (a kind) of each head, or with ``tokens`` of all heads of a token together, and the fields of
    :class:`optdnn.ops.attention.RotaryAttrs`."""

    norm: str
    epsilon: float
    tokens: bool
    interleaved: bool = False
    rotary_embedding_dim: int = 0
    parts: int = 1


@dataclass(frozen=True)
class GroupMomentsAttrs(Attrs):
    """The moments of each of ``groups`` groups of channels in each of ``tiles`` parts of the positions. Stages of the prologue read
    operands from slot 1 on."""

    groups: int
    tiles: int
    prologue: tuple[Stage, ...] = ()


@dataclass(frozen=True)
class GroupApplyAttrs(Attrs):
    """Operand 3 holds the moments of tiles, which divide ``items`` elements among them. Stages read operands from slot 4 on."""

    items: int
    epsilon: float = 1e-5
    epilogue: tuple[Stage, ...] = ()
    prologue: tuple[Stage, ...] = ()


@dataclass(frozen=True)
class NormedResidualAttrs(Attrs):
    """``mean``: whether the mean of the residual's rows is subtracted; otherwise the norm is by the mean square.

    ``epilogue``: stages of the product, which read the normalized residual as operand 1.
    """

    mean: bool
    epsilon: float
    epilogue: tuple[Stage, ...]


# ---------------------------------------------------------------- shapes


def _infer_add_norm(call: Call) -> Result:
    a: HeldNormAttrs = call.attrs
    total = infer_as(call, "Add", Attrs(), call.types[:2])
    return Result((*total.types, *infer_as(call, a.norm, a.own, (*total.types, *call.types[2:])).types))


def _infer_norm_add_norm(call: Call) -> Result:
    """Operands: the rows, their addend (or None), scale and bias of the norm, scale and bias of the first norm."""
    a: NormAddNormAttrs = call.attrs
    x, other, *parameters = call.types
    own, of_first = ([t for t in pair if t is not None] for pair in (parameters[:2], parameters[2:]))
    normalized = infer_as(call, a.first.norm, a.first.own, [x, *of_first]).types[:1]
    total = normalized if other is None else infer_as(call, "Add", Attrs(), [*normalized, other]).types
    return Result((*total, *infer_as(call, a.norm, a.own, (*total, *own)).types))


def _infer_activated_norm(call: Call) -> Result:
    a: ActivatedNormAttrs = call.attrs
    return Result((_activated(call, a.norm, a.own, a.epilogue, call.types),))


def _activated(
    call: Call, norm: str, own: Attrs, stages: Sequence[Stage], types: Sequence[TensorType | None]
) -> TensorType:
    """The result of a norm on the first three operands, after its stages."""
    (y,) = infer_as(call, norm, own, [t for t in types[:3] if t is not None]).types[:1]
    return infer_stages(stages, y, types)


def _infer_norm_pair(call: Call) -> Result:
    a: NormPairAttrs = call.attrs
    parts = ((a.after, call.types[: a.count]), (a.others, call.types[a.count :]))
    return Result(tuple(_activated(call, a.norm, a.own, stages, types) for stages, types in parts))


def _infer_rotary_norm_pair(call: Call) -> Result:
    a: RotaryNormPairAttrs = call.attrs
    own, found = RotaryAttrs(a.interleaved, a.rotary_embedding_dim, parts=a.parts), list[TensorType]()
    for x, scale in ((call.type(k), call.type(k + 1)) for k in (2, 5)):
        require_rank(x, 4, "RotaryNormPair heads")
        agree(scale.dims[0], x.dims[3] * (x.dims[1] if a.tokens else 1), f"RotaryNormPair scale {scale} is not of {x}")
        found += infer_as(call, "RotaryEmbedding", own, (x, *call.types[:2])).types
    return Result(tuple(found))


def _infer_group_moments(call: Call) -> Result:
    a: GroupMomentsAttrs = call.attrs
    x = call.type(0)
    agree(x.dims[1] % a.groups, 0, f"GroupMoments: {a.groups} groups do not divide the channels of {x}")
    return Result((TensorType(FP32, (x.dims[0], a.groups, a.tiles, 2)),))


def _infer_group_apply(call: Call) -> Result:
    a: GroupApplyAttrs = call.attrs
    x, moments = call.type(0), call.type(3)
    require_rank(moments, 4, "GroupApply moments")
    n, groups, _, _ = moments.dims
    agree(n, x.dims[0], f"GroupApply moments {moments} are not of {x}")
    agree(x.dims[1] % groups, 0, f"GroupApply: {groups} groups do not divide the channels of {x}")
    return Result((infer_stages(a.epilogue, x, call.types),))


def _infer_normed_residual(call: Call) -> Result:
    x, weights, residual, moments = (call.type(i) for i in (0, 1, 3, 4))
    require_rank(x, 2, "NormedResidual rows")
    require_rank(moments, 3, "NormedResidual moments")
    columns, depth = weights.dims
    agree(x.dims[1], depth, f"NormedResidual weights {weights} do not fit rows {x}")
    agree_all(residual.dims, (x.dims[0], columns), f"NormedResidual {residual} does not fit rows {x} times {weights}")
    agree(x.dims[0], moments.dims[1], f"NormedResidual moments {moments} are not of rows {residual}")
    return Result((x.with_shape((x.dims[0], columns)),))


# ---------------------------------------------------------------- definitions


def _cost_activated_norm(call: Call, result: Result) -> Cost:
    a: ActivatedNormAttrs = call.attrs
    return Cost(8 * elements(call.type(0)) + stages_flops(a.epilogue, result.types[0], call.types))


def _infer_softmax_mean(call: Call) -> Result:
    """The rows of operand 0 become one element each; operand 1 is a column of as many weights as a row has elements."""
    x, w = call.type(0), call.type(1)
    require_rank(w, 2, "SoftmaxMean weights")
    agree(w.dims[0], x.dims[-1], f"SoftmaxMean weights {w} are not one per element of a row of {x}")
    agree(w.dims[1], 1, f"SoftmaxMean weights {w} are no column")
    return Result((TensorType(x.dtype, (*x.dims[:-1], 1)),))


def _cost_norm_pair(call: Call, result: Result) -> Cost:
    a: NormPairAttrs = call.attrs
    pairs = zip((a.after, a.others), result.types, strict=True)
    return Cost(sum(8 * elements(y) + stages_flops(stages, y, call.types) for stages, y in pairs))


def _cost_rotary_norm_pair(call: Call, result: Result) -> Cost:
    return Cost(11 * sum(map(elements, result.types)))


def _cost_group_apply(call: Call, result: Result) -> Cost:
    a: GroupApplyAttrs = call.attrs
    return Cost(4 * elements(call.type(0)) + stages_flops(a.epilogue, result.types[0], call.types))


DEFS: tuple[OpDef, ...] = (
    region("ActivatedNorm", _infer_activated_norm, ActivatedNormAttrs, cost=_cost_activated_norm, arity=3),
    region("AddNorm", _infer_add_norm, HeldNormAttrs, cost=per_element(9)),
    region("NormAddNorm", _infer_norm_add_norm, NormAddNormAttrs, cost=per_element(17)),
    region("GroupApply", _infer_group_apply, GroupApplyAttrs, cost=_cost_group_apply, arity=4),
    region("GroupMoments", _infer_group_moments, GroupMomentsAttrs, cost=per_element(4), arity=1),
    region("NormPair", _infer_norm_pair, NormPairAttrs, cost=_cost_norm_pair),
    region("RotaryNormPair", _infer_rotary_norm_pair, RotaryNormPairAttrs, cost=_cost_rotary_norm_pair),
    region("SoftmaxMean", _infer_softmax_mean, cost=per_element(6)),
    region("NormedResidual", _infer_normed_residual, NormedResidualAttrs, tol=STEPS_TOL),
)
