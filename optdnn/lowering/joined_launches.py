"""Small pointwise operators, copies and conversions become one launch, if no step has to wait longer for it
(:mod:`optdnn.kernels.pointwise.joint`).

Each takes about the time of a launch. Those that wait for the same steps can begin at the same time. Those that wait for different steps
are joined if the readers of the results wait for these steps anyway: a decoder's old values, which are joined with a new one early, and its
keys, which follow after a rotary embedding. Nothing but the end of the run waits for outputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from optdnn.kernels.builder import TensorView
from optdnn.kernels.layout import copies
from optdnn.kernels.layout.copies import Part
from optdnn.kernels.pointwise import joint
from optdnn.lowering.assemble import compact
from optdnn.lowering.repeated_operators import repeated
from optdnn.lowering.traced_copies import traced
from optdnn.ops.fused import plain_stages, typed_value
from optdnn.runtime.cuda.gpu_facts import GpuFacts, launches_early
from optdnn.runtime.cuda.launches.plan import CudaStep, LaunchPlan, OperandView, Pointer, ReferenceOp, parse
from optdnn.runtime.cuda.libraries.calls import LibraryCall
from optdnn.runtime.program import Kernel, Program, Step
from optdnn.runtime.steps.attrs import attrs_from_plain, attrs_to_plain
from optdnn.runtime.steps.lanes import dependencies, masks_of

COPY, POINTWISE = "copy", "pointwise"
"""The names of the tactics of these launches: copies alone, and any operators."""
NEAREST = 64
"""A step that no group waits as long as may join one of so many groups before it."""


@dataclass
class Group:
    """Steps (by number) that become one launch, and their parts. The launch replaces step ``at``."""

    at: int
    steps: list[int] = field(default_factory=list)
    parts: list[joint.Part] = field(default_factory=list)


def with_joined_launches(program: Program, gpu: GpuFacts) -> tuple[Program, dict[int, int]]:
    """The program with joint launches, and for each other step its number in ``program``."""
    copied = small_copies(program)
    operators = small_operators(program)
    uncopied = before_copies(program, operators, copied)
    parts = {k: [uncopied.get(k, part)] for k, part in operators.items()}
    parts |= {k: [part.as_pointwise for part in found] for k, found in copied.items()}
    again = repeated(program, parts)
    parts |= again
    changed = {k for k, found in copied.items() if found != copies_of(program, program.steps[k])}
    changed = changed.union(uncopied, again)
    reading = [
        _reading(step, parts[k]) if k in copied or k in changed else step for k, step in enumerate(program.steps)
    ]
    traced_program = replace(program, steps=tuple(reading))
    live = _live(traced_program)
    found = groups_of(traced_program, live, parts)
    groups = [group for group in found if len(group.steps) > 1 or group.steps[0] in changed]
    if not groups:
        return program, {k: k for k in range(len(program.steps))}
    at = {group.at: group for group in groups}
    joined = {k for group in groups for k in group.steps}
    steps, kernels, moved = list[Step](), list(program.kernels), dict[int, int]()
    for k in live:
        if k in at:
            steps += _launches(program, at[k], kernels, gpu)
        elif k not in joined:
            moved[len(steps)] = k
            steps.append(program.steps[k])
    return compact(replace(program, steps=tuple(steps), kernels=tuple(kernels))), moved


def _live(program: Program) -> list[int]:
    """The steps (by number) whose results are read."""
    read, live = {i for _, i in program.outputs}.union(program.retained), list[int]()
    for k in reversed(range(len(program.steps))):
        if read.intersection(program.steps[k].outputs):
            live.append(k)
            read.update(program.steps[k].inputs)
    return live[::-1]


def small_copies(program: Program) -> dict[int, list[Part]]:
    """The steps (by number) that are small copies, and their copies from the first sources."""
    writers: dict[int, list[int]] = {}
    for k, step in enumerate(program.steps):
        for i in step.outputs:
            writers.setdefault(i, []).append(k)
    made: dict[int, list[Part]] = {}
    small: dict[int, list[Part]] = {}
    for k, step in enumerate(program.steps):
        parts = [piece for part in copies_of(program, step) for piece in _first(part, k, writers, made)]
        if parts:
            made[k] = parts
            if all(copies.refuse(part) is None for part in parts):
                small[k] = parts
    return small


def _first(
    part: Part, step: int, writers: Mapping[int, Sequence[int]], made: Mapping[int, Sequence[Part]]
) -> list[Part]:
    """A copy of ``step`` as copies from the first sources; itself if other steps compute what it reads."""
    before = writers.get(part.source.buffer, ())
    if copies.refuse(part) is not None or not before or any(k not in made or k >= step for k in before):
        return [part]
    makers = [(k, p) for k in before for p in made[k] if p.target.buffer == part.source.buffer]
    if any(copies.converts(p) is None or max(writers.get(p.source.buffer, (-1,))) > k for k, p in makers):
        return [part]
    pieces = traced(part, [p for _, p in makers])
    return [part] if pieces is None or any(copies.refuse(p) is not None for p in pieces) else pieces


def small_operators(program: Program) -> dict[int, joint.Part]:
    """The steps (by number) that are small pointwise operators, and these."""
    found = ((k, operator_of(program, step)) for k, step in enumerate(program.steps))
    return {k: part for k, part in found if part is not None and joint.refuse(part) is None}


def before_copies(
    program: Program, operators: Mapping[int, joint.Part], copied: Mapping[int, Sequence[Part]]
) -> dict[int, joint.Part]:
    """Operators that read what small copies copy, in the place of copies that nothing else reads."""
    writers, readers = dict[int, list[int]](), dict[int, list[int]]()
    for k, step in enumerate(program.steps):
        for numbers, buffers in ((writers, step.outputs), (readers, step.inputs)):
            for i in buffers:
                numbers.setdefault(i, []).append(k)
    kept = {i for _, i in program.outputs}.union(program.retained)
    found: dict[int, joint.Part] = {}
    for k, parts in copied.items():
        users = {r for part in parts for r in readers.get(part.target.buffer, ())}
        if (
            kept.intersection(part.target.buffer for part in parts)
            or not users
            or not users <= operators.keys() - copied.keys()
        ):
            continue
        if any(writers[part.target.buffer] != [k] or max(writers.get(part.source.buffer, (-1,))) > k for part in parts):
            continue
        moved = {r: _moved(found.get(r, operators[r]), parts) for r in users}
        if all(part is not None and joint.refuse(part) is None for part in moved.values()):
            found |= {r: part for r, part in moved.items() if part is not None}
    return found


def _moved(part: joint.Part, copied: Sequence[Part]) -> joint.Part | None:
    """An operator that reads the sources of copies; None if one of its operands is no part of one source, or is converted."""
    own, operands = {p.target.buffer for p in copied}, list[TensorView | None]()
    for x in part.operands:
        if x is None or x.buffer not in own:
            operands.append(x)
            continue
        source = _source(x, [p for p in copied if p.target.buffer == x.buffer])
        if source is None or source.dtype != x.dtype:
            return None
        operands.append(source)
    return replace(part, operands=tuple(operands))


def _source(x: TensorView, copied: Sequence[Part]) -> TensorView | None:
    """The part of one source from which ``x`` was copied; None if there is none. Axes of one element do not matter."""
    pieces = traced(Part(x, x), copied)
    if pieces is None:
        makers = [Part(_squeezed(p.source), _squeezed(p.target)) for p in copied]
        pieces = traced(Part(_squeezed(x), _squeezed(x)), makers)
    if pieces is None or len(pieces) != 1:
        return None
    strides = iter(s for n, s in zip(pieces[0].source.shape, pieces[0].source.strides, strict=True) if n > 1)
    return pieces[0].source.view(x.shape, [next(strides) if n > 1 else 0 for n in x.shape])


def _squeezed(x: TensorView) -> TensorView:
    """A view without axes of one element."""
    return x.permuted([k for k, n in enumerate(x.shape) if n > 1])


def operator_of(program: Program, step: Step) -> joint.Part | None:
    """The pointwise operator that a step of this tactic computes; None for other steps."""
    if step.executor != "cuda" or step.params.get("tactic") != POINTWISE:
        return None
    meaning = parse(step, program).meaning
    attrs = attrs_from_plain(meaning.attrs)
    (write,) = meaning.writes
    if meaning.kind != "Pointwise" or attrs["prologue"] or write is None or meaning.reads[0] is None:
        return None
    operands = tuple(None if v is None else _view(program, step, v) for v in meaning.reads)
    return joint.Part(operands, typed_value(tuple(attrs["epilogue"])), _view(program, step, write))


def groups_of(program: Program, live: Sequence[int], parts: Mapping[int, Sequence[joint.Part]]) -> list[Group]:
    """The small operators ``parts`` (by step) among the steps ``live``, in groups. Steps on the CPU end all groups before them."""
    found: list[Group] = []
    for on_gpu, run in groupby(live, lambda k: program.steps[k].executor == "cuda"):
        if not on_gpu:
            continue
        numbers = list(run)
        waits = dependencies(replace(program, steps=tuple(program.steps[k] for k in numbers)))
        for places in joined(waits, [k in parts for k in numbers]):
            steps = [numbers[p] for p in places.steps]
            found.append(Group(numbers[places.at], steps, [part for k in steps for part in parts[k]]))
    return found


@dataclass
class _Launch:
    """Steps that become one launch, which replaces step ``at``. As bits: the steps themselves, all steps that they wait for, and the
    steps that wait for them directly."""

    at: int
    steps: list[int]
    own: int
    before: int
    readers: int


def joined(waits: Sequence[set[int]], small: Sequence[bool]) -> list[_Launch]:
    """The ``small`` ones of the steps, in groups. ``waits``: the earlier steps that each step waits for directly.

    Two groups become one if that delays neither: each begins as early as before, or the steps that wait for it also wait for the other.
    """
    before, readers = masks_of(waits), [0] * len(waits)
    for k, own in enumerate(waits):
        for d in own:
            readers[d] |= 1 << k
    found, alike = list[_Launch](), dict[int, _Launch]()
    for k in (k for k, is_small in enumerate(small) if is_small):
        new = _Launch(k, [k], 1 << k, before[k], readers[k])
        other = alike.get(new.before)
        if other is None or other.before != new.before:
            other = next((old for old in found[: -NEAREST - 1 : -1] if _delays_none(old, new, before)), None)
        if other is None:
            found.append(new)
            alike[new.before] = new
            continue
        other.at = other.at if _begins(other, new) else k
        other.steps.append(k)
        other.own, other.before, other.readers = (
            other.own | new.own,
            other.before | new.before,
            other.readers | new.readers,
        )
        alike[other.before] = other
        for s in other.steps:
            before[s] = other.before
        all_of_it = other.own | other.before
        before = [mask | all_of_it if mask & other.own else mask for mask in before]
        for group in found:
            if group.before & other.own:
                group.before |= all_of_it
    return found


def _begins(group: _Launch, other: _Launch) -> bool:
    """Whether everything that ``other`` waits for has ended when ``group`` begins."""
    return not other.before & ~group.before


def _delays_none(a: _Launch, b: _Launch, before: Sequence[int]) -> bool:
    """Whether one launch of both delays neither's readers."""
    if a.before & b.own or b.before & a.own:
        return False
    return all(_begins(x, y) or _wait(x.readers, y.own, before) for x, y in ((a, b), (b, a)))


