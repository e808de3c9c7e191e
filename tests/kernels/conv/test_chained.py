"""Two 1x1 convolutions in one launch: where it is used, refusals with their reasons, results, and the choice."""

from __future__ import annotations

from typing import Any

import pytest
from support.net import Build, Net, built
from support.simulated import OTHER_MACHINES_AND_TYPES, check_not_taken, check_simulated, kinds, lowered, refusals

from optdnn.ir.graph import Value
from optdnn.kernels.conv import chained
from optdnn.ops.index import ConcatAttrs


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the cost model choose one launch everywhere."""
    monkeypatch.setattr(chained, "_slower", lambda problem, gpu: None)


def inside(n: Net, channels: int, *, images: int = 2, size: tuple[int, int] = (9, 7), name: str = "x") -> Value:
    """A channels-last value of another kernel."""
    return n.op("Relu", n.conv(n.input(images, 8, *size, name=name), channels, 3, bias=True))


def mixed(n: Net, x: Value, channels: int, activation: str = "Relu", **more: Any) -> Value:
    y = n.conv(x, channels, 1, pads=0, bias=True, **more)
    return n.op(activation, y) if activation else y


def bottleneck(n: Net, x: Value, wide: int, narrow: int) -> Value:
    """ResNet's bottleneck block."""
    y = n.op("Relu", n.conv(mixed(n, x, narrow), narrow, 3, pads=1, bias=True))
    return n.op("Relu", n.op("Add", mixed(n, y, wide, ""), x))


def bottlenecks(n: Net, count: int = 3, wide: int = 64, narrow: int = 16, **more: Any) -> list[Value]:
    x = inside(n, wide, **more)
    for _ in range(count):
        x = bottleneck(n, x, wide, narrow)
    return [n.conv(x, 8, 3)]


def perceptron(n: Net, x: Value, hidden: int = 96, out: int = 24) -> Value:
    return mixed(n, mixed(n, x, hidden, "Gelu"), out, "")


def perceptrons(n: Net) -> list[Value]:
    x = inside(n, 24)
    y = n.op("Add", perceptron(n, x), x)
    return [n.conv(n.op("Add", perceptron(n, y), y), 8, 3)]


def with_output(n: Net) -> list[Value]:
    """The wide result is also an output."""
    y = mixed(n, inside(n, 32), 64)
    return [n.conv(mixed(n, y, 16), 8, 3), y]


def joined(n: Net) -> list[Value]:
    """The wide result is a part of a larger tensor."""
    y = mixed(n, inside(n, 32), 64)
    return [n.conv(n.op("Concat", y, mixed(n, y, 16), attrs=ConcatAttrs(1)), 8, 3)]


NETS: dict[str, tuple[Build, dict[str, int]]] = {
    "bottlenecks": (bottlenecks, {"ChainedConv": 2}),
    "one image": (lambda n: bottlenecks(n, 2, 128, 32, images=1), {"ChainedConv": 1}),
    "perceptrons": (perceptrons, {"SeparableConv": 2}),
    "an output": (with_output, {"ChainedConv": 1}),
    "in one buffer": (joined, {"ChainedConv": 1}),
    "no bias": (
        lambda n: [n.conv(n.conv(n.conv(inside(n, 32), 64, 1, pads=0), 16, 1, pads=0), 8, 3)],
        {"SeparableConv": 1},
    ),
}


@pytest.mark.parametrize("name", NETS)
@pytest.mark.usefixtures("chosen")
def test_one_launch_gives_the_results_of_two(name: str) -> None:
    build, counts = NETS[name]
    program = check_simulated(built(build))
    found = kinds(program)
    assert {kind: found.count(kind) for kind in ("ChainedConv", "SeparableConv") if kind in found} == counts
    for step in program.steps:
        if step.params["op"]["kind"] in counts:
            assert sum(node.startswith("Conv") for node in step.src) == 2, "both convolutions are named"
    rows: Any = program.meta["tactics"]
    for row in rows:
        if row["tactic"] == "chained_sm90":
            assert sum(node.startswith("Conv") for node in row["with"]) == 1


