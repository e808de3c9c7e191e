"""Lowering for `cuda` and `simulate`: every operator becomes launches of kernels over views of planned buffers.

The order of things: reserve the places that are fixed (outputs of the network, joint buffers of concatenations), emit each
operator by the first tactic of its kind that does not refuse it, drop what nothing reads, compile, plan the arena. An operator
that has no kernel, or whose sizes depend on data, becomes a step on the host (:mod:`optdnn.tactics.cuda.host`), and the steps
are ordered so that the GPU's run in as few pieces as possible.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from optdnn.config import AUTO, BuildOptions
from optdnn.dim import Dim
from optdnn.errors import UnsupportedError, UnsupportedNode, UsageError
from optdnn.ir.graph import STRUCTURAL, Graph, Op, Value
from optdnn.memory import place_buffers
from optdnn.passes.precision import PrecisionPlan
from optdnn.runtime.host import host_buffers
from optdnn.runtime.program import Buffer, Kernel, Program, Step
from optdnn.tactics.cuda.builder import Builder, Placed, row_major
from optdnn.tactics.cuda.host import CHEAPER, HostSide, plain_shape, summary
from optdnn.tactics.cuda.pointwise import copy
from optdnn.tactics.cuda.schedule import group_steps, keep_inputs_on_host
from optdnn.tactics.cuda.select import Choice, Decision, Selection, emit_op, signature
from optdnn.tactics.cuda.table import TACTICS, WRITES_ANYWHERE
from optdnn.tactics.cuda.views import VIEWS, plan_concats
from optdnn.types import Array, TensorSpec

ALIGNMENT = 256
"""Of every buffer in the arena, in bytes: what cudaMalloc gives."""


@dataclass(frozen=True)
class Emitted:
    """A program whose kernels are not compiled and whose arena is not planned, and the decisions it is made of: those whose
    launches it holds."""

    program: Program
    decisions: Sequence[Decision]


Visit = Callable[[Builder, Op, str], None]
"""Called before an operator's launches are added, with its signature."""


def lower_cuda(
    graph: Graph,
    options: BuildOptions,
    target: str,
    meta: dict[str, Any],
    say: Callable[[str], None] = lambda text: None,
    choices: Mapping[str, Choice] | None = None,
) -> Program:
    """The program of an optimized graph for "cuda:ARCH", or for "simulate" (Hopper's program, without compiled kernels).

    ``choices`` by signature go before the cost model. Raises UsageError for a dimension that is not known; UnsupportedError
    where ``options.strict`` forbids steps on the host, naming every operator that needs one, and where an operator has no NumPy
    kernel either.
    """
    program = emit_program(graph, options, target, meta, choices).program
    if target != "simulate" and not options.no_cubins:
        program = _compiled(program, say)
    return placed(program)


def placed(program: Program) -> Program:
    """The program with its arena."""
    program, plan = place_buffers(program, ALIGNMENT, partial(overwritable, program), outside=host_buffers(program))
    program.meta["memory"] = {"arena_bytes": plan.arena_bytes, "live_bytes": plan.live_bytes}
    return program


def overwritable(program: Program, step: Step) -> list[tuple[int, int]]:
    """The (output, input) buffers of a step that may share memory: a pointwise kernel reads each element in the thread that
    writes it, so its result may lie over an operand that is read in the very same order and nowhere else."""
    launch = step.params.get("launch")
    if launch is None or program.kernels[launch["kernel"]].function != "pointwise":
        return []
    operands = (*step.inputs, *step.outputs)
    (write,) = step.params["writes"]
    out = operands[write[0]]
    reads: dict[int, list[Any]] = {}
    for read in step.params["reads"]:
        if read is not None:
            reads.setdefault(operands[read[0]], []).append(read[1:])
    width = program.buffers[out].dtype.itemsize
    return [
        (out, i)
        for i, views in reads.items()
        if i != out and program.buffers[i].dtype.itemsize == width and all(view == write[1:] for view in views)
    ]


