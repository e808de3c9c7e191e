"""An operator's epilogue, split between its kernel and a pointwise kernel after it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from optdnn.errors import ShapeError
from optdnn.ir.activations import RENDERED
from optdnn.ir.graph import Graph, Op, Value
from optdnn.ops.base import Stage, renumbered
from optdnn.runtime.cuda.compile import render
from optdnn.types import FP32, Array, DType

RESIDUAL = 3
"""Operand slot of the residual tensor in the meaning of kernels that have one (0 to 2: input, weights, bias)."""


@dataclass
class Epilogue:
    """``stages`` run in the kernel (rendered as ``rendered``), ``rest`` in a pointwise kernel after it.

    ``bias`` (fp32, one per channel) is added first, and so is ``row_bias`` (fp32, one per element of the axis before the
    channels), a stage that is not rendered. ``residual`` is the tensor that stages read at slot :data:`RESIDUAL`, and
    ``constants`` are the tensors at the slots after it. ``scale``: per-channel factors and shifts before or after the residual
    (fp32; the rendered stage ``scale_shift``). ``gate``: a computed tensor with a factor per image and channel, at the slot after
    the residual (the rendered stage ``image_scale``). ``rest`` reads the kernel's result as register 0 and ``rest_operands`` by
    slot (slot 0 is the result itself).

    ``numbers``: the per-channel operands of one stage (fp32; :data:`.render.CHANNEL_STAGES`).
    """

    bias: Array | None = None
    row_bias: Array | None = None
    residual: Value | None = None
    scale: tuple[Array, Array] | None = None
    gate: Value | None = None
    numbers: tuple[Array, ...] = ()
    stages: list[Stage] = field(default_factory=list)
    rendered: list[render.Stage] = field(default_factory=list)
    constants: list[Array] = field(default_factory=list)
    rest: list[Stage] = field(default_factory=list)
    rest_operands: list[Value] = field(default_factory=list)

    def added_to(self, bias: Array | None) -> Array | None:
        """The sum of the operator's own bias and the epilogue's bias; either may be absent."""
        if bias is None or self.bias is None:
            return self.bias if bias is None else bias
        return bias + self.bias

    def constant(self, value: Array) -> int:
        """The operand slot of a constant."""
        self.constants.append(value)
        return RESIDUAL + (self.gate is not None) + len(self.constants)

    def dtype(self, before: DType) -> DType:
        """The type of the result of ``stages``, of a product with factors of the type ``before``."""
        casts: list[Any] = [stage.attrs for stage in self.stages if stage.kind == "Cast"]
        return casts[-1].to if casts else before

    def drop_residual(self) -> None:
        """Remove the first stage, the addition of the residual: another kernel adds it."""
        self.residual = None
        self.stages = renumbered(self.stages[1:], -1)
        self.rendered = self.rendered[1:]


def plan_epilogue(
    graph: Graph,
    op: Op,
    *,
    channel_axis: int,
    allow_residual: bool = True,
    accepts: Callable[[Sequence[render.Stage]], bool] = lambda stages: True,
    allow_bias: bool = True,
    allow_scale: bool = False,
    allow_gate: bool = False,
    allow_row_bias: bool = False,
    allow_numbers: bool = False,
    allow_wide: bool = False,
) -> Epilogue:
    """Split the epilogue of a Conv, MatMul or Gemm. ``channel_axis``: the axis of the result that a bias runs along.

    ``accepts`` decides whether the kernel can run these rendered stages in this order. ``allow_scale``, ``allow_gate``,
    ``allow_row_bias``, ``allow_numbers``: whether the kernel supports per-channel factors, computed factors per image, a bias
    along the axis before the channels, and stages with per-channel operands. ``allow_wide``: whether its result may be fp32
    although its factors are 16-bit floats. Casts among the stages then do nothing, since all stages compute in fp32.
    """
    out = op.outputs[0].type
    shape = out.static_shape
    found = Epilogue()
    stages: Sequence[Stage] = op.attrs.epilogue
    last_use: dict[int, int] = {}
    for k, stage in enumerate(stages):
        last_use.update({~a: k for a in stage.args if a is not None and a < 0})
    done = 0
    for k, stage in enumerate(stages):
        others = [a for a in stage.args if a is None or a >= 0]
        own = stage.kind in _OF_CHANNELS and stage.args[0] == ~k
        linear = own or len(others) == len(stage.args) - 1 or (stage.kind == "Mul" and stage.args == (~k, ~k))
        if last_use.get(k) != k or not linear or any(r < k and last_use[r] >= k for r in last_use):
            break
        trial = replace(
            found, stages=[*found.stages], rendered=[*found.rendered], constants=[*found.constants], bias=found.bias
        )
        scaled = allow_scale and _absorb_scale(graph, op, stage, trial, shape, channel_axis)
        scaled = scaled or (allow_gate and _absorb_gate(graph, op, stage, trial))
        begun = allow_row_bias and _absorb_row_bias(graph, op, stage, trial, shape, channel_axis)
        absorb_numbers = _absorb_numbers if own else _absorb_affine
        numbered = allow_numbers and not scaled and absorb_numbers(graph, op, stage, trial, shape, channel_axis)
        own_form = scaled or begun or numbered or (allow_wide and _absorb_cast(graph, op, stage, trial))
        if not own_form and not _absorb(graph, op, stage, trial, shape, channel_axis, allow_residual):
            break
        if not accepts(trial.rendered):
            break
        if trial.bias is not None and not allow_bias:
            break
        found = trial
        done = k + 1
    found.rest, found.rest_operands = _rest(op, stages, done)
    return found


def read_once(op: Op, value: Value) -> bool:
    """Whether one stage of an epilogue reads a value, and no other one does. Stages share the slot of a value."""
    slots = [slot for slot, own in enumerate(op.inputs) if own == value]
    stages: Sequence[Stage] = op.attrs.epilogue
    return sum(stage.args.count(slot) for stage in stages for slot in slots) == 1


def _rest(op: Op, stages: Sequence[Stage], done: int) -> tuple[list[Stage], list[Value]]:
    """The stages after the first ``done``, as stages of the kernel's result, and the values that they read: operands 1, 2, …"""
    slots: dict[Value, int] = {}

    def own(a: int | None) -> int | None:
        if a is None or a < 0:  # register `done` holds the kernel's result; nothing reads earlier ones
            return None if a is None else a + done
        value = op.inputs[a]
        return None if value is None else slots.setdefault(value, len(slots) + 1)

    rest = [replace(stage, args=tuple(own(a) for a in stage.args)) for stage in stages[done:]]
    return rest, list(slots)


