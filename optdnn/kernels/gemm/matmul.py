"""Matrix products of any operands: a tiled kernel for stacks, any strides and any types, on tensor cores if they take the types."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder, TensorView, has_tf32, up
from optdnn.kernels.conv.hopper import only_used
from optdnn.kernels.gemm import terms
from optdnn.kernels.gemm.tiles import LEAST, LEAST_TILE, MatrixTile, Tile, matrix_tile, tile_of, tiled
from optdnn.kernels.launch import Parameters
from optdnn.kernels.layout.views import order_read
from optdnn.kernels.layout.walks import walk
from optdnn.kernels.pointwise.expressions import CPP, arithmetic, body, literal
from optdnn.kernels.pointwise.pointwise import emit_pointwise
from optdnn.kernels.pointwise.strides import broadcast, merge, vector
from optdnn.kernels.tactic import Tactic
from optdnn.ops.base import Stage
from optdnn.ops.fused import plain_stages
from optdnn.runtime.cuda.gpu_facts import GpuFacts, fitted
from optdnn.types import FP32, TensorType, is_float

TILE, DEPTH = 64, 16
"""Rows and columns of a block's tile, and its step along K; 256 threads compute 4 x 4 elements each."""
THREADS = 256
THIN = 8
"""Most rows or columns of a thin product: a tile would be nearly empty, so each thread computes a few elements."""
SMALL, MANY, FEW_TERMS = 16, 4096, 64
"""Most rows or columns, least matrices and most terms of products that are thin because there are very many small ones."""
TOGETHER, MOST_RESULTS = 8, 72
"""Most columns of all rows (or rows of all columns) that a thread of a thin product takes, and most results: their sums are in registers."""
ENOUGH_THREADS = 1 << 16
"""Threads that occupy a GPU well."""
THIN_S, APART = 5e-13, 8
"""Seconds per term of a thin product, on all multiprocessors (50,176 of 9 x 9 with 9 x 32 take 66 us on an H200), and an assumed factor
where neighboring columns do not lie together."""
WIDE_BYTES, LONG_S = 3.2e12, 1.6e-12
"""Bytes per second of thin products of fp32, and seconds per term of longer ones: 40 timings on an H200."""
STEP_S = 0.85e-6
"""Seconds of a step along K of a block of the plain kernel, alone on a multiprocessor or with others (14 timings on an H200)."""
UNROLLED = 256
"""Most multiplications of a thread of a thin product that are unrolled."""
LEAST_ELEMENTS = 8192
"""Least elements of a thin product. Fewer do not keep the GPU's threads busy, and a tile sums along K."""
LONGEST = 256
"""Most terms of a sum in a thin product."""
MOST_TILES = 65535
"""Most matrices in a grid of tiles."""
MOST_ELEMENTS = 1 << 32
"""Most elements of a result with one thread per element."""


