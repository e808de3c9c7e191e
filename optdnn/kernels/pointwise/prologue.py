"""The prologue of Hopper's convolution as data of a launch: stages on the pixels before the product."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from optdnn.ir.epilogue import RESIDUAL, Epilogue, absorb_unary, channel_vector
from optdnn.ir.graph import Op, Value
from optdnn.kernels.builder import CHANNEL_ALIGN, Builder, TensorView, up
from optdnn.ops.base import Stage
from optdnn.runtime.cuda.compile import render
from optdnn.types import Array


@dataclass
class Prologue:
    """``stages`` are the meaning of the kernel's prologue (:func:`rendered_prologue`). They read ``operands`` at the slots from 1 on.

    ``packed``: the channels' scale and shift, fp32 [channels, 2]. ``gate``: a factor per image and channel.
    """

    packed: TensorView
    stages: list[Stage] = field(default_factory=list)
    operands: list[TensorView] = field(default_factory=list)
    gate: TensorView | None = None

    @property
    def named(self) -> dict[str, TensorView]:
        """The launch's operands by name."""
        return {"before": self.packed, **({"gate": self.gate} if self.gate is not None else {})}

    def add(self, kind: str, operand: TensorView) -> None:
        """Append a stage of two operands: the value so far, and ``operand``."""
        self.operands.append(operand)
        self.stages.append(Stage(kind, (~len(self.stages), len(self.operands))))

    def moved(self, by: int) -> list[Stage]:
        """The stages with ``by`` further operands before their own."""
        return [replace(s, args=tuple(a if a is None or a < 0 else a + by for a in s.args)) for s in self.stages]


def rendered_prologue(b: Builder, op: Op, x: TensorView) -> list[render.Stage] | None:
    """The kernel's stages for the prologue on ``x`` (logical NCHW), operand 0 of a convolution; None if it does not support the prologue.

    It supports a scale and shift per channel (once, before any activation), a gate with one factor per image and channel, activations,
    and squares. Each stage must read the one before.
    """
    parts = _parts(b, op, x)
    if parts is None:
        return None
    rendered: list[render.Stage] = []
    for part in parts:
        if isinstance(part, Epilogue):
            rendered += part.rendered
        else:
            rendered.append(("scale_shift",) if isinstance(part, _Affine) else ("gate",))
    return rendered


def plan_prologue(b: Builder, op: Op, x: TensorView, rows: int) -> Prologue | None:
    """The prologue of :func:`rendered_prologue` with its operands; None if the kernel does not support it. ``rows``: at least so many
    scales and shifts, since the kernel may read them for each K step."""
    channels, parts = x.shape[1], _parts(b, op, x)
    if parts is None:
        return None
    affines = [part for part in parts if isinstance(part, _Affine)]
    constants = np.zeros((max(up(channels, 64), rows), 2), np.float32)
    constants[:channels, 0] = 1.0
    for affine in affines:
        constants[:channels] = np.stack([affine.scale, affine.shift], 1)
    found = Prologue(b.constant(constants, f"{op.outputs[0].name}.prologue"))
    for part in parts:
        if isinstance(part, _Affine):
            column = (1, channels, 1, 1), (0, 2, 0, 0)
            found.add("Mul", found.packed.view(*column))
            found.add("Add", found.packed.view(*column, 1))
        elif isinstance(part, TensorView):
            found.gate = part
            found.add("Mul", part)
        else:
            first = len(found.operands) + 1
            found.operands += [b.constant(c, "scalar") for c in part.constants]
            slots = [a if a is None or a < 0 else first + a - RESIDUAL - 1 for a in part.stages[0].args]
            so_far = ~len(found.stages)
            found.stages.append(replace(part.stages[0], args=tuple(so_far if a == ~0 else a for a in slots)))
    if not affines:  # the kernel reads the scales and shifts anyway
        found.operands.append(found.packed)
    return found


@dataclass
class _Affine:
    """Scale and shift per channel."""

    scale: Array
    shift: Array


def _parts(b: Builder, op: Op, x: TensorView) -> list[_Affine | TensorView | Epilogue] | None:
    """The stages in order: neighboring factors and addends per channel merged into one, gates, and activations (each as a separate
    epilogue); None if any stage is of another form."""
    graph, channels = b.graph, x.shape[1]
    found: list[_Affine | TensorView | Epilogue] = []
    for k, stage in enumerate(op.attrs.prologue):
        if stage.kind == "Mul" and stage.args == (~k, ~k):
            found.append(Epilogue(stages=[Stage("Mul", (~0, ~0))], rendered=[("square",)]))
            continue
        if [a for a in stage.args if a is not None and a < 0] != [~k]:
            return None
        slot = next((a for a in stage.args if a is not None and a >= 0), None)
        value = op.inputs[slot] if slot is not None else None
        if stage.kind not in ("Add", "Mul") or value is None:
            alone = Epilogue()
            if not absorb_unary(graph, op, stage, alone):
                return None
            found.append(alone)
            continue
        array = graph.constant_value(value)
        if array is None:
            gate = _gate(b, value, x) if stage.kind == "Mul" else None
            if gate is None:
                return None
            found.append(gate)
            continue
        vector = channel_vector(array, x.shape, 1)
        if vector is None:
            return None
        if not found or not isinstance(found[-1], _Affine):
            found.append(_Affine(np.ones(channels, np.float32), np.zeros(channels, np.float32)))
        last = found[-1]
        assert isinstance(last, _Affine)
        if stage.kind == "Mul":
            last.scale, last.shift = last.scale * vector, last.shift * vector
        else:
            last.shift = last.shift + vector
    kinds = [type(part) for part in found]
    return found if kinds.count(_Affine) <= 1 and kinds.count(TensorView) <= 1 else None


def _gate(b: Builder, value: Value, x: TensorView) -> TensorView | None:
    """The view of a factor per image and channel, if the kernel can read eight factors at once; else None."""
    shape = b.graph.type(value).static_shape
    n, c = x.shape[:2]
    if shape != (n, c) + (1,) * (len(shape) - 2) or b.graph.type(value).dtype != x.dtype or c % CHANNEL_ALIGN:
        return None
    at = b.operand(value)
    pitch = at.strides[0] if n > 1 else c
    if at.strides[1] != 1 or pitch % CHANNEL_ALIGN or at.offset % CHANNEL_ALIGN:
        return None
    return at.view((n, c, 1, 1), (pitch, 1, 0, 0))
