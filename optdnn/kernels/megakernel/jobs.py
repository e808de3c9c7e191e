"""Jobs of a megakernel, from the launches of ``gemv.cu`` and ``attention_cached.cu`` that they replace."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from optdnn.kernels.launch import Parameters
from optdnn.kernels.megakernel.kernel import ATTENTION_KIND, HEADER, AttentionKind, Kinds, ProductKind
from optdnn.runtime.cuda.launches.plan import LaunchPlan, Pointer
from optdnn.runtime.program import Kernel, Program, Step

GEMV, ATTENTION = "gemv", "attention_cached"
EXCHANGE = "exchange"
"""The name of the operand through which jobs exchange rows."""
SCALES = "scale_log2", "cap_in", "cap_out"
"""Names of attention's scales in both kernels; the caps are 0 without a softcap."""


@dataclass(frozen=True)
class Place:
    """A tensor in a program's buffer: ``nbytes`` bytes (0: not known) from byte ``at`` on. ``pitch``: elements from a row to the next (in
    attention: from a head to the next)."""

    operand: int
    buffer: int
    at: int
    pitch: int = 0
    nbytes: int = 0

    def holds(self, other: Place) -> bool:
        """Whether ``other`` is a part of this place."""
        return self.buffer == other.buffer and self.at <= other.at and other.at + other.nbytes <= self.at + self.nbytes


@dataclass(frozen=True)
class Job:
    """A step as a job. ``rows``: name -> place of the rows that it reads. ``out``: place of its result. ``constants``: field of the
    kernel -> place of another operand. ``numbers``: its other parameters by name."""

    kind: ProductKind | AttentionKind
    dtype: str
    rows: Mapping[str, Place]
    out: Place
    constants: Mapping[str, Place]
    numbers: Mapping[str, float]


def job_of(step: Step, launch: LaunchPlan, program: Program) -> Job | str:
    """The step as a job, or why it cannot be one."""
    kernel = program.kernels[launch.kernel]
    if kernel.function not in (GEMV, ATTENTION):
        return f"{kernel.function} cannot be a job of a megakernel"
    fields = _fields(kernel)
    at = {r.at: r for r in launch.relocations if isinstance(r, Pointer)}
    if len(at) != len(launch.relocations):
        return "its parameters hold more than addresses"
    dtype = "bfloat16" if "-DDTYPE_BF16" in kernel.options else "float16"
    if kernel.function == GEMV:
        job = _product(step, launch, fields, at, dtype, kernel)
    else:
        job = _attention(step, launch, fields, at, dtype)
    if isinstance(job, Job) and any(place.at % 8 for place in (job.out, *job.rows.values())):
        return "its rows are not aligned to four elements"
    return job


def _fields(kernel: Kernel) -> dict[str, int]:
    lines = (line.split() for line in kernel.generated["generated.cuh"].splitlines() if line.startswith("#define"))
    return {name: int(value) for _, name, value in lines}


def _place(step: Step, at: Mapping[int, Pointer[int]], where: int, pitch: int = 0, elements: int = 0) -> Place | None:
    """The place of the operand with its pointer at byte ``where`` of the parameters, or None. ``elements``: number of the tensor's 16-bit
    elements."""
    r = at.get(where)
    if r is None:
        return None
    return Place(r.operand, (*step.inputs, *step.outputs)[r.operand], r.offset, pitch, 2 * elements)


def _product(
    step: Step, launch: LaunchPlan, fields: Mapping[str, int], at: Mapping[int, Pointer[int]], dtype: str, kernel: Kernel,
) -> Job | str:  # fmt: skip
    """A launch of ``gemv.cu`` as a job. Its parameters are eight addresses, four integers and an epsilon."""
    if fields["RESULT_FLOAT"]:
        return "its results are fp32"
    if "SELECTED" in fields:
        return "its matrices are selected"
    columns, depth, x_pitch, out_pitch = struct.unpack_from("<4i", launch.parameters, 64)
    (epsilon,) = struct.unpack_from("<f", launch.parameters, 80)
    text = kernel.generated["generated.cuh"]
    functions = text[text.index("DEVICE float epilogue") :]
    residual = bool(fields["HAS_RESIDUAL"])
    kind = ProductKind(
        fields["ROWS"], columns, depth, bool(fields["NORM"]), bool(fields["PAIRED"]), residual, functions
    )
    names = {"weights": 8, "bias": 16, "beside": 40, "beside_bias": 48, "scale": 56}
    places = {name: _place(step, at, where) for name, where in names.items()}
    size = (kind.rows - 1) * out_pitch + columns
    rows = _present({
        "x": _place(step, at, 0, x_pitch, (kind.rows - 1) * x_pitch + depth),
        "residual": _place(step, at, 24, out_pitch, size) if residual else None,
    })  # fmt: skip
    out = _place(step, at, 32, out_pitch, size)
    assert out is not None
    return Job(kind, dtype, rows, out, _present(places), {"epsilon": epsilon})


