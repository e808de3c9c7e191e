"""Engines to serve, and a server process for the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest
from support.serving import Server, served

import optdnn
from optdnn.models import trained

TEXTS = {
    "mixed": "(int64[2, 3] a, bool[2] flag) => (int64[2, 3] total, bool[2] other) { total = Add(a, a) other = Not(flag) }",
    "looked_up": "(int64[N] at) => (float[N] y) <float[4] table = {1.0, 2.0, 3.0, 4.0}> { y = Gather(table, at) }",
}
"""Small models: one without a batch, and one whose values can be wrong."""
BYTES = 1 << 20
"""Largest size of a request that the server accepts, in bytes."""


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of engines: the models of TEXTS, and the digits for batches of 1 to 16 on the CPU."""
    folder = tmp_path_factory.mktemp("engines")
    for name, text in TEXTS.items():
        model = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : 18]> {name} {text}')
        optdnn.build(model, target="reference").save(folder / f"{name}.engine")
    pytest.importorskip("openvino", reason="the extra cpu is not installed")
    digits = trained.load("digits_resnet")
    built = optdnn.build(digits.path, target="cpu", threads=1, shapes={"x": "1..4..16x1x8x8"})
    built.save(folder / "digits.engine")
    return folder


@pytest.fixture(scope="session")
def digits(engines: Path) -> optdnn.Engine:
    """The engine of the digits in this process."""
    return optdnn.load(engines / "digits.engine", threads=1)


@pytest.fixture(scope="module", params=[0, 2], ids=["one process", "two front ends"])
def server(engines: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server of all engines, with one worker process each: once in one process, once behind two front ends."""
    more = ["--queue", 4, "--shared-memory", "--frontends", request.param]
    with served(engines, *more, OPTDNN_MAX_REQUEST_BYTES=str(BYTES)) as running:
        yield running
