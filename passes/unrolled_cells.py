"""Steps of a GRU, LSTM or plain RNN that exporters write out become one layer, for which kernels keep the weights in registers.

Keras and JAX export a GRU as a loop, which is unrolled; PyTorch exports a loop over ``GRUCell`` or ``LSTMCell`` (Cho et al., 2014;
Hochreiter and Schmidhuber, 1997) or ``RNNCell`` (Elman, 1990) step by step, and its dynamo exporter also ``nn.RNN``. Each step has
two products and some arithmetic that wait for the previous step. TensorFlow's cells multiply input and state side by side.

A GRU may multiply its state by the reset gate before the product (Keras's ``reset_after=False``) or after it. A light GRU
(Ravanelli et al., 2018) has no reset gate: the layer gets one whose bias makes it 1. Where the update gate multiplies the new
state, not the old one (Chung et al., 2014), the layer's gate has the negative argument: ``1 - sigmoid(z)`` is ``sigmoid(-z)``.

A step is recognized by its arithmetic. The arguments of its gates are sums of products, of parts of products, and of constants. All
steps must have the same matrices, and the inputs of all steps must be known before the first one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.index import ConcatAttrs
from optdnn.ops.rnn import GRUAttrs, LSTMAttrs, RNNAttrs
from optdnn.passes.base import Match, Miss, PassContext, RulePass, rule
from optdnn.passes.support.facts import operand, origins, producer, reshaped
from optdnn.passes.support.lanes import cut_of
from optdnn.passes.support.pattern import Pattern, Var, any_of, find, node, product, total
from optdnn.passes.support.products import PRODUCTS, constant_matrix
from optdnn.passes.support.stacks import Joined, Shared, emit, leaves, part_values, stack_of
from optdnn.types import Array, Shape, is_float

LEAST = 4
"""Fewest steps of a layer."""
DEPTH = 8
"""Most operators between a product and a gate."""
WIDEST = 4096
"""Most columns of an input that is no product: it is multiplied with an identity matrix."""
MOST_ROWS = 64
"""Most rows of a plain RNN: with more, a step is one product that fills much of a GPU, with its activation in the epilogue."""
H = Var("h")
_Z, _R = node("Sigmoid", Var("z")), node("Sigmoid", Var("r"))
_KEPT = total(1.0, product(-1.0, _Z))


def _updated(new: Pattern) -> Pattern:
    """``z h + (1 - z) new``, in the two forms that exporters write."""
    return any_of(
        total(0.0, product(1.0, _Z, H), product(1.0, _KEPT, new)),
        total(0.0, new, product(1.0, _Z, total(0.0, H, product(-1.0, new)))),
    )


def _opened(new: Pattern) -> Pattern:
    """``(1 - z) h + z new``, in two forms."""
    return any_of(
        total(0.0, product(1.0, _KEPT, H), product(1.0, _Z, new)),
        total(0.0, H, product(1.0, _Z, total(0.0, new, product(-1.0, H)))),
    )


_NEW = node("Tanh", total(0.0, Var("n"), product(1.0, _R, Var("reset"))), name="new")
"""``tanh(n + r reset)``; ``reset`` is the product of the state."""
_PLAIN_NEW = node(frozenset({"Tanh", "Relu"}), Var("n"), name="new")
"""In ``n`` is the product of the state, or of the state times the reset gate."""
_RESET = product(1.0, _R, H)
OPEN = 64.0
"""The bias of a gate that is always open: ``sigmoid(64)`` is 1 in every type, and 64 is a number of every type."""
_CELL = total(
    0.0,
    product(1.0, node("Sigmoid", Var("f")), Var("c")),
    product(1.0, node("Sigmoid", Var("i")), node("Tanh", Var("g"))),
)
LSTM = product(1.0, node("Sigmoid", Var("o")), node("Tanh", _CELL, name="tanh"))
RNN = node(frozenset({"Tanh", "Relu"}), Var("g"))


@dataclass(frozen=True)
class Cell:
    """A way to write a step: the kind of its layer, its pattern, and the variables of its gates' arguments in the order of ONNX.

    ``opened``: the first gate has the negative argument in the layer."""

    kind: str
    pattern: Pattern
    arguments: tuple[str, ...]
    opened: bool = False


CELLS: Mapping[str, tuple[Cell, ...]] = {
    "Add": (
        Cell("GRU", _updated(_NEW), ("z", "r", "n", "reset")),
        Cell("GRU", _updated(_PLAIN_NEW), ("z", "n")),
        Cell("GRU", _opened(_NEW), ("z", "r", "n", "reset"), opened=True),
        Cell("GRU", _opened(_PLAIN_NEW), ("z", "n"), opened=True),
    ),
    "Mul": (Cell("LSTM", LSTM, ("i", "o", "f", "g")),),
    "Tanh": (Cell("RNN", RNN, ("g",)),),
    "Relu": (Cell("RNN", RNN, ("g",)),),
}
"""Kind of a step's last operator -> the ways to write the step."""


