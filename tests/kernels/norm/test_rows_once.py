"""Kernels that describe their own launches: chosen where they can run, otherwise refused with the reason."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.net import Net
from support.on_gpu import checked_launches
from support.simulated import check_simulated, refusals, tactics

from optdnn.ir.graph import Graph
from optdnn.kernels.norm import rows_kernel
from optdnn.ops import norm, softmax
from optdnn.ops.shape import TransposeAttrs
from optdnn.runtime.cuda.gpu_facts import of_arch
from optdnn.runtime.cuda.launches.plan import Pointer, parse


@pytest.mark.parametrize("added", [(1,), (16,)])
def test_a_vector_without_further_axes_is_a_row(added: tuple[int, ...]) -> None:
    n = Net()
    y = n.op("LayerNormalization", n.input(16), n.positive(16), n.random(16), attrs=norm.LayerNormAttrs(-1, 1e-3))
    program = check_simulated(n.done(n.op("Add", y, n.random(*added))), "fp32")
    assert len(program.steps) == 1


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32", "tf32"])
@pytest.mark.parametrize("kind", ["Softmax", "LogSoftmax"])
def test_rows(kind: str, precision: str) -> None:
    n = Net()
    x = n.matmul(n.input(2, 6, 32), 48)
    y = n.op("LayerNormalization", x, n.positive(48), n.random(48), attrs=norm.LayerNormAttrs(-1, 1e-3))
    z = n.op("RMSNormalization", n.op("Exp", y), n.positive(48))
    program = check_simulated(n.done(n.op(kind, n.matmul(z, 40))), precision)
    assert tactics(program, "LayerNormalization") == ["rows_once"]
    assert tactics(program, "RMSNormalization") == ["rows_narrowed" if precision == "tf32" else "rows_once"]
    assert tactics(program, kind) == ["rows_activated" if "16" in precision else "rows_once"]  # it stores fp32
    for step in program.steps:
        parsed = parse(step, program)
        if program.kernels[parsed.launch.kernel].template == "rows.cu":
            assert any(isinstance(r, Pointer) for r in parsed.launch.relocations)
            assert parsed.launch.parameters


ACTIVATIONS = ("Relu", "Gelu", "Swish", "Tanh", "Clip")


def activated(kind: str, activation: str, rows: int = 12) -> Graph:
    n = Net()
    x = n.matmul(n.input(rows, 32), 48)
    shift = [n.random(48)] if kind == "LayerNormalization" else []
    y = n.op(kind, x, n.positive(48), *shift, attrs=norm.LayerNormAttrs(-1, 1e-3))
    bounds = [-0.5, 0.75] if activation == "Clip" else []
    return n.done(n.matmul(n.op(activation, y, *bounds), 16))


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("kind", ["LayerNormalization", "RMSNormalization"])
def test_activations_after_norms_of_rows(kind: str, activation: str, precision: str) -> None:
    program = check_simulated(activated(kind, activation), precision)
    assert tactics(program, kind) == ["rows_activated"]
    assert [s.params["op"]["kind"] for s in program.steps].count("ActivatedNorm") == 1


@pytest.mark.parametrize(
    ("length", "tactic"), [(384, "rows_activated"), (64, "rows_activated"), (48, "rows_activated")]
)
def test_the_l2_norm_of_an_embedding_stores_fp32(length: int, tactic: str) -> None:
    n = Net()
    y = n.op("LpNormalization", n.matmul(n.input(3, 32), length), attrs=norm.LpNormAttrs(-1, 2, 1e-12))
    program = check_simulated(n.done(y), "fp16")
    assert tactics(program, "LpNormalization") == [tactic]
    assert [s.params["op"]["kind"] for s in program.steps][-2:] == ["Conv", "ActivatedNorm"]


def test_other_l2_norms_of_rows() -> None:
    n = Net()
    y = n.op("LpNormalization", n.matmul(n.input(3, 32), 384), attrs=norm.LpNormAttrs(-1, 2, 0.0))
    program = check_simulated(n.done(n.matmul(y, 16)), "fp16")
    assert tactics(program, "LpNormalization") == ["rows_once"]
    n = Net()
    y = n.op("LpNormalization", n.matmul(n.input(3, 32), 384), attrs=norm.LpNormAttrs(-1, 1, 0.0))
    program = check_simulated(n.done(n.matmul(y, 16)), "fp16")
    assert "no L1 norms" in "; ".join(refusals(program, kind="LpNormalization"))


DEVIATIONS = [(True, True), (True, False), (False, False)]


def deviations(about_mean: bool, centered: bool, length: int = 48) -> Graph:
    n = Net()
    attrs = norm.DeviationNormAttrs(-1, 0.01, 0.1, about_mean, centered)
    x = n.matmul(n.input(12, 32), length)
    y = n.op("DeviationNormalization", x, n.positive(length), n.random(length), attrs=attrs)
    return n.done(n.matmul(y, 16))


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize(("about_mean", "centered"), DEVIATIONS)
def test_divisions_by_other_deviations(about_mean: bool, centered: bool, precision: str) -> None:
    program = check_simulated(deviations(about_mean, centered), precision)
    assert tactics(program, "DeviationNormalization") == ["rows_once"]


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("length", [48, 768, 4096])
@pytest.mark.parametrize(("about_mean", "centered"), DEVIATIONS)
def test_divisions_by_other_deviations_on_a_gpu(about_mean: bool, centered: bool, length: int, precision: str) -> None:
    checked_launches(deviations(about_mean, centered, length), precision)


def test_deviations_over_several_axes_have_the_general_kernel() -> None:
    n = Net()
    attrs = norm.DeviationNormAttrs(-2, 0.01, 0.1, True, False)
    program = check_simulated(
        n.done(n.op("DeviationNormalization", n.input(3, 6, 8), n.random(6, 8), attrs=attrs)), "fp32"
    )
    assert tactics(program, "DeviationNormalization") == ["rows"]


def test_norms_without_an_activation_have_none() -> None:
    n = Net()
    y = n.op("RMSNormalization", n.matmul(n.input(12, 32), 48), n.positive(48))
    program = check_simulated(n.done(n.matmul(y, 16), n.op("Gelu", y)))
    assert tactics(program, "RMSNormalization") == ["rows_once"]
    assert "the only reader of its result is not an activation or a conversion of floats" in refusals(
        program, kind="RMSNormalization"
    )


def test_stages_that_are_refused() -> None:
    stages = (("gelu",),)
    config = rows_kernel.candidates(rows_kernel.Problem("layer_norm", 40, 48, epilogue=stages), of_arch("sm_90a"))[0]
    alone = "stages after the norm allow no addend before it and no quantization"
    for problem in (
        rows_kernel.Problem("layer_norm", 40, 48, add=True, epilogue=stages),
        rows_kernel.Problem("layer_norm", 40, 48, narrow="int8", epilogue=stages),
    ):
        assert rows_kernel.refuse(problem, config) == alone
    reads = rows_kernel.Problem("layer_norm", 40, 48, epilogue=(("add",),))
    assert rows_kernel.refuse(reads, config) == "the stages after a norm have no operands, except an addend"
    for problem in (replace(reads, operation=name, add=True, last=True) for name in ("layer_norm", "l2_norm")):
        assert rows_kernel.refuse(problem, config) is None
    softmax = rows_kernel.Problem("softmax", 40, 48, epilogue=stages)
    assert rows_kernel.refuse(softmax, config) is None
    assert rows_kernel.refuse(replace(softmax, epilogue=(), add=True, last=True), config) == "softmax adds no residual"
    integers = rows_kernel.Problem("layer_norm", 40, 48, stored="int8")
    assert rows_kernel.refuse(integers, config) is None
    alone = "integers are read as 16-bit rows of a norm alone"
    for changed in ({"add": True, "last": True}, {"dtype": "float32"}):
        assert rows_kernel.refuse(replace(integers, **changed), config) == alone  # type: ignore[arg-type]


def row_cases() -> list[tuple[Graph, str, str]]:
    cases: list[tuple[Graph, str, str]] = []
    n = Net()
    x = n.matmul(n.input(2, 6, 32), 48)
    cases.append((n.done(n.op("Softmax", x, attrs=softmax.SoftmaxAttrs(1))), "Softmax", "not along the last axis"))
    n = Net()
    x = n.op("Slice", n.matmul(n.input(4, 32), 48), n.ints(4), n.ints(44), n.ints(1))
    cases.append((n.done(n.op("Softmax", x)), "Softmax", "do not begin at multiples of 16 bytes"))
    n = Net()
    scale = n.op("Abs", n.input(48, name="scale"))
    cases.append(
        (n.done(n.op("RMSNormalization", n.matmul(n.input(4, 32), 48), scale)), "RMSNormalization", "not constant")
    )
    n = Net()
    x = n.matmul(n.input(2, 6, 32), 48)
    two = n.op("LayerNormalization", x, n.random(6, 48), attrs=norm.LayerNormAttrs(1))
    cases.append((n.done(two), "LayerNormalization", "not along the last axis"))
    n = Net()
    flat = n.op("Reshape", n.matmul(n.input(9, 32), 44), n.ints(9 * 44))
    rows = n.op("Reshape", n.op("Slice", flat, n.ints(3), n.ints(8 * 44 + 3), n.ints(0)), n.ints(8, 44))
    cases.append((n.done(n.op("Softmax", rows)), "Softmax", "do not begin at multiples of 4 elements"))
    return cases


@pytest.mark.parametrize("case", range(5))
def test_other_rows_run_elsewhere(case: int) -> None:
    graph, kind, reason = row_cases()[case]
    program = check_simulated(graph)
    apart = kind == "Softmax" and reason == "not along the last axis"
    assert tactics(program, kind) == [
        "rows_flat" if kind == "LayerNormalization" else "rows_widened" if apart else "rows"
    ]
    assert any(reason in why for why in refusals(program, kind=kind))


def cropped(kind: str) -> Graph:
    """Rows of a part of an image, and the inner half of their columns. Swin crops padded windows like this."""
    n = Net()
    x = n.op("Reshape", n.matmul(n.input(60, 32), 64), n.ints(2, 5, 6, 64))
    x = n.op("Slice", x, n.ints(0, 1, 8), n.ints(4, 6, 56), n.ints(1, 2, 3))
    return n.done(n.matmul(n.op(kind, x, *([] if kind == "Softmax" else [n.positive(48)])), 16))


@pytest.mark.parametrize("kind", ["LayerNormalization", "RMSNormalization", "Softmax"])
def test_rows_of_a_part_of_an_image(kind: str) -> None:
    program = check_simulated(cropped(kind))
    assert tactics(program, kind) == ["rows_once"]


def test_rows_are_spread_over_their_axes() -> None:
    spread = rows_kernel.Problem("layer_norm", 40, 48, walk=((2, 1920), (4, 384), (5, 64)))
    config = rows_kernel.candidates(spread, of_arch("sm_90a"))[0]
    assert "#define WALKED 1" in rows_kernel.recipe(spread, config).generated["generated.cuh"]
    assert "multiples of 8" in str(rows_kernel.refuse(replace(spread, walk=((2, 1920), (4, 380), (5, 64))), config))
    assert "do not hold" in str(rows_kernel.refuse(replace(spread, rows=41), config))
    pitched = replace(spread, walk=(), pitches=(0, 52))
    assert "multiples of 8" in str(rows_kernel.refuse(pitched, config))


NARROW = 36
"""A number of channels that is no multiple of eight: products read the rows at a pitch of 40."""


def post_norm(kind: str = "LayerNormalization", windows: bool = False) -> Graph:
    """A layer of Swin V2 with rows of 36 channels: normalized results of products are added to the stream, which products read.
    ``windows``: the rows of 2 x 3 windows are reordered before the norm."""
    n = Net()
    parameters = [n.positive(NARROW), *([n.random(NARROW)] if kind == "LayerNormalization" else [])]
    x = n.matmul(n.input(24, 32), NARROW)
    x = n.op(kind, x, *parameters)
    y = n.matmul(x, NARROW)
    if windows:
        y = n.op("Reshape", y, n.ints(2, 2, 2, 3, NARROW))
        y = n.op("Reshape", n.op("Transpose", y, attrs=TransposeAttrs((0, 2, 1, 3, 4))), n.ints(24, NARROW))
    x = n.op("Add", x, n.op(kind, y, *parameters))
    y = n.matmul(n.op("Gelu", n.matmul(x, 72)), NARROW)
    x = n.op("Add", x, n.op(kind, y, *parameters))
    return n.done(n.matmul(x, 16))


@pytest.mark.parametrize("kind", ["LayerNormalization", "RMSNormalization"])
def test_rows_are_padded_for_products(kind: str) -> None:
    """No launch copies rows for products."""
    program = check_simulated(post_norm(kind))
    assert tactics(program, "Add").count("norm_add") == 2
    kinds = [s.params["op"]["kind"] for s in program.steps]
    assert "Copy" not in kinds
    assert kinds.count("ActivatedNorm") == 2


def test_rows_that_no_product_reads_are_not_padded() -> None:
    for spread in (False, True):
        n = Net()
        x = n.op("LayerNormalization", n.matmul(n.input(24, 32), NARROW), n.positive(NARROW))
        if spread:  # the features of a row are separated before the product
            x = n.matmul(n.op("Reshape", x, n.ints(12, 2 * NARROW)), 16)
        program = check_simulated(n.done(n.op("Softmax", x)))
        (step,) = [s for s in program.steps if s.params["op"]["kind"] == "LayerNormalization"]
        assert step.params["writes"][0][3] == [NARROW, 1]


def test_sums_and_their_norms_are_padded_alike() -> None:
    n = Net()
    x = n.matmul(n.input(24, 32), NARROW)
    total = n.op("Add", n.op("Softmax", x), n.op("Softmax", n.input(24, NARROW, name="y")))
    y = n.op("LayerNormalization", total, n.positive(NARROW), n.random(NARROW))
    program = check_simulated(n.done(n.op("Add", n.matmul(y, NARROW), total)))
    (step,) = [s for s in program.steps if s.params["op"]["kind"] == "AddNorm"]
    assert [w[3] for w in step.params["writes"]] == [[40, 1], [40, 1]]


def test_few_rows_have_a_block_each() -> None:
    """In BERT and ViT at batch 1 on an H200, one row in each of 128 blocks took 0.45 us less than four in each of 32."""
    for rows, length in ((128, 768), (197, 768), (197, 1024)):
        best = rows_kernel.candidates(rows_kernel.Problem("layer_norm", rows, length), of_arch("sm_90a"))[0]
        assert best.blocks(rows_kernel.Problem("layer_norm", rows, length)) == rows


def test_addends_that_repeat_are_read_once() -> None:
    whole = rows_kernel.Problem("layer_norm", 400, 64, add=True, sum=True)
    repeated = replace(whole, period=100)
    config = rows_kernel.candidates(repeated, of_arch("sm_90a"))[0]
    assert whole.bytes - repeated.bytes == 300 * 64 * 2
    assert "#define PERIODIC 1" in rows_kernel.recipe(repeated, config).generated["generated.cuh"]
    assert "a period needs an addend" in str(rows_kernel.refuse(replace(repeated, add=False, sum=False), config))


TOLERANCE = {"fp16": 4e-3, "bf16": 3e-2, "fp32": 4e-6}


def check_on_a_gpu(graph: Graph, precision: str) -> None:
    checked_launches(graph, precision, TOLERANCE[precision])


@pytest.mark.hopper
@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("kind", ["LayerNormalization", "RMSNormalization", "Softmax"])
def test_rows_of_a_part_of_an_image_on_a_gpu(kind: str, precision: str) -> None:
    check_on_a_gpu(cropped(kind), precision)


@pytest.mark.hopper
@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.parametrize("kind", ["LayerNormalization", "RMSNormalization"])
def test_padded_rows_on_a_gpu(kind: str, windows: bool, precision: str) -> None:
    check_on_a_gpu(post_norm(kind, windows), precision)


@pytest.mark.hopper
@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("kind", ["LayerNormalization", "RMSNormalization"])
def test_activations_on_a_gpu(kind: str, activation: str, precision: str) -> None:
    check_on_a_gpu(activated(kind, activation, 300), precision)


@pytest.mark.hopper
@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("size", [3, 14, 15, 33, 65])
@pytest.mark.parametrize("kind", ["ReduceL2", "ReduceMean", "ReduceMax", "ReduceLogSumExp"])
def test_reductions_over_pixels_on_a_gpu(kind: str, size: int, precision: str) -> None:
    n = Net()
    x = n.op("Relu", n.conv(n.input(2, 8, size, size), 24, 1, pads=0, bias=True))
    check_on_a_gpu(
        n.done(n.op(kind, x, n.ints(2, 3)), n.op(kind, x, n.ints(1)), n.op(kind, x, n.ints(1, 2, 3))), precision
    )
