"""The command line as a function: exit code, standard output, standard error."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.needs import needs_libraries
from support.onnxnet import save_convnet

import optdnn


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small convolutional network with a symbolic batch N."""
    return save_convnet(tmp_path_factory.mktemp("model") / "net.onnx", batch="N")


@pytest.fixture(scope="session")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same network, built for the target ``reference``."""
    path = tmp_path_factory.mktemp("engine") / "net.engine"
    optdnn.build(model, target="reference").save(path)
    return path


@pytest.fixture
def _libraries() -> None:
    needs_libraries()
