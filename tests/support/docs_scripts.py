"""The Python files under docs/ as modules."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[2] / "docs"


def docs_script(name: str) -> ModuleType:
    """The module of ``docs/NAME.py``. Skips the test where an installed copy has no docs."""
    file = FOLDER / f"{name}.py"
    if not file.exists():
        pytest.skip("an installed copy has no docs")
    spec = importlib.util.spec_from_file_location(f"docs_{name}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
