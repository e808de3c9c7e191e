"""The models whose requests can share batches."""

from __future__ import annotations

import json

import onnx
import pytest

import optdnn
from optdnn.serving.facts import ModelFacts, facts_of

CASES = {
    "(float[N, 4] x) => (float[N, 4] y) { y = Relu(x) }": "",
    "(float[N, 4] x, float[N] z) => (float[N] y) { m = ReduceMax<keepdims=0, axes=[1]>(x) y = Add(m, z) }": "",
    "(float[N, 4] x) => (float[N, 4] y) { m = ReduceMean<axes=[0]>(x) y = Sub(x, m) }": "the first row of 'y' changes",
    "(float[N, 4] x) => (float[4, N] y) { y = Transpose(x) }": "is not one symbol",
    "(float[N, N] x) => (float[N, N] y) { y = Relu(x) }": "also in another dimension of 'x'",
    "(float[2, 4] x) => (float[2, 4] y) { y = Relu(x) }": "is not one symbol",
    "(float x) => (float y) { y = Relu(x) }": "is not one symbol",
}


@pytest.mark.parametrize("text", CASES)
def test_rows_that_depend_on_one_another_are_found(text: str) -> None:
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 13]> model {text}')
    found = facts_of(optdnn.build(model, target="reference"))
    assert CASES[text] in found.alone
    assert (found.batch == "N") == (not CASES[text])
    assert ModelFacts.from_plain(json.loads(json.dumps(found.to_plain()))) == found


def test_an_engine_of_plans_names_them() -> None:
    text = '<ir_version: 8, opset_import: ["" : 13]> model (float[N, M] x) => (float[N, M] y) { y = Relu(x) }'
    model = onnx.parser.parse_model(text)
    found = facts_of(optdnn.build(model, target="reference", shapes={"x": "?x1..2..4"}))
    assert (found.batch, found.alone) == ("N", "")
    dynamic = optdnn.build(model, target="simulate", shapes=[{"x": "1..2..4x3"}])
    found = facts_of(dynamic)
    assert found.batch == "N"
    assert ((2, 3),) in found.plans
