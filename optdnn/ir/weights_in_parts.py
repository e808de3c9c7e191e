"""Exact fp32 weights from the two parts of fp16 that a launch multiplies (``WeightsInParts``), and a correction.

The parts give back a weight to 22 bits: it differs from their sum by one unit in the last place, or not at all. So 2 bits per
weight make them exact. The few weights that differ more (far smaller than the largest one of their row, or not finite) are stored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from optdnn.ir.strips import contiguous
from optdnn.runtime.program import Program, Step
from optdnn.runtime.reference.regions import whole_weights
from optdnn.runtime.steps.attrs import attrs_from_plain
from optdnn.types import FP32, Array

KIND = "WeightsInParts"
STORED = 2
"""Code of a weight that is stored. The others are the units in the last place that a weight has more than its parts, modulo 4."""
UNITS = np.array([[(byte >> at & 3) + 1 & 3 for at in (0, 2, 4, 6)] for byte in range(256)], np.uint8)
"""The four codes of a byte plus one, modulo 4: 1 for equal weights, 3 for :data:`STORED`."""
BLOCK = 1 << 20
"""About how many weights are computed at a time."""


@dataclass(frozen=True)
class WeightInParts:
    """An operand of a launch: the views that it reads.

    ``first`` and ``rest`` are [rows, padded channels, others], ``factors`` [rows], ``scales`` [channels, others] or None,
    or [bands, channels, others], each for its part of the rows. ``order``: the place in its block of each channel."""

    first: Array
    rest: Array
    factors: Array
    scales: Array | None
    order: tuple[int, ...]
    channels: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weights, without padding."""
        rows = self.factors.ndim
        return (*self.first.shape[:rows], self.channels, *self.first.shape[rows + 1 :])

    @property
    def size(self) -> int:
        """Number of weights."""
        return int(np.prod(self.shape, dtype=np.int64))

    def begin(self) -> WeightInParts:
        """The first of its rows, along axis 0."""
        return replace(
            self, first=self.first[:1], rest=self.rest[:1], factors=self.factors[:1], scales=self._scales(slice(1))
        )

    @property
    def bands(self) -> tuple[int, ...]:
        """The number of bands, if each has scales of its own."""
        if self.scales is None or self.scales.ndim <= self.first.ndim - self.factors.ndim:
            return ()
        return self.scales.shape[:1]

    def _scales(self, rows: slice) -> Array | None:
        """The scales of some rows."""
        if self.scales is None or not self.bands:
            return self.scales
        return self.scales[np.arange(len(self.first))[rows] // (len(self.first) // len(self.scales))]

    def sums(self, rows: slice) -> Array:
        """What the parts of some rows (along axis 0) give back: fp32 weights to 22 bits."""
        first, rest = self.first[rows].astype(FP32), self.rest[rows].astype(FP32)
        return whole_weights(first, rest, self.factors[rows], self._scales(rows), self.order, self.channels)

    def blocks(self) -> Iterator[tuple[slice, slice]]:
        """All rows in blocks: rows along axis 0, and their weights in C order. A block begins at a multiple of four weights."""
        count = self.shape[0]
        each = self.size // count
        step = max(4, BLOCK // each // 4 * 4)
        for k in range(0, count, step):
            rows = slice(k, min(k + step, count))
            yield rows, slice(rows.start * each, rows.stop * each)


def weights_of(step: Step, program: Program, blobs: Sequence[Array]) -> Iterator[tuple[int, WeightInParts]]:
    """The operands of a launch that are weights in parts, each with its number among them.

    A step may come from a file: raises KeyError, TypeError, ValueError, IndexError or EngineError for a malformed one."""
    op = step.params.get("op")
    if not isinstance(op, Mapping) or op["kind"] != KIND:
        return
    attrs: dict[str, Any] = attrs_from_plain(op["attrs"])
    operands, reads = (*step.inputs, *step.outputs), step.params["reads"]

    def view(number: int) -> Array:
        operand, offset, shape, strides = reads[number]
        blob = program.buffers[operands[operand]].blob
        if blob is None:
            raise ValueError("weights in parts are no constants")
        found = view_of(blobs[blob], offset, shape, strides)
        if found.size > blobs[blob].size:
            raise ValueError("weights in parts have views that overlap")
        return found

    each, order = 3 if attrs.get("scaled") else 2, tuple(attrs["order"])
    after = len(reads) - each * len(attrs["at"])
    for number, (at, channels) in enumerate(zip(attrs["at"], attrs["counts"], strict=True)):
        first, rest, factors, *scales = (
            view(k) for k in (at, *range(after + number * each, after + (number + 1) * each))
        )
        weight = WeightInParts(first, rest, factors, scales[0] if scales else None, order, channels)
        _check(weight)
        yield number, weight


def _check(weight: WeightInParts) -> None:
    """Raises ValueError if the views do not fit together: sums of views of other shapes may be far larger than these."""
    first, factors, channels = weight.first, weight.factors, weight.channels
    if not 1 <= factors.ndim < first.ndim or not 0 < channels <= first.shape[factors.ndim] or not weight.order:
        raise ValueError(f"weights in parts of {first.shape} have {channels} channels")
    rows, bands = factors.ndim, weight.bands
    wanted = (weight.rest, first.shape), (factors, first.shape[:rows]), (weight.scales, (*bands, *weight.shape[rows:]))
    uneven = any(n == 0 or len(first) % n for n in bands)
    if weight.size == 0 or uneven or any(view is not None and view.shape != shape for view, shape in wanted):
        raise ValueError(f"the views of weights in parts of {first.shape} do not fit together")


def view_of(blob: Array, offset: int, shape: Sequence[int], strides: Sequence[int]) -> Array:
    """A view of a blob's elements. Raises ValueError if it is not inside the blob."""
    flat = blob.reshape(-1)
    last = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    if not (offset >= 0 and 0 <= last < flat.size) or any(s < 0 for s in strides):
        raise ValueError("a constant is outside of its blob")
    return as_strided(flat[offset:], shape, [s * flat.itemsize for s in strides], writeable=False)


def correction(exact: Array, weight: WeightInParts) -> Array:
    """The bytes that make the parts exact: four codes in each, then the weights that are stored."""
    codes = np.zeros(-(-exact.size // 4) * 4, np.uint8)
    stored = []
    for rows, at in weight.blocks():
        part = np.ascontiguousarray(exact[rows])
        units = part.view(np.uint32) - weight.sums(rows).view(np.uint32)
        far = (units + np.uint32(1) > 2) | ~np.isfinite(part)  # processors differ in the bits of a NaN
        codes[at] = np.where(far, STORED, units & 3).reshape(-1)
        stored.append(part[far].view(np.uint8))
    packed = np.bitwise_or.reduce(codes.reshape(-1, 4) << np.array([0, 2, 4, 6], np.uint8), axis=1)
    return np.concatenate([packed, *stored])


def corrected(weight: WeightInParts, data: Array) -> Array:
    """The exact weights. Raises ValueError for a correction of other weights."""
    count = -(-weight.size // 4)
    wrong = ValueError(f"a correction of {weight.size} weights has {data.size} bytes")
    if data.dtype != np.uint8 or data.ndim != 1 or len(data) < count or (len(data) - count) % 4:
        raise wrong
    codes, stored = data[:count], np.frombuffer(data[count:].tobytes(), FP32)
    made = np.empty(weight.shape, FP32)
    for rows, at in weight.blocks():
        block = UNITS[codes[at.start // 4 : -(-at.stop // 4)]].reshape(-1)
        units = block[: at.stop - at.start].reshape(made[rows].shape)
        made[rows] = (weight.sums(rows).view(np.uint32) + units - np.uint32(1)).view(FP32)
        far = units == UNITS[STORED, 0]
        here = np.count_nonzero(far)
        if here > len(stored):
            raise wrong
        made[rows][far] = stored[:here]
        stored = stored[here:]
    if len(stored):
        raise wrong
    return made


def digest(weights: Array) -> str:
    """SHA-256 of the weights in C order, in hexadecimal."""
    return hashlib.sha256(contiguous(weights).reshape(-1).view(np.uint8).data).hexdigest()
