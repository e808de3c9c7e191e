"""The recipe of a megakernel (``megakernel.cu``) and its use of shared memory, from the kinds of its jobs."""

from __future__ import annotations

import re
from dataclasses import dataclass

from optdnn.kernels.launch import template_options
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.compile.nvrtc import Recipe
from optdnn.runtime.cuda.gpu_facts import GpuFacts, on_every_gpu

WARPS, THREADS = 16, 640
"""Consumer warps, which read slots; and threads of a block, including the producer warps, which load slots."""
TILE, PITCH = 16, 1024 + 64
"""Columns of a slot of weights, and bytes from a column to the next."""
SLOT_BYTES = TILE * PITCH
STAGE = 512
"""Elements of K in a slot."""
TILE_KEYS, KEY_WARPS, MOST_SPLITS = 64, 4, 32
REQUESTS = 2
"""Slots that a block requests at a time. On an H200, 16 layers of width 2,048 without the head took 309 us with 2 slots, 318 with 3, 342
with 4, and 370 with all free slots."""
LONG_REQUESTS = 4
"""The same for a job with more than twice as many slots as the ring."""
LEAST_SLOTS = 6
JOB_BYTES, SINK_BYTES, HEADER = 192, 16, 16
"""Bytes of a job after its kind, and of the parameters before the first job."""
MOST_PARAMETERS = 32764
"""Bytes of a kernel's parameters from Volta on (CUDA C++ Programming Guide)."""
MOST_KINDS = 6
ATTENTION_KIND = 6


