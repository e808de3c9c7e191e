"""Checks of a kernel's source as NVRTC compiles it: offsets of its parameters, and conditions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from optdnn.kernels.launch import Launch
from optdnn.runtime.cuda.compile import nvrtc


def compile_checks(launch: Launch | Any, fields: Mapping[str, int], *conditions: str) -> None:
    """``fields`` of the kernel's ``Params`` are at these offsets (bytes), and ``conditions`` hold. Raises KernelError otherwise."""
    recipe = launch.recipe
    offsets = [f"__INTADDR__(&((Params*)0)->{name}) == {at}" for name, at in fields.items()]
    lines = [f"static_assert({condition});" for condition in (*offsets, *conditions)]
    text = "\n".join([f'#include "{recipe.name}"', *lines, ""])
    nvrtc.compile_recipe(replace(recipe, name="check.cu", generated={**recipe.generated, "check.cu": text}))
