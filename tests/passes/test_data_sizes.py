"""Operators on the CPU between a GPU's parts stay in fp32, and so do coordinates."""

from __future__ import annotations

from support.check import from_text

from optdnn.ir.graph import Graph
from optdnn.ir.verify import verify
from optdnn.passes.assign_precision import AssignPrecision
from optdnn.passes.base import PassContext, PassReport
from optdnn.passes.support.data_sizes import sized_by_data
from optdnn.passes.support.precision import PrecisionPlan
from optdnn.types import FP16, FP32

TEXT = """<ir_version: 9, opset_import: ["": 17]>
g (float[12,4] boxes, float[12] scores, float[1,3,8,8] image) => (float[m,4] y, float[12,3,2,2] z, float[j,4] w)
<float[3,3,1,1] kernel = {1,2,3,4,5,6,7,8,9}, int64[12] zeros = {0,0,0,0,0,0,0,0,0,0,0,0}, int64[1] flat = {-1}, float two = {2},
 int64[1] end = {6}, int64[1] start = {0}, int64[8] pads = {0,0,0,0,0,0,0,0}>
{ f = Conv(image, kernel) mask = Greater(scores, two) chosen = NonZero(mask) i = Reshape(chosen, flat)
  rows = Gather(boxes, i) y = Mul(rows, two) large = Mul(boxes, two) w = Gather(large, i)
  z = RoiAlign<output_height = 2, output_width = 2, sampling_ratio = 2>(f, large, zeros) }"""


def assigned(plan: PrecisionPlan, target: str = "cuda:sm_90a") -> tuple[Graph, PassReport]:
    graph = from_text(TEXT)
    report = AssignPrecision()(graph, PassContext(target=target, plan=plan))
    verify(graph)
    return graph, report


def test_sizes_that_depend_on_data_stay_fp32() -> None:
    graph, report = assigned(PrecisionPlan("fp16"))
    of_kind = {op.kind: op for op in graph.order()}
    types = [op.outputs[0].type.dtype for op in graph.of_kind("Gather")]
    assert types == [FP32, FP32]
    assert {o.type.dtype for op in graph.of_kind("Mul") if not op.outputs[0].type.is_static for o in op.outputs} == {
        FP32
    }
    assert of_kind["Conv"].outputs[0].type.dtype == FP16
    assert any("its size depends on data" in r.reason for r in report.refused)


def test_arithmetic_on_their_results_alone_stays_fp32() -> None:
    """Padded boxes have a known size, but still come from the CPU; a product with features does not."""
    graph = from_text(
        TEXT.replace("float[j,4] w", "float[4,4] w, float[4,4] v")
        .replace(
            "w = Gather(large, i)",
            "half = Slice(rows, start, end) four = Reshape(half, fours) w = Mul(four, two)\n v = Mul(four, g)",
        )
        .replace("f = Conv", "cut = Slice(boxes, start, ends) g = Relu(cut) f = Conv")
        .replace("int64[1] end = {6}", "int64[1] end = {4}, int64[1] ends = {4}, int64[2] fours = {4, 4}")
    )
    found = {graph.op(i).outputs[0].name: reason for i, reason in sized_by_data(graph).items()}
    assert "computed on the CPU" in found["w"]
    assert "v" not in found
    assert "g" not in found


def test_coordinates_of_regions_stay_as_they_are() -> None:
    """The features are fp16, the regions have the type that they were computed in."""
    graph = from_text(TEXT.replace("large, zeros)", "boxes, zeros)"))
    AssignPrecision()(graph, PassContext(target="cuda:sm_90a", plan=PrecisionPlan("fp16")))
    verify(graph)
    (op,) = graph.of_kind("RoiAlign")
    features, regions = (graph.type(v).dtype for v in op.inputs[:2] if v is not None)
    assert (features, regions, op.outputs[0].type.dtype) == (FP16, FP32, FP16)


def test_a_plan_that_names_the_operator_is_obeyed() -> None:
    graph, _ = assigned(PrecisionPlan("fp32", nodes={"Mul_5": "fp16"}))
    rows = next(op for op in graph.of_kind("Mul") if "Mul_5" in op.src)
    assert rows.outputs[0].type.dtype == FP16


def test_cpu_libraries_round_as_before() -> None:
    _, report = assigned(PrecisionPlan("fp16"), "cpu")
    assert not any("depends on data" in r.reason for r in report.refused)
