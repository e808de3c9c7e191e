"""Generated kernels for pointwise DAGs and copies: any stages, broadcasting and strides; vectorized if the strides allow it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from optdnn.errors import InternalError, UnsupportedError
from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder, TensorView, unmade
from optdnn.kernels.launch import GENERAL, Launch, Parameters
from optdnn.kernels.pointwise import turned
from optdnn.kernels.pointwise.byte_table import BYTES, byte_table, constant_scalar
from optdnn.kernels.pointwise.expressions import CPP, arithmetic, body
from optdnn.kernels.pointwise.strides import STRIDES_LIMIT, broadcast, merge, offset_type, vector
from optdnn.ops.base import Attrs, Stage
from optdnn.ops.fused import plain_stages
from optdnn.types import DTYPES, FP32, DType, TensorType, is_float

THREADS = 256
FULL = 1 << 15
"""Threads that give every multiprocessor of a large GPU a block. With fewer, threads share out the elements of long chains."""
LONG = 32
"""Stages times elements of a thread from which its computation, not its memory accesses, takes the time."""
AHEAD, SHORT, MANY = 4, 4, 1 << 21
"""Accesses of a thread that are in flight together, if they have at most SHORT bytes and there are at least MANY of them: the latency of a
single access would take longer than its bytes."""


def _number(b: Builder, placed: TensorView | None) -> float | None:
    """The value of a tensor that is a constant, finite scalar; else None."""
    array = None if placed is None or math.prod(placed.shape) != 1 else constant_scalar(b, placed)
    if array is None or array.dtype.kind != "f":
        return None
    value = float(array)
    return value if math.isfinite(value) else None


def emit_pointwise(
    b: Builder,
    op: Op,
    stages: Sequence[Stage],
    operands: Sequence[TensorView | None],
    out: TensorView,
    *,
    kind: str = "Pointwise",
    widened: bool = False,
) -> None:
    """Emits one launch of ``out = stages(operands)``. Register 0 is operand 0. Operands broadcast to ``out``'s shape.

    ``widened``: floating operands may have other widths than operand 0 (the arithmetic is at least fp32).
    """
    if 0 in out.shape:
        return
    present = [(i, p) for i, p in enumerate(operands) if p is not None]
    types = [TensorType(p.dtype if p is not None else FP32, p.shape if p is not None else ()) for p in operands]
    if widened:
        types = [t.with_dtype(types[0].dtype) if is_float(t.dtype) else t for t in types]
    lines, result, _ = body(stages, types, numbers=[_number(b, p) for p in operands])
    if kind == "Pointwise":
        attrs: dict[str, Any] = {"prologue": (), "epilogue": plain_stages(stages), "arity": 1}
    else:
        attrs = {}
    computed = result if stages or any(p.dtype != out.dtype for _, p in present) else ""
    if (turn := _turned(b, present, out, lines, computed)) is not None:
        b.emit(op, turn, {"out": out, **{f"in{i}": p for i, p in present}}, kind, attrs, list(operands), [out])
        return
    looked_up = None if kind != "Pointwise" or widened else byte_table(b, operands, attrs, out)
    tables = {}
    if looked_up is not None:
        slot, table = looked_up
        present, result = [(i, p) for i, p in present if i == slot], "r0"
        tables = {"table": b.constant(table, f"{op.outputs[0].name}.table")}
        lines = [
            f"const {arithmetic(out.dtype)} r0 = widen(static_cast<const {CPP[out.dtype]}*>(p.table)[u8(v{slot})]);"
        ]
    tensors = [out, *(p for _, p in present)]
    dims, strides = merge(out.shape, [out.strides, *(broadcast(p, out.shape) for _, p in present)])
    if len(dims) > STRIDES_LIMIT:
        raise InternalError(f"{op.kind} {op.name!r} has {len(dims)} axes that cannot be merged")
    vec = vector(tensors, dims, strides)
    while vec > 1 and vec * len(lines) > LONG and math.prod(dims) // vec < FULL:
        vec //= 2
    offsets = offset_type(tensors)
    dims[-1] //= vec
    count = math.prod(dims)
    ahead = AHEAD if vec * out.dtype.itemsize <= SHORT and count >= MANY else 1
    text = _source(lines, result, out, present, offsets, (vec, ahead), strides, list(tables))
    if count >= 1 << 31:
        raise UnsupportedError(f"{op.kind} {op.name!r} has more elements than a cuda kernel addresses")
    placed = {"out": out, **{f"in{i}": p for i, p in present}, **tables}
    parameters = Parameters().pointer(*placed).u32(count).sizes(*dims)
    for s in strides:
        parameters.integers(offsets, *s[:-1], s[-1] * vec)
    # Results in 8-bit integers have to be exact: products are rounded before an addition.
    options = (*GENERAL, "--fmad=false") if out.dtype in BYTES else GENERAL
    blocks = min(-(-count // (THREADS * ahead)), 65535 * 8)
    launch = parameters.generated(b.arch, text, "pointwise", blocks, THREADS, options=options)
    b.emit(op, launch, placed, kind, attrs, list(operands), [out])


def _turned(
    b: Builder, present: Sequence[tuple[int, TensorView]], out: TensorView, lines: Sequence[str], result: str
) -> Launch | None:
    """The launch that transposes tiles of one operand, if that one is contiguous along another axis than ``out``. ``lines`` compute
    ``result``; without a result, elements are moved."""
    if lines and out.dtype in BYTES:
        return None
    for i, x in present:
        others = [(k, y) for k, y in present if k != i]
        turn = turned.turn_of(x, out, [y for _, y in others])
        if turn is not None:
            source, *more = (turned.Operand(k, CPP[y.dtype], arithmetic(y.dtype)) for k, y in ((i, x), *others))
            elements = turned.Elements(source, CPP[out.dtype], tuple(lines), result, tuple(more))
            return turned.launch(b.arch, turn, elements)
    return None


def _source(
    lines: Sequence[str],
    result: str,
    out: TensorView,
    present: Sequence[tuple[int, TensorView]],
    offsets: str,
    each: tuple[int, int],
    strides: Sequence[Sequence[int]],
    tables: Sequence[str],
) -> str:
    """The kernel's source. ``each``: neighboring elements of an access, and accesses of a thread that are in flight together."""
    vec, ahead = each
    names, rank = [str(i) for i, _ in present], len(strides[0])
    moving = [n for n, s in zip(names, strides[1:], strict=True) if any(s)]  # the other operands are scalars
    fields = ["void* out;", *(f"const void* {n};" for n in (*(f"in{n}" for n in names), *tables)), f"u32 count; Size dims[{rank}];",
              f"{offsets} so[{rank}];", *(f"{offsets} s{n}[{rank}];" for n in names)]  # fmt: skip
    t_out = CPP[out.dtype]
    walk = ["u32 rest = i, k;", f"{offsets} o = 0;", *(f"{offsets} o{n} = 0;" for n in moving)]
    for d in reversed(range(rank)):
        walk.append(f"k = rest % p.dims[{d}]; rest /= p.dims[{d}];" if d else "k = rest;")
        walk.append(f"o += k * p.so[{d}]; " + " ".join(f"o{n} += k * p.s{n}[{d}];" for n in moving))
    same, scalars, held = [], [], [("o", offsets, "o")]
    for (i, p), own in zip(present, strides[1:], strict=True):
        t, lane = CPP[p.dtype], ""
        if not any(own):
            same.append(f"const {t} p{i} = *static_cast<const {t}*>(p.in{i});")
        elif vec > 1 and own[-1] == 1:
            lane, pack = ".lane[j]", f"Pack<{t}, {vec}>"
            held.append((f"p{i}", pack, f"{pack}(static_cast<const {t}*>(p.in{i}) + o{i})"))
        else:
            held.append((f"p{i}", t, f"static_cast<const {t}*>(p.in{i})[o{i}]"))
        scalars.append(f"const {arithmetic(p.dtype)} v{i} = widen(p{i}{lane});")
    compute = "\n            ".join([*scalars, *lines])
    if vec > 1:
        store = (f"Pack<{t_out}, {vec}> y;\n        #pragma unroll\n        for (int j = 0; j < {vec}; j++) {{\n            {compute}\n"
                 f"            y.lane[j] = narrow<{t_out}>({result});\n        }}\n        y.store(static_cast<{t_out}*>(p.out) + o);")  # fmt: skip
    else:
        store = f"{compute}\n        static_cast<{t_out}*>(p.out)[o] = narrow<{t_out}>({result});"
    newline = "\n    "
    if ahead > 1:
        loop = _batched(ahead, walk, held, [*same, store])
    else:
        loads = [f"const {t} {name} = {value};" for name, t, value in held[1:]]
        inside = (newline + "    ").join([*walk, "wait_for_predecessor();", *same, *loads, store])
        loop = f"""for (u32 i = blockIdx.x * {THREADS} + threadIdx.x; i < p.count; i += gridDim.x * {THREADS}) {{
        {inside}
    }}"""
    return f"""struct Params {{
    {newline.join(fields)}
}};

extern "C" __global__ void __launch_bounds__({THREADS}) pointwise(const __grid_constant__ Params p) {{
    launch_dependents();
    {loop}
}}
"""


