"""The parts of a graph: operators and their values.

A value is one output of one op. Inputs, outputs and constants are ops too (kinds "Input", "Output", "Constant"), so "who uses this
value?" has one answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from optdnn.errors import InternalError
from optdnn.ops.base import Attrs, Known
from optdnn.ops.definition import OpDef
from optdnn.ops.table import OPDEFS
from optdnn.types import Array, TensorType

STRUCTURAL = frozenset({"Input", "Output", "Constant"})
"""Kinds that the graph itself defines; all others are in ``OPDEFS``."""


class Value(NamedTuple):
    """Output ``port`` of op ``op``."""

    op: int
    port: int = 0


class Use(NamedTuple):
    """Operand ``slot`` of op ``op``."""

    op: int
    slot: int


@dataclass(frozen=True, slots=True)
class Output:
    """One output of an op: the ONNX value name, its type, and its value if it is known (see ``ops.base.Known``)."""

    name: str
    type: TensorType
    known: Known | None = field(default=None, compare=False)


@dataclass(frozen=True, eq=False)
class ConstantAttrs(Attrs):
    """A constant's array; compared by identity, because comparing weights element by element is never wanted."""

    value: Array

    # Not inherited: the base class compares its own (no) fields, so any two constants would be equal.
    __eq__ = object.__eq__
    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class Op:
    """One operator.

    ``src`` is the set of names of the ONNX nodes it came from; passes keep it. ``attrs`` is the kind's dataclass.
    """

    id: int
    kind: str
    attrs: Any
    inputs: tuple[Value | None, ...]
    outputs: tuple[Output, ...]
    src: frozenset[str] = frozenset()

    @property
    def value(self) -> Value:
        """The first (usually only) output."""
        return Value(self.id, 0)

    @property
    def values(self) -> list[Value]:
        """All outputs."""
        return [Value(self.id, port) for port in range(len(self.outputs))]

    @property
    def name(self) -> str:
        """The op's name in messages: its ONNX nodes, otherwise its first output."""
        return " + ".join(sorted(self.src)) if self.src else self.outputs[0].name

    @property
    def short_name(self) -> str:
        """The name, with only the first two of many ONNX nodes: for messages about several ops."""
        first = " + ".join(sorted(self.src)[:2])
        return f"{first} and {len(self.src) - 2} more" if len(self.src) > 3 else self.name

    def input(self, i: int) -> Value | None:
        return self.inputs[i] if i < len(self.inputs) else None

    @property
    def pointwise(self) -> bool:
        """Whether it computes each element by itself, from the elements at its place. False for :data:`STRUCTURAL` kinds."""
        return self.kind not in STRUCTURAL and self.definition.traits.pointwise

    @property
    def definition(self) -> OpDef:
        try:
            return OPDEFS[self.kind]
        except KeyError:
            raise InternalError(f"{self.kind} is not a computing kind") from None