def _attention(
    step: Step, launch: LaunchPlan, fields: Mapping[str, int], at: Mapping[int, Pointer[int]], dtype: str,
) -> Job | str:  # fmt: skip
    """A launch of ``attention_cached.cu`` as a job. Its parameters are twelve addresses, strides, two integers, three floats, and the
    address of the sinks, if it has any."""
    if "GIVEN" in fields:
        return "it writes no row of a cache"
    _, heads, batch = launch.grid
    if batch != 1:
        return f"it has {batch} sequences (one is needed)"
    strides = struct.unpack_from("<18q", launch.parameters, 96)
    capacity, reach, *scales = struct.unpack_from("<2i3f", launch.parameters, 240)
    queries, new_keys, new_values, keys, values, out = strides[1:12:2]
    size, group = fields["HEAD"], fields["GROUP"]
    if strides[12:14] != (size, size):
        return "the positions of its cache are not contiguous"
    kind = AttentionKind(
        heads, group, size, fields["TURNED"], bool(fields["INTERLEAVED"]), bool(fields["SOFTCAP"]), "SINKS" in fields
    )
    names = {"cosines": 24, "sines": 32, "starts": 40, "lengths": 48, "keys": 56, "values": 64}
    names |= {"sinks": 264} if kind.sinks else {}
    places = {name: _place(step, at, where) for name, where in names.items()}
    all_queries = heads * group
    rows = _present({
        "queries": _place(step, at, 0, queries, (all_queries - 1) * queries + size),
        "new_keys": _place(step, at, 8, new_keys, (heads - 1) * new_keys + size),
        "new_values": _place(step, at, 16, new_values, (heads - 1) * new_values + size),
    })  # fmt: skip
    target = _place(step, at, 72, out, (all_queries - 1) * out + size)
    assert target is not None
    numbers = {"keys_head": keys, "values_head": values, "capacity": capacity, "reach": reach}
    numbers |= dict(zip(SCALES, scales, strict=True))
    return Job(kind, dtype, rows, target, _present(places), numbers)


def _present(places: Mapping[str, Place | None]) -> dict[str, Place]:
    return {name: place for name, place in places.items() if place is not None}


@dataclass(frozen=True)
class Source:
    """A second source of a row, besides its buffer: the packets that job ``job`` writes (-1: no job does), from byte ``packets`` of the
    exchange on."""

    packets: int = 0
    job: int = -1


def parameters(
    job: Job, kinds: Kinds, number: int, sources: Mapping[str, Source], packets: int, partial: int
) -> tuple[bytes, Sequence[Pointer[str]]]:
    """The parameters of the job as a separate launch, and their address fields. ``packets``, ``partial``: offsets in bytes, in the exchange,
    of the job's own packets and of the packets of a head's blocks. Names of operands are their numbers, and :data:`EXCHANGE`."""
    p = Parameters().pointer(EXCHANGE).i32(number, 1)
    p.i32(kinds.number(job.kind), 0, 0, 0)

    def constant(*names: str) -> None:
        for name in names:
            place = job.constants.get(name)
            p.pointer(*(None,) if place is None else (str(place.operand),), offset=0 if place is None else place.at)

    def row(name: str) -> None:
        place, source = job.rows.get(name), sources.get(name, Source())
        p.pointer(*(None,) if place is None else (str(place.operand),), offset=0 if place is None else place.at)
        p.pointer(None if source.job < 0 else EXCHANGE, offset=source.packets)
        p.i32(source.job, 0 if place is None else place.pitch)

    def target() -> None:
        p.pointer(str(job.out.operand), offset=job.out.at).pointer(EXCHANGE, offset=packets).i32(job.out.pitch, 0)

    n = job.numbers
    if isinstance(job.kind, ProductKind):
        constant("weights", "beside", "bias", "beside_bias", "scale")
        row("x")
        row("residual")
        target()
        p.f32(n["epsilon"])
    else:
        assert kinds.number(job.kind) == ATTENTION_KIND
        for name in ("queries", "new_keys", "new_values"):
            row(name)
        target()
        constant("cosines", "sines", "starts", "lengths", "keys", "values")
        p.pointer(EXCHANGE, offset=partial)
        p.i64(int(n["keys_head"]), int(n["values_head"])).i32(int(n["capacity"]), int(n["reach"]))
        p.f32(*(n[name] for name in SCALES))
        if job.kind.sinks:
            constant("sinks")
    block, pointers = p.finished()
    return block.ljust(HEADER + 16 + kinds.job_bytes, b"\0"), pointers