class TiledMatMul(Tactic):
    """MatMul and Gemm of any operands; the epilogue runs in the kernel."""

    name = "matmul_tiled"

    def refuse(self, b: Builder, op: Op) -> str | None:
        shape = op.outputs[0].type.static_shape
        rows, columns = (len(b.graph.type(v).dims) != 1 for v in op.inputs[:2] if v is not None)
        matrices = math.prod(shape[: len(shape) - rows - columns])
        if matrices > MOST_TILES and max(math.prod(shape), 2 * matrices) > MOST_ELEMENTS:
            return f"{matrices} matrices with more than {MOST_ELEMENTS} elements exceed a grid"
        return None

    def seconds(self, b: Builder, op: Op) -> float | None:
        """Predicted seconds of a thin product, or in fp32 of the plain kernel, without those of a launch; None: the default prediction
        holds."""
        left, right = (b.graph.type(v).static_shape for v in op.inputs[:2] if v is not None)
        if op.kind != "MatMul" or min(len(left), len(right)) < 2:
            return None
        sizes, x = (
            (left[-2], right[-1], left[-1], math.prod(op.outputs[0].type.static_shape[:-2])),
            b.operand(op.inputs[1]),
        )
        wide = x.dtype == FP32
        if is_thin(*sizes, wide=wide) or (wide and thin_parts(*sizes, x, b.gpu)):
            return thin_seconds(*sizes, x)
        plain = wide and not has_tf32(op) and (min(sizes[:2]) < LEAST_TILE or math.prod(sizes) < LEAST)
        return plain_seconds(*sizes, b.gpu) if plain else None

    def place(self, b: Builder, op: Op) -> None:
        """Place the result so that the Transposes and Reshapes after it are views, unless its place is reserved."""
        b.target(op.value, order_read(b, op.value))

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        operands = [None if v is None else b.operand(v) for v in op.inputs]
        arity = op.definition.arity or 2
        left, right = operands[0], operands[1]
        assert left is not None
        assert right is not None
        out = b.target(op.value)
        if op.attrs.prologue:
            made = b.new(f"{op.outputs[0].name}.prologue", left.dtype, left.shape)
            emit_pointwise(b, op, *only_used(op.attrs.prologue, operands), made)
            left = operands[0] = made
        first: list[Stage] = []
        scale = 1.0
        if op.kind == "Gemm":
            a = op.attrs
            left = _swapped(left) if a.transA else left
            right = _swapped(right) if a.transB else right
            scale, attrs = a.alpha, {"alpha": a.alpha, "beta": a.beta, "transA": a.transA, "transB": a.transB}
        else:
            attrs = {}
        attrs |= {"prologue": (), "epilogue": plain_stages(op.attrs.epilogue), "arity": arity}
        extra = {i: p for i, p in enumerate(operands) if i >= 2 and p is not None}
        beta = op.attrs.beta if op.kind == "Gemm" else 1.0
        if op.kind == "Gemm" and 2 in extra:
            first = [Stage("Add", (-1, 2))]
        stages = [*first, *_after(op.attrs.epilogue, len(first))]
        emit_matmul(
            b, op, left, right, out, stages, extra, scale, {2: beta}, op.kind, attrs, operands, tf32=has_tf32(op)
        )


def _after(stages: Sequence[Stage], count: int) -> list[Stage]:
    """The stages, renumbered for ``count`` further stages in front of them."""
    return [Stage(s.kind, tuple(a if a is None or a >= 0 else a - count for a in s.args), s.attrs) for s in stages]


def _swapped(x: TensorView) -> TensorView:
    return x.view(x.shape[::-1], x.strides[::-1])


