"""Networks whose outputs have a rank that a size decides: an If that removes an axis only if its size is 1, as PyTorch's
exporter writes ``squeeze`` of a dynamic axis."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import optdnn
from optdnn.errors import RunError, ShapeError, UnsupportedError

SQUEEZED = """<ir_version: 8, opset_import: ["" : 19]> squeezed (float[n, 3, 4] x) => (DECLARED y)
<int64 zero = {0}, int64[1] axis = {0}, int64 one = {1}>
{
    s = Shape(x)
    size = Gather(s, zero)
    single = Equal(size, one)
    z = If (single) <
        then_branch = first () => (float[three, four] t) { t = Squeeze(x, axis) },
        else_branch = second () => (float[k, three, four] e) { e = Identity(x) }
    >
    y = Neg(z)
}"""


def squeezed(declared: str) -> onnx.ModelProto:
    """The negative of ``x``, without its first axis if that has size 1. ``declared``: the type of the output."""
    model = onnx.parser.parse_model(SQUEEZED.replace("DECLARED", declared))
    if declared == "float":
        model.graph.output[0].type.tensor_type.ClearField("shape")
    return model


@pytest.mark.parametrize("declared", ["float", "float[a, b]", "float[3, b]", "float[a, b, c]", "float[2, 3, 4]"])
@pytest.mark.parametrize("optimum", [1, 2])
def test_plans_for_each_size_have_the_rank_that_the_nodes_compute(declared: str, optimum: int, tmp_path: Path) -> None:
    made = optdnn.build(squeezed(declared), target="simulate", shapes={"x": f"1..{optimum}..4x3x4"})
    made.save(tmp_path / "e.engine")
    engine = optdnn.load(tmp_path / "e.engine")
    assert len(engine.outputs[0].shape) == 1 + optimum
    for n in (1, 2, 3):
        x = np.random.default_rng(n).standard_normal((n, 3, 4)).astype(np.float32)
        np.testing.assert_array_equal(engine.run({"x": x})["y"], -x[0] if n == 1 else -x)


def test_profiles_that_give_an_output_two_ranks_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"output 'y' has 2 axes for x=1x3x4, but 3 for x=3x3x4") as caught:
        optdnn.build(squeezed("float[a, b]"), target="simulate", shapes=[{"x": "1x3x4"}, {"x": "2..3..4x3x4"}])
    assert "an engine for each of these profiles" in str(caught.value.hint)


def test_one_program_for_all_sizes_needs_a_rank() -> None:
    with pytest.raises(
        UnsupportedError, match=r"output 'y' has an unknown rank: the branches of .* fix what decides: a size"
    ):
        optdnn.build(squeezed("float"), target="reference")


def test_a_size_that_contradicts_the_declared_rank_ends_the_run() -> None:
    engine = optdnn.build(squeezed("float[a, b]"), target="reference")
    x = np.ones((1, 3, 4), np.float32)
    np.testing.assert_array_equal(engine.run({"x": x})["y"], -x[0])
    with pytest.raises(RunError, match=r"float32\[2, 3, 4\]; it should be fp32\[\?, \?\]") as caught:
        engine.run({"x": np.ones((2, 3, 4), np.float32)})
    assert "the model may declare another shape" in str(caught.value.hint)
