"""Norms and attention with 8-bit results: one launch, within one step of the graph."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.quantized_nets import FP8, NARROWED, STREAMS, QNet, attention_network, norm_network
from support.simulated import feeds_of, kinds, refusals, results_of, simulate

from optdnn.config import BuildOptions
from optdnn.ir.evaluate import evaluate
from optdnn.ir.graph import Graph
from optdnn.kernels.attention.hopper_kernel import Config, Problem, candidates, refuse
from optdnn.kernels.attention.problem import bhsd
from optdnn.lowering.cuda import lower_cuda
from optdnn.ops.base import Stage
from optdnn.ops.binary import CastAttrs
from optdnn.ops.gemm import MatMulAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.ops.softmax import SoftmaxAttrs
from optdnn.ops.unary import FakeQuantizeAttrs
from optdnn.passes.base import PassContext
from optdnn.passes.fold_quantized import FoldQuantized
from optdnn.runtime.cuda.gpu_facts import of_arch
from optdnn.runtime.file.validate import validate
from optdnn.runtime.program import Program
from optdnn.types import FP16


def built(graph: Graph) -> Program:
    copy = graph.copy()
    FoldQuantized()(copy, PassContext(target="cuda:sm_90a"))
    program = lower_cuda(copy, BuildOptions(target="simulate"), of_arch("sm_90a"), {})
    validate(program)
    return program


@pytest.mark.parametrize("name", NARROWED)
def test_one_launch_gives_the_8_bit_result(name: str) -> None:
    graph = NARROWED[name]()
    program = built(graph)
    assert kinds(program)[0] == "Quantized"
    assert not {"LayerNormalization", "RMSNormalization", "Attention", "Copy"} & set(kinds(program))
    assert all(program.buffers[i].dtype.itemsize > 1 for s in program.steps[1:] for i in s.outputs)
    feeds = feeds_of(graph)
    got, other = simulate(program, feeds), evaluate(graph, feeds_of(graph, 2))
    for output, want in evaluate(graph, feeds).items():
        # The quotient is computed as a product with the reciprocal. At the edge between two steps, it may be the other step.
        # A sum is normalized before it is rounded to 16 bits.
        assert (np.abs(got[output] - want) > 2e-3 * np.maximum(1, np.abs(want))).mean() < 0.01
        np.testing.assert_allclose(got[output], want, rtol=0.13, atol=0.02)
        assert (got[output] != other[output]).mean() > 0.2


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("rows of int8 and their norm", ["Quantized"]),
        ("rows of uint8 and their norm, in 8 bits alone", ["Quantized"]),
        ("rows of 90 int8 and their norm", ["Quantized"]),
        ("attention with rounded scores", ["RoundedAttention"]),
        ("attention with rounded scores, 197 rows", ["Quantized"]),
        ("attention with rounded weights", ["RoundedAttention"]),
        ("attention with rounded weights and a mask", ["Quantized"]),
        ("attention with rounded weights and masks of queries", ["RoundedAttention"]),
        ("attention with rounded weights, many heads", ["RoundedAttention"]),
        ("attention with scores in coarse steps", ["MatMul", "ActivatedNorm", "MatMul"]),
    ],
)
def test_launches_read_and_round_8_bit_values(name: str, wanted: list[str]) -> None:
    graph = STREAMS[name]()
    program = built(graph)
    assert [kind for kind in kinds(program) if kind in wanted] == wanted
    assert not {"LayerNormalization", "RMSNormalization", "Softmax"} & set(kinds(program))
    if "attention" not in name:
        (step,) = (s for s in program.steps if s.params["op"]["kind"] == "Quantized")
        assert step.params["tactic"].startswith("rows_dequantized")
        assert program.buffers[step.inputs[0]].dtype.itemsize == 1
        assert len(step.params["writes"]) == (1 if "alone" in name else 2)
    feeds = feeds_of(graph)
    got = simulate(program, feeds)
    for output, want in evaluate(graph, feeds).items():
        off = np.abs(got[output].astype(np.float64) - want) / np.abs(want).max()
        assert off.mean() < 4e-3, output
        assert off.max() < 0.1, output


def test_keys_are_rounded_where_the_launch_can_read_them() -> None:
    """197 keys in rows of 197 elements would be copied: they are stored position by position."""
    n = QNet(np.float16)
    q, k, v = (n.op("Tanh", n.input(2, 2, 197, 64, name=name)) for name in "qkv")
    last = n.op("Mul", n.op("Transpose", k, attrs=TransposeAttrs((0, 1, 3, 2))), n.const(np.float16(0.3), np.float16))
    scores = n.op("Cast", n.fake(n.op("MatMul", q, last), 0.1), attrs=CastAttrs(FP16))
    weights = n.op("Cast", n.fake(n.op("Softmax", scores), 1 / 255, 0, np.uint8), attrs=CastAttrs(FP16))
    program = built(n.done(n.op("Relu", n.op("MatMul", weights, v))))
    assert kinds(program).count("RoundedAttention") == 1
    assert "Copy" not in kinds(program)


def attention_with(change: str) -> Graph:
    """Attention whose scores and weights are rounded, with something that the launch does not do."""
    n = QNet(np.float16)
    half = CastAttrs(FP16)
    q, k, v = (n.input(2, 2, 20, 32, name=name) for name in "qkv")
    stages = MatMulAttrs(epilogue=(Stage("Sigmoid", (-1,)),) if change == "stage" else ())
    y = n.op("MatMul", q, n.op("Transpose", k, attrs=TransposeAttrs((0, 1, 3, 2))), attrs=stages)
    y = n.op("Cast", n.fake(y, 0.1, 5), attrs=half)
    y = n.op("Add", y, n.input(2, 1, 1, 20, name="mask")) if change == "mask" else y
    y = n.op("Softmax", y, attrs=SoftmaxAttrs(2 if change == "axis" else -1))
    y = y if change == "no weights" else n.op("Cast", n.fake(y, 1 / 255, 0, np.uint8), attrs=half)
    v = (
        n.random(2, 2, 20, 32)
        if change == "constant"
        else n.op("Slice", v, n.ints(0), n.ints(1), n.ints(1))
        if change == "heads"
        else v
    )
    return n.done(n.op("Relu", n.op("MatMul", y, v)), *([n.op("Exp", y)] if change == "reader" else []))


@pytest.mark.parametrize(
    ("change", "because"),
    [
        ("stage", "other stages come before the softmax"),
        ("mask", "a mask would follow the rounding of the scores"),
        ("axis", "the softmax is not along the keys"),
        ("no weights", "its rows are no rounded weights that only it reads"),
        ("constant", "one of its operands is constant"),
        ("heads", "its operands are not matrices of the same heads"),
        ("reader", "its rows are no rounded weights that only it reads"),
    ],
)
def test_attention_that_is_not_one_launch(change: str, because: str) -> None:
    program = built(attention_with(change))
    assert "RoundedAttention" not in kinds(program)
    assert because in refusals(program, "attention_rounded_sm90", "MatMul")


def test_grids_that_the_launch_refuses() -> None:
    scores, weights = FakeQuantizeAttrs(0.1, -128.0, 127.0), FakeQuantizeAttrs(1 / 255, 0.0, 255.0)
    view = bhsd(197, 12, 64)
    problem = Problem(1, 12, 197, 197, 64, 1.0, view, view, view, view, grids=(scores, weights))
    config = Config(1, 112, 2)
    assert refuse(problem, config) is None
    for changed, because in (
        ({"softcap": 3.0}, "rounded weights have no causal order, window, factors, softcap or sinks"),
        ({"mask": (0, 0, 0)}, "a mask would follow the rounding of the scores"),
        ({"grids": (scores, None)}, "scores are rounded, and weights are not"),
        ({"grids": (scores, replace(weights, high=300.0))}, "weights of 0.0 to 300.0 steps"),
        ({"grids": (replace(scores, scale=0.4), weights)}, "may differ by more than e^80"),
    ):
        assert because in str(refuse(replace(problem, **changed), config))  # type: ignore[arg-type]
    assert "rounded weights need whole rows" in str(refuse(problem, Config(2, 112, 2, split=True)))
    assert not any(
        c.turns or c.split for c in candidates(replace(problem, keys=900, queries=900, batch=8), of_arch("sm_90a"))
    )


def norm_of_integers(change: str = "") -> Graph:
    """The norm of dequantized rows, which another operator reads as well, or which are a part of longer rows."""
    n = QNet(np.float16)
    whole = n.q(n.op("Tanh", n.input(6, 104)), 0.01, 5)
    part = n.op("Slice", whole, n.ints(8 if change == "a part" else 0), n.ints(104), n.ints(1))
    x = n.op("Cast", n.dq(part, 0.01, 5), attrs=CastAttrs(FP16))
    outputs = [n.op("Softmax", n.norm(x)), n.dq(whole, 0.01, 5)]
    return n.done(*outputs, *([n.op("Softmax", x)] if change == "another reader" else []))


@pytest.mark.parametrize(
    ("change", "because"),
    [
        ("another reader", "its operand is not 8-bit integers that are dequantized for it alone"),
        ("a part", "the rows of integers do not begin at multiples of 16 bytes, or are not contiguous"),
        ("", None),
    ],
)
def test_norms_whose_rows_are_dequantized_before(change: str, because: str | None) -> None:
    program = built(norm_of_integers(change))
    found = refusals(program, "rows_dequantized", "LayerNormalization")
    assert found == ([because] if because else [])
    assert ("rows_dequantized" in {str(s.params.get("tactic")).split()[0] for s in program.steps}) is (because is None)


def test_the_float_result_is_written_where_it_is_read() -> None:
    (write,) = built(norm_network(kept=False)).steps[0].params["writes"]
    assert write[2] == [4, 6, 96]
    assert len(built(norm_network()).steps[0].params["writes"]) == 2


@pytest.mark.parametrize("kept", [False, True])
def test_the_sum_is_a_result_of_the_same_launch(kept: bool) -> None:
    program = built(norm_network(np.int8, kept=kept, added=True))
    step = program.steps[0]
    assert step.params["tactic"].startswith("add_norm_quantized")
    assert [program.buffers[i].dtype.name for i in step.outputs] == ["float16", *(["float16"] if kept else []), "int8"]
    assert "Add" not in kinds(program)


def two_scales(added: bool = False) -> Graph:
    n = QNet(np.float16)
    x = n.input(4, 96)
    y = n.norm(n.op("Add", x, n.input(4, 96, name="b")) if added else x)
    return n.done(*(n.op("Relu", n.fake(y, scale, None, FP8)) for scale in (0.02, 0.03)))


@pytest.mark.parametrize(
    "graph",
    [
        two_scales(),  # two quantizations: neither has precedence
        two_scales(added=True),
        attention_network(kept=True),  # the float result is read as well
        attention_network(size=24),  # rows of 24 bytes, which TMA cannot store
    ],
)
def test_others_are_quantized_by_a_launch_of_their_own(graph: Graph) -> None:
    program = built(graph)
    assert "Quantized" not in kinds(program)
    for got, want in results_of(program, graph):
        np.testing.assert_allclose(got, want, rtol=0.13, atol=0.02)