@dataclass(frozen=True)
class Term:
    """``source @ weight[rows, begin:end]``; without a weight, the columns of ``source`` itself. ``rows``: None for all."""

    source: Value
    weight: Value | None
    transposed: bool
    begin: int
    end: int
    rows: tuple[int, int] | None = None

    @property
    def key(self) -> tuple[object, ...]:
        return self.weight, self.transposed, self.begin, self.end, self.rows


@dataclass(frozen=True)
class Gate:
    """The terms of a gate's argument, without one for a gate of constants, and the biases of the input and of the state.

    ``sign``: the factor of all of them."""

    x: Term | None
    h: Term | None
    bias: Array
    state_bias: Array
    sign: float = 1.0

    @property
    def key(self) -> tuple[object, ...]:
        return (self.x and self.x.key, self.h and self.h.key, self.bias.tobytes(), self.state_bias.tobytes(), self.sign)


@dataclass(frozen=True)
class Step:
    """One step: the operator that computes its state, its input, the state before it, and for an LSTM the cells before and after.

    ``gates``: in the order of ONNX. ``activation``: of the new state of a GRU or RNN. ``reset_first``: a GRU that multiplies by its
    reset gate before the product."""

    kind: str
    op: Op
    x: Value
    h: Value
    cells: tuple[Value, Value] | None
    gates: tuple[Gate, ...]
    activation: str
    reset_first: bool

    @property
    def key(self) -> tuple[object, ...]:
        """What all steps of a layer have in common."""
        return (self.kind, self.activation, self.reset_first, *(gate.key for gate in self.gates))


@rule("unrolled_cells", frozenset(CELLS))
def unrolled_cells(graph: Graph, op: Op, context: PassContext) -> Match | Miss | None:
    """The last step of a layer, and all steps before it, become one GRU, LSTM or RNN."""
    chains = (_chain(graph, step) for step in steps_before(graph, op) if not _goes_on(graph, step))
    steps = max(chains, key=len, default=[])
    if len(steps) < LEAST:
        return None
    if (why := refused_step(steps[-1], context)) is not None:
        return Miss(why)
    xs = [step.x for step in steps]
    if len({graph.type(x) for x in xs}) > 1:
        return Miss("the inputs of the steps differ in size")
    stack = stack_of(graph, xs) or Joined(tuple(xs))
    roots = {step.op.id for step in steps}
    if any(one.id in roots for one in origins(graph, list(leaves(stack)))):
        return Miss("the input of a step depends on the step before it")
    if any(_reads_cell(graph, step, steps) for step in steps[:-1]):
        return Miss("the cells of steps before the last one are read elsewhere")

    def build(patch: Patch) -> None:
        x = emit(patch, stack)
        if isinstance(stack, Shared):
            x = patch.add(
                "Concat", [reshaped(patch, x, (1, *graph.type(xs[0]).static_shape))] * len(xs), ConcatAttrs(0)
            )
        _layer(graph, patch, steps, x)

    return Match(tuple(step.op for step in steps), build)


def refused_step(step: Step, context: PassContext) -> str | None:
    """Why a step does not become part of a layer, or None."""
    if step.kind == "RNN" and context.counted(step.op.outputs[0].type.static_shape[-2]) > MOST_ROWS:
        return "each step is one product, with enough rows for a launch of its own"
    return None


def _chain(graph: Graph, last: Step) -> list[Step]:
    """The steps up to ``last``, in order."""
    found = [last]
    while True:
        first = found[0]
        before = steps_before(graph, graph.op(first.h)) if first.h.port == 0 else iter(())
        cell = None if first.cells is None else first.cells[0]
        step = next((s for s in before if s.key == first.key and (s.cells is None or s.cells[1] == cell)), None)
        if step is None:
            return found
        found.insert(0, step)


def _goes_on(graph: Graph, step: Step) -> bool:
    """Whether another step of the layer reads the state."""
    matrices = {gate.h.weight for gate in step.gates if gate.h is not None}
    users = graph.users(step.op.value)
    readers = [*users, *(user for join in users if join.kind == "Concat" for user in graph.users(join.value))]
    return any(u.kind in PRODUCTS and u.inputs[1] in matrices for u in readers)


def _reads_cell(graph: Graph, step: Step, steps: Sequence[Step]) -> bool:
    """Whether anything but the steps reads the cell of an LSTM."""
    if step.cells is None:
        return False
    return graph.use_count(step.cells[1]) > 2 or not any(s.cells and s.cells[0] == step.cells[1] for s in steps)


