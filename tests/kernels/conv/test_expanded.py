"""A 1x1 convolution and the depthwise one after it in one launch: where it is used, refusals with their reasons, results, and
the choice."""

from __future__ import annotations

from typing import Any

import pytest
from support.conv_cases import excited
from support.net import Build, Net, built
from support.simulated import OTHER_MACHINES_AND_TYPES, check_not_taken, check_simulated, kinds, lowered, refusals
from support.tuned import tuned_by

from optdnn.config import BuildOptions
from optdnn.ir.graph import Value
from optdnn.kernels.conv import expanded, separable
from optdnn.lowering.cuda import Prepared, lower_cuda
from optdnn.optimize import optimize
from optdnn.runtime.cuda.gpu_facts import of_arch
from optdnn.runtime.program import Program


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the cost model choose one launch everywhere."""
    monkeypatch.setattr(expanded, "GAIN", 1e9)
    monkeypatch.setattr(expanded, "LEAST", 0.0)


def block(n: Net, x: Value, channels: int, *, activation: str = "Relu", **conv: Any) -> Value:
    """The first half of MobileNetV2's block."""
    y = n.op(activation, n.conv(x, channels, 1, pads=0, bias=conv.get("bias", True)))
    given = {"kernel": 3, "pads": 1, "bias": True, **conv}
    return n.op(activation, n.conv(y, channels, group=channels, **given))


def plain(
    n: Net, images: int = 2, depth: int = 16, channels: int = 32, size: tuple[int, int] = (9, 7), **more: Any
) -> list[Value]:
    x = n.op("Relu", n.conv(n.input(images, 8, *size), depth, 3, bias=True))
    return [n.conv(block(n, x, channels, **more), 24, 3)]


def squeezed(n: Net, images: int = 2, size: tuple[int, int] = (9, 7)) -> list[Value]:
    x = n.op("Relu", n.conv(n.input(images, 8, *size), 16, 3, bias=True))
    y = n.op("Swish", n.conv(x, 32, 1, pads=0, bias=True))
    return [n.conv(excited(n, y, 32), 16, 1, pads=0)]


NETS: dict[str, Build] = {
    "3x3": plain,
    "one image": lambda n: plain(n, 1),
    "half a step": lambda n: plain(n, depth=24),
    "channels that fill no block": lambda n: plain(n, channels=40),
    "stride 2": lambda n: plain(n, size=(15, 12), strides=2),
    "asymmetric": lambda n: plain(n, pads=[0, 1, 2, 0], strides=2),
    "5x5, swish": lambda n: plain(n, kernel=5, pads=2, activation="Swish"),
    "dilated": lambda n: plain(n, pads=2, dilations=2),
    "no bias": lambda n: plain(n, bias=False),
}


def made(program: Program) -> list[Any]:
    return [s for s in program.steps if s.params["tactic"].startswith("expanded_sm90")]


@pytest.mark.parametrize("name", NETS)
@pytest.mark.usefixtures("chosen")
def test_one_launch_gives_the_results_of_two(name: str) -> None:
    program = check_simulated(built(NETS[name]))
    (step,) = made(program)
    assert step.params["op"]["kind"] == "SeparableConv"
    assert sum(node.startswith("Conv") for node in step.src) == 2, "both convolutions are named"
    rows: Any = program.meta["tactics"]
    (dropped,) = [row for row in rows if row.get("dropped") and row["kind"] == "Conv"]
    (one,) = [row for row in rows if row["tactic"] == "expanded_sm90"]
    assert set(dropped["nodes"]) <= set(one["with"])


@pytest.mark.usefixtures("chosen")
def test_in_bf16() -> None:
    assert made(check_simulated(built(plain), "bf16"))


@pytest.mark.parametrize(("size", "images"), [((7, 7), 2), ((40, 36), 1)])
@pytest.mark.usefixtures("chosen")
def test_means_are_part_of_it(size: tuple[int, int], images: int) -> None:
    program = check_simulated(built(lambda n: squeezed(n, images, size)), tolerance=1e-2)
    (step,) = made(program)
    assert step.params["op"]["kind"] == "ConvSqueeze"
    assert "GlobalAveragePool" not in kinds(program)
    assert any("GlobalAveragePool" in name for name in step.src)
    assert ("ExcitationGate" in kinds(program)) == (size[0] > 30), "the gate adds up sums of tiles"


def two_readers(n: Net) -> list[Value]:
    y = n.op("Relu", n.conv(n.conv(n.input(2, 8, 9, 7), 16, 3), 32, 1, pads=0))
    return [n.conv(n.conv(y, 32, group=32), 24, 3), n.conv(y, 8, 3)]


def added(n: Net) -> list[Value]:
    x = n.op("Relu", n.conv(n.input(2, 8, 9, 7), 32, 3))
    y = n.conv(n.op("Relu", n.conv(x, 32, 1, pads=0)), 32, group=32)
    return [n.conv(n.op("Add", y, x), 24, 3)]


def added_between(n: Net) -> list[Value]:
    x = n.op("Relu", n.conv(n.input(2, 8, 9, 7), 32, 3))
    y = n.op("Relu", n.op("Add", n.conv(x, 32, 1, pads=0), x))
    return [n.conv(n.conv(y, 32, group=32), 24, 3)]


