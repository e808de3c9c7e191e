"""Products of normalized rows without a launch for the norm: results, refusals, and compilation."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from support.conv_cases import check_no_spills
from support.net import Net, built
from support.simulated import check_simulated, kinds, lowered, refusals, tactics
from support.tuned import tuned_by

from optdnn.config import BuildOptions
from optdnn.errors import InternalError
from optdnn.ir.graph import Value
from optdnn.kernels.conv import implicit_gemm
from optdnn.kernels.conv.implicit_gemm import Config
from optdnn.kernels.conv.problem import Problem, Source
from optdnn.kernels.conv.row_forms import RowNorm
from optdnn.kernels.gemm.normed import NormedGemm, NormedPair
from optdnn.lowering.choose import TacticChoice
from optdnn.lowering.cuda import emit_program
from optdnn.ops.norm import LayerNormAttrs
from optdnn.ops.unary import GeluAttrs
from optdnn.optimize import optimize
from optdnn.runtime.cuda.gpu_facts import of_arch


def _norm(n: Net, x: Value, width: int, kind: str = "LayerNormalization") -> Value:
    scale = n.const(1 + 0.2 * np.random.default_rng(width).standard_normal(width).astype(np.float32))
    if kind == "RMSNormalization":
        return n.op(kind, x, scale, attrs=LayerNormAttrs(epsilon=1e-6))
    return n.op(kind, x, scale, n.random(width), attrs=LayerNormAttrs())


def block(n: Net) -> Value:
    """A product with a residual, a norm, and the two products of a perceptron. The residual is added again."""
    x = n.input(2, 37, 128)
    stream = n.op("Add", n.op("MatMul", x, n.random(128, 128)), x)
    hidden = n.op(
        "Gelu",
        n.op("Add", n.op("MatMul", _norm(n, stream, 128), n.random(128, 256)), n.random(256)),
        attrs=GeluAttrs("tanh"),
    )
    return n.op("Add", n.op("MatMul", hidden, n.random(256, 128)), stream)


def mean_square(n: Net) -> Value:
    x = n.input(70, 64)
    return n.op("MatMul", _norm(n, n.op("MatMul", x, n.random(64, 192)), 192, "RMSNormalization"), n.random(192, 40))


def chain(n: Net) -> Value:
    """A launch that applies moments and computes those of its own rows."""
    x = n.input(50, 64)
    y = n.op("MatMul", _norm(n, n.op("MatMul", x, n.random(64, 128)), 128), n.random(128, 64))
    return n.op("MatMul", _norm(n, y, 64), n.random(64, 72))


def gated(n: Net) -> Value:
    x = n.input(70, 64)
    rows = _norm(n, n.op("Add", n.op("MatMul", x, n.random(64, 64)), x), 64, "RMSNormalization")
    return n.op("Mul", n.op("Swish", n.op("MatMul", rows, n.random(64, 40))), n.op("MatMul", rows, n.random(64, 40)))


def gated_layer(n: Net) -> Value:
    rows = _norm(n, n.op("MatMul", n.input(40, 64), n.random(64, 128)), 128)
    one, other = (n.op("Add", n.op("MatMul", rows, n.random(128, 72)), n.random(72)) for _ in range(2))
    return n.op("Mul", one, n.op("Gelu", other))


def all_tokens(n: Net) -> Value:
    """Rows of all tokens of a batch: a Reshape of a product's result (OPT)."""
    rows = n.op("Reshape", n.op("MatMul", n.input(2, 37, 64), n.random(64, 128)), n.ints(74, 128))
    return n.op("MatMul", _norm(n, rows, 128), n.random(128, 64))


def side_by_side(n: Net) -> Value:
    """Two products of the same normalized rows, like those of attention and perceptron in GPT-J."""
    rows = _norm(n, n.op("MatMul", n.input(40, 64), n.random(64, 128)), 128)
    left = n.op("MatMul", n.op("Relu", n.op("MatMul", rows, n.random(128, 192))), n.random(192, 64))
    return n.op("Add", left, n.op("MatMul", n.op("Relu", n.op("MatMul", rows, n.random(128, 72))), n.random(72, 64)))


