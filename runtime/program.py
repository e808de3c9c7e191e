"""The program: all that the runtime gets of a compiled network. Plain data, no code.

A program is a list of steps over numbered buffers. Constant buffers point at blobs (weights, serialized library models);
other buffers live in an arena at planned offsets, or (offset None) are allocated by the step that writes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from optdnn.types import Array, DType, TensorSpec

Scalar = None | bool | int | float | str
Plain = Any
"""JSON-like data: None, bool, int, float, str, lists and string-keyed dicts of these (checked by the format's reader)."""


@dataclass(frozen=True)
class Buffer:
    """One tensor of the program. ``shape`` holds text where a dimension is symbolic; ``blob`` is set for constants."""

    name: str
    dtype: DType
    shape: tuple[int | str, ...] | None
    blob: int | None = None
    offset: int | None = None
    """Byte offset in the arena, for planned buffers."""


@dataclass(frozen=True)
class Step:
    """One action. ``executor`` names who runs it ("reference", "onnxruntime", "openvino", "cuda"); ``params`` is its own.

    ``inputs`` and ``outputs`` are buffer numbers (an input of -1 is an absent operand). ``src`` are the ONNX nodes it does.
    """

    executor: str
    params: Mapping[str, Plain]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    src: tuple[str, ...] = ()


@dataclass
class Program:
    """A compiled network.

    ``inputs`` and ``outputs`` pair the user's tensors with buffer numbers; ``blobs`` are arrays (C-contiguous; possibly
    memory-mapped); ``requires`` lists what the machine must have ("onnxruntime>=1.20", "sm_90a", a CPU feature).
    ``meta`` holds deterministic facts: options, pass reports, tactic decisions, provenance.
    """

    target: str
    precision: str
    inputs: tuple[tuple[TensorSpec, int], ...]
    outputs: tuple[tuple[TensorSpec, int], ...]
    buffers: tuple[Buffer, ...]
    steps: tuple[Step, ...]
    blobs: list[Array]
    arena_bytes: int = 0
    requires: tuple[str, ...] = ()
    meta: dict[str, Plain] = field(default_factory=dict)
