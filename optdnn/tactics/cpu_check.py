"""Whether the engines of the cpu target's tactics are right: against each other, and against the NumPy oracle where they differ."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from optdnn.errors import RunError
from optdnn.ir.evaluate import evaluate
from optdnn.ir.graph import Graph, Op
from optdnn.passes.decisions import DECIDES
from optdnn.runtime.engine import Engine
from optdnn.types import BF16, FP16, Array, is_float


def check(
    graph: Graph, engines: Mapping[str, Engine], feeds: Mapping[str, Array], precision: str
) -> tuple[dict[str, str], dict[str, str]]:
    """Tactics whose results are wrong, and those whose results cannot be judged, with the reasons.

    The oracle is asked when no two libraries vouch for each other. A network that selects (a detector on made-up inputs)
    may itself turn a roundoff into another result, or rank what is equal: what differs no more than that is not called wrong.
    """
    limit = {"fp32": 1e-3, "bf16": 0.25}[precision]
    quantized = bool(graph.of_kind(*_ROUNDS))
    if quantized:
        limit = max(
            limit, 0.1
        )  # a value on the edge between two integers falls either way: steps of 1/255, layers deep
    types = {o.type.dtype for op in graph.ops() for o in op.outputs}
    limit = max(
        limit, 2**-5 if BF16 in types else 2**-8 if FP16 in types else 0.0
    )  # a few roundoffs of the model's own
    results: dict[str, dict[str, Array]] = {}
    wrong: dict[str, str] = {}
    for name, engine in engines.items():
        try:
            results[name] = engine.run(feeds)
        except RunError as error:
            wrong[name] = error.message
    libraries = {name.split("/")[0] for name in results}
    first = next(iter(results.values()), None)
    if first is None or (len(libraries) > 1 and all(_distance(r, first) <= limit for r in results.values())):
        return wrong, {}
    oracle = evaluate(graph, feeds)
    distances = {name: _distance(outputs, oracle) for name, outputs in results.items()}
    doubts: dict[str, str] = {}
    own = 0.0
    if any(not d <= limit for d in distances.values()):
        own = _own_error(graph, feeds, oracle, _STEP if quantized else _NUDGE)
        if quantized:  # another result is no nearer than 1: half of that still tells the network from any other
            limit = max(limit, min(_MARGIN * own, 0.5))
    for name, distance in distances.items():
        if distance <= limit:
            continue
        if limit < own and distance <= _MARGIN * own:
            step = _STEP if quantized else _NUDGE
            doubts[name] = (
                f"its result differs from the reference by {distance:.2g} of the largest output, and the network's own by "
                f"{own:.2g} when its input, or what it ranks, changes by {step:.1g}: no made-up input can judge it"
            )
        else:
            wrong[name] = f"its result differs from the reference by {distance:.2g} of the largest output"
    return wrong, doubts


_ROUNDS = ("QuantizeLinear", "DynamicQuantizeLinear", "QLinearConv", "QLinearMatMul")
_NUDGE = 2.0**-20
_STEP = 2.0**-10
"""A nudge of a quarter of a step of 8-bit integers."""
_MARGIN = 4


def _own_error(graph: Graph, feeds: Mapping[str, Array], oracle: Mapping[str, Array], nudge: float = _NUDGE) -> float:
    """How far the reference's own results move when each floating-point input changes by ``nudge`` of itself, or what is ranked
    does: scores that the last layer rounded to the same number are in another order in every library."""
    signs = np.random.default_rng(0)

    def nudged(x: Array) -> Array:
        return (x * (1 + nudge * signs.choice((-1, 1), x.shape))).astype(x.dtype) if is_float(x.dtype) else x

    def ranked(op: Op, operands: list[Array | None]) -> list[Array | None]:
        return [None if x is None else nudged(x) for x in operands] if op.kind in DECIDES else operands

    moved = [evaluate(graph, {name: nudged(x) for name, x in feeds.items()})]
    if graph.of_kind(*DECIDES):
        moved.append(evaluate(graph, feeds, ranked))
    return max(_distance(m, oracle) for m in moved)


def _distance(a: Mapping[str, Array], b: Mapping[str, Array]) -> float:
    """Largest difference over the largest magnitude, over all floating-point outputs; inf where one is not finite."""
    worst = 0.0
    for name, x in a.items():
        y = b[name]
        if not is_float(x.dtype) or x.shape != y.shape or not x.size:
            continue
        x64, y64 = x.astype(np.float64), y.astype(np.float64)
        finite = np.isfinite(y64)
        if not np.array_equal(np.isfinite(x64), finite):
            return float("inf")
        if finite.any():
            scale = float(np.abs(y64[finite]).max()) or 1.0
            worst = max(worst, float(np.abs(x64 - y64)[finite].max()) / scale)
    return worst
