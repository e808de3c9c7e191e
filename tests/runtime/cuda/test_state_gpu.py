"""State on a GPU: buffers that take turns, results of the unrolled run."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx.parser
import pytest

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
def test_state_takes_turns(shapes: Any) -> None:
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
    with pytest.raises(InputError, match="no state"):
        bound.reset({"x": x})
