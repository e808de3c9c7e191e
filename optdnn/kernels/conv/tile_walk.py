"""Common plans of the kernels on ``tile_walk.cuh``: a block walks over the tiles of a slab of channels, and TMA loads
their patches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from optdnn.kernels.conv.problem import Depth, Source
from optdnn.kernels.launch import Parameters, tensor_map, whole_kib
from optdnn.runtime.cuda.gpu_facts import GpuFacts
from optdnn.runtime.cuda.launches.plan import TensorMap

CLOCK = 1.75e9
MEMORY = 4.2e12
L2 = 3.2e12
HEAD_BYTES = 1024
SHARED = 233472
"""Bytes of shared memory of a multiprocessor of sm_90. Each block takes 1024 bytes on top of its own."""
# Fitted to 240 timings on an H200, within 7 % on average.
LAUNCH = 0.75e-6
"""Seconds from the previous launch to the first instruction after the wait, plus those from the last store to the end."""
ROW, CHUNK = 2.3, 0.95
"""Cycles in which TMA loads a pixel of a patch: a swizzled pixel of any size, and each 16 bytes of another one."""
STORED = 1.6
"""Time of a pixel of the result, in pixels of a patch that is not swizzled."""
EXPOSED = 0.65
"""Fraction of the load time of a block's first patch that nothing hides."""
BUSY = 1.85
"""Factor on the cycles of shared memory and of instruction issue, compared with each alone."""
CHAIN = 1.25
"""The same factor for a chain of dependent instructions."""


def _swizzle(chunks: int) -> int:
    """The swizzle in bytes of tensor maps of pixels of so many chunks. An odd number of chunks needs none to avoid bank conflicts."""
    return chunks * 16 if chunks in (2, 4, 8) else 0


def _ways(chunks: int) -> int:
    """Neighboring pixels in the same banks."""
    return 1 if _swizzle(chunks) else math.gcd(chunks, 8)


def _map(
    name: str, dtype: str, size: tuple[int, ...], channels: tuple[int, int, int], box: tuple[int, ...], apart: int
) -> TensorMap[str]:
    """The tensor map of images or volumes, channels-last (``size``: batch, frames of volumes, height and width), in boxes of these
    numbers of images or frames, rows and columns. ``channels``: their number, elements of a pixel, and chunks in a box.
    ``apart``: elements from an image or frame to the next; 0: without gaps."""
    count, pitch, chunks = channels
    outward = size[::-1]
    row = pitch * 2 * outward[0]
    image = apart * 2 or row * outward[1]
    strides = (pitch * 2, row, image, image * outward[2])[: len(size)]
    boxes = (chunks * 8, *box[::-1], *(1,) * (len(size) - len(box)))
    return tensor_map(name, dtype, (count, *outward), strides, boxes, _swizzle(chunks))


