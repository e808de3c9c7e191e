"""Programs for ranges of shapes on targets whose programs are for fixed ones: one plan per shape.

A plan is what a build with that shape fixed gives, so at the optimum nothing is lost to being dynamic. Plans for the optima
are made with the engine. The largest shape is planned as well, to know its arena. The engine also holds its model as data: the plan
for another shape is made from it when such an input is first seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import numpy as np

from optdnn.calibration.plan_calibration import SharedCalibration
from optdnn.config import BuildOptions, Progress
from optdnn.custom import PREFIX, known
from optdnn.dim_text import lone
from optdnn.errors import EngineError, ShapeError, UsageError
from optdnn.importers.model import Model, Source
from optdnn.importers.split_weights import put_together, split_weights
from optdnn.importers.values import with_values
from optdnn.ir.constant_cache import ConstantCache
from optdnn.ir.graph import Graph
from optdnn.lowering.choose import Selection
from optdnn.lowering.cuda import Prepared, lower_cuda
from optdnn.lowering.lane_choice import LaneChoice
from optdnn.lowering.sites import Visit, no_visit
from optdnn.lowering.steps import plain_shape
from optdnn.lowering.table import TACTICS
from optdnn.optimize import optimize
from optdnn.passes.base import PassReport
from optdnn.passes.support.precision_report import PrecisionLog
from optdnn.ranges import Profile
from optdnn.runtime.cuda.device import facts_for
from optdnn.runtime.cuda.gpu_facts import GpuFacts
from optdnn.runtime.file.plan_options import PLAN_OPTIONS, check_plan_options, check_plans
from optdnn.runtime.program import ByValue, Dynamic, Program, agree
from optdnn.runtime.program import Source as HeldSource
from optdnn.shapes.plan_base import Base, Blobs, Common, plans_of
from optdnn.shapes.profile_sizes import OPTIMUM_AND_ENDS, Shapes, located, range_text, shape_text, shown, sized
from optdnn.target_name import TargetName
from optdnn.tuning.first_run import Tried, finish
from optdnn.tuning.nearest import Nearest
from optdnn.tuning.result import Tuned
from optdnn.types import Array, TensorSpec

Choose = Callable[[Graph], Tuned | None]

PLANNED, MEASURED = "planned", "measurement"
"""Key of a plan's meta for how its tactics were chosen; and the value of one that was tuned."""
NOT_KEPT = (
    "shapes", "sample", "random_seed", "preprocess", "postprocess", "custom_ops", "timing_cache", "dump", "emit_onnx", "debug",
    "budget", "threads", "calibrator", "refit", "lock", "locked", "values",
)  # fmt: skip
"""Options that further plans do not need, or that changed the model that they are made from."""


@dataclass
class Planned:
    """The engine's program, the record of its first plan, and how the plans ran on a GPU."""

    program: Program
    graph: Graph
    passes: list[PassReport]
    first_runs: list[Tried]


