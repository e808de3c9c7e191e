"""Pointwise ops after a convolution or matrix product become stages of its epilogue.

On GPUs, a product that is subtracted from a tensor changes its sign and is added, and small constant rows are repeated for each
matrix or image: kernels add a tensor of the result's shape. A tensor that is divided by the result is multiplied by its reciprocal
(GDN: Ballé et al., 2016): kernels multiply by a tensor.

The result of the anchor (Conv, ConvTranspose, Gemm, MatMul) must be read only by the absorbed op, and the stage must keep
its dtype and shape. No cycle can arise: the other operands of the absorbed op depend on the anchor only through the absorbed op
itself. With ``norms_add``, three kinds of Add are left to the normalization that reads the sum: one vector per image, rows that
repeat (position embeddings), and a second tensor. The normalization's kernel adds them; the anchors' kernels cannot.

At 16 bits, an Add to sampling positions stays separate, because its sum is stored in fp32 and the anchor's result is not. An
example is optical flow, whose positions many layers update.

If both operands of an Add come from anchors that could absorb it, the later anchor does: the one with the longer path from the
inputs, then with the larger id. The other operand is ready by then, and is read like any residual. But an anchor that already reads
a tensor leaves it to the other one: kernels read one tensor. If there is no other one, GPUs leave the second tensor to pointwise
operators: the rest of an epilogue would be a launch of its own, while a pointwise operator takes in what computes the tensor, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from optdnn.ir.epilogue import images_of
from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.norm_addition import NormAddition, norm_addition
from optdnn.ir.patch import Patch
from optdnn.ops.base import Stage
from optdnn.passes.base import Match, Miss, PassContext, Rule, RulePass
from optdnn.passes.support.coordinates import coordinates
from optdnn.passes.support.facts import NORMS, depends_on_inputs, is_pointwise, operand
from optdnn.passes.support.selected_matrices import stays_in_place
from optdnn.passes.support.stages import (
    ACTIVATIONS,
    ADDITIONS,
    ANCHORS,
    SCALINGS,
    Slots,
    reads_tensor,
    refuses,
    with_stages,
)
from optdnn.target_name import TargetName
from optdnn.types import Shape, TensorType

_REPEATED = 1 << 16
"""Most elements of a constant that is repeated for the matrices of a product."""
_CHAIN = 4
"""Most activations and additions between a product and the product that gates it."""
STAGES = ACTIVATIONS | ADDITIONS | SCALINGS
WIDE = frozenset({"fp32", "tf32"})
"""Precisions that store a sum in fp32, without rounding."""


class _Absorb(Rule):
    """Absorbs one op at a time; a chain is absorbed link by link.

    ``depth``: op id -> length of the path from the inputs. ``positions``: op id -> the reason to stay in fp32, for ops that
    compute sampling positions in images."""

    kinds = ANCHORS

    def __init__(
        self, name: str, absorbs: frozenset[str], depth: dict[int, int], norms_add: bool, positions: Mapping[int, str],
        rounded: bool,
    ):  # fmt: skip
        self.name, self.absorbs, self.depth, self.norms_add, self.positions = name, absorbs, depth, norms_add, positions
        self.rounded = rounded

    def match(self, graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
        if self.rounded and not _rounds(graph, op):
            return None
        users = graph.users(op.value)
        user = next((u for u in users if u.kind in self.absorbs), None)
        if user is None:
            return None
        if any(u.kind == "Output" for u in users):
            return Miss(f"the result of {op.name} is an output of the network")
        if len(users) > 1:
            return Miss(f"the result of {op.name} is used by {len(users)} ops")
        miss = refuses(graph, user, op.value)
        if miss is not None:
            return miss
        if op.kind == "MatMul" and stays_in_place(graph, op, context):
            return Miss("the launch that reads a matrix for each row in place has no epilogue")
        if self.norms_add and (norm := _norm_that_adds(graph, user, op.value, reads_tensor(graph, op))) is not None:
            return Miss(f"the normalization {norm.name} adds {user.name} itself")
        if context.on_gpu and _is_full(graph, op, user):
            return Miss(f"{op.name} reads a tensor already, and its kernel cannot read that of {user.name}, too")
        if context.on_gpu and "16" in context.precision and _is_unread(graph, op, user):
            return Miss(
                f"kernels of 16-bit products read no tensor like that of {user.name}, and pointwise operators do"
            )
        if context.on_gpu and (reader := _joins(graph, op, user)) is not None:
            return Miss(f"the pointwise launch of {reader.name} computes {user.name} and the tensor that it reads")
        if user.id in self.positions and _adds_positions(graph, user, op.value):
            return Miss(f"{self.positions[user.id]}, in fp32")
        if any(self._order(graph, rival) > self._order(graph, op) for rival in self._rivals(graph, op, user)):
            return None

        def build(patch: Patch) -> Value:
            slots, register, on_gpu = Slots(op), len(op.attrs.epilogue), TargetName.parse(context.target).on_gpu
            given = {v: _repeated(patch, v, user.outputs[0].type) for v in user.inputs if v is not None and on_gpu}
            read = replace(user, inputs=tuple(given.get(v, v) if v is not None else v for v in user.inputs))
            if on_gpu and _subtracts(graph, user, op.value):
                less = slots.slot(patch.constant(np.array(-1, user.outputs[0].type.dtype), "less"))
                added = slots.slot(operand(read))
                stages = [Stage("Mul", (~register, less)), Stage("Add", (~(register + 1), added))]
            elif on_gpu and _divides(graph, user, op.value):
                stages = [Stage("Reciprocal", (~register,)), Stage("Mul", (~(register + 1), slots.slot(operand(read))))]
            else:
                stages = [slots.stage(read, op.value, register)]
            fused = patch.add(op.kind, slots.inputs(), with_stages(op.attrs, epilogue=stages))
            self.depth[fused.op] = max(self.depth.get(op.id, 0), self.depth.get(user.id, 0))
            return fused

        return Match((op, user), build, user.value)

    def _rivals(self, graph: Graph, op: Op, user: Op) -> list[Op]:
        """Other anchors whose epilogue could absorb ``user``."""
        others = [graph.op(v) for v in user.inputs if v is not None and v != op.value]
        return [
            o
            for o in others
            if o.kind in ANCHORS and graph.users(o.value) == [user] and refuses(graph, user, o.value) is None
        ]

    def _order(self, graph: Graph, op: Op) -> tuple[bool, int, int]:
        return not reads_tensor(graph, op), self.depth.get(op.id, 0), op.id


def _rounds(graph: Graph, op: Op) -> bool:
    """Whether an anchor rounds to a grid among its stages, and its weights are known. (Products of attention are left to it.)"""
    rounds = any(stage.kind == "FakeQuantize" for stage in op.attrs.epilogue)
    return rounds and not depends_on_inputs(graph, operand(op, 1))


def _is_full(graph: Graph, op: Op, user: Op) -> bool:
    """Whether an anchor reads a tensor already, and ``user`` reads another one. The other product of a gated unit does not count:
    one launch computes both."""

    def tensors(values: Iterable[Value | None]) -> bool:
        computed = [v for v in values if v is not None and graph.constant_value(v) is None and v != op.value]
        same = [v for v in computed if graph.type(v).shape == op.outputs[0].type.shape]
        return any(not _is_partner(graph, op, v) for v in same)

    return tensors(op.inputs[op.definition.arity or 0 :]) and tensors(user.inputs)


def _is_unread(graph: Graph, op: Op, user: Op) -> bool:
    """Whether ``user`` reads a computed tensor that is smaller than the result, and no factors of each image's channels.

    Factors that products of the same operand share are left to `fuse_siblings`: one launch applies them to all results."""
    out, values = op.outputs[0].type, [v for v in user.inputs if v is not None and v != op.value]
    if not out.is_static or not all(graph.type(v).is_static for v in values):
        return False
    for value in values:
        size = math.prod(graph.type(value).static_shape)
        if graph.constant_value(value) is not None or size == math.prod(out.static_shape):
            continue
        scaled = [u.value for u in graph.users(value) if u.id != user.id and u.kind in {user.kind, op.kind}]
        shared = any(_is_partner(graph, op, one, STAGES) for one in scaled)
        if not shared and not _is_gate(graph, user, value):
            return True
    return False


def _is_gate(graph: Graph, user: Op, value: Value) -> bool:
    """Whether ``user`` multiplies by a factor of each image and channel, for which an epilogue that adds a tensor has room."""
    given, out = graph.type(value), user.outputs[0].type
    static = given.is_static and out.is_static
    return user.kind == "Mul" and static and images_of(given.static_shape, out.static_shape) > 0


def _joins(graph: Graph, op: Op, user: Op) -> Op | None:
    """The pointwise reader of ``user`` that no epilogue of ``op`` takes in, if a pointwise operator computes the tensor that
    ``user`` reads, and only pointwise operators read it. As a stage, ``user`` would need a launch for that tensor."""
    reader = graph.sole_user(user.value)
    if reader is None or not is_pointwise(reader) or not _reads_tensor_beside(graph, reader, user.value):
        return None
    for value in user.inputs:
        if (
            value is None
            or value == op.value
            or graph.constant_value(value) is not None
            or _is_gate(graph, user, value)
        ):
            continue
        if all(is_pointwise(other) for other in (graph.op(value), *graph.users(value))):
            return reader
    return None


def _reads_tensor_beside(graph: Graph, op: Op, value: Value) -> bool:
    """Whether an operator reads another computed tensor of its result's shape than ``value``."""
    others = [v for v in op.inputs if v is not None and v != value and graph.constant_value(v) is None]
    return any(graph.type(v).shape == op.outputs[0].type.shape for v in others)


