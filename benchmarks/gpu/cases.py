"""The operator case table (``tests/ops``) on a GPU at every precision: launches beside their meaning, results beside ``reference``.

    python benchmarks/gpu/cases.py OUT.json [--precisions fp32,tf32,fp16,bf16] [--most 6] [--only Resize] [--seconds 90]

The cases are those that the operator tests check (collected by running these), at most ``--most`` of an operator. Many make one
network whose parts have nothing to do with one another, so that engines are few. At each precision every launch is held against
NumPy's result on the GPU's own operands, poisoned with NaN first; at fp32 the results also against ``reference``, with the
operator's own tolerance.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from networks import STEP
from onnx import helper, numpy_helper
from targets import facts

TESTS = Path(__file__).parents[2] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "ops")]
TOGETHER = 24
"""Cases in a network."""


def collected(most: int, only: str) -> list[Any]:
    """The cases, at most ``most`` of an operator, spread over those that there are."""
    import onenode  # type: ignore[import-not-found]
    import pytest

    found: list[Any] = []

    def note(case: Any, *_: Any, **__: Any) -> None:
        found.append(case)
        pytest.skip("noted")

    checked, onenode.check_case = onenode.check_case, note
    with redirect_stdout(StringIO()):
        pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(TESTS / "ops")])
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
    nodes, inputs, outputs, constants = [], [], [], []
    feeds: dict[str, Any] = {}
    for k, case in enumerate(cases):
        model = case.model()
        for node in model.graph.node:
            renamed = onnx.NodeProto()
            renamed.CopyFrom(node)
            del renamed.input[:], renamed.output[:]
            renamed.input.extend(f"c{k}{n}" if n else "" for n in node.input)
            renamed.output.extend(f"c{k}{n}" for n in node.output)
            renamed.name = f"c{k} {case.op}"
            nodes.append(renamed)
        for name, x in case.fed.items():
            inputs.append(
                helper.make_tensor_value_info(f"c{k}{name}", helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
            )
            feeds[f"c{k}{name}"] = x
        for value in model.graph.output:
            kept = onnx.ValueInfoProto()
            kept.CopyFrom(value)
            kept.name = f"c{k}{value.name}"
            outputs.append(kept)
        for tensor in model.graph.initializer:
            constants.append(numpy_helper.from_array(numpy_helper.to_array(tensor), f"c{k}{tensor.name}"))
    graph = helper.make_graph(nodes, "cases", inputs, outputs, constants)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", cases[0].opset)])
    made.ir_version = min(10, made.ir_version)
    return made, feeds


def tried(cases: list[Any], precision: str, target: str) -> list[dict[str, Any]]:
    """What is wrong with these cases, one row each; a network that fails is tried in halves."""
    import optdnn

    try:
        model, feeds = together(cases)
        engine = optdnn.build(model, target=target, precision=precision, tactics="heuristic")
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
        from optdnn.runtime.cuda.check import check_steps
        from optdnn.runtime.cuda.runner import CudaRunner
        from optdnn.runtime.executor import LoadOptions

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
    """That of the operators that the case is made of."""
    from onenode import import_case

    from optdnn.ops.base import Tol
    from optdnn.ops.table import OPDEFS

    kinds = [op.kind for op in import_case(case).ops() if op.kind in OPDEFS]
    return Tol(max(OPDEFS[k].tol.rtol for k in kinds), max(OPDEFS[k].tol.atol for k in kinds))


def job(cases: list[Any], precision: str, target: str, until: float) -> tuple[int, list[dict[str, Any]]]:
    """How many cases were tried, and those that are wrong."""
    if time.time() > until:
        return 0, []
    return len(cases), tried(cases, precision, target)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--precisions", default="fp32,tf32,fp16,bf16")
    parser.add_argument("--most", type=int, default=6)
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=float, default=90, help="begin nothing after this many")
    parser.add_argument(
        "--target", default="cuda", help="one with an architecture, cuda:sm_90a: only fills the kernel cache"
    )
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) * 7 // 8))
    args = parser.parse_args()
    begin = time.time()
    cases = collected(args.most, args.only)
    print(f"{len(cases)} cases of {len({c.op for c in cases})} operators, {time.time() - begin:.0f} s", flush=True)
    by_opset: dict[int, list[Any]] = {}
    for case in cases:
        by_opset.setdefault(case.opset, []).append(case)
    groups = [g[i : i + TOGETHER] for g in by_opset.values() for i in range(0, len(g), TOGETHER)]
    tried_of: Counter[str] = Counter()
    wrong: list[dict[str, Any]] = []
    with ProcessPoolExecutor(args.workers) as pool:
        jobs = {
            pool.submit(job, group, precision, args.target, begin + args.seconds): precision
            for precision in args.precisions.split(",")
            for group in groups
        }
        for done in as_completed(jobs):
            count, rows = done.result()
            tried_of[jobs[done]] += count
            wrong += rows
            for row in rows:
                print(json.dumps(row), flush=True)
    operators = sorted({c.op for c in cases})
    args.out.write_text(
        json.dumps(
            {**facts(), "cases": len(cases), "operators": operators, "tried": tried_of, "wrong": wrong}, indent=1
        )
        + "\n"
    )
    for precision in args.precisions.split(","):
        bad = sum(row["precision"] == precision for row in wrong)
        print(f"{precision}: {tried_of[precision] - bad} of {tried_of[precision]} right ({len(cases)} cases)")
    print(f"{time.time() - begin:.0f} s")
    return 1 if wrong or any(tried_of[p] < len(cases) for p in args.precisions.split(",")) else 0


if __name__ == "__main__":
    np.seterr(all="ignore")
    sys.exit(main())
