"""Engines of every released format version load and run for ever (see runtime.file.format)."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from optdnn import load
from optdnn.runtime.file import format as fmt
from optdnn.types import BF16

GOLDEN = Path(__file__).parents[2] / "golden"
ENGINES = sorted(GOLDEN.glob("*.engine"))
sys.path.insert(0, str(GOLDEN))  # for make_engine


def test_there_is_one_engine_of_every_version() -> None:
    major, newest = fmt.VERSION
    assert [p.name for p in ENGINES] == [f"engine-{major}.{minor}.engine" for minor in range(newest + 1)]


@pytest.mark.parametrize("path", ENGINES, ids=lambda p: p.stem)
def test_it_loads_and_gives_the_recorded_results(path: Path) -> None:
    engine = load(path)
    expected = np.load(path.with_suffix(".npz"))
    sizes = {"sizes": np.array([0, -1])} if len(engine.inputs) > 1 else {}
    got = engine.run({"x": expected["x"], **sizes})
    assert list(got) == ["y", "features"]
    np.testing.assert_allclose(got["y"], expected["y"], rtol=1e-5)
    assert got["features"].dtype == BF16
    np.testing.assert_allclose(got["features"].astype(np.float32), expected["features"], rtol=0, atol=2**-9)
    # the bound is strict: another input changes the result far more
    other = engine.run({"x": -expected["x"], **sizes})["features"].astype(np.float32)
    assert np.abs(other - expected["features"]).max() > 50 * 2**-9
    assert engine.meta["options"]["budget"] == float("inf")
    assert engine.meta["$escaped"] == ["é", None, True, 0.1]
    assert str(engine.inputs[0]) == "x: fp32[n, 3, 8, 8]"


@pytest.mark.parametrize("minor", range(fmt.VERSION[1] + 1))
def test_the_writer_still_writes_it_byte_for_byte(minor: int) -> None:
    from make_engine import golden_program

    newest = GOLDEN / f"engine-{fmt.VERSION[0]}.{minor}.engine"
    assert b"".join(fmt.encode(fmt.read(newest))) == newest.read_bytes()
    # Random numbers may differ between NumPy versions. The header without the digests of blobs may not.
    made, kept = golden_program(minor), fmt.read(newest)
    for name in (
        "target",
        "precision",
        "inputs",
        "outputs",
        "buffers",
        "steps",
        "requires",
        "meta",
        "arena_bytes",
        "kernels",
        "profiles",
        "by_value",
        "lanes",
        "retained",
    ):
        assert getattr(made, name) == getattr(kept, name)
    assert (made.ranks is None) == (kept.ranks is None) == (minor < 7)
    if made.ranks is not None and kept.ranks is not None:
        assert (made.ranks.inputs, made.ranks.outputs) == (kept.ranks.inputs, kept.ranks.outputs)
        assert [p.steps for p in made.ranks.programs] == [p.steps for p in kept.ranks.programs]
