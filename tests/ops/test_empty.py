"""Operators on operands without elements: the NumPy kernels compared with ONNX Runtime, which runs in a separate process."""

from __future__ import annotations

import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from empty_cases import CASES, OWN
from onenode import Case, assert_close, import_case, run

from optdnn.dim import Dim
from optdnn.ops.base import Tol
from optdnn.types import Array


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """ONNX Runtime's results for each case, or the text of its refusal."""
    out = tmp_path_factory.mktemp("empty") / "results.pickle"
    command = [sys.executable, str(Path(__file__).with_name("empty_cases.py")), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[int, Any] = pickle.loads(out.read_bytes())
    return found


def _name(case: Case) -> str:
    shapes = ", ".join("-" if x is None else str(list(x.shape)) for x in case.inputs)
    return f"{case.op} {shapes} {dict(case.attrs) or ''}"


@pytest.mark.parametrize("k", range(len(CASES)), ids=lambda k: _name(CASES[k]))
def test_empty_operands(k: int, expected: dict[int, Any]) -> None:
    assert not isinstance(expected[k], str), expected[k]
    _quietly(CASES[k], expected[k])


@pytest.mark.parametrize(("case", "wanted"), OWN, ids=lambda v: _name(v) if isinstance(v, Case) else "")
def test_cases_that_onnx_runtime_refuses(case: Case, wanted: list[Array]) -> None:
    _quietly(case, wanted)


def _quietly(case: Case, wanted: list[Array]) -> None:
    """The kernels give the expected values of the inferred type, without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        graph = import_case(case)
        results = run(graph, case.fed)
    assert len(results) == len(wanted)
    for i, got, want in zip(graph.outputs, results, wanted, strict=True):
        t = graph.op(i).outputs[0].type
        inferred = t.shape is None or all(isinstance(d, Dim) or d == n for d, n in zip(t.shape, got.shape, strict=True))
        assert t.dtype == got.dtype
        assert inferred, f"inferred {t}, is {list(got.shape)}"
        assert_close(got, np.asarray(want), Tol(1e-4, 1e-5))