def emit_program(
    graph: Graph,
    options: BuildOptions,
    target: str,
    meta: dict[str, Any],
    choices: Mapping[str, Choice] | None = None,
    visit: Visit = lambda b, op, key: None,
    arrays: dict[Any, Array] | None = None,
) -> Emitted:
    """The launches of an optimized graph. ``arrays``: constants of other programs by content, to be shared.

    Raises as :func:`lower_cuda`.
    """
    arch = target.partition(":")[2] or "sm_90a"
    selection = Selection.of(options, choices)
    _need_static(graph)
    b = Builder(graph, arch, arrays={} if arrays is None else arrays)
    auto = options.precision == AUTO  # whose plan is in the graph's types; it never holds tf32
    plan = PrecisionPlan() if auto else PrecisionPlan.of_option(options.precision, options.precision_map)
    if "tf32" in plan.floats:
        b.padded, b.tf32 = True, lambda op: plan.of(op) == "tf32"
    host = HostSide(b, frozenset({*TACTICS, *VIEWS}))
    inputs, outputs = _borders(b)
    plan_concats(b, WRITES_ANYWHERE)
    decisions: list[Decision] = []
    for op in graph.order():
        if op.kind not in STRUCTURAL:
            decisions += _lower(b, host, op, selection, visit, options.strict)
    if options.strict and host.ops:
        raise UnsupportedError(
            f"{target} has no kernels for {len(host.ops)} operators, and strict forbids running them on the CPU",
            [UnsupportedNode(h.op.name, h.op.kind, "", 0, h.why) for h in host.ops],
            hint="build without --strict; optdnn check MODEL --target TARGET tells what that costs",
        )
    for k, ((spec, i), op_id) in enumerate(zip(outputs, graph.outputs, strict=True)):
        op = graph.op(op_id)
        assert op.inputs[0] is not None
        if op.inputs[0] in host.made:
            outputs[k] = (spec, host.buffer(op.inputs[0]))
            continue
        found = b.operand(op.inputs[0])
        if not found.size:
            b.buffers[i] = replace(b.buffers[i], blob=b.blob(np.empty(b.buffers[i].shape or (), found.dtype)))  # type: ignore[arg-type]
        elif found.buffer != i:
            shape = found.shape
            copy(b, op, found, Placed(i, 0, shape, row_major(shape), found.dtype))
    program = pruned(b.program(target, options.precision, inputs, outputs, {**meta, "arch": arch}))
    kept = set(map(id, program.steps))
    program.meta["tactics"] = [d.to_plain() for d in decisions]
    held = [d for d in decisions if not d.steps or any(id(s) in kept for s in d.steps)]
    program = compact(group_steps(keep_inputs_on_host(program)))
    program.meta["host"] = summary(graph, host, program)
    return Emitted(program, held)


def _lower(b: Builder, host: HostSide, op: Op, selection: Selection, visit: Visit, strict: bool) -> list[Decision]:
    """Emit one operator; returns the account of the choice, where there was one."""
    if Value(op.id, 0) in b.place:
        return []  # an operator before it took it along
    if all(Value(op.id, port) in b.place for port in range(len(op.outputs))):
        return []  # what makes its operand makes this, too
    why = host.must(op)
    if why is None:
        if all(0 in out.type.static_shape for out in op.outputs):
            for port, out in enumerate(op.outputs):  # nothing to compute: a constant without elements
                b.place[Value(op.id, port)] = b.constant(np.empty(out.type.static_shape, out.type.dtype), out.name)
            return []
        if not strict and host.cheaper(op):
            host.run(op, CHEAPER, forced=False)
            return []
        before = host.snapshot()
        try:
            if op.kind in VIEWS:
                VIEWS[op.kind](b, op)
                return []
            key = signature(b, op)
            visit(b, op, key)
            return [emit_op(b, op, TACTICS[op.kind], selection, key)]
        except UnsupportedError as error:
            host.undo(before)
            why = error.message
    host.run(op, why)
    return []


