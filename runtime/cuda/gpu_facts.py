"""The facts of a GPU that plans depend on, as a value: read from the GPU that is there, else of a named one.

The cost models are fitted to an H200 (``benchmarks/results/``). For other GPUs these facts bound the proposals and count
waves; the seconds predicted there rank the configurations of one kernel, no more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from optdnn.errors import InternalError

HOPPER = 9
"""Major compute capability of the first GPUs with clusters, TMA and programmatic dependent launch."""


@dataclass(frozen=True)
class GpuFacts:
    """The facts of one GPU. Sizes in bytes.

    ``clock`` is that of the multiprocessors in Hz, ``bandwidth`` that of the memory in bytes per second, ``matrix_ops`` the dense
    16-bit tensor-core operations of a multiprocessor per clock with fp32 sums (multiply-adds count two). ``clusters`` pairs sizes
    of clusters with how many of them run side by side, each block alone on its multiprocessor; empty before Hopper.
    """

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_per_block: int
    shared_per_multiprocessor: int
    l2_bytes: int
    clock: float
    bandwidth: float
    matrix_ops: int
    clusters: tuple[tuple[int, int], ...]

    @property
    def arch(self) -> str:
        """The NVRTC architecture of this GPU: ``sm_90a`` on Hopper, plain ``sm_XY`` below."""
        return arch_of(*self.capability)

    @property
    def hopper(self) -> bool:
        """Whether kernels of ``sm_90a`` run on it."""
        return self.capability[0] == HOPPER

    def clusters_at_once(self, size: int) -> int:
        """How many clusters of ``size`` blocks run side by side; sizes that were not measured take the room of the next larger."""
        return next(count for measured, count in self.clusters if measured >= size)


NAMED = (
    # Clusters: grids of 32 clusters of four, 40 of three, 24 of five or 20 of six took half as long again as one that fits (28 of
    # four), benchmarks/results/conv-tiles-h200.json. The clock is the one under load, the bandwidth that of the data sheet.
    GpuFacts(
        "NVIDIA H200", (9, 0), 132, 232448, 233472, 60 << 20, 1.755e9, 4.8e12, 4096,
        ((1, 132), (2, 66), (4, 30), (8, 15), (16, 7)),
    ),
    GpuFacts("NVIDIA L40S", (8, 9), 142, 101376, 102400, 96 << 20, 2.52e9, 0.864e12, 1024, ()),
    GpuFacts("NVIDIA Jetson AGX Orin", (8, 7), 16, 166912, 167936, 4 << 20, 1.3e9, 0.2e12, 1024, ()),
    GpuFacts("NVIDIA A40", (8, 6), 84, 101376, 102400, 6 << 20, 1.74e9, 0.696e12, 1024, ()),
    GpuFacts("NVIDIA A100", (8, 0), 108, 166912, 167936, 40 << 20, 1.41e9, 1.555e12, 2048, ()),
)  # fmt: skip
"""GPUs whose facts stand here, one of each architecture that kernels are written for. Counts, clocks and rates: NVIDIA's data
sheets and architecture whitepapers."""
ARCHS = ("sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_90a")
"""Architectures that kernels which need nothing of Hopper are compiled for in tests."""
_MATRIX_OPS = {gpu.capability: gpu.matrix_ops for gpu in NAMED}


def arch_of(major: int, minor: int) -> str:
    """The NVRTC architecture of GPUs of a compute capability."""
    return f"sm_{major}{minor}" + ("a" if major >= HOPPER else "")


def capability_of(arch: str) -> tuple[int, int]:
    """The compute capability of an NVRTC architecture ("sm_90a", "sm_120f"). Raises InternalError for other text."""
    digits = arch.removeprefix("sm_").rstrip("af")
    if not arch.startswith("sm_") or not digits.isdigit() or len(digits) < 2:
        raise InternalError(f"{arch!r} is no architecture of a GPU")
    return int(digits[:-1]), int(digits[-1])


def launches_early(arch: str) -> bool:
    """Whether a launch may ask to begin before the one in front of it ends (programmatic dependent launch, from Hopper on)."""
    return capability_of(arch)[0] >= HOPPER


def no_kernels(arch: str) -> str | None:
    """Why kernels that need nothing of Hopper are not for an architecture, or None."""
    return None if arch in ARCHS else f"it is compiled for {', '.join(ARCHS)}, not {arch}"


def named(name: str) -> GpuFacts:
    """The facts of one of :data:`NAMED`. Raises InternalError."""
    gpu = next((gpu for gpu in NAMED if gpu.name == name), None)
    if gpu is None:
        raise InternalError(f"the facts of {name!r} are not known")
    return gpu


def of_arch(arch: str) -> GpuFacts:
    """The named GPU that stands for an architecture. Raises InternalError where none does."""
    gpu = next((gpu for gpu in NAMED if arch in (gpu.arch, gpu.arch.rstrip("a"))), None)
    if gpu is None:
        raise InternalError(f"no GPU of architecture {arch} is known")
    return gpu


def fitted(gpu: GpuFacts) -> GpuFacts:
    """The facts for a cost model that is fitted to an H200. Before Hopper they are the H200's own: another GPU's number of
    multiprocessors with an H200's bandwidth and latency would describe neither GPU."""
    return gpu if gpu.hopper else of_arch("sm_90a")


def of_attributes(name: str, get: Callable[[str], int]) -> GpuFacts:
    """The facts of a GPU of this name, whose attributes (``CU_DEVICE_ATTRIBUTE_…``) ``get`` gives.

    Facts that the driver does not give (clusters, the clock under load) are those of the named GPU. Another Hopper GPU has
    clusters in proportion to its multiprocessors, from an H200's.
    """
    capability = (get("COMPUTE_CAPABILITY_MAJOR"), get("COMPUTE_CAPABILITY_MINOR"))
    multiprocessors = get("MULTIPROCESSOR_COUNT")
    gpu = GpuFacts(
        name=name,
        capability=capability,
        multiprocessors=multiprocessors,
        shared_per_block=get("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        shared_per_multiprocessor=get("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR"),
        l2_bytes=get("L2_CACHE_SIZE"),
        clock=get("CLOCK_RATE") * 1e3,
        bandwidth=get("MEMORY_CLOCK_RATE") * 1e3 * 2 * get("GLOBAL_MEMORY_BUS_WIDTH") / 8,
        matrix_ops=_MATRIX_OPS.get(capability, 4096 if capability[0] >= HOPPER else 1024),
        clusters=(),
    )
    known = next((gpu for gpu in NAMED if gpu.name == name and gpu.multiprocessors == multiprocessors), None)
    if known is not None:
        return replace(gpu, clock=known.clock, bandwidth=known.bandwidth, clusters=known.clusters)
    if capability[0] < HOPPER:
        return gpu
    h200 = of_arch("sm_90a")
    clusters = tuple((size, max(1, count * multiprocessors // h200.multiprocessors)) for size, count in h200.clusters)
    return replace(gpu, clusters=clusters)
