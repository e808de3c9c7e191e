"""Rescaling before quantization: exact, only through operators that a factor can pass, and better in integers."""

from __future__ import annotations

import numpy as np
import pytest
from support.net import Net

from optdnn.ir.evaluate import evaluate, promote, random_feeds, values
from optdnn.ir.graph import Graph, Value
from optdnn.ir.verify import verify
from optdnn.ops.gemm import MatMulAttrs
from optdnn.ops.norm import LayerNormAttrs
from optdnn.passes.assign_precision import AssignPrecision
from optdnn.passes.base import PassContext, PassReport
from optdnn.passes.equalize import Equalize
from optdnn.passes.fuse_epilogue import FuseEpilogue
from optdnn.passes.support.precision import PrecisionPlan
from optdnn.passes.support.ranges import Calibration, Range, channel_axis
from optdnn.types import FP32


def observed(graph: Graph) -> Calibration:
    """Extremes, channel maxima and means over three random inputs."""
    wanted = [Value(op.id, i) for op in graph.order() if op.kind not in ("Constant", "Output")
              for i, o in enumerate(op.outputs) if o.type.dtype == FP32]  # fmt: skip
    ranges: dict[str, Range] = {}
    largest: dict[str, list[np.ndarray]] = {}
    means: dict[str, list[np.ndarray]] = {}
    for seed in range(3):
        for v, a in zip(wanted, values(graph, random_feeds(graph, seed), wanted), strict=True):
            name, r = graph.output(v).name, Range(float(a.min()), float(a.max()))
            ranges[name] = ranges[name].hull(r) if name in ranges else r
            axes = tuple(i for i in range(a.ndim) if i != channel_axis(a.ndim))
            largest.setdefault(name, []).append(np.abs(a).max(axis=axes))
            means.setdefault(name, []).append(a.mean(axis=axes))
    return Calibration("minmax", ranges, ranges, {n: np.max(v, axis=0) for n, v in largest.items()},
                       {n: np.mean(v, axis=0) for n, v in means.items()})  # fmt: skip


def run(graph: Graph, precision: str = "int8", **plan: str) -> PassReport:
    context = PassContext(target="cpu", plan=PrecisionPlan(precision, plan), calibration=observed)
    report = Equalize()(graph, context)
    verify(graph)
    return report


def mobile(activation: str = "Relu") -> Graph:
    """expand -> depthwise -> project, with ranges that differ from channel to channel."""
    n = Net()
    x = n.conv(n.input(1, 4, 6, 6), 8, 1, pads=0, bias=True)
    graph = n.graph
    spread = np.exp(np.linspace(-4, 4, 8))
    conv = graph.op(x)
    w, b = (graph.constant_value(v) for v in conv.inputs[1:3])
    assert w is not None
    assert b is not None
    scaled = n.const(w * spread.reshape(-1, 1, 1, 1)), n.const(b * spread)
    from dataclasses import replace

    graph.set_op(replace(conv, inputs=(conv.inputs[0], *scaled)))
    graph.remove_dead([v.op for v in conv.inputs[1:] if v is not None])
    x = n.op(activation, x)
    x = n.op(activation, n.conv(x, 8, 3, group=8, bias=True))
    w2 = graph.constant_value(graph.of_kind("Conv")[1].inputs[1])
    assert w2 is not None
    conv = graph.of_kind("Conv")[1]
    graph.set_op(replace(conv, inputs=(conv.inputs[0], n.const(w2 / spread.reshape(-1, 1, 1, 1)), conv.inputs[2])))
    graph = n.done(n.conv(x, 4, 1, pads=0, bias=True))
    FuseEpilogue()(graph)
    return graph


def distance(graph: Graph, other: Graph, seed: int = 5) -> float:
    feeds = random_feeds(graph, seed)
    (a,), (b,) = evaluate(graph, feeds).values(), evaluate(other, feeds).values()
    return float(np.abs(a - b).max() / np.abs(a).max())


def in_integers(graph: Graph) -> Graph:
    done = graph.copy()
    AssignPrecision()(done, PassContext(target="cpu", precision="int8", calibration=observed))
    return done


def test_cross_layer_equalization_is_exact_and_helps() -> None:
    graph = mobile()
    done = graph.copy()
    report = run(done)
    assert [f.rule for f in report.fired] == ["cross_layer"] * 2
    # Only the constants changed, and they were rounded once.
    assert done.kinds() == graph.kinds()
    assert distance(graph, done) < 1e-5
    before, after = (g.constant_value(g.of_kind("Conv")[0].inputs[1]) for g in (graph, done))
    assert before is not None
    assert after is not None
    ratio = [np.ptp(np.log(np.abs(w).max(axis=(1, 2, 3)))) for w in (before, after)]
    assert ratio[1] < ratio[0] / 3
    assert distance(graph, in_integers(done)) < distance(graph, in_integers(graph)) / 2
    assert run(done).changes == 0


