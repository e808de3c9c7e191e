"""Packed weights as choices of automatic precision: where they are offered, predicted times, and plans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from precision.numpy_driver import Numpy, find
from support.net import Net
from support.sweep import sweep

import optdnn
from optdnn.config import BuildOptions
from optdnn.errors import UsageError
from optdnn.importers.onnx import import_model
from optdnn.ir.graph import Graph
from optdnn.models import trained
from optdnn.optimize import optimize
from optdnn.passes.support.precision import key
from optdnn.passes.support.precision_choices import PrecisionChoice, choices
from optdnn.precision import gpu_target
from optdnn.precision import predicted as predicted_times
from optdnn.precision.latency import OperatorTimes
from optdnn.precision.plans import Space
from optdnn.precision.search import target_of
from optdnn.precision.sensitivity import Sensitivities, Sensitivity, run_alone
from optdnn.precision.targets import assigned, packed_offers
from optdnn.runtime.program import Program
from optdnn.tuning.timing_cache import TimingCache
from optdnn.types import Array

WIDTH, SAMPLES = 128, 16


def layers(*, tied: bool = False, summed: bool = False) -> onnx.ModelProto:
    """Products of 128 x 512 and 512 x 128 with a Relu between them, and a head that is too small to be packed. ``tied``: a
    third product has the first one's weights. ``summed``: a sum reads these as floats."""
    rng = np.random.default_rng(0)
    shapes = {"wide": (WIDTH, 4 * WIDTH), "deep": (4 * WIDTH, WIDTH), "head": (WIDTH, 2)}
    weights = {n: (rng.standard_normal(s) / np.sqrt(s[0])).astype(np.float32) for n, s in shapes.items()}
    nodes = [
        helper.make_node("MatMul", ["x", "wide.w"], ["m"], "wide"),
        helper.make_node("Relu", ["m"], ["r"], "relu"),
        helper.make_node("MatMul", ["r", "deep.w"], ["n"], "deep"),
    ]
    last = "n"
    if tied:
        nodes.append(helper.make_node("MatMul", ["n", "wide.w"], ["again"], "again"))
        nodes.append(helper.make_node("MatMul", ["again", "deep.w"], ["back"], "back"))
        last = "back"
    if summed:
        nodes.append(helper.make_node("ReduceSum", ["wide.w"], ["total"], "total", keepdims=0))
        nodes.append(helper.make_node("Mul", ["x", "total"], ["scaled"], "scaled"))
        nodes.append(helper.make_node("Add", ["n", "scaled"], ["moved"], "moved"))
        last = "moved"
    nodes.append(helper.make_node("MatMul", [last, "head.w"], ["y"], "head"))
    ports = [[helper.make_tensor_value_info(*port)] for port in (("x", 1, [1, WIDTH]), ("y", 1, [1, 2]))]
    graph = helper.make_graph(
        nodes, "layers", *ports, [numpy_helper.from_array(a, f"{n}.w") for n, a in weights.items()]
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


BOUND = 0.006
"""A bound on the mean squared error of the trained transformer."""
DATA: dict[str, Array] = {"x": np.random.default_rng(3).standard_normal((SAMPLES, WIDTH)).astype(np.float32)}


def by_node(graph: Graph, target: str = "cuda:sm_90a") -> dict[str, PrecisionChoice]:
    return {name: c for c in choices(graph, target) for name in c.nodes}


@pytest.mark.parametrize("target", ["cpu", "cuda:sm_80", "cuda:sm_90a"])
def test_products_with_large_constant_weights_have_them(target: str) -> None:
    found = by_node(import_model(layers()), target)
    for name in ("wide", "deep"):
        assert {"w8", "w4"} <= set(found[name].precisions)
    assert "packing fewer than 4096 gains nothing" in found["head"].refused["w4"]
    assert not {"w8", "w4", "w4a8"} & {*found["relu"].precisions, *found["relu"].refused}
    if target == "cuda:sm_80":
        assert found["wide"].refused["w4a8"] == "there are no kernels for sm_80 that round rows to int8"
    else:
        assert "w4a8" in found["wide"].precisions


def test_weights_that_others_read_as_floats_stay_floats() -> None:
    found = by_node(import_model(layers(summed=True)))
    assert "total (ReduceSum) reads its weights as floats" in found["wide"].refused["w8"]
    assert "w8" in found["deep"].precisions
    assert "w8" in by_node(import_model(layers(tied=True)))["wide"].precisions


def test_offers_name_the_type_of_data() -> None:
    assert packed_offers("cuda:sm_90a", None) == ["w8+fp16", "w4+fp16", "w4a8+fp16"]
    assert packed_offers("cuda:sm_80", None) == ["w8+fp16", "w4+fp16"]
    assert packed_offers("cuda:sm_90a", ("fp32", "bf16", "w4")) == ["w8+bf16", "w4+bf16", "w4a8+bf16"]
    assert packed_offers("cuda:sm_90a", ("fp32", "w4")) == []
    assert packed_offers("cpu", ("fp32", "w4")) == ["w8", "w4", "w4a8"]
    options: dict[str, Any] = {"target": "simulate", "precision": "auto", "calib": DATA}
    driver = target_of(BuildOptions(**options), "simulate", TimingCache(), calibrated=False, packed=True)
    assert driver.offers == ("fp32", "fp16", "bf16", "w8+fp16", "w4+fp16")
    driver = target_of(
        BuildOptions(**options, candidates="w4"), "simulate", TimingCache(), calibrated=False, packed=True
    )
    assert driver.offers == ("fp32",)
    assert driver.notes == {"w4": "its data are fp16 or bf16, which are not among the candidates"}
    assert "w4+fp16" not in target_of(BuildOptions(**options), "simulate", TimingCache(), calibrated=False).offers


def test_rounded_rows_are_offered_only_where_they_are_asked_for() -> None:
    options: dict[str, Any] = {"target": "simulate", "precision": "auto", "calib": DATA}

    def offers(candidates: str | None, target: str = "simulate") -> tuple[tuple[str, ...], dict[str, str]]:
        asked = BuildOptions(**{**options, "target": target}, candidates=candidates)
        driver = target_of(asked, target, TimingCache(), calibrated=False, packed=True)
        return driver.offers, driver.notes

    assert "w4a8+fp16" not in offers(None)[0]
    assert offers("fp16,w4a8") == (("fp32", "fp16", "w4a8+fp16"), {})
    found, notes = offers("fp16,w4,w4a8", "cuda:sm_80")
    assert found == ("fp32", "fp16", "w4+fp16")
    assert notes == {"w4a8": "there are no kernels for sm_80 that round rows to int8"}


def predicted(rows: int, candidates: str) -> dict[str, float]:
    """Microseconds of a product of ``rows`` x 4096 x 4096 on an H200 that is not there."""
    n = Net()
    graph = n.done(n.matmul(n.input(rows, 4096), 4096))
    (op,) = graph.of_kind("MatMul")
    options = BuildOptions(target="cuda:h200", precision="auto", calib=DATA, candidates=candidates)
    driver = target_of(options, "cuda:h200", TimingCache(), calibrated=False, packed=True)
    (times,) = driver.operator_times(graph, None, lambda text: None)
    assert times.source == "the cost model of NVIDIA H200: nothing was measured"
    return {p: t.us for p, t in times.table[key(op)].items()}


@pytest.mark.slow
def test_times_are_predicted_by_the_cost_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_target, "_gpu", lambda target: None)
    one, many = predicted(1, "fp16,w8,w4"), predicted(4096, "fp16,w4,w4a8")
    assert one["fp32"] > one["fp16"] > one["w8"] > one["w4"]
    assert many["w4"] > 0.95 * many["fp16"], "arithmetic bounds many rows"
    assert many["w4a8"] < many["w4"]


