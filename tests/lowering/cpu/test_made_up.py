"""Made-up inputs: values that a network takes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.net import Net

from optdnn.compare.verification import verify
from optdnn.compiler import build
from optdnn.ir.evaluate import evaluate
from optdnn.ir.export_onnx import export_model
from optdnn.ir.graph import Graph
from optdnn.lowering.cpu import made_up
from optdnn.lowering.cpu.made_up import made_up_inputs
from optdnn.ops.binary import CastAttrs
from optdnn.ops.gather import GatherAttrs
from optdnn.types import INT64


def toned(bound: str = "", scale: float = 255.0) -> Graph:
    """Pixels as positions in a table of tones. ``bound``: the operator that keeps them in range."""
    n = Net()
    x = n.op("Mul", n.input(2, 40), n.const(scale))
    if bound:
        x = n.op("Clip", x, n.const(0.0), n.const(scale)) if bound == "Clip" else n.op(bound, x)
    at = n.op("Cast", x, attrs=CastAttrs(INT64))
    return n.done(n.op("Gather", n.random(256), at))


def test_pixels_that_are_positions_lie_from_0_to_1() -> None:
    graph = toned()
    feeds, reason = made_up_inputs(graph)
    assert feeds is not None
    assert not reason
    assert all(a.min() >= 0 and a.max() < 1 for a in feeds.values())
    evaluate(graph, feeds)


def test_points_in_voxels_lie_from_0_to_1() -> None:
    """Each point's voxel is computed from two columns of its coordinates (PointPillars)."""
    n = Net()
    voxels = n.op("Cast", n.op("Floor", n.op("Mul", n.input(40, 3), n.const(8.0))), attrs=CastAttrs(INT64))
    x, y = (n.op("Gather", voxels, n.const(k, np.int64), attrs=GatherAttrs(1)) for k in (0, 1))
    graph = n.done(n.op("Gather", n.random(64), n.op("Add", n.op("Mul", y, n.const(8, np.int64)), x)))
    feeds, _ = made_up_inputs(graph)
    assert feeds is not None
    evaluate(graph, feeds)


@pytest.mark.parametrize("bound", ["Clip", "Sigmoid"])
def test_positions_with_bounds_need_no_look(monkeypatch: pytest.MonkeyPatch, bound: str) -> None:
    monkeypatch.delattr(made_up, "evaluate")
    feeds, _ = made_up_inputs(toned(bound))
    assert feeds is not None
    assert min(a.min() for a in feeds.values()) < 0


def test_networks_that_take_none_of_them() -> None:
    feeds, reason = made_up_inputs(toned(scale=1e6))
    assert feeds is None
    assert "out of bounds" in reason


def test_such_a_network_is_built_and_verified(tmp_path: Path) -> None:
    path = tmp_path / "toned.onnx"
    export_model(toned()).save(path)
    engine = build(path, target="cpu")
    x = np.random.default_rng(1).random((2, 40), np.float32)
    (name,) = (s.name for s in engine.inputs)
    (got,) = engine.run({name: x}).values()
    assert got.shape == (2, 40)
    assert verify(engine, path).ok
