"""The build: from an ONNX file to an engine. This is the only place that knows the order of the stages."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

from optdnn.build_facts import build_facts
from optdnn.build_result import Build, build_ranks
from optdnn.calibration.plan_calibration import SharedCalibration
from optdnn.config import AUTO, BuildOptions, Progress, checked_keywords
from optdnn.custom import CustomOp
from optdnn.devices import check_memory, chosen_split, split_for
from optdnn.errors import ModelError, NotMet, OptdnnError, ShapeError, UnsupportedError, UsageError, machine_errors
from optdnn.importers.asked import asked_model, changes_model
from optdnn.importers.model import open_model
from optdnn.importers.onnx import import_model
from optdnn.ir.body import custom_digests
from optdnn.ir.digest import structure_digest
from optdnn.ir.graph import Graph
from optdnn.lockfile import finish_lock, locked_cache
from optdnn.lowering.cpu import trials as cpu_trials
from optdnn.optimize import Decide, optimize, plan_of
from optdnn.passes.assign_precision import AssignPrecision
from optdnn.passes.base import PassReport
from optdnn.passes.support.precision import PrecisionPlan
from optdnn.passes.support.precision_report import PrecisionLog, PrecisionOutcome, hazards, outcome
from optdnn.passes.support.precision_report import to_plain as contract
from optdnn.precision.auto import alone_in, found_precisions
from optdnn.precision.mixture import MIXTURE, Mixture, offers_choice
from optdnn.precision.pins import check_pins
from optdnn.precision.targets import assigned
from optdnn.refitting.held_model import held_model, hold_model
from optdnn.refitting.options import check_inputs, options_again
from optdnn.refitting.record import (
    NETWORK,
    check_same_network,
    check_same_rewrites,
    check_same_steps,
    network_record,
    recorded,
)
from optdnn.refitting.weights import with_adapters, with_weights
from optdnn.runtime.cuda.device import facts_for
from optdnn.runtime.cuda.gpu_facts import named
from optdnn.runtime.engine import Engine
from optdnn.runtime.file.atomic import check_writable
from optdnn.runtime.program import Program
from optdnn.shapes.profile_sizes import check_profiles
from optdnn.targets import Target, resolve_target, target_for
from optdnn.targets.base import Optimized, Source
from optdnn.targets.beginning import beginning
from optdnn.tuning.timing_cache import TimingCache

Imported = tuple[Source, Graph, Target, BuildOptions]
_MAPPINGS = ("shapes", "values", "preprocess", "postprocess", "precision_map")
ONE_FILE = 1 << 30
"""An emitted ONNX model with at most this many bytes of weights is one file; more weights go to FILE.data (protobuf: 2 GiB)."""


@checked_keywords
def build(
    model: str | Path | bytes | Any,
    *,
    target: str = "auto",
    precision: str = "fp32",
    shapes: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    values: Mapping[str, Any] | None = None,
    sample: str | None = None,
    random_seed: int | None = None,
    preprocess: Mapping[str, Any] | None = None,
    postprocess: Mapping[str, Any] | None = None,
    io_dtype: str = "model",
    opt_level: int = 3,
    tactics: str = "auto",
    threads: int | None = None,
    streams: int | str = AUTO,
    devices: int = 1,
    split: str = AUTO,
    row_invariant: bool = False,
    strict: bool = False,
    workspace: int | None = None,
    memory_limit: int | None = None,
    no_cubins: bool = False,
    nearest_tactics: bool = True,
    budget: float | None = None,
    timing_cache: str | PathLike[str] | None = None,
    calib: Any = None,
    calibrator: str = "mse",
    calib_cache: str | PathLike[str] | None = None,
    images: str | None = None,
    precision_map: Mapping[str, str] | None = None,
    strict_precision: bool = False,
    metric: Any = "top1",
    max_drop: float | None = None,
    labels: Any = None,
    candidates: str | Sequence[str] | None = None,
    refit: bool = False,
    lock: str | PathLike[str] | None = None,
    locked: str | PathLike[str] | None = None,
    custom_ops: Iterable[CustomOp] = (),
    emit_onnx: str | PathLike[str] | None = None,
    dump: str | PathLike[str] | None = None,
    stop_after: str | None = None,
    debug: bool = False,
    progress: Progress | None = None,
) -> Engine:
    """Compile an ONNX model (a path, serialized bytes or a ``ModelProto``) into an :class:`Engine`.

    ``target`` is one of :data:`optdnn.target_name.TARGETS`; "auto" is the GPU if it is usable, otherwise cpu. ``precision`` is
    one of these:

    - "fp32" or "bf16"; on GPUs also "tf32", "fp16" or "fp8". With data in ``calib``, operators whose values leave fp16's range on
      the data stay fp32.
    - "int8", with calibration data in ``calib``: arrays, a file, a folder of pictures, or an iterable of feeds.
    - "w4", "w8" or "w4a8": the constant weights of products are packed. Activations are fp16 on GPUs and fp32 elsewhere
      ("w4+bf16": bf16). "w4a8" may round activations to int8.
    - "auto": the build chooses a precision for each node, within ``max_drop`` of ``metric`` on the data in ``calib``. It raises
      NotMet if no engine is within it.

    ``shapes`` maps input names to dimensions (None leaves one symbolic) or to ranges of dimensions
    (:func:`optdnn.ranges.input_shapes`). A list of such mappings gives several profiles. ``preprocess`` maps input names to
    :class:`optdnn.ImageSpec` (or its JSON): these inputs take pictures. ``postprocess`` maps output names to steps on them:
    "softmax+top-k:5,labels=FILE", "argmax", "boxes:xyxy". :class:`optdnn.config.BuildOptions` describes the other options.
    ``progress`` is called with a line of text for each step of the build.

    Raises ModelError, UnsupportedError, UsageError or MissingDependency; OutputError if a requested file (``timing_cache``,
    ``dump``, ``emit_onnx``) cannot be written. :meth:`Engine.save` writes the engine itself.
    """
    given = locals()
    own = {f.name: given[f.name] for f in fields(BuildOptions)}
    empty: dict[str, Any] = {name: {} for name in _MAPPINGS if own[name] is None}
    return build_verbose(model, BuildOptions(**{**own, **empty}), progress).engine


@cpu_trials.kept()
def build_verbose(model: str | Path | bytes | Any, options: BuildOptions, progress: Progress | None = None) -> Build:
    """Like :func:`build`, with the record of the build."""
    for path in (options.lock, options.emit_onnx):
        if path is not None:
            check_writable(path)
    with machine_errors("the network", ModelError):
        cache = locked_cache(model, options, resolve_target)
        with beginning(options):
            made = _build(model, options, progress, cache=cache)
        finish_lock(model, options, resolve_target, made.engine.program, cache)
        if options.emit_onnx is not None and options.locked is not None:  # nothing is written if its engine differs
            _emit_onnx(made.graph, options.emit_onnx)
        return made


def _build(
    model: str | Path | bytes | Any,
    options: BuildOptions,
    progress: Progress | None,
    *,
    like: Program | None = None,
    cache: TimingCache,
    rank: int | None = None,
    imported: Imported | None = None,
) -> Build:
    """Build an engine for one device or for several, or (with ``rank``) the part of one of them.

    ``like`` is a program of the same network with other weights. The build reuses its decisions and measures nothing. It raises
    UnsupportedError that names the nodes if the network, its optimized graph or its program would differ."""
    say = progress or (lambda text: None)
    seconds: dict[str, float] = {}
    source, graph, target, options = _imported(model, options, say, seconds) if imported is None else imported
    if options.devices > 1 and rank is None:
        return _built_for_ranks(model, (source, graph, target, options), say, cache)
    network = network_record(graph)
    if like is not None:
        check_same_network(like, graph)
    untouched = graph.copy() if offers_choice(options) or options.precision == AUTO else graph
    options = _keeping_ranges(options)
    split, ports = split_for(graph, options, 0 if rank is None else rank)
    node_names = [n for op in graph.ops() for n in op.src] if options.precision_map else []
    precision_log = PrecisionLog()
    facts = partial(build_facts, options=options)
    planned = mixture = None
    if graph.profiles and target.one_size:
        with _timed(seconds, "plans"):
            checked = partial(_facts_of_plan, options=options, node_names=node_names)
            planned = target.plan_sizes(source, graph, options, checked, precision_log, cache, say, like)
        graph, passes = planned.graph, planned.passes
    else:
        check_profiles(graph)
        with _timed(seconds, "passes"):
            passes, mixture = _run_passes(graph, options, target, like, precision_log, say)
    build_alone = partial(
        _built_alone, model, (source, untouched, target, options), progress, cache=cache, spent=seconds
    )
    if mixture is not None and mixture.all_in_base:
        return build_alone(plan_of(options).base, {MIXTURE: mixture.to_plain()})
    passes = [*split, *passes]
    check_pins(options.precision_map, graph, node_names)

    plan = (mixture and mixture.plan) or plan_of(options)
    label, search = options.precision, None
    if options.precision == AUTO:
        with _timed(seconds, "precision"):
            search = found_precisions(graph, untouched, options, cache, say)
        if search.alone is not None:
            return build_alone(search.alone, {AUTO: search.report.to_plain()})
        plan, label = search.plan, search.label
        graph, reports = assigned(graph, plan, options.target, search.calibration, options.opt_level, precision_log)
        passes += [*search.passes, *reports]
    if options.emit_onnx is not None and options.locked is None:
        _emit_onnx(graph, options.emit_onnx)
    if like is not None:
        check_same_rewrites(like, [p.to_json() for p in passes], structure_digest(graph, numbers=False))

    meta = facts(graph, passes) | ({} if search is None else {AUTO: search.report.to_plain()})
    in_fp32 = partial(_in_fp32, source.model, options=options)
    with _timed(seconds, "tactics"):  # on a GPU including the first runs
        work = Optimized(graph, source, plan, label, meta, in_fp32, planned, like)
        compiled = target.compile(work, options, cache, say)
        check_memory(compiled.program, options)
        engine = compiled.engine or target.load(compiled.program)
    cache.save()

    ran = outcome(graph, precision_log, compiled.ran, compiled.otherwise, compiled.base, passes)
    _record_precisions(engine.program, work, precision_log, mixture, ran)
    engine.program.meta[NETWORK] = network
    _complete(engine, model, work, options, ran)
    return Build(engine, graph, passes, compiled, seconds, ran, ports)


def _complete(
    engine: Engine, model: Any, work: Optimized, options: BuildOptions, ran: Sequence[PrecisionOutcome]
) -> None:
    """Check the finished program, and give the engine its custom operators and the means to take other weights."""
    if work.like is not None:
        check_same_steps(work.like, engine.program)
    if options.strict_precision:
        _as_asked(ran)
    needed = custom_digests(work.graph)
    engine.keep([op for op in options.custom_ops if op.digest in needed])
    if options.refit:
        hold_model(engine.program, model, options.calib)
    engine.refitter = rebuilt


def _built_for_ranks(model: Any, imported: Imported, say: Progress, cache: TimingCache) -> Build:
    """An engine for several GPUs: the program of each is built in turn."""
    source, graph, target, options = imported

    def build_one(own: BuildOptions, say: Progress, rank: int) -> Build:
        return _build(model, own, say, cache=cache, rank=rank, imported=(source, graph.copy(), target, own))

    return build_ranks(_with_split(graph.copy(), target, options, say), say, build_one)


def _record_precisions(
    program: Program,
    work: Optimized,
    precision_log: PrecisionLog,
    mixture: Mixture | None,
    ran: list[PrecisionOutcome],
) -> None:
    """Keep in ``program`` which precisions were asked for and which run, and the choice between those of a mixture."""
    dangers = hazards(work.graph) if precision_log.hazards is None else precision_log.hazards
    program.meta["precision"] = contract(work.plan, ran, dangers, precision_log)
    told = mixture.to_plain() if mixture is not None else None if work.like is None else work.like.meta.get(MIXTURE)
    if told is not None:
        program.meta[MIXTURE] = told


def _built_alone(
    model: Any,
    imported: Imported,
    progress: Progress | None,
    precision: str,
    record: Mapping[str, Any],
    *,
    cache: TimingCache,
    spent: Mapping[str, float],
) -> Build:
    """Build in one float precision, which "auto" or a mixture chose in ``spent`` seconds. ``record``: how, for the engine."""
    source, graph, target, options = imported
    if progress is not None:
        progress(f"precision {precision}: it was chosen for the whole network")
    alone = alone_in(options, precision)
    made = _build(model, alone, progress, cache=cache, imported=(source, graph, target, alone))
    made.engine.program.meta |= record
    seconds = {what: spent.get(what, 0.0) + made.seconds.get(what, 0.0) for what in (*spent, *made.seconds)}
    return replace(made, seconds=seconds)


def _run_passes(
    graph: Graph,
    options: BuildOptions,
    target: Target,
    like: Program | None,
    precision_log: PrecisionLog,
    say: Progress,
) -> tuple[list[PassReport], Mixture | None]:
    """Run the passes on ``graph``, for precision "auto" only the exact ones. Returns their reports and, if the options ask for a
    mixture, the choice between its precisions."""
    mixture = target.mixture(graph, options) if like is None else None
    decide: Decide | None = mixture if like is None else _recorded_plan(like)
    stop = AssignPrecision.name if options.precision == AUTO else None
    reports = optimize(
        graph, options, options.target, say, stop_before=stop, precision_log=precision_log, decide=decide
    )
    return reports, mixture


def _facts_of_plan(
    graph: Graph, passes: Sequence[PassReport], *, options: BuildOptions, node_names: Sequence[str]
) -> dict[str, Any]:
    """:func:`optdnn.build_facts.build_facts`, if each pin fits a node. Plans ask for it before they measure anything."""
    check_pins(options.precision_map, graph, node_names)
    return build_facts(graph, passes, options=options)


def _recorded_plan(like: Program) -> Decide | None:
    """Takes the choice of an engine's mixture, for an engine with other weights; None if the engine has no such choice."""
    told: Any = like.meta["precision"]
    plan = PrecisionPlan.from_json(told["plan"])
    return (lambda graph, asked, calibration: plan) if plan.in_base else None


