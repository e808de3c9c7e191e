"""Fixtures for the tests of hostile engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.untrusted import convolution, program

from optdnn.runtime.cuda import device, start
from optdnn.runtime.cuda.compile import nvrtc


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Calls of the compiler or the driver fail the test. Returns the folder of the kernel cache."""

    def reached(*arguments: Any, **more: Any) -> Any:
        raise AssertionError("the compiler or the driver was called")

    program(), convolution()  # built before, since a build may look for a GPU
    for module, names in ((nvrtc, ("_call", "compile_recipe")), (device, ("driver", "gpu_count")), (start, ("begin",))):
        for name in names:
            monkeypatch.setattr(module, name, reached)
    monkeypatch.setenv("OPTDNN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"
