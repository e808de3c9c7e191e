"""The build: from an ONNX file to an engine. The one place that knows the order of things."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from optdnn import __version__
from optdnn.config import AUTO, BuildOptions
from optdnn.errors import NotMet, OptdnnError, OutputError, UsageError
from optdnn.importers.onnx import import_model
from optdnn.importers.values import size_inputs, with_values
from optdnn.ir.body import custom_digests
from optdnn.ir.digest import graph_digest
from optdnn.ir.graph import Graph
from optdnn.ir.kept import Kept
from optdnn.lower import lower_reference
from optdnn.passes.assign_precision import AssignPrecision, is_mixture
from optdnn.passes.base import Pass, PassContext, PassReport, run_pipeline
from optdnn.passes.contract import Account, Ran, hazards, on_gpu, outcome
from optdnn.passes.contract import to_plain as contract
from optdnn.passes.io_dtype import convert_borders
from optdnn.passes.pipelines import PIPELINE
from optdnn.passes.precision import PrecisionPlan
from optdnn.passes.ranges import Calibration
from optdnn.plan_calibration import SharedCalibration
from optdnn.precision.account import Account as Outcome
from optdnn.precision.pins import check_pins
from optdnn.precision.targets import assigned, base_of
from optdnn.ranges import input_shapes
from optdnn.runtime.atomic import check_writable, write_atomic
from optdnn.runtime.cuda.device import facts_for
from optdnn.runtime.cuda.plan import tf32_nodes
from optdnn.runtime.engine import Engine
from optdnn.runtime.executor import LoadOptions
from optdnn.tactics import cpu_trials
from optdnn.tactics.base import Measured
from optdnn.tactics.timing_cache import TimingCache
from optdnn.target_name import TargetName

if TYPE_CHECKING:
    from optdnn.first_run import Tried
    from optdnn.precision.auto import Found
    from optdnn.tactics.counterpart import Counterpart

Progress = Callable[[str], None]
ONE_FILE = 1 << 30
"""Bytes of weights up to which an emitted ONNX model is one file; more go to FILE.data (protobuf ends at 2 GiB)."""


@dataclass
class Build:
    """An engine and the account of how it came about.

    ``passes`` and ``tactics`` explain it (``tuning``: what was measured on a GPU); ``seconds`` are wall times per phase.
    What is deterministic of this is in the engine's ``meta`` as well; all of it goes to the report beside the engine.
    """

    engine: Engine
    graph: Graph
    passes: list[PassReport]
    tactics: list[Measured] = field(default_factory=list)
    fallbacks: dict[str, list[dict[str, str]]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    tuning: dict[str, Any] | None = None
    precisions: list[Ran] = field(default_factory=list)
    """For each op that computes, what it was asked to run in and what it does."""
    beside_fp32: Counterpart | None = None
    """On the target cpu, for another precision: its time and that of fp32."""
    first_runs: list[Tried] = field(default_factory=list)
    """How each plan ran on the GPU before it was kept; none where there is no GPU that the engine is for."""

    def __post_init__(self) -> None:
        self.engine.account = partial(
            _account, passes=self.passes, tactics=self.tactics, fallbacks=self.fallbacks, seconds=self.seconds,
            tuning=self.tuning, precisions=self.precisions, beside_fp32=self.beside_fp32,
            first_runs=self.first_runs,
        )  # fmt: skip

    def report(self) -> dict[str, Any]:
        """Everything, wall times and measurements included: what :meth:`Engine.save` writes beside the engine."""
        return dict(self.engine.report or {})


def _account(
    engine: Engine,
    *,
    passes: Sequence[PassReport],
    tactics: Sequence[Measured],
    fallbacks: Mapping[str, Any],
    seconds: Mapping[str, float],
    tuning: Mapping[str, Any] | None,
    precisions: Sequence[Ran],
    beside_fp32: Counterpart | None,
    first_runs: Sequence[Tried],
) -> dict[str, Any]:
    from optdnn.runtime.machine import machine, versions

    return {
        **{k: v for k, v in engine.meta.items() if k != "graph"},
        "tactics": [m.to_json() for m in tactics],
        "fallbacks": fallbacks,
        **({"tuning": dict(tuning)} if tuning else {}),
        **({"beside_fp32": beside_fp32.to_json()} if beside_fp32 else {}),
        **({"first_runs": [t.to_plain() for t in first_runs]} if first_runs else {}),
        "precisions": [r.to_json() for r in precisions],
        "executed": [dict(f) for f in engine.facts],
        "seconds": {k: round(v, 4) for k, v in seconds.items()},
        "pass_seconds": [{"pass": p.name, "seconds": round(p.seconds, 4)} for p in passes],
        "machine": machine(),
        "versions": versions(),
    }


def build(
    model: str | Path | bytes | Any,
    *,
    target: str = "auto",
    precision: str = "fp32",
    shapes: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> Engine:
    """Compile an ONNX model (a path, serialized bytes or a ``ModelProto``) into an :class:`Engine`.

    ``target`` is one of :data:`optdnn.config.TARGETS` ("auto": the GPU where it is usable, else cpu); ``precision`` is "fp32",
    "bf16", "int8" (with ``calib=``: arrays, a file, a folder of pictures, an iterable of feeds), "auto" (per node, within
    ``max_drop`` of ``metric`` on ``calib=``; NotMet where nothing is) or (on GPUs) "fp16" or "fp8";
    ``shapes`` maps input names to dimensions (None leaves one symbolic) or to ranges of them
    (:func:`optdnn.ranges.input_shapes`), of which a list gives several profiles. Further options are the
    fields of :class:`optdnn.config.BuildOptions`: io_dtype, opt_level, tactics, threads, timing_cache, workspace, dump,
    stop_after, emit_onnx and so on. ``progress`` is called with a line of text as the build goes on.
    Raises ModelError, UnsupportedError, UsageError or MissingDependency; OutputError where a file that was asked for
    (timing_cache, dump, emit_onnx) cannot be written. The engine itself is written by :meth:`Engine.save`.
    """
    given = {} if shapes is None else shapes
    return build_verbose(model, _options(target, precision, given, options), progress).engine


def _options(target: str, precision: str, shapes: Any, options: dict[str, Any]) -> BuildOptions:
    try:
        return BuildOptions(target=target, precision=precision, shapes=shapes, **options)
    except TypeError as error:
        raise UsageError(f"build: {error}".replace("BuildOptions.__init__() got an ", "")) from None


@cpu_trials.kept()
def build_verbose(model: str | Path | bytes | Any, options: BuildOptions, progress: Progress | None = None) -> Build:
    """Like :func:`build`, with the account of the build."""
    with _begun(options):
        return _build(model, options, progress)


def _build(model: str | Path | bytes | Any, options: BuildOptions, progress: Progress | None) -> Build:
    say = progress or (lambda text: None)
    seconds: dict[str, float] = {}
    cache = TimingCache.open(options.timing_cache)
    if options.emit_onnx is not None:
        check_writable(options.emit_onnx)
    with _timed(seconds, "import"):
        say("import")
        try:
            if options.values:
                model = with_values(model, options.values)
            graph = import_model(model, shapes=options.shapes, custom_ops=options.custom_ops)
        except OptdnnError:
            replace(options, target=resolve_target(options.target))  # what is wrong with the options is said first
            raise
    with _timed(seconds, "target"):
        target = resolve_target(options.target)
    options = replace(options, target=target)
    with _timed(seconds, "import"):
        sizes = size_inputs(graph) if target.partition(":")[0] in ("cuda", "simulate") else []
    known = [n for op in graph.ops() for n in op.src] if options.precision_map else []
    dynamic, found, account, choice, beside = None, None, Account(), None, None
    first_runs: list[Tried] = []
    if graph.profiles and target.partition(":")[0] in ("cuda", "simulate"):
        from optdnn.plans import plan_profiles, replan

        if options.values:
            raise UsageError("inputs with values go with fixed shapes only", hint="give --shape sizes, not ranges")
        if options.precision == AUTO:
            raise UsageError(
                "precision auto on a GPU needs fixed shapes", hint="give one size for each: --shape x=8x3x224x224"
            )
        from optdnn.autotune import tune

        facts = partial(_meta, options=options, target=target)
        share = replace(options, budget=options.budget and options.budget / len(graph.profiles))

        gpu = facts_for(TargetName.parse(target).arch)
        tuner = partial(tune, options=share, gpu=gpu, cache=cache, say=say)
        sized = options if options.calib is None else replace(options, calib=SharedCalibration(options.calib))
        with _timed(seconds, "plans"):
            dynamic = plan_profiles(model, graph, sized, gpu, facts, optimize, say, tuner, account, first_runs)
        graph, passes = dynamic.graph, dynamic.passes
    else:
        exact_only = AssignPrecision.name if options.precision == AUTO else None
        with _timed(seconds, "passes"):
            passes = optimize(graph, options, target, say, stop_before=exact_only, account=account)
    check_pins(options.precision_map, graph, known)
    plan, label = plan_of(options), options.precision
    if options.precision == AUTO:
        with _timed(seconds, "precision"):
            found = _found_precisions(graph, options, target, cache, say)
        plan, label = found.plan, found.label
        graph, reports = assigned(graph, plan, target, found.calibration, options.opt_level, account)
        passes += [*found.passes, *reports]
    if options.emit_onnx is not None:
        from optdnn.ir.export_onnx import export_model

        weights = sum(op.attrs.value.nbytes for op in graph.of_kind("Constant"))
        export_model(graph, external_weights=weights > ONE_FILE).save(options.emit_onnx)
    meta = _meta(graph, passes, options=options, target=target)
    if found is not None:
        meta["auto"] = found.account.to_plain()
    measured: list[Measured] = []
    fallbacks: dict[str, list[dict[str, str]]] = {}
    tuning: dict[str, Any] | None = None
    with _timed(seconds, "tactics"):  # on a GPU with the first runs
        if dynamic is not None:
            from optdnn.plans import by_value

            program = by_value(graph, dynamic.program, sizes, model, options)
            engine = Engine(program, options=LoadOptions(defer=True, trust_cubins=True, planner=replan))
        elif target == "reference":
            engine = Engine(lower_reference(graph, meta))
        elif target.partition(":")[0] in ("cuda", "simulate"):
            from optdnn.autotune import tune
            from optdnn.first_run import finish
            from optdnn.ir.held import hold
            from optdnn.plans import by_value, replan

            gpu = facts_for(TargetName.parse(target).arch)
            tuned = tune(graph, options, gpu, cache, say)
            tuning = None if tuned is None else tuned.to_plain()
            # The machine that builds need not be the one that runs: what the GPU must have is looked at on first use.
            program, tried = finish(graph, options, gpu, meta, say, tuned)
            first_runs += [] if tried is None else [tried]
            program = replace(program, precision=label)
            if options.precision != AUTO:
                program = by_value(graph, program, sizes, model, options)
            if target != "simulate" and program.by_value is None:
                program = hold(graph, program)
            engine = Engine(program, options=LoadOptions(defer=True, trust_cubins=True, planner=replan))
            fallbacks = {
                target: [
                    {"operator": o["kind"], "node": " + ".join(o["nodes"]), "reason": o["why"]}
                    for o in program.meta["host"]["operators"]
                ]
            }
        else:
            from optdnn.tactics.cpu import choose

            # Of the CPU libraries, OpenVINO alone computes some ops in bf16 and others in fp32.
            mixed = is_mixture(plan) and "bf16" in plan.floats and options.tactics == "auto"
            allowed = replace(options, tactics="openvino") if mixed else options
            choice = choose(graph, allowed, cache, meta, say, base=base_of(plan), label=label)
            engine, measured, fallbacks = choice.engine, choice.rows, choice.fallbacks
            if label != "fp32":
                from optdnn.tactics.counterpart import beside_fp32

                in_fp32 = partial(_in_fp32, model, options=options, target=target)
                beside = beside_fp32(in_fp32, choice, label, options, cache, say)
    cache.save()
    said, library = (choice.ran, choice.library) if choice is not None else (None, "")
    if target.partition(":")[0] in ("cuda", "simulate"):
        said, library = (
            on_gpu(graph, tf32_nodes(engine.program)),
            f"no kernel of {target} has that precision for it: another",
        )
    ran = outcome(graph, account, said, library, base_of(plan) if choice is not None else "fp32", passes)
    dangers = hazards(graph) if account.hazards is None else account.hazards
    engine.program.meta["precision"] = contract(plan, ran, dangers, account)
    if options.strict_precision:
        _as_asked(ran)
    needed = custom_digests(graph)
    engine.keep([op for op in options.custom_ops if op.digest in needed])
    return Build(engine, graph, passes, measured, fallbacks, seconds, tuning, ran, beside, first_runs)


def _as_asked(ran: Sequence[Ran]) -> None:
    """Raise NotMet, naming them, where ops do not run in what was asked for."""
    lines = [f"{r.asked.kind} {' + '.join(r.asked.nodes) or r.asked.key}: {r.asked.precision} was asked for, it runs in {r.runs}: "
             f"{r.reason}" for r in ran if r.differs]  # fmt: skip
    if lines:
        raise NotMet(
            "\n  ".join([f"{len(lines)} operators do not run in the precision asked for:", *lines]),
            hint="ask for less with --pin NODES=PRECISION, or leave --strict-precision out",
        )


def _meta(graph: Graph, passes: Sequence[PassReport], *, options: BuildOptions, target: str) -> dict[str, Any]:
    """The deterministic facts of a build that its engine keeps."""
    return {
        "optdnn": __version__,
        "model": {"name": graph.name, "digest": graph_digest(graph)},
        "options": {
            "target": target,
            "precision": options.precision,
            "io_dtype": options.io_dtype,
            "shapes": input_shapes(options.shapes).to_plain(),
            "opt_level": options.opt_level,
            "threads": options.threads,
            "tactics": options.tactics,
            "stop_after": options.stop_after,
            **({"strict": True} if options.strict else {}),
            **({"values": {n: np.asarray(v).tolist() for n, v in options.values.items()}} if options.values else {}),
            **({"streams": options.streams} if options.streams != AUTO else {}),
            **({"row_invariant": True} if options.row_invariant else {}),
            **({"workspace": options.workspace} if options.workspace is not None else {}),
        },
        "passes": [p.to_json() for p in passes],
        "operators": graph.kinds(),
    }


def _found_precisions(graph: Graph, options: BuildOptions, target: str, cache: TimingCache, say: Progress) -> Found:
    """The outcome of ``precision="auto"``. Raises NotMet, before anything is written, where nothing is within the bound."""
    from optdnn.precision.auto import find

    found = find(graph, options, target, cache, say)
    cache.save()
    if not found.met:
        raise _not_met(found.account)
    return found


def _in_fp32(model: Any, *, options: BuildOptions, target: str) -> Graph:
    """The network after the passes that fp32 has."""
    from optdnn.tactics.counterpart import fp32_of

    graph = import_model(model, shapes=options.shapes, custom_ops=options.custom_ops)
    optimize(graph, fp32_of(options), target)
    return graph


def _not_met(account: Outcome) -> NotMet:
    """No engine is within the bound: say which is closest."""
    c = account.candidate()
    verified = "" if c.verified is None else f", {c.verified:.3g} on unseen data"
    expected = "" if c.expected is None else f", {c.expected:.3g} expected from margins"
    return NotMet(
        f"no engine loses less than {account.bound:g} {account.unit}; the closest is {c.name}: {c.drop:.3g} on the data that the "
        f"search saw{verified}{expected}",
        hint=f"nothing was written; --max-drop {c.worst:.3g} would take it, and so might fewer --pin options",
    )


@contextmanager
def _begun(options: BuildOptions) -> Iterator[None]:
    """Has what takes its time begin beside the build, where it may use a GPU: the process that uses it, and the libraries that take
    part. The process ends with the block."""
    if options.target not in ("auto", "cuda") and not options.target.startswith("cuda:"):
        yield
        return
    from optdnn.runtime.cuda import start
    from optdnn.runtime.cuda.trial_process import gpu_process

    with gpu_process() as process:
        start.begin_trials(process, options.target)
        measured = "heuristic" not in options.tactics.split(",") or not options.target.startswith("cuda:")
        if measured:
            wanted = ("cudnn", "cublaslt") if options.tactics == "auto" else options.tactics.split(",")
            start.load_libraries(*(name for name in wanted if name in ("cudnn", "cublaslt")))
        yield


def resolve_target(target: str) -> str:
    """``cuda`` is cuda for the GPU of this machine, and so is ``auto`` where that GPU is usable; else ``auto`` is cpu.

    Raises UsageError for ``cuda`` on a machine without a GPU, MissingDependency where the driver's bindings are absent.
    """
    if target == "auto":
        from optdnn.runtime.cuda.usable import why_not

        target = "cpu" if why_not() else "cuda"
    if target == "cuda":
        from optdnn.runtime.cuda.device import arch_here, gpu_count

        if gpu_count() == 0:
            raise UsageError(
                "there is no usable NVIDIA GPU here to build for", hint="name the architecture: --target cuda:sm_90a"
            )
        return f"cuda:{arch_here()}"
    return target


def plan_of(options: BuildOptions) -> PrecisionPlan:
    """The precision that the options ask for, op by op; fp32 for "auto", which is found out."""
    if options.precision == AUTO:
        return PrecisionPlan()
    return PrecisionPlan.of_option(options.precision, options.precision_map)


class _Calibrate:
    """The ranges that the passes of one plan ask for, of the graph as they meet it."""

    def __init__(self, options: BuildOptions, say: Progress):
        self.options, self.say, self.asked = options, say, 0

    def __call__(self, graph: Graph) -> Calibration:
        shared = self.options.calib
        if not isinstance(shared, SharedCalibration):
            return _calibrated(graph, shared, options=self.options, say=self.say)
        shared.first = shared.first or self
        if shared.first is self:
            shared.found.append(_calibrated(graph, shared.data, options=self.options, say=self.say))
            return shared.found[-1]
        self.asked += 1
        return shared.for_other_sizes(self.asked - 1)


def _calibrated(graph: Graph, data: Any, *, options: BuildOptions, say: Progress) -> Calibration:
    """Ranges for the graph as a pass meets it."""
    from optdnn.calibration import calibrate
    from optdnn.calibration.images import ImageSpec

    return calibrate(
        graph,
        data,
        options.calibrator,
        cache=options.calib_cache,
        images=None if options.images is None else ImageSpec.read(options.images),
        progress=say,
    )


def optimize(
    graph: Graph,
    options: BuildOptions,
    target: str,
    say: Progress = lambda text: None,
    *,
    stop_before: str | None = None,
    account: Account | None = None,
    kept: Kept | None = None,
) -> list[PassReport]:
    """Run the pipeline of the level and target on ``graph``, in place; up to the pass ``stop_before`` where that is given
    ("assign_precision": the exact part alone). ``account`` is filled with what was asked of each op; ``kept`` is what was made
    of the same constants before.

    Raises UsageError for an unknown stop-after."""
    machine = "cuda:sm_90a" if target == "simulate" else target  # simulate runs Hopper's program
    pipeline: tuple[Pass, ...] = PIPELINE(options.opt_level, machine)
    if options.stop_after is not None and options.stop_after not in {p.name for p in pipeline}:
        names = ", ".join(dict.fromkeys(p.name for p in pipeline))
        raise UsageError(f"there is no pass {options.stop_after!r} at -O{options.opt_level}; the passes are: {names}")
    if stop_before is not None:
        before = [p.name for p in pipeline]
        pipeline = pipeline[: before.index(stop_before) if stop_before in before else None]
    if options.io_dtype != "model":
        convert_borders(graph, options.io_dtype)
    calibration = None if options.calib is None else _Calibrate(options, say)
    dump = _Dump(options.dump)
    dump(0, "import", graph)

    def after(index: int, one: Pass, graph: Graph, report: PassReport) -> None:
        say(f"pass {one.name}: {report.changes} changes")
        dump(index + 1, one.name, graph)

    return run_pipeline(
        graph,
        pipeline,
        PassContext(
            target=machine,
            precision=options.precision,
            plan=plan_of(options),
            calibration=calibration,
            account=account,
            kept=kept or Kept(),
        ),
        verify=options.debug,
        stop_after=options.stop_after,
        after=after,
    )


class _Dump:
    """Numbered text dumps of the graph, ``03-fuse_conv_bn.txt``."""

    def __init__(self, folder: Path | None):
        self.folder = folder
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise OutputError(f"the dump folder {folder} cannot be made: {error.strerror}") from None

    def __call__(self, index: int, name: str, graph: Graph) -> None:
        if self.folder is not None:
            from optdnn.ir.text import to_text

            write_atomic(self.folder / f"{index:02d}-{name}.txt", [to_text(graph).encode()])


class _timed:
    """Adds the wall time of a ``with`` block to a dictionary."""

    def __init__(self, into: dict[str, float], name: str):
        self.into, self.name = into, name

    def __enter__(self) -> None:
        self.start = time.perf_counter()

    def __exit__(self, *exc: object) -> None:
        self.into[self.name] = self.into.get(self.name, 0.0) + time.perf_counter() - self.start
