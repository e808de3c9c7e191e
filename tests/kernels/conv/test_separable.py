"""A depthwise convolution and the 1x1 convolution after it in one launch: where it is used, refusals with their reasons,
results, and the choice."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.net import Build, Net, built
from support.simulated import OTHER_MACHINES_AND_TYPES, check_not_taken, check_simulated, kinds, lowered, refusals
from support.tuned import tuned_by

from optdnn.ir.graph import Value
from optdnn.kernels.conv import separable
from optdnn.kernels.conv.chained import ChainedConv
from optdnn.ops.base import Attrs, Stage
from optdnn.ops.conv import ConvAttrs
from optdnn.ops.index import ConcatAttrs


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the cost model choose one launch everywhere."""
    monkeypatch.setattr(separable, "_slower", lambda problem, gpu, invariant=False: None)


def inside(n: Net, images: int, channels: int, *size: int, name: str = "x") -> Value:
    """A channels-last value of another kernel."""
    return n.op("Relu", n.conv(n.input(images, 8, *size, name=name), channels, 3, bias=True))


def clipped(n: Net, x: Value) -> Value:
    return n.op("Clip", x, n.const(0.0), n.const(6.0))


def pair(n: Net, x: Value, channels: int, out: int, *, activation: str = "Relu", **conv: Any) -> Value:
    """The second half of a MobileNet block."""
    given = {"kernel": 3, "pads": 1, "bias": True, **conv}
    y = n.conv(x, channels, group=channels, **given)
    y = clipped(n, y) if activation == "Clip" else n.op(activation, y)
    return n.conv(y, out, 1, pads=0, bias=True)


def plain(
    n: Net, images: int = 2, channels: int = 32, out: int = 24, size: tuple[int, int] = (9, 7), **more: Any
) -> list[Value]:
    return [n.op("Relu", n.conv(pair(n, inside(n, images, channels, *size), channels, out, **more), 8, 1, pads=0))]


def residual(n: Net) -> list[Value]:
    x = n.conv(n.input(2, 8, 9, 7), 24, 3, bias=True)
    wide = n.op("Relu", n.conv(x, 40, 1, pads=0, bias=True))
    return [n.conv(n.op("Add", pair(n, wide, 40, 24, activation="Clip"), x), 8, 3)]


def joined(n: Net) -> list[Value]:
    """Results of two pairs, concatenated in one buffer."""
    x, z = inside(n, 2, 16, 9, 7), inside(n, 2, 16, 9, 7, name="z")
    return [n.conv(n.op("Concat", pair(n, x, 16, 24), pair(n, z, 16, 40), attrs=ConcatAttrs(1)), 8, 3)]


def relu_before(n: Net) -> list[Value]:
    """The convolutions read the ReLU of a sum, and the sum is added to their result."""
    x = n.conv(n.input(2, 8, 9, 7), 24, 1, pads=0, bias=True)
    y = n.conv(n.conv(n.op("Relu", x), 24, group=24), 24, 1, pads=0, bias=True)
    return [n.conv(n.op("Add", y, x), 8, 3)]


NETS: dict[str, tuple[Build, int]] = {
    "3x3": (plain, 1),
    "one image, clipped": (lambda n: plain(n, 1, 48, activation="Clip"), 1),
    "odd channels": (lambda n: plain(n, 3, 20, 12), 1),
    "stride 2": (lambda n: plain(n, size=(15, 12), strides=2), 1),
    "asymmetric": (lambda n: plain(n, pads=[0, 1, 2, 0], strides=2), 1),
    "5x5, swish": (lambda n: plain(n, kernel=5, pads=2, activation="Swish"), 1),
    "dilated": (lambda n: plain(n, pads=2, dilations=2), 1),
    "no bias": (lambda n: plain(n, bias=False), 1),
    "residual": (residual, 1),
    "a ReLU before": (relu_before, 1),
}


