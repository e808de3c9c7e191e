"""Operators that stay fp32 in an fp16 build because of their values: layers that grow, and overflows in a trial run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.net import Net
from support.sequence_cases import recurrent
from support.simulated import feeds_of, lowered, simulate

from optdnn.dim import symbol
from optdnn.ir.evaluate import evaluate
from optdnn.ir.graph import ConstantAttrs, Graph, Value
from optdnn.ops.norm import LayerNormAttrs
from optdnn.ops.rnn import GRUAttrs, LSTMAttrs, RNNAttrs
from optdnn.passes.assign_precision import AssignPrecision
from optdnn.passes.base import PassContext
from optdnn.passes.fuse_epilogue import FuseEpilogue
from optdnn.passes.support import overflows, trial
from optdnn.passes.support.overflows import growing
from optdnn.passes.support.precision import PrecisionPlan
from optdnn.passes.support.precision_report import PrecisionLog
from optdnn.passes.support.ranges import Calibration, Range
from optdnn.passes.support.trial import largest_values

GATES = {"RNN": (1, RNNAttrs), "GRU": (3, GRUAttrs), "LSTM": (4, LSTMAttrs)}


def layer(
    kind: str, *activations: str, clip: float | None = None, scale: float = 0.3, steps: int = 6
) -> tuple[Net, Any]:
    n = Net()
    gates, attrs = GATES[kind]
    width = hidden = 4
    operands = [n.random(1, gates * hidden, width, scale=scale), n.random(1, gates * hidden, hidden, scale=scale)]
    alphas = tuple(1.0 for _ in activations)
    made = attrs(hidden, "forward", activations, alphas, tuple(0.0 for _ in activations), clip)
    return n, n.op(
        kind, n.input(steps, 2, width), *operands, attrs=made, outputs=3 if kind == "LSTM" else 2, name="layer"
    )


def refused(graph: Graph, plan: PrecisionPlan | None = None, target: str = "cuda:sm_90a") -> dict[str, str]:
    log = PrecisionLog()
    context = PassContext(
        target=target, precision="fp16", plan=plan or PrecisionPlan("fp16", base="fp16"), precision_log=log
    )
    AssignPrecision()(graph, context)
    return log.refused


@pytest.mark.parametrize(
    ("kind", "activations", "clip", "by"),
    [
        ("RNN", ("Tanh",), None, None),
        ("RNN", ("Relu",), None, None),  # tried: with these weights and steps it hardly grows
        ("RNN", ("LeakyRelu",), None, "LeakyRelu"),
        ("RNN", ("Relu",), 3.0, None),
        ("GRU", ("Sigmoid", "Tanh"), None, None),
        ("GRU", ("HardSigmoid", "Softsign"), None, None),
        ("GRU", ("Affine", "Tanh"), 0.5, "Affine"),
        ("GRU", ("Sigmoid", "LeakyRelu"), None, "LeakyRelu"),
        ("LSTM", ("Sigmoid", "Tanh", "Tanh"), None, None),
        ("LSTM", ("Sigmoid", "Tanh", "Relu"), None, None),  # of a state that grows by one each step at most
        ("LSTM", ("Sigmoid", "Relu", "Relu"), None, "Relu"),
        ("LSTM", ("Tanh", "Tanh", "Tanh"), None, "Tanh"),  # coupled gates are between 0 and 2
    ],
)
def test_layers_that_their_activations_do_not_bound(kind: str, activations: Any, clip: Any, by: str | None) -> None:
    n, (y, *_) = layer(kind, *activations, clip=clip)
    found = growing(n.done(y))
    assert bool(found) == (by is not None)
    for reason in found.values():
        assert reason.startswith(f"its activation {by} does not bound its state")


def test_a_plain_layer_is_tried_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It grows with its weights and its steps; a network without a trial run may grow."""
    for scale, steps, grows in ((0.3, 6, False), (2.0, 6, True), (1.0, 60, True), (0.3, 60, False)):
        n, (y, _) = layer("RNN", "Relu", scale=scale, steps=steps)
        assert bool(growing(n.done(y))) == grows
    monkeypatch.setattr(overflows, "GROWTH_FLOPS", 10.0)
    n, (y, _) = layer("RNN", "Relu")
    assert growing(n.done(y))


