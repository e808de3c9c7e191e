"""Small operators that wait for the same steps are one launch, and copies of copies read the first source."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.host import needs_compiler
from support.net import Net
from support.on_gpu import checked_launches
from support.on_processor import compare_steps
from support.quantized_nets import QNet
from support.simulated import TOLERANCE, check_simulated, feeds_of, kinds, lowered, simulate

from optdnn.ir.evaluate import evaluate
from optdnn.ir.graph import Graph
from optdnn.kernels.builder import TensorView, row_major
from optdnn.kernels.launch import GENERAL
from optdnn.kernels.layout import copies
from optdnn.kernels.layout.copies import Part
from optdnn.kernels.pointwise import joint
from optdnn.lowering.joined_launches import _moved, joined
from optdnn.lowering.traced_copies import MOST_PIECES, traced
from optdnn.ops.base import Stage
from optdnn.ops.binary import CastAttrs
from optdnn.ops.index import ConcatAttrs, SplitAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.types import BF16, FP16, FP32, INT8, INT64, DType

HOST = needs_compiler


def heads(*widths: int, size: int = 6) -> Graph:
    """A convolution whose channels are outputs of these widths."""
    n = Net()
    y = n.conv(n.input(2, 16, size, size), sum(widths))
    return n.done(*n.op("Split", y, n.ints(*widths), attrs=SplitAttrs(1), outputs=len(widths)))


def decoder(past: int = 15, width: int = 16) -> Graph:
    """Keys and values of one head are joined with new ones. The products read them, and they are outputs."""
    n = Net()
    x = n.input(1, 1, width)
    rows = n.op("MatMul", x, n.random(width, 3 * width, scale=0.3))
    q, *new = n.op("Split", rows, n.ints(width, width, width), attrs=SplitAttrs(2), outputs=3)
    k, v = (
        n.op("Concat", n.input(1, past, width, name=name), y, attrs=ConcatAttrs(1))
        for name, y in zip(("keys", "values"), new, strict=True)
    )
    scores = n.op("Relu", n.op("MatMul", q, n.op("Transpose", k, attrs=TransposeAttrs((0, 2, 1)))))
    return n.done(n.op("MatMul", scores, v), k, v)


# ---------------------------------------------------------------- whole networks


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_small_outputs_are_converted_in_one_launch(precision: str) -> None:
    program = check_simulated(heads(2, 1, 3, 2), precision)
    assert kinds(program) == ["Copies", "Conv", "Copies"]
    step = program.steps[-1]
    assert len(step.outputs) == 4
    assert len(step.inputs) == 1, "they read the image in its own layout"


def test_caches_are_joined_and_converted_in_one_launch_each() -> None:
    program = check_simulated(decoder(), "fp16")
    assert kinds(program) == ["Copies", "Conv", "Copies", "MatMul", "MatMul", "Pointwise"]
    step = program.steps[2]
    inputs = {spec.name: i for spec, i in program.inputs}
    outputs = {i for _, i in program.outputs}
    assert {inputs["keys"], inputs["values"]} < set(step.inputs), "results begin with the caches as they are"
    assert len(outputs.intersection(step.outputs)) == 2
    assert len(step.params["reads"]) == 6, "new keys and values twice, the caches for the outputs only"


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_an_empty_cache_is_no_source_of_a_copy(precision: str) -> None:
    """The output is a conversion of the new keys. Without passes, the empty cache is still a part of them."""
    n = Net()
    rows = n.op("MatMul", n.input(1, 1, 16), n.random(16, 32, scale=0.3))
    new, _ = n.op("Split", rows, n.ints(16, 16), attrs=SplitAttrs(2), outputs=2)
    k = n.op("Concat", n.input(1, 0, 16), new, attrs=ConcatAttrs(1))
    graph = n.done(n.op("MatMul", k, n.random(16, 8)), k)
    program, feeds = lowered(graph, precision, opt_level=0), feeds_of(graph)
    want = evaluate(graph, feeds)
    for name, y in simulate(program, feeds).items():
        np.testing.assert_allclose(y, want[name], atol=TOLERANCE[precision] * 4)


def boxes(rows: int = 5) -> Graph:
    """Several functions of softmaxes, as heads of detectors compute corners and sizes; masks; and a transposed copy."""
    n = Net()
    x = n.op("Softmax", n.input(2, rows, 4))
    corner = n.op("Sub", x, n.op("Mul", n.input(2, 1, 4), n.const(0.5)))
    size = n.op("Where", n.op("Greater", x, n.const(0.2)), n.op("Exp", x), n.random(rows, 1))
    inside = n.op("Less", x, n.const(0.3))
    number = n.op("Cast", n.op("Floor", n.op("Mul", x, n.const(7.0))), attrs=CastAttrs(INT64))
    turned = n.op("Transpose", x, attrs=TransposeAttrs((2, 0, 1)))
    return n.done(corner, size, inside, number, turned)


def test_small_operators_are_one_launch() -> None:
    program = check_simulated(boxes(), "fp32")
    assert kinds(program) == ["Softmax", "JointPointwise"]
    step = program.steps[-1]
    assert len(step.outputs) == 5
    counts, stages = (step.params["op"]["attrs"][name] for name in ("counts", "stages"))
    assert sorted(map(len, stages)) == [0, 1, 2, 3, 3], "the copy has none"
    assert sum(counts) == len(step.params["reads"])
    assert step.params["tactic"] == "pointwise"


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_joint_launches_on_a_gpu(precision: str) -> None:
    assert "JointPointwise" in {e.kind for e in checked_launches(boxes(), precision)}


def test_what_waits_for_another_operator_has_a_launch_of_its_own() -> None:
    n = Net()
    x = n.op("Softmax", n.input(4, 16))
    first, second = n.op("Tanh", x), n.op("Softmax", n.op("Exp", x))
    program = check_simulated(n.done(first, second, n.op("Sin", second), n.op("Cos", second)), "fp32")
    assert kinds(program) == ["Softmax", "JointPointwise", "Softmax", "JointPointwise"]


def test_large_operators_keep_launches_of_their_own() -> None:
    rows = 1 + joint.MOST_ELEMENTS // 8
    found = kinds(lowered(boxes(rows), "fp32"))
    assert "JointPointwise" not in found
    assert found.count("Pointwise") == 4


def test_an_operator_reads_what_a_small_copy_copies() -> None:
    source, copy = tensor(0, 1, 2, 6, 5, dtype=FP16), TensorView(1, 0, (1, 2, 6, 5), (60, 1, 10, 2), FP16)
    channel, other = copy.view((1, 1, 6, 5), (60, 1, 10, 2), 1), tensor(3, 1, dtype=FP16)
    part = joint.Part((channel, other), (Stage("Add", (-1, 1)),), tensor(2, 1, 1, 6, 5, dtype=FP16))
    moved = _moved(part, [Part(source, copy)])
    assert moved is not None
    assert moved.operands == (source.view((1, 1, 6, 5), (0, 0, 5, 1), 30), other)
    assert _moved(part, [Part(tensor(0, 1, 2, 6, 5), copy)]) is None, "the copy rounds"
    turned = replace(part, operands=(copy.view((1, 1, 12, 5), (60, 1, 5, 1)), other))
    assert _moved(turned, [Part(source, copy)]) is None, "its elements are in another order"
    single, image = tensor(0, 1, 1, 6, 5, dtype=FP16), TensorView(1, 0, (1, 1, 6, 5), (240, 1, 40, 8), FP16)
    squeezed = replace(part, operands=(image.view((6, 5), (40, 8)), other), target=tensor(2, 6, 5, dtype=FP16))
    moved = _moved(squeezed, [Part(single, image)])
    assert moved is not None
    assert moved.operands == (single.view((6, 5), (5, 1)), other)


def depth(n: Net, *, shared: bool = False) -> Graph:
    """The head of a depth network: one channel of an image, without its axis."""
    y = n.conv(n.conv(n.input(1, 16, 8, 8), 8), 2)
    plane = n.op("Squeeze", n.op("Slice", y, n.ints(0), n.ints(1), n.ints(1)), n.ints(1))
    result = n.op("Mul", n.op("Sigmoid", plane), n.const(10.0))
    return n.done(result, *([n.op("Softmax", plane)] if shared else []))


def test_copies_that_only_operators_read_are_left_out() -> None:
    assert kinds(check_simulated(depth(Net()), "fp16")) == ["Copy", "Conv", "Conv", "JointPointwise"]
    assert kinds(check_simulated(depth(Net(), shared=True), "fp16"))[3:] == ["JointPointwise", "ActivatedNorm"]


@pytest.mark.parametrize(
    ("waits", "small", "groups"),
    [
        ([[], [0], [0]], [1, 2], {(1, 2): 1}),  # they begin together
        ([[], [0], [0], [2], [1, 3]], [1, 3], {(1, 3): 3}),  # the reader of the first waits for the second anyway
        ([[], [0], [0], [2], [1], [3, 4]], [1, 3], {(1,): 1, (3,): 3}),  # step 4 would wait for step 2
        ([[], [0], [0], [2]], [1, 3], {(1, 3): 3}),  # nothing reads the first
        ([[], [0], [0], [2], [3]], [1, 3], {(1, 3): 3}),  # the first joins the second, which begins no later
        ([[], [0], [1], [2]], [1, 3], {(1,): 1, (3,): 3}),  # one reads what the other writes, through another step
        ([[], [], [0], [1], [2, 3]], [2, 3], {(2, 3): 3}),  # both have the same reader
        ([[], [], [0], [1], [2], [3]], [2, 3], {(2,): 2, (3,): 3}),  # step 4 would wait for step 1
        ([[], [], [0], [1], [0, 2], [1, 3], [0, 1, 4]], [2, 3, 6], {(2,): 2, (3,): 3, (6,): 6}),
        ([[], [0], [0], [2], [0], [1, 3, 4]], [1, 3, 4], {(1, 4, 3): 3}),  # three
    ],
)
def test_groups(waits: list[list[int]], small: list[int], groups: dict[tuple[int, ...], int]) -> None:
    found = joined([set(w) for w in waits], [k in small for k in range(len(waits))])
    assert {tuple(sorted(g.steps)): g.at for g in found} == {tuple(sorted(steps)): at for steps, at in groups.items()}


@pytest.mark.parametrize("seed", range(40))
def test_groups_delay_no_step(seed: int) -> None:
    """Small steps take a time of 1, others of 100. With one launch per group, the others end as early as without groups."""
    rng = np.random.default_rng(seed)
    count = 24
    waits = [
        set(rng.choice(k, min(k, int(rng.integers(0, 3))), replace=False).tolist()) if k else set()
        for k in range(count)
    ]
    small = [bool(b) for b in rng.random(count) < 0.5]
    groups = joined(waits, small)
    assert sorted(k for g in groups for k in g.steps) == [k for k in range(count) if small[k]]
    of = {k: g for g in groups for k in g.steps}
    plain: list[int] = []
    for k in range(count):
        plain.append(max((plain[d] for d in waits[k]), default=0) + (1 if small[k] else 100))
    at = {g.at: g for g in groups}
    ends: dict[int, int] = {}
    for k in range(count):
        members = at[k].steps if k in at else [k] if k not in of else []
        before = [ends[d] for m in members for d in waits[m]]  # a KeyError: the place is too early
        ends |= dict.fromkeys(members, max(before, default=0) + (1 if small[k] else 100))
    assert all(small[k] or ends[k] <= plain[k] for k in range(count))
    assert max(ends.values()) == max(plain)


@HOST
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("graph", [heads(2, 1, 3, 2), decoder(), boxes()], ids=["heads", "decoder", "boxes"])
def test_the_kernel_on_the_processor(graph: Graph, precision: str, tmp_path: Path) -> None:
    program = lowered(graph, precision)
    assert {"Copies", "JointPointwise"} & set(kinds(program))
    copies_alone = precision != "fp32" and "JointPointwise" not in kinds(program)
    assert compare_steps(program, feeds_of(graph), 0 if copies_alone else 1e-6, tmp_path) >= 1


def test_large_outputs_keep_launches_of_their_own() -> None:
    size = 1 + int((copies.MOST_ELEMENTS / 4) ** 0.5)
    assert "Copies" not in kinds(lowered(heads(2, 2, size=size), "fp16"))


def test_outputs_of_different_steps_are_converted_at_the_end() -> None:
    n = Net()
    x = n.op("MatMul", n.input(4, 16), n.random(16, 12))
    y = n.op("MatMul", n.op("Softmax", x), n.random(12, 12))
    program = check_simulated(n.done(x, y), "fp16")
    assert kinds(program)[-1] == "Copies"
    assert len(program.steps[-1].outputs) == 2


def test_a_cache_that_stays_in_place_keeps_its_copy() -> None:
    """A run may give such an output the memory of the input, and then nothing is copied."""
    n = Net()
    caches = [n.input(4, 8, 8, name=name) for name in ("keys", "values")]
    rows = n.op("Relu", n.input(1, 8, 8))
    program = check_simulated(n.done(*(n.op("ScatterND", c, n.const([[2]], np.int64), rows) for c in caches)), "fp32")
    assert kinds(program).count("Copy") == 2
    assert "Copies" not in kinds(program)


def test_steps_on_the_cpu_end_all_groups() -> None:
    n = Net()
    x = n.input(4, 16)
    y = n.op("Relu", n.op("MatMul", x, n.random(16, 16)))
    found = n.op("NonZero", y)
    a, b, c, d = n.op("Split", y, n.ints(4, 4, 4, 4), attrs=SplitAttrs(1), outputs=4)
    program = check_simulated(n.done(found, a, b, c, d), "fp32")
    assert kinds_on_gpu(program).count("Copies") == 1


def kinds_on_gpu(program: object) -> list[str]:
    return [s.params["op"]["kind"] for s in program.steps if s.executor == "cuda"]  # type: ignore[attr-defined]


# ---------------------------------------------------------------- copies of copies


def tensor(buffer: int, *shape: int, dtype: DType = FP32) -> TensorView:
    return TensorView(buffer, 0, shape, row_major(shape), dtype)


def rows(x: TensorView, begin: int, end: int) -> TensorView:
    """Rows of a matrix, or of each matrix of a stack."""
    axis = len(x.shape) - 2
    shape = (*x.shape[:axis], end - begin, x.shape[-1])
    return x.view(shape, x.strides, begin * x.strides[axis])


JOINT, OUT = tensor(2, 3, 8, 4, dtype=FP16), tensor(3, 3, 8, 4)
PAST, NEW = tensor(0, 3, 7, 4), tensor(1, 3, 1, 4, dtype=FP16)
MAKERS = [Part(PAST, rows(JOINT, 0, 7)), Part(NEW, rows(JOINT, 7, 8))]


def test_the_whole_of_a_joined_tensor_comes_from_its_parts() -> None:
    assert traced(Part(JOINT, OUT), MAKERS) == [Part(PAST, rows(OUT, 0, 7)), Part(NEW, rows(OUT, 7, 8))]


def test_a_part_of_a_copied_tensor_comes_from_the_same_part_of_its_source() -> None:
    whole = tensor(1, 3, 7, 4)
    maker = Part(PAST, whole)
    assert traced(Part(whole, tensor(3, 3, 7, 4)), [maker]) == [Part(PAST, tensor(3, 3, 7, 4))]
    assert traced(Part(rows(whole, 2, 5), tensor(3, 3, 3, 4)), [maker]) == [Part(rows(PAST, 2, 5), tensor(3, 3, 3, 4))]
    turned = Part(PAST.view((4, 7, 3), (1, 4, 28)), tensor(1, 4, 7, 3))  # channels last become planes
    (found,) = traced(Part(tensor(1, 4, 7, 3).view((1, 7, 3), (21, 3, 1), 42), tensor(3, 1, 7, 3)), [turned]) or ()
    assert found.source == PAST.view((1, 7, 3), (1, 4, 28), 2)


def test_what_repeats_or_turns_a_copied_tensor_comes_from_its_source() -> None:
    planes = Part(PAST.view((4, 7, 3), (1, 4, 28)), tensor(1, 4, 7, 3))  # channels last become planes
    whole = planes.target
    for view, strides in (
        (whole.view((4, 7, 5, 3), (21, 3, 0, 1)), (1, 4, 0, 28)),  # repeats
        (whole.view((3, 1, 4, 7), (1, 9, 21, 3)), (28, 0, 1, 4)),  # turns
        (whole.view((2, 6), (21, 3)), (1, 4)),  # the first elements
    ):
        target = tensor(3, *view.shape)
        assert traced(Part(view, target), [planes]) == [Part(PAST.view(view.shape, strides), target)]
    for view in (
        whole.view((4, 8, 3), (21, 3, 1)),  # beyond the end of an axis
        whole.view((4, 3, 3), (21, 1, 1)),  # a diagonal
        whole.view((4, 5, 3), (21, 0, 1), 3),  # begins elsewhere
        whole.view((4, 21), (21, 1)),  # two axes as one
    ):
        assert traced(Part(view, tensor(3, *view.shape)), [planes]) is None


@pytest.mark.parametrize(
    ("part", "makers"),
    [
        (Part(JOINT, OUT), MAKERS[:1]),  # the last row comes from another step
        (Part(JOINT, OUT), [*MAKERS, MAKERS[0]]),  # a part is written twice
        (Part(JOINT.view((8, 3, 4), (4, 32, 1)), tensor(3, 8, 3, 4)), MAKERS),  # in another order of axes
        (Part(JOINT.view((3, 32), (32, 1)), tensor(3, 3, 32)), MAKERS),  # with other axes
        (Part(JOINT.view((3, 7, 4), (32, 4, 1), 2), tensor(3, 3, 7, 4)), MAKERS),  # rows that begin inside of rows
        (Part(JOINT, OUT), [Part(rows(PAST, k % 7, k % 7 + 1), rows(JOINT, k, k + 1)) for k in range(8)]),
    ],
)
def test_other_copies_of_copies_read_the_copy(part: Part, makers: list[Part]) -> None:
    assert len(makers) in (1, 2, 3, 8)
    assert MOST_PIECES < 8
    assert traced(part, makers) is None


# ---------------------------------------------------------------- launches


def test_refusals() -> None:
    assert copies.refuse(Part(PAST, tensor(1, 3, 7, 4, dtype=BF16))) is None
    assert copies.refuse(Part(tensor(0, 8, dtype=INT8), tensor(1, 8, dtype=INT8))) is None
    assert "no launch converts int8 to float32" in str(copies.refuse(Part(tensor(0, 8, dtype=INT8), tensor(1, 8))))
    large = copies.MOST_ELEMENTS + 1
    assert "large enough" in str(copies.refuse(Part(tensor(0, large), tensor(1, large))))
    assert "large enough" in str(copies.refuse(Part(tensor(0, 0), tensor(1, 0))))
    near, far = (TensorView(0, 0, (3, 8), (apart, 1), FP32) for apart in ((1 << 30) - 4, 1 << 30))
    assert copies.refuse(Part(near, tensor(1, 3, 8))) is None
    assert "too far apart" in str(copies.refuse(Part(far, tensor(1, 3, 8))))
    spread = tuple(5**k for k in range(9))
    assert "cannot be merged" in str(
        copies.refuse(Part(TensorView(0, 0, (2,) * 9, spread, FP32), tensor(1, *(2,) * 9)))
    )


def rounded_again() -> Graph:
    """The halves of a rounded image, rounded again in steps of their own: the parts of a quantized Concat."""
    n = QNet()
    y = n.fake(n.qconv(n.fake(n.input(2, 16, 9, 7), 0.03), 16), 0.04)
    halves = n.op("Split", y, n.ints(8, 8), attrs=SplitAttrs(1), outputs=2)
    return n.done(*(n.q(half, scale, zero) for half, scale, zero in zip(halves, (0.05, 0.07), (3, -5), strict=True)))


def test_integers_are_exact_in_a_joint_launch() -> None:
    program = lowered(rounded_again(), "fp16")
    assert kinds(program) == ["JointPointwise", "QuantizedConv", "JointPointwise"]
    assert [len(step.outputs) for step in program.steps] == [1, 1, 2]
    for step in (program.steps[0], program.steps[2]):
        assert program.kernels[step.params["launch"]["kernel"]].options == (*GENERAL, "--fmad=false")
    floats = (Stage("Mul", (-1, -1)),)
    parts = [joint.Part((tensor(0, 8),), floats, tensor(k, 8)) for k in (1, 2)]
    assert joint.launch("sm_90a", parts).recipe.options == GENERAL
    copied = [joint.Part((tensor(0, 8, dtype=INT8),), (), tensor(k, 8, dtype=INT8)) for k in (1, 2)]
    assert joint.launch("sm_90a", copied).recipe.options == GENERAL


@HOST
def test_integers_on_the_processor(tmp_path: Path) -> None:
    graph = rounded_again()
    program = lowered(graph, "fp16")
    assert compare_steps(program, feeds_of(graph), 0, tmp_path) >= 1


def test_refusals_of_operators() -> None:
    x, y = tensor(0, 8), tensor(1, 8)
    exp = (Stage("Exp", (-1,)),)
    assert joint.refuse(joint.Part((x,), exp, y)) is None
    large = tensor(1, joint.MOST_ELEMENTS + 1)
    assert "large enough" in str(joint.refuse(joint.Part((x,), exp, large)))
    assert "no expression" in str(joint.refuse(joint.Part((x,), (Stage("Gelu2", (-1,)),), y)))
    spread = TensorView(0, 0, (2,) * 9, tuple(5**k for k in range(9)), FP32)
    assert "cannot be merged" in str(joint.refuse(joint.Part((spread,), exp, tensor(1, *(2,) * 9))))
    far = TensorView(0, 0, (3, 8), (1 << 30, 1), FP32)
    assert "too far apart" in str(joint.refuse(joint.Part((far,), exp, tensor(1, 3, 8))))


def test_many_copies_are_several_launches() -> None:
    parts = [Part(tensor(0, 4), tensor(k, 4)) for k in range(1, 151)]
    found = joint.batches([p.as_pointwise for p in parts])
    assert sorted(k for batch in found for k in batch) == list(range(150))
    assert len(found) == 2
    for batch in found:
        assert len(joint.launch("sm_90a", [parts[k].as_pointwise for k in batch]).parameters) <= 4096
