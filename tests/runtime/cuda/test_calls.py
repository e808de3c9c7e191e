"""Calls of vendors' libraries: their facts, refusals, a missing library, and (with a GPU) their results."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from support.net import Net
from support.simulated import feeds_of, kinds, lowered, simulate

from optdnn.errors import EngineError, MissingDependency
from optdnn.ir.graph import Graph
from optdnn.kernels.libraries import providers
from optdnn.kernels.libraries import tactics as tactics
from optdnn.ops.norm import LayerNormAttrs
from optdnn.runtime.cuda import usable
from optdnn.runtime.cuda.launches.plan import parse
from optdnn.runtime.cuda.libraries import calls, cudnn
from optdnn.runtime.cuda.libraries import find as libraries
from optdnn.runtime.cuda.libraries.calls import (
    Attention,
    Convolution,
    LibraryCall,
    MatMul,
    Norm,
    from_plain,
    parse_call,
    to_plain,
)
from optdnn.runtime.engine import Engine
from optdnn.runtime.file.format import read
from optdnn.runtime.program import Program

LIBRARIES = "cudnn,cublaslt"
PRODUCT = MatMul("float16", 4, 8, 16, 16, 16, 8)
CONV = Convolution(
    "float16", (2, 8, 5, 5), (200, 1, 40, 8), (16, 8, 3, 3), (72, 1, 24, 8), (2, 16, 5, 5), (400, 1, 80, 16), (1, 1),
    (1, 1, 1, 1), (1, 1), ("bias", "add", "relu"), (400, 1, 80, 16),
)  # fmt: skip
HEADS = Attention("float16", (1, 2, 4, 8), (1, 2, 6, 8), (64, 32, 8, 1), (96, 48, 8, 1), (96, 48, 8, 1), (64, 32, 8, 1),
                  0.35, False, (1, 1, 1, 6), (6, 6, 6, 1))  # fmt: skip

ROWS = Norm("float16", "layer", 6, 32, 1e-5)


def network() -> Graph:
    n = Net()
    x = n.op("Relu", n.bn(n.conv(n.input(2, 3, 16, 16), 16, 7, strides=2, pads=3)))
    y = n.op("Relu", n.conv(n.op("Relu", n.conv(x, 32, 3)), 32, group=32, bias=True))
    x = n.op("Relu", n.op("Add", n.conv(y, 24, 1, pads=0), n.conv(x, 24, 1, pads=0)))
    x = n.op("Flatten", n.op("GlobalAveragePool", x))
    x = n.op("LayerNormalization", x, n.random(24, offset=1.0), n.random(24), attrs=LayerNormAttrs())
    return n.done(n.gemm(x, 16))


def called(program: Program) -> list[str]:
    """The libraries that a program's steps call, in order."""
    return [s.params["call"]["operation"]["name"] for s in program.steps if "call" in s.params]


# ---------------------------------------------------------------- facts


@pytest.mark.parametrize("operation", [PRODUCT, CONV, HEADS, ROWS])
def test_calls_survive_their_plain_form(operation: Any) -> None:
    assert from_plain(to_plain(operation)) == operation


def test_extents() -> None:
    assert PRODUCT.extents == {"a": 4 * 16 * 2, "b": 8 * 16 * 2, "d": 4 * 8 * 2}
    assert replace(PRODUCT, bias=True, ldc=10).extents == {**PRODUCT.extents, "c": (3 * 10 + 8) * 2, "bias": 16}
    stacked = replace(PRODUCT, batch=3, strides=(100, 200, 0, 40))
    assert stacked.extents["a"] == (2 * 100 + 4 * 16) * 2
    assert CONV.extents == {"x": 400 * 2, "w": 16 * 72 * 2, "y": 800 * 2, "bias": 32, "z": 800 * 2}
    assert HEADS.extents["mask"] == 6 * 2
    assert ROWS.extents == {"x": 384, "scale": 128, "bias": 128, "y": 384}
    assert HEADS.extents["k"] == 96 * 2


