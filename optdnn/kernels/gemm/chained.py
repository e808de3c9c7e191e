"""A perceptron with one hidden layer in one launch (ConvNeXt, for example), as :mod:`optdnn.kernels.conv.chained` does for images.

The tactic refuses a product whose norm takes no launch (:mod:`.normed`): its kernel does not read moments.
"""

from __future__ import annotations

from optdnn.ir.graph import Graph, Op, Value
from optdnn.kernels.builder import Builder, TensorView
from optdnn.kernels.conv.chained import ChainedProducts
from optdnn.kernels.gemm.hopper import MatrixProduct, product_refusal, rows_of
from optdnn.kernels.gemm.normed import NormedGemm
from optdnn.kernels.gemm.paired import multiplier
from optdnn.kernels.gemm.row_norms import PRODUCTS
from optdnn.types import Array


class ChainedGemm(ChainedProducts):
    """Two MatMuls or Gemms of rows with constant matrices."""

    axis = -1

    @staticmethod
    def behind(graph: Graph, op: Op) -> Op | None:
        readers = [u for u in graph.users(op.value) if u.kind in PRODUCTS and u.inputs[0] == op.value]
        return readers[0] if len(readers) == 1 else None

    def unfit(self, b: Builder, op: Op, second: Op) -> str | None:
        for product in (op, second):
            if (why := product_refusal(b, product)) is not None:
                return f"{product.name}: {why}"
            if multiplier(b.graph, product) is not None:
                return f"another product of the same rows multiplies {product.name}"
        if NormedGemm().refuse(b, op) is None:
            return "the norm before it takes no launch of its own"
        return None

    @staticmethod
    def image(b: Builder, op: Op, value: Value) -> TensorView | None:
        return rows_of(b.operand(value))

    @staticmethod
    def placed(b: Builder, value: Value) -> TensorView | None:
        return rows_of(b.result(value))

    @staticmethod
    def factors(b: Builder, op: Op) -> tuple[Array, Array | None]:
        return MatrixProduct.factors(b, op)
