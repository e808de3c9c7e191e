"""A picture's conversion, resize, crop and shift in one launch: its kernel on the processor, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.host import needs_compiler
from support.net import built
from support.on_processor import compare_steps
from support.pictures import resized
from support.simulated import check_simulated, kinds, lowered

from optdnn.errors import ShapeError
from optdnn.ir.graph import Graph
from optdnn.kernels.builder import Builder
from optdnn.kernels.layout.picture import ResizedPicture
from optdnn.ops.regions import ResizedPictureAttrs
from optdnn.ops.resize import ResizeAttrs
from optdnn.runtime.cuda.gpu_facts import of_arch
from optdnn.runtime.reference.regions import resized_picture
from optdnn.types import FP32


def graph_of(**options: Any) -> Graph:
    return built(resized, **options)


CASES: dict[str, dict[str, Any]] = {
    "smaller": {},
    "larger, cubic": {"attrs": ResizeAttrs("cubic", axes=(2, 3)), "sizes": (20, 31)},
    "many taps": {"sizes": (1, 2), "crop": False},
    "no crop, no shift": {"crop": False, "shift": False},
    "other colors, 16 bits, for a convolution": {"bgr": True, "dtype": np.uint16, "conv": True},
    "one channel, all sizes": {"channels": 1, "attrs": ResizeAttrs("linear"), "sizes": (2, 1, 8, 13)},
}


@needs_compiler
@pytest.mark.parametrize("case", CASES)
def test_the_kernel_agrees_with_its_meaning(case: str, tmp_path: Path) -> None:
    graph = graph_of(**CASES[case])
    program = lowered(graph, "fp32")
    assert kinds(program)[0] == "ResizedPicture"
    ((name, _),) = program.inputs
    dtype = name.dtype
    high = np.iinfo(dtype).max
    feeds = {name.name: np.random.default_rng(0).integers(0, high, name.shape, dtype, endpoint=True)}
    assert compare_steps(program, feeds, 3e-6, tmp_path)


def test_the_meaning_of_a_step_equals_the_operators() -> None:
    for options in ({}, {"to": "fp16"}, {"bgr": True, "conv": True}):
        graph = graph_of(**options)
        program = lowered(graph, "fp32")
        assert kinds(program)[0] == "ResizedPicture"
        check_simulated(graph, "fp32", tolerance=2e-3 if "to" in options else 1e-5)


def _graph_and_cast(**options: Any) -> tuple[Graph, Any]:
    graph = graph_of(**options)
    return graph, next(op for op in graph.order() if op.kind == "Cast")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"other_reader": True}, "the only reader of its result is not a resize"),
        ({"dtype": np.int32}, "does not convert bytes to floats"),
        ({"channels": 5}, "up to 4 channels"),
        ({"attrs": ResizeAttrs("nearest", axes=(2, 3))}, "does not interpolate"),
        (
            {"attrs": ResizeAttrs("linear"), "sizes": (2, 4, 8, 13), "crop": False, "shift": False},
            "another axis than height and width",
        ),
        ({"step": 2}, "every other pixel"),
        ({"sizes": (0, 5), "crop": False, "shift": False}, "gives no pixels"),
    ],
)
def test_refusals(options: dict[str, Any], why: str) -> None:
    graph, cast = _graph_and_cast(**options)
    assert why in str(ResizedPicture().refuse(Builder(graph, of_arch("sm_90a")), cast))
    accepted, other = _graph_and_cast()
    assert ResizedPicture().refuse(Builder(accepted, of_arch("sm_90a")), other) is None


def test_its_shape_and_meaning() -> None:
    from support.region_cases import infer

    x = np.arange(2 * 3 * 8 * 8, dtype=np.uint8).reshape(2, 3, 8, 8)
    (y,) = resized_picture(x, np.float32([1, 2, 3]), sizes=(4, 4), starts=(1, 0), lengths=(2, 4), mode="linear")
    assert (y.shape, y.dtype) == ((2, 3, 2, 4), FP32)
    assert y[0, 1, 0, 0] == x[0, 1, 2:4, 0:2].mean() + 2
    with pytest.raises(ShapeError, match="2 pixels from 3 on are not inside of 4"):
        infer("ResizedPicture", ResizedPictureAttrs((4, 4), (3, 0), (2, 4)), [x])
