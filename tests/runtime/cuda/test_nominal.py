"""The GPUs that plans are made for, by architecture."""

from __future__ import annotations

import pytest

from optdnn.config import TARGETS
from optdnn.errors import InternalError
from optdnn.runtime.cuda import nominal
from optdnn.runtime.cuda.conv_cost import h200

TARGETED = [t.partition(":")[2] for t in TARGETS if t.startswith("cuda:")]


@pytest.mark.parametrize("arch", TARGETED)
def test_every_target_has_a_gpu_of_its_capability(arch: str) -> None:
    gpu = nominal.gpu_of(arch)
    assert gpu.arch == arch
    assert nominal.no_gpu(arch) is None
    # CUDA C++ Programming Guide, technical specifications by compute capability.
    kilobytes = {"sm_80": (163, 164), "sm_86": (99, 100), "sm_89": (99, 100), "sm_90a": (227, 228)}[arch]
    assert (gpu.shared_per_block, gpu.shared_per_multiprocessor) == tuple(1024 * n for n in kilobytes)


def test_hoppers_plans_are_those_of_an_h200() -> None:
    assert nominal.gpu_of("sm_90a") == nominal.gpu_of("sm_90") == h200()


def test_of_other_architectures_nothing_is_known() -> None:
    assert nominal.no_gpu("sm_120a") == f"it is compiled for {', '.join(nominal.ARCHS)}, not sm_120a"
    with pytest.raises(InternalError, match="not sm_75"):
        nominal.gpu_of("sm_75")


@pytest.mark.parametrize(
    ("arch", "early"), [("sm_80", False), ("sm_89", False), ("sm_90a", True), ("sm_100a", True), ("sm_120f", True)]
)
def test_launches_begin_early_from_hopper_on(arch: str, early: bool) -> None:
    assert nominal.launches_early(arch) is early
