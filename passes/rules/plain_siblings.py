"""Siblings of a product that has an activation: products of the same operand that have none.

One product could compute all of them, but not with the activation in its epilogue. If a launch moves the activated elements in any
case, that launch activates them, and the products stay alike.
"""

from __future__ import annotations

from optdnn.ir.graph import Graph, Op
from optdnn.passes.base import PassContext
from optdnn.passes.fuse_siblings import LAUNCH_BYTES
from optdnn.passes.support.facts import RESHAPES, bytes_of, is_pointwise, operand
from optdnn.passes.support.siblings import Member, member_of
from optdnn.passes.support.stages import ACTIVATIONS


def plain_sibling(graph: Graph, product: Op, activation: Op, context: PassContext) -> Op | None:
    """A product or convolution that one launch could compute together with ``product`` if ``activation`` stayed apart, although
    its result has no such activation; None if there is none, or if no launch moves an activated result, or too few of them."""
    mine, alike, plain = member_of(graph, product), [activation], list[Op]()
    for other in graph.users(operand(product)):
        if other is product or other.kind != product.kind or other.inputs[0] != product.inputs[0]:
            continue
        member = member_of(graph, other)
        if isinstance(mine, Member) and isinstance(member, Member) and member.key == mine.key:
            after = _activation(graph, other)
            if after is not None and (after.kind, after.attrs) == (activation.kind, activation.attrs):
                alike.append(after)
            else:
                plain.append(other)
    if context.counted(sum(bytes_of(graph, one.value) for one in alike if not _moved(graph, one))) > LAUNCH_BYTES:
        return None
    return plain[0] if plain and any(_moved(graph, one) for one in alike) else None


def _activation(graph: Graph, product: Op) -> Op | None:
    """The activation of a product's result, after additions and views that only it reads."""
    op = graph.sole_user(product.value)
    while op is not None and op.kind not in ACTIVATIONS and (op.kind in RESHAPES | {"Transpose", "Add"}):
        op = graph.sole_user(op.value)
    return op if op is not None and op.kind in ACTIVATIONS else None


def _moved(graph: Graph, op: Op) -> bool:
    """Whether a launch moves the elements of a result: a Concat reads them, or a Transpose of rows, after pointwise operators."""
    for reader in graph.users(op.value):
        if reader.kind == "Concat":
            return True
        perm = reader.attrs.perm if reader.kind == "Transpose" else None
        if perm is not None and perm[-1] != len(perm) - 1:
            return True
        if (reader.kind in RESHAPES or is_pointwise(reader)) and _moved(graph, reader):
            return True
    return False
