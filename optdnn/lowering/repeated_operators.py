"""Small pointwise operators compute again what they read from other small ones, where all of them become one launch then.

A cell of a recurrent network that no kernel knows (sLSTM: Beck et al., 2024) has several states. Each is the result of an operator, and
the next operator reads it: a chain of launches of a microsecond each, in every step. An operator that computes the states that it
reads waits for nothing but what they wait for, so they share a launch (:mod:`optdnn.lowering.joined_launches`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from optdnn.kernels.builder import TensorView
from optdnn.kernels.pointwise import joint
from optdnn.kernels.pointwise.strides import broadcast
from optdnn.ops.base import Stage
from optdnn.ops.binary import CastAttrs
from optdnn.ops.fused import infer_stages
from optdnn.runtime.program import Program
from optdnn.runtime.reference.base import picked
from optdnn.types import FP32, DType, TensorType

MOST_STAGES = 64
"""Most stages of an operator with all that it computes again."""
MOST_WORK = 1_000_000
"""Most stages (times elements) that an operator computes again: some hundred nanoseconds of a large GPU, less than a launch."""
Parts = Mapping[int, Sequence[joint.Part]]


def repeated(program: Program, parts: Parts) -> dict[int, list[joint.Part]]:
    """The small operators (by step, in the order of the program) that compute again what they read, as they are then.

    ``parts``: all small operators and copies. An operator is among the results if it then waits for exactly the steps that one of
    the operators waits for whose results it read: so the launch of that operator can compute it too.
    """
    writers: dict[int, list[int]] = {}
    for k, step in enumerate(program.steps):
        for i in step.outputs:
            writers.setdefault(i, []).append(k)
    before, launches, found = list[int](), dict[int, int](), dict[int, list[joint.Part]]()
    for k, step in enumerate(program.steps):
        own = parts.get(k)
        buffers = step.inputs if own is None else [x.buffer for part in own for _, x in part.present]
        direct = {w for i in buffers for w in writers.get(i, ()) if w < k}
        waits = max((before[w] for w in direct.intersection(parts)), key=int.bit_count, default=0)
        makers = {w for w in direct if not waits >> w & 1}
        again = None
        if own is not None and makers <= parts.keys() and all(not before[w] & ~waits for w in makers):
            made = [part for w in makers for part in found.get(w, parts[w])]
            again = _all_repeating(own, made)
        if again is not None and all(w < k and waits >> w & 1 for part in again for w in _writers(part, writers)):
            found[k] = again
            for w in (k, *(w for w in makers if before[w] == waits)):
                launches[waits] = launches.get(waits, 0) | 1 << w
        else:
            waits = _after(direct, before, launches)
        before.append(waits)
    return found


def _writers(part: joint.Part, writers: Mapping[int, Sequence[int]]) -> list[int]:
    """The steps that write what an operator reads."""
    return [w for _, x in part.present for w in writers.get(x.buffer, ())]


def _all_repeating(parts: Sequence[joint.Part], makers: Sequence[joint.Part]) -> list[joint.Part] | None:
    """``parts``, which compute again what they read of the results of ``makers``; None if one cannot."""
    found: list[joint.Part] = []
    for part in parts:
        new = _repeating(part, makers)
        if new is None:
            return None
        found.append(new)
    return found if makers else None


def _after(steps: set[int], before: Sequence[int], launches: Mapping[int, int]) -> int:
    """The steps, those in their launches, and all that they wait for, as bits. ``launches``: by what they wait for."""
    found = 0
    for w in steps:
        together = launches.get(before[w], 0)
        found |= before[w] | (together if together >> w & 1 else 1 << w)
    return found


def _repeating(part: joint.Part, makers: Sequence[joint.Part]) -> joint.Part | None:
    """``part``, which computes again what ``makers`` made; None if it cannot, or if that takes longer than a launch."""
    part = _split(part, makers)
    new, operands, work = _Composed(), list[int | None](), 0
    for x in part.operands:
        possible = [m for m in makers if x is not None and m.target.buffer == x.buffer]
        if x is None or not possible:
            operands.append(None if x is None else new.operand(x))
            continue
        maker, seen = next(((m, seen) for m in possible if (seen := _seen(m, x)) is not None), (None, None))
        if maker is None or seen is None:
            return None
        value = new.add(maker.stages, [None if v is None else new.operand(v) for v in seen])
        operands.append(new.converted(value, _dtype(maker), maker.target.dtype))
        work += math.prod(part.target.shape) * len(maker.stages)
    value = new.add(part.stages, operands)
    if new.stages:
        value = new.converted(value, _dtype(part), part.target.dtype)
    made = joint.Part(tuple(new.operands), tuple(new.stages), part.target)
    last = value == (~len(new.stages) if new.stages else 0)
    fits = last and len(new.stages) <= MOST_STAGES and work <= MOST_WORK
    return made if fits and joint.refuse(made) is None else None


def _split(part: joint.Part, makers: Sequence[joint.Part]) -> joint.Part:
    """``part`` with the axes of the results of ``makers`` that a Reshape between them joined."""
    for k in range(len(part.operands)):
        buffer = None if (x := part.operands[k]) is None else x.buffer
        for target in (m.target for m in makers if m.target.buffer == buffer):
            for n, step in zip(target.shape, target.strides, strict=True):
                part = _split_at(part, k, step) if n > 1 else part
    return part


def _split_at(part: joint.Part, operand: int, step: int) -> joint.Part:
    """``part`` in which the axis of an operand that contains elements ``step`` apart is two axes. The inner one ends there."""
    x, rank = part.operands[operand], len(part.target.shape)
    assert x is not None
    for k, (n, s) in enumerate(zip(x.shape, x.strides, strict=True)):
        if 0 < s < step < n * s and step % s == 0 and n % (step // s) == 0:
            axis, inner = k - len(x.shape), step // s
            operands = tuple(None if o is None else _split_axis(o, axis, inner) for o in part.operands)
            return joint.Part(operands, part.stages, _split_axis(part.target, axis, inner)) if rank >= -axis else part
    return part


def _split_axis(x: TensorView, axis: int, inner: int) -> TensorView:
    """A view whose axis (from the end) is two, the inner one of ``inner`` elements. An axis that is broadcast becomes two of them."""
    at = len(x.shape) + axis
    if at < 0:
        return x
    n, s = x.shape[at], x.strides[at]
    sizes, steps = ((1, 1), (s, s)) if n == 1 else ((n // inner, inner), (s * inner, s))
    return x.view((*x.shape[:at], *sizes, *x.shape[at + 1 :]), (*x.strides[:at], *steps, *x.strides[at + 1 :]))


class _Composed:
    """Operands and stages of an operator that is put together from several. A value is the number of an operand, or ``~`` that of a
    register: register ``k`` is the result of stage ``k - 1``."""

    def __init__(self) -> None:
        self.operands: list[TensorView] = []
        self.stages: list[Stage] = []

    def operand(self, x: TensorView) -> int:
        if x not in self.operands:
            self.operands.append(x)
        return self.operands.index(x)

    def converted(self, value: int, given: DType, wanted: DType) -> int:
        """A value of type ``given`` as one of type ``wanted``."""
        return value if given == wanted else self.add([Stage("Cast", (-1,), CastAttrs(wanted))], [value])

    def add(self, stages: Sequence[Stage], values: Sequence[int | None]) -> int:
        """Adds stages that read operands with these values; returns the value of the last one's result (operand 0 without stages)."""
        assert values[0] is not None
        registers = [values[0]]
        for stage in stages:
            self.stages.append(Stage(stage.kind, tuple(picked(stage.args, registers, values)), stage.attrs))
            registers.append(~len(self.stages))
        return registers[-1]


