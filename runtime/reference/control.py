"""NumPy kernels. Control flow: If, Loop, Scan, whose bodies are nested graphs of plain data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from optdnn.limits import LOOP_TRIPS
from optdnn.runtime.reference.base import ComposedKernel, Kernel, Run
from optdnn.runtime.reference.nested import PlainGraph, PlainOp, bare_kernels, run_graph
from optdnn.types import FP32, Array, DType


def if_(
    run: Run,
    condition: Array,
    *captured: Array | None,
    then_branch: PlainGraph,
    else_branch: PlainGraph,
    then_captured: int,
) -> tuple[Array, ...]:
    """If (ONNX opset 25). ``captured`` are the outer values that the branches read; the first ``then_captured`` are the then
    branch's."""
    if condition.size != 1:
        raise ValueError(f"the condition has {condition.size} elements")
    if bool(condition.reshape(-1)[0]):
        return tuple(run_graph(run, then_branch, captured[:then_captured]))
    return tuple(run_graph(run, else_branch, captured[then_captured:]))


def loop(
    run: Run,
    trips: Array | None = None,
    condition: Array | None = None,
    *operands: Array | None,
    body: PlainGraph,
    carried: int,
) -> tuple[Array, ...]:
    """Loop (ONNX opset 25): operands are ``carried`` initial values, then the values that the body captures.

    Results: the final values, then each scan output stacked over the iterations. A loop whose condition never becomes false ends
    with an error (:meth:`optdnn.runtime.reference.base.Run.trip`); immediately, if its body passes the condition through.
    """
    limit = None if trips is None else int(trips.reshape(-1)[0])
    going = condition is None or bool(condition.reshape(-1)[0])
    state, captured = list(operands[:carried]), operands[carried:]
    body, appended = _appending(body, carried)
    parts = {k: [x] for k in appended if (x := state[k]) is not None}
    rows: list[list[Array]] = [[] for _ in range(len(body.outputs) - 1 - carried)]
    i, bare = 0, list[Kernel | None]()
    if going and _hands_on(body) and (limit is None or limit > LOOP_TRIPS.value):
        times = "for ever" if limit is None else f"{limit} times"
        raise ValueError(f"the loop would run {times}, its body does not end it; {LOOP_TRIPS.hint}")
    while going and (limit is None or i < limit):
        run.trip()
        fed = [np.asarray(i, np.int64), np.asarray(going), *state, *captured]
        bare = bare_kernels(run, body, fed) if i == 0 else bare
        results = run_graph(run, body, fed, bare)
        going = bool(results[0].reshape(-1)[0])
        state = list(results[1 : 1 + carried])
        for k, found in parts.items():
            found.append(results[1 + k])
        for row, value in zip(rows, results[1 + carried :], strict=True):
            row.append(value)
        i += 1
    for k, found in parts.items():
        state[k] = np.concatenate(found, axis=appended[k])
    fed = [np.asarray(i, np.int64), np.asarray(going), *state, *captured]
    shapes = [None if x is None else x.shape for x in fed]
    scans = [np.stack(row) if row else _no_rows(body, 1 + carried + k, fed, shapes) for k, row in enumerate(rows)]
    finals = [s if s is not None else np.zeros(0) for s in state]
    return (*finals, *scans)


def _hands_on(body: PlainGraph) -> bool:
    """Whether a body's condition is the one it was given, input 1."""
    same, made = {1}, body.inputs + len(body.constants)
    for op in body.ops:
        if op.kind == "Identity" and op.inputs[0] in same:
            same.add(made)
        made += len(op.dtypes)
    return body.outputs[0] in same


def _appending(body: PlainGraph, carried: int) -> tuple[PlainGraph, dict[int, int]]:
    """The body without the Concats that append to a carried value that it does not read otherwise: it yields the appended rows
    instead. Also carried value -> the axis. Lists of results grow this way; their parts are concatenated once at the end."""
    reads = Counter(i for op in body.ops for i in op.inputs)
    reads.update(body.outputs)
    ops, appended = list(body.ops), {}
    register = body.inputs + len(body.constants)
    for place, op in enumerate(body.ops):
        if op.kind == "Concat" and register in body.outputs[1 : 1 + carried] and reads[register] == 1:
            k = body.outputs.index(register) - 1
            if len(op.inputs) == 2 and op.inputs[0] == 2 + k and reads[2 + k] == 1:
                ops[place] = PlainOp("Identity", {}, op.inputs[1:], op.dtypes)
                appended[k] = int(op.attrs["axis"])
        register += len(op.dtypes)
    return body._replace(ops=tuple(ops)), appended


def _no_rows(
    body: PlainGraph, output: int, fed: Sequence[Array | None], shapes: Sequence[Sequence[int] | None]
) -> Array:
    """A scan output of no iterations, [0, *shape of a row]. ``shapes`` are the shapes of an iteration's inputs."""
    return np.zeros((0, *body.output_shape(output, shapes)), _dtype(body, output, fed))


def _dtype(body: PlainGraph, output: int, fed: Sequence[Array | None]) -> DType:
    """The element type of a body's output."""
    register = body.outputs[output]
    given = [*fed, *body.constants]
    if register < len(given):  # the output is an input of the body
        source = given[register]
        return FP32 if source is None else source.dtype
    register -= len(given)
    for op in body.ops:
        if 0 <= register < len(op.dtypes):
            return op.dtypes[register]
        register -= len(op.dtypes)
    return FP32


def scan(
    run: Run,
    *operands: Array | None,
    body: PlainGraph,
    states: int,
    scan_input_axes: Sequence[int],
    scan_input_directions: Sequence[int],
    scan_output_axes: Sequence[int],
    scan_output_directions: Sequence[int],
) -> tuple[Array, ...]:
    """Scan (ONNX opset 25): operands are ``states`` initial states, the scanned inputs, then the values that the body captures."""
    count = len(scan_input_axes)
    state, captured = list(operands[:states]), operands[states + count :]
    sequences: list[Array] = []
    for x, axis, direction in zip(
        operands[states : states + count], scan_input_axes, scan_input_directions, strict=True
    ):
        if x is None:
            raise ValueError("a scanned input is absent")
        moved = np.moveaxis(x, axis, 0)
        sequences.append(moved[::-1] if direction else moved)
    lengths = {len(s) for s in sequences}
    if len(lengths) != 1:
        raise ValueError(f"the scanned inputs have different lengths: {sorted(lengths)}")
    rows: list[list[Array]] = [[] for _ in scan_output_axes]
    for i in range(lengths.pop()):
        results = run_graph(run, body, [*state, *(s[i] for s in sequences), *captured])
        state = list(results[:states])
        for row, value in zip(rows, results[states:], strict=True):
            row.append(value)
    outputs = []
    given = [*state, *sequences, *captured]
    row_shapes = [None if x is None else x.shape[int(states <= k < states + count) :] for k, x in enumerate(given)]
    for k, (row, axis, direction) in enumerate(zip(rows, scan_output_axes, scan_output_directions, strict=True)):
        rows_in_order = row[::-1] if direction else row
        stacked = np.stack(rows_in_order) if row else _no_rows(body, states + k, given, row_shapes)
        outputs.append(np.moveaxis(stacked, 0, axis))
    return (*(s if s is not None else np.zeros(0) for s in state), *outputs)


COMPOSED: dict[str, ComposedKernel] = {"If": if_, "Loop": loop, "Scan": scan}
