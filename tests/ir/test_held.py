"""Graphs inside of engines: after reading, they lower to the same program, and weights are stored once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.net import Net
from support.sequence_cases import recurrent
from support.sweep import sweep

from optdnn.config import BuildOptions
from optdnn.dim import symbol
from optdnn.errors import EngineError
from optdnn.importers.onnx import import_model
from optdnn.ir.embedded_graph import KEY, held, hold
from optdnn.ir.graph import Graph
from optdnn.lowering.cuda import lower_cuda
from optdnn.models import zoo
from optdnn.ops.gemm import MatMulAttrs
from optdnn.optimize import optimize
from optdnn.runtime.cuda.gpu_facts import of_arch
from optdnn.runtime.program import Program
from optdnn.types import Array

OPTIONS = BuildOptions(target="simulate", precision="fp16")


def small() -> Graph:
    n = Net()
    x = n.op("Relu", n.conv(n.input(1, 48, 14, 14), 64, 3, bias=True))
    x = n.op("Clip", n.op("Add", n.conv(x, 64, 3), x), 0.0, 6.0)
    x = n.op("GlobalAveragePool", x)
    return n.done(n.matmul(n.op("Flatten", x), 40))


def lowered(graph: Graph) -> Program:
    return lower_cuda(graph, OPTIONS, of_arch("sm_90a"), {})


def same(a: Program, b: Program) -> bool:
    blobs = zip(a.blobs, b.blobs, strict=False)
    contents = all(np.array_equal(x.reshape(-1).view(np.uint8), y.reshape(-1).view(np.uint8)) for x, y in blobs)
    return contents and a.steps == b.steps and a.buffers == b.buffers and a.kernels == b.kernels


@pytest.mark.parametrize("name", sweep(["small", "mobilenet_v2", "lstm"], "small", "lstm"))
def test_a_graph_that_is_read_lowers_to_the_same_program(name: str) -> None:
    graph = small() if name == "small" else import_model(zoo.build(name, batch=1, width=0.5))
    optimize(graph, OPTIONS, "simulate")
    program = lowered(graph)
    size = sum(b.nbytes for b in program.blobs)
    again = held(hold(graph, program))
    assert [op.id for op in again.order()] == [op.id for op in graph.order()]
    assert same(program, lowered(again))
    if name in ("small", "mobilenet_v2"):
        assert sum(b.nbytes for b in program.blobs) < 1.1 * size, "weights are views of what the kernels read"


def test_transposed_weights_are_found() -> None:
    """Gemm stores its matrix transposed."""
    n = Net()
    graph = n.done(n.matmul(n.input(4, 64), 72))
    optimize(graph, OPTIONS, "simulate")
    program = lowered(graph)
    count = len(program.blobs)
    hold(graph, program)
    assert len(program.blobs) == count
    assert same(program, lowered(held(program)))


@pytest.mark.parametrize(("precision", "most"), [("fp16", 1.02), ("fp32", 1.15)])
def test_weights_of_both_directions_are_found(precision: str, most: float) -> None:
    """A launch reads them as one matrix."""
    graph = recurrent("LSTM", inputs=128, hidden=48, direction="bidirectional")
    options = replace(OPTIONS, precision=precision)
    optimize(graph, options, "simulate")
    program = lower_cuda(graph, options, of_arch("sm_90a"), {})
    size = sum(b.nbytes for b in program.blobs)
    again = held(hold(graph, program))
    assert sum(b.nbytes for b in program.blobs) < most * size
    for a, b in zip(graph.of_kind("Constant"), again.of_kind("Constant"), strict=True):
        assert a.attrs.value.tobytes() == b.attrs.value.tobytes()


def gated(precision: str, units: int) -> tuple[Graph, Program]:
    """A unit whose two products are one launch, and both matrices one tensor."""
    n = Net()
    x = n.input(64, 512)
    gate = n.op("Relu", n.matmul(x, units))
    graph = n.done(n.matmul(n.op("Mul", gate, n.matmul(x, units)), 512))
    options = replace(OPTIONS, precision=precision)
    optimize(graph, options, "simulate")
    program = lower_cuda(graph, options, of_arch("sm_90a"), {})
    assert any(s.params.get("tactic", "").startswith("gemm_paired") for s in program.steps)
    return graph, program


@pytest.mark.parametrize("precision", ["fp16", "tf32", "fp32"])
@pytest.mark.parametrize("units", [1024, 1016])
def test_weights_that_alternate_in_blocks_are_found(precision: str, units: int) -> None:
    graph, program = gated(precision, units)
    size = sum(b.nbytes for b in program.blobs)
    again = held(hold(graph, program))
    assert sum(b.nbytes for b in program.blobs) < {"fp16": 1.01, "tf32": 1.51, "fp32": 1.07}[precision] * size
    for a, b in zip(graph.of_kind("Constant"), again.of_kind("Constant"), strict=True):
        assert a.attrs.value.tobytes() == b.attrs.value.tobytes()


def test_weights_rounded_to_tf32_are_made_exact() -> None:
    graph = tf32_of(special())
    program = hold(graph, lower_cuda(graph, TF32, of_arch("sm_90a"), {}))
    assert rounded(program)
    for a, b in zip(graph.of_kind("Constant"), held(program).of_kind("Constant"), strict=True):
        assert a.attrs.value.tobytes() == b.attrs.value.tobytes()


TF32 = replace(OPTIONS, precision="tf32")


def tf32_of(weights: Array) -> Graph:
    n = Net()
    graph = n.done(n.op("MatMul", n.input(64, len(weights)), n.const(weights), attrs=MatMulAttrs()))
    optimize(graph, TF32, "simulate")
    return graph


def special() -> Array:
    """Weights between two neighbors of tf32, and those that it cannot hold, among ordinary ones."""
    weights = np.random.default_rng(0).standard_normal((512, 1024)).astype(np.float32)
    bits = weights.view(np.uint32)
    bits[0, :4] = 0x3F801000, 0x3F803000, 0xBF801000, 0x3FFFFFFF
    bits[1, :5] = 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7FC01234, 0x80000000
    bits[2, :3] = 0x00000001, 0x80001000, 0x00000FFF
    return weights


def rounded(program: Program) -> list[Any]:
    return [r[2] for r in program.meta[KEY]["ops"] if r[1] == "Constant" and isinstance(r[2], dict)]


@pytest.mark.parametrize("key", ["low", "sha256"])
@pytest.mark.parametrize("value", [None, 0, "0" * 64])
def test_damaged_corrections_of_tf32_are_refused(key: str, value: Any) -> None:
    graph = tf32_of(special())
    program = hold(graph, lower_cuda(graph, TF32, of_arch("sm_90a"), {}))
    rounded(program)[0][key] = value
    with pytest.raises(EngineError, match="not one of this version"):
        held(program)


@pytest.mark.parametrize("shape", [[512, 64, 8], [512, 1024], [512, 1 << 20, 8], [512, 128]])
def test_views_of_another_size_are_refused(shape: list[int]) -> None:
    graph, program = gated("fp16", 1024)
    hold(graph, program)
    place = next(r[2] for r in program.meta[KEY]["ops"] if r[1] == "Constant" and len(r[2]) == 4)
    assert place[3] == [512, 128, 8]
    place[3] = shape
    with pytest.raises(EngineError, match="not one of this version"):
        held(program)


def test_symbolic_sizes_are_not_kept() -> None:
    n = Net()
    graph = n.done(n.op("Relu", n.input(symbol("N"), 8)))
    program = lowered(small_optimized())
    assert KEY not in hold(graph, program).meta
    with pytest.raises(EngineError, match="does not hold its graph"):
        held(program)


def small_optimized() -> Graph:
    graph = small()
    optimize(graph, OPTIONS, "simulate")
    return graph


def damaged(table: Any) -> list[Any]:
    rows = table["ops"]
    constant = next(r for r in rows if r[1] == "Constant" and r[2][2] is not None)
    conv = next(r for r in rows if r[1] == "Conv")

    def constant_outside() -> None:
        constant[2] = [constant[2][0], 1 << 40, constant[2][2]]

    def constant_of_repeated_elements() -> None:
        constant[2] = [constant[2][0], 0, [0]]
        constant[4][0][2] = [1 << 40]

    def constant_of_a_larger_view() -> None:
        constant[2] = [constant[2][0], 0, [0], [1 << 40]]

    def constant_of_another_blob() -> None:
        constant[2] = [10_000, 0, None]

    def unknown_attribute() -> None:
        conv[2]["nonsense"] = 1

    def missing_operand() -> None:
        conv[3][0] = [12345, 0]

    def no_rows() -> None:
        del table["ops"]

    large = constant_of_repeated_elements, constant_of_a_larger_view
    return [*large, constant_outside, constant_of_another_blob, unknown_attribute, missing_operand, no_rows]


@pytest.mark.parametrize("k", range(7))
def test_damaged_graphs_are_refused(k: int) -> None:
    graph = small_optimized()
    program = hold(graph, lowered(graph))
    damaged(program.meta[KEY])[k]()
    with pytest.raises(EngineError, match="not one of this version"):
        held(program)
