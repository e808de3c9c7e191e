"""The activation, or the conversion to another type, after a normalization: the normalization's kernel can compute it, too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from optdnn.ir.epilogue import Epilogue, plan_epilogue
from optdnn.ir.graph import Op, Value
from optdnn.kernels.builder import Builder, TensorView
from optdnn.kernels.conv.fused import stage_operands
from optdnn.kernels.pointwise.pointwise import single
from optdnn.kernels.tactic import ProblemTactic, Region, TakesAfter
from optdnn.ops.base import Stage, attrs_dict
from optdnn.ops.fused import PointwiseAttrs, plain_stages
from optdnn.types import BF16, FP16, FP32


@dataclass(frozen=True)
class NormOutput:
    """A normalization and its epilogue in the same launch: ``last`` is the operator that gives the result, after the stages of
    ``epilogue``."""

    norm: Op
    last: Op
    epilogue: Epilogue

    @property
    def value(self) -> Value:
        """The result."""
        return self.last.value

    @property
    def region(self) -> Region:
        """All operators of the launch."""
        return Region(self.norm) if self.last is self.norm else Region(self.norm, after=(self.last,))

    @property
    def narrowed(self) -> bool:
        """Whether the norm is fp32, and the result fp16."""
        return narrows(self.norm, self.last)

    @property
    def covers(self) -> Op:
        """The normalization, with the nodes of all operators of the launch."""
        return replace(self.norm, src=self.region.src)

    def meaning(self, prologue: Sequence[Stage] = ()) -> tuple[str, dict[str, Any]]:
        """Kind and attributes of one launch that computes ``prologue``, the normalization and the epilogue."""
        own = attrs_dict(self.norm.attrs)
        if not self.epilogue.stages and not prologue:
            return self.norm.kind, own
        before = {"prologue": plain_stages(prologue)} if prologue else {}
        return "ActivatedNorm", {"norm": self.norm.kind, **own, **before, "epilogue": self.plain_stages(), "arity": 3}

    def plain_stages(self) -> tuple[Any, ...]:
        """The epilogue's stages as plain data of a step."""
        return plain_stages(self.epilogue.stages)

    def operands(self, b: Builder, moments: TensorView | None = None) -> list[TensorView | None]:
        """The operands of a step after its input, scale and bias."""
        return stage_operands(b, self.epilogue, moments)


def narrows(norm: Op, last: Op) -> bool:
    """Whether a norm is fp32, and the result of the operator after it fp16."""
    return norm.outputs[0].type.dtype == FP32 and last.outputs[0].type.dtype == FP16


def without_narrowing(stages: Sequence[Stage], norm: Op, last: Op) -> tuple[Stage, ...]:
    """The stages of the operator after a norm, without a last one that converts their fp32 result to fp16."""
    ends = narrows(norm, last) and stages and stages[-1].kind == "Cast"
    return tuple(stages[:-1] if ends else stages)


def output_of(b: Builder, norm: Op, *, wide: bool = False, halves: bool = False) -> NormOutput:
    """The normalization or softmax, and the pointwise operator after it if that is the only reader and has no tensor operands of its own.

    ``wide``: that operator may convert 16-bit floats to fp32. ``halves``: its result may be fp16 after a norm of fp32."""
    alone = NormOutput(norm, norm, Epilogue())
    t, user = norm.outputs[0].type, b.graph.sole_user(norm.value)
    if user is None or norm.value in b.reserved or t.dtype not in (FP16, BF16, FP32):
        return alone
    types = (t, *([t.with_dtype(FP32)] if wide else []), *([t.with_dtype(FP16)] if halves and t.dtype == FP32 else []))
    if user.outputs[0].type not in types:
        return alone
    if not user.pointwise or user.inputs.count(norm.value) != 1 or user.inputs[0] != norm.value:
        return alone
    stages = user.attrs.epilogue if user.kind == "Pointwise" else tuple(single(user))
    own = without_narrowing(stages, norm, user)
    given = replace(user, attrs=PointwiseAttrs(epilogue=own))
    found = plan_epilogue(b.graph, given, channel_axis=1, allow_residual=False, allow_bias=False, allow_wide=wide)
    if len(own) < len(stages) and not found.rest:
        found.stages.append(replace(stages[-1], args=(~len(found.stages),)))
    return alone if found.rest or not found.stages else NormOutput(norm, user, found)


class ActivatedNorm(TakesAfter, ProblemTactic):
    """A normalization, with the activation after it."""

    def region(self, b: Builder, op: Op) -> Region:
        """The normalization, and the activation after it."""
        return output_of(b, op).region

    def place(self, b: Builder, op: Op) -> None:
        """Place the result of the activation; without one, the result of the normalization."""
        b.target(output_of(b, op).value)
