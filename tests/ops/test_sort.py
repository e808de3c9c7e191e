"""TopK, NonZero, Unique, Compress, ReverseSequence against ONNX Runtime; order of equal values; refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from known import infer
from onenode import Case, check_case, check_export, import_case, normal, run
from support.sweep import all_pairs

from optdnn.dim import Dim, bounds, symbol
from optdnn.errors import RunError, ShapeError
from optdnn.ir.export_onnx import export_model
from optdnn.ops.sort import CompressAttrs
from optdnn.runtime.reference import sort
from optdnn.types import tensor

F = np.float32


def ties(*shape: int, seed: int = 0, dtype: Any = F) -> np.ndarray:
    """Few different values."""
    return np.random.default_rng(seed).integers(0, 4, shape).astype(dtype)


@all_pairs(
    {
        "axis, k": [(-1, 5), (0, 2), (1, 3), (2, 9), (1, 1)],
        "largest": [0, 1],
        "dtype": [np.float32, np.float64, np.int64, np.int32, np.int8, np.uint8],
    }
)
def test_equal_values_come_in_the_order_of_onnx_runtime(dtype: Any, largest: int, axis: int, k: int) -> None:
    case = Case("TopK", [ties(4, 3, 9, dtype=dtype), np.array([k])], {"axis": axis, "largest": largest}, 11, 2, (1,))
    check_case(case, symbolic={0: (0, 1)} if axis == 2 else None)


@pytest.mark.parametrize("k", [1, 7, 40, 1000])
def test_large_k_has_the_same_order(k: int) -> None:
    check_case(Case("TopK", [ties(3, 1000), np.array([k])], {}, 11, 2, (1,)))
    check_case(Case("TopK", [normal(3, 1000), np.array([k])], {"largest": 0}, 11, 2, (1,)))


def test_top_k_of_extreme_integers() -> None:
    x = np.array([np.iinfo(np.int64).min, 3, np.iinfo(np.int64).max, -1])
    check_case(Case("TopK", [x, np.array([4])], {"largest": 1}, 11, 2, (1,)))


def test_top_k_export() -> None:
    case = Case("TopK", [normal(4, 9), np.array([3])], {"axis": 0}, 11, 2)
    check_export(case)
    check_case(Case("TopK", [normal(4, 9)], {"axis": 0, "k": 3}, 1, 2), run(import_case(case), case.fed))
    one = export_model(import_case(Case("TopK", case.inputs, {"largest": 0}, 11))).proto
    assert [len(node.output) for node in one.graph.node] == [2]  # as ONNX declares it, although one is not read


def test_unknown_k_and_symbolic_k() -> None:
    n = symbol("n")
    values, indices = infer("TopK", tensor(F, 3, n), tensor(np.int64, 1), outputs=2).types
    assert str(values.dims[1]).startswith("top_k")
    assert values.dims == indices.dims
    assert infer("TopK", tensor(F, 3, n + 5), [n], outputs=2).types[0].dims == (3, n)


@pytest.mark.parametrize(("k", "message"), [(10, "TopK of 10 values"), (-1, "TopK of -1 values")])
def test_top_k_that_contradicts(k: int, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        import_case(Case("TopK", [normal(3, 9), np.array([k])], {}, 11, 2, (1,)))
    late = Case("TopK", [normal(3, 9), np.array([k])], {}, 11, 2)
    with pytest.raises(RunError, match=f"k is {k}"):
        run(import_case(late), late.fed)


@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.bool_])
@pytest.mark.parametrize("shape", [(7,), (3, 4), (2, 3, 4), (0, 3)])
def test_non_zero(dtype: Any, shape: tuple[int, ...]) -> None:
    case = Case("NonZero", [ties(*shape).astype(dtype)], opset=13)
    (expected,) = np.array(np.nonzero(case.inputs[0])).astype(np.int64)[None]
    (got,) = run(import_case(case), case.fed)
    np.testing.assert_array_equal(got, expected)
    assert import_case(case).of_kind("NonZero")[0].outputs[0].type.dims[0] == len(shape)
    if shape[0]:
        check_export(case)


@pytest.mark.parametrize("sorted_", [0, 1])
@pytest.mark.parametrize(("shape", "axis"), [((20,), None), ((4, 5), None), ((9, 2), 0), ((2, 9), 1), ((9, 1, 2), -3)])
def test_unique(sorted_: int, shape: tuple[int, ...], axis: int | None) -> None:
    attrs = {"sorted": sorted_} | ({} if axis is None else {"axis": axis})
    case = Case("Unique", [ties(*shape) // 2 if axis is not None else ties(*shape)], attrs, 11, 4)
    from onenode import onnxruntime_outputs

    for got, expected in zip(run(import_case(case), case.fed), onnxruntime_outputs(case), strict=True):
        np.testing.assert_array_equal(got, expected)
    check_export(case)


@pytest.mark.parametrize(("axis", "n"), [(None, 12), (None, 5), (0, 3), (1, 4), (-1, 2)])
def test_compress(axis: int | None, n: int) -> None:
    condition = np.random.default_rng(1).random(n) < 0.5
    attrs = {} if axis is None else {"axis": axis}
    check_case(Case("Compress", [normal(3, 4), condition], attrs, 11, constants=(1,)))
    case = Case("Compress", [normal(3, 4), condition], attrs, 11)
    np.testing.assert_array_equal(run(import_case(case), case.fed)[0], np.compress(condition, case.inputs[0], axis))
    check_export(case)


@pytest.mark.parametrize(("batch", "time"), [(1, 0), (0, 1)])
def test_reverse_sequence(batch: int, time: int) -> None:
    x, lens = normal(4, 5, 3), np.array([3, 1, 4, 2, 4])[: (5, 4)[1 - batch] if batch == 1 else 4]
    lens = np.minimum(np.array([3, 1, 4, 2, 4])[: x.shape[batch]], x.shape[time])
    case = Case("ReverseSequence", [x, lens], {"batch_axis": batch, "time_axis": time}, 10)
    check_case(case, symbolic={0: (2,)})
    check_export(case)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (Case("Compress", [normal(3, 4), np.ones(4, bool)], {"axis": 0}, 11), "longer than the 3 slices"),
        (Case("Compress", [normal(3, 4), np.ones(3, F)], {"axis": 0}, 11), "must be bool"),
        (Case("Unique", [normal(3, 4)], {"axis": 2}, 11), "Unique axis 2"),
        (Case("ReverseSequence", [normal(3, 4, 5), np.ones(3, int)], {"batch_axis": 2}, 10), "first two axes"),
        (Case("ReverseSequence", [normal(3, 4), np.ones(3, int)], {}, 10), "one length per sample"),
    ],
)
def test_operands_that_contradict(case: Case, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        import_case(case)


def test_lengths_beyond_the_end() -> None:
    case = Case("ReverseSequence", [normal(3, 2), np.array([1, 4])], {}, 10)
    with pytest.raises(RunError, match="for 3 steps"):
        run(import_case(case), case.fed)
    assert infer("Compress", tensor(F, 3, 4), tensor(bool, 2), attrs=CompressAttrs(0)).types[0].dims[1] == 4


@pytest.mark.parametrize(
    ("kind", "operands", "most"),
    [
        ("NonZero", [tensor(F, 3, 4)], 12),
        ("Unique", [tensor(F, 3, 4)], 12),
        ("Compress", [tensor(F, 3, 4), tensor(np.bool_, 5)], 5),
        ("TopK", [tensor(F, 7), tensor(np.int64, 1)], 7),
        ("Slice", [tensor(F, 9), tensor(np.int64, 1), tensor(np.int64, 1)], 9),
        ("NonMaxSuppression", [tensor(F, 2, 10, 4), tensor(F, 2, 3, 10)], 0),
        ("NonMaxSuppression", [tensor(F, 2, 10, 4), tensor(F, 2, 3, 10), [4]], 24),
        ("NonMaxSuppression", [tensor(F, 2, 10, 4), tensor(F, 2, 3, 10), [99]], 60),
        ("NonMaxSuppression", [tensor(F, 2, 10, 4), tensor(F, 2, 3, 10), tensor(np.int64, 1)], 60),
    ],
)
def test_sizes_that_depend_on_data_have_bounds(kind: str, operands: list[Any], most: int) -> None:
    dims = infer(kind, *operands).types[0].dims
    assert max(bounds(d)[1] for d in dims if isinstance(d, Dim)) == most


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.uint8])
@pytest.mark.parametrize("axis", [0, 1])
def test_few_of_many_are_those_of_the_whole_order(
    largest: bool, dtype: Any, axis: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many equal elements: the first ones are selected."""
    x = np.random.default_rng(0).integers(0, 9, (200, 200)).astype(dtype)
    x = x[:, :5] if axis == 0 else x[:5]
    few = sort.top_k(x, np.array([20]), axis=axis, largest=largest)
    monkeypatch.setattr(sort, "MANY", 0)
    for a, b in zip(few, sort.top_k(x, np.array([20]), axis=axis, largest=largest), strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.dtype == b.dtype
