"""rows_reduced: a reduction of short rows, and the pointwise operator on the rows and what they were reduced to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kernels.test_generated import compare_steps
from support.host import WHY_NOT
from support.needs import why_no_hopper
from support.net import Net
from support.simulated import check_simulated, feeds_of, kinds, lowered

from optdnn.ir.graph import Graph
from optdnn.kernels.norm.reduced_rows import LONGEST
from optdnn.ops.base import Stage
from optdnn.ops.fused import PointwiseAttrs
from optdnn.ops.reduce import ReduceAttrs
from optdnn.runtime.cuda.trials.check import check_steps
from optdnn.runtime.engine import Engine


def divided(
    kind: str = "ReduceMean", shape: tuple[int, ...] = (3, 40), *, axes: tuple[int, ...] = (-1,), form: str = ""
) -> Graph:
    """Rows divided by what they are reduced to, times and plus constants, as a global response norm writes its gate."""
    n = Net()
    x = n.op("Abs", n.op("Sin", n.input(*shape)))
    y = n.op(kind, x, n.ints(*axes), attrs=ReduceAttrs(keepdims=form != "fewer axes"))
    z = n.op("Div", x, n.op("Add", y, 0.5))
    z = n.op("Add", n.op("Mul", z, n.random(shape[-1])), 1.0)
    if form == "wider":
        stages = (Stage("Mul", (-1, 1)), Stage("Add", (-2, 2)))
        z = n.op("Pointwise", x, y, n.input(5, *shape, name="wide"), attrs=PointwiseAttrs(epilogue=stages))
    return n.done(n.op("Softmax", z), *([n.op("Exp", y)] if form == "kept" else []))


NETS = {
    "means": divided(),
    "sums": divided("ReduceSum", (2, 5, 130)),
    "maxima of two axes": divided("ReduceMax", (2, 3, 4, 9), axes=(1, 2)),
    "long rows": divided(shape=(2, 3000)),
}


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
@pytest.mark.parametrize("name", NETS)
def test_a_reduction_and_its_reader_are_one_launch(name: str, precision: str) -> None:
    program = check_simulated(NETS[name], precision)
    assert "ReducedRows" in kinds(program)
    assert not {"ReduceMean", "ReduceSum", "ReduceMax"} & set(kinds(program))


@pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or "")
@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("name", NETS)
def test_the_kernel_on_the_processor(name: str, precision: str, tmp_path: Path) -> None:
    tolerance = {"fp32": 3e-6, "fp16": 2e-3, "bf16": 1.6e-2}[precision]
    assert compare_steps(lowered(NETS[name], precision), feeds_of(NETS[name]), tolerance, tmp_path)


@pytest.mark.nvrtc
@pytest.mark.parametrize("name", NETS)
def test_the_kernel_compiles(name: str) -> None:
    program = lowered(NETS[name], "fp16", target="cuda:sm_90a")
    assert "ReducedRows" in kinds(program)
    assert all(k.cubin is not None for k in program.kernels)


@pytest.mark.parametrize(
    ("graph", "because"),
    [
        (divided(form="kept"), "it reads no reduction"),
        (divided("ReduceMin"), "it reads no reduction"),
        (divided(axes=(0,), form="fewer axes"), "has fewer axes than the rows"),
        (divided(form="wider"), "is not of the rows' shape"),
        (divided(shape=(3, LONGEST + 8)), "are long or many"),
        (divided(shape=(1 << 11, 40)), "are long or many"),
    ],
)
def test_what_it_refuses(graph: Graph, because: str) -> None:
    tactics: Any = lowered(graph, "fp32", no_cubins=True).meta["tactics"]
    found = [r["reason"] for t in tactics for r in t.get("refused", ()) if r["tactic"] == "rows_reduced"]
    assert any(because in reason for reason in found)


@pytest.mark.gpu
@pytest.mark.skipif(why_no_hopper() is not None, reason=why_no_hopper() or "")
@pytest.mark.parametrize("name", NETS)
def test_every_launch_does_what_its_step_means(name: str) -> None:
    context: Any = Engine(lowered(NETS[name], "fp16", target="cuda:sm_90a")).context()
    assert not [e for e in check_steps(context, feeds_of(NETS[name])) if not e.error < 4e-3]
