"""GRU, LSTM and RNN steps that exporters write out."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated, kinds

from optdnn.ir.graph import Graph, Value
from optdnn.ops.gather import GatherAttrs
from optdnn.ops.gemm import GemmAttrs, MatMulAttrs
from optdnn.ops.index import ConcatAttrs, SplitAttrs
from optdnn.ops.reduce import ArgAttrs
from optdnn.ops.shape import ReshapeAttrs
from optdnn.passes.unrolled_cells import UnrolledCells

PASS = UnrolledCells()
STEPS, BATCH, WIDTH, HIDDEN = 5, 2, 3, 4


class Cell:
    """The constants of a cell with ``gates`` gates, as matrices of all gates side by side."""

    def __init__(self, n: Net, gates: int, width: int = WIDTH):
        self.n, self.gates = n, gates
        self.w, self.r = n.random(width, gates * HIDDEN, scale=0.5), n.random(HIDDEN, gates * HIDDEN, scale=0.5)
        self.bw, self.br = n.random(gates * HIDDEN), n.random(gates * HIDDEN)
        self.both = n.random(width + HIDDEN, gates * HIDDEN, scale=0.5)
        self.both_own, self.both_two = (n.random(width + HIDDEN, k * HIDDEN, scale=0.5) for k in (1, 2))
        self.own, self.two = n.random(HIDDEN, HIDDEN, scale=0.5), n.random(HIDDEN, 2 * HIDDEN, scale=0.5)

    def product(self, x: Value, weight: Value, bias: Value) -> Value:
        return self.n.op("Gemm", x, weight, bias, attrs=GemmAttrs())  # type: ignore[no-any-return]

    def split(self, x: Value) -> list[Value]:
        return self.n.op("Split", x, self.n.ints(*[HIDDEN] * self.gates), attrs=SplitAttrs(axis=1), outputs=self.gates)  # type: ignore[no-any-return]


def gru(c: Cell, of_x: Value, h: Value, update: str = "Sub", resets: str = "state") -> Value:
    """``n + z (h - n)`` of the terms ``of_x`` of the input. ``update`` replaces Sub; ``resets`` is what r multiplies."""
    n = c.n
    (xr, xz, xn), (hr, hz, hn) = c.split(of_x), c.split(c.product(h, c.r, c.br))
    r, z = n.op("Sigmoid", n.op("Add", xr, hr)), n.op("Sigmoid", n.op("Add", hz, xz))
    plain, reset = (xn, hn) if resets == "state" else (hn, xn)
    new = n.op("Tanh", n.op("Add", plain, n.op("Mul", r, reset)))
    return n.op("Add", new, n.op("Mul", z, n.op(update, h, new)))  # type: ignore[no-any-return]


def torch_gru(c: Cell, x: Value, h: Value) -> Value:
    """PyTorch's GRUCell."""
    return gru(c, c.product(x, c.w, c.bw), h)


def keras_gru(c: Cell, x: Value, h: Value) -> Value:
    """Keras: ``z h + (1 - z) n``, biases after the products, Slices in place of Splits, gates in another order."""
    n = c.n
    a = n.op("Add", n.op("MatMul", x, c.w, attrs=MatMulAttrs()), c.bw)
    b = n.op("Add", n.op("MatMul", h, c.r, attrs=MatMulAttrs()), c.br)
    xz, xr, xn = c.split(a)
    hz, hr, hn = (n.op("Slice", b, n.ints(k * HIDDEN), n.ints((k + 1) * HIDDEN), n.ints(1)) for k in range(3))
    r, z = n.op("Sigmoid", n.op("Add", xr, hr)), n.op("Sigmoid", n.op("Add", xz, hz))
    new = n.op("Tanh", n.op("Add", xn, n.op("Mul", r, hn)))
    return n.op("Add", n.op("Mul", z, h), n.op("Mul", n.op("Sub", 1.0, z), new))  # type: ignore[no-any-return]


def given_gru(c: Cell, x: Value, h: Value) -> Value:
    """The products of all inputs were computed before: each step reads its gates."""
    return gru(c, x, h)


