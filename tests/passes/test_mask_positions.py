"""mask_positions: assignments by masks, as PyTorch's exporters write them."""

from __future__ import annotations

import numpy as np
import pytest
from support.check import check_pass, check_refused, from_text

from optdnn.ir.evaluate import evaluate
from optdnn.ir.graph import STRUCTURAL, Graph, Value
from optdnn.passes.base import PassContext
from optdnn.passes.masked_rows import MaskedRows

GPU = PassContext(target="cuda:sm_90a")
CONSTANTS = """<float zero = {0}, int64 begin = {0}, int64[1] first = {0}, int64[1] flat = {-1}, float low = {0.25},
 int64[2] rest = {2, 8}, int64[3] wide = {6, 2, 8}, int64[3] three = {6, 1, 1}, float[9] given = {1, 2, 3, 4, 5, 6, 7, 8, 9}>"""
TORCHSCRIPT = f"""<ir_version: 9, opset_import: ["": 17]>
g (float[2,3,4] x, float[2,3,4] y) => (float[2,3,4] z) {CONSTANTS} {{
  mask = Greater(x, zero) i = NonZero(mask) read = Transpose<perm = [1, 0]>(i)
  write = Transpose<perm = [1, 0]>(i) taken = GatherND(x, read) made = Exp(taken)
  sizes = Shape(write) n = Gather(sizes, begin) end = Unsqueeze(n, first) rows = Slice(made, first, end, first)
  z = ScatterND(y, write, rows) }}"""
TORCH_EXPORT = f"""<ir_version: 9, opset_import: ["": 18]>
g (float[6,2,8] x, float[6] size) => (float[6,2,8] z) {CONSTANTS} {{
  mask = Greater(size, zero) i = NonZero(mask) read = Transpose<perm = [1, 0]>(i) view = Reshape(mask, three)
  repeated = Expand(view, wide) j = NonZero(repeated) write = Transpose<perm = [1, 0]>(j)
  taken = GatherND(x, read) made = Relu(taken) counted = Cast<to = 7>(mask) n = ReduceSum(counted)
  shape = Concat<axis = 0>(n, rest) whole = Expand(made, shape) rows = Reshape(whole, flat) z = ScatterND(x, write, rows) }}"""
CONSTANT = f"""<ir_version: 9, opset_import: ["": 18]>
g (float[2,3,4] x) => (float[2,3,4] z) {CONSTANTS} {{
  mask = Greater(x, zero) i = NonZero(mask) write = Transpose<perm = [1, 0]>(i) m = Reshape(mask, flat)
  counted = Cast<to = 7>(m) n = ReduceSum(counted) rows = Expand(low, n) z = ScatterND(x, write, rows) }}"""


def _computing(graph: Graph) -> dict[str, int]:
    return {kind: n for kind, n in graph.kinds().items() if kind not in STRUCTURAL}


def test_an_assignment_of_torchscript() -> None:
    after, _ = check_pass(MaskedRows(), TORCHSCRIPT, changes=1, rules={"masked_rows": 1}, context=GPU)
    assert _computing(after) == {"Greater": 1, "Where": 2, "Exp": 1}


def test_rows_of_a_mask_with_several_axes() -> None:
    """A product computes all rows of the flat tensor."""
    text = TORCHSCRIPT.replace("float[2,3,4] x", "float[2,3,4,8] x, float[8,4] w").replace(
        "float[2,3,4] y", "float[2,3,4,4] y"
    )
    text = text.replace("float[2,3,4] z", "float[2,3,4,4] z").replace("made = Exp(taken)", "made = MatMul(taken, w)")
    text = text.replace(
        "mask = Greater(x, zero)", "score = ReduceMax<axes = [3], keepdims = 0>(x) mask = Greater(score, zero)"
    )
    after, _ = check_pass(MaskedRows(), text, changes=1, context=GPU)
    assert after.kinds()["Reshape"] == 4  # the mask twice, the rows, and the result
    assert "NonZero" not in after.kinds()


def test_an_assignment_of_torch_export() -> None:
    rules = {"positions_count": 1, "expand_to_positions": 1, "masked_rows": 1}
    after, _ = check_pass(MaskedRows(), TORCH_EXPORT, changes=3, rules=rules, context=GPU)
    assert not {"NonZero", "ScatterND", "Expand", "ReduceSum"} & after.kinds().keys()
    assert all(op.outputs[0].type.is_static for op in after.ops())


def test_an_assignment_of_a_constant() -> None:
    after, _ = check_pass(MaskedRows(), CONSTANT, changes=2, context=GPU)
    assert _computing(after) == {"Greater": 1, "Where": 1}


@pytest.mark.parametrize("text", [TORCHSCRIPT, TORCH_EXPORT, CONSTANT])
@pytest.mark.parametrize("fill", [-1.0, 1.0])
def test_no_position_and_all_positions(text: str, fill: float) -> None:
    graph = from_text(text)
    after = graph.copy()
    MaskedRows()(after, GPU)
    feeds = {
        graph.output(v).name: np.full(graph.type(v).static_shape, fill, np.float32)
        for v in (Value(i) for i in graph.inputs)
    }
    np.testing.assert_array_equal(evaluate(after, feeds)["z"], evaluate(graph, feeds)["z"])


def test_values_that_depend_on_other_rows_are_refused() -> None:
    """``y[mask] = cumsum(x[mask])``."""
    text = TORCHSCRIPT.replace("made = Exp(taken)", "made = CumSum(taken, begin)")
    check_refused(MaskedRows(), text, because="does not compute each row", context=GPU)


def test_positions_in_a_larger_tensor_are_no_candidates() -> None:
    text = TORCHSCRIPT.replace("float[2,3,4] y", "float[4,3,4] y").replace("float[2,3,4] z", "float[4,3,4] z")
    graph = from_text(text)
    assert "masked_rows" not in {f.rule for f in MaskedRows()(graph, GPU).fired}
    assert "ScatterND" in graph.kinds()


def test_a_sum_that_is_also_a_number_stays() -> None:
    """The mean of selected elements divides by the sum of the mask."""
    text = CONSTANT.replace("float[2,3,4] z)", "float[2,3,4] z, int64[1] n)")
    after = from_text(text)
    MaskedRows()(after, GPU)
    assert after.kinds()["ReduceSum"] == 1
    assert "NonZero" not in after.kinds()
