"""The checks of a compiled network on the machine that runs it.

A check works on one program (for an engine for several shapes: the plan for these shapes) and one set of inputs. Results must be
equal to the bit, or their distance is compared with the distance that another input causes. If an engine with another result would
pass as well, the comparison proves nothing and is reported as "not checked".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import onnx

from optdnn.compare.divergence import finite, tolerance_of, widest
from optdnn.errors import OptdnnError, UnsupportedError
from optdnn.importers.onnx import import_model
from optdnn.importers.split_weights import put_together
from optdnn.ir.evaluate import evaluate, promote, promoted_feeds
from optdnn.ir.graph import Graph
from optdnn.lowering.cpu.check import nudged_results, quantizes
from optdnn.lowering.cpu.examine import name_weights
from optdnn.runtime.engine import Engine
from optdnn.runtime.measuring.accuracy import errors_between
from optdnn.runtime.program import Plain, Program, Step
from optdnn.types import Array

PASSED, FAILED, NOT_CHECKED = "passed", "failed", "not checked"
STEP = {"fp32": 2e-5, "tf32": 3e-4, "fp16": 4e-3, "bf16": 3e-2, "int8": 4e-3, "fp8": 4e-3}
"""Largest error of a launch on a GPU, relative to the largest magnitude of its result: a few roundings of its element type. For
8-bit results: the fraction of elements that may be one step off."""
ROUNDOFF = {"fp32": 2.0**-24, "tf32": 2.0**-11, "fp16": 2.0**-11, "bf16": 2.0**-8, "int8": 2.0**-8, "fp8": 2.0**-4,
            "w8": 2.0**-9, "w4": 2.0**-5, "w4a8": 2.0**-5}  # fmt: skip
"""Largest relative error of one rounding."""
ROUNDINGS = 16
"""This many roundings of an output's largest magnitude are never an error."""
OWN = 4
"""An engine may be this many times as far from the exact result as the network is when its inputs are rounded."""


@dataclass(frozen=True)
class Found:
    """The outcome of a check. ``status`` is :data:`PASSED`, :data:`FAILED` or :data:`NOT_CHECKED`; ``text`` gives the finding, or
    the reason why nothing was checked. ``error`` and ``limit`` are relative to the largest magnitude, if the check measures a
    distance."""

    status: str
    text: str
    error: float | None = None
    limit: float | None = None


@dataclass(frozen=True, kw_only=True)
class Check(Found):
    """The outcome of one check. ``case`` names the inputs ("" if there is only one set)."""

    name: str
    case: str

    def to_plain(self) -> dict[str, Plain]:
        """Plain data for JSON: an error that is not finite is None."""
        return {"check": self.name, "case": self.case, **finite({f.name: getattr(self, f.name) for f in fields(Found)})}


def passed(text: str) -> Found:
    return Found(PASSED, text)


def failed(text: str) -> Found:
    return Found(FAILED, text)


def not_checked(text: str) -> Found:
    return Found(NOT_CHECKED, text)


# ---------------------------------------------------------------- to the bit


def differing(got: Mapping[str, Array], want: Mapping[str, Array]) -> list[str]:
    """The outputs that are not equal to the bit."""
    return [
        name
        for name, a in want.items()
        if a.shape != got[name].shape or a.dtype != got[name].dtype or a.tobytes() != got[name].tobytes()
    ]


def same_bits(runs: Iterable[Mapping[str, Array]], want: Mapping[str, Array], ok: str, wrong: str) -> Found:
    """Whether all runs give ``want``. ``ok`` and ``wrong`` are the texts of the result; ``wrong`` follows the outputs' names."""
    names = sorted({name for run in runs for name in differing(run, want)})
    return failed(f"{', '.join(names)} {wrong}") if names else passed(ok)


# ---------------------------------------------------------------- distances


