"""Products whose result a gate per image and channel multiplies: results, refusals, tiles on a GPU, and compilation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from support.net import Net
from support.on_gpu import checked_program
from support.one_config import CONFIGS, STORED, only_of
from support.simulated import TOLERANCE, check_simulated, feeds_of, kinds, lowered, refusals, tactics
from support.spills import check_spills

from optdnn.errors import InternalError
from optdnn.ir.epilogue import images_of
from optdnn.ir.graph import Graph
from optdnn.kernels.conv import implicit_gemm
from optdnn.kernels.conv.implicit_gemm import Config
from optdnn.kernels.conv.problem import Problem, Source
from optdnn.kernels.gemm.gated import GatedGemm
from optdnn.ops.index import SplitAttrs
from optdnn.ops.shape import TransposeAttrs

NAME = "gemm_gated_sm90"


def gated(
    images: int = 3, rows: int = 40, width: int = 72, *, residual: str = "after", gates: str = "split", bias: bool = True,
    depth: int = 136,
) -> Graph:  # fmt: skip
    """``x + gate * (y W + b)``. ``residual``: where it is added ("after" or "before" the gate, or ""). ``gates``: where the gate
    comes from."""
    n = Net()
    x, y = n.op("Tanh", n.input(images, rows, width)), n.input(images, rows, depth)
    shape = {"one": (1, 1, width), "rows": (images, rows, 1), "each": (images, rows, width), "row": (1, rows, width)}
    if gates in shape:
        gate = n.op("Sigmoid", n.input(*shape[gates]))
    elif gates == "across":
        gate = n.op("Transpose", n.op("Sigmoid", n.input(width, images, 1)), attrs=TransposeAttrs((1, 2, 0)))
    elif gates == "constant":
        gate = n.random(1, 1, width)
    else:
        table = n.op("Sigmoid", n.input(images, 1, 3 * width))
        gate = n.op("Split", table, n.ints(width, width, width), attrs=SplitAttrs(-1), outputs=3)[1]
    z = n.op("MatMul", y, n.random(depth, width))
    z = n.op("Add", z, n.random(width)) if bias else z
    z = n.op("Add", z, x) if residual == "before" else z
    z = n.op("Mul", gate, z)
    return n.done(n.op("Add", x, z) if residual == "after" else n.op("Relu", z))


def of_matrices() -> Graph:
    """Gates of batch and head: two leading axes."""
    n = Net()
    gate = n.op("Sigmoid", n.input(2, 3, 1, 64))
    return n.done(n.op("Relu", n.op("Mul", n.op("MatMul", n.input(2, 3, 16, 72), n.random(72, 64)), gate)))


NETS: dict[str, Callable[[], Graph]] = {
    "after": gated,
    "before": lambda: gated(residual="before"),
    "no residual": lambda: gated(residual="", bias=False),
    "one image of odd size": lambda: gated(1, 37),
    "one gate for all images": lambda: gated(2, 13, gates="one"),
    "a gate that lies across": lambda: gated(gates="across"),
    "images of eight rows": lambda: gated(21, 8, 136),
    "channels in fours": lambda: gated(width=76),
    "two leading axes": of_matrices,
    "more tiles than multiprocessors": lambda: gated(5, 1000, 648, depth=64),
}


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("name", NETS)
def test_the_launch_multiplies_by_the_gate(name: str, precision: str) -> None:
    program = check_simulated(NETS[name](), precision)
    assert tactics(program, "MatMul") == [NAME]
    assert kinds(program)[-2:] == ["Conv", "Pointwise"]  # the last one converts the result to fp32


@pytest.mark.parametrize(
    ("build", "precision", "because"),
    [
        (lambda: gated(rows=36), "fp16", "images of 36 rows: 8 neighboring rows must belong to one image"),
        (gated, "fp32", "the kernel takes operands of 16 or 8 bits, or tf32 where that was requested, not float32"),
        (gated, "tf32", "it is for 16-bit floats"),
        *(
            (lambda gates=gates: gated(gates=gates), "fp16", "no factor per image and channel multiplies its result")
            for gates in ("rows", "each", "row", "constant")
        ),
    ],
)
def test_refusals(build: Callable[[], Graph], precision: str, because: str) -> None:
    program = lowered(build(), precision)
    assert because in refusals(program, NAME)
    assert NAME not in tactics(program, "MatMul")


def test_rows_in_another_order_are_refused() -> None:
    n = Net()
    y = n.op("Transpose", n.op("Tanh", n.input(16, 3, 64)), attrs=TransposeAttrs((1, 0, 2)))
    z = n.op("Mul", n.op("MatMul", y, n.random(64, 64)), n.op("Sigmoid", n.input(3, 1, 64)))
    program = lowered(n.done(n.op("Relu", z)))
    assert "its rows do not lie one after the other" in refusals(program, NAME)


@pytest.mark.parametrize(
    ("gate", "shape", "images"),
    [
        ((4, 1, 8), (4, 6, 8), 4), ((8,), (4, 6, 8), 1), ((1, 1, 8), (4, 6, 8), 1), ((2, 3, 1, 8), (2, 3, 5, 8), 6),
        ((2, 1, 1, 8), (2, 3, 5, 8), 2), ((1, 1, 8), (1, 6, 8), 1), ((4, 1, 8), (4, 1, 8), 0), ((6, 8), (4, 6, 8), 0),
        ((4, 1, 1), (4, 6, 8), 0), ((1, 3, 1, 8), (2, 3, 5, 8), 0), ((8,), (8,), 0),
    ],
)  # fmt: skip
def test_images_of(gate: tuple[int, ...], shape: tuple[int, ...], images: int) -> None:
    assert images_of(gate, shape) == images


PROBLEM = Problem(120, 72, (Source(1, 1, 136),), (("bias",), ("image_scale",), ("add",)), image_rows=40)


@pytest.mark.parametrize(
    "fields",
    [
        {"image_rows": 0}, {"image_rows": 20}, {"epilogue": (("bias",),)}, {"out": "float32"},
        {"batch": 1, "sources": (Source(40, 3, 136, (3, 3), padding=(1, 1, 1, 1)),)},
    ],
)  # fmt: skip
def test_problems_that_there_are_not(fields: dict[str, Any]) -> None:
    with pytest.raises(InternalError, match="factors per image are of 16-bit rows"):
        replace(PROBLEM, **fields)


def test_direct_stores_leave_registers_for_the_next_image() -> None:
    config = Config(2, 1, 2, 96, 2, split=3)
    plain = replace(PROBLEM, epilogue=(("bias",), ("add",)), image_rows=0)
    assert implicit_gemm.refuse(plain, config) is None
    assert "accumulators and addresses exceed" in (implicit_gemm.refuse(PROBLEM, config) or "")


@pytest.mark.nvrtc
@pytest.mark.parametrize("config", [CONFIGS[0], CONFIGS[3], CONFIGS[5], CONFIGS[6], CONFIGS[10]], ids=str)
def test_compiles_without_spills(config: Config) -> None:
    check_spills(implicit_gemm.recipe(PROBLEM, config))


@pytest.mark.hopper
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("config", [*CONFIGS, *STORED], ids=str)
@pytest.mark.parametrize("name", NETS)
def test_each_configuration(name: str, config: Config, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    only_of(monkeypatch, GatedGemm, config)
    graph = NETS[name]()
    program = lowered(graph, precision, target="cuda:sm_90a")
    assert tactics(program, "MatMul") == [NAME]
    checked_program(program, feeds_of(graph), TOLERANCE[precision])
