"""Plans of the kernel that makes rows int8 numbers with a scale each (``row_bytes.cu``)."""

from __future__ import annotations

from optdnn.kernels.launch import Launch, Parameters, template_options
from optdnn.kernels.packed.problem import BANDWIDTH
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.compile.nvrtc import Recipe

VECTOR = 8
"""Numbers that a thread loads at a time."""
MOST_VECTORS = 8
"""That a thread holds."""
THREADS = (128, 256, 512, 1024)
DEEPEST = THREADS[-1] * MOST_VECTORS * VECTOR
"""Numbers of the longest row."""


def _block(stored: int) -> tuple[int, int]:
    """Threads of a block, and vectors of a thread."""
    threads = next(n for n in THREADS if n * MOST_VECTORS * VECTOR >= stored)
    return threads, -(-stored // (threads * VECTOR))


def recipe(stored: int, dtype: str, arch: str) -> Recipe:
    """What to compile for rows that take ``stored`` bytes as numbers."""
    threads, vectors = _block(stored)
    text = render.constants({"THREADS": threads, "VECTORS": vectors})
    return Recipe("row_bytes.cu", arch, {"generated.cuh": f"{text}\n"}, template_options(dtype))


def launch(rows: int, depth: int, pitch: int, stored: int, dtype: str, arch: str) -> Launch:
    """The launch. Operands: ``x`` (rows of ``depth`` numbers at ``pitch`` elements), ``numbers`` (at ``stored`` bytes) and ``scales``."""
    parameters = Parameters().pointer("x", "numbers", "scales").i32(depth, pitch, stored)
    return parameters.launch(recipe(stored, dtype, arch), "row_bytes", rows, _block(stored)[0])


def estimate(rows: int, depth: int) -> float:
    """Predicted seconds: rows were just written, and lie in L2."""
    return 1.5e-6 + rows * depth * 3 / (1.5 * BANDWIDTH)
