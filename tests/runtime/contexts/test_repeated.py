"""Repeated calls of small networks: when they begin, what they refuse, and that their results belong to the caller."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import optdnn
from optdnn.errors import InputError, RunError
from optdnn.runtime.contexts.repeated import LIMIT, REPEATS
from optdnn.runtime.contexts.stepwise import Context
from optdnn.types import Array

pytest.importorskip("onnxruntime")

WEIGHTS = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)


def network(nodes: Sequence[Any], x: tuple[Any, ...], outputs: Sequence[str], kind: int = TensorProto.FLOAT) -> Context:
    """A context of an engine with one ONNX Runtime session. "x" is the input, "w" holds :data:`WEIGHTS`."""
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", kind, x)],
        [helper.make_tensor_value_info(name, TensorProto.UNDEFINED, None) for name in outputs],
        [numpy_helper.from_array(WEIGHTS, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    context = optdnn.build(model, target="cpu", tactics="onnxruntime", threads=1).context()
    assert isinstance(context, Context)
    return context


def product() -> Context:
    """``y = x @ w`` and ``best``, for any number of rows."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["y"]),
        helper.make_node("ArgMax", ["y"], ["best"], axis=1, keepdims=0),
    ]
    return network(nodes, ("n", 4), ["best", "y"])


def rows(n: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal((n, 4)).astype(np.float32)


def prepared(n: int = 2) -> Context:
    """A context whose call for ``n`` rows is prepared."""
    context = product()
    for _ in range(REPEATS):
        assert context._repeated is None
        context.run({"x": rows(n)})
    assert context._repeated is not None
    return context


def refuse(*args: object) -> Any:
    raise AssertionError("the ordinary call ran")


def test_calls_of_the_same_shapes_become_repeated_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    context = prepared()
    monkeypatch.setattr(context, "_whole", refuse)
    kept = []
    for seed in range(4):
        x = rows(2, seed)
        results = context.run({"x": x})
        np.testing.assert_allclose(results["y"], x @ WEIGHTS, rtol=1e-5)
        np.testing.assert_array_equal(results["best"], (x @ WEIGHTS).argmax(1))
        assert list(results) == ["best", "y"]
        kept.append((x.copy(), x, results))
    for was, x, results in kept:  # neither inputs nor earlier results are overwritten
        np.testing.assert_array_equal(x, was)
        np.testing.assert_allclose(results["y"], was @ WEIGHTS, rtol=1e-5)
    arrays = [a for _, x, results in kept for a in (x, *results.values())]
    own = context._repeated.buffers() if context._repeated is not None else []
    for i, a in enumerate(arrays):
        assert not any(np.shares_memory(a, b) for b in (*arrays[:i], *own))
        assert a.flags.writeable


@pytest.mark.parametrize(
    ("feeds", "message"),
    [
        ({}, "'x' is missing"),
        ({"x": rows(2), "z": rows(2)}, "no input 'z'"),
        ({"z": rows(2)}, "'x' is missing"),
        ({"x": rows(2).astype(np.float64)}, "is fp64"),
        ({"x": rows(2).astype(">f4")}, "the engine takes fp32"),
        ({"x": rows(2)[None]}, "rank 3"),
        ({"x": rows(2).T}, "axis 1 is 2"),
        ([rows(2)], "must map names"),
    ],
)
def test_wrong_inputs_are_refused_as_in_other_calls(feeds: Any, message: str) -> None:
    context = prepared()
    with pytest.raises(InputError, match=message):
        context.run(feeds)
    np.testing.assert_allclose(context.run({"x": rows(2)})["y"], rows(2) @ WEIGHTS, rtol=1e-5)


def test_other_valid_inputs_are_accepted() -> None:
    context = prepared()
    x = rows(2)
    wide = np.zeros((4, 8), np.float32)
    wide[::2, ::2] = x
    readonly = x.copy()
    readonly.flags.writeable = False
    for a in (wide[::2, ::2], readonly, x.view(np.recarray), np.asfortranarray(x)):
        np.testing.assert_allclose(context.run({"x": a})["y"], x @ WEIGHTS, rtol=1e-5)
    np.testing.assert_allclose(context.run(MappingProxyType({"x": x}))["y"], x @ WEIGHTS, rtol=1e-5)
    given = np.empty((2, 3), np.float32)
    assert context.run({"x": x}, out={"y": given})["y"] is given


def test_other_shapes_run_and_take_over_once_they_repeat() -> None:
    context = prepared(2)
    first = context._repeated
    for n in (5, 2, 0, 5, 2):
        result = context.run({"x": rows(n)})
        np.testing.assert_allclose(result["y"], rows(n) @ WEIGHTS, rtol=1e-5)
        assert result["best"].shape == (n,)
    assert context._repeated is first
    for _ in range(REPEATS):
        context.run({"x": rows(5)})
    assert context._repeated is not first
    np.testing.assert_allclose(context.run({"x": rows(2)})["y"], rows(2) @ WEIGHTS, rtol=1e-5)


def test_large_and_empty_calls_are_not_prepared() -> None:
    for n in (0, LIMIT // (4 * 4)):
        context = product()
        for _ in range(2 * REPEATS):
            context.run({"x": rows(n)})
        assert context._repeated is None


def test_sizes_that_depend_on_data_are_not_prepared() -> None:
    context = network([helper.make_node("NonZero", ["x"], ["y"])], (4,), ["y"])
    for k in range(2 * REPEATS):
        x = np.array([1, 0, k % 2, 0], np.float32)
        assert context.run({"x": x})["y"].tolist() == [np.flatnonzero(x).tolist()]
    assert context.run({"x": np.zeros(4, np.float32)})["y"].shape == (1, 0)
    assert context._repeated is None


def test_positions_are_checked_in_each_call() -> None:
    context = network([helper.make_node("Gather", ["w", "x"], ["y"])], (2,), ["y"], TensorProto.INT64)
    for _ in range(2 * REPEATS):
        context.run({"x": np.array([0, 3])})
    assert context._repeated is None
    with pytest.raises(InputError):
        context.run({"x": np.array([0, 4])})


def test_a_failure_is_the_ordinary_one() -> None:
    nodes = [helper.make_node("Add", ["x", "x"], ["twice"]), helper.make_node("Gather", ["w", "twice"], ["y"])]
    context = network(nodes, (2,), ["y"], TensorProto.INT64)
    with pytest.raises(RunError) as ordinary:
        context.run({"x": np.array([0, 2])})
    for _ in range(REPEATS):
        context.run({"x": np.array([0, 1])})
    assert context._repeated is not None
    with pytest.raises(RunError) as repeated:
        context.run({"x": np.array([0, 2])})
    assert repeated.value.message == ordinary.value.message
    np.testing.assert_array_equal(context.run({"x": np.array([1, 0])})["y"], WEIGHTS[[2, 0]])


def test_buffers_are_poisoned() -> None:
    context = prepared()
    context.poison(0xFF)
    assert context._repeated is not None
    assert all(np.all(a.reshape(-1).view(np.uint8) == 0xFF) for a in context._repeated.buffers())
    np.testing.assert_allclose(context.run({"x": rows(2)})["y"], rows(2) @ WEIGHTS, rtol=1e-5)