def steps_before(graph: Graph, op: Op) -> Iterator[Step]:
    """The ways to read an operator as the last one of a step."""
    out = op.outputs[0].type
    if op.kind not in CELLS or not out.is_static or not _are_rows(out.shape) or not is_float(out.dtype):
        return
    for cell in CELLS[op.kind]:
        for found in find(graph, op.value, cell.pattern):
            yield from _steps_as(graph, op, cell, found.bound)


def _steps_as(graph: Graph, op: Op, cell: Cell, bound: Mapping[str, Any]) -> Iterator[Step]:
    """The ways to read an operator as the last one of a step, given the values of the cell's variables."""
    out, kind = op.outputs[0].type, cell.kind
    known = dict[str, _Argument]()
    for name in cell.arguments:
        argument = _argument(graph, bound[name], 0, out.static_shape[-1])
        if argument is None:
            return
        known[name] = argument
    reset_first = "r" not in known and kind == "GRU" and _take_reset(graph, known, bound["h"])
    sources = list(dict.fromkeys(term.source for terms, _ in known.values() for term in terms))
    states = [bound["h"]] if kind == "GRU" else [s for s in sources if graph.type(s) == out]
    cells = (bound["c"], operand(bound["tanh"])) if kind == "LSTM" else None
    new: Op = bound["new"] if kind == "GRU" else op
    for h in states:
        x = next((s for s in sources if s != h), None)
        gates = None if x is None or len(sources) != 2 else _gates(kind, known, h)
        if x is not None and gates is not None:
            if cell.opened:
                gates = (replace(gates[0], sign=-1.0), *gates[1:])
            yield Step(kind, op, x, h, cells, gates, new.kind, reset_first)


def _take_reset(graph: Graph, known: dict[str, _Argument], h: Value) -> bool:
    """Whether the new state of a GRU has the product of ``r h``. Its term becomes one of ``h`` then, and ``r`` is added."""
    terms, bias = known["n"]
    for k, term in enumerate(terms):
        for found in find(graph, term.source, _RESET) if term.weight is not None else ():
            reset = _argument(graph, found.bound["r"], 0, graph.type(h).static_shape[-1])
            if found.bound["h"] == h and reset is not None:
                known["n"] = ([*terms[:k], replace(term, source=h), *terms[k + 1 :]], bias)
                known["r"] = reset
                return True
    return False


def _gates(kind: str, known: Mapping[str, _Argument], h: Value) -> tuple[Gate, ...] | None:
    """The gates in the order of ONNX; None if their arguments are not those of a step."""
    gates = dict[str, Gate]()
    for name, (terms, bias) in known.items():
        inputs, states = [t for t in terms if t.source != h], [t for t in terms if t.source == h]
        wanted = (int(name != "reset"), int(name != "n" or "reset" not in known))
        if (len(inputs), len(states)) != wanted or any(t.weight is None for t in states):
            return None
        gates[name] = Gate(inputs[0] if inputs else None, states[0] if states else None, bias, np.zeros_like(bias))
    if kind != "GRU":
        return tuple(gates.values())
    new, size = gates["n"], gates["n"].bias
    if "reset" in gates:
        new = replace(new, h=gates["reset"].h, state_bias=gates["reset"].bias)
    return gates["z"], gates.get("r", Gate(None, None, np.full_like(size, OPEN), np.zeros_like(size))), new


_Argument = tuple[list[Term], Array]


def _argument(graph: Graph, value: Value, begin: int, end: int, depth: int = DEPTH) -> _Argument | None:
    """Columns of a value as a sum of terms and a vector of constants; None if it is no such sum."""
    op, constant, size = graph.op(value), graph.constant_value(value), end - begin
    if constant is not None:
        row = constant.reshape(-1)
        if constant.size != (constant.shape[-1] if constant.ndim else 1):
            return None
        return [], np.broadcast_to(row if row.size == 1 else row[begin:end], (size,)).astype(np.float64)
    cut = cut_of(graph, value)
    if depth and cut is not None:
        return _argument(graph, operand(op), begin + cut[0], end + cut[0], depth - 1)
    if depth and op.kind == "Add":
        parts = [_argument(graph, operand(op, slot), begin, end, depth - 1) for slot in (0, 1)]
        if parts[0] is None or parts[1] is None or not _are_rows(graph.type(value).shape):
            return None
        return [*parts[0][0], *parts[1][0]], parts[0][1] + parts[1][1]
    taken = constant_matrix(graph, op) if op.kind in PRODUCTS else None
    if taken is not None:
        bias = (
            np.zeros(size)
            if taken.bias is None
            else np.broadcast_to(taken.bias, graph.type(value).static_shape[-1:])[begin:end]
        )
        whole = Term(operand(op), op.inputs[1], op.kind == "Gemm" and op.attrs.transB, begin, end)
        return _parts(graph, whole), bias.astype(np.float64)
    dims = graph.type(value).shape
    if dims is None or not _are_rows(dims) or not isinstance(dims[-1], int) or not end <= dims[-1] <= WIDEST:
        return None
    return [Term(value, None, False, begin, end)], np.zeros(size)


