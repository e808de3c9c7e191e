"""Errors about tensors of unknown rank name the If whose branches give them."""

from __future__ import annotations

import onnx
import pytest

from optdnn.errors import ShapeError
from optdnn.importers.onnx import import_model

CHOSEN = """<ir_version: 8, opset_import: ["" : 19]> chosen (float[8, 4] x, bool c) => (v)
<int64[1] zero = {0}, int64[1] two = {2}>
{
    y = If (c) <
        then_branch = first () => (float[one, a, b] t) { t = Unsqueeze(x, zero) },
        else_branch = second () => (float[a, b] e) { e = Neg(x) }
    >
    READS
}"""
READS = {
    "top": "v, i = TopK(y, two)",
    "after others": "z = Relu(y) w = Neg(z) v, i = TopK(w, two)",
    "shape": "s = Shape(y) v = Squeeze(s)",
}


@pytest.mark.parametrize("reads", READS)
def test_branches_of_two_ranks(reads: str) -> None:
    with pytest.raises(ShapeError) as caught:
        import_model(onnx.parser.parse_model(CHOSEN.replace("READS", READS[reads])))
    assert "(If) give fp32[1, 8, 4] and fp32[8, 4]: make them tensors of one rank" in str(caught.value.hint)
    assert "--value NAME=1" in str(caught.value.hint)


def test_other_unknown_ranks_have_no_such_hint() -> None:
    text = """<ir_version: 8, opset_import: ["" : 19]> n (float[n] x, int64[r] s) => (v)
    <int64[1] two = {2}>
    { y = Reshape(x, s) v, i = TopK(y, two) }"""
    with pytest.raises(ShapeError) as caught:
        import_model(onnx.parser.parse_model(text))
    assert "branches" not in str(caught.value.hint)
