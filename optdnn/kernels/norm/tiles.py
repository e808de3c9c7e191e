"""Cost model of normalizing an image or a row in tiles with two launches that both read the input."""

from __future__ import annotations

import math
from dataclasses import dataclass

from optdnn.runtime.cuda.gpu_facts import GpuFacts

EFFICIENCY = 0.85
"""Share of a GPU's memory bandwidth that streaming kernels reach."""
LAUNCH_S = 2.5e-6
"""Seconds of a dependent launch that only waits, reduces and ends."""
KEPT = 0.4
"""Share of L2 that still holds the first launch's last reads during the second launch."""
IN_FLIGHT = 40 << 10
"""Bytes in flight per multiprocessor that keep the memory busy: its share of the bandwidth times the latency."""
L2_RATE = 1.2
"""Read bandwidth of L2 over the bandwidth of the memory."""
AHEAD = 4
"""Loads of a thread that are in flight at once (``AHEAD`` of the kernels)."""
REGISTERS = 56
MOST_TILES = 1024
"""Most tiles: each block of the second launch reads the moments of all tiles of its groups."""


@dataclass(frozen=True)
class TwoReads:
    """Work of two launches with ``blocks`` blocks of ``threads`` threads. A thread's access has ``access`` bytes; the tensor has
    ``tensor`` bytes and is read in pieces of ``piece`` contiguous bytes. Each block of the second launch reads ``moments`` bytes of
    moments."""

    blocks: int
    threads: int
    access: int
    tensor: int
    piece: int
    moments: int

    def kept(self, gpu: GpuFacts) -> int:
        """Index of the first block of the first launch that leaves its reads in L2 (0: all blocks do)."""
        return max(0, self.blocks - int(self.blocks * KEPT * gpu.l2_bytes / self.tensor))

    def seconds(self, gpu: GpuFacts) -> float:
        """Predicted seconds of both launches, dependent on earlier ones."""
        resident = max(1, min(2048 // self.threads, 65536 // (REGISTERS * self.threads)))
        waves = self.blocks / (gpu.multiprocessors * resident)
        running = min(self.blocks, gpu.multiprocessors * resident) / gpu.multiprocessors
        in_flight = min(self.threads * self.access * AHEAD, self.tensor // self.blocks)
        busy = min(1.0, running * in_flight / IN_FLIGHT)
        if waves > 1:
            busy *= waves / math.ceil(waves)
        pieces = 0.6 + 0.4 * min(1.0, self.piece / 128)  # neighboring blocks read the rest of a line
        again = 1.0 - self.left_in_l2(gpu)
        rate = gpu.bandwidth * EFFICIENCY * pieces * busy
        traffic = (2 + again) * self.tensor / rate + (1 - again) * self.tensor / (rate * L2_RATE)
        return 2 * LAUNCH_S + traffic + self.blocks * self.moments / (gpu.bandwidth * L2_RATE)

    def left_in_l2(self, gpu: GpuFacts) -> float:
        """The share of the tensor that the second launch finds in L2."""
        return min(1.0, KEPT * gpu.l2_bytes / self.tensor)


def tile_counts(blocks_per_tile: int, items: int, gpu: GpuFacts) -> list[int]:
    """Numbers of tiles that give each multiprocessor one to eight blocks; each tile has at least one item."""
    wanted = (max(1, waves * gpu.multiprocessors // blocks_per_tile) for waves in (1, 2, 3, 4, 6, 8))
    return sorted({min(tiles, items, MOST_TILES) for tiles in wanted})
