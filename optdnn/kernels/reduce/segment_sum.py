"""SegmentSum on one generated kernel: some lanes share the rows of a segment, and a thread takes consecutive elements of a row.

A row is gathered, computed in registers and added in the type of arithmetic, always in the same order. Rows are loaded
:data:`AHEAD` at a time, since the load of a row depends on the load of its index.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from optdnn.errors import InternalError
from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder, TensorView
from optdnn.kernels.launch import Parameters
from optdnn.kernels.pointwise.expressions import CPP, EXPRESSIONS, arithmetic, body, literal
from optdnn.kernels.pointwise.strides import STRIDES_LIMIT, broadcast, merge, vector
from optdnn.kernels.tactic import Tactic
from optdnn.ops.fused import plain_attrs
from optdnn.ops.segment_sum import NEUTRAL, SegmentSumAttrs
from optdnn.types import TensorType

THREADS = 256
AHEAD = 4
"""Rows that a lane loads together."""
WARP = 32
MOST_THREADS = 1 << 19
"""With more threads than this, more lanes per segment gain nothing."""
POINTS_LIMIT = 1 << 31
"""Bound of the threads: coordinates are computed from a 32-bit index."""
LAUNCH, ROUND, CACHE = 1.2e-6, 9e-7, 4e12
"""Predicted seconds of a launch and of :data:`AHEAD` rows of a lane (two dependent loads), and bytes per second of L2."""


class SegmentSumKernel(Tactic):
    """Any sums of segments, with any strides."""

    name = "segments"

    def refuse(self, b: Builder, op: Op) -> str | None:
        missing = sorted({s.kind for s in (*op.attrs.stages, *op.attrs.epilogue)} - EXPRESSIONS.keys())
        if missing:
            return f"there is no expression for {', '.join(missing)}"
        many = math.prod(op.outputs[0].type.static_shape) * WARP >= POINTS_LIMIT
        return "it has more elements than a kernel can count" if many else None

    def seconds(self, b: Builder, op: Op) -> float | None:
        shape = op.outputs[0].type.static_shape
        rows = _rows(b, op)
        each: int = rows * math.prod(shape[1:]) * op.outputs[0].type.dtype.itemsize
        lanes = _lanes(_longest(b, op), math.prod(shape) // 8)
        return LAUNCH + ROUND * -(-_longest(b, op) // (lanes * AHEAD)) + each / CACHE

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        a, out = op.attrs, b.target(op.value)
        operands = [b.operand(v) for v in op.inputs]
        if 0 in out.shape:
            return
        begin, tail = len(a.indices), out.shape[1:]
        arrays, (first, *others) = operands[begin : begin + a.arrays], operands[begin + a.arrays :]
        tables = [x.view(tuple(1 if i < 0 else x.shape[i] for i in v), tuple(0 if i < 0 else x.strides[i] for i in v))
                  for x, v in zip(operands, a.views, strict=False)]  # fmt: skip
        steps = [x.strides[axis] if i >= 0 else 0 for x, axis, i in zip(operands, a.axes, a.indices, strict=False)]
        others = [x.view(out.shape, broadcast(x, out.shape)) for x in others]
        wide = [out, *tables, *others]
        rows = [out.strides[0], *steps, *(x.strides[0] for x in others)]
        views = [x.view(x.shape[1:], x.strides[1:]) for x in (out, *others)]
        views[1:1] = tables
        dims, strides = merge(tail, [broadcast(x, tail) for x in views])
        if len(dims) > STRIDES_LIMIT:
            raise InternalError(f"{op.kind} {op.name!r} has {len(dims)} axes that cannot be merged")
        vec = vector(wide, dims, [[step, *own] for step, own in zip(rows, strides, strict=True)])
        dims[-1] //= vec
        lanes = _lanes(_longest(b, op), out.shape[0] * math.prod(dims))
        text = _Text(a, wide, strides, vec, lanes, dims)
        placed = (
            dict(zip(text.names, wide, strict=True)) | {f"a{k}": x for k, x in enumerate(arrays)} | {"first": first}
        )
        parameters = Parameters().pointer(*placed).u32(out.shape[0] * math.prod(dims)).sizes(*dims)
        for step, own in zip(rows, strides, strict=True):
            parameters.i64(step, *own[:-1], own[-1] * vec)
        blocks = -(-out.shape[0] * math.prod(dims) * lanes // THREADS)
        launch = parameters.generated(b.arch, text.source(), "segment_sum", blocks, THREADS)
        b.emit(op, launch, placed, op.kind, plain_attrs(op.definition, a), operands, [out])


def _longest(b: Builder, op: Op) -> int:
    """Number of rows of the longest segment; the mean number if the segments are not known."""
    first = b.graph.constant_value(op.inputs[len(op.attrs.indices) + op.attrs.arrays])
    return (
        -(-_rows(b, op) // op.outputs[0].type.static_shape[0]) if first is None else int(np.diff(first).max(initial=0))
    )


def _rows(b: Builder, op: Op) -> int:
    """Number of rows of all segments."""
    index = op.inputs[len(op.attrs.indices)]
    return 0 if index is None else b.graph.type(index).static_shape[0]


def _lanes(longest: int, threads: int) -> int:
    """Number of lanes that share a segment."""
    lanes = 1
    while lanes < WARP and longest > lanes * AHEAD and 2 * lanes * threads <= MOST_THREADS:
        lanes *= 2
    return lanes


@dataclass(frozen=True)
class _Text:
    """The kernel's text. ``tensors``: the result, the tables, the factors and the operands of the epilogue. ``strides``: strides of the
    tensors along ``dims``."""

    attrs: SegmentSumAttrs
    tensors: Sequence[TensorView]
    strides: Sequence[Sequence[int]]
    vec: int
    lanes: int
    dims: Sequence[int]

    @property
    def _tables(self) -> int:
        return len(self.attrs.indices)

    @property
    def _others(self) -> int:
        """Number of factors and operands of the epilogue."""
        return len(self.tensors) - 1 - self._tables

    @property
    def names(self) -> list[str]:
        """The kernel's names of the tensors."""
        return ["out", *(f"t{k}" for k in range(self._tables)), *(f"g{k}" for k in range(self._others))]

    def _wide(self, k: int) -> bool:
        """Whether tensor ``k`` has a separate element for each lane of a Pack."""
        return self.vec > 1 and self.strides[k][-1] == 1

    def _load(self, k: int, name: str, at: str) -> str:
        """C++ that loads a thread's elements of tensor ``k`` at an offset into ``name``."""
        t, place = CPP[self.tensors[k].dtype], f"p.{self.names[k]} + {at}"
        return (
            f"const Pack<{t}, {self.vec}> {name}({place});"
            if self._wide(k)
            else f"const {t} {name} = p.{self.names[k]}[{at}];"
        )

    def _element(self, k: int, name: str) -> str:
        return f"widen({name}.lane[j])" if self._wide(k) else f"widen({name})"

    def _rows(self) -> tuple[str, str]:
        """C++ of the loads of AHEAD rows, and of their sums. Beyond the end, the first row is loaded again, and not added."""
        a, loads, sums = self.attrs, [], []
        types = [TensorType(x.dtype, x.shape) for x in self.tensors[1 : 1 + self._tables]]
        lines, result, dtype = body(a.stages, types)
        for c in range(AHEAD):
            loads.append(f"const u32 e{c} = e + {c * self.lanes} < end ? e + {c * self.lanes} : e;")
            loads += [f"const i64 i{n}_{c} = p.a{n}[e{c}];" for n in range(self.attrs.arrays)]
            known = []
            for k, index in enumerate(a.indices):
                name = f"x{k}_{c}" if index >= 0 else f"x{k}"
                if index >= 0:
                    loads.append(self._load(1 + k, name, f"o_t{k} + i{index}_{c} * p.r_t{k}"))
                known.append(f"const {arithmetic(types[k].dtype)} v{k} = {self._element(1 + k, name)};")
            inner = " ".join([*known, *lines, self._added(f"{arithmetic(dtype)}({result})")])
            sums.append(f"""if (e + {c * self.lanes} < end) {{
            #pragma unroll
            for (int j = 0; j < {self.vec}; j++) {{ {inner} }}
        }}""")
        return "\n        ".join(loads), "\n        ".join(sums)

    def _added(self, value: str) -> str:
        """The statement that adds a value to the result of a segment."""
        if self.attrs.reduction == "add":
            return f"sum[j] += {value};"
        return f"sum[j] = {self.attrs.reduction}_nan(sum[j], {value});"

    @property
    def _none(self) -> str:
        """C++ of the result of an empty segment."""
        number = arithmetic(self.tensors[0].dtype)
        return f"{number}(0)" if self.attrs.reduction == "add" else literal(NEUTRAL[self.attrs.reduction], number)

    def _store(self) -> str:
        """C++ of the factors, the epilogue and the store of a thread's results."""
        out, after = self.tensors[0], 1 + self._tables
        t, number = CPP[out.dtype], arithmetic(out.dtype)
        begin = self._tables + self.attrs.arrays + 1
        value, slots = "sum[j]", sorted({a for s in self.attrs.epilogue for a in s.args if a is not None and a >= 0})
        for k, kind in enumerate(self.attrs.factors):
            value = f"({value} {'*' if kind == 'Mul' else '/'} {self._element(after + k, f'f{k}')})"
        end = begin + self._others
        types = [TensorType(out.dtype, ())] * (end + 1)
        for a in slots:
            types[a] = TensorType(self.tensors[after + a - begin].dtype, ())
        lines, result, _ = body(self.attrs.epilogue, types, end)
        read = [
            f"const {arithmetic(types[a].dtype)} v{a} = {self._element(after + a - begin, f'f{a - begin}')};"
            for a in slots
        ]
        each = " ".join([f"const {number} v{end} = end > begin ? {number}({value}) : {self._none};", *read, *lines])
        given = " ".join(self._load(after + k, f"f{k}", f"o_g{k} + n * p.r_g{k}") for k in range(self._others))
        if self.vec == 1:
            return f"{given} const int j = 0; {each} p.out[o_out + n * p.r_out] = narrow<{t}>({result});"
        return f"""{given} Pack<{t}, {self.vec}> y;
        #pragma unroll
        for (int j = 0; j < {self.vec}; j++) {{ {each} y.lane[j] = narrow<{t}>({result}); }}
        y.store(p.out + (o_out + n * p.r_out));"""

    def source(self) -> str:
        """The whole text."""
        names, rank = self.names, len(self.dims)
        fields = [f"{'const ' if k else ''}{CPP[x.dtype]}* {names[k]};" for k, x in enumerate(self.tensors)]
        fields += [
            *(f"const i32* a{n};" for n in range(self.attrs.arrays)),
            "const i32* first;",
            f"u32 count; Size dims[{rank}];",
        ]
        fields += [f"i64 r_{n}, s_{n}[{rank}];" for n in names]
        walk = [f"i64 o_{n} = 0;" for n in names]
        for d in reversed(range(rank)):
            walk.append(f"k = rest % p.dims[{d}]; rest /= p.dims[{d}];")
            walk.append(
                " ".join(f"o_{n} += k * p.s_{n}[{d}];" for n, own in zip(names, self.strides, strict=True) if own[d])
            )
        whole = [self._load(1 + k, f"x{k}", f"o_t{k}") for k, index in enumerate(self.attrs.indices) if index < 0]
        number = arithmetic(self.tensors[0].dtype)
        loads, sums = self._rows()
        merges = "".join(
            "\n        " + self._added(f"__shfl_xor_sync(0xffffffffu, sum[j], {step})")
            for step in (16, 8, 4, 2, 1) if step < self.lanes
        )  # fmt: skip
        newline = "\n    "
        return f"""struct Params {{
    {newline.join(fields)}
}};

extern "C" __global__ void __launch_bounds__({THREADS}) segment_sum(const __grid_constant__ Params p) {{
    launch_dependents();
    const u32 i = blockIdx.x * {THREADS} + threadIdx.x, lane = i % {self.lanes};
    u32 rest = i / {self.lanes}, k;
    const bool live = rest < p.count;
    rest = live ? rest : 0;
    {newline.join(walk)}
    const i64 n = rest;
    wait_for_predecessor();
    {newline.join(whole)}
    const u32 begin = p.first[n], end = live ? p.first[n + 1] : p.first[n];
    {number} sum[{self.vec}];
    #pragma unroll
    for (int j = 0; j < {self.vec}; j++) {{ sum[j] = {self._none}; }}
    for (u32 e = begin + lane; e < end; e += {self.lanes * AHEAD}) {{
        {loads}
        {sums}
    }}
    #pragma unroll
    for (int j = 0; j < {self.vec}; j++) {{{merges}
    }}
    if (live && lane == 0) {{
        {self._store()}
    }}
}}
"""
