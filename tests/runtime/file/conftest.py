"""Fixtures for several tests of engine files."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder: nothing has been examined before."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("OPTDNN_CACHE", str(folder))
    return folder / "examined"
