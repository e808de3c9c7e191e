"""A convolution and the pixel shuffle after it in one launch: results, and refusals."""

from __future__ import annotations

import pytest
from support.net import Net
from support.simulated import OTHER_MACHINES_AND_TYPES, check_not_taken, check_simulated, kinds

from optdnn.ir.graph import Graph, Value
from optdnn.ops.index import BlockAttrs

TACTIC = "conv_shuffle_sm90"


def net(
    filters: int = 64, kernel: int = 3, *, block: int = 2, mode: str = "CRD", before: str = "", after: str = "",
    residual: bool = False, again: bool = False,
) -> Graph:  # fmt: skip
    """An upsampler between two convolutions; ``before`` and ``after``: activations around the shuffle."""
    n = Net()

    def activated(x: Value, kind: str) -> Value:
        return n.op(kind, x) if kind else x

    x = n.op("Relu", n.conv(n.input(2, 8, 9, 10), 24))
    y = n.conv(x, filters, kernel, pads=kernel // 2, bias=True)
    if residual:
        y = n.op("Add", y, n.op("Relu", n.conv(x, filters, 1, pads=0)))
    y = activated(y, before)
    z = activated(n.op("DepthToSpace", y, attrs=BlockAttrs(block, mode)), after)
    return n.done(n.conv(z, 16), *([n.conv(y, 16)] if again else []))


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize(
    "graph",
    [
        net(), net(kernel=1), net(72, block=3, kernel=5), net(128, block=4), net(mode="DCR"),
        net(before="Relu"), net(after="LeakyRelu"), net(before="Tanh", after="Sigmoid"),
    ],
    ids=["3x3", "1x1", "blocks of 9 pixels", "blocks of 16 pixels", "DCR", "before", "after", "both"],
)  # fmt: skip
def test_one_launch_computes_both(graph: Graph, precision: str) -> None:
    program = check_simulated(graph, precision)
    assert kinds(program).count("ConvBlocks") == 1
    assert not {"Copies", "Relu", "LeakyRelu"} & set(kinds(program))
    (step,) = [s for s in program.steps if s.params["op"]["kind"] == "ConvBlocks"]
    assert step.params["tactic"].startswith(TACTIC)
    assert {"Conv", "DepthToSpace"} <= {name.split("_")[0] for name in step.src}


@pytest.mark.parametrize(
    ("graph", "why"),
    [
        (net(again=True), "no DepthToSpace of whole blocks of channels is the only reader of the result"),
        (net(mode="DCR", residual=True), "its stages read other tensors than constants"),
        (net(48), "the shuffled image is not channels-last, with a multiple of 8 channels"),
    ],
)
def test_refused(graph: Graph, why: str) -> None:
    check_not_taken(graph, TACTIC, why, "ConvBlocks", precision="fp16", no_cubins=True)


@pytest.mark.parametrize(("options", "why"), OTHER_MACHINES_AND_TYPES)
def test_other_machines_and_types_are_refused(options: dict[str, str], why: str) -> None:
    check_not_taken(net(), TACTIC, why, "ConvBlocks", **{"precision": "fp16", **options})


@pytest.mark.slow
def test_upsamplers_of_one_image_stay_separate() -> None:
    """Joined, their results would have to be copied to be shuffled."""
    n = Net()
    x = n.op("Relu", n.conv(n.input(1, 8, 9, 10), 24))
    y, z = (n.op("DepthToSpace", n.conv(x, 64), attrs=BlockAttrs(2, "CRD")) for _ in range(2))
    program = check_simulated(n.done(n.conv(n.op("Add", n.op("Sin", y), z), 8)), "fp16")
    assert kinds(program).count("ConvBlocks") == 2
