"""Operators after the rounding of a product's result run in the product's launch as well, with the rounding in between.

ONNX Runtime quantizes operator by operator: the result of a convolution is rounded before its activation, or before the addition
of a shortcut, whose result is rounded again. In registers, a rounding is a multiplication, a rounding to integers, bounds, and
the multiplication by the scale. Reshapes in between do not matter: stages compute each element by itself. A Pointwise may be
several of these operators.

SiLU and hard swish are two operators to it: ``y * sigmoid(y)``, with a rounding of the sigmoid. Both are one stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from optdnn.ir.epilogue import Epilogue, absorb_unary, channel_vector
from optdnn.ir.graph import Graph, Op, Value
from optdnn.ops import requantize
from optdnn.ops.base import Stage
from optdnn.ops.requantize import QuantParams
from optdnn.passes.support.facts import RESHAPES, operand
from optdnn.passes.support.paths import path_from
from optdnn.passes.support.quantized_values import dequantized, quant_params, quantization
from optdnn.runtime.cuda.compile import render
from optdnn.types import Array, is_float

INTEGERS = ("int8", "uint8")


@dataclass(frozen=True)
class Rounded:
    """The QuantizeLinear of a result, and the rendered stages before it. ``residual``: the tensor that a stage adds, with its
    parameters. ``ops``: the operators that the stages cover. ``numbers``: what a stage adds to each column, or multiplies it by."""

    store: Op
    params: QuantParams
    stages: tuple[render.Stage, ...] = ()
    residual: tuple[Value, QuantParams] | None = None
    ops: tuple[Op, ...] = ()
    numbers: Array | None = None

    @classmethod
    def with_scales(
        cls, store: Op, params: QuantParams, scales: Array, before: Sequence[render.Stage], numbers: Array | None
    ) -> tuple[Rounded | None, Array | None]:
        """The rounding with a scale per channel (``params``: of the result divided by them). Stages that a positive factor passes
        through leave the scales to the product's own factors, which are returned; after others, a stage divides by them. None if
        a stage ``before`` it already reads a number of each channel."""
        if {str(stage[0]) for stage in before} <= {"bias", "relu", "leaky_relu", "prelu", "mul_const"}:
            return cls(store, params), scales
        if numbers is not None:
            return None, None
        return cls(store, params, (("channel_mul",),), numbers=(1.0 / scales).astype(np.float32)), None


def longest(
    graph: Graph, store: Op, params: QuantParams, *, adds: bool, before: Sequence[render.Stage] = (), columns: int = 0
) -> Rounded:
    """The last rounding that the launch of a product can reach from that of its result. ``adds``: whether it may add a tensor.
    ``columns``: the columns of a product of rows, to each of which one stage may add a number (0: no stage may).

    ``before``: the product's stages so far. Kernels hold a fixed number of constants; the stages end where they would need more."""
    found = Rounded(store, params)
    while (more := _further(graph, found, adds and found.residual is None, columns)) is not None:
        if _constants(before, more) > requantize.MAX_CONSTANTS:
            break
        found = more
    return found


def _constants(before: Sequence[render.Stage], result: Rounded) -> int:
    """The constants of all stages. The last one multiplies by the reciprocal of the result's scale."""
    return len(render.constants_of([*before, *result.stages])) + (result.params.scale != 1.0)


def _further(graph: Graph, found: Rounded, adds: bool, columns: int) -> Rounded | None:
    """The next rounding after activations, and an addition if ``adds``; None if there is none."""
    views, before = _views_after(graph, found.store.value)
    if before is None or before.kind != "DequantizeLinear":
        return None
    given = quant_params(graph, before, operand(before))
    if given is None or given.dtype not in INTEGERS:
        return None
    low, high = (float(b - given.zero) for b in requantize.BOUNDS[given.dtype])
    rounding: list[render.Stage] = [
        ("mul_const", 1.0 / given.scale),
        ("round",),
        ("clip", low, high),
        ("mul_const", given.scale),
    ]
    more = _Stages(graph, [*found.stages, *rounding], adds, columns, found.residual, found.numbers)
    value, ops = before.value, [*found.ops, found.store, *views, before]
    while True:
        store = quantization(graph, value)
        if store is not None:
            known = store[1].dtype in INTEGERS
            return Rounded(*store, tuple(more.rendered), more.residual, tuple(ops), more.numbers) if known else None
        views, user = _views_after(graph, value)
        if views:
            value = views[-1].value
            ops += views
            continue
        gated = _gated(graph, value) if user is None else None
        if gated is not None:
            more.rendered.append(gated.stage)
            ops += gated.ops
            value = gated.ops[-1].value
            continue
        chain = None if user is None else _chain(graph, user, value)
        if user is None or chain is None or not all(more.take(user, stage, value) for stage in chain):
            return None
        ops.append(user)
        value = user.value


