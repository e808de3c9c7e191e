"""``optdnn.verify`` of engines for the CPU whose library gives wrong results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from support import small_models
from verified import statuses, text

import optdnn
from optdnn.compare import checks
from optdnn.compare.checks import FAILED, NOT_CHECKED, PASSED
from optdnn.types import Array


def library(monkeypatch: pytest.MonkeyPatch, change: Callable[[Sequence[Array], Sequence[Any]], list[Array]]) -> None:
    """ONNX Runtime's results are changed: ``change(results, offered memory)``."""
    from optdnn.runtime.cpu import onnxruntime

    right = onnxruntime._OnnxRuntimeSession.run

    def wrong(self: Any, inputs: Any, outs: Any) -> list[Array]:
        return change([a.copy() for a in right(self, inputs, [None] * len(outs))], outs)

    def bound(self: Any, inputs: Sequence[Array], outs: Sequence[Array]) -> Callable[[], object]:
        def call() -> None:
            for out, result in zip(outs, wrong(self, inputs, [None] * len(outs)), strict=True):
                out[...] = result

        return call

    monkeypatch.setattr(onnxruntime._OnnxRuntimeSession, "run", wrong)
    monkeypatch.setattr(onnxruntime._OnnxRuntimeSession, "bound", bound)


@pytest.fixture
def engine() -> optdnn.Engine:
    pytest.importorskip("onnxruntime")
    return optdnn.build(small_models.mlp(), target="cpu", tactics="onnxruntime")


def test_a_library_that_computes_something_else_shows_without_the_model(
    engine: optdnn.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert statuses(optdnn.verify(engine))["steps"] == PASSED
    library(monkeypatch, lambda results, outs: [a + np.float32(0.01) for a in results])
    found = optdnn.verify(optdnn.Engine(engine.program))
    assert [c.name for c in found.failed] == ["steps"]
    assert "1 of 1 fail: step 0 (onnxruntime): y is off by" in text(found, "steps")


def test_a_library_that_never_gives_the_same_twice_shows(
    engine: optdnn.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = iter(range(1 << 20))
    library(monkeypatch, lambda results, outs: [a + np.float32(1e-7) * next(count) for a in results])
    found = {c.name for c in optdnn.verify(optdnn.Engine(engine.program)).failed}
    assert "repeats" in found


def test_a_library_that_leaves_output_memory_as_it_was_shows(
    engine: optdnn.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kept(results: Sequence[Array], outs: Sequence[Any]) -> list[Array]:
        for a, out in zip(results, outs, strict=True):
            if out is not None:
                out[1:] = a[1:]  # the first row keeps its old contents
        return [a if out is None else out for a, out in zip(results, outs, strict=True)]

    library(monkeypatch, kept)
    found = optdnn.verify(optdnn.Engine(engine.program))
    assert [c.name for c in found.failed] == ["memory"]
    assert text(found, "memory") == "y depend on the earlier contents of output memory"


def test_a_library_that_gives_rows_of_the_call_before_shows(
    engine: optdnn.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    before: list[Array] = []

    def stale(results: Sequence[Array], outs: Sequence[Any]) -> list[Array]:
        (now,) = results
        mixed = now.copy()
        if before:
            mixed[0] = before.pop()[0]
        before.append(now)
        return [mixed]

    library(monkeypatch, stale)
    assert "repeats" in {c.name for c in optdnn.verify(optdnn.Engine(engine.program)).failed}


def test_operators_without_a_numpy_kernel_are_reported(engine: optdnn.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    from optdnn.errors import UnsupportedError

    def refuse(*_: Any) -> None:
        raise UnsupportedError("an operator of the library's own")

    monkeypatch.setattr(checks, "library_graph", refuse)
    found = optdnn.verify(engine)
    assert statuses(found)["steps"] == NOT_CHECKED
    assert "NumPy does not evaluate its model: an operator of the library's own" in text(found, "steps")


@pytest.mark.parametrize("tactics", ["onnxruntime", "openvino"])
def test_the_models_of_both_libraries_are_read_with_their_weights(tactics: str) -> None:
    pytest.importorskip(tactics)
    engine = optdnn.build(small_models.residual(), target="cpu", tactics=tactics)
    (step,) = engine.program.steps
    assert step.params["weights"]
    assert statuses(optdnn.verify(engine, seed=3))["steps"] == PASSED


def test_int8_of_a_library() -> None:
    pytest.importorskip("onnxruntime")
    found = optdnn.verify(optdnn.build(small_models.quantized(), target="cpu", tactics="onnxruntime"))
    assert found.ok
    assert statuses(found)["steps"] == PASSED


def test_a_fault_that_ends_in_an_error_is_a_failed_check(
    engine: optdnn.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    library(monkeypatch, lambda results, outs: [a.astype(np.float64) for a in results])
    found = optdnn.verify(optdnn.Engine(engine.program))
    assert statuses(found)["runs"] == FAILED
    assert "computed 'y' as float64[4, 10]; it should be fp32[4, 10]" in text(found, "runs")