def plan_profiles(
    model: Source | Model,
    symbolic: Graph,
    options: BuildOptions,
    gpu: GpuFacts,
    meta: Callable[[Graph, list[PassReport]], dict[str, Any]],
    say: Progress,
    choose: Choose,
    precision_log: PrecisionLog | None,
    like: Sequence[Program],
) -> Planned:
    """Plans for the optimum of each profile of ``symbolic`` (the model as imported for them), in one program.

    ``choose`` tunes an optimum's graph (None: the cost model chooses). ``precision_log`` receives the precisions of the first plan.
    ``like``: the plans of an engine for the same network and profiles, whose decisions these take.
    Raises UsageError where a dimension has no range, and whatever a build for one of the shapes raises.
    """
    _need_ranges(symbolic)
    data, weights = split_weights(model)
    opened = put_together(data, weights, symbolic.name)
    common = ConstantCache()
    for array in weights.values():
        common.hold(array)
    specs = [_spec(symbolic, i, s) for i, s in zip(symbolic.inputs, _ports(symbolic), strict=True)]
    base = Base.of(opened, specs, options, common)
    blobs = Blobs(common)
    fits = partial(base.at, options=options)
    plans: dict[tuple[Any, ...], Program] = {}
    first: tuple[Graph, list[PassReport]] | None = None
    first_runs: list[Tried] = []
    arena = 0
    for k, profile in enumerate(symbolic.profiles):
        opt, *extremes = (sized(symbolic, profile, which) for which in OPTIMUM_AND_ENDS)
        if tuple(opt.items()) not in plans:
            say(f"plan {shown(opt)}")
            kept = ConstantCache(shared=common)
            with located(symbolic, k, opt, fits):
                graph, passes = _optimized(base, opt, options, say, kept, precision_log if first is None else None)
            facts = meta(graph, passes)
            with located(symbolic, k, opt, fits):
                prior = like[len(plans)] if like else None
                tuned = choose(graph) if prior is None else None
                program, tried = finish(graph, options, gpu, facts, say, tuned, kept, prior)
            measured = tuned is not None or (prior is not None and is_tuned(prior))
            program.meta[PLANNED] = {"by": MEASURED if measured else "the cost model"}
            first_runs += [] if tried is None else [tried]
            first = first or (graph, passes)
            plans[tuple(opt.items())] = blobs.take(program)
            arena = max(arena, program.arena_bytes)
        for shapes in extremes:  # raise errors now instead of at the first such input
            say(f"try {shown(shapes)}")
            quick, kept = replace(options, no_cubins=True, dump=None), ConstantCache(shared=common)
            with located(symbolic, k, shapes, fits):
                graph, passes = _optimized(base, shapes, quick, say, kept)
                plan = lower_cuda(graph, quick, gpu, meta(graph, passes), say, constants=kept)
            arena = max(arena, plan.arena_bytes)
    main, *others = plans.values()
    dynamic = Dynamic(
        tuple(_spec(symbolic, i, s) for i, (s, _) in zip(symbolic.inputs, main.inputs, strict=True)),
        tuple(_output_spec(symbolic, i, s) for i, (s, _) in zip(symbolic.outputs, main.outputs, strict=True)),
        tuple(others),
        _held_source(options, data, weights, blobs),
        arena,
    )
    _check_ranks(dynamic.outputs, plans)
    for plan in plans.values():
        plan.blobs = blobs.arrays
    assert first is not None
    return Planned(replace(main, profiles=symbolic.profiles, dynamic=dynamic), *first, first_runs)


def _check_ranks(outputs: Sequence[TensorSpec], plans: Mapping[tuple[Any, ...], Program]) -> None:
    """Raise ShapeError if the plans give an output different ranks."""
    first = shown(dict(next(iter(plans))))
    for shapes, plan in plans.items():
        for spec, (own, _) in zip(outputs, plan.outputs, strict=True):
            if len(own.shape) != len(spec.shape):
                raise ShapeError(
                    f"output {spec.name!r} has {len(spec.shape)} axes for {first}, but {len(own.shape)} for {shown(dict(shapes))}",
                    hint="build an engine for each of these profiles",
                )


def _held_source(options: BuildOptions, data: bytes, weights: Mapping[str, Array], blobs: Blobs) -> HeldSource | None:
    """What plans for further shapes are made from; None where the options cannot be kept in a file."""
    shared = options.calib if isinstance(options.calib, SharedCalibration) else None
    plain = options if shared is None else replace(options, calib=None, calib_cache=None, images=None)
    carried = plain_options(plain)
    if carried is None:
        return None
    numbers = {name: blobs.add(array) for name, array in sorted(weights.items())}
    ranges = blobs.add(shared.to_bytes()) if shared is not None and shared.found else None
    return HeldSource(blobs.add(np.frombuffer(data, np.uint8)), numbers, carried, ranges)


def by_value(
    graph: Graph, program: Program, names: Sequence[str], model: Source | Model, options: BuildOptions
) -> Program:
    """The program with the parts that plans for values of the inputs ``names`` need, if these gain something: if data-dependent
    sizes leave work to the CPU. ``model`` is what ``graph`` was imported from, with the options' values in it.
    """
    plain = plain_options(options)
    if not names or plain is None or not any(p.meta["host"]["operators"] for p in plans_of(program)):
        return program
    if program.dynamic is not None and program.dynamic.source is not None:
        return replace(program, by_value=ByValue(tuple(names), program.dynamic.source))
    data, weights = split_weights(model)
    blobs = Blobs(ConstantCache(), program.blobs)
    numbers = {name: blobs.add(array) for name, array in sorted(weights.items())}
    source = HeldSource(blobs.add(np.frombuffer(data, np.uint8)), numbers, plain)
    return replace(program, blobs=blobs.arrays, by_value=ByValue(tuple(names), source))