@pytest.mark.parametrize(
    ("operation", "change"),
    [
        (PRODUCT, {"m": 0}), (PRODUCT, {"dtype": "int8"}), (PRODUCT, {"lda": 15}), (PRODUCT, {"activation": "swish"}),
        (PRODUCT, {"algorithm": -1}), (PRODUCT, {"strides": [0, 0]}), (PRODUCT, {"m": 2.0}), (PRODUCT, {"bias": 1}),
        (CONV, {"x_shape": [2, 8, 5]}), (CONV, {"y_shape": [2, 16, 4, 5]}), (CONV, {"stages": ["exp"]}),
        (CONV, {"stages": ["relu", "relu"], "z_strides": []}), (CONV, {"z_strides": []}), (CONV, {"pads": [0, 0, 0, -1]}),
        (CONV, {"w_shape": [16, 3, 3, 3]}), (HEADS, {"dtype": "float32"}), (HEADS, {"k_shape": [1, 3, 6, 8]}),
        (HEADS, {"mask_shape": [1, 1, 1, 5]}), (HEADS, {"scale": "1"}), (PRODUCT, {"name": "exec"}),
        (ROWS, {"kind": "group"}), (ROWS, {"size": 0}),
    ],
)  # fmt: skip
def test_malformed_calls_are_refused(operation: Any, change: dict[str, Any]) -> None:
    with pytest.raises(EngineError, match="malformed"):
        from_plain({**to_plain(operation), **change})


def test_calls_stay_inside_their_buffers() -> None:
    call = LibraryCall(PRODUCT, {"a": (0, 0), "b": (1, 0), "d": (2, 0)})
    assert parse_call(call.to_plain(), [128, 256, 64]) == call
    for sizes in ([127, 256, 64], [128, 255, 64], [128, 256, 63], [128, 256]):
        with pytest.raises(EngineError, match=r"beyond the buffer|no operand"):
            parse_call(call.to_plain(), sizes)
    with pytest.raises(EngineError, match="beyond the buffer of d"):
        parse_call(LibraryCall(PRODUCT, {**call.operands, "d": (2, 2)}).to_plain(), [128, 256, 64])
    with pytest.raises(EngineError, match="unexpected or missing operands"):
        parse_call(LibraryCall(PRODUCT, {"a": (0, 0), "b": (1, 0)}).to_plain(), [128, 256, 64])


# ---------------------------------------------------------------- tactics


def test_an_engine_of_library_calls_computes_the_network() -> None:
    graph = network()
    program = lowered(graph, tactics=LIBRARIES)
    assert called(program) == [*["convolution"] * 5, "norm", "matmul"]
    stages = [s.params["call"]["operation"].get("stages") for s in program.steps if "call" in s.params]
    assert ["add", "relu"] in stages, "the residual is added by the library"
    feeds = feeds_of(graph)
    want, got = simulate(lowered(graph), feeds), simulate(program, feeds)
    bound = 4e-3 * np.abs(want["y0"]).max()
    np.testing.assert_allclose(got["y0"], want["y0"], rtol=0, atol=bound)


def test_our_own_kernels_come_first_and_are_the_only_ones_on_request() -> None:
    assert not called(lowered(network()))
    assert not called(lowered(network(), tactics="own"))
    assert called(lowered(network(), tactics="cublaslt")) == ["matmul"]
    assert called(lowered(network(), tactics="cudnn")) == [*["convolution"] * 5, "norm"]


def test_libraries_without_measuring_them() -> None:
    program = lowered(network(), tactics="heuristic,cublaslt")
    assert called(program) == ["matmul"]
    assert called(lowered(network(), tactics="heuristic,own")) == []


def test_stages_that_a_library_cannot_fuse_become_a_pointwise_kernel() -> None:
    n = Net()
    x = n.op("Relu", n.op("Add", n.op("Relu", n.conv(n.input(2, 8, 6, 6), 8, 3)), n.input(2, 8, 6, 6)))
    program = lowered(n.done(x), tactics=LIBRARIES)
    (step,) = [s for s in program.steps if "call" in s.params]
    assert step.params["call"]["operation"]["stages"] == ["relu"], "an addition after an activation is not cuDNN's"
    assert "Pointwise" in kinds(program)