def judge(
    got: Mapping[str, Array],
    want: Mapping[str, Array],
    other: Mapping[str, Array],
    rounded: Sequence[Mapping[str, Array]],
    precision: str,
    tolerance: float | None = None,
) -> Found:
    """Whether results are close to the exact ones. ``other`` are the exact results of another input, and ``rounded`` the exact
    results of this input after one rounding of the precision.

    The limit of an output's error is the largest of three values: ``tolerance`` (default: the precision's) times the distance to
    ``other``'s output, a few roundings, and the effect of rounded inputs. If the limit reaches half of the distance to ``other``'s,
    the comparison proves nothing.
    """
    share = tolerance_of(precision) if tolerance is None else tolerance
    floor = ROUNDINGS * widest(ROUNDOFF, precision)
    worst: tuple[float, float, float, str] | None = None
    blind: list[str] = []
    for name, exact in want.items():
        error = errors_between([got[name]], [exact])[1]
        moved = min(errors_between([other[name]], [exact])[1], 1.0)
        own = max((errors_between([r[name]], [exact])[1] for r in rounded), default=0.0)
        limit = max(share * (moved or 1.0), floor, OWN * own)
        if moved and limit >= moved / 2 and error <= limit:
            blind.append(f"{name} (another input changes it by {moved:.2g}, rounding by up to {limit:.2g})")
            continue
        ratio = error / limit if np.isfinite(limit) else 0.0
        if worst is None or ratio > worst[0]:
            worst = ratio, error, limit, name
    if worst is None:
        return not_checked(f"too close to decide: {'; '.join(blind)}" if blind else "there are no outputs")
    ratio, error, limit, name = worst
    more = f"; too close to decide: {'; '.join(blind)}" if blind else ""
    text = f"{name} is off by {error:.2g} of its largest element, {limit:.2g} is allowed{more}"
    return Found(PASSED if ratio <= 1 else FAILED, text, error, limit)


def exact_results(
    graph: Graph, feeds: Mapping[str, Array], other: Mapping[str, Array], precision: str
) -> tuple[dict[str, Array], dict[str, Array], list[dict[str, Array]]]:
    """In float64: the results of ``feeds``, of ``other``, and of ``feeds`` after a rounding of the precision (of the
    inputs; and of scores that the network ranks, which may be nearly tied)."""
    exact = promote(graph)
    given, amount = promoted_feeds(feeds), widest(ROUNDOFF, precision)
    return evaluate(exact, given), evaluate(exact, promoted_feeds(other)), nudged_results(exact, given, amount)


# ---------------------------------------------------------------- cpu and reference


class Stepwise:
    """A program of the targets cpu and reference, run step by step in its own memory: the memory plan is not used."""

    def __init__(self, engine: Engine):
        self.program = engine.program
        self.sessions = [executor.session() for executor in engine.executors]

    def run(self, feeds: Mapping[str, Array]) -> tuple[dict[str, Array], list[list[Array | None]], list[list[Array]]]:
        """Results by name, then the operands and the results of each step."""
        p = self.program
        values: dict[int, Array | None] = {i: p.blobs[b.blob] for i, b in enumerate(p.buffers) if b.blob is not None}
        values |= {i: np.ascontiguousarray(feeds[s.name]).reshape(feeds[s.name].shape) for s, i in p.inputs}
        read: list[list[Array | None]] = []
        made: list[list[Array]] = []
        for step, session in zip(p.steps, self.sessions, strict=True):
            operands = [values.get(i) for i in step.inputs]
            results = [a.copy() for a in session.run(operands, [None] * len(step.outputs))]
            read.append(operands)
            made.append(results)
            values.update(zip(step.outputs, results, strict=True))
        return {s.name: np.asarray(values[i]) for s, i in p.outputs}, read, made


def library_steps(
    program: Program,
    feeds: Sequence[list[Array | None]],
    other: Sequence[list[Array | None]],
    made: Sequence[list[Array]],
) -> Found:
    """Each step of a CPU library against its own ONNX model in NumPy and float64, on the step's operands. ``feeds`` and
    ``other`` are the operands of each step in two runs, ``made`` its results in the first run."""
    found: list[Found] = []
    for k, step in enumerate(program.steps):
        if step.executor == "reference":
            continue
        try:
            graph = library_graph(step, program)
            names, results = step.params["inputs"], step.params["outputs"]
            one, two = (dict(zip(names, run[k], strict=True)) for run in (feeds, other))
            precision = "int8" if quantizes(graph) else str(step.params["precision"])
            judged = judge(
                dict(zip(results, made[k], strict=True)), *exact_results(graph, one, two, precision), precision
            )
        except UnsupportedError as error:
            judged = not_checked(f"NumPy does not evaluate its model: {error.message}")
        found.append(replace(judged, text=f"step {k} ({step.executor}): {judged.text}"))
    if not found:
        return not_checked("every step is a NumPy kernel, which is its own meaning")
    return worst_of(found, f"steps of libraries ({len(found)}) against their models in NumPy, float64")


