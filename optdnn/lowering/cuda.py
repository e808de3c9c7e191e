"""Lowering for `cuda` and `simulate`: every operator becomes launches of kernels over views of planned buffers.

1. Reserve the places that are fixed: outputs of the network, joint buffers of concatenations.
2. Plan (:mod:`optdnn.lowering.sites`): choose which region computes each operator, by which tactic, and where results lie.
3. Make the steps of the plan; leave out what nothing reads.
4. Order the steps so that the GPU's run in as few pieces as possible, place independent ones on lanes, compile, plan the arena.

An operator that has no kernel, or whose sizes depend on data, becomes a step on the host (:mod:`optdnn.lowering.host`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from optdnn.config import BuildOptions
from optdnn.dim import DimLike
from optdnn.dim_text import lone
from optdnn.errors import UnsupportedError, UnsupportedNode, UsageError
from optdnn.ir.constant_cache import ConstantCache
from optdnn.ir.graph import STRUCTURAL, Graph
from optdnn.kernels.builder import Builder, TensorView, has_tf32, row_major
from optdnn.kernels.layout.views import VIEWS
from optdnn.lowering.assemble import SITE, compact, placed, pruned, without_sites
from optdnn.lowering.bounds import input_bounds
from optdnn.lowering.choose import Decision, Selection, TacticChoice
from optdnn.lowering.host import HostSide, plain_shape, summary
from optdnn.lowering.l2_prefetch import with_ahead
from optdnn.lowering.lane_choice import LaneChoice, on_lanes
from optdnn.lowering.lanes import LATENCY
from optdnn.lowering.schedule import group_steps, keep_inputs_on_host
from optdnn.lowering.sites import NoKernel, Planner, Visit, emit_plan
from optdnn.lowering.table import TACTICS
from optdnn.runtime.cuda.gpu_facts import GpuFacts
from optdnn.runtime.program import Kernel, Program
from optdnn.target_name import TargetName
from optdnn.types import Array, TensorSpec


@dataclass(frozen=True)
class Emitted:
    """A program whose kernels are not compiled and whose arena is not planned, and the decisions it is made of: those whose
    launches it holds. ``sites`` says for each step the number of its decision."""

    program: Program
    decisions: Sequence[Decision]
    sites: Sequence[int | None]

    def seconds(self, measured: Mapping[str, float] | None = None) -> dict[int, float]:
        """Step number -> seconds that it adds to a chain, where they are known: predicted, or ``measured`` of operators (by
        signature) of one launch."""
        known: dict[int, float] = {}
        for step, site in enumerate(self.sites):
            if site is None or self.decisions[site].launches != 1:
                continue
            d = self.decisions[site]
            predicted = None if d.seconds is None else max(LATENCY, d.seconds - OVERLAP)
            taken = (measured or {}).get(d.signature, predicted)
            if taken is not None:
                known[step] = taken
        return known


OVERLAP = 0.5e-6
"""Seconds of a launch's prediction that pass while the one before it ends: the cost model is of one alone."""


def lower_cuda(
    graph: Graph,
    options: BuildOptions,
    gpu: GpuFacts,
    meta: dict[str, Any],
    say: Callable[[str], None] = lambda text: None,
    choices: Mapping[str, TacticChoice] | None = None,
    streams: LaneChoice | None = None,
    visit: Visit = lambda b, op, key: None,
    kept: ConstantCache | None = None,
    emitted: Emitted | None = None,
    ready: Mapping[Made, Array] | None = None,
) -> Program:
    """The program of an optimized graph for ``options.target``: "cuda:ARCH", or "simulate" (Hopper's program, without
    compiled kernels). ``gpu`` has the facts of the GPU that grids and configurations are chosen for.

    ``choices`` by signature go before the cost model, and ``visit`` may add to them; ``streams`` is what tuning found of lanes;
    ``kept``: constants of other programs, to be shared; ``emitted``: the launches of these very choices, made already;
    ``ready``: cubins that are there already.
    Raises UsageError for a dimension that is not known; UnsupportedError where ``options.strict`` forbids steps on the host, naming
    every operator that needs one, and where an operator has no NumPy kernel either.
    """
    if emitted is None:
        emitted = emit_program(graph, options, gpu, meta, choices, visit, kept)
    else:
        emitted.program.meta = {**meta, **emitted.program.meta}
    known = emitted.seconds(None if streams is None else streams.seconds)
    program = on_lanes(with_ahead(emitted.program, gpu, known), gpu, known, options, streams)
    if not TargetName.parse(options.target).simulated and not options.no_cubins:
        program = _compiled(program, say, ready or {})
    return placed(program)