@pytest.mark.parametrize(("target", "beside"), [("cpu", "fp32"), ("cuda:sm_90a", "fp16")])
def test_errors_of_rounded_rows_are_judged(target: str, beside: str) -> None:
    """Rounded rows add to the error of rounded weights. If only 4-bit weights fit the bound, rows stay exact."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((SAMPLES, WIDTH)).astype(np.float32)

    def error(weights: Array, precision: str) -> float:
        n = Net()
        graph = n.done(n.op("MatMul", n.input(SAMPLES, WIDTH), weights.astype(np.float32)))
        got = run_alone(graph, graph.of_kind("MatMul")[0], precision, {"x": x}, target, None, beside).astype(np.float64)
        return float(np.linalg.norm(got - x @ weights) / np.linalg.norm(x @ weights))

    drawn = rng.standard_normal((WIDTH, 4 * WIDTH))
    assert error(drawn, "w4") < error(drawn, "w4a8") < 1.1 * error(drawn, "w4")
    numbers = rng.integers(-8, 8, drawn.shape)
    numbers[:2] = [[-8], [7]]
    assert error(numbers, "w4") < 1e-3
    assert 3e-3 < error(numbers, "w4a8") < 0.02


def test_data_beside_packed_weights_are_not_cast() -> None:
    times = OperatorTimes("", "", beside="fp16")
    assert times.cast("w4", "fp16", 4096) == times.cast("w4", "w8", 4096) == 0
    assert times.cast("w4", "bf16", 4096) == times.cast("fp16", "bf16", 4096) > 0
    assert OperatorTimes("", "").cast("w4", "fp32", 4096) == 0


def test_a_pair_with_one_weight_is_packed_together_or_not_at_all() -> None:
    graph = import_model(layers(tied=True))
    space = Space(graph, "cuda:sm_90a", 3, {}, "fp16")
    keys = {n: c.key for n, c in by_node(graph).items()}
    noise = {(k, p): Sensitivity(0.0, 0.0, 0.0) for k, c in space.choices.items() for p in c.precisions}
    precisions = ("fp32", "fp16", "w8", "w4")
    problem = space.problem(OperatorTimes("", "", precisions, beside="fp16"), Sensitivities(noise))
    halves = dict.fromkeys(space.variables, "fp16")
    both = halves | {keys["wide"]: "w4", keys["again"]: "w4"}
    assert space.realizable(both, problem, None) == both
    assert space.realizable(halves | {keys["wide"]: "w4"}, problem, None) == halves


@pytest.fixture
def slow_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU with cheap launches and slow memory."""

    def by_bytes(program: Program) -> list[float]:
        sizes = [[program.buffers[i].nbytes or 0 for i in (*s.inputs, *s.outputs) if i >= 0] for s in program.steps]
        return [0.1 + sum(one) / 1e4 for one in sizes]

    for module in (predicted_times, gpu_target):
        monkeypatch.setattr(module, "step_times", by_bytes)