def test_a_layer_of_unknown_length_is_not_tried() -> None:
    n, (y, _) = layer("RNN", "Relu", steps=symbol("steps"))  # type: ignore[arg-type]
    assert growing(n.done(y))


def test_readers_of_a_growing_layer_stay_fp32_until_it_is_bounded() -> None:
    n, (y, _) = layer("RNN", "Relu", scale=2.0)
    scaled = n.op("Mul", y, 0.5, name="scaled")
    graph = n.done(n.op("Exp", n.op("Tanh", scaled, name="bounded"), name="behind"))
    kinds = {graph.op(i).kind for i in growing(graph)}
    assert kinds == {"RNN", "Mul", "Tanh"}
    found = refused(graph.copy())
    assert "which may grow beyond 65504" in found["layer"]
    assert found["scaled"] == "it reads RNN layer, whose state may grow beyond 65504"
    assert "behind" not in found
    pinned = PrecisionPlan("fp16", {"layer": "fp16"}, base="fp16")
    assert "layer" not in refused(graph.copy(), pinned), "what is asked for by name is done"


def powers(scale: float = 1.0) -> Graph:
    """``LayerNorm((300 x)^2)``: beyond 65504 for about every x, and small again."""
    n = Net()
    x = n.op("Relu", n.input(3, 4, 64), name="first")
    big = n.op("Mul", x, n.const(np.full(64, 300.0 * scale)), name="scaled")
    square = n.op("Mul", big, big, name="square")
    return n.done(n.op("LayerNormalization", square, n.random(64), n.random(64), attrs=LayerNormAttrs(), name="norm"))


def test_values_beyond_fp16_stay_fp32() -> None:
    graph = powers()
    found = refused(graph.copy())
    assert found.keys() == {"square", "norm"}
    assert "its result reaches" in found["square"]
    assert "its operand 'square' reaches" in found["norm"]
    assert "for generated inputs, fp16 ends at 65504" in found["norm"]
    feeds = feeds_of(graph)
    (want,), (got,) = evaluate(graph, feeds).values(), simulate(lowered(graph, "fp16"), feeds).values()
    np.testing.assert_allclose(got, want, atol=0.02 * np.abs(want).max())
    assert refused(powers(0.01)) == {}


def data(**largest: float) -> Calibration:
    """Calibration data on which values have these magnitudes, and others small ones."""
    return Calibration("minmax", {}, {name: Range(-size, 1.0) for name, size in largest.items()})


def test_values_of_calibration_data_beyond_fp16() -> None:
    """They count instead of generated inputs, from half of the limit on, and only where the graph has such a value."""

    def kept(plan: PrecisionPlan, precision: str = "fp16", **largest: float) -> dict[str, str]:
        log = PrecisionLog()
        found: list[Graph] = []

        def calibrated(graph: Graph) -> Calibration:
            found.append(graph)
            return data(**largest)

        context = PassContext("cuda:sm_90a", precision, plan, calibrated, precision_log=log)
        AssignPrecision()(powers(), context)
        assert len(found) == ("fp16" in plan.floats)
        assert log.tried is (True if found and largest else False if found else None)
        assert [r.key for r in log.risks if "reaches" in r.what] == list(plan.nodes), (
            "a risk that was asked for by name"
        )
        return log.refused

    plan = PrecisionPlan("fp16", base="fp16")
    found = kept(plan, square=33000.0, gone=1e9)
    assert found.keys() == {"square", "norm"}
    assert found["square"] == "its result reaches 3.3e+04 on the calibration data, fp16 ends at 65504"
    assert kept(plan, square=32000.0) == {}
    assert kept(plan) == {}
    assert kept(PrecisionPlan("bf16", base="bf16"), "bf16", square=1e9) == {}
    assert "square" not in kept(PrecisionPlan("fp16", {"square": "fp16"}, base="fp16"), square=1e9)


def test_huge_weights_are_no_mask() -> None:
    n = Net()
    rng = np.random.default_rng(0)
    up, down = (n.const(rng.standard_normal((32, 32)) * size) for size in (1e5, 1e-6))
    graph = n.done(n.op("MatMul", n.op("MatMul", n.input(4, 32), up, name="up"), down, name="down"))
    assert refused(graph).keys() == {"up", "down"}


