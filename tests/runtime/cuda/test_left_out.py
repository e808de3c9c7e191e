"""Tests that need a GPU are left out on machines without one, and only there."""

from __future__ import annotations

import pytest
from support import needs

from optdnn.errors import MissingDependency


def missing() -> int:
    raise MissingDependency("cuda-bindings", "cuda", "to run on an NVIDIA GPU")


@pytest.mark.parametrize("count", [lambda: 0, missing])
def test_without_a_gpu_they_run_only_when_asked_for(count: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needs, "gpu_count", count)
    assert needs.without_gpu("not slow")
    assert needs.without_gpu("slow and not gpu")
    assert not needs.without_gpu("gpu")
    assert not needs.without_gpu("gpu and not whole_gpu")


def test_with_a_gpu_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needs, "gpu_count", lambda: 1)
    assert not needs.without_gpu("not slow")