def reset_first_gru(c: Cell, x: Value, h: Value, other: Value | None = None) -> Value:
    """Keras with ``reset_after=False``: ``(r h) R`` in place of ``r (h R)``. ``other`` is multiplied by r in place of h."""
    n = c.n
    xz, xr, xn = c.split(c.product(x, c.w, c.bw))
    gates = n.op("MatMul", h, c.two, attrs=MatMulAttrs())
    hz, hr = n.op("Split", gates, n.ints(HIDDEN, HIDDEN), attrs=SplitAttrs(axis=1), outputs=2)
    r, z = n.op("Sigmoid", n.op("Add", xr, hr)), n.op("Sigmoid", n.op("Add", xz, hz))
    of_h = n.op("MatMul", n.op("Mul", r, h if other is None else other), c.own, attrs=MatMulAttrs())
    new = n.op("Tanh", n.op("Add", xn, of_h))
    return n.op("Add", n.op("Mul", z, h), n.op("Mul", n.op("Sub", 1.0, z), new))  # type: ignore[no-any-return]


def opened_gru(c: Cell, x: Value, h: Value, form: str = "kept") -> Value:
    """The update gate multiplies the new state (Chung et al., 2014)."""
    n = c.n
    (xr, xz, xn), (hr, hz, hn) = c.split(c.product(x, c.w, c.bw)), c.split(c.product(h, c.r, c.br))
    r, z = n.op("Sigmoid", n.op("Add", xr, hr)), n.op("Sigmoid", n.op("Add", hz, xz))
    new = n.op("Tanh", n.op("Add", xn, n.op("Mul", r, hn)))
    if form == "difference":
        return n.op("Add", h, n.op("Mul", z, n.op("Sub", new, h)))  # type: ignore[no-any-return]
    return n.op("Add", n.op("Mul", n.op("Sub", 1.0, z), h), n.op("Mul", z, new))  # type: ignore[no-any-return]


def light_gru(c: Cell, x: Value, h: Value, kind: str = "Relu") -> Value:
    """SpeechBrain's LiGRU: no reset gate."""
    n = c.n
    new, z = c.split(n.op("Add", c.product(x, c.w, c.bw), c.product(h, c.r, c.br)))
    z = n.op("Sigmoid", z)
    return n.op("Add", n.op("Mul", z, h), n.op("Mul", n.op("Sub", 1.0, z), n.op(kind, new)))  # type: ignore[no-any-return]


def lstm(c: Cell, x: Value, h: Value, cell: Value) -> tuple[Value, Value]:
    """PyTorch's LSTMCell: the products are added before they are split."""
    n = c.n
    i, f, g, o = c.split(n.op("Add", c.product(x, c.w, c.bw), c.product(h, c.r, c.br)))
    cell = n.op("Add", n.op("Mul", n.op("Sigmoid", f), cell), n.op("Mul", n.op("Sigmoid", i), n.op("Tanh", g)))
    return n.op("Mul", n.op("Sigmoid", o), n.op("Tanh", cell)), cell


def joined(n: Net, x: Value, h: Value, weight: Value, axis: int = -1) -> Value:
    return n.op("MatMul", n.op("Concat", x, h, attrs=ConcatAttrs(axis)), weight, attrs=MatMulAttrs())  # type: ignore[no-any-return]


def tensorflow_lstm(c: Cell, x: Value, h: Value, cell: Value) -> tuple[Value, Value]:
    """TensorFlow's BasicLSTMCell: one product of input and state, another order of gates, and a constant in the forget gate."""
    n = c.n
    i, g, f, o = c.split(n.op("Add", joined(n, x, h, c.both), c.bw))
    forget = n.op("Sigmoid", n.op("Add", f, 1.0))
    cell = n.op("Add", n.op("Mul", cell, forget), n.op("Mul", n.op("Sigmoid", i), n.op("Tanh", g)))
    return n.op("Mul", n.op("Tanh", cell), n.op("Sigmoid", o)), cell


