"""Stages move in front of a Reshape or a pixel shuffle after a product or convolution, whose epilogue then absorbs them.

The multiplication of an attention's heads by a gate that a product computes also moves in front of its Reshape.
"""

from __future__ import annotations

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.passes.base import Match, Miss, PassContext, rule
from optdnn.passes.rules.plain_siblings import plain_sibling
from optdnn.passes.support.facts import RESHAPES, in_shape, operand, producer, reshape_target, scalar, shape_of
from optdnn.passes.support.paths import path_to, repeated
from optdnn.passes.support.stages import ACTIVATIONS, ADDITIONS, ANCHORS, SCALINGS, refuses

MOVES = RESHAPES | {"DepthToSpace"}
STAGES = ACTIVATIONS | ADDITIONS | SCALINGS


@rule("stage_before_reshape", STAGES)
def stage_before_reshape(graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
    """``f(reshape(x W))`` is ``reshape(f(x W))`` if f reads only scalar constants besides: the root of a sum (StyleGAN2). So is
    ``f(shuffle(conv(x)))``: the activation after a pixel shuffle (SRResNet)."""
    reshape = _before(graph, op, MOVES)
    if reshape is None or refuses(graph, op, reshape.value) is not None:
        return None
    views = [reshape, *path_to(graph, operand(reshape), MOVES, alone=True)]
    source = operand(views[-1])
    product = _staged_product(graph, source)
    if product is None:
        return None
    if op.kind in ACTIVATIONS and (sibling := plain_sibling(graph, product, op, context)) is not None:
        return Miss(f"without it, one launch computes {product.name} and {sibling.name}")

    def build(patch: Patch) -> Value:
        staged = patch.add(op.kind, [source if v == reshape.value else v for v in op.inputs], op.attrs, src=op.src)
        return repeated(patch, staged, views)

    return Match((op, *views), build)


@rule("gate_before_reshape", RESHAPES)
def gate_before_reshape(graph: Graph, op: Op) -> Match | None:
    """``reshape(reshape(f(x W)) * y)`` with the shape of ``x W`` is ``f(x W) * reshape(y)``: the gate of an attention's heads."""
    product, shape = producer(graph, operand(op), {"Mul"}, alone=True), op.outputs[0].type.shape
    if product is None or shape is None:
        return None
    for k, value in enumerate(product.inputs):
        y, view = operand(product, 1 - k), producer(graph, value, RESHAPES, alone=True)
        heads = product.outputs[0].type.shape
        if view is None or heads is None or shape_of(graph, y) != heads or reshape_target(heads, shape) is None:
            continue
        gate = operand(view)
        if shape_of(graph, gate) == shape and _staged_product(graph, gate) is not None:

            def build(patch: Patch, gate: Value = gate, y: Value = y) -> Value:
                return patch.add("Mul", [gate, in_shape(patch, y, shape)], src=product.src)

            return Match((op, product, view), build)
    return None


def _staged_product(graph: Graph, value: Value) -> Op | None:
    """The product or convolution whose result a value with one reader is, possibly with stages after it; None for other values.
    The stages may read any constants: they stay in place."""
    op = graph.op(value)
    while op.kind in STAGES and (before := _before(graph, op, ANCHORS | STAGES, scalars=False)) is not None:
        op = before
    return op if op.kind in ANCHORS and graph.sole_user(value) is not None else None


def _before(graph: Graph, op: Op, kinds: frozenset[str], *, scalars: bool = True) -> Op | None:
    """The operator of one of ``kinds`` whose result only ``op`` reads. All other operands of ``op`` must be constants, and with
    ``scalars`` of one element."""
    found: Op | None = None
    for value in op.inputs:
        if value is None or (scalar(graph, value) if scalars else graph.constant_value(value)) is not None:
            continue
        if found is not None or (found := producer(graph, value, kinds, alone=True)) is None:
            return None
    return found
