"""Times of operators: how operators share launches, and the roofline of a GPU."""

from __future__ import annotations

import pytest
from support.net import Net

from optdnn.passes.support.precision import key
from optdnn.precision.latency import Roofline, by_operator, work_of_ops
from optdnn.runtime.cuda.gpu_facts import named


def test_operators_share_a_launch_by_their_work() -> None:
    owners = {"conv": "a", "pool": "b", "relu": "c", "second": "a"}
    launches = [
        (("conv", "relu", "pool"), 8.0),
        (("second",), 1.0),
        (("relu", "elsewhere"), 2.0),
        (("elsewhere",), 5.0),
    ]
    found = by_operator(launches, owners, {"a": 3.0, "b": 1.0})
    assert found == {"a": 7.0, "b": 2.0, "c": 2.0}, "a Relu has no work, but a launch of its own"
    assert by_operator([(("relu", "tanh"), 3.0)], {"relu": "c", "tanh": "d"}, {}) == {"c": 1.5, "d": 1.5}


def test_work_is_arithmetic_or_traffic() -> None:
    n = Net()
    x = n.input(8, 256, 32, 32)
    graph = n.done(n.op("Relu", n.conv(x, 256)))
    (conv,) = graph.of_kind("Conv")
    gpu = named("h200")
    found = work_of_ops(graph, gpu)
    assert set(found) == {key(conv)}
    assert found[key(conv)] == pytest.approx(2 * 8 * 256 * 256 * 9 * 32 * 32 / Roofline.of(gpu).ops["fp16"], rel=0.02)


def test_a_roofline_is_half_of_the_peak_rates() -> None:
    ops = Roofline.of(named("a100")).ops
    assert {name: round(rate / 1e6) for name, rate in ops.items()} == {
        "fp32": 10, "tf32": 78, "fp16": 156, "bf16": 156, "int8": 312,
    }  # fmt: skip
