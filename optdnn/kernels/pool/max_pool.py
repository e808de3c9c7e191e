"""Max pooling of 16-bit channels-last images and volumes. A thread computes a tile of output pixels, so that neighboring windows
share loads. It takes the maximum over the frames of a window first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder, TensorView
from optdnn.kernels.conv.cost_terms import CLOCK, MEMORY
from optdnn.kernels.launch import Parameters
from optdnn.kernels.pointwise.expressions import CPP
from optdnn.kernels.pool.window import Window, pads_of, pool_attrs, spatial3
from optdnn.kernels.tactic import Offer, Tactic
from optdnn.runtime.cuda.gpu_facts import GpuFacts, fitted
from optdnn.types import BF16, FP16

LANES = 8
"""Channels of one access: 16 bytes."""
L1 = 64.0
"""Bytes per cycle and multiprocessor that L1 gives to loads of overlapping windows."""
MOST_LOADS = 40
"""Most vectors in flight per thread: more do not fit the registers."""


@dataclass(frozen=True, order=True)
class Tile:
    """Output rows and columns of a thread, and threads of a block."""

    rows: int
    columns: int
    threads: int

    def __str__(self) -> str:
        return f"tile{self.rows}x{self.columns}t{self.threads}"


class TiledMaxPool(Tactic):
    """Max pools over two or three axes, without dilation, of 16-bit images whose channels are contiguous in groups of 8."""

    name = "max_pool_tiled"

    def refuse(self, b: Builder, op: Op) -> str | None:
        a, x, out = op.attrs, b.graph.type(op.inputs[0]), op.outputs[0].type  # type: ignore[arg-type]
        if len(op.outputs) > 1:
            return "it does not give indices"
        if out.dtype not in (FP16, BF16) or len(a.kernel_shape) not in (2, 3) or 0 in out.static_shape:
            return "it is for 16-bit images"
        if any(d != 1 for d in a.dilations):
            return "its windows are dilated"
        if a.kernel_shape[-2] * a.kernel_shape[-1] > MOST_LOADS:
            return f"its windows have more than {MOST_LOADS} elements"
        pads = pads_of(op, x.static_shape, a.kernel_shape)
        for axis in range(len(a.kernel_shape)):
            size, n = x.static_shape[2 + axis], out.static_shape[2 + axis]
            last = (n - 1) * a.strides[axis] - pads[axis]
            if pads[axis] >= a.kernel_shape[axis] or last >= size:
                return "a window lies wholly in the padding"
        places = [b.operand(op.inputs[0]), *b.fixed(op.value)]
        if any(not in_eights(p) for p in places) or (op.value not in b.reserved and not out.layout):
            return "its channels are not contiguous in groups of 8"
        return None

    def configs(self, b: Builder, op: Op) -> Sequence[Offer]:
        """The tiles, the best predicted first. A maximum does not depend on the order, so each tile serves every batch size."""
        a, x, out = op.attrs, b.source(op.inputs[0]), b.result(op.value)
        found = [
            (_seconds(t, x, out, a.kernel_shape, a.strides, b.gpu), t) for t in _tiles(out, a.kernel_shape, a.strides)
        ]
        return [Offer(tile, seconds) for seconds, tile in sorted(found)]

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        a, x, out, tile = op.attrs, b.operand(op.inputs[0]), b.target(op.value), config
        window = Window.make(a.kernel_shape, a.strides, pads_of(op, x.shape, a.kernel_shape), a.dilations)
        (n, _, d, h, w), (_, c, od, oh, ow) = spatial3(x).shape, spatial3(out).shape
        high, wide = -(-oh // tile.rows), -(-ow // tile.columns)
        count = n * od * high * wide * c // LANES
        text = _source(tile, CPP[x.dtype], c // LANES, (od, high, wide), window)
        parameters = Parameters().pointer("x", "y").i64(*(s // LANES for s in (*_steps(x), *_steps(out))))
        parameters.u32(count).i32(d, h, w, oh, ow)
        launch = parameters.generated(b.arch, text, "max_pool_tiled", -(-count // tile.threads), tile.threads)
        b.emit(op, launch, {"x": x, "y": out}, "MaxPool", pool_attrs(op, x.shape), [x], [out])


def in_eights(x: TensorView) -> bool:
    """Whether every group of eight neighboring channels is one aligned access."""
    others = [s for k, (s, n) in enumerate(zip(x.strides, x.shape, strict=True)) if k != 1 and n > 1]
    apart = x.shape[1] % LANES or x.strides[1] != 1 or x.offset % LANES
    return not apart and all(s % LANES == 0 for s in others)


def _steps(x: TensorView) -> tuple[int, int, int, int]:
    sn, _, sd, sh, sw = spatial3(x).strides
    return sn, sd, sh, sw


def _extent(tile: Tile, kernel: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, int]:
    """Input rows and columns under a tile."""
    return (tile.rows - 1) * strides[-2] + kernel[-2], (tile.columns - 1) * strides[-1] + kernel[-1]


def _tiles(out: TensorView, kernel: tuple[int, ...], strides: tuple[int, ...]) -> Iterator[Tile]:
    for rows, columns in ((1, 1), (1, 2), (2, 1), (2, 2), (1, 4), (2, 4), (4, 1), (4, 2)):
        for threads in (64, 128, 256):
            tile = Tile(rows, columns, threads)
            high, wide = _extent(tile, kernel, strides)
            fits = rows <= max(1, out.shape[-2]) and columns <= max(1, out.shape[-1])
            if fits and (rows == columns == 1 or high * wide <= MOST_LOADS):
                yield tile


def _seconds(
    tile: Tile, x: TensorView, out: TensorView, kernel: tuple[int, ...], strides: tuple[int, ...], gpu: GpuFacts
) -> float:
    """Predicted seconds: one pass over memory, the loads of all tiles, and the latency of few threads."""
    gpu = fitted(gpu)
    high, wide = _extent(tile, kernel, strides)
    frames = kernel[0] if len(kernel) == 3 else 1
    n, c, od, oh, ow = spatial3(out).shape
    threads = n * od * -(-oh // tile.rows) * -(-ow // tile.columns) * c // LANES
    loads = threads * (frames * high * wide + tile.rows * tile.columns) * 16
    busy = min(gpu.multiprocessors, -(-threads // tile.threads))
    in_flight = min(threads, gpu.multiprocessors * 1024) * high * wide * 16
    memory = (x.size + out.size) * x.dtype.itemsize / min(MEMORY, max(in_flight, 4096) / 0.8e-6)
    return 1.5e-6 + max(memory, loads / (busy * L1 * CLOCK)) + frames * high * wide * 8 / CLOCK


def predicted(
    x: TensorView, out: TensorView, kernel: tuple[int, ...], strides: tuple[int, ...], gpu: GpuFacts
) -> float:
    """Predicted seconds of the best tile."""
    return min(_seconds(t, x, out, kernel, strides, gpu) for t in _tiles(out, kernel, strides))


def _source(tile: Tile, t: str, vectors: int, tiles: tuple[int, int, int], window: Window) -> str:
    """The kernel's source. All loads are unconditional: a tap outside of the image reads the nearest pixel inside,
    which is in the same window. ``tiles``: frames, and tiles of a frame."""
    (depth, *kernel), (apart, *strides), (before, *pads) = window.kernel, window.strides, window.pads[:3]
    high, wide = _extent(tile, window.kernel, window.strides)
    return f"""struct Params {{
    const uint4* x; uint4* y; i64 xn, xd, xh, xw, yn, yd, yh, yw; u32 count; int d, h, w, oh, ow;
}};

