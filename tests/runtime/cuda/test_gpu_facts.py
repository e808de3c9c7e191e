"""The facts of GPUs on which plans depend."""

from __future__ import annotations

import pytest

from optdnn.errors import InternalError
from optdnn.runtime.cuda import device, gpu_facts
from optdnn.runtime.cuda.gpu_facts import GpuFacts, named, of_arch, of_attributes
from optdnn.target_name import BUILDABLE, GPUS, TargetName


@pytest.mark.parametrize("arch", BUILDABLE)
def test_every_architecture_has_a_default_gpu(arch: str) -> None:
    gpu = of_arch(arch)
    assert gpu.arch == arch
    assert gpu_facts.no_kernels(arch) is None


def test_targets_and_facts_name_the_same_gpus() -> None:
    assert {gpu.slug: gpu.arch for gpu in gpu_facts.NAMED} == GPUS
    assert len({gpu.name for gpu in gpu_facts.NAMED}) == len(GPUS)


@pytest.mark.parametrize(
    ("slug", "teraflops"),
    [("h200", 949), ("h100-pcie", 756), ("a100", 312), ("l40s", 366), ("l4", 121), ("rtx-4090", 165), ("rtx-3090", 71),
     ("b200", 2243), ("rtx-5090", 209), ("rtx-pro-6000", 504)],
)  # fmt: skip
def test_rates_are_those_of_the_data_sheets(slug: str, teraflops: float) -> None:
    """Dense 16-bit products with fp32 sums. An H200 reaches 989 TFLOP/s at its highest clock; the table has the value under
    load."""
    gpu = named(slug)
    assert gpu.multiprocessors * gpu.clock * gpu.matrix_ops * 1e-12 == pytest.approx(teraflops, rel=0.01)


def test_the_default_of_hopper_is_an_h200() -> None:
    assert of_arch("sm_90a") == of_arch("sm_90") == named("h200")


def test_other_architectures_are_unknown() -> None:
    assert gpu_facts.no_kernels("sm_75") == f"it is compiled for {', '.join(gpu_facts.ARCHS)}, not sm_75"
    with pytest.raises(InternalError, match="no GPU of architecture sm_75"):
        of_arch("sm_75")
    with pytest.raises(InternalError, match="'t4' are not known"):
        named("t4")
    with pytest.raises(InternalError, match="'hopper' is not an architecture"):
        gpu_facts.capability_of("hopper")


@pytest.mark.parametrize(
    ("arch", "early"), [("sm_80", False), ("sm_89", False), ("sm_90a", True), ("sm_100a", True), ("sm_120f", True)]
)
def test_launches_begin_early_from_hopper_on(arch: str, early: bool) -> None:
    assert gpu_facts.launches_early(arch) is early


def attributes(gpu: GpuFacts) -> dict[str, int]:
    """The driver's facts of a GPU. Its clocks are the highest possible ones."""
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
    reported = {**attributes(named("h200")), "MULTIPROCESSOR_COUNT": 78, "L2_CACHE_SIZE": 50 << 20}
    gpu = of_attributes("NVIDIA H20", reported.__getitem__)
    assert (gpu.arch, gpu.multiprocessors, gpu.l2_bytes, gpu.matrix_ops, gpu.slug) == ("sm_90a", 78, 50 << 20, 4096, "")
    assert (gpu.clock, round(gpu.bandwidth / 1e9)) == (1.98e9, 4917)
    assert [gpu.clusters_at_once(n) for n in (1, 2, 3, 16)] == [78, 39, 18, 4]


def test_a_geforce_card_has_half_of_the_rate() -> None:
    reported = attributes(named("l40s"))
    assert of_attributes("NVIDIA GeForce RTX 4080", reported.__getitem__).matrix_ops == 512
    assert of_attributes("NVIDIA RTX 6000 Ada", reported.__getitem__).matrix_ops == 1024


def test_a_part_of_a_gpu_is_no_named_gpu() -> None:
    reported = {**attributes(named("h200")), "MULTIPROCESSOR_COUNT": 16}
    assert of_attributes("NVIDIA H200", reported.__getitem__).clusters_at_once(1) == 16


def test_programs_are_made_for_the_gpu_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    here = of_attributes("GPU", {**attributes(named("h200")), "MULTIPROCESSOR_COUNT": 100}.__getitem__)
    monkeypatch.setattr(device, "_facts_here", lambda: here)
    assert device.facts_for(TargetName("cuda", "sm_90a")) is here
    assert device.facts_for(TargetName("cuda", "sm_80")) == of_arch("sm_80"), "another architecture"
    assert device.facts_for(TargetName.parse("cuda:h100")) == named("h100"), "a GPU that the target names"
    monkeypatch.setattr(device, "_facts_here", lambda: None)
    assert device.facts_for(TargetName("cuda", "sm_90a")) == named("h200")


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("cuda:sm_90a", None),
        ("cuda:h200", None),
        ("cuda:h100", None),
        ("cuda:h100-pcie", "this GPU is NVIDIA H200 (sm_90a, 132 multiprocessors), not h100-pcie"),
        ("cuda:sm_80", "this GPU is NVIDIA H200 (sm_90a, 132 multiprocessors), not sm_80"),
    ],
)
def test_times_of_another_gpu_are_not_taken(target: str, why: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("read_facts", "_facts_here"):
        monkeypatch.setattr(device, name, lambda: named("h200"))
    assert device.differs_here(TargetName.parse(target)) == why


@pytest.mark.hopper
def test_an_h200_tells_the_facts_of_the_table() -> None:
    found = device.read_facts()
    if found.name != "NVIDIA H200":
        pytest.skip(f"this GPU is {found.name}")
    assert found == named("h200")
