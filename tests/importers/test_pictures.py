"""Preprocessing and postprocessing as operators: results on every target, and refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from support.pictures import classifier, picture
from support.sweep import all_pairs

import optdnn
from optdnn import ImageSpec, UsageError
from optdnn.calibration.images import prepared
from optdnn.importers.onnx import import_model
from optdnn.importers.pictures import with_pictures
from optdnn.ir.evaluate import evaluate
from optdnn.runtime.pictures.files import resized_size
from optdnn.types import Array

LEVELS = 1.0
"""The largest difference from Pillow, which rounds to whole levels after each of its two passes. Our values are floats."""
PLAIN: dict[str, Any] = {"resize": None, "crop": None, "scale": 1.0, "mean": 0, "std": 1, "layout": "hwc"}
SPEC: dict[str, Any] = {"resize": 14, "crop": [12, 13], "mean": [0.4, 0.5, 0.6], "std": [0.2, 0.3, 0.25]}


def image(array: Array) -> Any:
    pil = pytest.importorskip("PIL.Image", reason="the images extra is not installed")
    return pil.fromarray(array)


# ---------------------------------------------------------------- exactness


@pytest.mark.parametrize("size", [(75, 100), (101, 66), (23, 29)])
@pytest.mark.parametrize(("interpolation", "filter"), [("linear", 2), ("cubic", 3), ("nearest", 0)])
def test_resize_is_pillows(size: tuple[int, int], interpolation: str, filter: int) -> None:
    pixels = picture(size) // 2 + 64  # Pillow clips a cubic filter's overshoot between its passes
    spec = ImageSpec.of({**PLAIN, "resize": 30, "interpolation": interpolation})
    want = image(pixels).resize(resized_size(spec, size)[::-1], filter)
    got = prepared(pixels[None], spec)[0]
    assert got.shape == np.asarray(want).shape
    error = np.abs(got - np.asarray(want, np.float32))
    assert error.max() <= (0 if interpolation == "nearest" else LEVELS)
    without = prepared(pixels[None], ImageSpec.of({**PLAIN, "resize": 30, "antialias": False}))[0]
    assert (size == (23, 29)) == (
        np.abs(without - prepared(pixels[None], ImageSpec.of({**PLAIN, "resize": 30}))[0]).max() < 1e-3
    )


@pytest.mark.parametrize(
    ("color", "given", "want"),
    [
        ("BGR", "RGB", lambda p: p[..., ::-1]),
        ("RGB", "BGR", lambda p: p[..., ::-1]),
        ("L", "RGB", lambda p: p @ np.float32([[0.299], [0.587], [0.114]])),
        ("L", "BGR", lambda p: p[..., ::-1] @ np.float32([[0.299], [0.587], [0.114]])),
        ("RGB", "L", lambda p: np.repeat(p[..., :1], 3, -1)),
    ],
)
def test_colors(color: str, given: str, want: Any) -> None:
    pixels = picture((9, 11))
    comes = pixels[..., :1] if given == "L" else pixels
    got = prepared(comes[None], ImageSpec.of({**PLAIN, "color": color, "input": {"color": given}}))[0]
    np.testing.assert_allclose(got, want(pixels.astype(np.float32)), atol=1e-4)
    if (color, given) == ("L", "RGB"):
        assert np.abs(got[..., 0] - np.asarray(image(pixels).convert("L"), np.float32)).max() <= LEVELS


def test_crop_pad_and_normalization() -> None:
    pixels = picture((20, 31))
    spec = ImageSpec.of({"resize": None, "crop": [10, 12], "pad": [1, 2, 3, 4], "pad_value": 114, "layout": "chw"})
    cut = pixels[5:15, 9:21].astype(np.float64)
    whole = np.full((14, 18, 3), 114.0)
    whole[1:11, 2:14] = cut
    want = ((whole / 255 - spec.mean) / np.array(spec.std)).transpose(2, 0, 1)
    np.testing.assert_allclose(prepared(pixels[None], spec)[0], want, atol=2e-6)
    edge = prepared(pixels[None], ImageSpec.of({**PLAIN, "pad": [2, 3], "pad_mode": "edge"}))[0]
    np.testing.assert_array_equal(edge, np.pad(pixels, [(2, 2), (3, 3), (0, 0)], mode="edge"))


def test_contain_keeps_the_sides_ratio() -> None:
    pixels = picture((20, 40))
    got = prepared(pixels[None], ImageSpec.of({**PLAIN, "resize": [24, 32], "fit": "contain", "pad_value": 7}))[0]
    assert got.shape == (24, 32, 3)
    want = prepared(pixels[None], ImageSpec.of({**PLAIN, "resize": [16, 32]}))[0]
    np.testing.assert_array_equal(got[4:20], want)
    assert (got[:4] == 7).all()
    assert (got[20:] == 7).all()


@pytest.mark.parametrize("size", [(375, 500), (500, 333), (7, 600), (64, 64)])
def test_sizes_are_those_of_the_graph(size: tuple[int, int]) -> None:
    for changes in ({"resize": 17}, {"resize": (30, 20), "fit": "contain"}, {"resize": (9, 5)}):
        spec = ImageSpec.of({**PLAIN, **changes})
        made = prepared(np.zeros((1, *size, 3), np.uint8), spec).shape[1:3]
        assert made == (spec.resize if spec.fit == "contain" else resized_size(spec, size))


# ---------------------------------------------------------------- targets


@pytest.fixture(scope="module")
def two() -> Array:
    return np.stack([picture((20, 30), k) for k in range(2)])


def _want(two: Array, **changes: Any) -> Array:
    """The network on pictures that are prepared outside of it."""
    x = prepared(two, ImageSpec.of({**SPEC, **changes}))
    found: Array = evaluate(import_model(classifier()), {"x": x})["y"]
    return found


@pytest.mark.parametrize("target", ["reference", "cpu", "simulate"])
def test_an_engine_takes_pictures_on_every_target(target: str, two: Array) -> None:
    shapes = {"x": two.shape} if target == "simulate" else None
    answers = {"y": "softmax+top-k:2"}
    engine = optdnn.build(classifier(pads=1), target=target, preprocess={"x": SPEC}, postprocess=answers, shapes=shapes)
    spec = engine.inputs[0]
    assert (spec.dtype, spec.shape[-1]) == (np.uint8, 3)
    got = engine.run({"x": two})
    x = prepared(two, ImageSpec.of(SPEC))
    y = evaluate(import_model(classifier(pads=1)), {"x": x})["y"]
    share = np.exp(y - y.max(1, keepdims=True))
    share /= share.sum(1, keepdims=True)
    order = np.argsort(-share, axis=1)[:, :2]
    np.testing.assert_array_equal(got["y_classes"], order)
    np.testing.assert_allclose(got["y"], np.take_along_axis(share, order, 1), rtol=1e-4)


def test_ranges_of_picture_sizes_get_plans(two: Array) -> None:
    shapes = {"x": (2, optdnn.DimRange(18, 20, 40), optdnn.DimRange(20, 30, 40), 3)}
    engine = optdnn.build(classifier(), target="simulate", preprocess={"x": SPEC}, shapes=shapes)
    for size in ((20, 30), (33, 26)):
        pixels = np.stack([picture(size, k) for k in range(2)])
        np.testing.assert_allclose(engine.run({"x": pixels})["y"], _want(pixels), rtol=1e-3, atol=1e-3)


def test_the_scale_goes_into_weights_and_the_mean_where_nothing_pads() -> None:
    def built(pads: int) -> Any:
        from optdnn.compiler import build_verbose
        from optdnn.config import BuildOptions

        options = BuildOptions(
            target="simulate",
            preprocess={"x": ImageSpec.of(SPEC)},
            shapes={"x": (2, 20, 30, 3)},
            stop_after="fuse_conv_bn",
        )
        return build_verbose(classifier(pads=pads), options)

    kinds = built(0).graph.kinds()
    assert not kinds.keys() & {"Mul", "Sub", "Add"}
    padded = built(1)
    kinds = padded.graph.kinds()
    assert "Mul" not in kinds
    assert kinds["Add"] == 1
    refused = [r for p in padded.passes for r in p.to_json()["refused"] if "conv" in r["nodes"]]
    assert any("pad" in r["reason"] for r in refused), refused


def test_the_steps_of_preparation_are_explained() -> None:
    graph = import_model(with_pictures(classifier(), {"x": ImageSpec.of(SPEC)}, {}), shapes={"x": (1, 20, 30, 3)})
    named = {n for op in graph.ops() for n in op.src if n.startswith("preprocess/")}
    assert {
        "preprocess/x/cast",
        "preprocess/x/resize",
        "preprocess/x/crop",
        "preprocess/x/mean",
        "preprocess/x/scale",
    } <= named


def test_an_old_opset_and_a_body_that_reads_the_picture() -> None:
    """The body of an If reads the prepared input by its own name."""
    body = [helper.make_graph([helper.make_node(k, ["x"], [k])], k, [], [helper.make_tensor_value_info(k, 1, None)])
            for k in ("Relu", "Neg")]  # fmt: skip
    node = helper.make_node("If", ["c"], ["y"], then_branch=body[0], else_branch=body[1])
    ports = [
        helper.make_tensor_value_info("x", 1, [1, 3, 4, 4]),
        helper.make_tensor_value_info("c", TensorProto.BOOL, []),
    ]
    graph = helper.make_graph([node], "g", ports, [helper.make_tensor_value_info("y", 1, None)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 11)])
    spec = {"resize": None, "crop": None, "mean": 0, "std": 1, "scale": 1}
    engine = optdnn.build(model, target="reference", preprocess={"x": spec})
    pixels = picture((4, 4))[None]
    for c in (True, False):
        want = pixels.transpose(0, 3, 1, 2).astype(np.float32) * (1 if c else -1)
        np.testing.assert_array_equal(engine.run({"x": pixels, "c": np.array(c)})["y"], want)


# ---------------------------------------------------------------- answers


def _detector(shape: list[int]) -> onnx.ModelProto:
    """Boxes are only passed through; the picture is needed for its size."""
    nodes = [helper.make_node("ReduceMean", ["x"], ["z"], axes=[0, 1, 2, 3], keepdims=0),
             helper.make_node("Mul", ["z", "zero"], ["nothing"]), helper.make_node("Add", ["b", "nothing"], ["y"])]  # fmt: skip
    ports = [helper.make_tensor_value_info("x", 1, [1, 3, None, None]), helper.make_tensor_value_info("b", 1, shape)]
    zero = helper.make_tensor("zero", 1, [], [0.0])
    graph = helper.make_graph(nodes, "g", ports, [helper.make_tensor_value_info("y", 1, shape)], [zero])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)])


@all_pairs(
    {
        "relative": [False, True],
        "changes": [
            {"resize": (30, 20)},
            {"resize": (64, 64), "fit": "contain"},
            {"resize": 32, "crop": (24, 28), "pad": (1, 2, 3, 4)},
        ],
        "form": ["xyxy", "yxyx", "xywh", "cxcywh"],
    }
)
def test_boxes_are_scaled_back_to_the_picture(form: str, changes: dict[str, Any], relative: bool) -> None:
    """The positions of pixels go through the preprocessing as a picture. So the test knows where the network sees each pixel."""
    high, wide = 48, 90
    given = {"pad_value": -1e6, "layout": "chw", "antialias": False, "input": {"dtype": "fp32"}}
    spec = ImageSpec.of({**PLAIN, **changes, **given})
    y, x = np.mgrid[:high, :wide].astype(np.float32) + 0.5
    places = prepared(np.stack([x, y, y], -1)[None], spec)[0]
    rows, columns = np.nonzero(places[0] > 0)
    inner = (
        (rows > rows.min() + 2)
        & (rows < rows.max() - 2)
        & (columns > columns.min() + 2)
        & (columns < columns.max() - 2)
    )
    rows, columns = rows[inner][[0, -1]], columns[inner][[0, -1]]
    want = np.array([[places[0, r, c], places[1, r, c]] for r, c in zip(rows, columns, strict=True)])
    corners = np.stack([columns, rows], -1) + 0.5
    if relative:
        corners = corners / [places.shape[2], places.shape[1]]

    def as_form(two: Array) -> Array:
        (x0, y0), (x1, y1) = two
        forms = {"xyxy": (x0, y0, x1, y1), "yxyx": (y0, x0, y1, x1), "xywh": (x0, y0, x1 - x0, y1 - y0),
                 "cxcywh": ((x0 + x1) / 2, (y0 + y1) / 2, x1 - x0, y1 - y0)}  # fmt: skip
        return np.float32([[forms[form]]])

    answer = f"boxes:{form}" + (",relative" if relative else "")
    engine = optdnn.build(_detector([1, 1, 4]), target="reference", preprocess={"x": spec}, postprocess={"y": answer})
    pixels = np.zeros((1, high, wide, 3), np.float32)
    got = engine.run({"x": pixels, "b": as_form(corners)})["y"]
    np.testing.assert_allclose(got, as_form(want), atol=0.02)
    if form == "xyxy":
        far = engine.run({"x": pixels, "b": np.float32([[[-1000, -1000, 1000, 1000]]])})["y"]
        np.testing.assert_array_equal(far, [[[0, 0, wide, high]]])


def test_argmax_makes_masks() -> None:
    node = helper.make_node("Conv", ["x", "w"], ["y"])
    w = np.eye(3, dtype=np.float32).reshape(3, 3, 1, 1)
    ports = [helper.make_tensor_value_info(n, 1, [1, 3, 5, 6]) for n in "xy"]
    graph = helper.make_graph(
        [node], "g", ports[:1], ports[1:], [helper.make_tensor("w", 1, w.shape, w.tobytes(), raw=True)]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)])
    engine = optdnn.build(
        model, target="reference", preprocess={"x": {**PLAIN, "layout": "chw"}}, postprocess={"y": "argmax"}
    )
    pixels = picture((5, 6))[None]
    np.testing.assert_array_equal(engine.run({"x": pixels})["y"], pixels.argmax(-1))


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("preprocess", "postprocess", "why"),
    [
        ({"z": {}}, {}, "has no input 'z' to preprocess"),
        ({}, {"z": "softmax"}, "has no output 'z' to postprocess"),
        ({"x": {"color": "L", "mean": 0, "std": 1}}, {}, "has 3 channels, pictures in L have 1"),
        ({"x": {"layout": "hwc"}}, {}, "pictures in RGB have 3"),
        ({"x": {"crop": 8}}, {}, "is 12x13, the preprocessing makes 8x8"),
        ({"x": {"crop": 300}}, {}, "preprocess of input 'x': crop 300 is larger"),
        ({"x": {"fit": "contain"}}, {}, "fit contain needs a height and a width"),
        ({"x": {"interpolation": "lanczos"}}, {}, "interpolation 'lanczos' is not nearest, linear or cubic"),
        ({"x": {"input": {"dtype": "int4"}}}, {}, "the picture's dtype 'int4' is not"),
        ({"x": {"input": {"size": 4}}}, {}, "the picture that comes in has no size"),
        ({"x": {"input": 3}}, {}, "input 3 is not an object"),
        ({"x": {"pad": [1, 2, 3]}}, {}, r"pad \(1, 2, 3\) is not a whole number"),
        ({"x": {"pad": -1}}, {}, "pad -1 is not a whole number"),
        ({"x": {"resize": None, "crop": None, "pad": 6}}, {}, "is 12x13: pad 6 leaves no picture"),
        ({"x": {"pad": 1 << 40}}, {}, "pad 1099511627776 is not a whole number"),
        ({"x": {"resize": 1 << 63, "crop": None}}, {}, "resize 9223372036854775808 is not a positive whole number"),
        ({"x": {"scale": 10**400}}, {}, "scale 1000.* is not a finite number"),
        ({"x": {"antialias": 1}}, {}, "antialias 1 is not true or false"),
        (3, {}, "preprocess must map names of inputs to specs"),
        ({"x": 3}, {}, "image preprocessing must be an object, not 3"),
        ({}, {"y": "top-k:x"}, "postprocess of output 'y': .*'x' is not a whole number"),
        ({}, {"y": "top-k:0"}, "top-k 0 is not a positive"),
        ({}, {"y": "topk:3"}, "'topk:3' is not softmax, top-k:K, argmax or boxes:FORM"),
        ({}, {"y": "argmax+top-k:3"}, "an output has only one of top-k, argmax and boxes"),
        ({}, {"y": "boxes:abcd"}, "boxes 'abcd' is not one of xyxy"),
        ({}, {"y": "boxes"}, "boxes need the picture that they are of"),
        ({}, {"y": ""}, "the postprocessing does nothing"),
        ({}, {"y": "softmax,labels=nowhere.txt"}, "the labels 'nowhere.txt' cannot be read: No such file or directory"),
        ({}, {"y": "softmax,color=3"}, "'color=3' is not labels=FILE"),
        ({}, {"y": "softmax,relative"}, "relative and input are options of boxes"),
        ({}, {"y": {"labels": [3]}}, "labels must be a list of names"),
        ({}, {"y": {"softmax": None}}, "softmax None is not true or false"),
        ({}, {"y": {"argmax": [1]}}, r"argmax \[1\] is not true or false"),
        ({}, {"y": {"boxes": "xyxy", "relative": {}}}, "relative {} is not true or false"),
        ({}, {"y": {"boxes": "xyxy", "input": ["x"]}}, r"input \['x'\] is not a name"),
        ({}, {"y": {"top_k": 1 << 63}}, "top-k 9223372036854775808 is not a positive whole number up to"),
        ({}, {"y": {"argmax": True, "axis": 10**30}}, "axis 1000.* is not a whole number from -64 to 64"),
        ({}, {"y": 3}, "postprocessing must be text or an object, not 3"),
    ],
)  # fmt: skip
def test_senseless_options_are_refused(preprocess: Any, postprocess: Any, why: str) -> None:
    model = classifier()
    for dim, size in zip(model.graph.input[0].type.tensor_type.shape.dim[2:], (12, 13), strict=True):
        dim.dim_value = size
    with pytest.raises(UsageError, match=why):
        optdnn.build(model, target="reference", preprocess=preprocess, postprocess=postprocess)


def test_inputs_that_take_no_pictures_and_a_spec_for_calibration() -> None:
    flat = helper.make_tensor_value_info("x", 1, [2, 3])
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["y"])], "g", [flat], [helper.make_tensor_value_info("y", 1, [2, 3])]
    )
    model = helper.make_model(graph)
    with pytest.raises(UsageError, match="takes no pictures: it is fp32 of 2 dimensions"):
        optdnn.build(model, target="reference", preprocess={"x": {}})
    with pytest.raises(UsageError, match="leave --images out"):
        optdnn.build(model, target="reference", preprocess={"x": {}}, images="{}")


def test_on_gpus_one_launch_prepares_pictures_for_the_first_convolution(two: Array) -> None:
    """The mean stays an addition, computed by the launch of the resize. The convolution is the network's own."""
    from support.simulated import kinds

    shapes = {"x": two.shape}
    whole = optdnn.build(classifier(pads=1), target="simulate", precision="fp16", preprocess={"x": SPEC}, shapes=shapes)
    alone = optdnn.build(classifier(pads=1), target="simulate", precision="fp16", shapes={"x": (2, 3, 12, 13)})
    assert kinds(whole.program) == ["ResizedPicture", *kinds(alone.program)]
    first = whole.program.steps[0]
    assert {f"preprocess/x/{name}" for name in ("cast", "resize", "crop", "mean")} <= set(first.src)
    refused = [r["reason"] for p in whole.meta["passes"] for r in p["refused"] if p["name"] == "fuse_prologue"]
    assert any("which resizes a picture, adds it in its own launch" in reason for reason in refused)