@pytest.mark.usefixtures("slow_memory")
@pytest.mark.parametrize(("bound", "packed"), sweep([(0.5, {"w4"}), (1e-3, {"w8"}), (1e-9, set())], (1e-3, {"w8"})))
def test_the_fastest_within_the_bound_on_a_gpu(bound: float, packed: set[str]) -> None:
    """By predicted times: 4-bit weights if the bound allows them, 8-bit weights with a tighter bound."""
    engine = optdnn.build(
        layers(),
        target="simulate",
        precision="auto",
        calib=DATA,
        metric="cosine",
        max_drop=bound,
        candidates="fp16,w8,w4",
    )
    reported = engine.meta["auto"]
    assert reported["met"]
    nodes = {name: n for n in reported["nodes"] for name in n["nodes"]}
    assert {nodes[n]["precision"] for n in ("wide", "deep")} & {"w4", "w8"} == packed
    assert engine.meta["operators"].get("PackedMatMul", 0) == 2 * len(packed)
    for name in ("wide", "deep"):
        reason = nodes[name]["reason"]
        assert all(reason.startswith(f"{p} is faster than fp32 here") for p in packed), reason
    assert "w8, w4: its weights are 256 numbers" in nodes["head"]["reason"]
    if packed == {"w8"}:
        assert "w4 would save" in nodes["wide"]["reason"]


