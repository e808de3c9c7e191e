"""Loops without iterations: the rows that they stack have the declared sizes, also in buffers of the caller."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx.parser
import pytest

import optdnn
from optdnn.errors import InputError

NET = """<ir_version: 8, opset_import: ["": 17]> g (float[N, 4] x, int64 trips) => (float[N, 4] last, float[T, N, 4] rows{outputs})
<bool go = {{1}}> {{
    last, rows = Loop(trips, go, x) <body = b (int64 i, bool c, float[N, 4] h) => (bool c2, float[N, 4] h2, float[N, 4] e) {{
        c2 = Identity(c)  h2 = Tanh(h)  e = Neg(h2)
    }}>
    {more}
}}"""
ALONE = NET.format(outputs="", more="")
THEN = NET.format(outputs=", float[N, T, 4] turned", more="t = Transpose<perm = [1, 0, 2]>(rows)  turned = Relu(t)")


def feeds(n: int, trips: int) -> dict[str, Any]:
    x = np.random.default_rng(n).standard_normal((n, 4)).astype(np.float32)
    return {"x": x, "trips": np.array(trips, np.int64)}


@pytest.mark.parametrize("text", [ALONE, THEN])
@pytest.mark.parametrize("tactics", ["onnxruntime", "auto"])
def test_rows_of_no_iterations_have_the_declared_sizes(text: str, tactics: str) -> None:
    pytest.importorskip("onnxruntime", reason="the cpu extra is not installed")
    model = onnx.parser.parse_model(text)
    engine = optdnn.build(model, target="cpu", tactics=tactics, threads=1)
    reference = optdnn.build(model, target="reference")
    for n, trips in ((2, 0), (3, 2), (1, 0), (1, 0), (1, 0), (1, 0), (3, -1)):  # repeated calls take a shorter path
        given = feeds(n, trips)
        wanted = reference.run(given)
        assert wanted["rows"].shape == (max(trips, 0), n, 4)
        for name, a in engine.run(given).items():
            assert a.shape == wanted[name].shape
            np.testing.assert_allclose(a, wanted[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("text", [ALONE, THEN])
def test_buffers_for_rows_whose_number_depends_on_data(text: str) -> None:
    engine = optdnn.build(onnx.parser.parse_model(text), target="cpu", threads=1)
    for trips in (0, 3, 0):
        given, rows, last = feeds(2, trips), np.empty((trips, 2, 4), np.float32), np.empty((2, 4), np.float32)
        found = engine.run(given, out={"rows": rows, "last": last})
        assert found["rows"] is rows
        assert found["last"] is last
        for name, a in engine.run(given).items():
            np.testing.assert_array_equal(found[name], a)
    for trips, given_rows in ((2, 0), (0, 2), (3, 2)):
        with pytest.raises(InputError, match=rf"has shape \[{given_rows}, 2, 4\], the result \[{trips}, 2, 4\]"):
            engine.run(feeds(2, trips), out={"rows": np.empty((given_rows, 2, 4), np.float32)})