def _parts(graph: Graph, whole: Term) -> list[Term]:
    """The terms of a product of joined columns, one for each part: TensorFlow's cells join their input and state."""
    join = producer(graph, whole.source, {"Concat"})
    dims = [] if join is None else [graph.type(v).dims[-1] for v in join.inputs if v is not None]
    widths = [n for n in dims if isinstance(n, int)]
    if join is None or join.attrs.axis not in (-1, len(join.outputs[0].type.dims) - 1) or len(widths) < len(dims):
        return [whole]
    ends = list(accumulate(widths))
    return [
        replace(whole, source=operand(join, k), rows=(end - width, end))
        for k, (width, end) in enumerate(zip(widths, ends, strict=True))
    ]


def _are_rows(shape: Shape | None) -> bool:
    """Whether a shape is (batch, features), perhaps behind axes of size 1: PyTorch's own steps keep the axis of directions."""
    return shape is not None and len(shape) >= 2 and all(n == 1 for n in shape[:-2])


def _rows(graph: Graph, terms: Sequence[tuple[Term | None, float]], hidden: int) -> Array:
    """The transposed matrices of terms times their signs, one below the other: (gates * hidden, columns of the source)."""
    found = [None if term is None else sign * _rows_of(graph, term) for term, sign in terms]
    width = next(rows.shape[1] for rows in found if rows is not None)
    return np.concatenate([np.zeros((hidden, width)) if rows is None else rows for rows in found])


def _rows_of(graph: Graph, term: Term) -> Array:
    """The transposed matrix of a term: (columns of the gate, columns of the source)."""
    if term.weight is None:
        return np.eye(graph.type(term.source).static_shape[-1])[term.begin : term.end]
    matrix = graph.constant_value(term.weight)
    assert matrix is not None
    return (matrix if term.transposed else matrix.T)[term.begin : term.end, slice(*(term.rows or (None, None)))]


def _layer(graph: Graph, patch: Patch, steps: Sequence[Step], x: Value) -> None:
    """Add the layer of ``steps``, whose inputs are ``x`` (step, batch, width), and replace their results."""
    first, last = steps[0], steps[-1]
    shape = last.op.outputs[0].type.static_shape
    states, cell = add_layer(graph, patch, last, x, len(steps), [first.h, *(first.cells or ())[:1]])
    for step, made in zip(steps, part_values(patch, states, len(steps)), strict=True):
        patch.replace(step.op.value, _shaped(patch, made, shape))
    if last.cells is not None and cell is not None:
        patch.replace(last.cells[1], _shaped(patch, cell, shape))


def add_layer(
    graph: Graph, patch: Patch, step: Step, x: Value, count: int, begin: Sequence[Value], backward: bool = False
) -> tuple[Value, Value | None]:
    """Add a layer of ``count`` steps like ``step`` of ``graph``.

    ``begin``: the first state, and for an LSTM the first cell. ``backward``: from the last position to the first. Returns the
    states (step, batch, hidden), and for an LSTM the last cell."""
    dtype, (batch, hidden) = step.op.outputs[0].type.dtype, step.op.outputs[0].type.static_shape[-2:]
    x = _shaped(patch, x, (count, batch, graph.type(step.x).static_shape[-1]))
    w = _rows(graph, [(g.x, g.sign) for g in step.gates], hidden)
    r = _rows(graph, [(g.h, g.sign) for g in step.gates], hidden)
    bias = np.concatenate([*(g.sign * g.bias for g in step.gates), *(g.sign * g.state_bias for g in step.gates)])
    constants = [patch.constant(a[None].astype(dtype), name) for a, name in ((w, "W"), (r, "R"), (bias, "B"))]
    initial = [_shaped(patch, v, (1, batch, hidden)) for v in begin]
    way = "reverse" if backward else "forward"
    attrs = {
        "GRU": GRUAttrs(
            hidden, way, activations=("Sigmoid", step.activation), linear_before_reset=not step.reset_first
        ),
        "LSTM": LSTMAttrs(hidden, way),
        "RNN": RNNAttrs(hidden, way, activations=(step.activation,)),
    }[step.kind]
    layer = patch.add_op(step.kind, [x, *constants, None, *initial], attrs, outputs=3 if step.cells else 2)
    states = reshaped(patch, Value(layer.id, 0), (count, batch, hidden))
    return states, Value(layer.id, 2) if step.cells else None


def _shaped(patch: Patch, x: Value, shape: tuple[int, ...]) -> Value:
    return x if patch.type(x).dims == shape else reshaped(patch, x, shape)


class UnrolledCells(RulePass):
    name = "unrolled_cells"
    rules = (unrolled_cells,)
