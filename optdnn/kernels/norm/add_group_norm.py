"""An addition of one vector of channels per image and the group normalization of the sum, in the normalization's launches.

Diffusion networks add the embedding of the time step to images this way. The sum is not stored. The launches are emitted at the
addition.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from optdnn.ir.graph import Graph, Op
from optdnn.ir.norm_addition import NormAddition, norm_addition
from optdnn.kernels.builder import Builder, TensorView
from optdnn.kernels.norm import group_norm_kernel as clustered
from optdnn.kernels.norm.activation import NormOutput, output_of
from optdnn.kernels.norm.group_norm import emit_images, group_norm_offers, image_problem, refuse_images
from optdnn.kernels.tactic import Offer, ProblemTactic, Region
from optdnn.runtime.cuda.gpu_facts import GpuFacts


def _addition(b: Builder, op: Op) -> NormAddition:
    """The addition of an operator that is not refused."""
    found = norm_addition(b.graph, op)
    assert isinstance(found, NormAddition)
    return found


def _pitch(x: TensorView) -> int | None:
    """Elements from a vector (N or 1, C, 1, …) to the next; None if the vectors are not contiguous and aligned."""
    pitch = x.strides[0] if x.shape[0] > 1 else 0
    return pitch if x.strides[1] == 1 and x.offset % 8 == pitch % 8 == 0 else None


class AddGroupNorm(ProblemTactic):
    """Add, then GroupNorm or InstanceNorm of channels-last images, then an optional activation."""

    name = "add_group_norm"

    def refuse(self, b: Builder, op: Op) -> str | None:
        found = norm_addition(b.graph, op)
        if isinstance(found, str):
            return found
        if (why := refuse_images(b, found.norm, found.images)) is not None:
            return f"the normalization after it: {why}"
        if _pitch(b.operand(found.vectors)) is None:
            return "its addend does not consist of aligned vectors of channels"
        return None

    def neighbors(self, graph: Graph, op: Op) -> Sequence[Op]:
        """The readers of the sum (one may be a normalization), and their readers."""
        near = graph.readers(op)
        return [*near, *(user for one in near for user in graph.readers(one))]

    def region(self, b: Builder, op: Op) -> Region:
        """The addition, the normalization, and the activation after it."""
        return Region(op, after=self._output(b, op).region.ops)

    def place(self, b: Builder, op: Op) -> None:
        """Place the result of the last operator."""
        b.target(self._output(b, op).value)

    @staticmethod
    def _output(b: Builder, op: Op) -> NormOutput:
        return output_of(b, _addition(b, op).norm)

    def problem(self, b: Builder, op: Op) -> clustered.Problem:
        found = _addition(b, op)
        return replace(image_problem(b, found.norm, found.images), added_pitch=_pitch(b.operand(found.vectors)))

    def offers(self, problem: clustered.Problem, gpu: GpuFacts) -> Sequence[Offer]:
        return group_norm_offers(problem, gpu)

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        found, to = _addition(b, op), self._output(b, op)
        joint = replace(to, norm=replace(to.norm, src=op.src | to.norm.src))
        if to.last is to.norm:
            joint = replace(joint, last=joint.norm)
        sources = {"input": b.operand(found.images), "added": b.operand(found.vectors)}
        emit_images(b, joint, self.problem(b, op), config, sources)
