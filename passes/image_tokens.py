"""Images become rows of tokens, and rows images, by one transposition that layouts can do away with.

Transformers with convolutions between their layers (SegFormer: Xie et al., 2021; PVT, CvT) write an image (B, C, H, W) as tokens by
a Reshape to (B, C, H * W) and a Transpose, and back the other way round. In that form the image has to lie in plain order. With
the Transpose on the image's side, a channels-last image is its tokens in memory, and nothing moves.
"""

from __future__ import annotations

from dataclasses import dataclass

from optdnn.ir.graph import STRUCTURAL, Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.base import Match, Miss, PassContext, Rule, RulePass
from optdnn.passes.rules.shape import RESHAPES, reshaped
from optdnn.passes.support.facts import channels_from_last, channels_to_last, reshape_target
from optdnn.passes.support.stages import ACTIVATIONS

OF_IMAGES = frozenset({"Conv", "ConvTranspose", "MaxPool", "AveragePool", "Resize"})
"""Kinds that make or read images in channels-last order as well."""
_BETWEEN = 4
"""Pointwise operators that may stand between such a kind and the Reshape."""
_SWAP = (0, 2, 1)


@dataclass(frozen=True)
class _Moved:
    """``x``, reshaped to ``target``, before or behind a Transpose by ``perm``, gives ``result``."""

    x: Value
    target: tuple[int, ...]
    perm: tuple[int, ...]
    result: Value


class ImageToTokens(Rule):
    """Of an image, a Reshape to (B, C, positions) and Transpose(0, 2, 1): the Transpose goes first."""

    name = "image_to_tokens"
    kinds = frozenset({"Transpose"})

    def match(self, graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
        value = op.inputs[0]
        if op.attrs.perm != _SWAP or value is None or graph.sole_user(value) is None:
            return None
        flat = graph.op(value)
        image = flat.inputs[0] if flat.kind in RESHAPES else None
        if image is None or not _is_image(graph, image):
            return None
        before, after = graph.type(image).shape, flat.outputs[0].type.shape
        if before is None or after is None or len(before) < 4 or len(after) != 3 or before[:2] != after[:2]:
            return None
        target = reshape_target((before[0], *before[2:], before[1]), (after[0], after[2], after[1]))
        if target is None:
            return Miss("no constant target can express its shape")
        return Match((flat, op), _Moved(image, target, channels_to_last(len(before)), op.value))

    def rewrite(self, graph: Graph, match: Match, context: PassContext) -> Patch:
        found: _Moved = match.data
        patch = Patch(graph, match.ops)
        x = patch.add("Transpose", [found.x], TransposeAttrs(found.perm))
        patch.replace(found.result, reshaped(patch, x, found.target))
        return patch


class TokensToImage(Rule):
    """Of tokens (B, positions, C), Transpose(0, 2, 1) and a Reshape to an image: the Transpose goes last."""

    name = "tokens_to_image"
    kinds = RESHAPES

    def match(self, graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
        value = op.inputs[0]
        if value is None or graph.sole_user(value) is None:
            return None
        swap = graph.op(value)
        if swap.kind != "Transpose" or swap.attrs.perm != _SWAP or swap.inputs[0] is None:
            return None
        before, after = graph.type(value).shape, op.outputs[0].type.shape
        if before is None or after is None or len(after) < 4 or before[:2] != after[:2]:
            return None
        if not any(user.kind in OF_IMAGES or _turns(user) for user in graph.users(op.value)):
            return Miss("nothing that works on images reads it")
        target = reshape_target((before[0], before[2], before[1]), (after[0], *after[2:], after[1]))
        if target is None:
            return Miss("no constant target can express its shape")
        return Match((swap, op), _Moved(swap.inputs[0], target, channels_from_last(len(after)), op.value))

    def rewrite(self, graph: Graph, match: Match, context: PassContext) -> Patch:
        found: _Moved = match.data
        patch = Patch(graph, match.ops)
        x = reshaped(patch, found.x, found.target)
        patch.replace(found.result, patch.add("Transpose", [x], TransposeAttrs(found.perm)))
        return patch


class ActivateImage(Rule):
    """An activation of an image's tokens is one of the image, where the convolution's epilogue can take it."""

    name = "activate_image"
    kinds = RESHAPES

    def match(self, graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
        value, user = op.inputs[0], graph.sole_user(op.value)
        if value is None or user is None or user.kind not in ACTIVATIONS or user.inputs[0] != op.value:
            return None
        turned = graph.op(value)
        if turned.kind != "Transpose" or graph.sole_user(value) is None or turned.inputs[0] is None:
            return None
        if graph.op(turned.inputs[0]).kind != "Conv" or graph.sole_user(turned.inputs[0]) is None:
            return None
        constants = [graph.constant_value(v) for v in user.inputs[1:] if v is not None]
        if any(c is None or c.size > 1 for c in constants):
            return Miss("the activation reads more than the tokens and numbers")
        return Match((op, user), None)

    def rewrite(self, graph: Graph, match: Match, context: PassContext) -> Patch:
        shape, activation = match.ops
        patch = Patch(graph, match.ops)
        y = patch.add(activation.kind, [shape.inputs[0], *activation.inputs[1:]], activation.attrs, src=activation.src)
        patch.replace(activation.value, patch.add(shape.kind, [y, *shape.inputs[1:]], shape.attrs, src=shape.src))
        return patch


def _turns(op: Op) -> bool:
    """Whether it brings channels from the last place to the second, or back."""
    if op.kind != "Transpose" or op.attrs.perm is None or len(op.attrs.perm) < 4:
        return False
    rank = len(op.attrs.perm)
    return op.attrs.perm in (channels_from_last(rank), channels_to_last(rank))


def _is_image(graph: Graph, value: Value) -> bool:
    """Whether something that works on images made it, or what it was made from by pointwise operators."""
    for _ in range(_BETWEEN):
        op = graph.op(value)
        if op.kind in OF_IMAGES or _turns(op):
            return True
        before = op.input(0)
        if op.kind in STRUCTURAL or not op.definition.traits.pointwise or before is None:
            return False
        value = before
    return False


class ImageTokens(RulePass):
    """Each such pair once."""

    name = "image_tokens"
    rules = (ImageToTokens(), TokensToImage(), ActivateImage())