def _is_partner(graph: Graph, op: Op, value: Value, after: frozenset[str] = ACTIVATIONS | ADDITIONS) -> bool:
    """Whether ``value`` is the result of another anchor with the same input, ``after`` operators of these kinds."""
    for _ in range(_CHAIN):
        other = graph.op(value)
        if other.kind in ANCHORS:
            return other.inputs[0] == op.inputs[0]
        if other.kind not in after:
            return False
        values = [v for v in other.inputs if v is not None and graph.type(v).shape == graph.type(value).shape]
        value = next((v for v in values if graph.op(v).kind in ANCHORS), operand(other))
    return False


def _subtracts(graph: Graph, op: Op, value: Value) -> bool:
    """Whether ``value`` is subtracted from a tensor of its shape or from constant rows: a kernel changes its sign, and adds."""
    other = op.inputs[0]
    if op.kind != "Sub" or other is None or other == value:
        return False
    return graph.type(other).shape == graph.type(value).shape or _are_rows(graph, other, graph.type(value))


def _divides(graph: Graph, op: Op, value: Value) -> bool:
    """Whether a tensor of its shape is divided by ``value``: a kernel multiplies the tensor by the reciprocal."""
    other = op.inputs[0]
    if op.kind != "Div" or other is None or other == value:
        return False
    return graph.type(other).shape == graph.type(value).shape


