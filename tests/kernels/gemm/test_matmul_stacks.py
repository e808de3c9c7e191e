"""Products of two computed stacks of matrices on Hopper's kernel: all memory layouts of operands, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from support.net import Net, built
from support.on_gpu import checked_program
from support.simulated import TOLERANCE, feeds_of, lowered, simulate

from optdnn.errors import InternalError
from optdnn.ir.evaluate import evaluate
from optdnn.ir.graph import Graph, Value
from optdnn.kernels.builder import Builder
from optdnn.kernels.conv import configs, hopper_launch
from optdnn.kernels.conv import implicit_gemm as conv
from optdnn.kernels.conv.implicit_gemm import Config
from optdnn.kernels.conv.problem import Problem, Source
from optdnn.ops.shape import TransposeAttrs
from optdnn.runtime.cuda.gpu_facts import of_arch
from optdnn.runtime.program import Program


def heads(n: Net, x: Value, count: int) -> Value:
    """[batch, position, heads * features] -> [batch, heads, position, features], a view."""
    batch, length, width = n.dims(x)
    split = n.op("Reshape", x, n.ints(int(batch), int(length), count, int(width) // count))
    return n.op("Transpose", split, attrs=TransposeAttrs((0, 2, 1, 3)))


def plain(n: Net) -> Value:
    return n.op("MatMul", n.input(2, 3, 20, 40), n.input(2, 3, 40, 72, name="y"))


def two_matrices(n: Net) -> Value:
    return n.op("MatMul", n.input(130, 264), n.input(264, 200, name="y"))


def odd_sizes(n: Net) -> Value:
    return n.op("MatMul", n.input(5, 33, 65), n.input(5, 65, 30, name="y"))


def with_epilogue(n: Net) -> Value:
    x = n.op("MatMul", n.input(6, 100, 64), n.input(6, 64, 40, name="y"))
    x = n.op("Add", n.op("Mul", x, n.const(np.float32(0.3))), n.input(6, 100, 40, name="z"))
    return n.op("Relu", x)


def with_bias(n: Net) -> Value:
    return n.op("Add", n.op("MatMul", n.input(3, 9, 128), n.input(3, 128, 72, name="y")), n.random(72))


def transposed(n: Net) -> Value:
    y = n.op("Transpose", n.input(4, 72, 96, name="y"), attrs=TransposeAttrs((0, 2, 1)))
    return n.op("MatMul", n.input(4, 50, 96), y)


def both_turned(n: Net) -> Value:
    x = n.op("Transpose", n.input(4, 96, 48), attrs=TransposeAttrs((0, 2, 1)))
    return n.op("MatMul", x, n.input(4, 96, 56, name="y"))


def of_heads(n: Net) -> Value:
    return n.op("MatMul", heads(n, n.input(2, 24, 3 * 64), 3), n.input(2, 3, 64, 80, name="y"))


def constant_left(n: Net) -> Value:
    x = n.op("MatMul", n.random(40, 36), n.input(3, 36, 64))
    return n.op("Add", x, n.input(3, 40, 64, name="z"))


def constant_left_of_one(n: Net) -> Value:
    return n.op("MatMul", n.random(128, 256), n.input(1, 256, 96))


def constant_left_of_more_axes(n: Net) -> Value:
    return n.op("MatMul", n.random(1, 1, 40, 36), n.input(3, 36, 64))


def constant_left_stack(n: Net) -> Value:
    """Maps of each head, for all sequences."""
    return n.op("MatMul", n.random(1, 3, 40, 36), heads(n, n.input(4, 36, 3 * 64), 3))


def shared_right(n: Net) -> Value:
    """The scores of relative positions (DeBERTa): all sequences share the keys of positions."""
    return n.op("MatMul", heads(n, n.input(2, 24, 3 * 64), 3), n.input(1, 3, 64, 80, name="y"))


def shared_left(n: Net) -> Value:
    return n.op("MatMul", n.input(2, 1, 20, 64), n.input(2, 3, 64, 80, name="y"))


def shared_odd(n: Net) -> Value:
    return n.op("MatMul", n.input(4, 20, 33), n.input(1, 33, 30, name="y"))


NETS: dict[str, Callable[[Net], Value]] = {
    f.__name__: f
    for f in (
        plain,
        two_matrices,
        odd_sizes,
        with_epilogue,
        with_bias,
        transposed,
        both_turned,
        of_heads,
        constant_left,
        constant_left_of_one,
        constant_left_of_more_axes,
        constant_left_stack,
        shared_right,
        shared_left,
        shared_odd,
    )
}


def program_of(name: str, precision: str = "fp16", target: str = "simulate") -> tuple[Graph, Program]:
    graph = built(NETS[name])
    return graph, lowered(graph, precision, target=target)


def products(program: Program) -> list[str]:
    """The tactics of the matrix products."""
    return [s.params["tactic"].split()[0] for s in program.steps if s.params.get("op", {}).get("kind") == "MatMul"]


@pytest.mark.parametrize("name", NETS)
def test_products_of_computed_stacks(name: str) -> None:
    graph, program = program_of(name)
    assert products(program) == ["matmul_sm90"]
    feeds = feeds_of(graph)
    (got,), (want,) = simulate(program, feeds).values(), evaluate(graph, feeds).values()
    assert float(np.abs(got - want).max()) <= TOLERANCE["fp16"] * float(np.abs(want).max())


@pytest.mark.hopper
@pytest.mark.parametrize(
    "name",
    ["constant_left", "constant_left_of_one", "constant_left_stack", "shared_right", "shared_left", "shared_odd"],
)
def test_shared_matrices_on_a_gpu(name: str) -> None:
    graph, program = program_of(name, target="cuda:sm_90a")
    assert products(program) == ["matmul_sm90"]
    checked_program(program, feeds_of(graph), TOLERANCE["fp16"])


def test_the_stages_after_a_product_are_in_its_kernel() -> None:
    for name, stages in (("with_epilogue", 4), ("with_bias", 1)):
        _, program = program_of(name)
        (op,) = (s.params["op"] for s in program.steps if s.params["op"]["kind"] == "MatMul")
        assert len(op["attrs"]["epilogue"]) == stages


def test_other_kernels_run_the_problems_that_it_refuses() -> None:
    def broadcast(n: Net) -> Value:
        return n.op("MatMul", n.input(4, 1, 2, 20, 64), n.input(1, 3, 1, 64, 72, name="y"))

    def constant(n: Net) -> Value:
        return n.op("MatMul", n.random(1, 2, 1, 20, 64), n.input(4, 2, 3, 64, 72))

    for build, precision in ((plain, "fp32"), (plain, "tf32"), (broadcast, "fp16"), (constant, "fp16")):
        program = lowered(built(build), precision)
        assert products(program) == ["matmul_tiled"], precision


PRODUCT = Problem(100, 72, (Source(1, 1, 520),), stack=(12, 2), across=True)


@pytest.mark.parametrize(
    "config",
    [
        Config(1, 1, 1, 64, 3, 2),
        Config(1, 1, 1, 64, 3, direct=True),
        Config(1, 1, 1, 64, 3, stationary=True),
        Config(1, 1, 1, 64, 3, share=(1, 2)),
    ],
)
def test_configurations_that_a_stack_refuses(config: Config) -> None:
    assert conv.refuse(PRODUCT, Config(1, 1, 1, 64, 3)) is None
    assert "stack" in (conv.refuse(PRODUCT, config) or "")


def test_a_stack_has_tiles_of_every_product() -> None:
    config = Config(1, 1, 1, 64, 3)
    assert config.joint_tiles(PRODUCT) == (2, 24 * 2 * 2)
    assert PRODUCT.flops == 24 * 2 * 100 * 72 * 520
    assert PRODUCT.k_steps == 9
    found = configs.candidates(PRODUCT, of_arch("sm_90a"), 20)
    assert found
    assert all(conv.refuse(PRODUCT, c) is None for c in found)


def test_few_products_of_long_rows_are_cut_along_k() -> None:
    """Gram matrices of one tile each. Alone they would leave most multiprocessors idle."""
    device = of_arch("sm_90a")
    gram = Problem(64, 64, (Source(1, 1, 16384),), stack=(4, 1))
    best = configs.candidates(gram, device, 1)[0]
    assert best.stream
    assert hopper_launch.ranked(gram, device)[0].config == best
    short = Problem(64, 64, (Source(1, 1, 4096),), stack=(8, 1))
    first, second, *_ = (offer.config for offer in hopper_launch.ranked(short, device))
    assert not first.stream, "short sums were faster without it"
    assert second.stream
    assert 100 <= conv.grid_blocks(gram, best, device) <= device.multiprocessors
    for other in (
        replace(gram, stack=None),
        replace(gram, stack=(200, 1)),
        Problem(64, 64, (Source(1, 1, 256),), stack=(4, 1)),
    ):
        assert not any(c.stream for c in configs.candidates(other, device, 400))


def test_a_stack_is_of_matrices_of_16_bits() -> None:
    with pytest.raises(InternalError, match="products of 16-bit matrices"):
        Problem(100, 72, (Source(2, 2, 64),), stack=(2, 1))
    with pytest.raises(InternalError, match="products of 16-bit matrices"):
        Problem(128, 80, (Source(1, 1, 64),), dtype="int8", stack=(2, 1))
    with pytest.raises(InternalError, match="lie along K"):
        Problem(100, 72, (Source(1, 1, 64),), across=True)


def test_a_constant_stack_is_rearranged_when_built_and_odd_rows_get_a_pitch() -> None:
    """Rows of 14 elements are no multiple of 16 bytes. Still, no launch copies the constant or the product."""
    n = Net()
    product = n.op("MatMul", n.op("Relu", n.input(3, 40, 64)), n.random(3, 64, 14))
    graph = n.done(n.op("Softmax", product))
    program = lowered(graph)
    assert [t["tactic"] for t in program.meta["tactics"] if t["kind"] == "MatMul"] == ["matmul_sm90"]
    assert sum(str(s.params.get("tactic")).startswith("matmul_sm90") for s in program.steps) == 1
    feeds = feeds_of(graph)
    (want,), (got,) = evaluate(graph, feeds).values(), simulate(program, feeds).values()
    np.testing.assert_allclose(got, want, atol=TOLERANCE["fp16"])


def test_only_constants_are_rearranged() -> None:
    n = Net()
    b = Builder(n.done(n.op("Relu", n.input(3, 4))), of_arch("sm_90a"))
    with pytest.raises(InternalError, match="only constants can be rearranged"):
        b.rearranged(b.new("x", np.dtype(np.float16), (3, 4)), "copy")


def test_a_rearranged_constant_has_zeros_in_its_gaps() -> None:
    n = Net()
    b = Builder(n.done(n.op("Relu", n.input(3, 4))), of_arch("sm_90a"))
    x = b.constant(np.arange(6, dtype=np.float16).reshape(2, 3), "x")
    turned = b.rearranged(x.view((3, 2), (1, 3)), "turned", (4, 1))
    assert (turned.shape, turned.strides) == ((3, 2), (4, 1))
    blob = b.blobs[b.buffers[turned.buffer].blob]  # type: ignore[index]
    assert blob.tolist() == [0, 3, 0, 0, 1, 4, 0, 0, 2, 5, 0, 0]
