"""Large pointwise operators of narrow accesses keep several in flight: the results are those of one access at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.host import needs_compiler
from support.net import Net, built
from support.on_processor import compare_graph
from support.simulated import lowered

from optdnn.ir.graph import Value
from optdnn.kernels.layout import copies, tap_forms
from optdnn.kernels.pointwise import joint, pointwise
from optdnn.ops.index import PadAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.runtime.cuda.kernel_text.check import check_text


def odd_rows(n: Net) -> Value:
    """Sums over windows of 7 x 7, as biases of relative positions are: no two neighbors are one access."""
    y = n.op("Add", n.input(3, 5, 1, 7, 7), n.input(3, 5, 4, 1, 1, name="b"))
    return n.op("Tanh", n.op("Mul", y, n.const(np.float32(0.3))))


def pairs(n: Net) -> Value:
    return n.op("Add", n.input(3, 5, 1, 2, 3), n.input(3, 5, 4, 1, 1, name="b"))


def pixels(n: Net) -> Value:
    return n.op("Transpose", n.input(4, 3, 5, 7), attrs=TransposeAttrs((0, 2, 3, 1)))


def padded(n: Net) -> Value:
    """A mask with a row and a column for the class token."""
    return n.op("Pad", n.op("Tanh", n.input(2, 3, 4, 12)), n.ints(0, 0, 1, 1, 0, 0, 0, 0), attrs=PadAttrs())


NETS = {f.__name__: f for f in (odd_rows, pairs, pixels, padded)}


@needs_compiler
@pytest.mark.parametrize("build", NETS.values(), ids=NETS)
def test_results(build: Callable[[Net], Value], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for module in (pointwise, tap_forms):
        monkeypatch.setattr(module, "MANY", 100)
        monkeypatch.setattr(module, "SHORT", 8)  # outputs of the network are fp32
    for module in (joint, copies):
        monkeypatch.setattr(module, "MOST_ELEMENTS", 0)  # no launch with others
    graph = built(build)
    compare_graph(graph, "fp16", tmp_path)
    texts = [t for k in lowered(graph, "fp16").kernels for t in k.generated.values()]
    name, array = ("taps", "to[4]") if build is padded else ("pointwise", "o_of[4]")
    assert any(array in text for text in texts)
    for text in texts:
        if array in text:
            check_text(text, "general.cu", name)


@pytest.mark.parametrize("build", NETS.values(), ids=NETS)
def test_few_accesses_get_a_thread_each(build: Callable[[Net], Value]) -> None:
    program = lowered(built(build), "fp16")
    assert not any("_of[" in t or "to[" in t for k in program.kernels for t in k.generated.values())
