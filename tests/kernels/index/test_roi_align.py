"""RoiAlign: a thread computes neighboring channels of a bin. The kernel runs on the processor unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.host import needs_compiler
from support.net import Net, built
from support.on_gpu import checked_launches
from support.on_processor import compare_graph
from support.roi_cases import CASES, aligned, graph_of
from support.simulated import check_simulated, kinds, lowered, on_host, refusals, tactics
from support.sweep import every, in_turn

from optdnn.kernels.index import roi_align
from optdnn.runtime.cuda.compile import nvrtc
from optdnn.runtime.cuda.compile.recipes import recipe_of


@pytest.mark.parametrize(("name", "precision"), in_turn(CASES, "fp16", "fp32"))
def test_meanings(name: str, precision: str) -> None:
    program = check_simulated(graph_of(name), precision)
    wanted = "roi_pixels" if name in ("odd_channels", "plain", "plain_max") else "roi_channels"
    assert tactics(program, "RoiAlign") == [wanted]


@needs_compiler
@pytest.mark.parametrize(("name", "precision"), in_turn(CASES, "fp32", "fp16", step=2))
def test_kernels(name: str, precision: str, tmp_path: Path) -> None:
    compare_graph(graph_of(name), precision, tmp_path)


@needs_compiler
@pytest.mark.parametrize(("size", "mode"), [(300.0, "max"), (1e6, "avg")])
def test_a_region_far_larger_than_the_image_visits_only_its_pixels(size: float, mode: str, tmp_path: Path) -> None:
    """Up to a million samples along each axis of a bin. All but a few of them lie outside of the image."""
    n = Net()
    far = [[-size, -size, size, size], [-3.0, -size, 5.0, size]]
    graph = n.done(*aligned(n, mode=mode, sampling_ratio=0, boxes=far))
    compare_graph(graph, "fp32", tmp_path)


@pytest.mark.nvrtc
@pytest.mark.parametrize("name", every(3, CASES))
def test_it_compiles_without_spills(name: str) -> None:
    program = lowered(graph_of(name), "fp16", target="cuda:sm_90a")
    (step,) = [s for s in program.steps if str(s.params.get("tactic", "")).startswith("roi_")]
    assert nvrtc.resources(recipe_of(program.kernels[step.params["launch"]["kernel"]]))["each"].spill_bytes == 0


def test_regions_keep_the_order_of_the_convolutions_around() -> None:
    found = kinds(check_simulated(built(aligned)))
    assert found[found.index("Conv") :] == ["Conv", "RoiAlign", "Conv", "Pointwise"]


def test_channels_that_are_not_contiguous() -> None:
    program = lowered(graph_of("plain"), "fp16")
    assert "its channels are not contiguous and aligned" in refusals(program, "roi_channels")[0]


def test_it_refuses_more_elements_than_it_can_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roi_align, "POINTS_LIMIT", 12)
    program = lowered(graph_of("channels"), "fp16")
    (why,) = on_host(program, "RoiAlign")
    assert "more than the kernel can count" in why


@pytest.mark.hopper
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("name", CASES)
def test_launches_on_a_gpu(name: str, precision: str) -> None:
    found = checked_launches(graph_of(name), precision)
    assert "RoiAlign" in {e.kind for e in found}
