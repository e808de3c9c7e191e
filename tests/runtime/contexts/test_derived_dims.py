"""Inputs with dimensions computed from symbols of other inputs, as in exported decoders: past + length."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
from support.derived import RANGES, TOTAL, decoder, feeds

import optdnn
from optdnn.errors import InputError, ShapeError, UsageError
from optdnn.importers.onnx import import_model
from optdnn.ranges import input_shapes
from optdnn.runtime.contexts.feeds import random_feeds
from optdnn.runtime.contexts.signature import Signature
from optdnn.runtime.cuda.memory.state import _largest
from optdnn.types import FP32, INT64, TensorSpec


def by_onnxruntime(model: onnx.ModelProto, given: dict[str, Any]) -> list[Any]:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return list(session.run(None, given))


@pytest.mark.parametrize("target", ["simulate", "cpu", "reference"])
def test_a_decoder_needs_only_the_sizes_of_its_symbols(target: str, tmp_path: Path) -> None:
    model = decoder()
    optdnn.build(model, target=target, shapes=RANGES).save(tmp_path / "e")
    engine = optdnn.load(tmp_path / "e")
    assert [str(s) for s in engine.inputs] == [
        f"mask: int64[1, {'length + past_length'}]",
        "ids: int64[1, length]",
        "past: fp32[1, 2, past_length, 4]",
    ]
    assert [set(p) for p in engine.profiles] == [{"length", "past_length"}]
    for past, length in ((3, 2), (0, 6), (8, 1)):
        given = feeds(past, length)
        for want, (name, got) in zip(by_onnxruntime(model, given), engine.run(given).items(), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5, err_msg=f"{name} at {past}, {length}")
    wrong = re.escape(
        "input 'mask' has shape [1, 6]; the engine takes mask: int64[1, length + past_length] (axis 1 is 6, but "
        "length + past_length is 5: length is 2 on axis 1 of input 'ids' and past_length is 3 on axis 2 of input 'past')"
    )
    with pytest.raises(InputError, match=wrong):
        engine.run(feeds(3, 2, total=6))
    with pytest.raises(InputError, match="past_length is 9 on axis 2 of input 'past', outside of 0 to 8"):
        engine.run(feeds(9, 1))


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (
            {**RANGES, "mask": "1x1..5..15"},
            "axis 1 of input 'mask' is length + past_length: the shape given makes it 15 at the maximum, but it is 14 with "
            "length = 1..2..6, past_length = 0..3..8",
        ),
        ({**RANGES, "mask": "1x0..5..14"}, "makes it 0 at the minimum, but it is 1 with"),
        ({**RANGES, "mask": "1x1..6..14"}, "makes it 6 at the optimum, but it is 5 with"),
        (
            {"ids": "1x1", "past": "1x2x3x4", "mask": "1x5"},
            "makes it 5, but it is 4 with length = 1, past_length = 3",
        ),
        (
            {"ids": "1x1", "mask": "1x1..5..9"},
            "axis 1 of input 'mask' is length + past_length, the shape given has 1..5..9 there, and none gives past_length",
        ),
    ],
)
def test_contradictions_are_refused_when_built(shapes: dict[str, str], message: str, first: bool) -> None:
    with pytest.raises(ShapeError, match=re.escape(message)):
        optdnn.build(decoder(first=first), target="simulate", shapes=shapes)


def test_each_profile_is_checked_with_its_own_symbols() -> None:
    shapes = [
        {"ids": "1x1", "past": "1x2x1..4..8x4", "mask": "1x2..5..9"},
        {"ids": "1x1..4..6", "past": "1x2x0x4", "mask": "1x1..4..6"},
    ]
    graph = import_model(decoder(), shapes=input_shapes(shapes))
    assert [{n: str(r) for n, r in p.items()} for p in graph.profiles] == [
        {"length": "1..1..1", "past_length": "1..4..8"},
        {"length": "1..4..6", "past_length": "0..0..0"},
    ]
    shapes[1]["mask"] = "1x1..4..7"
    with pytest.raises(ShapeError, match="makes it 7 at the maximum, but it is 6"):
        import_model(decoder(), shapes=input_shapes(shapes))


def test_sizes_that_no_array_can_have() -> None:
    with pytest.raises(
        ShapeError, match=r"axis 1 of input 'mask' is past_length - 2, which is -1 with past_length = 1$"
    ):
        import_model(decoder("past_length - 2"), shapes=input_shapes({"past": "1x2x1x4"}))
    with pytest.raises(
        ShapeError, match="does not go with length = 3, past_length = 0: division of a dimension by zero"
    ):
        import_model(decoder("length // past_length"), shapes=input_shapes({"ids": "1x3", "past": "1x2x0x4"}))


def test_a_range_is_requested_for_the_input_that_has_the_symbol_alone() -> None:
    with pytest.raises(UsageError, match="dimension past_length of input 'past' has no range") as found:
        optdnn.build(decoder(), target="simulate", shapes={"ids": "1x1..2..6"})
    assert found.value.hint is not None
    assert "--shape past=" in found.value.hint
    with pytest.raises(UsageError, match=r"not fixed are batch, length, past_length\n") as found:
        optdnn.build(decoder(), target="simulate")
    assert found.value.hint is not None
    assert "--shape 'mask=1..8..32x?' --shape ids=1..8..32x1..128..512 --shape past=" in found.value.hint
    assert "past=1..8..32x2x1..128..512x4 (in Python: " in found.value.hint  # a cache of heads is no image


def test_a_symbol_that_occurs_only_in_expressions_is_not_solved_for() -> None:
    graph = import_model(decoder("length + other"))
    assert list(graph.symbols()) == ["batch", "length + other", "length", "past_length"]
    engine = optdnn.build(decoder("length + other"), target="cpu")
    assert engine.run(feeds(3, 2))["y"].shape == (1, 2, 8)  # the length of the mask is free, since "other" has no size


@pytest.mark.parametrize("text", ["past_length x length", "total; past_length", "past_length/2"])
def test_a_text_that_is_no_arithmetic_is_a_symbol(text: str) -> None:
    graph = import_model(decoder(text), shapes=input_shapes({"mask": "1x1..5..14"}))
    assert graph.profiles[0].keys() == {text}


def test_an_expression_with_one_symbol_of_a_known_size() -> None:
    graph = import_model(decoder(), shapes=input_shapes({"ids": "1x1"}))
    mask = graph.op(graph.inputs[0]).outputs[0].type
    assert str(mask) == "int64[1, past_length + 1]"


SPECS = (TensorSpec("m", FP32, ("(n + 1)*2", 3)), TensorSpec("x", FP32, ("n",)), TensorSpec("z", FP32, ("6//n",)))


def test_a_signature_solves_symbols_first() -> None:
    signature = Signature(SPECS, ())
    arrays = [np.zeros((6, 3), np.float32), np.zeros(2, np.float32), np.zeros(3, np.float32)]
    assert signature.sizes(arrays) == {"n": 2}
    with pytest.raises(InputError, match=re.escape("(axis 0 is 6, but (n + 1)*2 is 8: n is 3 on axis 0 of input 'x')")):
        signature.sizes([arrays[0], np.zeros(3, np.float32), np.zeros(2, np.float32)])
    with pytest.raises(InputError, match="axis 0 is 3, but 6//n is division of a dimension by zero: n is 0"):
        signature.sizes([np.zeros((2, 3), np.float32), np.zeros(0, np.float32), arrays[2]])


def test_an_engine_whose_profiles_have_a_range_of_such_a_name() -> None:
    """Engines whose profiles have a range for the whole expression, a symbol then, keep its meaning."""
    ranges = optdnn.DimRange(1, 2, 4)
    signature = Signature(SPECS[:2], (), [{"n": ranges, "(n + 1)*2": ranges}])
    assert signature.sizes([np.zeros((3, 3), np.float32), np.zeros(2, np.float32)]) == {"n": 2, "(n + 1)*2": 3}


def test_random_inputs_follow_from_given_sizes_and_arrays() -> None:
    made = random_feeds(SPECS, sizes={"n": 3})
    assert [a.shape for a in made.values()] == [(8, 3), (3,), (2,)]
    made = random_feeds(SPECS, given={"x": np.zeros(2, np.float32)})
    assert {n: a.shape for n, a in made.items()} == {"m": (6, 3), "z": (3,)}
    with pytest.raises(UsageError, match=r"no input has a dimension \(n \+ 1\)\*2; there are n"):
        random_feeds(SPECS, sizes={"(n + 1)*2": 3})
    with pytest.raises(UsageError, match="negative dimension at these sizes"):
        random_feeds([SPECS[1], TensorSpec("y", FP32, ("n - 5",))])


def test_a_session_takes_overrides_by_the_expressions_of_the_model() -> None:
    model = decoder().SerializeToString()
    sizes = {"batch": 1, "length": 2, "past_length": 3, TOTAL: 5}
    session = optdnn.InferenceSession(model, optdnn.SessionOptions(free_dimensions=sizes), target="reference")
    assert [i.shape for i in session.get_inputs()] == [[1, 5], [1, 2], [1, 2, 3, 4]]
    with pytest.raises(ShapeError, match="makes it 6, but it is 5 with length = 2, past_length = 3"):
        optdnn.InferenceSession(model, optdnn.SessionOptions(free_dimensions={**sizes, TOTAL: 6}))
    with pytest.raises(UsageError, match="no input has a dimension 'length \\+ 1'"):
        optdnn.InferenceSession(model, optdnn.SessionOptions(free_dimensions={"length + 1": 6}))


def test_state_has_room_for_its_largest_size() -> None:
    """A growing state on a GPU gets memory for the largest sizes of its symbols."""
    spec = TensorSpec("m", FP32, ("length + past_length", 4))
    others = (TensorSpec("a", FP32, ("length",)), TensorSpec("b", FP32, ("past_length",)))
    ranges = [{"length": optdnn.DimRange(1, 2, 6), "past_length": optdnn.DimRange(0, 3, 8)}]
    assert _largest(spec, Signature((spec, *others), (), ranges)) == 14 * 4 * 4


def test_inputs_of_sampling_fit_every_size() -> None:
    """A random row may lie outside of a short sequence, and a random probability below 0."""
    made = random_feeds([TensorSpec("sample.row", INT64, (2,)), TensorSpec("sample.top_p", FP32, (2,))])
    assert {n: a.tolist() for n, a in made.items()} == {"sample.row": [0, 0], "sample.top_p": [1, 1]}
    assert made["sample.row"].dtype == INT64
