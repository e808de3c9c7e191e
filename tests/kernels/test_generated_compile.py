"""NVRTC, which needs no GPU, compiles every kernel of engines for each architecture. The hot kernels do not spill."""

from __future__ import annotations

from pathlib import Path

import pytest
from kernels.generated_cases import graph_of
from support.net import Net
from support.positions import FAMILIES as POSITIONS
from support.simulated import kinds, lowered

from optdnn.runtime.cuda.compile import nvrtc
from optdnn.runtime.cuda.compile.recipes import recipe_of

pytestmark = pytest.mark.nvrtc

FAMILIES = (
    "softmaxes",
    "norms",
    "pools",
    "convolutions",
    "products",
    "resizes",
    "pictures",
    "gathers",
    "movements",
    "draws",
    *POSITIONS,
)


@pytest.mark.parametrize("family", FAMILIES)
def test_families_compile_for_hopper(family: str) -> None:
    program = lowered(graph_of(family), "fp16", target="cuda:sm_90a", no_cubins=False)
    assert all(k.cubin is not None for k in program.kernels)
    assert program.meta["nvrtc"]


def test_the_general_kernels_compile_for_ampere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without wgmma and TMA, everything runs on kernels that need neither."""
    monkeypatch.setenv("OPTDNN_CACHE", str(tmp_path))
    program = lowered(graph_of("convolutions"), "bf16", target="cuda:sm_80", no_cubins=False)
    assert {k.template for k in program.kernels} == {"general.cu", "conv_sm80.cu", "depthwise.cu"}
    assert all(k.arch == "sm_80" for k in program.kernels)
    assert "Conv" in kinds(program)


def test_depthwise_kernels_do_not_spill() -> None:
    program = lowered(graph_of("convolutions"), "fp16")
    names = [t for t in program.meta["tactics"] if t["tactic"] == "depthwise"]
    assert names
    for kernel in program.kernels:
        if kernel.function == "window":
            found = nvrtc.resources(recipe_of(kernel))["window"]
            assert found.spill_bytes == 0


def test_windows_of_single_channels_with_an_addition_compile() -> None:
    """The loads of a tap and the reads of a stage have different names, even if one thread computes one channel."""
    n = Net()
    x = n.op("Abs", n.input(2, 22, 9, 7))
    program = lowered(n.done(n.op("Add", n.conv(x, 22, group=22, bias=True), x)), "fp16")
    assert [t["tactic"] for t in program.meta["tactics"] if t["kind"] == "Conv"] == ["depthwise"]
    (kernel,) = [k for k in program.kernels if k.function == "window"]
    assert nvrtc.resources(recipe_of(kernel))["window"].spill_bytes == 0
