"""A product of rows with packed weights as plain data, and the shared parts of its kernels' launches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from optdnn.kernels.launch import Parameters
from optdnn.kernels.packed import tiles
from optdnn.kernels.problem import WithEpilogue
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.gpu_facts import capability_of, no_kernels

FLOAT8 = "fp8_e4m3"
CODES = ("uint2", "uint4", "uint8", FLOAT8)
"""Types of weight codes that the kernels read."""
BANDWIDTH = 4.3e12
"""Bytes per second that reads reach from an H200's memory."""
PASSING = 32 << 20
"""Weights of at least this many bytes would fill half of L2: they are evicted first, and leave L2 to tensors that fit."""


@dataclass(frozen=True)
class Problem(WithEpilogue):
    """``rows`` rows of ``depth`` elements times packed weights of ``columns`` channels.

    A code has ``bits`` bits; ``block`` codes share a scale (``depth``: one block per channel). ``scale`` and ``zeros`` are names of
    element types; with ``zeros`` "", the zero point is half of the integer's range. ``norm``: the rows are normalized first
    (RMSNormalization). ``beside``: stages of a second product with weights of the same form; the epilogue reads its result.
    """

    rows: int
    columns: int
    depth: int
    code: str
    bits: int
    block: int
    scale: str = "float16"
    zeros: str = ""
    epilogue: tuple[render.Stage, ...] = (("bias",),)
    dtype: str = "float16"
    norm: bool = False
    beside: tuple[render.Stage, ...] | None = None

    @cached_property
    def chunks(self) -> int:
        """Chunks of K in a tile."""
        return tiles.chunks_of(self.depth, self.bits)

    @cached_property
    def chunk(self) -> int:
        """Codes along K in a chunk."""
        return tiles.chunk_depth(self.bits)

    @cached_property
    def tiles(self) -> int:
        """Tiles of 16 channels."""
        return -(-self.columns // tiles.CHANNELS)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the codes."""
        return self.tiles * self.chunks * tiles.CHUNK_BYTES

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and zero points."""
        blocks = self.columns * -(-self.depth // self.block)
        return self.weight_bytes + blocks * (self.scale_bytes + self.zero_bytes)

    @cached_property
    def scale_bytes(self) -> int:
        """Bytes of a scale."""
        return 4 if self.scale == "float32" else 2

    @cached_property
    def zero_bytes(self) -> int:
        """Bytes of a zero point; 0 without zero points."""
        return {"": 0, "uint8": 1}.get(self.zeros, self.scale_bytes)


def refuse(problem: Problem, arch: str) -> str | None:
    """Why no kernel of this family reads such weights on an architecture, or None."""
    if (why := no_kernels(arch)) is not None:
        return why
    if problem.code not in CODES:
        return f"its weights are {problem.code}, not {', '.join(CODES)}"
    if problem.code == FLOAT8 and capability_of(arch) < (8, 9):
        return f"{arch} has no instruction that converts 8-bit floats"
    if problem.dtype not in ("float16", "bfloat16"):
        return f"its rows are 16-bit floats, not {problem.dtype}"
    if problem.block < 16:
        return f"its blocks have {problem.block} weights (at least 16 are needed)"
    return None


def defines(problem: Problem) -> dict[str, int]:
    """The constants of ``packed.cuh``."""
    zeros = {"": 0, "uint8": 1}.get(problem.zeros, 2)
    return {
        "BITS": problem.bits, "FLOAT_CODES": int(problem.code == FLOAT8), "GROUPS": tiles.groups_of(problem.bits, problem.block),
        "SCALE_FLOAT": int(problem.scale == "float32"), "SCALE_BF16": int(problem.scale == "bfloat16"), "ZEROS": zeros,
        "PASSING": int(problem.weight_bytes >= PASSING),
    }  # fmt: skip


def put_weights(parameters: Parameters, problem: Problem, prefix: str = "") -> Parameters:
    """Appends the fields of ``PackedWeights``. Operands, each with ``prefix``: ``tiles``, ``scales``, and ``zeros`` with zero points."""
    parameters.pointer(f"{prefix}tiles", f"{prefix}scales", f"{prefix}zeros" if problem.zeros else None)
    sets = tiles.sets_of(problem.depth, problem.bits, problem.block)
    shift = tiles.set_shift(problem.depth, problem.bits, problem.block)
    parameters.i32(problem.chunks, sets, shift)
    return parameters


def product_parameters(problem: Problem, *, pairs: bool = False) -> Parameters:
    """The first fields of a product's launch. Operands: ``x``, the operands of :func:`put_weights`, ``bias`` (fp32, padded to a multiple
    of four columns), ``residual``, ``output``. ``pairs``: the kernel also takes a second product's weights (prefix ``beside_``) and
    ``beside_bias``, null pointers if there is only one product."""
    parameters = put_weights(Parameters().pointer("x"), problem)
    parameters.pointer("bias", "residual" if problem.residual else None, "output")
    if pairs and problem.matrices > 1:
        put_weights(parameters, problem, "beside_").pointer("beside_bias")
    elif pairs:
        parameters.pointer(None, None, None).i32(0, 0, 0).pointer(None)
    return parameters
