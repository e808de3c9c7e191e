"""The memory of examined parts, and the results and build options of an engine file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from support import fallback, networks
from support.hostile import Port, model_of, program_of, write
from support.needs import needs_libraries
from support.onnxnet import convnet
from support.parts import LIBRARIES, F, X, Y, changed, node, relu, twice
from support.quantized_nets import attention_network
from support.sweep import sweep

import optdnn
from optdnn.dim import symbol
from optdnn.errors import EngineError, RunError
from optdnn.ir.export_onnx import export_model
from optdnn.ir.graph import Graph
from optdnn.lowering.cpu import examine
from optdnn.ops.table import OPDEFS
from optdnn.runtime.contexts.feeds import random_feeds
from optdnn.runtime.file.format import decode, encode
from optdnn.runtime.file.plan_options import PLAN_OPTIONS, check_plan_options, check_plans
from optdnn.runtime.steps.executor import LibraryPart
from optdnn.runtime.steps.reference import reference_step
from optdnn.types import FP32, INT64, TensorType, tensor

needs_libraries()
pytestmark = pytest.mark.usefixtures("cache")


# ---------------------------------------------------------------- our own


def cut() -> Graph:
    """Relu, a CumSum whose axis is an input (OpenVINO must not run it), and weights of a later convolution."""
    graph = Graph("cut")
    x, axis = graph.add_input("x", TensorType(FP32, (symbol("n"), 40))), graph.add_input("axis", tensor(INT64))
    w = graph.add_constant(np.ones((40, 40), np.float32), "w")
    summed = graph.add("CumSum", [graph.add("Relu", [x]).value, axis], OPDEFS["CumSum"].attrs())
    graph.add_output(graph.add("MatMul", [summed.value, w], OPDEFS["MatMul"].attrs()).value, "y")
    return graph


OWN: dict[str, Callable[[], onnx.ModelProto]] = {
    "convolutions": convnet,
    "a symbolic batch": lambda: convnet(batch="n"),
    "cut": lambda: export_model(cut()).proto,
    "a loop": fallback.loop,
    "sizes from data": fallback.sizes_from_data,
    "attention": lambda: export_model(networks.transformer()).proto,
    "quantized": lambda: export_model(attention_network(np.int8)).proto,
}


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("name", sweep(OWN, "convolutions", "cut"))
def test_engines_of_our_own_builds_load(name: str, library: str, tmp_path: Path) -> None:
    built = optdnn.build(OWN[name](), target="cpu", tactics=library, threads=1)
    built.save(tmp_path / "e")
    loaded = optdnn.load(tmp_path / "e")
    assert loaded.program.foreign
    given = {s.name: np.zeros((), s.dtype) for s in loaded.inputs if s.shape == ()}
    sizes = {d: 3 for s in loaded.inputs for d in s.shape if isinstance(d, str)}
    feeds = random_feeds(loaded.inputs, sizes=sizes, given=given) | given
    for key, value in built.run(feeds).items():
        np.testing.assert_array_equal(loaded.run(feeds)[key], value)


# ---------------------------------------------------------------- what was examined before


def count_examinations(monkeypatch: pytest.MonkeyPatch) -> list[LibraryPart]:
    seen: list[LibraryPart] = []
    monkeypatch.setattr(examine, "examine", seen.append)
    return seen


def test_a_part_is_examined_once_on_a_machine(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = count_examinations(monkeypatch)
    path = write(program_of("onnxruntime", relu(), [X], [Y]), tmp_path / "e")
    for _ in range(3):
        optdnn.load(path)
    assert len(seen) == 1
    assert len(list(cache.iterdir())) == 1
    wider: list[Port] = [("x", F, (1, 5)), ("y", F, (1, 5))]
    optdnn.load(
        write(
            program_of("onnxruntime", model_of([node("Relu", "x")], wider[:1], wider[1:]), wider[:1], wider[1:]), path
        )
    )
    assert len(seen) == 2


def test_the_key_of_an_examined_part_covers_its_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = count_examinations(monkeypatch)
    declared: Port = ("w", F, (1, 4))
    model = model_of([node("Add", "x,w")], [X, declared], [Y])
    for value in (1, 2, 1):
        weights = {"w": np.full((1, 4), value, np.float32)}
        optdnn.load(write(program_of("openvino", model, [X], [Y], weights), tmp_path / "e"))
    assert len(seen) == 2


def test_parts_that_are_not_verified_or_not_ours_are_examined_each_time(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = count_examinations(monkeypatch)
    path = write(program_of("onnxruntime", relu(), [X], [Y]), tmp_path / "e")
    for _ in range(2):
        optdnn.load(path, verify=False)
    assert len(seen) == 2
    assert not cache.exists()
    optdnn.load(path)
    cache.chmod(0o777)
    optdnn.load(path)
    assert len(seen) == 4
    cache.chmod(0o700)
    optdnn.load(path)
    assert len(seen) == 4


def test_a_folder_that_cannot_be_written_is_no_error(cache: Path, tmp_path: Path) -> None:
    cache.write_bytes(b"")
    path = write(program_of("onnxruntime", relu(), [X], [Y]), tmp_path / "e")
    for _ in range(2):
        optdnn.load(path)


def test_a_refusal_is_not_remembered(cache: Path, tmp_path: Path) -> None:
    path = write(program_of("onnxruntime", changed(twice), [X], [Y]), tmp_path / "e")
    for _ in range(2):
        with pytest.raises(EngineError, match="is not defined exactly once"):
            optdnn.load(path)
    assert not cache.exists()


# ---------------------------------------------------------------- results


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_result_of_another_size_is_not_used(library: str, tmp_path: Path) -> None:
    """The program declares [n, 4]; the network gives [2 n, 4]."""
    ins: list[Port] = [("x", F, ("n", 4))]
    outs: list[Port] = [("y", F, ("n", 4))]
    model = model_of([node("Concat", "x,x", axis=0)], ins, outs)
    engine = optdnn.load(write(program_of(library, model, ins, outs), tmp_path / "e"))
    with pytest.raises(
        RunError, match=rf"step 0 \({library}\) computed 'y' as float32\[6, 4\]; it should be fp32\[3, 4\]"
    ):
        engine(np.ones((3, 4), np.float32))


def test_a_result_of_a_numpy_kernel_is_held_against_the_program_too(tmp_path: Path) -> None:
    program = program_of("reference", relu(), [X], [("y", F, (4, 4))])
    program.steps = (reference_step("Relu", {}, (0,), (1,)),)
    engine = optdnn.load(write(program, tmp_path / "e"))
    with pytest.raises(RunError, match=r"computed 'y' as float32\[1, 4\]; it should be fp32\[4, 4\]"):
        engine(np.ones((1, 4), np.float32))


# ---------------------------------------------------------------- build options


@pytest.fixture(scope="module")
def dynamic() -> optdnn.Engine:
    return optdnn.build(convnet(batch="n"), target="simulate", shapes={"x": "1..2..5x3x8x8"})


@pytest.mark.parametrize(("blob", "message"), [(10_000, "names a missing blob"), (None, "not a run of bytes")])
def test_a_calibration_that_is_no_text_is_refused(
    dynamic: optdnn.Engine, blob: int | None, message: str, tmp_path: Path
) -> None:
    program = decode(memoryview(b"".join(encode(dynamic.program))))
    assert program.dynamic is not None
    assert program.dynamic.source is not None
    other = next(i for i, b in enumerate(program.blobs) if b.dtype != np.uint8)
    source = replace(program.dynamic.source, calibration=other if blob is None else blob)
    program.dynamic = replace(program.dynamic, source=source)
    with pytest.raises(EngineError, match=message):
        optdnn.load(write(program, tmp_path / "e"))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("dump", "dumped"),
        ("calib", "data.npz"),
        ("calib_cache", "ranges.json"),
        ("images", "spec.json"),
        ("timing_cache", "times.json"),
        ("emit_onnx", "model.onnx"),
        ("labels", "labels.npy"),
        ("metric", "os:system"),
        ("threads", 20_000),
        ("custom_ops", []),
        ("turbo", True),
    ],
)
def test_an_option_that_no_engine_may_set_is_refused(
    dynamic: optdnn.Engine, option: str, value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    program = decode(memoryview(b"".join(encode(dynamic.program))))
    assert program.dynamic is not None
    assert program.dynamic.source is not None
    source = replace(program.dynamic.source, options={**program.dynamic.source.options, option: value})
    program.dynamic = replace(program.dynamic, source=source)
    path = write(program, tmp_path / "e")
    with pytest.raises(EngineError, match=f"the build option '{option}', which no engine may set"):
        optdnn.load(path)
    assert [p.name for p in tmp_path.iterdir()] == ["e"]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("io_dtype", "fp8"),
        ("nearest_tactics", 1),
        ("opt_level", 7),
        ("opt_level", True),
        ("precision", "auto"),
        ("precision", "int8+int8"),
        ("stop_after", "../../x"),
        ("streams", 1 << 20),
        ("tactics", "openvino"),
        ("target", "cpu"),
        ("workspace", 1 << 60),
        ("workspace", "1"),
    ],
)
def test_values_of_options_have_a_type_and_a_range(option: str, value: Any) -> None:
    with pytest.raises(EngineError, match=f"sets the build option '{option}' to .*, which is out of its range"):
        check_plan_options({"target": "simulate", option: value}, "simulate")
    assert option in PLAN_OPTIONS


def test_plans_are_made_for_the_engines_own_target() -> None:
    check_plan_options({"target": "cuda:sm_90a"}, "cuda:sm_90a")
    with pytest.raises(EngineError, match="the engine is for target 'simulate'; plans would be made for 'cuda:sm_90a'"):
        check_plan_options({"target": "cuda:sm_90a"}, "simulate")
    check_plans("simulate")
    for target in ("cpu", "reference", "../x"):
        with pytest.raises(EngineError, match="further plans are made only for GPUs"):
            check_plans(target)
