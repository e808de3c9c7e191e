"""Products of a few rows with the norm before them and a second product: choice, refusals, and the kernel."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import emulated
from support.host import needs_compiler
from support.net import Net, built
from support.on_gpu import checked_launches
from support.simulated import check_simulated, kinds, lowered, refusals
from support.spills import check_spills

from optdnn.ir.graph import Value
from optdnn.kernels.gemm import gemv_kernel as gemv
from optdnn.ops.norm import LayerNormAttrs
from optdnn.runtime.cuda.gpu_facts import of_arch
from optdnn.types import FP16

DEPTH, COLUMNS = 1024, 520


def norm(n: Net, x: Value, axis: int = -1) -> Value:
    sizes = [d for d in n.dims(x)[axis:] if isinstance(d, int)]
    return n.op("RMSNormalization", x, n.random(*sizes, offset=1.0), attrs=LayerNormAttrs(axis, 1e-5))


def product(n: Net, x: Value, columns: int = COLUMNS, scale: float = 1 / 32) -> Value:
    return n.op("MatMul", x, n.random(DEPTH, columns, scale=scale))


def gated(n: Net, x: Value) -> Value:
    return n.op("Mul", n.op("Swish", product(n, x)), product(n, x))


def rows(n: Net, count: int = 1) -> Value:
    return n.op("Abs", n.input(count, DEPTH))


NETS: dict[str, Callable[[Net], Any]] = {
    "norm": lambda n: product(n, norm(n, rows(n))),
    "norm, bias, three rows": lambda n: n.op("Add", product(n, norm(n, rows(n, 3))), n.random(COLUMNS)),
    "norm, residual": lambda n: n.op("Add", product(n, norm(n, rows(n))), n.input(1, COLUMNS, name="r")),
    "gated": lambda n: gated(n, rows(n)),
    "norm, gated, four rows": lambda n: gated(n, norm(n, rows(n, 4))),
    "tokens": lambda n: gated(n, norm(n, n.op("Abs", n.input(2, 1, DEPTH)))),
}


@pytest.mark.parametrize("name", NETS)
def test_accepted_networks(name: str) -> None:
    program = check_simulated(built(NETS[name]))
    found = kinds(program)
    assert found.count("RowProduct") == 1
    assert not {"RMSNormalization", "Conv", "MatMul"} & set(found)


def read_twice(n: Net) -> tuple[Value, Value]:
    y = norm(n, rows(n))
    return product(n, y), n.op("Tanh", y)


def after_an_addition(n: Net) -> Value:
    return product(n, norm(n, n.op("Add", *(n.op("Softmax", n.input(1, DEPTH, name=x)) for x in "xr"))))


def of_two_axes(n: Net) -> Value:
    x = n.op("Abs", n.input(1, 2, DEPTH))
    return product(n, norm(n, x, axis=-2))


def over_two_axes(n: Net) -> Value:
    """The norm's scale is one row, which repeats."""
    y = n.op("RMSNormalization", rows_in_pairs(n), n.positive(DEPTH), attrs=LayerNormAttrs(axis=-2))
    return product(n, y)


def rows_in_pairs(n: Net) -> Value:
    return n.op("Abs", n.input(1, 2, DEPTH))


def between_others(n: Net) -> Value:
    """Rows that begin between multiples of 16 bytes."""
    x = n.op("Softmax", n.input(2, DEPTH + 2))
    return product(n, norm(n, n.op("Slice", x, n.ints(1), n.ints(DEPTH + 1), n.ints(1))))


def by_a_computed_matrix(n: Net) -> Value:
    x = rows(n)
    return n.op("Mul", n.op("Relu", product(n, x)), n.op("MatMul", x, n.input(DEPTH, COLUMNS, name="w")))


REFUSED: dict[str, Callable[[Net], Any]] = {
    "its rows are not normalized by their mean square": lambda n: product(n, n.op("Softmax", n.input(1, DEPTH))),
    "others read the normalized rows": read_twice,
    "its norm follows an addition": after_an_addition,
    "it is for up to 4 rows, not 5": lambda n: product(n, norm(n, rows(n, 5))),
    "its norm has no constant scale per channel": of_two_axes,
    "its norm is not over rows alone": over_two_axes,
    "the rows before its norm do not have a constant pitch": between_others,
    "the other product MatMul_": by_a_computed_matrix,
}


