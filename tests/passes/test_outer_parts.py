"""outer_part: the part of a convolution that a Concat reads becomes an outer part, and the Concat copies nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.check import check_pass, check_refused, check_untouched
from support.net import Net
from support.simulated import check_simulated, kinds
from support.sweep import all_pairs

from optdnn.dim import symbol
from optdnn.ir.graph import Graph, Value
from optdnn.ops.base import Stage
from optdnn.ops.conv import ConvAttrs
from optdnn.ops.index import ConcatAttrs, SplitAttrs
from optdnn.passes.base import PassContext
from optdnn.passes.fuse_siblings import FuseSiblings

CUDA = PassContext(target="cuda:sm_90a")
RULE = {"outer_part": 1}


def split(n: Net, *sizes: int, bias: bool = True, batch: Any = 2) -> tuple[Value, ...]:
    y = n.conv(n.input(batch, 8, 6, 5), sum(sizes), 1, pads=0, bias=bias)
    parts: tuple[Value, ...] = n.op("Split", y, n.ints(*sizes), outputs=len(sizes), attrs=SplitAttrs(1))
    return parts


def stage(n: Net, kept: int, *sizes: int, last: bool = True, axis: int = 1, **options: Any) -> Graph:
    """Part ``kept`` of a convolution is joined with a convolution of another part, at its end or begin."""
    parts = split(n, *sizes, **options)
    other = n.conv(parts[1 - kept], sizes[kept] if axis != 1 else 8)
    joined = (other, parts[kept]) if last else (parts[kept], other)
    return n.done(n.conv(n.op("Concat", *joined, attrs=ConcatAttrs(axis)), 8))


def ports(graph: Graph) -> tuple[list[Any], list[int]]:
    """The sizes of the Split's parts, and the numbers of those that the Concat reads."""
    (op,), (concat,) = graph.of_kind("Split"), graph.of_kind("Concat")
    return [t.type.dims[1] for t in op.outputs], [v.port for v in concat.inputs if v is not None and v.op == op.id]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("batch", [2, symbol("N", 1)])
def test_a_part_at_the_end_becomes_the_first(batch: Any, bias: bool) -> None:
    graph, sizes = stage(Net(np.float64), 1, 16, 24, bias=bias, batch=batch), None if batch == 2 else {"N": 3}
    done, _ = check_pass(FuseSiblings(), graph, changes=1, rules=RULE, context=CUDA, sizes=sizes)
    assert ports(done) == ([24, 16], [0])


def test_a_part_at_the_begin_becomes_the_last() -> None:
    graph = stage(Net(np.float64), 0, 16, 24, last=False)
    done, _ = check_pass(FuseSiblings(), graph, changes=1, rules=RULE, context=CUDA)
    assert ports(done) == ([24, 16], [1])


def test_an_activation_of_all_parts() -> None:
    n = Net(np.float64)
    x, stages = n.input(2, 8, 6, 5), (Stage("Relu", (-1,)), Stage("Mul", (-2, 3)))
    attrs = ConvAttrs((1, 1), (0, 0, 0, 0), (1, 1), 1, epilogue=stages)
    y = n.op("Conv", x, n.random(24, 8, 1, 1), n.random(24), n.const(np.array(0.5)), attrs=attrs)
    a, b = n.op("Split", y, n.ints(8, 16), outputs=2, attrs=SplitAttrs(1))
    graph = n.done(n.op("Concat", n.conv(a, 8), b, attrs=ConcatAttrs(1)))
    done, _ = check_pass(FuseSiblings(), graph, changes=1, rules=RULE, context=CUDA)
    assert ports(done) == ([16, 8], [0])


@pytest.mark.parametrize(("kept", "last"), [(0, True), (1, False)])
def test_an_outer_part_stays(kept: int, last: bool) -> None:
    check_untouched(FuseSiblings(), stage(Net(np.float64), kept, 16, 24, last=last), context=CUDA)


def test_other_parts_are_no_candidates() -> None:
    check_untouched(FuseSiblings(), stage(Net(np.float64), 1, 16, 24))  # on a CPU
    check_untouched(FuseSiblings(), stage(Net(np.float64), 1, 16, 24, axis=2), context=CUDA)
    n = Net(np.float64)
    a, b = split(n, 16, 24)
    check_untouched(FuseSiblings(), n.done(n.op("Concat", n.conv(a, 8), b, a, attrs=ConcatAttrs(1))), context=CUDA)
    n = Net(np.float64)
    a, b, c = split(n, 8, 8, 8)
    middle = n.op("Concat", n.conv(a, 8), b, n.conv(c, 8), attrs=ConcatAttrs(1))
    check_untouched(FuseSiblings(), n.done(middle), context=CUDA)


def test_other_convolutions_are_refused() -> None:
    def refused(because: str, *more: Any, group: int = 1, weight: Any = None, **attrs: Any) -> None:
        n = Net(np.float64)
        x = n.input(2, 8, 6, 5)
        w = n.random(24, 8 // group, 1, 1) if weight is None else weight(n)
        given = [m(n) if callable(m) else m for m in more]
        y = n.op("Conv", x, w, *given, attrs=ConvAttrs((1, 1), (0, 0, 0, 0), (1, 1), group, **attrs))
        a, b = n.op("Split", y, n.ints(8, 16), outputs=2, attrs=SplitAttrs(1))
        graph = n.done(n.op("Concat", n.conv(a, 8), b, attrs=ConcatAttrs(1)))
        check_refused(FuseSiblings(), graph, because=because, context=CUDA)

    refused("they are grouped", group=2)
    refused("its filters are not constant", weight=lambda n: n.input(24, 8, 1, 1, name="w"))
    refused("its filters are not constant", lambda n: n.input(24, name="b"))
    add = (Stage("Add", (-1, 3)),)
    refused("stages of the convolution read tensors", None, lambda n: n.random(24, 1, 1), epilogue=add)


@all_pairs(
    {
        "sizes": [(16, 32), (16, 24), (8, 8)],
        "kept, last": [(0, True), (0, False), (1, True), (1, False)],
        "precision": ["fp16", "fp32"],
    }
)
def test_the_concat_copies_nothing(kept: int, last: bool, sizes: tuple[int, int], precision: str) -> None:
    program = check_simulated(stage(Net(), kept, *sizes, last=last), precision)
    if precision == "fp16":
        assert kinds(program) == ["Copy", "Conv", "Conv", "Conv", "Pointwise"]


def test_parts_in_the_middle_of_vectors_are_copied() -> None:
    program = check_simulated(stage(Net(), 1, 12, 16), "fp16")
    assert kinds(program).count("Copy") + kinds(program).count("Copies") > 1


def test_a_concat_in_another_concat_keeps_its_place() -> None:
    n = Net()
    a, b = split(n, 16, 16)
    inner = n.op("Concat", n.conv(a, 8), b, attrs=ConcatAttrs(1))
    outer = n.op("Concat", inner, n.conv(inner, 8), attrs=ConcatAttrs(1))
    check_simulated(n.done(n.conv(outer, 8)), "fp16")