NETS: dict[str, Callable[[Net], Value]] = {
    f.__name__: f for f in (block, mean_square, chain, gated, gated_layer, all_tokens, side_by_side)
}


@pytest.fixture
def wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    for tactic in (NormedGemm, NormedPair):
        monkeypatch.setattr(tactic, "defer", lambda self, b, op: None)


@pytest.mark.usefixtures("wanted")
@pytest.mark.parametrize("name", NETS)
def test_no_launch_normalizes(name: str) -> None:
    program = check_simulated(built(NETS[name]))
    assert {"gemm_normed_sm90", "gemm_paired_normed_sm90"} & {*tactics(program, "MatMul", "Gemm")}
    found = kinds(program)
    assert {"RowMoments", "NormedProduct"} & {*found}
    assert not [k for k in found if k.endswith("Normalization")]


@pytest.mark.usefixtures("wanted")
def test_a_product_beside_others_may_be_an_output_of_the_network() -> None:
    n = Net(np.float16)
    rows = _norm(n, n.op("MatMul", n.input(1, 1, 128), n.random(128, 128)), 128, "RMSNormalization")
    hidden = n.op("Relu", n.op("MatMul", rows, n.random(128, 256)))
    program = check_simulated(
        n.done(n.op("MatMul", rows, n.random(128, 64)), n.op("MatMul", hidden, n.random(256, 64)))
    )
    assert tactics(program, "MatMul", "Gemm").count("gemm_normed_sm90") == 2


@pytest.mark.usefixtures("wanted")
def test_a_norm_that_others_read_runs_beside_the_product() -> None:
    graph = built(_read_by_others)
    program = check_simulated(graph)
    assert {"RowMoments", "NormedProduct", "LayerNormalization"} <= {*kinds(program)}
    lanes = lowered(graph, precision="fp16", streams=2).lanes
    assert {s.lane for s in lanes} == {0, 1}


@pytest.mark.usefixtures("wanted")
def test_a_norm_whose_result_a_gated_unit_adds_is_stored() -> None:
    """The pair reads the normalized rows twice: as its factor, and as its addend."""
    n = Net()
    rows = _norm(n, n.op("MatMul", n.input(70, 64), n.random(64, 64)), 64, "RMSNormalization")
    unit = n.op("Mul", n.op("Relu", n.op("MatMul", rows, n.random(64, 64))), n.op("MatMul", rows, n.random(64, 64)))
    program = check_simulated(n.done(n.op("Add", unit, rows)))
    assert "gemm_paired_sm90" in tactics(program, "MatMul", "Gemm")
    assert "its own stages read the normalized rows" in refusals(program, "*paired_normed*")


@pytest.mark.usefixtures("wanted")
def test_large_means_cancel() -> None:
    """Rows with a mean of 60 times their deviation lose only what 16 bits lose."""
    n = Net()
    x = n.input(40, 64)
    stream = n.op("Add", n.op("MatMul", x, n.random(64, 128, scale=0.125)), n.const(np.full(128, 60.0)))
    y = n.op("MatMul", _norm(n, stream, 128), n.random(128, 64, scale=0.1))
    program = check_simulated(n.done(y), tolerance=0.03)
    assert "gemm_normed_sm90" in tactics(program, "MatMul", "Gemm")


def _perceptron(n: Net, rows: int, width: int) -> Value:
    hidden = n.op("Relu", n.op("MatMul", n.input(rows, 64), n.random(64, width)))
    stream = n.op("MatMul", hidden, n.random(width, width))
    return n.op("MatMul", _norm(n, stream, width), n.random(width, 4 * width))


@pytest.mark.slow
def test_the_cost_model_takes_it_and_leaves_the_largest_products() -> None:
    assert tactics(lowered(built(_perceptron, 800, 256)), "MatMul", "Gemm")[-1] == "gemm_normed_sm90"
    program = lowered(built(_perceptron, 20000, 512))
    assert tactics(program, "MatMul", "Gemm")[-1] == "gemm_sm90"
    reasons = refusals(program, "*normed*")
    assert "42 GFLOP run at the power limit, where a norm before the product costs little" in reasons


