"""The table of operator cases (``tests/ops``) as networks of many cases each, and their faults on a target.

``tests/ops`` must be on the path. ``python -m benchmarks cases`` runs the networks at every precision.
"""

from __future__ import annotations

import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import onnx
from onnx import compose, helper

from optdnn.compare.checks import STEP


def collected(most: int, only: str) -> list[Any]:
    """The cases, at most ``most`` per operator, spread evenly over all of its cases."""
    import onenode  # type: ignore[import-not-found]
    import pytest

    found: list[Any] = []

    def note(case: Any, *_: Any, **__: Any) -> None:
        found.append(case)
        pytest.skip("noted")

    checked, onenode.check_case = onenode.check_case, note
    with redirect_stdout(StringIO()):
        pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(Path(__file__).parents[1] / "ops")])
    onenode.check_case = checked
    by_operator: dict[str, list[Any]] = {}
    for case in found:
        floats = any(x is not None and x.dtype.kind == "f" for x in case.fed.values())
        if floats and (not only or case.op in only.split(",")):
            by_operator.setdefault(case.op, []).append(case)
    picked = []
    for cases in by_operator.values():
        step = max(1, -(-len(cases) // most))
        picked += cases[::step]
    return picked


def together(cases: list[Any]) -> tuple[onnx.ModelProto, dict[str, Any]]:
    """One model of many cases of one opset, and its inputs."""
    made, feeds = onnx.GraphProto(name="cases"), {}
    for k, case in enumerate(cases):
        graph = compose.add_prefix(case.model(), f"c{k}").graph
        for node in graph.node:
            node.name = f"c{k} {case.op}"
        for name, x in case.fed.items():
            feeds[f"c{k}{name}"] = x
            made.input.append(
                helper.make_tensor_value_info(f"c{k}{name}", helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
            )
        made.node.extend(graph.node)
        made.output.extend(graph.output)
        made.initializer.extend(graph.initializer)
    opset = helper.make_opsetid("", cases[0].opset)
    return helper.make_model(made, opset_imports=[opset], ir_version=10), feeds


def tried(cases: list[Any], precision: str, target: str) -> list[dict[str, Any]]:
    """The faults of these cases, one row each. A network that fails is divided into halves."""
    import optdnn

    try:
        model, feeds = together(cases)
        engine = optdnn.build(model, target=target, precision=precision, tactics="heuristic")
        # Another GPU's program cannot run: building it fills the kernel cache.
        return _checked(cases, engine, model, feeds, precision) if target in ("cuda", "simulate") else []
    except Exception as error:
        if len(cases) > 1:
            half = len(cases) // 2
            return [*tried(cases[:half], precision, target), *tried(cases[half:], precision, target)]
        return [_row(cases[0], precision, f"{type(error).__name__}: {error}"[:400])]


def _row(case: Any, precision: str, wrong: str) -> dict[str, Any]:
    shapes = [None if x is None else [x.dtype.name, *x.shape] for x in case.inputs]
    return {
        "op": case.op,
        "opset": case.opset,
        "precision": precision,
        "inputs": shapes,
        "attrs": repr(case.attrs),
        "wrong": wrong,
    }


def _checked(cases: list[Any], engine: Any, model: Any, feeds: dict[str, Any], precision: str) -> list[dict[str, Any]]:
    from onenode import assert_close

    import optdnn

    faults: dict[int, str] = {}
    got = engine.run(feeds)
    if engine.program.target.startswith("cuda"):
        from optdnn.runtime.cuda.runner import CudaRunner
        from optdnn.runtime.cuda.trials.check import check_steps
        from optdnn.runtime.steps.executor import LoadOptions

        for e in check_steps(CudaRunner(engine.program, LoadOptions()).context(), feeds):
            if not e.error <= STEP[precision]:
                of = re.search(r"\bc(\d+) ", f"{e.nodes} ")
                faults[int(of[1]) if of else 0] = f"{e.nodes}: {e.kind} by {e.kernel}: error {e.error:.1e}"
    if precision == "fp32":
        want = optdnn.build(model, target="reference").run(feeds)
        for k, case in enumerate(cases):
            try:
                for i in range(case.outputs):
                    assert_close(got[f"c{k}y{i}"], want[f"c{k}y{i}"], tolerance(case), f"output {i}")
            except AssertionError as error:
                faults[k] = " ".join(str(error).split())[:300]
    else:
        again = engine.run(feeds)
        for k, case in enumerate(cases):
            if any(got[f"c{k}y{i}"].tobytes() != again[f"c{k}y{i}"].tobytes() for i in range(case.outputs)):
                faults[k] = "another run gives something else"
    return [_row(cases[k], precision, text) for k, text in faults.items()]


def tolerance(case: Any) -> Any:
    """The opset of the case's operators."""
    from onenode import import_case

    from optdnn.ops.base import Tol
    from optdnn.ops.table import OPDEFS

    kinds = [op.kind for op in import_case(case).ops() if op.kind in OPDEFS]
    return Tol(max(OPDEFS[k].tol.rtol for k in kinds), max(OPDEFS[k].tol.atol for k in kinds))
