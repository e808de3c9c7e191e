"""The facts of a GPU that plans depend on, as a value: read from the present GPU, or those of a named one.

The cost models are fitted to an H200 (``benchmarks/results/``). For other GPUs these facts limit the configurations and determine
the number of waves; the seconds predicted there only rank the configurations of one kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from optdnn.errors import InternalError

HOPPER = 9
"""Major compute capability of the first GPUs with clusters, TMA and programmatic dependent launch."""


@dataclass(frozen=True)
class GpuFacts:
    """The facts of one GPU. Sizes in bytes.

    ``clock`` is the multiprocessors' clock in Hz, ``bandwidth`` the memory's bytes per second. The next three are of one
    multiprocessor per clock. ``matrix_ops``: dense 16-bit tensor-core operations with fp32 accumulators; ``integer_ops``: the
    same for 8-bit integers; ``lanes``: fp32 multiply-adds (a multiply-add counts as two operations). ``clusters`` pairs cluster
    sizes with the number of such clusters that run at once, each block alone on its multiprocessor; it is empty except on Hopper.
    ``slug`` is the name in a target.
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
    integer_ops: int
    lanes: int
    clusters: tuple[tuple[int, int], ...]
    slug: str

    @property
    def arch(self) -> str:
        """The NVRTC architecture of this GPU: ``sm_90a`` on Hopper, plain ``sm_XY`` elsewhere."""
        return arch_of(*self.capability)

    @property
    def hopper(self) -> bool:
        """Whether ``sm_90a`` kernels run on it."""
        return self.capability[0] == HOPPER

    def clusters_at_once(self, size: int) -> int:
        """The number of clusters of ``size`` blocks that run at once; an unmeasured size takes the room of the next larger one."""
        return next(count for measured, count in self.clusters if measured >= size)


H200_CLUSTERS = ((1, 132), (2, 66), (3, 32), (4, 30), (6, 16), (8, 15), (16, 7))
"""Grids of 32 clusters of four, 40 of three, 24 of five or 20 of six took half as long again as a grid that fits (28 of four, 32
of three, 16 of six)."""
SHARED = {
    **dict.fromkeys(((8, 0), (8, 7)), (166912, 167936)),
    **dict.fromkeys(((8, 6), (8, 9), (12, 0), (12, 1)), (101376, 102400)),
    **dict.fromkeys(((9, 0), (10, 0), (10, 3), (11, 0)), (232448, 233472)),
}
"""Compute capability -> shared memory per block and per multiprocessor (CUDA C++ Programming Guide, technical specifications)."""