@pytest.mark.usefixtures("chosen")
def test_in_bf16() -> None:
    assert "ChainedConv" in kinds(check_simulated(built(bottlenecks), "bf16"))


def strided(n: Net) -> list[Value]:
    return [n.conv(mixed(n, mixed(n, inside(n, 32), 64), 16, strides=2), 8, 3)]


def shortcut(n: Net) -> list[Value]:
    """The residual is a convolution, which the first one's launch sums."""
    x = inside(n, 32)
    y = n.op("Relu", n.op("Add", mixed(n, n.op("Relu", n.conv(x, 16, 3, pads=1)), 64, ""), mixed(n, x, 64, "")))
    return [n.conv(mixed(n, y, 16), 8, 3)]


def later(n: Net) -> list[Value]:
    """The second convolution adds the first one's result."""
    y = mixed(n, inside(n, 32), 64)
    return [n.conv(n.op("Add", mixed(n, y, 64, ""), y), 8, 3)]


def widening(n: Net) -> list[Value]:
    return [n.conv(mixed(n, mixed(n, inside(n, 32), 16), 64), 8, 3)]


def many(n: Net) -> list[Value]:
    return [n.conv(mixed(n, mixed(n, inside(n, 32), 320), 264), 8, 3)]


def odd(n: Net) -> list[Value]:
    return [n.conv(mixed(n, mixed(n, inside(n, 32), 60), 16), 8, 3)]


REFUSED: dict[str, tuple[Build, str]] = {
    "no 1x1 after it": (lambda n: [n.conv(mixed(n, inside(n, 32), 64), 8, 3)], "exactly one other such operator"),
    "a stride after it": (strided, "exactly one other such operator"),
    "a shortcut's convolution": (shortcut, "is a part of its launch"),
    "added later": (later, "adds is computed later"),
    "widening": (widening, "little is saved"),
    "many channels": (many, "264 channels of the result exceed 256"),
    "odd channels": (odd, "multiple of 8"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.usefixtures("chosen")
def test_refused_with_its_reason(name: str) -> None:
    build, reason = REFUSED[name]
    check_not_taken(built(build), "chained_sm90", reason, "ChainedConv")


@pytest.mark.parametrize(("options", "reason"), OTHER_MACHINES_AND_TYPES)
@pytest.mark.usefixtures("chosen")
def test_other_machines_and_types_are_refused(options: dict[str, Any], reason: str) -> None:
    check_not_taken(built(bottlenecks), "chained_sm90", reason, "ChainedConv", **options)


@pytest.mark.parametrize("faster", [False, True])
def test_the_cost_model_decides(faster: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chained, "FEWEST", 1)
    monkeypatch.setattr(chained, "_apart", lambda problem, gpu: 1.0 if faster else 1e-9)
    program = lowered(built(bottlenecks))
    assert ("ChainedConv" in kinds(program)) == faster
    assert faster or any("two launches are predicted" in r for r in refusals(program, "chained_sm90"))


@pytest.mark.slow
def test_rows_that_depend_on_no_batch_are_made_alike_at_all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: set[int] = set()

    def apart(problem: Any, gpu: Any) -> float:
        asked.add(problem.batch)
        return 1.0

    monkeypatch.setattr(chained, "FEWEST", 1)
    monkeypatch.setattr(chained, "_apart", apart)
    for images in (1, 3):
        program = lowered(built(lambda n, images=images: bottlenecks(n, images=images)), row_invariant=True)
        assert "ChainedConv" in kinds(program)
    assert asked == {chained.MANY}


def test_few_pixels_take_two_launches() -> None:
    program = lowered(built(bottlenecks))
    assert "ChainedConv" not in kinds(program)
    assert any(
        "pixels or rows, one launch takes as long as two (4096 are needed)" in r
        for r in refusals(program, "chained_sm90")
    )