def _chain(graph: Graph, user: Op, value: Value) -> list[Stage] | None:
    """The stages of a value's only reader: each of the result before it (-1) and other operands. None if they are no chain."""
    if user.outputs[0].type.shape != graph.type(value).shape:
        return None
    slots = tuple(None if v is None else k for k, v in enumerate(user.inputs))
    stages = user.attrs.epilogue if user.kind == "Pointwise" else [Stage(user.kind, slots, user.attrs)]
    chain: list[Stage] = []
    for k, stage in enumerate(stages):
        args = [0 if a == -1 else a for a in stage.args]  # -1 is operand 0
        before = [a == ~k if k else a is not None and a >= 0 and user.inputs[a] == value for a in args]
        others = [a for a, is_before in zip(args, before, strict=True) if not is_before]
        outside = all(a is None or (a >= 0 and user.inputs[a] != value) for a in others)
        if sum(before) != 1 or not outside or not (before[0] or stage.kind == "Add"):
            return None
        chain.append(Stage(stage.kind, (-1, *others), stage.attrs))
    return chain


@dataclass
class _Stages:
    """The rendered stages of a product so far, and what they read."""

    graph: Graph
    rendered: list[render.Stage]
    adds: bool
    columns: int
    residual: tuple[Value, QuantParams] | None
    numbers: Array | None

    def take(self, user: Op, stage: Stage, value: Value) -> bool:
        """Append a stage of ``user``, which reads ``value``; False if kernels cannot run it."""
        attrs: Any = stage.attrs
        if stage.kind == "Cast" and is_float(attrs.to):
            return True
        if stage.kind != "Add":
            into = Epilogue()
            taken = absorb_unary(self.graph, user, stage, into)
            self.rendered += into.rendered
            return taken
        other = user.inputs[stage.args[1] or 0]
        more = _added_numbers(self.graph, value, other, self.columns) if self.numbers is None else None
        if more is not None:
            self.numbers = more
            self.rendered.append(("channel_add",))
            return True
        found = dequantized(self.graph, other) if self.adds and self.residual is None else None
        if found is None or found[1].dtype not in INTEGERS:
            return False
        self.residual = found
        self.rendered.append(("add",))
        return self.graph.type(found[0]).shape == self.graph.type(value).shape


def _added_numbers(graph: Graph, value: Value, other: Value | None, columns: int) -> Array | None:
    """The constant number that the addition of ``other`` adds to each column of ``value``, in fp32; None for other operands."""
    shape = graph.type(value).static_shape
    if other is None or not columns or shape[-1:] != (columns,):
        return None
    array = graph.constant_value(other)
    if array is None and (stored := dequantized(graph, other)) is not None:
        integers = graph.constant_value(stored[0])
        array = (
            None if integers is None else (integers.astype(np.float32) - stored[1].zero) * np.float32(stored[1].scale)
        )
    return None if array is None or array.size == 1 else channel_vector(array, shape, -1)


@dataclass(frozen=True)
class _Gated:
    """The rendered stage of ``y * round(gate(y))``, and its operators; the last one multiplies."""

    stage: render.Stage
    ops: tuple[Op, ...]


def _gated(graph: Graph, value: Value) -> _Gated | None:
    """The multiplication of a value by its own rounded sigmoid or hard sigmoid, if nothing else reads either of them."""
    users = graph.users(value)
    gate = next((user for user in users if _gate_stage(user) is not None), None)
    stored = None if gate is None else quantization(graph, gate.value)
    back = None if stored is None else graph.sole_user(stored[0].value)
    if gate is None or stored is None or back is None or back.kind != "DequantizeLinear":
        return None
    given, product = quant_params(graph, back, operand(back)), graph.sole_user(back.value)
    if product is None or product.kind != "Mul" or {u.id for u in users} != {gate.id, product.id}:
        return None
    if given is None or given.dtype not in INTEGERS or set(product.inputs) != {value, back.value}:
        return None
    most = float(
        requantize.BOUNDS[given.dtype][1] - given.zero
    )  # the lower bound is never reached: gates are not negative
    return _Gated((str(_gate_stage(gate)), 1.0 / given.scale, most, given.scale), (gate, stored[0], back, product))


def _gate_stage(op: Op) -> str | None:
    """The stage that multiplies a value by the rounded result of ``op``; None for operators without one."""
    if op.kind == "HardSigmoid" and abs(op.attrs.alpha - 1 / 6) < 1e-6 and op.attrs.beta == 0.5:
        return "rounded_hard_swish"
    return "rounded_silu" if op.kind == "Sigmoid" else None


def _views_after(graph: Graph, value: Value) -> tuple[list[Op], Op | None]:
    """The chain of Reshapes that read a value, each the only reader of its operand, and the only reader of the last one."""
    views = path_from(graph, value, RESHAPES)
    return views, graph.sole_user(views[-1].value if views else value)
