"""Products along tokens get their matrix as the first factor, and nothing is transposed.

MLP-Mixer (Tolstikhin et al., 2021), ResMLP (Touvron et al., 2021) and gMLP (Liu et al., 2021) multiply along the tokens. Exporters
put the tokens last, multiply by a matrix, and put them back. ``turn(turn(x) W + b)`` is ``W' x + b'``, where W' is the transposed
matrix and b' has an element for each row. Hopper's kernel of stacks reads x as it lies, and adds such a bias (``matmul_sm90``).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.base import Match, Miss, PassContext, Rule, RulePass
from optdnn.passes.channel_shuffles import PRECISIONS
from optdnn.passes.support.facts import NORMS, exchange_last, operand, producer, with_rank
from optdnn.passes.support.products import PRODUCTS, constant_matrix
from optdnn.passes.support.stages import ACTIVATIONS, ADDITIONS, SCALINGS
from optdnn.target_name import HOPPER, TargetName
from optdnn.types import Array

ARITHMETIC = ADDITIONS | SCALINGS
LEAST_CHANNELS, LEAST_TOKENS = 64, 16
"""The fewest that fill a tile of one product: rows of all of them together fill tiles of a product from the right."""
_DEPTH = 8
"""How far back the making of rows is looked for."""


@dataclass(frozen=True)
class Chain:
    """Operators in front of a Transpose, the last one first.

    Each is the only reader of the one before it, and the last of them reads ``base``. Additions may read ``base``, too."""

    ops: tuple[Op, ...]
    base: Value


class TokenProduct(Rule):
    """Products with a constant matrix, and stages around them, between two exchanges of the last two axes.

    In place of the first exchange, an image may be flattened: its channels are last in memory.
    """

    name = "token_product"
    kinds = frozenset({"Transpose"})

    def match(self, graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
        chain = _chain(graph, op) if _exchanges(op) else None
        if chain is None or not any(x.kind == "MatMul" for x in chain.ops):
            return None
        first = producer(graph, chain.base, {"Transpose"})
        if first is None and not _is_image(graph, chain.base):
            return None
        if first is None and not _reads_alone(graph, chain):
            return Miss(f"others read {graph.output(chain.base).name}, whose tokens are last")
        if first is not None and not _exchanges(first):
            return Miss(f"{first.name} does not exchange the two axes")
        if first is not None and not _made_in_rows(graph, operand(first), _DEPTH):
            return Miss("its operand may be stored with the tokens last")
        channels, tokens = graph.type(chain.base).dims[-2:]
        if any(isinstance(n, int) and n < least for n, least in ((channels, LEAST_CHANNELS), (tokens, LEAST_TOKENS))):
            return Miss(f"{tokens} tokens of {channels} channels do not fill a tile")
        machine = TargetName.parse(context.target)
        if context.precision not in PRECISIONS:
            return Miss(f"the kernel that multiplies from the left is not for {context.precision}")
        if not machine.on_gpu or (machine.arch or HOPPER) != HOPPER:
            return Miss(f"the kernel that multiplies from the left is Hopper's, not for {context.target}")
        alone = first is not None and graph.sole_user(first.value) is not None
        turns = [op, *([first] if first is not None and alone else [])]

        def build(patch: Patch) -> Value:
            exchange = TransposeAttrs(op.attrs.perm)
            x = patch.add("Transpose", [chain.base], exchange) if first is None else operand(first)
            return _from_left(graph, context, chain, x, turns, patch)

        return Match((*turns, *chain.ops), build)


def _exchanges(op: Op) -> bool:
    """Whether a Transpose exchanges the last two axes alone."""
    rank = op.outputs[0].type.rank
    return rank is not None and rank >= 2 and tuple(op.attrs.perm or range(rank)[::-1]) == exchange_last(rank)


def _chain(graph: Graph, op: Op) -> Chain | None:
    """The operators in front of a Transpose that compute the same of a transposed operand. None where they read several."""
    found: list[Op] = []
    others: set[Value] = set()
    value = operand(op)
    while graph.sole_user(value) is not None and (entries := _entries(graph, graph.op(value))):
        found.append(graph.op(value))
        value = max(entries, key=lambda v: graph.sole_user(v) is not None)  # the base has more readers
        others |= {*entries} - {value}
    return Chain(tuple(found), value) if others <= {value} else None


def _entries(graph: Graph, op: Op) -> list[Value]:
    """The computed operands of an operator of a chain; none where it is no such operator."""
    computed = [v for v in op.inputs if v is not None and graph.constant_value(v) is None]
    if op.kind == "MatMul":
        return computed if len(computed) == 1 and constant_matrix(graph, op) is not None else []
    if op.kind in ARITHMETIC:
        return computed if all(graph.type(v).shape == op.outputs[0].type.shape for v in computed) else []
    return computed if op.kind in ACTIVATIONS and len(op.inputs) == 1 else []


def _reads_alone(graph: Graph, chain: Chain) -> bool:
    """Whether nothing else reads the base."""
    own = {op.id for op in chain.ops}
    return all(user.id in own for user in graph.users(chain.base))


def _is_image(graph: Graph, value: Value) -> bool:
    """Whether it is a convolution's result with its positions on one axis."""
    flat = producer(graph, value, {"Reshape"})
    image = None if flat is None else producer(graph, flat.inputs[0], {"Conv"})
    if flat is None or image is None:
        return False
    before, after = image.outputs[0].type.dims, flat.outputs[0].type.dims
    return len(after) == 3 and before[:2] == after[:2]


def _made_in_rows(graph: Graph, value: Value, depth: int) -> bool:
    """Whether a product or a norm of rows made it, and pointwise operators after it: rows follow one another in memory."""
    op = graph.op(value)
    if op.kind in PRODUCTS | NORMS:
        return True
    if depth == 0 or op.kind not in ARITHMETIC | ACTIVATIONS | {"Split", "Slice"}:
        return False
    return any(v is not None and _made_in_rows(graph, v, depth - 1) for v in op.inputs)


def _from_left(graph: Graph, context: PassContext, chain: Chain, base: Value, turns: list[Op], patch: Patch) -> Value:
    """The operators of the chain, where ``base`` is its base with the two axes exchanged. ``turns``: the exchanges that go."""
    x, gone = base, frozenset[str]().union(*(op.src for op in turns))
    for op in reversed(chain.ops):
        inputs: list[Value | None] = []
        for v in op.inputs:
            array = graph.constant_value(v)
            if array is None:
                inputs.append(base if v == chain.base else x)
                continue
            wide = with_rank(array, max(2, array.ndim))
            made = context.kept.once(("turned",), [wide], partial(_exchanged, wide))
            inputs.append(patch.constant(made, "turned"))
        product = op.kind == "MatMul"
        src = op.src | gone if product else op.src
        x = patch.add(op.kind, inputs[::-1] if product else inputs, op.attrs, src=src)
    return x


def _exchanged(array: Array) -> Array:
    return np.ascontiguousarray(array.swapaxes(-1, -2))


class TokenProducts(RulePass):
    name = "token_products"
    rules = (TokenProduct(),)