def clusters_of(multiprocessors: int) -> tuple[tuple[int, int], ...]:
    """The clusters that a Hopper GPU runs at once: the H200's measured numbers, scaled by the number of multiprocessors."""
    _, whole = H200_CLUSTERS[0]
    return tuple((size, max(1, count * multiprocessors // whole)) for size, count in H200_CLUSTERS)


def _gpu(
    slug: str,
    name: str,
    capability: tuple[int, int],
    multiprocessors: int,
    l2_mib: int,
    clock_ghz: float,
    bandwidth_gb: float,
    matrix_ops: int,
    integer_ops: int,
) -> GpuFacts:
    block, whole = SHARED[capability]
    return GpuFacts(
        name=name,
        capability=capability,
        multiprocessors=multiprocessors,
        shared_per_block=block,
        shared_per_multiprocessor=whole,
        l2_bytes=l2_mib << 20,
        clock=clock_ghz * 1e9,
        bandwidth=bandwidth_gb * 1e9,
        matrix_ops=matrix_ops,
        integer_ops=integer_ops,
        lanes=64 if capability == (8, 0) else 128,
        clusters=clusters_of(multiprocessors) if capability[0] == HOPPER else (),
        slug=slug,
    )


NAMED = (
    # slug, the driver's name, capability, multiprocessors, L2 MiB, GHz, GB/s, 16-bit and 8-bit operations of a multiprocessor.
    # The H200's clock was measured under load. The first GPU of a capability is the default of its architecture.
    _gpu("h200", "NVIDIA H200", (9, 0), 132, 60, 1.755, 4800, 4096, 8192),
    _gpu("h100", "NVIDIA H100 80GB HBM3", (9, 0), 132, 50, 1.755, 3350, 4096, 8192),
    _gpu("h100-pcie", "NVIDIA H100 PCIe", (9, 0), 114, 50, 1.62, 2000, 4096, 8192),
    _gpu("a100", "NVIDIA A100-SXM4-40GB", (8, 0), 108, 40, 1.41, 1555, 2048, 4096),
    _gpu("a100-80gb", "NVIDIA A100-SXM4-80GB", (8, 0), 108, 40, 1.41, 2039, 2048, 4096),
    _gpu("a40", "NVIDIA A40", (8, 6), 84, 6, 1.74, 696, 1024, 2048),
    _gpu("a10", "NVIDIA A10", (8, 6), 72, 6, 1.695, 600, 1024, 2048),
    _gpu("rtx-3090", "NVIDIA GeForce RTX 3090", (8, 6), 82, 6, 1.695, 936, 512, 2048),
    _gpu("orin", "Orin", (8, 7), 16, 4, 1.3, 204.8, 2048, 4096),
    _gpu("l40s", "NVIDIA L40S", (8, 9), 142, 96, 2.52, 864, 1024, 2048),
    _gpu("l4", "NVIDIA L4", (8, 9), 58, 48, 2.04, 300, 1024, 2048),
    _gpu("rtx-4090", "NVIDIA GeForce RTX 4090", (8, 9), 128, 72, 2.52, 1008, 512, 2048),
    _gpu("b200", "NVIDIA B200", (10, 0), 148, 126, 1.85, 8000, 8192, 16384),
    _gpu("b300", "NVIDIA B300", (10, 3), 148, 126, 1.92, 8000, 8192, 512),
    _gpu("thor", "NVIDIA Thor", (11, 0), 20, 32, 1.575, 273, 8192, 16384),
    _gpu("rtx-5090", "NVIDIA GeForce RTX 5090", (12, 0), 170, 96, 2.407, 1792, 512, 2048),
    _gpu("rtx-pro-6000", "NVIDIA RTX PRO 6000 Blackwell Server Edition", (12, 0), 188, 128, 2.617, 1792, 1024, 2048),
    _gpu("gb10", "NVIDIA GB10", (12, 1), 48, 24, 2.5, 273, 1024, 2048),
)
"""GPUs that a target may name. Counts, clocks and rates: NVIDIA's data sheets and architecture whitepapers."""
ARCHS = ("sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_103", "sm_110", "sm_120", "sm_121")
"""Architectures for which kernels without Hopper features are compiled."""


def arch_of(major: int, minor: int) -> str:
    """The NVRTC architecture of GPUs of a compute capability."""
    return f"sm_{major}{minor}" + ("a" if major == HOPPER else "")


def capability_of(arch: str) -> tuple[int, int]:
    """The compute capability of an NVRTC architecture ("sm_90a", "sm_120f"). Raises InternalError for other text."""
    digits = arch.removeprefix("sm_").rstrip("af")
    if not arch.startswith("sm_") or not digits.isdigit() or len(digits) < 2:
        raise InternalError(f"{arch!r} is not an architecture of a GPU")
    return int(digits[:-1]), int(digits[-1])


def on_every_gpu(gpu: GpuFacts) -> int:
    """The number of multiprocessors that this GPU and each named GPU of its architecture have. A grid of blocks that wait for one
    another, each on its own multiprocessor, runs on all such GPUs if it has at most this many blocks."""
    return min(g.multiprocessors for g in (gpu, *NAMED) if g.capability == gpu.capability)


def launches_early(arch: str) -> bool:
    """Whether a launch may ask to begin before the previous one ends (programmatic dependent launch, from Hopper on)."""
    return capability_of(arch)[0] >= HOPPER


def no_kernels(arch: str) -> str | None:
    """Why kernels without Hopper features do not support an architecture, or None."""
    return None if arch in ARCHS else f"it is compiled for {', '.join(ARCHS)}, not {arch}"


def named(slug: str) -> GpuFacts:
    """The facts of one GPU of :data:`NAMED`, by its name in a target. Raises InternalError."""
    gpu = next((gpu for gpu in NAMED if gpu.slug == slug), None)
    if gpu is None:
        raise InternalError(f"the facts of {slug!r} are not known")
    return gpu


def of_arch(arch: str) -> GpuFacts:
    """The named GPU that is the default of an architecture. Raises InternalError if there is none."""
    gpu = next((gpu for gpu in NAMED if arch in (gpu.arch, gpu.arch.rstrip("a"))), None)
    if gpu is None:
        raise InternalError(f"no GPU of architecture {arch} is known")
    return gpu


def fitted(gpu: GpuFacts) -> GpuFacts:
    """The facts for a cost model that is fitted to an H200. Before Hopper the H200's own facts are used: another GPU's number of
    multiprocessors with an H200's bandwidth and latency would describe neither GPU."""
    return gpu if gpu.hopper else of_arch("sm_90a")


def of_attributes(name: str, get: Callable[[str], int]) -> GpuFacts:
    """The facts of a GPU of this name; ``get`` returns its attributes (``CU_DEVICE_ATTRIBUTE_…``).

    Facts that the driver does not give come from the named GPU (clock under load, bandwidth, clusters, rates). An unnamed GPU
    has the rates of the first GPU of its capability; GeForce cards have half of its 16-bit rate.
    """
    capability = (get("COMPUTE_CAPABILITY_MAJOR"), get("COMPUTE_CAPABILITY_MINOR"))
    multiprocessors = get("MULTIPROCESSOR_COUNT")
    known = next((gpu for gpu in NAMED if gpu.name == name and gpu.multiprocessors == multiprocessors), None)
    like = known or next((gpu for gpu in NAMED if gpu.capability == capability), of_arch("sm_80"))
    half = known is None and "GeForce" in name
    return GpuFacts(
        name=name,
        capability=capability,
        multiprocessors=multiprocessors,
        shared_per_block=get("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        shared_per_multiprocessor=get("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR"),
        l2_bytes=get("L2_CACHE_SIZE"),
        clock=known.clock if known else get("CLOCK_RATE") * 1e3,
        bandwidth=known.bandwidth if known else get("MEMORY_CLOCK_RATE") * 1e3 * 2 * get("GLOBAL_MEMORY_BUS_WIDTH") / 8,
        matrix_ops=like.matrix_ops // 2 if half else like.matrix_ops,
        integer_ops=like.integer_ops,
        lanes=like.lanes,
        clusters=clusters_of(multiprocessors) if capability[0] == HOPPER else (),
        slug="" if known is None else known.slug,
    )
