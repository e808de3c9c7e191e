"""The kernel with which a step on the host suppresses many overlapping boxes (``suppress.cu``).

The number of boxes and of kept ones depends on data, so NonMaxSuppression, and bodies that contain it, run on the CPU. Comparing all
pairs of thousands of boxes takes it tens of milliseconds. The runtime launches this kernel for that part
(:mod:`optdnn.runtime.cuda.suppression`).
"""

from __future__ import annotations

from optdnn.ir.body import bodies
from optdnn.ir.graph import Op
from optdnn.kernels.launch import GENERAL, Launch
from optdnn.runtime.cuda.compile.nvrtc import Recipe
from optdnn.runtime.cuda.suppression import TEMPLATE, THREADS


def launch(arch: str) -> Launch:
    """The kernel, as a launch of one block without parameters: the runtime fills in both."""
    return Launch(Recipe(TEMPLATE, arch, {}, GENERAL), "suppress", (1, 1, 1), THREADS, b"")


def compares_boxes(op: Op) -> bool:
    """Whether ``op``, or an operator in one of its bodies, suppresses boxes."""
    return op.kind == "NonMaxSuppression" or any(compares_boxes(o) for body in bodies(op) for o in body.graph.ops())
