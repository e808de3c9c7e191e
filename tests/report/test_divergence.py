"""Divergence node by node: the compared values, the cause of a fault, and the first node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.onnxnet import convnet

import optdnn.compare.divergence
from optdnn.compare.divergence import find_divergences
from optdnn.config import BuildOptions
from optdnn.importers.onnx import import_model
from optdnn.ir.evaluate import random_feeds
from optdnn.ir.graph import ConstantAttrs, Graph
from optdnn.lowering.steps import lower_reference
from optdnn.optimize import optimize
from optdnn.runtime.engine import Engine

EngineOf = Callable[[Graph], Engine]


def reference(graph: Graph) -> Engine:
    return Engine(lower_reference(graph, {}))


def faulty(value: str, factor: float) -> EngineOf:
    """A function that makes engines whose target computes ``value`` wrongly, and so all later values."""

    def engine_of(graph: Graph) -> Engine:
        broken = graph.copy()
        op = next(op for op in broken.ops() if value in [o.name for o in op.outputs])
        bad = broken.add("Mul", [op.value, broken.add_constant(np.float32(factor))], names=[f"{value}_bad"])
        for use in broken.uses(op.value):
            user = broken.op(use.op)
            if user.id != bad.id:
                inputs = tuple(bad.value if v == op.value else v for v in user.inputs)
                broken.set_op(replace(user, inputs=inputs))
        return reference(broken)

    return engine_of


@pytest.fixture
def graphs() -> tuple[Graph, Graph]:
    """The network after the import, and after the passes."""
    original, optimized = import_model(convnet()), import_model(convnet())
    optimize(optimized, BuildOptions(target="reference"), "reference")
    return original, optimized


def test_every_value_that_is_left_is_compared_under_its_onnx_names(graphs: tuple[Graph, Graph]) -> None:
    original, optimized = graphs
    found = find_divergences(original, optimized, reference, random_feeds(original))
    assert [(d.operator, d.value, d.node) for d in found.divergences] == [
        ("Conv", "relu1_out", "bn1 + conv1 + relu1"),
        ("Conv", "relu2_out", "add + bn2 + conv2 + relu2"),
        ("GlobalAveragePool", "pool_out", "pool"),
        ("Flatten", "flatten_out", "flatten"),
        ("Gemm", "y", "head"),
    ]
    assert [d.position for d in found.divergences] == [0, 1, 2, 3, 4]
    assert found.divergences[0].shape == (1, 8, 8, 8)
    assert found.hidden == 0
    assert found.first is None
    for d in found.divergences:
        assert 0 < d.max_rel_err < 1e-6
        assert 0 < d.passes_rel_err < 1e-6  # folded weights are rounded once


@pytest.mark.parametrize(("value", "node"), [("relu1_out", "bn1 + conv1 + relu1"), ("pool_out", "pool"), ("y", "head")])
def test_a_fault_of_the_target_is_found_at_its_node(graphs: tuple[Graph, Graph], value: str, node: str) -> None:
    original, optimized = graphs
    found = find_divergences(original, optimized, faulty(value, 1.01), random_feeds(original))
    assert found.first is not None
    assert found.first.node == node
    assert found.first.max_rel_err == pytest.approx(0.01, rel=1e-3)
    assert found.first.passes_rel_err < 1e-6  # no fault of the passes
    errors = [d.max_rel_err for d in found.worst_first]
    assert errors == sorted(errors, reverse=True)
    assert (
        find_divergences(original, optimized, faulty(value, 1.01), random_feeds(original), tolerance=0.05).first is None
    )


def test_a_fault_of_a_pass_is_distinguished_from_one_of_the_target(graphs: tuple[Graph, Graph]) -> None:
    original, optimized = graphs
    conv = optimized.of_kind("Conv")[1]
    weight = optimized.op(conv.inputs[1].op)  # type: ignore[union-attr]
    optimized.set_op(replace(weight, attrs=ConstantAttrs(weight.attrs.value * np.float32(1.1))))
    found = find_divergences(original, optimized, reference, random_feeds(original))
    assert found.first is not None
    assert found.first.value == "relu2_out"
    assert found.first.passes_rel_err == pytest.approx(found.first.max_rel_err, rel=1e-3)
    assert found.divergences[0].passes_rel_err < 1e-6


def test_a_value_that_is_not_finite_is_beyond_any_tolerance(graphs: tuple[Graph, Graph]) -> None:
    original, optimized = graphs
    found = find_divergences(
        original, optimized, faulty("pool_out", float("nan")), random_feeds(original), tolerance=1e9
    )
    assert found.first is not None
    assert found.first.node == "pool"
    assert found.worst_first[0].max_rel_err == float("inf")


def test_values_are_exposed_in_groups(graphs: tuple[Graph, Graph], monkeypatch: pytest.MonkeyPatch) -> None:
    original, optimized = graphs
    feeds = random_feeds(original)
    whole = find_divergences(original, optimized, reference, feeds)
    calls: list[int] = []

    def counted(graph: Graph) -> Engine:
        calls.append(len(graph.outputs))
        return reference(graph)

    monkeypatch.setattr(optdnn.compare.divergence, "CHUNK_BYTES", 12_000)  # relu1_out takes 8 * 64 * 20 bytes
    assert find_divergences(original, optimized, counted, feeds) == whole
    assert calls == [2, 4]  # each with the network's own output


def test_symbolic_dimensions_and_converted_borders(tmp_path: Path) -> None:
    original, optimized = import_model(convnet(batch="N")), import_model(convnet(batch="N"))
    optimize(optimized, BuildOptions(target="reference", io_dtype="fp16"), "reference")
    found = find_divergences(original, optimized, reference, random_feeds(original, sizes={"N": 3}), tolerance=1e-2)
    assert found.divergences[0].shape == (3, 8, 8, 8)
    assert found.first is None
    assert 1e-5 < found.divergences[0].max_rel_err < 1e-3  # the input was rounded to half precision
    assert found.hidden == 2  # the casts of inputs and outputs