def _are_rows(graph: Graph, value: Value, of: TensorType) -> bool:
    """Whether a value is a small constant with several rows that are the same for each matrix or image of a tensor."""
    array = graph.constant_value(value)
    if array is None or not of.is_static or math.prod(of.static_shape) > _REPEATED:
        return False
    return sum(n != 1 for n in array.shape) > 1 and array.size < math.prod(of.static_shape)


def _repeated(patch: Patch, value: Value, of: TensorType) -> Value:
    """Constant rows, repeated for each matrix or image of a tensor of type ``of``: kernels add a tensor of the result's shape."""
    array = patch.graph.constant_value(value)
    if array is None or not _are_rows(patch.graph, value, of):
        return value
    return patch.constant(np.ascontiguousarray(np.broadcast_to(array, of.static_shape)), "repeated")


def _adds_positions(graph: Graph, op: Op, value: Value) -> bool:
    """Whether the tensor added to ``value`` varies along several axes: positions, not a bias."""
    others = [v for v in op.inputs if v is not None and v != value]
    return any(sum(d != 1 for d in graph.type(v).dims) > 1 for v in others)


def _norm_that_adds(graph: Graph, op: Op, value: Value, second: bool) -> Op | None:
    """The normalization that reads the sum ``op`` of ``value`` and another operand, if its kernel adds that operand itself.

    ``second``: the anchor of ``value`` already reads a tensor.
    """
    if op.kind != "Add":
        return None
    if isinstance(found := norm_addition(graph, op), NormAddition):
        return found.norm
    norm = next((u for u in graph.users(op.value) if u.kind in NORMS), None)
    if norm is None:
        return None
    other = next((v for v in op.inputs if v is not None and v != value), value)
    rows = second and graph.type(other).shape == graph.type(value).shape
    return norm if rows or _repeats(graph, other, graph.type(value).dims) else None


def _repeats(graph: Graph, rows: Value, shape: Shape) -> bool:
    """Whether an operand has fewer rows than ``shape`` and is repeated along its leading axes."""
    own = graph.type(rows).dims
    if own == shape and graph.constant_value(rows) is None:
        return False  # a residual
    while own and own[0] == 1:
        own = own[1:]
    return 1 < len(own) < len(shape) and own == shape[len(shape) - len(own) :]


class FuseEpilogue(RulePass):
    name = "fuse_epilogue"

    def __init__(self, *, norms_add: bool = False, rounded: bool = False):
        """``rounded``: only products with constant weights whose epilogue rounds to a grid."""
        self.norms_add, self.rounded = norms_add, rounded

    def rules_for(self, graph: Graph, context: PassContext) -> Sequence[Rule]:
        depth: dict[int, int] = {}
        for op in graph.order():
            depth[op.id] = 1 + max((depth[v.op] for v in op.inputs if v is not None), default=0)
        narrow = context.only_precision not in WIDE
        positions = coordinates(graph) if narrow and TargetName.parse(context.target).on_gpu else {}
        shared = (depth, self.norms_add)
        return (
            _Absorb(
                "epilogue_add", ADDITIONS, *shared, positions, self.rounded
            ),  # a bias that is no constant row, or a residual
            _Absorb("epilogue_scale", SCALINGS, *shared, {}, self.rounded),
            _Absorb("epilogue_activation", ACTIVATIONS, *shared, {}, self.rounded),
        )
