"""Times of a model, for machines that are not at hand."""

from __future__ import annotations

import pytest
from support.net import Net

from optdnn.config import TARGETS
from optdnn.passes.support.precision import key
from optdnn.precision.latency import ROOFLINES, predicted_times

ARCHS = [t.partition(":")[2] for t in TARGETS if t.startswith("cuda:")]
PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "int8", "fp8")


@pytest.mark.parametrize("arch", ARCHS)
def test_every_gpu_that_can_be_named_has_a_machine_of_its_own(arch: str) -> None:
    n = Net()
    graph = n.done(n.conv(n.input(8, 256, 32, 32), 256))
    (conv,) = [op for op in graph.ops() if op.kind == "Conv"]
    found = predicted_times(graph, f"cuda:{arch}", {key(conv): PRECISIONS})
    assert "nothing was measured" in found.source
    assert ROOFLINES[arch].name in found.source
    times = found.table[key(conv)]
    assert ("fp8" in times) == (arch in ("sm_89", "sm_90a")), "fp8's products begin with sm_89"
    assert set(PRECISIONS) - {"fp8"} <= set(times)
    assert times["fp32"].us > times["tf32"].us > times["fp16"].us == times["bf16"].us > times["int8"].us


def test_machines_differ() -> None:
    assert len({m.name for m in ROOFLINES.values()}) == len(ROOFLINES)
    assert {arch: m.name for arch, m in ROOFLINES.items()} == {
        "sm_90a": "H200", "sm_89": "L40S", "sm_86": "A40", "sm_80": "A100",
    }  # fmt: skip
    for m in ROOFLINES.values():  # tensor cores: each halving of the operands doubles their rate
        assert m.ops["fp16"] / m.ops["tf32"] == pytest.approx(2, rel=0.02)
        assert m.ops["int8"] / m.ops["fp16"] == pytest.approx(2, rel=0.02)
