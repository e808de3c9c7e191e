"""Conv and ConvTranspose against ONNX Runtime; inference with symbolic sizes; every refusal."""

from __future__ import annotations

import numpy as np
import pytest
from onenode import Case, check_case, check_export, import_case, normal, onnxruntime_run, op_flops, run

from optdnn.dim import symbol
from optdnn.errors import ShapeError
from optdnn.ir.export_onnx import export_model
from optdnn.ir.graph import Graph
from optdnn.ops.base import Tol
from optdnn.ops.conv import ConvAttrs, resolved, resolved_transpose
from optdnn.runtime.reference import conv as kernels
from optdnn.types import tensor

CONVS = [  # x, w, attributes
    ((2, 3, 9, 11), (4, 3, 3, 3), {}),
    ((2, 3, 9, 11), (4, 3, 3, 3), {"pads": [1, 2, 0, 1], "strides": [2, 3]}),
    ((1, 3, 9, 11), (4, 3, 3, 2), {"dilations": [2, 3], "pads": [2, 1, 2, 1]}),
    ((2, 6, 7, 7), (4, 3, 3, 3), {"group": 2, "strides": [2, 2]}),
    ((2, 6, 7, 8), (6, 1, 3, 3), {"group": 6, "pads": [1, 1, 1, 1], "strides": [2, 1]}),
    ((2, 3, 7, 8), (6, 1, 3, 5), {"group": 3, "pads": [1, 2, 1, 2], "dilations": [2, 1]}),
    ((2, 6, 5, 5), (8, 6, 1, 1), {}),
    ((2, 6, 5, 5), (8, 6, 1, 1), {"strides": [2, 2]}),
    ((2, 6, 5, 5), (8, 3, 1, 1), {"group": 2}),
    ((2, 3, 12), (4, 3, 5), {"strides": [2], "pads": [3, 1]}),
    ((1, 2, 5, 6, 7), (4, 1, 2, 3, 3), {"group": 2, "strides": [1, 2, 1], "pads": [1, 0, 1, 0, 1, 1]}),
    ((2, 3, 9, 10), (4, 3, 3, 4), {"auto_pad": "SAME_UPPER", "strides": [2, 3]}),
    ((2, 3, 9, 10), (4, 3, 4, 2), {"auto_pad": "SAME_LOWER", "strides": [2, 1]}),
    ((2, 3, 9, 10), (4, 3, 1, 2), {"auto_pad": "SAME_UPPER", "strides": [3, 3]}),
    ((2, 3, 9, 10), (4, 3, 3, 3), {"auto_pad": "VALID"}),
    ((2, 3, 9, 10), (4, 3, 3, 3), {"auto_pad": "SAME_UPPER", "kernel_shape": [3, 3]}),
]


@pytest.mark.parametrize(("x", "w", "attrs"), CONVS)
@pytest.mark.parametrize("bias", [False, True])
def test_conv(x: tuple[int, ...], w: tuple[int, ...], attrs: dict, bias: bool) -> None:
    operands = [normal(*x), normal(*w, seed=1), normal(w[0], seed=2) if bias else None]
    check_case(Case("Conv", operands if bias else operands[:2], attrs), symbolic={0: (0, *range(2, len(x)))})


def test_conv_old_opset_and_float64() -> None:
    check_case(Case("Conv", [normal(2, 3, 5, 5), normal(4, 3, 3, 3)], opset=7))
    x, w = normal(2, 3, 5, 5, dtype=np.float64), normal(4, 3, 3, 3, dtype=np.float64)
    check_case(Case("Conv", [x, w], {"pads": [1] * 4}), "reference", tol=Tol(1e-5, 1e-6))


def test_conv_half_rounds_once() -> None:
    x, w = normal(1, 8, 6, 6, dtype=np.float16), normal(4, 8, 3, 3, dtype=np.float16)
    exact = kernels.conv(x.astype(np.float32), w.astype(np.float32), strides=(1, 1), pads=(0,) * 4, dilations=(1, 1))[
        0
    ].astype(np.float16)
    check_case(Case("Conv", [x, w]), [exact], tol=Tol(0.0, 0.0))


def test_conv_in_bands_and_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("Conv", [normal(3, 4, 11, 9), normal(6, 2, 3, 3)], {"group": 2, "strides": [2, 1], "pads": [1] * 4})
    for buffer in (1, 3000, 9000):
        monkeypatch.setattr(kernels, "BUFFER_BYTES", buffer)
        check_case(case)
        check_case(Case("ConvTranspose", [normal(3, 4, 5, 6), normal(4, 2, 3, 3)], {"group": 2, "strides": [2, 1]}))