def emit_program(
    graph: Graph,
    options: BuildOptions,
    gpu: GpuFacts,
    meta: dict[str, Any],
    choices: Mapping[str, TacticChoice] | None = None,
    visit: Visit = lambda b, op, key: None,
    kept: ConstantCache | None = None,
) -> Emitted:
    """The launches of an optimized graph. ``kept``: constants of other programs, to be shared.

    Raises as :func:`lower_cuda`.
    """
    selection = Selection.of(options, choices)
    _need_static(graph)
    to_host: dict[int, str] = {}
    while True:
        planned = plan(graph, options, gpu, selection, visit, kept, to_host)
        try:
            decisions = emit_plan(planned.b)
            break
        except NoKernel as error:
            to_host[error.op.id] = error.why
    b, host = planned.b, planned.host
    meta = {**meta, "arch": gpu.arch}
    program = pruned(b.program(options.target, options.precision, planned.inputs, planned.outputs, meta))
    present = {s.params.get(SITE) for s in program.steps}
    held = [k for k, d in enumerate(decisions) if not d.dropped and (not d.launches or k in present)]
    rows = [d if k in held else replace(d, dropped=True) for k, d in enumerate(decisions)]
    program.meta["tactics"] = [d.to_plain() for d in rows]
    program, sites = without_sites(compact(group_steps(keep_inputs_on_host(program))))
    program.meta["host"] = summary(graph, host, program)
    if bounds := input_bounds(graph):
        program.meta["bounds"] = bounds
    number = {k: i for i, k in enumerate(held)}
    return Emitted(program, [decisions[k] for k in held], [None if k is None else number[k] for k in sites])


@dataclass(frozen=True)
class Planned:
    """A graph whose every operator has a side, a region, a tactic and places: ``b.plan`` has what is to be launched, in order. Nothing
    is launched yet. ``inputs`` and ``outputs`` are the network's, with their buffers."""

    b: Builder
    host: HostSide
    inputs: Sequence[tuple[TensorSpec, int]]
    outputs: Sequence[tuple[TensorSpec, int]]


def plan(
    graph: Graph,
    options: BuildOptions,
    gpu: GpuFacts,
    selection: Selection,
    visit: Visit = lambda b, op, key: None,
    kept: ConstantCache | None = None,
    to_host: Mapping[int, str] | None = None,
) -> Planned:
    """Plan an optimized graph. ``to_host``: operators (by number) that run on the host, each with the reason.

    Raises UnsupportedError where ``options.strict`` forbids steps on the host, and as :func:`lower_cuda`.
    """
    b = Builder(graph, gpu, kept=kept or ConstantCache())
    b.padded = any(map(has_tf32, graph.ops()))
    b.row_invariant = selection.row_invariant
    host = HostSide(b, frozenset({*TACTICS, *VIEWS}))
    inputs, outputs = _borders(b)
    Planner(b, host, selection, visit, options.strict, to_host or {}).run()
    _refuse_host(host, options)
    _finish_outputs(b, host, outputs)
    return Planned(b, host, inputs, outputs)


def _refuse_host(host: HostSide, options: BuildOptions) -> None:
    """Raise UnsupportedError where ``strict`` forbids steps on the host, and there are some."""
    if options.strict and host.ops:
        raise UnsupportedError(
            f"{options.target} has no kernels for {len(host.ops)} operators, and strict forbids running them on the CPU",
            [UnsupportedNode(h.op.name, h.op.kind, "", 0, h.why) for h in host.ops],
            hint="build without --strict; optdnn check MODEL --target TARGET tells what that costs",
        )