def _absorb(
    graph: Graph, op: Op, stage: Stage, into: Epilogue, shape: tuple[int, ...], axis: int, allow_residual: bool
) -> bool:
    """Move the stage into the kernel; False if the kernel cannot run it."""
    if stage.kind in ("Add", "Mul"):
        return _absorb_binary(graph, op, stage, into, -1 - len(into.stages), shape, axis, allow_residual)
    return absorb_unary(graph, op, stage, into)


def summed_dtype(graph: Graph, op: Op) -> DType:
    """The type of a product's factors. The result has this type, too, before a stage that casts it to fp32."""
    casts = any(stage.kind == "Cast" for stage in getattr(op.attrs, "epilogue", ()))
    return op.outputs[0].type.dtype if op.inputs[0] is None or not casts else graph.type(op.inputs[0]).dtype


def _absorb_cast(graph: Graph, op: Op, stage: Stage, into: Epilogue) -> bool:
    """Drop a cast to fp32 or to the type of the factors: stages compute in fp32, and results are rounded when they are stored."""
    attrs: Any = stage.attrs
    if stage.kind != "Cast" or op.inputs[0] is None or attrs.to not in (FP32, graph.type(op.inputs[0]).dtype):
        return False
    into.stages.append(Stage("Cast", (-1 - len(into.stages),), attrs))
    return True


def _constant_vector(
    graph: Graph, op: Op, stage: Stage, shape: tuple[int, ...], axis: int
) -> tuple[Array, Array] | None:
    """The constant operand of a stage, and the same as a vector along the axis; None if it is a scalar, or no such vector."""
    slot = next((a for a in stage.args if a is not None and a >= 0), None)
    array = None if slot is None else graph.constant_value(op.inputs[slot])
    vector = None if array is None or array.size == 1 else channel_vector(array, shape, axis)
    return None if array is None or vector is None else (array, vector)


def _absorb_row_bias(graph: Graph, op: Op, stage: Stage, into: Epilogue, shape: tuple[int, ...], axis: int) -> bool:
    """Move the first stage (apart from casts) into the kernel if it adds a constant to each element of the axis before the
    channels."""
    found = _constant_vector(graph, op, stage, shape, axis - 1) if len(shape) > 1 else None
    if found is None or stage.kind != "Add" or any(s.kind != "Cast" for s in into.stages):
        return False
    into.row_bias = found[1]
    into.stages.append(Stage("Add", (-1 - len(into.stages), into.constant(found[0]))))
    return True


