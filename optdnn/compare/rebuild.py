"""One side of a comparison node by node: the graph that an engine file was built from, and how to build such engines again.

The comparison itself is :mod:`optdnn.compare.divergence`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from optdnn.compare.divergence import Side
from optdnn.config import BuildOptions, Progress
from optdnn.errors import UsageError
from optdnn.importers.asked import asked_model
from optdnn.importers.onnx import import_model
from optdnn.ir.digest import graph_digest
from optdnn.ir.graph import Graph
from optdnn.optimize import calibrated, operand_moments, optimize
from optdnn.passes.assign_precision import AssignPrecision
from optdnn.passes.base import Moments
from optdnn.passes.support.precision import PrecisionPlan
from optdnn.passes.support.ranges import Calibration
from optdnn.precision.targets import assigned
from optdnn.runtime.engine import Engine
from optdnn.runtime.file.format import read
from optdnn.runtime.program import Program
from optdnn.runtime.steps.executor import LoadOptions
from optdnn.target_name import TargetName


def side_of(path: Path, model: Path, options: BuildOptions, say: Progress = lambda text: None) -> Side:
    """The exact part of the graph that an engine file was built from, and how to build an engine of it in the same way (target,
    library, threads, precision of each op). Engines for a GPU that is not present are built to run in NumPy.

    Raises UsageError if the engine was built from another model, or if the calibration data of an int8 engine is missing.
    """
    program = read(path, verify=False)
    exact = import_model(asked_model(model, options), shapes=options.shapes)
    optimize(exact, options, program.target, stop_before=AssignPrecision.name)
    told = program.meta.get("precision")
    plan = PrecisionPlan.from_json(told["plan"]) if isinstance(told, Mapping) else PrecisionPlan()
    calibration = _calibration(exact, plan, program, options, say)
    moments = _moments(program, options, say)
    final, _ = assigned(exact, plan, program.target, calibration, options.opt_level, moments=moments)
    if options.stop_after is None and graph_digest(final) != program.meta.get("model", {}).get("digest"):
        raise UsageError(
            f"{model} is not what {path} was built from, or another optdnn built it"
            + (" (or its calibration data is not the same)" if plan.quantizes or moments is not None else ""),
            hint="build the engine again",
        )

    # A library in bf16 keeps the producers of outputs in fp32, and here every value is an output. Types in the graph prevent that.
    typed = replace(plan, base="fp32") if program.target == "cpu" and plan.default == plan.base == "bf16" else plan

    def engine_of(graph: Graph) -> Engine:
        made, _ = assigned(graph, typed, program.target, calibration, options.opt_level, moments=moments)
        return _made(made, typed, program, options)

    return Side(path.name, exact, engine_of)


def _calibration(
    graph: Graph, plan: PrecisionPlan, program: Program, options: BuildOptions, say: Progress
) -> Calibration | None:
    """The ranges that an engine was built with, computed once more."""
    given = plan.quantizes or "calibrator" in program.meta.get("options", ())
    if not (given and plan.uses_ranges(TargetName.parse(program.target).on_gpu)):
        return None
    if options.calib is None:
        raise _data_missing(program)
    from optdnn.calibration import input_specs
    from optdnn.calibration.images import pictures_of
    from optdnn.precision.samples import halves

    data: Any = options.calib
    if "auto" in program.meta:
        data = dict(halves(options.calib, input_specs(graph), options.labels, pictures_of(options))[0].feeds)
    return calibrated(graph, data, plan.quantizes, options, say)


def _moments(program: Program, options: BuildOptions, say: Progress) -> Moments | None:
    """A function that finds second moments, if the engine's weights were rounded with them."""
    told = program.meta.get("precision")
    if not isinstance(told, Mapping) or "weights" not in told.get("calibration", ()):
        return None
    if options.calib is None:
        raise _data_missing(program)
    return partial(operand_moments, options, say=say)


def _data_missing(program: Program) -> UsageError:
    return UsageError(
        f"an engine in {program.precision} was built with calibration data, which is needed to look inside",
        hint="give it once more: --calib DATA",
    )


def _made(graph: Graph, plan: PrecisionPlan, program: Program, options: BuildOptions) -> Engine:
    """An engine of a graph whose precisions are assigned, for the target of ``program`` and by its library."""
    name = TargetName.parse(program.target)
    if name.family == "reference":
        from optdnn.lowering.steps import lower_reference

        return Engine(lower_reference(graph, {}))
    if name.on_gpu:
        from optdnn.lowering.cuda import lower_cuda
        from optdnn.runtime.cuda.device import facts_for
        from optdnn.runtime.cuda.usable import why_not

        here = name.family == "cuda" and not why_not()
        made = replace(options, target=program.target, tactics="heuristic", no_cubins=not here)
        return Engine(
            lower_cuda(graph, made, facts_for(name), {}),
            options=LoadOptions(simulate=not here, trust_cubins=True),
        )
    from optdnn.lowering.cpu.partition import compile_with

    tactic: Any = program.meta["tactic"]
    return compile_with(graph, tactic["library"], plan.library_precision, options.threads or tactic["threads"])
