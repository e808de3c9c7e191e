"""ResizedPeaks: inference, its errors, cost, and export as a Resize, an ArgMax and a ReduceMax of each image."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnxruntime import InferenceSession
from support.net import Net, built, call_of
from support.peak_cases import CASES, graph_of, peaks

from optdnn.errors import ShapeError, UnsupportedError
from optdnn.ir.evaluate import evaluate
from optdnn.ir.export_onnx import export_model
from optdnn.ir.graph import Op
from optdnn.runtime.reference.resized_peaks import MOST_PIXELS
from optdnn.types import FP32, INT32, INT64, TensorType


@pytest.mark.parametrize("name", CASES)
def test_export(name: str) -> None:
    graph = graph_of(name)
    rng = np.random.default_rng(3)
    shape = graph.type(graph.op(graph.inputs[0]).value).static_shape
    feeds = {"x": rng.standard_normal(shape).astype(np.float32), "sizes": rng.integers(0, 40, (4, 2))}
    session = InferenceSession(export_model(graph).to_bytes(), providers=["CPUExecutionProvider"])
    places, values = evaluate(graph, feeds).values()
    wanted_places, wanted = session.run(None, feeds)
    np.testing.assert_array_equal(places, wanted_places)
    np.testing.assert_allclose(values, wanted, rtol=1e-5, atol=1e-5)


def peak(least: int = 1) -> tuple[Any, Op]:
    graph = built(peaks, least=least)
    return graph, graph.of_kind("ResizedPeaks")[0]


@pytest.mark.parametrize("size", [0, -3, MOST_PIXELS + 1, 1 << 62])
def test_sizes_that_no_image_has(size: int) -> None:
    x = np.ones((2, 3, 5, 6), np.float32)
    places, values = peak()[1].definition.kernel(x, np.array([[4, size], [2, 2]]), mode="linear")
    assert places.tolist() == [[0] * 3] * 2
    assert np.isnan(values[0]).all()
    assert (values[1] == 1).all()


@pytest.mark.parametrize(
    ("types", "changes", "because"),
    [
        ({}, {"mode": "nearest"}, "mode 'nearest'"),
        ({}, {"coordinate_transformation_mode": "tf_crop_and_resize"}, "coordinates 'tf_crop_and_resize'"),
        ({0: TensorType(FP32, (4, 3, 5))}, {}, "images must have 4 dimensions"),
        ({1: TensorType(INT64, (8,))}, {}, "sizes must have 2 dimensions"),
        ({0: TensorType(INT64, (4, 3, 5, 6))}, {}, "ResizedPeaks of int64"),
        ({1: TensorType(INT32, (4, 2))}, {}, "with sizes int32"),
        ({1: TensorType(INT64, (5, 2))}, {}, "one size per image"),
        ({1: TensorType(INT64, (4, 3))}, {}, "a height and a width"),
    ],
)
def test_contradictions(types: dict[int, TensorType], changes: dict[str, Any], because: str) -> None:
    graph, op = peak()
    with pytest.raises(ShapeError, match=because):
        op.definition.infer(call_of(graph, op, types, **changes))


def test_results_have_a_position_and_an_element_per_channel() -> None:
    _, op = peak()
    assert [o.type for o in op.outputs] == [TensorType(INT64, (4, 3)), TensorType(FP32, (4, 3))]


def test_cost_counts_the_taps_of_images_that_keep_their_size() -> None:
    graph, op = peak()
    call = call_of(graph, op, {})
    assert op.definition.cost(call, op.definition.infer(call)).flops == 4 * 2 * (4 * 3 * 5 * 6)


def test_no_images_are_not_exported() -> None:
    n = Net()
    sizes = n.input(0, 2, name="sizes", dtype=INT64)
    graph = n.done(*n.op("ResizedPeaks", n.input(0, 3, 5, 6), sizes, attrs=peak()[1].attrs, outputs=2))
    with pytest.raises(UnsupportedError, match="without images"):
        export_model(graph)
