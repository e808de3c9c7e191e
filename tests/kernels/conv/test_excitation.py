"""The two 1x1 convolutions of squeeze-and-excitation in one launch: where it is done, where not and why, and what it computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.needs import why_no_hopper
from support.net import Net
from support.simulated import check_simulated, feeds_of, kinds, lowered

from optdnn.ir.graph import Graph, Value
from optdnn.kernels.conv import excitation
from optdnn.kernels.conv import excitation_kernel as kernel
from optdnn.kernels.conv.excitation_kernel import Config, Problem
from optdnn.kernels.tactic import Offer
from optdnn.runtime.cuda.compile import nvrtc
from optdnn.runtime.cuda.gpu_facts import of_arch
from optdnn.runtime.cuda.trials.check import check_arena, check_steps
from optdnn.runtime.engine import Engine
from optdnn.runtime.program import Program

GPU = of_arch("sm_90a")


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the cost model were for one launch everywhere."""
    monkeypatch.setattr(excitation, "_apart", lambda problem, gpu: 1.0)


def mean(n: Net, images: int, channels: int) -> tuple[Value, Value]:
    """An image, and the means of its channels."""
    x = n.op("Relu", n.conv(n.input(images, 8, 6, 5), channels, 1, pads=0, bias=True))
    return x, n.op("GlobalAveragePool", x)


def excited(
    n: Net, images: int = 3, channels: int = 48, hidden: int = 12, *, between: str = "Relu", last: str = "Sigmoid", bias: bool = True
) -> list[Value]:  # fmt: skip
    """A squeeze-and-excitation block, and a product that reads what it gives."""
    x, y = mean(n, images, channels)
    y = n.op(between, n.conv(y, hidden, 1, pads=0, bias=bias))
    y = n.op(last, n.conv(y, channels, 1, pads=0, bias=bias))
    return [n.conv(n.op("Mul", x, y), 16, 1, pads=0)]


Build = Callable[[Net], list[Value]]
NETS: dict[str, Build] = {
    "relu": excited,
    "one image, swish": lambda n: excited(n, 1, 96, 4, between="Swish", last="HardSigmoid"),
    "many images": lambda n: excited(n, 21, 72, 40),
    "wide": lambda n: excited(n, 9, 320, 104, between="Swish"),
    "no bias": lambda n: excited(n, bias=False),
}


def of(build: Build) -> Graph:
    n = Net()
    return n.done(*build(n))


@pytest.mark.parametrize("name", NETS)
@pytest.mark.usefixtures("chosen")
def test_one_launch_gives_what_two_give(name: str) -> None:
    program = check_simulated(of(NETS[name]))
    (step,) = [s for s in program.steps if s.params["op"]["kind"] == "SeparableConv"]
    assert sum(node.startswith("Conv") for node in step.src) == 2, "both convolutions are named"


@pytest.mark.usefixtures("chosen")
def test_in_bf16() -> None:
    assert "SeparableConv" in kinds(check_simulated(of(excited), "bf16"))


def two_readers(n: Net) -> list[Value]:
    x, y = mean(n, 2, 48)
    y = n.op("Relu", n.conv(y, 16, 1, pads=0))
    return [n.conv(n.op("Mul", x, n.conv(y, 48, 1, pads=0)), 16, 1, pads=0), n.op("Sigmoid", y)]


def an_output(n: Net) -> list[Value]:
    _, y = mean(n, 2, 48)
    y = n.op("Relu", n.conv(y, 16, 1, pads=0))
    return [n.conv(y, 48, 1, pads=0), y]


def an_addition(n: Net) -> list[Value]:
    _, y = mean(n, 2, 48)
    return [n.op("Add", n.conv(n.op("Relu", n.conv(y, 16, 1, pads=0)), 48, 1, pads=0), y)]


def an_image(n: Net) -> list[Value]:
    x, _ = mean(n, 2, 48)
    return [n.conv(n.op("Relu", n.conv(x, 16, 1, pads=0)), 48, 1, pads=0)]


NOT_ALONE = "that another one makes for it alone"
REFUSED: dict[str, tuple[Build, str]] = {
    "another reader": (two_readers, NOT_ALONE),
    "an output": (an_output, NOT_ALONE),
    "more than a pixel": (an_image, NOT_ALONE),
    "an addition": (an_addition, "more than activations"),
    "odd channels": (lambda n: excited(n, channels=20), "in eights"),
    "too wide": (lambda n: excited(n, channels=2048, hidden=2048), "no cluster's shared memory"),
}


