"""Check the engines of the cpu target's tactics: against each other, and against the NumPy oracle if they differ.

A quantized network also runs smaller inputs, because made-up inputs may saturate it. If sizes depend on the data, each engine
runs a sequence of inputs that make these sizes zero, smaller and larger. The memory of results is overwritten between runs, so
that a result left over from an earlier run cannot pass for a correct one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from optdnn.errors import RunError
from optdnn.ir.evaluate import evaluate
from optdnn.ir.graph import Graph, Op
from optdnn.lowering.cpu.trials import Trial, TrialLost
from optdnn.lowering.cpu.unsafe import sized_by_data
from optdnn.passes.support.decisions import DECIDES, decides
from optdnn.types import BF16, FP16, Array, is_float

ORACLE_SECONDS = 20.0
"""How long the oracle may take for further inputs. After that, libraries that agree are taken to be right."""
FEW = 0.01
"""The share of an output's integers that may change by roundoff of the floats that they come from."""


def check(
    graph: Graph, trials: Mapping[str, Trial], feeds: Mapping[str, Array], precision: str
) -> tuple[dict[str, str], dict[str, str]]:
    """Tactics with wrong results, and tactics with results that cannot be judged, each with the reason.

    The oracle is asked when no two libraries vouch for each other. A network that selects (a detector on made-up inputs)
    may itself turn a roundoff into another result, or rank equal values: a difference no larger than that is not called wrong.
    """
    judge = _Judge(graph, precision)
    start = time.perf_counter()
    wrong, doubts = judge(trials, feeds)
    now = time.perf_counter()
    deadline = now + ORACLE_SECONDS
    further: list[tuple[str, Mapping[str, Array]]] = []
    if judge.quantized and now - start < ORACLE_SECONDS:
        further.append(("smaller inputs", {n: (a / 2).astype(a.dtype) if _is_data(a) else a for n, a in feeds.items()}))
    if sized_by_data(graph):
        further += _sequence(feeds)
    for what, inputs in further:
        left = {name: trial for name, trial in trials.items() if name not in wrong}
        late = time.perf_counter() > deadline
        found, unsure = judge(left, inputs, must=False, may_ask=not late)
        wrong |= {name: f"{reason}, on {what}" for name, reason in found.items()}
        doubts |= {name: reason for name, reason in unsure.items() if name not in doubts}
    return wrong, {name: reason for name, reason in doubts.items() if name not in wrong}


def _sequence(feeds: Mapping[str, Array]) -> Iterator[tuple[str, dict[str, Array]]]:
    """Inputs that probably select nothing, then inputs that select something, and so on, each with a description."""
    given = "the made-up inputs once more"
    yield "inputs of zeros", {n: _filled(a, 0) for n, a in feeds.items()}
    yield given, dict(feeds)
    yield "negative inputs", {n: -np.abs(a) if _is_data(a) else _filled(a, 0) for n, a in feeds.items()}
    yield "positive inputs", {n: np.abs(a) if _is_data(a) else _filled(a, 1) for n, a in feeds.items()}
    yield "inputs of zeros", {n: _filled(a, 0) for n, a in feeds.items()}
    yield given, dict(feeds)


def _filled(array: Array, value: int) -> Array:
    """The array with every element set to ``value`` if it holds data or truth values; other arrays stay."""
    return np.full_like(array, value) if _is_data(array) or array.dtype == np.bool_ else array


def _is_data(array: Array) -> bool:
    """Whether an array holds data. Integers may be sizes or positions, and short float vectors scales or thresholds: not every
    value is valid for these."""
    return is_float(array.dtype) and (array.ndim > 1 or array.size > _FEW_FLOATS)


def quantizes(graph: Graph) -> bool:
    """Whether operators round values to integers, so that a roundoff may become a whole step: they quantize, or round the rows
    of a product."""
    return bool(graph.of_kind(*_ROUNDS)) or any(op.attrs.rounded_rows for op in graph.of_kind("PackedMatMul"))