def test_the_cost_model_gives_gated_units_their_norm() -> None:
    assert "gemm_paired_normed_sm90" in tactics(lowered(built(gated)), "MatMul", "Gemm")


def _read_by_others(n: Net) -> Value:
    """The normalized rows, after an activation, are the residual."""
    rows = _norm(n, n.op("MatMul", n.input(40, 64), n.random(64, 128)), 128)
    hidden = n.op("Relu", n.op("MatMul", rows, n.random(128, 192)))
    return n.op("Add", n.op("Relu", n.op("MatMul", hidden, n.random(192, 128))), rows)


def _odd(n: Net) -> Value:
    x = n.input(40, 64)
    return n.op("MatMul", _norm(n, n.op("MatMul", x, n.random(64, 72)), 72), n.random(72, 40))


def _other_rows(n: Net) -> Value:
    rows = n.op("Reshape", n.op("MatMul", n.input(40, 64), n.random(64, 128)), n.ints(80, 64))
    return n.op("MatMul", _norm(n, rows, 64), n.random(64, 40))


def _no_product(n: Net) -> Value:
    return n.op("MatMul", _norm(n, n.op("Tanh", n.input(40, 64)), 64), n.random(64, 40))


def _added(n: Net) -> Value:
    x = n.input(40, 64)
    return n.op("Add", n.op("MatMul", _norm(n, n.op("MatMul", x, n.random(64, 128)), 128), n.random(128, 64)), x)


def _scaled(n: Net, scale: float) -> Value:
    rows = n.op("MatMul", n.input(40, 64), n.random(64, 128))
    normed = n.op("LayerNormalization", rows, n.const(np.full(128, scale)), n.random(128), attrs=LayerNormAttrs())
    return n.op("MatMul", normed, n.random(128, 64))


def _tiny_scale(n: Net) -> Value:
    return _scaled(n, 1e-6)


def _huge_scale(n: Net) -> Value:
    """The scaled weights also exceed fp32."""
    return _scaled(n, 3e38)


@pytest.mark.usefixtures("wanted")
@pytest.mark.parametrize(
    ("build", "options", "because"),
    [
        (_no_product, {}, "its rows are not the normalized rows of another product"),
        (_other_rows, {}, "its rows are not the normalized rows of another product"),
        (_read_by_others, {"streams": 1}, "others read the normalized rows, and steps run one after the other"),
        (gated, {}, "other products read the normalized rows"),
        (_odd, {}, "rows of 72 channels are not whole groups of 64"),
        (_added, {}, "its stages read other tensors"),
        (_tiny_scale, {}, "the matrix times the norm's scale does not fit 16 bits"),
        (_huge_scale, {"precision": "bf16"}, "the matrix times the norm's scale does not fit 16 bits"),
        (_huge_scale, {"precision": "tf32"}, "it is for 16-bit floats"),
        (
            mean_square,
            {"row_invariant": True},
            "moments are summed in another order where the launch before has other tiles",
        ),
    ],
)
def test_refusals(build: Callable[[Net], Value], options: dict[str, object], because: str) -> None:
    program = lowered(built(build), **{"precision": "fp16", **options})  # type: ignore[arg-type]
    refused = refusals(program, "*normed*")
    assert because in refused


@pytest.mark.nvrtc
@pytest.mark.parametrize(("joint", "taken"), [(5.5e-6, True), (6.5e-6, False)])
def test_the_tuner_counts_both_launches_that_are_dropped(joint: float, taken: bool) -> None:
    """Norm and both products take 2 us each. One launch of all three is better with 5.5 us, and not with 6.5."""

    def seconds(name: str) -> float:
        return joint if name.startswith("gemm_paired_normed") else 9e-6 if name.startswith("gemm_paired") else 2e-6

    graph = built(gated)
    found, _, tactics = tuned_by(seconds, graph)
    assert ("gemm_paired_normed_sm90" in tactics) == taken
    (problem,) = [p for p in found.problems if len(p.covered) == 2]
    assert sorted(p.op.kind for p in problem.covered.values()) == ["MatMul", "RMSNormalization"]
    assert problem.covered_seconds == pytest.approx(4e-6)


