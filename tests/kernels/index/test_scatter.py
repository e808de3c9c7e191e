"""TensorScatter: what is only moved is moved in words of eight bytes, where rows are such words."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kernels.test_generated import compare_steps
from support.host import WHY_NOT
from support.needs import why_no_hopper
from support.net import Net
from support.simulated import feeds_of, lowered

from optdnn.ir.graph import Graph
from optdnn.ops.attention import TensorScatterAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.runtime.cuda.launches.plan import parse
from optdnn.runtime.cuda.trials.check import check_steps
from optdnn.runtime.engine import Engine
from optdnn.types import FP16, INT64


def network(features: int, axis: int, turned: bool, length: int = 6, count: int = 2) -> Graph:
    """``count`` places of a cache of ``length`` are written. ``turned``: positions lie before heads in what is written."""
    n: Any = Net(FP16)
    shape, update = [2, 3, length, features], [2, 3, length, features]
    update[axis] = count
    if turned:
        given = n.input(update[0], update[2], update[1], features, name="u")
        u = n.op("Transpose", given, attrs=TransposeAttrs((0, 2, 1, 3)))
    else:
        u = n.input(*update, name="u")
    y = n.op("TensorScatter", n.input(*shape), u, n.input(2, name="at", dtype=INT64), attrs=TensorScatterAttrs(axis))
    return n.done(y)


@pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or "")
@pytest.mark.parametrize(
    ("features", "axis", "turned", "count"),
    [
        (8, 2, False, 2 * 3 * 2 * 2),
        (8, 2, True, 2 * 3 * 2 * 2),
        (6, 2, False, 2 * 3 * 2 * 6),  # rows of 12 bytes
        (8, 3, False, 2 * 3 * 6 * 2),  # it writes along rows
    ],
)
def test_in_words(features: int, axis: int, turned: bool, count: int, tmp_path: Path) -> None:
    graph = network(features, axis, turned)
    program = lowered(graph, no_cubins=True)
    (step,) = [s for s in program.steps if s.params["op"]["kind"] == "TensorScatter"]
    launch = parse(step, program).launch
    assert launch is not None
    pointers = 8 * len(launch.relocations)
    assert struct.unpack_from("<I", launch.parameters, pointers) == (count,)
    feeds = {**feeds_of(graph), "at": np.array([0, 3])}
    assert compare_steps(program, feeds, 0.0, tmp_path) >= 1


@pytest.mark.gpu
@pytest.mark.skipif(why_no_hopper() is not None, reason=why_no_hopper() or "")
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("features", [6, 8, 128])
def test_on_a_gpu(features: int, turned: bool) -> None:
    graph = network(features, 2, turned, length=600, count=200)
    feeds = {**feeds_of(graph), "at": np.array([0, 377])}
    found = check_steps(Engine(lowered(graph, "fp16", target="cuda:sm_90a")).context(), feeds)
    assert [e.error for e in found if e.kind == "TensorScatter"] == [0.0]