@pytest.mark.parametrize("because", REFUSED)
def test_refusals(because: str) -> None:
    n = Net()
    results = REFUSED[because](n)
    program = lowered(n.done(*results) if type(results) is tuple else n.done(results))
    assert "RowProduct" not in kinds(program)
    assert any(because in reason for reason in refusals(program, "gemv_rows", kind="MatMul"))


PROBLEMS = {
    "plain": gemv.Problem(1, 61, 600),
    "norm": gemv.Problem(1, 61, 600, norm=True),
    "norm, residual, three rows": gemv.Problem(3, 40, 1032, (("bias",), ("add",)), norm=True),
    "gated": gemv.Problem(2, 33, 512, (("bias",), ("silu",), ("mul",)), beside=(("bias",),)),
    "norm, gated": gemv.Problem(
        1, 64, 2048, (("bias",), ("silu",), ("mul",)), norm=True, beside=(("bias",), ("relu",))
    ),
}


@needs_compiler
@pytest.mark.parametrize("name", PROBLEMS)
def test_the_kernel_on_a_processor(name: str, tmp_path: Path) -> None:
    p, rng = PROBLEMS[name], np.random.default_rng(0)
    config = gemv.Config(2, 4, 2)
    assert gemv.refuse(p, config) is None
    made = gemv.launch(p, config, of_arch("sm_90a"), p.depth, p.columns, epsilon=1e-3)
    text = made.recipe.generated["generated.cuh"]
    rendered = "\n".join(line for line in text.splitlines() if not line.startswith("#define"))
    library = emulated.compiled(made.recipe, made.function, tmp_path, rendered=rendered, headers=["vectors.cuh"])

    def drawn(*shape: int, scale: float = 1.0) -> np.ndarray:
        return (scale * rng.standard_normal(shape)).astype(FP16)

    held = {"x": drawn(p.rows, p.depth), "residual": drawn(p.rows, p.columns), "output": drawn(p.rows, p.columns)}
    held |= {n: drawn(p.columns, p.depth, scale=p.depth**-0.5) for n in ("weights", "beside")}
    held |= {n: drawn(p.columns).astype(np.float32) for n in ("bias", "beside_bias")}
    held["scale"] = drawn(p.depth).astype(np.float32)
    held = {n: emulated.aligned(a) for n, a in held.items()}
    emulated.run(library, made, {n: held[n].ctypes.data for n in made.operands})
    wide = {n: a.astype(np.float64) for n, a in held.items()}
    x = wide["x"]
    if p.norm:
        x = x / np.sqrt(np.square(x).mean(1, keepdims=True) + 1e-3) * wide["scale"]
    y, z = (x @ wide[w].T + wide[b] for w, b in (("weights", "bias"), ("beside", "beside_bias")))
    if p.beside is not None:
        y = y / (1 + np.exp(-y)) * (np.maximum(z, 0) if ("relu",) in p.beside else z)
    y += wide["residual"] if p.residual else 0
    np.testing.assert_allclose(held["output"].astype(np.float64), y, rtol=0, atol=3e-3 * np.abs(y).max())


@pytest.mark.nvrtc
def test_kernels_do_not_spill() -> None:
    for p in (p for rows in (1, 4) for p in (gemv.Problem(rows, 4096, 4096, norm=True), gemv.Problem(
            rows, 14336, 4096, (("bias",), ("silu",), ("mul",)), "bfloat16", norm=True, beside=(("bias",),)))):  # fmt: skip
        for config in gemv.candidates(p, of_arch("sm_90a"))[:2]:
            check_spills(gemv.recipe(p, config, "sm_90a"))


@pytest.mark.hopper
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("name", NETS)
def test_launches_on_a_gpu(name: str, precision: str) -> None:
    graph = built(NETS[name])
    found = checked_launches(graph, precision)
    assert "RowProduct" in {e.kind for e in found}
