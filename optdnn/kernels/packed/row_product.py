"""Products of a few rows with packed weights in one launch with the norm before them and a second product of the same rows. With 16-bit
weights: :mod:`optdnn.kernels.gemm.row_product`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder, TensorView, as_rows, up
from optdnn.kernels.conv.fused import bias_row
from optdnn.kernels.conv.paired import stages_with_other
from optdnn.kernels.gemm.hopper import Rows, rows_of
from optdnn.kernels.gemm.row_product import Around, TakesAround, around_of
from optdnn.kernels.packed.problem import Problem
from optdnn.kernels.packed.product import OPERANDS, PackedProduct, described, packed_operands
from optdnn.kernels.packed.tactics import PackedDigits, PackedResident, PackedWgmma
from optdnn.kernels.pointwise.pointwise import copied
from optdnn.kernels.tactic import Offer, Region
from optdnn.ops.fused import plain_stages


@dataclass(frozen=True)
class _Made:
    """The launch's operands by name, and the operands of its meaning after the rows."""

    operands: dict[str, TensorView]
    reads: list[TensorView | None]


class _Surrounded(TakesAround, PackedProduct):
    """A product in one launch with its neighbors: the norm before it, and a second product."""

    def around(self, b: Builder, op: Op) -> Around:
        """The neighbors that the launch computes."""
        return around_of(b, op)

    def region(self, b: Builder, op: Op) -> Region:
        return Region(op, before=self.around(b, op).before)

    def form_refusal(self, b: Builder, op: Op) -> str | None:
        """Why the launch cannot combine the product with the other product or the norm, or None; each alone must be supported."""
        around = self.around(b, op)
        if around.other is not None and described(b, op) != described(b, around.other):
            return f"the weights of the other product {around.other.name} have another form"
        found = replace(
            described(b, op), norm=around.norm is not None, beside=None if around.other is None else (("bias",),)
        )
        return str(why) if (why := self.kernel.unfit(found, b.gpu)) is not None else None

    def problem(self, b: Builder, op: Op) -> Problem:
        around = self.around(b, op)
        beside = None if around.beside is None else (("bias",), *around.beside.rendered)
        return replace(super().problem(b, op), norm=around.norm is not None, beside=beside)

    def rows(self, b: Builder, op: Op) -> Rows:
        """The views of the product's operands: ``x`` is the norm's input if the launch computes the norm."""
        rows, around = super().rows(b, op), self.around(b, op)
        if around.other is not None:
            rows = replace(rows, residual=None)  # nothing stores the other product
        if around.norm is None:
            return rows
        x = rows_of(b.source(around.norm.inputs[0]))
        assert x is not None
        return replace(rows, x=x)

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        rows, problem, around = self.rows(b, op), self.problem(b, op), self.around(b, op)
        out, x, many = b.made(rows.out), b.made(rows.x), problem.rows > 1
        pitch = out.strides[0] if many else problem.columns
        made = self._made(b, op, rows, problem, around, pitch)
        epsilon = 0.0 if around.norm is None else around.norm.attrs.epsilon
        x_pitch = x.strides[0] if many else problem.depth
        settings = {} if around.norm is None else {"epsilon": epsilon}
        launch = self.kernel.launch(problem, config, b.gpu, x_pitch, pitch, **settings)
        attrs = {
            "code": problem.code, "K": problem.depth, "N": problem.columns, "block_size": problem.block, "epsilon": epsilon,
            "epilogue": plain_stages(stages_with_other(rows.ep)),
        }  # fmt: skip
        attrs |= {} if around.beside is None else {"beside": plain_stages(around.beside.stages)}
        covers = replace(op, src=op.src.union(*(y.src for y in around.before)))
        sums = self.shared_sums(b, op, problem, config)
        operands = {"x": x, "output": out, **made.operands, **sums}
        b.emit(
            covers, launch, operands, "PackedRowProduct", attrs, [as_rows(x), *made.reads], [as_rows(out)],
            scratch=[*sums.values()][:1], kept=[*sums.values()][1:],
        )  # fmt: skip
        rows.finish(b, op, out)

    def _made(self, b: Builder, op: Op, rows: Rows, problem: Problem, around: Around, pitch: int) -> _Made:
        """The constant operands and the residual."""
        operands: dict[str, TensorView] = {}
        reads: list[TensorView | None] = [None]
        if around.norm is not None:
            scale = b.graph.constant_value(around.norm.inputs[1])
            assert scale is not None
            operands["scale"] = reads[0] = b.constant(scale.astype(np.float32), f"{around.norm.outputs[0].name}.scale")
        products = [(op, rows.ep.bias, "")]
        if around.other is not None and around.beside is not None:
            products.append((around.other, around.beside.bias, "beside_"))
        for product, added, prefix in products:
            packed = packed_operands(b, product, problem)
            bias = bias_row(b, product, added, up(problem.columns, 4))
            operands |= {f"{prefix}{n}": v for n, v in packed.items()} | {f"{prefix}bias": bias}
            reads += [*map(packed.get, OPERANDS), bias.view((problem.columns,), (1,))]
        if problem.residual:
            assert rows.residual is not None
            residual = b.made(rows.residual)
            if problem.rows > 1 and residual.strides[0] != pitch:
                residual = copied(b, op, residual, "residual", b.made(rows.out).strides)
            operands["residual"] = residual
            reads += [None, None, None, None, as_rows(residual)]
        return _Made(operands, reads)


class PackedRowProduct(_Surrounded, PackedDigits):
    """PackedMatMul of one to eight rows with the norm before it, a second product of the same rows, or both."""

    name = "packed_digits_rows"

    def refuse(self, b: Builder, op: Op) -> str | None:
        return self.unfit(b, op, super().refuse) or self.form_refusal(b, op)


class PackedResidentPair(_Surrounded, PackedResident):
    """Two PackedMatMuls of 9 to 16 rows; one result is multiplied by the other."""

    name = "packed_resident_pair"

    def around(self, b: Builder, op: Op) -> Around:
        """The other product only: another launch normalizes the rows."""
        return replace(around_of(b, op), norm=None)

    def refuse(self, b: Builder, op: Op) -> str | None:
        if self.around(b, op).other is None:
            return "its result is not multiplied by another product of the same rows without other readers"
        return self.unfit(b, op, super().refuse) or self.form_refusal(b, op)

    def defer(self, b: Builder, op: Op) -> str | None:
        """Without timings, the cost model decides."""
        other = self.around(b, op).other
        assert other is not None
        ways = PackedResident(), PackedWgmma()
        own = best(self.configs(b, op))
        two = sum(min(best(way.configs(b, x)) for way in ways) for x in (other, op))
        if own <= two:
            return None
        return f"two launches are predicted to take {two * 1e6:.1f} us, one {own * 1e6:.1f}"


def best(offers: Sequence[Offer]) -> float:
    """Predicted seconds of the fastest offer."""
    return min(o.predicted for o in offers)
