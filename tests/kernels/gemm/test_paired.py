"""Gated linear units: two products of the same rows in one launch, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from support.conv_cases import check_no_spills
from support.net import Net, built
from support.on_gpu import checked_launches
from support.one_config import CONFIGS, PAIR_TOLERANCE, STORED, only_of
from support.simulated import check_simulated, kinds, lowered, refusals, tactics

from optdnn.errors import InternalError
from optdnn.ir.graph import Value
from optdnn.kernels.conv.implicit_gemm import Config
from optdnn.kernels.conv.parts import PartsGemm
from optdnn.kernels.conv.parts_kernel import PartsConfig
from optdnn.kernels.conv.problem import Problem, Source
from optdnn.kernels.gemm.paired import PairedGemm, PairedPartsGemm
from optdnn.kernels.tactic import Offer
from optdnn.ops.unary import GeluAttrs


def swish_unit(n: Net) -> Value:
    x = n.input(70, 72)
    gate = n.op("Swish", n.op("MatMul", x, n.random(72, 40)))
    return n.op("Mul", gate, n.op("MatMul", x, n.random(72, 40)))


def with_biases(n: Net) -> Value:
    x = n.input(2, 33, 64)
    value = n.op("Add", n.op("MatMul", x, n.random(64, 136)), n.random(136))
    gate = n.op("Gelu", n.op("Add", n.op("MatMul", x, n.random(64, 136)), n.random(136)), attrs=GeluAttrs("tanh"))
    return n.op("Mul", value, gate)


def both_activated(n: Net) -> Value:
    x = n.input(20, 40)
    one, other = (n.op(kind, n.op("MatMul", x, n.random(40, 24))) for kind in ("Tanh", "Sigmoid"))
    return n.op("Relu", n.op("Mul", one, other))


def of_few_features(n: Net) -> Value:
    """Rows whose number of features is no multiple of eight: the packed weights are padded with zeros."""
    x = n.op("Relu", n.input(36, 12))
    return n.op("Mul", n.op("Swish", n.op("MatMul", x, n.random(12, 24))), n.op("MatMul", x, n.random(12, 24)))


NETS: dict[str, Callable[[Net], Value]] = {
    f.__name__: f for f in (swish_unit, with_biases, both_activated, of_few_features)
}


@pytest.mark.parametrize(
    ("precision", "tactic"), [("fp16", PairedGemm), ("tf32", PairedGemm), ("fp32", PairedPartsGemm)]
)
@pytest.mark.parametrize("name", NETS)
def test_a_gated_unit_is_one_launch(
    name: str, precision: str, tactic: type[PairedGemm], monkeypatch: pytest.MonkeyPatch
) -> None:
    for deferring in (PairedGemm, PairedPartsGemm, PartsGemm):
        monkeypatch.setattr(deferring, "defer", lambda self, b, op: None)
    program = check_simulated(built(NETS[name]), precision)
    assert tactics(program, "MatMul", "Gemm") == [tactic.name]
    assert "PairedProduct" in kinds(program)
    assert "MatMul" not in kinds(program)


def _fires(n: Net) -> Value:
    x = n.input(20, 40)
    return n.op("Mul", n.op("Relu", n.op("MatMul", x, n.random(40, 24))), n.op("MatMul", x, n.random(40, 24)))


def _added(n: Net) -> Value:
    x = n.input(20, 40)
    return n.op("Add", n.op("Relu", n.op("MatMul", x, n.random(40, 24))), n.op("MatMul", x, n.random(40, 24)))


def _other_rows(n: Net) -> Value:
    one, other = (n.op("MatMul", n.input(20, 40, name=name), n.random(40, 24)) for name in "xy")
    return n.op("Mul", one, n.op("Relu", other))


def _odd(n: Net) -> Value:
    x = n.input(20, 40)
    return n.op("Mul", n.op("Relu", n.op("MatMul", x, n.random(40, 20))), n.op("MatMul", x, n.random(40, 20)))


def _scaled(n: Net) -> Value:
    x = n.input(20, 40)
    gate = n.op("Relu", n.op("Mul", n.op("Tanh", n.op("MatMul", x, n.random(40, 24))), n.const(3.0)))
    return n.op("Mul", gate, n.op("MatMul", x, n.random(40, 24)))


@pytest.mark.parametrize(
    ("build", "precision", "because"),
    [
        (_added, "fp16", "it is not multiplied by another product of the same rows"),
        (_other_rows, "fp16", "it is not multiplied by another product of the same rows"),
        (_odd, "fp16", "its number of columns is not a multiple of 8"),
        (_scaled, "fp16", "its stages have constants"),
        (_added, "fp32", "it is not multiplied by another product of the same rows"),
    ],
)
def test_refusals(build: Callable[[Net], Value], precision: str, because: str) -> None:
    program = lowered(built(build), precision)
    refused = refusals(program, "*paired*")
    assert because in refused


def test_two_launches_that_are_predicted_to_be_faster_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PairedGemm, "configs", lambda self, b, op: [Offer(None, 1.0)])
    program = lowered(built(_fires))
    assert tactics(program, "MatMul", "Gemm") == ["gemm_sm90", "gemm_sm90"]
    reasons = refusals(program)
    assert any("two launches are predicted to take" in r for r in reasons)


def test_pairs_are_of_rows_of_floats() -> None:
    stages = {"epilogue": (("bias",), ("mul",)), "beside": (("bias",), ("silu",))}
    assert not Problem(64, 48, (Source(1, 1, 64),), **stages).residual
    for wrong in (
        {"dtype": "int8"},
        {"out": "float32"},
        {"bands": 2},
        {"prologue": (("relu",),)},
    ):
        with pytest.raises(InternalError, match="have pairs of channels"):
            Problem(**{"batch": 64, "channels": 48, "sources": (Source(1, 1, 64),), **stages, **wrong})


@pytest.mark.nvrtc
def test_the_kernel_compiles_without_spills() -> None:
    problem = Problem(8192, 256, (Source(1, 1, 512),), (("bias",), ("mul",)), beside=(("bias",), ("silu",)))
    for config in (
        Config(2, 1, 1, 256, 4),
        Config(1, 1, 2, 144, 5, alternate=True),
        Config(1, 1, 1, 64, 8, direct=True),
    ):
        check_no_spills(problem, config)
    check_no_spills(replace(problem, dtype="tfloat32", out="float32"), Config(2, 1, 1, 96, 3, direct=True))
    check_no_spills(replace(problem, dtype="float32"), PartsConfig(2, 1, 144, 4))


def large(n: Net) -> Value:
    """More tiles than multiprocessors, and a last tile that is cut."""
    x = n.input(3001, 200)
    return n.op("Mul", n.op("Swish", n.op("MatMul", x, n.random(200, 1000))), n.op("MatMul", x, n.random(200, 1000)))


@pytest.mark.hopper
@pytest.mark.parametrize("precision", PAIR_TOLERANCE)
@pytest.mark.parametrize("config", [*CONFIGS, *STORED], ids=str)
@pytest.mark.parametrize("name", [*NETS, "large"])
def test_each_configuration_on_a_gpu(
    name: str, config: Config, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_of(monkeypatch, PairedPartsGemm if precision == "fp32" else PairedGemm, config)
    graph = built({**NETS, "large": large}[name])
    found = checked_launches(graph, precision, PAIR_TOLERANCE[precision])
    assert "PairedProduct" in {e.kind for e in found}
