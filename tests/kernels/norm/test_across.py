"""Norms between products over tokens: no separate launch transposes, and refusals."""

from __future__ import annotations

import numpy as np
import pytest
from support.net import Net, built
from support.on_gpu import checked_launches
from support.simulated import check_simulated, kinds, lowered, refusals, tactics

from optdnn.ir.graph import Graph, Value
from optdnn.kernels.norm import across as across_tactic
from optdnn.kernels.norm import across_kernel as across
from optdnn.kernels.norm.across_kernel import Config, Problem
from optdnn.kernels.tactic import Offer
from optdnn.ops import norm
from optdnn.runtime.cuda.compile import nvrtc
from optdnn.runtime.cuda.gpu_facts import of_arch
from optdnn.runtime.program import Program

GPU = of_arch("sm_90a")


def normalized(n: Net, x: Value, kind: str = "LayerNormalization") -> Value:
    parameters = [n.positive(48), n.random(48)][: 2 if kind == "LayerNormalization" else 1]
    return n.op(kind, x, *parameters, attrs=norm.LayerNormAttrs(-1, 1e-3))


def mixer(n: Net, tokens: int, kind: str = "LayerNormalization") -> Value:
    """A block of MLP-Mixer (Tolstikhin et al., 2021)."""
    x = n.matmul(n.input(3, tokens, 16), 48)
    mixed = n.op("Gelu", n.op("Add", n.matmul(n.transposed(normalized(n, x, kind), 0, 2, 1), 24), n.random(24)))
    mixed = n.op("Add", n.matmul(mixed, tokens), n.random(tokens))
    x = n.op("Add", x, n.transposed(mixed, 0, 2, 1))
    return n.op("Add", x, n.matmul(n.op("Gelu", n.matmul(normalized(n, x, kind), 56)), 48))


@pytest.mark.parametrize(
    ("tokens", "kind"), [(20, "LayerNormalization"), (24, "LayerNormalization"), (20, "RMSNormalization")]
)
def test_nothing_is_turned_by_a_launch_of_its_own(tokens: int, kind: str) -> None:
    program = check_simulated(built(mixer, tokens, kind))
    chosen = tactics(program)
    assert chosen.count("norm_across") == chosen.count("add_norm_across") == 1
    products, mixed = ["Conv", "Conv"], ["SeparableConv"] if tokens % 8 == 0 else ["Conv", "Conv"]
    assert kinds(program) == ["Pointwise", "Conv", kind, *mixed, "AddNorm", *products, "Pointwise"]  # and two casts


def normalized_across(n: Net, tokens: int, kind: str = "LayerNormalization") -> Value:
    """A norm of the result of a product over tokens."""
    mixed = n.matmul(n.transposed(n.matmul(n.input(3, tokens, 16), 48), 0, 2, 1), tokens)
    return n.matmul(normalized(n, n.transposed(mixed, 0, 2, 1), kind), 24)


@pytest.mark.parametrize("kind", ["LayerNormalization", "RMSNormalization"])
def test_a_norm_reads_transposed_rows(kind: str) -> None:
    program = check_simulated(built(normalized_across, 20, kind))
    assert tactics(program).count("norm_of_across") == 1
    assert kinds(program)[-3:] == ["Conv", kind, "Conv"]


def test_a_norm_of_rows_reads_them_as_rows() -> None:
    n = Net()
    program = lowered(n.done(n.matmul(normalized(n, n.matmul(n.input(3, 20, 16), 48)), 24)))
    assert "its operand is not a stack of transposed matrices" in refused(program, "norm_of_across")
    n = Net()
    program = lowered(
        n.done(normalized(n, n.transposed(n.matmul(n.transposed(n.input(3, 20, 48), 0, 2, 1), 20), 0, 2, 1))), "fp32"
    )
    assert "norm_of_across" not in tactics(program)


def refused(program: Program, tactic: str) -> set[str]:
    return set(refusals(program, tactic))


def test_a_norm_that_rows_read_is_not_turned() -> None:
    n = Net()
    x = n.matmul(n.input(3, 20, 16), 48)
    program = lowered(n.done(n.matmul(normalized(n, x), 24)))
    assert "no transposition is the only reader of its result" in refused(program, "norm_across")
    n = Net()
    x = n.matmul(n.input(3, 20, 16), 48)
    program = lowered(n.done(n.op("Softmax", n.transposed(normalized(n, x), 0, 2, 1))))
    assert "a reader of its transposed result is not a product of rows" in refused(program, "norm_across")