@dataclass(frozen=True, order=True)
class ProductKind:
    """Jobs that share code: ``rows`` rows of ``depth`` elements times a matrix (``paired``: two matrices). ``functions``: C++ of the
    epilogues of ``gemv.cu``."""

    rows: int
    columns: int
    depth: int
    norm: bool
    paired: bool
    residual: bool
    functions: str

    @property
    def tiles(self) -> int:
        """Tiles of 16 columns."""
        return -(-self.columns // TILE)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return (1 + self.paired) * self.columns * self.depth * 2

    def shared_bytes(self, blocks: int) -> int:
        """Bytes of shared memory in addition to the ring: accumulators of the warps, sums of squares, and rows (two buffers if they are
        normalized)."""
        sums = -(-self.tiles // blocks) * (1 + self.paired) * WARPS * self.rows * TILE * 4
        filled = -(-self.depth // STAGE) * STAGE
        return sums + WARPS * self.rows * 4 + (1 + self.norm) * self.rows * filled * 2


@dataclass(frozen=True, order=True)
class AttentionKind:
    """Attention of one position: ``heads`` heads of keys (of the whole batch), each with ``group`` queries."""

    heads: int
    group: int
    features: int
    turned: int
    interleaved: bool = False
    softcap: bool = False
    sinks: bool = False

    def splits(self, blocks: int) -> int:
        """Blocks that share a head."""
        return min(MOST_SPLITS, blocks // self.heads)

    @property
    def found(self) -> int:
        """Floats of a warp's partial result."""
        return -(-self.group * (self.features + 2) // 4) * 4

    def partial_bytes(self, blocks: int) -> int:
        """Bytes that the blocks of a head exchange, in packets of one float."""
        return self.heads * self.splits(blocks) * self.group * (self.features + 2) * 8

    def shared_bytes(self) -> int:
        """Bytes of shared memory in addition to the ring: queries, the new rows, the partial result of each warp, and sinks."""
        rows = 8 * -(-self.group // 8) + 2
        return rows * (self.features + 32) * 2 + KEY_WARPS * self.found * 4 + (4 * self.group if self.sinks else 0)


@dataclass(frozen=True)
class Kinds:
    """All kinds of a megakernel's jobs."""

    products: tuple[ProductKind, ...]
    attention: AttentionKind | None
    dtype: str

    @property
    def job_bytes(self) -> int:
        """Bytes of a job's own parameters."""
        return JOB_BYTES + (SINK_BYTES if self.attention is not None and self.attention.sinks else 0)

    @property
    def most_jobs(self) -> int:
        """Most jobs of a launch: they have to fit its parameters."""
        return (MOST_PARAMETERS - HEADER) // (self.job_bytes + 16)

    def number(self, kind: ProductKind | AttentionKind) -> int:
        """The kernel's number of a kind."""
        return self.products.index(kind) if isinstance(kind, ProductKind) else ATTENTION_KIND


def refuse_product(kind: ProductKind, weights_at: int, gpu: GpuFacts) -> str | None:
    """Why a product cannot be a job of a megakernel, or None. ``weights_at``: offset of the weights in their buffer, in bytes."""
    if kind.rows > 1:
        return f"it has {kind.rows} rows (one is needed)"
    if kind.depth % 8 or weights_at % 16:
        return "copies of 16 bytes need a depth that is a multiple of 8, and weights that are aligned"
    if kind.columns % 2:
        return f"jobs exchange pairs of results, and {kind.columns} is not even"
    if (needed := least_shared(kind.shared_bytes(on_every_gpu(gpu)))) > gpu.shared_per_block:
        return f"{needed} bytes of shared memory exceed {gpu.shared_per_block}"
    return None


def refuse_attention(kind: AttentionKind, gpu: GpuFacts) -> str | None:
    """Why attention cannot be a job of a megakernel, or None."""
    if kind.heads > (blocks := on_every_gpu(gpu)):
        return f"{kind.heads} heads of keys are more than {blocks} blocks"
    if TILE_KEYS * kind.features * 2 > SLOT_BYTES:
        return f"a slot does not hold {TILE_KEYS} keys of {kind.features} features"
    if kind.group > 8:
        return f"groups of {kind.group} queries do not fit the registers"
    return None


def least_shared(beside: int) -> int:
    """Bytes of shared memory of a block with a ring of :data:`LEAST_SLOTS` slots and ``beside`` further bytes."""
    return LEAST_SLOTS * (SLOT_BYTES + 16) + 128 + beside


def slots(kinds: Kinds, gpu: GpuFacts) -> tuple[int, int]:
    """Slots of the ring, and bytes of shared memory of a block."""
    beside = max(
        [k.shared_bytes(on_every_gpu(gpu)) for k in kinds.products]
        + [kinds.attention.shared_bytes() if kinds.attention else 0]
    )
    found = (gpu.shared_per_block - 128 - beside) // (SLOT_BYTES + 16)
    return found, -(-found * (SLOT_BYTES + 16) // 128) * 128 + beside


def recipe(kinds: Kinds, run: int, gpu: GpuFacts) -> Recipe:
    """The kernel's recipe. ``run``: number of jobs of the whole run."""
    defines = {
        "LEAST_BLOCKS": on_every_gpu(gpu), "RUN": run, "MOST_JOBS": min(run, kinds.most_jobs), "JOB_BYTES": kinds.job_bytes, "SLOTS": slots(kinds, gpu)[0],
        "SLOT_BYTES": SLOT_BYTES, "REQUESTS": REQUESTS,
        "LONG_REQUESTS": LONG_REQUESTS, "KINDS": len(kinds.products), "ATTENTION": int(kinds.attention is not None),
    }  # fmt: skip
    functions = []
    for n, kind in enumerate(kinds.products):
        values = (kind.rows, kind.columns, kind.depth, int(kind.norm), int(kind.paired), int(kind.residual))
        names = ("ROWS", "COLUMNS", "DEPTH", "NORM", "PAIRED", "RESIDUAL")
        defines |= {f"{name}_{n}": value for name, value in zip(names, values, strict=True)}
        beside = "" if kind.paired else render.epilogue((), "epilogue_beside")  # the kernel needs one for each kind
        functions.append(re.sub(r"\b(epilogue(?:_beside)?)\(", rf"\1_{n}(", f"{kind.functions}\n{beside}"))
    if (a := kinds.attention) is not None:
        defines |= {
            "SPLITS": a.splits(on_every_gpu(gpu)), "HEADS": a.heads, "GROUP": a.group, "HEAD": a.features, "TURNED": a.turned,
            "INTERLEAVED": int(a.interleaved), "SOFTCAP": int(a.softcap), **({"SINKS": 1} if a.sinks else {}),
        }  # fmt: skip
    text = "\n".join([render.constants(defines), render.mma(kinds.dtype), *functions, ""])
    return Recipe("megakernel.cu", gpu.arch, {"generated.cuh": text}, template_options(kinds.dtype))
