"""Targets that name a GPU: plans for it, and the message if another GPU runs the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from support.sweep import sweep

import optdnn
from optdnn.cli.main import cli
from optdnn.errors import UsageError
from optdnn.models import zoo
from optdnn.runtime.cuda.gpu_facts import named
from optdnn.runtime.cuda.runner import planned_elsewhere
from optdnn.target_name import GPUS, TargetName

NETWORK: dict[str, Any] = {"batch": 4, "image_size": 32, "width": 0.35, "num_classes": 16}


@pytest.fixture(scope="module")
def network() -> Any:
    return zoo.build("mobilenet_v2", **NETWORK)


def test_a_name_is_read_and_written() -> None:
    for gpu, arch in GPUS.items():
        name = TargetName.parse(f"cuda:{gpu}")
        assert (name.family, name.arch, name.gpu, str(name)) == ("cuda", arch, gpu, f"cuda:{gpu}")
    with pytest.raises(UsageError, match="target 'cuda:rtx-5091' is not one of") as error:
        TargetName.parse("cuda:rtx-5091")
    assert "cuda:rtx-5090" in str(error.value.hint)


OTHERS = ["a100", "rtx-4090", "orin", "h100-pcie", "b200", "b300", "thor", "rtx-5090", "gb10"]


@pytest.mark.parametrize("gpu", sweep(OTHERS, "a100", "orin", "b200"))
def test_engines_for_other_gpus_compute_the_network(gpu: str, network: Any, tmp_path: Path) -> None:
    feeds = zoo.example_inputs(network, seed=1)
    engine = optdnn.build(network, target=f"cuda:{gpu}", precision="fp16", tactics="heuristic", no_cubins=True)
    assert engine.meta["gpu"] == {"name": named(gpu).name, "multiprocessors": named(gpu).multiprocessors}
    assert {k.arch for k in engine.program.kernels} == {GPUS[gpu]}
    engine.save(tmp_path / "e")
    loaded = optdnn.load(tmp_path / "e", simulate=True)
    assert loaded.target == f"cuda:{gpu}"
    exact = optdnn.build(network, target="reference").run(feeds)
    for name, value in loaded.run(feeds).items():
        np.testing.assert_allclose(value, exact[name], rtol=0.02, atol=0.02 * np.abs(exact[name]).max())


@pytest.mark.nvrtc
@pytest.mark.parametrize("gpu", ["orin", "b200", "b300", "thor", "rtx-5090", "gb10"])
def test_kernels_compile_for_gpus_that_they_did_not_run_on(gpu: str, network: Any) -> None:
    engine = optdnn.build(network, target=f"cuda:{gpu}", precision="fp16", tactics="heuristic")
    assert engine.program.kernels
    assert all(k.cubin is not None for k in engine.program.kernels)


@pytest.mark.slow
def test_ranges_of_sizes_get_further_plans(tmp_path: Path) -> None:
    network = zoo.build("mlp", batch=4)
    name, width = network.graph.input[0].name, network.graph.input[0].type.tensor_type.shape.dim[1].dim_value
    network.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "n"
    network.graph.output[0].type.tensor_type.shape.dim[0].dim_param = "n"
    shapes = {name: f"1..4..8x{width}"}
    engine = optdnn.build(network, target="cuda:l4", shapes=shapes, tactics="heuristic", no_cubins=True)
    engine.save(tmp_path / "e")
    loaded = optdnn.load(tmp_path / "e", simulate=True)
    x = np.ones((3, width), np.float32)
    assert len(next(iter(loaded.run({name: x}).values()))) == 3
    program = loaded.program_for({name: x})
    assert program.meta["gpu"] == {"name": "NVIDIA L4", "multiprocessors": 58}


@pytest.mark.slow
def test_grids_follow_the_named_gpu(network: Any) -> None:
    """The same architecture with another GPU gives another program."""
    programs = [
        optdnn.build(network, target=f"cuda:{gpu}", precision="fp16", tactics="heuristic", no_cubins=True).program
        for gpu in ("h200", "sm_90a", "h100-pcie")
    ]
    steps = [[s.params for s in p.steps] for p in programs]
    assert steps[0] == steps[1], "an H200 is the default of sm_90a"
    assert steps[0] != steps[2]


def test_another_gpu_than_planned_for_is_reported(network: Any) -> None:
    program = optdnn.build(network, target="cuda:l4", tactics="heuristic", no_cubins=True).program
    assert planned_elsewhere(program, named("l4")) is None
    why = planned_elsewhere(program, named("l40s"))
    assert why is not None
    assert why.startswith("the engine was planned for NVIDIA L4 (58 multiprocessors); this GPU is NVIDIA L40S (142).")
    program.meta.pop("gpu")  # an engine of an older version
    assert planned_elsewhere(program, named("l40s")) is None


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("cuda:l4", "NVIDIA L4, 58 multiprocessors"),
        ("cuda:sm_89", "(the default of sm_89; name another: --target cuda:l40s|l4|rtx-4090)"),
        ("cuda:sm_87", "Orin, 16 multiprocessors"),
    ],
)
def test_a_build_names_the_gpu_of_its_plan(target: str, said: str, network: Any, tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(network.SerializeToString())
    words = [
        "build",
        str(tmp_path / "m.onnx"),
        "--target",
        target,
        "--tactics",
        "heuristic",
        "--no-cubins",
        "--no-check",
    ]
    done = CliRunner(env={"COLUMNS": "200"}).invoke(cli, [*words, "-o", str(tmp_path / "m.engine")])
    assert done.exit_code == 0, done.output
    assert "planned for" in done.stdout
    assert said in " ".join(done.stdout.split())


def test_an_architecture_without_kernels_is_reported() -> None:
    with pytest.raises(UsageError, match=r"there are no kernels for sm_70\n  hint: .* sm_90a, .*, sm_80$"):
        optdnn.build("any.onnx", target="cuda:sm_70")


def test_the_number_of_a_device_is_no_target() -> None:
    with pytest.raises(UsageError, match=r"hint: a target names no device: --target cuda, and CUDA_VISIBLE_DEVICES=1 "):
        optdnn.build("any.onnx", target="cuda:1")
