"""GroupNorm or InstanceNorm of images, then a factor and a shift for each image and channel, and the activation after them, in the
norm's launches: adaptive instance norm, and the residual blocks of diffusion networks (``scale_shift``).

The launches are emitted at the pointwise operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from optdnn.ir.epilogue import Epilogue, plan_epilogue
from optdnn.ir.graph import Graph, Op
from optdnn.ir.norm_addition import NormAddition, norm_addition
from optdnn.kernels.builder import Builder, TensorView
from optdnn.kernels.norm.activation import NormOutput
from optdnn.kernels.norm.group_norm import (
    emit_images,
    group_norm_offers,
    image_problem,
    pitch_of_images,
    refuse_images,
)
from optdnn.kernels.norm.group_norm_kernel import Modulated, Problem
from optdnn.kernels.norm.modulated import Modulation, modulation
from optdnn.kernels.tactic import Offer, ProblemTactic, TakesBefore
from optdnn.ops.base import Stage, attrs_dict
from optdnn.ops.fused import PointwiseAttrs, plain_stages
from optdnn.runtime.cuda.gpu_facts import GpuFacts
from optdnn.types import FP32

_SLOTS = 4
"""Number of operands of a launch's meaning before those of its stages: input, scale, bias, and the moments of tiles."""


@dataclass(frozen=True)
class _Output(NormOutput):
    """The norm, and the pointwise operator: its stages are those of the launch's meaning."""

    @property
    def covers(self) -> Op:
        return replace(self.last, src=self.last.src | self.norm.src)

    def meaning(self, prologue: Sequence[Stage] = ()) -> tuple[str, dict[str, Any]]:
        assert not prologue, "an addition before the norm belongs to another launch"
        own = {"norm": self.norm.kind, **attrs_dict(self.norm.attrs)}
        return "ActivatedNorm", {**own, "epilogue": self.plain_stages(), "arity": 3}

    def plain_stages(self) -> tuple[Any, ...]:
        stages = self.last.attrs.epilogue
        slots = [tuple(a if a is None or a < 1 else a + _SLOTS - 1 for a in s.args) for s in stages]
        return plain_stages([replace(s, args=args) for s, args in zip(stages, slots, strict=True)])

    def operands(self, b: Builder, moments: TensorView | None = None) -> list[TensorView | None]:
        return [moments, *(None if v is None else b.operand(v) for v in self.last.inputs[1:])]


def _epilogue(graph: Graph, op: Op, found: Modulation) -> Epilogue | None:
    """The stages after a modulation as the epilogue of the kernels; None if these cannot run them."""
    if found.rest is None:
        return None
    given = replace(op, attrs=PointwiseAttrs(epilogue=found.rest))
    narrow = op.outputs[0].type.dtype != FP32  # in fp32, the kernels' sine is not exact enough
    stages = plan_epilogue(graph, given, channel_axis=1, allow_residual=False, allow_bias=False, allow_numbers=narrow)
    return None if stages.rest else stages


def _modulation(b: Builder, op: Op) -> tuple[Modulation, Epilogue]:
    """The modulation, and the stages after it, of an operator that is not refused."""
    found = modulation(b.graph, op)
    assert found is not None
    stages = _epilogue(b.graph, op, found)
    assert stages is not None
    return found, stages


def _pitch(x: TensorView, shape: Sequence[int]) -> int | None:
    """Elements from an image's vector to the next one in a tensor (images or 1, channels, 1, …); None for other shapes or strides."""
    missing = len(shape) - len(x.shape)
    sizes, strides = (1,) * missing + tuple(x.shape), (0,) * missing + tuple(x.strides)
    if sizes[0] not in (1, shape[0]) or sizes[1] != shape[1] or strides[1] != 1 or any(n != 1 for n in sizes[2:]):
        return None
    pitch = strides[0] if sizes[0] > 1 else 0
    return pitch if x.offset % 8 == pitch % 8 == 0 else None


class ModulatedGroupNorm(TakesBefore, ProblemTactic):
    """GroupNorm or InstanceNorm, then a factor and a shift for each image and channel, then an optional activation."""

    name = "group_norm_modulated"

    def refuse(self, b: Builder, op: Op) -> str | None:
        found, t = modulation(b.graph, op), op.outputs[0].type
        if found is None:
            return "it is not a factor and shift of a group normalization without other readers"
        norm, vectors = found.norm, [v for v in (found.factor, found.shift) if v is not None]
        source = b.graph.op(norm.inputs[0] or norm.value)
        if source.kind == "Add" and isinstance(norm_addition(b.graph, source), NormAddition):
            return f"the normalization belongs to the launch of {source.name}"
        if b.graph.type(norm.value) != t:
            return "the normalized images are repeated"
        if _epilogue(b.graph, op, found) is None:
            return "the kernels cannot compute the stages after the factor and shift"
        if (why := refuse_images(b, norm, norm.inputs[0])) is not None:
            return f"the normalization before it: {why}"
        if any(pitch_of_images(p) is None for p in b.fixed(op.value)):
            return "its images do not consist of aligned vectors of channels"
        if any(_pitch(b.operand(v), t.static_shape) is None or b.graph.type(v).dtype != t.dtype for v in vectors):
            return "its factor and shift are not one aligned vector of channels for each image"
        return None

    def neighbors(self, graph: Graph, op: Op) -> Sequence[Op]:
        """The normalization before it."""
        found = modulation(graph, op)
        return [] if found is None else [found.norm]

    def problem(self, b: Builder, op: Op) -> Problem:
        found, stages = _modulation(b, op)
        plain, shape = image_problem(b, found.norm, found.norm.inputs[0]), op.outputs[0].type.static_shape
        factor, shift = (None if v is None else _pitch(b.operand(v), shape) for v in (found.factor, found.shift))
        pitch = pitch_of_images(b.result(op.value))
        return replace(
            plain, epilogue=tuple(stages.rendered), output_pitch=0 if pitch in (None, plain.channels) else pitch,
            modulated=Modulated(factor or 0, shift, found.plus),
        )  # fmt: skip

    def offers(self, problem: Problem, gpu: GpuFacts) -> Sequence[Offer]:
        return group_norm_offers(problem, gpu)

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        found, stages = _modulation(b, op)
        sources = {"input": b.operand(found.norm.inputs[0]), "factor": b.operand(found.factor)}
        if found.shift is not None:
            sources["shift"] = b.operand(found.shift)
        if stages.numbers:
            rows = np.zeros((2, op.outputs[0].type.static_shape[1]), np.float32)
            rows[: len(stages.numbers)] = stages.numbers
            sources["numbers"] = b.constant(rows, f"{op.outputs[0].name}.numbers")
        emit_images(b, _Output(found.norm, op, stages), self.problem(b, op), config, sources)
