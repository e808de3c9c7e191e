"""Walks of generated kernels over tensors: C++ that computes offsets, and the number of elements that a thread moves at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from optdnn.kernels.builder import TensorView


def walk(name: str, index: str, dims: str, rank: int, offsets: Sequence[tuple[str, str]]) -> str:
    """C++ that splits ``index`` into coordinates over ``dims`` and adds them to offsets. ``offsets``: (variable, strides array) pairs."""
    lines = [f"u32 {name} = {index};"]
    for d in reversed(range(rank)):
        part = f"{name} % p.{dims}[{d}]" if d else name
        adds = " ".join(f"{variable} += k * p.{strides}[{d}];" for variable, strides in offsets)
        lines.append(f"{{ const i64 k = {part}; {adds} }}" + (f" {name} /= p.{dims}[{d}];" if d else ""))
    return " ".join(lines)


def batched(stride: int, count: int, load: Callable[[str, int], str], use: Callable[[int], str]) -> str:
    """C++ of a loop from ``begin + lane`` to ``end`` in steps of ``stride``. ``count`` elements are loaded before the first of them is
    used; beyond the end, the last element is loaded again. ``load(index, k)`` and ``use(k)`` give the C++ for element k of a batch."""
    loads, uses = [], []
    for k in range(count):
        at = f"(i + {k * stride}u < end ? i + {k * stride}u : end - 1u)" if k else "i + 0u"
        loads.append(load(at, k))
        uses.append(f"if (i + {k * stride}u < end) {use(k)}" if k else use(k))
    body = "\n            ".join([*loads, *uses])
    return f"for (u32 i = begin + lane; i < end; i += {stride * count}) {{\n            {body}\n        }}"


def pieces(
    x: TensorView,
    out: TensorView,
    dims: Sequence[int],
    sy: Sequence[int],
    sx: Sequence[int],
    si: Sequence[int],
    steps: Sequence[int],
) -> int:
    """Consecutive elements that one thread moves at once: up to 16 bytes that share an index and are aligned in both tensors."""
    best = 1
    for count in (2, 4, 8, 16):
        if count * x.dtype.itemsize > 16 or dims[-1] % count or (sy[-1], sx[-1], si[-1]) != (1, 1, 0):
            break
        distances = (*sy[:-1], *sx[:-1], *steps, x.offset, out.offset)
        if any(d % count for d in distances):
            break
        best = count
    return best
