"""Times of a cost model, for machines that are not available."""

from __future__ import annotations

import pytest
from support.net import Net

from optdnn.passes.support.precision import key
from optdnn.precision.latency import Roofline, predicted_times
from optdnn.runtime.cuda.gpu_facts import NAMED, GpuFacts, named

PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "int8", "fp8")


@pytest.mark.parametrize("gpu", NAMED, ids=lambda gpu: gpu.slug)
def test_times_are_predicted_from_the_facts_of_a_gpu(gpu: GpuFacts) -> None:
    n = Net()
    graph = n.done(n.conv(n.input(8, 256, 32, 32), 256))
    (conv,) = [op for op in graph.ops() if op.kind == "Conv"]
    found = predicted_times(graph, f"cuda:{gpu.slug}", gpu, {key(conv): PRECISIONS})
    assert found.source == f"a roofline model of {gpu.name}: nothing was measured"
    times = found.table[key(conv)]
    assert ("fp8" in times) == (gpu.capability >= (8, 9)), "fp8's products begin with sm_89"
    assert set(PRECISIONS) - {"fp8"} <= set(times)
    assert times["fp32"].us >= times["tf32"].us > times["fp16"].us == times["bf16"].us
    assert (times["fp16"].us > times["int8"].us) == (gpu.slug != "b300"), "a B300 has few 8-bit integer operations"


def test_a_roofline_is_half_of_the_peak_rates() -> None:
    ops = Roofline.of(named("a100")).ops
    assert {name: round(rate / 1e6) for name, rate in ops.items()} == {
        "fp32": 10, "tf32": 78, "fp16": 156, "bf16": 156, "int8": 312,
    }  # fmt: skip
