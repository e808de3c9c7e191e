"""The mean of an image and its product with a matrix in one launch: what it computes, where it is taken, what it refuses."""

from __future__ import annotations

import pytest
from support.net import Net
from support.simulated import check_simulated, kinds, lowered

from optdnn.ir.graph import Graph
from optdnn.ops.reduce import ReduceAttrs
from optdnn.runtime.cuda import nvrtc, pool_gemv
from optdnn.runtime.cuda.conv_cost import h200
from optdnn.tactics.cuda import neighbours


@pytest.fixture
def proposed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken wherever the cost model says so."""
    monkeypatch.setattr(neighbours, "TAKE_MEANS", True)


def net(
    channels: int = 512, columns: int = 1003, size: tuple[int, int] = (7, 7), *, images: int = 1, by: str = "Flatten",
    product: str = "Gemm", again: bool = False, residual: bool = False, depthwise: bool = False,
) -> Graph:  # fmt: skip
    """A convolution, so that the image is channels-last, its mean, and a fully connected layer."""
    n = Net()
    x = n.op("Relu", n.conv(n.input(images, 16, *size), channels, 1, pads=0))
    if depthwise:
        x = n.op("Relu", n.conv(x, channels, 3, group=channels))
    if by == "ReduceMean":
        flat = pooled = n.op("ReduceMean", x, n.ints(2, 3), attrs=ReduceAttrs(keepdims=False))
    else:
        pooled = n.op("GlobalAveragePool", x)
        flat = n.op("Flatten", pooled) if by == "Flatten" else n.op("Reshape", pooled, n.ints(images, channels))
    y = n.gemm(flat, columns) if product == "Gemm" else n.matmul(flat, columns)
    if residual:
        y = n.op("Add", y, n.input(images, columns, name="r"))
    if product == "Gemm with an activation":
        y = n.op("Relu", y)
    return n.done(y, *([n.op("Relu", pooled)] if again else []))


@pytest.mark.usefixtures("proposed")
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize(
    "graph",
    [
        net(),
        net(1280, 1000, product="MatMul"),
        net(1024, 1000, (8, 6), by="Reshape", product="Gemm with an activation"),
        net(512, 1000, (7, 7), by="ReduceMean", images=2),
    ],
)
def test_one_launch_computes_both(graph: Graph, precision: str) -> None:
    program = check_simulated(graph, precision)
    assert kinds(program).count("MeanProduct") == 1
    assert "GlobalAveragePool" not in kinds(program)
    (step,) = [s for s in program.steps if s.params["op"]["kind"] == "MeanProduct"]
    assert any("Pool" in n or "Reduce" in n for n in step.src)
    assert any("Gemm" in n or "MatMul" in n for n in step.src)


def reason(graph: Graph, precision: str = "fp16") -> str:
    program = check_simulated(graph, precision)
    assert "MeanProduct" not in kinds(program)
    found = next(t for t in program.meta["tactics"] if t["kind"] in ("Gemm", "MatMul"))
    return next(r["reason"] for r in found["refused"] if r["tactic"] == "pool_gemv")


@pytest.mark.usefixtures("proposed")
@pytest.mark.parametrize(
    ("graph", "why"),
    [
        (net(again=True), "its rows are not the means of images, read by it alone"),
        (net(residual=True), "something else than constants is added"),
        (net(images=3), "up to 2 images, not 3"),
        (net(516), "in channels-last order, in eights"),
        (net(depthwise=True), "the depthwise convolution before it sums its results"),
        (net(10240, 64), "no configuration of its kernel fits"),
        (net(512, 1000, (96, 96)), "us are predicted for both"),
    ],
)
def test_refused(graph: Graph, why: str) -> None:
    assert why in reason(graph)


def test_not_taken_before_it_is_measured_to_win() -> None:
    assert "has not been measured to be faster" in reason(net())


@pytest.mark.usefixtures("proposed")
def test_refused_in_other_types() -> None:
    assert "16-bit floats, not float32" in reason(net(), "fp32")


@pytest.mark.usefixtures("proposed")
def test_a_row_of_a_batch_must_not_depend_on_its_size() -> None:
    assert "MeanProduct" not in kinds(lowered(net(), row_invariant=True))


def test_the_kernels_limits() -> None:
    problem = pool_gemv.Problem(1, 49, 2048, 1000)
    good = pool_gemv.candidates(problem, h200())[0]
    assert pool_gemv.refuse(problem, good) is None
    assert pool_gemv.describe(problem, good, 0, 2048, 1000).grid[0] % good.cluster == 0
    for wrong, why in (
        (pool_gemv.Problem(3, 49, 2048, 1000), "up to 2 images"),
        (pool_gemv.Problem(1, 49, 2048, 1000, dtype="float32"), "16-bit"),
        (pool_gemv.Problem(1, 49, 2044, 1000), "a multiple of 8 channels"),
        (pool_gemv.Problem(1, 49, 2048, 1000, (("bias",), ("add",))), "adds no other tensor"),
    ):
        assert why in str(pool_gemv.refuse(wrong, good))
    for config, why in (
        (pool_gemv.Config(8, 8, 3), "not a tile"),
        (pool_gemv.Config(4, 4, 2), "the threads of a block can send"),
        (pool_gemv.Config(16, 4, 8), "do not fit a thread's registers"),
    ):
        assert why in str(pool_gemv.refuse(problem, config))
    wide = pool_gemv.Problem(1, 49, 10240, 8)
    assert "static shared memory" in str(pool_gemv.refuse(wide, pool_gemv.Config(2, 16, 8)))


def test_kernels_do_not_spill() -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="no cuda-bindings: pip install 'optdnn[cuda]'")
    for channels, dtype in ((2048, "float16"), (1280, "bfloat16")):
        problem = pool_gemv.Problem(1, 49, channels, 1000, dtype=dtype)
        config = pool_gemv.candidates(problem, h200())[0]
        (kernel,) = nvrtc.resources(pool_gemv.recipe(problem, config)).values()
        assert kernel.spill_bytes == kernel.stack_bytes == 0
        assert kernel.shared_bytes <= pool_gemv.shared_bytes(problem, config) + 64