@pytest.mark.parametrize("slot", [1, 2])
@pytest.mark.parametrize("kind", ["GRU", "LSTM", "RNN"])
def test_huge_weights_of_recurrent_layers_are_no_mask(kind: str, slot: int) -> None:
    graph = recurrent(kind, hidden=8, inputs=16)
    (op,) = graph.of_kind(kind)
    (weights,) = [v for v in op.inputs[slot : slot + 1] if v is not None]
    large = np.asarray(graph.constant_value(weights)) * 1e6
    graph.set_op(replace(graph.op(weights), attrs=ConstantAttrs(large)))
    assert list(overflows.overflows(graph, largest_values(graph) or {})) == [op.id]


@pytest.mark.parametrize(("high", "kept"), [(1.0, set()), (1e6, {"enlarged", "product"}), (1e12, set())])
def test_constants_that_enlarge_data_are_no_mask(high: float, kept: set[str]) -> None:
    """The fill of a mask is negative or huge. Data show values of both signs."""
    n = Net()
    enlarged = n.op("Add", n.input(4, 32), n.const(np.full(32, 1e6)), name="enlarged")
    graph = n.done(n.op("MatMul", enlarged, n.random(32, 32), name="product"))
    found = overflows.overflows(graph, {}, {enlarged: Range(-1e6, high)})
    assert {graph.op(i).name for i in found} == kept


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("factor", "kept"), [(1e6, True), (1e9, False)])
def test_a_factor_is_no_mask_unless_it_is_huge(factor: float, kept: bool, fused: bool) -> None:
    """Also where it is in the epilogue of a product: a reader would get 65504 in the place of the result."""
    n = Net()
    product = n.op("MatMul", n.input(4, 32), n.input(32, 16, name="y"), name="product")
    graph = n.done(n.op("Softplus", n.op("Mul", product, n.const(factor))))
    if fused:
        FuseEpilogue()(graph, PassContext("cuda:sm_90a", "fp16"))
        assert set(graph.kinds()) == {"MatMul"}
    found = overflows.overflows(graph, largest_values(graph) or {})
    assert bool(found) == kept


@pytest.mark.parametrize("fill", [-1e9, -np.inf, -3.4e38])
def test_the_fill_of_a_mask_is_no_reason(fill: float) -> None:
    n = Net()
    x, mask = n.input(2, 8), n.input(2, 8, name="mask", dtype=np.bool_)
    masked = n.op("Add", x, n.op("Where", mask, 0.0, n.const(fill)))
    assert refused(n.done(n.op("Softmax", masked))) == {}


def test_operations_of_products_count_less(monkeypatch: pytest.MonkeyPatch) -> None:
    def spectrum() -> Graph:
        n = Net()
        large = n.op("MatMul", n.input(1, 16, 256), n.const(np.full((256, 256), 1e4)), name="large")
        return n.done(n.op("Mul", large, n.const(1e-4), name="small"))

    monkeypatch.setattr(trial, "TRIAL_FLOPS", 2 * 16 * 256 * 256 / 2)
    assert refused(spectrum()).keys() == {"large", "small"}
    monkeypatch.setattr(trial, "PRODUCT_FLOPS", 1.0)
    assert refused(spectrum()) == {}


def batch(*, second: int | None = None, sizes: tuple[int, ...] = (8, 32)) -> Graph:
    """A batch of 8, squared, with a Reshape that names the batch; ``second``: the rows of another input."""
    n = Net()
    x = n.op("Reshape", n.input(8, 4, 8), n.const(np.array(sizes), np.int64))
    weights = n.const(np.full((sizes[-1], 32), 1e3))
    large = n.op("Mul", n.op("MatMul", x, weights, name="product"), 1e3, name="large")
    if second is not None:
        large = n.op("Add", large, n.input(second, 32, name="y"), name="sum")
    return n.done(n.op("Mul", large, 1e-6))


