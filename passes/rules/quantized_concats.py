"""Values are quantized before they are joined or pooled: the launches that compute them store 8 bits.

Tools for TensorRT quantize what convolutions read: the result of a Concat or of a pool, but not what these read. Float parts of a
Concat that are results of products or pointwise operators are rounded in their launches, and pools compare integers. Parts that
are dequantized with the same scale need no launch at all.
"""

from __future__ import annotations

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.fused import plain_attrs
from optdnn.passes.base import Match, Miss, rule
from optdnn.passes.support.centered import centered
from optdnn.passes.support.facts import is_pointwise, operand, producer
from optdnn.passes.support.precision import SHARES_SCALE
from optdnn.passes.support.quantized_values import is_dequantized, same_scale
from optdnn.runtime.reference.run import run_kernel
from optdnn.types import INT8, UINT8, Array, is_float

_PRODUCTS = frozenset({"Conv", "Gemm", "MatMul"})
MOST_LAUNCHES = 1
"""Parts that need a launch of their own: as many as the one that quantizes the whole."""


@rule("quantize_before_pool", {"QuantizeLinear"})
def quantize_before_pool(graph: Graph, op: Op) -> Match | Miss | None:
    """The result of a product or a pointwise operator is quantized before a MaxPool, its only reader."""
    pool = producer(graph, op.inputs[0], {"MaxPool"})
    if pool is None or not _compares(op, pool) or is_dequantized(graph, operand(pool)):
        return None
    if graph.users(pool.value) != [op] or graph.users(operand(pool)) != [pool]:
        return Miss(f"the float result of {pool.name}, or its operand, has another reader")
    if (why := _not_plain(graph, op)) is not None:
        return Miss(why)
    if not _rounds(graph, graph.op(operand(pool))):
        return Miss(f"no launch computes the operand of {pool.name} and quantizes it")

    def build(patch: Patch) -> Value:
        y = patch.add("QuantizeLinear", [operand(pool), *op.inputs[1:]], op.attrs)
        return patch.add(pool.kind, [y], pool.attrs, src=pool.src)

    return Match((op, pool), build)


@rule("quantize_parts", {"QuantizeLinear"})
def quantize_parts(graph: Graph, op: Op) -> Match | Miss | None:
    """The QuantizeLinear of a Concat is moved to its parts."""
    concat = producer(graph, op.inputs[0], {"Concat"})
    if concat is None or all(is_dequantized(graph, part) for part in concat.inputs):
        return None  # on_integers
    if graph.users(concat.value) != [op]:
        return Miss(f"the float result of {concat.name} has another reader")
    if (why := _not_plain(graph, op)) is not None:
        return Miss(why)
    if not _read_as_integers(graph, op):
        return Miss("only operators on floats read the integers: their launch rounds and dequantizes")
    joined = _Joined(graph, op, concat)
    launches = [part for part in joined.parts if not joined.free(part)]
    if len(launches) > MOST_LAUNCHES:
        names = ", ".join(graph.output(part).name for part in launches)
        return Miss(f"the parts {names} of {concat.name} would be quantized in launches of their own")
    return Match((op, concat), joined.build)