def nudged_results(graph: Graph, feeds: Mapping[str, Array], nudge: float) -> list[dict[str, Array]]:
    """The NumPy results of ``graph`` with each float of the inputs changed by ``nudge`` of itself, up or down. If the graph ranks
    values, also the results with the ranked values changed. If no input is a float (tokens), also those of
    :func:`_nudged_everywhere`."""
    nudged = _nudger(nudge, 0)

    def ranked(op: Op, operands: list[Array | None]) -> list[Array | None]:
        return _each(nudged, operands) if op.kind in DECIDES else operands

    found = [evaluate(graph, {name: nudged(x) for name, x in feeds.items()})]
    if graph.of_kind(*DECIDES):
        found.append(evaluate(graph, feeds, ranked))
    if not any(is_float(x.dtype) for x in feeds.values()):
        found.append(_nudged_everywhere(graph, feeds, nudge, 0))
    return found


def _nudged_everywhere(graph: Graph, feeds: Mapping[str, Array], nudge: float, seed: int) -> dict[str, Array]:
    """The results with each float operand that holds data changed by ``nudge`` of itself, up or down. Other operands stay: a
    scale of Resize that is a little smaller gives a smaller image."""
    nudged = _nudger(nudge, seed)
    return evaluate(graph, feeds, lambda _, operands: _each(lambda x: nudged(x) if _is_data(x) else x, operands))


def _each(change: Callable[[Array], Array], operands: list[Array | None]) -> list[Array | None]:
    return [None if x is None else change(x) for x in operands]


def _nudger(nudge: float, seed: int) -> Callable[[Array], Array]:
    """A function that changes each float of an array by ``nudge`` of itself, up or down. Other arrays stay."""
    signs = np.random.default_rng(seed)

    def nudged(x: Array) -> Array:
        if not is_float(x.dtype):
            return x
        with np.errstate(over="ignore"):  # a mask's largest number stays as it is
            moved = (x * (1 + nudge * signs.choice((-1, 1), x.shape))).astype(x.dtype)
        return np.where(np.isfinite(moved), moved, x)

    return nudged


