"""Rivals on a GPU: their list, refusals before any work, and how a user's module is found and called."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from optdnn.compare import gpu_rivals
from optdnn.compare.gpu_rivals import TORCH_RIVALS, restricted, torch_candidates
from optdnn.compare.rivals import check_rivals
from optdnn.config import BuildOptions
from optdnn.errors import MissingDependency, UsageError
from optdnn.runtime.cuda import usable
from optdnn.runtime.cuda.measuring import rivals
from optdnn.runtime.cuda.measuring.rivals import _tensors, factory
from optdnn.runtime.racing.candidates import Candidate, open_candidate

GPU = "cuda:sm_90a"


def test_rivals_of_a_gpu_need_one() -> None:
    for name in ("own", "cudnn", "onnxruntime-cuda"):
        with pytest.raises(UsageError, match=f"{name} is a rival on a GPU; the engine is for cpu"):
            check_rivals([name], has_model=True)
    with pytest.raises(UsageError, match="own needs the ONNX model"):
        check_rivals(["own"], has_model=False, target=GPU)
    check_rivals(["own"], has_model=True, target=GPU)


def test_absent_libraries_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_rivals, "present", lambda name: False)
    with pytest.raises(MissingDependency, match="nvidia-cudnn-frontend"):
        check_rivals(["cudnn"], has_model=True, target=GPU)
    with pytest.raises(MissingDependency, match="onnxruntime-gpu") as caught:
        check_rivals(["onnxruntime-cuda"], has_model=True, target=GPU)
    assert caught.value.hint == "pip install onnxruntime-gpu", "no extra of ours brings it: it excludes onnxruntime"
    assert gpu_rivals.installed_gpu() == ["own"]
    monkeypatch.setattr(gpu_rivals, "present", lambda name: name == "cublaslt")
    monkeypatch.setattr(gpu_rivals, "cuda_provider", lambda: None)
    assert gpu_rivals.installed_gpu() == ["own", "cudnn", "onnxruntime-cuda"]


def test_restricted_engines_are_built_with_those_tactics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[BuildOptions] = []

    def build(model: Any, options: BuildOptions, say: Any) -> Any:
        asked.append(options)
        return SimpleNamespace(engine=SimpleNamespace(save=lambda path: Path(path).touch()))

    monkeypatch.setattr(gpu_rivals, "build_verbose", build)
    options = BuildOptions(target=GPU, precision="fp16", threads=3)
    for name, tactics in (("own", "own"), ("cudnn", "cudnn,cublaslt")):
        candidate = restricted(name, Path("m.onnx"), options, tmp_path, lambda text: None)
        assert (candidate.name, candidate.kind) == (name, "engine")
        assert Path(candidate.path).exists()
        assert (asked[-1].tactics, asked[-1].precision, asked[-1].threads) == (tactics, "fp16", 3)


def test_torch_takes_part_at_the_subjects_precision() -> None:
    found = torch_candidates("nets:make", "int8+fp16", list(TORCH_RIVALS))
    assert [(c.name, c.path, c.precision) for c in found] == [
        ("torch", "nets:make", "int8"),
        ("torch-compile", "nets:make", "int8"),
    ]
    with pytest.raises((UsageError, MissingDependency)):
        open_candidate(found[0], 1)  # refused by its kind in this process: no torch, no GPU, or no int8


def test_a_factory_is_found_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_nets_for_a_test.py").write_text("class Zoo:\n    def make():\n        return 7\nnumber = 3\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    assert factory("my_nets_for_a_test:Zoo.make")() == 7
    for path, why in (
        ("my_nets_for_a_test", "is not PKG.MODULE:FACTORY"),
        ("my_nets_for_a_test:nothing", "cannot be imported"),
        ("no_such_module_at_all:f", "cannot be imported"),
        ("my_nets_for_a_test:number", "is not callable"),
    ):
        with pytest.raises(UsageError, match=why):
            factory(path)


class Tensor:
    """A stand-in for torch.Tensor."""


def test_the_tensors_of_a_result() -> None:
    torch = SimpleNamespace(Tensor=Tensor)
    a, b, c = Tensor(), Tensor(), Tensor()
    assert list(_tensors(torch, a)) == [a]
    assert list(_tensors(torch, (a, [b, None], {"h": c}))) == [a, b, c]


def test_modules_are_called_by_name_where_they_know_the_names() -> None:
    graphs = object.__new__(rivals._TorchGraphs)
    graphs.torch, graphs._names = SimpleNamespace(Tensor=Tensor), frozenset(("mask", "ids"))
    said: list[Any] = []
    graphs._run = lambda *a, **k: said.append((a, k)) or Tensor()
    graphs._inputs = [1, 2]
    graphs._call({"ids": np.zeros(1), "mask": np.zeros(1)})
    graphs._call({"x": np.zeros(1), "mask": np.zeros(1)})
    assert said == [((), {"ids": 1, "mask": 2}), ((1, 2), {})]


def test_objects_that_are_no_module_and_unknown_precisions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    torch: Any = ModuleType("torch")
    torch.cuda = SimpleNamespace(is_available=lambda: True)
    torch.float16 = "half"
    torch.backends = SimpleNamespace(cudnn=SimpleNamespace(), cuda=SimpleNamespace(matmul=SimpleNamespace()))
    torch.nn = SimpleNamespace(Module=Tensor)
    monkeypatch.setitem(sys.modules, "torch", torch)
    with pytest.raises(UsageError, match="not run at int8"):
        rivals.open_torch_eager(Candidate("torch", "", "os:getcwd", "int8"), 1)
    with pytest.raises(UsageError, match=r"gives a str, not a torch.nn.Module"):
        rivals.open_torch_eager(Candidate("torch", "", "os:getcwd", "fp16"), 1)
    torch.cuda.is_available = lambda: False
    with pytest.raises(UsageError, match="sees no GPU"):
        rivals.open_torch_eager(Candidate("torch", "", "os:getcwd", "fp16"), 1)


# ---------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.skipif(usable.why_not() is not None, reason="no usable GPU")
def test_engine_and_module_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    import onnx

    import optdnn
    from optdnn.runtime.racing.race import race

    graph = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        net (float[4, 8] x) => (float[4, 8] y) <float[1] two = {2.0}> { a = Mul(x, two)  y = Relu(a) }
    """)
    optdnn.build(graph, target="cuda", precision="fp16", tactics="heuristic").save(tmp_path / "e.engine")
    (tmp_path / "net_for_a_test.py").write_text(
        "import torch\nclass Net(torch.nn.Module):\n    def forward(self, x):\n        return torch.relu(x * 2)\n"
    )
    monkeypatch.chdir(tmp_path)
    candidates = [Candidate("engine", "engine", str(tmp_path / "e.engine"), "fp16")]
    candidates += torch_candidates("net_for_a_test:Net", "fp16", ["torch"])
    x = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)
    outcome = race(candidates, {"x": x}, rounds=2, turn_s=0.02, threads=1)
    for row in outcome.rows:
        assert row.error is None, row.error
        assert row.clock == "gpu"
        assert row.stats is not None
        assert 0 < row.stats.median < 1
        assert row.max_rel_err is not None
        assert row.max_rel_err < 2e-3
    assert torch.__version__ == outcome.rows[1].facts["version"]
