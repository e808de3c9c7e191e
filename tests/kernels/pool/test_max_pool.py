"""Tiled max pools: every tile agrees with its meaning on the processor; refusals and choices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.host import needs_compiler
from support.net import Net
from support.on_processor import compare_steps
from support.simulated import feeds_of
from support.sweep import sweep, turns

from optdnn.config import BuildOptions
from optdnn.ir.graph import Graph
from optdnn.lowering import table
from optdnn.lowering.choose import Selection, TacticChoice, alternatives
from optdnn.lowering.cuda import Emitted, Prepared, emit_program, lower_cuda
from optdnn.ops.pool import MaxPoolAttrs
from optdnn.optimize import optimize
from optdnn.runtime.cuda.gpu_facts import of_arch


def window(kernel: tuple[int, ...], strides: int = 1, pads: int = 0, dilations: int = 1, **more: Any) -> MaxPoolAttrs:
    rank = len(kernel)
    return MaxPoolAttrs(kernel, (strides,) * rank, (pads,) * (2 * rank), (dilations,) * rank, **more)


OPTIONS = BuildOptions(target="simulate", precision="fp16")


def pooled(attrs: MaxPoolAttrs, channels: int = 16, size: tuple[int, ...] = (5, 9, 11), batch: int = 2) -> Graph:
    """A pool between convolutions, so that its images are channels-last. The pool's axes are the last ones of ``size``."""
    n, rank = Net(), len(attrs.kernel_shape)
    one = (1,) * rank
    x = n.op("MaxPool", n.conv(n.input(batch, 8, *size[-rank:]), channels, one, pads=0), attrs=attrs)
    return n.done(n.conv(x, 8, one, pads=0))


def emitted(graph: Graph, options: BuildOptions = OPTIONS) -> Emitted:
    copy = graph.copy()
    optimize(copy, options, "simulate")
    return emit_program(copy, options, of_arch("sm_90a"), {})


CASES = {
    "resnet": window((3, 3), 2, 1),
    "plain": window((2, 2), 2),
    "overlapping": MaxPoolAttrs((3, 2), (1, 1), (1, 0, 1, 1), (1, 1)),
    "gaps": window((2, 2), 4),
    "ceil": window((3, 3), 2, ceil_mode=True),
    "volume": window((3, 3, 3), 1, 1),
    "frames": MaxPoolAttrs((3, 1, 2), (2, 1, 2), (1, 0, 0, 0, 0, 1), (1, 1, 1)),
}


@needs_compiler
@pytest.mark.parametrize(
    ("name", "precision"),
    sweep(
        turns(CASES, "fp16", "bf16"),
        ("ceil", "fp16"),
    ),
)
def test_tiles(name: str, precision: str, tmp_path: Path) -> None:
    options = BuildOptions(target="simulate", precision=precision)
    graph = pooled(CASES[name])
    found: list[tuple[str, TacticChoice]] = []

    def visit(b: Any, op: Any, key: str) -> None:
        if op.kind == "MaxPool":
            pairs = alternatives(b, op, table.TACTICS["MaxPool"], Selection())
            found.extend(
                (key, TacticChoice(t.name, o.name)) for t, o in pairs if t.name == "max_pool_tiled" and o is not None
            )

    copy = graph.copy()
    optimize(copy, options, "simulate")
    emit_program(copy, options, of_arch("sm_90a"), {}, None, visit)
    shapes = {choice.config.partition("t2")[0]: (key, choice) for key, choice in found if choice.config.endswith("t64")}
    assert len(shapes) >= 4
    for number, (key, choice) in enumerate(shapes.values()):
        program = lower_cuda(copy, options, of_arch("sm_90a"), {}, prepared=Prepared({key: choice}))
        assert [t["config"] for t in program.meta["tactics"] if t["kind"] == "MaxPool"] == [choice.config]
        folder = tmp_path / str(number)
        folder.mkdir()
        assert compare_steps(program, feeds_of(graph), 1e-6, folder)


def reasons(graph: Graph, options: BuildOptions = OPTIONS) -> str:
    (d,) = [d for d in emitted(graph, options).decisions if d.op.kind == "MaxPool"]
    return "; ".join(r["reason"] for r in d.refused if r["tactic"] == "max_pool_tiled")


def test_refusals() -> None:
    plain = CASES["resnet"]
    assert reasons(pooled(plain)) == ""
    assert "channels are not contiguous" in reasons(pooled(plain, channels=12))
    assert "16-bit images" in reasons(pooled(plain), BuildOptions(target="simulate", precision="fp32"))
    assert "dilated" in reasons(pooled(window((2, 2), dilations=2)))
    assert "more than" in reasons(pooled(window((7, 7), pads=3)))
    assert "16-bit images" in reasons(pooled(window((2,))))
