"""Loads Python files that belong to no package."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any


def module_of(file: Path) -> Any:
    """The module in ``file``, executed anew."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
