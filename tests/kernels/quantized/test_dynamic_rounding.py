"""The range of a tensor and its rounding in one launch: where it is used, refusals with their reasons, and the kernel on the processor."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support import emulated
from support.covering import covering
from support.host import needs_compiler
from support.net import Net
from support.on_gpu import checked_program
from support.simulated import check_simulated, feeds_of, kinds, lowered, refusals
from support.sweep import sweep

from optdnn.ir.graph import Graph
from optdnn.kernels.quantized import dynamic_rounding
from optdnn.kernels.quantized.dynamic_rounding import Config, Problem
from optdnn.lowering.choose import TacticChoice
from optdnn.ops.quant import QuantizeAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.runtime.cuda.compile import nvrtc
from optdnn.runtime.cuda.gpu_facts import of_arch
from optdnn.runtime.reference.quant import dynamic_quantize_linear
from optdnn.types import UINT8

H200 = of_arch("sm_90a")


def rounded(*shape: int, dtype: type = np.float32, relu: bool = False, turned: bool = False) -> Graph:
    """A tensor that is rounded by its own range. ``relu``: its numbers are above 0. ``turned``: it is rounded in another order."""
    n = Net(dtype)
    x = n.op("Abs" if relu else "Neg", n.input(*shape))
    if turned:
        x = n.op("Transpose", x, attrs=TransposeAttrs((1, 0)))
    return n.done(*n.op("DynamicQuantizeLinear", x, outputs=3))


def early() -> Graph:
    """The scale is read before the tensor is rounded."""
    n = Net()
    scale, zero = n.op("DynamicRange", x := n.op("Sin", n.input(40, 96)), outputs=2)
    doubled = n.op("Add", scale, scale)
    q = n.op("QuantizeLinear", x, scale, zero, attrs=_uint8())
    return n.done(doubled, q)


def other() -> Graph:
    """A tensor is rounded by the range of another one."""
    n = Net()
    scale, zero = n.op("DynamicRange", n.op("Sin", n.input(40, 96)), outputs=2)
    return n.done(n.op("QuantizeLinear", n.op("Sin", n.input(40, 96)), scale, zero, attrs=_uint8()))


def _uint8() -> Any:
    return QuantizeAttrs(UINT8, 0)


GRAPHS = {
    "rows": partial(rounded, 40, 96),
    "halves": partial(rounded, 33, 64, dtype=np.float16),
    "above zero": partial(rounded, 16, 64, relu=True),
    "many": partial(rounded, 320, 1024, dtype=np.float16),
    "few": partial(rounded, 1, 4),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_the_range_and_the_rounding_are_one_launch(name: str) -> None:
    graph = GRAPHS[name]()
    found = kinds(check_simulated(graph, "fp32"))
    assert found.count("DynamicQuantizeLinear") == 1
    assert "DynamicRange" not in found


def test_launches_that_follow_read_the_scale() -> None:
    from kernels.quantized.test_dynamic import network  # type: ignore[import-not-found]

    for name in ("rows", "image"):
        found = kinds(check_simulated(network(name), "fp16", tolerance=2e-2))
        assert "DynamicQuantizeLinear" in found, name


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (partial(rounded, 7, 333), "not whole accesses in the same order"),
        (partial(rounded, 24, 40, turned=True), "not whole accesses in the same order"),
        (early, "another operator reads the range before"),
        (other, "it does not round its operand by the operand's range"),
        (partial(rounded, 2048, 768), "cannot keep 6291456 bytes in registers"),
    ],
)
def test_refusals(build: Any, reason: str) -> None:
    program = lowered(build(), "fp32")
    assert "DynamicRange" in kinds(program)
    assert any(reason in found for found in refusals(program, "dynamic_rounding"))


def test_before_hopper_one_block_rounds_small_tensors() -> None:
    small, large = Problem(500, "float16"), Problem(50_000, "float16")
    assert {c.cluster for c in dynamic_rounding.candidates(small, (8, 0))} == {1}
    assert not dynamic_rounding.candidates(large, (8, 0))
    assert "no clusters" in (dynamic_rounding.refuse(large, Config(16, 1024), (8, 0)) or "")
    assert "cannot keep" in (dynamic_rounding.refuse(replace(large, accesses=1 << 20), Config(16, 1024)) or "")


@pytest.mark.parametrize("accesses", [1, 60, 4096, 100_001])
def test_candidates(accesses: int) -> None:
    found = dynamic_rounding.candidates(problem := Problem(accesses, "float16"), (9, 0))
    assert found, "a cluster holds that many"
    assert list(found) == sorted(found, key=lambda c: (dynamic_rounding.estimate(problem, c), c))
    assert all((c.cluster - 1) * c.threads < accesses for c in found), "each block has elements"


def test_large_tensors_take_two_launches_where_these_are_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamic_rounding, "ROUND_S", 1.0)
    program = lowered(rounded(40, 96), "fp32")
    assert any("two launches are predicted to be as fast" in found for found in refusals(program, "dynamic_rounding"))
    assert "DynamicRange" in kinds(program)


@needs_compiler
@pytest.mark.parametrize(
    ("dtype", "threads"), sweep([(d, t) for d in ("float16", "bfloat16", "float32") for t in (256,)])
)
@pytest.mark.parametrize(("elements", "shift"), [(8, 0.0), (2000, 0.3), (2056, 2.0), (9000, -0.5)])
def test_the_kernel_on_a_processor(dtype: str, threads: int, elements: int, shift: float, tmp_path: Path) -> None:
    kind: Any = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}[dtype]
    problem = Problem(elements * np.dtype(kind).itemsize // 16, dtype)
    made = dynamic_rounding.launch(problem, Config(1, threads), "sm_90a")
    library = emulated.compiled(made.recipe, made.function, tmp_path, headers=["vectors.cuh"])
    x = (np.random.default_rng(0).standard_normal(elements) + shift).astype(kind)
    arrays = {
        "x": x,
        "output": np.full(elements + 16, 7, np.uint8),
        "scale": np.zeros(1, np.float32),
        "zero": np.zeros(1, np.uint8),
    }
    held = {name: emulated.aligned(a) for name, a in arrays.items()}
    emulated.run(library, made, {name: held[name].ctypes.data for name in made.operands})
    want = dynamic_quantize_linear(x.astype(np.float32))
    for name, expected in zip(("output", "scale", "zero"), want, strict=True):
        np.testing.assert_array_equal(held[name][: expected.size], expected.reshape(-1), err_msg=name)
    assert (held["output"][elements:] == 7).all()


@pytest.mark.nvrtc
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_kernels_compile_without_spills(dtype: str) -> None:
    made = {"sm_80": dynamic_rounding.recipe(Problem(500, dtype), Config(1, 512), "sm_80")}
    for accesses in (4096, 100_001):
        problem = Problem(accesses, dtype)
        for config in dynamic_rounding.candidates(problem, (9, 0)):
            made[f"{accesses}, {config}"] = dynamic_rounding.recipe(problem, config, "sm_90a")
    for name in covering(made):
        (kernel,) = nvrtc.resources(made[name]).values()
        assert kernel.spill_bytes == 0, name


@pytest.mark.hopper
@pytest.mark.parametrize("name", GRAPHS)
def test_every_cluster_on_a_gpu_agrees_with_its_meaning(name: str) -> None:
    graph: Graph = GRAPHS[name]()
    plain = lowered(graph, "fp32", target="cuda:sm_90a")
    (decision,) = [t for t in plain.meta["tactics"] if t["tactic"] == "dynamic_rounding"]  # type: ignore[index, union-attr]
    (op,) = graph.of_kind("DynamicQuantizeLinear")
    t = graph.type(op.inputs[0])  # type: ignore[arg-type]
    accesses = int(np.prod(t.static_shape)) * t.dtype.itemsize // 16
    for config in dynamic_rounding.candidates(Problem(accesses, "float32"), H200.capability):
        choices = {decision["signature"]: TacticChoice("dynamic_rounding", str(config))}
        checked_program(lowered(graph, "fp32", target="cuda:sm_90a", choices=choices), feeds_of(graph), 1e-6)
