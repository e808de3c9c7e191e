"""Two 1x1 convolutions of 8-bit integers in one launch: the last convolution of a bottleneck with its residual, and the first
convolution of the next one. Of 16-bit floats: :mod:`optdnn.kernels.conv.chained`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from optdnn.ir.graph import Graph, Op
from optdnn.kernels.builder import Builder, TensorView, map_dtype, up
from optdnn.kernels.conv import chained_kernel as chained
from optdnn.kernels.conv import maps as conv_maps
from optdnn.kernels.conv.chained import ChainedPair, Pair
from optdnn.kernels.conv.hopper import with_pitch
from optdnn.kernels.conv.parameters import permuted_rows
from optdnn.kernels.quantized import hopper
from optdnn.ops.base import attrs_dict
from optdnn.ops.requantize import pad_channels
from optdnn.runtime.cuda.compile import render
from optdnn.types import Array

INTEGERS = ("int8", "uint8")


def is_pointwise(graph: Graph, op: Op) -> bool:
    """Whether an operator is an 8-bit 1x1 convolution of images with constant weights."""
    weight = graph.constant_value(op.inputs[1]) if op.kind == "QuantizedConv" else None
    if op.input(hopper.DATA_SCALE) is not None:
        return False
    if weight is None or weight.ndim != 4 or weight.shape[2:] != (1, 1) or op.attrs.group != 1:
        return False
    return set(op.attrs.strides) == {1} and not any(op.attrs.pads)


@dataclass(frozen=True)
class _BytePair(Pair):
    """A pair with views of its image and residuals (placed, or still to be made)."""

    image: TensorView
    added: TensorView | None
    added_last: TensorView | None


class ChainedQuantized(ChainedPair[_BytePair]):
    """Pairs of int8 or uint8 on Hopper. The launch is emitted at the first convolution."""

    name = "chained_sm90_8bit"

    def refuse(self, b: Builder, op: Op) -> str | None:
        if not b.arch.startswith("sm_90"):
            return f"it needs Hopper's wgmma and TMA (sm_90a), not {b.arch}"
        second = self.behind(b.graph, op)
        if second is None:
            return "it is not a 1x1 convolution followed by exactly one other 1x1 convolution of 8-bit integers"
        for one in (op, second):
            if (why := hopper.refusal(b, one)) is not None:
                return f"{one.name}: {why}"
            if render.reads_channels(one.attrs.stages):
                return f"{one.name}: a stage reads a further number of each channel"
            types = [b.graph.type(v).dtype.name for k, v in enumerate(one.inputs) if v is not None and k in (0, 3)]
            if any(t not in INTEGERS for t in (*types, one.outputs[0].type.dtype.name)):
                return "it is for 8-bit integers"
        added = second.input(3)
        if added is not None and (added == op.value or added not in b.place):
            return f"the residual of {second.name} is computed later"
        pair = self.pair(b, op, second)
        for value in (op.value, second.value):
            if conv_maps.pitch_of(b.result(value)) is None:
                return f"{b.graph.output(value).name} is not in channels-last order"
        return self.refuse_problem(b, pair)

    @staticmethod
    def behind(graph: Graph, op: Op) -> Op | None:
        """The 1x1 convolution that reads the result (other readers are allowed); None unless there is exactly one."""
        if not is_pointwise(graph, op):
            return None
        found = [u for u in graph.users(op.value) if is_pointwise(graph, u) and u.inputs[0] == op.value]
        return found[0] if len(found) == 1 else None

    def pair(self, b: Builder, op: Op, second: Op) -> _BytePair:
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
        return _BytePair(second, problem, image, added, added_last)

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        pair = self.pair_of(b, op)
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
    """Permuted weights, pairs of scale and bias padded to whole chunks, and the views of both in the launch's meaning."""
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
