"""Products of a constant matrix with a stack: one matrix for all, a bias per row, a factor per column, moments of the rows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from support.net import Net, built
from support.on_gpu import checked_launches
from support.one_config import only
from support.simulated import TOLERANCE, check_simulated, kinds, lowered
from support.spills import check_spills

from optdnn.errors import InternalError
from optdnn.ir.graph import Value
from optdnn.kernels.conv import implicit_gemm
from optdnn.kernels.conv.implicit_gemm import Config
from optdnn.kernels.conv.problem import Problem, Source
from optdnn.kernels.gemm.normed import NormedGemm
from optdnn.ops.index import SplitAttrs
from optdnn.ops.norm import LayerNormAttrs
from optdnn.runtime.cuda.compile import nvrtc
from optdnn.runtime.program import Program


def _left(n: Net, x: Value, rows: int) -> Value:
    tokens = int(n.dims(x)[-2])  # type: ignore[arg-type]
    return n.op("MatMul", n.random(rows, tokens, scale=tokens**-0.5), x)


def _norm(n: Net, x: Value) -> Value:
    width = int(n.dims(x)[-1])  # type: ignore[arg-type]
    return n.op("LayerNormalization", x, n.random(width), n.random(width), attrs=LayerNormAttrs())


def row_bias(n: Net) -> Value:
    return n.op("Gelu", n.op("Add", _left(n, n.input(3, 36, 72), 21), n.random(21, 1)))


def both_biases(n: Net) -> Value:
    y = n.op("Add", _left(n, n.input(1, 36, 72), 20), n.random(72))
    return n.op("Relu", n.op("Add", y, n.random(20, 1)))


def factor(n: Net) -> Value:
    x = n.input(2, 36, 64)
    y = n.op("Mul", n.op("Add", _left(n, x, 36), n.random(1, 36, 1)), n.random(64))
    return n.op("Add", n.op("Add", y, n.random(64)), x)


def factor_alone(n: Net) -> Value:
    return n.op("Mul", _left(n, n.input(2, 24, 40), 50), n.random(40))


def gate(n: Net) -> Value:
    u, v = n.op("Split", n.input(5, 30, 128), n.ints(64, 64), attrs=SplitAttrs(2), outputs=2)
    return n.op("Mul", u, n.op("Add", _left(n, v, 30), n.random(30, 1)))


def large(n: Net) -> Value:
    """More tiles than multiprocessors, several per block, and incomplete last tiles."""
    x = n.input(3, 197, 1000)
    y = n.op("Gelu", n.op("Add", _left(n, x, 611), n.random(611, 1)))
    return n.op("Add", n.op("Mul", n.op("Add", _left(n, y, 197), n.random(197, 1)), n.random(1000)), x)


def moments(n: Net) -> Value:
    """Rows of a stack. A product applies their norm by their moments."""
    x = n.input(3, 37, 128)
    stream = n.op("Add", n.op("Add", _left(n, x, 37), n.random(37, 1)), x)
    return n.op("MatMul", _norm(n, stream), n.random(128, 72, scale=0.1))


NETS: dict[str, Callable[[Net], Value]] = {
    f.__name__: f for f in (row_bias, both_biases, factor, factor_alone, gate, large, moments)
}
NORMED = ("moments",)


@pytest.fixture
def wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NormedGemm, "defer", lambda self, b, op: None)


def _defined(program: Program, name: str) -> bool:
    return any(f"#define {name} 1" in k.generated.get("generated.cuh", "") for k in program.kernels)


@pytest.mark.usefixtures("wanted")
@pytest.mark.parametrize("name", NETS)
def test_one_launch_for_each_product(name: str) -> None:
    n = Net(np.float16)
    program = check_simulated(n.done(NETS[name](n)))
    tactics = [str(s.params["tactic"]).split()[0] for s in program.steps]
    assert tactics == {"large": ["matmul_sm90"] * 2, "moments": ["matmul_sm90", "gemm_normed_sm90"]}.get(
        name, ["matmul_sm90"]
    )
    assert _defined(program, "ONE_MATRIX")
    assert _defined(program, "ROW_BIAS") == (name != "factor_alone")
    assert _defined(program, "SCALED") == (name in ("factor", "factor_alone", "large"))
    assert ("RowMoments" in kinds(program)) == (name in NORMED)


def test_one_matrix_is_kept_once() -> None:
    n = Net(np.float16)
    program = lowered(n.done(_left(n, n.input(16, 36, 64), 48)))
    (size,) = {b.nbytes for b in program.buffers if b.name.startswith("left")}
    assert size == 48 * 64 * 2, "rows of 36 at whole lines of 128 bytes"


def test_a_constant_stack_is_kept_once() -> None:
    n = Net(np.float16)
    y = n.op("MatMul", n.random(1, 3, 20, 40), n.input(2, 3, 40, 64))
    program = check_simulated(n.done(y))
    assert not _defined(program, "ONE_MATRIX")
    assert str(program.steps[0].params["tactic"]).startswith("matmul_sm90")
    (size,) = {b.nbytes for b in program.buffers if b.name.startswith("left")}
    assert size == 3 * 20 * 64 * 2


def _bias_after_a_stage(n: Net) -> Value:
    return n.op("Add", n.op("Relu", _left(n, n.input(2, 36, 64), 20)), n.random(20, 1))


def _two_factors(n: Net) -> Value:
    y = n.op("Mul", _left(n, n.input(2, 36, 64), 36), n.random(64))
    y = n.op("Relu", y)
    return n.op("Mul", y, n.random(64))


@pytest.mark.parametrize("build", [_bias_after_a_stage, _two_factors])
def test_unsupported_stages_are_another_launch(build: Callable[[Net], Value]) -> None:
    n = Net(np.float16)
    program = check_simulated(n.done(build(n)))
    assert kinds(program) == ["MatMul", "Pointwise"]


def test_rows_of_other_widths_have_no_moments() -> None:
    n = Net(np.float16)
    x = n.input(2, 36, 60)
    y = n.op("Add", _left(n, x, 36), n.random(36, 1))
    program = check_simulated(n.done(n.op("MatMul", _norm(n, y), n.random(60, 72, scale=0.1))))
    assert "RowMoments" not in kinds(program), "60 channels are no whole groups of 64"


def test_problems_that_do_not_exist() -> None:
    for options in ({"one_matrix": True}, {"row_bias": True}):
        with pytest.raises(InternalError, match="only stacks of products"):
            Problem(100, 72, (Source(1, 1, 64),), **options)
    one = Problem(100, 128, (Source(1, 1, 64),), stack=(3, 2), one_matrix=True, row_bias=True, moments=True)
    assert one.bytes == 2 * (100 * 64 + 6 * 64 * 128 + 6 * 100 * 128)
    with pytest.raises(InternalError, match="64 channels each"):
        Problem(100, 72, (Source(1, 1, 64),), stack=(3, 2), moments=True)


def test_sums_that_begin_with_a_bias_are_of_whole_tiles() -> None:
    problem = Problem(64, 64, (Source(1, 1, 16384),), stack=(4, 1), row_bias=True)
    config = Config(1, 1, 1, 64, 6, stream=True)
    assert implicit_gemm.refuse(problem, config) == "a bias per row needs whole tiles"


CONFIGS = (
    Config(1, 1, 1, 24, 3, out_buffers=2), Config(1, 2, 1, 40, 3), Config(2, 1, 2, 64, 2), Config(1, 1, 1, 104, 2, alternate=True),
    Config(1, 1, 1, 8, 8, blocks=2), Config(2, 1, 1, 248, 2), Config(1, 1, 2, 136, 2, alternate=True),
)  # fmt: skip


@pytest.mark.nvrtc
@pytest.mark.usefixtures("wanted")
@pytest.mark.parametrize(
    ("name", "config"),
    [("large", None), *((("large", "moments", "gate")[k % 3], config) for k, config in enumerate(CONFIGS[:-1]))],
    ids=str,
)
def test_kernels_compile_without_spills(name: str, config: Config | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if config is not None:
        only(monkeypatch, config)
    n = Net(np.float16)
    program = lowered(n.done(NETS[name](n)), target="cuda:sm_90a")
    for kernel in program.kernels:
        if "#define ROW_BIAS 1" in kernel.generated.get("generated.cuh", ""):
            recipe = nvrtc.Recipe(kernel.template, kernel.arch, dict(kernel.generated), tuple(kernel.options))
            check_spills(recipe, kernel.function)


@pytest.mark.hopper
@pytest.mark.usefixtures("wanted")
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("config", [None, *CONFIGS], ids=str)
@pytest.mark.parametrize("name", NETS)
def test_each_configuration_on_a_gpu(
    name: str, config: Config | None, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if config is not None:
        only(monkeypatch, config)
    graph = built(NETS[name])
    checked_launches(graph, precision, TOLERANCE[precision])
