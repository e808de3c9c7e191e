"""Perceptrons with one hidden layer in one launch: where it is used, refusals with their reasons, and results."""

from __future__ import annotations

import pytest
from support.net import Build, Net, built
from support.simulated import check_not_taken, check_simulated, kinds

from optdnn.ir.graph import Value
from optdnn.kernels.conv import chained
from optdnn.ops.norm import LayerNormAttrs


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the cost model choose one launch everywhere."""
    monkeypatch.setattr(chained, "_slower", lambda problem, gpu: None)


def linear(n: Net, x: Value, depth: int, columns: int) -> Value:
    y = n.op("MatMul", x, n.random(depth, columns, scale=depth**-0.5))
    return n.op("Add", y, n.random(columns))


def perceptron(n: Net, x: Value, width: int, hidden: int, out: int | None = None) -> Value:
    return linear(n, n.op("Gelu", linear(n, x, width, hidden)), hidden, out or width)


def normalized(n: Net, x: Value, width: int) -> Value:
    return n.op("LayerNormalization", x, n.random(width), n.random(width), attrs=LayerNormAttrs(-1, 1e-5))


def tokens(n: Net, width: int = 48) -> Value:
    return n.op("Relu", n.input(2, 9, width))


def plain(n: Net) -> list[Value]:
    return [n.op("Softmax", perceptron(n, tokens(n), 48, 96))]


def with_residual(n: Net) -> list[Value]:
    """A separate launch normalizes the rows, since no product computes them."""
    x = tokens(n)
    return [n.op("Add", perceptron(n, normalized(n, x, 48), 48, 192), x)]


def hidden_output(n: Net) -> list[Value]:
    y = n.op("Gelu", linear(n, tokens(n), 48, 96))
    return [n.op("Softmax", linear(n, y, 96, 48)), y]


NETS: dict[str, tuple[Build, str]] = {
    "plain": (plain, "SeparableConv"),
    "a norm before, a residual after": (with_residual, "SeparableConv"),
    "the hidden layer is an output": (hidden_output, "ChainedConv"),
}


@pytest.mark.parametrize("name", NETS)
@pytest.mark.usefixtures("chosen")
def test_one_launch_gives_the_results_of_two(name: str) -> None:
    build, kind = NETS[name]
    program = check_simulated(built(build))
    assert kinds(program).count(kind) == 1
    assert not {"MatMul", "Gemm", "Conv"} & set(kinds(program))
    (step,) = [s for s in program.steps if s.params["op"]["kind"] == kind]
    assert sum(node.startswith("MatMul") for node in step.src) == 2, "both products are named"


def norm_with_moments(n: Net) -> list[Value]:
    """A product computes the rows and their moments."""
    x = n.op("Add", linear(n, tokens(n, 128), 128, 128), tokens(n, 128))
    return [n.op("Add", perceptron(n, normalized(n, x, 128), 128, 192), x)]


def gated(n: Net) -> list[Value]:
    x = tokens(n)
    y = n.op("Mul", n.op("Gelu", linear(n, x, 48, 96)), linear(n, x, 48, 96))
    return [n.op("Softmax", linear(n, y, 96, 48))]


def computed(n: Net) -> list[Value]:
    """The second factor is no constant."""
    x = tokens(n)
    return [n.op("MatMul", linear(n, x, 48, 96), n.op("Relu", n.input(2, 96, 48, name="w")))]


REFUSED: dict[str, tuple[Build, str]] = {
    "a norm that takes no launch": (norm_with_moments, "takes no launch of its own"),
    "a gated unit": (gated, "another product of the same rows multiplies"),
    "a computed factor": (computed, "not a constant matrix"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.usefixtures("chosen")
def test_refused_with_its_reason(name: str) -> None:
    build, reason = REFUSED[name]
    check_not_taken(built(build), "chained_sm90", reason, "ChainedConv", "SeparableConv")
