"""The tactic of norms of many short rows, with generated kernels: a few lanes of a warp share a row and read it once, with any strides
between rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from optdnn.ir.graph import Graph, Op
from optdnn.kernels.builder import Builder, Move, TensorView
from optdnn.kernels.launch import Parameters
from optdnn.kernels.layout.views import VIEWS, order_read
from optdnn.kernels.layout.walks import walk
from optdnn.kernels.pointwise.expressions import CPP, body, literal
from optdnn.kernels.pointwise.pointwise import single
from optdnn.kernels.pointwise.strides import broadcast, merge
from optdnn.kernels.tactic import Region, TakesAfter
from optdnn.ops.base import Stage, attrs_dict
from optdnn.ops.fused import plain_stages
from optdnn.runtime.program import Step
from optdnn.types import BF16, FP16, FP32, TensorType, normalize_axis

THREADS = 256
ACCESS = 16
"""Bytes of a row per thread."""
NORMS = frozenset({"LayerNormalization", "LpNormalization", "RMSNormalization"})
SLOTS = 3
"""Number of operands of a norm's meaning before the operands of its stages: input, scale and bias."""


class ShortRows(TakesAfter):
    """L2, layer and RMS norms over rows of 16 to 512 bytes, with a pointwise operator on constants after the norm (cosine attention
    multiplies the queries or keys of each head by its temperature). The result of fp32 rows may be fp16."""

    name = "short_rows"

    def refuse(self, b: Builder, op: Op) -> str | None:
        t = op.outputs[0].type
        shape, item = t.static_shape, t.dtype.itemsize
        if t.dtype not in (FP16, BF16, FP32) or (op.kind == "LpNormalization" and op.attrs.p != 2):
            return "it is for norms (L2, not L1) of floats of 16 or 32 bits"
        if b.graph.type(op.inputs[0]).dtype != t.dtype:  # type: ignore[arg-type]
            return "its operand and its result have different types"
        parameters = [v for v in op.inputs[1:] if v is not None]
        if any(b.graph.constant_value(v) is None or b.graph.type(v).static_shape != shape[-1:] for v in parameters):
            return "its scale and bias are not constant rows"
        if any(b.graph.uses(v) for v in op.values[1:]):
            return "it does not keep the statistics"
        if normalize_axis(op.attrs.axis, len(shape)) != len(shape) - 1:
            return "its rows are not along the last axis"
        lanes = shape[-1] * item // ACCESS
        if shape[-1] * item % ACCESS or lanes & (lanes - 1) or not 1 <= lanes <= 32:
            return f"a power of two of lanes cannot share rows of {shape[-1]} elements"
        if b.row_invariant:
            return "other batch sizes may have contiguous rows, whose kernel sums in another order"
        if not 0 < math.prod(shape) < 1 << 32:
            return "no rows, or more elements than the kernel can count"
        last = self._last(b, op)[0].value
        places = [b.operand(op.inputs[0]), b.result(last, order_read(b, last))]
        units = [n for x in places for n in (x.offset, *x.strides[:-1])]
        if any(x.strides[-1] != 1 for x in places) or any(n * item % ACCESS for n in units):
            return "its rows do not consist of aligned accesses of 16 bytes"
        return None

    @staticmethod
    def _last(b: Builder, op: Op) -> tuple[Op, list[Stage]]:
        """The operator that gives the result, and its stages: a pointwise operator that reads the norm and constants, or the norm
        itself (no stages)."""
        user, t = b.graph.sole_user(op.value), op.outputs[0].type
        types = (t, t.with_dtype(FP16)) if t.dtype == FP32 else (t,)
        if user is None or op.value in b.reserved or not user.pointwise or user.inputs[0] != op.value:
            return op, []
        others = [b.graph.constant_value(v) for v in user.inputs[1:]]
        if user.outputs[0].type not in types or any(a is None or a.dtype != t.dtype for a in others):
            return op, []
        return user, list(user.attrs.epilogue if user.kind == "Pointwise" else single(user))

    def region(self, b: Builder, op: Op) -> Region:
        """The norm, and the pointwise operator after it."""
        last, _ = self._last(b, op)
        return Region(op) if last is op else Region(op, after=(last,))

    def place(self, b: Builder, op: Op) -> None:
        """Place the result of the last operator in the order in which it is read."""
        last = self._last(b, op)[0].value
        b.target(last, order_read(b, last))

    def emit(self, b: Builder, op: Op, config: object) -> None:
        emit_sides(b, op, [self._side(b, op)])

    def _side(self, b: Builder, op: Op) -> Side:
        """The operands and the result of a norm of the launch."""
        last, stages = self._last(b, op)
        given: list[TensorView | None] = [None, None]
        for k, value in enumerate(op.inputs[1:3]):
            array = b.graph.constant_value(value)
            given[k] = None if array is None else b.constant(array.astype(np.float32), f"{op.outputs[0].name}.norm{k}")
        extras = [b.operand(v) for v in last.inputs[1:]] if stages else []
        return Side(op, last, tuple(stages), b.operand(op.inputs[0]), b.target(last.value), tuple(given), tuple(extras))


