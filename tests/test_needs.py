"""Which tests are not collected where there is no GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from support import needs

from optdnn.errors import MissingDependency


@pytest.mark.parametrize(
    ("of_function", "of_module", "found"),
    [
        ([pytest.mark.gpu], None, True),
        ([pytest.mark.slow, pytest.mark.hopper], None, True),
        ([], pytest.mark.gpu, True),
        ([], [pytest.mark.nvrtc, pytest.mark.gpu], True),
        ([pytest.mark.nvrtc], pytest.mark.slow, False),
        (None, None, False),
    ],
)
def test_functions_for_gpus_are_marked_themselves_or_by_their_module(
    of_function: Any, of_module: Any, found: bool
) -> None:
    nodes = [
        SimpleNamespace() if marks is None else SimpleNamespace(pytestmark=marks) for marks in (of_function, of_module)
    ]
    assert needs.is_for_gpus(*nodes) is found


@pytest.mark.parametrize(
    ("expression", "gpus", "found"),
    [("not slow", 0, True), ("not slow", 1, False), ("gpu", 0, False), ("slow and not gpu", 0, True), ("", None, True)],
)
def test_they_are_left_out_unless_they_are_named(
    expression: str, gpus: int | None, found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def count() -> int:
        if gpus is None:
            raise MissingDependency("cuda-bindings", "cuda", "to use a GPU")
        return gpus

    monkeypatch.setattr(needs, "gpu_count", count)
    assert needs.without_gpu(expression) is found
