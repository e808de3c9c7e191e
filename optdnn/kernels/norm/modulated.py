"""The normalization of rows, then a factor and a shift for each image and feature, and the stages after them, in one launch.

Adaptive layer norm has it (DiT), and the residual blocks of diffusion networks. The launch is emitted at the pointwise operator.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from optdnn.ir.epilogue import Epilogue, plan_epilogue
from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.norm_addition import GROUP_NORMS
from optdnn.kernels.builder import Builder, TensorView
from optdnn.kernels.layout.row_places import access, aligned, result_strides, row_pitch
from optdnn.kernels.norm import rows_kernel as rows
from optdnn.kernels.norm.activation import narrows, without_narrowing
from optdnn.kernels.norm.add_norm import NORMS
from optdnn.kernels.norm.norm_add import FollowsNorm
from optdnn.kernels.norm.rows_once import RowsOnce, apart_halves, parameters, placed, row_problem
from optdnn.ops.base import Stage, attrs_dict
from optdnn.ops.fused import PointwiseAttrs, plain_stages
from optdnn.types import FP32

ROW_NORMS = NORMS | {"LpNormalization"}
_ROWS = RowsOnce()
_SLOTS = 3
"""Number of operands of a norm's meaning before the operands of its stages: input, scale and bias."""


@dataclass(frozen=True)
class Modulation:
    """``norm(x) * scale * (factor + plus) + shift``, then the stages of ``rest``, whose register 0 is that result; None: they also
    read others. Without a ``factor`` there is no shift. ``scale``: a constant, only after a norm that has no scale of its own."""

    norm: Op
    factor: Value | None
    plus: float
    shift: Value | None
    rest: tuple[Stage, ...] | None = ()
    scale: Value | None = None


def modulation(graph: Graph, op: Op) -> Modulation | None:
    """The modulation that a pointwise operator applies to a norm of groups without other readers; None if it is not a modulation."""
    value = op.inputs[0]
    norm = None if value is None else graph.op(value)
    if norm is None or value is None or norm.kind not in GROUP_NORMS or value.port or graph.sole_user(value) is None:
        return None
    return _modulated(graph, op, norm, list(op.attrs.epilogue), -1)


def scaled_modulation(graph: Graph, op: Op) -> Modulation | None:
    """The modulation that a pointwise operator applies to a norm of rows. Each part may be absent if other rows are added at the end."""
    value = op.inputs[0]
    norm = None if value is None else graph.op(value)
    if norm is None or value is None or norm.kind not in ROW_NORMS or value.port or graph.sole_user(value) is None:
        return None
    stages = list(op.attrs.epilogue)
    scale = _scale_first(graph, op, stages) if norm.kind == "LpNormalization" else None
    done = int(scale is not None)
    found = _modulated(graph, op, norm, stages[done:], -1 - done)
    if found is None and any(a is not None and a > 0 for s in stages[done:] for a in s.args):
        found = Modulation(norm, None, 0.0, None, _from_register(stages[done:], -1 - done))
    return found if found is None else replace(found, scale=scale)


def _scale_first(graph: Graph, op: Op, stages: Sequence[Stage]) -> Value | None:
    """The constant number or row with which the first stage multiplies, or None."""
    slot = _factor(stages, -1)
    value = None if slot is None else op.inputs[slot]
    array = graph.constant_value(value)
    if array is None or (array.size > 1 and array.size != array.shape[-1]):
        return None
    return value


def _factor(stages: Sequence[Stage], register: int) -> int | None:
    """The slot of the operand with which the first stage multiplies the register, or None."""
    if not stages or stages[0].kind != "Mul" or register not in stages[0].args:
        return None
    return next((a for a in stages[0].args if a is not None and a > 0), None)