def _absorb_scale(graph: Graph, op: Op, stage: Stage, into: Epilogue, shape: tuple[int, ...], axis: int) -> bool:
    """Move a per-channel factor directly before or after the residual, or the shift after the factor, into the kernel.

    Pre-activation networks have a factor after the residual, and ResMLP's products along tokens have one before it.
    """
    found = _constant_vector(graph, op, stage, shape, axis)
    if found is None:
        return False
    array, vector = found
    if stage.kind == "Mul" and into.rendered in ([], [("add",)]):
        into.scale = (vector, np.zeros_like(vector))
        into.rendered.append(("scale_shift",))
    elif stage.kind == "Add" and into.scale is not None and _scaled_last(into):
        into.scale = (into.scale[0], vector)
    else:
        return False
    operand = _column(vector, shape, axis) if op.kind == "Conv" else array
    into.stages.append(Stage(stage.kind, (-1 - len(into.stages), into.constant(operand))))
    return True


def images_of(gate: Sequence[int], shape: Sequence[int]) -> int:
    """The number of images of a result of ``shape``, if a tensor of shape ``gate`` has one factor for each image and channel;
    else 0. Channels are the last axis, and images are along the leading axes."""
    full = (*(1,) * (len(shape) - len(gate)), *gate)
    first = next((k for k, size in enumerate(shape) if full[k] != size), len(shape))
    rows = full[first:-1]
    return math.prod(shape[:first]) if rows and set(rows) == {1} and full[-1] == shape[-1] else 0


def _absorb_gate(graph: Graph, op: Op, stage: Stage, into: Epilogue) -> bool:
    """Move a computed factor per image and channel directly before or after the residual into the kernel.

    Transformers for diffusion have one after each attention and perceptron: ``x + gate * f(x)``.
    """
    out, value = op.outputs[0].type, next((op.inputs[a] for a in stage.args if a is not None and a >= 0), None)
    plain = stage.kind == "Mul" and into.rendered in ([], [("add",)]) and not into.constants
    if value is None or not plain or graph.constant_value(value) is not None:
        return False
    given = graph.type(value)
    if given.dtype != out.dtype or not given.is_static or not images_of(given.static_shape, out.static_shape):
        return False
    into.gate = value
    into.stages.append(Stage("Mul", (-1 - len(into.stages), RESIDUAL + 1)))
    into.rendered.append(render.IMAGE_SCALE)
    return True


def _column(vector: Array, shape: tuple[int, ...], axis: int) -> Array:
    """Per-channel values as an operand of a launch's stages, whose meaning has images: a line is an image of one row."""
    behind = len(shape) - 1 - axis % len(shape)
    return vector.reshape(-1, *(1,) * (max(behind, 2) if behind else 0))


AFFINE = "affine"
"""The rendered stage of a per-channel factor and shift after other stages."""
_OF_CHANNELS = {"PRelu": "prelu", "Snake": "snake"}
"""Kind -> the stage that reads its constant operands as per-channel values."""


def _absorb_numbers(graph: Graph, op: Op, stage: Stage, into: Epilogue, shape: tuple[int, ...], axis: int) -> bool:
    """Move a stage with per-channel operands into the kernel."""
    if into.numbers or into.scale is not None:
        return False
    vectors: list[Array] = []
    for slot in stage.args[1:]:
        array = graph.constant_value(op.inputs[slot]) if slot is not None and slot >= 0 else None
        vector = None if array is None else channel_vector(array, shape, axis)
        if vector is None:
            return False
        vectors.append(vector)
    into.numbers = tuple(vectors)
    slots = [into.constant(_column(v, shape, axis)) for v in vectors]
    into.stages.append(Stage(stage.kind, (-1 - len(into.stages), *slots), stage.attrs))
    into.rendered.append((_OF_CHANNELS[stage.kind],))
    return True


def _absorb_affine(graph: Graph, op: Op, stage: Stage, into: Epilogue, shape: tuple[int, ...], axis: int) -> bool:
    """Move a per-channel factor after other stages, a shift, or the shift after that factor into the kernel.

    Networks that normalize the result of an activation (ECAPA-TDNN, and many Keras networks) have both after it.
    """
    found = _constant_vector(graph, op, stage, shape, axis)
    if found is None or stage.kind not in ("Add", "Mul") or into.scale is not None:
        return False
    vector = found[1]
    if into.numbers:
        if stage.kind == "Mul" or into.rendered[-1] != (AFFINE,) or into.stages[-1].kind != "Mul":
            return False
        into.numbers = (into.numbers[0], vector)
    elif into.rendered:
        factor = vector if stage.kind == "Mul" else np.ones_like(vector)
        into.numbers = (factor, np.zeros_like(vector) if stage.kind == "Mul" else vector)
        into.rendered.append((AFFINE,))
    else:
        return False
    into.stages.append(Stage(stage.kind, (-1 - len(into.stages), into.constant(_column(vector, shape, axis)))))
    return True