def _batched(ahead: int, walk: Sequence[str], held: Sequence[tuple[str, str, str]], store: Sequence[str]) -> str:
    """C++ of a loop that keeps ``ahead`` accesses in flight. ``walk`` finds the offsets of access ``i``, and ``store`` computes and stores.
    ``held``: name, type and first value of what a thread keeps of each access between the two."""
    arrays = " ".join(f"{t} {name}_of[{ahead}];" for name, t, _ in held)
    keep = " ".join(f"{name}_of[u] = {value};" for name, _, value in held)
    take = " ".join(f"const {t} {name} = {name}_of[u];" for name, t, _ in held)
    newline = "\n            "
    return f"""wait_for_predecessor();
    for (u32 first = blockIdx.x * {THREADS * ahead} + threadIdx.x; first < p.count; first += gridDim.x * {THREADS * ahead}) {{
        {arrays}
        #pragma unroll
        for (int u = 0; u < {ahead}; u++) {{
            const u32 i = first + u * {THREADS} < p.count ? first + u * {THREADS} : p.count - 1;
            {newline.join([*walk, keep])}
        }}
        #pragma unroll
        for (int u = 0; u < {ahead}; u++) {{
            if (first + u * {THREADS} >= p.count) break;
            {newline.join([take, *store])}
        }}
    }}"""