@pytest.mark.parametrize("name", NETS)
@pytest.mark.usefixtures("chosen")
def test_one_launch_gives_the_results_of_two(name: str) -> None:
    build, count = NETS[name]
    program = check_simulated(built(build))
    assert kinds(program).count("SeparableConv") == count
    (step,) = [s for s in program.steps if s.params["op"]["kind"] == "SeparableConv"]
    assert sum(node.startswith("Conv") for node in step.src) == 2, "both convolutions are named"
    groups = [s for s in program.steps if s.params["op"]["attrs"].get("group", 1) not in (1,)]
    assert groups == [], "the depthwise convolution's own launch is dropped"
    rows: Any = program.meta["tactics"]
    (dropped,) = [row for row in rows if row.get("dropped") and row["kind"] == "Conv"]
    (made,) = [row for row in rows if row["tactic"] == "separable_sm90"]
    assert set(dropped["nodes"]) <= set(made["with"])
    assert {*made["nodes"], *made["with"]} == set(step.src)


@pytest.mark.usefixtures("chosen")
def test_in_bf16() -> None:
    assert "SeparableConv" in kinds(check_simulated(built(plain), "bf16"))


def two_readers(n: Net) -> list[Value]:
    x = inside(n, 2, 32, 9, 7)
    y = n.op("Relu", n.conv(x, 32, group=32, bias=True))
    return [n.conv(n.conv(y, 24, 1, pads=0), 8, 3), n.conv(n.op("GlobalAveragePool", y), 8, 1, pads=0)]


def an_output(n: Net) -> list[Value]:
    y = n.op("Relu", n.conv(inside(n, 2, 32, 9, 7), 32, group=32, bias=True))
    return [n.conv(n.conv(y, 24, 1, pads=0), 8, 3), y]


def excited(n: Net) -> list[Value]:
    y = n.op("Swish", n.conv(inside(n, 2, 32, 9, 7), 32, group=32, bias=True))
    s = n.op("Swish", n.conv(n.op("GlobalAveragePool", y), 8, 1, pads=0, bias=True))
    return [n.conv(n.op("Mul", y, n.op("Sigmoid", n.conv(s, 32, 1, pads=0, bias=True))), 16, 1, pads=0)]


def added_before(n: Net) -> list[Value]:
    x, z = inside(n, 2, 32, 9, 7), inside(n, 2, 32, 9, 7, name="z")
    return [n.conv(n.conv(n.op("Relu", n.op("Add", n.conv(x, 32, group=32, bias=True), z)), 24, 1, pads=0), 8, 3)]


def shortcut(n: Net) -> list[Value]:
    """Xception's: the added convolution becomes a part of the last product."""
    x = inside(n, 2, 32, 9, 7)
    return [n.conv(n.op("Add", pair(n, x, 32, 24), n.conv(x, 24, 1, pads=0)), 8, 3)]


def grouped(n: Net) -> list[Value]:
    return [n.conv(n.conv(inside(n, 2, 32, 9, 7), 32, group=4, bias=True), 24, 1, pads=0)]


def mixed_apart(n: Net) -> list[Value]:
    y = n.conv(inside(n, 2, 32, 9, 7), 32, group=32, bias=True)
    return [n.conv(y, 24, 1, pads=0, strides=2)]