def tensorflow_gru(c: Cell, x: Value, h: Value, at_once: bool = False) -> Value:
    """TensorFlow's GRUCell: products of input and state, and of input and reset state. ``at_once``: one sigmoid of both gates."""
    n = c.n
    gates = n.op("Add", joined(n, x, h, c.both_two), 1.0)
    gates = n.op("Sigmoid", gates) if at_once else gates
    r, z = n.op("Split", gates, n.ints(HIDDEN, HIDDEN), attrs=SplitAttrs(axis=1), outputs=2)
    r, z = (r, z) if at_once else (n.op("Sigmoid", r), n.op("Sigmoid", z))
    new = n.op("Tanh", joined(n, x, n.op("Mul", r, h), c.both_own))
    return n.op("Add", n.op("Mul", z, h), n.op("Mul", n.op("Sub", 1.0, z), new))  # type: ignore[no-any-return]


def taken(n: Net, x: Value, t: int) -> Value:
    return n.op("Gather", x, n.const(t, np.int64), attrs=GatherAttrs(1))  # type: ignore[no-any-return]


def stacked(n: Net, states: list[Value]) -> Value:
    return n.op("Concat", *(n.op("Unsqueeze", h, n.ints(1)) for h in states), attrs=ConcatAttrs(1))  # type: ignore[no-any-return]


def gru_steps(
    step: Callable[[Cell, Value, Value], Value], width: int = WIDTH, steps: int = STEPS, gates: int = 3
) -> Graph:
    n = Net()
    c, x, h, states = Cell(n, gates), n.input(BATCH, steps, width), n.input(BATCH, HIDDEN, name="h"), []
    for t in range(steps):
        h = step(c, taken(n, x, t), h)
        states.append(h)
    return n.done(stacked(n, states), n.op("Neg", h))


@pytest.mark.parametrize(("step", "width"), [(torch_gru, WIDTH), (keras_gru, WIDTH), (given_gru, 3 * HIDDEN)])
def test_steps_of_a_gru_are_a_layer(step: Callable[[Cell, Value, Value], Value], width: int) -> None:
    graph, _ = check_pass(PASS, gru_steps(step, width), changes=1, rules={"unrolled_cells": 1})
    (layer,) = graph.of_kind("GRU")
    assert layer.attrs.linear_before_reset
    assert layer.outputs[0].type.static_shape == (STEPS, 1, BATCH, HIDDEN)
    assert not {"Sigmoid", "Tanh", "Gemm", "MatMul"} & set(graph.kinds())


def test_a_gru_whose_reset_gate_comes_before_the_product() -> None:
    graph, _ = check_pass(PASS, gru_steps(reset_first_gru), changes=1, rules={"unrolled_cells": 1})
    (layer,) = graph.of_kind("GRU")
    assert not layer.attrs.linear_before_reset
    assert not {"Sigmoid", "Tanh", "Gemm", "MatMul"} & set(graph.kinds())


@pytest.mark.parametrize("form", ["kept", "difference"])
def test_a_gru_whose_update_gate_multiplies_the_new_state(form: str) -> None:
    steps = gru_steps(lambda c, x, h: opened_gru(c, x, h, form))
    graph, _ = check_pass(PASS, steps, changes=1, rules={"unrolled_cells": 1})
    (layer,) = graph.of_kind("GRU")
    assert layer.attrs.linear_before_reset
    assert not {"Sigmoid", "Tanh", "Gemm", "MatMul"} & set(graph.kinds())


@pytest.mark.parametrize("kind", ["Relu", "Tanh"])
def test_a_light_gru_gets_an_open_reset_gate(kind: str) -> None:
    steps = gru_steps(lambda c, x, h: light_gru(c, x, h, kind), gates=2)
    graph, _ = check_pass(PASS, steps, changes=1, rules={"unrolled_cells": 1})
    (layer,) = graph.of_kind("GRU")
    assert layer.attrs.activations == ("Sigmoid", kind)
    recurrent, bias = graph.constant_value(layer.inputs[2]), graph.constant_value(layer.inputs[3])
    assert recurrent is not None
    assert bias is not None
    assert not recurrent[0, HIDDEN : 2 * HIDDEN].any()
    assert (bias[0, HIDDEN : 2 * HIDDEN] == 64).all()


Step = Callable[[Cell, Value, Value, Value], tuple[Value, Value]]


