"""With ``row_invariant``, no pass decides by the batch size: the same rules fire for few rows and for many."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np
import onnx
import pytest
from support.small_models import mlp, small_model

from optdnn.config import BuildOptions
from optdnn.importers.onnx import import_model
from optdnn.optimize import optimize
from optdnn.passes.base import PassContext


@dataclass(frozen=True)
class Decision:
    """A network, two batch sizes, and a rule that a build without ``row_invariant`` applies at one of them only."""

    rule: str
    model: onnx.ModelProto
    sizes: tuple[int, int]
    precision: str = "fp16"


W = (32, 32)
DECISIONS = (
    Decision("wide_product", mlp("n"), (1, 4)),
    Decision("siblings", small_model(
        """(float[n,32,14,14] x) => (float[n,64,14,14] y) { a = Conv(x, w0) b = Relu(a) c = Conv(b, w1) d = Relu(c)
        e = Conv<pads = [1,1,1,1]>(b, w3) f = Relu(e) y = Concat<axis = 1>(d, f) }""",
        w0=(16, 32, 1, 1), w1=(32, 16, 1, 1), w3=(32, 16, 3, 3),
    ), (1, 64)),
    Decision("product_chains", small_model(
        """(float[n,64] x) => (float[n,32] y, float[n,96] z) { a = MatMul(x, w) c = MatMul(a, v) y = Tanh(a) z = Sigmoid(c) }""",
        w=(64, 32), v=(32, 96),
    ), (1, 65536)),
    Decision("own_products", small_model(
        """(float[n,64] x) => (float[n,64] y, float[n,64] z) { a = MatMul(x, w) b = Add(a, v) c = Add(a, u) y = Relu(b)
        z = Tanh(c) }""",
        w=(64, 64), v=(64,), u=(64,),
    ), (1, 1 << 18)),
    Decision("packed_items", small_model(
        """(float[n,8,16] x) => (float[n,8,16] y) { k = Transpose<perm = [0,2,1]>(x) s = MatMul(x, k)
        p = Softmax<axis = -1>(s) y = MatMul(p, x) }""",
    ), (1, 4096)),
    Decision("added_positions", small_model(
        """(float[n,16,32] x) => (float[n,16,64] y, float[n,16,32] z) { t = Tanh(x) a = Add(t, c) y = MatMul(a, w)
        z = MatMul(t, v) }""",
        c=(1, 16, 32), w=(32, 64), v=W,
    ), (1, 8)),
    Decision("pointwise", small_model(
        """(float[n,256] x, float[n,1] s) => (float[n,256] y) { a = Sigmoid(s) b = Add(a, a) c = Tanh(x) y = Mul(c, b) }""",
    ), (1, 65536)),
    Decision("sibling_gates", small_model(
        """(float[n,32] x) => (float[n,32] y) { a = MatMul(x, w1) b = MatMul(x, w2) c = MatMul(x, w3) d = MatMul(x, w4)
        e = Mul(a, b) f = Mul(c, d) y = Add(e, f) }""",
        w1=W, w2=W, w3=W, w4=W,
    ), (1, 65536)),
    Decision("sum_of_sums", small_model(
        """(float[n,64] x, float[n,64] z) => (float[n,1] y) <int64[1] axis = {1}> { a = Exp(x) b = Exp(z)
        c = ReduceSum(a, axis) d = ReduceSum(b, axis) y = Add(c, d) }""",
    ), (1, 65536)),
    Decision("small_product", small_model(
        """(float[n,3,3] x, float[n,3,3] z) => (float[n,3,3] y) { a = Tanh(x) b = MatMul(a, z) y = Sigmoid(b) }""",
    ), (4, 65536)),
    Decision("conv_of_computed_weights", small_model(
        """(float[n,4,8,8] x, float[4,4,3,3] w) => (float[n,4,6,6] y) { v = Tanh(w) y = Conv(x, v) }""",
    ), (1, 4096)),
)  # fmt: skip


def fired(decision: Decision, size: int, row_invariant: bool) -> Counter[str]:
    """How often each rule fires for a batch of this size."""
    options = BuildOptions(target="cuda:sm_90a", precision=decision.precision, row_invariant=row_invariant)
    inputs = decision.model.graph.input
    dims = {i.name: [d.dim_value or size for d in i.type.tensor_type.shape.dim] for i in inputs}
    graph = import_model(decision.model, shapes=dims)
    return Counter(f.rule for report in optimize(graph, options, options.target) for f in report.fired)


@pytest.mark.parametrize("decision", DECISIONS, ids=[d.rule for d in DECISIONS])
def test_the_same_rules_fire_for_every_batch_size(decision: Decision) -> None:
    few, many = (fired(decision, n, True) for n in decision.sizes)
    assert few == many
    one, other = (fired(decision, n, False)[decision.rule] for n in decision.sizes)
    assert one != other


def test_sizes_as_decisions_count_them() -> None:
    assert PassContext().counted(7) == 7
    assert PassContext(row_invariant=True).counted(7) == math.inf
    assert np.isinf(PassContext(row_invariant=True).counted(0))