@dataclass(frozen=True)
class Walk:
    """Tiles of ``images`` images x ``height`` x ``width`` results of ``chunks`` times eight channels, for ``warps`` warps.

    ``columns`` is the width of a patch; 0: the columns that the windows cover. ``stages`` patches are in flight.
    ``parts`` warps share the same channels. Up to ``ways`` neighboring pixels may lie in the same banks. ``results``: channels of the
    result, if each of them reads all channels of the source; 0: slabs of results read the same slabs of the source. ``residual``: a
    tensor of the result's shape is loaded, too.
    """

    images: int
    height: int
    width: int
    chunks: int
    warps: int
    parts: int
    stages: int
    columns: int = 0
    ways: int = 1
    results: int = 0
    residual: bool = False

    def read(self, source: Source) -> int:
        """Chunks of eight channels of a patch."""
        return -(-source.channels // 8) if self.results else self.chunks

    def conflicts(self, source: Source) -> int:
        """Neighboring pixels of a patch in the same banks."""
        return _ways(self.read(source))

    def patch(self, source: Source) -> tuple[int, int]:
        """Rows and columns of a tile's patch."""
        rows, covered = source.patch((self.height, self.width))
        return rows, self.columns or covered

    def patch_images(self, source: Source) -> int:
        """Images of a patch, or frames of volumes: those under the windows of ``images`` frames of the result."""
        return self.images + (0 if source.depth is None else source.depth.taps - 1)

    def patch_bytes(self, source: Source) -> int:
        """Bytes of a stage."""
        return whole_kib(self.patch_images(source) * math.prod(self.patch(source)) * self.read(source) * 16)

    def result_bytes(self) -> int:
        """Bytes of a tile's results."""
        return whole_kib(self.images * self.height * self.width * self.chunks * 16)

    def shared_bytes(self, source: Source, squeeze: bool) -> int:
        """Dynamic shared memory of a block."""
        sums = self.parts * self.images * self.chunks * 32 if squeeze else 0
        return HEAD_BYTES + self.stages * self.patch_bytes(source) + self.result_bytes() + sums

    def tiles(self, source: Source) -> tuple[int, int, int]:
        """Slabs of channels, and tiles along columns and rows."""
        out_h, out_w = source.output()
        slabs = -(-(self.results or source.channels) // (self.chunks * 8))
        return slabs, -(-out_w // self.width), -(-out_h // self.height)

    def count(self, source: Source, batch: int) -> int:
        """Tiles of a slab. ``batch``: images of the result."""
        _, x, y = self.tiles(source)
        if source.depth is not None:
            return x * y * batch // source.depth.out * self.tiles_z(source.depth)
        return x * y * -(-batch // self.images)

    def tiles_z(self, depth: Depth) -> int:
        """Tiles along the frames of the result of a volume."""
        return -(-depth.out // self.images)

    def squeeze_mode(self, source: Source, squeeze: bool) -> int:
        """0: no squeeze; 1: sums of tiles, which a second launch adds up; 2: a tile is a whole image."""
        if not squeeze or source.depth is not None:
            return int(squeeze)
        return 2 if self.tiles(source)[1:] == (1, 1) else 1

    def defines(self, source: Source, squeeze: bool) -> dict[str, int]:
        """Constants that the header reads."""
        patch_h, patch_w = self.patch(source)
        return {
            "CHUNKS": self.read(source), "OUT_CHUNKS": self.chunks, "DENSE": int(self.results > 0), "TILE_W": self.width,
            "TILE_H": self.height, "TILE_N": self.images, "PATCH_W": patch_w, "PATCH_H": patch_h, "STRIDE_H": source.stride[0], "STRIDE_W": source.stride[1], "STAGES": self.stages,
            "WARPS": self.warps, "SQUEEZE": self.squeeze_mode(source, squeeze), "PARTS": self.parts,
            "KERNEL_H": source.kernel[0], "KERNEL_W": source.kernel[1],
            "KERNEL_D": 0 if source.depth is None else source.depth.taps, "HAS_RESIDUAL": int(self.residual),
        }  # fmt: skip

    def refuse(self, source: Source, batch: int, squeeze: bool, blocks: int, shared: int) -> str | None:
        """Why no block can walk this way, or None. ``blocks``: per multiprocessor; ``shared``: bytes that a block can have."""
        if (source.channels % 8 and not self.results) or min(source.output()) < 1:
            return "it is for non-empty images with a multiple of 8 channels"
        if source.depth is not None and (source.depth.stride, source.depth.dilation) != (1, 1):
            return "frames of volumes are read one after another"
        for chunks in (self.read(source), self.chunks):
            if _ways(chunks) > self.ways:
                return f"pixels of {chunks} chunks of channels would lie in the same banks"
        if not 2 <= self.stages <= 8 or not 1 <= self.warps <= 16:
            return "not a ring and a block of this kernel"
        channels = 8 * max(self.read(source), self.chunks)
        if max(*self.patch(source), self.patch_images(source), self.height, self.width, channels) > 256:
            return "the patch exceeds a TMA box"
        if blocks * ((needed := self.shared_bytes(source, squeeze)) + 1024) > SHARED or needed > shared:
            return f"{needed} bytes of shared memory are too many for {blocks} blocks"
        if self.count(source, batch) * self.tiles(source)[0] >= 1 << 31:
            return "more tiles than the kernel can count"
        return None

    def parameters(
        self,
        source: Source,
        batch: int,
        dtype: str,
        squeeze: bool,
        pitches: Sequence[int] = (0, 0),
        apart: Sequence[int] = (0, 0),
    ) -> Parameters:
        """The parameter block. ``batch``: images of the result. ``pitches``: elements of a pixel of the input, of the result, and of a
        residual; 0: their channels. ``apart``: elements from an image to the next of input and result; 0: without gaps."""
        mode, out, channels = self.squeeze_mode(source, squeeze), source.output(), self.results or source.channels
        slabs, tiles_x, tiles_y = self.tiles(source)
        read, written = pitches[0] or source.channels, pitches[1] or channels
        depth = source.depth
        before, after = ((batch,),) * 2 if depth is None else ((batch // depth.out, n) for n in (depth.size, depth.out))
        box = (self.patch_images(source), *self.patch(source))
        made = Parameters().tensor_map(
            _map("input", dtype, (*before, source.height, source.width), (source.channels, read, self.read(source)), box, apart[0]),
            _map("output", dtype, (*after, *out), (channels, written, self.chunks), (self.images, self.height, self.width), apart[1]),
        )  # fmt: skip
        made.pointer("weights", "bias", "sums" if mode == 1 else None, "means" if mode == 2 else None)
        made.i32(batch, channels, *out, *source.padding[:2])
        made.i32(slabs, tiles_x, tiles_x * tiles_y, self.count(source, batch))
        made.f32(1.0 / math.prod(out))
        if depth is not None:
            made.i32(-depth.first, depth.out, self.tiles_z(depth))
        return made.pointer("residual").i32(pitches[2] or channels) if self.residual else made

    def grid(self, source: Source, batch: int, gpu: GpuFacts, blocks: int) -> int:
        """Blocks of a launch: as many as fill the GPU with ``blocks`` per multiprocessor."""
        slabs = self.tiles(source)[0]
        return slabs * max(1, min(self.count(source, batch), gpu.multiprocessors * blocks // slabs))

    def load_cycles(self, source: Source) -> float:
        """Cycles in which TMA loads a patch, and stores results that are not swizzled."""
        patch, chunks = self.patch_images(source) * math.prod(self.patch(source)), self.read(source)
        result = self.images * self.height * self.width
        return patch * ROW if _swizzle(chunks) else (patch * chunks + STORED * result * self.chunks) * CHUNK

    def seconds(
        self, source: Source, batch: int, gpu: GpuFacts, blocks: int, *, shared: float, tensor: float, issued: float,
        depth: float, least: int, start: float,
    ) -> float:  # fmt: skip
        """Predicted seconds of one dependent launch, from figures of a warp's tile: cycles of ``shared`` memory,
        numbers of ``tensor`` instructions and of ``issued`` instructions, and ``depth``, the latency of the longest
        chain in cycles. ``least``: bytes of all tensors; ``start``: cycles of a block before its first tile."""
        slabs, count = self.tiles(source)[0], self.count(source, batch)
        moved, load = self.patch_bytes(source) + self.result_bytes(), self.load_cycles(source)
        grid = self.grid(source, batch, gpu, blocks)
        per_block, together = -(-count // max(1, grid // slabs)), -(-grid // gpu.multiprocessors)
        busy = max(shared * self.warps + moved / 128, issued * self.warps / 4, 2 * tensor * self.warps) * BUSY
        alone = 1.04 if together == 1 else 1.0  # nothing else runs while the warps of a lone block synchronize
        compute = (
            alone * (per_block * max(busy * together, load * together, depth * CHAIN) + start + EXPOSED * load) / CLOCK
        )
        return LAUNCH + max(compute, slabs * count * moved / L2, least / MEMORY / 0.85)
