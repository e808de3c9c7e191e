"""The one approximation: an fp32 network computed in fp16 or bf16, with casts at its borders alone.

Uniform: every fp32 value becomes 16 bits wide, whatever op makes it. Constants are rounded once (a finite one never becomes
infinite: masks of -1e9 or -3.4e38 saturate). What a kernel reads as a parameter in fp32 anyway stays so: biases of convolutions,
statistics of batch normalization, the scales of a Resize. Sums, statistics and exponentials are fp32 inside of the kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np

from optdnn.errors import ShapeError
from optdnn.ir.graph import Graph, Op, Output, Value, infer
from optdnn.ops.base import Attrs, Stage
from optdnn.ops.binary import CastAttrs
from optdnn.passes.base import Fired, Pass, PassContext, PassReport, Refused, node_names
from optdnn.types import BF16, FP16, FP32, Array, DType

NARROW: Mapping[str, DType] = {"fp16": FP16, "bf16": BF16}

LARGEST: Mapping[DType, float] = {FP16: 65504.0, BF16: 3.3895313892515355e38}
"""Largest finite value."""

KEEPS_FP32: Mapping[str, frozenset[int]] = {
    "Resize": frozenset({1, 2}),
    "Conv": frozenset({2}),
    "ConvTranspose": frozenset({2}),
    "BatchNormalization": frozenset({1, 2, 3, 4}),
}
"""Kind -> operand slots whose fp32 constants stay fp32."""


class AssignPrecision(Pass):
    """Does nothing unless the target is a GPU and the precision asked for is a 16-bit one."""

    name = "assign_precision"

    def run(self, graph: Graph, context: PassContext, report: PassReport) -> None:
        dtype = NARROW.get(context.precision)
        if dtype is None or not context.target.startswith("cuda"):
            return
        _Assignment(graph, dtype, report).run()


class _Assignment:
    def __init__(self, graph: Graph, dtype: DType, report: PassReport):
        self.graph, self.dtype, self.report = graph, dtype, report
        self.narrowed: dict[Value, Value] = {}
        """An fp32 constant or input -> the 16-bit value made of it."""

    def run(self) -> None:
        for op in self.graph.order():
            if op.kind in ("Input", "Constant"):
                continue
            if op.kind == "Output":
                self._output(op)
            else:
                self._op(op)
        self.graph.remove_dead([op.id for op in self.graph.order() if op.kind == "Constant"])

    def _output(self, op: Op) -> None:
        value = op.inputs[0]
        assert value is not None
        wanted = op.outputs[0].type
        if self.graph.type(value).dtype == wanted.dtype:
            return
        made = self._cast(value, wanted.dtype, self.graph.op(value).src)
        self.graph.set_op(replace(op, inputs=(made,)))

    def _op(self, op: Op) -> None:
        if op.kind == "Cast" and self._at_the_border(op):
            return
        keep = KEEPS_FP32.get(op.kind, frozenset({0}) if op.kind == "Cast" else frozenset())
        inputs = tuple(
            v if v is None or (i in keep and self._may_stay(op, v)) else self._narrow(v)
            for i, v in enumerate(op.inputs)
        )
        attrs = _retyped(op.attrs, self.dtype)
        types = [None if v is None else self.graph.type(v) for v in inputs]
        values = [self.graph.known(v) for v in inputs]
        try:
            found = infer(op.kind, attrs, types, values, len(op.outputs), self.graph.fresh_symbol)
        except ShapeError as error:
            self._stay(op, error.message)
            return
        outputs = tuple(
            Output(o.name, o.type.with_dtype(t.dtype), o.known) for o, t in zip(op.outputs, found.types, strict=False)
        )
        self.graph.set_op(replace(op, inputs=inputs, attrs=attrs, outputs=outputs))
        for port, out in enumerate(outputs):
            if out.type.dtype == FP32:
                self._convert_after(Value(op.id, port), op)

    def _may_stay(self, op: Op, value: Value) -> bool:
        """A constant parameter; or what a cast reads, which may have any type."""
        return op.kind == "Cast" or self.graph.constant_value(value) is not None

    def _at_the_border(self, op: Op) -> bool:
        """A cast that already is what this pass would make: of an input to 16 bits, or to the type of outputs."""
        users = self.graph.users(op.value)
        return bool(users) and op.outputs[0].type.dtype == FP32 and all(
            u.kind == "Output" and u.outputs[0].type.dtype == FP32 for u in users)  # fmt: skip

    def _stay(self, op: Op, reason: str) -> None:
        """The op has no 16-bit form: its operands are cast back to what they were."""
        self.report.refused.append(Refused("narrow", node_names([op]), f"{op.kind} stays fp32: {reason}"))
        inputs = []
        for v in op.inputs:
            narrow = v is not None and self.graph.type(v).dtype == self.dtype
            inputs.append(self._cast(v, FP32, op.src) if narrow and v is not None else v)
        self.graph.set_op(replace(op, inputs=tuple(inputs)))
        for port, out in enumerate(op.outputs):
            if out.type.dtype == FP32:
                self._convert_after(Value(op.id, port), op)

    def _convert_after(self, value: Value, op: Op) -> None:
        uses = self.graph.uses(value)
        if uses:
            made = self._cast(value, self.dtype, op.src)
            for use in uses:
                user = self.graph.op(use.op)
                self.graph.set_op(
                    replace(user, inputs=tuple(made if i == use.slot else v for i, v in enumerate(user.inputs)))
                )

    def _narrow(self, value: Value) -> Value:
        if self.graph.type(value).dtype != FP32:
            return value
        if value not in self.narrowed:
            array, op = self.graph.constant_value(value), self.graph.op(value)
            if array is not None:
                self.narrowed[value] = self.graph.add_constant(self._rounded(array, op), op.outputs[0].name, op.src)
            else:
                self.narrowed[value] = self._cast(value, self.dtype, self.graph.users(value)[0].src)
        return self.narrowed[value]

    def _rounded(self, array: Array, op: Op) -> Array:
        top = np.float32(LARGEST[self.dtype])
        beyond = np.isfinite(array) & (np.abs(array) > top)
        if beyond.any():
            nodes = tuple(sorted(op.src)) or (op.outputs[0].name,)
            self.report.fired.append(Fired("saturate", nodes))
        return np.where(beyond, np.copysign(top, array), array).astype(self.dtype)

    def _cast(self, value: Value, dtype: DType, src: frozenset[str]) -> Value:
        name = self.graph.output(value).name
        self.report.fired.append(Fired("cast", tuple(sorted(src)) or (name,)))
        return self.graph.add("Cast", [value], CastAttrs(dtype), names=[f"{name}.{dtype.name}"], src=src).value


def _retyped(attrs: Any, dtype: DType) -> Any:
    """Attributes with casts to fp32 turned into casts to ``dtype``, in fused stages too."""
    if not is_dataclass(attrs) or not isinstance(attrs, Attrs):
        return attrs
    changes: dict[str, Any] = {}
    for f in fields(attrs):
        value = getattr(attrs, f.name)
        if isinstance(attrs, CastAttrs) and isinstance(value, np.dtype) and value == FP32:
            changes[f.name] = dtype
        elif isinstance(value, tuple) and value and isinstance(value[0], Stage):
            changes[f.name] = tuple(replace(s, attrs=_retyped(s.attrs, dtype)) for s in value)
    return replace(attrs, **changes) if changes else attrs
