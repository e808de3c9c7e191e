"""The passes of a build: the pipeline of its level and target, with the options' precision, calibration and dumps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from optdnn.calibration.plan_calibration import SharedCalibration
from optdnn.config import AUTO, BuildOptions, Progress
from optdnn.errors import OutputError, UsageError, did_you_mean
from optdnn.ir.constant_cache import ConstantCache
from optdnn.ir.graph import Graph, Value
from optdnn.passes.assign_precision import AssignPrecision
from optdnn.passes.base import Pass, PassContext, PassReport, run_pipeline
from optdnn.passes.pipelines import PIPELINE
from optdnn.passes.support.io_dtype import convert_ports
from optdnn.passes.support.precision import PrecisionPlan
from optdnn.passes.support.precision_report import PrecisionLog
from optdnn.passes.support.ranges import Calibration
from optdnn.runtime.file.atomic import write_atomic
from optdnn.target_name import TargetName
from optdnn.types import Array

Decide = Callable[[Graph, PrecisionPlan, Calibration], PrecisionPlan]
"""Function that changes the requested plan for a graph whose exact passes are done."""


def plan_of(options: BuildOptions) -> PrecisionPlan:
    """The precision that the options request, op by op; fp32 for "auto", for which a search finds the precisions."""
    if options.precision == AUTO:
        return PrecisionPlan()
    return PrecisionPlan.of_option(options.precision, options.precision_map)


class _Calibrate:
    """The ranges that the passes of one plan request, for the graph in its current state."""

    def __init__(self, options: BuildOptions, say: Progress):
        self.options, self.say, self.asked = options, say, 0

    def __call__(self, graph: Graph) -> Calibration:
        shared = self.options.calib
        if not isinstance(shared, SharedCalibration):
            return self._calibrated(graph, shared)
        shared.first = shared.first or self
        if shared.first is self:
            shared.found.append(self._calibrated(graph, shared.data))
            return shared.found[-1]
        self.asked += 1
        return shared.for_other_sizes(self.asked - 1)

    def _calibrated(self, graph: Graph, data: Any) -> Calibration:
        """Ranges for the graph as the requesting pass sees it."""
        return calibrated(graph, data, plan_of(self.options).quantizes, self.options, self.say)


def calibrated(graph: Graph, data: Any, quantizes: bool, options: BuildOptions, say: Progress) -> Calibration:
    """The ranges of the graph's values, as the options ask for. Where nothing is quantized, only the extremes matter."""
    from optdnn.calibration import calibrate
    from optdnn.calibration.images import pictures_of

    return calibrate(
        graph,
        data,
        options.calibrator if quantizes else "minmax",
        strict=quantizes,
        cache=options.calib_cache,
        images=pictures_of(options),
        progress=say,
    )


def operand_moments(
    options: BuildOptions, graph: Graph, wanted: Sequence[Value], *, say: Progress
) -> Iterator[tuple[Value, Array]]:
    """The second moments of values on the options' calibration data, one after another."""
    from optdnn.calibration import second_moments
    from optdnn.calibration.images import pictures_of

    if isinstance(options.calib, SharedCalibration):
        raise UsageError(
            "weights of 4 and 8 bits with calibration data need fixed shapes",
            hint="give one size for each input, or leave --calib out",
        )
    images = pictures_of(options)
    return second_moments(graph, options.calib, wanted, images=images, progress=say)


def optimize(
    graph: Graph,
    options: BuildOptions,
    target: str,
    say: Progress = lambda text: None,
    *,
    stop_before: str | None = None,
    precision_log: PrecisionLog | None = None,
    kept: ConstantCache | None = None,
    decide: Decide | None = None,
) -> list[PassReport]:
    """Run the pipeline of the level and target on ``graph``, in place. It ends before the pass ``stop_before``, if one is given
    ("assign_precision": only the exact part runs). ``precision_log`` receives the requested precision of each op. ``kept`` holds
    constants that earlier runs derived from the same weights. ``decide`` changes the plan, if the options have calibration data.

    Raises UsageError for an unknown stop-after."""
    machine = str(TargetName.parse(target).machine)  # simulate runs Hopper's program
    pipeline: tuple[Pass, ...] = PIPELINE(options.opt_level, machine)
    if options.stop_after is not None and options.stop_after not in {p.name for p in pipeline}:
        names = list(dict.fromkeys(p.name for p in pipeline))
        raise UsageError(
            f"there is no pass {options.stop_after!r} at -O{options.opt_level}; the passes are: {', '.join(names)}",
            hint=did_you_mean(options.stop_after, names),
        )
    if stop_before is not None:
        before = [p.name for p in pipeline]
        pipeline = pipeline[: before.index(stop_before) if stop_before in before else None]
    if options.io_dtype != "model":
        convert_ports(graph, options.io_dtype)
    calibration = None if options.calib is None else _Calibrate(options, say)
    dump = _Dump(options.dump)
    dump(0, "import", graph)

    def after(index: int, one: Pass, graph: Graph, report: PassReport) -> None:
        say(f"pass {one.name}: {report.changes} changes")
        dump(index + 1, one.name, graph)

    context = PassContext(
        target=machine,
        precision=options.precision,
        plan=plan_of(options),
        calibration=calibration,
        moments=None if options.calib is None else partial(operand_moments, options, say=say),
        precision_log=precision_log,
        row_invariant=options.row_invariant,
        kept=kept or ConstantCache(),
    )
    run = partial(run_pipeline, graph, verify=options.debug, stop_after=options.stop_after)
    if decide is None or calibration is None:
        return run(pipeline, context, after=after)
    exact = [p.name for p in pipeline].index(AssignPrecision.name)
    reports = run(pipeline[:exact], context, after=after)
    found = calibration(graph)
    context = replace(context, plan=decide(graph, plan_of(options), found), calibration=found)
    return [*reports, *run(pipeline[exact:], context, after=lambda index, *each: after(exact + index, *each))]


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
