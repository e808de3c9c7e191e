"""Lowering for `cuda` and `simulate`: every operator becomes kernel launches over views of planned buffers.

1. Reserve fixed places: the network's outputs, and joint buffers of concatenations.
2. Plan (:mod:`optdnn.lowering.sites`): choose the region, the tactic and the place of the results of each operator.
3. Emit the steps of the plan. Remove steps whose results nothing reads.
4. Order the steps, put independent steps on lanes, compile the kernels, plan the arena.

An operator without a kernel, or with sizes that depend on data, becomes a step on the host (:mod:`optdnn.lowering.host`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from optdnn.config import BuildOptions
from optdnn.dim_text import lone
from optdnn.errors import RefusedNode, UnsupportedError, UsageError
from optdnn.ir.constant_cache import ConstantCache
from optdnn.ir.graph import STRUCTURAL, Graph
from optdnn.kernels.builder import Builder, TensorView, has_tf32, row_major
from optdnn.kernels.layout.views import VIEWS
from optdnn.lowering.assemble import SITE, compact, placed, pruned, without_sites
from optdnn.lowering.bounds import input_bounds
from optdnn.lowering.choose import Decision, Selection, TacticChoice
from optdnn.lowering.cubins import CubinKey, with_cubins
from optdnn.lowering.host import HostSide, summary
from optdnn.lowering.joined_launches import with_joined_launches
from optdnn.lowering.l2_prefetch import with_ahead
from optdnn.lowering.lane_choice import LaneChoice, on_lanes
from optdnn.lowering.lanes import LATENCY, load_of
from optdnn.lowering.likely_shapes import sizes_needed
from optdnn.lowering.megakernels import with_megakernels
from optdnn.lowering.schedule import group_steps, keep_inputs_on_host
from optdnn.lowering.sites import NoKernel, Planner, Visit, emit_plan, no_visit
from optdnn.lowering.step_times import with_step_times
from optdnn.lowering.steps import port_spec
from optdnn.lowering.table import TACTICS
from optdnn.runtime.cuda.gpu_facts import GpuFacts, fitted
from optdnn.runtime.cuda.launches.plan import parse
from optdnn.runtime.program import Program
from optdnn.target_name import TargetName
from optdnn.types import Array, TensorSpec


@dataclass(frozen=True)
class Emitted:
    """A program without cubins and without an arena, and the decisions whose launches it contains.

    ``sites``: the number of each step's decision (None: the step has none).
    """

    program: Program
    decisions: Sequence[Decision]
    sites: Sequence[int | None]

    def seconds(self, gpu: GpuFacts, measured: Mapping[str, float] | None = None) -> dict[int, float]:
        """Step number -> seconds that the step adds to a chain of launches.

        The seconds are ``measured`` (by signature) or else predicted. Steps without either are left out. Those of an operator with
        several launches are divided in proportion to a rough estimate of each launch on ``gpu``. Predictions do not include copies
        into another layout, and stages that no other launch computes.
        """
        known: dict[int, float] = {}
        for site, steps in self._steps_of_sites().items():
            d = self.decisions[site]
            predicted = None if d.seconds is None else max(LATENCY, d.seconds - OVERLAP)
            taken = (measured or {}).get(d.signature, predicted)
            if taken is None:
                continue
            if len(steps) == 1:
                known[steps[0]] = taken
                continue
            if d.signature not in (measured or {}):
                kinds = [parse(self.program.steps[k], self.program).meaning.kind for k in steps]
                steps = [k for k, kind in zip(steps, kinds, strict=True) if kind not in APART] or steps
            rough = [load_of(self.program.steps[k], self.program, gpu).seconds for k in steps]
            known |= {k: taken * (one / sum(rough)) for k, one in zip(steps, rough, strict=True)}
        return known

    def _steps_of_sites(self) -> dict[int, list[int]]:
        """Decision number -> its steps, if all of them are on the GPU."""
        steps: dict[int, list[int]] = {}
        for k, site in enumerate(self.sites):
            if site is not None and self.program.steps[k].executor == "cuda":
                steps.setdefault(site, []).append(k)
        return {site: found for site, found in steps.items() if len(found) == self.decisions[site].launches}

    def measured(self, times: Mapping[str, float]) -> set[int]:
        """The numbers of the steps whose seconds are among these measured times (by signature)."""
        found = ((self.decisions[site], steps) for site, steps in self._steps_of_sites().items())
        return {k for d, steps in found if d.signature in times for k in steps}


APART = ("Copy", "Pointwise")
"""Kinds of launches that an operator's prediction does not include if it has others."""
OVERLAP = 0.5e-6
"""Overlap of consecutive launches in seconds. The cost model predicts a launch alone."""


