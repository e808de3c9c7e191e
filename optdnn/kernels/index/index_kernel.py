"""One generated kernel for operators that a few lines of C++ over coordinates can express: a thread per point of an index space.

The lines see the coordinates ``o0``, ``o1``, … of their point, and for each tensor ``t`` a pointer ``p.t``, its sizes ``p.n_t[k]`` and
the offset ``at_t(c0, c1, …)`` of an element. Results must not depend on the order of threads: no two points write the same element.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder, TensorView
from optdnn.kernels.launch import Parameters
from optdnn.kernels.pointwise.expressions import CPP
from optdnn.kernels.pointwise.strides import offset_type
from optdnn.kernels.tactic import Tactic
from optdnn.ops.fused import plain_attrs
from optdnn.types import FP64, DType

THREADS = 256
BLOCKS = 65535
POINTS_LIMIT = 1 << 31
"""Bound of the points of a space: coordinates are computed from a 32-bit index."""
VISITS_LIMIT = 1 << 28
"""Most (result, candidate) pairs of a kernel in which each result searches for its inputs: some milliseconds."""


def emit_index_kernel(
    b: Builder,
    op: Op,
    space: Sequence[int],
    tensors: Mapping[str, TensorView | None],
    writes: Mapping[str, TensorView],
    lines: str,
    *,
    reads: Sequence[TensorView | None],
    results: Sequence[TensorView] | None = None,
    helpers: str = "",
    meaning: tuple[str, Mapping[str, Any]] | None = None,
) -> None:
    """Add one launch over ``space``. ``lines`` read ``tensors`` and write ``writes`` by name (None: absent).

    The step's meaning is the operator itself, or the kind and attributes ``meaning``, on ``reads`` (the operands in their order).
    ``results``: the written tensors of the meaning, if ``writes`` view them with another element type.
    """
    count = math.prod(space)
    if not count:
        return
    present = {name: t for name, t in tensors.items() if t is not None}
    placed = {**present, **writes}
    sizes, named, offsets = [], [], offset_type(list(placed.values()))
    fields = [f"{'const ' if name in present else ''}{CPP[t.dtype]}* {name};" for name, t in placed.items()]
    fields.append(f"u32 count; Size dims[{max(1, len(space))}];")
    parameters = Parameters().pointer(*placed).u32(count).sizes(*(space or (1,)))
    for name, t in placed.items():
        rank = max(1, len(t.shape))
        sizes.append(f"i64 n_{name}[{rank}]; {offsets} s_{name}[{rank}];")
        # Stride 0 on axes of one element: a tensor may be read along an axis over which it is broadcast.
        strides = [s if n > 1 else 0 for n, s in zip(t.shape, t.strides, strict=True)]
        parameters.i64(*(t.shape or (1,))).integers(offsets, *(strides or (0,)))
        given = ", ".join(f"{offsets} c{k}" for k in range(len(t.shape)))
        total = " + ".join(f"c{k} * p.s_{name}[{k}]" for k in range(len(t.shape))) or f"{offsets}(0)"
        named.append(f"auto at_{name} = [&]({given}) -> {offsets} {{ return {total}; }};")
    walk = ["u32 rest = index;"]
    for k in reversed(range(len(space))):
        walk.append(f"const i64 o{k} = rest % p.dims[{k}]; rest /= p.dims[{k}];" if k else "const i64 o0 = rest;")
    newline = "\n        "
    text = f"""struct Params {{
    {" ".join(fields)}
    {" ".join(sizes)}
}};
{helpers}
extern "C" __global__ void __launch_bounds__({THREADS}) each(const __grid_constant__ Params p) {{
    launch_dependents();
    {newline.join(named)}
    for (u32 index = blockIdx.x * {THREADS} + threadIdx.x; index < p.count; index += gridDim.x * {THREADS}) {{
        {newline.join(walk)}
        wait_for_predecessor();
        {lines}
    }}
}}
"""
    launch = parameters.generated(b.arch, text, "each", min(-(-count // THREADS), BLOCKS), THREADS)
    kind, attrs = meaning or (op.kind, plain_attrs(op.definition, op.attrs))
    b.emit(op, launch, placed, kind, attrs, list(reads), list(writes.values() if results is None else results))


def coordinates(rank: int, replaced: Mapping[int, str] | None = None) -> str:
    """``o0, o1, …`` as arguments; ``replaced``: axis -> another argument."""
    return ", ".join((replaced or {}).get(k, f"o{k}") for k in range(rank))


def operand_at(b: Builder, op: Op, slot: int) -> TensorView | None:
    """The view of an operand; None if it is absent."""
    value = op.input(slot)
    return None if value is None else b.operand(value)


def needed(b: Builder, op: Op, slot: int) -> TensorView:
    """The view of an operand that is never absent."""
    found = operand_at(b, op, slot)
    assert found is not None
    return found


def operands_of(b: Builder, op: Op) -> list[TensorView | None]:
    """The views of all operands."""
    return [operand_at(b, op, i) for i in range(len(op.inputs))]


def shape_at(b: Builder, op: Op, slot: int) -> tuple[int, ...]:
    """The shape of an operand."""
    value = op.input(slot)
    assert value is not None
    return b.graph.type(value).static_shape


def wide(*dtypes: DType) -> str:
    """The C++ type of the arithmetic: double if any type is fp64, else float."""
    return "double" if FP64 in dtypes else "float"


class IndexKernel(Tactic):
    """A few lines of C++ per element, for a table of operators. ``emitters``: kind -> the function that emits it. ``limits``: a function
    that returns why the tactic cannot run an operator of known types, or None."""

    name = "each"

    def __init__(
        self, emitters: Mapping[str, Callable[[Builder, Op], None]], limits: Callable[[Builder, Op], str | None]
    ):
        self.emitters, self.limits = emitters, limits

    def refuse(self, b: Builder, op: Op) -> str | None:
        if (why := self.limits(b, op)) is not None:
            return why
        many = max(math.prod(o.type.static_shape) for o in op.outputs) >= POINTS_LIMIT
        return "it has more elements than a kernel can count" if many else None

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        self.emitters[op.kind](b, op)
