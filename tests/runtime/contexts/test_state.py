"""State between calls: recurrent networks and KV caches whose outputs are inputs of the next call, in place."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx.parser
import pytest

import optdnn
from optdnn.errors import InputError

CELL = onnx.parser.parse_model(
    """<ir_version: 8, opset_import: ["": 17]>
    cell (float[1, 4] x, float[1, 4] h) => (float[1, 4] y, float[1, 4] next)
    <float[4, 4] w = {0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, -0.1, -0.2, -0.3, -0.4, 0.9, 0.1, 0.2, 0.3}>
    { a = MatMul(h, w)  b = Add(a, x)  next = Tanh(b)  y = Neg(next) }"""
)
CACHE = onnx.parser.parse_model(
    """<ir_version: 8, opset_import: ["": 17]>
    cache (float[1, 3] token, float[n, 3] past) => (float[1, 3] y, float[m, 3] present)
    { present = Concat<axis = 0>(past, token)  y = ReduceSum<keepdims = 1>(present, axes) }"""
)
CACHE.graph.initializer.append(onnx.helper.make_tensor("axes", 7, [1], [0]))
TOKENS = np.random.default_rng(0).standard_normal((6, 1, 4)).astype(np.float32)


def unrolled(h: Any) -> list[Any]:
    engine = optdnn.build(CELL, target="reference")
    found = []
    for x in TOKENS:
        results = engine.run({"x": x, "h": h})
        h = results["next"]
        found.append(results["y"])
    return found


@pytest.mark.parametrize("target", ["reference", "cpu", "simulate"])
def test_recurrent_state_is_carried_in_place(target: str) -> None:
    context = optdnn.build(CELL, target=target).context()
    x, h = np.empty((1, 4), np.float32), np.full((1, 4), 0.25, np.float32)
    bound: Any = context.bind({"x": x, "h": h}, state={"next": "h"})
    addresses, want = [], unrolled(h)
    for token, expected in zip(TOKENS, want, strict=True):
        x[:] = token
        results = bound.run()
        np.testing.assert_allclose(results["y"], expected, rtol=1e-5, atol=1e-6)
        assert bound.state["h"] is results["next"]  # this run's result is the next run's input
        addresses.append(results["next"].ctypes.data)
    assert addresses[0::2] == [addresses[0]] * 3  # two buffers alternate
    assert addresses[1::2] == [addresses[1]] * 3
    assert np.all(h == 0.25)  # the caller's array is not changed
    bound.reset()
    x[:] = TOKENS[0]
    np.testing.assert_allclose(bound.run()["y"], want[0], rtol=1e-5, atol=1e-6)
    bound.reset({"h": np.zeros((1, 4), np.float32)})
    np.testing.assert_allclose(bound.run()["y"], unrolled(np.zeros((1, 4), np.float32))[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("runs", range(1, 5))
def test_state_begins_again_after_any_number_of_runs(runs: int) -> None:
    x, h = TOKENS[0].copy(), np.full((1, 4), 0.25, np.float32)
    bound: Any = optdnn.build(CELL, target="simulate").context().bind({"x": x, "h": h}, state={"next": "h"})
    found = []
    for count in (runs, 5):
        bound.reset()
        found.append([bound.run()["y"].copy() for _ in range(count)])
    np.testing.assert_array_equal(found[0], found[1][:runs])


@pytest.mark.parametrize("target", ["reference", "cpu", "simulate"])
def test_a_cache_that_grows(target: str) -> None:
    shapes = {"past": "0..1..8x3"} if target == "simulate" else None
    context = optdnn.build(CACHE, target=target, shapes=shapes).context()
    token = np.empty((1, 3), np.float32)
    bound: Any = context.bind({"token": token, "past": np.zeros((1, 3), np.float32)}, state={"present": "past"})
    for k in range(4):
        token[:] = k + 1
        results = bound.run()
        assert results["present"].shape == (k + 2, 3)
        assert bound.state["past"] is results["present"]
        np.testing.assert_allclose(results["y"], np.full((1, 3), (k + 1) * (k + 2) / 2))


def test_buffers_and_inputs_are_read_where_they_are() -> None:
    context = optdnn.build(CELL, target="reference").context()
    x, h, y = (np.zeros((1, 4), np.float32) for _ in range(3))
    bound: Any = context.bind({"x": x, "h": h}, {"y": y})
    assert not bound.run()["y"].any()
    x[:] = 1
    assert bound.run()["y"] is y
    np.testing.assert_allclose(y, -np.tanh(x))


@pytest.mark.parametrize(
    ("arguments", "because"),
    [
        ({"state": ["next", "h"]}, "state must map names of outputs to names of inputs, not list"),
        ({"state": {"after": "h"}}, r"there is no output 'after'\n.*y, next"),
        ({"state": {"next": "z"}}, r"there is no input 'z'\n.*x, h"),
        (
            {"state": {"next": "h"}, "outputs": {"next": np.zeros((1, 4), np.float32)}},
            "its buffers are the binding's own",
        ),
        ({"state": {"next": "h", "y": "h"}}, "outputs 'next' and 'y' are both state of input 'h'"),
        ({"outputs": {"z": np.zeros((1, 4), np.float32)}}, "there is no output 'z'"),
    ],
)
def test_refusals(arguments: dict[str, Any], because: str) -> None:
    context = optdnn.build(CELL, target="reference").context()
    feeds = {"x": np.zeros((1, 4), np.float32), "h": np.zeros((1, 4), np.float32)}
    with pytest.raises(InputError, match=because):
        context.bind(feeds, **arguments)  # type: ignore[attr-defined]


def test_more_refusals() -> None:
    context: Any = optdnn.build(CELL, target="reference").context()
    x = np.zeros((1, 4), np.float32)
    with pytest.raises(InputError, match="input 'h' is missing"):
        context.bind({"x": x}, state={"next": "h"})
    with pytest.raises(InputError, match="input 'x' is not C-contiguous"):
        context.bind({"x": np.zeros((1, 8), np.float32)[:, ::2], "h": x})
    bound = context.bind({"x": x, "h": x.copy()}, state={"next": "h"})
    with pytest.raises(InputError, match="'x' is not state; there are h"):
        bound.reset({"x": x})
    text = '<ir_version: 8, opset_import: ["": 17]> g (float[2] x) => (int64[2] y) { y = Cast<to = 7>(x) }'
    other: Any = optdnn.build(onnx.parser.parse_model(text), target="reference").context()
    with pytest.raises(InputError, match=r"state 'y' -> 'x': the output is y: int64\[2\], the input x: fp32\[2\]"):
        other.bind({"x": np.zeros(2, np.float32)}, state={"y": "x"})
