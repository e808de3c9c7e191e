"""The arithmetic of programs for GPUs, to compare programs of different batch sizes without a GPU."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import onnx

from optdnn.config import BuildOptions
from optdnn.importers.onnx import import_model
from optdnn.lowering.cuda import emit_program
from optdnn.optimize import optimize
from optdnn.runtime.cuda.device import facts_for
from optdnn.runtime.program import Program
from optdnn.target_name import TargetName

MOVES = frozenset({"Concat", "Copies", "Copy"})
"""Meanings of steps that move elements and compute nothing."""


def program_at(model: onnx.ModelProto, shapes: Mapping[str, Sequence[int]], **options: Any) -> Program:
    """The program for these shapes, before launches are joined: those that are joined round as before."""
    given = BuildOptions(**{"target": "cuda:sm_90a", "tactics": "heuristic", "no_cubins": True, **options})
    graph = import_model(model, shapes=shapes)
    optimize(graph, given, given.target)
    return emit_program(graph, given, facts_for(TargetName.parse(given.target)), {}).program


def arithmetic(program: Program) -> Counter[str]:
    """The steps that compute, as a multiset: meaning with all stages, tactic, and dtypes of operands and results.

    A configuration is not part of it: with ``row_invariant``, those that are offered sum a row in one order."""
    return Counter(text for step in program.steps if (text := _text(program, step)))


def _text(program: Program, step: Any) -> str:
    if step.executor != "cuda":
        return f"{step.executor} {step.params.get('kind', '')}" if step.executor == "host" else ""
    op, buffers = step.params["op"], [*step.inputs, *step.outputs]
    if op["kind"] in MOVES or _widens(op):
        return ""
    dtypes = [
        [None if view is None else str(program.buffers[buffers[view[0]]].dtype) for view in step.params[side]]
        for side in ("reads", "writes")
    ]
    tactic = step.params.get("tactic", "").split(" ")[0]
    return f"{op['kind']} {json.dumps(op['attrs'], sort_keys=True, default=str)} {tactic} {dtypes}"


def _widens(op: Mapping[str, Any]) -> bool:
    """Whether a step only converts to fp32. This is exact, and the step before it may do it."""
    stages = [stage["stage"] for stage in op["attrs"].get("epilogue", ())]
    alone = op["kind"] == "Pointwise" and not op["attrs"]["prologue"] and len(stages) == 1
    return alone and stages[0][0] == "Cast" and stages[0][2]["to"] == {"dtype": "fp32"}
