"""Products of normalized rows without a launch for the norm: what is right, what is refused, and what compiles."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from support.net import Net
from support.simulated import check_simulated, kinds, lowered

from optdnn.errors import InternalError
from optdnn.ir.graph import Value
from optdnn.kernels.conv import implicit_gemm
from optdnn.kernels.conv.implicit_gemm import Config
from optdnn.kernels.conv.problem import Problem, RowNorm, Source
from optdnn.kernels.gemm.normed import NormedGemm
from optdnn.ops.norm import LayerNormAttrs
from optdnn.ops.unary import GeluAttrs
from optdnn.runtime.cuda.compile import nvrtc
from optdnn.runtime.program import Program


def _norm(n: Net, x: Value, width: int, kind: str = "LayerNormalization") -> Value:
    scale = n.const(1 + 0.2 * np.random.default_rng(width).standard_normal(width).astype(np.float32))
    if kind == "RMSNormalization":
        return n.op(kind, x, scale, attrs=LayerNormAttrs(epsilon=1e-6))
    return n.op(kind, x, scale, n.random(width), attrs=LayerNormAttrs())


def block(n: Net) -> Value:
    """A product with a residual, and the two products of a perceptron behind its norm; the residual goes on."""
    x = n.input(2, 37, 128)
    stream = n.op("Add", n.op("MatMul", x, n.random(128, 128)), x)
    hidden = n.op("Gelu", n.op("Add", n.op("MatMul", _norm(n, stream, 128), n.random(128, 256)), n.random(256)), attrs=GeluAttrs("tanh"))
    return n.op("Add", n.op("MatMul", hidden, n.random(256, 128)), stream)


def mean_square(n: Net) -> Value:
    x = n.input(70, 64)
    return n.op("MatMul", _norm(n, n.op("MatMul", x, n.random(64, 192)), 192, "RMSNormalization"), n.random(192, 40))


def chain(n: Net) -> Value:
    """A launch that applies moments and tells those of its own rows."""
    x = n.input(50, 64)
    y = n.op("MatMul", _norm(n, n.op("MatMul", x, n.random(64, 128)), 128), n.random(128, 64))
    return n.op("MatMul", _norm(n, y, 64), n.random(64, 72))


NETS: dict[str, Callable[[Net], Value]] = {f.__name__: f for f in (block, mean_square, chain)}


def tactics(program: Program) -> list[str]:
    return [t["tactic"] for t in program.meta["tactics"] if t["kind"] in ("MatMul", "Gemm") and not t.get("dropped")]


@pytest.fixture
def wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NormedGemm, "defer", lambda self, b, op: None)


@pytest.mark.usefixtures("wanted")
@pytest.mark.parametrize("name", NETS)
def test_no_launch_normalizes(name: str) -> None:
    n = Net()
    program = check_simulated(n.done(NETS[name](n)))
    assert "gemm_normed_sm90" in tactics(program)
    found = kinds(program)
    assert {"RowMoments", "NormedProduct"} & set(found) and not [k for k in found if k.endswith("Normalization")]