def lstm_steps(read: int = STEPS, feedback: bool = False, step: Step = lstm, width: int = WIDTH) -> Graph:
    """``read``: the number of the step whose cell is read; ``feedback``: inputs are states of the step before."""
    n = Net()
    x, h, cell = n.input(BATCH, STEPS, width), n.input(BATCH, HIDDEN, name="h"), n.input(BATCH, HIDDEN, name="c")
    c, states, cells = Cell(n, 4, HIDDEN if feedback else width), list[Value](), list[Value]()
    for t in range(STEPS):
        given = n.op("Relu", h) if feedback else taken(n, x, t)
        h, cell = step(c, given, h, cell)
        states.append(h)
        cells.append(cell)
    return n.done(stacked(n, states), n.op("Neg", cells[read - 1]), *([n.op("Exp", x)] if feedback else []))


@pytest.mark.parametrize("step", [lstm, tensorflow_lstm])
def test_steps_of_an_lstm_are_a_layer(step: Step) -> None:
    graph, _ = check_pass(PASS, lstm_steps(step=step), changes=1, rules={"unrolled_cells": 1})
    (layer,) = graph.of_kind("LSTM")
    assert layer.outputs[2].type.static_shape == (1, BATCH, HIDDEN)
    assert not {"Sigmoid", "Tanh", "Gemm", "MatMul"} & set(graph.kinds())


def test_a_gru_of_products_of_input_and_state() -> None:
    graph, _ = check_pass(PASS, gru_steps(tensorflow_gru), changes=1, rules={"unrolled_cells": 1})
    (layer,) = graph.of_kind("GRU")
    assert not layer.attrs.linear_before_reset
    assert not {"Sigmoid", "Tanh", "MatMul"} & set(graph.kinds())


def test_gates_that_are_split_after_their_sigmoid_stay() -> None:
    check_untouched(PASS, gru_steps(lambda c, x, h: tensorflow_gru(c, x, h, at_once=True)))


def test_rows_that_are_joined_are_no_input_and_state() -> None:
    def step(c: Cell, x: Value, h: Value, cell: Value) -> tuple[Value, Value]:
        n = c.n
        both = n.op("Reshape", n.op("Concat", x, h, attrs=ConcatAttrs(0)), n.ints(BATCH, -1), attrs=ReshapeAttrs())
        i, g, f, o = c.split(n.op("MatMul", both, c.both, attrs=MatMulAttrs()))
        cell = n.op("Add", n.op("Mul", cell, n.op("Sigmoid", f)), n.op("Mul", n.op("Sigmoid", i), n.op("Tanh", g)))
        return n.op("Mul", n.op("Tanh", cell), n.op("Sigmoid", o)), cell

    check_untouched(PASS, lstm_steps(step=step, width=HIDDEN))


def rnn_steps(kind: str = "Tanh", batch: int = BATCH, changes_at: int = STEPS) -> Graph:
    """Steps of PyTorch's RNNCell, or of Keras's SimpleRNN. ``changes_at``: the first step with the other activation."""
    n = Net()
    c, x, h, states = Cell(n, 1), n.input(batch, STEPS, WIDTH), n.input(batch, HIDDEN, name="h"), list[Value]()
    for t in range(STEPS):
        own = {"Tanh": "Relu", "Relu": "Tanh"}[kind] if t >= changes_at else kind
        h = n.op(own, n.op("Add", c.product(taken(n, x, t), c.w, c.bw), c.product(h, c.r, c.br)))
        states.append(h)
    return n.done(stacked(n, states), n.op("Neg", h))


@pytest.mark.parametrize("kind", ["Tanh", "Relu"])
def test_steps_of_a_plain_rnn_are_a_layer(kind: str) -> None:
    graph, _ = check_pass(PASS, rnn_steps(kind), changes=1, rules={"unrolled_cells": 1})
    (layer,) = graph.of_kind("RNN")
    assert layer.attrs.activations == (kind,)
    assert not {kind, "Gemm"} & set(graph.kinds())


@pytest.mark.parametrize("batch", [1, BATCH])
def test_steps_behind_an_axis_of_directions_are_a_layer(batch: int) -> None:
    """PyTorch's exporter writes nn.RNN out, with states (1, batch, features) and parts of one product of all inputs."""
    n = Net()
    x = n.op("Add", n.matmul(n.input(STEPS, batch, WIDTH), HIDDEN), n.random(HIDDEN))
    w, b, h, states = n.random(HIDDEN, HIDDEN), n.random(HIDDEN), n.input(1, batch, HIDDEN, name="h"), list[Value]()
    for t in range(STEPS):
        part = n.op("Gather", x, n.const(t, np.int64), attrs=GatherAttrs(0))
        h = n.op("Relu", n.op("Add", n.op("Add", n.op("MatMul", h, w), b), part))
        states.append(h)
    graph, _ = check_pass(PASS, n.done(n.op("Concat", *states, attrs=ConcatAttrs(0))), changes=1)
    assert len(graph.of_kind("RNN")) == 1
    assert not graph.of_kind("Relu")


