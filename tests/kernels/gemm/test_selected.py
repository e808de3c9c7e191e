"""Rows that each select a matrix of a stack (mixtures of experts): the launch, its refusals, and the kernel on the processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import emulated
from support.host import needs_compiler
from support.net import Net
from support.on_gpu import checked_launches
from support.simulated import check_not_taken, check_simulated, kinds
from support.spills import check_spills

from optdnn.ir.graph import Graph
from optdnn.kernels.gemm import gemv_kernel as gemv
from optdnn.kernels.gemm import selected
from optdnn.kernels.gemm import selected_hopper_kernel as hopper
from optdnn.kernels.gemm import selected_kernel as tiles
from optdnn.kernels.tactic import Offer
from optdnn.ops.gather import GatherAttrs, GatherNDAttrs
from optdnn.ops.gemm import MatMulAttrs
from optdnn.ops.sort import TopKAttrs
from optdnn.runtime.cuda.gpu_facts import of_arch
from optdnn.types import BF16, FP16, FP32


@pytest.fixture(autouse=True)
def none_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products as small as these would be multiplied with all matrices."""
    monkeypatch.setattr("optdnn.passes.selected_weights.SHORT", 0)


def experts(
    form: str = "columns", *, rows: int = 3, many: int = 8, depth: int = 64, columns: int = 40, kind: str = "GatherND", step: int = 1,
    after: str = "", times: int = 0, one: bool = False,
) -> Graph:  # fmt: skip
    """``W[index] @ columns`` or ``rows @ W[index]``. The indices come from a TopK of scores; ``after``: what reads the product. ``times``:
    each row is repeated for so many matrices (0: it is one token, which selects ``rows`` of them). ``one``: all rows select the same."""
    n = Net()
    top = TopKAttrs(1, True, True)
    if times:
        scores = n.input(rows, many, name="scores")
        if one:
            scores = n.op("Add", n.op("Mul", scores, n.const(1e-3)), n.const(np.eye(many)[many // 2]))
        _, index = n.op("TopK", scores, n.ints(times), attrs=top, outputs=2)
        own = n.op(
            "Gather",
            n.random(many, columns, depth, scale=depth**-0.5),
            n.op("Reshape", index, n.ints(-1)),
            attrs=GatherAttrs(0),
        )
        x = n.op("Expand", n.op("Unsqueeze", n.input(rows, depth), n.ints(1)), n.ints(rows, times, depth))
        return n.done(n.op("MatMul", own, n.op("Reshape", x, n.ints(rows * times, depth, 1))))
    _, index = n.op("TopK", n.input(1, many, name="scores"), n.ints(rows * step), attrs=top, outputs=2)
    index = n.op("Reshape", index, n.ints(rows * step, 1) if kind == "GatherND" else n.ints(rows * step))
    if step > 1:
        index = n.op("Slice", index, n.ints(0), n.ints(rows * step), n.ints(0), n.ints(step))
    size = (many, columns, depth) if form == "columns" else (many, depth, columns)
    attrs: Any = GatherNDAttrs(0) if kind == "GatherND" else GatherAttrs(0)
    matrices = n.op(kind, n.random(*size, scale=depth**-0.5), index, attrs=attrs)
    x = n.input(rows, depth, 1) if form == "columns" else n.input(rows, 1, depth)
    y = n.op("MatMul", *((matrices, x) if form == "columns" else (x, matrices)), attrs=MatMulAttrs())
    if after == "Relu":
        y = n.op("Relu", y)
    return n.done(y, *([n.op("Exp", matrices)] if after == "reader" else []))


CASES: dict[str, dict[str, Any]] = {
    "columns": {},
    "rows": {"form": "rows", "kind": "Gather"},
    "one row of many": {"rows": 1, "many": 16, "depth": 264, "columns": 33},
    "an activation after it": {"after": "Relu"},
    "rows of two experts": {"rows": 5, "times": 2, "depth": 72},
}
LARGE = tiles.Problem(40960, 4, 32, 1024, 1024, "float16", FP16, vectors=True)
MANY: dict[str, dict[str, Any]] = {
    "some of each": {"rows": 300, "times": 2, "depth": 136},
    "more than a tile of each": {"rows": 600, "times": 3, "depth": 64, "columns": 200},
    "all of one": {"rows": 1500, "times": 1, "one": True, "depth": 40, "columns": 72},
    "of many": {"rows": 90, "times": 4, "many": 64, "depth": 1032, "columns": 129},
}
"""Of more rows: tiles."""


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_selected_matrices_are_read_in_place(name: str, precision: str) -> None:
    program = check_simulated(experts(**CASES[name]), precision)
    assert "SelectedProduct" in kinds(program)
    assert not {"Gather", "GatherND", "MatMul"} & set(kinds(program))


@pytest.mark.parametrize("precision", ["fp16", "bf16", "tf32", "fp32"])
@pytest.mark.parametrize("name", MANY)
def test_many_rows_are_multiplied_in_tiles(name: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selected.SelectedGemv, "refuse", lambda self, b, op: "another kernel is tested")
    program = check_simulated(experts(**MANY[name]), precision)
    assert "SelectedProduct" in kinds(program)
    assert not {"Gather", "GatherND", "MatMul", "Copy", "Expand"} & set(kinds(program))
    assert {"selected_tiles", "selected_sm90"} & {k.function for k in program.kernels}


@pytest.mark.parametrize(
    ("options", "because"),
    [
        ({"after": "reader"}, "no matrices that indices select"),
        ({"after": "Relu", "depth": 60}, "it has stages"),
        ({"depth": 60}, "multiple of 8"),
    ],
)
def test_refusals(options: dict[str, Any], because: str) -> None:
    check_not_taken(experts(**options), "gemv_selected", because, "SelectedProduct", precision="fp16")


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_indices_that_lie_apart_are_copied(precision: str) -> None:
    """They are few; a copy of the matrices would be large."""
    program = check_simulated(experts(step=2), precision)
    assert "SelectedProduct" in kinds(program)
    assert not {"Gather", "GatherND", "MatMul"} & set(kinds(program))


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_rows_that_lie_apart_are_copied(precision: str) -> None:
    n = Net()
    _, index = n.op("TopK", n.input(1, 8, name="scores"), n.ints(3), attrs=TopKAttrs(1, True, True), outputs=2)
    own = n.op("Gather", n.random(8, 40, 64), n.op("Reshape", index, n.ints(3)), attrs=GatherAttrs(0))
    some = n.op("Slice", n.op("Relu", n.input(3, 70, 1)), n.ints(3), n.ints(67), n.ints(1))
    program = check_simulated(n.done(n.op("MatMul", own, some, attrs=MatMulAttrs())), precision)
    assert "SelectedProduct" in kinds(program)
    assert not {"Gather", "MatMul"} & set(kinds(program))


def test_a_grid_has_no_more_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optdnn.kernels.gemm.selected.MOST", 2)
    check_not_taken(experts(), "gemv_selected", "up to 2 rows, not 3", "SelectedProduct", precision="fp16")


def test_it_is_for_16_bit_floats() -> None:
    program = check_simulated(experts(), "fp32")
    assert "gemv" not in {k.function for k in program.kernels}


def test_indices_that_are_known_select_nothing_at_run_time() -> None:
    n = Net()
    matrices = n.op("Gather", n.random(8, 40, 64), n.ints(5, 1, 2), attrs=GatherAttrs(0))
    graph = n.done(n.op("MatMul", matrices, n.input(3, 64, 1), attrs=MatMulAttrs()))
    check_not_taken(graph, "gemv_selected", "no matrices that indices select", "SelectedProduct", precision="fp16")


@needs_compiler
@pytest.mark.parametrize(("rows", "pitch"), [(4, 600), (3, 0)])
def test_the_kernel_on_a_processor(rows: int, pitch: int, tmp_path: Path) -> None:
    """Indices count from the end if they are negative, and stay in the stack. ``pitch`` 0: all rows are one."""
    p, config, rng = gemv.Problem(1, 61, 600, (), selected=rows), gemv.Config(2, 4, 2), np.random.default_rng(0)
    assert gemv.refuse(p, config) is None
    made = gemv.launch(p, config, of_arch("sm_90a"), pitch, p.columns, stack=5)
    text = made.recipe.generated["generated.cuh"]
    rendered = "\n".join(line for line in text.splitlines() if not line.startswith("#define"))
    library = emulated.compiled(made.recipe, made.function, tmp_path, rendered=rendered, headers=["vectors.cuh"])
    arrays = {
        "x": rng.standard_normal((rows if pitch else 1, p.depth)).astype(FP16),
        "weights": (rng.standard_normal((5, p.columns, p.depth)) * p.depth**-0.5).astype(FP16),
        "index": np.array([4, -2, 7, 0][:rows], np.int64),
        "output": np.zeros((rows, p.columns), FP16),
    }
    held = {n: emulated.aligned(a) for n, a in arrays.items()}
    emulated.run(library, made, {n: held[n].ctypes.data for n in made.operands})
    chosen = held["weights"].astype(np.float64)[[4, 3, 4, 0][:rows]]
    expected = (chosen @ held["x"].astype(np.float64)[..., None])[..., 0]
    np.testing.assert_allclose(held["output"].astype(np.float64), expected, rtol=0, atol=3e-3 * np.abs(expected).max())


def test_more_rows_take_longer() -> None:
    gpu = of_arch("sm_90a")
    one, eight = (gemv.Problem(1, 2048, 1024, (), selected=n) for n in (1, 8))
    config = gemv.Config(4, 4, 2)
    assert gemv.estimate(one, config, gpu) < gemv.estimate(eight, config, gpu) < 8 * gemv.estimate(one, config, gpu)


@pytest.mark.nvrtc
def test_kernels_do_not_spill() -> None:
    problem = gemv.Problem(1, 1536, 2048, (), "bfloat16", selected=8)
    for arch in ("sm_80", "sm_90a"):
        for config in gemv.candidates(problem, of_arch("sm_90a"))[:2]:
            check_spills(gemv.recipe(problem, config, arch))


@pytest.mark.nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "tfloat32", "float32"])
def test_tiles_do_not_spill(dtype: str, arch: str) -> None:
    result = {"float16": FP16, "bfloat16": BF16}.get(dtype, FP32)
    problem = tiles.Problem(4096, 4, 32, 1024, 1024, dtype, result, vectors=True)
    for config in tiles.candidates(problem, of_arch("sm_90a"), 99):
        launch = tiles.launch(problem, config, of_arch(arch), (1 << 20, 1, 1024), 1024, 1024)
        if config.parts == 1:
            check_spills(launch.recipe)


@pytest.mark.hopper
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_launches_on_a_gpu(name: str, precision: str) -> None:
    assert "SelectedProduct" in {e.kind for e in checked_launches(experts(**CASES[name]), precision)}


@pytest.mark.hopper
@pytest.mark.parametrize("precision", ["fp16", "bf16", "tf32", "fp32"])
@pytest.mark.parametrize("name", MANY)
def test_tiles_on_a_gpu(name: str, precision: str) -> None:
    assert "SelectedProduct" in {e.kind for e in checked_launches(experts(**MANY[name]), precision)}


FORCED = [(k, c) for k in (hopper, tiles) for c in k.candidates(LARGE, of_arch("sm_90a"), 99) if c.parts in (1, 4)]


@pytest.mark.hopper
@pytest.mark.parametrize("name", MANY)
@pytest.mark.parametrize(
    ("kernel", "config"),
    FORCED,
    ids=lambda x: str(x) if isinstance(x, (tiles.Config, hopper.Config)) else x.__name__[-13:],
)
def test_all_configurations(kernel: Any, config: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selected.SelectedGemv, "refuse", lambda self, b, op: "another kernel is tested")
    if kernel is tiles:
        monkeypatch.setattr(selected.SelectedHopper, "refuse", lambda self, b, op: "another kernel is tested")
    monkeypatch.setattr(selected, "kernel_offers", lambda *_: (Offer(config),))
    precision = "bf16" if config.parts > 1 else "fp16"
    assert "SelectedProduct" in {e.kind for e in checked_launches(experts(**MANY[name]), precision)}