@pytest.mark.parametrize("more", [False, True])
def test_grouped_convolutions_are_plain_ones_with_a_kernel_after_them(more: bool) -> None:
    n = Net()
    x = n.conv(n.input(2, 16, 6, 6), 16, 3, group=16, bias=True)
    x = n.op("Relu", n.op("Add", n.op("Sigmoid", x), n.input(2, 16, 6, 6, name="r"))) if more else x
    graph = n.done(x)
    program = lowered(graph, tactics=LIBRARIES)
    (step,) = [s for s in program.steps if "call" in s.params]
    assert step.params["call"]["operation"]["stages"] == []
    names = [s.params["op"]["kind"] for s in program.steps if s.params["tactic"].startswith("conv_cudnn")]
    assert names.count("Pointwise") == 1
    feeds = feeds_of(graph)
    want, got = simulate(lowered(graph), feeds), simulate(program, feeds)
    np.testing.assert_allclose(got["y0"], want["y0"], rtol=0, atol=4e-3 * np.abs(want["y0"]).max())


def test_odd_channels_are_refused_and_run_on_our_own() -> None:
    n = Net()
    program = lowered(n.done(n.conv(n.input(1, 8, 6, 6), 13, 3)), tactics=LIBRARIES)
    assert not called(program)
    (row,) = [t for t in program.meta["tactics"] if t["kind"] == "Conv"]
    assert {"tactic": "conv_cudnn", "reason": "its number of channels is not a multiple of 8"} in row["refused"]


@pytest.mark.parametrize("turned", [False, True])
def test_stacks_of_matrices(turned: bool) -> None:
    n = Net()
    left, right = n.input(2, 3, 8, 16), n.input(2, 3, *((24, 16) if turned else (16, 24)))
    from optdnn.ops.shape import TransposeAttrs

    if turned:
        right = n.op("Transpose", right, attrs=TransposeAttrs((0, 1, 3, 2)))
    graph = n.done(n.op("MatMul", left, right))
    program = lowered(graph, tactics="cublaslt")
    (step,) = [s for s in program.steps if "call" in s.params]
    operation = step.params["call"]["operation"]
    assert (operation["batch"], operation["m"], operation["n"], operation["k"]) == (6, 8, 24, 16)
    assert operation["transposed"] is turned
    feeds = feeds_of(graph)
    want, got = simulate(lowered(graph), feeds), simulate(program, feeds)
    np.testing.assert_allclose(got["y0"], want["y0"], rtol=0, atol=4e-3 * np.abs(want["y0"]).max())


@pytest.mark.parametrize("kind", ["LayerNormalization", "RMSNormalization"])
def test_norms(kind: str) -> None:
    n = Net()
    operands = [n.random(48, offset=1.0), *([n.random(48)] if kind == "LayerNormalization" else [])]
    graph = n.done(n.op(kind, n.input(2, 3, 48), *operands, attrs=LayerNormAttrs()))
    program = lowered(graph, tactics="cudnn")
    assert called(program) == ["norm"]
    feeds = feeds_of(graph)
    want, got = simulate(lowered(graph), feeds), simulate(program, feeds)
    np.testing.assert_allclose(got["y0"], want["y0"], rtol=0, atol=4e-3 * np.abs(want["y0"]).max())


def test_calls_travel_in_an_engine(tmp_path: Any) -> None:
    program = lowered(network(), tactics=LIBRARIES)
    Engine(program).save(tmp_path / "e.engine")
    again = read(tmp_path / "e.engine")
    steps = [(parse(a, program), parse(b, again)) for a, b in zip(program.steps, again.steps, strict=True)]
    assert all(a == b for a, b in steps)
    assert sum(isinstance(a.launch, LibraryCall) for a, _ in steps) == 7


# ---------------------------------------------------------------- without the library


