"""Fused pointwise stages: inference, plain form, cost and export; and the kind Pointwise, a chain (or small DAG) of them.

Every fusible kind (Conv, Gemm, MatMul, …) holds stages in its attributes (see :class:`optdnn.ops.base.FusedAttrs`) and uses the
helpers here. A stage has the meaning of its own kind, so no stage is defined twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from optdnn.dim import INF, Dim, DimLike
from optdnn.errors import InternalError, ShapeError
from optdnn.ops import binary, create, unary
from optdnn.ops.base import (
    STAGE_FIELDS,
    Attrs,
    Body,
    Call,
    Cost,
    FusedAttrs,
    Infer,
    Known,
    NestedAttrs,
    ProductAttrs,
    Result,
    Stage,
    Traits,
    attrs_dict,
)
from optdnn.ops.checks import elements, extent
from optdnn.ops.definition import OpDef
from optdnn.ops.exchange import Export
from optdnn.runtime.reference.arithmetic import products_of
from optdnn.runtime.reference.base import picked
from optdnn.runtime.reference.run import PlainStage
from optdnn.types import TensorType

STAGE_KINDS: Mapping[str, OpDef] = {d.kind: d for d in (*binary.DEFS, *unary.DEFS, *create.DEFS) if d.traits.pointwise}
"""The kinds of stages: the pointwise operators."""


def stage_definition(kind: str) -> OpDef:
    """The definition of a stage's kind. Raises ShapeError for a kind that is not pointwise."""
    if kind not in STAGE_KINDS:
        raise ShapeError(f"{kind} cannot be a fused stage: it is not a pointwise operator")
    return STAGE_KINDS[kind]


def _no_symbols(hint: str, most: DimLike = INF) -> Dim:
    raise InternalError(f"a pointwise stage asks for a new symbol {hint!r}")


