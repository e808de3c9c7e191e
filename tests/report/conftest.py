"""A real report of a network with hostile names."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.needs import needs_libraries
from support.onnxnet import HOSTILE, save_convnet


@pytest.fixture(scope="session")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    needs_libraries()
    from optdnn.compare.comparison import compare
    from optdnn.compare.subject import build_subject
    from optdnn.config import BuildOptions

    folder = tmp_path_factory.mktemp("report")
    model = save_convnet(folder / "net <b>.onnx", names=HOSTILE)
    subject = build_subject(model, BuildOptions(target="cpu", threads=1), folder, lambda text: None)
    found = compare(
        subject,
        ["onnxruntime", "openvino", "reference"],
        threads=1,
        rounds=6,
        duration=0.12,
        look_inside=True,
    )
    plain = found.to_plain() | {"command": "optdnn compare 'net <b>.onnx'", "time": "2026-01-01T00:00:00+00:00"}
    return json.loads(json.dumps(plain, allow_nan=False))  # type: ignore[no-any-return]


@pytest.fixture
def altered(report: dict[str, Any]) -> dict[str, Any]:
    """A copy that a test may change."""
    return json.loads(json.dumps(report))  # type: ignore[no-any-return]
