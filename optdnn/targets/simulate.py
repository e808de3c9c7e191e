"""The target ``simulate``: Hopper's program, each launch run by its meaning in NumPy. Nothing is compiled, tuned or tried."""

from __future__ import annotations

from optdnn.targets.cuda import Cuda


class Simulate(Cuda):
    """The results of ``cuda:sm_90a``, without a GPU."""

    retunable = False
