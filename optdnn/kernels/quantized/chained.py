"""Two 1x1 convolutions of 8-bit integers in one launch, as :mod:`optdnn.kernels.conv.chained` has them of 16-bit floats: the last one of a
bottleneck, which adds the residual, and the first one of the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from optdnn.ir.graph import Graph, Op
from optdnn.kernels.builder import Builder, TensorView, map_dtype, up
from optdnn.kernels.conv import chained as floats
from optdnn.kernels.conv import chained_kernel as chained
from optdnn.kernels.conv import hopper_launch
from optdnn.kernels.conv import maps as conv_maps
from optdnn.kernels.conv import problem as conv_problem
from optdnn.kernels.conv.hopper import with_pitch
from optdnn.kernels.conv.parameters import permuted_rows
from optdnn.kernels.conv.problem import Source
from optdnn.kernels.quantized import hopper
from optdnn.kernels.ranking import two_are_better
from optdnn.kernels.tactic import MANY, Offer, Region, Tactic
from optdnn.ops.base import attrs_dict
from optdnn.ops.requantize import pad_channels
from optdnn.runtime.cuda.gpu_facts import GpuFacts
from optdnn.types import Array

INTEGERS = ("int8", "uint8")
GAIN = 1.1
"""One launch has to promise at most this fraction of what two take: those of five pairs in ResNet-50 took 1.25 times their predicted time at
batch 128 on an H200, and one launch 0.95 to 1.2 times."""


def is_pointwise(graph: Graph, op: Op) -> bool:
    """Whether an operator is an 8-bit 1x1 convolution of images with constant weights."""
    weight = graph.constant_value(op.inputs[1]) if op.kind == "QuantizedConv" else None
    if weight is None or weight.ndim != 4 or weight.shape[2:] != (1, 1) or op.attrs.group != 1:
        return False
    return set(op.attrs.strides) == {1} and not any(op.attrs.pads)


@dataclass(frozen=True)
class _Pair:
    """The two operators as the kernel has them: what they read and add (perhaps still to be made), and where results lie."""

    second: Op
    problem: chained.Problem
    image: TensorView
    added: TensorView | None
    added_last: TensorView | None


class ChainedQuantized(Tactic):
    """On Hopper, of int8 and uint8. The launch is emitted at the first of them."""

    name = "chained_sm90_8bit"
    conditional = (
        True  # on what the second one adds: its place in the graph's order is no part of the first one's signature
    )

    def refuse(self, b: Builder, op: Op) -> str | None:
        if not b.arch.startswith("sm_90"):
            return f"it needs Hopper's wgmma and TMA (sm_90a), not {b.arch}"
        second = self._behind(b.graph, op)
        if second is None:
            return "it is no 1x1 convolution whose result exactly one other such operator multiplies"
        for one in (op, second):
            if (why := hopper.refusal(b, one)) is not None:
                return f"{one.name}: {why}"
            types = [b.graph.type(v).dtype.name for k, v in enumerate(one.inputs) if v is not None and k in (0, 3)]
            if any(t not in INTEGERS for t in (*types, one.outputs[0].type.dtype.name)):
                return "it is for 8-bit integers"
        added = second.input(3)
        if added is not None and (added == op.value or added not in b.place):
            return f"what {second.name} adds is computed later"
        pair = self._pair(b, op, second)
        for value in (op.value, second.value):
            if conv_maps.pitch_of(b.result(value)) is None:
                return f"{b.graph.output(value).name} does not lie in channels-last order"
        if (why := chained.no_kernel(pair.problem)) is not None:
            return why
        if pair.problem.channels > pair.problem.middle:
            return f"{second.name} has more channels than its operand: little is saved"
        if not floats.offers(pair.problem, b.gpu):
            return "no tile of the kernel fits it"
        return _slower(replace(pair.problem, batch=MANY) if b.row_invariant else pair.problem, b.gpu)

    def neighbours(self, graph: Graph, op: Op) -> Sequence[Op]:
        """The convolution after it."""
        second = self._behind(graph, op)
        return [] if second is None else [second]

    def region(self, b: Builder, op: Op) -> Region:
        """Both convolutions."""
        return Region(op, after=(self._of(b, op).second,))

    def place(self, b: Builder, op: Op) -> None:
        """The second result, and the first one where others read it."""
        pair = self._of(b, op)
        if pair.problem.stored:
            b.target(op.value)
        b.target(pair.second.value)

    def configs(self, b: Builder, op: Op) -> Sequence[Offer]:
        return floats.offers(self._of(b, op).problem, b.gpu)

    @staticmethod
    def _behind(graph: Graph, op: Op) -> Op | None:
        """The convolution of the result, which others may read as well; None where there is not exactly one."""
        if not is_pointwise(graph, op):
            return None
        found = [u for u in graph.users(op.value) if is_pointwise(graph, u) and u.inputs[0] == op.value]
        return found[0] if len(found) == 1 else None

    def _of(self, b: Builder, op: Op) -> _Pair:
        second = self._behind(b.graph, op)
        assert second is not None
        return self._pair(b, op, second)

    @staticmethod
    def _pair(b: Builder, op: Op, second: Op) -> _Pair:
        def placed(one: Op, slot: int) -> TensorView | None:
            value = one.input(slot)
            return None if value is None else with_pitch(b, one, b.source(value), unit=16)

        image, added, added_last = placed(op, 0), placed(op, 3), placed(second, 3)
        assert image is not None
        n, depth, *size = image.shape
        middle, channels = (x.outputs[0].type for x in (op, second))
        names = [None if x is None else map_dtype(x.dtype) for x in (image, added, added_last)]
        integers = chained.Integers(
            names[0] or "", map_dtype(middle.dtype), map_dtype(channels.dtype), names[1] or "", names[2] or "",
            (op.attrs.zero != 0, second.attrs.zero != 0),
        )  # fmt: skip
        stored = op.value in b.reserved or [second] != list(b.graph.users(op.value))
        problem = chained.Problem(
            n, (size[0], size[1]), depth, middle.static_shape[1], channels.static_shape[1], tuple(op.attrs.stages),
            tuple(second.attrs.stages), stored, integers=integers,
        )  # fmt: skip
        return _Pair(second, problem, image, added, added_last)

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        pair = self._of(b, op)
        second, problem = pair.second, pair.problem
        x, added, added_last = (None if v is None else b.made(v) for v in (pair.image, pair.added, pair.added_last))
        middle = b.target(op.value) if problem.stored else None
        out = b.target(second.value)
        at = [0 if t is None else conv_maps.pitch_of(t) or 0 for t in (x, middle, out, added, added_last)]
        problem = replace(problem, pitches=chained.Pitches(*at))
        named = {"input": x, "output": out, "middle": middle, "added": added, "added_last": added_last}
        operands = {name: t for name, t in named.items() if t is not None}
        attrs: dict[str, Any] = {"kept": problem.stored, "operands": 3 + (added is not None)}
        reads: list[TensorView | None] = [x]
        for prefix, one, residual in (("first", op, added), ("second", second, added_last)):
            weights, pairs, views = _constants(b, one)
            operands |= {prefix: weights, f"{prefix}_bias": pairs}
            attrs |= {f"{prefix}_{k}": v for k, v in (attrs_dict(one.attrs) | {"input_zero": 0}).items()}
            reads += [*views, *([residual] if residual is not None else [])]
        numbers = (hopper.numbers_of(op, added), hopper.numbers_of(second, added_last))
        made = chained.launch(problem, config, b.gpu, numbers)
        writes: list[TensorView | None] = [out] if middle is None else [middle, out]
        b.emit(replace(op, src=op.src | second.src), made, operands, "ChainedQuantized", attrs, reads, writes)


def _constants(b: Builder, op: Op) -> tuple[TensorView, TensorView, list[TensorView]]:
    """Permuted weights and the pairs of scale and bias, of whole chunks; and both as the meaning reads them."""
    matrix: Array = b.weights(op)[:, :, 0, 0]
    channels, depth = matrix.shape
    weights = b.constant(permuted_rows(matrix), f"{op.outputs[0].name}.weights")
    given = b.graph.constant_value(op.inputs[2])
    assert given is not None
    wide = np.zeros((up(channels, chained.ROW_BYTES), 2), np.float32)
    wide[: len(pad_channels(given))] = pad_channels(given)
    pairs = b.constant(wide, f"{op.outputs[0].name}.scales")
    view = weights.view((up(channels, 16) // 16, 8, 2, depth, 1, 1), (16 * depth, depth, 8 * depth, 1, 1, 1))
    return weights, pairs, [view, pairs.view((channels, 2), (2, 1))]


@lru_cache(maxsize=1024)
def _apart(problem: chained.Problem, gpu: GpuFacts) -> float:
    """Predicted seconds of two launches."""
    p, of = problem, problem.integers
    assert of is not None

    def best(depth: int, channels: int, stages: Any, types: tuple[str, str, str], zero: bool) -> float:
        images = (Source(*p.size, depth),)
        one = conv_problem.Problem(p.batch, channels, images, stages, *types, zero)
        return min((o.seconds or 0.0 for o in hopper_launch.ranked(one, gpu)), default=np.inf)

    first = best(p.depth, p.middle, p.first, (of.image, of.middle, of.added), of.zeros[0])
    return first + best(p.middle, p.channels, p.second, (of.middle, of.output, of.added_last), of.zeros[1])


def _slower(problem: chained.Problem, gpu: GpuFacts) -> str | None:
    """Why two launches are better, as far as the cost models know, or None."""
    if problem.pixels < floats.FEWEST:
        return f"of {problem.pixels} pixels, one launch takes as long as two ({floats.FEWEST} are needed)"
    one = min((o.seconds or 0.0 for o in floats.offers(problem, gpu)), default=np.inf)
    return two_are_better(one, _apart(problem, gpu), GAIN)
