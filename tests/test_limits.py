"""Limits on reading: a test reaches each one; its error names it; and it can be raised."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from onnx import helper
from support.attacks import constant, model, node

from optdnn import limits
from optdnn.errors import ModelError, ShapeError
from optdnn.importers.onnx import import_model

TESTS = Path(__file__).parent


def chained(deep: int) -> bytes:
    """Functions that each call the next one."""
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("f", 1)]
    bodies = [[node(f"f{k + 1}", "a", "b", "f")] for k in range(deep - 1)] + [[node("Neg", "a", "b")]]
    functions = [helper.make_function("f", f"f{k}", ["a"], ["b"], body, opsets) for k, body in enumerate(bodies)]
    return model([node("f0", "x", "y", "f")], functions=functions)


def test_functions_call_one_another_to_a_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    import_model(chained(8))
    monkeypatch.setenv("OPTDNN_MAX_FUNCTION_NESTING", "7")
    with pytest.raises(ModelError, match=r"more than 7 deep(.|\n)*OPTDNN_MAX_FUNCTION_NESTING=N"):
        import_model(chained(8))


def test_a_tensor_has_a_largest_size(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = model([node("Add", "x,w", "y")], constant("w", np.ones((1, 4), np.float32)))
    result = model([node("Tile", "x,r", "y")], constant("r", np.array([5, 1])))
    for data in (weight, result):
        import_model(data)
    for data, most, error in ((weight, 15, ModelError), (result, 79, ShapeError)):
        monkeypatch.setenv("OPTDNN_MAX_TENSOR_BYTES", str(most))
        with pytest.raises(error, match="OPTDNN_MAX_TENSOR_BYTES=N"):
            import_model(data)
        monkeypatch.setenv("OPTDNN_MAX_TENSOR_BYTES", str(most + 1))
        import_model(data)


def test_the_json_of_a_request_has_a_largest_size(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("orjson", reason="the extra serve is not installed")
    from optdnn.serving.http_messages import read_json
    from optdnn.serving.refusals import TooLarge

    monkeypatch.setenv("OPTDNN_MAX_REQUEST_JSON_BYTES", "4")
    assert read_json(b"{ }") == {}
    with pytest.raises(TooLarge, match="has 5 bytes") as caught:
        read_json(b"{   }")
    assert "OPTDNN_MAX_REQUEST_JSON_BYTES=N" in str(caught.value.hint)


@pytest.mark.parametrize("limit", limits.LIMITS, ids=lambda limit: limit.name)
def test_a_test_meets_each_limit(limit: limits.Limit) -> None:
    """Some test sets or names each limit."""
    named = re.compile(rf"\b({limit.variable}|limits\.{limit.name.upper()})\b")
    assert any(named.search(p.read_text(encoding="utf-8")) for p in TESTS.rglob("*.py"))