DEVICE uint4 larger(uint4 a, uint4 b) {{
    a.x = max2_{t}(a.x, b.x); a.y = max2_{t}(a.y, b.y); a.z = max2_{t}(a.z, b.z); a.w = max2_{t}(a.w, b.w);
    return a;
}}

extern "C" __global__ void __launch_bounds__({tile.threads}) max_pool_tiled(const __grid_constant__ Params p) {{
    launch_dependents();
    const u32 index = blockIdx.x * {tile.threads} + threadIdx.x;
    const int vector = index % {vectors}u, column = index / {vectors}u % {tiles[2]}u * {tile.columns};
    const int row = index / {vectors * tiles[2]}u % {tiles[1]}u * {tile.rows}, frame = index / {vectors * tiles[1] * tiles[2]}u % {tiles[0]}u;
    const int n = index / {vectors * tiles[0] * tiles[1] * tiles[2]}u;
    const int top = row * {strides[0]} - {pads[0]}, left = column * {strides[1]} - {pads[1]};
    wait_for_predecessor();
    if (index >= p.count) return;
    const uint4* x = p.x + n * p.xn + vector;
    uint4 taps[{high}][{wide}];
    #pragma unroll
    for (int k = 0; k < {depth}; k++) {{
        const int from = frame * {apart} - {before} + k, d = from < 0 ? 0 : from < p.d ? from : p.d - 1;
        #pragma unroll
        for (int r = 0; r < {high}; r++) {{
            const int h = top + r < 0 ? 0 : top + r < p.h ? top + r : p.h - 1;
            #pragma unroll
            for (int s = 0; s < {wide}; s++) {{
                const int w = left + s < 0 ? 0 : left + s < p.w ? left + s : p.w - 1;
                const uint4 found = x[d * p.xd + h * p.xh + w * p.xw];
                taps[r][s] = k ? larger(taps[r][s], found) : found;
            }}
        }}
    }}
    uint4* y = p.y + n * p.yn + frame * p.yd + row * p.yh + column * p.yw + vector;
    #pragma unroll
    for (int j = 0; j < {tile.columns}; j++) {{
        uint4 across[{high}];
        #pragma unroll
        for (int r = 0; r < {high}; r++) {{
            across[r] = taps[r][j * {strides[1]}];
            #pragma unroll
            for (int s = 1; s < {kernel[1]}; s++) across[r] = larger(across[r], taps[r][j * {strides[1]} + s]);
        }}
        #pragma unroll
        for (int i = 0; i < {tile.rows}; i++) {{
            uint4 best = across[i * {strides[0]}];
            #pragma unroll
            for (int r = 1; r < {kernel[0]}; r++) best = larger(best, across[i * {strides[0]} + r]);
            if (row + i < p.oh && column + j < p.ow) y[i * p.yh + j * p.yw] = best;
        }}
    }}
}}
"""
