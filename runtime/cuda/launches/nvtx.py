"""NVTX ranges, so that nsys and ncu show ONNX names; marked by the ``nvtx`` package or CuPy, or not at all without both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module


@cache
def _marks() -> tuple[Callable[[str], object], Callable[[], object]] | None:
    """Functions that begin and end a range on this thread, or None if there are none."""
    try:
        nvtx = import_module("nvtx")
        return nvtx.push_range, nvtx.pop_range
    except (ImportError, AttributeError):
        pass
    try:
        nvtx = import_module("cupy.cuda.nvtx")
        return nvtx.RangePush, nvtx.RangePop
    except (ImportError, AttributeError):
        return None


def available() -> bool:
    """Whether ranges are marked."""
    return _marks() is not None


@contextmanager
def marked(name: str) -> Iterator[None]:
    """A range of this name around the block."""
    marks = _marks()
    if marks is None:
        yield
        return
    begin, end = marks
    begin(name)
    try:
        yield
    finally:
        end()
