"""What some tests need of the machine; they skip themselves, with the reason, where it is not there."""

from __future__ import annotations

import pytest

from optdnn.errors import MissingDependency
from optdnn.runtime.cuda import nvrtc


def needs_nvrtc() -> None:
    """Skip the calling test (or fixture) where kernels cannot be compiled."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="no cuda-bindings: pip install 'optdnn[cuda]'")
    try:
        nvrtc.version()
    except MissingDependency as error:
        pytest.skip(str(error))
