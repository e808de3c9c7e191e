"""DFT, STFT, MelWeightMatrix, Col2Im, Det, BitCast against ONNX Runtime, NumPy and ONNX's evaluator; refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx.parser
import pytest
from onenode import Case, check_case, check_export, import_case, normal, op_flops, run

from optdnn.errors import RunError, ShapeError, UnsupportedError
from optdnn.importers.onnx import import_model
from optdnn.ir.export_onnx import export_model
from optdnn.types import FP64

F = np.float32


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("length", [None, 8, 12])
@pytest.mark.parametrize(("parts", "inverse", "onesided"), [(1, 0, 0), (2, 0, 0), (2, 1, 0), (1, 0, 1)])
def test_dft(dtype: Any, length: int | None, parts: int, inverse: int, onesided: int) -> None:
    operands = [normal(2, 10, 3, parts, dtype=dtype), *([] if length is None else [np.array(length)])]
    attrs = {"inverse": inverse, "onesided": onesided}
    constants = () if length is None else (1,)
    old = Case("DFT", operands, {**attrs, "axis": 1}, 17, constants=constants)
    # ONNX Runtime's factors are no better than fp32.
    check_case(old, "onnxruntime" if dtype == np.float32 else "reference", symbolic={0: (0,)})
    new = Case(
        "DFT", [*operands, *([None] if length is None else []), np.array(1)], attrs, 20, constants=(*constants, 2)
    )
    check_case(new, run(import_case(old), old.fed))
    check_export(new, by="onnxruntime" if dtype == np.float32 else "reference")


def test_inverse_of_a_one_sided_spectrum_is_real() -> None:
    x = normal(2, 10, 1, dtype=FP64)
    there = Case("DFT", [x, None, np.array(1)], {"onesided": 1}, 20, constants=(2,))
    (spectrum,) = run(import_case(there), there.fed)
    assert spectrum.shape == (2, 6, 2)
    back = Case("DFT", [spectrum, None, np.array(1)], {"onesided": 1, "inverse": 1}, 20, constants=(2,))
    (y,) = run(import_case(back), back.fed)
    np.testing.assert_allclose(y, x, atol=1e-12)
    assert import_case(back).of_kind("DFT")[0].outputs[0].type.dims == (2, 10, 1)


def test_an_axis_known_at_run_time_only() -> None:
    case = Case("DFT", [normal(2, 10, 3, 2), None, np.array(-2)], {}, 20)
    (y,) = run(import_case(case), case.fed)
    fixed = Case("DFT", case.inputs, {}, 20, constants=(2,))
    np.testing.assert_array_equal(y, run(import_case(fixed), fixed.fed)[0])
    last = Case("DFT", [normal(2, 10, 3, 2), None, np.array(-1)], {}, 20)
    with pytest.raises(RunError, match="last axis"):
        run(import_case(last), last.fed)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("window", [False, True])
@pytest.mark.parametrize("step", [3, 8])
def test_stft(parts: int, window: bool, step: int) -> None:
    operands = [normal(2, 40, parts), np.array(step), np.hanning(16).astype(F) if window else None, np.array(16)]
    case = Case("STFT", operands, {"onesided": int(parts == 1)}, 17, constants=(1, 3))
    check_case(case, symbolic={0: (0, 1)})
    check_export(case)


@pytest.mark.parametrize("values", [(8, 16, 8192, 0.0, 4096.0), (20, 64, 16000, 20.0, 7000.0)])
def test_mel_weight_matrix(values: tuple[Any, ...]) -> None:
    operands = [np.array(v, F if isinstance(v, float) else np.int64) for v in values]
    case = Case("MelWeightMatrix", operands, {}, 17, constants=(0, 1, 2, 3, 4))
    expected = Case("MelWeightMatrix", operands, {}, 17)
    check_case(case, run(import_case(expected), expected.fed))
    check_export(expected)


@pytest.mark.parametrize(
    ("image", "block", "attrs"),
    [
        ((5, 5), (1, 5), {}),
        ((6, 6), (2, 2), {"strides": [2, 2]}),
        ((5, 6), (3, 2), {"pads": [1, 0, 1, 1], "dilations": [1, 2]}),
        ((4, 5, 6), (2, 1, 3), {}),
    ],
)
def test_col2im(image: Any, block: Any, attrs: dict[str, Any]) -> None:
    rank = len(image)
    pads, dilations = attrs.get("pads", [0] * 2 * rank), attrs.get("dilations", [1] * rank)
    strides = attrs.get("strides", [1] * rank)
    out = [
        (image[i] + pads[i] + pads[rank + i] - dilations[i] * (block[i] - 1) - 1) // strides[i] + 1 for i in range(rank)
    ]
    x = normal(2, 3 * int(np.prod(block)), int(np.prod(out)))
    case = Case("Col2Im", [x, np.array(image), np.array(block)], attrs, 18, constants=(1, 2))
    check_case(case, symbolic={0: (0,)})
    check_export(case)
    bad = Case("Col2Im", [x[..., :-1], *case.inputs[1:]], attrs, 18, constants=(1, 2))
    with pytest.raises(RunError, match="do not make an image"):
        run(import_case(bad), bad.fed)


def test_col2im_of_too_many_axes() -> None:
    text = """<ir_version: 8, opset_import: ["" : 18]>
        g (float[1, 9, 4] x, int64[4294967296] image, int64[2] block) => (float[1, 1, 5, 5] y) { y = Col2Im (x, image, block) }"""
    with pytest.raises(ShapeError, match="an image_shape of 4294967296 sizes; there may be at most"):
        import_model(onnx.parser.parse_model(text))


@pytest.mark.parametrize("shape", [(3, 3), (2, 4, 4), (2, 3, 1, 1)])
def test_det(shape: tuple[int, ...]) -> None:
    case = Case("Det", [normal(*shape)], opset=11)
    check_case(case)
    check_export(case)


def test_bit_cast() -> None:
    x = normal(3, 4)
    case = Case("BitCast", [x], {"to": 6}, 26)
    check_case(case, [x.view(np.int32)])
    with pytest.raises(UnsupportedError, match="no BitCast"):
        export_model(import_case(case))


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (Case("DFT", [normal(2, 10, 3)], {"axis": 1}, 17), "1 or 2 numbers"),
        (Case("DFT", [normal(2, 10, 2)], {"axis": 2}, 17), "along its last axis"),
        (Case("DFT", [normal(2, 10, 2)], {"axis": 1, "onesided": 1}, 17), "not one-sided"),
        (Case("DFT", [np.ones((2, 10, 1), int)], {"axis": 1}, 17), "must be floating-point"),
        (Case("STFT", [normal(2, 40, 1), np.array(4)], {}, 17), "needs a window or a frame_length"),
        (Case("STFT", [normal(2, 40, 1), np.array(0), None, np.array(4)], {}, 17, 1, (1, 3)), "frame_step is 0"),
        (
            Case("STFT", [normal(2, 40, 1), np.array(4), np.ones(5, F), np.array(4)], {}, 17, 1, (3,)),
            "its window differ",
        ),
        (Case("Det", [normal(2, 3)], {}, 11), "not square"),
        (Case("BitCast", [normal(2, 3)], {"to": 7}, 26), "whose size differs"),
    ],
)
def test_operands_that_contradict(case: Case, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        import_case(case)


def test_cost_of_a_transform() -> None:
    graph = import_case(Case("DFT", [normal(2, 16, 1)], {"axis": 1}, 17))
    assert op_flops(graph, graph.of_kind("DFT")[0]) == 5 * 32 * 4
