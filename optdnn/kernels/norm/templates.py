"""Shared parts of normalization problems: the size of an element, and the recipe of a kernel that ends with an epilogue."""

from __future__ import annotations

from collections.abc import Mapping

from optdnn.kernels.launch import template_options
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.compile.nvrtc import Recipe


class FloatElements:
    """A problem with tensors of one type: 16-bit floats or fp32."""

    dtype: str

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return 4 if self.dtype == "float32" else 2

    def lanes(self, length: int) -> int:
        """Elements of the widest access, up to 16 bytes, that divides ``length`` neighboring elements."""
        return next(n for n in (8, 4, 2, 1) if length % n == 0 and n * self.itemsize <= 16)


def norm_recipe(
    template: str, arch: str, defines: Mapping[str, int], dtype: str, epilogue: tuple[render.Stage, ...]
) -> Recipe:
    """The recipe of a ``template`` with the constants ``defines``. Functions are exact for fp32 only."""
    wide = dtype == "float32"
    text = "\n".join([render.constants(defines), render.epilogue(epilogue, exact=wide), ""])
    return Recipe(template, arch, {"generated.cuh": text}, template_options(dtype, fast=not wide))