def test_a_batch_that_is_too_much_work_is_tried_by_its_first_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = refused(batch()).keys()
    assert "large" in expected
    work = 2 * 8 * 32 * 32 / trial.PRODUCT_FLOPS
    monkeypatch.setattr(trial, "TRIAL_FLOPS", work / 3)
    whole = batch()
    assert refused(whole).keys() == expected
    assert whole.type(whole.op(whole.inputs[0]).value).dims == (8, 4, 8), "the network keeps its types"
    monkeypatch.setattr(trial, "TRIAL_FLOPS", work / 20)
    assert largest_values(batch()) is None, "one row is too much, too"


def test_rows_that_cannot_be_run_alone_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    mixed, turned = batch(second=1), batch(sizes=(4, 64))
    assert largest_values(mixed) is not None
    monkeypatch.setattr(trial, "TRIAL_FLOPS", 2 * 8 * 32 * 32 / trial.PRODUCT_FLOPS)
    assert largest_values(mixed) is None, "inputs of 8 rows and of 1"
    assert largest_values(turned) is None, "one row of the batch has 32 numbers, its Reshape wants 4 x 64"


def test_rows_that_a_network_does_not_read_show_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last rows of a batch, of which the first ones are run, have no elements."""

    def last_rows() -> Graph:
        n = Net()
        product = n.op("MatMul", n.input(8, 32), n.const(np.full((32, 32), 1e2)))
        rows = n.op("Mul", n.sliced(n.op("Exp", n.op("Mul", product, 1e-3)), 6, 8, 0), 1e6)
        return n.done(n.op("Mul", rows, 1e-6))

    assert largest_values(last_rows()) is not None
    monkeypatch.setattr(trial, "_share", lambda *_: 0.5)
    assert largest_values(last_rows()) is None


def test_values_with_a_proven_bound_are_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is what they are computed from, unless another value needs it."""

    def known(*outputs: str) -> Mapping[Value, float] | None:
        n = Net()
        x = n.input(4, 32)
        norm = n.op("LayerNormalization", x, n.const(np.ones(32)), attrs=LayerNormAttrs(), name="norm")
        made = {"product": n.op("MatMul", norm, n.random(32, 8)), "exp": n.op("Exp", norm)}
        return largest_values(n.done(*(made[name] for name in outputs)))

    assert known("product", "exp") is not None
    monkeypatch.setattr(trial, "TRIAL_FLOPS", 1.0)
    assert known("product", "exp") is None
    assert (found := known("product")) is not None
    assert max(found.values()) < 1e3


def test_generated_inputs_have_a_margin() -> None:
    def reaches(size: float) -> Graph:
        n = Net()
        x = n.op("Mul", n.op("Tanh", n.op("Mul", n.input(4, 64), 100.0)), size, name="large")
        return n.done(n.op("Mul", x, 1e-4, name="small"))

    assert refused(reaches(33000.0)).keys() == {"large", "small"}
    assert refused(reaches(32000.0)) == {}


def test_networks_that_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    assert largest_values(powers()) is not None
    monkeypatch.setattr(trial, "TRIAL_FLOPS", 10.0)
    assert largest_values(powers()) is None
    log = PrecisionLog()
    AssignPrecision()(powers(), PassContext(target="cuda:sm_90a", precision="fp16", precision_log=log))
    assert log.tried is False
    assert log.refused == {}
    monkeypatch.undo()
    monkeypatch.setattr(trial, "TRIAL_ELEMENTS", 10.0)
    assert largest_values(powers()) is None
    monkeypatch.undo()
    n = Net()
    assert largest_values(n.done(n.op("Relu", n.input(symbol("n"), 4)))) is None, "its sizes are not known"
    n = Net()
    index = n.input(2, name="index", dtype=np.int64)
    graph = n.done(n.op("Exp", n.op("Gather", n.input(1, 4), index)))  # 1 is out of range
    assert largest_values(graph) is None, "made-up inputs are not valid"


def test_the_log_records_whether_overflows_were_tried() -> None:
    log = PrecisionLog()
    AssignPrecision()(powers(), PassContext(target="cuda:sm_90a", precision="fp16", precision_log=log))
    assert log.tried is True
    log = PrecisionLog()
    AssignPrecision()(powers(), PassContext(target="cuda:sm_90a", precision="bf16", precision_log=log))
    assert log.tried is None
