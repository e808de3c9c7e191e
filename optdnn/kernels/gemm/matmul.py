"""Matrix products of any operands: a tiled kernel for stacks, any strides and any types, on tensor cores if they take the types."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder, TensorView, has_tf32
from optdnn.kernels.conv.hopper import only_used
from optdnn.kernels.gemm import terms
from optdnn.kernels.gemm.stacks import Matrices, matrices_of
from optdnn.kernels.gemm.terms import DEPTH, TILE, plain_seconds
from optdnn.kernels.gemm.thin import THREADS, Share, is_thin, share_of, share_text, thin_parts, thin_seconds, thin_text
from optdnn.kernels.gemm.tiles import LEAST, MatrixTile, Tile, matrix_tile, tile_of, tiled, tiles_true_fp32
from optdnn.kernels.launch import Parameters
from optdnn.kernels.layout.views import order_read
from optdnn.kernels.layout.walks import walk
from optdnn.kernels.pointwise.expressions import CPP, arithmetic, body, literal
from optdnn.kernels.pointwise.pointwise import emit_pointwise
from optdnn.kernels.tactic import Tactic
from optdnn.ops.base import Stage, renumbered
from optdnn.ops.fused import plain_stages
from optdnn.types import FP32, TensorType, is_float

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
        sizes = (left[-2], right[-1], left[-1], math.prod(op.outputs[0].type.static_shape[:-2]))
        x = b.operand(op.inputs[1])
        wide = x.dtype == FP32
        if is_thin(*sizes, wide=wide) or (wide and thin_parts(*sizes, x, b.gpu)):
            return thin_seconds(*sizes, x)
        plain = wide and (math.prod(sizes) < LEAST or not (has_tf32(op) or tiles_true_fp32(*sizes, b.gpu)))
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
        stages = [*first, *renumbered(op.attrs.epilogue, len(first))]
        emit_matmul(
            b, op, left, right, out, stages, extra, scale, {2: beta}, op.kind, attrs, operands, tf32=has_tf32(op)
        )


def _swapped(x: TensorView) -> TensorView:
    return x.view(x.shape[::-1], x.strides[::-1])


def _kernel_for(b: Builder, p: Matrices, tf32: bool) -> tuple[Share | None, Tile | MatrixTile | None]:
    """What a thread computes if the thin kernel runs the product, and the tile if another one than the plain and the thin kernel does.

    Three kernels sum a row in the same order for all sizes: the plain one, the thin one (in the same order), and the tensor
    cores' tile. ``row_invariant`` allows only these.
    """
    m, n, k = p.sizes
    thin = p.count > MOST_TILES or is_thin(m, n, k, p.count, wide=p.left.dtype == FP32)
    tile: Tile | MatrixTile | None = None
    small = p.left.dtype == FP32 and m * n * k * p.count < LEAST and not b.row_invariant
    if not (thin or small) or (b.row_invariant and p.count <= MOST_TILES):
        tile = matrix_tile(p.left, p.right, m, n, p.count, b.gpu, tf32=tf32)
    if tile is None and not (thin or b.row_invariant):
        tile = tile_of(p.left, p.right, m, n, k, (p.steps[1], p.steps[2]), p.count, b.gpu)
    return share_of(p) if thin and tile is None else None, tile


def _finish(
    stages: Sequence[Stage], out: TensorView, extra: Mapping[int, TensorView], used: Iterable[int], t: str,
    scale: float, scales: Mapping[int, float], to: str, total: str,
) -> tuple[dict[str, tuple[str, str]], str]:  # fmt: skip
    """The values that the stages read, as name -> (type, C++ that loads it), and C++ that applies the stages to the sum ``total``
    (of the type ``t``) and stores it ``to`` an lvalue. ``extra``: all operands from 2 on."""
    ty, wide = CPP[out.dtype], arithmetic(out.dtype)
    types: list[TensorType] = [TensorType(out.dtype, out.shape)]
    for a in range(1, max(extra, default=1) + 1):
        dtype = extra[a].dtype if a in extra else out.dtype
        same = is_float(dtype) and is_float(out.dtype)
        types.append(TensorType(out.dtype if same else dtype, extra[a].shape if a in extra else ()))
    lines, value, _ = body(stages, types)
    loads = {}
    for a in used:
        factor = f"{literal(scales[a], wide)} * " if a in scales else ""
        read = f"widen(p.e{a}[be{a} + row * p.me{a}[0] + column * p.me{a}[1]])"
        loads[f"v{a}"] = (arithmetic(extra[a].dtype), factor + read)
    scaled = f"{literal(scale, t)} * {total}" if scale != 1.0 else total
    start = f"const {wide} v0 = {wide}({scaled});"
    return (
        loads,
        f"""{start} {" ".join(lines)}
            {to} = narrow<{ty}>({value if stages else "v0"});""",
    )


def _kernel(
    p: Matrices, share: Share | None, tile: Tile | MatrixTile | None, finish: tuple[dict[str, tuple[str, str]], str],
    used: Mapping[int, TensorView],
) -> str:  # fmt: skip
    """The kernel's source. ``finish``: of :func:`_finish`; ``used``: the operands of the stages, as they are stored."""
    whole = " ".join([*(f"const {kind} {name} = {value};" for name, (kind, value) in finish[0].items()), finish[1]])
    down = p.result.strides[-2] == 1 and p.result.strides[-1] != 1
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
    {share_text(share) if share else ""}
    {walk("q", "share / area" if share else "blockIdx.z", "dims", rank, [("b" + x, "s" + x) for x in names])}
    wait_for_predecessor();
    {tiled(*finish, tile, down=down) if tile else thin_text(t, p, share, whole) if share else _plain(t, whole)}
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
    p = matrices_of(left, right, out, used)
    share, tile = _kernel_for(b, p, tf32)
    factors = [scale, *(scales.get(a, 1.0) for a in used)]
    if not (whole or share or b.row_invariant) and terms.can_share(left, right, out, used, factors):
        blocks = terms.blocks_of(*p.sizes[:2], p.count, (tile.rows, tile.columns) if tile else (TILE, TILE))
        parts = thin_parts(*p.sizes, p.count, right, b.gpu) or terms.parts_of(p.sizes[2], blocks, tile, b.gpu)
        if parts > 1:
            _emit_parts(b, op, left, right, out, parts, stages, used, tf32)
            return
    to = "out.lane[j]" if share and share.vectors else "p.y[by + row * p.my[0] + column * p.my[1]]"
    total = "acc[i][j]" if tile is None else "sum"
    text = _kernel(
        p, share, tile, _finish(stages, out, extra, used, arithmetic(left.dtype), scale, scales, to, total), used
    )
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
    """Add two launches: one multiplies equal parts of the terms, the other adds these products to that of the terms left over."""

    def emit(pair: terms.Pair, to: TensorView, stages: Sequence[Stage], extra: dict[int, TensorView]) -> None:
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
    emit(
        rest,
        out,
        [*(Stage("Add", (~k, a)) for k, a in enumerate(added)), *renumbered(stages, parts)],
        {**used, **added},
    )


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
