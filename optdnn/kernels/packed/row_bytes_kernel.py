"""Plans of the kernel that rounds rows to int8 with one scale per row (``row_bytes.cu``)."""

from __future__ import annotations

from optdnn.kernels.launch import Launch, Parameters, template_options
from optdnn.kernels.packed.problem import BANDWIDTH
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.compile.nvrtc import Recipe

VECTOR = 8
"""Elements that a thread loads at a time."""
MOST_VECTORS = 8
"""Most vectors that a thread holds."""
THREADS = (128, 256, 512, 1024)
DEEPEST = THREADS[-1] * MOST_VECTORS * VECTOR
"""Elements of the longest row."""


def _block(stored: int) -> tuple[int, int]:
    """Threads of a block, and vectors of a thread."""
    threads = next(n for n in THREADS if n * MOST_VECTORS * VECTOR >= stored)
    return threads, -(-stored // (threads * VECTOR))


def recipe(stored: int, dtype: str, arch: str) -> Recipe:
    """The recipe for rows of ``stored`` bytes in int8."""
    threads, vectors = _block(stored)
    text = render.constants({"THREADS": threads, "VECTORS": vectors})
    return Recipe("row_bytes.cu", arch, {"generated.cuh": f"{text}\n"}, template_options(dtype))


def launch(rows: int, depth: int, pitch: int, stored: int, dtype: str, arch: str) -> Launch:
    """The launch. Operands: ``x`` (rows of ``depth`` elements with a pitch of ``pitch`` elements), ``numbers`` (int8, with a pitch of
    ``stored`` bytes) and ``scales``."""
    parameters = Parameters().pointer("x", "numbers", "scales").i32(depth, pitch, stored)
    return parameters.launch(recipe(stored, dtype, arch), "row_bytes", rows, _block(stored)[0])


def estimate(rows: int, depth: int) -> float:
    """Predicted seconds. The rows were just written and are in L2."""
    return 1.5e-6 + rows * depth * 3 / (1.5 * BANDWIDTH)
