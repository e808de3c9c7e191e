"""TopK along an axis of many elements (``top_rows.cu``): one launch with one or several warps per line."""

from __future__ import annotations

import math
from typing import Any

from optdnn.ir.graph import Op, Value
from optdnn.kernels.builder import Builder, TensorView
from optdnn.kernels.index.index_kernel import POINTS_LIMIT, needed, operands_of
from optdnn.kernels.launch import GENERAL, Launch, Parameters
from optdnn.kernels.layout.views import ints
from optdnn.kernels.pointwise.pointwise import CPP
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
HELD_BYTES, FEW_BYTES = 128, 32
"""Most bytes of keys that a thread holds; and the same for few lines, which more warps share."""
WARPS, ITEMS_OF_WARP = 32, 128
"""Most warps of a line; kept elements that a warp sorts."""
LINES = 4
"""Lines of a block if each line has one warp."""
ITEMS_BYTES = 32 << 10
"""Shared memory for the kept elements."""


def item_bytes(x: TensorView) -> int:
    """Bytes of a key and an index."""
    return 16 if x.dtype.itemsize == 8 else 8


def capacity(kept: int) -> int:
    """Number of places for the kept elements: the sort needs a power of two."""
    return 1 << max(0, kept - 1).bit_length()


def refuse(x: TensorView, axis: int, kept: int) -> str | None:
    """Why there is no launch, or None."""
    size = x.shape[axis]
    if CPP.get(x.dtype) not in TYPES:
        return f"it has no order for {x.dtype.name}"
    if size <= SHORT:
        return f"lines of at most {SHORT} elements are compared pairwise"
    if capacity(kept) * item_bytes(x) > ITEMS_BYTES:
        return f"it keeps at most {ITEMS_BYTES // item_bytes(x)} elements of a line"
    return "it has more elements than a kernel can count" if math.prod(x.shape) >= POINTS_LIMIT else None


def key_bytes(x: TensorView) -> int:
    """Bytes of a key: an element in a form that is ordered as an integer."""
    return 8 if x.dtype.itemsize == 8 else 4


def shared_by(x: TensorView, axis: int, kept: int, gpu: GpuFacts) -> tuple[int, int]:
    """Warps of a line, and keys that a thread holds (0: the line is too long for registers)."""
    size, lines = x.shape[axis], math.prod(x.shape) // x.shape[axis]
    most = HELD_BYTES // key_bytes(x)
    if size > WARPS * 32 * most:
        return WARPS, 0
    wanted = max(-(-size // (32 * most)), -(-capacity(kept) // ITEMS_OF_WARP))
    warps = 1 << (wanted - 1).bit_length()
    fewer = FEW_BYTES // key_bytes(x)
    while warps < WARPS and lines * warps < 4 * gpu.multiprocessors and size > warps * 32 * fewer:
        warps *= 2
    return warps, -(-size // (warps * 32))


def launch(x: TensorView, y: TensorView, index: TensorView | None, axis: int, largest: bool, gpu: GpuFacts) -> Launch:
    """The launch. Operands: ``x``, ``y``, and ``index`` if it is given."""
    others = [k for k in range(len(x.shape)) if k != axis]
    size, kept = x.shape[axis], y.shape[axis]
    warps, keys = shared_by(x, axis, kept, gpu)
    together = LINES if warps == 1 else 1
    defines = {
        "TYPE": TYPES.index(CPP[x.dtype]), "LINES": together, "WARPS": warps, "KEYS": keys, "RANK": max(1, len(others)), "KEEP": kept, "CAPACITY": capacity(kept), "LARGEST": int(largest),
        "WIDE": int(key_bytes(x) == 8), "INDICES": int(index is not None),
    }  # fmt: skip
    recipe = Recipe("top_rows.cu", gpu.arch, {"generated.cuh": f"{render.constants(defines)}\n"}, GENERAL)
    tensors = (x, y, y if index is None else index)
    parameters = Parameters().pointer("x", "y", *(("index",) if index is not None else ()))
    parameters.i64(*(t.strides[axis] for t in tensors), *([x.shape[k] for k in others] or [1]))
    for tensor in tensors:
        parameters.i64(*([tensor.strides[k] for k in others] or [0]))
    lines = math.prod(x.shape[k] for k in others)
    return parameters.u32(size, lines).launch(recipe, "top_rows", -(-lines // together), together * warps * 32)


class TopRows(Tactic):
    """TopK along an axis of many elements."""

    name = "top_rows"

    def refuse(self, b: Builder, op: Op) -> str | None:
        kept = ints(b, op, 1)
        if kept is None:
            return "its K is not known when the engine is built"
        x = b.source(op.inputs[0])
        return refuse(x, normalize_axis(op.attrs.axis, len(x.shape)), kept[0])

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        x = needed(b, op, 0)
        writes = [b.target(Value(op.id, port)) for port in range(len(op.outputs))]
        if not writes[0].size:
            return
        y, index = writes[0], writes[1] if len(writes) > 1 else None
        axis = normalize_axis(op.attrs.axis, len(x.shape))
        operands = {"x": x, "y": y, **({} if index is None else {"index": index})}
        attrs = plain_attrs(op.definition, op.attrs)
        made = launch(x, y, index, axis, bool(op.attrs.largest), b.gpu)
        b.emit(op, made, operands, op.kind, attrs, operands_of(b, op), writes)
