"""The command that compiles every kernel of the zoo, on a sample. It counts kernels; a kernel that spills is a fault."""

from __future__ import annotations

from pathlib import Path

import pytest

from optdnn.runtime.cuda.compile import nvrtc
from optdnn.runtime.cuda.compile.nvrtc import Recipe, Resources

pytest.importorskip("benchmarks.harness", reason="an installed copy has no benchmarks")

from benchmarks.kinds import compile as command

pytestmark = pytest.mark.nvrtc


@pytest.mark.parametrize(("template", "said"), [("conv_sm90.cu", "spills 24 bytes"), ("general.cu", "")])
def test_a_hot_kernel_that_spills_is_a_fault(monkeypatch: pytest.MonkeyPatch, template: str, said: str) -> None:
    monkeypatch.setattr(nvrtc, "resources", lambda recipe: {"f": Resources(255, 16, 8, 0)})
    assert command.compiled(Recipe(template, "sm_90a")) == said


def test_a_kernel_that_does_not_compile_is_a_fault() -> None:
    recipe = Recipe("general.cu", "sm_90a", {"generated.cuh": "this is no C++"})
    assert "does not compile" in command.compiled(recipe)


@pytest.mark.slow
def test_networks_compile_without_spills(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One small network; ``.ci/run`` compiles the whole zoo for two architectures."""
    words = ["--arch", "sm_80", "--precision", "fp16", "squeezenet1_1:1", "--out", str(tmp_path / "out.jsonl")]
    assert command.main(words) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.endswith(" kernels, 0 faults")
    assert int(said.split()[0]) > 5