def _like(result: TensorView, shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Strides for the shape of ``result``: ``shape`` with axes of size 1 at its end, one for each vector operand."""
    rest, missing = list(strides), len(result.shape) - len(shape)
    if missing == 2:
        return [*rest, 0, 0]
    row = result.shape[-2] == 1 and (result.shape[-1] == shape[-1] if shape else False) and result.strides[-2] == 0
    return [*rest[:-1], 0, rest[-1]] if row else [*rest, 0]


@dataclass(frozen=True)
class Share:
    """The rows and columns of a result that a thread of a thin product computes. ``vectors``: neighboring columns are read and written
    in one access."""

    rows: int
    columns: int
    vectors: bool = False

    @classmethod
    def wide(cls, m: int, n: int, k: int, matrices: int, width: int) -> Share:
        """:meth:`of` for fp32: the fastest of ten in 20 timings on an H200."""
        if k > FEW_TERMS:
            return cls(1, min(4, n), width == 4)
        rows, columns = (8, 1) if width == 1 else (2, width) if n <= m else (4, 2)
        found = cls(min(rows, m), min(columns, n), 1 < columns <= n and width % columns == 0)
        return found if found.threads(m, n, matrices) >= ENOUGH_THREADS // 4 else cls(1, 1)

    @classmethod
    def of(cls, m: int, n: int, k: int, matrices: int, width: int = 1) -> Share:
        """The largest share of ``m x n`` results with which enough threads remain. Its values are read once for all of its results.
        ``width``: columns of one access."""
        wide = n <= m
        most = MOST_RESULTS if k <= DEPTH else MOST_RESULTS // 2  # partial sums double the registers
        for along in (TOGETHER, 4, 2, 1):
            rows, columns = (min(along, m), min(n, SMALL)) if wide else (min(m, SMALL), min(along, n))
            found = cls(rows, columns, columns > 1 and width % columns == 0)
            if rows * columns <= most and found.threads(m, n, matrices) >= ENOUGH_THREADS:
                return found
        return cls(1, 1)

    def threads(self, m: int, n: int, matrices: int) -> int:
        return matrices * -(-m // self.rows) * -(-n // self.columns)


@dataclass(frozen=True)
class _Matrices:
    """A product as stacks of matrices. ``extra``: the operands of the stages, as views of the result's shape.

    ``dims`` are the merged axes of the stack. ``steps`` are the strides along them, of the result, both factors and
    each of ``extra``.
    """

    left: TensorView
    right: TensorView
    result: TensorView
    extra: Mapping[int, TensorView]
    dims: Sequence[int]
    steps: Sequence[Sequence[int]]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Rows, columns and terms of a matrix."""
        return self.result.shape[-2], self.result.shape[-1], self.left.shape[-1]

    @property
    def count(self) -> int:
        return math.prod(self.dims)

    def share(self) -> Share:
        """What a thread computes if the product is thin."""
        m, n, k = self.sizes
        read, written = ((*s, *x.strides[-2:]) for s, x in ((self.steps[2], self.right), (self.steps[0], self.result)))
        width = vector([self.result, self.right], [n], [written, read]) if read[-1] == 1 else 1
        return (Share.wide if self.left.dtype == FP32 else Share.of)(m, n, k, self.count, width)

    def together(self) -> int:
        """Neighboring terms of a row of ``left`` that are one access of 16 bytes, or 1. The last access of a row may read beyond it, but
        not beyond its pitch."""
        lanes, x, (rows, _, k) = 16 // self.left.dtype.itemsize, self.left, self.sizes
        pitch, step = x.strides[-2:]
        aligned = not any(s % lanes for s in (x.offset, pitch, *self.steps[1]))
        return lanes if step == 1 and k > 1 and aligned and pitch >= up(k, lanes) and rows > 1 else 1


def _matrices(left: TensorView, right: TensorView, out: TensorView, extra: Mapping[int, TensorView]) -> _Matrices:
    """The product with vectors as matrices of one row or column. All leading axes form the stack."""
    shape, result = out.shape, out
    if len(left.shape) == 1:
        left = left.view((1, *left.shape), (0, *left.strides))
        at = len(shape) - (len(right.shape) > 1)
        result = result.view((*shape[:at], 1, *shape[at:]), (*result.strides[:at], 0, *result.strides[at:]))
    if len(right.shape) == 1:
        right = right.view((*right.shape, 1), (*right.strides, 0))
        result = result.view((*result.shape, 1), (*result.strides, 0))
    stack = result.shape[:-2]
    one, two = (broadcast(p.view(p.shape[:-2], p.strides[:-2]), stack) for p in (left, right))
    wide = {a: out.view(shape, broadcast(p, shape)) for a, p in extra.items()}
    if result.shape != shape:  # a factor is a vector: the stages' operands get the same view
        wide = {a: result.view(result.shape, _like(result, shape, p.strides)) for a, p in wide.items()}
    dims, steps = merge(stack, [result.strides[:-2], one, two, *(p.strides[:-2] for p in wide.values())])
    return _Matrices(left, right, result, wide, dims, steps)


def _kernel_for(b: Builder, p: _Matrices, tf32: bool) -> tuple[Share | None, Tile | MatrixTile | None]:
    """What a thread computes if the thin kernel runs the product, and the tile if another one than the plain and the thin kernel does.

    Three kernels sum a row in the same order for all sizes: the plain one, the thin one (in the same order), and the tensor
    cores' tile. ``row_invariant`` allows only these.
    """
    m, n, k = p.sizes
    thin = p.count > MOST_TILES or is_thin(m, n, k, p.count, wide=p.left.dtype == FP32)
    tile: Tile | MatrixTile | None = None
    if not thin or (b.row_invariant and p.count <= MOST_TILES):
        tile = matrix_tile(p.left, p.right, m, n, p.count, b.gpu, tf32=tf32)
    if tile is None and not (thin or b.row_invariant):
        tile = tile_of(p.left, p.right, m, n, k, (p.steps[1], p.steps[2]), p.count, b.gpu)
    return p.share() if thin and tile is None else None, tile


def _finish(
    stages: Sequence[Stage], out: TensorView, extra: Mapping[int, TensorView], used: Iterable[int], t: str,
    scale: float, scales: Mapping[int, float], to: str,
) -> str:  # fmt: skip
    """C++ that applies the stages to ``acc[i][j]`` (of the type ``t``) and stores it ``to`` an lvalue. ``extra``: all operands from 2
    on."""
    ty, wide = CPP[out.dtype], arithmetic(out.dtype)
    types: list[TensorType] = [TensorType(out.dtype, out.shape)]
    for a in range(1, max(extra, default=1) + 1):
        dtype = extra[a].dtype if a in extra else out.dtype
        same = is_float(dtype) and is_float(out.dtype)
        types.append(TensorType(out.dtype if same else dtype, extra[a].shape if a in extra else ()))
    lines, value, _ = body(stages, types)
    loads = []
    for a in used:
        factor = f"{literal(scales[a], wide)} * " if a in scales else ""
        read = f"widen(p.e{a}[be{a} + row * p.me{a}[0] + column * p.me{a}[1]])"
        loads.append(f"const {arithmetic(extra[a].dtype)} v{a} = {factor}{read};")
    total = f"{literal(scale, t)} * acc[i][j]" if scale != 1.0 else "acc[i][j]"
    start = f"const {wide} v0 = {wide}({total});"
    return f"""{start} {" ".join(loads)} {" ".join(lines)}
            {to} = narrow<{ty}>({value if stages else "v0"});"""


def _kernel(
    p: _Matrices, share: Share | None, tile: Tile | MatrixTile | None, finish: str, used: Mapping[int, TensorView]
) -> str:
    """The kernel's source. ``used``: the operands of the stages, as they are stored."""
    t, rank, names = arithmetic(p.left.dtype), len(p.dims), ["y", "l", "r", *(f"e{a}" for a in used)]
    fields = [f"{CPP[p.result.dtype]}* y; const {CPP[p.left.dtype]}* l; const {CPP[p.right.dtype]}* r;"]
    fields += [f"const {CPP[x.dtype]}* e{a};" for a, x in used.items()]
    fields += [
        f"int m, n, k; {'u32 matrices; ' if share else ''}Size dims[{rank}];",
        *(f"i64 s{x}[{rank}], m{x}[2];" for x in names),
    ]
    return f"""struct Params {{ {" ".join(fields)} }};

extern "C" __global__ void __launch_bounds__({tile.threads if tile else 256}) matmul(const __grid_constant__ Params p) {{
    launch_dependents();
    {" ".join(f"i64 b{x} = 0;" for x in names)}
    {_share(share) if share else ""}
    {walk("q", "share / area" if share else "blockIdx.z", "dims", rank, [("b" + x, "s" + x) for x in names])}
    wait_for_predecessor();
    {tiled(finish) if tile else _thin(t, p, share, finish) if share else _plain(t, finish)}
}}
"""


def emit_matmul(
    b: Builder, op: Op, left: TensorView, right: TensorView, out: TensorView, stages: Sequence[Stage], extra: dict[int, TensorView],
    scale: float, scales: dict[int, float], kind: str, attrs: dict[str, Any], reads: Sequence[TensorView | None], *, tf32: bool = False,
    whole: bool = False,
) -> None:  # fmt: skip
    """Add the launch of ``out = stages(scale * left @ right)``, or two if blocks share the terms of a row (never if ``whole``). Operand
    ``i`` of the stages is first multiplied by ``scales[i]``. ``tf32``: fp32 factors may be rounded."""
    if not out.size:
        return
    used = {a: extra[a] for a in sorted({a for s in stages for a in s.args if a is not None and a > 0}) if a in extra}
    p = _matrices(left, right, out, used)
    share, tile = _kernel_for(b, p, tf32)
    factors = [scale, *(scales.get(a, 1.0) for a in used)]
    if not (whole or share or b.row_invariant) and terms.can_share(left, right, out, used, factors):
        blocks = terms.blocks_of(*p.sizes[:2], p.count, (tile.rows, tile.columns) if tile else (TILE, TILE))
        parts = thin_parts(*p.sizes, p.count, right, b.gpu) or terms.parts_of(p.sizes[2], blocks, tile, b.gpu)
        if parts > 1:
            _emit_parts(b, op, left, right, out, parts, stages, used, tf32)
            return
    to = "out.lane[j]" if share and share.vectors else "p.y[by + row * p.my[0] + column * p.my[1]]"
    text = _kernel(p, share, tile, _finish(stages, out, extra, used, arithmetic(left.dtype), scale, scales, to), used)
    (m, n, k), matrices = p.sizes, p.count
    placed = {"y": out, "l": p.left, "r": p.right, **{f"e{a}": x for a, x in used.items()}}
    parameters = Parameters().pointer(*placed).i32(m, n, k).u32(*([matrices] if share else [])).sizes(*p.dims)
    for steps, view in zip(p.steps, (p.result, p.left, p.right, *p.extra.values()), strict=True):
        parameters.i64(*steps, *view.strides[-2:])
    rows, columns = (tile.rows, tile.columns) if tile is not None else (TILE, TILE)
    grid = (-(-m // rows), -(-n // columns), matrices)
    if share is not None:
        grid = (-(-share.threads(m, n, matrices) // THREADS), 1, 1)
    if tile is None:
        launch = parameters.generated(b.arch, text, "matmul", grid, 256)
    else:
        launch = parameters.generated(
            b.arch, f"{tile.defines()}\n{text}", "matmul", grid, tile.threads, shared=tile.shared_bytes,
            options=tile.options, template=tile.template,
        )  # fmt: skip
    b.emit(op, launch, placed, kind, attrs, reads, [out])


def _emit_parts(
    b: Builder, op: Op, left: TensorView, right: TensorView, out: TensorView, parts: int, stages: Sequence[Stage],
    used: Mapping[int, TensorView], tf32: bool,
) -> None:  # fmt: skip
    """Add the launch of the products of equal parts of the terms, and the one that adds their sums, and the products of the terms that
    are left over."""

    def emit(pair: Sequence[TensorView], to: TensorView, stages: Sequence[Stage], extra: dict[int, TensorView]) -> None:
        attrs = {"prologue": (), "epilogue": plain_stages(stages), "arity": 2}
        reads = [*pair, *(extra.get(a) for a in range(2, max(extra, default=1) + 1))]
        emit_matmul(b, op, *pair, to, stages, extra, 1.0, {}, "MatMul", attrs, reads, tf32=tf32, whole=True)

    equal, rest = terms.cut(left, right, parts)
    sums = terms.space_of_sums(b, op, out, parts)
    emit(equal, sums, [], {})
    if rest is None:
        terms.emit_sum(b, op, sums, stages, used, out)
        return
    first = max(used, default=1) + 1
    added = {first + part: x for part, x in enumerate(terms.each_of(sums))}
    emit(rest, out, [*(Stage("Add", (~k, a)) for k, a in enumerate(added)), *_after(stages, parts)], {**used, **added})


def thin_parts(m: int, n: int, k: int, matrices: int, right: TensorView, gpu: GpuFacts) -> int:
    """Parts whose products are thin, of a product in fp32 with too many terms; 0 if there are none, or if the plain kernel is faster."""
    parts = -(-k // LONGEST)
    if not 1 < parts <= terms.MOST_PARTS or not is_thin(m, n, k // parts, matrices * parts, wide=True):
        return 0
    faster = thin_seconds(m, n, k, matrices, right) < plain_seconds(m, n, k, matrices, gpu)
    return parts if faster else 0


def is_thin(m: int, n: int, k: int, matrices: int, *, wide: bool = False) -> bool:
    """Whether products of m rows, n columns and k terms suit threads that compute a few elements each. ``wide``: of fp32."""
    small = min(m, n) <= SMALL and ((matrices >= MANY and k <= FEW_TERMS) or (wide and k <= DEPTH))
    return (min(m, n) <= THIN or small) and k <= LONGEST and m * n * matrices >= LEAST_ELEMENTS


def thin_seconds(m: int, n: int, k: int, matrices: int, right: TensorView) -> float:
    """Predicted seconds of a thin product, without those of a launch. ``right``: its second factor."""
    if right.dtype == FP32:
        moved = 4 * matrices * (m * k + k * n + m * n) / WIDE_BYTES
        return moved * (1 if right.strides[-1] in (0, 1) else 2) + (
            m * n * k * matrices * LONG_S if k > FEW_TERMS else 0.0
        )
    return m * n * k * matrices * THIN_S * (1 if right.strides[-1] in (0, 1) else APART)


def plain_seconds(m: int, n: int, k: int, matrices: int, gpu: GpuFacts) -> float:
    """Predicted seconds of the plain kernel in fp32, without those of a launch: its blocks take the steps along K one after another."""
    tiles = terms.blocks_of(m, n, matrices, (TILE, TILE))
    parts = terms.parts_of(k, tiles, None, gpu)
    return STEP_S * -(-k // (DEPTH * parts)) * max(1.0, tiles * parts / fitted(gpu).multiprocessors)


def _share(share: Share) -> str:
    """C++ of the number of a thread's share, and of the shares of a matrix."""
    columns = f"(u32(p.n) + {share.columns - 1}u) / {share.columns}u"
    return (
        f"const u32 share = blockIdx.x * {THREADS}u + threadIdx.x, shares = {columns};\n"
        f"    const u32 area = (u32(p.m) + {share.rows - 1}u) / {share.rows}u * shares;"
    )


def _thin(t: str, p: _Matrices, share: Share, finish: str) -> str:
    """C++ of a thread's share of a thin product; neighboring threads take neighboring columns. ``finish``: as of :func:`_plain`. Terms are
    added as there: sums of :data:`DEPTH`, and then these."""
    r, c, terms, parts = share.rows, share.columns, min(p.sizes[2], DEPTH), p.sizes[2] > DEPTH
    into, each = "part" if parts else "acc", "#pragma unroll\n        for (int i = 0; i < {}; i++)".format
    right = f"first + j < p.n ? {t}(widen(p.r[br + (k0 + k) * p.mr[0] + (first + j) * p.mr[1]])) : {t}(0)"
    read = begin = end = held = ""
    left, lanes = "widen(p.l[bl + (top + i) * p.ml[0] + (k0 + k) * p.ml[1]])", p.together()
    if lanes > 1:
        pack = f"Pack<{CPP[p.left.dtype]}, {lanes}>"
        held, left = f"{pack} held[{r}];", f"widen(held[i].lane[k % {lanes}])"
        load = f"held[i] = {pack}(p.l + bl + (top + i) * p.ml[0] + k0 + k);"
        read = f"if (k % {lanes} == 0) {{\n        {each(r)} if (top + i < p.m) {load} }}"
    if share.vectors:
        read += f"const Pack<{CPP[p.right.dtype]}, {c}> read(p.r + br + (k0 + k) * p.mr[0] + first);"
        right = f"{t}(widen(read.lane[j]))"
        begin, end = f"Pack<{CPP[p.result.dtype]}, {c}> out;", "out.store(p.y + by + (top + i) * p.my[0] + first);"

    def step(begin: str, end: str, *, whole: bool) -> str:
        return f"""for (int k0 = {begin}; k0 < {end}; k0 += {DEPTH}) {{
        {f"{t} part[{r}][{c}] = {{}};" if parts else ""}
        {held}
        {"#pragma unroll" if held or r * c * terms <= UNROLLED else ""}
        for (int k = 0; k < {terms}; k++) {{
            {"" if whole else "if (k0 + k >= p.k) break;"}
            {read}
            {t} right[{c}];
            #pragma unroll
            for (int j = 0; j < {c}; j++) right[j] = {right};
            #pragma unroll
            for (int i = 0; i < {r}; i++) {{
                const {t} left = top + i < p.m ? {t}({left}) : {t}(0);
                #pragma unroll
                for (int j = 0; j < {c}; j++) {into}[i][j] += left * right[j];
            }}
        }}
        {f"{each(r)} for (int j = 0; j < {c}; j++) acc[i][j] += part[i][j];" if parts else ""}
    }}"""

    whole = p.sizes[2] // terms * terms
    steps = step("0", f"{whole}", whole=True) + (step(f"{whole}", "p.k", whole=False) if p.sizes[2] % terms else "")
    return f"""const u32 inside = share % area;
    const int top = inside / shares * {r}, first = inside % shares * {c};
    if (share / area >= p.matrices) return;
    {t} acc[{r}][{c}] = {{}};
    {steps}
    {each(r)} {{
        if (top + i >= p.m) continue;
        {begin}
        #pragma unroll
        for (int j = 0; j < {c}; j++) {{
            const int row = top + i, column = first + j;
            if (column >= p.n) continue;
            {finish}
        }}
        {end}
    }}"""


def _plain(t: str, finish: str) -> str:
    """C++ of a block's tile for any operands. ``finish``: C++ that stores ``acc[i][j]`` of ``row`` and ``column``."""
    load = f"""#pragma unroll
        for (int s = 0; s < 4; s++) {{
            const int k = step + tx, row = top + ty + 16 * s;
            read_left[s] = row < p.m && k < p.k ? {t}(widen(p.l[bl + row * p.ml[0] + k * p.ml[1]])) : {t}(0);
            const int z = step + threadIdx.x / {TILE} + 4 * s, column = first + threadIdx.x % {TILE};
            read_right[s] = column < p.n && z < p.k ? {t}(widen(p.r[br + z * p.mr[0] + column * p.mr[1]])) : {t}(0);
        }}"""
    return f"""__shared__ __align__(16) {t} left[{DEPTH}][{TILE} + 4], right[{DEPTH}][{TILE} + 4];
    const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    const int top = blockIdx.x * {TILE}, first = blockIdx.y * {TILE};
    {t} acc[4][4] = {{}}, read_left[4], read_right[4];
    int step = 0;
    {load}
    for (int k0 = 0; k0 < p.k; k0 += {DEPTH}) {{
        #pragma unroll
        for (int s = 0; s < 4; s++) {{
            left[tx][ty + 16 * s] = read_left[s];
            right[threadIdx.x / {TILE} + 4 * s][threadIdx.x % {TILE}] = read_right[s];
        }}
        __syncthreads();
        step = k0 + {DEPTH};        // its loads are in flight while this step is computed
        {load}
        {t} part[4][4] = {{}};      // sums of a tile by themselves: rounding errors grow with the longest chain of additions
        #pragma unroll
        for (int k = 0; k < {DEPTH}; k++)
            #pragma unroll
            for (int i = 0; i < 4; i++)
                #pragma unroll
                for (int j = 0; j < 4; j++) part[i][j] += left[k][ty * 4 + i] * right[k][tx * 4 + j];
        #pragma unroll
        for (int i = 0; i < 4; i++)
            #pragma unroll
            for (int j = 0; j < 4; j++) acc[i][j] += part[i][j];
        __syncthreads();
    }}
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) {{
            const int row = top + ty * 4 + i, column = first + tx * 4 + j;
            if (row >= p.m || column >= p.n) continue;
            {finish}
        }}"""
