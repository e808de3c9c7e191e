"""Pointwise ops behind a convolution or matrix product become stages of its epilogue.

The result of the anchor (Conv, ConvTranspose, Gemm, MatMul) must be read by the absorbed op alone, and the stage must keep
its dtype and shape. No cycle can arise: the other operands of the absorbed op depend on the anchor only through the absorbed op
itself. With ``norms_add``, an Add of one vector per image stays apart for the group normalization that reads the sum: its kernel
takes it along, and those of convolutions do not.

An Add of two results that could both absorb it goes to the later one (the longer path from the inputs, then the larger
id): the other result is ready by then, and is an operand like any other.
"""

from __future__ import annotations

from collections.abc import Sequence

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.norm_addition import NormAddition, norm_addition
from optdnn.ir.patch import Patch
from optdnn.passes.base import Match, Miss, PassContext, Rule, RulePass
from optdnn.passes.support.facts import NORMS
from optdnn.passes.support.stages import ACTIVATIONS, ADDITIONS, ANCHORS, SCALINGS, Slots, refuses, with_stages
from optdnn.target_name import TargetName


class _Absorb(Rule):
    """Absorbs one op at a time; a chain is absorbed link by link. ``depth``: op id -> length of the path from the inputs."""

    kinds = ANCHORS

    def __init__(self, name: str, absorbs: frozenset[str], depth: dict[int, int], norms_add: bool):
        self.name, self.absorbs, self.depth, self.norms_add = name, absorbs, depth, norms_add

    def match(self, graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
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
        if TargetName.parse(context.target).on_gpu and _is_for_norm(graph, user, op.value):
            return Miss(f"the norm behind {user.name} adds its rows, which repeat")
        if self.norms_add and isinstance(found := norm_addition(graph, user), NormAddition):
            return Miss(f"the normalization {found.norm.name} adds {user.name} itself")
        if any(self._place(rival) > self._place(op) for rival in self._rivals(graph, op, user)):
            return None

        def build(patch: Patch) -> Value:
            slots = Slots(op)
            stage = slots.stage(user, op.value, len(op.attrs.epilogue))
            fused = patch.add(op.kind, slots.inputs(), with_stages(op.attrs, epilogue=[stage]))
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

    def _place(self, op: Op) -> tuple[int, int]:
        return self.depth.get(op.id, 0), op.id


def _is_for_norm(graph: Graph, op: Op, value: Value) -> bool:
    """Whether an addition to ``value`` is of fewer rows, which repeat, and a norm reads the sum: position embeddings.

    No kernel of products reads such rows; those of norms do.
    """
    if op.kind != "Add" or not any(u.kind in NORMS for u in graph.users(op.value)):
        return False
    other = next((v for v in op.inputs if v is not None and v != value), value)
    shape, own = graph.type(value).dims, graph.type(other).dims
    if own == shape and graph.constant_value(other) is None:
        return False  # a residual
    while own and own[0] == 1:
        own = own[1:]
    return 1 < len(own) < len(shape) and own == shape[len(shape) - len(own) :]


class FuseEpilogue(RulePass):
    name = "fuse_epilogue"

    def __init__(self, *, norms_add: bool = False):
        self.norms_add = norms_add

    def rules_for(self, graph: Graph, context: PassContext) -> Sequence[Rule]:
        depth: dict[int, int] = {}
        for op in graph.order():
            depth[op.id] = 1 + max((depth[v.op] for v in op.inputs if v is not None), default=0)
        return (
            _Absorb("epilogue_add", ADDITIONS, depth, self.norms_add),  # a bias that is no constant row, or a residual
            _Absorb("epilogue_scale", SCALINGS, depth, self.norms_add),
            _Absorb("epilogue_activation", ACTIVATIONS, depth, self.norms_add),
        )