def replan(
    program: Program, shapes: Mapping[str, tuple[int, ...]], compiled: bool, values: Mapping[str, Array]
) -> Program:
    """The plan of an engine for further shapes, or for values of inputs: a ``runtime.steps.executor.Planner``. It shares common
    parts with the engine's own plans.

    Raises EngineError where the engine's model is broken or its options are not allowed in an engine; and the errors that a build
    raises.
    """
    held = program.by_value if values else program.dynamic
    source = None if held is None else held.source
    if source is None:
        raise EngineError("the engine does not hold its model: no further plans can be made")
    check_plans(program.target)
    check_plan_options(source.options, program.target)
    named = [text.removeprefix(PREFIX).partition("@") for text in program.requires if text.startswith(PREFIX)]
    options = BuildOptions(
        **{**source.options, "target": program.target},
        custom_ops=tuple(known(digest, name) for name, _, digest in named),
    )
    options = replace(options, no_cubins=options.no_cubins or not compiled)
    if source.calibration is not None:
        options = replace(options, calib=SharedCalibration.from_bytes(program.blobs[source.calibration]))
    if options.tactics == "auto":  # measured times of other libraries are of no use to plans without them
        options = replace(options, tactics=",".join(sorted({"own", *_libraries(program)})))
    common = Common.of(program, source)
    kept = ConstantCache(shared=common.kept)  # the plan's own constants live as long as the plan
    if not values:
        assert program.dynamic is not None
        base = common.base(program.dynamic.inputs, options)
    else:
        base = Base(with_values(common.model, values), None, [])
        shapes = {name: shape for name, shape in shapes.items() if name not in values}
    graph, _ = _optimized(base, shapes, options, lambda text: None, kept)
    gpu = facts_for(TargetName.parse(options.target))
    prepared = Prepared(cubins=common.cubins)
    visit: Visit = no_visit
    planned: dict[str, Any] = {"by": "the cost model"}
    if options.nearest_tactics:
        like = _nearest(program, shapes)
        lanes, tuned = like[0].meta.get("streams", {}).get("lanes", 1), is_tuned(like[0])
        nearest = Nearest.of((plan.meta.get("tactics", ()) for plan in like), Selection.of(options), tuned)
        streams = LaneChoice(lanes) if lanes > 1 and tuned else None  # where the cost model agrees
        prepared = replace(prepared, choices=nearest.choices, streams=streams)
        visit = nearest
        by = "the nearest tuned plan" if tuned else "the nearest plan"
        planned = {"by": by, "like": [str(spec) for spec, _ in like[0].inputs]}
    plan = lower_cuda(graph, options, gpu, {}, prepared=prepared, visit=visit, constants=kept)
    plan.meta[PLANNED] = planned
    if common.nvrtc is not None and plan.kernels:
        plan.meta.setdefault("nvrtc", common.nvrtc)  # if nothing was compiled
    return common.blobs.copy(kept).take(plan)


def _nearest(program: Program, shapes: Mapping[str, tuple[int, ...]]) -> Sequence[Program]:
    """The plans of an engine, those that were tuned first, then by how near their sizes are to these: by the ratios of their
    dimensions."""

    def distance(plan: Program) -> tuple[bool, float]:
        sizes = {spec.name: spec.shape for spec, _ in plan.inputs}
        pairs = [(a, b) for name, dims in shapes.items() for a, b in zip(dims, sizes.get(name, ()), strict=False)]
        far = sum(abs(math.log(max(a, 1) / max(int(b), 1))) for a, b in pairs)
        return not is_tuned(plan), far

    return sorted(plans_of(program), key=distance)


