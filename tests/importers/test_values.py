"""Inputs with given values become constants of the right type and shape; and inputs that are only sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.fallback import I64, F, feeds, model, node

import optdnn
from optdnn.errors import UsageError
from optdnn.importers.onnx import import_model
from optdnn.importers.values import size_inputs, with_values

NODES = [
    node("ReduceSum", "x axes", "s", keepdims=0),
    node("Concat", "rows rest", "shape", axis=0),
    node("Reshape", "s shape", "r"),
    node("TopK", "r k", "y at"),
]
INPUTS: list[Any] = [("x", F, [2, 3, 4]), ("axes", I64, [1]), ("rows", I64, [1]), ("k", I64, [1]), ("spare", I64, [1])]


def network() -> Any:
    return model(NODES, INPUTS, [("y", F, None), ("at", I64, None)], rest=[-1])


def test_sizes_are_known_once_values_are_given() -> None:
    values: dict[str, Any] = {"axes": [1], "rows": np.array([4]), "k": 2}
    engine = optdnn.build(network(), target="simulate", values=values, strict=True)
    assert [s.name for s in engine.inputs] == ["x", "spare"]
    assert [s.shape for s in engine.outputs] == [(4, 2), (4, 2)]
    assert engine.meta["options"]["values"] == {"axes": [1], "rows": [4], "k": 2}
    given = feeds(network())
    sizes = {n: np.reshape(v, -1) for n, v in values.items()}
    want = optdnn.build(network(), target="reference").run(given | sizes)
    got = engine.run({n: given[n] for n in ("x", "spare")})
    for name, w in want.items():
        np.testing.assert_allclose(got[name], w, rtol=1e-6)


@pytest.mark.parametrize("target", ["simulate", "reference"])
def test_values_and_ranges_of_other_inputs(target: str, tmp_path: Path) -> None:
    """The engine, written and read again, makes plans for sizes that its file has no plan for."""
    nodes = [node("ReduceSum", "x axes", "s", keepdims=0), node("TopK", "s k", "y at")]
    inputs: list[Any] = [("x", F, ["batch", 3, 4]), ("axes", I64, [1]), ("k", I64, [1])]
    made = model(nodes, inputs, [("y", F, None), ("at", I64, None)])
    shapes = {"x": (optdnn.DimRange(1, 2, 5), 3, 4)}
    engine = optdnn.build(made, target=target, values={"axes": [1], "k": 2}, shapes=shapes)
    engine.save(tmp_path / "e.engine")
    engine = optdnn.load(tmp_path / "e.engine")
    for batch in (1, 3, 5):
        x = np.random.default_rng(batch).standard_normal((batch, 3, 4)).astype(np.float32)
        np.testing.assert_allclose(engine.run({"x": x})["y"], -np.sort(-x.sum(1), axis=1)[:, :2], rtol=1e-5)


def test_which_inputs_say_sizes() -> None:
    assert size_inputs(import_model(network())) == ["axes", "rows", "k"], "x is data, and nothing reads the spare one"
    assert size_inputs(import_model(with_values(network(), {"k": 1}))) == ["axes", "rows"]
    nodes = [node("Reshape", "x s", "y"), node("Add", "s s", "z")]
    data = model(nodes, [("x", F, [4]), ("s", I64, [2])], [("y", F, None), ("z", I64, [2])])
    assert size_inputs(import_model(data)) == [], "an output shows it, too"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"nothing": 1}, r"no input 'nothing' to give a value\n.*its inputs are 'x', 'axes'"),
        ({"axes": [1.5]}, r"\[1.5\] is not a value of int64 for input 'axes'"),
        ({"axes": "one"}, "is not a value of int64"),
        ({"axes": [1, 2]}, r"the value of input 'axes' has shape \[2\], the input \[1\]"),
    ],
)
def test_values_that_do_not_fit(values: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        with_values(network(), values)


def test_a_value_that_does_not_fit_is_compared_with_named_sizes() -> None:
    made = model([node("Relu", "x", "y")], [("x", F, ["batch", 3])], [("y", F, None)])
    with pytest.raises(UsageError, match=r"has shape \[\], the input \[batch, 3\]"):
        with_values(made, {"x": 1.0})


def test_the_model_is_left_as_it_was() -> None:
    made = network()
    before = made.SerializeToString()
    with_values(made, {"k": 1})
    assert made.SerializeToString() == before
