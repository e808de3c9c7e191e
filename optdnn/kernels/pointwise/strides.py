"""The iteration space of generated kernels: merged axes, strides of broadcasts, and the elements that a thread takes at once."""

from __future__ import annotations

from collections.abc import Sequence

from optdnn.kernels.builder import TensorView

STRIDES_LIMIT = 16
"""Most axes after merging: sizes and strides are parameters of a launch."""


def offset_type(tensors: Sequence[TensorView]) -> str:
    """The C++ type of offsets into the tensors, ``i32`` where it suffices: a product of 64 bits takes three instructions."""
    spans = (sum((n - 1) * abs(s) for n, s in zip(x.shape, x.strides, strict=True)) for x in tensors)
    return "i32" if max(spans, default=0) < 1 << 31 else "i64"


def merge(shape: Sequence[int], all_strides: Sequence[Sequence[int]]) -> tuple[list[int], list[list[int]]]:
    """The iteration space without axes of one element, and with neighboring axes merged if every tensor allows it.

    Axes are ordered by the strides of the first tensor (the output), largest first.
    """
    axes = [i for i, n in enumerate(shape) if n != 1]
    axes.sort(key=lambda i: (-abs(all_strides[0][i]), i))
    dims: list[int] = []
    strides: list[list[int]] = [[] for _ in all_strides]
    for i in axes:
        n = shape[i]
        if dims and all(s[-1] == given[i] * n for s, given in zip(strides, all_strides, strict=True)):
            dims[-1] *= n
            for s, given in zip(strides, all_strides, strict=True):
                s[-1] = given[i]
        else:
            dims.append(n)
            for s, given in zip(strides, all_strides, strict=True):
                s.append(given[i])
    return (dims, strides) if dims else ([1], [[0] for _ in all_strides])


def broadcast(placed: TensorView, shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a tensor broadcast to ``shape``."""
    lead = len(shape) - len(placed.shape)
    own = [0 if n == 1 and m != 1 else s for n, s, m in zip(placed.shape, placed.strides, shape[lead:], strict=True)]
    return (*[0] * lead, *own)


def vector(tensors: Sequence[TensorView], dims: Sequence[int], strides: Sequence[Sequence[int]]) -> int:
    """Number of consecutive elements per thread: up to 16 bytes of the widest type that it reads or writes contiguously, aligned in every
    tensor."""
    best = 1
    widest = max(t.dtype.itemsize for t, s in zip(tensors, strides, strict=True) if s[-1] or t is tensors[0])
    for count in (2, 4, 8, 16):
        if dims[-1] % count or count * widest > 16:
            break
        fits = strides[0][-1] == 1
        for t, s in zip(tensors, strides, strict=True):
            aligned = t.offset % count == 0 and all(x % count == 0 for x in s[:-1])
            fits = fits and (aligned if s[-1] == 1 else s[-1] == 0)
        if not fits:
            break
        best = count
    return best
