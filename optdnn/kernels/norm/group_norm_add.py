"""Group normalization, the addition of another image to its result and the activation after it, in one launch: the end of a residual
block. The launch is emitted at the addition.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from optdnn.ir.epilogue import Epilogue, plan_epilogue
from optdnn.ir.graph import Graph, Op, Value
from optdnn.kernels.builder import Builder
from optdnn.kernels.norm import group_norm_kernel as clustered
from optdnn.kernels.norm.activation import NormOutput
from optdnn.kernels.norm.group_norm import image_problem, norm_operands, pitch_of_images, refuse_images
from optdnn.kernels.pointwise.pointwise import single
from optdnn.kernels.tactic import Offer, ProblemTactic, TakesBefore
from optdnn.ops.fused import PointwiseAttrs
from optdnn.runtime.cuda.gpu_facts import GpuFacts

NORMS = frozenset({"GroupNormalization", "InstanceNormalization"})
SEPARATE_S, RATE = 1.4e-6, 3.2e12
"""A separate launch for the addition: its seconds as a dependent launch, and its bytes per second."""


@dataclass(frozen=True)
class _Sum:
    """The normalization, the image that is added to its result, and the epilogue: the addition and the stages after it."""

    norm: Op
    image: Value
    epilogue: Epilogue

    def output(self, op: Op) -> NormOutput:
        """The same as a :class:`NormOutput`."""
        return NormOutput(self.norm, op, self.epilogue)


def _sum(graph: Graph, op: Op) -> _Sum | None:
    """``op`` as the sum of an image and a normalization without other readers; None if it is not such a sum."""
    for slot, value in enumerate(op.inputs):
        norm = None if value is None else graph.op(value)
        if norm is None or value is None or norm.kind not in NORMS or value.port or graph.sole_user(value) != op:
            continue
        stages = op.attrs.epilogue if op.kind == "Pointwise" else tuple(single(op))
        if slot and (not stages or stages[0].kind != "Add" or set(stages[0].args) != {~0, slot}):
            continue
        # Either operand of the addition may be the normalization: the stages start from it.
        inputs = list(op.inputs)
        inputs[0], inputs[slot] = inputs[slot], inputs[0]
        given = replace(op, inputs=tuple(inputs), attrs=PointwiseAttrs(epilogue=stages))
        found = plan_epilogue(graph, given, channel_axis=1, allow_bias=False)
        if found.residual is not None and not found.rest and ("add",) in found.rendered:
            return _Sum(norm, found.residual, found)
    return None


class GroupNormAdd(TakesBefore, ProblemTactic):
    """GroupNorm or InstanceNorm of channels-last images that fit a cluster, then Add of an image, then an optional activation."""

    name = "group_norm_add"

    def refuse(self, b: Builder, op: Op) -> str | None:
        found = _sum(b.graph, op)
        if found is None:
            return "it is not the sum of an image and a group normalization without other readers"
        if b.graph.type(found.norm.value) != op.outputs[0].type:
            return "the normalized images are repeated"
        if (why := refuse_images(b, found.norm, found.norm.inputs[0])) is not None:
            return f"the normalization before it: {why}"
        images = [b.operand(found.image), *b.fixed(op.value)]
        if any(pitch_of_images(x) is None or x.dtype != op.outputs[0].type.dtype for x in images):
            return "its images do not consist of aligned vectors of channels"
        return None if self.configs(b, op) else "no cluster holds its images"

    def defer(self, b: Builder, op: Op) -> str | None:
        """Without timings, the cost model decides. With ``row_invariant``, one launch serves every batch size: it rounds once."""
        if b.row_invariant:
            return None
        problem = self.problem(b, op)
        alone = replace(problem, epilogue=(), residual_pitch=0)
        one, two = (min(self._seconds(p, b.gpu), default=1.0) for p in (problem, alone))
        two += SEPARATE_S + 1.5 * alone.bytes / RATE
        return (
            None
            if one <= two
            else f"two launches are predicted to be faster ({two * 1e6:.1f} us; one: {one * 1e6:.1f})"
        )

    @staticmethod
    def _seconds(problem: clustered.Problem, gpu: GpuFacts) -> list[float]:
        return [clustered.estimate(problem, c, gpu) for c in clustered.candidates(problem, gpu)]

    def neighbors(self, graph: Graph, op: Op) -> Sequence[Op]:
        """The normalization before it."""
        found = _sum(graph, op)
        return [] if found is None else [found.norm]

    def problem(self, b: Builder, op: Op) -> clustered.Problem:
        found = _sum(b.graph, op)
        assert found is not None
        plain = image_problem(b, found.norm, found.norm.inputs[0])
        pitches = [pitch_of_images(b.operand(found.image)), pitch_of_images(b.result(op.value))]
        added, written = (0 if pitch in (None, plain.channels) else pitch for pitch in pitches)
        stages = tuple(found.epilogue.rendered)
        return replace(plain, epilogue=stages, residual_pitch=added, output_pitch=written)

    def offers(self, problem: clustered.Problem, gpu: GpuFacts) -> Sequence[Offer]:
        found = clustered.candidates(problem, gpu)
        return [Offer(c, clustered.estimate(problem, c, gpu), False) for c in found]

    def emit(self, b: Builder, op: Op, config: clustered.Config) -> None:
        found = _sum(b.graph, op)
        assert found is not None
        problem, residual = self.problem(b, op), b.operand(found.image)
        to = found.output(op)
        x = b.operand(found.norm.inputs[0])
        operands = {"input": x, "residual": residual, **norm_operands(b, found.norm, to, problem.channels)}
        kind, attrs = to.meaning()
        reads = [x, operands["scale"], operands["bias"], *to.operands(b, residual)]
        covers = replace(op, src=op.src | found.norm.src)
        made = clustered.launch(problem, config, b.gpu)
        b.emit(covers, made, operands, kind, attrs, reads, [operands["output"]])
