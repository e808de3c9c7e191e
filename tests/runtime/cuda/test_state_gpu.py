"""State on a GPU: alternating buffers, and results equal to those of the unrolled run."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx.parser
import pytest
from support.decoder import decoder, empty, generated, states, tokens

import optdnn
from optdnn.errors import InputError
from optdnn.runtime.cuda.usable import why_not

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]

CELL = onnx.parser.parse_model(
    """<ir_version: 8, opset_import: ["": 17]>
    cell (float[n, 4] x, float[n, 4] h) => (float[n, 4] y, float[n, 4] next)
    <float[4, 4] w = {0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, -0.1, -0.2, -0.3, -0.4, 0.9, 0.1, 0.2, 0.3}>
    { a = MatMul(h, w)  b = Add(a, x)  next = Tanh(b)  y = Neg(next) }"""
)


@pytest.mark.parametrize("shapes", [{"x": (1, 4), "h": (1, 4)}, {"x": "1..1..2x4", "h": "1..1..2x4"}])
def test_state_alternates_between_two_arrays(shapes: Any) -> None:
    cupy = pytest.importorskip("cupy")
    tokens = np.random.default_rng(0).standard_normal((6, 1, 4)).astype(np.float32)
    context: Any = optdnn.build(CELL, target="cuda:sm_90a", shapes=shapes).context()
    oracle = optdnn.build(CELL, target="reference")
    x, h = cupy.zeros((1, 4), np.float32), np.full((1, 4), 0.25, np.float32)
    bound = context.bind({"x": x, "h": cupy.asarray(h)}, state={"next": "h"})
    seen, state = [], h
    for token in tokens:
        x[:] = cupy.asarray(token)
        results = bound.run()
        want = oracle.run({"x": token, "h": state})
        state = want["next"]
        np.testing.assert_allclose(cupy.asnumpy(results["y"]), want["y"], rtol=1e-3, atol=1e-4)
        assert bound.state["h"] is results["next"]
        seen.append(results["next"].data.ptr)
    assert len(set(seen)) == 2
    assert seen[0::2] == [seen[0]] * 3
    bound.reset()
    x[:] = cupy.asarray(tokens[0])
    want = oracle.run({"x": tokens[0], "h": h})
    np.testing.assert_allclose(cupy.asnumpy(bound.run()["y"]), want["y"], rtol=1e-3, atol=1e-4)
    with pytest.raises(InputError, match="not state"):
        bound.reset({"x": x})


def _bound(engine: Any, model: Any, cupy: Any) -> Any:
    given = {"token": cupy.zeros((1, 1), np.int64), "at": cupy.zeros(1, np.int64)}
    caches = {name: cupy.asarray(a) for name, a in empty(model, 0).items()}
    return given, engine.context().bind({**given, **caches}, state=states())


@pytest.mark.parametrize("growing", [False, True])
def test_a_decoders_caches_are_state(growing: bool) -> None:
    cupy = pytest.importorskip("cupy")
    model = decoder(grows=growing)
    want = generated(optdnn.build(model, target="reference"), model, 6)
    shapes = dict.fromkeys(states().values(), "1x2x0..4..5x16") if growing else None
    engine = optdnn.build(model, target="cuda:sm_90a", shapes=shapes, tactics="heuristic")
    given, bound = _bound(engine, model, cupy)
    addresses = []
    for turn in range(2):
        for k, token in enumerate(tokens(6)):
            given["at"][:], given["token"][:] = k, cupy.asarray(token)
            results = bound.run()
            np.testing.assert_allclose(cupy.asnumpy(results["logits"]), want[k], rtol=2e-3, atol=1e-3)
            assert bound.state["key.0"] is results["new.key.0"]
            addresses.append(results["new.key.0"].data.ptr)
        if not turn:
            bound.reset()
    if growing:
        assert results["new.key.0"].shape == (1, 2, 6, 16)
        assert len(set(addresses[:5])) == 2  # two arrays of the largest size alternate
        with pytest.raises(InputError, match="held is 6"):
            bound.run()
    else:
        assert len(set(addresses)) == 1  # one array and one graph: new rows are written in place


def test_a_cache_may_be_its_own_successor_and_nothing_else_overlaps() -> None:
    cupy = pytest.importorskip("cupy")
    model = decoder()
    engine = optdnn.build(model, target="cuda:sm_90a", tactics="heuristic")
    context: Any = engine.context()
    caches = {name: cupy.asarray(a) for name, a in empty(model, 0).items()}
    feeds = {"token": cupy.full((1, 1), 3), "at": cupy.zeros(1, np.int64), **caches}
    want = context.run({n: cupy.asnumpy(a) for n, a in feeds.items()})
    results = context.run(feeds, out={f"new.{name}": a for name, a in caches.items()})
    for name, array in want.items():
        np.testing.assert_allclose(cupy.asnumpy(results[name]), array, rtol=1e-5, atol=1e-6)
    with pytest.raises(InputError, match=r"the buffer for 'new.key.0' overlaps that for 'value.0'"):
        context.run(feeds, out={"new.key.0": caches["value.0"]})


def test_a_recurrent_layers_state_is_carried() -> None:
    cupy = pytest.importorskip("cupy")
    rng = np.random.default_rng(0)
    size, width = 64, 32
    weights = [rng.standard_normal((1, 4 * size, n)).astype(np.float32) / 8 for n in (width, size)]
    text = f"""<ir_version: 8, opset_import: ["": 17]>
    g (float[3, 1, {width}] x, float[1, 1, {size}] h, float[1, 1, {size}] c)
    => (float[3, 1, 1, {size}] y, float[1, 1, {size}] hn, float[1, 1, {size}] cn)
    {{ y, hn, cn = LSTM<hidden_size = {size}>(x, w, r, , , h, c) }}"""
    model = onnx.parser.parse_model(text)
    model.graph.initializer.extend(onnx.numpy_helper.from_array(a, n) for a, n in zip(weights, "wr", strict=True))
    oracle = optdnn.build(model, target="reference")
    context: Any = optdnn.build(model, target="cuda:sm_90a", precision="fp16", io_dtype="fp16").context()
    zero = np.zeros((1, 1, size), np.float32)
    x = cupy.zeros((3, 1, width), np.float16)
    start = cupy.zeros((1, 1, size), np.float16)
    bound = context.bind({"x": x, "h": start, "c": start.copy()}, state={"hn": "h", "cn": "c"})
    h = c = zero
    for _ in range(4):
        part = rng.standard_normal((3, 1, width)).astype(np.float32)
        x[:] = cupy.asarray(part)
        want = oracle.run({"x": part, "h": h, "c": c})
        h, c = want["hn"], want["cn"]
        results = bound.run()
        for name in ("y", "hn", "cn"):
            np.testing.assert_allclose(cupy.asnumpy(results[name]), want[name], rtol=0, atol=5e-3)