class ShortRowsPair(ShortRows):
    """Two such norms of views of one tensor: for example, the norms of queries and of keys."""

    name = "short_rows_pair"

    def refuse(self, b: Builder, op: Op) -> str | None:
        other = twin(b.graph, op)
        if other is None:
            return "no other norm of the same form reads another part of its tensor"
        mate, _ = self._last(b, other)
        if mate.value not in b.place:
            return "the other norm comes after it"
        if _is_read(b, other, b.place[mate.value]):
            return "the other norm is read before it"
        return super().refuse(b, op) or super().refuse(b, other)

    def region(self, b: Builder, op: Op) -> Region:
        """Both norms, and the pointwise operators after them."""
        own, other = super().region(b, op), twin(b.graph, op)
        assert other is not None
        return replace(own, before=super().region(b, other).ops)

    def neighbors(self, graph: Graph, op: Op) -> Sequence[Op]:
        """The other norm, and the readers of both results."""
        other = twin(graph, op)
        return graph.readers(op) if other is None else [*graph.readers(op), other, *graph.readers(other)]

    def emit(self, b: Builder, op: Op, config: object) -> None:
        other = twin(b.graph, op)
        assert other is not None
        emit_sides(b, op, [self._side(b, other), self._side(b, op)])


def twin(graph: Graph, op: Op) -> Op | None:
    """The norm that shares a launch with ``op``, or None. Both read views of one tensor, with equal attributes and row lengths."""
    mate = graph.kept(_twins).get(op.id)
    return None if mate is None else graph.op(mate)


def _twins(graph: Graph) -> dict[int, int]:
    """The ids of all norms with a twin, with the ids of the twins: found at once, since a loop has hundreds of them."""
    alike: dict[tuple[object, ...], list[int]] = {}
    for op in graph.ops():
        t = op.outputs[0].type if op.kind in NORMS else None
        if t is not None and t.is_static:
            source = op.inputs[0]
            while source is not None and _takes_part(graph, graph.op(source)):
                source = graph.op(source).inputs[0]
            form = (source, op.kind, op.attrs, len(op.inputs), t.dtype, t.static_shape[-1:])
            alike.setdefault(form, []).append(op.id)
    pairs = [pair for ids in map(sorted, alike.values()) for pair in zip(ids[::2], ids[1::2], strict=False)]
    return {one: other for pair in pairs for one, other in (pair, pair[::-1])}


def _takes_part(graph: Graph, op: Op) -> bool:
    """Whether the result of ``op`` is a view of its operand or of a part of it."""
    return op.kind in VIEWS or (op.kind == "Gather" and graph.constant_value(op.inputs[1]) is not None)


def _is_read(b: Builder, norm: Op, result: TensorView) -> bool:
    """Whether an entry of the plan after the norm reads the buffer of its result."""
    for entry in reversed(b.plan):
        if isinstance(entry, Move | Step):
            if result.buffer in ([x.buffer for x in entry.sources] if isinstance(entry, Move) else entry.inputs):
                return True
            continue
        if any(op.id == norm.id for op in entry.region.ops):
            return False
        if any(
            v in b.place and b.place[v].buffer == result.buffer
            for op in entry.region.ops
            for v in op.inputs
            if v is not None
        ):
            return True
    return False