@pytest.mark.slow
@pytest.mark.usefixtures("slow_memory")
def test_rounded_rows_are_searched_and_pinned() -> None:
    engine = optdnn.build(
        layers(), target="simulate", precision="auto", calib=DATA, metric="cosine", max_drop=0.5, candidates="fp16,w4a8",
        precision_map={"deep": "w4a8"},
    )  # fmt: skip
    reported = engine.meta["auto"]
    assert reported["met"]
    nodes = {name: n for n in reported["nodes"] for name in n["nodes"]}
    assert nodes["deep"]["reason"] == "pinned by --pin deep=w4a8"
    assert nodes["wide"]["precision"] == "w4a8"
    assert nodes["wide"]["reason"].startswith("w4a8 is faster than fp32 here")
    assert engine.meta["precision"]["runs"]["w4a8"] == 2
    with pytest.raises(UsageError, match="MatMul cannot run in w4a8: there are no kernels for sm_80"):
        optdnn.build(
            layers(), target="cuda:sm_80", precision="auto", calib=DATA, metric="cosine", no_cubins=True,
            precision_map={"deep": "w4a8"},
        )  # fmt: skip


@pytest.mark.slow
def test_pins_of_packed_weights_hold() -> None:
    engine = optdnn.build(
        layers(), target="simulate", precision="auto", calib=DATA, metric="cosine", max_drop=0.5, candidates="fp16",
        precision_map={"deep": "w4"},
    )  # fmt: skip
    nodes = {name: n for n in engine.meta["auto"]["nodes"] for name in n["nodes"]}
    assert nodes["deep"]["reason"] == "pinned by --pin deep=w4"
    assert nodes["wide"]["precision"] != "w4"
    assert engine.meta["operators"]["PackedMatMul"] == 1


@pytest.mark.slow
def test_the_cpu_target_times_them() -> None:
    pytest.importorskip("onnxruntime", reason="the cpu extra is not installed")
    options = BuildOptions(target="cpu", threads=1, tactics="onnxruntime")
    driver = target_of(options, "cpu", TimingCache(), calibrated=False, packed=True)
    assert driver.offers[-2:] == ("w8", "w4")
    graph = import_model(layers())
    (times,) = driver.operator_times(graph, None, lambda text: None)
    assert {"fp32", "w8", "w4"} <= set(times.table[by_node(graph, "cpu")["wide"].key])
    asked = replace(options, precision="auto", calib=DATA, candidates="w4a8")
    driver = target_of(asked, "cpu", TimingCache(), calibrated=False, packed=True)
    assert driver.offers == ("fp32", "w4a8")
    (times,) = driver.operator_times(graph, None, lambda text: None)
    assert "w4a8" in times.table[by_node(graph, "cpu")["wide"].key]


@pytest.mark.slow
def test_the_trained_transformer_mixes_4_and_8_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """With times proportional to the bytes of weights, and a bound between the losses of all-4-bit and all-8-bit weights."""
    network = trained.load("digits_transformer")
    graph = import_model(network.path, shapes={"x": (8, 1, 8, 8)})
    optimize(graph, BuildOptions(target="cpu"), "cpu", stop_before="assign_precision")
    able = [c.key for c in choices(graph, "cpu") if "w4" in c.precisions]
    assert len(able) >= 12
    driver = Numpy(("fp32", "w8", "w4"), times={k: {"fp32": 8.0, "w8": 2.0, "w4": 1.0} for k in able})
    x, labels = trained.training("digits_transformer")
    data = {"x": x[:64], "labels": labels[:64]}
    found = find(graph, driver, monkeypatch, metric="mse", max_drop=BOUND, calib=data, candidates="w8,w4")
    assert found.met
    chosen = found.report.candidate()
    assert chosen.worst <= BOUND
    assert {"w8", "w4"} <= set(chosen.counts), [(c.name, c.searched, c.counts) for c in found.report.candidates]
    alone = {c.name: c for c in found.report.candidates if c.single}
    assert alone["w8"].worst <= BOUND < alone["w4"].worst
    assert chosen.ms is not None
    assert alone["w8"].ms is not None
    assert chosen.ms < alone["w8"].ms
    made, _ = assigned(graph, found.plan, "cpu", None)
    codes = [op.attrs.code for op in made.of_kind("PackedMatMul")]
    wanted = [found.plan.nodes[k] for k in able]
    assert [codes.count(c) for c in ("uint4", "uint8")] == [wanted.count(p) for p in ("w4", "w8")]
    reasons = {n.key: n.reason for n in found.report.nodes}
    assert all(
        f"{found.plan.nodes[k]} is faster than fp32 here" in reasons[k] for k in able if found.plan.nodes[k] != "fp32"
    )
