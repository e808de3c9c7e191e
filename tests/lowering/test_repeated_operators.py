"""Small operators compute again what they read from other small ones, and share their launch."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from support.net import Net
from support.on_gpu import checked_launches
from support.simulated import check_simulated, kinds

from optdnn.ir.graph import Graph
from optdnn.kernels.builder import TensorView, row_major
from optdnn.kernels.pointwise import joint
from optdnn.lowering.repeated_operators import MOST_STAGES, MOST_WORK, _repeating
from optdnn.ops.base import Stage
from optdnn.ops.binary import CastAttrs
from optdnn.ops.index import ConcatAttrs, SplitAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.types import FP16, FP32, DType


def tensor(buffer: int, *shape: int, dtype: DType = FP32) -> TensorView:
    return TensorView(buffer, 0, shape, row_major(shape), dtype)


def cell(steps: int = 2, heads: int = 4, width: int = 8) -> Graph:
    """Steps of sLSTM (Beck et al., 2024): each head multiplies its own result; a maximum, a sum and a norm are states."""
    n = Net()
    x = n.input(1, steps, 4 * heads * width)
    h = c = s = m = n.const(np.zeros((1, heads * width)))
    r = n.random(heads, width, 4 * width, scale=0.3)
    one = n.ints(1)
    states = []
    for k in range(steps):
        rows = n.op("MatMul", n.op("Reshape", h, n.ints(heads, 1, width)), r)
        by_gate = n.op(
            "Transpose", n.op("Reshape", rows, n.ints(1, heads, 4, width)), attrs=TransposeAttrs((0, 2, 1, 3))
        )
        given = n.op("Squeeze", n.op("Slice", x, n.ints(k), n.ints(k + 1), one), one)
        raw = n.op("Add", given, n.op("Reshape", by_gate, n.ints(1, 4 * heads * width)))
        i, f, z, o = n.op("Split", raw, n.ints(*[heads * width] * 4), attrs=SplitAttrs(1), outputs=4)
        forget = n.op("Add", m, n.op("Log", n.op("Sigmoid", f)))
        new = n.op("Max", i, forget)
        gain, kept = n.op("Exp", n.op("Sub", i, new)), n.op("Exp", n.op("Sub", forget, new))
        c = n.op("Add", n.op("Mul", kept, c), n.op("Mul", gain, n.op("Tanh", z)))
        s = n.op("Add", n.op("Mul", kept, s), gain)
        h, m = n.op("Div", n.op("Mul", n.op("Sigmoid", o), c), s), new
        states.append(n.op("Unsqueeze", h, n.ints(0)))
    return n.done(n.op("Concat", *states, attrs=ConcatAttrs(0)), c, s, m)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_step_of_a_cell_is_a_product_and_one_launch(precision: str) -> None:
    found = kinds(check_simulated(cell(4), precision))
    products = [k for k, kind in enumerate(found) if kind == "MatMul"]
    assert len(products) == 3, "the state is zero at first"
    assert [found[k + 1] for k in products] == ["JointPointwise"] * 3
    assert all(b - a == 2 for a, b in pairwise(products))


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_cells_on_a_gpu(precision: str) -> None:
    assert "JointPointwise" in {e.kind for e in checked_launches(cell(4), precision)}


def chained(n: Net, *, late: bool = False) -> Graph:
    """An operator whose result a softmax and another operator read. ``late``: that one reads the softmax too."""
    x = n.op("Softmax", n.input(4, 16))
    first = n.op("Exp", n.op("Mul", x, n.input(4, 16, name="other")))
    rows = n.op("Softmax", first)
    second = n.op("Sub", n.op("Tanh", first), rows if late else n.input(16, name="third"))
    return n.done(rows, second)


def test_an_operator_joins_the_one_that_it_reads() -> None:
    assert kinds(check_simulated(chained(Net()), "fp32")) == ["Softmax", "JointPointwise", "Softmax"]


def test_an_operator_that_waits_for_more_reads_the_result() -> None:
    assert kinds(check_simulated(chained(Net(), late=True), "fp32")) == ["Softmax", "Pointwise", "Softmax", "Pointwise"]


# ---------------------------------------------------------------- one operator


EXP = (Stage("Exp", (-1,)),)
MAKER = joint.Part((tensor(0, 4, 8), tensor(1, 8)), (Stage("Mul", (-1, 1)), Stage("Exp", (-2,))), tensor(2, 4, 8))


def test_stages_and_operands_are_put_together() -> None:
    part = joint.Part((tensor(3, 4, 8), tensor(2, 4, 8)), (Stage("Sub", (-1, 1)),), tensor(4, 4, 8))
    made = _repeating(part, [MAKER])
    assert made is not None
    assert [x.buffer for _, x in made.present] == [3, 0, 1]
    assert made.stages == (Stage("Mul", (1, 2)), Stage("Exp", (-2,)), Stage("Sub", (0, -3)))
    assert made.target == part.target


def test_a_part_of_the_result_reads_parts_of_the_operands() -> None:
    part = joint.Part((tensor(2, 4, 8).view((2, 4), (8, 1), 12),), EXP, tensor(4, 2, 4))
    made = _repeating(part, [MAKER])
    assert made is not None
    assert [(x.offset, x.strides) for _, x in made.present] == [(12, (8, 1)), (4, (0, 1))]
    turned = joint.Part((tensor(2, 4, 8).view((8, 4), (1, 8)),), EXP, tensor(4, 8, 4))
    made = _repeating(turned, [MAKER])
    assert made is not None
    assert [x.strides for _, x in made.present] == [(1, 8), (1, 0)]


def test_axes_that_a_reshape_joined_are_apart_again() -> None:
    copy = joint.Part((TensorView(0, 0, (4, 2, 8), (8, 32, 1), FP32),), (), tensor(2, 4, 2, 8))
    part = joint.Part((tensor(2, 4, 16), tensor(3, 4, 1)), (Stage("Add", (-1, 1)),), tensor(4, 4, 16))
    made = _repeating(part, [copy])
    assert made is not None
    assert [(x.shape, x.strides) for _, x in made.present] == [((4, 2, 8), (8, 32, 1)), ((4, 1, 1), (1, 1, 1))]
    assert (made.target.shape, made.target.strides) == ((4, 2, 8), (16, 8, 1))


def test_a_scalar_stays_one_element() -> None:
    clip = joint.Part((tensor(0, 4, 8), tensor(1), tensor(5)), (Stage("Clip", (-1, 1, 2)),), tensor(2, 4, 8))
    made = _repeating(joint.Part((tensor(2, 4, 8),), EXP, tensor(4, 4, 8)), [clip])
    assert made is not None
    assert [x.shape for _, x in made.present] == [(4, 8), (1, 1), (1, 1)]


def test_copies_convert() -> None:
    copy = joint.Part((tensor(2, 4, 8),), (), tensor(4, 4, 8, dtype=FP16))
    made = _repeating(copy, [MAKER])
    assert made is not None
    assert made.stages == (Stage("Mul", (0, 1)), Stage("Exp", (-2,)), Stage("Cast", (-3,), CastAttrs(FP16)))
    made = _repeating(joint.Part((tensor(4, 4, 8, dtype=FP16),), EXP, tensor(5, 4, 8, dtype=FP16)), [copy])
    assert made is not None
    assert made.stages == (Stage("Cast", (0,), CastAttrs(FP16)), Stage("Exp", (-2,)))


def test_what_cannot_be_computed_again() -> None:
    whole = tensor(2, 4, 8)
    assert _repeating(joint.Part((whole.view((8, 4), (4, 1)),), EXP, tensor(4, 8, 4)), [MAKER]) is None, (
        "halves of rows"
    )
    assert _repeating(joint.Part((whole.view((5, 6), (6, 1)),), EXP, tensor(4, 5, 6)), [MAKER]) is None, "no box of it"
    gaps = joint.Part((tensor(0, 4, 8),), EXP, whole.view((4, 8), (1, 1)))
    assert _repeating(joint.Part((whole,), EXP, tensor(4, 4, 8)), [gaps]) is None, "its elements overlap"
    many = joint.Part((tensor(0, 4, 8),), EXP * MOST_STAGES, whole)
    assert _repeating(joint.Part((whole,), EXP, tensor(4, 4, 8)), [many]) is None, "too many stages"
    size = joint.MOST_ELEMENTS
    large = joint.Part((tensor(0, size),), EXP * (MOST_WORK // size + 1), tensor(2, size))
    assert _repeating(joint.Part((tensor(2, size),), EXP, tensor(4, size)), [large]) is None, "too much work"


def test_results_keep_their_rank() -> None:
    sums = joint.Part((tensor(0), tensor(1)), (Stage("Add", (-1, 1)),), tensor(2, 1, 1))
    part = joint.Part((tensor(2, 1, 1), tensor(3, 4)), (Stage("Mul", (-1, 1)),), tensor(4, 1, 4))
    made = _repeating(part, [sums])
    assert made is not None
    assert [x.shape for _, x in made.present] == [(1, 1), (1, 1), (4,)]
