"""Known reasons for which a right engine differs from ONNX Runtime: faults of the oracle, and cases that the judge's nudges
miss.

Each one is a computation on the given network, not a list of seeds. It returns the differing results that it explains.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx

from random_nets.draw import Array, reads_of
from random_nets.instrument import PRODUCTS, clipping, decided, halved, in_half, instrumented, rounding
from random_nets.oracle import Feeds, NoOracleError, Oracle, Results

Off = list[tuple[int, str]]
"""(run, output) of results that differ."""


@dataclass(frozen=True)
class Case:
    """Results that differ: of the network, its runs, what was got and wanted. ``near(got, want, moved)``: the error is not larger
    than what the change that gave ``moved`` does. ``nudge`` is the relative size of a rounding; ``calibration`` the feeds that an
    int8 engine was calibrated with; ``half`` is "fp16" or "bf16" if it computes in 16 bits, else ""."""

    oracle: Oracle
    feeds: Sequence[Feeds]
    got: Sequence[Results]
    want: Sequence[Results]
    off: Off
    nudge: float
    near: Callable[[Array, Array, Sequence[Array]], bool]
    calibration: Sequence[Feeds] = ()
    half: str = ""


def roundings(case: Case) -> Off:
    """Every operator rounds, not only the network's inputs and constants: terms that cancel exactly in float32 (x + (1 - x)) leave
    the rounding of 16 bits, and a normalization of the rest magnifies that. Nudged inputs cancel likewise and show nothing."""
    models = [instrumented(case.oracle.model, rounding(case.nudge, k + 1)) for k in range(4)]
    return _as_far(case, models, case.off)


def outside_calibration(case: Case) -> Off:
    """Values of this run exceed the ranges seen in calibration, and saturate.

    A build calibrates at the sizes of its first profile, and a sum over a longer axis may exceed its range. The float network,
    clipped to these ranges, differs as much, with all values quantized or only the operands of products. Its integers are the
    same.
    """
    if not case.calibration:
        return []
    ranges: dict[str, tuple[float, float]] = {}
    for feed in case.calibration:
        for name, a in values(case.oracle.model, feed).items():
            if a.dtype == np.float32 and a.size and np.isfinite(a).all():
                low, high = ranges.get(name, (0.0, 0.0))
                ranges[name] = min(low, float(a.min())), max(high, float(a.max()))
    read = {name for node in case.oracle.model.graph.node if node.op_type in PRODUCTS for name in node.input}
    clipped = (ranges, {name: r for name, r in ranges.items() if name in read})
    models = [instrumented(case.oracle.model, clipping(some)) for some in clipped]
    return _as_far(case, models, case.off, integers=_follows)


def halves(case: Case) -> Off:
    """Values that are nearly equal become equal in 16 bits, which no nudge makes them. With its inputs and constants, or all
    values, rounded to 16 bits the network gives the same integers, or the same floats up to a few roundings."""
    if not case.half:
        return []
    rounded = replace(case, feeds=[{n: halved(a, case.half) for n, a in feed.items()} for feed in case.feeds])
    models = [in_half(case.oracle.model, case.half, results=results) for results in (False, True)]

    def same(got: Array, want: Array, moved: Sequence[Array]) -> bool:
        return any(_alike(got, m, 4 * case.nudge) for m in moved)

    return _as_far(replace(rounded, near=same), models, case.off, integers=_follows)


def near_equals(case: Case) -> Off:
    """An Equal of values that are nearer to each other than the roundings of the operators before it move them: each such
    element may be either. The network with all of them equal, or all unequal, gives the same."""
    found = []
    rounded = [instrumented(case.oracle.model, rounding(case.nudge, k + 1)) for k in range(4)]
    for k in sorted({k for k, _ in case.off}):
        seen, moved = (values(case.oracle.model, case.feeds[k]), [values(m, case.feeds[k]) for m in rounded])
        open_to: dict[
            str, tuple[Array, Array]
        ] = {}  # result -> (all that may be equal are, all that may be unequal are)
        for node in case.oracle.model.graph.node:
            if node.op_type != "Equal" or not all(n in seen and seen[n].dtype.kind == "f" for n in node.input):
                continue
            (a, b), result = node.input, seen[node.output[0]]
            apart = seen[a] - seen[b]
            near = np.abs(apart) <= np.max([np.abs(m[a] - m[b] - apart) for m in moved], axis=0)
            open_to[node.output[0]] = (result | near, result & ~near)
        if open_to:
            models = [decided(case.oracle.model, {n: both[i] for n, both in open_to.items()}) for i in range(2)]
            found += _as_far(case, models, [o for o in case.off if o[0] == k], integers=_follows)
    return found


def huge_scores(case: Case) -> Off:
    """Attention whose scores exceed 2^30: the score and the maximum of its row are multiplied by a factor before they are
    subtracted, and the rounding of these products overflows the exponential. The results are infinite or no numbers."""
    found = []
    for k, name in case.off:
        if not case.half or np.isfinite(case.got[k][name]).all():
            continue
        seen = values(case.oracle.model, case.feeds[k])
        scores = [
            seen[n] for node in case.oracle.model.graph.node if node.op_type in ("Exp", "Softmax") for n in node.input
        ]
        before = [seen[x] for node in case.oracle.model.graph.node if node.op_type == "Sub" for x in node.input[:1]]
        if any(a.dtype.kind == "f" and a.size and np.abs(a).max() > 2**30 for a in (*scores, *before)):
            found.append((k, name))
    return found


def no_trips(case: Case) -> Off:
    """A Loop without iterations gives sizes of 0 in ONNX Runtime where the model does not declare them. The sizes that rows
    would have had are right as well. A reduction over the iterations makes this visible in a shape."""
    found = []
    for k, name in case.off:
        got, want = case.got[k][name], case.want[k][name]
        same = got.dtype == want.dtype and got.ndim == want.ndim and got.shape != want.shape
        if not same or any(a != b and b != 0 for a, b in zip(got.shape, want.shape, strict=True)):
            continue
        seen = values(case.oracle.model, case.feeds[k])
        marked = {
            n
            for node in case.oracle.model.graph.node
            if node.op_type == "Loop"
            for n in node.output[len(node.input) - 2 :]
            if n and seen[n].shape[:1] == (0,)
        }
        for node in case.oracle.model.graph.node:
            if marked & reads_of(node):
                marked |= set(node.output)
        if name in marked:
            found.append((k, name))
    return found


EXPLANATIONS: tuple[Callable[[Case], Off], ...] = (
    no_trips,
    halves,
    roundings,
    near_equals,
    outside_calibration,
    huge_scores,
)


def explained(case: Case) -> str | None:
    """The names of the explanations that together explain all differences, or None."""
    left, used = case.off, []
    for explanation in EXPLANATIONS:
        try:
            found = explanation(replace(case, off=left))
        except NoOracleError:
            continue  # ONNX Runtime does not accept the changed network, so this explanation cannot be tried
        if found:
            used.append(explanation.__name__)
            left = [o for o in left if o not in found]
        if not left:
            return " and ".join(used)
    return None


def _as_far(
    case: Case,
    models: Sequence[onnx.ModelProto],
    off: Off,
    integers: Callable[[Array, Array, Sequence[Array]], bool] | None = None,
) -> Off:
    """The results of ``off`` that the changed networks explain: floats by ``case.near``, integers by ``integers`` if given."""
    oracles = [Oracle(m) for m in models]
    moved = {k: [o.run(case.feeds[k]) for o in oracles] for k in sorted({k for k, _ in off})}

    def explains(got: Array, want: Array, others: Sequence[Array]) -> bool:
        return (case.near if integers is None or want.dtype.kind == "f" else integers)(got, want, others)

    return [(k, n) for k, n in off if explains(case.got[k][n], case.want[k][n], [m[n] for m in moved[k]])]


def _follows(got: Array, want: Array, moved: Sequence[Array]) -> bool:
    """Each element that differs equals that of a changed network."""
    alike = [m for m in (want, *moved) if (m.dtype, m.shape) == (got.dtype, got.shape)]
    return bool(alike) and bool(np.logical_or.reduce([got == m for m in alike]).all())


def _alike(a: Array, b: Array, error: float) -> bool:
    """Whether two arrays of floats differ by at most ``error``, relative to the largest element."""
    if (
        (a.dtype, a.shape) != (b.dtype, b.shape)
        or a.dtype.kind != "f"
        or not (np.isfinite(a).all() and np.isfinite(b).all())
    ):
        return False
    return bool(np.allclose(a, b, rtol=error, atol=error * float(np.abs(b).max(initial=0))))


def values(model: onnx.ModelProto, feeds: Feeds) -> Results:
    """All values of the network outside of subgraphs, including its inputs. Raises NoOracleError."""
    shown = copy.deepcopy(model)
    known = {o.name for o in shown.graph.output}
    inner = [n for node in shown.graph.node for n in node.output if n and n not in known]
    shown.graph.output.extend(onnx.ValueInfoProto(name=n) for n in inner)
    return {**feeds, **Oracle(shown).run(feeds)}
