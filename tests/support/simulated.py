"""Builds small graphs for the simulated GPU and compares results with those of the graph in fp32."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase as fnmatch
from typing import Any

import numpy as np

from optdnn.config import BuildOptions
from optdnn.ir.evaluate import evaluate
from optdnn.ir.graph import Graph
from optdnn.lowering.choose import TacticChoice
from optdnn.lowering.cuda import Prepared, lower_cuda
from optdnn.optimize import optimize
from optdnn.runtime.cuda.device import facts_for
from optdnn.runtime.cuda.kernel_text.allowed import check_kernels
from optdnn.runtime.file.validate import validate
from optdnn.runtime.program import Program
from optdnn.runtime.simulate.runner import SimulateContext, SimulateRunner
from optdnn.target_name import TargetName
from optdnn.types import Array, is_float

TOLERANCE = {"fp16": 4e-3, "tf32": 4e-3, "bf16": 3e-2, "fp32": 2e-5}
"""The largest error, relative to the largest magnitude of an output, for small networks with about a dozen roundings."""


def lowered(graph: Graph, precision: str = "fp16", target: str = "simulate", **options: Any) -> Program:
    """The checked program of a copy of the graph, after all passes."""
    return passed(graph, precision, target, **options)[1]


def passed(
    graph: Graph,
    precision: str,
    target: str = "simulate",
    choices: Mapping[str, TacticChoice] | None = None,
    **options: Any,
) -> tuple[Graph, Program]:
    """A copy of the graph after all passes, and its program; checked. ``choices``: tactics by signature. Kernels are compiled only
    where ``no_cubins`` is False: most tests look at the program, and the runner of a GPU compiles its kernels."""
    chosen = BuildOptions(**{"target": target, "precision": precision, "no_cubins": True, **options})
    copy = graph.copy()
    optimize(copy, chosen, target)
    program = lower_cuda(copy, chosen, facts_for(TargetName.parse(target)), {}, prepared=Prepared(choices or {}))
    validate(program)
    check_kernels(program)  # an engine may hold every built program
    return copy, program


def calibrated(graph: Graph, precision: str, target: str = "simulate", **options: Any) -> tuple[Graph, Program]:
    """A copy of the graph after all passes, and its checked program. Two random inputs calibrate 8-bit precisions."""
    data = [feeds_of(graph, seed) for seed in (3, 4)] if "8" in precision else None
    return passed(graph, precision, target, calib=data, **options)


def feeds_of(graph: Graph, seed: int = 1) -> dict[str, Array]:
    """Random inputs: floats around 0, integers from 0 to 3."""
    rng = np.random.default_rng(seed)
    feeds: dict[str, Array] = {}
    for i in graph.inputs:
        out = graph.op(i).outputs[0]
        shape, dtype = out.type.static_shape, out.type.dtype
        # An offset per channel, so that pools over positions depend on the input, too.
        offset = rng.standard_normal((*shape[:2], *(1,) * (len(shape) - 2)))
        made = rng.standard_normal(shape) + offset if is_float(dtype) else rng.integers(0, 4, shape)
        feeds[out.name] = made.astype(dtype)
    return feeds


def simulate(program: Program, feeds: dict[str, Array]) -> dict[str, Array]:
    """One run over an arena full of NaN, between fences."""
    results: dict[str, Array] = SimulateContext(SimulateRunner(program), poison=True).run(feeds)
    return results


def results_of(program: Program, graph: Graph) -> Iterator[tuple[Array, Array]]:
    """Each output as the program gives it in ``simulate``, and as the graph gives it in NumPy, for the same inputs."""
    feeds = feeds_of(graph)
    got = simulate(program, feeds)
    for name, want in evaluate(graph, feeds).items():
        yield got[name], want


def check_exact(program: Program, graph: Graph) -> None:
    """The program gives every output of the graph to the bit. Another input changes more than a fifth of its elements."""
    others = evaluate(graph, feeds_of(graph, 2)).values()
    for (got, want), other in zip(results_of(program, graph), others, strict=True):
        np.testing.assert_array_equal(got, want)
        assert (got != other).mean() > 0.2


def check_simulated(
    graph: Graph, precision: str = "fp16", *, tolerance: float | None = None, target: str = "simulate"
) -> Program:
    """Lower, run and compare every output. The bound must be far below the effect of another input. Returns the program."""
    program = lowered(graph, precision, target)
    feeds, other = feeds_of(graph), feeds_of(graph, seed=2)
    expected, different = evaluate(graph, feeds), evaluate(graph, other)
    got = simulate(program, feeds)
    assert list(got) == list(expected)
    for name, want in expected.items():
        a, e = got[name], np.asarray(want)
        assert a.dtype == e.dtype
        assert a.shape == e.shape
        if not is_float(e.dtype):
            np.testing.assert_array_equal(a, e)
            continue
        scale = np.abs(e[np.isfinite(e)]).max(initial=1e-30)
        bound = (tolerance or TOLERANCE[precision]) * float(scale)
        np.testing.assert_allclose(a, e, rtol=0, atol=bound)
        moved = np.abs(np.asarray(different[name], np.float64) - e)
        assert moved[np.isfinite(moved)].max() > 4 * bound, "the output hardly depends on the input"
    return program


def kinds(program: Program) -> list[str]:
    """The kinds of the operators that the steps compute, in order; of weights in parts, the operator that reads them."""
    ops = [s.params["op"] for s in program.steps]
    return [op["attrs"]["of"] if op["kind"] == "WeightsInParts" else op["kind"] for op in ops]


def tactics(program: Program, *kinds: str) -> list[str]:
    """The tactics that run operators of these kinds (of all, if none is given), in order."""
    rows = [row for row in program.meta["tactics"] if not row.get("dropped")]
    return [row["tactic"] for row in rows if not kinds or row["kind"] in kinds]


def step_tactics(program: Program) -> list[str]:
    """The tactics of all steps."""
    return [str(s.params.get("tactic", "")).split(" ")[0] for s in program.steps]


def refusals(program: Program, tactic: str = "*", kind: str = "*") -> list[str]:
    """Reasons why tactics were refused. The patterns select tactics and operators by name."""
    rows = [row for row in program.meta["tactics"] if fnmatch(row["kind"], kind)]
    return [r["reason"] for row in rows for r in row.get("refused", ()) if fnmatch(r["tactic"], tactic)]


def on_host(program: Program, kind: str) -> list[str]:
    """The reasons why operators of this kind run on the CPU."""
    return [row["why"] for row in program.meta["host"]["operators"] if row["kind"] == kind]


def check_not_taken(graph: Graph, tactic: str, because: str, *launches: str, **options: Any) -> None:
    """Lower: the tactic makes no launch, for a reason that contains ``because``, and there are no ``launches`` of these kinds."""
    program = lowered(graph, **options)
    assert not [s for s in program.steps if str(s.params.get("tactic", "")).startswith(tactic)]
    assert not set(launches) & set(kinds(program))
    found = refusals(program, tactic)
    assert any(because in reason for reason in found), found


OTHER_MACHINES_AND_TYPES: tuple[tuple[dict[str, Any], str], ...] = (
    ({"precision": "fp32"}, "16-bit floats"),
    ({"target": "cuda:sm_80", "no_cubins": True}, "sm_80"),
)
"""Build options for which launches of 16-bit floats on Hopper are refused, and the reason."""
