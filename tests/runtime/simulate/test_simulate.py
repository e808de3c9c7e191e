"""Networks of convolutions on the simulated GPU: right values at any place of tensors in memory, in place where promised."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.net import Net
from support.simulated import check_simulated, feeds_of, kinds, lowered, simulate, tactics

from optdnn.errors import EngineError, InputError, InternalError, RunError, UnsupportedError, UsageError
from optdnn.ir.graph import Graph
from optdnn.ops.index import ConcatAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.ops.softmax import SoftmaxAttrs
from optdnn.runtime.engine import Engine
from optdnn.runtime.program import Buffer, Program
from optdnn.runtime.simulate.runner import SimulateContext, SimulateRunner
from optdnn.types import to_tf32


def residual_net(batch: int = 2) -> Graph:
    """A strided stem, pooling, two residual blocks (one with a projection), a classifier."""
    n = Net()
    x = n.op("Relu", n.bn(n.conv(n.input(batch, 3, 32, 32), 16, 7, strides=2, pads=3)))
    x = n.max_pool(x, pads=1)
    y = n.op("Relu", n.bn(n.conv(x, 16)))
    x = n.op("Relu", n.op("Add", n.bn(n.conv(y, 16)), x))
    skip = n.bn(n.conv(x, 24, 1, pads=0, strides=2))
    y = n.op("Relu", n.bn(n.conv(x, 24, strides=2)))
    x = n.op("Relu", n.op("Add", n.bn(n.conv(y, 24)), skip))
    x = n.op("Flatten", n.op("GlobalAveragePool", x))
    return n.done(n.gemm(x, 10))


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_residual_network(precision: str) -> None:
    program = check_simulated(residual_net(), precision)
    found = kinds(program)
    assert found.count("Conv") == 4  # three convolutions and the classifier
    assert found.count("ConvSum") == 1  # the last convolution of a block, together with the projection
    nodes = {n for s in program.steps for n in s.src}
    assert sum("Conv" in n for n in nodes) == 6, "every convolution is some step's"
    assert found.count("PooledImageConv") == 1
    assert "Pointwise" not in found[1:-1], "everything else is fused"
    assert found[-1] == "Copy" or found[-1] == "Pointwise"  # the cast of the output


def test_concatenation_is_written_in_place() -> None:
    n = Net()
    x = n.conv(n.input(2, 16, 9, 9), 24)
    parts = [n.op("Relu", n.conv(x, 8, 1, pads=0)), n.op("Relu", n.conv(x, 16)), n.max_pool(x, strides=1, pads=1)]
    joined = n.op("Concat", *parts, attrs=ConcatAttrs(1))
    graph = n.done(n.conv(joined, 16, 1, pads=0))
    program = check_simulated(graph)
    assert kinds(program).count("Copy") <= 2, "only the border's changes of order"
    writers = [s.outputs[0] for s in program.steps]
    joint = max(set(writers), key=writers.count)
    assert writers.count(joint) >= 2, "several steps write parts of one buffer"


def test_dense_connections_share_one_buffer() -> None:
    n = Net()
    x = n.conv(n.input(1, 16, 8, 8), 16)
    features = [x]
    for _ in range(3):
        joined = n.op("Concat", *features, attrs=ConcatAttrs(1)) if len(features) > 1 else x
        features.append(n.op("Relu", n.conv(joined, 8)))
    program = check_simulated(n.done(n.conv(n.op("Concat", *features, attrs=ConcatAttrs(1)), 8, 1, pads=0)))
    writers = [s.outputs[0] for s in program.steps]
    assert max(writers.count(w) for w in writers) == 4
    assert len(program.steps) <= 8


def test_parts_that_tma_cannot_address_are_copied() -> None:
    n = Net()
    x = n.conv(n.input(1, 16, 8, 8), 16)
    joined = n.op("Concat", n.conv(x, 12), n.conv(x, 8), attrs=ConcatAttrs(1))
    check_simulated(n.done(n.conv(joined, 16)))


def test_channels_that_are_no_multiple_of_eight() -> None:
    n = Net()
    x = n.op("Relu", n.conv(n.input(2, 5, 11, 7), 21, bias=True))
    check_simulated(n.done(n.conv(x, 3, (3, 1), pads=(1, 0, 1, 0), dilations=1)))


@pytest.mark.parametrize(
    "options",
    [{"strides": 2, "pads": (1, 0, 0, 2)}, {"dilations": 2, "pads": 2}, {"kernel": 1, "pads": 0, "strides": 3}],
)
def test_geometry(options: dict[str, Any]) -> None:
    n = Net()
    check_simulated(n.done(n.op("Sigmoid", n.conv(n.input(2, 16, 13, 10), 24, bias=True, **options))))


def test_one_spatial_axis() -> None:
    n = Net()
    check_simulated(n.done(n.conv(n.op("Relu", n.conv(n.input(2, 8, 31), 16, 5, pads=2)), 8, 3, strides=2)))


def test_stages_that_an_epilogue_cannot_hold_become_a_pointwise_kernel() -> None:
    n = Net()
    x = n.conv(n.input(1, 16, 8, 8), 16, bias=True)
    a, b = n.conv(x, 16), n.conv(x, 16)
    y = n.op("Add", n.op("Relu", n.op("Add", a, x)), b)  # two residuals; the kernel takes one
    program = check_simulated(n.done(n.op("Selu", y)))
    assert kinds(program).count("Conv") == 3


def test_batch_normalization_before_a_convolution() -> None:
    n = Net()
    x = n.conv(n.input(2, 8, 10, 10), 16)
    y = n.conv(n.op("Relu", n.bn(x)), 16)
    check_simulated(n.done(n.conv(n.op("Relu", n.bn(y)), 8), n.op("GlobalMaxPool", x)))


def test_views_cost_nothing() -> None:
    n = Net()
    x = n.matmul(n.input(4, 6, 32), 48)
    x = n.op("Reshape", x, n.ints(4, 6, 3, 16))
    x = n.op("Transpose", x, attrs=TransposeAttrs((2, 0, 1, 3)))
    y = n.op("Slice", x, n.ints(1), n.ints(3), n.ints(0))
    program = check_simulated(n.done(n.op("Relu", y)))
    assert len(program.steps) <= 4


def test_pools() -> None:
    n = Net()
    x = n.conv(n.input(2, 8, 11, 11), 16)
    check_simulated(
        n.done(
            n.max_pool(x, ceil_mode=True),
            n.average_pool(x, pads=1),
            n.average_pool(x, pads=1, include_pad=True, ceil_mode=True),
        )
    )


def test_an_input_may_be_an_output_and_a_constant_too() -> None:
    n = Net()
    x = n.input(2, 3)
    graph = n.done(x, n.op("Relu", x), n.random(2, 2))
    got = simulate(lowered(graph), feeds_of(graph))
    np.testing.assert_allclose(got["y0"], feeds_of(graph)["x"], rtol=1e-3)


# ---------------------------------------------------------------- the program itself


def test_programs_repeat_byte_for_byte() -> None:
    from optdnn.runtime.file.format import encode

    first, second = (b"".join(bytes(p) for p in encode(lowered(residual_net()))) for _ in range(2))
    assert first == second


def test_buffers_that_live_together_do_not_overlap() -> None:
    program = lowered(residual_net())
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for k, s in enumerate(program.steps):
        for i in (*s.inputs, *s.outputs):
            first.setdefault(i, k)
            last[i] = k
    planned = [i for i in first if program.buffers[i].offset is not None]
    assert len(planned) > 5
    pairs = 0
    for a in planned:
        for b in planned:
            if a < b and first[a] <= last[b] and first[b] <= last[a]:
                low, high = (program.buffers[i] for i in sorted((a, b), key=lambda i: program.buffers[i].offset or 0))
                assert (low.offset or 0) + (low.nbytes or 0) <= (high.offset or 0)
                pairs += 1
    assert pairs
    assert all((program.buffers[i].offset or 0) % 256 == 0 for i in planned)


def test_an_overlap_is_seen() -> None:
    """The poisoned arena and the comparison notice two live buffers at one place."""
    graph = residual_net()
    program, feeds = lowered(graph), feeds_of(graph)
    right = simulate(program, feeds)["y0"]
    sizes = [b.nbytes or 0 if b.offset is not None else -1 for b in program.buffers]
    i = int(np.argmax(sizes))
    wrong = [
        replace(b, offset=program.buffers[i].offset) if b.offset is not None and (b.nbytes or 0) < 5000 else b
        for b in program.buffers
    ]
    got = simulate(replace(program, buffers=tuple(wrong)), feeds)["y0"]
    assert not np.allclose(got, right, rtol=1e-2, atol=1e-2)


def test_engine_runs_and_loads(tmp_path: Any) -> None:
    graph = residual_net()
    engine = Engine(lowered(graph))
    engine.save(tmp_path / "e.engine")
    from optdnn import load

    again = load(tmp_path / "e.engine")
    feeds = feeds_of(graph)
    a, b = engine.run(feeds), again.run(feeds)
    np.testing.assert_array_equal(a["y0"], b["y0"])
    out = np.empty_like(a["y0"])
    ctx = again.context()
    assert ctx.run(feeds, out={"y0": out})["y0"] is out
    np.testing.assert_array_equal(out, a["y0"])
    _, times = ctx.profile(feeds)
    assert len(times) == len(again.program.steps) == len(again.facts)
    with pytest.raises(InputError, match="has no streams"):
        ctx.run(feeds, stream=0)


# ---------------------------------------------------------------- refusals


def test_unknown_sizes_are_refused_with_the_option_that_helps() -> None:
    from optdnn.dim import symbol

    n = Net()
    graph = n.done(n.op("Relu", n.input(symbol("batch"), 8)))
    with pytest.raises(
        UsageError,
        match=r"not fixed are batch\n.*--shape x=1\.\.8\.\.32x8 \(in Python: shapes=\{'x': '1\.\.8\.\.32x8'\}\)$",
    ):
        lowered(graph)


def test_operators_without_kernels_are_named_together() -> None:
    n = Net()
    x = n.input(2, 3, 3)
    graph = n.done(n.op("Det", x), n.op("Det", n.op("Neg", x)), n.op("Relu", x))
    with pytest.raises(UnsupportedError, match=r"(?s)no kernels for 2 operators.*Det_1.*Det_3"):
        lowered(graph, strict=True)


def _broken(change: Any) -> Program:
    program = lowered(residual_net())
    number = next(i for i, s in enumerate(program.steps) if s.params["op"]["kind"] == "Conv")
    step = program.steps[number]
    params = {k: {dict: dict, list: list}.get(type(v), str)(v) for k, v in step.params.items()}
    change(params)
    return replace(program, steps=(*program.steps[:number], replace(step, params=params), *program.steps[number + 1 :]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p.pop("op"), "unexpected or missing parts"),
        (lambda p: p.update(tactic=1), "a tactic that is not a name"),
        (lambda p: p["launch"].update(kernel=99), "names kernel 99"),
        (lambda p: p["launch"].update(block=0), "impossible launch"),
        (lambda p: p["launch"].update(grid=[1 << 31, 1, 1]), "impossible launch"),
        (lambda p: p["launch"].update(grid=[1, 1 << 16, 1]), "impossible launch"),
        (lambda p: p["launch"].update(grid=[1, 1, 1 << 16]), "impossible launch"),
        (lambda p: p["launch"].update(shared=(227 << 10) + 1), "impossible launch"),
        (lambda p: p["launch"].update(parameters="xy"), "malformed"),
        (lambda p: p["launch"].update(relocations=[["pointer", 10**6, 0, 0]]), "outside of its parameters"),
        (lambda p: p["launch"].update(relocations=[["pointer", 0, 0, 10**9]]), "points outside of its buffer"),
        (lambda p: p["launch"]["relocations"][-1].__setitem__(6, [10**9, 1]), "tensor map"),
        (lambda p: p["reads"].__setitem__(0, [0, 0, [10**6], [1]]), "has a view of elements 0 to 999999"),
        (lambda p: p["reads"].__setitem__(0, [0, 0, [2], [-1]]), "has a view of elements -1 to"),
        (lambda p: p["writes"].__setitem__(0, p["reads"][0]), "writes one of its inputs"),
        (lambda p: p.update(op={"kind": "Nonsense", "attrs": {}}), "no NumPy kernel"),
    ],
)
def test_malformed_steps_are_refused(change: Any, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        Engine(_broken(change))


def test_other_executors_are_refused() -> None:
    program = lowered(residual_net())
    step = replace(program.steps[0], executor="reference")
    with pytest.raises(EngineError, match="not those of reference"):
        SimulateRunner(replace(program, steps=(step, *program.steps[1:])))


def test_a_write_outside_of_the_arena_is_noticed() -> None:
    graph = residual_net()
    context = SimulateContext(SimulateRunner(lowered(graph)))
    context._raw[3] ^= 1
    with pytest.raises(InternalError, match="outside of the arena"):
        context.run(feeds_of(graph))


def test_a_context_is_for_one_thread() -> None:
    graph = residual_net()
    context = SimulateContext(SimulateRunner(lowered(graph)))
    with context._alone, pytest.raises(RunError, match="running in another thread"):
        context.run(feeds_of(graph))


def test_symbolic_buffers_are_refused() -> None:
    program = lowered(residual_net())
    i = program.steps[1].outputs[0]
    buffers = tuple(Buffer(b.name, b.dtype, ("n",)) if k == i else b for k, b in enumerate(program.buffers))
    with pytest.raises(EngineError, match="no fixed size"):
        SimulateRunner(replace(program, buffers=buffers))


def test_patch_embeddings_are_products() -> None:
    n = Net()
    x = n.conv(n.input(2, 3, 32, 48), 24, 16, pads=0, strides=16, bias=True)
    program = check_simulated(n.done(n.op("Relu", x)))
    assert set(tactics(program, "Conv")) == {"blocks_sm90"}


def test_blocks_of_channels_last_images_are_read_in_place() -> None:
    n = Net()
    x = n.op("Relu", n.conv(n.input(1, 64, 8, 8), 64))
    program = check_simulated(n.done(n.conv(x, 20, 2, pads=0, strides=2)))
    assert set(tactics(program, "Conv")) == {"conv_sm90"}
    assert "Copy" not in [s.params["op"]["kind"] for s in program.steps[2:-1]], "between the convolutions"


def test_upsampling_convolutions_are_products() -> None:
    n = Net()
    x = n.op("Relu", n.conv(n.input(2, 16, 6, 5), 16))
    up = n.conv_transpose(x, 12, 2, bias=True)
    skip = n.conv(n.input(2, 16, 12, 10, name="skip"), 12)
    program = check_simulated(n.done(n.op("Relu", n.op("Add", up, skip)), n.conv_transpose(x, 8, 2)))
    assert set(tactics(program, "ConvTranspose")) == {"subpixel_sm90"}


def test_other_strided_windows_are_convolutions() -> None:
    n = Net()
    x = n.op("Relu", n.conv(n.input(1, 64, 9, 9), 64))
    graph = n.done(n.conv(x, 8, 2, pads=0, strides=2), n.conv_transpose(x, 8, 3), n.conv_transpose(x, 8, 2, pads=1))
    program = check_simulated(graph)  # 2 does not divide 9; windows of 3 overlap; pads crop
    assert set(tactics(program, "Conv")) == {"conv_sm90"}
    assert set(tactics(program, "ConvTranspose")) == {"subpixel_sm90"}


def test_tensors_without_elements() -> None:
    n = Net()
    x = n.input(3, 4)
    empty = n.op("Slice", x, n.ints(2), n.ints(2), n.ints(0))
    graph = n.done(
        empty, n.op("Relu", empty), n.op("ReduceSum", n.op("Exp", empty), n.ints(0)), n.op("Concat", x, empty)
    )
    feeds = feeds_of(graph)
    got = simulate(lowered(graph, "fp32"), feeds)
    assert [a.shape for a in got.values()] == [(0, 4), (0, 4), (1, 4), (3, 4)]
    np.testing.assert_array_equal(got["y2"], np.zeros((1, 4)))
    np.testing.assert_array_equal(got["y3"], feeds["x"])


def places(program: Program, kind: str = "Pointwise") -> list[tuple[int | None, list[int | None]]]:
    """For each step of a kind: the offset of its result in the arena, and the offsets of its operands."""
    at = [b.offset for b in program.buffers]
    return [
        (at[s.outputs[0]], [at[i] for i in s.inputs if i not in s.outputs])
        for s in program.steps
        if s.params["op"]["kind"] == kind
    ]


def test_a_pointwise_result_takes_the_place_of_an_operand_that_is_not_read_again() -> None:
    n = Net()
    x = n.op(
        "Softmax", n.op("MatMul", n.input(4, 16), n.const(n.rng.standard_normal((16, 16)))), attrs=SoftmaxAttrs(-1)
    )
    y = n.op("Softmax", n.op("Add", n.op("Sin", x), n.input(4, 16, name="b")), attrs=SoftmaxAttrs(-1))
    (out, operands), *_ = places(check_simulated(n.done(y), "fp32"))
    assert out is not None
    assert out in operands


def test_a_pointwise_result_does_not_replace_operands_that_are_read_again_or_in_another_order() -> None:
    n = Net()
    x = n.op(
        "Softmax", n.op("MatMul", n.input(16, 16), n.const(n.rng.standard_normal((16, 16)))), attrs=SoftmaxAttrs(-1)
    )
    turned = n.op("Add", x, n.op("Transpose", x, attrs=TransposeAttrs((1, 0))))
    (out, operands), *_ = places(check_simulated(n.done(n.op("Softmax", turned, attrs=SoftmaxAttrs(-1))), "fp32"))
    assert out not in operands, "one operand is read across what is written"
    n = Net()
    x = n.op(
        "Softmax", n.op("MatMul", n.input(4, 16), n.const(n.rng.standard_normal((16, 16)))), attrs=SoftmaxAttrs(-1)
    )
    y = n.op("Softmax", n.op("Sin", x), attrs=SoftmaxAttrs(-1))
    z = n.op("Softmax", n.op("Sub", y, x), attrs=SoftmaxAttrs(-1))
    (out, operands), *_ = places(check_simulated(n.done(z), "fp32"))
    assert out not in operands, "the operand is read again"


def functions(program: Program) -> list[str]:
    """The kernel of each step."""
    return [program.kernels[s.params["launch"]["kernel"]].function for s in program.steps]


def test_tf32_is_for_products_and_only_where_it_was_asked_for() -> None:
    graph = residual_net()
    exact = lowered(graph, "fp32")
    assert not any("tf32" in s.params["op"]["attrs"] for s in exact.steps)
    found = [f for f in functions(exact) if f.startswith("conv_") and "stem" not in f]
    assert found
    assert set(found) <= {"conv_parts_sm90", "conv_fp32"}, "fp32 is multiplied in all its parts"
    program = check_simulated(graph, "tf32")
    marked = [f for f, s in zip(functions(program), program.steps, strict=True) if "tf32" in s.params["op"]["attrs"]]
    assert marked == [f for f in functions(program) if f.startswith("conv_")]
    assert len(marked) == 6
    assert {b.dtype for b in program.buffers} == {np.dtype(np.float32)}
    feeds = feeds_of(graph)
    assert np.abs(simulate(program, feeds)["y0"] - simulate(exact, feeds)["y0"]).max() > 1e-6, "factors are rounded"
    pinned = {next(iter(op.src)): "fp32" for op in graph.order() if op.kind == "Gemm"}
    kept = lowered(graph, "tf32", precision_map=pinned)
    assert sum("tf32" in s.params["op"]["attrs"] for s in kept.steps) == 5
    (last,) = [s for s in kept.steps if set(s.src) & set(pinned)]
    assert "tf32" not in last.params["op"]["attrs"]


@pytest.mark.parametrize("batch", [1, 3])
def test_a_result_of_odd_width_is_not_written_beyond_its_end(batch: int) -> None:
    for precision in ("tf32", "fp16"):
        n = Net()
        x = n.op("Relu", n.gemm(n.input(batch, 16), 24))
        check_simulated(n.done(n.gemm(x, 10)), precision)


def test_tf32_rounds_to_ten_bits() -> None:
    x = np.array([1.0, 1 + 2**-10, 1 + 2**-11, 1 + 3 * 2**-11, -1 - 2**-11 - 2**-20, np.inf, 3e38, 0.0], np.float32)
    want = np.array([1.0, 1 + 2**-10, 1.0, 1 + 2**-9, -1 - 2**-10, np.inf, 3e38, 0.0], np.float32)
    np.testing.assert_allclose(to_tf32(x), want, rtol=2**-11)
    np.testing.assert_array_equal(to_tf32(x)[:6], want[:6])
    np.testing.assert_array_equal(to_tf32(np.arange(3)), np.arange(3))


def test_a_result_that_does_not_fit_in_memory() -> None:
    n = Net()
    program = lowered(n.done(n.op("Relu", n.input(1, 4))))
    for rows in (1 << 40, 1 << 60):  # the second one is larger than the address space
        ((spec, i),) = program.outputs
        program.outputs = ((replace(spec, shape=(rows, 4)), i),)
        program.buffers = tuple(replace(b, shape=(rows, 4)) if k == i else b for k, b in enumerate(program.buffers))
        with pytest.raises(RunError, match="there is no memory for"):
            Engine(program)(np.ones((1, 4), np.float32))
