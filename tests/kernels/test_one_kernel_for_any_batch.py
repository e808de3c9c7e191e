"""With ``row_invariant``, one kernel runs an operator at any batch size, and its sums have one order."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import onnx
import pytest
from support.arithmetic import program_at
from support.packed_cases import Case
from support.small_models import small_model

from optdnn.ir.graph import Graph
from optdnn.kernels.builder import VERY_MANY, Builder
from optdnn.kernels.norm import rows_kernel
from optdnn.kernels.norm.rows_once import rows_offers
from optdnn.kernels.packed import wgmma_kernel
from optdnn.kernels.packed.tactics import PackedWgmma
from optdnn.runtime.cuda.gpu_facts import of_arch

GPU = of_arch("sm_90a")


@dataclass(frozen=True)
class Kernel:
    """A network, two batch sizes, its tactic at each of them, and its tactic at all with ``row_invariant``."""

    model: onnx.ModelProto
    sizes: tuple[int, int]
    tactics: tuple[str, str]
    invariant: str
    precision: str = "fp16"


KERNELS = {
    "many small products": Kernel(small_model(
        "(float[n,4,8,32] x, float[n,4,32,8] z) => (float[n,4,8,8] y) { a = Tanh(x) y = MatMul(a, z) }",
    ), (1, 4096), ("matmul_sm90", "matmul_tiled"), "matmul_tiled"),
    "patches": Kernel(small_model(
        """(float[n,16,64,64] x) => (float[n,64,16,16] y) { a = Conv<pads = [1,1,1,1]>(x, v)
        y = Conv<strides = [4,4]>(a, w) }""",
        w=(64, 16, 4, 4), v=(16, 16, 3, 3),
    ), (1, 16), ("conv_narrow_sm90", "conv_sm90"), "conv_sm90"),
    "short rows": Kernel(small_model(
        """(float[n,2,6,96] x) => (float[n,6,2,32] y) <int64[1] a = {0}, int64[1] b = {32}, int64[1] axis = {3}> {
        t = Tanh(x) s = Slice(t, a, b, axis) u = Transpose<perm = [0,2,1,3]>(s) y = LayerNormalization<axis = -1>(u, g) }""",
        g=np.ones(32, np.float32),
    ), (1, 64), ("short_rows", "short_rows"), "rows_once", "fp32"),
    "stem and pool": Kernel(small_model(
        """(float[n,3,224,224] x) => (float[n,64,27,27] y) { a = Conv<pads = [2,2,2,2], strides = [4,4]>(x, w) b = Relu(a)
        y = MaxPool<kernel_shape = [3,3], strides = [2,2]>(b) }""",
        w=(64, 3, 11, 11),
    ), (1, 64), ("conv_stem", "conv_stem_pool"), "conv_stem_pool"),
    "few packed rows": Kernel(small_model(
        "(float[n,256] x) => (float[n,512] y) { y = MatMul(x, w) }", w=(256, 512),
    ), (2, 40), ("packed_digits", "packed_sm90"), "packed_sm90", "w4"),
}  # fmt: skip


@pytest.mark.parametrize("name", KERNELS)
def test_one_kernel_serves_all_batch_sizes(name: str) -> None:
    made = KERNELS[name]
    for size, plain in zip(made.sizes, made.tactics, strict=True):
        assert plain in tactics(made, size, False)
        assert made.invariant in tactics(made, size, True)


def tactics(made: Kernel, size: int, row_invariant: bool) -> set[str]:
    inputs = made.model.graph.input
    shapes = {i.name: [d.dim_value or size for d in i.type.tensor_type.shape.dim] for i in inputs}
    program = program_at(made.model, shapes, precision=made.precision, row_invariant=row_invariant)
    return {step.params.get("tactic", "host").split(" ")[0] for step in program.steps}


def test_a_fusing_kernel_without_an_order_excludes_no_others() -> None:
    """One launch would compute a softmax of channels and the conversion after it, but none of its configurations is allowed."""
    model = small_model(
        "(float[n,16,4,5] x) => (float[n,5,4,5] y) { a = Conv(x, w) y = Softmax<axis = 1>(a) }", w=(5, 16, 1, 1)
    )
    for size in (1, 8):
        program = program_at(model, {"x": [size, 16, 4, 5]}, precision="fp16", row_invariant=True)
        assert {step.executor for step in program.steps} == {"cuda"}


def test_rows_that_lie_apart_are_summed_like_contiguous_ones() -> None:
    dense = rows_kernel.Problem("layer_norm", 48, 96)
    added = replace(dense, add=True)
    for one, other in ((dense, replace(dense, walk=((6, 192), (8, 1152)))), (added, replace(added, period=6))):
        (best,), (own,) = ([o.config for o in rows_offers(p, GPU) if o.row_invariant] for p in (one, other))
        assert own == best


def test_packed_products_in_the_order_of_k() -> None:
    """Neither blocks nor teams of warps may share K: each adds a part of it."""
    config = wgmma_kernel.Config(64, 4, 1, 64)
    assert PackedWgmma().one_order(config)
    assert not PackedWgmma().one_order(replace(config, split=2))
    assert not PackedWgmma().one_order(replace(config, teams=2))
    for rows in (1, 9, 192, 2048):
        problem = Case(rows, 768, 3072).problem
        assert any(o.row_invariant for o in PackedWgmma().offers(problem, GPU))
    assert not any(c.ordered for c in wgmma_kernel.candidates(Case(192, 768, 3072).problem, GPU))


def test_sizes_as_decisions_count_them() -> None:
    assert Builder(Graph(), GPU).counted(7) == 7
    assert Builder(Graph(), GPU, row_invariant=True).counted(7) == VERY_MANY