REFUSED: dict[str, tuple[Build, str]] = {
    "another reader": (two_readers, "has another reader (GlobalAveragePool"),
    "an output": (an_output, "has another reader"),
    "squeeze-and-excitation": (excited, "stands before"),
    "an addition between": (added_before, "more than an activation"),
    "a shortcut's convolution": (shortcut, "is a part of its launch"),
    "groups": (grouped, "not the result of a depthwise convolution"),
    "a stride after it": (mixed_apart, "not a 1x1 convolution"),
    "many taps": (lambda n: plain(n, kernel=7, pads=3), "49 taps exceed 25"),
    "a stride and holes": (lambda n: plain(n, pads=2, dilations=2, strides=2), "a stride and a dilation"),
    "wide padding": (lambda n: plain(n, pads=256), "no tile of the kernel fits it"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.usefixtures("chosen")
def test_refused_with_its_reason(name: str) -> None:
    build, reason = REFUSED[name]
    check_not_taken(built(build), "separable_sm90", reason, "SeparableConv")


@pytest.mark.parametrize(("options", "reason"), OTHER_MACHINES_AND_TYPES)
@pytest.mark.usefixtures("chosen")
def test_other_machines_and_types_are_refused(options: dict[str, Any], reason: str) -> None:
    check_not_taken(built(plain), "separable_sm90", reason, "SeparableConv", **options)


@pytest.mark.parametrize("faster", [False, True])
def test_unmeasured_the_cost_model_decides(faster: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(separable, "_apart", lambda problem, gpu: 1.0 if faster else 1e-9)
    program = lowered(built(lambda n: plain(n, out=16)))
    assert ("SeparableConv" in kinds(program)) == faster
    assert faster or any("two launches are predicted" in r for r in refusals(program, "separable_sm90"))


@pytest.mark.parametrize("more", [{"kernel": 5, "pads": 2, "out": 16}, {"channels": 512, "out": 168}, {"out": 24}])
def test_configurations_that_were_not_measured_are_for_tuning(
    more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(separable, "_apart", lambda problem, gpu: 1.0)
    program = lowered(built(lambda n: plain(n, **more)))
    assert "SeparableConv" not in kinds(program)
    assert any("only tuning tries" in r for r in refusals(program, "separable_sm90"))


@pytest.mark.slow
def test_rows_that_depend_on_no_batch_are_made_alike_at_all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice between one launch and two is the same for any number of images, and no blocks share K."""
    asked: list[int] = []

    def apart(problem: Any, gpu: Any) -> float:
        asked.append(problem.batch)
        return 1.0

    monkeypatch.setattr(separable, "_apart", apart)
    monkeypatch.setattr(ChainedConv, "refuse", lambda self, b, op: "not tried")
    for images in (1, 3, 40):
        program = lowered(built(lambda n, images=images: plain(n, images, 192, size=(14, 14))), row_invariant=True)
        assert "SeparableConv" in kinds(program)
        (made,) = [s.params["tactic"] for s in program.steps if s.params["op"]["kind"] == "SeparableConv"]
        assert "k1b" in made
    assert set(asked) == {separable.MANY}
    monkeypatch.setattr(separable, "_apart", lambda problem, gpu: 1e-9)
    program = lowered(built(lambda n: plain(n, out=16)), row_invariant=True)
    assert "SeparableConv" not in kinds(program)
    assert any("two launches are predicted" in r for r in refusals(program, "separable_sm90"))


@pytest.mark.usefixtures("chosen")
def test_results_lie_in_a_joint_buffer_where_they_may() -> None:
    program = check_simulated(built(joined))
    assert kinds(program).count("SeparableConv") == 2
    assert "Concat" not in kinds(program)


# ---------------------------------------------------------------- tuning


@pytest.mark.nvrtc
@pytest.mark.parametrize(("one", "taken"), [(3.5e-6, True), (4.5e-6, False)])
def test_the_tuner_counts_the_launch_that_is_dropped(one: float, taken: bool) -> None:
    """Two launches take 2 us each. One launch of 3.5 us is slower than the 1x1 alone, but better than both."""

    def seconds(name: str) -> float:
        return one if name.startswith("separable") else 2e-6

    found, timed, tactics = tuned_by(seconds, built(lambda n: plain(n, 1, 96, size=(14, 14))))
    assert "separable_sm90" in timed
    assert ("separable_sm90" in tactics) == taken
    (problem,) = [p for p in found.problems if p.covered]
    (covered,) = problem.covered.values()
    assert covered.op.attrs.group == 96
    best = problem.best
    assert problem.saved_seconds(best) == pytest.approx(2e-6 if taken else 0.0)
    assert problem.seconds == pytest.approx(1.5e-6 if taken else 2e-6)
    assert problem.weight == pytest.approx(problem.seconds + 2e-6)
    assert np.isfinite(found.after_ms or np.nan)


def test_a_convolution_that_is_added_keeps_its_depthwise_one(chosen: None) -> None:
    """The launch that sums two convolutions must not read a value that only the launch of both parts computes."""
    n = Net()
    x, other = inside(n, 1, 108, 12, 12), inside(n, 1, 108, 24, 24, name="other")
    added = n.conv(n.conv(x, 108, 3, pads=1, group=108), 108, 1, pads=0)
    attrs = ConvAttrs((2, 2), (0, 0, 0, 0), (1, 1), epilogue=(Stage("Add", (-1, 3), Attrs()),))
    y = n.op("Conv", other, n.random(108, 108, 1, 1, scale=0.1), None, added, attrs=attrs)
    program = check_simulated(n.done(n.op("Relu", y)), "fp16")
    assert "SeparableConv" in kinds(program)
    assert "ConvSum" not in kinds(program)
