"""Ranges with sizes that a model does not accept: the error names sizes that it accepts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx.parser
import pytest

import optdnn
from optdnn.errors import RunError, ShapeError, UsageError
from optdnn.ranges import DimRange
from optdnn.shapes import plan_sizes, plans
from optdnn.shapes.plan_sizes import working


def fits(rule: Callable[[Mapping[str, int]], bool]) -> Callable[[Mapping[str, int]], None]:
    def look(sizes: Mapping[str, int]) -> None:
        if not rule(sizes):
            raise ShapeError("no")

    return look


PROFILE = {"n": DimRange(1, 8, 100), "m": DimRange(2, 4, 6)}


@pytest.mark.parametrize(
    ("rule", "wanted"),
    [
        (lambda s: True, PROFILE),
        (lambda s: 5 <= s["n"] <= 77, {"n": DimRange(5, 8, 77), "m": DimRange(2, 4, 6)}),
        (lambda s: s["n"] == 8 and s["m"] < 6, {"n": DimRange(8, 8, 8), "m": DimRange(2, 4, 5)}),
        (lambda s: s["n"] * s["m"] <= 40, {"n": DimRange(8, 8, 8), "m": DimRange(4, 4, 4)}),  # not both in one call
        (lambda s: s["n"] == 1, {"n": DimRange(1, 1, 1), "m": DimRange(2, 4, 6)}),  # m keeps its optimum
        (lambda s: s["n"] == 1 and s["m"] < 4, {"n": DimRange(1, 1, 1), "m": DimRange(2, 2, 3)}),
        (lambda s: s["n"] == 33 and s["m"] == 4, {"n": DimRange(33, 33, 33), "m": DimRange(4, 4, 4)}),
        (lambda s: False, None),
    ],
)
def test_sizes_that_fit_around_the_optimum(rule: Any, wanted: Any) -> None:
    assert working(PROFILE, fits(rule)) == wanted


def test_the_search_ends_in_time() -> None:
    assert working(PROFILE, fits(lambda s: s["n"] > 3), seconds=-1.0) is None


GATHER = """<ir_version: 8, opset_import: ["": 17]> g (float[n] x, float[b, 2] z) => (float y, float[b, 2] w)
<int64 i = {3}> { y = Gather(x, i)  w = Relu(z) }"""
SPLIT = (
    """<ir_version: 8, opset_import: ["": 17]> g (float[n] x) => (float[k] y) <int64[1] s = {4}> { y = Split(x, s) }"""
)

LOOP = """<ir_version: 8, opset_import: ["": 17]> g (int64 trips, float[n] x) => (float[n] y) {
  go = Constant<value = bool {1}>()
  y = Loop<body = b (int64 i, bool c, float[m] a) => (bool d, float[m] e) { d = Identity(c)  e = Add(a, a) }>(trips, go, x)
}"""


@pytest.mark.parametrize(
    ("text", "shapes", "message", "hint"),
    [
        (GATHER, {"x": "1..8..16", "z": "0..2..4x2"}, "profile 0, at x=1, z=0x2: .*Gather index 3",
         "the model takes --shape x=4..8..16 --shape z=0..2..4x2"),
        (SPLIT, {"x": "1..4..9"}, "profile 0, at x=9: .*do not add up", "the model takes --shape x=4"),
        (SPLIT, {"x": "1..6..9"}, "profile 0, at x=6: .*do not add up", "the model takes --shape x=4"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("target", ["simulate", "reference", "cpu"])
def test_the_error_says_which_sizes_to_give(target: str, text: str, shapes: Any, message: str, hint: str) -> None:
    model = onnx.parser.parse_model(text)
    with pytest.raises(ShapeError, match=message) as caught:
        optdnn.build(model, target=target, shapes=shapes)
    assert caught.value.hint == hint
    given = dict(part.split("=", 1) for part in hint.removeprefix("the model takes --shape ").split(" --shape "))
    optdnn.build(model, target=target, shapes=given)


def test_a_second_profile_is_checked_and_named() -> None:
    shapes = [{"x": "4..8..16", "z": "1..2..4x2"}, {"x": "2..2..3", "z": "8..9..9x2"}]
    with pytest.raises(ShapeError, match=r"profile 1, at x=2, z=9x2: .*Gather index 3"):
        optdnn.build(onnx.parser.parse_model(GATHER), target="reference", shapes=shapes)


def test_a_profile_with_an_open_dimension_is_not_checked() -> None:
    engine = optdnn.build(onnx.parser.parse_model(GATHER), target="reference", shapes={"x": "1..8..16"})
    with pytest.raises(RunError, match="index 3 is out of bounds"):
        engine.run({"x": np.ones(2, np.float32), "z": np.ones((1, 2), np.float32)})


def test_a_network_with_a_loop_is_not_checked() -> None:
    model = onnx.parser.parse_model(LOOP)
    engine = optdnn.build(model, target="reference", shapes={"x": "1..4..8"})
    feeds = {"trips": np.int64(2), "x": np.arange(4, dtype=np.float32)}
    assert engine.run(feeds)["y"].tolist() == [0, 4, 8, 12]


def test_without_such_sizes_it_names_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_sizes, "SIZES", range(5, 7))
    with pytest.raises(ShapeError) as caught:
        optdnn.build(onnx.parser.parse_model(SPLIT), target="simulate", shapes={"x": "1..6..9"})
    assert caught.value.hint is not None
    assert "--shape NAME=MIN..OPT..MAX" in caught.value.hint


def test_a_pin_that_fits_no_node_ends_the_build_before_a_plan_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "finish", lambda *_: pytest.fail("a plan was made"))
    options: Any = {"target": "simulate", "shapes": {"x": "4..8..16", "z": "0..2..4x2"}}
    with pytest.raises(UsageError, match=r"^--pin 'Rleu' fits no node"):
        optdnn.build(onnx.parser.parse_model(GATHER), precision_map={"Rleu": "fp16"}, **options)