def _with_split(graph: Graph, target: Target, options: BuildOptions, say: Progress) -> BuildOptions:
    """The options of a build for several devices, with the chosen split."""
    if options.split != AUTO:
        return options
    gpu = facts_for(target.name) if target.name.arch else named("h200")  # reference uses no GPU
    split, why = chosen_split(graph, options, gpu)
    say(f"split {split}: {why}")
    return replace(options, split=split)


def _imported(model: Any, options: BuildOptions, say: Progress, seconds: dict[str, float]) -> Imported:
    """The source of a model, its graph, the target, and the options with that target's name."""
    with _timed(seconds, "import"):
        say("import")
        try:
            if changes_model(options):
                model = asked_model(model, options)
            graph = import_model(model, shapes=options.shapes, custom_ops=options.custom_ops)
        except OptdnnError:
            replace(options, target=resolve_target(options.target))  # errors of the options come first
            raise
    with _timed(seconds, "target"):
        options = replace(options, target=resolve_target(options.target))
        target = target_for(options)
    with _timed(seconds, "import"):
        source = Source(model, target.size_inputs(graph) if options.devices == 1 else ())
    return source, graph, target, options


def _emit_onnx(graph: Graph, path: Path) -> None:
    from optdnn.ir.export_onnx import export_model

    weights = sum(op.attrs.value.nbytes for op in graph.of_kind("Constant"))
    export_model(graph, external_weights=weights > ONE_FILE).save(path)


