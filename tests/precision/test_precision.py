"""Precision end to end on the cpu target: requests, executed precisions, reports, and accuracy on real networks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.needs import needs_libraries
from support.net import Net
from support.quantized_nets import QNet
from support.sweep import sweep

from optdnn.cli.main import run
from optdnn.compiler import build_verbose
from optdnn.config import BuildOptions
from optdnn.errors import NotMet, ShapeError, UsageError
from optdnn.ir.export_onnx import export_model
from optdnn.ir.graph import Graph
from optdnn.models import trained
from optdnn.ops.quant import DequantizeAttrs, QuantizeAttrs
from optdnn.passes.assign_precision import AssignPrecision
from optdnn.passes.base import PassContext, PassReport, Refused
from optdnn.passes.support.precision import PrecisionPlan
from optdnn.passes.support.precision_choices import choices
from optdnn.passes.support.precision_report import PrecisionLog, half_risks, hazards, outcome
from optdnn.passes.support.ranges import Calibration, Range
from optdnn.runtime.file.requires import cpu_flags
from optdnn.types import FP16

needs_libraries()


def built(name: str, precision: str = "int8", **options: Any) -> Any:
    found = trained.load(name)
    shapes = {"x": (None, *found.x.shape[1:])}
    data = None if options.pop("without_data", False) else trained.calibration(name)[:64]
    return build_verbose(
        found.path, BuildOptions(target="cpu", precision=precision, threads=1, shapes=shapes, calib=data, **options)
    )


def accuracy(name: str, build: Any) -> float:
    found = trained.load(name)
    return float((build.engine.run({"x": found.x})["logits"].argmax(1) == found.y).mean())


@pytest.mark.parametrize("library", sweep(["openvino", "onnxruntime"], "openvino"))
def test_int8_runs_in_int8_and_keeps_its_accuracy(library: str) -> None:
    build = built("digits_resnet", tactics=library, strict_precision=library == "openvino")
    reported = build.engine.meta["precision"]
    assert trained.load("digits_resnet").accuracy - accuracy("digits_resnet", build) <= 0.005
    assert {r.asked.kind for r in build.precisions} >= {"Conv", "Gemm"}
    convolutions = [r for r in build.precisions if r.asked.kind == "Conv"]
    assert len(convolutions) == 10
    assert all(r.asked.precision == "int8" for r in convolutions)
    assert reported["calibration"] == {"method": "mse", "batches": 8}
    if library == "openvino":
        assert reported["runs"]["int8"] == 11
        assert reported["differs"] == []
        assert build.report()["executed"][0]["executed"].get("u8", 0) >= 11
    else:  # a convolution with a residual in its epilogue is no operator of ONNX Runtime
        differs = [r for r in build.precisions if r.differs]
        assert 0 < len(differs) < 10
        assert {r.reason for r in differs} == {"onnxruntime runs it in fp32"}


def test_strict_precision_is_an_error_that_names_them() -> None:
    with pytest.raises(NotMet, match=r"operators do not run .*\n.*conv2/Conv.*: int8 was asked for, it runs in fp32"):
        built("digits_resnet", tactics="onnxruntime", strict_precision=True)


def test_fp32_is_asked_for_and_runs() -> None:
    build = built("digits_mobile", "fp32", without_data=True, strict_precision=True)
    assert build.engine.meta["precision"]["runs"] == {"fp32": len(build.precisions)}
    if "avx512_bf16" not in (cpu_flags() or ()):
        pytest.skip("this processor has no bf16 arithmetic")
    bf16 = built("digits_mobile", "bf16", without_data=True, tactics="openvino")
    assert bf16.engine.meta["precision"]["runs"]["bf16"] >= 16
    assert all(r["reason"] for r in bf16.engine.meta["precision"]["differs"])


@pytest.mark.slow
def test_pins_by_node_reach_the_library() -> None:
    build = built("digits_resnet", tactics="openvino", precision_map={"/fc/*": "fp32", "/blocks/blocks.3/*": "fp32"})
    rows = {r.asked.key: r for r in build.precisions}
    assert rows["logits"].runs == rows["logits"].asked.precision == "fp32"
    assert [r.runs for r in build.precisions if r.asked.kind == "Conv"].count("int8") == 8


def test_int8_without_data_or_on_another_target_is_refused() -> None:
    with pytest.raises(UsageError, match="needs calibration data"):
        built("digits_resnet", without_data=True)
    for options in ({"precision": "fp8"}, {"precision": "int8+fp16"}, {"precision_map": {"a": "fp16"}}):
        with pytest.raises(UsageError, match="is for GPUs"):
            BuildOptions(target="cpu", **options)  # type: ignore[arg-type]
    for precision in ("int4", "bf16+int8", "int8+"):
        with pytest.raises(UsageError, match="precision"):
            BuildOptions(target="cpu", precision=precision)
    with pytest.raises(UsageError, match="calibrator 'max'"):
        BuildOptions(calibrator="max")


@pytest.mark.slow
def test_the_same_build_gives_the_same_bytes(tmp_path: Path) -> None:
    written = []
    for k in range(2):
        build = built("digits_resnet", tactics="openvino", timing_cache=tmp_path / "times.json")
        build.engine.save(tmp_path / f"{k}.engine")
        written.append((tmp_path / f"{k}.engine").read_bytes())
    assert written[0] == written[1]


# ---------------------------------------------------------------- the contract on graphs


def assigned(
    graph: Graph, plan: PrecisionPlan, calibration: Calibration | None = None, target: str = "cuda:sm_90a"
) -> PrecisionLog:
    log = PrecisionLog()
    AssignPrecision()(graph, PassContext(target=target, plan=plan, calibration=calibration, precision_log=log))
    return log


def ranges(graph: Graph, size: float = 4.0) -> Calibration:
    found = {o.name: Range(-size, size) for op in graph.ops() for o in op.outputs}
    return Calibration("minmax", found, found)


def test_refusals_are_reported_with_their_reason() -> None:
    n = Net()
    graph = n.done(n.op("Softmax", n.gemm(n.input(2, 8), 4, alpha=0.5)))
    log = assigned(graph, PrecisionPlan("int8", {"Softmax_2": "int8"}), ranges(graph))
    rows = {r.asked.key: r for r in outcome(graph, log)}
    assert (rows["Gemm_1"].runs, rows["Softmax_2"].runs) == ("fp32", "fp32")
    assert rows["Gemm_1"].reason == "a Gemm with alpha, beta or a transposed A has no int8 form"
    assert rows["Softmax_2"].reason == "Softmax has no int8 form"
    n = Net()
    graph = n.done(n.op("Softmax", n.gemm(n.input(2, 8), 4)))
    log = assigned(graph, PrecisionPlan("int8"), ranges(graph))
    assert {r.asked.key: (r.asked.precision, r.runs) for r in outcome(graph, log)} == {
        "Gemm_1": ("int8", "int8"),
        "Softmax_2": ("fp32", "fp32"),  # without an int8 form, and not named: it gets the float precision
    }


def test_a_product_that_stays_float_on_a_gpu_has_the_reason_of_the_pass() -> None:
    n = Net()
    graph = n.done(n.gemm(n.input(2, 8), 4))
    log = assigned(graph, PrecisionPlan("int8", {"Gemm_1": "int8"}), ranges(graph))
    log.asked = [replace(log.asked[0], precision="fp8")]
    refused = PassReport("fold_quantized", refused=[Refused("product", ("Gemm_1",), "no kernel takes it")])
    (row,) = outcome(graph, log, passes=[refused])
    assert row.reason == "no kernel takes it"
    assert outcome(graph, log)[0].reason == "the graph has it in int8"


def test_a_half_quantized_product_says_which_half() -> None:
    n = QNet()
    graph = n.done(n.op("MatMul", n.fake(n.input(2, 8), 0.1), n.const(np.ones((8, 4), np.float32))))
    log = PrecisionLog()
    AssignPrecision()(graph, PassContext(target="cpu", plan=PrecisionPlan("int8"), precision_log=log))
    (row,) = (r for r in outcome(graph, log) if r.asked.kind == "MatMul")
    assert (row.runs, row.reason) == ("fp32", "its input is quantized, but its second operand is not")


def test_a_library_that_runs_otherwise_is_reported() -> None:
    n = Net()
    graph = n.done(n.gemm(n.input(2, 8), 4))
    log = assigned(graph, PrecisionPlan("int8"), ranges(graph))
    (row,) = outcome(graph, log, {"Gemm_1": "fp32"}, "somelib")
    assert row.differs
    assert row.reason == "somelib runs it in fp32"


def test_the_models_own_types_are_as_asked() -> None:
    n = Net(np.float16)
    graph = n.done(n.op("Exp", n.input(3)))
    log = assigned(graph, PrecisionPlan("fp32"), target="cpu")
    (row,) = outcome(graph, log)
    assert (row.asked.precision, row.runs) == ("fp16", "fp16")


def test_a_float_result_of_a_quantized_op_is_a_hazard() -> None:
    n = Net()
    x = n.conv(n.input(1, 4, 6, 6), 4)
    graph = n.done(n.op("Softmax", n.conv(n.op("Sigmoid", x), 4)))
    assigned(graph, PrecisionPlan("int8"), ranges(graph))
    found = hazards(graph)
    assert [(h.key, h.what) for h in found] == [
        ("Conv_1", "its result stays float: Sigmoid Sigmoid_2 reads it"),
        ("Conv_3", "its result stays float: Softmax Softmax_4 reads it"),
    ]
    n = Net()
    x = n.conv(n.input(1, 4, 6, 6), 4)
    graph = n.done(n.op("Sigmoid", x), n.op("Softmax", x))
    assigned(graph, PrecisionPlan("int8"), ranges(graph))
    assert [h.what for h in hazards(graph)] == ["its result stays float: Sigmoid Sigmoid_2, Softmax Softmax_3 read it"]
    n = Net()
    graph = n.done(n.conv(n.conv(n.input(1, 4, 6, 6), 4), 4))
    assigned(graph, PrecisionPlan("int8"), ranges(graph))
    assert hazards(graph) == []


def test_a_hazard_names_the_first_nodes_of_a_fused_reader() -> None:
    n = Net()
    graph = n.done(n.op("Softmax", n.conv(n.input(1, 4, 6, 6), 4)))
    (reader,) = graph.of_kind("Softmax")
    for count, name in ((3, "n0 + n1 + n2"), (4, "n0 + n1 and 2 more"), (12, "n0 + n1 and 10 more")):
        copy = graph.copy()
        copy.set_op(replace(copy.op(reader.id), src=frozenset(f"n{i}" for i in range(count))))
        assigned(copy, PrecisionPlan("int8"), ranges(copy))
        (found,) = hazards(copy)
        assert found.what == f"its result stays float: Softmax {name} reads it"


@pytest.mark.parametrize("scale", [0.0, 1e-42, -0.5])
def test_a_scale_that_is_no_normal_number_is_a_hazard(scale: float) -> None:
    def dequantized(scale: float) -> Graph:
        n = Net()
        x = n.input(4, dtype=np.int8)
        return n.done(n.op("DequantizeLinear", x, n.const(scale), attrs=DequantizeAttrs(axis=0)))

    (found,) = hazards(dequantized(scale))
    assert "is not a normal positive number" in found.what
    assert hazards(dequantized(0.5)) == []


@pytest.mark.parametrize("target", ["cpu", "simulate"])
def test_hazards_are_reported_for_operators_that_later_passes_fold(target: str) -> None:
    n = QNet()
    y = n.op("Softmax", n.qconv(n.fake(n.input(1, 16, 6, 6), 0.02), 16))
    built = build_verbose(export_model(n.done(y)).proto, BuildOptions(target=target))
    (found,) = built.engine.meta["precision"]["hazards"]
    assert "its result stays float: Softmax" in found["what"]


@pytest.mark.parametrize("scale", [0.0, -0.5, float("nan"), float("inf")])
def test_a_scale_that_no_integer_can_have_is_refused(scale: float) -> None:
    n = Net()
    x = n.input(4)
    with pytest.raises(ShapeError, match=r"QuantizeLinear scale .* must be positive and finite") as refused:
        n.op("QuantizeLinear", x, n.const(scale), attrs=QuantizeAttrs(np.dtype(np.int8), 0))
    assert ("all-zero tensor" if np.isfinite(scale) else "nodes of masks") in (refused.value.hint or "")
    if not np.isfinite(scale):
        q = n.input(4, dtype=np.int8, name="q")
        with pytest.raises(ShapeError, match=r"DequantizeLinear scale .* must be finite"):
            n.op("DequantizeLinear", q, n.const(scale), attrs=DequantizeAttrs(axis=0))


def test_fp16_risks_by_calibration_and_by_weights() -> None:
    n = Net()
    x = n.input(1, 8)
    graph = n.done(n.op("Add", n.op("Mul", x, 1e5), n.op("Relu", x)))
    plan = PrecisionPlan("fp16", base="fp16")
    big = Calibration("minmax", {}, {"Mul_1": Range(-3.0, 7e4), "Relu_2": Range(0.0, 1e-5), "Add_3": Range(-1.0, 1.0)})
    assert sorted((r.key, r.what.split(":")[0]) for r in half_risks(graph, plan, big)) == [
        ("Mul_1", "overflow"),
        ("Relu_2", "underflow"),
    ]
    assert "reaches 7e+04, fp16 ends at 65504" in " ".join(r.what for r in half_risks(graph, plan, big))
    assert half_risks(graph, PrecisionPlan("bf16", base="bf16"), big) == []
    n = Net()
    x = n.input(1, 8)
    heavy = n.op("MatMul", x, n.const(np.full((8, 4), 9e3)))
    tiny = n.op("MatMul", x, n.const(np.full((8, 4), 1e-9)))
    mask = n.op("Add", x, n.const(np.full((1, 8), 1e9)))
    n.graph.add_output(tiny, "tiny")
    n.graph.add_output(mask, "mask")
    graph = n.done(heavy)
    found = {r.key: r.what for r in half_risks(graph, plan, None)}
    assert found["MatMul_1"] == "overflow: its weights sum to 7.2e+04, so that operands of 1 may give more than 65504"
    assert "100% of the constant" in found["MatMul_2"]
    assert "reaches 1e+09" in found["Add_3"]
    log = assigned(graph, plan)
    assert {r.key for r in log.risks} == {"MatMul_1", "MatMul_2", "Add_3"}
    assert graph.of_kind("MatMul")[0].outputs[0].type.dtype == FP16


@pytest.mark.parametrize(("number", "reported"), [(-3.4e38, False), (1e9, True)])
def test_a_mask_that_hides_keys_is_no_risk(number: float, reported: bool) -> None:
    n = Net()
    x = n.input(1, 2, 4, 8)
    mask = np.where(np.arange(4) < 3, -0.5, number) * np.ones((1, 1, 4, 1))
    graph = n.done(n.op("Attention", x, x, x, n.const(mask)))
    found = half_risks(graph, PrecisionPlan("fp16", base="fp16"), None)
    assert any("overflow: the constant" in r.what for r in found) == reported


@pytest.mark.slow
def test_the_command_line_reports_the_actual_precision(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez(tmp_path / "data.npz", x=trained.calibration("digits_resnet")[:32], y=np.arange(32))
    arguments = f"""build {trained.load("digits_resnet").path} --target cpu --precision int8 --threads 1 --shape x=?x1x8x8
        --calib {tmp_path}/data.npz --calibrator mse --calib-cache {tmp_path}/c.json --tactics onnxruntime""".split()
    assert run([*arguments, "-o", f"{tmp_path}/e.engine"]) == 0
    assert "asked for int8, runs in fp32: onnxruntime runs it in fp32" in capsys.readouterr().out
    assert (tmp_path / "c.json").exists()
    assert run([*arguments, "--strict-precision", "-o", f"{tmp_path}/s.engine"]) == 7
    assert not (tmp_path / "s.engine").exists()
    assert run([*arguments, "--pin", "nonsense"]) == 2


# ---------------------------------------------------------------- GPUs: what the kernels do, not what the graph allows


def rows_on(
    target: str, graph: Graph, precision: str = "fp32", **options: Any
) -> dict[str, tuple[str, str, str | None]]:
    """Kind of an op -> its requested precision, its actual precision, and the reason."""
    rng = np.random.default_rng(0)
    (x,) = (graph.op(i).outputs[0] for i in graph.inputs)
    data = rng.standard_normal((4, *x.type.static_shape), np.float32) if precision in ("int8", "fp8") else None
    build = build_verbose(
        export_model(graph).proto,
        BuildOptions(
            target=target, precision=precision, tactics="auto" if target == "simulate" else "heuristic", no_cubins=True,
            calib=None if data is None else [{"x": a} for a in data], **options,
        ),
    )  # fmt: skip
    return {
        r.asked.kind: (r.asked.precision, r.runs, r.reason)
        for r in build.precisions
        if r.asked.kind in ("Conv", "MatMul", "Gemm")
    }


def product() -> Graph:
    n = Net()
    return n.done(n.conv(n.input(2, 16, 8, 8), 32))


@pytest.mark.parametrize("arch", ["sm_80", "sm_86"])
def test_an_architecture_without_kernels_of_fp8_is_reported(arch: str) -> None:
    target = f"cuda:{arch}"
    why = f"there are no kernels of fp8 for {arch}"
    assert rows_on(target, product(), "fp8") == {"Conv": ("fp8", "fp32", why)}
    assert rows_on("simulate", product(), "fp8") == {"Conv": ("fp8", "fp8", None)}
    (choice,) = (c for c in choices(product(), target) if c.kind == "Conv")
    assert choice.refused["fp8"] == why, "and precision auto is not offered it"
    with pytest.raises(NotMet, match=why):
        rows_on(target, product(), "fp8", strict_precision=True)


@pytest.mark.parametrize(
    ("arch", "precision"),
    [("sm_80", "int8"), ("sm_86", "int8"), ("sm_89", "int8"), ("sm_89", "fp8"), ("sm_80", "tf32"), ("sm_86", "tf32")],
)
def test_requested_precisions_run_before_hopper(arch: str, precision: str) -> None:
    assert rows_on(f"cuda:{arch}", product(), precision) == {"Conv": (precision, precision, None)}


def test_tf32_that_no_kernel_of_the_machine_has_is_reported() -> None:
    n = Net()
    depthwise = n.done(n.conv(n.input(2, 16, 8, 8), 16, group=16))
    for target in ("simulate", "cuda:sm_86"):
        (row,) = rows_on(target, depthwise, "tf32").values()
        assert row[:2] == ("tf32", "fp32"), "its kernel multiplies in fp32"
        assert row[2] == f"no kernel of {target} has that precision for it: another runs it in fp32"


def test_a_model_of_integers_that_a_gpu_computes_on_floats_is_reported() -> None:
    n = QNet()
    graph = n.done(n.fake(n.qconv(n.fake(n.input(2, 16, 8, 8), 0.03), 32), 0.05))
    for target in ("simulate", "cuda:sm_80"):
        assert rows_on(target, graph)["Conv"][:2] == ("int8", "int8")
    n = QNet()
    a = n.fake(n.input(2, 4, 16, 16), 0.03)
    graph = n.done(n.fake(n.op("MatMul", a, a), 0.05))
    asked, runs, why = rows_on("simulate", graph)["MatMul"]
    assert (asked, runs) == ("int8", "fp32")
    assert why


def test_operators_without_an_integer_kernel_on_a_gpu_are_not_quantized() -> None:
    n = Net()
    x = n.input(1, 16, 6, 6, 6)
    assert rows_on("simulate", n.done(n.conv(x, 16, group=16)), "int8") == {
        "Conv": ("int8", "fp32", "there is no kernel on integers for 3 spatial axes")
    }
    n = Net()
    x = n.op("Relu", n.input(2, 16, 16))
    assert rows_on("simulate", n.done(n.op("MatMul", x, x)), "int8") == {
        "MatMul": ("int8", "fp32", "there is no kernel on integers for two computed factors")
    }
