"""Recurrences in 16-bit networks: the steps are computed in fp32, and what multiplies a state does not become 1."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.net import Net
from support.simulated import check_simulated, feeds_of, lowered, simulate

from optdnn.ir.graph import Graph, Op
from optdnn.ir.verify import verify
from optdnn.ops.base import Stage
from optdnn.ops.binary import CastAttrs
from optdnn.ops.pointwise_scan import PointwiseScanAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.assign_precision import AssignPrecision
from optdnn.passes.base import PassContext, PassReport
from optdnn.types import BF16, FP16, FP32

STEPS, CHANNELS = 900, 3
RECURRENCE = PointwiseScanAttrs(
    stages=(Stage("Mul", (1, 0)), Stage("Add", (~1, 2))), states=1, steps=STEPS, axes=(0, 0), starts=(0, 0), views=((1,), (1,)),
    following=(~2,), results=(~2,), result_axes=(0,), result_kept=(False,),
)  # fmt: skip
"""state * sequence + sequence"""


def constant_decay(begin: Any = None) -> Graph:
    """A leaky sum: the decay is one constant per channel."""
    n = Net()
    x = n.op("Relu", n.input(STEPS, CHANNELS))
    decay = n.const(np.array([0.9984, 0.9988, 0.999], np.float32))
    begin = n.const(np.zeros(CHANNELS, np.float32)) if begin is None else begin(n)
    attrs = PointwiseScanAttrs(
        **{**vars(RECURRENCE), "stages": (Stage("Mul", (0, 2)), Stage("Add", (~1, 1))), "axes": (0,), "starts": (0,),
           "views": ((1,),)}
    )  # fmt: skip
    return n.done(n.op("Tanh", n.op("Mul", 0.01, n.op("PointwiseScan", begin, x, decay, attrs=attrs))))


def computed_decay(*, turned: bool = False, kind: str = "Exp") -> Graph:
    """Mamba's form: the decay of a step is computed from the input."""
    n = Net()
    x = n.input(STEPS, CHANNELS)
    small = n.op("Mul", n.op("Sigmoid", x), -0.004)
    a = n.op(kind, n.transposed(small, 1, 0) if turned else small)
    a = n.transposed(a, 1, 0) if turned else a
    return n.done(n.op("PointwiseScan", n.const(np.zeros(CHANNELS, np.float32)), a, n.op("Relu", x), attrs=RECURRENCE))


def assigned(graph: Graph, precision: str) -> tuple[Op, PassReport]:
    """The scan of a graph after the pass, and the report."""
    report = AssignPrecision()(graph, PassContext(target="cuda:sm_90a", precision=precision))
    verify(graph)
    (scan,) = graph.of_kind("PointwiseScan")
    return scan, report


def dtypes(graph: Graph, scan: Op) -> list[Any]:
    return [graph.type(v).dtype for v in scan.inputs if v is not None]


def relative_error(graph: Graph, precision: str) -> float:
    """The largest error of a simulated 16-bit program, relative to the largest value."""
    feeds = feeds_of(graph)
    (want,), (got,) = (simulate(lowered(graph, p), feeds).values() for p in ("fp32", precision))
    return float(np.abs(got - want).max() / np.abs(want).max())


@pytest.mark.parametrize(("precision", "dtype"), [("fp16", FP16), ("bf16", BF16)])
def test_states_and_constants_stay_fp32_and_casts_are_stages(precision: str, dtype: Any) -> None:
    graph = constant_decay()
    scan, _ = assigned(graph, precision)
    assert dtypes(graph, scan) == [FP32, dtype, FP32]
    assert scan.outputs[0].type.dtype == dtype
    assert [s.kind for s in scan.attrs.stages] == ["Cast", "Mul", "Add", "Cast"]
    assert scan.attrs.stages[0] == Stage("Cast", (1,), CastAttrs(FP32))
    assert scan.attrs.stages[2] == Stage("Add", (~2, ~1))
    assert scan.attrs.stages[3] == Stage("Cast", (~3,), CastAttrs(dtype))
    assert (scan.attrs.following, scan.attrs.results) == ((~3,), (~4,))


def test_a_computed_first_state_is_read_in_fp32() -> None:
    graph = constant_decay(lambda n: n.op("Relu", n.input(CHANNELS, name="s")))
    scan, _ = assigned(graph, "fp16")
    assert dtypes(graph, scan) == [FP32, FP16, FP32]


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("make", [constant_decay, computed_decay])
def test_errors_do_not_grow_with_the_steps(make: Any, precision: str) -> None:
    """Decays that are rounded to 16 bits make errors of 1 % (fp16) and 3 to 6 % (bf16) here."""
    assert relative_error(make(), precision) < {"fp16": 5e-3, "bf16": 1e-2}[precision]


@pytest.mark.parametrize("turned", [False, True])
def test_computed_decays_stay_fp32_in_bf16(turned: bool) -> None:
    graph = computed_decay(turned=turned)
    scan, report = assigned(graph, "bf16")
    assert dtypes(graph, scan) == [FP32, FP32, BF16]
    (why,) = {r.reason for r in report.refused if "Exp" in r.reason}
    assert "it computes decays of the recurrence" in why
    graph = computed_decay(turned=turned)
    scan, report = assigned(graph, "fp16")
    assert dtypes(graph, scan) == [FP32, FP16, FP16]
    assert not report.refused


def test_sequences_that_are_no_decays_stay_in_bf16() -> None:
    """An added sequence, and a decay that the input gives directly."""
    n = Net()
    x = n.input(STEPS, CHANNELS)
    a = n.op("Transpose", n.input(CHANNELS, STEPS, name="a"), attrs=TransposeAttrs((1, 0)))
    graph = n.done(n.op("PointwiseScan", n.const(np.zeros(CHANNELS, np.float32)), a, n.op("Exp", x), attrs=RECURRENCE))
    scan, report = assigned(graph, "bf16")
    assert dtypes(graph, scan) == [FP32, BF16, BF16]
    assert not report.refused


def test_results_that_are_fp16_in_the_network_stay_fp16_in_bf16() -> None:
    """A network of two types: the steps store fp16, which an operator in fp16 multiplies."""
    n = Net()
    half = n.input(STEPS, CHANNELS, name="half", dtype=FP16)
    stages = (*RECURRENCE.stages, Stage("Cast", (~2,), CastAttrs(FP16)))
    attrs = PointwiseScanAttrs(**{**vars(RECURRENCE), "stages": stages, "results": (~3,)})
    begin, decays = n.const(np.zeros(CHANNELS, np.float32)), n.op("Sigmoid", n.input(STEPS, CHANNELS))
    states = n.op("PointwiseScan", begin, decays, n.op("Relu", n.input(STEPS, CHANNELS, name="y")), attrs=attrs)
    graph = n.done(n.op("Mul", states, half))
    scan, _ = assigned(graph.copy(), "bf16")
    assert scan.outputs[0].type.dtype == FP16
    assert [s.kind for s in scan.attrs.stages] == ["Cast", "Mul", "Add", "Cast"]
    check_simulated(graph, "bf16")