def _seen(maker: joint.Part, x: TensorView) -> list[TensorView | None] | None:
    """What ``maker`` reads for the part ``x`` of its result; None if no views are that. A scalar stays one element: some stages
    need it."""
    target = maker.target
    found = _place(x, target)
    if found is None:
        return None
    corner, axes = found
    seen = list[TensorView | None]()
    for o in maker.operands:
        if o is None or o.size == 1:
            seen.append(None if o is None else o.view([1] * len(x.shape), [0] * len(x.shape)))
            continue
        steps = broadcast(o, target.shape)
        offset = sum(c * s for c, s in zip(corner, steps, strict=True))
        seen.append(o.view(x.shape, [0 if a is None else steps[a] for a in axes], offset))
    return seen


def _place(x: TensorView, whole: TensorView) -> tuple[list[int], list[int | None]] | None:
    """Where ``x`` begins in ``whole``, and the axis of ``whole`` that each of its axes is (None for one element); None if it is no box
    of it."""
    corner, rest, room = [0] * len(whole.shape), x.offset - whole.offset, 0
    axes: list[int | None] = [None] * len(x.shape)
    lengths = [1] * len(whole.shape)
    for j in sorted((j for j, n in enumerate(whole.shape) if n > 1), key=lambda j: -whole.strides[j]):
        n, step = whole.shape[j], whole.strides[j]
        if step < 1 or (room and n * step > room):
            return None
        room = step
        corner[j], rest = divmod(rest, step)
        for k, (m, s) in enumerate(zip(x.shape, x.strides, strict=True)):
            if m > 1 and s == step and axes[k] is None and lengths[j] == 1:
                axes[k], lengths[j] = j, m
        if not 0 <= corner[j] <= n - lengths[j]:
            return None
    known = all(a is not None for a, m in zip(axes, x.shape, strict=True) if m > 1)
    return (corner, axes) if known and not rest else None


def _dtype(part: joint.Part) -> DType:
    """The element type of the last stage's result."""
    types = [TensorType(FP32, ()) if x is None else TensorType(x.dtype, x.shape) for x in part.operands]
    return infer_stages(part.stages, types[0], types).dtype