def copy(b: Builder, op: Op, source: TensorView, target: TensorView) -> None:
    """Copy (and convert) a tensor to another place of the same shape."""
    if source.shape != target.shape:
        raise InternalError(f"cannot copy {source.shape} to {target.shape}")
    if source.dtype == target.dtype and source.dtype not in CPP:  # elements are only moved
        plain = DTYPES[{1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64"}[source.dtype.itemsize]]
        source, target = replace(source, dtype=plain), replace(target, dtype=plain)
    emit_pointwise(b, op, [], [source], target, kind="Copy")


def copied(
    b: Builder, op: Op, x: TensorView, name: str, strides: Sequence[int] | None = None, dtype: DType | None = None
) -> TensorView:
    """A copy of a tensor with these strides (None: without gaps) and this element type (None: its own). The copy of a constant is a
    constant, made at build time."""
    if b.buffers[x.buffer].blob is not None and dtype in (None, x.dtype):
        return b.rearranged(x, name, strides)
    made = b.new(f"{op.outputs[0].name}.{name}", dtype or x.dtype, x.shape, strides)
    copy(b, op, x, made)
    return made


def copied_later(b: Builder, op: Op, x: TensorView, name: str, strides: Sequence[int] | None = None) -> TensorView:
    """:func:`copied`, still to be made."""
    return unmade(x.dtype, x.shape, strides, lambda: copied(b, op, b.made(x), name, strides).buffer)


def shared_copy(b: Builder, op: Op, x: TensorView, name: str, strides: tuple[int, ...]) -> TensorView:
    """A copy of a tensor with these strides, still to be made. All calls with equal arguments share one copy."""

    return shared(b, x, x.dtype, strides, lambda made: copied(b, op, made, name, strides))


def shared(
    b: Builder, x: TensorView, dtype: DType, strides: tuple[int, ...], make: Callable[[TensorView], TensorView]
) -> TensorView:
    """What ``make`` makes of ``x``: a tensor of its shape with this type and these strides. All calls with equal arguments share it."""

    def once() -> int:
        key = (b.made(x), dtype, strides)
        if key not in b.copies:
            b.copies[key] = make(key[0])
        return b.copies[key].buffer

    return unmade(dtype, x.shape, strides, once)


def single(op: Op) -> list[Stage]:
    """A pointwise op (not a Pointwise) as one stage."""
    args = [-1 if i == 0 else (None if v is None else i) for i, v in enumerate(op.inputs)]
    return [Stage(op.kind, tuple(args), op.attrs if op.attrs is not None else Attrs())]