@dataclass(frozen=True)
class Prepared:
    """What earlier work decided or compiled for a program; each field is optional.

    ``choices`` by signature take precedence over the cost model. ``streams`` is the measured choice of lanes. ``emitted`` has the
    launches of exactly these choices. ``cubins`` are compiled kernels.
    """

    choices: Mapping[str, TacticChoice] = field(default_factory=dict)
    streams: LaneChoice | None = None
    emitted: Emitted | None = None
    cubins: Mapping[CubinKey, Array] = field(default_factory=dict)


def lower_cuda(
    graph: Graph,
    options: BuildOptions,
    gpu: GpuFacts,
    meta: dict[str, Any],
    say: Callable[[str], None] = lambda text: None,
    prepared: Prepared = Prepared(),
    visit: Visit = no_visit,
    constants: ConstantCache | None = None,
) -> Program:
    """The program of an optimized graph for ``options.target``: "cuda:ARCH", or "simulate" (Hopper's program without cubins).

    ``gpu``: the GPU for which grids and configurations are chosen. ``visit`` may add to ``prepared.choices``. ``constants`` are
    shared with other programs.

    Raises UsageError for a dimension that is not fixed. Raises UnsupportedError if ``options.strict`` forbids steps on the host
    (it names every operator that needs one), or if an operator has no NumPy kernel either.
    """
    emitted, streams = prepared.emitted, prepared.streams
    if emitted is None:
        emitted = emit_program(graph, options, gpu, meta, prepared.choices, visit, constants)
    else:
        emitted.program.meta = {**meta, **emitted.program.meta}
    times = {} if streams is None else streams.seconds
    seconds, measured = emitted.seconds(fitted(gpu), times), emitted.measured(times)
    program, moved = with_joined_launches(emitted.program, gpu)
    seconds, measured = _renumbered(seconds, measured, moved)
    if not options.row_invariant:
        program, moved = with_megakernels(program, gpu)
        seconds, measured = _renumbered(seconds, measured, moved)
    program = with_step_times(with_ahead(program, gpu, seconds), gpu, seconds, measured)
    if not program.meta.get("runs"):  # a megakernel leaves nothing idle for other lanes
        program = on_lanes(program, gpu, seconds, options, streams)
    if not TargetName.parse(options.target).simulated and not options.no_cubins:
        program = with_cubins(program, say, prepared.cubins, options.custom_ops)
    return placed(program)


def _renumbered(
    seconds: Mapping[int, float], measured: Collection[int], moved: Mapping[int, int]
) -> tuple[dict[int, float], set[int]]:
    """The times of steps, and the measured steps, with new numbers. ``moved``: new number -> old one."""
    times = {k: seconds[old] for k, old in moved.items() if old in seconds}
    return times, {k for k, old in moved.items() if old in measured}


def emit_program(
    graph: Graph,
    options: BuildOptions,
    gpu: GpuFacts,
    meta: dict[str, Any],
    choices: Mapping[str, TacticChoice] | None = None,
    visit: Visit = no_visit,
    constants: ConstantCache | None = None,
) -> Emitted:
    """The launches of an optimized graph. ``constants`` are shared with other programs. Raises as :func:`lower_cuda`."""
    selection = Selection.of(options, choices)
    _need_static(graph, options.target)
    to_host: dict[int, str] = {}
    while True:
        planned = plan(graph, options, gpu, selection, visit, constants, to_host)
        try:
            decisions = emit_plan(planned.b)
            break
        except NoKernel as error:
            to_host[error.op.id] = error.why
    b, host = planned.b, planned.host
    _fill_empty_outputs(b, planned.outputs)
    meta = {**meta, "arch": gpu.arch, "gpu": {"name": gpu.name, "multiprocessors": gpu.multiprocessors}}
    program = pruned(b.program(options.target, options.precision, planned.inputs, planned.outputs, meta))
    present = Counter(s.params.get(SITE) for s in program.steps)
    used = [k for k, d in enumerate(decisions) if not d.dropped and (not d.launches or k in present)]
    number = {k: i for i, k in enumerate(used)}
    # The next site may compute what the last of several launches would: then nothing reads that one's results.
    decisions = [
        replace(d, launches=present[k]) if k in number else replace(d, dropped=True) for k, d in enumerate(decisions)
    ]
    program.meta["tactics"] = [d.to_plain() for d in decisions]
    program, sites = without_sites(compact(group_steps(keep_inputs_on_host(program))))
    program.meta["host"] = summary(graph, host, program)
    if bounds := input_bounds(graph):
        program.meta["bounds"] = bounds
    return Emitted(program, [decisions[k] for k in used], [None if k is None else number[k] for k in sites])