def test_sums_of_rows_are_not_turned() -> None:
    n = Net()
    one, other = (n.matmul(n.op("Relu", n.input(3, 20, 16, name=name)), 48) for name in "xy")
    one, other = n.op("Softmax", one), n.op("Softmax", other)
    sliced = n.op("Slice", other, n.ints(0), n.ints(3), n.ints(0))
    program = lowered(n.done(normalized(n, n.op("Add", one, sliced))))
    assert "add_norm_across" not in tactics(program)
    n = Net()
    one, other = n.op("Softmax", n.input(3, 20, 48)), n.op("Softmax", n.input(3, 20, 96, name="y"))
    half = n.op("Slice", other, n.ints(0), n.ints(48), n.ints(2))
    program = lowered(n.done(normalized(n, n.op("Add", one, half))))
    assert "it is not the sum of an operand in rows and a transposed one" in refused(program, "add_norm_across")


PROBLEM = Problem("layer_norm", 4, 196, 768, across=True, output_at=(768 * 200, 200))


@pytest.mark.parametrize(
    ("changes", "config", "because"),
    [
        ({"operation": "softmax"}, Config(16, 256), "no operation"),
        ({"across": False}, Config(16, 256), "no operand is transposed"),
        ({"across": False, "turned": True, "addend_at": (8, 4)}, Config(16, 256), "multiples of 16 bytes"),
        ({"images": 0}, Config(16, 256), "no rows"),
        ({"length": 772}, Config(16, 256), "vectors of 8"),
        ({"length": 2048}, Config(16, 256), "vectors of 8"),
        ({"output_at": (768 * 196, 196)}, Config(16, 256), "multiples of 16 bytes"),
        ({}, Config(12, 256), "do not share"),
        ({}, Config(8, 512), "do not share"),
    ],
)
def test_refusals(changes: dict[str, object], config: Config, because: str) -> None:
    assert across.refuse(PROBLEM, Config(16, 256), GPU.shared_per_block) is None
    problem = Problem(**{**PROBLEM.__dict__, **changes})  # type: ignore[arg-type]
    assert because in str(across.refuse(problem, config, GPU.shared_per_block))


def test_a_tile_fits_shared_memory() -> None:
    assert "shared memory" in str(across.refuse(PROBLEM, Config(32, 256), 48 << 10))
    assert all(c.shared_bytes(PROBLEM) <= GPU.shared_per_block for c in across.candidates(PROBLEM, GPU))


@pytest.mark.nvrtc
def test_the_kernel_compiles_without_spills() -> None:
    added = Problem("rms_norm", 4, 196, 1536, "bfloat16", add=True, bias=False, addend_at=(1536 * 200, 200))
    read = Problem("layer_norm", 64, 64, 128, turned=True, addend_at=(64, 4096))
    for problem in (PROBLEM, added, read):
        (found,) = nvrtc.resources(across.recipe(problem, across.candidates(problem, GPU)[0])).values()
        assert found.spill_bytes == 0


def test_estimates_prefer_whole_sectors() -> None:
    seconds = {c.rows: across.estimate(PROBLEM, c, GPU) for c in across.candidates(PROBLEM, GPU) if c.threads == 256}
    assert np.argmin([seconds[8], seconds[16]]) == 1


def check_on_a_gpu(graph: Graph, precision: str, kind: str = "AddNorm") -> None:
    found = checked_launches(graph, precision)
    assert kind in {e.kind for e in found}


@pytest.mark.hopper
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize(
    "config", [across.Config(r, t) for r, t in ((8, 128), (8, 256), (16, 128), (16, 512), (32, 256), (32, 512))]
)
@pytest.mark.parametrize(
    ("tokens", "kind"),
    [(20, "LayerNormalization"), (24, "RMSNormalization"), (196, "LayerNormalization"), (7, "LayerNormalization")],
)
def test_tokens_on_a_gpu(
    tokens: int, kind: str, config: across.Config, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(across_tactic, "kernel_offers", lambda kernel, problem, gpu: (Offer(config, 1e-6),))
    check_on_a_gpu(built(mixer, tokens, kind), precision)
    check_on_a_gpu(built(normalized_across, tokens, kind), precision, kind)


@pytest.mark.hopper
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("shape", [(1, 6, 48), (6, 48), (48,)])
def test_addends_that_repeat_on_a_gpu(shape: tuple[int, ...], precision: str) -> None:
    n = Net()
    total = n.op("Add", n.random(*shape), n.op("Softmax", n.matmul(n.input(3, 6, 32), 48)))
    check_on_a_gpu(n.done(n.op("Softmax", normalized(n, total)), n.op("Softmax", total)), precision)