def _pick(args: Sequence[int | None], registers: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
    """The values that a stage's ``args`` name: registers (negative), or operands of the op that holds the stage."""
    try:
        return picked(args, registers, operands)
    except IndexError:
        raise ShapeError(
            f"a fused stage reads {tuple(args)}, of {len(registers)} registers and {len(operands)} operands"
        ) from None


def stage_calls(
    stages: Sequence[Stage],
    start: TensorType,
    operands: Sequence[TensorType | None],
    *,
    value: Known | None = None,
    values: Sequence[Known | None] = (),
) -> list[tuple[Call, Result]]:
    """The inference call and result of every stage of a chain that begins with a value of type ``start``.

    ``operands`` are the types of all operand slots of the op that holds the stages. ``value`` and ``values``: the known
    values of the start and of the operands, if any. Raises ShapeError naming the stage that contradicts.
    """
    padded = [*values, *[None] * (len(operands) - len(values))]
    types, known = [start], [value]
    calls: list[tuple[Call, Result]] = []
    for k, stage in enumerate(stages):
        definition = stage_definition(stage.kind)
        in_types = tuple(_pick(stage.args, types, operands))
        call = Call(stage.kind, stage.attrs, in_types, tuple(_pick(stage.args, known, padded)), 1, _no_symbols)
        try:
            result = definition.infer(call)
        except ShapeError as error:
            raise ShapeError(f"fused stage {k} ({stage.kind}): {error.message}") from error
        types.append(result.types[0])
        known.append(result.values[0] if result.values else None)
        calls.append((call, result))
    return calls


def infer_stages(stages: Sequence[Stage], start: TensorType, operands: Sequence[TensorType | None]) -> TensorType:
    """The type that a chain of stages gives to a value of type ``start``; see :func:`stage_calls`."""
    calls = stage_calls(stages, start, operands)
    return calls[-1][1].types[0] if calls else start


def with_stages(infer: Infer) -> Infer:
    """``infer`` for a kind with stages: it sees operand 0 after the prologue, and the epilogue transforms its result.

    Raises ShapeError for a stage that contradicts its operands or changes a shape.
    """

    def run(call: Call) -> Result:
        prologue, epilogue = call.attrs.prologue, call.attrs.epilogue
        own = call
        if prologue:
            given = call.type(0)
            entering = infer_stages(prologue, given, call.types)
            _same_shape(call.kind, "prologue", given, entering)
            own = replace(call, types=(entering, *call.types[1:]))
        result = infer(own)
        if not epilogue:
            return result
        leaving = infer_stages(epilogue, result.types[0], call.types)
        _same_shape(call.kind, "epilogue", result.types[0], leaving)
        return Result((leaving, *result.types[1:]))

    return run


def _same_shape(kind: str, what: str, before: TensorType, after: TensorType) -> None:
    if before.shape != after.shape:
        raise ShapeError(f"the {what} of a {kind} turns {before} into {after}; it must keep the shape")


def fused_flops(call: Call, result: Result) -> float:
    """Arithmetic of the prologue and the epilogue of a fusible kind."""
    prologue, epilogue = call.attrs.prologue, call.attrs.epilogue
    if not prologue and not epilogue:
        return 0.0
    # Stages keep shapes, so the result's shape is the epilogue input's, too.
    before = stages_flops(prologue, call.type(0), call.types)
    return before + stages_flops(epilogue, result.types[0], call.types)


def product_flops(call: Call, result: Result) -> float:
    """Arithmetic of an operator's matrix products; symbolic sizes count by :func:`extent`."""
    shapes = [() if t is None else [extent(d) for d in t.dims] for t in call.types]
    return products_of(call.kind, shapes, [extent(d) for d in result.types[0].dims], attrs_dict(call.attrs))


def product_cost(call: Call, result: Result) -> Cost:
    """Cost of an operator that consists only of matrix products; see :func:`product_flops`."""
    return Cost(product_flops(call, result))


def stages_flops(stages: Sequence[Stage], start: TensorType, operands: Sequence[TensorType | None]) -> float:
    """Arithmetic of a chain of stages; symbolic dimensions count by :func:`elements`."""
    calls = stage_calls(stages, start, operands)
    return sum(flops(STAGE_KINDS[call.kind], call, result) for call, result in calls)


def flops(definition: OpDef, call: Call, result: Result) -> float:
    """Arithmetic of one call by its kind's cost function (without one: one operation per output element)."""
    return definition.cost(call, result).flops if definition.cost else elements(result.types[0])


def plain_attrs(definition: OpDef, attrs: Attrs) -> dict[str, Any]:
    """Attributes in the form of :func:`optdnn.runtime.reference.run.run_kernel`: stages in plain form, and ``arity`` with them."""
    if isinstance(attrs, NestedAttrs):
        return attrs.plain()
    plain = {k: v.plain if isinstance(v, Body) else plain_value(v) for k, v in attrs_dict(attrs).items()}
    if not plain.keys().isdisjoint(("prologue", "epilogue")) and definition.arity is not None:
        plain["arity"] = definition.arity
    if isinstance(attrs, ProductAttrs):
        del plain["factors"]  # the reference rounds nothing
    return plain


def plain_value(value: Any) -> Any:
    """An attribute with its stages (in tuples) in plain form."""
    if isinstance(value, Stage):
        return PlainStage(value.kind, value.args, attrs_dict(value.attrs))
    return tuple(map(plain_value, value)) if isinstance(value, tuple) else value


def plain_stages(stages: Sequence[Stage]) -> tuple[PlainStage, ...]:
    return tuple(map(plain_value, stages))


def typed_attrs(definition: OpDef, plain: Mapping[str, Any]) -> Attrs:
    """The inverse of :func:`plain_attrs`, except for bodies."""
    return definition.attrs.read({k: typed_value(v) for k, v in plain.items()})


def typed_value(value: Any) -> Any:
    """The inverse of :func:`plain_value`."""
    if isinstance(value, PlainStage):
        return Stage(value.kind, tuple(value.args), typed_attrs(stage_definition(value.kind), value.attrs))
    return tuple(map(typed_value, value)) if isinstance(value, tuple) else value


# ---------------------------------------------------------------- export


def export_op(definition: OpDef, attrs: Attrs, inputs: Sequence[str], n_outputs: int, e: Export) -> Sequence[str]:
    """Write one op as ONNX by its definition (``to_onnx``, or a node of the same name with the fields that are set)."""
    if definition.to_onnx is not None:
        return definition.to_onnx(attrs, inputs, n_outputs, e)
    fields: dict[str, Any] = {
        k: int(v) if isinstance(v, bool) else v
        for k, v in attrs_dict(attrs).items()
        if v is not None and k not in STAGE_FIELDS
    }
    return e.node(definition.kind, inputs, n_outputs, **fields)


def export_stages(
    stages: Sequence[Stage], start: str, start_type: TensorType, operands: Sequence[str], e: Export
) -> str:
    """Write a chain of stages as separate ONNX nodes; see :func:`export_registers`. Returns the name of the result."""
    return export_registers(stages, start, start_type, operands, e)[-1]


def export_registers(
    stages: Sequence[Stage], start: str, start_type: TensorType, operands: Sequence[str], e: Export
) -> list[str]:
    """Write stages as separate ONNX nodes.

    ``start`` and ``start_type``: the value that enters; ``operands``: names of the operand slots ("" = absent) of the op that
    holds the stages. Returns the names of all registers, the start first.
    """
    e.declare(start, start_type)
    calls = stage_calls(stages, start_type, [e.type(n) if n else None for n in operands])
    registers = [start]
    for stage, (_, result) in zip(stages, calls, strict=True):
        names = ["" if n is None else n for n in _pick(stage.args, registers, operands)]
        (name,) = export_op(STAGE_KINDS[stage.kind], stage.attrs, names, 1, e)
        e.declare(name, result.types[0])
        registers.append(name)
    return registers


# ---------------------------------------------------------------- the kind Pointwise


@dataclass(frozen=True)
class PointwiseAttrs(FusedAttrs):
    """A fused pointwise DAG: ``epilogue`` is its body; register 0 of the body is operand 0."""


def _infer_pointwise(call: Call) -> Result:
    start = call.type(0)
    calls = stage_calls(call.attrs.epilogue, start, call.types, value=call.value(0), values=call.values)
    last = calls[-1][1] if calls else Result((start,), (call.value(0),))
    return Result(last.types[:1], last.values[:1])


def _cost_pointwise(call: Call, result: Result) -> Cost:
    return Cost(stages_flops(call.attrs.epilogue, call.type(0), call.types))


def _export_pointwise(attrs: Any, inputs: Sequence[str], n_outputs: int, e: Export) -> Sequence[str]:
    return (export_stages(attrs.epilogue, inputs[0], e.type(inputs[0]), inputs, e),)


DEFS: tuple[OpDef, ...] = (
    OpDef(
        "Pointwise",
        _infer_pointwise,
        PointwiseAttrs,
        {},
        _export_pointwise,
        cost=_cost_pointwise,
        traits=Traits(pointwise=True),
        arity=1,
    ),
)