def test_many_rows_of_a_plain_rnn_stay_products() -> None:
    check_refused(PASS, rnn_steps(batch=65), because="enough rows for a launch of its own")


def test_steps_of_different_activations_stay() -> None:
    check_untouched(PASS, rnn_steps(changes_at=2))


def test_two_layers_step_by_step_are_two_layers() -> None:
    n = Net()
    c, d, x = Cell(n, 3), Cell(n, 3, HIDDEN), n.input(BATCH, STEPS, WIDTH)
    a = b = n.input(BATCH, HIDDEN, name="h")
    states = []
    for t in range(STEPS):
        a = torch_gru(c, taken(n, x, t), a)
        b = torch_gru(d, a, b)
        states.append(b)
    graph, _ = check_pass(PASS, n.done(stacked(n, states)), changes=2, rules={"unrolled_cells": 2})
    assert len(graph.of_kind("GRU")) == 2


def test_rows_of_a_table_are_looked_up_for_all_steps_at_once() -> None:
    """PyTorch's LSTMCell or GRUCell reads the embedding of a token in each step."""
    n = Net()
    tokens = n.op("ArgMax", n.input(BATCH, STEPS, 9), attrs=ArgAttrs(-1, keepdims=False))
    table, c, h, states = n.random(9, WIDTH), Cell(n, 3), n.input(BATCH, HIDDEN, name="h"), list[Value]()
    for t in range(STEPS):
        h = torch_gru(c, n.op("Gather", table, taken(n, tokens, t), attrs=GatherAttrs(0)), h)
        states.append(h)
    graph, _ = check_pass(PASS, n.done(stacked(n, states)), changes=1, rules={"unrolled_cells": 1})
    assert sum(graph.constant_value(op.inputs[0]) is not None for op in graph.of_kind("Gather")) == 1


def test_inputs_that_depend_on_the_step_before_refuse() -> None:
    check_refused(PASS, lstm_steps(feedback=True), because="depends on the step before")


def test_cells_that_are_read_elsewhere_refuse() -> None:
    check_refused(PASS, lstm_steps(read=2), because="cells of steps before the last one")


def test_few_steps_stay() -> None:
    check_untouched(PASS, gru_steps(torch_gru, steps=3))


def test_steps_with_their_own_matrices_stay() -> None:
    n = Net()
    x, h = n.input(BATCH, STEPS, WIDTH), n.input(BATCH, HIDDEN, name="h")
    for t in range(STEPS):
        h = torch_gru(Cell(n, 3), taken(n, x, t), h)
    check_untouched(PASS, n.done(h))


def other_update(c: Cell, x: Value, h: Value) -> Value:
    """``n + z (h + n)`` is no GRU."""
    return gru(c, c.product(x, c.w, c.bw), h, update="Add")


def reset_of_input(c: Cell, x: Value, h: Value) -> Value:
    """The reset gate multiplies the input's product, not the state's."""
    return gru(c, c.product(x, c.w, c.bw), h, resets="input")


def reset_of_another_value(c: Cell, x: Value, h: Value) -> Value:
    """The reset gate multiplies another value than the state before the product."""
    return reset_first_gru(c, x, h, c.n.op("Neg", h))


@pytest.mark.parametrize("step", [other_update, reset_of_input, reset_of_another_value])
def test_other_arithmetic_stays(step: Callable[[Cell, Value, Value], Value]) -> None:
    check_untouched(PASS, gru_steps(step))


def test_a_layer_takes_few_launches() -> None:
    program = check_simulated(gru_steps(torch_gru))
    assert "Recurrence" in kinds(program) or "StackedRNN" in kinds(program)
    assert sum(step.executor == "cuda" for step in program.steps) <= 8
