"""Products that normalize the residual that they add: results, refusals, and compilation."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from kernels.gemm.test_normed import PLAIN, _norm  # type: ignore[import-not-found]
from support.conv_cases import check_no_spills
from support.net import Net, built
from support.simulated import check_simulated, kinds, lowered, refusals, tactics
from support.tuned import tuned_by

from optdnn.errors import InternalError
from optdnn.ir.graph import Value
from optdnn.kernels.conv import implicit_gemm
from optdnn.kernels.conv.implicit_gemm import Config
from optdnn.kernels.conv.problem import Problem, Source
from optdnn.kernels.conv.row_forms import RowNorm
from optdnn.kernels.gemm.normed import NormedGemm
from optdnn.kernels.gemm.normed_residual import NormedResidualGemm
from optdnn.ops.norm import LayerNormAttrs
from optdnn.ops.shape import TransposeAttrs
from optdnn.ops.unary import GeluAttrs

NAME = "gemm_normed_residual_sm90"


def _dense(n: Net, x: Value, inside: int, outside: int) -> Value:
    return n.op("Add", n.op("MatMul", x, n.random(inside, outside)), n.random(outside))


def _perceptron(n: Net, rows: Value, width: int, kind: str = "LayerNormalization") -> Value:
    """A norm, two products, and the addition of the normalized rows."""
    normed = _norm(n, rows, width, kind)
    hidden = n.op("Gelu", _dense(n, normed, width, 192), attrs=GeluAttrs("tanh"))
    return n.op("Add", _dense(n, hidden, 192, width), normed)


def layers(n: Net) -> Value:
    """Two perceptrons whose norms follow the addition. The first one computes the moments for the second."""
    x = n.input(2, 37, 128)
    rows = _perceptron(n, n.op("Add", _dense(n, x, 128, 128), x), 128)
    return _perceptron(n, rows, 128)


def mean_square(n: Net) -> Value:
    return n.op("Relu", _perceptron(n, n.op("MatMul", n.input(70, 64), n.random(64, 128)), 128, "RMSNormalization"))


def odd_depth(n: Net) -> Value:
    """The adding product has no bias, its depth is no whole number of K steps, and it is the second addend."""
    rows = _norm(n, n.op("MatMul", n.input(50, 64), n.random(64, 192)), 192)
    hidden = n.op("Relu", n.op("MatMul", rows, n.random(192, 72)))
    return n.op("Add", rows, n.op("MatMul", hidden, n.random(72, 192)))


NETS: dict[str, Callable[[Net], Value]] = {f"residual_{f.__name__}": f for f in (layers, mean_square, odd_depth)}


@pytest.fixture
def wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    for tactic in (NormedGemm, NormedResidualGemm):
        monkeypatch.setattr(tactic, "defer", lambda self, b, op: None)


@pytest.mark.slow
@pytest.mark.usefixtures("wanted")
@pytest.mark.parametrize("streams", [1, 2])
@pytest.mark.parametrize("name", NETS)
def test_no_launch_normalizes(name: str, streams: int) -> None:
    graph = built(NETS[name])
    program = check_simulated(graph)
    assert NAME in tactics(program, "MatMul", "Gemm")
    assert {"NormedResidual", "NormedProduct"} & {*kinds(program)}
    assert not [k for k in kinds(program) if k.endswith("Normalization")]
    one = lowered(graph, precision="fp16", streams=streams)
    assert tactics(one, "MatMul", "Gemm") == tactics(program, "MatMul", "Gemm")


@pytest.mark.usefixtures("wanted")
def test_large_means_cancel() -> None:
    """Rows with a mean of 60 times their deviation lose only what 16 bits lose."""
    n = Net()
    stream = n.op("Add", n.op("MatMul", n.input(40, 64), n.random(64, 128, scale=0.125)), n.const(np.full(128, 60.0)))
    program = check_simulated(n.done(_perceptron(n, stream, 128)), tolerance=0.04)
    assert NAME in tactics(program, "MatMul", "Gemm")


def _bert(n: Net, rows: int, width: int, layers: int = 2) -> Value:
    x = n.op("Add", _dense(n, n.input(rows, width), width, width), n.input(rows, width))
    for _ in range(layers):
        normed = _norm(n, x, width)
        x = n.op("Add", _dense(n, n.op("Relu", _dense(n, normed, width, 4 * width)), 4 * width, width), normed)
    return x


def _reasons(program: object, tactic: str) -> list[str]:
    return refusals(program, tactic)


@pytest.mark.slow
def test_the_cost_model_takes_it() -> None:
    assert tactics(lowered(built(_bert, 128, 768)), "MatMul", "Gemm").count(NAME) == 2


def test_the_cost_model_leaves_separate_launches_that_cost_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optdnn.kernels.gemm.normed_residual.ADDED", 1e-3)
    program = lowered(built(_bert, 128, 768))
    assert NAME not in tactics(program, "MatMul", "Gemm")
    assert any("one launch 100" in why for why in _reasons(program, NAME))
    assert "LayerNormalization" in kinds(program)


def _another(n: Net) -> Value:
    x = n.input(40, 64)
    return n.op("Add", n.op("MatMul", x, n.random(64, 64)), _norm(n, n.op("Tanh", x), 64))


def _activated(n: Net) -> Value:
    rows = _norm(n, n.op("MatMul", n.input(40, 64), n.random(64, 128)), 128)
    hidden = n.op("Relu", n.op("MatMul", rows, n.random(128, 192)))
    return n.op("Add", n.op("Relu", n.op("MatMul", hidden, n.random(192, 128))), rows)


def _twice(n: Net) -> Value:
    rows = _norm(n, n.op("MatMul", n.input(40, 64), n.random(64, 128)), 128)
    return n.op("Add", n.op("MatMul", rows, n.random(128, 128)), rows)


def _read_again(n: Net) -> Value:
    rows = _norm(n, n.op("MatMul", n.input(40, 64), n.random(64, 128)), 128)
    hidden = n.op("Relu", n.op("MatMul", rows, n.random(128, 192)))
    return n.op("Mul", n.op("Add", n.op("MatMul", hidden, n.random(192, 128)), rows), n.op("Softmax", rows))


def _added_alone(n: Net) -> Value:
    x = n.input(40, 64)
    return n.op("Add", n.op("MatMul", x, n.random(64, 128)), _norm(n, n.op("MatMul", x, n.random(64, 128)), 128))


def _turned(n: Net) -> Value:
    """The rows of the adding product have another order."""
    normed = _norm(n, n.op("MatMul", n.input(5, 7, 64), n.random(64, 128)), 128)
    hidden = n.op("Transpose", n.op("MatMul", normed, n.random(128, 64)), attrs=TransposeAttrs((1, 0, 2)))
    mixed = n.op("MatMul", n.op("Reshape", hidden, n.ints(7, 320)), n.random(320, 320))
    back = n.op("Transpose", n.op("Reshape", n.op("Relu", mixed), n.ints(7, 5, 64)), attrs=TransposeAttrs((1, 0, 2)))
    return n.op("Add", n.op("MatMul", back, n.random(64, 128)), normed)


def _scale_that_is_given(n: Net) -> Value:
    rows = n.op("MatMul", n.input(40, 64), n.random(64, 128))
    normed = n.op("LayerNormalization", rows, n.input(128), attrs=LayerNormAttrs())
    hidden = n.op("Relu", n.op("MatMul", normed, n.random(128, 192)))
    return n.op("Add", n.op("MatMul", hidden, n.random(192, 128)), normed)


@pytest.mark.usefixtures("wanted")
@pytest.mark.parametrize(
    ("build", "options", "because"),
    [
        (_another, {}, "its residual is not the normalized rows of another product"),
        (_activated, {}, "more is done to its sums than the addition of the residual"),
        (_twice, {}, "it multiplies the normalized rows as well"),
        (_read_again, {}, "others read the normalized rows"),
        (_added_alone, {}, "others read the normalized rows"),
        (_turned, {}, "its rows do not lie one after the other"),
        (_scale_that_is_given, {}, "the norm: its scale and bias are not constant"),
        (_scale_that_is_given, {"precision": "tf32"}, "it is for 16-bit floats"),
        (
            mean_square,
            {"row_invariant": True},
            "moments are summed in another order where the launch before has other tiles",
        ),
    ],
)
def test_refusals(build: Callable[[Net], Value], options: dict[str, object], because: str) -> None:
    program = lowered(built(build), **{"precision": "fp16", **options})  # type: ignore[arg-type]
    assert because in _reasons(program, NAME)
    assert NAME not in tactics(program, "MatMul", "Gemm")


@pytest.mark.usefixtures("wanted")
def test_an_output_that_is_normalized_keeps_its_launch() -> None:
    n = Net()
    rows = _norm(n, n.op("MatMul", n.input(40, 64), n.random(64, 128)), 128)
    y = n.op("Add", n.op("MatMul", n.op("Relu", n.op("MatMul", rows, n.random(128, 192))), n.random(192, 128)), rows)
    program = check_simulated(n.done(y, rows))
    assert NAME not in tactics(program, "MatMul", "Gemm")
    assert "others read the normalized rows" in _reasons(program, NAME)


@pytest.mark.nvrtc
def test_the_tuner_counts_the_norm_that_is_dropped() -> None:
    """A launch that takes 1 us more than the product is better than the product and the norm, which takes 2."""
    graph = built(_bert, 128, 768, layers=1)

    def seconds(name: str) -> float:
        return 3e-6 if name.startswith(NAME) else 2e-6

    found, _, chosen = tuned_by(seconds, graph)
    assert NAME in chosen
    (problem,) = [p for p in found.problems if NAME in {t.choice.tactic for t in p.trials}]
    assert [p.op.kind for p in problem.covered.values()] == ["LayerNormalization"]


@pytest.mark.parametrize(
    ("fields", "because"),
    [
        ({"channels": 72}, "moments cover 64 channels each"),
        ({"out": "float32"}, "moments need rows of 16-bit values"),
        ({"epilogue": (("bias",),)}, "there is no residual to normalize"),
    ],
)
def test_problems_that_there_are_not(fields: dict[str, object], because: str) -> None:
    norm, epilogue = RowNorm(True, 1e-5), (("bias",), ("add",))
    with pytest.raises(InternalError, match=because):
        Problem(**{**PLAIN, "residual_norm": norm, "epilogue": epilogue, **fields})  # type: ignore[arg-type]


CONFIGS = (
    Config(2, 1, 1, 192, 4), Config(1, 1, 2, 128, 4, alternate=True), Config(1, 1, 1, 64, 12, split=4),
    Config(1, 1, 1, 16, 10, direct=True, blocks=2), Config(1, 1, 1, 104, 6, share=(1, 2)), Config(2, 1, 1, 248, 3),
)  # fmt: skip


def test_configurations_that_there_are_not() -> None:
    problem = Problem(8192, 768, (Source(1, 1, 3072),), (("bias",), ("add",)), residual_norm=RowNorm(True, 1e-6))
    wide, streamed = Config(1, 1, 2, 144, 3, alternate=True), Config(1, 1, 1, 64, 3, stream=True)
    assert implicit_gemm.refuse(problem, wide) == "rows are normalized after up to 128 accumulators per thread"
    assert implicit_gemm.refuse(problem, streamed) == "moments of rows need whole tiles"


@pytest.mark.nvrtc
@pytest.mark.parametrize("with_moments", [False, True])
def test_the_kernels_compile_without_spills(with_moments: bool) -> None:
    norm, epilogue = RowNorm(with_moments, 1e-6), (("bias",), ("add",))
    problem = Problem(4112, 768, (Source(1, 1, 3072),), epilogue, moments=with_moments, residual_norm=norm)
    for config in CONFIGS:
        check_no_spills(problem, config)
