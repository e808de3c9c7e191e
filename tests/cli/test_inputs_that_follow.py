"""Dimensions that follow from other inputs: how commands show and choose them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
from support.cli import Cli
from support.derived import RANGES, decoder, feeds


def test_commands_show_dimensions_that_follow(cli: Cli, tmp_path: Path) -> None:
    model, engine = str(tmp_path / "m.onnx"), str(tmp_path / "m.engine")
    onnx.save(decoder(), model)
    shapes = [x for name, dims in RANGES.items() for x in ("--shape", f"{name}={dims}")]
    shown = "mask: int64[1, length + past_length]"
    for command in (["check", model, "--target", "simulate", *shapes], ["check", model, "--target", "cpu", *shapes]):
        assert f"inputs: {shown}, ids: int64[1, length]" in cli(*command).out
        assert json.loads(cli(*command, "--json").out)["inputs"][0] == shown
    assert "mask: int64[batch, length + past_length]" in cli("inspect", model).out
    assert cli("build", model, "-o", engine, "--target", "simulate", *shapes).code == 0
    inspected = cli("inspect", engine).out
    assert shown in inspected
    assert "profiles: length=1..2..6, past_length=0..3..8" in inspected
    np.save(tmp_path / "past.npy", feeds(1, 1)["past"])
    out = cli("run", engine, "--input", f"past={tmp_path / 'past.npy'}", "--size", "length=3").out
    assert "[1, 3, 8]" in out  # the mask gets the length that the given inputs need: 1 + 3
    assert "[1, 2, 4, 4]" in out
    refused = cli("build", model, "-o", engine, "--target", "simulate", *shapes, "--shape", "mask=1x1..5..15")
    assert refused.code == 3
    assert "axis 1 of input 'mask' is length + past_length: the shape given makes it 15" in refused.err
