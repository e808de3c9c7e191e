"""Pools compared with ONNX Runtime and with a direct form of the definition; inference; every refusal."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from onenode import Case, check_case, check_export, import_case, normal, op_flops, run
from onnx import helper

from optdnn.errors import RunError, ShapeError, UnsupportedError
from optdnn.ir.export_onnx import export_model
from optdnn.ir.graph import Graph
from optdnn.ops.base import EXACT
from optdnn.ops.pool import MaxUnpoolAttrs
from optdnn.types import INT64, tensor

Json = dict[str, Any]

GEOMETRIES: list[tuple[tuple[int, ...], Json]] = [
    ((2, 3, 8, 9), {"kernel_shape": [2, 3]}),
    ((2, 3, 8, 9), {"kernel_shape": [3, 2], "strides": [2, 3], "pads": [1, 0, 2, 1]}),
    ((2, 3, 8, 9), {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1], "ceil_mode": 1}),
    ((1, 2, 7, 6), {"kernel_shape": [2, 2], "strides": [3, 4], "ceil_mode": 1}),
    # ceil_mode would start a window in the end padding here; it is dropped.
    ((1, 2, 5, 5), {"kernel_shape": [2, 2], "strides": [3, 2], "pads": [0, 0, 1, 1], "ceil_mode": 1}),
    ((2, 3, 12), {"kernel_shape": [3], "strides": [2], "pads": [1, 1]}),
    ((1, 2, 5, 6, 7), {"kernel_shape": [2, 3, 2], "strides": [1, 2, 2], "pads": [0, 1, 1, 1, 1, 0]}),
    ((2, 3, 8, 9), {"kernel_shape": [3, 4], "strides": [2, 3], "auto_pad": "SAME_UPPER"}),
    ((2, 3, 8, 9), {"kernel_shape": [2, 4], "strides": [1, 3], "auto_pad": "SAME_LOWER"}),
    ((2, 3, 8, 9), {"kernel_shape": [3, 2], "strides": [2, 2], "auto_pad": "VALID"}),
]
DILATED: list[tuple[tuple[int, ...], Json]] = [
    ((2, 3, 9, 11), {"kernel_shape": [2, 3], "dilations": [3, 2]}),
    ((2, 3, 9, 11), {"kernel_shape": [3, 3], "dilations": [2, 2], "strides": [2, 3], "pads": [2, 1, 2, 1]}),
    ((1, 2, 9, 10), {"kernel_shape": [2, 2], "dilations": [2, 3], "strides": [2, 2], "ceil_mode": 1}),
]


def _spatial(x: tuple[int, ...]) -> dict[int, tuple[int, ...]]:
    return {0: (0, *range(2, len(x)))}


@pytest.mark.parametrize(("x", "attrs"), GEOMETRIES + DILATED)
@pytest.mark.parametrize("order", [0, 1])
def test_max_pool_with_indices(x: tuple[int, ...], attrs: Json, order: int) -> None:
    attrs = {**attrs, "storage_order": order}
    check_case(Case("MaxPool", [normal(*x)], attrs, opset=12, outputs=2), symbolic=_spatial(x), tol=EXACT)
    check_case(Case("MaxPool", [normal(*x)], attrs, opset=12), symbolic=_spatial(x), tol=EXACT)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
def test_max_pool_of_integers(dtype: Any) -> None:
    x = np.random.default_rng(0).integers(-100 if dtype == np.int8 else 0, 100, (2, 3, 8, 9)).astype(dtype)
    attrs = {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}
    check_case(Case("MaxPool", [x], attrs))


def test_max_pool_indices_of_equal_values_name_the_first() -> None:
    x = np.zeros((1, 1, 4, 4), np.float32)
    check_case(Case("MaxPool", [x], {"kernel_shape": [2, 2], "strides": [2, 2]}, outputs=2), tol=EXACT)
    below = np.full((1, 1, 3, 3), -np.inf, np.float32)  # padding must not exceed minus infinity
    attrs = {"kernel_shape": [2, 2], "pads": [1, 1, 1, 1]}
    case = Case("MaxPool", [below], attrs, outputs=2)
    _, where = run(import_case(case), case.fed)
    assert where.min() >= 0


@pytest.mark.parametrize(("op", "opset"), [("MaxPool", 12), ("AveragePool", 19), ("LpPool", 18)])
@pytest.mark.parametrize(
    ("auto_pad", "sizes"),
    [
        # ONNX: ceil((7 - 2 + 1) / 2) and ceil((9 - 5 + 1) / 2); ONNX Runtime computes ceil((7 - 2) / 2) + 1
        ("VALID", (3, 3)),
        # ONNX: ceil(7 / 2) and ceil(9 / 2); ONNX Runtime's LpPool leaves out the dilation where it pads
        ("SAME_UPPER", (4, 5)),
        ("SAME_LOWER", (4, 5)),
    ],
)
def test_sizes_under_auto_pad_are_those_of_onnx_when_rounded_up(
    op: str, opset: int, auto_pad: str, sizes: tuple[int, int]
) -> None:
    attrs = {"kernel_shape": [2, 3], "strides": [2, 2], "dilations": [1, 2], "auto_pad": auto_pad, "ceil_mode": 1}
    (y,) = run(import_case(case := Case(op, [normal(1, 2, 7, 9)], attrs, opset)), case.fed)
    assert y.shape == (1, 2, *sizes)


@pytest.mark.parametrize(("x", "attrs"), GEOMETRIES)
@pytest.mark.parametrize("include", [0, 1])
def test_average_pool(x: tuple[int, ...], attrs: Json, include: int) -> None:
    case = Case("AveragePool", [normal(*x)], {**attrs, "count_include_pad": include}, opset=10)
    check_case(case, [_pooled(case, include, np.mean)], symbolic=_spatial(x))
    if not attrs.get("ceil_mode"):  # ONNX Runtime counts what ceil_mode adds in some releases
        check_case(case)


@pytest.mark.parametrize("pads", [[0, 0, 0, 0], [1, 0, 1, 2]])
@pytest.mark.parametrize("include", [0, 1])
def test_windows_larger_than_the_image(pads: list[int], include: int) -> None:
    """Rounded up, there is one window. It ends with the padded image."""
    x = normal(2, 3, 4, 5)
    attrs = {"kernel_shape": [2560, 2560], "strides": [2560, 2560], "pads": pads, "ceil_mode": 1}
    case = Case("AveragePool", [x], {**attrs, "count_include_pad": include}, opset=20)
    count = (4 + pads[0] + pads[2]) * (5 + pads[1] + pads[3]) if include else 20
    check_case(case, [x.sum((2, 3), keepdims=True) / np.float32(count)])
    assert import_case(case).of_kind("AveragePool")[0].attrs.kernel_shape == (4 + sum(pads[::2]), 5 + sum(pads[1::2]))
    check_case(Case("MaxPool", [x], attrs, opset=12), [x.max((2, 3), keepdims=True)], tol=EXACT)


@pytest.mark.parametrize(
    ("attrs", "kernel"),
    [
        ({"kernel_shape": [7, 3], "strides": [4, 1], "ceil_mode": 1}, (4, 3)),
        ({"kernel_shape": [4, 2], "dilations": [2, 1], "strides": [4, 1], "ceil_mode": 1}, (4, 2)),
    ],
)
def test_only_larger_windows_without_dilation_are_cut(attrs: Json, kernel: tuple[int, ...]) -> None:
    case = Case("MaxPool", [normal(1, 1, 4, 5)], attrs, opset=12)
    assert import_case(case).of_kind("MaxPool")[0].attrs.kernel_shape == kernel


@pytest.mark.parametrize(("x", "attrs"), DILATED)
@pytest.mark.parametrize("include", [0, 1])
def test_dilated_average_pool(x: tuple[int, ...], attrs: Json, include: int) -> None:
    case = Case("AveragePool", [normal(*x)], {**attrs, "count_include_pad": include}, opset=19)
    check_case(case, [_pooled(case, include, np.mean)], symbolic=_spatial(x))


@pytest.mark.parametrize(("x", "attrs"), GEOMETRIES + DILATED)
@pytest.mark.parametrize("p", [1, 2, 3])
def test_lp_pool(x: tuple[int, ...], attrs: Json, p: int) -> None:
    case = Case("LpPool", [normal(*x)], {**attrs, "p": p}, opset=18)
    expected = _pooled(case, 1, lambda w: (np.abs(w) ** p).sum() ** (1 / p))
    check_case(case, [expected], symbolic=_spatial(x))
    if not attrs.get("ceil_mode"):
        check_case(case)


def _pooled(case: Case, include: int, reduce: Any) -> np.ndarray:
    """The definition, element by element, with the pads and sizes that the import computed."""
    x, a = case.inputs[0], import_case(case).of_kind(case.op)[0].attrs
    out = [int(d) for d in import_case(case).of_kind(case.op)[0].outputs[0].type.static_shape[2:]]
    rank = len(out)
    y = np.zeros((*x.shape[:2], *out))
    for at in itertools.product(*map(range, out)):
        picked = []
        for i, o in enumerate(at):
            taps = o * a.strides[i] - a.pads[i] + np.arange(a.kernel_shape[i]) * a.dilations[i]
            low, high = (-a.pads[i], x.shape[2 + i] + a.pads[rank + i]) if include else (0, x.shape[2 + i])
            picked.append([t for t in taps if low <= t < high])
        for n, c in itertools.product(*map(range, x.shape[:2])):
            window = [
                float(x[(n, c, *t)]) if all(0 <= v < s for v, s in zip(t, x.shape[2:], strict=True)) else 0.0
                for t in itertools.product(*picked)
            ]
            y[(n, c, *at)] = reduce(np.array(window))
    return y.astype(x.dtype)


@pytest.mark.parametrize("kind", ["GlobalMaxPool", "GlobalAveragePool", "GlobalLpPool"])
@pytest.mark.parametrize("shape", [(2, 3, 5), (2, 3, 5, 6), (2, 3, 4, 5, 6)])
def test_global_pools(kind: str, shape: tuple[int, ...]) -> None:
    check_case(Case(kind, [normal(*shape)], opset=21), symbolic=_spatial(shape))
    if kind == "GlobalLpPool":
        check_case(Case(kind, [normal(*shape)], {"p": 3}, opset=21))


def test_separable_passes_are_exact_in_float64() -> None:
    x = normal(1, 2, 20, 20, dtype=np.float64)
    case = Case("AveragePool", [x], {"kernel_shape": [7, 5], "pads": [3, 2, 3, 2]}, opset=19)
    check_case(case, [_pooled(case, 0, np.mean)])


def test_max_unpool_inverts_max_pool() -> None:
    x = normal(2, 3, 6, 8)
    pooled = Case("MaxPool", [x], {"kernel_shape": [2, 2], "strides": [2, 2]}, outputs=2)
    values, where = run(import_case(pooled), pooled.fed)
    attrs = {"kernel_shape": [2, 2], "strides": [2, 2]}
    check_case(Case("MaxUnpool", [values, where], attrs), symbolic={0: (0, 2, 3), 1: (0, 2, 3)})
    larger = np.array([2, 3, 7, 9])
    graph = check_case(Case("MaxUnpool", [values, where, larger], attrs, constants=[2]), "reference")
    assert graph.of_kind("MaxUnpool")[0].outputs[0].type.shape == (2, 3, 7, 9)
    known_later = import_case(Case("MaxUnpool", [values, where, larger], attrs))
    assert not known_later.of_kind("MaxUnpool")[0].outputs[0].type.is_static


def test_max_unpool_refuses_bad_indices_and_shapes() -> None:
    x, where = np.ones((1, 1, 2, 2), np.float32), np.array([0, 2, 8, 99]).reshape(1, 1, 2, 2)
    attrs = {"kernel_shape": [2, 2], "strides": [2, 2]}
    case = Case("MaxUnpool", [x, where], attrs)
    with pytest.raises(RunError, match="outside of the unpooled shape"):
        run(import_case(case), case.fed)
    case = Case("MaxUnpool", [x, where % 16, np.array([1, 1, 3, 4])], attrs)
    with pytest.raises(RunError, match="is smaller than"):
        run(import_case(case), case.fed)
    with pytest.raises(ShapeError, match="is smaller than"):
        import_case(Case("MaxUnpool", case.inputs, attrs, constants=[2]))
    g = Graph()
    a, b = g.add_input("a", tensor(np.float32, 1, 1, 2, 2)), g.add_input("b", tensor(np.int32, 1, 1, 2, 2))
    c = g.add_input("c", tensor(INT64, 1, 1, 2, 3))
    with pytest.raises(ShapeError, match="must be int64"):
        g.add("MaxUnpool", [a, b], MaxUnpoolAttrs((2, 2), (2, 2), (0,) * 4))
    with pytest.raises(ShapeError, match="different shapes"):
        g.add("MaxUnpool", [a, c], MaxUnpoolAttrs((2, 2), (2, 2), (0,) * 4))


@pytest.mark.parametrize(
    ("op", "x", "attrs", "message"),
    [
        ("MaxPool", np.zeros((1, 1, 4, 4), np.float32), {}, "needs attribute 'kernel_shape'"),
        ("MaxPool", np.zeros((1, 1, 4, 4), np.float32), {"kernel_shape": [2]}, "kernel_shape has 1"),
        ("MaxPool", np.zeros((1, 1, 4, 4), np.float32), {"kernel_shape": [0, 2]}, "must be positive"),
        ("MaxPool", np.zeros((1, 1, 4, 4), np.float32), {"kernel_shape": [5, 2]}, "does not fit"),
        (
            "MaxPool",
            np.zeros((1, 1, 4, 4), np.float32),
            {"kernel_shape": [6, 2], "strides": [2, 1], "ceil_mode": 1},
            "does not fit",
        ),
        ("MaxPool", np.zeros((1, 1, 4, 4), np.float32), {"kernel_shape": [2000, 2000]}, "window of"),
        ("MaxPool", np.zeros((1, 1, 4, 4), np.float32), {"kernel_shape": [2, 2], "pads": [1, 1]}, "pads has 2"),
        ("MaxPool", np.zeros((1, 1, 4, 4), np.int32), {"kernel_shape": [2, 2]}, "element type is not allowed"),
        ("AveragePool", np.zeros((1, 1, 4, 4), np.int8), {"kernel_shape": [2, 2]}, "element type is not allowed"),
        ("GlobalMaxPool", np.zeros((4,), np.float32), {}, "a batch and a channel axis"),
    ],
)
def test_contradictions_are_refused(op: str, x: Any, attrs: Json, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        import_case(Case(op, [x], attrs))


def test_cost() -> None:
    graph = import_case(Case("MaxPool", [normal(1, 2, 4, 4)], {"kernel_shape": [2, 2], "strides": [2, 2]}))
    assert op_flops(graph, graph.of_kind("MaxPool")[0]) == 4 * 2 * 4
    graph = import_case(Case("AveragePool", [normal(1, 2, 4, 4)], {"kernel_shape": [2, 2], "strides": [2, 2]}))
    assert op_flops(graph, graph.of_kind("AveragePool")[0]) == 5 * 2 * 4
    graph = import_case(Case("GlobalAveragePool", [normal(1, 2, 4, 4)]))
    assert op_flops(graph, graph.of_kind("GlobalAveragePool")[0]) == 32


def test_export() -> None:
    x, attrs = normal(2, 3, 8, 9), {"kernel_shape": [3, 2], "strides": [2, 3], "pads": [1, 0, 1, 1]}
    check_export(Case("MaxPool", [x], {**attrs, "ceil_mode": 1, "dilations": [1, 2], "storage_order": 1}, outputs=2))
    check_export(Case("MaxPool", [x], attrs))
    check_export(Case("AveragePool", [x], {**attrs, "count_include_pad": 1}))
    check_export(Case("LpPool", [x], {**attrs, "p": 3}))
    check_export(Case("GlobalLpPool", [x], {"p": 1}))
    check_export(Case("GlobalMaxPool", [x]))
    check_export(Case("GlobalAveragePool", [x]))
    indices = np.arange(24).reshape(1, 1, 4, 6) * 4
    check_export(Case("MaxUnpool", [normal(1, 1, 4, 6), indices], {"kernel_shape": [2, 2], "strides": [2, 2]}))


@pytest.mark.parametrize("kind", ["MaxPool", "AveragePool", "LpPool"])
def test_export_of_a_dropped_window(kind: str) -> None:
    """ONNX's shape inference counts such windows below opset 22 (its implementations never did): rounding down avoids it."""
    attrs = {"kernel_shape": [2], "strides": [3], "pads": [0, 1], "ceil_mode": 1}
    (node,) = check_export(Case(kind, [normal(1, 1, 5)], attrs)).graph.node
    values = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    assert (values["ceil_mode"], values["pads"]) == (0, [0, 0])


