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
    monkeypatch.setattr(nvrtc, "compile_recipe", lambda recipe, resources: (b"cubin", "log"))
    monkeypatch.setattr(nvrtc, "reported", lambda recipe, log: {"f": Resources(255, 16, 8, 0)})
    assert command.compiled(Recipe(template, "sm_90a")) == (said, command.digest(b"cubin"))


def test_a_kernel_that_does_not_compile_is_a_fault() -> None:
    recipe = Recipe("general.cu", "sm_90a", {"generated.cuh": "this is no C++"})
    fault, bytes_ = command.compiled(recipe)
    assert "does not compile" in fault
    assert bytes_ == ""


@pytest.mark.slow
def test_networks_compile_without_spills(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One small network; ``.ci/run`` compiles the whole zoo for two architectures."""
    words = [
        "--arch",
        "sm_80",
        "--precision",
        "fp16",
        "squeezenet1_1:1",
        "--again",
        "--out",
        str(tmp_path / "out.jsonl"),
    ]
    assert command.main(words) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.endswith(" kernels, 0 faults")
    assert int(said.split()[0]) > 5


def test_a_kernel_whose_bytes_differ_is_a_fault(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipes = {name: Recipe(name, "sm_80") for name in ("rows.cu", "means.cu")}
    monkeypatch.setattr(command, "recipes_of", lambda *network: recipes)
    monkeypatch.setattr(command, "compiled", lambda recipe: ("", f"bytes of {recipe.name}"))
    monkeypatch.setattr(
        command, "compiled_again", lambda given: ["bytes of means.cu", "others"]
    )  # in the opposite order
    words = ["--arch", "sm_80", "--precision", "fp16", "squeezenet1_1:1"]
    assert command.main(words) == 0
    assert command.main([*words, "--again"]) == 1
    assert "FAULT rows.cu: compiled twice, its bytes differ" in capsys.readouterr().out


def test_a_kernel_without_a_further_line_may_be_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = ("#define A 1", "#define A 2\n#define B 1", "#define A 1\n#define B 1", "#define A 1\n#define B 2")
    recipes = {text: Recipe("rows.cu", "sm_80", {"generated.cuh": text}) for text in texts}
    compiled: list[Recipe] = []
    monkeypatch.setattr(command, "recipes_of", lambda *network: recipes)
    monkeypatch.setattr(command, "compiled", lambda recipe: (compiled.append(recipe), ("", "bytes"))[1])
    assert command.main(["--arch", "sm_80", "--precision", "fp16", "--few", "squeezenet1_1:1"]) == 0
    assert [r.generated["generated.cuh"] for r in compiled] == [texts[0], texts[1], texts[3]]
    assert "4 kernels,   3 new" in capsys.readouterr().out
