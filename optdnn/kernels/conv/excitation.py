"""The two 1x1 convolutions of squeeze-and-excitation in one launch: both are of one pixel, so latency is all that they take.

The launch stands at the second one. Whether two launches are faster is predicted by the cost model (:meth:`Excitation.defer`) or
measured by the autotuner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from optdnn.ir.epilogue import Epilogue, plan_epilogue
from optdnn.ir.graph import Graph, Op
from optdnn.kernels.builder import Builder, TensorView, map_dtype
from optdnn.kernels.conv import excitation_kernel as excitation
from optdnn.kernels.conv import hopper_launch
from optdnn.kernels.conv import maps as conv_maps
from optdnn.kernels.conv import problem as conv_problem
from optdnn.kernels.conv.excitation_kernel import Problem
from optdnn.kernels.conv.fused import bias_row, conv_attrs, finish, result_place, stage_operands
from optdnn.kernels.conv.hopper import bias_of, with_pitch
from optdnn.kernels.conv.separable import is_pointwise
from optdnn.kernels.tactic import Offer, Region, Tactic
from optdnn.runtime.cuda.gpu_facts import GpuFacts
from optdnn.types import BF16, FP16

GAIN = 0.9
"""One launch has to promise at most this fraction of what two take."""


@lru_cache(maxsize=1024)
def _offers(problem: Problem, gpu: GpuFacts) -> tuple[Offer, ...]:
    """The configurations, the best predicted first. All sum in one order."""
    return tuple(Offer(c, seconds) for seconds, c in excitation.candidates(problem, gpu))


@lru_cache(maxsize=1024)
def _apart(problem: Problem, gpu: GpuFacts) -> float:
    """Predicted seconds of two launches."""
    sizes = (problem.channels, problem.hidden, problem.results)
    total = 0.0
    for depth, channels, stages in (
        (sizes[0], sizes[1], problem.between),
        (sizes[1], sizes[2], problem.epilogue),
    ):
        depth, channels = -(-depth // 8) * 8, -(-channels // 8) * 8
        source = conv_problem.Source(1, 1, depth)
        one = conv_problem.Problem(problem.images, channels, (source,), stages, problem.dtype)
        total += min((o.seconds or 0.0 for o in hopper_launch.ranked(one, gpu)), default=float("inf"))
    return total


def _one_pixel(graph: Graph, op: Op) -> bool:
    """Whether it is a 1x1 convolution of one pixel, with constant weights."""
    return is_pointwise(graph, op) and op.outputs[0].type.static_shape[2:] == (1, 1)


def first_of(graph: Graph, op: Op) -> Op | None:
    """The 1x1 convolution of one pixel whose result only ``op``, another one, reads."""
    if op.inputs[0] is None or not _one_pixel(graph, op):
        return None
    before = graph.op(op.inputs[0])
    if before.kind != "Conv" or not _one_pixel(graph, before):
        return None
    return before if graph.sole_user(before.value) == op else None


class Excitation(Tactic):
    """Two 1x1 convolutions of one pixel of 16-bit images, on Hopper."""

    name = "excitation_sm90"

    def refuse(self, b: Builder, op: Op) -> str | None:
        if not b.arch.startswith("sm_90"):
            return f"it needs Hopper's clusters (sm_90a), not {b.arch}"
        first = first_of(b.graph, op)
        if first is None:
            return "it is not a 1x1 convolution of one pixel that another one makes for it alone"
        dtype = op.outputs[0].type.dtype
        if dtype not in (FP16, BF16) or first.outputs[0].type.dtype != dtype:
            return "it is for 16-bit floats"
        if first.value in b.reserved:
            return f"the result of {first.name} is the network's"
        if op.attrs.prologue or first.attrs.prologue:
            return "something is done to the pixels first"
        if 0 in op.outputs[0].type.static_shape:
            return "it is empty"
        if any(c.input(2) is not None and bias_of(b, c) is None for c in (first, op)):
            return "a bias is not constant"
        between, ep, problem = self._pair(b, op, first)
        if between.rest or between.residual is not None or ep.residual is not None:
            return "more than activations follow the convolutions"
        if (why := excitation.no_kernel(problem)) is not None:
            return why
        return None if _offers(problem, b.gpu) else "no cluster's shared memory holds its weights"

    def defer(self, b: Builder, op: Op) -> str | None:
        """Unmeasured, the cost model decides."""
        first = first_of(b.graph, op)
        assert first is not None
        _, _, problem = self._pair(b, op, first)
        one, two = _offers(problem, b.gpu)[0].seconds or 0.0, _apart(problem, b.gpu)
        if b.row_invariant or one <= GAIN * two:
            return None
        return f"two launches are predicted to be as fast ({two * 1e6:.2f} us; one: {one * 1e6:.2f} us)"

    def neighbours(self, graph: Graph, op: Op) -> Sequence[Op]:
        """The convolution before it."""
        first = first_of(graph, op)
        return [] if first is None else [first]

    def region(self, b: Builder, op: Op) -> Region:
        """Both convolutions."""
        first = first_of(b.graph, op)
        assert first is not None
        return Region(op, before=(first,))

    @staticmethod
    def _pair(b: Builder, op: Op, first: Op) -> tuple[Epilogue, Epilogue, Problem]:
        """The stages of both convolutions, and the kernel's problem."""
        between = plan_epilogue(b.graph, first, channel_axis=1, allow_residual=False)
        ep = plan_epilogue(b.graph, op, channel_axis=1)
        (hidden, channels, *_), results = b.weights(first).shape, len(b.weights(op))
        images = op.outputs[0].type.static_shape[0]
        stages = (("bias",), *between.rendered), (("bias",), *ep.rendered)
        return between, ep, Problem(images, channels, hidden, results, *stages, map_dtype(op.outputs[0].type.dtype))

    def configs(self, b: Builder, op: Op) -> Sequence[Offer]:
        first = first_of(b.graph, op)
        assert first is not None
        return _offers(self._pair(b, op, first)[2], b.gpu)

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        first = first_of(b.graph, op)
        assert first is not None
        assert first.inputs[0] is not None
        between, ep, problem = self._pair(b, op, first)
        x = b.made(with_pitch(b, op, b.operand(first.inputs[0])))
        target = b.target(op.value)
        out = b.made(result_place(b, op, ep, target, conv_maps.storable_whole(b, target)))
        constants, views = self._constants(b, op, first, (between, ep), problem, config)
        before = [b.constant(c, "scalar") for c in between.constants]
        attrs = {"through": problem.dtype, "operands": 3 + (1 + len(before) if before else 0)}
        for prefix, stages in (("first_", between.stages), ("second_", ep.stages)):
            attrs |= {prefix + k: v for k, v in conv_attrs(conv_maps.POINTWISE, 1, stages).items()}
        read: list[TensorView | None] = [x, *views[:2], *([None, *before] if before else []), *views[2:]]
        read += stage_operands(b, ep, None)
        pitches = [conv_maps.pitch_of(t) for t in (x, out)]
        assert pitches[0] is not None
        assert pitches[1] is not None
        made = excitation.launch(problem, config, b.gpu, pitches[0], pitches[1])
        operands = {**constants, "x": x, "output": out}
        b.emit(replace(op, src=op.src | first.src), made, operands, "SeparableConv", attrs, read, [out])
        finish(b, op, ep, out, target)

    @staticmethod
    def _constants(
        b: Builder, op: Op, first: Op, stages: tuple[Epilogue, Epilogue], problem: Problem, config: Any
    ) -> tuple[dict[str, TensorView], list[TensorView]]:
        """The constants by the kernel's names; and weights and bias as both convolutions read them."""
        rows = [config.split * n for n in (config.hidden_block(problem), config.out_block(problem))]
        found: dict[str, TensorView] = {}
        views: list[TensorView] = []
        for name, conv, ep, count, pitch in zip(
            ("first", ""), (first, op), stages, rows, excitation.pitches(problem, config), strict=True
        ):
            weight, label = b.weights(conv), f"{conv.outputs[0].name}.weights"
            matrix = b.kept.once(
                ("excitation", count, pitch), [weight],
                lambda w=weight, n=count, m=pitch: excitation.pack(w.reshape(w.shape[:2]), n, m),
            )  # fmt: skip
            packed, bias = b.constant(matrix, label), bias_row(b, conv, ep.added_to(bias_of(b, conv)), count)
            found |= {name or "second": packed, f"{name}_bias".lstrip("_"): bias}
            views += [packed.view(weight.shape, (pitch, 1, 1, 1)), bias.view((len(weight),), (1,))]
        return found, views
