"""Engines for ranges of shapes on a GPU: right results at every shape, shared constants and arena, a bounded number of graphs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.onnxnet import convnet

import optdnn
from optdnn.errors import InputError
from optdnn.runtime.plans import by_shape as plans

pytestmark = pytest.mark.hopper


def _image(n: int) -> dict[str, Any]:
    return {"x": np.random.default_rng(n).standard_normal((n, 3, 8, 8)).astype(np.float32)}


def test_any_batch_in_range(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans.Dispatching, "most", 3)
    want = optdnn.build(convnet(batch="n"), target="reference")
    optdnn.build(convnet(batch="n"), target="cuda:sm_90a", shapes={"x": "1..4..9x3x8x8"}).save(tmp_path / "e")
    context: Any = optdnn.load(tmp_path / "e").context()
    for n in (4, 1, 9, 2, 4, 3, 1):
        np.testing.assert_allclose(context.run(_image(n))["y"], want.run(_image(n))["y"], rtol=1e-3, atol=1e-4)
    assert len(context._contexts) == 3
    runners = context._runner
    ready = [*runners._ready.values(), *runners._made.values()]
    assert len(ready) == 5
    same = [set(r._loaded.constants.values()) for r in ready]
    assert set.intersection(*same)  # uploaded once
    assert len({c.memory.arena.pointer for c in context._contexts.values()}) == 1
    with pytest.raises(InputError, match="n is 10"):
        context.run(_image(10))


def test_device_arrays_of_any_shape() -> None:
    cupy = pytest.importorskip("cupy")
    engine = optdnn.build(convnet(batch="n"), target="cuda:sm_90a", shapes={"x": "1..4..9x3x8x8"})
    context: Any = engine.context()
    for n in (4, 7):
        given = {"x": cupy.asarray(_image(n)["x"])}
        want = context.run(_image(n))["y"]
        np.testing.assert_array_equal(cupy.asnumpy(context.run(given)["y"]), want)
        bound = context.bind(given)
        bound.run()
        np.testing.assert_array_equal(cupy.asnumpy(bound.outputs["y"]), want)
    with pytest.raises(InputError, match="n is 12"):
        context.run({"x": cupy.zeros((12, 3, 8, 8), np.float32)})