REFUSED: dict[str, tuple[Build, str]] = {
    "another reader": (two_readers, "has another reader"),
    "an addition": (added, "more than an activation"),
    "an addition between": (added_between, "more than an activation"),
    "many taps": (lambda n: plain(n, kernel=7, pads=3), "49 taps exceed 25"),
    "a stride and holes": (lambda n: plain(n, pads=2, dilations=2, strides=2), "a stride and a dilation"),
    "a wide stride": (lambda n: plain(n, depth=320, kernel=5, pads=2, strides=4), "no tile of the kernel fits it"),
    "an odd depth": (lambda n: plain(n, depth=12), "not a multiple of 8"),
    "a wide image": (lambda n: plain(n, depth=328), "more than 320"),
    "no depthwise convolution": (
        lambda n: [n.conv(n.conv(n.input(2, 8, 9, 7), 16, 1, pads=0), 8, 3)],
        "not a depthwise",
    ),
    "no 1x1 convolution": (
        lambda n: [n.conv(n.conv(n.input(2, 8, 9, 7), 16, 3), 16, group=16)],
        "not the result of a 1x1",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.usefixtures("chosen")
def test_refused_with_its_reason(name: str) -> None:
    build, reason = REFUSED[name]
    check_not_taken(built(build), "expanded_sm90", reason)


@pytest.mark.parametrize(("options", "reason"), OTHER_MACHINES_AND_TYPES)
@pytest.mark.usefixtures("chosen")
def test_other_machines_and_types_are_refused(options: dict[str, Any], reason: str) -> None:
    check_not_taken(built(plain), "expanded_sm90", reason, **options)


@pytest.mark.parametrize("build", [plain, squeezed])
@pytest.mark.parametrize("faster", [False, True])
@pytest.mark.parametrize("invariant", [False, True])
def test_unmeasured_the_cost_model_decides(
    faster: bool, build: Build, invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expanded, "_apart", lambda problem, gpu: (1.0, 1.0) if faster else (1e-9, 1e-9))
    monkeypatch.setattr(expanded, "LEAST", 0.0)
    program = lowered(built(build), row_invariant=invariant)
    assert bool(made(program)) == faster
    assert faster or any("other launches are predicted" in r for r in refusals(program, "expanded_sm90"))


def test_short_launches_are_for_tuning() -> None:
    assert any(
        "other launches are predicted to take only" in r for r in refusals(lowered(built(plain)), "expanded_sm90")
    )


@pytest.mark.parametrize(("each", "reported"), [(29e-6, 58.0), (31e-6, 62.0 * expanded.LONGER)])
def test_long_launches_take_longer_than_predicted(
    each: float, reported: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expanded, "_apart", lambda problem, gpu: (each, each))
    monkeypatch.setattr(expanded, "GAIN", 0.0)
    assert any(f"({reported:.2f} us" in reason for reason in refusals(lowered(built(plain)), "expanded_sm90"))


def test_a_launch_with_the_convolution_after_it_competes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(separable, "_slower", lambda problem, gpu, invariant=False: None)
    monkeypatch.setattr(expanded, "_apart", lambda problem, gpu: (1.0, 1.0))
    for saved, taken in ((0.0, True), (2.0, False)):
        monkeypatch.setattr(separable, "saved", lambda b, op, saved=saved: saved)
        n = Net()
        x = n.op("Relu", n.conv(n.input(2, 8, 9, 7), 16, 3, bias=True))
        program = check_simulated(n.done(n.conv(n.conv(block(n, x, 48), 16, 1, pads=0), 8, 3)))
        assert bool(made(program)) == taken
        assert kinds(program).count("SeparableConv") == 1, "one of the two, not both"


# ---------------------------------------------------------------- tuning


@pytest.mark.nvrtc
@pytest.mark.parametrize("build", [plain, squeezed])
@pytest.mark.parametrize(("one", "taken"), [(3.5e-6, True), (4.5e-6, False)])
def test_the_tuner_counts_the_launch_that_is_dropped(one: float, taken: bool, build: Build) -> None:
    """Two launches take 2 us each. One launch of 3.5 us is slower than the depthwise one alone, but better than both."""

    def seconds(name: str) -> float:
        return one if name.startswith("expanded") else 2e-6

    _, timed, tactics = tuned_by(seconds, built(build))
    assert "expanded_sm90" in timed
    assert ("expanded_sm90" in tactics) == taken


@pytest.mark.nvrtc
def test_choices_that_exclude_one_another_leave_a_program() -> None:
    """Measured separately, the depthwise convolution is fastest together with the one before it, and the 1x1 convolution after
    it together with the depthwise one. The choice that is planned first stays."""

    def whole(n: Net) -> list[Value]:
        x = n.op("Relu", n.conv(n.input(2, 8, 14, 14), 16, 3, bias=True))
        return [n.conv(n.conv(block(n, x, 96), 16, 1, pads=0), 8, 3)]

    def seconds(name: str) -> float:
        return 1e-6 if name.startswith(("expanded", "separable")) else 4e-6

    found, _, tactics = tuned_by(seconds, built(whole))
    assert "expanded_sm90" in tactics
    options = BuildOptions(target="cuda:sm_90a", precision="fp16", tactics="own")
    graph = built(whole)
    optimize(graph, options, "cuda:sm_90a")
    both = {**found.choices}
    for problem in found.problems:
        both |= dict.fromkeys(
            [problem.key], next((c for c in problem.times if c.tactic == "separable_sm90"), problem.best)
        )
    assert {"separable_sm90", "expanded_sm90"} <= {c.tactic for c in both.values()}
    program = lower_cuda(graph, options, of_arch("sm_90a"), {}, prepared=Prepared(choices=both))
    assert kinds(program).count("SeparableConv") == 1
    assert all(step.executor == "cuda" for step in program.steps)
