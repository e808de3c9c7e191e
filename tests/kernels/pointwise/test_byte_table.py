"""Chains of stages over one 8-bit tensor: their kernel looks results up in a table of 256 elements."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.host import needs_compiler
from support.on_gpu import checked_launches
from support.on_processor import compare_steps
from support.quantized_nets import QNet
from support.simulated import feeds_of, lowered

from optdnn.ir.graph import Graph, Value
from optdnn.kernels.pointwise import byte_table
from optdnn.runtime.program import Program


def gelu(n: QNet, y: Value) -> Value:
    """A GELU, quantized as five operators."""
    half = n.op("Mul", y, np.float32(0.5))
    gate = n.fake(n.op("Erf", n.fake(n.op("Div", y, np.float32(2**0.5)), 0.02)), 0.008, 3, np.uint8)
    return n.op("Mul", n.fake(half, 0.01), n.fake(n.op("Add", gate, np.float32(1.0)), 0.016))


def chain(n: QNet, *, dtype: Any = np.uint8, zero: int = 117, narrow: bool = True, second: bool = False) -> Graph:
    """Stored bytes, a GELU of them, and its quantization. ``second``: with another tensor added."""
    y = gelu(n, n.dq(n.input(3, 5, 40, dtype=dtype), 0.03, zero))
    y = n.op("Add", y, n.input(3, 5, 40, name="b")) if second else y
    return n.done(n.q(y, 0.02, 14, np.uint8) if narrow else y)


CASES = {
    "to uint8": lambda: chain(QNet()),
    "int8": lambda: chain(QNet(), dtype=np.int8, zero=-5),
    "to floats": lambda: chain(QNet(), narrow=False),
}


def tables(program: Program) -> int:
    return sum(b.name.endswith(".table") for b in program.buffers)


def feeds(graph: Graph) -> dict[str, Any]:
    """Bytes of all values."""
    made = feeds_of(graph)
    (name,) = (k for k, v in made.items() if v.dtype.itemsize == 1)
    return made | {
        name: np.random.default_rng(2).integers(0, 256, made[name].shape).astype(np.uint8).view(made[name].dtype)
    }


@needs_compiler
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("name", CASES)
def test_they_are_looked_up(name: str, precision: str, tmp_path: Path) -> None:
    graph = CASES[name]()
    program = lowered(graph, precision)
    assert [len(program.steps), tables(program)] == [1, 1]
    assert compare_steps(program, feeds(graph), 0.0, tmp_path) == 1


def test_the_table_is_of_the_results_type() -> None:
    (buffer,) = (b for b in lowered(CASES["to floats"](), "fp16").buffers if b.name.endswith(".table"))
    assert (buffer.dtype, buffer.shape) == (np.float32, (256,))


def test_two_tensors_are_not_looked_up() -> None:
    assert tables(lowered(chain(QNet(), second=True), "fp32")) == 0


def test_few_stages_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    n = QNet()
    graph = n.done(n.op("Tanh", n.dq(n.input(3, 5, 40, dtype=np.uint8), 0.03, 117)))
    assert tables(lowered(graph, "fp32")) == 0
    monkeypatch.setattr(byte_table, "LEAST_STAGES", 2)
    assert tables(lowered(graph, "fp32")) == 1


def test_numbers_per_channel_are_not_looked_up() -> None:
    n = QNet()
    y = gelu(n, n.dq(n.input(3, 5, 40, dtype=np.uint8), 0.03, 117))
    assert tables(lowered(n.done(n.q(n.op("Mul", y, n.random(40)), 0.02, 14, np.uint8)), "fp32")) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_look_ups_on_a_gpu(name: str) -> None:
    assert [e.error for e in checked_launches(CASES[name](), "fp16")] == [0.0]