@dataclass(frozen=True)
class Planned:
    """A plan: each operator has a side, a region, a tactic and places. ``b.plan`` lists the launches to emit, in order; nothing is
    launched yet. ``inputs`` and ``outputs`` are the network's ports, with their buffers."""

    b: Builder
    host: HostSide
    inputs: Sequence[tuple[TensorSpec, int]]
    outputs: Sequence[tuple[TensorSpec, int]]


def plan(
    graph: Graph,
    options: BuildOptions,
    gpu: GpuFacts,
    selection: Selection,
    visit: Visit = no_visit,
    constants: ConstantCache | None = None,
    to_host: Mapping[int, str] | None = None,
) -> Planned:
    """Plan an optimized graph. ``to_host``: operators (by number) that must run on the host -> the reason.

    Raises as :func:`lower_cuda`.
    """
    b = Builder(graph, gpu, kept=constants or ConstantCache())
    b.padded = any(map(has_tf32, graph.ops()))
    b.row_invariant, b.lanes = selection.row_invariant, options.streams != 1
    host = HostSide(b, frozenset({*TACTICS, *VIEWS}))
    inputs, outputs = _ports(b)
    Planner(b, host, selection, visit, options.strict, to_host or {}).run()
    _refuse_host(host, options)
    _finish_outputs(b, host, outputs)
    return Planned(b, host, inputs, outputs)


def _refuse_host(host: HostSide, options: BuildOptions) -> None:
    """Raise UnsupportedError if ``strict`` forbids steps on the host and the plan has some."""
    if options.strict and host.ops:
        raise UnsupportedError(
            f"{options.target} has no kernels for {len(host.ops)} operators, and strict forbids running them on the CPU",
            [RefusedNode(h.op.name, h.op.kind, "", 0, h.why) for h in host.ops],
            hint="build without --strict; optdnn check MODEL --target TARGET shows their cost",
        )


def _finish_outputs(b: Builder, host: HostSide, outputs: list[tuple[TensorSpec, int]]) -> None:
    """Add a copy for each of the network's outputs that no kernel writes directly to its buffer."""
    for k, ((spec, i), op_id) in enumerate(zip(outputs, b.graph.outputs, strict=True)):
        op = b.graph.op(op_id)
        assert op.inputs[0] is not None
        if op.inputs[0] in host.computed:
            outputs[k] = (spec, host.buffer(op.inputs[0]))
            continue
        x = b.operand(op.inputs[0])
        if x.size and x.buffer != i:
            b.move(op, x, TensorView(i, 0, x.shape, row_major(x.shape), x.dtype))


def _fill_empty_outputs(b: Builder, outputs: Sequence[tuple[TensorSpec, int]]) -> None:
    """Make each output without elements a constant, unless a step writes it: other results of that step have elements."""
    written = {i for step in b.steps for i in step.outputs}
    for _, i in outputs:
        buffer = b.buffers[i]
        if i not in written and buffer.blob is None and buffer.shape is not None and 0 in buffer.shape:
            b.buffers[i] = replace(buffer, blob=b.blob(np.empty(buffer.shape, buffer.dtype)))  # type: ignore[arg-type]


def _need_static(graph: Graph, target: str) -> None:
    """Raise UsageError if an input's shape is not fixed."""
    for i in graph.inputs:
        out = graph.op(i).outputs[0]
        if out.type.shape is None:
            raise UsageError(
                f"input {out.name!r} has dimensions that are not fixed (unknown rank)",
                hint=f"an engine for a GPU needs sizes: --shape {out.name}=1x3x224x224",
            )
        # Only free symbols count: sizes that are computed from symbols are fixed with them.
        if any(lone(d) is not None for d in out.type.shape):
            raise sizes_needed(graph, target)


def _ports(b: Builder) -> tuple[list[tuple[TensorSpec, int]], list[tuple[TensorSpec, int]]]:
    """Buffers of the network's inputs and outputs. The kernel that computes an output writes it there directly."""
    graph = b.graph
    inputs, outputs = [], []
    for i in graph.inputs:
        out = graph.op(i).outputs[0]
        shape = out.type.static_shape
        b.place[graph.op(i).value] = b.new(out.name, out.type.dtype, shape)
        inputs.append((TensorSpec(out.name, out.type.dtype, shape), len(b.buffers) - 1))
    for i in graph.outputs:
        op = graph.op(i)
        value, t = op.inputs[0], op.outputs[0].type
        assert value is not None
        if not graph.type(value).is_static:  # the host computes it
            outputs.append((port_spec(graph, i), -1))
            continue
        shape = graph.type(value).static_shape
        placed = b.new(op.outputs[0].name, t.dtype, shape)
        outputs.append((TensorSpec(op.outputs[0].name, t.dtype, shape), placed.buffer))
        if graph.op(value).kind not in STRUCTURAL and not graph.type(value).layout:
            b.reserved.setdefault(value, placed)
    return inputs, outputs
