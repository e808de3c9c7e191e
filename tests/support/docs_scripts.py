"""The Python files under docs/ as modules."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from support.scripts import module_of

FOLDER = Path(__file__).parents[2] / "docs"


def docs_script(name: str) -> ModuleType:
    """The module of ``docs/NAME.py``. Skips the test where an installed copy has no docs."""
    file = FOLDER / f"{name}.py"
    if not file.exists():
        pytest.skip("an installed copy has no docs")
    return module_of(file)
