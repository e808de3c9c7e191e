"""Products along tokens get their matrix as the first factor, and nothing is transposed.

MLP-Mixer (Tolstikhin et al., 2021), ResMLP (Touvron et al., 2021) and gMLP (Liu et al., 2021) multiply along the tokens. Exporters
transpose the tokens to the last axis, multiply by a matrix, and transpose back. ``(x^T W + b)^T`` is ``W^T x + b^T``: the bias has
an element per row. Hopper's kernel for batched products (``matmul_sm90``) reads x without a copy, and adds such a bias.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.base import Match, Miss, PassContext, RulePass, rule
from optdnn.passes.channel_shuffles import PRECISIONS
from optdnn.passes.support.facts import NORMS, exchange_last, operand, producer, with_rank
from optdnn.passes.support.products import PRODUCTS, constant_matrix
from optdnn.passes.support.stages import ACTIVATIONS, ADDITIONS, SCALINGS
from optdnn.target_name import HOPPER, TargetName
from optdnn.types import Array

ARITHMETIC = ADDITIONS | SCALINGS
LEAST_CHANNELS, LEAST_TOKENS = 64, 16
"""Fewest channels and tokens: with fewer, each item's product from the left would leave most of a tile empty. A product from the
right joins the rows of all items."""
_DEPTH = 8
"""Most operators back to the product or norm that computes rows."""


@dataclass(frozen=True)
class Chain:
    """Operators before a Transpose, ordered from the Transpose backwards.

    Each one is the only reader of the operator that it follows. The first one to run reads ``base``; additions may read it too."""

    ops: tuple[Op, ...]
    base: Value


@rule("token_product", {"Transpose"})
def token_product(graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
    """Products with a constant matrix, and stages around them, between two Transposes that exchange the last two axes.

    Instead of the first Transpose there may be a Reshape that flattens an image, whose channels are last in memory.
    """
    chain = _chain(graph, op) if _exchanges(op) else None
    if chain is None or not any(x.kind == "MatMul" for x in chain.ops):
        return None
    first = producer(graph, chain.base, {"Transpose"})
    if first is None and not _is_image(graph, chain.base):
        return None
    if first is None and not _reads_alone(graph, chain):
        return Miss(f"{graph.output(chain.base).name}, whose tokens are last, has other readers")
    if first is not None and not _exchanges(first):
        return Miss(f"{first.name} does not exchange the last two axes")
    if first is not None and not _has_rows(graph, operand(first), _DEPTH):
        return Miss("its operand may be stored with the tokens last")
    channels, tokens = graph.type(chain.base).dims[-2:]
    if any(isinstance(n, int) and n < least for n, least in ((channels, LEAST_CHANNELS), (tokens, LEAST_TOKENS))):
        return Miss(f"{tokens} tokens of {channels} channels do not fill a tile")
    machine = TargetName.parse(context.target)
    if context.precision not in PRECISIONS:
        return Miss(f"there is no kernel for products from the left in {context.precision}")
    if not machine.on_gpu or (machine.arch or HOPPER) != HOPPER:
        return Miss(f"only Hopper has a kernel for products from the left, {context.target} has none")
    alone = first is not None and graph.sole_user(first.value) is not None
    turns = [op, *([first] if first is not None and alone else [])]

    def build(patch: Patch) -> Value:
        exchange = TransposeAttrs(op.attrs.perm)
        x = patch.add("Transpose", [chain.base], exchange) if first is None else operand(first)
        return _from_left(graph, context, chain, x, turns, patch)

    return Match((*turns, *chain.ops), build)


def _exchanges(op: Op) -> bool:
    """Whether a Transpose exchanges the last two axes and keeps all others."""
    rank = op.outputs[0].type.rank
    return rank is not None and rank >= 2 and tuple(op.attrs.perm or range(rank)[::-1]) == exchange_last(rank)


def _chain(graph: Graph, op: Op) -> Chain | None:
    """The operators before a Transpose that could compute its result from a transposed base; None if they read several bases."""
    found: list[Op] = []
    others: set[Value] = set()
    value = operand(op)
    while graph.sole_user(value) is not None and (entries := _entries(graph, graph.op(value))):
        found.append(graph.op(value))
        value = max(
            entries, key=lambda v: graph.sole_user(v) is not None
        )  # the other entry is the base, with several readers
        others |= {*entries} - {value}
    return Chain(tuple(found), value) if others <= {value} else None


def _entries(graph: Graph, op: Op) -> list[Value]:
    """The computed operands of an operator that may be part of a chain; none for other operators."""
    computed = [v for v in op.inputs if v is not None and graph.constant_value(v) is None]
    if op.kind == "MatMul":
        return computed if len(computed) == 1 and constant_matrix(graph, op) is not None else []
    if op.kind in ARITHMETIC:
        return computed if all(graph.type(v).shape == op.outputs[0].type.shape for v in computed) else []
    return computed if op.kind in ACTIVATIONS and len(op.inputs) == 1 else []


def _reads_alone(graph: Graph, chain: Chain) -> bool:
    """Whether only operators of the chain read its base."""
    own = {op.id for op in chain.ops}
    return all(user.id in own for user in graph.users(chain.base))


def _is_image(graph: Graph, value: Value) -> bool:
    """Whether ``value`` is a convolution's result with its positions flattened to one axis."""
    flat = producer(graph, value, {"Reshape"})
    image = None if flat is None else producer(graph, flat.inputs[0], {"Conv"})
    if flat is None or image is None:
        return False
    before, after = image.outputs[0].type.dims, flat.outputs[0].type.dims
    return len(after) == 3 and before[:2] == after[:2]


def _has_rows(graph: Graph, value: Value, depth: int) -> bool:
    """Whether ``value`` comes from a product or a norm of rows, through pointwise operators and splits: its rows are contiguous."""
    op = graph.op(value)
    if op.kind in PRODUCTS | NORMS:
        return True
    if depth == 0 or op.kind not in ARITHMETIC | ACTIVATIONS | {"Split", "Slice"}:
        return False
    return any(v is not None and _has_rows(graph, v, depth - 1) for v in op.inputs)


def _from_left(graph: Graph, context: PassContext, chain: Chain, base: Value, turns: list[Op], patch: Patch) -> Value:
    """The chain on its transposed ``base``. ``turns``: the Transposes that disappear, whose names go to the products."""
    x, names = base, frozenset[str]().union(*(op.src for op in turns))
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
        src = op.src | names if product else op.src
        x = patch.add(op.kind, inputs[::-1] if product else inputs, op.attrs, src=src)
    return x


def _exchanged(array: Array) -> Array:
    return np.ascontiguousarray(array.swapaxes(-1, -2))


class TokenProducts(RulePass):
    name = "token_products"
    rules = (token_product,)