def reasons(program: Program) -> list[str]:
    rows: Any = program.meta["tactics"]
    return [r["reason"] for row in rows for r in row.get("refused", []) if r["tactic"] == "excitation_sm90"]


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.usefixtures("chosen")
def test_refused_with_its_reason(name: str) -> None:
    build, reason = REFUSED[name]
    program = lowered(of(build), no_cubins=True)
    assert "SeparableConv" not in kinds(program)
    assert any(reason in found for found in reasons(program)), reasons(program)


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"precision": "fp32"}, "16-bit floats"), ({"target": "cuda:sm_80", "no_cubins": True}, "sm_80")],
)
@pytest.mark.usefixtures("chosen")
def test_other_machines_and_types_are_refused(options: dict[str, Any], reason: str) -> None:
    program = lowered(of(excited), **options)
    assert any(reason in found for found in reasons(program))


@pytest.mark.parametrize("faster", [False, True])
def test_unmeasured_the_cost_model_decides(faster: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(excitation, "_apart", lambda problem, gpu: 1.0 if faster else 1e-9)
    program = lowered(of(excited))
    assert ("SeparableConv" in kinds(program)) == faster
    assert faster or any("two launches are predicted" in r for r in reasons(program))


P = Problem(16, 1536, 64, 1536)


@pytest.mark.parametrize(
    ("problem", "config", "reason"),
    [
        (replace(P, dtype="float32"), Config(8, 8), "16-bit floats"),
        (replace(P, results=100), Config(8, 8), "in eights"),
        (replace(P, epilogue=(("bias",), ("add",))), Config(8, 8), "nothing is added"),
        (P, Config(16, 8), "not a cluster"),
        (P, Config(8, 3), "not a cluster"),
        (replace(P, hidden=768), Config(8, 16), "shared memory"),
    ],
)
def test_refused_configurations(problem: Problem, config: Config, reason: str) -> None:
    assert kernel.refuse(P, Config(8, 8), GPU) is None
    assert reason in (kernel.refuse(problem, config, GPU) or "")


@pytest.mark.parametrize("split", [2, 4, 8, 16])
@pytest.mark.parametrize("sizes", [(48, 12, 48), (1536, 64, 1536), (440, 110, 440), (960, 240, 960)])
def test_rows_in_shared_memory_lie_in_different_banks(sizes: tuple[int, int, int], split: int) -> None:
    problem, config = Problem(1, *sizes), Config(1, split)
    for pitch, depth in zip(
        kernel.pitches(problem, config), (sizes[0], split * config.hidden_block(problem)), strict=True
    ):
        assert pitch >= depth
        for rows in ((0, 1), (2, 3), (4, 5), (6, 7)):  # eight lanes read 16 bytes each at a time
            banks = [(row * pitch * 2 + lane * 16) % 128 for row in rows for lane in range(4)]
            assert len(set(banks)) == 8
    assert config.hidden_block(problem) * split >= problem.hidden
    assert config.out_block(problem) * split >= problem.results


def test_packed_matrices_have_zeros_behind() -> None:
    packed = kernel.pack(np.ones((3, 5), np.float16), 8, 32)
    assert packed.sum() == 15
    assert packed[:3, :5].all()


@pytest.mark.nvrtc
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("config", [Config(1, 2), Config(8, 8), Config(4, 16)], ids=str)
def test_it_compiles_without_spills(config: Config, dtype: str) -> None:
    problem = replace(P, dtype=dtype, between=(("bias",), ("silu",)), epilogue=(("bias",), ("sigmoid",)))
    _, log = nvrtc.compile_recipe(kernel.recipe(problem, config, checked=True), resources=True)
    assert " 0 bytes spill stores" in log


@pytest.mark.gpu
@pytest.mark.skipif(why_no_hopper() is not None, reason=why_no_hopper() or "")
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("config", [Config(i, s) for i in (1, 3, 8) for s in (2, 4, 8, 16)], ids=str)
@pytest.mark.parametrize("name", NETS)
@pytest.mark.usefixtures("chosen")
def test_each_configuration(name: str, config: Config, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(excitation, "_offers", lambda problem, gpu: (Offer(config, 1e-6),))
    graph = of(NETS[name])
    context: Any = Engine(lowered(graph, precision, target="cuda:sm_90a")).context()
    feeds = feeds_of(graph)
    found = check_steps(context, feeds)
    assert "SeparableConv" in {e.kind for e in found}
    assert not [e for e in found if not e.error < {"fp16": 4e-3, "bf16": 3e-2}[precision]]
    assert not check_arena(context.runner, feeds)