def _scaled_last(into: Epilogue) -> bool:
    """Whether the last stage is the per-channel factor."""
    return into.rendered[-1] == ("scale_shift",) and into.stages[-1].kind == "Mul"


def absorb_unary(graph: Graph, op: Op, stage: Stage, into: Epilogue) -> bool:
    """Move an activation into the kernel; False if the kernel cannot run it."""
    register = -1 - len(into.stages)
    a: Any = stage.attrs
    match stage.kind:
        case "Clip":
            return _absorb_clip(graph, op, stage, into, register)
        case "Gelu":
            rendered: render.Stage = ("gelu_tanh" if a.approximate == "tanh" else "gelu",)
        case "Swish" if a.alpha == 1.0:
            rendered = ("silu",)
        case kind if kind in RENDERED:
            function, *arguments = RENDERED[kind]
            rendered = (function, *(getattr(a, name) for name in arguments))
        case _:
            return False
    return _add(into, Stage(stage.kind, (register,), a), rendered)


def _add(into: Epilogue, stage: Stage, rendered: render.Stage) -> bool:
    """Append a stage; False if a number of it is NaN, which comparisons of kernels ignore."""
    if any(isinstance(number, float) and np.isnan(number) for number in rendered[1:]):
        return False
    into.stages.append(stage)
    into.rendered.append(rendered)
    return True


def _absorb_clip(graph: Graph, op: Op, stage: Stage, into: Epilogue, register: int) -> bool:
    bounds: list[float] = []
    for i, default in ((1, -np.inf), (2, np.inf)):
        slot = stage.args[i] if i < len(stage.args) else None
        if slot is None:
            bounds.append(default)
            continue
        array = graph.constant_value(op.inputs[slot]) if slot >= 0 else None
        if array is None or array.size != 1:
            return False
        bounds.append(float(array.reshape(-1)[0]))
    if np.isnan(bounds).any():
        return False
    low, high = (into.constant(np.array(v, np.float32)) for v in bounds)
    return _add(into, Stage("Clip", (register, low, high), stage.attrs), ("clip", *bounds))


def _absorb_binary(
    graph: Graph,
    op: Op,
    stage: Stage,
    into: Epilogue,
    register: int,
    shape: tuple[int, ...],
    axis: int,
    allow_residual: bool,
) -> bool:
    slot = next((a for a in stage.args if a is not None and a >= 0), None)
    if slot is None and stage.kind == "Mul":
        return _add(into, Stage("Mul", (register, register)), ("square",))
    value = op.inputs[slot] if slot is not None else None
    if value is None:
        return False
    array = graph.constant_value(value)
    if array is not None:
        if stage.kind == "Add" and not into.rendered:
            vector = channel_vector(array, shape, axis)
            if vector is not None:
                into.bias = vector if into.bias is None else into.bias + vector
                return True
        if array.size == 1:
            number = float(array.reshape(-1)[0])
            at = into.constant(np.array(number, np.float32))
            return _add(
                into, Stage(stage.kind, (register, at)), ("add_const" if stage.kind == "Add" else "mul_const", number)
            )
        if op.kind != "Conv" and any(user.kind.endswith("Normalization") for user in graph.users(op.value)):
            return False  # constant rows: the norm adds them as well
    same = graph.type(value).static_shape == shape and graph.type(value).dtype == op.outputs[0].type.dtype
    if not same or into.residual is not None or not allow_residual:
        return False
    into.residual = value
    return _add(into, Stage(stage.kind, (register, RESIDUAL)), ("add" if stage.kind == "Add" else "mul",))


def channel_vector(array: Array, shape: Sequence[int], axis: int) -> Array | None:
    """A constant that broadcasts along every axis except the channels, as an fp32 vector; None if it does not, or if there is no
    such axis."""
    lead = len(shape) - array.ndim
    if lead < 0 or not -len(shape) <= axis < len(shape):
        return None
    full = (1,) * lead + array.shape
    if any(n != 1 for i, n in enumerate(full) if i != axis % len(shape)):
        return None
    try:
        return np.broadcast_to(array.astype(np.float32).reshape(-1), (shape[axis],)).copy()
    except ValueError as error:
        raise ShapeError(f"a bias of {array.shape} does not fit {tuple(shape)}") from error
