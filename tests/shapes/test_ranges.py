"""Shapes with ranges: their text, the forms in Python, profiles; and their use in engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import pytest
from support.onnxnet import convnet

import optdnn
from optdnn.config import BuildOptions
from optdnn.dim import bounds
from optdnn.errors import EngineError, InputError, ShapeError, UsageError
from optdnn.importers.onnx import import_model
from optdnn.lowering.cpu.typical_sizes import typical_sizes
from optdnn.lowering.likely_shapes import suggest_shapes
from optdnn.ranges import DimRange, InputShapes, input_shapes, parse_dims, parse_shapes
from optdnn.runtime.file.format import decode, encode


@pytest.mark.parametrize(
    ("text", "dims"),
    [
        ("1x3x8", (1, 3, 8)),
        ("?x3", (None, 3)),
        ("scalar", ()),
        ("1x3x8..8x3x8..32x3x16", (DimRange(1, 8, 32), 3, DimRange(8, 8, 16))),
        ("1..8..32x3x8", (DimRange(1, 8, 32), 3, 8)),
        ("1..8..32x3x8..8..16", (DimRange(1, 8, 32), 3, DimRange(8, 8, 16))),
        ("2..4..8", (DimRange(2, 4, 8),)),
        ("?x1..?x2..?x4", (None, DimRange(1, 2, 4))),
        ("4..4..4x2", (4, 2)),
    ],
)
def test_the_text_of_a_shape(text: str, dims: tuple[Any, ...]) -> None:
    assert parse_dims(text) == dims
    assert input_shapes({"x": text}) == {"x": dims}


@pytest.mark.parametrize(
    ("text", "because"),
    [
        ("8..1..32x3", "minimum 8, optimum 1 and maximum 32 are not in this order"),
        ("1x3..9x3..4x3", "axis 0: minimum 1, optimum 9 and maximum 4"),
        ("1x3..2x3", "'3..2' is neither a size nor a range"),
        ("1..2x3", "'1..2' is neither"),
        ("1x3..2x3x4..3x3", "'3..2' is neither"),
        ("1x?..2x3..3x3", "axis 1 of .* is symbolic in one shape"),
        ("", "'' is neither"),
    ],
)
def test_a_malformed_shape_is_refused(text: str, because: str) -> None:
    with pytest.raises(UsageError, match=because):
        parse_dims(text)


def test_an_empty_shape_may_mean_a_scalar() -> None:
    with pytest.raises(UsageError) as raised:
        parse_dims("")
    assert raised.value.hint == "write scalar for a tensor without dimensions"


def test_a_range_without_an_optimum_is_refused_with_advice() -> None:
    with pytest.raises(UsageError) as e:
        parse_dims("1..4x3")
    assert e.value.hint == "name the size to optimize for, too: 1..OPT..4"


def test_a_name_given_again_begins_another_profile() -> None:
    shapes = parse_shapes(["x=1x8", "mask=1x8", "x=4..8..16x2", "mask=4..8..16x2"])
    assert [dict(p) for p in shapes.profiles] == [
        {"x": (1, 8), "mask": (1, 8)},
        {"x": (DimRange(4, 8, 16), 2), "mask": (DimRange(4, 8, 16), 2)},
    ]
    assert shapes == {n: (DimRange(1, 1, 16), DimRange(2, 8, 8)) for n in ("x", "mask")}
    assert BuildOptions(shapes=shapes).shapes is shapes


def test_shapes_without_ranges_are_no_profile() -> None:
    assert parse_shapes(["x=1x?", "y=3"]).profiles == ()
    assert InputShapes().profiles == ()


def test_a_profile_that_is_silent_allows_all() -> None:
    shapes = input_shapes([{"x": (1, 2), "y": (3,)}, {"x": (2, 2)}])
    assert shapes == {"x": (DimRange(1, 1, 2), 2), "y": (None,)}


@pytest.mark.parametrize(
    ("given", "because"),
    [
        ({"x": [(1, 3), (2, 3)]}, "three shapes"),
        ({"x": [(1, 3), (2, 3), (4,)]}, "different ranks"),
        ({"x": [(4, 3), (2, 3), (8, 3)]}, "minimum 4, optimum 2 and maximum 8"),
        ({"x": ((1, 2, 4), 3)}, "three shapes.*\n.*DimRange"),
        ([{"x": (1, 3)}, 5], "shapes must map names"),
        ([{"x": (1, 3)}, {"x": (1,)}], "different ranks"),
    ],
)
def test_python_shapes_that_are_refused(given: Any, because: str) -> None:
    with pytest.raises(UsageError, match=because):
        BuildOptions(shapes=given)


def test_a_range_out_of_order_is_refused() -> None:
    with pytest.raises(UsageError, match=r"2\.\.1\.\.3 is not valid"):
        DimRange(2, 1, 3)


# ---------------------------------------------------------------- import


TWO = """
<ir_version: 8, opset_import: ["": 17]>
g (float[n, 4] x, float[n] y, float[2] z) => (float[n, 4] out) {
    t = Transpose(x)
    s = Add(t, y)
    out = Transpose(s)
}"""


def test_symbols_have_the_span_of_all_profiles() -> None:
    graph = import_model(
        onnx.parser.parse_model(TWO), shapes=input_shapes([{"x": "2x4"}, {"x": "4..6..8x4", "y": "4..6..8"}])
    )
    assert graph.profiles == ({"n": DimRange(2, 2, 2)}, {"n": DimRange(4, 6, 8)})
    assert bounds(graph.symbols()["n"]) == (2, 8)
    assert {str(o.type) for op in graph.ops() for o in op.outputs} >= {"fp32[n, 4]", "fp32[4, n]"}


@pytest.mark.parametrize(
    ("shapes", "because"),
    [
        ({"x": "1..2..4x4", "y": "1..2..8"}, "it sets n to 1..2..8, but the shape given for 'x' sets it to 1..2..4"),
        ({"x": "1..2..4x4..4..5"}, "they differ in axis 1"),
        ({"z": "1..2..4"}, "differ in axis 0.*\n.*is fixed in the model"),
        ([{"x": "1x4", "y": "2"}, {"x": "2x4", "y": "1"}], "sets n to 2, but the shape given for 'x' sets it to 1"),
    ],
)
def test_shapes_that_contradict_are_refused(shapes: Any, because: str) -> None:
    with pytest.raises(ShapeError, match=because):
        import_model(onnx.parser.parse_model(TWO), shapes=input_shapes(shapes))


# ---------------------------------------------------------------- engines


IMAGE = (3, 8, 8)


def _image(n: int) -> dict[str, Any]:
    return {"x": np.random.default_rng(n).standard_normal((n, *IMAGE)).astype(np.float32)}


@pytest.mark.parametrize("target", ["reference", "cpu"])
def test_any_shape_in_range_runs_and_others_are_refused(target: str, tmp_path: Path) -> None:
    shapes = {"x": [(2, *IMAGE), (3, *IMAGE), (5, *IMAGE)]}
    engine = optdnn.build(convnet(batch="n"), target=target, shapes=shapes, threads=1 if target == "cpu" else None)
    fixed = optdnn.build(convnet(batch="n"), target="reference")
    engine.save(tmp_path / "e")
    loaded = optdnn.load(tmp_path / "e")
    assert loaded.profiles == engine.profiles == ({"n": DimRange(2, 3, 5)},)
    for n in (2, 4, 5):
        np.testing.assert_allclose(loaded.run(_image(n))["y"], fixed.run(_image(n))["y"], rtol=1e-4, atol=1e-5)
    for e in (engine, loaded):
        for n in (1, 6):
            with pytest.raises(InputError, match=rf"n is {n} on axis 0 of input 'x', outside of 2 to 5.*\n.*wider"):
                e.run(_image(n))


def test_an_engine_accepts_sizes_within_a_profile_not_between_profiles() -> None:
    engine = optdnn.build(convnet(batch="n"), target="reference", shapes=[{"x": (1, *IMAGE)}, {"x": "4..4..6x3x8x8"}])
    assert engine.run(_image(1))["y"].shape == (1, 5)
    assert engine.run(_image(6))["y"].shape == (6, 5)
    with pytest.raises(InputError, match=r"outside of 4 to 6 \(the profiles of the engine are n=1; n=4..6"):
        engine.run(_image(3))  # the message names the nearest range


def test_the_cpu_target_tunes_at_the_optimum() -> None:
    graph = import_model(convnet(batch="n"), shapes=input_shapes({"x": "1..7..9x3x8x8"}))
    assert typical_sizes(graph) == {"n": 7}
    assert typical_sizes(import_model(convnet(batch="n"))) == {"n": 1}


SOUND = """<ir_version: 8, opset_import: ["" : 17]> sound
(float[batch, 1, samples] x, float[batch, past] p) => (float[batch, c, t] y, float[batch, q] z)
<float[4, 1, 10] w = {@}, int64[1] two = {2}, int64[1] axis = {1}, int64[1] end = {1000}>
{
    a = Conv<strides=[5]>(x, w)
    b = MaxPool<kernel_shape=[8], strides=[8]>(a)
    y = Relu(b)
    z = Slice(p, two, end, axis)
}""".replace("@", ", ".join(["0.5"] * 40))


def test_a_network_of_unknown_length_is_timed_at_one_that_leaves_something_of_every_tensor() -> None:
    """Thirty-two samples give five positions, fewer than a window of eight."""
    graph = import_model(onnx.parser.parse_model(SOUND))
    assert typical_sizes(graph) == {"batch": 1, "samples": 64, "past": 64}
    engine = optdnn.build(onnx.parser.parse_model(SOUND), target="cpu", threads=1)
    x, past = np.ones((2, 1, 100), np.float32), np.ones((2, 3), np.float32)
    got = engine.run({"x": x, "p": past})
    assert (got["y"].shape, got["z"].shape) == ((2, 4, 2), (2, 1))


CACHE = """<ir_version: 8, opset_import: ["" : 17]> cache
(float[batch, length, 4] x, float[batch, past, 4] k, float[batch, length, total] mask) => (float[batch, length, total] y)
{
    keys = Concat<axis=1>(k, x)
    turned = Transpose<perm=[0, 2, 1]>(keys)
    scores = MatMul(x, turned)
    y = Add(scores, mask)
}"""


def test_sizes_that_broadcast_with_one_another_are_made_up_together() -> None:
    """The mask of a cache covers the past and the new positions."""
    model = onnx.parser.parse_model(CACHE)
    assert typical_sizes(import_model(model)) == {"batch": 1, "length": 32, "past": 32, "total": 64}
    feeds = {
        "x": np.ones((2, 3, 4), np.float32),
        "k": np.ones((2, 5, 4), np.float32),
        "mask": np.zeros((2, 3, 8), np.float32),
    }
    for given in ({}, {"x": "1..2..4x3x4", "k": "1..2..4x5x4", "mask": "1..2..4x3x8"}):
        got = optdnn.build(model, target="cpu", threads=1, shapes=given).run(feeds)
        np.testing.assert_array_equal(got["y"], np.full((2, 3, 8), 4, np.float32))


PRODUCT = """<ir_version: 8, opset_import: ["" : 17]> product
(float[m, k] a, float[rows, n] b, float[biases] c) => (float[m, n] y)
{ y = Gemm(a, b, c) }"""
SAMPLED = """<ir_version: 8, opset_import: ["" : 17]> sampled
(float[batch, c, h, w] x, float[grids, p, q, two] g) => (float[batch, c, p, q] y)
{ y = GridSample(x, g) }"""
CELLS = """<ir_version: 8, opset_import: ["" : 17]> cells
(float[steps, batch, width] x, float[one, gates, inputs] w, float[ones, rows, hidden] r) => (float[steps, d, batch, 8] y)
{ y = RNN<hidden_size=8>(x, w, r) }"""


@pytest.mark.parametrize(
    ("text", "sizes", "suggested"),
    [
        (
            PRODUCT,
            {"m": 1, "k": 32, "rows": 32, "n": 32, "biases": 32},
            ["a=1..8..32x1..128..512", "b=1..128..512x1..128..512", "c=1..128..512"],
        ),
        (
            SAMPLED,
            {"batch": 1, "c": 32, "h": 32, "w": 32, "grids": 1, "p": 32, "q": 32, "two": 2},
            ["x=1..8..32x1..128..512x32..224..512x32..224..512", "g=1..8..32x1..128..512x32..224..512x2"],
        ),
        (
            CELLS,
            {
                "steps": 1,
                "batch": 32,
                "width": 32,
                "one": 1,
                "gates": 8,
                "inputs": 32,
                "ones": 1,
                "rows": 8,
                "hidden": 8,
            },
            ["x=1..8..32x1..128..512x1..128..512", "w=1x8x1..128..512", "r=1x8x8"],
        ),
    ],
    ids=["product", "sampled", "cells"],
)
def test_sizes_that_must_be_equal_are_made_up_together(text: str, sizes: dict[str, int], suggested: list[str]) -> None:
    model = onnx.parser.parse_model(text)
    assert typical_sizes(import_model(model)) == sizes
    assert suggest_shapes(import_model(model)) == suggested
    engine = optdnn.build(model, target="cpu", threads=1)
    ranges = dict(one.split("=") for one in suggested)
    ranged = optdnn.build(model, target="simulate", shapes=ranges, no_cubins=True)
    assert [i.name for i in ranged.inputs] == [i.name for i in engine.inputs]


def test_sizes_of_a_profile_are_kept_and_others_follow_them() -> None:
    graph = import_model(onnx.parser.parse_model(PRODUCT), shapes=input_shapes({"b": "2..3..4x5"}))
    assert typical_sizes(graph) == {"m": 1, "k": 3, "rows": 3, "biases": 5}


def test_ranges_that_contradict_name_the_node() -> None:
    ranges = {"x": "1x3x4", "k": "1x4..5..6x4", "mask": "1x3x20..21..22"}
    with pytest.raises(ShapeError, match=r"Add_3 \(Add\): shapes \[1, 3, 8\] and \[1, 3, 21\] do not broadcast"):
        optdnn.build(onnx.parser.parse_model(CACHE), target="simulate", shapes=ranges)


def test_where_no_length_leaves_something_the_usual_one_is_tried() -> None:
    empty = """<ir_version: 8, opset_import: ["" : 17]> n (float[2, n] x) => (float[2, m] y)
    <int64[1] end = {0}, int64[1] axis = {1}>
    { y = Slice(x, end, end, axis) }"""
    assert typical_sizes(import_model(onnx.parser.parse_model(empty))) == {"n": 32}
    less = """<ir_version: 8, opset_import: ["" : 17]> n (float[2, n] x) => (float[2, m] y)
    <int64[1] begin = {1000000}, int64[1] end = {2000000}, int64[1] axis = {1}>
    { y = Slice(x, begin, end, axis) }"""
    assert typical_sizes(import_model(onnx.parser.parse_model(less))) == {"n": 32}


def test_profiles_in_an_engine_file_are_checked() -> None:
    program = optdnn.build(convnet(batch="n"), target="reference", shapes={"x": "1..2..3x3x8x8"}).program
    raw = b"".join(encode(program))
    assert raw[10:12] == b"\x02\x00"
    assert decode(memoryview(raw)).profiles == ({"n": DimRange(1, 2, 3)},)
    program.profiles = ({"m": DimRange(1, 2, 3)},)
    with pytest.raises(EngineError, match=r"'m'.*is not a dimension of an input"):
        optdnn.Engine(program)