@pytest.mark.hopper
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"crop": None, "resize": [11, 13], "input": {"color": "BGR"}},
        {"interpolation": "cubic", "antialias": False, "resize": 40, "crop": 36},
        {"resize": [30, 30], "fit": "contain", "crop": None, "pad_value": 114},
        {"resize": None, "crop": 12, "pad": 2, "input": {"layout": "chw", "dtype": "uint16"}},
    ],
)
def test_a_gpu_prepares_pictures_as_numpy_does(precision: str, changes: dict[str, Any], two: Array) -> None:
    spec = ImageSpec.of(
        {**SPEC, "scale": 1 / 65535 if "input" in changes and "dtype" in changes["input"] else 1 / 255, **changes}
    )
    pixels = two.transpose(0, 3, 1, 2).astype(np.uint16) * 257 if spec.input.layout == "chw" else two
    pixels = np.ascontiguousarray(pixels)
    engine = optdnn.build(
        classifier(pads=1), target="cuda", precision=precision, tactics="heuristic", preprocess={"x": spec},
        shapes={"x": pixels.shape},
    )  # fmt: skip
    want = evaluate(import_model(classifier(pads=1)), {"x": prepared(pixels, spec)})["y"]
    tolerance = 1e-4 if precision == "fp32" else 1e-2
    np.testing.assert_allclose(
        engine.run({"x": pixels})["y"], want, rtol=tolerance, atol=tolerance * np.abs(want).max()
    )