def worst_of(found: Sequence[Found], what: str) -> Found:
    """One outcome of several: the failed ones, otherwise the worst one that was checked."""
    wrong = [f for f in found if f.status == FAILED]
    if wrong:
        return replace(wrong[0], text=f"{len(wrong)} of {len(found)} fail: {'; '.join(f.text for f in wrong[:3])}")
    checked = [f for f in found if f.status == PASSED]
    if not checked:
        return replace(found[0], text="; ".join(f.text for f in found[:3]))
    worst = max(checked, key=lambda f: (f.error or 0.0) / (f.limit or 1.0))
    rest = len(found) - len(checked)
    return replace(worst, text=f"{what}{f' ({rest} not checked)' if rest else ''}; worst: {worst.text}")


def library_graph(step: Step, program: Program) -> Graph:
    """The network of a CPU library's step, read from the ONNX model and the weights in the engine."""
    p = step.params
    weights = {str(name): program.blobs[number] for name, number in p["weights"].items()}
    proto = onnx.ModelProto.FromString(program.blobs[p["model"]].tobytes())
    name_weights(proto.graph, weights)
    return import_model(put_together(proto.SerializeToString(), weights, f"the model of a {step.executor} step"))


def poisoned_outputs(engine: Engine, feeds: Mapping[str, Array], want: Mapping[str, Array]) -> Found:
    """Whether results depend on the earlier contents of the caller's output memory."""
    context = engine.context()
    runs = []
    for byte in (0xFF, 0x3C):
        out = {name: np.frombuffer(bytearray([byte]) * a.nbytes, a.dtype).reshape(a.shape) for name, a in want.items()}
        runs.append({name: a.copy() for name, a in context.run(feeds, out=out).items()})
    return same_bits(
        runs,
        want,
        "results do not depend on the earlier contents of output memory",
        "depend on the earlier contents of output memory",
    )


# ---------------------------------------------------------------- simulate


def simulated_apart(program: Program, feeds: Mapping[str, Array], want: Mapping[str, Array]) -> Found:
    """The program with every buffer in its own memory, step by step in the steps' order."""
    from optdnn.runtime.simulate.runner import SimulateContext, SimulateRunner

    runs = [SimulateContext(SimulateRunner(apart(program))).run(feeds)]
    return same_bits(runs, want, "the same with every buffer in its own memory", "depend on which buffers share memory")