def test_auto_pad_stays_symbolic_until_sizes_are_known() -> None:
    case = Case("Conv", [normal(1, 3, 9, 9), normal(4, 3, 3, 3)], {"auto_pad": "SAME_UPPER", "strides": [2, 2]})
    (op,) = import_case(case, {0: (2,)}).of_kind("Conv")
    assert op.attrs.auto_pad == "SAME_UPPER"
    later = resolved(op.attrs, tensor(np.float32, 1, 3, 9, 9), tensor(np.float32, 4, 3, 3, 3))
    assert (later.auto_pad, later.pads) == ("NOTSET", (1, 1, 1, 1))
    assert resolved(op.attrs, tensor(np.float32, 1, 3, symbol("h"), 9), tensor(np.float32, 4, 3, 3, 3)) == op.attrs
    # With stride 1 the padding does not depend on the size.
    (op,) = import_case(Case("Conv", case.inputs, {"auto_pad": "SAME_LOWER"}), {0: (2,)}).of_kind("Conv")
    assert (op.attrs.auto_pad, op.attrs.pads) == ("NOTSET", (1, 1, 1, 1))


TRANSPOSED = [
    ((2, 4, 5, 6), (4, 3, 3, 3), {}),
    ((2, 4, 5, 6), (4, 3, 3, 3), {"strides": [2, 3], "pads": [1, 0, 1, 2], "output_padding": [1, 2]}),
    ((2, 4, 5, 6), (4, 3, 3, 2), {"dilations": [2, 1], "strides": [1, 2]}),
    ((2, 4, 5, 6), (4, 2, 3, 3), {"group": 2, "strides": [2, 2]}),
    ((2, 4, 5, 6), (4, 1, 3, 3), {"group": 4, "strides": [2, 2], "pads": [1, 1, 1, 1]}),
    ((2, 4, 5, 6), (4, 3, 3, 3), {"strides": [3, 2], "output_shape": [14, 11]}),
    ((2, 4, 5, 6), (4, 3, 4, 3), {"strides": [3, 2], "output_shape": [15, 12], "auto_pad": "SAME_UPPER"}),
    ((2, 4, 5, 6), (4, 3, 3, 4), {"strides": [2, 2], "auto_pad": "SAME_UPPER"}),
    ((2, 4, 5, 6), (4, 3, 3, 4), {"strides": [2, 2], "auto_pad": "SAME_LOWER"}),
    ((2, 4, 5, 6), (4, 3, 3, 4), {"strides": [2, 2], "auto_pad": "VALID"}),
    ((2, 4, 7), (4, 3, 3), {"strides": [2], "pads": [1, 0]}),
    ((1, 2, 3, 4, 3), (2, 3, 2, 3, 3), {"strides": [1, 2, 2], "pads": [0, 1, 0, 1, 1, 0]}),
]


@pytest.mark.parametrize(("x", "w", "attrs"), TRANSPOSED)
@pytest.mark.parametrize("bias", [False, True])
def test_conv_transpose(x: tuple[int, ...], w: tuple[int, ...], attrs: dict, bias: bool) -> None:
    operands = [normal(*x), normal(*w, seed=1), normal(w[1] * attrs.get("group", 1), seed=2)]
    check_case(Case("ConvTranspose", operands if bias else operands[:2], attrs), symbolic={0: (0, *range(2, len(x)))})


def test_conv_transpose_same_with_a_kernel_below_the_stride() -> None:
    x, w = normal(1, 2, 4, 4), normal(2, 3, 1, 1)
    graph = check_case(Case("ConvTranspose", [x, w], {"strides": [3, 3], "auto_pad": "SAME_UPPER"}), [_sparse(x, w)])
    assert graph.of_kind("ConvTranspose")[0].attrs.output_padding == (2, 2)