@pytest.mark.parametrize("kind", ["AveragePool", "LpPool"])
def test_export_of_dilated_pools(kind: str) -> None:
    check_export(Case(kind, [normal(1, 2, 9, 9)], {"kernel_shape": [2, 2], "dilations": [2, 2]}))
    plain = check_export(Case(kind, [normal(1, 2, 9, 9)], {"kernel_shape": [2, 2], "dilations": [1, 1]}))
    assert "dilations" not in {a.name for a in plain.graph.node[0].attribute}


def test_auto_pad_stays_symbolic_until_sizes_are_known() -> None:
    attrs = {"kernel_shape": [3, 3], "strides": [2, 2], "auto_pad": "SAME_LOWER"}
    case = Case("AveragePool", [normal(1, 2, 8, 8)], attrs)
    (op,) = import_case(case, {0: (3,)}).of_kind("AveragePool")
    assert op.attrs.auto_pad == "SAME_LOWER"
    check_export(case)
    values = {a.name for a in export_model(import_case(case, {0: (3,)})).proto.graph.node[0].attribute}
    assert "auto_pad" in values
    assert "pads" not in values


def test_export_of_symbolic_auto_pad_with_dilations_is_refused() -> None:
    """ONNX Runtime pads as if there were no dilation. Explicit pads are unambiguous."""
    case = Case(
        "MaxPool", [normal(1, 2, 8, 9)], {"kernel_shape": [3, 3], "dilations": [2, 2], "auto_pad": "SAME_UPPER"}
    )
    assert check_export(case).graph.output[0].type.tensor_type.shape.dim[2].dim_value == 8
    attrs = {**case.attrs, "strides": [2, 2]}
    with pytest.raises(UnsupportedError, match="disagree on the padding"):
        export_model(import_case(Case("MaxPool", case.inputs, attrs), {0: (2,)}))