def _libraries(program: Program) -> set[str]:
    """The libraries that the plans of an engine call."""
    provider = {tactic.name: tactic.provider for tactics in TACTICS.values() for tactic in tactics}
    names = {
        row["tactic"] for plan in plans_of(program) for row in plan.meta.get("tactics", ())
    }  # engines before 1.4 do not say
    return {provider[name] for name in names if name in provider} - {"own"}


def is_tuned(plan: Program) -> bool:
    """Whether the tactics of a plan were chosen by measurement."""
    return bool(plan.meta.get(PLANNED, {}).get("by") == MEASURED)


def _optimized(
    base: Base,
    shapes: Mapping[str, tuple[int, ...]],
    options: BuildOptions,
    say: Progress,
    kept: ConstantCache,
    precision_log: PrecisionLog | None = None,
) -> tuple[Graph, list[PassReport]]:
    """The graph at these sizes after all passes, and their reports. ``precision_log`` is filled with its precisions."""
    graph, left = base.at(shapes, options)
    done = {report.name for report in base.passes}
    # the rewrites that need sizes, and the rest of the pipeline
    again = optimize(graph, left, left.target, say, kept=kept, precision_log=precision_log)
    return graph, [*base.passes, *(report for report in again if report.changes or report.name not in done)]


def plain_options(options: BuildOptions) -> dict[str, Any] | None:
    """The options that are not at their defaults, as plain data; None where a file may not carry one of them
    (:mod:`optdnn.runtime.file.plan_options`): pins, for instance. ``simulate`` compiles nothing: it keeps no option of that."""
    default = BuildOptions(target=options.target)
    unused = {"no_cubins"} if TargetName.parse(options.target).simulated else set()
    kept = {f.name: getattr(options, f.name) for f in fields(options) if f.name not in unused.union(NOT_KEPT)}
    kept = {n: v for n, v in kept.items() if n == "target" or hasattr(v, "__array__") or v != getattr(default, n)}
    return kept if all(n in PLAN_OPTIONS and PLAN_OPTIONS[n](v) for n, v in kept.items()) else None


def optimum(symbolic: Graph) -> Shapes:
    """The shapes of the inputs at the optimum of the first profile. Raises UsageError where a dimension has no range."""
    _need_ranges(symbolic)
    return sized(symbolic, symbolic.profiles[0], "opt")


def _need_ranges(graph: Graph) -> None:
    given: Profile = graph.profiles[0] if len(graph.profiles) == 1 else {}
    for i in graph.inputs:
        out = graph.op(i).outputs[0]
        for d in out.type.shape or ():
            name = lone(d)  # an expression of symbols needs no range: each symbol is a dimension elsewhere
            if name is not None and not all(name in p for p in graph.profiles):
                dims = shape_text(out.type.dims, lambda n: range_text(given[n]) if n in given else "1..8..32")
                raise UsageError(
                    f"dimension {d} of input {out.name!r} has no range in every profile",
                    hint=f"plans for GPUs need one: --shape {out.name}={dims}",
                )


def _ports(graph: Graph) -> list[TensorSpec]:
    """The inputs without their shapes, where their rank is unknown."""
    ports = [graph.op(i).outputs[0] for i in graph.inputs]
    return [TensorSpec(p.name, p.type.dtype, ()) for p in ports]


def _spec(graph: Graph, port: int, planned: TensorSpec) -> TensorSpec:
    """The symbolic shape of an input or output, with the element type that the plan gives it."""
    shape = plain_shape(graph.op(port).outputs[0].type)
    return _free(planned) if shape is None else replace(planned, shape=shape)


def _output_spec(graph: Graph, port: int, planned: TensorSpec) -> TensorSpec:
    """Like :func:`_spec`. The plan is right where the model declares a shape that its nodes do not compute, as exporters do for an
    If that removes an axis only if its size is 1."""
    spec = _spec(graph, port, planned)
    return spec if agree(planned.shape, spec.shape) else _free(planned)


def _free(spec: TensorSpec) -> TensorSpec:
    """The spec with a new symbol for each dimension."""
    return replace(spec, shape=tuple(f"{spec.name}.{i}" for i in range(len(spec.shape))))