def _sparse(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    y = np.zeros((1, 3, 12, 12), np.float32)
    y[:, :, ::3, ::3] = np.einsum("nchw,cm->nmhw", x, w[:, :, 0, 0])
    return y


def _conv(x: tuple, w: tuple, bias: tuple | None = None, kind: str = "Conv", **attrs: object) -> None:
    operands = [np.zeros(x, np.float32), np.zeros(w, np.float32)]
    import_case(Case(kind, [*operands, *([np.zeros(bias, np.float32)] if bias else [])], attrs))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"x": (1, 3, 5, 5), "w": (4, 2, 3, 3)}, "channels"),
        ({"x": (1, 4, 5, 5), "w": (3, 2, 3, 3), "group": 2}, "groups do not divide"),
        ({"x": (1, 3, 5, 5), "w": (4, 3, 3, 3), "bias": (3,)}, "bias length"),
        ({"x": (1, 3, 5, 5), "w": (4, 3, 3, 3), "bias": (4, 1)}, "bias must have 1"),
        ({"x": (1, 3, 5), "w": (4, 3, 3, 3)}, "must have 4 dimensions"),
        ({"x": (1, 3), "w": (4, 3)}, "at least 3"),
        ({"x": (1, 3, 5, 5), "w": (4, 3, 7, 3)}, "does not fit"),
        ({"x": (1, 3, 5, 5), "w": (4, 3, 3, 3), "strides": [1]}, "strides has 1"),
        ({"x": (1, 3, 5, 5), "w": (4, 3, 3, 3), "strides": [0, 1]}, "must be positive"),
        ({"x": (1, 3, 5, 5), "w": (4, 3, 3, 3), "dilations": [1, 1, 1]}, "dilations has 3"),
        ({"x": (1, 3, 5, 5), "w": (4, 3, 3, 3), "pads": [1, 1]}, "pads has 2"),
        ({"x": (1, 3, 5, 5), "w": (4, 3, 3, 3), "group": 0}, "group"),
        ({"x": (1, 3, 5, 5), "w": (4, 3, 3, 3), "kernel_shape": [3, 2]}, "kernel_shape"),
        ({"x": (1, 3, 5, 5), "w": (4, 3, 3, 3), "auto_pad": "SAME"}, "auto_pad"),
        ({"kind": "ConvTranspose", "x": (1, 3, 5, 5), "w": (4, 3, 3, 3)}, "channels"),
        ({"kind": "ConvTranspose", "x": (1, 3, 5, 5), "w": (3, 2, 3, 3), "group": 2}, "groups do not divide"),
        ({"kind": "ConvTranspose", "x": (1, 3, 1, 5), "w": (3, 2, 3, 3), "pads": [2, 0, 2, 0]}, "leave nothing"),
        (
            {"kind": "ConvTranspose", "x": (1, 3, 5, 5), "w": (3, 2, 3, 3), "output_padding": [1]},
            "output_padding has 1",
        ),
        ({"kind": "ConvTranspose", "x": (1, 3, 5, 5), "w": (3, 2, 3, 3), "output_shape": [9]}, "output_shape has 1"),
        ({"kind": "ConvTranspose", "x": (1, 3, 5, 5), "w": (3, 2, 3, 3), "bias": (3,)}, "bias length"),
    ],
)
def test_contradictions_are_refused(kwargs: dict, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        _conv(**kwargs)


def test_types_must_agree() -> None:
    g = Graph()
    x, w = g.add_input("x", tensor(np.float64, 1, 3, 5, 5)), g.add_input("w", tensor(np.float32, 4, 3, 3, 3))
    attrs = ConvAttrs((1, 1), (0,) * 4, (1, 1))
    with pytest.raises(ShapeError, match="different types"):
        g.add("Conv", [x, w], attrs)
    i = g.add_input("i", tensor(np.int32, 4, 3, 3, 3))
    with pytest.raises(ShapeError, match="floating-point"):
        g.add("Conv", [i, i], attrs)


def test_cost_counts_a_multiply_add_as_two() -> None:
    graph = import_case(Case("Conv", [normal(2, 4, 8, 8), normal(6, 2, 3, 3), normal(6)], {"group": 2}))
    assert op_flops(graph, graph.of_kind("Conv")[0]) == 2 * (2 * 6 * 6 * 6) * (2 * 9) + 2 * 6 * 6 * 6
    graph = import_case(Case("ConvTranspose", [normal(2, 4, 8, 8), normal(4, 3, 3, 3)]))
    assert op_flops(graph, graph.of_kind("ConvTranspose")[0]) == 2 * (2 * 4 * 8 * 8) * (3 * 9)


def test_export() -> None:
    x, w, bias = normal(2, 6, 7, 8), normal(4, 3, 3, 3), normal(4)
    attrs = {"group": 2, "strides": [2, 1], "pads": [1, 0, 1, 2], "dilations": [1, 2]}
    check_export(Case("Conv", [x, w, bias], attrs))
    check_export(Case("Conv", [x, w], {"auto_pad": "SAME_LOWER", "group": 2, "strides": [2, 2]}))
    w = normal(6, 2, 3, 4)
    attrs = {"group": 2, "strides": [2, 3], "pads": [1, 0, 1, 1], "output_padding": [1, 2]}
    check_export(Case("ConvTranspose", [x, w, bias], attrs))


def test_export_keeps_symbolic_dimensions() -> None:
    case = Case("Conv", [normal(1, 3, 9, 9), normal(4, 3, 3, 3)], {"auto_pad": "SAME_UPPER", "strides": [2, 2]})
    (node,) = export_model(import_case(case, {0: (2,)})).proto.graph.node
    assert {a.name for a in node.attribute} == {"auto_pad", "dilations", "group", "kernel_shape", "strides"}
    case = Case("ConvTranspose", [normal(1, 3, 4, 4), normal(3, 2, 3, 3)], {"output_shape": [9, 9], "strides": [2, 2]})
    model = export_model(import_case(case, {0: (2,)})).proto
    (y,) = onnxruntime_run(model, case.fed)
    (op,) = import_case(case, {0: (2,)}).of_kind("ConvTranspose")
    types = tensor(np.float32, 1, 3, 4, 4), tensor(np.float32, 3, 2, 3, 3)
    assert op.attrs.output_shape == (9, 9)
    assert resolved_transpose(op.attrs, *types) == import_case(case).of_kind("ConvTranspose")[0].attrs
    assert resolved_transpose(op.attrs, tensor(np.float32, 1, 3, symbol("h"), 4), types[1]) == op.attrs
    np.testing.assert_allclose(y, run(import_case(case), case.fed)[0], atol=1e-5)