@pytest.fixture
def _gpu_without_libraries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Simulates a machine with a GPU on which neither library is installed."""
    monkeypatch.setattr(providers, "why_not", lambda: None)
    monkeypatch.setattr(providers, "present", lambda name: False)
    monkeypatch.setattr(providers, "installed", lambda name: False)
    providers.providers_here.cache_clear()
    yield
    providers.providers_here.cache_clear()


@pytest.mark.usefixtures("_gpu_without_libraries")
@pytest.mark.parametrize("asked", ["auto", LIBRARIES, "own", "heuristic"])
def test_a_missing_library_only_removes_tactics(asked: str) -> None:
    graph = network()
    program = lowered(graph, target="cuda:sm_90a", tactics=asked)
    assert not called(program)
    assert len(program.steps) == len(lowered(graph, target="cuda:sm_90a", tactics="own").steps)


@pytest.mark.parametrize(("there", "works"), [(True, True), (True, False), (False, False)])
def test_installed_libraries_are_reported_without_loading_them_completely(
    there: bool, works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Importing cuDNN's frontend imports PyTorch, which takes seconds. So it is imported only for a call or a full check."""
    imported: list[str] = []

    def frontend() -> Any:
        imported.append("cudnn")
        if not works:
            raise MissingDependency("nvidia-cudnn-frontend", "cuda-libs", "now")

    library = SimpleNamespace(cudnnGetVersion=Mock(return_value=91900))
    monkeypatch.setattr(libraries, "shared_object", lambda name: library)
    monkeypatch.setattr(libraries, "find_spec", lambda name: object() if there else None)
    monkeypatch.setattr(cudnn, "frontend", frontend)
    for check in (libraries.installed, libraries.present):
        check.cache_clear()
    assert libraries.installed("cudnn") == there
    assert libraries.version_of("cudnn") == "91900"
    assert not imported
    assert libraries.present("cudnn") == works
    assert imported == ["cudnn"]
    for check in (libraries.installed, libraries.present):
        check.cache_clear()


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "_FILES", {"cublaslt": ("libnothing.so.1",)})
    libraries.shared_object.cache_clear()
    with pytest.raises(MissingDependency, match="nvidia-cublas"):
        libraries.shared_object("cublaslt")
    libraries.shared_object.cache_clear()


def test_a_library_that_refuses_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tactics, "ranked", lambda operation: 0 if operation.library == "cudnn" else 3)
    program = lowered(network(), tactics=LIBRARIES)
    assert called(program) == ["matmul"]
    row = next(t for t in program.meta["tactics"] if t["kind"] == "Conv")
    assert {"tactic": "conv_cudnn", "reason": "cudnn has no algorithm for it"} in row["refused"]


def test_the_cost_model_does_not_ask_the_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(operation: object) -> int:
        raise AssertionError("a library was asked")

    monkeypatch.setattr(tactics, "ranked", never)
    assert not called(lowered(network(), tactics="heuristic"))


def test_results_are_those_that_a_call_declares() -> None:
    program = lowered(network(), tactics=LIBRARIES)
    step = next(s for s in program.steps if "call" in s.params and s.params["call"]["operation"]["name"] == "matmul")
    swapped = {**step.params["call"], "operands": {**step.params["call"]["operands"], "d": [1, 0]}}
    with pytest.raises(EngineError, match="writes something else"):
        parse(replace(step, params={**step.params, "call": swapped}), program)


def test_enough_is_known_of_every_result() -> None:
    for operation in (PRODUCT, CONV, HEADS, ROWS, replace(ROWS, kind="rms")):
        assert sum(name in calls.RESULTS for name in operation.extents) == 1


def test_only_the_tanh_form_of_gelu_is_a_products_epilogue() -> None:
    from optdnn.ops.unary import GeluAttrs

    for form, calls_it in (("tanh", "gelu_tanh"), ("none", "")):
        n = Net()
        y = n.op("Gelu", n.matmul(n.input(4, 16), 24), attrs=GeluAttrs(form))
        program = lowered(n.done(y), tactics="cublaslt")
        (step,) = [s for s in program.steps if "call" in s.params]
        assert step.params["call"]["operation"]["activation"] == calls_it


# ---------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.skipif(usable.why_not() is not None, reason="no usable GPU")
@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_the_libraries_agree_with_the_meanings_of_their_steps(precision: str) -> None:
    if not (libraries.present("cudnn") and libraries.present("cublaslt")):
        pytest.skip("cuDNN or cuBLASLt is not installed")
    from support.on_gpu import checked_program

    graph = network()
    program = lowered(graph, precision, target="cuda:sm_90a", tactics=LIBRARIES)
    assert called(program)
    checked_program(program, feeds_of(graph), {"fp16": 2e-3, "fp32": 1e-5}[precision])