class _Judge:
    """Compares results of one graph with each other and with the oracle."""

    def __init__(self, graph: Graph, precision: str):
        self.graph = graph
        self.quantized = quantizes(graph)
        limit = {"fp32": 1e-3, "bf16": 0.25}[precision]
        if self.quantized:  # a value on the edge between two integers falls either way: steps of 1/255, layers deep
            limit = max(limit, _STEPS)
        types = {o.type.dtype for op in graph.ops() for o in op.outputs}
        # A few roundoffs of the model's own types.
        self.limit = max(limit, 2**-5 if BF16 in types else 2**-8 if FP16 in types else 0.0)
        self.step = 1 if self.quantized else 0
        self.few = FEW if any(is_float(t) for t in types) else 0.0

    def __call__(
        self, trials: Mapping[str, Trial], feeds: Mapping[str, Array], *, must: bool = True, may_ask: bool = True
    ) -> tuple[dict[str, str], dict[str, str]]:
        """Like :func:`check`, on only these inputs. ``must``: a library has to accept these inputs; otherwise an error is not
        counted if the oracle raises one, too. ``may_ask``: there is time for the oracle."""
        results: dict[str, dict[str, Array]] = {}
        failed: dict[str, str] = {}
        lost: dict[str, str] = {}
        for name, trial in trials.items():
            try:
                results[name] = trial.run(feeds, poison=True)
            except TrialLost as error:
                lost[name] = error.message
            except RunError as error:
                failed[name] = error.message
        libraries = {name.split("/")[0] for name in results}
        first = next(iter(results.values()), None)
        agree = first is not None and all(self._difference(r, first).size <= self.limit for r in results.values())
        if agree and len(libraries) > 1:
            return {**lost, **failed}, {}
        if not may_ask or not (results or failed):
            return lost, {}
        try:
            oracle = evaluate(self.graph, feeds)
        except RunError as error:
            doubt = f"the reference does not take the made-up inputs ({error.message}): its result cannot be checked"
            return ({**lost, **failed}, dict.fromkeys(results, doubt)) if must else (lost, {})
        wrong, doubts = self._held_against(oracle, results, feeds)
        return {**lost, **failed, **wrong}, doubts

    def _held_against(
        self, oracle: Mapping[str, Array], results: Mapping[str, Mapping[str, Array]], feeds: Mapping[str, Array]
    ) -> tuple[dict[str, str], dict[str, str]]:
        limit = self.limit
        differences = {name: self._difference(outputs, oracle) for name, outputs in results.items()}
        wrong: dict[str, str] = {}
        doubts: dict[str, str] = {}
        own = 0.0
        step = _STEP if self.quantized else _NUDGE
        if any(not d.size <= limit for d in differences.values()):
            own = self._own_error(feeds, oracle, step, max(d.size for d in differences.values()) / _MARGIN)
            if self.quantized:  # another network's results differ by at least 1: half of that still tells them apart
                limit = max(limit, min(_MARGIN * own, 0.5))
        for name, d in differences.items():
            if d.size <= limit:
                continue
            if limit < own and d.size <= _MARGIN * own:
                doubts[name] = (
                    f"{d.what}, and the reference's own result differs by {own:.2g} of the largest output if its inputs, or the "
                    f"values that it ranks, change by {step:.1g}: no made-up input can judge it"
                )
            else:
                wrong[name] = d.what
        return wrong, doubts

    def _own_error(self, feeds: Mapping[str, Array], oracle: Mapping[str, Array], nudge: float, enough: float) -> float:
        """How far the reference's own results move when each floating-point input, or each ranked value, changes by ``nudge`` of
        itself. Scores that the last layer rounded to the same number are in another order in every library. If the results move
        by less than ``enough``, a network that decides runs a few more times with roundoff in all of its operators: equal
        inputs (an image of zeros) give nearly equal scores and boxes, and each library orders these differently."""
        own = max(self._difference(moved, oracle).size for moved in nudged_results(self.graph, feeds, nudge))
        asked = _ROUNDINGS if any(decides(self.graph, op) for op in self.graph.ops()) else 0
        for seed in range(asked):
            if own >= enough:
                break
            own = max(own, self._difference(_nudged_everywhere(self.graph, feeds, _NUDGE, seed), oracle).size)
        return own

    def _difference(self, a: Mapping[str, Array], b: Mapping[str, Array]) -> _Difference:
        """The largest difference of ``a`` from ``b``, relative to the largest magnitude, over all outputs; inf if types, shapes or
        the positions of finite values differ. Integers of a quantized network may be off by one."""
        worst = _Difference(0.0, "")
        for name, x in a.items():
            y = b[name]
            if x.dtype != y.dtype or x.shape != y.shape:
                found = f"{x.dtype}{list(x.shape)}, that of the reference {y.dtype}{list(y.shape)}"
                return _Difference(float("inf"), f"its result {name!r} is {found}")
            if not x.size or x.dtype.kind not in "fiubV":
                continue
            found_here = self._floats(x, y) if is_float(x.dtype) else self._integers(name, x, y)
            if found_here.size > worst.size:
                worst = found_here
        return worst

    @staticmethod
    def _floats(x: Array, y: Array) -> _Difference:
        x64, y64 = x.astype(np.float64), y.astype(np.float64)
        finite = np.isfinite(y64)
        size = 0.0
        if not np.array_equal(np.isfinite(x64), finite):
            size = float("inf")
        elif finite.any():
            scale = float(np.abs(y64[finite]).max()) or 1.0
            size = float(np.abs(x64 - y64)[finite].max()) / scale
        return _Difference(size, f"its result differs from the reference by {size:.2g} of the largest output")

    def _integers(self, name: str, x: Array, y: Array) -> _Difference:
        x64, y64 = x.astype(np.float64), y.astype(np.float64)
        apart = np.abs(x64 - y64)
        share = float((apart > self.step).mean())
        if share <= self.few and not self.quantized:
            return _Difference(0.0, "")
        size = max(float(apart.max()) - self.step, 0.0) / (float(np.abs(y64).max()) or 1.0)
        return _Difference(
            size,
            f"its result {name!r} differs from the reference in {share:.1%} of its integers, by {apart.max():g} at most",
        )


@dataclass(frozen=True)
class _Difference:
    """How far results are apart, as a number and in words."""

    size: float
    what: str


_STEPS = 0.05
"""About twelve steps of 8-bit integers."""
_ROUNDS = ("QuantizeLinear", "DynamicQuantizeLinear", "QLinearConv", "QLinearMatMul")
_NUDGE = 2.0**-20
_STEP = 2.0**-10
"""A nudge of a quarter of a step of 8-bit integers."""
_MARGIN = 4
_ROUNDINGS = 3
"""How often a network that decides is run with other roundoff."""
_FEW_FLOATS = 16
"""A float vector with at most this many elements may be something other than data."""
