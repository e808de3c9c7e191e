"""The tactic that runs a network's first convolution in one launch: results, refusals, and where it goes first."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from kernels.conv.test_stem import normalized, picture
from support.net import Net
from support.simulated import TOLERANCE, feeds_of, kinds, lowered, refusals, simulate

from optdnn.config import BuildOptions
from optdnn.ir.evaluate import evaluate
from optdnn.ir.graph import Graph, Op, Value
from optdnn.kernels.builder import Builder
from optdnn.kernels.conv import stem_cost as conv_stem_cost
from optdnn.kernels.conv.stem import StemConv
from optdnn.lowering.choose import TacticChoice
from optdnn.lowering.cuda import Prepared, lower_cuda
from optdnn.ops.conv import ConvAttrs
from optdnn.optimize import optimize
from optdnn.runtime.cuda.device import facts_for
from optdnn.runtime.cuda.gpu_facts import of_arch
from optdnn.runtime.program import Program
from optdnn.target_name import TargetName


def chosen(graph: Graph, precision: str = "fp16", target: str = "simulate") -> tuple[Program, Sequence[str]]:
    """The program in which the tactic runs every convolution that it can, and its refusals."""
    options, choices, reasons = BuildOptions(target=target, precision=precision, no_cubins=True), {}, []

    def visit(b: Builder, op: Op, key: str) -> None:
        if op.kind != "Conv":
            return
        if (why := StemConv().refuse(b, op)) is None:
            choices[key] = TacticChoice("conv_stem")
        else:
            reasons.append(why)

    copy = graph.copy()
    optimize(copy, options, target)
    return lower_cuda(
        copy, options, facts_for(TargetName.parse(target)), {}, prepared=Prepared(choices), visit=visit
    ), reasons


def residual(n: Net) -> Value:
    x = n.input(2, 3, 16, 18)
    return n.op("Relu", n.op("Add", n.conv(x, 16, bias=True), n.input(2, 16, 16, 18, name="r")))


NETS: dict[str, tuple[Callable[[Net], Value], str]] = {
    "fp32": (lambda n: n.op("Relu", n.conv(n.input(2, 3, 34, 30), 16, 7, pads=3, strides=2, bias=True)), "fp32"),
    "tf32": (lambda n: n.op("Relu", n.conv(n.input(2, 3, 34, 30), 16, 7, pads=3, strides=2, bias=True)), "tf32"),
    "bytes, fp32": (lambda n: n.conv(normalized(n, picture(n, (22, 18))), 20, 5, strides=2, pads=2), "fp32"),
    "bytes, tf32": (lambda n: n.conv(normalized(n, picture(n, (22, 18))), 20, 5, strides=2, pads=2), "tf32"),
    "a residual, fp32": (residual, "fp32"),
    "7x7/2": (lambda n: n.op("Relu", n.conv(n.input(2, 3, 34, 30), 16, 7, pads=3, strides=2, bias=True)), "fp16"),
    "odd channels": (
        lambda n: n.op("Relu", n.conv(n.input(2, 3, 15, 14), 20, 3, pads=[0, 0, 1, 1], strides=2)),
        "bf16",
    ),
    "an activation, and a residual": (residual, "fp16"),
    "one axis": (lambda n: n.op("Gelu", n.conv(n.input(2, 1, 60), 16, 10, pads=0, strides=5, bias=True)), "fp16"),
    "a column": (
        lambda n: n.op("Gelu", n.conv(n.input(2, 1, 60, 1), 16, (10, 1), pads=(3, 0, 2, 0), strides=5, bias=True)),
        "fp16",
    ),
    "a column, and a residual": (
        lambda n: n.op(
            "Add",
            n.conv(n.input(2, 2, 41, 1), 16, (7, 1), pads=(6, 0, 6, 0), dilations=2),
            n.input(2, 16, 41, 1, name="r"),
        ),
        "bf16",
    ),
    "dilated": (lambda n: n.conv(n.input(1, 2, 13, 17), 8, 3, pads=2, dilations=2), "fp16"),
    "bytes": (lambda n: n.op("Relu", n.conv(normalized(n, picture(n, (22, 18))), 16, 5, strides=2, pads=2)), "fp16"),
    "bytes, channels last": (
        lambda n: n.op("Relu", n.conv(normalized(n, picture(n, (21, 17), True)), 16, 5, strides=2, pads=2)),
        "fp16",
    ),
    "a stage that no kernel of convolutions has": (
        lambda n: n.op("Mul", n.op("Softsign", n.conv(n.input(2, 3, 9, 8), 8)), 2.0),
        "fp16",
    ),
}


@pytest.mark.parametrize("name", NETS)
def test_it_computes_the_network(name: str) -> None:
    build, precision = NETS[name]
    n = Net(seed=3)
    graph = n.done(n.conv(build(n), 8, 1, pads=0) if name != "one axis" else build(n))
    program, _ = chosen(graph, precision)
    assert kinds(program).count("ImageConv") == 1
    assert not {"SpaceToDepthImage"} & set(kinds(program)), "neither a change of layout nor a cast of its own"
    (step,) = [s for s in program.steps if s.params["op"]["kind"] == "ImageConv"]
    assert step.params["tactic"].startswith("conv_stem stem")
    if "bytes" in name:
        assert program.buffers[step.inputs[0]].dtype == np.uint8
        assert any(node.startswith("Sub") for node in step.src)
    feeds, other = feeds_of(graph), evaluate(graph, feeds_of(graph, 2))
    got = simulate(program, feeds)
    for output, want in evaluate(graph, feeds).items():
        error = np.abs(got[output] - want).max()
        assert error <= TOLERANCE[precision] * np.abs(want).max() < np.abs(want - other[output]).max() / 4


REFUSED: dict[str, tuple[Callable[[Net], Value], str]] = {
    "channels": (lambda n: n.conv(n.input(1, 8, 9, 9), 8), "up to 4 channels, not 8"),
    "groups": (lambda n: n.conv(n.input(1, 4, 9, 9), 8, group=2), "not an ungrouped convolution"),
    "prologue": (
        lambda n: n.conv(n.op("Tanh", n.op("Mul", picture(n, (9, 9)), 0.01)), 8),
        "more than a factor and an addend",
    ),
    "a computed bias": (
        lambda n: n.op(
            "Conv",
            picture(n, (9, 9)),
            n.random(8, 3, 3, 3),
            n.input(8, name="bias"),
            attrs=ConvAttrs((1, 1), (1,) * 4, (1, 1)),
        ),
        "its bias is not constant",
    ),
    "window": (lambda n: n.conv(n.input(1, 4, 40, 40), 8, 13, pads=0), "are longer than 512"),
    "no channels": (
        lambda n: n.op(
            "Conv", n.input(1, 0, 9, 9), n.const(np.zeros((8, 0, 3, 3))), attrs=ConvAttrs((1, 1), (1, 1, 1, 1), (1, 1))
        ),
        "it has no channels",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    build, reason = REFUSED[name]
    n = Net()
    program, reasons = chosen(n.done(n.op("Relu", build(n))))
    assert "ImageConv" not in kinds(program)
    assert any(reason in r for r in reasons), reasons


def test_factors_have_16_or_32_bits() -> None:
    n = Net()
    x, weights = n.input(1, 3, 9, 9, dtype=np.float64), n.const(np.ones((8, 3, 3, 3)), np.float64)
    _, reasons = chosen(n.done(n.op("Conv", x, weights, attrs=ConvAttrs((1, 1), (1,) * 4, (1, 1)))), "fp32")
    assert reasons == ["its factors are float16 or bfloat16 or float32, not float64"]


def test_its_configurations_are_offered_by_name() -> None:
    n = Net()
    graph = n.done(n.op("Relu", n.conv(n.input(1, 3, 32, 32), 16, bias=True)))
    options = BuildOptions(target="simulate", precision="fp16")
    optimize(graph, options, "simulate")
    seen: list[str] = []

    def visit(b: Builder, op: Op, key: str) -> None:
        if op.kind == "Conv":
            seen.extend(o.name for o in StemConv().configs(b, op))
            offer = StemConv().named(b, op, seen[-1])
            assert offer is not None
            assert offer.name == seen[-1]
            assert StemConv().named(b, op, "tile0") is None
            assert all(o.row_invariant for o in StemConv().configs(b, op)), "one order of sums"

    lower_cuda(graph, options, of_arch("sm_90a"), {}, visit=visit)
    assert 4 < len(seen) == len(set(seen))


def test_unmeasured_it_goes_first_where_it_is_predicted_to_be_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    n = Net()
    graph = n.done(n.op("Relu", n.conv(n.input(1, 3, 32, 32), 16, 3, strides=2, bias=True)))
    assert kinds(lowered(graph))[0] == "ImageConv"
    assert kinds(lowered(graph, target="cuda:sm_80"))[0] == "ImageConv", "nothing else reads an image there"
    monkeypatch.setattr(conv_stem_cost, "layout_seconds", lambda problem: -1.0)
    program = lowered(graph)
    assert kinds(program)[:2] == ["SpaceToDepthImage", "Conv"]
    (why,) = refusals(program, "conv_stem")
    assert why.startswith("it is predicted to take ")
    assert "a change of layout and conv_sm90" in why