def _finish_outputs(b: Builder, host: HostSide, outputs: list[tuple[TensorSpec, int]]) -> None:
    """Bring the network's outputs to their buffers, where nothing writes them there."""
    for k, ((spec, i), op_id) in enumerate(zip(outputs, b.graph.outputs, strict=True)):
        op = b.graph.op(op_id)
        assert op.inputs[0] is not None
        if op.inputs[0] in host.made:
            outputs[k] = (spec, host.buffer(op.inputs[0]))
            continue
        found = b.operand(op.inputs[0])
        if not found.size:
            b.buffers[i] = replace(b.buffers[i], blob=b.blob(np.empty(b.buffers[i].shape or (), found.dtype)))  # type: ignore[arg-type]
        elif found.buffer != i:
            b.move(op, found, TensorView(i, 0, found.shape, row_major(found.shape), found.dtype))


def _need_static(graph: Graph) -> None:
    for i in graph.inputs:
        out = graph.op(i).outputs[0]
        # what follows from symbols is fixed with them: each of these is another dimension by itself
        names = [name for d in out.type.shape or () if (name := lone(d)) is not None]
        if out.type.shape is None or names:
            one, some = (example(out.type.shape or (), n) for n in ("1", "1..8..32"))
            shape = f"--shape {out.name}={one}, or {some} for a range" if names else f"--shape {out.name}=1x3x224x224"
            raise UsageError(
                f"input {out.name!r} has dimensions that are not fixed ({', '.join(names) or 'unknown rank'})",
                hint=f"an engine for a GPU is for sizes, or ranges of them (least..likely..most), that are given: {shape}",
            )


def example(shape: Sequence[DimLike], symbolic: str | Callable[[str], str]) -> str:
    """A shape as ``--shape`` takes it: ``symbolic`` (or what it gives for the name) for each symbol, ? where symbols say it all."""

    def text(d: DimLike) -> str:
        name = None if isinstance(d, int) else lone(d)
        if name is None:
            return str(d) if isinstance(d, int) else "?"
        return symbolic if isinstance(symbolic, str) else symbolic(name)

    return "x".join(map(text, shape)) or "scalar"


def _borders(b: Builder) -> tuple[list[tuple[TensorSpec, int]], list[tuple[TensorSpec, int]]]:
    """Buffers of the network's inputs and outputs; an output that one kernel makes is written there at once."""
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
        if not graph.type(value).is_static:  # the host makes it
            sizes = plain_shape(t)
            if sizes is None:
                raise UnsupportedError(f"output {op.outputs[0].name!r} has an unknown rank")
            outputs.append((TensorSpec(op.outputs[0].name, t.dtype, sizes), -1))
            continue
        shape = graph.type(value).static_shape
        placed = b.new(op.outputs[0].name, t.dtype, shape)
        outputs.append((TensorSpec(op.outputs[0].name, t.dtype, shape), placed.buffer))
        if graph.op(value).kind not in STRUCTURAL and not graph.type(value).layout:
            b.reserved.setdefault(value, placed)
    return inputs, outputs


def _compiled(program: Program, say: Callable[[str], None], ready: Mapping[Made, Array]) -> Program:
    """The program with the cubin of every kernel among its blobs; those that are not ``ready`` are compiled."""
    from optdnn.runtime.cuda.compile.nvrtc import KernelCache, version
    from optdnn.runtime.cuda.compile.recipes import recipe_of

    kernels = {made_of(k): k for k in program.kernels}
    missing = {made: recipe_of(k) for made, k in kernels.items() if made not in ready}
    say(f"compile {len(missing)} kernels")
    compiled = KernelCache().get_many(list(missing.values()), workers=min(16, os.cpu_count() or 1)) if missing else []
    cubins = {**ready, **{made: np.frombuffer(c, np.uint8) for made, c in zip(missing, compiled, strict=True)}}
    number = {made: len(program.blobs) + i for i, made in enumerate(kernels)}
    if missing:
        program.meta["nvrtc"] = ".".join(map(str, version()))
    blobs = [*program.blobs, *(cubins[made] for made in kernels)]
    return replace(program, kernels=tuple(replace(k, cubin=number[made_of(k)]) for k in program.kernels), blobs=blobs)


Made = tuple[Any, ...]
"""What a cubin is made from, but for the compiler's version."""


def made_of(k: Kernel) -> Made:
    """Equal for kernels that have the same cubin."""
    return (k.template, k.arch, tuple(sorted(k.generated.items())), k.options, k.source)
