"""The scripts under benchmarks/ as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


def module(path: str) -> ModuleType:
    file = FOLDER / path
    if not file.exists():
        pytest.skip("an installed copy has no benchmarks")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = found  # dataclasses look their module up
    sys.path.insert(0, str(file.parent))  # as for a script
    try:
        spec.loader.exec_module(found)
    finally:
        sys.path.remove(str(file.parent))
    return found
