"""What to compile for normalizations that end with an epilogue."""

from __future__ import annotations

from collections.abc import Mapping

from optdnn.kernels.launch import template_options
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.compile.nvrtc import Recipe


def norm_recipe(
    template: str, arch: str, defines: Mapping[str, int], dtype: str, epilogue: tuple[render.Stage, ...]
) -> Recipe:
    """The recipe of a ``template`` with these constants. Functions are exact at fp32 alone."""
    wide = dtype == "float32"
    text = "\n".join([render.constants(defines), render.epilogue(epilogue, exact=wide), ""])
    return Recipe(template, arch, {"generated.cuh": text}, template_options(dtype, fast=not wide))