def _wait(readers: int, own: int, before: Sequence[int]) -> bool:
    """Whether all ``readers`` wait for one of the steps ``own``."""
    while readers:
        low = readers & -readers
        if not before[low.bit_length() - 1] & own:
            return False
        readers ^= low
    return True


def _reading(step: Step, parts: Sequence[joint.Part]) -> Step:
    """A step that reads the operands of ``parts``, as far as :func:`dependencies` looks at it."""
    tensors = [x for part in parts for _, x in part.present]
    inputs = tuple(dict.fromkeys(x.buffer for x in tensors))
    outputs = tuple(dict.fromkeys(part.target.buffer for part in parts))
    views: dict[str, list[Any]] = {
        "reads": [_operand(inputs.index(x.buffer), x).to_plain() for x in tensors],
        "writes": [_operand(len(inputs) + outputs.index(p.target.buffer), p.target).to_plain() for p in parts],
    }
    return replace(step, inputs=inputs, outputs=outputs, params=views)


def copies_of(program: Program, step: Step) -> list[Part]:
    """The copies that a step consists of; none if it does anything else."""
    if step.executor != "cuda":
        return []
    parsed = parse(step, program)
    if isinstance(parsed.launch, LibraryCall):
        return []
    kind, reads, writes = parsed.meaning.kind, parsed.meaning.reads, parsed.meaning.writes
    sources = [_view(program, step, v) for v in reads if v is not None]
    targets = [_view(program, step, v) for v in writes if v is not None]
    attrs = attrs_from_plain(parsed.meaning.attrs)
    if len(targets) != 1 or len(sources) < len(reads):
        return []
    if kind == "Concat":
        return _beside(sources, targets[0], attrs["axis"])
    copied = kind == "Copy" or (kind == "Pointwise" and [s.kind for s in attrs["epilogue"]] == ["Cast"])
    return [Part(sources[0], targets[0])] if copied and len(sources) == 1 and not _stays(program, step) else []


