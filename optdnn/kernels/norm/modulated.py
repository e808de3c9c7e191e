"""The normalization of rows, then a factor and a shift for each image and feature, in one launch (adaptive layer norm: DiT).

The launch is emitted at the pointwise operator.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from typing import Any

from optdnn.ir.graph import Graph, Op, Value
from optdnn.kernels.builder import Builder, TensorView
from optdnn.kernels.layout.row_places import access, aligned, result_strides, row_pitch
from optdnn.kernels.norm import rows_kernel as rows
from optdnn.kernels.norm.add_norm import NORMS
from optdnn.kernels.norm.norm_add import FollowsNorm
from optdnn.kernels.norm.rows_once import RowsOnce, emit_norm, placed, row_problem
from optdnn.ops.base import Stage, attrs_dict
from optdnn.ops.fused import plain_stages

_ROWS = RowsOnce()
_SLOTS = 3
"""Number of operands of a norm's meaning before the operands of its stages: input, scale and bias."""


@dataclass(frozen=True)
class Modulation:
    """``norm(x) * (factor + plus) + shift``, then the stages of ``rest``, whose register 0 is that result; None: they also read others."""

    norm: Op
    factor: Value
    plus: float
    shift: Value | None
    rest: tuple[Stage, ...] | None = ()


def modulation(graph: Graph, op: Op, norms: Container[str] = NORMS) -> Modulation | None:
    """The modulation that a pointwise operator applies to a norm (of a kind in ``norms``) without other readers; None if it is not
    a modulation."""
    value = op.inputs[0]
    norm = None if value is None else graph.op(value)
    if norm is None or value is None or norm.kind not in norms or value.port or graph.sole_user(value) is None:
        return None
    stages, plus, register = list(op.attrs.epilogue), 0.0, -1
    factor: int | None = None
    if stages and stages[0].kind == "Add" and all(a is not None and a > 0 for a in stages[0].args):
        numbers = [graph.constant_value(op.inputs[a]) for a in stages[0].args if a is not None]
        known = [k for k, a in enumerate(numbers) if a is not None and a.size == 1]
        if len(known) != 1:
            return None
        plus, factor = float(numbers[known[0]].reshape(-1)[0]), stages[0].args[1 - known[0]]  # type: ignore[union-attr]
        stages, register = stages[1:], -2
        if not stages or stages[0].kind != "Mul" or set(stages[0].args) != {-1, register}:
            return None
    elif stages and stages[0].kind == "Mul":
        factor = next((a for a in stages[0].args if a is not None and a > 0), None)
    if factor is None:
        return None
    stages, register, shift = stages[1:], register - 1, None
    if stages and stages[0].kind == "Add":
        shift = next((a for a in stages[0].args if a is not None and a > 0), None)
        if shift is not None and set(stages[0].args) == {register, shift}:
            stages, register = stages[1:], register - 1
        else:
            shift = None
    rest = _from_register(stages, register)
    return Modulation(norm, _given(op, factor), plus, None if shift is None else _given(op, shift), rest)


def _from_register(stages: Sequence[Stage], register: int) -> tuple[Stage, ...] | None:
    """Stages that read registers from ``register`` on, as stages that read registers from 0 on; None if they also read earlier ones."""
    if any(a is not None and register < a < 1 for s in stages for a in s.args):
        return None
    return tuple(replace(s, args=tuple(a if a is None or a > 0 else a - register - 1 for a in s.args)) for s in stages)


def _given(op: Op, slot: int) -> Value:
    value = op.inputs[slot]
    assert value is not None
    return value


class ModulatedRows(FollowsNorm):
    """LayerNorm or RMSNorm of rows, then a factor and a shift for each image and feature."""

    name = "rows_modulated"

    def refuse(self, b: Builder, op: Op) -> str | None:
        found, t = modulation(b.graph, op), op.outputs[0].type
        if found is None or found.rest != ():
            return "it is not a factor and shift of a norm without other readers"
        norm, vectors = found.norm, [found.factor, *([] if found.shift is None else [found.shift])]
        if (source := b.graph.op(norm.inputs[0] or norm.value)).kind == "Add":
            return f"the normalization belongs to the launch of {source.name}"
        if b.graph.type(norm.value) != t:
            return "the normalized rows are repeated"
        if (why := _ROWS.refuse_rows(b, norm)) is not None:
            return f"the normalization before it: {why}"
        x, places = b.operand(norm.inputs[0]), [b.reserved[v] for v in [op.value] if v in b.reserved]
        if t.layout or not aligned(x) or any(row_pitch(p) is None for p in places):
            return "its rows do not have a constant pitch"
        if any(_pitch(b.operand(v), t.static_shape) is None for v in vectors):
            return "its factor and shift are not one row per image, at multiples of 16 bytes"
        return None if self.configs(b, op) else "its rows do not fit the registers of a block"

    def before(self, graph: Graph, op: Op) -> Op | None:
        found = modulation(graph, op)
        return None if found is None else found.norm

    def problem(self, b: Builder, op: Op) -> rows.Problem:
        found = modulation(b.graph, op)
        assert found is not None
        shape = op.outputs[0].type.static_shape
        vectors = [None if v is None else _pitch(b.operand(v), shape) for v in (found.factor, found.shift)]
        modulated = rows.Modulated(math.prod(shape[1:-1]), vectors[0] or 0, vectors[1], found.plus)
        out = b.result(op.value, result_strides(b, op.value))
        return placed(replace(row_problem(found.norm), modulated=modulated), b.operand(found.norm.inputs[0]), out)

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        found = modulation(b.graph, op)
        assert found is not None
        norm = found.norm
        operands = {"input": b.operand(norm.inputs[0]), "output": b.target(op.value), "factor": b.operand(found.factor)}
        if found.shift is not None:
            operands["shift"] = b.operand(found.shift)
        stages = [Stage(s.kind, tuple(_moved(a) for a in s.args), s.attrs) for s in op.attrs.epilogue]
        attrs = {"norm": norm.kind, **attrs_dict(norm.attrs), "epilogue": plain_stages(stages), "arity": _SLOTS}
        made, covers = rows.launch(self.problem(b, op), config, b.gpu), replace(op, src=op.src | norm.src)
        emit_norm(
            b,
            covers,
            norm,
            made,
            operands,
            "ActivatedNorm",
            attrs,
            after=[None if v is None else b.operand(v) for v in op.inputs[1:]],
        )


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
