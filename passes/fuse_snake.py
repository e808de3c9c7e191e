"""Snake, the activation of vocoders and audio codecs, becomes one op: ``x + gain sin(rate x)^2`` (Ziyin et al., 2020).

Rate and gain are constants, most often numbers of each channel (BigVGAN: Lee et al., 2023; DAC: Kumar et al., 2023). As one op it
is a stage of the convolution before it: written out, it reads the convolution's result twice.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.passes.base import Match, Miss, RulePass
from optdnn.passes.support.pattern import ConstantVar, Scalar, Var, any_of, node
from optdnn.passes.support.pattern_rule import fused, pattern_rule

X = Var("x")
_WAVE = node("Sin", any_of(node("Mul", X, ConstantVar("rate")), X))
_SQUARE = any_of(node("Mul", _WAVE, _WAVE), node("Pow", _WAVE, Scalar(2.0)))


@pattern_rule(
    "snake",
    node("Add", X, any_of(node("Mul", _SQUARE, ConstantVar("gain")), _SQUARE)),
)
def snake(graph: Graph, root: Op, found: dict[str, Any], ops: frozenset[int]) -> Match | Miss | None:
    """The arithmetic in its canonical form: constants after their factors, squares as products."""
    x: Value = found["x"]
    one = np.ones((), graph.type(x).dtype)

    def build(patch: Patch) -> Value:
        numbers = [found[name] if name in found else patch.constant(one, f"snake.{name}") for name in ("rate", "gain")]
        return patch.add("Snake", [x, *numbers])

    return fused(graph, ops, root, x, build)


class FuseSnake(RulePass):
    """Snake as one op, for targets that have a kernel for it."""

    name = "fuse_snake"
    rules = (snake,)