def _as_asked(ran: Sequence[PrecisionOutcome]) -> None:
    """Raise NotMet that names the ops that do not run in the requested precision."""
    lines = [f"{r.asked.kind} {' + '.join(r.asked.nodes) or r.asked.key}: {r.asked.precision} was asked for, it runs in {r.runs}: "
             f"{r.reason}" for r in ran if r.differs]  # fmt: skip
    if lines:
        raise NotMet(
            "\n  ".join([f"{len(lines)} operators do not run in the requested precision:", *lines]),
            hint="ask for less with --pin NODES=PRECISION, or leave --strict-precision out",
        )


@cpu_trials.kept()
def rebuilt(
    program: Program,
    model: Any = None,
    weights: Mapping[str, Any] | None = None,
    adapters: Mapping[str, Sequence[Any]] | None = None,
    *,
    calib: Any = None,
    custom_ops: Sequence[CustomOp] = (),
    progress: Progress | None = None,
) -> Build:
    """The engine of ``program`` with other weights. The build reuses the program's decisions.

    ``model`` is the network (None: the one in the engine), ``weights`` replaces its initializers, ``adapters`` are added
    to them (:mod:`optdnn.refitting.weights`). An engine that stores its model stores the new one, without adapters.

    Raises UsageError for arrays that do not fit, UnsupportedError that names the nodes if the program would differ,
    EngineError for an engine that does not record enough.
    """
    recorded(program)
    options = _keeping_ranges(options_again(program, calib, custom_ops))
    with machine_errors("the network", ModelError):
        held = held_model(program) if model is None else open_model(model)
        if held is None:
            raise UsageError(
                "the engine does not hold its model: all weights are needed",
                hint="give the model (optdnn refit ENGINE MODEL, model= in Python), or build with --refit (refit=True)",
            )
        base = with_weights(held, weights or {})
        merged = with_adapters(base, adapters or {})
        check_inputs(merged, options)
        try:
            build = _build(merged, replace(options, refit=False), progress, like=program, cache=TimingCache())
        except ShapeError as error:
            raise UnsupportedError(
                f"the model is another network than the engine's: at the engine's shapes, {error.message}",
                hint="build an engine of it",
            ) from error
    if options.refit:
        hold_model(build.engine.program, base, options.calib)
    return build


def _keeping_ranges(options: BuildOptions) -> BuildOptions:
    """The options with calibration data that remembers its ranges, if the engine has to keep them for ``refit``."""
    if not options.refit or options.precision == AUTO or plan_of(options).packs:
        return options
    return replace(options, calib=SharedCalibration.of(options.calib))


def _in_fp32(model: Any, *, options: BuildOptions) -> Graph:
    """The network after the passes of an fp32 build."""
    from optdnn.lowering.cpu.counterpart import fp32_of

    graph = import_model(model, shapes=options.shapes, custom_ops=options.custom_ops)
    optimize(graph, fp32_of(options), options.target)
    return graph


@contextmanager
def _timed(into: dict[str, float], name: str) -> Iterator[None]:
    """Add the wall time of a ``with`` block to a dictionary."""
    start = time.perf_counter()
    yield
    into[name] = into.get(name, 0.0) + time.perf_counter() - start