def _stays(program: Program, step: Step) -> bool:
    """Whether a step copies an input to an output, which may share memory (:mod:`optdnn.runtime.cuda.memory.in_place`)."""
    inputs, outputs = ({i for _, i in ports} for ports in (program.inputs, program.outputs))
    return not inputs.isdisjoint(step.inputs) and not outputs.isdisjoint(step.outputs)


def _view(program: Program, step: Step, view: OperandView) -> TensorView:
    """The view of a program's buffer that an operand of a step is."""
    buffer = (*step.inputs, *step.outputs)[view.operand]
    return TensorView(buffer, view.offset, view.shape, view.strides, program.buffers[buffer].dtype)


def _beside(sources: Sequence[TensorView], target: TensorView, axis: int) -> list[Part]:
    """The copies of tensors side by side along an axis of ``target``. Tensors without elements are left out."""
    parts, at = [], 0
    for x in sources:
        if x.size:
            parts.append(Part(x, target.view(x.shape, target.strides, at * target.strides[axis])))
        at += x.shape[axis]
    return parts


# ---------------------------------------------------------------- launches


def _launches(program: Program, group: Group, kernels: list[Kernel], gpu: GpuFacts) -> list[Step]:
    """The steps of a group's launches. Their kernels are added to ``kernels``."""
    src = tuple(sorted({name for k in group.steps for name in program.steps[k].src}))
    return [_launch([group.parts[k] for k in batch], kernels, gpu, src) for batch in joint.batches(group.parts)]


