"""TopK along an axis of many elements (``top_rows.cu``): one launch with one or several warps, or blocks, per line."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder, TensorView
from optdnn.kernels.index.index_kernel import POINTS_LIMIT, needed, operands_of
from optdnn.kernels.launch import GENERAL, Launch, Parameters
from optdnn.kernels.layout.views import ints
from optdnn.kernels.pointwise.expressions import CPP
from optdnn.kernels.tactic import Tactic
from optdnn.ops.fused import plain_attrs
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.compile.nvrtc import Recipe
from optdnn.runtime.cuda.gpu_facts import GpuFacts
from optdnn.types import normalize_axis

TYPES = ("f16", "bf16", "f32", "f64", "i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64", "boolean")
"""Element types in the order of their numbers in the kernel; the names are those of :data:`CPP`."""
SHORT = 64
"""For lines of up to this many elements, comparing all pairs is faster."""
HELD_BYTES, PART_BYTES, FEW_BYTES = 128, 64, 16
"""Most bytes of keys that a thread holds: of a whole line, of a part of a line, and for few lines, which more warps share."""
WARPS, ITEMS_OF_WARP = 32, 128
"""Most warps of a block; most kept elements for each warp."""
LINES = 4
"""Lines of a block if each line has one warp."""
ITEMS_BYTES = 32 << 10
"""Shared memory for the gathered elements."""


LAUNCH_S, KEY_S, KEPT_S, READ_S = 2.5e-6, 0.2e-6, 18e-9, 1e-6
"""Seconds of a launch, of each key of a thread, of each kept element, and of each key if the line is read again (fitted on an H100)."""
RESIDENT = 64
"""Warps that run at once on a multiprocessor."""


@dataclass(frozen=True)
class Share:
    """The distribution of a line: ``parts`` blocks of ``warps`` warps. A thread holds ``keys`` keys (0: the line is read again)."""

    warps: int
    keys: int
    parts: int = 1


def item_bytes(x: TensorView) -> int:
    """Bytes of a key and an index."""
    return 16 if x.dtype.itemsize == 8 else 8


def refuse(x: TensorView, axis: int, kept: int) -> str | None:
    """Why there is no launch, or None."""
    size = x.shape[axis]
    if CPP.get(x.dtype) not in TYPES:
        return f"it has no order for {x.dtype.name}"
    if size <= SHORT:
        return f"lines of at most {SHORT} elements are compared pairwise"
    if kept * item_bytes(x) > ITEMS_BYTES:
        return f"it keeps at most {ITEMS_BYTES // item_bytes(x)} elements of a line"
    return "it has more elements than a kernel can count" if math.prod(x.shape) >= POINTS_LIMIT else None


def key_bytes(x: TensorView) -> int:
    """Bytes of a key: an element in a form that is ordered as an integer."""
    return 8 if x.dtype.itemsize == 8 else 4


def key_bits(x: TensorView) -> int:
    """Bits of a key that differ between elements."""
    return 8 * x.dtype.itemsize


def shared_by(x: TensorView, axis: int, kept: int, gpu: GpuFacts) -> Share:
    """How blocks and threads share a line."""
    size, lines = x.shape[axis], x.size // x.shape[axis]
    most = HELD_BYTES // key_bytes(x)
    if size > WARPS * 32 * most:
        parts = -(-size // (WARPS * 32 * PART_BYTES // key_bytes(x)))
        held = -(-size // (parts * WARPS * 32))
        return Share(WARPS, held, parts) if parts * kept <= WARPS * 32 * most else Share(WARPS, 0)
    wanted = max(-(-size // (32 * most)), -(-kept // ITEMS_OF_WARP))
    warps = 1 << (wanted - 1).bit_length()
    fewer = FEW_BYTES // key_bytes(x)
    while warps < WARPS and lines * warps < 4 * gpu.multiprocessors and max(size / fewer, kept) > warps * 32:
        warps *= 2
    return Share(warps, -(-size // (warps * 32)))


def candidates(x: TensorView, kept: int, warps: int) -> int:
    """Places for the elements that reach the bound: more than those that are kept, if shared memory has space."""
    return min(max(2 * kept, min(128 * warps, 512)), ITEMS_BYTES // item_bytes(x))


def seconds(x: TensorView, axis: int, kept: int, gpu: GpuFacts) -> float:
    """The predicted time."""
    size, lines, share = x.shape[axis], x.size // x.shape[axis], shared_by(x, axis, kept, gpu)
    waves = -(-lines * share.parts * share.warps // (RESIDENT * gpu.multiprocessors))
    if not share.keys:
        return LAUNCH_S + waves * (size / (WARPS * 32) * READ_S + kept * KEPT_S)
    spent = share.keys * KEY_S + kept * KEPT_S
    if share.parts > 1:
        spent += share.parts * kept / (WARPS * 32) * KEY_S + kept * KEPT_S
    return LAUNCH_S + waves * spent


def launch(
    x: TensorView, y: TensorView, index: TensorView | None, axis: int, largest: bool, share: Share, gpu: GpuFacts
) -> Launch:
    """The launch. Operands: ``x``, ``y``, ``index`` if it is given; for several parts also ``kept`` and ``arrived``."""
    others = [k for k in range(len(x.shape)) if k != axis]
    size, kept = x.shape[axis], y.shape[axis]
    together = LINES if share.warps == 1 else 1
    defines = {
        "TYPE": TYPES.index(CPP[x.dtype]), "LINES": together, "WARPS": share.warps, "PARTS": share.parts, "KEYS": share.keys, "RANK": max(1, len(others)), "KEEP": kept,
        "CANDIDATES": candidates(x, kept, share.warps), "LARGEST": int(largest), "KEY_BITS": key_bits(x), "INDICES": int(index is not None),
    }  # fmt: skip
    recipe = Recipe("top_rows.cu", gpu.arch, {"generated.cuh": f"{render.constants(defines)}\n"}, GENERAL)
    tensors = (x, y, y if index is None else index)
    parameters = Parameters().pointer("x", "y", *(("index",) if index is not None else ()))
    parameters.i64(*(t.strides[axis] for t in tensors), *([x.shape[k] for k in others] or [1]))
    for tensor in tensors:
        parameters.i64(*([tensor.strides[k] for k in others] or [0]))
    lines = math.prod(x.shape[k] for k in others)
    parameters.u32(size, lines)
    if share.parts > 1:
        parameters.pointer("kept", "arrived")
    grid = -(-lines // together) * share.parts
    return parameters.launch(recipe, "top_rows", grid, together * share.warps * 32)


class TopRows(Tactic):
    """TopK along an axis of many elements."""

    name = "top_rows"

    def refuse(self, b: Builder, op: Op) -> str | None:
        kept = ints(b, op, 1)
        if kept is None:
            return "its K is not known when the engine is built"
        x = b.source(op.inputs[0])
        return refuse(x, normalize_axis(op.attrs.axis, len(x.shape)), kept[0])

    def seconds(self, b: Builder, op: Op) -> float | None:
        x, kept = b.source(op.inputs[0]), ints(b, op, 1)
        axis = normalize_axis(op.attrs.axis, len(x.shape))
        return seconds(x, axis, kept[0], b.gpu) if kept and x.size else None

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        x = needed(b, op, 0)
        writes = [b.target(v) for v in op.values]
        if not writes[0].size:
            return
        y, index = writes[0], writes[1] if len(writes) > 1 else None
        axis = normalize_axis(op.attrs.axis, len(x.shape))
        kept = y.shape[axis]
        share, lines = shared_by(x, axis, kept, b.gpu), x.size // x.shape[axis]
        operands = {"x": x, "y": y, **({} if index is None else {"index": index})}
        scratch, counts = {}, {}
        if share.parts > 1:
            name, space = op.outputs[0].name, lines * share.parts * kept * item_bytes(x)
            scratch = {"kept": b.new(f"{name}.kept", np.dtype(np.int64), (space // 8,))}
            counts = {"arrived": b.new(f"{name}.arrived", np.dtype(np.int32), (lines,))}
        made = launch(x, y, index, axis, bool(op.attrs.largest), share, b.gpu)
        b.emit(
            op, made, {**operands, **scratch, **counts}, op.kind, plain_attrs(op.definition, op.attrs), operands_of(b, op), writes,
            scratch=[*scratch.values()], kept=[*counts.values()],
        )  # fmt: skip
