"""How the threads of a block share rows in the generated kernels of softmax and normalizations, and how long a launch takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from optdnn.kernels.builder import Builder, TensorView
from optdnn.kernels.launch import SECTOR
from optdnn.kernels.pointwise.strides import merge
from optdnn.runtime.cuda.gpu_facts import GpuFacts

THREADS, MOST_THREADS = 256, 1024
LAUNCH_S, ELEMENT_S = 2.5e-6, 0.26e-6
"""Seconds of a dependent launch, and per element of a thread and pass. On an H200, one row of 16384, 49152 and 131072 elements in three
passes took 54, 172 and 404 us."""
APART_S = 1.5e-6
"""Seconds of a dependent launch for rows whose elements lie apart."""
RESIDENT = 4
"""Blocks of long rows that run on a multiprocessor at once."""
EACH = 4
"""Least elements of a short row for a lane."""
KEPT = 26
"""Most elements of a row that a lane keeps in registers, so that all loads of a row are in flight and it is read once."""
LONG = 16
"""From this number of elements per thread on, the length of a row sets the time, and not the work of all blocks."""


@dataclass(frozen=True)
class Form:
    """``lanes`` threads share a row, and a block has ``rows`` rows. ``apart``: neighboring threads have neighboring rows, whose elements
    lie together; else they have neighboring elements."""

    lanes: int
    rows: int
    apart: bool = False

    @property
    def threads(self) -> int:
        return self.lanes * self.rows

    @property
    def lane(self) -> str:
        """C++ of a thread's number in its row."""
        return f"threadIdx.x / {self.rows}" if self.apart else f"threadIdx.x % {self.lanes}"

    @property
    def group(self) -> str:
        """C++ of its row's number in the block."""
        return f"threadIdx.x % {self.rows}" if self.apart else f"threadIdx.x / {self.lanes}"

    def kept(self, count: int) -> bool:
        """Whether rows of ``count`` elements are kept in registers."""
        return count <= KEPT * self.lanes

    def of(self, lane: str) -> str:
        """C++ of the partial result of a lane."""
        return f"partial[({lane}) * {self.rows} + group]" if self.apart else f"partial[group * {self.lanes} + {lane}]"


def chosen_form(rows: int, count: int, itemsize: int, *, apart: bool, gpu: GpuFacts) -> Form:
    """The form of a launch for ``rows`` rows of ``count`` elements. Rows whose elements lie ``apart`` share sectors with their
    neighbors. A block takes two sectors, one, or a part of one, so that most multiprocessors have a block."""
    sector = SECTOR // itemsize
    if not apart or rows < sector:
        lanes = min(32, 1 << max(0, (count // EACH).bit_length() - 1)) if count <= 512 else THREADS
        return Form(lanes, THREADS // lanes)
    busy = rows / sector / gpu.multiprocessors
    together = (
        2 * sector if busy >= 16 else sector if busy >= 1 else sector // 2 if busy >= 1 / 16 else max(2, sector // 4)
    )
    threads = MOST_THREADS if count > LONG * THREADS // together else THREADS
    return Form(threads // together, together, apart=True)


def form_of(b: Builder, x: TensorView, axes: Sequence[int], out: TensorView) -> Form:
    """The form of a launch for rows of ``x`` along ``axes``, with the result at ``out``. Row-invariant programs add in an order that
    does not depend on the number of rows."""
    kept = [i for i in range(len(x.shape)) if i not in axes]
    dims, places = merge([x.shape[i] for i in kept], [[t.strides[i] for i in kept] for t in (out, x)])
    inner, steps = merge([x.shape[i] for i in axes], [[t.strides[i] for i in axes] for t in (out, x)])
    apart = not b.row_invariant and places[0][-1:] == places[1][-1:] == [1] != steps[1][-1:]
    return chosen_form(math.prod(dims), math.prod(inner), x.dtype.itemsize, apart=apart, gpu=b.gpu)


def apart_seconds(rows: int, count: int, itemsize: float, passes: int, form: Form) -> float:
    """Predicted seconds of a launch for rows whose elements lie apart: whole sectors from L2, or the loads of a thread (H100)."""
    sectors, loads = max(1.0, SECTOR / (form.rows * itemsize)), -(-count // form.lanes)
    each = 0.05e-6 + 0.15e-6 * form.threads / MOST_THREADS
    passes = 1 if form.kept(count) else passes
    return APART_S + passes * max(rows * count * itemsize * sectors / 1.7e12, loads * each)


def whole_rows_seconds(rows: int, length: int, statistics: int, gpu: GpuFacts) -> float:
    """Predicted seconds of a launch with one block per row."""
    waves = math.ceil(rows / (gpu.multiprocessors * RESIDENT))
    return LAUNCH_S + waves * (statistics + 1) * math.ceil(length / THREADS) * ELEMENT_S