@dataclass(frozen=True)
class Side:
    """A norm of a launch and the pointwise operator after it, with their operands (``given``: scale and bias) and result."""

    op: Op
    last: Op
    stages: tuple[Stage, ...]
    x: TensorView
    out: TensorView
    given: tuple[TensorView | None, ...]
    extras: tuple[TensorView, ...]

    @property
    def tensors(self) -> list[TensorView]:
        """Result, input, and operands of the stages."""
        return [self.out, self.x, *self.extras]

    @property
    def names(self) -> list[str]:
        """Names of :attr:`tensors`, as the stages number them."""
        return ["y", "x", *(f"e{i}" for i in range(1, len(self.extras) + 1))]

    @property
    def parts(self) -> dict[str, TensorView]:
        """Scale and bias, those that the norm has."""
        return {name: p for name, p in zip(("scale", "bias"), self.given, strict=True) if p is not None}

    @property
    def lanes(self) -> int:
        """Threads that share a row."""
        return self.x.shape[-1] * self.x.dtype.itemsize // ACCESS


def emit_sides(b: Builder, op: Op, sides: Sequence[Side]) -> None:
    """Emits the launch of one norm, or of two norms of the same form."""
    parameters, operands, texts, first = Parameters(), dict[str, TensorView](), list[tuple[str, str]](), 0
    for k, side in enumerate(sides):
        mark = str(k) if len(sides) > 1 else ""
        spread = [broadcast(p, side.x.shape) for p in side.tensors]
        dims, strides = merge(side.x.shape[:-1], [s[:-1] for s in spread])
        rows = math.prod(dims)
        placed = {f"{n}{mark}": t for n, t in (*zip(side.names, side.tensors, strict=True), *side.parts.items())}
        parameters.pointer(*placed).u32(rows).sizes(*dims)
        for own, whole in zip(strides, spread, strict=True):
            parameters.i64(*own, whole[-1])
        operands |= placed
        texts.append(_side_text(side, len(dims), mark, first))
        first += -(-rows // (THREADS // side.lanes))
    text = _source(texts, -(-math.prod(sides[0].x.shape[:-1]) // (THREADS // sides[0].lanes)))
    launch = parameters.generated(b.arch, text, "short_rows", first, THREADS)
    attrs, last, moved = attrs_dict(op.attrs), sides[-1].last, [_moved(side.stages) for side in sides]
    reads = [v for side in sides for v in (side.x, *side.given, *side.extras)]
    if len(sides) > 1:
        attrs = {
            "norm": op.kind,
            **attrs,
            "count": 1 + len(sides[0].given) + len(sides[0].extras),
            "after": moved[0],
            "others": moved[1],
        }
        covers = replace(last, src=frozenset().union(*(s.op.src | s.last.src for s in sides)))
        b.emit(covers, launch, operands, "NormPair", attrs, reads, [s.out for s in sides])
    elif sides[0].stages:
        attrs = {"norm": op.kind, **attrs, "epilogue": moved[0], "arity": SLOTS}
        b.emit(last, launch, operands, "ActivatedNorm", attrs, reads, [sides[0].out])
    else:
        b.emit(last, launch, operands, op.kind, attrs, [sides[0].x, *sides[0].parts.values()], [sides[0].out])


def _moved(stages: Sequence[Stage]) -> Any:
    """The stages, with their operands after the norm's in the meaning."""
    return plain_stages(
        [replace(s, args=tuple(a if a is None or a < 1 else a + SLOTS - 1 for a in s.args)) for s in stages]
    )


def _total(name: str, term: str, width: int, lanes: int) -> str:
    """C++ that adds ``term`` of each ``v[j]`` over the lanes of a row."""
    return f"""float {name} = 0;
    #pragma unroll
    for (int j = 0; j < {width}; j++) {name} += {term};
    #pragma unroll
    for (int m = {lanes // 2}; m; m /= 2) {name} += __shfl_xor_sync(0xffffffffu, {name}, m);"""


def _statistics(op: Op, width: int, lanes: int, parts: Sequence[str], mark: str) -> tuple[str, str]:
    """C++ code for the statistics of a row from ``v``, and the C++ expression of a result from ``v[j]``."""
    squares, length = _total("squares", "v[j] * v[j]", width, lanes), width * lanes
    scale = f" * p.scale{mark}[first + j]" if "scale" in parts else ""
    shift = f" + p.bias{mark}[first + j]" if "bias" in parts else ""
    least, newline = literal(op.attrs.epsilon, "float"), "\n    "
    if op.kind == "LayerNormalization":
        squares = _total("squares", "(v[j] - mean) * (v[j] - mean)", width, lanes)
        mean = [_total("sum", "v[j]", width, lanes), f"const float mean = sum / {length};"]
        factor = f"const float factor = float(1) / sqrt(squares / {length} + {least});"
        return newline.join([*mean, squares, factor]), f"(v[j] - mean) * factor{scale}{shift}"
    if op.kind == "RMSNormalization":
        factor = f"const float factor = float(1) / sqrt(squares / {length} + {least});"
        return f"{squares}{newline}{factor}", f"v[j] * factor{scale}"
    bounded = f"max_nan(sqrt(squares), {least})" if op.attrs.epsilon else "sqrt(squares)"
    norm = f"const float norm = {bounded}, factor = float(1) / (norm == 0 ? float(1) : norm);"
    return f"{squares}{newline}{norm}", "v[j] * factor"


def _side_text(side: Side, rank: int, mark: str, first: int) -> tuple[str, str]:
    """The parameters and the code of a norm: each thread takes 16 bytes of a row; sums go over the lanes of the row; then the stages.
    ``mark``: suffix of the parameters' names. ``first``: number of the norm's first block."""
    dtype, names, lanes = side.x.dtype, side.names, side.lanes
    c, stored, width = CPP[dtype], CPP[side.out.dtype], ACCESS // dtype.itemsize
    lines, result, _ = body(side.stages, [TensorType(p.dtype, p.shape) for p in side.tensors[1:]])
    fields = [f"{stored if n == 'y' else f'const {c}'}* {n}{mark};" for n in names]
    fields += [f"const float* {n}{mark};" for n in side.parts]
    fields += [
        f"u32 rows{mark}; Size dims{mark}[{rank}];",
        *(f"i64 s{n}{mark}[{rank}], step_{n}{mark};" for n in names),
    ]
    loads = " ".join(
        f"const float v{n[1:]} = widen(p.{n}{mark}[b{n} + (first + j) * p.step_{n}{mark}]);" for n in names[2:]
    )
    statistics, value = _statistics(side.op, width, lanes, list(side.parts), mark)
    block = f"(blockIdx.x - {first}u)" if first else "blockIdx.x"
    offsets = [("b" + n, f"s{n}{mark}") for n in names]
    return (
        " ".join(fields),
        f"""const u32 row = {block} * {THREADS // lanes} + threadIdx.x / {lanes};
    const u32 first = threadIdx.x % {lanes} * {width};
    const bool live = row < p.rows{mark};
    {" ".join(f"i64 b{n} = 0;" for n in names)}
    {{ {walk("q", "live ? row : 0", f"dims{mark}", rank, offsets)} }}
    wait_for_predecessor();
    const Pack<{c}, {width}> x(p.x{mark} + bx + first);
    float v[{width}];
    #pragma unroll
    for (int j = 0; j < {width}; j++) v[j] = widen(x.lane[j]);
    {statistics}
    Pack<{stored}, {width}> y;
    #pragma unroll
    for (int j = 0; j < {width}; j++) {{
        const float v0 = {value}; {loads}
        {" ".join(lines)}
        y.lane[j] = narrow<{stored}>({result});
    }}
    if (live) y.store(p.y{mark} + by + first);""",
    )


def _source(sides: Sequence[tuple[str, str]], blocks: int) -> str:
    """The kernel of one norm, or of two. ``blocks``: number of blocks of the first norm."""
    text = sides[0][1]
    if len(sides) > 1:
        text = f"if (blockIdx.x < {blocks}u) {{\n    {text}\n    }} else {{\n    {sides[1][1]}\n    }}"
    return f"""struct Params {{ {" ".join(fields for fields, _ in sides)} }};

extern "C" __global__ void __launch_bounds__({THREADS}) short_rows(const __grid_constant__ Params p) {{
    launch_dependents();
    {text}
}}
"""