def _launch(parts: Sequence[joint.Part], kernels: list[Kernel], gpu: GpuFacts, src: tuple[str, ...]) -> Step:
    made = joint.launch(gpu.arch, parts)
    recipe = made.recipe
    kernel = Kernel(recipe.name, made.function, recipe.arch, dict(recipe.generated), recipe.options, recipe.digest())
    if kernel not in kernels:
        kernels.append(kernel)
    inputs = tuple(dict.fromkeys(x.buffer for part in parts for _, x in part.present))
    outputs = tuple(dict.fromkeys(part.target.buffer for part in parts))
    place: dict[str, tuple[int, int]] = {}
    for k, part in enumerate(parts):
        place[f"y{k}"] = (len(inputs) + outputs.index(part.target.buffer), part.target.byte_offset)
        place |= {f"x{k}_{i}": (inputs.index(x.buffer), x.byte_offset) for i, x in part.present}
    pointers = tuple(Pointer(r.at, *place[r.operand]) for r in made.pointers)
    plan = LaunchPlan(
        kernels.index(kernel), made.grid, made.block, made.parameters, pointers, dependent=launches_early(gpu.arch)
    )
    moves = not any(part.stages for part in parts)
    step = CudaStep(plan, _meaning(parts, inputs, outputs, moves), tactic=COPY if moves else POINTWISE)
    return Step("cuda", step.to_params(), inputs, outputs, src)


def _meaning(parts: Sequence[joint.Part], inputs: Sequence[int], outputs: Sequence[int], moves: bool) -> ReferenceOp:
    """What a launch computes. ``moves``: all parts are copies."""
    reads = [None if x is None else _operand(inputs.index(x.buffer), x) for part in parts for x in part.operands]
    writes = [_operand(len(inputs) + outputs.index(part.target.buffer), part.target) for part in parts]
    if moves:
        return ReferenceOp("Copies", {}, tuple(reads), tuple(writes))
    attrs = {
        "counts": tuple(len(part.operands) for part in parts),
        "stages": tuple(plain_stages(part.stages) for part in parts),
    }
    return ReferenceOp("JointPointwise", attrs_to_plain(attrs), tuple(reads), tuple(writes))


def _operand(number: int, view: TensorView) -> OperandView:
    return OperandView(number, view.offset, view.shape, view.strides)
