"""ResizedPeaks: a block per channel of an image keeps the largest pixel. The kernel runs on the processor unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.host import needs_compiler
from support.net import built
from support.on_gpu import checked_launches
from support.on_processor import compare_graph
from support.peak_cases import CASES, graph_of, peaks
from support.simulated import check_simulated, lowered, on_host, tactics
from support.sweep import in_turn

from optdnn.kernels.index import resized_peaks
from optdnn.runtime.cuda.compile import nvrtc
from optdnn.runtime.cuda.compile.recipes import recipe_of


@pytest.mark.parametrize(("name", "precision"), in_turn(CASES, "fp16", "fp32"))
def test_meanings(name: str, precision: str) -> None:
    program = check_simulated(graph_of(name), precision)
    assert tactics(program, "ResizedPeaks") == ["resized_peaks"]


@needs_compiler
@pytest.mark.parametrize(("name", "precision"), in_turn(CASES, "fp32", "fp16", step=2))
def test_kernels(name: str, precision: str, tmp_path: Path) -> None:
    compare_graph(graph_of(name), precision, tmp_path)


@needs_compiler
def test_sizes_without_pixels_and_sizes_that_are_too_large(tmp_path: Path) -> None:
    """A kernel must end, whatever the sizes are."""
    compare_graph(built(peaks, least=0), "fp32", tmp_path)
    compare_graph(built(peaks, least=(1 << 62)), "fp32", tmp_path)


@pytest.mark.nvrtc
@pytest.mark.parametrize("name", ["linear", "cubic"])
def test_it_compiles_without_spills(name: str) -> None:
    program = lowered(graph_of(name), "fp16", target="cuda:sm_90a")
    (kernel,) = [k for k in program.kernels if k.function == "peaks"]
    assert nvrtc.resources(recipe_of(kernel))["peaks"].spill_bytes == 0


def test_images_that_are_too_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resized_peaks, "MOST_COLUMNS", 5)
    program = lowered(graph_of("linear"), "fp32")
    assert "an image of 6 columns is too wide" in on_host(program, "ResizedPeaks")[0]


@pytest.mark.hopper
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("name", CASES)
def test_launches_on_a_gpu(name: str, precision: str) -> None:
    found = checked_launches(graph_of(name), precision)
    assert "ResizedPeaks" in {e.kind for e in found}
