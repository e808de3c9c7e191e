"""A product of 16-bit floats and the Cast of its result to fp32 in one launch: the heads of networks whose outputs are fp32.

The launch is emitted at the Cast. It stores the sums as they are, unrounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from optdnn.ir.graph import Graph, Op
from optdnn.kernels.builder import Builder
from optdnn.kernels.conv.fused import ConvolutionKernel
from optdnn.kernels.gemm.gemv import Gemv
from optdnn.kernels.gemm.hopper import HopperGemm
from optdnn.kernels.pointwise.widened import alone, widens
from optdnn.kernels.tactic import Region

CAST = 1.0e-6
"""Seconds of the launch that is spared."""


class Widened(ConvolutionKernel):
    """With one of the kernels below: at a Cast, the product before it."""

    conditional: ClassVar[bool] = True
    plain: ClassVar[str]
    """The name of the tactic without the Cast."""

    def product(self, b: Builder, cast: Op) -> Op | None:
        """The product with the result of the Cast; its own type stays that of the factors."""
        found = widens(b.graph, cast)
        if found is None or not alone(b, found, self.plain):
            return None
        return replace(found, id=cast.id, src=found.src | cast.src)

    def _product(self, b: Builder, cast: Op) -> Op:
        found = self.product(b, cast)
        assert found is not None
        return found

    def refuse(self, b: Builder, op: Op) -> str | None:
        product = self.product(b, op)
        if product is None:
            return f"it does not cast the result of {self.plain} to fp32"
        if (why := super().refuse(b, product)) is not None:
            return why
        if op.value not in b.reserved:
            return "its result is neither an output of the network nor a part of a larger tensor"
        c = self.convolution(b, product)
        if c.ep.rest or c.residual is not None:
            return "stages are left to another launch, or read a tensor of 16 bits"
        return None if c.between is b.reserved[op.value] else "its result does not lie in rows of eight elements"

    def neighbours(self, graph: Graph, op: Op) -> Sequence[Op]:
        """The product before it."""
        found = widens(graph, op)
        return [] if found is None else [found]

    def region(self, b: Builder, op: Op) -> Region:
        """The Cast, and the product before it."""
        return Region(op, before=tuple(self.neighbours(b.graph, op)))

    def place(self, b: Builder, op: Op) -> None:
        super().place(b, self._product(b, op))

    def problem(self, b: Builder, op: Op) -> Any:
        return super().problem(b, self._product(b, op))

    def defer(self, b: Builder, op: Op) -> str | None:
        """Stores of fp32 take longer, and not all tiles can make them."""
        (before,) = self.neighbours(b.graph, op)
        own, apart = (t.configs(b, x) for t, x in ((self, op), (b.chosen[before.id], before)))
        seconds, theirs = ((offers[0].seconds or 0.0) if offers else 0.0 for offers in (own, apart))
        if seconds <= theirs + CAST:
            return None
        return f"it is predicted to take {seconds * 1e6:.1f} us, {self.plain} and a cast {(theirs + CAST) * 1e6:.1f}"

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        super().emit(b, self._product(b, op), config)


class WidenedGemv(Widened, Gemv):
    """Few rows, with a large matrix."""

    name, plain = "gemv_widened", Gemv.name


class WidenedGemm(Widened, HopperGemm):
    """Rows, with a constant matrix."""

    name, plain = "gemm_widened_sm90", HopperGemm.name
