"""The script that compiles every kernel of the zoo, on a sample: it counts kernels, and a kernel that spills is a fault."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from optdnn.runtime.cuda import nvrtc
from optdnn.runtime.cuda.nvrtc import Recipe, Resources

pytestmark = pytest.mark.nvrtc


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = Path(__file__).parents[3] / "benchmarks" / "gpu" / "compile_all.py"
    spec = importlib.util.spec_from_file_location("compile_all", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("template", "said"), [("conv_sm90.cu", "spills 24 bytes"), ("general.cu", "")])
def test_a_hot_kernel_that_spills_is_a_fault(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, template: str, said: str
) -> None:
    monkeypatch.setattr(nvrtc, "resources", lambda recipe: {"f": Resources(255, 16, 8, 0)})
    assert script.compiled(Recipe(template, "sm_90a")) == said


def test_a_kernel_that_does_not_compile_is_a_fault(script: ModuleType) -> None:
    recipe = Recipe("general.cu", "sm_90a", {"generated.cuh": "this is no C++"})
    assert "does not compile" in script.compiled(recipe)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_networks_compile_without_spills(
    script: ModuleType, arch: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main(["--arch", arch, "--precision", "fp16", "resnet50:1", "--out", str(tmp_path / "out.json")]) == 0
    assert " 0 faults" in capsys.readouterr().out