def _need_static(graph: Graph) -> None:
    for i in graph.inputs:
        out = graph.op(i).outputs[0]
        names = [str(d) for d in out.type.shape or () if isinstance(d, Dim)]
        if out.type.shape is None or names:
            dims = "x".join(str(d) if not isinstance(d, Dim) else "N" for d in out.type.shape or ())
            raise UsageError(
                f"input {out.name!r} has dimensions that are not fixed ({', '.join(names) or 'unknown rank'})",
                hint=f"a cuda engine is for fixed sizes; give them: --shape {out.name}={dims}",
            )


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


# ---------------------------------------------------------------- what is not needed goes


def pruned(program: Program) -> Program:
    """Without the steps that write nothing that is read."""
    wanted = {i for _, i in program.outputs}
    kept: list[Step] = []
    for step in reversed(program.steps):
        if wanted.intersection(step.outputs):
            kept.append(step)
            wanted.update(step.inputs)
    return replace(program, steps=tuple(reversed(kept)))


def compact(program: Program) -> Program:
    """Without the buffers, kernels and blobs that no step names."""
    named = {i for s in program.steps for i in (*s.inputs, *s.outputs) if i >= 0} | {
        i for _, i in (*program.inputs, *program.outputs)
    }
    buffer = {-1: -1, **{old: new for new, old in enumerate(sorted(named))}}
    old_blobs = sorted({b for i in named if (b := program.buffers[i].blob) is not None})
    blob = {old: new for new, old in enumerate(old_blobs)}
    used = sorted({s.params["launch"]["kernel"] for s in program.steps if "launch" in s.params})
    kernel = {old: new for new, old in enumerate(used)}

    def moved(b: Buffer) -> Buffer:
        return b if b.blob is None else replace(b, blob=blob[b.blob])

    def step(s: Step) -> Step:
        if "launch" not in s.params:
            return replace(s, inputs=_mapped(s.inputs, buffer), outputs=_mapped(s.outputs, buffer))
        launch = {**s.params["launch"], "kernel": kernel[s.params["launch"]["kernel"]]}
        return replace(
            s,
            params={**s.params, "launch": launch},
            inputs=_mapped(s.inputs, buffer),
            outputs=_mapped(s.outputs, buffer),
        )

    return replace(
        program,
        buffers=tuple(moved(program.buffers[i]) for i in sorted(named)),
        inputs=tuple((spec, buffer[i]) for spec, i in program.inputs),
        outputs=tuple((spec, buffer[i]) for spec, i in program.outputs),
        steps=tuple(map(step, program.steps)),
        blobs=[program.blobs[i] for i in old_blobs],
        kernels=tuple(program.kernels[i] for i in used),
    )


def _mapped(numbers: Iterable[int], to: dict[int, int]) -> tuple[int, ...]:
    return tuple(to[i] for i in numbers)


def _compiled(program: Program, say: Callable[[str], None]) -> Program:
    """The program with the cubin of every kernel among its blobs."""
    from optdnn.runtime.cuda.kernels_of import recipe_of
    from optdnn.runtime.cuda.nvrtc import KernelCache, version

    say(f"compile {len(program.kernels)} kernels")
    recipes = list(dict.fromkeys(map(_frozen, program.kernels)))
    of = dict(zip(map(_frozen, program.kernels), program.kernels, strict=True))
    cubins = KernelCache().get_many([recipe_of(of[r]) for r in recipes], workers=min(16, os.cpu_count() or 1))
    blobs = [*program.blobs, *(np.frombuffer(c, np.uint8) for c in cubins)]
    number = {r: len(program.blobs) + i for i, r in enumerate(recipes)}
    kernels = tuple(replace(k, cubin=number[_frozen(k)]) for k in program.kernels)
    program.meta["nvrtc"] = ".".join(map(str, version()))
    return replace(program, kernels=kernels, blobs=blobs)


def _frozen(k: Kernel) -> tuple[Any, ...]:
    return (k.template, k.arch, tuple(sorted(k.generated.items())), k.options)