def apart(program: Program) -> Program:
    """The program with no two buffers of its arena in one place, and without lanes."""
    end, buffers = 0, []
    for b in program.buffers:
        if b.offset is not None:
            b, end = replace(b, offset=end), end + -(-(b.nbytes or 0) // 256) * 256
        buffers.append(b)
    return replace(program, buffers=tuple(buffers), arena_bytes=end, lanes=())


def simulated_poisoned(program: Program, feeds: Mapping[str, Array], want: Mapping[str, Array], runs: int) -> Found:
    """Runs on an arena full of NaN, in several of the orders that the lanes allow."""
    from optdnn.runtime.simulate.runner import SimulateContext, SimulateRunner

    runner = SimulateRunner(program)
    seeds = range(runs if program.lanes else 1)
    found = [SimulateContext(runner, poison=True, seed=seed).run(feeds) for seed in seeds]
    orders = f", in {len(found)} orders" if len(found) > 1 else ""
    ok = f"nothing is read before it is written, nor written outside of the arena{orders}"
    return same_bits(found, want, ok, "depend on the arena's earlier contents, or on the order of lanes")


# ---------------------------------------------------------------- on a GPU


def launches(context: Any, feeds: Mapping[str, Array], precision: str) -> Found:
    """Each launch alone against its step's meaning; its results are filled with NaN before the launch."""
    from optdnn.runtime.cuda.trials.check import check_steps

    limit = widest(STEP, precision)
    steps = check_steps(context, feeds)
    if not steps:
        return not_checked("nothing is launched on the GPU")
    wrong = [s for s in steps if not s.error <= limit]
    worst = max(steps, key=lambda s: s.error)
    if wrong:
        shown = "; ".join(f"step {s.step} ({s.kind} by {s.kernel}, {s.nodes}) by {s.error:.2g}" for s in wrong[:3])
        return Found(FAILED, f"{len(wrong)} of {len(steps)} launches are off: {shown}", worst.error, limit)
    text = f"{len(steps)} launches; worst: {worst.kind} by {worst.kernel}, {worst.error:.2g} of {limit:.2g}"
    return Found(PASSED, text, worst.error, limit)


def singly(context: Any, feeds: Mapping[str, Array]) -> Found:
    """Single launches against the CUDA graph."""
    from optdnn.runtime.cuda.trials.check import run_singly

    graph = context.run(feeds)
    alone = run_singly(context, feeds)
    want = {name: graph[name] for name in alone}
    return same_bits(
        [alone], want, "single launches give the same as the CUDA graph", "differ between single launches and the graph"
    )


def arena(context: Any, feeds: Mapping[str, Array]) -> Found:
    """Runs on an arena full of NaN and of another value, between fences."""
    from optdnn.runtime.cuda.trials.check import check_arena

    faults = [*check_arena(context.runner, feeds), *overwritten(context.runner.program)]
    ok = "results do not depend on the earlier contents of memory, and nothing is written outside of the arena"
    return failed("; ".join(faults)) if faults else passed(ok)


def overwritten(program: Program) -> list[str]:
    """Buffers of the arena that a step overwrites before their last reader, in words. (The freedom of lanes is checked when an
    engine is loaded: :mod:`optdnn.runtime.steps.lanes`.)"""
    places = {i: b for i, b in enumerate(program.buffers) if b.offset is not None and b.nbytes}
    writes = {i: [k for k, s in enumerate(program.steps) if i in s.outputs] for i in places}
    reads = {i: [k for k, s in enumerate(program.steps) if i in s.inputs] for i in places}
    found = []
    for i, a in places.items():
        if not writes[i] or not reads[i]:
            continue
        first, last, begin, end = writes[i][0], reads[i][-1], a.offset or 0, (a.offset or 0) + (a.nbytes or 0)
        for j, b in places.items():
            there = j != i and (b.offset or 0) < end and begin < (b.offset or 0) + (b.nbytes or 0)
            if there and any(first < k < last for k in writes[j]):
                found.append(f"{a.name!r} is overwritten by {b.name!r} before it is read")
    return found


# ---------------------------------------------------------------- rows of a batch


def rows(
    run: Callable[[Mapping[str, Array]], Mapping[str, Array]],
    feeds: Mapping[str, Array],
    want: Mapping[str, Array],
    sizes: Sequence[int],
    exact: Callable[[Mapping[str, Array]], Mapping[str, Array]] | None,
    tolerance: float,
) -> Found:
    """Whether a row of the batch gives the same bits at every position, and in batches of the other ``sizes``.

    The batch is axis 0 of the first input, and of every other input and output of that size. ``exact``: the model in float64;
    it shows whether axis 0 is a batch at all.
    """
    first = next(iter(feeds.values()), None)
    count = first.shape[0] if first is not None and first.ndim else 0
    if count < 2:
        return not_checked("the batch has one row")
    without = [name for name, a in want.items() if not a.ndim or a.shape[0] != count]
    if without:
        return not_checked(f"output {without[0]} has no row for each of the {count} of the batch")
    batched = {name for name, a in feeds.items() if a.ndim and a.shape[0] == count}

    def picked(order: Sequence[int]) -> dict[str, Array]:
        return {n: np.ascontiguousarray(a[list(order)]) if n in batched else a for n, a in feeds.items()}

    orders = [list(range(count))[::-1], [count // 2] * count, *(list(range(n)) for n in sizes if 0 < n < count)]
    wrong, far = 0, 0.0
    for order in orders:
        got = run(picked(order))
        for name, a in want.items():
            wrong += sum(got[name][i].tobytes() != a[row].tobytes() for i, row in enumerate(order))
            far = max(far, errors_between([got[name]], [a[order]])[1])
    if not wrong:
        return passed(f"{sum(map(len, orders))} rows give the same bits in other places and batches")
    if exact is not None:
        one, two = exact(feeds), exact(picked(orders[0]))
        if any(errors_between([two[n]], [one[n][::-1]])[1] > 1e-9 for n in one):
            return not_checked("axis 0 of the model's inputs is not a batch of rows")
    elif far > tolerance:
        return not_checked(f"rows differ by {far:.2g}: axis 0 may not be a batch of rows (--model shows it)")
    return failed(f"{wrong} rows of {sum(map(len, orders))} change with their place or the size of the batch")


def attempt(check: Callable[[], Found]) -> Found:
    """Run a check; it fails if it raises one of optdnn's errors."""
    try:
        return check()
    except OptdnnError as error:
        return failed(f"{type(error).__name__}: {error.message}")