@pytest.mark.parametrize("activation", ["Sigmoid", "Swish"])
def test_no_factor_passes_an_activation_that_is_not_homogeneous(activation: str) -> None:
    graph = mobile(activation)
    report = run(graph)
    assert report.fired == []
    assert {r.reason for r in report.refused} == {f"{activation} is not homogeneous: a factor cannot pass it"}


def test_nothing_happens_without_integers_or_to_pinned_ops() -> None:
    assert run(mobile(), "fp32").changes == 0
    assert run(mobile(), "fp32").refused == []
    assert run(mobile(), "int8", **{"Conv_*": "fp32"}).changes == 0


def normalized(residual: bool = False, spread: float = 3.0) -> Graph:
    n = Net()
    x = n.input(1, 5, 16)
    sizes = np.exp(np.linspace(-spread, spread, 16))
    scale = n.const(sizes)

    def weights(units: int) -> Value:
        """Small where the normalization is large, as training leaves them: every channel counts."""
        return n.const(n.rng.standard_normal((16, units)) / sizes[:, None])

    y = n.op("LayerNormalization", x, scale, n.const(n.rng.standard_normal(16) * sizes), attrs=LayerNormAttrs())
    q = n.op("MatMul", y, weights(8), attrs=MatMulAttrs())
    z = n.op("MatMul", n.op("Relu", n.op("MatMul", y, weights(16), attrs=MatMulAttrs())), n.random(16, 8))
    out = n.op("Add", q, z)
    if residual:
        n.graph.add_output(n.op("Add", y, x), "residual")
    return n.done(out)


def test_smoothing_is_exact_and_helps() -> None:
    graph = normalized()
    done = graph.copy()
    report = run(done)
    assert [f.rule for f in report.fired] == ["smooth"]
    assert distance(graph, done) < 1e-5
    wide = promote(graph), promote(done)
    assert distance(*wide) < 1e-5
    assert distance(graph, in_integers(done)) < distance(graph, in_integers(graph)) * 0.7
    assert run(done).changes == 0


def test_a_normalization_that_others_read_is_left_alone() -> None:
    report = run(normalized(residual=True))
    assert report.fired == []
    assert [r.reason for r in report.refused] == ["its result is read by Add Add_7 as well"]


def test_biases_compensate_the_rounding_of_weights() -> None:
    """With operands whose mean is far from zero, results are right on average."""
    n = Net()
    x = n.op("Add", n.input(2, 8, 6, 6), 5.0)
    graph = n.done(n.conv(x, 6, 3, pads=0, bias=True))
    with_means, without = graph.copy(), graph.copy()
    for g, keep in ((with_means, True), (without, False)):
        found = observed(g)
        if not keep:
            found = Calibration("minmax", found.ranges)
        AssignPrecision()(g, PassContext(target="cpu", precision="int8", calibration=found))
        verify(g)

    def bias_of(g: Graph) -> float:
        errors = []
        for seed in range(3):
            feeds = random_feeds(graph, seed)
            (want,), (got,) = evaluate(graph, feeds).values(), evaluate(g, feeds).values()
            errors.append((got - want).mean(axis=(0, 2, 3)))
        return float(np.abs(np.mean(errors, axis=0)).max())

    assert bias_of(with_means) < bias_of(without) / 3


def test_a_convolution_without_bias_gets_one_and_a_matmuls_stage_is_corrected() -> None:
    n = Net()
    x = n.op("Add", n.input(2, 8, 6, 6), 5.0)
    graph = n.done(n.conv(x, 6, 3))
    AssignPrecision()(graph, PassContext(target="cpu", precision="int8", calibration=observed))
    assert graph.of_kind("Conv")[0].input(2) is not None
    n = Net()
    y = n.op("Add", n.matmul(n.op("Add", n.input(4, 8), 5.0), 6), n.random(6))
    graph = n.done(y)
    FuseEpilogue()(graph)
    (product,) = graph.of_kind("MatMul")
    before = graph.constant_value(product.inputs[2])
    AssignPrecision()(graph, PassContext(target="cpu", precision="int8", calibration=observed))
    verify(graph)
    after = graph.constant_value(graph.of_kind("MatMul")[0].inputs[2])
    assert before is not None
    assert after is not None
    assert 0 < np.abs(before - after).max() < 0.2