def test_a_choice_that_other_choices_exclude_is_left_to_the_cost_model() -> None:
    """The launch before may get another tactic, which computes no moments."""
    graph, options = built(mean_square), BuildOptions(target="simulate", precision="fp16")
    optimize(graph, options, "simulate")
    gpu = of_arch("sm_90a")
    first = emit_program(graph, options, gpu, {}).decisions
    keys = [d.signature for d in first if d.op.kind == "MatMul"]
    wanted = {keys[1]: TacticChoice("gemm_normed_sm90"), keys[0]: TacticChoice("gemm_sm90")}
    found = {d.signature: d.choice.tactic for d in emit_program(graph, options, gpu, {}, wanted).decisions}
    assert [found[k] for k in keys] == ["gemm_sm90", "gemm_normed_sm90"]
    wanted[keys[0]] = TacticChoice("matmul_tiled")
    found = {d.signature: d.choice.tactic for d in emit_program(graph, options, gpu, {}, wanted).decisions}
    assert [found[k] for k in keys] == ["matmul_tiled", "gemm_sm90"]


PLAIN = {"batch": 64, "channels": 128, "sources": (Source(1, 1, 128),)}


@pytest.mark.parametrize(
    ("fields", "because"),
    [
        ({"moments": True, "channels": 72}, "moments cover 64 channels each"),
        ({"norm": RowNorm(True, 1e-5), "sources": (Source(1, 1, 72),)}, "moments cover 64 channels each"),
        ({"moments": True, "out": "float32"}, "moments need rows of 16-bit values"),
        ({"moments": True, "bands": 2}, "moments need rows of 16-bit values"),
        ({"norm": RowNorm(True, 1e-5), "epilogue": (("bias",), ("add",))}, "take no residual"),
    ],
)
def test_problems_that_there_are_not(fields: dict[str, object], because: str) -> None:
    with pytest.raises(InternalError, match=because):
        Problem(**{**PLAIN, **fields})  # type: ignore[arg-type]


def test_spans_of_k_are_refused() -> None:
    streamed = Config(1, 1, 1, 64, 3, stream=True)
    for problem in (Problem(**PLAIN, moments=True), Problem(**PLAIN, norm=RowNorm(False, 1e-5))):  # type: ignore[arg-type]
        assert implicit_gemm.refuse(problem, streamed) == "moments of rows need whole tiles"


def test_wide_tiles_are_refused_after_a_norm() -> None:
    wide, fields = Config(1, 1, 2, 144, 3, alternate=True), {**PLAIN, "batch": 8192}
    assert implicit_gemm.refuse(Problem(**fields, moments=True), wide) is None  # type: ignore[arg-type]
    why = implicit_gemm.refuse(Problem(**fields, norm=RowNorm(True, 1e-5)), wide)  # type: ignore[arg-type]
    assert why == "rows are normalized after up to 128 accumulators per thread"


CONFIGS = (
    Config(2, 1, 1, 248, 3), Config(1, 1, 2, 128, 4, alternate=True), Config(1, 1, 1, 72, 8, split=2),
    Config(1, 1, 1, 24, 8, direct=True), Config(1, 1, 1, 104, 6, share=(1, 2)),
)  # fmt: skip


@pytest.mark.nvrtc
def test_the_kernels_compile_without_spills() -> None:
    computing = Problem(4112, 768, (Source(1, 1, 3072),), (("bias",), ("add",)), moments=True)
    normed = Problem(4112, 3072, (Source(1, 1, 768),), (("bias",), ("gelu",)), norm=RowNorm(True, 1e-6))
    for problem in (computing, normed):
        for config in CONFIGS:
            check_no_spills(problem, config)