def _modulated(graph: Graph, op: Op, norm: Op, stages: list[Stage], normed: int) -> Modulation | None:
    """The modulation by ``stages`` of register ``normed``: the norm's result, scaled."""
    plus, register = 0.0, normed
    factor: int | None = None
    if stages and stages[0].kind == "Add" and all(a is not None and a > 0 for a in stages[0].args):
        numbers = [graph.constant_value(op.inputs[a]) for a in stages[0].args if a is not None]
        known = [k for k, a in enumerate(numbers) if a is not None and a.size == 1]
        if len(known) != 1:
            return None
        plus, factor = float(numbers[known[0]].reshape(-1)[0]), stages[0].args[1 - known[0]]  # type: ignore[union-attr]
        stages, register = stages[1:], register - 1
        if not stages or stages[0].kind != "Mul" or set(stages[0].args) != {normed, register}:
            return None
    else:
        factor = _factor(stages, normed)
    if factor is None:
        return None
    stages, register, shift = stages[1:], register - 1, None
    if stages and stages[0].kind == "Add":
        shift = next((a for a in stages[0].args if a is not None and a > 0), None)
        if shift is not None and set(stages[0].args) == {register, shift} and _is_vector(graph, op, shift):
            stages, register = stages[1:], register - 1
        else:
            shift = None
    rest = _from_register(stages, register)
    return Modulation(norm, _given(op, factor), plus, None if shift is None else _given(op, shift), rest)


def _is_vector(graph: Graph, op: Op, slot: int) -> bool:
    """Whether the operand is smaller than the result: no residual."""
    return graph.type(_given(op, slot)).shape != op.outputs[0].type.shape


def _from_register(stages: Sequence[Stage], register: int) -> tuple[Stage, ...] | None:
    """Stages that read registers from ``register`` on, as stages that read registers from 0 on; None if they also read earlier ones."""
    if any(a is not None and register < a < 1 for s in stages for a in s.args):
        return None
    return tuple(replace(s, args=tuple(a if a is None or a > 0 else a - register - 1 for a in s.args)) for s in stages)


def _given(op: Op, slot: int) -> Value:
    value = op.inputs[slot]
    assert value is not None
    return value


def _epilogue(graph: Graph, op: Op, found: Modulation) -> Epilogue | None:
    """The stages after a modulation as the kernel's epilogue; None if the kernel cannot compute them."""
    if found.rest is None:
        return None
    own, t = found.norm.outputs[0], op.outputs[0].type
    rest = without_narrowing(found.rest, found.norm, op)
    given = replace(
        op, attrs=PointwiseAttrs(epilogue=rest), outputs=(replace(op.outputs[0], type=t.with_dtype(own.type.dtype)),)
    )
    stages = plan_epilogue(graph, given, channel_axis=len(t.dims) - 1, allow_bias=False)
    return None if stages.rest else stages


