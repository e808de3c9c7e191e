"""The cost of normalizing tiles of an image or of a row in two launches, which both read the input."""

from __future__ import annotations

import math
from dataclasses import dataclass

from optdnn.runtime.cuda.gpu_facts import GpuFacts

EFFICIENCY = 0.85
"""Share of a GPU's memory bandwidth that streaming kernels reach."""
LAUNCH_S = 2.5e-6
"""Seconds of a launch after another one that only waits, reduces and ends."""
KEPT = 0.4
"""Share of L2 that still holds, in the second launch, what the first one read last."""
IN_FLIGHT = 40 << 10
"""Bytes under way in a multiprocessor that keep the memory busy: its share of the bandwidth times the latency."""
L2_RATE = 1.2
"""L2's bandwidth over that of the memory, where it is read."""
AHEAD = 4
"""Loads of a thread that are under way at once (``AHEAD`` of the kernels)."""
REGISTERS = 56
MOST_TILES = 1024
"""Each block of the second launch reads the moments of all tiles of its groups."""


@dataclass(frozen=True)
class TwoReads:
    """What two launches do: ``blocks`` of ``threads`` with accesses of ``access`` bytes, on a tensor of ``tensor`` bytes that are read
    in pieces of ``piece`` bytes, and ``moments`` bytes that each block of the second launch reads."""

    blocks: int
    threads: int
    access: int
    tensor: int
    piece: int
    moments: int

    def kept(self, gpu: GpuFacts) -> int:
        """The first block of the first launch that leaves its reads in L2 (0: all do)."""
        return max(0, self.blocks - int(self.blocks * KEPT * gpu.l2_bytes / self.tensor))

    def seconds(self, gpu: GpuFacts) -> float:
        """Predicted seconds of both launches, after others."""
        resident = max(1, min(2048 // self.threads, 65536 // (REGISTERS * self.threads)))
        waves = self.blocks / (gpu.multiprocessors * resident)
        running = min(self.blocks, gpu.multiprocessors * resident) / gpu.multiprocessors
        under_way = min(self.threads * self.access * AHEAD, self.tensor // self.blocks)
        busy = min(1.0, running * under_way / IN_FLIGHT)
        if waves > 1:
            busy *= waves / math.ceil(waves)
        pieces = 0.6 + 0.4 * min(1.0, self.piece / 128)  # neighbouring blocks read the rest of a line
        again = 1.0 - self.left_in_l2(gpu)
        rate = gpu.bandwidth * EFFICIENCY * pieces * busy
        traffic = (2 + again) * self.tensor / rate + (1 - again) * self.tensor / (rate * L2_RATE)
        return 2 * LAUNCH_S + traffic + self.blocks * self.moments / (gpu.bandwidth * L2_RATE)

    def left_in_l2(self, gpu: GpuFacts) -> float:
        """The share of the tensor that the second launch finds in L2."""
        return min(1.0, KEPT * gpu.l2_bytes / self.tensor)


def tile_counts(blocks_per_tile: int, items: int, gpu: GpuFacts) -> list[int]:
    """Numbers of tiles that give one to eight blocks to each multiprocessor; each tile has an item at least."""
    wanted = (max(1, waves * gpu.multiprocessors // blocks_per_tile) for waves in (1, 2, 3, 4, 6, 8))
    return sorted({min(tiles, items, MOST_TILES) for tiles in wanted})
