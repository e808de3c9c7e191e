"""Inference of an operator's results where sizes are large expressions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.net import Net

from optdnn.dim import Dim, DimTooLarge, symbol
from optdnn.errors import ShapeError
from optdnn.ir.bound import bound
from optdnn.ir.graph import Graph
from optdnn.ir.inference import infer
from optdnn.ops.shape import ReshapeAttrs
from optdnn.types import FP32, INT64, TensorType


def power(*symbols: str) -> Any:
    """The fourth power of a sum of symbols: its square would be too large an expression."""
    d: Any = sum(symbol(n) for n in symbols)
    return (d * d) * (d * d)


P, Q = power("a", "b", "c"), power("d", "e", "f")


def test_a_size_that_would_be_too_large_an_expression_is_a_symbol_until_the_inputs_have_sizes() -> None:
    with pytest.raises(DimTooLarge):
        P * Q
    n = Net()
    x = n.input(P, Q, 4)
    graph = n.done(n.op("Reshape", x, n.ints(-1, 4)))
    (size, four) = graph.type(graph.op(graph.outputs[0]).inputs[0]).dims
    assert four == 4
    assert isinstance(size, Dim)
    assert size.parts < 5
    made: Graph = bound(graph, {"x": (3, 5, 4)})
    assert made.op(made.outputs[0]).outputs[0].type.static_shape == (15, 4)


def _reshaped(shape: tuple[Any, ...], target: list[Any]) -> TensorType:
    counter = iter(range(99))

    def fresh(hint: str, most: Any = None) -> Dim:
        return symbol(f"{hint}{next(counter)}")

    value = np.array(target, object)
    types = [TensorType(FP32, shape), TensorType(INT64, (len(target),))]
    return infer("Reshape", ReshapeAttrs(), types, [None, value], 1, fresh).types[0]


def test_equal_expressions_become_one_symbol() -> None:
    first, one, last, other = _reshaped((P, P, Q), [P, 1, P, Q]).dims
    assert one == 1
    assert first == last
    assert first != other


def test_a_value_that_may_be_negative_is_not_made_a_symbol() -> None:
    assert len(_reshaped((P, Q), [P - Q + 1, -1]).dims) == 2


def test_short_sizes_stay_as_they_are() -> None:
    n = symbol("n")
    assert _reshaped((P, Q, n), [P, Q, n]).dims[2] == n
    with pytest.raises(ShapeError, match="a 0 copies"):  # contradictions are still found
        _reshaped((P, Q), [P, Q, 0])