class ModulatedRows(FollowsNorm):
    """LayerNorm, RMSNorm or L2 norm of rows, then a factor and a shift for each image and feature, then an optional activation and an
    addition of other rows. The result of fp32 rows may be fp16."""

    name = "rows_modulated"

    def refuse(self, b: Builder, op: Op) -> str | None:
        found, t = scaled_modulation(b.graph, op), op.outputs[0].type
        if found is None:
            return "it is not a factor and shift of a norm without other readers"
        norm, vectors = found.norm, [v for v in (found.factor, found.shift) if v is not None]
        if (source := b.graph.op(norm.inputs[0] or norm.value)).kind == "Add":
            return f"the normalization belongs to the launch of {source.name}"
        if b.graph.type(norm.value) not in (t, *([t.with_dtype(FP32)] if narrows(norm, op) else [])):
            return "the normalized rows are repeated"
        if (stages := _epilogue(b.graph, op, found)) is None:
            return "the kernel cannot compute the stages after the factor and shift"
        if (why := _ROWS.refuse_rows(b, norm)) is not None:
            return f"the normalization before it: {why}"
        x, places = b.operand(norm.inputs[0]), b.fixed(op.value)
        if narrows(norm, op) and (why := apart_halves(b, op.value)) is not None:
            return why
        if stages.residual is not None:
            places.append(b.operand(stages.residual))
        if t.layout or not aligned(x) or any(row_pitch(p) is None for p in places):
            return "its rows do not have a constant pitch"
        if any(_pitch(b.operand(v), t.static_shape) is None for v in vectors):
            return "its factor and shift are not one row per image, at multiples of 16 bytes"
        return None if self.configs(b, op) else "its rows do not fit the registers of a block"

    def before(self, graph: Graph, op: Op) -> Op | None:
        found = scaled_modulation(graph, op)
        return None if found is None else found.norm

    @staticmethod
    def _parts(b: Builder, op: Op) -> tuple[Modulation, Epilogue]:
        """The modulation, and the stages after it, of an operator that is not refused."""
        found = scaled_modulation(b.graph, op)
        assert found is not None
        stages = _epilogue(b.graph, op, found)
        assert stages is not None
        return found, stages

    def problem(self, b: Builder, op: Op) -> rows.Problem:
        found, stages = self._parts(b, op)
        shape = op.outputs[0].type.static_shape
        vectors = [None if v is None else _pitch(b.operand(v), shape) for v in (found.factor, found.shift)]
        modulated = rows.Modulated(math.prod(shape[1:-1]), vectors[0] or 0, vectors[1], found.plus)
        own, added = row_problem(found.norm), stages.residual
        whole = replace(
            own, modulated=None if found.factor is None else modulated, scale=own.scale or found.scale is not None, epilogue=tuple(stages.rendered),
            add=added is not None, last=added is not None,
        )  # fmt: skip
        if narrows(found.norm, op):
            whole = replace(whole, narrow="float16", wide=False)
        out = b.result(op.value, None if whole.narrow else result_strides(b, op.value))
        return placed(whole, b.operand(found.norm.inputs[0]), out, None if added is None else b.operand(added))

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        found, stages = self._parts(b, op)
        norm = found.norm
        target = b.target(op.value)
        operands = {"input": b.operand(norm.inputs[0]), "narrow" if narrows(norm, op) else "output": target}
        given = {"factor": found.factor, "shift": found.shift, "addend": stages.residual}
        operands |= {name: b.operand(v) for name, v in given.items() if v is not None}
        own = parameters(b, norm)
        reads = [operands["input"], own.get("scale"), own.get("bias")]
        if (scale := b.graph.constant_value(found.scale)) is not None:
            row = np.broadcast_to(scale.reshape(-1).astype(np.float32), op.outputs[0].type.static_shape[-1:])
            own["scale"] = b.constant(np.ascontiguousarray(row), f"{norm.outputs[0].name}.scale")
        moved = [Stage(s.kind, tuple(_moved(a) for a in s.args), s.attrs) for s in op.attrs.epilogue]
        attrs = {"norm": norm.kind, **attrs_dict(norm.attrs), "epilogue": plain_stages(moved), "arity": _SLOTS}
        made, covers = rows.launch(self.problem(b, op), config, b.gpu), replace(op, src=op.src | norm.src)
        after = [None if v is None else b.operand(v) for v in op.inputs[1:]]
        b.emit(covers, made, operands | own, "ActivatedNorm", attrs, [*reads, *after], [target])


def _moved(slot: int | None) -> int | None:
    """The slot of a pointwise operator's operand ``slot`` in the launch's meaning."""
    return slot if slot is None or slot < 1 else slot + _SLOTS - 1


def _pitch(x: TensorView, shape: Sequence[int]) -> int | None:
    """Elements from an image's row to the next image's row in a tensor (images or 1, 1, …, features); None for other shapes or strides."""
    own = (1,) * (len(shape) - len(x.shape)) + tuple(x.shape)
    strides = (0,) * (len(shape) - len(x.shape)) + tuple(x.strides)
    if (
        len(shape) < 2
        or own[-1] != shape[-1]
        or strides[-1] != 1
        or any(n != 1 for n in own[1:-1])
        or own[0] not in (1, shape[0])
    ):
        return None
    pitch = strides[0] if own[0] > 1 else 0
    return None if pitch % access(x.dtype) or x.offset % access(x.dtype) else pitch
