"""Images sampled between their pixels: a thread computes neighboring channels of a result. The kernel runs on the processor
unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.host import needs_compiler
from support.net import Net, built
from support.on_gpu import checked_launches
from support.on_processor import compare_graph
from support.sampled_cases import CASES, attention, deformed, graph_of, warped
from support.simulated import check_simulated, kinds, lowered, on_host, refusals, tactics
from support.sweep import every, in_turn

from optdnn.kernels.index import sampling
from optdnn.ops.detect import GridSampleAttrs
from optdnn.runtime.cuda.compile import nvrtc
from optdnn.runtime.cuda.compile.recipes import recipe_of

SAMPLING = {"SampledSum", "GridSample"}


@pytest.mark.parametrize(("name", "precision"), in_turn(CASES, "fp16", "fp32"))
def test_meanings(name: str, precision: str) -> None:
    program = check_simulated(graph_of(name), precision)
    wanted = "sampled_pixels" if name == "odd_channels" else "sampled_channels"
    assert set(tactics(program, *SAMPLING)) == {wanted}
    assert "DeformConv" not in kinds(program)


@needs_compiler
@pytest.mark.parametrize(("name", "precision"), in_turn(CASES, "fp32", "fp16", step=2))
def test_kernels(name: str, precision: str, tmp_path: Path) -> None:
    compare_graph(graph_of(name), precision, tmp_path)


@pytest.mark.nvrtc
@pytest.mark.parametrize("name", every(3, CASES))
def test_it_compiles_without_spills(name: str) -> None:
    program = lowered(graph_of(name), "fp16", target="cuda:sm_90a")
    wanted = {id(program.kernels[s.params["launch"]["kernel"]]) for s in program.steps
              if str(s.params.get("tactic", "")).startswith("sampled")}  # fmt: skip
    made = [k for k in program.kernels if id(k) in wanted]
    assert made
    assert all(nvrtc.resources(recipe_of(k))["each"].spill_bytes == 0 for k in made)


def test_attention_is_one_launch() -> None:
    program = check_simulated(built(attention))
    assert kinds(program).count("SampledSum") == 1
    assert not {"GridSample", "Concat", "ReduceSum"} & set(kinds(program))


def test_deformed_columns_are_rows_of_a_product_on_tensor_cores() -> None:
    """Between the convolutions, one launch computes the places and copies the mask, whose nine channels are not contiguous."""
    program = check_simulated(built(deformed))
    assert kinds(program) == ["Copy", *["Conv"] * 3, "JointPointwise", "SampledSum", "Conv", "Conv", "Pointwise"]
    assert not [t for t in tactics(program, "MatMul") if t != "gemm_sm90"]


def test_features_are_sampled_in_the_order_of_the_convolutions_around() -> None:
    found = kinds(check_simulated(built(warped)))
    assert found[found.index("Conv") :] == ["Conv", "GridSample", "Conv", "Pointwise"]


def test_channels_with_gaps() -> None:
    n = Net()
    places = n.op("Tanh", n.input(1, 4, 3, 2, name="places"))
    program = check_simulated(n.done(n.op("GridSample", n.input(1, 8, 6, 5), places)))
    assert tactics(program, "GridSample") == ["each"]
    assert "its channels are not contiguous and aligned" in refusals(program, "sampled_channels")[0]


def test_volumes_are_for_the_general_kernel() -> None:
    n = Net()
    places = n.op("Tanh", n.input(1, 2, 2, 2, 3, name="places"))
    program = check_simulated(n.done(n.op("GridSample", n.input(1, 8, 3, 4, 5), places, attrs=GridSampleAttrs())))
    assert "it is for images with two spatial axes" in refusals(program, "sampled_channels")[0]


def test_it_refuses_more_elements_than_it_can_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "POINTS_LIMIT", 12)
    program = lowered(graph_of("levels"), "fp16")
    (why,) = on_host(program, "SampledSum")
    assert "more than the kernel can count" in why


@pytest.mark.hopper
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("name", CASES)
def test_launches_on_a_gpu(name: str, precision: str) -> None:
    found = checked_launches(graph_of(name), precision)
    assert {"SampledSum", "GridSample"} & {e.kind for e in found}