class _Joined:
    """The parts of a Concat that ``op`` quantizes."""

    def __init__(self, graph: Graph, op: Op, concat: Op):
        self.graph, self.op, self.concat = graph, op, concat
        self.parts = list(dict.fromkeys(operand(concat, k) for k in range(len(concat.inputs))))
        pools = {part.op for part in self.parts if graph.op(part).kind == "MaxPool"}
        self.readers = {concat.id, *pools}
        """The operators that may read integers in the place of floats."""

    def free(self, part: Value) -> bool:
        """Whether no launch is needed to quantize a part."""
        if self._constant(part) is not None or self._stored(part) is not None or self._pooled(part):
            return True
        return self._inside(part) and _rounds(self.graph, self.graph.op(part))

    def build(self, patch: Patch) -> Value:
        made: dict[Value, Value] = {}
        for part in sorted(self.parts, key=self._depth):
            stored, name = self._stored(part), f"{self.graph.output(part).name}/quantized"
            if stored is None and self._pooled(part):
                pool = self.graph.op(part)
                before = made.get(operand(pool)) or self._stored(operand(pool))
                stored = patch.add(pool.kind, [before], pool.attrs, name=name, src=pool.src)
            if (constant := self._constant(part)) is not None:
                stored = patch.constant(constant, name)
            made[part] = stored or patch.add("QuantizeLinear", [part, *self.op.inputs[1:]], self.op.attrs, name=name)
        parts = [made[operand(self.concat, k)] for k in range(len(self.concat.inputs))]
        return patch.add(self.concat.kind, parts, self.concat.attrs)

    def _constant(self, part: Value) -> Array | None:
        """The integers of a constant part."""
        operands = [self.graph.constant_value(v) for v in (part, *self.op.inputs[1:]) if v is not None]
        if any(a is None for a in operands):
            return None
        attrs = plain_attrs(self.op.definition, self.op.attrs)
        return run_kernel(self.op.kind, operands, attrs, [self.op.outputs[0].type.dtype])[0]

    def _stored(self, part: Value) -> Value | None:
        """The integers that a part is dequantized from, if they have the scale and zero point of the QuantizeLinear."""
        before = self.graph.op(part)
        if before.kind != "DequantizeLinear" or self.graph.type(operand(before)).dtype != self.op.outputs[0].type.dtype:
            return None
        return operand(before) if same_scale(self.graph, before, self.op) else None

    def _pooled(self, part: Value) -> bool:
        """Whether a part is the largest of elements that are quantized anyway."""
        pool = self.graph.op(part)
        if pool.kind != "MaxPool" or not self._inside(part) or not _compares(self.op, pool):
            return False
        return operand(pool) in self.parts or self._stored(operand(pool)) is not None

    def _inside(self, part: Value) -> bool:
        return all(user.id in self.readers for user in self.graph.users(part))

    def _depth(self, part: Value) -> int:
        """The number of pools from another part to this one."""
        pool = self.graph.op(part)
        return 1 + self._depth(operand(pool)) if pool.kind == "MaxPool" and part in self.parts else 0


def _read_as_integers(graph: Graph, op: Op) -> bool:
    """Whether a product reads the integers of a QuantizeLinear, or an operator that moves them, or the network's caller."""
    users = graph.users(op.value)
    readers = [u for user in users if user.kind == "DequantizeLinear" for u in graph.users(user.value)]
    return any(u.kind != "DequantizeLinear" for u in users) or any(u.kind in _PRODUCTS | SHARES_SCALE for u in readers)


def _rounds(graph: Graph, made: Op) -> bool:
    """Whether the launch of an op may round its result."""
    if len(made.outputs) > 1:
        return False
    return is_pointwise(made) or (
        made.kind in _PRODUCTS and is_dequantized(graph, made.inputs[0]) and _multiplies(graph, made)
    )


def _multiplies(graph: Graph, product: Op) -> bool:
    """Whether the weights of a product are 8-bit integers, or fp8 numbers."""
    before = producer(graph, product.inputs[1], {"DequantizeLinear"})
    array = None if before is None else graph.constant_value(before.inputs[0])
    if before is None or array is None or before.attrs.block_size:
        return False
    return (
        is_float(array.dtype)
        or centered(array, graph.constant_value(before.input(2)), before.attrs.axis % array.ndim) is not None
    )


def _compares(op: Op, pool: Op) -> bool:
    """Whether a pool can compare the integers (or fp8 numbers) of a QuantizeLinear."""
    dtype = op.outputs[0].type.dtype
    return len(pool.outputs) == 1 and (dtype in (INT8, UINT8) or is_float(dtype))


def _not_plain(graph: Graph, op: Op) -> str | None:
    """Why a QuantizeLinear does not treat all elements alike; None if it does."""
    return (
        "it has a scale per channel"
        if graph.type(operand(op, 1)).dims not in ((), (1,)) or op.attrs.block_size
        else None
    )
