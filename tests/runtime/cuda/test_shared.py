"""Kernels that plans share: each is loaded once, with the largest settings that one of them needs, and freed with the last."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest

from optdnn.runtime.cuda import device
from optdnn.runtime.cuda.memory.shared import Pool


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A driver that records its calls."""
    made: list[Any] = []
    success = SimpleNamespace(name="CUDA_SUCCESS")

    def note(name: str) -> Any:
        def call(*arguments: Any) -> Any:
            made.append((name, *arguments[1:]))
            return (success, f"{name} {len(made)}")

        return call

    attribute = SimpleNamespace(
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="shared",
        CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED="wide",
    )
    fake: Any = SimpleNamespace(
        CUresult=SimpleNamespace(CUDA_SUCCESS=success), CUfunction_attribute=attribute,
        cuModuleLoadData=note("load"), cuModuleGetFunction=note("get"), cuFuncSetAttribute=note("set"),
    )  # fmt: skip
    monkeypatch.setattr(device, "driver", lambda: fake)
    return made


def test_a_kernel_is_loaded_once_with_the_largest_settings(calls: list[Any]) -> None:
    pool = Pool()
    first = pool.function(b"code", "f", shared=60000)
    assert calls == [("load",), ("get", b"f"), ("set", "shared", 60000)]
    assert pool.function(bytes(bytearray(b"code")), "f", shared=50000) is first
    assert pool.function(b"code", "f", shared=70000, wide_cluster=True) is first
    assert pool.function(b"code", "f", wide_cluster=True) is first
    assert calls[3:] == [("set", "shared", 70000), ("set", "wide", 1)]
    assert pool.function(b"code", "g") is not first
    assert pool.function(b"other", "f") is not first
    assert [c for c in calls if c[0] == "load"] == [("load",)] * 3


def test_a_kernel_is_freed_with_the_last_plan(calls: list[Any]) -> None:
    pool = Pool()
    held = pool.function(b"code", "f")
    del held
    gc.collect()
    pool.function(b"code", "f")
    assert [c[0] for c in calls] == ["load", "get"] * 2
