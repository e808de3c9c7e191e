"""What Resize and Pad compute: a table of places and weights for each axis, and the C++ that all forms of their kernel share."""

from __future__ import annotations

from dataclasses import dataclass

from optdnn.kernels.builder import TensorView
from optdnn.kernels.pointwise.expressions import arithmetic, literal
from optdnn.types import Array

FEW_TAPS = 4
"""Most taps of an axis for which a thread keeps places and weights in registers."""


@dataclass(frozen=True)
class AxisTable:
    """The taps t of result o along an axis: ``index[o, t]`` (negative: the fill value) and ``weight[o, t]`` (None: a copy)."""

    axis: int
    index: Array
    weight: Array | None = None

    @property
    def taps(self) -> int:
        """Elements of the operand that one result reads along the axis."""
        return int(self.index.shape[1])


@dataclass(frozen=True)
class Taps:
    """The sum over taps of (product of weights) * ``x[indices]``, and the C++ that all forms of its kernel share."""

    x: TensorView
    out: TensorView
    tables: dict[int, AxisTable]
    """Axis -> its table; the other axes are copied."""
    fill: float

    @property
    def accumulator(self) -> str:
        """The C++ type of sums and weights."""
        return arithmetic(self.x.dtype)

    @property
    def blends(self) -> bool:
        """Whether any axis has weights; otherwise each result copies one element."""
        return any(table.weight is not None for table in self.tables.values())

    @property
    def order(self) -> list[int]:
        """The axes of the result by stride, the fastest one first; of equal strides, the last axis first."""
        return sorted(range(len(self.out.shape)), key=lambda i: (self.out.strides[i], -i))

    @property
    def outside(self) -> str:
        """C++ condition: the tap reads the fill value."""
        return " || ".join(f"k{i} < 0" for i, table in self.tables.items() if (table.index < 0).any()) or "false"

    def weights(self, but: int | None = None) -> str:
        """C++: the product of the weights of all axes, or of all ``but`` one."""
        factors = [f"w{i}" for i, table in self.tables.items() if table.weight is not None and i != but]
        return " * ".join(factors) or "1"

    def operand_offset(self) -> list[str]:
        """C++: the terms of the element's offset in ``x``, one per axis; in 32 bits if all offsets fit."""
        strides = zip(self.x.strides, self.x.shape, strict=True)
        small = self.blends and sum(abs(s) * (n - 1) for s, n in strides) < 1 << 31
        places = [f"{'k' if i in self.tables else 'o'}{i}" for i in range(len(self.out.shape))]
        return [f"{at} * int(p.sx[{i}])" if small else f"i64({at}) * p.sx[{i}]" for i, at in enumerate(places)]

    def result_offset(self) -> str:
        """C++: the element's offset in the result."""
        return " + ".join(f"i64(o{i}) * p.sy[{i}]" for i in range(len(self.out.shape))) or "0"

    def value(self, loaded: str) -> str:
        """C++: a loaded element, or the fill value, in the accumulator's type."""
        return f"({self.outside}) ? {literal(self.fill, self.accumulator)} : {self.accumulator}(widen({loaded}))"

    def in_loops(self, step: str, but: int | None = None) -> str:
        """C++: ``step`` in a loop over the taps of each axis (all, or all ``but`` one)."""
        opening, closing = "", ""
        for i, table in sorted(self.tables.items()):
            if i == but:
                continue
            opening += "\n    #pragma unroll\n    " if self.blends and table.taps <= FEW_TAPS else ""
            opening += f"for (int t{i} = 0; t{i} < {table.taps}; t{i}++) {{ const int k{i} = p.n{i}[o{i} * {table.taps} + t{i}]; "
            closing += "}"
            if table.weight is not None:
                opening += (
                    f"const {self.accumulator} w{i} = p.f{i}[o{i} * {table.taps} + t{i}]; if (w{i} == 0) continue; "
                )
        return opening + step + closing
