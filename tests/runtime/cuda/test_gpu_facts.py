"""The facts of GPUs that plans are made by."""

from __future__ import annotations

import pytest
from support.needs import why_no_hopper

from optdnn.errors import InternalError
from optdnn.runtime.cuda import device, gpu_facts
from optdnn.runtime.cuda.gpu_facts import GpuFacts, named, of_arch, of_attributes
from optdnn.target_name import BUILDABLE


@pytest.mark.parametrize("arch", BUILDABLE)
def test_every_target_has_a_gpu_of_its_capability(arch: str) -> None:
    gpu = of_arch(arch)
    assert gpu.arch == arch
    assert gpu_facts.no_kernels(arch) is None
    # CUDA C++ Programming Guide, technical specifications by compute capability.
    kilobytes = {"sm_80": (163, 164), "sm_86": (99, 100), "sm_89": (99, 100), "sm_90a": (227, 228)}[arch]
    assert (gpu.shared_per_block, gpu.shared_per_multiprocessor) == tuple(1024 * n for n in kilobytes)


def test_hoppers_plans_are_those_of_an_h200() -> None:
    assert of_arch("sm_90a") == of_arch("sm_90") == named("NVIDIA H200")


def test_of_other_architectures_nothing_is_known() -> None:
    assert gpu_facts.no_kernels("sm_120a") == f"it is compiled for {', '.join(gpu_facts.ARCHS)}, not sm_120a"
    with pytest.raises(InternalError, match="no GPU of architecture sm_75"):
        of_arch("sm_75")
    with pytest.raises(InternalError, match="'NVIDIA T4' are not known"):
        named("NVIDIA T4")
    with pytest.raises(InternalError, match="'hopper' is no architecture"):
        gpu_facts.capability_of("hopper")


@pytest.mark.parametrize(
    ("arch", "early"), [("sm_80", False), ("sm_89", False), ("sm_90a", True), ("sm_100a", True), ("sm_120f", True)]
)
def test_launches_begin_early_from_hopper_on(arch: str, early: bool) -> None:
    assert gpu_facts.launches_early(arch) is early


def attributes(gpu: GpuFacts) -> dict[str, int]:
    """What the driver says of a GPU; its clocks are the highest possible."""
    return {
        "COMPUTE_CAPABILITY_MAJOR": gpu.capability[0],
        "COMPUTE_CAPABILITY_MINOR": gpu.capability[1],
        "MULTIPROCESSOR_COUNT": gpu.multiprocessors,
        "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": gpu.shared_per_block,
        "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR": gpu.shared_per_multiprocessor,
        "L2_CACHE_SIZE": gpu.l2_bytes,
        "CLOCK_RATE": 1_980_000,
        "MEMORY_CLOCK_RATE": 3_201_000,
        "GLOBAL_MEMORY_BUS_WIDTH": 6144,
    }


@pytest.mark.parametrize("gpu", gpu_facts.NAMED, ids=lambda gpu: gpu.name)
def test_a_named_gpu_that_is_there_has_the_facts_of_the_table(gpu: GpuFacts) -> None:
    assert of_attributes(gpu.name, attributes(gpu).__getitem__) == gpu


def test_another_hopper_gpu_has_its_own_facts() -> None:
    """An H100 PCIe: fewer multiprocessors, so fewer clusters at once."""
    told = {**attributes(named("NVIDIA H200")), "MULTIPROCESSOR_COUNT": 114, "L2_CACHE_SIZE": 50 << 20}
    gpu = of_attributes("NVIDIA H100 PCIe", told.__getitem__)
    assert (gpu.arch, gpu.multiprocessors, gpu.l2_bytes, gpu.matrix_ops) == ("sm_90a", 114, 50 << 20, 4096)
    assert (gpu.clock, round(gpu.bandwidth / 1e9)) == (1.98e9, 4917)
    assert [gpu.clusters_at_once(n) for n in (1, 2, 3, 16)] == [114, 57, 25, 6]


def test_a_part_of_a_gpu_is_no_named_gpu() -> None:
    told = {**attributes(named("NVIDIA H200")), "MULTIPROCESSOR_COUNT": 16}
    assert of_attributes("NVIDIA H200", told.__getitem__).clusters_at_once(1) == 16


def test_programs_are_made_for_the_gpu_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    here = of_attributes("GPU", {**attributes(named("NVIDIA H200")), "MULTIPROCESSOR_COUNT": 100}.__getitem__)
    monkeypatch.setattr(device, "_facts_here", lambda: here)
    assert device.facts_for("sm_90a") is here
    assert device.facts_for("sm_80") == of_arch("sm_80"), "another architecture"
    monkeypatch.setattr(device, "_facts_here", lambda: None)
    assert device.facts_for("sm_90a") == named("NVIDIA H200")


@pytest.mark.gpu
@pytest.mark.skipif(why_no_hopper() is not None, reason=why_no_hopper() or "")
def test_an_h200_tells_the_facts_of_the_table() -> None:
    found = device.read_facts()
    if found.name != "NVIDIA H200":
        pytest.skip(f"this GPU is {found.name}")
    assert found == named("NVIDIA H200")
