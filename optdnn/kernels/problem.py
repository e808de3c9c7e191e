"""The parts that problems of several kernel families have in common."""

from __future__ import annotations

from functools import cached_property

from optdnn.runtime.cuda.compile import render


class WithEpilogue:
    """Base of the problems whose results go through stages."""

    epilogue: tuple[render.Stage, ...]
    beside: tuple[render.Stage, ...] | None = None
    """Stages of a second result of the same form, which ``epilogue`` reads in place of a residual; None: there is none."""

    @cached_property
    def residual(self) -> bool:
        """Whether the epilogue reads a second tensor of the result's shape."""
        return self.beside is None and render.uses_residual(self.epilogue)

    @cached_property
    def matrices(self) -> int:
        """Matrices of weights, or filters, that a launch reads: one for each result."""
        return 1 if self.beside is None else 2
